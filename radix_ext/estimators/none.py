"""Rotate only (FullShared in the literature): the control that learns nothing."""

from __future__ import annotations

from collections.abc import Iterable

from kvcmas_sgl.radix_ext.state_file import State, count
from kvcmas_sgl.triton_kernels import ZERO_DELTA, Delta

from .base import Edge, LastingEstimator, Observation, SpanBase, check_observation

MAX_EDGES = 1 << 14
"""Edges whose spans are counted: they take no bytes of the budget."""


class NoneEstimator(LastingEstimator):
    """Predicts a zero delta for every edge; counts spans and holds no tensor."""

    name = "none"

    def __init__(self, layers: int, kv_heads: int, head_dim: int) -> None:
        self._layers, self._width = layers, kv_heads * head_dim
        self._spans: dict[Edge, int] = {}

    def observe(self, edge: Edge, obs: Observation) -> None:
        check_observation(obs, self._layers, self._width)

    def finish(self, edge: Edge) -> None:
        self._spans[edge] = self.spans_seen(edge) + 1
        if len(self._spans) > MAX_EDGES:
            del self._spans[next(iter(self._spans))]

    def predict(self, edge: Edge, base: SpanBase | None = None) -> Delta | None:
        return ZERO_DELTA

    def spans_seen(self, edge: Edge) -> int:
        return self._spans.get(edge, 0)

    @property
    def state_bytes(self) -> int:
        return 0

    def edge_bytes(self, edge: Edge) -> int:
        return 0

    def edges(self) -> Iterable[Edge]:
        return tuple(self._spans)

    def drop(self, edge: Edge) -> None:
        self._spans.pop(edge, None)

    def drop_namespace(self, namespace: str) -> None:
        self._spans = {edge: spans for edge, spans in self._spans.items() if edge.namespace != namespace}

    @property
    def definition(self) -> str:
        return self.name

    def state(self) -> State:
        return State({}, [[edge.as_list(), spans] for edge, spans in self._spans.items()])

    def load(self, state: State) -> None:
        self._spans = {Edge.from_list(names): count(spans) for names, spans in state.data}
