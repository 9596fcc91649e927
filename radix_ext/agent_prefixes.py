"""How automatic mode names an agent: by the prefix of its prompts that nobody shares.

The names outlive the KV, and the process: pairs of agents that have learned are known by them.
"""

from __future__ import annotations

from collections import OrderedDict

from kvcmas_sgl.radix_ext.blocks import Tokens
from kvcmas_sgl.radix_ext.sources import prefix_digests, token_digest
from kvcmas_sgl.radix_ext.state_file import State, StateError, count

MAX_PREFIXES = 1024
"""Agent prefixes that are remembered; the least recently met go first."""


class AgentPrefixes:
    """Known agent prefixes, by scope, length in tokens and digest."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, int, str], None] = OrderedDict()

    def find(self, scope: str, tokens: Tokens, first: int | None) -> tuple[int, str]:
        """Length and digest of a prompt's agent prefix, when the first content that it shares starts at ``first``.

        It is the longest known prefix that ends no later; what stands between is text that nobody else was seen with.
        Without any, the prompt up to ``first`` becomes a known one. None: no shared content is known.
        """
        register, first = first is not None, len(tokens) if first is None else first
        lengths = sorted({n for known, n, _ in self._known if known == scope and n <= first})
        for length, name in reversed(list(zip(lengths, prefix_digests(tokens, lengths), strict=True))):
            if (scope, length, name) in self._known:
                self._known.move_to_end((scope, length, name))
                return length, name
        name = token_digest(tokens[:first])
        if not register:
            return first, name
        self._known[scope, first, name] = None
        if len(self._known) > MAX_PREFIXES:
            self._known.popitem(last=False)
        return first, name

    def clear(self) -> None:
        self._known.clear()

    def drop_scope(self, scope: str) -> None:
        """Forget the agents of one scope."""
        for key in [key for key in self._known if key[0] == scope]:
            del self._known[key]

    def scopes(self) -> set[str]:
        return {scope for scope, _, _ in self._known}

    def state(self) -> State:
        """All of them, the least recently met first."""
        return State({}, [list(key) for key in self._known])

    def load(self, state: State) -> None:
        """Know those of ``state`` in place of its own. Raises `StateError`, and then nothing changes."""
        loaded: OrderedDict[tuple[str, int, str], None] = OrderedDict()
        for scope, length, name in state.data:
            if not isinstance(scope, str) or not isinstance(name, str):
                raise StateError(f"{[scope, name]} stands where two digests must be")
            loaded[scope, count(length), name] = None
        self._known = loaded
