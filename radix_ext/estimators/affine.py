"""The default estimator: reduced-rank ridge regression from the source's own KV to the delta, per edge and layer.

A token's features are a PCA of its standardised canonical K and V, z in R^m, beside fading constants that carry the
mean delta at each distance from the agent prefix:

    [dK, dV](t) = [z, g_tau(t) for tau in MEAN_DECAYS] @ W,     g_tau(t) = 1 / (1 + t / tau).

W minimises sum_i w_i |delta_i - prediction_i|^2 + ridge and comes from running sums (Gram and cross products), so
the state, O(L D m), does not grow with spans or their length. ``w_i`` is the number of tokens that a sampled token
stands for times (1 + t_i / 32): the energy of the delta falls with the offset, but a reader's attention adds up the
small far errors of a long span, so tokens are weighted by precision (generalised least squares). The part of W that
belongs to z is then cut to the best rank r for the fitted values.

Measured on SmolLM2-135M in fp32, m = 64, r = 16, 12 unseen spans of 384 to 768 tokens of word problems, history,
biology and Python source, as sum of KL over that of rotate only, on edges between system prompts of 20, 259, 416 and
823 tokens (20 to 259, 259 to 416, 416 to 20, 20 to 823; mean KL .013, .002, .027, .027). Twelve spans learned: .46,
.80, .38, .36, and with 16 head tokens computed .35, .61, .27, .30. Two spans learned, with that head: .38, .33 (first
and third edge). Features that fade along the span, other ridges and weights, and more components change little.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from kvcmas_sgl.radix_ext.finite import all_finite
from kvcmas_sgl.radix_ext.lowrank import factor
from kvcmas_sgl.radix_ext.state_file import State, StateError, count
from kvcmas_sgl.triton_kernels import AffineDelta, Delta
from kvcmas_sgl.triton_kernels.delta import fading
from torch import Tensor

from .base import Edge, LastingEstimator, Observation, SpanBase, check_observation

COMPONENTS = 64
TOKEN_DECAYS = (math.inf,)
MEAN_DECAYS = (math.inf, 8.0, 32.0, 128.0, 512.0)
WEIGHT_DECAY = 32.0

TOKEN_RIDGE = 4096
MEAN_RIDGE = 8
"""Ridges in tokens: the prior for zero weighs as much as so many tokens on which the feature is as large as usual.

Most of a delta is noise to an affine map, so eight spans of 512 sampled tokens must agree before the coefficients of z
come half of the way; the few means need a ridge for the condition of the system only.
"""

_STD_FLOOR = 1e-2
"""Relative to the layer's mean standard deviation: a channel that one span leaves constant must not explode later."""


@dataclass
class _Basis:
    """Shared by the edges of a namespace, so that chained sources meet in one frame.

    Standardisation and PCA, folded into z = x @ project + shift: fp32 [L, 2D, m], [L, m]. Each layer is fitted on the
    first observation that covers it, then frozen: the running sums of every edge are in its terms.
    """

    project: Tensor
    shift: Tensor
    fitted: set[int] = field(default_factory=set)


@dataclass
class _Statistics:
    """Of one edge: gram [L, F, F] and cross [L, F, 2D], fp32 sums over tokens; the solved delta; finished spans.

    ``lent``: somebody reads the sums; they must be copied before they change.
    """

    gram: Tensor
    cross: Tensor
    delta: AffineDelta | None = None
    spans: int = 0
    lent: bool = False


class AffineEstimator(LastingEstimator):
    """``rank``: r of the predicted delta. ``components``: m, the number of principal components (at most 2D)."""

    name = "affine"

    def __init__(self, layers: int, kv_heads: int, head_dim: int, rank: int, components: int = COMPONENTS) -> None:
        self._layers, self._width = layers, kv_heads * head_dim
        self._m = min(components, 2 * self._width)
        self._rank = min(rank, self._m * len(TOKEN_DECAYS), 2 * self._width)
        self._features = self._m * len(TOKEN_DECAYS) + len(MEAN_DECAYS)
        self._bases: dict[str, _Basis] = {}
        self._edges: dict[Edge, _Statistics] = {}

    def observe(self, edge: Edge, obs: Observation) -> None:
        check_observation(obs, self._layers, self._width)
        basis = self._bases.get(edge.namespace) or self._new_basis(obs)
        weight = token_weights(obs.t).to(obs.base_k.device)[:, None]
        layers = range(obs.first_layer, obs.first_layer + obs.base_k.shape[0])
        x = torch.cat([obs.base_k, obs.base_v], dim=2)
        fits = {layer: _fit(x[i], self._m) for i, layer in enumerate(layers) if layer not in basis.fitted}
        frames = [fits.get(layer, (basis.project[layer], basis.shift[layer])) for layer in layers]
        project, shift = (torch.stack(part) for part in zip(*frames, strict=True))
        f = _features(torch.baddbmm(shift[:, None], x, project), obs.t)
        weighted = (f * weight).mT
        gram, cross = weighted @ f, weighted @ torch.cat([obs.delta_k, obs.delta_v], dim=2)
        if not (all_finite(gram) and all_finite(cross)):
            raise ValueError("an observation's squares overflow fp32: it cannot be learned from")

        self._bases[edge.namespace] = basis
        if fits:
            # Its tensors may be lent, and change a few times in all.
            basis.project, basis.shift = basis.project.clone(), basis.shift.clone()
        for layer, (project, shift) in fits.items():
            basis.project[layer], basis.shift[layer] = project, shift
            basis.fitted.add(layer)
        state = self._edges.get(edge)
        if state is None:
            state = self._edges[edge] = _Statistics(
                obs.base_k.new_zeros(self._layers, self._features, self._features),
                obs.base_k.new_zeros(self._layers, self._features, 2 * self._width),
            )
        if state.lent:
            state.gram, state.cross, state.lent = state.gram.clone(), state.cross.clone(), False
        covered = slice(layers.start, layers.stop)
        state.gram[covered] += gram
        state.cross[covered] += cross

    def _new_basis(self, obs: Observation) -> _Basis:
        zeros = obs.base_k.new_zeros
        return _Basis(zeros(self._layers, 2 * self._width, self._m), zeros(self._layers, self._m))

    def finish(self, edge: Edge) -> None:
        state = self._edges.get(edge)
        if state is None:
            raise ValueError(f"edge {edge} has no observation to finish")
        gram = state.gram.double()
        # A feature that never occurred has no row in the system: any positive ridge gives it the coefficient zero.
        ridge = self._ridge(gram)
        ridge = torch.where(ridge > 0, ridge, 1.0)
        lower = torch.linalg.cholesky(gram + torch.diag_embed(ridge))
        solved = torch.cholesky_solve(state.cross.double(), lower)
        state.delta = self._reduce(self._bases[edge.namespace], solved, lower)
        state.spans += 1

    def _reduce(self, basis: _Basis, solved: Tensor, lower: Tensor) -> AffineDelta:
        """The delta of coefficients ``solved`` [L, F, 2D], those of tokens at the best rank r.

        Reduced-rank regression: with G = R^T R the Gram matrix of the token features (``lower`` holds R^T), the best
        rank r for the fitted values is the truncated SVD of R W. K and V count alike, whatever their size.
        """
        tokens, width = self._m * len(TOKEN_DECAYS), self._width
        root = lower[:, :tokens, :tokens].mT
        fitted = root @ solved[:, :tokens]
        size = fitted.unflatten(2, (2, width)).square().sum((1, 3)).sqrt().clamp_min(1e-30)
        even = fitted / size.repeat_interleave(width, 1)[:, None]
        leading = torch.linalg.eigh(even @ even.mT).eigenvectors[:, :, -self._rank :]
        mix = torch.linalg.solve_triangular(root, leading, upper=True).float()
        mix = mix.unflatten(1, (len(TOKEN_DECAYS), self._m))
        return AffineDelta(
            project=torch.einsum("lxm,ljmr->lxjr", basis.project, mix).flatten(2),
            shift=torch.einsum("lm,ljmr->ljr", basis.shift, mix).flatten(1),
            weight=(leading.mT @ fitted).float(),
            bias=solved[:, tokens:].float(),
            token_decays=TOKEN_DECAYS,
            mean_decays=MEAN_DECAYS,
        )

    def _ridge(self, gram: Tensor) -> Tensor:
        """[L, F], of ``gram`` [L, F, F]: tokens times the feature's mean square, for z averaged over its block."""
        tokens = self._m * len(TOKEN_DECAYS)
        square = gram.diagonal(dim1=1, dim2=2)
        # The weighted number of tokens: the first mean feature is 1 everywhere.
        square = square / square[:, tokens, None].clamp_min(1.0)
        blocks = square[:, :tokens].unflatten(1, (len(TOKEN_DECAYS), self._m))
        of_tokens = blocks.mean(2, keepdim=True).expand_as(blocks).flatten(1)
        return torch.cat([TOKEN_RIDGE * of_tokens, MEAN_RIDGE * square[:, tokens:]], dim=1)

    def predict(self, edge: Edge, base: SpanBase | None = None) -> Delta | None:
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
        return state.gram.nbytes + state.cross.nbytes + (0 if state.delta is None else state.delta.nbytes)

    def edges(self) -> Iterable[Edge]:
        return tuple(self._edges)

    def drop(self, edge: Edge) -> None:
        self._edges.pop(edge, None)
        if not any(other.namespace == edge.namespace for other in self._edges):
            self._bases.pop(edge.namespace, None)

    def drop_namespace(self, namespace: str) -> None:
        self._edges = {edge: state for edge, state in self._edges.items() if edge.namespace != namespace}
        self._bases.pop(namespace, None)

    @property
    def definition(self) -> str:
        return (
            f"{self.name}: {self._m} components, rank {self._rank}, decays {TOKEN_DECAYS} and {MEAN_DECAYS}, "
            f"weights {WEIGHT_DECAY}"
        )

    def state(self) -> State:
        tensors: dict[str, Tensor] = {}
        for i, basis in enumerate(self._bases.values()):
            tensors |= {f"basis.{i}.project": basis.project, f"basis.{i}.shift": basis.shift}
        for i, one in enumerate(self._edges.values()):
            one.lent = True
            tensors |= {f"edge.{i}.gram": one.gram, f"edge.{i}.cross": one.cross}
            if one.delta is not None:
                tensors |= {f"edge.{i}.{part}": getattr(one.delta, part) for part in self._delta_shapes()}
        return State(
            tensors,
            {
                "bases": [[namespace, sorted(basis.fitted)] for namespace, basis in self._bases.items()],
                "edges": [[edge.as_list(), one.spans, one.delta is not None] for edge, one in self._edges.items()],
            },
        )

    def load(self, state: State) -> None:
        layers, wide, features = self._layers, 2 * self._width, self._features
        bases, edges = {}, {}
        for i, (namespace, fitted) in enumerate(state.data["bases"]):
            if not set(fitted) <= set(range(layers)):
                raise StateError(f"layers {fitted} are said to be fitted, of {layers}")
            project = state.tensor(f"basis.{i}.project", layers, wide, self._m)
            bases[namespace] = _Basis(project, state.tensor(f"basis.{i}.shift", layers, self._m), set(fitted))
        for i, (names, spans, solved) in enumerate(state.data["edges"]):
            edge = Edge.from_list(names)
            if edge.namespace not in bases:
                raise StateError(f"the basis of edge {i} is missing")
            edges[edge] = one = _Statistics(
                state.tensor(f"edge.{i}.gram", layers, features, features),
                state.tensor(f"edge.{i}.cross", layers, features, wide),
                spans=count(spans),
            )
            if solved:
                parts = {part: state.tensor(f"edge.{i}.{part}", *shape) for part, shape in self._delta_shapes().items()}
                one.delta = AffineDelta(**parts, token_decays=TOKEN_DECAYS, mean_decays=MEAN_DECAYS)
        self._bases, self._edges = bases, edges

    def _delta_shapes(self) -> dict[str, tuple[int, ...]]:
        layers, wide, columns = self._layers, 2 * self._width, self._rank * len(TOKEN_DECAYS)
        return {
            "project": (layers, wide, columns),
            "shift": (layers, columns),
            "weight": (layers, self._rank, wide),
            "bias": (layers, len(MEAN_DECAYS), wide),
        }


def _features(z: Tensor, t: Tensor) -> Tensor:
    """fp32 [l, n, F] of ``z`` [l, n, m] at span offsets ``t`` [n]: fading z, then the constants of the mean delta."""
    tokens = z[:, :, None] * fading(t, TOKEN_DECAYS)[:, :, None]
    return torch.cat([tokens.flatten(2), fading(t, MEAN_DECAYS).expand(z.shape[0], -1, -1)], dim=2)


def token_weights(t: Tensor) -> Tensor:
    """fp32 [n], mean 1, of ascending span offsets ``t`` [n]: the tokens one stands for, times 1 + t / WEIGHT_DECAY.

    A token stands for the half-way stretch to its neighbours, which undoes any denser sampling of a span's head.
    """
    at = t.double()
    if at.numel() == 1:
        return torch.ones(1)
    gaps = at.diff()
    stands_for = (torch.cat([gaps[:1], gaps]) + torch.cat([gaps, gaps[-1:]])) / 2
    weight = stands_for * (1 + at / WEIGHT_DECAY)
    return (weight / weight.mean()).float()


def _fit(x: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """(project [2D, m], shift [m]), fp32: standardisation and the leading m principal directions of ``x`` [n, 2D].

    Where n < m tokens were seen, the directions that they leave open are zero.
    """
    mean, std = x.mean(0), x.std(0, correction=0)
    floor = _STD_FLOOR * float(std.mean())
    scale = 1 / std.clamp_min(floor) if floor > 0 else torch.zeros_like(std)
    directions, _ = factor(((x - mean) * scale).mT, m)
    project = x.new_zeros(x.shape[1], m)
    project[:, : directions.shape[1]] = scale[:, None] * directions
    return project, -(mean @ project)
