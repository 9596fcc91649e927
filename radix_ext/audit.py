"""Audits: what a correction does to the next tokens, measured on a request that was computed.

The error of KV is a loose proxy for what the model then says (method, section 4): how much the following tokens look
at a span decides. So before a dense run is learned from, its tokens after a span are computed once more, in idle time,
over what the correction would have placed there, and the next-token distributions are compared with those over the
computed KV. All positions are rows of one forward pass (`kvcmas_sgl.seams.forward`), a few dozen tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from kvcmas_sgl.radix_ext.blocks import Tokens
from kvcmas_sgl.radix_ext.decision import Base
from kvcmas_sgl.radix_ext.estimators import Edge
from kvcmas_sgl.radix_ext.harvest import HarvestJob
from kvcmas_sgl.radix_ext.heavy import EFFORTS, Effort, heavy_tokens
from kvcmas_sgl.radix_ext.kv_view import KVView
from kvcmas_sgl.radix_ext.ranks import Ranks
from kvcmas_sgl.radix_ext.request import AgentRequest
from kvcmas_sgl.radix_ext.sources import Source, edge
from kvcmas_sgl.triton_kernels import CorrectionError, Delta, Segment
from torch import Tensor

ANSWER_TOKENS = 32
"""Positions of the answer that are compared, beside the one that the answer starts from."""

Forward = Callable[[Tokens, Tensor, Sequence[tuple[int, int]]], Tensor]
"""(tokens [n], slots int64 [n], rows [start, stop)) -> logits at the end of each row, fp32 [rows, vocabulary]."""


@dataclass(frozen=True)
class Stretch:
    """A stretch of the prompt that the request computed, and KV of the same tokens that others hold, best first.

    Its first ``head`` tokens would be computed in any case.
    """

    consumer: Base
    bases: tuple[Base, ...]
    start: int
    stop: int
    head: int = 0

    @property
    def corrected_from(self) -> int:
        return min(self.start + self.head, self.stop)


@dataclass(frozen=True)
class AuditJob:
    """A finished request: its prompt and answer, its marked spans, and the stretches to audit.

    ``last`` is the source that ends last in the prompt: its path holds the KV of everything before. ``results`` takes
    the KL, nats, of every edge that was audited, by effort. ``thorough``: edges that had enough audits are audited too.
    """

    tokens: Tokens
    prompt_length: int
    spans: tuple[tuple[int, int], ...]
    stretches: tuple[Stretch, ...]
    last: Source
    results: dict[tuple[Edge, Effort], float] = field(default_factory=dict)
    thorough: bool = False

    @classmethod
    def of(
        cls, request: AgentRequest, jobs: Sequence[HarvestJob], answer: Sequence[int], *, thorough: bool = False
    ) -> AuditJob:
        """What to audit of a request that can teach ``jobs`` and generated ``answer`` (token ids)."""
        stretches = []
        for job in jobs:
            start = job.consumer.source.start + job.consumer.offset
            stretches.append(Stretch(job.consumer, job.bases, start, start + job.length, job.head))
        return cls(
            tokens=np.concatenate([request.prompt, np.array(answer[:ANSWER_TOKENS], np.int64)]),
            prompt_length=len(request.prompt),
            spans=tuple((span.start, span.stop) for span in request.report.spans),
            stretches=tuple(stretches),
            last=max((job.consumer.source for job in jobs), key=lambda source: source.stop),
            thorough=thorough,
        )


@dataclass(frozen=True)
class Trial:
    """One stretch corrected from one base; ``heavy``: offsets of tokens inside it that are computed."""

    stretch: Stretch
    base: Base
    delta: Delta
    heavy: np.ndarray

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Runs of tokens of the stretch that are computed."""
        head = [(self.stretch.start, self.stretch.corrected_from)] if self.stretch.head else []
        return head + [(token, token + 1) for token in (self.stretch.start + self.heavy).tolist()]


class Auditor:
    """Runs audits.

    Parameters
    ----------
    predict
        The delta that an estimator has for a base, its consumer and so many tokens; None when it has none.
    wanted
        Whether an edge needs an audit of an effort on so many tokens, when a job is thorough or not.
    slots_of
        Slots (int64 [n]) of a source's content, or None when it has left the tree.
    path_of
        Slots of everything up to the end of a source, or None.
    allocate, free
        Slots for the duration of an audit; ``allocate`` gives None rather than evict.
    ranks
        Those that hold the other heads.
    """

    def __init__(
        self,
        view: KVView,
        *,
        predict: Callable[[Base, Base, int], Delta | None],
        wanted: Callable[[Edge, Effort, int, bool], bool],
        slots_of: Callable[[Source], Tensor | None],
        path_of: Callable[[Source], Tensor | None],
        allocate: Callable[[int], Tensor | None],
        free: Callable[[Tensor], None],
        ranks: Ranks,
    ) -> None:
        self._view = view
        self._ranks = ranks
        self._predict = predict
        self._wanted = wanted
        self._slots_of = slots_of
        self._path_of = path_of
        self._allocate = allocate
        self._free = free

    def steps(self, job: AuditJob, forward: Forward) -> Iterator[None]:
        """Audit every stretch against its bases; each ``next`` is one forward pass. Ends when KV or room is gone."""
        for stretch in job.stretches:
            rows = audit_rows(job.spans, stretch.stop, job.prompt_length, len(job.tokens))
            compared = sum(stop >= job.prompt_length for _, stop in rows)
            truth: Tensor | None = None
            for base in stretch.bases:
                on, length = edge(base.agent, stretch.consumer.agent), stretch.stop - stretch.start
                efforts = [effort for effort in EFFORTS if self._wanted(on, effort, length, job.thorough)]
                delta = self._predict(base, stretch.consumer, length) if compared and efforts else None
                if delta is None:
                    continue
                if truth is None:
                    truth = self._run(job, rows, forward)
                    yield
                for effort in efforts:
                    heavy = heavy_tokens(base, length, stretch.head, effort)
                    if heavy is None or (on, effort) in job.results:
                        continue
                    other = None if truth is None else self._run(job, rows, forward, Trial(stretch, base, delta, heavy))
                    if truth is None or other is None:
                        return
                    (kl,) = self._ranks.mean([mean_kl(truth[-compared:], other[-compared:])]).tolist()
                    job.results[on, effort] = kl
                    yield

    def _run(
        self,
        job: AuditJob,
        rows: Sequence[tuple[int, int]],
        forward: Forward,
        trial: Trial | None = None,
    ) -> Tensor | None:
        """Logits of the rows, over the computed KV or with one stretch corrected; None when KV or room is gone."""
        path = self._path_of(job.last)
        source = None if trial is None else self._slots_of(trial.base.source)
        if path is None or (trial is not None and source is None):
            return None
        length = 0
        if trial is not None:
            length = trial.stretch.stop - trial.stretch.corrected_from
            rows = [*trial.rows, *rows]
        fresh = torch.cat([torch.arange(start, stop) for start, stop in rows]).to(path.device)
        taken = self._allocate(length + fresh.numel())
        if taken is None:
            return None
        try:
            slots = path.new_zeros(len(job.tokens))
            slots[: path.shape[0]] = path
            if trial is not None and source is not None:
                stretch, base = trial.stretch, trial.base
                slots[stretch.corrected_from : stretch.stop] = taken[:length]
                offset = base.offset + stretch.corrected_from - stretch.start
                segment = Segment(
                    source_slots=source[offset : offset + length],
                    target_slots=taken[:length],
                    source_start=base.source.start + offset,
                    target_start=stretch.corrected_from,
                    offset=offset,
                    delta=trial.delta,
                )
                self._correct(segment)
            slots[fresh] = taken[length:]
            return forward(job.tokens, slots, rows)
        finally:
            self._free(taken)

    def _correct(self, segment: Segment) -> None:
        """Correct on all ranks, or raise on all: a forward pass is theirs together."""
        error: Exception | None = None
        try:
            self._view.correct([segment])
        except Exception as raised:
            error = raised
        if not all(self._ranks.agreed([0 if error is None else None])):
            raise error or CorrectionError("the correction failed on another rank")


def audit_rows(spans: Sequence[tuple[int, int]], after: int, prompt: int, total: int) -> list[tuple[int, int]]:
    """Runs of tokens to compute: what stands outside of the spans from ``after`` to the prompt's end, then each token
    of the answer by itself, so that the pass gives logits at its position."""
    rows, at = [], after
    for start, stop in spans:
        if start > at:
            rows.append((at, start))
        at = max(at, stop)
    if at < prompt:
        rows.append((at, prompt))
    return rows + [(i, i + 1) for i in range(prompt, total)]


def mean_kl(truth: Tensor, other: Tensor) -> float:
    """Mean over positions of KL(truth || other), nats, of logits [n, vocabulary]. Raises ValueError if not finite."""
    p, q = truth.log_softmax(-1), other.log_softmax(-1)
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    if not math.isfinite(kl):
        raise ValueError(f"the KL of two passes is {kl}: their logits are not finite")
    return kl
