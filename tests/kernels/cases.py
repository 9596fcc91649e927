"""Pools, deltas and batches that the kernel tests share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from kvcmas_sgl.triton_kernels import (
    AffineDelta,
    CorrectionPlan,
    Delta,
    LowRankDelta,
    RotaryTable,
    Segment,
    plan,
    torch_backend,
)

SLOTS = 400


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Model:
    """Sizes of a KV pool and its rotary table."""

    layers: int = 2
    heads: int = 2
    dim: int = 32
    rotary: int | None = None
    neox: bool = True
    dtype: torch.dtype = torch.float32

    @property
    def width(self) -> int:
        return self.heads * self.dim

    def table(self) -> RotaryTable:
        return RotaryTable.from_theta(10_000.0, self.dim, 1024, self.rotary, self.neox)

    def pool(self, seed: int, slots: int = SLOTS) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(k_buffers, v_buffers): [slots, heads, dim] a layer."""
        k, v = (
            [draw(seed + 2 * i + which, slots, self.heads, self.dim).to(self.dtype) for i in range(self.layers)]
            for which in (0, 1)
        )
        return k, v

    def low_rank(self, seed: int, n: int, rank: int, start: int = 0, dtype: torch.dtype | None = None) -> LowRankDelta:
        kind = self.dtype if dtype is None else dtype
        lefts = [draw(seed + i, self.layers, n, rank).to(kind) for i in range(2)]
        rights = [(draw(seed + 2 + i, self.layers, rank, self.width) / rank**0.5).to(kind) for i in range(2)]
        return LowRankDelta(lefts[0], rights[0], lefts[1], rights[1], start)

    def affine(
        self,
        seed: int,
        rank: int,
        token_decays: tuple[float, ...] = (math.inf, 128.0),
        mean_decays: tuple[float, ...] = (math.inf, 8.0, 32.0),
    ) -> AffineDelta:
        columns = rank * len(token_decays)
        return AffineDelta(
            draw(seed, self.layers, 2 * self.width, columns) / self.width**0.5,
            draw(seed + 1, self.layers, columns),
            draw(seed + 2, self.layers, rank, 2 * self.width) / rank**0.5,
            draw(seed + 3, self.layers, len(mean_decays), 2 * self.width),
            token_decays,
            mean_decays,
        )


def segments(seed: int, deltas: Sequence[tuple[int, int, Delta | None]]) -> list[Segment]:
    """One segment for each (rows, span offset, delta), on shuffled slots, at positions drawn from [0, 900)."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(SLOTS, generator=generator)
    made, used = [], 0
    for n, offset, delta in deltas:
        start, arrive = torch.randint(0, 900, (2,), generator=generator).tolist()
        made.append(Segment(slots[used : used + n], slots[used + n : used + 2 * n], start, arrive, offset, delta))
        used += 2 * n
    return made


def ragged(model: Model, seed: int = 0) -> list[Segment]:
    """Every kind at once: moved only, measured of two ranks, starts and lengths, predicted of two ranks and decays."""
    return segments(
        seed,
        [
            (19, 0, None),
            (37, 3, model.low_rank(seed + 1, 45, 5, start=2)),
            (1, 0, model.low_rank(seed + 2, 1, 20)),
            (21, 7, model.affine(seed + 3, 6)),
            (16, 0, model.affine(seed + 4, 16, (64.0,), (1.0,))),
        ],
    )


def planned(model: Model, made: Sequence[Segment]) -> CorrectionPlan:
    return plan(made, model.table(), head_dim=model.dim, kv_heads=model.heads, backend="torch")


def reference(made: CorrectionPlan, k: list[torch.Tensor], v: list[torch.Tensor]) -> list[torch.Tensor]:
    """All buffers (K, then V) after the torch reference ran on an fp32 copy of the pool, not rounded."""
    wide = [[x.float().clone() for x in part] for part in (k, v)]
    torch_backend.run(made, *wide)
    return [*wide[0], *wide[1]]


def assert_rounded_once(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], noise: float = 4e-6) -> None:
    """``got`` is ``want`` (fp32) rounded once to the pool's type, up to fp32 noise relative to the largest value."""
    for layer, (a, b) in enumerate(zip(got, want, strict=True)):
        unit = torch.finfo(a.dtype).eps / 2
        allowed = unit * b.abs() + noise * float(b.abs().max())
        worst = float(((a.float() - b).abs() - allowed).max())
        assert worst <= 0, f"buffer {layer}: off by {worst:.3g} more than one rounding"
