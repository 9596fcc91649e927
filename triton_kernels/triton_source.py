"""Triton kernels of the correction op. ``triton_backend`` launches them; ``triton_tables`` builds what they read.

``correct`` is the whole op: gather, move, add the delta, scatter, for a block of rows, one layer and some heads:

    K[target] = shift(K[source]) + arrive(left_k @ right_k)        V[target] = V[source] + left_v @ right_v

``shift`` is the move from the source's position to the target's in one rotation, so a key is rotated once and only the
delta, which lives in the canonical frame, is roped by itself. A measured delta brings its left rows along. For a
predicted one, ``features`` writes them first: they depend on all heads of a row, ``correct`` works head by head.

Sizes in capitals are compile-time constants. Layers, groups and deltas are reached through tables of addresses, so one
launch covers all layers and a ragged batch. Offsets that involve a slot are int64: pools exceed 2^31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pointer(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """``address`` (int64) as a pointer. ALIGNED: the caller vouches for 16 bytes, which makes loads wide."""
    pointer = address.to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _stride(stride, ALIGNED: tl.constexpr):
    return tl.multiple_of(stride, 8) if ALIGNED else stride


@triton.jit
def _turn(real, imaginary, cos, sin):
    return real * cos - imaginary * sin, imaginary * cos + real * sin


@triton.jit
def _rotation(cos, sin, rows, live, pair, HALF: tl.constexpr):
    """Rows of a rotation, fp32 [BLOCK, pairs]; pairs from HALF on do not turn."""
    at = rows[:, None] * HALF + pair[None, :]
    mask = live[:, None] & (pair < HALF)[None, :]
    return tl.load(cos + at, mask=mask, other=1.0), tl.load(sin + at, mask=mask, other=0.0)


@triton.jit
def _dot(left, right, sums, PRECISION: tl.constexpr):
    # Products of equal 16-bit types are exact on matrix units; anything else is multiplied as fp32.
    if left.dtype == right.dtype:
        return tl.dot(left, right, sums, input_precision=PRECISION)
    else:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), sums, input_precision=PRECISION)


@triton.jit
def _write(pointers, value, mask):
    """Round to the pool's type and store; int32 [BLOCK], 1 where a row now holds NaN or Inf."""
    rounded = value.to(pointers.dtype.element_ty)
    tl.store(pointers, rounded, mask=mask)
    finite = tl.abs(rounded.to(tl.float32)) < float("inf")
    return tl.max(tl.where(mask & (finite == 0), 1, 0), axis=1)


@triton.jit
def _product(
    part, layer, at, live, first, column, valid,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK, COLUMNS] of left @ right at the channels ``first + column``; ``part`` is a row of ``Parts``.

    Layer 0 has no delta: its rank is taken for zero.
    """
    left = _pointer(tl.load(part), LEFT, ALIGNED) + layer * _stride(tl.load(part + 1), ALIGNED)
    left_row = _stride(tl.load(part + 2), ALIGNED)
    right = _pointer(tl.load(part + 3), RIGHT, ALIGNED) + layer * _stride(tl.load(part + 4), ALIGNED) + first
    right_row = _stride(tl.load(part + 5), ALIGNED)
    rank = tl.load(part + 6).to(tl.int32)
    columns = _stride(tl.load(part + 7).to(tl.int32), ALIGNED)
    bias = _pointer(tl.load(part + 8), RIGHT, ALIGNED) + layer * _stride(tl.load(part + 9), ALIGNED) + first
    bias_row = _stride(tl.load(part + 10), ALIGNED)
    biases = tl.load(part + 11).to(tl.int32)
    sums = tl.zeros((BLOCK, COLUMNS), dtype=tl.float32)
    for start in range(0, tl.where(layer == 0, 0, rank + biases), RANK):
        inner = start + tl.arange(0, RANK)
        x = tl.load(
            left + at[:, None] * left_row + inner[None, :],
            mask=live[:, None] & (inner < columns)[None, :],
            other=0.0,
        )
        y = tl.load(
            right + inner[:, None] * right_row + column[None, :],
            mask=(inner < rank)[:, None] & valid[None, :],
            other=0.0,
        )
        if HAS_BIAS:
            # The bias is more rows of the right factor: its left columns hold how much of it fades at each row.
            y += tl.load(
                bias + (inner - rank)[:, None] * bias_row + column[None, :],
                mask=((inner >= rank) & (inner < rank + biases))[:, None] & valid[None, :],
                other=0.0,
            )
        sums = _dot(x, y, sums, PRECISION)
    return sums


@triton.jit
def correct(
    k_layers, v_layers, blocks, parts, source, target, at,
    shift_cos, shift_sin, arrive_cos, arrive_sin, failed, slot_stride, head_stride,
    POOL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    DIM: tl.constexpr, ROTARY: tl.constexpr, NEOX: tl.constexpr,
    HAS_DELTA: tl.constexpr, HAS_BIAS: tl.constexpr,
    POOL_ALIGNED: tl.constexpr, PARTS_ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """The op for one block of rows, one layer, HEADS heads. Grid: (blocks, layers, heads / HEADS).

    k_layers, v_layers: int64 [L], addresses of the pool's buffers, all with the same strides (in elements).
    blocks: int32 [B, 3]: group, first row, rows. parts: int64 [groups, 2 (K, V), 12], see ``triton_tables.Part``.
    source, target, at: int64 [rows]: slots, and row of the left factors. Rotations: fp32 [rows, ROTARY / 2].
    failed: int32 [1], becomes 1 if a written row holds NaN or Inf.
    """
    block = blocks + 3 * tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    first_head = tl.program_id(2) * HEADS
    part = parts + 24 * tl.load(block)
    lane = tl.arange(0, BLOCK)
    live = lane < tl.load(block + 2)
    rows = tl.load(block + 1) + lane
    here = tl.load(source + rows, mask=live, other=0)[:, None] * slot_stride
    there = tl.load(target + rows, mask=live, other=0)[:, None] * slot_stride
    left_at = tl.load(at + rows, mask=live, other=0) if HAS_DELTA else rows.to(tl.int64)
    k_pool = _pointer(tl.load(k_layers + layer), POOL, POOL_ALIGNED)
    v_pool = _pointer(tl.load(v_layers + layer), POOL, POOL_ALIGNED)

    HALF: tl.constexpr = ROTARY // 2
    column = tl.arange(0, DIM_PAD)
    inside = live[:, None] & (column < DIM)[None, :]
    bad = tl.zeros((BLOCK,), dtype=tl.int32)
    for head in range(first_head, first_head + HEADS):
        base = head * head_stride
        channel = head * DIM
        if NEOX:
            pair = tl.arange(0, HALF_PAD)
            both = live[:, None] & (pair < HALF)[None, :]
            k_from = k_pool + here + base + pair[None, :]
            real = tl.load(k_from, mask=both, other=0.0).to(tl.float32)
            imaginary = tl.load(k_from + HALF, mask=both, other=0.0).to(tl.float32)
            cos, sin = _rotation(shift_cos, shift_sin, rows, live, pair, HALF)
            real, imaginary = _turn(real, imaginary, cos, sin)
            if HAS_DELTA:
                d_real = _product(part, layer, left_at, live, channel, pair, pair < HALF, LEFT, RIGHT, HAS_BIAS,
                                  PARTS_ALIGNED, PRECISION, BLOCK, HALF_PAD, RANK)  # fmt: skip
                d_imaginary = _product(part, layer, left_at, live, channel + HALF, pair, pair < HALF, LEFT, RIGHT,
                                       HAS_BIAS, PARTS_ALIGNED, PRECISION, BLOCK, HALF_PAD, RANK)  # fmt: skip
                cos, sin = _rotation(arrive_cos, arrive_sin, rows, live, pair, HALF)
                d_real, d_imaginary = _turn(d_real, d_imaginary, cos, sin)
                real += d_real
                imaginary += d_imaginary
            k_to = k_pool + there + base + pair[None, :]
            bad |= _write(k_to, real, both)
            bad |= _write(k_to + HALF, imaginary, both)
            if ROTARY < DIM:
                rest = tl.arange(0, REST_PAD)
                beyond = live[:, None] & (rest < DIM - ROTARY)[None, :]
                still = tl.load(k_pool + here + base + ROTARY + rest[None, :], mask=beyond, other=0.0).to(tl.float32)
                if HAS_DELTA:
                    still += _product(part, layer, left_at, live, channel + ROTARY, rest, rest < DIM - ROTARY, LEFT,
                                      RIGHT, HAS_BIAS, PARTS_ALIGNED, PRECISION, BLOCK, REST_PAD, RANK)  # fmt: skip
                bad |= _write(k_pool + there + base + ROTARY + rest[None, :], still, beyond)
        else:
            # Neighbours form a pair: whole rows are loaded and split in registers, which keeps the accesses wide.
            pair = tl.arange(0, DIM_PAD // 2)
            key = tl.load(k_pool + here + base + column[None, :], mask=inside, other=0.0).to(tl.float32)
            real, imaginary = tl.split(tl.reshape(key, (BLOCK, DIM_PAD // 2, 2)))
            cos, sin = _rotation(shift_cos, shift_sin, rows, live, pair, HALF)
            real, imaginary = _turn(real, imaginary, cos, sin)
            if HAS_DELTA:
                delta = _product(part, layer, left_at, live, channel, column, column < DIM, LEFT, RIGHT, HAS_BIAS,
                                 PARTS_ALIGNED, PRECISION, BLOCK, DIM_PAD, RANK)  # fmt: skip
                d_real, d_imaginary = tl.split(tl.reshape(delta, (BLOCK, DIM_PAD // 2, 2)))
                cos, sin = _rotation(arrive_cos, arrive_sin, rows, live, pair, HALF)
                d_real, d_imaginary = _turn(d_real, d_imaginary, cos, sin)
                real += d_real
                imaginary += d_imaginary
            key = tl.reshape(tl.join(real, imaginary), (BLOCK, DIM_PAD))
            bad |= _write(k_pool + there + base + column[None, :], key, inside)
        value = tl.load(v_pool + here + base + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if HAS_DELTA:
            value += _product(part + 12, layer, left_at, live, channel, column, column < DIM, LEFT, RIGHT, HAS_BIAS,
                              PARTS_ALIGNED, PRECISION, BLOCK, DIM_PAD, RANK)  # fmt: skip
        bad |= _write(v_pool + there + base + column[None, :], value, inside)
    # An atomic only where something is wrong: programs agree on the value, and the usual case writes nothing.
    tl.atomic_or(failed, 1, mask=tl.max(bad, axis=0) > 0)


@triton.jit
def _add_features(
    sums, x, project, taus, decays, t, channel, column, valid, rank,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Add sum_j g_j(t) x @ project_j for channels ``channel + column`` of x, fp32 [BLOCK, columns]."""
    inner = tl.arange(0, RANK)
    mask = valid[:, None] & (inner < rank)[None, :]
    # Fading the rows rather than the products keeps one accumulator, however many decays there are.
    for j in range(decays):
        fade = 1.0 / (1.0 + t / tl.load(taus + j))
        offset = (channel + column)[:, None] * _stride(rank * decays, ALIGNED) + _stride(j * rank, ALIGNED)
        y = tl.load(project + offset + inner[None, :], mask=mask, other=0.0)
        sums = tl.dot(x * fade[:, None], y, sums, input_precision=PRECISION)
    return sums


@triton.jit
def features(
    k_layers, v_layers, blocks, maps, source, offsets, leave_cos, leave_sin, out, slot_stride, head_stride, heads,
    out_layer, out_row,
    POOL: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, NEOX: tl.constexpr,
    POOL_ALIGNED: tl.constexpr, MAPS_ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Left rows of predicted deltas: h(t) of ``AffineDelta``, then the fading g(t) of its biases.

    Grid: (blocks, layers - 1). maps: int64 [groups, 8], see ``triton_tables.Map``. offsets: int64 [rows], offset in the
    span. out: fp32 [L, rows, out_row], columns [0, rank + biases) are written. The rest as in ``correct``.
    """
    block = blocks + 3 * tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64) + 1
    one = maps + 8 * tl.load(block)
    lane = tl.arange(0, BLOCK)
    live = lane < tl.load(block + 2)
    rows = tl.load(block + 1) + lane
    here = tl.load(source + rows, mask=live, other=0)[:, None] * slot_stride
    t = tl.load(offsets + rows, mask=live, other=0).to(tl.float32)
    project = _pointer(tl.load(one), tl.float32, MAPS_ALIGNED) + layer * _stride(tl.load(one + 1), MAPS_ALIGNED)
    shift = _pointer(tl.load(one + 2), tl.float32, False) + layer * tl.load(one + 3)
    taus = _pointer(tl.load(one + 4), tl.float32, False)
    rank, decays, biases = tl.load(one + 5).to(tl.int32), tl.load(one + 6).to(tl.int32), tl.load(one + 7).to(tl.int32)
    rank = _stride(rank, MAPS_ALIGNED)
    k_pool = _pointer(tl.load(k_layers + layer), POOL, POOL_ALIGNED)
    v_pool = _pointer(tl.load(v_layers + layer), POOL, POOL_ALIGNED)

    HALF: tl.constexpr = ROTARY // 2
    lanes = tl.arange(0, CHUNK)
    sums = tl.zeros((BLOCK, RANK), dtype=tl.float32)
    for head in range(heads):
        base = head * head_stride
        channel = head * DIM
        # A few channels at a time: both factors of a product pass through registers.
        if NEOX:
            for start in range(0, HALF, CHUNK):
                pair = start + lanes
                both = live[:, None] & (pair < HALF)[None, :]
                k_from = k_pool + here + base + pair[None, :]
                real = tl.load(k_from, mask=both, other=0.0).to(tl.float32)
                imaginary = tl.load(k_from + HALF, mask=both, other=0.0).to(tl.float32)
                cos, sin = _rotation(leave_cos, leave_sin, rows, live, pair, HALF)
                real, imaginary = _turn(real, imaginary, cos, sin)
                sums = _add_features(sums, real, project, taus, decays, t, channel, pair, pair < HALF, rank,
                                     MAPS_ALIGNED, PRECISION, RANK)  # fmt: skip
                sums = _add_features(sums, imaginary, project, taus, decays, t, channel + HALF, pair, pair < HALF, rank,
                                     MAPS_ALIGNED, PRECISION, RANK)  # fmt: skip
            for start in range(ROTARY, DIM, CHUNK):
                column = start + lanes
                still = tl.load(
                    k_pool + here + base + column[None, :], mask=live[:, None] & (column < DIM)[None, :], other=0.0
                )
                sums = _add_features(sums, still.to(tl.float32), project, taus, decays, t, channel, column,
                                     column < DIM, rank, MAPS_ALIGNED, PRECISION, RANK)  # fmt: skip
        else:
            for start in range(0, DIM, CHUNK):
                column = start + lanes
                pair = start // 2 + tl.arange(0, CHUNK // 2)
                inside = live[:, None] & (column < DIM)[None, :]
                key = tl.load(k_pool + here + base + column[None, :], mask=inside, other=0.0).to(tl.float32)
                real, imaginary = tl.split(tl.reshape(key, (BLOCK, CHUNK // 2, 2)))
                cos, sin = _rotation(leave_cos, leave_sin, rows, live, pair, HALF)
                real, imaginary = _turn(real, imaginary, cos, sin)
                key = tl.reshape(tl.join(real, imaginary), (BLOCK, CHUNK))
                sums = _add_features(sums, key, project, taus, decays, t, channel, column, column < DIM, rank,
                                     MAPS_ALIGNED, PRECISION, RANK)  # fmt: skip
        for start in range(0, DIM, CHUNK):
            column = start + lanes
            inside = live[:, None] & (column < DIM)[None, :]
            value = tl.load(v_pool + here + base + column[None, :], mask=inside, other=0.0).to(tl.float32)
            sums = _add_features(sums, value, project, taus, decays, t, (heads + head) * DIM, column, column < DIM,
                                 rank, MAPS_ALIGNED, PRECISION, RANK)  # fmt: skip

    inner = tl.arange(0, RANK)
    for j in range(decays):
        fade = 1.0 / (1.0 + t / tl.load(taus + j))
        sums += fade[:, None] * tl.load(shift + j * rank + inner, mask=inner < rank, other=0.0)[None, :]
    to = out + layer * out_layer + rows[:, None].to(tl.int64) * out_row
    tl.store(to + inner[None, :], sums, mask=live[:, None] & (inner < rank)[None, :])
    for i in range(biases):
        fade = 1.0 / (1.0 + t / tl.load(taus + decays + i))
        tl.store(out + layer * out_layer + rows.to(tl.int64) * out_row + rank + i, fade, mask=live)
