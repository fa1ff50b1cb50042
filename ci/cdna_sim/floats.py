"""Number formats and rounding: fp32/fp16/bf16/fp8 conversions, fused multiply-add, min/max rules.

All arithmetic is done in formats in which it is exact or nearly so, then rounded once. Sources: IEEE 754-2019; OCP
8-bit floating point specification (E4M3FN, E5M2; gfx950); the FNUZ variants of CDNA3 (bias one larger, no infinity,
no negative zero, 0x80 is NaN; gfx942); CDNA3/CDNA4 ISA, chapter on VALU for the NaN rules of min/max/med3.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
F32, F64, F16, U32, U64, I32, I64, U16, U8 = (
    np.float32, np.float64, np.float16, np.uint32, np.uint64, np.int32, np.int64, np.uint16, np.uint8,
)  # fmt: skip


def round_to_odd_sum(p: Array, c: Array) -> Array:
    """p + c in fp64 rounded to odd, so that a later rounding to a narrower format is a single one."""
    s = p + c
    with np.errstate(all="ignore"):
        bb = s - p
        err = (p - (s - bb)) + (c - bb)
    bits = s.view(I64).copy()
    fix = np.isfinite(s) & np.isfinite(err) & (err != 0) & ((bits & 1) == 0)
    if fix.any():
        away = (err > 0) == (s > 0)
        bits = np.where(fix, np.where(away, bits + 1, bits - 1), bits)
    return bits.view(F64)


def fma32(a: Any, b: Any, c: Any) -> Array:
    """Fused multiply-add of fp32, rounded once to nearest even."""
    p = np.multiply(a, b, dtype=F64)
    c64 = np.asarray(c, F64)
    s = np.asarray(p + c64)
    low = s.view(U64) & np.uint64(0x1FFFFFFF)
    risky = (low == 0x10000000) | (np.abs(s) < 2.0**-125)
    if risky.any():
        s = round_to_odd_sum(np.broadcast_to(p, s.shape), np.broadcast_to(c64, s.shape))
    return s.astype(F32)


def fma16(a: Any, b: Any, c: Any) -> Array:
    """Fused multiply-add of fp16, rounded once to nearest even."""
    p = np.multiply(a, b, dtype=F64)
    s = round_to_odd_sum(np.asarray(p), np.broadcast_to(np.asarray(c, F64), p.shape))
    return f64_to_f16(s)


def fma64(a: Any, b: Any, c: Any) -> Array:
    """Fused multiply-add of fp64 through extended precision (x87: 64-bit mantissa; last bit not guaranteed)."""
    x = np.asarray(a, np.longdouble) * np.asarray(b, np.longdouble) + np.asarray(c, np.longdouble)
    return x.astype(F64)


def f64_to_f16(x: Array) -> Array:
    """fp64 to fp16, round to nearest even."""
    return np.asarray(x).astype(F16)


def f32_to_f16_rtz(x: Array) -> Array:
    """fp32 to fp16 toward zero: finite values never become infinite."""
    x = np.asarray(x, F32)
    h = np.atleast_1d(x.astype(F16))
    big = np.abs(h.astype(F32)) > np.abs(x)
    bits = h.view(U16) - big.astype(U16)
    return bits.view(F16).reshape(x.shape)


def f32_to_bf16_bits(x: Array) -> Array:
    """fp32 to bf16 bits (uint32), round to nearest even, NaN stays NaN (quiet)."""
    u = np.ascontiguousarray(x, F32).view(U32)
    r = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = np.isnan(x)
    if nan.any():
        r = np.where(nan, (u >> np.uint32(16)) | np.uint32(0x40), r)
    return r


def bf16_bits_to_f32(b: Array) -> Array:
    """bf16 bits (low half of a uint32) to fp32."""
    return np.ascontiguousarray((np.asarray(b, U32) << np.uint32(16)).astype(U32)).view(F32)


def _decode_table(exp_bits: int, man_bits: int, bias: int, fnuz: bool, ieee: bool) -> Array:
    out = np.zeros(256, F32)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        e = (code >> man_bits) & ((1 << exp_bits) - 1)
        m = code & ((1 << man_bits) - 1)
        if fnuz and code == 0x80:
            out[code] = np.nan
        elif ieee and e == (1 << exp_bits) - 1:
            out[code] = sign * np.inf if m == 0 else np.nan
        elif not fnuz and not ieee and (code & 0x7F) == 0x7F:
            out[code] = np.nan
        elif e == 0:
            out[code] = sign * m * 2.0 ** (1 - bias - man_bits)
        else:
            out[code] = sign * (1 + m / (1 << man_bits)) * 2.0 ** (e - bias)
    return out


class Float8:
    """One 8-bit float format: a decode table, and an exact encoder by searching the midpoints."""

    def __init__(self, name: str, exp_bits: int, man_bits: int, bias: int, fnuz: bool, ieee: bool) -> None:
        self.name = name
        self.table = _decode_table(exp_bits, man_bits, bias, fnuz, ieee)
        positive = self.table[:128].astype(F64)
        self.finite = int(np.flatnonzero(np.isfinite(positive))[-1])
        values = positive[: self.finite + 1]
        self.max = float(values[-1])
        step = values[-1] - values[-2]
        self.mids = np.append((values[:-1] + values[1:]) / 2, values[-1] + step / 2)
        self.fnuz = fnuz
        self.nan = 0x80 if fnuz else 0x7F
        self.overflow = 0x80 if fnuz else (0x7C if ieee else 0x7F)

    def decode(self, codes: Array) -> Array:
        """Codes (any integer type, one per element) to fp32."""
        return self.table[np.asarray(codes).astype(np.intp) & 0xFF]

    def encode(self, x: Array, saturate: bool) -> Array:
        """fp32/fp64 to codes (uint32), nearest even; beyond the range: the maximum if saturate, else inf or NaN.

        With saturation infinities become the maximum too (MODE.FP16_OVFL, CDNA3 ISA 3.5).
        """
        x = np.asarray(x, F64)
        a = np.abs(x)
        i = np.searchsorted(self.mids, a, side="left")
        tie = a == self.mids[np.minimum(i, len(self.mids) - 1)]
        i = i + (tie & (i & 1 == 1))
        code = np.minimum(i, self.finite).astype(U32)
        sign = np.where(np.signbit(x), np.uint32(0x80), np.uint32(0))
        out = code | sign
        if self.fnuz:
            out = np.where(code == 0, np.uint32(0), out)
        over = i > self.finite
        if over.any() and not saturate:
            out = np.where(over, np.uint32(self.overflow) | (np.uint32(0) if self.fnuz else sign), out)
        nan = np.isnan(x)
        if nan.any():
            out = np.where(nan, np.uint32(self.nan) | (np.uint32(0) if self.fnuz else sign), out)
        return out


E4M3FN = Float8("e4m3fn", 4, 3, 7, False, False)
E5M2 = Float8("e5m2", 5, 2, 15, False, True)
E4M3FNUZ = Float8("e4m3fnuz", 4, 3, 8, True, False)
E5M2FNUZ = Float8("e5m2fnuz", 5, 2, 16, True, False)

FP4_TABLE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], F32)


def fp8_format(arch: str, bf8: bool) -> Float8:
    """The 8-bit format that an instruction named fp8 or bf8 uses on this target."""
    if arch == "gfx950":
        return E5M2 if bf8 else E4M3FN
    return E5M2FNUZ if bf8 else E4M3FNUZ


def _quiet(x: Array) -> Array:
    return x + x.dtype.type(0)


def _is_snan(x: Array) -> Array:
    if x.dtype == F16:
        return np.isnan(x) & ((x.view(U16) & 0x200) == 0)
    if x.dtype == F64:
        return np.isnan(x) & ((x.view(U64) & np.uint64(1 << 51)) == 0)
    return np.isnan(x) & ((x.view(U32) & 0x400000) == 0)


def _minmax(a: Any, b: Any, is_max: bool) -> Array:
    a, b = np.broadcast_arrays(a, b)
    r = np.fmax(a, b) if is_max else np.fmin(a, b)
    zero = r == 0
    if zero.any():  # -0 counts as smaller than +0
        both = (a == 0) & (b == 0)
        if both.any():
            u: Any = U16 if r.dtype == F16 else (U64 if r.dtype == F64 else U32)
            ua, ub = np.ascontiguousarray(a).view(u), np.ascontiguousarray(b).view(u)
            z = (ua & ub if is_max else ua | ub).view(r.dtype)
            r = np.where(both, z, r)
    nan = np.isnan(a) | np.isnan(b)
    if nan.any():  # IEEE mode: a signalling NaN gives a quiet NaN, also where the other operand is a number
        a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
        with np.errstate(invalid="ignore"):
            r = np.where(_is_snan(a), _quiet(a), np.where(_is_snan(b), _quiet(b), r))
    return r


def fmin(a: Any, b: Any) -> Array:
    """v_min with MODE.IEEE = 1."""
    return _minmax(a, b, False)


def fmax(a: Any, b: Any) -> Array:
    """v_max with MODE.IEEE = 1."""
    return _minmax(a, b, True)


def fmed3(a: Any, b: Any, c: Any) -> Array:
    """v_med3: the median; the minimum where any operand is NaN."""
    a, b, c = np.broadcast_arrays(a, b, c)
    m = fmax(fmax(a, b), c)
    r = np.where(m == a, fmax(b, c), np.where(m == b, fmax(a, c), fmax(a, b)))
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(nan, fmin(fmin(a, b), c), r) if nan.any() else r


def to_int(x: Any, lo: int, hi: int, dtype: Any) -> Array:
    """Truncate toward zero and saturate; NaN gives 0."""
    x = np.asarray(x, F64)
    t = np.clip(np.nan_to_num(np.trunc(x), nan=0.0, posinf=float(hi), neginf=float(lo)), lo, hi)
    return t.astype(I64).astype(dtype)


def flush32(x: Array) -> Array:
    """Denormal fp32 values to zeros of the same sign."""
    u = np.ascontiguousarray(x, F32).view(U32)
    den = (u & np.uint32(0x7F800000)) == 0
    return (
        np.where(den, u & np.uint32(0x80000000), u).astype(U32).view(F32) if den.any() else np.asarray(x, F32)
    )


def flush16(x: Array) -> Array:
    """Denormal fp16 values to zeros of the same sign."""
    u = np.ascontiguousarray(x, F16).view(U16)
    den = (u & 0x7C00) == 0
    return np.where(den, u & 0x8000, u).astype(U16).view(F16)


def saturate16(r: Array, *sources: Any) -> Array:
    """MODE.FP16_OVFL: an overflow of finite operands gives the largest finite fp16, not infinity."""
    inf = np.isinf(r)
    if not inf.any():
        return r
    for s in sources:
        inf = inf & ~np.isinf(s)
    return np.where(inf, np.copysign(F16(65504), r), r).astype(F16)
