"""Attention on the CPU that computes only the new queries: SGLang's attention backend `kvcmas_cpu`.

SGLang's `torch_native` backend pads the queries of an extend to the whole sequence, so a request whose prompt is
cached still pays for all of it, and its decode copies every key and value in every layer. Here an extend attends
the cached prefix without a mask, the new block causally, and merges the two by their log-sum-exp (the merge of
FlashAttention's blocks, Dao et al. 2022, section 3.1). The kernel is torch's own CPU flash attention, the one
that `torch_native` ends in too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from kvcmas_sgl.cpu.vision import convert_features

NAME = "kvcmas_cpu"

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

# Below this a second kernel call and its merge cost more than copying the run.
_LONGEST_COPIED_RUN = 2048
# Longest row of a sequence that joins others in one masked call: a call per row would read the prefix for each.
_SHORT_ROW = 16
# Keys per part when a long prefix is cut to occupy all threads; torch's kernel works in blocks of 512 keys.
_SHORTEST_PART = 1024


@dataclass(frozen=True)
class _Keys:
    """Tokens that every new query of a request attends without a mask.

    `main` holds `parts * length` tokens, read in place from slot `start` on if they lie in one run and copied by
    `main` otherwise; `rest` holds the others. Attention does not depend on the order of keys, so neither is in
    prompt order.
    """

    parts: int
    length: int
    start: int | None
    main: torch.Tensor
    rest: torch.Tensor | None


@dataclass(frozen=True)
class _Request:
    """One request of a forward: its query rows [first, first + new), its unmasked keys, its causal block.

    `block` is None for a single new token, whose own key is among `keys`; `keys` is None without a prefix. Short rows
    of one sequence are taken together: `mask`, fp32 [new, keys], then hides from each token the keys after its own.
    """

    first: int
    new: int
    keys: _Keys | None
    block: _Keys | None
    mask: torch.Tensor | None = None


@dataclass(frozen=True)
class _Plan:
    """What all layers of one forward share."""

    extend: bool
    rows: int
    requests: tuple[_Request, ...]


class CpuAttnBackend(TorchNativeAttnBackend):
    """`torch_native` for the CPU with new queries only and with keys read in place where they lie in one run.

    Causal self-attention in the KV pool's dtype takes the paths here; everything else (cross attention,
    encoder-only, sliding window, a KV dtype other than the query's, unequal head sizes) takes the parent's.
    """

    # Matches no forward: a caller that plans nothing gets the parent's implementation.
    _plan = _Plan(extend=False, rows=-1, requests=())

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan a forward once for all its layers: lengths, runs of slots, key parts."""
        super().init_forward_metadata(forward_batch)
        self._plan = _make_plan(forward_batch, self.req_to_token_pool.req_to_token)

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *args: Any,
        scaling: float | None = None,
        causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """Shapes as in the parent: query, output [tokens, heads, dim]; caches [slots, kv heads, dim]."""
        plan = self._plan
        covered = causal and plan.extend and _is_plain(query, k_cache, v_cache, args, options)
        if not covered or plan.rows != query.shape[0]:
            return super()._run_sdpa_forward_extend(
                query, output, k_cache, v_cache, *args, scaling=scaling, causal=causal, **options
            )
        return _run(plan, query, output, k_cache, v_cache, scaling)

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *args: Any,
        scaling: float | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Shapes as in the parent: query, output [requests, heads, dim]; caches [slots, kv heads, dim]."""
        plan = self._plan
        covered = not plan.extend and _is_plain(query, k_cache, v_cache, args, options)
        if not covered or plan.rows != query.shape[0]:
            return super()._run_sdpa_forward_decode(query, output, k_cache, v_cache, *args, scaling=scaling, **options)
        return _run(plan, query, output, k_cache, v_cache, scaling)


def register() -> None:
    """Make `--attention-backend kvcmas_cpu` known to SGLang in this process; idempotent."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    # The argument parser holds this very list, and SGLang's own helper would append the name twice.
    if NAME not in ATTENTION_BACKEND_CHOICES:
        ATTENTION_BACKEND_CHOICES.append(NAME)
    register_attention_backend(NAME)(_create)


def _create(runner: Any) -> CpuAttnBackend:
    # SGLang makes the backend once the model is loaded.
    convert_features(runner.model)
    return CpuAttnBackend(runner)


def _is_plain(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> bool:
    """Causal self-attention over the whole context, of one dtype and one head size.

    `args` are the parent's positional ones: req_to_token and lengths, then encoder_lens last.
    """
    return (
        args[-1] is None
        and not options.get("is_cross_attn")
        and options.get("sliding_window_size") is None
        and query.dtype == k_cache.dtype == v_cache.dtype
        and query.shape[-1] == v_cache.shape[-1]
    )


def _make_plan(forward_batch: ForwardBatch, req_to_token: torch.Tensor) -> _Plan:
    # Every tensor is on the CPU here, so tolist() waits for nothing.
    totals = forward_batch.seq_lens.tolist()
    pool_rows = forward_batch.req_pool_indices.tolist()
    extend = bool(forward_batch.forward_mode.is_extend())
    lengths = forward_batch.extend_seq_lens
    news = lengths.tolist() if extend and lengths is not None else [1] * len(totals)
    requests = []
    first = at = 0
    while at < len(totals):
        row, total, new = pool_rows[at], totals[at], news[at]
        stop = at + 1
        while new <= _SHORT_ROW and stop < len(totals) and pool_rows[stop] == row and news[stop] <= _SHORT_ROW:
            stop += 1
        if stop - at > 1:
            request = _short_rows(first, req_to_token[row], totals[at:stop], news[at:stop])
        else:
            slots = req_to_token[row, :total]
            prefix = total if new == 1 else total - new
            request = _Request(
                first=first,
                new=new,
                keys=_plan_keys(slots[:prefix]) if prefix else None,
                block=_plan_keys(slots[prefix:], cut=False) if prefix < total else None,
            )
        requests.append(request)
        first += request.new
        at = stop
    return _Plan(extend=extend, rows=first, requests=tuple(requests))


def _short_rows(first: int, slots: torch.Tensor, totals: list[int], news: list[int]) -> _Request:
    """Runs of a few tokens of one sequence with others between them; `totals` are their ends, `news` their lengths."""
    seen = [end for total, new in zip(totals, news, strict=True) for end in range(total - new + 1, total + 1)]
    keys = max(totals)
    hidden = torch.arange(keys)[None, :] >= torch.tensor(seen)[:, None]
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)
    return _Request(first, len(seen), _plan_keys(slots[:keys], cut=False), None, mask)


def _plan_keys(slots: torch.Tensor, *, cut: bool = True) -> _Keys:
    """Decide how `slots` [tokens] are read. Without `cut` they stay whole and in order, as a causal block needs."""
    total = slots.shape[0]
    breaks = (slots[1:] - slots[:-1] != 1).nonzero().flatten() + 1
    if breaks.shape[0] == 0:
        begin, end, start = 0, total, int(slots[0])
    else:
        edges = torch.cat([breaks.new_zeros(1), breaks, breaks.new_full((1,), total)])
        longest = int(edges.diff().argmax())
        begin, end = edges[longest : longest + 2].tolist()
        if cut and end - begin > _LONGEST_COPIED_RUN:
            start = int(slots[begin])
        else:
            begin, end, start = 0, total, None
    parts = max(1, min((end - begin) // _SHORTEST_PART, torch.get_num_threads())) if cut else 1
    length = (end - begin) // parts
    end = begin + parts * length
    rest = None if end - begin == total else torch.cat([slots[:begin], slots[end:]])
    return _Keys(parts=parts, length=length, start=start, main=slots[begin:end], rest=rest)


def _run(
    plan: _Plan,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Fill output [rows, heads, dim], request by request: a result never depends on the batch it was in."""
    kv_heads, dim = k_cache.shape[1:]
    group = query.shape[1] // kv_heads
    query = query.view(-1, kv_heads, group, dim)
    result = output.view(-1, kv_heads, group, dim)
    for request in plan.requests:
        rows = slice(request.first, request.first + request.new)
        result[rows] = _attend(request, query[rows], k_cache, v_cache, scaling)
    return output


def _attend(
    request: _Request, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attention of one request: query [new, kv heads, group, dim] -> the same shape, query dtype or float32."""
    new, kv_heads, group, dim = query.shape
    partial: list[tuple[torch.Tensor, torch.Tensor]] = []
    if request.keys is not None:
        keys = request.keys
        # Query heads of one group share their keys, so they become more query rows and no key is repeated.
        folded = query.permute(1, 2, 0, 3).reshape(1, kv_heads, group * new, dim)
        k, v = _read(keys, k_cache), _read(keys, v_cache)
        if request.mask is not None:
            out, _ = _flash(folded, k, v, attn_mask=request.mask.repeat(group, 1)[None, None], scale=scaling)
            return out.unflatten(2, (group, new))[0].permute(2, 0, 1, 3)
        out, lse = _flash(folded.expand(keys.parts, -1, -1, -1), k, v, scale=scaling)
        partial.append((out.unflatten(2, (group, new)), lse.unflatten(2, (group, new))))
        if keys.rest is not None:
            k, v = (cache.index_select(0, keys.rest)[None].transpose(1, 2) for cache in (k_cache, v_cache))
            out, lse = _flash(folded, k, v, scale=scaling)
            partial.append((out.unflatten(2, (group, new)), lse.unflatten(2, (group, new))))
    if request.block is not None:
        k, v = _read(request.block, k_cache), _read(request.block, v_cache)
        heads = query.flatten(1, 2)[None].transpose(1, 2)
        out, lse = _flash(heads, k, v, 0.0, True, scale=scaling)
        partial.append((out.unflatten(1, (kv_heads, group)), lse.unflatten(1, (kv_heads, group))))
    return _merge(partial).permute(2, 0, 1, 3)


def _read(keys: _Keys, cache: torch.Tensor) -> torch.Tensor:
    """The main tokens of `keys` from cache [slots, kv heads, dim], as [parts, kv heads, length, dim]."""
    if keys.start is None:
        tokens = cache.index_select(0, keys.main)
    else:
        tokens = cache.narrow(0, keys.start, keys.parts * keys.length)
    return tokens.unflatten(0, (keys.parts, keys.length)).transpose(1, 2)


def _merge(partial: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Attention over the union of disjoint key sets, from each set's result and log-sum-exp.

    Args:
        partial: (out [sets, kv heads, group, new, dim], lse [sets, kv heads, group, new] float32) pairs.

    Returns:
        [kv heads, group, new, dim]: softmax(lse)-weighted sum over all sets, in float32 if there are several.
    """
    if len(partial) == 1 and partial[0][0].shape[0] == 1:
        return partial[0][0][0]
    weights = torch.cat([lse for _, lse in partial]).softmax(0).unsqueeze(-1)
    merged = None
    for (out, _), weight in zip(partial, weights.split([out.shape[0] for out, _ in partial]), strict=True):
        part = (out * weight).sum(0) if out.shape[0] > 1 else out[0] * weight[0]
        merged = part if merged is None else merged.add_(part)
    assert merged is not None
    return merged
