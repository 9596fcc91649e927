"""The learning side of the cache: what waits to be learned, one step at a time, inside one byte budget."""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

import torch
from kvcmas_sgl.radix_ext.agent_prefixes import AgentPrefixes
from kvcmas_sgl.radix_ext.delta_store import DeltaStore
from kvcmas_sgl.radix_ext.estimators import LastingEstimator
from kvcmas_sgl.radix_ext.gate import Gate
from kvcmas_sgl.radix_ext.ranks import ONE_RANK, OutOfStepError, Ranks
from kvcmas_sgl.radix_ext.state_file import Lasting, State, StateError
from kvcmas_sgl.radix_ext.statistics import Statistics

MAX_JOBS = 64
"""Waiting jobs; a server that is never idle drops the oldest."""

BUSY_JOBS = 4
"""From this many waiting jobs on, a busy server takes a step at each checkpoint."""

MAX_JOB_BYTES = 1 << 28
"""Pictures that waiting jobs keep for their passes: beyond this the oldest such job is dropped."""

RESTARTS = 2
"""How often a job that gave way to requests is begun again."""

Steps = Generator[None, None, None]
"""A job: every ``next`` is one short step."""

_DONE = object()


@dataclass
class _Job:
    """Steps under way. ``again`` begins a job anew that holds memory while it runs and gave it back in between.

    ``nbytes``: of what it keeps until it ends.
    """

    steps: Steps
    needs_model: bool
    again: Callable[[], Steps] | None
    nbytes: int = 0
    restarts: int = RESTARTS


class Learner:
    """A queue of jobs, each a generator of short steps, and the budget of what they leave behind."""

    def __init__(
        self,
        estimators: Mapping[str, LastingEstimator],
        gate: Gate,
        prefixes: AgentPrefixes,
        deltas: DeltaStore,
        statistics: Statistics,
        state_bytes: int,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self._estimators = estimators
        self._gate = gate
        self._prefixes = prefixes
        self._lasting: dict[str, Lasting] = {"gate": gate, "prefixes": prefixes, **estimators}
        self._deltas = deltas
        self._statistics = statistics
        self._budget = state_bytes
        self._ranks = ranks
        self._jobs: deque[_Job] = deque()
        self.version = 0
        """Changes with what was learned."""
        self.paused = False

    def __len__(self) -> int:
        """Jobs that are waiting or under way."""
        return len(self._jobs)

    @property
    def behind(self) -> bool:
        """Whether a busy server should take a step too."""
        return len(self._jobs) >= BUSY_JOBS

    def add(
        self,
        steps: Steps,
        *,
        needs_model: bool = False,
        again: Callable[[], Steps] | None = None,
        nbytes: int = 0,
    ) -> None:
        """Queue a job; the oldest one goes when too many wait.

        ``needs_model``: only an idle server may run it. ``again`` begins it anew: it holds memory while it runs.
        ``nbytes``: of what it keeps besides.
        """
        self._jobs.append(_Job(steps, needs_model, again, nbytes))
        if len(self._jobs) > MAX_JOBS or self.paused:
            self._drop()
        while sum(job.nbytes for job in self._jobs) > MAX_JOB_BYTES:
            self._drop(next(index for index, job in enumerate(self._jobs) if job.nbytes))

    def interrupt(self) -> None:
        """A request has arrived: a job that holds memory lets go of it, and begins again in the next idle time."""
        job = self._jobs[0] if self._jobs else None
        if job is None or job.again is None or inspect.getgeneratorstate(job.steps) == inspect.GEN_CREATED:
            return
        if not job.restarts:
            self._drop()
            return
        self._close(job)
        job.steps, job.restarts = job.again(), job.restarts - 1

    def pause(self, paused: bool) -> None:
        """Drop what waits and take nothing in, or go on; what was learned stays."""
        self.paused = paused
        while paused and self._jobs:
            self._drop()

    def step(self, *, idle: bool = True) -> bool:
        """Take one short step; False when nothing waits. A job that fails is dropped and counted.

        A busy server gives up what needs the model: its passes belong to requests.
        """
        while self._jobs and self._jobs[0].needs_model and not idle:
            self._drop()
        if not self._jobs:
            return False
        started, job, done = time.perf_counter(), self._jobs[0], False
        try:
            with torch.inference_mode():
                done = next(job.steps, _DONE) is _DONE
            failed = self._ranks.step_done(False)
        except OutOfStepError:
            failed = True
        except Exception:
            self._statistics.failed("learning from a dense run", "it is skipped")
            failed = self._ranks.step_done(True)
        if failed or done:
            done = True
            self._close(self._jobs.popleft())
            self.version += 1
            try:
                # A job that failed may have left something behind, too.
                self._keep_budget()
            except Exception:
                self._statistics.failed("keeping the byte budget", "the next lesson tries again")
        spent = time.perf_counter() - started
        if job.needs_model:
            self._statistics.audit_seconds += spent
        else:
            self._statistics.learn_seconds += spent
        if done:
            self._statistics.changed()
        return True

    def stop(self) -> None:
        """Forget what waits, and let go of the memory that it holds."""
        while self._jobs:
            self._close(self._jobs.popleft())

    def _close(self, job: _Job) -> None:
        try:
            job.steps.close()
        except Exception:
            # Requests interrupt jobs: what goes wrong in one must not reach the scheduler.
            self._statistics.failed("giving a learning job up", "it is skipped")

    def _drop(self, index: int = 0) -> None:
        job = self._jobs[index]
        del self._jobs[index]
        self._close(job)
        self._statistics.jobs_dropped += 1

    @property
    def state_bytes(self) -> int:
        """Bytes of own deltas and of every estimator's state."""
        return self._deltas.nbytes + sum(estimator.state_bytes for estimator in self._estimators.values())

    def clear(self) -> None:
        """Forget everything that was learned."""
        self.stop()
        self._gate.clear()
        self._prefixes.clear()
        self._deltas.clear()
        for estimator in self._estimators.values():
            for namespace in {edge.namespace for edge in estimator.edges()}:
                estimator.drop_namespace(namespace)
        self.version += 1

    def state(self) -> dict[str, State]:
        """What outlives the process, by part. Own deltas are none of it: they belong to resident KV.

        A span that is half learned is in it for some layers and not for others, which are solved apart.
        """
        return {name: part.state() for name, part in self._lasting.items()}

    def load(self, parts: Mapping[str, State]) -> None:
        """Take over `state` of another process, inside the byte budget. Raises `StateError`, and then holds nothing."""
        for name, part in self._lasting.items():
            try:
                part.load(parts[name])
            except StateError as error:
                self.clear()
                raise StateError(f"the state of {name!r} does not fit: {error}.") from error
            except (KeyError, TypeError, ValueError) as error:
                self.clear()
                raise StateError(f"the state of {name!r} cannot be read: {error!r}.") from error
        self._keep_budget()

    def _keep_budget(self) -> None:
        # Own deltas go first: each serves one content, an edge serves all.
        self._deltas.shrink(max(0, self._budget - (self.state_bytes - self._deltas.nbytes)))
        for estimator in self._estimators.values():
            for edge in list(estimator.edges()):
                if self.state_bytes <= self._budget:
                    return
                estimator.drop(edge)
                self._gate.drop(edge)
