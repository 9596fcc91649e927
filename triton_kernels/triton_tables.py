"""What the Triton kernels read, built once a plan: rows and factors of groups that one launch can serve.

Groups are put together by what a launch fixes at compile time: whether there is a delta, its kind, and the types of its
factors. Ranks, lengths, shifts and decays may differ inside a batch; factors are found through tables of addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .batch import CorrectionPlan, Group
from .delta import AffineDelta, LowRankDelta

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Ranks are padded to what matrix units take.
RANK_PAD = 16


class Part(NamedTuple):
    """Factors of K's or V's delta, as ``correct`` reads them: addresses, strides in elements, sizes.

    ``columns``: of ``left`` that may be read; those beyond rank and biases meet zeros, so they must be finite.
    """

    left: int
    left_layer: int
    left_row: int
    right: int
    right_layer: int
    right_row: int
    rank: int
    columns: int
    bias: int = 0
    bias_layer: int = 0
    bias_row: int = 0
    biases: int = 0

    def aligned(self, left_bytes: int, right_bytes: int) -> bool:
        """All rows start at 16 bytes, so they may be read 16 bytes at a time."""
        addresses = (self.left, self.right, self.bias)
        left, right = (self.left_layer, self.left_row), (self.right_layer, self.right_row)
        rows = [x * left_bytes for x in left] + [x * right_bytes for x in (*right, self.bias_layer, self.bias_row)]
        # The kernel promises a multiple of 8 elements to the compiler, which is 16 bytes for the narrowest type.
        strides = (*left, *right, self.bias_layer, self.bias_row, self.columns)
        return all(x % 16 == 0 for x in (*addresses, *rows)) and all(x % 8 == 0 for x in strides)


class Map(NamedTuple):
    """A predicted delta's features, as ``features`` reads them."""

    project: int
    project_layer: int
    shift: int
    shift_layer: int
    taus: int
    rank: int
    decays: int
    biases: int

    def aligned(self) -> bool:
        return self.project % 16 == 0 and self.project_layer % 8 == 0 and self.rank % 8 == 0


@dataclass(frozen=True)
class Batch:
    """Groups of one launch. Row tensors are on the pool's device, ``rows`` long over all groups.

    source, target, at, offsets: int64 [rows]; shift, leave, arrive: fp32 pairs [rows, rotary_dim / 2] (leave for
    predicted deltas only, arrive for all deltas). parts: int64 [groups, 2, 12]; maps: int64 [groups, 8] or None.
    out: fp32 [L, rows, columns], where ``features`` writes the left rows, or None. ``rank``: the largest, biases
    included, padded; ``map_rank``: without biases. ``keep``: what the addresses point to.
    """

    lengths: tuple[int, ...]
    source: Tensor
    target: Tensor
    shift: tuple[Tensor, Tensor]
    at: Tensor
    offsets: Tensor
    leave: tuple[Tensor, Tensor] | None = None
    arrive: tuple[Tensor, Tensor] | None = None
    parts: Tensor | None = None
    maps: Tensor | None = None
    out: Tensor | None = None
    left: torch.dtype = torch.float32
    right: torch.dtype = torch.float32
    rank: int = RANK_PAD
    map_rank: int = RANK_PAD
    parts_aligned: bool = False
    maps_aligned: bool = False
    keep: tuple[Tensor, ...] = ()
    # Row blocks by block size: a tuner asks for several.
    _blocks: dict[int, Tensor] = field(default_factory=dict, repr=False)

    @property
    def rows(self) -> int:
        return self.source.numel()

    def blocks(self, size: int) -> Tensor:
        """int32 [B, 3]: group, first row and number of rows of every block; blocks do not cross groups."""
        if size not in self._blocks:
            found, first = [], 0
            for group, length in enumerate(self.lengths):
                found += [[group, first + i, min(size, length - i)] for i in range(0, length, size)]
                first += length
            self._blocks[size] = upload(torch.tensor(found, dtype=torch.int32), self.source.device)
        return self._blocks[size]


def upload(host: Tensor, device: torch.device) -> Tensor:
    """``host`` on ``device``, without waiting for what the device is doing."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def batches(plan: CorrectionPlan, device: torch.device) -> tuple[Batch, ...]:
    """One ``Batch`` for all rows that are only moved, one for each kind and type of delta. Raises TypeError on a delta
    of a kind that the kernels do not know."""
    moves: list[Group] = []
    measured: dict[tuple[torch.dtype, torch.dtype], list[tuple[Group, _Factors]]] = {}
    predicted: list[Group] = []
    for group in plan.groups:
        if group.delta is None:
            moves.append(group)
        elif isinstance(group.delta, AffineDelta):
            predicted.append(group)
        elif isinstance(group.delta, LowRankDelta):
            factors = _Factors.of(group.delta, device)
            measured.setdefault(factors.types, []).append((group, factors))
        else:
            raise TypeError(f"a delta is {type(group.delta).__name__}: it must be LowRankDelta, AffineDelta or None")
    made = [_measured(members, device) for members in measured.values()]
    if predicted:
        made.append(_predicted(predicted, device))
    if moves:
        made.append(_rows(moves, device))
    return tuple(made)


@dataclass(frozen=True)
class _Factors:
    """Factors of a measured delta on the device, in types that the kernels take; K's and V's types agree."""

    left: tuple[Tensor, Tensor]
    right: tuple[Tensor, Tensor]

    @property
    def types(self) -> tuple[torch.dtype, torch.dtype]:
        return self.left[0].dtype, self.right[0].dtype

    @classmethod
    def of(cls, delta: LowRankDelta, device: torch.device) -> _Factors:
        return cls(_alike(delta.left_k, delta.left_v, device), _alike(delta.right_k, delta.right_v, device))


def _alike(k: Tensor, v: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    dtype = k.dtype if k.dtype == v.dtype and k.dtype in _FLOATS else torch.float32
    return _dense(k.to(device, dtype)), _dense(v.to(device, dtype))


def _dense(x: Tensor) -> Tensor:
    """Kernels step through the last dimension one by one; the others may be strided, as in a slice."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows(groups: Sequence[Group], device: torch.device) -> Batch:
    def join(parts: Sequence[Tensor]) -> Tensor:
        return (torch.cat(list(parts)) if len(parts) > 1 else parts[0]).to(device).contiguous()

    def pair(rotations: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return join([cos for cos, _ in rotations]), join([sin for _, sin in rotations])

    leave = [group.leave for group in groups if isinstance(group.delta, AffineDelta) and group.leave is not None]
    arrive = [group.arrive for group in groups if group.delta is not None and group.arrive is not None]
    offsets = join([group.t for group in groups])
    return Batch(
        lengths=tuple(group.source.numel() for group in groups),
        source=join([group.source for group in groups]),
        target=join([group.target for group in groups]),
        shift=pair([group.shift for group in groups]),
        at=offsets,
        offsets=offsets,
        leave=pair(leave) if leave else None,
        arrive=pair(arrive) if arrive else None,
    )


def _padded(rank: int) -> int:
    return -(-rank // RANK_PAD) * RANK_PAD


def _with(batch: Batch, **changes: object) -> Batch:
    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__ if name != "_blocks"}
    return Batch(**{**fields, **changes})


def _measured(members: Sequence[tuple[Group, _Factors]], device: torch.device) -> Batch:
    parts: list[Part] = []
    at: list[Tensor] = []
    for group, factors in members:
        assert isinstance(group.delta, LowRankDelta)
        at.append((group.t - group.delta.start).to(device))
        for left, right in zip(factors.left, factors.right, strict=True):
            parts.append(
                Part(
                    *(left.data_ptr(), left.stride(0), left.stride(1)),
                    *(right.data_ptr(), right.stride(0), right.stride(1)),
                    rank=left.shape[2],
                    columns=left.shape[2],
                )
            )
    types = members[0][1].types
    return _with(
        _rows([group for group, _ in members], device),
        at=torch.cat(at),
        parts=upload(torch.tensor(parts, dtype=torch.int64), device),
        left=types[0],
        right=types[1],
        rank=_padded(max(part.rank for part in parts)),
        parts_aligned=all(part.aligned(types[0].itemsize, types[1].itemsize) for part in parts),
        keep=tuple(x for _, factors in members for x in (*factors.left, *factors.right)),
    )


def _predicted(groups: Sequence[Group], device: torch.device) -> Batch:
    rows = _rows(groups, device)
    deltas = [group.delta for group in groups if isinstance(group.delta, AffineDelta)]
    columns = _padded(max(delta.rank + len(delta.mean_decays) for delta in deltas))
    # Zeros: columns that pad the rank are read and never written.
    out = torch.zeros(deltas[0].layers, rows.rows, columns, dtype=torch.float32, device=device)
    parts: list[Part] = []
    maps: list[Map] = []
    keep: list[Tensor] = []
    for delta in deltas:
        project, shift, weight, bias = (
            x.to(device, torch.float32).contiguous() for x in (delta.project, delta.shift, delta.weight, delta.bias)
        )
        taus = upload(torch.tensor(delta.token_decays + delta.mean_decays, dtype=torch.float32), device)
        keep += [project, shift, weight, bias, taus]
        maps.append(
            Map(
                *(project.data_ptr(), project.stride(0), shift.data_ptr(), shift.stride(0), taus.data_ptr()),
                *(delta.rank, len(delta.token_decays), len(delta.mean_decays)),
            )
        )
        for begin in (0, delta.width):
            right, more = weight[:, :, begin:], bias[:, :, begin:]
            parts.append(
                Part(
                    *(out.data_ptr(), out.stride(0), out.stride(1)),
                    *(right.data_ptr(), right.stride(0), right.stride(1), delta.rank, columns),
                    *(more.data_ptr(), more.stride(0), more.stride(1), bias.shape[1]),
                )
            )
    return _with(
        rows,
        at=torch.arange(rows.rows, device=device),
        parts=upload(torch.tensor(parts, dtype=torch.int64), device),
        maps=upload(torch.tensor(maps, dtype=torch.int64), device),
        out=out,
        rank=columns,
        map_rank=_padded(max(delta.rank for delta in deltas)),
        parts_aligned=all(part.aligned(4, 4) for part in parts),
        maps_aligned=all(one.aligned() for one in maps),
        keep=tuple(keep),
    )
