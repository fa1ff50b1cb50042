"""Memory instructions: widths, alignment, ranges, LDS, scratch, atomics, matrix operand layouts."""

from __future__ import annotations

import numpy as np
import pytest

from .sim_helpers import ARCHS, U32, ml_dtypes, pool

from ci.cdna_sim.asmkit import run_snippet  # isort: skip

LANE = np.arange(64, dtype=U32)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_global_loads_of_any_width_and_alignment(arch: str, shift: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint8)
    off = (np.random.default_rng(1).integers(0, 900, 64) * 4 + shift).astype(U32)
    text = """
      v_mov_b32 v30, -1
      v_mov_b32 v31, -1
      global_load_ubyte v10, v1, s[8:9]
      global_load_sbyte v11, v1, s[8:9] offset:3
      global_load_ushort v12, v1, s[8:9]
      global_load_sshort v13, v1, s[8:9] offset:1
      global_load_dword v14, v1, s[8:9]
      global_load_dwordx2 v[16:17], v1, s[8:9]
      global_load_dwordx3 v[18:20], v1, s[8:9] offset:5
      global_load_dwordx4 v[24:27], v1, s[8:9]
      global_load_short_d16 v30, v1, s[8:9]
      global_load_ubyte_d16_hi v31, v1, s[8:9]
    """
    got, _, _ = run_snippet(arch, text, {1: off}, out=[10, 11, 12, 13, 14, 16, 17, 18, 19, 20, 24, 25, 26, 27, 30, 31],
                            extra=data)  # fmt: skip
    for k in range(64):
        o = int(off[k])
        word = lambda at, n=4: int.from_bytes(data[at : at + n].tobytes(), "little")  # noqa: E731
        assert got[10][k] == data[o]
        assert int(got[11][k].view(np.int32)) == int(data[o + 3].view(np.int8))
        assert got[12][k] == word(o, 2)
        assert int(got[13][k].view(np.int32)) == int(np.uint16(word(o + 1, 2)).view(np.int16))
        assert got[14][k] == word(o)
        assert [got[16][k], got[17][k]] == [word(o), word(o + 4)]
        assert [got[18][k], got[19][k], got[20][k]] == [word(o + 5), word(o + 9), word(o + 13)]
        assert [got[r][k] for r in (24, 25, 26, 27)] == [word(o + 4 * j) for j in range(4)]
        assert got[30][k] == 0xFFFF0000 | word(o, 2)
        assert got[31][k] == 0xFFFF | int(data[o]) << 16


@pytest.mark.parametrize("arch", ARCHS)
def test_global_stores(arch: str) -> None:
    a, b = pool("u", 1), pool("u", 2)
    data = np.zeros(4096, np.uint8)
    ex = 0xAAAAAAAAFFFFFFFF
    text = """
      v_mul_u32_u24 v5, 40, v0
      global_store_byte v5, v2, s[8:9]
      global_store_byte_d16_hi v5, v2, s[8:9] offset:1
      global_store_short v5, v2, s[8:9] offset:3
      global_store_short_d16_hi v5, v2, s[8:9] offset:5
      global_store_dword v5, v2, s[8:9] offset:7
      global_store_dwordx2 v5, v[2:3], s[8:9] offset:12
    """
    run_snippet(arch, text, {2: a, 3: b}, extra=data, exec_mask=ex)
    for k in range(64):
        row = data[40 * k : 40 * k + 40]
        want = np.zeros(40, np.uint8)
        if ex >> k & 1:
            x, y = a[k : k + 1].view(np.uint8), b[k : k + 1].view(np.uint8)
            want[0], want[1], want[3:5], want[5:7], want[7:11] = x[0], x[2], x[:2], x[2:], x
            want[12:16], want[16:20] = x, y
        assert (row == want).all()


RSRC = """
      s_mov_b32 s12, s8
      s_and_b32 s13, s9, 0xffff
      s_mov_b32 s14, {n}
      s_mov_b32 s15, 0x27000
"""


@pytest.mark.parametrize("arch", ARCHS)
def test_buffer_range_check(arch: str) -> None:
    data = np.arange(256, dtype=np.uint8)
    off = np.array([0, 4, 96, 97, 98, 99, 100, 0x80000000, 0xFFFFFFFF, 33] * 7, U32)[:64]
    text = (
        RSRC.format(n=100)
        + """
      buffer_load_dword v10, v1, s[12:15], 0 offen
      buffer_load_ubyte v11, v1, s[12:15], 0 offen
      buffer_load_dword v12, v1, s[12:15], s20 offen offset:4
      buffer_load_dwordx2 v[14:15], off, s[12:15], 0 offset:8
      v_mov_b32 v13, 0x5a
      buffer_store_byte v13, v1, s[12:15], 0 offen offset:1
    """
    )
    ref = data.copy()
    got, _, _ = run_snippet(arch, text, {1: off}, {20: 16}, out=[10, 11, 12, 14, 15], extra=data)
    for k in range(64):
        o = int(off[k])
        word = lambda at: int.from_bytes(ref[at : at + 4].tobytes(), "little")  # noqa: E731
        assert got[10][k] == (word(o) if o + 4 <= 100 else 0)
        assert got[11][k] == (ref[o] if o < 100 else 0)
        assert got[12][k] == (word(o + 20) if o + 8 <= 100 else 0)  # soffset takes no part in the range check
        assert [got[14][k], got[15][k]] == [word(8), word(12)]
    want = ref.copy()
    for o in off:
        if int(o) + 2 <= 100:
            want[int(o) + 1] = 0x5A
    assert (data == want).all()


def test_scalar_loads() -> None:
    data = np.arange(64, dtype=U32)
    _, s, _ = run_snippet("gfx942", RSRC.format(n=20) + """
      s_load_dword s30, s[8:9], 0x8
      s_load_dwordx4 s[32:35], s[8:9], s20
      s_buffer_load_dwordx2 s[36:37], s[12:15], 0x10
      s_waitcnt lgkmcnt(0)
    """, s={20: 32}, out_s=[30, 32, 33, 34, 35, 36, 37], extra=data)  # fmt: skip
    assert [int(s[r]) for r in (30, 32, 33, 34, 35, 36, 37)] == [2, 8, 9, 10, 11, 4, 0]


@pytest.mark.parametrize("arch", ARCHS)
def test_atomics(arch: str) -> None:
    cells = np.array([5, 100, 0xFFFFFFFF, 7, 0, 0, 0, 0, 0, 0], U32)
    cells[5:6] = np.array([1.5], np.float32).view(U32)
    text = """
      v_mov_b32 v3, 0
      global_atomic_add v4, v3, v1, s[8:9] sc0
      global_atomic_umax v3, v1, s[8:9] offset:4
      global_atomic_smax v3, v1, s[8:9] offset:8
      global_atomic_xor v3, v1, s[8:9] offset:12
      global_atomic_add_f32 v3, v2, s[8:9] offset:20
      v_mov_b32 v6, 77
      v_mov_b32 v7, 0
      global_atomic_cmpswap v5, v3, v[6:7], s[8:9] offset:16 sc0
      global_atomic_add_x2 v3, v[6:7], s[8:9] offset:24
    """
    v = LANE + 3
    got, _, _ = run_snippet(
        arch, text, {1: v, 2: np.full(64, 0.25, np.float32).view(U32)}, out=[4, 5], extra=cells
    )
    assert (got[4] == 5 + np.concatenate([[0], np.cumsum(v)[:-1]])).all()
    assert cells[0] == 5 + v.sum()
    assert cells[1] == 100
    assert cells[2].view(np.int32) == 66
    assert cells[3] == 7 ^ np.bitwise_xor.reduce(v)
    assert cells[5:6].view(np.float32)[0] == 1.5 + 16
    assert cells[4] == 77
    assert list(got[5]) == [0] + [77] * 63
    assert cells[6] == 64 * 77


@pytest.mark.parametrize("arch", ARCHS)
def test_lds_reads_and_writes(arch: str) -> None:
    a = {r: pool("u", r) for r in (32, 33, 34, 35)}
    text = """
      v_lshlrev_b32 v5, 4, v0
      v_lshlrev_b32 v6, 2, v0
      ds_write_b128 v5, v[32:35]
      ds_read_b64 v[10:11], v5 offset:8
      ds_read2_b32 v[12:13], v5 offset0:1 offset1:3
      ds_read2st64_b32 v[14:15], v6 offset0:1 offset1:2
      ds_read_u8 v16, v5 offset:3
      ds_read_i8 v17, v5 offset:7
      ds_read_u16 v18, v5 offset:6
      ds_read_b32 v19, v5 offset:2
      v_mov_b32 v20, 0x11112222
      ds_read_u16_d16 v20, v5
      v_mov_b32 v21, 0x11112222
      ds_read_u8_d16_hi v21, v5
      ds_write2_b64 v5, v[32:33], v[34:35] offset0:128 offset1:129
      ds_read2_b64 v[24:27], v5 offset0:128 offset1:129
      ds_write_b8_d16_hi v5, v32 offset:2048
      ds_read_u8 v22, v5 offset:2048
    """
    outs = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 24, 25, 26, 27]
    got, _, _ = run_snippet(arch, text.replace("v_mov_b32 v21", "s_waitcnt lgkmcnt(0)\n v_mov_b32 v21"), a, out=outs,
                            lds=4096)  # fmt: skip
    mem = np.stack([a[r] for r in (32, 33, 34, 35)], 1)
    flat = mem.reshape(-1)
    by = mem.view(np.uint8)
    assert (got[10] == mem[:, 2]).all() and (got[11] == mem[:, 3]).all()
    assert (got[12] == mem[:, 1]).all() and (got[13] == mem[:, 3]).all()
    assert (got[14] == flat[64:128]).all() and (got[15] == flat[128:192]).all()
    assert (got[16] == by[:, 3]).all()
    assert (got[17].view(np.int32) == by[:, 7].view(np.int8)).all()
    assert (got[18] == mem.view(np.uint16)[:, 3]).all()
    assert (got[19] == by[:, 2:6].copy().view(U32)[:, 0]).all()
    assert (got[20] == (0x11110000 | mem.view(np.uint16)[:, 0].astype(U32))).all()
    assert (got[21] == (0x2222 | by[:, 0].astype(U32) << 16)).all()
    for k, r in enumerate((24, 25, 26, 27)):
        assert (got[r] == mem[:, k]).all()
    assert (got[22] == by[:, 2]).all()


def test_lds_inactive_lanes_may_have_garbage_addresses() -> None:
    addr = np.where(LANE < 32, LANE * 4, 0xFFFFFFF0).astype(U32)
    got, _, _ = run_snippet("gfx942", "ds_write_b32 v1, v2\n ds_read_b32 v3, v1", {1: addr, 2: LANE, 3: LANE + 5},
                            out=[3], lds=128, exec_mask=0xFFFFFFFF)  # fmt: skip
    assert (got[3] == np.where(LANE < 32, LANE, LANE + 5)).all()


def test_lds_atomics() -> None:
    got, _, _ = run_snippet("gfx942", """
      v_mov_b32 v3, 0
      v_mov_b32 v4, 0
      ds_write_b32 v3, v4
      ds_add_rtn_u32 v5, v3, v1
      ds_max_u32 v3, v2
      ds_read_b32 v6, v3
    """, {1: LANE, 2: LANE * 100}, out=[5, 6], lds=64)  # fmt: skip
    assert (got[5] == np.concatenate([[0], np.cumsum(LANE)[:-1]])).all()
    assert (got[6] == 6300).all()


def test_scratch() -> None:
    a = pool("u", 1)
    got, _, _ = run_snippet("gfx942", """
      scratch_store_dword off, v1, off offset:8
      v_mov_b32 v2, 4
      scratch_load_ushort v3, v2, off offset:6
      scratch_load_dword v4, off, off offset:8
    """, {1: a}, out=[3, 4], scratch=64)  # fmt: skip
    assert (got[4] == a).all()
    assert (got[3] == a >> 16).all()


def test_accvgpr_moves() -> None:
    a = pool("u", 1)
    got, _, _ = run_snippet("gfx942", "v_accvgpr_write_b32 a3, v1\n v_accvgpr_mov_b32 a200, a3\n"
                            "v_accvgpr_read_b32 v200, a200", {1: a}, out=[200, 256 + 3])  # fmt: skip
    assert (got[200] == a).all()
    assert (got[256 + 3] == a).all()


@pytest.mark.parametrize("width", [4, 16])
def test_global_load_lds(width: int) -> None:
    data = np.random.default_rng(0).integers(0, 2**32, 2048).astype(U32)
    perm = np.random.default_rng(1).permutation(64).astype(U32)
    op = "global_load_lds_dword" + ("x4" if width == 16 else "")
    text = f"""
      v_lshlrev_b32 v2, {4 if width == 16 else 2}, v1
      s_mov_b32 m0, 256
      s_nop 0
      {op} v2, s[8:9]
      s_waitcnt vmcnt(0)
      v_lshlrev_b32 v3, {4 if width == 16 else 2}, v0
      ds_read_b32 v4, v3 offset:{256 + width - 4}
    """
    arch = "gfx950" if width == 16 else "gfx942"
    got, _, _ = run_snippet(arch, text, {1: perm}, out=[4], lds=2048, extra=data)
    k = width // 4
    assert (got[4] == data[perm * k + k - 1]).all()


# -- matrix instructions ---------------------------------------------------------------------------------------------

_T = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "i8": np.int8}
MFMA = [
    (arch, name, m, k, t)
    for arch, name, m, k, t in [
        ("gfx942", "v_mfma_f32_16x16x16_f16", 16, 16, "f16"), ("gfx942", "v_mfma_f32_32x32x8_f16", 32, 8, "f16"),
        ("gfx942", "v_mfma_f32_16x16x16_bf16", 16, 16, "bf16"), ("gfx942", "v_mfma_f32_32x32x8_bf16", 32, 8, "bf16"),
        ("gfx942", "v_mfma_f32_16x16x4_f32", 16, 4, "f32"), ("gfx942", "v_mfma_f32_32x32x2_f32", 32, 2, "f32"),
        ("gfx942", "v_mfma_i32_16x16x32_i8", 16, 32, "i8"), ("gfx942", "v_mfma_i32_32x32x16_i8", 32, 16, "i8"),
        ("gfx942", "v_mfma_f32_16x16x32_fp8_fp8", 16, 32, "fp8"),
        ("gfx942", "v_mfma_f32_32x32x16_bf8_fp8", 32, 16, "bf8"),
        ("gfx950", "v_mfma_f32_16x16x32_f16", 16, 32, "f16"), ("gfx950", "v_mfma_f32_32x32x16_bf16", 32, 16, "bf16"),
        ("gfx950", "v_mfma_i32_16x16x64_i8", 16, 64, "i8"), ("gfx950", "v_mfma_i32_32x32x32_i8", 32, 32, "i8"),
        ("gfx950", "v_mfma_f32_16x16x32_fp8_bf8", 16, 32, "fp8"),
        ("gfx950", "v_mfma_f32_16x16x128_f8f6f4", 16, 128, "fp8s"),
        ("gfx950", "v_mfma_f32_32x32x64_f8f6f4", 32, 64, "fp8s"),
    ]
]  # fmt: skip


@pytest.mark.parametrize(("arch", "name", "m", "k", "t"), MFMA, ids=[f"{x[0]}-{x[1]}" for x in MFMA])
def test_mfma(arch: str, name: str, m: int, k: int, t: str) -> None:
    """Operands are placed lane by lane as the ISA document lays them out, and the product is checked in fp64."""
    rng = np.random.default_rng(7)
    fn, uz = arch == "gfx950", arch == "gfx942"
    fp8 = ml_dtypes.float8_e4m3fn if fn else ml_dtypes.float8_e4m3fnuz
    bf8 = ml_dtypes.float8_e5m2 if fn else ml_dtypes.float8_e5m2fnuz
    del uz
    ta = tb = _T.get(t, fp8)
    if t == "bf8":
        ta, tb = bf8, fp8
    if name.endswith("fp8_bf8"):
        tb = bf8
    if t == "i8":
        a, b = (
            rng.integers(-128, 128, (m, k)).astype(np.int8),
            rng.integers(-128, 128, (k, m)).astype(np.int8),
        )
        c: np.ndarray = rng.integers(-(2**31), 2**31, (m, m)).astype(np.int32)
    else:
        a, b = rng.standard_normal((m, k)).astype(ta), rng.standard_normal((k, m)).astype(tb)
        c = rng.standard_normal((m, m)).astype(np.float32)
    groups = 64 // m
    per = k // groups
    regs_in = per * a.dtype.itemsize // 4
    regs_out = m * m // 64
    A = np.zeros((64, per), ta)
    B = np.zeros((64, per), tb)
    C = np.zeros((64, regs_out), c.dtype)
    rows = np.zeros((64, regs_out), int)
    for lane in range(64):
        for j in range(per):
            A[lane, j] = a[lane % m, lane // m * per + j]
            B[lane, j] = b[lane // m * per + j, lane % m]
        for r in range(regs_out):
            row = 4 * (lane // 16) + r if m == 16 else 8 * (r // 4) + 4 * (lane // 32) + r % 4
            rows[lane, r] = row
            C[lane, r] = c[row, lane % m]
    wa, wb = A.view(np.uint8).reshape(64, -1).view(U32), B.view(np.uint8).reshape(64, -1).view(U32)
    v = {10 + i: wa[:, i].copy() for i in range(regs_in)} | {30 + i: wb[:, i].copy() for i in range(regs_in)}
    v |= {60 + i: C[:, i].copy().view(U32) for i in range(regs_out)}
    rng_ = lambda s, n: f"v[{s}:{s + n - 1}]" if n > 1 else f"v{s}"  # noqa: E731
    body = (f"{name} v[60:{59 + regs_out}], {rng_(10, regs_in)}, {rng_(30, regs_in)}, v[60:{59 + regs_out}]\n"
            f"{name} a[0:{regs_out - 1}], {rng_(10, regs_in)}, {rng_(30, regs_in)}, 0")  # fmt: skip
    outs = list(range(60, 60 + regs_out))
    accs = [256 + i for i in range(regs_out)]
    got, _, _ = run_snippet(arch, body, v, out=outs + accs, exec_mask=0xFFFF)  # EXEC is ignored
    for i in range(regs_out):
        for which, add in ((outs[i], C[:, i].astype(np.float64)), (accs[i], np.zeros(64))):
            prod = np.array(
                [(a[rows[q, i]].astype(np.float64) * b[:, q % m].astype(np.float64)).sum() for q in range(64)]
            )
            want = prod + add
            if t == "i8":
                assert (got[which] == (want.astype(np.int64) & 0xFFFFFFFF).astype(U32)).all()
            else:
                np.testing.assert_allclose(got[which].view(np.float32), want, rtol=3e-7, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "m", "blocks"), [("16x16x4_4b", 16, 4), ("4x4x4_16b", 4, 16), ("32x32x4_2b", 32, 2)]
)
def test_mfma_of_several_blocks(name: str, m: int, blocks: int) -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal((blocks, m, 4)).astype(np.float16) for _ in range(2))
    wa, wb = (x.reshape(64, 4).view(U32) for x in (a, b))
    n = m * m * blocks // 64
    got, _, _ = run_snippet("gfx942", f"v_mfma_f32_{name}_f16 v[60:{59 + n}], v[10:11], v[12:13], 0",
                            {10: wa[:, 0].copy(), 11: wa[:, 1].copy(), 12: wb[:, 0].copy(), 13: wb[:, 1].copy()},
                            out=list(range(60, 60 + n)))  # fmt: skip
    full = np.einsum("nik,njk->nij", a.astype(np.float64), b.astype(np.float64))
    for r in range(n):
        for q in range(64):
            if m == 4:
                blk, row, col = q // 4, r, q % 4
            elif m == 16:
                blk, row, col = r // 4, 4 * (q // 16) + r % 4, q % 16
            else:
                blk, row, col = r // 16, 8 * (r % 16 // 4) + 4 * (q // 32) + r % 4, q % 32
            assert abs(got[60 + r].view(np.float32)[q] - full[blk, row, col]) < 1e-6


def test_scaled_mfma() -> None:
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal((16, 128)).astype(ml_dtypes.float8_e4m3fn) for _ in range(2))
    sa, sb = (rng.integers(120, 134, 64).astype(U32) for _ in range(2))
    wa = a.view(np.uint8).reshape(16, 4, 32).transpose(1, 0, 2).reshape(64, 32).copy().view(U32)
    wb = b.view(np.uint8).reshape(16, 4, 32).transpose(1, 0, 2).reshape(64, 32).copy().view(U32)
    v = (
        {10 + i: wa[:, i].copy() for i in range(8)}
        | {20 + i: wb[:, i].copy() for i in range(8)}
        | {30: sa, 31: sb << 8}
    )
    got, _, _ = run_snippet("gfx950", "v_mfma_scale_f32_16x16x128_f8f6f4 v[40:43], v[10:17], v[20:27], 0, v30, v31 "
                            "op_sel:[0,1,0] op_sel_hi:[0,0,0]", v, out=[40, 41, 42, 43])  # fmt: skip
    fa = (
        a.astype(np.float64).reshape(16, 4, 32)
        * np.ldexp(1.0, sa.astype(int) - 127).reshape(4, 16).T[:, :, None]
    )
    fb = (
        b.astype(np.float64).reshape(16, 4, 32)
        * np.ldexp(1.0, sb.astype(int) - 127).reshape(4, 16).T[:, :, None]
    )
    full = fa.reshape(16, 128) @ fb.reshape(16, 128).T
    for r in range(4):
        want = np.array([full[4 * (q // 16) + r, q % 16] for q in range(64)])
        np.testing.assert_allclose(got[40 + r].view(np.float32), want, rtol=3e-7, atol=1e-5)
