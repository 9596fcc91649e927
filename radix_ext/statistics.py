"""Counters of what the cache did, apart from the logic that does it."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from kvcmas_sgl.radix_ext.decision import Report
from kvcmas_sgl.radix_ext.estimators import Edge
from kvcmas_sgl.radix_ext.failures import FailureLog
from kvcmas_sgl.radix_ext.gate import Expected

RECENT = 256
"""Reports that are kept for who asks what happened."""

MAX_NAMES = 64
"""Roles that are counted one by one, and edges too: clients choose their names, and may choose many."""

Name = TypeVar("Name", bound=Hashable)


@dataclass
class Use:
    """What prompts got: requests and their tokens by kind. Of an edge: pieces that were placed, and theirs."""

    requests: int = 0
    exact_tokens: int = 0
    corrected_tokens: int = 0
    computed_tokens: int = 0

    def add(self, other: Use) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Uses(Generic[Name]):
    """`Use` by name, for the `MAX_NAMES` names that were seen last; what the others had is kept as one sum."""

    def __init__(self) -> None:
        self._named: OrderedDict[Name, Use] = OrderedDict()
        self.others = Use()

    def add(self, name: Name, use: Use) -> None:
        self._named.setdefault(name, Use()).add(use)
        self._named.move_to_end(name)
        if len(self._named) > MAX_NAMES:
            self.others.add(self._named.popitem(last=False)[1])

    def get(self, name: Name) -> Use:
        return self._named.get(name, Use())

    def as_list(self) -> list[dict[str, Any]]:
        """One entry a name (``role``), newest first; the last one, if any were summed up, has None for a name."""
        rows: list[dict[str, Any]] = [{"role": name, **vars(use)} for name, use in reversed(self._named.items())]
        return [*rows, {"role": None, **vars(self.others)}] if self.others.requests else rows


@dataclass
class Held:
    """Predictions beside what was measured: how many had none, were inside it, or were above it."""

    unpredicted: int = 0
    inside: int = 0
    above: int = 0

    def count(self, measured: float, predicted: float | None) -> str:
        """Count one and return how it came out: the name of the field."""
        outcome = "unpredicted" if predicted is None else "inside" if measured <= predicted else "above"
        setattr(self, outcome, getattr(self, outcome) + 1)
        return outcome


class Listener(Protocol):
    """Who wants to be told; `kvcmas_sgl.metrics` is one."""

    def on_report(self, report: Report) -> None:
        """A request's prompt is complete."""

    def on_held_out(self, error: str, kl: float | None, audit: str | None) -> None:
        """A held-out pair: how its KV error came out beside the prediction and, where audited, its KL (nats)."""

    def on_check(self, kl: float, over_budget: bool) -> None:
        """A request that was reused was computed densely after all, and compared: KL, nats."""

    def on_change(self) -> None:
        """Something that is held or switched has changed."""


@dataclass
class Statistics:
    """Totals since start. Seconds are wall clock of the scheduler's thread; ``checked_kl`` is a sum, nats.

    ``images_encoded`` counts what the vision tower was given for requests: pictures, frames or tiles;
    ``images_encoded_idle`` for audits and checks; ``images_corrected`` pictures in agents' prompts that were placed.
    """

    requests: int = 0
    exact_tokens: int = 0
    corrected_tokens: int = 0
    computed_tokens: int = 0
    images_encoded: int = 0
    images_encoded_idle: int = 0
    images_corrected: int = 0
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
    held_out_errors: Held = field(default_factory=Held)
    held_out_kl: Held = field(default_factory=Held)
    match_seconds: float = 0.0
    place_seconds: float = 0.0
    publish_seconds: float = 0.0
    learn_seconds: float = 0.0
    audit_seconds: float = 0.0
    roles: Uses[str] = field(default_factory=Uses, repr=False)
    edges: Uses[Edge] = field(default_factory=Uses, repr=False)
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=RECENT), repr=False)
    listeners: list[Listener] = field(default_factory=list, repr=False)
    log: FailureLog = field(default_factory=FailureLog, repr=False)

    def record(self, rid: str, report: Report) -> None:
        """Count one request's outcome and tell the listeners; spans are counted by reason."""
        self.requests += 1
        self.exact_tokens += report.exact_tokens
        self.corrected_tokens += report.corrected_tokens
        self.computed_tokens += report.computed_tokens
        self.reasons.update(str(span.reason) for span in report.spans)
        self.roles.add(report.role, Use(1, report.exact_tokens, report.corrected_tokens, report.computed_tokens))
        self.recent.append({"rid": rid, **report.as_dict()})
        self._tell(lambda listener: listener.on_report(report))

    def placed(self, edge: Edge, use: Use) -> None:
        """Count what was placed on an edge."""
        self.edges.add(edge, use)

    def held_out(self, expected: Expected | None, *, error: float, kl: float | None) -> None:
        """Count a held-out pair: measured relative error and, where audited, KL (nats), beside what was expected."""
        outcome = self.held_out_errors.count(error, None if expected is None else expected.error)
        predicted = None if expected is None else expected.kl
        audit = None if kl is None else self.held_out_kl.count(kl, predicted)
        self._tell(lambda listener: listener.on_held_out(outcome, kl, audit))

    def checked(self, kl: float, *, over_budget: bool) -> None:
        """Count a check of a request that was reused: the KL of what the client got, nats."""
        self.checks += 1
        self.checked_kl += kl
        self.checks_over_budget += over_budget
        self._tell(lambda listener: listener.on_check(kl, over_budget))

    def changed(self) -> None:
        """Tell the listeners to look again."""
        self._tell(lambda listener: listener.on_change())

    def _tell(self, event: Callable[[Listener], None]) -> None:
        for listener in self.listeners:
            try:
                event(listener)
            except Exception:
                # Who listens must not cost a request its reuse, nor the scheduler its life.
                self.failed("a listener of the statistics", "what it shows may be behind")

    def failed(self, where: str, then: str) -> None:
        """Count the exception that is being handled, and log it if nothing like it was logged just before."""
        self.fallbacks += 1
        self.log.report(where, then)

    def as_dict(self) -> dict[str, Any]:
        """JSON-compatible; edges are in a table of their own (`edge_table`)."""
        values = {name: value for name, value in vars(self).items() if name not in ("listeners", "log", "edges")}
        values["reasons"] = dict(self.reasons)
        values["recent"] = list(self.recent)
        values["roles"] = self.roles.as_list()
        values["held_out_errors"] = dict(vars(self.held_out_errors))
        values["held_out_kl"] = dict(vars(self.held_out_kl))
        return values
