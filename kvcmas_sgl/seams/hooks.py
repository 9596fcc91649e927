"""Which hooks go where, and whether all of them took.

SGLang swallows the errors of a plugin and of a hook; `check_complete` is where they come to light.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_OPENAI = "sglang.srt.entrypoints.openai"


class PluginError(RuntimeError):
    """Part of the plugin did not load; serving without it would be silently wrong."""


_registered: set[str] = set()


def register(target: str, hook: Callable[..., Any], kind: HookType) -> None:
    """Register a hook on SGLang's ``target`` (dotted path) once; `apply_hooks` of SGLang's registry applies it."""
    if target not in _registered:
        _registered.add(target)
        HookRegistry.register(target, hook, kind)


def extend_server() -> None:
    """Register and apply what a server with kvcmas needs; idempotent."""
    from kvcmas_sgl.seams import admission, forward, openai, persistence, scheduler, tokenizer

    register(f"{_TOKENIZER}._validate_one_request", tokenizer.after_validate_one_request, HookType.AFTER)
    register(f"{_TOKENIZER}._wait_one_response", tokenizer.around_wait_one_response, HookType.AROUND)
    register(f"{_SCHEDULER}._create_generation_req", scheduler.after_create_generation_req, HookType.AFTER)
    register(f"{_SCHEDULER}._maybe_compute_mrope_positions", scheduler.after_padding, HookType.AFTER)
    register(f"{_SCHEDULER}.on_idle", scheduler.around_on_idle, HookType.AROUND)
    register(f"{_SCHEDULER}.get_internal_state", scheduler.after_get_internal_state, HookType.AFTER)
    register(f"{_WEIGHTS}.record_weight_version_after_update", scheduler.after_weight_update, HookType.AFTER)
    register(f"{_SCHEDULER}.set_internal_state", scheduler.around_set_internal_state, HookType.AROUND)
    register(
        f"{_STREAMER}.is_request_level_customized_info_key",
        scheduler.after_is_request_level_key,
        HookType.AFTER,
    )
    register(f"{_SCHEDULER}.run_event_loop", persistence.around_run_event_loop, HookType.AROUND)
    # Weights from tensors or from another process arrive between the begin and the end of an update.
    for update in ("update_weights_from_disk", "update_weights_from_ipc", "begin_weight_update"):
        register(f"{_WEIGHTS}.{update}", persistence.before_weight_update, HookType.BEFORE)
    register("sglang.srt.entrypoints.engine.Engine.shutdown", persistence.around_engine_shutdown, HookType.AROUND)
    register(f"{_ADDER}.add_one_req", admission.around_add_one_req, HookType.AROUND)
    register(f"{_ADDER}.add_chunked_req", admission.around_add_chunked_req, HookType.AROUND)
    register(f"{_RUNNER}.forward", forward.around_forward, HookType.AROUND)
    chat = f"{_OPENAI}.serving_chat.OpenAIServingChat"
    completion = f"{_OPENAI}.serving_completions.OpenAIServingCompletion"
    register(f"{_OPENAI}.serving_base.OpenAIServingBase.handle_request", openai.around_handle_request, HookType.AROUND)
    register(f"{_TOKENIZER}.generate_request", openai.around_generate_request, HookType.AROUND)
    register(f"{chat}._convert_to_internal_request", openai.around_convert_chat, HookType.AROUND)
    register(f"{chat}._render_and_encode_chat_template", openai.around_render, HookType.AROUND)
    register(f"{completion}._convert_to_internal_request", openai.around_convert_completion, HookType.AROUND)
    HookRegistry.apply_hooks()


def check_complete() -> None:
    """Raise `PluginError` unless every hook that was registered was applied, the server's among them."""
    missing = sorted(_registered - HookRegistry._patched)
    if missing:
        raise PluginError(f"kvcmas could not extend {missing[0]}: this SGLang version is not supported.")
    if f"{_SCHEDULER}.on_idle" not in _registered:
        raise PluginError("kvcmas is selected, but its plugin did not load: see the log above for the reason.")
