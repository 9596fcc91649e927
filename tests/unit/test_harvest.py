"""Sampling and error measures of the harvest, against the sums they stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvcmas_sgl.radix_ext.harvest import SAMPLED_TOKENS, ErrorMeter, energies, sample_offsets


@given(st.integers(1, 20_000))
def test_a_sample_stands_for_the_whole_span(length: int) -> None:
    t, weight = sample_offsets(length)
    assert t.numel() == min(length, SAMPLED_TOKENS) and int(t[0]) == 0 and int(t[-1]) < length
    assert (t.diff() > 0).all()
    assert float(weight.sum()) == pytest.approx(length, rel=1e-4)


def test_a_weighted_sample_estimates_a_fading_energy() -> None:
    length = 4000
    energy = 1.0 / (1.0 + torch.arange(length) / 100.0)
    t, weight = sample_offsets(length)
    assert float(weight @ energy[t]) == pytest.approx(float(energy.sum()), rel=0.01)


def test_the_meter_is_the_gates_formula() -> None:
    generator = torch.Generator().manual_seed(3)
    k, v, dk, dv = (torch.randn(4, 30, 6, generator=generator) for _ in range(4))
    expected = 0.0
    for layer in range(4):
        for x, off in ((k, dk), (v, dv)):
            expected += float(off[layer].double().square().sum() / x[layer].double().square().sum()) / 2 / 4
    true, off = energies(torch.stack([k, v])), energies(torch.stack([dk, dv]))
    meter = ErrorMeter(torch.ones(30))
    meter.add(true[:, :1], off[:, :1])
    meter.add(true[:, 1:], off[:, 1:])
    assert meter.squared_error == pytest.approx(expected, rel=1e-5)


def test_a_row_counts_by_its_weight_and_a_computed_one_has_no_error() -> None:
    true, off = torch.tensor([4.0, 2.0, 1.0]).expand(2, 1, 3), torch.tensor([1.0, 5.0, 0.5]).expand(2, 1, 3)
    meter = ErrorMeter(torch.tensor([1.0, 1.0, 6.0]), torch.tensor([False, True, False]))
    meter.add(true, off)
    assert meter.squared_error == pytest.approx((1.0 + 6 * 0.5) / (4.0 + 2.0 + 6 * 1.0))
