"""Audits: which tokens are computed again, and what two distributions differ by."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvcmas_sgl.radix_ext.audit import audit_rows, mean_kl
from kvcmas_sgl.radix_ext.estimators import Edge
from kvcmas_sgl.radix_ext.gate import MAX_PAIRS, Gate
from kvcmas_sgl.radix_ext.heavy import EFFORTS
from kvcmas_sgl.radix_ext.lessons import ENOUGH_AUDITS, audits_wanted


def test_glue_question_and_answer_are_computed_and_spans_are_not() -> None:
    spans = [(10, 20), (25, 40), (40, 50)]
    assert audit_rows(spans, 20, 60, 63) == [(20, 25), (50, 60), (60, 61), (61, 62), (62, 63)]
    assert audit_rows(spans, 50, 60, 60) == [(50, 60)]
    # A stretch that ends inside its span: the rest of the span keeps its KV.
    assert audit_rows(spans, 18, 60, 61) == [(20, 25), (50, 60), (60, 61)]
    # A prompt that ends with a span has no position of its own to compare.
    assert audit_rows([(10, 60)], 60, 60, 61) == [(60, 61)]


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(0, 5))
def test_rows_ascend_and_leave_no_gap_but_the_spans(lengths: list[int], answer: int) -> None:
    spans, at = [], 3
    for number, length in enumerate(lengths):
        at += number % 3
        spans.append((at, at + length))
        at += length
    prompt = at + 4
    rows = audit_rows(spans, 3, prompt, prompt + answer)
    covered = [i for start, stop in rows for i in range(start, stop)]
    inside = {i for start, stop in spans for i in range(start, stop)}
    assert covered == [i for i in range(3, prompt + answer) if i not in inside]


def test_the_kl_is_that_of_its_definition() -> None:
    truth, other = (
        torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.25, 0.25]]),
        torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.25, 0.25]]),
    )
    expected = (0.7 * math.log(0.7 / 0.6) + 0.2 * math.log(0.2 / 0.3)) / 2
    assert mean_kl(truth.log() + 3, other.log() - 1) == pytest.approx(expected, rel=1e-4)


def test_ways_are_audited_up_to_the_first_that_fits_the_budget() -> None:
    gate, on, tokens, budget = Gate(), Edge("s", "a", "b"), 100, 0.02
    wanted = audits_wanted(gate, "affine", lambda: budget)
    plain, heavy, heavier, heaviest = EFFORTS

    def audits(thorough: bool = False) -> list[bool]:
        return [wanted(on, effort, tokens, thorough) for effort in EFFORTS]

    def read(**kl: float) -> None:
        for name, value in kl.items():
            effort = {"plain": plain, "heavy": heavy, "heavier": heavier, "heaviest": heaviest}[name]
            gate.record(on, effort.of("affine"), squared_error=0.001, tokens=tokens, kl=value)

    # Nothing is known, then two readings that only the second way makes small enough.
    assert audits() == [True, True, True, True]
    for _ in range(2):
        read(plain=0.05, heavy=0.002, heavier=0.001, heaviest=0.001)
    # About four times 0.002 nats are expected of the second way: inside half of the budget.
    assert audits() == [True, True, False, False]
    for _ in range(ENOUGH_AUDITS - 2):
        read(plain=0.05)
    assert audits() == [False, True, False, False] and audits(thorough=True) == [True, True, False, False]
    # The newest readings are easy: the cheapest way fits, and no other is of interest.
    for _ in range(MAX_PAIRS):
        read(plain=0.001)
    assert audits() == [False] * 4 and audits(thorough=True) == [True, False, False, False]
