"""Rotary position embedding as an exact, invertible move.

Keys are cached after RoPE. Pair ``i`` of a key at position ``p`` is one complex number multiplied by
``cos[p, i] + i sin[p, i]`` (RoFormer, arXiv 2104.09864, section 3.4.2), so un-roping is a complex division and
moving a key from ``p`` to ``q`` is a multiplication by the quotient of two table rows.

The model's own table is used rather than angles of ours: an engine may keep it in bf16, whose rounded rows are
off the unit circle by up to 2^-8, and only a division by the very row that the model multiplied with undoes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# |cos^2 + sin^2 - 1| that rounding alone explains: two rounded factors give twice the unit roundoff, here doubled
# again for fp32's own arithmetic. YaRN's attention scale (1 + 0.1 ln s, squared) is above it from s = 1.05 on.
_ROTATION_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-6, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-7}


@dataclass(frozen=True)
class RotaryTable:
    """Rotation of every position.

    cos, sin: fp32 [max_positions, rotary_dim / 2]. ``is_neox``: pair ``i`` is (x[i], x[i + rotary_dim/2]) if true,
    (x[2i], x[2i+1]) if false. Channels from ``rotary_dim`` on are not rotated.
    """

    cos: Tensor
    sin: Tensor
    is_neox: bool
    rotary_dim: int

    def __post_init__(self) -> None:
        if self.rotary_dim <= 0 or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim is {self.rotary_dim}: it must be a positive even number")
        want = (self.cos.shape[0], self.rotary_dim // 2)
        for name, part in (("cos", self.cos), ("sin", self.sin)):
            if tuple(part.shape) != want or part.dtype != torch.float32:
                raise ValueError(f"{name} is {part.dtype} {list(part.shape)}: it must be fp32 {list(want)}")

    @property
    def max_positions(self) -> int:
        return self.cos.shape[0]

    @classmethod
    def from_theta(
        cls, theta: float, head_dim: int, max_positions: int, rotary_dim: int | None = None, is_neox: bool = True
    ) -> RotaryTable:
        """Unscaled RoPE: angle of pair ``i`` at position ``p`` is ``p * theta^(-2i / rotary_dim)``.

        Angles are formed in fp32, as models do, so that the rows equal theirs.
        """
        width = head_dim if rotary_dim is None else rotary_dim
        if width > head_dim:
            raise ValueError(f"rotary_dim is {width}: it must be at most head_dim, {head_dim}")
        inverse = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        angle = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse)
        return cls(angle.cos(), angle.sin(), is_neox, width)

    @classmethod
    def from_cos_sin_cache(cls, cache: Tensor, is_neox: bool) -> RotaryTable:
        """The table of an engine's rotary module: ``cache`` [max_positions, rotary_dim], cosines then sines.

        Raises ValueError if a row is not a rotation within the cache's own precision: a module with an attention
        scale (YaRN) would rescale keys at every move.
        """
        if cache.ndim != 2 or cache.shape[1] % 2 or cache.shape[1] == 0:
            raise ValueError(f"cos_sin_cache is {list(cache.shape)}: it must be [max_positions, even rotary_dim]")
        if cache.dtype not in _ROTATION_TOLERANCE:
            raise ValueError(f"cos_sin_cache is {cache.dtype}: it must be a floating-point tensor")
        cos, sin = (part.contiguous() for part in cache.double().chunk(2, dim=1))
        error = (cos.square() + sin.square() - 1).abs()
        worst = float(error.max()) if error.numel() else 0.0
        tolerance = _ROTATION_TOLERANCE[cache.dtype]
        if not worst <= tolerance:
            raise ValueError(
                f"cos_sin_cache has cos^2 + sin^2 = 1 +- {worst:.3g}: only pure rotations (within {tolerance:.3g}) "
                "can be moved, so rotary modules with an attention scale (YaRN) are not supported"
            )
        return cls(cos.float(), sin.float(), is_neox, cache.shape[1])

    def rows(self, positions: Tensor, inverse: bool = False) -> tuple[Tensor, Tensor]:
        """(cos, sin), fp32 [n, rotary_dim / 2], of int64 ``positions`` [n]; of the inverse move if ``inverse``."""
        at = positions.to(self.cos.device)
        cos, sin = self.cos.index_select(0, at), self.sin.index_select(0, at)
        if not inverse:
            return cos, sin
        norm = cos.square() + sin.square()
        return cos / norm, -sin / norm

    def shift_rows(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), fp32 [n, rotary_dim / 2], of the move from positions ``source`` to ``target``, int64 [n]."""
        cos_s, sin_s = (part.double() for part in self.rows(source))
        cos_t, sin_t = (part.double() for part in self.rows(target))
        norm = cos_s.square() + sin_s.square()
        cos = (cos_t * cos_s + sin_t * sin_s) / norm
        sin = (sin_t * cos_s - cos_t * sin_s) / norm
        return cos.float(), sin.float()


def pairs(x: Tensor, table: RotaryTable) -> tuple[Tensor, Tensor]:
    """Views of the real and the imaginary parts, [..., rotary_dim / 2] each, of the last dimension of ``x``."""
    half, width = table.rotary_dim // 2, table.rotary_dim
    if table.is_neox:
        return x[..., :half], x[..., half:width]
    return x[..., 0:width:2], x[..., 1:width:2]


def turn_(x: Tensor, cos: Tensor, sin: Tensor, table: RotaryTable) -> Tensor:
    """Rotate fp32 ``x`` [..., n, heads, head_dim] in place by rows ``cos``, ``sin`` [n, rotary_dim / 2]."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    real, imaginary = pairs(x, table)
    turned = real * sin
    real.mul_(cos).addcmul_(imaginary, sin, value=-1)
    imaginary.mul_(cos).add_(turned)
    return x


def rotate(x: Tensor, positions: Tensor, table: RotaryTable, inverse: bool = False) -> Tensor:
    """``x`` [..., n, heads, head_dim] roped at int64 ``positions`` [n], or un-roped if ``inverse``; fp32, a new tensor.

    Raises ValueError on shapes that do not fit and IndexError on positions outside the table.
    """
    if x.ndim < 3 or x.shape[-3] != positions.shape[0]:
        raise ValueError(f"x is {list(x.shape)}: it must be [..., {positions.shape[0]} positions, heads, head_dim]")
    if x.shape[-1] < table.rotary_dim:
        raise ValueError(f"head_dim is {x.shape[-1]}: it must be at least rotary_dim, {table.rotary_dim}")
    cos, sin = table.rows(positions, inverse)
    return turn_(x.to(torch.float32, copy=True), cos.to(x.device), sin.to(x.device), table)
