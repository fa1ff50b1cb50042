"""Machine code to instruction records.

The bit fields and opcode tables are those that the tinygrad wheel generates from AMD's machine-readable ISA
description (MIT). Everything here checks what it hands on: an encoding whose fields the simulator does not
understand is refused when the code object is loaded, not when (or if) the instruction runs. README.md says why
this and not the compiler's assembly text; `tests/l1_simulate/test_decode.py` compares the two for every kernel.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise

from .errors import DecodeError

_INLINE_F32 = {
    240: 0x3F000000, 241: 0xBF000000, 242: 0x3F800000, 243: 0xBF800000,
    244: 0x40000000, 245: 0xC0000000, 246: 0x40800000, 247: 0xC0800000, 248: 0x3E22F983,
}  # fmt: skip
_INLINE_F16 = {
    240: 0x3800, 241: 0xB800, 242: 0x3C00, 243: 0xBC00,
    244: 0x4000, 245: 0xC000, 246: 0x4400, 247: 0xC400, 248: 0x3118,
}  # fmt: skip
_INLINE_F64 = {
    240: 0x3FE0000000000000, 241: 0xBFE0000000000000, 242: 0x3FF0000000000000, 243: 0xBFF0000000000000,
    244: 0x4000000000000000, 245: 0xC000000000000000, 246: 0x4010000000000000, 247: 0xC010000000000000,
    248: 0x3FC45F306DC9C882,
}  # fmt: skip

_NAMES = {
    102: "flat_scratch_lo", 103: "flat_scratch_hi", 104: "xnack_mask_lo", 105: "xnack_mask_hi", 106: "vcc_lo",
    107: "vcc_hi", 124: "m0", 126: "exec_lo", 127: "exec_hi", 251: "vccz", 252: "execz", 253: "scc",
}  # fmt: skip

# Registers by number in the 9-bit source space (CDNA3 ISA, "Scalar operands" and "Vector operands").
VCC, M0, EXEC = 106, 124, 126
LITERAL = 255

# Instructions that gfx942 lacks although both targets share one encoding table (LLVM: FeatureGFX950Insts...).
_GFX950_ONLY_PREFIX = (
    "v_cvt_scalef32", "v_permlane16_swap", "v_permlane32_swap", "v_bitop3", "v_prng", "v_ashr_pk",
    "v_cvt_pk_bf16", "v_cvt_pk_f16_f32", "v_cvt_sr_bf16", "v_cvt_sr_f16", "v_cvt_f32_bf16", "v_minimum3",
    "v_maximum3", "v_pk_minimum3", "v_pk_maximum3", "v_dot2_f32_bf16", "v_dot2c_f32_bf16", "ds_read_b64_tr",
    "ds_read_b96_tr", "v_mfma_scale", "v_mfma_ld_scale", "v_mfma_f32_16x16x128", "v_mfma_f32_32x32x64",
    "v_mfma_f32_16x16x32_f16", "v_mfma_f32_16x16x32_bf16", "v_mfma_f32_32x32x16_f16",
    "v_mfma_f32_32x32x16_bf16", "v_mfma_i32_16x16x64", "v_mfma_i32_32x32x32", "global_load_lds_dwordx3",
    "global_load_lds_dwordx4",
)  # fmt: skip
_GFX942_ONLY = ("v_mfma_f32_16x16x8_xf32", "v_mfma_f32_32x32x4_xf32")


@dataclass(slots=True)
class Instr:
    """One decoded instruction: name without encoding suffix, encoding class, raw fields."""

    name: str
    fmt: str
    fields: dict[str, int]
    addr: int
    size: int
    literal: int | None = None

    def __getattr__(self, key: str) -> int:
        try:
            return self.fields[key]
        except KeyError:
            raise AttributeError(key) from None

    def get(self, key: str, default: int = 0) -> int:
        """A field, or the default where the encoding has no such field."""
        return self.fields.get(key, default)

    def __str__(self) -> str:
        ops = []
        for key in (
            "vdst",
            "sdst",
            "sdata",
            "vdata",
            "src0",
            "vsrc0",
            "src1",
            "vsrc1",
            "src2",
            "ssrc0",
            "ssrc1",
        ):
            if key in self.fields:
                ops.append(f"{key}={operand_name(self.fields[key], key, self.literal)}")
        for key, val in self.fields.items():
            if (
                key not in ("op", "encoding", "literal")
                and not any(o.startswith(key + "=") for o in ops)
                and val
            ):
                ops.append(f"{key}={val:#x}" if val > 9 else f"{key}={val}")
        return f"{self.name} " + ", ".join(ops)

    @property
    def where(self) -> str:
        """Text for reports."""
        return f"{self.addr:#x}: {self}"


_VGPR_FIELDS = {"vdata", "vsrc0", "vsrc1", "vaddr", "data", "data0", "data1"}


def operand_name(code: int, key: str, literal: int | None) -> str:
    """A readable name for an operand code."""
    if key in _VGPR_FIELDS:
        return f"v{code & 255}"
    if key == "vdst":
        return f"v{code & 255}"
    if code >= 256:
        return f"v{code - 256}"
    if code < 102:
        return f"s{code}"
    if code in _NAMES:
        return _NAMES[code]
    if code == LITERAL:
        return f"{literal:#x}" if literal is not None else "literal"
    if 128 <= code <= 208:
        return str(code - 128 if code <= 192 else 192 - code)
    return f"src{code}"


def inline_constant(code: int, width: int) -> int | None:
    """The bits that an inline constant supplies to an operand of 16, 32 or 64 bits; None if it is none.

    Integer constants sign-extend to the operand; float constants take the operand's own format.
    """
    if 128 <= code <= 208:
        value = code - 128 if code <= 192 else 192 - code
        return value & ((1 << width) - 1)
    table = {16: _INLINE_F16, 32: _INLINE_F32, 64: _INLINE_F64}[width]
    return table.get(code)


class Decoder:
    """Decodes the instructions that are reachable from an entry point."""

    def __init__(self, arch: str) -> None:
        from tinygrad.renderer.amd import decode_inst

        self._decode = decode_inst
        self.arch = arch
        self._cache: dict[bytes, tuple[str, str, dict[str, int], int, int | None]] = {}

    def one(self, code: bytes, offset: int, addr: int) -> Instr:
        """Decode the instruction at code[offset:]."""
        window = code[offset : offset + 16]
        hit = self._cache.get(window)
        if hit is None:
            hit = self._decode_window(window, addr)
            self._cache[window] = hit
        name, fmt, fields, size, literal = hit
        return Instr(name, fmt, fields, addr, size, literal)

    def _decode_window(self, window: bytes, addr: int) -> tuple[str, str, dict[str, int], int, int | None]:
        if len(window) < 4:
            raise DecodeError("code ends in the middle of an instruction", hex(addr))
        word = struct.unpack_from("<I", window)[0]
        # Only the scaled matrix instructions are 16 bytes long, and they begin with the word of v_mfma_ld_scale_b32.
        # The table tests their second half alone, so any instruction before a matrix instruction would match it.
        seen = window if word >> 16 == 0xD3AC else window[:8]
        try:
            ins = self._decode(seen + bytes(16), "cdna")
            name = ins.op_name.lower()
        except Exception as e:  # the table raises several kinds for bytes that are no instruction
            raise DecodeError(f"word {word:#010x} is no instruction ({e})", hex(addr)) from None
        cls = type(ins)
        fields = {n: (ins._raw >> f.lo) & f.mask for n, f in cls._fields}
        for suffix in ("_e32", "_e64"):
            name = name.removesuffix(suffix)
        size = ins.size()
        if (
            name.startswith("v_mfma") and size == 8
        ):  # some come as plain VOP3P records: same bits, other names
            raw = ins._raw
            fields |= {"cbsz": raw >> 8 & 7, "abid": raw >> 11 & 15, "acc_cd": raw >> 15 & 1, "acc": raw >> 59 & 3,
                       "blgp": raw >> 61 & 7}  # fmt: skip
        literal = fields.pop("literal", None)
        if literal is None and any(
            fields.get(k) == LITERAL for k in ("src0", "src1", "src2", "ssrc0", "ssrc1") if k in fields
        ):
            raise DecodeError(f"{name} in encoding {cls.__name__} with a literal", hex(addr))
        if self.arch != "gfx950" and name.startswith(_GFX950_ONLY_PREFIX):
            raise DecodeError(f"{name} does not exist on {self.arch}", hex(addr))
        if self.arch == "gfx950" and name in _GFX942_ONLY:
            raise DecodeError(f"{name} does not exist on {self.arch}", hex(addr))
        return name, cls.__name__, fields, size, literal


def branch_target(ins: Instr) -> int | None:
    """Target address of a direct branch, else None."""
    if ins.name == "s_branch" or (ins.name.startswith("s_cbranch_") and ins.fmt == "SOPP"):
        off = ins.simm16 - 0x10000 if ins.simm16 & 0x8000 else ins.simm16
        return ins.addr + 4 + 4 * off
    return None


def decode_reachable(dec: Decoder, code: bytes, base: int, entries: list[int]) -> list[Instr]:
    """All instructions reachable from the entries, sorted by address."""
    seen: dict[int, Instr] = {}
    work = list(entries)
    while work:
        addr = work.pop()
        while addr not in seen:
            if not base <= addr < base + len(code):
                raise DecodeError("control flow leaves the code section", hex(addr))
            ins = dec.one(code, addr - base, addr)
            seen[addr] = ins
            target = branch_target(ins)
            if target is not None:
                work.append(target)
            if ins.name in ("s_endpgm", "s_branch", "s_setpc_b64", "s_trap"):
                break
            addr += ins.size
    out = [seen[a] for a in sorted(seen)]
    for a, b in pairwise(out):
        if a.addr + a.size > b.addr:
            raise DecodeError("overlapping instructions: a branch goes into the middle of one", b.where)
    return out
