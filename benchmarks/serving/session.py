"""One run of a workload on one arm, with what its server says of itself before, during and after."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from tqdm import tqdm

from benchmarks.serving.arms import Arm, Fleet
from benchmarks.workload.arrivals import Arrivals
from benchmarks.workload.endpoint import Endpoint
from benchmarks.workload.runner import Run, run_workflows
from benchmarks.workload.workflow import Workflow

_POLL_S = 0.5
_LEARN_S = 120.0
REQUEST_CLOCKS, IDLE_CLOCKS = ("match", "place", "publish"), ("learn", "audit")


@dataclass(frozen=True)
class ServerSide:
    """What a server says of one run.

    `peak_slots`: most KV slots that requests in flight held at a poll (what only the cache holds can be evicted and
    does not count). `seconds`: of the scheduler's thread, by what our code did; empty on stock SGLang. Bytes are
    those after the run.
    """

    peak_slots: int | None
    seconds: Mapping[str, float]
    own_delta_bytes: int | None
    state_bytes: int | None
    edges: int | None
    audits: int | None
    fallbacks: int | None


@dataclass(frozen=True)
class Measured:
    """A run and its server's side."""

    arm: str
    run: Run
    server: ServerSide


class PromptsDiffer(RuntimeError):
    """Two arms of one comparison got different prompts; nothing can be said about them."""


def measure(fleet: Fleet, arm: Arm, workflows: Sequence[Workflow], arrivals: Arrivals, title: str) -> Measured:
    """Send a workload to one arm, then wait until its server has learned, so that the next run has the machine."""

    async def work() -> Measured:
        async with fleet.endpoint(arm) as endpoint:
            await settle(endpoint, arm)
            before = await server_state(endpoint)
            with _progress(workflows, f"{title} {arm.name}") as progress:
                poll = asyncio.create_task(peak_slots(endpoint))
                try:
                    run = await run_workflows(endpoint, workflows, arrivals, progress=progress.update)
                finally:
                    poll.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await poll
            after = await server_state(endpoint)
            await settle(endpoint, arm)
            return Measured(arm.name, run, _server_side(_peak(poll), before, after))

    return asyncio.run(work())


def learn(fleet: Fleet, arm: Arm, workflows: Sequence[Workflow], title: str = "learning") -> list[float]:
    """Send workflows hop by hop, each after the server has learned from the one before; seconds of each hop."""

    async def work() -> list[float]:
        seconds = []
        async with fleet.endpoint(arm) as endpoint:
            with _progress(workflows, f"{title} {arm.name}") as progress:
                for workflow in workflows:
                    for hop in workflow.hops:
                        reply = await endpoint.send(hop.role, hop.prompt(workflow.scripted()), hop.output_tokens)
                        if reply.error:
                            raise RuntimeError(f"{arm.label} failed while it learned: {reply.error}")
                        seconds.append(reply.seconds)
                        await settle(endpoint, arm)
                        progress.update()
        return seconds

    return asyncio.run(work())


def check_prompts(measured: Sequence[Measured]) -> None:
    """Raise `PromptsDiffer` unless all runs sent the same prompts, in the order of workflows and hops."""
    found = {entry.arm: entry.run.prompts for entry in measured}
    if len(set(found.values())) > 1:
        raise PromptsDiffer(f"the arms got different prompts: {found}; failed requests end a workflow early.")


async def settle(endpoint: Endpoint, arm: Arm) -> None:
    """Wait until our server has nothing left to learn; returns at once for stock SGLang."""
    deadline = time.monotonic() + _LEARN_S
    while arm.ours and time.monotonic() < deadline:
        state = await server_state(endpoint)
        if not state.get("learning"):
            return
        await asyncio.sleep(0.1)


async def server_state(endpoint: Endpoint) -> Mapping[str, Any]:
    """What our server counts (`DeltaRadixCache.state`); empty for stock SGLang."""
    info = await endpoint.json("/server_info")
    state: Mapping[str, Any] = info["internal_states"][0].get("kvcmas") or {}
    return state


async def peak_slots(endpoint: Endpoint) -> int | None:
    """Poll until it is cancelled, then return the most KV slots in use at a poll; None if the server does not tell."""
    peak: int | None = None
    try:
        while True:
            found = await endpoint.json("/v1/loads")
            loads = (found or {}).get("loads") or []
            used = [int(load["num_used_tokens"]) for load in loads if "num_used_tokens" in load]
            peak = max([*used, peak or 0]) if used else peak
            await asyncio.sleep(_POLL_S)
    except (asyncio.CancelledError, aiohttp.ClientError):
        return peak


def _peak(poll: asyncio.Task[int | None]) -> int | None:
    return None if poll.cancelled() else poll.result()


def _server_side(peak: int | None, before: Mapping[str, Any], after: Mapping[str, Any]) -> ServerSide:
    def spent(name: str) -> float:
        return float(after[f"{name}_seconds"] - before[f"{name}_seconds"])

    return ServerSide(
        peak_slots=peak,
        seconds={name: spent(name) for name in (*REQUEST_CLOCKS, *IDLE_CLOCKS)} if after else {},
        own_delta_bytes=after.get("own_delta_bytes"),
        state_bytes=after.get("state_bytes"),
        edges=sum(after["edges"].values()) if after else None,
        audits=after["audits"] - before["audits"] if after else None,
        fallbacks=after["fallbacks"] - before["fallbacks"] if after else None,
    )


def _progress(workflows: Sequence[Workflow], title: str) -> tqdm:
    total = sum(len(workflow.hops) for workflow in workflows)
    return tqdm(total=total, desc=title, unit="request", file=sys.stderr, mininterval=2.0)
