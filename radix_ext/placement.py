"""Placement: corrected KV is written into a request's own slots right before the forward pass that needs it.

The scheduler allocates slots for the whole prompt beyond the exact hit, as for any prefill. What was planned is
corrected into those slots, and the forward pass leaves the placed tokens out. Nothing is promised before it is there:
when a correction fails, the tokens are simply computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcmas_sgl.radix_ext.decision import Piece, Reason
from kvcmas_sgl.radix_ext.kv_view import KVView
from kvcmas_sgl.radix_ext.node_marks import Provenance
from kvcmas_sgl.radix_ext.planner import Declined, Planner
from kvcmas_sgl.radix_ext.ranks import Ranks
from kvcmas_sgl.radix_ext.request import AgentRequest, Placed
from kvcmas_sgl.radix_ext.sources import Source, edge
from kvcmas_sgl.radix_ext.statistics import Statistics, Use
from kvcmas_sgl.triton_kernels import CorrectionError, Segment
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass(frozen=True, eq=False)
class Pass:
    """One request's part of a forward pass: tokens ``[start, stop)`` and their slots (int64 [stop - start])."""

    req: Req
    start: int
    stop: int
    slots: Tensor


@dataclass(frozen=True, eq=False)
class _Step:
    """One piece of a pass, ready to run."""

    one: Pass
    piece: Piece
    segment: Segment


class Placer:
    """Corrects the pieces of a pass, all requests in one batch.

    Parameters
    ----------
    slots_of
        Slots (int64 [n]) of a source's content, or None when it has left the tree.
    """

    def __init__(
        self,
        view: KVView,
        planner: Planner,
        slots_of: Callable[[Source], Tensor | None],
        statistics: Statistics,
        ranks: Ranks,
    ) -> None:
        self._view = view
        self._ranks = ranks
        self._planner = planner
        self._slots_of = slots_of
        self._statistics = statistics

    def run(self, passes: Sequence[Pass]) -> list[list[tuple[int, int]]]:
        """Place what can be placed; per pass the ranges of tokens that need no computing, ascending.

        Tokens that are computed inside a piece get corrected KV too, which the forward pass overwrites. The last token
        of a pass is always computed: SGLang takes the logits there.
        """
        planned = [self._planned(one) for one in passes]
        try:
            self._correct([step for steps in planned for step in steps or ()])
        except Exception:
            # One poisoned source must not cost the other requests their reuse.
            planned = [self._corrected_alone(one, steps) for one, steps in zip(passes, planned, strict=True)]
        together = self._ranks.agreed([None if steps is None else _digest(steps) for steps in planned])
        placed: list[list[tuple[int, int]]] = []
        for one, steps, agreed in zip(passes, planned, together, strict=True):
            if steps is not None and not agreed:
                self._failed_elsewhere(one)
            for step in steps or () if agreed else ():
                self._record(step)
            placed.append([part for step in steps or () for part in step.piece.ranges] if agreed else [])
        return placed

    def _planned(self, one: Pass) -> list[_Step] | None:
        try:
            return self._steps(one)
        except Exception:
            self._failed(one)
            return None

    def _corrected_alone(self, one: Pass, steps: list[_Step] | None) -> list[_Step] | None:
        try:
            self._correct(steps or ())
            return steps
        except Exception:
            self._failed(one)
            return None

    def _failed_elsewhere(self, one: Pass) -> None:
        try:
            raise CorrectionError("another rank could not correct this request, or was about to do something else")
        except CorrectionError:
            self._failed(one)

    def _steps(self, one: Pass) -> list[_Step]:
        request: AgentRequest = one.req.kvcmas
        steps = []
        for planned in request.pieces:
            piece = planned.cut(one.start, one.stop - 1)
            if piece is None:
                continue
            source, reason = self._slots_of(piece.base.source), Reason.GONE
            try:
                delta = self._planner.delta(piece, request.agent(piece.start))
            except LookupError as error:
                source = None
                reason = Reason.OVER_BUDGET if isinstance(error, Declined) else reason
            if source is None:
                if not request.settled:
                    request.report.spans[piece.span].reason = reason
                continue
            offset, count = piece.base.offset, piece.stop - piece.start
            segment = Segment(
                source_slots=source[offset : offset + count],
                target_slots=one.slots[piece.start - one.start : piece.stop - one.start],
                source_start=piece.base.source.start + offset,
                target_start=piece.start,
                offset=offset,
                delta=delta,
            )
            steps.append(_Step(one, piece, segment))
        return steps

    def _correct(self, steps: Sequence[_Step]) -> None:
        if steps:
            self._view.correct([step.segment for step in steps])

    def _failed(self, one: Pass) -> None:
        self._statistics.failed("a correction", "its tokens are prefilled")
        request: AgentRequest = one.req.kvcmas
        if not request.settled:
            for piece in request.pieces:
                if piece.cut(one.start, one.stop - 1) is not None:
                    request.report.spans[piece.span].reason = Reason.FAILED
            request.publish_report()
        # What failed once would fail in every further chunk.
        request.pieces = []

    def _record(self, step: _Step) -> None:
        request: AgentRequest = step.one.req.kvcmas
        piece = step.piece
        if not piece.exact:
            share = piece.kl / (piece.stop - piece.start)
            mark = Provenance(piece.base.agent.role, piece.estimator, piece.error, share)
            request.placed.append(Placed(piece.start, piece.stop, step.segment.target_slots, mark))
        if request.settled:
            return
        count, report = piece.tokens, request.report
        self._statistics.images_corrected += request.images.covered(piece.ranges)
        use = Use(1, exact_tokens=count) if piece.exact else Use(1, corrected_tokens=count)
        self._statistics.placed(edge(piece.base.agent, request.agent(piece.start)), use)
        span = report.spans[piece.span]
        if piece.exact:
            span.exact_tokens += count
            report.exact_tokens += count
        else:
            span.corrected_tokens += count
            report.corrected_tokens += count
            report.predicted_kl = (report.predicted_kl or 0.0) + piece.kl
        if span.reason is not Reason.REUSED:
            span.reason = Reason.REUSED
            span.source, span.estimator = piece.base.agent.role, piece.estimator
            span.predicted_error, span.predicted_kl = piece.error, 0.0
        span.predicted_kl = (span.predicted_kl or 0.0) + piece.kl
        # SGLang's own count of tokens that needed no computing.
        step.one.req.cached_tokens += count
        request.publish_report()


def _digest(steps: Sequence[_Step]) -> int:
    """What is about to be placed, as a number that all processes compute alike (numbers hash to themselves)."""
    parts = [(*edges, s.piece.base.offset, s.segment.source_start) for s in steps for edges in s.piece.ranges]
    return hash(tuple(parts)) & ((1 << 62) - 1)
