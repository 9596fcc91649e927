"""Agents in SGLang's frontend language.

`agent(role, system)` and `shared(text)` are two more primitives for `@sgl.function` programs, and
`AgentRuntimeEndpoint` is the backend that sends what they mark. On every other backend they are what they
look like: a system message and text.

    import sglang as sgl
    from kvcmas_sgl.frontend import AgentRuntimeEndpoint, agent, shared

    @sgl.function
    def critic(s, doc):
        s += agent("critic", system="You are a harsh critic.")
        s += sgl.user(shared(doc) + "\\nWhat is wrong with it?")
        s += sgl.assistant(sgl.gen("answer", max_tokens=64))

    state = critic.run(doc=text, backend=AgentRuntimeEndpoint("http://localhost:30000"))
    print(state["answer"], state.get_meta_info("answer")["kvcmas"])
"""

from __future__ import annotations

from kvcmas_sgl.frontend.endpoint import AgentRuntimeEndpoint
from kvcmas_sgl.frontend.language import agent, shared
from kvcmas_sgl.frontend.marks import Agent, Prompt, Span

__all__ = ["Agent", "AgentRuntimeEndpoint", "Prompt", "Span", "agent", "shared"]
