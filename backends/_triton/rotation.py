"""The exact Hadamard-type rotation inside kernels: sign flips and additions only, in one fixed order.

R = kron(small_hadamard(m), sylvester(p)) / sqrt(D) (codebook.rotation). Two device functions build it:

* ``sylvester`` is the butterfly over runs of p contiguous coordinates; Sylvester's matrix is its own transpose.
* ``add_run`` adds one transformed run to the m mixed runs, with the signs of one column of the small matrix.
  Head sizes with m = 1 do not need it. The small matrices are not symmetric: ``RotationTable`` holds the signs of
  R for y = R x (store, queries) or of its transpose for x = R^T y (dequantise).

The order of the additions is that of the torch reference (strides 1, 2, 4 ... then runs 0 ... m - 1), written out
pair by pair rather than left to library reductions. So every rounding is fixed by the source, and a vector gives the
same bits whatever the tile, the number of warps, the GPU, or the interpreter. Kernels that rely on it are launched
with ``enable_fp_fusion=False``.

``rotate_rows`` is the stand-alone kernel, for queries: one program per tile of rows, which it owns from load to
store; reads and writes each element once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from ...codebook import rotation_factors, small_hadamard

__all__ = ["RotationTable", "add_run", "rotate_rows", "rotation_table", "sylvester"]


@dataclass(frozen=True, slots=True)
class RotationTable:
    """Constants of one rotation, as kernels take them.

    m, p: head_size = m * p. m2: m rounded up to a power of two. log_p: butterfly steps. signs: for each run j the
    bits i where run j enters mixed run i with a minus. scale: 1 / sqrt(head_size).
    """

    m: int
    m2: int
    p: int
    log_p: int
    signs: tuple[int, ...]
    scale: float

    def constexprs(self) -> dict[str, Any]:
        """The kernel arguments M, M2, P, LOG_P, SIGNS and ROT_SCALE."""
        return {
            "M": self.m,
            "M2": self.m2,
            "P": self.p,
            "LOG_P": self.log_p,
            "SIGNS": self.signs,
            "ROT_SCALE": self.scale,
        }


@cache
def rotation_table(head_size: int, inverse: bool = False) -> RotationTable:
    """The table of y = R x, or with ``inverse`` of x = R^T y; SpecError if ``head_size`` has no rotation."""
    m, p = rotation_factors(head_size)
    small = small_hadamard(m)
    if inverse:
        small = small.T
    signs = tuple(sum(1 << i for i in range(m) if small[i, j] < 0) for j in range(m))
    return RotationTable(
        m, 1 << (m - 1).bit_length(), p, p.bit_length() - 1, signs, 1.0 / math.sqrt(head_size)
    )


@triton.jit
def sylvester(
    x,  # [R, P] fp32
    R: tl.constexpr,
    P: tl.constexpr,
    LOG_P: tl.constexpr,
):
    """The +-1 butterfly over the last dimension, strides 1, 2, 4 ...; not scaled.

    A step needs each element's partner. The sum of the pair's bits, as integers, less the own bits is the partner's
    bits, whatever the layout: the compiler turns it into one shuffle, or into nothing where a thread holds both.
    Splitting and joining the pairs instead would move whole tiles from layout to layout.
    """
    sign = (1 - 2 * tl.arange(0, 2)).to(tl.float32)  # the upper one of a pair becomes lower - upper
    for step in tl.static_range(LOG_P):
        own = tl.reshape(x, (R, P // (2 << step), 2, 1 << step))
        bits = own.to(tl.int32, bitcast=True)
        partner = (tl.sum(bits, axis=2, keep_dims=True) - bits).to(tl.float32, bitcast=True)
        signs = tl.zeros_like(own) + sign[None, None, :, None]
        x = tl.reshape(tl.fma(own, signs, partner), (R, P))  # exact product: one rounding
    return x


@triton.jit
def add_run(
    mixed,  # [R, M2, P] fp32
    run,  # [R, P] fp32, run J after ``sylvester``
    J: tl.constexpr,
    M2: tl.constexpr,
    SIGNS: tl.constexpr,
):
    """``mixed`` plus run J with the signs of column J. Mixed runs past M are meaningless."""
    minus = (SIGNS[J] >> tl.arange(0, M2)) & 1  # [M2]
    signed = tl.where(minus[None, :, None] != 0, -run[:, None, :], run[:, None, :])
    return mixed + signed


@triton.jit
def _load_rows(
    ptr,
    row,  # [R] int64
    row_mask,  # [R]
    outer_stride,
    inner_stride,
    HEADS: tl.constexpr,
    START: tl.constexpr,
    P: tl.constexpr,
):
    """Columns START to START + P - 1 of rows (row // HEADS, row % HEADS), as fp32 [R, P]."""
    offset = (row // HEADS) * outer_stride + (row % HEADS) * inner_stride
    column = START + tl.arange(0, P)
    return tl.load(ptr + offset[:, None] + column[None, :], mask=row_mask[:, None], other=0.0).to(tl.float32)


@triton.jit
def _rotate_rows_kernel(
    x_ptr,  # [N, H, D]
    out_ptr,  # [N, H, D] fp16/bf16/fp32
    rows,  # N * H
    x_outer,  # strides in elements; the last dimension is contiguous
    x_inner,
    out_outer,
    out_inner,
    HEADS: tl.constexpr,
    M: tl.constexpr,
    M2: tl.constexpr,
    P: tl.constexpr,
    LOG_P: tl.constexpr,
    SIGNS: tl.constexpr,
    ROT_SCALE: tl.constexpr,
    R: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    row_mask = row < rows
    out_offset = (row // HEADS) * out_outer + (row % HEADS) * out_inner
    if M == 1:
        x = _load_rows(x_ptr, row, row_mask, x_outer, x_inner, HEADS, 0, P)
        y = sylvester(x, R, P, LOG_P) * ROT_SCALE
        column = tl.arange(0, P)
        tl.store(
            out_ptr + out_offset[:, None] + column[None, :], y.to(out_ptr.dtype.element_ty), row_mask[:, None]
        )
    else:
        mixed = tl.zeros((R, M2, P), tl.float32)
        for j in tl.static_range(M):
            x = _load_rows(x_ptr, row, row_mask, x_outer, x_inner, HEADS, j * P, P)
            mixed = add_run(mixed, sylvester(x, R, P, LOG_P), j, M2, SIGNS)
        y = tl.reshape(mixed, (R, M2 * P)) * ROT_SCALE
        column = tl.arange(0, M2 * P)
        tl.store(
            out_ptr + out_offset[:, None] + column[None, :],
            y.to(out_ptr.dtype.element_ty),
            row_mask[:, None] & (column < M * P)[None, :],
        )


def rotate_rows(
    x: torch.Tensor,  # [N, H, D] fp16/bf16/fp32, last dimension contiguous
    out: torch.Tensor,  # [N, H, D] fp16/bf16/fp32, written, last dimension contiguous
    inverse: bool = False,
) -> None:
    """out = R x (or R^T x) for every row, computed in fp32 and rounded once. No allocation, no synchronisation."""
    tokens, heads, head_size = x.shape
    if not tokens:
        return
    tile = 8
    rows = tokens * heads
    _rotate_rows_kernel[(triton.cdiv(rows, tile),)](
        x,
        out,
        rows,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        HEADS=heads,
        R=tile,
        **rotation_table(head_size, inverse).constexprs(),
        num_warps=1,
        enable_fp_fusion=False,
    )
