"""When workflows come."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.workload.workflow import Workflow


@dataclass(frozen=True)
class OpenLoop:
    """Each workflow comes at its `arrival_s`, whatever the server does."""


@dataclass(frozen=True)
class ClosedLoop:
    """`concurrency` workflows are always under way: the next comes when one is done."""

    concurrency: int


Arrivals = OpenLoop | ClosedLoop


def poisson(workflows: Sequence[Workflow], rate: float, seed: int | str) -> tuple[Workflow, ...]:
    """The workflows at the times of a Poisson process of `rate` per second; the first comes after one gap."""
    if not rate > 0:
        raise ValueError(f"rate is {rate}, but must be above 0 (workflows per second).")
    gaps = random.Random(f"poisson-{seed}")
    moment = 0.0
    placed = []
    for workflow in workflows:
        moment += gaps.expovariate(rate)
        placed.append(replace(workflow, arrival_s=moment))
    return tuple(placed)
