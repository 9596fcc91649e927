"""What is added to a source's KV: deltas in the canonical (pre-RoPE) frame.

The delta of an edge is ``dK = unrope(K_consumer) - unrope(K_source)``, ``dV = V_consumer - V_source``, one pair of
[n, D] matrices a layer with D = KV heads x head dim. Layer 0 depends on the token alone, so its delta is zero and
no delta is ever asked for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Delta(Protocol):
    """A correction that can be evaluated for any rows of a span."""

    @property
    def layers(self) -> int:
        """Number of layers, layer 0 included."""
        ...

    @property
    def width(self) -> int:
        """D, KV heads x head dim."""
        ...

    @property
    def extent(self) -> tuple[int, int] | None:
        """Span offsets [first, end) that it covers, or None if it covers every offset."""
        ...

    def rows(self, layer: int, t: Tensor, base_k: Tensor, base_v: Tensor) -> tuple[Tensor, Tensor]:
        """(dK, dV), fp32 [n, D], of ``layer`` >= 1 at span offsets ``t``, int64 [n].

        ``base_k`` (canonical) and ``base_v`` are the source's rows there, fp32 [n, D].
        """
        ...


@dataclass(frozen=True)
class ZeroDelta:
    """Rotate only: the source's KV is moved and nothing is added."""

    @property
    def layers(self) -> int:
        return 0

    @property
    def width(self) -> int:
        return 0

    @property
    def extent(self) -> tuple[int, int] | None:
        return None

    def rows(self, layer: int, t: Tensor, base_k: Tensor, base_v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(base_k), torch.zeros_like(base_v)


ZERO_DELTA = ZeroDelta()


@dataclass(frozen=True, eq=False)
class LowRankDelta:
    """A measured delta, factored: dK = left_k @ right_k, dV = left_v @ right_v, layer by layer.

    left_*: [L, n, r]; right_*: [L, r, D]; any floating dtype (products are formed in fp32). Row ``i`` belongs to span
    offset ``start + i``. What the tensors hold for layer 0 is ignored.
    """

    left_k: Tensor
    right_k: Tensor
    left_v: Tensor
    right_v: Tensor
    start: int = 0

    def __post_init__(self) -> None:
        for name, left, right in (("k", self.left_k, self.right_k), ("v", self.left_v, self.right_v)):
            fits = left.ndim == right.ndim == 3 and left.shape[0] == right.shape[0] and left.shape[2] == right.shape[1]
            if not fits:
                raise ValueError(
                    f"left_{name} is {list(left.shape)} and right_{name} {list(right.shape)}: "
                    "they must be [L, n, r] and [L, r, D]"
                )
        if self.left_k.shape[:2] != self.left_v.shape[:2] or self.right_k.shape[2] != self.right_v.shape[2]:
            raise ValueError("left_k, left_v (and right_k, right_v) must agree in layers, rows and width")

    @property
    def layers(self) -> int:
        return self.left_k.shape[0]

    @property
    def width(self) -> int:
        return self.right_k.shape[2]

    @property
    def extent(self) -> tuple[int, int] | None:
        return self.start, self.start + self.left_k.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.left_k, self.right_k, self.left_v, self.right_v))

    def rows(self, layer: int, t: Tensor, base_k: Tensor, base_v: Tensor) -> tuple[Tensor, Tensor]:
        at = t - self.start if self.start else t
        return _product(self.left_k, self.right_k, layer, at), _product(self.left_v, self.right_v, layer, at)


def _product(left: Tensor, right: Tensor, layer: int, at: Tensor) -> Tensor:
    return left[layer].index_select(0, at).float() @ right[layer].float()


@dataclass(frozen=True, eq=False)
class AffineDelta:
    """A predicted delta: for each layer a low-rank affine map of the source's own KV, fading along the span.

    With g_tau(t) = 1 / (1 + t / tau), x = [base_k, base_v] in R^2D and P = project, cut into one [2D, r] block (and one
    shift in R^r) for each of the token decays,

        h(t) = sum_tau g_tau(t) (x @ P_tau + shift_tau)                         over token_decays
        [dK, dV](t) = h(t) @ weight + sum_tau g_tau(t) bias_tau                 over mean_decays.

    project: fp32 [L, 2D, J r]; shift: fp32 [L, J r]; weight: fp32 [L, r, 2D]; bias: fp32 [L, I, 2D], with J token and I
    mean decays. An infinite tau does not fade. What the tensors hold for layer 0 is ignored.
    """

    project: Tensor
    shift: Tensor
    weight: Tensor
    bias: Tensor
    token_decays: tuple[float, ...]
    mean_decays: tuple[float, ...]

    def __post_init__(self) -> None:
        layers, wide, columns = self.project.shape
        rank = self.weight.shape[1]
        fits = (
            columns == rank * len(self.token_decays)
            and tuple(self.shift.shape) == (layers, columns)
            and tuple(self.weight.shape) == (layers, rank, wide)
            and tuple(self.bias.shape) == (layers, len(self.mean_decays), wide)
        )
        if not fits:
            raise ValueError(
                f"project is {list(self.project.shape)}, shift {list(self.shift.shape)}, weight "
                f"{list(self.weight.shape)} and bias {list(self.bias.shape)}: they must be [L, 2D, J r], [L, J r], "
                f"[L, r, 2D] and [L, I, 2D] with J = {len(self.token_decays)} and I = {len(self.mean_decays)}"
            )

    @property
    def layers(self) -> int:
        return self.project.shape[0]

    @property
    def width(self) -> int:
        return self.project.shape[1] // 2

    @property
    def rank(self) -> int:
        return self.weight.shape[1]

    @property
    def extent(self) -> tuple[int, int] | None:
        return None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.project, self.shift, self.weight, self.bias))

    def rows(self, layer: int, t: Tensor, base_k: Tensor, base_v: Tensor) -> tuple[Tensor, Tensor]:
        features = token_features(base_k, base_v, self.project[layer], self.shift[layer])
        fade = fading(t, self.token_decays)
        h = (features.unflatten(1, (len(self.token_decays), self.rank)) * fade[:, :, None]).sum(1)
        both = torch.addmm(fading(t, self.mean_decays) @ self.bias[layer], h, self.weight[layer])
        return both[:, : self.width], both[:, self.width :]


def token_features(base_k: Tensor, base_v: Tensor, project: Tensor, shift: Tensor) -> Tensor:
    """[base_k, base_v] @ project + shift, fp32 [n, m], of one layer's rows [n, D]; ``project`` is [2D, m]."""
    width = base_k.shape[1]
    return torch.addmm(shift, base_k, project[:width]).addmm_(base_v, project[width:])


def fading(t: Tensor, decays: tuple[float, ...]) -> Tensor:
    """g_tau(t) = 1 / (1 + t / tau), fp32 [n, |decays|], of span offsets ``t`` [n]."""
    taus = torch.tensor(decays, dtype=torch.float32, device=t.device)
    return 1 / (1 + t.to(torch.float32)[:, None] / taus)
