"""Generated probes: one fact (single-hop) or two facts from two documents (multi-hop), answered by naming an option.

Kamera (arXiv 2606.23581) reports that naive reuse keeps single-hop answers and loses multi-hop ones, so damage has to
be looked for in questions whose facts must be combined. SmolLM2-135M does not combine two facts silently (.06 right, at
.17 by chance), so a multi-hop question asks for both, one after the other: the owner, and then the owner's town.

Inside a chain the small model got none of 12 of these right in a quick run either: kinds that the dense run does not
answer above chance are reported, and kept out of the score.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_PEOPLE = ("Anna", "Peter", "Maria", "John", "Laura", "David", "Sarah", "Thomas", "Julia", "Robert", "Emma", "Daniel")
_TOWNS = ("London", "Paris", "Rome", "Madrid", "Berlin", "Vienna", "Dublin", "Boston", "Chicago", "Moscow", "Tokyo")
_THINGS = ("lamp", "clock", "map", "violin", "sword", "mirror", "camera", "diary", "crown", "drum", "kettle", "ladder")
_COLOURS = ("red", "green", "black", "white", "blue", "yellow")
_FILLERS = (
    "The entry was checked twice and signed on the same evening.",
    "No change has been reported since the last visit.",
    "The clerk added a note in the margin, which is of no importance.",
    "Whoever asks for it has to write a letter first.",
    "The weather was fine on that day, and the office was open.",
    "This was confirmed by the neighbours.",
)


@dataclass(frozen=True)
class Step:
    """``lead`` goes on with the answer; of ``options``, told apart by their first token, ``gold`` should follow it."""

    lead: str
    options: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class Question:
    """Answered right if every step is; later steps follow the right option of earlier ones. Chance is the product.

    ``hops``: facts that have to be combined; 0 where that is unknown.
    """

    text: str
    steps: tuple[Step, ...]
    hops: int


def make_probe(seed: int, facts: int = 6) -> tuple[tuple[str, str], tuple[Question, ...]]:
    """Two documents, a register of things and a register of towns, and two questions of one and two of two hops."""
    rng = random.Random(seed)
    people, towns, things = (rng.sample(names, facts) for names in (_PEOPLE, _TOWNS, _THINGS))
    colours = [rng.choice(_COLOURS) for _ in range(facts)]
    held, lives = [], []
    for person, town, thing, colour in zip(people, towns, things, colours, strict=True):
        held.append(f"The {colour} {thing} belongs to {person}. {rng.choice(_FILLERS)}")
        lives.append(f"{person} lives in {town}. {rng.choice(_FILLERS)}")
    rng.shuffle(held)
    rng.shuffle(lives)
    documents = (
        "Register of things and their owners.\n" + "\n".join(held),
        "Register of persons and their towns.\n" + "\n".join(lives),
    )
    order = rng.sample(range(facts), 4)

    def home(lead: str, i: int) -> Step:
        return Step(lead, tuple(towns), i)

    single = tuple(
        Question(f"In which town does {people[i]} live?", (home(f"{people[i]} lives in", i),), 1) for i in order[:2]
    )
    double = tuple(
        Question(
            f"Who owns the {colours[i]} {things[i]}, and in which town does its owner live?",
            (Step(f"The {colours[i]} {things[i]} belongs to", tuple(people), i), home(", who lives in", i)),
            2,
        )
        for i in order[2:]
    )
    return documents, single + double
