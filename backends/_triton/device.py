"""Small device functions that decode packed codes in registers, chosen by target when a kernel is compiled.

Everything works on 32-bit integers that hold two fp16 numbers ("pairs"), low half first: a pair is what a matrix
instruction takes as one register, so nothing is repacked on the way. The argument ``TARGET`` is "cuda", "hip" or
"portable"; the last one runs everywhere, the interpreter included, and is what the others are tested against.

Orders. A function that turns eight codes into four pairs does so in the order that is cheapest on its target; the
matrix product does not care, because the query's dims are permuted the same way. ``pair_order`` says which.

The FP8 decode is integer code on every target: E4M3FN bytes become fp16 numbers 2**-8 times as large, exactly,
subnormals included, in three instructions per pair. There is no conversion instruction whose meaning differs
between FN and FNUZ formats, none to emulate where it is missing, and no byte that becomes NaN or infinity.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "FP8_SCALE",
    "byte_permute",
    "centroid_pairs3",
    "centroid_pairs4",
    "fp8_pairs",
    "funnel",
    "halves",
    "pair_order",
    "value_pairs",
]

FP8_SCALE = 256.0
"""What numbers from :func:`fp8_pairs` must be multiplied by."""


def pair_order(target: str, units: int) -> tuple[int, ...]:
    """Position in memory of the codes in pair order: entries 2i and 2i + 1 are pair i. units: codes, 8 or 4."""
    if units == 8 and target == "hip":
        return (0, 2, 4, 6, 1, 3, 5, 7)
    return tuple(range(units))


@triton.jit
def halves(
    pair,  # int32
):
    """The two fp16 numbers of a pair, low half first. No instruction: registers are reinterpreted."""
    low = pair.to(tl.int16).to(tl.float16, bitcast=True)
    high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def _select_byte(
    low,
    high,
    index,  # int32, 0 to 7
):
    word = tl.where(index < 4, low, high)
    return (word >> ((index & 3) * 8)) & 255


@triton.jit
def byte_permute(
    low,  # int32: bytes 0 to 3 of the table
    high,  # int32: bytes 4 to 7
    select,  # int32
    TARGET: tl.constexpr,
):
    """Four bytes out of eight. cuda, portable: selectors are the four low nibbles, with bit 3 clear.

    hip: selectors are the four bytes, values 0 to 7. The result has byte i chosen by selector i.
    """
    if TARGET == "cuda":
        out = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, select], dtype=tl.int32, is_pure=True, pack=1
        )
    elif TARGET == "hip":  # the instruction counts the bytes of its second operand first
        out = tl.inline_asm_elementwise(
            "v_perm_b32 $0, $1, $2, $3", "=v,v,v,v", [high, low, select], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        b0 = _select_byte(low, high, select & 7)
        b1 = _select_byte(low, high, (select >> 4) & 7)
        b2 = _select_byte(low, high, (select >> 8) & 7)
        b3 = _select_byte(low, high, (select >> 12) & 7)
        out = b0 | (b1 << 8) | (b2 << 16) | (b3 << 24)
    return out


@triton.jit
def funnel(
    low,  # int32
    high,  # int32
    shift,  # int32, 0 to 31
    TARGET: tl.constexpr,
):
    """The low 32 bits of (high:low) >> shift."""
    if TARGET == "cuda":
        out = tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [low, high, shift],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    elif TARGET == "hip":
        out = tl.inline_asm_elementwise(
            "v_alignbit_b32 $0, $1, $2, $3",
            "=v,v,v,v",
            [high, low, shift],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        right = (low.to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)).to(tl.int32, bitcast=True)
        out = right | ((high << 1) << (31 - shift))
    return out


@triton.jit
def _interleave(
    high,  # int32: four high bytes
    low,  # int32: four low bytes
    TARGET: tl.constexpr,
):
    """Four fp16 numbers from their bytes, as two pairs."""
    if TARGET == "hip":
        first = byte_permute(low, high, tl.full(low.shape, 0x05010400, tl.int32), TARGET)
        second = byte_permute(low, high, tl.full(low.shape, 0x07030602, tl.int32), TARGET)
    else:
        first = byte_permute(low, high, tl.full(low.shape, 0x5140, tl.int32), TARGET)
        second = byte_permute(low, high, tl.full(low.shape, 0x7362, tl.int32), TARGET)
    return first, second


@triton.jit
def _lookup8(
    select,  # int32: eight nibbles, bit 3 of each clear
    TABLE: tl.constexpr,  # fp16 bits of 8 entries: (high bytes 0-3, high bytes 4-7, low bytes 0-3, low bytes 4-7)
    TARGET: tl.constexpr,
):
    """Eight high bytes and eight low bytes -> (high a, low a, high b, low b), four numbers in a and four in b."""
    h0 = tl.full(select.shape, TABLE[0], tl.int32)
    h1 = tl.full(select.shape, TABLE[1], tl.int32)
    l0 = tl.full(select.shape, TABLE[2], tl.int32)
    l1 = tl.full(select.shape, TABLE[3], tl.int32)
    if TARGET == "hip":
        a = select & 0x07070707
        b = (select >> 4) & 0x07070707
    else:
        a = select
        b = select >> 16
    return (
        byte_permute(h0, h1, a, TARGET),
        byte_permute(l0, l1, a, TARGET),
        byte_permute(h0, h1, b, TARGET),
        byte_permute(l0, l1, b, TARGET),
    )


@triton.jit
def centroid_pairs4(
    word,  # int32: eight 4-bit codes
    TABLE: tl.constexpr,  # fp16 bits of the eight positive centroids, ascending, as in _lookup8
    TARGET: tl.constexpr,
):
    """Centroids of eight 4-bit codes, as four pairs. The codebook is antisymmetric: c(15 - i) = -c(i).

    About 19 instructions for eight codes: 4 for the magnitude's index, 4 look-ups, 4 interleaves, the signs.
    """
    negative = ~word & -0x77777778  # 0x88888888: codes below 8
    ones = (negative.to(tl.uint32, bitcast=True) >> 3).to(tl.int32, bitcast=True)
    select = (word ^ (negative - ones)) & 0x77777777  # |c| is entry 7 - i, or i - 8
    ha, la, hb, lb = _lookup8(select, TABLE, TARGET)
    if TARGET == "hip":  # codes 0, 2, 4, 6 and 1, 3, 5, 7: their sign bits lie in separate bytes already
        ha |= (negative << 4) & -0x7F7F7F80
        hb |= negative & -0x7F7F7F80
    elif TARGET == "cuda":  # a selector with bit 3 set replicates the sign of its byte: 0x7F gives 0x00
        full = tl.full(word.shape, 0x7F7F7F7F, tl.int32)
        ha |= (byte_permute(full, full, word, TARGET) << 1) & -0x7F7F7F80
        hb |= (byte_permute(full, full, word >> 16, TARGET) << 1) & -0x7F7F7F80
    else:
        ha |= _spread_signs(negative)
        hb |= _spread_signs(negative >> 16)
    p0, p1 = _interleave(ha, la, TARGET)
    p2, p3 = _interleave(hb, lb, TARGET)
    return p0, p1, p2, p3


@triton.jit
def _spread_signs(
    negative,  # int32
):
    """Bits 3, 7, 11 and 15 moved to bits 7, 15, 23 and 31."""
    return (
        ((negative & 0x8) << 4)
        | ((negative & 0x80) << 8)
        | ((negative & 0x800) << 12)
        | ((negative & 0x8000) << 16)
    )


@triton.jit
def centroid_pairs3(
    group,  # int32: eight 3-bit codes in bits 0 to 23; the others are ignored
    TABLE: tl.constexpr,  # fp16 bits of the eight centroids, ascending, as in _lookup8
    TARGET: tl.constexpr,
):
    """Centroids of eight 3-bit codes, as four pairs: codes spread to nibbles, then one table of eight entries."""
    x = (group & 0xFFF) | ((group << 4) & 0x0FFF0000)
    x = (x & 0x003F003F) | ((x << 2) & 0x3F003F00)
    x = (x & 0x07070707) | ((x << 1) & 0x70707070)
    ha, la, hb, lb = _lookup8(x, TABLE, TARGET)
    p0, p1 = _interleave(ha, la, TARGET)
    p2, p3 = _interleave(hb, lb, TARGET)
    return p0, p1, p2, p3


@triton.jit
def fp8_pairs(
    word,  # int32: four E4M3FN bytes
    TARGET: tl.constexpr,
):
    """Four FP8 numbers times 2**-8, as two pairs, exact for every finite byte."""
    zero = tl.zeros_like(word)
    if TARGET == "cuda":
        a = byte_permute(word, zero, tl.full(word.shape, 0x1404, tl.int32), TARGET)
        b = byte_permute(word, zero, tl.full(word.shape, 0x3424, tl.int32), TARGET)
    elif TARGET == "hip":
        a = byte_permute(word, zero, tl.full(word.shape, 0x01040004, tl.int32), TARGET)
        b = byte_permute(word, zero, tl.full(word.shape, 0x03040204, tl.int32), TARGET)
    else:
        a = ((word & 0xFF) << 8) | ((word & 0xFF00) << 16)
        b = ((word >> 8) & 0xFF00) | (word & -0x1000000)
    a = (a & -0x7FFF8000) | ((a >> 1) & 0x3F803F80)  # sign stays, exponent and mantissa move down by one bit
    b = (b & -0x7FFF8000) | ((b >> 1) & 0x3F803F80)
    return a, b


@triton.jit
def value_pairs(
    first,  # int32: eight codes of one token (BITS = 4: 32 bits, 3: 24 bits)
    second,  # int32: the same dims of another token
    BITS: tl.constexpr,
):
    """Eight pairs (1024 + code of first, 1024 + code of second), one for each dim.

    1024 + n is the fp16 number whose bits are 0x6400 | n; the caller subtracts 1024.
    Two instructions per pair, and two or three for eight pairs.
    """
    low = (first & 0xFFFF) | (second << 16)
    if BITS == 4:
        high = ((first >> 16) & 0xFFFF) | (second & -0x10000)
        MASK: tl.constexpr = 0x000F000F
        return (
            (low & MASK) | 0x64006400,
            ((low >> 4) & MASK) | 0x64006400,
            ((low >> 8) & MASK) | 0x64006400,
            ((low >> 12) & MASK) | 0x64006400,
            (high & MASK) | 0x64006400,
            ((high >> 4) & MASK) | 0x64006400,
            ((high >> 8) & MASK) | 0x64006400,
            ((high >> 12) & MASK) | 0x64006400,
        )
    else:
        tl.static_assert(BITS == 3)
        high = ((first >> 8) & 0xFFFF) | ((second >> 8) << 16)
        MASK3: tl.constexpr = 0x00070007
        return (
            (low & MASK3) | 0x64006400,
            ((low >> 3) & MASK3) | 0x64006400,
            ((low >> 6) & MASK3) | 0x64006400,
            ((low >> 9) & MASK3) | 0x64006400,
            ((low >> 12) & MASK3) | 0x64006400,
            ((high >> 7) & MASK3) | 0x64006400,
            ((high >> 10) & MASK3) | 0x64006400,
            ((high >> 13) & MASK3) | 0x64006400,
        )
