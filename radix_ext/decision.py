"""What happens to a span and why: the closed list of reasons, the pieces of a plan, and the report to the client."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcmas_sgl.radix_ext.sources import Agent, Source


class Reason(enum.StrEnum):
    """Why a span was, or was not, reused. Closed: metrics use it as a label."""

    REUSED = "reused"
    """Corrected from other KV of the same content, all of it or in part."""
    EXACT = "exact"
    """The role's own exact KV was resident."""
    OWN_CORRECTED = "own_corrected"
    """The role's own KV was resident, from an earlier correction."""
    NO_SPAN = "no_span"
    """The hint marks no span, or (automatic mode) no known content was found."""
    TOO_SHORT = "too_short"
    """The span is shorter than ``min_span``."""
    NO_PREFIX = "no_prefix"
    """The span opens the prompt: its first tokens are the attention sink, which is the agent's own."""
    NO_SOURCE = "no_source"
    """No other KV of this content is resident."""
    EDGE_UNKNOWN = "edge_unknown"
    """Too few dense runs of this pair of agents to vouch for a prediction."""
    MOSTLY_NEW = "mostly_new"
    """Less than a quarter of the span is known content; it was computed whole, which makes it a source for others."""
    OVER_BUDGET = "over_budget"
    """The predicted KL, on top of what the prompt holds already, is above the quality budget."""
    DECLINED = "declined"
    """The request or the server's policy asked for a dense prefill."""
    NOT_PREFILLED = "not_prefilled"
    """The span's KV must be computed for another reason: its input logprobs or hidden states were asked for."""
    GONE = "gone"
    """The source left the cache, or no memory was left, between the decision and the correction."""
    FAILED = "failed"
    """An internal error; the span was prefilled."""


@dataclass(frozen=True)
class Base:
    """KV that a stretch can be corrected from: a source, the agent that holds it there, and where in its content.

    ``offset`` is the place, in the source's content, of the first token of the stretch.
    """

    source: Source
    agent: Agent
    offset: int


@dataclass(frozen=True)
class Piece:
    """A stretch ``[start, stop)`` of a prompt that can be placed: from which base, with whose delta, at which error.

    ``error`` is the accumulated relative error of the corrected KV (dimensionless, root mean square); ``kl`` its
    predicted effect on the next-token distribution, nats. ``exact`` marks a bit-exact copy. ``base.offset`` belongs
    to ``start``. ``context`` names the tokens before the stretch, under which own deltas are kept. ``computed`` are
    the tokens inside it, ascending, that are computed all the same.
    """

    span: int
    start: int
    stop: int
    base: Base
    estimator: str
    error: float
    kl: float
    context: str
    exact: bool = False
    computed: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens that need no computing."""
        return self.stop - self.start - len(self.computed)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The stretches that need no computing, ascending."""
        found, at = [], self.start
        for token in (*self.computed, self.stop):
            if token > at:
                found.append((at, token))
            at = token + 1
        return found

    def cut(self, start: int, stop: int) -> Piece | None:
        """The part of it inside ``[start, stop)``; None when there is none."""
        first, last = max(start, self.start), min(stop, self.stop)
        if first >= last:
            return None
        base = Base(self.base.source, self.base.agent, self.base.offset + first - self.start)
        share = (last - first) / (self.stop - self.start)
        inside = tuple(token for token in self.computed if first <= token < last)
        return replace(self, start=first, stop=last, base=base, kl=self.kl * share, computed=inside)


@dataclass
class SpanReport:
    """What one span got; its tokens are ``exact + corrected + computed``. KL in nats."""

    start: int
    stop: int
    exact_tokens: int = 0
    corrected_tokens: int = 0
    reason: Reason = Reason.NO_SOURCE
    source: str | None = None
    estimator: str | None = None
    predicted_error: float | None = None
    predicted_kl: float | None = None

    @property
    def computed_tokens(self) -> int:
        return self.stop - self.start - self.exact_tokens - self.corrected_tokens

    def as_dict(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "stop": self.stop,
            "exact_tokens": self.exact_tokens,
            "corrected_tokens": self.corrected_tokens,
            "computed_tokens": self.computed_tokens,
            **_why(self),
        }


@dataclass
class Report:
    """What one request's prompt got; a dict of it is the response's ``meta_info["kvcmas"]``.

    ``exact_tokens + corrected_tokens + computed_tokens`` is the prompt's length. What stands beside them is that of
    the first span that was reused, or else of the first span; ``predicted_kl`` is that of all corrected KV in the
    prompt, where there is any.
    """

    role: str
    prompt_tokens: int
    auto: bool = False
    exact_tokens: int = 0
    corrected_tokens: int = 0
    predicted_kl: float | None = None
    spans: list[SpanReport] = field(default_factory=list)

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.exact_tokens - self.corrected_tokens

    @property
    def reason(self) -> Reason:
        span = self._leading()
        return Reason.NO_SPAN if span is None else span.reason

    def as_dict(self) -> dict[str, Any]:
        leading = self._leading() or SpanReport(0, 0, reason=Reason.NO_SPAN)
        return {
            "role": self.role,
            "auto": self.auto,
            "exact_tokens": self.exact_tokens,
            "corrected_tokens": self.corrected_tokens,
            "computed_tokens": self.computed_tokens,
            **_why(leading),
            "predicted_kl": leading.predicted_kl if self.predicted_kl is None else self.predicted_kl,
            "spans": [span.as_dict() for span in self.spans],
        }

    def _leading(self) -> SpanReport | None:
        reused = (span for span in self.spans if span.reason is Reason.REUSED)
        return next(reused, self.spans[0] if self.spans else None)


def _why(span: SpanReport) -> dict[str, Any]:
    return {
        "reason": str(span.reason),
        "source": span.source,
        "estimator": span.estimator,
        "predicted_error": span.predicted_error,
        "predicted_kl": span.predicted_kl,
    }
