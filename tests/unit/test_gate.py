"""The gate: it vouches only for what it has seen, one-sidedly, and errors add along a chain."""

from __future__ import annotations

import math

import pytest
from kvcmas_sgl.radix_ext.estimators import Edge
from kvcmas_sgl.radix_ext.gate import KL_PER_SQUARED_ERROR, LEAST_FACTOR, MIN_PAIRS, Gate

EDGE = Edge("s", "a", "b")


def gate_with(*pairs: tuple[float, int], max_kl: float = 0.02) -> Gate:
    gate = Gate(max_kl)
    for squared_error, tokens in pairs:
        gate.record(EDGE, "affine", squared_error=squared_error, tokens=tokens)
    return gate


def test_too_few_pairs_are_no_evidence() -> None:
    assert gate_with(*[(0.001, 1000)] * (MIN_PAIRS - 1)).predict(EDGE, "affine", 1000) is None
    assert gate_with(*[(0.001, 1000)] * MIN_PAIRS).predict(EDGE, "none", 1000) is None


def test_the_prediction_is_the_worst_pair_with_its_margin() -> None:
    gate = gate_with((0.001, 1000), (0.003, 500))
    # q = e^2 n: 1.0 and 1.5; the margin for two pairs is 1 + 1/2.
    assert gate.predict(EDGE, "affine", 250) == pytest.approx(math.sqrt(1.5 * 1.5 / 250))
    assert gate.predict(EDGE, "affine", 1000) == pytest.approx(math.sqrt(1.5 * 1.5 / 1000))
    # No span gains from being longer than any that was seen.
    assert gate.predict(EDGE, "affine", 10**6) == gate.predict(EDGE, "affine", 1000)


def test_more_evidence_never_widens_the_margin_of_equal_pairs() -> None:
    predictions = [gate_with(*[(0.001, 1000)] * n).predict(EDGE, "affine", 1000) for n in (2, 4, 8)]
    assert predictions == sorted(predictions, reverse=True)  # type: ignore[type-var]
    assert predictions[-1] > math.sqrt(0.001)  # type: ignore[operator]


def test_a_broken_error_is_refused() -> None:
    with pytest.raises(ValueError, match="squared_error is nan"):
        gate_with((float("nan"), 100))


def test_an_edge_that_was_never_audited_is_taken_for_the_worst_seen() -> None:
    assert gate_with((0.001, 100)).kl(EDGE, "affine", 0.1) == pytest.approx(KL_PER_SQUARED_ERROR * 0.01)


def test_the_worst_audit_of_an_edge_says_what_its_error_does_to_the_next_tokens() -> None:
    gate = Gate(0.02)
    for squared_error, tokens, kl in ((0.02, 80, 0.01), (0.04, 160, 0.05), (0.03, 80, None)):
        gate.record(EDGE, "affine", squared_error=squared_error, tokens=tokens, kl=kl)
    assert gate.audits(EDGE, "affine") == 2
    # 0.5 and 1.25 nats per squared error.
    assert gate.kl(EDGE, "affine", 0.2) == pytest.approx(1.25 * 0.04)
    # Another edge has audits of its own, and none yet.
    assert gate.kl(Edge("s", "b", "a"), "affine", 0.2) == pytest.approx(KL_PER_SQUARED_ERROR * 0.04)


def test_an_audit_that_shows_nothing_does_not_make_an_edge_free() -> None:
    gate = Gate(0.02)
    gate.record(EDGE, "affine", squared_error=0.02, tokens=80, kl=0.0)
    assert gate.kl(EDGE, "affine", 0.2) == pytest.approx(LEAST_FACTOR * 0.04)
