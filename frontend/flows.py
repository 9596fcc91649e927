"""The flow of a program: which agents it has, in order, and which documents and variables each of them reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvcmas_sgl.frontend import picture
from kvcmas_sgl.frontend.language import SharedArgument
from kvcmas_sgl.frontend.marks import MarkedText, Span
from kvcmas_sgl.frontend.program import AgentState, TracedAgent, agents_of
from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.interpreter import ProgramState
from sglang.lang.ir import SglConstantText, SglFunction, SglVariable

_LABEL_CHARS = 24


@dataclass(frozen=True)
class Item:
    """A text that agents share: a document (`writer` is None), or a variable of the agent with the key `writer`."""

    name: str
    writer: str | None
    readers: tuple[str, ...]


@dataclass(frozen=True)
class Flow:
    """Agents by key, in the order in which `s.agent` opened them, and what they share: documents, then variables.

    Variables that nobody reads are items without readers. Text outside of `shared` and variables that lost their
    mark (in an f-string) are each agent's own and do not appear.
    """

    agents: tuple[str, ...]
    items: tuple[Item, ...]

    def text(self) -> str:
        """The flow as lines of text, one box per agent: what it reads on the left, what it writes on the right."""
        return picture.as_text(self.agents, [(item.name, item.writer, item.readers) for item in self.items])

    def svg(self) -> str:
        """The flow as an SVG document: agents from left to right, one lane per item that is read."""
        return picture.as_svg(self.agents, [(item.name, item.writer, item.readers) for item in self.items])


def flow(program: SglFunction | ProgramState, **arguments: Any) -> Flow:
    """The flow of a program that is traced now, or of the state that a run or a trace returned.

    Args:
        program: an `@sgl.function`, or a state; a running state is waited for.
        arguments: of the program, where its trace needs values; the others stay placeholders.

    Raises:
        TypeError: `program` is neither, or has arguments although it is a state.
    """
    if isinstance(program, SglFunction):
        program = program.trace(backend=BaseBackend(), **arguments)
    elif not isinstance(program, ProgramState) or arguments:
        what = f"with arguments {sorted(arguments)}" if arguments else f"of type {type(program).__name__}"
        raise TypeError(f"flow(program) is a state {what}; it takes an sgl.function with arguments, or a state alone.")
    agents = agents_of(program)
    documents: dict[str, tuple[str, list[str]]] = {}
    variables: dict[tuple[str, str], list[str]] = {
        (key, name): [] for key, agent in agents.items() for name in _written_by(agent)
    }
    writers = _writers(agents)
    for key, agent in agents.items():
        reads = _reads_of_trace(agent) if isinstance(agent, TracedAgent) else _reads_of_run(agent)
        for content, name, writer in reads:
            owner = writers.get(writer) if writer is not None else None
            if owner == key:
                continue
            if owner is None:
                readers = documents.setdefault(content, (name or _label(content), []))[1]
            else:
                readers = variables.setdefault((owner, name), [])
            if key not in readers:
                readers.append(key)
    items = [Item(label, None, tuple(readers)) for label, readers in documents.values()]
    items += [Item(name, owner, tuple(readers)) for (owner, name), readers in variables.items()]
    return Flow(tuple(agents), tuple(items))


def _written_by(agent: AgentState | TracedAgent) -> list[str]:
    if isinstance(agent, TracedAgent):
        return list(agent.variables)
    agent.stream_executor.error()
    return [name for name in agent.stream_executor.variables if name is not None]


def _writers(agents: dict[str, AgentState | TracedAgent]) -> dict[str, str]:
    """What marks a writer in a prompt (a run's instance, a trace's id) -> the agent's key."""
    writers: dict[str, str] = {}
    for key, agent in agents.items():
        if isinstance(agent, TracedAgent):
            writers |= dict.fromkeys((state.pid for state in (agent, *agent.forks)), key)
        else:
            writers[agent.stream_executor.instance] = key
    return writers


def _reads_of_run(agent: AgentState) -> Iterator[tuple[str, str, str | None]]:
    for text in agent.stream_executor.texts():
        if isinstance(text, MarkedText):
            for span in text.spans:
                yield _content(text, span), span.name or "", span.writer


def _reads_of_trace(agent: TracedAgent) -> Iterator[tuple[str, str, str | None]]:
    for node in (node for state in (agent, *agent.forks) for node in state.flatten_nodes()):
        if isinstance(node, SharedArgument):
            yield f"argument {node.name}", node.span_name or node.name, None
        elif isinstance(node, SglVariable):
            yield node.name, node.name, node.source.pid
        elif isinstance(node, SglConstantText) and isinstance(node.value, MarkedText):
            for span in node.value.spans:
                yield _content(node.value, span), span.name or "", None


def _content(text: MarkedText, span: Span) -> str:
    return str.__getitem__(text, slice(span.start, span.end))


def _label(content: str) -> str:
    """A document without a name is called by its first words."""
    words = " ".join(content.split())
    return words if len(words) <= _LABEL_CHARS else words[: _LABEL_CHARS - 1] + "…"
