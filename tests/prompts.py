"""Agents, documents and prompts for tests on the real model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import kvcmas_sgl
from kvcmas_sgl.config import KvcmasConfig
from kvcmas_sgl.demo.roles import DOCUMENTS
from kvcmas_sgl.prepare_model import default_model

HEAD = KvcmasConfig().head
"""Tokens of every span that are computed, unless a server is told otherwise."""


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(default_model())


@cache
def text_tokens() -> list[int]:
    """The demo's prose as one run of tokens."""
    texts = [path.read_text() for path in sorted((DOCUMENTS / "prose").glob("*.txt"))]
    return tokenizer().encode("\n\n".join(texts), add_special_tokens=False)


def document(index: int, length: int = 600) -> list[int]:
    """Real text that no other index shares, ``length`` tokens."""
    start = index * 700
    tokens = text_tokens()[start : start + length]
    assert len(tokens) == length <= 700
    return tokens


@dataclass(frozen=True)
class Reader:
    """One agent with its system prompt."""

    role: str
    system: str

    def head(self) -> list[int]:
        text = f"<|im_start|>system\n{self.system}<|im_end|>\n<|im_start|>user\n"
        return tokenizer().encode(text, add_special_tokens=False)

    def prompt(self, span: Sequence[int], question: str = "What is this about?") -> list[int]:
        tail = tokenizer().encode(f"\n\n{question}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
        return [*self.head(), *span, *tail]

    def several(self, spans: Sequence[Sequence[int]], question: str = "What do they share?") -> tuple[list[int], Any]:
        """A prompt with the agent's own words before every span but the first, and its hint."""
        prompt, marks = list(self.head()), []
        for number, span in enumerate(spans):
            if number:
                prompt += tokenizer().encode(f"\n\nHere is text number {number + 1}:\n", add_special_tokens=False)
            marks.append((len(prompt), len(prompt) + len(span)))
            prompt += span
        tail = tokenizer().encode(f"\n\n{question}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
        return [*prompt, *tail], kvcmas_sgl.agent_hint(self.role, marks)

    def hint(self, span: Sequence[int], **fields: Any) -> dict[str, Any]:
        start = len(self.head())
        return kvcmas_sgl.agent_hint(self.role, [(start, start + len(span))], **fields)


PLANNER = Reader("planner", "You are a patient planner. Break the work in steps and name the owner of every step.")
CRITIC = Reader("critic", "You are a harsh critic who hates long words. Answer in short sentences.")
TWIN = Reader("twin", PLANNER.system)
