"""Learning from a dense run, in small steps that an idle scheduler takes.

A dense run of an agent on a span whose content another agent holds exactly gives the true delta. A job first copies
a sample of rows from the pool, so that eviction cannot tear what it learns from; then, a few layers a step, it
scores what each estimator would have predicted (the gate's held-out pair), lets the estimators observe, and
last factors the own delta of the whole span onto the source's nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from kvcmas_sgl.radix_ext.decision import Base
from kvcmas_sgl.radix_ext.delta_store import Factors, Rows
from kvcmas_sgl.radix_ext.estimators import Edge, Estimator, Observation
from kvcmas_sgl.radix_ext.gate import Gate
from kvcmas_sgl.radix_ext.heavy import heavy_tokens, with_heavy
from kvcmas_sgl.radix_ext.kv_view import KVView, SampledRows
from kvcmas_sgl.radix_ext.lowrank import compress
from kvcmas_sgl.radix_ext.sources import Source, edge
from kvcmas_sgl.triton_kernels import Delta
from torch import Tensor

SAMPLED_TOKENS = 512
_DENSE_HEAD = 128
_LAYERS_PER_STEP = 6


class ErrorMeter:
    """Relative error of corrected KV, as the gate defines it; rows may be weighted."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._layers = 0

    def add(self, true: tuple[Tensor, Tensor], off: tuple[Tensor, Tensor], weight: Tensor | None = None) -> None:
        """Add layers: ``true`` K and V, and how far the corrected ones are off, fp32 ``[l, n, D]`` each."""
        ratio = sum(_energy(o, weight) / _energy(x, weight) for x, o in zip(true, off, strict=True))
        assert isinstance(ratio, Tensor)
        self._sum += float(ratio.sum()) / 2
        self._layers += ratio.shape[0]

    @property
    def squared_error(self) -> float:
        return self._sum / self._layers


@dataclass(frozen=True)
class HarvestJob:
    """What one dense run can teach: a stretch of ``length`` tokens as its reader computed it, and as others hold it.

    ``bases`` come best first; ``head`` tokens at its start would be computed in any case; ``own`` is the name under
    which the measured delta is kept; ``audits`` has the KL, nats, of the edges that were audited on this run, without
    and with heavy hitters computed.
    """

    consumer: Base
    bases: tuple[Base, ...]
    length: int
    head: int
    own: str
    audits: Mapping[tuple[Edge, bool], float] = field(default_factory=dict)


class Harvester:
    """Runs jobs against the pool.

    Parameters
    ----------
    audited
        The estimator that audits look at.
    slots_of
        Slots (int64 [n]) of a source's content, or None when it has left the tree.
    attach
        Puts the own delta's rows on the nodes of the base, under a name.
    """

    def __init__(
        self,
        view: KVView,
        estimators: Mapping[str, Estimator],
        gate: Gate,
        *,
        own_rank: int,
        audited: str,
        slots_of: Callable[[Source], Tensor | None],
        attach: Callable[[Source, str, Rows], None],
    ) -> None:
        self.view = view
        self.estimators = estimators
        self.gate = gate
        self.own_rank = own_rank
        self.audited = audited
        self.slots_of = slots_of
        self.attach = attach

    def steps(self, job: HarvestJob) -> Iterator[None]:
        """Do the job; every ``next`` is one short step. Ends early when the KV has left the tree."""
        consumer_slots = self._slots(job.consumer, job.length)
        if consumer_slots is None:
            return
        t, weight = sample_offsets(job.length, consumer_slots.device)
        rows = self.view.sample(consumer_slots, _position(job.consumer), t)
        sampled: list[tuple[Base, SampledRows]] = []
        for base in job.bases:
            slots = self._slots(base, job.length)
            if slots is not None:
                sampled.append((base, self.view.sample(slots, _position(base), t)))
        # Before the first observation: an estimator must not learn some layers of a span and not the others.
        if not all(part.finite for part in (rows, *(base_rows for _, base_rows in sampled))):
            raise ValueError("a dense run or its source holds NaN or Inf: nothing is learned from it")
        yield
        for base, base_rows in sampled:
            yield from self._learn(job, base, rows, base_rows, t, weight)
        whole = [base for base, _ in sampled if base.offset == 0 and base.source.length == job.length]
        if self.own_rank and whole:
            yield from self._factor(job, whole[0])

    def _slots(self, base: Base, length: int) -> Tensor | None:
        slots = self.slots_of(base.source)
        return None if slots is None else slots[base.offset : base.offset + length]

    def _learn(
        self,
        job: HarvestJob,
        base: Base,
        rows: SampledRows,
        base_rows: SampledRows,
        t: Tensor,
        weight: Tensor,
    ) -> Iterator[None]:
        on = edge(base.agent, job.consumer.agent)
        predictions = {name: estimator.predict(on) for name, estimator in self.estimators.items()}
        # What is computed has no error.
        without_head = (t >= job.head).float()[:, None]
        masks = [without_head]
        heavy = heavy_tokens(base, job.length, job.head)
        if heavy is not None:
            masks.append(without_head * ~torch.isin(t, torch.from_numpy(heavy).to(t.device))[:, None])
        known = [name for name, delta in predictions.items() if delta is not None]
        meters = {(name, way): ErrorMeter() for name in known for way in range(len(masks))}
        at = t + base.offset
        # Layer 0 depends on the token alone: it is exact after rotation and would only dilute the error.
        for layers in _chunks(0, self.view.layers):
            true = self.view.canonical(rows.k[layers], rows.v[layers], rows.positions)
            base_kv = self.view.canonical(base_rows.k[layers], base_rows.v[layers], base_rows.positions)
            off = (true[0] - base_kv[0], true[1] - base_kv[1])
            scored = max(layers.start, 1) - layers.start
            for name in known:
                left = _left_over(predictions[name], layers, at, base_kv, off)
                for way, mask in enumerate(masks):
                    mine = (left[0][scored:] * mask, left[1][scored:] * mask)
                    meters[name, way].add((true[0][scored:], true[1][scored:]), mine, weight)
            observation = Observation(layers.start, at, base_kv[0], base_kv[1], off[0], off[1])
            for estimator in self.estimators.values():
                estimator.observe(on, observation)
            yield
        for (name, way), meter in meters.items():
            kl = job.audits.get((on, bool(way))) if name == self.audited else None
            called = with_heavy(name) if way else name
            self.gate.record(on, called, squared_error=meter.squared_error, tokens=job.length, kl=kl)
        for estimator in self.estimators.values():
            estimator.finish(on)
        yield

    def _factor(self, job: HarvestJob, base: Base) -> Iterator[None]:
        left_k, right_k, left_v, right_v = [], [], [], []
        meter = ErrorMeter()
        # Its error is measured on some rows: a few hundred tell it well enough.
        some = (slice(None), slice(None, None, max(1, job.length // SAMPLED_TOKENS)))
        for layers in _chunks(0, self.view.layers):
            consumer_slots, base_slots = self._slots(job.consumer, job.length), self._slots(base, job.length)
            if consumer_slots is None or base_slots is None:
                return
            true = self.view.rows(layers, consumer_slots, _position(job.consumer))
            start = self.view.rows(layers, base_slots, _position(base))
            delta = (true[0] - start[0], true[1] - start[1])
            # The error is that of the stored, rounded factors: it is what a later placement will see.
            k = [part.to(self.view.dtype) for part in compress(delta[0], self.own_rank)]
            v = [part.to(self.view.dtype) for part in compress(delta[1], self.own_rank)]
            off = [
                part[some] - left[some].float() @ right.float()
                for part, (left, right) in zip(delta, (k, v), strict=True)
            ]
            scored = max(layers.start, 1) - layers.start
            meter.add((true[0][some][scored:], true[1][some][scored:]), (off[0][scored:], off[1][scored:]))
            left_k.append(k[0])
            right_k.append(k[1])
            left_v.append(v[0])
            right_v.append(v[1])
            yield
        factors = Factors(torch.cat(right_k), torch.cat(right_v), meter.squared_error**0.5)
        self.attach(base.source, job.own, Rows(factors, torch.cat(left_k), torch.cat(left_v)))


def sample_offsets(length: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Offsets that stand for a span: its whole head, then evenly spaced ones; at most `SAMPLED_TOKENS`.

    Returns ascending int64 [n] offsets, and fp32 [n] weights: how many tokens each one stands for.
    """
    if length <= SAMPLED_TOKENS:
        return torch.arange(length, device=device), torch.ones(length, device=device)
    rest = SAMPLED_TOKENS - _DENSE_HEAD
    stride = (length - _DENSE_HEAD) / rest
    # The middle of each stretch: the error falls along the span, and its ends would bias the estimate.
    tail = _DENSE_HEAD + ((torch.arange(rest, dtype=torch.float64) + 0.5) * stride).long()
    t = torch.cat([torch.arange(_DENSE_HEAD), tail]).to(device)
    weight = torch.cat([torch.ones(_DENSE_HEAD), torch.full((rest,), stride)]).to(device)
    return t, weight


def _position(base: Base) -> int:
    return base.source.start + base.offset


def _left_over(
    delta: Delta | None, layers: slice, t: Tensor, base: Sequence[Tensor], true: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """What a predicted delta leaves of the true one, fp32 ``[l, n, D]``."""
    assert delta is not None
    predicted = [
        delta.rows(layer, t, base[0][i], base[1][i]) for i, layer in enumerate(range(layers.start, layers.stop))
    ]
    return (
        true[0] - torch.stack([dk for dk, _ in predicted]),
        true[1] - torch.stack([dv for _, dv in predicted]),
    )


def _energy(x: Tensor, weight: Tensor | None) -> Tensor:
    rows = x.square().sum(-1)
    return rows.sum(-1) if weight is None else rows @ weight


def _chunks(start: int, stop: int) -> Iterator[slice]:
    for first in range(start, stop, _LAYERS_PER_STEP):
        yield slice(first, min(first + _LAYERS_PER_STEP, stop))
