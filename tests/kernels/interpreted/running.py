"""Run a plan's kernels in the interpreter with every access checked."""

from __future__ import annotations

import torch
from kvcmas_sgl.triton_kernels import CorrectionPlan, triton_backend
from kvcmas_sgl.triton_kernels.triton_tables import Batch
from kvcmas_sgl.triton_kernels.triton_tuning import Features, Tile

from tests.kernels.memory_check import Seen, watched

TILE = Tile(rows=16, heads=2, rank=16, warps=4, stages=1)
FEATURES = Features(rows=16, chunk=16, warps=4, stages=1)


def tables(batch: Batch) -> list[torch.Tensor]:
    """Everything that a launch of ``batch`` may read besides the pool."""
    pairs = [pair for pair in (batch.shift, batch.leave, batch.arrive) if pair is not None]
    single = [batch.source, batch.target, batch.at, batch.offsets, batch.parts, batch.maps]
    return [
        *(x for pair in pairs for x in pair),
        *(x for x in single if x is not None),
        *batch.keep,
        *(batch.blocks(size) for size in {TILE.rows, FEATURES.rows}),
    ]


def run_watched(plan: CorrectionPlan, k: list[torch.Tensor], v: list[torch.Tensor]) -> tuple[Seen, bool]:
    """What was accessed, and whether a row that is not finite was reported. Raises on accesses out of bounds."""
    failed = torch.zeros(1, dtype=torch.int32)
    made = triton_backend.prepare(plan, k[0].device)
    reads = [x for batch in made for x in tables(batch)] + list(triton_backend._addresses(k, v))
    outs = [batch.out for batch in made if batch.out is not None]
    with watched(reads=reads, writes=[*k, *v, *outs, failed]) as seen:
        for batch in made:
            triton_backend.launch(plan, batch, k, v, failed, TILE, FEATURES)
    return seen, bool(failed)
