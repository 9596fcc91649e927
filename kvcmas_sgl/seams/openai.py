"""Seam: SGLang's OpenAI endpoints. The ``kvcmas`` field becomes a native hint, and the report comes back.

SGLang's request models drop fields that they do not know, so the field is taken from the request's own JSON and kept in
Starlette's per-request state until the response is complete. Requests without it pass untouched.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion

from kvcmas_sgl.chat_marks import locate
from kvcmas_sgl.image_limits import check_images
from kvcmas_sgl.openai_wire import FIELD, ChatHint, add_report, completion_envelopes, opt_out_envelope, parse_chat
from kvcmas_sgl.seams.tokenizer import REPORT_KEY
from kvcmas_sgl.wire import HintError, Span, to_token_spans

_DATA = "data: "
_DONE = "data: [DONE]"


@dataclass
class AgentCall:
    """One OpenAI request with a ``kvcmas`` field: its JSON, and the reports by index of the choice."""

    body: dict[str, Any]
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def choices(self) -> int:
        return int(self.body.get("n") or 1)

    async def collect(self, outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Pass on what the tokenizer manager yields, and keep the reports in it."""
        async for output in outputs:
            for position, item in enumerate(output if isinstance(output, list) else [output]):
                report = item.get("meta_info", {}).get(REPORT_KEY)
                if report is not None:
                    self.reports[position if isinstance(output, list) else item.get("index") or 0] = report
            yield output


@dataclass
class _Render:
    """What the chat template makes of one request's messages; with ``text_only`` the text is not tokenized."""

    text_only: bool = False
    text: str | None = None
    encode_options: dict[str, Any] = field(default_factory=dict)


_render: ContextVar[_Render | None] = ContextVar("kvcmas_render", default=None)


async def around_handle_request(
    original: Callable[..., Any], serving: Any, request: Any, raw_request: Any = None
) -> Any:
    """Around ``OpenAIServingBase.handle_request``: keep the ``kvcmas`` field, and put the report into the response."""
    call = None
    if isinstance(serving, (OpenAIServingChat, OpenAIServingCompletion)) and hasattr(raw_request, "body"):
        call = await _read_call(raw_request)
    response = await original(serving, request, raw_request)
    if call is None:
        return response
    if isinstance(response, StreamingResponse):
        response.body_iterator = _with_report(response.body_iterator, call)
    elif isinstance(response, BaseModel) and call.reports:
        content = json.loads(response.model_dump_json(by_alias=True))
        add_report(content, call.reports, call.choices)
        response = Response(json.dumps(content), media_type="application/json")
    return response


def around_generate_request(
    original: Callable[..., AsyncIterator[Any]], manager: Any, obj: Any, request: Any = None
) -> AsyncIterator[Any]:
    """Around ``TokenizerManager.generate_request``: collect the reports of a request with a ``kvcmas`` field.

    Raises `HintError` for a request with a hint and too many or too large pictures, before they are read.
    """
    if getattr(obj, "kv_hints", None) is not None:
        for pictures in _pictures(obj.image_data):
            check_images(pictures)
    call = _call(request)
    outputs = original(manager, obj, request)
    return outputs if call is None else call.collect(outputs)


def around_convert_completion(
    original: Callable[..., Any], serving: Any, request: Any, raw_request: Any = None
) -> tuple[Any, Any]:
    """Around ``OpenAIServingCompletion._convert_to_internal_request``. Raises `HintError`, answered with HTTP 400."""
    adapted, request = original(serving, request, raw_request)
    call = _call(raw_request)
    if call is not None:
        if serving.template_manager.completion_template_name is not None and _spans(call.body[FIELD]):
            raise HintError("spans cannot be marked on a server whose completion template changes the prompt.")
        adapted.kv_hints = completion_envelopes(call.body[FIELD], request.prompt)
    return adapted, request


def around_convert_chat(
    original: Callable[..., Any], serving: Any, request: Any, raw_request: Any = None
) -> tuple[Any, Any]:
    """Around ``OpenAIServingChat._convert_to_internal_request``. Raises `HintError`, answered with HTTP 400."""
    call = _call(raw_request)
    if call is None:
        return original(serving, request, raw_request)
    opt_out = opt_out_envelope(call.body[FIELD])
    hint = None if opt_out is not None else parse_chat(call.body[FIELD], call.body["messages"])

    def convert(converted: Any, render: _Render) -> Any:
        token = _render.set(render)
        try:
            return original(serving, converted, raw_request)[0]
        finally:
            _render.reset(token)

    def rendered(messages: list[dict[str, Any]]) -> str | None:
        tagged = _Render(text_only=True)
        convert(type(request).model_validate({**call.body, "messages": messages}), tagged)
        return tagged.text

    render = _Render()
    adapted = convert(request, render)
    # Here, so that a stream too is answered with HTTP 400.
    check_images(adapted.image_data or ())
    if hint is None:
        adapted.kv_hints = opt_out
        return adapted, request
    spans: tuple[Span, ...] = ()
    if hint.spans and render.text is not None:
        spans = locate(call.body["messages"], hint.spans, render.text, rendered)
    adapted.kv_hints = _native(hint, spans, adapted, render, serving.tokenizer_manager.tokenizer)
    return adapted, request


def around_render(
    original: Callable[..., Any], serving: Any, messages: list[dict[str, Any]], **options: Any
) -> tuple[list[int], str | None]:
    """Around ``OpenAIServingChat._render_and_encode_chat_template``: keep the text that is made between the two."""
    render = _render.get()
    if render is None:
        return original(serving, messages, **options)
    render.text = serving.tokenizer_manager.tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=options.get("add_generation_prompt", True),
        tools=options["tools"],
        return_dict=False,
        **options["template_kwargs"],
    )
    render.encode_options = options["encode_kwargs"]
    # What stands for the prompt of a tagged chat is never sent.
    return ([0], "") if render.text_only else original(serving, messages, **options)


def _native(hint: ChatHint, spans: tuple[Span, ...], adapted: Any, render: _Render, tokenizer: Any) -> dict[str, Any]:
    """The native hint: marks in tokens where SGLang sends tokens, in characters where it sends the text."""
    if spans and isinstance(adapted.text, str):
        return hint.envelope(spans if adapted.text == render.text else (), "char")
    if spans and getattr(tokenizer, "is_fast", False):
        encoding = tokenizer(render.text, return_offsets_mapping=True, **render.encode_options)
        ids = list(encoding["input_ids"])
        # A started answer of the assistant is appended in tokens, after the text.
        if ids == list(adapted.input_ids)[: len(ids)]:
            return hint.envelope(to_token_spans(spans, encoding["offset_mapping"]), "token")
    return hint.envelope((), "token")


async def _read_call(raw_request: Any) -> AgentCall | None:
    # The body is cached by Starlette; most requests end here, unparsed.
    if f'"{FIELD}"'.encode() not in await raw_request.body():
        return None
    body = await raw_request.json()
    if not isinstance(body, dict) or body.get(FIELD) is None:
        return None
    call = AgentCall(body)
    raw_request.state.kvcmas = call
    return call


def _call(raw_request: Any) -> AgentCall | None:
    call = getattr(getattr(raw_request, "state", None), "kvcmas", None)
    return call if isinstance(call, AgentCall) else None


def _pictures(image_data: Any) -> list[list[Any]]:
    """The pictures of each prompt of a request."""
    if not isinstance(image_data, list):
        return [] if image_data is None else [[image_data]]
    nested = [item for item in image_data if isinstance(item, list)]
    return nested if nested else [image_data]


def _spans(value: Any) -> Any:
    return value.get("spans") if isinstance(value, dict) else None


async def _with_report(chunks: AsyncIterable[Any], call: AgentCall) -> AsyncIterator[Any]:
    """The stream with the report in its last event; only what may be that last event waits for the next one."""
    held: Any = None
    ending = False
    async for chunk in chunks:
        if held is not None:
            yield _reported(held, call) if str(chunk).startswith(_DONE) else held
            held = None
        ending = ending or _ends_a_choice(chunk)
        if ending and not str(chunk).startswith(_DONE):
            held = chunk
        else:
            yield chunk
    if held is not None:
        yield held


def _ends_a_choice(chunk: Any) -> bool:
    event = _event(chunk)
    choices = event.get("choices") if event else None
    return choices is not None and (not choices or any(choice.get("finish_reason") for choice in choices))


def _reported(chunk: Any, call: AgentCall) -> Any:
    event = _event(chunk)
    if event is None or "choices" not in event or not call.reports:
        return chunk
    add_report(event, call.reports, call.choices)
    return f"{_DATA}{json.dumps(event)}\n\n"


def _event(chunk: Any) -> dict[str, Any] | None:
    if not isinstance(chunk, str) or not chunk.startswith(_DATA + "{"):
        return None
    return dict(json.loads(chunk[len(_DATA) :]))
