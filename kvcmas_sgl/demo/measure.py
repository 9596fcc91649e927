"""The measurement: a pipeline of agents works through documents, and both servers get the same prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvcmas_sgl.demo.client import Answer, Client, Scores, agent_report
from kvcmas_sgl.demo.divergence import mean_kl, top1_agreement
from kvcmas_sgl.demo.prompts import PassedOn, PromptMaker, TokenPrompt
from kvcmas_sgl.demo.roles import Document, Role
from kvcmas_sgl.demo.rows import Row, span_rows
from kvcmas_sgl.wire import agent_hint

# Keeps the rotate-only arm's KV apart from the main arm's on the same server.
ROTATE_ONLY_SALT = "kvcmas-demo-rotate-only"
# Read by every role before the clock starts; short, so that nobody learns or shares anything from it.
WARM_UP_TEXT = "The quick brown fox jumps over the lazy dog."


@dataclass(frozen=True)
class Settings:
    """`answer_tokens`: greedy tokens that KL is taken over. `pass_tokens`: tokens of an answer that others read.

    `top_k`: tokens that a KL is summed over one by one. `noise_every`: the noise is measured on one of so many rows.
    """

    answer_tokens: int = 12
    pass_tokens: int = 64
    top_k: int = 128
    noise_every: int = 6


@dataclass(frozen=True)
class Measured:
    """A row, and what its further measurements need.

    `answer` is stock's, which `reference` belongs to; None is not measured. `passed_on` is ours, empty from the last
    agent.
    """

    row: Row
    prompt: TokenPrompt
    answer: tuple[int, ...]
    reference: Scores | None
    passed_on: tuple[int, ...]


class Measurement:
    """All agents on all documents, one request at a time.

    The pipeline runs on our server: what an agent generates there is part of the next agents' prompts. Stock SGLang
    gets exactly these prompts, and generates only what is measured.
    """

    def __init__(
        self, stock: Client, ours: Client, prompts: PromptMaker, roles: Sequence[Role], settings: Settings
    ) -> None:
        self._stock = stock
        self._ours = ours
        self._prompts = prompts
        self._roles = roles
        self._settings = settings

    def run(self, documents: Sequence[Document]) -> Iterator[Row]:
        """Yield one row per document and role, in order; a document's rows come together."""
        self._warm_up()
        for number, document in enumerate(documents):
            answers: list[PassedOn] = []
            readings = []
            for place, role in enumerate(self._roles):
                # Shifted by one from document to document: each role goes first, and gets its noise measured, in turn.
                turn = number * (len(self._roles) + 1) + place
                prompt = self._prompts.prompt(role, document.text, answers)
                last = place == len(self._roles) - 1
                measured = self._reading(document, role, prompt, turn, pass_on=not last)
                answers.append(PassedOn(role.name, measured.passed_on))
                readings.append(measured)
            yield from self._with_rotate_only(readings)

    def _warm_up(self) -> None:
        """Make every agent's own prefix resident in each of the three arms: all start with what a busy server has."""
        for role in self._roles:
            prompt = self._prompts.prompt(role, WARM_UP_TEXT)
            self._stock.answer(prompt.ids, 2)
            self._ours.answer(prompt.ids, 2, **_hint(role.name, prompt))
            self._ours.answer(prompt.ids, 2, **_rotate_only(role.name, prompt))

    def _reading(self, document: Document, role: Role, prompt: TokenPrompt, turn: int, *, pass_on: bool) -> Measured:
        settings = self._settings
        hint = _hint(role.name, prompt)

        def ask_stock() -> Answer:
            return self._stock.answer(prompt.ids, settings.answer_tokens)

        def ask_ours() -> Answer:
            # One more than is passed on: the KV of an answer's last token is never computed. Where nothing is passed
            # on, one token: how far its answer would be from stock's is measured along stock's.
            length = settings.pass_tokens + 1 if pass_on else 1
            answer = self._ours.answer(prompt.ids, length, without=self._prompts.special_tokens, **hint)
            self._ours.wait_until_learned()
            return answer

        if turn % 2 == 0:
            dense, shared = ask_stock(), ask_ours()
        else:
            shared, dense = ask_ours(), ask_stock()
        with_noise = turn % settings.noise_every == 0
        report = agent_report(shared.meta)
        answer = dense.tokens
        passed_on = shared.tokens[: settings.pass_tokens] if pass_on else ()
        # The reference is what stock SGLang says after its own dense prefill, whose KV its cache still holds.
        corrected = report["corrected_tokens"] > 0
        reference = self._stock.scores(prompt.ids, answer, settings.top_k) if corrected or with_noise else None
        kl = agreement = noise = None
        if reference is not None and corrected:
            scores = self._ours.scores(prompt.ids, answer, 1, reference.tokens, **hint)
            kl, agreement = mean_kl(reference, scores), top1_agreement(reference, scores)
        if reference is not None and with_noise:
            # The same prompt prefilled once more where no cache reaches: what two dense runs differ by.
            salt = f"{document.name}/{role.name}"
            noise = mean_kl(reference, self._stock.scores(prompt.ids, answer, 1, reference.tokens, cache_salt=salt))
        row = Row(
            document=document.name,
            role=role.name,
            prompt_tokens=len(prompt.ids),
            shared_tokens=prompt.shared_tokens,
            marked_spans=len(prompt.spans),
            spans=span_rows(report),
            answer_tokens=len(answer),
            exact=report["exact_tokens"],
            corrected=report["corrected_tokens"],
            computed=report["computed_tokens"],
            ttft_stock_s=dense.ttft_s,
            ttft_ours_s=shared.ttft_s,
            ttft_ratio=dense.ttft_s / shared.ttft_s,
            kl=kl,
            agreement=agreement,
            kl_rotate_only=None,
            kl_noise=noise,
            answer=self._prompts.text(answer),
            passed_on=self._prompts.text(passed_on),
        )
        return Measured(row, prompt, answer, reference, passed_on)

    def _with_rotate_only(self, readings: Sequence[Measured]) -> list[Row]:
        """The rows of one document, with the KL of rotate-only reuse where ours corrected.

        Its chain is its own: under a salt that nothing else uses the first role prefills the document densely, every
        later role moves what the ones before it hold, and each role's answer is prefilled after its own prompt, as
        its decoding would have left it.
        """
        if not any(measured.row.corrected for measured in readings):
            return [measured.row for measured in readings]
        result = []
        for measured in readings:
            row, prompt, reference = measured.row, measured.prompt, measured.reference
            options = _rotate_only(row.role, prompt)
            if reference is not None and row.corrected:
                rotated = self._ours.scores(prompt.ids, measured.answer, 1, reference.tokens, **options)
                if agent_report(rotated.meta)["corrected_tokens"]:
                    row = replace(row, kl_rotate_only=mean_kl(reference, rotated))
            if measured.passed_on:
                after = continued(prompt, measured.passed_on)
                self._ours.prefill(after.ids, **_rotate_only(row.role, after))
            result.append(row)
        # The salt learns too; nothing of it may run while the next document is timed.
        self._ours.wait_until_learned()
        return result


def continued(prompt: TokenPrompt, answer: Sequence[int]) -> TokenPrompt:
    """A prompt and its answer, marked as one more span."""
    start = len(prompt.ids)
    return TokenPrompt((*prompt.ids, *answer), (*prompt.spans, (start, start + len(answer))))


def _hint(role: str, prompt: TokenPrompt) -> dict[str, Any]:
    return {"kv_hints": agent_hint(role, prompt.spans)}


def _rotate_only(role: str, prompt: TokenPrompt) -> dict[str, Any]:
    hint = agent_hint(role, prompt.spans, policy="always", estimator="none", head=0)
    return {"kv_hints": hint, "cache_salt": ROTATE_ONLY_SALT}
