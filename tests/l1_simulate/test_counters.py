"""Counters, the roofline model, budgets and the command line."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from . import triton_kernels as tk
from .sim_helpers import U32

from ci.cdna_sim import Counters, compile_triton, model, roofline, simulate_triton  # isort: skip
from ci.cdna_sim import budgets, cli  # isort: skip
from ci.cdna_sim.asmkit import module, run_snippet  # isort: skip
from ci.cdna_sim.ldsops import bank_cycles  # isort: skip

LANE = np.arange(64, dtype=U32)


def test_instruction_classes_and_bytes() -> None:
    base = run_snippet("gfx942", "s_nop 0", {1: LANE}, lds=1024)[2].counters
    text = """
      v_add_u32 v2, v1, v1
      s_add_u32 s30, s8, 1
      v_lshlrev_b32 v3, 2, v0
      ds_write_b32 v3, v2
      ds_read_b64 v[4:5], v3
      global_load_dwordx2 v[6:7], v1, s[8:9]
      v_mfma_f32_16x16x16_f16 v[8:11], v[12:13], v[14:15], 0
      s_branch .Lx
    .Lx:
    """
    c = run_snippet("gfx942", text, {1: LANE * 0}, lds=1024, check=("oob",))[2].counters
    diff = Counter(c.instructions)
    diff.subtract(base.instructions)
    assert {k: n for k, n in diff.items() if n} == {
        "valu": 2,
        "salu": 1,
        "lds": 2,
        "vmem": 1,
        "mfma": 1,
        "branch": 1,
        "other": -1,
    }
    assert c.bytes["lds_write32"] == 256
    assert c.bytes["lds_read64"] == 512
    assert c.bytes["load64"] == 512


def test_loops_count_every_iteration() -> None:
    k = compile_triton(
        tk.masked_add, {"x": "*fp32", "y": "*fp32", "o": "*fp32", "n": "i32"}, {"B": 256}, ["x", "y", "o"]
    )
    x = np.ones(2048, np.float32)
    one = simulate_triton(k, 1, [x, x, x.copy(), 256]).counters
    eight = simulate_triton(k, 8, [x, x, x.copy(), 2048]).counters
    assert eight.total == 8 * one.total
    assert eight.loaded() == 8 * one.loaded() > 0


@pytest.mark.parametrize(
    ("stride", "nbytes", "banks", "extra"),
    [(4, 4, 32, 0), (8, 4, 32, 2 * 1), (128, 4, 32, 2 * 31), (0, 4, 32, 0), (8, 8, 32, 0), (16, 16, 32, 0),
     (256, 4, 64, 63), (4, 4, 64, 0)],
)  # fmt: skip
def test_bank_conflicts(stride: int, nbytes: int, banks: int, extra: int) -> None:
    assert bank_cycles(np.arange(64) * stride, np.ones(64, bool), nbytes, banks) == extra


def test_roofline_of_the_datasheets() -> None:
    # 134 bytes per 256 elements at 4/4 bits, D = 128
    assert roofline("gfx950", 134 / 256) == pytest.approx(64 * 256 * 2.4e9 * (134 / 256) / 8e12)
    assert 2.4 < roofline("gfx950", 134 / 256) < 2.7
    assert 3.9 < roofline("gfx942", 134 / 256) < 4.2
    c = Counters(instructions=Counter(valu=90, mfma=10))
    m = model("gfx950", c, 1000, 134 / 256)
    assert m["lane_instructions_per_element"] == 6.4
    assert m["bound"] == "issue"
    assert model("gfx950", c, 10**6, 134 / 256)["bound"] == "bandwidth"


def test_budget_check_fails_on_a_regression() -> None:
    good = {"k": {"issue": 100, "total": 200, "lds": 10, "vmem": 5, "bank_conflict_cycles": 0}}
    assert budgets.check(good, good, 0.03) == ([], [])
    worse = {"k": {**good["k"], "issue": 104}}
    bad, _ = budgets.check(worse, good, 0.03)
    assert len(bad) == 1
    assert "issue 104 exceeds 100" in bad[0]
    bad, _ = budgets.check({"k": {**good["k"], "bank_conflict_cycles": 1}}, good, 0.03)
    assert len(bad) == 1
    assert budgets.check({}, good, 0.03)[0] == [" k: has a budget but did not run"]
    assert budgets.check(good, {}, 0.03)[0] == [" k: no budget"]
    assert budgets.check({"k": {**good["k"], "issue": 50}}, good, 0.03)[1]


def test_budget_file_round_trip(tmp_path: Path) -> None:
    from ci.cdna_sim.workloads import Measured, Workload

    w = Workload("gfx942", "soa", "turboquant_4bit_nc", 64)
    m = Measured(w, {"decode_kernel": Counters(instructions=Counter(valu=50))}, {"decode_kernel": 10}, 0.5)
    path = tmp_path / "b.yaml"
    budgets.update([m], path)
    data = budgets.load(path)
    assert budgets.check_measured(m, data) == ([], [])
    m.kernels["decode_kernel"].instructions["valu"] = 60
    assert len(budgets.check_measured(m, data)[0]) == 2  # issue and total


def test_committed_budget_file_is_complete() -> None:
    from ci.cdna_sim import workloads

    data = budgets.load()
    kernels = {f"{kind}_kernel" for kind in cli.KERNELS if kind != "all"}
    for w in workloads.selected(workloads.ARCHS, workloads.LAYOUTS, workloads.PRESETS, [64, 128]):
        assert set(data["budgets"][w.arch][w.key]) == kernels, w


@pytest.mark.parametrize("head_size", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_kernels_keep_to_their_budgets(arch: str, head_size: int, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["all", "--arch", arch, "--head-size", str(head_size), "--check"])
    out = capsys.readouterr().out
    assert code == 0, out[-4000:]
    assert "…" not in out, "a number in a table is cut off"


@pytest.mark.parametrize(
    ("args", "says"),
    [(["sotre"], "kernel sotre (wants store,"), (["store", "--update"], "wants the kernel all")],
)
def test_command_line_refuses(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_command_line_lists_a_code_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    f = tmp_path / "k.hsaco"
    f.write_bytes(module("v_add_u32 v1, v2, v3", "gfx950"))
    assert cli.main([str(f)]) == 0
    out = capsys.readouterr().out
    assert "v_add_u32" in out
    assert "gfx950" in out
