"""Vector memory (MUBUF, GLOBAL, FLAT, SCRATCH), scalar memory (SMEM), global-to-LDS loads, atomics.

Sources: CDNA3 and CDNA4 ISA, chapters 7 (scalar memory), 9 (vector memory; buffer resource descriptor, range check,
addressing), 10 (flat, global, scratch). Buffer range check of raw buffers (stride 0, or no index): a lane is out of
range when offset + size exceeds num_records; such loads give 0 and such stores are dropped, by design. Only a lane that
passes it is checked against the registered buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .decoder import Instr
from .errors import OutOfBoundsError, UnsupportedError
from .floats import F16, F32, F64, I32, I64, U16, U32, U64, bf16_bits_to_f32, f32_to_bf16_bits
from .memory import PRIVATE_BASE, SHARED_BASE, uninit
from .operands import Ctx, is_sreg
from .salu import Scalar
from .state import S_ID, Outstanding, WaveGroup

if TYPE_CHECKING:
    from .engine import Machine

Array = npt.NDArray[Any]
Step = Callable[[WaveGroup], None]

_LOADS = {
    "ubyte": (1, "u8"), "sbyte": (1, "i8"), "ushort": (2, "u16"), "sshort": (2, "i16"), "short": (2, "u16"),
    "dword": (4, ""), "dwordx2": (8, ""), "dwordx3": (12, ""), "dwordx4": (16, ""),
}  # fmt: skip
_STORES = {"byte": 1, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


def parse_load(kind: str) -> tuple[int, str, str] | None:
    """("ubyte_d16_hi") to (bytes, extension, d16 part)."""
    d16 = ""
    if kind.endswith("_d16_hi"):
        kind, d16 = kind[:-7], "hi"
    elif kind.endswith("_d16"):
        kind, d16 = kind[:-4], "lo"
    if kind not in _LOADS:
        return None
    n, ext = _LOADS[kind]
    return n, ext, d16


def extend(raw: Array, ext: str) -> Array:
    """Sub-dword value in the low bits of a uint32 to the register value."""
    if ext == "u8":
        return raw & U32(0xFF)
    if ext == "i8":
        return raw.astype(np.uint8).view(np.int8).astype(I32).view(U32)
    if ext == "u16":
        return raw & U32(0xFFFF)
    if ext == "i16":
        return raw.astype(U16).view(np.int16).astype(I32).view(U32)
    return raw


def write_loaded(
    g: WaveGroup, m: Machine, ins_where: str, rows: list[int], data: list[Any], shadow: list[Any] | None, d16: str,
    ext: str, counter: str, kind: str,
) -> None:  # fmt: skip
    """Put loaded dwords into registers (active lanes) and mark them outstanding."""
    clean = shadow is None and g.full and not d16
    for k, r in enumerate(rows):
        v = data[k]
        sh: Any = U32(0) if shadow is None else shadow[k]
        if ext:
            v = extend(v, ext)
            if shadow is not None:
                sh = extend(np.asarray(sh, U32), ext)
        if r not in g.dirty:
            g.VU[r] = 0
        if d16 == "hi":
            v = (g.V[r] & U32(0xFFFF)) | (v << U32(16))
            sh = (g.VU[r] & U32(0xFFFF)) | (np.asarray(sh, U32) << U32(16))
        elif d16 == "lo":
            v = (g.V[r] & U32(0xFFFF0000)) | (v & U32(0xFFFF))
            sh = (g.VU[r] & U32(0xFFFF0000)) | (np.asarray(sh, U32) & U32(0xFFFF))
        if g.full:
            g.V[r] = v
            g.VU[r] = sh
        else:
            np.copyto(g.V[r], v, where=g.mask)
            np.copyto(g.VU[r], np.asarray(sh, U32), where=g.mask)
    if m.check_pending:
        g.issue(counter, Outstanding(ins_where, tuple(rows), kind, clean))
    else:
        for r in rows:
            if clean or not g.VU[r].any():
                g.dirty.discard(r)
            else:
                g.dirty.add(r)


def _load_shadow_split(m: Machine, off: Array, nbytes: int) -> list[Any] | None:
    sh = m.mem.load_shadow(off, nbytes)
    return None if sh is None else list(sh)


def global_load(
    g: WaveGroup, m: Machine, addr: Array, mask: Array, nbytes: int, where: str
) -> tuple[list[Any], Any]:
    """Load nbytes per active lane; inactive lanes get arbitrary defined values."""
    off = m.mem.locate(addr, None if mask is g.mask and g.full else mask, nbytes, where, False)
    sh = _load_shadow_split(m, off, nbytes)
    if nbytes >= 4:
        return list(m.mem.load_dwords(off, nbytes // 4)), sh
    if nbytes == 1:
        return [m.mem.arena[off].astype(U32)], sh
    b = m.mem.arena[off].astype(U32) | (m.mem.arena[off + 1].astype(U32) << U32(8))
    return [b], sh


# -- addresses -------------------------------------------------------------------------------------------------


def _sext(v: int, bits: int) -> int:
    return v - (1 << bits) if v >> (bits - 1) & 1 else v


def global_address(ctx: Ctx, ins: Instr, m: Machine) -> tuple[Callable[[WaveGroup], Array], tuple[int, ...]]:
    """64-bit address per lane: vaddr + offset, or saddr + 32-bit vaddr + offset."""
    imm = _sext(ins.offset, 13)
    where = ins.where
    off = U64(imm & 0xFFFFFFFFFFFFFFFF)
    if ins.saddr in (124, 127):
        r = ctx.vrow(ins, ins.addr_reg, False, 2)
        ids: tuple[int, ...] = (r, r + 1)

        def addr(g: WaveGroup) -> Array:
            a = g.V[r].astype(U64) | (g.V[r + 1].astype(U64) << U64(32))
            return a + off if imm else a

        def check(g: WaveGroup) -> Array:
            if not g.dirty.isdisjoint(ids):
                g.check_pending(ids, where)
                m.uninit("an address", ((g.VU[r] != 0) & (r in g.dirty) | (g.VU[r + 1] != 0) & (r + 1 in g.dirty))
                         & g.mask, where)  # fmt: skip
            return addr(g)

        return check, ids
    s = Scalar(ctx, ins, ins.saddr, 64)
    v = ctx.vrow(ins, ins.addr_reg)
    ids = (v, *s.ids)

    def saddr(g: WaveGroup) -> Array:
        if not g.dirty.isdisjoint(ids):
            g.check_pending(ids, where)
            if v in g.dirty:
                m.uninit("an address", (g.VU[v] != 0) & g.mask, where)
            m.uninit("a scalar address", (s.shadow(g) != 0) & g.mask.any(1), where)
        a = s.get(g)[:, None] + g.V[v].astype(U64)
        return a + off if imm else a

    return saddr, ids


class BufferAddress:
    """Address and range check of MUBUF."""

    def __init__(self, ctx: Ctx, ins: Instr, m: Machine) -> None:
        self.where = ins.where
        self.m = m
        self.base = ins.srsrc * 4
        if not is_sreg(self.base + 3):
            raise UnsupportedError("buffer resource in special registers", ins.where)
        self.offen, self.idxen = bool(ins.offen), bool(ins.idxen)
        if self.idxen:
            raise UnsupportedError("idxen buffer addressing", ins.where)
        self.imm = ins.offset
        self.soff = Scalar(ctx, ins, ins.soffset, 32)
        self.v = ctx.vrow(ins, ins.vaddr) if self.offen else None
        self.ids = (
            *(S_ID + self.base + k for k in range(4)), *self.soff.ids, *((self.v,) if self.v is not None else ()),
        )  # fmt: skip

    def __call__(self, g: WaveGroup, nbytes: int) -> tuple[Array, Array]:
        """(64-bit addresses, lanes that are active and in range)."""
        b = self.base >> 1
        if not g.dirty.isdisjoint(self.ids):
            g.check_pending(self.ids, self.where)
            self.m.uninit(
                "a buffer resource", ((g.SU64[b] != 0) | (g.SU64[b + 1] != 0)) & g.mask.any(1), self.where
            )
            self.m.uninit("a buffer offset", (self.soff.shadow(g) != 0) & g.mask.any(1), self.where)
            if self.v is not None and self.v in g.dirty:
                self.m.uninit("an address", (g.VU[self.v] != 0) & g.mask, self.where)
        w01 = g.S64[b]
        base = w01 & U64(0xFFFFFFFFFFFF)
        stride = (w01 >> U64(48)) & U64(0x3FFF)
        num = g.S[b + 1, :, 0].astype(U64)
        flags = g.S[b + 1, :, 1]
        if (stride != 0).any() and ((flags >> U32(23)) & U32(1)).any():
            raise UnsupportedError("buffer resource with add_tid_enable", self.where)
        if (w01 >> U64(63)).any():
            raise UnsupportedError("swizzled buffer resource", self.where)
        off: Any = np.full((g.n, 1), self.imm, U64)
        if self.v is not None:
            off = off + g.V[self.v].astype(U64)
        inside = off + U64(nbytes) <= num[:, None]
        soff = self.soff.get(g).astype(U64)[:, None]
        inside = inside & g.mask
        addr = np.broadcast_to(base[:, None] + off + soff, g.mask.shape)
        return addr, inside


# -- building ----------------------------------------------------------------------------------------------------


def build(ctx: Ctx, ins: Instr, m: Machine) -> Step:
    """The closure for a vector memory instruction."""
    name = ins.name
    if name in ("buffer_wbl2", "buffer_inv"):
        return lambda g: None
    space, _, rest = name.partition("_")
    if space not in ("buffer", "global", "flat", "scratch"):
        raise UnsupportedError(f"instruction {name}", ins.where)
    if "addr" in ins.fields:
        # the record's own address attribute would hide the field of the same name
        ins.fields["addr_reg"] = ins.fields.pop("addr")
    if space in ("global", "flat") and rest.startswith("load_lds_"):
        return _load_lds(ctx, ins, m, rest[9:], space)
    if space == "buffer" and ins.get("lds"):
        return _load_lds(ctx, ins, m, rest[5:], space)
    if rest.startswith("load_"):
        p = parse_load(rest[5:])
        if p is not None:
            return _load(ctx, ins, m, space, *p)
    if rest.startswith("store_"):
        kind, hi = rest[6:], False
        if kind.endswith("_d16_hi"):
            kind, hi = kind[:-7], True
        if kind in _STORES:
            return _store(ctx, ins, m, space, _STORES[kind], hi)
    if rest.startswith("atomic_"):
        return _atomic(ctx, ins, m, space, rest[7:])
    raise UnsupportedError(f"instruction {name}", ins.where)


def _address(ctx: Ctx, ins: Instr, m: Machine, space: str) -> Callable[[WaveGroup, int], tuple[Array, Array]]:
    if space == "buffer":
        return BufferAddress(ctx, ins, m)
    if space == "flat":
        ins.fields.setdefault("saddr", 124)
        ins.fields["saddr"] = 124
        ins.fields["offset"] &= 0xFFF
    get, _ = global_address(ctx, ins, m)
    where = ins.where

    def flat(g: WaveGroup, nbytes: int) -> tuple[Array, Array]:
        a = get(g)
        if space == "flat":
            hi = a >> U64(48)
            ap = ((hi == U64(SHARED_BASE >> 48)) | (hi == U64(PRIVATE_BASE >> 48))) & g.mask
            if ap.any():
                raise UnsupportedError("FLAT access through the LDS or private aperture", where)
        return a, g.mask

    return flat


def _counter(space: str) -> tuple[str, str]:
    return ("both", "flat") if space == "flat" else ("vm", "vm")


def _load(ctx: Ctx, ins: Instr, m: Machine, space: str, nbytes: int, ext: str, d16: str) -> Step:
    where = ins.where
    dwords = max(1, nbytes // 4)
    index = ins.vdata if space == "buffer" else ins.vdst
    row = ctx.vrow(ins, index, bool(ins.get("acc")), dwords)
    rows = list(range(row, row + dwords))
    dst_ids = tuple(rows)
    if space == "scratch":
        return _scratch_load(ctx, ins, m, nbytes, ext, d16, rows)
    address = _address(ctx, ins, m, space)
    counter, kind = _counter(space)
    key = f"load{8 * nbytes}"

    def step(g: WaveGroup) -> None:
        addr, mask = address(g, nbytes)
        if g.pend and not g.dirty.isdisjoint(dst_ids):
            _check_waw(g, dst_ids, where, kind, bool(d16))
        data, sh = global_load(g, m, addr, mask, nbytes, where)
        if space == "buffer" and (not g.full or not mask.all()):
            data = [np.where(mask, x, U32(0)) for x in data]
            if sh is not None:
                sh = [np.where(mask, x, U32(0)) for x in sh]
        m.count_bytes(key, nbytes, mask)
        write_loaded(g, m, where, rows, data, sh, d16, ext, counter, kind)

    return step


def _check_waw(g: WaveGroup, ids: tuple[int, ...], where: str, kind: str, reads: bool) -> None:
    """Loads of the same kind return in order and may write a register that an older one still has to write."""
    for r in ids:
        for op in g.pend.get(r, ()):
            if reads or op.kind != kind:
                g.check_pending((r,), where)


def store_operand(ctx: Ctx, ins: Instr, index: int, dwords: int, acc: bool) -> list[int]:
    """Rows of the data registers of a store."""
    row = ctx.vrow(ins, index, acc, dwords)
    return list(range(row, row + dwords))


def check_store_data(g: WaveGroup, m: Machine, rows: list[int], field: int, mask: Array, where: str) -> None:
    """Data of a store must be there and defined."""
    if g.dirty.isdisjoint(rows):
        return
    g.check_pending(rows, where)
    for r in rows:
        if r in g.dirty:
            m.uninit(f"stored data in {g.vname(r)}", ((g.VU[r] & U32(field)) != 0) & mask, where)


def _store(ctx: Ctx, ins: Instr, m: Machine, space: str, nbytes: int, hi: bool) -> Step:
    where = ins.where
    dwords = max(1, nbytes // 4)
    index = ins.vdata if space == "buffer" else ins.fields["data"]
    rows = store_operand(ctx, ins, index, dwords, bool(ins.get("acc")))
    field = {1: 0xFF, 2: 0xFFFF}.get(nbytes, 0xFFFFFFFF)
    if hi:
        field <<= 16
    if space == "scratch":
        return _scratch_store(ctx, ins, m, nbytes, hi, rows)
    address = _address(ctx, ins, m, space)
    counter, kind = _counter(space)
    key = f"store{8 * nbytes}"

    def step(g: WaveGroup) -> None:
        addr, mask = address(g, nbytes)
        check_store_data(g, m, rows, field, mask, where)
        full = g.full and (mask is g.mask or bool(mask.all()))
        off = m.mem.locate(addr, None if full else mask, nbytes, where, True)
        if nbytes >= 4:
            m.mem.store_dwords(off, [g.V[r] for r in rows], None if full else mask)
        else:
            v = g.V[rows[0]] >> U32(16) if hi else g.V[rows[0]]
            d = np.ascontiguousarray(v).view(np.uint8).reshape(*v.shape, 4)[..., :nbytes]
            m.mem.store_bytes(off, d, mask)
        m.count_bytes(key, nbytes, mask)
        if m.check_pending:
            g.issue(counter, Outstanding(where, (), kind, True))

    return step


# -- scratch -----------------------------------------------------------------------------------------------------


def _scratch_offset(ctx: Ctx, ins: Instr, m: Machine) -> Callable[[WaveGroup, int], Array]:
    imm = _sext(ins.offset, 13)
    where = ins.where
    v = ctx.vrow(ins, ins.addr_reg) if ins.get("sve") else None
    s = Scalar(ctx, ins, ins.saddr, 32) if ins.saddr not in (124, 127) else None
    ids = (*((v,) if v is not None else ()), *(s.ids if s else ()))

    def offset(g: WaveGroup, nbytes: int) -> Array:
        if not g.dirty.isdisjoint(ids):
            g.check_pending(ids, where)
            if v is not None and v in g.dirty:
                m.uninit("a scratch address", (g.VU[v] != 0) & g.mask, where)
            if s is not None:
                m.uninit("a scratch address", s.shadow(g) != 0, where)
        o: Any = np.full((g.n, 64), imm, np.int64)
        if v is not None:
            o = o + g.V[v].astype(np.int64)
        if s is not None:
            o = o + s.get(g).astype(np.int64)[:, None]
        bad = g.mask & ((o < 0) | (o + nbytes > m.scratch_size))
        if bad.any():
            w, lane = np.argwhere(bad)[0]
            raise OutOfBoundsError(
                f"scratch access of {nbytes} bytes at {int(o[w, lane])} of {m.scratch_size}, lane {lane}",
                where,
            )
        base = (g.wave[:, None].astype(np.int64) * 64 + np.arange(64)) * m.scratch_stride
        return base + np.where(g.mask, o, 0)

    return offset


def _scratch_load(ctx: Ctx, ins: Instr, m: Machine, nbytes: int, ext: str, d16: str, rows: list[int]) -> Step:
    where = ins.where
    offset = _scratch_offset(ctx, ins, m)

    def step(g: WaveGroup) -> None:
        o = offset(g, nbytes)
        if g.pend and not g.dirty.isdisjoint(rows):
            _check_waw(g, tuple(rows), where, "vm", bool(d16))
        idx = o[..., None] + np.arange(nbytes)
        data, sh = gather_dwords(m.scratch, idx), gather_dwords(m.scratch_undef, idx)
        m.count_bytes(f"scratch_load{8 * nbytes}", nbytes, g.mask)
        write_loaded(g, m, where, rows, data, sh, d16, ext, "vm", "vm")

    return step


def gather_dwords(store: Array, idx: Array) -> list[Array]:
    """Bytes at idx [..., nbytes] as little-endian dwords."""
    b = store[idx]
    pad = -b.shape[-1] % 4
    if pad:
        b = np.concatenate([b, np.zeros((*b.shape[:-1], pad), np.uint8)], -1)
    w = np.ascontiguousarray(b).view(U32)
    return [w[..., k] for k in range(w.shape[-1])]


def _scratch_store(ctx: Ctx, ins: Instr, m: Machine, nbytes: int, hi: bool, rows: list[int]) -> Step:
    where = ins.where
    offset = _scratch_offset(ctx, ins, m)

    def step(g: WaveGroup) -> None:
        o = offset(g, nbytes)
        g.check_pending(rows, where)
        shift = U32(16 if hi else 0)
        idx = (o[..., None] + np.arange(nbytes))[g.mask]
        d = np.stack([g.V[r] >> shift for r in rows], -1).view(np.uint8).reshape(g.n, 64, -1)[..., :nbytes]
        u = np.stack([(g.VU[r] if r in g.dirty else np.zeros_like(g.VU[r])) >> shift for r in rows], -1)
        m.scratch[idx] = d[g.mask]
        m.scratch_undef[idx] = u.view(np.uint8).reshape(g.n, 64, -1)[..., :nbytes][g.mask]
        m.count_bytes(f"scratch_store{8 * nbytes}", nbytes, g.mask)
        if m.check_pending:
            g.issue("vm", Outstanding(where, (), "vm", True))

    return step


# -- global to LDS -----------------------------------------------------------------------------------------------


def _load_lds(ctx: Ctx, ins: Instr, m: Machine, kind: str, space: str) -> Step:
    """LDS address = M0 (bits 15:0, byte offset) + instruction offset + lane * 4 (or the width, gfx950 96/128 bit)."""
    where = ins.where
    p = parse_load(kind)
    if p is None:
        raise UnsupportedError(f"instruction {ins.name} lds", where)
    nbytes, ext, _ = p
    if nbytes > 4 and ctx.arch != "gfx950":
        raise UnsupportedError(f"{nbytes}-byte global-to-LDS load on {ctx.arch}", where)
    address = _address(ctx, ins, m, space)
    imm = ins.offset if space == "buffer" else _sext(ins.offset, 13)
    width = max(4, nbytes)
    m0 = S_ID + 124
    counter, qkind = _counter("global")
    lane = np.arange(64, dtype=np.int64)

    def step(g: WaveGroup) -> None:
        addr, mask = address(g, nbytes)
        if m0 in g.dirty:
            g.check_pending((m0,), where)
            m.uninit("M0 of a global-to-LDS load", g.SU[62, :, 0] != 0, where)
        data, sh = global_load(g, m, addr, mask, nbytes, where)
        data = [np.where(mask, x, U32(0)) for x in data]
        if ext:
            data = [extend(data[0], ext)]
        # M0 holds the byte address of lane 0; every active lane writes, out-of-range lanes write 0.
        # The instruction's offset moves the LDS address as well as the memory address.
        a = (g.S[62, :, 0].astype(np.int64) & 0xFFFFFFFF)[:, None] + imm + lane * width
        m.lds.check_bounds(a, g.mask, width, where)
        idx = np.where(g.mask, a + g.lds_base[:, None], 0)
        d = np.stack(data, -1).astype(U32).view(np.uint8).reshape(g.n, 64, -1)
        me = (g.wave_in_wg + 1)[:, None]
        m.lds.note_write(idx, d, me, g.mask, where, dma=True)
        flat = (idx[g.mask][:, None] + np.arange(width)).reshape(-1)
        m.lds.data[flat] = d[g.mask].reshape(-1)
        if sh is None:
            m.lds.undef[flat] = 0
        else:
            u = np.stack([np.broadcast_to(x, (g.n, 64)) for x in sh], -1).astype(U32).view(np.uint8)
            m.lds.undef[flat] = u.reshape(g.n, 64, -1)[g.mask].reshape(-1)
        m.count_bytes(f"load{8 * nbytes}_lds", nbytes, mask)
        if m.check_pending:
            owner = np.repeat(np.arange(g.n), g.mask.sum(1) * width)
            g.issue(counter, Outstanding(where, (), qkind, True, ("dma", flat, g.wave[owner])))

    return step


# -- atomics -----------------------------------------------------------------------------------------------------


def _pk_add(fmt: str) -> Callable[[int, int], int]:
    def add(old: int, val: int) -> int:
        out = 0
        for k in (0, 16):
            a, b = np.array([old >> k & 0xFFFF], U16), np.array([val >> k & 0xFFFF], U16)
            if fmt == "f16":
                r = int((a.view(F16) + b.view(F16)).view(U16)[0])
            else:
                r = int(f32_to_bf16_bits(bf16_bits_to_f32(a) + bf16_bits_to_f32(b))[0])
            out |= r << k
        return out

    return add


def _fp_op(dtype: Any, utype: Any, fn: Callable[[Any, Any], Any]) -> Callable[[int, int], int]:
    def run(old: int, val: int) -> int:
        a, b = np.array([old], utype).view(dtype), np.array([val], utype).view(dtype)
        return int(np.asarray(fn(a, b), dtype).view(utype)[0])

    return run


def _signed(v: int, bits: int) -> int:
    return v - (1 << bits) if v >> (bits - 1) else v


def atomic_function(op: str, bits: int) -> Callable[[int, int], int] | None:
    """New value of an integer of `bits` bits from the old one and the operand."""
    m = (1 << bits) - 1
    table: dict[str, Callable[[int, int], int]] = {
        "swap": lambda o, v: v, "wrxchg": lambda o, v: v, "add": lambda o, v: (o + v) & m,
        "sub": lambda o, v: (o - v) & m, "rsub": lambda o, v: (v - o) & m, "and": lambda o, v: o & v,
        "or": lambda o, v: o | v, "xor": lambda o, v: o ^ v, "umin": min, "umax": max,
        "smin": lambda o, v: o if _signed(o, bits) <= _signed(v, bits) else v,
        "smax": lambda o, v: o if _signed(o, bits) >= _signed(v, bits) else v,
        "inc": lambda o, v: 0 if o >= v else o + 1, "dec": lambda o, v: v if o == 0 or o > v else o - 1,
        "add_f32": _fp_op(F32, U32, np.add), "add_f64": _fp_op(F64, U64, np.add),
        "min_f64": _fp_op(F64, U64, np.fmin), "max_f64": _fp_op(F64, U64, np.fmax),
        "min_f32": _fp_op(F32, U32, np.fmin), "max_f32": _fp_op(F32, U32, np.fmax),
        "pk_add_f16": _pk_add("f16"), "pk_add_bf16": _pk_add("bf16"),
    }  # fmt: skip
    return table.get(op)


def _atomic(ctx: Ctx, ins: Instr, m: Machine, space: str, op: str) -> Step:
    """Atomics, one lane after the other in lane order (hardware leaves the order open)."""
    where = ins.where
    bits = 32
    if op.endswith("_x2"):
        op, bits = op[:-3], 64
    if op.endswith("f64"):
        bits = 64
    n = bits // 32
    cmp = op == "cmpswap"
    fn = None if cmp else atomic_function(op, bits)
    if fn is None and not cmp:
        raise UnsupportedError(f"instruction {ins.name}", where)
    index = ins.vdata if space == "buffer" else ins.fields["data"]
    acc = bool(ins.get("acc"))
    rows = store_operand(ctx, ins, index, n * (2 if cmp else 1), acc)
    returns = bool(ins.sc0)
    drow = (rows[0] if space == "buffer" else ctx.vrow(ins, ins.vdst, acc, n)) if returns else -1
    address = _address(ctx, ins, m, space)
    counter, kind = _counter(space)
    nbytes = bits // 8

    def step(g: WaveGroup) -> None:
        addr, mask = address(g, nbytes)
        check_store_data(g, m, rows, 0xFFFFFFFF, mask, where)
        off = m.mem.locate(addr, mask, nbytes, where, True)
        if m.mem.shadow is not None:
            m.uninit("memory that an atomic updates", m.mem.shadow[off].astype(bool) & mask, where)
        ar = m.mem.arena

        def operand(k: int) -> Array:
            v = g.V[rows[k * n]].astype(U64)
            return v | (g.V[rows[k * n + 1]].astype(U64) << U64(32)) if n == 2 else v

        val = operand(0)
        expect = operand(1) if cmp else None
        old = np.zeros((g.n, 64), U64)
        for w, lane in np.argwhere(mask):
            p = int(off[w, lane])
            o = int.from_bytes(ar[p : p + nbytes].tobytes(), "little")
            v = int(val[w, lane])
            if cmp:
                assert expect is not None
                new = v if o == int(expect[w, lane]) else o
            else:
                assert fn is not None
                new = fn(o, v)
            ar[p : p + nbytes] = np.frombuffer(new.to_bytes(nbytes, "little"), np.uint8)
            old[w, lane] = o
        m.count_bytes(f"atomic{bits}", nbytes, mask)
        if returns:
            data = [old.astype(U32)] + ([(old >> U64(32)).astype(U32)] if n == 2 else [])
            write_loaded(g, m, where, list(range(drow, drow + n)), data, None, "", "", counter, kind)
        elif m.check_pending:
            g.issue(counter, Outstanding(where, (), kind, True))

    return step


# -- scalar memory -----------------------------------------------------------------------------------------------


def build_smem(ctx: Ctx, ins: Instr, m: Machine) -> Step:
    """s_load, s_buffer_load, s_memtime and the cache instructions."""
    name, where = ins.name, ins.where
    if name.startswith("s_dcache"):
        return lambda g: None
    if name in ("s_memtime", "s_memrealtime"):
        raise UnsupportedError(f"{name}: time is not modelled", where)
    buffer = name.startswith("s_buffer_load_dword")
    if not buffer and not name.startswith("s_load_dword"):
        raise UnsupportedError(f"instruction {name}", where)
    count = int(name.rsplit("x", 1)[1]) if "x" in name.rsplit("dword", 1)[1] else 1
    sbase = ins.sbase * 2
    imm = _sext(ins.offset, 21) if ins.imm else 0
    soff = Scalar(ctx, ins, ins.soffset, 32) if ins.soffset_en else None
    if not ins.imm and not ins.soffset_en:
        soff = Scalar(ctx, ins, ins.offset & 0x7F, 32)
    sdst = ins.sdata
    if not is_sreg(sdst) or not is_sreg(sdst + count - 1):
        raise UnsupportedError(f"scalar load into register {sdst}", where)
    src_ids = tuple(S_ID + sbase + k for k in range(4 if buffer else 2)) + (soff.ids if soff else ())
    dst_ids = tuple(S_ID + sdst + k for k in range(count))

    def step(g: WaveGroup) -> None:
        if not g.dirty.isdisjoint(src_ids):
            g.check_pending(src_ids, where)
            m.uninit("a scalar address", g.SU64[sbase >> 1] != 0, where)
            if soff is not None:
                m.uninit("a scalar offset", soff.shadow(g) != 0, where)
        g.check_pending(dst_ids, where)
        base = g.S64[sbase >> 1]
        off = np.full(g.n, imm, I64)
        if soff is not None:
            off = off + soff.get(g).astype(I64)
        inside = np.ones((g.n, count), bool)
        if buffer:
            if ((base >> U64(48)) & U64(0x3FFF)).any():
                raise UnsupportedError("s_buffer_load with a stride", where)
            base = base & U64(0xFFFFFFFFFFFF)
            num = g.S[(sbase >> 1) + 1, :, 0].astype(I64)
            inside = (off & ~3)[:, None] + 4 * np.arange(count) + 4 <= num[:, None]
        addr = (base + off.view(U64)) & ~U64(3)
        vals = np.zeros((count, g.n), U32)
        shs: Any = None
        if inside.all():
            o = m.mem.locate(addr, None, 4 * count, where, False)
            vals = m.mem.load_dwords(o, count)
            shs = m.mem.load_shadow(o, 4 * count)
        else:
            for k in range(count):
                mk = inside[:, k]
                o = m.mem.locate(addr + U64(4 * k), mk, 4, where, False)
                vals[k] = np.where(mk, m.mem.load_dwords(o, 1)[0], 0)
        for k in range(count):
            r = sdst + k
            g.S[r >> 1, :, r & 1] = vals[k]
            g.shade_s(r, 0 if shs is None else shs[k])
        if sdst + count - 1 >= 126:
            g.refresh_exec()
        m.counters.bytes[f"smem{32 * count}"] += 4 * count * g.n
        if m.check_pending:
            g.issue("lgkm", Outstanding(where, dst_ids, "smem", shs is None))

    return step


_ = uninit
