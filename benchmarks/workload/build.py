"""Workflows from a shape, agents and text: everything that is sent follows from the settings and the seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.workload.agents import AgentText, make_agent
from benchmarks.workload.graphs import HopShape, make_graph
from benchmarks.workload.text import Library, Span, TextSupply
from benchmarks.workload.workflow import Hop, Part, Workflow
from kvcmas_sgl.demo.prompts import PromptMaker
from kvcmas_sgl.demo.roles import DOCUMENTS, load_documents

_LENGTHS = 4
"""So many lengths of heads there are, in turn: an agent's head is the same among however many agents."""


@dataclass(frozen=True)
class Shape:
    """What workflows look like. Lengths in tokens.

    Attributes
    ----------
    graph, agents
        Who reads what (`graphs.GRAPHS`), among how many agents.
    document_tokens
        Least and largest length of a document.
    system_tokens
        Mean length of an agent's head. Heads differ (`system_spread`), so that spans move.
    private_tokens
        Each agent's own context in each workflow: fresh text that nobody else reads.
    answer_tokens
        Length of an answer that is passed on.
    last_tokens
        Tokens that a hop generates whose answer nobody reads.
    pool, zipf, unseen
        Documents that are read again, the exponent of their popularity, the share of fresh ones (`text.Library`).
    glue_tokens
        Length of an agent's own words before each answer that it reads; None: one sentence that names the author.
    question
        What ends every prompt; None: a question that names the agent; "" only the chat template's tail.
    system_spread
        Shortest and longest head as multiples of `system_tokens`.
    """

    graph: str = "full"
    agents: int = 4
    document_tokens: tuple[int, int] = (2048, 2048)
    system_tokens: int = 128
    private_tokens: int = 32
    answer_tokens: int = 16
    last_tokens: int = 16
    pool: int = 0
    zipf: float = 1.0
    unseen: float = 1.0
    glue_tokens: int | None = None
    question: str | None = None
    system_spread: tuple[float, float] = (0.5, 1.5)

    def __post_init__(self) -> None:
        make_graph(self.graph, self.agents)
        low, high = self.document_tokens
        if not 1 <= low <= high:
            raise ValueError(f"document_tokens is {self.document_tokens}, but must be two lengths from 1 up.")
        for name in ("private_tokens", "answer_tokens", "pool"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 0.")
        for name in ("agents", "system_tokens", "last_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        if not 0 <= self.unseen <= 1:
            raise ValueError(f"unseen is {self.unseen}, but must be a share from 0 to 1.")


def trajectory(shared_tokens: int) -> Shape:
    """The published shape: 1024 system + shared + 512 private + i x (16 glue + 128 answer) + tail, 4 hops."""
    return Shape(
        graph="full",
        agents=4,
        document_tokens=(shared_tokens, shared_tokens),
        system_tokens=1024,
        private_tokens=512,
        answer_tokens=128,
        last_tokens=128,
        glue_tokens=16,
        question="",
        system_spread=(1.0, 1.0),
    )


class Builder:
    """Makes workflows of one shape; its agents and its pool of documents stay the same from call to call."""

    def __init__(
        self, prompts: PromptMaker, shape: Shape, seed: int | str = 0, supply: TextSupply | None = None
    ) -> None:
        self._shape = shape
        self._prompts = prompts
        self._text = supply or real_text(prompts)
        self._seed = seed
        self.graph = make_graph(shape.graph, shape.agents)
        pool = Library(self._text.reseeded(f"pool-{seed}"), shape.document_tokens, (), 0.0, 1.0, f"pool-{seed}")
        self._pool = tuple(pool.draw() for _ in range(shape.pool))
        low, high = shape.system_spread
        self.agents = tuple(
            make_agent(
                prompts,
                self._text,
                number,
                round(shape.system_tokens * (low + (high - low) * (number % _LENGTHS) / (_LENGTHS - 1))),
                shape.question,
            )
            for number in range(self.graph.roles)
        )

    def workflows(self, count: int, series: str = "") -> tuple[Workflow, ...]:
        """`count` workflows, all arriving at 0. Another `series` has other fresh text, over the same pool."""
        shape = self._shape
        name = f"{self._seed}-{series}"
        fresh = self._text.reseeded(f"documents-{name}")
        library = Library(fresh, shape.document_tokens, self._pool, shape.zipf, shape.unseen, name)
        text = self._text.reseeded(f"own-{name}")
        return tuple(self._workflow(f"{series}{number}", library, text) for number in range(count))

    def _workflow(self, name: str, library: Library, text: TextSupply) -> Workflow:
        documents = [library.draw() for _ in range(self.graph.documents)]
        authors = {hop.name: self.agents[hop.role] for hop in self.graph.hops}
        read = {other for hop in self.graph.hops for other in hop.reads}
        hops = []
        for hop in self.graph.hops:
            passes_on = hop.name in read
            hops.append(
                Hop(
                    name=hop.name,
                    role=authors[hop.name].name,
                    parts=tuple(self._parts(hop, documents, authors, text)),
                    output_tokens=self._shape.answer_tokens if passes_on else self._shape.last_tokens,
                    answer=text.span(self._shape.answer_tokens) if passes_on else (),
                )
            )
        return Workflow(name, tuple(hops))

    def _parts(
        self, hop: HopShape, documents: Sequence[Span], authors: Mapping[str, AgentText], text: TextSupply
    ) -> list[Part]:
        agent = authors[hop.name]
        parts = [Part("own", agent.head)]
        for place, number in enumerate(hop.documents):
            if place:
                parts.append(Part("own", tuple(self._prompts.tokens(f"\n\nPart {number + 1}, for {agent.name}:\n"))))
            parts.append(Part("document", documents[number]))
        if self._shape.private_tokens:
            parts.append(Part("own", text.span(self._shape.private_tokens)))
        for other in hop.reads:
            parts += [Part("own", self._glue(authors[other].name, text)), Part("answer", hop=other)]
        return [*parts, Part("own", agent.tail)]

    def _glue(self, author: str, text: TextSupply) -> Span:
        words = tuple(self._prompts.tokens(f"\n\nThe {author} wrote:\n"))
        length = self._shape.glue_tokens
        return words if length is None else (*text.span(length), *words)[-length:]


def real_text(prompts: PromptMaker, seed: int = 0) -> TextSupply:
    """The sentences of the demo's documents, problem sheets and prose."""
    texts = [document.text for document in load_documents(sorted(DOCUMENTS.rglob("*.txt")))]
    return TextSupply(texts, prompts.tokens, seed)
