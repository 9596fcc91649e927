"""Where marked text of chat messages lies in the prompt that a chat template makes of them.

A template may strip, escape, move or repeat a message's text, so the place is measured, not guessed: the template is
applied once more with unguessable tags at the borders of the marked text. The tags' places count only when the tagged
prompt without its tags is the prompt itself, and each tag is in it once. This module imports no SGLang.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvcmas_sgl.openai_wire import MessageSpan, text_parts
from kvcmas_sgl.wire import Span

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[list[dict[str, Any]]], str | None]


def locate(messages: Messages, spans: Sequence[MessageSpan], prompt: str, render: Render) -> tuple[Span, ...]:
    """Character ranges ``[start, end)`` of ``spans`` in ``prompt``, ascending and disjoint.

    A span whose place is not certain is left out. Where the template strips, the range is without the white space at
    the span's borders.

    Parameters
    ----------
    messages
        The request's messages as JSON, of which ``prompt`` was made.
    spans
        Marked text of the messages.
    prompt
        What the template makes of ``messages``.
    render
        Applies the template to other messages; None when it cannot.
    """
    found = _locate_all(messages, spans, prompt, render)
    if found is None:
        found = []
        for span in spans:
            # Alone, so that one message which the template cuts does not cost the others their marks.
            alone = _locate_all(messages, [span], prompt, render)
            core = _without_borders(messages, span) if alone is None else None
            if core is not None:
                alone = _locate_all(messages, [core], prompt, render)
            found += alone or []
    result: list[Span] = []
    for start, end in sorted(found):
        if start < end and (not result or result[-1][1] <= start):
            result.append((start, end))
    return tuple(result)


def _locate_all(messages: Messages, spans: Sequence[MessageSpan], prompt: str, render: Render) -> list[Span] | None:
    if not spans:
        return []
    tags = [(_tag(), _tag()) for _ in spans]
    tagged = render(_tagged(messages, spans, tags))
    flat = [tag for pair in tags for tag in pair]
    if tagged is None or any(tagged.count(tag) != 1 for tag in flat):
        return None
    places: dict[str, int] = {}
    before = 0
    for place, tag in sorted((tagged.index(tag), tag) for tag in flat):
        places[tag] = place - before
        before += len(tag)
    for tag in flat:
        tagged = tagged.replace(tag, "")
    return [(places[first], places[last]) for first, last in tags] if tagged == prompt else None


def _tagged(messages: Messages, spans: Sequence[MessageSpan], tags: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    result = [dict(message) for message in messages]
    # From the back, so that offsets of what is still to come hold; spans ascend.
    for span, (first, last) in reversed(list(zip(spans, tags, strict=True))):
        message = result[span.message]
        if span.whole:
            message["content"] = _around(message["content"], first, last)
            continue
        parts = text_parts(message["content"])
        # A border between two parts belongs to the part whose character is marked.
        _insert(parts, span.end - 1, 1, last)
        _insert(parts, span.start, 0, first)
        if isinstance(message["content"], str):
            message["content"] = parts[0]
        else:
            texts = iter(parts)
            message["content"] = [
                {**part, "text": next(texts)} if part["type"] == "text" else part for part in message["content"]
            ]
    return result


def _around(parts: list[dict[str, Any]], first: str, last: str) -> list[dict[str, Any]]:
    """The parts of a message with tags before and behind them: in its text, where text is first or last."""
    result = [dict(part) for part in parts]
    if result[0]["type"] != "text":
        result.insert(0, {"type": "text", "text": ""})
    if result[-1]["type"] != "text":
        result.append({"type": "text", "text": ""})
    result[0]["text"] = first + result[0]["text"]
    result[-1]["text"] += last
    return result


def _insert(parts: list[str], character: int, after: int, tag: str) -> None:
    for index, part in enumerate(parts):
        if character < len(part):
            cut = character + after
            parts[index] = part[:cut] + tag + part[cut:]
            return
        character -= len(part)


def _without_borders(messages: Messages, span: MessageSpan) -> MessageSpan | None:
    if span.whole:
        return None
    text = "".join(text_parts(messages[span.message]["content"]))[span.start : span.end]
    core = text.strip()
    start = span.start + len(text) - len(text.lstrip())
    return MessageSpan(span.message, start, start + len(core)) if core and core != text else None


def _tag() -> str:
    # Letters and digits only: no template escapes or strips them.
    return f"kvcmas{secrets.token_hex(8)}"
