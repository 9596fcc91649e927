"""DeltaRadixCache: SGLang's radix cache, with corrected reuse of shared spans for agent requests.

It stands in four of the base class's steps and leaves the rest alone:

``match_prefix``    after the exact match: promise the span's tokens when the gate admits a correction;
``init_load_back``  deliver the promise: allocate, correct into the slots, insert with its provenance;
``checkpoint``      publish the span as a source, and queue what a dense run can teach;
``reset``           forget everything that was learned, with the tree.

A request without an agent hint passes straight through. Any failure ends in a dense prefill and is counted.
"""

from __future__ import annotations

import logging
import time
from array import array
from typing import TYPE_CHECKING, Any

import torch
from kvcmas_sgl.radix_ext.decision import Plan, Reason
from kvcmas_sgl.radix_ext.estimators import ESTIMATORS, make_estimator
from kvcmas_sgl.radix_ext.gate import Gate
from kvcmas_sgl.radix_ext.harvest import Harvester, HarvestJob
from kvcmas_sgl.radix_ext.kv_view import KVView
from kvcmas_sgl.radix_ext.learner import Learner
from kvcmas_sgl.radix_ext.node_marks import (
    DeltaFullComponent,
    Provenance,
    mark_corrected,
    mark_exact,
    provenance,
)
from kvcmas_sgl.radix_ext.planner import Planner
from kvcmas_sgl.radix_ext.request import AgentRequest
from kvcmas_sgl.radix_ext.sources import Source, SourceIndex
from kvcmas_sgl.radix_ext.span_tree import SpanTree
from kvcmas_sgl.radix_ext.statistics import Statistics
from kvcmas_sgl.triton_kernels import Segment
from kvcmas_sgl.triton_kernels import plan as plan_correction
from kvcmas_sgl.triton_kernels import run as run_correction
from sglang.srt.mem_cache.base_prefix_cache import (
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvcmas_sgl.config import KvcmasConfig

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_radix_cache import NodeId

logger = logging.getLogger(__name__)

MAX_BASES = 3
"""Sources that one dense run is learned against: the work per run must not grow with the number of agents."""


class DeltaRadixCache(UnifiedRadixCache):
    """See the module's docstring.

    Parameters
    ----------
    params
        SGLang's; its component registry must map FULL to `DeltaFullComponent`.
    config
        The operator's settings.
    view
        The pool that ``params`` allocates from, with the model's rotary table.
    """

    def __init__(self, params: CacheInitParams, *, config: KvcmasConfig, view: KVView) -> None:
        self.config = config
        self.view = view
        self.sources = SourceIndex()
        self.gate = Gate(config.max_kl)
        self.statistics = Statistics()
        # A request that may choose its estimator must find it learned.
        names = ESTIMATORS if config.allow_overrides else (config.estimator,)
        shape = {"layers": view.layers, "kv_heads": view.kv_heads, "head_dim": view.head_dim}
        self.estimators = {name: make_estimator(name, rank=config.rank, **shape) for name in names}
        super().__init__(params)
        component = self.components[ComponentType.FULL]
        assert isinstance(component, DeltaFullComponent)
        component.on_gone = self.sources.node_gone
        self.deltas = component.store
        self.spans = SpanTree(self, self.deltas)
        self._planner = Planner(self.estimators, config.estimator, self.gate, self.spans.own_rows)
        harvester = Harvester(
            view,
            self.estimators,
            self.gate,
            own_rank=config.own_rank,
            slots_of=self.spans.slots,
            attach=self.spans.attach,
        )
        self.learner = Learner(harvester, self.estimators, self.gate, self.deltas, self.statistics, config.state_bytes)

    def reset(self) -> None:
        super().reset()
        self.sources.clear()
        # The base class resets once while it is built.
        if hasattr(self, "learner"):
            self.learner.clear()

    # ---- match ----

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        result = super().match_prefix(params)
        request = _agent_request(params.req)
        if request is None or self.disable:
            return result
        started = time.perf_counter()
        request.plan = None
        try:
            return self._promise(request, result, len(params.key))
        except Exception:
            self._failed(request, "match")
            return result
        finally:
            self.statistics.match_seconds += time.perf_counter() - started

    def _promise(self, request: AgentRequest, result: MatchResult, limit: int) -> MatchResult:
        """Extend the exact match by what can be corrected. ``limit`` is the longest prefix that may match."""
        declined = request.hint.reuse == "never" or self._policy(request) == "learn"
        corrected_from = self.spans.exact_length(result.last_device_node)
        if corrected_from is not None and declined:
            result = self.spans.cut(result, corrected_from)
            corrected_from = None
        have = result.device_prefix_len
        corrected = 0 if corrected_from is None else have - corrected_from
        if not request.settled:
            request.report.exact_tokens = have - corrected
            request.report.corrected_tokens = corrected
        stop = min(request.stop, limit)
        reason = self._why_not(request, have, stop, corrected_from is not None, declined)
        if reason is not None:
            self._decide(request, reason, result.last_device_node if corrected else None)
            return result
        assert request.content is not None
        sources = [
            source
            for source in self.sources.lookup(request.content)
            if source.agent != request.agent and self.spans.node(source.node) is not None
        ]
        choice = self._planner.plan(
            request.agent,
            sources,
            estimator=request.hint.estimator if self.config.allow_overrides else None,
            always=self._policy(request) == "always",
        )
        if not isinstance(choice, Plan):
            self._decide(request, choice.reason)
            if not request.settled:
                request.report.predicted_error, request.report.predicted_kl = choice.error, choice.kl
            return result
        request.plan = choice
        return result._replace(
            host_hit_length=stop - have,
            best_match_node=result.last_device_node,
            last_host_node=result.last_device_node,
        )

    def _why_not(self, request: AgentRequest, have: int, stop: int, approximate: bool, declined: bool) -> Reason | None:
        """The reason why nothing needs to be, or can be, corrected; None when sources should be asked."""
        if request.content is None:
            return Reason.NO_SPAN
        if have >= stop:
            return Reason.OWN_CORRECTED if approximate else Reason.EXACT
        if declined:
            return Reason.DECLINED
        if request.stop - request.start < self.config.min_span:
            return Reason.TOO_SHORT
        if have < request.start:
            return Reason.PREFIX_NOT_RESIDENT
        return None

    def _policy(self, request: AgentRequest) -> str:
        override = request.hint.policy if self.config.allow_overrides else None
        return override or self.config.policy

    # ---- load ----

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, NodeId] | None:
        request = _agent_request(params.req)
        if request is None or request.plan is None:
            return super().init_load_back(params)
        plan, request.plan = request.plan, None
        started = time.perf_counter()
        req = params.req
        assert req is not None
        try:
            loaded = self._place(req, request, plan, params.host_hit_length)
        except Exception:
            self._failed(request, "correction")
            return 0, req.last_node
        finally:
            self.statistics.place_seconds += time.perf_counter() - started
        if loaded is None:
            self._decide(request, Reason.NO_ROOM)
            return 0, req.last_node
        if not request.settled:
            report = request.report
            report.exact_tokens += params.host_hit_length if plan.exact else 0
            report.corrected_tokens += 0 if plan.exact else params.host_hit_length
            report.source, report.estimator = plan.source.agent.role, plan.estimator
            report.predicted_error, report.predicted_kl = plan.error, plan.kl
        self._decide(request, Reason.REUSED)
        return params.host_hit_length, loaded

    def _place(self, req: Req, request: AgentRequest, plan: Plan, count: int) -> NodeId | None:
        """Correct ``count`` tokens into new slots and insert them; None when no slots can be had."""
        have = req.prefix_len
        if self.spans.node(plan.source.node) is None:
            return None
        lock = self.lock(plan.source.node)
        try:
            slots = self._allocate(count)
            if slots is None:
                return None
            try:
                self._correct(request, plan, slots, have)
            except BaseException:
                self.token_to_kv_pool_allocator.free(slots)
                raise
        finally:
            self.unlock(lock)
        prefix = self.path_device_indices(req.last_node)[:have]
        result = self.insert(
            InsertParams(
                key=_key(req, req.full_untruncated_fill_ids, have + count),
                value=torch.cat([prefix, slots.to(torch.int64)]),
                prev_prefix_len=have,
                inserted_len=have,
                priority=req.priority or 0,
            )
        )
        assert result.prefix_len == have, (result.prefix_len, have)
        if not plan.exact:
            mark_corrected(
                self.tree_core.node_by_id(result.last_device_node),
                Provenance(plan.source.agent.role, plan.estimator, plan.error),
            )
        return result.last_device_node

    def _correct(self, request: AgentRequest, plan: Plan, slots: torch.Tensor, have: int) -> None:
        offset = have - request.start
        source = self.spans.slots(plan.source)
        assert source is not None
        segment = Segment(
            source_slots=source[offset : offset + slots.shape[0]],
            target_slots=slots.to(torch.int64),
            source_start=plan.source.start + offset,
            target_start=have,
            offset=offset,
            delta=self._planner.delta(plan, request.agent),
        )
        batch = plan_correction([segment], self.view.table, head_dim=self.view.head_dim, kv_heads=self.view.kv_heads)
        run_correction(batch, self.view.k_buffers, self.view.v_buffers)

    def _allocate(self, count: int) -> torch.Tensor | None:
        evict_from_tree_cache(self, count)
        return self.token_to_kv_pool_allocator.alloc(count)

    # ---- checkpoint ----

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        request = _agent_request(req)
        if request is None or self.disable:
            super().checkpoint(req, up_to=up_to, **kwargs)
            return
        try:
            self._replace_corrected(req, up_to)
        except Exception:
            self._failed(request, "replacing corrected KV")
        super().checkpoint(req, up_to=up_to, **kwargs)
        try:
            if not request.settled and up_to >= request.report.prompt_tokens:
                request.settled = True
                self.statistics.record(request.report)
                self._log(req, request)
            if request.content is not None and not request.published and up_to >= request.stop:
                request.published = True
                self._publish(req, request)
        except Exception:
            self._failed(request, "checkpoint")
        if self.learner.behind:
            self.learner.step()

    def _replace_corrected(self, req: Req, up_to: int) -> None:
        """Put a dense run's KV into the slots of corrected KV that the tree holds for the same tokens.

        Such KV is there when the request declined it, or when another request of the role was corrected while this
        one was computing. The insert that follows keeps the tree's slots and frees the request's, as it does for any
        duplicate.
        """
        if self.spans.exact_length(req.last_node) is not None:
            # Computed on top of corrected KV: no better than what it would replace.
            return
        protected = req.kv.cache_protected_len
        match = self._match_tree(MatchPrefixParams(key=_key(req, req.full_untruncated_fill_ids, up_to)))
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        stop, node = match.device_prefix_len, self.tree_core.node_by_id(match.last_device_node)
        while stop > protected:
            start = stop - len(node.key)
            if provenance(node) is not None:
                kept = node.component_data[ComponentType.FULL].value
                self.view.copy_rows(row[start:stop].to(torch.int64), kept)
                mark_exact(node, self.deltas)
                self.sources.node_gone(node.id)
            stop, node = start, node.parent

    def _publish(self, req: Req, request: AgentRequest) -> None:
        """Make the span's KV in the tree the newest source, and queue what it can teach."""
        assert request.content is not None
        ids = req.full_untruncated_fill_ids
        path = self.path_device_indices(req.last_node)
        if path.shape[0] < request.stop:
            return
        # Cut the tree where the span starts and ends: own deltas and provenance then cover whole nodes.
        for cut in (request.start, request.stop):
            if cut:
                key = _key(req, ids, cut)
                cut_params = InsertParams(key=key, value=path[:cut], prev_prefix_len=cut, inserted_len=cut)
                node = self.insert(cut_params).last_device_node
        known = self.sources.find(request.content, request.agent)
        error = max((mark.error for mark in self.spans.marks(node)), default=None)
        source = Source(
            content=request.content,
            agent=request.agent,
            node=node,
            start=request.start,
            length=request.stop - request.start,
            error=error or 0.0,
            exact=error is None,
        )
        others = [s for s in self.sources.lookup(request.content) if s.exact and s.agent != request.agent]
        self.sources.add(source)
        news = source.exact and (known is None or not known.exact)
        if news and others and source.length >= self.config.min_span:
            self.learner.add(HarvestJob(source, tuple(others[:MAX_BASES])))

    # ---- bookkeeping ----

    def _decide(self, request: AgentRequest, reason: Reason, corrected_at: NodeId | None = None) -> None:
        if request.settled:
            return
        report = request.report
        report.reason = reason
        if corrected_at is not None:
            mark = self.spans.marks(corrected_at)[0]
            report.source, report.estimator = mark.source, mark.estimator
            report.predicted_error, report.predicted_kl = mark.error, self.gate.kl(mark.error)
        request.publish_report()

    def state(self) -> dict[str, Any]:
        """Totals and sizes, JSON-compatible."""
        return {
            **self.statistics.as_dict(),
            "learning": len(self.learner),
            "sources": len(self.sources),
            "own_deltas": len(self.deltas),
            "own_delta_bytes": self.deltas.nbytes,
            "state_bytes": self.learner.state_bytes,
            "edges": {name: len(list(estimator.edges())) for name, estimator in self.estimators.items()},
        }

    def _failed(self, request: AgentRequest | None, where: str) -> None:
        """Count an internal failure; the caller goes on with a dense prefill."""
        self.statistics.fallbacks += 1
        if request is not None:
            self._decide(request, Reason.FAILED)
        logger.exception("kvcmas: %s failed; the span is prefilled densely.", where)

    def _log(self, req: Req, request: AgentRequest) -> None:
        level = self.config.log_decisions
        if level == "all" or (level == "refused" and request.report.reason is not Reason.REUSED):
            logger.info("kvcmas: request %s %s", req.rid, request.report.as_dict())


def _agent_request(req: Req | None) -> AgentRequest | None:
    return None if req is None else getattr(req, "kvcmas", None)


def _key(req: Req, ids: array[int], length: int) -> RadixKey:
    return RadixKey(ids[:length], req.extra_key, cache_salt=req.cache_salt)
