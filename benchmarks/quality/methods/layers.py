"""DroidSpeak and RelayCaching: some layers are computed from stored hidden states, others reuse KV.

Both are re-implemented from descriptions (DroidSpeak, arXiv 2411.02820, abstract and secondary sources; RelayCaching,
arXiv 2603.13289, thresholds from a third party's re-implementation), and both need the hidden state at the first
computed layer: the content's first exact run leaves it there ("E cache"), which is not charged as state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.quality.chains import SNAPSHOT_LAYERS, Chain, Held, Reading
from benchmarks.quality.methods.base import (
    Method,
    Used,
    body_pass,
    glue_mask,
    laid_out,
    moved,
    reusable,
    rows_of,
)
from benchmarks.quality.recompute import Pass
from benchmarks.quality.reference import KV, divergence

_DEVIATION, _INFLUENCE, _LAST_QUERIES = 1.5, 1.45, 10


def span_rows(reading: Reading) -> Tensor:
    return torch.cat([torch.arange(span.start, span.stop) for span in reading.prompt.spans])


def stored_hidden(reading: Reading, sources: Mapping[str, Held], layer: int) -> Tensor:
    """The spans' hidden states at the input of ``layer``, as their first exact runs left them."""
    return torch.cat([sources[span.content].hidden[layer] for span in reading.prompt.spans])


def rotated(method: Method, reading: Reading, sources: Mapping[str, Held]) -> KV:
    parts = {span: moved(method.model, sources[span.content], span.start) for span in reading.prompt.spans}
    return laid_out(reading, method.model, parts)


def last_readings(chain: Chain) -> Iterator[tuple[Reading, dict[str, Held]]]:
    """Every reading but the first with its dense sources."""
    sources: dict[str, dict[str, Held]] = {}
    for reading, span, held in chain.pairs():
        sources.setdefault(reading.agent, {})[span.content] = held
    for reading in chain.readings[1:]:
        yield reading, sources[reading.agent]


class LayerProfile:
    """KL that is left when one group of layers is recomputed, for each group; from the first chain that is shown."""

    def __init__(self) -> None:
        self.left: Tensor | None = None

    def measure(self, method: DroidSpeak, chain: Chain) -> None:
        if self.left is not None:
            return
        starts = range(0, method.model.layers, SNAPSHOT_LAYERS)
        self.left = torch.zeros(len(starts))
        for reading, sources in last_readings(chain):
            tail = reading.after_spans
            for i, start in enumerate(starts):
                kv = method.recompute(reading, sources, (start,)).kv
                logits, _ = method.model.extend(tail, kv, last=len(tail))
                self.left[i] += float(divergence(reading.logits, logits).mean())


class DroidSpeak(Method):
    """Recomputes the groups of three layers that help most, up to ``budget`` of them. A ``profile`` can be shared."""

    note = "groups of 3 layers, profiled on 3 readings; hidden states of the first exact run"

    def __init__(self, name: str, budget: float, profile: LayerProfile) -> None:
        super().__init__(name, "droidspeak", budget)
        self._budget, self._profile = budget, profile
        self.groups: tuple[int, ...] = ()

    def learn(self, chain: Chain) -> None:
        self._profile.measure(self, chain)

    def finish_learning(self) -> None:
        if self._profile.left is None:
            raise ValueError(f"{self.name} has seen no chain: it needs one to choose its layers")
        count = max(1, round(self._budget * self.model.layers / SNAPSHOT_LAYERS))
        order = self._profile.left.argsort()
        self.groups = tuple(sorted(int(i) * SNAPSHOT_LAYERS for i in order[:count]))

    def read(self, chain: Chain, reading: Reading, sources: Mapping[str, Held]) -> Used:
        work = self.recompute(reading, sources, self.groups)
        return Used(work.kv, work.computed, reusable(self.model, reading.prompt) - work.computed)

    def recompute(self, reading: Reading, sources: Mapping[str, Held], groups: Sequence[int]) -> Pass:
        """The body with all tokens computed in the layers of ``groups``, each named by its first layer."""
        glue = rows_of(glue_mask(reading.prompt))
        work = body_pass(self.model, reading, rotated(self, reading, sources), glue)
        for start in range(0, self.model.layers, SNAPSHOT_LAYERS):
            stop = min(start + SNAPSHOT_LAYERS, self.model.layers)
            if start in groups and len(work.rows) == len(glue):
                work.enter(span_rows(reading), stored_hidden(reading, sources, start))
            elif start not in groups:
                work.keep(glue)
            work.run(start, stop)
        return work


class RelayCaching(Method):
    """Middle layers only: all tokens up to a detection layer, then those that deviate or are attended to.

    The range is where V deviates (1 - cosine) by more than half of the largest layer's, on the learning set.
    """

    note = "range of layers profiled on the learning set; hidden states of the first exact run"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._deviations: list[Tensor] = []
        self.range = (0, 0)

    def learn(self, chain: Chain) -> None:
        for reading, span, held in chain.pairs():
            true = reading.dense.v[:, span.start : span.stop].flatten(2)
            cosine = torch.cosine_similarity(true, held.kv.v.flatten(2), dim=-1)
            self._deviations.append((1 - cosine).mean(1))

    def finish_learning(self) -> None:
        profile = torch.stack(self._deviations).mean(0)
        middle = rows_of(profile >= profile.max() / 2)
        start = int(middle[0]) // SNAPSHOT_LAYERS * SNAPSHOT_LAYERS
        self.range = (start, max(int(middle[-1]) + 1, start + 2))

    def read(self, chain: Chain, reading: Reading, sources: Mapping[str, Held]) -> Used:
        prompt = reading.prompt
        spans, glue = span_rows(reading), rows_of(glue_mask(prompt))
        cached = rotated(self, reading, sources)
        # The suffix is part of the pass: the tokens that it attends to are kept.
        shape = (self.model.layers, len(prompt.tokens) - prompt.body, self.model.kv_heads, self.model.head_dim)
        room = KV.join([cached, KV(torch.zeros(shape), torch.zeros(shape))])
        suffix = torch.arange(prompt.body, len(prompt.tokens))
        own = torch.cat([glue, suffix])
        start, stop = self.range
        work = Pass(self.model, prompt.tokens, room, own).run(0, start)
        work.enter(spans, stored_hidden(reading, sources, start))
        work.step(start)
        q, k = work.step(start + 1)
        chosen = self._choose(start + 1, work, cached, q, k, spans)
        work.keep(torch.cat([own, chosen]))
        work.run(start + 2, stop)
        work.keep(own)
        work.run(stop)
        computed = work.computed - len(suffix) * self.model.layers
        selected = torch.zeros(prompt.body, dtype=torch.bool)
        selected[chosen] = True
        return Used(work.kv.cut(0, prompt.body), computed, reusable(self.model, prompt) - computed, selected=selected)

    def _choose(self, layer: int, work: Pass, cached: KV, q: Tensor, k: Tensor, spans: Tensor) -> Tensor:
        fresh, old = work.kv.v[layer, spans].flatten(1), cached.v[layer, spans].flatten(1)
        deviation = 1 - torch.cosine_similarity(fresh, old, dim=-1)
        last, at = q[-_LAST_QUERIES:], work.rows[-_LAST_QUERIES:]
        keys = k.repeat_interleave(self.model.heads // self.model.kv_heads, dim=1)
        scores = torch.einsum("qhd,mhd->hqm", last, keys) * self.model.head_dim**-0.5
        scores = scores.masked_fill(torch.arange(k.shape[0])[None, None] > at[None, :, None], -torch.inf)
        influence = scores.softmax(-1).sum((0, 1))[spans]
        wanted = (deviation >= _DEVIATION * deviation.mean()) | (influence >= _INFLUENCE * influence.mean())
        return spans[wanted]
