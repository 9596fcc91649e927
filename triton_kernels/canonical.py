"""Reading rows of a pool in the canonical (pre-RoPE) frame: what estimators and own deltas are learned from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .rope import RotaryTable, rotate


def canonical_rows(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    slots: Tensor,
    positions: Tensor,
    table: RotaryTable,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Un-roped K, and V, of ``slots`` in some layers, fp32 [l, n, D] each.

    Buffers: [slots, kv_heads, head_dim] a layer; slots, positions: int64 [n], where rows lie and where they were roped.
    ``backend``: of the pool (`backend_for`); what has no kernel of its own for this runs on torch. Raises IndexError on
    slots or positions outside of the pool or the table.
    """
    if backend == "cpu" and slots.numel():
        from . import cpu_backend

        if int(slots.min()) < 0 or int(slots.max()) >= min(buffer.shape[0] for buffer in (*k_buffers, *v_buffers)):
            raise IndexError(f"slots reach from {int(slots.min())} to {int(slots.max())}: the pool ends before")
        return cpu_backend.canonical_rows(k_buffers, v_buffers, slots, positions, table)
    k = torch.stack([buffer.index_select(0, slots) for buffer in k_buffers])
    v = torch.stack([buffer.index_select(0, slots) for buffer in v_buffers])
    return rotate(k, positions, table, inverse=True).flatten(-2), v.float().flatten(-2)
