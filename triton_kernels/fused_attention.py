"""An experiment: attention over a span whose correction is never written to the pool.

A corrected span costs slots of its own. Here queries attend to the source's rows in place, with a measured delta
added on the way, and the result is merged with attention over the rest of the prompt by log-sum-exp.

The value side factors completely: P (V + U W) = P V + (P U) W, so a block of queries carries one more accumulator of
the delta's rank. The key side does not: the delta lives in the canonical frame, so row s of U W is roped at its own
position, and q . R(p_s) (U_s W) has no form (q W^T) U_s^T for all rows at once. (Factors of the roped delta would
have one, but hold for one position in one prompt, and a rotation that changes from row to row raises the rank.) The
kernel therefore forms a block's keys in registers, shift(K) + arrive(U W) as ``triton_source.correct`` does, and lets
all heads that share a KV head use them.

Nothing in the server calls this. Only NeoX tables that rotate the whole head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .batch import Group
from .delta import LowRankDelta
from .rope import RotaryTable, turn_

WARPS = 4
BLOCKS = (64, 32)
"""Queries (times heads that share keys) and rows of a program."""
SMALL_BLOCKS = (16, 32)
"""Of cards before sm_90, on which larger ones spill registers."""


@dataclass(frozen=True)
class Attended:
    """``out``: fp32 [queries, heads, dim]; ``lse``: fp32 [queries, heads], log of the sum of exponentials of scores."""

    out: Tensor
    lse: Tensor


def attend_reference(
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, group: Group, table: RotaryTable, layer: int, scale: float
) -> Attended:
    """Attention of all of ``q`` to all rows of ``group``, corrected as ``correction.run`` would, in plain torch.

    q: [queries, heads, dim], roped; k_buffer, v_buffer: [slots, kv_heads, dim] of layer ``layer`` >= 1.
    """
    delta = _delta(group)
    k, v = (x.index_select(0, group.source).float() for x in (k_buffer, v_buffer))
    dk, dv = delta.rows(layer, group.t, k.flatten(1), v.flatten(1))
    assert group.arrive is not None
    moved = turn_(k, *group.shift, table) + turn_(dk.view_as(k).clone(), *group.arrive, table)
    share = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(share, dim=1) for x in (moved, v + dv.view_as(v)))
    scores = torch.einsum("qhd,nhd->qhn", q.float(), keys) * scale
    return Attended(torch.einsum("qhn,nhd->qhd", scores.softmax(-1), values), scores.logsumexp(-1))


def merge(one: Attended, other: Attended) -> Attended:
    """Attention over both sets of rows, from attention over each (FlashInfer's ``merge_state`` in natural logs)."""
    lse = torch.logaddexp(one.lse, other.lse)
    shares = ((part.lse - lse).exp().unsqueeze(-1) * part.out for part in (one, other))
    return Attended(sum(shares, torch.zeros_like(one.out)), lse)


def attend(
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, group: Group, table: RotaryTable, layer: int, scale: float
) -> Attended:
    """As ``attend_reference``, in one launch; the delta's factors must have the pool's and ``q``'s type.

    Raises ValueError on a table, a type or sizes that the kernel does not take.
    """
    from .fused_attention_source import attend as kernel

    old = q.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(q.device) < (9, 0)
    blocks = SMALL_BLOCKS if old else BLOCKS
    grid, arguments, constants = attend_launch(q, k_buffer, v_buffer, group, table, layer, scale, blocks)
    kernel[grid](*arguments, **constants, num_warps=WARPS, num_stages=1)
    return Attended(arguments[12], arguments[13])


def attend_launch(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    group: Group,
    table: RotaryTable,
    layer: int,
    scale: float,
    blocks: tuple[int, int] = BLOCKS,
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, object]]:
    """Grid, arguments and constants of the kernel; arguments 12 and 13 are the results."""
    delta = _delta(group)
    queries, heads, dim = q.shape
    kv_heads = k_buffer.shape[1]
    if not table.is_neox or table.rotary_dim != dim or dim & (dim - 1) or dim < 32:
        raise ValueError(f"head_dim is {dim}, rotary_dim {table.rotary_dim}: it takes whole NeoX heads, a power of two")
    rank = delta.left_k.shape[2]
    parts = [x[layer] for x in (delta.left_k, delta.right_k, delta.left_v, delta.right_v)]
    if {x.dtype for x in (q, k_buffer, v_buffer, *parts)} != {q.dtype} or delta.left_v.shape[2] != rank:
        raise ValueError("q, the pool and the delta's factors must have one type, and K and V one rank")
    at = group.t - delta.start
    left_k, left_v = (x.index_select(0, at) for x in (parts[0], parts[2]))
    assert group.arrive is not None
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(queries, heads, dtype=torch.float32, device=q.device)
    arguments = (
        *(q.contiguous(), k_buffer, v_buffer, group.source, *group.shift, *group.arrive),
        *(left_k, parts[1].contiguous(), left_v, parts[3].contiguous(), out, lse),
        *(queries, group.source.numel(), rank, k_buffer.stride(0), k_buffer.stride(1), scale),
    )
    constants: dict[str, object] = {
        "HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "DIM": dim,
        "RANK": max(16, 1 << (rank - 1).bit_length()),
        "PRECISION": "tf32" if q.dtype != torch.float32 else "ieee",
        "QUERIES": blocks[0],
        "BLOCK": blocks[1],
    }
    return (-(-queries * (heads // kv_heads) // blocks[0]), kv_heads), arguments, constants


def _delta(group: Group) -> LowRankDelta:
    if not isinstance(group.delta, LowRankDelta):
        raise ValueError(f"the group's delta is {type(group.delta).__name__}: it must be LowRankDelta")
    return group.delta
