"""KVComm (arXiv 2510.12872) and KVCMAS (arXiv 2609.34060), re-implemented from descriptions, their defaults as
published.

Both never compute an agent's text between spans: they take it from the agent's template prompt, in which a marker
stands for every span, and rotate it. KVComm corrects it: anchors also keep the delta of the glue after the span,
weighted channel by channel with a softmax over the anchors of minus the L2 distance of the span's base. KVCMAS leaves
it as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from kvcmas_sgl.radix_ext.estimators import AnchorsEstimator, Edge, SpanBase
from kvcmas_sgl.radix_ext.estimators.anchors import MIN_ANCHORS, gate_entropy
from kvcmas_sgl.triton_kernels import Delta
from torch import Tensor

from benchmarks.quality.chains import Chain, Held, Reading
from benchmarks.quality.methods.base import Used
from benchmarks.quality.methods.deltas import DeltaMethod, edge_of
from benchmarks.quality.prompts import Prompt, Span
from benchmarks.quality.reference import KV


@dataclass(frozen=True)
class _GlueDelta:
    """Of one anchor: the span's base [L, n, D], the glue's delta [L, g, D], K (canonical) and V."""

    base: SpanBase
    delta_k: Tensor
    delta_v: Tensor


class Published(DeltaMethod):
    """``estimator``: anchors with the method's rank and pool; ``tau``: the gate's; ``correct_glue``: as KVComm does."""

    def __init__(
        self,
        name: str,
        estimator: AnchorsEstimator,
        *,
        tau: float,
        context_free: bool,
        correct_glue: bool,
        learns: bool = True,
        family: str | None = None,
        note: str = "",
    ) -> None:
        super().__init__(
            name, estimator, context_free=context_free, learns=learns, family=family, parameter=tau, note=note
        )
        self._tau = tau
        self.anchors = estimator
        self._correct_glue = correct_glue
        self._glue: dict[tuple[str, int, int], list[_GlueDelta]] = {}
        self._held: dict[Span, SpanBase] = {}
        self.entropies: list[float] = []
        """Of every span that was weighed: bits over log2 of its pool, which the gate holds against tau."""

    def learn(self, chain: Chain) -> None:
        super().learn(chain)
        if not self._correct_glue:
            return
        for reading, span, held in chain.pairs(self.context_free):
            found = self._after(chain, reading, span)
            if found is None:
                continue
            key, (start, stop), template = found
            true = self.model.canonical(reading.dense.cut(start, stop), start)
            base = SpanBase(*self.model.canonical(held.kv, held.start))
            pool = self._glue.setdefault(key, [])
            pool.append(_GlueDelta(base, true[0] - template[0], true[1] - template[1]))

    def delta(self, reading: Reading, span: Span, held: Held, base: SpanBase) -> Delta | None:
        self._held[span] = base
        edge: Edge = edge_of(held, reading, span)
        pool = self.anchors.anchors(edge)
        if len(pool) < MIN_ANCHORS:
            return None
        self.entropies.append(gate_entropy(pool, base) / math.log2(len(pool)))
        return None if self.entropies[-1] > self._tau else self.anchors.predict(edge, base)

    def filled(self, chain: Chain, reading: Reading, kv: KV, fresh: Tensor) -> Used:
        prompt = reading.prompt
        for span in prompt.spans:
            found = self._after(chain, reading, span)
            # Glue after a span that is computed is computed with it.
            if found is None or bool(fresh[span.start : span.stop].all()):
                continue
            key, (start, stop), (k, v) = found
            pool = self._glue.get(key, [])
            if self._correct_glue and len(pool) > 1:
                base = self._held[span]
                k = k + _per_channel([p.base.k for p in pool], base.k, [p.delta_k for p in pool])
                v = v + _per_channel([p.base.v for p in pool], base.v, [p.delta_v for p in pool])
            part = self.model.place(k, v, start)
            kv.k[:, start:stop], kv.v[:, start:stop] = part.k, part.v
            fresh[start:stop] = False
        self._held.clear()
        return super().filled(chain, reading, kv, fresh)

    def _after(
        self, chain: Chain, reading: Reading, span: Span
    ) -> tuple[tuple[str, int, int], tuple[int, int], tuple[Tensor, Tensor]] | None:
        """The glue after ``span``: its name, where it lies, its canonical KV in the template. None after the last."""
        order = reading.prompt.spans.index(span)
        if order + 1 == len(reading.prompt.spans):
            return None
        authors = [s.content.split("/")[1] for s in reading.prompt.spans if s.place == "answer"]
        marked, template = self.runner.template(reading.agent, chain.task, authors)
        there = _gap(marked, order)
        kv = self.model.canonical(template.cut(*there), there[0])
        return (reading.agent, len(reading.prompt.spans), order), _gap(reading.prompt, order), kv

    @property
    def state_bytes(self) -> int:
        glue = sum(part.nbytes for pool in self._glue.values() for p in pool for part in (p.delta_k, p.delta_v))
        return self.anchors.state_bytes + glue


def _gap(prompt: Prompt, order: int) -> tuple[int, int]:
    return prompt.spans[order].stop, prompt.spans[order + 1].start


def _per_channel(bases: list[Tensor], base: Tensor, deltas: list[Tensor]) -> Tensor:
    """[L, g, D]: sum of ``deltas``, weighted layer by layer and channel by channel over the shared indices."""
    shared = min(base.shape[1], *(other.shape[1] for other in bases))
    distance = torch.stack([(base[:, :shared] - other[:, :shared]).norm(dim=1) for other in bases])
    return ((-distance).softmax(0)[:, :, None] * torch.stack(deltas)).sum(0)
