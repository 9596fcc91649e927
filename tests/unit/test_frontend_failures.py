"""Agents that fail, and arguments that are refused: the error comes out where it is read, and nothing hangs."""

from __future__ import annotations

import pytest
import sglang as sgl
from kvcmas_sgl.frontend import AgentError, shared

from tests.unit.test_frontend import DOC, endpoint, payload, server
from tests.unit.test_frontend_agents import ANSWERS, bodies_of, by_role, team

__all__ = ["endpoint", "server"]

# A failed agent warns from its program's thread, maybe after the test that wanted it has ended.
pytestmark = pytest.mark.filterwarnings("ignore:Error in stream_executor")


def failing(role: str):
    return lambda body: None if payload(body)["role"] == role else by_role(body)


@pytest.mark.parametrize("use_thread", [True, False])
def test_a_failed_agent_raises_where_it_is_read_in_the_program(server, endpoint, use_thread):
    server.reply = failing("coder")
    with pytest.raises(AgentError, match=r"^Agent 'coder' failed: .*out of memory") as raised:
        team.run(doc=DOC, backend=endpoint, use_thread=use_thread)
    assert isinstance(raised.value.__cause__, RuntimeError)
    del raised  # it holds the program in a cycle, see test_agents_leave_no_reference_cycle
    assert not bodies_of(server, "critic")


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_agent_that_the_program_did_not_read_is_its_error_and_nothing_hangs(server, endpoint, stream):
    server.reply = failing("coder")

    @sgl.function
    def unread(s):
        with s.agent("planner", system="You plan.") as planner:
            planner += sgl.user("?") + sgl.assistant(sgl.gen("plan"))
        with s.agent("coder", system="You code.") as coder:
            coder += sgl.user("?") + sgl.assistant(sgl.gen("code"))
            coder += sgl.user("Again") + sgl.assistant(sgl.gen("more"))

    state = unread.run(backend=endpoint, stream=stream)
    if stream:
        assert "".join(state.text_iter("more")) == ""
    assert state["plan"] == ANSWERS["planner"]
    assert isinstance(state.error(), AgentError)
    for name in ("code", "more"):
        with pytest.raises(AgentError, match="out of memory"):
            state[name]
        with pytest.raises(AgentError, match="out of memory"):
            state.get_meta_info(name)
    coder = state.agents["coder"]
    for read in (coder.text, coder.messages, lambda: coder.variables, lambda: coder["more"], coder.fork):
        with pytest.raises(AgentError):
            read()
    assert state.reuse == {"planner": [{"role": "planner"}], "coder": []}


def test_a_failed_fork_of_an_agent_raises_when_it_joins(server, endpoint):
    server.reply = lambda body: None if "Fail" in body["text"] else "ok"

    @sgl.function
    def forked(s, join):
        with s.agent("critic", system="You criticise.") as critic:
            critic += sgl.user("?")
            forks = critic.fork(2)
            forks[0] += sgl.user("Work.") + sgl.assistant(sgl.gen("x"))
            forks[1] += sgl.user("Fail.") + sgl.assistant(sgl.gen("x"))
            if join:
                forks.join()

    with pytest.raises(AgentError, match="out of memory"):
        forked.run(join=True, backend=endpoint)
    assert isinstance(forked.run(join=False, backend=endpoint).error(), AgentError)


def test_run_batch_returns_although_an_agent_fails(server, endpoint):
    server.reply = lambda body: None if "bad" in body["text"] else "ok"

    @sgl.function
    def one(s, doc):
        with s.agent("critic", system="You criticise.") as critic:
            critic += sgl.user(shared(doc)) + sgl.assistant(sgl.gen("x"))

    states = one.run_batch([{"doc": doc} for doc in ("a", "bad", "c", "d")], backend=endpoint, num_threads=2)
    assert [isinstance(state.error(), AgentError) for state in states] == [False, True, False, False]
    assert [states[n]["x"] for n in (0, 2, 3)] == ["ok"] * 3


def test_an_exception_in_the_block_comes_out_and_leaves_no_thread(server, endpoint):
    executors = []

    @sgl.function
    def broken(s):
        with s.agent("critic", system="You criticise.") as critic:
            executors.extend([critic.stream_executor, critic.fork(1)[0].fork(1)[0].stream_executor])
            with critic.var_scope("open"):
                raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        broken.run(backend=endpoint)
    for executor in executors:
        executor.worker.join(30)
        assert not executor.worker.is_alive()


def test_a_scope_that_never_closed_is_an_error_where_it_is_read(endpoint):
    @sgl.function
    def scoped(s):
        try:
            with s.agent("critic", system="You criticise.") as critic, critic.var_scope("open"):
                raise KeyError("mine")
        except KeyError:
            pass
        return s["open"]

    with pytest.raises(AgentError, match=r"^Agent 'critic' failed: variable 'open' was never written\.$"):
        scoped.run(backend=endpoint)


def test_bad_arguments_and_videos_get_one_sentence(endpoint):
    @sgl.function
    def bad(s, role, doc):
        with s.agent(role, system="S") as one:
            one += sgl.user(shared(doc))

    with pytest.raises(ValueError, match=r"^agent\(role=...\) is ''; it must be a non-empty string\.$"):
        bad.run(role="", doc=DOC, backend=endpoint)
    with pytest.raises(TypeError, match=r"^shared\(text\) holds a video; only text and images can be shared"):
        bad.run(role="a", doc=sgl.video("fox.mp4", 4), backend=endpoint)


def test_an_agent_of_an_agent_and_a_joined_fork_fail_under_their_own_name(server, endpoint):
    server.reply = failing("planner")

    @sgl.function
    def nested(s, mode):
        with s.agent("coder", system="You code.") as coder:
            with coder.agent("planner", system="You plan.") as planner:
                if mode is None:
                    planner += sgl.assistant(sgl.gen("plan"))
                else:
                    forks = planner.fork(1)
                    forks[0] += sgl.assistant(sgl.gen("plan"))
                    forks.join(mode)
            coder += sgl.assistant(sgl.gen("code"))

    for mode in (None, "concate_and_append"):
        with pytest.raises(AgentError, match=r"^Agent 'planner' failed: \{'error'") as raised:
            nested.run(mode=mode, backend=endpoint)["code"]
        assert isinstance(raised.value.__cause__, RuntimeError)
        del raised  # it holds the program in a cycle, see test_agents_leave_no_reference_cycle
