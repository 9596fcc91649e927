"""Puts the parts that learn together, on a cache that has everything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from kvcmas_sgl.radix_ext.audit import Auditor
from kvcmas_sgl.radix_ext.checks import Checker, Held
from kvcmas_sgl.radix_ext.harvest import Harvester
from kvcmas_sgl.radix_ext.lessons import Lessons, audits_wanted
from kvcmas_sgl.radix_ext.predictor import Predictor
from kvcmas_sgl.radix_ext.ranks import Ranks

if TYPE_CHECKING:
    from kvcmas_sgl.radix_ext.cache import DeltaRadixCache
    from sglang.srt.mem_cache.base_prefix_cache import TreeLock


def make_lessons(cache: DeltaRadixCache, predictor: Predictor, ranks: Ranks) -> Lessons:
    """What teaches the estimators and the gate of ``cache``, whose tree, pool, gate and learner are there."""
    config, allocator = cache.config, cache.token_to_kv_pool_allocator

    def take_free(count: int) -> torch.Tensor | None:
        """Slots for a while, without evicting anything."""
        return allocator.alloc(count).to(torch.int64) if allocator.available_size() >= count else None

    def hold_path(node: int) -> tuple[Held, TreeLock | None] | None:
        """Pin the path to a node on which KV was corrected; None when there is none."""
        exact = None if cache.spans.node(node) is None else cache.spans.exact_length(node)
        if exact is None:
            return None
        return Held(cache.path_device_indices(node), exact), cache.lock(node)

    harvester = Harvester(
        cache.view,
        predictor,
        cache.gate,
        cache.statistics,
        own_rank=config.own_rank,
        own_energy=config.own_energy,
        audited=config.estimator,
        slots_of=cache.spans.slots,
        attach=cache.spans.attach,
        ranks=ranks,
    )
    auditor = Auditor(
        cache.view,
        predict=lambda base, consumer, n: predictor.delta(config.estimator, base, consumer.agent, n),
        wanted=audits_wanted(cache.gate, config.estimator, lambda: cache.switches.max_kl),
        slots_of=cache.spans.slots,
        path_of=cache.spans.path,
        allocate=take_free,
        free=allocator.free,
        ranks=ranks,
    )
    checker = Checker(
        share=config.check_share,
        estimator=config.estimator,
        budget=lambda: cache.switches.max_kl,
        gate=cache.gate,
        auditor=auditor,
        harvester=harvester,
        statistics=cache.statistics,
        hold=hold_path,
        release=cache.unlock,
        allocate=take_free,
        free=allocator.free,
    )
    return Lessons(harvester, auditor, checker, cache.learner, cache.statistics, cache.spans.path, ranks)
