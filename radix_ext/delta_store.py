"""Own deltas: measured low-rank deltas, kept by handle under a byte budget.

A factorisation ``[S x D] ~ U[S x r] W[r x D]`` covers a whole span. The tree's nodes hold handles to the rows
of ``U`` that belong to their tokens; the handles of one factorisation share its ``W``. Rows are split when a
node splits and dropped when it dies; the least recently used rows go when the budget is short.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from kvcmas_sgl.triton_kernels import LowRankDelta
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Factors:
    """What the rows of one factorisation share: right factors ``[L, r, D]`` and the error that was measured.

    ``error`` is the relative error of the corrected KV that it gives, as the gate defines it.
    """

    right_k: Tensor
    right_v: Tensor
    error: float

    @property
    def nbytes(self) -> int:
        return self.right_k.nbytes + self.right_v.nbytes


@dataclass(frozen=True, eq=False)
class Rows:
    """Left factors ``[L, n, r]`` of n consecutive tokens of a span, K and V."""

    factors: Factors
    left_k: Tensor
    left_v: Tensor

    @property
    def nbytes(self) -> int:
        return self.left_k.nbytes + self.left_v.nbytes

    def __len__(self) -> int:
        return self.left_k.shape[1]

    def cut(self, start: int, stop: int) -> Rows:
        """A copy of some rows: a view would keep the whole factor's memory alive."""
        return Rows(self.factors, self.left_k[:, start:stop].clone(), self.left_v[:, start:stop].clone())


class DeltaStore:
    """Rows by handle, with exact byte accounts. Handles are never reused."""

    def __init__(self) -> None:
        self._rows: OrderedDict[int, Rows] = OrderedDict()
        self._holders: dict[Factors, int] = {}
        self._next = 0
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and of every right factor that some row still needs."""
        return self._bytes

    def put(self, rows: Rows) -> int:
        """Keep rows and return their handle."""
        handle = self._next
        self._next += 1
        self._rows[handle] = rows
        held = self._holders.get(rows.factors, 0)
        self._bytes += rows.nbytes + (0 if held else rows.factors.nbytes)
        self._holders[rows.factors] = held + 1
        return handle

    def get(self, handle: int) -> Rows | None:
        """The rows, now the most recently used; None when the budget has dropped them."""
        rows = self._rows.get(handle)
        if rows is not None:
            self._rows.move_to_end(handle)
        return rows

    def drop(self, handle: int) -> None:
        """Forget rows; unknown handles are ignored."""
        rows = self._rows.pop(handle, None)
        if rows is None:
            return
        self._bytes -= rows.nbytes
        held = self._holders[rows.factors] - 1
        if held:
            self._holders[rows.factors] = held
        else:
            del self._holders[rows.factors]
            self._bytes -= rows.factors.nbytes

    def split(self, handle: int, at: int) -> tuple[int, int] | None:
        """Cut rows in two; returns the handles of rows ``[0, at)`` and ``[at, n)``, or None if they are gone."""
        rows = self._rows.get(handle)
        if rows is None:
            return None
        first, second = self.put(rows.cut(0, at)), self.put(rows.cut(at, len(rows)))
        self.drop(handle)
        return first, second

    def shrink(self, nbytes: int) -> None:
        """Drop least recently used rows until at most ``nbytes`` are held."""
        while self._rows and self._bytes > nbytes:
            self.drop(next(iter(self._rows)))

    def clear(self) -> None:
        self._rows.clear()
        self._holders.clear()
        self._bytes = 0


def join(parts: Sequence[Rows]) -> LowRankDelta | None:
    """The delta of consecutive rows; None unless all come from one factorisation."""
    if not parts or any(part.factors is not parts[0].factors for part in parts):
        return None
    factors = parts[0].factors
    return LowRankDelta(
        left_k=torch.cat([part.left_k for part in parts], dim=1),
        right_k=factors.right_k,
        left_v=torch.cat([part.left_v for part in parts], dim=1),
        right_v=factors.right_v,
    )
