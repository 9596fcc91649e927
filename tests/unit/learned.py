"""A learner that has learned something, on a model of a few channels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from kvcmas_sgl.radix_ext import state_file
from kvcmas_sgl.radix_ext.agent_prefixes import AgentPrefixes
from kvcmas_sgl.radix_ext.delta_store import DeltaStore
from kvcmas_sgl.radix_ext.estimators import Edge, LastingEstimator, Observation, make_estimator
from kvcmas_sgl.radix_ext.fingerprint import fingerprint
from kvcmas_sgl.radix_ext.gate import Gate
from kvcmas_sgl.radix_ext.kv_view import KVView
from kvcmas_sgl.radix_ext.learner import Learner
from kvcmas_sgl.radix_ext.sources import Agent, edge, scope_digest
from kvcmas_sgl.radix_ext.statistics import Statistics
from kvcmas_sgl.triton_kernels import RotaryTable

LAYERS, HEADS, DIM, RANK, HEAD = 3, 2, 4, 4, 16
WIDTH = HEADS * DIM
TOKENS = 40


def edge_in(scope: str, consumer: str = "critic") -> Edge:
    return edge(Agent("planner", "p" * 32, scope), Agent(consumer, "c" * 32, scope))


OPEN, TENANT = edge_in(scope_digest()), edge_in(scope_digest("group", "salt"))


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def table(theta: float = 10000.0) -> RotaryTable:
    return RotaryTable.from_theta(theta, DIM, 64)


def own_fingerprint(
    estimators: dict[str, LastingEstimator],
    *,
    weights: str = "w",
    theta: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    rank: int = RANK,
    head: int = HEAD,
) -> dict[str, object]:
    buffers = [torch.zeros(8, HEADS, DIM, dtype=dtype) for _ in range(LAYERS)]
    return fingerprint(weights, KVView(buffers, buffers, table(theta)), estimators, rank=rank, head=head)


class Pupil:
    """A learner and its parts."""

    def __init__(self, state_bytes: int = 1 << 30, rank: int = RANK) -> None:
        shape = {"layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM, "rank": rank}
        self.estimators = {name: make_estimator(name, **shape) for name in ("affine", "none")}
        self.gate, self.prefixes, self.statistics = Gate(), AgentPrefixes(), Statistics()
        parts = (self.estimators, self.gate, self.prefixes, DeltaStore(), self.statistics)
        self.learner = Learner(*parts, state_bytes)

    def read(self, on: Edge, seed: int, *, finish: bool = True) -> None:
        """Learn one span of an edge, as an idle server does: a job that ends in a new version."""

        def job() -> object:
            base, delta = draw(seed, 2, LAYERS, TOKENS, WIDTH) + 0.5, 0.1 * draw(seed + 1, 2, LAYERS, TOKENS, WIDTH)
            for estimator in self.estimators.values():
                estimator.observe(on, Observation(0, torch.arange(TOKENS), *base, *delta))
                if finish:
                    estimator.finish(on)
            self.gate.record(
                on, "affine", squared_error=0.01 + seed / 7, tokens=TOKENS, kl=seed / 30 if seed % 2 else None
            )
            return
            yield

        self.prefixes.find(on.namespace, np.arange(seed, seed + 9), 5)
        self.learner.add(job())
        while self.learner.step():
            pass

    def learned(self) -> Pupil:
        """Two open edges of which one is not solved yet, and a tenant's."""
        for seed in range(3):
            self.read(OPEN, seed)
            self.read(TENANT, 10 + seed)
        self.read(edge_in(OPEN.namespace, "judge"), 20, finish=False)
        return self

    def rows(self, on: Edge = OPEN) -> torch.Tensor:
        """What the affine estimator predicts for some base, [layers - 1, n, 2 D]."""
        delta = self.estimators["affine"].predict(on)
        assert delta is not None
        base = draw(99, 2, TOKENS, WIDTH)
        return torch.stack([torch.cat(delta.rows(layer, torch.arange(TOKENS), *base), 1) for layer in range(1, LAYERS)])

    @property
    def empty(self) -> bool:
        known = [*self.estimators["affine"].edges(), *self.estimators["none"].edges(), *self.gate.edges()]
        return not known and not self.prefixes.scopes() and self.learner.state_bytes == 0

    def write(self, path: Path) -> Path:
        state_file.write(path, own_fingerprint(self.estimators), self.learner.state())
        return path
