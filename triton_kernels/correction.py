"""The correction op: move spans inside the KV pool and add their deltas.

``plan`` runs on the host, once a batch: it checks the request and prepares indices and rotations. ``run`` works on
the pool's buffers, in place, layer by layer:

    K[target] = rope(unrope(K[source], source position) + dK, target position),   V[target] = V[source] + dV

with fp32 arithmetic and one rounding to the pool's dtype at the end. Layer 0 is moved and never corrected.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .batch import CorrectionPlan, Group, Segment
from .delta import Delta, ZeroDelta
from .rope import RotaryTable

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "cpu", "triton", "flashinfer", "torch")
_PREFERRED = ("cpu", "triton")
"""What "auto" tries, in this order, before the torch reference."""


def _check(segments: Sequence[Segment], table: RotaryTable, width: int) -> None:
    for number, one in enumerate(segments):
        n = one.source_slots.numel()
        for name, slots in (("source_slots", one.source_slots), ("target_slots", one.target_slots)):
            if slots.dtype != torch.int64 or slots.ndim != 1:
                raise ValueError(f"segment {number}: {name} is {slots.dtype} {list(slots.shape)}: it must be int64 [n]")
        if one.target_slots.numel() != n:
            raise ValueError(f"segment {number}: {n} source_slots and {one.target_slots.numel()} target_slots")
        for name, start in (("source_start", one.source_start), ("target_start", one.target_start)):
            if start < 0 or start + n > table.max_positions:
                raise ValueError(
                    f"segment {number}: {name} is {start} for {n} rows: positions must be in [0, {table.max_positions})"
                )
        if one.offset < 0:
            raise ValueError(f"segment {number}: offset is {one.offset}: it must not be negative")
        if one.delta is None or isinstance(one.delta, ZeroDelta):
            continue
        if one.delta.width != width:
            raise ValueError(f"segment {number}: the delta's width is {one.delta.width}: the pool's is {width}")
        extent = one.delta.extent
        if extent is not None and not extent[0] <= one.offset <= one.offset + n <= extent[1]:
            raise ValueError(
                f"segment {number}: offsets [{one.offset}, {one.offset + n}) are outside the delta's rows "
                f"[{extent[0]}, {extent[1]})"
            )


def _check_slots(source: Tensor, target: Tensor) -> int:
    """The number of slots that a pool with all these must have."""
    if source.numel() and min(int(source.min()), int(target.min())) < 0:
        raise ValueError("source_slots and target_slots must not be negative")
    if torch.unique(target).numel() != target.numel():
        raise ValueError("target_slots holds a slot twice: every row needs a slot of its own")
    if torch.isin(target, source).any():
        raise ValueError("source_slots and target_slots overlap: a row would be read after it was overwritten")
    return 1 + max(int(source.max()), int(target.max())) if source.numel() else 0


def _group(segments: Sequence[Segment], table: RotaryTable, delta: Delta | None) -> Group:
    source = torch.cat([one.source_slots for one in segments])
    target = torch.cat([one.target_slots for one in segments])
    device = source.device

    def count(starts: Sequence[int]) -> Tensor:
        return torch.cat(
            [torch.arange(s, s + one.source_slots.numel()) for s, one in zip(starts, segments, strict=True)]
        )

    leave_at = count([one.source_start for one in segments])
    arrive_at = count([one.target_start for one in segments])

    def to(rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return rotation[0].to(device), rotation[1].to(device)

    return Group(
        source=source,
        target=target,
        leave_at=leave_at.to(device),
        arrive_at=arrive_at.to(device),
        t=count([one.offset for one in segments]).to(device),
        delta=delta,
        moved=any(one.source_start != one.target_start for one in segments),
        shift=to(table.shift_rows(leave_at, arrive_at)),
        leave=None if delta is None else to(table.rows(leave_at, inverse=True)),
        arrive=None if delta is None else to(table.rows(arrive_at)),
    )


def plan(
    segments: Sequence[Segment], table: RotaryTable, *, head_dim: int, kv_heads: int, backend: str = "auto"
) -> CorrectionPlan:
    """Check ``segments`` and prepare their rotations; segments with the same delta object are worked on together.

    Raises ValueError on an unknown backend, slots that overlap or repeat, positions outside ``table`` and deltas that
    do not fit.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}: it must be one of {', '.join(BACKENDS)}")
    if table.rotary_dim > head_dim:
        raise ValueError(f"rotary_dim is {table.rotary_dim}: it must be at most head_dim, {head_dim}")
    _check(segments, table, kv_heads * head_dim)
    slots = 0
    if segments:
        slots = _check_slots(
            torch.cat([one.source_slots for one in segments]), torch.cat([one.target_slots for one in segments])
        )
    by_delta: dict[int, tuple[Delta | None, list[Segment]]] = {}
    for one in segments:
        delta = None if isinstance(one.delta, ZeroDelta) else one.delta
        if one.source_slots.numel():
            by_delta.setdefault(id(delta), (delta, []))[1].append(one)
    groups = tuple(_group(members, table, delta) for delta, members in by_delta.values())
    rows = sum(group.source.numel() for group in groups)
    return CorrectionPlan(groups, table, kv_heads, head_dim, backend, rows, slots)


def run(plan: CorrectionPlan, k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor]) -> None:
    """Execute ``plan`` on the pool, in place. Buffers: one [slots, kv_heads, head_dim] tensor a layer.

    Raises ValueError if buffers do not fit the plan, and CorrectionError if a written row holds NaN or Inf.
    """
    if len(k_buffers) != len(v_buffers):
        raise ValueError(f"{len(k_buffers)} k_buffers and {len(v_buffers)} v_buffers: one of each a layer is needed")
    for name, buffers in (("k_buffers", k_buffers), ("v_buffers", v_buffers)):
        for layer, buffer in enumerate(buffers):
            if buffer.ndim != 3 or tuple(buffer.shape[1:]) != (plan.kv_heads, plan.head_dim):
                raise ValueError(
                    f"{name}[{layer}] is {list(buffer.shape)}: it must be [slots, {plan.kv_heads}, {plan.head_dim}]"
                )
            if buffer.shape[0] < plan.slots:
                raise ValueError(f"{name}[{layer}] has {buffer.shape[0]} slots: the plan needs {plan.slots}")
    for group in plan.groups:
        if group.delta is not None and group.delta.layers != len(k_buffers):
            raise ValueError(f"a delta has {group.delta.layers} layers: the pool has {len(k_buffers)}")

    if plan.groups and k_buffers:
        device, dtype, name = k_buffers[0].device, k_buffers[0].dtype, plan.backend
        if name == "auto":
            name = backend_for(device, dtype, plan.kv_heads, plan.head_dim)
        elif (reason := _module(name).unavailable(device, dtype)) is not None:
            raise ValueError(f"backend {name!r} cannot be used: {reason}")
        _module(name).run(plan, k_buffers, v_buffers)


def backend_for(device: torch.device, dtype: torch.dtype, kv_heads: int, head_dim: int, wanted: str = "auto") -> str:
    """The backend that works on such a pool: ``wanted``, or for "auto" the first of the preferred ones that can.

    A backend is trusted once it has agreed with the torch reference on a small pool (`self_check`), so the first call
    may take seconds: kernels are compiled. Raises ValueError if ``wanted`` cannot be used.
    """
    if wanted == "auto":
        return next((name for name in _PREFERRED if _refusal(name, device, dtype, kv_heads, head_dim) is None), "torch")
    reason = _refusal(wanted, device, dtype, kv_heads, head_dim)
    if reason is not None:
        raise ValueError(f"backend {wanted!r} cannot be used: {reason}")
    return wanted


@functools.cache
def _refusal(name: str, device: torch.device, dtype: torch.dtype, kv_heads: int, head_dim: int) -> str | None:
    from . import self_check

    module = _module(name)
    reason: str | None = module.unavailable(device, dtype)
    if reason is None and name != "torch":
        reason = self_check.disagreement(module, device, dtype, kv_heads, head_dim)
        if reason is not None:
            logger.error("kvcmas: the %s backend of the correction op is not used: %s", name, reason)
    return reason


def _module(name: str) -> Any:
    return importlib.import_module(f"{__package__}.{name}_backend")
