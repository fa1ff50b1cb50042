"""Matrix instructions (MFMA): operand layouts and arithmetic.

Layouts (CDNA3 ISA, "Matrix arithmetic instructions"; CDNA4 for the double-K shapes): with M rows and B blocks, a lane
holds K*M*B/64 consecutive k of one row (A) or column (B); lane l belongs to row l mod M, and to k group
(l div M) mod (64/(M*B)) and block accordingly. The result of a 32x32 shape sits in groups of four rows:
register r, lane l: row 8*(r div 4) + 4*(l div 32) + r mod 4, column l mod 32; of a 16x16 shape: row 4*(l div 16) + r.

Arithmetic: all K products of a result are exact (fp64 holds them), are added in order of k in fp64, C is added last,
and the sum is rounded once to the result type. Hardware adds in groups with intermediate roundings of its own, so
results agree to a few units of fp32 in the last place of the largest partial sum, not bit for bit. i8 is exact.
EXEC is ignored, as documented.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import floats as fl
from .decoder import Instr
from .errors import UnsupportedError
from .floats import F16, F32, F64, I32, U32, U64
from .operands import ONES, Ctx
from .state import WaveGroup

if TYPE_CHECKING:
    from .engine import Machine

Array = npt.NDArray[Any]
Step = Callable[[WaveGroup], None]

_NAME = re.compile(r"v_mfma_(f32|i32|f64)_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?_(\w+)$")
_BITS = {"f16": 16, "bf16": 16, "f32": 32, "xf32": 32, "i8": 8, "f64": 64, "fp8": 8, "bf8": 8}


def decode_elements(words: Array, kind: str, arch: str) -> Array:
    """[..., dwords] register contents of a lane to [..., elements] fp64."""
    words = np.ascontiguousarray(words)
    if kind == "f16":
        return words.view(F16).astype(F64)
    if kind == "bf16":
        return fl.bf16_bits_to_f32(words.view(np.uint16).astype(U32)).astype(F64)
    if kind == "f32":
        return words.view(F32).astype(F64)
    if kind == "xf32":  # 10-bit mantissa, rounded to nearest even from fp32
        u = words + U32(0xFFF) + ((words >> U32(13)) & U32(1))
        return (u & ~U32(0x1FFF)).view(F32).astype(F64)
    if kind == "f64":
        return words.view(F64)
    if kind == "i8":
        return words.view(np.int8).astype(F64)
    if kind in ("fp8", "bf8"):
        return fl.fp8_format(arch, kind == "bf8").decode(words.view(np.uint8)).astype(F64)
    if kind == "fp4":
        b = words.view(np.uint8)
        nib = np.stack([b & 15, b >> 4], -1).reshape(*b.shape[:-1], -1)
        return fl.FP4_TABLE[nib].astype(F64)
    raise UnsupportedError(f"matrix operand format {kind}")


class Shape:
    """Index arithmetic of one shape."""

    def __init__(self, m: int, k: int, blocks: int) -> None:
        self.m, self.k, self.blocks = m, k, blocks
        self.groups = 64 // (m * blocks)  # lane groups along k
        self.per_lane = k // self.groups

    def inputs(self, e: Array) -> Array:
        """[n, 64, per_lane] to [n, blocks, m, k]."""
        n = e.shape[0]
        if self.groups == 1:
            return e.reshape(n, self.blocks, self.m, self.k)
        x = e.reshape(n, self.groups, self.m, self.per_lane)
        return x.transpose(0, 2, 1, 3).reshape(n, 1, self.m, self.k)

    def result_index(self) -> tuple[Array, Array, Array]:
        """For [register, lane]: block, row, column."""
        regs = self.m * self.m * self.blocks // 64
        r = np.arange(regs)[:, None]
        lane = np.arange(64)[None, :]
        if self.m == 4:
            return lane // 4 + 0 * r, r + 0 * lane, lane % 4 + 0 * r
        if self.m == 16:
            return r // 4 + 0 * lane, 4 * (lane // 16) + r % 4, lane % 16 + 0 * r
        q = r % 16
        return r // 16 + 0 * lane, 8 * (q // 4) + 4 * (lane // 32) + q % 4, lane % 32 + 0 * r


_F8F6F4 = {0: ("fp8", 8), 1: ("bf8", 8), 4: ("fp4", 4)}


def build(ctx: Ctx, ins: Instr, m: Machine) -> Step:
    """The closure for a matrix instruction."""
    name, where = ins.name, ins.where
    scaled = name.startswith("v_mfma_scale_")
    if name == "v_mfma_ld_scale_b32":
        raise UnsupportedError(f"instruction {name} on its own", where)
    match = _NAME.match(name.replace("v_mfma_scale_", "v_mfma_"))
    if match is None:
        raise UnsupportedError(f"instruction {name}", where)
    out, rows_, cols, k_, blocks_, kinds = match.groups()
    mm, k, blocks = int(rows_), int(k_), int(blocks_ or 1)
    if mm != int(cols):
        raise UnsupportedError(f"instruction {name}", where)
    acc = ins.acc
    if kinds == "f8f6f4":
        if ins.cbsz not in _F8F6F4 or ins.blgp not in _F8F6F4:
            raise UnsupportedError(f"{name} with formats cbsz={ins.cbsz} blgp={ins.blgp} (fp6/bf6)", where)
        (ka, ra), (kb, rb) = _F8F6F4[ins.cbsz], _F8F6F4[ins.blgp]
    else:
        pair = kinds.split("_")
        ka, kb = (pair[0], pair[-1])
        bits = _BITS[ka]
        ra = rb = max(1, k * mm * blocks // 64 * bits // 32)
        if ins.cbsz or ins.abid or ins.blgp:
            raise UnsupportedError(f"{name} with cbsz/abid/blgp broadcast", where)
    if not kinds == "f8f6f4" and k * mm * blocks % 64:
        raise UnsupportedError(f"instruction {name}", where)
    shape = Shape(mm, k, blocks)
    if out == "f64":
        raise UnsupportedError(f"instruction {name}", where)
    nd = mm * mm * blocks // 64
    a_row = ctx.vrow(ins, ins.src0 & 255, bool(acc & 1), ra)
    b_row = ctx.vrow(ins, ins.src1 & 255, bool(acc >> 1 & 1), rb)
    if ins.src0 < 256 or ins.src1 < 256:
        raise UnsupportedError("scalar matrix operand", where)
    d_row = ctx.vrow(ins, ins.vdst, bool(ins.acc_cd), nd)
    if ins.src2 >= 256:
        c_row = ctx.vrow(ins, ins.src2 - 256, bool(ins.acc_cd), nd)
        c_const: Any = None
    else:
        value = ctx.const(ins, ins.src2, 32)
        if value is None:
            raise UnsupportedError("scalar register as matrix C operand", where)
        c_row, c_const = -1, np.array([value], U32)
    bi, ri, ci = shape.result_index()
    src_ids = frozenset((*range(a_row, a_row + ra), *range(b_row, b_row + rb),
                         *(range(c_row, c_row + nd) if c_row >= 0 else ())))  # fmt: skip
    ids = src_ids | frozenset(range(d_row, d_row + nd))
    is_int = out == "i32"
    scales: list[Any] = []
    if scaled:
        for code, sel in ((ins.scale_src0, (ins.opsel & 1) | (ins.opsel_hi & 1) << 1),
                          (ins.scale_src1, (ins.opsel >> 1 & 1) | (ins.opsel_hi >> 1 & 1) << 1)):  # fmt: skip
            scales.append((ctx.src(ins, code, "u"), sel))
        scale_ids = frozenset(i for s, _ in scales for i in s.ids)
        src_ids = src_ids | scale_ids
        ids = ids | scale_ids
    lanes = np.arange(64)
    del lanes

    def operand(g: WaveGroup, row: int, count: int, kind: str) -> Array:
        w = g.V[row : row + count].transpose(1, 2, 0)
        return decode_elements(w, kind, ctx.arch)

    def step(g: WaveGroup) -> None:
        ea, eb = operand(g, a_row, ra, ka), operand(g, b_row, rb, kb)
        for j, (s, sel) in enumerate(scales):
            e = (np.broadcast_to(s.get(g), (g.n, 64)) >> U32(8 * sel)) & U32(0xFF)
            f = np.where(e == 255, np.nan, np.ldexp(1.0, e.astype(int) - 127))[..., None]
            if j == 0:
                ea = ea * f
            else:
                eb = eb * f
        a, b = shape.inputs(ea), shape.inputs(eb)
        with np.errstate(all="ignore"):
            prod = np.matmul(a, b.transpose(0, 1, 3, 2))  # [n, block, row, col]
        p = np.moveaxis(prod[:, bi, ri, ci], 1, 0)  # [reg, n, lane]
        if is_int:
            c: Any = (
                g.I[c_row : c_row + nd].astype(np.int64) if c_row >= 0 else c_const.view(I32).astype(np.int64)
            )
            r: Any = ((p.astype(np.int64) + c) & 0xFFFFFFFF).astype(U32)
        else:
            c = g.F[c_row : c_row + nd].astype(F64) if c_row >= 0 else c_const.view(F32).astype(F64)
            with np.errstate(all="ignore"):
                r = np.ascontiguousarray((p + c).astype(F32)).view(U32)
        slow = not g.dirty.isdisjoint(ids)
        sh: Any = None
        if slow:
            g.check_pending(ids, where)
            if not g.dirty.isdisjoint(src_ids):
                sh = shadow(g)
        g.V[d_row : d_row + nd] = r
        if slow:
            for j in range(nd):
                x = d_row + j
                g.VU[x] = 0 if sh is None else sh[j]
                if sh is not None and g.VU[x].any():
                    g.dirty.add(x)
                elif x not in g.pend:
                    g.dirty.discard(x)

    def shadow(g: WaveGroup) -> Array:
        """A result is undefined if any element of its row of A, its column of B or its C is."""

        def any_bits(row: int, count: int) -> Array:
            u = np.zeros((g.n, 64), bool)
            for x in range(row, row + count):
                if x in g.dirty:
                    u |= g.VU[x] != 0
            e = np.broadcast_to(u[..., None], (g.n, 64, shape.per_lane))
            return np.asarray(shape.inputs(e.astype(np.uint8)).any(-1))

        ua, ub = any_bits(a_row, ra), any_bits(b_row, rb)
        for j, (s, _) in enumerate(scales):
            x = s.shadow(g)[0]
            if isinstance(x, np.ndarray):
                e = np.broadcast_to((x != 0), (g.n, 64))[..., None]
                e = np.broadcast_to(e, (g.n, 64, shape.per_lane))
                extra = shape.inputs(e.astype(np.uint8)).any(-1)
                if j == 0:
                    ua = ua | extra
                else:
                    ub = ub | extra
        bad = ua[:, :, :, None] | ub[:, :, None, :]
        out_u = np.where(np.moveaxis(bad[:, bi, ri, ci], 1, 0), ONES, U32(0))
        if c_row >= 0:
            for j in range(nd):
                if c_row + j in g.dirty:
                    out_u[j] |= np.where(g.VU[c_row + j] != 0, ONES, U32(0))
        return out_u

    return step


_ = U64
