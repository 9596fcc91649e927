"""One thing varied at a time, on stock and on ours: span length, agents, arrival rate, share of unseen content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.serving.agents import AgentBench, comparison
from benchmarks.serving.arms import ARMS, OURS, RUST
from benchmarks.serving.plan import AGENTS, SPREAD_DOCUMENT, Clock
from benchmarks.serving.session import Measured, learn
from benchmarks.workload.arrivals import ClosedLoop
from benchmarks.workload.build import Builder

_ARMS = (ARMS[RUST], ARMS[OURS])
_POOL = 3
# Workflows that ours learns from at a length, or between a number of agents, that it has not met yet.
_LENGTH_LEARNED, _AGENTS_LEARNED = 1, 4
# Stock computes about so many prompt tokens a second here; only to tell whether a sweep still fits.
_TOKENS_PER_S = 500.0


def sweep(bench: AgentBench, clock: Clock) -> dict[str, Any]:
    """All sweeps of the plan that still fit, as rows by their name."""
    plan = bench.plan
    found: dict[str, Any] = {}
    found["span_tokens"] = [
        _span(bench, tokens)
        for tokens in plan.spans
        if clock.has(_seconds(tokens, AGENTS, plan.sweep_workflows + _LENGTH_LEARNED), f"a span of {tokens}")
    ]
    found["unseen_share"] = [
        _unseen(bench, share)
        for share in plan.unseen
        if clock.has(_seconds(SPREAD_DOCUMENT, AGENTS, 3 * plan.sweep_workflows + _POOL), f"{share:.0%} unseen")
    ]
    found["agents"] = [
        _agents(bench, count)
        for count in plan.agents
        if clock.has(_seconds(SPREAD_DOCUMENT, count, plan.sweep_workflows + _AGENTS_LEARNED), f"{count} agents")
    ]
    found["rate"] = []
    for load in plan.rates:
        seconds = 2 * (plan.rate_workflows / (load * (bench.rate or 1.0)) + 60)
        if bench.rate is not None and clock.has(seconds, f"arrivals at {load:.0%}"):
            done = bench.poisson(_ARMS, load, plan.rate_workflows, 1, clock)
            found["rate"].append({"x": load, **done})
    return found


def _span(bench: AgentBench, tokens: int) -> dict[str, Any]:
    builder = bench.make_builder(document_tokens=(tokens, tokens))
    # What the gate expects of a length far from those it knows is another question than what reuse gives there.
    learn(bench.fleet, ARMS[OURS], builder.workflows(_LENGTH_LEARNED, f"learned-{tokens}-"), f"spans of {tokens}")
    return _point(bench, builder, "span_tokens", tokens)


def _agents(bench: AgentBench, count: int) -> dict[str, Any]:
    builder = bench.make_builder(agents=count, document_tokens=(SPREAD_DOCUMENT, SPREAD_DOCUMENT))
    # Pairs that nobody has met yet are learned first, as in the main comparison.
    learn(bench.fleet, ARMS[OURS], builder.workflows(_AGENTS_LEARNED, f"learned-{count}-"), f"{count} agents")
    return _point(bench, builder, "agents", count)


def _unseen(bench: AgentBench, share: float) -> dict[str, Any]:
    builder = bench.make_builder(document_tokens=(SPREAD_DOCUMENT, SPREAD_DOCUMENT), pool=_POOL, zipf=0.0, unseen=share)
    if share < 1:
        # Every agent has read the pool: what is seen is an exact hit on both arms.
        pool = bench.make_builder(document_tokens=(SPREAD_DOCUMENT, SPREAD_DOCUMENT), pool=_POOL, zipf=0.0, unseen=0.0)
        for arm in _ARMS:
            learn(bench.fleet, arm, pool.workflows(2 * _POOL, f"pool-{share}-"), "pool")
    return _point(bench, builder, "unseen_share", share, 3)


def _point(bench: AgentBench, builder: Builder, name: str, x: float, more: int = 1) -> dict[str, Any]:
    flows = builder.workflows(more * bench.plan.sweep_workflows, f"{name}-{x}-")
    measured: Sequence[Measured] = bench.compare(flows, ClosedLoop(1), _ARMS, f"{name} {x}")
    rows = [bench.row(entry) for entry in measured]
    return {"x": x, **comparison(measured), "rows": rows}


def _seconds(tokens: int, agents: int, workflows: int) -> float:
    return 1.6 * workflows * agents * (tokens / _TOKENS_PER_S + 1)
