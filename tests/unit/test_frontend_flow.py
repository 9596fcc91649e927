"""The flow of a program, from its trace and from its run, and its two pictures."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import sglang as sgl
from kvcmas_sgl.frontend import Flow, Item, agent, flow, shared
from kvcmas_sgl.frontend.example import main, solve
from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.ir import SglArgument, SglGen, SglVariable

from tests.unit.test_frontend import DOC, endpoint, server

__all__ = ["endpoint", "server"]

ROLES = ("planner", "coder", "critic", "judge")
VARIABLES = (
    Item("plan", "planner", ("coder", "critic")),
    Item("code", "coder", ("critic", "judge")),
    Item("review", "critic", ("judge",)),
    Item("verdict", "judge", ()),
)
SVG = "{http://www.w3.org/2000/svg}"


def test_a_trace_shows_agents_documents_and_variables():
    traced = solve.trace(backend=BaseBackend())
    assert list(traced.agents) == list(ROLES)
    nodes = traced.agents["coder"].flatten_nodes()
    (document,) = (node for node in nodes if isinstance(node, SglArgument))
    (plan,) = (node for node in nodes if isinstance(node, SglVariable))
    assert (document.name, plan.name) == ("task", "plan")
    assert isinstance(plan.source, SglGen) and plan.source.pid == traced.agents["planner"].pid
    expected = Flow(ROLES, (Item("task", None, ROLES), *VARIABLES))
    assert flow(traced) == flow(solve) == expected


def test_a_trace_with_values_and_a_run_show_the_same_flow(endpoint):
    # An unnamed document goes by its first words.
    name = DOC[:23] + "…"
    expected = Flow(ROLES, (Item(name, None, ROLES), *VARIABLES))
    assert flow(solve, task=DOC) == flow(solve.run(task=DOC, backend=endpoint)) == expected


def test_documents_are_told_apart_by_content_and_rounds_by_number(endpoint):
    @sgl.function
    def rounds(s):
        for turn in range(2):
            with s.agent("critic", system="You criticise.") as critic:
                forks = critic.fork(2)
                forks[0] += sgl.user(shared("one", name="law") + shared("two", name="case") + f"{turn}")
                if turn:
                    forks[1] += sgl.user("Before: " + s["note"] + shared("one"))
                critic += sgl.assistant(sgl.gen("note"))

    expected = Flow(
        ("critic", "critic#2"),
        (
            Item("law", None, ("critic", "critic#2")),
            Item("case", None, ("critic", "critic#2")),
            Item("note", "critic", ("critic#2",)),
            Item("note", "critic#2", ()),
        ),
    )
    assert flow(rounds) == flow(rounds.run(backend=endpoint)) == expected


def test_scopes_and_placeholder_roles_are_traced():
    @sgl.function
    def program(s, role, system):
        with s.agent(role, system=system) as first:
            with_scope = first.fork(1)[0]
            with_scope += "x"
            first += sgl.gen("plan")
        with s.agent("critic", system="You criticise.") as critic:
            critic += critic["plan"] if "plan" in critic.variables else s["plan"]

    assert flow(program) == Flow(("<role>", "critic"), (Item("plan", "<role>", ("critic",)),))


def test_shared_text_around_placeholders_is_traced():
    @sgl.function
    def program(s, doc):
        with s.agent("planner", system="You plan.") as planner:
            planner += sgl.user(shared("Title: " + doc, name="titled")) + sgl.gen("plan")
        with s.agent("critic", system="You criticise.") as critic:
            critic += sgl.user(shared("Plan: " + s["plan"]))

    assert flow(program).items == (Item("titled", None, ("planner",)), Item("plan", "planner", ("critic",)))


def test_a_program_without_agents_has_an_empty_flow():
    @sgl.function
    def plain(s, doc):
        s += agent("reader", system="You read.") + sgl.user(shared(doc))

    assert flow(plain) == Flow((), ())
    assert flow(plain).text() == "no agents\n"
    ElementTree.fromstring(flow(plain).svg())


def test_what_has_no_flow_is_refused():
    with pytest.raises(TypeError, match=r"^flow\(program\) is a state of type str; it takes an sgl.function"):
        flow("solve")
    with pytest.raises(TypeError, match=r"with arguments \['task'\]"):
        flow(solve.trace(backend=BaseBackend()), task="x")


def test_the_text_has_one_box_per_agent_with_what_it_reads_and_writes():
    drawn = Flow(("ab", "京"), (Item("law", None, ("ab", "京")), Item("x", "ab", ("京",)), Item("y", "京", ())))
    assert drawn.text() == (
        "                ┌────┐\n"
        "[law]       ──▶ │ ab │ ──▶ x\n"
        "                └──┬─┘\n"
        "                ┌──┴─┐\n"
        "[law], ab.x ──▶ │ 京 │ ──▶ y\n"
        "                └────┘\n"
    )


def test_the_svg_has_a_box_per_agent_and_an_arrow_per_reading():
    drawn = Flow(("a<b", "c"), (Item("R&D", None, ("a<b", "c")), Item("x", "a<b", ("c",)), Item("y", "c", ())))
    root = ElementTree.fromstring(drawn.svg())
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert sorted(texts) == ["R&D", "a<b", "c", "x"]
    boxes = [element for element in root.iter(f"{SVG}rect") if element.get("class") == "box"]
    heads = [element for element in root.iter(f"{SVG}path") if element.get("class") is None]
    assert len(boxes) == 2 and len(heads) == 3
    ends = [float(head.get("d").split()[0][1:]) for head in heads]
    inside = [
        sum(float(box.get("x")) < end < float(box.get("x")) + float(box.get("width")) for end in ends) for box in boxes
    ]
    assert inside == [1, 2] and len(set(ends)) == 3
    width = float(root.get("width"))
    assert all(float(box.get("x")) + float(box.get("width")) < width for box in boxes)


def test_the_command_prints_the_flow_and_writes_the_picture_of_the_documentation(tmp_path, capsys):
    main([str(tmp_path / "flow.svg")])
    assert capsys.readouterr().out == flow(solve).text()
    committed = Path(__file__).parents[2] / "docs" / "flow.svg"
    assert (tmp_path / "flow.svg").read_text(encoding="utf-8") == committed.read_text(encoding="utf-8")
