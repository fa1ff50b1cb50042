"""Shared by the simulator's tests: skip without Triton, operand pools, exact scalar definitions."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="the simulator's tests assemble and compile with Triton")
pytest.importorskip("tinygrad", reason="the simulator decodes with tinygrad's AMD tables")
ml_dtypes = pytest.importorskip("ml_dtypes", reason="independent definitions of bf16 and fp8")

ARCHS = ("gfx942", "gfx950")
U32 = np.uint32

_F32_EDGES = [
    0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x00000001, 0x80000001,
    0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F000000, 0x3FC00000, 0x40200000, 0x477FE000, 0x33800000,
]  # fmt: skip
_U32_EDGES = [0, 1, 2, 31, 32, 33, 63, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000,
              0x80000001, 0xFFFFFFFE, 0xFFFFFFFF]  # fmt: skip
_F16_EDGES = [0x0000, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF,
              0x3800, 0x3E00]  # fmt: skip


def pool(kind: str, seed: int, n: int = 64) -> np.ndarray:
    """n dwords: edge values in random places, random ones elsewhere."""
    rng = np.random.default_rng(seed)
    if kind == "f":
        x = (rng.standard_normal(n) * np.exp2(rng.integers(-20, 20, n))).astype(np.float32).view(U32)
        edges = _F32_EDGES
    elif kind == "g":  # moderate fp32
        x, edges = (
            (rng.standard_normal(n) * 8).astype(np.float32).view(U32),
            [0x00000000, 0x80000000, 0x3F800000],
        )
    elif kind == "h":
        x = (
            (rng.standard_normal(n) * np.exp2(rng.integers(-8, 8, n)))
            .astype(np.float16)
            .view(np.uint16)
            .astype(U32)
        )
        edges = _F16_EDGES
    elif kind == "p":  # two fp16
        a, b = pool("h", seed, n), pool("h", seed + 1, n)
        return a | (b << 16)
    elif kind == "s":  # shift amounts and field positions
        return rng.integers(0, 64, n).astype(U32)
    else:
        x, edges = rng.integers(0, 2**32, n).astype(U32), _U32_EDGES
    k = rng.permutation(n)[: min(len(edges), n // 2)]
    x[k] = rng.permutation(np.array(edges, U32))[: len(k)]
    return x


def f32(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0]


def b32(value: float) -> int:
    """fp32 bits, rounded to nearest even from a Python float."""
    with np.errstate(all="ignore"):
        return int(np.array([value], np.float64).astype(np.float32).view(U32)[0])


def f16(bits: int) -> float:
    return float(np.array([bits & 0xFFFF], np.uint16).view(np.float16)[0])


def round_fraction(x: Fraction, mant: int, emin: int, emax: int) -> float:
    """Exact rational to a binary format, round to nearest even: the definition, digit by digit."""
    if x == 0:
        return 0.0
    sign, x = (-1, -x) if x < 0 else (1, x)
    e = x.numerator.bit_length() - x.denominator.bit_length()
    while Fraction(2) ** e > x:
        e -= 1
    while Fraction(2) ** (e + 1) <= x:
        e += 1
    q = Fraction(2) ** (max(e, emin) - mant)
    n, rest = divmod(x, q)
    if rest * 2 > q or (rest * 2 == q and n % 2 == 1):
        n += 1
    r = n * q
    if r >= Fraction(2) ** (emax + 1):
        return sign * math.inf
    return sign * float(r)


def fma_exact(a: float, b: float, c: float, mant: int = 23, emin: int = -126, emax: int = 127) -> float:
    """a * b + c rounded once."""
    if not all(map(math.isfinite, (a, b, c))):
        with np.errstate(all="ignore"):
            return float(np.float64(a) * np.float64(b) + np.float64(c))
    x = Fraction(a) * Fraction(b) + Fraction(c)
    if x == 0:
        with np.errstate(all="ignore"):
            return float(np.float64(a) * np.float64(b) + np.float64(c)) if a * b == 0 and c == 0 else 0.0
    return round_fraction(x, mant, emin, emax)


def same_float(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Bits equal, or both NaN."""
    g, w = np.asarray(got), np.asarray(want)
    fg, fw = (x.view({4: np.float32, 2: np.float16}[x.dtype.itemsize]) for x in (g, w))
    return (g == w) | (np.isnan(fg) & np.isnan(fw))
