"""The correction op against a float64 oracle, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvcmas_sgl.triton_kernels import (
    ZERO_DELTA,
    AffineDelta,
    CorrectionError,
    Delta,
    LowRankDelta,
    RotaryTable,
    Segment,
    plan,
    run,
)

LAYERS, HEADS, DIM, SLOTS, THETA = 3, 2, 8, 96, 10_000.0
WIDTH = HEADS * DIM
TABLE = RotaryTable.from_theta(THETA, DIM, 1024)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Pool:
    k: list[torch.Tensor]
    v: list[torch.Tensor]


def pool(seed: int, dtype: torch.dtype = torch.float32) -> Pool:
    return Pool(
        [draw(seed + 2 * i, SLOTS, HEADS, DIM).to(dtype) for i in range(LAYERS)],
        [draw(seed + 2 * i + 1, SLOTS, HEADS, DIM).to(dtype) for i in range(LAYERS)],
    )


def copy(one: Pool) -> Pool:
    return Pool([x.clone() for x in one.k], [x.clone() for x in one.v])


def low_rank(seed: int, n: int, rank: int, start: int = 0) -> LowRankDelta:
    left_k, left_v = draw(seed, LAYERS, n, rank), draw(seed + 1, LAYERS, n, rank)
    right_k, right_v = draw(seed + 2, LAYERS, rank, WIDTH), draw(seed + 3, LAYERS, rank, WIDTH)
    return LowRankDelta(left_k, right_k, left_v, right_v, start)


def affine(seed: int, r: int, token_decays: tuple[float, ...], mean_decays: tuple[float, ...]) -> AffineDelta:
    return AffineDelta(
        draw(seed, LAYERS, 2 * WIDTH, r * len(token_decays)) / WIDTH,
        draw(seed + 1, LAYERS, r * len(token_decays)),
        draw(seed + 2, LAYERS, r, 2 * WIDTH),
        draw(seed + 3, LAYERS, len(mean_decays), 2 * WIDTH),
        token_decays,
        mean_decays,
    )


def turn(x: np.ndarray, position: np.ndarray) -> np.ndarray:
    """RoPE in float64, half-split style: x [n, HEADS, DIM], position [n]; negative positions un-rope."""
    frequency = THETA ** (-np.arange(DIM // 2) / (DIM // 2))
    phase = np.exp(1j * position[:, None] * frequency)[:, None, :]
    pair = (x[..., : DIM // 2] + 1j * x[..., DIM // 2 :]) * phase
    return np.concatenate([pair.real, pair.imag], -1)


def oracle_delta(
    delta: Delta | None, layer: int, t: int, k: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(dK, dV) [D] of one token from the formulas of the deltas; k (canonical), v: [D]."""
    if layer == 0 or delta is None or delta is ZERO_DELTA:
        return np.zeros(WIDTH), np.zeros(WIDTH)
    if isinstance(delta, LowRankDelta):
        row = t - delta.start
        left_k, right_k, left_v, right_v = (
            x.double().numpy() for x in (delta.left_k, delta.right_k, delta.left_v, delta.right_v)
        )
        return left_k[layer, row] @ right_k[layer], left_v[layer, row] @ right_v[layer]
    assert isinstance(delta, AffineDelta)
    project, shift, weight, bias = (
        x[layer].double().numpy() for x in (delta.project, delta.shift, delta.weight, delta.bias)
    )
    blocks = (np.concatenate([k, v]) @ project + shift).reshape(len(delta.token_decays), -1)
    h = sum(z / (1 + t / tau) for z, tau in zip(blocks, delta.token_decays, strict=True))
    both = h @ weight + sum(row / (1 + t / tau) for row, tau in zip(bias, delta.mean_decays, strict=True))
    return both[:WIDTH], both[WIDTH:]


def oracle(before: Pool, segments: list[Segment]) -> Pool:
    """What the pool must hold after the correction, in float64."""
    after = Pool([x.double() for x in before.k], [x.double() for x in before.v])
    for layer in range(LAYERS):
        for one in segments:
            n = one.source_slots.numel()
            k = before.k[layer][one.source_slots].double().numpy()
            v = before.v[layer][one.source_slots].double().numpy().reshape(n, WIDTH)
            canonical = turn(k, -(one.source_start + np.arange(n))).reshape(n, WIDTH)
            added = [oracle_delta(one.delta, layer, one.offset + i, canonical[i], v[i]) for i in range(n)]
            dk, dv = (np.stack(part).reshape(n, WIDTH) for part in zip(*added, strict=True))
            moved = turn((canonical + dk).reshape(n, HEADS, DIM), one.target_start + np.arange(n))
            after.k[layer][one.target_slots] = torch.from_numpy(moved)
            after.v[layer][one.target_slots] = torch.from_numpy((v + dv).reshape(n, HEADS, DIM))
    return after


@pytest.fixture(params=["torch", "cpu"], autouse=True)
def backend(request: pytest.FixtureRequest) -> None:
    """Every test of this file runs on every backend that works on CPU tensors."""
    Backend.name = request.param


class Backend:
    name = "torch"


def correct(before: Pool, segments: list[Segment], table: RotaryTable = TABLE) -> Pool:
    after = copy(before)
    run(plan(segments, table, head_dim=DIM, kv_heads=HEADS, backend=Backend.name), after.k, after.v)
    return after


def assert_close(got: Pool, want: Pool, relative: float) -> None:
    for a, b in zip(got.k + got.v, want.k + want.v, strict=True):
        assert (a.double() - b).abs().max() <= relative * b.abs().max()


kinds = st.sampled_from(["none", "zero", "low rank", "affine", "affine decays"])


@st.composite
def batches(draw_from: st.DrawFn) -> tuple[int, list[Segment]]:
    """Segments of ragged lengths and different deltas on shuffled slots that do not overlap."""
    seed = draw_from(st.integers(0, 10_000))
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))
    segments: list[Segment] = []
    used = 0
    for number in range(draw_from(st.integers(1, 4))):
        n, offset = draw_from(st.integers(1, 12)), draw_from(st.integers(0, 40))
        kind = draw_from(kinds)
        delta: Delta | None = None
        if kind == "zero":
            delta = ZERO_DELTA
        elif kind == "low rank":
            start = draw_from(st.integers(0, offset))
            delta = low_rank(seed + number, offset + n - start, draw_from(st.integers(1, 5)), start)
        elif kind == "affine":
            delta = affine(seed + number, draw_from(st.integers(1, 6)), (math.inf,), (math.inf,))
        elif kind == "affine decays":
            delta = affine(seed + number, 4, (math.inf, 32.0), (1.0, 64.0, 512.0))
        source, target = slots[used : used + n], slots[used + n : used + 2 * n]
        used += 2 * n
        at = [draw_from(st.integers(0, 1000)) for _ in range(2)]
        segments.append(Segment(source, target, at[0], at[1], offset, delta))
    return seed, segments


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches())
def test_equals_the_oracle(batch: tuple[int, list[Segment]]) -> None:
    seed, segments = batch
    before = pool(seed)
    # fp32 table angles at position 1000 are off by 3 x 1000 x 2^-24 = 1.8e-4 radians at the worst.
    assert_close(correct(before, segments), oracle(before, segments), 1e-3)


def test_equals_the_oracle_closely_where_the_table_is_exact() -> None:
    """At small positions nothing but fp32 rounding is left."""
    before = pool(5)
    segments = [
        Segment(torch.arange(0, 10), torch.arange(50, 60), 3, 9, 0, low_rank(1, 10, 3)),
        Segment(torch.arange(10, 20), torch.arange(60, 70), 3, 9, 2, affine(1, 4, (math.inf, 8.0), (8.0,))),
        Segment(torch.arange(20, 30), torch.arange(70, 80), 3, 9),
    ]
    assert_close(correct(before, segments), oracle(before, segments), 1e-5)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches())
def test_a_bf16_pool_rounds_once(batch: tuple[int, list[Segment]]) -> None:
    seed, segments = batch
    before = pool(seed, torch.bfloat16)
    got, want = correct(before, segments), oracle(before, segments)
    moved = oracle(before, [replace(one, delta=None) for one in segments])
    for a, b, c in zip(got.k + got.v, want.k + want.v, moved.k + moved.v, strict=True):
        assert a.dtype == torch.bfloat16
        # The CPU kernel multiplies bf16 factors: a product of two is off by 2^-8 of itself at the most.
        factors = 2.0**-7 * (b - c).abs().max() if Backend.name == "cpu" else 0.0
        assert ((a.double() - b).abs() <= 2.0**-8 * b.abs() + 1e-3 * b.abs().max() + factors).all()


def test_slots_outside_the_targets_are_untouched() -> None:
    before = pool(1)
    target = torch.tensor([40, 7, 22])
    after = correct(before, [Segment(torch.tensor([1, 2, 3]), target, 0, 9, 0, low_rank(0, 3, 2))])
    others = torch.tensor([i for i in range(SLOTS) if i not in target.tolist()])
    for a, b in zip(after.k + after.v, before.k + before.v, strict=True):
        assert torch.equal(a[others], b[others])
        assert not torch.equal(a[target], b[target])


@pytest.mark.parametrize("delta", [None, ZERO_DELTA])
def test_without_a_delta_values_and_unmoved_keys_are_bit_exact(delta: Delta | None) -> None:
    before = pool(2, torch.bfloat16)
    source, target = torch.arange(0, 20), torch.arange(30, 50)
    moved = correct(before, [Segment(source, target, 4, 11, 0, delta)])
    still = correct(before, [Segment(source, target, 11, 11, 0, delta)])
    for layer in range(LAYERS):
        assert torch.equal(moved.v[layer][target], before.v[layer][source])
        assert torch.equal(still.k[layer][target], before.k[layer][source])
        assert not torch.equal(moved.k[layer][target], before.k[layer][source])


def test_layer_zero_is_never_corrected() -> None:
    before = pool(3)
    source, target = torch.arange(0, 20), torch.arange(30, 50)
    corrected = correct(before, [Segment(source, target, 4, 11, 0, low_rank(0, 20, 4))])
    rotated = correct(before, [Segment(source, target, 4, 11)])
    assert torch.equal(corrected.k[0], rotated.k[0]) and torch.equal(corrected.v[0], rotated.v[0])
    assert not torch.allclose(corrected.k[1], rotated.k[1])


def test_moving_there_and_back_restores_the_keys() -> None:
    before = pool(4)
    a, b, c = torch.arange(0, 20), torch.arange(30, 50), torch.arange(60, 80)
    back = correct(correct(before, [Segment(a, b, 5, 700)]), [Segment(b, c, 700, 5)])
    for layer in range(LAYERS):
        assert torch.allclose(back.k[layer][c], before.k[layer][a], atol=1e-5)


def test_the_true_delta_rebuilds_the_consumer() -> None:
    """source -> consumer by the delta's definition: unrope both, subtract, factor at full rank."""
    before = pool(6)
    source, consumer, target = torch.arange(0, 12), torch.arange(20, 32), torch.arange(40, 52)
    dk, dv = torch.zeros(LAYERS, 12, WIDTH), torch.zeros(LAYERS, 12, WIDTH)
    for layer in range(1, LAYERS):
        theirs = turn(before.k[layer][consumer].double().numpy(), -(90 + np.arange(12)))
        ours = turn(before.k[layer][source].double().numpy(), -(10 + np.arange(12)))
        dk[layer] = torch.from_numpy((theirs - ours).reshape(12, WIDTH))
        dv[layer] = (before.v[layer][consumer] - before.v[layer][source]).flatten(1)
    eye = torch.eye(12).expand(LAYERS, 12, 12)
    after = correct(before, [Segment(source, target, 10, 90, 0, LowRankDelta(eye, dk, eye, dv))])
    for layer in range(1, LAYERS):
        assert torch.allclose(after.k[layer][target], before.k[layer][consumer], atol=1e-4)
        assert torch.allclose(after.v[layer][target], before.v[layer][consumer], atol=1e-5)


def test_splitting_a_segment_changes_nothing() -> None:
    before, delta = pool(7), affine(3, 4, (16.0,), (math.inf, 2.0))
    source, target = torch.arange(0, 20), torch.arange(30, 50)
    whole = correct(before, [Segment(source, target, 5, 50, 0, delta)])
    parts = [
        Segment(source[:7], target[:7], 5, 50, 0, delta),
        Segment(source[7:], target[7:], 12, 57, 7, delta),
    ]
    for a, b in zip(whole.k + whole.v, correct(before, parts).k + correct(before, parts).v, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("is_neox", [True, False])
def test_partial_rotation_moves_only_the_rotary_channels(is_neox: bool) -> None:
    table = RotaryTable.from_theta(THETA, DIM, 256, rotary_dim=4, is_neox=is_neox)
    before = pool(8)
    source, target = torch.arange(0, 9), torch.arange(20, 29)
    after = correct(before, [Segment(source, target, 3, 40)], table=table)
    for layer in range(LAYERS):
        assert torch.equal(after.k[layer][target][..., 4:], before.k[layer][source][..., 4:])
        assert not torch.allclose(after.k[layer][target][..., :4], before.k[layer][source][..., :4])


def test_an_empty_batch_does_nothing() -> None:
    before = pool(9)
    empty = torch.zeros(0, dtype=torch.int64)
    for segments in ([], [Segment(empty, empty, 0, 0)]):
        after = correct(before, segments)
        assert all(torch.equal(a, b) for a, b in zip(after.k + after.v, before.k + before.v, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["k", "v", "delta"])
def test_values_that_are_not_finite_raise(bad: float, where: str) -> None:
    before, delta = pool(10), low_rank(0, 6, 2)
    if where == "delta":
        delta.left_k[2, 4, 1] = bad
    else:
        getattr(before, where)[1][3, 0, 0] = bad
    with pytest.raises(CorrectionError):
        correct(before, [Segment(torch.arange(6), torch.arange(40, 46), 0, 9, 0, delta)])


def test_opposite_infinities_do_not_cancel() -> None:
    before = pool(11)
    before.v[1][0, 0, 0], before.v[1][1, 0, 0] = float("inf"), float("-inf")
    with pytest.raises(CorrectionError):
        correct(before, [Segment(torch.arange(6), torch.arange(40, 46), 0, 9)])


def long(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([Segment(long(1, 2), long(2, 3), 0, 5)], "overlap"),
        ([Segment(long(1), long(5), 0, 5), Segment(long(5), long(6), 0, 5)], "overlap"),
        ([Segment(long(1, 2), long(7, 7), 0, 5)], "twice"),
        ([Segment(long(1), long(5), 0, 5), Segment(long(2), long(5), 0, 5)], "twice"),
        ([Segment(long(1, 2), long(7), 0, 5)], "2 source_slots and 1 target_slots"),
        ([Segment(long(-1), long(7), 0, 5)], "negative"),
        ([Segment(long(1).int(), long(7), 0, 5)], "source_slots is torch.int32"),
        ([Segment(long(1), long(7)[None], 0, 5)], "target_slots is"),
        ([Segment(long(1, 2), long(7, 8), 0, 1023)], "target_start is 1023"),
        ([Segment(long(1, 2), long(7, 8), -1, 5)], "source_start is -1"),
        ([Segment(long(1, 2), long(7, 8), 0, 5, -3)], "offset is -3"),
        ([Segment(long(1, 2), long(7, 8), 0, 5, 2, low_rank(0, 3, 1))], r"offsets \[2, 4\)"),
        ([Segment(long(1, 2), long(7, 8), 0, 5, 1, low_rank(0, 9, 1, start=2))], r"offsets \[1, 3\)"),
        (
            [Segment(long(1), long(7), 0, 5, 0, LowRankDelta(*[torch.zeros(LAYERS, 1, 1)] * 4))],
            "width is 1",
        ),
    ],
)
def test_plan_refuses(segments: list[Segment], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(segments, TABLE, head_dim=DIM, kv_heads=HEADS)


def test_an_unknown_backend_is_refused_with_the_allowed_names() -> None:
    with pytest.raises(ValueError, match=r"backend is 'cuda': it must be one of auto, cpu, triton, flashinfer, torch"):
        plan([], TABLE, head_dim=DIM, kv_heads=HEADS, backend="cuda")


def test_run_refuses_buffers_that_do_not_fit() -> None:
    one = pool(0)
    made = plan([Segment(long(1), long(7), 0, 5, 0, low_rank(0, 1, 1))], TABLE, head_dim=DIM, kv_heads=HEADS)
    with pytest.raises(ValueError, match="k_buffers"):
        run(made, one.k, one.v[:-1])
    with pytest.raises(ValueError, match="3 layers"):
        run(made, one.k[:-1], one.v[:-1])
    with pytest.raises(ValueError, match=r"v_buffers\[0\]"):
        run(made, one.k, [x.transpose(1, 2) for x in one.v])


def test_factors_that_do_not_fit_are_refused() -> None:
    good = low_rank(0, 4, 2)
    with pytest.raises(ValueError, match="left_k"):
        LowRankDelta(good.left_k, good.right_k[:, :1], good.left_v, good.right_v)
    with pytest.raises(ValueError, match="agree"):
        LowRankDelta(good.left_k[:, :3], good.right_k, good.left_v, good.right_v)
    with pytest.raises(ValueError, match="weight"):
        AffineDelta(torch.zeros(2, 8, 3), torch.zeros(2, 3), torch.zeros(2, 2, 8), torch.zeros(2, 1, 8), (5.0,), (5.0,))
