"""Who reads what in a workflow: hops as a DAG, each an agent that reads documents and the answers of earlier hops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HopShape:
    """One hop. `role`: number of its agent; `documents`: numbers of those that it reads; `reads`: hops whose answers
    it reads, in prompt order."""

    name: str
    role: int
    documents: tuple[int, ...]
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Graph:
    """A workflow's shape; `hops` are in an order in which each comes after all that it reads."""

    name: str
    hops: tuple[HopShape, ...]

    def __post_init__(self) -> None:
        known: set[str] = set()
        for hop in self.hops:
            unknown = [name for name in hop.reads if name not in known]
            if unknown or hop.name in known:
                raise ValueError(f"hop {hop.name!r} of {self.name!r} must be new and read earlier hops, not {unknown}.")
            known.add(hop.name)

    @property
    def roles(self) -> int:
        return 1 + max(hop.role for hop in self.hops)

    @property
    def documents(self) -> int:
        return 1 + max((number for hop in self.hops for number in hop.documents), default=-1)


def chain(agents: int) -> Graph:
    """Every agent reads the document and its predecessor's answer."""
    hops = [HopShape(f"hop-{n}", n, (0,), (f"hop-{n - 1}",) if n else ()) for n in range(agents)]
    return Graph("chain", tuple(hops))


def full(agents: int) -> Graph:
    """Every agent reads the document and all answers so far."""
    return Graph("full", tuple(HopShape(f"hop-{n}", n, (0,), _names("hop", n)) for n in range(agents)))


def star(agents: int) -> Graph:
    """All agents but the last read the document at once; the last reads it and all their answers."""
    workers = [HopShape(f"worker-{n}", n, (0,)) for n in range(agents - 1)]
    return Graph("star", (*workers, HopShape("hub", agents - 1, (0,), _names("worker", agents - 1))))


def debate(agents: int, rounds: int = 2) -> Graph:
    """In every round each agent reads the document and what the others said in the round before; a judge ends it."""
    hops = []
    for turn in range(rounds):
        for agent in range(agents - 1):
            others = [f"round-{turn - 1}-{other}" for other in range(agents - 1) if other != agent] if turn else []
            hops.append(HopShape(f"round-{turn}-{agent}", agent, (0,), tuple(others)))
    last = tuple(f"round-{rounds - 1}-{agent}" for agent in range(agents - 1))
    return Graph("debate", (*hops, HopShape("judge", agents - 1, (0,), last)))


def map_reduce(agents: int, parts: int = 2, readers: int = 2) -> Graph:
    """Each of `parts` documents has several readers with different roles; the last agent reads what they all found."""
    hops = [
        HopShape(f"map-{part}-{reader}", (part + reader) % (agents - 1), (part,))
        for part in range(parts)
        for reader in range(readers)
    ]
    return Graph("map-reduce", (*hops, HopShape("reduce", agents - 1, (), tuple(hop.name for hop in hops))))


GRAPHS = {"chain": chain, "star": star, "full": full, "debate": debate, "map-reduce": map_reduce}
"""Maker of a graph of so many agents, by name. All but `chain` and `full` need three agents or more."""


def make_graph(name: str, agents: int) -> Graph:
    """A graph by its name. Raises `ValueError` for one that is unknown, and for too few agents."""
    if name not in GRAPHS:
        raise ValueError(f"graph is {name!r}, but must be one of {', '.join(GRAPHS)}.")
    least = 1 if name in ("chain", "full") else 3
    if agents < least:
        raise ValueError(f"agents is {agents}, but a {name} needs at least {least}.")
    return GRAPHS[name](agents)


def ancestors(reads: dict[str, Sequence[str]]) -> dict[str, set[str]]:
    """All hops that must be done before each hop, by name; `reads` is in graph order."""
    found: dict[str, set[str]] = {}
    for name, inputs in reads.items():
        found[name] = set(inputs).union(*(found[other] for other in inputs))
    return found


def _names(kind: str, count: int) -> tuple[str, ...]:
    return tuple(f"{kind}-{number}" for number in range(count))
