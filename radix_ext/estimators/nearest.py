"""Control: token by token the delta of the past span whose base is closest, K and V apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .anchors import mean_distance
from .base import SpanBase
from .pool import Anchor, PoolEstimator, covered_rows


class NearestEstimator(PoolEstimator):
    """The limit of the published softmax at temperature 0."""

    name = "nearest"
    needs_base = True

    def __init__(self, layers: int, kv_heads: int, head_dim: int, rank: int | None = None, pool: int = 64) -> None:
        super().__init__(layers, kv_heads, head_dim, rank, pool)

    def weigh(self, anchors: Sequence[Anchor], base: SpanBase | None) -> tuple[Tensor, Tensor]:
        assert base is not None
        covered = covered_rows(anchors, base.length)
        return (
            _nearest([a.base_k.whole(base.length) for a in anchors], base.k, covered),
            _nearest([a.base_v.whole(base.length) for a in anchors], base.v, covered),
        )


def _nearest(bases: Sequence[Tensor], base: Tensor, covered: Tensor) -> Tensor:
    best = mean_distance(bases, base).argmin(0, keepdim=True)
    return torch.zeros_like(covered, dtype=torch.float32).scatter_(0, best, 1.0) * covered
