"""Hostile input: memory and work stay bounded, and one tenant learns nothing about another."""

from __future__ import annotations

import gc
import hashlib
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvcmas_sgl.radix_ext import blocks, sources
from kvcmas_sgl.radix_ext.agent_prefixes import MAX_PREFIXES, AgentPrefixes
from kvcmas_sgl.radix_ext.decision import Reason, Report, SpanReport
from kvcmas_sgl.radix_ext.estimators import Edge, Observation, make_estimator
from kvcmas_sgl.radix_ext.gate import MAX_EDGES, Gate
from kvcmas_sgl.radix_ext.sources import (
    GROW_TOKENS,
    MAX_SOURCES_PER_CONTENT,
    Agent,
    Source,
    SourceIndex,
    edge,
)
from prometheus_client import CollectorRegistry

from kvcmas_sgl import metrics
from tests.tree.harness import CODER, CRITIC, PLANNER, Role, Tree, document, learned

N = 48


# ---- bounded memory ----


def hold(index: SourceIndex, tokens: list[int], node: int, *, role: str = "a", scope: str = "s") -> Source:
    content = index.content(scope, np.array(tokens))
    source = Source(content, Agent(role, "p", scope), context="c", node=node, start=5)
    index.add(source)
    return source


def test_thousands_of_roles_hold_no_more_than_one_pool_and_one_budget() -> None:
    budget = 200_000
    tree = Tree(slots=512, state_bytes=budget, own_rank=4)
    text = document(1, 12)
    for number in range(2_000):
        # Every third agent has a prompt of its own; the others share one. Nobody comes back.
        prefix = [1, 2 + number % 17] if number % 3 else [1, 300 + number % 200, number % 97 + 20]
        Role(f"role {number} " + "x" * 200, prefix).read(tree, text, settle=False)
        tree.cache.learner.step()
    tree.learn()
    tree.check()
    state = tree.cache.state()
    assert state["fallbacks"] == 0 and state["state_bytes"] <= budget
    assert state["sources"] <= MAX_SOURCES_PER_CONTENT and state["source_tokens"] == len(text)
    assert len(tree.cache.gate._pairs) <= MAX_EDGES and len(state["recent"]) == 256
    assert len(tree.cache.admitted) == 0


def test_the_gate_and_the_estimators_forget_the_oldest_edges() -> None:
    gate = Gate()
    none = make_estimator("none", layers=1, kv_heads=1, head_dim=2, rank=1)
    one = torch.zeros(1, 1, 2)
    observation = Observation(0, torch.tensor([0]), one, one, one, one)
    for number in range(MAX_EDGES + 5000):
        on = Edge("s", f"a{number}", "b")
        gate.record(on, "affine", squared_error=0.1, tokens=10)
        none.observe(on, observation)
        none.finish(on)
    assert len(gate._pairs) == MAX_EDGES == len(list(none.edges()))
    assert gate.pairs(Edge("s", "a4999", "b"), "affine") == 0 and gate.pairs(Edge("s", "a5000", "b"), "affine") == 1


def test_an_index_of_ten_thousand_texts_and_tenants_is_bounded_in_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_TOKENS", 2_000)
    index = SourceIndex(8)
    for number in range(10_000):
        hold(index, [number, *range(20)], node=number, scope=f"tenant {number % 3000}")
        assert index.tokens <= 2_000
    contents = 2_000 // 21
    assert len(index) == len(index._contents) == len(index._by_node) == contents
    assert len(index._tables) == contents and sum(len(table) for table in index._tables.values()) == contents * 5
    for node in range(10_000):
        index.node_gone(node)
    assert (len(index), index.tokens, index._tables, index._by_node) == (0, 0, {}, {})


def test_agent_prefixes_are_bounded() -> None:
    known = AgentPrefixes()
    for number in range(5 * MAX_PREFIXES):
        known.find(f"tenant {number % 7}", np.array([number, 1, 2]), 3)
    assert len(known._known) == MAX_PREFIXES


def test_a_prompt_of_short_spans_is_computed() -> None:
    tree = Tree()
    learned(tree)
    prompt = [*CRITIC.prefix, *document(0)]
    spans = [[i, i + 1] for i in range(len(CRITIC.prefix), len(prompt), 1)]
    report = tree.serve(prompt, {"role": "critic", "spans": spans})
    # The last one is the token that logits come from.
    assert {span["reason"] for span in report["spans"]} <= {"too_short", "exact", "not_prefilled"}
    assert report["corrected_tokens"] == 0 and len(tree.cache.sources) > 0


# ---- bounded work ----


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often tokens were compared, and how many were found equal."""
    counted: Counter[str] = Counter()
    grow = sources._grow

    def counting(*args: Any) -> tuple[int, int]:
        first, last = grow(*args)
        counted["places"] += 1
        counted["tokens"] += last - first
        return first, last

    monkeypatch.setattr(sources, "_grow", counting)
    return counted


def most_places(tokens: int, block: int) -> int:
    return 64 + 4 * tokens // block


def test_a_prompt_is_hashed_once_however_many_agent_prefixes_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    known = AgentPrefixes()
    for length in range(10, 1000):
        known.find("s", np.arange(length) + length, length)
    tokens, hashed = np.arange(20_000), 0

    def blake2b(data: bytes = b"", *, digest_size: int) -> Any:
        nonlocal hashed
        hasher = hashlib.blake2b(data, digest_size=digest_size)
        hashed += len(data)

        def update(more: bytes) -> None:
            nonlocal hashed
            hashed += len(more)
            hasher.update(more)

        return SimpleNamespace(update=update, copy=hasher.copy, hexdigest=hasher.hexdigest)

    monkeypatch.setattr(sources, "hashlib", SimpleNamespace(blake2b=blake2b))
    assert known.find("s", tokens, 15_000)[0] == 15_000
    # Once for the known lengths, once for its own name; 8 bytes a token.
    assert hashed == 8 * (999 + 15_000)


def test_names_of_prefixes_are_those_of_their_tokens() -> None:
    tokens, lengths = np.arange(50) % 7, [0, 3, 3, 49, 50]
    assert sources.prefix_digests(tokens, lengths) == [sources.token_digest(tokens[:n]) for n in lengths]


TEXTS = {
    "one token": lambda n: [7] * n,
    "a short period": lambda n: [20 + i % 3 for i in range(n)],
    "a period that no block divides": lambda n: [20 + i % 37 for i in range(n)],
    "a long period": lambda n: [20 + i % (n // 10 + 1) for i in range(n)],
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_agree_everywhere_take_linear_work(name: str, work: Counter[str]) -> None:
    n, block = 20_000, 4
    text = TEXTS[name](n)
    index = SourceIndex(2 * block)
    for number in range(20):
        hold(index, [*text[: n - number], number], node=number)
    matches = index.find("s", np.array(text), 0, n)
    assert work["places"] <= most_places(n, block)
    # What is found equal at the last place may go over the limit by one whole stretch.
    assert work["tokens"] <= (GROW_TOKENS + 1) * n
    for match in matches:
        for content, inside in match.places:
            held = content.tokens[inside : inside + match.stop - match.start]
            assert held.tolist() == text[match.start : match.stop]


def test_hashes_that_all_collide_propose_but_do_not_decide(work: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        blocks, "window_hashes", lambda tokens, block: np.zeros(max(0, len(tokens) - block + 1), np.uint64)
    )
    block, n = 4, 5_000
    index = SourceIndex(2 * block)
    generator = np.random.default_rng(0)
    for number in range(50):
        hold(index, generator.integers(0, 1 << 40, 400).tolist(), node=number)
    asked = generator.integers(0, 1 << 40, n)
    assert index.find("s", asked, 0, n) == []
    assert 0 < work["places"] <= most_places(n, block)
    # The block that everything falls into holds a few owners only.
    assert (
        max(len(places) for table in index._tables.values() for places in table._blocks.values()) <= blocks.MAX_OWNERS
    )


def test_whoever_cannot_see_the_multiplier_cannot_make_blocks_collide() -> None:
    # 200,000 structured blocks: small numbers, shifts and permutations, as a colliding set would be built of.
    generator = np.random.default_rng(1)
    base = np.arange(200_000 * 4) % 1_000
    hashes = blocks.window_hashes(base + generator.permutation(len(base)) % 7, 4)[::4]
    different = np.unique((base + np.random.default_rng(1).permutation(len(base)) % 7).reshape(-1, 4), axis=0)
    assert len(np.unique(hashes)) == len(different)


def test_labels_of_metrics_come_from_closed_lists() -> None:
    registry = CollectorRegistry()
    tree = Tree()
    metrics.export(tree.cache, registry)

    def series() -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        return {(s.name, tuple(s.labels.items())) for family in registry.collect() for s in family.samples}

    for reason in Reason:
        spans = [SpanReport(0, 9, reason=reason)]
        for auto in (False, True):
            tree.cache.statistics.record(
                "r", Report("a", 10, auto=auto, corrected_tokens=3, predicted_kl=0.1, spans=spans)
            )
    before = series()
    assert {("kvcmas:spans_total", (("reason", str(reason)),)) for reason in Reason} <= before
    for number in range(1000):
        role = f'role {number} "}}\n' + "x" * 200
        tree.cache.statistics.record(
            f"r{number}", Report(role, 10, spans=[SpanReport(0, 9, source=role, estimator=role)])
        )
    assert series() == before


# ---- tenants ----


SEAMS = [
    ("sources", "find"),
    ("prefixes", "find"),
    ("planner", "agent_prefix"),
    ("gate", "expect"),
    ("gate", "kl"),
    ("planner", "bases"),
    ("planner", "own_rows"),
    ("planner", "resident"),
]


def steps_of(tree: Tree, monkeypatch: pytest.MonkeyPatch, ask: Any) -> tuple[Counter[str], dict[str, Any]]:
    """What one request makes the cache do: calls by seam, places looked at, digests made, blocks known."""
    counted: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    for part, name in SEAMS:
        count(getattr(tree.cache, part), name)
    for name in ("_grow", "token_digest", "_share"):
        count(sources, name)
    count(tree.cache.estimators["affine"], "predict")
    original = blocks.BlockTable.hits

    def hits(table: Any, tokens: Any) -> Any:
        for hit in original(table, tokens):
            counted["hits"] += 1
            yield hit

    monkeypatch.setattr(blocks.BlockTable, "hits", hits)
    report = ask(tree)
    monkeypatch.undo()
    return counted, report


@pytest.mark.parametrize("auto", [False, True])
def test_a_miss_takes_the_same_steps_whatever_another_tenant_holds(auto: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def world(other_text: list[int] | None) -> Tree:
        tree = Tree(slots=8192, auto=auto, own_rank=4)
        for seed in range(3):
            for role in (PLANNER, CRITIC):
                serve(tree, role, document(seed), "mine", auto)
        if other_text is not None:
            for role in (PLANNER, CRITIC, CODER):
                serve(tree, role, other_text, "theirs", auto)
                serve(tree, role, document(1), "theirs", auto)
        return tree

    secret = document(70)
    results = [
        steps_of(tree, monkeypatch, lambda tree: serve(tree, CRITIC, secret, "mine", auto))
        for tree in (world(None), world(document(71)), world(secret))
    ]
    assert results[0][0]["find"] > 0 and results[0][1]["corrected_tokens"] == 0
    assert results[0] == results[1] == results[2]


def serve(tree: Tree, role: Role, text: list[int], salt: str, auto: bool) -> dict[str, Any]:
    if auto:
        return tree.serve(role.prompt(text), auto=role.prefix, salt=salt)
    return role.read(tree, text, salt=salt)


def operators(tree: Tree, salt: str) -> list[torch.Tensor]:
    """What was learned of a tenant's agents, and what is expected of it."""
    from tests.tree.recount import collect, scope_of

    found: dict[int, torch.Tensor] = {}
    estimator = tree.cache.estimators["affine"]
    for on, state in estimator._edges.items():
        if on.namespace == scope_of(salt):
            collect(state, found)
    collect(estimator._bases.get(scope_of(salt)), found)
    return list(found.values())


def test_what_a_tenant_learns_is_the_same_beside_another_one() -> None:
    alone, beside = Tree(slots=8192, own_rank=4), Tree(slots=8192, own_rank=4)
    for seed in range(4):
        for role in (PLANNER, CRITIC):
            role.read(beside, document(seed + 40), salt="theirs")
            role.read(beside, document(seed), salt="theirs")
            for tree in (alone, beside):
                role.read(tree, document(seed), salt="mine")
    mine, same = operators(alone, "mine"), operators(beside, "mine")
    assert len(mine) > 4 and len(mine) == len(same)
    assert all(torch.equal(a, b) for a, b in zip(mine, same, strict=True))
    # The other tenant has read document 42, and its edge is learned: neither is to be had here.
    report = CRITIC.read(beside, document(42), salt="mine")
    assert (report["reason"], report["exact_tokens"]) == ("no_source", len(CRITIC.prefix))
    PLANNER.read(beside, document(60), salt="third")
    assert CRITIC.read(beside, document(60), salt="third")["reason"] == "edge_unknown"


def test_a_forgotten_tenant_leaves_nothing_behind() -> None:
    tree = Tree(slots=4096, state_bytes=60_000)
    for number in range(40):
        for role in (PLANNER, CRITIC):
            role.read(tree, document(number % 5), salt=f"tenant {number}")
    estimator = tree.cache.estimators["affine"]
    assert set(estimator._bases) == {on.namespace for on in estimator.edges()}
    assert tree.cache.learner.state_bytes <= 60_000
    tree.cache.reset()
    gc.collect()
    assert estimator._bases == {} and tree.cache.sources._tables == {} and len(tree.cache.deltas) == 0


def test_an_edge_is_its_consumers_tenant() -> None:
    mine, theirs = Agent("a", "p", "mine"), Agent("a", "p", "theirs")
    assert edge(mine, mine) != edge(theirs, theirs)
