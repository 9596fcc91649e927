"""The scheduler's own prefill budget, with our charge for what is corrected."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import evict_from_tree_cache, match_kv_cache

from kvcmas_sgl.seams.admission import around_add_chunked_req, around_add_one_req
from tests.tree.harness import CRITIC, PLANNER, Tree, document, learned, sources_of

N, HEAD, QUESTION = 48, len(CRITIC.prefix), 2


def adder_of(tree: Tree, chunk: int) -> PrefillAdder:
    return PrefillAdder(
        page_size=1,
        tree_cache=tree.cache,
        token_to_kv_pool_allocator=tree.allocator,
        running_batch=None,
        new_token_ratio=0.5,
        rem_input_tokens=1000,
        rem_chunk_tokens=chunk,
        max_running_requests=8,
    )


def offer(tree: Tree, adder: PrefillAdder, req: Any) -> str:
    prompt = req.origin_input_ids
    match_kv_cache(req, tree.cache, prompt, max_prefix_len=len(prompt) - 1)
    req.kv.cache_protected_len = req.prefix_len
    verdict = around_add_one_req(
        PrefillAdder.add_one_req, adder, req, has_chunked_req=False, truncation_align_size=None
    )
    return str(verdict.name)


@pytest.fixture
def tree() -> Tree:
    tree = Tree(slots=2048)
    learned(tree)
    for seed in (97, 98, 99):
        PLANNER.read(tree, document(seed))
    return tree


def request(tree: Tree, seed: int, question: tuple[int, ...] = (7, 7)) -> Any:
    return tree.request(CRITIC.prompt(document(seed), question), CRITIC.hint(document(seed)))


def test_corrected_tokens_are_not_charged(tree: Tree) -> None:
    adder = adder_of(tree, chunk=20)
    first, second = request(tree, 98), request(tree, 99)
    assert offer(tree, adder, first) == "CONTINUE"
    assert (adder.rem_chunk_tokens, adder.rem_input_tokens) == (20 - QUESTION, 1000 - QUESTION)
    assert first.extend_end == len(first.origin_input_ids)
    assert offer(tree, adder, second) == "CONTINUE"
    assert adder.rem_chunk_tokens == 20 - 2 * QUESTION
    assert tree.cache.admitted == {first.rid: first, second.rid: second}


def test_a_plain_request_is_charged_as_ever(tree: Tree) -> None:
    adder = adder_of(tree, chunk=100)
    assert offer(tree, adder, tree.request(document(50, 30))) == "CONTINUE"
    assert adder.rem_chunk_tokens == 100 - 30 and tree.cache.admitted == {}


def test_a_chunk_ends_where_the_fresh_tokens_run_out(tree: Tree) -> None:
    adder = adder_of(tree, chunk=10)
    req = request(tree, 99, question=tuple(range(400, 425)))
    offer(tree, adder, req)
    # Ten tokens of the question, and all of the span before them.
    assert req.extend_end == HEAD + N + 10 and adder.new_chunked_req is req
    assert adder.rem_chunk_tokens == 0
    assert tree.cache.admitted == {req.rid: req}


def test_a_further_chunk_is_charged_by_what_is_left_to_compute(tree: Tree) -> None:
    req = request(tree, 99)
    tree.admit(req, upto=HEAD + 20)
    tree.cache.checkpoint(req, up_to=req.extend_end)
    req.prefix_len = req.extend_end
    adder = adder_of(tree, chunk=10)
    assert around_add_chunked_req(PrefillAdder.add_chunked_req, adder, req) is None
    assert req.extend_end == len(req.origin_input_ids)
    assert adder.rem_chunk_tokens == 10 - QUESTION
    assert tree.cache.admitted == {req.rid: req}


def test_sources_are_pinned_until_the_pass_and_only_then(tree: Tree) -> None:
    adder = adder_of(tree, chunk=100)
    req = request(tree, 99)
    evictable = tree.cache.full_evictable_size()
    offer(tree, adder, req)
    pinned = evictable - tree.cache.full_evictable_size()
    assert pinned >= N + len(PLANNER.prefix)
    tree.cache.release(req)
    tree.cache.unlock(req.lock)
    assert tree.cache.full_evictable_size() == evictable


def test_where_only_its_own_sources_can_make_room_a_request_is_computed(tree: Tree) -> None:
    req = request(tree, 99, question=tuple(range(100, 450)))
    tree.cache.evict(EvictParams(num_tokens=tree.cache.full_evictable_size() - 100))
    adder = adder_of(tree, chunk=1000)
    # SGLang reserves one page and one new token beside the prompt.
    spare = int(adder.memory_budget.remaining_total) - len(req.origin_input_ids) - 5
    assert tree.allocator.alloc(spare) is not None
    adder = adder_of(tree, chunk=1000)
    held = []
    hold = tree.cache.hold
    tree.cache.hold = lambda one: (hold(one), held.extend(one.kvcmas.held))
    offer(tree, adder, req)
    # It was planned, and its source pinned, before it was offered without reuse.
    assert len(held) == 1
    assert adder.can_run_list == [req]
    assert req.kvcmas.pieces == [] and req.kvcmas.held == []
    assert adder.rem_chunk_tokens == 1000 - (len(req.origin_input_ids) - req.prefix_len)


def test_where_only_the_sources_of_a_further_chunk_are_left_it_is_computed_over_their_slots(tree: Tree) -> None:
    """Found by the state machine: the chunk was taken with the sources pinned, and there was nothing to allocate."""
    req = request(tree, 99)
    tree.admit(req, upto=HEAD + 1)
    tree.cache.checkpoint(req, up_to=HEAD + 1)
    req.prefix_len = HEAD + 1
    (source,) = sources_of(tree, document(99))
    lock = tree.cache.lock(source.node)
    tree.cache.evict(EvictParams(num_tokens=10**6))
    tree.cache.unlock(lock)
    assert tree.allocator.alloc(tree.allocator.available_size()) is not None
    room = tree.cache.full_evictable_size()
    assert N <= room < N + HEAD and req.kvcmas.pieces
    around_add_chunked_req(PrefillAdder.add_chunked_req, adder_of(tree, chunk=10), req)
    assert req.kvcmas.held == [] and req.kvcmas.pieces == []
    fresh = req.extend_end - req.prefix_len
    assert 0 < fresh <= 10
    evict_from_tree_cache(tree.cache, fresh)
    assert tree.allocator.alloc(fresh) is not None
