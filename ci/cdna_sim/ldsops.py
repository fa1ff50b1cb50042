"""LDS instructions: reads, writes, atomics, cross-lane moves through the LDS crossbar, transposing reads.

Sources: CDNA3 and CDNA4 ISA, chapter 11 (data share operations) and 12 (DS instructions); CDNA4 ISA for the
ds_read_b64_tr_* family. Bank model: 64 lanes go through the LDS in passes; dword-wide accesses take 32 lanes a pass on
32 banks (gfx942), 64-bit and wider ones fewer lanes a pass. A pass costs as many cycles as the most loaded bank has
different dwords. gfx950 is counted with 64 banks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .decoder import Instr
from .errors import UnsupportedError
from .floats import U32, U64
from .operands import Ctx
from .state import Outstanding, WaveGroup
from .vmem import atomic_function, check_store_data, extend, gather_dwords, store_operand, write_loaded

if TYPE_CHECKING:
    from .engine import Machine

Array = npt.NDArray[Any]
Step = Callable[[WaveGroup], None]
_LANE = np.arange(64)

_READS = {
    "ds_read_b32": (4, ""), "ds_read_b64": (8, ""), "ds_read_b96": (12, ""), "ds_read_b128": (16, ""),
    "ds_read_u8": (1, "u8"), "ds_read_i8": (1, "i8"), "ds_read_u16": (2, "u16"), "ds_read_i16": (2, "i16"),
    "ds_read_u8_d16": (1, "u8"), "ds_read_u8_d16_hi": (1, "u8"), "ds_read_i8_d16": (1, "i8"),
    "ds_read_i8_d16_hi": (1, "i8"), "ds_read_u16_d16": (2, "u16"), "ds_read_u16_d16_hi": (2, "u16"),
}  # fmt: skip
_WRITES = {
    "ds_write_b8": (1, 0), "ds_write_b16": (2, 0), "ds_write_b8_d16_hi": (1, 16), "ds_write_b16_d16_hi": (2, 16),
    "ds_write_b32": (4, 0), "ds_write_b64": (8, 0), "ds_write_b96": (12, 0), "ds_write_b128": (16, 0),
}  # fmt: skip
_TWO = {
    "ds_read2_b32": (4, 4), "ds_read2_b64": (8, 8), "ds_read2st64_b32": (4, 256), "ds_read2st64_b64": (8, 512),
    "ds_write2_b32": (4, 4), "ds_write2_b64": (8, 8), "ds_write2st64_b32": (4, 256), "ds_write2st64_b64": (8, 512),
}  # fmt: skip


def bank_cycles(addr: Array, mask: Array, nbytes: int, banks: int) -> int:
    """Extra cycles that bank conflicts of one wave cost."""
    per_pass = max(1, min(64, banks * 4 // max(4, nbytes)))
    extra = 0
    for start in range(0, 64, per_pass):
        act = mask[start : start + per_pass]
        if not act.any():
            continue
        dw = (addr[start : start + per_pass][act][:, None] + np.arange(0, max(nbytes, 4), 4)).reshape(-1) >> 2
        dw = np.unique(dw)
        extra += int(np.bincount(dw % banks).max()) - 1
    return extra


class _Access:
    """Address handling that all LDS memory operations share."""

    def __init__(self, ctx: Ctx, ins: Instr, m: Machine) -> None:
        if ins.gds:
            raise UnsupportedError("GDS", ins.where)
        self.row = ctx.vrow(ins, ins.fields["addr"])
        self.where = ins.where
        self.m = m

    def address(self, g: WaveGroup) -> Array:
        r = self.row
        if r in g.dirty:
            g.check_pending((r,), self.where)
            self.m.uninit("an LDS address", (g.VU[r] != 0) & g.mask, self.where)
        return g.V[r].astype(np.int64)

    def index(self, g: WaveGroup, a: Array, nbytes: int) -> Array:
        """Arena index of every lane after the bounds check; inactive lanes get 0."""
        lds = self.m.lds
        if g.full:
            if a.size and (int(a.max()) + nbytes > lds.size or int(a.min()) < 0):
                lds.check_bounds(a, g.mask, nbytes, self.where)
            idx = a + g.lds_base[:, None]
        else:
            lds.check_bounds(a, g.mask, nbytes, self.where)
            idx = np.where(g.mask, a + g.lds_base[:, None], 0)
        self.m.count_banks(a, g.mask, g.full, nbytes)
        return idx

    def read(self, g: WaveGroup, a: Array, nbytes: int) -> tuple[list[Array], list[Array] | None]:
        """Dwords and shadow at byte offsets a."""
        lds = self.m.lds
        idx = self.index(g, a, nbytes)
        if lds.race:
            lds.note_read(idx, nbytes, (g.wave_in_wg + 1)[:, None], g.mask, self.where)
        if nbytes >= 4 and not (idx & 3).any():
            k = nbytes // 4
            w = idx >> 2
            data = [lds.d32[w + j] for j in range(k)]
            u32 = lds.undef.view(U32)
            sh = [u32[w + j] for j in range(k)]
        else:
            full = idx[..., None] + np.arange(nbytes)
            data, sh = gather_dwords(lds.data, full), gather_dwords(lds.undef, full)
        if not any(s.any() for s in sh):
            return data, None
        if not g.full and not any((s.astype(bool) & g.mask).any() for s in sh):
            return data, None
        return data, sh

    def write(self, g: WaveGroup, a: Array, rows: list[int], nbytes: int, shift: int) -> Array:
        """Write registers at byte offsets a; returns the bytes written (arena indices)."""
        lds = self.m.lds
        g.check_pending(rows, self.where)
        idx = self.index(g, a, nbytes)
        vals = [g.V[r] >> U32(shift) if shift else g.V[r] for r in rows]
        clean = g.dirty.isdisjoint(rows)
        if not lds.race and nbytes >= 4 and not (idx & 3).any():
            w = (idx if g.full else idx[g.mask]) >> 2
            u32 = lds.undef.view(U32)
            for j, (v, r) in enumerate(zip(vals, rows, strict=True)):
                lds.d32[w + j] = v if g.full else v[g.mask]
                u: Any = 0 if clean or r not in g.dirty else (g.VU[r] if g.full else g.VU[r][g.mask])
                u32[w + j] = u
            return np.zeros(0, np.int64)
        d = np.stack(vals, -1).view(np.uint8).reshape(g.n, 64, -1)[..., :nbytes]
        lds.note_write(idx, d, (g.wave_in_wg + 1)[:, None], g.mask, self.where)
        flat = (idx[g.mask][:, None] + np.arange(nbytes)).reshape(-1)
        lds.data[flat] = d[g.mask].reshape(-1)
        if clean:
            lds.undef[flat] = 0
        else:
            un = [(g.VU[r] if r in g.dirty else np.zeros_like(g.VU[r])) >> U32(shift) for r in rows]
            ub = np.stack(un, -1).view(np.uint8).reshape(g.n, 64, -1)[..., :nbytes]
            lds.undef[flat] = ub[g.mask].reshape(-1)
        return flat


def _queue_write(g: WaveGroup, m: Machine, where: str, flats: list[Array], nbytes: int) -> None:
    if not m.check_pending:
        return
    payload = None
    if m.lds.race:
        counts = np.repeat(np.arange(g.n), g.mask.sum(1) * nbytes)
        payload = ("write", np.concatenate(flats), np.tile(g.wave[counts], len(flats)))
    g.issue("lgkm", Outstanding(where, (), "lds", True, payload))


def build(ctx: Ctx, ins: Instr, m: Machine) -> Step:
    """The closure for a DS instruction."""
    name, where = ins.name, ins.where
    if name == "ds_nop":
        return lambda g: None
    if name in ("ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32"):
        return _cross(ctx, ins, m)
    if name.startswith("ds_read_b64_tr_"):
        return _transpose(ctx, ins, m)
    off = ins.offset0 | (ins.offset1 << 8)
    acc_flag = bool(ins.acc)
    if name in _READS:
        nbytes, ext = _READS[name]
        d16 = "hi" if name.endswith("_hi") else ("lo" if name.endswith("_d16") else "")
        ax = _Access(ctx, ins, m)
        k = max(1, nbytes // 4)
        row = ctx.vrow(ins, ins.vdst, acc_flag, k)
        rows = list(range(row, row + k))
        return _read_step(ax, m, where, rows, [(off, nbytes, rows)], ext, d16)
    if name in _TWO:
        nbytes, scale = _TWO[name]
        ax = _Access(ctx, ins, m)
        k = nbytes // 4
        o0, o1 = ins.offset0 * scale, ins.offset1 * scale
        if name.startswith("ds_read"):
            row = ctx.vrow(ins, ins.vdst, acc_flag, 2 * k)
            rows = list(range(row, row + 2 * k))
            return _read_step(ax, m, where, rows, [(o0, nbytes, rows[:k]), (o1, nbytes, rows[k:])], "", "")
        r0 = store_operand(ctx, ins, ins.data0, k, acc_flag)
        r1 = store_operand(ctx, ins, ins.data1, k, acc_flag)

        def write2(g: WaveGroup) -> None:
            a = ax.address(g)
            flats = [ax.write(g, a + o0, r0, nbytes, 0), ax.write(g, a + o1, r1, nbytes, 0)]
            m.count_bytes(f"lds_write{8 * nbytes}", 2 * nbytes, g.mask)
            _queue_write(g, m, where, flats, nbytes)

        return write2
    if name in _WRITES:
        nbytes, shift = _WRITES[name]
        ax = _Access(ctx, ins, m)
        rows = store_operand(ctx, ins, ins.data0, max(1, nbytes // 4), acc_flag)

        def write(g: WaveGroup) -> None:
            flat = ax.write(g, ax.address(g) + off, rows, nbytes, shift)
            m.count_bytes(f"lds_write{8 * nbytes}", nbytes, g.mask)
            _queue_write(g, m, where, [flat], nbytes)

        return write
    return _atomic(ctx, ins, m)


def _read_step(
    ax: _Access,
    m: Machine,
    where: str,
    rows: list[int],
    parts: list[tuple[int, int, list[int]]],
    ext: str,
    d16: str,
) -> Step:
    total = sum(p[1] for p in parts)

    def step(g: WaveGroup) -> None:
        a = ax.address(g)
        g.check_pending(rows, where)
        data: list[Any] = []
        shs: list[Any] = []
        undefined = False
        for off, nbytes, regs in parts:
            d, sh = ax.read(g, a + off if off else a, nbytes)
            data += d[: len(regs)]
            undefined |= sh is not None
            shs += sh if sh is not None else [U32(0)] * len(regs)
        m.count_bytes(f"lds_read{8 * parts[0][1]}", total, g.mask)
        write_loaded(g, m, where, rows, data, shs if undefined else None, d16, ext, "lgkm", "lds")

    return step


def swizzle_table(offset: int) -> Array:
    """Source lane per lane of ds_swizzle_b32."""
    if offset & 0x8000:
        if offset >= 0xE000:
            raise ValueError("FFT mode")
        if offset >= 0xC000:  # rotate within 32 lanes
            raise ValueError("rotate mode")
        return (_LANE & ~3) | ((offset >> (2 * (_LANE & 3))) & 3)
    a, o, x = offset & 31, offset >> 5 & 31, offset >> 10 & 31
    return (_LANE & 32) | ((((_LANE & 31) & a) | o) ^ x)


def _cross(ctx: Ctx, ins: Instr, m: Machine) -> Step:
    """ds_bpermute (pull), ds_permute (push), ds_swizzle. An inactive source lane gives 0."""
    name, where = ins.name, ins.where
    dst = ctx.vrow(ins, ins.vdst, bool(ins.acc))
    off = ins.offset0 | (ins.offset1 << 8)
    if name == "ds_swizzle_b32":
        try:
            table = swizzle_table(off)
        except ValueError as e:
            raise UnsupportedError(f"ds_swizzle_b32 {e} (offset {off:#x})", where) from None
        src = ctx.vrow(ins, ins.fields["addr"])
        ids = (src, dst)

        def swz(g: WaveGroup) -> None:
            g.check_pending(ids, where)
            ok = g.mask[:, table]
            v = np.where(ok, g.V[src][:, table], U32(0))
            sh = [np.where(ok, g.VU[src][:, table], U32(0))] if src in g.dirty else None
            write_loaded(g, m, where, [dst], [v], sh, "", "", "lgkm", "lds")

        return swz
    areg, dreg = ctx.vrow(ins, ins.fields["addr"]), ctx.vrow(ins, ins.data0)
    ids3 = (areg, dreg, dst)
    push = name == "ds_permute_b32"

    def perm(g: WaveGroup) -> None:
        g.check_pending(ids3, where)
        lane = ((g.V[areg] + U32(off)) >> U32(2)).astype(np.int64) & 63
        rows = np.arange(g.n)[:, None]
        src_u = g.VU[dreg] if dreg in g.dirty else None
        sh: Any = None
        if push:
            v = np.zeros((g.n, 64), U32)
            u = np.zeros((g.n, 64), U32)
            for k in range(64):  # later lanes win, as the order of the crossbar is by lane
                act = g.mask[:, k]
                v[np.arange(g.n)[act], lane[act, k]] = g.V[dreg][act, k]
                if src_u is not None:
                    u[np.arange(g.n)[act], lane[act, k]] = src_u[act, k]
            sh = [u] if src_u is not None else None
            if areg in g.dirty:
                m.uninit("a ds_permute lane index", ((g.VU[areg] & U32(0xFC)) != 0) & g.mask, where)
        else:
            ok = g.mask[rows, lane]
            v = np.where(ok, g.V[dreg][rows, lane], U32(0))
            if src_u is not None or areg in g.dirty:
                u = np.where(ok, src_u[rows, lane], U32(0)) if src_u is not None else np.zeros((g.n, 64), U32)
                if areg in g.dirty:
                    u = np.where((g.VU[areg] & U32(0xFC)) != 0, U32(0xFFFFFFFF), u)
                sh = [u]
        write_loaded(g, m, where, [dst], [v], sh, "", "", "lgkm", "lds")

    return perm


def _transpose(ctx: Ctx, ins: Instr, m: Machine) -> Step:
    """ds_read_b64_tr_b16/b8/b4 (gfx950): each group of 16 lanes reads 64 bits a lane and transposes the elements.

    The 16 lanes of a group together read a block of 16 rows of 64 bits. With e elements of w bits per row (e = 64/w),
    lane i of the group receives element (i mod e) of rows (i div e)*e ... +e-1... in the arrangement documented for the
    16-bit form: lane i gets, for j = 0..3, element (i mod 4) of the row held by lane 4*j + (i div 4).
    """
    where = ins.where
    width = int(ins.name.rsplit("_b", 1)[1])
    ax = _Access(ctx, ins, m)
    off = ins.offset0 | (ins.offset1 << 8)
    row = ctx.vrow(ins, ins.vdst, bool(ins.acc), 2)
    rows = [row, row + 1]
    src_lane, src_elem = transpose_map(width)

    def regroup(words: list[Array]) -> list[Array]:
        w = np.stack([np.asarray(x, U32) for x in words], -1)
        q = np.ascontiguousarray(w).view(U64)[..., 0]
        n = 64 // width
        out = np.zeros(q.shape, U64)
        mask = U64((1 << width) - 1)
        for j in range(n):
            out |= ((q[:, src_lane[:, j]] >> (src_elem[:, j].astype(U64) * U64(width))) & mask) << U64(
                width * j
            )
        return [out.astype(U32), (out >> U64(32)).astype(U32)]

    def step(g: WaveGroup) -> None:
        a = ax.address(g)
        g.check_pending(rows, where)
        d, sh = ax.read(g, a + off, 8)
        m.count_bytes("lds_read64", 8, g.mask)
        write_loaded(
            g, m, where, rows, regroup(d), None if sh is None else regroup(sh), "", "", "lgkm", "lds"
        )

    return step


def transpose_map(width: int) -> tuple[Array, Array]:
    """For each lane and each element of its result: the lane and the element that it comes from."""
    n = 64 // width
    lane = _LANE[:, None]
    j = np.arange(n)[None, :]
    group, i = lane & ~15, lane & 15
    if width == 16:
        # 16 lanes hold a 4 x 16 block: the row of lane l is l // 4, its columns 4 * (l % 4) ...; lane i takes column i
        return group | (4 * j + i // 4), np.broadcast_to(i % 4, (64, n))
    if width == 8:
        # 8 x 16 block of bytes: row l // 2, columns 8 * (l % 2) ...
        return group | (2 * j + i // 8), np.broadcast_to(i % 8, (64, n))
    # 16 x 16 block of nibbles: row l, lane i takes column i
    return group | (j + 0 * i), np.broadcast_to(i, (64, n))


def _atomic(ctx: Ctx, ins: Instr, m: Machine) -> Step:
    """ds_add_u32 and its kind, one lane after the other."""
    name, where = ins.name, ins.where
    parts = name.split("_")[1:]
    rtn = "rtn" in parts
    typ = parts[-1]
    op = "_".join(p for p in parts[:-1] if p != "rtn")
    bits = 64 if typ.endswith("64") else 32
    if op in ("min", "max") and typ[0] in "iu":
        op = ("s" if typ[0] == "i" else "u") + op
    elif typ[0] == "f" or op.startswith("pk"):
        op = f"{op}_{typ}"
    cmp = op == "cmpst"
    fn = None if cmp else atomic_function(op, bits)
    if fn is None and not cmp:
        raise UnsupportedError(f"instruction {name}", where)
    ax = _Access(ctx, ins, m)
    off = ins.offset0 | (ins.offset1 << 8)
    n = bits // 32
    d0 = store_operand(ctx, ins, ins.data0, n, bool(ins.acc))
    d1 = store_operand(ctx, ins, ins.data1, n, bool(ins.acc)) if cmp else []
    drow = ctx.vrow(ins, ins.vdst, bool(ins.acc), n) if rtn else -1
    nbytes = bits // 8

    def step(g: WaveGroup) -> None:
        a = ax.address(g) + off
        check_store_data(g, m, d0 + d1, 0xFFFFFFFF, g.mask, where)
        idx = ax.index(g, a, nbytes)
        lds = m.lds
        old = np.zeros((g.n, 64), U64)

        def operand(rows: list[int]) -> Array:
            v = g.V[rows[0]].astype(U64)
            return v | (g.V[rows[1]].astype(U64) << U64(32)) if n == 2 else v

        x = operand(d0)
        y = operand(d1) if cmp else x
        bad = gather_dwords(lds.undef, idx[..., None] + np.arange(nbytes))
        m.uninit("LDS that an atomic updates", (bad[0] != 0) & g.mask, where)
        for w, lane in np.argwhere(g.mask):
            p = int(idx[w, lane])
            o = int.from_bytes(lds.data[p : p + nbytes].tobytes(), "little")
            if cmp:  # ds_cmpst: data0 compares, data1 is stored
                new = int(y[w, lane]) if o == int(x[w, lane]) else o
            else:
                assert fn is not None
                new = fn(o, int(x[w, lane]))
            lds.data[p : p + nbytes] = np.frombuffer(new.to_bytes(nbytes, "little"), np.uint8)
            old[w, lane] = o
        m.count_bytes(f"lds_atomic{bits}", nbytes, g.mask)
        if rtn:
            data = [old.astype(U32)] + ([(old >> U64(32)).astype(U32)] if n == 2 else [])
            write_loaded(g, m, where, list(range(drow, drow + n)), data, None, "", "", "lgkm", "lds")
        elif m.check_pending:
            g.issue("lgkm", Outstanding(where, (), "lds", True))

    return step


_ = extend
