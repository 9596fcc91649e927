"""What SGLang's scheduler does to a cache, one step at a time: match, admit, pass, checkpoint, decode, release.

Admission, matching, releasing and eviction are SGLang's own functions, with our seam around admission; the forward
pass is the formula model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from kvcmas_sgl.radix_ext.cache import DeltaRadixCache
from kvcmas_sgl.radix_ext.placement import Pass
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.common import checkpoint_kv_cache, evict_from_tree_cache, match_kv_cache, release_kv_cache

from kvcmas_sgl.seams.admission import around_add_chunked_req, around_add_one_req
from tests.tree import recount
from tests.tree.harness import LAYERS, Tree
from tests.tree.recount import GARBAGE, Formula, is_agent, report_adds_up

LAST_WORD = 7


@dataclass(eq=False)
class Job:
    """A request on its way, and what it will generate. ``stage``: waiting, admitted, passed, stashed or decoding."""

    req: Any
    answer: Sequence[int]
    stage: str = "waiting"
    computed: int = 0
    """Tokens of the prompt that passes computed."""
    hit_corrected: int = 0
    """Corrected tokens of the exact cache's hit."""
    first_run: bool = True
    """Whether it was neither retracted nor, after that, computed again."""

    @property
    def agent(self) -> Any:
        return getattr(self.req, "kvcmas", None)

    @property
    def tokens(self) -> list[int]:
        return [*self.req.origin_input_ids, *self.req.output_ids]

    def next_token(self) -> int:
        said = len(self.req.output_ids)
        return self.answer[said] if said < len(self.answer) else LAST_WORD


@dataclass(eq=False)
class Scheduler:
    """Requests on one cache."""

    tree: Tree
    formula: Formula
    jobs: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache: DeltaRadixCache = self.tree.cache
        self.cache.lessons.forward = self._audited_pass
        self.locks: list[Any] = []
        self.borrowed: list[torch.Tensor] = []
        self._watch_checks()

    def _watch_checks(self) -> None:
        """Checks hold a path and slots from one idle step to the next: which, is told by what they ask for."""
        checker = self.cache.lessons._checker
        hold, release, allocate, free = checker._hold, checker._release, checker._allocate, checker._free

        def holding(node: int) -> Any:
            kept = hold(node)
            if kept is not None:
                self.locks.append(kept[1])
            return kept

        def releasing(lock: Any) -> None:
            self.locks = [one for one in self.locks if one is not lock]
            release(lock)

        def allocating(count: int) -> Any:
            slots = allocate(count)
            if slots is not None:
                self.borrowed.append(slots)
            return slots

        def freeing(slots: torch.Tensor) -> None:
            self.borrowed = [one for one in self.borrowed if one is not slots]
            free(slots)

        checker._hold, checker._release, checker._allocate, checker._free = holding, releasing, allocating, freeing

    def check(self, salts: Sequence[str | None]) -> None:
        """Everything that must hold after every step (`recount`)."""
        borrowed = [slot for slots in self.borrowed for slot in slots.tolist()]
        recount.check(self.tree, self.live, self.formula, salts, self.locks, borrowed)

    @property
    def live(self) -> list[Any]:
        """Requests that hold a row of the pool."""
        return [job.req for job in self.jobs if job.req.kv.holds_kv]

    def at(self, *stages: str) -> list[Job]:
        return [job for job in self.jobs if job.stage in stages]

    def add(self, req: Any, answer: Sequence[int] = ()) -> Job:
        job = Job(req, answer)
        self.jobs.append(job)
        return job

    def match(self, job: Job) -> None:
        """As for every waiting request in every round."""
        req, tokens = job.req, job.tokens
        req.refresh_fill_ids()
        match_kv_cache(req, self.cache, max_prefix_len=len(tokens) - 1)
        req.kv.cache_protected_len = req.prefix_len
        if job.agent is not None:
            for piece in job.agent.pieces:
                source = piece.base.source
                assert source.content.scope == job.agent.scope, "a piece from another tenant"
                assert self.cache.spans.resident(source)
                held = source.content.tokens[piece.base.offset :][: piece.stop - piece.start]
                assert held.tolist() == tokens[piece.start : piece.stop], "a piece of other text"

    def admit(self, job: Job, chunk: int) -> bool:
        """Offer a waiting request to a pass of ``chunk`` computed tokens; False where it has to wait."""
        self.match(job)
        if job.agent is not None and not job.agent.settled:
            job.hit_corrected = job.agent.report.corrected_tokens
        adder = self._adder(chunk)
        around_add_one_req(PrefillAdder.add_one_req, adder, job.req, has_chunked_req=False, truncation_align_size=None)
        if not adder.can_run_list:
            assert job.agent is None or not job.agent.held
            return False
        self.tree.rows.alloc([job.req])
        req = job.req
        self.tree.rows.write(
            (req.kv.req_pool_idx, slice(0, req.prefix_len)), self.cache.prefix_device_indices(req).to(torch.int32)
        )
        self._allocate(job)
        return True

    def stash(self, job: Job) -> None:
        """Between two chunks."""
        checkpoint_kv_cache(job.req, self.cache)
        job.stage = "stashed"

    def go_on(self, job: Job, chunk: int) -> bool:
        """Offer a further chunk; False where memory is short whatever is reused."""
        req = job.req
        room = self.tree.allocator.available_size() + self.cache.full_evictable_size()
        if room < min(chunk, len(job.tokens) - req.prefix_len):
            return False
        adder = self._adder(chunk)
        around_add_chunked_req(PrefillAdder.add_chunked_req, adder, req)
        if not adder.can_run_list:
            assert job.agent is None or not job.agent.held
            return False
        self._allocate(job)
        return True

    def forward(self) -> None:
        """One pass over everything that was admitted, as `seams.forward` takes it."""
        admitted = self.at("admitted")
        passes = [self._pass(job) for job in admitted]
        ours = [one for one in passes if one.req.rid in self.cache.admitted]
        assert [one.req.rid for one in ours] == [job.req.rid for job in admitted if job.agent is not None]
        self.cache.admitted.clear()
        placed = dict(zip((one.req.rid for one in ours), self.cache.place(ours), strict=True))
        for job, one in zip(admitted, passes, strict=True):
            self._compute(job, one, placed.get(one.req.rid, []))
            job.stage = "passed"

    def end_prefill(self, job: Job) -> None:
        """The prompt is complete: the first token is there, and the tree is told."""
        job.req.output_ids.append(job.next_token())
        checkpoint_kv_cache(job.req, self.cache)
        job.stage = "decoding"
        if job.agent is not None and job.agent.settled:
            report_adds_up(job.req, job.computed if job.first_run else None, job.hit_corrected)

    def decode(self, job: Job) -> bool:
        """One token; False where memory is short."""
        req, at = job.req, job.req.kv.kv_committed_len
        evict_from_tree_cache(self.cache, 1)
        slot = self.tree.allocator.alloc(1)
        if slot is None:
            return False
        self.tree.rows.write((req.kv.req_pool_idx, slice(at, at + 1)), slot.to(torch.int32))
        req.kv.kv_committed_len = req.kv.kv_allocated_len = at + 1
        self._write(job, [at], slot)
        req.output_ids.append(job.next_token())
        return True

    def finish(self, job: Job, reason: Any = None) -> None:
        """Done, or aborted, at any point between two passes."""
        if job.req.kv.holds_kv:
            job.req.finished_reason = reason or FINISH_LENGTH(length=len(job.req.output_ids))
            release_kv_cache(job.req, self.cache, checkpoint=True)
        self.jobs.remove(job)

    def abort(self, job: Job) -> None:
        self.finish(job, FINISH_ABORT("gone"))

    def retract(self, job: Job) -> None:
        release_kv_cache(job.req, self.cache, checkpoint=False)
        job.req.reset_for_retract()
        job.stage, job.first_run = "waiting", False

    def flush(self) -> None:
        """As ``Scheduler.flush_cache``, which refuses while requests run."""
        assert not self.live
        self.cache.reset()
        self.tree.rows.clear()
        self.tree.allocator.clear()

    def _adder(self, chunk: int) -> PrefillAdder:
        return PrefillAdder(
            page_size=1,
            tree_cache=self.cache,
            token_to_kv_pool_allocator=self.tree.allocator,
            running_batch=None,
            new_token_ratio=0.5,
            rem_input_tokens=1000,
            rem_chunk_tokens=chunk,
            max_running_requests=8,
        )

    def _allocate(self, job: Job) -> None:
        """Slots for the tokens that were admitted, which hold garbage until the pass."""
        req = job.req
        start, stop = req.prefix_len, req.extend_end
        evict_from_tree_cache(self.cache, stop - start)
        fresh = self.tree.allocator.alloc(stop - start)
        assert fresh is not None, "the scheduler budgeted more than there is"
        self._fill(fresh, GARBAGE)
        self.tree.rows.write((req.kv.req_pool_idx, slice(start, stop)), fresh.to(torch.int32))
        req.kv.kv_committed_len = req.kv.kv_allocated_len = stop
        job.stage = "admitted"

    def _pass(self, job: Job) -> Pass:
        req = job.req
        slots = self.tree.rows.req_to_token[req.kv.req_pool_idx, req.prefix_len : req.extend_end].long()
        return Pass(req, req.prefix_len, req.extend_end, slots)

    def _compute(self, job: Job, one: Pass, placed: Sequence[tuple[int, int]]) -> None:
        at = one.start
        fresh: list[int] = []
        for start, stop in placed:
            assert at <= start < stop < one.stop, "placed tokens overlap, or leave the pass"
            fresh += range(at, start)
            at = stop
        fresh += range(at, one.stop)
        job.computed += sum(position < len(job.req.origin_input_ids) for position in fresh)
        self._write(job, fresh, one.slots[torch.tensor(fresh) - one.start])
        assert job.agent is None or not job.agent.held, "sources stay pinned after the pass"

    def _write(self, job: Job, positions: Sequence[int], slots: torch.Tensor) -> None:
        tokens = job.tokens
        rows = self.formula.rows(is_agent((job.req.extra_key, None)), tokens)
        k, v = self.formula.kv([rows[position] for position in positions], positions)
        for layer in range(LAYERS):
            self.cache.view.k_buffers[layer][slots] = k[layer]
            self.cache.view.v_buffers[layer][slots] = v[layer]

    def _fill(self, slots: torch.Tensor, value: float) -> None:
        for buffer in (*self.cache.view.k_buffers, *self.cache.view.v_buffers):
            buffer[slots] = value

    def _audited_pass(self, tokens: Any, slots: torch.Tensor, rows: Sequence[tuple[int, int]]) -> torch.Tensor:
        """A pass outside of the batch: it writes to its own slots, and its logits depend on all KV before."""
        fresh = [position for start, stop in rows for position in range(start, stop)]
        places = self.formula.rows(True, tokens.tolist())
        k, v = self.formula.kv([places[position] for position in fresh], fresh)
        for layer in range(LAYERS):
            self.cache.view.k_buffers[layer][slots[fresh]] = k[layer]
            self.cache.view.v_buffers[layer][slots[fresh]] = v[layer]
        values = self.cache.view.v_buffers[-1][slots]
        assert (values.abs() < GARBAGE / 2).all(), "an audit reads KV that nobody wrote"
        return torch.stack([values[:stop].mean(0).flatten() for _, stop in rows])
