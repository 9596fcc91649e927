"""Prometheus metrics, beside SGLang's own at ``/metrics``.

=================================  =======  =====================================================
name                               labels   meaning
=================================  =======  =====================================================
``kvcmas:requests_total``          auto     agent requests: ``false`` with a hint, ``true`` found by content
``kvcmas:spans_total``             reason   shared spans by what happened to them
``kvcmas:prompt_tokens_total``     kind     prompt tokens: ``exact``, ``corrected``, ``computed``
``kvcmas:predicted_kl``            --       histogram of the predicted KL of prompts with corrected KV, nats
``kvcmas:fallbacks_total``         --       internal failures that ended in a dense prefill
``kvcmas:state_bytes``             part     bytes held: ``own_deltas``, ``estimators``
``kvcmas:state_saves_total``       outcome  attempts to save learned state: ``saved``, ``failed``
=================================  =======  =====================================================

Labels take values from closed lists only: a client cannot grow their number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcmas_sgl.radix_ext.cache import DeltaRadixCache
    from kvcmas_sgl.radix_ext.decision import Report

_KL_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0)


def export(cache: DeltaRadixCache) -> None:
    """Export a cache's counters from this (the scheduler's) process."""
    # prometheus_client picks its multi-process mode at import: SGLang has set it up by now.
    from prometheus_client import Counter, Gauge, Histogram

    requests = Counter("kvcmas:requests", "Agent requests.", ["auto"])
    spans = Counter("kvcmas:spans", "Shared spans by what happened to them.", ["reason"])
    tokens = Counter("kvcmas:prompt_tokens", "Prompt tokens of agent requests.", ["kind"])
    predicted = Histogram(
        "kvcmas:predicted_kl", "Predicted KL of prompts with corrected KV, nats.", buckets=_KL_BUCKETS
    )
    fallbacks = Counter("kvcmas:fallbacks", "Internal failures that ended in a dense prefill.")
    state = Gauge("kvcmas:state_bytes", "Bytes held.", ["part"], multiprocess_mode="mostrecent")
    saves = Counter("kvcmas:state_saves", "Attempts to save learned state.", ["outcome"])
    counted = 0
    attempts = {"saved": 0, "failed": 0}

    def on_report(report: Report) -> None:
        nonlocal counted
        requests.labels(str(report.auto).lower()).inc()
        for span in report.spans:
            spans.labels(str(span.reason)).inc()
        tokens.labels("exact").inc(report.exact_tokens)
        tokens.labels("corrected").inc(report.corrected_tokens)
        tokens.labels("computed").inc(report.computed_tokens)
        if report.predicted_kl is not None and report.corrected_tokens:
            predicted.observe(report.predicted_kl)
        fallbacks.inc(cache.statistics.fallbacks - counted)
        counted = cache.statistics.fallbacks
        state.labels("own_deltas").set(cache.deltas.nbytes)
        state.labels("estimators").set(cache.learner.state_bytes - cache.deltas.nbytes)

        held = cache.statistics
        for outcome, total in (("saved", held.state_saves), ("failed", held.state_failures)):
            saves.labels(outcome).inc(total - attempts[outcome])
            attempts[outcome] = total

    cache.statistics.listeners.append(on_report)
