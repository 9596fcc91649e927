"""DeltaRadixCache: SGLang's radix cache, with corrected reuse of shared spans for agent requests.

It stands in three of the base class's steps, takes part in two of the scheduler's, and leaves the rest alone:

``match_prefix``  after the exact match: plan which stretches beyond it can be corrected;
``admit``         the scheduler takes the request into a pass: hold the sources until the pass runs;
``place``         right before the forward pass: correct into the request's own slots (`placement`);
``checkpoint``    publish the spans as sources, and queue what a dense run can teach (`publisher`);
``reset``         forget everything that was learned, with the tree.

A request without an agent hint passes straight through. Any failure ends in a dense prefill and is counted.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcmas_sgl.radix_ext.agent_prefixes import AgentPrefixes
from kvcmas_sgl.radix_ext.decision import Reason
from kvcmas_sgl.radix_ext.decision_log import decision_line
from kvcmas_sgl.radix_ext.edge_table import edge_table
from kvcmas_sgl.radix_ext.estimators import make_estimator
from kvcmas_sgl.radix_ext.gate import Gate
from kvcmas_sgl.radix_ext.kv_view import KVView
from kvcmas_sgl.radix_ext.learner import Learner
from kvcmas_sgl.radix_ext.node_marks import DeltaFullComponent
from kvcmas_sgl.radix_ext.placement import Pass, Placer
from kvcmas_sgl.radix_ext.planner import Planner, Wish
from kvcmas_sgl.radix_ext.predictor import Predictor
from kvcmas_sgl.radix_ext.publisher import Publisher
from kvcmas_sgl.radix_ext.ranks import ONE_RANK, Ranks
from kvcmas_sgl.radix_ext.request import AgentRequest
from kvcmas_sgl.radix_ext.sources import SourceIndex
from kvcmas_sgl.radix_ext.span_tree import SpanTree
from kvcmas_sgl.radix_ext.state_keeper import StateKeeper
from kvcmas_sgl.radix_ext.statistics import Statistics
from kvcmas_sgl.radix_ext.wiring import make_lessons
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvcmas_sgl.config import KvcmasConfig
from kvcmas_sgl.switches import Switches

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

logger = logging.getLogger(__name__)

_ROUNDING = 1 + 1e-6
"""The KL of a piece is kept per token and summed up again."""


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
    ranks
        Those that hold the other heads of the KV.
    """

    def __init__(self, params: CacheInitParams, *, config: KvcmasConfig, view: KVView, ranks: Ranks = ONE_RANK) -> None:
        self.config = config
        self.switches = Switches.of(config)
        self.view = view
        self.sources = SourceIndex(config.min_span)
        self.prefixes = AgentPrefixes()
        self.gate = Gate()
        self.statistics = Statistics()
        self.admitted: dict[str, Req] = {}
        self.generation = 0
        """Changes whenever everything was forgotten: what a request began before it cannot be learned from."""
        shape = {"layers": view.layers, "kv_heads": view.kv_heads, "head_dim": view.head_dim}
        self.estimators = {
            name: make_estimator(name, rank=config.rank, tau=config.tau, **shape) for name in config.estimators
        }
        super().__init__(params)
        component = self.components[ComponentType.FULL]
        assert isinstance(component, DeltaFullComponent)
        component.on_gone = self.node_gone
        self.deltas = component.store
        self.spans = SpanTree(self, self.deltas)
        predictor = Predictor(self.estimators, view, self.spans.slots)
        self.planner = Planner(
            predictor,
            config.estimator,
            self.gate,
            self.spans.own_rows,
            self.spans.resident,
            self.prefixes.find,
            lambda source: self.lessons.score_now(source),
            min_span=config.min_span,
        )
        self.learner = Learner(
            self.estimators, self.gate, self.prefixes, self.deltas, self.statistics, config.state_bytes, ranks
        )
        self.lessons = make_lessons(self, predictor, ranks)
        self._placer = Placer(view, self.planner, self.spans.slots, self.statistics, ranks)
        self._publisher = Publisher(self)
        self.keeper: StateKeeper | None = None

    def reset(self) -> None:
        # The base class resets once while it is built.
        built = hasattr(self, "learner")
        if built:
            # What jobs hold goes back to the tree and the pool that are about to be emptied.
            self.learner.stop()
        super().reset()
        if built:
            self.forget()

    def forget(self) -> None:
        """Drop everything that was learned, and every source; the tree stays as it is."""
        self.generation += 1
        self.sources.clear()
        self.learner.clear()

    # ---- match ----

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        self.learner.interrupt()
        result = super().match_prefix(params)
        request = agent_request(params.req)
        if request is None or self.disable:
            return result
        started = time.perf_counter()
        request.pieces = []
        try:
            return self._plan(request, result, len(params.key))
        except Exception:
            self.failed(request, "match")
            return result
        finally:
            self.statistics.match_seconds += time.perf_counter() - started

    def _plan(self, request: AgentRequest, result: MatchResult, limit: int) -> MatchResult:
        """Plan what follows the exact match. ``limit`` is the longest prefix that may come from a cache."""
        if request.generation != self.generation:
            request.generation, request.lessons = self.generation, []
        corrected_from = self.spans.exact_length(result.last_device_node)
        declined, wish = self._declined(request), self._wish(request)
        # A budget that was lowered holds for what was corrected before, too.
        if corrected_from is not None and (declined or self._kl_of_hit(result) > wish.max_kl * _ROUNDING):
            result = self.spans.cut(result, corrected_from)
            corrected_from = None
        request.hit, request.limit, request.budget = result.device_prefix_len, limit, wish.max_kl
        request.placed = []
        spent = self._count_hit(request, result)
        if request.searched != self.sources.version:
            self.search(request)
            if request.auto:
                # Its spans are what was found.
                spent = self._count_hit(request, result)
        if declined:
            for span in request.report.spans:
                if not request.settled:
                    span.reason = Reason.DECLINED if request.hit < span.stop else Reason.EXACT
        else:
            request.pieces = self.planner.plan(request, wish, spent)
        request.publish_report()
        return result

    def search(self, request: AgentRequest) -> None:
        """Look for known content: inside the marked spans, or in automatic mode anywhere."""
        ranges = [(span.start, span.stop) for span in request.report.spans]
        if request.auto:
            ranges = [(0, len(request.prompt))]
        matches = [
            match for start, stop in ranges for match in self.sources.find(request.scope, request.prompt, start, stop)
        ]
        prefix, first_stop = None, 0
        if request.auto and matches:
            prefix = self.prefixes.find(request.scope, request.prompt, matches[0].start)
            first_stop = prefix[0] + self.config.min_span
        request.found(matches, self.sources.version, prefix, first_stop)

    def _count_hit(self, request: AgentRequest, result: MatchResult) -> float:
        """Report the exact cache's hit; returns the predicted KL, nats, of the corrected KV in it."""
        marks = self.spans.marks(result.last_device_node)
        first = min((start for _, start, _ in marks), default=request.hit)
        spent = self._kl_of_hit(result)
        report = request.report
        if request.settled:
            return spent
        # What stands below corrected KV was computed over it: it counts as corrected.
        report.exact_tokens, report.corrected_tokens = first, request.hit - first
        report.predicted_kl = spent if marks else None
        for span in report.spans:
            # A run that was retracted may have left its own.
            span.reason, span.source, span.estimator = Reason.NO_SOURCE, None, None
            span.predicted_error = span.predicted_kl = None
            stop = min(span.stop, request.hit)
            span.exact_tokens = max(0, min(stop, first) - span.start)
            span.corrected_tokens = max(0, stop - max(span.start, first))
            own = [mark for mark, start, end in marks if start < span.stop and end > span.start]
            if span.corrected_tokens and own:
                span.source, span.estimator = own[-1].source, own[-1].estimator
                span.predicted_error = own[-1].error
                span.predicted_kl = own[-1].kl_per_token * span.corrected_tokens
        return spent

    def _kl_of_hit(self, result: MatchResult) -> float:
        """Predicted KL, nats, of the corrected KV in an exact-cache hit."""
        marks = self.spans.marks(result.last_device_node)
        return sum(mark.kl_per_token * (stop - start) for mark, start, stop in marks)

    def _declined(self, request: AgentRequest) -> bool:
        return (request.hint is not None and request.hint.reuse == "never") or self._policy(request) == "learn"

    def _wish(self, request: AgentRequest) -> Wish:
        hint = request.hint if self.config.allow_overrides else None
        estimator, head, max_kl = (None, None, None) if hint is None else (hint.estimator, hint.head, hint.max_kl)
        if self._policy(request) == "always":
            max_kl = math.inf
        return Wish(
            estimator,
            self.switches.max_kl if max_kl is None else max_kl,
            self.config.head if head is None else head,
        )

    def _policy(self, request: AgentRequest) -> str:
        override = request.hint.policy if request.hint and self.config.allow_overrides else None
        if self.switches.mode == "off":
            return "learn"
        if self.switches.mode == "learn":
            return override or "learn"
        return override or ("always" if self.config.policy == "always" else "gated")

    # ---- a pass ----

    def continue_plan(self, req: Req) -> None:
        """Before a further chunk of a prompt: keep what is left of its plan and still resident."""
        request = agent_request(req)
        if request is None or self.disable:
            return
        if self._declined(request):
            request.pieces = []
            return
        try:
            request.pieces = [part for piece in request.pieces if (part := piece.cut(req.prefix_len, request.limit))]
            known = request.generation == self.generation
            request.pieces = [p for p in request.pieces if known and self.spans.resident(p.base.source)]
        except Exception:
            request.pieces = []
            self.failed(request, "match")

    def hold(self, req: Req) -> None:
        """Keep the pieces' sources in the tree until `release`: what was budgeted as corrected must stay so."""
        request = agent_request(req)
        if request is None or self.disable:
            return
        self.release(req)
        try:
            nodes = {piece.base.source.node for piece in request.pieces if self.spans.resident(piece.base.source)}
            for node in nodes:
                request.held.append(self.lock(node))
        except Exception:
            self.release(req)
            self.failed(request, "pinning sources")

    def release(self, req: Req) -> None:
        """Let go of what `hold` kept; does nothing twice."""
        request = agent_request(req)
        if request is not None:
            for lock in request.held:
                self.unlock(lock)
            request.held = []

    def admit(self, req: Req) -> None:
        """The request is part of the next pass."""
        self.admitted[req.rid] = req

    def place(self, passes: Sequence[Pass]) -> list[list[tuple[int, int]]]:
        """Correct what was planned for a pass; per request the token ranges that need no computing."""
        started = time.perf_counter()
        try:
            return self._placer.run(passes)
        except Exception:
            for one in passes:
                self.failed(agent_request(one.req), "correction")
            return [[] for _ in passes]
        finally:
            for one in passes:
                self.release(one.req)
            self.statistics.place_seconds += time.perf_counter() - started

    # ---- checkpoint ----

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        request = agent_request(req)
        if request is None or self.disable:
            super().checkpoint(req, up_to=up_to, **kwargs)
            return
        started = time.perf_counter()
        try:
            self._publisher.replace_corrected(req, request, up_to)
        except Exception:
            self.failed(request, "replacing corrected KV")
        replaced = time.perf_counter()
        super().checkpoint(req, up_to=up_to, **kwargs)
        inserted = time.perf_counter()
        try:
            self._publish(req, request, up_to)
        except Exception:
            self.failed(request, "checkpoint")
        self.statistics.publish_seconds += replaced - started + time.perf_counter() - inserted
        if self.learner.behind:
            self.learner.step(idle=False)

    def _publish(self, req: Req, request: AgentRequest, up_to: int) -> None:
        try:
            self._publisher.mark_placed(req, request, up_to)
        except Exception:
            self._publisher.distrust(req, request)
            raise
        fresh = request.generation == self.generation
        if fresh and not request.published and up_to >= len(request.prompt):
            request.published = True
            self._publisher.publish_prompt(req, request)
        self._settle(req, request, up_to)
        if fresh and request.published and not request.answered and req.finished():
            request.answered = True
            self._publisher.publish_answer(req, request, up_to)
            self.lessons.add(request, req.output_ids)
            if request.reused:
                self.lessons.check(request, req.output_ids, req.last_node, self._publisher.untaught(request))

    def _settle(self, req: Req, request: AgentRequest, up_to: int) -> None:
        """Count the request once, when its prompt is complete."""
        if request.settled or up_to < len(request.prompt):
            return
        request.settled = True
        request.publish_report()
        self.statistics.record(req.rid, request.report)
        level = self.config.log_decisions
        if level == "all" or (level == "refused" and request.report.reason is not Reason.REUSED):
            logger.info("kvcmas: %s", decision_line(req.rid, request.report, request.budget))

    # ---- bookkeeping ----

    def switch(self, switches: Switches) -> None:
        """Let other switches hold from the next match on."""
        self.learner.pause(switches.mode == "off")
        logger.info("kvcmas: settings are now mode=%s max_kl=%s", switches.mode, switches.max_kl)
        self.switches = switches
        self.statistics.changed()

    def state(self) -> dict[str, Any]:
        """Totals and sizes, JSON-compatible."""
        return {
            **self.statistics.as_dict(),
            "settings": dataclasses.asdict(self.switches),
            "learning": len(self.learner),
            "sources": len(self.sources),
            "source_tokens": self.sources.tokens,
            "own_deltas": len(self.deltas),
            "own_delta_bytes": self.deltas.nbytes,
            "state_bytes": self.learner.state_bytes,
            "budget_bytes": self.config.state_bytes,
            "edges": {name: len(list(estimator.edges())) for name, estimator in self.estimators.items()},
            "edge_table": edge_table(self.gate, self.estimators, self.statistics),
        }

    def node_gone(self, node: int) -> None:
        """Drop the sources on a node that the tree evicts, in the middle of an eviction that has to go on."""
        try:
            self.sources.node_gone(node)
        except Exception:
            # An empty index claims no KV that is gone.
            self.sources.clear()
            self.statistics.failed("dropping a source", "all sources are forgotten")

    def failed(self, request: AgentRequest | None, where: str) -> None:
        """Count an internal failure, once for each request; the caller goes on with a dense prefill."""
        if request is None or where not in request.failures:
            self.statistics.failed(where, "the span is prefilled densely")
        if request is not None:
            request.failures.add(where)
            request.pieces = []
            if not request.settled:
                for span in request.report.spans:
                    if not span.corrected_tokens and not span.exact_tokens:
                        span.reason = Reason.FAILED
                request.publish_report()


def agent_request(req: Req | None) -> AgentRequest | None:
    """The agent side of a request; None for a plain one."""
    return None if req is None else getattr(req, "kvcmas", None)
