"""Ratios of two arms with intervals: workflows are drawn again, the same ones for both arms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

_DRAWS = 2000
_INTERVAL = (2.5, 97.5)


@dataclass(frozen=True)
class Ratio:
    """A ratio and its 95 % interval."""

    value: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        return dict(vars(self))


def paired_ratio(
    ours: Sequence[Sequence[float]],
    stock: Sequence[Sequence[float]],
    statistic: Callable[[np.ndarray], float],
    seed: int = 0,
) -> Ratio | None:
    """`statistic` of all our values over that of all stock's, with a percentile bootstrap over the groups.

    Args:
        ours, stock: values in groups (workflows); group k of both belongs to the same prompts.
        statistic: of a one-dimensional array, as `np.median`.

    Returns:
        None where no value was measured on both sides.
    """
    pairs = [
        (np.asarray(a, dtype=float), np.asarray(b, dtype=float))
        for a, b in zip(ours, stock, strict=True)
        if len(a) and len(b)
    ]
    if not pairs:
        return None
    chooser = np.random.default_rng(seed)

    def of(chosen: Sequence[int]) -> float:
        top = statistic(np.concatenate([pairs[k][0] for k in chosen]))
        return float(top / statistic(np.concatenate([pairs[k][1] for k in chosen])))

    drawn = [of(chooser.integers(0, len(pairs), len(pairs)).tolist()) for _ in range(_DRAWS)]
    low, high = np.percentile(drawn, _INTERVAL)
    return Ratio(of(range(len(pairs))), float(low), float(high))
