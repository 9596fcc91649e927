"""Text that carries its own marks: which agent speaks, and which parts are shared.

SGLang's interpreter grows a prompt by `text_ += value`, forks it by `str(text_)`, cuts it by `text_[:end]`,
and its tracer grows a common prefix by `prefix += value`. Two `str` subclasses that keep marks through exactly
these operations need no patch of the interpreter and no table beside it: offsets cannot drift from the text,
forks, batches and traces inherit them, and threads share nothing. Whatever else is done to the text yields a
plain `str`: the marks are lost then (the server computes, as it would without us), never wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self, SupportsIndex


@dataclass(frozen=True)
class Span:
    """A shared span: characters `start` to `end` (Python code points, end exclusive) of the text it is in."""

    start: int
    end: int
    name: str | None = None


@dataclass(frozen=True)
class Agent:
    """The agent of a prompt; `start` to `end` are the characters of its system prompt in the text.

    `workflow` and `reuse` ("auto" or "never") go to the server as they are; None leaves them out.
    """

    start: int
    end: int
    role: str
    workflow: str | None = None
    reuse: Literal["auto", "never"] | None = None


Mark = Span | Agent


class MarkedPiece(str):
    """What a primitive adds to a prompt: a text under one mark, with offsets from the text's own start."""

    mark: Mark

    def __new__(cls, text: str, mark: Mark) -> Self:
        piece = super().__new__(cls, text)
        piece.mark = mark
        return piece

    def __str__(self) -> str:
        # The interpreter takes str(value) before it adds it to the prompt.
        return self

    def __radd__(self, before: str) -> Prompt:
        return Prompt(before) + self


class Prompt(str):
    """A prompt that has grown over marked pieces; equal, hashed and encoded as its plain text.

    Added to another prompt it is content like any other: its marks, above all its agent, stay behind.
    """

    marks: tuple[Mark, ...]

    def __new__(cls, text: str, marks: tuple[Mark, ...] = ()) -> Self:
        prompt = super().__new__(cls, text)
        prompt.marks = marks
        return prompt

    @property
    def agent(self) -> Agent | None:
        """The last agent named in the text, or None."""
        return next((mark for mark in reversed(self.marks) if isinstance(mark, Agent)), None)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The shared spans in the text, by position."""
        return tuple(mark for mark in self.marks if isinstance(mark, Span))

    def __str__(self) -> str:
        # The interpreter forks a prompt by str(text): a child must inherit the marks.
        return self

    def __add__(self, more: str) -> Prompt:
        if not isinstance(more, str):
            return NotImplemented
        marks = self.marks
        if isinstance(more, MarkedPiece):
            at = len(self)
            marks += (replace(more.mark, start=at + more.mark.start, end=at + more.mark.end),)
        return Prompt(super().__add__(more), marks)

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        """A beginning (`prompt[:end]`) keeps the marks that lie in it; any other part is plain text."""
        text = super().__getitem__(key)
        if not isinstance(key, slice):
            return text
        start, stop, step = key.indices(len(self))
        if start != 0 or step != 1:
            return text
        return Prompt(text, tuple(mark for mark in self.marks if mark.end <= stop))
