"""Seam: SGLang's radix-cache registry. Builds our cache for the pool and the model at hand."""

from __future__ import annotations

import functools
import logging
from typing import Any

from kvcmas_sgl.config import KvcmasConfig, published_config

logger = logging.getLogger(__name__)


def create(ctx: Any) -> Any:
    """The factory that ``--radix-cache-backend kvcmas`` names; ``ctx`` is a ``TreeCacheBuildContext``."""
    from sglang.srt.mem_cache.registry import create_unified_radix_cache
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    from kvcmas_sgl import metrics
    from kvcmas_sgl.radix_ext.cache import DeltaRadixCache
    from kvcmas_sgl.radix_ext.node_marks import DeltaFullComponent
    from kvcmas_sgl.seams import hooks, images, persistence
    from kvcmas_sgl.seams.ranks import ranks_of

    hooks.extend_server()
    hooks.check_complete()
    config = published_config() or KvcmasConfig()
    pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    view = _view(pool, rotary_table(ctx.tp_worker.model_runner.model), config)
    ctx.params.component_registry_override = {ComponentType.FULL: DeltaFullComponent}
    cache = create_unified_radix_cache(
        ctx,
        cache_class=functools.partial(
            DeltaRadixCache, config=config, view=view, ranks=ranks_of(ctx.params.tp_cache_group, ctx.tp_size)
        ),
    )
    ctx.tp_worker.model_runner.kvcmas_cache = cache
    images.count_encoded(ctx.tp_worker.model_runner.model, cache.statistics)
    if ctx.params.enable_metrics and ctx.tp_rank == 0:
        metrics.export(cache)
    persistence.restore(cache, ctx.tp_worker.model_runner.model)
    logger.info(
        "kvcmas is active: %s; layers=%d kv_heads=%d head_dim=%d dtype=%s corrections=%s",
        config.summary(),
        view.layers,
        view.kv_heads,
        view.head_dim,
        view.dtype,
        view.backend,
    )
    return cache


def _view(pool: Any, table: Any, config: KvcmasConfig) -> Any:
    """The pool with the backend that was chosen for it; kernels are compiled, checked and (on a GPU that no server has
    met before) tuned now, not in a request.

    Raises `UnsupportedSetupError` when the operator's choice cannot be used.
    """
    import torch

    from kvcmas_sgl.radix_ext.kv_view import KVView
    from kvcmas_sgl.support import UnsupportedSetupError
    from kvcmas_sgl.triton_kernels import backend_for, triton_start

    first = pool.k_buffer[0]
    try:
        name = backend_for(first.device, first.dtype, first.shape[1], first.shape[2], config.backend)
    except ValueError as error:
        raise UnsupportedSetupError(f"--kvcmas-backend is {config.backend!r}, but {error}.") from error
    if name == "triton":
        gpu = torch.cuda.get_device_name(first.device)
        # No request has been served yet, so every slot is free.
        triton_start.tune_pool(pool.k_buffer, pool.v_buffer, table, own_rank=config.own_rank, rank=config.rank, gpu=gpu)
    return KVView(pool.k_buffer, pool.v_buffer, table, name)


def rotary_table(model: Any) -> Any:
    """The rotary table that the model's layers use.

    Raises `UnsupportedSetupError` when they use none, several, or one that is more than a rotation.
    """
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    from kvcmas_sgl.support import UnsupportedSetupError
    from kvcmas_sgl.triton_kernels import RotaryTable

    # SGLang shares one module among layers; classes that are no RotaryEmbedding still carry the word in their name.
    found = {id(m): m for m in model.modules() if "RotaryEmbedding" in type(m).__name__}
    if len(found) != 1:
        raise UnsupportedSetupError(
            f"the model has {len(found)} rotary embeddings, but --enable-kvcmas needs exactly one for all layers."
        )
    (module,) = found.values()
    name = type(module).__name__
    if not isinstance(module, RotaryEmbedding) or getattr(module, "mrope_section", None) is not None:
        raise UnsupportedSetupError(f"{name} is not supported by --enable-kvcmas: it is not one-dimensional RoPE.")
    try:
        return RotaryTable.from_cos_sin_cache(module.cos_sin_cache, is_neox=module.is_neox_style)
    except ValueError as error:
        raise UnsupportedSetupError(f"{name} is not supported by --enable-kvcmas: {error}") from error
