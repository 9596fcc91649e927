"""Control: the mean of the edge's past deltas at each index. What a softmax over anchors with equal distances gives."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .base import SpanBase
from .pool import Anchor, PoolEstimator, covered_rows


class MeanEstimator(PoolEstimator):
    """Without a base it predicts for the indices of the longest past span."""

    name = "mean"

    def __init__(self, layers: int, kv_heads: int, head_dim: int, rank: int | None = None, pool: int = 64) -> None:
        super().__init__(layers, kv_heads, head_dim, rank, pool)

    def weigh(self, anchors: Sequence[Anchor], base: SpanBase | None) -> tuple[Tensor, Tensor]:
        tokens = max(anchor.length for anchor in anchors) if base is None else base.length
        covered = covered_rows(anchors, tokens).float()
        weights = covered / covered.sum(0, keepdim=True).clamp_min(1.0)
        return weights, weights
