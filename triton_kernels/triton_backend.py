"""The correction op on Triton: a launch for moved rows, one for each type of measured deltas, two for predicted.

A plan's tables are built at its first run and kept as long as the plan. Sizes of blocks come from ``triton_tuning``;
nothing is timed while a request waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .batch import CorrectionError, CorrectionPlan, made_once
from .triton_tables import Batch, batches, upload
from .triton_tuning import Features, Shape, Tile, chosen

_OLDEST = (8, 0)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_prepared: dict[int, tuple[Batch, ...]] = {}
# Address tables of pools, by what they hold. A process has one pool; tests have a few.
_pools: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
_POOLS = 8


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot work on pools of ``dtype`` on ``device``, or None if they can."""
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    if dtype not in _DTYPES:
        return f"the pool is {dtype}: the Triton kernels work on float32, float16 and bfloat16"
    if triton.knobs.runtime.interpret:
        return None
    if device.type != "cuda":
        return f"Triton needs a GPU: the KV pool is on {device.type}"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < _OLDEST:
        return f"Triton's matrix products need compute capability {_OLDEST[0]}.{_OLDEST[1]}: this GPU is older"
    return None


def prepare(plan: CorrectionPlan, device: torch.device) -> tuple[Batch, ...]:
    """Tables of ``plan`` on ``device``, built once. Raises TypeError on deltas of an unknown kind."""
    return made_once(_prepared, plan, lambda: batches(plan, device))


def run(plan: CorrectionPlan, k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor]) -> None:
    """See ``correction.run``. Raises ValueError if buffers differ in type, device or strides."""
    if not plan.groups:
        return
    pool = k_buffers[0]
    _check(k_buffers, v_buffers)
    failed = torch.zeros(1, dtype=torch.int32, device=pool.device)
    for batch in prepare(plan, pool.device):
        launch(plan, batch, k_buffers, v_buffers, failed)
    if int(failed):
        raise CorrectionError("corrected KV holds NaN or Inf: the span must be prefilled densely")


def launch(
    plan: CorrectionPlan,
    batch: Batch,
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    failed: Tensor,
    tile: Tile | None = None,
    features: Features | None = None,
) -> None:
    """Queue the kernels of one batch; ``failed`` int32 [1] becomes 1 if a written row holds NaN or Inf."""
    from . import triton_source

    shape = Shape.of(plan, batch, k_buffers[0].dtype)
    tuned = chosen(shape)
    tile, features = tile or tuned[0], features or tuned[1]
    if batch.maps is not None:
        grid, arguments, constants = feature_launch(plan, batch, k_buffers, v_buffers, features)
        triton_source.features[grid](*arguments, **constants, **features.options())
    grid, arguments, constants = correct_launch(plan, batch, k_buffers, v_buffers, failed, tile)
    triton_source.correct[grid](*arguments, **constants, **tile.options())


Launch = tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]


def correct_launch(
    plan: CorrectionPlan,
    batch: Batch,
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    failed: Tensor,
    tile: Tile,
) -> Launch:
    """Grid, arguments and constants of ``triton_source.correct``."""
    pool = k_buffers[0]
    blocks = batch.blocks(tile.rows)
    heads = tile.heads_of(plan.kv_heads)
    grid = (blocks.shape[0], len(k_buffers), plan.kv_heads // heads)
    # Pointers that a kernel never follows must still be pointers.
    arrive = batch.shift if batch.arrive is None else batch.arrive
    parts = batch.source if batch.parts is None else batch.parts
    arguments = (
        *(*_addresses(k_buffers, v_buffers), blocks, parts, batch.source, batch.target, batch.at),
        *(*batch.shift, *arrive, failed, pool.stride(0), pool.stride(1)),
    )
    constants = {
        **_constants(plan, k_buffers, v_buffers),
        "LEFT": triton_type(batch.left),
        "RIGHT": triton_type(batch.right),
        "HAS_DELTA": batch.parts is not None,
        "HAS_BIAS": batch.maps is not None,
        "PARTS_ALIGNED": batch.parts_aligned,
        "HALF_PAD": power_of_two(plan.table.rotary_dim // 2),
        "REST_PAD": power_of_two(max(1, plan.head_dim - plan.table.rotary_dim)),
        "DIM_PAD": power_of_two(plan.head_dim),
        "BLOCK": tile.rows,
        "HEADS": heads,
        "RANK": tile.rank_of(batch.rank),
    }
    return grid, arguments, constants


def feature_launch(
    plan: CorrectionPlan, batch: Batch, k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor], tile: Features
) -> Launch:
    """Grid, arguments and constants of ``triton_source.features``."""
    assert batch.maps is not None and batch.leave is not None and batch.out is not None
    pool, out = k_buffers[0], batch.out
    blocks = batch.blocks(tile.rows)
    arguments = (
        *(*_addresses(k_buffers, v_buffers), blocks, batch.maps, batch.source, batch.offsets, *batch.leave),
        *(out, pool.stride(0), pool.stride(1), plan.kv_heads, out.stride(0), out.stride(1)),
    )
    constants = {
        **_constants(plan, k_buffers, v_buffers),
        "MAPS_ALIGNED": batch.maps_aligned,
        "BLOCK": tile.rows,
        "CHUNK": tile.chunk,
        "RANK": power_of_two(batch.map_rank),
    }
    return (blocks.shape[0], len(k_buffers) - 1), arguments, constants


def triton_type(dtype: torch.dtype) -> Any:
    """Triton's name of a torch floating type."""
    import triton.language as tl

    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size`` and at least 16, the narrowest tile of a matrix product."""
    return max(16, 1 << (size - 1).bit_length())


def _constants(plan: CorrectionPlan, k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor]) -> dict[str, Any]:
    pool = k_buffers[0]
    return {
        "POOL": triton_type(pool.dtype),
        "DIM": plan.head_dim,
        "ROTARY": plan.table.rotary_dim,
        "NEOX": plan.table.is_neox,
        "POOL_ALIGNED": all(x.data_ptr() % 16 == 0 for x in (*k_buffers, *v_buffers)),
        "PRECISION": _precision(pool.dtype),
    }


def _precision(pool: torch.dtype) -> str:
    # TF32 keeps 10 bits of a factor: as many as fp16 and three more than bf16 keep of the result. An fp32 pool gets
    # three TF32 products in the place of one, or true fp32 products where the compiler has no such thing.
    if pool != torch.float32:
        return "tf32"
    return "ieee" if torch.version.hip is not None else "tf32x3"


def _addresses(k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """int64 [L] each: where the layers' buffers start."""
    device = k_buffers[0].device
    key = (device.index or 0, *(x.data_ptr() for x in (*k_buffers, *v_buffers)))
    if key not in _pools:
        if len(_pools) >= _POOLS:
            _pools.clear()
        k, v = (torch.tensor([x.data_ptr() for x in part], dtype=torch.int64) for part in (k_buffers, v_buffers))
        _pools[key] = upload(k, device), upload(v, device)
    return _pools[key]


def _check(k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor]) -> None:
    first = k_buffers[0]
    want = (first.dtype, first.device, first.stride())
    for name, buffers in (("k_buffers", k_buffers), ("v_buffers", v_buffers)):
        for layer, buffer in enumerate(buffers):
            if (buffer.dtype, buffer.device, buffer.stride()) != want:
                raise ValueError(
                    f"{name}[{layer}] is {buffer.dtype} on {buffer.device} with strides {buffer.stride()}: all "
                    f"buffers must be {want[0]} on {want[1]} with strides {want[2]}"
                )
    if first.stride(2) != 1 or first.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"k_buffers are {first.dtype} with strides {first.stride()}: they must be fp32, fp16 or bf16 "
                         "with the last stride 1")  # fmt: skip
