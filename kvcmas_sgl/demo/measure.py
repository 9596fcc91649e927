"""The measurement: every role reads every document on both servers, one request at a time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvcmas_sgl.demo.client import Answer, Client, PromptMaker, Scores, TokenPrompt, agent_report
from kvcmas_sgl.demo.roles import Document, Role
from kvcmas_sgl.wire import agent_hint

# Keeps the rotate-only arm's KV apart from the main arm's on the same server.
ROTATE_ONLY_SALT = "kvcmas-demo-rotate-only"
# Read by every role before the clock starts; short, so that nobody learns or shares anything from it.
WARM_UP_TEXT = "The quick brown fox jumps over the lazy dog."


@dataclass(frozen=True)
class Row:
    """One role reading one document. Times in seconds, KL in nats per answer token; None is not measured."""

    document: str
    role: str
    prompt_tokens: int
    span_tokens: int
    answer_tokens: int
    exact: int
    corrected: int
    computed: int
    source: str | None
    reason: str
    predicted_kl: float | None
    ttft_stock_s: float
    ttft_ours_s: float
    ttft_ratio: float
    kl: float | None
    agreement: float | None
    kl_rotate_only: float | None
    kl_noise: float | None
    answer: str


@dataclass(frozen=True)
class Settings:
    """`answer_tokens`: greedy tokens per answer. `top_k`: tokens that a KL is summed over one by one.

    `noise_every`: the noise is measured on one of so many rows.
    """

    answer_tokens: int = 12
    top_k: int = 128
    noise_every: int = 6


def measure(
    stock: Client,
    ours: Client,
    prompts: PromptMaker,
    documents: Sequence[Document],
    roles: Sequence[Role],
    settings: Settings,
) -> Iterator[Row]:
    """Run all requests and yield one row per document and role, in order; a document's rows come together."""
    warm_up(stock, ours, prompts, roles)
    for number, document in enumerate(documents):
        rows = []
        for place, role in enumerate(roles):
            # Shifted by one from document to document: each role goes first, and gets its noise measured, in turn.
            turn = number * (len(roles) + 1) + place
            rows.append(
                _measure_row(
                    stock,
                    ours,
                    prompts,
                    role,
                    document,
                    settings,
                    stock_first=turn % 2 == 0,
                    with_noise=turn % settings.noise_every == 0,
                )
            )
        yield from _with_rotate_only(ours, prompts, document, roles, rows)


def warm_up(stock: Client, ours: Client, prompts: PromptMaker, roles: Sequence[Role]) -> None:
    """Make every agent's own prefix resident in each of the three arms: all start with what a busy server has."""
    for role in roles:
        prompt = prompts.prompt(role, WARM_UP_TEXT)
        hint = agent_hint(role.name, [prompt.span])
        stock.answer(prompt.ids, 2)
        ours.answer(prompt.ids, 2, kv_hints=hint)
        ours.answer(prompt.ids, 2, **_rotate_only(role, prompt))


@dataclass(frozen=True)
class Measured:
    """A row, and what its further measurements compare with."""

    row: Row
    answer: tuple[int, ...]
    reference: Scores | None


def _measure_row(
    stock: Client,
    ours: Client,
    prompts: PromptMaker,
    role: Role,
    document: Document,
    settings: Settings,
    *,
    stock_first: bool,
    with_noise: bool,
) -> Measured:
    prompt = prompts.prompt(role, document.text)
    hint = {"kv_hints": agent_hint(role.name, [prompt.span])}

    def ask_stock() -> Answer:
        return stock.answer(prompt.ids, settings.answer_tokens)

    def ask_ours() -> Answer:
        # One token: how far its answer would be from stock's is measured along stock's.
        answer = ours.answer(prompt.ids, 1, **hint)
        ours.wait_until_learned()
        return answer

    if stock_first:
        dense, shared = ask_stock(), ask_ours()
    else:
        shared, dense = ask_ours(), ask_stock()
    report = agent_report(shared.meta)
    answer = dense.tokens
    # The reference is what stock SGLang says after its own dense prefill, whose KV its cache still holds.
    corrected = report["corrected_tokens"] > 0
    reference = stock.scores(prompt.ids, answer, settings.top_k) if corrected or with_noise else None
    kl = agreement = noise = None
    if reference is not None and corrected:
        scores = ours.scores(prompt.ids, answer, 1, reference.tokens, **hint)
        kl, agreement = mean_kl(reference, scores), top1_agreement(reference, scores)
    if reference is not None and with_noise:
        # The same prompt prefilled once more where no cache reaches: what two dense runs differ by.
        salt = f"{document.name}/{role.name}"
        noise = mean_kl(reference, stock.scores(prompt.ids, answer, 1, reference.tokens, cache_salt=salt))
    row = Row(
        document=document.name,
        role=role.name,
        prompt_tokens=len(prompt.ids),
        span_tokens=prompt.span[1] - prompt.span[0],
        answer_tokens=len(answer),
        exact=report["exact_tokens"],
        corrected=report["corrected_tokens"],
        computed=report["computed_tokens"],
        source=report["source"],
        reason=report["reason"],
        predicted_kl=report["predicted_kl"],
        ttft_stock_s=dense.ttft_s,
        ttft_ours_s=shared.ttft_s,
        ttft_ratio=dense.ttft_s / shared.ttft_s,
        kl=kl,
        agreement=agreement,
        kl_rotate_only=None,
        kl_noise=noise,
        answer=prompts.text(dense.tokens),
    )
    return Measured(row, answer, reference)


def _with_rotate_only(
    ours: Client, prompts: PromptMaker, document: Document, roles: Sequence[Role], rows: Sequence[Measured]
) -> list[Row]:
    """The rows of one document, with the KL of rotate-only reuse where ours corrected.

    Its chain is its own: the first role prefills the document densely under a salt that nothing else uses, and
    every later role moves what the one before it holds.
    """
    if not any(measured.row.corrected for measured in rows):
        return [measured.row for measured in rows]
    result = []
    for role, measured in zip(roles, rows, strict=True):
        prompt = prompts.prompt(role, document.text)
        row = measured.row
        if measured.reference is not None and row.corrected:
            asked = measured.reference.tokens
            rotated = ours.scores(prompt.ids, measured.answer, 1, asked, **_rotate_only(role, prompt))
            if agent_report(rotated.meta)["corrected_tokens"]:
                row = replace(row, kl_rotate_only=mean_kl(measured.reference, rotated))
        else:
            ours.answer(prompt.ids, 1, **_rotate_only(role, prompt))
        result.append(row)
    # The salt learns too; nothing of it may run while the next document is timed.
    ours.wait_until_learned()
    return result


def _rotate_only(role: Role, prompt: TokenPrompt) -> dict[str, Any]:
    hint = agent_hint(role.name, [prompt.span], policy="always", estimator="none")
    return {"kv_hints": hint, "cache_salt": ROTATE_ONLY_SALT}


def kl_divergence(reference: Mapping[int, float], other: Mapping[int, float]) -> float:
    """KL(reference || other) in nats, over the reference's tokens and one bucket for all the rest.

    Lumping the rest makes it a lower bound of the full KL (data-processing inequality), exact but for what happens
    inside of that rest.

    Args:
        reference: token -> log probability of its likeliest tokens.
        other: token -> log probability; holds at least the reference's tokens.
    """
    inside = sum(math.exp(logprob) * (logprob - other[token]) for token, logprob in reference.items())
    # Rounding can put the sum of many probabilities a little over 1.
    rest = max(1.0 - sum(math.exp(logprob) for logprob in reference.values()), 1e-9)
    other_rest = max(1.0 - sum(math.exp(other[token]) for token in reference), 1e-9)
    return inside + rest * math.log(rest / other_rest)


def mean_kl(reference: Scores, other: Scores) -> float:
    """Mean of `kl_divergence` over the answer's positions; `other` was asked for the reference's tokens."""
    pairs = zip(reference.top, other.asked, strict=True)
    return statistics.fmean(kl_divergence(dense, approximate) for dense, approximate in pairs)


def top1_agreement(reference: Scores, other: Scores) -> float:
    """Share of the answer's positions at which both name the same likeliest token."""
    pairs = zip(reference.top, other.top, strict=True)
    return statistics.fmean(_likeliest(dense) == _likeliest(approximate) for dense, approximate in pairs)


def _likeliest(logprobs: Mapping[int, float]) -> int:
    return max(logprobs, key=lambda token: logprobs[token])


def summarize(rows: Sequence[Row], long_span: int = 2000) -> dict[str, Any]:
    """The figures of `reports/demo.json`; a figure is None where no row can show it.

    `corrected_tokens_unseen` counts every corrected token of the timed requests: each role reads each document for
    the first time there.
    """
    corrected = [row for row in rows if row.corrected > 0]
    long_ratios = [row.ttft_ratio for row in corrected if row.span_tokens >= long_span]
    both = [row for row in corrected if row.kl_rotate_only is not None]
    noise = [row.kl_noise for row in rows if row.kl_noise is not None]
    kl_both = _mean([row.kl for row in both])
    kl_rotate_only = _mean([row.kl_rotate_only for row in both])
    return {
        "ttft_ratio_median_2000plus": statistics.median(long_ratios) if long_ratios else None,
        "ttft_rows_2000plus": len(long_ratios),
        "kl_ratio_to_rotate_only": kl_both / kl_rotate_only if kl_both is not None and kl_rotate_only else None,
        "kl_mean": _mean([row.kl for row in corrected]),
        "kl_rotate_only_mean": kl_rotate_only,
        "kl_noise": _mean(noise),
        "top1_agreement_mean": _mean([row.agreement for row in corrected]),
        "corrected_tokens_unseen": sum(row.corrected for row in corrected),
        "rows_corrected": len(corrected),
        "rows": len(rows),
        "per_role": {role: _role_summary(rows, role, _mean(noise)) for role in dict.fromkeys(r.role for r in rows)},
    }


def _role_summary(rows: Sequence[Row], role: str, noise: float | None) -> dict[str, Any]:
    both = [row for row in rows if row.role == role and row.corrected > 0 and row.kl_rotate_only is not None]
    kl = _mean([row.kl for row in both])
    rotate_only = _mean([row.kl_rotate_only for row in both])
    near = rotate_only is not None and noise is not None and rotate_only <= 3 * noise
    return {
        "rows_corrected": sum(row.role == role and row.corrected > 0 for row in rows),
        "kl": kl,
        "kl_rotate_only": rotate_only,
        "kl_ratio_to_rotate_only": kl / rotate_only if kl is not None and rotate_only else None,
        "note": "rotate-only is within 3x the noise: its ratio says little" if near else "",
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def rows_as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
