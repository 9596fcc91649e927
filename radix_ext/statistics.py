"""Counters of what the cache did, apart from the logic that does it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvcmas_sgl.radix_ext.decision import Report
from kvcmas_sgl.radix_ext.failures import FailureLog

RECENT = 256
"""Reports that are kept for who asks what happened."""


@dataclass
class Statistics:
    """Totals since start. Seconds are wall clock of the scheduler's thread; ``checked_kl`` is a sum, nats."""

    requests: int = 0
    exact_tokens: int = 0
    corrected_tokens: int = 0
    computed_tokens: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    fallbacks: int = 0
    spans_learned: int = 0
    audits: int = 0
    checks: int = 0
    checks_over_budget: int = 0
    checked_kl: float = 0.0
    jobs_dropped: int = 0
    state_saves: int = 0
    state_failures: int = 0
    state_refused: int = 0
    match_seconds: float = 0.0
    place_seconds: float = 0.0
    publish_seconds: float = 0.0
    learn_seconds: float = 0.0
    audit_seconds: float = 0.0
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=RECENT), repr=False)
    listeners: list[Callable[[Report], None]] = field(default_factory=list, repr=False)
    log: FailureLog = field(default_factory=FailureLog, repr=False)

    def record(self, rid: str, report: Report) -> None:
        """Count one request's outcome and tell the listeners; spans are counted by reason."""
        self.requests += 1
        self.exact_tokens += report.exact_tokens
        self.corrected_tokens += report.corrected_tokens
        self.computed_tokens += report.computed_tokens
        self.reasons.update(str(span.reason) for span in report.spans)
        self.recent.append({"rid": rid, **report.as_dict()})
        for listener in self.listeners:
            listener(report)

    def failed(self, where: str, then: str) -> None:
        """Count the exception that is being handled, and log it if nothing like it was logged just before."""
        self.fallbacks += 1
        self.log.report(where, then)

    def as_dict(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if name not in ("listeners", "log")}
        values["reasons"] = dict(self.reasons)
        values["recent"] = list(self.recent)
        return values
