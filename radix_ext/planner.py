"""Chooses what is corrected in a prompt, from which source and with which delta, and says why the rest is not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvcmas_sgl.radix_ext.blocks import Tokens
from kvcmas_sgl.radix_ext.decision import Base, Piece, Reason, SpanReport
from kvcmas_sgl.radix_ext.delta_store import Rows, join
from kvcmas_sgl.radix_ext.gate import Expected, Gate
from kvcmas_sgl.radix_ext.heavy import EFFORTS, heavy_tokens
from kvcmas_sgl.radix_ext.predictor import Predictor
from kvcmas_sgl.radix_ext.request import AUTO_ROLE, AgentRequest
from kvcmas_sgl.radix_ext.sources import Agent, Content, Match, Place, Source, digest, edge
from kvcmas_sgl.triton_kernels import Delta

IDENTICAL = "identical"
OWN = "own"
NONE = "none"

SHORTEST_PIECE = 16
"""Tokens below which computing is as cheap as one more row in the forward pass; shorter rests are computed."""

LEAST_PART = 0.25
"""Share of a span below which nothing of it is placed: it would save little, and the rest, computed over it, would no
longer be the exact KV that other agents are best corrected from."""


class Declined(LookupError):
    """An estimator that knows the edge will not predict the delta of this content."""


def own_key(agent: Agent, context: str) -> str:
    """Name of an own delta: it holds for this agent with exactly these tokens before the span."""
    return digest(agent.key.encode(), context.encode())


@dataclass(frozen=True)
class Wish:
    """How one request is to be planned.

    ``estimator``: its override, or None. ``max_kl``: the budget, nats; infinite where nothing is refused. ``head``: how
    many of a span's first tokens are always computed.
    """

    estimator: str | None = None
    max_kl: float = math.inf
    head: int = 0

    @property
    def always(self) -> bool:
        """Whether a pair of agents that nothing is known of is corrected too."""
        return math.isinf(self.max_kl)


class Planner:
    """Weighs every resident source of a stretch by the predicted KL of a correction from it.

    Parameters
    ----------
    own_rows
        The own delta that a source's nodes hold under a name (`own_key`): its rows in order, or () when incomplete.
    resident
        Whether a source's node still is in the tree.
    agent_prefix
        Names the agent of a prompt that was found by content (`AgentPrefixes.find`).
    score
        Finds the heavy hitters of a source's content now, if it can and nobody has yet.
    min_span
        Shortest span, tokens.
    """

    def __init__(
        self,
        predictor: Predictor,
        default: str,
        gate: Gate,
        own_rows: Callable[[Source, str], Sequence[Rows]],
        resident: Callable[[Source], bool],
        agent_prefix: Callable[[str, Tokens, int | None], tuple[int, str]],
        score: Callable[[Source], None],
        *,
        min_span: int,
    ) -> None:
        self.predictor = predictor
        self.default = default
        self.gate = gate
        self.own_rows = own_rows
        self.resident = resident
        self.agent_prefix = agent_prefix
        self.score = score
        self.min_span = min_span
        # Of prompts whose answers others read: asked once for each of them in a plan.
        self._names: dict[Content, str] = {}

    def plan(self, request: AgentRequest, wish: Wish, spent: float) -> list[Piece]:
        """What to place in the prompt's ``[hit, limit)``; the spans' reports get the reason of what is not.

        ``spent`` is the predicted KL, nats, of corrected KV that the request already stands on. The budget is the
        prompt's as a whole: pieces are taken by how many tokens they save for their KL.
        """
        self._names.clear()
        candidates: list[Sequence[Piece]] = []
        for number, span in enumerate(request.report.spans):
            reason = self._why_not(request, span)
            if reason is None:
                stretches, reason = self._span_choices(request, number, span, wish)
                candidates += stretches
            if reason is not None and not request.settled:
                span.reason = reason
        candidates.sort(key=lambda choices: choices[0].kl / choices[0].tokens)
        taken: list[Piece] = []
        for choices in candidates:
            admitted = (p for p in choices if p.exact or spent + p.kl <= wish.max_kl)
            piece = next(admitted, None)
            if piece is not None:
                spent += piece.kl
                taken.append(piece)
            elif not request.settled:
                span, least = request.report.spans[choices[0].span], choices[-1]
                span.reason = Reason.OVER_BUDGET
                span.source, span.estimator = least.base.agent.role, least.estimator
                span.predicted_error, span.predicted_kl = least.error, least.kl
        return sorted(self._worthwhile(request, taken), key=lambda piece: piece.start)

    def _worthwhile(self, request: AgentRequest, taken: Sequence[Piece]) -> list[Piece]:
        kept: list[Piece] = []
        for number, span in enumerate(request.report.spans):
            pieces = [piece for piece in taken if piece.span == number]
            known = sum(piece.tokens for piece in pieces) + max(0, request.hit - span.start)
            enough = known >= LEAST_PART * (span.stop - span.start)
            kept += (piece for piece in pieces if enough or piece.exact)
            if pieces and not enough and not request.settled:
                span.reason = Reason.MOSTLY_NEW
        return kept

    def bases(self, request: AgentRequest, match: Match) -> list[Base]:
        """Resident KV of a stretch, the newest of each content first."""
        found = []
        for content, offset in match.places:
            for source in content.sources:
                if self.resident(source):
                    found.append(Base(source, self._agent_of(source, offset), offset))
        return found

    def delta(self, piece: Piece, consumer: Agent) -> Delta | None:
        """The delta that a piece applies; None when its base is only moved.

        Raises `Declined` when the estimator, now that it sees the content, will not predict its delta, and another
        LookupError when the delta has been dropped since the piece was planned.
        """
        if piece.estimator in (IDENTICAL, NONE):
            return None
        source = piece.base.source
        if piece.estimator == OWN:
            delta: Delta | None = join(self.own_rows(source, own_key(consumer, piece.context)))
        else:
            delta = self.predictor.delta(piece.estimator, piece.base, consumer, piece.stop - piece.start)
            if delta is None and self.predictor.knows(piece.estimator, piece.base, consumer):
                raise Declined(f"{piece.estimator} declines this content")
        if delta is None:
            raise LookupError(f"the {piece.estimator} delta from {piece.base.agent.role!r} is gone")
        return delta

    def _why_not(self, request: AgentRequest, span: SpanReport) -> Reason | None:
        if request.hit >= span.stop:
            return Reason.OWN_CORRECTED if span.corrected_tokens else Reason.EXACT
        if span.start >= request.limit:
            return Reason.NOT_PREFILLED
        if span.stop - span.start < self.min_span:
            return Reason.TOO_SHORT
        if span.start == 0:
            return Reason.NO_PREFIX
        return None

    def _span_choices(
        self, request: AgentRequest, number: int, span: SpanReport, wish: Wish
    ) -> tuple[list[Sequence[Piece]], Reason | None]:
        """For every stretch of a span its cheapest piece, then those with less error; without any, the reason."""
        found: list[Sequence[Piece]] = []
        reason = Reason.NO_SOURCE
        for match in request.matches[number]:
            bases = self.bases(request, match)
            if not bases:
                continue
            reason = Reason.EDGE_UNKNOWN
            choices = []
            head = max(0, request.head_stop(span, wish.head) - match.start)
            for choice in self._best(request, number, match, bases, wish, head):
                # A copy of KV that was computed over the same tokens needs no exact head.
                behind = choice if choice.estimator == IDENTICAL else choice.cut(match.start + head, choice.stop)
                # What is expected of a span is expected with its head computed: leaving that out takes nothing away.
                piece = behind and replace(behind, kl=choice.kl).cut(request.hit, request.limit)
                if piece is not None and piece.tokens >= min(SHORTEST_PIECE, self.min_span):
                    choices.append(piece)
            if choices:
                found.append(choices)
        return found, None if found else reason

    def _best(
        self, request: AgentRequest, number: int, match: Match, bases: Sequence[Base], wish: Wish, head: int
    ) -> list[Piece]:
        """The piece with the least predicted KL; then, with more and more heavy hitters computed, what has less."""
        consumer = request.agent(match.start)
        context = request.context(match.start)
        length = match.stop - match.start
        # The budget is the whole prompt's: below its part no span will ask for heavy hitters.
        part = wish.max_kl / max(1, len(request.report.spans))

        def piece(base: Base, estimator: str, expected: Expected, exact: bool = False) -> Piece:
            start, stop = match.start, match.stop
            return Piece(number, start, stop, base, estimator, expected.error, expected.kl, context, exact)

        def known(base: Base, error: float) -> Expected:
            error += base.source.error
            return Expected(error, self.gate.kl(edge(base.agent, consumer), self.default, error))

        ways: list[list[Piece]] = [[] for _ in EFFORTS]
        for base in bases:
            on = edge(base.agent, consumer)
            if wish.estimator is None and base.offset == 0 and base.source.context == context:
                # The same tokens stand before it: its KV is the same, whatever the role is called.
                ways[0].append(piece(base, IDENTICAL, known(base, 0.0), base.source.exact))
                continue
            if wish.estimator is None and base.offset == 0 and length == base.source.length:
                rows = self.own_rows(base.source, own_key(consumer, context))
                if rows:
                    ways[0].append(piece(base, OWN, known(base, rows[0].factors.error)))
            name = wish.estimator or self.default
            for way, effort in zip(ways, EFFORTS, strict=True):
                expected = self.gate.expect(on, effort.of(name), length, base.source.error)
                if expected is None:
                    continue
                if effort.share and all(one.kl > part for one in itertools.chain(*ways)):
                    # Who reads right after the first reader must not wait for an idle moment.
                    self.score(base.source)
                tokens = heavy_tokens(base, length, head, effort)
                if tokens is not None:
                    computed = tuple(match.start + offset for offset in tokens.tolist())
                    way.append(replace(piece(base, name, expected), computed=computed))
        if not any(ways) and wish.always:
            ways[0].append(piece(bases[0], NONE, known(bases[0], 0.0)))
        best: list[Piece] = []
        for way in filter(None, ways):
            least = min(way, key=lambda one: one.kl)
            if not best or least.kl < best[-1].kl:
                best.append(least)
        return best

    def _agent_of(self, source: Source, offset: int) -> Agent:
        """Who holds a source; one that was found by content is named by its prompt's agent prefix."""
        if source.agent is not None:
            return source.agent
        if source.sequence_content is not None:
            prompt, place = source.sequence_content, Place.ANSWER
            if prompt not in self._names:
                _, self._names[prompt] = prompt.prefix or self.agent_prefix(prompt.scope, prompt.tokens, None)
            name = self._names[prompt]
        else:
            prompt = source.content
            prompt.prefix = prompt.prefix or self.agent_prefix(prompt.scope, prompt.tokens, offset)
            length, name = prompt.prefix
            place = Place.FIRST if offset < length + self.min_span else Place.LATER
        return Agent(AUTO_ROLE, name, prompt.scope, place)
