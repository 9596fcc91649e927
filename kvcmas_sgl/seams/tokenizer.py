"""Seam: the tokenizer process. Agent hints are validated where a bad one can still become HTTP 400."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import msgspec
from sglang.srt.managers.kv_hints import KvHintsEnvelope
from sglang.srt.runtime_context import get_memory

from kvcmas_sgl.config import RADIX_CACHE_BACKEND, published_config
from kvcmas_sgl.seams.images import find_places, grown
from kvcmas_sgl.wire import (
    ACTION_TYPE,
    OPT_OUT,
    OVERRIDES,
    AgentHint,
    HintError,
    Span,
    check_range,
    find_hint,
    to_token_spans,
)

REPORT_KEY = "kvcmas"


def after_validate_one_request(result: None, manager: Any, obj: Any, input_ids: list[int]) -> None:
    """After ``TokenizerManager._validate_one_request``: check the hint, and turn its marks into tokens.

    Raises `HintError` (a ValueError, which SGLang answers with HTTP 400).
    """
    envelope = getattr(obj, "kv_hints", None)
    if envelope is None or get_memory().radix_cache_backend != RADIX_CACHE_BACKEND:
        return
    hint = find_hint(envelope)
    if hint is None or hint == OPT_OUT:
        return
    config = published_config()
    for field in OVERRIDES:
        if getattr(hint, field) is not None and not (config and config.allow_overrides):
            raise HintError(
                f"{field} is {getattr(hint, field)!r}, but this server runs without --kvcmas-allow-overrides."
            )
    if hint.estimator is not None and config is not None and hint.estimator not in config.estimators:
        raise HintError(f"estimator is {hint.estimator!r}, but this server keeps {', '.join(config.estimators)}.")
    if obj.contains_mm_input():
        _check_media(manager, obj, input_ids)
    if hint.unit == "char":
        hint = _in_tokens(manager, obj, hint, input_ids)
    check_range(hint, len(input_ids), "tokens")
    obj.kv_hints = _with_payload(envelope, hint)


async def around_wait_one_response(
    original: Callable[..., AsyncIterator[Any]], manager: Any, *args: Any, **kwargs: Any
) -> AsyncIterator[Any]:
    """Around ``TokenizerManager._wait_one_response``: one report per request, not a list as for each token."""
    async for out in original(manager, *args, **kwargs):
        meta_info = out.get("meta_info", {})
        report = meta_info.get(REPORT_KEY)
        if isinstance(report, list):
            # Incremental streams cut per-token lists: only their first chunk still holds the report.
            if report:
                meta_info[REPORT_KEY] = report[0]
            else:
                del meta_info[REPORT_KEY]
        yield out


def _check_media(manager: Any, obj: Any, input_ids: list[int]) -> None:
    """Raise `HintError` for media that agents cannot share, or whose places in the prompt are not what they seem."""
    from sglang.srt.managers.io_struct import has_valid_data

    if has_valid_data(obj.audio_data):
        raise HintError(f"{ACTION_TYPE} is not supported for prompts with audio.")
    if getattr(obj, "mm_hashes", None):
        raise HintError(f"mm_hashes is not supported with {ACTION_TYPE}: pictures are told by their pixels.")
    if any(isinstance(picture, dict) for picture in obj.image_data or ()):
        raise HintError(f"image_data holds a processed picture, but {ACTION_TYPE} takes picture files only.")
    config = manager.model_config.hf_config
    if not any(name.startswith("Llava") and name.endswith("ForCausalLM") for name in config.architectures):
        return
    # SGLang puts a LLaVA picture without a placeholder in the place of the prompt's first token.
    marks, given = input_ids.count(config.image_token_index), len(obj.image_data or ())
    if given > 1 and not {"multi-images", "video"} & set(_listed(obj.modalities)):
        raise HintError(
            f"image_data holds {given} pictures, but this model reads only the first unless modalities is "
            "['multi-images'] or ['video']."
        )
    if marks != given:
        raise HintError(f"the prompt has {marks} placeholders for pictures, but image_data holds {given}.")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _in_tokens(manager: Any, obj: Any, hint: AgentHint, input_ids: list[int]) -> AgentHint:
    text = obj.text
    if not isinstance(text, str):
        raise HintError("unit is 'char', but the request has no text: mark spans of input_ids in tokens.")
    check_range(hint, len(text), "characters")
    return replace(hint, unit="token", spans=_token_spans(manager, text, input_ids, hint.spans))


def _token_spans(manager: Any, text: str, input_ids: list[int], spans: tuple[Span, ...]) -> tuple[Span, ...]:
    tokenizer = manager.tokenizer
    if not getattr(tokenizer, "is_fast", False):
        raise HintError("unit is 'char', but this model's tokenizer reports no offsets: mark spans in tokens.")
    encoding = tokenizer(text, return_offsets_mapping=True)
    in_tokens = to_token_spans(spans, encoding["offset_mapping"])
    if list(encoding["input_ids"]) == list(input_ids):
        return in_tokens
    # Most multimodal processors put all tokens of a picture into the prompt themselves.
    placeholder = getattr(getattr(manager.mm_processor, "mm_tokens", None), "image_token_id", None)
    places = None if placeholder is None else find_places(encoding["input_ids"], input_ids, placeholder)
    if places is None:
        raise HintError("unit is 'char', but the prompt's tokens are not those of its text: mark spans in tokens.")
    return grown(in_tokens, places)


def _with_payload(envelope: KvHintsEnvelope, hint: AgentHint) -> KvHintsEnvelope:
    actions = [
        msgspec.structs.replace(action, payload=hint.payload()) if action.action_type == ACTION_TYPE else action
        for action in envelope.actions
    ]
    return msgspec.structs.replace(envelope, actions=actions)
