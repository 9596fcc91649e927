"""Seam: the ranks of a tensor-parallel group, over the CPU group on which SGLang keeps its schedulers in step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray

from kvcmas_sgl.radix_ext.ranks import ONE_RANK, OutOfStepError, Ranks

_MEAN, _AGREED, _STEP = range(3)
_NONE = -1


def ranks_of(group: Any, size: int) -> Ranks:
    """The ranks of ``group``, a ``torch.distributed`` group of ``size`` processes that works on CPU tensors."""
    return ONE_RANK if size == 1 else TensorParallelRanks(group, size)


class TensorParallelRanks:
    """See `Ranks`. Sums are formed in one place and sent to all: every rank gets the same bits."""

    def __init__(self, group: Any, size: int) -> None:
        self._group = group
        self._size = size

    def mean(self, values: ArrayLike) -> NDArray[np.float64]:
        mine = torch.from_numpy(np.asarray(values, np.float64).reshape(-1).copy())
        if not self._meet(_MEAN, len(mine)):
            raise OutOfStepError("another rank has failed in this lesson, which all of them drop")
        return self._gather(mine).mean(0).numpy()

    def agreed(self, values: Sequence[int | None]) -> list[bool]:
        if not values:
            return []
        mine = torch.tensor([_NONE if value is None else value for value in values])
        if not self._meet(_AGREED, len(mine)):
            raise OutOfStepError("another rank is not at this place")
        found = self._gather(mine)
        same = (found == found[0]).all(0) & (found[0] != _NONE)
        return [bool(one) for one in same]

    def step_done(self, failed: bool) -> bool:
        return not self._meet(_STEP, 0, failed) or self._failed

    def _meet(self, kind: int, count: int, failed: bool = False) -> bool:
        """Whether all ranks are at the same kind of exchange, of as many values."""
        headers = self._gather(torch.tensor([kind, count, int(failed)]))
        self._failed = bool(headers[:, 2].any())
        return bool((headers[:, :2] == headers[0, :2]).all())

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        found = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(found, mine, group=self._group)
        return torch.stack(found)
