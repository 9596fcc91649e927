"""The Triton kernels against the torch reference, every access checked."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import triton
from kvcmas_sgl.triton_kernels import AffineDelta, CorrectionError, LowRankDelta, Segment, triton_backend

from tests.kernels.cases import SLOTS, Model, assert_rounded_once, draw, planned, ragged, reference, segments
from tests.kernels.interpreted.running import run_watched

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def check(model: Model, made: list[Segment], seed: int = 3) -> None:
    """Run watched, compare all buffers, and see that slots outside of the targets kept their bits."""
    k, v = model.pool(seed)
    before = [x.clone() for x in (*k, *v)]
    plan = planned(model, made)
    want = reference(plan, k, v)
    seen, failed = run_watched(plan, k, v)
    assert not failed
    assert seen.races() == 0
    assert_rounded_once([*k, *v], want)
    others = torch.ones(SLOTS, dtype=torch.bool)
    others[torch.cat([one.target_slots for one in made])] = False
    for a, b in zip((*k, *v), before, strict=True):
        assert torch.equal(a[others], b[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("rotary", [None, 12], ids=["full", "partial"])
def test_a_ragged_batch_of_all_kinds(dtype: torch.dtype, neox: bool, rotary: int | None) -> None:
    model = Model(dtype=dtype, neox=neox, rotary=rotary)
    check(model, ragged(model))


@pytest.mark.parametrize(("dim", "rotary"), [(64, None), (80, 32), (96, None), (128, None), (256, 64)])
def test_head_dims(dim: int, rotary: int | None) -> None:
    model = Model(heads=3, dim=dim, rotary=rotary, dtype=torch.bfloat16)
    check(model, segments(1, [(9, 0, model.low_rank(2, 9, 8)), (7, 5, model.affine(3, 8)), (5, 0, None)]))


@pytest.mark.parametrize("rank", [1, 15, 16, 17, 40, 64])
def test_ranks(rank: int) -> None:
    model = Model()
    check(model, segments(2, [(20, 0, model.low_rank(5, 20, rank)), (18, 0, model.affine(6, rank))]))


def test_ranks_of_keys_and_values_may_differ() -> None:
    model = Model()
    one, other = model.low_rank(1, 12, 3), model.low_rank(2, 12, 33)
    check(model, segments(3, [(12, 0, LowRankDelta(one.left_k, one.right_k, other.left_v, other.right_v))]))


@pytest.mark.parametrize("kept", DTYPES)
def test_factors_in_another_type_than_the_pool(kept: torch.dtype) -> None:
    model = Model(dtype=torch.float32)
    check(model, segments(4, [(17, 0, model.low_rank(7, 17, 12, dtype=kept))]))


def test_factors_cut_from_longer_ones_are_not_copied_nor_read_wide() -> None:
    model = Model(dtype=torch.bfloat16)
    whole = model.low_rank(8, 40, 5)
    cut = LowRankDelta(whole.left_k[:, 11:30], whole.right_k, whole.left_v[:, 11:30], whole.right_v, start=11)
    made = segments(5, [(19, 11, cut)])
    batch = triton_backend.prepare(planned(model, made), torch.device("cpu"))[0]
    assert not batch.parts_aligned
    assert batch.keep[0].data_ptr() == cut.left_k.data_ptr()
    check(model, made)


@pytest.mark.parametrize("decays", [((math.inf,), ()), ((16.0,), (8.0,)), ((1.0, 64.0, math.inf), (1.0,) * 17)])
def test_decays(decays: tuple[tuple[float, ...], tuple[float, ...]]) -> None:
    model = Model()
    check(model, segments(6, [(30, 250, model.affine(9, 7, *decays))]))


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
def test_moved_values_and_unmoved_keys_keep_their_bits(neox: bool) -> None:
    model = Model(dtype=torch.bfloat16, neox=neox)
    k, v = model.pool(1)
    slots = torch.randperm(SLOTS)[:60]
    source, target = slots[:30], slots[30:]
    run_watched(planned(model, [Segment(source, target, 7, 7)]), k, v)
    for x in (*k, *v):
        assert torch.equal(x[target], x[source])


def test_layer_zero_is_only_moved() -> None:
    model = Model(dtype=torch.bfloat16)
    made = [(20, 0, model.low_rank(1, 20, 4)), (20, 0, model.affine(2, 4))]
    (k, v), (k_moved, v_moved) = model.pool(2), model.pool(2)
    run_watched(planned(model, segments(7, made)), k, v)
    run_watched(planned(model, segments(7, [(n, at, None) for n, at, _ in made])), k_moved, v_moved)
    assert torch.equal(k[0], k_moved[0]) and torch.equal(v[0], v_moved[0])
    assert not torch.equal(k[1], k_moved[1])


def test_buffers_that_share_one_tensor() -> None:
    """A pool may interleave K and V, so that slots and heads are not next to each other."""
    model = Model(dtype=torch.float16)
    whole = draw(1, SLOTS, 2, model.layers, model.heads + 1, model.dim).half()
    k, v = ([whole[:, which, i, : model.heads] for i in range(model.layers)] for which in (0, 1))
    made = ragged(model)
    plan = planned(model, made)
    want = reference(plan, k, v)
    run_watched(plan, k, v)
    assert_rounded_once([*k, *v], want)


def big_pool(model: Model, apart: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Three slots a buffer, ``apart`` elements from each other; only what is touched takes memory."""
    buffers = 2 * model.layers
    whole = torch.empty(2 * apart + buffers * model.width, dtype=model.dtype)
    made = []
    for i in range(buffers):
        view = whole[i * model.width :].as_strided((3, model.heads, model.dim), (apart, model.dim, 1), i * model.width)
        view[0] = draw(i, model.heads, model.dim).to(model.dtype)
        made.append(view)
    return made[: model.layers], made[model.layers :]


def test_pools_over_2_to_the_31_elements() -> None:
    model = Model(dtype=torch.bfloat16)
    k, v = big_pool(model, 2**30 + 64)
    for delta in (None, model.low_rank(3, 1, 4), model.affine(4, 4)):
        small = [[torch.stack([x[0], x[0]]) for x in part] for part in (k, v)]
        want = reference(planned(model, [Segment(torch.tensor([0]), torch.tensor([1]), 5, 50, 0, delta)]), *small)
        far = planned(model, [Segment(torch.tensor([0]), torch.tensor([2]), 5, 50, 0, delta)])
        run_watched(far, k, v)
        assert_rounded_once([x[2] for x in (*k, *v)], [x[1] for x in want])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["moved key", "moved value", "layer 0", "factor", "map"])
def test_values_that_are_not_finite_are_reported(bad: float, where: str) -> None:
    model = Model(dtype=torch.bfloat16)
    k, v = model.pool(1)
    delta: LowRankDelta | AffineDelta | None = None
    if where == "factor":
        delta = model.low_rank(1, 20, 3)
        delta.left_v[1, 13, 2] = bad
    elif where == "map":
        delta = model.affine(1, 3)
        delta.project[1, 5, 1] = bad
    made = segments(8, [(20, 0, delta)])
    if delta is None:
        buffer = {"moved key": k[1], "moved value": v[1], "layer 0": k[0]}[where]
        buffer[made[0].source_slots[17], 1, 3] = bad
    with pytest.raises(CorrectionError):
        triton_backend.run(planned(model, made), k, v)


def test_a_sum_beyond_fp16_is_reported() -> None:
    model = Model(dtype=torch.float16)
    k, v = model.pool(1)
    delta = model.low_rank(1, 20, 1, dtype=torch.float32)
    delta.left_v[1, 4] = 1e6
    plan = planned(model, segments(8, [(20, 0, delta)]))
    with pytest.raises(CorrectionError):
        triton_backend.run(plan, k, v)


def test_what_is_not_finite_elsewhere_in_the_pool_is_nobodys_business() -> None:
    model = Model(dtype=torch.bfloat16)
    k, v = model.pool(1)
    made = ragged(model)
    others = torch.ones(SLOTS, dtype=torch.bool)
    for one in made:
        others[one.source_slots] = False
    for x in (*k, *v):
        x[others] = float("nan")
    # A row that is masked off reads slot 0 or the rows after its group: neither may leak.
    triton_backend.run(planned(model, made), k, v)


def test_an_empty_plan_does_nothing() -> None:
    triton_backend.run(planned(Model(), []), *Model().pool(1))


def test_run_refuses_buffers_that_differ() -> None:
    model = Model()
    k, v = model.pool(1)
    plan = planned(model, ragged(model))
    with pytest.raises(ValueError, match=r"v_buffers\[1\] is torch.float16"):
        triton_backend.run(plan, k, [v[0], v[1].half()])
    with pytest.raises(ValueError, match=r"k_buffers\[1\].*strides"):
        triton_backend.run(plan, [k[0], k[1].transpose(0, 1).contiguous().transpose(0, 1)], v)
    with pytest.raises(ValueError, match="float64"):
        triton_backend.run(plan, [x.double() for x in k], [x.double() for x in v])


def test_an_unknown_kind_of_delta_is_refused_by_name() -> None:
    class OddDelta:
        layers, width, extent = 2, 64, None

    model = Model()
    plan = planned(model, segments(1, [(4, 0, None)]))
    odd = replace(plan, groups=(replace(plan.groups[0], delta=OddDelta()),))
    with pytest.raises(TypeError, match="OddDelta"):
        triton_backend.run(odd, *model.pool(1))


def test_tables_go_with_their_plan() -> None:
    model = Model()
    plan = planned(model, ragged(model))
    made = triton_backend.prepare(plan, torch.device("cpu"))
    assert triton_backend.prepare(plan, torch.device("cpu")) is made
    key = id(plan)
    del plan
    assert key not in triton_backend._prepared


def test_why_it_is_unavailable_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert triton_backend.unavailable(cpu, torch.bfloat16) is None
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert triton_backend.unavailable(cpu, torch.bfloat16) == "Triton needs a GPU: the KV pool is on cpu"
