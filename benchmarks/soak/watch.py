"""What a server's processes hold: memory, file handles, KV slots, bytes of learned state."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from benchmarks.workload.endpoint import Endpoint

_TRIES = 4


@dataclass(frozen=True)
class Sample:
    """One look at a server.

    `at_s`: seconds since the soak began. `rss`: bytes, all processes of the server. `handles`: open file descriptors,
    sockets among them. `slots`: KV slots that are neither free nor evictable. `state`: bytes of learned state.
    `quiet`: nothing was under way, nobody connected, and the cache had just been flushed.
    """

    at_s: float
    rss: int
    handles: int
    slots: int
    state: int
    quiet: bool = False


class Watch:
    """Looks at the server whose main process is ``pid``."""

    def __init__(self, pid: int) -> None:
        self._main = psutil.Process(pid)
        self._begin = time.monotonic()
        self.samples: list[Sample] = []

    async def look(self, endpoint: Endpoint, *, quiet: bool = False) -> Sample:
        """Take a sample and keep it."""
        slots = used_slots(await endpoint.json("/v1/loads"))
        for _ in range(_TRIES):
            # A fault may hit the reading of the totals, which are left out then.
            if state := await totals(endpoint):
                break
        rss = handles = 0
        for process in (self._main, *self._main.children(recursive=True)):
            try:
                rss += process.memory_info().rss
                handles += process.num_fds()
            except psutil.NoSuchProcess:
                # A compiler or another short-lived child.
                continue
        sample = Sample(time.monotonic() - self._begin, rss, handles, slots, state.get("state_bytes", 0), quiet)
        self.samples.append(sample)
        return sample


async def totals(endpoint: Endpoint) -> dict[str, Any]:
    """Our cache's totals; empty on stock SGLang."""
    info = await endpoint.json("/server_info")
    found: dict[str, Any] = info["internal_states"][0].get("kvcmas") or {}
    return found


def used_slots(loads: Any) -> int:
    """KV slots that requests hold, of an answer of ``/v1/loads``."""
    return sum(int(load["num_used_tokens"]) for load in loads["loads"])


def growth(samples: Sequence[Sample]) -> float | None:
    """How much the resident memory grew over the second half of the samples' time, as a share of its mean there.

    Without learned state, which comes and goes and has a budget of its own. That of a straight line through the samples
    (least squares): a single one may be high or low. None with fewer than `FEWEST` samples in that half.
    """
    if not samples:
        return None
    half = (samples[0].at_s + samples[-1].at_s) / 2
    later = [sample for sample in samples if sample.at_s >= half]
    if len(later) < FEWEST:
        return None
    at, rss = np.array([s.at_s for s in later]), np.array([s.rss - s.state for s in later], float)
    slope = float(np.polyfit(at - at[0], rss, 1)[0])
    return slope * float(at[-1] - at[0]) / float(rss.mean())


FEWEST = 8
"""Samples from which a trend of the memory can be told."""
