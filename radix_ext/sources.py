"""From content to the resident KV that a correction can start from.

A *content* is a run of tokens that somebody holds: a shared span, an agent's answer, or (in automatic mode) a whole
prompt. A *source* is one agent's resident KV of a content. `SourceIndex.find` tells which stretches of a prompt are
known content, wherever they start in it and in the content.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from kvcmas_sgl.radix_ext.blocks import BlockTable, Tokens
from kvcmas_sgl.radix_ext.estimators import Edge
from torch import Tensor

MAX_SOURCES_PER_CONTENT = 8
MAX_TOKENS = 1 << 22
"""Tokens of all contents together; some 60 bytes each with their blocks. The least recently used contents go first."""

NEARLY = 0.9
"""Share of the longest stretch that another content must cover to be a source of it too."""

GROW_TOKENS = 64
"""Tokens that a search may find equal, over all the places it looks at, for each token of the prompt."""

_sequence = itertools.count()


class Place(enum.StrEnum):
    """Where a stretch stands in its agent's sequence: what comes before it decides what its KV looks like."""

    FIRST = "first"
    """The first shared span: only the agent prefix stands before it."""
    LATER = "later"
    """A later span: other shared text stands before it."""
    ANSWER = "answer"
    """The agent's own generated text."""


@dataclass(frozen=True)
class Agent:
    """One agent identity: its role, the tokens that stand before its first shared span, and the place in its prompt.

    Two system prompts under one role name are two agents: what was learned of one says nothing of the other.

    Attributes
    ----------
    role
        The name that the client gave.
    prefix
        Digest of the agent prefix (its tokens before the first shared span).
    scope
        Digest of the client's ``cache_salt`` and ``extra_key``; nothing is shared across scopes.
    place
        Which kind of stretch of this agent's sequence is meant.
    """

    role: str
    prefix: str
    scope: str
    place: Place = Place.FIRST

    @property
    def key(self) -> str:
        """Name used for estimator edges."""
        return f"{self.role}#{self.prefix}@{self.place}"

    @staticmethod
    def read_key(key: str) -> tuple[str, str]:
        """Role and place of the agent with a `key`."""
        role, rest = key.rsplit("#", 1)
        return role, rest.rsplit("@", 1)[1]


@dataclass(eq=False)
class Content:
    """A run of tokens within one scope, and who holds its KV, newest first.

    ``prefix`` is the agent prefix (length and digest) of a whole prompt that was found by content, once it is known.
    ``heavy`` says how much later text looks at each token (`heavy`), fp32 [n], once that was worked out.
    """

    scope: str
    tokens: Tokens
    sources: list[Source] = field(default_factory=list)
    prefix: tuple[int, str] | None = None
    heavy: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Source:
    """Resident KV of one content, as one agent holds it.

    Attributes
    ----------
    content
        The tokens.
    agent
        Whose context the KV was made in. None in automatic mode, where it follows from ``sequence_content``.
    context
        Digest of all tokens before the content in the source's sequence.
    node
        Id of the tree node that ends exactly where the content ends.
    start
        Position of the content's first token in its sequence.
    error
        Accumulated predicted relative error of this KV; 0.0 for KV from a dense run.
    exact
        Whether it, and all before it, came from a dense run.
    computed
        Whether the model computed all of it (perhaps over corrected KV before it): such KV can be learned from.
    sequence_content
        In automatic mode the prompt that this source belongs to.
    held
        Slots (int64 [n]) of the source's sequence where it is in no tree: a dense run that only a check keeps.
    """

    content: Content
    agent: Agent | None
    context: str
    node: int
    start: int
    error: float = 0.0
    exact: bool = True
    computed: bool = True
    sequence_content: Content | None = None
    held: Tensor | None = None
    sequence: int = field(default_factory=lambda: next(_sequence))

    @property
    def length(self) -> int:
        return len(self.content.tokens)

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Match:
    """A stretch of a prompt that is known content: tokens ``[start, stop)``, and where they stand in which contents."""

    start: int
    stop: int
    places: tuple[tuple[Content, int], ...]


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


def scope_digest(extra_key: str | None = None, cache_salt: str | None = None) -> str:
    """Name of a scope: what a client's ``extra_key`` and ``cache_salt`` isolate. The same in every process."""
    # JSON can spell lone surrogates, which UTF-8 cannot.
    return digest(*((name or "").encode(errors="surrogatepass") for name in (extra_key, cache_salt)))


def as_tokens(ids: array[int]) -> Tokens:
    """SGLang's token array (``array('q')``) as int64 [n], without a copy."""
    return np.frombuffer(ids, dtype=np.int64) if len(ids) else np.empty(0, np.int64)


def token_digest(tokens: Tokens) -> str:
    """Name of a token sequence."""
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest()


def prefix_digests(tokens: Tokens, lengths: Sequence[int]) -> list[str]:
    """`token_digest` of the first so many tokens, for ascending ``lengths``; every token is hashed once."""
    hasher, at, names = hashlib.blake2b(digest_size=16), 0, []
    for length in lengths:
        hasher.update(tokens[at:length].tobytes())
        at = length
        names.append(hasher.copy().hexdigest())
    return names


class SourceIndex:
    """Contents and their sources; bounded in tokens and in sources per content.

    The index never keeps KV alive: when the tree drops a node, `node_gone` drops its sources.

    Parameters
    ----------
    shortest
        Shortest stretch, in tokens, that `find` reports. Every stretch of that length is found.
    """

    def __init__(self, shortest: int) -> None:
        self.shortest = shortest
        self._block = (shortest + 1) // 2
        self._contents: OrderedDict[tuple[str, str], Content] = OrderedDict()
        self._tables: dict[str, BlockTable[Content]] = {}
        self._by_node: dict[int, list[Source]] = {}
        self.tokens = 0
        self.version = 0
        """Changes whenever `find` may answer differently."""

    def __len__(self) -> int:
        return sum(len(content.sources) for content in self._contents.values())

    def __iter__(self) -> Iterator[Source]:
        return itertools.chain.from_iterable(content.sources for content in self._contents.values())

    def content(self, scope: str, tokens: Tokens) -> Content:
        """The content of these tokens (int64 [n]); unknown ones become known by `add`."""
        known = self._contents.get((scope, token_digest(tokens)))
        return Content(scope, np.array(tokens)) if known is None else known

    def add(self, source: Source) -> None:
        """Make a source the newest of its content; it replaces what the same agent holds in the same place."""
        content = source.content
        key = (content.scope, token_digest(content.tokens))
        if key not in self._contents:
            self._contents[key] = content
            self._tables.setdefault(content.scope, BlockTable(self._block)).add(content, content.tokens)
            self.tokens += len(content.tokens)
        self._contents.move_to_end(key)
        replaced = [s for s in content.sources if s.agent == source.agent]
        content.sources.insert(0, source)
        self._by_node.setdefault(source.node, []).append(source)
        for old in replaced:
            self._detach(old)
        if len(content.sources) > MAX_SOURCES_PER_CONTENT:
            # An exact source is worth more than an approximate one of the same age.
            victim = next((s for s in reversed(content.sources) if not s.exact), content.sources[-1])
            self._detach(victim)
        while self.tokens > MAX_TOKENS and len(self._contents) > 1:
            self._forget(next(iter(self._contents)))
        self.version += 1

    def find(self, scope: str, prompt: Tokens, start: int, stop: int) -> list[Match]:
        """Known stretches inside ``prompt[start:stop]``: disjoint, ascending, each as long as it can be.

        Contents that cover almost the same stretch share a match, cut to what they have in common. A stretch that is
        the beginning of the prompt and of a content alike is left out: that is the exact prefix cache's, not ours.
        """
        table = self._tables.get(scope)
        matches: list[Match] = []
        if table is None or stop - start < self.shortest:
            return matches
        at, tries = start, 64 + 4 * (stop - start) // self._block
        # Texts can be made to agree at many shifts, each time for long: what is compared is linear in the prompt.
        room = GROW_TOKENS * (stop - start)
        # Where each content would start in the prompt -> the stretch that it covers.
        found: dict[tuple[Content, int], tuple[int, int]] = {}
        window = start
        prefixes: dict[Content, int] = {}
        for offset, places in table.hits(prompt[start:stop]):
            position = start + offset
            if found and position >= window:
                matches.append(_share(found))
                at, found = matches[-1].stop, {}
            for content, inside in places:
                shift = position - inside
                if position < at or (content, shift) in found or (shift == 0 and position < prefixes.get(content, 0)):
                    continue
                if tries <= 0 or room <= 0:
                    break
                first, last = _grow(prompt, content.tokens, position, inside, at, stop)
                tries, room = tries - 1, room - (last - first)
                if first == 0 == shift:
                    prefixes[content] = last
                elif last - first >= self.shortest:
                    # A content that covers nearly all of it starts no later, and its first whole block soon after.
                    slack = int((1 - NEARLY) * (last - first)) + 2 * self._block
                    window = max(window, first + slack) if found else first + slack
                    found[content, shift] = (first, last)
        if found:
            matches.append(_share(found))
        return matches

    def node_gone(self, node: int) -> None:
        """Drop every source that ends at a node which left the tree."""
        for source in list(self._by_node.get(node, ())):
            self._detach(source)

    def clear(self) -> None:
        self._contents.clear()
        self._tables.clear()
        self._by_node.clear()
        self.tokens = 0
        self.version += 1

    def _detach(self, source: Source) -> None:
        self._unlink(source)
        content = source.content
        if not content.sources:
            self._forget((content.scope, token_digest(content.tokens)))
        self.version += 1

    def _unlink(self, source: Source) -> None:
        source.content.sources.remove(source)
        held = self._by_node[source.node]
        held.remove(source)
        if not held:
            del self._by_node[source.node]

    def _forget(self, key: tuple[str, str]) -> None:
        content = self._contents.pop(key, None)
        if content is None:
            return
        for source in list(content.sources):
            self._unlink(source)
        # Where newer contents have displaced all of its blocks, the table may have gone with them.
        if (table := self._tables.get(content.scope)) is not None:
            table.remove(content, content.tokens)
            if not table:
                del self._tables[content.scope]
        self.tokens -= len(content.tokens)
        self.version += 1


def _share(found: dict[tuple[Content, int], tuple[int, int]]) -> Match:
    """The longest stretch, cut to what it shares with those that cover nearly all of it; newest contents first."""
    ranked = sorted(found.items(), key=lambda item: item[1][0] - item[1][1])
    first, last = ranked[0][1]
    least = NEARLY * (last - first)
    places = []
    for (content, shift), (start, stop) in ranked:
        if min(stop, last) - max(start, first) >= least:
            first, last = max(start, first), min(stop, last)
            places.append((content, shift))
    newest = sorted(places, key=lambda place: max(s.sequence for s in place[0].sources), reverse=True)
    return Match(first, last, tuple((content, first - shift) for content, shift in newest))


def _grow(prompt: Tokens, tokens: Tokens, position: int, inside: int, low: int, high: int) -> tuple[int, int]:
    """The stretch of ``prompt[low:high]`` around ``position`` that equals ``tokens`` around ``inside``."""
    back, ahead = min(position - low, inside), min(high - position, len(tokens) - inside)
    before = _agree(prompt[position - back : position][::-1], tokens[inside - back : inside][::-1])
    return position - before, position + _agree(prompt[position : position + ahead], tokens[inside : inside + ahead])


def _agree(a: Tokens, b: Tokens) -> int:
    """Length of the common beginning of two arrays of one length; takes time in proportion to it, not to theirs."""
    at, step = 0, 64
    while at < len(a):
        differ = a[at : at + step] != b[at : at + step]
        if differ.any():
            return at + int(differ.argmax())
        at, step = at + step, 2 * step
    return len(a)
