"""Paged split-KV decode over a 4-bit SoA cache: the attention kernel.

Tile: one wave takes 32 tokens (two subtiles of 16) of one KV head per step, for up to 16 columns, a column being a
(query token, head of the group) pair. lane = 16 g + c.
Ownership: key codes: token c, dims 32 g ..; query: column c, the same dims; scores, P: column c, tokens 4 g + j;
value codes: tokens 4 g + j, dims 8 c ..; output: column c, dims 32 g ...
Movement: HBM to registers to matrix operands; no LDS in the loop. The next tile's loads go into registers that this
tile has just finished with. Waves of a workgroup take tiles in turn and merge once, through LDS.
Budget: 165 wave instructions per 16 tokens on gfx950. Reasons and counts: docs/flydsl_decode.md.
"""

import math
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import gpu
from flydsl.expr.typing import T

from . import emit as e
from .config import COLUMNS, DIM, TILE, DecodeConfig
from .emit import F16, F32, I32
from .prepare import DTYPES
from .tables import key_tables

LOW_NIBBLES = 0x0F0F0F0F
OTHER_HALF = 0x08080808
HIGH_NIBBLE = 0x00F000F0
REACHED_TWO = 0x40004000  # bit 14 of an fp16: its magnitude is 2 or more, or it is not finite
HEADROOM = 4.0  # log2: the largest p' is 2**-HEADROOM when the reference is set
START = -(2.0**100)  # reference before the first tile
TINY = 2.0**-24  # smallest fp16 above zero
NEG_INF = float("-inf")
LOG2E = math.log2(math.e)
NOWHERE = -4096  # an offset out of every bound, small distances added to it too

MERGE_PITCH = 36  # floats per column in the merge buffer: 32 dims and a pad that spreads the banks


def _codes(words: fx.Vector, half: int) -> list:
    """A half of the 32 4-bit codes of four words: a word gives four even and four odd dims."""
    out = []
    for word in (words[2 * half], words[2 * half + 1]):
        out += [word & e.i32(LOW_NIBBLES), e.shr(word, 4) & e.i32(LOW_NIBBLES)]
    return out


def _codes3(words: fx.Vector, half: int) -> list:
    """A half of the 32 3-bit codes of three words: word j of both halves has codes j, 8 + j, 16 + j and 24 + j.

    Eight codes take three bytes. Bytes of one place in their three, side by side in one register, hold the same bits of
    the same codes, so that one shift serves four of them.
    """
    w0, w1, w2 = words[0], words[1], words[2]
    first, middle, last = (
        e.perm(w2, e.perm(w1, w0, e.i32(upper)), e.i32(lower))
        for upper, lower in ((0x0C060300, 0x05020100), (0x0C070401, 0x06020100), (0x0C0C0502, 0x07040100))
    )

    def bits(word: Any, shift: int, mask: int) -> Any:
        moved = e.shr(word, shift) if shift >= 0 else word << I32(-shift)
        return moved & e.i32(mask * 0x01010101)

    if half == 0:
        return [
            bits(first, 0, 7),
            bits(first, 3, 7),
            bits(first, 6, 3) | bits(middle, -2, 4),
            bits(middle, 1, 7),
        ]
    return [bits(middle, 4, 7), bits(middle, 7, 1) | bits(last, -1, 6), bits(last, 2, 7), bits(last, 5, 7)]


def _scores(cfg: DecodeConfig, words: fx.Vector, q: Any, tables: Any) -> list:
    """Integer scores of one subtile as floats, not yet centred: tokens 4 g + j of column c.

    words: 32 codes of one token; the query has the order in which they are taken out. One half at a time, to keep few
    registers alive.
    """
    major = minor = fx.Vector.filled((4,), 0, I32)
    for half in range(2):
        part = slice(4 * half, 4 * half + 4)
        codes = _codes(words, half) if cfg.key_bits == 4 else _codes3(words, half)
        residuals = [[e.perm(tables[1], tables[0], x) for x in codes]]
        if cfg.key_bits == 4:
            residuals.append([e.perm(tables[3], tables[2], x ^ e.i32(OTHER_HALF)) for x in codes])
        major = e.mfma_i8(cfg.arch, codes, q.high[part], major)
        minor = e.mfma_i8(cfg.arch, codes, q.low[part], minor)
        for residual in residuals:
            minor = e.mfma_i8(cfg.arch, residual, q.high[part], minor)
        e.fence()
    return [((major[j] << I32(7)) + minor[j]).to(F32) for j in range(4)]


def _scaled(raw: list, q: Any) -> list:
    """Scores times the query's scale, centred; two per instruction."""
    out: list = []
    for k in range(0, len(raw), 2):
        out += list(fx.Vector(fx.math.fma(e.vec(raw[k : k + 2], F32), q.scale, q.centre), (2,), F32))
    return out


def _halves(words: list) -> list:
    """fp16 numbers of packed words."""
    return [h for word in words for h in e.vec([word], I32).bitcast(F16)]


def _logits(cfg: DecodeConfig, scores: list, norms: list, reference: Any) -> list:
    """log2-domain logits minus the reference."""
    if cfg.soft_cap is None:
        return [e.fma(s, n.to(F32), -reference) for s, n in zip(scores, norms, strict=True)]
    cap = cfg.soft_cap * 1.4426950408889634
    out = []
    for s, n in zip(
        scores, norms, strict=True
    ):  # cap * tanh(x) with exp2(2 x log2 e) from the prepared scale
        grown = e.exp2(e.fma(s, n.to(F32), F32(0.0)))
        out.append(e.fma(F32(-2.0 * cap), e.rcp(grown + F32(1.0)), F32(cap) - reference))
    return out


def _weights(logits: list, meta: list, total: fx.Vector, shift: Any, zero: Any) -> tuple[list, Any, Any]:
    """P operand words, the running sum of p (two partial sums), and the running sum of p * zero point.

    zero: a zero that the compiler cannot see, so that the product keeps its fused widening and narrowing.
    """
    p = [e.exp2(x) for x in logits]
    scales, zeros = _scales(meta), _zeros(meta)
    words = []
    for k in range(0, len(p), 2):
        pair = [e.fma(p[k + i], scales[k + i].to(F32), zero).to(F16) for i in range(2)]
        words.append(e.vec(pair, F16).bitcast(I32)[0])
        total = total + e.vec([p[k], p[k + 1]], F32)
    for x, z in zip(p, zeros, strict=True):
        shift = e.fma(x, z.to(F32), shift)
    return words, total, shift


def _raised(logits: list, meta: list, reference: Any) -> Any:
    """A reference that keeps every p' of this tile at 2**-HEADROOM or below; never lower than before."""
    peak = F32(START)
    for x, s in zip(logits, _scales(meta), strict=True):
        peak = fx.arith.maxnumf(peak, x + e.log2(fx.arith.maxnumf(s.to(F32), F32(TINY))))
    return fx.arith.maxnumf(reference, _column_max(peak) + F32(HEADROOM))


def _accumulate(cfg: DecodeConfig, values: list, weights: list, acc: list) -> list:
    """acc += V^T P over 32 tokens. values: 8 words (token j of subtile s at 4 s + j), weights: 4 words."""
    out = list(acc)
    for byte in range(4):
        pick = e.i32(0x0C000C00 | byte | (4 + byte) << 16)
        both = [
            e.perm(values[k + 1], values[k], pick) for k in range(0, 8, 2)
        ]  # lo + 16 hi, two tokens per word
        high = [x & e.i32(HIGH_NIBBLE) for x in both]
        out[2 * byte] = e.mfma_f16(cfg.arch, both, weights, acc[2 * byte])
        out[2 * byte + 1] = e.mfma_f16(cfg.arch, high, weights, acc[2 * byte + 1])
    return out


def _column_max(x: Any) -> Any:
    """Maximum over the four lanes of a column."""
    for distance in (16, 32):
        x = fx.arith.maxnumf(x, e.xor_lanes(x, distance))
    return x


def _column_sum(x: Any) -> Any:
    for distance in (16, 32):
        x = x + e.xor_lanes(x, distance)
    return x


class _Query:
    """The prepared query of a lane: eight words of h and of l; score = integer * scale + centre (pairs of each)."""

    def __init__(self, cfg: DecodeConfig, q8: Any, meta: Any, row: Any, valid: Any, g: Any) -> None:
        offset = e.select(valid, row * I32(2 * DIM), I32(NOWHERE))
        parts = [e.load(q8, offset + I32(32) * g + I32(at), 4) for at in (0, 16, DIM, DIM + 16)]
        words = [w for part in parts for w in part]
        self.high, self.low = words[:8], words[8:]
        where = e.select(valid, row * I32(8), I32(NOWHERE))
        scale, centre = e.load(meta, where, 2).bitcast(F32)
        self.scale, self.centre = e.vec([scale, scale], F32), e.vec([centre, centre], F32)


class _Cache:
    """Where a lane reads in a block, and how a step's registers are filled."""

    def __init__(self, cfg: DecodeConfig, base: Any, table: Any, head: Any, c: Any, g: Any) -> None:
        self.cfg, self.base, self.table = cfg, base, table
        at = head * I32(cfg.head_stride)
        self.key = at + c * I32(cfg.token_stride) + g * I32(4 * cfg.key_bits) + I32(cfg.key_base)
        self.value = at + g * I32(4 * cfg.token_stride) + c * I32(4) + I32(cfg.value_base)
        self.meta = head * I32(cfg.meta_head_stride) + g * I32(8) + I32(cfg.norm_base)
        self.per_tile = max(1, TILE // cfg.block_size)  # blocks of a step: 2 or 1

    def entries(self, tile: Any, last_block: Any) -> list:
        """Block ids of a tile; never those past the sequence's last block."""
        first = tile * I32(self.per_tile) if self.cfg.block_size <= TILE else e.shr(tile, self._log2_tiles())
        return [
            e.scalar_load(self.table, fx.arith.min(first + I32(i), last_block) * I32(4))
            for i in range(self.per_tile)
        ]

    def _log2_tiles(self) -> int:
        return (self.cfg.block_size // TILE).bit_length() - 1

    def subtiles(self, tile: Any, entries: list, left: Any) -> list:
        """(descriptor, offset of the data, offset of the meta fields) of both subtiles of ``tile``.

        left: tiles from here to the end; if there are none the descriptor is empty, and loads return zeros without
        traffic. (Arithmetic, since a comparison would be merged with the loop's own, at more cost.)
        """
        cfg = self.cfg
        nbytes = ((I32(0) - left) >> I32(31)) & I32(cfg.content_bytes)
        rsrc = [
            e.descriptor(self.base + fx.Int64(fx.Uint32(b)) * fx.Int64(cfg.block_stride), nbytes)
            for b in entries
        ]
        if cfg.block_size == COLUMNS:
            return [(r, I32(0), I32(0)) for r in rsrc]
        inside = tile & I32(cfg.block_size // TILE - 1)
        data, meta = inside * I32(TILE * cfg.token_stride), inside * I32(2 * TILE)
        return [(rsrc[0], data + I32(16 * s * cfg.token_stride), meta + I32(32 * s)) for s in range(2)]

    def keys(self, subtiles: list) -> list:
        return [e.load(r, self.key, self.cfg.key_bits, data) for r, data, _ in subtiles]

    def meta_words(self, subtiles: list) -> list:
        """12 words: norm, scale, zero of tokens 4 g + j of subtile 0, then of subtile 1; two words each."""
        cfg, out, at = self.cfg, [], e.hidden(self.meta)
        for r, _, meta in subtiles:
            for base in (cfg.norm_base, cfg.scale_base, cfg.zero_base):
                out += list(e.load(r, at + I32(base - cfg.norm_base), 2, meta))
        return out

    def values(self, subtiles: list) -> list:
        stride, at = self.cfg.token_stride, e.hidden(self.value)
        if 3 * stride < 4096:  # fits the instruction's own offset
            return [e.load(r, at + I32(j * stride), 1, data)[0] for r, data, _ in subtiles for j in range(4)]
        return [e.load(r, at, 1, data + I32(j * stride))[0] for r, data, _ in subtiles for j in range(4)]


def _masked(cfg: DecodeConfig, start: Any, ends: Any, logits: list, meta: list) -> tuple[list, list]:
    """Logits to -inf and meta fields to zero for tokens that the lane's column does not see: those from ``ends`` on and
    those before its window. start: the lane's first token.
    """
    up = ends - start
    places = [I32(16 * (k // 4) + k % 4) for k in range(8)]
    seen = [t < up for t in places]
    if cfg.window is not None:
        down = up - I32(cfg.window)  # from ``up``, so that the loop keeps one register per lane and not two
        seen = [s & (t >= down) for s, t in zip(seen, places, strict=True)]
    out = [e.select(s, x, F32(NEG_INF)) for s, x in zip(seen, logits, strict=True)]
    words = list(meta)
    for s in range(2):
        for pair in range(2):
            k = 4 * s + 2 * pair
            keep = e.select(seen[k], I32(0xFFFF), I32(0)) | e.select(seen[k + 1], I32(-65536), I32(0))
            for field in range(3):
                at = 6 * s + 2 * field + pair
                words[at] = words[at] & keep
    return out, words


def _norms(meta: list) -> list:
    return _halves([meta[0], meta[1], meta[6], meta[7]])


def _scales(meta: list) -> list:
    return _halves([meta[2], meta[3], meta[8], meta[9]])


def _zeros(meta: list) -> list:
    return _halves([meta[4], meta[5], meta[10], meta[11]])


def make_decode(cfg: DecodeConfig) -> Any:
    """The launcher of one specialisation.

    Arguments: addresses (int64) of the prepared query [N, Hq, 2, 128] int8 and its meta [N, Hq, 2] (fp32 scale and
    centre), cache, block table [B, M] int32, seq_lens [B] int32, query_start_loc [B + 1] int32 (read if ``multi``),
    partial outputs [N, Hq, S, 128] fp32, partial log2-sum-exps [N, Hq, S] fp32 and sinks [Hq] fp32 (read if ``sinks``);
    then int32 M, S, B, N and groups of columns per sequence, and in elements the row and head strides of the output and
    the row stride of lse; then the stream. An empty split writes -inf as its sum. With ``direct`` there is one split,
    and the output [N, Hq, 128] and lse [N, Hq] fp32 (0: not wanted) stand in place of the partial ones.
    """
    tables_py = key_tables(cfg.key_bits).words()
    waves, gqa, hk = cfg.waves, cfg.gqa, cfg.num_kv_heads
    hq = gqa * hk
    per_group = cfg.tokens_per_group

    @fx.struct
    class Merge:
        rows: fx.Array[fx.Float32, waves * COLUMNS * MERGE_PITCH, 16]
        sums: fx.Array[fx.Float32, waves * COLUMNS * 2, 16]

    @flyc.kernel(known_block_size=[64 * waves, 1, 1])
    def decode(
        q8_at: fx.Pointer,
        meta_at: fx.Int64,
        cache_at: fx.Int64,
        table_at: fx.Int64,
        lens_at: fx.Int64,
        starts_at: fx.Int64,
        out_at: fx.Int64,
        sums_at: fx.Int64,
        sinks_at: fx.Int64,
        width: fx.Int32,
        splits: fx.Int32,
        batch: fx.Int32,
        rows: fx.Int32,
        groups: fx.Int32,
        row_stride: fx.Int32,
        head_stride: fx.Int32,
        lse_stride: fx.Int32,
    ):
        thread = I32(gpu.thread_idx.x)
        lane = thread & I32(63)
        wave = e.uniform(e.shr(thread, 6))
        c, g = lane & I32(15), e.shr(lane, 4)
        split, head, z = I32(gpu.block_idx.x), I32(gpu.block_idx.y), I32(gpu.block_idx.z)

        # ---- which tokens, which columns --------------------------------------------------------------------
        sequence, group = z, I32(0)
        if cfg.multi:
            sequence = z // groups
            group = z - sequence * groups
        seq_len = e.scalar_load(e.descriptor(lens_at, batch * I32(4)), sequence * I32(4))
        first_row, q_len = sequence, I32(1)
        if cfg.multi:
            starts = e.descriptor(starts_at, (batch + I32(1)) * I32(4))
            first_row = e.scalar_load(starts, sequence * I32(4))
            q_len = e.scalar_load(starts, sequence * I32(4) + I32(4)) - first_row
        first_token = group * I32(per_group)  # query tokens of this workgroup: first_token ...
        tokens = fx.arith.max(fx.arith.min(q_len - first_token, I32(per_group)), I32(0))
        if cfg.multi:
            tokens = e.uniform(
                tokens
            )  # a clamp is a vector instruction: it would occupy a register in the loop
        token = c // I32(gqa) if cfg.multi else I32(0)
        valid = c < tokens * I32(gqa)
        row = (first_row + first_token + token) * I32(hq) + head * I32(gqa) + (c - token * I32(gqa))
        context = seq_len - q_len + first_token + I32(1)  # keys that the first query token sees
        ends = context + token  # keys that the lane's column sees, without the window
        last_end = fx.arith.max(context + tokens - I32(1), I32(0))
        first_key, full_from = I32(0), I32(0)
        if cfg.window is not None:
            first_key = fx.arith.max(context - I32(cfg.window), I32(0))
            full_from = fx.arith.max(last_end - I32(cfg.window), I32(0))

        # ---- tiles of this split and this wave ---------------------------------------------------------------
        tile_from, tile_to = e.shr(first_key, 5), e.shr(last_end + I32(TILE - 1), 5)
        tile_to = fx.arith.max(e.select(tokens > I32(0), tile_to, tile_from), tile_from)
        share = e.uniform((tile_to - tile_from + splits - I32(1)) // splits)
        begin = tile_from + split * share
        end = fx.arith.min(begin + share, tile_to)
        last_block = fx.arith.max(last_end - I32(1), I32(0)) // I32(cfg.block_size)
        full_end = context >> I32(5)  # tiles from here on have a column that does not see all of it
        full_begin = e.shr(full_from + I32(TILE - 1), 5)
        full_count = fx.arith.max(full_end - full_begin, I32(0))  # tiles that every column sees whole

        q = _Query(
            cfg,
            e.descriptor(e.address(q8_at), rows * I32(hq * 2 * DIM)),
            e.descriptor(meta_at, rows * I32(hq * 8)),
            row,
            valid,
            g,
        )
        zero = e.hidden_zero()
        tables = [e.i32(w) for w in tables_py]
        entry_table = e.descriptor(
            table_at + fx.Int64(sequence) * fx.Int64(width) * fx.Int64(4), width * I32(4)
        )
        cache = _Cache(cfg, cache_at, entry_table, head, c, g)
        # plain functions: a method call in a dynamic loop would make its object a carried value
        entries_of, subtiles_of = cache.entries, cache.subtiles
        load_keys, load_meta, load_values = cache.keys, cache.meta_words, cache.values

        first = begin + wave
        now = subtiles_of(first, entries_of(first, last_block), end - first)
        keys = load_keys(now)
        e.fence()
        meta = load_meta(now)
        e.fence()
        values = load_values(now)
        e.fence()
        ahead = entries_of(first + I32(waves), last_block)
        acc = [fx.Vector.filled((4,), 0.0, F32) for _ in range(8)]
        reference, total, shift = F32(START), fx.Vector.filled((2,), 0.0, F32), F32(0.0)

        # ---- the loop ----------------------------------------------------------------------------------------
        for tile in range(first, end, I32(waves)):
            following = tile + I32(waves)
            upcoming = subtiles_of(following, ahead, end - following)
            ahead = entries_of(following + I32(waves), last_block)

            raw = _scores(cfg, keys[0], q, tables) + _scores(cfg, keys[1], q, tables)
            scores = _scaled(raw, q)
            logits = _logits(cfg, scores, _norms(meta), reference)
            if fx.arith.cmpi(fx.arith.CmpIPredicate.uge, tile - full_begin, full_count):
                logits, meta = _masked(cfg, tile * I32(TILE) + g * I32(4), ends, logits, meta)
            weights, new_total, new_shift = _weights(logits, meta, total, shift, zero)
            new_shift = e.pinned(new_shift)  # before the branch, so that p need not outlive it
            e.fence()
            keys = load_keys(upcoming)
            flags = (weights[0] | weights[1] | weights[2] | weights[3]) & e.i32(REACHED_TWO)
            grown = new_total[0] + new_total[1] > F32(2.0**100)
            if e.any_lane((flags != I32(0)) | grown):
                fresh = _logits(cfg, scores, _norms(meta), F32(0.0))
                start = e.hidden(
                    tile * I32(TILE) + g * I32(4)
                )  # else the comparisons would move out of the branch
                fresh, meta = _masked(cfg, start, ends, fresh, meta)
                raised = _raised(fresh, meta, reference)
                factor = e.exp2(reference - raised)
                acc = [x * e.vec([factor] * 4, F32) for x in acc]
                total, shift = total * e.vec([factor] * 2, F32), shift * factor
                reference = raised
                logits = [x - raised for x in fresh]
                weights, new_total, new_shift = _weights(logits, meta, total, shift, zero)
            total, shift = new_total, new_shift
            e.fence()
            meta = load_meta(upcoming)
            acc = _accumulate(cfg, values, weights, acc)
            e.fence()
            values = load_values(upcoming)

        # ---- merge the waves, write the split ---------------------------------------------------------------
        total_sum, shift = _column_sum(total[0] + total[1]), _column_sum(shift)
        lds = fx.SharedAllocator().allocate(Merge).peek()
        rows_at, lds_sums = lds.rows.ptr, lds.sums.ptr
        place = wave * I32(COLUMNS) + c
        (lds_sums + place * I32(2)).store(e.vec([reference, total_sum], F32))
        gpu.barrier()
        top, whole = _merge_sums(waves, lds_sums, c)
        mine = e.hidden(c)  # else what follows from it is computed early and occupies registers in the loop
        writes = (mine < tokens * I32(gqa)) & (thread < I32(COLUMNS))
        if fx.const_expr(cfg.direct is None):
            first_out = (first_row + first_token) * I32(hq) + head * I32(gqa)
            part = e.descriptor(
                out_at + fx.Int64(first_out) * fx.Int64(splits) * fx.Int64(4 * DIM),
                I32(per_group * hq * 4 * DIM) * splits,
            )
            sums = e.descriptor(
                sums_at + fx.Int64(first_out) * fx.Int64(splits) * fx.Int64(4),
                I32(per_group * hq * 4) * splits,
            )
            lse = e.select(whole > F32(0.0), top + e.log2(whole), F32(NEG_INF))
            at = (_out_row(cfg, mine) * splits + split) * I32(4)
            e.store(sums, e.select(writes, at, I32(-1)), e.vec([lse], F32))
            steps = (splits * I32(hq * 4 * DIM), splits * I32(4 * DIM), split * I32(4 * DIM))
            dtype = F32
        else:
            dtype = DTYPES[cfg.direct]
            size = dtype.width // 8
            seen = whole > F32(0.0)
            its_token = mine // I32(gqa) if cfg.multi else I32(0)
            its_head = mine - its_token * I32(gqa)
            if fx.const_expr(cfg.sinks):
                logits_at = e.descriptor(sinks_at, I32(4 * hq))
                sink = e.load(logits_at, (head * I32(gqa) + its_head) * I32(4), 1).bitcast(F32)[0] * F32(
                    LOG2E
                )
                joint = fx.arith.maxnumf(top, sink)
                whole = whole * e.exp2(top - joint) + e.exp2(sink - joint)
                top = joint
            start_row = first_row + first_token
            lse = e.select(seen, (top + e.log2(whole)) * F32(1.0 / LOG2E), F32(NEG_INF))
            sums = e.descriptor(
                sums_at
                + (fx.Int64(start_row) * fx.Int64(lse_stride) + fx.Int64(head * I32(gqa))) * fx.Int64(4),
                e.select(sums_at == fx.Int64(0), I32(0), I32(0x7FFFFFFF)),
            )
            at = (its_token * lse_stride + its_head) * I32(4)
            e.store(sums, e.select(writes, at, I32(-1)), e.vec([lse], F32))
            start = fx.Int64(start_row) * fx.Int64(row_stride) + fx.Int64(head * I32(gqa)) * fx.Int64(
                head_stride
            )
            last = (tokens - I32(1)) * row_stride + I32(gqa - 1) * head_stride + I32(DIM)
            part = e.descriptor(out_at + start * fx.Int64(size), fx.arith.max(last, I32(0)) * I32(size))
            steps = (row_stride * I32(size), head_stride * I32(size), I32(0))
            whole = e.select(seen, whole, F32(0.0))
        factor = e.select(whole > F32(0.0), e.exp2(reference - top) * e.rcp(whole), F32(0.0))
        for quarter in fx.range_constexpr(4):
            if fx.const_expr(quarter > 0):
                gpu.barrier()
            _write_rows(rows_at, place, g, _results(acc, shift, factor, quarter))
            gpu.barrier()
            _emit_rows(cfg, rows_at, thread, tokens, part, steps, dtype, quarter)

    @flyc.jit
    def launch(
        q8_at: fx.Pointer,
        meta_at: fx.Int64,
        cache_at: fx.Int64,
        table_at: fx.Int64,
        lens_at: fx.Int64,
        starts_at: fx.Int64,
        out_at: fx.Int64,
        sums_at: fx.Int64,
        sinks_at: fx.Int64,
        width: fx.Int32,
        splits: fx.Int32,
        batch: fx.Int32,
        rows: fx.Int32,
        groups: fx.Int32,
        row_stride: fx.Int32,
        head_stride: fx.Int32,
        lse_stride: fx.Int32,
        stream: fx.Stream = fx.Stream(None),
    ):
        decode(
            q8_at, meta_at, cache_at, table_at, lens_at, starts_at, out_at, sums_at, sinks_at,
            width, splits, batch, rows, groups, row_stride, head_stride, lse_stride,
        ).launch(grid=(splits, hk, batch * groups), block=(64 * waves, 1, 1), stream=stream)  # fmt: skip

    return launch


def _merge_sums(waves: int, sums: Any, c: Any) -> tuple[Any, Any]:
    """Over the waves of column c: the largest reference, and the whole sum at it."""
    parts = [(sums + (I32(w * COLUMNS) + c) * I32(2)).load(T.f32x2) for w in range(waves)]
    parts = [fx.Vector(p, (2,), F32) for p in parts]
    top = parts[0][0]
    for p in parts[1:]:
        top = fx.arith.maxnumf(top, p[0])
    whole = F32(0.0)
    for p in parts:
        whole = whole + e.exp2(p[0] - top) * p[1]
    return top, whole


def _results(acc: list, shift: Any, factor: Any, quarter: int) -> list:
    """This wave's share of output dims 32 g + 8 quarter + n, n = 0 .. 7."""
    low, high, added = factor * F32(2.0**24), factor * F32(2.0**20), shift * factor
    out = []
    for byte in range(4):
        both, upper = acc[2 * byte][quarter], acc[2 * byte + 1][quarter]
        out += [e.fma(both - upper, low, added), e.fma(upper, high, added)]
    return out


def _write_rows(rows: Any, place: Any, g: Any, results: list) -> None:
    """Eight dims of the lane's column to positions 8 g .. of its row in LDS."""
    for k in (0, 4):
        (rows + (place * I32(MERGE_PITCH) + g * I32(8) + I32(k))).store(e.vec(results[k : k + 4], F32))


def _out_row(cfg: DecodeConfig, column: Any) -> Any:
    """Row of a column's output, counted from the workgroup's first: query token by query token, then heads."""
    token = column // I32(cfg.gqa) if cfg.multi else I32(0)
    return token * I32(cfg.gqa * cfg.num_kv_heads) + column - token * I32(cfg.gqa)


def _emit_rows(
    cfg: DecodeConfig, rows: Any, thread: Any, tokens: Any, part: Any, steps: tuple, dtype: Any, quarter: int
) -> None:
    """Sum the waves' shares, four dims per thread, and store them as ``dtype``.

    steps: bytes from one query token to the next, from one head to the next, and to the first.
    """
    per_token, per_head, first = steps
    size = dtype.width // 8
    for start in range(0, 8 * COLUMNS, 64 * cfg.waves):
        unit = thread + I32(start)
        column, quad = e.shr(unit, 3) & I32(COLUMNS - 1), unit & I32(7)
        total = None
        for w in range(cfg.waves):
            at = (I32(w * COLUMNS) + column) * I32(MERGE_PITCH) + quad * I32(4)
            share = fx.Vector((rows + at).load(T.f32x4), (4,), F32)
            total = share if total is None else total + share
        dim = e.shr(quad, 1) * I32(32) + (quad & I32(1)) * I32(4) + I32(8 * quarter)
        token = column // I32(cfg.gqa) if cfg.multi else I32(0)
        head = column - token * I32(cfg.gqa)
        at = token * per_token + head * per_head + first + dim * I32(size)
        mine = (column < tokens * I32(cfg.gqa)) & (unit < I32(8 * COLUMNS))
        result = total if dtype is F32 else e.vec([total[i].to(dtype) for i in range(4)], dtype)
        e.store(part, e.select(mine, at, I32(-1)), result)
