"""A LangGraph team as its documentation builds one: solver, checker and writer on one list of messages.

Nothing here knows kvcmas_sgl; only the URL points at the server.
"""

from __future__ import annotations

import time
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import SecretStr

from examples.command_line import Options, Turn, run
from examples.texts import sheets

AGENTS = {
    "solver": "You are a solver. You work out the answer step by step.",
    "checker": "You are a checker. You look for mistakes in what the solver said, and correct them.",
    "writer": "You are a writer for a school magazine. You tell readers in one lively sentence what was found.",
}


def node(name: str, model: ChatOpenAI) -> Any:
    """A graph node that answers to all messages so far under its own system prompt."""

    def answer(state: MessagesState) -> dict[str, Any]:
        reply = model.invoke([SystemMessage(AGENTS[name]), *state["messages"]])
        return {"messages": [AIMessage(reply.content, name=name)]}

    return answer


def main(base_url: str, options: Options) -> list[Turn]:
    """Run the graph on one sheet after another."""
    model = ChatOpenAI(
        model=options.model,
        base_url=f"{base_url}/v1",
        api_key=SecretStr("none"),
        temperature=0,
        max_completion_tokens=options.max_tokens,
    )
    graph = StateGraph(MessagesState)
    before = START
    for name in AGENTS:
        graph.add_node(name, node(name, model))
        graph.add_edge(before, name)
        before = name
    graph.add_edge(before, END)
    team = graph.compile()

    turns = []
    for sheet in sheets(options.rounds):
        result = team.invoke({"messages": [HumanMessage(f"{sheet}\n\nSolve the first problem of this sheet.")]})
        turns += [Turn(message.name, str(message.content)) for message in result["messages"][1:]]
        time.sleep(options.pause_s)
    return turns


if __name__ == "__main__":
    run(main, __doc__)
