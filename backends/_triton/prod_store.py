"""TurboQuant_prod in Triton: store, dequantise, and the preparation of queries, which all multiply with the sketch S.

Tile: R rows, a row being one (token, KV head) vector, or one query. As in store.py the codes, norms, scales and zeros
are the reference's bit for bit; the sketch is a matrix product in fp32, whose order of additions is the compiler's, so
a sign may differ where the sketch is within its rounding error of 0.

Signs of 32 dims are a word: ``S r >= 0`` of 32 columns shifted into place and added. S is fp16 in memory (its entries
are fp16 numbers), read in columns of 32, and stays in the cache: D * D * 2 bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ...codebook import centroids
from ...layouts import Layout
from ...seeded import cache_sketch
from .dequantize import _load_codes, _load_granules, _store_rows, centroid_value, load_half, output_slots
from .rotation import rotation_table, sylvester
from .store import (
    _BIG_BITS,
    _FP16_MAX,
    _GROW,
    _INF_BITS,
    _KEY_EPS,
    _MIN_STEP,
    _SHRINK,
    _bucketize,
    _count,
    _divide,
    _field,
    _largest_bits,
    _load_run,
    _row_max,
    _row_min,
    _store_codes,
    _store_granules,
    _store_half,
    given_slots,
    row_bytes,
    row_sum,
    store_constexprs,
    to_cube,
)

__all__ = [
    "GROUP",
    "ROWS",
    "load_grouped_values",
    "prod_constexprs",
    "prod_dequantize_kernel",
    "prod_prepare_kernel",
    "prod_store_kernel",
    "signs_of",
    "sketch_tensor",
]

ROWS = 16
"""Rows of a program: the narrow side of a matrix instruction."""
GROUP = tl.constexpr(32)
_SIGN_ONE = tl.constexpr(0x3C00)  # fp16 1.0


@triton.jit
def _sketch32(
    x,  # [R, D] fp32
    sketch_ptr,  # S [D, D] fp16
    FIRST: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows FIRST to FIRST + 31 of S times each x -> [R, 32] fp32."""
    at = (FIRST + tl.arange(0, 32))[None, :] * D + tl.arange(0, D)[:, None]
    return tl.dot(x, tl.load(sketch_ptr + at).to(tl.float32), input_precision=PRECISION)


@triton.jit
def signs_of(
    at,  # [R] pointers to bytes
    mask,  # [R]
    NBYTES: tl.constexpr,
    GRANULE: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
):
    """+1 or -1 fp16 [R, D] from sign bits: the bit becomes the sign bit of 1.0, nothing is selected or multiplied."""
    words = _load_granules(at, mask, 4, 0, NBYTES, GRANULE, D // 32)
    for i in tl.static_range(1, 4 // GRANULE):
        words |= _load_granules(at, mask, 4, GRANULE * i, NBYTES, GRANULE, D // 32) << (8 * GRANULE * i)
    minus = ~(words[:, :, None] >> tl.arange(0, 32)[None, None, :]) << 15
    bits = tl.reshape((minus & 0x8000) | _SIGN_ONE, (R, D))
    return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def load_grouped_values(
    cache_ptr,
    slot,  # [R] int64
    head,
    mask,  # [R]
    VALUE_BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    VALUE_DATA: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    VALUE_ZERO: tl.constexpr,
    R: tl.constexpr,
    DV: tl.constexpr,
):
    """code * scale + zero of each group, fp32 [R, DV]; 0 where masked."""
    GROUPS: tl.constexpr = DV // GROUP
    at = row_bytes(
        cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, VALUE_DATA[0], VALUE_DATA[1], VALUE_DATA[2]
    )
    code = _load_codes(at, mask, VALUE_BITS, VALUE_DATA[3], VALUE_DATA[4], R, DV).to(tl.float32)
    group = 2 * tl.arange(0, GROUPS)[None, :]
    keep = mask[:, None] & (group >= 0)
    at = row_bytes(
        cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, VALUE_SCALE[0], VALUE_SCALE[1], VALUE_SCALE[2]
    )
    scale = tl.load((at[:, None] + group).to(tl.pointer_type(tl.float16)), keep, 0.0).to(tl.float32)
    at = row_bytes(
        cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, VALUE_ZERO[0], VALUE_ZERO[1], VALUE_ZERO[2]
    )
    zero = tl.load((at[:, None] + group).to(tl.pointer_type(tl.float16)), keep, 0.0).to(tl.float32)
    value = tl.reshape(code, (R, GROUPS, 32)) * scale[:, :, None] + zero[:, :, None]
    return tl.reshape(value, (R, DV))


@triton.jit
def _store_signs(
    at,  # [R] pointers to bytes
    word,  # [R] int32
    mask,  # [R]
    INDEX: tl.constexpr,
    NBYTES: tl.constexpr,
    GRANULE: tl.constexpr,
):
    for i in tl.static_range(4 // GRANULE):
        part = (word >> (8 * GRANULE * i))[:, None]
        _store_granules(at, part, mask, GRANULE, 4 * INDEX + GRANULE * i, NBYTES, GRANULE, 1)


@triton.jit
def _store_keys(
    key_ptr,
    cache_ptr,
    nonfinite_ptr,
    sketch_ptr,
    offset,  # [R] int64, elements
    inside,  # [R] row exists
    slot,  # [R] int64
    kept,  # [R] row is written
    head,  # [R]
    D: tl.constexpr,
    LOG_D: tl.constexpr,
    CODE_BITS: tl.constexpr,
    ROT_SCALE: tl.constexpr,
    MIDS: tl.constexpr,
    SQUARES: tl.constexpr,
    CENTROIDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    KEY_DATA: tl.constexpr,
    KEY_SIGNS: tl.constexpr,
    KEY_NORM: tl.constexpr,
    KEY_RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    COUNT: tl.constexpr,
    R: tl.constexpr,
):
    x = to_cube(_load_run(key_ptr, offset, inside, 0, D, D), R, LOG_D)
    largest = _largest_bits(x, LOG_D)
    bad = largest >= _INF_BITS  # [R, 1, ..., 1]
    if COUNT:
        _count(nonfinite_ptr, tl.reshape(bad, (R,)) & kept)
    shrink = tl.where(largest > _BIG_BITS, _SHRINK, 1.0)  # an exact power of two
    x = tl.where(bad, 0.0, x) * shrink
    norm = tl.sqrt_rn(row_sum(x * x, LOG_D))
    y = sylvester(tl.reshape(_divide(x, norm + shrink * _KEY_EPS), (R, D)), R, D, LOG_D) * ROT_SCALE
    codes, _ = _bucketize(y, MIDS, SQUARES, CODE_BITS)
    at = row_bytes(cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, KEY_DATA[0], KEY_DATA[1], KEY_DATA[2])
    _store_codes(at, codes, kept, CODE_BITS, KEY_DATA[3], KEY_DATA[4], R, D)
    left = y - centroid_value(codes, CENTROIDS, CODE_BITS)
    cube = to_cube(left, R, LOG_D)
    length = tl.reshape(tl.sqrt_rn(row_sum(cube * cube, LOG_D)), (R,))
    norm = tl.minimum(tl.reshape(norm * tl.where(largest > _BIG_BITS, _GROW, 1.0), (R,)), _FP16_MAX)
    at = row_bytes(cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, KEY_NORM[0], KEY_NORM[1], KEY_NORM[2])
    _store_half(at, norm, kept, KEY_NORM[4])
    at = row_bytes(
        cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, KEY_RESIDUAL[0], KEY_RESIDUAL[1], KEY_RESIDUAL[2]
    )
    _store_half(at, tl.minimum(norm * length, _FP16_MAX), kept, KEY_RESIDUAL[4])
    at = row_bytes(cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, KEY_SIGNS[0], KEY_SIGNS[1], KEY_SIGNS[2])
    for i in tl.static_range(D // 32):
        plus = (_sketch32(left, sketch_ptr, 32 * i, D, PRECISION) >= 0.0).to(tl.int32) << tl.arange(0, 32)[
            None, :
        ]
        word = tl.reshape(row_sum(to_cube(plus, R, 5), 5), (R,))
        _store_signs(at, word, kept, i, KEY_SIGNS[3], KEY_SIGNS[4])


@triton.jit
def _store_values(
    value_ptr,
    cache_ptr,
    nonfinite_ptr,
    offset,  # [R] int64, elements
    inside,  # [R] row exists
    slot,  # [R] int64
    kept,  # [R] row is written
    head,  # [R]
    DV: tl.constexpr,
    LOG_DV: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    VALUE_DATA: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    VALUE_ZERO: tl.constexpr,
    COUNT: tl.constexpr,
    R: tl.constexpr,
):
    GROUPS: tl.constexpr = DV // GROUP
    LEVELS: tl.constexpr = (1 << VALUE_BITS) - 1
    x = to_cube(_load_run(value_ptr, offset, inside, 0, DV, DV), R, LOG_DV)
    bad = _largest_bits(x, LOG_DV) >= _INF_BITS
    if COUNT:
        _count(nonfinite_ptr + 1, tl.reshape(bad, (R,)) & kept)
    x = tl.minimum(tl.maximum(tl.where(bad, 0.0, x), -_FP16_MAX), _FP16_MAX)
    x = to_cube(tl.reshape(x, (R * GROUPS, 32)), R * GROUPS, 5)
    low, high = _row_min(x, 5), _row_max(x, 5)  # [R * GROUPS, 1, ..., 1]
    scale = tl.div_rn(tl.maximum(high - low, _MIN_STEP * LEVELS), LEVELS + 0.0)
    index = _divide(x - low, scale) + 0.5  # never below 0: truncation is floor
    codes = tl.reshape(tl.minimum(index, LEVELS + 0.0).to(tl.int32), (R, DV))
    at = row_bytes(
        cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, VALUE_DATA[0], VALUE_DATA[1], VALUE_DATA[2]
    )
    _store_codes(at, codes, kept, VALUE_BITS, VALUE_DATA[3], VALUE_DATA[4], R, DV)
    low, scale = tl.reshape(low, (R, GROUPS)), tl.reshape(scale, (R, GROUPS))
    half = tl.minimum(scale, _FP16_MAX).to(tl.float16)
    top = low.to(tl.float16).to(tl.float32) + LEVELS * half.to(tl.float32)  # as in store.py: not past 65504
    half = (half.to(tl.int16, bitcast=True) - tl.where(top > _FP16_MAX, 1, 0).to(tl.int16)).to(
        tl.float16, bitcast=True
    )
    group = 2 * tl.arange(0, GROUPS)[None, :]
    keep = kept[:, None] & (group >= 0)
    at = row_bytes(
        cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, VALUE_SCALE[0], VALUE_SCALE[1], VALUE_SCALE[2]
    )
    tl.store((at[:, None] + group).to(tl.pointer_type(tl.float16)), half, keep)
    at = row_bytes(
        cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, VALUE_ZERO[0], VALUE_ZERO[1], VALUE_ZERO[2]
    )
    tl.store((at[:, None] + group).to(tl.pointer_type(tl.float16)), (low + 0.0).to(tl.float16), keep)


@triton.jit
def prod_store_kernel(
    key_ptr,  # [T, Hk, D] fp16/bf16/fp32
    value_ptr,  # [T, Hk, Dv] same dtype
    cache_ptr,  # uint8, base of the cache
    slot_ptr,  # [T] int32/int64
    nonfinite_ptr,  # [2] int32, not touched unless COUNT
    sketch_ptr,  # S [D, D] fp16
    rows,  # T * Hk
    key_token_stride,  # elements; the last dimension is contiguous
    key_head_stride,
    value_token_stride,
    value_head_stride,
    slot_stride,
    HK: tl.constexpr,
    D: tl.constexpr,
    LOG_D: tl.constexpr,
    DV: tl.constexpr,
    LOG_DV: tl.constexpr,
    CODE_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    ROT_SCALE: tl.constexpr,
    MIDS: tl.constexpr,
    SQUARES: tl.constexpr,
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
    PRECISION: tl.constexpr,  # of products with S: "ieee", or "tf32x3" where fp32 has no matrix instruction
    COUNT: tl.constexpr,
    R: tl.constexpr,
):
    """Program (i, 0): keys of rows i * R to i * R + R - 1; program (i, 1): their values."""
    token, head, inside, slot = given_slots(slot_ptr, slot_stride, rows, HK, R)
    kept = slot >= 0
    if tl.program_id(1) == 0:
        offset = token * key_token_stride + head * key_head_stride
        _store_keys(
            key_ptr, cache_ptr, nonfinite_ptr, sketch_ptr, offset, inside, slot, kept, head, D, LOG_D, CODE_BITS,
            ROT_SCALE, MIDS, SQUARES, CENTROIDS, BLOCK_SIZE, BLOCK_STRIDE, KEY_DATA, KEY_SIGNS, KEY_NORM,
            KEY_RESIDUAL, PRECISION,
            COUNT, R,
        )  # fmt: skip
    else:
        offset = token * value_token_stride + head * value_head_stride
        _store_values(
            value_ptr, cache_ptr, nonfinite_ptr, offset, inside, slot, kept, head, DV, LOG_DV, VALUE_BITS, BLOCK_SIZE,
            BLOCK_STRIDE, VALUE_DATA, VALUE_SCALE, VALUE_ZERO, COUNT, R,
        )  # fmt: skip


@triton.jit
def prod_dequantize_kernel(
    cache_ptr,  # uint8, base of the cache
    table_ptr,  # [B, M] int32
    start_ptr,  # [B] int32, first token to read
    cu_ptr,  # [B + 1] int32, first output row of each sequence
    sketch_ptr,  # S [D, D] fp16
    key_ptr,  # [sum, Hk, D] fp16/bf16/fp32, contiguous
    value_ptr,  # [sum, Hk, Dv]
    rows,  # sum * Hk
    batch,  # B
    bisections,  # ceil(log2(B))
    table_stride,
    HK: tl.constexpr,
    D: tl.constexpr,
    LOG_D: tl.constexpr,
    DV: tl.constexpr,
    CODE_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    ROT_SCALE: tl.constexpr,
    SKETCH_SCALE: tl.constexpr,
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
    R: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    slot, head, inside = output_slots(
        row, rows, cu_ptr, start_ptr, table_ptr, table_stride, batch, bisections, HK, BLOCK_SIZE, R
    )
    if tl.program_id(1) == 0:
        at = row_bytes(cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, KEY_DATA[0], KEY_DATA[1], KEY_DATA[2])
        code = _load_codes(at, inside, CODE_BITS, KEY_DATA[3], KEY_DATA[4], R, D)
        at = row_bytes(cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, KEY_NORM[0], KEY_NORM[1], KEY_NORM[2])
        norm = load_half(at, inside, KEY_NORM[4])
        at = row_bytes(
            cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, KEY_RESIDUAL[0], KEY_RESIDUAL[1], KEY_RESIDUAL[2]
        )
        residual = load_half(at, inside, KEY_RESIDUAL[4]) * SKETCH_SCALE
        at = row_bytes(
            cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, KEY_SIGNS[0], KEY_SIGNS[1], KEY_SIGNS[2]
        )
        signs = signs_of(at, inside, KEY_SIGNS[3], KEY_SIGNS[4], R, D)
        dim = tl.arange(0, D)
        estimate = tl.dot(signs, tl.load(sketch_ptr + dim[:, None] * D + dim[None, :]))  # S^T s
        rotated = centroid_value(code, CENTROIDS, CODE_BITS) * norm[:, None] + estimate * residual[:, None]
        _store_rows(key_ptr, row, sylvester(rotated, R, D, LOG_D) * ROT_SCALE, inside, D, D)
    else:
        value = load_grouped_values(
            cache_ptr, slot, head, inside, VALUE_BITS, BLOCK_SIZE, BLOCK_STRIDE, VALUE_DATA, VALUE_SCALE, VALUE_ZERO,
            R, DV,
        )  # fmt: skip
        _store_rows(value_ptr, row, value, inside, DV, DV)


@triton.jit(
    do_not_specialize=("rows", "token_stride", "head_stride"), do_not_specialize_on_alignment=("query_ptr",)
)
def prod_prepare_kernel(
    query_ptr,  # [N, Hq, D] fp16/bf16/fp32
    matrix_ptr,  # S [D, D] fp16
    prepared_ptr,  # [N * Hq, 2 D] fp16: R q / ||q||, then SKETCH_SCALE S R q / ||q||
    scale_ptr,  # [N * Hq] fp32: ||q||
    rows,  # N * Hq
    token_stride,
    head_stride,
    HQ: tl.constexpr,
    D: tl.constexpr,
    LOG_D: tl.constexpr,
    ROT_SCALE: tl.constexpr,
    SKETCH_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    R: tl.constexpr,
):
    """Each query rotated once and sketched once."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    inside = row < rows
    offset = (row // HQ).to(tl.int64) * token_stride + (row % HQ) * head_stride
    x = _load_run(query_ptr, offset, inside, 0, D, D)
    cube = to_cube(x, R, LOG_D)
    norm = tl.reshape(tl.sqrt_rn(row_sum(cube * cube, LOG_D)), (R,))
    x = x * tl.where(norm > 0.0, 1.0 / norm, 0.0)[:, None]
    y = sylvester(x, R, D, LOG_D) * ROT_SCALE
    tl.store(scale_ptr + row, norm, inside)
    at = prepared_ptr + (row.to(tl.int64) * (2 * D))[:, None]
    tl.store(at + tl.arange(0, D)[None, :], y.to(tl.float16), inside[:, None])
    for i in tl.static_range(D // 32):
        z = _sketch32(y, matrix_ptr, 32 * i, D, PRECISION) * SKETCH_SCALE
        tl.store(at + (D + 32 * i + tl.arange(0, 32))[None, :], z.to(tl.float16), inside[:, None])


@cache
def prod_constexprs(layout: Layout) -> dict[str, Any]:
    """Constexprs of these kernels, from the layout alone: each takes the names that it has."""
    preset, d, dv = layout.preset, layout.head_size, layout.value_head_size
    plain = store_constexprs(layout)
    bits = preset.code_bits
    return {
        "HK": layout.num_kv_heads,
        "D": d,
        "LOG_D": d.bit_length() - 1,
        "DV": dv,
        "LOG_DV": dv.bit_length() - 1,
        "CODE_BITS": bits,
        "VALUE_BITS": preset.value_bits,
        "ROT_SCALE": rotation_table(d).scale,
        "SKETCH_SCALE": float(np.sqrt(np.pi / 2) / d),
        "MIDS": plain["MIDS"],
        "SQUARES": plain["SQUARES"],
        "CENTROIDS": tuple(float(x) for x in centroids(d, bits)[1 << (bits - 1) :]),
        "BLOCK_SIZE": layout.block_size,
        "BLOCK_STRIDE": layout.block_stride,
        **{name.upper(): _field(layout, name) for name, _ in layout.places},
    }


def sketch_tensor(head_size: int, device: torch.device) -> torch.Tensor:
    """S [D, D] fp16 on ``device``."""
    return torch.from_numpy(cache_sketch(head_size).astype(np.float16)).to(device)
