"""Finding known tokens inside other tokens: fixed blocks of what is known, a rolling hash over what is asked.

As in rsync: the known side is cut into aligned blocks, the asking side is hashed at every offset, so a stretch is found
wherever it starts. All windows are hashed at once with prefix sums modulo 2^64: with odd P,

    H_i = sum_{j < i} f(token_j) P^j,     window_i = (H_{i + B} - H_i) P^{-i}.

A hash only proposes; whoever asks compares the tokens themselves.
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Owner = TypeVar("Owner", bound=Hashable)
Tokens = NDArray[np.int64]

MAX_OWNERS = 8
"""Owners kept per block, the newest: text that stands everywhere must not make a search long."""

# Random per process, so that nobody can prepare texts whose blocks collide.
_P = secrets.randbits(64) | 1
_P_INVERSE = pow(_P, -1, 1 << 64)
_MIX = np.uint64(secrets.randbits(64) | 1)


class BlockTable(Generic[Owner]):
    """Aligned blocks of ``block`` tokens, by hash; every owner's tokens are added and removed as a whole."""

    def __init__(self, block: int) -> None:
        if block < 1:
            raise ValueError(f"block is {block}, but must be at least 1 token.")
        self.block = block
        self._blocks: dict[int, list[tuple[Owner, int]]] = {}

    def __len__(self) -> int:
        """Number of different blocks."""
        return len(self._blocks)

    def add(self, owner: Owner, tokens: Tokens) -> None:
        """Make every whole block of an owner's ``tokens`` (int64 [n]) known."""
        for at, value in self._aligned(tokens):
            places = self._blocks.setdefault(value, [])
            places.append((owner, at))
            del places[:-MAX_OWNERS]

    def remove(self, owner: Owner, tokens: Tokens) -> None:
        """Forget an owner; ``tokens`` as when it was added."""
        for _, value in self._aligned(tokens):
            places = [place for place in self._blocks.get(value, ()) if place[0] != owner]
            if places:
                self._blocks[value] = places
            else:
                self._blocks.pop(value, None)

    def hits(self, tokens: Tokens) -> Iterator[tuple[int, list[tuple[Owner, int]]]]:
        """Offsets (ascending) at which a known block may start, and its (owner, offset there), oldest first."""
        if not self._blocks:
            return
        known = self._blocks
        for at, value in enumerate(window_hashes(tokens, self.block).tolist()):
            if value in known:
                yield at, known[value]

    def _aligned(self, tokens: Tokens) -> Iterator[tuple[int, int]]:
        values = window_hashes(tokens, self.block)[:: self.block]
        return zip(range(0, len(values) * self.block, self.block), values.tolist(), strict=True)


def window_hashes(tokens: Tokens, block: int) -> NDArray[np.uint64]:
    """Hash of every window of ``block`` tokens, uint64 [n - block + 1] (empty when n < block)."""
    n = len(tokens)
    if n < block:
        return np.empty(0, np.uint64)
    with np.errstate(over="ignore"):
        powers = _powers(_P, n)
        mixed = (tokens.astype(np.uint64) + np.uint64(1)) * _MIX
        mixed ^= mixed >> np.uint64(29)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed * powers, dtype=np.uint64)])
        windows = (sums[block:] - sums[:-block]) * _powers(_P_INVERSE, n - block + 1)
    return windows ^ (windows >> np.uint64(32))


_tables: dict[int, NDArray[np.uint64]] = {}


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    """base^0 ... base^(count - 1) modulo 2^64; grown once and kept."""
    table = _tables.get(base)
    if table is None or len(table) < count:
        steps = np.full(max(count, 4096), base, np.uint64)
        steps[0] = 1
        table = _tables[base] = np.cumprod(steps, dtype=np.uint64)
    return table[:count]
