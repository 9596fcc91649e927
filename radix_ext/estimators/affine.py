"""The default estimator: ridge regression from the source's own KV to the delta, per edge and layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from kvcmas_sgl.triton_kernels import AffineDelta, Delta
from kvcmas_sgl.triton_kernels.delta import features
from torch import Tensor

from .base import Edge, Estimator, Observation, check_observation

DECAYS: tuple[float, ...] = (32.0,)
RIDGE = 0.03


@dataclass
class _Basis:
    """Shared by a namespace: standardisation and PCA folded into z = x @ project + shift. [L, 2D, m], [L, m]."""

    project: Tensor
    shift: Tensor
    fitted: set[int] = field(default_factory=set)


@dataclass
class _Statistics:
    """Of an edge: gram [L, F, F] and cross [L, F, 2D], sums over tokens; the solved delta; finished spans."""

    gram: Tensor
    cross: Tensor
    delta: AffineDelta | None = None
    spans: int = 0


class AffineEstimator(Estimator):
    name = "affine"

    def __init__(self, layers: int, kv_heads: int, head_dim: int, rank: int) -> None:
        self._layers, self._width = layers, kv_heads * head_dim
        self._m = min(rank, 2 * self._width)
        self._features = (1 + len(DECAYS)) * (self._m + 1)
        self._bases: dict[str, _Basis] = {}
        self._edges: dict[Edge, _Statistics] = {}

    def observe(self, edge: Edge, obs: Observation) -> None:
        check_observation(obs, self._layers, self._width)
        basis = self._bases.get(edge.namespace)
        if basis is None:
            basis = self._bases[edge.namespace] = _Basis(
                torch.zeros(self._layers, 2 * self._width, self._m), torch.zeros(self._layers, self._m)
            )
        state = self._edges.get(edge)
        if state is None:
            state = self._edges[edge] = _Statistics(
                torch.zeros(self._layers, self._features, self._features),
                torch.zeros(self._layers, self._features, 2 * self._width),
            )
        x = torch.cat([obs.base_k, obs.base_v], dim=-1)
        y = torch.cat([obs.delta_k, obs.delta_v], dim=-1)
        for i in range(x.shape[0]):
            layer = obs.first_layer + i
            if layer not in basis.fitted:
                self._fit(basis, layer, x[i])
            f = features(x[i] @ basis.project[layer] + basis.shift[layer], obs.t, DECAYS)
            state.gram[layer].addmm_(f.T, f)
            state.cross[layer].addmm_(f.T, y[i])

    def _fit(self, basis: _Basis, layer: int, x: Tensor) -> None:
        wide = x.double()
        mean, std = wide.mean(0), wide.std(0, correction=0)
        scale = torch.where(std > 1e-6 * (1 + mean.abs()), 1 / std.clamp_min(1e-30), torch.zeros_like(std))
        values, vectors = torch.linalg.eigh(((wide - mean) * scale).T @ ((wide - mean) * scale) / wide.shape[0])
        project = scale[:, None] * vectors[:, -self._m :].flip(1)
        basis.project[layer] = project.float()
        basis.shift[layer] = -(mean @ project).float()
        basis.fitted.add(layer)

    def finish(self, edge: Edge) -> None:
        state = self._edges.get(edge)
        if state is None:
            raise ValueError(f"edge {edge} has no observation to finish")
        basis = self._bases[edge.namespace]
        gram = state.gram.double()
        diagonal = gram.diagonal(dim1=1, dim2=2)
        ridge = RIDGE * diagonal.mean(1).clamp_min(1e-30)
        system = gram + torch.diag_embed(ridge[:, None].expand_as(diagonal))
        weight = torch.cholesky_solve(state.cross.double(), torch.linalg.cholesky(system)).float()
        shape = (self._layers, 1 + len(DECAYS), self._m + 1, 2 * self._width)
        state.delta = AffineDelta(basis.project, basis.shift, weight.view(shape), DECAYS)
        state.spans += 1

    def predict(self, edge: Edge) -> Delta | None:
        state = self._edges.get(edge)
        return None if state is None else state.delta

    def spans_seen(self, edge: Edge) -> int:
        state = self._edges.get(edge)
        return 0 if state is None else state.spans

    @property
    def state_bytes(self) -> int:
        shared = sum(basis.project.nbytes + basis.shift.nbytes for basis in self._bases.values())
        return shared + sum(self.edge_bytes(edge) for edge in self._edges)

    def edge_bytes(self, edge: Edge) -> int:
        state = self._edges.get(edge)
        if state is None:
            return 0
        return state.gram.nbytes + state.cross.nbytes + (0 if state.delta is None else state.delta.weight.nbytes)

    def edges(self) -> Iterable[Edge]:
        return tuple(self._edges)

    def drop(self, edge: Edge) -> None:
        self._edges.pop(edge, None)
        if not any(other.namespace == edge.namespace for other in self._edges):
            self._bases.pop(edge.namespace, None)

    def drop_namespace(self, namespace: str) -> None:
        for edge in self.edges():
            if edge.namespace == namespace:
                self.drop(edge)
