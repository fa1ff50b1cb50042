"""Scalar instructions: SOP1, SOP2, SOPC, SOPK and the SOPP instructions that are no control flow.

Sources: CDNA3 and CDNA4 ISA, chapter 5 (scalar ALU operations) and chapter 12 (SOP1/SOP2/SOPC/SOPK/SOPP). Branches,
s_barrier and s_endpgm end a basic block and belong to engine.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .decoder import LITERAL, Instr, inline_constant
from .errors import UnsupportedError
from .floats import I32, I64, U32, U64
from .operands import Ctx, is_sreg, write_sgpr, write_sgpr64
from .state import S_ID, SCC_ID, WaveGroup

Array = npt.NDArray[Any]
Step = Callable[[WaveGroup], None]


def _i(x: Array) -> Array:
    return x.view(I32)


def _bcnt(x: Array) -> Array:
    b = np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1)
    return np.unpackbits(b, axis=1).sum(1).astype(U32)


def _bits(x: Array) -> Array:
    """[n] words to [n, width] bits, lowest first."""
    b = np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1)
    return np.unpackbits(b, axis=1, bitorder="little").view(bool)


def _find(bits: Array) -> Array:
    """Index of the first set bit, -1 if there is none."""
    return np.where(bits.any(1), bits.argmax(1), -1).astype(I32).view(U32)


def _brev(x: Array) -> Array:
    b = np.packbits(_bits(x)[:, ::-1], axis=1, bitorder="little")
    return np.ascontiguousarray(b).view(x.dtype).reshape(len(x))


def _wqm(x: Array) -> Array:
    b = _bits(x)
    q = b.reshape(len(x), -1, 4).any(2)
    return np.packbits(np.repeat(q, 4, axis=1), axis=1, bitorder="little").view(x.dtype).reshape(len(x))


def _bfe_u(a: Array, b: Array) -> Array:
    off, width = b & 31, (b >> 16) & 0x7F
    m = np.where(width >= 32, U64(0xFFFFFFFF), (U64(1) << width.astype(U64)) - U64(1))
    return ((a >> off) & m.astype(U32)).astype(U32)


def _bfe_i(a: Array, b: Array) -> Array:
    off, width = (b & 31).astype(np.int64), np.minimum((b >> 16) & 0x7F, 32).astype(np.int64)
    v = (a.view(I32).astype(I64) >> off) & ((np.int64(1) << width) - 1)
    sign = (np.int64(1) << np.maximum(width - 1, 0)) * (width > 0)
    return ((v ^ sign) - sign).astype(I32).view(U32)


def _bfe_u64(a: Array, b: Array) -> Array:
    off, width = (b & 63).astype(U64), ((b >> 16) & 0x7F).astype(U64)
    m = np.where(width >= 64, ~U64(0), (U64(1) << np.minimum(width, U64(63))) - U64(1))
    return (a >> off) & m


def _bfe_i64(a: Array, b: Array) -> Array:
    w = np.minimum((b >> 16) & 0x7F, 64).astype(I64)
    v = _bfe_u64(a, b)
    sh = (64 - w).clip(0, 63)
    return np.where(w == 0, 0, (v.view(I64) << sh) >> sh).astype(I64).view(U64)


def _mul_hi_i(a: Array, b: Array) -> Array:
    return ((a.view(I32).astype(I64) * b.view(I32).astype(I64)) >> 32).astype(I32).view(U32)


def _u64(x: Array) -> Array:
    return x.astype(U64)


def _add_ovf(a: Array, b: Array, r: Array) -> Array:
    return (((a ^ r) & (b ^ r)) >> 31).astype(bool)


# name -> (source widths, destination width, function, SCC rule)
# SCC rule: "nz" result is not zero; None unchanged; a function of (a, b, r, scc).
_SccRule = Any
_SOP2: dict[str, tuple[tuple[int, int], int, Callable[..., Array], _SccRule]] = {
    "s_add_u32": ((32, 32), 32, lambda a, b: a + b, lambda a, b, r, c: r < a),
    "s_sub_u32": ((32, 32), 32, lambda a, b: a - b, lambda a, b, r, c: b > a),
    "s_add_i32": ((32, 32), 32, lambda a, b: a + b, lambda a, b, r, c: _add_ovf(a, b, r)),
    "s_sub_i32": ((32, 32), 32, lambda a, b: a - b, lambda a, b, r, c: (((a ^ b) & (a ^ r)) >> 31).astype(bool)),
    "s_min_i32": ((32, 32), 32, lambda a, b: np.minimum(_i(a), _i(b)).view(U32), lambda a, b, r, c: _i(a) < _i(b)),
    "s_min_u32": ((32, 32), 32, np.minimum, lambda a, b, r, c: a < b),
    "s_max_i32": ((32, 32), 32, lambda a, b: np.maximum(_i(a), _i(b)).view(U32), lambda a, b, r, c: _i(a) >= _i(b)),
    "s_max_u32": ((32, 32), 32, np.maximum, lambda a, b, r, c: a >= b),
    "s_lshl_b32": ((32, 32), 32, lambda a, b: a << (b & 31), "nz"),
    "s_lshr_b32": ((32, 32), 32, lambda a, b: a >> (b & 31), "nz"),
    "s_ashr_i32": ((32, 32), 32, lambda a, b: (_i(a) >> (b & 31).view(I32)).view(U32), "nz"),
    "s_lshl_b64": ((64, 32), 64, lambda a, b: a << _u64(b & 63), "nz"),
    "s_lshr_b64": ((64, 32), 64, lambda a, b: a >> _u64(b & 63), "nz"),
    "s_ashr_i64": ((64, 32), 64, lambda a, b: (a.view(I64) >> (b & 63).astype(I64)).view(U64), "nz"),
    "s_bfm_b32": ((32, 32), 32, lambda a, b: ((U32(1) << (a & 31)) - U32(1)) << (b & 31), None),
    "s_bfm_b64": ((32, 32), 64, lambda a, b: ((U64(1) << _u64(a & 63)) - U64(1)) << _u64(b & 63), None),
    "s_mul_i32": ((32, 32), 32, lambda a, b: a * b, None),
    "s_mul_hi_u32": ((32, 32), 32, lambda a, b: ((_u64(a) * _u64(b)) >> U64(32)).astype(U32), None),
    "s_mul_hi_i32": ((32, 32), 32, _mul_hi_i, None),
    "s_bfe_u32": ((32, 32), 32, _bfe_u, "nz"),
    "s_bfe_i32": ((32, 32), 32, _bfe_i, "nz"),
    "s_bfe_u64": ((64, 32), 64, _bfe_u64, "nz"),
    "s_bfe_i64": ((64, 32), 64, _bfe_i64, "nz"),
    "s_absdiff_i32": (
        (32, 32), 32, lambda a, b: np.abs(_i(a).astype(I64) - _i(b)).astype(U32), "nz"
    ),
    "s_pack_ll_b32_b16": ((32, 32), 32, lambda a, b: (a & 0xFFFF) | (b << 16), None),
    "s_pack_lh_b32_b16": ((32, 32), 32, lambda a, b: (a & 0xFFFF) | (b & U32(0xFFFF0000)), None),
    "s_pack_hh_b32_b16": ((32, 32), 32, lambda a, b: (a >> 16) | (b & U32(0xFFFF0000)), None),
}  # fmt: skip
for _k in (1, 2, 3, 4):
    _SOP2[f"s_lshl{_k}_add_u32"] = (
        (32, 32), 32, lambda a, b, k=_k: (a << k) + b,
        lambda a, b, r, c, k=_k: ((_u64(a) << U64(k)) + _u64(b)) >> U64(32) != 0,
    )  # fmt: skip
_BITWISE: dict[str, Callable[..., Array]] = {
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b), "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b), "andn1": lambda a, b: ~a & b, "orn1": lambda a, b: ~a | b,
}  # fmt: skip
for _n in ("and", "or", "xor", "andn2", "orn2", "nand", "nor", "xnor"):
    _SOP2[f"s_{_n}_b32"] = ((32, 32), 32, _BITWISE[_n], "nz")
    _SOP2[f"s_{_n}_b64"] = ((64, 64), 64, _BITWISE[_n], "nz")
_FLIP2 = {n for n in _SOP2 if n.split("_")[1] in _BITWISE}

_SOP1: dict[str, tuple[int, int, Callable[[Array], Array], _SccRule]] = {
    "s_mov_b32": (32, 32, lambda a: a, None),
    "s_mov_b64": (64, 64, lambda a: a, None),
    "s_not_b32": (32, 32, lambda a: ~a, "nz"),
    "s_not_b64": (64, 64, lambda a: ~a, "nz"),
    "s_wqm_b32": (32, 32, _wqm, "nz"),
    "s_wqm_b64": (64, 64, _wqm, "nz"),
    "s_brev_b32": (32, 32, _brev, None),
    "s_brev_b64": (64, 64, _brev, None),
    "s_bcnt1_i32_b32": (32, 32, _bcnt, "nz"),
    "s_bcnt1_i32_b64": (64, 32, _bcnt, "nz"),
    "s_bcnt0_i32_b32": (32, 32, lambda a: U32(32) - _bcnt(a), "nz"),
    "s_bcnt0_i32_b64": (64, 32, lambda a: U32(64) - _bcnt(a), "nz"),
    "s_ff1_i32_b32": (32, 32, lambda a: _find(_bits(a)), None),
    "s_ff1_i32_b64": (64, 32, lambda a: _find(_bits(a)), None),
    "s_ff0_i32_b32": (32, 32, lambda a: _find(~_bits(a)), None),
    "s_ff0_i32_b64": (64, 32, lambda a: _find(~_bits(a)), None),
    "s_flbit_i32_b32": (32, 32, lambda a: _find(_bits(a)[:, ::-1]), None),
    "s_flbit_i32_b64": (64, 32, lambda a: _find(_bits(a)[:, ::-1]), None),
    "s_flbit_i32": (32, 32, lambda a: _find(_bits(a ^ (a.view(I32) >> 31).view(U32))[:, ::-1]), None),
    "s_sext_i32_i8": (32, 32, lambda a: a.astype(np.int8).astype(I32).view(U32), None),
    "s_sext_i32_i16": (32, 32, lambda a: a.astype(np.int16).astype(I32).view(U32), None),
    "s_abs_i32": (32, 32, lambda a: np.where(a >> 31, U32(0) - a, a).astype(U32), "nz"),
}
_FLIP1 = {"s_mov_b32", "s_mov_b64", "s_not_b32", "s_not_b64", "s_brev_b32", "s_brev_b64", "s_sext_i32_i8",
          "s_sext_i32_i16"}  # fmt: skip

_CMP: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "lg": np.not_equal, "gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal,
}  # fmt: skip

# Instructions without an effect on the state that is modelled.
NO_EFFECT = {
    "s_nop", "s_sleep", "s_setprio", "s_icache_inv", "s_wakeup", "s_set_valu_coexec_mode", "s_inst_prefetch",
    "s_ttracedata", "s_dcache_wb", "s_dcache_inv", "s_dcache_inv_vol", "s_dcache_wb_vol",
}  # fmt: skip


class Scalar:
    """A scalar source: value and shadow as [waves] arrays."""

    def __init__(self, ctx: Ctx, ins: Instr, code: int, width: int) -> None:
        self.ids: tuple[int, ...] = ()
        self.reg: int | None = None
        self.width = width
        if is_sreg(code):
            if width == 64 and code & 1:
                raise UnsupportedError(f"64-bit operand in odd register s{code}", ins.where)
            self.reg = code
            i, j = code >> 1, code & 1
            if width == 32:
                self.ids = (S_ID + code,)
                self.get: Callable[[WaveGroup], Array] = lambda g: g.S[i, :, j]
                self.shadow: Callable[[WaveGroup], Array] = lambda g: g.SU[i, :, j]
            else:
                self.ids = (S_ID + code, S_ID + code + 1)
                self.get = lambda g: g.S64[i]
                self.shadow = lambda g: g.SU64[i]
            return
        if code == 253:
            dt: Any = U32 if width == 32 else U64
            self.ids = (SCC_ID,)
            self.get = lambda g: g.SCC.astype(dt)
            self.shadow = lambda g: np.where(g.SCCU, ~dt(0), dt(0))
            return
        if code in (251, 252):
            i, dt2 = (53 if code == 251 else 63), (U32 if width == 32 else U64)
            self.ids = (S_ID + 106, S_ID + 107) if code == 251 else ()
            self.get = lambda g: (g.S64[i] == 0).astype(dt2)
            self.shadow = lambda g: np.where(g.SU64[i] != 0, ~dt2(0), dt2(0))
            return
        if width == 64 and code in (235, 237):
            from .memory import PRIVATE_BASE, SHARED_BASE

            value: int | None = SHARED_BASE if code == 235 else PRIVATE_BASE
        elif code == LITERAL:
            value = ins.literal
            if width == 64 and ins.literal is not None and ins.literal >> 31:
                raise UnsupportedError("64-bit scalar operand with a negative literal", ins.where)
        else:
            value = inline_constant(code, width)
        if value is None:
            raise UnsupportedError(f"scalar operand code {code}", ins.where)
        c = np.array([value], U32 if width == 32 else U64)
        z = np.zeros(1, c.dtype)
        self.get = lambda g: np.broadcast_to(c, (g.n,))
        self.shadow = lambda g: z


def _writer(
    ins: Instr, code: int, width: int
) -> tuple[Callable[[WaveGroup, Any, Any], None], tuple[int, ...]]:
    if not is_sreg(code):
        raise UnsupportedError(f"scalar destination {code}", ins.where)
    if width == 32:
        return (lambda g, v, s: write_sgpr(g, code, v, s)), (S_ID + code,)
    if code & 1:
        raise UnsupportedError(f"64-bit destination in odd register s{code}", ins.where)
    return (lambda g, v, s: write_sgpr64(g, code, v, s)), (S_ID + code, S_ID + code + 1)


def _set_scc(g: WaveGroup, value: Any, undefined: Any = False) -> None:
    g.SCC = np.array(np.broadcast_to(value, (g.n,)), bool)
    u = np.array(np.broadcast_to(undefined, (g.n,)), bool)
    g.SCCU = u
    if u.any():
        g.dirty.add(SCC_ID)
    else:
        g.dirty.discard(SCC_ID)


def _smear(u: Array) -> Array:
    """Bits at and above the lowest undefined bit."""
    return u | (u.dtype.type(0) - u)


def _flip(fn: Callable[..., Array], vals: list[Array], shadows: list[Array]) -> Array:
    base = fn(*vals)
    out = np.zeros_like(base)
    k = len(vals)
    for sub in range(1, 1 << k):
        v = [x ^ s if sub >> j & 1 else x for j, (x, s) in enumerate(zip(vals, shadows, strict=True))]
        out |= base ^ fn(*v)
    return out


def _scc_nz(r: Array, sh: Array) -> Array:
    """Is `result != 0` undefined: no defined bit is 1 and some bit is undefined."""
    return ((r & ~sh) == 0) & (sh != 0)


def build(ctx: Ctx, ins: Instr) -> Step:
    """The closure for a scalar instruction that is no control flow."""
    name, where = ins.name, ins.where
    if name in NO_EFFECT:
        return lambda g: None
    fmt = ins.fmt.removesuffix("_LIT")
    if fmt == "SOP2":
        return _sop2(ctx, ins)
    if fmt == "SOPC":
        return _sopc(ctx, ins)
    if fmt == "SOP1":
        return _sop1(ctx, ins)
    if fmt == "SOPK":
        return _sopk(ctx, ins)
    raise UnsupportedError(f"instruction {name}", where)


def _run(
    g: WaveGroup, fn: Callable[..., Array], srcs: list[Scalar], write: Any, scc: _SccRule, ids: frozenset[int],
    flip: bool, where: str, extra: Any = None,
) -> None:  # fmt: skip
    vals = [s.get(g) for s in srcs]
    old_scc = g.SCC
    r = fn(*vals)
    if g.dirty.isdisjoint(ids):
        sh = None
    else:
        g.check_pending(ids, where)
        shs = [np.broadcast_to(s.shadow(g), (g.n,)) for s in srcs]
        if flip:
            sh = _flip(fn, vals, shs)
        else:
            bad = np.zeros(g.n, bool)
            for x in shs:
                bad |= x != 0
            sh = np.where(bad, ~r.dtype.type(0), r.dtype.type(0))
            if name_is_add(where):
                u = np.zeros(g.n, r.dtype)
                for x in shs:
                    u = u | x.astype(r.dtype)
                sh = _smear(u)
    if scc is not None:
        a, b = vals[0], vals[1] if len(vals) > 1 else vals[0]
        value = (r != 0) if scc == "nz" else scc(a, b, r, old_scc)
        if sh is None:
            g.SCC = value
            if SCC_ID in g.dirty:
                _set_scc(g, value)
        else:
            _set_scc(g, value, _scc_nz(r, sh) if scc == "nz" else sh != 0)
    write(g, r, sh)


def name_is_add(where: str) -> bool:
    """Is the instruction of this report text an integer addition or subtraction?"""
    name = where.split(": ", 1)[-1].split(" ", 1)[0]
    return name in (
        "s_add_u32",
        "s_add_i32",
        "s_sub_u32",
        "s_sub_i32",
        "s_mul_i32",
        "s_addk_i32",
        "s_mulk_i32",
    )


def _sop2(ctx: Ctx, ins: Instr) -> Step:
    name, where = ins.name, ins.where
    if name in ("s_addc_u32", "s_subb_u32"):
        return _carry(ctx, ins)
    if name in ("s_cselect_b32", "s_cselect_b64"):
        return _cselect(ctx, ins)
    if name not in _SOP2:
        raise UnsupportedError(f"instruction {name}", where)
    (wa, wb), wd, fn, scc = _SOP2[name]
    srcs = [Scalar(ctx, ins, ins.ssrc0, wa), Scalar(ctx, ins, ins.ssrc1, wb)]
    write, dids = _writer(ins, ins.sdst, wd)
    ids = frozenset((*srcs[0].ids, *srcs[1].ids, *dids))
    flip = name in _FLIP2
    return lambda g: _run(g, fn, srcs, write, scc, ids, flip, where)


def _carry(ctx: Ctx, ins: Instr) -> Step:
    where, sub = ins.where, ins.name == "s_subb_u32"
    a, b = Scalar(ctx, ins, ins.ssrc0, 32), Scalar(ctx, ins, ins.ssrc1, 32)
    write, dids = _writer(ins, ins.sdst, 32)
    ids = frozenset((*a.ids, *b.ids, *dids))

    def step(g: WaveGroup) -> None:
        x, y, c = a.get(g).astype(I64), b.get(g).astype(I64), g.SCC.astype(I64)
        t = x - y - c if sub else x + y + c
        scc = t < 0 if sub else t > 0xFFFFFFFF
        sh = None
        bad: Any = False
        if not g.dirty.isdisjoint(ids | {SCC_ID}):
            g.check_pending(ids, where)
            bad = (a.shadow(g) != 0) | (b.shadow(g) != 0) | g.SCCU
            sh = np.where(np.broadcast_to(bad, (g.n,)), ~U32(0), U32(0))
        _set_scc(g, scc, bad)
        write(g, (t & 0xFFFFFFFF).astype(U32), sh)

    return step


def _cselect(ctx: Ctx, ins: Instr) -> Step:
    where = ins.where
    w = 64 if ins.name.endswith("64") else 32
    a, b = Scalar(ctx, ins, ins.ssrc0, w), Scalar(ctx, ins, ins.ssrc1, w)
    write, dids = _writer(ins, ins.sdst, w)
    ids = frozenset((*a.ids, *b.ids, *dids))

    def step(g: WaveGroup) -> None:
        r = np.where(g.SCC, a.get(g), b.get(g))
        sh = None
        if not g.dirty.isdisjoint(ids) or SCC_ID in g.dirty:
            g.check_pending(ids, where)
            sh = np.where(g.SCC, a.shadow(g), b.shadow(g))
            sh = np.where(g.SCCU & (a.get(g) != b.get(g)), ~r.dtype.type(0), sh)
        write(g, r, sh)

    return step


def _sopc(ctx: Ctx, ins: Instr) -> Step:
    name, where = ins.name, ins.where
    if name.startswith("s_bitcmp"):
        w = 64 if name.endswith("64") else 32
        want = name[8] == "1"
        a, b = Scalar(ctx, ins, ins.ssrc0, w), Scalar(ctx, ins, ins.ssrc1, 32)

        def fn(x: Array, y: Array) -> Array:
            return ((x >> (y & (w - 1)).astype(x.dtype)) & x.dtype.type(1) != 0) == want
    else:
        _, _, cond, typ = name.split("_")
        w = int(typ[1:])
        a, b = Scalar(ctx, ins, ins.ssrc0, w), Scalar(ctx, ins, ins.ssrc1, w)
        op = _CMP[cond]
        signed = typ[0] == "i"

        def fn(x: Array, y: Array) -> Array:
            if signed:
                x, y = np.ascontiguousarray(x).view(I32), np.ascontiguousarray(y).view(I32)
            return op(x, y)

    ids = frozenset((*a.ids, *b.ids))

    def step(g: WaveGroup) -> None:
        x, y = a.get(g), b.get(g)
        r = fn(x, y)
        if g.dirty.isdisjoint(ids):
            g.SCC = r
            if SCC_ID in g.dirty:
                _set_scc(g, r)
            return
        g.check_pending(ids, where)
        bad = (a.shadow(g) != 0) | (b.shadow(g) != 0)
        if name.startswith("s_bitcmp"):
            bad = ((a.shadow(g) >> (y & (w - 1)).astype(x.dtype)) & x.dtype.type(1) != 0) | (b.shadow(g) != 0)
        _set_scc(g, r, bad)

    return step


def _sop1(ctx: Ctx, ins: Instr) -> Step:
    name, where = ins.name, ins.where
    if name.endswith(("_saveexec_b64", "_wrexec_b64")):
        return _saveexec(ctx, ins)
    if name == "s_getpc_b64":
        write, _ = _writer(ins, ins.sdst, 64)
        pc = ins.addr + 4
        return lambda g: write(g, U64(pc), None)
    if name.startswith(("s_bitset0", "s_bitset1")):
        w = int(name[-2:])
        src = Scalar(ctx, ins, ins.ssrc0, 32)
        old = Scalar(ctx, ins, ins.sdst, w)
        write, dids = _writer(ins, ins.sdst, w)
        one: Any = U32(1) if w == 32 else U64(1)
        on = name[8] == "1"

        def setbit(o: Array, s: Array) -> Array:
            bit = one << (s & (w - 1)).astype(o.dtype)
            return o | bit if on else o & ~bit

        ids = frozenset((*src.ids, *dids))
        return lambda g: _run(g, setbit, [old, src], write, None, ids, False, where)
    if name.startswith("s_cmov"):
        w = int(name[-2:])
        a, d = Scalar(ctx, ins, ins.ssrc0, w), Scalar(ctx, ins, ins.sdst, w)
        write, dids = _writer(ins, ins.sdst, w)
        ids2 = frozenset((*a.ids, *dids))

        def cmov(g: WaveGroup) -> None:
            g.check_pending(ids2, where)
            if g.SCCU.any():
                sh: Any = np.where(g.SCCU, ~U64(0), U64(0)).astype(U32 if w == 32 else U64)
            else:
                sh = np.where(g.SCC, a.shadow(g), d.shadow(g))
            write(g, np.where(g.SCC, a.get(g), d.get(g)), sh)

        return cmov
    if name not in _SOP1:
        raise UnsupportedError(f"instruction {name}", where)
    ws, wd, fn, scc = _SOP1[name]
    src = Scalar(ctx, ins, ins.ssrc0, ws)
    write, dids = _writer(ins, ins.sdst, wd)
    ids3 = frozenset((*src.ids, *dids))
    flip = name in _FLIP1
    return lambda g: _run(g, fn, [src], write, scc, ids3, flip, where)


def _saveexec(ctx: Ctx, ins: Instr) -> Step:
    where = ins.where
    op = _BITWISE[ins.name.split("_")[1]]
    wrexec = ins.name.endswith("_wrexec_b64")
    src = Scalar(ctx, ins, ins.ssrc0, 64)
    write, dids = _writer(ins, ins.sdst, 64)
    ids = frozenset((*src.ids, *dids))

    def step(g: WaveGroup) -> None:
        old = g.S64[63].copy()
        a = src.get(g)
        new = op(a, old)
        if not g.dirty.isdisjoint(ids):
            g.check_pending(ids, where)
            sh = _flip(op, [a, old], [np.broadcast_to(src.shadow(g), (g.n,)), np.zeros(g.n, U64)])
            g.SU64[63] = sh
        write(g, new if wrexec else old, None)
        g.S64[63] = new
        _set_scc(g, new != 0)
        from .operands import check_exec

        check_exec(g)

    return step


def _sopk(ctx: Ctx, ins: Instr) -> Step:
    name, where = ins.name, ins.where
    imm = ins.simm16
    simm = imm - 0x10000 if imm & 0x8000 else imm
    if name == "s_movk_i32":
        write, _ = _writer(ins, ins.sdst, 32)
        v = U32(simm & 0xFFFFFFFF)
        sid = (S_ID + ins.sdst,)

        def movk(g: WaveGroup) -> None:
            g.check_pending(sid, where)
            write(g, v, None)

        return movk
    if name in ("s_addk_i32", "s_mulk_i32"):
        d = Scalar(ctx, ins, ins.sdst, 32)
        write, dids = _writer(ins, ins.sdst, 32)
        c = np.array([simm & 0xFFFFFFFF], U32)
        add = name == "s_addk_i32"
        scc = (lambda a, b, r, s: _add_ovf(a, c, r)) if add else None
        fn = (lambda a: a + c) if add else (lambda a: a * c)
        return lambda g: _run(g, fn, [d], write, scc, frozenset(dids), False, where)
    if name.startswith("s_cmpk_"):
        _, _, cond, typ = name.split("_")
        d = Scalar(ctx, ins, ins.sdst, 32)
        op = _CMP[cond]
        sid2 = frozenset(d.ids)

        def cmpk(g: WaveGroup) -> None:
            g.check_pending(sid2, where)
            x = d.get(g)
            r = op(x.astype(np.int64), imm) if typ == "u32" else op(np.ascontiguousarray(x).view(I32), simm)
            _set_scc(g, r, d.shadow(g) != 0)

        return cmpk
    if name == "s_cmovk_i32":
        d = Scalar(ctx, ins, ins.sdst, 32)
        write, dids = _writer(ins, ins.sdst, 32)

        def cmovk(g: WaveGroup) -> None:
            sh = np.where(g.SCCU, ~U32(0), np.where(g.SCC, U32(0), d.shadow(g)))
            write(g, np.where(g.SCC, U32(simm & 0xFFFFFFFF), d.get(g)), sh)

        return cmovk
    if name in ("s_getreg_b32", "s_setreg_b32", "s_setreg_imm32_b32"):
        return _hwreg(ctx, ins)
    raise UnsupportedError(f"instruction {name}", where)


def _hwreg(ctx: Ctx, ins: Instr) -> Step:
    """MODE only; a write of a rounding mode other than nearest even is refused when it happens."""
    where = ins.where
    reg, off, size = ins.simm16 & 63, ins.simm16 >> 6 & 31, (ins.simm16 >> 11) + 1
    m = (1 << size) - 1
    if ins.name == "s_getreg_b32":
        write, _ = _writer(ins, ins.sdst, 32)
        if reg != 1:
            raise UnsupportedError(f"s_getreg_b32 of hardware register {reg} (MODE is 1)", where)
        return lambda g: write(g, U32(g.mode >> off & m), None)
    if reg != 1:
        raise UnsupportedError(f"s_setreg of hardware register {reg} (MODE is 1)", where)
    src = None if ins.name == "s_setreg_imm32_b32" else Scalar(ctx, ins, ins.sdst, 32)
    lit = ins.literal

    def step(g: WaveGroup) -> None:
        if src is None:
            assert lit is not None
            v = lit
        else:
            g.check_pending(src.ids, where)
            vals = src.get(g)
            if (vals != vals[0]).any():
                raise UnsupportedError("s_setreg with values that differ between waves", where)
            v = int(vals[0])
        mode = (g.mode & ~(m << off)) | ((v & m) << off)
        check_mode(mode, where)
        g.set_mode(mode)

    return step


def check_mode(mode: int, where: str) -> None:
    """Refuse modes that are not modelled."""
    if mode & 0xF:
        raise UnsupportedError(f"MODE.round = {mode & 15:#x} (only round to nearest even is modelled)", where)
    if not mode >> 9 & 1:
        raise UnsupportedError("MODE.IEEE = 0", where)
    if not mode >> 8 & 1:
        raise UnsupportedError("MODE.DX10_CLAMP = 0", where)
