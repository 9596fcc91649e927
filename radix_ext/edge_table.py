"""The table of edges that an operator reads: what is known of each pair of agents, and what was reused on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcmas_sgl.radix_ext.estimators import Estimator
from kvcmas_sgl.radix_ext.gate import Evidence, Gate
from kvcmas_sgl.radix_ext.heavy import plain_name
from kvcmas_sgl.radix_ext.sources import Agent
from kvcmas_sgl.radix_ext.statistics import Statistics

MAX_ROWS = 64
"""Rows of the table: those of the edges that learned last."""


def edge_table(gate: Gate, estimators: Mapping[str, Estimator], statistics: Statistics) -> list[dict[str, Any]]:
    """One row for an edge and a way to correct it, newest first, JSON-compatible; at most `MAX_ROWS`.

    ``source``, ``consumer``: roles; ``source_place``, ``consumer_place``: where in their prompts (`sources.Place`).
    ``scope``: beginning of the digest of `cache_salt` and `extra_key`. ``estimator``: with ``+heavy``, ``+heavier`` or
    ``+heaviest`` where heavy hitters are computed. ``pairs``, ``audits``: held-out pairs kept, and those of them that
    were audited. ``tokens``: length of the newest pair's span. ``predicted_error``, ``predicted_kl``: what the gate
    expects of such a span, None while too little is known. ``measured_error``: of the newest pair; ``audited_kl``: of
    the newest audited one. Errors are relative KV errors, KL is in nats.
    ``corrected_tokens``, ``exact_tokens``: placed on this edge since start, whatever the way. ``state_bytes``: of the
    estimator, for this edge.
    """
    return [_row(known, estimators, statistics) for known in gate.evidence(MAX_ROWS)]


def _row(known: Evidence, estimators: Mapping[str, Estimator], statistics: Statistics) -> dict[str, Any]:
    source, source_place = Agent.read_key(known.edge.source)
    consumer, consumer_place = Agent.read_key(known.edge.consumer)
    use = statistics.edges.get(known.edge)
    return {
        "source": source,
        "source_place": source_place,
        "consumer": consumer,
        "consumer_place": consumer_place,
        "scope": known.edge.namespace[:8],
        "estimator": known.estimator,
        "pairs": known.pairs,
        "audits": known.audits,
        "tokens": known.tokens,
        "predicted_error": None if known.expected is None else known.expected.error,
        "measured_error": known.measured_error,
        "predicted_kl": None if known.expected is None else known.expected.kl,
        "audited_kl": known.audited_kl,
        "corrected_tokens": use.corrected_tokens,
        "exact_tokens": use.exact_tokens,
        "state_bytes": estimators[plain_name(known.estimator)].edge_bytes(known.edge),
    }
