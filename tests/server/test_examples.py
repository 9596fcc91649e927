"""Every example program runs one small round on the shared server."""

from __future__ import annotations

import pytest

from examples import autogen_team, debate, langgraph_team, pipeline, rag_readers
from examples.command_line import Options, Program
from kvcmas_sgl.demo.servers import ServerProcess

OPTIONS = Options(max_tokens=8, rounds=1, pause_s=0)


@pytest.mark.parametrize(
    ("program", "agents"),
    [
        (pipeline.main, ["planner", "coder", "critic"]),
        (debate.main, ["optimist", "sceptic", "judge"]),
        (rag_readers.main, ["finder", "teacher", "editor"]),
    ],
    ids=["pipeline", "debate", "rag_readers"],
)
def test_programs_with_hints_answer_and_see_their_reports(
    server: ServerProcess, program: Program, agents: list[str]
) -> None:
    turns = program(server.url, OPTIONS)
    assert [turn.agent for turn in turns] == agents
    assert all(turn.answer.strip() for turn in turns)
    assert [turn.report and turn.report["role"] for turn in turns] == agents


@pytest.mark.parametrize(
    ("program", "agents"),
    [(langgraph_team.main, ["solver", "checker", "writer"]), (autogen_team.main, ["planner", "coder", "reviewer"])],
    ids=["langgraph", "autogen"],
)
def test_unmodified_framework_programs_answer(server: ServerProcess, program: Program, agents: list[str]) -> None:
    turns = program(server.url, OPTIONS)
    assert [turn.agent for turn in turns] == agents
    assert all(turn.answer.strip() for turn in turns)
