"""Rows of a pool in the canonical (pre-RoPE) frame, and left factors of deltas between them: what is learned from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .batch import CorrectionError
from .rope import RotaryTable, rotate


def canonical_rows(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    slots: Tensor,
    positions: Tensor,
    table: RotaryTable,
    backend: str = "torch",
) -> Tensor:
    """Un-roped K, then V, of ``slots`` in some layers, fp32 [2, l, n, D].

    Buffers: [slots, kv_heads, head_dim] a layer; slots, positions: int64 [n], where rows lie and where they were roped.
    ``backend``: of the pool (`backend_for`); what has no kernel of its own for this runs on torch. Raises IndexError on
    slots or positions outside of the pool or the table.
    """
    if backend == "cpu" and slots.numel():
        from . import cpu_backend

        _check_slots((*k_buffers, *v_buffers), slots)
        return cpu_backend.canonical_rows(k_buffers, v_buffers, slots, positions, table)
    k = torch.stack([buffer.index_select(0, slots) for buffer in k_buffers])
    v = torch.stack([buffer.index_select(0, slots) for buffer in v_buffers])
    return torch.stack([rotate(k, positions, table, inverse=True), v.float()]).flatten(-2)


def left_factors(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    consumer: tuple[Tensor, Tensor],
    source: tuple[Tensor, Tensor],
    right: tuple[Tensor, Tensor],
    table: RotaryTable,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """(consumer's rows - source's rows) @ right^T in some layers, K's (canonical) and V's: [l, n, r] each, pool dtype.

    consumer, source: slots and positions, int64 [n] each. right: K's and V's right factors, [l, r, D], with orthonormal
    rows. Raises IndexError as `canonical_rows` does, and CorrectionError on NaN or Inf.
    """
    if backend == "cpu" and consumer[0].numel():
        from . import cpu_backend

        for slots, _ in (consumer, source):
            _check_slots((*k_buffers, *v_buffers), slots)
        return cpu_backend.left_factors(k_buffers, v_buffers, consumer, source, right, table)
    rows = [canonical_rows(k_buffers, v_buffers, *place, table, backend) for place in (consumer, source)]
    left = [delta @ part.mT.float() for delta, part in zip(rows[0] - rows[1], right, strict=True)]
    if not all(torch.isfinite(part).all() for part in left):
        raise CorrectionError("a delta holds NaN or Inf: it cannot be factored")
    return left[0].to(k_buffers[0].dtype), left[1].to(k_buffers[0].dtype)


def _check_slots(buffers: Sequence[Tensor], slots: Tensor) -> None:
    if int(slots.min()) < 0 or int(slots.max()) >= min(buffer.shape[0] for buffer in buffers):
        raise IndexError(f"slots reach from {int(slots.min())} to {int(slots.max())}: the pool ends before")
