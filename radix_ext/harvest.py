"""Learning from a dense run, in small steps that an idle scheduler takes.

A dense run of an agent on a span whose content another agent holds exactly gives the true delta. A job first copies
a sample of rows from the pool, so that eviction cannot tear what it learns from; then, a few layers a step, it
scores what each estimator would have predicted (the gate's held-out pair), lets the estimators observe, and
last factors the own delta of the whole span onto the source's nodes: its right factors come from the sample,
only its left ones take a pass over all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from kvcmas_sgl.radix_ext.decision import Base
from kvcmas_sgl.radix_ext.delta_store import Factors, Rows
from kvcmas_sgl.radix_ext.estimators import Edge, Observation
from kvcmas_sgl.radix_ext.gate import Gate
from kvcmas_sgl.radix_ext.heavy import EFFORTS, Effort, heavy_tokens
from kvcmas_sgl.radix_ext.kv_view import KVView, SampledRows
from kvcmas_sgl.radix_ext.lowrank import energy_rank, row_space
from kvcmas_sgl.radix_ext.predictor import Predictor
from kvcmas_sgl.radix_ext.ranks import ONE_RANK, Ranks
from kvcmas_sgl.radix_ext.sources import Source, edge
from kvcmas_sgl.radix_ext.statistics import Statistics
from kvcmas_sgl.triton_kernels import Delta
from torch import Tensor

SAMPLED_TOKENS = 512
_DENSE_HEAD = 128
_LAYERS_PER_STEP = 6


class ErrorMeter:
    """Relative error of corrected KV, as the gate defines it.

    weight: fp32 [n], how many tokens a row stands for. computed: bool [n], the rows that have no error because they are
    computed.
    """

    def __init__(self, weight: Tensor, computed: Tensor | None = None) -> None:
        self._weight = weight
        self._wrong = weight if computed is None else weight * ~computed
        self._sum = 0.0
        self._layers = 0

    def add(self, true: Tensor, off: Tensor) -> None:
        """Add layers: energies of the true rows, and of how far the corrected ones are off."""
        ratio = (off @ self._wrong) / (true @ self._weight)
        self._sum += float(ratio.sum()) / 2
        self._layers += ratio.shape[1]

    @property
    def squared_error(self) -> float:
        return self._sum / self._layers


def energies(x: Tensor) -> Tensor:
    """Squared norm of every row, fp32 [2, l, n], of K and V, fp32 [2, l, n, D]."""
    return torch.linalg.vecdot(x, x)


@dataclass(frozen=True)
class HarvestJob:
    """What one dense run can teach: a stretch of ``length`` tokens as its reader computed it, and as others hold it.

    ``bases`` come best first; ``head`` tokens at its start would be computed in any case; ``own`` is the name under
    which the measured delta is kept; ``audits`` has the KL, nats, of the edges that were audited on this run, by
    effort.
    """

    consumer: Base
    bases: tuple[Base, ...]
    length: int
    head: int
    own: str
    audits: Mapping[tuple[Edge, Effort], float] = field(default_factory=dict)


class Harvester:
    """Runs jobs against the pool.

    Parameters
    ----------
    own_rank, own_energy
        An own delta gets the smallest rank that keeps this share of its energy, ``own_rank`` at most.
    audited
        The estimator that audits look at.
    slots_of
        Slots (int64 [n]) of a source's content, or None when it has left the tree.
    attach
        Puts the own delta's rows on the nodes of the base, under a name.
    ranks
        Those that hold the other heads.
    """

    def __init__(
        self,
        view: KVView,
        predictor: Predictor,
        gate: Gate,
        statistics: Statistics,
        *,
        own_rank: int,
        own_energy: float,
        audited: str,
        slots_of: Callable[[Source], Tensor | None],
        attach: Callable[[Source, str, Rows], None],
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self.view = view
        self.predictor = predictor
        self.estimators = predictor.estimators
        self.gate = gate
        self.statistics = statistics
        self.own_rank = own_rank
        self.own_energy = own_energy
        self.audited = audited
        self.slots_of = slots_of
        self.attach = attach
        self.ranks = ranks

    def steps(self, job: HarvestJob) -> Iterator[None]:
        """Do the job; every ``next`` is one short step. Ends early when the KV has left the tree."""
        consumer_slots = self._slots(job.consumer, job.length)
        if consumer_slots is None:
            return
        if any(estimator.whole_spans for estimator in self.estimators.values()):
            t = torch.arange(job.length, device=consumer_slots.device)
            weight = torch.ones(job.length, device=consumer_slots.device)
        else:
            t, weight = sample_offsets(job.length, consumer_slots.device)
        rows = self.view.sample(consumer_slots, _position(job.consumer), t)
        sampled: list[tuple[Base, SampledRows]] = []
        for base in job.bases:
            slots = self._slots(base, job.length)
            if slots is not None:
                sampled.append((base, self.view.sample(slots, _position(base), t)))
        # Before the first observation: an estimator must not learn some layers of a span and not the others.
        finite = all(part.finite for part in (rows, *(base_rows for _, base_rows in sampled)))
        if not all(self.ranks.agreed([0 if finite else None])):
            raise ValueError("a dense run or its source holds NaN or Inf: nothing is learned from it")
        yield
        whole = [base for base, _ in sampled if base.offset == 0 and base.source.length == job.length]
        best = whole[0] if self.own_rank and whole else None
        own = _OwnDelta(self.own_energy, ErrorMeter(weight))
        for base, base_rows in sampled:
            yield from self._learn(job, base, rows, base_rows, t, weight, own if base is best else None)
        if best is not None:
            yield from self._factor(job, best, own)

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
        own: _OwnDelta | None,
    ) -> Iterator[None]:
        on = edge(base.agent, job.consumer.agent)
        predictions = {
            name: self.predictor.delta(name, base, job.consumer.agent, job.length) for name in self.estimators
        }
        computed = {}
        for effort in EFFORTS:
            heavy = heavy_tokens(base, job.length, job.head, effort)
            if heavy is not None:
                computed[effort] = (t < job.head) | torch.isin(t, torch.from_numpy(heavy).to(t.device))
        known = {name: delta for name, delta in predictions.items() if delta is not None}
        meters = {name: {effort: ErrorMeter(weight, rows) for effort, rows in computed.items()} for name in known}
        at = t + base.offset
        for layers in _chunks(0, self.view.layers):
            true = self.view.canonical(rows, layers)
            base_kv = self.view.canonical(base_rows, layers)
            off = true - base_kv
            # Layer 0 depends on the token alone: it is exact after rotation and would only dilute the error.
            scored = max(layers.start, 1) - layers.start
            of_true = energies(true)[:, scored:]
            for name, delta in known.items():
                left = energies(_left_over(delta, layers, at, base_kv, off))[:, scored:]
                for meter in meters[name].values():
                    meter.add(of_true, left)
            observation = Observation(layers.start, at, *base_kv, *off)
            for estimator in self.estimators.values():
                estimator.observe(on, observation)
            if own is not None:
                own.add(off, of_true, scored, weight, self.own_rank, self.view.dtype)
            yield
        measured = iter(self.ranks.mean([m.squared_error for ways in meters.values() for m in ways.values()]).tolist())
        for name, ways in meters.items():
            for effort in ways:
                squared_error = next(measured)
                kl = job.audits.get((on, effort)) if name == self.audited else None
                called = effort.of(name)
                expected = self.gate.expect(on, called, job.length)
                self.gate.record(on, called, squared_error=squared_error, tokens=job.length, kl=kl)
                self.statistics.held_out(expected, error=math.sqrt(squared_error), kl=kl)
        for estimator in self.estimators.values():
            estimator.finish(on)
        yield

    def _factor(self, job: HarvestJob, base: Base, own: _OwnDelta) -> Iterator[None]:
        left: list[tuple[Tensor, Tensor]] = []
        right, error = own.result(self.ranks)
        for layers in _chunks(0, self.view.layers):
            consumer_slots, base_slots = self._slots(job.consumer, job.length), self._slots(base, job.length)
            if consumer_slots is None or base_slots is None:
                return
            places = (consumer_slots, _position(job.consumer)), (base_slots, _position(base))
            left.append(self.view.left_factors(layers, *places, (right[0, layers], right[1, layers])))
            yield
        factors = Factors(right[0], right[1], error)
        self.attach(base.source, job.own, Rows(factors, *(torch.cat(part) for part in zip(*left, strict=True))))


@dataclass
class _OwnDelta:
    """Right factors of a measured delta, from the sampled rows, and the error that the rounded factors leave there.

    They get the smallest rank that keeps a share ``energy`` of the delta, averaged over layers.
    """

    energy: float
    meter: ErrorMeter
    parts: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    """Share of the delta's energy along each right factor, fp32 [2, l, r], of the layers that are corrected."""
    relative: list[Tensor] = field(default_factory=list)
    """Energy of the delta over that of the true KV, fp32 [2, l]."""

    def add(self, delta: Tensor, true: Tensor, scored: int, weight: Tensor, rank: int, dtype: torch.dtype) -> None:
        """Add layers: their delta, fp32 [2, l, n, D], and the true rows' energies from layer ``scored`` on."""
        right = row_space(delta, rank, weight, ordered=self.energy < 1).to(dtype)
        # The error is that of the stored, rounded factors: it is what a later placement will see.
        wide = right.float()
        left = (delta @ wide.mT).to(dtype).float()
        self.meter.add(true, energies(delta - left @ wide)[:, scored:])
        self.parts.append(right)
        whole = energies(delta)[:, scored:] @ weight
        along = torch.einsum("plnr,n->plr", left[:, scored:].square(), weight)
        self.kept.append(along / whole.clamp_min(torch.finfo(whole.dtype).tiny)[:, :, None])
        self.relative.append(whole / (true @ weight))

    def result(self, ranks: Ranks) -> tuple[Tensor, float]:
        """K's and V's factors, [2, L, r, D], and the relative error of the KV that they correct on all ``ranks``.

        These take the same r, so that they hold, and drop, as many bytes.
        """
        kept, relative = torch.cat(self.kept, 1), torch.cat(self.relative, 1)
        rank = math.ceil(ranks.mean([energy_rank(kept, self.energy)]).item())
        cut = kept[:, :, rank:].sum(2) * relative
        squared_error = ranks.mean([self.meter.squared_error + float(cut.mean())]).item()
        return torch.cat(self.parts, 1)[:, :, :rank].contiguous(), math.sqrt(squared_error)


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


def _left_over(delta: Delta, layers: slice, t: Tensor, base: Tensor, true: Tensor) -> Tensor:
    """What a predicted delta leaves of the true one, fp32 ``[2, l, n, D]``."""
    left = torch.empty_like(true)
    for i, layer in enumerate(range(layers.start, layers.stop)):
        for part, predicted in enumerate(delta.rows(layer, t, base[0, i], base[1, i])):
            torch.sub(true[part, i], predicted, out=left[part, i])
    return left


def _chunks(start: int, stop: int) -> Iterator[slice]:
    for first in range(start, stop, _LAYERS_PER_STEP):
        yield slice(first, min(first + _LAYERS_PER_STEP, stop))
