"""Assembly text to code objects, with Triton's own assembler and linker: for snippet tests and for mutants."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .engine import Result, Simulator

Array = npt.NDArray[Any]


def assemble(text: str, arch: str) -> bytes:
    """Assemble and link one module."""
    from triton._C.libtriton import amd

    try:
        from triton.backends.amd.compiler import assemble_amdgcn

        obj = assemble_amdgcn(text, arch, "")
    except ImportError:  # older Triton: the assembler is in the main library
        obj = amd.assemble_amdgcn(text, "amdgcn-amd-amdhsa", arch, "")
    with tempfile.TemporaryDirectory() as tmp:
        src, dst = Path(tmp, "a.o"), Path(tmp, "a.hsaco")
        src.write_bytes(obj)
        amd.link_hsaco(str(src), str(dst))
        return dst.read_bytes()


_TEMPLATE = """
.amdgcn_target "{target}"
.amdhsa_code_object_version 5
.text
.globl k
.p2align 8
.type k,@function
k:
{body}
  s_endpgm
.Lend:
  .size k, .Lend-k
.rodata
.p2align 6
.amdhsa_kernel k
  .amdhsa_group_segment_fixed_size {lds}
  .amdhsa_private_segment_fixed_size {scratch}
  .amdhsa_kernarg_size 32
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_user_sgpr_count 2
  .amdhsa_enable_private_segment {has_scratch}
  .amdhsa_system_sgpr_workgroup_id_x 1
  .amdhsa_next_free_vgpr {vgprs}
  .amdhsa_next_free_sgpr 100
  .amdhsa_accum_offset {accum}
  .amdhsa_float_denorm_mode_32 3
  .amdhsa_float_denorm_mode_16_64 3
.end_amdhsa_kernel
.amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.kernels:
  - .name: k
    .symbol: k.kd
    .kernarg_segment_size: 32
    .kernarg_segment_align: 8
    .group_segment_fixed_size: {lds}
    .private_segment_fixed_size: {scratch}
    .wavefront_size: 64
    .sgpr_count: 100
    .vgpr_count: {vgprs}
    .max_flat_workgroup_size: 1024
    .args:
      - {{.offset: 0, .size: 8, .value_kind: global_buffer}}
      - {{.offset: 8, .size: 8, .value_kind: global_buffer}}
      - {{.offset: 16, .size: 8, .value_kind: global_buffer}}
...
.end_amdgpu_metadata
"""


def target_line(arch: str) -> str:
    """The .amdgcn_target value that this Triton's assembler expects."""
    try:
        from triton.backends.amd.compiler import get_amd_codegen_target_triple

        triple = str(get_amd_codegen_target_triple(arch))
    except ImportError:
        triple = "amdgcn-amd-amdhsa"
    return f"{triple}-unknown-{arch}" if triple.count("-") == 2 else f"{triple}--{arch}"


def module(
    body: str, arch: str, *, lds: int = 0, scratch: int = 0, vgprs: int = 512, accum: int = 256
) -> bytes:
    """A code object with one kernel `k`: kernarg pointer in s[0:1], workgroup id in s2, lane in v0."""
    return assemble(
        _TEMPLATE.format(target=target_line(arch), body=body, lds=lds, scratch=scratch, has_scratch=int(scratch > 0),
                         vgprs=vgprs, accum=accum), arch)  # fmt: skip


def run_snippet(
    arch: str, body: str, v: dict[int, Array] | None = None, s: dict[int, int] | None = None,
    out: Sequence[int] = (), out_s: Sequence[int] = (), *, exec_mask: int = (1 << 64) - 1, lds: int = 0,
    scratch: int = 0, waves: int = 1, check: str | Sequence[str] = "all", extra: Array | None = None,
    raw: bool = False,
) -> tuple[dict[int, Array], dict[int, Array], Result]:  # fmt: skip
    """Run instructions with given vector and scalar inputs; returns the requested registers per lane.

    v: register -> 64*waves dwords; s: scalar register (from s20 up) -> value. s[8:9] points to `extra`, if given.
    v250 holds 4 * thread. Outputs are read with EXEC restored. raw: no epilogue wait.
    """
    v, s = v or {}, s or {}
    n = 64 * waves
    pro = ["s_load_dwordx4 s[4:7], s[0:1], 0", "s_load_dwordx2 s[8:9], s[0:1], 16", "s_waitcnt lgkmcnt(0)",
           "v_lshlrev_b32 v250, 2, v0", "s_mov_b64 s[10:11], s[4:5]"]  # fmt: skip
    if out_s:
        pro.append("v_mov_b32 v251, 0")
    ins = [np.ascontiguousarray(np.broadcast_to(x, (n,))).view(np.uint32) for x in v.values()]
    for r in v:
        pro.append(f"global_load_dword v{r}, v250, s[10:11]")
        pro.append(f"s_add_u32 s10, s10, {4 * n}")
        pro.append("s_addc_u32 s11, s11, 0")
    for r, val in s.items():
        pro.append(f"s_mov_b32 s{r}, {val & 0xFFFFFFFF:#x}")
    pro.append("s_waitcnt vmcnt(0)")
    if exec_mask != (1 << 64) - 1:
        pro += [f"s_mov_b32 exec_lo, {exec_mask & 0xFFFFFFFF:#x}", f"s_mov_b32 exec_hi, {exec_mask >> 32:#x}"]
    epi = [] if raw else ["s_waitcnt vmcnt(0) lgkmcnt(0)"]
    for k, r in enumerate(out_s):
        epi.append(
            f"v_writelane_b32 v251, s{r}, {k}"
            if r < 106
            else f"v_writelane_b32 v251, vcc_{'lo' if r == 106 else 'hi'}, {k}"
        )
    epi = [*epi, "s_mov_b64 exec, -1", "s_mov_b64 s[10:11], s[6:7]"]
    for r in out:
        epi.append(f"global_store_dword v250, {'v' + str(r) if r < 256 else 'a' + str(r - 256)}, s[10:11]")
        epi.append(f"s_add_u32 s10, s10, {4 * n}")
        epi.append("s_addc_u32 s11, s11, 0")
    if out_s:
        epi.append("global_store_dword v250, v251, s[10:11]")
    text = "\n".join("  " + x for x in [*pro, *body.strip().splitlines(), *epi])
    src = np.concatenate(ins) if ins else np.zeros(1, np.uint32)
    dst = np.zeros((len(out) + bool(out_s)) * n + 1, np.uint32)
    arrays = [("in", src), ("out", dst), ("extra", extra if extra is not None else np.zeros(16, np.uint32))]

    def kernarg(va: dict[int, int]) -> bytes:
        return b"".join(va[i].to_bytes(8, "little") for i in range(3)) + bytes(8)

    sim = Simulator(module(text, arch, lds=lds, scratch=scratch), check, budget=2_000_000)
    res = sim.launch((1,), (n,), kernarg, arrays)
    got = {r: dst[k * n : (k + 1) * n].copy() for k, r in enumerate(out)}
    sg = {r: dst[len(out) * n + k].copy() for k, r in enumerate(out_s)}
    return got, sg, res


def edit(text: str, pattern: str, replacement: str, count: int = 1, nth: int = 0) -> str:
    """Replace the nth match (and count - 1 following) of a regular expression in assembly text; it must exist."""
    found = list(re.finditer(pattern, text, re.MULTILINE))
    if len(found) <= nth:
        raise ValueError(f"{pattern!r} matches {len(found)} times")
    for m in reversed(found[nth : nth + count]):
        text = text[: m.start()] + m.expand(replacement) + text[m.end() :]
    return text
