"""The randomised range finder against exact singular values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcmas_sgl.radix_ext.finite import all_finite
from kvcmas_sgl.radix_ext.lowrank import compress, factor, row_space


def error(matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (matrix.double() - left.double() @ right.double()).flatten(-2).norm(dim=-1)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.integers(1, 20), st.integers(1, 20), st.integers(0, 5))
def test_full_rank_is_exact(seed: int, n: int, width: int, more: int) -> None:
    matrix = draw(seed, 2, n, width)
    left, right = factor(matrix, min(n, width) + more)
    assert left.shape == (2, n, min(n, width)) and right.shape == (2, min(n, width), width)
    assert (error(matrix, left, right) <= 1e-5 * matrix.double().flatten(-2).norm(dim=-1)).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 999), st.integers(1, 6))
def test_a_matrix_of_lower_rank_is_recovered(seed: int, rank: int) -> None:
    matrix = draw(seed, 3, 60, rank) @ draw(seed + 1, 3, rank, 40)
    left, right = factor(matrix, rank)
    assert (error(matrix, left, right) <= 1e-5 * matrix.double().flatten(-2).norm(dim=-1)).all()


@pytest.mark.parametrize("rank", [1, 4, 16, 31])
def test_close_to_the_best_approximation(rank: int) -> None:
    """Eckart-Young: no rank-r matrix is closer than the tail of the singular values."""
    u, v = torch.linalg.qr(draw(1, 200, 48)).Q, torch.linalg.qr(draw(2, 48, 48)).Q
    values = 1.0 / (1 + torch.arange(48))
    matrix = (u * values) @ v.mT
    best = values[rank:].double().square().sum().sqrt()
    got = error(matrix, *factor(matrix, rank))
    assert best * (1 - 1e-5) <= got <= best * 1.05


def test_left_columns_are_orthonormal_and_the_result_repeats() -> None:
    matrix = draw(3, 4, 100, 32)
    left, right = factor(matrix, 8)
    assert (left.mT @ left - torch.eye(8)).abs().max() < 1e-5
    torch.manual_seed(99)
    again = factor(matrix, 8)
    assert torch.equal(left, again[0]) and torch.equal(right, again[1])


def test_every_matrix_of_a_batch_is_factored_by_itself() -> None:
    matrix = draw(4, 2, 3, 50, 24)
    left, right = factor(matrix, 5)
    assert left.shape == (2, 3, 50, 5) and right.shape == (2, 3, 5, 24)
    alone = factor(matrix[1, 2], 5)
    assert torch.allclose(left[1, 2] @ right[1, 2], alone[0] @ alone[1], atol=1e-4)


def test_zeros_and_empty_matrices() -> None:
    left, right = factor(torch.zeros(2, 30, 12), 4)
    assert torch.equal(left @ right, torch.zeros(2, 30, 12))
    left, right = factor(torch.zeros(2, 0, 12), 4)
    assert left.shape == (2, 0, 0) and right.shape == (2, 0, 12)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="rank is 0"):
        factor(torch.zeros(3, 3), 0)
    with pytest.raises(ValueError, match="matrix is"):
        factor(torch.zeros(3), 1)
    with pytest.raises(ValueError, match="NaN"):
        factor(torch.full((3, 3), float("nan")), 1)


@pytest.mark.parametrize("rank", [1, 4, 16, 31, 48, 64])
def test_compress_is_as_good_as_the_best_approximation(rank: int) -> None:
    u, v = torch.linalg.qr(draw(1, 2, 200, 48)).Q, torch.linalg.qr(draw(2, 2, 48, 48)).Q
    values = 1.0 / (1 + torch.arange(48))
    matrix = (u * values) @ v.mT
    left, right = compress(matrix, rank)
    kept = min(rank, 48)
    assert left.shape == (2, 200, kept) and right.shape == (2, kept, 48)
    best = values[kept:].double().square().sum().sqrt()
    assert (error(matrix, left, right) <= best * 1.05 + 1e-6).all()
    assert (right @ right.mT - torch.eye(kept)).abs().max() < 1e-4


def test_the_row_space_of_a_sample_fits_the_rows_that_it_stands_for() -> None:
    """4,000 rows whose energy fades with the offset, of which every tenth of the far ones was seen."""
    matrix = draw(6, 4000, 48) * torch.linspace(1, 0.02, 48) @ torch.linalg.qr(draw(7, 48, 48)).Q
    matrix *= (1 / (1 + torch.arange(4000) / 50)).sqrt()[:, None]
    at = torch.cat([torch.arange(400), torch.arange(404, 4000, 10)])
    weight = torch.where(at < 400, 1.0, 10.0)
    right = row_space(matrix[at], 16, weight)
    values = torch.linalg.svdvals(matrix.double())
    best = values[16:].square().sum().sqrt()
    assert best * (1 - 1e-5) <= error(matrix, matrix @ right.mT, right) <= best * 1.05
    # A row that counts three times is three rows.
    few = draw(8, 30, 20)
    counts = torch.arange(30) % 3 + 1
    thrice = row_space(few.repeat_interleave(counts, 0), 5)
    assert torch.allclose(row_space(few, 5, counts.float()).abs(), thrice.abs(), atol=1e-3)


def test_the_row_space_has_no_more_directions_than_the_rows() -> None:
    right = row_space(draw(9, 2, 100, 3) @ draw(10, 2, 3, 40), 8)
    values = torch.linalg.svdvals(right)
    assert right.shape == (2, 8, 40) and (values <= 1 + 1e-5).all() and (values[:, 2] >= 1 - 1e-4).all()
    assert torch.equal(row_space(torch.zeros(2, 30, 12), 4), torch.zeros(2, 4, 12))
    with pytest.raises(ValueError, match="NaN"):
        row_space(torch.full((30, 12), 1e30), 4)


def test_compress_takes_fewer_rows_than_its_rank() -> None:
    matrix = draw(5, 3, 4, 48)
    assert (error(matrix, *compress(matrix, 8)) <= 1e-4 * matrix.double().flatten(-2).norm(dim=-1)).all()
    left, right = compress(torch.zeros(2, 30, 12), 4)
    assert torch.equal(left @ right, torch.zeros(2, 30, 12))
    with pytest.raises(ValueError, match="NaN"):
        compress(torch.full((2, 4, 8), float("nan")), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_value_among_many_is_found(dtype: torch.dtype, bad: float) -> None:
    values = draw(11, 7, 333).to(dtype)
    values[0, 0] = torch.finfo(dtype).max
    assert all_finite(values) and all_finite(values[:0])
    values[3, 100] = bad
    assert not all_finite(values)
