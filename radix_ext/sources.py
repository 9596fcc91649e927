"""From content to the resident KV that a correction can start from."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvcmas_sgl.radix_ext.estimators import Edge

MAX_SOURCES_PER_CONTENT = 8
MAX_CONTENTS = 1 << 16

_sequence = itertools.count()


@dataclass(frozen=True)
class Agent:
    """One agent identity: its role, and the tokens that stand before its span.

    Two system prompts under one role name are two agents: what was learned of one says nothing of the other.

    Attributes
    ----------
    role
        The name that the client gave.
    prefix
        Digest of the agent prefix (its tokens before the span).
    scope
        Digest of the client's ``cache_salt`` and ``extra_key``; nothing is shared across scopes.
    """

    role: str
    prefix: str
    scope: str

    @property
    def key(self) -> str:
        """Name used for estimator edges."""
        return f"{self.role}#{self.prefix}"


@dataclass(frozen=True)
class Source:
    """Resident KV of one content, as one agent holds it.

    Attributes
    ----------
    content
        Key of the content (`content_key`).
    agent
        Whose context the KV was made in.
    node
        Id of the tree node that ends exactly where the span ends.
    start, length
        Position of the span's first token in its sequence, and its number of tokens.
    error
        Accumulated predicted relative error of this KV; 0.0 for KV from a dense run.
    exact
        Whether the KV came from a dense run.
    """

    content: str
    agent: Agent
    node: int
    start: int
    length: int
    error: float = 0.0
    exact: bool = True
    sequence: int = field(default_factory=lambda: next(_sequence))

    @property
    def stop(self) -> int:
        return self.start + self.length


def edge(source: Agent, consumer: Agent) -> Edge:
    """The edge that this pair of agents learns on, in the consumer's scope."""
    return Edge(consumer.scope, source.key, consumer.key)


def digest(*parts: bytes) -> str:
    """Collision-resistant name of some bytes (128 bits of BLAKE2b over length-prefixed parts)."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


def content_key(scope: str, tokens: array[int]) -> str:
    """Key of a span's content: its tokens within one scope."""
    return digest(scope.encode(), tokens.tobytes())


class SourceIndex:
    """Sources by content, newest first; bounded in contents and in sources per content.

    The index never keeps KV alive: when the tree drops a node, `node_gone` drops its sources.
    """

    def __init__(self) -> None:
        self._by_content: OrderedDict[str, list[Source]] = OrderedDict()
        self._by_node: dict[int, set[str]] = {}

    def __len__(self) -> int:
        return sum(len(sources) for sources in self._by_content.values())

    def __iter__(self) -> Iterator[Source]:
        return itertools.chain.from_iterable(self._by_content.values())

    def lookup(self, content: str) -> list[Source]:
        """Sources of a content, newest first; the list is the caller's own."""
        sources = self._by_content.get(content)
        if sources is None:
            return []
        self._by_content.move_to_end(content)
        return list(sources)

    def find(self, content: str, agent: Agent) -> Source | None:
        """The source that an agent holds of a content."""
        return next((s for s in self._by_content.get(content, ()) if s.agent == agent), None)

    def add(self, source: Source) -> None:
        """Make a source the newest of its content; it replaces the same agent's earlier one."""
        known = [s for s in self._by_content.get(source.content, ()) if s.agent != source.agent]
        kept = [source, *known]
        if len(kept) > MAX_SOURCES_PER_CONTENT:
            # An exact source is worth more than an approximate one of the same age.
            victim = next((s for s in reversed(kept) if not s.exact), kept[-1])
            kept.remove(victim)
        self._set(source.content, kept)
        while len(self._by_content) > MAX_CONTENTS:
            self._set(next(iter(self._by_content)), [])

    def node_gone(self, node: int) -> None:
        """Drop every source that ends at a node which left the tree."""
        for content in list(self._by_node.get(node, ())):
            self._set(content, [s for s in self._by_content[content] if s.node != node])

    def clear(self) -> None:
        self._by_content.clear()
        self._by_node.clear()

    def _set(self, content: str, sources: list[Source]) -> None:
        before = {s.node for s in self._by_content.get(content, ())}
        after = {s.node for s in sources}
        for node in before - after:
            contents = self._by_node[node]
            contents.discard(content)
            if not contents:
                del self._by_node[node]
        for node in after - before:
            self._by_node.setdefault(node, set()).add(content)
        if sources:
            self._by_content[content] = sources
            self._by_content.move_to_end(content)
        else:
            self._by_content.pop(content, None)
