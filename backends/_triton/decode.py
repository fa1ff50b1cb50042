"""Paged decode over SoA and AoS caches: one kernel, told apart only by the integers of the layout.

Work. One program per (column tile, KV head, split, sequence). The columns of a KV head are its query heads, query
token after query token; a tile is N of them, the small side of both products. The tokens of a program are the tiles
of one split of the sequence. Keys and values are read and decoded once for all columns of the tile.

Tile of T tokens, all in registers of one warp or wave:

* K words: a lane owns a quarter of the codes of some tokens, read in vectors of up to 16 bytes. Decoded they are the
  left operand [T, k] of the score product without passing through shared memory: the lanes of the load are the lanes
  of the operand, and the dims of the query are permuted (prepare.py, queries.py) to the order in which codes come out.
* S[T, N] = sum over units of K_u[T, k] Q_u[k, N], fp32. The key norm, or the norm correction, multiplies S once per
  token; scale, log2(e) and the query's own exponent multiply it once per column.
* P[T, N] = exp2(S - max) in fp32; then fp16(P * value scale * r) for the value product, where r = 2^14 / (power of two
  above the largest value scale so far) keeps it a normal fp16 number whatever the scales are.
* V words: a lane owns some codes of pairs of neighbouring tokens. Decoded as code - middle they are the left operand
  [rows, T] of O[rows, N] += V[rows, T] P[T, N]; the middle values (zero + middle * scale) are one row sum in fp32,
  added to the accumulator at the end. Centred codes matter: matrix units truncate their sums, and an offset as large
  as the 1024 of the conversion trick would turn that into a bias of percents on long contexts. Rows are dims in the
  order in which codes come out, put back by the final store.
  With BARE_VALUES the operand is the codes' bits, read as denormal fp16 numbers: no multiply-add per pair. What centres
  them is one more product per tile, of -middle and P, added with the scaling of the accumulator; so what accumulates
  over a sequence is centred as before. The steps of 2^-24 and of codes inside a word are undone per row at the end.

With LAZY (NVIDIA, some presets and head sizes) "max" is a reference that moves only where P would exceed 2^SLACK, or a
value scale is too large: rare after the first tile. Otherwise nothing is scaled and no maximum is exchanged, and what
centres bare values has an accumulator of its own, which is added to the others every FLUSH tiles. That is 8 to 12 % of
the instructions, for a branch in the middle of the loop that the compiler moves nothing across.

Two routes for the keys. fp16: codes become the numbers of an fp16 codebook. Bytes (PLANES > 0, where norms need no
correction): codes become int8 numbers, 7 or 8 bits at a time ("planes", tile.byte_table), the query two int8 numbers,
and the products are exact integers. A byte permute gives four of them at once and nothing has to be interleaved; the
two halves of a 16-entry codebook are looked up apart, each giving 0 for the codes of the other, and the matrix unit
adds them up. Planes leave an offset out, which is one number per column: it is added with the scale.

One plane of 4 bits says what the codes, as numbers, are off the codebook; the codes themselves need no look-up. Two
masks make bytes of them, of those with even and of those with odd places, so they want the query in that order, and
the plane wants it in the order of memory. Of the query's two numbers the upper is held in both.

Nothing is multiplied per element. Budget of integer instructions per element: K 1.4 (4-bit, two planes), 1.25 (4-bit,
one plane), 1.1 (3-bit, one plane), fp16 route 2.1 to 2.4, FP8 0.5 with the instruction and 2 without; V 0.8 and half a
multiply-add; an eighth to a half of a matrix instruction.

What moves when. With PREFETCH keys, values and page ids of the next tile are read together as soon as this tile's key
words have been decoded and its value words have changed into halfwords, so into the same registers: in flight for more
than half a tile's time. Together, because NVIDIA's compiler counts all reads of a loop on one scoreboard: a wait for
the first is a wait for the last. Groups of 16 tokens never cross a block, so a tile needs T / 16 scalar page ids, and
an address is a pointer per group plus lane offsets that do not change. A group is read if it holds a visible token;
words of its other slots may be anything, which is harmless because every code decodes to a finite number (or, where
FP8 is unpacked by an instruction, to a NaN that the mask replaces), and their norm, scale and zero are not loaded
(masked, 0). So nothing that was never stored can reach the result. Tiles outside the window or past the sequence are
never touched.

Row j of a sequence with q query tokens sees keys [max(0, h - window), h), h = seq_len - q + j + 1.

Splits leave partial results: fp16 numbers, multiplied by a power of two that lets what no number of the column exceeds
lie in [2^14, 2^15), and beside them the column's lse and the inverse of that power. reduce.py joins them. That is the
column's largest sum of centred values and its mean of middle values, added up. A bound from the largest value scale
would need no maximum, but lets a value far above the others, which the column does not see, take bits from its numbers.

With CUT the programs are (column tile, KV head, piece): the batch is cut into pieces by the lengths of its sequences
(schedule.py), and a program finds out from the schedule, if there is one, which sequence its piece is of. Pieces are of
one size, or come in CLASSES sizes of which the largest run first.

With ALONE nothing was launched before. A program reads the rows of its columns with its page ids, sends for its
first codes, and rotates the rows meanwhile (queries.py); with CUT it first works out its piece from the lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import (
    centroid_pairs3,
    centroid_pairs4,
    fp8_pairs,
    fp8_unpack,
    fp16_pair,
    fp16_range,
    funnel,
    gdc_launch_dependents,
    gdc_wait,
    halves,
    nibble_order,
    nibbles,
    power_of_2,
    quarters,
    read_words,
    spread3,
    table_bytes,
    value_pairs,
    value_steps,
    value_words,
)
from .queries import read_alone, rotate_alone
from .schedule import piece_alone, piece_of, piece_taken, tiles_taken, tokens_seen

__all__ = ["decode_kernel"]

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_P_LOG2 = tl.constexpr(14)  # log2 of where fp16(P * scale * r) ends
_SLACK = tl.constexpr(4)  # LAZY: log2 of how far P may exceed 1
_FLUSH = tl.constexpr(32)  # LAZY: tiles; a power of two
_LOWEST = tl.constexpr(-3e38)  # LAZY: a reference before there is one
_PART_TOP = tl.constexpr(14)  # log2 of where the bound of a partial result's numbers begins
_CENTROID_EPS = tl.constexpr(1e-16)


@triton.constexpr_function
def _at(dimension, a, b, c, size_a, size_b, size_c):
    """Size of ``dimension``, where dimensions a, b and c have the sizes given."""
    return {a: size_a, b: size_b, c: size_c}[dimension]


@triton.jit
def _slice(
    values,  # tuple
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
):
    """values[FIRST : FIRST + COUNT]."""
    out = ()
    for i in tl.static_range(COUNT):
        out = out + (values[FIRST + i],)
    return out


@triton.jit
def _count_along(
    DIMENSION: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
):
    """0, 1, 2 ... along one dimension of a tile [A, B, C], int32."""
    if DIMENSION == 0:
        out = tl.arange(0, A)[:, None, None]
    elif DIMENSION == 1:
        out = tl.arange(0, B)[None, :, None]
    else:
        out = tl.arange(0, C)[None, None, :]
    return out + tl.zeros((A, B, C), tl.int32)


@triton.jit
def _spread(
    scalars,  # tuple of COUNT scalars: integers or pointers
    index,  # tile, 0 to COUNT - 1
    COUNT: tl.constexpr,
):
    """scalars[index]; where ``index`` is known per register this is free."""
    out = scalars[0] + tl.zeros(index.shape, tl.int32)
    for i in tl.static_range(1, COUNT):
        out = tl.where(index == i, scalars[i] + tl.zeros(index.shape, tl.int32), out)
    return out


@triton.jit
def _split_words(
    words,  # [A, B, C, VEC]
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    VEC: tl.constexpr,
):
    """The VEC words along the last dimension, as a tuple of [A, B, C]."""
    if VEC == 4:
        even, odd = tl.split(tl.reshape(words, (A, B, C, 2, 2)))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        out = (w0, w1, w2, w3)
    else:
        tl.static_assert(VEC == 2)
        w0, w1 = tl.split(words)
        out = (w0, w1)
    return out


@triton.jit
def _load_words(
    at_ptr,  # [A, B, C] pointers to bytes: the rows, or with VEC = 0 the aligned word in which a lane's run begins
    lane,  # [A, B, C] int32, which part of the row
    behind,  # [A, B, C] int32, VEC = 0: bytes from that word to the run, 0 to 3
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,  # RowTile.constants
    TARGET: tl.constexpr,
):
    """The words that hold the codes of each lane: a tuple of int32 tiles [A, B, C], consumed by _units."""
    BITS: tl.constexpr = TILE[0]
    LANES: tl.constexpr = TILE[1]
    UNIT: tl.constexpr = TILE[2]
    UNITS: tl.constexpr = TILE[3]
    VEC: tl.constexpr = TILE[4]
    NBYTES: tl.constexpr = TILE[6]
    out = ()
    if VEC > 0:
        WORDS: tl.constexpr = NBYTES // 4
        for chunk in tl.static_range(UNITS // VEC):
            first = (chunk * LANES + lane) * VEC
            row_ptr = (at_ptr + first * 4).to(tl.pointer_type(tl.int32))
            if TARGET == "cuda":
                out = out + read_words(row_ptr, first < WORDS, VEC, (chunk + 1) * LANES * VEC > WORDS)
            elif VEC == 1:
                at = tl.max_contiguous(row_ptr, (1, 1, 1))  # a word per lane, whoever is next
                if (chunk + 1) * LANES > WORDS:
                    out = out + (tl.load(at, first < WORDS, 0),)
                else:
                    out = out + (tl.load(at),)
            else:
                i = tl.arange(0, VEC)[None, None, None, :]
                at = row_ptr[:, :, :, None] + i
                at = tl.max_contiguous(tl.multiple_of(at, (1, 1, 1, 4 * VEC)), (1, 1, 1, VEC))
                if (chunk + 1) * LANES * VEC > WORDS:
                    words = tl.load(at, (first[:, :, :, None] + i) < WORDS, 0)
                else:
                    words = tl.load(at)
                out = out + _split_words(words, A, B, C, VEC)
    else:
        RUN: tl.constexpr = UNITS * UNIT * BITS // 8  # bytes that a lane owns
        COUNT: tl.constexpr = TILE[7]
        left = tl.minimum(NBYTES - lane * RUN, RUN) + behind  # bytes to the end of the run
        for k in tl.static_range(COUNT):
            at = tl.max_contiguous((at_ptr + 4 * k).to(tl.pointer_type(tl.int32)), (1, 1, 1))
            if TARGET == "cuda":
                out = out + read_words(at, left > 4 * k, 1, NBYTES < RUN * LANES or 4 * k >= RUN)
            elif NBYTES < RUN * LANES or 4 * k >= RUN:
                out = out + (tl.load(at, left > 4 * k, 0),)
            else:
                out = out + (tl.load(at),)
    return out


@triton.jit
def _units(
    words,  # tuple, from _load_words
    behind,  # as there
    TILE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """The units of each lane, a tuple of int32 tiles: eight 4-bit codes, eight 3-bit codes in 24 bits, or 4 bytes."""
    BITS: tl.constexpr = TILE[0]
    UNITS: tl.constexpr = TILE[3]
    VEC: tl.constexpr = TILE[4]
    units = words
    if VEC == 0:
        SLACK: tl.constexpr = TILE[5]
        COUNT: tl.constexpr = TILE[7]
        stream = words
        if SLACK > 0:
            stream = ()
            shift = behind * 8
            for k in tl.static_range(COUNT):
                if k + 1 < COUNT:
                    stream = stream + (funnel(words[k], words[k + 1], shift, TARGET),)
                else:
                    word = words[k].to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)
                    stream = stream + (word.to(tl.int32, bitcast=True),)
        units = ()
        if BITS == 3:
            for u in tl.static_range(UNITS):
                if (24 * u) % 32 == 0:
                    units = units + (stream[24 * u // 32],)
                elif (24 * u) % 32 == 8:
                    units = units + (stream[24 * u // 32] >> 8,)
                elif (24 * u) % 32 == 16:
                    low = (stream[24 * u // 32] >> 16) & 0xFFFF
                    units = units + (low | (stream[24 * u // 32 + 1] << 16),)
                else:
                    low = (stream[24 * u // 32] >> 24) & 0xFF
                    units = units + (low | (stream[24 * u // 32 + 1] << 8),)
        else:
            for u in tl.static_range(UNITS):
                units = units + (stream[u],)
    return units


@triton.jit
def _columns8(
    x,  # [., ., ., index bits 0, 1, 2 of eight columns of a lane]
    KWIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW: tl.constexpr,
    LANE: tl.constexpr,
):
    """Dimensions in the order of rows and columns of an operand whose lanes own KWIDTH consecutive columns."""
    if KWIDTH == 2:
        x = tl.permute(x, (BLOCK, ROW, 5, 4, LANE, 3))
    elif KWIDTH == 4:
        x = tl.permute(x, (BLOCK, ROW, 5, LANE, 4, 3))
    else:
        x = tl.permute(x, (BLOCK, ROW, LANE, 5, 4, 3))
    return x


@triton.jit
def _byte_operand(
    words,  # two words of four int8 numbers, tiles of three dimensions
    T: tl.constexpr,
    KWIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW: tl.constexpr,
    LANE: tl.constexpr,
):
    """[T, 32] int8."""
    a0, a1, a2, a3 = quarters(words[0])
    b0, b1, b2, b3 = quarters(words[1])
    a = tl.join(tl.join(a0, a2), tl.join(a1, a3))
    b = tl.join(tl.join(b0, b2), tl.join(b1, b3))
    x = tl.join(a, b)  # [., ., ., byte bit 1, byte bit 0, word]
    x = tl.permute(x, (0, 1, 2, 4, 3, 5))
    return tl.reshape(_columns8(x, KWIDTH, BLOCK, ROW, LANE), (T, 32))


@triton.jit
def _byte_scores(
    k_units,  # tuple of KUNITS packed units
    queries,  # tuple of KUNITS tuples of [32, N] int8: upper, lower; with CODES upper, lower and upper for the codes
    T: tl.constexpr,
    N: tl.constexpr,
    KUNITS: tl.constexpr,
    BITS: tl.constexpr,
    PLANES: tl.constexpr,
    BASE: tl.constexpr,
    TABLE,  # see tile.ByteTable
    KWIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW: tl.constexpr,
    LANE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Sum of query * (coarse + fine / BASE) over the dims, [T, N] int32, exact but for lower * fine (tile.ByteTable).

    A table of sixteen bytes is looked up as two of eight, each giving 0 where the other has the entry; the matrix
    unit adds them up.
    """
    by_upper = tl.zeros((T, N), tl.int32)
    rest = tl.zeros((T, N), tl.int32)  # 1 / BASE of these: lower * coarse, upper * fine
    HALVES: tl.constexpr = 2 if BITS == 4 else 1
    CODES: tl.constexpr = BITS == 4 and PLANES == 1  # these are the coarse numbers
    FINE: tl.constexpr = 0 if CODES else 2 * HALVES  # first word of the plane of fine numbers
    for u in tl.static_range(KUNITS):
        upper = queries[u][0]
        lower = queries[u][1]
        if CODES:
            keys = _byte_operand(nibbles(k_units[u], TARGET), T, KWIDTH, BLOCK, ROW, LANE)
            by_upper = tl.dot(keys, queries[u][2], by_upper, out_dtype=tl.int32)
            rest = tl.dot(keys, lower, rest, out_dtype=tl.int32)
        if BITS == 4:
            selects = (k_units[u], k_units[u] ^ -0x77777778)
        else:
            selects = (spread3(k_units[u]),)
        for i in tl.static_range(HALVES):
            if not CODES:
                words = table_bytes(selects[i], TABLE[2 * i], TABLE[2 * i + 1], TARGET)
                keys = _byte_operand(words, T, KWIDTH, BLOCK, ROW, LANE)
                by_upper = tl.dot(keys, upper, by_upper, out_dtype=tl.int32)
                rest = tl.dot(keys, lower, rest, out_dtype=tl.int32)
            if CODES or PLANES == 2:
                words = table_bytes(selects[i], TABLE[FINE + 2 * i], TABLE[FINE + 2 * i + 1], TARGET)
                keys = _byte_operand(words, T, KWIDTH, BLOCK, ROW, LANE)
                rest = tl.dot(keys, upper, rest, out_dtype=tl.int32)
    return by_upper * BASE + rest


@triton.jit
def _query_operand(
    at_ptr,  # [N] pointers to fp16
    live,  # [N]
    N: tl.constexpr,
    SPAN: tl.constexpr,
    PIECE: tl.constexpr,  # so many numbers that the lanes of an operand's column own KWIDTH of each
    KWIDTH: tl.constexpr,
):
    """[SPAN, N] fp16, read a piece at a time: then the lanes that read a number are those that own it. Where SPAN is
    less than PIECE, as the compiler likes."""
    if SPAN <= PIECE:
        at = at_ptr[None, :] + tl.arange(0, SPAN)[:, None]
        if SPAN == PIECE:
            at = tl.max_contiguous(tl.multiple_of(at, (2 * KWIDTH, 1)), (KWIDTH, 1))
        out = tl.load(at, live[None, :], 0.0)
    else:
        low = _query_operand(at_ptr, live, N, SPAN // 2, PIECE, KWIDTH)
        high = _query_operand(at_ptr + SPAN // 2, live, N, SPAN // 2, PIECE, KWIDTH)
        out = tl.reshape(tl.permute(tl.join(low, high), (2, 0, 1)), (SPAN, N))
    return out


@triton.jit
def _read_queries(
    query_ptr,  # [N * Hq, KP] fp16, or [N * Hq, 2, KP] int8
    query_scale_ptr,  # [N * Hq] fp32
    row,  # [N]
    live,  # [N]
    N: tl.constexpr,
    KUNITS: tl.constexpr,
    KSPAN: tl.constexpr,
    PLANES: tl.constexpr,
    CODES: tl.constexpr,
    KWIDTH: tl.constexpr,
    TARGET: tl.constexpr,
):
    """The scales of the columns [N] and, per unit, fp16 [KSPAN, N] or a tuple of int8 [KSPAN, N]: upper, lower, and
    with CODES upper again."""
    KP: tl.constexpr = KUNITS * KSPAN
    out = (tl.load(query_scale_ptr + row, live, 0.0),)
    if PLANES > 0:
        k = tl.arange(0, KSPAN)
        for u in tl.static_range(KUNITS):
            at = query_ptr.to(tl.pointer_type(tl.int8)) + row[None, :] * (2 * KP) + (u * KSPAN + k)[:, None]
            at = tl.max_contiguous(tl.multiple_of(at, (KWIDTH, 1)), (KWIDTH, 1))
            parts = (tl.load(at, live[None, :], 0), tl.load(at + KP, live[None, :], 0))
            if CODES:
                # Read again, which volatile makes sure of: from registers the compiler would permute it in every tile.
                # Of 16 columns it shall, as they do not fit.
                parts = parts + (tl.load(at, live[None, :], 0, volatile=N == 8),)
            out = out + (parts,)
    else:
        # NVIDIA operands of twice the usual width (ops.OPERAND_WIDTH): elsewhere the compiler moves nothing by itself
        PIECE: tl.constexpr = 4 * KWIDTH if KWIDTH == 4 and TARGET != "hip" else 2 * KSPAN
        for u in tl.static_range(KUNITS):
            out = out + (_query_operand(query_ptr + row * KP + u * KSPAN, live, N, KSPAN, PIECE, KWIDTH),)
    return out


@triton.jit
def _key_operand(
    unit,  # packed codes, a tile of three dimensions
    T: tl.constexpr,
    BITS: tl.constexpr,
    TABLE,
    KWIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # which dimension counts blocks of rows, rows of a block, lanes of a row
    ROW: tl.constexpr,
    LANE: tl.constexpr,
    FP8_UNPACK: tl.constexpr,
    TARGET: tl.constexpr,
):
    """One unit decoded to the operand [T, k] fp16, k = 32 (or 16 for FP8), columns as in KeyTile.dims."""
    if BITS == 8:
        if FP8_UNPACK:
            a, b = fp8_unpack(unit)
        else:
            a, b = fp8_pairs(unit, TARGET)
        a0, a1 = halves(a)
        b0, b1 = halves(b)
        x = tl.join(tl.join(a0, a1), tl.join(b0, b1))  # [., ., ., half, pair]
        if KWIDTH == 2:
            x = tl.permute(x, (BLOCK, ROW, 4, LANE, 3))
        else:
            x = tl.permute(x, (BLOCK, ROW, LANE, 4, 3))
        x = tl.reshape(x, (T, 16))
    else:
        if BITS == 4:
            a, b, c, d = centroid_pairs4(unit, TABLE, TARGET)
        else:
            a, b, c, d = centroid_pairs3(unit, TABLE, TARGET)
        a0, a1 = halves(a)
        b0, b1 = halves(b)
        c0, c1 = halves(c)
        d0, d1 = halves(d)
        ab = tl.join(tl.join(a0, a1), tl.join(b0, b1))
        cd = tl.join(tl.join(c0, c1), tl.join(d0, d1))
        x = tl.join(ab, cd)  # [., ., ., half, pair low bit, pair high bit]
        x = _columns8(x, KWIDTH, BLOCK, ROW, LANE)
        x = tl.reshape(x, (T, 32))
    return x


@triton.jit
def _real_columns(
    UNIT_INDEX: tl.constexpr,
    LANES: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS: tl.constexpr,
    VEC: tl.constexpr,
    DIM: tl.constexpr,
    KWIDTH: tl.constexpr,
):
    """1 for columns of a key operand that hold a dim, 0 for padding: fp16 [k, 8], eight equal columns."""
    column = tl.arange(0, LANES * UNIT)
    lane = (column // KWIDTH) % LANES
    if VEC > 0:
        first = (((UNIT_INDEX // VEC) * LANES + lane) * VEC + UNIT_INDEX % VEC) * UNIT
    else:
        first = (lane * UNITS + UNIT_INDEX) * UNIT
    return tl.where((first < DIM)[:, None] & (tl.arange(0, 8) >= 0)[None, :], 1.0, 0.0).to(tl.float16)


@triton.jit
def _stack8(a, b, c, d, e, f, g, h):
    """Eight tiles along three new last dimensions, index bits 0, 1, 2."""
    return tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h)))


@triton.jit
def _value_tree(
    pairs,  # tuple of RUNS / 2 tuples of eight tiles: two tokens, eight codes
    T: tl.constexpr,
    RUNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    LANE: tl.constexpr,
):
    """[ROWS, T] fp16 out of pairs: row = code * lanes + lane."""
    p = pairs[0]
    a0, a1 = halves(p[0])
    b0, b1 = halves(p[1])
    c0, c1 = halves(p[2])
    d0, d1 = halves(p[3])
    e0, e1 = halves(p[4])
    f0, f1 = halves(p[5])
    g0, g1 = halves(p[6])
    h0, h1 = halves(p[7])
    if RUNS == 2:
        x = _stack8(
            tl.join(a0, a1),
            tl.join(b0, b1),
            tl.join(c0, c1),
            tl.join(d0, d1),
            tl.join(e0, e1),
            tl.join(f0, f1),
            tl.join(g0, g1),
            tl.join(h0, h1),
        )  # [., ., ., token, code bits 0, 1, 2]
        x = tl.permute(x, (6, 5, 4, LANE, BLOCK, RUN, 3))
    else:
        tl.static_assert(RUNS == 4)
        q = pairs[1]
        a2, a3 = halves(q[0])
        b2, b3 = halves(q[1])
        c2, c3 = halves(q[2])
        d2, d3 = halves(q[3])
        e2, e3 = halves(q[4])
        f2, f3 = halves(q[5])
        g2, g3 = halves(q[6])
        h2, h3 = halves(q[7])
        x = _stack8(
            tl.join(tl.join(a0, a1), tl.join(a2, a3)),
            tl.join(tl.join(b0, b1), tl.join(b2, b3)),
            tl.join(tl.join(c0, c1), tl.join(c2, c3)),
            tl.join(tl.join(d0, d1), tl.join(d2, d3)),
            tl.join(tl.join(e0, e1), tl.join(e2, e3)),
            tl.join(tl.join(f0, f1), tl.join(f2, f3)),
            tl.join(tl.join(g0, g1), tl.join(g2, g3)),
            tl.join(tl.join(h0, h1), tl.join(h2, h3)),
        )  # [., ., ., token bit 0, token bit 1, code bits 0, 1, 2]
        x = tl.permute(x, (7, 6, 5, LANE, BLOCK, RUN, 4, 3))
    return tl.reshape(x, (ROWS, T))


@triton.jit
def _value_constants(
    like,  # a tile of words
    BITS: tl.constexpr,
    RUNS: tl.constexpr,
    WHICH: tl.constexpr,  # see _pair_bits
):
    """Constants for every pair of codes."""
    STEPS: tl.constexpr = value_steps(BITS)
    one = ()
    for i in tl.static_range(8):
        one = one + (tl.full(like.shape, _pair_bits(STEPS[i], BITS, WHICH), tl.int32),)
    out = (one,)
    if RUNS == 4:
        out = out + (one,)
    return out


@triton.constexpr_function
def _pair_bits(step, bits, which):
    """Bits of a pair of equal fp16 numbers. "slope", "offset": number * slope + offset is code - middle, for the
    numbers of device.value_pairs; "middle": minus the bare number of the middle code."""
    from struct import pack, unpack

    middle = 2 ** (bits - 1)
    number = {"slope": 1.0 / step, "offset": -(1024.0 / step + middle), "middle": -middle * step * 2.0**-24}[
        which
    ]
    half = unpack("<H", pack("<e", number))[0]
    pair = half << 16 | half
    return pair - (1 << 32) if pair >> 31 else pair


@triton.jit
def _value_scale(
    row,  # of a unit: code * lanes + lane
    BITS: tl.constexpr,
    LANES: tl.constexpr,
):
    """What bare numbers of a row have to be multiplied by to be codes, fp32."""
    STEPS: tl.constexpr = value_steps(BITS)
    out = tl.full(row.shape, 2.0**24, tl.float32)
    for i in tl.static_range(8):
        out = tl.where(row // LANES == i, 2.0**24 / STEPS[i], out)
    return out


@triton.jit
def _value_words(
    tokens,  # tuple of RUNS tuples of units: neighbouring tokens
    UNITS: tl.constexpr,
    BITS: tl.constexpr,
    RUNS: tl.constexpr,
    TARGET: tl.constexpr,
):
    """device.value_words of every unit, a tuple of UNITS tuples of RUNS words."""
    out = ()
    for u in tl.static_range(UNITS):
        words = value_words(tokens[0][u], tokens[1][u], BITS, TARGET)
        if RUNS == 4:
            words = words + value_words(tokens[2][u], tokens[3][u], BITS, TARGET)
        out = out + (words,)
    return out


@triton.jit
def _value_operand(
    words,  # tuple of RUNS tiles, from _value_words
    T: tl.constexpr,
    BITS: tl.constexpr,
    RUNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # which dimension counts blocks of tokens, runs of a block, lanes
    RUN: tl.constexpr,
    LANE: tl.constexpr,
    BARE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """One unit decoded to the operand [ROWS, T] fp16 of code - middle, or of bare codes: row = code * lanes + lane."""
    pairs = (value_pairs(words[0], words[1], BITS, BARE, TARGET),)
    if RUNS == 4:
        pairs = pairs + (value_pairs(words[2], words[3], BITS, BARE, TARGET),)
    out = _value_tree(pairs, T, RUNS, ROWS, BLOCK, RUN, LANE)
    if not BARE:
        slope = _value_tree(_value_constants(words[0], BITS, RUNS, "slope"), T, RUNS, ROWS, BLOCK, RUN, LANE)
        away = _value_tree(_value_constants(words[0], BITS, RUNS, "offset"), T, RUNS, ROWS, BLOCK, RUN, LANE)
        out = out * slope + away
    return out


@triton.jit
def _sum_tokens(
    x,  # [T, N] fp32
    T: tl.constexpr,
    N: tl.constexpr,
    LANE_FIRST: tl.constexpr,
):
    """Sums over the tokens that one lane holds: no exchange between lanes. -> [8 or 4, N]."""
    if LANE_FIRST:  # rows of a 16-row accumulator: lane group * 4 + register
        out = tl.sum(tl.sum(tl.reshape(x, (T // 16, 4, 4, N)), axis=2), axis=0)
    else:
        out = tl.sum(tl.reshape(x, (T // 8, 8, N)), axis=0)
    return out


@triton.jit
def _moves(
    above,  # [T, N] fp32, scores over the reference
    v_scale,  # [T] fp32
    scale_top,
    T: tl.constexpr,
    N: tl.constexpr,
):
    """Whether P would be too large or a scale is: one exchange between lanes (NVIDIA's 16-row accumulators)."""
    high = tl.reshape(above, (T // 16, 2, 8, N // 8, 4, 2))
    high = tl.max(tl.max(tl.max(tl.max(high, axis=5), axis=3), axis=1), axis=0)  # of a lane, [8, 4]
    top = tl.reshape(_scale_tops(v_scale), (T // 16, 2, 8))
    top = tl.max(tl.max(top, axis=1), axis=0)[:, None] + tl.zeros((8, 4), tl.int32)
    flag = (high > _SLACK) | (top > scale_top)
    return tl.max(tl.reshape(flag.to(tl.int32), (32,)), axis=0) > 0


@triton.jit
def _scale_tops(
    v_scale,  # fp32, numbers of fp16
):
    """Exponents as fp16 has them, or less than 0: each scale is below 2^(top - 14), or infinite."""
    return tl.minimum((v_scale.to(tl.int32, bitcast=True) >> 23) - 112, 31)


@triton.jit
def _first_rows(
    x,  # [ROWS, T]
    ROWS: tl.constexpr,
    T: tl.constexpr,
):
    """Rows 0 to 15 of 64."""
    tl.static_assert(ROWS == 64)
    x, _ = tl.split(tl.permute(tl.reshape(x, (2, 2, 16, T)), (1, 2, 3, 0)))
    x, _ = tl.split(tl.permute(x, (1, 2, 0)))
    return x


@triton.jit
def _four_times(
    x,  # [16, N]
    ROWS: tl.constexpr,
    N: tl.constexpr,
):
    """The same rows four times over, [ROWS, N]."""
    tl.static_assert(ROWS == 64)
    x = tl.join(x, x)
    return tl.reshape(tl.permute(tl.join(x, x), (2, 3, 0, 1)), (ROWS, N))


@triton.jit
def _table(
    words_ptr,  # [COUNT, 4] int32, rows of equal numbers
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    LANE: tl.constexpr,  # dimension of size 4
    TABLE: tl.constexpr,
    COUNT: tl.constexpr,
    TARGET: tl.constexpr,
):
    """The numbers of TABLE. On NVIDIA as tiles that stay in registers: constants would not, because the compiler keeps
    them in uniform registers, which the byte permute does not take, and copies them before each use."""
    out = ()
    if TARGET == "cuda":
        lane = _count_along(LANE, A if LANE == 0 else 1, B if LANE == 1 else 1, C if LANE == 2 else 1)
        for i in tl.static_range(COUNT):
            out = out + (tl.load(words_ptr + (4 * i + lane)),)
    else:
        for i in tl.static_range(COUNT):
            out = out + (tl.full((), TABLE[i], tl.int32),)
    return out


@triton.jit
def _page_ids(
    table_ptr,
    token,  # first token of the tile, a multiple of 16
    last_group,  # first token of the last group that may be read
    some,  # there is a token
    BLOCK_SIZE: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Page ids of the groups of a tile, COUNT scalars. Block 0 where the split is empty: no table entry is read."""
    pages = ()
    for i in tl.static_range(COUNT):
        group = tl.minimum(token + 16 * i, last_group)
        pages = pages + (tl.load(table_ptr + group // BLOCK_SIZE, some, 0),)
    return pages


@triton.jit
def _blocks(
    base_ptr,  # to bytes
    pages,  # tuple of COUNT scalars
    BLOCK_STRIDE: tl.constexpr,  # bytes
    COUNT: tl.constexpr,
):
    """Where the block of every group of a tile starts, pointers to bytes. All that is read of a group is addressed from
    here, with offsets that mostly do not change from tile to tile."""
    out = ()
    for i in tl.static_range(COUNT):
        out = out + (base_ptr + pages[i].to(tl.int64) * BLOCK_STRIDE,)
    return out


@triton.jit
def _within(
    token,
    last_group,
    group,  # tile: which group of the tile
    BLOCK_SIZE: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Number in its block of the first token of the group. Blocks of one group: 0."""
    if BLOCK_SIZE == 16:
        out = tl.zeros(group.shape, tl.int32)
    else:
        first = ()
        for i in tl.static_range(COUNT):
            first = first + (tl.minimum(token + 16 * i, last_group) % BLOCK_SIZE,)
        out = _spread(first, group, COUNT)
    return out


@triton.jit
def _load_meta(
    blocks,  # tuple of pointers
    token,
    last_group,
    low,  # first and past-the-end token that any column sees
    high,
    FIELD: tl.constexpr,
    head,
    BLOCK_SIZE: tl.constexpr,
    T: tl.constexpr,
):
    """An fp16 field of the tile's tokens, [T]; 0 for tokens that no column sees."""
    COUNT: tl.constexpr = T // 16
    t = tl.arange(0, T)
    within = t % 16 + _within(token, last_group, t // 16, BLOCK_SIZE, COUNT)
    at = _spread(blocks, t // 16, COUNT) + (FIELD[0] + head * FIELD[2] + within * FIELD[1])
    seen = (token + t >= low) & (token + t < high)
    return tl.load(at.to(tl.pointer_type(tl.float16)), seen, 0.0)


@triton.jit
def _behind(
    pages,
    head,
    shift,  # bytes from the aligned address before the cache to the cache
    group,  # tile: which group of the tile
    row,  # tile: which token of the group
    lane,
    TILE: tl.constexpr,  # RowTile.constants
    FIELD: tl.constexpr,
    T: tl.constexpr,
):
    """How far behind an aligned word a lane's run begins, in bytes, 0 to 3. Where the table says it is never, 0."""
    if TILE[4] > 0 or TILE[5] == 0:
        out = tl.zeros(row.shape, tl.int32)
    else:
        RUN: tl.constexpr = TILE[3] * TILE[2] * TILE[0] // 8
        start = shift + FIELD[0] + head * FIELD[2] + row * FIELD[1] + lane * RUN
        if FIELD[3] % 4 != 0:  # blocks start at any even address
            odd = ()
            for i in tl.static_range(T // 16):
                odd = odd + ((pages[i] & 3) * (FIELD[3] % 4),)
            start += _spread(odd, group, T // 16)
        out = start & 3
    return out


@triton.jit
def _load_rows(
    blocks,
    token,
    last_group,
    head,
    group,
    row,
    lane,
    behind,  # from _behind
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
    TILE: tl.constexpr,
    FIELD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Words of one row per lane: token ``row`` of group ``group`` of the tile."""
    within = row + _within(token, last_group, group, BLOCK_SIZE, T // 16)
    offset = FIELD[0] + head * FIELD[2] + within * FIELD[1]
    if TILE[4] == 0:
        RUN: tl.constexpr = TILE[3] * TILE[2] * TILE[0] // 8
        offset += lane * RUN - behind
    return _load_words(_spread(blocks, group, T // 16) + offset, lane, behind, A, B, C, TILE, TARGET)


@triton.jit
def _load_keys(
    blocks, token, last_group, begin, end, head,
    group, row, lane, behind,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    T: tl.constexpr,
    TILE: tl.constexpr,
    DATA: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Everything of the keys of a tile that is read from the cache: words (, norm)."""
    out = _load_rows(
        blocks, token, last_group, head, group, row, lane, behind, A, B, C, T, TILE, DATA, BLOCK_SIZE, TARGET
    )
    if TILE[0] != 8:
        out = out + (_load_meta(blocks, token, last_group, begin, end, NORM, head, BLOCK_SIZE, T),)
    return out


@triton.jit
def _load_values(
    blocks, token, last_group, begin, end, head,
    group, row, lane,
    behinds,  # tuple of RUNS
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    T: tl.constexpr,
    TILE: tl.constexpr,
    DATA: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RUNS: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """Everything of the values of a tile that is read from the cache: RUNS times words, scale, zero."""
    out = ()
    for i in tl.static_range(RUNS):
        out = out + _load_rows(
            blocks,
            token,
            last_group,
            head,
            group,
            row + i,
            lane,
            behinds[i],
            A,
            B,
            C,
            T,
            TILE,
            DATA,
            BLOCK_SIZE,
            TARGET,
        )
    scale = _load_meta(blocks, token, last_group, begin, end, SCALE, head, BLOCK_SIZE, T)
    zero = _load_meta(blocks, token, last_group, begin, end, ZERO, head, BLOCK_SIZE, T)
    return out + (scale, zero)


@triton.jit
def _part(
    row,  # [N] int64
    query,  # [N]
    q_head,  # [N]
    splits,
    part,  # the split, or with CUT the piece
    most_queries,
    HQ: tl.constexpr,
    CUT: tl.constexpr,
    MULTI: tl.constexpr,
):
    """Where the partial results of this program's columns go, [N]."""
    if CUT and MULTI:
        out = (part.to(tl.int64) * most_queries + query) * HQ + q_head
    elif CUT:
        out = part.to(tl.int64) * HQ + q_head
    else:
        out = row * splits + part
    return out


_ARGUMENT_NAMES = (
    "scale_log2",
    "window",
    "soft_cap",
    "splits",
    "table_stride",
    "out_token_stride",
    "out_head_stride",
    "lse_token_stride",
    "lse_head_stride",
    "min_tiles",
    "pieces",
    "most_queries",
    "skew",
    "batch",
    "query_token_stride",
    "query_head_stride",
)


@triton.jit(
    do_not_specialize=_ARGUMENT_NAMES,
    do_not_specialize_on_alignment=(
        "cache_ptr", "table_ptr", "seq_lens_ptr", "query_start_ptr", "schedule_ptr", "sinks_ptr", "out_ptr", "lse_ptr",
    ),
)  # fmt: skip
def decode_kernel(
    query_ptr,  # [N * Hq, KP] fp16, or [N * Hq, 2, KP] int8, from prepare.py; ALONE: [N, Hq, D] fp16/bf16, as they are
    query_scale_ptr,  # [N * Hq] fp32; not read if ALONE
    cache_ptr,  # [nb, bs, Hk, slot_stride] uint8
    table_ptr,  # [B, M] int32
    seq_lens_ptr,  # [B] int32
    query_start_ptr,  # [B + 1] int32; not read unless MULTI
    schedule_ptr,  # [4 P + 2 B] int32; read if CUT and not ALONE
    sinks_ptr,  # [Hq] fp32; not read unless SINKS and DIRECT
    tables_ptr,  # [TABLE_WORDS, 4] int32, the numbers of TABLE four times over; read on NVIDIA only
    out_ptr,  # DIRECT: [N, Hq, Dv]; else partial results [N * Hq, S, RW] int32, pairs; with CUT [P, Q, Hq, RW]
    lse_ptr,  # DIRECT: [N, Hq] fp32 natural logarithm; else [N * Hq, S, 2] fp32, lse and scale; with CUT [P, Q, Hq, 2]
    table_stride,
    out_token_stride,  # DIRECT only
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    scale_log2,  # softmax scale * factor of the key numbers (* log2(e) unless SOFT_CAP)
    soft_cap,
    window,
    splits,  # S
    min_tiles,  # fewest tiles a split takes
    pieces,  # P; not used unless CUT
    most_queries,  # Q: of a sequence the most that can be; not used unless CUT and MULTI
    skew,  # of the sizes of pieces, see schedule.py; not used unless CLASSES > 1
    batch,  # B; used if CUT and ALONE
    query_token_stride,  # ALONE only
    query_head_stride,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    G: tl.constexpr,  # Hq / Hk
    N: tl.constexpr,  # columns of a tile, a power of two
    T: tl.constexpr,  # tokens of a tile
    KEY: tl.constexpr,  # RowTile.constants in tile.py
    VALUE: tl.constexpr,
    KEY_DATA: tl.constexpr,  # (base, token stride, head stride, block stride), bytes
    VALUE_DATA: tl.constexpr,
    KEY_NORM: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    VALUE_ZERO: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DV: tl.constexpr,
    TABLE: tl.constexpr,  # centroids, see device._lookup8, or tile.ByteTable
    TABLE_WORDS: tl.constexpr,
    SQUARE_FACTOR: tl.constexpr,  # of the squares of these
    NORM_CORRECTION: tl.constexpr,
    PLANES: tl.constexpr,  # centroids as that many int8 numbers, queries as two; 0: both as fp16
    BASE: tl.constexpr,  # of both
    BYTE_OFFSETS: tl.constexpr,  # what the numbers of a centroid leave out: (for upper, for lower)
    FP8_UNPACK: tl.constexpr,  # this target's conversion instruction, see device.fp8_unpack
    BARE_VALUES: tl.constexpr,  # value codes as the bits of denormal fp16 numbers, see device.value_pairs
    KWIDTH: tl.constexpr,  # consecutive columns of an operand in a lane
    RUNS: tl.constexpr,  # neighbouring tokens of a value operand in a lane
    LANE_FIRST: tl.constexpr,  # lanes of a row are far apart (AMD), not neighbours (NVIDIA)
    ASCENDING: tl.constexpr,  # see below
    CACHE_ALIGN: tl.constexpr,  # bytes that cache_ptr is aligned to, 16 or 2
    LAZY: tl.constexpr,  # see above
    PREFETCH: tl.constexpr,  # read the next tile's codes once this tile's have been decoded
    MULTI: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    PAIRED: tl.constexpr,  # how partial results are made of fp16 numbers, see reduce.py
    DIRECT: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    PDL: tl.constexpr,  # programmatic dependent launch, see ops.py
    CUT: tl.constexpr,  # only without DIRECT
    CLASSES: tl.constexpr,  # of pieces by size, see schedule.py; not used unless CUT
    ALONE: tl.constexpr,  # no kernel prepared anything, see queries.py
    STRETCH: tl.constexpr,  # of lower; this and the next two for ALONE
    MOST: tl.constexpr,  # pieces of a sequence
    AT_ONCE: tl.constexpr,  # at least B, if CUT
    TARGET: tl.constexpr,
):
    GROUPS: tl.constexpr = T // 16
    KUNITS: tl.constexpr = KEY[3]
    VUNITS: tl.constexpr = VALUE[3]
    KWORDS: tl.constexpr = KEY[7]
    VWORDS: tl.constexpr = VALUE[7]
    tl.static_assert(not CUT or not DIRECT)
    tl.static_assert(not PREFETCH or KEY_DATA[3] % 4 == 0)  # where blocks start would have to be kept as well
    KL: tl.constexpr = KEY[1]
    VL: tl.constexpr = VALUE[1]
    KSPAN: tl.constexpr = KEY[1] * KEY[2]
    ROWS: tl.constexpr = VALUE[1] * VALUE[2]
    CODES: tl.constexpr = KEY[0] == 4 and PLANES == 1
    PAIRS: tl.constexpr = (VUNITS + 1) // 2  # of units
    MIDDLE: tl.constexpr = 1 << (VALUE[0] - 1)

    head = tl.program_id(0) % HK
    first_column = (tl.program_id(0) // HK) * N
    first_query = first_column // G
    if ALONE and PDL:  # launched while what comes before it ends
        gdc_wait()
    if CUT:
        part = piece_taken(tl.program_id(1), tl.num_programs(1), CLASSES)
        if CLASSES > 1:
            if part >= pieces:
                return
        if ALONE:
            sequence, split, seq_len, tiles_per_split = piece_alone(
                seq_lens_ptr, part, batch, pieces, window, min_tiles, MOST, T, WINDOW, AT_ONCE
            )
        else:
            if PDL:  # prepare wrote the schedule as well
                gdc_wait()
            sequence, split, seq_len, tiles_per_split = piece_of(schedule_ptr, part)
        if sequence < 0:
            return
    else:
        split = tl.program_id(1)
        part = split
        sequence = tl.program_id(2)
        seq_len = tl.load(seq_lens_ptr + sequence)
        tiles_per_split = 0  # follows from what the columns see
    if MULTI:
        query_base = tl.load(query_start_ptr + sequence)
        query_len = tl.load(query_start_ptr + sequence + 1) - query_base
    else:
        query_base = sequence
        query_len = 1
    if first_query >= query_len:
        if PDL and not CUT and not ALONE:
            gdc_wait()  # a kernel that waits for this one has waited for prepare
        return

    column = first_column + tl.arange(0, N)
    query = column // G
    live = query < query_len
    q_head = head * G + column % G
    row = (query_base + query).to(tl.int64) * HQ + q_head
    high = seq_len - query_len + query + 1  # [N] past the last key of each column
    high = tl.where(live, high, 0)
    last_query = tl.minimum((first_column + N - 1) // G, query_len - 1)
    begin, end, start, last_group, tiles = tokens_seen(
        seq_len, query_len, first_query, last_query, window, T, WINDOW
    )
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
        T,
        MULTI,
        WINDOW,
        CUT,
        CLASSES,
    )
    if not DIRECT:
        if tile_low >= tile_high:
            if PDL and not CUT and not ALONE:
                gdc_wait()
            tl.store(
                lse_ptr + 2 * _part(row, query, q_head, splits, part, most_queries, HQ, CUT, MULTI),
                float("-inf"),
                live,
            )
            return

    # Which token and which part of its row each lane reads. Lanes are dealt out over the dimensions of a tile in
    # the order in which this compiler fills them: the last one first, or with ASCENDING the first one first.
    KROWS: tl.constexpr = 16 if LANE_FIRST else 8  # rows of a block
    FAST: tl.constexpr = 0 if ASCENDING else 2  # dimension whose lanes are neighbours
    SLOW: tl.constexpr = 2 if ASCENDING else 0
    KROW: tl.constexpr = FAST if LANE_FIRST else 1
    KLANE: tl.constexpr = 1 if LANE_FIRST else FAST
    VLANE: tl.constexpr = FAST if LANE_FIRST else 1
    VRUN: tl.constexpr = 1 if LANE_FIRST else FAST
    KBLOCKS: tl.constexpr = T // KROWS
    VBLOCKS: tl.constexpr = T // (4 * RUNS)
    KA: tl.constexpr = _at(0, SLOW, KROW, KLANE, KBLOCKS, KROWS, KL)
    KB: tl.constexpr = _at(1, SLOW, KROW, KLANE, KBLOCKS, KROWS, KL)
    KC: tl.constexpr = _at(2, SLOW, KROW, KLANE, KBLOCKS, KROWS, KL)
    VA: tl.constexpr = _at(0, SLOW, VRUN, VLANE, VBLOCKS, 4, VL)
    VB: tl.constexpr = _at(1, SLOW, VRUN, VLANE, VBLOCKS, 4, VL)
    VC: tl.constexpr = _at(2, SLOW, VRUN, VLANE, VBLOCKS, 4, VL)
    k_block = _count_along(SLOW, KA, KB, KC) * KROWS
    k_row = k_block % 16 + _count_along(KROW, KA, KB, KC)
    k_group = k_block // 16
    k_lane = _count_along(KLANE, KA, KB, KC)
    v_block = _count_along(SLOW, VA, VB, VC) * (4 * RUNS)
    v_token = v_block % 16 + _count_along(VRUN, VA, VB, VC) * RUNS
    v_group = v_block // 16
    v_lane = _count_along(VLANE, VA, VB, VC)

    PARTS: tl.constexpr = 4 if LANE_FIRST else 8
    # running maximum of the scores, or the reference
    largest = tl.full((N,), _LOWEST if LAZY else float("-inf"), tl.float32)
    weight = tl.zeros((PARTS, N), tl.float32)  # sum of P
    offset = tl.zeros((PARTS, N), tl.float32)  # sum of P * middle value
    scale_top = tl.full(
        (), 0, tl.int32
    )  # running maximum of the fp16 exponents of value scales: they are < 2^(top - 14)
    P_TOP: tl.constexpr = _P_LOG2 - _SLACK if LAZY else _P_LOG2
    centre = tl.zeros((16, N), tl.float32)  # LAZY and BARE_VALUES
    acc = ()
    for u in tl.static_range(VUNITS):  # noqa: B007
        acc = acc + (tl.zeros((ROWS, N), tl.float32),)

    shift = 0
    if CACHE_ALIGN < 4:
        shift = (cache_ptr.to(tl.int64) & 3).to(tl.int32)

    table = _table(tables_ptr, KA, KB, KC, KLANE, TABLE, TABLE_WORDS, TARGET)

    table_ptr += sequence.to(tl.int64) * table_stride
    if ALONE:
        start_of = (query_base + query).to(tl.int64) * query_token_stride + q_head * query_head_stride
        raw = read_alone(query_ptr, start_of, live, N, KEY, KWIDTH)
    elif CUT:  # ahead of the many reads below, which they would wait for
        queries_read = _read_queries(
            query_ptr, query_scale_ptr, row, live, N, KUNITS, KSPAN, PLANES, CODES, KWIDTH, TARGET
        )
    some = tile_low < tile_high
    token = start + tile_low * T
    last_token = start + (tile_high - 1) * T  # of the last tile
    pages = _page_ids(table_ptr, token, last_group, some, BLOCK_SIZE, GROUPS)
    # PREFETCH: where lanes' runs begin is the same for all tiles, as blocks start at multiples of 4
    k_behind = _behind(pages, head, shift, k_group, k_row, k_lane, KEY, KEY_DATA, T)
    v_behind = ()
    for i in tl.static_range(RUNS):
        v_behind = v_behind + (
            _behind(pages, head, shift, v_group, v_token + i, v_lane, VALUE, VALUE_DATA, T),
        )
    if PREFETCH:
        blocks = _blocks(cache_ptr, pages, KEY_DATA[3], GROUPS)
        keys_read = _load_keys(
            blocks, token, last_group, begin, end, head, k_group, k_row, k_lane, k_behind,
            KA, KB, KC, T, KEY, KEY_DATA, KEY_NORM, BLOCK_SIZE, TARGET,
        )  # fmt: skip
        values_read = _load_values(
            blocks, token, last_group, begin, end, head, v_group, v_token, v_lane, v_behind,
            VA, VB, VC, T, VALUE, VALUE_DATA, VALUE_SCALE, VALUE_ZERO, BLOCK_SIZE, RUNS, TARGET,
        )  # fmt: skip
        pages = _page_ids(table_ptr, tl.minimum(token + T, last_token), last_group, some, BLOCK_SIZE, GROUPS)
    if ALONE:
        queries_read = rotate_alone(raw, N, KEY, PLANES, CODES, BASE, STRETCH, KWIDTH, TARGET)
    elif not CUT:
        if PDL:  # up to here nothing depends on the kernel before this one; it wrote the queries
            gdc_wait()
        queries_read = _read_queries(
            query_ptr, query_scale_ptr, row, live, N, KUNITS, KSPAN, PLANES, CODES, KWIDTH, TARGET
        )
    column_scale = queries_read[0] * scale_log2
    queries = ()
    if PLANES > 0:
        # made like keys, so that the same lanes own a number: T equal rows, the matrix unit adds up the columns
        one = tl.full((KA, KB, KC), 0x01010101, tl.int32)
        ones = _byte_operand((one, one), T, KWIDTH, SLOW, KROW, KLANE)
        upper_sums = tl.zeros((T, N), tl.int32)
        lower_sums = tl.zeros((T, N), tl.int32)
        for u in tl.static_range(KUNITS):
            parts = queries_read[1 + u]
            upper_sums = tl.dot(ones, parts[0], upper_sums, out_dtype=tl.int32)
            lower_sums = tl.dot(ones, parts[1], lower_sums, out_dtype=tl.int32)
            if CODES and not ALONE:
                by_code = tl.trans(nibble_order(tl.trans(parts[2]), N, KSPAN, KWIDTH))
                parts = (parts[0], parts[1], by_code)
            queries = queries + (parts,)
        left_out = upper_sums.to(tl.float32) * BYTE_OFFSETS[0]
        left_out += lower_sums.to(tl.float32) * BYTE_OFFSETS[1]
        if N > 8:  # all rows are equal: one of them, where registers are short
            left_out = tl.max(left_out, axis=0)[None, :]
        column_offset = left_out * column_scale[None, :]
    else:
        queries = _slice(queries_read, 1, KUNITS)

    for _tile in range(tile_low, tile_high):
        # With PREFETCH ``pages`` are those of the next tile, which is read as soon as this one's words have left their
        # registers: no tile is held twice. Else ``pages`` are this tile's.
        next_token = tl.minimum(token + T, last_token)
        if PREFETCH:
            k_tile = keys_read
            v_tile = values_read
        else:
            blocks = _blocks(cache_ptr, pages, KEY_DATA[3], GROUPS)
            if KEY_DATA[3] % 4 != 0:
                k_behind = _behind(pages, head, shift, k_group, k_row, k_lane, KEY, KEY_DATA, T)
                v_behind = ()
                for i in tl.static_range(RUNS):
                    v_behind = v_behind + (
                        _behind(pages, head, shift, v_group, v_token + i, v_lane, VALUE, VALUE_DATA, T),
                    )
            k_tile = _load_keys(
                blocks, token, last_group, begin, end, head, k_group, k_row, k_lane, k_behind,
                KA, KB, KC, T, KEY, KEY_DATA, KEY_NORM, BLOCK_SIZE, TARGET,
            )  # fmt: skip
            v_tile = _load_values(
                blocks, token, last_group, begin, end, head, v_group, v_token, v_lane, v_behind,
                VA, VB, VC, T, VALUE, VALUE_DATA, VALUE_SCALE, VALUE_ZERO, BLOCK_SIZE, RUNS, TARGET,
            )  # fmt: skip
        k_units = _units(_slice(k_tile, 0, KWORDS), k_behind, KEY, TARGET)

        if PLANES > 0:
            sums = _byte_scores(
                k_units,
                queries,
                T,
                N,
                KUNITS,
                KEY[0],
                PLANES,
                BASE,
                table,
                KWIDTH,
                SLOW,
                KROW,
                KLANE,
                TARGET,
            )
        else:
            scores = tl.zeros((T, N), tl.float32)
            squares = tl.zeros((T, 8), tl.float32)
            for u in tl.static_range(KUNITS):
                keys = _key_operand(
                    k_units[u], T, KEY[0], table, KWIDTH, SLOW, KROW, KLANE, FP8_UNPACK, TARGET
                )
                scores = tl.dot(keys, queries[u], scores)
                if NORM_CORRECTION:
                    ones = _real_columns(u, KEY[1], KEY[2], KEY[3], KEY[4], KEY[6] * 8 // KEY[0], KWIDTH)
                    squares = tl.dot(keys * keys, ones, squares)
        if KEY[0] != 8:
            norm = k_tile[KWORDS].to(tl.float32)
        v_tokens = ()
        for i in tl.static_range(RUNS):
            read = _slice(v_tile, i * VWORDS, VWORDS)
            v_tokens = v_tokens + (_units(read, v_behind[i], VALUE, TARGET),)
        v_scale = v_tile[RUNS * VWORDS].to(tl.float32)
        if not LAZY:
            tile_top = tl.max(v_tile[RUNS * VWORDS].to(tl.int16, bitcast=True).to(tl.int32), axis=0) >> 10
        v_zero = v_tile[RUNS * VWORDS + 1].to(tl.float32)
        v_words = _value_words(v_tokens, VUNITS, VALUE[0], RUNS, TARGET)
        if PREFETCH:
            blocks = _blocks(cache_ptr, pages, KEY_DATA[3], GROUPS)
            keys_read = _load_keys(
                blocks, next_token, last_group, begin, end, head, k_group, k_row, k_lane, k_behind,
                KA, KB, KC, T, KEY, KEY_DATA, KEY_NORM, BLOCK_SIZE, TARGET,
            )  # fmt: skip
            values_read = _load_values(
                blocks, next_token, last_group, begin, end, head, v_group, v_token, v_lane, v_behind,
                VA, VB, VC, T, VALUE, VALUE_DATA, VALUE_SCALE, VALUE_ZERO, BLOCK_SIZE, RUNS, TARGET,
            )  # fmt: skip
            pages = _page_ids(
                table_ptr, tl.minimum(token + 2 * T, last_token), last_group, some, BLOCK_SIZE, GROUPS
            )
        if PLANES > 0:
            scores = sums.to(tl.float32) * column_scale[None, :] + column_offset
        else:
            scores = scores * column_scale[None, :]
        if KEY[0] != 8:
            if NORM_CORRECTION:
                total = tl.max(squares, axis=1) * SQUARE_FACTOR
                norm = norm * tl.rsqrt(total + _CENTROID_EPS)
            scores = scores * norm[:, None]
        if SOFT_CAP:  # cap * tanh(s / cap), then base 2
            grown = tl.exp2(scores * ((1.0 / soft_cap) * (2.0 * _LOG2E)))
            scores = (1.0 - 2.0 / (1.0 + grown)) * (soft_cap * _LOG2E)
        position = token + tl.arange(0, T)
        if MULTI or KEY[0] == 8:
            visible = position[:, None] < high[None, :]
            if WINDOW:
                visible = visible & (position[:, None] >= (high - window)[None, :])
            scores = tl.where(visible, scores, float("-inf"))
        else:  # every column sees the same keys; scores of the others are 0, as their norms were not loaded
            scores += tl.where((position >= begin) & (position < end), 0.0, float("-inf"))[:, None]

        if LAZY:
            moves = _moves(scores - largest[None, :], v_scale, scale_top, T, N)
            if moves | (token // T % _FLUSH == 0):
                new_largest = tl.maximum(largest, tl.max(scores, axis=0))
                new_scale_top = tl.maximum(scale_top, tl.max(_scale_tops(v_scale), axis=0))
                alpha = tl.exp2(largest - new_largest)
                weight *= alpha[None, :]
                offset *= alpha[None, :]
                shrink = alpha * power_of_2(scale_top - new_scale_top)
                moved = ()
                for u in tl.static_range(VUNITS):
                    kept = acc[u]
                    if BARE_VALUES:
                        kept += _four_times(centre, ROWS, N)
                    moved = moved + (kept * shrink[None, :],)
                acc = moved
                centre = tl.zeros((16, N), tl.float32)
                largest = new_largest
                scale_top = new_scale_top
            p = tl.exp2(scores - largest[None, :])
            weight += _sum_tokens(p, T, N, LANE_FIRST)
            v_middle = v_zero + v_scale * MIDDLE  # what code MIDDLE stands for
            offset += _sum_tokens(p * v_middle[:, None], T, N, LANE_FIRST)
            p16 = (p * (v_scale * power_of_2(-scale_top + (P_TOP + 14)))[:, None]).to(tl.float16)
        else:
            new_largest = tl.maximum(largest, tl.max(scores, axis=0))
            reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            alpha = tl.exp2(largest - reference)  # [N]
            p = tl.exp2(scores - reference[None, :])
            largest = new_largest
            weight = weight * alpha[None, :] + _sum_tokens(p, T, N, LANE_FIRST)
            v_middle = v_zero + v_scale * MIDDLE
            offset = offset * alpha[None, :] + _sum_tokens(p * v_middle[:, None], T, N, LANE_FIRST)
            new_scale_top = tl.maximum(scale_top, tile_top)
            p16 = (p * (v_scale * power_of_2(-new_scale_top + (P_TOP + 14)))[:, None]).to(tl.float16)
            shrink = alpha * power_of_2(scale_top - new_scale_top)
            scale_top = new_scale_top

        if BARE_VALUES:
            middles = _value_constants(v_words[0][0], VALUE[0], RUNS, "middle")
            middles = _value_tree(middles, T, RUNS, ROWS, SLOW, VRUN, VLANE)
            if LAZY:
                centre = tl.dot(_first_rows(middles, ROWS, T), p16, centre)
            else:
                added = tl.dot(middles, p16)  # the same for all units
        new_acc = ()
        for u in tl.static_range(VUNITS):
            values = _value_operand(
                v_words[u], T, VALUE[0], RUNS, ROWS, SLOW, VRUN, VLANE, BARE_VALUES, TARGET
            )
            kept = acc[u]
            if not LAZY:
                kept *= shrink[None, :]
                if BARE_VALUES:
                    kept += added
            new_acc = new_acc + (tl.dot(values, p16, kept),)
        acc = new_acc
        if not PREFETCH:
            pages = _page_ids(table_ptr, token + T, last_group, some, BLOCK_SIZE, GROUPS)
        token += T

    if PDL and not DIRECT:
        gdc_launch_dependents()
    total_weight = tl.sum(weight, axis=0)  # [N]
    total_offset = tl.sum(offset, axis=0)
    seen = total_weight > 0.0
    if SINKS and DIRECT:
        sink = tl.load(sinks_ptr + q_head, live, float("-inf")).to(tl.float32) * _LOG2E
        joint = tl.where(seen, tl.maximum(largest, sink), 0.0)
        less = tl.exp2(largest - joint)
        lse = joint + tl.log2(total_weight * less + tl.exp2(sink - joint))
        norm_out = less / (total_weight * less + tl.exp2(sink - joint))
    else:
        lse = largest + tl.log2(total_weight)
        norm_out = 1.0 / total_weight
    norm_out = tl.where(seen, norm_out, 0.0)
    lse = tl.where(seen, lse, float("-inf"))
    back = norm_out * power_of_2(scale_top - (P_TOP + 14))
    shift = total_offset * norm_out
    r = tl.arange(0, ROWS)
    if BARE_VALUES:
        row_scale = _value_scale(r, VALUE[0], VL)[:, None]
    sums = acc
    if LAZY and BARE_VALUES:
        sums = ()
        for u in tl.static_range(VUNITS):
            sums = sums + (acc[u] + _four_times(centre, ROWS, N),)
    if not DIRECT:
        most = tl.zeros((ROWS, N), tl.float32)
        for u in tl.static_range(VUNITS):
            most = tl.maximum(most, tl.abs(sums[u]))
        if BARE_VALUES:
            most *= row_scale
        bound = tl.max(most, axis=0) * back + tl.abs(shift)  # no number is larger
        to_half, from_half = fp16_range(bound.to(tl.int32, bitcast=True), _PART_TOP)
        back *= to_half
        shift *= to_half
    factor = back[None, :]
    if BARE_VALUES:
        factor *= row_scale
    results = ()
    for u in tl.static_range(VUNITS):
        results = results + (sums[u] * factor + shift[None, :],)
    if DIRECT:
        lane = r % VL
        at = (query_base + query).to(tl.int64) * out_token_stride + q_head * out_head_stride
        for u in tl.static_range(VUNITS):
            if VALUE[4] > 0:
                dim = (((u // VALUE[4]) * VL + lane) * VALUE[4] + u % VALUE[4]) * VALUE[2] + r // VL
            else:
                dim = (lane * VALUE[3] + u) * VALUE[2] + r // VL
            keep = live[None, :] & (dim < DV)[:, None]
            tl.store(out_ptr + at[None, :] + dim[:, None], results[u].to(out_ptr.dtype.element_ty), keep)
        if WRITE_LSE:
            at = (query_base + query).to(tl.int64) * lse_token_stride + q_head * lse_head_stride
            tl.store(lse_ptr + at, lse * _LN2, live)
    else:
        where = _part(row, query, q_head, splits, part, most_queries, HQ, CUT, MULTI)
        if PAIRED:
            for i in tl.static_range(PAIRS):
                low = results[2 * i]
                high = low  # of the last of an odd number nothing
                if 2 * i + 1 < VUNITS:
                    high = results[2 * i + 1]
                at = where * (PAIRS * ROWS) + i * ROWS
                tl.store(out_ptr + at[None, :] + r[:, None], fp16_pair(low, high, TARGET), live[None, :])
        else:
            for u in tl.static_range(VUNITS):
                at = (
                    out_ptr.to(tl.pointer_type(tl.float16))
                    + where[None, :] * (VUNITS * ROWS)
                    + (u * ROWS + r)[:, None]
                )
                tl.store(at, results[u].to(tl.float16), live[None, :])
        tl.store(lse_ptr + 2 * where, lse, live)
        tl.store(lse_ptr + 2 * where + 1, from_half, live)
