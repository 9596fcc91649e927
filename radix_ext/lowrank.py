"""Low-rank factors of measured deltas: randomised range finders.

Halko, Martinsson, Tropp, "Finding structure with randomness", SIAM Review 53(2), 2011, algorithms 4.4 and 5.1: sketch
the range with a Gaussian test matrix, sharpen it with power iterations, orthonormalise, project.
"""

from __future__ import annotations

import torch
from kvcmas_sgl.radix_ext.finite import all_finite
from torch import Tensor

_SEED = 20_110_601
_OVERSAMPLE = 8
_POWER_ITERATIONS = 2
_GRAM_ITERATIONS = 2
RANK_STEP = 8
"""Ranks of own deltas are multiples: the kernels work on so many columns at once."""
_SHIFT = 1e-13


def factor(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(left [..., n, r], right [..., r, D]), fp32, with left @ right close to ``matrix``, fp32 [..., n, D].

    r = min(rank, n, D). At r = min(n, D) the product equals the matrix up to fp32 rounding. ``left`` has orthonormal
    columns. The same matrix always gives the same factors. Raises ValueError if ``rank`` < 1 or the matrix holds NaN
    or Inf.
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}: it must be at least 1")
    if matrix.ndim < 2:
        raise ValueError(f"matrix is {list(matrix.shape)}: it must be [..., n, D]")
    matrix = matrix.float()
    _finite(matrix)
    n, width = matrix.shape[-2:]
    full = min(n, width)
    rank = min(rank, full)
    if full == 0:
        return matrix.new_zeros(*matrix.shape[:-1], 0), matrix.new_zeros(*matrix.shape[:-2], 0, width)
    if rank == n:
        # The identity is an exact basis of all rows, and an orthonormal one.
        eye = torch.eye(n, device=matrix.device).expand(*matrix.shape[:-2], n, n)
        return eye.contiguous(), matrix.clone()
    sketch = min(rank + _OVERSAMPLE, full)
    basis = torch.linalg.qr(matrix @ _test_matrix(width, sketch, matrix.device)).Q
    for _ in range(_POWER_ITERATIONS):
        # QR between the two products: without it the small singular directions drown in fp32 rounding.
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.mT @ basis).Q).Q
    right = basis.mT @ matrix
    if sketch == rank:
        return basis, right
    # Best rank-r part of the sketch, from the small Gram matrix of its rows.
    rotation = torch.linalg.eigh((right @ right.mT).double()).eigenvectors[..., -rank:].flip(-1).float()
    return basis @ rotation, rotation.mT @ right


def compress(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Like `factor`, for tall matrices: ``right`` is their `row_space`, so that only its [D, r] is orthonormalised.

    A delta has thousands of rows and a few hundred columns, and a QR of its tall side costs ten times the products
    around it.
    """
    right = row_space(matrix, rank)
    return _finite(matrix @ right.mT), right


def row_space(rows: Tensor, rank: int, weight: Tensor | None = None, *, ordered: bool = False) -> Tensor:
    """Right factors, fp32 [..., min(rank, D), D], of ``rows``, fp32 [..., n, D]; ``weight`` [n]: how much a row counts.

    The first hold most. At full rank they are the identity, which loses nothing to rounding, unless they are to be
    ``ordered``. They are orthonormal as far as ``rows`` reaches that many directions; the others are shorter or zero.
    Subspace iteration on the Gram matrix, with shifted Cholesky QR (Fukaya et al., SIAM J. Sci. Comput. 42(1), 2020) in
    fp64, since a QR costs as much as all the products. Rounding takes directions below about 1e-3 of the largest.
    Raises ValueError on NaN or Inf, and where squares overflow.
    """
    width = rows.shape[-1]
    rank = min(rank, width)
    if rank == width and not ordered:
        _finite(rows)
        return torch.eye(width, device=rows.device).expand(*rows.shape[:-2], width, width).contiguous()
    weighted = rows if weight is None else rows * weight[:, None]
    gram = _finite(weighted.mT @ rows)
    if rank == width:
        return torch.linalg.eigh(gram.double()).eigenvectors.flip(-1).mT.float()
    basis = _test_matrix(width, min(rank + _OVERSAMPLE, width), rows.device)
    for _ in range(_GRAM_ITERATIONS):
        basis = _orthonormal(gram @ basis)
    rotation = torch.linalg.eigh((basis.mT @ (gram @ basis)).double()).eigenvectors[..., -rank:].flip(-1)
    return (basis @ rotation.float()).mT


def energy_rank(kept: Tensor, energy: float) -> int:
    """The smallest rank whose directions hold a share ``energy``, as a multiple of `RANK_STEP`, or all there are.

    kept: [..., r], the share of its matrix's energy that each direction holds; matrices count alike.
    """
    most = kept.shape[-1]
    enough = kept.reshape(-1, most).mean(0).cumsum(0) >= energy
    if energy >= 1 or not bool(enough.any()):
        return most
    needed = int(enough.long().argmax()) + 1
    return min(most, -(-needed // RANK_STEP) * RANK_STEP)


def _orthonormal(x: Tensor) -> Tensor:
    wide = x.double()
    gram = wide.mT @ wide
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=x.device)
    # What is below the shift is rounding: it comes out short, where it would have made the factorisation fail.
    shift = _SHIFT * gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(torch.finfo(gram.dtype).tiny / _SHIFT)
    lower = torch.linalg.cholesky(gram + shift[..., None, None] * eye)
    # The inverse is small, and a product with it several times faster than solving for every column.
    return (wide @ torch.linalg.solve_triangular(lower, eye, upper=False).mT).float()


def _finite(x: Tensor) -> Tensor:
    if not all_finite(x):
        raise ValueError("matrix holds NaN or Inf: only finite deltas can be factored")
    return x


def _test_matrix(width: int, sketch: int, device: torch.device) -> Tensor:
    return torch.randn(width, sketch, generator=torch.Generator().manual_seed(_SEED)).to(device)
