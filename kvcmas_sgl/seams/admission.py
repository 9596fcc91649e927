"""Seam: the scheduler's prefill budget. Tokens that will be corrected are not charged as if they were computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcmas_sgl.radix_ext.cache import DeltaRadixCache, agent_request


def around_add_one_req(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``PrefillAdder.add_one_req``: admit an agent request by what it has to compute.

    Memory is budgeted as ever, and with the sources of the correction pinned. Where they leave no room for the request,
    it is offered once more without reuse, so that its own sources may be evicted for it.
    """
    cache, request = adder.tree_cache, agent_request(req)
    if request is None or not isinstance(cache, DeltaRadixCache):
        return original(adder, req, *args, **kwargs)
    cache.hold(req)
    corrected = request.corrected_ahead(req.prefix_len, adder.rem_chunk_tokens)
    _credit(adder, corrected)
    result = original(adder, req, *args, **kwargs)
    if _admitted(adder, req):
        _credit(adder, request.corrected_within(req.prefix_len, req.extend_end) - corrected)
        cache.admit(req)
        return adder.budget_state()
    _credit(adder, -corrected)
    cache.release(req)
    if not request.pieces or result.name != "NO_TOKEN":
        return result
    request.pieces = []
    result = original(adder, req, *args, **kwargs)
    if _admitted(adder, req):
        cache.admit(req)
    return result


def around_add_chunked_req(original: Callable[..., Any], adder: Any, req: Any) -> Any:
    """Around ``PrefillAdder.add_chunked_req``: the same for a further chunk of a prompt.

    SGLang takes a whole chunk where it counts no memory at all, since the request must go on. So where the pinned
    sources are the memory that is left, they are let go, and what they were for is computed.
    """
    cache, request = adder.tree_cache, agent_request(req)
    if request is None or not isinstance(cache, DeltaRadixCache):
        return original(adder, req)
    cache.continue_plan(req)
    cache.hold(req)
    if request.held and adder.memory_budget.remaining_total <= 0:
        cache.release(req)
        request.pieces = []
    corrected = request.corrected_ahead(req.prefix_len, adder.rem_chunk_tokens)
    _credit(adder, corrected)
    result = original(adder, req)
    if _admitted(adder, req):
        _credit(adder, request.corrected_within(req.prefix_len, req.extend_end) - corrected)
        cache.admit(req)
    else:
        _credit(adder, -corrected)
        cache.release(req)
    return result


def _admitted(adder: Any, req: Any) -> bool:
    return bool(adder.can_run_list) and adder.can_run_list[-1] is req


def _credit(adder: Any, tokens: int) -> None:
    adder.rem_input_tokens += tokens
    if adder.rem_chunk_tokens is not None:
        adder.rem_chunk_tokens += tokens
