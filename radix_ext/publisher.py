"""After a pass: the tree is told how its KV was made, and what was computed becomes a source and a lesson."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING

import torch
from kvcmas_sgl.radix_ext.blocks import Tokens
from kvcmas_sgl.radix_ext.decision import Base, SpanReport
from kvcmas_sgl.radix_ext.harvest import HarvestJob
from kvcmas_sgl.radix_ext.node_marks import Provenance, mark_corrected, mark_exact, path_to, provenance, slots
from kvcmas_sgl.radix_ext.planner import own_key
from kvcmas_sgl.radix_ext.request import AgentRequest
from kvcmas_sgl.radix_ext.sources import Agent, Content, Source, as_tokens
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

if TYPE_CHECKING:
    from kvcmas_sgl.radix_ext.cache import DeltaRadixCache
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_radix_cache import NodeId, UnifiedTreeNode
    from torch import Tensor

MAX_BASES = 3
"""Sources that one dense run is learned against: the work per run must not grow with the number of agents."""

NOWHERE = -1
"""Stands for the tree node of KV that is in no tree."""

CONTEXT = "context"
"""Stands for the estimator in the provenance of KV that the model computed over corrected KV."""


class Publisher:
    """Works on a cache's tree, index and learner, right before and after SGLang's own checkpoint."""

    def __init__(self, cache: DeltaRadixCache) -> None:
        self._cache = cache

    def replace_corrected(self, req: Req, request: AgentRequest, up_to: int) -> None:
        """Before the checkpoint: put a dense run's KV into the slots of corrected KV that the tree has for its tokens.

        Such KV is there when the request declined it, or when another request of the role was corrected while this
        one was computing. The insert that follows keeps the tree's slots and frees the request's, as it does for any
        duplicate. Nodes below that were computed over the old KV and that this run did not compute keep a mark.
        """
        cache = self._cache
        exact = cache.spans.exact_length(req.last_node)
        exact = min([up_to if exact is None else exact, *(placed.start for placed in request.placed)])
        protected = req.kv.cache_protected_len
        if exact <= protected:
            # Computed on top of corrected KV: no better than what it would replace.
            return
        match = cache._match_tree(MatchPrefixParams(key=_key(req, req.full_untruncated_fill_ids, exact)))
        path = [node for node in path_to(cache.tree_core.node_by_id(match.last_device_node))][::-1]
        row = cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        stop, old = 0, None
        for node in path:
            start, stop = stop, stop + len(node.key)
            old = old or provenance(node)
            if old is None or start < protected:
                continue
            cache.view.copy_rows(row[start:stop].long(), slots(node))
            mark_exact(node, cache.deltas)
            cache.node_gone(node.id)
            for child in node.children.values():
                if child not in path and provenance(child) is None:
                    mark_corrected(child, Provenance(old.source, CONTEXT, old.error))

    def mark_placed(self, req: Req, request: AgentRequest, up_to: int) -> None:
        """After the checkpoint: give the nodes of placed KV their provenance, unless the tree kept other KV there."""
        path = self._cache.path_device_indices(req.last_node)
        waiting = []
        for placed in request.placed:
            if placed.stop > min(up_to, path.shape[0]):
                waiting.append(placed)
                continue
            for node, start, stop in self._nodes(req, path, placed.start, placed.stop):
                if (slots(node) == placed.slots[start - placed.start : stop - placed.start]).all():
                    mark_corrected(node, placed.mark)
        request.placed = waiting

    def distrust(self, req: Req, request: AgentRequest) -> None:
        """Where `mark_placed` failed: a node that holds any placed token counts as corrected as a whole."""
        if not request.placed:
            return
        placed, mark = torch.cat([part.slots for part in request.placed]), request.placed[0].mark
        for node in path_to(self._cache.tree_core.node_by_id(req.last_node)):
            if provenance(node) is None and torch.isin(slots(node), placed).any():
                mark_corrected(node, mark)

    def publish_prompt(self, req: Req, request: AgentRequest) -> None:
        """The prompt is in the tree: its spans (in automatic mode, all of it) become the newest sources."""
        cache, prompt = self._cache, request.prompt
        path = cache.path_device_indices(req.last_node)
        if path.shape[0] < len(prompt):
            return
        if request.searched != cache.sources.version and not (request.auto and request.report.spans):
            # Others may have published while this request was waiting and computing.
            cache.search(request)
        if request.auto:
            node = self._cut(req, path, len(prompt))
            content = cache.sources.content(request.scope, prompt)
            source = self._source(node, content_start=0, content=content, agent=None, context=request.context(0))
            jobs = [job for number in range(len(request.matches)) for job in self._jobs(request, source, number)]
            self._add(source)
            request.content = content
        else:
            jobs = []
            for number, span in enumerate(request.report.spans):
                jobs += self._publish_span(req, path, request, number, span)
        request.lessons = jobs

    def untaught(self, request: AgentRequest) -> list[HarvestJob]:
        """What a dense run of a request that was reused would teach; nobody holds such KV yet."""

        def run(start: int, tokens: Tokens, agent: Agent | None) -> Source:
            content = self._cache.sources.content(request.scope, tokens)
            return Source(content, agent, request.context(start), NOWHERE, start)

        if request.auto:
            whole = run(0, request.prompt, None)
            return [job for number in range(len(request.matches)) for job in self._jobs(request, whole, number)]
        jobs = []
        for number, span in enumerate(request.report.spans):
            if span.start and span.stop - span.start >= self._cache.config.min_span:
                source = run(span.start, request.prompt[span.start : span.stop], request.agent(span.start))
                jobs += self._jobs(request, source, number)
        return jobs

    def publish_answer(self, req: Req, request: AgentRequest, up_to: int) -> None:
        """The request is finished: the KV of its generated text is the first source of that text."""
        cache, start = self._cache, len(request.prompt)
        if up_to - start < cache.config.min_span or (request.auto and request.content is None):
            return
        path = cache.path_device_indices(req.last_node)
        if path.shape[0] < up_to:
            return
        answer = array("q", req.full_untruncated_fill_ids[start:up_to])
        source = self._source(
            self._cut(req, path, up_to),
            content_start=start,
            content=cache.sources.content(request.scope, as_tokens(answer)),
            agent=None if request.auto else request.agent(start),
            context=request.context(start),
            sequence_content=request.content,
        )
        self._add(source)

    def _add(self, source: Source) -> None:
        self._cache.sources.add(source)
        self._cache.lessons.score(source)

    def _publish_span(
        self, req: Req, path: Tensor, request: AgentRequest, number: int, span: SpanReport
    ) -> list[HarvestJob]:
        if span.start == 0 or span.stop - span.start < self._cache.config.min_span:
            return []
        # Cut the tree where the span starts and ends: own deltas and provenance then cover whole nodes.
        self._cut(req, path, span.start)
        source = self._source(
            self._cut(req, path, span.stop),
            content_start=span.start,
            content=self._cache.sources.content(request.scope, request.prompt[span.start : span.stop]),
            agent=request.agent(span.start),
            context=request.context(span.start),
        )
        jobs = self._jobs(request, source, number)
        self._add(source)
        return jobs

    def _jobs(self, request: AgentRequest, source: Source, number: int) -> list[HarvestJob]:
        """What the stretches of a span that this request computed can teach."""
        planner, jobs = self._cache.planner, []
        head_stop = request.head_stop(request.report.spans[number], self._cache.config.head)
        for match in request.matches[number]:
            if not source.computed or request.hit >= match.stop:
                continue
            consumer, context = request.agent(match.start), request.context(match.start)
            bases = [base for base in planner.bases(request, match) if base.source.computed]
            # The same tokens before it, or its own earlier run: nothing differs, and nothing is learned.
            bases = [base for base in bases if base.offset or base.source.context != context]
            if bases:
                own = Base(source, consumer, match.start - source.start)
                length, head = match.stop - match.start, max(0, head_stop - match.start)
                jobs.append(HarvestJob(own, tuple(bases[:MAX_BASES]), length, head, own_key(consumer, context)))
        return jobs

    def _source(
        self, node: NodeId, *, content_start: int, content: Content, agent: Agent | None, context: str, **more: object
    ) -> Source:
        marks = self._cache.spans.marks(node)
        own = [(mark, stop - max(start, content_start)) for mark, start, stop in marks if stop > content_start]
        error = max((mark.error for mark, _ in own), default=max((mark.error for mark, _, _ in marks), default=0.0))
        if own and agent is not None:
            # An error is that of a piece with its head, the energy of which lies in the tokens that the piece has.
            corrected = self._cache.config.head + sum(tokens for _, tokens in own)
            error *= math.sqrt(min(1.0, corrected / len(content.tokens)))
        return Source(
            content=content,
            agent=agent,
            context=context,
            node=node,
            start=content_start,
            error=error,
            exact=not marks,
            computed=not own,
            **more,  # type: ignore[arg-type]
        )

    def _cut(self, req: Req, path: Tensor, length: int) -> NodeId:
        """The tree node that ends exactly after ``length`` tokens of the request's path; splits one where needed."""
        key = _key(req, req.full_untruncated_fill_ids, length)
        params = InsertParams(key=key, value=path[:length], prev_prefix_len=length, inserted_len=length)
        return self._cache.insert(params).last_device_node

    def _nodes(self, req: Req, path: Tensor, start: int, stop: int) -> list[tuple[UnifiedTreeNode, int, int]]:
        """The nodes of a range of the request's path, which is cut at both ends, with their token ranges."""
        self._cut(req, path, start)
        nodes, at = [], stop
        for node in path_to(self._cache.tree_core.node_by_id(self._cut(req, path, stop))):
            if at <= start:
                break
            nodes.append((node, at - len(node.key), at))
            at -= len(node.key)
        return nodes


def _key(req: Req, ids: array[int], length: int) -> RadixKey:
    return RadixKey(ids[:length], req.extra_key, cache_salt=req.cache_salt)
