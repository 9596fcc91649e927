"""The gate: reuse a span only when the error of its correction can be vouched for.

Every dense run of an agent on content whose source is resident gives a held-out pair, made before the
estimator sees the run: the corrected KV against the true one, as a relative error

    e^2 = mean over layers of (|K - K'|^2 / |K|^2 + |V - V'|^2 / |V|^2) / 2.

The energy of the error sits in the span's first tokens and hardly grows with its length (method, section 4), so
``q = e^2 * tokens`` is kept per edge and estimator, and a span of n tokens is predicted at ``e = sqrt(q / n)``, with
the largest of the newest pairs (older ones were made by an estimator that had seen less) and a margin for few.

What the user is promised is the KL of the next-token distribution. Some pairs are audited (`audit`); the KL of the
others follows from the audited ones' KL per squared error. What is expected of a span is the KL that one in fifty
exceeds: texts of an edge differ as `spread` says. Length tells little (log KL against log n: slopes of -0.05 to 0.5
inside the lengths seen, -1 to 0.2 up to 3,600 tokens), so only spans shorter than any seen, and those far longer, are
expected to have more. Errors along a chain add; the KL of a prompt's spans adds.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvcmas_sgl.radix_ext.estimators import Edge
from kvcmas_sgl.radix_ext.spread import Spread
from kvcmas_sgl.radix_ext.state_file import State, StateError, count, number

KL_PER_SQUARED_ERROR = 3.0
"""KL (nats) per squared relative KV error of an edge that was never audited: the most seen. Measured on SmolLM2-135M:
documents right after the agent prefix 0.2 to 1.2, answers of other agents right before the question 0.02 to 3.0."""

LEAST_FACTOR = 0.05
"""What an audit must not go below: one that shows nothing may have looked at the wrong tokens."""

LEAST_KL, MOST_KL = 1e-6, 1e3
"""What no KL is taken to be below or above, nats."""

RISK = 0.02
"""Share of spans whose KL is above what is expected of them. Those that are reused are mostly well inside the budget.
Of the 118 readings behind the audits of `spread`, in turn, 55, 85 and 117 are let through under budgets of 0.01, 0.02
and 0.05, and 3, 3 and 4 are above them. Twice the largest KL seen instead lets 27, 63 and 101 through (2, 2, 1 above)
and computes 1.3 to 2.3 times as many tokens; with a RISK of 0.01 it is 45, 78 and 114 (2, 3, 3)."""

_DEVIATIONS = statistics.NormalDist().inv_cdf(1.0 - RISK)

FARTHEST = 2.0
"""How many times the longest span seen one may be before more KL is expected of it: 7,600 tokens on edges that knew 450
had 3 to 7 times as much."""

MIN_PAIRS = 2
"""Held-out pairs before an edge is trusted at all."""

MAX_PAIRS = 8
MAX_EDGES = 1 << 14


@dataclass(frozen=True)
class HeldOut:
    """One held-out pair: normalised error ``q``, length of the span in tokens, and the audited KL in nats if any."""

    q: float
    tokens: int
    kl: float | None = None

    @property
    def squared_error(self) -> float:
        return self.q / self.tokens

    @property
    def noticed(self) -> float:
        """KL, nats, of an audited pair: what the next tokens noticed of its error."""
        return max(self.kl or 0.0, LEAST_FACTOR * self.squared_error)


@dataclass(frozen=True)
class Expected:
    """Upper estimates: relative error of the corrected KV, and KL in nats."""

    error: float
    kl: float


@dataclass(frozen=True)
class Evidence:
    """What is known of an edge, for who reads it: what is expected of a span as long as the newest one was, beside
    what was measured there. ``audited_kl`` (nats) is that of the newest audited pair."""

    edge: Edge
    estimator: str
    pairs: int
    audits: int
    tokens: int
    expected: Expected | None
    measured_error: float
    audited_kl: float | None


class Gate:
    """Held-out errors per (edge, estimator), and the prediction from them."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[Edge, str], deque[HeldOut]] = OrderedDict()
        self._spread = Spread()

    def record(self, edge: Edge, estimator: str, *, squared_error: float, tokens: int, kl: float | None = None) -> None:
        """Keep one held-out pair: e^2 as in the module's docstring and, where it was audited, the KL in nats."""
        if not math.isfinite(squared_error) or not math.isfinite(kl or 0.0):
            raise ValueError(f"squared_error is {squared_error} and kl is {kl}, but both must be finite.")
        self._keep(edge, estimator, HeldOut(squared_error * tokens, tokens, kl))
        while len(self._pairs) > MAX_EDGES:
            self._pairs.popitem(last=False)

    def _keep(self, edge: Edge, estimator: str, pair: HeldOut) -> None:
        pairs = self._pairs.setdefault((edge, estimator), deque(maxlen=MAX_PAIRS))
        if pair.kl is not None:
            self._spread.add(estimator, [_log(one.noticed) for one in pairs if one.kl is not None], _log(pair.noticed))
        pairs.append(pair)
        self._pairs.move_to_end((edge, estimator))

    def edges(self) -> set[Edge]:
        """Edges with pairs, under any estimator."""
        return {edge for edge, _ in self._pairs}

    def pairs(self, edge: Edge, estimator: str) -> int:
        """Number of held-out pairs kept for an edge."""
        return len(self._pairs.get((edge, estimator), ()))

    def expect(self, edge: Edge, estimator: str, tokens: int, carried: float = 0.0) -> Expected | None:
        """Upper estimates for a span of ``tokens``, from a source with accumulated error ``carried``; None when too
        little is known."""
        pairs = self._pairs.get((edge, estimator))
        if pairs is None or len(pairs) < MIN_PAIRS:
            return None
        # Beyond the longest that was seen, half of the way (in logarithms) that the rule would go is believed.
        longest = max(pair.tokens for pair in pairs)
        share = (1.0 + 1.0 / len(pairs)) / min(tokens, math.sqrt(tokens * longest))
        own = math.sqrt(max(pair.q for pair in pairs) * share)
        audited = [pair for pair in pairs if pair.kl is not None]
        seen = sum(pair.squared_error for pair in audited)
        factor = sum(pair.noticed for pair in audited) / seen if seen else KL_PER_SQUARED_ERROR
        levels = [_log(pair.noticed if pair.kl is not None else factor * pair.squared_error) for pair in pairs]
        # What follows from the audits is no evidence beside them.
        measured = [_log(pair.noticed) for pair in audited] or levels
        wide = self._spread.deviation(estimator, measured) * math.sqrt(1.0 + 1.0 / len(measured))
        kl = _beyond(tokens, pairs) * math.exp(statistics.fmean(levels) + _DEVIATIONS * wide)
        total = carried + own
        return Expected(total, kl * (total / own) ** 2 if own else factor * total * total)

    def audits(self, edge: Edge, estimator: str) -> int:
        """Number of an edge's pairs whose KL was audited."""
        return len(self._audited(edge, estimator))

    def kl(self, edge: Edge, estimator: str, error: float) -> float:
        """Predicted KL, nats, of KV whose relative error is known, on an edge.

        Where a span stands and what is asked about it decide how much of its error the next tokens notice: by more than
        a hundred times between edges. The worst audit of the edge says; without any, the most that was seen is assumed.
        """
        audited = [pair for pair in self._audited(edge, estimator) if pair.q]
        factor = max((pair.noticed / pair.squared_error for pair in audited), default=KL_PER_SQUARED_ERROR)
        return factor * error * error

    def _audited(self, edge: Edge, estimator: str) -> list[HeldOut]:
        return [pair for pair in self._pairs.get((edge, estimator), ()) if pair.kl is not None]

    def evidence(self, limit: int) -> list[Evidence]:
        """Of the ``limit`` edges that learned last, newest first."""
        found = []
        for (edge, estimator), pairs in itertools.islice(reversed(self._pairs.items()), limit):
            newest, audited = pairs[-1], self._audited(edge, estimator)
            found.append(
                Evidence(
                    edge,
                    estimator,
                    len(pairs),
                    len(audited),
                    newest.tokens,
                    self.expect(edge, estimator, newest.tokens),
                    math.sqrt(newest.q / newest.tokens),
                    audited[-1].kl if audited else None,
                )
            )
        return found

    def __len__(self) -> int:
        return len(self._pairs)

    def drop(self, edge: Edge) -> None:
        """Forget an edge under every estimator."""
        for key in [key for key in self._pairs if key[0] == edge]:
            del self._pairs[key]

    def clear(self) -> None:
        self._pairs.clear()
        self._spread = Spread()

    def state(self) -> State:
        """All pairs, the least recently recorded edges first."""
        rows = [
            [edge.as_list(), estimator, [[pair.q, pair.tokens, pair.kl] for pair in pairs]]
            for (edge, estimator), pairs in self._pairs.items()
        ]
        return State({}, rows)

    def load(self, state: State) -> None:
        """Hold the pairs of ``state`` in place of its own. Raises `StateError`, and then nothing changes."""
        loaded = Gate()
        for names, estimator, rows in state.data:
            if not isinstance(estimator, str):
                raise StateError(f"{estimator!r} stands where an estimator's name must be")
            for q, tokens, kl in rows:
                pair = HeldOut(number(q, 0.0), count(tokens, 1), None if kl is None else number(kl))
                loaded._keep(Edge.from_list(names), estimator, pair)
        self._pairs, self._spread = loaded._pairs, loaded._spread


def _beyond(tokens: int, pairs: Iterable[HeldOut]) -> float:
    """How much more KL is expected of a length outside of those seen."""
    lengths = [pair.tokens for pair in pairs]
    return max(1.0, min(lengths) / tokens, tokens / (FARTHEST * max(lengths)))


def _log(kl: float) -> float:
    return math.log(min(max(kl, LEAST_KL), MOST_KL))
