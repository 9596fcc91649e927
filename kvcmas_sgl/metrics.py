"""Prometheus metrics, beside SGLang's own at ``/metrics``; docs/operations.md says what to do with them.

Labels take values from closed lists only: a client cannot grow their number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from kvcmas_sgl.switches import Mode

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter

    from kvcmas_sgl.radix_ext.cache import DeltaRadixCache
    from kvcmas_sgl.radix_ext.decision import Report

_KL_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0)
_IMAGES = ("encoded", "encoded_idle", "corrected")
_STEPS = ("match", "place", "publish", "learn", "audit")


def export(cache: DeltaRadixCache, registry: CollectorRegistry | None = None) -> None:
    """Export a cache's counters from this (the scheduler's) process; to Prometheus's own registry by default."""
    cache.statistics.listeners.append(Exporter(cache, registry))


class Exporter:
    """Listens to a cache's statistics, and mirrors its totals whenever it is told something."""

    def __init__(self, cache: DeltaRadixCache, registry: CollectorRegistry | None = None) -> None:
        # prometheus_client picks its multi-process mode at import: SGLang has set it up by now.
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        to = REGISTRY if registry is None else registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvcmas:{name}", text, labels, registry=to)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"kvcmas:{name}", text, labels, registry=to, multiprocess_mode="mostrecent")

        def kl(name: str, text: str) -> Histogram:
            return Histogram(f"kvcmas:{name}", text, buckets=_KL_BUCKETS, registry=to)

        self._cache = cache
        self._requests = counter("requests", "Agent requests.", "auto")
        self._spans = counter("spans", "Shared spans by what happened to them.", "reason")
        self._tokens = counter("prompt_tokens", "Prompt tokens of agent requests.", "kind")
        self._images = counter(
            "images", "Pictures: given to the vision tower, in idle passes too, or corrected.", "kind"
        )
        self._predicted = kl("predicted_kl", "Predicted KL of prompts with corrected KV, nats.")
        self._audited = kl("audited_kl", "KL of corrections as audits measured it, nats.")
        self._held_out = counter("held_out", "Held-out pairs by their KV error beside the prediction.", "outcome")
        self._audits = counter("audits", "Audited pairs by their KL beside the prediction.", "outcome")
        self._checked = kl("checked_kl", "KL of reused requests as checks measured it, nats.")
        self._checks = counter("checks", "Checked requests by their KL beside the budget.", "outcome")
        self._fallbacks = counter("fallbacks", "Internal failures that ended in a dense prefill.")
        self._dropped = counter("jobs_dropped", "Learning jobs and audits that were given up.")
        self._seconds = counter("seconds", "Time of the scheduler's thread, seconds.", "step")
        self._saves = counter("state_saves", "Attempts to save learned state.", "outcome")
        self._state = gauge("state_bytes", "Bytes held.", "part")
        self._budget = gauge("state_budget_bytes", "Bytes that may be held.")
        self._edges = gauge("edges", "Edges with held-out pairs, once for each way to correct them.")
        self._sources = gauge("source_tokens", "Tokens of content that corrections can start from.")
        self._jobs = gauge("learning_jobs", "Learning jobs and audits that wait.")
        self._max_kl = gauge("max_kl", "Quality budget, nats.")
        self._mode = gauge("mode", "1 for the mode that is switched on.", "mode")
        self._mirrored: dict[tuple[str, str], float] = {}
        self.on_change()

    def on_report(self, report: Report) -> None:
        self._requests.labels(str(report.auto).lower()).inc()
        for span in report.spans:
            self._spans.labels(str(span.reason)).inc()
        for kind in ("exact", "corrected", "computed"):
            self._tokens.labels(kind).inc(getattr(report, f"{kind}_tokens"))
        if report.predicted_kl is not None and report.corrected_tokens:
            self._predicted.observe(report.predicted_kl)
        self.on_change()

    def on_held_out(self, error: str, kl: float | None, audit: str | None) -> None:
        self._held_out.labels(error).inc()
        if kl is not None:
            self._audits.labels(audit).inc()
            # An audit's KL is a mean of differences in fp32: it may be a little below zero.
            self._audited.observe(max(kl, 0.0))
        self.on_change()

    def on_check(self, kl: float, over_budget: bool) -> None:
        self._checks.labels("above" if over_budget else "inside").inc()
        self._checked.observe(max(kl, 0.0))
        self.on_change()

    def on_change(self) -> None:
        cache, totals = self._cache, self._cache.statistics
        self._mirror(self._fallbacks, "", totals.fallbacks)
        self._mirror(self._dropped, "", totals.jobs_dropped)
        self._mirror(self._saves, "saved", totals.state_saves)
        self._mirror(self._saves, "failed", totals.state_failures)
        for kind in _IMAGES:
            self._mirror(self._images, kind, getattr(totals, f"images_{kind}"))
        for step in _STEPS:
            self._mirror(self._seconds, step, getattr(totals, f"{step}_seconds"))
        self._state.labels("own_deltas").set(cache.deltas.nbytes)
        self._state.labels("estimators").set(cache.learner.state_bytes - cache.deltas.nbytes)
        self._budget.set(cache.config.state_bytes)
        self._edges.set(len(cache.gate))
        self._sources.set(cache.sources.tokens)
        self._jobs.set(len(cache.learner))
        self._max_kl.set(cache.switches.max_kl)
        for mode in get_args(Mode):
            self._mode.labels(mode).set(mode == cache.switches.mode)

    def _mirror(self, counter: Counter, label: str, total: float) -> None:
        key = (str(counter), label)
        (counter.labels(label) if label else counter).inc(total - self._mirrored.get(key, 0.0))
        self._mirrored[key] = total
