"""Queries as decode wants them: rotated, dims in the order in which key codes come out, written as fp16 or int8.

Two routes lead there. prepare.py, a launch of its own, writes them to memory, for any head size and target. Here is the
other, for decode kernels with ALONE: each program reads the rows of its own columns as they are and rotates them in its
registers, while its first codes are on their way. Head sizes are powers of two, where the rotation is Sylvester's
matrix H: entry (i, j) is -1 to the number of ones in i & j. Such a matrix keeps that form if the bits of i and of j are
permuted alike, and for these head sizes the order of dims is a permutation of bits.

Tile: N columns, as rows here, by D dims in chunks of 16, D / 16 of them. With c a number in a chunk and J the number of
the chunk, H = H(J) x H(c):

* H(c): one product [2 N, 16] x [16, 16] per two chunks, of fp16 or bf16 numbers with -1 and 1, summed in fp32: exact
  but for the last. The 16 rows of a matrix instruction are eight columns of both chunks, in the registers in which a
  read of 16 bytes puts them. Two matrix instructions for eight columns.
* H(J): additions and subtractions of whole chunks, log2(D / 16) for each number.

A lane of an accumulator holds columns 2 q, 2 q + 1, 8 + 2 q, 9 + 2 q of a chunk, q its place in a group of four. Dims
are dealt out so that these belong to key lane q: two chunks are a unit of that lane. So what a lane has worked out is
what it owns of the operand, and nothing moves to another (on NVIDIA, see ops.OPERAND_WIDTH).

Budget, D = 128 and N = 8: 8 matrix instructions, 96 additions, 128 instructions to round 32 numbers to two bytes each,
some 60 to read and to place them: less than a tile of 32 tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import GUESS_BASE, fp16_range, nibble_order

__all__ = ["byte_range", "read_alone", "rotate_alone", "two_bytes"]

_LEAST = tl.constexpr(2.0**-100)  # rows below are scaled as if they were that
_ROUND = tl.constexpr(GUESS_BASE)


@triton.jit
def byte_range(
    largest,  # int32, the bits of the largest magnitude of a row of fp32 numbers
    BASE: tl.constexpr,
):
    """(what to multiply by so that the largest becomes 127 * BASE, what undoes it: NaN where it is not finite)."""
    size = tl.maximum(largest.to(tl.float32, bitcast=True), _LEAST)
    up = size / (127 * BASE)
    up = tl.where((largest >> 23) == 255, float("nan"), up)  # int8 has no number that says so
    return 127 * BASE / size, up


@triton.jit
def two_bytes(
    y,  # fp32, at most 127 * BASE in magnitude if multiplied by ``down``
    down,  # broadcasts to y
    up,  # 1 / down
    BASE: tl.constexpr,
    STRETCH: tl.constexpr,
):
    """(upper, lower) of y * down, int8: the nearest multiple of BASE, and the rest, stretched and rounded."""
    rounded = y * (down * (1.0 / BASE)) + _ROUND
    upper = rounded.to(tl.int32, bitcast=True).to(tl.int8)
    rest = y - (rounded - _ROUND) * (up * BASE)
    lower = (rest * (down * STRETCH) + _ROUND).to(tl.int32, bitcast=True).to(tl.int8)
    return upper, lower


@triton.jit
def _dim(
    unit,
    lane,
    position,
    KEY: tl.constexpr,  # RowTile.constants
):
    """RowTile.code: the dim of a code."""
    if KEY[4] > 0:
        first = ((unit // KEY[4]) * KEY[1] + lane) * KEY[4] + unit % KEY[4]
    else:
        first = lane * KEY[3] + unit
    return first * KEY[2] + position


@triton.jit
def read_alone(
    query_ptr,  # [N tokens, Hq, D] fp16/bf16
    start,  # [N] where the row of each column begins, in numbers, a multiple of 8
    live,  # [N]
    N: tl.constexpr,
    KEY: tl.constexpr,
    KWIDTH: tl.constexpr,
):
    """The rows of N columns, unrotated. Of 3-bit and 4-bit codes per unit both its chunks [2 N, 16] (_chunks), of FP8
    units [16, N]; as tuples."""
    UNITS: tl.constexpr = KEY[3]
    out = ()
    if KEY[2] == 8:
        r = tl.arange(0, 32)
        for u in tl.static_range(UNITS):
            at = query_ptr + start[:, None] + _dim(u, r // 8, r % 8, KEY)[None, :]
            at = tl.max_contiguous(tl.multiple_of(at, (1, 16)), (1, 8))
            x = tl.load(at, live[:, None], 0.0)
            x = tl.reshape(x, (N // 8, 8, 4, 2, 2, 2))  # lane, bits 2, 1, 0 of the place
            out = out + (tl.reshape(tl.permute(x, (0, 4, 1, 3, 2, 5)), (2 * N, 16)),)
    else:
        SPAN: tl.constexpr = 4 * KWIDTH
        r = tl.arange(0, SPAN)
        for u in tl.static_range(UNITS):
            pieces = ()
            for outer in tl.static_range(16 // SPAN):
                dim = _dim(u, r // KWIDTH, outer * KWIDTH + r % KWIDTH, KEY)
                at = query_ptr + start[None, :] + dim[:, None]
                at = tl.max_contiguous(tl.multiple_of(at, (2 * KWIDTH, 1)), (KWIDTH, 1))
                pieces = pieces + (tl.load(at, live[None, :], 0.0),)
            x = pieces[0]
            if SPAN == 8:
                x = tl.reshape(tl.permute(tl.join(x, pieces[1]), (2, 0, 1)), (16, N))
            out = out + (x,)
    return out


@triton.jit
def _chunks(
    x,  # [2 N, 16]: eight columns of chunk 2 u, the same of chunk 2 u + 1, the next eight columns of both
    N: tl.constexpr,
):
    """(chunk 2 u, chunk 2 u + 1), [N, 16] each."""
    low, high = tl.split(tl.permute(tl.reshape(x, (N // 8, 2, 8, 16)), (0, 2, 3, 1)))
    return tl.reshape(low, (N, 16)), tl.reshape(high, (N, 16))


@triton.jit
def _signs(
    like,  # tile of the dtype wanted
):
    """Sylvester's matrix, [16, 16]."""
    i = tl.arange(0, 16)
    odd = (0x6996 >> (i[:, None] & i[None, :])) & 1  # bit n says whether n has an odd number of ones
    return tl.where(odd == 1, -1.0, 1.0).to(like.dtype)


@triton.jit
def _keep(
    x,  # [k, N] int8 or fp16
    TARGET: tl.constexpr,
):
    """x. On NVIDIA the compiler does not know that it is: else it would let tl.trans go through shared memory, where
    nothing need move, or make x again in every tile."""
    if TARGET == "cuda":
        PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=PACK)
    return x


@triton.jit
def _unit(
    low,  # [N, 16], chunk 2 u
    high,  # chunk 2 u + 1
    N: tl.constexpr,
    KWIDTH: tl.constexpr,
):
    """[N, 32]: the columns of a unit in the order of KeyTile.dims."""
    x = tl.reshape(tl.join(low, high), (N, 2, 4, 2, 2))  # bit 2 of the place, lane, bit 0, bit 1
    if KWIDTH == 8:
        x = tl.permute(x, (0, 2, 1, 4, 3))
    elif KWIDTH == 4:
        x = tl.permute(x, (0, 1, 2, 4, 3))
    else:
        x = tl.permute(x, (0, 1, 4, 2, 3))
    return tl.reshape(x, (N, 32))


@triton.jit
def rotate_alone(
    read,  # from read_alone
    N: tl.constexpr,
    KEY: tl.constexpr,
    PLANES: tl.constexpr,
    CODES: tl.constexpr,
    BASE: tl.constexpr,
    STRETCH: tl.constexpr,
    KWIDTH: tl.constexpr,
    TARGET: tl.constexpr,
):
    """What decode reads from prepare otherwise: the scales of the columns [N] and, per unit, fp16 [k, N], or a tuple of
    int8 [32, N]: upper, lower, and with CODES upper in the order of device.nibble_order."""
    UNITS: tl.constexpr = KEY[3]
    if KEY[2] == 4:  # FP8 keys are not rotated
        most = tl.abs(read[0].to(tl.float32))
        for u in tl.static_range(1, UNITS):
            most = tl.maximum(most, tl.abs(read[u].to(tl.float32)), propagate_nan=tl.PropagateNan.ALL)
        largest = tl.max(most.to(tl.int32, bitcast=True), axis=0)
        down, up = fp16_range(largest, 11)
        out = (up,)
        for u in tl.static_range(UNITS):
            unit = (read[u].to(tl.float32) * down[None, :]).to(tl.float16)
            out = out + (_keep(unit, TARGET),)
    else:
        CHUNKS: tl.constexpr = 2 * UNITS
        tl.static_assert(CHUNKS <= 16)  # levels below
        signs = _signs(read[0])
        y = ()
        for u in tl.static_range(UNITS):
            y = y + _chunks(tl.dot(read[u], signs), N)
        for level in tl.static_range(4):
            if (1 << level) < CHUNKS:
                z = ()
                for i in tl.static_range(CHUNKS):
                    if (i >> level) & 1:
                        z = z + (y[i - (1 << level)] - y[i],)
                    else:
                        z = z + (y[i] + y[i + (1 << level)],)
                y = z
        most = tl.abs(y[0])
        for i in tl.static_range(1, CHUNKS):
            most = tl.maximum(most, tl.abs(y[i]), propagate_nan=tl.PropagateNan.ALL)
        largest = tl.max(most.to(tl.int32, bitcast=True), axis=1)
        if PLANES > 0:
            down, up = byte_range(largest, BASE)
        else:
            down, up = fp16_range(largest, 11)
        out = (up,)
        for u in tl.static_range(UNITS):
            if PLANES > 0:
                low_upper, low_lower = two_bytes(y[2 * u], down[:, None], up[:, None], BASE, STRETCH)
                high_upper, high_lower = two_bytes(y[2 * u + 1], down[:, None], up[:, None], BASE, STRETCH)
                upper = _unit(low_upper, high_upper, N, KWIDTH)
                lower = _unit(low_lower, high_lower, N, KWIDTH)
                parts = (_keep(tl.trans(upper), TARGET),)
                if CODES:
                    parts = parts + (_keep(tl.trans(nibble_order(lower, N, 32, KWIDTH)), TARGET),)
                    parts = parts + (_keep(tl.trans(nibble_order(upper, N, 32, KWIDTH)), TARGET),)
                else:
                    parts = parts + (_keep(tl.trans(lower), TARGET),)
                out = out + (parts,)
            else:
                low = (y[2 * u] * down[:, None]).to(tl.float16)
                high = (y[2 * u + 1] * down[:, None]).to(tl.float16)
                unit = _unit(low, high, N, KWIDTH)
                out = out + (_keep(tl.trans(unit), TARGET),)
    return out
