"""What the cache knows of one agent request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvcmas_sgl.radix_ext.decision import Plan, Report
from kvcmas_sgl.radix_ext.sources import Agent, content_key, digest

from kvcmas_sgl.wire import AgentHint


@dataclass
class AgentRequest:
    """The agent side of one request, kept on SGLang's ``Req`` as ``req.kvcmas``.

    Attributes
    ----------
    hint
        The validated hint, its spans in tokens.
    agent, content
        Identity of the consumer and of its span; ``content`` is None when no span is marked.
    start, stop
        The span's token range in the prompt (0, 0 without one).
    report
        What the client will see.
    plan
        What ``init_load_back`` is to place; set by the last match, taken by the load.
    settled
        The report was counted; a later match (after a retraction) must not change it.
    published
        The span's KV is in the tree and known as a source.
    """

    hint: AgentHint
    agent: Agent
    content: str | None
    start: int
    stop: int
    report: Report
    plan: Plan | None = None
    settled: bool = False
    published: bool = False
    info: list[dict[str, object]] = field(default_factory=list)

    @classmethod
    def of(cls, hint: AgentHint, prompt: array[int], scope: str) -> AgentRequest:
        """Bind a hint to its prompt (token ids). The first span is the one that is reused."""
        start, stop = hint.spans[0] if hint.spans else (0, 0)
        agent = Agent(hint.role, digest(prompt[:start].tobytes()), scope)
        content = content_key(scope, prompt[start:stop]) if stop > start else None
        return cls(hint, agent, content, start, stop, Report(hint.role, len(prompt)))

    def publish_report(self) -> None:
        """Refresh the dictionary that travels to the client."""
        self.info[:] = [self.report.as_dict()]
