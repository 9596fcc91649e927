"""Heavy hitters: keys along the sink's key, the most of them behind the head."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvcmas_sgl.radix_ext.heavy import EFFORTS, STRIDE, Effort, heavy_offsets, plain_name, score_steps
from kvcmas_sgl.radix_ext.kv_view import KVView
from kvcmas_sgl.triton_kernels import RotaryTable

LAYERS, HEADS, DIM, SLOTS = 16, 2, 8, 64
TABLE = RotaryTable.from_theta(10_000.0, DIM, 256)


def unrope(x: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Half-split RoPE undone in float64; x [n, HEADS, DIM], position [n]."""
    angle = position[:, None] * 10_000.0 ** (-np.arange(DIM // 2) / (DIM // 2))
    pair = (x[..., : DIM // 2] + 1j * x[..., DIM // 2 :]) * np.exp(-1j * angle)[:, None]
    return np.concatenate([pair.real, pair.imag], -1)


def test_scores_are_the_keys_mean_component_along_the_sinks_key() -> None:
    generator = torch.Generator().manual_seed(3)
    k = [torch.randn(SLOTS, HEADS, DIM, generator=generator) for _ in range(LAYERS)]
    slots, start, sink = torch.randperm(SLOTS, generator=generator)[:20], 9, 41
    scores = np.zeros(20, np.float32)
    steps = sum(1 for _ in score_steps(KVView(k, k, TABLE), slots, start, sink, scores))
    # An eighth at either end of 16 layers is left out.
    looked_at = range(2, 14, STRIDE)
    assert steps == len(looked_at)
    want = np.zeros(20)
    for layer in looked_at:
        keys = unrope(k[layer][slots].double().numpy(), start + np.arange(20))
        first = k[layer][sink].double().numpy()
        direction = first / np.linalg.norm(first, axis=-1, keepdims=True)
        want += np.einsum("nhd,hd->n", keys, direction) / HEADS / len(looked_at)
    assert np.abs(scores - want).max() < 1e-4


@given(st.sampled_from(EFFORTS), st.integers(0, 3000), st.integers(0, 40), st.integers(0, 100))
def test_the_highest_behind_the_head_are_chosen(effort: Effort, n: int, head: int, seed: int) -> None:
    scores = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    chosen = heavy_offsets(scores, head, effort)
    wanted = max(effort.fewest, min(effort.most, round(effort.share * n)))
    assert len(chosen) == max(0, min(wanted, n - head))
    assert list(chosen) == sorted(set(chosen)) and (chosen >= head).all()
    rest = np.setdiff1d(np.arange(head, n), chosen)
    if len(chosen) and len(rest):
        assert scores[chosen].min() >= scores[rest].max()


def test_a_name_tells_its_estimator() -> None:
    names = [effort.of("mean") for effort in EFFORTS]
    assert len(set(names)) == len(EFFORTS) and {plain_name(name) for name in names} == {"mean"}
