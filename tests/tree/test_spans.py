"""Several spans in one prompt: each is decided for itself, and what stands between them is always computed."""

from __future__ import annotations

import pytest
import torch
from kvcmas_sgl.radix_ext.node_marks import path_to, provenance
from kvcmas_sgl.radix_ext.sources import Place
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import match_kv_cache
from sglang.test.mem_cache_utils import finish_req

from tests.tree.harness import CODER, CRITIC, PLANNER, Tree, document, learned, sources_of

N = 48
HEAD = len(CRITIC.prefix)


def big_tree(**settings: object) -> Tree:
    return Tree(slots=4096, **settings)


def learned_twice(tree: Tree) -> None:
    """Planner, then critic, read pairs of documents: both places of the edge are learned."""
    for seed in range(5):
        for role in (PLANNER, CRITIC):
            tree.serve(*dense(role.several([document(seed), document(seed + 10)])))


def dense(prompt_and_hint: tuple[list[int], dict]) -> tuple[list[int], dict]:
    return prompt_and_hint[0], {**prompt_and_hint[1], "reuse": "never"}


def span_reasons(report: dict) -> list[str]:
    return [span["reason"] for span in report["spans"]]


def assert_close_to_dense(tree: Tree, req: object) -> None:
    """What was computed is exact; what was corrected is far nearer to the dense run than the planner's KV, moved."""
    exact = torch.ones(len(req.origin_input_ids), dtype=torch.bool)
    for span in req.kvcmas.report.spans:
        exact[span.start : span.stop] = False
    exact[tree.computed] = True
    moved = tree.model.kv(PLANNER.prefix, req.origin_input_ids, 0)
    for got, want, rotated in zip(tree.held(req), tree.expected(req), moved, strict=True):
        assert torch.equal(got[:, exact], want[:, exact])
        if not exact.all():
            error = (got - want)[:, ~exact].norm() / (rotated - want)[:, ~exact].norm()
            assert error < 0.4, error


def test_glue_is_computed_and_every_span_corrected() -> None:
    tree, a, b = big_tree(), document(90), document(91)
    learned_twice(tree)
    tree.serve(*PLANNER.several([a, b]))
    prompt, hint = CRITIC.several([a, b])
    req = tree.request(prompt, hint)
    tree.admit(req)
    # The prefix is resident; glue and question are all that is computed.
    glue = HEAD + N
    assert tree.computed == [glue, glue + 1, glue + 2, glue + 3 + N, glue + 4 + N]
    report = req.kvcmas.report.as_dict()
    assert span_reasons(report) == ["reused", "reused"]
    assert (report["exact_tokens"], report["corrected_tokens"], report["computed_tokens"]) == (HEAD, 2 * N, 5)
    assert [(s["start"], s["stop"], s["corrected_tokens"]) for s in report["spans"]] == [
        (HEAD, HEAD + N, N),
        (glue + 3, glue + 3 + N, N),
    ]
    assert report["predicted_kl"] == pytest.approx(sum(s["predicted_kl"] for s in report["spans"]))
    assert_close_to_dense(tree, req)
    tree.finish(req)
    tree.check()


def test_a_refused_span_is_computed_and_the_next_one_still_reused() -> None:
    tree, a, b, new = big_tree(), document(90), document(91), document(92)
    learned_twice(tree)
    tree.serve(*PLANNER.several([a, b]))
    prompt, hint = CRITIC.several([a, new, b])
    req = tree.request(prompt, hint)
    tree.admit(req)
    report = req.kvcmas.report.as_dict()
    assert span_reasons(report) == ["reused", "no_source", "reused"]
    assert report["computed_tokens"] == N + 2 * 3 + 2 == len(tree.computed)
    assert_close_to_dense(tree, req)
    tree.finish(req)
    tree.check()


def test_a_prefix_that_is_not_resident_is_computed_in_the_same_pass() -> None:
    tree, text = big_tree(), document(99)
    learned(tree)
    tree.cache.evict(EvictParams(num_tokens=10**6))
    PLANNER.read(tree, text)
    req = tree.request(CRITIC.prompt(text), CRITIC.hint(text))
    tree.admit(req)
    report = req.kvcmas.report.as_dict()
    assert report["corrected_tokens"] == N and report["computed_tokens"] == len(tree.computed)
    assert tree.computed == [*range(HEAD), HEAD + N, HEAD + N + 1]
    tree.finish(req)
    tree.check()


def test_the_head_of_a_span_is_always_computed() -> None:
    tree, text = big_tree(head=5), document(99)
    learned(tree)
    PLANNER.read(tree, text)
    req = tree.request(CRITIC.prompt(text), CRITIC.hint(text))
    tree.admit(req)
    assert tree.computed == [*range(HEAD, HEAD + 5), HEAD + N, HEAD + N + 1]
    assert req.kvcmas.report.corrected_tokens == N - 5
    tree.finish(req)


@pytest.mark.parametrize("border", [HEAD + 1, HEAD + 20, HEAD + N, HEAD + N + 2, HEAD + N + 3, HEAD + N + 10])
def test_chunks_may_end_anywhere(border: int) -> None:
    tree, a, b = big_tree(), document(90), document(91)
    learned_twice(tree)
    tree.serve(*PLANNER.several([a, b]))
    prompt, hint = CRITIC.several([a, b])
    req = tree.request(prompt, hint)
    tree.admit(req, upto=border)
    # A pass always computes its last token.
    assert tree.computed[-1] == border - 1
    tree.chunk(req, len(prompt))
    assert_close_to_dense(tree, req)
    report = req.kvcmas.report.as_dict()
    assert sum(report[f"{kind}_tokens"] for kind in ("exact", "corrected", "computed")) == len(prompt)
    assert report["corrected_tokens"] >= 2 * N - 1
    tree.finish(req)
    tree.check()
    again = tree.serve([*prompt, 9], hint)
    # The first chunk's last token is the span's first one where that is all of the span that it holds.
    assert (again["exact_tokens"], again["computed_tokens"]) == (HEAD + (border == HEAD + 1), 1)


def test_a_request_that_ends_between_two_chunks_leaves_nothing_wrong() -> None:
    tree, a, b = big_tree(), document(90), document(91)
    learned_twice(tree)
    tree.serve(*PLANNER.several([a, b]))
    prompt, hint = CRITIC.several([a, b])
    req = tree.request(prompt, hint)
    tree.admit(req, upto=HEAD + 20)
    known = len(tree.cache.sources)
    tree.cache.checkpoint(req, up_to=HEAD + 20)
    finish_req(tree.cache, req, HEAD + 20)
    tree.rows.free(req)
    tree.check()
    assert len(tree.cache.sources) == known
    report = tree.serve(prompt, hint)
    assert report["exact_tokens"] == HEAD and report["computed_tokens"] <= 6


def test_a_span_used_twice_is_corrected_twice() -> None:
    tree, a = big_tree(), document(90)
    for seed in range(5):
        PLANNER.read(tree, document(seed))
        tree.serve(*dense(CRITIC.several([document(seed), document(seed)])))
    PLANNER.read(tree, a)
    prompt, hint = CRITIC.several([a, a])
    req = tree.request(prompt, hint)
    tree.admit(req)
    assert req.kvcmas.report.corrected_tokens == 2 * N
    assert_close_to_dense(tree, req)
    tree.finish(req)
    tree.check()


def test_the_budget_is_the_prompts_as_a_whole() -> None:
    tree, a, b = big_tree(), document(90), document(91)
    learned_twice(tree)
    tree.serve(*PLANNER.several([a, b]))
    kl = [s["predicted_kl"] for s in tree.serve(*CRITIC.several([a, b]))["spans"]]
    # Room for the cheaper span alone, however many tokens of the other one are computed.
    tight = big_tree(max_kl=min(kl) * 1.001)
    learned_twice(tight)
    tight.serve(*PLANNER.several([a, b]))
    report = tight.serve(*CRITIC.several([a, b]))
    cheap = min(range(2), key=lambda i: kl[i])
    assert report["spans"][cheap]["reason"] == "reused"
    assert report["spans"][1 - cheap]["reason"] == "over_budget"
    assert 0 < report["spans"][1 - cheap]["predicted_kl"] <= kl[1 - cheap]


def test_tokens_that_merge_at_both_borders_cost_only_themselves() -> None:
    tree, text = big_tree(), document(99)
    learned(tree)
    PLANNER.read(tree, text)
    merged = [500, *text[1:-1], 501]
    req = tree.request(CRITIC.prompt(merged), CRITIC.hint(merged))
    tree.admit(req)
    assert req.kvcmas.report.corrected_tokens == N - 2
    assert tree.computed == [HEAD, HEAD + N - 1, HEAD + N, HEAD + N + 1]
    assert_close_to_dense(tree, req)
    tree.finish(req)
    tree.check()


def test_what_was_computed_below_corrected_kv_is_replaced_with_it() -> None:
    tree, a, new = big_tree(), document(90), document(92)
    learned_twice(tree)
    tree.serve(*PLANNER.several([a, document(91)]))
    prompt, hint = CRITIC.several([a, new])
    assert span_reasons(tree.serve(prompt, hint)) == ["reused", "no_source"]
    side = [*prompt[: HEAD + N + 3], 11, 12, 13]
    tree.serve(side, {**hint, "spans": [[HEAD, HEAD + N]]})
    # Corrupt what was computed over corrected KV, so that keeping it would show.
    source = next(s for s in sources_of(tree, new) if s.agent.role == "critic")
    assert not source.exact and source.computed
    tree.cache.view.v_buffers[2][tree.cache.spans.slots(source)] += 1
    tree.serve(prompt, {**hint, "reuse": "never"})
    req = tree.request([*prompt, 9], hint)
    tree.admit(req)
    assert span_reasons(req.kvcmas.report.as_dict()) == ["exact", "exact"]
    for got, want in zip(tree.held(req), tree.expected(req), strict=True):
        assert torch.equal(got, want)
    tree.finish(req)
    # The other question was computed over the old KV and nobody computed it again: it still counts as corrected.
    report = tree.serve([*side, 9], {**hint, "spans": [[HEAD, HEAD + N]]})
    assert report["corrected_tokens"] == 3


def test_two_programs_at_once_with_the_same_texts() -> None:
    tree, a, b = big_tree(), document(90), document(91)
    learned_twice(tree)
    tree.serve(*PLANNER.several([a, b]))
    prompt, hint = CRITIC.several([a, b])
    first, second = tree.request(prompt, hint), tree.request(prompt, hint)
    for req in (first, second):
        tree.admit(req)
        assert req.kvcmas.report.corrected_tokens == 2 * N
        assert_close_to_dense(tree, req)
    tree.finish(second)
    tree.finish(first)
    tree.check()
    # The tree holds one copy, marked as what it is.
    assert tree.serve([*prompt, 9], hint)["exact_tokens"] == HEAD


def test_a_copy_that_the_tree_had_exactly_is_not_marked_as_corrected() -> None:
    tree, a, b = big_tree(), document(90), document(91)
    learned_twice(tree)
    tree.serve(*PLANNER.several([a, b]))
    prompt, hint = CRITIC.several([a, b])
    corrected, dense = tree.request(prompt, hint), tree.request(prompt, {**hint, "reuse": "never"})
    tree.admit(corrected)
    tree.admit(dense)
    tree.finish(dense)
    tree.finish(corrected)
    tree.check()
    report = tree.serve([*prompt, 9], hint)
    assert (report["exact_tokens"], report["corrected_tokens"]) == (len(prompt), 0)
    node = next(s for s in sources_of(tree, b) if s.agent.role == "critic").node
    assert all(provenance(step) is None for step in path_to(tree.cache.tree_core.node_by_id(node)))


def test_an_answer_is_a_source_and_its_reader_a_better_one() -> None:
    tree = big_tree()
    for seed in range(5):
        text, answer = document(seed), document(seed + 20, 30)
        tree.serve(PLANNER.prompt(text), PLANNER.hint(text), answer=answer)
        (held,) = sources_of(tree, answer)
        assert held.agent.place is Place.ANSWER and held.start == len(PLANNER.prompt(text))
        for role in (CRITIC, CODER):
            tree.serve(*role.several([text, answer]))
    text, answer = document(98), document(99, 30)
    tree.serve(PLANNER.prompt(text), PLANNER.hint(text), answer=answer)
    prompt, hint = CRITIC.several([text, answer])
    req = tree.request(prompt, hint)
    tree.admit(req)
    report = req.kvcmas.report.as_dict()
    assert span_reasons(report) == ["reused", "reused"] and report["spans"][1]["corrected_tokens"] == 30
    assert report["spans"][1]["source"] == "planner"
    assert_close_to_dense(tree, req)
    tree.finish(req)
    assert [s.agent.role for s in sources_of(tree, answer)] == ["critic", "planner"]
    tree.check()


def test_a_span_that_opens_the_prompt_is_not_corrected() -> None:
    tree, text = big_tree(), document(99)
    learned(tree)
    PLANNER.read(tree, text)
    report = tree.serve([*text, 7], {"role": "critic", "spans": [[0, N]]})
    assert (report["reason"], report["corrected_tokens"]) == ("no_prefix", 0)


def test_input_logprobs_keep_their_tokens_out_of_reach() -> None:
    tree, text = big_tree(), document(99)
    learned(tree)
    PLANNER.read(tree, text)
    req = tree.request(CRITIC.prompt(text), CRITIC.hint(text))
    match_kv_cache(req, tree.cache, req.origin_input_ids, max_prefix_len=HEAD + 20)
    assert [(p.start, p.stop) for p in req.kvcmas.pieces] == [(HEAD, HEAD + 20)]


def test_a_failing_audit_is_counted_and_the_run_is_learned_from_all_the_same() -> None:
    tree = big_tree()
    learned(tree)
    asked = []

    def broken(*args: object) -> None:
        asked.append(args)
        raise RuntimeError("injected")

    tree.cache.lessons.forward = broken
    spans = tree.cache.statistics.spans_learned
    PLANNER.read(tree, document(80))
    CRITIC.read(tree, document(80), reuse="never")
    assert len(asked) == 1 and tree.cache.statistics.fallbacks == 1
    assert tree.cache.statistics.spans_learned == spans + 1
    # The audit's slots were given back (`read` checks the pool), and the next reader is served.
    PLANNER.read(tree, document(81))
    assert CRITIC.read(tree, document(81))["corrected_tokens"] == N
