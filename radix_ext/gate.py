"""The gate: reuse a span only when the error of its correction can be vouched for.

Every dense run of an agent on content whose source is resident gives a held-out pair, made before the
estimator sees the run: the corrected KV against the true one, as a relative error

    e^2 = mean over layers of (|K - K'|^2 / |K|^2 + |V - V'|^2 / |V|^2) / 2.

The energy of the error sits in the span's first tokens and hardly grows with its length (method, section 4),
so ``q = e^2 * tokens`` is kept per edge and estimator, and a span of n tokens is predicted at
``e = sqrt(q / n)``. The margin is one-sided: the largest of the recent pairs, raised the more the fewer
there are. Errors along a chain add. The KL of the next-token distribution follows ``e^2`` with a factor that the
audits of the edge measure (`audit`), the largest of the recent ones; the KL of a prompt's spans add.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from kvcmas_sgl.radix_ext.estimators import Edge

KL_PER_SQUARED_ERROR = 3.0
"""KL (nats) per squared relative KV error of an edge that was never audited: the most seen. Measured on SmolLM2-135M:
documents right after the agent prefix 0.2 to 1.2, answers of other agents right before the question 0.02 to 3.0."""

LEAST_FACTOR = 0.05
"""What an audit must not go below: one that shows nothing may have looked at the wrong tokens."""

MIN_PAIRS = 2
"""Held-out pairs before an edge is trusted at all."""

MAX_PAIRS = 16
MAX_EDGES = 1 << 14


@dataclass(frozen=True)
class HeldOut:
    """One held-out pair: normalised error ``q``, length of the span in tokens, and the audited KL in nats if any."""

    q: float
    tokens: int
    kl: float | None = None

    @property
    def kl_per_squared_error(self) -> float | None:
        """How much the next tokens mind this span's error."""
        return None if self.kl is None or not self.q else self.kl * self.tokens / self.q


class Gate:
    """Held-out errors per (edge, estimator), and the prediction from them."""

    def __init__(self, max_kl: float) -> None:
        self.max_kl = max_kl
        self._pairs: OrderedDict[tuple[Edge, str], deque[HeldOut]] = OrderedDict()

    def record(self, edge: Edge, estimator: str, *, squared_error: float, tokens: int, kl: float | None = None) -> None:
        """Keep one held-out pair: e^2 as in the module's docstring and, where it was audited, the KL in nats."""
        if not math.isfinite(squared_error) or not math.isfinite(kl or 0.0):
            raise ValueError(f"squared_error is {squared_error} and kl is {kl}, but both must be finite.")
        pairs = self._pairs.setdefault((edge, estimator), deque(maxlen=MAX_PAIRS))
        pairs.append(HeldOut(squared_error * tokens, tokens, kl))
        self._pairs.move_to_end((edge, estimator))
        while len(self._pairs) > MAX_EDGES:
            self._pairs.popitem(last=False)

    def pairs(self, edge: Edge, estimator: str) -> int:
        """Number of held-out pairs kept for an edge."""
        return len(self._pairs.get((edge, estimator), ()))

    def predict(self, edge: Edge, estimator: str, tokens: int) -> float | None:
        """Upper estimate of the relative error for a span of ``tokens``; None when too little is known."""
        pairs = self._pairs.get((edge, estimator))
        if pairs is None or len(pairs) < MIN_PAIRS:
            return None
        margin = 1.0 + 1.0 / len(pairs)
        # Longer spans than any seen are predicted at the longest seen: extrapolation never helps a span.
        longest = max(pair.tokens for pair in pairs)
        return math.sqrt(max(pair.q for pair in pairs) * margin / min(tokens, longest))

    def audits(self, edge: Edge, estimator: str) -> int:
        """Number of pairs of an edge whose KL was audited."""
        return len(self._factors(edge, estimator))

    def kl(self, edge: Edge, estimator: str, error: float) -> float:
        """Predicted KL, nats, of KV with an accumulated relative error that was corrected on an edge.

        Where a span stands and what is asked about it decide how much of its error the next tokens notice: by more than
        a hundred times between edges. Audits of the edge measure it; without any, the most that was seen is assumed.
        """
        factors = self._factors(edge, estimator)
        if not factors:
            return KL_PER_SQUARED_ERROR * error * error
        return max(LEAST_FACTOR, *factors) * error * error

    def _factors(self, edge: Edge, estimator: str) -> list[float]:
        pairs = self._pairs.get((edge, estimator), ())
        return [factor for pair in pairs if (factor := pair.kl_per_squared_error) is not None]

    def admits(self, kl: float) -> bool:
        """Whether a predicted KL is inside the budget."""
        return kl <= self.max_kl

    def drop(self, edge: Edge) -> None:
        """Forget an edge under every estimator."""
        for key in [key for key in self._pairs if key[0] == edge]:
            del self._pairs[key]

    def clear(self) -> None:
        self._pairs.clear()
