"""Spans and sources on SGLang's tree: from a source to its slots and nodes, and what a path is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcmas_sgl.radix_ext.delta_store import DeltaStore, Rows
from kvcmas_sgl.radix_ext.node_marks import Provenance, get_delta, path_to, provenance, set_delta
from kvcmas_sgl.radix_ext.sources import Source
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import MatchResult
    from sglang.srt.mem_cache.unified_radix_cache import NodeId, UnifiedRadixCache, UnifiedTreeNode


class SpanTree:
    """Reads a cache's tree; changes nothing but the own deltas on its nodes."""

    def __init__(self, cache: UnifiedRadixCache, deltas: DeltaStore) -> None:
        self._cache = cache
        self._deltas = deltas

    def node(self, node_id: NodeId) -> UnifiedTreeNode | None:
        """A node by its id; None when it has left the tree."""
        try:
            return self._cache.tree_core.node_by_id(node_id)
        except KeyError:
            return None

    def resident(self, source: Source) -> bool:
        """Whether a source's KV still is in the tree."""
        return self.node(source.node) is not None

    def slots(self, source: Source) -> Tensor | None:
        """Slots (int64 [n]) of a source's span in the pool; None when it has left the tree."""
        path = self.path(source)
        return None if path is None else path[source.start : source.stop]

    def path(self, source: Source) -> Tensor | None:
        """Slots of everything up to the end of a source's content; None when it has left the tree."""
        if source.held is not None:
            return source.held[: source.stop]
        return None if self.node(source.node) is None else self._cache.path_device_indices(source.node)

    def nodes(self, source: Source) -> list[UnifiedTreeNode]:
        """The nodes that a source's span consists of, in order; empty when it has left the tree."""
        node = self.node(source.node)
        if node is None:
            return []
        nodes, left = [], source.length
        for step in path_to(node):
            if left <= 0:
                break
            nodes.append(step)
            left -= len(step.key)
        # The tree was cut at both ends of the span when the source was published.
        assert left == 0, (source, left)
        return nodes[::-1]

    def own_rows(self, source: Source, consumer: str) -> list[Rows]:
        """The consumer's own delta on a source's nodes, in order; empty when any part of it is missing."""
        parts = [get_delta(node, consumer, self._deltas) for node in self.nodes(source)]
        rows = [part for part in parts if part is not None]
        if len(rows) < len(parts) or any(part.factors is not rows[0].factors for part in rows):
            return []
        return rows

    def attach(self, source: Source, consumer: str, rows: Rows) -> None:
        """Put a consumer's own delta of a whole span on the source's nodes."""
        at = 0
        for node in self.nodes(source):
            set_delta(node, consumer, rows.cut(at, at + len(node.key)), self._deltas)
            at += len(node.key)

    def marks(self, node_id: NodeId, start: int = 0) -> list[tuple[Provenance, int, int]]:
        """Provenance and token range of the corrected nodes on a path that end after ``start``, in order."""
        node = self._cache.tree_core.node_by_id(node_id)
        stop = sum(len(step.key) for step in path_to(node))
        found = []
        for step in path_to(node):
            if stop <= start:
                break
            mark = provenance(step)
            if mark is not None:
                found.append((mark, stop - len(step.key), stop))
            stop -= len(step.key)
        return found[::-1]

    def exact_length(self, node_id: NodeId) -> int | None:
        """Tokens on a path before its first corrected one, or None when all of it is exact."""
        below, first = 0, None
        for node in path_to(self._cache.tree_core.node_by_id(node_id)):
            below += len(node.key)
            if provenance(node) is not None:
                first = below
        return None if first is None else below - first

    def cut(self, result: MatchResult, length: int) -> MatchResult:
        """A match shortened to ``length`` tokens, which must be a node boundary."""
        node, have = self._cache.tree_core.node_by_id(result.last_device_node), result.device_prefix_len
        while have > length:
            have -= len(node.key)
            node = node.parent
        return result._replace(
            device_prefix_len=have, last_device_node=node.id, last_host_node=node.id, best_match_node=node.id
        )
