"""What the cache knows of one agent request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcmas_sgl.radix_ext.blocks import Tokens
from kvcmas_sgl.radix_ext.decision import Piece, Reason, Report, SpanReport
from kvcmas_sgl.radix_ext.images import NO_IMAGES, Images
from kvcmas_sgl.radix_ext.sources import Agent, Content, Match, Place, as_tokens, token_digest

from kvcmas_sgl.wire import AgentHint

if TYPE_CHECKING:
    from kvcmas_sgl.radix_ext.harvest import HarvestJob
    from kvcmas_sgl.radix_ext.node_marks import Provenance
    from torch import Tensor

AUTO_ROLE = "auto"


@dataclass(frozen=True, eq=False)
class Placed:
    """Corrected KV in a request's own slots (int64 [stop - start]); the tree is to know how it was made."""

    start: int
    stop: int
    slots: Tensor
    mark: Provenance


@dataclass
class AgentRequest:
    """The agent side of one request, kept on SGLang's ``Req`` as ``req.kvcmas``.

    Attributes
    ----------
    hint
        The validated hint, its spans in tokens; None when agents are to be found by content.
    scope
        Digest of the client's ``cache_salt`` and ``extra_key``.
    prompt
        Token ids, int64 [n]; tokens of pictures by their names (`images`).
    report
        What the client will see; ``report.spans`` are the spans, in prompt order.
    prefix
        Length and digest of the agent prefix: what stands before the first shared span.
    first_stop
        A stretch that starts before it stands right after the agent prefix: where the first span ends.
    matches
        Known content in each span, as of ``searched`` (a version of the source index).
    hit, limit
        The last match: length of the exact-cache hit, and the longest prefix that may come from a cache.
    budget
        Quality budget of the last match, nats.
    pieces
        What the next passes are to place; made by the last match.
    placed
        What was placed and the tree does not know yet.
    held
        Locks on the pieces' sources, between admission and the forward pass.
    settled
        The report was counted; a later match (after a retraction) must not change it.
    lessons
        What the prompt can teach once the request is finished.
    published, answered
        The prompt's spans, and the generated text, are known as sources.
    generation
        Of what the cache knew at the last match (`DeltaRadixCache.generation`).
    contexts
        Names of what stands before a token, as far as they were asked for.
    failures
        Where something of ours failed for this request: each is counted once, however often it is tried.
    content
        The whole prompt as content (automatic mode), once it was published.
    images
        The pictures in the prompt.
    """

    hint: AgentHint | None
    scope: str
    prompt: Tokens
    report: Report
    prefix: tuple[int, str]
    first_stop: int
    matches: list[list[Match]] = field(default_factory=list)
    searched: int = -1
    hit: int = 0
    limit: int = 0
    budget: float = 0.0
    pieces: list[Piece] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)
    held: list[object] = field(default_factory=list)
    lessons: list[HarvestJob] = field(default_factory=list)
    settled: bool = False
    published: bool = False
    answered: bool = False
    generation: int = -1
    contexts: dict[int, str] = field(default_factory=dict, repr=False)
    failures: set[str] = field(default_factory=set)
    content: Content | None = None
    images: Images = NO_IMAGES
    info: list[dict[str, object]] = field(default_factory=list)

    @classmethod
    def of(cls, hint: AgentHint | None, prompt: array[int], scope: str, images: Images = NO_IMAGES) -> AgentRequest:
        """Bind a hint, or none for automatic mode, to its prompt (token ids), which may hold pictures."""
        tokens = images.named() if images else as_tokens(prompt)
        if hint is None:
            whole = (len(tokens), token_digest(tokens))
            return cls(hint, scope, tokens, Report(AUTO_ROLE, len(tokens), auto=True), whole, 0, images=images)
        report = Report(hint.role, len(tokens), spans=[SpanReport(start, stop) for start, stop in hint.spans])
        first, stop = hint.spans[0] if hint.spans else (len(tokens), 0)
        return cls(hint, scope, tokens, report, (first, token_digest(tokens[:first])), stop, images=images)

    @property
    def auto(self) -> bool:
        return self.hint is None

    @property
    def reused(self) -> bool:
        """Whether KV was corrected for this request."""
        return any(span.reason is Reason.REUSED for span in self.report.spans)

    def head_stop(self, span: SpanReport, head: int) -> int:
        """Where the first ``head`` tokens of a span end; a head that would end inside a picture ends before it.

        Computing a few of a picture's tokens would run the vision tower for all of it. What the shorter head costs in
        KL is what audits measure, since they take the same one.
        """
        return max(span.start, self.images.border(span.start + head))

    def agent(self, start: int) -> Agent:
        """This request's agent, at a stretch that starts at ``start`` (past the prompt: its answer)."""
        place = Place.FIRST if start < self.first_stop else Place.LATER
        if start >= len(self.prompt):
            place = Place.ANSWER
        return Agent(self.report.role, self.prefix[1], self.scope, place)

    def context(self, stop: int) -> str:
        """Name of all tokens before ``stop``."""
        if stop not in self.contexts:
            # A waiting request is planned anew in every round.
            self.contexts[stop] = token_digest(self.prompt[:stop])
        return self.contexts[stop]

    def found(
        self, matches: Sequence[Match], version: int, prefix: tuple[int, str] | None = None, first_stop: int = 0
    ) -> None:
        """Take the result of a search of the source index; in automatic mode every match is a span.

        ``prefix`` and ``first_stop`` are what automatic mode goes by from now on.
        """
        self.searched = version
        if self.auto:
            if prefix is not None:
                self.prefix, self.first_stop = prefix, first_stop
            self.report.spans = [SpanReport(match.start, match.stop) for match in matches]
        self.matches = [
            [match for match in matches if span.start <= match.start < span.stop] for span in self.report.spans
        ]

    def corrected_ahead(self, have: int, fresh: int | None) -> int:
        """Tokens that pieces will place before ``fresh`` tokens from ``have`` on have been computed (None: at all)."""
        corrected, at = 0, have
        for start, stop in (placed for piece in self.pieces for placed in piece.ranges):
            if stop <= at:
                continue
            gap = max(0, start - at)
            if fresh is not None:
                if gap >= fresh:
                    break
                fresh -= gap
            at = max(at, start)
            corrected += stop - at
            at = stop
        return corrected

    def corrected_within(self, start: int, stop: int) -> int:
        """Tokens of ``[start, stop)`` that pieces will place."""
        parts = (piece.cut(start, stop) for piece in self.pieces)
        return sum(part.tokens for part in parts if part is not None)

    def publish_report(self) -> None:
        """Refresh the dictionary that travels to the client."""
        self.info[:] = [self.report.as_dict()]
