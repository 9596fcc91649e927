"""What must hold after every step of the cache, counted anew from the tree, the pool and the requests.

Nothing here asks the code under test for a sum: slots, locks and bytes are counted by walking, KV is compared with the
formula model's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kvcmas_sgl.radix_ext.node_marks import Provenance
from kvcmas_sgl.radix_ext.sources import digest
from kvcmas_sgl.triton_kernels import rotate
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from tests.tree.harness import LAYERS, VOCAB, FormulaModel, Tree

GARBAGE = 777.0
"""What a slot holds between its allocation and the pass that writes it; no KV of the formula model comes near."""


@dataclass(frozen=True)
class Spot:
    """A node of the tree with its path: all tokens up to its end, of which its own start at ``start``."""

    node: Any
    tokens: list[int]
    start: int
    marks: tuple[Provenance | None, ...]
    slots: list[int]

    @property
    def data(self) -> Any:
        return self.node.component_data[ComponentType.FULL]

    @property
    def namespace(self) -> tuple[str | None, str | None]:
        return self.node.key.extra_key, self.node.key.cache_salt


class Formula:
    """The formula model's KV by (agent, token, position). Agents are told by the first token of their prompt."""

    def __init__(self, model: FormulaModel, prefixes: Sequence[Sequence[int]]) -> None:
        self._table = model.table
        self._rows = {None: 0}
        parts = [model.kv((), range(VOCAB), 0)]
        for prefix in prefixes:
            self._rows[prefix[0]] = len(parts)
            parts.append(model.kv(prefix, range(VOCAB), 0))
        positions = torch.arange(VOCAB)
        self._k = torch.cat([rotate(k, positions, self._table, inverse=True) for k, _ in parts], dim=1)
        self._v = torch.cat([v for _, v in parts], dim=1)

    def rows(self, agent: bool, tokens: Sequence[int]) -> list[int]:
        """Where the KV of a sequence's tokens is found in the table; a plain request's context is nobody's."""
        # A prompt that was refused is one token, which is nobody's.
        base = VOCAB * (self._rows.get(tokens[0], 0) if agent else 0)
        return [base + token for token in tokens]

    def kv(self, rows: Sequence[int], positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """K after RoPE and V ``[L, n, H, d]``."""
        at = torch.tensor(rows, dtype=torch.int64)
        return rotate(self._k[:, at], torch.tensor(positions, dtype=torch.int64), self._table), self._v[:, at]


def walk(tree: Tree) -> list[Spot]:
    """Every node but the root, parents first."""
    found: list[Spot] = []
    todo: list[tuple[Any, Spot | None]] = [(child, None) for child in tree.cache.root_node.children.values()]
    while todo:
        node, above = todo.pop()
        data = node.component_data[ComponentType.FULL]
        before = above.tokens if above else []
        mark = data.metadata.get("kvcmas_provenance")
        marks = (*(above.marks if above else ()), mark)
        spot = Spot(node, before + node.key.token_ids.tolist(), len(before), marks, data.value.tolist())
        found.append(spot)
        todo += [(child, spot) for child in node.children.values()]
    return found


def scope_of(salt: str | None) -> str:
    """The scope that the harness gives to a tenant's requests."""
    return digest((salt or "").encode())


def check(
    tree: Tree,
    live: Iterable[Any],
    formula: Formula,
    salts: Iterable[str | None],
    locks: Sequence[Any] = (),
    borrowed: Sequence[int] = (),
) -> None:
    """Everything. ``live``: the requests that hold a row of the pool. ``salts``: the tenants that were served.

    ``locks`` and ``borrowed``: locks and slots that a check holds, which is half done.
    """
    live, spots = list(live), walk(tree)
    slots_are_owned_once(tree, spots, live, borrowed)
    locks_are_balanced(tree, spots, live, locks)
    namespaces_are_apart(spots)
    kv_is_what_it_claims(tree, spots, formula)
    deltas_sit_on_live_nodes(tree, spots)
    sources_are_resident(tree, spots)
    state_is_counted(tree, {scope_of(salt) for salt in salts})


def slots_are_owned_once(tree: Tree, spots: Sequence[Spot], live: Sequence[Any], borrowed: Sequence[int]) -> None:
    """Free, in one node, or in the unpublished part of one request's row: every slot of the pool, once."""
    owned = [*borrowed, *(slot for spot in spots for slot in spot.slots)]
    for req in live:
        row = tree.rows.req_to_token[req.kv.req_pool_idx]
        owned += row[req.kv.cache_protected_len : req.kv.kv_allocated_len].tolist()
    owned += tree.allocator.free_pages.tolist() + tree.allocator.release_pages.tolist()
    count = Counter(owned)
    twice = [slot for slot, times in count.items() if times > 1]
    assert not twice, f"slots owned twice: {twice}"
    lost = set(range(1, tree.allocator.size + 1)) - set(count)
    assert not lost and len(count) == tree.allocator.size, f"slots lost: {lost}"


def locks_are_balanced(tree: Tree, spots: Sequence[Spot], live: Sequence[Any], locks: Sequence[Any]) -> None:
    """A node's lock count is the number of locks that live requests and checks hold on it or below it."""
    held: Counter[int] = Counter()
    agents = [getattr(req, "kvcmas", None) for req in live]
    requests = [
        lock for req, agent in zip(live, agents, strict=True) for lock in (req.lock, *(agent.held if agent else ()))
    ]
    for lock in [*requests, *locks]:
        node = tree.cache.tree_core.node_by_id(lock.node)
        while node.parent is not None:
            held[node.id] += 1
            node = node.parent
    evictable = protected = 0
    for spot in spots:
        have = spot.data.lock_ref
        assert have == held[spot.node.id], f"node {spot.node.id} has {have} locks, not {held[spot.node.id]}"
        evictable += 0 if have else len(spot.slots)
        protected += len(spot.slots) if have else 0
        assert len(spot.slots) == len(spot.node.key)
    assert (tree.cache.full_evictable_size(), tree.cache.full_protected_size()) == (evictable, protected)


def namespaces_are_apart(spots: Sequence[Spot]) -> None:
    """No path changes its namespace, and outside of the agents' ones nothing of ours is found."""
    for spot in spots:
        parent = spot.node.parent
        if parent.parent is not None:
            assert (parent.key.extra_key, parent.key.cache_salt) == spot.namespace
        if not is_agent(spot.namespace):
            assert not [key for key in spot.data.metadata if key.startswith("kvcmas")], spot


def is_agent(namespace: tuple[str | None, str | None]) -> bool:
    return (namespace[0] or "").startswith("secret:")


def kv_is_what_it_claims(tree: Tree, spots: Sequence[Spot], formula: Formula) -> None:
    """A node without provenance holds what a dense run of its own agent gives; no node holds garbage."""
    rows: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    others: list[int] = []
    for spot in spots:
        if spot.marks[-1] is not None:
            others += spot.slots
            continue
        rows += formula.rows(is_agent(spot.namespace), spot.tokens)[spot.start :]
        positions += range(spot.start, len(spot.tokens))
        slots += spot.slots
    view = tree.cache.view
    if others:
        for buffer in (*view.k_buffers, *view.v_buffers):
            assert (buffer[others].abs() < GARBAGE / 2).all(), "corrected KV that nobody wrote"
    if slots:
        want = formula.kv(rows, positions)
        for layer in range(LAYERS):
            for name, got, dense in (("K", view.k_buffers, want[0]), ("V", view.v_buffers, want[1])):
                off = (got[layer][slots] - dense[layer]).abs().amax((1, 2))
                assert (off < 1e-4).all(), f"{name} of layer {layer} in slots that count as exact: off by {off.max()}"


def deltas_sit_on_live_nodes(tree: Tree, spots: Sequence[Spot]) -> None:
    """Every delta is held by one node, for each of its tokens, and no byte is counted that no tensor takes."""
    store = tree.cache.deltas
    handles: list[int] = []
    for spot in spots:
        for handle in spot.data.metadata.get("kvcmas_deltas", {}).values():
            handles.append(handle)
            rows = store._rows.get(handle)
            # A handle whose rows the budget has dropped may stay.
            assert rows is None or rows.left_k.shape[1] == rows.left_v.shape[1] == len(spot.slots)
    assert len(handles) == len(set(handles))
    assert set(store._rows) <= set(handles), "a delta whose node is gone"
    tensors: dict[int, torch.Tensor] = {}
    for rows in store._rows.values():
        for tensor in (rows.left_k, rows.left_v, rows.factors.right_k, rows.factors.right_v):
            tensors[id(tensor)] = tensor
    assert store.nbytes == sum(size_of(tensor) for tensor in tensors.values())


def sources_are_resident(tree: Tree, spots: Sequence[Spot]) -> None:
    """Every source is a path of its own tenant that ends with its tokens and was made as it says."""
    index, by_id = tree.cache.sources, {spot.node.id: spot for spot in spots}
    listed = list(index)
    assert sorted(map(id, listed)) == sorted(id(source) for held in index._by_node.values() for source in held)
    for source in listed:
        spot = by_id.get(source.node)
        assert spot is not None, f"a source on node {source.node}, which has left the tree"
        assert is_agent(spot.namespace)
        assert spot.tokens[source.start :] == source.content.tokens.tolist()
        assert source.content.scope == scope_of(spot.namespace[1])
        assert source.agent is None or source.agent.scope == source.content.scope
        if source.exact:
            assert not any(spot.marks), "a source that counts as exact stands on corrected KV"
        if source.computed:
            own = [mark for mark, start in marked(spot, by_id) if start >= source.start]
            assert all(mark is None or mark.estimator == "context" for mark in own)
    contents = list(index._contents.values())
    assert all(content.sources for content in contents)
    assert index.tokens == sum(len(content.tokens) for content in contents)
    known = {id(content) for content in contents}
    for table in index._tables.values():
        for places in table._blocks.values():
            assert all(id(content) in known for content, _ in places), "a block of a content that was forgotten"


def marked(spot: Spot, by_id: dict[int, Spot]) -> Iterator[tuple[Provenance | None, int]]:
    """Mark and first position of every node on a path."""
    node = spot.node
    while node.parent is not None:
        above = by_id[node.id]
        yield above.marks[-1], above.start
        node = node.parent


def state_is_counted(tree: Tree, served: set[str]) -> None:
    """The bytes of learned state, from the tensors; nothing is learned of a tenant that nobody served."""
    cache = tree.cache
    total = cache.deltas.nbytes
    for estimator in cache.estimators.values():
        tensors: dict[int, torch.Tensor] = {}
        collect(vars(estimator), tensors)
        assert estimator.state_bytes == sum(size_of(tensor) for tensor in tensors.values())
        total += estimator.state_bytes
        scopes = {edge.namespace for edge in estimator.edges()}
        assert scopes <= served
    assert cache.learner.state_bytes == total
    assert {edge.namespace for edge, _ in cache.gate._pairs} <= served


def collect(value: Any, found: dict[int, torch.Tensor]) -> None:
    """Every tensor that an object holds, once."""
    if isinstance(value, torch.Tensor):
        found[id(value)] = value
    elif isinstance(value, dict):
        for item in value.values():
            collect(item, found)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            collect(item, found)
    elif hasattr(value, "__dict__") or hasattr(type(value), "__dataclass_fields__"):
        collect(dict(vars(value)), found)


def size_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def report_adds_up(req: Any, computed: int | None, hit_corrected: int) -> None:
    """A settled report: its parts are the prompt, and its KL is that of its spans.

    ``computed`` is how many tokens really were, where that is known; ``hit_corrected`` how many were corrected before.
    """
    report = req.kvcmas.report
    parts = (report.exact_tokens, report.corrected_tokens, report.computed_tokens)
    assert min(parts) >= 0 and sum(parts) == len(req.kvcmas.prompt), parts
    for span in report.spans:
        inside = (span.exact_tokens, span.corrected_tokens, span.computed_tokens)
        assert min(inside) >= 0 and sum(inside) == span.stop - span.start, span
    if computed is not None:
        assert report.computed_tokens == computed, (report.computed_tokens, computed)
    if report.corrected_tokens and not hit_corrected:
        # What stands on corrected KV of other requests is not told by spans alone.
        total = sum(span.predicted_kl or 0.0 for span in report.spans if span.corrected_tokens)
        assert math.isclose(report.predicted_kl or 0.0, total, rel_tol=1e-6), (report.predicted_kl, total)
