"""Computing a span's heavy hitters, more and more of them: the ways to reuse it where the first is over the budget."""

from __future__ import annotations

import numpy as np
import pytest
from kvcmas_sgl.radix_ext.heavy import EFFORTS, heavy_offsets
from kvcmas_sgl.radix_ext.sources import edge

from tests.tree.harness import CODER, CRITIC, PLANNER, Tree, document, learned, sources_of
from tests.tree.test_spans import HEAD, N, assert_close_to_dense, big_tree


def expectations(tree: Tree, text: list[int]) -> list[float]:
    """Predicted KL of the critic's reading from the planner's KV, effort by effort."""
    gate, (source,) = tree.cache.gate, sources_of(tree, text)
    consumer = next(s.agent for s in tree.cache.sources if s.agent.role == "critic")
    return [gate.expect(edge(source.agent, consumer), effort.of("affine"), N).kl for effort in EFFORTS]


def ready(**settings: object) -> tuple[Tree, list[int]]:
    tree, text = big_tree(**settings), document(99)
    learned(tree)
    PLANNER.read(tree, text)
    return tree, text


def test_every_content_gets_its_scores_once_it_was_computed() -> None:
    tree, text = ready()
    (source,) = sources_of(tree, text)
    assert source.content.heavy is not None and source.content.heavy.shape == (N,)
    before = source.content.heavy.copy()
    CODER.read(tree, text)
    assert np.array_equal(source.content.heavy, before)


def test_less_error_is_predicted_where_heavy_hitters_are_computed() -> None:
    kl = expectations(*ready())
    assert 0 < kl[3] < kl[2] < kl[1] < kl[0]


@pytest.mark.parametrize(("head", "effort"), [(0, 1), (0, 2), (0, 3), (5, 1), (5, 2)])
def test_heavy_hitters_are_computed_when_the_budget_asks_for_it(head: int, effort: int) -> None:
    kl = expectations(*ready(head=head))
    tree, text = ready(head=head, max_kl=(kl[effort - 1] + kl[effort]) / 2)
    (source,) = sources_of(tree, text)
    chosen = heavy_offsets(source.content.heavy, head, EFFORTS[effort])
    req = tree.request(CRITIC.prompt(text), CRITIC.hint(text))
    tree.admit(req)
    report = req.kvcmas.report.spans[0]
    assert report.reason == "reused" and report.predicted_kl == pytest.approx(kl[effort], rel=0.2)
    question = [HEAD + N, HEAD + N + 1]
    assert tree.computed == [*range(HEAD, HEAD + head), *(HEAD + chosen).tolist(), *question]
    assert report.corrected_tokens == N - head - len(chosen)
    for budgeted in (req.kvcmas.corrected_ahead(HEAD, None), req.kvcmas.corrected_within(HEAD, HEAD + N)):
        assert budgeted == report.corrected_tokens
    assert_close_to_dense(tree, req)
    tree.finish(req)
    tree.check()


def test_who_reads_right_after_the_first_reader_does_not_wait_for_an_idle_moment() -> None:
    kl = expectations(*ready())
    tree, text = ready(max_kl=(kl[0] + kl[1]) / 2)
    (source,) = sources_of(tree, text)
    # As it was before the lesson that works them out.
    known, source.content.heavy = source.content.heavy, None
    req = tree.request(CRITIC.prompt(text), CRITIC.hint(text))
    tree.admit(req)
    assert req.kvcmas.report.spans[0].reason == "reused"
    assert np.allclose(source.content.heavy, known, atol=1e-6)
    tree.finish(req)
    tree.check()


def test_a_budget_below_all_efforts_refuses() -> None:
    tree, text = ready(max_kl=expectations(*ready())[-1] / 2)
    assert CRITIC.read(tree, text)["reason"] == "over_budget"


def test_a_chunk_may_end_between_two_heavy_hitters() -> None:
    kl = expectations(*ready())
    tree, text = ready(max_kl=(kl[0] + kl[1]) / 2)
    (source,) = sources_of(tree, text)
    chosen = (HEAD + heavy_offsets(source.content.heavy, 0, EFFORTS[1])).tolist()
    prompt = CRITIC.prompt(text)
    req = tree.request(prompt, CRITIC.hint(text))
    middle = chosen[len(chosen) // 2] + 1
    tree.admit(req, upto=middle)
    assert [i for i in tree.computed if i < middle - 1] == [i for i in chosen if i < middle - 1]
    tree.chunk(req, len(prompt))
    assert [i for i in tree.computed if i < HEAD + N] == [i for i in chosen if i >= middle]
    tree.finish(req)
    tree.check()
