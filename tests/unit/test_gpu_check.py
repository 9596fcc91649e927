"""What the GPU check says: without a GPU, and in its tables."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import OpTime, main, table
from benchmarks.gpu_serving import Served, serving_table


def test_without_a_gpu_it_says_so_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("No GPU was found") and told.err.count("\n") == 1


def test_ratios_are_to_the_copy_and_to_the_bytes() -> None:
    rows = [
        OpTime("a", "moved", "triton", 10, 3.0, 2.0, 1.0),
        OpTime("a", "moved", "flashinfer", 10, math.nan, 2.0, 1.0, "FlashInfer is away."),
    ]
    _, first, second = table(rows).splitlines()
    assert first.split() == ["a", "moved", "triton", "3.000", "1.50", "3.00"]
    assert second.endswith("FlashInfer is away.")


def test_served_spans_show_how_many_times_faster() -> None:
    rows = [
        Served("triton", 4096, 0.4, 0.02, 0.04, 4096),
        Served("flashinfer", 4096, None, None, None, note="it died\nwith a log"),
    ]
    _, first, second = serving_table(rows).splitlines()
    assert first.split() == ["triton", "4096", "0.400", "0.020", "0.040", "10.0"]
    assert second.endswith("it died")


def test_batches_of_the_check_hold_every_kind() -> None:
    shape = gpu_check.Shape("tiny", 2, 2, 16, 10_000.0)
    maker = gpu_check.Maker(shape, torch.device("cpu"), torch.bfloat16)
    made = maker.plan([(3, "moved"), (4, "measured"), (5, "predicted")], 24)
    assert [type(group.delta).__name__ for group in made.groups] == ["NoneType", "LowRankDelta", "AffineDelta"]
    slots = torch.cat([x for group in made.groups for x in (group.source, group.target)])
    assert sorted(slots.tolist()) == list(range(24))
