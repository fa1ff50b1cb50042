"""Single instructions against independent definitions: Python integers, exact rationals, NumPy, ml_dtypes.

The text is assembled by LLVM, so encodings are genuine; each case runs 64 lanes of edge values and random operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .sim_helpers import ARCHS, U32, b32, f16, f32, fma_exact, ml_dtypes, pool, same_float

from ci.cdna_sim.asmkit import run_snippet  # isort: skip

M32 = 0xFFFFFFFF


def i32(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


def sext(x: int, bits: int) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def perm(a: int, b: int, s: int) -> int:
    data = (a << 32) | b
    out = 0
    for k in range(4):
        sel = s >> (8 * k) & 0xFF
        if sel < 8:
            v = data >> (8 * sel) & 0xFF
        elif sel < 12:
            v = 0xFF if data >> (16 * (sel - 8) + 15) & 1 else 0
        else:
            v = 0 if sel == 12 else 0xFF
        out |= v << (8 * k)
    return out


def clz(x: int) -> int:
    return 32 - x.bit_length() if x else -1


def ctz(x: int) -> int:
    return (x & -x).bit_length() - 1 if x else -1


def bfe_i(a: int, off: int, width: int) -> int:
    off, width = off & 31, width & 31
    return sext(i32(a) >> off, width) & M32 if width else 0


def rev(x: int) -> int:
    return int(f"{x:032b}"[::-1], 2)


def med(a: int, b: int, c: int) -> int:
    return sorted((a, b, c))[1]


def bytes4(x: int) -> list[int]:
    return [x >> (8 * k) & 0xFF for k in range(4)]


# instruction text, operand pools, definition on integers
INTEGER: list[tuple[str, str, Callable[..., int]]] = [
    ("v_add_u32 v3, v1, v2", "uu", lambda a, b: a + b),
    ("v_add_u32_e64 v3, v1, v2 clamp", "uu", lambda a, b: min(a + b, M32)),
    ("v_sub_u32 v3, v1, v2", "uu", lambda a, b: a - b),
    ("v_sub_u32_e64 v3, v1, v2 clamp", "uu", lambda a, b: max(a - b, 0)),
    ("v_subrev_u32 v3, v1, v2", "uu", lambda a, b: b - a),
    ("v_add_i32 v3, v1, v2 clamp", "uu", lambda a, b: max(-(2**31), min(2**31 - 1, i32(a) + i32(b)))),
    ("v_and_b32 v3, v1, v2", "uu", lambda a, b: a & b),
    ("v_or_b32 v3, v1, v2", "uu", lambda a, b: a | b),
    ("v_xor_b32 v3, v1, v2", "uu", lambda a, b: a ^ b),
    ("v_xnor_b32 v3, v1, v2", "uu", lambda a, b: ~(a ^ b)),
    ("v_not_b32 v3, v1", "u", lambda a: ~a),
    ("v_mov_b32 v3, v1", "u", lambda a: a),
    ("v_lshlrev_b32 v3, v2, v1", "us", lambda a, b: a << (b & 31)),
    ("v_lshrrev_b32 v3, v2, v1", "us", lambda a, b: a >> (b & 31)),
    ("v_ashrrev_i32 v3, v2, v1", "us", lambda a, b: i32(a) >> (b & 31)),
    ("v_lshl_add_u32 v3, v1, v2, v4", "usu", lambda a, b, c: (a << (b & 31)) + c),
    ("v_add_lshl_u32 v3, v1, v2, v4", "uus", lambda a, b, c: (a + b & M32) << (c & 31)),
    ("v_add3_u32 v3, v1, v2, v4", "uuu", lambda a, b, c: a + b + c),
    ("v_xad_u32 v3, v1, v2, v4", "uuu", lambda a, b, c: (a ^ b) + c),
    ("v_lshl_or_b32 v3, v1, v2, v4", "usu", lambda a, b, c: (a << (b & 31)) | c),
    ("v_and_or_b32 v3, v1, v2, v4", "uuu", lambda a, b, c: a & b | c),
    ("v_or3_b32 v3, v1, v2, v4", "uuu", lambda a, b, c: a | b | c),
    ("v_bfi_b32 v3, v1, v2, v4", "uuu", lambda a, b, c: (a & b) | (~a & c)),
    ("v_bfe_u32 v3, v1, v2, v4", "uss", lambda a, b, c: (a >> (b & 31)) & ((1 << (c & 31)) - 1)),
    ("v_bfe_i32 v3, v1, v2, v4", "uss", bfe_i),
    ("v_alignbit_b32 v3, v1, v2, v4", "uus", lambda a, b, c: (a << 32 | b) >> (c & 31)),
    ("v_alignbyte_b32 v3, v1, v2, v4", "uus", lambda a, b, c: (a << 32 | b) >> (8 * (c & 3))),
    ("v_perm_b32 v3, v1, v2, v4", "uuk", perm),
    ("v_mul_lo_u32 v3, v1, v2", "uu", lambda a, b: a * b),
    ("v_mul_hi_u32 v3, v1, v2", "uu", lambda a, b: a * b >> 32),
    ("v_mul_hi_i32 v3, v1, v2", "uu", lambda a, b: i32(a) * i32(b) >> 32),
    ("v_mul_u32_u24 v3, v1, v2", "uu", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    ("v_mul_i32_i24 v3, v1, v2", "uu", lambda a, b: sext(a, 24) * sext(b, 24)),
    ("v_mul_hi_u32_u24 v3, v1, v2", "uu", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32),
    ("v_mul_hi_i32_i24 v3, v1, v2", "uu", lambda a, b: sext(a, 24) * sext(b, 24) >> 32),
    ("v_mad_u32_u24 v3, v1, v2, v4", "uuu", lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c),
    ("v_mad_i32_i24 v3, v1, v2, v4", "uuu", lambda a, b, c: sext(a, 24) * sext(b, 24) + i32(c)),
    ("v_mad_u32_u16 v3, v1, v2, v4", "uuu", lambda a, b, c: (a & 0xFFFF) * (b & 0xFFFF) + c),
    ("v_mad_i32_i16 v3, v1, v2, v4", "uuu", lambda a, b, c: sext(a, 16) * sext(b, 16) + c),
    ("v_min_i32 v3, v1, v2", "uu", lambda a, b: min(i32(a), i32(b))),
    ("v_max_i32 v3, v1, v2", "uu", lambda a, b: max(i32(a), i32(b))),
    ("v_min_u32 v3, v1, v2", "uu", min),
    ("v_max_u32 v3, v1, v2", "uu", max),
    ("v_min3_i32 v3, v1, v2, v4", "uuu", lambda a, b, c: min(i32(a), i32(b), i32(c))),
    ("v_max3_u32 v3, v1, v2, v4", "uuu", max),
    ("v_med3_i32 v3, v1, v2, v4", "uuu", lambda a, b, c: med(i32(a), i32(b), i32(c))),
    ("v_med3_u32 v3, v1, v2, v4", "uuu", med),
    ("v_ffbh_u32 v3, v1", "u", clz),
    ("v_ffbl_b32 v3, v1", "u", ctz),
    ("v_ffbh_i32 v3, v1", "u", lambda a: clz(a ^ (M32 if a >> 31 else 0))),
    ("v_bfrev_b32 v3, v1", "u", rev),
    ("v_bcnt_u32_b32 v3, v1, v2", "uu", lambda a, b: a.bit_count() + b),
    ("v_bfm_b32 v3, v1, v2", "ss", lambda a, b: ((1 << (a & 31)) - 1) << (b & 31)),
    ("v_sad_u8 v3, v1, v2, v4", "uuu",
     lambda a, b, c: c + sum(abs(x - y) for x, y in zip(bytes4(a), bytes4(b), strict=True))),
    ("v_sad_u32 v3, v1, v2, v4", "uuu", lambda a, b, c: abs(a - b) + c),
    ("v_dot4_i32_i8 v3, v1, v2, v4", "uuu",
     lambda a, b, c: sum(sext(x, 8) * sext(y, 8) for x, y in zip(bytes4(a), bytes4(b), strict=True)) + c),
    ("v_dot4_u32_u8 v3, v1, v2, v4", "uuu",
     lambda a, b, c: sum(x * y for x, y in zip(bytes4(a), bytes4(b), strict=True)) + c),
    ("v_add_u16 v3, v1, v2", "uu", lambda a, b: (a + b) & 0xFFFF),
    ("v_sub_u16 v3, v1, v2", "uu", lambda a, b: (a - b) & 0xFFFF),
    ("v_mul_lo_u16 v3, v1, v2", "uu", lambda a, b: (a * b) & 0xFFFF),
    ("v_lshlrev_b16 v3, v2, v1", "us", lambda a, b: (a & 0xFFFF) << (b & 15) & 0xFFFF),
    ("v_lshrrev_b16 v3, v2, v1", "us", lambda a, b: (a & 0xFFFF) >> (b & 15)),
    ("v_ashrrev_i16 v3, v2, v1", "us", lambda a, b: (sext(a, 16) >> (b & 15)) & 0xFFFF),
    ("v_max_u16 v3, v1, v2", "uu", lambda a, b: max(a & 0xFFFF, b & 0xFFFF)),
    ("v_min_i16 v3, v1, v2", "uu", lambda a, b: min(sext(a, 16), sext(b, 16)) & 0xFFFF),
    ("v_pack_b32_f16 v3, v1, v2", "uu", lambda a, b: (a & 0xFFFF) | (b & 0xFFFF) << 16),
    ("v_pack_b32_f16 v3, v1, v2 op_sel:[1,0,0]", "uu", lambda a, b: a >> 16 | (b & 0xFFFF) << 16),
    ("v_pk_add_u16 v3, v1, v2", "uu", lambda a, b: (a + b & 0xFFFF) | ((a >> 16) + (b >> 16) & 0xFFFF) << 16),
    ("v_pk_add_u16 v3, v1, v2 op_sel:[1,0] op_sel_hi:[0,1]", "uu",
     lambda a, b: ((a >> 16) + (b & 0xFFFF) & 0xFFFF) | ((a & 0xFFFF) + (b >> 16) & 0xFFFF) << 16),
    ("v_pk_lshlrev_b16 v3, v2, v1", "us",
     lambda a, b: ((a & 0xFFFF) << (b & 15) & 0xFFFF) | ((a >> 16) << 0 & 0xFFFF) << 16),
    ("v_pk_mul_lo_u16 v3, v1, v2", "uu",
     lambda a, b: ((a & 0xFFFF) * (b & 0xFFFF) & 0xFFFF) | ((a >> 16) * (b >> 16) & 0xFFFF) << 16),
    ("v_cvt_pk_u16_u32 v3, v1, v2", "uu", lambda a, b: min(a, 65535) | min(b, 65535) << 16),
    ("v_cvt_pk_i16_i32 v3, v1, v2", "uu", lambda a, b: (max(-32768, min(32767, i32(a))) & 0xFFFF)
     | (max(-32768, min(32767, i32(b))) & 0xFFFF) << 16),
    ("v_mbcnt_lo_u32_b32 v3, v1, v2", "Mu", lambda a, b, lane=0: (a & ((1 << lane) - 1)).bit_count() + b),
    ("v_add_u32_sdwa v3, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_1 src1_sel:WORD_1", "uu",
     lambda a, b: (a >> 8 & 0xFF) + (b >> 16)),
    ("v_add_u32_sdwa v3, sext(v1), v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_3 src1_sel:DWORD", "uu",
     lambda a, b: sext(a >> 24, 8) + b),
    ("v_or_b32_sdwa v3, v1, v2 dst_sel:BYTE_2 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_0", "uu",
     lambda a, b: ((a | (b & 0xFF)) & 0xFF) << 16),
    ("v_mov_b32_sdwa v3, v1 dst_sel:WORD_1 dst_unused:UNUSED_SEXT src0_sel:WORD_0", "u",
     lambda a: (a & 0xFFFF) << 16),
]  # fmt: skip


def _operands(kinds: str, seed: int) -> list[np.ndarray]:
    out = []
    for k, c in enumerate(kinds):
        if c == "k":  # byte selectors 0..15
            out.append(
                np.random.default_rng(seed + k).integers(0, 16, (64, 4)).astype(np.uint8).view(U32)[:, 0]
            )
        elif c == "M":
            out.append(pool("u", seed + k))
        else:
            out.append(pool(c, seed + 17 * k))
    return out


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("text", "kinds", "want"), INTEGER, ids=[t[0] for t in INTEGER])
def test_integer(arch: str, text: str, kinds: str, want: Callable[..., int]) -> None:
    ops = _operands(kinds, 5)
    got, _, _ = run_snippet(arch, text, dict(zip((1, 2, 4), ops, strict=False)), out=[3])
    for lane in range(64):
        a = [int(o[lane]) for o in ops]
        if "mbcnt" in text:
            expect = want(*a, lane=min(lane, 32))
        else:
            expect = want(*a)
        if "pk_lshlrev" in text:  # the upper half shifts by the upper half of v2, which is 0 here
            expect = (expect & 0xFFFF) | (a[0] & 0xFFFF0000)
        assert int(got[3][lane]) == expect & M32, f"lane {lane}: {a}"


# -- 64-bit and carries --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_wide_integers(arch: str) -> None:
    v = {r: pool("u", r) for r in (2, 3, 4, 5)}
    sh = pool("s", 9)
    text = """
      v_lshl_add_u64 v[10:11], v[2:3], 3, v[4:5]
      v_lshlrev_b64 v[12:13], v6, v[2:3]
      v_lshrrev_b64 v[14:15], v6, v[2:3]
      v_ashrrev_i64 v[16:17], v6, v[2:3]
      v_mad_u64_u32 v[18:19], vcc, v2, v4, v[2:3]
      v_mov_b64 v[20:21], v[4:5]
      v_add_co_u32 v22, vcc, v2, v4
      v_addc_co_u32 v23, vcc, v3, v5, vcc
      v_sub_co_u32 v24, vcc, v2, v4
      v_subb_co_u32 v25, vcc, v3, v5, vcc
      v_cndmask_b32 v26, v2, v3, vcc
      v_mad_i64_i32 v[28:29], s[30:31], v2, v4, v[4:5]
    """
    got, _, _ = run_snippet(arch, text, {**v, 6: sh}, out=list(range(10, 27)) + [28, 29])
    m64 = (1 << 64) - 1
    for k in range(64):
        a, b = int(v[2][k]) | int(v[3][k]) << 32, int(v[4][k]) | int(v[5][k]) << 32
        pair = lambda r, k=k: int(got[r][k]) | int(got[r + 1][k]) << 32  # noqa: E731
        n = int(sh[k]) & 63
        assert pair(10) == ((a << 3) + b) & m64
        assert pair(12) == (a << n) & m64
        assert pair(14) == a >> n
        assert pair(16) == ((a - (1 << 64) if a >> 63 else a) >> n) & m64
        assert pair(18) == (int(v[2][k]) * int(v[4][k]) + a) & m64
        assert pair(20) == b
        assert pair(22) == (a + b) & m64
        assert pair(24) == (a - b) & m64
        assert int(got[26][k]) == int(v[3 if a < b else 2][k])
        assert pair(28) == (i32(int(v[2][k])) * i32(int(v[4][k])) + b) & m64


# -- floating point -------------------------------------------------------------------------------------------------


def _np(op: Callable[..., Any]) -> Callable[..., float]:
    def run(*a: float) -> float:
        with np.errstate(all="ignore"):
            return float(op(*[np.float32(x) for x in a]))

    return run


def fmin(a: float, b: float) -> float:
    if math.isnan(a):
        return b
    if math.isnan(b):
        return a
    if a == b == 0:
        return a if math.copysign(1, a) < 0 else b
    return min(a, b)


def fmax(a: float, b: float) -> float:
    if math.isnan(a):
        return b
    if math.isnan(b):
        return a
    if a == b == 0:
        return b if math.copysign(1, a) < 0 else a
    return max(a, b)


def clamp01(x: float) -> float:
    return 0.0 if math.isnan(x) else min(max(x, 0.0), 1.0)


FLOAT: list[tuple[str, str, Callable[..., float]]] = [
    ("v_add_f32 v3, v1, v2", "ff", _np(np.add)),
    ("v_add_f32 v3, -v1, |v2|", "ff", _np(lambda a, b: -a + abs(b))),
    ("v_add_f32 v3, v1, v2 clamp", "ff", lambda a, b: clamp01(float(np.float32(a) + np.float32(b)))),
    ("v_sub_f32 v3, v1, v2", "ff", _np(np.subtract)),
    ("v_subrev_f32 v3, v1, v2", "ff", _np(lambda a, b: b - a)),
    ("v_mul_f32 v3, v1, v2", "ff", _np(np.multiply)),
    ("v_min_f32 v3, v1, v2", "ff", fmin),
    ("v_max_f32 v3, v1, v2", "ff", fmax),
    ("v_max3_f32 v3, v1, v2, v4", "fff", lambda a, b, c: fmax(fmax(a, b), c)),
    ("v_min3_f32 v3, v1, v2, v4", "fff", lambda a, b, c: fmin(fmin(a, b), c)),
    ("v_fma_f32 v3, v1, v2, v4", "fff", fma_exact),
    ("v_fma_f32 v3, v1, -v2, v4", "fff", lambda a, b, c: fma_exact(a, -b, c)),
    ("v_fmamk_f32 v3, v1, 0x3fc00000, v2", "ff", lambda a, b: fma_exact(a, 1.5, b)),
    ("v_fmaak_f32 v3, v1, v2, 0xbf000000", "ff", lambda a, b: fma_exact(a, b, -0.5)),
    ("v_floor_f32 v3, v1", "f", _np(np.floor)),
    ("v_ceil_f32 v3, v1", "f", _np(np.ceil)),
    ("v_trunc_f32 v3, v1", "f", _np(np.trunc)),
    ("v_rndne_f32 v3, v1", "f", _np(np.rint)),
    ("v_mul_f32 v3, 0.15915494, v1", "f", _np(lambda a: np.float32(0.15915494309189532) * a)),
]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("text", "kinds", "want"), FLOAT, ids=[t[0] for t in FLOAT])
def test_float32(arch: str, text: str, kinds: str, want: Callable[..., float]) -> None:
    ops = _operands(kinds, 3)
    got, _, _ = run_snippet(arch, text, dict(zip((1, 2, 4), ops, strict=False)), out=[3])
    expect = np.array([b32(want(*[f32(int(o[k])) for o in ops])) for k in range(64)], U32)
    ok = same_float(got[3], expect)
    assert ok.all(), [(hex(int(o[~ok][0])) for o in ops), got[3][~ok], expect[~ok]]


@pytest.mark.parametrize("arch", ARCHS)
def test_med3_and_signalling_nan(arch: str) -> None:
    a, b, c = (pool("g", s) for s in (1, 2, 3))
    snan = np.full(64, 0x7F800001, U32)
    got, _, _ = run_snippet(arch, "v_med3_f32 v5, v1, v2, v3\n v_max_f32 v6, v4, v1\n v_min_f32 v7, v1, v4",
                            {1: a, 2: b, 3: c, 4: snan}, out=[5, 6, 7])  # fmt: skip
    med3 = np.sort(np.stack([x.view(np.float32) for x in (a, b, c)]), 0)[1]
    assert (got[5].view(np.float32) == med3).all()
    for r in (6, 7):  # IEEE mode: a signalling NaN wins over a number, as a quiet NaN
        assert np.isnan(got[r].view(np.float32)).all()
        assert ((got[r] & 0x400000) != 0).all()


# v_exp, v_log, v_rcp, v_rsq, v_sqrt: documented within 1 ulp; denormals of exp, log, sqrt, rsq are flushed.
TRANSCENDENTAL = [
    ("v_exp_f32", lambda x: 2.0**x, True), ("v_log_f32", lambda x: math.log2(x), True),
    ("v_rcp_f32", lambda x: 1.0 / x, False), ("v_rsq_f32", lambda x: 1.0 / math.sqrt(x), True),
    ("v_sqrt_f32", math.sqrt, True),
]  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("name", "fn", "flush"), TRANSCENDENTAL, ids=[t[0] for t in TRANSCENDENTAL])
def test_transcendental(arch: str, name: str, fn: Callable[[float], float], flush: bool) -> None:
    rng = np.random.default_rng(1)
    x = np.exp2(rng.uniform(-60, 60, 64)).astype(np.float32)
    if name == "v_exp_f32":
        x = rng.uniform(-125, 127, 64).astype(np.float32)
    got, _, _ = run_snippet(arch, f"{name} v3, v1", {1: x.view(U32)}, out=[3])
    want = np.array([fn(float(v)) for v in x])
    y = got[3].view(np.float32).astype(np.float64)
    ulp = np.spacing(np.abs(want).astype(np.float32)).astype(np.float64)
    assert (np.abs(y - want) <= ulp).all()
    special = np.array([0.0, -0.0, np.inf, np.nan, 1e-40, -1e-40], np.float32)
    got, _, _ = run_snippet(arch, f"{name} v3, v1", {1: np.resize(special, 64).view(U32)}, out=[3])
    z = got[3].view(np.float32)[:6]
    table = {
        "v_exp_f32": [1, 1, np.inf, np.nan, 1, 1], "v_log_f32": [-np.inf, -np.inf, np.inf, np.nan, -np.inf, -np.inf],
        "v_rcp_f32": [np.inf, -np.inf, 0, np.nan, np.inf, -np.inf],
        "v_rsq_f32": [np.inf, -np.inf, 0, np.nan, np.inf, -np.inf], "v_sqrt_f32": [0, 0, np.inf, np.nan, 0, 0],
    }[name]  # fmt: skip
    np.testing.assert_array_equal(z, np.array(table, np.float32))
    if flush and name == "v_exp_f32":  # the result of 2^-140 is a denormal: flushed
        got, _, _ = run_snippet(
            arch, "v_exp_f32 v3, v1", {1: np.full(64, -140, np.float32).view(U32)}, out=[3]
        )
        assert (got[3] == 0).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_denormals_are_kept_and_mode_flushes(arch: str) -> None:
    d = np.full(64, 0x00400000, U32)  # half of the smallest normal
    text = "v_add_f32 v3, v1, v1\n v_mul_f32 v4, 0.5, v1\n"
    got, _, _ = run_snippet(arch, text, {1: d}, out=[3, 4])
    assert (got[3] == 0x00800000).all()
    assert (got[4] == 0x00200000).all()
    got, _, _ = run_snippet(
        arch, "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0\n" + text, {1: d}, out=[3, 4]
    )
    assert (got[3] == 0).all()
    assert (got[4] == 0).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_integer_conversions(arch: str) -> None:
    x = pool("f", 8)
    text = """
      v_cvt_i32_f32 v3, v1
      v_cvt_u32_f32 v4, v1
      v_cvt_f32_i32 v5, v2
      v_cvt_f32_u32 v6, v2
      v_cvt_f32_ubyte0 v7, v2
      v_cvt_f32_ubyte3 v8, v2
      v_cvt_flr_i32_f32 v9, v1
      v_cvt_f64_f32 v[10:11], v1
      v_cvt_f32_f64 v12, v[10:11]
    """
    u = pool("u", 9)
    got, _, _ = run_snippet(arch, text, {1: x, 2: u}, out=list(range(3, 13)))
    for k in range(64):
        f, n = f32(int(x[k])), int(u[k])

        def clip(v: Callable[[float], int], lo: int, hi: int, f: float = f) -> int:
            if math.isnan(f):
                return 0
            return (hi if f > 0 else lo) if math.isinf(f) else max(lo, min(hi, v(f)))

        assert i32(int(got[3][k])) == clip(math.trunc, -(2**31), 2**31 - 1)
        assert int(got[4][k]) == clip(math.trunc, 0, M32)
        assert got[5][k] == b32(i32(n))
        assert got[6][k] == b32(n)
        assert got[7][k] == b32(n & 0xFF)
        assert got[8][k] == b32(n >> 24)
        assert i32(int(got[9][k])) == clip(math.floor, -(2**31), 2**31 - 1)
    assert same_float(got[12], x).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_half_arithmetic(arch: str) -> None:
    a, b, c = pool("p", 1), pool("p", 20), pool("p", 40)
    text = """
      v_add_f16 v4, v1, v2
      v_mul_f16 v5, v1, v2
      v_max_f16 v6, v1, v2
      v_pk_add_f16 v7, v1, v2
      v_pk_mul_f16 v8, v1, v2 op_sel:[1,0] op_sel_hi:[0,1]
      v_pk_fma_f16 v9, v1, v2, v3 neg_lo:[1,0,0] neg_hi:[0,1,0]
      v_cvt_f32_f16 v10, v1
      v_cvt_f16_f32 v11, v12
      v_fma_f16 v13, v1, v2, v3 op_sel:[1,0,0,0]
    """
    f = pool("f", 77)
    got, _, _ = run_snippet(arch, text, {1: a, 2: b, 3: c, 12: f, 13: np.full(64, 0xABCD1234, U32)},
                            out=[4, 5, 6, 7, 8, 9, 10, 11, 13])  # fmt: skip

    def halves(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x).view(np.float16).reshape(-1, 2)

    A, B, C = halves(a), halves(b), halves(c)
    with np.errstate(all="ignore"):
        want = {4: A[:, 0] + B[:, 0], 5: A[:, 0] * B[:, 0]}
        for r, w in want.items():
            assert same_float(got[r].astype(np.uint16), w.view(np.uint16)).all()
            assert ((got[r] >> 16) == 0).all()  # the upper half is cleared
        assert same_float(got[7].view(np.uint16), (A + B).view(np.uint16).reshape(-1)).all()
        swapped = np.stack([A[:, 1] * B[:, 0], A[:, 0] * B[:, 1]], 1)
        assert same_float(got[8].view(np.uint16), swapped.view(np.uint16).reshape(-1)).all()
        assert same_float(got[10], A[:, 0].astype(np.float32).view(U32)).all()
        assert same_float(
            got[11].astype(np.uint16), f.view(np.float32).astype(np.float16).view(np.uint16)
        ).all()
    for k in range(64):
        lo = fma_exact(-float(A[k, 0]), float(B[k, 0]), float(C[k, 0]), 10, -14, 15)
        hi = fma_exact(float(A[k, 1]), -float(B[k, 1]), float(C[k, 1]), 10, -14, 15)
        h = np.array([lo, hi]).astype(np.float16).view(np.uint16)
        assert same_float(got[9][k : k + 1].view(np.uint16), h).all()
        up = fma_exact(float(A[k, 1]), float(B[k, 0]), float(C[k, 0]), 10, -14, 15)
        assert same_float(
            got[13][k : k + 1].view(np.uint16)[:1], np.array([up]).astype(np.float16).view(np.uint16)
        ).all()
        assert int(got[13][k]) >> 16 == 0xABCD  # the upper half is preserved


@pytest.mark.parametrize("arch", ARCHS)
def test_pkrtz_truncates(arch: str) -> None:
    x = pool("f", 4)
    got, _, _ = run_snippet(arch, "v_cvt_pkrtz_f16_f32 v3, v1, v2", {1: x, 2: x[::-1].copy()}, out=[3])
    for k in range(64):
        v, h = f32(int(x[k])), f16(int(got[3][k]) & 0xFFFF)
        if math.isnan(v):
            assert math.isnan(h)
        elif math.isinf(v):
            assert h == v
        else:
            assert abs(h) <= abs(v)
            if abs(h) < 65504:
                assert abs(v) < float(np.nextafter(np.float16(abs(h)), np.float16(np.inf)))


@pytest.mark.parametrize("arch", ARCHS)
def test_fp16_ovfl_saturates_finite_overflow(arch: str) -> None:
    a = np.array([65504, -65504, np.inf, 1.0] * 16, np.float16).view(np.uint16).astype(U32)
    b = np.array([65504, -65504, 2.0, 1.0] * 16, np.float16).view(np.uint16).astype(U32)
    for on, want in ((0, [np.inf, -np.inf, np.inf, 2]), (1, [65504, -65504, np.inf, 2])):
        got, _, _ = run_snippet(arch, f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), {on}\n v_add_f16 v3, v1, v2",
                                {1: a, 2: b}, out=[3])  # fmt: skip
        np.testing.assert_array_equal(
            got[3].astype(np.uint16).view(np.float16)[:4], np.array(want, np.float16)
        )


# -- fp8 and bf16 ------------------------------------------------------------------------------------------------


def fp8_types(arch: str) -> tuple[Any, Any]:
    if arch == "gfx950":
        return ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    return ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", ["fp8", "bf8"])
def test_fp8_decode_every_code(arch: str, kind: str) -> None:
    t = fp8_types(arch)[kind == "bf8"]
    words = np.arange(256, dtype=np.uint8).view(U32)
    text = (f"v_cvt_f32_{kind} v3, v1\n v_cvt_f32_{kind}_sdwa v4, v1 src0_sel:BYTE_3\n"
            f"v_cvt_pk_f32_{kind} v[6:7], v1\n v_cvt_pk_f32_{kind}_sdwa v[8:9], v1 src0_sel:WORD_1")  # fmt: skip
    got, _, _ = run_snippet(arch, text, {1: words}, out=[3, 4, 6, 7, 8, 9])
    codes = words.view(np.uint8).reshape(-1, 4)
    for r, byte in ((3, 0), (4, 3), (6, 0), (7, 1), (8, 2), (9, 3)):
        want = codes[:, byte].copy().view(t).astype(np.float32)
        assert same_float(got[r], want.view(U32)).all()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", ["fp8", "bf8"])
@pytest.mark.parametrize("ovfl", [0, 1])
def test_fp8_encode(arch: str, kind: str, ovfl: int) -> None:
    t = fp8_types(arch)[kind == "bf8"]
    table = np.arange(256, dtype=np.uint8).view(t).astype(np.float64)
    fin = np.sort(table[np.isfinite(table)])
    mids = ((fin[1:] + fin[:-1]) / 2).astype(np.float32)  # every tie
    x = np.concatenate([mids, np.nextafter(mids, np.float32(np.inf)), np.nextafter(mids, np.float32(-np.inf)),
                        np.random.default_rng(0).standard_normal(300).astype(np.float32) * 30,
                        np.array([0.0, -0.0, 1e9, -1e9, 1e-30], np.float32)])  # fmt: skip
    x = np.resize(x, (len(x) + 63) // 64 * 64)
    for part in x.reshape(-1, 64):
        text = (f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), {ovfl}\n v_mov_b32 v3, -1\n"
                f"v_cvt_pk_{kind}_f32 v3, v1, v2\n v_cvt_pk_{kind}_f32 v3, v2, v1 op_sel:[0,0,1]")  # fmt: skip
        got, _, _ = run_snippet(arch, text, {1: part.view(U32), 2: (-part).view(U32)}, out=[3])
        clipped = np.clip(part, -fin[-1], fin[-1]) if ovfl else part
        want = clipped.astype(t)
        wneg = (-clipped).astype(t)
        b = got[3].view(np.uint8).reshape(-1, 4)
        for col, w in ((0, want), (1, wneg), (2, wneg), (3, want)):
            g, e = b[:, col].copy().view(t).astype(np.float32), w.astype(np.float32)
            bits = b[:, col] == w.view(np.uint8)
            assert (bits | (np.isnan(g) & np.isnan(e))).all()


def test_bf16_conversions_gfx950() -> None:
    x, y = pool("f", 3), pool("f", 4)
    got, _, _ = run_snippet("gfx950", "v_cvt_pk_bf16_f32 v3, v1, v2", {1: x, 2: y}, out=[3])
    h = got[3].view(np.uint16).reshape(-1, 2)
    for col, v in ((0, x), (1, y)):
        want = v.view(np.float32).astype(ml_dtypes.bfloat16)
        g = h[:, col].copy().view(ml_dtypes.bfloat16)
        assert ((g.view(np.uint16) == want.view(np.uint16)) | (np.isnan(g.astype(np.float32))
                & np.isnan(want.astype(np.float32)))).all()  # fmt: skip


def test_scaled_fp8_conversions_gfx950() -> None:
    x = (np.random.default_rng(2).standard_normal(64) * 8).astype(np.float32)
    scale = np.full(64, 4.0, np.float32)
    text = """
      v_mov_b32 v5, 0
      v_cvt_scalef32_pk_fp8_f32 v5, v1, v2, v3
      v_cvt_scalef32_pk_fp8_f32 v5, v2, v1, v3 op_sel:[0,0,0,1]
      v_cvt_scalef32_pk_f32_fp8 v[6:7], v5, v3
      v_cvt_scalef32_pk_f16_fp8 v8, v5, v3 op_sel:[1,0,0]
    """
    y = x[::-1].copy()
    got, _, _ = run_snippet(
        "gfx950", text, {1: x.view(U32), 2: y.view(U32), 3: scale.view(U32)}, out=[5, 6, 7, 8]
    )
    t = ml_dtypes.float8_e4m3fn
    b = got[5].view(np.uint8).reshape(-1, 4)
    wx, wy = (x / 4).astype(t), (y / 4).astype(t)
    for col, w in ((0, wx), (1, wy), (2, wy), (3, wx)):
        assert (b[:, col] == w.view(np.uint8)).all()
    assert (got[6].view(np.float32) == wx.astype(np.float32) * 4).all()
    assert (got[7].view(np.float32) == wy.astype(np.float32) * 4).all()
    halves = got[8].view(np.float16).reshape(-1, 2)
    assert (halves[:, 0] == (wy.astype(np.float32) * 4).astype(np.float16)).all()


# -- lane movement -------------------------------------------------------------------------------------------------


def dpp_source(ctrl: str, lane: int) -> int | None:
    """Source lane of a DPP control by its description, None if there is none."""
    row, pos = lane // 16 * 16, lane % 16
    kind, _, arg = ctrl.partition(":")
    if kind == "quad_perm":
        sel = [int(x) for x in arg.strip("[]").split(",")]
        return lane // 4 * 4 + sel[lane % 4]
    if kind == "row_shl":
        return lane + int(arg) if pos + int(arg) < 16 else None
    if kind == "row_shr":
        return lane - int(arg) if pos >= int(arg) else None
    if kind == "row_ror":
        return row + (pos - int(arg)) % 16
    if kind == "row_mirror":
        return row + 15 - pos
    if kind == "row_half_mirror":
        return lane // 8 * 8 + 7 - lane % 8
    if kind == "row_newbcast":
        return row + int(arg)
    if kind == "row_bcast":
        if arg == "15":
            return row - 1 if row else None
        return 31 if lane >= 32 else None
    if kind == "wave_shl":
        return lane + 1 if lane < 63 else None
    if kind == "wave_shr":
        return lane - 1 if lane else None
    if kind == "wave_ror":
        return (lane - 1) % 64
    if kind == "wave_rol":
        return (lane + 1) % 64
    raise AssertionError(ctrl)


DPP = ["quad_perm:[1,0,3,2]", "quad_perm:[3,3,1,0]", "row_shl:1", "row_shl:15", "row_shr:1", "row_shr:8", "row_ror:4",
       "row_mirror", "row_half_mirror", "row_newbcast:5", "row_bcast:15", "row_bcast:31", "wave_shl:1", "wave_shr:1",
       "wave_ror:1", "wave_rol:1"]  # fmt: skip


@pytest.mark.parametrize("ctrl", DPP)
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("same", [False, True], ids=["", "dst==src"])
def test_dpp(ctrl: str, bound: bool, same: bool) -> None:
    x, old = pool("u", 1), pool("u", 2)
    dst = 1 if same else 3
    exec_mask = 0xFFFF_FFFF_F7FF_FFFF & ~(1 << 20)
    tail = " row_mask:0xf bank_mask:0xf" + (" bound_ctrl:0" if bound else "")
    got, _, _ = run_snippet("gfx942", f"v_mov_b32_dpp v{dst}, v1 {ctrl}{tail}", {1: x, 3: old}, out=[dst],
                            exec_mask=exec_mask)  # fmt: skip
    before = x if same else old
    for lane in range(64):
        src = dpp_source(ctrl, lane)
        active = bool(exec_mask >> lane & 1)
        valid = src is not None and bool(exec_mask >> src & 1)
        if not active or (not valid and not bound):
            want = int(before[lane])
        else:
            want = int(x[src]) if valid and src is not None else 0
        assert int(got[dst][lane]) == want, lane


def test_dpp_row_and_bank_mask() -> None:
    x, old = pool("u", 1), pool("u", 2)
    got, _, _ = run_snippet("gfx942", "v_add_u32_dpp v3, v1, v2 quad_perm:[0,0,0,0] row_mask:0x5 bank_mask:0x6",
                            {1: x, 2: old, 3: old}, out=[3])  # fmt: skip
    for lane in range(64):
        on = (0x5 >> lane // 16 & 1) and (0x6 >> lane % 16 // 4 & 1)
        want = (int(x[lane // 4 * 4]) + int(old[lane])) & M32 if on else int(old[lane])
        assert int(got[3][lane]) == want


@pytest.mark.parametrize("k", [16, 32])
def test_permlane_swap_gfx950(k: int) -> None:
    a, b = pool("u", 1), pool("u", 2)
    got, _, _ = run_snippet("gfx950", f"v_permlane{k}_swap_b32 v1, v2", {1: a, 2: b}, out=[1, 2])
    x, y = a.copy(), b.copy()
    for lane in range(64):  # the upper k lanes of each 2k of v1 change places with the lower ones of v2
        if lane & k:
            x[lane] = b[lane - k]
            y[lane - k] = a[lane]
    assert (got[1] == x).all()
    assert (got[2] == y).all()


def test_readlane_writelane_readfirstlane() -> None:
    a = pool("u", 1)
    got, s, _ = run_snippet(
        "gfx942", "v_readlane_b32 s20, v1, 37\n v_readfirstlane_b32 s21, v1\n v_mov_b32 v3, 7\n"
        "v_writelane_b32 v3, s20, 5",
        {1: a, 3: a}, out=[3], out_s=[20, 21], exec_mask=0xFFFFFFFFFFFFFF00)  # fmt: skip
    assert s[20] == a[37]
    assert s[21] == a[8]
    assert got[3][5] == a[37]
    assert got[3][9] == 7


@pytest.mark.parametrize(
    ("offset", "table"),
    [
        ("swizzle(SWAP,1)", lambda i: i ^ 1), ("swizzle(SWAP,16)", lambda i: i ^ 16),
        ("swizzle(REVERSE,8)", lambda i: i ^ 7), ("swizzle(BROADCAST,4,2)", lambda i: i & ~3 | 2),
        ("swizzle(QUAD_PERM,3,2,1,0)", lambda i: i ^ 3),
    ],
)  # fmt: skip
def test_ds_swizzle(offset: str, table: Callable[[int], int]) -> None:
    a = pool("u", 1)
    got, _, _ = run_snippet(
        "gfx942", f"ds_swizzle_b32 v3, v1 offset:{offset}\n s_waitcnt lgkmcnt(0)", {1: a}, out=[3]
    )
    assert [int(x) for x in got[3]] == [int(a[table(i)]) for i in range(64)]


def test_ds_permute_and_bpermute() -> None:
    a = pool("u", 1)
    idx = np.random.default_rng(0).permutation(64).astype(U32)
    ex = 0xFFFFFFFFFFFFFFF0
    got, _, _ = run_snippet("gfx942", "v_mov_b32 v3, 1\n v_mov_b32 v4, 1\n ds_bpermute_b32 v3, v2, v1 offset:4\n"
                            "ds_permute_b32 v4, v2, v1\n s_waitcnt lgkmcnt(0)",
                            {1: a, 2: idx * 4 + 256 * (idx & 3), 3: a, 4: a},
                            out=[3, 4], exec_mask=ex)  # fmt: skip
    push = np.zeros(64, U32)
    for lane in range(4, 64):
        push[idx[lane]] = a[lane]
        src = (int(idx[lane]) + 1) % 64
        assert got[3][lane] == (a[src] if src >= 4 else 0)
    assert (got[4][4:] == push[4:]).all()


# -- bit operations with a truth table -------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [0x6C, 0x36, 0xDE, 0x96, 0x01, 0xF0, 0xCA])
def test_bitop3_gfx950(table: int) -> None:
    a, b, c = (pool("u", s) for s in (1, 2, 3))
    got, _, _ = run_snippet(
        "gfx950", f"v_bitop3_b32 v5, v1, v2, v3 bitop3:{table:#x}", {1: a, 2: b, 3: c}, out=[5]
    )
    # the table applied to 0xf0, 0xcc, 0xaa is itself: bit k of the table is the result for a=k>>2, b=k>>1, c=k
    want = np.zeros(64, U32)
    for bit in range(32):
        k = ((a >> bit & 1) << 2) | ((b >> bit & 1) << 1) | (c >> bit & 1)
        want |= ((np.full(64, table, U32) >> k) & 1) << U32(bit)
    assert (got[5] == want).all()


# -- comparisons -------------------------------------------------------------------------------------------------

CMP = {
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "eq": lambda a, b: a == b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "lg": lambda a, b: a < b or a > b,
    "o": lambda a, b: not (math.isnan(a) or math.isnan(b)),
    "u": lambda a, b: math.isnan(a) or math.isnan(b), "nge": lambda a, b: not a >= b, "nlt": lambda a, b: not a < b,
    "neq": lambda a, b: a != b, "ngt": lambda a, b: not a > b, "nle": lambda a, b: not a <= b,
    "nlg": lambda a, b: not (a < b or a > b),
}  # fmt: skip


@pytest.mark.parametrize("cond", sorted(CMP))
def test_compare_f32(cond: str) -> None:
    a, b = pool("f", 1), pool("f", 2)
    b[::3] = a[::3]
    ex = 0xF0F0FFFFFFFF1234
    _, s, _ = run_snippet(
        "gfx942", f"v_cmp_{cond}_f32 vcc, v1, v2", {1: a, 2: b}, out_s=[106, 107], exec_mask=ex
    )
    mask = int(s[106]) | int(s[107]) << 32
    for k in range(64):
        want = bool(ex >> k & 1) and CMP[cond](f32(int(a[k])), f32(int(b[k])))
        assert bool(mask >> k & 1) == want, k


@pytest.mark.parametrize("typ", ["i32", "u32", "i16", "u16"])
@pytest.mark.parametrize("cond", ["lt", "le", "eq", "gt", "ge", "ne"])
def test_compare_int(typ: str, cond: str) -> None:
    a, b = pool("u", 1), pool("u", 2)
    b[::3] = a[::3]
    _, s, _ = run_snippet("gfx942", f"v_cmp_{cond}_{typ}_e64 s[22:23], v1, v2", {1: a, 2: b}, out_s=[22, 23])
    mask = int(s[22]) | int(s[23]) << 32
    bits = int(typ[1:])
    conv = (lambda x: sext(x, bits)) if typ[0] == "i" else (lambda x: x & ((1 << bits) - 1))
    fn = CMP.get(cond, lambda x, y: x != y)
    for k in range(64):
        assert bool(mask >> k & 1) == fn(conv(int(a[k])), conv(int(b[k])))


def test_cmpx_sdwa_class_and_cndmask() -> None:
    a = pool("f", 1)
    got, s, _ = run_snippet("gfx942", """
      v_cmp_class_f32 s[22:23], v1, v2
      v_cmp_eq_u16_sdwa vcc, v1, v3 src0_sel:BYTE_0 src1_sel:DWORD
      v_cndmask_b32 v5, v4, v1, vcc
      v_mov_b32 v6, 9
      v_cmpx_gt_f32 v1, v4
      v_mov_b32 v6, 1
    """, {1: a, 2: np.full(64, 0x3 | 0x90, U32), 3: np.zeros(64, U32), 4: np.zeros(64, U32)}, out=[5, 6],
        out_s=[22, 23])  # fmt: skip
    mask = int(s[22]) | int(s[23]) << 32
    for k in range(64):
        f = f32(int(a[k]))
        neg_denorm = f != 0 and f < 0 and abs(f) < 2.0**-126
        pos_denorm = f != 0 and f > 0 and abs(f) < 2.0**-126
        assert bool(mask >> k & 1) == (math.isnan(f) or neg_denorm or pos_denorm)
        assert got[5][k] == (a[k] if a[k] & 0xFF == 0 else 0)
        assert got[6][k] == (1 if f > 0 else 9)


# -- scalar instructions --------------------------------------------------------------------------------------------

SCALAR: list[tuple[str, Callable[..., int], Callable[..., bool] | None]] = [
    ("s_add_u32 s22, s20, s21", lambda a, b: a + b, lambda a, b: a + b > M32),
    ("s_sub_u32 s22, s20, s21", lambda a, b: a - b, lambda a, b: b > a),
    ("s_add_i32 s22, s20, s21", lambda a, b: a + b, lambda a, b: not -(2**31) <= i32(a) + i32(b) < 2**31),
    ("s_sub_i32 s22, s20, s21", lambda a, b: a - b, lambda a, b: not -(2**31) <= i32(a) - i32(b) < 2**31),
    ("s_min_i32 s22, s20, s21", lambda a, b: min(i32(a), i32(b)), lambda a, b: i32(a) < i32(b)),
    ("s_max_u32 s22, s20, s21", max, lambda a, b: a >= b),
    ("s_and_b32 s22, s20, s21", lambda a, b: a & b, lambda a, b: a & b != 0),
    ("s_andn2_b32 s22, s20, s21", lambda a, b: a & ~b, lambda a, b: a & ~b & M32 != 0),
    ("s_orn2_b32 s22, s20, s21", lambda a, b: a | ~b, lambda a, b: (a | ~b) & M32 != 0),
    ("s_nor_b32 s22, s20, s21", lambda a, b: ~(a | b), lambda a, b: ~(a | b) & M32 != 0),
    ("s_xnor_b32 s22, s20, s21", lambda a, b: ~(a ^ b), lambda a, b: ~(a ^ b) & M32 != 0),
    ("s_lshl_b32 s22, s20, s21", lambda a, b: a << (b & 31), lambda a, b: (a << (b & 31)) & M32 != 0),
    ("s_ashr_i32 s22, s20, s21", lambda a, b: i32(a) >> (b & 31), lambda a, b: i32(a) >> (b & 31) != 0),
    ("s_mul_i32 s22, s20, s21", lambda a, b: a * b, None),
    ("s_mul_hi_u32 s22, s20, s21", lambda a, b: a * b >> 32, None),
    ("s_mul_hi_i32 s22, s20, s21", lambda a, b: i32(a) * i32(b) >> 32, None),
    ("s_bfe_u32 s22, s20, 0x50007", lambda a, b: a >> 7 & 31, lambda a, b: a >> 7 & 31 != 0),
    ("s_bfe_i32 s22, s20, 0x50007", lambda a, b: sext(a >> 7, 5), lambda a, b: a >> 7 & 31 != 0),
    ("s_lshl2_add_u32 s22, s20, s21", lambda a, b: (a << 2) + b, lambda a, b: (a << 2) + b > M32),
    ("s_pack_ll_b32_b16 s22, s20, s21", lambda a, b: (a & 0xFFFF) | b << 16, None),
    ("s_pack_lh_b32_b16 s22, s20, s21", lambda a, b: (a & 0xFFFF) | b & 0xFFFF0000, None),
    ("s_absdiff_i32 s22, s20, s21", lambda a, b: abs(i32(a) - i32(b)), lambda a, b: a != b),
    ("s_not_b32 s22, s20", lambda a, b: ~a, lambda a, b: a != M32),
    ("s_brev_b32 s22, s20", lambda a, b: rev(a), None),
    ("s_bcnt1_i32_b32 s22, s20", lambda a, b: a.bit_count(), lambda a, b: a != 0),
    ("s_ff1_i32_b32 s22, s20", lambda a, b: ctz(a), None),
    ("s_flbit_i32_b32 s22, s20", lambda a, b: clz(a), None),
    ("s_sext_i32_i8 s22, s20", lambda a, b: sext(a, 8), None),
    ("s_sext_i32_i16 s22, s20", lambda a, b: sext(a, 16), None),
    ("s_abs_i32 s22, s20", lambda a, b: abs(i32(a)), lambda a, b: a != 0),
    ("s_cmp_lt_i32 s20, s21\n s_cselect_b32 s22, s20, s21", lambda a, b: min(i32(a), i32(b)), None),
    ("s_mov_b32 s22, s20\n s_addk_i32 s22, 0xfff0", lambda a, b: a - 16, None),
    ("s_mov_b32 s22, s20\n s_mulk_i32 s22, 3", lambda a, b: a * 3, None),
    ("s_movk_i32 s22, 0x8001", lambda a, b: -32767, None),
    ("s_bitset1_b32 s22, s20", lambda a, b: 1 << (a & 31), None),
]


@pytest.mark.parametrize(("text", "want", "scc"), SCALAR, ids=[t[0].split("\n")[-1] for t in SCALAR])
def test_scalar(text: str, want: Callable[..., int], scc: Callable[..., bool] | None) -> None:
    values = [(0, 0), (1, 0xFFFFFFFF), (0x7FFFFFFF, 1), (0x80000000, 0x80000000), (0xDEADBEEF, 0x12345678),
              (0x80000000, 1), (5, 3)]  # fmt: skip
    for a, b in values:
        body = f"s_mov_b32 s22, 0\n {text}\n s_cselect_b32 s23, 1, 0"
        _, s, _ = run_snippet("gfx942", body, s={20: a, 21: b}, out_s=[22, 23] if scc else [22])
        assert int(s[22]) == want(a, b) & M32, (hex(a), hex(b))
        if scc:
            assert bool(s[23]) == scc(a, b), (hex(a), hex(b))


def test_scalar_64() -> None:
    _, s, _ = run_snippet("gfx950", """
      s_lshl_b64 s[30:31], s[20:21], 5
      s_ashr_i64 s[32:33], s[20:21], 9
      s_bfm_b64 s[34:35], 40, 3
      s_bcnt1_i32_b64 s36, s[20:21]
      s_ff1_i32_b64 s37, s[20:21]
      s_and_b64 s[38:39], s[20:21], s[22:23]
      s_add_u32 s40, s20, s22
      s_addc_u32 s41, s21, s23
      s_not_b64 s[42:43], s[20:21]
    """, s={20: 0x89ABCDE0, 21: 0xF1234567, 22: 0xFFFFFFFF, 23: 0x80000001}, out_s=list(range(30, 44)))  # fmt: skip
    a, b, m = 0xF123456789ABCDE0, 0x80000001FFFFFFFF, (1 << 64) - 1
    pair = lambda r: int(s[r]) | int(s[r + 1]) << 32  # noqa: E731
    assert pair(30) == a << 5 & m
    assert pair(32) == (a - (1 << 64)) >> 9 & m
    assert pair(34) == ((1 << 40) - 1) << 3
    assert s[36] == a.bit_count()
    assert s[37] == 5
    assert pair(38) == a & b
    assert pair(40) == (a + b) & m
    assert pair(42) == ~a & m


def test_saveexec() -> None:
    got, s, _ = run_snippet("gfx942", """
      v_mov_b32 v3, 0
      v_cmp_lt_u32 vcc, 40, v1
      s_and_saveexec_b64 s[30:31], vcc
      v_mov_b32 v3, 1
      s_xor_b64 s[32:33], exec, s[30:31]
      s_mov_b64 exec, s[32:33]
      v_mov_b32 v3, 2
    """, {1: np.arange(64, dtype=U32)}, out=[3], out_s=[30, 31])  # fmt: skip
    assert [int(x) for x in got[3]] == [1 if k > 40 else 2 for k in range(64)]
    assert s[30] == s[31] == M32


# -- pairs of registers, also where source and destination overlap -----------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_packed_pairs_may_overlap(arch: str) -> None:
    v = {r: pool("g", r) for r in (2, 3, 4, 5, 6, 7, 8, 9)}
    text = """
      v_pk_mov_b32 v[2:3], v[4:5], v[2:3] op_sel:[1,0]
      v_pk_mov_b32 v[6:7], v[6:7], v[6:7] op_sel:[1,0]
      v_pk_add_f32 v[8:9], v[8:9], v[8:9] op_sel:[1,0] op_sel_hi:[0,0] neg_lo:[0,1]
      v_pk_fma_f32 v[10:11], v[4:5], v[8:9], 1.0 op_sel_hi:[0,1,0]
      v_pk_mul_f32 v[12:13], v[4:5], s[20:21] op_sel_hi:[1,0]
    """
    scale = int(np.float32(3.0).view(U32))
    got, _, _ = run_snippet(arch, text, v, {20: scale, 21: 0}, out=[2, 3, 6, 7, 8, 9, 10, 11, 12, 13])
    f = {r: x.view(np.float32) for r, x in v.items()}
    assert (got[2] == v[5]).all() and (got[3] == v[2]).all()
    assert (got[6] == v[7]).all() and (got[7] == v[6]).all()
    assert (got[8].view(np.float32) == f[9] - f[8]).all()
    assert (got[9].view(np.float32) == f[8] + f[8]).all()
    new8, new9 = got[8].view(np.float32), got[9].view(np.float32)
    for k in range(64):
        assert got[10][k] == b32(fma_exact(float(f[4][k]), float(new8[k]), 1.0))
        assert got[11][k] == b32(fma_exact(float(f[4][k]), float(new9[k]), 1.0))
    assert (got[12].view(np.float32) == f[4] * np.float32(3)).all()
    assert (got[13].view(np.float32) == f[5] * np.float32(3)).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_mixed_precision_fma(arch: str) -> None:
    a, b, c = pool("p", 1), pool("p", 9), pool("g", 3)
    d = np.full(64, 0x12345678, U32)
    text = """
      v_mad_mix_f32 v4, v1, v2, v3 op_sel:[1,0,0] op_sel_hi:[1,1,0]
      v_mad_mixlo_f16 v5, v1, v2, v3 op_sel_hi:[1,1,0]
      v_mad_mixhi_f16 v5, -v1, v2, v3 op_sel:[0,1,0] op_sel_hi:[1,1,0]
      v_mad_mixlo_f16 v6, v1, v2, v3 op_sel_hi:[1,1,0]
    """
    text = text if arch == "none" else text.replace("v_mad_mix", "v_fma_mix") if _has_fma_mix(arch) else text
    got, _, _ = run_snippet(arch, text, {1: a, 2: b, 3: c, 5: d, 6: d}, out=[4, 5, 6])
    for k in range(64):
        al, ah, bl, bh = (f16(int(x[k]) >> s) for x, s in ((a, 0), (a, 16), (b, 0), (b, 16)))
        f = f32(int(c[k]))
        assert same_float(got[4][k : k + 1], np.array([b32(fma_exact(ah, bl, f))], U32)).all()
        with np.errstate(all="ignore"):
            lo = np.array([np.float32(fma_exact(al, bl, f))]).astype(np.float16).view(np.uint16)
            hi = np.array([np.float32(fma_exact(-al, bh, f))]).astype(np.float16).view(np.uint16)
        assert same_float(got[5][k : k + 1].astype(np.uint16), lo).all()
        assert same_float((got[5][k : k + 1] >> 16).astype(np.uint16), hi).all()
        assert int(got[6][k]) >> 16 == 0x1234


def _has_fma_mix(arch: str) -> bool:
    from ci.cdna_sim.asmkit import module

    try:
        module("v_mad_mix_f32 v4, v1, v2, v3", arch)
    except RuntimeError:
        return True
    return False
