"""Estimators: one file each, one table of names."""

from __future__ import annotations

from kvcmas_sgl.triton_kernels import ZERO_DELTA

from .affine import AffineEstimator
from .anchors import AnchorsEstimator
from .base import Edge, Estimator, LastingEstimator, Observation, SpanBase
from .mean import MeanEstimator
from .nearest import NearestEstimator
from .none import NoneEstimator

ESTIMATORS = ("affine", "anchors", "mean", "nearest", "none")


def make_estimator(
    name: str, *, layers: int, kv_heads: int, head_dim: int, rank: int, tau: float | None = None
) -> LastingEstimator:
    """The estimator called ``name``; ``rank`` is that of the deltas that it predicts, or keeps as anchors.

    ``tau`` is the published entropy gate's, of ``anchors``. Raises ValueError on an unknown name or a size below 1.
    """
    for field, value in (("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim), ("rank", rank)):
        if value < 1:
            raise ValueError(f"{field} is {value}: it must be at least 1")
    if name == "affine":
        return AffineEstimator(layers, kv_heads, head_dim, rank)
    if name == "anchors":
        return AnchorsEstimator(layers, kv_heads, head_dim, rank, tau=tau)
    if name == "mean":
        return MeanEstimator(layers, kv_heads, head_dim, rank)
    if name == "nearest":
        return NearestEstimator(layers, kv_heads, head_dim, rank)
    if name == "none":
        return NoneEstimator(layers, kv_heads, head_dim)
    raise ValueError(f"estimator is {name!r}: it must be one of {', '.join(ESTIMATORS)}")


__all__ = [
    "ESTIMATORS",
    "ZERO_DELTA",
    "AffineEstimator",
    "AnchorsEstimator",
    "Edge",
    "Estimator",
    "LastingEstimator",
    "MeanEstimator",
    "NearestEstimator",
    "NoneEstimator",
    "Observation",
    "SpanBase",
    "make_estimator",
]
