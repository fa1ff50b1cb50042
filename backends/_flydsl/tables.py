"""The key codebooks as int8 tables for byte permutes and integer matrix instructions. No flydsl here.

c(i) = beta * ((i - centre) + r(i) / 128) in units of sigma, centre half the largest code, r an odd integer table. See
docs/flydsl_decode.md, "Keys".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from ...codebook import lloyd_max

__all__ = ["QUERY_LIMIT", "KeyTables", "key_tables", "permute_b32"]

RESIDUAL_STEPS: Final = 128
QUERY_LIMIT: Final = 127 * 128
"""Largest magnitude of a fixed-point query coordinate: 128 * h + l with int8 h and |l| <= 64."""

DROPPED: Final = 0.0064
"""Weight of the dropped product of l and r: rms of l over the query's rms, for a Gaussian query of 128 dims."""


@dataclass(frozen=True, slots=True)
class KeyTables:
    """beta: value of one code step, in sigma. residual: r of every code. low, high: the bytes of the permute tables,
    entries 0..7 each: at 4 bits permute(low, i) + permute(high, i ^ 8) = r(i) as int8 sums; at 3 bits low is r, and
    there is no high."""

    beta: float
    residual: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def centre(self) -> float:
        """The code, between two, whose value is zero."""
        return (len(self.residual) - 1) / 2

    def words(self) -> tuple[int, ...]:
        """(low 0..3, low 4..7, high 0..3, high 4..7) as unsigned 32-bit words."""
        data = np.array([*self.low, *self.high], np.int8).view(np.uint32)
        return tuple(int(x) for x in data)


def permute_b32(table: tuple[int, ...], selector: int) -> int:
    """What v_perm_b32 answers for one selector byte 0..15 over an 8-byte table, as int8."""
    if selector < 8:
        return table[selector]
    if selector < 12:  # the sign of bytes 1, 3, 5, 7
        return -1 if table[2 * (selector - 8) + 1] < 0 else 0
    return 0 if selector == 12 else -1


def _split(residual: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tables whose sum is ``residual``: what one answers outside its own half is taken off the other's entries.

    Answers for selectors 8..11 are signs of entries 1, 3, 5, 7, and entry k of one table is corrected by the
    other's answer for 8 + k: so from entry 7 down, everything that is needed is known.
    """
    low, high = [0] * 8, [0] * 8
    for k in (7, 6, 5, 4, 3, 2, 1, 0):
        low[k], high[k] = (
            residual[k] - permute_b32(tuple(high), 8 + k),
            residual[8 + k] - permute_b32(tuple(low), 8 + k),
        )
    return tuple(low), tuple(high)


@cache
def key_tables(bits: int = 4) -> KeyTables:
    """Tables for codes of 3 or 4 bits: beta minimises the expected squared error of a product with a query."""
    c = lloyd_max(bits)
    edges = np.concatenate([[-np.inf], (c[1:] + c[:-1]) / 2, [np.inf]])
    cdf = np.array([0.5 * (1 + math.erf(x / math.sqrt(2))) for x in edges])
    weight = np.diff(cdf)
    i = np.arange(1 << bits) - ((1 << bits) - 1) / 2
    best: tuple[float, float, tuple[int, ...]] | None = None
    for beta in np.linspace(*{4: (0.30, 0.35), 3: (0.50, 0.65)}[bits], 5001):
        r = np.rint((c - beta * i) * RESIDUAL_STEPS / beta)
        if np.abs(r).max() > 126:  # one step of room for the correction by the other table
            continue
        rho = beta / RESIDUAL_STEPS * r
        error = float((weight * ((c - beta * i - rho) ** 2 + (DROPPED * rho) ** 2)).sum())
        if best is None or error < best[0]:
            best = (error, float(beta), tuple(int(x) for x in r))
    assert best is not None
    _, beta, residual = best
    if bits == 3:
        return KeyTables(beta, residual, residual, ())
    low, high = _split(residual)
    tables = KeyTables(beta, residual, low, high)
    for code in range(16):
        assert permute_b32(low, code) + permute_b32(high, code ^ 8) == residual[code]
    return tables
