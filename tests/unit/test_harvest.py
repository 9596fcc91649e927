"""Sampling and error measures of the harvest, against the sums they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvcmas_sgl.radix_ext.decision import Base
from kvcmas_sgl.radix_ext.delta_store import Rows
from kvcmas_sgl.radix_ext.estimators import make_estimator
from kvcmas_sgl.radix_ext.gate import Gate
from kvcmas_sgl.radix_ext.harvest import (
    SAMPLED_TOKENS,
    ErrorMeter,
    Harvester,
    HarvestJob,
    energies,
    sample_offsets,
)
from kvcmas_sgl.radix_ext.kv_view import KVView
from kvcmas_sgl.radix_ext.predictor import Predictor
from kvcmas_sgl.radix_ext.sources import Agent, Content, Source
from kvcmas_sgl.radix_ext.statistics import Statistics
from kvcmas_sgl.triton_kernels import RotaryTable, rotate


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


LAYERS, HEADS, DIM, TOKENS = 8, 2, 16, 700


def learned(rank: int, delta: torch.Tensor, backend: str, energy: float = 1.0) -> tuple[Rows, torch.Tensor]:
    """The own delta of a harvest, and the delta that the pool holds: canonical, fp64 [2, L, n, D]."""
    generator = torch.Generator().manual_seed(5)
    table = RotaryTable.from_theta(1e4, DIM, 2048)
    k, v = ([torch.randn(2 * TOKENS, HEADS, DIM, generator=generator) for _ in range(LAYERS)] for _ in range(2))
    slots = torch.randperm(2 * TOKENS, generator=generator)
    at = {"source": slots[:TOKENS], "consumer": slots[TOKENS:]}
    starts = {"source": 20, "consumer": 333}
    for layer in range(LAYERS):
        keys = rotate(k[layer][at["source"]], torch.arange(20, 20 + TOKENS), table, inverse=True)
        keys += delta[0, layer].view_as(keys)
        k[layer][at["consumer"]] = rotate(keys, torch.arange(333, 333 + TOKENS), table)
        v[layer][at["consumer"]] = v[layer][at["source"]] + delta[1, layer].view(TOKENS, HEADS, DIM)
    content = Content("scope", np.arange(TOKENS))
    bases = {}
    for number, (name, start) in enumerate(starts.items()):
        agent = Agent(name, "prefix", "scope")
        bases[name] = Base(Source(content, agent, "context", number, start), agent, 0)
    found: list[Rows] = []
    view, none = (
        KVView(k, v, table, backend),
        make_estimator("none", layers=LAYERS, kv_heads=HEADS, head_dim=DIM, rank=4),
    )
    harvester = Harvester(
        view,
        Predictor({"none": none}, view, lambda source: at[source.agent.role]),
        Gate(),
        Statistics(),
        own_rank=rank,
        own_energy=energy,
        audited="none",
        slots_of=lambda source: at[source.agent.role],
        attach=lambda source, name, rows: found.append(rows),
    )
    for _ in harvester.steps(HarvestJob(bases["consumer"], (bases["source"],), TOKENS, 16, "own")):
        pass
    true = torch.stack([torch.stack(part)[:, at["consumer"]].double() for part in (k, v)]).flatten(3)
    return found[0], true


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_an_own_delta_is_what_the_dense_run_made_of_the_source(backend: str) -> None:
    generator = torch.Generator().manual_seed(6)
    left = torch.randn(2, LAYERS, TOKENS, 5, generator=generator)
    delta = left @ torch.randn(2, LAYERS, 5, HEADS * DIM, generator=generator)
    rows, _ = learned(5, delta, backend)
    for part, mine in enumerate((rows.left_k @ rows.factors.right_k, rows.left_v @ rows.factors.right_v)):
        assert (mine - delta[part]).abs().max() <= 1e-3 * delta.abs().max()
    assert rows.factors.error < 1e-3


def test_the_error_of_an_own_delta_is_that_of_all_rows() -> None:
    """Measured on the sample; here in fp64 on every row, by the gate's formula."""
    delta = torch.randn(2, LAYERS, TOKENS, HEADS * DIM, generator=torch.Generator().manual_seed(7))
    delta /= (1 + torch.arange(TOKENS) / 20.0)[:, None]
    rows, true = learned(8, delta, "cpu")
    made = torch.stack([rows.left_k @ rows.factors.right_k, rows.left_v @ rows.factors.right_v]).double()
    ratio = (made - delta)[:, 1:].square().sum((2, 3)) / true[:, 1:].square().sum((2, 3))
    assert rows.factors.error == pytest.approx(float(ratio.mean().sqrt()), rel=0.05)


@pytest.mark.parametrize(("energy", "cap"), [(0.5, 32), (0.9, 32), (0.99, 32), (0.9, 8)])
def test_an_own_delta_gets_the_smallest_rank_that_keeps_its_energy(energy: float, cap: int) -> None:
    """Singular values are known: direction i holds 0.8 ** i of the energy, in every layer, in K as in V."""
    generator = torch.Generator().manual_seed(8)
    shape = (2, LAYERS, TOKENS, HEADS * DIM)
    left = torch.linalg.qr(torch.randn(shape, generator=generator)).Q
    turn = torch.linalg.qr(torch.randn(2, LAYERS, HEADS * DIM, HEADS * DIM, generator=generator)).Q
    share = 0.8 ** torch.arange(HEADS * DIM)
    share /= share.sum()
    rows, true = learned(cap, 5 * left * share.sqrt() @ turn, "cpu", energy)
    needed = int((share.cumsum(0) < energy).sum()) + 1
    rank = rows.factors.right_k.shape[1]
    assert rank == min(cap, -(-needed // 8) * 8) and rows.left_v.shape[2] == rank
    made = torch.stack([rows.left_k @ rows.factors.right_k, rows.left_v @ rows.factors.right_v]).double()
    off = 25 * share[rank:].sum() / true[:, 1:].square().sum((2, 3))
    assert rows.factors.error == pytest.approx(float(off.mean().sqrt()), rel=0.1)
    # The sample stands for all rows.
    wrong = (made - (5 * left * share.sqrt() @ turn))[:, 1:].square().sum((2, 3)) / 25
    assert float(wrong.mean()) == pytest.approx(float(share[rank:].sum()), rel=0.15)
