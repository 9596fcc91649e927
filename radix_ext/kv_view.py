"""The KV pool as the correction sees it: buffers by layer, and rows in the canonical (pre-RoPE) frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from kvcmas_sgl.radix_ext.finite import all_finite
from kvcmas_sgl.triton_kernels import RotaryTable, Segment, canonical_rows, left_factors, plan, run
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SampledRows:
    """Copies of some rows of one sequence: K after RoPE and V, pool dtype ``[L, n, H, d]``; positions int64 [n]."""

    k: Tensor
    v: Tensor
    positions: Tensor

    @property
    def finite(self) -> bool:
        return all_finite(self.k) and all_finite(self.v)


@dataclass(frozen=True, eq=False)
class KVView:
    """Buffers ``[slots, H, d]`` per layer (D = H * d), and the model's own rotary table.

    ``backend``: which backend of the correction op works on them.
    """

    k_buffers: Sequence[Tensor]
    v_buffers: Sequence[Tensor]
    table: RotaryTable
    backend: str = "auto"

    @property
    def layers(self) -> int:
        return len(self.k_buffers)

    @property
    def kv_heads(self) -> int:
        return self.k_buffers[0].shape[1]

    @property
    def head_dim(self) -> int:
        return self.k_buffers[0].shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.k_buffers[0].dtype

    def sample(self, slots: Tensor, start: int, t: Tensor) -> SampledRows:
        """Copy rows ``t`` (int64 [n]) of a span whose slots are ``slots`` and whose first position is ``start``."""
        picked = slots.index_select(0, t)
        return SampledRows(
            k=torch.stack([buffer.index_select(0, picked) for buffer in self.k_buffers]),
            v=torch.stack([buffer.index_select(0, picked) for buffer in self.v_buffers]),
            positions=t + start,
        )

    def canonical(self, rows: SampledRows, layers: slice) -> Tensor:
        """Canonical K, then V, fp32 ``[2, l, n, D]``, of some layers of ``rows``."""
        n = rows.positions.shape[0]
        every = torch.arange(n, device=rows.positions.device)
        return canonical_rows(
            rows.k[layers].unbind(), rows.v[layers].unbind(), every, rows.positions, self.table, self.backend
        )

    def left_factors(
        self, layers: slice, consumer: tuple[Tensor, int], source: tuple[Tensor, int], right: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Left factors of K's and V's delta, pool dtype ``[l, n, r]``, to the right factors ``right`` ``[l, r, D]``.

        ``consumer`` and ``source``: slots (int64 [n]) of consecutive positions, and the first of these.
        """
        places = [
            (slots, torch.arange(start, start + slots.shape[0], device=slots.device))
            for slots, start in (consumer, source)
        ]
        buffers = self.k_buffers[layers], self.v_buffers[layers]
        return left_factors(*buffers, places[0], places[1], right, self.table, self.backend)

    def correct(self, segments: Sequence[Segment]) -> None:
        """Move and correct ``segments`` within the pool, all layers of all of them in one batch.

        Raises CorrectionError if what was written holds NaN or Inf.
        """
        made = plan(segments, self.table, head_dim=self.head_dim, kv_heads=self.kv_heads, backend=self.backend)
        run(made, self.k_buffers, self.v_buffers)

    def copy_rows(self, source: Tensor, target: Tensor) -> None:
        """Copy whole rows of every layer between slots (int64 [n] each, disjoint)."""
        for buffer in (*self.k_buffers, *self.v_buffers):
            buffer.index_copy_(0, target, buffer.index_select(0, source))
