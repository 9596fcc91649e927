"""Agents at the same time: side by side, inside one another, in forks, in batches of programs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sglang as sgl
from kvcmas_sgl.frontend import MarkedText, shared

from tests.unit.test_frontend import DOC, endpoint, marked, payload, server
from tests.unit.test_frontend_agents import ANSWERS, bodies_of, by_role, spans_in

__all__ = ["endpoint", "server"]

# A failed agent warns from its program's thread, maybe after the test that wanted it has ended.
pytestmark = pytest.mark.filterwarnings("ignore:Error in stream_executor")


def test_agents_whose_variables_are_not_read_yet_run_in_parallel(server, endpoint):
    both = threading.Barrier(2, timeout=30)

    def together(body: dict[str, Any]) -> str:
        if payload(body)["role"] in "ab":
            both.wait()
        return payload(body)["role"] + " 🦊"

    server.reply = together

    @sgl.function
    def debate(s):
        with s.agent("a", system="You are for it.") as a:
            a += sgl.user("Why?") + sgl.assistant(sgl.gen("pro"))
        with s.agent("b", system="You are against it.") as b:
            b += sgl.user("Why not?") + sgl.assistant(sgl.gen("con"))
        with s.agent("judge", system="You judge.") as judge:
            judge += sgl.user(s["pro"] + " / " + s["con"]) + sgl.assistant(sgl.gen("verdict"))

    state = debate.run(backend=endpoint)
    assert (state["pro"], state["con"], state["verdict"]) == ("a 🦊", "b 🦊", "judge 🦊")
    (judge,) = bodies_of(server, "judge")
    assert payload(judge)["spans"] == spans_in(judge, "a 🦊", "b 🦊")


def test_two_open_agents_read_each_other(server, endpoint):
    server.reply = lambda body: payload(body)["role"] * 3

    @sgl.function
    def talk(s):
        with s.agent("a", system="A") as a, s.agent("b", system="B") as b:
            a += sgl.user("Begin.") + sgl.assistant(sgl.gen("first"))
            b += sgl.user("Answer: " + a["first"]) + sgl.assistant(sgl.gen("second"))
            a += sgl.user("And: " + s["second"] + " to your " + a["first"]) + sgl.assistant(sgl.gen("third"))

    talk.run(backend=endpoint).sync()
    _, b, a = server.bodies
    assert marked(b) == ["aaa"]
    assert marked(a) == ["bbb"]  # its own first answer is no span in its own prompt


@pytest.mark.parametrize("mode", ["gather_variable", "concate_and_append"])
def test_forks_inside_an_agent_are_the_agent_and_keep_marks(server, endpoint, mode):
    server.reply = by_role

    @sgl.function
    def branches(s, doc):
        with s.agent("planner", system="You plan.") as planner:
            planner += sgl.user("?") + sgl.assistant(sgl.gen("plan"))
        with s.agent("critic", system="You criticise.") as critic:
            critic += sgl.user(shared(doc))
            forks = critic.fork(2)
            for number, fork in enumerate(forks):
                fork += sgl.user(f"Side {number}: " + s["plan"]) + sgl.assistant(sgl.gen("side"))
            forks.join(mode)
            critic += sgl.user("Sum up.") + sgl.assistant(sgl.gen("sum"))

    state = branches.run(doc=DOC, backend=endpoint)
    assert state["sum"] == ANSWERS["critic"]
    assert len(state.reuse["critic"]) == 3
    *sides, last = bodies_of(server, "critic")
    plan = ANSWERS["planner"]
    assert [payload(body)["spans"] for body in sides] == [spans_in(body, DOC, plan) for body in sides]
    joined = [DOC] if mode == "gather_variable" else [DOC, plan, plan]
    assert payload(last)["spans"] == spans_in(last, *joined)
    if mode == "gather_variable":
        assert state["side"] == [ANSWERS["critic"]] * 2
        assert all(isinstance(side, MarkedText) for side in state["side"])


def test_agents_in_forks_of_the_program_join_with_them(server, endpoint):
    server.reply = by_role

    @sgl.function
    def panel(s):
        forks = s.fork(2)
        for fork in forks:
            with fork.agent("critic", system="You criticise.") as critic:
                critic += sgl.user("?") + sgl.assistant(sgl.gen("opinion"))
        forks.join()
        with s.agent("judge", system="You judge.") as judge:
            judge += sgl.user(s["opinion"][0] + s["opinion"][1]) + sgl.assistant(sgl.gen("verdict"))

    panel.run(backend=endpoint).sync()
    assert marked(server.bodies[-1]) == [ANSWERS["critic"]] * 2


def test_an_agent_opened_by_an_agent_joins_it(server, endpoint):
    server.reply = by_role

    @sgl.function
    def nested(s):
        with s.agent("coder", system="You code.") as coder:
            with coder.agent("planner", system="You plan.") as planner:
                planner += sgl.user("?") + sgl.assistant(sgl.gen("plan"))
            coder += sgl.user(coder["plan"]) + sgl.assistant(sgl.gen("code"))

    state = nested.run(backend=endpoint)
    assert (state["plan"], state["code"]) == (ANSWERS["planner"], ANSWERS["coder"])
    assert list(state.agents) == ["coder"] and list(state.agents["coder"].agents) == ["planner"]
    planner, coder = server.bodies
    assert marked(coder) == [ANSWERS["planner"]]
    assert payload(planner)["workflow"] == payload(coder)["workflow"]


@pytest.mark.parametrize("num_threads", [1, 4, "auto"])
def test_run_batch_keeps_programs_apart_and_fills_the_first_agents_prefix(server, endpoint, num_threads):
    server.reply = lambda body: f"<{body['text'].count('🦊')}>"
    system = "You plan every step twice before a word of it is said to anybody. " * 2

    @sgl.function
    def pair(s, doc):
        with s.agent("planner", system=system) as planner:
            planner += sgl.user(shared(doc)) + sgl.assistant(sgl.gen("plan"))
        with s.agent("critic", system="You criticise.") as critic:
            critic += sgl.user("Judge " + s["plan"]) + sgl.assistant(sgl.gen("critique"))

    documents = ["🦊" * (n + 1) for n in range(4)]
    states = pair.run_batch([{"doc": doc} for doc in documents], backend=endpoint, num_threads=num_threads)
    assert [state["plan"] for state in states] == ["<1>", "<2>", "<3>", "<4>"]
    assert sorted(marked(body)[0] for body in bodies_of(server, "planner")) == documents
    assert sorted(marked(body)[0] for body in bodies_of(server, "critic")) == ["<1>", "<2>", "<3>", "<4>"]
    workflows = {payload(body)["workflow"]: payload(body)["role"] for body in server.sent()}
    assert len(workflows) == 4
    (prefix,) = server.sent(generated=False)
    assert prefix["text"] == f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"
    assert payload(prefix)["role"] == "planner" and "workflow" not in payload(prefix)
