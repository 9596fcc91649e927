"""How far the KL of one text lies from that of other texts on the same edge.

Within an edge the logarithm of the KL is normally distributed, for every effort of `affine`: of 472 audits
(SmolLM2-135M, 12 edges, 73 to 448 tokens, KL over 32 tokens of the answer), each beside the mean of those before it on
its edge, the standardised distances have mean 0.06 and standard deviation 1.04; 5 % of them are above 2.05, where 2 %
belong. The standard deviation was 0.65 there and 0.3 on documents of 2,048 tokens: it is measured, not assumed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

PRIOR, PRIOR_WEIGHT = 0.65, 8
"""Standard deviation of the logarithm before anything was measured, and how many distances it stands for."""

COMMON_WEIGHT = 4
"""How many distances of an edge's own the measured standard deviation of all edges stands for."""

MEMORY = 64
"""Distances after which one counts for about a third."""


class Spread:
    """Standard deviations of log KL, each from an edge's own pairs and the pairs of all edges under the same name."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, float]] = {}

    def add(self, name: str, earlier: Sequence[float], level: float) -> None:
        """Learn from the log KL of one pair, beside those of the ``earlier`` pairs of its edge."""
        if earlier:
            distance = (level - statistics.fmean(earlier)) ** 2 / (1.0 + 1.0 / len(earlier))
            squares, weight = self._known.get(name, (0.0, 0.0))
            fading = 1.0 - 1.0 / MEMORY
            self._known[name] = squares * fading + distance, weight * fading + 1.0

    def deviation(self, name: str, levels: Sequence[float]) -> float:
        """Standard deviation of log KL on an edge whose pairs have these ``levels``."""
        squares, weight = self._known.get(name, (0.0, 0.0))
        common = (PRIOR_WEIGHT * PRIOR**2 + squares) / (PRIOR_WEIGHT + weight)
        mean = statistics.fmean(levels)
        own = sum((level - mean) ** 2 for level in levels)
        return math.sqrt((COMMON_WEIGHT * common + own) / (COMMON_WEIGHT + len(levels) - 1))
