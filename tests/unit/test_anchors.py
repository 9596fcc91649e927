"""The published estimator against its formulas, written once more in float64 numpy, sums and loops only."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kvcmas_sgl.radix_ext.estimators import (
    AnchorsEstimator,
    Edge,
    Estimator,
    MeanEstimator,
    NearestEstimator,
    Observation,
    SpanBase,
)
from kvcmas_sgl.radix_ext.estimators.anchors import gate_entropy
from kvcmas_sgl.radix_ext.estimators.pool import EVICTION_WINDOW, pool_bytes

LAYERS, HEADS, DIM = 3, 2, 4
WIDTH = HEADS * DIM
EDGE = Edge("tenant", "planner@first", "critic@first")
SIZE = (LAYERS, HEADS, DIM)

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def draw(seed: int, n: int) -> Parts:
    """base K, base V, delta K, delta V, [L, n, D] each."""
    rng = torch.Generator().manual_seed(seed)
    k, v, dk, dv = (torch.randn(LAYERS, n, WIDTH, generator=rng) for _ in range(4))
    return k, v, dk, dv


def learn(estimator: Estimator, parts: Parts, edge: Edge = EDGE, t: torch.Tensor | None = None) -> None:
    """One span in two chunks of layers."""
    t = torch.arange(parts[0].shape[1]) if t is None else t
    for layers in (slice(0, 2), slice(2, LAYERS)):
        estimator.observe(edge, Observation(layers.start, t, *(part[layers] for part in parts)))
    estimator.finish(edge)


def predicted(estimator: Estimator, base: Parts, edge: Edge = EDGE) -> tuple[np.ndarray, np.ndarray]:
    """dK, dV [L - 1, n, D] of layers from 1 on."""
    delta = estimator.predict(edge, SpanBase(base[0], base[1]))
    assert delta is not None
    n = base[0].shape[1]
    first, stop = delta.extent or (0, n)
    t = torch.arange(first, min(stop, n))
    out = np.zeros((2, LAYERS - 1, n, WIDTH))
    for layer in range(1, LAYERS):
        for i, rows in enumerate(delta.rows(layer, t, base[0][layer, t], base[1][layer, t])):
            out[i, layer - 1, t.numpy()] = rows.numpy()
    return out[0], out[1]


def published(anchors: list[Parts], base: Parts, which: int, top_k: int, temperature: float = 1.0) -> np.ndarray:
    """The paper's correction of K (``which`` 0) or V (1): token by token, anchor by anchor."""
    new = base[which].double().numpy()
    n = new.shape[1]
    out = np.zeros((LAYERS - 1, n, WIDTH))
    for t in range(n):
        near: list[tuple[float, int]] = []
        for i, anchor in enumerate(anchors):
            if t < anchor[which].shape[1]:
                other = anchor[which].double().numpy()[:, t]
                total = sum(abs(float(a) - float(b)) for a, b in zip(new[:, t].ravel(), other.ravel(), strict=True))
                near.append((total / other.size, i))
        if not near:
            continue
        chosen = sorted(near)[:top_k]
        scale = sum(math.exp(-d / temperature) for d, _ in chosen)
        for d, i in chosen:
            delta = anchors[i][2 + which].double().numpy()
            out[:, t] += math.exp(-d / temperature) / scale * delta[1:, t]
    return out


@pytest.mark.parametrize("rank", [None, WIDTH])
@pytest.mark.parametrize("top_k", [2, 10])
@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_softmax_per_token_with_k_and_v_apart(rank: int | None, top_k: int, temperature: float) -> None:
    estimator = AnchorsEstimator(*SIZE, rank=rank, top_k=top_k, temperature=temperature)
    anchors = [draw(seed, 9) for seed in range(4)]
    for anchor in anchors:
        learn(estimator, anchor)
    base = draw(100, 9)
    for which, mine in enumerate(predicted(estimator, base)):
        np.testing.assert_allclose(mine, published(anchors, base, which, top_k, temperature), atol=2e-5)


def test_shorter_anchors_cover_only_the_rows_they_have() -> None:
    estimator = AnchorsEstimator(*SIZE, rank=None)
    anchors = [draw(seed, n) for seed, n in enumerate((5, 12, 8))]
    for anchor in anchors:
        learn(estimator, anchor)
    base = draw(100, 15)
    for which, mine in enumerate(predicted(estimator, base)):
        want = published(anchors, base, which, 10)
        np.testing.assert_allclose(mine, want, atol=2e-5)
        assert not want[:, 12:].any() and want[:, :12].any(-1).all()


def test_low_rank_anchors_are_matched_by_their_low_rank_base() -> None:
    """At rank r < min(n, D) base and delta are their best rank-r approximations, those of the SVD."""
    rank, n = 2, 40
    rng = torch.Generator().manual_seed(3)

    def steep(n: int) -> torch.Tensor:
        """Singular values that fall fast, so that the randomised factors are the SVD's."""
        q = torch.linalg.qr(torch.randn(LAYERS, n, WIDTH, generator=rng)).Q
        return q * 10.0 ** -torch.arange(WIDTH).float() @ torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=rng)).Q

    def best(x: torch.Tensor) -> torch.Tensor:
        u, s, vh = np.linalg.svd(x.double().numpy(), full_matrices=False)
        return torch.from_numpy((u[..., :rank] * s[:, None, :rank]) @ vh[:, :rank]).float()

    estimator = AnchorsEstimator(*SIZE, rank=rank)
    anchors: list[Parts] = [(steep(n), steep(n), steep(n), steep(n)) for _ in range(3)]
    for anchor in anchors:
        learn(estimator, anchor)
    base: Parts = (steep(n), steep(n), steep(n), steep(n))
    cut: list[Parts] = [(best(a), best(b), best(c), best(d)) for a, b, c, d in anchors]
    for which, mine in enumerate(predicted(estimator, base)):
        np.testing.assert_allclose(mine, published(cut, base, which, 10), atol=1e-4)


def test_the_least_used_of_the_oldest_is_evicted() -> None:
    pool = EVICTION_WINDOW + 2
    estimator = AnchorsEstimator(*SIZE, rank=None, pool=pool, top_k=1)
    anchors = [draw(seed, 6) for seed in range(pool)]
    for anchor in anchors:
        learn(estimator, anchor)
    # With the nearest anchor alone per token, reading an anchor's own base uses that anchor.
    for unused in range(pool):
        if unused != 2:
            predicted(estimator, anchors[unused])
    learn(estimator, draw(50, 6))
    kept = [any(torch.equal(a.base_k.left, anchor[0]) for a in estimator.anchors(EDGE)) for anchor in anchors]
    assert kept == [i != 2 for i in range(pool)]
    # The youngest was never used, but it is outside of the window: of the window's, all used once, the oldest goes.
    learn(estimator, draw(51, 6))
    kept = [any(torch.equal(a.base_k.left, anchor[0]) for a in estimator.anchors(EDGE)) for anchor in anchors]
    assert kept == [i not in (0, 2) for i in range(pool)]
    assert len(estimator.anchors(EDGE)) == pool


def entropy_bits(anchors: list[Parts], base: Parts) -> float:
    rows = min(len(part[0][0]) for part in [base, *anchors])
    distances = [
        math.sqrt(sum(float(x) ** 2 for x in (base[1][:, :rows] - a[1][:, :rows]).double().numpy().ravel()))
        for a in anchors
    ]
    low = min(distances)
    mass = [math.exp(low - d) for d in distances]
    p = [m / sum(mass) for m in mass]
    return -sum(x * math.log2(x) for x in p if x > 0)


def test_the_gate_is_the_entropy_in_bits_against_tau_log2_of_the_pool() -> None:
    anchors = [draw(seed, n) for seed, n in enumerate((7, 9, 6, 8))]
    # Close to every anchor alike, so that the entropy is neither 0 nor 2 bits.
    base_parts = draw(100, 10)
    middle = torch.stack([anchor[1][:, :6] for anchor in anchors]).mean(0)
    v = base_parts[1].clone()
    v[:, :6] = middle + 0.05 * v[:, :6]
    base: Parts = (base_parts[0], v, base_parts[2], base_parts[3])
    want = entropy_bits(anchors, base)
    assert 0.2 < want < 1.95
    estimator = AnchorsEstimator(*SIZE, rank=None)
    for anchor in anchors:
        learn(estimator, anchor)
    assert gate_entropy(estimator.anchors(EDGE), SpanBase(base[0], base[1])) == pytest.approx(want, abs=1e-4)
    for factor, opens in ((1.01, True), (0.99, False)):
        gated = AnchorsEstimator(*SIZE, rank=None, tau=factor * want / 2)
        for anchor in anchors:
            learn(gated, anchor)
        assert (gated.predict(EDGE, SpanBase(base[0], base[1])) is not None) == opens


def test_fewer_than_two_anchors_are_no_prediction() -> None:
    estimator = AnchorsEstimator(*SIZE)
    base = draw(9, 5)
    assert estimator.predict(EDGE, SpanBase(base[0], base[1])) is None
    learn(estimator, draw(0, 5))
    assert estimator.predict(EDGE, SpanBase(base[0], base[1])) is None
    learn(estimator, draw(1, 5))
    assert estimator.predict(EDGE, SpanBase(base[0], base[1])) is not None
    with pytest.raises(ValueError, match="needs the span's base"):
        estimator.predict(EDGE)


def test_a_prediction_does_not_change_with_later_observations() -> None:
    estimator = AnchorsEstimator(*SIZE, rank=None, pool=2)
    for seed in range(2):
        learn(estimator, draw(seed, 6))
    base = draw(9, 6)
    delta = estimator.predict(EDGE, SpanBase(base[0], base[1]))
    assert delta is not None
    t = torch.arange(6)
    before = delta.rows(1, t, base[0][1], base[1][1])
    for seed in range(2, 4):
        learn(estimator, draw(seed, 6))
    for old, new in zip(before, delta.rows(1, t, base[0][1], base[1][1]), strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0)


def test_sampled_spans_keep_their_leading_rows() -> None:
    estimator = MeanEstimator(*SIZE)
    parts = draw(0, 6)
    learn(estimator, parts, t=torch.tensor([0, 1, 2, 3, 7, 9]))
    delta = estimator.predict(EDGE)
    assert delta is not None and delta.extent == (0, 4)
    dk, _ = delta.rows(2, torch.arange(4), parts[0][2, :4], parts[1][2, :4])
    torch.testing.assert_close(dk, parts[2][2, :4])


def test_mean_averages_what_each_index_has() -> None:
    estimator = MeanEstimator(*SIZE)
    anchors = [draw(seed, n) for seed, n in enumerate((4, 7))]
    for anchor in anchors:
        learn(estimator, anchor)
    dk, dv = predicted(estimator, draw(9, 7))
    for which, mine in enumerate((dk, dv)):
        one, two = (anchor[2 + which].double().numpy()[1:] for anchor in anchors)
        np.testing.assert_allclose(mine[:, :4], (one + two[:, :4]) / 2, atol=1e-6)
        np.testing.assert_allclose(mine[:, 4:], two[:, 4:], atol=1e-6)


def test_nearest_takes_the_anchor_whose_base_is_closest_at_each_index() -> None:
    estimator = NearestEstimator(*SIZE)
    anchors = [draw(seed, 6) for seed in range(3)]
    for anchor in anchors:
        learn(estimator, anchor)
    base = draw(9, 6)
    for which, mine in enumerate(predicted(estimator, base)):
        for t in range(6):
            distance = [float((anchor[which][:, t] - base[which][:, t]).double().abs().mean()) for anchor in anchors]
            best = anchors[int(np.argmin(distance))]
            np.testing.assert_allclose(mine[:, t], best[2 + which].numpy()[1:, t], atol=1e-6)


@pytest.mark.parametrize("rank", [None, 2])
def test_state_bytes_are_those_of_the_accounting(rank: int | None) -> None:
    estimator = AnchorsEstimator(*SIZE, rank=rank, pool=3)
    for seed in range(5):
        learn(estimator, draw(seed, 20))
    want = pool_bytes(layers=LAYERS, width=WIDTH, tokens=20, anchors=3, agents=1, rank=rank, item_bytes=4)
    assert estimator.state_bytes == estimator.edge_bytes(EDGE) == want
    other = Edge("other", "a", "b")
    learn(estimator, draw(9, 20), other)
    estimator.drop_namespace("tenant")
    assert list(estimator.edges()) == [other]
    assert estimator.state_bytes == want // 3


def test_the_papers_pool_takes_fifty_gibibytes() -> None:
    """Llama-3.1-8B, 4,096 tokens, 20 anchors, 4 agents, bf16: 2 (K, V) x 32 x 5 x 20 x 4096 x 1024 x 2 bytes."""
    size = {"layers": 32, "width": 1024, "tokens": 4096, "anchors": 20, "agents": 4, "item_bytes": 2}
    assert pool_bytes(**size, rank=None) == 50 * 2**30
    assert pool_bytes(**size, rank=32) / 2**30 == pytest.approx(1.953, abs=1e-3)


def test_a_span_with_missing_layers_is_refused() -> None:
    estimator = MeanEstimator(*SIZE)
    parts = draw(0, 4)
    estimator.observe(EDGE, Observation(0, torch.arange(4), *(part[:2] for part in parts)))
    with pytest.raises(ValueError, match="each once"):
        estimator.finish(EDGE)
    assert estimator.predict(EDGE) is None
