"""One-pass decode of TurboQuant_prod: scores straight from codes and signs, values in the same pass.

One program per (column tile and KV head, split, sequence). The columns of a tile are 16 (query token, query head) pairs
of one KV head. For each tile of T tokens

    S[16, T] = ||q|| * scale * (norm * (R q) . c  +  residual * (sketched q) . s)

c the centroids of the codes, s the signs: both are operands of a matrix product that exist in registers only, the
sign as the sign bit of fp16 1.0. Then an online softmax in fp32 and O += P V with V = code * scale + zero in registers.
Nothing dequantised goes to memory. Codes are read as words, once for all columns.

Bytes per token and KV head: the slot. A program touches no token outside of its split, and none at or past seq_len.
Row j of a sequence with q query tokens sees its first seq_len - q + j + 1 tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dequantize import _load_codes, load_half
from .prod_store import load_grouped_values, signs_of
from .store import row_bytes

__all__ = ["COLUMNS", "centroids16", "prod_decode_kernel", "prod_reduce_kernel"]

COLUMNS = 16
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def centroids16(
    code,  # int32
    CENTROIDS: tl.constexpr,  # the non-negative ones, ascending: 2, 4 or 8
    BITS: tl.constexpr,
):
    """fp16 centroids without comparisons, whose masks would fill the scalar registers of AMD: the entry by multilinear
    interpolation of its index' bits, then the sign bit."""
    upper = code >> (BITS - 1)
    index = code ^ (upper - 1)  # entry of |c|, in the low BITS - 1 bits
    b0 = (index & 1).to(tl.float32)
    value = CENTROIDS[0] + b0 * (CENTROIDS[1] - CENTROIDS[0])
    if BITS == 3:
        b1 = ((index >> 1) & 1).to(tl.float32)
        step = CENTROIDS[2] - CENTROIDS[0]
        value += b1 * (step + b0 * (CENTROIDS[3] - CENTROIDS[1] - step))
    elif BITS == 4:
        b1 = ((index >> 1) & 1).to(tl.float32)
        b2 = ((index >> 2) & 1).to(tl.float32)
        first = CENTROIDS[4] - CENTROIDS[0]  # what b2 adds where b0 = b1 = 0, and so on
        second = CENTROIDS[5] - CENTROIDS[1] - first
        low = CENTROIDS[2] - CENTROIDS[0]
        both = CENTROIDS[3] - CENTROIDS[1] - low
        third = CENTROIDS[6] - CENTROIDS[2] - first
        every = CENTROIDS[7] - CENTROIDS[3] - first - second - third
        value += b1 * (low + b0 * both) + b2 * (first + b0 * second + b1 * (third + b0 * every))
    else:
        tl.static_assert(BITS == 2)
    bits = value.to(tl.int32, bitcast=True) | ((upper ^ 1) << 31)
    return bits.to(tl.float32, bitcast=True).to(tl.float16)


@triton.jit(
    do_not_specialize=("table_stride", "splits"),
    do_not_specialize_on_alignment=("seq_lens_ptr", "query_start_ptr", "table_ptr"),
)
def prod_decode_kernel(
    prepared_ptr,  # [N * Hq, 2 D] fp16
    query_scale_ptr,  # [N * Hq] fp32: ||q||
    cache_ptr,  # uint8, base of the cache
    table_ptr,  # [B, M] int32
    seq_lens_ptr,  # [B] int32
    query_start_ptr,  # [B + 1] int32, not touched unless MULTI
    part_ptr,  # [N * Hq, splits, Dv] fp32, written
    part_lse_ptr,  # [N * Hq, splits] fp32, written: base 2
    table_stride,
    splits,
    scale_log2,  # softmax scale * log2(e)
    HQ: tl.constexpr,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    CODE_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    CENTROIDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    KEY_DATA: tl.constexpr,
    KEY_SIGNS: tl.constexpr,
    KEY_NORM: tl.constexpr,
    KEY_RESIDUAL: tl.constexpr,
    VALUE_DATA: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    VALUE_ZERO: tl.constexpr,
    MULTI: tl.constexpr,
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
    column = tl.arange(0, N)
    query = tile * TOKENS + column // G  # of the sequence
    there = (column < TOKENS * G) & (query < queries)
    row = (first_row + query).to(tl.int64) * HQ + kv_head * G + column % G
    visible = tl.where(there, tl.maximum(seq_len - queries + query + 1, 0), 0)  # tokens that the column sees

    dim = tl.arange(0, D)
    at = prepared_ptr + (row * (2 * D))[:, None] + dim[None, :]
    rotated = tl.load(at, there[:, None], 0.0)
    sketched = tl.load(at + D, there[:, None], 0.0)
    factor = tl.load(query_scale_ptr + row, there, 0.0) * scale_log2

    best = tl.full((N,), float("-inf"), tl.float32)
    total = tl.zeros((N,), tl.float32)
    acc = tl.zeros((N, DV), tl.float32)
    last = tl.max(visible, 0)
    share = tl.cdiv(tl.cdiv(last, splits), T) * T
    stop = tl.minimum(last, (split + 1) * share)
    for start in range(split * share, stop, T):
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
        code = _load_codes(place, inside, CODE_BITS, KEY_DATA[3], KEY_DATA[4], T, D)
        c = centroids16(code, CENTROIDS, CODE_BITS)
        place = row_bytes(
            cache_ptr, slot, kv_head, BLOCK_SIZE, BLOCK_STRIDE, KEY_SIGNS[0], KEY_SIGNS[1], KEY_SIGNS[2]
        )
        signs = signs_of(place, inside, KEY_SIGNS[3], KEY_SIGNS[4], T, D)
        place = row_bytes(
            cache_ptr, slot, kv_head, BLOCK_SIZE, BLOCK_STRIDE, KEY_NORM[0], KEY_NORM[1], KEY_NORM[2]
        )
        norm = load_half(place, inside, KEY_NORM[4])
        place = row_bytes(
            cache_ptr,
            slot,
            kv_head,
            BLOCK_SIZE,
            BLOCK_STRIDE,
            KEY_RESIDUAL[0],
            KEY_RESIDUAL[1],
            KEY_RESIDUAL[2],
        )
        residual = load_half(place, inside, KEY_RESIDUAL[4])
        score = tl.dot(rotated, tl.trans(c)) * norm[None, :]
        score += tl.dot(sketched, tl.trans(signs)) * residual[None, :]
        seen = (token[None, :] < visible[:, None]) & (token < stop)[None, :]
        score = tl.where(seen, score * factor[:, None], float("-inf"))
        new = tl.maximum(best, tl.max(score, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp2(score - shift[:, None])
        fade = tl.exp2(best - shift)
        total = total * fade + tl.sum(weight, 1)
        value = load_grouped_values(
            cache_ptr, slot, kv_head, inside, VALUE_BITS, BLOCK_SIZE, BLOCK_STRIDE, VALUE_DATA, VALUE_SCALE, VALUE_ZERO,
            T, DV,
        )  # fmt: skip
        acc = tl.dot(weight.to(tl.float16), value.to(tl.float16), acc * fade[:, None])
        best = new
    some = total > 0.0
    acc = acc * tl.where(some, 1.0 / total, 0.0)[:, None]
    lse = tl.where(some, best + tl.log2(total), float("-inf"))
    out = row * splits + split
    tl.store(part_ptr + (out * DV)[:, None] + tl.arange(0, DV)[None, :], acc, there[:, None])
    tl.store(part_lse_ptr + out, lse, there)


@triton.jit(
    do_not_specialize=(
        "batch", "splits", "out_token_stride", "out_head_stride", "lse_token_stride", "lse_head_stride",
    ),
    do_not_specialize_on_alignment=("query_start_ptr", "out_ptr", "lse_ptr"),
)  # fmt: skip
def prod_reduce_kernel(
    part_ptr,  # [N * Hq, splits, Dv] fp32
    part_lse_ptr,  # [N * Hq, splits] fp32, base 2
    query_start_ptr,  # [B + 1] int32, not touched unless MULTI
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
    MULTI: tl.constexpr,
    WRITE_LSE: tl.constexpr,
):
    """One program per (query token, head): the splits' results weighted by their lse. Padding rows are left alone."""
    row = tl.program_id(0)
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
        at = row.to(tl.int64) * splits + i
        lse = tl.load(part_lse_ptr + at)
        new = tl.maximum(best, lse)
        shift = tl.where(new == float("-inf"), 0.0, new)
        fade, weight = tl.exp2(best - shift), tl.exp2(lse - shift)
        acc = acc * fade + tl.load(part_ptr + at * DV + dim) * weight
        total = total * fade + weight
        best = new
    acc = tl.where(total > 0.0, acc / total, 0.0)
    out = out_ptr + token.to(tl.int64) * out_token_stride + head * out_head_stride
    tl.store(out + dim, acc.to(out_ptr.dtype.element_ty))
    if WRITE_LSE:
        lse = tl.where(total > 0.0, (best + tl.log2(total)) * _LN2, float("-inf"))
        tl.store(lse_ptr + token.to(tl.int64) * lse_token_stride + head * lse_head_stride, lse)
