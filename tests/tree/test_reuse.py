"""What is reused, from whom, and with which values in the pool."""

from __future__ import annotations

import pytest
import torch
from kvcmas_sgl.radix_ext.decision import Reason
from kvcmas_sgl.radix_ext.sources import edge
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from tests.tree.harness import CODER, CRITIC, PLANNER, WIDTH, Role, Tree, document, learned, sources_of

N = 48


def test_unseen_content_is_corrected_to_what_a_dense_run_gives() -> None:
    tree, unseen = Tree(), document(99)
    learned(tree)
    PLANNER.read(tree, unseen)
    req = tree.request(CRITIC.prompt(unseen), CRITIC.hint(unseen))
    tree.admit(req)
    report = req.kvcmas.report.as_dict()
    assert (report["exact_tokens"], report["corrected_tokens"], report["computed_tokens"]) == (7, N, 2)
    assert (report["reason"], report["source"], report["estimator"]) == ("reused", "planner", "affine")
    moved = tree.model.kv(PLANNER.prefix, CRITIC.prompt(unseen), 0)
    for got, want, rotated in zip(tree.held(req), tree.expected(req), moved, strict=True):
        assert (got - want).norm() < 0.3 * (rotated - want).norm()
    tree.finish(req)
    tree.check()


def test_the_first_readers_are_dense_and_say_why() -> None:
    tree = Tree()
    reasons = []
    for seed in range(3):
        reasons.append(PLANNER.read(tree, document(seed))["reason"])
        reasons.append(CRITIC.read(tree, document(seed))["reason"])
    assert reasons == ["no_source", "edge_unknown"] * 3


def test_rotate_only_moves_the_source_exactly() -> None:
    tree, text = Tree(allow_overrides=True), document(1)
    PLANNER.read(tree, text)
    CRITIC.read(tree, document(2))
    req = tree.request(CRITIC.prompt(text), CRITIC.hint(text, policy="always", estimator="none"))
    tree.admit(req)
    start = len(CRITIC.prefix)
    k, v = tree.held(req)
    moved, same = tree.model.kv(PLANNER.prefix, text, start)
    torch.testing.assert_close(k[:, start : start + N], moved, rtol=0, atol=2e-5)
    assert torch.equal(v[:, start : start + N], same)
    tree.finish(req)


def test_the_same_prefix_under_another_name_is_copied_bit_for_bit_and_is_exact() -> None:
    tree, text = Tree(), document(1)
    twin = Role("twin", PLANNER.prefix)
    PLANNER.read(tree, text)
    twin.read(tree, document(2))
    req = tree.request(twin.prompt(text), twin.hint(text))
    tree.admit(req)
    report = req.kvcmas.report.as_dict()
    assert (report["exact_tokens"], report["corrected_tokens"]) == (5 + N, 0)
    assert (report["reason"], report["estimator"], report["predicted_error"]) == ("reused", "identical", 0.0)
    for got, want in zip(tree.held(req), tree.expected(req), strict=True):
        assert torch.equal(got[:, : 5 + N], want[:, : 5 + N])
    tree.finish(req)


def test_a_second_hit_on_corrected_kv_still_counts_as_corrected() -> None:
    tree, text = Tree(), document(99)
    learned(tree)
    PLANNER.read(tree, text)
    first = CRITIC.read(tree, text)
    again = tree.serve(CRITIC.prompt(text, (8, 8, 8)), CRITIC.hint(text))
    assert again["reason"] == "own_corrected"
    assert (again["exact_tokens"], again["corrected_tokens"], again["computed_tokens"]) == (7, N, 3)
    assert (again["source"], again["predicted_error"]) == (first["source"], first["predicted_error"])


def assert_dense(tree: Tree, text: list[int]) -> None:
    """The critic's KV of a text is exact, and bit for bit what a dense run gives."""
    req = tree.request(CRITIC.prompt(text, (8,)), CRITIC.hint(text))
    tree.admit(req)
    assert req.kvcmas.report.as_dict()["reason"] == "exact"
    for got, want in zip(tree.held(req), tree.expected(req), strict=True):
        assert torch.equal(got, want)
    tree.finish(req)
    tree.check()


def test_a_dense_run_replaces_corrected_kv() -> None:
    tree, text = Tree(), document(99)
    learned(tree)
    PLANNER.read(tree, text)
    assert CRITIC.read(tree, text)["corrected_tokens"] == N
    dense = CRITIC.read(tree, text, reuse="never")
    assert (dense["reason"], dense["corrected_tokens"]) == ("declined", 0)
    assert_dense(tree, text)


def test_a_dense_run_under_way_replaces_what_was_corrected_meanwhile() -> None:
    tree, text = Tree(), document(99)
    learned(tree)
    dense = tree.request(CRITIC.prompt(text), CRITIC.hint(text))
    tree.admit(dense)
    assert dense.kvcmas.report.as_dict()["reason"] == "no_source"
    PLANNER.read(tree, text, settle=False)
    assert tree.serve(CRITIC.prompt(text, (9, 9)), CRITIC.hint(text), settle=False)["corrected_tokens"] == N
    tree.finish(dense)
    assert_dense(tree, text)


def test_the_newest_reader_becomes_a_source_with_its_error() -> None:
    tree, text = Tree(), document(99)
    learned(tree)
    PLANNER.read(tree, text)
    report = CRITIC.read(tree, text)
    newest = sources_of(tree, text)[0]
    assert newest.agent.role == "critic"
    assert not newest.exact and newest.error == report["predicted_error"] > 0


@pytest.mark.parametrize("head", [0, 3])
def test_a_span_that_is_known_in_part_is_an_error_in_part(head: int) -> None:
    tree, known = Tree(head=head), document(99)
    learned(tree)
    PLANNER.read(tree, known)
    text = [*known[:30], *document(98, 34)]
    report = CRITIC.read(tree, text)
    assert (report["reason"], report["corrected_tokens"]) == ("reused", 30 - head)
    (source,) = sources_of(tree, text)
    assert not source.exact
    assert source.error == pytest.approx(report["predicted_error"] * (30 / 64) ** 0.5)


def test_a_span_that_is_mostly_new_is_computed_and_stays_exact() -> None:
    tree, known = Tree(), document(99)
    learned(tree)
    PLANNER.read(tree, known)
    text = [*known[:15], *document(98, 49)]
    report = CRITIC.read(tree, text)
    assert (report["reason"], report["corrected_tokens"]) == ("mostly_new", 0)
    assert sources_of(tree, text)[0].exact
    # One more known token makes it a quarter.
    other = document(96)
    PLANNER.read(tree, other)
    assert CRITIC.read(tree, [*other[:16], *document(97, 48)])["corrected_tokens"] == 16


def test_a_budget_of_zero_reuses_nothing_that_is_not_exact() -> None:
    tree, text = Tree(max_kl=0.0), document(99)
    learned(tree)
    PLANNER.read(tree, text)
    report = CRITIC.read(tree, text)
    assert (report["reason"], report["corrected_tokens"]) == ("over_budget", 0)
    assert report["predicted_kl"] > 0


def test_an_own_delta_of_full_rank_rebuilds_the_dense_run() -> None:
    tree, text = Tree(own_rank=WIDTH, slots=280), document(1)
    PLANNER.read(tree, text)
    CRITIC.read(tree, document(2))
    CRITIC.read(tree, text)
    evict_role(tree, text, CRITIC)
    req = tree.request(CRITIC.prompt(text), CRITIC.hint(text))
    tree.admit(req)
    report = req.kvcmas.report.as_dict()
    assert (report["estimator"], report["corrected_tokens"]) == ("own", N)
    for got, want in zip(tree.held(req), tree.expected(req), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    tree.finish(req)


def evict_role(tree: Tree, text: list[int], role: Role) -> None:
    """Fill the pool with plain requests, touching everything but the role's copy of the text."""
    filler = 300
    while any(s.agent.role == role.name for s in sources_of(tree, text)):
        PLANNER.read(tree, text)
        role.read(tree, document(2))
        tree.serve([filler % 500] * 10 + [filler] * 20)
        filler += 1
        assert filler < 330, "the role's copy was never evicted"


@pytest.mark.parametrize("where", ["plan", "run"])
def test_a_failing_correction_ends_in_a_dense_prefill(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcmas_sgl.radix_ext import kv_view as module

    tree, text = Tree(), document(99)
    learned(tree)
    PLANNER.read(tree, text)

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(module, where, broken)
    report = CRITIC.read(tree, text)
    assert (report["reason"], report["corrected_tokens"]) == (str(Reason.FAILED), 0)
    assert tree.cache.statistics.fallbacks == 1


def test_a_source_that_leaves_before_the_pass_ends_in_a_dense_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, text = Tree(), document(99)
    learned(tree)
    PLANNER.read(tree, text)
    monkeypatch.setattr(tree.cache, "hold", lambda req: tree.cache.evict(EvictParams(num_tokens=10**6)))
    report = CRITIC.read(tree, text)
    assert (report["reason"], report["corrected_tokens"]) == ("gone", 0)


def test_nan_in_the_source_is_never_placed_nor_learned() -> None:
    tree, text = Tree(), document(99)
    learned(tree)
    edges = {n: [(e, est.spans_seen(e)) for e in est.edges()] for n, est in tree.cache.estimators.items()}
    PLANNER.read(tree, text)
    for buffer in tree.cache.view.v_buffers:
        source = max(tree.cache.sources, key=lambda s: s.sequence)
        buffer[tree.cache.spans.slots(source)] = float("nan")
    report = CRITIC.read(tree, text)
    assert (report["reason"], report["corrected_tokens"]) == ("failed", 0)
    assert tree.cache.statistics.fallbacks >= 1
    for estimator in tree.cache.estimators.values():
        for known in estimator.edges():
            delta = estimator.predict(known)
            if delta is not None:
                ones = torch.ones(1, 16)
                assert torch.isfinite(torch.cat(delta.rows(1, torch.zeros(1, dtype=torch.int64), ones, ones))).all()
    assert edges == {n: [(e, est.spans_seen(e)) for e in est.edges()] for n, est in tree.cache.estimators.items()}


def test_three_roles_reuse_from_whom_the_error_is_least() -> None:
    tree = Tree()
    for seed in range(5):
        for role in (PLANNER, CRITIC, CODER):
            role.read(tree, document(seed))
    text = document(99)
    PLANNER.read(tree, text)
    assert CRITIC.read(tree, text)["source"] == "planner"
    sources = sources_of(tree, text)
    assert [s.agent.role for s in sources] == ["critic", "planner"] and sources[0].error > 0
    coder = next(s.agent for s in tree.cache.sources if s.agent.role == "coder")
    totals = {}
    for source in sources:
        expected = tree.cache.gate.expect(edge(source.agent, coder), "affine", N, source.error)
        assert expected is not None
        totals[source.agent.role] = expected.error
    report = CODER.read(tree, text)
    assert report["reason"] == "reused"
    assert report["source"] == min(totals, key=lambda role: totals[role])
    assert report["predicted_error"] == pytest.approx(min(totals.values()))
