"""Several spans in one prompt on the real engine: one pass equals staged passes, and answers travel as spans."""

from __future__ import annotations

from typing import Any

import pytest

import kvcmas_sgl
from tests.engine.conftest import greedy, settle
from tests.engine.measure import distributions, kl
from tests.prompts import CRITIC, PLANNER, Reader, document, tokenizer

N = 200
JUDGE = Reader("judge", "You judge with care, weigh both sides and give your reasons in full sentences.")


def pair(index: int) -> list[list[int]]:
    return [document(index)[:N], document(index)[N : 2 * N]]


def ask(engine: Any, prompt: list[int], hint: Any, tokens: int = 1, **fields: Any) -> dict[str, Any]:
    return greedy(engine, prompt, tokens, kv_hints=hint, **fields)


def learn(engine: Any, *readers: Reader) -> None:
    for index in range(4):
        for reader in readers:
            prompt, hint = reader.several(pair(index))
            hint["actions"][0]["payload"]["reuse"] = "never"
            ask(engine, prompt, hint)
            settle(engine)


def reasons(report: dict[str, Any]) -> list[str]:
    return [span["reason"] for span in report["spans"]]


def test_one_pass_gives_what_staged_passes_give(engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    learn(engine, PLANNER, CRITIC)
    spans = pair(8)
    prompt, hint = CRITIC.several(spans)
    marks = hint["actions"][0]["payload"]["spans"]
    answer = greedy(engine, prompt, 8, cache_salt="dense")["output_ids"]
    truth = distributions(engine, prompt, answer, cache_salt="fresh")
    noise = kl(truth, distributions(engine, prompt, answer, cache_salt="dense"))

    ask(engine, *PLANNER.several(spans))
    out = ask(engine, prompt, hint)
    report = out["meta_info"]["kvcmas"]
    assert reasons(report) == ["reused", "reused"]
    assert [span["corrected_tokens"] for span in report["spans"]] == [N, N]
    assert out["meta_info"]["cached_tokens"] == report["exact_tokens"] + report["corrected_tokens"]
    single = distributions(engine, prompt, answer, kv_hints=hint)

    # A reader whose corrected KV is gone: the same request again, in two passes.
    engine.flush_cache()
    learn(engine, PLANNER, CRITIC)
    ask(engine, *PLANNER.several(spans))
    stop = marks[1][0]
    first = kvcmas_sgl.agent_hint("critic", marks[:1])
    staged = ask(engine, prompt[:stop], first, tokens=0)["meta_info"]["kvcmas"]
    assert staged["corrected_tokens"] == N
    rest = ask(engine, prompt, hint)["meta_info"]["kvcmas"]
    assert reasons(rest) == ["own_corrected", "reused"]
    both = distributions(engine, prompt, answer, kv_hints=hint)
    apart, ours = kl(single, both), kl(truth, single)
    with capsys.disabled():
        print(f"\n  KL: one pass to staged {apart:.5f}, one pass to dense {ours:.5f}, noise {noise:.5f}")
    assert apart <= 2 * noise + 1e-3
    assert ours <= 0.05 + noise


def test_the_glue_is_computed_over_the_corrected_span(engine: Any) -> None:
    learn(engine, PLANNER, CRITIC)
    ask(engine, *PLANNER.several(pair(8)))
    prompt, hint = CRITIC.several(pair(8))
    report = ask(engine, prompt, hint)["meta_info"]["kvcmas"]
    marks = hint["actions"][0]["payload"]["spans"]
    outside = len(prompt) - sum(end - start for start, end in marks)
    head = len(CRITIC.head())
    assert (report["exact_tokens"], report["computed_tokens"]) == (head, outside - head)
    # Another question over the same text finds all of it, glue included, in the role's own tree.
    again, hint = CRITIC.several(pair(8), "Which is longer?")
    report = ask(engine, again, hint)["meta_info"]["kvcmas"]
    assert reasons(report) == ["own_corrected", "own_corrected"]
    assert report["exact_tokens"] == head and report["corrected_tokens"] > 2 * N


def test_answers_are_passed_on_as_spans(engine: Any) -> None:
    words = tokenizer().encode("\n\nThe planner wrote:\n", add_special_tokens=False)
    tail = tokenizer().encode("<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    reports: list[dict[str, Any]] = []
    for index in range(5):
        text = document(index)[:N]
        plan = greedy(engine, PLANNER.prompt(text), 81, kv_hints=PLANNER.hint(text))["output_ids"][:80]
        for reader in (CRITIC, JUDGE):
            prompt = [*reader.head(), *text, *words, *plan]
            start = len(reader.head())
            marks = [(start, start + N), (len(prompt) - len(plan), len(prompt))]
            out = ask(engine, [*prompt, *tail], kvcmas_sgl.agent_hint(reader.role, marks))
            reports.append(out["meta_info"]["kvcmas"])
            settle(engine)
    first, last = reports[0], reports[-1]
    assert reasons(first) == ["edge_unknown", "edge_unknown"]
    assert reasons(last) == ["reused", "reused"]
    assert last["spans"][1]["corrected_tokens"] >= 78
    assert last["predicted_kl"] <= 0.05


def test_eight_requests_at_once_over_the_same_texts(engine: Any) -> None:
    learn(engine, PLANNER, CRITIC)
    ask(engine, *PLANNER.several(pair(8)))
    asked = [CRITIC.several(pair(8), f"Question {i}?") for i in range(8)]
    out = engine.generate(
        input_ids=[prompt for prompt, _ in asked],
        sampling_params={"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True},
        kv_hints=[hint for _, hint in asked],
    )
    for (prompt, _), one in zip(asked, out, strict=True):
        report = one["meta_info"]["kvcmas"]
        assert sum(report[f"{kind}_tokens"] for kind in ("exact", "corrected", "computed")) == len(prompt)
        assert report["corrected_tokens"] >= 2 * N
    assert settle(engine)["fallbacks"] == 0


def test_output_logprobs_and_input_logprobs_with_reuse(engine: Any) -> None:
    learn(engine, PLANNER, CRITIC)
    ask(engine, *PLANNER.several(pair(8)))
    prompt, hint = CRITIC.several(pair(8))
    out = ask(engine, prompt, hint, tokens=2, return_logprob=True, logprob_start_len=len(prompt) - 4)
    info = out["meta_info"]
    assert len(info["input_token_logprobs"]) == 4 and len(info["output_token_logprobs"]) == 2
    assert [token for _, token, *_ in info["input_token_logprobs"]] == prompt[-4:]
    assert info["kvcmas"]["corrected_tokens"] == 2 * N
    # Logprobs of a token inside a span: from there on all of it is computed.
    ask(engine, *JUDGE.several(pair(8)))
    out = ask(engine, prompt[:-3], hint, return_logprob=True, logprob_start_len=len(CRITIC.head()) + N // 2)
    assert len(out["meta_info"]["input_token_logprobs"]) == len(prompt) - 3 - len(CRITIC.head()) - N // 2
