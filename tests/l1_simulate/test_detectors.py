"""Every detector fires on a kernel mutated to have its fault, and is silent on the right one.

Two kinds of subjects: hand-written snippets, where the fault is one line, and compiled Triton kernels whose assembly is
edited (a wait dropped, a barrier dropped, an offset changed) and assembled again.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from .sim_helpers import ARCHS, U32, pool
from .triton_kernels import dot_softmax, masked_add, row_softmax

from ci.cdna_sim import compile_triton, simulate_triton  # isort: skip
from ci.cdna_sim.asmkit import assemble, edit, run_snippet  # isort: skip
from ci.cdna_sim.errors import (  # isort: skip
    BudgetError, DeadlockError, DecodeError, OutOfBoundsError, PendingError, RaceError, UninitError, UnsupportedError,
)  # fmt: skip

LANE = np.arange(64, dtype=U32)


# -- outstanding loads -----------------------------------------------------------------------------------------------


def two_loads(wait: str) -> str:
    return f"""
      global_load_dword v2, v1, s[8:9]
      global_load_dword v3, v1, s[8:9] offset:4
      {wait}
      v_add_u32 v4, 1, v2
    """


@pytest.mark.parametrize("arch", ARCHS)
def test_vmcnt_covers_all_but_the_newest(arch: str) -> None:
    data = np.arange(256, dtype=U32)
    for wait in ("s_waitcnt vmcnt(1)", "s_waitcnt vmcnt(0)"):
        got, _, _ = run_snippet(arch, two_loads(wait), {1: LANE * 4}, out=[4], extra=data)
        assert (got[4] == LANE + 1).all()
    for wait in ("s_nop 0", "s_waitcnt vmcnt(2)", "s_waitcnt lgkmcnt(0)"):
        with pytest.raises(PendingError, match="v2"):
            run_snippet(arch, two_loads(wait), {1: LANE * 4}, out=[4], extra=data)
    run_snippet(
        arch, two_loads("s_nop 0"), {1: LANE * 4}, out=[4], extra=data, check=("oob", "uninit", "race")
    )


def test_vmcnt_counts_stores_too() -> None:
    text = """
      global_load_dword v2, v1, s[8:9]
      global_store_dword v1, v1, s[8:9] offset:1024
      {wait}
      v_add_u32 v4, 1, v2
    """
    data = np.arange(512, dtype=U32)
    run_snippet("gfx942", text.format(wait="s_waitcnt vmcnt(1)"), {1: LANE * 4}, out=[4], extra=data)
    with pytest.raises(PendingError):
        run_snippet("gfx942", text.format(wait="s_waitcnt vmcnt(2)"), {1: LANE * 4}, out=[4], extra=data)


def test_overwriting_the_source_of_a_store_in_flight_is_legal() -> None:
    data = np.zeros(64, U32)
    run_snippet(
        "gfx942",
        "global_store_dword v1, v2, s[8:9]\n v_mov_b32 v2, 0",
        {1: LANE * 4, 2: LANE + 9},
        extra=data,
    )
    assert (data == LANE + 9).all()


def test_overwriting_the_target_of_a_load_in_flight() -> None:
    with pytest.raises(PendingError):
        run_snippet("gfx942", "global_load_dword v2, v1, s[8:9]\n v_mov_b32 v2, 0", {1: LANE * 0})
    # a second load into the same register returns after the first
    run_snippet(
        "gfx942",
        "global_load_dword v2, v1, s[8:9]\n global_load_dword v2, v1, s[8:9]",
        {1: LANE * 0},
        out=[2],
    )


def test_lgkmcnt_lds_in_order_scalar_loads_not() -> None:
    text = """
      v_lshlrev_b32 v1, 2, v0
      ds_write_b32 v1, v0
      ds_read_b32 v2, v1
      ds_read_b32 v3, v1
      {smem}
      {wait}
      v_mov_b32 v4, v2
    """
    ok = text.format(smem="", wait="s_waitcnt lgkmcnt(1)")
    got, _, _ = run_snippet("gfx942", ok, out=[4], lds=256)
    assert (got[4] == LANE).all()
    with pytest.raises(PendingError):
        run_snippet("gfx942", text.format(smem="", wait="s_waitcnt lgkmcnt(2)"), out=[4], lds=256)
    # one scalar load in flight: with two operations left, the LDS read may be one of them, with one it may not
    run_snippet(
        "gfx942",
        text.format(smem="s_load_dword s30, s[8:9], 0", wait="s_waitcnt lgkmcnt(1)"),
        out=[4],
        lds=256,
    )
    with pytest.raises(PendingError):
        run_snippet("gfx942", text.format(smem="s_load_dword s30, s[8:9], 0", wait="s_waitcnt lgkmcnt(2)"), out=[4],
                    lds=256)  # fmt: skip
    scalar = "s_load_dword s30, s[8:9], 0\n ds_read_b32 v3, v1\n {wait}\n s_add_u32 s31, s30, 1"
    head = "v_lshlrev_b32 v1, 2, v0\n ds_write_b32 v1, v0\n s_waitcnt lgkmcnt(0)\n"
    run_snippet("gfx942", head + scalar.format(wait="s_waitcnt lgkmcnt(0)"), out_s=[31], lds=256)
    with pytest.raises(PendingError, match="s30"):  # scalar loads return in any order
        run_snippet("gfx942", head + scalar.format(wait="s_waitcnt lgkmcnt(1)"), out_s=[31], lds=256)


@pytest.mark.parametrize("use", ["v_mov_b32 v4, s30", "s_cmp_eq_u32 s30, 0", "s_load_dword s31, s[30:31], 0"])
def test_scalar_load_used_too_early(use: str) -> None:
    with pytest.raises(PendingError):
        run_snippet("gfx942", f"s_load_dwordx2 s[30:31], s[8:9], 0\n {use}")


def test_counter_saturation_stalls_the_issue() -> None:
    """More than 63 operations cannot be in flight, so the first of 64 loads has arrived when the last was issued."""
    loads = "\n".join(f"global_load_dword v{10 + i}, v1, s[8:9]" for i in range(70))
    got, _, _ = run_snippet("gfx942", loads + "\n s_waitcnt vmcnt(62)\n v_mov_b32 v4, v10", {1: LANE * 0}, out=[4],
                            extra=np.full(4, 7, U32))  # fmt: skip
    assert (got[4] == 7).all()


# -- bounds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "global_load_dword v2, v1, s[8:9]", "global_store_dword v1, v1, s[8:9]",
        "global_load_ubyte v2, v1, s[8:9] offset:3",
        "global_load_dwordx4 v[4:7], v1, s[8:9] offset:-12", "global_atomic_add v1, v1, s[8:9]",
    ],
)  # fmt: skip
def test_out_of_bounds(text: str) -> None:
    data = np.zeros(64, U32)
    run_snippet("gfx942", text, {1: np.maximum(LANE * 4, 12)}, extra=data)
    for wrong in (256, 0xFFFFFFF0):
        addr = np.maximum(LANE * 4, 12)
        addr[17] = wrong
        with pytest.raises(OutOfBoundsError, match="lane 17"):
            run_snippet("gfx942", text, {1: addr}, extra=data)
        run_snippet(
            "gfx942", text, {1: addr}, extra=data, exec_mask=~(1 << 17) & (2**64 - 1)
        )  # an inactive lane


def test_out_of_bounds_scalar_lds_and_scratch() -> None:
    data = np.zeros(64, U32)
    run_snippet("gfx942", "s_load_dwordx4 s[32:35], s[8:9], 0xf0", extra=data)
    with pytest.raises(OutOfBoundsError):
        run_snippet("gfx942", "s_load_dwordx4 s[32:35], s[8:9], 0xf4", extra=data)
    run_snippet("gfx942", "ds_write_b64 v1, v[2:3]", {1: LANE * 8, 2: LANE, 3: LANE}, lds=512)
    with pytest.raises(OutOfBoundsError, match="LDS"):
        run_snippet("gfx942", "ds_write_b64 v1, v[2:3] offset:8", {1: LANE * 8, 2: LANE, 3: LANE}, lds=512)
    with pytest.raises(OutOfBoundsError, match="scratch"):
        run_snippet(
            "gfx942", "scratch_store_dwordx2 off, v[2:3], off offset:12", {2: LANE, 3: LANE}, scratch=16
        )


# -- uninitialised -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fires"),
    [
        ("v_add_u32 v2, v90, v1\n global_store_dword v1, v2, s[8:9]", True),
        ("v_mov_b32 v2, v90\n v_mov_b32 v2, v1\n global_store_dword v1, v2, s[8:9]", False),  # copied, not used
        ("v_and_b32 v2, 0, v90\n global_store_dword v1, v2, s[8:9]", False),  # all undefined bits masked off
        ("v_and_b32 v2, 0xff, v90\n global_store_dword v1, v2, s[8:9]", True),
        ("v_and_b32 v2, 0xff, v90\n global_store_byte_d16_hi v1, v2, s[8:9]", False),  # the stored byte is defined
        ("v_lshlrev_b32 v2, 16, v90\n global_store_short v1, v2, s[8:9]", False),
        ("v_mov_b32 v3, 0x03020100\n v_perm_b32 v2, v90, v1, v3\n global_store_dword v1, v2, s[8:9]", False),
        ("v_mov_b32 v3, 0x07020100\n v_perm_b32 v2, v90, v1, v3\n global_store_dword v1, v2, s[8:9]", True),
        ("v_cmp_eq_u32 vcc, v90, v1\n v_cndmask_b32 v2, v1, v1, vcc\n global_store_dword v1, v2, s[8:9]", False),
        ("v_cmp_eq_u32 vcc, v90, v1\n v_cndmask_b32 v2, 0, 1, vcc\n global_store_dword v1, v2, s[8:9]", True),
        ("global_load_dword v2, v90, s[8:9]", True),
        ("v_readfirstlane_b32 s30, v90\n s_cmp_eq_u32 s30, 0\n s_cbranch_scc1 .Lx\n.Lx:", True),
        ("s_cmp_eq_u32 s60, 0\n s_cbranch_scc1 .Lx\n.Lx:", True),
        ("s_mov_b32 s61, s60", False),
        ("v_cmp_eq_u32 vcc, v90, v1\n s_and_saveexec_b64 s[30:31], vcc", True),
        ("v_cmp_eq_u32 vcc, v90, v1\n s_cbranch_vccz .Lx\n.Lx:", True),
        ("v_mad_u64_u32 v[4:5], vcc, v1, v1, v[90:91]", False),
        ("v_mov_b32 v90, 0\n v_mad_u64_u32 v[4:5], vcc, v1, v1, v[90:91]\n global_store_dword v1, v4, s[8:9]", False),
        ("v_mfma_f32_16x16x16_f16 v[4:7], v[90:91], v[92:93], 0\n global_store_dword v1, v4, s[8:9]", True),
        ("v_pk_add_f16 v2, v90, v1 op_sel_hi:[0,0]\n global_store_dword v1, v2, s[8:9]", True),
    ],
)  # fmt: skip
def test_undefined_registers(text: str, fires: bool) -> None:
    data = np.zeros(64, U32)
    if fires:
        with pytest.raises(UninitError):
            run_snippet("gfx942", text, {1: LANE * 4}, extra=data)
        run_snippet("gfx942", text.replace("v90", "v1").replace("s60", "s2").replace("v[90:91]", "v[12:13]").replace(
            "v[92:93]", "v[12:13]"), {1: LANE * 4, 12: LANE, 13: LANE}, extra=data)  # fmt: skip
    else:
        run_snippet("gfx942", text, {1: LANE * 4}, extra=data)


def test_partial_write_leaves_the_other_lanes_undefined() -> None:
    text = "s_mov_b64 exec, 0xff\n v_mov_b32 v90, 5\n {restore}\n global_store_dword v1, v90, s[8:9]"
    data = np.zeros(64, U32)
    run_snippet("gfx942", text.format(restore="s_nop 0"), {1: LANE * 4}, extra=data)
    with pytest.raises(UninitError, match="lane 8"):
        run_snippet("gfx942", text.format(restore="s_mov_b64 exec, -1"), {1: LANE * 4}, extra=data)


def test_undefined_lds_and_memory() -> None:
    text = """
      v_lshlrev_b32 v1, 2, v0
      {write}
      ds_read_b32 v2, v1 offset:4
      s_waitcnt lgkmcnt(0)
      global_store_dword v1, v2, s[8:9]
    """
    data = np.zeros(64, U32)
    run_snippet(
        "gfx942", text.format(write="ds_write2_b32 v1, v0, v0 offset0:0 offset1:1"), extra=data, lds=512
    )
    with pytest.raises(UninitError):
        run_snippet("gfx942", text.format(write="ds_write_b32 v1, v0"), extra=data, lds=512)
    k = compile_triton(
        masked_add, {"x": "*fp32", "y": "*fp32", "o": "*fp32", "n": "i32"}, {"B": 256}, ["x", "y", "o"]
    )
    x, o = np.ones(200, np.float32), np.zeros(256, np.float32)
    r = simulate_triton(k, 1, [x, x, o, 200], undefined=["o"])
    assert r.unwritten == {"o": 56 * 4}
    with pytest.raises(UninitError):
        simulate_triton(k, 1, [x, o[:200], o, 200], undefined=["y", "o"])


# -- races ---------------------------------------------------------------------------------------------------------

EXCHANGE = """
      v_lshlrev_b32 v1, 2, v0
      ds_write_b32 v1, v0
      {wait}
      {barrier}
      v_xor_b32 v2, 0x100, v1
      ds_read_b32 v3, v2
      s_waitcnt lgkmcnt(0)
"""


@pytest.mark.parametrize("arch", ARCHS)
def test_race_read_after_write(arch: str) -> None:
    good = EXCHANGE.format(wait="s_waitcnt lgkmcnt(0)", barrier="s_barrier")
    got, _, _ = run_snippet(arch, good, out=[3], lds=512, waves=2)
    assert (got[3] == (np.arange(128) ^ 64)).all()
    with pytest.raises(RaceError, match="without a barrier"):
        run_snippet(arch, EXCHANGE.format(wait="s_waitcnt lgkmcnt(0)", barrier=""), out=[3], lds=512, waves=2)
    with pytest.raises(RaceError):  # the barrier does not order a write that was not waited for
        run_snippet(arch, EXCHANGE.format(wait="", barrier="s_barrier"), out=[3], lds=512, waves=2)
    run_snippet(arch, good, out=[3], lds=512, waves=2, check=("race",))


def test_race_write_after_read_and_write_after_write() -> None:
    head = EXCHANGE.format(wait="s_waitcnt lgkmcnt(0)", barrier="s_barrier")
    again = "{barrier}\n v_add_u32 v4, 7, v0\n ds_write_b32 v1, v4\n"
    run_snippet("gfx942", head + again.format(barrier="s_barrier"), lds=512, waves=2)
    with pytest.raises(RaceError, match="read"):
        run_snippet("gfx942", head + again.format(barrier=""), lds=512, waves=2)
    same = (
        "v_and_b32 v1, 0xff, v0\n v_lshlrev_b32 v1, 2, v1\n v_and_b32 v1, 0xff, v1\n ds_write_b32 v1, {v}\n"
    )
    with pytest.raises(RaceError, match="different values"):
        run_snippet("gfx942", same.format(v="v0"), lds=512, waves=2)
    run_snippet("gfx942", same.format(v="v1"), lds=512, waves=2)  # equal values: redundant threads, no fault


def test_global_to_lds_load_must_be_waited_for() -> None:
    text = """
      s_mov_b32 m0, 0
      v_lshlrev_b32 v1, 2, v0
      v_and_b32 v1, 0xff, v1
      s_cmp_eq_u32 s2, 0
      global_load_lds_dword v1, s[8:9]
      {wait}
      ds_read_b32 v2, v1
      s_waitcnt lgkmcnt(0)
    """
    data = np.arange(64, dtype=U32)
    ok = text.format(wait="s_waitcnt vmcnt(0)")
    got, _, _ = run_snippet("gfx942", ok, out=[2], lds=512, extra=data, waves=1)
    assert (got[2] == LANE).all()
    for wait in ("s_nop 0", "s_waitcnt lgkmcnt(0)", "s_waitcnt vmcnt(1)"):
        with pytest.raises(PendingError, match="global-to-LDS"):
            run_snippet("gfx942", text.format(wait=wait), out=[2], lds=512, extra=data, waves=1)


# -- control -------------------------------------------------------------------------------------------------------


def test_endless_loop_is_bounded() -> None:
    with pytest.raises(BudgetError):
        run_snippet("gfx942", ".Lx:\n s_branch .Lx")
    _, s, _ = run_snippet("gfx942", "s_mov_b32 s30, 0\n.Lx:\n s_add_u32 s30, s30, 1\n s_cmp_lt_u32 s30, 1000\n"
                          "s_cbranch_scc1 .Lx", out_s=[30])  # fmt: skip
    assert s[30] == 1000


def test_barrier_that_some_waves_never_reach() -> None:
    """A wave that spins for ever while the others wait; one that ended counts as arrived."""
    skip = "v_readfirstlane_b32 s30, v0\n s_cmp_eq_u32 s30, 0\n s_cbranch_scc1 .Ly\n s_barrier\n{more}.Ly:\n"
    run_snippet("gfx942", skip.format(more=""), waves=2)
    with pytest.raises((DeadlockError, BudgetError)):
        run_snippet("gfx942", "v_readfirstlane_b32 s30, v0\n.Lz:\n s_cmp_eq_u32 s30, 0\n"
                    "s_cbranch_scc1 .Lz\n s_barrier",
                    waves=2)  # fmt: skip


def test_unknown_things_are_errors_that_name_them() -> None:
    with pytest.raises(UnsupportedError, match="s_memtime"):
        run_snippet("gfx942", "s_memtime s[30:31]")
    with pytest.raises(UnsupportedError, match="round"):
        run_snippet("gfx942", "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 1")
    with pytest.raises(UnsupportedError, match="v_qsad_pk_u16_u8"):
        run_snippet("gfx942", "v_qsad_pk_u16_u8 v[4:5], v[2:3], v6, v[8:9]")
    with pytest.raises(UnsupportedError, match="omod"):
        run_snippet("gfx942", "v_add_f32 v1, v2, v3 mul:2")
    with pytest.raises((DecodeError, UnsupportedError)):
        run_snippet("gfx942", ".long 0xffffffff")


# -- compiled kernels --------------------------------------------------------------------------------------------


def _softmax_case(arch: str):
    k = compile_triton(
        row_softmax, {"x": "*fp32", "o": "*fp32"}, {"N": 512}, ["x", "o"], arch=arch, num_warps=4
    )
    x = np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)
    return k, x


@pytest.mark.parametrize("arch", ARCHS)
def test_compiled_softmax_without_its_barrier_or_waits(arch: str) -> None:
    k, x = _softmax_case(arch)
    text = k.asm["amdgcn"]
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    want = e / e.sum(1, keepdims=True)

    def run(code: str) -> np.ndarray:
        o = np.zeros_like(x)
        simulate_triton(k, 3, [x, o], hsaco=assemble(code, arch))
        return o

    np.testing.assert_allclose(run(text), want, rtol=1e-5, atol=1e-7)
    for i in range(len(re.findall(r"^\ts_barrier", text, re.M))):
        with pytest.raises(RaceError):
            run(edit(text, r"^\ts_barrier$", "\ts_nop 0", nth=i))
    found = []
    for i in range(len(re.findall(r"^\ts_waitcnt .*$", text, re.M))):
        try:
            out = run(edit(text, r"^\ts_waitcnt .*$", "\ts_nop 0", nth=i))
            found.append("")
            np.testing.assert_allclose(
                out, want, rtol=1e-5, atol=1e-7
            )  # a redundant wait: before the end, say
        except (PendingError, RaceError) as err:
            found.append(err.kind)
    assert found.count("pending") >= len(found) // 2


@pytest.mark.parametrize("arch", ARCHS)
def test_compiled_matrix_kernel_waits(arch: str) -> None:
    k = compile_triton(dot_softmax, {"a": "*fp16", "b": "*fp16", "c": "*fp32", "K": "i32"}, {"BM": 32, "BK": 64},
                       ["a", "b", "c", "K"], arch=arch, num_warps=4, num_stages=2)  # fmt: skip
    rng = np.random.default_rng(1)
    a, b = (
        rng.standard_normal((32, 256)).astype(np.float16),
        rng.standard_normal((256, 32)).astype(np.float16) / 8,
    )
    b = b.astype(np.float16)
    c = np.zeros((32, 32), np.float32)
    simulate_triton(k, 1, [a, b, c, 256])
    d = a.astype(np.float64) @ b.astype(np.float64)
    e = np.exp(d - d.max(1, keepdims=True))
    np.testing.assert_allclose(c, e / e.sum(1, keepdims=True), rtol=2e-5, atol=1e-7)
    text = k.asm["amdgcn"]
    none = re.sub(r"^\ts_waitcnt .*$", "\ts_nop 0", text, flags=re.M)
    with pytest.raises((PendingError, RaceError)):
        simulate_triton(k, 1, [a, b, c, 256], hsaco=assemble(none, arch))
    no_barrier = re.sub(r"^\ts_barrier$", "\ts_nop 0", text, flags=re.M)
    with pytest.raises((RaceError, PendingError)):
        simulate_triton(k, 1, [a, b, c, 256], hsaco=assemble(no_barrier, arch))


_ = pool
