"""Deltas and provenance on the nodes: through splits, evictions, resets; and who can reach what."""

from __future__ import annotations

from array import array

import torch
from kvcmas_sgl.radix_ext.node_marks import get_delta, path_to, provenance
from kvcmas_sgl.radix_ext.planner import own_key
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from tests.tree.harness import CRITIC, PLANNER, Tree, document, learned, sources_of

N = 48
CONSUMER_RANK = 16


def nodes_of(tree: Tree, role_name: str, text: list[int]) -> list[object]:
    return tree.cache.spans.nodes(next(s for s in sources_of(tree, text) if s.agent.role == role_name))


def critic_key(tree: Tree) -> str:
    source = next(s for s in tree.cache.sources if s.agent.role == "critic")
    return own_key(source.agent, source.context)


def with_own_delta(**settings: object) -> tuple[Tree, list[int]]:
    tree, text = Tree(own_rank=CONSUMER_RANK, **settings), document(1)
    PLANNER.read(tree, text)
    CRITIC.read(tree, text)
    return tree, text


def test_own_deltas_follow_a_split_row_by_row() -> None:
    tree, text = with_own_delta()
    key = critic_key(tree)
    (node,) = nodes_of(tree, "planner", text)
    before = get_delta(node, key, tree.cache.deltas)
    assert before is not None and len(before) == N
    # Another document of the planner's that shares the first half cuts the node in two.
    PLANNER.read(tree, text[: N // 2] + document(2)[: N // 2])
    first, second = nodes_of(tree, "planner", text)
    parts = [get_delta(part, key, tree.cache.deltas) for part in (first, second)]
    # SGLang's inspector is the judge of where the cut is.
    assert tree.cache.tree_core.get_node_token_ids(first.id) == text[: N // 2]
    assert tree.cache.tree_core.get_node_token_ids(second.id) == text[N // 2 :]
    joined = torch.cat([part.left_k for part in parts], dim=1)
    assert torch.equal(joined, before.left_k)
    assert parts[0].factors is parts[1].factors is before.factors


def test_provenance_follows_a_split() -> None:
    tree, text = Tree(), document(99)
    learned(tree)
    PLANNER.read(tree, text)
    assert CRITIC.read(tree, text)["corrected_tokens"] == N
    CRITIC.read(tree, text[: N // 2] + document(50)[: N // 2])
    marks = [provenance(node) for node in nodes_of(tree, "critic", text)]
    assert len(marks) == 2 and marks[0] == marks[1] is not None
    # The half that was shared stays corrected for whoever hits it.
    report = CRITIC.read(tree, text[: N // 2] + document(51)[: N // 2])
    assert report["exact_tokens"] == len(CRITIC.prefix)


def test_deltas_and_sources_die_with_their_nodes() -> None:
    tree, text = with_own_delta()
    assert len(tree.cache.deltas) == 1 and tree.cache.deltas.nbytes > 0
    ids = [node.id for node in nodes_of(tree, "planner", text)]
    tree.cache.evict(EvictParams(num_tokens=10**6))
    assert not any(tree.cache.tree_core.contains_node(i) for i in ids)
    assert len(tree.cache.deltas) == 0 and tree.cache.deltas.nbytes == 0
    assert len(tree.cache.sources) == 0
    tree.check()


def test_evicting_the_tail_keeps_the_deltas_of_what_stays() -> None:
    tree, text = with_own_delta()
    PLANNER.read(tree, text[: N // 2] + document(2)[: N // 2])
    first, second = nodes_of(tree, "planner", text)
    key = critic_key(tree)
    second_id = second.id
    while tree.cache.tree_core.contains_node(second_id):
        assert tree.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted > 0
    assert tree.cache.tree_core.contains_node(first.id)
    assert get_delta(first, key, tree.cache.deltas) is not None
    assert not any(s.agent.role == "planner" for s in sources_of(tree, text))
    tree.check()


def test_a_reset_forgets_everything_that_was_learned() -> None:
    tree, _ = with_own_delta()
    assert tree.cache.learner.state_bytes > 0
    tree.cache.reset()
    assert tree.cache.learner.state_bytes == 0 and len(tree.cache.sources) == 0 and len(tree.cache.learner) == 0


def test_the_byte_budget_is_kept() -> None:
    tree, _ = with_own_delta()
    full = tree.cache.learner.state_bytes
    for budget in (full - 1, full // 2, 0):
        small, _ = with_own_delta(state_bytes=budget)
        assert small.cache.learner.state_bytes <= budget


def test_nobody_reaches_an_agents_kv_but_the_agent() -> None:
    tree, text = Tree(), document(99)
    learned(tree)
    PLANNER.read(tree, text)
    assert CRITIC.read(tree, text)["corrected_tokens"] == N
    prompt = array("q", CRITIC.prompt(text))

    def hit(extra_key: str | None, salt: str | None) -> int:
        key = RadixKey(prompt, extra_key, cache_salt=salt)
        return tree.cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len

    assert hit("secret:critic", None) == len(prompt)
    for extra_key, salt in ((None, None), ("secret:critic", "tenant"), ("critic", None)):
        assert hit(extra_key, salt) == 0
    # The planner's own prompts begin with the same token; that one is its own.
    assert hit("secret:planner", None) == 1


def test_another_salt_shares_neither_kv_nor_knowledge() -> None:
    tree, text = Tree(), document(99)
    learned(tree)
    PLANNER.read(tree, text)
    assert CRITIC.read(tree, text, salt="tenant")["reason"] == "no_source"
    PLANNER.read(tree, document(4), salt="tenant")
    assert CRITIC.read(tree, document(4), salt="tenant")["reason"] == "edge_unknown"


def test_a_plain_request_passes_untouched() -> None:
    tree, text = Tree(), document(3)
    prompt = PLANNER.prompt(text)
    assert tree.serve(prompt) == {}
    req = tree.request(prompt)
    tree.admit(req)
    assert req.prefix_len == len(prompt) - 1 and not hasattr(req, "kvcmas")
    tree.finish(req)
    assert len(tree.cache.sources) == 0 and tree.cache.statistics.requests == 0


def test_every_node_of_an_agents_path_is_in_its_namespace() -> None:
    tree, text = with_own_delta()
    for role in ("planner", "critic"):
        for node in nodes_of(tree, role, text):
            assert all(step.key.extra_key == f"secret:{role}" for step in path_to(node))
