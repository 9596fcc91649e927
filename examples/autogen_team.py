"""An AutoGen team as its documentation builds one: a round robin of planner, coder and reviewer.

Nothing here knows kvcmas_sgl; only the URL points at the server.
"""

from __future__ import annotations

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import ChatAgent, Team
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient

from examples.command_line import Options, Turn, run
from examples.texts import sheets

AGENTS = {
    "planner": "You are a planner. You say which steps are needed, and in what order.",
    "coder": "You are a coder. You follow the plan and answer with one line of Python.",
    "reviewer": "You are a reviewer. You say what is wrong with the code, politely and in one sentence.",
}


async def work(base_url: str, options: Options) -> list[Turn]:
    """Run the team on one sheet after another, each time from an empty conversation."""
    client = OpenAIChatCompletionClient(
        model=options.model,
        base_url=f"{base_url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=options.max_tokens,
        model_info={
            "vision": False,
            "function_calling": False,
            "json_output": False,
            "structured_output": False,
            "family": "unknown",
        },
    )
    agents: list[ChatAgent | Team] = [
        AssistantAgent(name, client, system_message=text) for name, text in AGENTS.items()
    ]
    team = RoundRobinGroupChat(agents, termination_condition=MaxMessageTermination(len(agents) + 1))
    turns = []
    for sheet in sheets(options.rounds):
        await team.reset()
        result = await team.run(task=f"{sheet}\n\nWrite code for the first problem of this sheet.")
        turns += [
            Turn(message.source, message.content)
            for message in result.messages
            if isinstance(message, TextMessage) and message.source in AGENTS
        ]
        await asyncio.sleep(options.pause_s)
    await client.close()
    return turns


def main(base_url: str, options: Options) -> list[Turn]:
    """`work`, for callers without an event loop."""
    return asyncio.run(work(base_url, options))


if __name__ == "__main__":
    run(main, __doc__)
