"""What breaks inside ends in a dense prefill, is counted once, and costs nobody else anything."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kvcmas_sgl.radix_ext.sources import Source

from tests.tree import recount
from tests.tree.harness import LAYERS, Tree, document
from tests.tree.machine import ROLES, formula
from tests.tree.scheduler import Job, Scheduler

N = 48
PLANNER, CRITIC = ROLES[:2]
HEAD = len(CRITIC.prefix)


class Fault(Exception):
    pass


class Broken:
    """A callable that fails where ``when`` says so (by the number of the call), and else does what it stands for."""

    def __init__(self, original: Callable[..., Any], when: Callable[[int], bool] = lambda number: True) -> None:
        self.original, self.when, self.calls = original, when, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.when(self.calls - 1):
            raise Fault("injected")
        return self.original(*args, **kwargs)


class World:
    """Planner and critic, whose edge is learned, and documents 97 to 99 that only the planner has read."""

    def __init__(self, own_rank: int = 0, **settings: Any) -> None:
        self.tree = Tree(slots=4096, own_rank=own_rank, check_share=0, **settings)
        self.scheduler = Scheduler(self.tree, formula())
        self.cache = self.tree.cache
        for seed in range(5):
            self.read(PLANNER, document(seed))
            self.read(CRITIC, document(seed), reuse="never")
        for seed in (97, 98, 99):
            self.read(PLANNER, document(seed))

    def job(self, role: Any, text: list[int], answer: Any = (), **fields: Any) -> Job:
        request = self.tree.request(role.prompt(text), role.hint(text, **fields))
        return self.scheduler.add(request, answer)

    def read(self, role: Any, text: list[int], **fields: Any) -> Job:
        job = self.job(role, text, **fields)
        self.run([job])
        self.tree.learn()
        return job

    def run(self, jobs: list[Job]) -> None:
        """All of them in one pass, then one after another to their end."""
        for job in jobs:
            assert self.scheduler.admit(job, 1000)
        self.scheduler.forward()
        for job in jobs:
            self.scheduler.end_prefill(job)
        for job in jobs:
            for _ in job.answer:
                assert self.scheduler.decode(job)
            self.scheduler.finish(job)
        self.check()

    def check(self) -> None:
        self.scheduler.check((None,))

    def source(self, role: Any, text: list[int]) -> Source:
        return next(s for s in self.cache.sources if s.agent.role == role.name and s.content.tokens.tolist() == text)

    @property
    def fallbacks(self) -> int:
        return self.cache.statistics.fallbacks


def assert_dense(job: Job, reason: str = "failed") -> None:
    report = job.agent.report
    assert (str(report.reason), report.corrected_tokens) == (reason, 0)
    assert report.computed_tokens == job.computed >= N


def assert_reused(job: Job) -> None:
    assert (str(job.agent.report.reason), job.agent.report.corrected_tokens) == ("reused", N)


AT_MATCH = {
    "planner": lambda cache: (cache.planner, "plan"),
    "gate": lambda cache: (cache.gate, "expect"),
    "search": lambda cache: (cache.sources, "find"),
    "own delta": lambda cache: (cache.spans, "own_rows"),
    "tree": lambda cache: (cache.spans, "resident"),
}


@pytest.mark.parametrize("seam", AT_MATCH)
def test_a_fault_at_a_match(seam: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    target, name = AT_MATCH[seam](world.cache)
    broken = Broken(getattr(target, name))
    # The planner keeps its own reference to the tree's functions.
    owner = world.cache.planner if hasattr(world.cache.planner, name) and target is world.cache.spans else target
    monkeypatch.setattr(owner, name, broken)
    job = world.job(CRITIC, document(98))
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            # The scheduler matches a waiting request again in every round.
            world.scheduler.match(job)
    assert broken.calls >= 5 and world.fallbacks == 1
    assert len([record for record in caplog.records if record.name.startswith("kvcmas")]) == 1
    world.run([job])
    assert_dense(job)
    monkeypatch.undo()
    after = world.job(CRITIC, document(99))
    world.run([after])
    assert_reused(after)
    assert world.fallbacks <= 2


def test_a_fault_of_an_estimator_costs_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    estimator = world.cache.estimators["affine"]
    monkeypatch.setattr(estimator, "predict", Broken(estimator.predict, when=lambda call: call == 0))
    first, second = world.job(CRITIC, document(98)), world.job(CRITIC, document(99))
    world.run([first, second])
    assert_dense(first)
    assert_reused(second)
    assert world.fallbacks == 1


def test_a_fault_of_the_kernel_costs_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    view = world.cache.view
    # Both at once, then each by itself: the first one fails there too.
    broken = Broken(view.correct, when=lambda call: call < 2)
    monkeypatch.setattr(type(view), "correct", lambda self, segments: broken(segments))
    first, second = world.job(CRITIC, document(98)), world.job(CRITIC, document(99))
    world.run([first, second])
    assert_dense(first)
    assert_reused(second)
    assert (broken.calls, world.fallbacks) == (3, 1)


def test_a_fault_while_sources_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(world.cache, "lock", Broken(world.cache.lock, when=lambda call: call == 0))
    first, second = world.job(CRITIC, document(98)), world.job(CRITIC, document(99))
    world.run([first, second])
    assert_dense(first)
    assert_reused(second)
    assert world.fallbacks == 1


def test_a_fault_between_two_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(allow_overrides=True)
    prompt, hint = CRITIC.several([document(98), document(97)])
    job = world.scheduler.add(world.tree.request(prompt, {**hint, "policy": "always"}))
    # The first span is corrected, and one token computed.
    assert world.scheduler.admit(job, 1)
    world.scheduler.forward()
    world.scheduler.stash(job)
    assert [piece.span for piece in job.agent.pieces] == [0, 1]
    monkeypatch.setattr(world.cache.spans, "resident", Broken(world.cache.spans.resident))
    assert world.scheduler.go_on(job, 1000)
    monkeypatch.undo()
    world.scheduler.forward()
    world.scheduler.end_prefill(job)
    world.scheduler.finish(job)
    world.check()
    spans = job.agent.report.spans
    assert [(s.corrected_tokens, str(s.reason)) for s in spans] == [(N, "reused"), (0, "failed")]
    assert world.fallbacks == 1


PUBLISHING = ["replace_corrected", "mark_placed", "publish_prompt", "publish_answer"]


@pytest.mark.parametrize("name", PUBLISHING)
def test_a_fault_at_a_checkpoint(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    publisher = world.cache._publisher
    monkeypatch.setattr(publisher, name, Broken(getattr(publisher, name)))
    first, second = world.job(CRITIC, document(98), (3, 4, 5, 6, 7)), world.job(PLANNER, document(50))
    # The request itself is served as planned, and corrected KV never counts as exact (`check`).
    world.run([first, second])
    assert first.req.output_ids.tolist() == [3, 4, 5, 6, 7, 7]
    assert first.agent.report.corrected_tokens == N
    assert world.fallbacks == 2
    monkeypatch.undo()
    again = world.job(CRITIC, document(98))
    world.run([again])
    assert again.agent.report.exact_tokens <= HEAD and str(again.agent.report.reason) == "own_corrected"


def test_a_fault_of_somebody_who_listens() -> None:
    world = World()

    def listener(report: Any) -> None:
        raise Fault("injected")

    world.cache.statistics.listeners.append(listener)
    job = world.job(CRITIC, document(98), (3, 4, 5, 6, 7))
    world.run([job])
    assert_reused(job)
    assert world.fallbacks == 1


AT_LEARNING: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "observe": lambda cache: (cache.estimators["affine"], "observe"),
    "solve": lambda cache: (cache.estimators["affine"], "finish"),
    "predict": lambda cache: (cache.estimators["affine"], "predict"),
    "record": lambda cache: (cache.gate, "record"),
    "sample": lambda cache: (type(cache.view), "sample"),
    "rows of the own delta": lambda cache: (type(cache.view), "left_factors"),
    "attach": lambda cache: (cache.lessons._harvester, "attach"),
    "budget": lambda cache: (cache.learner, "_keep_budget"),
}


@pytest.mark.parametrize("seam", AT_LEARNING)
def test_a_fault_while_learning(seam: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(own_rank=8)
    world.cache.lessons.forward = None
    target, name = AT_LEARNING[seam](world.cache)
    original = getattr(target, name)
    broken = Broken(original)
    # Methods are replaced on the class where instances are frozen.
    patched = (lambda self, *args, **kw: broken(self, *args, **kw)) if isinstance(target, type) else broken
    monkeypatch.setattr(target, name, patched)
    job = world.read(CRITIC, document(98), reuse="never")
    assert_dense(job, "declined")
    assert broken.calls >= 1 and world.fallbacks == broken.calls and len(world.cache.learner) == 0
    monkeypatch.undo()
    after = world.read(CRITIC, document(99))
    assert_reused(after)


def test_a_fault_while_looking_for_heavy_hitters(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr("kvcmas_sgl.radix_ext.lessons.score_steps", Broken(lambda: None))
    world.read(PLANNER, document(60))
    assert world.fallbacks == 1 and world.source(PLANNER, document(60)).content.heavy is None
    job = world.read(CRITIC, document(60))
    assert_reused(job)


# ---- NaN and Inf ----


def poison(world: World, source: Source, value: float) -> None:
    slots = world.cache.spans.slots(source)
    world.cache.view.v_buffers[1][slots[3], 1, 2] = value


def learned_state(world: World) -> list[torch.Tensor]:
    tensors: dict[int, torch.Tensor] = {}
    recount.collect(vars(world.cache.estimators["affine"]), tensors)
    return [tensor.clone() for tensor in tensors.values()]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_in_a_source_is_not_placed(value: float) -> None:
    world = World()
    poison(world, world.source(PLANNER, document(98)), value)
    first, second = world.job(CRITIC, document(98)), world.job(CRITIC, document(99))
    for job in (first, second):
        assert world.scheduler.admit(job, 1000)
    world.scheduler.forward()
    for job in (first, second):
        world.scheduler.end_prefill(job)
    assert_dense(first)
    assert_reused(second)
    assert world.fallbacks == 1
    row = world.tree.rows.req_to_token[first.req.kv.req_pool_idx, : len(CRITIC.prompt(document(98)))].long()
    want = world.scheduler.formula.kv(world.scheduler.formula.rows(True, CRITIC.prompt(document(98))), range(len(row)))
    for layer in range(LAYERS):
        assert torch.allclose(world.cache.view.k_buffers[layer][row], want[0][layer], atol=1e-5)
        assert torch.equal(world.cache.view.v_buffers[layer][row], want[1][layer])


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("whose", ["its source's", "its own"])
def test_what_is_not_finite_in_a_dense_run_is_not_learned(value: float, whose: str) -> None:
    world = World(own_rank=8)
    world.cache.lessons.forward = None
    before, deltas, learned = learned_state(world), len(world.cache.deltas), world.cache.statistics.spans_learned
    job = world.job(CRITIC, document(98), reuse="never")
    world.run([job])
    poison(world, world.source(PLANNER if whose == "its source's" else CRITIC, document(98)), value)
    world.tree.learn()
    after = learned_state(world)
    assert len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert (len(world.cache.deltas), world.cache.statistics.spans_learned) == (deltas, learned)
    assert world.fallbacks == 1


def test_a_delta_that_is_not_finite_is_not_placed() -> None:
    world = World()
    (state,) = [s for e, s in world.cache.estimators["affine"]._edges.items() if e.consumer.startswith("critic")]
    with torch.inference_mode():
        state.delta.bias[1, 0, 5] = float("inf")
    job = world.job(CRITIC, document(98))
    world.run([job])
    assert_dense(job)
    assert world.fallbacks == 1


def test_an_own_delta_that_is_not_finite_is_not_placed() -> None:
    world = World(own_rank=8)
    text = document(98)
    world.read(CRITIC, text, reuse="never")
    mine = world.source(CRITIC, text)
    # The critic's own KV of the text leaves the tree; its delta sits on the planner's nodes.
    world.tree.cache.sources.node_gone(mine.node)
    (rows,) = [world.cache.deltas._rows[handle] for handle in list(world.cache.deltas._rows)[-1:]]
    with torch.inference_mode():
        rows.left_v[1, 4, 0] = float("nan")
    prompt = [*CRITIC.prefix, *text, 7, 7]
    twin = world.tree.request(prompt, CRITIC.hint(text), salt=None)
    twin.extra_key = "secret:critic-of-another-pool"
    job = world.scheduler.add(twin)
    world.run([job])
    assert_dense(job)
    assert world.fallbacks == 1


def test_logits_that_are_not_finite_are_no_audit() -> None:
    world = World()
    world.cache.lessons.forward = lambda tokens, slots, rows: torch.full((len(rows), 4), float("nan"))
    audits, learned = world.cache.statistics.audits, world.cache.statistics.spans_learned
    world.read(CRITIC, document(98), reuse="never")
    assert world.cache.statistics.audits == audits and world.fallbacks == 1
    # What the run teaches is learned all the same.
    assert world.cache.statistics.spans_learned == learned + 1
    assert_reused(world.read(CRITIC, document(99)))


# ---- what is forgotten, and the clock ----


def test_after_new_weights_nothing_learned_is_left_and_nothing_old_is_learned() -> None:
    world = World(own_rank=8)
    running = world.job(CRITIC, document(98), reuse="never")
    assert world.scheduler.admit(running, 1000)
    world.scheduler.forward()
    world.scheduler.end_prefill(running)
    planned = world.job(CRITIC, document(99))
    world.scheduler.match(planned)
    assert planned.agent.pieces
    world.cache.forget()
    state = world.cache.state()
    assert (state["state_bytes"], state["sources"], state["own_deltas"], state["learning"]) == (0, 0, 0, 0)
    world.scheduler.finish(running)
    world.tree.learn()
    assert world.cache.learner.state_bytes == 0 and len(world.cache.sources) == 0
    world.run([planned])
    assert_dense(planned, "no_source")
    assert world.fallbacks == 0
    # What is computed from now on counts again.
    assert [s.agent.role for s in world.cache.sources] == ["critic"]


@pytest.mark.parametrize("jump", [1e9, -1e9])
def test_the_time_of_day_may_jump(jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    world, real = World(), time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    job = world.read(CRITIC, document(98))
    assert_reused(job)
    statistics = world.cache.statistics
    assert 0 < statistics.match_seconds < 1e6 and 0 < statistics.learn_seconds < 1e6 and world.fallbacks == 0
