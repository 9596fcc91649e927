"""The learning side of the cache: what waits to be learned, one step at a time, inside one byte budget."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping

import torch
from kvcmas_sgl.radix_ext.delta_store import DeltaStore
from kvcmas_sgl.radix_ext.estimators import Estimator
from kvcmas_sgl.radix_ext.gate import Gate
from kvcmas_sgl.radix_ext.statistics import Statistics

logger = logging.getLogger(__name__)

MAX_JOBS = 64
"""Waiting jobs; a server that is never idle drops the oldest."""

BUSY_JOBS = 4
"""From this many waiting jobs on, a busy server takes a step at each checkpoint."""

_DONE = object()


class Learner:
    """A queue of jobs, each a generator of short steps, and the budget of what they leave behind."""

    def __init__(
        self,
        estimators: Mapping[str, Estimator],
        gate: Gate,
        deltas: DeltaStore,
        statistics: Statistics,
        state_bytes: int,
    ) -> None:
        self._estimators = estimators
        self._gate = gate
        self._deltas = deltas
        self._statistics = statistics
        self._budget = state_bytes
        self._jobs: deque[tuple[Iterator[None], bool]] = deque()

    def __len__(self) -> int:
        """Jobs that are waiting or under way."""
        return len(self._jobs)

    @property
    def behind(self) -> bool:
        """Whether a busy server should take a step too."""
        return len(self._jobs) >= BUSY_JOBS

    def add(self, steps: Iterator[None], *, needs_model: bool = False) -> None:
        """Queue a job; the oldest one goes when too many wait. ``needs_model``: only an idle server may run it."""
        self._jobs.append((steps, needs_model))
        if len(self._jobs) > MAX_JOBS:
            self._jobs.popleft()
            self._statistics.jobs_dropped += 1

    def step(self, *, idle: bool = True) -> bool:
        """Take one short step; False when nothing waits. A job that fails is dropped and counted.

        A busy server gives up what needs the model: its passes belong to requests.
        """
        while self._jobs and self._jobs[0][1] and not idle:
            self._jobs.popleft()
            self._statistics.jobs_dropped += 1
        if not self._jobs:
            return False
        started, needs_model = time.perf_counter(), self._jobs[0][1]
        try:
            with torch.inference_mode():
                done = next(self._jobs[0][0], _DONE) is _DONE
            if done:
                self._keep_budget()
                self._jobs.popleft()
        except Exception:
            self._jobs.popleft()
            self._statistics.fallbacks += 1
            logger.exception("kvcmas: learning from a dense run failed; it is skipped.")
        spent = time.perf_counter() - started
        if needs_model:
            self._statistics.audit_seconds += spent
        else:
            self._statistics.learn_seconds += spent
        return True

    @property
    def state_bytes(self) -> int:
        """Bytes of own deltas and of every estimator's state."""
        return self._deltas.nbytes + sum(estimator.state_bytes for estimator in self._estimators.values())

    def clear(self) -> None:
        """Forget everything that was learned or waits."""
        self._jobs.clear()
        self._gate.clear()
        self._deltas.clear()
        for estimator in self._estimators.values():
            for namespace in {edge.namespace for edge in estimator.edges()}:
                estimator.drop_namespace(namespace)

    def _keep_budget(self) -> None:
        # Own deltas go first: each serves one content, an edge serves all.
        self._deltas.shrink(max(0, self._budget - (self.state_bytes - self._deltas.nbytes)))
        for estimator in self._estimators.values():
            for edge in list(estimator.edges()):
                if self.state_bytes <= self._budget:
                    return
                estimator.drop(edge)
                self._gate.drop(edge)
