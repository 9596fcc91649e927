"""Attention over a span that is corrected on the way, as a GPU binary."""

from __future__ import annotations

import pytest
import torch
from kvcmas_sgl.triton_kernels.fused_attention import BLOCKS, SMALL_BLOCKS, WARPS, attend_launch
from kvcmas_sgl.triton_kernels.fused_attention_source import attend

from tests.kernels.cases import Model, draw, planned, segments
from tests.kernels.compiler import MATRIX, SHARED, TARGETS, WIDE_LOAD, build


@pytest.mark.parametrize("target", TARGETS)
def test_llama_shapes(target: str) -> None:
    model = Model(heads=8, dim=128, dtype=torch.bfloat16)
    plan = planned(model, segments(0, [(40, 0, model.low_rank(1, 40, 32))]))
    k, v = model.pool(1)
    blocks = SMALL_BLOCKS if target == "sm_80" else BLOCKS
    launch = attend_launch(draw(1, 16, 32, 128).bfloat16(), k[1], v[1], plan.groups[0], plan.table, 1, 0.1, blocks)
    found = build(attend, launch, {"num_warps": WARPS, "num_stages": 1}, target)
    assert found.spills == 0
    assert found.shared <= SHARED[target]
    assert found.count(MATRIX) > 0 and found.count(WIDE_LOAD) > 0
