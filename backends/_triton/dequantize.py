"""Dequantise: a range of every sequence, from packed cache bytes straight to fp16/bf16/fp32 rows, one launch.

Tile: R rows, a row being one (output token, KV head); program (i, 0) owns the keys and program (i, 1) the values of
rows i * R to i * R + R - 1. A program finds the sequence of each of its tokens by bisection in ``cu_lens``, reads the
packed codes in granules as wide as the layout allows, looks centroids up in registers, rotates back in registers
(R^T, see rotation.py) and writes each output element once. Nothing intermediate goes to memory. Head sizes whose
rotation has m > 1 read their codes run by run.

Floor: rows * (slot + (D + Dv) * output bytes). Budget of arithmetic per key element: 1 shift, 1 mask, 2^(b-1) - 1
selects, log2(D) additions, 1 multiplication; per value element: 1 shift, 1 mask, 1 multiplication, 1 addition.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from ...codebook import centroids
from ...layouts import Layout
from ...spec import NormMeaning
from .rotation import add_run, rotation_table, sylvester
from .store import UNROTATED, default_rows, field_constants, row_bytes, row_sum, to_cube

__all__ = ["Dequantize", "dequantize_constexprs", "output_slots"]

_CENTROID_EPS = tl.constexpr(1e-16)
_FP8_TO_FP32 = tl.constexpr(2.0**120)  # undoes the exponent bias of a byte moved into the fp32 fields


@triton.jit
def _load_granules(
    at,  # [R] pointers to bytes
    mask,  # [R]
    STEP: tl.constexpr,  # bytes from one granule to the next
    SHIFT: tl.constexpr,  # bytes from ``at`` to the first granule
    NBYTES: tl.constexpr,  # granules at or past it read as 0
    GRANULE: tl.constexpr,
    G: tl.constexpr,
):
    """[R, G] int32, not sign-extended."""
    index = tl.arange(0, G)
    keep = mask[:, None]
    if SHIFT + STEP * (G - 1) >= NBYTES:
        keep = keep & (SHIFT + STEP * index < NBYTES)[None, :]
    step = (STEP // GRANULE) * index[None, :]
    if GRANULE == 4:
        data = tl.load((at + SHIFT).to(tl.pointer_type(tl.int32))[:, None] + step, keep, 0)
    elif GRANULE == 2:
        data = tl.load((at + SHIFT).to(tl.pointer_type(tl.uint16))[:, None] + step, keep, 0).to(tl.int32)
    else:
        data = tl.load((at + SHIFT)[:, None] + step, keep, 0).to(tl.int32)
    return data


@triton.jit
def _load_codes(
    at,  # [R] pointers to bytes
    mask,  # [R]
    BITS: tl.constexpr,
    NBYTES: tl.constexpr,
    GRANULE: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    """W codes of a little-endian bit stream that starts at ``at`` -> int32 [R, W]. Eight codes are one group."""
    G: tl.constexpr = W // 8
    if BITS == 4:
        group = _load_granules(at, mask, 4, 0, NBYTES, GRANULE, G)
        for i in tl.static_range(1, 4 // GRANULE):
            group |= _load_granules(at, mask, 4, GRANULE * i, NBYTES, GRANULE, G) << (8 * GRANULE * i)
    elif BITS == 3:
        if GRANULE == 4:  # three words are four groups of 24 bits
            w0 = _load_granules(at, mask, 12, 0, NBYTES, 4, G // 4)
            w1 = _load_granules(at, mask, 12, 4, NBYTES, 4, G // 4)
            w2 = _load_granules(at, mask, 12, 8, NBYTES, 4, G // 4)
            g1 = ((w0 >> 24) & 0xFF) | (w1 << 8)
            g2 = ((w1 >> 16) & 0xFFFF) | (w2 << 16)
            even = tl.reshape(tl.join(w0, g2), (R, G // 2))
            odd = tl.reshape(tl.join(g1, w2 >> 8), (R, G // 2))
            group = tl.reshape(tl.join(even, odd), (R, G))
        elif GRANULE == 2:  # three halfwords are two groups
            h0 = _load_granules(at, mask, 6, 0, NBYTES, 2, G // 2)
            h1 = _load_granules(at, mask, 6, 2, NBYTES, 2, G // 2)
            h2 = _load_granules(at, mask, 6, 4, NBYTES, 2, G // 2)
            group = tl.reshape(tl.join(h0 | (h1 << 16), (h1 >> 8) | (h2 << 8)), (R, G))
        else:
            group = _load_granules(at, mask, 3, 0, NBYTES, 1, G)
            for i in tl.static_range(1, 3):
                group |= _load_granules(at, mask, 3, i, NBYTES, 1, G) << (8 * i)
    else:
        tl.static_assert(BITS == 2)
        if GRANULE == 1:
            group = _load_granules(at, mask, 2, 0, NBYTES, 1, G)
            group |= _load_granules(at, mask, 2, 1, NBYTES, 1, G) << 8
        else:
            group = _load_granules(at, mask, 2, 0, NBYTES, 2, G)
    shifts = BITS * tl.arange(0, 8)
    return tl.reshape((group[:, :, None] >> shifts[None, None, :]) & ((1 << BITS) - 1), (R, W))


@triton.jit
def _load_run(
    at,  # [R] pointers to bytes
    mask,  # [R]
    START: tl.constexpr,
    BITS: tl.constexpr,
    NBYTES: tl.constexpr,
    W: tl.constexpr,
):
    """Codes START to START + W - 1, each from the one or two bytes that it lies in -> int32 [R, W]."""
    bit = BITS * (START + tl.arange(0, W))
    byte = bit // 8
    low = tl.load(at[:, None] + byte[None, :], mask[:, None] & (byte < NBYTES)[None, :], 0).to(tl.int32)
    high = tl.load(at[:, None] + byte[None, :] + 1, mask[:, None] & (byte + 1 < NBYTES)[None, :], 0).to(
        tl.int32
    )
    return ((low | (high << 8)) >> (bit % 8)[None, :]) & ((1 << BITS) - 1)


@triton.jit
def _load_bytes(
    at,  # [R] pointers to bytes
    mask,  # [R]
    NBYTES: tl.constexpr,
    GRANULE: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    """W bytes as int32 [R, W]."""
    if GRANULE == 1:
        data = _load_granules(at, mask, 1, 0, NBYTES, 1, W)
    else:
        words = _load_granules(at, mask, GRANULE, 0, NBYTES, GRANULE, W // GRANULE)
        shifts = 8 * tl.arange(0, GRANULE)
        data = tl.reshape((words[:, :, None] >> shifts[None, None, :]) & 0xFF, (R, W))
    return data


@triton.jit
def load_half(
    at,  # [R] pointers to bytes
    mask,  # [R]
    ALIGNED: tl.constexpr,
):
    """fp32 of the fp16 at each address, 0 where masked -> [R]."""
    if ALIGNED:
        value = tl.load(at.to(tl.pointer_type(tl.float16)), mask, 0.0)
    else:
        low = tl.load(at, mask, 0).to(tl.int16)
        high = tl.load(at + 1, mask, 0).to(tl.int16)
        value = (low | (high << 8)).to(tl.float16, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def fp8_e4m3fn_value(
    byte,  # int32, 0 to 255
):
    """fp32 of OCP E4M3FN bytes, exactly, by integer code; 0x7F and 0xFF are NaN."""
    field = byte & 0x7F
    magnitude = (field << 20).to(tl.float32, bitcast=True) * _FP8_TO_FP32
    magnitude = tl.where(field == 0x7F, float("nan"), magnitude)
    return tl.where(byte >= 0x80, -magnitude, magnitude)


@triton.jit
def centroid_value(
    code,  # int32
    CENTROIDS: tl.constexpr,  # the non-negative ones, ascending: 2, 4 or 8
    BITS: tl.constexpr,
):
    """Centroids fp32 of an antisymmetric codebook: c[half + i] = CENTROIDS[i] = -c[half - 1 - i]."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    negative = code < HALF
    size = tl.where(negative, HALF - 1 - code, code - HALF)
    b0 = (size & 1) != 0
    if BITS == 2:
        value = tl.where(b0, CENTROIDS[1], CENTROIDS[0])
    else:
        b1 = (size & 2) != 0
        value = tl.where(
            b1, tl.where(b0, CENTROIDS[3], CENTROIDS[2]), tl.where(b0, CENTROIDS[1], CENTROIDS[0])
        )
        if BITS == 4:
            upper = tl.where(b0, CENTROIDS[5], CENTROIDS[4])
            upper = tl.where(b1, tl.where(b0, CENTROIDS[7], CENTROIDS[6]), upper)
            value = tl.where((size & 4) != 0, upper, value)
    return tl.where(negative, -value, value)


@triton.jit
def _squares(
    x,  # [R, W] fp32
    R: tl.constexpr,
    LOG_W: tl.constexpr,
):
    """Sum of the squares of each row -> [R]."""
    return tl.reshape(row_sum(to_cube(x * x, R, LOG_W), LOG_W), (R,))


@triton.jit
def _store_rows(
    ptr,
    row,  # [R] int64
    x,  # [R, W] fp32
    inside,  # [R]
    D: tl.constexpr,
    W: tl.constexpr,
):
    """Write the first D columns of each row of a contiguous output, in its dtype."""
    column = tl.arange(0, W)
    keep = inside[:, None]
    if W != D:
        keep = keep & (column < D)[None, :]
    tl.store(ptr + (row * D)[:, None] + column[None, :], x.to(ptr.dtype.element_ty), keep)


@triton.jit
def _dequantize_keys(
    cache_ptr,
    key_ptr,
    row,  # [R] int64, of the output
    slot,  # [R] int64
    head,  # [R]
    inside,  # [R]
    D: tl.constexpr,
    D2: tl.constexpr,
    KEY_BITS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    M: tl.constexpr,
    M2: tl.constexpr,
    P: tl.constexpr,
    LOG_P: tl.constexpr,
    SIGNS: tl.constexpr,
    ROT_SCALE: tl.constexpr,
    CENTROIDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    KEY_DATA: tl.constexpr,
    KEY_NORM: tl.constexpr,
    R: tl.constexpr,
):
    at = row_bytes(cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, KEY_DATA[0], KEY_DATA[1], KEY_DATA[2])
    if KEY_BITS == 8:
        key = fp8_e4m3fn_value(_load_bytes(at, inside, KEY_DATA[3], KEY_DATA[4], R, D2))
        _store_rows(key_ptr, row, key, inside, D, D2)
    else:
        norm_at = row_bytes(
            cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, KEY_NORM[0], KEY_NORM[1], KEY_NORM[2]
        )
        norm = load_half(norm_at, inside, KEY_NORM[4])  # [R]
        if M == 1:
            c = centroid_value(
                _load_codes(at, inside, KEY_BITS, KEY_DATA[3], KEY_DATA[4], R, P), CENTROIDS, KEY_BITS
            )
            if RENORMALIZE:
                norm = tl.div_rn(norm, tl.sqrt_rn(_squares(c, R, LOG_P) + _CENTROID_EPS))
            key = sylvester(c, R, P, LOG_P)
        else:
            mixed = tl.zeros((R, M2, P), tl.float32)
            square = tl.zeros((R,), tl.float32)
            for j in tl.static_range(M):
                code = _load_run(at, inside, j * P, KEY_BITS, KEY_DATA[3], P)
                run = centroid_value(code, CENTROIDS, KEY_BITS)
                square += _squares(run, R, LOG_P)
                mixed = add_run(mixed, sylvester(run, R, P, LOG_P), j, M2, SIGNS)
            if RENORMALIZE:
                norm = tl.div_rn(norm, tl.sqrt_rn(square + _CENTROID_EPS))
            key = tl.reshape(mixed, (R, D2))
        _store_rows(key_ptr, row, key * (norm * ROT_SCALE)[:, None], inside, D, D2)


@triton.jit
def _dequantize_values(
    cache_ptr,
    value_ptr,
    row,  # [R] int64, of the output
    slot,  # [R] int64
    head,  # [R]
    inside,  # [R]
    DV: tl.constexpr,
    DV2: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    VALUE_DATA: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    VALUE_ZERO: tl.constexpr,
    R: tl.constexpr,
):
    at = row_bytes(
        cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, VALUE_DATA[0], VALUE_DATA[1], VALUE_DATA[2]
    )
    scale_at = row_bytes(
        cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, VALUE_SCALE[0], VALUE_SCALE[1], VALUE_SCALE[2]
    )
    zero_at = row_bytes(
        cache_ptr, slot, head, BLOCK_SIZE, BLOCK_STRIDE, VALUE_ZERO[0], VALUE_ZERO[1], VALUE_ZERO[2]
    )
    code = _load_codes(at, inside, VALUE_BITS, VALUE_DATA[3], VALUE_DATA[4], R, DV2)
    scale = load_half(scale_at, inside, VALUE_SCALE[4])
    zero = load_half(zero_at, inside, VALUE_ZERO[4])
    _store_rows(value_ptr, row, code.to(tl.float32) * scale[:, None] + zero[:, None], inside, DV, DV2)


@triton.jit
def output_slots(
    row,  # [R] int64, of the output
    rows,  # sum * Hk
    cu_ptr,  # [B + 1] int32, first output row of each sequence
    start_ptr,  # [B] int32, first token to read
    table_ptr,  # [B, M] int32
    table_stride,
    batch,  # B
    bisections,  # ceil(log2(B))
    HK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    R: tl.constexpr,
):
    """(slot [R] int64, head [R], inside [R]) of the token and KV head that each output row is."""
    token = (row // HK).to(tl.int32)  # of the output
    head = (row % HK).to(tl.int32)
    inside = (row < rows) & (token < tl.load(cu_ptr + batch))

    low = tl.zeros((R,), tl.int32)  # bisection for the last sequence that starts at or before the token
    high = tl.zeros((R,), tl.int32) + batch
    for _ in range(bisections):
        middle = (low + high) // 2
        before = tl.load(cu_ptr + middle, inside, 0) <= token
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    position = tl.load(start_ptr + low, inside, 0) + token - tl.load(cu_ptr + low, inside, 0)
    entry = position // BLOCK_SIZE
    block = tl.load(table_ptr + low.to(tl.int64) * table_stride + entry, inside, 0).to(tl.int64)
    slot = block * BLOCK_SIZE + (position - entry * BLOCK_SIZE)
    return slot, head, inside


@triton.jit
def _dequantize_kernel(
    cache_ptr,  # uint8, base of the cache
    table_ptr,  # [B, M] int32
    start_ptr,  # [B] int32, first token to read
    cu_ptr,  # [B + 1] int32, first output row of each sequence
    key_ptr,  # [sum, Hk, D] fp16/bf16/fp32, contiguous
    value_ptr,  # [sum, Hk, Dv]
    rows,  # sum * Hk
    batch,  # B
    bisections,  # ceil(log2(B))
    table_stride,
    HK: tl.constexpr,
    D: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    DV2: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    M: tl.constexpr,
    M2: tl.constexpr,
    P: tl.constexpr,
    LOG_P: tl.constexpr,
    SIGNS: tl.constexpr,
    ROT_SCALE: tl.constexpr,
    CENTROIDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    KEY_DATA: tl.constexpr,  # (base, token stride, head stride, bytes, granule)
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
    V_CENTROIDS: tl.constexpr,
    R: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    slot, head, inside = output_slots(
        row, rows, cu_ptr, start_ptr, table_ptr, table_stride, batch, bisections, HK, BLOCK_SIZE, R
    )
    if tl.program_id(1) == 0:
        _dequantize_keys(
            cache_ptr,
            key_ptr,
            row,
            slot,
            head,
            inside,
            D,
            D2,
            KEY_BITS,
            RENORMALIZE,
            M,
            M2,
            P,
            LOG_P,
            SIGNS,
            ROT_SCALE,
            CENTROIDS,
            BLOCK_SIZE,
            BLOCK_STRIDE,
            KEY_DATA,
            KEY_NORM,
            R,
        )
    else:
        if ROTATED_VALUES:
            _dequantize_keys(
                cache_ptr, value_ptr, row, slot, head, inside, DV, DV2, VALUE_BITS, False, V_M, V_M2, V_P, V_LOG_P,
                V_SIGNS, V_ROT_SCALE, V_CENTROIDS, BLOCK_SIZE, BLOCK_STRIDE, VALUE_DATA, VALUE_SCALE, R,
            )  # fmt: skip
        else:
            _dequantize_values(
                cache_ptr,
                value_ptr,
                row,
                slot,
                head,
                inside,
                DV,
                DV2,
                VALUE_BITS,
                BLOCK_SIZE,
                BLOCK_STRIDE,
                VALUE_DATA,
                VALUE_SCALE,
                VALUE_ZERO,
                R,
            )


@cache
def dequantize_constexprs(layout: Layout) -> dict[str, Any]:
    """Every constexpr of the dequantise kernel but its tile R, from the layout alone."""
    preset, d, dv = layout.preset, layout.head_size, layout.value_head_size
    constants: dict[str, Any] = {
        "HK": layout.num_kv_heads,
        "D": d,
        "D2": max(8, triton.next_power_of_2(d)),
        "DV": dv,
        "DV2": max(8, triton.next_power_of_2(dv)),
        "KEY_BITS": preset.key_bits,
        "VALUE_BITS": preset.value_bits,
        "RENORMALIZE": preset.norm_correction and layout.norm_meaning is NormMeaning.RAW,
        "BLOCK_SIZE": layout.block_size,
        "BLOCK_STRIDE": layout.block_stride,
        **field_constants(layout),
    }
    constants.update(_codebook(None if preset.fp8_keys else d, preset.key_bits))
    values = _codebook(dv if preset.rotated_values else None, preset.value_bits)
    constants.update({f"V_{name}": value for name, value in values.items()})
    constants["ROTATED_VALUES"] = preset.rotated_values
    return constants


def _codebook(head_size: int | None, bits: int) -> dict[str, Any]:
    """Rotation back and centroids of rotated vectors of ``head_size``; None: of vectors that are not rotated."""
    if head_size is None:
        return {**UNROTATED, "CENTROIDS": (0.0,)}
    c = centroids(head_size, bits)[1 << (bits - 1) :]
    return {
        **rotation_table(head_size, inverse=True).constexprs(),
        "CENTROIDS": tuple(float(x) for x in c),
    }


class Dequantize:
    """The dequantise of one layer: everything that depends on the layout alone is fixed when it is made.

    vendor, rows_per_program: as in :class:`.store.Store`.
    """

    def __init__(
        self, layout: Layout, vendor: str, *, rows_per_program: int | None = None, num_warps: int = 1
    ) -> None:
        self.layout = layout
        self.rows = rows_per_program or default_rows(layout, vendor)
        self.num_warps = num_warps
        self.constants = dequantize_constexprs(layout)

    def __call__(
        self,
        cache: torch.Tensor,  # [nb, bs, Hk, slot_stride] uint8
        block_table: torch.Tensor,  # [B, M] int32
        starts: torch.Tensor,  # [B] int32
        cu_lens: torch.Tensor,  # [B + 1] int32
        key_out: torch.Tensor,  # [sum, Hk, D] fp16/bf16/fp32, contiguous, written
        value_out: torch.Tensor,  # [sum, Hk, Dv] contiguous, written
    ) -> None:
        """Row cu_lens[b] + i is token starts[b] + i of sequence b. Rows past cu_lens[B] stay as they are."""
        rows = key_out.shape[0] * self.layout.num_kv_heads
        batch = len(starts)
        if not rows or not batch:
            return
        _dequantize_kernel[(triton.cdiv(rows, self.rows), 2)](
            cache,
            block_table,
            starts,
            cu_lens,
            key_out,
            value_out,
            rows,
            batch,
            batch.bit_length(),
            block_table.stride(0),
            **self.constants,
            R=self.rows,
            num_warps=self.num_warps,
            enable_fp_fusion=False,
        )
