"""What a decode kernel must know about one layout on one target, as plain integers worked out on the host.

The kernels hold a tile of tokens in registers exactly as the matrix instruction wants it. Each lane owns some
codes of a row ("units" of eight 3-bit or 4-bit codes, or four FP8 bytes), and the dims are numbered in the order in
which the units come out of the decoder, not in memory order. :class:`KeyTile` and :class:`ValueTile` say which lane
owns which bytes and, for every column of the matrix product, which dim it is.

Two ways to read a row:

* ``vector``: rows are aligned to 4 bytes and a unit fills whole words. A row is cut into chunks of
  ``lanes * vec`` words; in each chunk a lane reads ``vec`` words, one vector load.
* ``run``: anything else (3-bit codes, rows at 2-byte addresses). A lane reads the aligned words that cover its own
  contiguous run of bytes and shifts them into place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

import numpy as np

from ...codebook import cell_probabilities, lloyd_max, rotation
from ...layouts import Layout
from ...spec import NormMeaning, SpecError
from .device import FP8_SCALE, pair_order

__all__ = [
    "GROUP",
    "MAX_ALIGNMENT",
    "ByteTable",
    "CentroidTable",
    "KeyTile",
    "RowTile",
    "ValueTile",
    "alignment",
    "byte_table",
    "centroid_table",
    "corrects_norm",
    "query_matrix",
]

GROUP = 16
"""Block sizes are multiples of this, so a group of this many tokens never crosses a block."""

KEY_LANES = 4
MAX_ALIGNMENT = 16
"""Bytes: the widest vector."""
WORD = 4
CODES = 8  # 3-bit or 4-bit codes in a unit


def alignment(layout: Layout, field: str, cache_alignment: int = MAX_ALIGNMENT) -> int:
    """Bytes that every vector of ``field`` is aligned to, at most 16, in a cache aligned to ``cache_alignment``."""
    place = layout.place(field)
    return gcd(cache_alignment, layout.block_stride, place.base, place.token_stride, place.head_stride)


def _vector_width(words: int, lanes: int, align: int) -> int:
    """Words per lane and load: the widest that alignment allows and that reads no more padding than single words."""

    def padded(vec: int) -> int:
        return -(-words // (lanes * vec)) * lanes * vec

    return max(v for v in (1, 2, 4) if v * WORD <= align and padded(v) == padded(1))


@dataclass(frozen=True, slots=True)
class RowTile:
    """bits: per code. dim: codes in a row. lanes: lanes that share a row. unit: codes decoded at once.

    units: units per lane. vec: words per vector load, 0 where lanes read runs. align: of the rows, in bytes.
    """

    bits: int
    dim: int
    lanes: int
    unit: int
    units: int
    vec: int
    align: int

    @classmethod
    def of(cls, bits: int, dim: int, lanes: int, align: int, vector: bool = True) -> Any:
        unit = 4 if bits == 8 else CODES
        if vector and bits in (4, 8) and align >= WORD and dim * bits % 32 == 0:
            words = dim * bits // 32
            vec = _vector_width(words, lanes, align)
            units = -(-words // (lanes * vec)) * vec
        else:
            vec = 0
            units = -(-dim // (lanes * unit))
        return cls(bits, dim, lanes, unit, units, vec, align)

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return (self.dim * self.bits + 7) // 8

    @property
    def slack(self) -> int:
        """Most bytes that lie before a lane's run in the first word it reads; 0 where lanes read vectors."""
        return 0 if self.vec else WORD - gcd(self.align, self.units * self.unit * self.bits // 8, WORD)

    @property
    def words(self) -> int:
        """Words a lane reads."""
        if self.vec:
            return self.units
        return -(-(self.units * self.unit * self.bits // 8 + self.slack) // WORD)

    @property
    def constants(self) -> tuple[int, ...]:
        """(bits, lanes, unit, units, vec, slack, nbytes, words), as kernels take it."""
        return (self.bits, self.lanes, self.unit, self.units, self.vec, self.slack, self.nbytes, self.words)

    def code(self, unit: int, lane: int, position: int) -> int:
        """Number in memory of a code; at least ``dim`` if there is none."""
        if self.vec:
            chunk, i = divmod(unit, self.vec)
            return ((chunk * self.lanes + lane) * self.vec + i) * self.unit + position
        return (lane * self.units + unit) * self.unit + position


@dataclass(frozen=True, slots=True)
class KeyTile(RowTile):
    """Columns of the product over keys: unit by unit, in each unit ``lanes * unit`` of them."""

    @property
    def columns(self) -> int:
        """Columns of the permuted query, padding included."""
        return self.units * self.lanes * self.unit

    def dims(self, target: str, width: int, int8: bool = False) -> list[int]:
        """Dim of every column, -1 for padding. width: consecutive columns in a lane (the operand's k width).

        int8: codes are decoded to bytes, which come out in the order of memory."""
        order = tuple(range(self.unit)) if int8 else pair_order(target, self.unit)
        width = min(width, self.unit)
        span = self.lanes * self.unit
        found = []
        for unit in range(self.units):
            for column in range(span):
                outer, rest = divmod(column, self.lanes * width)
                lane, inner = divmod(rest, width)
                code = self.code(unit, lane, order[outer * width + inner])
                found.append(code if code < self.dim else -1)
        return found


@dataclass(frozen=True, slots=True)
class ValueTile(RowTile):
    """Rows of the product over values: unit by unit, in each unit ``unit * lanes`` of them, lanes fastest."""

    @property
    def rows(self) -> int:
        """Rows of the accumulator, padding included."""
        return self.units * self.lanes * self.unit

    def part_words(self, paired: bool) -> int:
        """Words of a partial result, two fp16 numbers each: of neighbouring units (paired) or of neighbouring rows."""
        if paired:
            return -(-self.units // 2) * self.lanes * self.unit
        return self.rows // 2

    def dims(self) -> list[int]:
        """Dim of every row; at least ``dim`` for padding."""
        span = self.lanes * self.unit
        return [self.code(u, r % self.lanes, r // self.lanes) for u in range(self.units) for r in range(span)]


@dataclass(frozen=True, slots=True)
class CentroidTable:
    """Eight fp16 centroids: the positive half of 4-bit ones, or all 3-bit ones.

    planes: their bytes, as device functions take them. values: the numbers. factor: what they must be multiplied by.
    square_factor: the same for fp16 squares of them.
    """

    planes: tuple[int, ...]
    values: Any
    factor: float
    square_factor: float


def _byte_words(numbers: Any) -> tuple[int, ...]:
    """The low bytes of integers as words, four in each, the first lowest; int32."""
    rows = np.asarray(numbers).reshape(-1, 4) & 255
    return tuple(int(word) for word in rows.astype(np.uint8).view("<i4").ravel())


def _rounding(c: Any, weight: Any, stretch: float) -> tuple[float, Any, float, float]:
    """(cost, fp16 table, factor, square factor) of the centroids ``c`` stretched before they are rounded."""
    table = (c * stretch).astype(np.float16)
    t = table.astype(np.float64)
    squares = (table * table).astype(np.float64)
    factor = (weight * c * t).sum() / (weight * t * t).sum()  # least squares: no bias in the length of a key
    square_factor = (weight * c * c).sum() / (weight * squares).sum()
    cost = (weight * (factor * t - c) ** 2).sum() / (weight * c * c).sum()
    cost += (weight * (square_factor * squares - c * c) ** 2).sum() / (weight * c**4).sum()
    return float(cost), table, float(factor), float(square_factor)


@cache
def _best_rounding(bits: int) -> tuple[Any, float, float]:
    """(fp16 table, factor, square factor) for the unit normal; see :func:`centroid_table`."""
    c = lloyd_max(bits)
    weight = cell_probabilities(c, None)
    if bits == 4:
        c, weight = c[8:], weight[8:]
    best = min((_rounding(c, weight, 0.75 * 2 ** (i / 1024)) for i in range(1024)), key=lambda r: r[0])
    return best[1:]


def centroid_table(head_size: int, bits: int) -> CentroidTable:
    """The table of the decode kernel, in [1/8, 4).

    Rounding a codebook to fp16 is no noise: every key shares the same few errors, and they add up to a factor on all
    scores. So of a thousand stretches the one is taken at which the rounded codebook is closest to a multiple of the
    exact one, weighted by how often each code occurs; the remaining factor is folded into the softmax scale.
    """
    table, factor, square_factor = _best_rounding(bits)
    words = table.view(np.uint16).astype(np.int64)
    size = head_size**-0.5
    planes = _byte_words(words >> 8) + _byte_words(words)
    return CentroidTable(planes, table, factor * size, square_factor * size**2)


@dataclass(frozen=True, slots=True)
class ByteTable:
    """Centroids as int8 numbers: (coarse + fine / base + offset) * factor.

    words: one or two planes of bytes, each as eight (3-bit codes) or twice eight (4-bit codes: below 8, above 7), all
    of which but coarse ones of 3-bit codes are below 128. Two planes are coarse and fine. One plane of 3 bits is
    coarse, and fine is 0. With one plane of 4 bits the coarse number is the code itself and the plane is fine. values:
    the numbers, offset included, ascending.

    base: of the query too, which is base * upper + lower. Products with lower leave fine out: for them a number is
    stretch * (coarse + lower_offset), on average or, where coarse numbers are codes, at best. So what is left is

        base * sum(coarse * upper) + sum(coarse * lower') + sum(fine * upper)
            + base * offset * sum(upper) + lower_offset * sum(lower'),    lower' = stretch * lower
    """

    words: tuple[int, ...]
    values: Any
    base: int
    offset: float
    lower_offset: float
    stretch: float
    factor: float


BASE = 128
"""Of queries and numbers, unless coarse numbers are the codes."""


@cache
def _best_integers(bits: int, planes: int) -> tuple[Any, float]:
    """(n, factor) for the positive half of the unit normal's codebook, n + 1/2 standing for a centroid; see
    :func:`byte_table`."""
    c = lloyd_max(bits)
    weight = cell_probabilities(c, None)
    half = len(c) // 2
    c, weight = c[half:], weight[half:]
    most = (128 if bits == 3 else 64) * BASE ** (planes - 1)

    def rounded(top: float) -> tuple[float, Any, float]:
        n = np.clip(np.round(c * (top / c[-1]) - 0.5), 0, most - 1)
        t = n + 0.5
        factor = (weight * c * t).sum() / (weight * t * t).sum()
        return float((weight * (factor * t - c) ** 2).sum()), n.astype(np.int64), float(factor)

    return min((rounded(most * (0.5 + i / 2048)) for i in range(1025)), key=lambda r: r[0])[1:]


_LOWER = 0.29 / 40
"""Usual size of lower against upper: it spans one step of upper, whose largest number is 127."""


@cache
def _best_residuals() -> tuple[Any, int, float, float]:
    """(n, base, stretch, factor) for the positive half of the unit normal's 4-bit codebook, where
    i + 1/2 + (n + 1/2) / base stands for centroid 8 + i; see :func:`byte_table`."""
    c = lloyd_max(4)
    weight = cell_probabilities(c, None)
    c, weight = c[8:], weight[8:]
    line = np.arange(8) + 0.5
    steps = np.linspace(0.27, 0.37, 1001)[:, None]  # how far codes are apart
    found = []
    for base in range(32, BASE):
        n = np.round((c / steps - line) * base - 0.5)
        rest = (n + 0.5) / base
        t = line + rest
        factor = (weight * c * t).sum(1) / (weight * t * t).sum(1)
        slope = (weight * rest * line).sum(1) / (weight * line**2).sum()
        lost = factor[:, None] * (rest - slope[:, None] * line)  # on lower
        cost = (weight * (factor[:, None] * t - c) ** 2).sum(1) + _LOWER**2 * (weight * lost**2).sum(1)
        cost[np.abs(n + 0.5).max(1) > 63.5] = np.inf
        i = int(cost.argmin())
        found.append((float(cost[i]), n[i].astype(np.int64), base, 1 + float(slope[i]), float(factor[i])))
    return min(found, key=lambda r: r[0])[1:]


def byte_table(head_size: int, bits: int, planes: int) -> ByteTable:
    """The table of the decode kernel's int8 route: of a thousand stretches the one at which the rounded codebook is
    closest to a multiple of the exact one. One plane leaves 0.07 % of a key's length with 3 bits (rounding the
    codebook to bf16: 0.18 %), two planes less than 0.01 %.

    With one plane of 4 bits, base is searched for as well: the larger it is, the finer are the numbers, until what the
    codes are off no longer fits into bytes. 0.05 % of a key's length are left. For lower the codebook is a straight
    line, 10 % of a key's length off; but lower is a 140th of a normal query, so that is 0.07 % of a score. Beside one
    number that dwarfs the rest of a query it is more: up to 0.18 % with head size 64, 0.25 % with 128, 0.35 % with 256,
    where keys rounded to bf16 always make 0.17 %.
    """
    size = head_size**-0.5
    if (bits, planes) == (4, 1):
        n, base, stretch, factor = _best_residuals()
        n = np.concatenate([~n[::-1], n])
        values = np.arange(16) - 7.5 + (n + 0.5) / base
        words = _byte_words(n + 64)
        return ByteTable(words, values, base, -7.5 - 63.5 / base, -7.5, stretch, factor * size)
    if planes not in (1, 2):
        raise SpecError("planes", planes, "1 or 2")
    n, factor = _best_integers(bits, planes)
    n = np.concatenate([~n[::-1], n])
    if planes == 1:
        return ByteTable(_byte_words(n), n + 0.5, BASE, 0.5, 0.5, 1.0, factor * size)
    shifted = n + (0 if bits == 3 else 64 * BASE)  # 4 bits: not negative
    words = _byte_words(shifted // BASE) + _byte_words(shifted % BASE)
    offset = 0.5 / BASE - (0 if bits == 3 else 64)
    return ByteTable(words, (n + 0.5) / BASE, BASE, offset, offset + 63.5 / BASE, 1.0, factor * BASE * size)


def query_matrix(
    layout: Layout, tile: KeyTile, target: str, width: int, planes: int = 0, fp8_scale: float = FP8_SCALE
) -> tuple[Any, float]:
    """(matrix [columns, D] of -1, 0 and 1, factor): permuted query = matrix @ query, times the factor in the score.

    The factor holds everything that is the same for all scores: 1/sqrt(D) of the rotation, and the scale of the
    key numbers (fp8_scale: of FP8 ones).
    """
    dims = tile.dims(target, width, planes > 0)
    if layout.preset.fp8_keys:
        full, factor = np.eye(layout.head_size), fp8_scale
    else:
        full = np.sign(rotation(layout.head_size))
        size, bits = layout.head_size, layout.preset.key_bits
        factor = byte_table(size, bits, planes).factor if planes else centroid_table(size, bits).factor
        factor /= size**0.5
    rows = [full[d] if d >= 0 else np.zeros(layout.head_size) for d in dims]
    return np.stack(rows), factor


def corrects_norm(layout: Layout) -> bool:
    """True if the reader must renormalise the centroid vector."""
    return layout.preset.norm_correction and layout.norm_meaning is NormMeaning.RAW
