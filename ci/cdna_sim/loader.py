"""Code objects: ELF sections and symbols, the AMDGPU metadata note, the kernel descriptor.

Models what the driver's loader and the packet processor read before the first instruction runs. Sources: the
ELF64 format; "AMDGPU code object V3 and above" and "Kernel descriptor" in LLVM's AMDGPU usage guide (layout of
the 64-byte descriptor, COMPUTE_PGM_RSRC1..3, order of the user SGPRs, the hidden kernel arguments).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from .errors import DecodeError

_NT_AMDGPU_METADATA = 32
_MACH = {0x4C: "gfx942", 0x4F: "gfx950"}


def unpack_msgpack(data: bytes) -> Any:
    """Decode one MessagePack value (the subset without extension types)."""
    value, _ = _unpack(data, 0)
    return value


def _unpack(b: bytes, i: int) -> tuple[Any, int]:
    t = b[i]
    i += 1
    if t < 0x80:
        return t, i
    if t >= 0xE0:
        return t - 256, i
    if 0x80 <= t <= 0x8F:
        return _unpack_map(b, i, t & 15)
    if 0x90 <= t <= 0x9F:
        return _unpack_list(b, i, t & 15)
    if 0xA0 <= t <= 0xBF:
        n = t & 31
        return b[i : i + n].decode(), i + n
    if t in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[t], i
    numbers = {
        0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
        0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
    }  # fmt: skip
    if t in numbers:
        return struct.unpack_from(numbers[t], b, i)[0], i + struct.calcsize(numbers[t])
    lengths = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
    if t not in lengths:
        raise DecodeError(f"MessagePack type byte {t:#x} in the metadata note")
    k = lengths[t]
    n = int.from_bytes(b[i : i + k], "big")
    i += k
    if t in (0xDC, 0xDD):
        return _unpack_list(b, i, n)
    if t in (0xDE, 0xDF):
        return _unpack_map(b, i, n)
    raw = b[i : i + n]
    return (raw.decode() if t >= 0xD9 else raw), i + n


def _unpack_list(b: bytes, i: int, n: int) -> tuple[list[Any], int]:
    out = []
    for _ in range(n):
        v, i = _unpack(b, i)
        out.append(v)
    return out, i


def _unpack_map(b: bytes, i: int, n: int) -> tuple[dict[Any, Any], int]:
    out = {}
    for _ in range(n):
        k, i = _unpack(b, i)
        out[k], i = _unpack(b, i)
    return out, i


@dataclass
class Segment:
    """An allocated section: where it is to be mapped and what it holds."""

    name: str
    address: int
    data: bytes
    executable: bool


@dataclass
class KernelArg:
    """One explicit or hidden kernel argument of the metadata."""

    offset: int
    size: int
    kind: str
    name: str = ""


@dataclass
class Kernel:
    """One kernel: entry point, resources, initial register contents, arguments."""

    name: str
    entry: int
    size: int
    group_segment: int
    private_segment: int
    kernarg_size: int
    vgprs: int
    agpr_base: int
    sgprs: int
    mode: int
    user_sgprs: int
    user_sgpr_fields: list[tuple[str, int]]
    preload_length: int
    preload_offset: int
    workgroup_id: tuple[bool, bool, bool]
    workgroup_info: bool
    workitem_id: int
    scratch_enabled: bool
    args: list[KernelArg] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass
class CodeObject:
    """A loaded code object."""

    arch: str
    segments: list[Segment]
    kernels: dict[str, Kernel]
    symbols: dict[str, tuple[int, int]]

    def kernel(self, name: str | None = None) -> Kernel:
        """The kernel of that name, or the only one."""
        if name is None:
            if len(self.kernels) != 1:
                raise DecodeError(f"the code object has {len(self.kernels)} kernels: name one")
            return next(iter(self.kernels.values()))
        if name not in self.kernels:
            raise DecodeError(f"no kernel {name!r}; there are {sorted(self.kernels)}")
        return self.kernels[name]


def load_code_object(elf: bytes) -> CodeObject:
    """Parse an AMDGPU ELF (hsaco) for gfx942 or gfx950."""
    if elf[:4] != b"\x7fELF" or elf[4] != 2:
        raise DecodeError("not an ELF64 file")
    flags = struct.unpack_from("<I", elf, 0x30)[0]
    mach = flags & 0xFF
    if mach not in _MACH:
        raise DecodeError(f"ELF machine flag {mach:#x} is neither gfx942 (0x4c) nor gfx950 (0x4f)")
    shoff, shnum, shstr = (
        struct.unpack_from("<Q", elf, 0x28)[0],
        struct.unpack_from("<H", elf, 0x3C)[0],
        struct.unpack_from("<H", elf, 0x3E)[0],
    )
    heads = [struct.unpack_from("<IIQQQQIIQQ", elf, shoff + 64 * i) for i in range(shnum)]

    def cstr(table: int, off: int) -> str:
        start = heads[table][4] + off
        return elf[start : elf.index(b"\0", start)].decode()

    segments: list[Segment] = []
    symbols: dict[str, tuple[int, int]] = {}
    metadata: dict[str, Any] = {}
    for h in heads:
        name, typ, flg, addr, off, size = cstr(shstr, h[0]), h[1], h[2], h[3], h[4], h[5]
        if flg & 2 and size and typ in (1, 8):  # SHF_ALLOC, PROGBITS or NOBITS
            data = elf[off : off + size] if typ == 1 else bytes(size)
            segments.append(Segment(name, addr, data, bool(flg & 4)))
        if typ in (2, 11):  # SYMTAB, DYNSYM
            for i in range(size // 24):
                n, _info, _other, _shndx, value, sz = struct.unpack_from("<IBBHQQ", elf, off + 24 * i)
                if n:
                    symbols[cstr(h[6], n)] = (value, sz)
        if typ == 7:
            metadata = _metadata_note(elf[off : off + size]) or metadata
        if typ in (4, 9) and size:
            raise DecodeError(f"relocations in {name}: only fully linked code objects are run")
    if not metadata:
        raise DecodeError("no AMDGPU metadata note")
    kernels = {}
    for k in metadata.get("amdhsa.kernels", []):
        kern = _kernel(k, segments, symbols)
        kernels[kern.name] = kern
    return CodeObject(_MACH[mach], segments, kernels, symbols)


def _metadata_note(note: bytes) -> dict[str, Any] | None:
    i = 0
    while i + 12 <= len(note):
        namesz, descsz, typ = struct.unpack_from("<III", note, i)
        name = note[i + 12 : i + 12 + namesz].rstrip(b"\0")
        start = i + 12 + (namesz + 3) // 4 * 4
        if typ == _NT_AMDGPU_METADATA and name == b"AMDGPU":
            return unpack_msgpack(note[start : start + descsz])
        i = start + (descsz + 3) // 4 * 4
    return None


def _kernel(meta: dict[str, Any], segments: list[Segment], symbols: dict[str, tuple[int, int]]) -> Kernel:
    kd_addr = symbols[meta[".symbol"]][0]
    for s in segments:
        if s.address <= kd_addr < s.address + len(s.data):
            kd = s.data[kd_addr - s.address :][:64]
            break
    else:
        raise DecodeError(f"kernel descriptor {meta['.symbol']} lies in no section")
    group, private, kernarg = struct.unpack_from("<III", kd, 0)
    entry_off = struct.unpack_from("<q", kd, 16)[0]
    rsrc3, rsrc1, rsrc2 = struct.unpack_from("<III", kd, 44)
    props, preload = struct.unpack_from("<HH", kd, 56)
    order = [
        ("private_segment_buffer", 4), ("dispatch_ptr", 2), ("queue_ptr", 2), ("kernarg_segment_ptr", 2),
        ("dispatch_id", 2), ("flat_scratch_init", 2), ("private_segment_size", 1),
    ]  # fmt: skip
    fields = [f for bit, f in enumerate(order) if props >> bit & 1]
    entry = kd_addr + entry_off
    name = meta[".name"]
    args = [
        KernelArg(a[".offset"], a[".size"], a[".value_kind"], a.get(".name", ""))
        for a in meta.get(".args", [])
    ]
    # gfx90a and later: vgprs are allocated in units of 8; the AGPRs follow at ACCUM_OFFSET.
    return Kernel(
        name=name,
        entry=entry,
        size=symbols.get(name, (entry, 0))[1],
        group_segment=group,
        private_segment=private,
        kernarg_size=max(kernarg, meta.get(".kernarg_segment_size", 0)),
        vgprs=((rsrc1 & 0x3F) + 1) * 8,
        agpr_base=((rsrc3 & 0x3F) + 1) * 4,
        sgprs=meta.get(".sgpr_count", 102),
        mode=_initial_mode(rsrc1),
        user_sgprs=rsrc2 >> 1 & 0x1F,
        user_sgpr_fields=fields,
        preload_length=preload & 0x7F,
        preload_offset=preload >> 7,
        workgroup_id=(bool(rsrc2 >> 7 & 1), bool(rsrc2 >> 8 & 1), bool(rsrc2 >> 9 & 1)),
        workgroup_info=bool(rsrc2 >> 10 & 1),
        workitem_id=rsrc2 >> 11 & 3,
        scratch_enabled=bool(rsrc2 & 1),
        args=args,
        meta=meta,
    )


def _initial_mode(rsrc1: int) -> int:
    """MODE as the hardware sets it at wave launch (CDNA3 ISA 3.5, MODE register).

    Bits 3:0 rounding (32, then 16/64), 7:4 denormals, 8 DX10_CLAMP, 9 IEEE, 23 FP16_OVFL.
    """
    float_mode = rsrc1 >> 12 & 0xFF
    dx10, ieee, fp16_ovfl = rsrc1 >> 21 & 1, rsrc1 >> 23 & 1, rsrc1 >> 26 & 1
    return float_mode | dx10 << 8 | ieee << 9 | fp16_ovfl << 23
