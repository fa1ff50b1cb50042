"""Queries made ready for the decode kernel: rotated, dims permuted, normalised to fp16. One small launch.

Tile: R query rows (a row is one head of one token). A program owns them from load to store: y = A q, where the matrix
A [KP, D] of -1, 0 and 1 (tile.query_matrix) holds the rotation, without its 1/sqrt(D), and the order of the dims. The
products are exact and the sums fp32. Each row is then divided by a power of two so that its largest number lies in
[2^11, 2^12), and the power is written beside it: fp16 keeps 11 bits of every coordinate that matters, whatever the
size of the query, and the decode kernel multiplies scores by the power.

With BASE the row is scaled so that its largest number becomes 127 * BASE, whatever it was: no row leaves a part of
upper's range unused. Each number is written as two of int8: upper, the nearest multiple of BASE, and lower, the rest,
rounded. With CODES, where coarse numbers of keys are their codes (tile.ByteTable), lower comes stretched and in the
order in which codes become bytes (device.nibble_order).

With CUT one more program, the first, cuts the batch into shares (schedule.py) while the others rotate. It takes longer
than they do; with EARLY decode is launched when it is about to write.

Instructions: rows * KP * D multiply-adds on the matrix unit; A is read once per program, from the second-level cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import fp16_range, gdc_launch_dependents, gdc_wait, nibble_order
from .queries import byte_range, two_bytes
from .schedule import cut_batch

__all__ = ["prepare_kernel"]


@triton.jit(
    do_not_specialize=("rows", "token_stride", "head_stride", "batch", "pieces", "window", "min_tiles"),
    do_not_specialize_on_alignment=("query_ptr", "seq_lens_ptr", "schedule_ptr"),
)
def prepare_kernel(
    query_ptr,  # [N, Hq, D] fp16/bf16
    matrix_ptr,  # [KP, D] fp16
    prepared_ptr,  # [N * Hq, KP] fp16, written
    scale_ptr,  # [N * Hq] fp32, written
    seq_lens_ptr,  # [B] int32; not read unless CUT
    schedule_ptr,  # [4 P + 2 B] int32, written if CUT, see schedule.py
    rows,  # N * Hq
    token_stride,
    head_stride,
    batch,  # B
    pieces,  # P
    window,
    min_tiles,  # fewest tiles to a piece
    HQ: tl.constexpr,
    D: tl.constexpr,
    KP: tl.constexpr,
    KP2: tl.constexpr,  # KP rounded up to a power of two
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,  # with PDL: decode starts while this runs, not when it ends
    BASE: tl.constexpr,  # unless 0: [N * Hq, 2, KP] int8 in place of fp16, BASE * upper + lower
    CODES: tl.constexpr,  # lower in the order of device.nibble_order
    STRETCH: tl.constexpr,  # of lower
    KWIDTH: tl.constexpr,  # of the decode kernel
    CUT: tl.constexpr,  # one program more than the rows need: it writes the schedule
    MOST: tl.constexpr,  # pieces of a sequence
    T: tl.constexpr,  # tokens of a tile
    WINDOW: tl.constexpr,
):
    # launched while what comes before it ends; decode, which this launches, relies on that having ended
    if PDL:
        gdc_wait()
        if EARLY and not CUT:
            gdc_launch_dependents()
    program = tl.program_id(0)
    if CUT:
        if program == 0:
            cut_batch(
                seq_lens_ptr, schedule_ptr, batch, pieces, window, min_tiles, MOST, T, WINDOW, PDL and EARLY
            )
            if PDL and not EARLY:
                gdc_launch_dependents()
            return
        program -= 1
    row = program.to(tl.int64) * R + tl.arange(0, R)
    inside = row < rows
    start = (row // HQ) * token_stride + (row % HQ) * head_stride
    column = tl.arange(0, KP2)
    y = tl.zeros((R, KP2), tl.float32)
    for first in tl.static_range(0, D, CHUNK):
        d = first + tl.arange(0, CHUNK)
        q = tl.load(query_ptr + start[:, None] + d[None, :], inside[:, None] & (d < D)[None, :], 0.0)
        a = tl.load(
            matrix_ptr + column[None, :] * D + d[:, None], (column < KP)[None, :] & (d < D)[:, None], 0.0
        )
        y = tl.dot(q, a.to(q.dtype), y)
    largest = tl.max(
        y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1
    )  # positive floats compare like their bits
    if BASE > 0:
        down, up = byte_range(largest, BASE)
    else:
        down, up = fp16_range(largest, 11)
    tl.store(scale_ptr + row, up, inside)
    keep = inside[:, None] & (column < KP)[None, :]
    if BASE > 0:
        upper, lower = two_bytes(y, down[:, None], up[:, None], BASE, STRETCH)
        at = prepared_ptr.to(tl.pointer_type(tl.int8)) + row[:, None] * (2 * KP) + column[None, :]
        tl.store(at, upper, keep)
        if CODES:
            lower = nibble_order(lower, R, KP2, KWIDTH)
        tl.store(at + KP, lower, keep)
    else:
        tl.store(prepared_ptr + row[:, None] * KP + column[None, :], (y * down[:, None]).to(tl.float16), keep)
    if PDL and (CUT or not EARLY):
        gdc_launch_dependents()
