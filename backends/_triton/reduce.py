"""Partial results of the splits of a sequence joined to one. PARTS programs per query row (one head of one token).

A program owns its part of a row of the output; it reads that part of S partial results, RW words of two fp16 numbers
each, together with their weights and scales, a chunk of splits at a time, puts the rows of the accumulator back in the
order of the dims, adds the sink to the denominator and writes once. Splits that saw no key have weight 0, and what is
read of them, which was never written, is replaced by 0. Bytes: S * (RW + 2) * 4 read per row. One read follows another
only from chunk to chunk: the whole kernel takes little longer than one. With CUT the parts of a sequence are its
pieces, as many as the schedule says, or with ALONE as follow from the lengths (schedule.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import gdc_wait, halves, two_words
from .schedule import pieces_alone, pieces_of

__all__ = ["reduce_kernel", "sequence_of"]

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_AT_ONCE = tl.constexpr(128)  # sequences


@triton.jit
def sequence_of(
    query_start_ptr,  # [B + 1] int32
    token,
    batch,
):
    """(sequence, its first token) of a token; of padding the last sequence."""
    before = tl.zeros((_AT_ONCE,), tl.int32)  # sequences that start no later, but the first
    start = tl.zeros((_AT_ONCE,), tl.int32)
    for first in range(0, batch, _AT_ONCE):
        b = first + tl.arange(0, _AT_ONCE)
        starts = tl.load(query_start_ptr + b, b < batch, 0x7FFFFFFF)
        before += ((starts <= token) & (b > 0)).to(tl.int32)
        start = tl.maximum(start, tl.where(starts <= token, starts, 0))
    return tl.sum(before, axis=0), tl.max(start, axis=0)


@triton.jit
def _ordered(
    bits,  # int32, of fp32 numbers
):
    """Integers that compare like the numbers; of such integers the bits again."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(
    do_not_specialize=(
        "splits", "batch", "pieces", "most_queries", "out_token_stride", "out_head_stride", "lse_token_stride",
        "lse_head_stride", "window", "min_tiles",
    ),
    do_not_specialize_on_alignment=(
        "query_start_ptr", "schedule_ptr", "seq_lens_ptr", "sinks_ptr", "out_ptr", "lse_ptr",
    ),
)  # fmt: skip
def reduce_kernel(
    part_ptr,  # [N * Hq, S, RW] int32, pairs of fp16 numbers, or with CUT [P, Q, Hq, RW]
    part_lse_ptr,  # [N * Hq, S, 2] fp32, lse (base 2) and what the numbers must be multiplied by, or [P, Q, Hq, 2]
    query_start_ptr,  # [B + 1] int32; not read unless MULTI
    schedule_ptr,  # [4 P + 2 B] int32; read if CUT and not ALONE
    sinks_ptr,  # [Hq] fp32; not read unless SINKS
    out_ptr,  # [N, Hq, Dv], written
    lse_ptr,  # [N, Hq] fp32, natural logarithm, written if WRITE_LSE
    splits,  # S
    batch,
    pieces,  # P
    most_queries,  # Q: of a sequence the most that can be; not used unless CUT and MULTI
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    seq_lens_ptr,  # [B] int32; this and the next two as decode has them, used if CUT and ALONE
    window,
    min_tiles,
    HQ: tl.constexpr,
    DV: tl.constexpr,
    VALUE: tl.constexpr,  # (bits, lanes, unit, units, vec, ...), see tile.py
    RW: tl.constexpr,  # words of a partial result
    RW2: tl.constexpr,  # rounded up to a power of two
    PAIRED: tl.constexpr,  # a pair is of neighbouring units, not of neighbouring rows of one
    CHUNK: tl.constexpr,  # splits read at once
    PARTS: tl.constexpr,  # of a row, a power of two
    MULTI: tl.constexpr,
    SINKS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    PDL: tl.constexpr,
    CUT: tl.constexpr,
    ALONE: tl.constexpr,  # this and what follows as decode has them
    MOST: tl.constexpr,
    T: tl.constexpr,
    WINDOW: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = row // HQ
    head = row % HQ
    at_part = row * splits  # of split 0
    step = 1  # to the next split
    if CUT:
        # Before the wait for decode: the schedule was there before decode's first piece, as its programs waited for
        # prepare, and this starts later. With ALONE that holds for the lengths: all programs of decode wait first.
        if MULTI:
            sequence, start = sequence_of(query_start_ptr, token.to(tl.int32), batch)
        else:
            sequence = token
        if ALONE:
            first_piece, splits = pieces_alone(
                seq_lens_ptr,
                sequence.to(tl.int32),
                batch,
                pieces,
                window,
                min_tiles,
                MOST,
                T,
                WINDOW,
                AT_ONCE,
            )
        else:
            first_piece, splits = pieces_of(schedule_ptr, sequence, pieces)
        if MULTI:
            at_part = (first_piece.to(tl.int64) * most_queries + (token - start)) * HQ + head
            step = most_queries * HQ
        else:
            at_part = first_piece.to(tl.int64) * HQ + head
            step = HQ
    rows = 0
    if MULTI:
        rows = tl.load(query_start_ptr + batch)
    if PDL:
        gdc_wait()
    if MULTI:  # rows past the last sequence are padding
        if token >= rows:
            return

    WIDTH: tl.constexpr = RW2 // PARTS
    w = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    c = tl.arange(0, CHUNK)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc_low = tl.zeros((WIDTH,), tl.float32)
    acc_high = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, splits, CHUNK):
        chunk = first + c
        inside = chunk < splits
        part = at_part + chunk * step
        both = tl.load((part_lse_ptr + 2 * part).to(tl.pointer_type(tl.int64)), inside, 0xFF800000)
        lse_bits, scale_bits = two_words(both)
        lse = lse_bits.to(tl.float32, bitcast=True)
        scale = scale_bits.to(tl.float32, bitcast=True)
        pairs = tl.load(part_ptr + part[:, None] * RW + w[None, :], inside[:, None] & (w < RW)[None, :], 0)
        wrote = lse > float("-inf")  # a split without a key wrote nothing else
        low, high = halves(tl.where(wrote[:, None], pairs, 0))
        top = _ordered(tl.max(_ordered(lse_bits), axis=0))  # as integers: one instruction for a warp
        joint = tl.maximum(largest, top.to(tl.float32, bitcast=True))
        reference = tl.where(joint > float("-inf"), joint, 0.0)
        before = tl.exp2(largest - reference)
        weight = tl.exp2(lse - reference)
        total = total * before + tl.sum(weight, axis=0)
        weight = tl.where(wrote, weight * scale, 0.0)[:, None]
        acc_low = acc_low * before + tl.sum(low.to(tl.float32) * weight, axis=0)
        acc_high = acc_high * before + tl.sum(high.to(tl.float32) * weight, axis=0)
        largest = joint
    seen = largest > float("-inf")
    largest = tl.where(seen, largest, 0.0)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * _LOG2E
        joint = tl.where(seen, tl.maximum(largest, sink), 0.0)
        less = tl.exp2(largest - joint)
        total = total * less + tl.exp2(sink - joint)
        acc_low *= less
        acc_high *= less
        largest = joint
    norm = tl.where(seen, 1.0 / total, 0.0)

    SPAN: tl.constexpr = VALUE[1] * VALUE[2]
    row_ptr = out_ptr + token * out_token_stride + head * out_head_stride
    for i in tl.static_range(2):
        if PAIRED:
            unit = w // SPAN * 2 + i
            r = w % SPAN
        else:
            unit = (2 * w + i) // SPAN
            r = (2 * w + i) % SPAN
        lane = r % VALUE[1]
        code = r // VALUE[1]
        if VALUE[4] > 0:
            dim = (((unit // VALUE[4]) * VALUE[1] + lane) * VALUE[4] + unit % VALUE[4]) * VALUE[2] + code
        else:
            dim = (lane * VALUE[3] + unit) * VALUE[2] + code
        out = (acc_high if i else acc_low) * norm
        tl.store(row_ptr + dim, out.to(out_ptr.dtype.element_ty), (w < RW) & (unit < VALUE[3]) & (dim < DV))
    if WRITE_LSE:
        lse = tl.where(seen, (largest + tl.log2(total)) * _LN2, float("-inf"))
        tl.store(lse_ptr + token * lse_token_stride + head * lse_head_stride, lse, tl.program_id(1) == 0)
