"""What another tensor-parallel rank says counts here as well: its failures, and its share of every error."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from kvcmas_sgl.radix_ext.ranks import OneRank, OutOfStepError
from kvcmas_sgl.radix_ext.sources import edge
from numpy.typing import ArrayLike, NDArray

from tests.tree.harness import document
from tests.tree.test_faults import CRITIC, PLANNER, World, assert_dense, assert_reused


class Other(OneRank):
    """Speaks for another rank, which fails at the places in ``fails`` and has ``factor`` times our errors."""

    def __init__(self, fails: Sequence[int] = (), factor: float = 1.0) -> None:
        self.fails, self.factor = fails, factor
        self.leaves = self.breaks = False

    def mean(self, values: ArrayLike) -> NDArray[np.float64]:
        if self.leaves:
            raise OutOfStepError("the other rank is gone")
        return np.asarray(values, np.float64) * (1 + self.factor) / 2

    def agreed(self, values: Sequence[int | None]) -> list[bool]:
        return [value is not None and place not in self.fails for place, value in enumerate(values)]

    def step_done(self, failed: bool) -> bool:
        return failed or self.breaks


def test_what_another_rank_cannot_correct_is_prefilled_here_too() -> None:
    world = World()
    world.cache._placer._ranks = Other(fails=[0])
    first, second = world.job(CRITIC, document(98)), world.job(CRITIC, document(99))
    world.run([first, second])
    assert_dense(first)
    assert_reused(second)
    assert world.fallbacks == 1


def held_out(world: World) -> list[tuple[float, int]]:
    """Squared errors times tokens of the pairs from planner to critic, and how many there are."""
    on = edge(world.source(PLANNER, document(98)).agent, world.source(CRITIC, document(0)).agent)
    return [(pair.q, pair.tokens) for pair in world.cache.gate._pairs[on, "affine"]]


def test_the_gate_goes_by_all_heads() -> None:
    alone, two = World(), World()
    two.cache.lessons._harvester.ranks = Other(factor=3.0)
    for world in (alone, two):
        world.read(CRITIC, document(98), reuse="never")
    *before, (q, tokens) = held_out(alone)
    assert held_out(two)[:-1] == before
    # The mean of ours and of three times ours.
    assert held_out(two)[-1] == (pytest.approx(2 * q), tokens)


@pytest.mark.parametrize("how", ["breaks", "leaves"])
def test_a_lesson_that_fails_on_another_rank_is_dropped_here_too(how: str) -> None:
    world = World(own_rank=8)
    other = Other()
    world.cache.learner._ranks = world.cache.lessons._harvester.ranks = other
    pairs, learned = held_out(world), world.cache.statistics.spans_learned
    setattr(other, how, True)
    world.read(CRITIC, document(98), reuse="never")
    assert (held_out(world), world.cache.statistics.spans_learned) == (pairs, learned)
    assert len(world.cache.learner) == 0 and world.fallbacks == 0
    setattr(other, how, False)
    world.read(CRITIC, document(99), reuse="never")
    assert len(held_out(world)) == len(pairs) + 1
    world.check()
