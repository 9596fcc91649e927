"""A workflow as it is sent: hops, each with its prompt in parts and the answer that it passes on."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.workload.graphs import ancestors
from kvcmas_sgl.demo.prompts import TokenPrompt

Kind = Literal["own", "document", "answer"]
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A piece of a prompt: the agent's own text, a document, or the answer of the hop named `hop`."""

    kind: Kind
    ids: Ids = ()
    hop: str = ""


@dataclass(frozen=True)
class Hop:
    """One request. `answer` is what later hops read of it, `output_tokens` how many tokens it has to generate.

    `after` are the hops whose answers it reads. An empty `answer` is passed on as it is generated.
    """

    name: str
    role: str
    parts: tuple[Part, ...]
    output_tokens: int
    answer: Ids = ()

    @property
    def after(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.hop for part in self.parts if part.kind == "answer"))

    def prompt(self, answers: Mapping[str, Sequence[int]]) -> TokenPrompt:
        """The prompt with its shared spans marked, given the answers of the hops in `after`."""
        ids: list[int] = []
        spans = []
        for part in self.parts:
            text = answers[part.hop] if part.kind == "answer" else part.ids
            if part.kind != "own" and text:
                spans.append((len(ids), len(ids) + len(text)))
            ids.extend(text)
        return TokenPrompt(tuple(ids), tuple(spans))


@dataclass(frozen=True)
class Workflow:
    """Hops in an order in which each comes after all that it reads; `arrival_s` counts from the run's start."""

    name: str
    hops: tuple[Hop, ...]
    arrival_s: float = 0.0

    def scripted(self) -> dict[str, Ids]:
        """The answers that are known before anything is sent."""
        return {hop.name: hop.answer for hop in self.hops if hop.answer}

    def with_answers(self, answers: Mapping[str, Sequence[int]]) -> Workflow:
        """This workflow with its answers fixed: what another run has to send to get the same prompts."""
        hops = [replace(hop, answer=tuple(answers.get(hop.name, hop.answer))) for hop in self.hops]
        return replace(self, hops=tuple(hops))

    def span_sources(self) -> dict[str, tuple[bool, ...]]:
        """For each hop and each of its spans, in order: was it in the prompt of a hop that must be done before?

        Such a span's KV was computed in another agent's context, whatever the arrivals are.
        """
        before = ancestors({hop.name: hop.after for hop in self.hops})
        found: dict[str, tuple[bool, ...]] = {}
        for hop in self.hops:
            seen = {_key(part) for other in self.hops if other.name in before[hop.name] for part in other.parts}
            found[hop.name] = tuple(_key(part) in seen for part in hop.parts if part.kind != "own")
        return found


def prompt_digest(prompts: Iterable[Sequence[int]]) -> str:
    """One digest of many prompts' token ids, in order: equal only for the same prompts."""
    digest = hashlib.sha256()
    for ids in prompts:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(array("q", ids).tobytes())
    return digest.hexdigest()[:16]


def _key(part: Part) -> object:
    return (part.kind, part.hop) if part.kind == "answer" else (part.kind, part.ids)
