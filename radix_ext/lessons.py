"""What a finished request can teach: first its audits, then, from the same run, the deltas themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from kvcmas_sgl.radix_ext.audit import AuditJob, Auditor, Forward
from kvcmas_sgl.radix_ext.checks import Checker
from kvcmas_sgl.radix_ext.estimators import Edge
from kvcmas_sgl.radix_ext.gate import Gate
from kvcmas_sgl.radix_ext.harvest import Harvester, HarvestJob
from kvcmas_sgl.radix_ext.heavy import EFFORTS, Effort, score_steps
from kvcmas_sgl.radix_ext.learner import Learner, Steps
from kvcmas_sgl.radix_ext.ranks import ONE_RANK, Ranks
from kvcmas_sgl.radix_ext.request import AgentRequest
from kvcmas_sgl.radix_ext.sources import Source
from kvcmas_sgl.radix_ext.statistics import Statistics
from torch import Tensor

ENOUGH_AUDITS = 6
"""Audits after which an edge needs no more: its pairs go on, and the margin for few audits is small."""

PART = 0.5
"""Share of the budget that one span should leave to the others of its prompt: with a dearer way it may."""

_DONE = object()


def audits_wanted(gate: Gate, estimator: str, budget: Callable[[], float]) -> Callable[[Edge, Effort, int, bool], bool]:
    """Which audits tell the gate something: of the cheapest way to reuse a span that is known to fit its part of the
    budget, and of all ways before it, until there are enough; in a ``thorough`` job also beyond."""

    def wanted(on: Edge, effort: Effort, tokens: int, thorough: bool) -> bool:
        cheaper = EFFORTS[: EFFORTS.index(effort)]
        expected = (gate.expect(on, one.of(estimator), tokens) for one in cheaper)
        fits = any(one is not None and one.kl <= PART * budget() for one in expected)
        return not fits and (thorough or gate.audits(on, effort.of(estimator)) < ENOUGH_AUDITS)

    return wanted


class Lessons:
    """Queues the lessons of requests.

    ``path_of``: slots of everything up to the end of a source, or None when it has left the tree. ``forward`` is set
    where a model can be asked; without one nothing is audited.
    """

    def __init__(
        self,
        harvester: Harvester,
        auditor: Auditor,
        checker: Checker,
        learner: Learner,
        statistics: Statistics,
        path_of: Callable[[Source], Tensor | None],
        ranks: Ranks,
    ) -> None:
        self._harvester = harvester
        self._path_of = path_of
        self._ranks = ranks
        self._auditor = auditor
        self._checker = checker
        self._learner = learner
        self._statistics = statistics
        self.forward: Callable[..., Tensor] | None = None

    def add(self, request: AgentRequest, answer: Sequence[int]) -> None:
        """Queue what a finished request can teach; ``answer`` is what it generated (token ids)."""
        jobs, request.lessons = request.lessons, []
        if not jobs:
            return
        audits: Mapping[tuple[Edge, Effort], float] = {}
        if self.forward is not None:
            audit = AuditJob.of(request, jobs, answer)
            audits = audit.results
            forward, nbytes = _reading(self.forward, request), request.images.nbytes
            self._learner.add(self._audit(audit, forward), needs_model=True, nbytes=nbytes)
        for job in jobs:
            self._learner.add(self._learn(replace(job, audits=audits)))

    def check(self, request: AgentRequest, answer: Sequence[int], node: int, jobs: Sequence[HarvestJob]) -> None:
        """Perhaps queue a check of a finished request that was reused; ``jobs``: what a dense run of it would teach."""
        if self.forward is not None and self._checker.due(jobs):
            forward, nbytes = _reading(self.forward, request), request.images.nbytes
            begin = partial(self._checker.steps, request, list(answer), node, jobs, forward)
            self._learner.add(begin(), needs_model=True, again=begin, nbytes=nbytes)

    def _audit(self, job: AuditJob, forward: Forward) -> Steps:
        yield from self._auditor.steps(job, forward)
        self._statistics.audits += len(job.results)

    def score(self, source: Source) -> None:
        """Queue finding the heavy hitters of a content, of which ``source`` is the first or another one."""
        if source.content.heavy is None:
            self._learner.add(self._score(source))

    def score_now(self, source: Source) -> None:
        """Find them at once, where this rank can do it by itself."""
        if self._ranks is ONE_RANK:
            deque(self._score(source), maxlen=0)

    def _score(self, source: Source) -> Steps:
        path = self._path_of(source)
        if source.content.heavy is not None or path is None:
            return
        scores, sink = np.zeros(source.length, np.float32), int(path[0])
        steps = score_steps(self._harvester.view, path[source.start : source.stop], source.start, sink, scores)
        # Its slots belong to others once it has left the tree.
        while self._path_of(source) is not None:
            if next(steps, _DONE) is _DONE:
                source.content.heavy = self._ranks.mean(scores).astype(np.float32)
                return
            yield

    def _learn(self, job: HarvestJob) -> Steps:
        yield from self._harvester.steps(job)
        self._statistics.spans_learned += 1


def _reading(forward: Callable[..., Tensor], request: AgentRequest) -> Forward:
    """The forward pass with the pictures of a request at hand, which SGLang lets go of when it is finished."""
    return partial(forward, images=request.images) if request.images else forward
