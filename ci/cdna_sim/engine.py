"""The machine: launches workgroups, runs basic blocks, splits and merges groups of waves, handles barriers.

All waves of a batch of workgroups start as one group. A basic block runs as a list of closures; at its end a branch may
split the group. Of the groups that can run, the one at the lowest address goes first, so waves meet again at the join
after a divergent region (a group that ran very often while others waited yields once, so that spinning cannot starve
the wave it waits for). Waves of one workgroup wait for each other at s_barrier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from . import ldsops, mfma, salu, valu, vmem
from .counters import ARCH, Counters, classify
from .decoder import Decoder, Instr, branch_target, decode_reachable
from .errors import BudgetError, DeadlockError, DecodeError, SimError, UninitError, UnsupportedError
from .floats import U32, U64
from .loader import CodeObject, Kernel, load_code_object
from .memory import GlobalMemory, Lds
from .operands import Ctx
from .state import S_ID, SCC_ID, WaveGroup

Array = npt.NDArray[Any]
Step = Callable[[WaveGroup], None]
DETECTORS = ("oob", "pending", "uninit", "race")


@dataclass
class Block:
    """A basic block: closures of its straight part, and how it ends."""

    start: int
    instrs: list[Instr]
    steps: list[Step]
    end: str  # "fall", "branch", "cond", "barrier", "end", "setpc"
    last: Instr | None
    target: int
    next: int
    histogram: dict[str, int] = field(default_factory=dict)
    mnemonics: dict[str, int] = field(default_factory=dict)


class Machine:
    """What the closures of one launch share: memory, LDS, scratch, counters, which detectors are on."""

    def __init__(self, arch: str, checks: set[str]) -> None:
        self.arch = arch
        self.checks = checks
        self.check_pending = "pending" in checks
        self.check_uninit = "uninit" in checks
        self.mem = GlobalMemory()
        self.lds = Lds(0, 0, 1, False)
        self.counters = Counters()
        self.scratch: Array = np.zeros(0, np.uint8)
        self.scratch_undef: Array = np.zeros(0, np.uint8)
        self.scratch_size = 0
        self.scratch_stride = 0
        self._bank_cache: dict[tuple[bytes, bytes, int], int] = {}
        self.count_lds_banks = True

    def uninit(self, what: str, bad: Array, where: str) -> None:
        """Report undefined bits in a use that matters."""
        if self.check_uninit and bad.any():
            i = [int(k) for k in np.argwhere(bad)[0]]
            lane = f", lane {i[1]}" if len(i) > 1 else ""
            raise UninitError(f"{what} has undefined bits (wave {i[0]}{lane})", where)

    def count_bytes(self, key: str, nbytes: int, mask: Array) -> None:
        """Bytes that active lanes move."""
        self.counters.bytes[key] += nbytes * int(np.count_nonzero(mask))

    def count_banks(self, addr: Array, mask: Array, full: bool, nbytes: int) -> None:
        """Bank conflicts; patterns repeat, so each is computed once."""
        if not self.count_lds_banks:
            return
        banks = ARCH[self.arch].lds_banks
        rel = addr - addr.min(1, keepdims=True) if full else np.where(mask, addr, 0)
        cache = self._bank_cache
        for w in range(len(rel)):
            key = (rel[w].tobytes(), b"" if full else mask[w].tobytes(), nbytes)
            hit = cache.get(key)
            if hit is None:
                hit = cache[key] = ldsops.bank_cycles(rel[w], mask[w], nbytes, banks)
            self.counters.bank_conflict_cycles += hit


@dataclass
class Result:
    """Outcome of a launch."""

    counters: Counters
    kernel: Kernel
    arch: str
    seconds: float = 0.0
    unwritten: dict[str, int] = field(default_factory=dict)


class Simulator:
    """Runs kernels of one code object."""

    def __init__(self, code: CodeObject | bytes, check: str | Iterable[str] = "all", budget: int = 50_000_000,
                 max_waves: int = 128) -> None:  # fmt: skip
        self.code = load_code_object(code) if isinstance(code, (bytes, bytearray)) else code
        self.checks = set(DETECTORS) if check == "all" else set() if check == "none" else set(check)
        unknown = self.checks - set(DETECTORS)
        if unknown:
            raise ValueError(f"no detector {sorted(unknown)}; there are {DETECTORS}")
        self.budget = budget
        self.max_waves = max_waves
        self._programs: dict[str, tuple[list[Instr], int]] = {}

    def instructions(self, name: str | None = None) -> list[Instr]:
        """The decoded instructions of a kernel that are reachable from its entry."""
        return self._decode(self.code.kernel(name))[0]

    def _decode(self, k: Kernel) -> tuple[list[Instr], int]:
        hit = self._programs.get(k.name)
        if hit is None:
            text = next(
                s
                for s in self.code.segments
                if s.executable and s.address <= k.entry < s.address + len(s.data)
            )
            # With preloaded kernel arguments the firmware enters 256 bytes further on.
            entry = k.entry + (256 if k.preload_length else 0)
            hit = (decode_reachable(Decoder(self.code.arch), text.data, text.address, [entry]), entry)
            self._programs[k.name] = hit
        return hit

    def launch(
        self, grid: Sequence[int], block: Sequence[int], kernarg: Callable[[dict[int, int]], bytes] | bytes,
        arrays: list[tuple[str, Array]] = [], *, name: str | None = None, dynamic_lds: int = 0,  # noqa: B006
        undefined: Iterable[str] = (),
    ) -> Result:  # fmt: skip
        """Run a grid of workgroups. `kernarg` gets {index of array: address} and returns the argument bytes."""
        import time

        t0 = time.perf_counter()
        k = self.code.kernel(name)
        salu.check_mode(k.mode, "kernel descriptor")
        m = Machine(self.code.arch, self.checks)
        vas = m.mem.add_arrays(arrays, set(undefined))
        args = kernarg if isinstance(kernarg, bytes) else kernarg(dict(enumerate(vas)))
        pad = -len(args) % 64 + 64
        ka = m.mem.add_bytes("kernel arguments", args + bytes(pad), True)
        dispatch = m.mem.add_bytes("dispatch packet", _dispatch_packet(grid, block, k, ka.va), True)
        code_base = {}
        for s in self.code.segments:
            code_base[s.name] = m.mem.add_bytes(f"code section {s.name}", s.data, True)
        m.mem.freeze()
        program = Program(self, k, m, code_base)
        g3 = (list(grid) + [1, 1])[:3]
        b3 = (list(block) + [1, 1])[:3]
        waves_per_wg = (b3[0] * b3[1] * b3[2] + 63) // 64
        total = g3[0] * g3[1] * g3[2]
        per_batch = max(1, self.max_waves // waves_per_wg)
        for first in range(0, total, per_batch):
            wgs = range(first, min(first + per_batch, total))
            program.run(wgs, g3, b3, args, ka.va, dispatch.va, dynamic_lds, waves_per_wg)
        m.mem.write_back()
        m.counters.waves = total * waves_per_wg
        m.counters.workgroups = total
        unwritten = {}
        if m.mem.shadow is not None:
            for b in m.mem.buffers:
                if b.undefined:
                    unwritten[b.name] = int((m.mem.shadow[b.start : b.start + b.size] != 0).sum())
        return Result(m.counters, k, self.code.arch, time.perf_counter() - t0, unwritten)


def _dispatch_packet(grid: Sequence[int], block: Sequence[int], k: Kernel, kernarg: int) -> bytes:
    """hsa_kernel_dispatch_packet_t."""
    import struct

    b = (list(block) + [1, 1])[:3]
    g = [x * y for x, y in zip((list(grid) + [1, 1])[:3], b, strict=True)]
    return struct.pack(
        "<HHHHHHIIIIIQQQQ", 2, 3, *b, 0, *g, k.private_segment, k.group_segment, 0, kernarg, 0, 0
    )


class Program:
    """A kernel as basic blocks of closures, and the scheduler that runs them."""

    def __init__(self, sim: Simulator, k: Kernel, m: Machine, code_base: dict[str, Any]) -> None:
        self.sim, self.k, self.m = sim, k, m
        instrs, self.entry = sim._decode(k)
        self.num_v = min(k.agpr_base, k.vgprs)
        self.num_a = max(0, k.vgprs - self.num_v)
        self.ctx = Ctx(m.arch, self.num_v, self.num_a)
        self.blocks: dict[int, Block] = {}
        self._build(instrs, code_base)
        self.executed: Counter[int] = Counter()
        self.dma = any("load_lds" in i.name or i.get("lds") for i in instrs)
        self.spent = 0

    # -- building -------------------------------------------------------------------------------------------------

    def _build(self, instrs: list[Instr], code_base: dict[str, Any]) -> None:
        leaders = {self.entry}
        for i in instrs:
            t = branch_target(i)
            if t is not None:
                leaders |= {t, i.addr + i.size}
            elif i.name in ("s_barrier", "s_endpgm", "s_setpc_b64", "s_swappc_b64", "s_trap"):
                leaders.add(i.addr + i.size)
        cur: list[Instr] = []
        for i in instrs:
            if cur and (i.addr in leaders or cur[-1].addr + cur[-1].size != i.addr):
                self._finish(cur, code_base)
                cur = []
            cur.append(i)
        if cur:
            self._finish(cur, code_base)

    def _finish(self, instrs: list[Instr], code_base: dict[str, Any]) -> None:
        last = instrs[-1]
        body, end, target = instrs, "fall", -1
        name = last.name
        if name == "s_branch":
            body, end, target = instrs[:-1], "branch", branch_target(last) or -1
        elif name.startswith("s_cbranch_") and last.fmt == "SOPP":
            body, end, target = instrs[:-1], "cond", branch_target(last) or -1
        elif name == "s_barrier":
            body, end = instrs[:-1], "barrier"
        elif name == "s_endpgm":
            body, end = instrs[:-1], "end"
        elif name in ("s_setpc_b64", "s_swappc_b64", "s_trap", "s_call_b64"):
            raise UnsupportedError(f"instruction {name}", last.where)
        steps = [s for s in (self._closure(i, code_base) for i in body) if s is not None]
        b = Block(instrs[0].addr, instrs, steps, end, last, target, last.addr + last.size)
        for i in instrs:
            c = classify(i.name, i.fmt)
            b.histogram[c] = b.histogram.get(c, 0) + 1
            b.mnemonics[i.name] = b.mnemonics.get(i.name, 0) + 1
        self.blocks[b.start] = b

    def _closure(self, i: Instr, code_base: dict[str, Any]) -> Step | None:
        fmt = i.fmt
        if i.name == "s_waitcnt":
            return self._waitcnt(i)
        if i.name == "s_sendmsg" or i.name == "s_sethalt":
            raise UnsupportedError(f"instruction {i.name}", i.where)
        if i.name in salu.NO_EFFECT:
            return None
        if i.name == "s_getpc_b64":
            return self._getpc(i, code_base)
        if fmt.startswith("SOP"):
            return salu.build(self.ctx, i)
        if fmt == "SMEM":
            return vmem.build_smem(self.ctx, i, self.m)
        if fmt == "DS":
            return ldsops.build(self.ctx, i, self.m)
        if fmt in ("MUBUF", "GLOBAL", "FLAT", "SCRATCH"):
            return vmem.build(self.ctx, i, self.m)
        if i.name.startswith("v_mfma"):
            return mfma.build(self.ctx, i, self.m)
        if fmt.startswith("VOP"):
            return valu.build(self.ctx, i)
        raise UnsupportedError(f"instruction {i.name} ({fmt})", i.where)

    def _getpc(self, i: Instr, code_base: dict[str, Any]) -> Step:
        """The program counter as an address in registered memory, so that constants beside the code can be read."""
        for s in self.sim.code.segments:
            if s.address <= i.addr < s.address + len(s.data):
                va = code_base[s.name].va + i.addr + 4 - s.address
                shift = va - (i.addr + 4)
                others = [
                    o for o in self.sim.code.segments if not o.executable and o.name != ".relro_padding"
                ]
                if any(len(o.data) > 64 for o in others):
                    raise UnsupportedError("PC-relative constants outside the code section", i.where)
                del shift
                from .operands import write_sgpr64

                return lambda g: write_sgpr64(g, i.sdst, U64(va))
        raise DecodeError("s_getpc_b64 outside every section", i.where)

    def _waitcnt(self, i: Instr) -> Step:
        """Field layout of gfx9: vmcnt 3:0 and 15:14, expcnt 6:4, lgkmcnt 11:8."""
        imm = i.simm16
        vm, lgkm = (imm & 15) | (imm >> 14 & 3) << 4, imm >> 8 & 15
        lds = self.m.lds
        del lds

        def step(g: WaveGroup) -> None:
            if g.vm or g.lgkm or g.stalled:
                for payload, mask in g.wait(vm, lgkm):
                    self._release(g, payload, mask)

        return step

    def _release(self, g: WaveGroup, payload: Any, mask: Array | None) -> None:
        kind, idx, owner = payload
        if mask is not None:
            idx = idx[np.isin(owner, g.wave[mask])]
        if kind == "dma":
            self.m.lds.published(idx)

    # -- running --------------------------------------------------------------------------------------------------

    def run(self, wgs: range, grid: list[int], block: list[int], args: bytes, ka: int, dispatch: int, dyn_lds: int,
            per_wg: int) -> None:  # fmt: skip
        """Run one batch of workgroups to the end."""
        m, k = self.m, self.k
        n = len(wgs) * per_wg
        lds_size = k.group_segment + dyn_lds
        m.lds = Lds(len(wgs), lds_size, per_wg, "race" in m.checks, self.dma)
        m.scratch_size = k.private_segment
        m.scratch_stride = (k.private_segment + 15) // 16 * 16
        m.scratch = np.zeros(n * 64 * m.scratch_stride + 16, np.uint8)
        m.scratch_undef = np.full(n * 64 * m.scratch_stride + 16, 255, np.uint8)
        g = self._initial(wgs, grid, block, args, ka, dispatch, per_wg)
        self.alive = np.full(len(wgs), per_wg)
        self.arrived = np.zeros(len(wgs), int)
        runnable, waiting = [g], []
        streak = 0
        old = np.seterr(all="ignore")
        try:
            while runnable:
                if len(runnable) > 1:
                    runnable = self._merge(runnable)
                    runnable.sort(key=lambda x: x.pc)
                    streak += 1
                    if streak % 5000 == 0:
                        runnable.append(runnable.pop(0))
                cur = runnable.pop(0)
                nxt, parked = self._run_block(cur)
                runnable += nxt
                if parked is not None:
                    waiting.append(parked)
                if waiting and (parked is not None or len(nxt) == 0):
                    freed, waiting = self._barrier(waiting)
                    runnable += freed
            if waiting:
                raise DeadlockError(
                    f"{sum(w.n for w in waiting)} waves wait at s_barrier for waves that have ended or never come",
                    hex(waiting[0].pc),
                )
        finally:
            np.seterr(**old)
        for start, count in self.executed.items():
            b = self.blocks[start]
            for c, x in b.histogram.items():
                m.counters.instructions[c] += x * count
            for c, x in b.mnemonics.items():
                m.counters.mnemonics[c] += x * count
        self.executed.clear()

    def _merge(self, groups: list[WaveGroup]) -> list[WaveGroup]:
        by: dict[tuple[int, int], list[WaveGroup]] = {}
        for x in groups:
            by.setdefault((x.pc, x.mode), []).append(x)
        if len(by) == len(groups):
            return groups
        return [v[0] if len(v) == 1 else WaveGroup.merge(v) for v in by.values()]

    def _run_block(self, g: WaveGroup) -> tuple[list[WaveGroup], WaveGroup | None]:
        b = self.blocks.get(g.pc)
        if b is None:
            raise DecodeError("execution reached an address that was not decoded", hex(g.pc))
        self.executed[b.start] += g.n
        self.spent += g.n * len(b.instrs)
        if self.spent > self.sim.budget:
            raise BudgetError(f"more than {self.sim.budget} wave-instructions", hex(b.start))
        for step in b.steps:
            step(g)
        if b.end == "fall":
            g.pc = b.next
            return [g], None
        if b.end == "branch":
            g.pc = b.target
            return [g], None
        if b.end == "cond":
            return self._branch(g, b), None
        if b.end == "end":
            np.subtract.at(self.alive, g.wg, 1)
            return [], None
        g.pc = b.next
        np.add.at(self.arrived, g.wg, 1)
        return [], g

    def _branch(self, g: WaveGroup, b: Block) -> list[WaveGroup]:
        assert b.last is not None
        kind = b.last.name[10:]
        bad: Any = np.zeros(g.n, bool)
        if kind in ("scc0", "scc1"):
            taken = g.SCC if kind == "scc1" else ~g.SCC
            if SCC_ID in g.dirty:
                bad = g.SCCU
        elif kind in ("vccz", "vccnz"):
            if not g.dirty.isdisjoint((S_ID + 106, S_ID + 107)):
                g.check_pending((S_ID + 106, S_ID + 107), b.last.where)
                bad = (g.SU64[53] != 0) & ((g.S64[53] & ~g.SU64[53]) == 0)
            taken = (g.S64[53] == 0) == (kind == "vccz")
        elif kind in ("execz", "execnz"):
            taken = (g.S64[63] == 0) == (kind == "execz")
        else:
            raise UnsupportedError(f"instruction {b.last.name}", b.last.where)
        self.m.uninit("a branch condition", bad, b.last.where)
        if taken.all():
            g.pc = b.target
            return [g]
        if not taken.any():
            g.pc = b.next
            return [g]
        yes, no = g.take(np.flatnonzero(taken)), g.take(np.flatnonzero(~taken))
        yes.pc, no.pc = b.target, b.next
        return [yes, no]

    def _barrier(self, waiting: list[WaveGroup]) -> tuple[list[WaveGroup], list[WaveGroup]]:
        """Release the workgroups all of whose living waves have arrived."""
        ready = (self.arrived > 0) & (self.arrived >= self.alive)
        if not ready.any():
            return [], waiting
        unpublished: list[Any] = []
        freed: list[WaveGroup] = []
        left: list[WaveGroup] = []
        for g in waiting:
            sel = ready[g.wg]
            if not sel.any():
                left.append(g)
                continue
            if sel.all():
                go = g
            else:
                go = g.take(np.flatnonzero(sel))
                left.append(g.take(np.flatnonzero(~sel)))
            if self.m.lds.race:
                for op in go.vm + go.lgkm:
                    if op.lds is not None:
                        _, idx, owner = op.lds
                        waves = go.wave if op.mask is None else go.wave[op.mask]
                        unpublished.append(idx[np.isin(owner, waves)])
            freed.append(go)
        slots = np.flatnonzero(ready)
        self.m.lds.barrier(slots, unpublished)
        self.arrived[slots] = 0
        return freed, left

    def _initial(self, wgs: range, grid: list[int], block: list[int], args: bytes, ka: int, dispatch: int,
                 per_wg: int) -> WaveGroup:  # fmt: skip
        """Registers at launch: user SGPRs, preloaded arguments, workgroup ids, work-item ids in v0."""
        k = self.k
        n = len(wgs) * per_wg
        g = WaveGroup(n, self.num_v + self.num_a, self.num_v)
        g.set_mode(k.mode)
        g.pc = self.entry

        def put(r: int, v: Any) -> None:
            g.S[r >> 1, :, r & 1] = v
            g.define_s(r)

        r = 0
        for name, count in k.user_sgpr_fields:
            if name == "kernarg_segment_ptr":
                put(r, U32(ka & 0xFFFFFFFF))
                put(r + 1, U32(ka >> 32))
            elif name == "dispatch_ptr":
                put(r, U32(dispatch & 0xFFFFFFFF))
                put(r + 1, U32(dispatch >> 32))
            elif name == "dispatch_id":
                put(r, U32(0))
                put(r + 1, U32(0))
            elif name == "private_segment_size":
                put(r, U32(k.private_segment))
            # the other fields stay undefined: a use of them is reported
            r += count
        words = np.frombuffer(args[: len(args) // 4 * 4], U32)
        for j in range(k.preload_length):
            w = k.preload_offset + j
            if r < k.user_sgprs and w < len(words):
                put(r, words[w])
            r += 1
        r = k.user_sgprs
        wg = np.repeat(np.array(list(wgs)), per_wg)
        ids = (wg % grid[0], wg // grid[0] % grid[1], wg // (grid[0] * grid[1]))
        for on, v in zip(k.workgroup_id, ids, strict=True):
            if on:
                put(r, v.astype(U32))
                r += 1
        if k.workgroup_info:
            put(r, U32(0))
            r += 1
        wave_in = np.tile(np.arange(per_wg), len(wgs))
        tid = wave_in[:, None] * 64 + np.arange(64)
        size = block[0] * block[1] * block[2]
        x, y, z = tid % block[0], tid // block[0] % block[1], tid // (block[0] * block[1])
        v0 = x
        if k.workitem_id >= 1:
            v0 = v0 | (y << 10)
        if k.workitem_id >= 2:
            v0 = v0 | (z << 20)
        g.V[0] = v0.astype(U32)
        g.VU[0] = 0
        g.dirty.discard(0)
        active = tid < size
        from .state import pack64

        g.S64[63] = pack64(active)
        for s in (126, 127):
            g.define_s(s)
        g.wg = np.repeat(np.arange(len(wgs)), per_wg)
        g.wave_in_wg = wave_in.astype(np.uint8)
        g.lds_base = g.wg.astype(np.int64) * self.m.lds.stride
        g.refresh_exec()
        return g


_ = SimError
