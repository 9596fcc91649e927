"""The gate: it vouches only for what it has seen, one-sidedly, and errors add along a chain."""

from __future__ import annotations

import math

import pytest
from kvcmas_sgl.radix_ext.decision import Plan, Reason, Refusal
from kvcmas_sgl.radix_ext.estimators import Edge, make_estimator
from kvcmas_sgl.radix_ext.gate import KL_PER_SQUARED_ERROR, MIN_PAIRS, Gate
from kvcmas_sgl.radix_ext.planner import Planner
from kvcmas_sgl.radix_ext.sources import Agent, Source, edge

EDGE = Edge("s", "a", "b")
CRITIC = Agent("critic", "pc", "s")


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


def planner(gate: Gate) -> Planner:
    estimators = {n: make_estimator(n, layers=2, kv_heads=1, head_dim=8, rank=4) for n in ("affine", "none")}
    return Planner(estimators, "affine", gate, lambda source, consumer: [])


def source(role: str, *, error: float = 0.0, prefix: str = "") -> Source:
    return Source("c", Agent(role, prefix or f"p-{role}", "s"), 1, 4, 1000, error=error, exact=error == 0)


def learned(*sources: Source, squared_error: float = 0.001, max_kl: float = 0.02) -> Gate:
    gate = Gate(max_kl)
    for known in sources:
        for _ in range(MIN_PAIRS):
            gate.record(edge(known.agent, CRITIC), "affine", squared_error=squared_error, tokens=1000)
    return gate


def decide(gate: Gate, *sources: Source, always: bool = False) -> Plan | Refusal:
    return planner(gate).plan(CRITIC, sources, estimator=None, always=always)


def test_reasons_for_refusal() -> None:
    known = source("planner")
    assert decide(Gate(0.02)) == Refusal(Reason.NO_SOURCE)
    assert decide(Gate(0.02), known) == Refusal(Reason.EDGE_UNKNOWN)
    refusal = decide(learned(known, squared_error=1.0), known)
    assert isinstance(refusal, Refusal) and refusal.reason is Reason.OVER_BUDGET
    assert refusal.kl == pytest.approx(KL_PER_SQUARED_ERROR * 1.5)


def test_errors_add_along_the_chain_and_the_exact_source_wins_when_the_sum_says_so() -> None:
    newest, exact = source("writer", error=0.05), source("planner")
    plan = decide(learned(newest, exact), newest, exact)
    assert isinstance(plan, Plan) and plan.source is exact
    assert plan.error == pytest.approx(math.sqrt(0.001 * 1.5))
    only = decide(learned(newest, max_kl=1.0), newest)
    assert isinstance(only, Plan) and only.error == pytest.approx(0.05 + math.sqrt(0.001 * 1.5))


def test_the_same_prefix_needs_no_learning_and_is_exact() -> None:
    plan = decide(Gate(0.0), source("twin", prefix="pc"))
    assert isinstance(plan, Plan) and plan.exact and plan.error == 0.0
    assert planner(Gate(0.0)).delta(plan, CRITIC) is None


def test_always_overrides_the_budget_but_says_what_it_predicts() -> None:
    known = source("planner")
    plan = decide(learned(known, squared_error=1.0), known, always=True)
    assert isinstance(plan, Plan) and plan.kl > 0.02
