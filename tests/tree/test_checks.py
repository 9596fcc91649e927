"""Checks of requests that were reused, with a forward pass that is a formula of the KV that it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from kvcmas_sgl.radix_ext import checks
from kvcmas_sgl.radix_ext.gate import MAX_PAIRS
from kvcmas_sgl.radix_ext.learner import RESTARTS, Steps
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from torch import Tensor

from tests.tree.harness import CRITIC, LAYERS, PLANNER, VOCAB, WIDTH, Role, Tree, document, learned

N = 48
ANSWER = list(range(30, 36))
WEIGHTS = 0.3 * torch.randn(VOCAB, LAYERS * 2 * WIDTH, generator=torch.Generator().manual_seed(1))


def read_out(k: Tensor, v: Tensor) -> Tensor:
    """Logits [VOCAB] of a model that looks at the mean of all K and V, ``[L, n, H, d]``."""
    return WEIGHTS @ torch.cat([k.mean(1).flatten(1), v.mean(1).flatten(1)], 1).flatten()


def forward_of(tree: Tree, role: Role) -> Callable[[np.ndarray, Tensor, Sequence[tuple[int, int]]], Tensor]:
    """Computes the rows' K and V by the tree's formula, writes them, and reads the logits out."""

    def forward(tokens: np.ndarray, slots: Tensor, rows: Sequence[tuple[int, int]]) -> Tensor:
        view, logits = tree.cache.view, []
        k, v = tree.model.kv(role.prefix, tokens.tolist(), 0)
        for start, stop in rows:
            for layer in range(LAYERS):
                view.k_buffers[layer][slots[start:stop]] = k[layer, start:stop]
                view.v_buffers[layer][slots[start:stop]] = v[layer, start:stop]
            seen = slots[:stop]
            k_read = torch.stack([buffer[seen] for buffer in view.k_buffers])
            logits.append(read_out(k_read, torch.stack([buffer[seen] for buffer in view.v_buffers])))
        return torch.stack(logits)

    return forward


def kl(p: Tensor, q: Tensor) -> float:
    return float((p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum())


def reuse(tree: Tree, seed: int = 20, *, role: Role = CRITIC) -> Req:
    """The planner reads a document, then another role, which is corrected; nothing is learned yet."""
    PLANNER.read(tree, document(seed))
    tree.cache.lessons.forward = forward_of(tree, role)
    req = tree.request(role.prompt(document(seed)), role.hint(document(seed)))
    tree.admit(req)
    req.served = tree.held(req)
    tree.finish(req, ANSWER)
    assert req.kvcmas.report.corrected_tokens == N
    return req


def pairs(tree: Tree) -> int:
    (on,) = tree.cache.estimators["affine"].edges()
    return tree.cache.gate.pairs(on, "affine")


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> Tree:
    """The edge from the planner to the critic is learned; a chunk is 16 tokens; only young edges are checked."""
    monkeypatch.setattr(checks, "CHUNK", 16)
    tree = Tree(check_share=1e-9)
    learned(tree)
    return tree


def test_a_check_measures_what_the_client_was_served_and_learns_from_the_dense_run(tree: Tree) -> None:
    stats, taught, known = tree.cache.statistics, tree.cache.statistics.spans_learned, pairs(tree)
    req = reuse(tree)
    # Apart from the cache: what reading the true KV says at each position, and what reading what was placed says.
    n, tokens = len(req.origin_input_ids), [*req.origin_input_ids, *req.output_ids]
    true = tree.model.kv(CRITIC.prefix, tokens, 0)
    served = [torch.cat([part[:, : n - 1], whole[:, n - 1 :]], 1) for part, whole in zip(req.served, true, strict=True)]
    wanted = [
        kl(read_out(*(part[:, :stop] for part in true)), read_out(*(part[:, :stop] for part in served)))
        for stop in range(n, len(tokens) + 1)
    ]
    tree.learn()
    assert stats.checks == 1 and stats.fallbacks == 0 and min(wanted) > 0
    assert stats.checked_kl == pytest.approx(np.mean(wanted), rel=1e-3)
    assert stats.checks_over_budget == (np.mean(wanted) > tree.cache.config.max_kl)
    assert stats.spans_learned == taught + 1 and pairs(tree) == known + 1
    assert all(torch.equal(a, b) for a, b in zip(req.served, corrected(tree, req), strict=True))
    tree.check()


def corrected(tree: Tree, req: Req) -> list[Tensor]:
    """What the tree holds for a finished request's prompt now."""
    again = tree.request(list(req.origin_input_ids), {**CRITIC.hint(document(20))})
    result = tree.cache.match_prefix(MatchPrefixParams(key=RadixKey(again.full_untruncated_fill_ids, again.extra_key)))
    slots = tree.cache.path_device_indices(result.last_device_node)[: len(req.origin_input_ids)]
    return [
        torch.stack([buffer[slots] for buffer in part])
        for part in (tree.cache.view.k_buffers, tree.cache.view.v_buffers)
    ]


def test_an_arriving_request_takes_the_memory_back_and_the_check_begins_again(tree: Tree) -> None:
    reuse(tree)
    learner, free = tree.cache.learner, tree.allocator.available_size()
    for restart in range(RESTARTS + 1):
        # To the check: what was queued before it takes no memory.
        while tree.allocator.available_size() == free and learner.step():
            pass
        assert tree.allocator.available_size() < free, restart
        tree.serve(document(40 + restart), settle=False)
        free = tree.allocator.available_size()
        tree.check()
    tree.learn()
    assert tree.cache.statistics.checks == 0 and tree.cache.statistics.jobs_dropped == 1


def test_a_flush_in_the_middle_of_a_check_leaves_nothing(tree: Tree) -> None:
    reuse(tree)
    free = tree.allocator.available_size()
    while tree.allocator.available_size() == free:
        assert tree.cache.learner.step()
    tree.cache.reset()
    tree.allocator.clear()
    assert len(tree.cache.learner) == 0 and tree.cache.statistics.checks == 0
    tree.check()


def test_a_check_that_cannot_let_go_does_not_reach_the_request(tree: Tree) -> None:
    def stuck() -> Steps:
        try:
            yield
        finally:
            raise RuntimeError("no way to let go")

    tree.cache.learner.add(stuck(), again=stuck)
    assert tree.cache.learner.step()
    assert PLANNER.read(tree, document(40), settle=False)["reason"] == "no_source"
    assert tree.cache.statistics.fallbacks == 1
    tree.cache.learner.stop()
    tree.check()


def test_a_check_that_fails_is_counted_and_leaves_nothing(tree: Tree) -> None:
    reuse(tree)

    def broken(*arguments: object) -> Tensor:
        raise RuntimeError("no model")

    taught = tree.cache.statistics.spans_learned
    tree.cache.learner.stop()
    request = reuse(tree, 21)
    tree.cache.learner.stop()
    tree.cache.lessons.forward = broken
    jobs = tree.cache._publisher.untaught(request.kvcmas)
    tree.cache.lessons.check(request.kvcmas, request.output_ids, request.last_node, jobs)
    tree.learn()
    assert tree.cache.statistics.fallbacks == 1 and tree.cache.statistics.spans_learned == taught
    tree.check()


def test_without_room_nothing_is_evicted_for_a_check() -> None:
    tree = Tree(slots=8 * N, check_share=1e-9)
    learned(tree)
    reuse(tree)
    # Plain traffic fills the pool: all but what a check would need.
    for seed in range(60, 66):
        tree.serve(document(seed), settle=False)
    free, held = tree.allocator.available_size(), tree.cache.all_values_flatten().numel()
    assert free < N
    tree.learn()
    assert tree.cache.statistics.checks == 0
    assert tree.cache.all_values_flatten().numel() == held
    tree.check()


@pytest.mark.parametrize(("share", "wanted"), [(0.0, 0), (1e-9, None), (1.0, 8)])
def test_young_edges_are_always_checked_and_old_ones_by_share(share: float, wanted: int | None) -> None:
    tree = Tree(slots=4096, check_share=share)
    learned(tree)
    young = MAX_PAIRS - pairs(tree)
    for seed in range(20, 28):
        reuse(tree, seed)
        tree.learn()
    assert tree.cache.statistics.checks == (young if wanted is None else wanted)
    assert tree.cache.statistics.fallbacks == 0
