"""Small device functions that decode packed codes in registers, chosen by target when a kernel is compiled.

Everything works on 32-bit integers that hold two fp16 numbers ("pairs"), low half first: a pair is what a matrix
instruction takes as one register, so nothing is repacked on the way. The argument ``TARGET`` is "cuda", "hip" or
"portable"; the last one runs everywhere, the interpreter included, and is what the others are tested against.

Orders. A function that turns eight codes into four pairs does so in the order that is cheapest on its target; the
matrix product does not care, because the query's dims are permuted the same way. ``pair_order`` says which.

The FP8 decode is integer code but on NVIDIA from sm_89: E4M3FN bytes become fp16 numbers 2**-8 times as large, exactly,
subnormals included, in four instructions per pair. There is no conversion instruction whose meaning differs
between FN and FNUZ formats, none to emulate where it is missing, and no byte that becomes NaN or infinity. sm_89 has
an instruction that unpacks a pair; its numbers are not scaled, and the two bytes that E4M3FN calls NaN become NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

try:  # NVIDIA only, and only compiled where asked for
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton built without that backend
    gdc_launch_dependents = gdc_wait = None

__all__ = [
    "FP8_SCALE",
    "GUESS_BASE",
    "byte_permute",
    "centroid_pairs3",
    "centroid_pairs4",
    "fp8_pairs",
    "fp8_unpack",
    "fp16_pair",
    "fp16_range",
    "funnel",
    "gdc_launch_dependents",
    "gdc_wait",
    "halves",
    "nearest_code",
    "nibble_order",
    "nibbles",
    "pair_order",
    "power_of_2",
    "quarters",
    "read_words",
    "spread3",
    "table_bytes",
    "two_words",
    "value_pairs",
    "value_steps",
    "value_words",
    "whole",
]

FP8_SCALE = 256.0
"""What numbers from :func:`fp8_pairs` must be multiplied by."""

GUESS_BASE = 1.5 * 2.0**23
"""Added to a small number, it rounds that to an integer and has it in the low bits of the sum."""
_GUESS_BITS = tl.constexpr(0x4B400000)
_LEAST_EXPONENT = tl.constexpr(27)  # biased, of 2^-100


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
def two_words(
    pair,  # int64
):
    """The two int32 numbers of a pair, low half first: two neighbours in one read."""
    return pair.to(tl.int32), (pair >> 32).to(tl.int32)


@triton.constexpr_function
def _read_assembly(count, masked):
    """PTX that reads ``count`` neighbouring words: outputs, the address and, if masked, whether to read (else 0)."""
    outputs = [f"${i}" for i in range(count)]
    kind, target = "b32", outputs[0]
    if count > 1:
        kind, target = f"v{count}.b32", "{" + ", ".join(outputs) + "}"
    read = f"ld.global.L2::128B.{kind} {target}, [${count}];"
    if not masked:
        return read
    zeros = " ".join(f"mov.b32 {output}, 0;" for output in outputs)
    return f"{{ .reg .pred wanted; setp.ne.s32 wanted, ${count + 1}, 0; {zeros} @wanted {read} }}"


@triton.constexpr_function
def _read_constraints(count, masked):
    output = "=&r" if masked else "=r"  # zeroed before the address is used
    return ",".join([output] * count + ["l"] + ["r"] * masked)


@triton.jit
def read_words(
    at_ptr,  # tile of pointers to int32
    wanted,  # tile of int1; not read unless MASKED
    COUNT: tl.constexpr,  # neighbouring words that each reads, 1, 2 or 4; aligned to as many
    MASKED: tl.constexpr,  # 0 where not wanted
):
    """On NVIDIA: a tuple of COUNT tiles, read so that the second-level cache fetches whole lines of 128 bytes.

    Of its own accord it fetches the 64 bytes that miss. A row of one head is hardly longer, and its neighbours
    are wanted soon: other programs read the other heads, this one the next tokens. So memory is read in longer runs
    (docs/performance.md).

    Which lanes read follows from who needs the words, not from the addresses, as with tl.load: reads that several lanes
    need in different orders are better left to that.
    """
    ASSEMBLY: tl.constexpr = _read_assembly(COUNT, MASKED)
    CONSTRAINTS: tl.constexpr = _read_constraints(COUNT, MASKED)
    at = at_ptr.to(tl.int64)
    if MASKED:
        operands = [at, wanted.to(tl.int32)]
    else:
        operands = [at]
    if COUNT == 1:
        out = (tl.inline_asm_elementwise(ASSEMBLY, CONSTRAINTS, operands, tl.int32, is_pure=True, pack=1),)
    elif COUNT == 2:
        out = tl.inline_asm_elementwise(
            ASSEMBLY, CONSTRAINTS, operands, (tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        tl.static_assert(COUNT == 4)
        out = tl.inline_asm_elementwise(
            ASSEMBLY, CONSTRAINTS, operands, (tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
        )
    return out


@triton.jit
def fp16_pair(
    low,  # fp32
    high,  # fp32
    TARGET: tl.constexpr,
):
    """The pair of two numbers, rounded to fp16; int32. One instruction on NVIDIA, which of its own accord takes two
    slow ones."""
    if TARGET == "cuda":
        out = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        bits = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        out = bits | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return out


@triton.jit
def fp16_range(
    largest,  # int32, the bits of the largest magnitude of some fp32 numbers
    TOP: tl.constexpr,
):
    """(2^k, 2^-k), fp32: multiplied by the first, the largest lies in [2^TOP, 2^(TOP + 1)), where fp16 has all its 11
    bits and numbers far below it are still normal. Where all are below 2^-100, as if one were 2^-100; of infinity and
    NaN any."""
    biased = tl.maximum(largest >> 23, _LEAST_EXPONENT)
    up = ((-biased + (254 + TOP)) << 23).to(tl.float32, bitcast=True)
    return up, ((biased - TOP) << 23).to(tl.float32, bitcast=True)


@triton.jit
def power_of_2(
    exponent,  # int32, -126 to 127
):
    """2^exponent, fp32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def quarters(
    word,  # int32
):
    """The four int8 numbers of a word, low byte first. No instruction: registers are reinterpreted."""
    return (
        word.to(tl.int8),
        (word >> 8).to(tl.int8),
        (word >> 16).to(tl.int8),
        (word >> 24).to(tl.int8),
    )


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
    TABLE,  # fp16 bits of 8 entries: (high bytes 0-3, high bytes 4-7, low bytes 0-3, low bytes 4-7)
    TARGET: tl.constexpr,
):
    """Eight high bytes and eight low bytes -> (high a, low a, high b, low b), four numbers in a and four in b."""
    h0 = tl.zeros(select.shape, tl.int32) + TABLE[0]
    h1 = tl.zeros(select.shape, tl.int32) + TABLE[1]
    l0 = tl.zeros(select.shape, tl.int32) + TABLE[2]
    l1 = tl.zeros(select.shape, tl.int32) + TABLE[3]
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
    TABLE,  # fp16 bits of the eight positive centroids, ascending, as in _lookup8
    TARGET: tl.constexpr,
):
    """Centroids of eight 4-bit codes, as four pairs. The codebook is antisymmetric: c(15 - i) = -c(i). TABLE[4] is
    0x7F7F7F7F, for NVIDIA.

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
        full = tl.zeros(word.shape, tl.int32) + TABLE[4]
        ha |= (byte_permute(full, full, word, TARGET) << 1) & -0x7F7F7F80
        hb |= (byte_permute(full, full, word >> 16, TARGET) << 1) & -0x7F7F7F80
    else:
        ha |= _spread_signs(negative)
        hb |= _spread_signs(negative >> 16)
    p0, p1 = _interleave(ha, la, TARGET)
    p2, p3 = _interleave(hb, lb, TARGET)
    return p0, p1, p2, p3


@triton.jit
def table_bytes(
    select,  # int32: eight nibbles
    low,  # int32: bytes 0 to 3 of the table, all below 128 unless nibbles are below 8
    high,  # int32: bytes 4 to 7
    TARGET: tl.constexpr,
):
    """Eight bytes of a table of eight, as two words; 0 for nibbles above 7. Three instructions on NVIDIA.

    NVIDIA's instruction fills a byte with the sign of the one selected where bit 3 of a selector is set: with 0, since
    bytes below 128 have none. Elsewhere the portable code runs: no other target takes this route.
    """
    low += tl.zeros(select.shape, tl.int32)
    high += tl.zeros(select.shape, tl.int32)
    if TARGET == "cuda":
        first = byte_permute(low, high, select, "cuda")
        second = byte_permute(low, high, select >> 16, "cuda")
    else:
        first = byte_permute(low, high, select, "portable") & ~_spread_signs_full(select)
        second = byte_permute(low, high, select >> 16, "portable") & ~_spread_signs_full(select >> 16)
    return first, second


@triton.jit
def nibbles(
    word,  # int32: eight 4-bit codes
    TARGET: tl.constexpr,
):
    """The codes as bytes, in two words: those with even places, then those with odd ones. Three instructions.

    In assembly on NVIDIA, because the compiler sees that bytes are taken out of the result and then masks each of them
    on its own. Elsewhere the portable code runs: no other target takes this route.
    """
    if TARGET == "cuda":
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 moved;
            shr.u32 moved, $2, 4;
            and.b32 $0, $2, 0x0F0F0F0F;
            and.b32 $1, moved, 0x0F0F0F0F;
            }""",
            "=r,=r,r",
            [word],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        even = word & 0x0F0F0F0F
        odd = (word >> 4) & 0x0F0F0F0F
    return even, odd


@triton.jit
def nibble_order(
    x,  # [R, C], columns as in tile.KeyTile.dims: eight codes of a lane in the order of memory
    R: tl.constexpr,
    C: tl.constexpr,
    KWIDTH: tl.constexpr,  # consecutive columns of a lane
):
    """The columns of each lane in the order of the bytes of :func:`nibbles`. No lane gives anything to another."""
    if KWIDTH == 8:
        x = tl.permute(tl.reshape(x, (R, C // 8, 4, 2)), (0, 1, 3, 2))
    else:
        tl.static_assert(KWIDTH == 4)
        x = tl.reshape(x, (R, C // 32, 2, 4, 2, 2))  # unit, bit 2 of the place, lane, bits 1 and 0
        x = tl.permute(x, (0, 1, 5, 3, 2, 4))
    return tl.reshape(x, (R, C))


@triton.jit
def _spread_signs_full(
    select,  # int32: four nibbles in bits 0 to 15
):
    """Four bytes: 0xFF for nibbles above 7, 0 for the others."""
    sign = _spread_signs(select)
    return (sign - ((sign.to(tl.uint32, bitcast=True) >> 7).to(tl.int32, bitcast=True))) | sign


@triton.jit
def spread3(
    group,  # int32: eight 3-bit codes in bits 0 to 23; the others are ignored
):
    """The codes as eight nibbles: the upper half of what is left moves up, three times. A sum does the work of a
    shift and an OR, and of two AND."""
    x = group & 0xFFFFFF
    x += (x & 0xFFF000) * 15
    x += (x & 0x0FC00FC0) * 3
    return x + (x & 0x38383838)


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
    TABLE,  # fp16 bits of the eight centroids, ascending, as in _lookup8
    TARGET: tl.constexpr,
):
    """Centroids of eight 3-bit codes, as four pairs: codes spread to nibbles, then one table of eight entries."""
    ha, la, hb, lb = _lookup8(spread3(group), TABLE, TARGET)
    p0, p1 = _interleave(ha, la, TARGET)
    p2, p3 = _interleave(hb, lb, TARGET)
    return p0, p1, p2, p3


@triton.jit
def fp8_unpack(
    word,  # int32: four E4M3FN bytes
):
    """Four FP8 numbers as two pairs, with the conversion instruction of sm_89 and later; NaN stays NaN."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [word],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


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
def value_words(
    first,  # int32: eight codes of one token (BITS = 4: 32 bits, 3: 24 bits)
    second,  # int32: the same dims of another token
    BITS: tl.constexpr,
    TARGET: tl.constexpr,
):
    """The codes in two words of halfwords, ``first`` in the low ones and ``second`` in the high ones. The first step of
    value_pairs, apart: the registers of the codes are free after it, and the next ones can be read into them."""
    return (
        halfwords(first, second, 0, TARGET),
        halfwords(first, second, 2 if BITS == 4 else 1, TARGET),
    )


@triton.jit
def value_pairs(
    low,  # int32, from value_words
    high,
    BITS: tl.constexpr,
    BARE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Eight pairs of fp16 numbers 1024 + code * step: ``first`` in the low half, ``second`` in the high one.

    1024 + n is the fp16 number whose bits are 0x6400 | n, so a code needs no shift where it lies inside the ten bits
    of the mantissa; its number is then ``step`` times as large. The steps are those of value_steps. A fused multiply-
    add in the caller undoes both. One instruction per pair, and two for eight pairs.

    BARE: code * step * 2^-24 instead, the denormal numbers whose bits are the codes. They are for matrix units that
    take denormal numbers as they are.
    """
    BASE: tl.constexpr = 0 if BARE else 0x64006400
    if BITS == 4:
        low8 = low >> 8
        high8 = high >> 8
        return (
            _magic(low, 0x000F000F, BASE, TARGET),
            _magic(low, 0x00F000F0, BASE, TARGET),
            _magic(low8, 0x000F000F, BASE, TARGET),
            _magic(low8, 0x00F000F0, BASE, TARGET),
            _magic(high, 0x000F000F, BASE, TARGET),
            _magic(high, 0x00F000F0, BASE, TARGET),
            _magic(high8, 0x000F000F, BASE, TARGET),
            _magic(high8, 0x00F000F0, BASE, TARGET),
        )
    else:
        tl.static_assert(BITS == 3)
        low9 = low >> 9
        high10 = high >> 10
        return (
            _magic(low, 0x00070007, BASE, TARGET),
            _magic(low, 0x00380038, BASE, TARGET),
            _magic(low, 0x01C001C0, BASE, TARGET),
            _magic(low9, 0x00070007, BASE, TARGET),
            _magic(low9, 0x00380038, BASE, TARGET),
            _magic(high, 0x03800380, BASE, TARGET),
            _magic(high10, 0x00070007, BASE, TARGET),
            _magic(high10, 0x00380038, BASE, TARGET),
        )


@triton.jit
def _magic(
    word,  # int32
    MASK: tl.constexpr,
    BASE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """(word & MASK) | BASE. One instruction, which NVIDIA's compiler makes two of if it is not told."""
    if BASE == 0:
        out = word & MASK
    elif TARGET == "cuda":
        mask = tl.full(word.shape, MASK, tl.int32)
        base = tl.full(word.shape, BASE, tl.int32)
        out = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;",
            "=r,r,r,r",
            [word, mask, base],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        out = (word & MASK) | BASE
    return out


@triton.constexpr_function
def value_steps(bits):
    """By how much the numbers of value_pairs grow from one code to the next, for each of the eight pairs."""
    return (1, 16, 1, 16, 1, 16, 1, 16) if bits == 4 else (1, 8, 64, 1, 8, 128, 1, 8)


@triton.jit
def halfwords(
    first,  # int32
    second,  # int32
    BYTE: tl.constexpr,  # 0, 1 or 2
    TARGET: tl.constexpr,
):
    """Bytes BYTE and BYTE + 1 of ``first`` in the low half, of ``second`` in the high half."""
    if TARGET == "cuda":
        select = tl.full(first.shape, 0x5410 + 0x1111 * BYTE, tl.int32)
        out = byte_permute(first, second, select, TARGET)
    elif TARGET == "hip":
        select = tl.full(first.shape, 0x05040100 + 0x01010101 * BYTE, tl.int32)
        out = byte_permute(first, second, select, TARGET)
    else:
        out = ((first >> (8 * BYTE)) & 0xFFFF) | ((second >> (8 * BYTE)) << 16)
    return out


@triton.jit
def _entry(
    index,  # int32; bits above those of SIZE - 1 do not count
    TABLE: tl.constexpr,
    START: tl.constexpr,
    SIZE: tl.constexpr,  # power of two
):
    """TABLE[START + index], by selects: a tree of SIZE - 1."""
    if SIZE == 1:
        out = tl.zeros_like(index) + TABLE[START]
    else:
        HALF: tl.constexpr = SIZE // 2
        low = _entry(index, TABLE, START, HALF)
        high = _entry(index, TABLE, START + HALF, HALF)
        out = tl.where((index & HALF) != 0, high, low)
    return out


@triton.jit
def nearest_code(
    y,  # fp32 [., .], of a normal distribution with variance 1
    GUESS: tl.constexpr,  # steepness, width, GUESS_BASE + (SIZE - 2) / 2, 16 thresholds, 16 squares: store.code_guess
    SIZE: tl.constexpr,  # codes: 4, 8 or 16
    TARGET: tl.constexpr,
):
    """(number of thresholds <= y, int32; its entry of the squares, fp32). Seven instructions per element on NVIDIA.

    There the lanes of a warp hold both tables, an entry each, and a shuffle is a look-up. A smooth function of y says
    between which two codes y lies, and one comparison with the threshold between them decides: width * tanh(steepness
    * y) has to lie within 0.5 of i at the i-th threshold above 0, less what the instruction errs, 2^-11 of it. Its
    nearest integer comes from an addition, as the low bits of the sum. Elsewhere the portable code runs, with a
    comparison per threshold: no other target takes this route.
    """
    if TARGET == "cuda":
        lane = tl.inline_asm_elementwise(
            "mov.u32 $0, %laneid;",
            "=r,r",
            [tl.zeros((1, 1), tl.int32)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        sum_bits = tl.inline_asm_elementwise(
            """{
            .reg .f32 guess, threshold, above;
            mul.f32 guess, $1, $3;
            tanh.approx.f32 guess, guess;
            fma.rn.f32 guess, guess, $4, $5;
            shfl.sync.idx.b32 threshold, $2, guess, 31, -1;
            set.ge.f32.f32 above, $1, threshold;
            add.f32 $0, guess, above;
            }""",
            "=r,r,r,r,r,r",
            [
                y,
                tl.broadcast_to(_entry(lane, GUESS, 3, SIZE), y.shape),
                tl.full(y.shape, GUESS[0], tl.float32),
                tl.full(y.shape, GUESS[1], tl.float32),
                tl.full(y.shape, GUESS[2], tl.float32),
            ],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        square = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $2, $1, 31, -1;",
            "=r,r,r",
            [sum_bits, tl.broadcast_to(_entry(lane, GUESS, 19, SIZE), y.shape)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        code = sum_bits - _GUESS_BITS
    else:
        code = tl.zeros(y.shape, tl.int32)
        for i in tl.static_range(SIZE - 1):
            threshold = tl.full(y.shape, GUESS[3 + i], tl.int32).to(tl.float32, bitcast=True)
            code += tl.where(y >= threshold, 1, 0)
        square = _entry(code, GUESS, 19, SIZE).to(tl.float32, bitcast=True)
    return code, square


@triton.jit
def whole(
    x,  # fp32, 0 to 2^22
    TARGET: tl.constexpr,
):
    """int32(x), rounded down. NVIDIA's conversion instruction runs at a quarter of the rate of an addition, whose sum
    with 2^23, rounded towards zero, has the integer in its low bits."""
    if TARGET == "cuda":
        bits = tl.inline_asm_elementwise(
            "add.rz.f32 $0, $1, 0f4B000000;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )
        out = bits - 0x4B000000
    else:
        out = x.to(tl.int32)
    return out
