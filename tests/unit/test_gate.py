"""The gate: it vouches only for what it has seen, one-sidedly, and errors add along a chain."""

from __future__ import annotations

import math

import pytest
from kvcmas_sgl.radix_ext.estimators import Edge
from kvcmas_sgl.radix_ext.gate import KL_PER_SQUARED_ERROR, MIN_PAIRS, Gate

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


def test_squared_errors_count_by_their_share_of_the_prompt() -> None:
    gate = Gate(0.02)
    assert gate.kl(0.1) == pytest.approx(KL_PER_SQUARED_ERROR * 0.01)
    assert gate.kl(0.1, 0.25) == pytest.approx(KL_PER_SQUARED_ERROR * 0.0025)
