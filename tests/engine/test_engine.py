"""First principles on the real engine and a real model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import greedy, plain_prompts, settle, state
from tests.engine.measure import distributions, kl
from tests.prompts import CRITIC, HEAD, PLANNER, TWIN, Reader, document

N = 600


def read(engine: Any, reader: Reader, span: list[int], tokens: int = 2, **fields: Any) -> dict[str, Any]:
    """One agent request; returns the report."""
    extra = {"cache_salt": fields.pop("cache_salt")} if "cache_salt" in fields else {}
    out = greedy(engine, reader.prompt(span), tokens, kv_hints=reader.hint(span, **fields), **extra)
    report = out["meta_info"]["kvcmas"]
    assert out["meta_info"]["prompt_tokens"] == sum(report[f"{kind}_tokens"] for kind in KINDS)
    return report


KINDS = ("exact", "corrected", "computed")


def learn(engine: Any, reader: Reader = CRITIC, spans: range = range(4)) -> None:
    for index in spans:
        read(engine, PLANNER, document(index))
        read(engine, reader, document(index), reuse="never")
        settle(engine)


def test_plain_requests_equal_stock_token_for_token(engine: Any, stock_answers: list[list[int]]) -> None:
    span = document(9)
    for index, (prompt, answer) in enumerate(zip(plain_prompts(), stock_answers, strict=True)):
        out = greedy(engine, prompt)
        assert out["output_ids"] == answer, f"prompt {index}"
        assert "kvcmas" not in out["meta_info"]
        if index % 5 == 0:
            read(engine, (PLANNER, CRITIC)[index // 5 % 2], span)


def test_unseen_content_is_corrected_within_the_budget(engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    learn(engine)
    unseen, question = document(8), "Name one thing that happens."
    read(engine, PLANNER, unseen)
    report = read(engine, CRITIC, unseen)
    assert report["corrected_tokens"] == N - HEAD and report["reason"] == "reused"
    assert (report["source"], report["estimator"]) == ("planner", "affine")
    assert 0 < report["predicted_kl"] <= 0.3

    prompt = CRITIC.prompt(unseen, question)
    dense = {"cache_salt": "dense"}
    answer = greedy(engine, prompt, 8, **dense)["output_ids"]
    truth = distributions(engine, prompt, answer, cache_salt="fresh")
    noise = kl(truth, distributions(engine, prompt, answer, **dense))
    ours = kl(truth, distributions(engine, prompt, answer, kv_hints=CRITIC.hint(unseen)))
    with capsys.disabled():
        print(f"\n  KL of corrected {ours:.5f}, predicted at most {report['predicted_kl']:.5f}, noise {noise:.5f}")
    assert ours <= 0.05 + noise


def test_identical_context_gives_a_zero_delta(engine: Any) -> None:
    span = document(5)
    read(engine, PLANNER, span)
    read(engine, TWIN, document(6))
    report = read(engine, TWIN, span)
    assert (report["estimator"], report["predicted_error"]) == ("identical", 0.0)
    assert (report["exact_tokens"], report["corrected_tokens"]) == (len(TWIN.head()) + N, 0)
    # A tail that shares not one token with what either asked: both compute all of it, over the cached span.
    prompt, answer = [*PLANNER.head(), *span, *document(3, 12)], document(7, 8)
    twin = distributions(engine, prompt, answer, kv_hints=TWIN.hint(span))
    own = distributions(engine, prompt, answer, kv_hints=PLANNER.hint(span))
    assert twin == own


def test_a_full_rank_own_delta_equals_the_dense_run(engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    span, other = document(5), document(6)
    read(engine, PLANNER, span)
    read(engine, CRITIC, span)
    settle(engine)
    prompt, answer = CRITIC.prompt(span), document(7, 8)
    hint = CRITIC.hint(span)
    dense = distributions(engine, prompt, answer, kv_hints=hint)
    noise = kl(dense, distributions(engine, prompt, answer, cache_salt="fresh"))
    read(engine, PLANNER, span)
    read(engine, CRITIC, other)
    gone = 0
    for filler in range(30):
        # Plain traffic pushes the critic's copy, the least recently used, out of the pool: its end first, and two
        # rounds later the rest.
        gone += state(engine)["sources"] < 3
        if gone > 2:
            break
        greedy(engine, [filler + 20, *document(filler % 8, 500)], 1)
        read(engine, PLANNER, span)
        greedy(engine, CRITIC.prompt(other), 1, kv_hints=CRITIC.hint(other))
    out = greedy(engine, prompt, 1, kv_hints=hint)
    report = out["meta_info"]["kvcmas"]
    assert (report["estimator"], report["corrected_tokens"]) == ("own", N - HEAD)
    rebuilt = kl(dense, distributions(engine, prompt, answer, kv_hints=hint))
    with capsys.disabled():
        print(f"\n  KL of the rebuilt span {rebuilt:.5f}, noise {noise:.5f}")
    assert rebuilt <= 2 * noise + 1e-4


def test_no_one_reaches_the_agents_kv(engine: Any) -> None:
    span = document(5)
    prompt = CRITIC.prompt(span)
    read(engine, CRITIC, span)
    assert read(engine, CRITIC, span)["reason"] == "exact"
    for fields in ({}, {"cache_salt": "tenant"}):
        assert greedy(engine, prompt, 1, **fields)["meta_info"]["cached_tokens"] == 0
    assert read(engine, CRITIC, span, cache_salt="tenant-b")["exact_tokens"] == 0
    # Another role reaches none of it: with the same prefix it gets a copy of the span, and computes the rest.
    report = read(engine, Reader("critic-2", CRITIC.system), span)
    assert (report["exact_tokens"], report["estimator"]) == (N, "identical")
    assert report["computed_tokens"] == len(prompt) - N
    assert read(engine, Reader("critic-3", CRITIC.system + " Be brief."), span)["exact_tokens"] == 0


def test_chunked_prefill_streaming_and_parallel_samples_report_the_same(engine: Any) -> None:
    learn(engine)
    unseen = document(8)
    read(engine, PLANNER, unseen)
    prompt, hint = CRITIC.prompt(unseen), CRITIC.hint(unseen)
    sampling = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
    stream = list(engine.generate(input_ids=prompt, sampling_params=sampling, kv_hints=hint, stream=True))
    assert len(stream) == 4
    for chunk in stream:
        assert chunk["meta_info"]["kvcmas"]["corrected_tokens"] == N - HEAD
    samples = engine.generate(input_ids=prompt, sampling_params={**sampling, "n": 3}, kv_hints=hint)
    assert [s["meta_info"]["kvcmas"]["reason"] for s in samples] == ["own_corrected"] * 3
    assert {tuple(s["output_ids"]) for s in samples} == {tuple(stream[-1]["output_ids"])}


def test_several_agents_in_one_batch(engine: Any) -> None:
    learn(engine)
    spans = [document(i) for i in (6, 7, 8)]
    for span in spans:
        read(engine, PLANNER, span)
    out = engine.generate(
        input_ids=[CRITIC.prompt(span) for span in spans],
        sampling_params={"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True},
        kv_hints=[CRITIC.hint(span) for span in spans],
    )
    reports = [o["meta_info"]["kvcmas"] for o in out]
    assert [r["reason"] for r in reports] == ["reused"] * 3
    # A document's first word may be resident from another one.
    for report in reports:
        assert report["corrected_tokens"] >= N - HEAD - 2
        assert len(CRITIC.head()) + N - HEAD <= report["exact_tokens"] + report["corrected_tokens"]


def test_bad_hints_are_refused_in_one_sentence_and_the_engine_lives_on(engine: Any) -> None:
    prompt = PLANNER.prompt(document(1))
    hint = PLANNER.hint(document(1))
    hint["actions"][0]["payload"]["spans"] = [[0, len(prompt) + 1]]
    with pytest.raises(ValueError, match="ends after the prompt"):
        greedy(engine, prompt, 1, kv_hints=hint)
    assert read(engine, PLANNER, document(1))["reason"] in ("no_source", "exact")


def test_state_stays_inside_its_budget_and_is_forgotten_with_the_cache(engine: Any) -> None:
    learn(engine, spans=range(2))
    totals = settle(engine)
    assert 0 < totals["state_bytes"] <= 1 << 30
    assert totals["fallbacks"] == 0
    engine.flush_cache()
    assert state(engine)["state_bytes"] == 0 and state(engine)["sources"] == 0
