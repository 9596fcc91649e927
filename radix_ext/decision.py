"""What happened to a span and why: the closed list of reasons, the plan, and the report to the client."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcmas_sgl.radix_ext.sources import Source


class Reason(enum.StrEnum):
    """Why a prompt's span was, or was not, reused. Closed: metrics use it as a label."""

    REUSED = "reused"
    """Corrected from another agent's KV."""
    EXACT = "exact"
    """The role's own exact KV was resident."""
    OWN_CORRECTED = "own_corrected"
    """The role's own KV was resident, from an earlier correction."""
    NO_SPAN = "no_span"
    """The hint marks no span."""
    TOO_SHORT = "too_short"
    """The span is shorter than ``min_span``."""
    PREFIX_NOT_RESIDENT = "prefix_not_resident"
    """The agent's own prefix is not in the cache, so a correction has no place to start."""
    NO_SOURCE = "no_source"
    """No other agent's KV of this content is resident."""
    EDGE_UNKNOWN = "edge_unknown"
    """Too few dense runs of this pair of agents to vouch for a prediction."""
    OVER_BUDGET = "over_budget"
    """The predicted KL is above the quality budget."""
    DECLINED = "declined"
    """The request or the server's policy asked for a dense prefill."""
    NO_ROOM = "no_room"
    """No slots could be allocated for the corrected KV."""
    FAILED = "failed"
    """An internal error; the span was prefilled."""


@dataclass(frozen=True)
class Plan:
    """A span that can be placed: from which source, with whose delta, at which predicted error.

    ``error`` is the accumulated relative error of the corrected KV (dimensionless, root mean square);
    ``kl`` its predicted effect on the next-token distribution, nats. ``exact`` marks a bit-exact copy.
    """

    source: Source
    estimator: str
    error: float
    kl: float
    exact: bool = False


@dataclass(frozen=True)
class Refusal:
    """A span that is prefilled, and why; with the error that was predicted, if one was."""

    reason: Reason
    error: float | None = None
    kl: float | None = None


@dataclass
class Report:
    """What one request's prompt got; a dict of it is the response's ``meta_info["kvcmas"]``.

    ``exact_tokens + corrected_tokens + computed_tokens`` is the prompt's length.
    """

    role: str
    prompt_tokens: int
    exact_tokens: int = 0
    corrected_tokens: int = 0
    reason: Reason = Reason.NO_SPAN
    source: str | None = None
    estimator: str | None = None
    predicted_error: float | None = None
    predicted_kl: float | None = None

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.exact_tokens - self.corrected_tokens

    def as_dict(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "exact_tokens": self.exact_tokens,
            "corrected_tokens": self.corrected_tokens,
            "computed_tokens": self.computed_tokens,
            "source": self.source,
            "estimator": self.estimator,
            "predicted_error": self.predicted_error,
            "predicted_kl": self.predicted_kl,
            "reason": str(self.reason),
        }
