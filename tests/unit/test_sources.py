"""The source index: newest first, bounded, and never past the death of a node."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st
from kvcmas_sgl.radix_ext.sources import MAX_SOURCES_PER_CONTENT, Agent, Source, SourceIndex, content_key


def source(role: str, node: int, content: str = "c", *, exact: bool = True) -> Source:
    return Source(content, Agent(role, "p", "s"), node, start=4, length=8, exact=exact)


def test_newest_first_and_one_per_agent() -> None:
    index = SourceIndex()
    for role, node in (("a", 1), ("b", 2), ("a", 3)):
        index.add(source(role, node))
    assert [(s.agent.role, s.node) for s in index.lookup("c")] == [("a", 3), ("b", 2)]


def test_an_approximate_source_is_dropped_before_an_exact_one() -> None:
    index = SourceIndex()
    index.add(source("oldest", 0))
    index.add(source("approximate", 1, exact=False))
    for i in range(2, MAX_SOURCES_PER_CONTENT + 1):
        index.add(source(f"r{i}", i))
    roles = {s.agent.role for s in index.lookup("c")}
    assert "oldest" in roles and "approximate" not in roles and len(roles) == MAX_SOURCES_PER_CONTENT


def test_content_is_its_tokens_within_a_scope() -> None:
    tokens = array("q", range(40))
    assert content_key("s", tokens) == content_key("s", array("q", range(40)))
    assert content_key("s", tokens) != content_key("other", tokens)
    assert content_key("s", tokens) != content_key("s", tokens[:-1])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.sampled_from("xyz"), st.booleans())))
def test_no_source_outlives_its_node(steps: list[tuple[str, int, str, bool]]) -> None:
    index, expected = SourceIndex(), {}
    for role, node, content, dies in steps:
        if dies:
            index.node_gone(node)
            expected = {key: kept for key, kept in expected.items() if kept != node}
        else:
            index.add(source(role, node, content))
            expected[content, role] = node
    assert {(s.content, s.agent.role): s.node for s in index} == expected
    assert len(index) == len(expected)
