"""Block sizes of the Triton kernels: a default for each shape, and a tuner for a GPU at hand.

Defaults are configurations that compile without spills for every GPU that the tests compile for. ``tune`` measures the
candidates on the pool itself, which is safe since the op writes the same values whenever it is repeated: a plan's
sources and targets do not overlap. It drops what the compiler reports as spilling or as too large before timing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from .batch import CorrectionPlan
from .triton_tables import Batch


@dataclass(frozen=True)
class Tile:
    """Configuration of ``correct``: rows a block, heads a program, rank a step, warps, pipeline stages,
    and the most registers a thread may have (NVIDIA)."""

    rows: int
    heads: int
    rank: int
    warps: int
    stages: int
    registers: int | None = None

    def heads_of(self, kv_heads: int) -> int:
        """Heads a program: a divisor of ``kv_heads``, so that no program is left with fewer."""
        return max(size for size in range(1, self.heads + 1) if kv_heads % size == 0)

    def rank_of(self, rank: int) -> int:
        """Rank a step, not more than the padded ``rank`` rounded up to a power of two."""
        return min(self.rank, 1 << (rank - 1).bit_length())

    def options(self) -> dict[str, int]:
        return _options(self.warps, self.stages, self.registers)


@dataclass(frozen=True)
class Features:
    """Configuration of ``features``: rows a block, channels a step, and the compiler's options as in ``Tile``."""

    rows: int
    chunk: int
    warps: int
    stages: int
    registers: int | None = None

    def options(self) -> dict[str, int]:
        return _options(self.warps, self.stages, self.registers)


def _options(warps: int, stages: int, registers: int | None) -> dict[str, int]:
    # AMD's compiler knows no such limit, and refuses the option.
    limit = {} if registers is None or torch.version.hip is not None else {"maxnreg": registers}
    return {"num_warps": warps, "num_stages": stages, **limit}


C = TypeVar("C", Tile, Features)


@dataclass(frozen=True)
class Shape:
    """What the best configuration depends on."""

    pool: torch.dtype
    head_dim: int
    kv_heads: int
    delta: str
    rank: int

    @classmethod
    def of(cls, plan: CorrectionPlan, batch: Batch, pool: torch.dtype) -> Shape:
        kind = "none" if batch.parts is None else "measured" if batch.maps is None else "predicted"
        return cls(pool, plan.head_dim, plan.kv_heads, kind, 0 if kind == "none" else batch.rank)


TILES = tuple(
    Tile(rows, heads, 32, warps, 1, registers)
    for rows, warps, registers in (
        (16, 4, None),
        (16, 4, 128),
        (32, 4, None),
        (32, 8, None),
        (32, 8, 128),
        (64, 8, None),
    )
    for heads in (1, 2, 4)
)
FEATURES = tuple(
    Features(rows, chunk, warps, 1)
    for chunk in (32, 64)
    for rows, warps in ((16, 4), (32, 4), (64, 4), (64, 8), (128, 8))
)
_tuned: dict[Shape, tuple[Tile, Features]] = {}


def chosen(shape: Shape) -> tuple[Tile, Features]:
    """The tuned configuration, or else a default."""
    return _tuned.get(shape) or default(shape)


def default(shape: Shape) -> tuple[Tile, Features]:
    """What is used where nothing was tuned: the largest blocks that spill on none of the GPUs that are compiled for.

    With 128 channels a head, 32 rows on four warps, or a pipeline of two stages, take all 255 registers and spill.
    """
    features = Features(64, 32, 8, 1)
    if shape.delta == "none":
        return Tile(32, 4, 16, 4, 1), features
    return Tile(16, 4, 32, 8 if shape.head_dim > 128 else 4, 1), features


def fits(kernel: Any, made: tuple[Any, ...], options: dict[str, int]) -> bool:
    """Whether the compiler can build ``kernel`` for this launch within the device's shared memory and with no spill."""
    from triton.runtime.errors import OutOfResources

    grid, arguments, constants = made
    compiled = kernel.warmup(*arguments, grid=grid, **constants, **options)
    try:
        # Loading is when the driver reports registers; it is what the first launch would do anyway.
        compiled._init_handles()
    except OutOfResources:
        return False
    return int(compiled.n_spills) == 0


def tune(
    plan: CorrectionPlan, k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor], deadline: float = math.inf
) -> dict[Shape, float]:
    """Time the default and all candidates on ``plan``, keep the best for each of its shapes; milliseconds of the best.

    Needs a GPU; takes seconds a shape, most of them in the compiler. Results stay in this process. After ``deadline``
    (`time.monotonic`) no other candidate is tried. Shapes for which nothing that was tried fits keep their default and
    are left out.
    """
    from . import triton_backend, triton_source

    failed = torch.zeros(1, dtype=torch.int32, device=k_buffers[0].device)
    best: dict[Shape, float] = {}
    for batch in triton_backend.prepare(plan, k_buffers[0].device):
        shape = Shape.of(plan, batch, k_buffers[0].dtype)
        usual, features = default(shape)
        tiles = {
            t: triton_backend.correct_launch(plan, batch, k_buffers, v_buffers, failed, t)
            for t in dict.fromkeys((usual, *TILES))
        }
        tile, spent = _fastest(triton_source.correct, tiles, deadline)
        if batch.maps is not None:
            maps = {
                f: triton_backend.feature_launch(plan, batch, k_buffers, v_buffers, f)
                for f in dict.fromkeys((features, *FEATURES))
            }
            features, more = _fastest(triton_source.features, maps, deadline)
            spent += more
        if math.isfinite(spent):
            _tuned[shape], best[shape] = (tile, features), spent
    return best


def _fastest(kernel: Any, launches: Mapping[C, tuple[Any, ...]], deadline: float) -> tuple[C, float]:
    """The fastest configuration of those that were tried in time, the first one at least, and its milliseconds."""
    times: dict[C, float] = {}
    for configuration, made in launches.items():
        if not times or time.monotonic() < deadline:
            times[configuration] = _time(kernel, made, configuration.options())
    return min(times.items(), key=lambda item: item[1])


def _time(kernel: Any, made: tuple[Any, ...], options: dict[str, int]) -> float:
    """Milliseconds of a launch; infinity if it does not fit."""
    from triton.testing import do_bench

    if not fits(kernel, made, options):
        return math.inf
    grid, arguments, constants = made
    return float(do_bench(lambda: kernel[grid](*arguments, **constants, **options), warmup=5, rep=20))


def use(found: Mapping[Shape, tuple[Tile, Features]]) -> None:
    """Take over what ``tune`` chose in another process."""
    _tuned.update(found)


def tuned() -> dict[Shape, tuple[Tile, Features]]:
    """What ``tune`` has chosen in this process."""
    return dict(_tuned)
