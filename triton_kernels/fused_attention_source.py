"""Triton kernel of ``fused_attention``: attention over a span that is corrected in registers and never written."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend(
    q, k_pool, v_pool, slots, shift_cos, shift_sin, arrive_cos, arrive_sin, left_k, right_k, left_v, right_v, out, lse,
    queries, rows, rank, slot_stride, head_stride, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """QUERIES pairs of a query and one of its heads against one KV head. Grid: (query blocks, KV heads).

    q, out: [queries, HEADS * GROUP, DIM]; lse: fp32 [queries, HEADS * GROUP]; slots: int64 [rows]; rotations: fp32
    [rows, DIM / 2]; left: [rows, rank]; right: [rank, HEADS * DIM]. ``scale`` multiplies scores.
    """
    HALF: tl.constexpr = DIM // 2
    kv_head = tl.program_id(1)
    # Heads that share a KV head stand side by side in one block: the span is corrected once for all of them.
    line = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    asked = line < queries * GROUP
    head = (line // GROUP).to(tl.int64) * (HEADS * GROUP) + kv_head * GROUP + line % GROUP
    pair, channel, inner = tl.arange(0, HALF), tl.arange(0, DIM), tl.arange(0, RANK)
    q_at = q + head[:, None] * DIM + pair[None, :]
    q_real = tl.load(q_at, mask=asked[:, None], other=0.0)
    q_imaginary = tl.load(q_at + HALF, mask=asked[:, None], other=0.0)
    ranked = (inner < rank)[:, None]
    w_at = inner[:, None] * (HEADS * DIM) + kv_head * DIM
    w_real = tl.load(right_k + w_at + pair[None, :], mask=ranked, other=0.0)
    w_imaginary = tl.load(right_k + w_at + HALF + pair[None, :], mask=ranked, other=0.0)

    top = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    base = tl.zeros((QUERIES, DIM), dtype=tl.float32)
    low = tl.zeros((QUERIES, RANK), dtype=tl.float32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        live = row < rows
        at = tl.load(slots + row, mask=live, other=0)[:, None] * slot_stride + kv_head * head_stride
        turn = row[:, None] * HALF + pair[None, :]
        cos = tl.load(shift_cos + turn, mask=live[:, None], other=1.0)
        sin = tl.load(shift_sin + turn, mask=live[:, None], other=0.0)
        real = tl.load(k_pool + at + pair[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        imaginary = tl.load(k_pool + at + HALF + pair[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        k_real, k_imaginary = real * cos - imaginary * sin, imaginary * cos + real * sin
        left_at = row[:, None] * rank + inner[None, :]
        known = live[:, None] & (inner < rank)[None, :]
        x = tl.load(left_k + left_at, mask=known, other=0.0)
        real = tl.dot(x, w_real, input_precision=PRECISION)
        imaginary = tl.dot(x, w_imaginary, input_precision=PRECISION)
        cos = tl.load(arrive_cos + turn, mask=live[:, None], other=1.0)
        sin = tl.load(arrive_sin + turn, mask=live[:, None], other=0.0)
        k_real += real * cos - imaginary * sin
        k_imaginary += imaginary * cos + real * sin
        scores = tl.dot(q_real, tl.trans(k_real.to(q_real.dtype)), input_precision=PRECISION)
        scores = tl.dot(q_imaginary, tl.trans(k_imaginary.to(q_real.dtype)), scores, input_precision=PRECISION)
        scores = tl.where(live[None, :], scores * scale, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, axis=1))
        weight = tl.exp(scores - highest[:, None])
        fade = tl.exp(top - highest)
        top = highest
        total = total * fade + tl.sum(weight, axis=1)
        weight = weight.to(q_real.dtype)
        value = tl.load(v_pool + at + channel[None, :], mask=live[:, None], other=0.0)
        base = tl.dot(weight, value, base * fade[:, None], input_precision=PRECISION)
        y = tl.load(left_v + left_at, mask=known, other=0.0)
        low = tl.dot(weight, y, low * fade[:, None], input_precision=PRECISION)
    w_value = tl.load(right_v + w_at + channel[None, :], mask=ranked, other=0.0).to(tl.float32)
    base = tl.dot(low, w_value, base, input_precision=PRECISION) / total[:, None]
    tl.store(out + head[:, None] * DIM + channel[None, :], base.to(out.dtype.element_ty), mask=asked[:, None])
    tl.store(lse + head, top + tl.log(total), mask=asked)
