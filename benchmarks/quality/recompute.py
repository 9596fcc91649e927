"""A layered forward pass over chosen rows of a prompt whose other rows hold reused KV."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.quality.reference import KV, ReferenceModel


class Pass:
    """Computes ``rows`` of a prompt layer by layer, over KV that holds something for every other row.

    tokens: int64 [n]. kv: of all n tokens; copied unless ``in_place``, then overwritten at the rows of every step.
    rows: int64, ascending. ``computed`` counts token-layers.
    """

    def __init__(self, model: ReferenceModel, tokens: Tensor, kv: KV, rows: Tensor, in_place: bool = False) -> None:
        if len(kv) != len(tokens):
            raise ValueError(f"kv holds {len(kv)} tokens of {len(tokens)}: it must hold all")
        self._model, self.tokens = model, tokens
        self.kv = kv if in_place else KV(kv.k.clone(), kv.v.clone())
        self.rows = rows
        self.hidden = model.embed(tokens[rows])
        self.computed = 0

    @classmethod
    def dense(cls, model: ReferenceModel, tokens: Tensor, past: KV | None) -> Pass:
        """All tokens after ``past``."""
        done = 0 if past is None else len(past)
        shape = (model.layers, len(tokens) - done, model.kv_heads, model.head_dim)
        room = KV(model.embedding.new_empty(shape), model.embedding.new_empty(shape))
        # Joined KV is a copy of the past, so it may be written to.
        kv = room if past is None else KV.join([past, room])
        return cls(model, tokens, kv, torch.arange(done, len(tokens)), in_place=True)

    def step(self, layer: int) -> tuple[Tensor, Tensor]:
        """Compute ``layer`` for the current rows; their roped queries [n, heads, d], and the keys [m, H, d] of all."""
        if len(self.rows) == 0:
            return self.hidden, self.kv.k[layer]
        q, k, v = self._model.project(layer, self.hidden, self.rows)
        self.kv.k[layer, self.rows] = k
        self.kv.v[layer, self.rows] = v
        self.hidden = self._model.finish_layer(layer, self.hidden, q, self.kv.k[layer], self.kv.v[layer], self.rows)
        self.computed += len(self.rows)
        return q, self.kv.k[layer]

    def run(self, first: int = 0, stop: int | None = None) -> Pass:
        """Layers ``[first, stop)`` with the rows as they are."""
        for layer in range(first, self._model.layers if stop is None else stop):
            self.step(layer)
        return self

    def keep(self, rows: Tensor) -> None:
        """Go on with ``rows`` only, a subset of the current ones."""
        stays = torch.isin(self.rows, rows)
        self.rows, self.hidden = self.rows[stays], self.hidden[stays]

    def enter(self, rows: Tensor, hidden: Tensor) -> None:
        """Add ``rows``, none of them current, with their ``hidden`` [n, hidden] at the input of the next layer."""
        rows, hidden = torch.cat([self.rows, rows]), torch.cat([self.hidden, hidden])
        order = rows.argsort()
        self.rows, self.hidden = rows[order], hidden[order]
