"""CacheBlend (arXiv 2405.16444), re-implemented from a description of its released code.

Layers 0 and 1 are computed for all tokens; one selection at layer 1 by the squared difference between fresh and cached
V, the ``ratio`` of the span tokens with the largest; every later layer computes these and the glue only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from benchmarks.quality.chains import Chain, Held, Reading
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

CHECK_LAYER = 1


class CacheBlend(Method):
    """``ratio``: share of the span tokens recomputed from layer 2 on."""

    note = "from the last reader's KV, not from context-free chunks; one selection over all spans"

    def __init__(self, name: str, ratio: float) -> None:
        super().__init__(name, "cacheblend", ratio)
        self._ratio = ratio

    def read(self, chain: Chain, reading: Reading, sources: Mapping[str, Held]) -> Used:
        prompt, model = reading.prompt, self.model
        parts = {span: moved(model, sources[span.content], span.start) for span in prompt.spans}
        cached = laid_out(reading, model, parts)
        work = body_pass(model, reading, cached, torch.arange(prompt.prefix, prompt.body)).run(0, CHECK_LAYER + 1)
        deviation = (work.kv.v[CHECK_LAYER] - cached.v[CHECK_LAYER]).square().sum((1, 2))
        glue = glue_mask(prompt)
        deviation[: prompt.prefix] = -1
        deviation[glue] = -1
        chosen = torch.zeros(prompt.body, dtype=torch.bool)
        chosen[deviation.topk(round(self._ratio * sum(len(span) for span in prompt.spans))).indices] = True
        work.keep(rows_of(chosen | glue))
        work.run(CHECK_LAYER + 1)
        total = reusable(model, prompt)
        return Used(work.kv, work.computed, total - work.computed, selected=chosen)
