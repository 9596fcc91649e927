"""The gate: reuse a span only when the error of its correction can be vouched for.

Every dense run of an agent on content whose source is resident gives a held-out pair, made before the
estimator sees the run: the corrected KV against the true one, as a relative error

    e^2 = mean over layers of (|K - K'|^2 / |K|^2 + |V - V'|^2 / |V|^2) / 2.

The energy of the error sits in the span's first tokens and hardly grows with its length (method, section 4),
so ``q = e^2 * tokens`` is kept per edge and estimator, and a span of n tokens is predicted at
``e = sqrt(q / n)``. The margin is one-sided: the largest of the recent pairs, raised the more the fewer
there are. Errors along a chain add. The KL of the next-token distribution follows ``e^2``, averaged over the prompt's
tokens, with a factor measured on SmolLM2-135M (`KL_PER_SQUARED_ERROR`); a calibration per model can replace it.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from kvcmas_sgl.radix_ext.estimators import Edge

KL_PER_SQUARED_ERROR = 1.0
"""Predicted KL (nats) per squared relative KV error. Measured on SmolLM2-135M (fp32, 29 spans of 512 to 3,000 tokens,
three edges): median 0.57, p90 1.06, maximum 1.20 for corrected KV; 0.59, 1.11 and 1.84 for rotate-only."""

MIN_PAIRS = 2
"""Held-out pairs before an edge is trusted at all."""

MAX_PAIRS = 16
MAX_EDGES = 1 << 14


@dataclass(frozen=True)
class HeldOut:
    """One held-out pair: the normalised error ``q`` and the length of its span in tokens."""

    q: float
    tokens: int


class Gate:
    """Held-out errors per (edge, estimator), and the prediction from them."""

    def __init__(self, max_kl: float) -> None:
        self.max_kl = max_kl
        self._pairs: OrderedDict[tuple[Edge, str], deque[HeldOut]] = OrderedDict()

    def record(self, edge: Edge, estimator: str, *, squared_error: float, tokens: int) -> None:
        """Keep one held-out pair. ``squared_error`` is e^2 as in the module's docstring."""
        if not math.isfinite(squared_error):
            raise ValueError(f"squared_error is {squared_error}, but must be finite.")
        pairs = self._pairs.setdefault((edge, estimator), deque(maxlen=MAX_PAIRS))
        pairs.append(HeldOut(squared_error * tokens, tokens))
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

    def kl(self, error: float, share: float = 1.0) -> float:
        """Predicted KL, nats, of corrected KV with an accumulated relative error, that is a ``share`` of its prompt.

        Squared errors of several spans add, each by the share of the prompt that it stands for.
        """
        return KL_PER_SQUARED_ERROR * error * error * share

    def admits(self, kl: float) -> bool:
        """Whether a predicted KL is inside the budget."""
        return kl <= self.max_kl

    def drop(self, edge: Edge) -> None:
        """Forget an edge under every estimator."""
        for key in [key for key in self._pairs if key[0] == edge]:
            del self._pairs[key]

    def clear(self) -> None:
        self._pairs.clear()
