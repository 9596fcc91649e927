"""Planner, coder and critic in SGLang's frontend language: the sheet that all three read is marked with `shared`."""

from __future__ import annotations

import time
from typing import Any

import sglang as sgl
from kvcmas_sgl.frontend import AgentRuntimeEndpoint, agent, shared

from examples.command_line import Options, Turn, run
from examples.texts import sheets

AGENTS = {
    "planner": ("You are a planner. You break work into small steps.", "Which steps solve the first problem?"),
    "coder": ("You are a coder. You answer with short Python.", "Write a Python expression for the first problem."),
    "critic": ("You are a harsh critic who finds what is unclear.", "Which of these problems is worded worst?"),
}


@sgl.function
def step(s: Any, role: str, sheet: str, notes: str, max_tokens: int) -> None:
    """One agent reads the sheet, then what the agents before it said."""
    system, question = AGENTS[role]
    s += agent(role, system=system)
    s += sgl.user(shared(sheet) + f"\n\n{notes}{question}")
    s += sgl.assistant(sgl.gen("answer", max_tokens=max_tokens, temperature=0))


def main(base_url: str, options: Options) -> list[Turn]:
    """Run the pipeline on one sheet after another; the endpoint serves its own model, whatever `options.model` says."""
    # SGLang's language guesses a template by the model's name, and does not know SmolLM2's.
    backend = AgentRuntimeEndpoint(base_url, chat_template_name="chatml")
    turns = []
    for sheet in sheets(options.rounds):
        notes = ""
        for role in AGENTS:
            state = step.run(role=role, sheet=sheet, notes=notes, max_tokens=options.max_tokens, backend=backend)
            turns.append(Turn(role, state["answer"], state.get_meta_info("answer").get("kvcmas")))
            notes += f"The {role} said: {state['answer']}\n\n"
        time.sleep(options.pause_s)
    return turns


if __name__ == "__main__":
    run(main, __doc__)
