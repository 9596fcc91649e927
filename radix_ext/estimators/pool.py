"""A pool of past spans per edge, each with its base and its delta: what matching estimators predict from.

Re-implemented from descriptions of KVComm (arXiv 2510.12872) and KVCMAS (arXiv 2609.34060): a pool holds up to so many
spans; when it is full, the least used among the oldest few goes. KVCMAS keeps bases and deltas as rank-r factors, layer
by layer and K and V apart; KVComm keeps them whole (rank None).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from kvcmas_sgl.radix_ext.lowrank import factor
from kvcmas_sgl.radix_ext.state_file import State, StateError, count
from kvcmas_sgl.triton_kernels import Delta, LowRankDelta
from torch import Tensor

from .base import Edge, LastingEstimator, Observation, SpanBase, check_observation

_PARTS = ("base_k", "base_v", "delta_k", "delta_v")

EVICTION_WINDOW = 5
"""The oldest anchors among which the least used one is evicted."""


@dataclass(frozen=True)
class Matrix:
    """[L, n, D] as left @ right, fp32 [L, n, r] and [L, r, D], or whole where ``right`` is None."""

    left: Tensor
    right: Tensor | None

    @classmethod
    def keep(cls, whole: Tensor, rank: int | None) -> Matrix:
        if rank is None:
            return cls(whole.clone(), None)
        return cls(*factor(whole, rank))

    @property
    def layers(self) -> int:
        return self.left.shape[0]

    @property
    def length(self) -> int:
        return self.left.shape[1]

    @property
    def width(self) -> int:
        return (self.left if self.right is None else self.right).shape[2]

    @property
    def nbytes(self) -> int:
        return self.left.nbytes + (0 if self.right is None else self.right.nbytes)

    def whole(self, tokens: int) -> Tensor:
        """fp32 [L, tokens, D] of the first ``tokens``."""
        left = self.left[:, :tokens]
        return left if self.right is None else left @ self.right


@dataclass(eq=False)
class Anchor:
    """One past span: base and delta, K (canonical) and V; ``uses`` counts the predictions that it took part in."""

    base_k: Matrix
    base_v: Matrix
    delta_k: Matrix
    delta_v: Matrix
    uses: int = 0

    @property
    def length(self) -> int:
        return self.base_k.length

    @property
    def parts(self) -> tuple[Matrix, Matrix, Matrix, Matrix]:
        return self.base_k, self.base_v, self.delta_k, self.delta_v

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class WeightedDelta:
    """Sum over anchors of weight times delta, row by row of one span; rows are evaluated when asked for.

    weights_k, weights_v: fp32 [A, n], zero where an anchor has no row. Left factors are scaled by their weights and
    concatenated along the rank, so a layer's K (or V) is one product [n, A r] x [A r, D].
    """

    deltas_k: tuple[Matrix, ...]
    deltas_v: tuple[Matrix, ...]
    weights_k: Tensor
    weights_v: Tensor

    @property
    def layers(self) -> int:
        return self.deltas_k[0].layers

    @property
    def width(self) -> int:
        return self.deltas_k[0].width

    @property
    def extent(self) -> tuple[int, int] | None:
        longest = max(delta.length for delta in self.deltas_k)
        return 0, min(longest, self.weights_k.shape[1])

    def rows(self, layer: int, t: Tensor, base_k: Tensor, base_v: Tensor) -> tuple[Tensor, Tensor]:
        return _weighted(self.deltas_k, self.weights_k, layer, t), _weighted(self.deltas_v, self.weights_v, layer, t)

    def factored(self) -> LowRankDelta:
        """The same as one low-rank delta, which covers all rows of the weights: the form that the kernels take."""
        k, v = _joined(self.deltas_k, self.weights_k), _joined(self.deltas_v, self.weights_v)
        return LowRankDelta(*k, *v)


def _joined(deltas: Sequence[Matrix], weights: Tensor) -> tuple[Tensor, Tensor]:
    """Left [L, n, R] and right [L, R, D] factors of the weighted sum; R is the sum of the ranks, or D if less."""
    layers, width = deltas[0].layers, deltas[0].width
    rows = weights.shape[1]
    rights = [delta.right for delta in deltas if delta.right is not None]
    if len(rights) < len(deltas) or sum(right.shape[1] for right in rights) >= width:
        left = weights.new_zeros(layers, rows, width)
        for delta, weight in zip(deltas, weights, strict=True):
            part = delta.whole(rows)
            left[:, : part.shape[1]] += part * weight[: part.shape[1], None]
        return left, torch.eye(width, device=left.device).expand(layers, width, width)
    lefts = []
    for delta, weight in zip(deltas, weights, strict=True):
        part = delta.left[:, :rows]
        lefts.append(torch.nn.functional.pad(part * weight[: part.shape[1], None], (0, 0, 0, rows - part.shape[1])))
    return torch.cat(lefts, 2), torch.cat(rights, 1)


def _weighted(deltas: Sequence[Matrix], weights: Tensor, layer: int, t: Tensor) -> Tensor:
    lefts, rights = [], []
    for delta, weight in zip(deltas, weights, strict=True):
        # Rows beyond an anchor's end have weight zero; any row of it may stand for them.
        at = t.clamp_max(delta.length - 1)
        lefts.append(delta.left[layer].index_select(0, at) * weight.index_select(0, t)[:, None])
        rights.append(delta.right)
    if any(right is None for right in rights):
        return torch.stack(lefts).sum(0)
    return torch.cat(lefts, 1) @ torch.cat([right[layer] for right in rights if right is not None])


class PoolEstimator(LastingEstimator):
    """Keeps the last spans of each edge; subclasses weigh them.

    Parameters
    ----------
    rank
        Of bases and deltas, or None to keep them whole.
    pool
        Anchors an edge, at most.
    """

    whole_spans = True

    def __init__(self, layers: int, kv_heads: int, head_dim: int, rank: int | None, pool: int) -> None:
        if pool < 1:
            raise ValueError(f"pool is {pool}: it must be at least 1")
        self._layers, self._width = layers, kv_heads * head_dim
        self._rank, self._pool = rank, pool
        self._anchors: dict[Edge, list[Anchor]] = {}
        self._pending: dict[Edge, list[Observation]] = {}
        self._spans: dict[Edge, int] = {}

    @abstractmethod
    def weigh(self, anchors: Sequence[Anchor], base: SpanBase | None) -> tuple[Tensor, Tensor] | None:
        """(weights of K, weights of V), fp32 [A, n], for a span's rows; None: this span is to be computed."""

    def observe(self, edge: Edge, obs: Observation) -> None:
        check_observation(obs, self._layers, self._width)
        if obs.first_layer == 0:
            # What is left of a span that was given up.
            self._pending.pop(edge, None)
        self._pending.setdefault(edge, []).append(obs)

    def finish(self, edge: Edge) -> None:
        chunks = sorted(self._pending.pop(edge, []), key=lambda obs: obs.first_layer)
        covered = [obs.first_layer + i for obs in chunks for i in range(obs.base_k.shape[0])]
        if covered != list(range(self._layers)):
            raise ValueError(f"edge {edge} has observations of layers {covered}: a span needs each once")
        # Only the leading rows without a gap can stand for "the same index" of another span.
        t = chunks[0].t
        rows = int((t == torch.arange(t.numel(), device=t.device)).long().cumprod(0).sum())
        if rows:
            base_k, base_v, delta_k, delta_v = (
                Matrix.keep(torch.cat([obs.tensors[i][:, :rows] for obs in chunks]), self._rank) for i in range(4)
            )
            held = self._anchors.setdefault(edge, [])
            if len(held) == self._pool:
                uses = [anchor.uses for anchor in held[:EVICTION_WINDOW]]
                del held[uses.index(min(uses))]
            held.append(Anchor(base_k, base_v, delta_k, delta_v))
        self._spans[edge] = self.spans_seen(edge) + 1

    def predict(self, edge: Edge, base: SpanBase | None = None) -> Delta | None:
        if self.needs_base and base is None:
            raise ValueError(f"the {self.name} estimator matches whole spans: predict needs the span's base")
        held = self._anchors.get(edge)
        weights = self.weigh(held, base) if held else None
        if held is None or weights is None:
            return None
        used = ((weights[0] > 0) | (weights[1] > 0)).any(1)
        for anchor, was_used in zip(held, used.tolist(), strict=True):
            anchor.uses += was_used
        return WeightedDelta(tuple(a.delta_k for a in held), tuple(a.delta_v for a in held), *weights)

    def anchors(self, edge: Edge) -> tuple[Anchor, ...]:
        """The pool of ``edge``, oldest first."""
        return tuple(self._anchors.get(edge, ()))

    def spans_seen(self, edge: Edge) -> int:
        return self._spans.get(edge, 0)

    @property
    def state_bytes(self) -> int:
        return sum(self.edge_bytes(edge) for edge in self.edges())

    def edge_bytes(self, edge: Edge) -> int:
        waiting = sum(part.nbytes for obs in self._pending.get(edge, ()) for part in obs.tensors)
        return waiting + sum(anchor.nbytes for anchor in self._anchors.get(edge, ()))

    def edges(self) -> Iterable[Edge]:
        return tuple(self._spans.keys() | self._pending.keys())

    def drop(self, edge: Edge) -> None:
        for held in (self._anchors, self._pending, self._spans):
            held.pop(edge, None)

    def drop_namespace(self, namespace: str) -> None:
        for edge in self.edges():
            if edge.namespace == namespace:
                self.drop(edge)

    @property
    def definition(self) -> str:
        return f"{self.name}: rank {self._rank}, pool {self._pool}"

    def state(self) -> State:
        tensors: dict[str, Tensor] = {}
        rows = []
        for i, edge in enumerate(self._spans):
            anchors = self._anchors.get(edge, ())
            for j, anchor in enumerate(anchors):
                for name, part in zip(_PARTS, anchor.parts, strict=True):
                    tensors[f"{i}.{j}.{name}.left"] = part.left
                    if part.right is not None:
                        tensors[f"{i}.{j}.{name}.right"] = part.right
            rows.append([edge.as_list(), self._spans[edge], [[anchor.length, anchor.uses] for anchor in anchors]])
        return State(tensors, rows)

    def load(self, state: State) -> None:
        anchors: dict[Edge, list[Anchor]] = {}
        spans: dict[Edge, int] = {}
        for i, (names, seen, held) in enumerate(state.data):
            edge = Edge.from_list(names)
            if len(held) > self._pool:
                raise StateError(f"edge {i} has {len(held)} anchors: at most {self._pool} fit")
            spans[edge] = count(seen)
            anchors[edge] = []
            for j, (length, uses) in enumerate(held):
                base_k, base_v, delta_k, delta_v = (
                    self._matrix(state, f"{i}.{j}.{name}", count(length, 1)) for name in _PARTS
                )
                anchors[edge].append(Anchor(base_k, base_v, delta_k, delta_v, count(uses)))
        self._anchors, self._spans, self._pending = anchors, spans, {}

    def _matrix(self, state: State, name: str, length: int) -> Matrix:
        if self._rank is None:
            return Matrix(state.tensor(f"{name}.left", self._layers, length, self._width), None)
        rank = min(self._rank, length, self._width)
        left = state.tensor(f"{name}.left", self._layers, length, rank)
        return Matrix(left, state.tensor(f"{name}.right", self._layers, rank, self._width))


def covered_rows(anchors: Sequence[Anchor], tokens: int) -> Tensor:
    """bool [A, tokens]: which anchors have a row at each index."""
    device = anchors[0].base_k.left.device
    lengths = torch.tensor([anchor.length for anchor in anchors], device=device)
    return torch.arange(tokens, device=device)[None, :] < lengths[:, None]


def pool_bytes(
    *, layers: int, width: int, tokens: int, anchors: int, agents: int, rank: int | None, item_bytes: int
) -> int:
    """Bytes of a pool whose ``anchors`` of ``tokens`` each hold one base and a delta for each of ``agents``.

    Per matrix S D values whole, or (S + D) r as factors; two matrices (K, V) a layer. KVComm's state, 20 anchors of
    4,096 tokens and 4 agents on Llama-3.1-8B in bf16, is 50 GiB.
    """
    values = tokens * width if rank is None else (tokens + width) * min(rank, tokens, width)
    return 2 * layers * (1 + agents) * anchors * values * item_bytes
