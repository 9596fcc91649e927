"""Block sizes for the GPU at hand, measured once: at the first start of a server on such a GPU, and kept in a file.

A start waits for it no longer than `SECONDS`; what was measured by then is used. The file lies beside the compiled CPU
kernels, under a name that depends on the GPU, Triton's version, the kernels' source and the candidates.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import triton_tuning
from .batch import CorrectionPlan, Segment
from .cpu_build import cache_folder
from .delta import AffineDelta, LowRankDelta
from .rope import RotaryTable
from .triton_tuning import Features, Shape, Tile

logger = logging.getLogger(__name__)

SECONDS = 60.0
_ROWS = 1024
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


def tune_pool(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    table: RotaryTable,
    *,
    own_rank: int,
    rank: int,
    gpu: str,
    seconds: float = SECONDS,
    folder: Path | None = None,
) -> None:
    """Choose block sizes for corrections in this pool, whose slots must all be free: some are overwritten.

    own_rank, rank: of measured and of predicted deltas; gpu: name under which the result is kept in ``folder``, by
    default the user's cache. A failure leaves the defaults, and is logged.
    """
    try:
        _tune_pool(k_buffers, v_buffers, table, own_rank, rank, gpu, seconds, folder or cache_folder())
    except Exception:
        logger.exception("kvcmas: block sizes for %s could not be tuned: the defaults are used", gpu)


def _tune_pool(
    k_buffers: Sequence[Tensor],
    v_buffers: Sequence[Tensor],
    table: RotaryTable,
    own_rank: int,
    rank: int,
    gpu: str,
    seconds: float,
    folder: Path,
) -> None:
    from . import triton_backend

    begin = time.monotonic()
    path = folder / f"tuned-{_key(gpu)}.json"
    known = _load(path)
    triton_tuning.use(known)
    made = _plan(k_buffers, table, own_rank, rank)
    pool = k_buffers[0]
    wanted = {Shape.of(made, batch, pool.dtype) for batch in triton_backend.prepare(made, pool.device)}
    if wanted <= known.keys():
        return
    triton_tuning.tune(made, k_buffers, v_buffers, deadline=begin + seconds)
    _save(path, known | {shape: found for shape, found in triton_tuning.tuned().items() if shape in wanted})
    logger.info("kvcmas: chose block sizes for %s in %.0f s: %s", gpu, time.monotonic() - begin, path)


def _plan(k_buffers: Sequence[Tensor], table: RotaryTable, own_rank: int, rank: int) -> CorrectionPlan:
    """One segment for each kind of delta that a server has."""
    from .correction import plan

    first, layers = k_buffers[0], len(k_buffers)
    slots, heads, dim = first.shape
    rows, width, device = min(_ROWS, slots // 6, table.max_positions), heads * dim, first.device

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device=device).mul_(0.01).to(dtype)

    kinds: list[LowRankDelta | AffineDelta | None] = [
        None,
        # As many means as the default estimator has.
        AffineDelta(
            draw(layers, 2 * width, rank),
            draw(layers, rank),
            draw(layers, rank, 2 * width),
            draw(layers, 5, 2 * width),
            (math.inf,),
            (math.inf, 8.0, 32.0, 128.0, 512.0),
        ),
    ]
    if own_rank:
        sizes = (layers, rows, own_rank), (layers, own_rank, width)
        lefts, rights = ([draw(*size, dtype=first.dtype) for _ in range(2)] for size in sizes)
        kinds.append(LowRankDelta(lefts[0], rights[0], lefts[1], rights[1]))
    # Scattered, as slots are once a server has run for a while.
    order = torch.randperm(slots)[: 2 * len(kinds) * rows].to(device).split(rows)
    segments = [Segment(order[2 * i], order[2 * i + 1], 0, 0, 0, delta) for i, delta in enumerate(kinds)]
    return plan(segments, table, head_dim=dim, kv_heads=heads)


def _key(gpu: str) -> str:
    import triton

    source = Path(__file__).with_name("triton_source.py").read_text()
    parts = (gpu, triton.__version__, source, repr(triton_tuning.TILES), repr(triton_tuning.FEATURES))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _load(path: Path) -> dict[Shape, tuple[Tile, Features]]:
    try:
        rows = json.loads(path.read_text())
        return {
            Shape(**row["shape"] | {"pool": _DTYPES[row["shape"]["pool"]]}): (
                Tile(**row["tile"]),
                Features(**row["features"]),
            )
            for row in rows
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("kvcmas: %s cannot be read and is made anew: %s", path, error)
        return {}


def _save(path: Path, found: dict[Shape, tuple[Tile, Features]]) -> None:
    rows: list[dict[str, Any]] = [
        {"shape": asdict(shape) | {"pool": str(shape.pool)}, "tile": asdict(tile), "features": asdict(features)}
        for shape, (tile, features) in found.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        made.write_text(json.dumps(rows, indent=1))
        os.replace(made, path)
