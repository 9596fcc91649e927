"""Checks: a request that was served from corrected KV is computed densely after all, in idle time.

Once an edge is trusted its spans are no longer prefilled, so nothing would tell that the texts have changed. A small
share of reuse requests, and those on edges with few held-out pairs, are therefore prefilled again while the server is
idle, into slots of their own and a chunk at a time. What the client got is compared with that run, the run is audited
and learned from like any dense one, and its KV goes. It gives way at once when a request arrives.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from kvcmas_sgl.radix_ext.audit import ANSWER_TOKENS, AuditJob, Auditor, Forward, mean_kl
from kvcmas_sgl.radix_ext.blocks import Tokens
from kvcmas_sgl.radix_ext.gate import MAX_PAIRS, Gate
from kvcmas_sgl.radix_ext.harvest import Harvester, HarvestJob
from kvcmas_sgl.radix_ext.learner import Steps
from kvcmas_sgl.radix_ext.request import AgentRequest
from kvcmas_sgl.radix_ext.sources import edge
from kvcmas_sgl.radix_ext.statistics import Statistics
from torch import Tensor

CHUNK = 256
"""Tokens of one idle step: a request that arrives waits for one of them at most."""


@dataclass(frozen=True, eq=False)
class Held:
    """The KV that a request was served from, while it is kept in the tree.

    ``slots``: int64 [n], of its prompt and answer; ``exact``: how many of them come before the first corrected one.
    """

    slots: Tensor
    exact: int


class Checker:
    """Chooses requests to check, and checks them.

    Parameters
    ----------
    share
        Share of reuse requests that are checked, from 0 to 1; with 0 none is, on young edges either.
    estimator
        Whose held-out pairs tell whether an edge is young.
    budget
        Gives the largest predicted KL, nats, that requests are reused under.
    hold, release
        ``hold`` pins a tree node's path and gives it and a lock, or None when it is gone.
    allocate, free
        Slots for the duration of a check; ``allocate`` gives None rather than evict.
    """

    def __init__(
        self,
        *,
        share: float,
        estimator: str,
        budget: Callable[[], float],
        gate: Gate,
        auditor: Auditor,
        harvester: Harvester,
        statistics: Statistics,
        hold: Callable[[int], tuple[Held, object] | None],
        release: Callable[[object], None],
        allocate: Callable[[int], Tensor | None],
        free: Callable[[Tensor], None],
    ) -> None:
        self._share = share
        self._estimator = estimator
        self._budget = budget
        self._gate = gate
        self._auditor = auditor
        self._harvester = harvester
        self._statistics = statistics
        self._hold = hold
        self._release = release
        self._allocate = allocate
        self._free = free
        self._random = random.Random(0)

    def due(self, jobs: Sequence[HarvestJob]) -> bool:
        """Whether a request that was just reused should be checked; ``jobs`` are what a dense run of it would teach."""
        if not self._share or not jobs:
            return False
        edges = {edge(base.agent, job.consumer.agent) for job in jobs for base in job.bases}
        young = any(self._gate.pairs(on, self._estimator) < MAX_PAIRS for on in edges)
        return young or self._random.random() < self._share

    def steps(
        self, request: AgentRequest, answer: Sequence[int], node: int, jobs: Sequence[HarvestJob], forward: Forward
    ) -> Steps:
        """Check one request: ``node`` ends its prompt and answer (token ids) in the tree; each ``next`` is one pass.

        Ends early when its KV has left the tree or there is no room.
        """
        kept = self._hold(node)
        if kept is None:
            return
        held, lock = kept
        tokens = np.concatenate([request.prompt, np.array(answer[:ANSWER_TOKENS], np.int64)])
        taken: list[Tensor] = []
        try:
            fresh = self._take(len(tokens) - held.exact, taken)
            if fresh is None:
                return
            dense = torch.cat([held.slots[: held.exact], fresh])
            prompt = len(request.prompt)
            singles = [(i, i + 1) for i in range(prompt, len(tokens))]
            for start in range(held.exact, prompt, CHUNK):
                stop = min(start + CHUNK, prompt)
                rows = [(start, stop), *(singles if stop == prompt else ())]
                truth = forward(tokens, dense, rows)
                yield
            served = self._served(tokens, held, prompt, forward)
            if served is None:
                return
            self._record(mean_kl(truth, served))
            yield
            yield from self._learn(request, answer, dense, jobs, forward)
        finally:
            for slots in taken:
                self._free(slots)
            self._release(lock)

    def _take(self, count: int, taken: list[Tensor]) -> Tensor | None:
        slots = self._allocate(count)
        if slots is not None:
            taken.append(slots)
        return slots

    def _served(self, tokens: Tokens, held: Held, prompt: int, forward: Forward) -> Tensor | None:
        """Logits at the answer's positions over the KV that the client was served from."""
        first = prompt - 1
        own = self._allocate(len(tokens) - first)
        if own is None:
            return None
        try:
            slots = torch.cat([held.slots[:first], own])
            return forward(tokens, slots, [(i, i + 1) for i in range(first, len(tokens))])
        finally:
            self._free(own)

    def _record(self, kl: float) -> None:
        self._statistics.checked(kl, over_budget=kl > self._budget())

    def _learn(
        self, request: AgentRequest, answer: Sequence[int], dense: Tensor, jobs: Sequence[HarvestJob], forward: Forward
    ) -> Steps:
        """Audit and learn from the dense run in ``dense``, as from one that a request made."""
        held = [
            replace(job, consumer=replace(job.consumer, source=replace(job.consumer.source, held=dense)))
            for job in jobs
        ]
        audit = AuditJob.of(request, held, answer, thorough=True)
        yield from self._auditor.steps(audit, forward)
        self._statistics.audits += len(audit.results)
        for job in held:
            yield from self._harvester.steps(replace(job, audits=audit.results))
            self._statistics.spans_learned += 1
