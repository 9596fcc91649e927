"""What a method is: it learns from dense chains, then says which KV a reader is to use, and at what cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.quality.chains import Chain, ChainRunner, Held, Reading
from benchmarks.quality.prompts import Prompt, Span
from benchmarks.quality.recompute import Pass
from benchmarks.quality.reference import KV, ReferenceModel


@dataclass(frozen=True)
class Used:
    """kv: of the prompt's first ``body`` tokens, its last span included.

    computed, reused: token-layers between the agent's prefix and there that were computed, and that were not. encoded:
    this reader's share of the token-layers of encoding new content without context. selected: bool [body], the span
    tokens that a selection rule chose to recompute, or None.
    """

    kv: KV
    computed: int
    reused: int
    encoded: float = 0.0
    selected: Tensor | None = None


class Method(ABC):
    """One way to reuse spans.

    ``name`` is the row in the report; ``family`` and ``parameter`` place it on a curve; ``note`` says how it differs
    from its paper; ``context_free``: it starts from content encoded alone, not from what the last reader holds.
    """

    note = ""
    context_free = False

    def __init__(self, name: str, family: str | None = None, parameter: float | None = None) -> None:
        self.name, self.family, self.parameter = name, family or name, parameter

    def start(self, model: ReferenceModel, runner: ChainRunner) -> None:
        """Before anything else: the model, and what agents hold of their own."""
        self.model, self.runner = model, runner

    def learn(self, chain: Chain) -> None:  # noqa: B027 (most methods learn nothing)
        """Take in one dense chain of the learning set; it is dropped afterwards."""

    def finish_learning(self) -> None:  # noqa: B027
        """After the last chain of the learning set."""

    @abstractmethod
    def read(self, chain: Chain, reading: Reading, sources: Mapping[str, Held]) -> Used:
        """The KV to use for ``reading``; ``sources``: content -> as it was held last, or its context-free encoding.

        Of ``reading`` a method may use the prompt and the KV of the prefix, nothing else.
        """

    @property
    def state_bytes(self) -> int:
        """Bytes learned (fp32 here; half of it in bf16), beside the KV cache."""
        return 0

    def encoded(self, chain: Chain, prompt: Prompt) -> float:
        """A reader's share of the encoding of its spans: each content is encoded once, for all that read it."""
        if not self.context_free:
            return 0.0
        readers = {span.content: 0 for span in prompt.spans}
        for reading in chain.readings:
            for span in reading.prompt.spans:
                if span.content in readers:
                    readers[span.content] += 1
        # The first agent reads densely whatever happens; whoever wrote an answer does not read it.
        return sum(self.model.layers * len(span) / max(1, readers[span.content]) for span in prompt.spans)


def moved(model: ReferenceModel, held: Held, start: int) -> KV:
    """Rotate only: the held KV at positions from ``start`` on."""
    k, v = model.canonical(held.kv, held.start)
    return model.place(k, v, start)


def laid_out(reading: Reading, model: ReferenceModel, parts: Mapping[Span, KV]) -> KV:
    """KV of the body: the exact prefix, ``parts`` at their spans, zeros elsewhere."""
    prompt = reading.prompt
    shape = (model.layers, prompt.body - prompt.prefix, model.kv_heads, model.head_dim)
    kv = KV.join([reading.dense.cut(0, prompt.prefix), KV(torch.zeros(shape), torch.zeros(shape))])
    for span, part in parts.items():
        kv.k[:, span.start : span.stop] = part.k
        kv.v[:, span.start : span.stop] = part.v
    return kv


def glue_mask(prompt: Prompt) -> Tensor:
    """bool [body]: the agent's own text between spans."""
    mask = torch.ones(prompt.body, dtype=torch.bool)
    mask[: prompt.prefix] = False
    for span in prompt.spans:
        mask[span.start : span.stop] = False
    return mask


def rows_of(mask: Tensor) -> Tensor:
    return mask.nonzero()[:, 0]


def body_pass(model: ReferenceModel, reading: Reading, kv: KV, rows: Tensor) -> Pass:
    """A pass over ``rows`` of the body, over ``kv`` of the body."""
    return Pass(model, reading.prompt.tokens[: reading.prompt.body], kv, rows)


def reusable(model: ReferenceModel, prompt: Prompt) -> int:
    """Token-layers between the agent's prefix and the end of its last span."""
    return model.layers * (prompt.body - prompt.prefix)
