"""The interface of estimators: learn an edge's delta from dense runs, predict it for content not yet read.

An edge is (source role, consumer role). Every dense run of a consumer on a span whose source is resident gives the
true delta; ``observe`` takes it in chunks of layers, ``finish`` closes the span, ``predict`` gives a Delta that the
correction op applies to any other span of the edge.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from kvcmas_sgl.radix_ext.finite import all_finite
from kvcmas_sgl.radix_ext.state_file import State, StateError
from kvcmas_sgl.triton_kernels import Delta
from torch import Tensor


@dataclass(frozen=True)
class Edge:
    """Who reads from whom. ``namespace`` isolates tenants: nothing learned in one is used in another."""

    namespace: str
    source: str
    consumer: str

    def as_list(self) -> list[str]:
        return [self.namespace, self.source, self.consumer]

    @classmethod
    def from_list(cls, names: object) -> Edge:
        """The edge of ``as_list``; raises `StateError` on anything else."""
        if not isinstance(names, list) or len(names) != 3 or not all(isinstance(name, str) for name in names):
            raise StateError(f"{names!r} stands where an edge must be")
        return cls(*names)


@dataclass(frozen=True)
class Observation:
    """The true delta of n tokens of one span in l consecutive layers.

    first_layer: of the chunk. t: int64 [n], offsets inside the span, ascending, the same in every chunk of a span.
    base_k (canonical), base_v, delta_k (canonical), delta_v: fp32 [l, n, D].
    """

    first_layer: int
    t: Tensor
    base_k: Tensor
    base_v: Tensor
    delta_k: Tensor
    delta_v: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.base_k, self.base_v, self.delta_k, self.delta_v


@dataclass(frozen=True)
class SpanBase:
    """The source's KV of a whole span: k (canonical), v, fp32 [L, n, D], row ``i`` at span offset ``i``."""

    k: Tensor
    v: Tensor

    @property
    def length(self) -> int:
        return self.k.shape[1]


def check_observation(obs: Observation, layers: int, width: int) -> None:
    """Raise ValueError if ``obs`` does not fit a model of ``layers`` layers with D = ``width``, or is not finite."""
    want = (obs.base_k.shape[0], obs.t.numel(), width)
    for name, part in zip(("base_k", "base_v", "delta_k", "delta_v"), obs.tensors, strict=True):
        if tuple(part.shape) != want or part.dtype != torch.float32:
            raise ValueError(f"{name} is {part.dtype} {list(part.shape)}: it must be fp32 {list(want)}")
        if not all_finite(part):
            raise ValueError(f"{name} holds NaN or Inf: only finite observations can be learned from")
    if obs.t.dtype != torch.int64 or obs.t.ndim != 1 or obs.t.numel() == 0:
        raise ValueError(f"t is {obs.t.dtype} {list(obs.t.shape)}: it must be int64 [n] with n >= 1")
    if int(obs.t[0]) < 0 or (obs.t[1:] <= obs.t[:-1]).any():
        raise ValueError("t must hold ascending offsets from 0 on, each once")
    if obs.first_layer < 0 or obs.first_layer + want[0] > layers:
        raise ValueError(f"first_layer is {obs.first_layer} for {want[0]} layers: the layers must be in [0, {layers})")


class Estimator(ABC):
    """Learns one delta per edge. Not thread-safe: one thread (the scheduler's) owns it."""

    name: str
    needs_base: bool = False
    """Whether ``predict`` has to see the base of the span that is to be corrected, all layers of it."""
    whole_spans: bool = False
    """Whether it learns from every row of a span rather than from a sample."""

    @abstractmethod
    def observe(self, edge: Edge, obs: Observation) -> None:
        """Take in one chunk. Raises ValueError on a chunk that does not fit or is not finite; state is untouched."""

    @abstractmethod
    def finish(self, edge: Edge) -> None:
        """End of a span: count it and make ``predict`` ready."""

    @abstractmethod
    def predict(self, edge: Edge, base: SpanBase | None = None) -> Delta | None:
        """What was learned, or None if the edge is unknown. The result does not change with later observations.

        ``base``: of the span, for estimators that match whole spans; the result then fits this span only. Raises
        ValueError if the estimator needs it and it is None.
        """

    @abstractmethod
    def spans_seen(self, edge: Edge) -> int:
        """Number of finished spans."""

    @property
    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes of every tensor held, over all edges."""

    @abstractmethod
    def edge_bytes(self, edge: Edge) -> int:
        """Bytes that belong to ``edge`` alone: dropping it frees at least these."""

    @abstractmethod
    def edges(self) -> Iterable[Edge]:
        """Edges with state."""

    @abstractmethod
    def drop(self, edge: Edge) -> None:
        """Forget an edge; unknown edges are ignored."""

    @abstractmethod
    def drop_namespace(self, namespace: str) -> None:
        """Forget every edge of ``namespace`` and what they share."""


class LastingEstimator(Estimator):
    """An estimator whose state can outlive the process: what a server can be told to use."""

    @property
    @abstractmethod
    def definition(self) -> str:
        """What the numbers of its state mean: equal definitions can read each other's."""

    @abstractmethod
    def state(self) -> State:
        """All that was learned. Later observations leave its tensors alone."""

    @abstractmethod
    def load(self, state: State) -> None:
        """Be what ``state`` says, in place of what was learned. Raises `StateError`, and then nothing changes."""
