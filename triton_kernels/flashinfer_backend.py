"""The correction op from FlashInfer's own operations, for deployments that prefer them to kernels of ours.

A layer is: gather, one rotation, one grouped matrix product each for K and V (and one for the features of predicted
deltas), one append into the pool as pages of one token. As in the Triton kernels a key is rotated once, by the move
from source to target, and the delta by itself. FlashInfer's operations keep 16-bit tensors between them, so what is
written was rounded up to three times (moved key, delta, sum) where the other backends round once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .batch import CorrectionError, CorrectionPlan, Group, made_once
from .delta import AffineDelta, LowRankDelta, fading

# What flashinfer/page.cuh is compiled for.
HEAD_DIMS = (64, 128, 256, 512)
DTYPES = (torch.float16, torch.bfloat16)
# Inner dimensions of grouped products are padded to this, so that rows start at 16 bytes.
_PAD = 16
_WORKSPACE_BYTES = 128 * 2**20
_OLDEST = (8, 0)
_gemms: dict[torch.device, Any] = {}
_prepared: dict[int, _Prepared] = {}


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why FlashInfer cannot work on pools of ``dtype`` on ``device``, or None if it can."""
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        return f"FlashInfer cannot be imported: {error}"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"FlashInfer needs an NVIDIA GPU: the KV pool is on {device.type}"
    if torch.cuda.get_device_capability(device) < _OLDEST:
        return f"FlashInfer needs compute capability {_OLDEST[0]}.{_OLDEST[1]}: this GPU is older"
    if dtype not in DTYPES:
        return f"the pool is {dtype}: FlashInfer's products work on float16 and bfloat16"
    return None


@dataclass(frozen=True)
class _Factors:
    """Delta rows of a plan, measured groups first, as grouped products want them; all in the pool's type.

    left_k, left_v: [L, measured rows, R]; right_k, right_v: [L, groups, R, D]; first_row: int64 [groups + 1].
    Predicted groups: project [L, predicted groups, 2D, C], shift fp32 [L, predicted groups, C], map_first_row int64.
    """

    first_row: Tensor
    left_k: Tensor
    left_v: Tensor
    right_k: Tensor
    right_v: Tensor
    map_first_row: Tensor | None
    project: Tensor | None
    shift: Tensor | None


@dataclass(frozen=True)
class _Prepared:
    """Rows with a delta come first, those of predicted deltas last among them. Rotations: fp32 [., rotary_dim]."""

    measured: tuple[Group, ...]
    predicted: tuple[Group, ...]
    source: Tensor
    target: Tensor
    # ``rotations``: moves of all rows, then what ropes the deltas. ``leave``: un-ropes rows of predicted deltas.
    rotations: Tensor
    leave: Tensor | None
    positions: Tensor
    corrected: int
    factors: _Factors | None


def prepare(plan: CorrectionPlan, device: torch.device, dtype: torch.dtype) -> _Prepared:
    """Tensors of ``plan`` for a pool of ``dtype``, built once. Raises TypeError on deltas of an unknown kind."""
    return made_once(_prepared, plan, lambda: _prepare(plan, device, dtype))


def run(plan: CorrectionPlan, k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor]) -> None:
    """See ``correction.run``. Raises ValueError on head dims and types that FlashInfer was not compiled for."""
    if not plan.groups:
        return
    pool = k_buffers[0]
    if plan.head_dim not in HEAD_DIMS or pool.dtype not in DTYPES:
        raise ValueError(
            f"head_dim is {plan.head_dim} and the pool {pool.dtype}: FlashInfer takes head dims "
            f"{', '.join(map(str, HEAD_DIMS))} in fp16 or bf16"
        )
    made = prepare(plan, pool.device, pool.dtype)
    sums: list[Tensor] = []
    for layer, (k_buffer, v_buffer) in enumerate(zip(k_buffers, v_buffers, strict=True)):
        k, v = k_buffer.index_select(0, made.source), v_buffer.index_select(0, made.source)
        if layer and made.factors is not None:
            k, v = _corrected(plan, made, made.factors, layer, k, v)
        else:
            _rope_(plan, k, made.rotations, made.positions)
        _append(k, v, k_buffer, v_buffer, made)
        sums += [k.sum(dtype=torch.float32), v.sum(dtype=torch.float32)]
    if not torch.isfinite(torch.stack(sums)).all():
        raise CorrectionError("corrected KV holds NaN or Inf: the span must be prefilled densely")


def _corrected(
    plan: CorrectionPlan, made: _Prepared, factors: _Factors, layer: int, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """K (roped at the target) and V [rows, heads, dim] of one layer >= 1, in the pool's type."""
    left_k, left_v = factors.left_k[layer], factors.left_v[layer]
    if factors.project is not None:
        left = _features(plan, made, factors, layer, k, v)
        left_k, left_v = torch.cat([left_k, left]), torch.cat([left_v, left])
    product = _product(k.device)
    dk = product(left_k, factors.right_k[layer], factors.first_row)
    dv = product(left_v, factors.right_v[layer], factors.first_row)
    # One rotation for both: the moved keys, and the deltas, which are roped at the target.
    both = torch.cat([k, dk.unflatten(1, (plan.kv_heads, plan.head_dim))])
    _rope_(plan, both, made.rotations, made.positions)
    n, rows = k.shape[0], made.corrected
    both[:rows] += both[n:]
    v[:rows] += dv.unflatten(1, (plan.kv_heads, plan.head_dim))
    return both[:n], v


def _features(plan: CorrectionPlan, made: _Prepared, factors: _Factors, layer: int, k: Tensor, v: Tensor) -> Tensor:
    """Left rows [predicted rows, R] of predicted deltas: h(t), then the fading of the biases, as in ``AffineDelta``."""
    assert made.leave is not None and factors.project is not None and factors.shift is not None
    assert factors.map_first_row is not None
    first = factors.left_k.shape[1]
    canonical = k[first : made.corrected].clone()
    _rope_(plan, canonical, made.leave, made.positions)
    x = torch.cat([canonical.flatten(1), v[first : made.corrected].flatten(1)], dim=1)
    found = _product(k.device)(x, factors.project[layer], factors.map_first_row).float()
    left = torch.zeros(x.shape[0], factors.right_k.shape[2], dtype=torch.float32, device=k.device)
    row = 0
    for number, group in enumerate(made.predicted):
        delta = group.delta
        assert isinstance(delta, AffineDelta)
        rows, columns = slice(row, row + group.t.numel()), delta.rank * len(delta.token_decays)
        h = (found[rows, :columns] + factors.shift[layer, number, :columns]).unflatten(1, (-1, delta.rank))
        left[rows, : delta.rank] = (h * fading(group.t, delta.token_decays)[:, :, None]).sum(1)
        left[rows, delta.rank : delta.rank + len(delta.mean_decays)] = fading(group.t, delta.mean_decays)
        row = rows.stop
    return left.to(k.dtype)


def _rope_(plan: CorrectionPlan, x: Tensor, rotations: Tensor, positions: Tensor) -> None:
    """Rotate ``x`` [n, heads, dim] in place, row i by row i of ``rotations``."""
    import flashinfer

    n, heads = x.shape[0], plan.kv_heads
    flat, first = x.view(n, -1), plan.head_dim if heads > 1 else 0
    # The operation turns queries and keys at once, and wants some of both: the first head stands in for the queries.
    query = flat[:, :first] if heads > 1 else torch.empty_like(flat)
    flashinfer.rope.apply_rope_with_cos_sin_cache_inplace(
        positions[:n], query, flat[:, first:], plan.head_dim, rotations[:n], is_neox=plan.table.is_neox
    )


def _append(k: Tensor, v: Tensor, k_buffer: Tensor, v_buffer: Tensor, made: _Prepared) -> None:
    """Scatter rows to their slots: the pool is pages of one token, and the target slots one request's page table."""
    import flashinfer

    n, device = k.shape[0], k.device
    flashinfer.page.append_paged_kv_cache(
        k,
        v,
        batch_indices=torch.zeros(n, dtype=torch.int32, device=device),
        positions=made.positions[:n],
        paged_kv_cache=(k_buffer.unsqueeze(1), v_buffer.unsqueeze(1)),
        kv_indices=made.target,
        kv_indptr=torch.tensor([0, n], dtype=torch.int32, device=device),
        kv_last_page_len=torch.ones(1, dtype=torch.int32, device=device),
    )


def _product(device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """``x`` [rows, in] times ``weights`` [groups, in, out], group by group; ``first_row`` int64 [groups + 1]."""
    if device not in _gemms:
        import flashinfer

        _gemms[device] = flashinfer.gemm.SegmentGEMMWrapper(
            torch.empty(_WORKSPACE_BYTES, dtype=torch.int8, device=device)
        )

    def product(x: Tensor, weights: Tensor, first_row: Tensor) -> Tensor:
        made: Tensor = _gemms[device].run(x, weights, weights.shape[0], False, seg_indptr=first_row)
        return made

    return product


def _prepare(plan: CorrectionPlan, device: torch.device, dtype: torch.dtype) -> _Prepared:
    measured = tuple(group for group in plan.groups if isinstance(group.delta, LowRankDelta))
    predicted = tuple(group for group in plan.groups if isinstance(group.delta, AffineDelta))
    moved = tuple(group for group in plan.groups if group.delta is None)
    if len(measured) + len(predicted) + len(moved) != len(plan.groups):
        raise TypeError("a delta of the plan is neither LowRankDelta nor AffineDelta")
    corrected, groups = (*measured, *predicted), (*measured, *predicted, *moved)

    def table(rotations: Sequence[tuple[Tensor, Tensor] | None]) -> Tensor:
        return torch.cat([torch.cat(pair, dim=1) for pair in rotations if pair is not None]).to(device)

    rotations = table([*(group.shift for group in groups), *(group.arrive for group in corrected)])
    return _Prepared(
        measured=measured,
        predicted=predicted,
        source=torch.cat([group.source for group in groups]).to(device),
        target=torch.cat([group.target for group in groups]).to(device, torch.int32),
        rotations=rotations,
        leave=table([group.leave for group in predicted]) if predicted else None,
        positions=torch.arange(rotations.shape[0], dtype=torch.int32, device=device),
        corrected=sum(group.source.numel() for group in corrected),
        factors=_factors(measured, predicted, device, dtype) if corrected else None,
    )


def _padded(size: int) -> int:
    return -(-size // _PAD) * _PAD


def _first_rows(groups: Sequence[Group], device: torch.device) -> Tensor:
    ends = list(accumulate((group.source.numel() for group in groups), initial=0))
    return torch.tensor(ends, dtype=torch.int64, device=device)


def _factors(
    measured: Sequence[Group], predicted: Sequence[Group], device: torch.device, dtype: torch.dtype
) -> _Factors:
    lows = [group.delta for group in measured if isinstance(group.delta, LowRankDelta)]
    maps = [group.delta for group in predicted if isinstance(group.delta, AffineDelta)]
    layers, width = (lows or maps)[0].layers, (lows or maps)[0].width
    ranks = [x.shape[2] for low in lows for x in (low.left_k, low.left_v)]
    inner = _padded(max(ranks + [one.rank + len(one.mean_decays) for one in maps]))
    rows = sum(group.source.numel() for group in measured)

    def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=kind, device=device)

    left_k, left_v = zeros(layers, rows, inner), zeros(layers, rows, inner)
    right_k, right_v = (zeros(layers, len(lows) + len(maps), inner, width) for _ in range(2))
    row = 0
    for number, (group, low) in enumerate(zip(measured, lows, strict=True)):
        at = slice(row, row + group.source.numel())
        for left, right, own_left, own_right in (
            (left_k, right_k, low.left_k, low.right_k),
            (left_v, right_v, low.left_v, low.right_v),
        ):
            rank = own_left.shape[2]
            left[:, at, :rank] = own_left[:, (group.t - low.start).to(own_left.device)].to(device, dtype)
            right[:, number, :rank] = own_right.to(device, dtype)
        row = at.stop
    for number, one in enumerate(maps, start=len(lows)):
        for right, half in ((right_k, slice(None, width)), (right_v, slice(width, None))):
            right[:, number, : one.rank] = one.weight[:, :, half].to(device, dtype)
            right[:, number, one.rank : one.rank + len(one.mean_decays)] = one.bias[:, :, half].to(device, dtype)
    project = shift = None
    if maps:
        columns = _padded(max(one.project.shape[2] for one in maps))
        project = zeros(layers, len(maps), 2 * width, columns)
        shift = zeros(layers, len(maps), columns, kind=torch.float32)
        for number, one in enumerate(maps):
            project[:, number, :, : one.project.shape[2]] = one.project.to(device, dtype)
            shift[:, number, : one.shift.shape[1]] = one.shift.to(device)
    return _Factors(
        first_row=_first_rows([*measured, *predicted], device),
        left_k=left_k,
        left_v=left_v,
        right_k=right_k,
        right_v=right_v,
        map_first_row=_first_rows(predicted, device) if maps else None,
        project=project,
        shift=shift,
    )
