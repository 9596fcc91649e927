"""Spans of real text: as long as asked for, fresh or drawn again from a pool of documents."""

from __future__ import annotations

import copy
import random
import re
from bisect import bisect
from collections.abc import Callable, Sequence
from itertools import accumulate

Span = tuple[int, ...]


class TextSupply:
    """Endless fresh text: the sentences of some documents, drawn in an order that no other draw repeats.

    Args:
        texts: the documents.
        encode: text to token ids.
        seed: the same seed gives the same spans in the same order.
    """

    def __init__(self, texts: Sequence[str], encode: Callable[[str], Sequence[int]], seed: int) -> None:
        sentences = [sentence for text in texts for sentence in re.split(r"(?<=[.?!;])\s+", text) if sentence.strip()]
        self._sentences = [tuple(encode(" " + sentence)) for sentence in sentences]
        self._random = random.Random(seed)

    def reseeded(self, seed: int | str) -> TextSupply:
        """The same sentences in another order; nothing is tokenized again."""
        other = copy.copy(self)
        other._random = random.Random(seed)
        return other

    def span(self, tokens: int) -> Span:
        """A span of exactly `tokens` token ids."""
        ids: list[int] = []
        while len(ids) < tokens:
            ids.extend(self._random.choice(self._sentences))
        return tuple(ids[:tokens])

    def content(self, spans: int, tokens: int) -> tuple[Span, ...]:
        """`spans` spans of `tokens` token ids each."""
        return tuple(self.span(tokens) for _ in range(spans))


class Library:
    """Documents to read: fresh ones, and a pool of which document k is drawn in proportion to (k + 1) ** -zipf.

    Args:
        supply: where the text comes from.
        tokens: least and largest length of a document, tokens; lengths are uniform between them.
        pool: documents that are read again and again; without any, all are fresh.
        zipf: exponent; 0 draws the pool's documents alike.
        unseen: share of drawn documents that are fresh, from 0 to 1.
        seed: seed of lengths and draws.
    """

    def __init__(
        self,
        supply: TextSupply,
        tokens: tuple[int, int],
        pool: Sequence[Span],
        zipf: float,
        unseen: float,
        seed: int | str,
    ) -> None:
        self._supply = supply
        self._tokens = tokens
        self._random = random.Random(f"library-{seed}")
        self._unseen = unseen if pool else 1.0
        self._pool = tuple(pool)
        self._weights = list(accumulate((rank + 1) ** -zipf for rank in range(len(pool))))

    def draw(self) -> Span:
        """The next document."""
        if self._random.random() < self._unseen:
            return self._fresh()
        return self._pool[bisect(self._weights, self._random.random() * self._weights[-1])]

    def _fresh(self) -> Span:
        return self._supply.span(self._random.randint(*self._tokens))
