"""Seam: the forward pass. Placed tokens are left out of it; the fresh text around them runs in the same pass.

A request whose fresh tokens lie around placed ones becomes several rows of the batch, one for each run of fresh
tokens, all on the request's one row of `req_to_token`. Within a layer SGLang's attention backends write the new K and V
to the pool before they read it, so a later row sees the earlier rows of its request. No backend has to know of it.
FlashInfer's ragged prefill reads first; `seams/arguments.py` chooses its paged one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcmas_sgl.radix_ext.cache import DeltaRadixCache
from kvcmas_sgl.radix_ext.images import NO_IMAGES, Images
from kvcmas_sgl.radix_ext.placement import Pass
from kvcmas_sgl.seams.images import idle_pass, select

# `LogitsProcessorOutput` holds one list of these a row. Its input_token_logprobs are flat; only last rows have any.
_PER_ROW = (
    "input_top_logprobs_val",
    "input_top_logprobs_idx",
    "input_token_ids_logprobs_val",
    "input_token_ids_logprobs_idx",
)


@dataclass(frozen=True)
class Row:
    """A run of fresh tokens: of which request of the batch, and which of its tokens ``[start, stop)``."""

    request: int
    start: int
    stop: int


def around_forward(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``ModelRunner.forward``: correct what was planned for this pass, and compute the rest."""
    cache: DeltaRadixCache | None = getattr(runner, "kvcmas_cache", None)
    if cache is None or not cache.admitted or not forward_batch.forward_mode.is_extend_without_speculative():
        return original(runner, forward_batch, *args, **kwargs)
    cache.lessons.forward = RowForward(runner, forward_batch)
    placed = _place(cache, forward_batch)
    if not any(placed):
        return original(runner, forward_batch, *args, **kwargs)
    starts, lengths = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
    rows = fresh_rows(starts, lengths, placed)
    last = _last_rows(rows)
    parts = []
    for part in _parts(runner, len(rows)):
        folded = fold(forward_batch, rows[part], runner.kv_index_translator, last[part])
        output = original(runner, folded, *args, **kwargs)
        unfold(output.logits_output, last[part])
        parts.append(output.logits_output)
    join(parts)
    return output


def _place(cache: DeltaRadixCache, forward_batch: Any) -> list[list[tuple[int, int]]]:
    placed: list[list[tuple[int, int]]] = [[] for _ in forward_batch.rids]
    passes, numbers, first = [], [], 0
    for number, rid in enumerate(forward_batch.rids):
        start, length = forward_batch.extend_prefix_lens_cpu[number], forward_batch.extend_seq_lens_cpu[number]
        req = cache.admitted.get(rid)
        if req is not None:
            slots = forward_batch.out_cache_loc[first : first + length].to(torch.int64)
            passes.append(Pass(req, start, start + length, slots))
            numbers.append(number)
        first += length
    cache.admitted.clear()
    for number, ranges in zip(numbers, cache.place(passes), strict=True):
        placed[number] = ranges
    return placed


def fresh_rows(starts: Sequence[int], lengths: Sequence[int], placed: Sequence[Sequence[tuple[int, int]]]) -> list[Row]:
    """The rows of a pass: per request the runs of ``[start, start + length)`` that its placed ranges leave over.

    Every request keeps at least one row, since its last token is never placed.
    """
    rows = []
    for number, (start, length, ranges) in enumerate(zip(starts, lengths, placed, strict=True)):
        at = start
        for first, last in ranges:
            if first > at:
                rows.append(Row(number, at, first))
            at = last
        assert at < start + length, (start, length, ranges)
        rows.append(Row(number, at, start + length))
    return rows


def _parts(runner: Any, rows: int) -> list[slice]:
    """Rows that one pass can take: SGLang sizes its buffers for as many as it runs requests. Later parts see earlier
    ones in the pool, as later rows do."""
    room = min(runner.max_running_requests, runner.req_to_token_pool.size)
    return [slice(first, min(first + room, rows)) for first in range(0, rows, room)]


def fold(batch: Any, rows: Sequence[Row], translator: Any, last: Sequence[bool]) -> Any:
    """A copy of a ``ForwardBatch`` that computes only ``rows``; the original stays as sampling needs it.

    ``last``: whether each of them is the last one of its request.
    """
    starts, lengths = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
    device = batch.input_ids.device
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    kept = torch.cat(
        [torch.arange(row.start, row.stop) + offsets[row.request] - starts[row.request] for row in rows]
    ).to(device)
    owner = [row.request for row in rows]
    owners = torch.tensor(owner).to(device)
    row_lengths = [row.stop - row.start for row in rows]
    row_starts = [row.start for row in rows]
    stops = torch.tensor([row.stop for row in rows], dtype=batch.seq_lens.dtype)

    folded = copy.copy(batch)
    folded.batch_size = len(rows)
    folded.input_ids = batch.input_ids[kept]
    folded.positions = batch.positions[kept]
    folded.out_cache_loc = batch.out_cache_loc[kept]
    folded.req_pool_indices = batch.req_pool_indices[owners]
    if batch.req_pool_indices_cpu is not None:
        folded.req_pool_indices_cpu = batch.req_pool_indices_cpu[owner]
    folded.seq_lens = stops.to(device)
    folded.seq_lens_cpu = stops
    folded.seq_lens_sum = int(stops.sum())
    if batch.orig_seq_lens is not None:
        folded.orig_seq_lens = batch.orig_seq_lens[owners]
    folded.extend_num_tokens = len(kept)
    folded.extend_seq_lens_cpu, folded.extend_prefix_lens_cpu = row_lengths, row_starts
    folded.extend_seq_lens = torch.tensor(row_lengths, dtype=batch.extend_seq_lens.dtype).to(device)
    folded.extend_prefix_lens = torch.tensor(row_starts, dtype=batch.extend_prefix_lens.dtype).to(device)
    firsts = torch.tensor([0, *row_lengths[:-1]]).cumsum(0)
    folded.extend_start_loc = firsts.to(batch.extend_start_loc.dtype).to(device)
    folded.extend_logprob_start_lens_cpu = _logprob_starts(batch, rows)
    for name in ("lora_ids", "rids"):
        values = getattr(batch, name)
        if values is not None:
            setattr(folded, name, [values[i] for i in owner])
    if batch.mm_inputs is not None:
        # The vision tower runs for all the pictures that a row is said to have.
        uncut = [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        folded.mm_inputs = [
            inputs if (row.start, row.stop) == uncut[row.request] else select(inputs, row.start, row.stop)
            for row, inputs in ((row, batch.mm_inputs[row.request]) for row in rows)
        ]
    for name, nothing in (("top_logprobs_nums", 0), ("token_ids_logprobs", None)):
        values = getattr(batch, name)
        if values is not None:
            setattr(folded, name, [values[i] if is_last else nothing for i, is_last in zip(owner, last, strict=True)])
    if batch.global_num_token_non_padded is not None:
        folded.global_num_token_non_padded = torch.full_like(batch.global_num_token_non_padded, len(kept))
    if batch.global_num_token_non_padded_cpu is not None:
        folded.global_num_token_non_padded_cpu = len(kept)
    translator.own_plan(folded).bind(folded, translator)
    return folded


class RowForward:
    """Forward passes outside of the scheduler's batches, for audits in idle time.

    ``template`` is a batch of the scheduler's: whatever it holds beside its requests stays as it is.
    """

    def __init__(self, runner: Any, template: Any) -> None:
        self._runner = runner
        self._template = copy.copy(template)
        # Its pictures belong to its requests.
        self._template.mm_inputs = self._template.mm_input_embeds = None

    def __call__(
        self, tokens: Any, slots: torch.Tensor, rows: Sequence[tuple[int, int]], images: Images = NO_IMAGES
    ) -> torch.Tensor:
        """Logits, fp32 [rows, vocabulary], at the end of each row ``[start, stop)`` of a sequence.

        tokens: int64 [n]; slots: int64 [n], where each token's K and V lie or are written to; images: those among the
        tokens.
        """
        pool = self._runner.req_to_token_pool
        (line,) = pool.alloc_rows(1)
        try:
            pool.write((line, slice(0, len(tokens))), slots.to(torch.int32))
            logits = []
            with idle_pass(self._runner.kvcmas_cache.statistics):
                for part in _parts(self._runner, len(rows)):
                    output = self._runner.forward(self._batch(tokens, slots, rows[part], line, images))
                    logits.append(output.logits_output.next_token_logits.float())
            return torch.cat(logits)
        finally:
            pool.free_slots.append(line)

    def _batch(
        self, tokens: Any, slots: torch.Tensor, rows: Sequence[tuple[int, int]], line: int, images: Images
    ) -> Any:
        device, count = slots.device, len(rows)
        tokens = images.model_tokens(tokens) if images else tokens
        positions = torch.cat([torch.arange(start, stop) for start, stop in rows])
        lengths = [stop - start for start, stop in rows]
        stops = torch.tensor([stop for _, stop in rows])
        batch = copy.copy(self._template)
        batch.batch_size = count
        batch.positions = positions.to(device)
        batch.input_ids = torch.from_numpy(tokens)[positions].to(device)
        batch.out_cache_loc = slots[batch.positions]
        batch.req_pool_indices = torch.full((count,), line, dtype=batch.req_pool_indices.dtype, device=device)
        batch.req_pool_indices_cpu = torch.full((count,), line)
        batch.seq_lens, batch.seq_lens_cpu, batch.seq_lens_sum = stops.to(device), stops, int(stops.sum())
        batch.orig_seq_lens = stops.to(torch.int32).to(device)
        batch.extend_num_tokens = len(positions)
        batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = lengths, [start for start, _ in rows]
        batch.extend_seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        batch.extend_prefix_lens = torch.tensor(batch.extend_prefix_lens_cpu, dtype=torch.int32, device=device)
        batch.extend_start_loc = (batch.extend_seq_lens.cumsum(0) - batch.extend_seq_lens).to(torch.int32)
        batch.return_logprob = False
        batch.extend_logprob_start_lens_cpu = batch.extend_input_logprob_token_ids_gpu = None
        batch.top_logprobs_nums = batch.token_ids_logprobs = None
        batch.lora_ids = None if batch.lora_ids is None else batch.lora_ids[:1] * count
        batch.rids = ["kvcmas-audit"] * count
        batch.mm_inputs = [select(images.inputs, start, stop) for start, stop in rows]
        if batch.global_num_token_non_padded is not None:
            batch.global_num_token_non_padded = torch.full_like(batch.global_num_token_non_padded, len(positions))
        if batch.global_num_token_non_padded_cpu is not None:
            batch.global_num_token_non_padded_cpu = len(positions)
        translator = self._runner.kv_index_translator
        translator.own_plan(batch).bind(batch, translator)
        return batch


def unfold(logits: Any, last: Sequence[bool]) -> None:
    """Leave, of the outputs of every row, those of each request's last one; in place."""
    kept = [i for i, is_last in enumerate(last) if is_last]
    at = torch.tensor(kept, dtype=torch.long).to(logits.next_token_logits.device)
    logits.next_token_logits = logits.next_token_logits[at]
    for name in _PER_ROW:
        values = getattr(logits, name)
        if values is not None:
            setattr(logits, name, [values[i] for i in kept])


def join(parts: Sequence[Any]) -> None:
    """Add what the earlier parts of a pass gave to the last part's ``LogitsProcessorOutput``, in place."""
    whole = parts[-1]
    if len(parts) == 1:
        return
    whole.next_token_logits = torch.cat([part.next_token_logits for part in parts])
    for name in _PER_ROW:
        if getattr(whole, name) is not None:
            setattr(whole, name, [value for part in parts for value in getattr(part, name) or ()])
    if whole.input_token_logprobs is not None:
        found = [part.input_token_logprobs for part in parts if part.input_token_logprobs is not None]
        whole.input_token_logprobs = torch.cat(found)


def _last_rows(rows: Sequence[Row]) -> list[bool]:
    """Whether each row is its request's last one."""
    return [i + 1 == len(rows) or rows[i + 1].request != row.request for i, row in enumerate(rows)]


def _logprob_starts(batch: Any, rows: Sequence[Row]) -> list[int] | None:
    """First token of each row whose input logprob is asked for, relative to the row; its length when none is.

    Tokens with input logprobs are never placed, so they all lie in a request's last row.
    """
    if batch.extend_logprob_start_lens_cpu is None:
        return None
    absolute = [s + o for s, o in zip(batch.extend_prefix_lens_cpu, batch.extend_logprob_start_lens_cpu, strict=True)]
    return [min(max(absolute[row.request] - row.start, 0), row.stop - row.start) for row in rows]
