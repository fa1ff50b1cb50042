"""Store: raw fp16/bf16 (or fp32) K and V to packed cache bytes, one launch for every preset and layout.

Tile: R rows, a row being one (token, KV head) vector; program (i, 0) owns the keys and program (i, 1) the values of
rows i * R to i * R + R - 1, from load to store. A row never leaves its program: it is read once from memory (head
sizes whose rotation has m > 1: once more, from cache), everything else happens in registers, and its bytes are
written once, in granules as wide as the layout's alignment allows.

Floor: T * Hk * (D + Dv) * 2 bytes read + T * Hk * slot written; at D = 128 and 4/4 bits 512 + 134 bytes per row.
Budget of arithmetic per key element on NVIDIA, 24 instructions: 1 conversion, 2 for the norm, 3 for the division,
log2(D) additions and 2 shuffles of them between lanes, 7 for the code and its centroid's square (device.nearest_code),
1 addition of the squares, 1 shift into place. Elsewhere 12 more at 4 bits: a binary search over 2^(b-1) - 1 midpoints,
and selects. Per value element 10: conversion, minimum, maximum, subtraction, 3 for the division, 2 for rounding, shift.
What only rows with a NaN, an infinity or numbers out of range need is behind a branch on the whole program.

Same bytes everywhere. Order and rounding of every fp32 operation are those of the torch reference: reductions are
pairwise in a written-out order (``row_sum``), divisions and square roots are correctly rounded (``_divide``,
``div_rn``, ``sqrt_rn``), and the compiler may not contract to fused multiply-adds (``enable_fp_fusion=False``). FP8
goes through integer code: sm_80 has no conversion, and gfx942's turns fp16 464 to 480 into NaN.

Rules, as in docs/design.md: a vector with a NaN or an infinity is stored as the zero vector and counted; keys
above 2^56 are scaled by a power of two before they are squared; stored norms and scales end at 65504, values are
clamped to +-65504 first; a slot below 0 writes nothing; pads are never written. Rotated values are coded as keys are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import gcd
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ...codebook import centroids, midpoints
from ...layouts import FIELD_NAMES, Layout
from ...spec import NormMeaning, SpecError
from .device import GUESS_BASE, nearest_code, whole
from .launch import Kernel, specialised
from .rotation import add_run, rotation_table, sylvester

__all__ = [
    "UNROTATED",
    "Store",
    "code_guess",
    "default_rows",
    "field_constants",
    "fp8_e4m3fn_bytes",
    "given_slots",
    "granule",
    "row_bytes",
    "row_sum",
    "store_constexprs",
    "store_target",
    "tile_rows",
    "to_cube",
]

_FP16_MAX = tl.constexpr(65504.0)
_FP8_MAX = tl.constexpr(448.0)
_KEY_EPS = tl.constexpr(1e-8)
_CENTROID_EPS = tl.constexpr(1e-16)
_MIN_STEP = tl.constexpr(1e-8)
_BIG_BITS = tl.constexpr(0x5B800000)  # 2^56 as fp32 bits: D * BIG**2 fits fp32
_BIG_SQUARE = tl.constexpr(2.0**112)  # a row with a larger number has a larger sum of squares, or NaN
_SHRINK = tl.constexpr(2.0**-80)
_GROW = tl.constexpr(2.0**80)
_INF_BITS = tl.constexpr(0x7F800000)
_ABS_BITS = tl.constexpr(0x7FFFFFFF)
_FP8_MIN_NORMAL_BITS = tl.constexpr(0x3C800000)  # 2^-6
_FP8_SUBNORMAL_MAGIC = tl.constexpr(16384.0)  # 2^14: its ulp is 2^-9, the step of FP8 subnormals
_FP8_REBIAS = tl.constexpr(120 << 3)  # (127 - 7) in the exponent field after the shift by 20

UNROTATED: Mapping[str, Any] = {"M": 1, "M2": 1, "P": 1, "LOG_P": 0, "SIGNS": (0,), "ROT_SCALE": 1.0}
"""Stands for :meth:`.rotation.RotationTable.constexprs` where nothing is rotated."""


@triton.jit
def to_cube(
    x,  # [R, W]
    R: tl.constexpr,
    LOG_W: tl.constexpr,
):
    """One dimension of two for each bit of the column, the highest first -> [R, 2, ..., 2].

    Reductions over these dimensions, and what is broadcast over them again, stay in the registers and lanes that
    ``x`` is in. And they are right: where the lanes of a row are not neighbours (lane bits 0, 1 and 4, say), Triton
    3.6 reduces a whole row over the wrong lanes (0, 1 and 2); a reduction over one bit it gets right.
    """
    return tl.reshape(x, [R] + [2] * LOG_W)


@triton.jit
def row_sum(
    x,  # [R, 2, ..., 2] fp32
    LOG_W: tl.constexpr,
):
    """Sum of each row, pairwise: element i with element i + W/2, and so on -> [R, 1, ..., 1]."""
    for step in tl.static_range(LOG_W):
        x = tl.sum(x, axis=step + 1, keep_dims=True)
    return x


@triton.jit
def _row_max(
    x,  # [R, 2, ..., 2]
    LOG_W: tl.constexpr,
):
    """Largest of each row -> [R, 1, ..., 1]."""
    for step in tl.static_range(LOG_W):  # lowest bit first: those are in one thread
        x = tl.max(x, axis=LOG_W - step, keep_dims=True)
    return x


@triton.jit
def _row_min(
    x,  # [R, 2, ..., 2]
    LOG_W: tl.constexpr,
):
    """Smallest of each row -> [R, 1, ..., 1]."""
    for step in tl.static_range(LOG_W):  # lowest bit first: those are in one thread
        x = tl.min(x, axis=LOG_W - step, keep_dims=True)
    return x


@triton.jit
def _min_or_nan(
    a,  # fp32
    b,  # fp32
):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _max_or_nan(
    a,  # fp32
    b,  # fp32
):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _zero_times(
    a,  # fp32
    b,  # fp32
):
    """b, or NaN if a is not finite."""
    return tl.fma(a, 0.0, b)


@triton.jit
def _row_range(
    low,  # [R, 2, ..., 2] fp32: the row, and past its end what is not the smallest
    high,  # [R, 2, ..., 2] fp32: the row, and past its end what is not the largest
    x,  # [R, 2, ..., 2] fp32: the row, and past its end what is finite
    LOG_W: tl.constexpr,
    TARGET: tl.constexpr,
):
    """(smallest of ``low``, largest of ``high``, are they inside the range of fp16 and is no element NaN?) of each row
    -> [R, 1, ..., 1] each. On NVIDIA a minimum that keeps NaN costs nothing more; elsewhere a chain of fused products
    with 0, one per element, is cheaper."""
    if TARGET == "cuda":
        for step in tl.static_range(LOG_W):  # lowest bit first: those are in one thread
            low = tl.reduce(low, LOG_W - step, _min_or_nan, keep_dims=True)
            high = tl.reduce(high, LOG_W - step, _max_or_nan, keep_dims=True)
        usual = (low >= -_FP16_MAX) & (high <= _FP16_MAX)
    else:
        low, high = _row_min(low, LOG_W), _row_max(high, LOG_W)
        for step in tl.static_range(LOG_W):
            x = tl.reduce(x, LOG_W - step, _zero_times, keep_dims=True)
        usual = (low >= -_FP16_MAX) & (high <= _FP16_MAX) & (x * 0.0 == 0.0)
    return low, high, usual


@triton.jit
def _clamp(
    x,  # fp32
):
    return tl.minimum(tl.maximum(x, -_FP16_MAX), _FP16_MAX)


@triton.jit
def _any_not(
    usual,  # [R, 1, ..., 1] bool
    R: tl.constexpr,
):
    """Is any row of the program not as usual? A scalar, for branches around work that few programs need."""
    return tl.max(tl.where(tl.reshape(usual, (R,)), 0, 1), axis=0) != 0


@triton.jit
def _divide(
    x,  # fp32
    divisor,  # fp32, broadcast to the shape of x
):
    """x / divisor: a correctly rounded reciprocal per divisor, and a quotient corrected by its exact remainder.

    The result is the correctly rounded quotient but where that lies within 2^-23 of its last place of a tie, and the
    same on every device, since products, fused products and ``div_rn`` are.
    """
    reciprocal = tl.div_rn(1.0, divisor)
    quotient = x * reciprocal
    remainder = tl.fma(quotient, tl.broadcast_to(-divisor, x.shape), x)
    return tl.fma(remainder, tl.broadcast_to(reciprocal, x.shape), quotient)


@triton.jit
def row_bytes(
    cache_ptr,
    slot,  # [R] int64
    head,  # [R]
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BASE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
):
    """Address of a field of every row -> [R] pointers to bytes."""
    block = slot // BLOCK_SIZE
    token = slot - block * BLOCK_SIZE
    return cache_ptr + (block * BLOCK_STRIDE + token * TOKEN_STRIDE + (BASE + head * HEAD_STRIDE))


@triton.jit
def given_slots(
    slot_ptr,  # [T] int32/int64
    slot_stride,
    rows,  # T * Hk
    HK: tl.constexpr,
    R: tl.constexpr,
):
    """(token int64, head, row exists, slot int64) [R] of the program's rows, a row being a (token, KV head) pair; the
    slot is negative for padding and for rows that do not exist."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    inside = row < rows
    token = row // HK
    head = row - token * HK
    token = token.to(tl.int64)
    slot = tl.load(slot_ptr + token * slot_stride, inside, -1).to(tl.int64)
    return token, head, inside, slot


@triton.jit
def _store_granules(
    at,  # [R] pointers to bytes
    data,  # [R, G] int32, the granule in the low bits
    mask,  # [R]
    STEP: tl.constexpr,  # bytes from one granule to the next
    SHIFT: tl.constexpr,  # bytes from ``at`` to the first granule
    NBYTES: tl.constexpr,  # size of the field: granules at or past it are dropped
    GRANULE: tl.constexpr,
    G: tl.constexpr,
):
    index = tl.arange(0, G)
    keep = mask[:, None]
    if SHIFT + STEP * (G - 1) >= NBYTES:
        keep = keep & (SHIFT + STEP * index < NBYTES)[None, :]
    step = (STEP // GRANULE) * index[None, :]
    if GRANULE == 4:
        tl.store((at + SHIFT).to(tl.pointer_type(tl.int32))[:, None] + step, data, keep)
    elif GRANULE == 2:
        tl.store((at + SHIFT).to(tl.pointer_type(tl.int16))[:, None] + step, data.to(tl.int16), keep)
    else:
        tl.store((at + SHIFT)[:, None] + step, (data & 255).to(tl.uint8), keep)


@triton.jit
def _store_codes(
    at,  # [R] pointers to bytes
    codes,  # [R, W] int32, zero from the vector's end
    mask,  # [R]
    BITS: tl.constexpr,
    NBYTES: tl.constexpr,
    GRANULE: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    """Write the little-endian bit stream of ``codes``. Eight codes fill BITS bytes: one group."""
    G: tl.constexpr = W // 8
    shifts = BITS * tl.arange(0, 8)
    group = tl.reshape(tl.reshape(codes, (R, G, 8)) << shifts[None, None, :], (R, G, 2, 2, 2))
    group = tl.sum(tl.sum(tl.sum(group, axis=4), axis=3), axis=2)  # [R, G] int32
    if BITS == 4:
        if GRANULE == 4:
            _store_granules(at, group, mask, 4, 0, NBYTES, 4, G)
        else:
            for i in tl.static_range(4 // GRANULE):
                _store_granules(at, group >> (8 * GRANULE * i), mask, 4, GRANULE * i, NBYTES, GRANULE, G)
    elif BITS == 3:
        if GRANULE == 4:  # four groups of 24 bits are three words
            even, odd = tl.split(tl.reshape(group, (R, G // 2, 2)))
            g0, g2 = tl.split(tl.reshape(even, (R, G // 4, 2)))
            g1, g3 = tl.split(tl.reshape(odd, (R, G // 4, 2)))
            _store_granules(at, g0 | (g1 << 24), mask, 12, 0, NBYTES, 4, G // 4)
            _store_granules(at, (g1 >> 8) | (g2 << 16), mask, 12, 4, NBYTES, 4, G // 4)
            _store_granules(at, (g2 >> 16) | (g3 << 8), mask, 12, 8, NBYTES, 4, G // 4)
        elif GRANULE == 2:  # two groups are three halfwords
            g0, g1 = tl.split(tl.reshape(group, (R, G // 2, 2)))
            _store_granules(at, g0, mask, 6, 0, NBYTES, 2, G // 2)
            _store_granules(at, (g0 >> 16) | (g1 << 8), mask, 6, 2, NBYTES, 2, G // 2)
            _store_granules(at, g1 >> 8, mask, 6, 4, NBYTES, 2, G // 2)
        else:
            for i in tl.static_range(3):
                _store_granules(at, group >> (8 * i), mask, 3, i, NBYTES, 1, G)
    else:
        tl.static_assert(BITS == 2)
        if GRANULE == 4:  # two groups of 16 bits are a word
            g0, g1 = tl.split(tl.reshape(group, (R, G // 2, 2)))
            _store_granules(at, g0 | (g1 << 16), mask, 4, 0, NBYTES, 4, G // 2)
        elif GRANULE == 2:
            _store_granules(at, group, mask, 2, 0, NBYTES, 2, G)
        else:
            for i in tl.static_range(2):
                _store_granules(at, group >> (8 * i), mask, 2, i, NBYTES, 1, G)


@triton.jit
def _store_bytes(
    at,  # [R] pointers to bytes
    data,  # [R, W] int32, one byte each
    mask,  # [R]
    NBYTES: tl.constexpr,
    GRANULE: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    """Write one byte per element, gathered to granules."""
    if GRANULE == 1:
        _store_granules(at, data, mask, 1, 0, NBYTES, 1, W)
    else:
        shifts = 8 * tl.arange(0, GRANULE)
        words = tl.reshape(data, (R, W // GRANULE, GRANULE)) << shifts[None, None, :]
        if GRANULE == 4:
            words = tl.sum(tl.reshape(words, (R, W // 4, 2, 2)), axis=3)
        words = tl.sum(words, axis=2)
        _store_granules(at, words, mask, GRANULE, 0, NBYTES, GRANULE, W // GRANULE)


@triton.jit
def _store_half(
    at,  # [R] pointers to bytes
    value,  # [R] fp32, already inside the range of fp16
    mask,  # [R]
    ALIGNED: tl.constexpr,
):
    """Write fp16(value); in two bytes where the field lies at odd addresses."""
    half = value.to(tl.float16)
    if ALIGNED:
        tl.store(at.to(tl.pointer_type(tl.float16)), half, mask)
    else:
        bits = half.to(tl.int16, bitcast=True).to(tl.int32)
        tl.store(at, (bits & 255).to(tl.uint8), mask)
        tl.store(at + 1, ((bits >> 8) & 255).to(tl.uint8), mask)


@triton.jit
def fp8_e4m3fn_bytes(
    x,  # fp32, finite
):
    """OCP E4M3FN bytes as int32: round to nearest even, saturating at +-448, -0 as 0x00. Integer code."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), _FP8_MAX)
    m = magnitude.to(tl.int32, bitcast=True)
    rounded = (
        m + 0x7FFFF + ((m >> 20) & 1)
    ) >> 20  # exponent and the three bits that stay; may carry upwards
    small = (magnitude + _FP8_SUBNORMAL_MAGIC).to(tl.int32, bitcast=True) & 15  # multiples of 2^-9
    code = tl.where(m >= _FP8_MIN_NORMAL_BITS, rounded - _FP8_REBIAS, small)
    return tl.where(code == 0, 0, code | ((bits >> 24) & 0x80))


@triton.jit
def _count(
    counter_ptr,
    bad,  # [R] bool
):
    """Add the number of bad rows to a counter; no memory traffic if there is none."""
    one = tl.where(bad, 1, 0)
    tl.atomic_add(counter_ptr + one * 0, one, mask=bad)


@triton.jit
def _bucketize(
    y,  # [R, W] fp32
    MIDS: tl.constexpr,  # bits of the positive midpoints, ascending: 1, 3 or 7 of them
    SQUARES: tl.constexpr,  # squares of the non-negative centroids, ascending: 2, 4 or 8
    BITS: tl.constexpr,
):
    """(codes int32, squared centroids fp32): the number of midpoints <= y, of an antisymmetric codebook.

    For y >= 0 that is half + #{m <= y} over the positive midpoints m; for y < 0 it is half - 1 - #{m < |y|}, where
    m < |y| is m <= |y| less one unit in the last place. Positive floats compare like their bits, so one binary
    search in integers serves both; its decisions also select the square of the centroid.
    """
    bits = (y + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0, which lies on the middle midpoint and goes up
    sign = bits >> 31  # -1 or 0
    size = (bits & _ABS_BITS) + sign
    if BITS == 2:
        b0 = size >= MIDS[0]
        count = b0.to(tl.int32)
        square = tl.where(b0, SQUARES[1], SQUARES[0])
    elif BITS == 3:
        b1 = size >= MIDS[1]
        b0 = size >= tl.where(b1, MIDS[2], MIDS[0])
        count = tl.where(b1, 2, 0) | b0.to(tl.int32)
        square = tl.where(b1, tl.where(b0, SQUARES[3], SQUARES[2]), tl.where(b0, SQUARES[1], SQUARES[0]))
    else:
        tl.static_assert(BITS == 4)
        b2 = size >= MIDS[3]
        b1 = size >= tl.where(b2, MIDS[5], MIDS[1])
        b0 = size >= tl.where(b2, tl.where(b1, MIDS[6], MIDS[4]), tl.where(b1, MIDS[2], MIDS[0]))
        count = tl.where(b2, 4, 0) | tl.where(b1, 2, 0) | b0.to(tl.int32)
        upper = tl.where(b1, tl.where(b0, SQUARES[7], SQUARES[6]), tl.where(b0, SQUARES[5], SQUARES[4]))
        lower = tl.where(b1, tl.where(b0, SQUARES[3], SQUARES[2]), tl.where(b0, SQUARES[1], SQUARES[0]))
        square = tl.where(b2, upper, lower)
    return (1 << (BITS - 1)) + (count ^ sign), square


@triton.jit
def _load_run(
    ptr,
    offset,  # [R] int64, elements
    mask,  # [R]
    START: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
):
    """Columns START to START + W - 1, zero past D -> fp32 [R, W]."""
    # In pieces of 32: then a thread holds the same eight columns of every piece of its row, the row's other pieces
    # included, and few steps of the reductions and butterflies leave the thread.
    PIECE: tl.constexpr = 32 if W > 32 else W
    piece = tl.arange(0, W // PIECE)[None, :, None] * PIECE
    column = START + piece + tl.arange(0, PIECE)[None, None, :]
    keep = mask[:, None, None]
    if START + W > D:
        keep = keep & (column < D)
    x = tl.load(ptr + (offset[:, None, None] + column), keep, 0.0).to(tl.float32)
    return tl.reshape(x, (x.shape[0], W))


@triton.jit
def _largest_bits(
    x,  # [R, 2, ..., 2] fp32
    LOG_W: tl.constexpr,
):
    """Largest |x| of each row as fp32 bits -> [R, 1, ..., 1]; at least _INF_BITS if it has a NaN or an infinity."""
    return _row_max(x.to(tl.int32, bitcast=True) & _ABS_BITS, LOG_W)


@triton.jit
def _store_keys(
    key_ptr,
    cache_ptr,
    nonfinite_ptr,
    offset,  # [R] int64, elements
    inside,  # [R] row exists
    slot,  # [R] int64
    kept,  # [R] row is written
    head,  # [R]
    D: tl.constexpr,
    D2: tl.constexpr,  # D rounded up to a power of two
    LOG_D2: tl.constexpr,
    KEY_BITS: tl.constexpr,
    FOLD: tl.constexpr,
    M: tl.constexpr,
    M2: tl.constexpr,
    P: tl.constexpr,
    LOG_P: tl.constexpr,
    SIGNS: tl.constexpr,
    ROT_SCALE: tl.constexpr,
    MIDS: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    KEY_DATA: tl.constexpr,  # (base, token stride, head stride, bytes, granule)
    KEY_NORM: tl.constexpr,
    COUNT: tl.constexpr,
    R: tl.constexpr,
    GUESS: tl.constexpr,
    TARGET: tl.constexpr,
):
    x = to_cube(_load_run(key_ptr, offset, inside, 0, D2, D), R, LOG_D2)
    data_at = row_bytes(
        cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, KEY_DATA[0], KEY_DATA[1], KEY_DATA[2]
    )
    if KEY_BITS == 8:
        bad = _largest_bits(x, LOG_D2) >= _INF_BITS  # [R, 1, ..., 1]
        if COUNT:
            _count(nonfinite_ptr, tl.reshape(bad, (R,)) & kept)
        data = fp8_e4m3fn_bytes(tl.reshape(tl.where(bad, 0.0, x), (R, D2)))
        _store_bytes(data_at, data, kept, KEY_DATA[3], KEY_DATA[4], R, D2)
    else:
        square = row_sum(x * x, LOG_D2)  # [R, 1, ..., 1]; NaN or infinite if an element is
        shrink = tl.full(square.shape, 1.0, tl.float32)
        bad = tl.full(square.shape, 0, tl.int1)
        if _any_not(square <= _BIG_SQUARE, R):
            largest = _largest_bits(x, LOG_D2)
            bad = largest >= _INF_BITS
            if COUNT:
                _count(nonfinite_ptr, tl.reshape(bad, (R,)) & kept)
            shrink = tl.where(largest > _BIG_BITS, _SHRINK, 1.0)  # an exact power of two
            x = tl.where(bad, 0.0, x) * shrink
            square = row_sum(x * x, LOG_D2)
        norm = tl.sqrt_rn(square)
        divisor = norm + shrink * _KEY_EPS
        if M == 1:
            y = sylvester(tl.reshape(_divide(x, divisor), (R, D2)), R, P, LOG_P)
        else:
            divisor = tl.reshape(divisor, (R, 1))
            factor = tl.reshape(shrink, (R, 1))
            zeroed = tl.reshape(bad, (R, 1))
            mixed = tl.zeros((R, M2, P), tl.float32)
            for j in tl.static_range(M):
                run = _load_run(key_ptr, offset, inside, j * P, P, D)
                run = tl.where(zeroed, 0.0, run) * factor
                run = sylvester(_divide(run, divisor), R, P, LOG_P)
                mixed = add_run(mixed, run, j, M2, SIGNS)
            y = tl.reshape(mixed, (R, D2))
        if TARGET == "cuda":
            codes, square = nearest_code(y, GUESS, 1 << KEY_BITS, TARGET)
        else:
            codes, square = _bucketize(y * ROT_SCALE, MIDS, SQUARES, KEY_BITS)
        if D2 != D:
            column = tl.arange(0, D2)
            codes = tl.where((column < D)[None, :], codes, 0)
            square = tl.where((column < D)[None, :], square, 0.0)
        _store_codes(data_at, codes, kept, KEY_BITS, KEY_DATA[3], KEY_DATA[4], R, D2)
        norm = tl.reshape(norm * tl.where(shrink < 1.0, _GROW, 1.0), (R,))
        if FOLD:
            square = tl.reshape(row_sum(to_cube(square, R, LOG_D2), LOG_D2), (R,))
            norm = tl.div_rn(norm, tl.sqrt_rn(square + _CENTROID_EPS))
        norm_at = row_bytes(
            cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, KEY_NORM[0], KEY_NORM[1], KEY_NORM[2]
        )
        _store_half(norm_at, tl.minimum(norm, _FP16_MAX), kept, KEY_NORM[4])


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
    DV2: tl.constexpr,  # DV rounded up to a power of two
    LOG_DV2: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    VALUE_DATA: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    VALUE_ZERO: tl.constexpr,
    COUNT: tl.constexpr,
    R: tl.constexpr,
    TARGET: tl.constexpr,
):
    LEVELS: tl.constexpr = (1 << VALUE_BITS) - 1
    x = to_cube(_load_run(value_ptr, offset, inside, 0, DV2, DV), R, LOG_DV2)
    low, high = x, x
    if DV2 != DV:
        there = to_cube(tl.broadcast_to((tl.arange(0, DV2) < DV)[None, :], (R, DV2)), R, LOG_DV2)
        low, high = tl.where(there, x, _FP16_MAX), tl.where(there, x, -_FP16_MAX)
    low, high, usual = _row_range(low, high, x, LOG_DV2, TARGET)  # [R, 1, ..., 1]
    if _any_not(usual, R):
        bad = _largest_bits(x, LOG_DV2) >= _INF_BITS  # [R, 1, ..., 1]
        if COUNT:
            _count(nonfinite_ptr + 1, tl.reshape(bad, (R,)) & kept)
        x = _clamp(tl.where(bad, 0.0, x))
        low = _clamp(tl.where(bad, 0.0, low))
        high = _clamp(tl.where(bad, 0.0, high))
    scale = tl.div_rn(tl.maximum(high - low, _MIN_STEP * LEVELS), LEVELS + 0.0)  # [R, 1, ..., 1]
    index = _divide(x - low, scale) + 0.5  # 0.5 to LEVELS + 0.5 and 2^-20 of it, since low <= x <= high
    codes = tl.reshape(whole(index, TARGET), (R, DV2))
    low, scale = tl.reshape(low, (R,)), tl.reshape(scale, (R,))
    if DV2 != DV:
        codes = tl.where((tl.arange(0, DV2) < DV)[None, :], codes, 0)
    data_at = row_bytes(
        cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, VALUE_DATA[0], VALUE_DATA[1], VALUE_DATA[2]
    )
    _store_codes(data_at, codes, kept, VALUE_BITS, VALUE_DATA[3], VALUE_DATA[4], R, DV2)
    scale_at = row_bytes(
        cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, VALUE_SCALE[0], VALUE_SCALE[1], VALUE_SCALE[2]
    )
    # Rounding the scale up may carry the largest code past 65504, which an fp16 reader would see as infinity: one
    # ulp less.
    half = tl.minimum(scale, _FP16_MAX).to(tl.float16)
    top = low.to(tl.float16).to(tl.float32) + LEVELS * half.to(tl.float32)
    half = (half.to(tl.int16, bitcast=True) - tl.where(top > _FP16_MAX, 1, 0).to(tl.int16)).to(
        tl.float16, bitcast=True
    )
    _store_half(scale_at, half.to(tl.float32), kept, VALUE_SCALE[4])
    zero_at = row_bytes(
        cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, VALUE_ZERO[0], VALUE_ZERO[1], VALUE_ZERO[2]
    )
    _store_half(zero_at, low + 0.0, kept, VALUE_ZERO[4])  # one zero: -0 and 0 have no order


@triton.jit(do_not_specialize=("rows",))
def _store_kernel(
    key_ptr,  # [T, Hk, D] fp16/bf16/fp32
    value_ptr,  # [T, Hk, Dv] same dtype
    cache_ptr,  # uint8, base of the cache
    slot_ptr,  # [T] int32/int64
    nonfinite_ptr,  # [2] int32, not touched unless COUNT
    rows,  # T * Hk
    key_token_stride,  # elements; the last dimension is contiguous
    key_head_stride,
    value_token_stride,
    value_head_stride,
    slot_stride,
    HK: tl.constexpr,
    D: tl.constexpr,
    D2: tl.constexpr,
    LOG_D2: tl.constexpr,
    DV: tl.constexpr,
    DV2: tl.constexpr,
    LOG_DV2: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    FOLD: tl.constexpr,
    M: tl.constexpr,
    M2: tl.constexpr,
    P: tl.constexpr,
    LOG_P: tl.constexpr,
    SIGNS: tl.constexpr,
    ROT_SCALE: tl.constexpr,
    MIDS: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    KEY_DATA: tl.constexpr,
    KEY_NORM: tl.constexpr,
    VALUE_DATA: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    VALUE_ZERO: tl.constexpr,
    ROTATED_VALUES: tl.constexpr,  # what starts with V_ is not used without
    V_M: tl.constexpr,
    V_M2: tl.constexpr,
    V_P: tl.constexpr,
    V_LOG_P: tl.constexpr,
    V_SIGNS: tl.constexpr,
    V_ROT_SCALE: tl.constexpr,
    V_MIDS: tl.constexpr,
    V_SQUARES: tl.constexpr,
    GUESS: tl.constexpr,  # for "cuda"
    V_GUESS: tl.constexpr,
    COUNT: tl.constexpr,
    R: tl.constexpr,
    TARGET: tl.constexpr,  # "cuda" or "portable"
):
    token, head, inside, slot = given_slots(slot_ptr, slot_stride, rows, HK, R)
    kept = slot >= 0
    if tl.program_id(1) == 0:
        offset = token * key_token_stride + head * key_head_stride
        _store_keys(
            key_ptr,
            cache_ptr,
            nonfinite_ptr,
            offset,
            inside,
            slot,
            kept,
            head,
            D,
            D2,
            LOG_D2,
            KEY_BITS,
            FOLD,
            M,
            M2,
            P,
            LOG_P,
            SIGNS,
            ROT_SCALE,
            MIDS,
            SQUARES,
            BLOCK_SIZE,
            BLOCK_STRIDE,
            KEY_DATA,
            KEY_NORM,
            COUNT,
            R,
            GUESS,
            TARGET,
        )
    else:
        offset = token * value_token_stride + head * value_head_stride
        if ROTATED_VALUES:
            _store_keys(
                value_ptr, cache_ptr, nonfinite_ptr + 1, offset, inside, slot, kept, head, DV, DV2, LOG_DV2,
                VALUE_BITS, True, V_M, V_M2, V_P, V_LOG_P, V_SIGNS, V_ROT_SCALE, V_MIDS, V_SQUARES, BLOCK_SIZE,
                BLOCK_STRIDE, VALUE_DATA, VALUE_SCALE, COUNT, R, V_GUESS, TARGET,
            )  # fmt: skip
        else:
            _store_values(
                value_ptr,
                cache_ptr,
                nonfinite_ptr,
                offset,
                inside,
                slot,
                kept,
                head,
                DV,
                DV2,
                LOG_DV2,
                VALUE_BITS,
                BLOCK_SIZE,
                BLOCK_STRIDE,
                VALUE_DATA,
                VALUE_SCALE,
                VALUE_ZERO,
                COUNT,
                R,
                TARGET,
            )


def granule(layout: Layout, field: str) -> int:
    """Widest access in bytes (4, 2 or 1) that every vector of ``field`` is aligned to and a multiple of."""
    place = layout.place(field)
    size = gcd(4, layout.block_stride, place.base, place.token_stride, place.head_stride, place.nbytes)
    return size


def _field(layout: Layout, name: str) -> tuple[int, int, int, int, int]:
    """(base, token stride, head stride, bytes, granule) of a field; zeros if the preset has none."""
    if not layout.has(name):
        return (0, 0, 0, 0, 1)
    place = layout.place(name)
    wide = granule(layout, name)
    return (
        place.base,
        place.token_stride,
        place.head_stride,
        place.nbytes,
        wide // 2 if place.nbytes == 2 else wide,
    )


def field_constants(layout: Layout) -> dict[str, tuple[int, int, int, int, int]]:
    """KEY_DATA, KEY_NORM, VALUE_DATA, VALUE_SCALE and VALUE_ZERO: (base, token stride, head stride, bytes, granule)."""
    return {name.upper(): _field(layout, name) for name in FIELD_NAMES}


@cache
def store_constexprs(layout: Layout) -> dict[str, Any]:
    """Every constexpr of the store kernel but its tile R, COUNT and TARGET, from the layout alone."""
    preset, d, dv = layout.preset, layout.head_size, layout.value_head_size
    d2, dv2 = max(8, triton.next_power_of_2(d)), max(8, triton.next_power_of_2(dv))
    constants: dict[str, Any] = {
        "HK": layout.num_kv_heads,
        "D": d,
        "D2": d2,
        "LOG_D2": d2.bit_length() - 1,
        "DV": dv,
        "DV2": dv2,
        "LOG_DV2": dv2.bit_length() - 1,
        "KEY_BITS": preset.code_bits,
        "VALUE_BITS": preset.value_bits,
        "FOLD": layout.norm_meaning is NormMeaning.FOLDED,
        "BLOCK_SIZE": layout.block_size,
        "BLOCK_STRIDE": layout.block_stride,
    }
    constants.update(field_constants(layout))
    constants.update(_codebook(None if preset.fp8_keys else d, preset.code_bits))
    values = _codebook(dv if preset.rotated_values else None, preset.value_bits)
    constants.update({f"V_{name}": value for name, value in values.items()})
    constants["ROTATED_VALUES"] = preset.rotated_values
    return constants


def _codebook(head_size: int | None, bits: int) -> dict[str, Any]:
    """Rotation and codebook of rotated vectors of ``head_size``; None: of vectors that are not rotated."""
    if head_size is None:
        return {**UNROTATED, "MIDS": (0,), "SQUARES": (0.0,), "GUESS": (0,)}
    half = 1 << (bits - 1)
    c = centroids(head_size, bits)[half:]
    mids = np.ascontiguousarray(midpoints(head_size, bits)[half:]).view(np.int32)
    return {
        **rotation_table(head_size).constexprs(),
        "MIDS": tuple(int(b) for b in mids),
        "SQUARES": tuple(float(s) for s in c * c),
        "GUESS": code_guess(head_size, bits),
    }


_GUESSES: Mapping[int, tuple[float, float]] = {2: (1.2, 1.25), 3: (0.79, 3.18), 4: (0.62, 7.35)}
"""(steepness, width) for each number of bits: width * tanh(steepness * y) is near i at the i-th threshold above 0."""


@cache
def code_guess(head_size: int, bits: int) -> tuple[float | int, ...]:
    """What :func:`.device.nearest_code` takes: (steepness, width, middle), then thresholds and squares.

    thresholds, 16 fp32 as bits: the smallest y, before it is scaled by 1 / sqrt(head_size), whose scaled and rounded
    product reaches a midpoint. Multiplication is monotone, so comparing with them gives the same codes. squares, 16
    fp32 as bits: of the centroids. Both end in zeros where there are fewer than 16.
    """
    scale = np.float32(rotation_table(head_size).scale)
    thresholds = []
    for midpoint in midpoints(head_size, bits):
        y = np.float32(midpoint / scale)
        while y * scale >= midpoint:
            y = np.nextafter(y, np.float32(-np.inf))
        while y * scale < midpoint:
            y = np.nextafter(y, np.float32(np.inf))
        thresholds.append(y)
    c = centroids(head_size, bits)
    words = np.zeros((2, 16), np.float32)
    words[0, : len(thresholds)] = thresholds
    words[1, : len(c)] = c * c
    steepness, width = _GUESSES[bits]
    return (steepness, width, GUESS_BASE + len(thresholds) // 2, *(int(w) for w in words.view(np.int32).flat))


_FEW_ROWS = 2048
"""Calls with as many rows or fewer take as long as one program: all of their small programs run at once."""


def tile_rows(layout: Layout, vendor: str, few: bool = False) -> int:
    """Rows of the widest tile that keeps its data in registers: 32 elements a lane on NVIDIA, 8 on AMD.

    More on AMD spills scalar registers, which hold a mask for every comparison in flight. Rotations with m > 1 have
    their mixed runs in registers too: half of that on NVIDIA. few: for calls with few rows, where a program's time is
    the kernel's: 8 elements a lane, one wide load.
    """
    sizes = {"nvidia": 32 * (8 if few else 32), "amd": 64 * 8}
    if vendor not in sizes:
        raise SpecError("target vendor", vendor, " or ".join(sizes))
    elements = sizes[vendor]
    preset = layout.preset
    rotated = [] if preset.fp8_keys else [layout.head_size]
    rotated += [layout.value_head_size] if preset.rotated_values else []
    if vendor == "nvidia" and not few and any(rotation_table(size).m > 1 for size in rotated):
        elements //= 2
    width = max(triton.next_power_of_2(layout.head_size), triton.next_power_of_2(layout.value_head_size))
    return max(1, min(16, elements // width))


def default_rows(layout: Layout, vendor: str, few: bool = False) -> int:
    """:func:`tile_rows`; many rows in the interpreter, where programs are slow."""
    return 128 if triton.knobs.runtime.interpret else tile_rows(layout, vendor, few)


def store_target(vendor: str) -> str:
    """The kernel's TARGET: "cuda" for compiled NVIDIA kernels, or "portable"."""
    return "cuda" if vendor == "nvidia" and not triton.knobs.runtime.interpret else "portable"


class Store:
    """The store of one layer: everything that depends on the layout alone is fixed when it is made.

    vendor: of the target that the layer was decided for, "amd" or "nvidia". rows_per_program: tile, default by the
    vendor and the number of rows of a call. The bytes do not depend on it.
    """

    def __init__(
        self, layout: Layout, vendor: str, *, rows_per_program: int | None = None, num_warps: int = 1
    ) -> None:
        self.layout = layout
        self.rows = rows_per_program or default_rows(layout, vendor)
        self.few_rows = rows_per_program or default_rows(layout, vendor, few=True)
        self.num_warps = num_warps
        self.constants = {**store_constexprs(layout), "TARGET": store_target(vendor)}
        self._kernels: dict[tuple[Any, ...], Kernel] = {}

    def __call__(
        self,
        key: torch.Tensor,  # [T, Hk, D] fp16/bf16/fp32, last dimension contiguous
        value: torch.Tensor,  # [T, Hk, Dv] same dtype
        cache: torch.Tensor,  # [nb, bs, Hk, slot_stride] uint8
        slot_mapping: torch.Tensor,  # [T] int32/int64
        nonfinite: torch.Tensor | None = None,  # [2] int32
    ) -> None:
        """Write the tokens whose slot is not negative. One launch; no allocation, no synchronisation."""
        rows = key.shape[0] * self.layout.num_kv_heads
        if not rows:
            return
        tile = self.few_rows if rows <= _FEW_ROWS else self.rows
        counts = slot_mapping if nonfinite is None else nonfinite
        strides = (*key.stride()[:2], *value.stride()[:2], slot_mapping.stride(0))
        which = (
            tile,
            nonfinite is None,
            rows >> 31,
            *specialised(strides, key, value, cache, slot_mapping, counts),
        )
        kernel = self._kernels.get(which)
        if kernel is None:
            constants = {
                **self.constants,
                "COUNT": nonfinite is not None,
                "R": tile,
                "num_warps": self.num_warps,
                "enable_fp_fusion": False,
            }
            kernel = self._kernels[which] = Kernel(_store_kernel, (0, 2, 1), constants)
        kernel.on((triton.cdiv(rows, tile), 2, 1), key, value, cache, slot_mapping, counts, rows, *strides)
