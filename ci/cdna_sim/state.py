"""Registers of a group of waves, the shadow of undefined bits, and the outstanding-operation queues.

A `WaveGroup` holds all waves that stand at the same instruction. Register r is one row of `V` with shape
[waves, 64 lanes], so an instruction is a handful of NumPy calls whatever the number of waves. Groups split where
waves branch apart and merge where they meet again.

Shadow. Each register bit has a shadow bit, 1 = undefined (never written, or computed from undefined bits), as in
bit-precise memory checkers. Copying undefined bits is no fault; using them as an address, as data of a store to
global memory, in a branch, or in EXEC is. To keep the common case fast, `dirty` is the set of registers that have
*any* undefined bit or an outstanding load; an instruction whose registers are all outside it skips the shadow.

Outstanding operations (CDNA3 ISA section 4.4, "Manually inserted wait states / s_waitcnt"):
- vmcnt counts vector memory loads, stores and atomics in the order of issue; so `vmcnt(n)` covers all but the
  newest n.
- lgkmcnt counts LDS operations, which finish in order among themselves, and scalar loads, which finish in any
  order: an LDS operation is covered by `lgkmcnt(n)` when n or more LDS operations were issued after it; a scalar
  load only by `lgkmcnt(0)`.
- FLAT operations count in both and are covered only when both counters say so.
- expcnt: no VGPR of an in-flight store is protected by it since gfx7: the data is read when the store is issued, so
  overwriting the source of a store in flight is legal and is not reported.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import PendingError

U32 = np.uint32
U64 = np.uint64
FULL64 = np.uint64(0xFFFFFFFFFFFFFFFF)
FULL32 = np.uint32(0xFFFFFFFF)

NUM_S = 128  # scalar registers incl. VCC, M0, EXEC in the numbering of the operand field
S_ID = 1024  # scalar register r has the id S_ID + r in `dirty` and `pend`
SCC_ID = S_ID + 253

Array = npt.NDArray[Any]


class Outstanding:
    """One memory operation in flight, for the waves in `mask` (None: all waves of the group)."""

    __slots__ = ("clean", "kind", "lds", "mask", "regs", "where")

    def __init__(self, where: str, regs: tuple[int, ...], kind: str, clean: bool, lds: Any = None) -> None:
        self.where = where
        self.regs = regs
        self.kind = kind  # "vm", "lds", "smem", "flat"
        self.mask: Array | None = None
        self.clean = clean  # the loaded value is defined in every lane
        self.lds = lds  # LDS ranges written, released when retired

    def copy(self, mask: Array | None) -> Outstanding:
        o = Outstanding(self.where, self.regs, self.kind, self.clean, self.lds)
        o.mask = mask
        return o


class WaveGroup:
    """State of n waves that are at the same instruction."""

    def __init__(self, n: int, num_v: int, agpr_row: int) -> None:
        self.n = n
        self.num_v = num_v
        self.agpr_row = agpr_row
        self.wave = np.arange(n)  # index of each wave in the launch batch
        self.bind(
            np.zeros((num_v, n, 64), U32),
            np.full((num_v, n, 64), FULL32),
            np.zeros((NUM_S // 2, n), U64),
            np.full((NUM_S // 2, n), FULL64),
        )
        self.SCC = np.zeros(n, bool)
        self.SCCU = np.ones(n, bool)
        self.dirty: set[int] = set(range(num_v)) | set(range(S_ID, S_ID + NUM_S)) | {SCC_ID}
        self.pend: dict[int, list[Outstanding]] = {}
        self.vm: list[Outstanding] = []
        self.lgkm: list[Outstanding] = []
        self.stalled: list[Any] = []  # LDS ranges of operations that finished without a wait
        self.lds_base = np.zeros(n, np.int64)
        self.wg = np.zeros(n, np.int64)  # workgroup slot in the batch
        self.wave_in_wg = np.zeros(n, np.uint8)
        self.mode = 0
        self.ovfl = False
        self.fz32 = False
        self.fz16 = False
        self.pc = 0
        self.mask = np.ones((n, 64), bool)
        self.full = True

    def bind(self, v: Array, vu: Array, s64: Array, su64: Array) -> None:
        """Take register arrays and make the typed views."""
        self.V = v
        self.F = v.view(np.float32)
        self.I = v.view(np.int32)
        self.H = v.view(np.float16).reshape(*v.shape, 2)
        self.W16 = v.view(np.uint16).reshape(*v.shape, 2)
        self.VU = vu
        n = v.shape[1]
        self.S64 = s64
        self.S = s64.view(U32).reshape(NUM_S // 2, n, 2)
        self.Sf = self.S.view(np.float32)
        self.Si = self.S.view(np.int32)
        self.SU64 = su64
        self.SU = su64.view(U32).reshape(NUM_S // 2, n, 2)

    # -- EXEC and MODE ---------------------------------------------------------------------------------------

    def refresh_exec(self) -> None:
        """Recompute the lane mask after a write to EXEC."""
        ex = self.S64[63]
        self.full = bool((ex == FULL64).all())
        if self.full:
            self.mask = np.ones((self.n, 64), bool)
        else:
            self.mask = unpack64(ex)

    def set_mode(self, mode: int) -> None:
        """Set MODE for the whole group (CDNA3 ISA 3.5)."""
        self.mode = mode
        self.ovfl = bool(mode >> 23 & 1)
        self.fz32 = (mode >> 4 & 3) != 3
        self.fz16 = (mode >> 6 & 3) != 3

    # -- outstanding operations ------------------------------------------------------------------------------

    def issue(self, counter: str, op: Outstanding) -> None:
        """Queue an operation on "vm", "lgkm" or "both"."""
        if counter in ("vm", "both"):
            self.vm.append(op)
        if counter in ("lgkm", "both"):
            self.lgkm.append(op)
        for r in op.regs:
            self.pend.setdefault(r, []).append(op)
            self.dirty.add(r)
        # The counters hold 6 and 4 bits; a wave stalls rather than issue an operation that they cannot count, so the
        # oldest is done by then.
        if len(self.vm) > 63:
            self.vm = self._retire(self.vm, 63, self.stalled, ordered=True)
        if len(self.lgkm) > 15:
            self.lgkm = self._retire(self.lgkm, 15, self.stalled, ordered=False)

    def wait(self, vm: int, lgkm: int) -> list[Any]:
        """Retire what `s_waitcnt` with these counts covers; returns the LDS ranges that became visible."""
        released: list[Any] = self.stalled
        self.stalled = []
        if self.vm and vm < 63:
            self.vm = self._retire(self.vm, vm, released, ordered=True)
        if self.lgkm and lgkm < 15:
            self.lgkm = self._retire(self.lgkm, lgkm, released, ordered=False)
        return released

    def _retire(
        self, queue: list[Outstanding], count: int, released: list[Any], ordered: bool
    ) -> list[Outstanding]:
        if count == 0:
            for op in queue:
                self._done(op, None, released, "vm" if ordered else "lgkm")
            return []
        keep: list[Outstanding] = []
        if all(op.mask is None for op in queue):
            newer = 0
            for op in reversed(queue):
                done = newer >= count if (ordered or op.kind == "lds") else False
                if done:
                    self._done(op, None, released, "vm" if ordered else "lgkm")
                else:
                    keep.append(op)
                if ordered or op.kind == "lds":
                    newer += 1
            return keep[::-1]
        after = np.zeros(self.n, int)
        for op in reversed(queue):
            m = np.ones(self.n, bool) if op.mask is None else op.mask
            counts = ordered or op.kind == "lds"
            done_m = m & (after >= count) if counts else np.zeros(self.n, bool)
            left = m & ~done_m
            if done_m.any():
                self._done(op, done_m, released, "vm" if ordered else "lgkm")
            if left.any():
                op.mask = None if left.all() else left
                keep.append(op)
            if counts:
                after += m
        return keep[::-1]

    def _done(self, op: Outstanding, mask: Array | None, released: list[Any], counter: str) -> None:
        """Operation finished for the waves in mask (None: for all waves that it concerns)."""
        if op.kind == "flat" and any(o is op for o in (self.lgkm if counter == "vm" else self.vm)):
            return  # still counted by the other counter
        if op.lds is not None:
            released.append((op.lds, mask if mask is not None else op.mask))
        left = False
        if mask is not None:
            m = np.ones(self.n, bool) if op.mask is None else op.mask
            left = bool((m & ~mask).any())
        if left:
            return
        for r in op.regs:
            ops = self.pend.get(r)
            if ops is None:
                continue
            ops[:] = [o for o in ops if o is not op]
            if not ops:
                del self.pend[r]
                if op.clean or not self.undefined(r):
                    self.dirty.discard(r)

    def undefined(self, r: int) -> bool:
        """Does register id r have an undefined bit in any wave?"""
        if r >= S_ID:
            r -= S_ID
            return bool(self.SU[r >> 1, :, r & 1].any())
        return bool(self.VU[r].any())

    def check_pending(self, regs: Iterable[int], where: str) -> None:
        """Report a use of a register that a load in flight will still write."""
        if not self.pend:
            return
        for r in regs:
            for op in self.pend.get(r, ()):
                waves = self.wave if op.mask is None else self.wave[op.mask]
                name = f"s{r - S_ID}" if r >= S_ID else self.vname(r)
                raise PendingError(
                    f"{name} is used before an s_waitcnt covers the load at {op.where} (wave {int(waves[0])})",
                    where,
                )

    def vname(self, row: int) -> str:
        """Assembly name of a vector register row."""
        return f"v{row}" if row < self.agpr_row else f"a{row - self.agpr_row}"

    # -- shadow helpers ----------------------------------------------------------------------------------------

    def define_v(self, r: int) -> None:
        """Active lanes of vector register r were written with defined bits."""
        if r not in self.dirty:
            return
        if self.full:
            self.VU[r] = 0
            clean = True
        else:
            self.VU[r][self.mask] = 0
            clean = not self.VU[r].any()
        if clean and r not in self.pend:
            self.dirty.discard(r)

    def shade_v(self, r: int, shadow: Any) -> None:
        """Active lanes of vector register r take this shadow."""
        if self.full:
            self.VU[r] = shadow
        else:
            np.copyto(self.VU[r], np.asarray(shadow, U32), where=self.mask)
        if self.VU[r].any() or r in self.pend:
            self.dirty.add(r)
        else:
            self.dirty.discard(r)

    def define_s(self, r: int) -> None:
        """Scalar register r was written with defined bits."""
        if S_ID + r in self.dirty:
            self.SU[r >> 1, :, r & 1] = 0
            if S_ID + r not in self.pend:
                self.dirty.discard(S_ID + r)

    def shade_s(self, r: int, shadow: Any) -> None:
        """Scalar register r takes this shadow."""
        self.SU[r >> 1, :, r & 1] = shadow
        if np.any(shadow):
            self.dirty.add(S_ID + r)
        elif S_ID + r not in self.pend:
            self.dirty.discard(S_ID + r)

    # -- splitting and merging -----------------------------------------------------------------------------------

    def take(self, idx: Array) -> WaveGroup:
        """A new group with the waves at these positions."""
        g = WaveGroup.__new__(WaveGroup)
        g.n = len(idx)
        g.num_v = self.num_v
        g.agpr_row = self.agpr_row
        g.wave = self.wave[idx]
        vu = np.zeros((self.num_v, g.n, 64), U32)
        for r in self.dirty:
            if r < S_ID:
                vu[r] = self.VU[r][idx]
        g.bind(
            self.V[:, idx],
            vu,
            np.ascontiguousarray(self.S64[:, idx]),
            np.ascontiguousarray(self.SU64[:, idx]),
        )
        g.SCC, g.SCCU = self.SCC[idx], self.SCCU[idx]
        g.dirty = set(self.dirty)
        renew: dict[int, Outstanding] = {}
        for op in {id(o): o for o in self.vm + self.lgkm}.values():
            m = None if op.mask is None else op.mask[idx]
            if m is not None and not m.any():
                continue
            renew[id(op)] = op.copy(None if m is None or m.all() else m)
        g.vm = [renew[id(o)] for o in self.vm if id(o) in renew]
        g.lgkm = [renew[id(o)] for o in self.lgkm if id(o) in renew]
        g.pend = {}
        for r, ops in self.pend.items():
            mine = [renew[id(o)] for o in ops if id(o) in renew]
            if mine:
                g.pend[r] = mine
        g.lds_base, g.wg, g.wave_in_wg = self.lds_base[idx], self.wg[idx], self.wave_in_wg[idx]
        g.set_mode(self.mode)
        g.pc = self.pc
        g.stalled = list(self.stalled)
        g.refresh_exec()
        return g

    @staticmethod
    def merge(groups: list[WaveGroup]) -> WaveGroup:
        """One group of all the waves, in the order of their numbers."""
        a = groups[0]
        g = WaveGroup.__new__(WaveGroup)
        wave = np.concatenate([x.wave for x in groups])
        order = np.argsort(wave, kind="stable")
        g.n = len(wave)
        g.num_v, g.agpr_row = a.num_v, a.agpr_row
        g.wave = wave[order]
        g.dirty = set().union(*(x.dirty for x in groups))
        vu = np.zeros((g.num_v, g.n, 64), U32)
        for r in g.dirty:
            if r < S_ID:
                vu[r] = np.concatenate([x.VU[r] if r in x.dirty else np.zeros_like(x.VU[r]) for x in groups])[
                    order
                ]
        su = np.concatenate([x.SU64 for x in groups], axis=1)[:, order]
        g.bind(
            np.concatenate([x.V for x in groups], axis=1)[:, order],
            vu,
            np.ascontiguousarray(np.concatenate([x.S64 for x in groups], axis=1)[:, order]),
            np.ascontiguousarray(su),
        )
        for name in ("SCC", "SCCU", "lds_base", "wg", "wave_in_wg"):
            setattr(g, name, np.concatenate([getattr(x, name) for x in groups])[order])
        g.vm, g.lgkm, g.pend = [], [], {}
        g.stalled = [s for x in groups for s in x.stalled]
        start = 0
        inverse = np.empty(g.n, int)
        inverse[order] = np.arange(g.n)
        for x in groups:
            place = inverse[start : start + x.n]
            start += x.n
            renew: dict[int, Outstanding] = {}
            for op in {id(o): o for o in x.vm + x.lgkm}.values():
                m = np.zeros(g.n, bool)
                m[place if op.mask is None else place[op.mask]] = True
                renew[id(op)] = op.copy(m)
            g.vm += [renew[id(o)] for o in x.vm]
            g.lgkm += [renew[id(o)] for o in x.lgkm]
            for r, ops in x.pend.items():
                g.pend.setdefault(r, []).extend(renew[id(o)] for o in ops)
        g.set_mode(a.mode)
        g.pc = a.pc
        g.refresh_exec()
        return g


def unpack64(words: Array) -> Array:
    """[n] uint64 lane masks to [n, 64] bool."""
    n = len(words)
    b = np.ascontiguousarray(words).view(np.uint8).reshape(n, 8)
    return np.unpackbits(b, axis=1, bitorder="little").view(bool)


def pack64(mask: Array) -> Array:
    """[n, 64] bool to [n] uint64 lane masks."""
    return np.packbits(mask, axis=1, bitorder="little").view(U64).reshape(mask.shape[0])
