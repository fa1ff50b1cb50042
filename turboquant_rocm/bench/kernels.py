"""Triton kernels of the harness itself: a read and a copy of memory, and paged decode over an unpacked 16-bit cache.

The paged decode is what a bf16 cache costs: one program per sequence, KV head and split, every query head of the
group as a row of the matrix product, partial results merged by a second kernel. It is kept plain and shares no code
with the kernels it is compared with; tile, warps, stages and splits are searched for every shape (:mod:`.baselines`).
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["copy_kernel", "merge_kernel", "paged_kernel", "read_kernel"]


@triton.jit
def read_kernel(
    x_ptr,  # [programs * ITERATIONS * BLOCK] int32
    out_ptr,  # [programs] int32
    BLOCK: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    """Reads everything once and writes almost nothing."""
    base = tl.program_id(0).to(tl.int64) * (BLOCK * ITERATIONS)
    total = tl.zeros((BLOCK,), tl.int32)
    for i in range(ITERATIONS):
        total ^= tl.load(x_ptr + base + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.max(total, axis=0))


@triton.jit
def copy_kernel(
    x_ptr,  # [programs * ITERATIONS * BLOCK] int32
    y_ptr,  # the same
    BLOCK: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    """Reads everything once and writes it once."""
    base = tl.program_id(0).to(tl.int64) * (BLOCK * ITERATIONS)
    for i in range(ITERATIONS):
        at = base + i * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_ptr + at, tl.load(x_ptr + at))


@triton.jit
def paged_kernel(
    q_ptr,  # [B * Q, Hq, D]
    k_ptr,  # [nb, bs, Hk, D]
    v_ptr,  # [nb, bs, Hk, D]
    table_ptr,  # [B, M] int32
    lens_ptr,  # [B] int32
    part_ptr,  # [B * Q, Hq, splits, D] fp32
    lse_ptr,  # [B * Q, Hq, splits] fp32, base 2
    scale_log2,
    splits,
    table_stride,
    window,
    HK: tl.constexpr,
    G: tl.constexpr,
    Q: tl.constexpr,
    ROWS: tl.constexpr,  # >= G * Q, a power of two, at least 16
    D: tl.constexpr,
    DP: tl.constexpr,  # D rounded up to a power of two
    BS: tl.constexpr,
    T: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One split of one sequence and KV head."""
    MASKED: tl.constexpr = WINDOW or Q > 1
    head, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens_ptr + b)
    first = 0
    if WINDOW:
        first = tl.maximum(length - Q + 1 - window, 0)
    per = tl.cdiv(tl.cdiv(length - first, splits), T) * T
    low = first + split * per
    high = tl.minimum(low + per, length)
    r, d, t = tl.arange(0, ROWS), tl.arange(0, DP), tl.arange(0, T)
    last = length - Q + r // G  # last token that the row's query sees
    row = ((b * Q + r // G) * HK + head) * G + r % G
    q = tl.load(q_ptr + row[:, None] * D + d[None, :], (r < G * Q)[:, None] & (d < D)[None, :], 0.0)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    norm = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DP), tl.float32)
    for start in range(low, high, T):
        token = start + t
        page = tl.load(table_ptr + b * table_stride + token // BS, token < high, 0)
        at = (page.to(tl.int64) * BS + token % BS) * (HK * D) + head * D
        if D == DP:
            k = tl.load(k_ptr + at[None, :] + d[:, None])
        else:
            k = tl.load(k_ptr + at[None, :] + d[:, None], (d < D)[:, None], 0.0)
        s = tl.dot(q, k) * scale_log2
        seen = (token < high)[None, :]
        if MASKED:
            seen &= token[None, :] <= last[:, None]
        if WINDOW:
            seen &= token[None, :] > last[:, None] - window
        s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        if MASKED:  # a row may have seen nothing yet
            base = tl.where(new == float("-inf"), 0.0, new)
        else:
            base = new
        p = tl.exp2(s - base[:, None])
        alpha = tl.exp2(m - base)
        m = new
        norm = norm * alpha + tl.sum(p, 1)
        if D == DP:
            v = tl.load(v_ptr + at[:, None] + d[None, :])
        else:
            v = tl.load(v_ptr + at[:, None] + d[None, :], (d < D)[None, :], 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    out = row * splits + split
    some = (r < G * Q) & (norm > 0)
    tl.store(
        part_ptr + out[:, None].to(tl.int64) * D + d[None, :],
        acc / norm[:, None],
        some[:, None] & (d < D)[None, :],
    )
    tl.store(lse_ptr + out, tl.where(norm > 0, m + tl.log2(norm), float("-inf")), r < G * Q)


@triton.jit
def merge_kernel(
    part_ptr,  # [rows, splits, D] fp32
    lse_ptr,  # [rows, splits] fp32
    out_ptr,  # [rows, D]
    splits,
    D: tl.constexpr,
    DP: tl.constexpr,
    S: tl.constexpr,  # >= splits, a power of two
):
    """The partial results of one query row and head, weighted by their softmax denominators."""
    row, s, d = tl.program_id(0), tl.arange(0, S), tl.arange(0, DP)
    lse = tl.load(lse_ptr + row * splits + s, s < splits, float("-inf"))
    w = tl.exp2(lse - tl.max(lse, 0))
    at = (row * splits + s).to(tl.int64)
    x = tl.load(
        part_ptr + at[:, None] * D + d[None, :], (lse > float("-inf"))[:, None] & (d < D)[None, :], 0.0
    )
    tl.store(out_ptr + row * D + d, tl.sum(x * w[:, None], 0) / tl.sum(w, 0), d < D)
