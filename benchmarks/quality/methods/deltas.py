"""Methods that add a delta to what somebody holds: the estimators of the cache, the published ones, and controls."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from kvcmas_sgl.radix_ext.estimators import Edge, Estimator, Observation, SpanBase
from kvcmas_sgl.radix_ext.heavy import EFFORTS, Effort, heavy_offsets, score_steps
from kvcmas_sgl.radix_ext.kv_view import KVView
from kvcmas_sgl.radix_ext.lowrank import compress, energy_rank
from kvcmas_sgl.triton_kernels import Delta, LowRankDelta
from torch import Tensor

from benchmarks.quality.chains import Chain, Held, Reading, holder
from benchmarks.quality.methods.base import Method, Used, body_pass, glue_mask, laid_out, reusable, rows_of
from benchmarks.quality.prompts import Span
from benchmarks.quality.reference import KV, ReferenceModel


def edge_of(held: Held, reading: Reading, span: Span) -> Edge:
    return Edge("quality", held.agent, holder(reading.agent, span))


class DeltaMethod(Method):
    """Base plus the delta of ``estimator``, then one pass over glue and whatever else is computed.

    head, tail: first and last tokens of every span that are computed; ``effort``: its heavy hitters too, as the cache
    finds them. A span is computed whole where it is shorter than ``min_span``, and where the estimator has no answer
    and ``rotate_unknown`` is off. Methods may share an estimator, of which one ``learns``;
    ``solve_once``: its solution depends on running sums only, so it is enough to solve after the last span.
    """

    def __init__(
        self,
        name: str,
        estimator: Estimator | None,
        *,
        context_free: bool = False,
        head: int = 0,
        tail: int = 0,
        effort: Effort = EFFORTS[0],
        min_span: int = 0,
        rotate_unknown: bool = False,
        learns: bool = True,
        solve_once: bool = False,
        family: str | None = None,
        parameter: float | None = None,
        note: str = "",
    ) -> None:
        super().__init__(name, family, parameter)
        self.estimator, self.context_free, self.note = estimator, context_free, note
        self._head, self._tail, self._rotate_unknown = head, tail, rotate_unknown
        self._effort, self._min_span = effort, min_span
        self._learns, self._solve_once = learns and estimator is not None, solve_once

    def learn(self, chain: Chain) -> None:
        if self.estimator is None or not self._learns:
            return
        for reading, span, held in chain.pairs(self.context_free):
            base_k, base_v = self.model.canonical(held.kv, held.start)
            true_k, true_v = self.model.canonical(reading.dense.cut(span.start, span.stop), span.start)
            edge = edge_of(held, reading, span)
            t = torch.arange(len(span))
            self.estimator.observe(edge, Observation(0, t, base_k, base_v, true_k - base_k, true_v - base_v))
            if not self._solve_once:
                self.estimator.finish(edge)

    def finish_learning(self) -> None:
        if self.estimator is not None and self._learns and self._solve_once:
            for edge in self.estimator.edges():
                self.estimator.finish(edge)

    def delta(self, reading: Reading, span: Span, held: Held, base: SpanBase) -> Delta | None:
        """The span's delta; None: there is none."""
        assert self.estimator is not None
        return self.estimator.predict(edge_of(held, reading, span), base)

    def read(self, chain: Chain, reading: Reading, sources: Mapping[str, Held]) -> Used:
        parts: dict[Span, KV] = {}
        fresh = glue_mask(reading.prompt)
        for span in reading.prompt.spans:
            held = sources[span.content]
            k, v = self.model.canonical(held.kv, held.start)
            delta = self.delta(reading, span, held, SpanBase(k, v))
            if delta is not None:
                k, v = corrected(delta, k, v)
            elif not self._rotate_unknown:
                fresh[span.start : span.stop] = True
            if len(span) < self._min_span:
                fresh[span.start : span.stop] = True
            if self._effort.share:
                sink = reading.dense.k[:, 0]
                fresh[span.start + heavy_of(self.model, held, sink, self._head, self._effort)] = True
            parts[span] = self.model.place(k, v, span.start)
            fresh[span.start : min(span.stop, span.start + self._head)] = True
            fresh[max(span.start, span.stop - self._tail) : span.stop] = True
        kv = laid_out(reading, self.model, parts)
        return self.filled(chain, reading, kv, fresh)

    def filled(self, chain: Chain, reading: Reading, kv: KV, fresh: Tensor) -> Used:
        """``kv`` of the body with the ``fresh`` tokens computed over it."""
        work = body_pass(self.model, reading, kv, rows_of(fresh)).run()
        total = reusable(self.model, reading.prompt)
        return Used(work.kv, work.computed, total - work.computed, self.encoded(chain, reading.prompt))

    @property
    def state_bytes(self) -> int:
        return 0 if self.estimator is None else self.estimator.state_bytes


def heavy_of(model: ReferenceModel, held: Held, sink: Tensor, head: int, effort: Effort) -> Tensor:
    """Offsets, int64, of a held content's heavy hitters behind its head; ``sink`` [L, H, d]: keys at position 0.

    Every agent's sequence opens with the same token, so its key is everybody's.
    """
    n = len(held)
    keys = [torch.cat([held.kv.k[layer], sink[layer][None]]) for layer in range(model.layers)]
    scores = np.zeros(n, np.float32)
    for _ in score_steps(KVView(keys, keys, model.table), torch.arange(n), held.start, n, scores):
        pass
    return torch.from_numpy(heavy_offsets(scores, head, effort))


def corrected(delta: Delta, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Canonical ``k``, ``v`` [L, n, D] plus ``delta``; layer 0 depends on the token alone and stays."""
    k, v = k.clone(), v.clone()
    first, stop = delta.extent or (0, k.shape[1])
    t = torch.arange(first, min(stop, k.shape[1]))
    for layer in range(1, k.shape[0]):
        dk, dv = delta.rows(layer, t, k[layer, t], v[layer, t])
        k[layer, t] += dk
        v[layer, t] += dv
    return k, v


class OwnDelta(DeltaMethod):
    """The true delta of this very span and reader, measured at its dense run, at ``rank`` or as much of it as keeps
    ``energy``; None: whole.

    A second visit: the reader has seen the content before, and its own slots are gone. It was measured in the same
    conversation, so for spans after the first this is an upper bound.
    """

    def __init__(
        self,
        name: str,
        rank: int | None,
        *,
        energy: float = 1.0,
        context_free: bool = False,
        family: str | None = None,
        note: str = "second visit: the reader has seen this content in this conversation",
    ) -> None:
        super().__init__(name, None, context_free=context_free, family=family, parameter=rank, note=note)
        self._rank, self._energy = rank, energy
        self._bytes: list[int] = []

    def delta(self, reading: Reading, span: Span, held: Held, base: SpanBase) -> Delta | None:
        true = self.model.canonical(reading.dense.cut(span.start, span.stop), span.start)
        rank = self._rank or base.k.shape[2]
        whole = true[0] - base.k, true[1] - base.v
        parts = [compress(part, rank) for part in whole]
        # Layer 0 has no delta.
        kept = torch.stack(
            [
                left[1:].square().sum(1) / part[1:].square().sum((1, 2))[:, None]
                for (left, _), part in zip(parts, whole, strict=True)
            ]
        )
        rank = energy_rank(kept, self._energy)
        k, v = ((left[..., :rank], right[:, :rank]) for left, right in parts)
        out = LowRankDelta(*k, *v)
        self._bytes.append(out.nbytes)
        return out

    @property
    def state_bytes(self) -> int:
        """Of one span, on average: what a server keeps grows with the spans that it has seen."""
        return sum(self._bytes) // max(1, len(self._bytes))
