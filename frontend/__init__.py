"""Agents in SGLang's frontend language.

`s.agent(role, system=...)` opens an agent inside a program, `shared(text)` marks a document, and what one agent
writes is shared with every other that reads it. `AgentRuntimeEndpoint` is the backend that sends these marks. On
every other backend the same program runs and sends none.

    import sglang as sgl
    from kvcmas_sgl.frontend import AgentRuntimeEndpoint, shared

    @sgl.function
    def review(s, doc):
        with s.agent("planner", system="You plan in three steps.") as planner:
            planner += sgl.user(shared(doc) + "\\nMake a plan.")
            planner += sgl.assistant(sgl.gen("plan", max_tokens=64))
        with s.agent("critic", system="You are a harsh critic.") as critic:
            critic += sgl.user(shared(doc) + "\\nJudge this plan: " + s["plan"])
            critic += sgl.assistant(sgl.gen("critique", max_tokens=64))

    state = review.run(doc=text, backend=AgentRuntimeEndpoint("http://localhost:30000"))
    print(state["critique"], state.reuse["critic"])

A program that is one agent throughout says so with `s += agent("critic", system=...)`. `flow` draws who reads what.
"""

from __future__ import annotations

from kvcmas_sgl.frontend.endpoint import AgentRuntimeEndpoint
from kvcmas_sgl.frontend.executor import AgentError
from kvcmas_sgl.frontend.flows import Flow, Item, flow
from kvcmas_sgl.frontend.language import agent, shared
from kvcmas_sgl.frontend.marks import Agent, MarkedText, Prompt, Span
from kvcmas_sgl.frontend.program import AgentState, extend_program_state, open_agent

__all__ = [
    "Agent",
    "AgentError",
    "AgentRuntimeEndpoint",
    "AgentState",
    "Flow",
    "Item",
    "MarkedText",
    "Prompt",
    "Span",
    "agent",
    "flow",
    "open_agent",
    "shared",
]

extend_program_state()
