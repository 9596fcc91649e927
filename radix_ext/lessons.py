"""What a finished request can teach: first its audits, then, from the same run, the deltas themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from kvcmas_sgl.radix_ext.audit import ANSWER_TOKENS, AuditJob, Auditor, Forward, Stretch
from kvcmas_sgl.radix_ext.harvest import Harvester, HarvestJob
from kvcmas_sgl.radix_ext.heavy import heavy_tokens, score_steps
from kvcmas_sgl.radix_ext.learner import Learner
from kvcmas_sgl.radix_ext.request import AgentRequest
from kvcmas_sgl.radix_ext.sources import Source
from kvcmas_sgl.radix_ext.statistics import Statistics
from torch import Tensor

ENOUGH_AUDITS = 6
"""Audits after which an edge needs no more: its pairs go on, and the margin for few audits is small."""

_DONE = object()


class Lessons:
    """Queues the lessons of requests.

    ``path_of``: slots of everything up to the end of a source, or None when it has left the tree. ``forward`` is set
    where a model can be asked; without one nothing is audited.
    """

    def __init__(
        self,
        harvester: Harvester,
        auditor: Auditor,
        learner: Learner,
        statistics: Statistics,
        path_of: Callable[[Source], Tensor | None],
    ) -> None:
        self._harvester = harvester
        self._path_of = path_of
        self._auditor = auditor
        self._learner = learner
        self._statistics = statistics
        self.forward: Forward | None = None

    def add(self, request: AgentRequest, answer: Sequence[int]) -> None:
        """Queue what a finished request can teach; ``answer`` is what it generated (token ids)."""
        jobs, request.lessons = request.lessons, []
        if not jobs:
            return
        audits: dict = {}
        if self.forward is not None:
            audit = self._audit(self._audit_job(request, jobs, answer, audits), self.forward)
            self._learner.add(audit, needs_model=True)
        for job in jobs:
            self._learner.add(self._learn(replace(job, audits=audits)))

    def _audit_job(
        self, request: AgentRequest, jobs: Sequence[HarvestJob], answer: Sequence[int], results: dict
    ) -> AuditJob:
        stretches = []
        for job in jobs:
            start = job.consumer.source.start + job.consumer.offset
            heavy = tuple(heavy_tokens(base, job.length, job.head) for base in job.bases)
            stretches.append(Stretch(job.consumer, job.bases, start, start + job.length, job.head, heavy))
        return AuditJob(
            tokens=np.concatenate([request.prompt, np.array(answer[:ANSWER_TOKENS], np.int64)]),
            prompt_length=len(request.prompt),
            spans=tuple((span.start, span.stop) for span in request.report.spans),
            stretches=tuple(stretches),
            last=max((job.consumer.source for job in jobs), key=lambda source: source.stop),
            results=results,
        )

    def _audit(self, job: AuditJob, forward: Forward) -> Iterator[None]:
        yield from self._auditor.steps(job, forward)
        self._statistics.audits += len(job.results)

    def score(self, source: Source) -> None:
        """Queue finding the heavy hitters of a content, of which ``source`` is the first or another one."""
        if source.content.heavy is None:
            self._learner.add(self._score(source))

    def _score(self, source: Source) -> Iterator[None]:
        path = self._path_of(source)
        if source.content.heavy is not None or path is None:
            return
        scores, sink = np.zeros(source.length, np.float32), int(path[0])
        steps = score_steps(self._harvester.view, path[source.start : source.stop], source.start, sink, scores)
        # Its slots belong to others once it has left the tree.
        while self._path_of(source) is not None:
            if next(steps, _DONE) is _DONE:
                source.content.heavy = scores
                return
            yield

    def _learn(self, job: HarvestJob) -> Iterator[None]:
        yield from self._harvester.steps(job)
        self._statistics.spans_learned += 1
