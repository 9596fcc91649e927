"""Agent traffic: how much each arm serves, and what arrivals at 70 % of stock's limit feel like."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.serving.arms import EXTRAS, OURS, RUST, Arm, Fleet
from benchmarks.serving.bootstrap import Ratio, paired_ratio
from benchmarks.serving.bounds import bounds
from benchmarks.serving.plan import AGENTS, SLO_FACTOR, Clock, Plan
from benchmarks.serving.session import IDLE_CLOCKS, REQUEST_CLOCKS, Measured, check_prompts, learn, measure
from benchmarks.workload.arrivals import Arrivals, ClosedLoop, OpenLoop, poisson
from benchmarks.workload.build import Builder, Shape
from benchmarks.workload.figures import Slo, run_figures
from benchmarks.workload.text import TextSupply
from benchmarks.workload.workflow import Workflow
from kvcmas_sgl.demo.prompts import PromptMaker

_Times = Callable[[Sequence[Measured]], dict[str, list[float]]]
_Statistic = Callable[[np.ndarray], float]

LOAD = 0.7
# What stock takes for a later token of a lone request here, generously; the report names the limit that follows.
_TPOT_S = 0.5


class AgentBench:
    """Agent traffic of one shape on the servers of a fleet."""

    def __init__(self, fleet: Fleet, prompts: PromptMaker, text: TextSupply, plan: Plan) -> None:
        self.fleet = fleet
        self._prompts = prompts
        self._text = text
        self.plan = plan
        self.builder = self.make_builder()
        self.rate: float | None = None
        self.slo = Slo(float("inf"), _TPOT_S)
        self._turn = 0

    def make_builder(self, **changes: Any) -> Builder:
        """Workflows of the plan's main shape, with some of it changed."""
        plan = self.plan
        settings: dict[str, Any] = {
            "graph": "full",
            "agents": AGENTS,
            "document_tokens": (plan.document_tokens, plan.document_tokens),
            "answer_tokens": plan.answer_tokens,
            "last_tokens": plan.last_tokens,
            "private_tokens": plan.private_tokens,
        }
        return Builder(self._prompts, Shape(**settings | changes), plan.seed, self._text)

    def warm_up(self, arms: Sequence[Arm]) -> None:
        """Make agents' heads resident, as on a busy server."""
        short = self.make_builder(document_tokens=(32, 32), private_tokens=0, answer_tokens=2, last_tokens=2)
        for arm in arms:
            measure(self.fleet, arm, short.workflows(1, "warm-up-"), ClosedLoop(1), "warm-up")

    def prepare(self, arms: Sequence[Arm]) -> dict[str, Any]:
        """Warm all arms up, and let ours learn; seconds of its dense hops."""
        self.warm_up(arms)
        seconds = {}
        for arm in arms:
            if arm.learns:
                seconds[arm.name] = learn(self.fleet, arm, self.builder.workflows(self._learned(arm), "learned-"))
        return {"learning_hop_s": seconds, "workflows": self.plan.learned}

    def _learned(self, arm: Arm) -> int:
        return math.ceil(arm.learns * self.plan.learned)

    def compare(
        self, workflows: Sequence[Workflow], arrivals: Arrivals, arms: Sequence[Arm], title: str
    ) -> list[Measured]:
        """The same workflows on each arm in turn; which goes first changes from call to call."""
        shift = self._turn % len(arms)
        self._turn += 1
        found = [measure(self.fleet, arm, workflows, arrivals, title) for arm in (*arms[shift:], *arms[:shift])]
        check_prompts(found)
        return found

    def saturation(self, arms: Sequence[Arm]) -> dict[str, Any]:
        """Closed loops at every level; an arm's limit is its best level, and sets the rate of what follows."""
        rows = []
        for repeat in range(self.plan.saturation_repeats):
            for level in self.plan.levels:
                flows = self.builder.workflows(self.plan.saturation_workflows, f"saturation-{level}-{repeat}-")
                for entry in self.compare(flows, ClosedLoop(level), arms, f"saturation {level}"):
                    rows.append({"level": level, "repeat": repeat, **self.row(entry)})
        limits = {arm.name: _limit(rows, arm.name) for arm in arms}
        lowest = [row for row in rows if row["arm"] == RUST and row["level"] == min(self.plan.levels)]
        ratios = [
            mine["workflows_per_s"] / theirs["workflows_per_s"]
            for mine in rows
            for theirs in rows
            if (mine["arm"], theirs["arm"]) == (OURS, RUST)
            and all(mine[name] == theirs[name] for name in ("level", "repeat"))
        ]
        ratio = limits[OURS] / limits[RUST] if OURS in limits and RUST in limits else None
        return {
            "workflows_per_s": limits,
            "first_reader_s": float(np.median([row["ttft_first_s"]["p50"] for row in lowest])),
            "throughput_ratio": ratio,
            "throughput_ratio_range": [min(ratios), max(ratios)] if ratios else None,
            "rows": rows,
        }

    def use_limits(self, saturation: Mapping[str, Any]) -> None:
        """Take stock's limit as the rate of arrivals, and what is good from its lightest load."""
        self.rate = saturation["workflows_per_s"][RUST]
        self.slo = Slo(SLO_FACTOR * saturation["first_reader_s"], _TPOT_S)

    def poisson(self, arms: Sequence[Arm], load: float, workflows: int, repeats: int, clock: Clock) -> dict[str, Any]:
        """Poisson arrivals at `load` of stock's limit, stock and ours first; `EXTRAS` where time is left."""
        if self.rate is None:
            raise RuntimeError("the rate of arrivals follows from stock's saturation, which was not measured")
        rate = load * self.rate
        found: list[Measured] = []
        for repeat in range(repeats):
            flows = poisson(self.builder.workflows(workflows, f"poisson-{load}-{repeat}-"), rate, f"{load}-{repeat}")
            found += self.compare(
                flows, OpenLoop(), [arm for arm in arms if arm.name not in EXTRAS], f"poisson {load:.0%}"
            )
            if repeat == 0:
                found += self._extras(arms, flows[: self.plan.extra_workflows], load, clock)
        return {
            "load": load,
            "rate_per_s": rate,
            "slo": asdict(self.slo),
            **comparison(found),
            "against": {name: ratios(found, OURS, name) for name in EXTRAS},
            "rows": [self.row(entry) for entry in found],
        }

    def _extras(self, arms: Sequence[Arm], flows: Sequence[Workflow], load: float, clock: Clock) -> list[Measured]:
        """The same arrivals on the arms of `EXTRAS`, one server at a time: starting and learning take the cores."""
        found: list[Measured] = []
        for arm in arms:
            seconds = flows[-1].arrival_s + 120 + self._learned(arm) * 30
            if arm.name in EXTRAS and clock.has(seconds, f"{arm.name} at {load:.0%}"):
                self.fleet.start([arm])
                self.prepare([arm])
                found.append(measure(self.fleet, arm, flows, OpenLoop(), f"poisson {load:.0%}"))
                check_prompts(found)
                self.fleet.stop([arm.name])
        return found

    def row(self, entry: Measured) -> dict[str, Any]:
        """One run as JSON: figures, the server's side, and every request.

        `request_share` is the scheduler's time in our code while requests waited, over the run's time; `idle_share`
        that which it spent on learning when it had nothing else to do.
        """
        spent = entry.server.seconds
        return {
            "arm": entry.arm,
            **run_figures(entry.run, self.slo),
            "server": asdict(entry.server),
            "request_share": sum(spent.get(name, 0.0) for name in REQUEST_CLOCKS) / entry.run.seconds,
            "idle_share": sum(spent.get(name, 0.0) for name in IDLE_CLOCKS) / entry.run.seconds,
            "run": entry.run.as_json(),
        }


def comparison(found: Sequence[Measured]) -> dict[str, Any]:
    """Ours over stock, and the bounds beside it, from what stock computed."""
    hops = [hop for entry in found if entry.arm == RUST for hop in entry.run.hops if hop.reply.error is None]
    best = bounds(hops)
    return {**ratios(found, OURS), "bounds": best and best.as_json()}


def ratios(found: Sequence[Measured], arm: str, against: str = RUST) -> dict[str, Any]:
    """Times of one arm over another's, over the workflows that both ran, with intervals; None where there are none.

    `ttft_*` are over the hops that read what an earlier hop of the same workflow has read.
    """
    measured: dict[str, Ratio | None] = {}
    for times, statistics in _TIMES:
        mine, theirs = (times([entry for entry in found if entry.arm == name]) for name in (arm, against))
        both = [name for name in mine if name in theirs]
        pairs = [mine[name] for name in both], [theirs[name] for name in both]
        measured |= {name: paired_ratio(*pairs, statistic=statistic) for name, statistic in statistics.items()}
    values: dict[str, Any] = {name: ratio and ratio.value for name, ratio in measured.items()}
    return {**values, "intervals": {name: ratio and ratio.as_json() for name, ratio in measured.items()}}


def _reuse_ttft(found: Sequence[Measured]) -> dict[str, list[float]]:
    by_flow: dict[str, list[float]] = {}
    for hop in (hop for entry in found for hop in entry.run.hops):
        if hop.reuses and hop.reply.error is None:
            by_flow.setdefault(hop.workflow, []).append(hop.reply.ttft_s)
    return by_flow


def _workflow_seconds(found: Sequence[Measured]) -> dict[str, list[float]]:
    return {name: [seconds] for entry in found for name, seconds in entry.run.workflow_s.items()}


def _p99(values: np.ndarray) -> float:
    return float(np.percentile(values, 99))


_TIMES: tuple[tuple[_Times, dict[str, _Statistic]], ...] = (
    (_reuse_ttft, {"ttft_p50_ratio": np.median, "ttft_p99_ratio": _p99}),
    (_workflow_seconds, {"workflow_ratio": np.median}),
)


def _limit(rows: Sequence[dict[str, Any]], arm: str) -> float:
    by_level: dict[int, list[float]] = {}
    for row in rows:
        if row["arm"] == arm:
            by_level.setdefault(row["level"], []).append(row["workflows_per_s"])
    return max(float(np.median(values)) for values in by_level.values())
