"""Several spans in one prompt on the real engine: one pass equals staged passes, and answers travel as spans."""

from __future__ import annotations

from typing import Any

import pytest

import kvcmas_sgl
from tests.engine.conftest import greedy, settle
from tests.engine.measure import distributions, kl
from tests.prompts import CRITIC, HEAD, PLANNER, Reader, document, tokenizer

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
    assert [span["corrected_tokens"] for span in report["spans"]] == [N - HEAD, N - HEAD]
    assert out["meta_info"]["cached_tokens"] == report["exact_tokens"] + report["corrected_tokens"]
    single = distributions(engine, prompt, answer, kv_hints=hint)

    # A reader whose corrected KV is gone: the same request again, in two passes.
    engine.flush_cache()
    learn(engine, PLANNER, CRITIC)
    ask(engine, *PLANNER.several(spans))
    stop = marks[1][0]
    first = kvcmas_sgl.agent_hint("critic", marks[:1])
    staged = ask(engine, prompt[:stop], first, tokens=0)["meta_info"]["kvcmas"]
    assert staged["corrected_tokens"] == N - HEAD
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
    assert (report["exact_tokens"], report["computed_tokens"]) == (head, outside - head + 2 * HEAD)
    # Another question over the same text finds all of it, glue included, in the role's own tree.
    again, hint = CRITIC.several(pair(8), "Which is longer?")
    report = ask(engine, again, hint)["meta_info"]["kvcmas"]
    assert reasons(report) == ["own_corrected", "own_corrected"]
    # The first span's head was computed over exact KV.
    assert report["exact_tokens"] == head + HEAD and report["corrected_tokens"] > 2 * N - HEAD


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
            # Whether an answer is worth its error is the gate's affair; here it is to be reused.
            policy = "always" if index == 4 else "learn"
            out = ask(engine, [*prompt, *tail], kvcmas_sgl.agent_hint(reader.role, marks, policy=policy))
            reports.append(out["meta_info"]["kvcmas"])
            settle(engine)
    first, critic, judge = reports[0], *reports[-2:]
    assert reasons(first) == ["declined", "declined"]
    assert reasons(critic) == reasons(judge) == ["reused", "reused"]
    assert critic["spans"][1]["corrected_tokens"] >= 78 - HEAD
    assert [span["estimator"] for span in critic["spans"]] == ["affine", "affine"]
    # The decode KV is the first source; then there is the critic's copy too.
    assert critic["spans"][1]["source"] == "planner" and judge["spans"][1]["source"] in ("planner", "critic")


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
        assert report["corrected_tokens"] >= 2 * (N - HEAD)
    assert settle(engine)["fallbacks"] == 0


def test_logprobs_of_outputs_and_inputs_beside_reuse(engine: Any) -> None:
    learn(engine, PLANNER, CRITIC)
    ask(engine, *PLANNER.several(pair(8)))
    prompt, hint = CRITIC.several(pair(8))
    more = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5, 6]}
    # Together with a plain request, so that rows and requests differ in number.
    plain = document(3)[:40]
    ours, other = engine.generate(
        input_ids=[prompt, plain],
        sampling_params={"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True},
        kv_hints=[hint, None],
        logprob_start_len=[len(prompt) - 4, 30],
        **{name: [value, value] for name, value in more.items()},
    )
    for out, tail in ((ours, prompt[-4:]), (other, plain[30:])):
        info = out["meta_info"]
        assert [token for _, token, *_ in info["input_token_logprobs"]] == tail
        assert len(info["output_token_logprobs"]) == 2
        # The first token has no distribution before it.
        assert [len(row or ()) for row in info["input_top_logprobs"]] == [0] + [3] * (len(tail) - 1)
        assert len(info["input_token_ids_logprobs"]) == len(tail)
    assert ours["meta_info"]["kvcmas"]["corrected_tokens"] == 2 * (N - HEAD)
    again = ask(engine, plain, None, tokens=2, logprob_start_len=30, cache_salt="x", **more)["meta_info"]
    assert again["input_top_logprobs"] == other["meta_info"]["input_top_logprobs"]


def test_a_span_whose_logprobs_are_asked_for_is_computed(engine: Any) -> None:
    learn(engine, PLANNER, CRITIC)
    ask(engine, *PLANNER.several(pair(8)))
    prompt, hint = CRITIC.several(pair(8))
    start = len(CRITIC.head()) + N // 2
    info = ask(engine, prompt, hint, return_logprob=True, logprob_start_len=start, top_logprobs_num=2)["meta_info"]
    assert [token for _, token, *_ in info["input_token_logprobs"]] == prompt[start:]
    assert info["kvcmas"]["corrected_tokens"] == N // 2 - HEAD
    assert [span["reason"] for span in info["kvcmas"]["spans"]] == ["reused", "not_prefilled"]


def test_dense_runs_are_audited_and_the_audits_bound_the_next_kl(
    engine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = settle(engine)["audits"]
    learn(engine, PLANNER, CRITIC)
    totals = settle(engine)
    # Two documents at two places, from the third reading on: the first teaches, the second is the first held out.
    assert totals["audits"] - before >= 4 and totals["fallbacks"] == 0
    spans = pair(8)
    prompt, hint = CRITIC.several(spans)
    answer = greedy(engine, prompt, 8, cache_salt="dense")["output_ids"]
    truth = distributions(engine, prompt, answer, cache_salt="fresh")
    noise = kl(truth, distributions(engine, prompt, answer, cache_salt="dense"))
    ask(engine, *PLANNER.several(spans))
    report = ask(engine, prompt, hint)["meta_info"]["kvcmas"]
    measured = kl(truth, distributions(engine, prompt, answer, kv_hints=hint))
    with capsys.disabled():
        print(f"\n  KL predicted {report['predicted_kl']:.4f}, measured {measured:.4f}, noise {noise:.4f}")
    assert measured <= report["predicted_kl"] + 2 * noise
