"""The queue of lessons: in order, bounded, and nothing that needs the model on a busy server."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from kvcmas_sgl.radix_ext.agent_prefixes import AgentPrefixes
from kvcmas_sgl.radix_ext.delta_store import DeltaStore, Factors, Rows
from kvcmas_sgl.radix_ext.gate import Gate
from kvcmas_sgl.radix_ext.learner import MAX_JOBS, Learner, Steps
from kvcmas_sgl.radix_ext.statistics import Statistics


def learner() -> tuple[Learner, Statistics]:
    statistics = Statistics()
    return Learner({}, Gate(), AgentPrefixes(), DeltaStore(), statistics, 0), statistics


def job(name: str, done: list[str], steps: int = 2) -> Iterator[None]:
    for step in range(steps):
        done.append(f"{name}{step}")
        yield


def test_jobs_run_one_after_another_a_step_at_a_time() -> None:
    queue, _ = learner()
    done: list[str] = []
    queue.add(job("a", done))
    queue.add(job("b", done), needs_model=True)
    while queue.step():
        pass
    assert done == ["a0", "a1", "b0", "b1"] and len(queue) == 0


def test_a_busy_server_gives_up_what_needs_the_model() -> None:
    queue, statistics = learner()
    done: list[str] = []
    queue.add(job("audit", done), needs_model=True)
    queue.add(job("lesson", done))
    assert queue.step() and done == ["audit0"]
    assert queue.step(idle=False) and done == ["audit0", "lesson0"]
    assert statistics.jobs_dropped == 1 and len(queue) == 1


def test_a_job_that_fails_is_dropped_and_counted() -> None:
    queue, statistics = learner()
    done: list[str] = []

    def broken() -> Iterator[None]:
        raise RuntimeError("injected")
        yield

    queue.add(broken())
    queue.add(job("next", done, steps=1))
    while queue.step():
        pass
    assert statistics.fallbacks == 1 and done == ["next0"]


def test_the_oldest_job_goes_when_too_many_wait() -> None:
    queue, statistics = learner()
    done: list[str] = []
    for number in range(MAX_JOBS + 2):
        queue.add(job(f"{number}:", done))
    assert len(queue) == MAX_JOBS and statistics.jobs_dropped == 2
    queue.step()
    assert done == ["2:0"]


def test_a_job_that_fails_leaves_nothing_over_the_budget() -> None:
    """Found by the state machine: only jobs that ended well made the state fit."""
    deltas, statistics = DeltaStore(), Statistics()
    queue = Learner({}, Gate(), AgentPrefixes(), deltas, statistics, 0)

    def fails() -> Steps:
        part = torch.zeros(1, 2, 3)
        deltas.put(Rows(Factors(part, part, 0.1), part, part))
        yield
        raise RuntimeError("injected")

    queue.add(fails())
    assert queue.step() and deltas.nbytes == 4 * part_bytes()
    assert queue.step() and (deltas.nbytes, len(queue), statistics.fallbacks) == (0, 0, 1)


def part_bytes() -> int:
    return 1 * 2 * 3 * 4
