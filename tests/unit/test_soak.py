"""What a soak calls wrong, and how its faults come about."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kvcmas_sgl.triton_kernels import LowRankDelta

from benchmarks.soak.faults import Fault, Injector
from benchmarks.soak.probes import Answer, parting
from benchmarks.soak.report import verdict
from benchmarks.soak.watch import Sample, growth

MIB = 1024 * 1024


def quiet(at_s: float, rss: float, handles: int = 50) -> Sample:
    return Sample(at_s, round(rss * MIB), handles, 0, 0, True)


def test_growth_is_that_of_the_second_half() -> None:
    climbing = [quiet(10 * i, 100 + 10 * i) for i in range(20)]
    flat = [quiet(200 + 10 * i, 300 + (i % 2)) for i in range(21)]
    assert growth([*climbing, *flat]) == pytest.approx(0.0, abs=0.001)
    # From 200 to 290 MiB over the second half, whose mean is 245.
    assert growth(climbing) == pytest.approx(90 / 245, rel=1e-6)
    assert growth(climbing[:10]) is None and growth([]) is None


def test_answers_part_where_stock_was_undecided_or_elsewhere() -> None:
    expected = Answer((5, 6, 7), ({5: -0.1, 1: -3.0}, {6: -0.7, 9: -0.8, 4: -1.2}, {7: -0.2, 4: -2.0}), 0)
    assert parting(expected, (5, 6, 7)) is None
    assert parting(expected, (5, 9, 1)) == (1, pytest.approx(0.1))
    assert parting(expected, (5, 4, 1)) == (1, pytest.approx(0.5))
    assert parting(expected, (5, 8, 7)) == (1, math.inf)


def figures(**changed: Any) -> dict[str, Any]:
    load = {"sent": {"plain": 3}, "failed": [], "equal": 2, "parted": [0.1], "corrected": 900, "agent_tokens": 2000}
    seen = {"alone_equal": 8, "alone_differ": [], "stock_busy_equal": 3, "stock_busy_parted": [], "problems": [],
            "rounds": 30, "flushes": 7}  # fmt: skip
    samples = [vars(quiet(30 * i, 800, 60 + i % 3)) for i in range(30)]
    totals = {"faults": {"plan": 4}, "fallbacks": 3, "state_failures": 0}
    plan = {"near_tie": 0.5, "fault_rate": 0.01, "rss_growth": 0.02}
    whole = {"load": load | {"total": 3}, "seen": seen, "samples": samples, "totals": totals, "plan": plan}
    for name, value in changed.items():
        part, field = name.split("__")
        whole[part] = {**whole[part], field: value}  # type: ignore[dict-item]
    return whole


def test_nothing_is_wrong_with_a_good_run() -> None:
    run = figures()
    assert verdict(run) == []
    assert run["summary"]["plain_under_load_parted_at_a_near_tie"] == 1


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"load__failed": ["agent: HTTP 500"]}, "a request failed: agent: HTTP 500"),
        ({"load__parted": [0.1, 0.9]}, "0.90 nats below"),
        ({"load__corrected": 0}, "no token was corrected"),
        ({"seen__alone_differ": ["round 3, cold"]}, "asked alone was answered otherwise: round 3"),
        ({"seen__problems": ["round 2: 5 KV slots are held"]}, "5 KV slots are held"),
        ({"totals__fallbacks": 5}, "5 failures were counted, but only 4 injected"),
        ({"totals__faults": {}, "totals__fallbacks": 0}, "no fault was injected"),
        ({"totals__state_failures": 2}, "could not be saved 2 times"),
    ],
)
def test_what_is_wrong_is_said(changed: dict[str, Any], words: str) -> None:
    (sentence,) = verdict(figures(**changed))
    assert words in sentence


def test_memory_and_handles_that_only_grow_are_wrong() -> None:
    run = figures()
    run["samples"] = [vars(quiet(30 * i, 800 + 4 * i, 60 + i)) for i in range(30)]
    memory, handles = verdict(run)
    assert "resident memory grew by 6" in memory and "file handles" in handles


def test_an_injector_fails_a_share_of_the_calls_and_counts_them() -> None:
    injector = Injector(0.25, seed=3)
    function = injector.breaks("here", lambda x: 2 * x)
    failed = 0
    for x in range(400):
        try:
            assert function(x) == 2 * x
        except Fault:
            failed += 1
    assert failed == injector.injected["here"] and 60 < failed < 140
    assert Injector(0.0).breaks("never", lambda: 1)() == 1


def test_poison_is_in_a_copy() -> None:
    delta = LowRankDelta(torch.zeros(2, 4, 1), torch.zeros(2, 1, 8), torch.zeros(2, 4, 1), torch.zeros(2, 1, 8))
    spoilt = Injector(1.0).poisons("nan", lambda: delta)()
    assert spoilt.left_v[1].isnan().all() and not delta.left_v.isnan().any()
    assert Injector(1.0).poisons("nan", lambda: None)() is None
