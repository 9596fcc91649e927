"""Text that carries its own marks: which agent speaks, and which parts are shared.

SGLang's interpreter grows a prompt by `text_ += value`, forks it by `str(text_)`, cuts it by `text_[:end]` and
`text_[start:]`, and its tracer grows a common prefix by `prefix += value`. Two `str` subclasses that keep marks
through exactly these operations need no patch of the interpreter and no table beside it: offsets cannot drift
from the text, forks, joins, batches and traces inherit them, and threads share nothing. Whatever else is done
to the text (an f-string, `join`, `replace`) yields a plain `str`: the marks are lost then (the server computes,
as it would without us), never wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self, SupportsIndex


@dataclass(frozen=True)
class Span:
    """A shared span: characters `start` to `end` (Python code points, end exclusive) of the text it is in.

    `writer` is the `Agent.instance` that wrote the text, None for a document.
    """

    start: int
    end: int
    name: str | None = None
    writer: str | None = None


@dataclass(frozen=True)
class Agent:
    """The agent of a prompt; `start` to `end` are the characters of its system prompt in the text.

    `workflow` and `reuse` ("auto" or "never") go to the server as they are; None leaves them out. `instance`
    tells two agents of one role in one program apart; it stays on the client.
    """

    start: int
    end: int
    role: str
    workflow: str | None = None
    reuse: Literal["auto", "never"] | None = None
    instance: str | None = None


@dataclass(frozen=True)
class Border:
    """Where a shared span that holds pictures begins (``opens``) or ends; both borders have its ``key``.

    SGLang puts a picture into a prompt by itself, so there is no one text to mark.
    """

    start: int
    end: int
    key: str
    opens: bool
    name: str | None = None


Mark = Span | Agent | Border


class MarkedText(str):
    """Text with marks, by offsets from its start; equal, hashed and encoded as its plain text.

    `+` on either side, contiguous slices (marks that lie wholly inside) and `strip` (marks cut to what is left)
    keep them.
    """

    marks: tuple[Mark, ...]

    def __new__(cls, text: str, marks: tuple[Mark, ...] = ()) -> Self:
        marked = super().__new__(cls, text)
        marked.marks = marks
        return marked

    @property
    def spans(self) -> tuple[Span, ...]:
        """The shared spans in the text, by position; one with pictures counts if both its borders are in the text."""
        found, opened = [], {}
        for mark in self.marks:
            if isinstance(mark, Span):
                found.append(mark)
            elif isinstance(mark, Border) and mark.opens:
                opened[mark.key] = mark.start
            elif isinstance(mark, Border) and opened.get(mark.key, mark.end) < mark.end:
                found.append(Span(opened[mark.key], mark.end, mark.name))
        return tuple(sorted(found, key=lambda span: span.start))

    def __str__(self) -> str:
        # The interpreter takes str(value) before it adds it to the prompt, and str(text) to fork it.
        return self

    def __add__(self, more: str) -> MarkedText:
        return _joined(self, more) if isinstance(more, str) else NotImplemented

    def __radd__(self, before: str) -> str:
        return _joined(before, self) if isinstance(before, str) else NotImplemented

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        text = super().__getitem__(key)
        if not isinstance(key, slice):
            return text
        start, stop, step = key.indices(len(self))
        if step != 1:
            return text
        inside = (mark for mark in self.marks if start <= mark.start and mark.end <= stop)
        return _like(self, text, start, tuple(_moved(mark, -start) for mark in inside))

    def strip(self, chars: str | None = None, /) -> str:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> str:
        return self._cut(len(self) - len(super().lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        return self._cut(0, len(super().rstrip(chars)))

    def _cut(self, start: int, stop: int) -> str:
        cut = (replace(mark, start=max(mark.start, start), end=min(mark.end, stop)) for mark in self.marks)
        marks = tuple(_moved(mark, -start) for mark in cut if mark.start < mark.end)
        return _like(self, super().__getitem__(slice(start, stop)), start, marks)


class Prompt(MarkedText):
    """A prompt that has grown over an agent's name.

    Added to another text it is content like any other: its marks, above all its agent, stay behind. Only a
    beginning (`prompt[:end]`) is a prompt of that agent; any other part keeps its spans alone.
    """

    @property
    def agent(self) -> Agent | None:
        """The last agent named in the text, or None."""
        return _agent(self.marks)

    def __radd__(self, before: str) -> str:
        return str.__add__(before, self)


def _joined(left: str, right: str) -> MarkedText:
    marks = left.marks if isinstance(left, MarkedText) else ()
    if isinstance(right, MarkedText) and not isinstance(right, Prompt):
        speaker = _agent(marks)
        own = None if speaker is None else speaker.instance
        # What an agent wrote itself is no span in its own prompt: it is where it was generated.
        brought = (m for m in right.marks if own is None or not isinstance(m, Span) or m.writer != own)
        marks += tuple(_moved(mark, len(left)) for mark in brought)
    kind = MarkedText if _agent(marks) is None else Prompt
    return kind(str.__add__(left, right), marks)


def _like(whole: MarkedText, part: str, start: int, marks: tuple[Mark, ...]) -> MarkedText:
    """`part` of `whole` from `start`, as the kind of text that it is."""
    if isinstance(whole, Prompt) and start == 0:
        return Prompt(part, marks)
    return MarkedText(part, tuple(mark for mark in marks if not isinstance(mark, Agent)))


def _moved(mark: Mark, by: int) -> Mark:
    return replace(mark, start=mark.start + by, end=mark.end + by)


def _agent(marks: tuple[Mark, ...]) -> Agent | None:
    return next((mark for mark in reversed(marks) if isinstance(mark, Agent)), None)
