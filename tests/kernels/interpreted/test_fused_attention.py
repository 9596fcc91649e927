"""Attention over a span that is corrected on the way: against attention over KV that the correction op wrote."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kvcmas_sgl.triton_kernels import CorrectionPlan, torch_backend
from kvcmas_sgl.triton_kernels.fused_attention import Attended, attend, attend_reference, merge

from tests.kernels.cases import Model, draw, planned, segments
from tests.kernels.memory_check import watched

SCALE = 0.17
# Keys, weights and values are rounded to the pool's type before the matrix products.
ALLOWED = [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)]
Attend = Callable[..., Attended]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attended:
    """Softmax attention in float64; q: [queries, heads, dim], k, v: [rows, kv_heads, dim]."""
    share = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(share, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,nhd->qhn", q.double(), keys) * SCALE
    return Attended(torch.einsum("qhn,nhd->qhd", scores.softmax(-1), values).float(), scores.logsumexp(-1).float())


def case(dtype: torch.dtype, rows: int, rank: int) -> tuple[Model, CorrectionPlan, torch.Tensor]:
    model = Model(dim=32, dtype=dtype)
    plan = planned(model, segments(4, [(rows, 3, model.low_rank(5, rows + 4, rank, start=1))]))
    # Three queries of six heads on two KV heads.
    return model, plan, draw(9, 3, 6, 32).to(dtype)


@pytest.mark.parametrize("way", [attend, attend_reference], ids=["kernel", "reference"])
@pytest.mark.parametrize(("dtype", "allowed"), ALLOWED)
@pytest.mark.parametrize(("rows", "rank"), [(1, 1), (32, 16), (75, 20)])
def test_equals_attention_over_written_kv(
    way: Attend, dtype: torch.dtype, allowed: float, rows: int, rank: int
) -> None:
    model, plan, q = case(dtype, rows, rank)
    k, v = model.pool(3)
    written_k, written_v = [x.float() for x in k], [x.float() for x in v]
    torch_backend.run(plan, written_k, written_v)
    group = plan.groups[0]
    want = attention(q, written_k[1][group.target], written_v[1][group.target])
    got = way(q, k[1], v[1], group, plan.table, 1, SCALE)
    assert (got.out - want.out).abs().max() <= allowed * want.out.abs().max()
    assert (got.lse - want.lse).abs().max() <= allowed * want.lse.abs().max()


def test_merged_with_the_rest_it_is_attention_over_everything() -> None:
    model, plan, q = case(torch.float32, 40, 8)
    k, v = model.pool(3)
    written_k, written_v = [x.clone() for x in k], [x.clone() for x in v]
    torch_backend.run(plan, written_k, written_v)
    group = plan.groups[0]
    rest_k, rest_v = draw(1, 50, 2, 32), draw(2, 50, 2, 32)
    everything = attention(
        q, torch.cat([rest_k, written_k[1][group.target]]), torch.cat([rest_v, written_v[1][group.target]])
    )
    got = merge(attention(q, rest_k, rest_v), attend(q, k[1], v[1], group, plan.table, 1, SCALE))
    assert torch.allclose(got.out, everything.out, atol=1e-5)
    assert torch.allclose(got.lse, everything.lse, atol=1e-5)


def test_a_delta_in_the_roped_frame_would_be_wrong() -> None:
    """The bound above is far below what roping the delta is worth."""
    model, plan, q = case(torch.float32, 40, 8)
    k, v = model.pool(3)
    group = plan.groups[0]
    right = attend_reference(q, k[1], v[1], group, plan.table, 1, SCALE)
    still = torch.ones_like(group.shift[0]), torch.zeros_like(group.shift[0])
    object.__setattr__(group, "arrive", still)
    wrong = attend_reference(q, k[1], v[1], group, plan.table, 1, SCALE)
    assert (wrong.out - right.out).abs().max() > 0.1 * right.out.abs().max()


def test_every_access_is_inside() -> None:
    from kvcmas_sgl.triton_kernels.fused_attention import attend_launch
    from kvcmas_sgl.triton_kernels.fused_attention_source import attend as kernel

    model, plan, q = case(torch.bfloat16, 75, 20)
    k, v = model.pool(3)
    grid, arguments, constants = attend_launch(q, k[1], v[1], plan.groups[0], plan.table, 1, SCALE)
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    with watched(reads=tensors[:-2], writes=tensors[-2:]) as seen:
        kernel[grid](*arguments, **constants)
    assert seen.races() == 0 and seen.loads


def test_what_the_kernel_does_not_take_is_refused() -> None:
    model, plan, q = case(torch.float32, 5, 2)
    k, v = model.pool(3)
    group = plan.groups[0]
    with pytest.raises(ValueError, match="one type"):
        attend(q.half(), k[1], v[1], group, plan.table, 1, SCALE)
    odd = planned(Model(neox=False), segments(4, [(5, 0, model.low_rank(5, 5, 2))]))
    with pytest.raises(ValueError, match="NeoX"):
        attend(q, k[1], v[1], odd.groups[0], odd.table, 1, SCALE)
    moved = planned(model, segments(4, [(5, 0, None)]))
    with pytest.raises(ValueError, match="NoneType"):
        attend(q, k[1], v[1], moved.groups[0], moved.table, 1, SCALE)
