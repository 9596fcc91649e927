"""GraphFlow (arXiv 2605.22566), re-implemented from its abstract: a fixed residual per edge, sparse, without matching.

The base is a context-free encoding; the residual is the mean of the edge's deltas at each index, of which the smallest
entries are dropped (the paper finds 75 % of K's and 70 % of V's near zero).
"""

from __future__ import annotations

import torch
from kvcmas_sgl.radix_ext.estimators import Edge, MeanEstimator, SpanBase
from kvcmas_sgl.triton_kernels import Delta, LowRankDelta
from torch import Tensor

from benchmarks.quality.chains import Held, Reading
from benchmarks.quality.methods.deltas import DeltaMethod, edge_of
from benchmarks.quality.prompts import Span

_DROPPED_K, _DROPPED_V = 0.75, 0.70


class GraphFlow(DeltaMethod):
    """Edges that were never learned are computed."""

    def __init__(self, name: str, estimator: MeanEstimator) -> None:
        super().__init__(name, estimator, context_free=True, note="fixed mean delta per edge, thresholded")
        self._residuals: dict[Edge, LowRankDelta | None] = {}

    def delta(self, reading: Reading, span: Span, held: Held, base: SpanBase) -> Delta | None:
        edge = edge_of(held, reading, span)
        if edge not in self._residuals:
            self._residuals[edge] = self._residual(edge)
        return self._residuals[edge]

    def _residual(self, edge: Edge) -> LowRankDelta | None:
        assert self.estimator is not None
        mean = self.estimator.predict(edge)
        if mean is None:
            return None
        t = torch.arange(mean.extent[1] if mean.extent else 0)
        unused = torch.zeros(len(t), mean.width)
        rows = [mean.rows(layer, t, unused, unused) for layer in range(mean.layers)]
        k = _sparse(torch.stack([row[0] for row in rows]), _DROPPED_K)
        v = _sparse(torch.stack([row[1] for row in rows]), _DROPPED_V)
        eye = torch.eye(mean.width).expand(mean.layers, -1, -1)
        return LowRankDelta(k, eye, v, eye)

    @property
    def state_bytes(self) -> int:
        """Values and int32 indices of what is kept; the spans that were learned from can go."""
        kept = [d.left_k.count_nonzero() + d.left_v.count_nonzero() for d in self._residuals.values() if d is not None]
        return 8 * int(sum(kept))


def _sparse(x: Tensor, dropped: float) -> Tensor:
    """``x`` [L, n, D] without the ``dropped`` share of its entries, the smallest."""
    limit = x.abs().flatten().kthvalue(max(1, int(dropped * x.numel()))).values
    return torch.where(x.abs() > limit, x, 0.0)
