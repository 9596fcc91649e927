"""The source index: newest first, bounded, never past the death of a node, and it finds what a search finds."""

from __future__ import annotations

import itertools
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcmas_sgl.radix_ext import sources as module
from kvcmas_sgl.radix_ext.blocks import MAX_OWNERS
from kvcmas_sgl.radix_ext.sources import (
    MAX_SOURCES_PER_CONTENT,
    Agent,
    Source,
    SourceIndex,
    as_tokens,
    token_digest,
)

SHORTEST = 4


def add(index: SourceIndex, role: str, node: int, tokens: object = range(8), *, exact: bool = True) -> Source:
    content = index.content("s", np.array(tokens, np.int64))
    source = Source(content, Agent(role, "p", "s"), "before", node, start=4, exact=exact)
    index.add(source)
    return source


def held(index: SourceIndex, tokens: object = range(8)) -> list[Source]:
    return index.content("s", np.array(tokens, np.int64)).sources


def test_newest_first_and_one_per_agent() -> None:
    index = SourceIndex(SHORTEST)
    for role, node in (("a", 1), ("b", 2), ("a", 3)):
        add(index, role, node)
    assert [(s.agent.role, s.node) for s in held(index)] == [("a", 3), ("b", 2)]


def test_an_approximate_source_is_dropped_before_an_exact_one() -> None:
    index = SourceIndex(SHORTEST)
    add(index, "oldest", 0)
    add(index, "approximate", 1, exact=False)
    for i in range(2, MAX_SOURCES_PER_CONTENT + 1):
        add(index, f"r{i}", i)
    roles = {s.agent.role for s in held(index)}
    assert "oldest" in roles and "approximate" not in roles and len(roles) == MAX_SOURCES_PER_CONTENT


def test_a_token_array_is_read_without_a_copy() -> None:
    ids = array("q", range(40))
    tokens = as_tokens(ids)
    assert tokens.tolist() == list(range(40)) and token_digest(tokens) == token_digest(np.arange(40))
    assert as_tokens(array("q")).shape == (0,)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(0, 2), st.booleans())))
def test_no_source_outlives_its_node(steps: list[tuple[str, int, int, bool]]) -> None:
    index, expected = SourceIndex(SHORTEST), {}
    for role, node, content, dies in steps:
        if dies:
            index.node_gone(node)
            expected = {key: kept for key, kept in expected.items() if kept != node}
        else:
            add(index, role, node, range(content, content + 8))
            expected[content, role] = node
    assert {(int(s.content.tokens[0]), s.agent.role): s.node for s in index} == expected
    assert len(index) == len(expected)
    assert index.tokens == 8 * len({content for content, _ in expected})
    for content in range(3):
        known = any(c == content for c, _ in expected)
        prompt = np.array([50, *range(content, content + 8)])
        assert any((m.start, m.stop) == (1, 9) for m in index.find("s", prompt, 0, 9)) == known or not known


@given(
    st.lists(st.integers(0, 3), min_size=SHORTEST, max_size=24),
    st.lists(st.integers(0, 3), max_size=10),
    st.lists(st.integers(0, 3), max_size=10),
)
def test_a_content_is_found_wherever_it_stands(content: list[int], before: list[int], after: list[int]) -> None:
    index = SourceIndex(SHORTEST)
    add(index, "a", 1, content)
    prompt = np.array([9, *before, *content, *after], np.int64)
    matches = index.find("s", prompt, 0, len(prompt))
    assert matches and max(m.stop - m.start for m in matches) >= SHORTEST
    assert all(a.stop <= b.start for a, b in itertools.pairwise(matches))
    for match in matches:
        for found, offset in match.places:
            length = match.stop - match.start
            assert prompt[match.start : match.stop].tolist() == found.tokens[offset : offset + length].tolist()
    assert index.find("other", prompt, 0, len(prompt)) == []


def test_what_a_prompt_and_a_content_begin_with_alike_is_left_to_the_exact_cache() -> None:
    index = SourceIndex(SHORTEST)
    add(index, "a", 1, [1, 2, 3, 4, 5, 6, 7, 8, 20, 21, 22, 23])
    prompt = np.array([1, 2, 3, 4, 5, 6, 30, 31, 20, 21, 22, 23])
    (match,) = index.find("s", prompt, 0, len(prompt))
    assert (match.start, match.stop) == (8, 12)


def test_the_longest_match_wins_and_equal_ones_share_it() -> None:
    index = SourceIndex(SHORTEST)
    add(index, "short", 1, [10, 11, 12, 13, 14, 15])
    add(index, "long", 2, [9, 10, 11, 12, 13, 14, 15, 16])
    add(index, "same", 3, [40, 9, 10, 11, 12, 13, 14, 15, 16, 41])
    (match,) = index.find("s", np.array([0, 9, 10, 11, 12, 13, 14, 15, 16, 5]), 0, 10)
    assert (match.start, match.stop) == (1, 9)
    assert {(c.sources[0].agent.role, offset) for c, offset in match.places} == {("long", 0), ("same", 1)}


def test_contents_that_cover_nearly_the_same_share_what_they_have_in_common() -> None:
    index = SourceIndex(SHORTEST)
    add(index, "older", 1, [70, *range(20), 71])
    add(index, "newer", 2, [*range(1, 20), 30, 31])
    add(index, "half", 3, range(10))
    prompt = np.array([50, 70, *range(20), 30, 51])
    (match,) = index.find("s", prompt, 0, len(prompt))
    assert (match.start, match.stop) == (3, 22)
    assert [(c.sources[0].agent.role, offset) for c, offset in match.places] == [("newer", 0), ("older", 2)]


def test_a_search_stays_inside_its_range() -> None:
    index = SourceIndex(SHORTEST)
    add(index, "a", 1, range(20))
    prompt = np.array([50, *range(20), 51])
    (match,) = index.find("s", prompt, 5, 12)
    assert (match.start, match.stop) == (5, 12)
    assert index.find("s", prompt, 5, 5 + SHORTEST - 1) == []


def test_the_index_is_bounded_in_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOKENS", 100)
    index = SourceIndex(SHORTEST)
    for i in range(20):
        add(index, "a", i, range(1000 * i, 1000 * i + 30))
    assert index.tokens <= 100 and len(index) == 3
    assert index.find("s", np.array([7, *range(30)]), 0, 31) == []
    assert len(index.find("s", np.array([7, *range(19000, 19030)]), 0, 31)) == 1


def test_a_content_whose_blocks_were_all_displaced_can_go_last() -> None:
    index = SourceIndex(SHORTEST)
    for number in range(MAX_OWNERS + 1):
        # One whole block each, and it is the same.
        add(index, "a", number, [1, 2, 100 + number])
    for number in range(MAX_OWNERS, -1, -1):
        index.node_gone(number)
        assert len(index) == number and index.tokens == 3 * number


@pytest.mark.parametrize("role", ["critic", "a#b@c", "x@first#y"])
def test_role_and_place_are_read_back_from_the_name_of_an_edge(role: str) -> None:
    agent = Agent(role, token_digest(np.arange(3)), "s", module.Place.LATER)
    assert Agent.read_key(agent.key) == (role, "later")
