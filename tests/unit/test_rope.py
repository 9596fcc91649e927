"""Rotary moves against complex multiplication in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcmas_sgl.triton_kernels import RotaryTable, rotate

MAX_POSITIONS = 4096

shapes = st.fixed_dictionaries(
    {
        "n": st.integers(1, 9),
        "heads": st.integers(1, 3),
        "half": st.integers(1, 8),
        "tail": st.sampled_from([0, 2, 6]),
        "is_neox": st.booleans(),
        "seed": st.integers(0, 2**16),
        "theta": st.sampled_from([100.0, 10_000.0, 500_000.0]),
    }
)


def drawn(case: dict) -> tuple[torch.Tensor, torch.Tensor, RotaryTable]:
    generator = torch.Generator().manual_seed(case["seed"])
    head_dim = 2 * case["half"] + case["tail"]
    table = RotaryTable.from_theta(
        case["theta"], head_dim, MAX_POSITIONS, rotary_dim=2 * case["half"], is_neox=case["is_neox"]
    )
    x = torch.randn(case["n"], case["heads"], head_dim, generator=generator)
    return x, torch.randint(0, MAX_POSITIONS, (case["n"],), generator=generator), table


def turned_by_complex_numbers(x: torch.Tensor, angle: np.ndarray, is_neox: bool) -> np.ndarray:
    """``x`` [n, heads, dim] with each pair multiplied by exp(i angle[n, pair]), all in float64."""
    out = x.numpy().astype(np.float64)
    half = angle.shape[1]
    first = slice(0, half) if is_neox else slice(0, 2 * half, 2)
    second = slice(half, 2 * half) if is_neox else slice(1, 2 * half, 2)
    pair = (out[..., first] + 1j * out[..., second]) * np.exp(1j * angle)[:, None, :]
    out[..., first], out[..., second] = pair.real, pair.imag
    return out


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_rotation_is_a_complex_multiplication(case: dict) -> None:
    x, positions, table = drawn(case)
    frequency = case["theta"] ** (-np.arange(case["half"]) / case["half"])
    angle = positions.numpy()[:, None] * frequency[None, :]
    want = turned_by_complex_numbers(x, angle, case["is_neox"])
    # The table's angles are fp32 products of a position and a frequency, each rounded: up to 3 x 2^-24 of the angle.
    tolerance = (3 * MAX_POSITIONS + 8) * 2.0**-24 * (1 + x.abs().max().item()) * math.sqrt(2)
    assert np.abs(rotate(x, positions, table).numpy() - want).max() <= tolerance


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_there_and_back_is_the_identity(case: dict) -> None:
    x, positions, table = drawn(case)
    back = rotate(rotate(x, positions, table), positions, table, inverse=True)
    # Two turns of two products and one sum each, the inverse row rounded twice more: below 16 roundings of |pair|.
    assert (back - x).abs().max() <= 16 * 2.0**-24 * math.sqrt(2) * x.abs().max()


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(0, 500))
def test_moves_compose(case: dict, shift: int) -> None:
    """shift_rows(p, q) is un-rope at p followed by rope at q."""
    x, positions, table = drawn(case)
    positions = positions.clamp_max(MAX_POSITIONS - 501)
    cos, sin = table.shift_rows(positions, positions + shift)
    angle = np.arctan2(sin.numpy().astype(np.float64), cos.numpy().astype(np.float64))
    want = turned_by_complex_numbers(x, angle, case["is_neox"])
    got = rotate(rotate(x, positions, table, inverse=True), positions + shift, table).numpy()
    assert np.abs(got - want).max() <= 24 * 2.0**-24 * math.sqrt(2) * (1 + x.abs().max().item())


def test_channels_beyond_rotary_dim_stay_bit_exact() -> None:
    table = RotaryTable.from_theta(10_000.0, 16, 64, rotary_dim=6)
    x = torch.randn(5, 2, 16)
    assert torch.equal(rotate(x, torch.arange(5) + 20, table)[..., 6:], x[..., 6:])


def test_input_is_not_written_to_and_leading_dimensions_are_kept() -> None:
    table = RotaryTable.from_theta(10_000.0, 8, 64)
    x = torch.randn(3, 5, 2, 8)
    before = x.clone()
    out = rotate(x, torch.arange(5) + 9, table)
    assert torch.equal(x, before)
    for layer in range(3):
        assert torch.equal(out[layer], rotate(x[layer], torch.arange(5) + 9, table))


@pytest.mark.parametrize("is_neox", [True, False])
def test_the_engine_table_gives_the_same_rows(is_neox: bool) -> None:
    made = RotaryTable.from_theta(10_000.0, 16, 128, is_neox=is_neox)
    read = RotaryTable.from_cos_sin_cache(torch.cat([made.cos, made.sin], 1), is_neox)
    assert torch.equal(read.cos, made.cos) and torch.equal(read.sin, made.sin)
    assert (read.rotary_dim, read.is_neox, read.max_positions) == (16, is_neox, 128)


def test_a_table_rounded_to_bf16_is_undone_by_its_own_rows() -> None:
    """Keys that a model roped with a bf16 table come back although those rows are off the unit circle."""
    exact = RotaryTable.from_theta(10_000.0, 64, 2048)
    cache = torch.cat([exact.cos, exact.sin], 1).bfloat16()
    table = RotaryTable.from_cos_sin_cache(cache, True)
    norm = table.cos.square() + table.sin.square()
    assert (norm - 1).abs().max() > 1e-3
    x, at = torch.randn(200, 2, 64), torch.arange(200) * 10
    roped = turned_by_rows(x, cache[at].double())
    back = rotate(roped.float(), at, table, inverse=True)
    assert (back - x).abs().max() <= 16 * 2.0**-24 * math.sqrt(2) * x.abs().max()


def turned_by_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    cos, sin = rows.chunk(2, dim=1)
    pair = torch.view_as_complex(torch.stack(x.double().chunk(2, dim=-1), -1)) * torch.complex(cos, sin)[:, None]
    return torch.cat([pair.real, pair.imag], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_attention_scale_is_refused(dtype: torch.dtype) -> None:
    made = RotaryTable.from_theta(10_000.0, 16, 128)
    yarn_4x = 0.1 * math.log(4) + 1
    with pytest.raises(ValueError, match="YaRN"):
        RotaryTable.from_cos_sin_cache((torch.cat([made.cos, made.sin], 1) * yarn_4x).to(dtype), True)


def test_a_broken_table_is_refused() -> None:
    cache = torch.cat([torch.ones(8, 4), torch.zeros(8, 4)], 1)
    cache[3, 2] = float("nan")
    with pytest.raises(ValueError, match="cos_sin_cache"):
        RotaryTable.from_cos_sin_cache(cache, True)
    with pytest.raises(ValueError, match="cos_sin_cache"):
        RotaryTable.from_cos_sin_cache(torch.ones(8, 5), True)
    with pytest.raises(ValueError, match="floating"):
        RotaryTable.from_cos_sin_cache(torch.ones(8, 4, dtype=torch.int64), True)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="rotary_dim is 32"):
        RotaryTable.from_theta(10_000.0, 16, 64, rotary_dim=32)
    with pytest.raises(ValueError, match="rotary_dim is 5"):
        RotaryTable(torch.ones(4, 2), torch.zeros(4, 2), True, 5)
    with pytest.raises(ValueError, match="sin is"):
        RotaryTable(torch.ones(4, 2), torch.zeros(4, 3), True, 4)
    table = RotaryTable.from_theta(10_000.0, 16, 64)
    with pytest.raises(ValueError, match="x is"):
        rotate(torch.zeros(4, 2, 16), torch.arange(5), table)
    with pytest.raises(ValueError, match="head_dim is 8"):
        rotate(torch.zeros(4, 2, 8), torch.arange(4), table)
    with pytest.raises(IndexError):
        rotate(torch.zeros(1, 2, 16), torch.tensor([64]), table)
