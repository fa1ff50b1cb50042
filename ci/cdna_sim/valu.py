"""Vector ALU instructions: VOP1, VOP2, VOP3, VOP3P (packed), VOPC, with their DPP and SDWA forms.

Sources: CDNA3 and CDNA4 ISA, chapters 6 (vector ALU), 12 (VOP1/VOP2/VOP3/VOP3P/VOPC descriptions, DPP and SDWA
controls). v_exp/v_log/v_rcp/v_rsq/v_sqrt are computed in fp64 and rounded once, so they lie within the documented
1 ulp; exp, log, sqrt and rsq of fp32 flush denormals as documented, whatever MODE says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import floats as fl
from .decoder import LITERAL, Instr
from .errors import UnsupportedError
from .floats import F16, F32, F64, I32, I64, U16, U32, U64
from .operands import ONES, TYPES, Ctx, Getter, Src, any_lanes, write_sgpr, write_sgpr64
from .state import S_ID, WaveGroup, pack64, unpack64

Array = npt.NDArray[Any]
Step = Callable[[WaveGroup], None]


@dataclass(frozen=True)
class Op:
    """Semantics of an instruction: function, destination type, source types, how undefined bits spread.

    spread: "any" an undefined bit makes the lane's result undefined; "bits" by flipping the undefined bits of the
    sources in `data` (exact for bitwise and bit-moving operations; the other sources must be defined); "add" from
    the lowest undefined bit upwards; "half" per 16-bit half.
    """

    fn: Callable[..., Any]
    dst: str
    src: str
    spread: str = "any"
    data: tuple[int, ...] = ()
    fp: bool = False
    accumulate: bool = False  # the destination is the last source too
    shift: tuple[int, bool] | None = (
        None  # "add" with a shift: its operand, and whether it comes before the addition
    )


OPS: dict[str, Op] = {}


def _op(names: str, dst: str, src: str, fn: Callable[..., Any], spread: str = "any", data: tuple[int, ...] = (),
        fp: bool | None = None, acc: bool = False, shift: tuple[int, bool] | None = None) -> None:  # fmt: skip
    for n in names.split():
        OPS[n] = Op(
            fn, dst, src, spread, data, (dst in "fhD" and src[:1] in "fhD") if fp is None else fp, acc, shift
        )


# -- 32-bit integer and bit operations ---------------------------------------------------------------------------

_op("v_mov_b32", "u", "u", lambda a: a, "bits", (0,))
_op("v_not_b32", "u", "u", lambda a: ~a, "bits", (0,))
_op("v_and_b32", "u", "uu", lambda a, b: a & b, "bits", (0, 1))
_op("v_or_b32", "u", "uu", lambda a, b: a | b, "bits", (0, 1))
_op("v_xor_b32", "u", "uu", lambda a, b: a ^ b, "bits", (0, 1))
_op("v_xnor_b32", "u", "uu", lambda a, b: ~(a ^ b), "bits", (0, 1))
_op("v_and_or_b32", "u", "uuu", lambda a, b, c: (a & b) | c, "bits", (0, 1, 2))
_op("v_or3_b32", "u", "uuu", lambda a, b, c: a | b | c, "bits", (0, 1, 2))
_op("v_bfi_b32", "u", "uuu", lambda a, b, c: (a & b) | (~a & c), "bits", (0, 1, 2))
_op("v_lshlrev_b32", "u", "uu", lambda a, b: b << (a & U32(31)), "bits", (1,))
_op("v_lshrrev_b32", "u", "uu", lambda a, b: b >> (a & U32(31)), "bits", (1,))
_op("v_ashrrev_i32", "i", "ui", lambda a, b: b >> (a & U32(31)).view(I32), "bits", (1,))
_op("v_lshl_or_b32", "u", "uuu", lambda a, b, c: (a << (b & U32(31))) | c, "bits", (0, 2))
_op("v_lshl_add_u32", "u", "uuu", lambda a, b, c: (a << (b & U32(31))) + c, "add", shift=(1, True))
_op("v_add_lshl_u32", "u", "uuu", lambda a, b, c: (a + b) << (c & U32(31)), "add", shift=(2, False))
_op("v_add3_u32", "u", "uuu", lambda a, b, c: a + b + c, "add")
_op("v_xad_u32", "u", "uuu", lambda a, b, c: (a ^ b) + c, "add")
_op("v_add_u32", "u", "uu", lambda a, b: a + b, "add")
_op("v_sub_u32", "u", "uu", lambda a, b: a - b, "add")
_op("v_subrev_u32", "u", "uu", lambda a, b: b - a, "add")
_op("v_add_i32", "i", "ii", lambda a, b: a + b, "add")
_op("v_sub_i32", "i", "ii", lambda a, b: a - b, "add")
_op("v_mul_lo_u32", "u", "uu", lambda a, b: a * b, "add")
_op("v_mul_hi_u32", "u", "uu", lambda a, b: ((a.astype(U64) * b.astype(U64)) >> U64(32)).astype(U32))
_op("v_mul_hi_i32", "i", "ii", lambda a, b: ((a.astype(I64) * b.astype(I64)) >> I64(32)).astype(I32))


def _s24(x: Array) -> Array:
    return (x << I32(8)) >> I32(8)


def _u24(x: Array) -> Array:
    return x & U32(0xFFFFFF)


_op("v_mul_i32_i24", "i", "ii", lambda a, b: _s24(a) * _s24(b))
_op("v_mul_u32_u24", "u", "uu", lambda a, b: _u24(a) * _u24(b), "add")
_op("v_mul_hi_i32_i24", "i", "ii", lambda a, b: ((_s24(a).astype(I64) * _s24(b)) >> I64(32)).astype(I32))
_op("v_mul_hi_u32_u24", "u", "uu", lambda a, b: ((_u24(a).astype(U64) * _u24(b)) >> U64(32)).astype(U32))
_op("v_mad_i32_i24", "i", "iii", lambda a, b, c: _s24(a) * _s24(b) + c)
_op("v_mad_u32_u24", "u", "uuu", lambda a, b, c: _u24(a) * _u24(b) + c, "add")
_op("v_mad_u32_u16", "u", "wwu", lambda a, b, c: a.astype(U32) * b.astype(U32) + c)
_op("v_mad_i32_i16", "i", "ssi", lambda a, b, c: a.astype(I32) * b.astype(I32) + c)
_op("v_min_i32", "i", "ii", np.minimum)
_op("v_max_i32", "i", "ii", np.maximum)
_op("v_min_u32", "u", "uu", np.minimum)
_op("v_max_u32", "u", "uu", np.maximum)
for _t in "iu":
    _op(f"v_min3_{_t}32", _t, _t * 3, lambda a, b, c: np.minimum(np.minimum(a, b), c))
    _op(f"v_max3_{_t}32", _t, _t * 3, lambda a, b, c: np.maximum(np.maximum(a, b), c))
    _op(f"v_med3_{_t}32", _t, _t * 3,
        lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c)))  # fmt: skip


def _bfe_u32(a: Array, b: Array, c: Array) -> Array:
    width = c & U32(31)
    return (a >> (b & U32(31))) & ((U32(1) << width) - U32(1))


def _bfe_i32(a: Array, b: Array, c: Array) -> Array:
    off, width = (b & U32(31)).astype(I64), (c & U32(31)).astype(I64)
    v = (a.astype(I64) >> off) & ((I64(1) << width) - 1)
    sign = np.where(width > 0, I64(1) << np.maximum(width - 1, 0), 0)
    return ((v ^ sign) - sign).astype(I32)


def _perm(a: Array, b: Array, s: Array) -> Array:
    both = b.astype(U64) | (a.astype(U64) << U64(32))
    out: Any = U32(0)
    for k in range(4):
        sel = (s >> U32(8 * k)) & U32(0xFF)
        byte = (both >> ((sel & U32(7)).astype(U64) * U64(8))).astype(U32) & U32(0xFF)
        if (sel > 7).any():
            signed = both >> (U64(15) + (sel & U32(3)).astype(U64) * U64(16))
            byte = np.where(sel > 7, np.where((signed & U64(1)) != 0, U32(0xFF), U32(0)), byte)
            byte = np.where(sel == 12, U32(0), np.where(sel > 12, U32(0xFF), byte))
        out = out | (byte << U32(8 * k))
    return out


def _alignbit(a: Array, b: Array, c: Array) -> Array:
    both = (a.astype(U64) << U64(32)) | b.astype(U64)
    return (both >> (c & U32(31)).astype(U64)).astype(U32)


def _bytes_of(x: Array) -> list[Array]:
    return [(x >> U32(8 * k)) & U32(0xFF) for k in range(4)]


def _sad_u8(a: Array, b: Array, c: Array) -> Array:
    t = c
    for x, y in zip(_bytes_of(a), _bytes_of(b), strict=True):
        t = t + np.where(x > y, x - y, y - x)
    return t


def _bits32(x: Array) -> Array:
    x = np.ascontiguousarray(x)
    return np.unpackbits(x.view(np.uint8).reshape(*x.shape, 4), axis=-1, bitorder="little")


def _ffbh(x: Array) -> Array:
    b = _bits32(x)[..., ::-1]
    return np.where(b.any(-1), b.argmax(-1), -1).astype(I32).view(U32)


def _ffbl(x: Array) -> Array:
    b = _bits32(x)
    return np.where(b.any(-1), b.argmax(-1), -1).astype(I32).view(U32)


def _brev(x: Array) -> Array:
    return np.packbits(_bits32(x)[..., ::-1], axis=-1, bitorder="little").view(U32).reshape(x.shape)


_LANE = np.arange(64, dtype=np.uint64)
_BELOW = ((U64(1) << _LANE) - U64(1))[None, :]
_BELOW_LO, _BELOW_HI = _BELOW.astype(U32), (_BELOW >> U64(32)).astype(U32)


def _popcount(x: Array) -> Array:
    return _bits32(x).sum(-1).astype(U32)


_op("v_bfe_u32", "u", "uuu", _bfe_u32, "bits", (0,))
_op("v_bfe_i32", "i", "iuu", _bfe_i32, "bits", (0,))
_op("v_perm_b32", "u", "uuu", _perm, "bits", (0, 1))
_op("v_alignbit_b32", "u", "uuu", _alignbit, "bits", (0, 1))
_op("v_alignbyte_b32", "u", "uuu", lambda a, b, c: _alignbit(a, b, (c & U32(3)) << U32(3)), "bits", (0, 1))
_op("v_bfm_b32", "u", "uu", lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31)))
_op("v_bfrev_b32", "u", "u", _brev, "bits", (0,))
_op("v_ffbh_u32", "u", "u", _ffbh)
_op("v_ffbl_b32", "u", "u", _ffbl)
_op("v_ffbh_i32", "u", "u", lambda a: _ffbh(a ^ (a.view(I32) >> I32(31)).view(U32)))
_op("v_bcnt_u32_b32", "u", "uu", lambda a, b: _popcount(a) + b)
_op("v_mbcnt_lo_u32_b32", "u", "uu", lambda a, b: _popcount(a & _BELOW_LO) + b)
_op("v_mbcnt_hi_u32_b32", "u", "uu", lambda a, b: _popcount(a & _BELOW_HI) + b)
_op("v_sad_u8", "u", "uuu", _sad_u8)
_op("v_sad_u32", "u", "uuu", lambda a, b, c: np.where(a > b, a - b, b - a) + c)
_op("v_lerp_u8", "u", "uuu", lambda a, b, c: sum(
    ((((x + y + (z & U32(1))) >> U32(1)) & U32(0xFF)) << U32(8 * k))
    for k, (x, y, z) in enumerate(zip(_bytes_of(a), _bytes_of(b), _bytes_of(c), strict=True))))  # fmt: skip
_op("v_pack_b32_f16", "u", "ww", lambda a, b: a.astype(U32) | (b.astype(U32) << U32(16)), "half")
_op("v_prng_b32", "u", "u", lambda a: (a << U32(1)) ^ np.where(a >> U32(31), U32(197), U32(0)))
_op("v_sat_pk_u8_i16", "u", "u", lambda a: np.clip(a.astype(U16).view(np.int16), 0, 255).astype(U32)
    | (np.clip((a >> U32(16)).astype(U16).view(np.int16), 0, 255).astype(U32) << U32(8)))  # fmt: skip


def _ashr_pk(a: Array, b: Array, c: Array, lo: int, hi: int) -> Array:
    s = (c & U32(31)).view(I32)
    x, y = np.clip(a >> s, lo, hi).astype(U32) & U32(0xFF), np.clip(b >> s, lo, hi).astype(U32) & U32(0xFF)
    return (x | (y << U32(8))).astype(U16)


_op("v_ashr_pk_i8_i32", "w", "iiu", lambda a, b, c: _ashr_pk(a, b, c, -128, 127))
_op("v_ashr_pk_u8_i32", "w", "iiu", lambda a, b, c: _ashr_pk(a, b, c, 0, 255))

# -- 64-bit integers ---------------------------------------------------------------------------------------------

_op("v_lshl_add_u64", "Q", "QuQ", lambda a, b, c: (a << (b & U32(7)).astype(U64)) + c, "add", shift=(1, True))
_op("v_lshlrev_b64", "Q", "uQ", lambda a, b: b << (a & U32(63)).astype(U64), "bits", (1,))
_op("v_lshrrev_b64", "Q", "uQ", lambda a, b: b >> (a & U32(63)).astype(U64), "bits", (1,))
_op("v_ashrrev_i64", "L", "uL", lambda a, b: b >> (a & U32(63)).astype(I64), "bits", (1,))
_op("v_mov_b64", "Q", "Q", lambda a: a, "bits", (0,))

# -- 16-bit integers ---------------------------------------------------------------------------------------------

_op("v_add_u16", "w", "ww", lambda a, b: a + b, "add")
_op("v_sub_u16", "w", "ww", lambda a, b: a - b, "add")
_op("v_subrev_u16", "w", "ww", lambda a, b: b - a, "add")
_op("v_mul_lo_u16", "w", "ww", lambda a, b: a * b, "add")
_op("v_add_i16", "s", "ss", lambda a, b: a + b, "add")
_op("v_sub_i16", "s", "ss", lambda a, b: a - b, "add")
_op("v_lshlrev_b16", "w", "ww", lambda a, b: b << (a & U16(15)), "bits", (1,))
_op("v_lshrrev_b16", "w", "ww", lambda a, b: b >> (a & U16(15)), "bits", (1,))
_op("v_ashrrev_i16", "s", "ws", lambda a, b: b >> (a & U16(15)).view(np.int16), "bits", (1,))
_op("v_mad_u16 v_mad_legacy_u16", "w", "www", lambda a, b, c: a * b + c)
_op("v_mad_i16 v_mad_legacy_i16", "s", "sss", lambda a, b, c: a * b + c)
for _t, _n in (("w", "u16"), ("s", "i16")):
    _op(f"v_min_{_n}", _t, _t * 2, np.minimum)
    _op(f"v_max_{_n}", _t, _t * 2, np.maximum)
    _op(f"v_min3_{_n}", _t, _t * 3, lambda a, b, c: np.minimum(np.minimum(a, b), c))
    _op(f"v_max3_{_n}", _t, _t * 3, lambda a, b, c: np.maximum(np.maximum(a, b), c))
    _op(f"v_med3_{_n}", _t, _t * 3,
        lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c)))  # fmt: skip

# -- floating point ----------------------------------------------------------------------------------------------


def _ldexp(a: Array, e: Array, dtype: Any, limit: int) -> Array:
    return np.ldexp(a.astype(F64), np.clip(e, -limit, limit)).astype(dtype)


def _fract(a: Array) -> Array:
    r = a - np.floor(a)
    below_one = np.nextafter(a.dtype.type(1), a.dtype.type(0))
    return np.where(np.isfinite(a), np.minimum(r, below_one), np.where(np.isinf(a), a.dtype.type(np.nan), a))


def _frexp_mant(a: Array) -> Array:
    m, _ = np.frexp(a.astype(F64))
    return m.astype(a.dtype)


def _frexp_exp(a: Array, dtype: Any) -> Array:
    _, e = np.frexp(a.astype(F64))
    return np.where(np.isfinite(a), e, 0).astype(dtype)


def _via64(fn: Callable[[Array], Array], dtype: Any, flush: bool) -> Callable[[Array], Array]:
    def run(a: Array) -> Array:
        if flush:
            a = fl.flush32(a)
        r = fn(a.astype(F64)).astype(dtype)
        return fl.flush32(r) if flush else r

    return run


def _rsq(x: Array) -> Array:
    return 1.0 / np.sqrt(x)


for _s, _t in (("f32", "f"), ("f16", "h"), ("f64", "D")):
    _d = TYPES[_t][0]
    _op(f"v_add_{_s}", _t, _t * 2, np.add)
    _op(f"v_sub_{_s}", _t, _t * 2, np.subtract)
    _op(f"v_subrev_{_s}", _t, _t * 2, lambda a, b: b - a)
    _op(f"v_mul_{_s}", _t, _t * 2, np.multiply)
    _op(f"v_min_{_s}", _t, _t * 2, fl.fmin)
    _op(f"v_max_{_s}", _t, _t * 2, fl.fmax)
    _op(f"v_min3_{_s}", _t, _t * 3, lambda a, b, c: fl.fmin(fl.fmin(a, b), c))
    _op(f"v_max3_{_s}", _t, _t * 3, lambda a, b, c: fl.fmax(fl.fmax(a, b), c))
    _op(f"v_med3_{_s}", _t, _t * 3, fl.fmed3)
    _op(f"v_floor_{_s}", _t, _t, np.floor)
    _op(f"v_ceil_{_s}", _t, _t, np.ceil)
    _op(f"v_trunc_{_s}", _t, _t, np.trunc)
    _op(f"v_rndne_{_s}", _t, _t, np.rint)
    _op(f"v_fract_{_s}", _t, _t, _fract)
    _op(f"v_frexp_mant_{_s}", _t, _t, _frexp_mant)
    _fl = _t == "f"
    _op(f"v_exp_{_s}", _t, _t, _via64(np.exp2, _d, _fl))
    _op(f"v_log_{_s}", _t, _t, _via64(np.log2, _d, _fl))
    _op(f"v_sqrt_{_s}", _t, _t, _via64(np.sqrt, _d, _fl))
    _op(f"v_rsq_{_s}", _t, _t, _via64(_rsq, _d, _fl))
    _op(f"v_rcp_{_s}", _t, _t, _via64(lambda x: 1.0 / x, _d, False))
    _op(f"v_sin_{_s}", _t, _t, _via64(lambda x: np.sin(2 * np.pi * x), _d, False))
    _op(f"v_cos_{_s}", _t, _t, _via64(lambda x: np.cos(2 * np.pi * x), _d, False))
OPS["v_rcp_iflag_f32"] = OPS["v_rcp_f32"]
_op("v_minimum3_f32", "f", "fff", lambda a, b, c: np.minimum(np.minimum(a, b), c))
_op("v_maximum3_f32", "f", "fff", lambda a, b, c: np.maximum(np.maximum(a, b), c))
_op("v_fma_f32", "f", "fff", fl.fma32)
_op("v_fmac_f32", "f", "ff", fl.fma32, acc=True)
_op("v_fma_f64", "D", "DDD", fl.fma64)
_op("v_fmac_f64", "D", "DD", fl.fma64, acc=True)
_op("v_fma_f16", "h", "hhh", fl.fma16)
_op("v_mad_f16", "h", "hhh", lambda a, b, c: a * b + c)
_op("v_mac_f16", "h", "hh", lambda a, b, c: a * b + c, acc=True)
_op("v_fmamk_f32", "f", "fff", fl.fma32)
_op("v_fmaak_f32", "f", "fff", fl.fma32)
_op("v_mul_legacy_f32", "f", "ff", lambda a, b: np.where((a == 0) | (b == 0), F32(0), a * b))
_op("v_ldexp_f32", "f", "fi", lambda a, e: _ldexp(a, e, F32, 400))
_op("v_ldexp_f16", "h", "hs", lambda a, e: _ldexp(a, e, F16, 60))
_op("v_ldexp_f64", "D", "Di", lambda a, e: np.ldexp(a, np.clip(e, -2200, 2200)))
_op("v_frexp_exp_i32_f32", "i", "f", lambda a: _frexp_exp(a, I32))
_op("v_frexp_exp_i32_f64", "i", "D", lambda a: _frexp_exp(a, I32))
_op("v_frexp_exp_i16_f16", "s", "h", lambda a: _frexp_exp(a, np.int16))

# conversions
_op("v_cvt_f32_i32", "f", "i", lambda a: a.astype(F32))
_op("v_cvt_f32_u32", "f", "u", lambda a: a.astype(F32))
_op("v_cvt_i32_f32", "i", "f", lambda a: fl.to_int(a, -(2**31), 2**31 - 1, I32))
_op("v_cvt_u32_f32", "u", "f", lambda a: fl.to_int(a, 0, 2**32 - 1, U32))
_op(
    "v_cvt_rpi_i32_f32",
    "i",
    "f",
    lambda a: fl.to_int(np.floor(a.astype(F64) + 0.5), -(2**31), 2**31 - 1, I32),
)
_op("v_cvt_flr_i32_f32", "i", "f", lambda a: fl.to_int(np.floor(a), -(2**31), 2**31 - 1, I32))
_op("v_cvt_f16_f32", "h", "f", lambda a: a.astype(F16))
_op("v_cvt_f32_f16", "f", "h", lambda a: a.astype(F32))
_op("v_cvt_f64_f32", "D", "f", lambda a: a.astype(F64))
_op("v_cvt_f32_f64", "f", "D", lambda a: a.astype(F32))
_op("v_cvt_f64_i32", "D", "i", lambda a: a.astype(F64))
_op("v_cvt_f64_u32", "D", "u", lambda a: a.astype(F64))
_op("v_cvt_i32_f64", "i", "D", lambda a: fl.to_int(a, -(2**31), 2**31 - 1, I32))
_op("v_cvt_u32_f64", "u", "D", lambda a: fl.to_int(a, 0, 2**32 - 1, U32))
_op("v_cvt_f16_u16", "h", "w", lambda a: a.astype(F16))
_op("v_cvt_f16_i16", "h", "s", lambda a: a.astype(F16))
_op("v_cvt_u16_f16", "w", "h", lambda a: fl.to_int(a, 0, 65535, U16))
_op("v_cvt_i16_f16", "s", "h", lambda a: fl.to_int(a, -32768, 32767, np.int16))
_op("v_cvt_f32_bf16", "f", "w", lambda a: fl.bf16_bits_to_f32(a.astype(U32)))
for _k in range(4):
    _op(
        f"v_cvt_f32_ubyte{_k}",
        "f",
        "u",
        lambda a, k=_k: ((a >> U32(8 * k)) & U32(0xFF)).astype(F32),
        fp=False,
    )
_op(
    "v_cvt_off_f32_i4",
    "f",
    "u",
    lambda a: (((a & U32(15)) ^ U32(8)).astype(F32) - F32(8)) / F32(16),
    fp=False,
)


def _pack16(lo: Array, hi: Array) -> Array:
    lo, hi = np.ascontiguousarray(lo), np.ascontiguousarray(hi)
    return lo.view(U16).astype(U32) | (hi.view(U16).astype(U32) << U32(16))


_op("v_cvt_pkrtz_f16_f32", "u", "ff", lambda a, b: _pack16(fl.f32_to_f16_rtz(a), fl.f32_to_f16_rtz(b)))
_op("v_cvt_pk_f16_f32", "u", "ff", lambda a, b: _pack16(a.astype(F16), b.astype(F16)))
_op("v_cvt_pk_bf16_f32", "u", "ff", lambda a, b: fl.f32_to_bf16_bits(a) | (fl.f32_to_bf16_bits(b) << U32(16)))
_op("v_cvt_pk_u16_u32", "u", "uu", lambda a, b: np.minimum(a, 65535) | (np.minimum(b, 65535) << U32(16)))
_op("v_cvt_pk_i16_i32", "u", "ii", lambda a, b: _pack16(np.clip(a, -32768, 32767).astype(np.int16),
                                                        np.clip(b, -32768, 32767).astype(np.int16)))  # fmt: skip


def _norm(x: Array, scale: int, lo: int) -> Array:
    return fl.to_int(
        np.rint(np.clip(np.nan_to_num(x.astype(F64)), lo, 1) * scale), lo * scale, scale, I32
    ).astype(U16)


for _f in ("f32", "f16"):
    _ft = "f" if _f == "f32" else "h"
    _op(
        f"v_cvt_pknorm_i16_{_f}", "u", _ft * 2, lambda a, b: _pack16(_norm(a, 32767, -1), _norm(b, 32767, -1))
    )
    _op(f"v_cvt_pknorm_u16_{_f}", "u", _ft * 2, lambda a, b: _pack16(_norm(a, 65535, 0), _norm(b, 65535, 0)))
_op("v_cvt_pk_u8_f32", "u", "fuu", lambda a, b, c: (c & ~(U32(0xFF) << ((b & U32(3)) * U32(8))))
    | (fl.to_int(np.rint(a), 0, 255, U32) << ((b & U32(3)) * U32(8))), fp=False)  # fmt: skip


def _div_fixup(q: Array, b: Array, c: Array) -> Array:
    """S0 quotient, S1 denominator, S2 numerator."""
    q, b, c = np.broadcast_arrays(q, b, c)
    t = q.dtype.type
    sign = np.signbit(b) ^ np.signbit(c)
    r = np.copysign(q, np.where(sign, t(-1), t(1)))
    _, eb = np.frexp(b.astype(F64))
    _, ec = np.frexp(c.astype(F64))
    r = np.where((ec - eb < (-1075 if t is F64 else -150)) & np.isfinite(b) & (b != 0) & (c != 0), t(0), r)
    r = np.where(np.isinf(b) | (c == 0), t(0), r)
    r = np.where((b == 0) | np.isinf(c), t(np.inf), r)
    r = np.copysign(r, np.where(sign, t(-1), t(1)))
    r = np.where(((b == 0) & (c == 0)) | (np.isinf(b) & np.isinf(c)), np.copysign(t(np.nan), t(-1)), r)
    return np.where(np.isnan(c), c, np.where(np.isnan(b), b, r))


_op("v_div_fixup_f32", "f", "fff", _div_fixup)
_op("v_div_fixup_f64", "D", "DDD", _div_fixup)
_op("v_div_fixup_f16", "h", "hhh", _div_fixup)


def _dot2_f32_f16(a: Array, b: Array, c: Array) -> Array:
    def half(x: Array, k: int) -> Array:
        return (x >> U32(16 * k)).astype(U16).view(F16).astype(F64)

    return (half(a, 0) * half(b, 0) + half(a, 1) * half(b, 1) + c).astype(F32)


def _dot2_f32_bf16(a: Array, b: Array, c: Array) -> Array:
    def half(x: Array, k: int) -> Array:
        return fl.bf16_bits_to_f32((x >> U32(16 * k)) & U32(0xFFFF)).astype(F64)

    return (half(a, 0) * half(b, 0) + half(a, 1) * half(b, 1) + c).astype(F32)


def _idot(bits: int, signed: bool) -> Callable[..., Array]:
    def field(x: Array, k: int) -> Array:
        v = ((x >> U32(bits * k)) & U32((1 << bits) - 1)).astype(I64)
        return v - ((v >> (bits - 1)) << bits) if signed else v

    def run(a: Array, b: Array, c: Array) -> Array:
        t = c.astype(I64)
        for k in range(32 // bits):
            t = t + field(a, k) * field(b, k)
        return (t & 0xFFFFFFFF).astype(U32)

    return run


_op("v_dot2_f32_f16", "f", "uuf", _dot2_f32_f16, fp=False)
_op("v_dot2_f32_bf16", "f", "uuf", _dot2_f32_bf16, fp=False)
_op("v_dot2c_f32_f16", "f", "uu", _dot2_f32_f16, fp=False, acc=True)
_op("v_dot2c_f32_bf16", "f", "uu", _dot2_f32_bf16, fp=False, acc=True)
for _b, _sfx in ((16, "i16"), (8, "i8"), (4, "i4")):
    _nm = 32 // _b
    _op(f"v_dot{_nm}_i32_{_sfx}", "u", "uuu", _idot(_b, True))
    _op(f"v_dot{_nm}_u32_{_sfx.replace('i', 'u')}", "u", "uuu", _idot(_b, False))
    _op(f"v_dot{_nm}c_i32_{_sfx}", "u", "uu", _idot(_b, True), acc=True)

# 16-bit VOP1/VOP2 results clear the upper half of the register on this family; these VOP3 ones preserve it.
_PRESERVE_HIGH = {
    "v_mad_f16", "v_fma_f16", "v_mad_u16", "v_mad_i16", "v_div_fixup_f16", "v_med3_f16", "v_min3_f16", "v_max3_f16",
    "v_med3_i16", "v_min3_i16", "v_max3_i16", "v_med3_u16", "v_min3_u16", "v_max3_u16", "v_add_i16", "v_sub_i16",
    "v_ashr_pk_i8_i32", "v_ashr_pk_u8_i32",
}  # fmt: skip

# VOP3 instructions that read 16-bit operands and so take op_sel.
_SHORT = set("hws")


# -- modifiers -----------------------------------------------------------------------------------------------------


def _with_neg_abs(get: Getter, neg: bool, abs_: bool) -> Getter:
    if abs_ and neg:
        return lambda g: -np.abs(get(g))
    if abs_:
        return lambda g: np.abs(get(g))
    if neg:
        return lambda g: np.negative(get(g))
    return get


def _hi_half(ctx: Ctx, ins: Instr, code: int, t: str) -> Src:
    """The upper 16 bits of a 32-bit source as a 16-bit operand (op_sel)."""
    s = ctx.src(ins, code, "u")
    dtype = TYPES[t][0]

    def shadow(g: WaveGroup) -> list[Any]:
        x = s.shadow(g)[0]
        return [x >> U32(16) if isinstance(x, np.ndarray) else 0]

    return Src(lambda g: (s.get(g) >> U32(16)).astype(U16).view(dtype), shadow, s.ids)


def _lo_shadow(s: Src) -> Src:
    """A 16-bit operand: only the low half of the shadow counts."""

    def shadow(g: WaveGroup) -> list[Any]:
        x = s.shadow(g)[0]
        return [x & U32(0xFFFF) if isinstance(x, np.ndarray) else 0]

    return Src(s.get, shadow, s.ids)


_DPP_TABLES: dict[int, tuple[Array, Array]] = {}


def dpp_table(ctrl: int, where: str) -> tuple[Array, Array]:
    """Source lane and validity per lane for a DPP control (CDNA3 ISA, table of DPP_CTRL values)."""
    if ctrl in _DPP_TABLES:
        return _DPP_TABLES[ctrl]
    lane = np.arange(64)
    row, pos = lane & ~15, lane & 15
    ok = np.ones(64, bool)
    if ctrl <= 0xFF:
        src = (lane & ~3) | ((ctrl >> (2 * (lane & 3))) & 3)
    elif 0x101 <= ctrl <= 0x10F:  # row_shl: lane i reads i + n
        n = ctrl & 15
        src, ok = lane + n, pos + n < 16
    elif 0x111 <= ctrl <= 0x11F:  # row_shr: lane i reads i - n
        n = ctrl & 15
        src, ok = lane - n, pos >= n
    elif 0x121 <= ctrl <= 0x12F:
        src = row | ((pos - (ctrl & 15)) & 15)
    elif ctrl == 0x130:
        src, ok = lane + 1, lane < 63
    elif ctrl == 0x134:
        src = (lane + 1) & 63
    elif ctrl == 0x138:
        src, ok = lane - 1, lane > 0
    elif ctrl == 0x13C:
        src = (lane - 1) & 63
    elif ctrl == 0x140:
        src = row | (15 - pos)
    elif ctrl == 0x141:
        src = (lane & ~7) | (7 - (lane & 7))
    elif ctrl == 0x142:  # row_bcast:15: the last lane of each row goes to the next row
        src, ok = row - 1, lane >= 16
    elif ctrl == 0x143:  # row_bcast:31: lane 31 goes to rows 2 and 3
        src, ok = np.full(64, 31), lane >= 32
    elif 0x150 <= ctrl <= 0x15F:  # row_newbcast:n (gfx90a and later)
        src = row | (ctrl & 15)
    else:
        raise UnsupportedError(f"DPP control {ctrl:#x}", where)
    src = np.where(ok, src, lane)
    _DPP_TABLES[ctrl] = (src, ok)
    return src, ok


class Dpp:
    """DPP on source 0: which lane it comes from, and which lanes are written at all."""

    def __init__(self, ins: Instr) -> None:
        self.src, self.ok = dpp_table(ins.dpp, ins.where)
        lane = np.arange(64)
        self.enabled = ((ins.row_mask >> (lane >> 4)) & 1 & (ins.bank_mask >> ((lane >> 2) & 3)) & 1).astype(
            bool
        )
        self.zero = bool(ins.bc)

    def wrap(self, s: Src) -> Src:
        """Source 0 through the permutation; lanes without a source read 0."""
        idx, ok = self.src, self.ok

        def get(g: WaveGroup) -> Array:
            v = s.get(g)[:, idx]
            if g.full and ok.all():
                return v
            good = ok & g.mask[:, idx]
            return np.where(good, v, v.dtype.type(0))

        def shadow(g: WaveGroup) -> list[Any]:
            out = []
            good = ok & g.mask[:, idx]
            for d in s.shadow(g):
                out.append(np.where(good, d[:, idx], U32(0)) if isinstance(d, np.ndarray) else 0)
            return out

        return Src(get, shadow, s.ids)

    def lanes(self, g: WaveGroup) -> Array:
        """Lanes that are written: without bound_ctrl a lane without a source keeps its old value."""
        m = g.mask & self.enabled
        if not self.zero:
            m = m & self.ok & g.mask[:, self.src]
        return m


def _sdwa_src(ctx: Ctx, ins: Instr, code: int, t: str, sel: int, sext: bool) -> Src:
    """SDWA operand: a byte or word of a dword, zero- or sign-extended, then seen as type t."""
    s = ctx.src(ins, code, "u")
    dtype = TYPES[t][0]
    if sel == 6:
        shift, width = 0, 32
    elif sel < 4:
        shift, width = 8 * sel, 8
    else:
        shift, width = 16 * (sel - 4), 16
    if sel == 7:
        raise UnsupportedError("SDWA selector 7", ins.where)

    def pick(v: Any) -> Any:
        v = v >> U32(shift)
        if width == 32:
            return v
        if sext:
            up = U32(32 - width)
            return ((v << up).view(I32) >> up.astype(I32)).view(U32)
        return v & U32((1 << width) - 1)

    def get(g: WaveGroup) -> Array:
        v = np.asarray(pick(s.get(g)))
        if TYPES[t][1] == 16:
            return v.astype(U16).view(dtype)
        return v.view(dtype)

    def shadow(g: WaveGroup) -> list[Any]:
        x = s.shadow(g)[0]
        return [pick(x) if isinstance(x, np.ndarray) else 0]

    return Src(get, shadow, s.ids)


# -- shadows of results ----------------------------------------------------------------------------------------


def _as_bits(x: Any) -> Any:
    """Typed value to the unsigned integer of its width."""
    x = np.ascontiguousarray(x)
    return x.view({2: U16, 4: U32, 8: U64}[x.dtype.itemsize])


def _join(sh: list[Any], bits: int) -> Any:
    """Shadow dwords of a source as one unsigned array of its width."""
    if bits == 64:
        lo, hi = (np.asarray(d, U32).astype(U64) for d in sh)
        return lo | (hi << U64(32))
    return np.asarray(sh[0], U32).astype(U16 if bits == 16 else U32)


def result_shadow(op: Op, srcs: list[Src], g: WaveGroup, types: str) -> list[Any]:
    """Shadow dwords of the result, from the values and shadows of the sources."""
    shs = [s.shadow(g) for s in srcs]
    dbits = TYPES[op.dst][1]
    ones: Any = {16: U16(0xFFFF), 32: ONES, 64: ~U64(0)}[dbits]
    out: Any
    if op.spread == "bits":
        vals = [s.get(g) for s in srcs]
        control = any_lanes([shs[k] for k in range(len(srcs)) if k not in op.data])
        base = _as_bits(op.fn(*vals))
        out = np.zeros_like(base)
        for sub in range(1, 1 << len(op.data)):
            v = list(vals)
            for j, k in enumerate(op.data):
                if sub >> j & 1:
                    dt = TYPES[types[k]][0]
                    bits = TYPES[types[k]][1]
                    v[k] = (_as_bits(vals[k]) ^ _join(shs[k], bits)).view(dt)
            out = out | (base ^ _as_bits(op.fn(*v)))
        out = np.where(control, ones, out)
    elif op.spread == "add":
        u: Any = 0
        for k, sh in enumerate(shs):
            j = _join(sh, TYPES[types[k]][1]).astype(ones.dtype)
            u = j | u
        if op.shift is not None:
            k, before = op.shift  # the shift amount's operand; whether source 0 alone is shifted (then added)
            amount = (np.asarray(srcs[k].get(g)) & U32(dbits - 1)).astype(ones.dtype)
            if before:
                parts = [_join(sh, TYPES[types[j]][1]).astype(ones.dtype) for j, sh in enumerate(shs)]
                u = (parts[0] << amount) | parts[2]
            else:
                a, b = (_join(shs[j], 32) for j in (0, 1))
                u = a | b
                u = (u | (U32(0) - u)) << amount
            u = np.where(any_lanes([shs[k]]), ones, u)
        out = u | (ones.dtype.type(0) - u)
    elif op.spread == "half":
        lo, hi = any_lanes([shs[0]]), any_lanes([shs[1]])
        out = np.where(lo, U32(0xFFFF), U32(0)) | np.where(hi, U32(0xFFFF0000), U32(0))
    else:
        out = np.where(any_lanes(shs), ones, ones.dtype.type(0))
    out = np.asarray(out)
    if dbits == 64:
        return [out.astype(U32), (out >> U64(32)).astype(U32)]
    return [out.astype(U32)]


# -- destinations ------------------------------------------------------------------------------------------------


class Dst:
    """Writes a typed result and its shadow to vector registers, honouring a lane mask."""

    def __init__(self, ctx: Ctx, ins: Instr, t: str, index: int, high: bool = False, preserve: bool = False,
                 acc: bool = False) -> None:  # fmt: skip
        self.t = t
        self.regs = 2 if TYPES[t][1] == 64 else 1
        self.row = ctx.vrow(ins, index, acc, self.regs)
        self.ids = tuple(range(self.row, self.row + self.regs))
        self.high = high
        self.part = TYPES[t][1] == 16 and (high or preserve)

    def write(self, g: WaveGroup, r: Any, mask: Array | None) -> None:
        d = self.row
        bits = TYPES[self.t][1]
        if bits == 32:
            v: Any = g.F[d] if self.t == "f" else (g.I[d] if self.t == "i" else g.V[d])
            if mask is None:
                v[...] = r
            else:
                np.copyto(v, r, where=mask)
        elif bits == 16:
            w = _as_bits(r)
            if self.part:
                dest = g.W16[d, :, :, 1 if self.high else 0]
                if mask is None:
                    dest[...] = w
                else:
                    np.copyto(dest, w, where=mask)
            elif mask is None:
                g.V[d] = w
            else:
                np.copyto(g.V[d], w, where=mask)
        else:
            q = _as_bits(r)
            for k, part in enumerate((q.astype(U32), (q >> U64(32)).astype(U32))):
                if mask is None:
                    g.V[d + k] = part
                else:
                    np.copyto(g.V[d + k], part, where=mask)

    def shade(self, g: WaveGroup, shadow: list[Any] | None, mask: Array | None) -> None:
        """Set the shadow of the lanes just written (None: all defined)."""
        for k in range(self.regs):
            r = self.row + k
            sh = np.asarray(0 if shadow is None else shadow[k], U32)
            if self.part:
                old = g.VU[r]
                if r not in g.dirty:
                    old = np.zeros_like(old)
                sh = (old & U32(0xFFFF)) | (sh << U32(16)) if self.high else (old & U32(0xFFFF0000)) | sh
            if shadow is None and r not in g.dirty:
                continue
            if r not in g.dirty:
                g.VU[r] = 0
            if mask is None:
                g.VU[r] = sh
            else:
                np.copyto(g.VU[r], sh, where=mask)
            if r in g.pend or g.VU[r].any():
                g.dirty.add(r)
            else:
                g.dirty.discard(r)


def _clamp(t: str) -> Callable[[Any], Any]:
    def run(r: Any) -> Any:
        one, zero = r.dtype.type(1), r.dtype.type(0)
        return np.where(np.isnan(r), zero, np.clip(r, zero, one))

    return run


def _int_clamp(name: str) -> Callable[..., Any] | None:
    """Saturating forms of integer additions (clamp bit)."""
    table: dict[str, Callable[..., Any]] = {
        "v_add_u32": lambda a, b: np.minimum(a.astype(U64) + b, 0xFFFFFFFF).astype(U32),
        "v_sub_u32": lambda a, b: np.where(a > b, a - b, U32(0)),
        "v_subrev_u32": lambda a, b: np.where(b > a, b - a, U32(0)),
        "v_add_i32": lambda a, b: np.clip(a.astype(I64) + b, -(2**31), 2**31 - 1).astype(I32),
        "v_sub_i32": lambda a, b: np.clip(a.astype(I64) - b, -(2**31), 2**31 - 1).astype(I32),
        "v_add_u16": lambda a, b: np.minimum(a.astype(U32) + b, 0xFFFF).astype(U16),
        "v_sub_u16": lambda a, b: np.where(a > b, a - b, U16(0)),
        "v_add_i16": lambda a, b: np.clip(a.astype(I32) + b, -32768, 32767).astype(np.int16),
        "v_sub_i16": lambda a, b: np.clip(a.astype(I32) - b, -32768, 32767).astype(np.int16),
    }
    return table.get(name)


# -- building the closure of an ordinary instruction ----------------------------------------------------------------


def source_codes(ins: Instr, count: int) -> list[int]:
    """Operand codes of the sources, in order."""
    if ins.fmt.startswith(("VOP1", "VOP2", "VOPC")):
        out = [ins.src0]
        if "vsrc1" in ins.fields:
            out.append(256 + ins.vsrc1)
        if ins.name in ("v_fmamk_f32", "v_madmk_f16"):
            out.insert(1, LITERAL)
        if ins.name in ("v_fmaak_f32", "v_madak_f16"):
            out.append(LITERAL)
    else:
        out = [ins.src0, ins.src1, ins.src2]
    return out[:count]


def _check_mods(ins: Instr, allowed: str) -> None:
    """Refuse modifiers that the instruction's implementation would ignore."""
    for key in ("neg", "abs", "omod", "clmp", "opsel", "neg_hi"):
        if ins.fields.get(key) and key not in allowed:
            raise UnsupportedError(f"modifier {key}={ins.fields[key]:#x} on {ins.name}", ins.where)


def gather_sources(ctx: Ctx, ins: Instr, types: str) -> tuple[list[Src], Dpp | None]:
    """Source operands with DPP, SDWA, op_sel, neg and abs applied."""
    codes = source_codes(ins, len(types))
    srcs: list[Src] = []
    dpp: Dpp | None = None
    sdwa = "SDWA" in ins.fmt
    if ins.fmt.endswith("_DPP16"):
        dpp = Dpp(ins)
    for k, (code, t) in enumerate(zip(codes, types, strict=True)):
        neg = abs_ = False
        if sdwa:
            if k == 0:
                c = ins.vsrc0 if ins.get("s0") else 256 + ins.vsrc0
                s = _sdwa_src(ctx, ins, c, t, ins.src0_sel, bool(ins.src0_sext))
            else:
                c = ins.vsrc1 if ins.get("s1") else 256 + ins.vsrc1
                s = _sdwa_src(ctx, ins, c, t, ins.src1_sel, bool(ins.src1_sext))
            neg, abs_ = bool(ins.get(f"src{k}_neg")), bool(ins.get(f"src{k}_abs"))
        elif dpp is not None and k == 0:
            s = dpp.wrap(ctx.src(ins, 256 + ins.vsrc0, t))
            neg, abs_ = bool(ins.src0_neg), bool(ins.src0_abs)
        else:
            if ins.fmt.startswith("VOP3") and t in _SHORT and ins.get("opsel") >> k & 1:
                s = _hi_half(ctx, ins, code, t)
            else:
                s = ctx.src(ins, code, t)
                if t in _SHORT and code >= 256:
                    s = _lo_shadow(s)
            if dpp is not None and k == 1:
                neg, abs_ = bool(ins.src1_neg), bool(ins.src1_abs)
            elif ins.fmt.startswith("VOP3"):
                neg, abs_ = bool(ins.get("neg") >> k & 1), bool(ins.get("abs") >> k & 1)
        if neg or abs_:
            if t not in "fhD":
                raise UnsupportedError(f"neg/abs on an integer operand of {ins.name}", ins.where)
            s = Src(_with_neg_abs(s.get, neg, abs_), s.shadow, s.ids)
        srcs.append(s)
    return srcs, dpp


def _flush(t: str, x: Any, g: WaveGroup) -> Any:
    if t == "f" and g.fz32:
        return fl.flush32(x)
    if t == "h" and g.fz16:
        return fl.flush16(x)
    return x


def build_op(ctx: Ctx, ins: Instr, op: Op) -> Step:
    """Closure of an instruction of the OPS table."""
    where = ins.where
    types = op.src
    _check_mods(ins, "neg abs clmp opsel")
    if ins.fmt.startswith("VOP3") and ins.get("opsel") and not (_SHORT & set(types + op.dst)):
        raise UnsupportedError(f"op_sel on {ins.name}", where)
    srcs, dpp = gather_sources(ctx, ins, types)
    fn = op.fn
    if op.accumulate:
        srcs.append(ctx.src(ins, 256 + ins.vdst, op.dst))
        types += op.dst
    high = ins.fmt.startswith("VOP3") and op.dst in _SHORT and bool(ins.get("opsel") >> 3 & 1)
    dst = Dst(ctx, ins, op.dst, ins.vdst & 255, high, ins.name in _PRESERVE_HIGH)
    if "SDWA" in ins.fmt:
        return _sdwa_step(ctx, ins, op, srcs, types)
    if ins.get("clmp"):
        sat = _int_clamp(ins.name)
        if op.dst in "fhD":
            inner, limit = fn, _clamp(op.dst)
            fn = lambda *a: limit(inner(*a))  # noqa: E731
        elif sat is not None:
            fn = sat
        else:
            raise UnsupportedError(f"clamp on {ins.name}", where)
    src_ids = frozenset(i for s in srcs for i in s.ids)
    ids = src_ids | frozenset(dst.ids)
    is_fp, half_dst = op.fp, op.dst == "h" or ins.name == "v_cvt_pk_f16_f32"
    gets = [s.get for s in srcs]
    pack_ovfl = ins.name == "v_cvt_pk_f16_f32"
    keep_denorm = ins.name in ("v_ldexp_f32",)

    def value(g: WaveGroup) -> Any:
        if is_fp and (g.fz32 or g.fz16):
            vals = [_flush(t, x(g), g) for t, x in zip(types, gets, strict=True)]
            r = fn(*vals)
            if op.dst == "f" and g.fz32 and not keep_denorm:
                r = fl.flush32(r)
            elif op.dst == "h" and g.fz16:
                r = fl.flush16(r)
        else:
            vals = [x(g) for x in gets]
            r = fn(*vals)
        if half_dst and g.ovfl:
            if pack_ovfl:
                a, b = (fl.saturate16(v.astype(F16), v) for v in vals)
                return _pack16(a, b)
            r = fl.saturate16(np.asarray(r, F16), *vals)
        return r

    def slow(g: WaveGroup, mask: Array | None) -> None:
        g.check_pending(ids, where)
        sh = None
        if not g.dirty.isdisjoint(src_ids):
            sh = result_shadow(Op(fn, op.dst, types, op.spread, op.data, shift=op.shift), srcs, g, types)
        r = value(g)
        dst.write(g, r, mask)
        dst.shade(g, sh, mask)

    if dpp is not None:
        d = dpp

        def step_dpp(g: WaveGroup) -> None:
            mask = d.lanes(g)
            if g.dirty.isdisjoint(ids):
                dst.write(g, value(g), mask)
            else:
                slow(g, mask)

        return step_dpp

    plain = dst.regs == 1 and TYPES[op.dst][1] == 32
    attr = {"f": "F", "i": "I", "u": "V"}.get(op.dst, "V")
    row = dst.row
    n = len(gets)
    if plain and not half_dst and n == 2 and not is_fp:
        g0, g1 = gets

        def step2(g: WaveGroup) -> None:
            if not g.dirty.isdisjoint(ids):
                slow(g, None if g.full else g.mask)
            elif g.full:
                getattr(g, attr)[row] = fn(g0(g), g1(g))
            else:
                np.copyto(getattr(g, attr)[row], fn(g0(g), g1(g)), where=g.mask)

        return step2

    def step(g: WaveGroup) -> None:
        mask = None if g.full else g.mask
        if g.dirty.isdisjoint(ids):
            dst.write(g, value(g), mask)
        else:
            slow(g, mask)

    return step


def _sdwa_step(ctx: Ctx, ins: Instr, op: Op, srcs: list[Src], types: str) -> Step:
    """SDWA: the result goes to a byte or word of the destination."""
    where = ins.where
    if ins.get("omod") or (ins.get("clmp") and op.dst not in "fh"):
        raise UnsupportedError("omod or clamp in SDWA", where)
    if TYPES[op.dst][1] == 64:
        if ins.dst_sel != 6:
            raise UnsupportedError("dst_sel on a 64-bit SDWA result", where)
        dq = Dst(ctx, ins, op.dst, ins.vdst)
        ids64 = frozenset(i for s in srcs for i in s.ids) | set(dq.ids)

        def step64(g: WaveGroup) -> None:
            mask = None if g.full else g.mask
            sh = None
            if not g.dirty.isdisjoint(ids64):
                g.check_pending(ids64, where)
                sh = result_shadow(op, srcs, g, types)
            dq.write(g, op.fn(*[s.get(g) for s in srcs]), mask)
            dq.shade(g, sh, mask)

        return step64
    row = ctx.vrow(ins, ins.vdst)
    sel, unused = ins.dst_sel, ins.dst_unused
    if sel == 6:
        shift, width = 0, 32
    elif sel < 4:
        shift, width = 8 * sel, 8
    else:
        shift, width = 16 * (sel - 4), 16
    if sel == 7 or unused == 3:
        raise UnsupportedError("SDWA destination selector", where)
    field = U32(((1 << width) - 1) << shift if width < 32 else 0xFFFFFFFF)
    ids = frozenset(i for s in srcs for i in s.ids) | {row}
    clamp = _clamp(op.dst) if ins.get("clmp") else None

    def place(r: Any, old: Any, sext: bool) -> Any:
        if width == 32:
            return r
        if unused == 2:
            return (old & ~field) | ((r << U32(shift)) & field)
        if unused == 1 and sext:
            up = U32(32 - width)
            return (((r << up).view(I32) >> I32(32 - width)).view(U32)) << U32(shift)
        return (r << U32(shift)) & field

    def step(g: WaveGroup) -> None:
        mask = None if g.full else g.mask
        sh: Any = None
        if not g.dirty.isdisjoint(ids):
            g.check_pending(ids, where)
            sh = result_shadow(op, srcs, g, types)[0]
        vals = [s.get(g) for s in srcs]
        if op.fp:
            vals = [_flush(t, v, g) for t, v in zip(types, vals, strict=True)]
        r = op.fn(*vals)
        if op.dst == "h" and g.ovfl:
            r = fl.saturate16(r, *vals)
        if clamp is not None:
            r = clamp(r)
        b = _as_bits(r).astype(U32)
        out = place(b, g.V[row], True)
        if sh is not None:
            old = g.VU[row] if row in g.dirty else np.zeros_like(g.VU[row])
            g.shade_v(row, place(np.asarray(sh, U32), old, True))
        if mask is None:
            g.V[row] = out
        else:
            np.copyto(g.V[row], out, where=mask)

    return step


# -- compares ----------------------------------------------------------------------------------------------------

_COND_INT: dict[str, Callable[[Any, Any], Any]] = {
    "f": lambda a, b: np.zeros(np.broadcast_shapes(a.shape, b.shape), bool), "lt": np.less, "eq": np.equal,
    "le": np.less_equal, "gt": np.greater, "ne": np.not_equal, "lg": np.not_equal, "ge": np.greater_equal,
    "t": lambda a, b: np.ones(np.broadcast_shapes(a.shape, b.shape), bool),
}  # fmt: skip
_COND_FP: dict[str, Callable[[Any, Any], Any]] = {
    "f": _COND_INT["f"], "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater,
    "lg": lambda a, b: (a < b) | (a > b), "ge": np.greater_equal, "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b), "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b), "nle": lambda a, b: ~(a <= b), "neq": np.not_equal, "nlt": lambda a, b: ~(a < b),
    "tru": _COND_INT["t"],
}  # fmt: skip
_CMP_TYPES = {"f32": "f", "f16": "h", "f64": "D", "i32": "i", "u32": "u", "i16": "s", "u16": "w", "i64": "L",
              "u64": "Q"}  # fmt: skip


def _class(a: Any, m: Any) -> Any:
    bits = {F32: 32, F16: 16, F64: 64}[a.dtype.type]
    neg = np.signbit(a)
    tiny = np.finfo(a.dtype).tiny
    den = (a != 0) & (np.abs(a) < tiny)
    snan = fl._is_snan(np.ascontiguousarray(a))
    nan = np.isnan(a)
    inf = np.isinf(a)
    zero = a == 0
    norm = ~(nan | inf | zero | den)
    cases = [snan, nan & ~snan, neg & inf, neg & norm, neg & den, neg & zero, ~neg & zero, ~neg & den, ~neg & norm,
             ~neg & inf]  # fmt: skip
    del bits
    out: Any = np.zeros(np.broadcast_shapes(a.shape, m.shape), bool)
    for k, c in enumerate(cases):
        out = out | (c & ~(nan & (k > 1)) & ((m >> U32(k)) & U32(1)).astype(bool))
    return out


def build_cmp(ctx: Ctx, ins: Instr) -> Step:
    """v_cmp and v_cmpx: a lane mask; inactive lanes get 0."""
    where = ins.where
    parts = ins.name.split("_")
    x = parts[1] == "cmpx"
    cond, t = parts[2], _CMP_TYPES[parts[3]]
    _check_mods(ins, "neg abs opsel" if t in "fhDws" else "")
    if cond == "class":
        srcs, dpp = gather_sources(ctx, ins, t + "u")
        fn: Callable[[Any, Any], Any] = _class
    else:
        srcs, dpp = gather_sources(ctx, ins, t * 2)
        table = _COND_FP if t in "fhD" else _COND_INT
        if cond not in table:
            raise UnsupportedError(f"comparison {ins.name}", where)
        fn = table[cond]
    if dpp is not None:
        raise UnsupportedError("DPP on a comparison", where)
    if "SDWA" in ins.fmt:
        dst = ins.sdst if ins.sd else 106
    elif ins.fmt == "VOP3_SDST" or (ins.fmt == "VOP3" and x):
        dst = ins.vdst
    else:
        dst = 106
    if dst & 1:
        raise UnsupportedError(f"comparison into odd register s{dst}", where)
    a, b = srcs
    src_ids = frozenset((*a.ids, *b.ids))
    ids = src_ids | {S_ID + dst, S_ID + dst + 1}
    is_fp = t in "fh"

    def step(g: WaveGroup) -> None:
        p, q = a.get(g), b.get(g)
        if is_fp and (g.fz32 or g.fz16) and cond != "class":
            p, q = _flush(t, p, g), _flush(t, q, g)
        r = fn(p, q)
        r = np.broadcast_to(r, g.mask.shape) if g.full else r & g.mask
        sh = None
        if not g.dirty.isdisjoint(ids):
            g.check_pending(ids, where)
            if not g.dirty.isdisjoint(src_ids):
                bad = any_lanes([a.shadow(g), b.shadow(g)])
                sh = pack64(np.ascontiguousarray(bad & g.mask))
        m = pack64(np.ascontiguousarray(r))
        write_sgpr64(g, dst, m, sh)
        if x:
            write_sgpr64(g, 126, m, sh)

    return step


# -- instructions with a lane mask, carries, lane moves --------------------------------------------------------------


def build_cndmask(ctx: Ctx, ins: Instr) -> Step:
    """v_cndmask_b32: the mask is VCC or an SGPR pair."""
    where = ins.where
    _check_mods(ins, "neg abs")
    floaty = bool(ins.get("neg") or ins.get("abs"))
    srcs, dpp = gather_sources(ctx, ins, "ff" if floaty else "uu")
    mget, mshadow, mids = ctx.mask_src(ins, ins.src2 if ins.fmt == "VOP3" else 106)
    if "SDWA" in ins.fmt:
        cond = Src(lambda g: mget(g), lambda g: [np.where(mshadow(g), ONES, U32(0))], mids)
        op = Op(lambda p, q, c: np.where(c, q, p), "u", "uuu", "any")
        return _sdwa_step(ctx, ins, op, [*srcs, cond], "uuu")
    a, b = srcs
    row = ctx.vrow(ins, ins.vdst)
    src_ids = frozenset((*a.ids, *b.ids, *mids))
    ids = src_ids | {row}

    def step(g: WaveGroup) -> None:
        c = mget(g)
        p, q = a.get(g), b.get(g)
        r: Any = np.where(c, q, p)
        if floaty:
            r = r.view(U32)
        mask = (None if g.full else g.mask) if dpp is None else dpp.lanes(g)
        if not g.dirty.isdisjoint(ids):
            g.check_pending(ids, where)
            sa, sb = a.shadow(g)[0], b.shadow(g)[0]
            sh = np.where(c, sb, sa).astype(U32)
            cu = mshadow(g)
            if cu.any():
                sh = np.where(cu & (p != q), ONES, sh | np.where(cu, sa | sb, U32(0)))
            if mask is None:
                g.VU[row] = sh
            else:
                if row not in g.dirty:
                    g.VU[row] = 0
                np.copyto(g.VU[row], np.asarray(sh, U32), where=mask)
            if g.VU[row].any():
                g.dirty.add(row)
            else:
                g.dirty.discard(row)
        if mask is None:
            g.V[row] = r
        else:
            np.copyto(g.V[row], r, where=mask)

    return step


def build_carry(ctx: Ctx, ins: Instr) -> Step:
    """v_add_co, v_sub_co, v_subrev_co and their carry-in forms; v_mad_u64_u32, v_mad_i64_i32."""
    where, name = ins.where, ins.name
    _check_mods(ins, "")
    sd = ins.fmt == "VOP3SD"
    wide = name in ("v_mad_u64_u32", "v_mad_i64_i32")
    cin = name in ("v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32")
    sdst = ins.sdst if sd else 106
    if wide:
        t = "uuQ" if name == "v_mad_u64_u32" else "iiL"
        srcs, dpp = gather_sources(ctx, ins, t)
    else:
        srcs, dpp = gather_sources(ctx, ins, "uu")
    if dpp is not None or "SDWA" in ins.fmt:
        raise UnsupportedError(f"DPP or SDWA on {name}", where)
    dst = Dst(ctx, ins, "Q" if wide else "u", ins.vdst)
    mget, mshadow, mids = ctx.mask_src(ins, (ins.src2 if sd else 106)) if cin else (None, None, ())
    ids = frozenset(i for s in srcs for i in s.ids) | set(mids)
    all_ids = ids | set(dst.ids) | {S_ID + sdst, S_ID + sdst + 1}

    def step(g: WaveGroup) -> None:
        v = [s.get(g) for s in srcs]
        if wide:
            if name == "v_mad_u64_u32":
                prod = v[0].astype(U64) * v[1].astype(U64)
                r: Any = prod + v[2]
                carry = r < prod
            else:
                prod_i = v[0].astype(I64) * v[1].astype(I64)
                r = (prod_i + v[2]).view(U64)
                carry = ((prod_i ^ r.view(I64)) & (v[2] ^ r.view(I64))) < 0
        else:
            a, b = v[0].astype(I64), v[1].astype(I64)
            c: Any = mget(g).astype(I64) if mget is not None else 0
            if name.startswith("v_add"):
                tot = a + b + c
                carry = tot > 0xFFFFFFFF
            else:
                tot = (b - a - c) if "rev" in name else (a - b - c)
                carry = tot < 0
            r = (tot & 0xFFFFFFFF).astype(U32)
        mask = None if g.full else g.mask
        sh, msh = None, None
        if not g.dirty.isdisjoint(all_ids):
            g.check_pending(all_ids, where)
            bad = any_lanes([s.shadow(g) for s in srcs])
            if mshadow is not None:
                bad = bad | mshadow(g)
            bad = np.broadcast_to(bad, g.mask.shape)
            msh = pack64(np.ascontiguousarray(bad & g.mask))
            lane = np.where(bad, ONES, U32(0))
            if name in ("v_add_co_u32", "v_sub_co_u32", "v_subrev_co_u32"):
                u = np.asarray(srcs[0].shadow(g)[0], U32) | np.asarray(srcs[1].shadow(g)[0], U32)
                lane = np.broadcast_to(u | (U32(0) - u), g.mask.shape)
            sh = [lane] * dst.regs
            if wide:  # the product is all or nothing; the addition spreads upwards
                w = _join(srcs[2].shadow(g), 64)
                w = np.where(any_lanes([srcs[0].shadow(g), srcs[1].shadow(g)]), ~U64(0), w | (U64(0) - w))
                w = np.broadcast_to(w, g.mask.shape)
                sh = [w.astype(U32), (w >> U64(32)).astype(U32)]
        dst.write(g, r, mask)
        if sh is not None:
            dst.shade(g, sh, mask)
        m = np.broadcast_to(carry, g.mask.shape) & g.mask
        write_sgpr64(g, sdst, pack64(np.ascontiguousarray(m)), msh)

    return step


def _first_lane(g: WaveGroup) -> Array:
    return np.where(g.mask.any(1), g.mask.argmax(1), 0)


def build_lane(ctx: Ctx, ins: Instr) -> Step:
    """v_readfirstlane, v_readlane, v_writelane."""
    where, name = ins.where, ins.name
    _check_mods(ins, "")
    if name == "v_writelane_b32":
        val, lane = ctx.src(ins, ins.src0, "u"), ctx.src(ins, ins.src1, "u")
        row = ctx.vrow(ins, ins.vdst)
        ids = frozenset((*val.ids, *lane.ids, row))

        def wl(g: WaveGroup) -> None:
            n = np.arange(g.n)
            ln = np.broadcast_to(lane.get(g)[:, 0] & U32(63), (g.n,)).astype(int)
            if not g.dirty.isdisjoint(ids):
                g.check_pending(ids, where)
                if row not in g.dirty:
                    g.VU[row] = 0
                sh = val.shadow(g)[0]
                g.VU[row, n, ln] = sh[:, 0] if isinstance(sh, np.ndarray) else 0
                if g.VU[row].any():
                    g.dirty.add(row)
                else:
                    g.dirty.discard(row)
            g.V[row, n, ln] = np.broadcast_to(val.get(g)[:, 0], (g.n,))

        return wl
    if ins.src0 < 256:
        raise UnsupportedError(f"{name} of a scalar operand", where)
    row = ctx.vrow(ins, ins.src0 - 256)
    sdst = ins.vdst
    sel = ctx.src(ins, ins.src1, "u") if name == "v_readlane_b32" else None
    ids2 = frozenset((row, S_ID + sdst, *(sel.ids if sel else ())))

    def rl(g: WaveGroup) -> None:
        ln = (
            _first_lane(g) if sel is None else np.broadcast_to(sel.get(g)[:, 0] & U32(63), (g.n,)).astype(int)
        )
        n = np.arange(g.n)
        sh = None
        if not g.dirty.isdisjoint(ids2):
            g.check_pending(ids2, where)
            if row in g.dirty:
                sh = g.VU[row, n, ln]
        write_sgpr(g, sdst, g.V[row, n, ln], sh)

    return rl


def build_swap(ctx: Ctx, ins: Instr) -> Step:
    """v_swap_b32, v_permlane16_swap_b32, v_permlane32_swap_b32: both registers change."""
    where, name = ins.where, ins.name
    _check_mods(ins, "")
    if ins.src0 < 256:
        raise UnsupportedError(f"{name} of a scalar operand", where)
    a, b = ctx.vrow(ins, ins.vdst), ctx.vrow(ins, ins.src0 - 256)
    ids = frozenset((a, b))
    lane = np.arange(64)
    if name == "v_swap_b32":
        give = np.ones(64, bool)
        peer = lane
    else:
        k = 16 if name == "v_permlane16_swap_b32" else 32
        give = (lane & k) != 0  # these lanes of vdst go to the lower lanes of src0
        peer = lane ^ k

    def exchange(x: Array, y: Array, mask: Array) -> tuple[Array, Array]:
        if name == "v_swap_b32":
            return np.where(mask, y, x), np.where(mask, x, y)
        # vdst[hi lanes] <-> src0[lo lanes]; a lane takes part when both it and its partner are active
        ok = mask & mask[:, peer]
        nx = np.where(give & ok, y[:, peer], x)
        ny = np.where(~give & ok, x[:, peer], y)
        return nx, ny

    def step(g: WaveGroup) -> None:
        if not g.dirty.isdisjoint(ids):
            g.check_pending(ids, where)
            su = [g.VU[r] if r in g.dirty else np.zeros_like(g.VU[r]) for r in (a, b)]
            nu = exchange(su[0], su[1], g.mask)
            for r, u in zip((a, b), nu, strict=True):
                g.VU[r] = u
                if u.any():
                    g.dirty.add(r)
                else:
                    g.dirty.discard(r)
        x, y = exchange(g.V[a].copy(), g.V[b].copy(), g.mask)
        g.V[a], g.V[b] = x, y

    return step


def build_bitop3(ctx: Ctx, ins: Instr) -> Step:
    """v_bitop3_b32/b16: the truth table sits in the omod, abs and neg fields."""
    ttbl = (ins.omod << 6) | (ins.abs << 3) | ins.neg
    short = ins.name.endswith("b16")

    def fn(a: Any, b: Any, c: Any) -> Any:
        r: Any = a.dtype.type(0)
        for k in range(8):
            if ttbl >> k & 1:
                x = a if k & 4 else ~a
                y = b if k & 2 else ~b
                z = c if k & 1 else ~c
                r = r | (x & y & z)
        return np.asarray(r)

    t = "w" if short else "u"
    fields = {k: v for k, v in ins.fields.items() if k not in ("omod", "abs", "neg")}
    bare = Instr(ins.name, ins.fmt, fields, ins.addr, ins.size, ins.literal)
    return build_op(ctx, bare, Op(fn, t, t * 3, "bits", (0, 1, 2)))


# -- division helpers, fp8 ---------------------------------------------------------------------------------------


def build_div(ctx: Ctx, ins: Instr) -> Step:
    """v_div_scale and v_div_fmas."""
    where, name = ins.where, ins.name
    t = "D" if name.endswith("f64") else "f"
    exp_big, shift, tiny_exp = (768, 128, 53) if t == "D" else (96, 64, 23)
    _check_mods(ins, "neg abs")
    srcs, _ = gather_sources(ctx, ins, t * 3)
    dst = Dst(ctx, ins, t, ins.vdst)
    ids = frozenset(i for s in srcs for i in s.ids)
    if name.startswith("v_div_fmas"):
        mget, mshadow, mids = ctx.mask_src(ins, 106)
        all_ids = ids | set(dst.ids) | set(mids)
        fma = fl.fma64 if t == "D" else fl.fma32

        def fmas(g: WaveGroup) -> None:
            v = [s.get(g) for s in srcs]
            r = fma(*v)
            up = np.ldexp(r, 64 if t == "D" else 32).astype(r.dtype)
            mask = None if g.full else g.mask
            sh = None
            if not g.dirty.isdisjoint(all_ids):
                g.check_pending(all_ids, where)
                bad = any_lanes([s.shadow(g) for s in srcs]) | mshadow(g)
                sh = [np.where(bad, ONES, U32(0))] * dst.regs
            dst.write(g, np.where(mget(g), up, r), mask)
            if sh is not None:
                dst.shade(g, sh, mask)

        return fmas
    sdst = ins.sdst
    all_ids2 = ids | set(dst.ids) | {S_ID + sdst, S_ID + sdst + 1}

    def exponent(x: Array) -> Array:
        if t == "D":
            return ((np.ascontiguousarray(x).view(U64) >> U64(52)) & U64(0x7FF)).astype(int)
        return ((np.ascontiguousarray(x).view(U32) >> U32(23)) & U32(0xFF)).astype(int)

    def scale(g: WaveGroup) -> None:
        a, b, c = np.broadcast_arrays(*[s.get(g) for s in srcs])
        dt = a.dtype
        up, down = np.ldexp(a, shift).astype(dt), np.ldexp(a, -shift).astype(dt)
        eb, ec = exponent(b), exponent(c)
        den_b = (eb == 0) & (b != 0)
        with np.errstate(all="ignore"):
            rcp_den = (np.abs(dt.type(1) / b) < np.finfo(dt).tiny) & np.isfinite(b)
            q = c.astype(np.longdouble) / b.astype(np.longdouble)
            q_den = (np.abs(q) < np.finfo(dt).tiny) & (q != 0)
        is_den, is_num = a == b, a == c
        conds = [
            (b == 0) | (c == 0), ec - eb >= exp_big, den_b, rcp_den & q_den, rcp_den, q_den, ec <= tiny_exp,
        ]  # fmt: skip
        results = [
            np.full(a.shape, np.nan, dt), np.where(is_den, up, a), up, np.where(is_den, up, a), down,
            np.where(is_num, up, a), up,
        ]  # fmt: skip
        r = np.select(conds, results, a)
        vcc = np.select(conds, [False, True, False, True, False, True, False], False)
        mask = None if g.full else g.mask
        sh = msh = None
        if not g.dirty.isdisjoint(all_ids2):
            g.check_pending(all_ids2, where)
            bad = np.broadcast_to(any_lanes([s.shadow(g) for s in srcs]), g.mask.shape)
            sh = [np.where(bad, ONES, U32(0))] * dst.regs
            msh = pack64(np.ascontiguousarray(bad & g.mask))
        dst.write(g, r.astype(dt), mask)
        if sh is not None:
            dst.shade(g, sh, mask)
        m = np.broadcast_to(vcc, g.mask.shape) & g.mask
        write_sgpr64(g, sdst, pack64(np.ascontiguousarray(m)), msh)

    return scale


def _partial_step(ctx: Ctx, ins: Instr, srcs: list[Src], fn: Callable[[WaveGroup, list[Any]], Any], lo: int,
                  width: int) -> Step:  # fmt: skip
    """A result that fills bits lo..lo+width of the destination and preserves the others."""
    where = ins.where
    row = ctx.vrow(ins, ins.vdst)
    field = U32(((1 << width) - 1) << lo)
    src_ids = frozenset(i for s in srcs for i in s.ids)
    ids = src_ids | {row}

    def step(g: WaveGroup) -> None:
        r = np.asarray(fn(g, [s.get(g) for s in srcs]), U32)
        if not g.dirty.isdisjoint(ids):
            g.check_pending(ids, where)
            old = g.VU[row] if row in g.dirty else np.zeros_like(g.VU[row])
            bad = any_lanes([s.shadow(g) for s in srcs])
            if row not in g.dirty:
                g.VU[row] = 0
            g.shade_v(row, np.where(bad, field, U32(0)) | (old & ~field))
        out = (g.V[row] & ~field) | ((r << U32(lo)) & field)
        if g.full:
            g.V[row] = out
        else:
            np.copyto(g.V[row], out, where=g.mask)

    return step


def _pow2(scale: Any) -> Any:
    """2^(exponent - 127) of an fp32 scale operand."""
    e = ((np.ascontiguousarray(scale).view(U32) >> U32(23)) & U32(0xFF)).astype(int)
    return np.ldexp(1.0, e - 127)


def build_fp8(ctx: Ctx, ins: Instr) -> Step:
    """Conversions from and to fp8/bf8, with and without scale."""
    name, where = ins.name, ins.where
    fmt = fl.fp8_format(ctx.arch, "bf8" in name)
    opsel = ins.get("opsel")
    if name in ("v_cvt_f32_fp8", "v_cvt_f32_bf8"):
        _check_mods(ins, "")
        return build_op(ctx, ins, Op(lambda a: fmt.decode(a), "f", "u", fp=False))
    if name in ("v_cvt_pk_f32_fp8", "v_cvt_pk_f32_bf8"):
        _check_mods(ins, "opsel")
        base = ctx.src
        sh = U32(16) if opsel & 1 else U32(0)

        def pk(a: Any) -> Any:
            a = a >> sh
            lo, hi = fmt.decode(a), fmt.decode(a >> U32(8))
            return lo.view(U32).astype(U64) | (hi.view(U32).astype(U64) << U64(32))

        del base
        bare = Instr(name, ins.fmt, {k: (0 if k == "opsel" else v) for k, v in ins.fields.items()}, ins.addr, ins.size,
                     ins.literal)  # fmt: skip
        return build_op(ctx, bare, Op(pk, "Q", "u", fp=False))
    if name in ("v_cvt_pk_fp8_f32", "v_cvt_pk_bf8_f32"):
        _check_mods(ins, "neg abs opsel")
        srcs, _ = gather_sources(ctx, ins, "ff")

        def enc(g: WaveGroup, v: list[Any]) -> Any:
            return fmt.encode(v[0], g.ovfl) | (fmt.encode(v[1], g.ovfl) << U32(8))

        return _partial_step(ctx, ins, srcs, enc, 16 if opsel & 8 else 0, 16)
    if name in ("v_cvt_sr_fp8_f32", "v_cvt_sr_bf8_f32"):
        _check_mods(ins, "neg abs opsel")
        srcs, _ = gather_sources(ctx, ins, "fu")
        keep = 20 if "fp8" in name else 21  # mantissa bits of fp32 beyond those of the format

        def stochastic(g: WaveGroup, v: list[Any]) -> Any:
            u = np.ascontiguousarray(v[0]).view(U32)
            add = v[1] >> U32(32 - keep)
            finite = (u & U32(0x7F800000)) != U32(0x7F800000)
            t = np.where(finite, (u + add) & ~U32((1 << keep) - 1), u)
            return fmt.encode(t.view(F32), g.ovfl)

        return _partial_step(ctx, ins, srcs, stochastic, 8 * (opsel >> 2), 8)
    if name.startswith("v_cvt_scalef32_"):
        return _scalef32(ctx, ins, fmt)
    raise UnsupportedError(f"instruction {name}", where)


def _scalef32(ctx: Ctx, ins: Instr, fmt: fl.Float8) -> Step:
    name, where, opsel = ins.name, ins.where, ins.get("opsel")
    parts = name.removeprefix("v_cvt_scalef32_").split("_")
    pk = parts[0] == "pk"
    if pk:
        parts = parts[1:]
    if len(parts) != 2:
        raise UnsupportedError(f"instruction {name}", where)
    to, frm = parts
    bare = Instr(name, ins.fmt, {k: (0 if k == "opsel" else v) for k, v in ins.fields.items()}, ins.addr, ins.size,
                 ins.literal)  # fmt: skip
    if to in ("fp8", "bf8") and pk:
        _check_mods(ins, "neg abs opsel" if frm == "f32" else "opsel")
        if frm == "f32":
            srcs, _ = gather_sources(ctx, bare, "fff")
        else:
            srcs = [ctx.src(ins, ins.src0, "u"), ctx.src(ins, ins.src1, "f")]

        def enc(g: WaveGroup, v: list[Any]) -> Any:
            if frm == "f32":
                a, b, s = v
            else:
                w, s = v
                if frm == "f16":
                    a, b = w.astype(U16).view(F16), (w >> U32(16)).astype(U16).view(F16)
                else:
                    a, b = fl.bf16_bits_to_f32(w & U32(0xFFFF)), fl.bf16_bits_to_f32(w >> U32(16))
            k = _pow2(s)
            return fmt.encode(a / k, g.ovfl) | (fmt.encode(b / k, g.ovfl) << U32(8))

        return _partial_step(ctx, ins, srcs, enc, 16 if opsel & 8 else 0, 16)
    if frm in ("fp8", "bf8", "fp4"):
        _check_mods(ins, "opsel")
        src, scale = ctx.src(ins, ins.src0, "u"), ctx.src(ins, ins.src1, "f")

        def dec(v: Any, k: int) -> Any:
            if frm == "fp4":
                return fl.FP4_TABLE[((v >> U32(8 * (opsel & 3) + 4 * k)) & U32(15)).astype(int)].astype(F64)
            sh = 16 * (opsel & 1) + 8 * k if pk else 8 * (opsel & 3)
            return fmt.decode(v >> U32(sh)).astype(F64)

        if pk and to == "f32":

            def to32(v: Any, s: Any) -> Any:
                lo, hi = ((dec(v, k) * _pow2(s)).astype(F32) for k in (0, 1))
                return lo.view(U32).astype(U64) | (hi.view(U32).astype(U64) << U64(32))

            return build_op(ctx, bare, Op(to32, "Q", "uf", fp=False))
        if pk and to == "f16":
            return build_op(ctx, bare, Op(
                lambda v, s: _pack16(*[(dec(v, k) * _pow2(s)).astype(F16) for k in (0, 1)]), "u", "uf",
                fp=False))  # fmt: skip
        if pk and to == "bf16":

            def tobf(v: Any, s: Any) -> Any:
                lo, hi = (fl.f32_to_bf16_bits((dec(v, k) * _pow2(s)).astype(F32)) for k in (0, 1))
                return lo | (hi << U32(16))

            return build_op(ctx, bare, Op(tobf, "u", "uf", fp=False))
        if not pk and to == "f32":
            del src, scale
            return build_op(
                ctx, bare, Op(lambda v, s: (dec(v, 0) * _pow2(s)).astype(F32), "f", "uf", fp=False)
            )
    if to == "fp4" and pk and frm == "f32":
        _check_mods(ins, "neg abs opsel")
        srcs, _ = gather_sources(ctx, bare, "fff")
        pos = fl.FP4_TABLE[:8].astype(F64)
        mids = (pos[:-1] + pos[1:]) / 2

        def enc4(x: Any) -> Any:
            a = np.abs(x)
            i = np.searchsorted(mids, a, side="left")
            i = i + ((a == mids[np.minimum(i, 6)]) & (i & 1 == 1))
            return np.where(np.isnan(x), 7, np.minimum(i, 7)).astype(U32) | np.where(
                np.signbit(x), U32(8), U32(0)
            )

        return _partial_step(ctx, ins, srcs, lambda g, v: enc4(v[0].astype(F64) / _pow2(v[2]))
                             | (enc4(v[1].astype(F64) / _pow2(v[2])) << U32(4)), 8 * (opsel >> 2), 8)  # fmt: skip
    raise UnsupportedError(f"instruction {name}", where)


# -- packed ------------------------------------------------------------------------------------------------------


def _bcast_shift(x: Any) -> Any:
    return x & x.dtype.type(15)


_PK: dict[str, tuple[str, Callable[..., Any]]] = {
    "v_pk_add_f16": ("hh", np.add), "v_pk_mul_f16": ("hh", np.multiply), "v_pk_min_f16": ("hh", fl.fmin),
    "v_pk_max_f16": ("hh", fl.fmax), "v_pk_fma_f16": ("hhh", fl.fma16),
    "v_pk_minimum3_f16": ("hhh", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_pk_maximum3_f16": ("hhh", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_pk_add_u16": ("ww", lambda a, b: a + b), "v_pk_sub_u16": ("ww", lambda a, b: a - b),
    "v_pk_add_i16": ("ss", lambda a, b: a + b), "v_pk_sub_i16": ("ss", lambda a, b: a - b),
    "v_pk_mul_lo_u16": ("ww", lambda a, b: a * b), "v_pk_min_u16": ("ww", np.minimum),
    "v_pk_max_u16": ("ww", np.maximum), "v_pk_min_i16": ("ss", np.minimum), "v_pk_max_i16": ("ss", np.maximum),
    "v_pk_lshlrev_b16": ("ww", lambda a, b: b << _bcast_shift(a)),
    "v_pk_lshrrev_b16": ("ww", lambda a, b: b >> _bcast_shift(a)),
    "v_pk_ashrrev_i16": ("ss", lambda a, b: b >> _bcast_shift(a)),
    "v_pk_mad_u16": ("www", lambda a, b, c: a * b + c), "v_pk_mad_i16": ("sss", lambda a, b, c: a * b + c),
}  # fmt: skip
_PK_SAT = {
    "v_pk_add_u16": lambda a, b: np.minimum(a.astype(U32) + b, 65535).astype(U16),
    "v_pk_sub_u16": lambda a, b: np.where(a > b, a - b, U16(0)),
    "v_pk_add_i16": lambda a, b: np.clip(a.astype(I32) + b, -32768, 32767).astype(np.int16),
    "v_pk_sub_i16": lambda a, b: np.clip(a.astype(I32) - b, -32768, 32767).astype(np.int16),
}


def _half_of(s: Src, code: int, hi: int, t: str) -> tuple[Getter, Callable[[WaveGroup], Any]]:
    """One half of a 32-bit source as 16-bit values, and whether it is undefined per lane."""
    dtype = TYPES[t][0]
    sh = U32(16 * hi)

    def get(g: WaveGroup) -> Any:
        return (s.get(g) >> sh).astype(U16).view(dtype)

    def bad(g: WaveGroup) -> Any:
        x = s.shadow(g)[0]
        return ((x >> sh) & U32(0xFFFF)) != 0 if isinstance(x, np.ndarray) else False

    del code
    return get, bad


def _constant(value: Array) -> Src:
    """An operand that is the same in every wave, and defined."""
    return Src(lambda g: value, lambda g: [0], ())


def _widened(half: Src) -> Src:
    """An fp16 operand as fp32."""
    return Src(lambda g: half.get(g).astype(F32), half.shadow, half.ids)


def build_packed16(ctx: Ctx, ins: Instr) -> Step:
    """VOP3P with two 16-bit results."""
    name, where = ins.name, ins.where
    types, fn = _PK[name]
    clamp = bool(ins.clmp)
    if clamp:
        if name in _PK_SAT:
            fn = _PK_SAT[name]
        elif types[0] == "h":
            inner, lim = fn, _clamp("h")
            fn = lambda *a: lim(inner(*a))  # noqa: E731
        else:
            raise UnsupportedError(f"clamp on {name}", where)
    codes = [ins.src0, ins.src1, ins.src2][: len(types)]
    his = ins.opsel_hi | (ins.opsel_hi2 << 2)
    lo_half: list[tuple[Any, Any]] = []
    hi_half: list[tuple[Any, Any]] = []
    srcs: list[Src] = []
    for k, (code, t) in enumerate(zip(codes, types, strict=True)):
        if code < 240 or code == LITERAL or code >= 256:
            s = ctx.src(ins, code, "u")
        else:  # inline float constants supply the 16-bit pattern in the low half
            v = ctx.const(ins, code, 16)
            s = _constant(np.array([[v]], U32))
        srcs.append(s)
        for dest, sel, negs in ((lo_half, ins.opsel, ins.neg), (hi_half, his, ins.neg_hi)):
            get, bad = _half_of(s, code, sel >> k & 1, t)
            if negs >> k & 1:
                if t != "h":
                    raise UnsupportedError(f"neg on {name}", where)
                get = _with_neg_abs(get, True, False)
            dest.append((get, bad))
    row = ctx.vrow(ins, ins.vdst)
    src_ids = frozenset(i for s in srcs for i in s.ids)
    ids = src_ids | {row}
    is_h = types[0] == "h"

    def half(g: WaveGroup, parts: list[Any]) -> Any:
        vals = [p[0](g) for p in parts]
        if is_h and g.fz16:
            vals = [fl.flush16(v) for v in vals]
        r = fn(*vals)
        if is_h:
            r = np.asarray(r, F16)
            if g.fz16:
                r = fl.flush16(r)
            if g.ovfl:
                r = fl.saturate16(r, *vals)
        return r

    def step(g: WaveGroup) -> None:
        sh = None
        slow = not g.dirty.isdisjoint(ids)
        if slow:
            g.check_pending(ids, where)
            lo_bad: Any = False
            hi_bad: Any = False
            for p in lo_half:
                lo_bad = lo_bad | p[1](g)
            for p in hi_half:
                hi_bad = hi_bad | p[1](g)
            sh = np.where(lo_bad, U32(0xFFFF), U32(0)) | np.where(hi_bad, U32(0xFFFF0000), U32(0))
        r = _pack16(half(g, lo_half), half(g, hi_half))
        if g.full:
            g.V[row] = r
        else:
            np.copyto(g.V[row], r, where=g.mask)
        if slow:
            if row not in g.dirty:
                g.VU[row] = 0
            g.shade_v(row, np.broadcast_to(np.asarray(sh, U32), g.mask.shape))

    return step


def build_packed32(ctx: Ctx, ins: Instr) -> Step:
    """v_pk_fma_f32, v_pk_mul_f32, v_pk_add_f32, v_pk_mov_b32: register pairs; op_sel chooses the half per result."""
    name, where = ins.name, ins.where
    if ins.clmp:
        raise UnsupportedError(f"clamp on {name}", where)
    mov = name == "v_pk_mov_b32"
    operations: dict[str, Callable[..., Any]] = {
        "v_pk_fma_f32": fl.fma32, "v_pk_mul_f32": np.multiply, "v_pk_add_f32": np.add, "v_pk_mov_b32": lambda a: a,
    }  # fmt: skip
    fn = operations[name]
    count = 3 if name == "v_pk_fma_f32" else 2
    codes = [ins.src0, ins.src1, ins.src2][:count]
    his = ins.opsel_hi | (ins.opsel_hi2 << 2)
    t = "u" if mov else "f"

    def part(code: int, hi: int, neg: int) -> Src:
        c = code + hi if code >= 256 or code < 128 else code
        s = ctx.src(ins, c, t)
        if neg:
            if mov:
                raise UnsupportedError("neg on v_pk_mov_b32", where)
            return Src(_with_neg_abs(s.get, True, False), s.shadow, s.ids)
        return s

    if mov:
        lo = [part(codes[0], ins.opsel & 1, 0)]
        hi = [part(codes[1], ins.opsel >> 1 & 1, 0)]
    else:
        lo = [part(c, ins.opsel >> k & 1, ins.neg >> k & 1) for k, c in enumerate(codes)]
        hi = [part(c, his >> k & 1, ins.neg_hi >> k & 1) for k, c in enumerate(codes)]
    row = ctx.vrow(ins, ins.vdst, False, 2)
    src_ids = frozenset(i for s in lo + hi for i in s.ids)
    ids = src_ids | {row, row + 1}

    def value(g: WaveGroup, parts: list[Src]) -> Any:
        vals = [s.get(g) for s in parts]
        if g.fz32 and not mov:
            return fl.flush32(fn(*[fl.flush32(v) for v in vals]))
        return fn(*vals)

    def step(g: WaveGroup) -> None:
        a, b = value(g, lo), value(g, hi)
        if mov:
            a, b = a.copy(), b.copy()  # views: the first write must not change the second source
        slow = not g.dirty.isdisjoint(ids)
        shs: list[Any] = []
        if slow:
            g.check_pending(ids, where)
            for parts in (lo, hi):
                if mov:
                    shs.append(
                        np.array(np.broadcast_to(np.asarray(parts[0].shadow(g)[0], U32), g.mask.shape))
                    )
                else:
                    bad = any_lanes([s.shadow(g) for s in parts])
                    shs.append(np.broadcast_to(np.where(bad, ONES, U32(0)), g.mask.shape))
        for k, r in enumerate((a, b)):
            dest: Any = g.V[row + k] if mov else g.F[row + k]
            if g.full:
                dest[...] = r
            else:
                np.copyto(dest, r, where=g.mask)
            if slow:
                if row + k not in g.dirty:
                    g.VU[row + k] = 0
                g.shade_v(row + k, shs[k])

    return step


def build_mix(ctx: Ctx, ins: Instr) -> Step:
    """v_fma_mix family: each source is fp32, or a chosen half as fp16."""
    name, where = ins.name, ins.where
    his = ins.opsel_hi | (ins.opsel_hi2 << 2)
    srcs: list[Src] = []
    for k, code in enumerate((ins.src0, ins.src1, ins.src2)):
        if his >> k & 1:
            if code < 256 and ctx.const(ins, code, 16) is not None:
                v = ctx.const(ins, code, 16)
                s = _constant(np.array([[v]], U16).view(F16).astype(F32))
            else:
                h = (
                    _hi_half(ctx, ins, code, "h")
                    if ins.opsel >> k & 1
                    else _lo_shadow(ctx.src(ins, code, "h"))
                )
                s = _widened(h)
        else:
            s = ctx.src(ins, code, "f")
        s = Src(_with_neg_abs(s.get, bool(ins.neg >> k & 1), bool(ins.neg_hi >> k & 1)), s.shadow, s.ids)
        srcs.append(s)
    fields = {"vdst": ins.vdst}
    limit = _clamp("f") if ins.clmp else None

    def calc(vals: list[Any]) -> Any:
        r = fl.fma32(*vals)
        return limit(r) if limit else r

    if name == "v_mad_mix_f32":
        dst = Dst(ctx, ins, "f", ins.vdst)
        ids = frozenset(i for s in srcs for i in s.ids) | set(dst.ids)

        def step(g: WaveGroup) -> None:
            mask = None if g.full else g.mask
            sh = None
            if not g.dirty.isdisjoint(ids):
                g.check_pending(ids, where)
                sh = [np.where(any_lanes([s.shadow(g) for s in srcs]), ONES, U32(0))]
            dst.write(g, calc([s.get(g) for s in srcs]), mask)
            if sh is not None:
                dst.shade(g, sh, mask)

        return step
    bare = Instr(name, ins.fmt, fields, ins.addr, ins.size)

    def to16(g: WaveGroup, v: list[Any]) -> Any:
        r = calc(v).astype(F16)
        if g.ovfl:
            r = fl.saturate16(r, *v)
        return np.ascontiguousarray(r).view(U16).astype(U32)

    return _partial_step(ctx, bare, srcs, to16, 16 if name == "v_mad_mixhi_f16" else 0, 16)


def build(ctx: Ctx, ins: Instr) -> Step:
    """The closure for a vector ALU instruction."""
    name = ins.name
    if name in ("v_nop", "v_clrexcp"):
        return lambda g: None
    if name.startswith("v_cmp"):
        return build_cmp(ctx, ins)
    if name == "v_cndmask_b32":
        return build_cndmask(ctx, ins)
    if ("_co_u32" in name) or name in ("v_mad_u64_u32", "v_mad_i64_i32"):
        return build_carry(ctx, ins)
    if name in ("v_readfirstlane_b32", "v_readlane_b32", "v_writelane_b32"):
        return build_lane(ctx, ins)
    if name in ("v_swap_b32", "v_permlane16_swap_b32", "v_permlane32_swap_b32"):
        return build_swap(ctx, ins)
    if name.startswith("v_bitop3"):
        return build_bitop3(ctx, ins)
    if name.startswith(("v_div_scale", "v_div_fmas")):
        return build_div(ctx, ins)
    if "fp8" in name or "bf8" in name or name.startswith("v_cvt_scalef32"):
        return build_fp8(ctx, ins)
    if name in _PK:
        return build_packed16(ctx, ins)
    if name in ("v_pk_fma_f32", "v_pk_mul_f32", "v_pk_add_f32", "v_pk_mov_b32"):
        return build_packed32(ctx, ins)
    if name.startswith("v_mad_mix"):
        return build_mix(ctx, ins)
    if name.startswith("v_accvgpr_"):
        return _accvgpr(ctx, ins)
    if name in OPS:
        if ins.fmt == "VOP3P":  # dot products: only the plain form
            if ins.opsel or ins.neg or ins.neg_hi or (ins.opsel_hi | ins.opsel_hi2 << 2) not in (7, 3, 0):
                raise UnsupportedError(f"modifiers on {name}", ins.where)
            clamp = ins.clmp
            fields = {k: v for k, v in ins.fields.items() if k in ("src0", "src1", "src2", "vdst")}
            if clamp:
                raise UnsupportedError(f"clamp on {name}", ins.where)
            ins = Instr(name, "VOP3", fields, ins.addr, ins.size, ins.literal)
        return build_op(ctx, ins, OPS[name])
    raise UnsupportedError(f"instruction {name}", ins.where)


def _accvgpr(ctx: Ctx, ins: Instr) -> Step:
    """Moves between the two halves of the unified register file."""
    name, where = ins.name, ins.where
    if name == "v_accvgpr_read":
        src, dst = ctx.vrow(ins, ins.src0 & 255, True), ctx.vrow(ins, ins.vdst)
        s = None
    elif name == "v_accvgpr_write":
        dst = ctx.vrow(ins, ins.vdst, True)
        s = ctx.src(ins, ins.src0, "u")
        src = -1
    else:
        src, dst = ctx.vrow(ins, ins.src0 & 255, True), ctx.vrow(ins, ins.vdst, True)
        s = None
    ids = frozenset((dst, *((src,) if s is None else s.ids)))

    def step(g: WaveGroup) -> None:
        v = g.V[src] if s is None else s.get(g)
        if not g.dirty.isdisjoint(ids):
            g.check_pending(ids, where)
            if s is None:
                sh: Any = g.VU[src] if src in g.dirty else U32(0)
            else:
                sh = s.shadow(g)[0]
            if dst not in g.dirty:
                g.VU[dst] = 0
            g.shade_v(dst, sh)
        if g.full:
            g.V[dst] = v
        else:
            np.copyto(g.V[dst], v, where=g.mask)

    return step


_ = (unpack64,)
