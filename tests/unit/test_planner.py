"""What is reused from whom: errors add along a chain, the budget is the prompt's, and every refusal has its reason."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace

import numpy as np
import pytest
from kvcmas_sgl.radix_ext.agent_prefixes import AgentPrefixes
from kvcmas_sgl.radix_ext.decision import Piece, Reason
from kvcmas_sgl.radix_ext.estimators import make_estimator
from kvcmas_sgl.radix_ext.gate import KL_PER_SQUARED_ERROR, MIN_PAIRS, Gate
from kvcmas_sgl.radix_ext.heavy import EFFORTS
from kvcmas_sgl.radix_ext.kv_view import KVView
from kvcmas_sgl.radix_ext.planner import Planner, Wish
from kvcmas_sgl.radix_ext.predictor import Predictor
from kvcmas_sgl.radix_ext.request import AgentRequest
from kvcmas_sgl.radix_ext.sources import Agent, Source, SourceIndex, edge, token_digest
from kvcmas_sgl.triton_kernels import RotaryTable

from kvcmas_sgl.wire import AgentHint

PREFIX, SPAN = 10, 80
PROMPT = array("q", range(PREFIX + SPAN + 10))
CONTENT = np.arange(PREFIX, PREFIX + SPAN)
SQUARED_ERROR = 0.0005

VIEW = KVView([], [], RotaryTable.from_theta(1e4, 8, 64))


class Case:
    """A planner over an index in which everything is resident."""

    def __init__(self, max_kl: float = 0.02, head: int = 0) -> None:
        self.index, self.gate = SourceIndex(16), Gate()
        estimators = {n: make_estimator(n, layers=2, kv_heads=1, head_dim=8, rank=4) for n in ("affine", "none")}
        self.planner = Planner(
            Predictor(estimators, VIEW, lambda source: None),
            "affine",
            self.gate,
            lambda source, name: [],
            lambda source: True,
            AgentPrefixes().find,
            self._score,
            min_span=16,
        )
        self.scored: list[Source] = []
        self.head, self.max_kl = head, max_kl

    def _score(self, source: Source) -> None:
        if source.content.heavy is None:
            self.scored.append(source)
            source.content.heavy = np.arange(source.length, dtype=np.float32)

    def source(self, role: str, *, error: float = 0.0, context: str = "elsewhere", tokens: object = CONTENT) -> Source:
        content = self.index.content("s", np.array(tokens))
        agent = Agent(role, f"p-{role}", "s")
        source = Source(content, agent, context, len(self.index), 4, error=error, exact=error == 0)
        self.index.add(source)
        return source

    def request(self, spans: tuple[tuple[int, int], ...] = ((PREFIX, PREFIX + SPAN),)) -> AgentRequest:
        request = AgentRequest.of(AgentHint("critic", spans), PROMPT, "s")
        request.hit, request.limit = 3, len(PROMPT) - 1
        return request

    def learn(self, *sources: Source, squared_error: float = SQUARED_ERROR) -> None:
        for known in sources:
            for _ in range(MIN_PAIRS):
                on = edge(known.agent, self.request().agent(PREFIX))
                self.gate.record(on, "affine", squared_error=squared_error, tokens=SPAN)

    def plan(self, request: AgentRequest, *, always: bool = False, spent: float = 0.0) -> list[Piece]:
        matches = [
            match
            for span in request.report.spans
            for match in self.index.find("s", request.prompt, span.start, span.stop)
        ]
        request.found(matches, self.index.version)
        return self.planner.plan(request, Wish(None, math.inf if always else self.max_kl, self.head), spent)

    def reason(self, request: AgentRequest) -> Reason:
        assert self.plan(request) == []
        return request.report.spans[0].reason


# For two pairs the margin of the error is 1 + 1/2, and one KL in fifty is so much above the mean (test_gate).
ERROR = math.sqrt(SQUARED_ERROR * 1.5)
UNSEEN = math.exp(2.0537489 * math.sqrt(4 * 0.4225 / 5) * math.sqrt(1.5))
KL = UNSEEN * KL_PER_SQUARED_ERROR * SQUARED_ERROR


def test_reasons_for_refusal() -> None:
    case = Case()
    assert case.reason(case.request()) is Reason.NO_SOURCE
    case.source("planner")
    assert case.reason(case.request()) is Reason.EDGE_UNKNOWN
    assert case.reason(case.request(((PREFIX, PREFIX + 15),))) is Reason.TOO_SHORT
    assert case.reason(case.request(((0, SPAN),))) is Reason.NO_PREFIX
    case.learn(*case.index, squared_error=1.0)
    request = case.request()
    assert case.reason(request) is Reason.OVER_BUDGET
    assert request.report.spans[0].predicted_kl == pytest.approx(UNSEEN * KL_PER_SQUARED_ERROR)
    resident = case.request()
    resident.hit = PREFIX + SPAN
    assert case.reason(resident) is Reason.EXACT
    asked_for = case.request()
    asked_for.limit = PREFIX
    assert case.reason(asked_for) is Reason.NOT_PREFILLED


def test_errors_add_along_the_chain_and_the_exact_source_wins_when_the_sum_says_so() -> None:
    case = Case()
    exact, newest = case.source("planner"), case.source("writer", error=0.05)
    case.learn(exact, newest)
    (piece,) = case.plan(case.request())
    assert piece.base.source is exact and piece.error == pytest.approx(ERROR)
    assert piece.kl == pytest.approx(KL)
    alone = Case(max_kl=1.0)
    alone.learn(alone.source("writer", error=0.05))
    (piece,) = alone.plan(alone.request())
    assert piece.error == pytest.approx(0.05 + ERROR)


def test_the_same_tokens_before_it_need_no_learning_and_are_exact() -> None:
    case = Case(max_kl=0.0, head=8)
    case.source("twin", context=token_digest(np.array(PROMPT[:PREFIX])))
    request = case.request()
    (piece,) = case.plan(request)
    # Bit for bit the same, so not even the head is computed.
    assert piece.exact and (piece.start, piece.stop, piece.error) == (PREFIX, PREFIX + SPAN, 0.0)
    assert case.planner.delta(piece, request.agent(PREFIX)) is None


def test_always_overrides_the_budget_but_says_what_it_predicts() -> None:
    case = Case()
    case.learn(case.source("planner"), squared_error=1.0)
    (piece,) = case.plan(case.request(), always=True)
    assert piece.kl > 0.02


def test_heavy_hitters_are_found_at_once_only_where_the_cheapest_way_may_not_do() -> None:
    easy, hard = Case(), Case()
    for case, squared_error in ((easy, SQUARED_ERROR), (hard, 1.0)):
        source = case.source("planner")
        case.learn(source, squared_error=squared_error)
        on = edge(source.agent, case.request().agent(PREFIX))
        for _ in range(MIN_PAIRS):
            case.gate.record(on, EFFORTS[1].of("affine"), squared_error=SQUARED_ERROR, tokens=SPAN)
    (piece,) = easy.plan(easy.request())
    assert piece.computed == () and easy.scored == []
    (piece,) = hard.plan(hard.request())
    assert len(piece.computed) == EFFORTS[1].fewest and hard.scored == list(hard.index)
    # Two spans share the budget: what is enough for one may not be for both.
    both = easy.request(((PREFIX, PREFIX + 40), (PREFIX + 40, PREFIX + SPAN)))
    easy.max_kl = 1.5 * 2 * KL
    easy.plan(both)
    assert easy.scored == list(easy.index)


def test_what_the_prompt_stands_on_counts_against_the_budget() -> None:
    case = Case(max_kl=0.012)
    case.learn(case.source("planner"))
    kl = KL
    assert len(case.plan(case.request(), spent=0.012 - kl - 1e-9)) == 1
    assert case.plan(case.request(), spent=0.012 - kl + 1e-9) == []


def test_the_head_and_what_is_resident_are_left_out() -> None:
    case = Case(head=8)
    case.learn(case.source("planner"))
    (piece,) = case.plan(case.request())
    assert (piece.start, piece.stop, piece.base.offset) == (PREFIX + 8, PREFIX + SPAN, 8)
    # The gate's figure is for a span whose head is computed.
    assert piece.kl == pytest.approx(KL)
    request = case.request()
    request.hit = PREFIX + 30
    (piece,) = case.plan(request)
    assert (piece.start, piece.base.offset) == (PREFIX + 30, 30)
    request.hit = PREFIX + SPAN - 5
    assert case.plan(request) == []


def test_a_delta_that_was_dropped_is_an_error() -> None:
    case = Case()
    case.learn(case.source("planner"))
    request = case.request()
    (piece,) = case.plan(request)
    with pytest.raises(LookupError, match="affine delta from 'planner' is gone"):
        case.planner.delta(piece, request.agent(PREFIX))
    with pytest.raises(LookupError, match="own delta"):
        case.planner.delta(replace(piece, estimator="own"), request.agent(PREFIX))


def test_pieces_are_cut_with_their_offset_and_their_share_of_the_kl() -> None:
    case = Case()
    case.learn(case.source("planner"))
    (piece,) = case.plan(case.request())
    part = piece.cut(PREFIX + 20, PREFIX + 40)
    assert part is not None and (part.start, part.stop, part.base.offset) == (PREFIX + 20, PREFIX + 40, 20)
    assert part.kl == pytest.approx(piece.kl / 4)
    assert piece.cut(0, PREFIX) is None and piece.cut(PREFIX + SPAN, 1000) is None


def test_tokens_ahead_are_counted_until_the_fresh_ones_run_out() -> None:
    case = Case()
    case.learn(case.source("planner"))
    request = case.request()
    request.pieces = case.plan(request)
    assert request.corrected_ahead(3, None) == SPAN
    # Seven tokens of prefix have to be computed before the span is reached.
    assert request.corrected_ahead(3, PREFIX - 3) == 0
    assert request.corrected_ahead(3, PREFIX - 2) == SPAN
    assert request.corrected_ahead(PREFIX + 50, 1) == SPAN - 50
    assert request.corrected_within(0, PREFIX + 5) == 5
