"""What a batch of corrections is made of: the segments that are asked for, and the plan that backends run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from .delta import Delta
from .rope import RotaryTable

T = TypeVar("T")


class CorrectionError(ArithmeticError):
    """Corrected KV holds NaN or Inf: the target slots must not be used, prefill the span densely."""


@dataclass(frozen=True)
class Segment:
    """Consecutive rows of a span, from the source's slots to the consumer's.

    source_slots, target_slots: int64 [n]. source_start, target_start: positions of the first row in the source's and
    in the consumer's sequence. offset: of the first row inside the span. delta: None moves without correcting.
    """

    source_slots: Tensor
    target_slots: Tensor
    source_start: int
    target_start: int
    offset: int = 0
    delta: Delta | None = None


@dataclass(frozen=True)
class Group:
    """Rows of a plan that share one delta. Slots, positions, offsets: int64 [n]; rotations: fp32 [n, rotary_dim / 2].

    ``leave_at``, ``arrive_at``: positions at the source and at the target; ``moved`` is false if they are the same.
    ``leave`` un-ropes at the source, ``arrive`` ropes at the target, ``shift`` is both at once.
    """

    source: Tensor
    target: Tensor
    leave_at: Tensor
    arrive_at: Tensor
    t: Tensor
    delta: Delta | None
    moved: bool
    shift: tuple[Tensor, Tensor]
    leave: tuple[Tensor, Tensor] | None
    arrive: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class CorrectionPlan:
    """What ``run`` needs, device tensors only.

    ``rows``: tokens, over all groups. ``slots``: the least number of slots that the pool must have.
    ``backend``: a name, or "auto".
    """

    groups: tuple[Group, ...]
    table: RotaryTable
    kv_heads: int
    head_dim: int
    backend: str
    rows: int
    slots: int


def made_once(held: dict[int, T], plan: CorrectionPlan, make: Callable[[], T]) -> T:
    """What ``make`` gives for ``plan``, from ``held``, where it stays as long as the plan lives."""
    key = id(plan)
    if key not in held:
        held[key] = make()
        weakref.finalize(plan, held.pop, key, None)
    return held[key]
