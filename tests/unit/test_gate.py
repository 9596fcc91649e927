"""The gate: it vouches only for what it has seen, one-sidedly, and errors add along a chain."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kvcmas_sgl.radix_ext.estimators import Edge
from kvcmas_sgl.radix_ext.gate import KL_PER_SQUARED_ERROR, LEAST_FACTOR, MAX_PAIRS, MIN_PAIRS, RISK, Gate

EDGE = Edge("s", "a", "b")

# Two equal audits: the common variance is (8 * 0.65^2 + 0) / (8 + 1), the edge's (4 * that + 0) / (4 + 2 - 1), and a
# third text is expected sqrt(1 + 1/2) times as far away; 2.3263 standard deviations are exceeded by one in fifty.
TWO_EQUAL = math.exp(2.0537489 * math.sqrt(4 * (8 * 0.4225 / 9) / 5) * math.sqrt(1.5))
# Never audited: nothing was learned of the spread.
TWO_UNSEEN = math.exp(2.0537489 * math.sqrt(4 * 0.4225 / 5) * math.sqrt(1.5))


def gate_with(*pairs: tuple[float, int]) -> Gate:
    gate = Gate()
    for squared_error, tokens in pairs:
        gate.record(EDGE, "affine", squared_error=squared_error, tokens=tokens)
    return gate


def error(gate: Gate, tokens: int) -> float:
    expected = gate.expect(EDGE, "affine", tokens)
    assert expected is not None
    return expected.error


def test_too_few_pairs_are_no_evidence() -> None:
    assert gate_with(*[(0.001, 1000)] * (MIN_PAIRS - 1)).expect(EDGE, "affine", 1000) is None
    assert gate_with(*[(0.001, 1000)] * MIN_PAIRS).expect(EDGE, "none", 1000) is None


def test_the_error_is_that_of_the_worst_pair_with_its_margin() -> None:
    gate = gate_with((0.001, 1000), (0.003, 500))
    # q = e^2 n: 1.0 and 1.5; the margin for two pairs is 1 + 1/2.
    assert error(gate, 250) == pytest.approx(math.sqrt(1.5 * 1.5 / 250))
    assert error(gate, 1000) == pytest.approx(math.sqrt(1.5 * 1.5 / 1000))
    # Beyond the longest that was seen, a span of four times the length gains what one of twice the length would.
    assert error(gate, 4000) == pytest.approx(math.sqrt(1.5 * 1.5 / 2000))


def test_more_evidence_never_widens_the_margin_of_equal_pairs() -> None:
    predictions = [error(gate_with(*[(0.001, 1000)] * n), 1000) for n in (2, 4, 8)]
    assert predictions == sorted(predictions, reverse=True)
    assert predictions[-1] > math.sqrt(0.001)


def test_pairs_of_an_estimator_that_had_seen_less_are_forgotten() -> None:
    later = [(0.001, 1000)] * MAX_PAIRS
    assert error(gate_with((0.9, 1000), *later), 1000) == error(gate_with(*later), 1000)


def test_a_broken_error_is_refused() -> None:
    with pytest.raises(ValueError, match="squared_error is nan"):
        gate_with((float("nan"), 100))


def test_an_edge_that_was_never_audited_is_taken_for_the_worst_seen() -> None:
    gate = gate_with((0.001, 100), (0.001, 100))
    expected = gate.expect(EDGE, "affine", 100)
    assert expected is not None
    assert expected.kl == pytest.approx(TWO_UNSEEN * KL_PER_SQUARED_ERROR * 0.001)
    assert gate.kl(EDGE, "affine", 0.1) == pytest.approx(KL_PER_SQUARED_ERROR * 0.01)


def audited(*pairs: tuple[float, int, float | None]) -> Gate:
    gate = Gate()
    for squared_error, tokens, kl in pairs:
        gate.record(EDGE, "affine", squared_error=squared_error, tokens=tokens, kl=kl)
    return gate


def kl(gate: Gate, tokens: int) -> float:
    expected = gate.expect(EDGE, "affine", tokens)
    assert expected is not None
    return expected.kl


def test_the_worst_audit_of_an_edge_says_what_a_known_error_does_to_the_next_tokens() -> None:
    gate = audited((0.02, 80, 0.01), (0.04, 160, 0.05), (0.03, 80, None))
    assert gate.audits(EDGE, "affine") == 2
    # 0.5 and 1.25 nats per squared error.
    assert gate.kl(EDGE, "affine", 0.2) == pytest.approx(1.25 * 0.04)
    # Another edge has audits of its own, and none yet.
    assert gate.kl(Edge("s", "b", "a"), "affine", 0.2) == pytest.approx(KL_PER_SQUARED_ERROR * 0.04)


def test_the_kl_that_is_expected_is_exceeded_as_often_as_it_says() -> None:
    """Of log-normal KLs whose deviation the gate has to find out; 50 edges with medians of their own."""
    rng = np.random.default_rng(3)
    for deviation in (0.3, 0.8):
        gate, above, asked = Gate(), 0, 0
        medians = rng.uniform(0.001, 0.05, 50)
        for turn in range(40):
            for number, kl in enumerate(medians * np.exp(deviation * rng.standard_normal(50))):
                edge = Edge("s", "a", str(number))
                expected = gate.expect(edge, "affine", 100) if turn >= MAX_PAIRS else None
                if expected is not None:
                    asked, above = asked + 1, above + (kl > expected.kl)
                gate.record(edge, "affine", squared_error=0.001, tokens=100, kl=kl)
        # 1,600 spans: RISK is 32 of them; a spread known from few pairs adds some.
        assert 0.4 * RISK < above / asked < 2.5 * RISK, (deviation, above)


def test_an_edge_whose_texts_are_alike_is_trusted_for_more_than_one_whose_texts_differ() -> None:
    alike, different = (
        audited(*[(0.02, 100, 0.01 * factor**sign) for sign in (1, -1, 1, -1)]) for factor in (1.1, 3.0)
    )
    assert kl(alike, 100) < kl(different, 100) / 2


def test_a_pair_without_an_audit_moves_the_mean_but_is_no_more_evidence() -> None:
    """0.06 nats for e^2 of 0.06 in two audits; the third pair's e^2 is 0.04, and so is its KL."""
    gate = audited((0.02, 80, 0.02), (0.04, 40, 0.04), (0.04, 80, None))
    levels = np.log([0.02, 0.04])
    common = (8 * 0.4225 + np.log(2) ** 2 / 2) / 9
    spread = math.sqrt((4 * common + ((levels - levels.mean()) ** 2).sum()) / 5)
    mean = np.log([0.02, 0.04, 0.04]).mean()
    assert kl(gate, 60) == pytest.approx(math.exp(mean + 2.0537489 * spread * math.sqrt(3 / 2)))
    assert kl(audited((0.02, 80, 0.02), (0.04, 40, 0.04), (0.04, 80, 0.04)), 60) < kl(gate, 60)


def test_spans_shorter_than_any_that_was_seen_and_far_longer_ones_are_expected_to_have_more() -> None:
    gate = audited((0.02, 200, 0.01), (0.02, 800, 0.01))
    assert kl(gate, 200) == kl(gate, 800) == kl(gate, 1600) == pytest.approx(0.01 * TWO_EQUAL)
    assert kl(gate, 50) == pytest.approx(4 * kl(gate, 200))
    assert kl(gate, 4800) == pytest.approx(3 * kl(gate, 1600))


def test_a_large_error_that_nothing_noticed_and_a_small_one_that_was_noticed_are_not_multiplied() -> None:
    assert kl(audited((0.10, 100, 0.01), (0.01, 100, 0.01)), 100) == pytest.approx(0.01 * TWO_EQUAL)


def test_the_error_of_the_source_adds_and_the_kl_grows_with_its_square() -> None:
    gate = audited((0.02, 100, 0.01), (0.02, 100, 0.01))
    fresh, chained = (gate.expect(EDGE, "affine", 100, carried) for carried in (0.0, 0.1))
    assert fresh is not None and chained is not None
    assert chained.error == pytest.approx(fresh.error + 0.1)
    assert chained.kl == pytest.approx(fresh.kl * (chained.error / fresh.error) ** 2)


def test_an_audit_that_shows_nothing_does_not_make_an_edge_free() -> None:
    gate = audited((0.02, 80, 0.0), (0.02, 80, 0.0))
    assert kl(gate, 80) == pytest.approx(LEAST_FACTOR * 0.02 * TWO_EQUAL)
    assert gate.kl(EDGE, "affine", 0.2) == pytest.approx(LEAST_FACTOR * 0.04)


def test_a_span_without_any_error_costs_nothing() -> None:
    expected = gate_with((0.0, 100), (0.0, 100)).expect(EDGE, "affine", 100)
    assert expected is not None and expected.error == 0.0 and expected.kl == 0.0


def test_the_evidence_is_the_newest_pair_beside_what_is_expected_there() -> None:
    gate = gate_with((0.001, 1000), (0.003, 500))
    gate.record(Edge("s", "b", "c"), "affine", squared_error=0.04, tokens=100, kl=0.002)
    lonely, known = gate.evidence(9)
    assert (known.edge, known.pairs, known.audits, known.tokens) == (EDGE, 2, 0, 500)
    assert known.expected == gate.expect(EDGE, "affine", 500) and known.expected is not None
    assert known.measured_error == pytest.approx(math.sqrt(0.003)) and known.audited_kl is None
    assert lonely.expected is None and lonely.audited_kl == 0.002 and lonely.measured_error == pytest.approx(0.2)
    assert gate.evidence(1) == [lonely] and len(gate) == 2
