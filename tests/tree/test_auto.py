"""Automatic mode: agents and spans are found by content alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from kvcmas_sgl.radix_ext.sources import Place

from tests.tree.harness import CODER, CRITIC, PLANNER, Role, Tree, document

N = 48
HEAD = len(CRITIC.prefix)


def big_tree(**settings: object) -> Tree:
    return Tree(slots=4096, auto=True, **settings)


def ask(tree: Tree, role: Role, *texts: Sequence[int], answer: Sequence[int] = ()) -> dict:
    """A request without any hint."""
    return tree.serve(role.several(texts)[0], auto=role.prefix, answer=answer)


def learned(tree: Tree, *roles: Role) -> None:
    for seed in range(5):
        for role in roles or (PLANNER, CRITIC):
            ask(tree, role, document(seed))


def test_unannotated_agents_are_corrected_once_their_edge_is_learned() -> None:
    tree, unseen = big_tree(), document(99)
    reports = []
    for seed in range(5):
        ask(tree, PLANNER, document(seed))
        reports.append(ask(tree, CRITIC, document(seed)))
    assert [r["reason"] for r in reports[:2]] == ["edge_unknown"] * 2
    assert all(r["corrected_tokens"] == 0 for r in reports[:2])
    ask(tree, PLANNER, unseen)
    req = tree.request(CRITIC.prompt(unseen), auto=CRITIC.prefix)
    tree.admit(req)
    report = req.kvcmas.report.as_dict()
    assert (report["auto"], report["reason"], report["corrected_tokens"]) == (True, "reused", N + 1)
    moved = tree.model.kv(PLANNER.prefix, CRITIC.prompt(unseen), 0)
    span = slice(HEAD, HEAD + N)
    for got, want, rotated in zip(tree.held(req), tree.expected(req), moved, strict=True):
        assert (got[:, span] - want[:, span]).norm() < 0.4 * (rotated[:, span] - want[:, span]).norm()
    tree.finish(req)
    tree.check()


def test_without_a_learned_edge_everything_is_computed() -> None:
    tree = big_tree()
    for role in (PLANNER, CRITIC, CODER):
        report = ask(tree, role, document(1))
        assert report["corrected_tokens"] == 0
    req = tree.request(CODER.prompt(document(2)), auto=CODER.prefix)
    tree.admit(req)
    # The formula is not causal: the first token, which all prompts share, is another agent's there.
    for got, want in zip(tree.held(req), tree.expected(req), strict=True):
        assert torch.equal(got[:, 1:], want[:, 1:])
    tree.finish(req)


def test_the_exact_cache_comes_first_in_plain_multi_turn_traffic() -> None:
    tree = big_tree()
    learned(tree)
    conversation = [*CRITIC.prefix, *document(50, 30)]
    for turn in range(4):
        report = tree.serve(conversation, auto=CRITIC.prefix, answer=document(60 + turn, 20))
        assert report["corrected_tokens"] == 0
        assert report["exact_tokens"] >= (len(conversation) - 12 - 1 if turn else HEAD)
        conversation += [*document(60 + turn, 20), *document(70 + turn, 11)]


def test_two_conversations_with_one_system_prompt_share_it_exactly_and_no_more() -> None:
    tree = big_tree()
    learned(tree)
    system = document(40, 60)
    for seed in range(3):
        report = tree.serve([*system, *document(80 + seed, 40)], auto=system)
        assert report["corrected_tokens"] == 0 and report["reason"] == "no_span"
        assert report["exact_tokens"] >= (60 if seed else 0)


def test_matches_below_the_minimum_are_ignored() -> None:
    tree = big_tree(min_span=20)
    learned(tree)
    ask(tree, PLANNER, document(99))
    assert ask(tree, CRITIC, document(99)[:19])["reason"] == "no_span"
    assert ask(tree, CRITIC, document(99)[10:40])["corrected_tokens"] >= 20


def test_answers_are_found_in_later_prompts() -> None:
    tree = big_tree()
    for seed in range(5):
        answer = document(seed + 20, 30)
        ask(tree, PLANNER, document(seed), answer=answer)
        ask(tree, CRITIC, document(seed), answer)
    answer = document(99, 30)
    ask(tree, PLANNER, document(98), answer=answer)
    assert {s.sequence_content is not None for s in tree.cache.sources} == {True, False}
    report = ask(tree, CRITIC, document(98), answer)
    assert [s["reason"] for s in report["spans"]] == ["reused", "reused"]
    assert report["corrected_tokens"] == N + 30
    edges = {(e.source.rsplit("@")[-1], e.consumer.rsplit("@")[-1]) for e in tree.cache.estimators["affine"].edges()}
    assert (Place.ANSWER, Place.LATER) in edges and (Place.FIRST, Place.FIRST) in edges


def test_a_hinted_agent_and_an_unannotated_one_may_read_from_each_other() -> None:
    tree = big_tree()
    for seed in range(5):
        PLANNER.read(tree, document(seed))
        ask(tree, CRITIC, document(seed))
    PLANNER.read(tree, document(99))
    report = ask(tree, CRITIC, document(99))
    assert (report["corrected_tokens"], report["source"]) == (N, "planner")


@pytest.mark.parametrize("salt", ["tenant", ""])
def test_nothing_is_found_across_scopes(salt: str) -> None:
    tree = big_tree()
    learned(tree)
    ask(tree, PLANNER, document(99))
    report = tree.serve(CRITIC.prompt(document(99)), auto=CRITIC.prefix, salt=salt)
    assert (report["corrected_tokens"] > 0) == (salt == "")


def test_a_sequence_that_was_corrected_is_not_learned_from() -> None:
    tree = big_tree()
    learned(tree)
    ask(tree, PLANNER, document(99))
    assert ask(tree, CRITIC, document(99))["corrected_tokens"] == N + 1
    learned_before = tree.cache.statistics.spans_learned
    ask(tree, CODER, document(99))
    # One job: the coder against the planner's KV; the critic's is approximate.
    assert tree.cache.statistics.spans_learned == learned_before + 1
    length = len(CRITIC.prompt(document(99)))
    newest = max((s for s in tree.cache.sources if s.length == length), key=lambda s: s.sequence)
    assert not newest.exact and not newest.computed and newest.error > 0
