"""Paged decode of 16 or 32 columns by a group of four warps, in Gluon: decode.py's work where a warp is short of room.

For several query tokens (speculative decoding) or many query heads of a KV head. decode.py takes at most 16 columns at
a time, for which a warp needs so many registers that two are left to a scheduler, and decodes every key and value once
for each 16; here there are three warps to a scheduler with 32 columns and four with 16. It is for NVIDIA's sm_90,
for 4-bit keys and values of head size 128 whose rows begin at multiples of 16 bytes and whose norms need no correction
and whose queries are bf16 (DecodePlan.wide_from says so); decode.py serves everything else and everywhere else.

Work, splits, pieces and partial results are decode.py's, but that partial results are in the order of the dims.

Tile: T = 64 tokens, four groups of 16, N columns. Who owns what:

* S[T, N], int32 twice, then fp32: warp w has the 16 tokens of group w, a lane the rows g and g + 8 of them (g = lane /
  4) and the columns 2 c, 2 c + 1 of every eight (c = lane % 4). Row r of a group is token 2 r, from row 8 on token
  2 r - 15: then the rows of a lane are neighbours, and one word holds both their norms.
* Keys, the left operand [T, 128] int8, in registers: a lane has a quarter of the codes of its two rows, 16 bytes, which
  it has copied to shared memory itself. Decoded as in decode.py with one plane: codes, and what they are off; of the
  halves of the table, each 0 for the codes of the other, one operand is made.
* Queries, the right operand, in shared memory: upper, lower, and upper in the order in which codes become bytes.
* P[T, N] fp16 goes through shared memory, because all warps want all of it.
* O[128, N] fp32: warp w has the dims 32 w to 32 w + 31. Row b * 64 + w * 16 + h * 8 + g is dim (8 w + g) * 4 + 2 b + h.
* Values, the left operand [128, T] fp16, in registers: copied to shared memory as they are, read from there as
  transposed matrices of halfwords. So a register has four codes of two tokens, and a mask makes an operand of it.

What moves when. Everything of a tile is copied to shared memory two tiles ahead (three stages), and with a tile's norms
and scales the page ids of the tile after next, so that nobody waits for a page id. A tile has two barriers. After the
first its codes are there; until the second a warp makes its rows of P as if the reference could stay, decodes its
values, and says whether it can; after it P is there, or all warps agree to move the reference and make P again. The
copies of the tile after next are sent for then, and the sums are taken while the product with the values runs.

The reference. P = exp2(S - reference), and fp16(P * value scale * r) as in decode.py, with a reference and an r that
are only moved where P would exceed 2^SLACK, or a scale is too large. That is rare after the first tile, and nothing is
scaled or exchanged otherwise. It costs three of the bits by which fp16 reaches below the largest scale: those of values
are to lie within 2^21 of each other where all weigh the same.

Beginning and end. The sums of a column's query, which its scores lack, are products with a matrix of ones: all rows
are equal, so a lane finds its own columns' without an exchange. At the end sums of P go through shared memory, after
which a lane has one column and works out for it what the accumulators are multiplied with; four neighbouring dims of a
column are a lane's, and are written at once.

Budget of a warp and tile, N = 32: 96 instructions for keys, 8 for reading and 76 for values, 12 + 8 products, 12 for a
column's two scores, 45 for reads and addresses: 464, of which 195 are the integer pipe's. 168 registers: three groups
to a multiprocessor. N = 16: 380, 128 registers, four groups. Before the loop 765 and after it 280 (565 and 215), a
batch that is cut.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .device import fp16_range, gdc_launch_dependents, gdc_wait, nibbles, power_of_2, quarters
from .schedule import piece_of, piece_taken, tiles_taken, tokens_seen

__all__ = ["COLUMNS", "HEAD_SIZE", "TOKENS", "WARPS", "wide_kernel"]

TOKENS = 64
"""Of a tile."""
COLUMNS = (16, 32)
"""That a tile may have."""
HEAD_SIZE = 128
WARPS = 4

_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""What Triton 3.9 and 3.6 call it."""

_LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)
_SLACK = gl.constexpr(4.0)  # log2 of how far P may exceed 1
_P_LOG2 = gl.constexpr(12)  # log2 of where fp16(P * scale * r) ends for P = 1; 2^_SLACK times that fits
_PART_TOP = gl.constexpr(14)  # log2 of where the bound of a partial result's numbers begins
_LOWEST = gl.constexpr(-3e38)  # a reference before there is one
_T = gl.constexpr(TOKENS)
_GROUPS = gl.constexpr(TOKENS // 16)
_D = gl.constexpr(HEAD_SIZE)
_STAGES = gl.constexpr(3)

# Lanes of a warp: two bits say which quarter of a row or which columns, three which row. Warps have a group each.
_WORDS = gl.constexpr(  # [groups, 16 rows, 4 quarters of a row], words of keys
    gl.DistributedLinearLayout(
        [[0, 8, 0]],
        [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0]],
        [],
        [4, 16, 4],
    )
)
_KEY_COPY = gl.constexpr(  # [T, 16 words]: four words to a lane, those of _WORDS
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 16],
    )
)
_VALUE_COPY = gl.constexpr(  # [T, 32 halfwords]: eight to a lane
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 32],
    )
)
_VALUES = gl.constexpr(  # [T, 32 halfwords]: pairs of tokens, as matrices that are read transposed come out
    gl.DistributedLinearLayout(
        [[1, 0], [8, 0], [16, 0], [32, 0]],
        [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        [[0, 8], [0, 16]],
        [],
        [64, 32],
    )
)
_PAIRS = gl.constexpr(  # [groups, 8 pairs of rows]
    gl.DistributedLinearLayout([], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[1, 0], [2, 0]], [], [4, 8])
)
_THREADS = gl.constexpr(  # [warps, rows, columns]: a number for each thread
    gl.DistributedLinearLayout(
        [], [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]], [[1, 0, 0], [2, 0, 0]], [], [4, 8, 4]
    )
)
_FIELD_COPY = gl.constexpr(  # [32 pairs, 4 fields]: a number for each thread
    gl.DistributedLinearLayout([], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 4])
)
_FIELDS = gl.constexpr(  # likewise: all fields of its pair for each thread
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 4]
    )
)
_OF_WARP = gl.constexpr(gl.DistributedLinearLayout([], [[0]] * 5, [[1], [2]], [], [4]))
_OF_ALL = gl.constexpr(gl.DistributedLinearLayout([[1], [2]], [[0]] * 5, [[0], [0]], [], [4]))
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.constexpr_function
def _sums_layout(N):
    """[32 threads of a column, N]."""
    return gl.DistributedLinearLayout(
        [[0, 1], *([0, 8 << i] for i in range((N // 8).bit_length() - 1))],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0]],
        [],
        [32, N],
    )


@gluon.constexpr_function
def _columns_layout(N):
    """[32, N, 2]: a column to a lane, and what there is of rows to all."""
    columns = [[0, 1 << i, 0] for i in range(N.bit_length() - 1)]
    rows = [[1 << i, 0, 0] for i in range(5)]
    in_lane = 3 - (5 - len(columns))
    return gl.DistributedLinearLayout(
        [[0, 0, 1], *rows[:in_lane]], [*columns, *rows[in_lane:3]], rows[3:], [], [32, N, 2]
    )


@gluon.constexpr_function
def _result_layout(N):
    """[32, 4, N]: of a column four neighbouring dims to a lane; the registers of the accumulator in this order."""
    return gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [0, 0, 1], *([0, 0, 8 << i] for i in range((N // 8).bit_length() - 1))],
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[8, 0, 0], [16, 0, 0]],
        [],
        [32, 4, N],
    )


@gluon.constexpr_function
def _read_layout(N):
    """[N, 128] int8 of queries: the eight bytes of a unit and a lane of keys to each lane."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], *([8 << i, 0] for i in range((N // 8).bit_length() - 1))],
        [[0, 4], [0, 8], [0, 32], [0, 64], [1, 0]],
        [[2, 0], [4, 0]],
        [],
        [N, 128],
    )


@gluon.jit
def _code_order(
    x,  # [N, 128]: column = unit * 32 + word * 16 + lane * 4 + byte, as _key_operand has bytes of the table
    N: gl.constexpr,
):
    """The same for bytes that are codes: of a unit's words the first has the codes with even places."""
    x = gl.reshape(x, (N, 4, 2, 4, 2, 2))  # code of a unit: 4 * word + byte
    return gl.reshape(gl.permute(x, (0, 1, 5, 3, 2, 4)), (N, _D))


@gluon.jit
def _token(
    row,  # of a tile
):
    """Which token of its group a row is."""
    return row % 8 * 2 + row // 8 % 2


@gluon.jit
def _copy_rows(
    base,  # [groups, 8 pairs] pointers to bytes, of blocks
    at,  # [T, .] bytes from there to the first token of a pair
    to,  # shared memory [T, .]
    STRIDE: gl.constexpr,  # bytes to the other token
    WIDTH: gl.constexpr,  # elements of 16 bytes
    LAYOUT: gl.constexpr,
):
    """Send for a tile's rows of codes. Every lane copies 16 bytes at a time, from a multiple of 16."""
    rows = gl.reshape(gl.permute(gl.join(base, base), (0, 2, 1)), (_T,))
    rows = gl.convert_layout(rows, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    from_ptr = rows[:, None] + at
    # last, so that it is part of the instruction and not another address
    other = gl.arange(0, _T, gl.SliceLayout(1, LAYOUT)) // 8 % 2 * STRIDE
    from_ptr = (from_ptr + other.to(gl.int64)[:, None]).to(gl.pointer_type(to.dtype))
    _copy(to, gl.max_contiguous(gl.multiple_of(from_ptr, [1, 16]), [1, WIDTH]))


@gluon.jit
def _copy_fields(
    base,  # [groups, 8 pairs] pointers to bytes, of the first token of each group in its block's meta region
    at,  # [groups, 8 pairs, 4] bytes from there
    page_ptr,  # [groups, 8 pairs] pointers to page ids
    to,  # shared memory [32 pairs, 4] int32
    SOME,  # there is a page id to read
):
    """Send for a tile's norms, scales and zeros, a field of two neighbouring tokens to a lane, and for page ids."""
    starts = gl.convert_layout(base, gl.SliceLayout(2, _THREADS), assert_trivial=True)
    from_ptr = (starts[:, :, None] + at).to(gl.pointer_type(gl.int32))
    page_ptr = gl.convert_layout(page_ptr, gl.SliceLayout(2, _THREADS), assert_trivial=True)
    field = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, _THREADS)))[None, None, :]
    from_ptr = gl.where((field == 3) & SOME, page_ptr[:, :, None], from_ptr)
    _copy(to, gl.convert_layout(gl.reshape(from_ptr, (_T // 2, 4)), _FIELD_COPY, assert_trivial=True))


@gluon.jit
def _send(
    cache_ptr,
    pages,  # [groups, 8 pairs]
    within,  # [groups, 1] number of the first token in its block
    page_ptr,  # [groups, 8 pairs] where to find the page ids of the tile after next
    some,  # there are such
    key_at,  # what a lane copies, bytes from the first token of a group in its block
    value_at,
    field_at,
    keys,  # shared memory, [stages, ...]
    values,
    fields,
    stage,
    KEY_DATA: gl.constexpr,
    VALUE_DATA: gl.constexpr,
):
    """Send for everything of a tile, as one group of copies."""
    base = cache_ptr + pages.to(gl.int64) * KEY_DATA[3]
    _copy_rows(base + within * KEY_DATA[1], key_at, keys.index(stage), KEY_DATA[1], 4, _KEY_COPY)
    _copy_rows(base + within * VALUE_DATA[1], value_at, values.index(stage), VALUE_DATA[1], 8, _VALUE_COPY)
    _copy_fields(base + within * 2, field_at, page_ptr, fields.index(stage), some)
    async_copy.commit_group()


@gluon.jit
def _fields(
    read,  # [32 pairs, 4] int32 of _FIELDS
):
    """Norms, scales and zeros of pairs of tokens, and the page id, [groups, 8] int32 each."""
    even, odd = gl.split(gl.reshape(read, (4, 8, 2, 2)))
    norm, zero = gl.split(even)
    scale, page = gl.split(odd)
    return (
        gl.convert_layout(norm, _PAIRS, assert_trivial=True),
        gl.convert_layout(scale, _PAIRS, assert_trivial=True),
        gl.convert_layout(zero, _PAIRS, assert_trivial=True),
        gl.convert_layout(page, _PAIRS, assert_trivial=True),
    )


@gluon.jit
def _rows(
    pairs,  # [groups, 8] int32, from _fields
    LAYOUT: gl.constexpr,
):
    """[T] fp32, as rows of a tile."""
    low = pairs.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    high = (pairs >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    rows = gl.reshape(gl.permute(gl.join(low, high), (0, 2, 1)), (_T,))
    return gl.convert_layout(rows, LAYOUT, assert_trivial=True)


@gluon.jit
def _groups(
    token,  # first of a tile
    last,  # [groups], first tokens of the last that may be read
):
    """First tokens of a tile's groups, [groups, 1]."""
    return gl.expand_dims(gl.minimum(token + 16 * gl.arange(0, _GROUPS, gl.SliceLayout(1, _PAIRS)), last), 1)


@gluon.jit
def _within(
    groups,  # [groups, 1]
    BLOCK_SIZE: gl.constexpr,
):
    """Numbers of their first tokens in their blocks."""
    if BLOCK_SIZE == 16:
        within = gl.zeros_like(groups)
    else:
        within = groups % BLOCK_SIZE
    return within


@gluon.jit
def _page_ptr(
    table_ptr,
    groups,  # [groups, 1]
    BLOCK_SIZE: gl.constexpr,
):
    """Where their page ids are, [groups, 8 pairs]."""
    return table_ptr + (groups // BLOCK_SIZE + gl.zeros((_GROUPS, 8), gl.int32, _PAIRS))


@gluon.jit
def _words(
    rows,  # [T, 16] int32
):
    """The four words of each lane, tiles of _WORDS."""
    even, odd = gl.split(gl.reshape(rows, (_GROUPS, 16, 4, 2, 2)))
    w0, w2 = gl.split(even)
    w1, w3 = gl.split(odd)
    return (
        gl.convert_layout(w0, _WORDS, assert_trivial=True),
        gl.convert_layout(w1, _WORDS, assert_trivial=True),
        gl.convert_layout(w2, _WORDS, assert_trivial=True),
        gl.convert_layout(w3, _WORDS, assert_trivial=True),
    )


@gluon.jit
def _fine_bytes(
    word,  # int32: eight 4-bit codes
    t0,  # bytes 0 to 3 of a table of sixteen, all below 128
    t1,
    t2,
    t3,
):
    """Their bytes in the table, in the order of memory. A selector above 7 replicates a sign: it gives 0."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 up, flip, flipped, a, b, c, d;
        shr.u32 up, $2, 16;
        xor.b32 flip, $2, 0x88888888;
        shr.u32 flipped, flip, 16;
        prmt.b32 a, $3, $4, $2;
        prmt.b32 b, $3, $4, up;
        prmt.b32 c, $5, $6, flip;
        prmt.b32 d, $5, $6, flipped;
        or.b32 $0, a, c;
        or.b32 $1, b, d;
        }""",
        "=r,=r,r,r,r,r,r",
        [word, t0, t1, t2, t3],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _unit(
    words,  # two tiles of _WORDS: the eight bytes of eight codes
):
    """[groups, 16, 4, byte bit 1, byte bit 0, word]."""
    a0, a1, a2, a3 = quarters(words[0])
    b0, b1, b2, b3 = quarters(words[1])
    return gl.join(
        gl.join(gl.join(a0, a2), gl.join(a1, a3)),
        gl.join(gl.join(b0, b2), gl.join(b1, b3)),
    )


@gluon.jit
def _key_operand(
    u0,  # of each word of a lane the two words of bytes
    u1,
    u2,
    u3,
    LAYOUT: gl.constexpr,
):
    """[T, 128] int8: column = unit * 32 + word * 16 + lane * 4 + byte."""
    x = gl.join(gl.join(_unit(u0), _unit(u2)), gl.join(_unit(u1), _unit(u3)))
    x = gl.permute(x, (0, 1, 6, 7, 5, 2, 3, 4))
    return gl.convert_layout(gl.reshape(x, (_T, _D)), LAYOUT, assert_trivial=True)


@gluon.jit
def _value_operand(
    halfwords,  # [T, 32] int16 of _VALUES: four codes each
    LAYOUT: gl.constexpr,
):
    """[128, T] fp16 of code - 8: row = code bit 1, bits 4 and 3 of the halfword's number, code bit 0, bits 2 to 0.

    0x6400 | n is the fp16 number 1024 + n; a code four bits further up makes it 16 times as far from 1024.
    """
    c0, c1, c2, c3 = gl.inline_asm_elementwise(
        """{
        .reg .b32 up, a, b, c, d, away, away16, part;
        mov.b32 away, 0xE408E408;
        mov.b32 away16, 0xD480D480;
        mov.b32 part, 0x2C002C00;
        shr.u32 up, $4, 8;
        lop3.b32 a, $4, 0x000F000F, 0x64006400, 0xEA;
        lop3.b32 b, $4, 0x00F000F0, 0x64006400, 0xEA;
        lop3.b32 c, up, 0x000F000F, 0x64006400, 0xEA;
        lop3.b32 d, up, 0x00F000F0, 0x64006400, 0xEA;
        add.f16x2 $0, a, away;
        fma.rn.f16x2 $1, b, part, away16;
        add.f16x2 $2, c, away;
        fma.rn.f16x2 $3, d, part, away16;
        }""",  # -1032; -72 = -(1024 / 16 + 8); 1 / 16
        "=r,=r,=r,=r,r",
        [halfwords],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )
    x = gl.join(gl.join(c0, c2), gl.join(c1, c3))  # [T, 32, code bit 1, code bit 0]
    x = gl.permute(gl.reshape(x, (_T, 4, 8, 2, 2)), (3, 1, 4, 2, 0))
    return gl.convert_layout(gl.reshape(x, (_D, _T)), LAYOUT, assert_trivial=True)


@gluon.jit
def _half(
    x,  # fp32, an even number of neighbours in each lane
):
    """fp16, two numbers in one instruction."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def _thread_max(
    x,  # [T, N]
    N: gl.constexpr,
):
    """The largest number of each thread. No exchange."""
    x = gl.reshape(x, (4, 2, 8, N // 8, 4, 2))
    x = gl.max(gl.max(gl.max(x, 5), 3), 1)
    return gl.convert_layout(x, _THREADS, assert_trivial=True)


@gluon.jit
def _add_rows(
    sums,  # [32 threads of a column, N]
    x,  # [T, N]
    N: gl.constexpr,
):
    """``sums`` and the rows of each thread. No exchange."""
    low, high = gl.split(gl.permute(gl.reshape(x, (4, 2, 8, N)), (0, 2, 3, 1)))
    sums += gl.convert_layout(gl.reshape(low, (32, N)), _sums_layout(N), assert_trivial=True)
    sums += gl.convert_layout(gl.reshape(high, (32, N)), _sums_layout(N), assert_trivial=True)
    return sums


@gluon.jit
def _read_queries(
    row_ptr,  # [N, 1] pointers to int8, rows of prepare.py
    place,  # [128] which number of a row
    read_live,  # [N, 1]
    query_scale_ptr,  # [N * Hq] fp32
    row,  # [N]
    live,  # [N]
):
    """Upper and lower numbers of the columns' queries, [N, 128] each, and their scales [N]."""
    upper = gl.load(row_ptr + place[None, :], read_live, 0)
    lower = gl.load(row_ptr + _D + place[None, :], read_live, 0)
    return upper, lower, gl.load(query_scale_ptr + row, live, 0.0)


@gluon.jit
def _made_here(
    x,  # int32
):
    """x. A constant would be put into its register where it is used: behind the fence that products begin with."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _some_row(
    x,  # [T, N]
    N: gl.constexpr,
):
    """One of the rows of each thread, [32 threads of a column, N]. No exchange."""
    low, _ = gl.split(gl.permute(gl.reshape(x, (4, 2, 8, N)), (0, 2, 3, 1)))
    return gl.convert_layout(gl.reshape(low, (32, N)), _sums_layout(N), assert_trivial=True)


_ARGUMENT_NAMES = (
    "scale_log2", "window", "soft_cap", "splits", "table_stride", "out_token_stride", "out_head_stride",
    "lse_token_stride", "lse_head_stride", "min_tiles", "pieces", "most_queries", "skew", "batch",
    "query_token_stride", "query_head_stride",
)  # fmt: skip


@gluon.jit(
    do_not_specialize=_ARGUMENT_NAMES,
    do_not_specialize_on_alignment=(
        "cache_ptr", "table_ptr", "seq_lens_ptr", "query_start_ptr", "schedule_ptr", "sinks_ptr", "out_ptr", "lse_ptr",
    ),
)  # fmt: skip
def wide_kernel(
    query_ptr,  # [N * Hq, 2, 128] int8, from prepare.py
    query_scale_ptr,  # [N * Hq] fp32
    cache_ptr,  # [nb, bs, Hk, slot_stride] uint8, at a multiple of 16 bytes
    table_ptr,  # [B, M] int32
    seq_lens_ptr,  # [B] int32
    query_start_ptr,  # [B + 1] int32; not read unless MULTI
    schedule_ptr,  # [4 P + 2 B] int32; not read unless CUT
    sinks_ptr,  # [Hq] fp32; not read unless SINKS and DIRECT
    tables_ptr,  # [4, 4] int32, the bytes of the table four times over
    out_ptr,  # DIRECT: [N, Hq, Dv]; else partial results [N * Hq, S, 64] int32, pairs; with CUT [P, Q, Hq, 64]
    lse_ptr,  # DIRECT: [N, Hq] fp32 natural logarithm; else [N * Hq, S, 2] fp32, lse and scale; with CUT [P, Q, Hq, 2]
    table_stride,
    out_token_stride,  # DIRECT only
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    scale_log2,  # as decode.py has this and what follows; batch and the strides of queries are not used
    soft_cap,
    window,
    splits,  # S
    min_tiles,
    pieces,  # P
    most_queries,  # Q
    skew,
    batch,
    query_token_stride,
    query_head_stride,
    HQ: gl.constexpr,
    HK: gl.constexpr,
    G: gl.constexpr,  # Hq / Hk
    N: gl.constexpr,  # columns of a tile
    KEY_DATA: gl.constexpr,  # (base, token stride, head stride, block stride), bytes
    VALUE_DATA: gl.constexpr,
    KEY_NORM: gl.constexpr,
    VALUE_SCALE: gl.constexpr,
    VALUE_ZERO: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BASE: gl.constexpr,  # of queries and numbers of keys, see tile.ByteTable
    BYTE_OFFSETS: gl.constexpr,  # what the numbers of a centroid leave out: (for upper, for lower)
    KWIDTH: gl.constexpr,  # 4 or 8: in which order prepare.py wrote the codes of a lane
    MULTI: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    SINKS: gl.constexpr,
    DIRECT: gl.constexpr,
    WRITE_LSE: gl.constexpr,
    PDL: gl.constexpr,
    CUT: gl.constexpr,
    CLASSES: gl.constexpr,
):
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    KEYS: gl.constexpr = gl.DotOperandLayout(0, SCORES, 4)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    OUT_COLUMN: gl.constexpr = gl.SliceLayout(0, OUT)
    SUMS: gl.constexpr = _sums_layout(N)

    head = gl.program_id(0) % HK
    first_column = (gl.program_id(0) // HK) * N
    first_query = first_column // G
    if CUT:
        if PDL:  # prepare wrote the schedule
            gdc_wait()
        part = piece_taken(gl.program_id(1), gl.num_programs(1), CLASSES)
        if CLASSES > 1:
            if part >= pieces:
                return
        sequence, split, seq_len, tiles_per_split = piece_of(schedule_ptr, part)
        if sequence < 0:
            return
    else:
        split = gl.program_id(1)
        part = split
        sequence = gl.program_id(2)
        seq_len = gl.load(seq_lens_ptr + sequence)
        tiles_per_split = 0  # follows from what the columns see
    if MULTI:
        query_base = gl.load(query_start_ptr + sequence)
        query_len = gl.load(query_start_ptr + sequence + 1) - query_base
    else:
        query_base = sequence
        query_len = 1
    if first_query >= query_len:
        if PDL and not CUT:
            gdc_wait()  # a kernel that waits for this one has waited for prepare
        return

    column = first_column + gl.arange(0, N, COLUMN)
    query = column // G
    live = query < query_len
    q_head = head * G + column % G
    row = (query_base + query).to(gl.int64) * HQ + q_head
    high = gl.where(live, seq_len - query_len + query + 1, 0)  # [N] past the last key of each column
    last_query = gl.minimum((first_column + N - 1) // G, query_len - 1)
    begin, end, start, last_group, tiles = tokens_seen(
        seq_len, query_len, first_query, last_query, window, _T, WINDOW
    )
    whole_low = 0  # every column sees the tokens from here to whole_high
    whole_high = gl.maximum(seq_len - query_len + first_query + 1, 0)
    if WINDOW:
        whole_low = gl.maximum(seq_len - query_len + last_query + 1 - window, 0)
    tile_low, tile_high = tiles_taken(
        split,
        part,
        splits,
        tiles_per_split,
        min_tiles,
        seq_len,
        tiles,
        window,
        skew,
        _T,
        MULTI,
        WINDOW,
        CUT,
        CLASSES,
    )
    if DIRECT:
        where = row.to(gl.int32)
    elif CUT and MULTI:
        where = (part * most_queries + query) * HQ + q_head
    elif CUT:
        where = part * HQ + q_head
    else:
        where = row.to(gl.int32) * splits + part
    if not DIRECT:
        if tile_low >= tile_high:
            if PDL and not CUT:
                gdc_wait()
            gl.store(lse_ptr + 2 * where.to(gl.int64), float("-inf"), live)
            return
    some = tile_low < tile_high

    # ---- where each lane's bytes are, from the start of a block; of the first token of a group
    key_row = gl.arange(0, _T, gl.SliceLayout(1, _KEY_COPY))
    key_at = KEY_DATA[0] + head * KEY_DATA[2] + (key_row % 8 * (2 * KEY_DATA[1]))[:, None]
    key_at += (gl.arange(0, 16, gl.SliceLayout(0, _KEY_COPY)) * 4)[None, :]
    value_row = gl.arange(0, _T, gl.SliceLayout(1, _VALUE_COPY))
    value_at = VALUE_DATA[0] + head * VALUE_DATA[2] + (value_row % 8 * (2 * VALUE_DATA[1]))[:, None]
    value_at += (gl.arange(0, 32, gl.SliceLayout(0, _VALUE_COPY)) * 2)[None, :]
    # norm, scale, zero; in place of the last, _copy_fields sends for a page id
    field = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, _THREADS)))
    field_at = gl.where(field == 0, KEY_NORM[0] + head * KEY_NORM[2], VALUE_ZERO[0] + head * VALUE_ZERO[2])
    field_at = gl.where(field == 1, VALUE_SCALE[0] + head * VALUE_SCALE[2], field_at)[None, None, :]
    field_at += (4 * gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, _THREADS))))[None, :, None]
    field_at += gl.zeros((_GROUPS, 8, 4), gl.int32, _THREADS)

    keys = gl.allocate_shared_memory(gl.int32, [_STAGES, _T, 16], gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))
    values = gl.allocate_shared_memory(gl.int16, [_STAGES, _T, 32], gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
    fields = gl.allocate_shared_memory(
        gl.int32, [_STAGES, _T // 2, 4], gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    )

    table_ptr += sequence.to(gl.int64) * table_stride
    first_token = start + tile_low * _T
    last_token = start + (tile_high - 1) * _T  # of the last tile

    # ---- queries, in the order in which _key_operand has the codes; lower comes from prepare.py in that of code bytes
    READ: gl.constexpr = _read_layout(N)
    query_column = first_column + gl.arange(0, N, gl.SliceLayout(1, READ))
    query_row = (query_base + query_column // G).to(gl.int64) * HQ + head * G + query_column % G
    read_live = (query_column // G < query_len)[:, None]
    k = gl.arange(0, _D, gl.SliceLayout(0, READ))
    if KWIDTH == 8:  # the two words of a lane side by side
        place = k // 32 * 32 + k // 4 % 4 * 8 + k // 16 % 2 * 4 + k % 4
    else:
        gl.static_assert(KWIDTH == 4)
        place = k
    place = gl.max_contiguous(gl.multiple_of(place, 4), 4)
    row_ptr = query_ptr.to(gl.pointer_type(gl.int8)) + query_row[:, None] * (2 * _D)
    if CUT:  # prepare has ended: ahead of the copies, which would wait for page ids first
        upper_read, lower_read, query_scale = _read_queries(
            row_ptr, place, read_live, query_scale_ptr, row, live
        )

    # ---- the first two tiles
    last = gl.minimum(last_token + 16 * gl.arange(0, _GROUPS, gl.SliceLayout(1, _PAIRS)), last_group)
    for i in gl.static_range(2):
        groups = _groups(first_token + i * _T, last)
        pages = gl.load(_page_ptr(table_ptr, groups, BLOCK_SIZE), some, 0)
        within = gl.where(some, _within(groups, BLOCK_SIZE), 0)
        page_ptr = _page_ptr(table_ptr, _groups(first_token + (i + 2) * _T, last), BLOCK_SIZE)
        _send(
            cache_ptr, pages, within, page_ptr, some, key_at, value_at, field_at, keys, values, fields, i,
            KEY_DATA, VALUE_DATA,
        )  # fmt: skip

    if not CUT:
        if PDL:  # up to here nothing depends on the kernel before this one; it wrote the queries
            gdc_wait()
        upper_read, lower_read, query_scale = _read_queries(
            row_ptr, place, read_live, query_scale_ptr, row, live
        )
    factor = query_scale * scale_log2
    QUERIES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    upper = gl.allocate_shared_memory(gl.int8, [N, _D], QUERIES, upper_read)
    lower = gl.allocate_shared_memory(gl.int8, [N, _D], QUERIES, lower_read)
    coarse = gl.allocate_shared_memory(gl.int8, [N, _D], QUERIES, _code_order(upper_read, N))
    # P, of a tile. Here, so that it lies where no other operand does: where it had an earlier one's place, ptxas of
    # CUDA 12.8 made its descriptor from a register that it had not set.
    weights = gl.allocate_shared_memory(gl.float16, [_T, N], gl.NVMMASharedLayout(2 * N, 16, 2))
    # Sums of queries, the same in all rows. Of copies: with descriptors in common, those of the loop would be kept in
    # registers that are not uniform.
    upper_too = gl.allocate_shared_memory(gl.int8, [N, _D], QUERIES, upper_read)
    lower_too = gl.allocate_shared_memory(gl.int8, [N, _D], QUERIES, lower_read)
    fence_async_shared()
    one = _made_here(gl.full((_GROUPS, 16, 4), 0x01010101, gl.int32, _WORDS))
    ones = _key_operand((one, one), (one, one), (one, one), (one, one), KEYS)
    upper_sums = gl.zeros((_T, N), gl.int32, SCORES)
    lower_sums = gl.zeros((_T, N), gl.int32, SCORES)
    upper_sums = warpgroup_mma(ones, upper_too.permute((1, 0)), upper_sums)
    lower_sums = warpgroup_mma(ones, lower_too.permute((1, 0)), lower_sums)
    left_out = upper_sums.to(gl.float32) * BYTE_OFFSETS[0] + lower_sums.to(gl.float32) * BYTE_OFFSETS[1]

    # What is one number per column lies in shared memory: registers are what this kernel is short of.
    column_scale = gl.allocate_shared_memory(gl.float32, [N], _FLAT, factor)
    offsets = _some_row(left_out * factor[None, :], N)  # equal rows, of which one is read
    column_offset = gl.allocate_shared_memory(gl.float32, [32, N], _PLAIN, offsets).slice(0, 1)
    column_high = gl.allocate_shared_memory(gl.int32, [N], _FLAT, high)
    column_where = gl.allocate_shared_memory(gl.int32, [N], _FLAT, gl.where(live, where, -1))
    flags = gl.allocate_shared_memory(gl.int32, [4], _FLAT)
    column_reference = gl.allocate_shared_memory(
        gl.float32, [N], _FLAT, gl.full((N,), _LOWEST, gl.float32, COLUMN)
    )
    table_lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, _WORDS)))
    t0 = gl.load(tables_ptr + table_lane)[None, None, :]
    t1 = gl.load(tables_ptr + 4 + table_lane)[None, None, :]
    t2 = gl.load(tables_ptr + 8 + table_lane)[None, None, :]
    t3 = gl.load(tables_ptr + 12 + table_lane)[None, None, :]

    acc = gl.zeros((_D, N), gl.float32, OUT)
    weight = gl.zeros((32, N), gl.float32, SUMS)  # sum of P
    offset = gl.zeros((32, N), gl.float32, SUMS)  # sum of P * middle value
    scale_top = gl.to_tensor(0)  # value scales are below 2^(scale_top - 14)
    stage = gl.to_tensor(0)

    for token in range(first_token, last_token + _T, _T):
        async_copy.wait_group(1)
        w0, w1, w2, w3 = _words(keys.index(stage).load(_KEY_COPY))
        fine = _key_operand(
            _fine_bytes(w0, t0, t1, t2, t3),
            _fine_bytes(w1, t0, t1, t2, t3),
            _fine_bytes(w2, t0, t1, t2, t3),
            _fine_bytes(w3, t0, t1, t2, t3),
            KEYS,
        )
        by_upper = gl.zeros((_T, N), gl.int32, SCORES)
        rest = gl.zeros((_T, N), gl.int32, SCORES)  # 1 / BASE of these: lower * codes, upper * fine
        rest = warpgroup_mma(fine, upper.permute((1, 0)), rest, is_async=True)
        codes = _key_operand(
            nibbles(w0, "cuda"), nibbles(w1, "cuda"), nibbles(w2, "cuda"), nibbles(w3, "cuda"), KEYS
        )
        by_upper = warpgroup_mma(codes, coarse.permute((1, 0)), by_upper, is_async=True)
        rest = warpgroup_mma(codes, lower.permute((1, 0)), rest, is_async=True)
        by_upper, rest = warpgroup_mma_wait(0, deps=(by_upper, rest))
        scores = (by_upper * BASE + rest).to(gl.float32) * column_scale.load(COLUMN)[None, :]
        scores += column_offset.load(SCORES)
        norm_now, scale_now, zero_now, pages = _fields(fields.index(stage).load(_FIELDS))
        norm = _rows(norm_now, ROW)
        v_scale = _rows(scale_now, ROW)
        v_zero = _rows(zero_now, ROW)
        top = gl.maximum((scale_now >> 10) & 31, (scale_now >> 26) & 31)  # exponents of scales
        if SOFT_CAP:  # cap * tanh(s / cap), then base 2; of tokens that no column sees anything
            grown = gl.exp2(scores * norm[:, None] * ((1.0 / soft_cap) * (2.0 * _LOG2E)))
            scores = (1.0 - 2.0 / (1.0 + grown)) * (soft_cap * _LOG2E)
            norm = gl.full((_T,), 1.0, gl.float32, ROW)
        if (token < whole_low) | (token + _T > whole_high):
            # Some column does not see some token. Norms, scales and zeros of those that none sees may be anything.
            r = gl.arange(0, _T, ROW)
            position = token + r // 16 * 16 + _token(r)
            inside = (position >= begin) & (position < end)
            past = column_high.load(COLUMN)
            visible = position[:, None] < past[None, :]
            if WINDOW:
                visible &= position[:, None] >= (past - window)[None, :]
            # with the norm before the mask: one that is 0 would make a number that is none of minus infinity
            scores = gl.where(visible, scores * norm[:, None], float("-inf"))
            norm = gl.full((_T,), 1.0, gl.float32, ROW)
            v_scale = gl.where(inside, v_scale, 0.0)
            v_zero = gl.where(inside, v_zero, 0.0)
            even = token + 16 * gl.arange(0, _GROUPS, gl.SliceLayout(1, _PAIRS))[:, None]
            even += 2 * gl.arange(0, 8, gl.SliceLayout(0, _PAIRS))[None, :]
            low = gl.where((even >= begin) & (even < end), (scale_now >> 10) & 31, 0)
            top = gl.maximum(low, gl.where((even + 1 >= begin) & (even + 1 < end), (scale_now >> 26) & 31, 0))

        reference = column_reference.load(COLUMN)
        scores *= norm[:, None]
        above = scores - reference[None, :]
        over = _thread_max(above, N) > _SLACK
        larger = gl.convert_layout(top > scale_top, gl.SliceLayout(2, _THREADS), assert_trivial=True)
        flag = gl.maximum(over.to(gl.int32), larger.to(gl.int32)[:, :, None])
        flags.store(gl.convert_layout(gl.max(gl.reshape(flag, (4, 32)), 1), _OF_WARP, assert_trivial=True))
        p = gl.exp2(above)
        weights.store(_half(p * (v_scale * power_of_2(-scale_top + (_P_LOG2 + 14)))[:, None]))
        fence_async_shared()
        v_middle = v_zero + v_scale * 8.0
        left = _value_operand(values.index(stage).load(_VALUES), LEFT)

        # Codes of the tile after next, where all warps have read those of the tile before this one.
        flagged = gl.max(flags.load(_OF_ALL), 0)
        free = gl.where(stage == 0, _STAGES - 1, stage - 1)
        within = _within(_groups(token + 2 * _T, last), BLOCK_SIZE)
        page_ptr = _page_ptr(table_ptr, _groups(token + 4 * _T, last), BLOCK_SIZE)
        _send(
            cache_ptr, pages, within, page_ptr, True, key_at, value_at, field_at, keys, values, fields, free,
            KEY_DATA, VALUE_DATA,
        )  # fmt: skip

        if flagged > 0:
            new_reference = gl.maximum(reference, gl.max(scores, 0))
            new_top = gl.maximum(scale_top, gl.max(gl.max(top, 0), 0) + 1)
            alpha = gl.exp2(reference - new_reference)
            for_sums = gl.convert_layout(alpha, gl.SliceLayout(0, SUMS), assert_trivial=True)[None, :]
            p = gl.exp2(scores - new_reference[None, :])
            weight *= for_sums
            offset *= for_sums
            shrink = gl.convert_layout(alpha, OUT_COLUMN, assert_trivial=True)
            acc *= (shrink * power_of_2(scale_top - new_top))[None, :]
            column_reference.store(new_reference)
            scale_top = new_top
            weights.store(_half(p * (v_scale * power_of_2(-scale_top + (_P_LOG2 + 14)))[:, None]))
            fence_async_shared()
            _barrier()
        acc = warpgroup_mma(left, weights, acc, is_async=True)
        weight = _add_rows(weight, p, N)
        offset = _add_rows(offset, p * v_middle[:, None], N)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        stage = gl.where(stage == _STAGES - 1, 0, stage + 1)
    async_copy.wait_group(0)

    if PDL and not DIRECT:
        gdc_launch_dependents()
    # A lane has one column here, all four warps the same.
    COLUMNS_OF: gl.constexpr = _columns_layout(N)
    LANE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, COLUMNS_OF))
    TOPS_OF: gl.constexpr = gl.SliceLayout(2, COLUMNS_OF)
    sums = gl.allocate_shared_memory(gl.float32, [32, N, 2], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    tops = gl.allocate_shared_memory(gl.float32, [32, N], _PLAIN)
    sums.store(gl.join(weight, offset))
    if not DIRECT:
        # of each thread and column; rows of the accumulator are b, w, h, g of _value_operand
        top = gl.max(gl.max(gl.abs(gl.reshape(acc, (2, 4, 2, 8, N))), 2), 0)
        tops.store(gl.convert_layout(gl.reshape(top, (32, N)), SUMS, assert_trivial=True))
    total_weight, total_offset = gl.split(gl.sum(sums.load(COLUMNS_OF), 0))
    total_weight = gl.convert_layout(total_weight, LANE, assert_trivial=True)
    total_offset = gl.convert_layout(total_offset, LANE, assert_trivial=True)
    reference = column_reference.load(LANE)
    to_row = column_where.load(LANE)
    live = to_row >= 0
    seen = total_weight > 0.0
    if SINKS and DIRECT:
        sink = gl.load(sinks_ptr + to_row % HQ, live, float("-inf")).to(gl.float32) * _LOG2E
        joint = gl.where(seen, gl.maximum(reference, sink), 0.0)
        less = gl.exp2(reference - joint)
        lse = joint + gl.log2(total_weight * less + gl.exp2(sink - joint))
        norm_out = less / (total_weight * less + gl.exp2(sink - joint))
    else:
        lse = reference + gl.log2(total_weight)
        norm_out = 1.0 / total_weight
    norm_out = gl.where(seen, norm_out, 0.0)
    lse = gl.where(seen, lse, float("-inf"))
    back = norm_out * power_of_2(scale_top - (_P_LOG2 + 14))
    shift = total_offset * norm_out
    if DIRECT:
        if WRITE_LSE:
            at = (to_row // HQ).to(gl.int64) * lse_token_stride + to_row % HQ * lse_head_stride
            gl.store(lse_ptr + at, lse * _LN2, live)
    else:
        bound = gl.convert_layout(gl.max(tops.load(TOPS_OF), 0), LANE) * back + gl.abs(shift)
        to_half, from_half = fp16_range(bound.to(gl.int32, bitcast=True), _PART_TOP)
        back *= to_half
        shift *= to_half
        at = lse_ptr + 2 * to_row.to(gl.int64)
        gl.store(at, lse, live)
        gl.store(at + 1, from_half, live)

    column_scale.store(back)
    column_reference.store(shift)
    result = acc * column_scale.load(OUT_COLUMN)[None, :] + column_reference.load(OUT_COLUMN)[None, :]
    # rows are b, w, h, g of _value_operand; dim (8 w + g) * 4 + 2 b + h
    RESULT: gl.constexpr = _result_layout(N)
    result = gl.reshape(gl.permute(gl.reshape(result, (2, 4, 2, 8, N)), (1, 3, 0, 2, 4)), (32, 4, N))
    result = gl.convert_layout(result, RESULT, assert_trivial=True)
    four = gl.arange(0, 32, gl.SliceLayout(1, gl.SliceLayout(2, RESULT)))[:, None, None] * 4
    dim = four + gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, RESULT)))[None, :, None]
    out_row = column_where.load(gl.SliceLayout(0, gl.SliceLayout(1, RESULT)))[None, None, :]
    if DIRECT:
        at = (out_row // HQ).to(gl.int64) * out_token_stride + out_row % HQ * out_head_stride
        gl.store(out_ptr + at + dim, result.to(out_ptr.dtype.element_ty), out_row >= 0)
    else:
        at = out_ptr.to(gl.pointer_type(gl.float16)) + out_row.to(gl.int64) * _D + dim
        at = gl.max_contiguous(gl.multiple_of(at, [1, 8, 1]), [1, 4, 1])
        gl.store(at, _half(result), out_row >= 0)
