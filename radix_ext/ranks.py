"""Tensor-parallel ranks: each holds some heads of the KV, and all must take the same decisions.

SGLang runs one scheduler a rank and keeps them in step: each round begins with the same requests, and ends in the same
batch. So do trees, queues of lessons and idle steps here. What differs is what comes out of a rank's own heads: errors
of KV, keys, and whether they are finite. These numbers go through `Ranks` before anything is decided by them.

An exchange is a header and then the numbers. A rank that fails in the middle of a lesson meets the others at the
lesson's next exchange with another header, and all of them drop it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray


class OutOfStepError(RuntimeError):
    """Another rank has left this lesson; it is dropped on all of them."""


class Ranks(Protocol):
    """All ranks call the same methods in the same order."""

    def mean(self, values: ArrayLike) -> NDArray[np.float64]:
        """The mean over ranks of each value, float64 [n]. Raises `OutOfStepError`."""
        ...

    def agreed(self, values: Sequence[int | None]) -> list[bool]:
        """For each value (0 to 2^62), whether all ranks have the same and none has None."""
        ...

    def step_done(self, failed: bool) -> bool:
        """At the end of a lesson's step: whether it failed on any rank. Not to be called after `OutOfStepError`."""
        ...


class OneRank:
    """All heads are here."""

    def mean(self, values: ArrayLike) -> NDArray[np.float64]:
        return np.asarray(values, np.float64)

    def agreed(self, values: Sequence[int | None]) -> list[bool]:
        return [value is not None for value in values]

    def step_done(self, failed: bool) -> bool:
        return failed


ONE_RANK = OneRank()
