"""Agents inside one program, on SGLang's interpreter and tracer, against a server that records what it is sent."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from typing import Any

import pytest
import sglang as sgl
from kvcmas_sgl.frontend import MarkedText, Span, agent, open_agent, shared
from kvcmas_sgl.frontend.program import extend_program_state
from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

from tests.unit.test_frontend import DOC, Recorder, endpoint, marked, payload, server

__all__ = ["endpoint", "server"]

# A failed agent warns from its program's thread, maybe after the test that wanted it has ended.
pytestmark = pytest.mark.filterwarnings("ignore:Error in stream_executor")

ANSWERS = {
    "planner": "1. Boil 東京 noodles 🍜\n2. Salt 👩‍👩‍👧",
    "coder": "def ramen(): return '🍜'",
    "critic": " Too salty 🧂.",
}


def by_role(body: dict[str, Any]) -> str:
    return ANSWERS.get(payload(body)["role"], "ok") if "kv_hints" in body else "ok"


def spans_in(body: dict[str, Any], *texts: str) -> list[list[int]]:
    """Where the texts stand in the prompt, each searched after the one before."""
    found, at = [], 0
    for text in texts:
        start = body["text"].index(text, at)
        at = start + len(text)
        found.append([start, at])
    return found


def bodies_of(server: Recorder, role: str) -> list[dict[str, Any]]:
    return [body for body in server.sent() if payload(body)["role"] == role]


@sgl.function
def team(s, doc):
    with s.agent("planner", system="You plan 🗺.") as planner:
        planner += sgl.user(shared(doc, name="menu") + "\nMake a plan.")
        planner += sgl.assistant(sgl.gen("plan", max_tokens=8))
    with s.agent("coder", system="You code.") as coder:
        coder += sgl.user(shared(doc, name="menu") + "\nFollow: " + s["plan"])
        coder += sgl.assistant(sgl.gen("code", max_tokens=8))
    with s.agent("critic", system="You are a harsh critic.") as critic:
        critic += sgl.user("Judge this plan: " + s["plan"] + " and this code: " + s["code"] + "!")
        critic += sgl.assistant(sgl.gen("critique", max_tokens=8))


@pytest.mark.parametrize("use_thread", [True, False])
def test_each_agent_has_its_own_prompt_and_what_others_wrote_is_a_span_in_it(server, endpoint, use_thread):
    server.reply = by_role
    state = team.run(doc=DOC, backend=endpoint, use_thread=use_thread)
    state.sync()
    assert [state[name] for name in ("plan", "code", "critique")] == list(ANSWERS.values())
    planner, coder, critic = server.bodies
    plan, code = ANSWERS["planner"], ANSWERS["coder"]
    assert critic["text"] == (
        "<|im_start|>system\nYou are a harsh critic.<|im_end|>\n<|im_start|>user\n"
        f"Judge this plan: {plan} and this code: {code}!<|im_end|>\n<|im_start|>assistant\n"
    )
    assert payload(planner)["spans"] == spans_in(planner, DOC)
    assert payload(coder)["spans"] == spans_in(coder, DOC, plan)
    assert payload(critic)["spans"] == spans_in(critic, plan, code)
    assert state.text() == ""


def test_one_workflow_id_per_run_unless_given(server, endpoint):
    @sgl.function
    def named(s):
        with s.agent("a", system="A") as a:
            a += sgl.assistant(sgl.gen("x"))
        with s.agent("b", system="B", workflow="w-7", reuse="never") as b:
            b += sgl.assistant(sgl.gen("y"))

    for _ in range(2):
        team.run(doc=DOC, backend=endpoint).sync()
    named.run(backend=endpoint).sync()
    ids = [payload(body)["workflow"] for body in server.bodies]
    assert ids[0] == ids[1] == ids[2] and ids[3] == ids[4] == ids[5]
    (given,) = bodies_of(server, "b")
    assert len(set(ids)) == 4 and payload(given)["workflow"] == "w-7" and payload(given)["reuse"] == "never"


def test_the_state_keeps_each_agents_text_variables_and_reports(server, endpoint):
    server.reply = by_role

    @sgl.function
    def rounds(s):
        for number in range(2):
            with open_agent(s, "critic", system="You criticise.") as critic:
                critic += sgl.user(f"Round {number}") + sgl.assistant(sgl.gen("one") + " and " + sgl.gen("two"))

    state = rounds.run(backend=endpoint)
    assert list(state.agents) == ["critic", "critic#2"]
    second = state.agents["critic#2"]
    assert second.role == "critic" and "Round 1" in second.text() and "Round 0" not in second.text()
    assert second.variables == {"one": ANSWERS["critic"], "two": ANSWERS["critic"]}
    assert second.reports == [{"role": "critic"}] * 2
    assert state.reuse == {"critic": [{"role": "critic"}] * 4}
    assert state.get_meta_info("two")["kvcmas"] == {"role": "critic"}


def test_a_variable_read_twice_and_cut_is_two_spans(server, endpoint):
    server.reply = lambda body: "\n 東京 🍜 \n"

    @sgl.function
    def twice(s):
        with s.agent("a", system="A") as a:
            a += sgl.assistant(sgl.gen("x"))
        with s.agent("b", system="B") as b:
            b += sgl.user(s["x"] + s["x"].strip() + "|" + s["x"].upper())
            b += sgl.assistant(sgl.gen("y"))

    twice.run(backend=endpoint).sync()
    body = server.bodies[1]
    start = body["text"].index("\n 東京 🍜 \n東京 🍜|")
    assert payload(body)["spans"] == [[start, start + 8], [start + 8, start + 12]]


def test_an_empty_answer_is_no_span_and_no_error(server, endpoint):
    server.reply = lambda body: ""

    @sgl.function
    def silent(s):
        with s.agent("a", system="A") as a:
            a += sgl.assistant(sgl.gen("x"))
        with s.agent("b", system="B") as b:
            b += sgl.user("Read: " + s["x"] + shared(s["x"], name="x") + ".") + sgl.assistant(sgl.gen("y"))

    assert silent.run(backend=endpoint)["y"] == ""
    assert payload(server.bodies[1])["spans"] == [] and "Read: ." in server.bodies[1]["text"]


def test_shared_around_a_variable_changes_nothing_and_around_more_text_counts_itself(server, endpoint):
    server.reply = by_role

    @sgl.function
    def reshared(s):
        with s.agent("planner", system="You plan.") as planner:
            planner += sgl.assistant(sgl.gen("plan"))
        with s.agent("coder", system="You code.") as coder:
            coder += sgl.user(shared(s["plan"], name="steps") + shared("Plan: " + s["plan"], name="all"))
            coder += sgl.assistant(sgl.gen("code"))

    state = reshared.run(backend=endpoint)
    spans = state.agents["coder"].text().spans
    plan = ANSWERS["planner"]
    assert marked(server.bodies[1]) == [plan, "Plan: " + plan]
    assert [span.name for span in spans] == ["plan", "all"]
    assert [span.writer is None for span in spans] == [False, True]


def test_an_agents_variable_streams_from_the_program(server, endpoint):
    async def pieces(state: Any, name: str) -> list[tuple[str, Any]]:
        return [piece async for piece in state.text_async_iter(name, return_meta_data=True)]

    def held(body: dict[str, Any]) -> str:
        # SGLang streams a variable only to who asks before the program ends.
        if payload(body)["role"] == "critic":
            asked.wait(30)
        return by_role(body)

    asked = threading.Event()
    server.reply = held
    state = team.run(doc=DOC, backend=endpoint, stream=True)
    assert "".join(state.text_iter("plan")) == ANSWERS["planner"]
    # SGLang makes a first piece known before its meta_info, and who asks in between gets an AssertionError.
    deadline = time.monotonic() + 30
    while "code" not in state.stream_executor.meta_info:
        assert time.monotonic() < deadline, "the coder never answered"
        time.sleep(0.01)
    streamed = asyncio.run(pieces(state, "code"))
    asked.set()
    assert "".join(text for text, _ in streamed) == ANSWERS["coder"]
    assert [meta["kvcmas"] for _, meta in streamed] == [{"role": "coder"}] * len(streamed)
    assert [state[name] for name in ("plan", "code", "critique")] == list(ANSWERS.values())
    assert all(body["stream"] for body in server.bodies)
    assert payload(server.bodies[2])["spans"] == spans_in(server.bodies[2], ANSWERS["planner"], ANSWERS["coder"])
    assert "".join(state.text_iter()) == ""


def test_select_in_an_agent_passes_its_choice_on(server, endpoint):
    @sgl.function
    def choose(s, doc):
        with s.agent("judge", system="You judge.") as judge:
            judge += sgl.user(shared(doc) + "Good?")
            judge += sgl.assistant(sgl.select("verdict", choices=["a long no", "yes"]))
        with s.agent("clerk", system="You write.") as clerk:
            clerk += sgl.user("Write: " + s["verdict"]) + sgl.assistant(sgl.gen("note"))

    state = choose.run(doc=DOC, backend=endpoint)
    assert state["verdict"] == "yes" and state["note"]
    filled, scored, note = server.bodies
    assert marked(filled) == [DOC] and marked(note) == ["yes"]
    for text, hints in zip(scored["text"], scored["kv_hints"], strict=True):
        assert marked({"text": text, "kv_hints": hints}) == [DOC]
    assert state.reuse == {"judge": [], "clerk": [{"role": "clerk"}]}


def test_a_plain_endpoint_gets_the_same_requests_without_hints(server, endpoint):
    ours = team.run(doc=DOC, backend=endpoint)
    ours.sync()
    plain = team.run(doc=DOC, backend=RuntimeEndpoint(server.url, chat_template_name="chatml"))
    assert plain["critique"] == ours["critique"]
    with_hints, without = server.bodies[:3], server.bodies[3:]
    assert [{k: v for k, v in body.items() if k != "kv_hints"} for body in with_hints] == without
    assert plain.reuse == {"planner": [], "coder": [], "critic": []}


class OtherBackend(BaseBackend):
    def generate(self, s: Any, sampling_params: Any) -> tuple[str, dict[str, Any]]:
        return f"{len(s.text_)}", {}


def test_any_other_backend_runs_the_program():
    state = team.run(doc="soup", backend=OtherBackend())
    prompts = [state.agents[role].text() for role in ("planner", "coder", "critic")]
    for name, prompt in zip(("plan", "code", "critique"), prompts, strict=True):
        tail = "\n" if prompt.endswith("\n") else ""
        assert prompt.rstrip("\n").endswith(state[name]) and state[name] == str(len(prompt) - len(state[name] + tail))


def test_agents_leave_no_reference_cycle(server, endpoint):
    # SGLang's `__del__` of a program takes a lock: from the garbage collector, it could wait for it for ever.
    state = team.run(doc=DOC, backend=endpoint)
    state.sync()
    state.stream_executor.worker.join(30)
    executor = weakref.ref(state.stream_executor)
    gc.disable()
    try:
        del state
        assert executor() is None
    finally:
        gc.enable()


def test_an_agent_takes_text_inside_its_block_only(endpoint):
    @sgl.function
    def late(s):
        with s.agent("critic", system="You criticise.") as critic:
            pass
        critic += "too late"

    with pytest.raises(RuntimeError, match=r"^Agent 'critic' has ended; text is added inside its `with` block only\.$"):
        late.run(backend=endpoint)


def test_the_agent_that_used_a_name_last_owns_it_and_each_keeps_its_own(server, endpoint):
    server.reply = lambda body: payload(body)["role"]

    @sgl.function
    def same(s):
        with s.agent("a", system="A") as a, s.agent("b", system="B") as b:
            a += sgl.assistant(sgl.gen("x"))
            b += sgl.assistant(sgl.gen("x"))

    state = same.run(backend=endpoint)
    assert state["x"] == "b"
    state.sync()
    assert state["x"] == "b" and (state.agents["a"]["x"], state.agents["b"]["x"]) == ("a", "b")


def test_variables_set_by_hand_and_scopes_are_variables_too(server, endpoint):
    server.reply = by_role

    @sgl.function
    def scoped(s):
        with s.agent("planner", system="You plan.") as planner:
            planner["note"] = "by hand 🦊"
            planner["count"] = 3
            with planner.assistant(), planner.var_scope("all"):
                planner += "Plan: " + sgl.gen("plan")
        with s.agent("coder", system="You code.") as coder:
            coder += sgl.user(s["note"] + "|" + s["all"]) + sgl.assistant(sgl.gen("code"))

    state = scoped.run(backend=endpoint)
    assert state["count"] == 3 and state["code"] == ANSWERS["coder"]
    assert marked(server.bodies[1]) == ["by hand 🦊", "Plan: " + ANSWERS["planner"]]


def test_more_spans_than_the_wire_takes_send_the_longest(server, endpoint):
    @sgl.function
    def many(s):
        s += agent("reader", system="You read.")
        for number in range(70):
            s += shared("x" * (number % 10 + 1)) + "."
        s += sgl.assistant(sgl.gen("answer"))

    assert many.run(backend=endpoint)["answer"]
    lengths = [len(text) for text in marked(server.bodies[0])]
    assert len(lengths) == 64 and sorted(lengths) == sorted([n % 10 + 1 for n in range(70)])[6:]


def test_marked_text_keeps_marks_through_what_users_do_with_it():
    plan = MarkedText("ab 🦊", (Span(0, 4, "plan", "w"),))
    assert ("x" + plan + "y").spans == (Span(1, 5, "plan", "w"),)
    assert (plan + plan).spans == (Span(0, 4, "plan", "w"), Span(4, 8, "plan", "w"))
    assert ("x" + plan)[1:].spans == plan.spans and ("x" + plan)[2:].spans == ()
    assert type(f"{plan}!") is str and type(", ".join([plan, plan])) is str
    assert type(plan[0]) is str


def test_a_name_that_sglang_uses_itself_is_not_taken_over():
    with pytest.raises(ImportError, match=r"^SGLang's ProgramState has a member 'agent' of its own; "):
        extend_program_state()
