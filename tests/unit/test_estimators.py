"""Estimators against ground truths that are known in closed form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcmas_sgl.radix_ext.estimators import (
    ESTIMATORS,
    ZERO_DELTA,
    AffineEstimator,
    Edge,
    Estimator,
    LastingEstimator,
    Observation,
    SpanBase,
    make_estimator,
)
from kvcmas_sgl.radix_ext.estimators.affine import token_weights
from kvcmas_sgl.radix_ext.state_file import State, StateError
from kvcmas_sgl.triton_kernels import AffineDelta, Delta

LAYERS, HEADS, DIM = 4, 2, 4
WIDTH = HEADS * DIM
EDGE = Edge("tenant", "planner", "critic")


def make(rank: int = 2 * WIDTH, name: str = "affine") -> LastingEstimator:
    return make_estimator(name, layers=LAYERS, kv_heads=HEADS, head_dim=DIM, rank=rank)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Truth:
    """delta = x @ B + c / (1 + t/32) + d per layer, in float64; x = [base_k, base_v]."""

    def __init__(self, seed: int = 0, scale: float = 0.1) -> None:
        rng = np.random.default_rng(seed)
        self.b = scale * rng.standard_normal((LAYERS, 2 * WIDTH, 2 * WIDTH))
        self.c, self.d = scale * rng.standard_normal((2, LAYERS, 2 * WIDTH))

    def __call__(self, t: torch.Tensor, base_k: torch.Tensor, base_v: torch.Tensor) -> torch.Tensor:
        """[L, n, 2D], float64, of base [L, n, D]."""
        x = torch.cat([base_k, base_v], -1).double().numpy()
        at = t.double().numpy()[:, None]
        return torch.from_numpy(x @ self.b + self.c[:, None] / (1 + at / 32) + self.d[:, None])


def span(truth: Truth, seed: int, t: torch.Tensor) -> list[Observation]:
    """One span's harvest, in two chunks of layers."""
    base_k, base_v = draw(seed, LAYERS, t.numel(), WIDTH) + 0.5, 3 * draw(seed + 1, LAYERS, t.numel(), WIDTH)
    delta = truth(t, base_k, base_v).float()
    return [
        Observation(
            layers.start, t, base_k[layers], base_v[layers], delta[layers][..., :WIDTH], delta[layers][..., WIDTH:]
        )
        for layers in (slice(0, 3), slice(3, LAYERS))
    ]


def learn(estimator: Estimator, spans: list[list[Observation]], edge: Edge = EDGE) -> None:
    for one in spans:
        for chunk in one:
            estimator.observe(edge, chunk)
        estimator.finish(edge)


def predicted(delta: Delta | None, t: torch.Tensor, base_k: torch.Tensor, base_v: torch.Tensor) -> torch.Tensor:
    """[L - 1, n, 2D] of the layers that are corrected."""
    assert delta is not None
    rows = [torch.cat(delta.rows(layer, t, base_k[layer], base_v[layer]), 1) for layer in range(1, LAYERS)]
    return torch.stack(rows)


def left_over(estimator: Estimator, truth: Truth, seed: int, t: torch.Tensor) -> float:
    """Share of a new span's delta energy that the prediction leaves."""
    base_k, base_v = draw(seed, LAYERS, t.numel(), WIDTH) + 0.5, 3 * draw(seed + 1, LAYERS, t.numel(), WIDTH)
    true = truth(t, base_k, base_v)[1:]
    off = true - predicted(estimator.predict(EDGE), t, base_k, base_v).double()
    return float(off.square().sum() / true.square().sum())


def tensors(thing: object, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Every tensor reachable from ``thing``, each once."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors(value, seen)
    elif isinstance(thing, list | tuple | set):
        for value in thing:
            yield from tensors(value, seen)
    elif hasattr(thing, "__dict__"):
        yield from tensors(vars(thing), seen)


def held(estimator: Estimator) -> int:
    return sum(part.nbytes for part in tensors(estimator))


def test_an_affine_truth_is_recovered_on_unseen_content_and_lengths() -> None:
    """A ridge of constant worth leaves energy that falls with the square of the tokens seen, to zero."""
    truth, estimator = Truth(), make()
    left = []
    for seed in range(40):
        learn(estimator, [span(truth, 2 * seed, torch.arange(3000))])
        left.append(left_over(estimator, truth, 999, torch.arange(50, 2050, 3)))
    assert all(later < earlier for earlier, later in pairwise(left))
    # Twice the tokens leave a quarter in the limit; directions that the prior still holds are on their way there.
    assert left[39] < 0.01 and left[39] < 0.4 * left[19]


def ridge_solution(
    estimator: AffineEstimator, spans: list[list[Observation]], layer: int, m: int
) -> tuple[np.ndarray, np.ndarray]:
    """(W [F, 2D], Gram matrix with its ridge [F, F]) of the documented objective, in float64 from the observations."""
    gram, cross, count = 0, 0, 0
    for one in spans:
        chunk = next(c for c in one if c.first_layer <= layer < c.first_layer + c.base_k.shape[0])
        i, t = layer - chunk.first_layer, chunk.t.double().numpy()
        f = features(estimator, layer, t, chunk.base_k[i], chunk.base_v[i])
        y = torch.cat([chunk.delta_k[i], chunk.delta_v[i]], 1).double().numpy()
        # Evenly spaced tokens all stand for the same number of tokens.
        w = (1 + t / 32) / (1 + t / 32).mean()
        gram, cross, count = gram + (f.T * w) @ f, cross + (f.T * w) @ y, count + len(t)
    square = np.diag(gram) / count
    ridge = [np.full(m, 4096 * square[:m].mean()), 8 * square[m:]]
    gram = gram + np.diag(np.concatenate(ridge))
    return np.linalg.solve(gram, cross), gram


def features(estimator: AffineEstimator, layer: int, t: np.ndarray, k: torch.Tensor, v: torch.Tensor) -> np.ndarray:
    basis = estimator._bases["tenant"]
    x = torch.cat([k, v], 1).double().numpy()
    z = x @ basis.project[layer].double().numpy() + basis.shift[layer].double().numpy()
    return np.concatenate([z] + [1 / (1 + t / tau)[:, None] for tau in (math.inf, 8, 32, 128, 512)], 1)


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_the_prediction_is_the_ridge_minimum_at_the_best_rank(rank: int) -> None:
    """Rank 5 holds all that five components give; below, the fitted values lose what an SVD in float64 loses."""
    truth, m = Truth(), 5
    estimator = AffineEstimator(LAYERS, HEADS, DIM, rank, components=m)
    spans = [span(truth, 10 * i, torch.arange(0, 90, 1 + i)) for i in range(3)]
    learn(estimator, spans)
    t = torch.arange(3, 80)
    base = draw(77, 2, LAYERS, t.numel(), WIDTH)
    got = predicted(estimator.predict(EDGE), t, *base).double().numpy()
    for layer in range(1, LAYERS):
        w, gram = ridge_solution(estimator, spans, layer, m)
        root = np.linalg.cholesky(gram)[:m, :m].T
        fitted = root @ w[:m]
        norms = [np.linalg.norm(fitted[:, part]) for part in (slice(0, WIDTH), slice(WIDTH, None))]
        left, sizes, right = np.linalg.svd(fitted / np.repeat(norms, WIDTH), full_matrices=False)
        sizes[rank:] = 0
        w[:m] = np.linalg.solve(root, (left * sizes) @ right) * np.repeat(norms, WIDTH)
        want = features(estimator, layer, t.double().numpy(), base[0, layer], base[1, layer]) @ w
        assert np.abs(got[layer - 1] - want).max() <= 1e-4 * np.abs(want).max()


def test_identical_contexts_give_a_prediction_of_zero() -> None:
    estimator = make()
    learn(estimator, [span(Truth(scale=0.0), 3, torch.arange(64))])
    out = predicted(estimator.predict(EDGE), torch.arange(40), *draw(8, 2, LAYERS, 40, WIDTH))
    assert torch.equal(out, torch.zeros_like(out))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 12), st.integers(1, 3), st.sampled_from(["random", "constant", "duplicates", "zero", "large"]))
def test_few_or_degenerate_observations_stay_bounded(n: int, repeats: int, kind: str) -> None:
    """Fewer tokens than features, constant features, the same span again: no larger than what was observed."""
    estimator, t = make(), torch.arange(n) * 5
    base, delta = draw(n, 2, LAYERS, n, WIDTH), draw(n + 1, 2, LAYERS, n, WIDTH)
    if kind == "constant":
        base = torch.ones_like(base) * 7
    elif kind == "duplicates":
        base = base[:, :, :1].expand_as(base).contiguous()
    elif kind == "zero":
        base = torch.zeros_like(base)
    elif kind == "large":
        base, delta = base * 1e4, delta * 1e4
    learn(estimator, [[Observation(0, t, *base, *delta)]] * repeats)
    out = predicted(estimator.predict(EDGE), t, *base)
    assert torch.isfinite(out).all()
    assert out.norm() <= 2 * torch.cat([delta[0], delta[1]], -1)[1:].norm()


def test_layers_without_an_observation_are_only_moved() -> None:
    estimator = make()
    estimator.observe(EDGE, span(Truth(), 1, torch.arange(64))[0])
    estimator.finish(EDGE)
    out = predicted(estimator.predict(EDGE), torch.arange(9), *draw(8, 2, LAYERS, 9, WIDTH))
    assert torch.equal(out[-1], torch.zeros_like(out[-1])) and out[0].abs().max() > 0


def test_a_prediction_does_not_change_with_later_observations() -> None:
    estimator, t = make(), torch.arange(30)
    learn(estimator, [span(Truth(1), 1, torch.arange(64))])
    first, base = estimator.predict(EDGE), draw(8, 2, LAYERS, 30, WIDTH)
    before = predicted(first, t, *base)
    learn(estimator, [span(Truth(2), 5, torch.arange(64))])
    assert torch.equal(predicted(first, t, *base), before)
    assert not torch.equal(predicted(estimator.predict(EDGE), t, *base), before)


def test_edges_learn_apart_and_share_one_basis_within_a_namespace() -> None:
    estimator = make(rank=3)
    other, stranger = Edge("tenant", "critic", "planner"), Edge("guest", "planner", "critic")
    learn(estimator, [span(Truth(1), 1, torch.arange(64))])
    alone = estimator.predict(EDGE)
    learn(estimator, [span(Truth(2), 50, torch.arange(64))], other)
    learn(estimator, [span(Truth(2), 50, torch.arange(64))], stranger)
    mine = estimator.predict(EDGE)
    assert isinstance(alone, AffineDelta) and isinstance(mine, AffineDelta)
    assert torch.equal(mine.weight, alone.weight)
    bases = estimator._bases
    assert set(bases) == {"tenant", "guest"}
    assert not torch.equal(bases["tenant"].project, bases["guest"].project)


def test_counts_edges_and_unknown_edges() -> None:
    estimator = make()
    assert estimator.predict(EDGE) is None and estimator.spans_seen(EDGE) == 0 and estimator.edge_bytes(EDGE) == 0
    assert tuple(estimator.edges()) == ()
    one = span(Truth(), 1, torch.arange(20))
    for chunk in one:
        estimator.observe(EDGE, chunk)
    assert estimator.predict(EDGE) is None and estimator.spans_seen(EDGE) == 0
    estimator.finish(EDGE)
    learn(estimator, [one])
    assert estimator.spans_seen(EDGE) == 2 and tuple(estimator.edges()) == (EDGE,)
    with pytest.raises(ValueError, match="no observation"):
        estimator.finish(Edge("tenant", "critic", "planner"))


def test_state_bytes_are_the_bytes_of_all_tensors() -> None:
    estimator = make(rank=3)
    other, stranger = Edge("tenant", "critic", "planner"), Edge("guest", "planner", "critic")
    assert estimator.state_bytes == held(estimator) == 0
    sizes = set()
    for number in range(3):
        for edge in (EDGE, other, stranger):
            for chunk in span(Truth(), number, torch.arange(30 + 100 * number)):
                estimator.observe(edge, chunk)
                assert estimator.state_bytes == held(estimator)
            estimator.finish(edge)
            assert estimator.state_bytes == held(estimator)
        sizes.add(estimator.state_bytes)
    # O(L D m): neither more spans nor longer ones add a byte.
    assert len(sizes) == 1
    before = estimator.state_bytes
    freed = estimator.edge_bytes(other)
    estimator.drop(other)
    assert estimator.state_bytes == held(estimator) == before - freed
    estimator.drop_namespace("tenant")
    assert tuple(estimator.edges()) == (stranger,) and estimator.state_bytes == held(estimator)
    estimator.drop(stranger)
    estimator.drop(stranger)
    assert estimator.state_bytes == held(estimator) == 0 and estimator.predict(stranger) is None


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["base_k", "base_v", "delta_k", "delta_v"])
def test_observations_that_are_not_finite_leave_no_trace(name: str, bad: float, part: str) -> None:
    estimator, twin = make(name=name), make(name=name)
    good = span(Truth(), 1, torch.arange(20))
    for one in (estimator, twin):
        learn(one, [good])
    broken = span(Truth(), 7, torch.arange(20))[0]
    getattr(broken, part)[1, 5, 2] = bad
    with pytest.raises(ValueError, match=part):
        estimator.observe(EDGE, broken)
    for one in (estimator, twin):
        learn(one, [good])
    base = draw(8, 2, LAYERS, 9, WIDTH)
    got, want = (predicted(one.predict(EDGE, SpanBase(*base)), torch.arange(9), *base) for one in (estimator, twin))
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_span_that_was_given_up_leaves_no_trace(name: str) -> None:
    estimator, twin = make(name=name), make(name=name)
    good = [span(Truth(), seed, torch.arange(20)) for seed in (1, 3)]
    for one in (estimator, twin):
        learn(one, good[:1])
    if name in ("anchors", "mean", "nearest"):
        estimator.observe(EDGE, span(Truth(), 7, torch.arange(20))[0])
    for one in (estimator, twin):
        learn(one, good[1:])
    base = draw(8, 2, LAYERS, 9, WIDTH)
    got, want = (predicted(one.predict(EDGE, SpanBase(*base)), torch.arange(9), *base) for one in (estimator, twin))
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_state_that_is_loaded_predicts_the_same_and_counts_the_same_bytes(name: str) -> None:
    estimator, later = make(rank=3, name=name), make(rank=3, name=name)
    learn(estimator, [span(Truth(), seed, torch.arange(12 + seed)) for seed in range(3)])
    later.load(estimator.state())
    base = draw(8, 2, LAYERS, 9, WIDTH)
    got, want = (predicted(one.predict(EDGE, SpanBase(*base)), torch.arange(9), *base) for one in (later, estimator))
    assert torch.equal(got, want)
    assert (later.spans_seen(EDGE), later.state_bytes) == (3, estimator.state_bytes)
    assert later.definition == estimator.definition != make(rank=2, name="anchors").definition


def test_anchors_that_do_not_fit_are_not_loaded() -> None:
    estimator, later = make(rank=3, name="anchors"), make(rank=3, name="anchors")
    learn(estimator, [span(Truth(), 1, torch.arange(12))])
    state = estimator.state()
    broken = State({**state.tensors, "0.0.delta_v.left": torch.zeros(LAYERS, 12, 2)}, state.data)
    with pytest.raises(StateError, match=r"'0.0.delta_v.left' is .* it must be fp32 .4, 12, 3."):
        later.load(broken)
    assert tuple(later.edges()) == ()


def test_a_first_observation_that_is_refused_creates_nothing() -> None:
    estimator = make()
    t, huge = torch.arange(4), torch.full((LAYERS, 4, WIDTH), 1e30)
    delta = draw(1, LAYERS, 4, WIDTH) * 1e30
    with pytest.raises(ValueError, match="overflow"):
        estimator.observe(EDGE, Observation(0, t, huge * draw(2, LAYERS, 4, WIDTH).sign(), huge, delta * 1e8, delta))
    assert tuple(estimator.edges()) == () and estimator.state_bytes == held(estimator) == 0


@pytest.mark.parametrize(
    ("first_layer", "t", "shape", "dtype", "message"),
    [
        (0, [0, 1], (2, 2, WIDTH + 1), torch.float32, "base_k is"),
        (0, [0, 1, 2], (2, 2, WIDTH), torch.float32, "base_k is"),
        (0, [0, 1], (2, 2, WIDTH), torch.bfloat16, "base_k is torch.bfloat16"),
        (0, [1, 0], (2, 2, WIDTH), torch.float32, "ascending"),
        (0, [1, 1], (2, 2, WIDTH), torch.float32, "ascending"),
        (0, [-1, 1], (2, 2, WIDTH), torch.float32, "ascending"),
        (0, [], (2, 0, WIDTH), torch.float32, "t is"),
        (3, [0, 1], (2, 2, WIDTH), torch.float32, "first_layer is 3"),
        (-1, [0, 1], (2, 2, WIDTH), torch.float32, "first_layer is -1"),
    ],
)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_observations_that_do_not_fit_are_refused(
    name: str, first_layer: int, t: list[int], shape: tuple[int, ...], dtype: torch.dtype, message: str
) -> None:
    part = torch.zeros(shape, dtype=dtype)
    at = torch.tensor(t, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        make(name=name).observe(EDGE, Observation(first_layer, at, part, part, part, part))


def test_weights_undo_uneven_sampling_and_grow_with_the_offset() -> None:
    """Weighted sums over a sample dense at the head approach the sums over all tokens."""
    everything = torch.arange(2000)
    sample = torch.cat([torch.arange(128), torch.arange(130, 2000, 5)])
    ours = token_weights(sample).double()
    ours = ours / ours.sum()
    exact = (1 + everything.double() / 32) / (1 + everything.double() / 32).sum()
    for value in (lambda t: t.double(), lambda t: (t.double() / 300).sin(), lambda t: 1 / (1 + t.double() / 8)):
        assert abs(float((ours * value(sample)).sum() / (exact * value(everything)).sum()) - 1) < 0.02
    assert float(token_weights(torch.tensor([7]))) == 1.0


def test_none_predicts_the_zero_delta_and_holds_nothing() -> None:
    estimator = make(name="none")
    assert estimator.predict(EDGE) is ZERO_DELTA
    learn(estimator, [span(Truth(), 1, torch.arange(20))])
    assert estimator.predict(EDGE) is ZERO_DELTA and estimator.spans_seen(EDGE) == 1
    assert estimator.state_bytes == held(estimator) == 0 and estimator.edge_bytes(EDGE) == 0
    estimator.drop_namespace("guest")
    assert tuple(estimator.edges()) == (EDGE,)
    estimator.drop(EDGE)
    assert tuple(estimator.edges()) == ()


def test_make_estimator_names_what_is_allowed() -> None:
    with pytest.raises(
        ValueError, match="estimator is 'magic': it must be one of affine, anchors, mean, nearest, none"
    ):
        make(name="magic")
    with pytest.raises(ValueError, match="rank is 0"):
        make(rank=0)
    assert isinstance(make(), AffineEstimator)
