"""Planner, coder and critic in one program of SGLang's frontend language.

The sheet is marked with `shared`; what an agent generates becomes a shared span where another one uses it.
"""

from __future__ import annotations

import time
from typing import Any

import sglang as sgl
from kvcmas_sgl.frontend import AgentRuntimeEndpoint, shared

from examples.command_line import Options, Turn, run
from examples.texts import sheets

AGENTS = ("planner", "coder", "critic")


@sgl.function
def solve(s: Any, sheet: str, tokens: int) -> None:
    """A plan, code that follows it, and a review of both."""
    with s.agent("planner", system="You are a planner. You break work into small steps.") as planner:
        planner += sgl.user(shared(sheet) + "\n\nWhich steps solve the first problem?")
        planner += sgl.assistant(sgl.gen("plan", max_tokens=tokens, temperature=0))
    with s.agent("coder", system="You are a coder. You answer with short Python.") as coder:
        coder += sgl.user(shared(sheet) + "\n\nThe plan:\n" + s["plan"] + "\n\nWrite Python for the first problem.")
        coder += sgl.assistant(sgl.gen("code", max_tokens=tokens, temperature=0))
    with s.agent("critic", system="You are a harsh critic who finds what is unclear.") as critic:
        critic += sgl.user(shared(sheet) + "\n\nThe plan:\n" + s["plan"] + "\n\nThe code:\n" + s["code"] + "\n\nWell?")
        critic += sgl.assistant(sgl.gen("review", max_tokens=tokens, temperature=0))


def main(base_url: str, options: Options) -> list[Turn]:
    """Run the program on one sheet after another; the endpoint serves its own model, whatever `options.model` says."""
    # SGLang's language guesses a template by the model's name, and does not know SmolLM2's.
    backend = AgentRuntimeEndpoint(base_url, chat_template_name="chatml")
    turns = []
    for sheet in sheets(options.rounds):
        state = solve.run(sheet=sheet, tokens=options.max_tokens, backend=backend)
        for agent, name in zip(AGENTS, ("plan", "code", "review"), strict=True):
            turns.append(Turn(agent, str(state[name]), next(iter(state.reuse[agent]), None)))
        time.sleep(options.pause_s)
    return turns


if __name__ == "__main__":
    run(main, __doc__)
