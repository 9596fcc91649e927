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
from kvcmas_sgl.radix_ext.request import AgentRequest, Placed
from kvcmas_sgl.radix_ext.sources import Source, edge
from kvcmas_sgl.radix_ext.statistics import Statistics, Use
from kvcmas_sgl.triton_kernels import Segment
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
        self, view: KVView, planner: Planner, slots_of: Callable[[Source], Tensor | None], statistics: Statistics
    ) -> None:
        self._view = view
        self._planner = planner
        self._slots_of = slots_of
        self._statistics = statistics

    def run(self, passes: Sequence[Pass]) -> list[list[tuple[int, int]]]:
        """Place what can be placed; per pass the ranges of tokens that need no computing, ascending.

        Tokens that are computed inside a piece get corrected KV too, which the forward pass overwrites. The last token
        of a pass is always computed: SGLang takes the logits there.
        """
        steps = [step for one in passes for step in self._planned(one)]
        done: list[_Step] = []
        try:
            self._correct(steps)
            done = steps
        except Exception:
            # One poisoned source must not cost the other requests their reuse.
            for one in passes:
                own = [step for step in steps if step.one is one]
                try:
                    self._correct(own)
                    done += own
                except Exception:
                    self._failed(one)
        for step in done:
            self._record(step)
        return [[placed for s in done if s.one is one for placed in s.piece.ranges] for one in passes]

    def _planned(self, one: Pass) -> list[_Step]:
        try:
            return self._steps(one)
        except Exception:
            self._failed(one)
            return []

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
