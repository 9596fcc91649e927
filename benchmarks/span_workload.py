"""What `benchmarks/spans.py` sends: fresh shared texts, agents that read several of them in one prompt, and rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.workload.text import Span, TextSupply
from kvcmas_sgl.demo.prompts import PromptMaker, TokenPrompt
from kvcmas_sgl.demo.roles import ROLES, Role

# Between two spans every agent says whose turn it is: about 16 tokens, computed by each agent for itself.
_GLUE = "\n\nThis was part {number}. For {name}, the next part of the same work follows here:\n"


@dataclass(frozen=True)
class Shape:
    """`spans` spans of `span_tokens` tokens a prompt, `concurrency` requests at a time."""

    spans: int
    span_tokens: int
    concurrency: int


@dataclass(frozen=True)
class Agent:
    """One agent's own text as token ids: before the first span, between two spans, and after the last."""

    name: str
    head: Span
    glue: tuple[Span, ...]
    tail: Span

    def prompt(self, content: Sequence[Span]) -> TokenPrompt:
        """The agent's prompt over some spans; what it says between them comes before its question where there are
        fewer, so that prompts over equally many shared tokens hold equally many of its own."""
        ids = list(self.head)
        marks = []
        for number, span in enumerate(content):
            if number:
                ids.extend(self.glue[number - 1])
            marks.append((len(ids), len(ids) + len(span)))
            ids.extend(span)
        for unused in self.glue[len(content) - 1 :]:
            ids.extend(unused)
        ids.extend(self.tail)
        return TokenPrompt(tuple(ids), tuple(marks))


def make_agents(prompts: PromptMaker, count: int, spans: int) -> list[Agent]:
    """`count` agents with distinct system prompts, short and long ones in turn, for up to `spans` spans a prompt."""
    agents = []
    for number in range(count):
        kind = ROLES[number % len(ROLES)]
        name = f"{kind.name}-{number}"
        role = Role(name, f"You are agent {number} of {count}, called {name}. {kind.system}", kind.question)
        empty = prompts.prompt(role, "")
        cut = empty.spans[0][0]
        glue = [tuple(prompts.tokens(_GLUE.format(number=place + 1, name=name))) for place in range(spans - 1)]
        agents.append(Agent(name, empty.ids[:cut], tuple(glue), empty.ids[cut:]))
    return agents


def stages(prompt: TokenPrompt) -> list[TokenPrompt]:
    """What a client that stages its prompt itself sends first: the text up to each later span's start."""
    return [
        TokenPrompt(prompt.ids[:start], prompt.spans[: number + 1])
        for number, (start, _) in enumerate(prompt.spans[1:])
    ]


@dataclass(frozen=True)
class Request:
    """One agent's request in a round."""

    agent: Agent
    prompt: TokenPrompt


@dataclass(frozen=True)
class RoundPlan:
    """One round of one arm: what other agents have to hold before, and the requests that are sent together."""

    held: tuple[Request, ...]
    requests: tuple[Request, ...]


def plan_round(agents: Sequence[Agent], supply: TextSupply, shape: Shape, number: int) -> RoundPlan:
    """A round on fresh content: every request's agent reads what one other agent has read, and itself has not.

    As many agents as there are besides the holder read the same content; then the next content has another holder.
    """
    held: list[Request] = []
    requests: list[Request] = []
    while len(requests) < shape.concurrency:
        content = supply.content(shape.spans, shape.span_tokens)
        place = (number + len(held)) % len(agents)
        held.append(_request(agents[place], content))
        others = [agent for turn, agent in enumerate(agents) if turn != place]
        requests.extend(_request(agent, content) for agent in others[: shape.concurrency - len(requests)])
    return RoundPlan(tuple(held), tuple(requests))


@dataclass(frozen=True)
class SinglePlan:
    """One reading alone on the server, with equally many shared tokens in several spans and in one."""

    held: tuple[Request, Request]
    several: Request
    one: Request


def plan_single(agents: Sequence[Agent], supply: TextSupply, shape: Shape, number: int) -> SinglePlan:
    """A reading by an agent other than the holder; the two prompts are on different fresh content."""
    holder, reader = agents[number % len(agents)], agents[(number + 1) % len(agents)]
    several = supply.content(shape.spans, shape.span_tokens)
    one = supply.content(1, shape.spans * shape.span_tokens)
    return SinglePlan(
        (_request(holder, several), _request(holder, one)), _request(reader, several), _request(reader, one)
    )


def _request(agent: Agent, content: Sequence[Span]) -> Request:
    return Request(agent, agent.prompt(content))
