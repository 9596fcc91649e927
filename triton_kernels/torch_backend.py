"""The correction op in plain torch: the reference, and what runs where no kernel does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .batch import CorrectionError, CorrectionPlan, Group
from .rope import RotaryTable, turn_


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """None: torch runs on every device."""
    return None


def run(plan: CorrectionPlan, k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor]) -> None:
    """See ``correction.run``; arguments are checked there."""
    for group in plan.groups:
        sums: list[Tensor] = []
        for layer, (k_buffer, v_buffer) in enumerate(zip(k_buffers, v_buffers, strict=True)):
            k = k_buffer.index_select(0, group.source)
            v = v_buffer.index_select(0, group.source)
            if group.delta is None or layer == 0:
                if group.moved:
                    k = turn_(k.float(), *group.shift, plan.table).to(k_buffer.dtype)
            else:
                k, v = _corrected(group, plan.table, layer, k, v)
            # Rounding to fp16 can make infinity of a finite number: what is stored is what has to be finite.
            k, v = k.to(k_buffer.dtype), v.to(v_buffer.dtype)
            k_buffer.index_copy_(0, group.target, k)
            v_buffer.index_copy_(0, group.target, v)
            sums += [k.sum(dtype=torch.float32), v.sum(dtype=torch.float32)]
        # A sum is NaN or Inf as soon as one term is; one look at the end keeps the device's queue full.
        if not torch.isfinite(torch.stack(sums)).all():
            raise CorrectionError("corrected KV holds NaN or Inf: the span must be prefilled densely")


def _corrected(group: Group, table: RotaryTable, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 K (roped at the target) and V [n, heads, dim] of one layer >= 1, from the source's rows."""
    assert group.delta is not None and group.leave is not None and group.arrive is not None
    canonical, value = turn_(k.to(torch.float32, copy=True), *group.leave, table), v.to(torch.float32, copy=True)
    flat_k, flat_v = canonical.flatten(1), value.flatten(1)
    dk, dv = group.delta.rows(layer, group.t, flat_k, flat_v)
    flat_k.add_(dk)
    flat_v.add_(dv)
    return turn_(canonical, *group.arrive, table), value
