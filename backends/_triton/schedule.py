"""Shares of unequal sequences: how many pieces each sequence of a batch is cut into, worked out on the device.

The host knows only how wide the block table is, and the grid of a captured graph must not change. So the grid has room
for P pieces, P fixed by the shape, and the batch is cut each time: t tiles to a piece, the same for all sequences, t as
small as it may be for all pieces to find room. Sequence b of n_b tiles gets ceil(n_b / t). A batch of equal lengths is
cut as if each sequence had P / B pieces.

Who cuts it. One program of the prepare kernel (cut_batch), which writes a schedule; or, of up to 64 sequences where
decode works alone, every program of decode and reduce that wants to know about a piece or a sequence (piece_alone,
pieces_alone): the same pieces, and nothing is written.

t lies between ceil(sum n / P) and ceil(sum n / (P - B)), where every sequence may have a piece that is not full; of
CANDIDATES values in between the first that fits is taken. It is more where a sequence would get more than MOST pieces.

The schedule, int32 [4 P + 2 B] at a multiple of 16 bytes: (sequence, first piece of that sequence, its length, t) of
every piece, sequence -1 where there is none, then (first piece, number of pieces) of every sequence.

Sizes. Where not all pieces run at once, those that run last should be small: the device is idle from when the first of
its programs finds no further piece. So with CLASSES > 1 piece p is of class p % CLASSES; class 0 is launched first and
takes (64 + skew) / 64 of t tiles, the last class (64 - skew) / 64, those between them in equal steps. What the classes
of a sequence leave over falls to its last piece, which is at most t tiles long if it is not of class 0.

Work: one pass over the lengths of 128 sequences, three if there are more. The sums and the prefix sums are what takes
time: longer than rotating a tile of queries, which other programs do meanwhile, so there are few of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import gdc_launch_dependents, two_words

__all__ = [
    "ALONE_BATCHES",
    "cut_batch",
    "piece_alone",
    "piece_of",
    "piece_range",
    "piece_taken",
    "pieces_alone",
    "pieces_of",
    "schedule_size",
    "tiles_taken",
    "tokens_seen",
    "visible_tiles",
]

ALONE_BATCHES = (32, 64)
"""Sequences that programs can cut each on its own, kernel by kernel."""

_CANDIDATES = tl.constexpr(16)
_AT_ONCE = tl.constexpr(128)  # sequences
_ENTRIES = tl.constexpr(8)  # pieces of a sequence written at once


def schedule_size(pieces: int, batch: int) -> int:
    """Numbers in a schedule."""
    return 4 * pieces + 2 * batch


@triton.jit
def visible_tiles(
    seq_len,
    window,
    T: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Tiles of T tokens that the last token of a sequence sees, counted from the group of 16 in which they begin.

    None where their number overflows, as decode finds without a schedule: such a length is no length of a sequence, but
    a negative number of pieces would be written in front of the schedule.
    """
    end = tl.maximum(seq_len, 0)
    if WINDOW:
        end = end - tl.maximum(seq_len - window, 0) // 16 * 16
    return tl.maximum((end + T - 1) // T, 0)


@triton.jit
def piece_of(
    schedule_ptr,  # [4 P + 2 B] int32
    piece,
):
    """(sequence or -1, number of the piece in its sequence, length of the sequence, tiles to a piece)."""
    sequence, first = _pair(schedule_ptr, 2 * piece)
    seq_len, share = _pair(schedule_ptr, 2 * piece + 1)
    return sequence, piece - first, seq_len, share


@triton.jit
def _pair(
    schedule_ptr,  # [4 P + 2 B] int32
    number,  # of the pair
):
    """Two neighbours in one read."""
    return two_words(tl.load(schedule_ptr.to(tl.pointer_type(tl.int64)) + number))


@triton.jit
def _pairs(
    a,  # tile, int32
    b,
):
    """The other way round: fewer writes, which far apart are what a schedule costs."""
    return (a.to(tl.int64) & 0xFFFFFFFF) | (b.to(tl.int64) << 32)


@triton.jit
def piece_taken(
    program,
    programs,  # a multiple of CLASSES
    CLASSES: tl.constexpr,
):
    """The piece that a program takes, 0 to programs - 1: those of class 0 first."""
    if CLASSES > 1:
        each = programs // CLASSES
        of_class = 0
        for i in tl.static_range(1, CLASSES):  # a division by a number that is not known takes longer
            of_class += (program >= i * each).to(tl.int32)
        program = (program - of_class * each) * CLASSES + of_class
    return program


@triton.jit
def piece_range(
    number,  # of the piece in its sequence
    piece,
    share,  # tiles to a piece
    tiles,  # of the sequence
    seen,  # of these, or of a few more, those that the columns of the program see
    skew,
    CLASSES: tl.constexpr,
):
    """(first tile, past the last tile) of a piece, counted from the first that the columns see; empty where the pieces
    before it took all."""
    low = share * number
    high = low + share
    if CLASSES > 1:
        base = _lead(piece - number, skew, CLASSES)
        low += share * (_lead(piece, skew, CLASSES) - base) >> 6
        high += share * (_lead(piece + 1, skew, CLASSES) - base) >> 6
    high = tl.where((number + 1) * share >= tiles, seen, high)  # the last one
    return low, tl.minimum(high, seen)


@triton.jit
def tokens_seen(
    seq_len,
    query_len,
    first_query,  # of the columns of a tile
    last_query,
    window,
    T: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """What the columns of a tile see: (first token, past the last one, where tiles begin, first token of the last group
    of 16, tiles)."""
    end = tl.maximum(seq_len - query_len + last_query + 1, 0)
    begin = 0
    if WINDOW:
        begin = tl.maximum(seq_len - query_len + first_query + 1 - window, 0)
    start = begin // 16 * 16
    last_group = tl.maximum(end - 1, 0) // 16 * 16
    tiles = (tl.maximum(end - start, 0) + T - 1) // T
    return begin, end, start, last_group, tiles


@triton.jit
def tiles_taken(
    split,  # or the number of the piece in its sequence
    part,  # split or piece
    splits,
    share,  # tiles to a piece, if CUT
    min_tiles,  # to a split, if not
    seq_len,
    tiles,  # that the columns see
    window,
    skew,
    T: tl.constexpr,
    MULTI: tl.constexpr,
    WINDOW: tl.constexpr,
    CUT: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """(first tile, past the last tile) of a program, counted from the first that its columns see."""
    if CUT:
        # what the last query sees: the others may see fewer tiles at the end, or one more in front
        of_sequence = visible_tiles(seq_len, window, T, WINDOW)
        seen = tiles if MULTI else of_sequence
        low, high = piece_range(split, part, share, of_sequence, seen, skew, CLASSES)
    else:
        each = tl.maximum((tiles + splits - 1) // splits, min_tiles)
        low = split * each
        high = tl.minimum(low + each, tiles)
    return low, high


@triton.jit
def _lead(
    piece,
    skew,  # at most 31, or products with it overflow
    CLASSES: tl.constexpr,
):
    """By how much the pieces before this one, from the last of class 0 on, exceed equal shares; in 64ths of one."""
    c = piece % CLASSES
    return skew * c * (CLASSES - c) // (CLASSES - 1)


@triton.jit
def pieces_of(
    schedule_ptr,  # [4 P + 2 B] int32
    sequence,
    pieces,  # P
):
    """(first piece, number of pieces) of a sequence."""
    return _pair(schedule_ptr, 2 * pieces + sequence)


@triton.jit
def _lengths(
    seq_lens_ptr,  # [B] int32
    first,
    batch,
    window,
    AT_ONCE: tl.constexpr,
    T: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Lengths of AT_ONCE sequences and their tiles, 0 past the batch."""
    b = first + tl.arange(0, AT_ONCE)
    lens = tl.load(seq_lens_ptr + b, b < batch, 0)
    return lens, visible_tiles(lens, window, T, WINDOW)


@triton.jit
def _sum_and_maximum(sum_a, most_a, sum_b, most_b):
    return sum_a + sum_b, tl.maximum(most_a, most_b)


@triton.jit
def _bounds(
    total,  # tiles of all sequences
    longest,  # of one
    batch,
    pieces,
    min_tiles,
    MOST: tl.constexpr,
):
    """The fewest tiles to a piece that may fit, and a number that does."""
    least = tl.maximum((total + pieces - 1) // pieces, min_tiles)
    least = tl.maximum(least, (longest + MOST - 1) // MOST)
    room = pieces - batch
    return least, tl.maximum((total + room - 1) // room, least)


@triton.jit
def _candidate(
    least,
    most,
    k,  # 0 to _CANDIDATES - 1
):
    """Tiles to a piece that are tried: the first is ``least``, the last ``most``."""
    return least + ((most - least) * k + _CANDIDATES - 2) // (_CANDIDATES - 1)


@triton.jit
def _pieces(
    tiles,
    share,
):
    """Pieces of ``share`` tiles."""
    return (tiles + share - 1) // share


@triton.jit
def _needed(
    tiles,  # [_AT_ONCE]
    tried,  # [_CANDIDATES] tiles to a piece
):
    """Pieces that the sequences need, for every candidate."""
    return tl.sum(_pieces(tiles[None, :], tried[:, None]), axis=1)


@triton.jit
def _write(
    schedule_ptr,
    first,  # sequence
    lens,  # [_AT_ONCE], of the sequences from there on
    tiles,  # [_AT_ONCE], likewise
    used,  # pieces of those before
    share,
    entries,  # at least the pieces of any sequence
    batch,
    pieces,
):
    """Write what belongs to these sequences; returns the pieces used so far."""
    pair_ptr = schedule_ptr.to(tl.pointer_type(tl.int64))
    i = tl.arange(0, _ENTRIES)
    two = tl.arange(0, 2)
    count = _pieces(tiles, share)
    ends = used + tl.cumsum(count, axis=0)
    at = ends - count
    b = first + tl.arange(0, _AT_ONCE)
    tl.store(pair_ptr + 2 * pieces + b, _pairs(at, count), b < batch)
    none = tl.zeros((_AT_ONCE, _ENTRIES), tl.int32)
    entry = tl.join(_pairs(b, at)[:, None] + none, _pairs(lens, lens * 0 + share)[:, None] + none)
    for done in range(0, entries, _ENTRIES):
        number = done + i[None, :] + none
        keep = number < count[:, None]
        place = 2 * (at[:, None] + number)
        tl.store(pair_ptr + place[:, :, None] + two[None, None, :], entry, keep[:, :, None])
    return tl.max(ends, axis=0)


@triton.jit
def cut_batch(
    seq_lens_ptr,  # [B] int32
    schedule_ptr,  # [4 P + 2 B] int32, written
    batch,  # B
    pieces,  # P > B
    window,
    min_tiles,  # fewest tiles to a piece
    MOST: tl.constexpr,  # pieces of a sequence
    T: tl.constexpr,
    WINDOW: tl.constexpr,
    EARLY: tl.constexpr,  # launch the dependent kernel before writing
):
    """Write the schedule; one program. The lengths of the first _AT_ONCE sequences stay in registers."""
    lens_ahead, ahead = _lengths(seq_lens_ptr, 0, batch, window, _AT_ONCE, T, WINDOW)
    total, longest = tl.reduce((ahead, ahead), 0, _sum_and_maximum)
    for first in range(_AT_ONCE, batch, _AT_ONCE):
        _, tiles = _lengths(seq_lens_ptr, first, batch, window, _AT_ONCE, T, WINDOW)
        more, longer = tl.reduce((tiles, tiles), 0, _sum_and_maximum)
        total += more
        longest = tl.maximum(longest, longer)
    least, most = _bounds(total, longest, batch, pieces, min_tiles, MOST)
    tried = _candidate(least, most, tl.arange(0, _CANDIDATES))
    needed = _needed(ahead, tried)
    for first in range(_AT_ONCE, batch, _AT_ONCE):
        _, tiles = _lengths(seq_lens_ptr, first, batch, window, _AT_ONCE, T, WINDOW)
        needed += _needed(tiles, tried)
    share = tl.min(tl.where(needed <= pieces, tried, most), axis=0)
    if EARLY:
        gdc_launch_dependents()

    entries = _pieces(longest, share)  # most of a sequence
    used = _write(schedule_ptr, 0, lens_ahead, ahead, 0, share, entries, batch, pieces)
    for first in range(_AT_ONCE, batch, _AT_ONCE):
        lens, tiles = _lengths(seq_lens_ptr, first, batch, window, _AT_ONCE, T, WINDOW)
        used = _write(schedule_ptr, first, lens, tiles, used, share, entries, batch, pieces)
    for first in range(used, pieces, _AT_ONCE):
        piece = first + tl.arange(0, _AT_ONCE)
        none = tl.full((_AT_ONCE,), -1, tl.int64)
        tl.store(schedule_ptr.to(tl.pointer_type(tl.int64)) + 2 * piece, none, piece < pieces)


@triton.jit
def _cut_alone(
    seq_lens_ptr,  # [B] int32
    batch,  # B, at most AT_ONCE
    pieces,  # P > B
    window,
    min_tiles,  # fewest tiles to a piece
    MOST: tl.constexpr,  # pieces of a sequence
    T: tl.constexpr,
    WINDOW: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """What cut_batch would write, without writing it: (tiles to a piece, lengths, pieces of each sequence), the last
    two [AT_ONCE]. Every program that wants a piece works it out for itself.

    The more tiles to a piece the fewer pieces, so the first candidate that fits is found by halving, if it is not the
    very first.
    """
    lens, signed = _lengths(seq_lens_ptr, 0, batch, window, AT_ONCE, T, WINDOW)
    tiles = signed.to(tl.uint32)  # divisions of unsigned numbers are shorter
    batch, pieces, min_tiles = batch.to(tl.uint32), pieces.to(tl.uint32), min_tiles.to(tl.uint32)
    total, longest = tl.sum(tiles, axis=0), tl.max(signed, axis=0).to(tl.uint32)
    least, most = _bounds(total, longest, batch, pieces, min_tiles, MOST)
    share = least
    count = _pieces(tiles, share)
    if tl.sum(count, axis=0) > pieces:  # not where lengths are alike
        low = tl.full((), 1, tl.uint32)
        high = tl.full((), _CANDIDATES - 1, tl.uint32)  # this one fits
        tl.static_assert(_CANDIDATES == 16)
        for _step in tl.static_range(4):
            middle = (low + high) // 2
            fits = tl.sum(_pieces(tiles, _candidate(least, most, middle)), axis=0) <= pieces
            low = tl.where(fits, low, middle + 1)
            high = tl.where(fits, middle, high)
        share = _candidate(least, most, high)
        count = _pieces(tiles, share)
    return share.to(tl.int32), lens, count.to(tl.int32)


@triton.jit
def piece_alone(
    seq_lens_ptr, piece, batch, pieces, window, min_tiles,
    MOST: tl.constexpr, T: tl.constexpr, WINDOW: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """As :func:`piece_of`, without a schedule."""
    share, lens, count = _cut_alone(seq_lens_ptr, batch, pieces, window, min_tiles, MOST, T, WINDOW, AT_ONCE)
    ends = tl.cumsum(count, axis=0)
    before = ends <= piece
    sequence = tl.sum(before.to(tl.int32), axis=0)
    first = tl.max(tl.where(before, ends, 0), axis=0)
    seq_len = tl.sum(tl.where(tl.arange(0, AT_ONCE) == sequence, lens, 0), axis=0)
    return tl.where(sequence < AT_ONCE, sequence, -1), piece - first, seq_len, share


@triton.jit
def pieces_alone(
    seq_lens_ptr, sequence, batch, pieces, window, min_tiles,
    MOST: tl.constexpr, T: tl.constexpr, WINDOW: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """As :func:`pieces_of`, without a schedule."""
    _, _, count = _cut_alone(seq_lens_ptr, batch, pieces, window, min_tiles, MOST, T, WINDOW, AT_ONCE)
    b = tl.arange(0, AT_ONCE)
    first = tl.sum(tl.where(b < sequence, count, 0), axis=0)
    return first, tl.sum(tl.where(b == sequence, count, 0), axis=0)
