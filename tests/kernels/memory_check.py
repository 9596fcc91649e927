"""Address and race checks for kernels in Triton's CPU interpreter.

The interpreter dereferences whatever address a lane computes, and runs programs one after another, so an access outside
of a tensor and two programs that touch the same bytes both go unnoticed.

    with watched(reads=[...], writes=[...]) as seen:
        kernel[grid](...)
    assert seen.races() == 0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter


class OutOfBounds(IndexError):
    """A lane that was not masked off touched bytes of no tensor that it may touch."""


def cause(error: BaseException) -> BaseException:
    """What went wrong inside a kernel: Triton wraps an error once for every function that it passes through."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@dataclass
class Seen:
    """Accesses of all launches inside a ``watched`` block: program number and first byte of every lane."""

    loads: list[tuple[int, np.ndarray]] = field(default_factory=list)
    stores: list[tuple[int, np.ndarray]] = field(default_factory=list)
    launches: list[int] = field(default_factory=list)

    def races(self) -> int:
        """Number of stores to what was stored to before, and of loads of what another program stores to."""
        return sum(self._races(number) for number in set(self.launches))

    def _races(self, launch: int) -> int:
        stores = [(program, at) for program, at in self.stores if program >> 40 == launch and at.size]
        if not stores:
            return 0
        at = np.concatenate([part for _, part in stores])
        by = np.concatenate([np.full(part.size, program) for program, part in stores])
        order = np.argsort(at, kind="stable")
        at, by = at[order], by[order]
        first = np.flatnonzero(np.r_[True, at[1:] != at[:-1]])
        low, high = np.minimum.reduceat(by, first), np.maximum.reduceat(by, first)
        # Twice by one program is no better: its threads are not ordered among themselves.
        found = at.size - first.size
        written = at[first]
        for program, part in self.loads:
            if program >> 40 != launch or not part.size:
                continue
            place = np.minimum(np.searchsorted(written, part), written.size - 1)
            hit = written[place] == part
            found += int((hit & ((low[place] != program) | (high[place] != program))).sum())
        return found


def _ranges(tensors: Sequence[torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    spans = []
    for x in tensors:
        if x.numel():
            extent = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1
            spans.append((x.data_ptr(), x.data_ptr() + extent * x.element_size()))
    spans.sort()
    return np.array([a for a, _ in spans], dtype=np.uint64), np.array([b for _, b in spans], dtype=np.uint64)


def _check(at: np.ndarray, size: int, starts: np.ndarray, ends: np.ndarray, kind: str) -> None:
    if not at.size:
        return
    # An empty range in front of all: it is what a lane falls into that is before the first tensor.
    place = np.searchsorted(starts, at, side="right")
    outside = at + np.uint64(size) > np.r_[np.uint64(0), ends][place]
    if outside.any():
        program = interpreter.interpreter_builder.grid_idx
        raise OutOfBounds(f"{int(outside.sum())} lanes of a {kind} of program {program} are outside of all tensors")


@contextmanager
def watched(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Iterator[Seen]:
    """Check and record every access: loads must lie in ``reads`` or ``writes``, stores and atomics in ``writes``.

    Raises OutOfBounds, at the access, from inside the kernel (see ``cause``).
    """
    builder = interpreter.InterpreterBuilder
    load, store, atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
    set_grid_dim = builder.set_grid_dim
    readable, writable = _ranges([*reads, *writes]), _ranges(writes)
    seen = Seen()

    def program() -> int:
        x, y, z = interpreter.interpreter_builder.grid_idx
        _, ny, nz = interpreter.interpreter_builder.grid_dim
        return (len(seen.launches) << 40) + (x * ny + y) * nz + z

    def live(pointers: Any, mask: Any) -> np.ndarray:
        at = np.asarray(pointers.data, dtype=np.uint64)
        return at.ravel()[np.broadcast_to(np.asarray(mask.data, dtype=bool), at.shape).ravel()]

    def new_launch(self: Any, *shape: int) -> None:
        seen.launches.append(len(seen.launches) + 1)
        set_grid_dim(self, *shape)

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        at = live(pointers, mask)
        _check(at, interpreter._get_np_dtype(pointers.get_element_ty()).itemsize, *readable, "load")
        seen.loads.append((program(), at))
        return load(self, pointers, mask, *rest, **options)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        at = live(pointers, mask)
        _check(at, value.data.dtype.itemsize, *writable, "store")
        seen.stores.append((program(), at))
        return store(self, pointers, value, mask, *rest, **options)

    def atomic_rmw(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        # Ordered by the device among themselves: checked for bounds, never a race.
        _check(live(pointers, mask), value.data.dtype.itemsize, *writable, "atomic")
        return atomic(self, operation, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
    builder.create_atomic_rmw, builder.set_grid_dim = atomic_rmw, new_launch
    try:
        yield seen
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
        builder.create_atomic_rmw, builder.set_grid_dim = atomic, set_grid_dim
