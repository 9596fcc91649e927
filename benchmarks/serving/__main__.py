"""Serving: ours against stock SGLang under real arrivals.

    python -m benchmarks.serving --quick

Every arm runs on a server of its own, arms take turns, and all get the same prompts. Plain traffic first, while no
agent has been seen; then ours learns from documents that it never meets again; then closed loops find each arm's limit,
and Poisson arrivals at 70 % of stock's are timed. Sweeps, the comparison that has to stay flat, a second model shape
and other systems follow.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.serving.agents import LOAD, AgentBench
from benchmarks.serving.arms import ARMS, EXTRAS, OFF, OURS, PYTHON, RUST, Arm, Fleet
from benchmarks.serving.load_client import load_client_figures, measure_load_client
from benchmarks.serving.peers import try_peers
from benchmarks.serving.plain import measure_plain, plain_figures
from benchmarks.serving.plan import FULL, PHASES, POOL_TOKENS, QUICK, Clock, Plan
from benchmarks.serving.report import headline, write_reports
from benchmarks.serving.scaling import measure_scaling, scaling_figures
from benchmarks.serving.second_model import measure_second_model
from benchmarks.serving.session import PromptsDiffer
from benchmarks.serving.sweeps import sweep
from benchmarks.workload.arrivals import ClosedLoop
from benchmarks.workload.build import real_text
from kvcmas_sgl.demo.prompts import PromptMaker
from kvcmas_sgl.demo.servers import ServerError
from kvcmas_sgl.prepare_model import ModelError, default_model

_FLAGS = ("--max-total-tokens", str(POOL_TOKENS))
# What a phase takes at least; one that can be left out is not begun with less.
_LOAD_CLIENT_S, _SCALING_S, _SECOND_MODEL_S, _PEERS_S = 60.0, 90.0, 240.0, 150.0


class Benchmark:
    """All phases of one plan; what each found is in `found` and on disk as soon as it is over."""

    def __init__(self, model: str, plan: Plan, reports: Path, found: dict[str, Any]) -> None:
        self.plan = plan
        self.found = found
        self.clock = Clock(plan.budget_s)
        self._model = model
        self._logs = reports / "serving-logs"
        self._raw = reports / "serving-raw.json"
        self._prompts = PromptMaker(model)
        self._text = real_text(self._prompts, plan.seed)

    def run(self) -> None:
        """Run the plan's phases that are not in `found` yet. Raises `ServerError`, `RuntimeError`."""
        todo = [name for name in self.plan.phases if name not in self.found]
        with Fleet(self._model, self._logs, _FLAGS) as fleet:
            if {"plain", "load_client"} & set(todo):
                fleet.start([ARMS[RUST], ARMS[PYTHON], ARMS[OFF]])
                self._phase(todo, "plain", lambda: self._plain(fleet))
                if self.plan.load_repeats and self.clock.has(_LOAD_CLIENT_S, "SGLang's load client"):
                    self._phase(todo, "load_client", lambda: self._load_client(fleet))
                fleet.stop((PYTHON,))
            if {"saturation", "poisson70", "sweeps"} & set(todo):
                pair = [ARMS[RUST], ARMS[OURS]]
                fleet.start(pair)
                bench = AgentBench(fleet, self._prompts, self._text, self.plan)
                self.found["learned"] = bench.prepare(pair)
                self._phase(todo, "saturation", lambda: bench.saturation(pair))
                bench.use_limits(self.found["saturation"])
                self._phase(todo, "poisson70", lambda: self._poisson(bench, pair))
                self._phase(todo, "sweeps", lambda: sweep(bench, self.clock.keeping(self.plan.reserve_s)))
        if "scaling" in todo and self.clock.has(_SCALING_S, "documents and roles"):
            # On a server that has learned nothing yet: what is there before would hide what is added.
            with Fleet(self._model, self._logs / "scaling", _FLAGS) as fleet:
                fleet.start([ARMS[OURS]])
                self._phase(todo, "scaling", lambda: self._scaling(fleet))
        if (
            "second_model" in todo
            and self.plan.second_document
            and self.clock.has(_SECOND_MODEL_S, "the second model shape")
        ):
            make = lambda: measure_second_model(self.plan, self._prompts, self._text, self._logs)  # noqa: E731
            self._phase(todo, "second_model", make)
        if "peers" in todo and self.clock.has(_PEERS_S, "other systems"):
            self._phase(todo, "peers", self._peers)

    def _phase(self, todo: Sequence[str], name: str, work: Callable[[], Any]) -> None:
        if name not in todo:
            return
        self.found[name] = work()
        self._keep(name)

    def _keep(self, name: str) -> None:
        self.found.setdefault("seconds", {})[name] = round(self.clock.seconds, 1)
        self._raw.parent.mkdir(parents=True, exist_ok=True)
        self._raw.write_text(json.dumps({"plan": asdict(self.plan), "found": self.found}) + "\n", encoding="utf-8")
        print(f"{name} done after {self.clock.seconds:.0f} s", file=sys.stderr)

    def _plain(self, fleet: Fleet) -> dict[str, Any]:
        pairs = measure_plain(fleet, self._text.reseeded("plain"), self.plan.plain_rounds)
        return {**plain_figures(pairs), "pairs": [vars(pair) for pair in pairs]}

    def _load_client(self, fleet: Fleet) -> dict[str, Any]:
        plan = self.plan
        return load_client_figures(
            measure_load_client(fleet, self._model, plan.load_prompts, plan.load_repeats, self._logs)
        )

    def _poisson(self, bench: AgentBench, pair: Sequence[Arm]) -> dict[str, Any]:
        plan = self.plan
        arms = [*pair, *(ARMS[name] for name in EXTRAS if plan.extras)]
        return bench.poisson(arms, LOAD, plan.poisson_workflows, plan.poisson_repeats, self.clock)

    def _scaling(self, fleet: Fleet) -> dict[str, Any]:
        plan = self.plan
        windows = measure_scaling(
            fleet, self._prompts, self._text.reseeded("scaling"), plan.scale_documents, plan.scale_roles
        )
        return scaling_figures(windows)

    def _peers(self) -> list[dict[str, Any]]:
        found: dict[str, Any] = {}

        def use(fleet: Fleet, arm: Arm) -> None:
            bench = AgentBench(fleet, self._prompts, self._text, self.plan)
            flows = bench.builder.workflows(1, "peers-")
            found[arm.name] = bench.row(bench.compare(flows, ClosedLoop(1), [arm], "peer")[0])

        tried = try_peers(self._model, self._logs, _FLAGS, use)
        return [{**asdict(entry), "row": found.get(entry.name)} for entry in tried]


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=(__doc__ or "").split("\n\n")[2], allow_abbrev=False
    )
    command.add_argument("--quick", action="store_true", help="a check in 15 minutes: fewer repeats, no sweeps")
    command.add_argument("--phases", default=",".join(PHASES), help="which ones, with commas (default: all)")
    command.add_argument("--resume", action="store_true", help="keep what an earlier run of the same plan has found")
    command.add_argument("--model", help="model folder or hub name (default: SmolLM2-135M-Instruct, made on first use)")
    command.add_argument(
        "--reports", type=Path, default=Path("reports"), metavar="DIR", help="output (default: reports)"
    )
    for name in ("document_tokens", "learned", "plain_rounds", "poisson_workflows", "poisson_repeats",
                 "saturation_workflows", "saturation_repeats", "sweep_workflows", "load_repeats", "scale_documents",
                 "scale_roles", "seed"):  # fmt: skip
        command.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{name} of the plan (plan.py)")
    command.add_argument(
        "--budget-s", type=float, metavar="SECONDS", help="after which nothing is begun that can be left out"
    )
    command.add_argument("--no-extras", action="store_true", help=f"leave these arms out: {', '.join(EXTRAS)}")
    return command


def make_plan(options: argparse.Namespace) -> Plan:
    """The profile with what the command line changes. Raises `ValueError` for a phase that is unknown."""
    phases = tuple(options.phases.split(","))
    for name in phases:
        if name not in PHASES:
            raise ValueError(f"--phases names {name!r}; known are {', '.join(PHASES)}.")
    plan = QUICK if options.quick else FULL
    changed = {name: value for name, value in vars(options).items() if name in asdict(plan) and value is not None}
    extras = plan.extras and not options.no_extras
    return replace(plan, **{**changed, "phases": phases, "extras": extras})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write serving.json, serving.md, serving.html and pictures; returns the exit status."""
    command = parser()
    options = command.parse_args(arguments)
    try:
        plan = make_plan(options)
    except ValueError as error:
        command.error(str(error))
    # Told to stop, it stops its servers, which are in process groups of their own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found = _earlier(options.reports / "serving-raw.json", plan) if options.resume else {}
    kept = [name for name in PHASES if name in found]
    try:
        benchmark = Benchmark(options.model or str(default_model()), plan, options.reports, found)
        benchmark.run()
    except (ModelError, ServerError, PromptsDiffer, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    about = {
        "plan": asdict(plan),
        "profile": "quick" if options.quick else "full",
        "seconds": round(benchmark.clock.seconds, 1),
        "kept_from_an_earlier_run": kept,
        "left_out": benchmark.clock.left_out,
        "machine": {"cores": os.cpu_count(), "cpu": platform.processor() or platform.machine(),
                    "load_average_1min": os.getloadavg()[0]},
    }  # fmt: skip
    write_reports(options.reports, found, about)
    print("\n".join(headline(found)))
    print(f"written to {options.reports}/serving.json, serving.md and serving.html")
    return 0


def _earlier(path: Path, plan: Plan) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    same = {**content["plan"], "phases": None} == json.loads(json.dumps({**asdict(plan), "phases": None}))
    found: dict[str, Any] = content["found"] if same else {}
    return found


if __name__ == "__main__":
    sys.exit(main())
