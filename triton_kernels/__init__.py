"""The correction op and the deltas that it applies. Knows tensors only."""

from .batch import CorrectionError, CorrectionPlan, Segment
from .canonical import canonical_rows, left_factors
from .correction import BACKENDS, backend_for, plan, run
from .delta import ZERO_DELTA, AffineDelta, Delta, LowRankDelta, ZeroDelta
from .rope import RotaryTable, rotate

__all__ = [
    "BACKENDS",
    "ZERO_DELTA",
    "AffineDelta",
    "CorrectionError",
    "CorrectionPlan",
    "Delta",
    "LowRankDelta",
    "RotaryTable",
    "Segment",
    "ZeroDelta",
    "backend_for",
    "canonical_rows",
    "left_factors",
    "plan",
    "rotate",
    "run",
]
