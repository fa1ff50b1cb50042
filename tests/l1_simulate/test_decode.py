"""The loader and the decoder: every instruction of compiled kernels, compared with the compiler's own text.

This is the evidence for decoding machine code with tinygrad's tables (ci/cdna_sim/README.md): names, order and sizes
agree with LLVM's assembly for every kernel compiled here, on both targets.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from . import triton_kernels as tk
from .sim_helpers import ARCHS

from ci.cdna_sim import Simulator, compile_triton, load_code_object  # isort: skip
from ci.cdna_sim.asmkit import module, run_snippet  # isort: skip
from ci.cdna_sim.errors import DecodeError  # isort: skip
from ci.cdna_sim.loader import unpack_msgpack  # isort: skip

KERNELS = {
    "dot": (tk.dot_softmax, {"a": "*fp16", "b": "*fp16", "c": "*fp32", "K": "i32"}, {"BM": 32, "BK": 64}),
    "math": (tk.float_math, {"x": "*fp32", "y": "*fp32", "o": "*fp32"}, {"N": 512}),
    "int": (tk.int_math, {"x": "*i32", "y": "*i32", "o": "*i32"}, {"N": 512}),
    "reduce": (tk.reductions, {"x": "*fp16", "o": "*fp16", "o2": "*fp16", "o3": "*i32"}, {"N": 64, "M": 16}),
    "fp8": (tk.cast, {"x": "*fp32", "o": "*fp8e4nv"}, {"N": 1024}),
    "sort": (tk.sort, {"x": "*fp32", "o": "*fp32"}, {"N": 512}),
}
# LLVM prints some instructions under another name than the ISA document.
ALIASES = {
    "v_fma_mix_f32": "v_mad_mix_f32", "v_fma_mixlo_f16": "v_mad_mixlo_f16", "v_fma_mixhi_f16": "v_mad_mixhi_f16",
    "v_accvgpr_read_b32": "v_accvgpr_read", "v_accvgpr_write_b32": "v_accvgpr_write",
}  # fmt: skip


def text_names(asm: str) -> list[str]:
    """Mnemonics of the assembly's code, encodings folded."""
    out = []
    for line in asm.split(".amdhsa_kernel")[0].splitlines():
        m = re.match(r"\s+((?:s|v|ds|buffer|global|flat|scratch)_\w+)", line)
        if m:
            name = re.sub(r"_(e32|e64|sdwa|dpp)$", "", m[1])
            out.append(ALIASES.get(name, name))
    return out


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_decoded_code_equals_the_compilers_text(arch: str, name: str) -> None:
    fn, sig, consts = KERNELS[name]
    k = compile_triton(fn, sig, consts, [n for n, t in sig.items() if t[0] == "*"], arch=arch)
    sim = Simulator(k.asm["hsaco"])
    decoded = [i.name for i in sim.instructions()]
    text = text_names(k.asm["amdgcn"])
    # The first block loads arguments for firmware that cannot preload them; execution enters behind it.
    at = len(text) - len(decoded)
    assert 0 <= at <= 8
    short = [re.sub(r"_(e32|e64)$", "", n) for n in text[at:]]
    assert [d for d, t in zip(decoded, short, strict=True) if not _same(d, t)] == []


def _same(decoded: str, text: str) -> bool:
    """v_mfma_f32_4x4x4_16b_f16 and the like print their block count in either style."""
    return decoded == text or re.sub(r"_\d+b", "", decoded) == re.sub(r"_\d+b", "", text)


@pytest.mark.parametrize("arch", ARCHS)
def test_descriptor_and_metadata(arch: str) -> None:
    co = load_code_object(module("s_nop 0", arch, lds=1024, scratch=48, vgprs=96, accum=64))
    k = co.kernel()
    assert co.arch == arch
    assert (k.group_segment, k.private_segment, k.kernarg_size) == (1024, 48, 32)
    assert (k.vgprs, k.agpr_base, k.user_sgprs) == (96, 64, 2)
    assert k.user_sgpr_fields == [("kernarg_segment_ptr", 2)]
    assert k.workgroup_id == (True, False, False)
    assert k.mode == 0x3F0
    assert [a.kind for a in k.args] == ["global_buffer"] * 3


def test_registers_beyond_the_allocation_are_refused() -> None:
    sim = Simulator(module("v_mov_b32 v70, 0", "gfx942", vgprs=96, accum=64))
    with pytest.raises(DecodeError, match="v70"):
        sim.launch((1,), (64,), bytes(32))


def test_instruction_of_the_other_target_is_refused() -> None:
    code = module("v_permlane32_swap_b32 v1, v2", "gfx950")
    sim = Simulator(code)
    object.__setattr__(sim.code, "arch", "gfx942")
    with pytest.raises(DecodeError, match="does not exist on gfx942"):
        sim.instructions()


def test_bytes_that_are_no_code_object() -> None:
    for bad in (b"", b"MZ" + bytes(100), b"\x7fELF\x02" + bytes(100)):
        with pytest.raises(DecodeError):
            load_code_object(bad)


def test_messagepack() -> None:
    assert unpack_msgpack(b"\x83\xa1a\x01\xa1b\x93\xff\xc3\xc0\xa1c\xcd\x01\x00") == {
        "a": 1,
        "b": [-1, True, None],
        "c": 256,
    }
    assert unpack_msgpack(b"\xd9\x03abc") == "abc"
    with pytest.raises(DecodeError):
        unpack_msgpack(b"\xc1")


def test_preceding_instruction_is_not_taken_for_a_scaled_matrix_instruction() -> None:
    """The 16-byte form is recognised by its first word; a wait before a matrix instruction must stay a wait."""
    a = np.zeros(64, np.uint32)
    v = dict.fromkeys((*range(10, 18), *range(20, 28)), a)
    got, _, _ = run_snippet("gfx950", "s_waitcnt vmcnt(0)\n"
                            "v_mfma_f32_16x16x128_f8f6f4 v[40:43], v[10:17], v[20:27], 0",
                            v, out=[40])  # fmt: skip
    assert (got[40] == 0).all()


def test_workgroup_and_lane_ids() -> None:
    """Two dimensions of workgroups and lanes reach the registers where the descriptor says."""
    k = compile_triton(
        tk.masked_add, {"x": "*fp32", "y": "*fp32", "o": "*fp32", "n": "i32"}, {"B": 64}, num_warps=1
    )
    from ci.cdna_sim import simulate_triton

    x, o = np.arange(1000, dtype=np.float32), np.zeros(1000, np.float32)
    simulate_triton(k, (16,), {"x": x, "y": x, "o": o, "n": 1000})
    assert (o == 2 * x).all()
