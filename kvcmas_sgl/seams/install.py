"""Which hooks go where, and whether all of them took.

SGLang swallows the errors of a plugin and of a hook; `check_complete` is where they come to light.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvcmas_sgl.config import RADIX_CACHE_BACKEND

_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


class PluginError(RuntimeError):
    """Part of the plugin did not load; serving without it would be silently wrong."""


def extend_arguments() -> None:
    """Register what every process gets: the flags, the cache backend's name, the CPU attention backend."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend, registered_radix_cache_backends

    from kvcmas_sgl.cpu import attention
    from kvcmas_sgl.seams import arguments, cache_factory

    if RADIX_CACHE_BACKEND not in registered_radix_cache_backends():
        register_radix_cache_backend(RADIX_CACHE_BACKEND, cache_factory.create)
    attention.register()
    _register(f"{_SERVER_ARGS}.add_cli_args", arguments.after_add_cli_args, HookType.AFTER)
    _register(f"{_SERVER_ARGS}.from_cli_args", arguments.before_from_cli_args, HookType.BEFORE)
    _register(f"{_SERVER_ARGS}.check_server_args", arguments.after_check_server_args, HookType.AFTER)


def extend_server() -> None:
    """Register and apply what a server with kvcmas needs; idempotent."""
    from kvcmas_sgl.seams import scheduler, tokenizer

    _register(f"{_TOKENIZER}._validate_one_request", tokenizer.after_validate_one_request, HookType.AFTER)
    _register(f"{_TOKENIZER}._wait_one_response", tokenizer.around_wait_one_response, HookType.AROUND)
    _register(f"{_SCHEDULER}._create_generation_req", scheduler.after_create_generation_req, HookType.AFTER)
    _register(f"{_SCHEDULER}.on_idle", scheduler.around_on_idle, HookType.AROUND)
    _register(f"{_SCHEDULER}.get_internal_state", scheduler.after_get_internal_state, HookType.AFTER)
    _register(
        f"{_STREAMER}.is_request_level_customized_info_key",
        scheduler.after_is_request_level_key,
        HookType.AFTER,
    )
    HookRegistry.apply_hooks()


def check_complete() -> None:
    """Raise `PluginError` unless every hook that was registered was applied, the server's among them."""
    missing = [target for target in _registered if target not in HookRegistry._patched]
    if missing:
        raise PluginError(f"kvcmas could not extend {missing[0]}: this SGLang version is not supported.")
    if f"{_SCHEDULER}.on_idle" not in _registered:
        raise PluginError("kvcmas is selected, but its plugin did not load: see the log above for the reason.")


_registered: dict[str, Callable[..., Any]] = {}


def _register(target: str, hook: Callable[..., Any], kind: HookType) -> None:
    if target not in _registered:
        _registered[target] = hook
        HookRegistry.register(target, hook, kind)
