"""The correction op on the CPU: prepares what the C files read, and calls them.

Factors are packed for the kernel's matrix products: in panels of 32 columns, the depth padded to an even number, and
for bf16 the rows in pairs. What an estimator's delta needs is packed once and kept as long as the delta lives.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpu_build
from .batch import CorrectionError, CorrectionPlan, Group
from .delta import AffineDelta, LowRankDelta, fading
from .rope import RotaryTable

logger = logging.getLogger(__name__)

_PANEL = 32
_DTYPES = {torch.bfloat16: 0, torch.float32: 1}
_MOVE, _LOW_RANK, _AFFINE = range(3)

_pointer, _int = ctypes.c_void_p, ctypes.c_int64


class _Group(ctypes.Structure):
    """`group_t` of cpu_source.c."""

    _fields_ = (
        *((name, _int) for name in ("rows", "kind", "moved")),
        *((name, _pointer) for name in ("source", "target", "leave", "arrive", "shift", "at")),
        ("left", _pointer * 2),
        ("right", _pointer * 2),
        *((name, _int * 2) for name in ("left_stride", "right_stride", "left_rank")),
        *((name, _pointer) for name in ("project", "weight", "shift_z", "fade")),
        *((name, _int) for name in ("project_stride", "weight_stride", "rank", "decays", "means")),
    )


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The kernel, or why there is none."""
    try:
        library = cpu_build.load(cpu_build.build())
    except cpu_build.BuildError as error:
        logger.warning("kvcmas: corrections run on torch instead of the CPU kernel: %s", error)
        return str(error)
    return library


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot work on pools of ``dtype`` on ``device``, or None if it can. Compiles it at first use."""
    if device.type != "cpu":
        return f"the pool is on {device.type}"
    if dtype not in _DTYPES:
        return f"the pool is {dtype}: the CPU kernel works on bfloat16 and float32"
    library = _library()
    return library if isinstance(library, str) else None


def run(plan: CorrectionPlan, k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor]) -> None:
    """See ``correction.run``; arguments are checked there."""
    library = _library()
    assert isinstance(library, ctypes.CDLL)
    run_with(library, plan, k_buffers, v_buffers)


def run_with(
    library: ctypes.CDLL, plan: CorrectionPlan, k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor]
) -> None:
    """`run` on a library that `cpu_build` made."""
    dtype = k_buffers[0].dtype if k_buffers else torch.float32
    if not plan.groups or not k_buffers:
        return
    for buffer in (*k_buffers, *v_buffers):
        if buffer.dtype != dtype or not buffer.is_contiguous():
            raise ValueError(f"a buffer is {buffer.dtype}, stride {buffer.stride()}: the CPU kernel needs {dtype} rows")
    bf16 = dtype is torch.bfloat16 and bool(library.kvcmas_bf16_products())
    factor_dtype = torch.bfloat16 if bf16 else torch.float32
    arguments = [_arguments(group, factor_dtype) for group in plan.groups]
    groups = (_Group * len(arguments))(*(one.structure for one in arguments))
    status = library.kvcmas_correct(
        _addresses(k_buffers),
        _addresses(v_buffers),
        *(_int(n) for n in (len(k_buffers), plan.kv_heads, plan.head_dim, plan.table.rotary_dim)),
        *(_int(n) for n in (plan.table.is_neox, _DTYPES[dtype], 0 if bf16 else 1)),
        groups,
        *(_int(n) for n in (len(arguments), max(one.widest for one in arguments), torch.get_num_threads())),
    )
    if status == 1:
        raise CorrectionError("corrected KV holds NaN or Inf: the span must be prefilled densely")
    if status:
        raise MemoryError("the CPU kernel could not allocate its scratch rows")


def canonical_rows(
    k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor], slots: Tensor, positions: Tensor, table: RotaryTable
) -> Tensor:
    """See ``canonical.canonical_rows``; for pools that `unavailable` has nothing against."""
    library = _library()
    assert isinstance(library, ctypes.CDLL)
    first = k_buffers[0]
    heads, dim = first.shape[1:]
    out = torch.empty(2, len(k_buffers), slots.numel(), heads * dim)
    slots, leave = slots.contiguous(), torch.cat(table.rows(positions, inverse=True), 1)
    library.kvcmas_canonical(
        _addresses(k_buffers),
        _addresses(v_buffers),
        *(_int(n) for n in (len(k_buffers), heads, dim, table.rotary_dim, table.is_neox, _DTYPES[first.dtype])),
        *(_pointer(part.data_ptr()) for part in (slots, leave)),
        _int(slots.numel()),
        *(_pointer(part.data_ptr()) for part in out),
        _int(torch.get_num_threads()),
    )
    return out


def left_factors(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    consumer: tuple[Tensor, Tensor],
    source: tuple[Tensor, Tensor],
    right: tuple[Tensor, Tensor],
    table: RotaryTable,
    library: ctypes.CDLL | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``canonical.left_factors``; for pools that `unavailable` has nothing against. ``library``: of `cpu_build`."""
    built = library or _library()
    assert isinstance(built, ctypes.CDLL)
    first, rows, rank = k_buffers[0], consumer[0].numel(), right[0].shape[1]
    heads, dim = first.shape[1:]
    bf16 = first.dtype is torch.bfloat16 and bool(built.kvcmas_bf16_products())
    packed = [pack(part.mT, torch.bfloat16 if bf16 else torch.float32) for part in right]
    places = [
        part
        for slots, positions in (consumer, source)
        for part in (slots.contiguous(), torch.cat(table.rows(positions, inverse=True), 1))
    ]
    left = [torch.empty(len(k_buffers), rows, rank, dtype=first.dtype) for _ in range(2)]
    status = built.kvcmas_project(
        _addresses(k_buffers),
        _addresses(v_buffers),
        *(_int(n) for n in (len(k_buffers), heads, dim, table.rotary_dim, table.is_neox, _DTYPES[first.dtype])),
        _int(0 if bf16 else 1),
        *(_pointer(part.data_ptr()) for part in places),
        _int(rows),
        *(_pointer(part.data_ptr()) for part in packed),
        *(_int(n) for n in (packed[0].shape[1], rank)),
        *(_pointer(part.data_ptr()) for part in left),
        _int(torch.get_num_threads()),
    )
    if status == 1:
        raise CorrectionError("a delta holds NaN or Inf: it cannot be factored")
    if status:
        raise MemoryError("the CPU kernel could not allocate its scratch rows")
    return left[0], left[1]


def _addresses(buffers: Sequence[Tensor]) -> Any:
    return (_pointer * len(buffers))(*(buffer.data_ptr() for buffer in buffers))


@dataclass(frozen=True, eq=False)
class _Arguments:
    """``structure`` points into ``held``. ``widest``: of `kvcmas_correct`."""

    structure: _Group
    held: tuple[Tensor, ...]
    widest: int


@dataclass(frozen=True, eq=False)
class _Packed:
    """An affine delta's packed project [L, ...] and [weight; bias] [L, ...], and its fp32 shift [L, J r]."""

    project: Tensor
    weight: Tensor
    shift: Tensor


_packed: WeakKeyDictionary[AffineDelta, dict[torch.dtype, _Packed]] = WeakKeyDictionary()


def pack(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """``matrix`` [L, depth, columns] as `product` in cpu_common.h reads it: ``dtype`` [L, panels * even depth * 32]."""
    layers, depth, columns = matrix.shape
    # Padding takes what there is; a matrix that is whole already is not copied twice.
    whole = F.pad(matrix.to(dtype), (0, -columns % _PANEL, 0, depth % 2))
    pairs = 2 if dtype is torch.bfloat16 else 1
    cut = whole.view(layers, whole.shape[1] // pairs, pairs, -1, _PANEL)
    return cut.permute(0, 3, 1, 4, 2).reshape(layers, -1).contiguous()


def _arguments(group: Group, dtype: torch.dtype) -> _Arguments:
    fields: dict[str, Any] = {}
    held: list[Tensor] = []

    def point(name: str, tensor: Tensor) -> None:
        held.append(tensor)
        fields[name] = tensor.data_ptr()

    def point_both(name: str, tensors: Sequence[Tensor]) -> None:
        held.extend(tensors)
        fields[name] = (_pointer * 2)(*(tensor.data_ptr() for tensor in tensors))

    point("source", group.source.contiguous())
    point("target", group.target.contiguous())
    for name, rotation in (("shift", group.shift), ("leave", group.leave), ("arrive", group.arrive)):
        if rotation is not None:
            point(name, torch.cat(rotation, 1))
    delta, kind, longest = group.delta, _MOVE, 0
    if isinstance(delta, LowRankDelta):
        kind = _LOW_RANK
        lefts = [left.to(dtype).contiguous() for left in (delta.left_k, delta.left_v)]
        rights = [pack(right, dtype) for right in (delta.right_k, delta.right_v)]
        longest = max(left.shape[2] for left in lefts) + 1
        point("at", group.t - delta.start)
        point_both("left", lefts)
        point_both("right", rights)
        fields["left_stride"] = (_int * 2)(*(left[0].numel() for left in lefts))
        fields["right_stride"] = (_int * 2)(*(right.shape[1] for right in rights))
        fields["left_rank"] = (_int * 2)(*(left.shape[2] for left in lefts))
    elif isinstance(delta, AffineDelta):
        kind = _AFFINE
        made = _packed_affine(delta, dtype)
        longest = max(2 * delta.width, delta.project.shape[2], delta.rank + delta.bias.shape[1] + 1)
        point("project", made.project)
        point("weight", made.weight)
        point("shift_z", made.shift)
        point("fade", fading(group.t, delta.token_decays + delta.mean_decays))
        fields |= {
            "project_stride": made.project.shape[1],
            "weight_stride": made.weight.shape[1],
            "rank": delta.rank,
            "decays": len(delta.token_decays),
            "means": len(delta.mean_decays),
        }
    elif delta is not None:
        raise ValueError(f"delta is a {type(delta).__name__}: the CPU kernel knows LowRankDelta and AffineDelta")
    structure = _Group(rows=group.source.numel(), kind=kind, moved=group.moved, **fields)
    return _Arguments(structure, tuple(held), longest + -longest % _PANEL)


def _packed_affine(delta: AffineDelta, dtype: torch.dtype) -> _Packed:
    made = _packed.setdefault(delta, {})
    if dtype not in made:
        made[dtype] = _Packed(
            project=pack(delta.project, dtype),
            weight=pack(torch.cat([delta.weight, delta.bias], 1), dtype),
            shift=delta.shift.contiguous(),
        )
    return made[dtype]
