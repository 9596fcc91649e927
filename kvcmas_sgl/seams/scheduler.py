"""Seam: the scheduler process. Agent requests get their namespace; idle time is spent on learning."""

from __future__ import annotations

import logging
import secrets
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvcmas_sgl.config import ConfigError
from kvcmas_sgl.radix_ext.images import NO_IMAGES, Images
from kvcmas_sgl.radix_ext.request import AgentRequest
from kvcmas_sgl.radix_ext.sources import digest, scope_digest
from kvcmas_sgl.seams.images import count_encoded, expanded, read_images
from kvcmas_sgl.seams.tokenizer import REPORT_KEY
from kvcmas_sgl.switches import PREFIX
from kvcmas_sgl.wire import OPT_OUT, AgentHint, HintError, check_range, find_hint

if TYPE_CHECKING:
    from kvcmas_sgl.radix_ext.cache import DeltaRadixCache

logger = logging.getLogger(__name__)

# Unguessable, so that no client can name an agent's namespace in its own `extra_key`.
_NAMESPACE = f"kvcmas:{secrets.token_hex(16)}:"
_AUTO = "auto"

STATE_KEY = "kvcmas"
"""Where our totals are in SGLang's internal state."""


def after_create_generation_req(req: Any, scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any) -> None:
    """After ``Scheduler._create_generation_req``: bind the hint, and move the request to its role's namespace.

    A request with pictures is bound once SGLang has made room for their tokens (`after_padding`).
    """
    cache = _cache(scheduler)
    if cache is None or cache.switches.mode == "off":
        return
    hint = _hint(req)
    if hint is OPT_OUT or (hint is None and not cache.config.auto) or not _is_plain(recv_req, req):
        return
    if recv_req.mm_inputs is not None:
        req.kvcmas_hint = hint
    else:
        _bind(cache, req, hint, NO_IMAGES)


def after_padding(result: None, scheduler: Any, req: Any) -> None:
    """After ``Scheduler._maybe_compute_mrope_positions``: bind what `after_create_generation_req` left.

    SGLang calls it for requests with pictures only, right when these have their tokens.
    """
    cache = _cache(scheduler)
    if cache is None or not hasattr(req, "kvcmas_hint"):
        return
    hint: AgentHint | None = req.kvcmas_hint
    del req.kvcmas_hint
    try:
        images = read_images(req.multimodal_inputs, array("q", req.origin_input_ids))
        if images is None:
            return
        if hint is not None:
            hint = replace(hint, spans=expanded(hint.spans, len(req.origin_input_ids_unpadded), images))
    except Exception:
        cache.failed(None, "reading the pictures of a prompt")
        return
    _bind(cache, req, hint, images)


def _bind(cache: DeltaRadixCache, req: Any, hint: AgentHint | None, images: Images) -> None:
    try:
        scope = scope_digest(req.extra_key, req.cache_salt)
        request = AgentRequest.of(hint, array("q", req.origin_input_ids), scope, images)
    except Exception:
        cache.failed(None, "binding a hint")
        return
    req.kvcmas = request
    namespace = _AUTO if hint is None else digest(hint.role.encode())
    req.extra_key = f"{_NAMESPACE}{namespace}:{req.extra_key or ''}"
    req.customized_info = {REPORT_KEY: request.info}


def _hint(req: Any) -> AgentHint | None:
    if req.kv_hints is None:
        return None
    try:
        hint = find_hint(req.kv_hints)
        if hint is not None:
            check_range(hint, len(req.origin_input_ids), "tokens")
        return hint
    except HintError as error:
        # The tokenizer process refuses these; what still comes here came by another door.
        logger.warning("kvcmas: the agent hint of request %s is ignored: %s", req.rid, error)
        return OPT_OUT


def _is_plain(recv_req: Any, req: Any) -> bool:
    """Whether a prompt's tokens and pictures alone decide its KV, and nobody asks for more than its last logits."""
    media = getattr(recv_req.mm_inputs, "mm_items", ())
    return (
        not any(item.is_audio() for item in media)
        and req.input_embeds is None
        and req.positional_embed_overrides is None
        and not req.return_hidden_states
        and req.session is None
    )


def around_on_idle(original: Callable[[Any], None], scheduler: Any) -> None:
    """Around ``Scheduler.on_idle``: one learning step an idle round, and a save when it is time; sleep only when there
    is no step left."""
    cache = _cache(scheduler)
    if cache is not None and cache.keeper is not None:
        cache.keeper.tick()
    if cache is None or not scheduler.is_fully_idle() or not cache.learner.step():
        original(scheduler)


def after_weight_update(result: None, updater: Any, *args: Any) -> None:
    """After ``record_weight_version_after_update``, with which every update of weights ends: what was learned is void.

    So is what was learned since it began. The flush that usually follows drops the KV too; where the client declined
    it, or requests run, SGLang keeps that.
    """
    cache = _cache(updater.scheduler)
    if cache is not None:
        cache.forget()
        # LLaVA makes another vision tower when it loads weights.
        runner = getattr(updater.scheduler.tp_worker, "model_runner", None)
        count_encoded(getattr(runner, "model", None), cache.statistics)


def after_get_internal_state(result: Any, scheduler: Any, *args: Any) -> None:
    """After ``Scheduler.get_internal_state``: our totals, under ``kvcmas`` in ``/server_info``."""
    cache = _cache(scheduler)
    if cache is None:
        return
    try:
        result.internal_state[STATE_KEY] = cache.state()
    except Exception:
        # Whoever asks for totals must not end the scheduler.
        cache.statistics.failed("reading the totals", "the answer comes without them")


def around_set_internal_state(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Around ``Scheduler.set_internal_state``: a message that holds only our switches is ours."""
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    cache, numbers = _cache(scheduler), recv_req.server_args
    if cache is None or not numbers or not all(name.startswith(PREFIX) for name in numbers):
        return original(scheduler, recv_req)
    try:
        cache.switch(cache.switches.changed(numbers))
    except ConfigError as error:
        logger.warning("kvcmas: the settings stay as they are: %s", error)
        return SetInternalStateReqOutput(updated=False)
    return SetInternalStateReqOutput(updated=True)


def after_is_request_level_key(result: bool, streamer: Any, key: str) -> bool:
    """After ``is_request_level_customized_info_key``: our report is one per request, not one per token."""
    return result or key == REPORT_KEY


def _cache(scheduler: Any) -> DeltaRadixCache | None:
    from kvcmas_sgl.radix_ext.cache import DeltaRadixCache

    cache = getattr(scheduler, "tree_cache", None)
    return cache if isinstance(cache, DeltaRadixCache) else None
