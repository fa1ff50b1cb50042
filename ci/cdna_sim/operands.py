"""Operand access: from operand codes to closures that read and write the registers of a group of waves.

Every reader comes with the register ids that it touches (for the dirty set) and a twin that reads the shadow. Values
are arrays [waves, 64], [waves, 1] for scalar registers, or [1, 1] for constants, so NumPy broadcasting does the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .decoder import LITERAL, Instr, inline_constant
from .errors import DecodeError, UnsupportedError
from .floats import F32, F64, I32, U16, U32, U64
from .state import S_ID, SCC_ID, WaveGroup, unpack64

Array = npt.NDArray[Any]
Getter = Callable[[WaveGroup], Any]
ONES = np.uint32(0xFFFFFFFF)

# type letter -> (NumPy type, bits)
TYPES: dict[str, tuple[Any, int]] = {
    "f": (F32, 32), "u": (U32, 32), "i": (I32, 32), "h": (np.float16, 16), "w": (U16, 16), "s": (np.int16, 16),
    "D": (F64, 64), "Q": (U64, 64), "L": (np.int64, 64),
}  # fmt: skip


@dataclass(slots=True)
class Src:
    """A source operand: reader of the typed value, reader of its shadow (one array per dword), register ids."""

    get: Getter
    shadow: Callable[[WaveGroup], list[Any]]
    ids: tuple[int, ...]


def is_sreg(code: int) -> bool:
    """Scalar registers that can be read as plain storage."""
    return code <= 107 or code in (124, 126, 127)


class Ctx:
    """What is needed to build instruction closures: target and register layout of the kernel."""

    def __init__(self, arch: str, num_arch_v: int, num_acc: int) -> None:
        self.arch = arch
        self.nv = num_arch_v
        self.na = num_acc

    def vrow(self, ins: Instr, index: int, acc: bool = False, count: int = 1) -> int:
        """Row of a vector register, checked against the kernel's allocation."""
        limit = self.na if acc else self.nv
        if index + count > limit:
            raise DecodeError(
                f"{'a' if acc else 'v'}{index + count - 1} lies beyond the kernel's {limit}", ins.where
            )
        return index + (self.nv if acc else 0)

    def src(self, ins: Instr, code: int, t: str, acc: bool = False) -> Src:
        """A source operand of type t."""
        bits = TYPES[t][1]
        if bits == 64:
            return self._src64(ins, code, t)
        dtype = TYPES[t][0]
        if code >= 256:
            r = self.vrow(ins, code - 256, acc)

            def vshadow(g: WaveGroup) -> list[Any]:
                return [g.VU[r] if r in g.dirty else 0]

            if t == "u":
                return Src(lambda g: g.V[r], vshadow, (r,))
            if t == "f":
                return Src(lambda g: g.F[r], vshadow, (r,))
            if t == "i":
                return Src(lambda g: g.I[r], vshadow, (r,))
            if t == "h":
                return Src(lambda g: g.H[r, :, :, 0], vshadow, (r,))
            if t == "w":
                return Src(lambda g: g.W16[r, :, :, 0], vshadow, (r,))
            return Src(lambda g: g.W16[r, :, :, 0].view(np.int16), vshadow, (r,))
        if is_sreg(code):
            i, j = code >> 1, code & 1
            sid = S_ID + code

            def sshadow(g: WaveGroup) -> list[Any]:
                return [g.SU[i, :, j, None] if sid in g.dirty else 0]

            if t == "u":
                return Src(lambda g: g.S[i, :, j, None], sshadow, (sid,))
            if t == "f":
                return Src(lambda g: g.Sf[i, :, j, None], sshadow, (sid,))
            if t == "i":
                return Src(lambda g: g.Si[i, :, j, None], sshadow, (sid,))
            return Src(lambda g: g.S[i, :, j, None].astype(U16).view(dtype), sshadow, (sid,))
        value = self.const(ins, code, bits)
        if value is not None:
            c = np.array([[value]], {16: U16, 32: U32}[bits]).view(dtype)
            return Src(lambda g: c, lambda g: [0], ())
        return self._special(ins, code, t)

    def const(self, ins: Instr, code: int, bits: int) -> int | None:
        """Value of a constant operand, or None if it is none."""
        if code == LITERAL:
            assert ins.literal is not None
            return ins.literal & ((1 << bits) - 1)
        return inline_constant(code, bits)

    def _special(self, ins: Instr, code: int, t: str) -> Src:
        if t not in "ui":
            raise UnsupportedError(f"operand code {code} as type {t}", ins.where)
        dtype = TYPES[t][0]
        if code == 253:
            return Src(lambda g: g.SCC.astype(dtype)[:, None],
                       lambda g: [np.where(g.SCCU, ONES, U32(0))[:, None]], (SCC_ID,))  # fmt: skip
        if code == 251:
            return Src(lambda g: (g.S64[53] == 0).astype(dtype)[:, None],
                       lambda g: [np.where(g.SU64[53] != 0, ONES, U32(0))[:, None]],
                       (S_ID + 106, S_ID + 107))  # fmt: skip
        if code == 252:
            return Src(lambda g: (g.S64[63] == 0).astype(dtype)[:, None], lambda g: [0], ())
        apertures = {235: 0, 236: 0xFFFFFFFF, 237: 0, 238: 0xFFFFFFFF}
        if code in apertures:
            raise UnsupportedError("an aperture register as a 32-bit operand", ins.where)
        raise UnsupportedError(f"operand code {code}", ins.where)

    def _src64(self, ins: Instr, code: int, t: str) -> Src:
        dtype = TYPES[t][0]
        if code >= 256:
            r = self.vrow(ins, code - 256, False, 2)

            def getv(g: WaveGroup) -> Array:
                return (g.V[r].astype(U64) | (g.V[r + 1].astype(U64) << U64(32))).view(dtype)

            def shadow(g: WaveGroup) -> list[Any]:
                return [g.VU[r] if r in g.dirty else 0, g.VU[r + 1] if r + 1 in g.dirty else 0]

            return Src(getv, shadow, (r, r + 1))
        if is_sreg(code):
            if code & 1:
                raise DecodeError(f"64-bit scalar operand s{code} is not aligned", ins.where)
            i = code >> 1
            ids = (S_ID + code, S_ID + code + 1)
            return Src(lambda g: g.S64[i, :, None].view(dtype),
                       lambda g: [g.SU[i, :, 0, None], g.SU[i, :, 1, None]], ids)  # fmt: skip
        if code in (235, 237):  # src_shared_base, src_private_base: the aperture in the high half
            from .memory import PRIVATE_BASE, SHARED_BASE

            c = np.array([[SHARED_BASE if code == 235 else PRIVATE_BASE]], U64).view(dtype)
            return Src(lambda g: c, lambda g: [0, 0], ())
        if code == LITERAL:
            assert ins.literal is not None
            value: int | None = ins.literal << 32 if t == "D" else ins.literal
            if t != "D" and ins.literal >> 31:
                raise UnsupportedError("a 64-bit integer operand with a negative literal", ins.where)
        else:
            value = inline_constant(code, 64)
        if value is None:
            raise UnsupportedError(f"operand code {code} as 64 bits", ins.where)
        k = np.array([[value]], U64).view(dtype)
        return Src(lambda g: k, lambda g: [0, 0], ())

    def mask_src(self, ins: Instr, code: int) -> tuple[Getter, Getter, tuple[int, ...]]:
        """A lane mask (SGPR pair or VCC) as [waves, 64] booleans, its shadow, its ids."""
        if not is_sreg(code):
            value = inline_constant(code, 64)
            if value is None:
                raise UnsupportedError(f"lane mask operand {code}", ins.where)
            row = unpack64(np.array([value], U64))
            return (lambda g: row), (lambda g: np.zeros((1, 64), bool)), ()
        if code & 1:
            raise DecodeError("lane mask in an odd scalar register", ins.where)
        i = code >> 1
        return (lambda g: unpack64(g.S64[i])), (lambda g: unpack64(g.SU64[i])), (S_ID + code, S_ID + code + 1)


def any_lanes(shadows: list[list[Any]]) -> Any:
    """[.., ..] booleans: lanes with an undefined bit in any source dword."""
    out: Any = False
    for s in shadows:
        for d in s:
            if isinstance(d, np.ndarray):
                out = out | (d != 0)
    return out


def write_sgpr(g: WaveGroup, r: int, value: Any, shadow: Any = None) -> None:
    """Write one scalar register; shadow None means defined."""
    g.S[r >> 1, :, r & 1] = value
    if shadow is None:
        g.define_s(r)
    else:
        g.shade_s(r, shadow)
    if r >= 126:
        check_exec(g)


def write_sgpr64(g: WaveGroup, r: int, value: Any, shadow: Any = None) -> None:
    """Write an aligned pair of scalar registers."""
    g.S64[r >> 1] = value
    if shadow is None:
        if not g.dirty.isdisjoint((S_ID + r, S_ID + r + 1)):
            g.define_s(r)
            g.define_s(r + 1)
    else:
        g.SU64[r >> 1] = shadow
        for k in (r, r + 1):
            if g.SU[k >> 1, :, k & 1].any():
                g.dirty.add(S_ID + k)
            elif S_ID + k not in g.pend:
                g.dirty.discard(S_ID + k)
    if r >= 126:
        check_exec(g)


def check_exec(g: WaveGroup) -> None:
    """EXEC was written: undefined bits in it are a fault; recompute the mask."""
    if (g.SU64[63] != 0).any():
        from .errors import UninitError

        g.SU64[63] = 0
        raise UninitError("EXEC is written with undefined bits")
    g.refresh_exec()
