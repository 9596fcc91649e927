"""The published estimator: a softmax over past spans, by how close their base is to the new span's, token by token.

Re-implemented from descriptions of KVCMAS (arXiv 2609.34060) and KVComm (arXiv 2510.12872). With b(t) the base of the
new span at index t, b_i(t) that of anchor i and D_i its delta, K and V apart,

    d_i(t) = mean over layers and channels of |b(t) - b_i(t)|
    w_i(t) = softmax over the anchors that have index t of -d_i(t) / temperature;  the k largest, renormalised
    delta(t) = sum_i w_i(t) D_i(t);  nothing is added where no anchor has the index.

Gate, over the leading m indices that all have: e_i = |V - V_i| (L2 over layers, tokens and channels), p = softmax(-e);
the span is to be computed if the entropy of p, in bits, is above tau log2(A). Fewer than two anchors: computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .base import SpanBase
from .pool import Anchor, PoolEstimator, covered_rows

MIN_ANCHORS = 2


class AnchorsEstimator(PoolEstimator):
    """``top_k``: anchors a token is corrected from, all if None. ``tau``: the entropy gate's, which None leaves out."""

    name = "anchors"
    needs_base = True

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        rank: int | None = 32,
        pool: int = 10,
        top_k: int | None = 10,
        temperature: float = 1.0,
        tau: float | None = None,
    ) -> None:
        super().__init__(layers, kv_heads, head_dim, rank, pool)
        self._top_k, self._temperature, self.tau = top_k, temperature, tau

    def weigh(self, anchors: Sequence[Anchor], base: SpanBase | None) -> tuple[Tensor, Tensor] | None:
        assert base is not None
        if len(anchors) < MIN_ANCHORS:
            return None
        if self.tau is not None and gate_entropy(anchors, base) > self.tau * math.log2(len(anchors)):
            return None
        covered = covered_rows(anchors, base.length)
        return (
            self._softmax(mean_distance([a.base_k.whole(base.length) for a in anchors], base.k), covered),
            self._softmax(mean_distance([a.base_v.whole(base.length) for a in anchors], base.v), covered),
        )

    def _softmax(self, distance: Tensor, covered: Tensor) -> Tensor:
        weights = torch.where(covered, -distance / self._temperature, -math.inf).softmax(0).nan_to_num(0.0)
        if self._top_k is None or self._top_k >= weights.shape[0]:
            return weights
        best = torch.zeros_like(weights).scatter_(0, weights.topk(self._top_k, dim=0).indices, 1.0)
        kept = weights * best
        return kept / kept.sum(0, keepdim=True).clamp_min(torch.finfo(kept.dtype).tiny)


def mean_distance(bases: Sequence[Tensor], base: Tensor) -> Tensor:
    """fp32 [A, n]: mean |difference| of ``base`` [L, n, D] to each of ``bases`` [L, n_i, D], infinite past n_i."""
    out = base.new_full((len(bases), base.shape[1]), math.inf)
    for i, other in enumerate(bases):
        out[i, : other.shape[1]] = (base[:, : other.shape[1]] - other).abs().mean((0, 2))
    return out


def gate_entropy(anchors: Sequence[Anchor], base: SpanBase) -> float:
    """Bits, from 0 to log2(A): how undecided a softmax over the anchors' distances in V is."""
    rows = min(base.length, *(anchor.length for anchor in anchors))
    distance = torch.stack([(base.v[:, :rows] - anchor.base_v.whole(rows)).norm() for anchor in anchors])
    p = (-distance.double()).softmax(0)
    return float(-(p * p.clamp_min(1e-300).log2()).sum())
