"""Faults planted in the machine code of the FlyDSL decode kernel: the simulated runs must notice every one.

A mutant is an edit of the final assembly, reassembled. "Killed" means that a detector fired or that the result fails
the check of test_flydsl.py against fp64. An edit that no longer matches anything is an error: update the mutant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

pytest.importorskip("flydsl", reason="FlyDSL is not installed", exc_type=ImportError)
pytest.importorskip("triton", reason="Triton's assembler and linker make the mutants")
pytest.importorskip("tinygrad", reason="the simulator decodes with tinygrad's AMD tables")

from ci.cdna_sim.asmkit import assemble, edit
from ci.cdna_sim.errors import SimError
from tests.l1_simulate import flydsl_helpers
from tests.l1_simulate.flydsl_helpers import Case, compiled, make_case, simulate_decode
from tests.l1_simulate.test_flydsl import ARCHES, PARTIAL, check
from turboquant_rocm.backends._flydsl.config import DecodeConfig

ALL = 10**6
NC4, K3 = "turboquant_4bit_nc", "turboquant_k3v4_nc"
V, S, RANGE = r"(v\d+)", r"(s\d+)", r"(v\[\d+:\d+\])"


@dataclass(frozen=True)
class Mutant:
    """One edit: the nth match of a pattern and count - 1 after it. arches, preset: where the code has such a place."""

    name: str
    pattern: str
    replacement: str
    count: int = ALL
    nth: int = 0
    arches: tuple[str, ...] = ARCHES
    preset: str = NC4


MUTANTS = (
    Mutant("no waits at all", r"^\ts_waitcnt .*$", "\ts_nop 0"),
    Mutant("no waits for vector loads", r"^\ts_waitcnt vmcnt\(\d+\)$", "\ts_nop 0"),
    Mutant("no wait for the first values", r"^\ts_waitcnt vmcnt\(14\)$", "\ts_nop 0", 1),
    Mutant("no waits for LDS and scalar loads", r"^\ts_waitcnt lgkmcnt\(\d+\)$", "\ts_nop 0"),
    Mutant("no barriers", r"^\ts_barrier$", "\ts_nop 0"),
    Mutant("no barrier before the sums are read", r"^\ts_barrier$", "\ts_nop 0", 1),
    Mutant("no barrier before the rows are read", r"^\ts_barrier$", "\ts_nop 0", 1, 1),
    Mutant("no barrier before the rows are overwritten", r"^\ts_barrier$", "\ts_nop 0", 1, 2),
    Mutant("low nibbles of keys for high ones", rf"v_lshrrev_b32_e32 {V}, 4, {V}", r"v_mov_b32_e32 \1, \2"),
    Mutant("a bit of a key's code lost", rf"v_and_b32_e32 {V}, 0xf0f0f0f, ", r"v_and_b32_e32 \1, 0x7070707, "),
    Mutant("a wrong entry of the key table", "0x4d3f0c85", "0x4d3f0c45"),
    Mutant("nibbles of values swapped", rf"v_and_b32_e32 {V}, 0xf000f0, ", r"v_and_b32_e32 \1, 0xf000f, "),
    Mutant("a bit of a value's code lost", rf"v_and_b32_e32 {V}, 0xf000f0, ", r"v_and_b32_e32 \1, 0x700070, "),
    Mutant("key norm left out", rf"v_fma_mix_f32 {V}, {V}, v\d+, -{V} .*", r"v_sub_f32_e32 \1, \2, \3"),
    Mutant("zero point left out",
           rf"v_fma_mix_f32 {V}, v\d+, v\d+, {V}( op_sel:\[0,1,0\])? op_sel_hi:\[0,1,0\]", r"v_mov_b32_e32 \1, \2"),
    Mutant("value scale left out", rf"v_fma_mixlo_f16 {V}, {V}, v\d+, s\d+ .*", r"v_cvt_f16_f32_e32 \1, \2"),
    Mutant("sums not rescaled", rf"v_pk_mul_f32 {RANGE}, \1, .*", "s_nop 0"),
    Mutant("one accumulator not rescaled", rf"v_pk_mul_f32 {RANGE}, \1, .*", "s_nop 0", 1, 3),
    Mutant("end of the sequence off by one", rf"v_cmp_lt_i32_e64 (s\[\d+:\d+\]), 1, {V}",
           r"v_cmp_lt_i32_e64 \1, 0, \2"),
    Mutant("high part of the query at half its weight", rf"v_lshl_add_u32 {V}, {V}, 7, {V}",
           r"v_lshl_add_u32 \1, \2, 6, \3"),
    Mutant("token stride of values", rf"v_add_u32_e32 {V}, 0x300, ", r"v_add_u32_e32 \1, 0x200, "),
    Mutant("block stride", r"(s_mul(?:k_i32 s\d+|_i32 s\d+, s\d+)), 0x10c0", r"\1, 0x10a0"),
    Mutant("a wave's next blocks", rf"^\ts_add_i32 {S}, \1, 8$", r"\ts_add_i32 \1, \1, 10"),
    Mutant("matrix operands swapped", rf"(v_mfma_f32_16x16x\d+_f16 \S+) {RANGE}, {RANGE},", r"\1 \3, \2,"),
    Mutant("products of keys not summed", rf"(v_mfma_i32_16x16x\d+_i8 {RANGE}, {RANGE}, {RANGE}), \2$", r"\1, 0"),
    Mutant("3 bits: two groups exchanged", "0xc060300", "0xc030600", preset=K3),
    Mutant("3 bits: a group's last byte for another's", "0x7040100", "0x6040100", preset=K3),
    Mutant("3 bits: the upper bit of a code that lies across bytes", "0x4040404", "0x0", preset=K3),
    Mutant("3 bits: an upper bit of the other one", "0x6060606", "0x2020202", preset=K3),
    Mutant("3 bits: the upper bit of a code", "0x7070707", "0x3030303", 1, preset=K3),
    Mutant("3 bits: a wrong entry of the table", "0x35f9f0f9", "0x35f9f0b9", preset=K3),
)  # fmt: skip
PLANTED = [(arch, m) for m in MUTANTS for arch in m.arches]


@cache
def case(preset: str) -> Case:
    """Four steps of some waves, since blocks are looked up two ahead; scores of one head that outgrow the headroom."""
    made = make_case([430, 33], hk=2, gqa=4, preset=preset)
    n, block = 430, made.layout.block_size
    g = torch.Generator().manual_seed(5)
    token = torch.arange(n)
    slots = made.table[0, token // block].long() * block + token % block
    direction = made.query[0, 0].float()
    key = torch.randn((n, 2, 128), generator=g)
    key[:, 0] += direction / direction.norm() * 0.05 * token[:, None]
    value = torch.randn((n, 2, 128), generator=g) + 0.5  # so that a lost zero point shows
    made.oracle.store(key, value, made.cache, slots)
    return made


def killed_by(arch: str, preset: str, assembly: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What noticed the fault, or ""."""
    made = case(preset)
    code = compiled("decode", DecodeConfig.of(arch, made.layout, 4), arch)
    mutant = replace(code, hsaco=assemble(assembly, arch), assembly=assembly)
    monkeypatch.setattr(flydsl_helpers, "compiled", lambda *_: mutant)
    try:
        out, lse, _ = simulate_decode(made, arch, 1)
        check(out, lse, made.expected(), 2 * PARTIAL)
    except SimError as error:
        return error.kind
    except AssertionError as error:
        return f"result: {str(error).splitlines()[:1]}"
    return ""


def assembly(arch: str, preset: str) -> str:
    """The kernel's own."""
    return compiled("decode", DecodeConfig.of(arch, case(preset).layout, 4), arch).assembly


@pytest.mark.slow
@pytest.mark.parametrize("preset", [NC4, K3])
@pytest.mark.parametrize("arch", ARCHES)
def test_reassembled_kernel_passes(arch: str, preset: str, monkeypatch: pytest.MonkeyPatch):
    """Else every mutant would be killed by the tools."""
    assert killed_by(arch, preset, assembly(arch, preset), monkeypatch) == ""


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "m"), PLANTED, ids=[f"{arch}: {m.name}" for arch, m in PLANTED])
def test_mutant_is_killed(arch: str, m: Mutant, monkeypatch: pytest.MonkeyPatch):
    mutated = edit(assembly(arch, m.preset), m.pattern, m.replacement, m.count, m.nth)
    by = killed_by(arch, m.preset, mutated, monkeypatch)
    print(by)
    assert by, f"{m.name} survived"


@pytest.mark.parametrize("arch", [pytest.param("gfx942", marks=pytest.mark.slow), "gfx950"])
def test_mutants_are_up_to_date(arch: str):
    """In the default list, so that whoever changes the kernel learns at once which places are gone."""
    mine = [m for m in MUTANTS if arch in m.arches]
    assert len(mine) >= 10
    for m in mine:
        text = assembly(arch, m.preset)
        assert edit(text, m.pattern, m.replacement, m.count, m.nth) != text, m.name
