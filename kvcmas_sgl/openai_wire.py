"""OpenAI form of the agent hint: the field ``kvcmas`` of a request, and the report in its response.

``extra_body={"kvcmas": {...}}`` of ``/v1/completions`` and ``/v1/chat/completions``. Fields ``role``, ``workflow``,
``reuse`` and the overrides are those of the native hint (`kvcmas_sgl.wire`); ``spans`` differs:

completions
    ``[start, end)`` pairs, ``"unit": "char"`` (default for text prompts) or ``"token"`` (default for token prompts).
    With a batch of prompts, one list of pairs for each prompt.
chat
    ``{"message": i}`` marks the whole text of message i, ``{"message": i, "start": a, "end": b}`` its characters a to b
    (each of the two may be left out). The text of a message is its content, or the concatenation of its text parts.
    Pictures (``image_url``) and videos belong to a mark of the whole message, and to one of characters that stand on
    both sides of them. A message without text and pictures marks nothing.

``{"auto": false}``, alone, keeps the server from looking for shared spans by itself. This module imports no SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from kvcmas_sgl.wire import (
    MAX_SPANS,
    OPT_OUT,
    OVERRIDES,
    AgentHint,
    HintError,
    Span,
    hint_envelope,
    parse_payload,
    shown,
)

FIELD = "kvcmas"
_CHAT_FIELDS = ("role", "spans", "workflow", "reuse", *OVERRIDES, "auto")
_COMPLETION_FIELDS = ("role", "spans", "unit", "workflow", "reuse", *OVERRIDES, "auto")
_SPAN_FIELDS = ("message", "start", "end")

PICTURES = ("image_url", "input_image", "video_url")
"""Types of parts that are pictures, or the frames of one video."""


@dataclass(frozen=True, order=True)
class MessageSpan:
    """Characters ``[start, end)`` of a message's text; ``whole``: all of the message, its pictures too.

    Empty only where the whole message has pictures and no text.
    """

    message: int
    start: int
    end: int
    whole: bool = False


@dataclass(frozen=True)
class ChatHint:
    """A validated hint of a chat. ``agent`` has no spans yet: their places depend on the chat template."""

    agent: AgentHint
    spans: tuple[MessageSpan, ...]

    def envelope(self, spans: Sequence[Span], unit: str) -> dict[str, Any]:
        """The native envelope with ``spans`` in ``unit``s of the templated prompt."""
        payload = self.agent.payload() | {"unit": unit, "spans": [list(span) for span in spans]}
        return hint_envelope(parse_payload(payload))


def opt_out_envelope(value: Any) -> dict[str, Any] | None:
    """The native envelope of ``{"auto": false}``, or None for a hint that names a role. Raises `HintError`."""
    if not isinstance(value, Mapping):
        raise HintError(f'{FIELD} is {shown(value)}, but must be an object with role and spans, or {{"auto": false}}.')
    if "auto" not in value:
        return None
    if value["auto"] is not False:
        raise HintError(f"auto is {shown(value['auto'])}, but only false is allowed.")
    if len(value) > 1:
        raise HintError(
            f"auto is False, but must stand alone in {FIELD}: a request that names its role marks its spans itself."
        )
    return hint_envelope(OPT_OUT)


def completion_envelopes(value: Any, prompt: Any) -> dict[str, Any] | list[dict[str, Any]]:
    """``kv_hints`` for ``/v1/completions``: one envelope, or one for each prompt of a batch. Raises `HintError`.

    Parameters
    ----------
    value
        The request's ``kvcmas`` field.
    prompt
        Its prompt: text, token ids, or a list of either.
    """
    opt_out = opt_out_envelope(value)
    if opt_out is not None:
        return opt_out
    _known(value, _COMPLETION_FIELDS, FIELD)
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    text = isinstance(prompt, str) or isinstance(first, str)
    payload = {"unit": "char" if text else "token"} | {name: item for name, item in value.items() if item is not None}
    if isinstance(prompt, str) or isinstance(first, int):
        return hint_envelope(parse_payload(payload))
    per_prompt = payload.get("spans", [[]] * len(prompt))
    if not isinstance(per_prompt, list) or len(per_prompt) != len(prompt):
        raise HintError(
            f"spans is {shown(per_prompt)}, but must be a list of {len(prompt)} lists of spans, one for each prompt."
        )
    return [hint_envelope(parse_payload(payload | {"spans": spans})) for spans in per_prompt]


def parse_chat(value: Any, messages: Sequence[Mapping[str, Any]]) -> ChatHint:
    """Validate the ``kvcmas`` field of a chat against its messages (as in the request's JSON). Raises `HintError`."""
    _known(value, _CHAT_FIELDS, FIELD)
    agent = parse_payload({name: item for name, item in value.items() if name != "spans"})
    items = [] if value.get("spans") is None else value["spans"]
    if not isinstance(items, list):
        raise HintError(f'spans is {shown(items)}, but must be a list of {{"message": i}} marks.')
    if len(items) > MAX_SPANS:
        raise HintError(f"spans holds {len(items)} spans, but at most {MAX_SPANS} are allowed.")
    spans: list[MessageSpan] = []
    for item in items:
        span = _message_span(item, messages)
        if span is None:
            continue
        if spans and (span.message, span.start) < (spans[-1].message, spans[-1].end):
            raise HintError(f"span {shown(item)} overlaps or precedes the one before it: spans must ascend.")
        spans.append(span)
    return ChatHint(agent, tuple(spans))


def text_parts(content: Any) -> list[str]:
    """The texts of a message's content: one of a string, one for each text part of a list of parts.

    Raises `HintError` for parts that are neither text nor pictures.
    """
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise HintError(f"a marked message's content is {shown(content)}, but only text and pictures are shared.")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind not in PICTURES:
            raise HintError(
                f"a marked message holds a part of type {shown(kind)}, but only text and pictures are shared."
            )
    return texts


def add_report(response: dict[str, Any], reports: Mapping[int, Mapping[str, Any]], choices: int) -> None:
    """Put the server's reports into an OpenAI response or the last chunk of a stream, in place.

    ``usage.prompt_tokens_details`` counts prompt tokens once for each prompt, as OpenAI's usage does. The own key
    ``kvcmas`` holds the report, or a list with one for each choice when the request makes several.

    Parameters
    ----------
    response
        JSON of the response.
    reports
        Native reports by index of the choice; prompt k of a batch has the choices k * choices and following.
    choices
        The request's ``n``.
    """
    ordered = [dict(reports[index]) for index in sorted(reports)]
    firsts = [reports[index] for index in sorted(reports) if index % choices == 0]
    corrected = sum(report["corrected_tokens"] for report in firsts)
    usage = response.get("usage")
    if usage is not None:
        details = usage.get("prompt_tokens_details") or {}
        exact = sum(report["exact_tokens"] for report in firsts)
        usage["prompt_tokens_details"] = details | {"cached_tokens": exact + corrected, "corrected_tokens": corrected}
    response[FIELD] = ordered[0] if len(ordered) == 1 else ordered


def _message_span(item: Any, messages: Sequence[Mapping[str, Any]]) -> MessageSpan | None:
    if not isinstance(item, Mapping):
        raise HintError(f'span {shown(item)} must be {{"message": i}} or {{"message": i, "start": a, "end": b}}.')
    _known(item, _SPAN_FIELDS, f"span {shown(item)}")
    index = item.get("message")
    if not _is_integer(index) or not 0 <= index < len(messages):
        raise HintError(f"message is {shown(index)}, but must be an integer from 0 to {len(messages) - 1}.")
    content = messages[index].get("content")
    texts = text_parts(content)
    length = sum(map(len, texts))
    start, end = item.get("start", 0), item.get("end", length)
    if not {"start", "end"} & set(item):
        pictures = isinstance(content, list) and len(content) > len(texts)
        return MessageSpan(index, 0, length, pictures) if length or pictures else None
    if not _is_integer(start) or not _is_integer(end) or not 0 <= start < end:
        raise HintError(f"span {shown(item)} must satisfy 0 <= start < end, in characters of the message's text.")
    if end > length:
        raise HintError(f"span {shown(item)} ends after the message's text, which has {length} characters.")
    return MessageSpan(index, start, end)


def _known(value: Mapping[str, Any], fields: Sequence[str], where: str) -> None:
    for name in value:
        if name not in fields:
            raise HintError(f"unknown field {shown(name)} in {where}; known are {', '.join(fields)}.")


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
