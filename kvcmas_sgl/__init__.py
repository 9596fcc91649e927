"""Agents that share one LLM share its KV cache: corrected reuse of shared spans on SGLang."""

from __future__ import annotations

from typing import Any

from kvcmas_sgl.config import RADIX_CACHE_BACKEND, ConfigError, KvcmasConfig
from kvcmas_sgl.wire import AgentHint, HintError, agent_hint

__all__ = ["AgentHint", "ConfigError", "HintError", "KvcmasConfig", "agent_hint", "engine_args"]


def engine_args(**settings: Any) -> dict[str, Any]:
    """Keyword arguments for ``sgl.Engine`` that switch kvcmas on.

    Parameters are the fields of `KvcmasConfig`; raises `ConfigError` on a bad one. The settings travel to the
    engine's child processes in the environment, so start the engine right after::

        engine = sgl.Engine(model_path=path, **kvcmas_sgl.engine_args(max_kl=0.01))

    On a machine without a GPU, call `kvcmas_sgl.cpu.environment.prepare_environment` before importing sglang.
    """
    KvcmasConfig.from_mapping(settings).publish()
    return {"radix_cache_backend": RADIX_CACHE_BACKEND}
