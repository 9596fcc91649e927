"""Random interleavings of everything that can happen to the cache; `recount` checks after every step.

``python -m tests.tree --steps 100000`` runs it for long; `test_state_machine` runs it shortly.
"""

from __future__ import annotations

import argparse
import functools
import logging
import time
from array import array
from collections import Counter
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kvcmas_sgl.triton_kernels import RotaryTable
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from tests.tree import recount
from tests.tree.harness import DIM, FormulaModel, Role, Tree, document
from tests.tree.scheduler import Job, Scheduler

SLOTS = 208
SALTS = (None, "tenant")
# Agents are told by the first token of their prompts; the critic has two system prompts under one name.
ROLES = (Role("planner", [1, 2, 3, 4]), Role("critic", [5, 6, 7, 8, 9]), Role("critic", [10, 11]))
SETTINGS = {
    "own_rank": st.sampled_from([0, 4]),
    "head": st.sampled_from([0, 3]),
    "max_kl": st.sampled_from([10, 10, 0.001]),
    "state_bytes": st.sampled_from([1 << 30, 1 << 30, 100_000, 0]),
    "auto": st.booleans(),
    "check_share": st.sampled_from([0.5, 0]),
}
# A few texts, and parts of them: what prompts share is cut anywhere.
TEXTS = st.builds(
    lambda number, start, length: document(number, 24)[start : start + length],
    st.sampled_from([0, 0, 1]),
    st.sampled_from([0, 0, 0, 0, 5]),
    st.integers(8, 24),
)
CHUNKS = st.sampled_from([1000, 1000, 14, 5, 1])
WHICH = st.integers(0, 7)
STAGES = ("waiting", "admitted", "passed", "stashed", "decoding")
PROMPTS = {
    "role": st.sampled_from([ROLES[0], ROLES[1], ROLES[0], ROLES[1], ROLES[2]]),
    "salt": st.sampled_from([None, None, None, None, None, "tenant"]),
    "spans": st.lists(TEXTS, min_size=1, max_size=1) | st.lists(TEXTS, min_size=1, max_size=3),
    "answer": st.one_of(st.just(()), TEXTS),
    "kind": st.sampled_from(["hint", "hint", "hint", "no hint"]),
    "fields": st.sampled_from([{}, {}, {}, {"policy": "always"}, {"policy": "always"}, {"reuse": "never"}]),
    "question": st.sampled_from([(500, 7), (7,)]),
}

DISTURBANCES = st.sampled_from(
    ["abort", "abort", "refuse", "retract", "retract", "retract", "flush", "new weights", *[""] * 8]
)

BREAKABLE = [
    "plan",
    "correct",
    "replace_corrected",
    "mark_placed",
    "publish_prompt",
    "publish_answer",
    "observe",
    "finish",
    "record",
    "forward",
    "node_gone",
]
"""Methods of the planner, the view, the publisher, the estimator, the gate, the sources; and the model for audits."""

seen: Counter[str] = Counter()
"""What the machine did, over all examples of this process."""


class CacheMachine(RuleBasedStateMachine):
    """One cache over a small pool; its requests at every stage of their way."""

    @initialize(read=st.sampled_from([0, 3]), breaks=st.booleans(), **SETTINGS)
    def start(self, read: int, breaks: bool, **chosen: Any) -> None:
        self.tree = Tree(slots=SLOTS, allow_overrides=True, **chosen)
        self.formula = formula()
        self.scheduler = Scheduler(self.tree, self.formula)
        self.auto = chosen["auto"]
        for number in range(read):
            for role in ROLES[:2]:
                text = [document(50 + number, 24)]
                self.at_once(self.new_job(role, None, text, (), "hint", {"reuse": "never"}, (7,)))
        self.learn(1000)
        self.broken: set[str] = set()
        self.faults = 0
        self.breaks = breaks
        if breaks:
            cache = self.tree.cache
            affine = cache.estimators["affine"]
            for owner in (
                cache.planner, cache.view, cache._publisher, affine, cache.gate, cache.sources, cache.lessons
            ):  # fmt: skip
                for name in BREAKABLE:
                    if hasattr(owner, name):
                        self.make_breakable(owner, name)

    def make_breakable(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if name in self.broken:
                self.broken.remove(name)
                self.faults += 1
                seen["faults"] += 1
                raise RuntimeError(f"{name} fails once")
            return original(*args, **kwargs)

        # Some of them are frozen.
        object.__setattr__(owner, name, call)

    # ---- requests ----

    @rule(**PROMPTS)
    def arrive(self, **prompt: Any) -> None:
        if len(self.scheduler.jobs) < 6:
            self.new_job(**prompt)

    @precondition(lambda self: not self.any("admitted"))
    @rule(whole=st.booleans(), **PROMPTS)
    def serve(self, whole: bool, **prompt: Any) -> None:
        """A whole request, at once where it fits."""
        if whole:
            self.at_once(self.new_job(**prompt))
        elif len(self.scheduler.jobs) < 7:
            self.new_job(**prompt)

    def at_once(self, job: Job) -> None:
        scheduler = self.scheduler
        if not scheduler.admit(job, 1000):
            scheduler.abort(job)
            return
        scheduler.forward()
        scheduler.end_prefill(job)
        for _ in job.answer:
            if not scheduler.decode(job):
                break
        scheduler.finish(job)

    def new_job(
        self, role: Role, salt: str | None, spans: list, answer: Any, kind: str, fields: dict, question: tuple
    ) -> Job:
        prompt, payload = role.several(spans, glue=(12, 13), question=question)
        hint = {**payload, **fields} if kind == "hint" else None
        auto = role.prefix if kind == "no hint" and self.auto else None
        seen["requests"] += 1
        return self.scheduler.add(self.tree.request(prompt, hint, salt=salt, auto=auto), answer)

    def pick(self, which: int, *stages: str) -> Job:
        jobs = self.scheduler.at(*stages)
        return jobs[which % len(jobs)]

    def any(self, *stages: str) -> bool:
        return bool(self.scheduler.at(*stages))

    @precondition(lambda self: self.any("waiting"))
    @rule(which=WHICH, chunk=st.one_of(st.just(0), CHUNKS))
    def admit(self, which: int, chunk: int) -> None:
        """Into the next pass; or (chunk 0) it is looked at and waits on."""
        job = self.pick(which, "waiting")
        if chunk == 0:
            self.scheduler.match(job)
        else:
            seen["refused admissions"] += not self.scheduler.admit(job, chunk)

    @precondition(lambda self: self.any("stashed"))
    @rule(which=WHICH, chunk=CHUNKS)
    def go_on(self, which: int, chunk: int) -> None:
        job = self.pick(which, "stashed")
        if not self.scheduler.go_on(job, chunk):
            self.scheduler.retract(job)
            seen["retract"] += 1

    @precondition(lambda self: self.any("admitted"))
    @rule()
    def forward(self) -> None:
        self.scheduler.forward()
        seen["passes"] += 1

    @precondition(lambda self: self.any("passed"))
    @rule(which=WHICH)
    def end_pass(self, which: int) -> None:
        job = self.pick(which, "passed")
        if job.req.extend_end < len(job.tokens):
            self.scheduler.stash(job)
            seen["chunks"] += 1
        else:
            self.scheduler.end_prefill(job)

    @precondition(lambda self: self.any("decoding"))
    @rule(which=WHICH, tokens=st.integers(1, 12))
    def decode(self, which: int, tokens: int) -> None:
        job = self.pick(which, "decoding")
        for _ in range(tokens):
            if not self.scheduler.decode(job):
                self.scheduler.retract(job)
                seen["retract"] += 1
                break

    @precondition(lambda self: self.scheduler.jobs)
    @rule(which=WHICH, chunk=CHUNKS, times=st.integers(1, 4))
    def advance(self, which: int, chunk: int, times: int) -> None:
        """Whatever comes next for one of the requests, some times."""
        job = self.pick(which, *STAGES)
        for _ in range(times):
            self.next_step(job, chunk)
            self.everything_adds_up()
            if job not in self.scheduler.jobs:
                break

    def next_step(self, job: Job, chunk: int) -> None:
        at = self.scheduler.at(job.stage).index(job)
        if job.stage == "waiting":
            self.admit(which=at, chunk=chunk)
        elif job.stage == "admitted":
            self.forward()
        elif job.stage == "passed":
            self.end_pass(which=at)
        elif job.stage == "stashed":
            self.go_on(which=at, chunk=chunk)
        elif chunk < 10:
            self.decode(which=at, tokens=chunk)
        else:
            self.finish(which=at)

    # Drawn more often than what disturbs.
    advance_further = advance_on = advance

    @precondition(lambda self: self.any("decoding"))
    @rule(which=WHICH)
    def finish(self, which: int) -> None:
        self.scheduler.finish(self.pick(which, "decoding"))
        seen["finished"] += 1

    @precondition(lambda self: len(self.tree.cache.sources) and not self.any("admitted"))
    @rule(which=st.integers(0, 30), cut=st.integers(0, 100))
    def branch(self, which: int, cut: int) -> None:
        """A prompt that leaves a known path somewhere: what lies on the node there is cut in two."""
        known = list(self.tree.cache.sources)
        node = known[which % len(known)].node
        (spot,) = [spot for spot in recount.walk(self.tree) if spot.node.id == node]
        role = next(role for role in ROLES if role.prefix[0] == spot.tokens[0])
        cut = 1 + cut % len(spot.tokens)
        hint = {"role": role.name, "spans": [[len(role.prefix), cut]] if cut > len(role.prefix) else []}
        auto = spot.namespace[0] == "secret:auto"
        request = self.tree.request(
            [*spot.tokens[:cut], 501],
            None if auto else hint,
            salt=spot.namespace[1],
            auto=role.prefix if auto else None,
        )
        self.at_once(self.scheduler.add(request))
        seen["branches"] += 1

    # ---- what disturbs ----

    @precondition(lambda self: self.scheduler.jobs)
    @rule(
        which=WHICH, how=st.sampled_from(["", "", "", "abort", "refuse", "retract", "retract", "flush", "new weights"])
    )
    def disturb(self, which: int, how: str) -> None:
        """One rule for all of it: most of the time there is none."""
        if how == "abort" and self.any("waiting", "passed", "stashed", "decoding"):
            self.scheduler.abort(self.pick(which, "waiting", "passed", "stashed", "decoding"))
        elif how == "refuse" and self.any("waiting") and not self.any("admitted"):
            self.refuse(self.pick(which, "waiting"))
        elif how == "retract" and self.any("passed", "stashed", "decoding"):
            self.scheduler.retract(self.pick(which, "passed", "stashed", "decoding"))
        elif how == "flush" and not self.scheduler.live:
            self.scheduler.flush()
            self.nothing_is_known()
        elif how == "new weights" and not self.any("admitted"):
            # Without a flush: the tree stays.
            self.tree.cache.forget()
            self.nothing_is_known()
        else:
            return
        seen[how] += 1

    @precondition(lambda self: self.breaks)
    @rule(what=st.sampled_from(BREAKABLE))
    def something_breaks(self, what: str) -> None:
        """The next call of one of our parts raises."""
        self.broken.add(what)

    def refuse(self, job: Job) -> None:
        """As ``Req.set_finish_with_abort``: what is wrong with it is told after a pass over one token."""
        if not job.req.output_ids:
            job.req.origin_input_ids, job.answer = array("q", [0]), ()
            if self.scheduler.admit(job, 1000):
                self.scheduler.forward()
                self.scheduler.end_prefill(job)
        self.scheduler.abort(job)

    def nothing_is_known(self) -> None:
        cache = self.tree.cache
        assert (cache.learner.state_bytes, len(cache.learner), len(cache.sources), len(cache.gate._pairs)) == (0,) * 4

    # ---- the cache ----

    @rule(steps=st.sampled_from([1, 1, 1, 1000]))
    def idle(self, steps: int) -> None:
        self.learn(steps)

    def learn(self, steps: int) -> None:
        learner = self.tree.cache.learner
        for _ in range(steps):
            before = len(learner)
            if not learner.step():
                break
            seen["learning steps"] += 1
            if len(learner) < before:
                assert learner.state_bytes <= self.tree.cache.config.state_bytes, "over the byte budget"

    @rule(tokens=st.sampled_from([1, 1, 1, 10, 10, 30, 1000]))
    def evict(self, tokens: int) -> None:
        seen["evicted tokens"] += self.tree.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted

    # ---- after every step ----

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        seen["steps"] += 1
        self.scheduler.check(SALTS)
        assert self.tree.cache.statistics.fallbacks <= self.faults, "an internal failure"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        statistics = self.tree.cache.statistics
        seen["corrected tokens"] += statistics.corrected_tokens
        seen["learned spans"] += statistics.spans_learned
        seen["audits"] += statistics.audits
        seen["checks"] += statistics.checks
        seen.update({f"spans {reason}": count for reason, count in statistics.reasons.items()})
        for job in list(self.scheduler.jobs):
            if job.stage == "admitted":
                self.scheduler.forward()
            self.scheduler.abort(job)
        self.tree.cache.learner.stop()
        self.tree.cache.sanity_check()
        self.scheduler.check(SALTS)


@functools.cache
def formula() -> recount.Formula:
    """The formula model's KV of all agents; making it takes longer than a tree."""
    model = FormulaModel(RotaryTable.from_theta(10000.0, DIM, 2048))
    return recount.Formula(model, [role.prefix for role in ROLES])


def profile(examples: int, steps: int, *, shrink: bool = True) -> settings:
    """How long to run: examples of so many steps each."""
    phases = [Phase.explicit, Phase.generate, *([Phase.shrink] if shrink else [])]
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=phases,
        print_blob=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="steps to take, at least")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each round of 30 examples adds one")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after the round that ends later")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Half of the examples break something of ours on purpose.
    logging.getLogger("kvcmas_sgl").setLevel(logging.CRITICAL)
    started, number = time.monotonic(), options.seed
    while seen["steps"] < options.steps and time.monotonic() - started < options.seconds:
        machine = type("SeededCacheMachine", (CacheMachine,), {})
        run_state_machine_as_test(seed(number)(machine), settings=profile(30, 150))
        print(f"seed {number}: {seen['steps']} steps after {time.monotonic() - started:.0f} s", flush=True)
        number += 1
    for what, count in seen.most_common():
        print(f"{count:10d} {what}")
