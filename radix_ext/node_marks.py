"""What our FULL component keeps on the tree's nodes, and how it follows splits and evictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcmas_sgl.radix_ext.delta_store import DeltaStore, Rows
from sglang.srt.mem_cache.unified_cache.components import (
    BASE_COMPONENT_TYPE,
    EvictLayer,
    FullComponent,
)

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache, UnifiedTreeNode
    from torch import Tensor

_PROVENANCE = "kvcmas_provenance"
_DELTAS = "kvcmas_deltas"


@dataclass(frozen=True)
class Provenance:
    """How corrected KV was made. A node without one holds KV that the model computed.

    ``error`` is the accumulated predicted relative error, ``source`` the role it was corrected from, ``kl_per_token``
    the predicted KL, nats, that each of its tokens stands for.
    """

    source: str
    estimator: str
    error: float
    kl_per_token: float = 0.0


def provenance(node: UnifiedTreeNode) -> Provenance | None:
    """The provenance of a node's KV; None when the model computed it."""
    return _metadata(node).get(_PROVENANCE)


def mark_corrected(node: UnifiedTreeNode, mark: Provenance) -> None:
    _metadata(node)[_PROVENANCE] = mark


def mark_exact(node: UnifiedTreeNode, store: DeltaStore) -> None:
    """A dense run replaced the node's KV: its provenance and the deltas against the old KV go."""
    _metadata(node).pop(_PROVENANCE, None)
    _drop_deltas(node, store)


def set_delta(node: UnifiedTreeNode, consumer: str, rows: Rows, store: DeltaStore) -> None:
    """Keep a consumer's own delta for a node's tokens (one row per token); replaces an earlier one."""
    assert len(rows) == len(node.key)
    handles = _metadata(node).setdefault(_DELTAS, {})
    if consumer in handles:
        store.drop(handles[consumer])
    handles[consumer] = store.put(rows)


def get_delta(node: UnifiedTreeNode, consumer: str, store: DeltaStore) -> Rows | None:
    """The consumer's own delta of a node's tokens, if it still is in the store."""
    handle = _metadata(node).get(_DELTAS, {}).get(consumer)
    return None if handle is None else store.get(handle)


def slots(node: UnifiedTreeNode) -> Tensor:
    """Slots (int64 [n]) of a node's tokens in the pool."""
    return node.component_data[BASE_COMPONENT_TYPE].value


def path_to(node: UnifiedTreeNode) -> Iterator[UnifiedTreeNode]:
    """The nodes from ``node`` up to, and without, the root."""
    while node.parent is not None:
        yield node
        node = node.parent


class DeltaFullComponent(FullComponent):
    """SGLang's FULL component, with our marks on its nodes.

    The cache sets ``store`` and ``on_gone`` right after construction, before the first insert.
    """

    store: DeltaStore
    on_gone: Callable[[int], None]

    def __init__(self, cache: UnifiedRadixCache, params: CacheInitParams) -> None:
        super().__init__(cache, params)
        self.store = DeltaStore()
        self.on_gone = lambda node: None

    def redistribute_on_node_split(self, new_parent: UnifiedTreeNode, child: UnifiedTreeNode) -> None:
        super().redistribute_on_node_split(new_parent, child)
        above, below = _metadata(new_parent), _metadata(child)
        if _PROVENANCE in below:
            above[_PROVENANCE] = below[_PROVENANCE]
        if _DELTAS not in below:
            return
        above[_DELTAS], kept = {}, {}
        for consumer, handle in below[_DELTAS].items():
            halves = self.store.split(handle, len(new_parent.key))
            if halves is not None:
                above[_DELTAS][consumer], kept[consumer] = halves
        below[_DELTAS] = kept

    def evict_component(
        self,
        node: UnifiedTreeNode,
        device_frees: dict[Any, list[Any]],
        host_frees: dict[Any, list[Any]],
        cache_actions: list[Any],
        target: EvictLayer = EvictLayer.DEVICE,
    ) -> tuple[int, int]:
        if EvictLayer.DEVICE in target:
            mark_exact(node, self.store)
            self.on_gone(node.id)
        return super().evict_component(node, device_frees, host_frees, cache_actions, target)


def _metadata(node: UnifiedTreeNode) -> dict[str, Any]:
    return node.component_data[BASE_COMPONENT_TYPE].metadata


def _drop_deltas(node: UnifiedTreeNode, store: DeltaStore) -> None:
    for handle in _metadata(node).pop(_DELTAS, {}).values():
        store.drop(handle)
