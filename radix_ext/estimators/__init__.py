"""Estimators: one file each, one table of names."""

from __future__ import annotations

from kvcmas_sgl.triton_kernels import ZERO_DELTA

from .affine import AffineEstimator
from .base import Edge, Estimator, Observation
from .none import NoneEstimator

ESTIMATORS = ("affine", "none")


def make_estimator(name: str, *, layers: int, kv_heads: int, head_dim: int, rank: int) -> Estimator:
    """The estimator called ``name``; ``rank`` is that of the deltas that it predicts.

    Raises ValueError on an unknown name or a size below 1.
    """
    for field, value in (("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim), ("rank", rank)):
        if value < 1:
            raise ValueError(f"{field} is {value}: it must be at least 1")
    if name == "affine":
        return AffineEstimator(layers, kv_heads, head_dim, rank)
    if name == "none":
        return NoneEstimator(layers, kv_heads, head_dim)
    raise ValueError(f"estimator is {name!r}: it must be one of {', '.join(ESTIMATORS)}")


__all__ = [
    "ESTIMATORS",
    "ZERO_DELTA",
    "AffineEstimator",
    "Edge",
    "Estimator",
    "NoneEstimator",
    "Observation",
    "make_estimator",
]
