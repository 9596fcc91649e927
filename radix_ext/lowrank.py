"""Low-rank factors of measured deltas: a randomised range finder.

Halko, Martinsson, Tropp, "Finding structure with randomness", SIAM Review 53(2), 2011, algorithms 4.4 and 5.1: sketch
the range with a Gaussian test matrix, sharpen it with power iterations, orthonormalise, project.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SEED = 20_110_601
_OVERSAMPLE = 8
_POWER_ITERATIONS = 2
_SAMPLED_ROWS = 1024


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
    if not torch.isfinite(matrix).all():
        raise ValueError("matrix holds NaN or Inf: only finite deltas can be factored")
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
    """Like `factor`, for tall matrices: ``right`` has orthonormal rows, and only [D, r] matrices are orthonormalised.

    A delta has thousands of rows and a few hundred columns, and a QR of its tall side costs ten times the products
    around it. Subspace iteration on ``matrix.mT @ matrix`` squares the singular values once per step, so directions
    below about 3e-4 of the largest are lost in fp32: far under what a delta of low rank keeps. Of more than
    `_SAMPLED_ROWS` rows, the subspace is that of evenly spaced ones; all rows are projected on it.
    """
    width = matrix.shape[-1]
    rank = min(rank, width)
    if rank == width:
        eye = torch.eye(width, device=matrix.device).expand(*matrix.shape[:-2], width, width)
        return _finite(matrix.clone()), eye.contiguous()
    sketch = min(rank + _OVERSAMPLE, width)
    basis = _test_matrix(width, sketch, matrix.device)
    rows = matrix[..., :: max(1, matrix.shape[-2] // _SAMPLED_ROWS), :]
    gram = _finite(rows.mT @ rows)
    for _ in range(1 + _POWER_ITERATIONS):
        basis = torch.linalg.qr(gram @ basis).Q
    # Whatever is not finite in a row is in its projection too, which is much smaller to look at.
    left = _finite(matrix @ basis)
    rotation = torch.linalg.eigh((left.mT @ left).double()).eigenvectors[..., -rank:].flip(-1).float()
    return left @ rotation, (basis @ rotation).mT


def _finite(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        raise ValueError("matrix holds NaN or Inf: only finite deltas can be factored")
    return x


def _test_matrix(width: int, sketch: int, device: torch.device) -> Tensor:
    return torch.randn(width, sketch, generator=torch.Generator().manual_seed(_SEED)).to(device)
