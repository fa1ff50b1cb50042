"""Global memory with registered bounds, LDS with a race detector, scratch.

Global memory. Each registered buffer gets a virtual address in a slot of 8 GiB of its own, 4 GiB from the slot's
start, so an offset that is wrong by up to 4 GiB in either direction hits no other buffer. The bytes are copied into
one flat arena for the run and copied back afterwards; buffers that overlap on the host share their bytes.

LDS race detector. Per LDS byte: the wave that last wrote it and the wave(s) that read it since the last barrier of the
workgroup. A read of a byte written by another wave, or a write of a byte read or written by another wave, without a
barrier between is a race. A write that leaves the byte's value as it is, is not reported: redundant threads of a
layout store equal values. A write that was not yet waited for (`s_waitcnt`) when its wave reached the barrier stays
unpublished: the barrier does not order it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import OutOfBoundsError, PendingError, RaceError, UninitError

Array = npt.NDArray[Any]
U8, U32, U64 = np.uint8, np.uint32, np.uint64

BASE = 0x7A00_0000_0000
SLOT_BITS = 33
CENTER = 1 << 32
SHARED_BASE = 0x2000 << 48
PRIVATE_BASE = 0x1000 << 48


class Buffer:
    """One registered range of global memory."""

    def __init__(self, name: str, va: int, start: int, size: int, readonly: bool) -> None:
        self.name, self.va, self.start, self.size, self.readonly = name, va, start, size, readonly
        self.host: tuple[int, int] | None = None
        self.owners: list[Array] = []
        self.undefined = False


def host_range(a: Array) -> tuple[int, int]:
    """First address and one past the last byte that the array's elements cover."""
    lo, hi = np.lib.array_utils.byte_bounds(a)
    return lo, hi


class GlobalMemory:
    """Registered buffers in one arena."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._end = 256
        self._parts: list[tuple[int, bytes | Array]] = []
        self.arena: Array = np.zeros(0, U8)
        self.shadow: Array | None = None

    def add_bytes(self, name: str, data: bytes | Array, readonly: bool = False, misalign: int = 0) -> Buffer:
        """Register a range that has no host array (kernel arguments, code constants)."""
        start = self._end + misalign
        slot = len(self.buffers)
        b = Buffer(name, BASE + (slot << SLOT_BITS) + CENTER + misalign, start, len(data), readonly)
        self.buffers.append(b)
        self._parts.append((start, data))
        self._end = (start + len(data) + 255) // 256 * 256 + 256
        return b

    def add_arrays(self, arrays: list[tuple[str, Array]], undefined: set[str]) -> list[int]:
        """Register host arrays; overlapping ones share memory. Returns their virtual addresses."""
        spans = [(host_range(a), i) for i, (_, a) in enumerate(arrays)]
        vas = [0] * len(arrays)
        spans.sort(key=lambda s: s[0][0])
        i = 0
        while i < len(spans):
            (lo, hi), j = spans[i][0], i + 1
            while j < len(spans) and spans[j][0][0] < hi:
                hi = max(hi, spans[j][0][1])
                j += 1
            members = [arrays[k] for _, k in spans[i:j]]
            # Alignment below 64 bytes is that of the host, which is what Triton specialises on.
            b = self.add_bytes("/".join(n for n, _ in members), host_bytes(lo, hi), False, lo % 64)
            b.host = (lo, hi) if all(a.flags.writeable for _, a in members) else None
            b.owners = [a for _, a in members]
            b.undefined = any(n in undefined for n, _ in members)
            for (alo, _ahi), k in spans[i:j]:
                vas[k] = b.va + alo - lo
            i = j
        return vas

    def freeze(self) -> None:
        """Lay the arena out; no buffer can be added afterwards."""
        size = (self._end + 63) // 64 * 64 + 64
        self.arena = np.zeros(size, U8)
        for start, data in self._parts:
            raw = np.frombuffer(data, U8) if isinstance(data, bytes) else data
            self.arena[start : start + len(raw)] = raw
        self.a32 = self.arena.view(U32)
        self.va = np.array([b.va for b in self.buffers], np.int64)
        self.start = np.array([b.start for b in self.buffers], np.int64)
        self.size = np.array([b.size for b in self.buffers], np.int64)
        if any(b.undefined for b in self.buffers):
            self.shadow = np.zeros(size, U8)
            self.s32 = self.shadow.view(U32)
            for b in self.buffers:
                if b.undefined:
                    self.shadow[b.start : b.start + b.size] = 0xFF

    def write_back(self) -> None:
        """Copy the bytes of every host array back into it."""
        for b in self.buffers:
            if b.host is not None:
                host_bytes(*b.host)[:] = self.arena[b.start : b.start + b.size]

    def locate(self, addr: Array, mask: Array | None, nbytes: int, where: str, store: bool) -> Array:
        """Arena offsets of `nbytes`-wide accesses; inactive lanes get offset 0."""
        rel = (addr - U64(BASE)).view(np.int64)
        seg = rel >> SLOT_BITS
        act = seg if mask is None else seg[mask]
        if act.size == 0:
            return np.zeros(addr.shape, np.int64)
        s0 = int(act.flat[0])
        if 0 <= s0 < len(self.buffers) and bool((act == s0).all()):
            off = rel - np.int64(int(self.va[s0]) - BASE)
            good = off.view(U64) <= U64(max(int(self.size[s0]) - nbytes, 0))
            if self.size[s0] < nbytes:
                good = np.zeros_like(good)
            base: Any = self.start[s0]
            if store and self.buffers[s0].readonly:
                self._oob(addr, mask, np.ones(addr.shape, bool), nbytes, where, "store to read-only ")
        else:
            inside = (seg >= 0) & (seg < len(self.buffers))
            sc = np.where(inside, seg, 0)
            off = rel - (self.va[sc] - BASE)
            good = inside & (off >= 0) & (off <= self.size[sc] - nbytes)
            base = self.start[sc]
        bad = ~good if mask is None else mask & ~good
        if bad.any():
            self._oob(addr, mask, bad, nbytes, where, "store to " if store else "load from ")
        out = off + base
        return out if mask is None else np.where(mask, out, 0)

    def _oob(self, addr: Array, mask: Array | None, bad: Array, nbytes: int, where: str, what: str) -> None:
        if mask is not None:
            bad = bad & mask
        i = tuple(int(k) for k in np.argwhere(bad)[0])
        a = int(addr[i])
        near = min(self.buffers, key=lambda b: min(abs(a - b.va), abs(a - b.va - b.size)))
        lane = f", wave {i[0]}, lane {i[1]}" if len(i) > 1 else f", wave {i[0]}"
        raise OutOfBoundsError(
            f"{what}{nbytes} bytes at {a:#x}{lane}: no buffer there; nearest is {near.name!r} "
            f"(offset {a - near.va} of {near.size} bytes)",
            where,
        )

    def load_dwords(self, off: Array, count: int) -> Array:
        """[count, ...] dwords at arena offsets of any alignment."""
        if not (off & 3).any():
            idx = off >> 2
            return np.stack([self.a32[idx + k] for k in range(count)]) if count > 1 else self.a32[idx][None]
        b = self.arena[off[..., None] + np.arange(4 * count)]
        return np.moveaxis(np.ascontiguousarray(b).view(U32), -1, 0)

    def load_shadow(self, off: Array, nbytes: int) -> Array | None:
        """[dwords, ...] shadow of the loaded bytes, or None if all is defined."""
        if self.shadow is None:
            return None
        b = self.shadow[off[..., None] + np.arange(nbytes)]
        if not b.any():
            return None
        pad = -nbytes % 4
        if pad:
            b = np.concatenate([b, np.zeros((*b.shape[:-1], pad), U8)], -1)
        return np.moveaxis(np.ascontiguousarray(b).view(U32), -1, 0)

    def store_bytes(self, off: Array, data: Array, mask: Array) -> None:
        """Store data [..., nbytes] at arena offsets of the active lanes (the last lane wins on a clash)."""
        n = data.shape[-1]
        o = off[mask]
        self.arena[o[:, None] + np.arange(n)] = data[mask]
        if self.shadow is not None:
            self.shadow[o[:, None] + np.arange(n)] = 0

    def store_dwords(self, off: Array, data: list[Array], mask: Array | None) -> None:
        """Store dwords; mask None means every lane."""
        if (off & 3).any() or self.shadow is not None:
            d = np.stack([np.broadcast_to(x, off.shape) for x in data], -1).view(U8).reshape(*off.shape, -1)
            self.store_bytes(off, d, np.ones(off.shape, bool) if mask is None else mask)
            return
        idx = off >> 2 if mask is None else off[mask] >> 2
        for k, x in enumerate(data):
            self.a32[idx + k] = x if mask is None else np.broadcast_to(x, mask.shape)[mask]


def host_bytes(lo: int, hi: int) -> Array:
    """The process's own memory from lo to hi, writable: what a pointer to an array's extent reaches, gaps included."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * (hi - lo)).from_address(lo))


class Lds:
    """The LDS of every workgroup slot of a batch, in one arena."""

    def __init__(self, slots: int, size: int, waves: int, check_race: bool, dma: bool = False) -> None:
        self.size = size
        self.stride = (size + 511) // 256 * 256
        total = self.stride * slots + 256
        self.data = np.zeros(total, U8)
        self.d32 = self.data.view(U32)
        self.undef = np.full(total, 0xFF, U8)
        self.any_undef = True
        # one wave cannot race, but it can read what its own global-to-LDS load has not delivered yet
        self.race = check_race and (waves > 1 or dma) and size > 0
        if self.race:
            self.writer = np.zeros(total, U8)  # 0 none, w+1 wave w, 0x80|(w+1) LDS-DMA write in flight
            self.reader = np.zeros(total, U8)  # 0 none, w+1 wave w, 255 several

    def barrier(self, slots: Array, unpublished: list[Any]) -> None:
        """All waves of these workgroups met: what was done before is ordered."""
        if not self.race:
            return
        keep = [(idx, self.writer[idx]) for idx in unpublished]
        for s in slots:
            a = int(s) * self.stride
            self.writer[a : a + self.stride] = 0
            self.reader[a : a + self.stride] = 0
        for idx, val in keep:
            self.writer[idx] = val

    def check_bounds(self, addr: Array, mask: Array, nbytes: int, where: str) -> None:
        """addr: byte offsets within the workgroup's allocation."""
        bad = mask & ((addr < 0) | (addr + nbytes > self.size))
        if bad.any():
            w, lane = np.argwhere(bad)[0]
            raise OutOfBoundsError(
                f"LDS access of {nbytes} bytes at {int(addr[w, lane])}, wave {w}, lane {lane}; allocated {self.size}",
                where,
            )

    def note_read(self, idx: Array, nbytes: int, me: Array, mask: Array, where: str) -> None:
        """Lanes read bytes idx..idx+nbytes; me = wave in workgroup + 1, shaped like idx."""
        if not self.race:
            return
        i = (idx[mask][:, None] + np.arange(nbytes)).reshape(-1)
        m = np.repeat(np.broadcast_to(me, idx.shape)[mask], nbytes)
        w = self.writer[i]
        bad = (w != 0) & (w != m)
        if bad.any():
            k = int(np.flatnonzero(bad)[0])
            if w[k] & 0x7F == m[k]:
                raise PendingError(f"LDS byte {int(i[k]) % self.stride} is read before the s_waitcnt vmcnt that "
                                   "covers the global-to-LDS load", where)  # fmt: skip
            raise RaceError(f"wave {int(m[k]) - 1} reads LDS byte {int(i[k]) % self.stride} that wave "
                            f"{(int(w[k]) & 0x7F) - 1} wrote without a barrier between", where)  # fmt: skip
        r = self.reader[i]
        self.reader[i] = np.where((r == 0) | (r == m), m, 255)
        after = self.reader[i]
        if (after != m).any():  # lanes of several waves read the same byte in this very instruction
            self.reader[i[after != m]] = 255

    def note_write(
        self, idx: Array, data: Array, me: Array, mask: Array, where: str, dma: bool = False
    ) -> None:
        """Lanes write data [..., nbytes] at idx."""
        if not self.race:
            return
        nbytes = data.shape[-1]
        i = (idx[mask][:, None] + np.arange(nbytes)).reshape(-1)
        m = np.repeat(np.broadcast_to(me, idx.shape)[mask], nbytes)
        d = data[mask].reshape(-1)
        w, r = self.writer[i], self.reader[i]
        bad = ((w != 0) & (w != m)) | ((r != 0) & (r != m))
        if bad.any():
            bad &= (self.data[i] != d) | (self.undef[i] != 0)
            if bad.any():
                k = int(np.flatnonzero(bad)[0])
                other = w[k] if w[k] not in (0, m[k]) else r[k]
                what = "wrote" if w[k] not in (0, m[k]) else "read"
                who = f"wave {(int(other) & 0x7F) - 1}" if other != 255 else "several waves"
                raise RaceError(f"wave {int(m[k]) - 1} writes LDS byte {int(i[k]) % self.stride} that {who} {what} "
                                "without a barrier between", where)  # fmt: skip
        self.writer[i] = m | (0x80 if dma else 0)
        now = self.writer[i] & 0x7F
        clash = now != m
        if clash.any():
            # Two waves write the same byte in this instruction: a fault unless the values agree.
            order = np.argsort(i, kind="stable")
            ii, dd = i[order], d[order]
            same = ii[1:] == ii[:-1]
            if (same & (dd[1:] != dd[:-1])).any():
                k = int(np.flatnonzero(clash)[0])
                raise RaceError(f"waves {int(m[k]) - 1} and {int(now[k]) - 1} write different values to LDS byte "
                                f"{int(i[k]) % self.stride}", where)  # fmt: skip

    def published(self, idx: Array) -> None:
        """A global-to-LDS load finished: its bytes count as ordinary writes of the wave."""
        if self.race:
            self.writer[idx] &= 0x7F


def uninit(what: str, bad: Array, where: str) -> None:
    """Raise for the first lane of a boolean array, if there is one."""
    if bad.any():
        i = [int(k) for k in np.argwhere(bad)[0]]
        lane = f", lane {i[1]}" if len(i) > 1 else ""
        raise UninitError(f"{what} has undefined bits (wave {i[0]}{lane})", where)
