"""One-pass decode with rotated values: keys and values both from a codebook, the output rotated back once.

One program per (column tile and KV head, split, sequence). The columns of a tile are 16 (query token, query head) pairs
of one KV head. A program rotates its 16 queries itself, log2(D) steps in registers, and divides each by a power of two
so that fp16 keeps 11 bits of it. For each tile of T tokens

    S[16, T] = scale * key norm * (R q) . c          c the centroids of the key codes (FP8 keys: scale * q . k)
    O[16, Dv] += fp16(P * value norm * r) V          V the centroids of the value codes

with an online softmax in fp32 between them. r = 2^14 / (largest value norm so far) keeps the left operand a normal fp16
number whatever the norms are. Both centroid operands exist in registers only; their tables are fp16 numbers at which
the rounded codebook is closest to a multiple of the exact one (tile.centroid_table), and that multiple is folded into
the softmax scale and into the last factor. The reduction joins the splits in the rotated domain, which is linear,
rotates each row of the output back and scales it: once per query and head, not once per token.

Bytes per token and KV head: the slot. A program touches no token outside of its split and window, and none at or past
seq_len. Row j of a sequence with q query tokens sees tokens [max(0, h - window), h), h = seq_len - q + j + 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dequantize import _load_bytes, _load_codes, load_half
from .prod_decode import COLUMNS, centroids16
from .rotation import sylvester
from .store import _row_max, row_bytes, to_cube

__all__ = ["COLUMNS", "rotated_decode_kernel", "rotated_reduce_kernel"]

_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = tl.constexpr(1.4426950408889634)
_ABS_BITS = tl.constexpr(0x7FFFFFFF)
_TOP = tl.constexpr(11)  # log2 of where the largest number of a query begins
_LEAST_EXPONENT = tl.constexpr(27)  # biased: queries below 2^-100 are scaled as if they were 2^-100
_P_MAX = tl.constexpr(16384.0)  # where P * value norm * r ends
_LEAST_NORM = tl.constexpr(2.0**-24)  # smallest positive fp16


@triton.jit
def _fp8_halves(
    byte,  # int32, 0 to 255
):
    """E4M3FN numbers over device.FP8_SCALE as fp16, exactly: the fields moved into place, nothing compared."""
    bits = ((byte & 0x7F) << 7) | ((byte & 0x80) << 8)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit(
    do_not_specialize=("token_stride", "head_stride", "table_stride", "splits", "window"),
    do_not_specialize_on_alignment=("query_ptr", "seq_lens_ptr", "query_start_ptr", "table_ptr"),
)
def rotated_decode_kernel(
    query_ptr,  # [N, Hq, D] fp16/bf16
    cache_ptr,  # uint8, base of the cache
    table_ptr,  # [B, M] int32
    seq_lens_ptr,  # [B] int32
    query_start_ptr,  # [B + 1] int32, not touched unless MULTI
    part_ptr,  # [N * Hq, splits, Dv] fp32, written: rotated, without VALUE_FACTOR
    part_lse_ptr,  # [N * Hq, splits] fp32, written: base 2
    token_stride,  # of the query, elements
    head_stride,
    table_stride,
    splits,
    window,
    scale_log2,  # softmax scale * log2(e) * what the key table leaves out
    soft_cap,  # times log2(e)
    HQ: tl.constexpr,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    LOG_D: tl.constexpr,
    DV: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_TABLE: tl.constexpr,  # the non-negative centroids, fp16 numbers
    VALUE_TABLE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    KEY_DATA: tl.constexpr,  # (base, token stride, head stride, bytes, granule)
    KEY_NORM: tl.constexpr,
    VALUE_DATA: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    MULTI: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    N: tl.constexpr,  # COLUMNS
    T: tl.constexpr,
):
    TOKENS: tl.constexpr = N // G  # query tokens of a column tile
    kv_head = tl.program_id(0) % HK
    tile = tl.program_id(0) // HK
    split = tl.program_id(1)
    sequence = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + sequence)
    first_row, queries = sequence, 1
    if MULTI:
        first_row = tl.load(query_start_ptr + sequence)
        queries = tl.load(query_start_ptr + sequence + 1) - first_row
    if tile * TOKENS >= queries:
        return
    column = tl.arange(0, N)
    query = tile * TOKENS + column // G  # of the sequence
    there = (column < TOKENS * G) & (query < queries)
    token_row = (first_row + query).to(tl.int64)
    q_head = kv_head * G + column % G
    row = token_row * HQ + q_head
    high = tl.where(there, tl.maximum(seq_len - queries + query + 1, 0), 0)  # past the last token of a column
    begin = 0
    if WINDOW:  # of the tile's first query
        begin = tl.maximum(seq_len - queries + tile * TOKENS + 1 - window, 0)

    at = query_ptr + (token_row * token_stride + q_head * head_stride)[:, None] + tl.arange(0, D)[None, :]
    y = tl.load(at, there[:, None], 0.0).to(tl.float32)
    if KEY_BITS != 8:
        y = sylvester(y, N, D, LOG_D)
    largest = _row_max(to_cube(y.to(tl.int32, bitcast=True) & _ABS_BITS, N, LOG_D), LOG_D)
    biased = tl.maximum(tl.reshape(largest, (N,)) >> 23, _LEAST_EXPONENT)
    down = ((-biased + (254 + _TOP)) << 23).to(tl.float32, bitcast=True)  # 2^(TOP - e)
    factor = ((biased - _TOP) << 23).to(tl.float32, bitcast=True) * scale_log2
    rotated = (y * down[:, None]).to(tl.float16)

    best = tl.full((N,), float("-inf"), tl.float32)
    total = tl.zeros((N,), tl.float32)
    acc = tl.zeros((N, DV), tl.float32)
    norm_max = tl.full((), _LEAST_NORM, tl.float32)
    last = tl.max(high, 0)
    share = tl.cdiv(tl.cdiv(tl.maximum(last - begin, 0), splits), T) * T
    stop = tl.minimum(last, begin + (split + 1) * share)
    for start in range(begin + split * share, stop, T):
        token = start + tl.arange(0, T)
        # The last tile reads its last token again instead of masking every load: masks fill AMD's scalar registers.
        held = tl.minimum(token, stop - 1)
        inside = tl.full((T,), 1, tl.int1)
        entry = held // BLOCK_SIZE
        block = tl.load(table_ptr + sequence.to(tl.int64) * table_stride + entry).to(tl.int64)
        slot = block * BLOCK_SIZE + (held - entry * BLOCK_SIZE)
        place = row_bytes(
            cache_ptr, slot, kv_head, BLOCK_SIZE, BLOCK_STRIDE, KEY_DATA[0], KEY_DATA[1], KEY_DATA[2]
        )
        if KEY_BITS == 8:
            key = _fp8_halves(_load_bytes(place, inside, KEY_DATA[3], KEY_DATA[4], T, D))
        else:
            code = _load_codes(place, inside, KEY_BITS, KEY_DATA[3], KEY_DATA[4], T, D)
            key = centroids16(code, KEY_TABLE, KEY_BITS)
        score = tl.dot(rotated, tl.trans(key)) * factor[:, None]
        if KEY_BITS != 8:
            place = row_bytes(
                cache_ptr, slot, kv_head, BLOCK_SIZE, BLOCK_STRIDE, KEY_NORM[0], KEY_NORM[1], KEY_NORM[2]
            )
            score *= load_half(place, inside, KEY_NORM[4])[None, :]
        if SOFT_CAP:  # cap * tanh(s / cap), all in base 2
            grown = tl.exp2(score * (2.0 * _LOG2E / soft_cap))
            score = (1.0 - 2.0 / (1.0 + grown)) * soft_cap
        seen = (token[None, :] < high[:, None]) & (token < stop)[None, :]
        if WINDOW:
            seen = seen & (token[None, :] >= (high - window)[:, None])
        score = tl.where(seen, score, float("-inf"))
        new = tl.maximum(best, tl.max(score, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp2(score - shift[:, None])
        fade = tl.exp2(best - shift)
        best = new
        total = total * fade + tl.sum(weight, 1)

        place = row_bytes(
            cache_ptr, slot, kv_head, BLOCK_SIZE, BLOCK_STRIDE, VALUE_SCALE[0], VALUE_SCALE[1], VALUE_SCALE[2]
        )
        norm = load_half(place, inside, VALUE_SCALE[4])
        new_max = tl.maximum(norm_max, tl.max(norm, 0))
        left = (weight * (norm * (_P_MAX / new_max))[None, :]).to(tl.float16)
        fade = fade * (norm_max / new_max)
        norm_max = new_max
        place = row_bytes(
            cache_ptr, slot, kv_head, BLOCK_SIZE, BLOCK_STRIDE, VALUE_DATA[0], VALUE_DATA[1], VALUE_DATA[2]
        )
        code = _load_codes(place, inside, VALUE_BITS, VALUE_DATA[3], VALUE_DATA[4], T, DV)
        acc = tl.dot(left, centroids16(code, VALUE_TABLE, VALUE_BITS), acc * fade[:, None])
    some = total > 0.0
    acc = acc * tl.where(some, norm_max / (total * _P_MAX), 0.0)[:, None]
    lse = tl.where(some, best + tl.log2(total), float("-inf"))
    out = row * splits + split
    tl.store(part_ptr + (out * DV)[:, None] + tl.arange(0, DV)[None, :], acc, there[:, None])
    tl.store(part_lse_ptr + out, lse, there)


@triton.jit(
    do_not_specialize=(
        "batch", "splits", "out_token_stride", "out_head_stride", "lse_token_stride", "lse_head_stride",
    ),
    do_not_specialize_on_alignment=("query_start_ptr", "sinks_ptr", "out_ptr", "lse_ptr"),
)  # fmt: skip
def rotated_reduce_kernel(
    part_ptr,  # [N * Hq, splits, Dv] fp32
    part_lse_ptr,  # [N * Hq, splits] fp32, base 2
    query_start_ptr,  # [B + 1] int32, not touched unless MULTI
    sinks_ptr,  # [Hq] fp32, not touched unless SINKS
    out_ptr,  # [N, Hq, Dv], written
    lse_ptr,  # [N, Hq] fp32, written if WRITE_LSE: base e
    batch,
    splits,
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    HQ: tl.constexpr,
    DV: tl.constexpr,
    LOG_DV: tl.constexpr,
    VALUE_FACTOR: tl.constexpr,
    MULTI: tl.constexpr,
    SINKS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
):
    """One program per (query token, head): splits joined by their lse, rotated back. Padding rows are left alone."""
    row = tl.program_id(0).to(tl.int64)
    token = row // HQ
    head = row - token * HQ
    if MULTI:
        if token >= tl.load(query_start_ptr + batch):
            return
    dim = tl.arange(0, DV)
    best = float("-inf")
    total = 0.0
    acc = tl.zeros((DV,), tl.float32)
    for i in range(splits):
        at = row * splits + i
        lse = tl.load(part_lse_ptr + at)
        new = tl.maximum(best, lse)
        shift = tl.where(new == float("-inf"), 0.0, new)
        fade, weight = tl.exp2(best - shift), tl.exp2(lse - shift)
        acc = acc * fade + tl.load(part_ptr + at * DV + dim) * weight
        total = total * fade + weight
        best = new
    seen = total > 0.0
    if SINKS:  # one more logit in the denominator
        sink = tl.load(sinks_ptr + head).to(tl.float32) * _LOG2E
        new = tl.where(seen, tl.maximum(best, sink), 0.0)
        fade = tl.exp2(best - new)
        acc = acc * fade
        total = total * fade + tl.exp2(sink - new)
        best = new
    acc = tl.where(seen, acc / total, 0.0)
    back = tl.reshape(sylvester(tl.reshape(acc, (1, DV)), 1, DV, LOG_DV), (DV,)) * VALUE_FACTOR
    tl.store(
        out_ptr + token * out_token_stride + head * out_head_stride + dim, back.to(out_ptr.dtype.element_ty)
    )
    if WRITE_LSE:
        lse = tl.where(seen, (best + tl.log2(total)) * _LN2, float("-inf"))
        tl.store(lse_ptr + token * lse_token_stride + head * lse_head_stride, lse)
