"""Agents inside one program: `with s.agent("critic", system=...) as critic:`.

`s` is SGLang's `ProgramState`, which SGLang itself creates for every run, fork and trace and hands to the
program's caller. A decorator of ours could wrap what the program sees but not what `run`, `run_batch` and
`trace` return; so `ProgramState` gets three names more (`agent`, `agents`, `reuse`), once, when this package is
imported. Nothing of SGLang's is replaced.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from kvcmas_sgl.frontend.executor import AgentExecutor
from kvcmas_sgl.frontend.language import agent_message
from sglang.lang.interpreter import ProgramState, ProgramStateGroup
from sglang.lang.tracer import StopTracing, TracerProgramState


class AgentState(ProgramState):
    """The state of one agent: used as any state of SGLang, with a prompt, variables and forks of its own.

    A variable that is read from it is text with one shared span, in every prompt but its own. Reading anything
    waits for it, and raises `AgentError` if the agent failed before.
    """

    def __init__(self, executor: AgentExecutor, key: str, workflow: str) -> None:
        super().__init__(executor)
        self.key = key
        self.workflow = workflow

    @property
    def role(self) -> str:
        """The agent's role as it is sent."""
        return self.stream_executor.role

    @property
    def variables(self) -> dict[str, Any]:
        """All variables by name; waits for all of them. Raises `AgentError`."""
        self.sync()
        return {name: self.get_var(name) for name in self.stream_executor.variables}

    @property
    def reports(self) -> list[dict[str, Any]]:
        """`meta_info["kvcmas"]` of each `gen` of the agent and its forks, as they finished; waits for them.

        Empty on a backend that sends no hints. `select` has none: SGLang drops its responses' meta information.
        """
        for executor in _with_forks(self.stream_executor):
            executor.error()
        return list(self.stream_executor.reports)

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> ProgramStateGroup:
        """As `ProgramState.fork`; the forks are the same agent. Raises `AgentError` if it failed before."""
        forks = self.stream_executor.fork(size, position_ids_offset)
        return ProgramStateGroup([AgentState(fork, self.key, self.workflow) for fork in forks], self)


class TracedAgent(TracerProgramState):
    """What `AgentState` is in a trace."""

    def __init__(self, program: TracerProgramState, key: str, role: str) -> None:
        super().__init__(program.backend, program.arguments, program.only_trace_prefix)
        self.key = key
        self.role = role
        self.forks: list[TracerProgramState] = []

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> ProgramStateGroup:
        group = super().fork(size, position_ids_offset)
        self.forks += group.states
        return group


class Team:
    """The agents of one run, by key: the role, and for later agents of the same role `role#2`, `role#3`, ..."""

    def __init__(self, workflow: str) -> None:
        self.workflow = workflow
        self.agents: dict[str, AgentState | TracedAgent] = {}

    @classmethod
    def of(cls, state: ProgramState) -> Team:
        """The team of a program; an agent's own team shares its workflow."""
        members = vars(state)
        if "_team" not in members:
            members["_team"] = cls(getattr(state, "workflow", None) or uuid.uuid4().hex)
        return members["_team"]

    def new_key(self, role: str) -> str:
        turn = sum(agent.role == role for agent in self.agents.values()) + 1
        return role if turn == 1 else f"{role}#{turn}"


@contextmanager
def open_agent(
    s: ProgramState,
    role: str,
    system: str,
    workflow: str | None = None,
    reuse: Literal["auto", "never"] | None = None,
) -> Iterator[AgentState | TracedAgent]:
    """Open an agent with a prompt of its own in program `s`; also the method `s.agent(...)`.

    The prompt starts with the agent's system message and has nothing of the text of `s`, only its backend, chat
    template and sampling parameters. It is computed while the program goes on: agents whose variables are not
    read yet run in parallel. Leaving the block joins the agent: `s["plan"]` is its variable, and `s.text()`,
    `s.sync()` and whatever is added to `s` wait for it.

    A variable of one agent is a shared span in the prompt of every other: `critic += sgl.user("Judge: " +
    s["plan"])`. `+`, slices and `strip` keep it one; an f-string, `join` or `replace` make plain text of it.

    Args:
        s: the program's state, or an agent's.
        role, system, reuse: as in `agent`.
        workflow: id that groups the requests of a run; by default one new id for all agents of this run.

    Raises:
        TypeError, ValueError: one sentence that names the argument, its value and what is allowed.
        AgentError: where an agent's variable or text is read that failed; unread, it is `s.error()`.
    """
    if isinstance(s, TracerProgramState):
        with _traced(s, role, system, workflow, reuse) as traced:
            yield traced
        return
    team = Team.of(s)
    workflow = team.workflow if workflow is None else workflow
    instance = uuid.uuid4().hex
    message = agent_message(role, system, workflow, reuse, instance)
    program = s.stream_executor
    agent = AgentState(AgentExecutor(program, role, instance, program, []), team.new_key(role), workflow)
    team.agents[agent.key] = agent
    try:
        agent += message
        yield agent
    finally:
        agent.stream_executor.leave()


@contextmanager
def _traced(s: TracerProgramState, role: Any, system: Any, workflow: Any, reuse: Any) -> Iterator[TracedAgent]:
    message = agent_message(role, system, workflow, reuse)
    if s.only_trace_prefix and s.nodes:
        raise StopTracing
    team = Team.of(s)
    name = role if isinstance(role, str) else f"<{role.name}>"
    agent = TracedAgent(s, team.new_key(name), name)
    team.agents[agent.key] = agent
    if s.only_trace_prefix:
        # The first thing a batch has in common is the first agent's prefix.
        agent.nodes = s.nodes
    agent += message
    yield agent
    if s.only_trace_prefix:
        raise StopTracing
    for variable in agent.variables.values():
        # The tracer names the owner of most nodes, not of text that it added itself.
        variable.source.pid = variable.source.pid or agent.pid
    s.variables.update(agent.variables)


def agents_of(s: ProgramState) -> dict[str, AgentState | TracedAgent]:
    """The agents that `s` opened, in order, by role (`role#2`, ... for later ones of that role); also `s.agents`."""
    return dict(Team.of(s).agents)


def reuse_of(s: ProgramState) -> dict[str, list[dict[str, Any]]]:
    """Per role, the reports of all its generations in this program, see `AgentState.reports`; also `s.reuse`."""
    by_role: dict[str, list[dict[str, Any]]] = {}
    for agent in Team.of(s).agents.values():
        if isinstance(agent, AgentState):
            by_role.setdefault(agent.role, []).extend(agent.reports)
    return by_role


def extend_program_state() -> None:
    """Give `ProgramState` the names `agent`, `agents` and `reuse`. Raises `ImportError` if SGLang has one of them."""
    for name, member in (("agent", open_agent), ("agents", property(agents_of)), ("reuse", property(reuse_of))):
        if hasattr(ProgramState, name):
            raise ImportError(
                f"SGLang's ProgramState has a member {name!r} of its own; this package needs SGLang 0.5.23."
            )
        setattr(ProgramState, name, member)


def _with_forks(executor: AgentExecutor) -> Iterator[AgentExecutor]:
    yield executor
    for fork in executor.forks:
        yield from _with_forks(fork)
