"""Soak: one server of ours under mixed traffic, faults, aborts and flushes, beside what stock SGLang answered.

    python -m benchmarks.soak --minutes 20

Stock SGLang answers the plain prompts first, and is stopped. Then ours serves agents and plain clients in rounds: load,
with clients that leave in the middle of a prefill, aborts, flushes and injected faults; then quiet, in which what the
server holds is counted and plain prompts are asked alone. Writes soak.json, soak.html and soak.png; the exit status is
1 if anything is wrong with what was seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import requests
from tqdm import tqdm

from benchmarks.soak.probes import OUTPUT_TOKENS, Recorded, ask, ask_together, parting
from benchmarks.soak.report import verdict, write_reports
from benchmarks.soak.server import RATE
from benchmarks.soak.traffic import Load
from benchmarks.soak.watch import Watch, totals
from benchmarks.workload.build import Builder, Shape, real_text
from benchmarks.workload.endpoint import Endpoint
from benchmarks.workload.text import TextSupply
from kvcmas_sgl.demo.prompts import PromptMaker
from kvcmas_sgl.demo.servers import ServerError, ServerProcess, kvcmas_command, server_environment, stock_command
from kvcmas_sgl.prepare_model import ModelError, default_model

_SHAPE = Shape(graph="full", agents=4, document_tokens=(300, 900), system_tokens=96, answer_tokens=16, last_tokens=8)
_FLAGS = ("--chunked-prefill-size", "512")
_PLAIN_TOKENS = (120, 700)
_BUSY_PROMPTS = 24
_ALONE_EACH_ROUND = 2
_FLUSH_EVERY = 6
_SETTLE_S = 20.0
# oneDNN, and torch's layer over it, keep code for each of the last 1,024 shapes that were multiplied: on stock SGLang,
# too, that grows for longer than a soak lasts.
_FEW_PRIMITIVES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
_SAMPLE_S = 5.0


@dataclass(frozen=True)
class Plan:
    """`minutes` of ours, `round_s` seconds of load in a round, `clients` at once, share of calls that fail."""

    minutes: float
    round_s: float
    clients: int
    fault_rate: float
    near_tie: float
    rss_growth: float
    pool_tokens: int
    seed: int


@dataclass
class Found:
    """What was seen beside the load itself. `alone`: plain prompts that were asked alone, by what came of it."""

    stock_busy_equal: int = 0
    stock_busy_parted: list[float] = field(default_factory=list)
    alone_equal: int = 0
    alone_differ: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    rounds: int = 0
    flushes: int = 0


class Soak:
    """Both servers' phases of one plan."""

    def __init__(self, model: str, plan: Plan, reports: Path) -> None:
        self.plan = plan
        self.found = Found()
        self._model = model
        self._logs = reports / "soak-logs"
        self._flags = [*_FLAGS, "--max-total-tokens", str(plan.pool_tokens)]
        prompts = PromptMaker(model)
        self._text = real_text(prompts, plan.seed)
        self._builder = Builder(prompts, _SHAPE, f"soak-{plan.seed}", self._text)
        self._rounds = max(1, round(plan.minutes * 60 / (plan.round_s + 15)))

    def record(self) -> tuple[list[Recorded], list[Recorded]]:
        """Stock's answers: to prompts for the load, and to those that are asked alone. Raises `ServerError`."""
        supply = self._text.reseeded(f"plain-{self.plan.seed}")
        prompts = _prompts(supply, _BUSY_PROMPTS + self._rounds * _ALONE_EACH_ROUND)
        command = stock_command(self._model, flags=self._flags)
        with ServerProcess("stock SGLang", command, self._logs / "stock.log") as server:
            server.wait_ready()
            recorded = []
            for prompt in tqdm(prompts, desc="stock", unit="prompt", file=sys.stderr, mininterval=2.0):
                recorded.append(Recorded(tuple(prompt), ask(server.url, prompt), ask(server.url, prompt)))
            busy = recorded[:_BUSY_PROMPTS]
            requests.post(server.url + "/flush_cache", timeout=60).raise_for_status()
            for entry, again in zip(
                busy, ask_together(server.url, [entry.prompt for entry in busy], self.plan.clients), strict=True
            ):
                parted = parting(entry.cold, again.tokens)
                if parted is None:
                    self.found.stock_busy_equal += 1
                else:
                    self.found.stock_busy_parted.append(parted[1])
        return busy, recorded[_BUSY_PROMPTS:]

    def serve(self, busy: Sequence[Recorded], alone: Sequence[Recorded]) -> dict[str, Any]:
        """Soak ours; returns the report's figures. Raises `ServerError` if it did not even start."""
        plan = self.plan
        environment = {**server_environment(), RATE: str(plan.fault_rate), **_FEW_PRIMITIVES}
        with tempfile.TemporaryDirectory(prefix="kvcmas-soak-") as state:
            flags = [*self._flags, "--kvcmas-state-dir", state, "--kvcmas-max-kl", "0.1", "--kvcmas-check-share", "0.2"]
            command = kvcmas_command(self._model, flags)
            command[command.index("kvcmas_sgl.launch_server")] = "benchmarks.soak.server"
            server = ServerProcess("ours", command, self._logs / "ours.log", environment=environment)
            with server:
                server.wait_ready()
                watch = Watch(server.process.pid)
                load = Load(server.url, self._builder, busy, plan.seed)
                last: dict[str, Any] = {}
                try:
                    last = asyncio.run(self._rounds_of(server, watch, load, list(alone)))
                    server.check_alive()
                except (ServerError, OSError, aiohttp.ClientError) as error:
                    self.found.problems.append(f"the server did not last: {error}")
            self.found.problems += _complaints(self._logs / "ours.log")
        return {
            # Not `asdict`: it rebuilds a Counter from pairs, which counts the pairs.
            "load": {**vars(load.outcome), "total": load.outcome.total},
            "seen": asdict(self.found),
            "samples": [asdict(sample) for sample in watch.samples],
            "totals": last,
        }

    async def _rounds_of(
        self, server: ServerProcess, watch: Watch, load: Load, alone: list[Recorded]
    ) -> dict[str, Any]:
        end = time.monotonic() + self.plan.minutes * 60
        with tqdm(desc="ours", unit="request", file=sys.stderr, mininterval=5.0) as progress:
            while time.monotonic() < end and len(alone) >= _ALONE_EACH_ROUND:
                self.found.rounds += 1
                sampling = asyncio.create_task(_sample(server.url, watch))
                try:
                    await load.run(self.plan.round_s, self.plan.clients, progress.update)
                finally:
                    sampling.cancel()
                    await asyncio.gather(sampling, return_exceptions=True)
                last = await self._quiet(server.url, watch)
                for recorded in (alone.pop() for _ in range(_ALONE_EACH_ROUND)):
                    self._ask_alone(server.url, recorded)
                server.check_alive()
        return last

    async def _quiet(self, url: str, watch: Watch) -> dict[str, Any]:
        """Wait until nothing is under way, and count what the server holds then."""
        flush = self.found.rounds % _FLUSH_EVERY == 0
        async with Endpoint(url) as endpoint:
            deadline = time.monotonic() + _SETTLE_S
            last: dict[str, Any] = {}
            # A fault may also hit the reading of the totals, which are left out then.
            while (not last or last["learning"]) and time.monotonic() < deadline:
                await asyncio.sleep(0.2)
                last = await totals(endpoint)
            if flush:
                answer = await asyncio.to_thread(requests.post, url + "/flush_cache", timeout=60)
                self.found.flushes += answer.status_code == 200
                if answer.status_code != 200:
                    self.found.problems.append(f"round {self.found.rounds}: an idle server refused /flush_cache")
            sample = await watch.look(endpoint, quiet=True)
        where = f"round {self.found.rounds}"
        if sample.slots:
            self.found.problems.append(f"{where}: {sample.slots} KV slots are held though no request runs")
        if flush and sample.state:
            self.found.problems.append(f"{where}: {sample.state} bytes of learned state are left after a flush")
        return last

    def _ask_alone(self, url: str, recorded: Recorded) -> None:
        for name, expected in (("cold", recorded.cold), ("warm", recorded.warm)):
            got = ask(url, recorded.prompt)
            if (got.tokens, got.cached) == (expected.tokens, expected.cached):
                self.found.alone_equal += 1
            else:
                self.found.alone_differ.append(
                    f"round {self.found.rounds}, {name}: {list(got.tokens)} after {got.cached} cached tokens, "
                    f"stock's {list(expected.tokens)} after {expected.cached}"
                )


async def _sample(url: str, watch: Watch) -> None:
    async with Endpoint(url) as endpoint:
        while True:
            await watch.look(endpoint)
            await asyncio.sleep(_SAMPLE_S)


def _prompts(supply: TextSupply, count: int) -> list[list[int]]:
    """Plain prompts of many lengths that share no first token: what one leaves in the cache is no other's."""
    low, high = _PLAIN_TOKENS
    found = []
    for number in range(count):
        prompt = list(supply.span(low + (number * 97) % (high - low)))
        # Text starts with few different tokens.
        prompt[0] = 1000 + number
        found.append(prompt)
    return found


def _complaints(log: Path) -> list[str]:
    """Lines of a server's log that no injected fault explains."""
    words = ("leak", "double free", "Scheduler hit an exception", "Segmentation")
    return [line[:300] for line in log.read_text(errors="replace").splitlines() if any(word in line for word in words)]


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=(__doc__ or "").split("\n\n")[2],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("--minutes", type=float, default=20.0, help="how long ours is soaked, minutes")
    command.add_argument("--round-s", type=float, default=25.0, help="load between two quiet moments, seconds")
    command.add_argument("--clients", type=int, default=4, help="clients at once")
    command.add_argument("--fault-rate", type=float, default=0.01, help="share of our internal calls that fail, 0 to 1")
    command.add_argument(
        "--near-tie", type=float, default=0.5,
        help="nats below stock's best token that a plain answer under load may choose where it parts from stock's",
    )  # fmt: skip
    command.add_argument(
        "--rss-growth", type=float, default=0.02,
        help="how much resident memory may grow in the second half, share of its mean",
    )  # fmt: skip
    command.add_argument("--pool-tokens", type=int, default=12000, help="KV slots of either server, tokens")
    command.add_argument("--seed", type=int, default=0, help="seed of prompts and of what is asked when")
    command.add_argument("--model", default=None, help="model folder or hub name (None: SmolLM2-135M-Instruct)")
    command.add_argument("--reports", type=Path, default=Path("reports"), help="folder of the output")
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak, write the reports; returns the exit status."""
    command = parser()
    options = command.parse_args(arguments)
    for name in ("minutes", "round_s", "clients"):
        if getattr(options, name) <= 0:
            command.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, but must be above 0.")
    if not 0 <= options.fault_rate < 1:
        command.error(f"--fault-rate is {options.fault_rate}, but must be at least 0 and below 1.")
    # Told to stop, it stops its servers, which are in process groups of their own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    names = Plan.__dataclass_fields__
    plan = Plan(**{name: value for name, value in vars(options).items() if name in names})
    started = time.monotonic()
    try:
        soak = Soak(options.model or str(default_model()), plan, options.reports)
        figures = soak.serve(*soak.record())
    except (ModelError, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    figures |= {"plan": asdict(plan), "seconds": round(time.monotonic() - started, 1), "output_tokens": OUTPUT_TOKENS}
    figures["wrong"] = verdict(figures)
    write_reports(options.reports, figures)
    print(json.dumps({name: figures["summary"][name] for name in figures["summary"]}, indent=1))
    for sentence in figures["wrong"]:
        print(f"WRONG: {sentence}", file=sys.stderr)
    print(f"written to {options.reports}/soak.json and soak.html")
    return 1 if figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
