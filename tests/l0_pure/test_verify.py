"""The verify command: real input, synthetic input, bad input, and that it fails when a backend is wrong."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import store_checks
from tests.repository import ROOT
from turboquant_rocm import SpecError, get_preset, make_layout, preset_names
from turboquant_rocm.accuracy import (
    DISTORTION_SLACK,
    SKETCH_SLACK,
    _off_ideal,
    ideal_keys,
    ideal_values,
    load_npz,
)
from turboquant_rocm.backends import _REGISTRY, get_backend
from turboquant_rocm.backends._torch import reference as reference_module
from turboquant_rocm.backends._torch.reference import ReferenceOps, rotate
from turboquant_rocm.codebook import centroids, midpoints
from turboquant_rocm.verify import _target, main

constant = reference_module._constant
REAL = next(Path(__file__).parents[2].glob("examples/**/smollm2_135m.npz"))


def run(tmp_path: Path, *args: str) -> tuple[int, list[dict]]:
    report = tmp_path / "report.json"
    code = main([*args, "--json", str(report), "--repeats", "1"])
    return code, json.loads(report.read_text())["rows"] if report.exists() else []


def test_real_input_through_all_presets_and_layouts(tmp_path: Path, capsys):
    code, rows = run(
        tmp_path, "--input", str(REAL), *(x for name in preset_names() for x in ("--preset", name))
    )
    assert code == 0
    assert {(r["tensors"], r["preset"], r["layout"]) for r in rows} == {
        (t, p, layout) for t in ("l0", "l14") for p in preset_names() for layout in ("aos", "soa")
    }
    for r in rows:
        assert r["ok"]
        assert r["tokens"] == 512
        assert 2.5 < r["compression"] < 5
        assert 0.5 < r["key_nmse"] / r["key_nmse_theory"] < 1.5
        assert 0.8 < r["value_nmse"] / r["value_nmse_theory"] < 1.1
        assert r["store_exact"] == 1
        assert not r["faults"]
        # A sketch's estimates are unbiased and noisy: at 2-bit codes they leave a third of the output's energy wrong.
        worst = 0.7 if get_preset(r["preset"]).sketch else 0.4
        assert 0.01 < r["output_error"] < worst, "quantisation must show, and not destroy"
        assert r["store_ms"] > 0
        assert r["decode_ms"] > 0
    table = capsys.readouterr().out
    for preset in preset_names():
        assert preset.removeprefix("turboquant_") in table


def test_synthetic_matches_the_theory(tmp_path: Path):
    code, rows = run(tmp_path, "--synthetic", "--preset", "3bit_nc", "--preset", "k8v4", "--layout", "soa")
    assert code == 0
    assert [r["preset"] for r in rows] == ["turboquant_3bit_nc", "turboquant_k8v4"]
    assert rows[0]["key_nmse"] == pytest.approx(0.0340, abs=0.001)
    assert rows[1]["key_nmse"] == pytest.approx(rows[1]["key_nmse_theory"], rel=0.25)


# ---- faults of a backend: its reference is right -----------------------------------------------------------


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs verify with a backend whose operations are a subclass of the reference's, and returns its only row."""

    def judge(ops: type[ReferenceOps], *args: str) -> dict:
        backend = replace(get_backend("torch_reference"), name="faulty", ops="_torch.reference:FaultyOps")
        monkeypatch.setitem(_REGISTRY, "faulty", backend)
        monkeypatch.setattr(reference_module, "FaultyOps", ops, raising=False)
        chosen = args or ("--synthetic", "--tokens", "1024", "--head-size", "64")
        code, rows = run(
            tmp_path,
            *chosen,
            "--backend",
            "faulty",
            "--preset",
            "4bit_nc",
            "--layout",
            "soa",
            "--queries",
            "8",
        )
        assert len(rows) == 1
        assert rows[0]["backend"] == "faulty"
        assert code == (0 if rows[0]["ok"] else 1)
        return rows[0]

    return judge


def kinds(row: dict) -> set[str]:
    return {fault.partition(":")[0] for fault in row["faults"]}


def test_a_backend_without_a_fault_passes(faulty):
    assert faulty(ReferenceOps)["ok"]


def storing(change):
    """Operations that store what ``change`` makes of key, value and slots."""

    class Faulty(ReferenceOps):
        def store(self, key, value, cache, slots, nonfinite=None):
            super().store(*change(key.clone(), value.clone(), cache, slots.clone()), nonfinite)

    return Faulty


def lose_last_token(key, value, cache, slots):
    slots[-1] = -1
    return key, value, cache, slots


def negate_one_key(key, value, cache, slots):
    key[517, 1] *= -1
    return key, value, cache, slots


def louder_key(key, value, cache, slots):
    key[517, 1] *= 1.01
    return key, value, cache, slots


def shift_one_value(key, value, cache, slots):
    value[3, 0] += 0.05
    return key, value, cache, slots


def swap_two_tokens(key, value, cache, slots):
    slots[[5, 6]] = slots[[6, 5]]
    return key, value, cache, slots


def write_beside(key, value, cache, slots):
    cache[:] = 0
    return key, value, cache, slots


@pytest.mark.parametrize(
    "change",
    [lose_last_token, negate_one_key, louder_key, shift_one_value, swap_two_tokens, write_beside],
    ids=lambda f: f.__name__,
)
def test_one_wrong_vector_of_a_thousand_tokens_fails(faulty, change):
    row = faulty(storing(change))
    assert "store" in kinds(row)
    assert row["store_stray" if change is write_beside else "store_wrong"] > 0


def test_a_lost_count_of_nonfinite_vectors_fails(faulty, tmp_path: Path):
    class Faulty(ReferenceOps):
        def store(self, key, value, cache, slots, nonfinite=None):
            super().store(key, value, cache, slots, None)

    x = np.random.default_rng(0).standard_normal((8, 2, 64)).astype(np.float32)
    x[3, 1, 5] = np.nan
    row = faulty(Faulty, "--input", bad_npz(tmp_path, key=x, query=x, value=x))
    assert kinds(row) == {"store"}
    assert not row["nonfinite_counted"]


@pytest.mark.parametrize("head", [0, 7])
@pytest.mark.parametrize("fault", ["scale", "nan", "other head", "zero"])
def test_one_wrong_row_and_head_of_decode_fails(faulty, fault: str, head: int):
    """1 of 8 rows x 8 heads: as an average over all it would be an eighth of its size."""

    class Faulty(ReferenceOps):
        def decode(self, query, cache, table, lens, loc, most, scale, sinks, out, lse, workspace=None):
            super().decode(query, cache, table, lens, loc, most, scale, sinks, out, lse)
            row = out[3, head]
            row.copy_(
                {"scale": row * 1.02, "nan": row * math.nan, "other head": out[3, head - 1], "zero": row * 0}[
                    fault
                ]
            )

    row = faulty(Faulty)
    assert kinds(row) == {"decode"}
    assert (row["oracle_ratio"] is None) == (fault == "nan")


def test_rounding_ties_are_no_faults(faulty):
    """One code of a vector one step off, as another order of additions may round it."""

    class Tied(ReferenceOps):
        def encode(self, key, value):
            fields, bad = super().encode(key, value)
            data = fields["key_data"]
            up = (data[0, 0, 5] & 15) < 15
            data[0, 0, 5] += 1 if up else -1
            return fields, bad

    row = faulty(Tied)
    assert row["ok"], row["faults"]
    assert row["store_exact"] < 1


@pytest.mark.parametrize(("codes", "step"), [(1, 2), (4, 1)])
def test_more_than_a_rounding_tie_in_one_vector_is_a_fault(faulty, codes: int, step: int):
    """One code two steps off; four codes of 64 one step off: no order of additions rounds so."""

    class Faulty(ReferenceOps):
        def encode(self, key, value):
            fields, bad = super().encode(key, value)
            data = fields["key_data"][0, 0, :codes]
            up = (data & 15) < 8
            data += torch.where(up, step, -step).to(data.dtype)
            return fields, bad

    row = faulty(Faulty)
    assert kinds(row) == {"store"}
    assert row["store_wrong"] == 1


def test_ties_everywhere_are_faults(faulty):
    class Tied(ReferenceOps):
        def encode(self, key, value):
            fields, bad = super().encode(key, value)
            fields["key_data"][..., 5] ^= 1
            return fields, bad

    row = faulty(Tied)
    assert "store" in kinds(row)
    assert row["store_wrong"] == row["store_exact"] == 0, "no slot is wrong by itself, and all are"


# ---- faults of the reference: what the backend is compared with is wrong in the same way ------------------


def louder(store):
    return lambda self, key, value, *rest: store(self, key * 1.5, value, *rest)


def swapped_heads(store):
    return lambda self, key, value, *rest: store(self, key.flip(1), value, *rest)


def negated_values(store):
    return lambda self, key, value, *rest: store(self, key, -value, *rest)


def coarser_values(store):
    return lambda self, key, value, *rest: store(self, key, (value * 2).round() / 2, *rest)


@pytest.mark.parametrize("preset", ["k8v4", "4bit_nc", "3bit_nc"])
@pytest.mark.parametrize(
    "wrong", [louder, swapped_heads, negated_values, coarser_values], ids=lambda f: f.__name__
)
def test_a_wrong_reference_fails(tmp_path: Path, monkeypatch, wrong, preset: str):
    monkeypatch.setattr(ReferenceOps, "store", wrong(ReferenceOps.store))
    code, rows = run(tmp_path, "--synthetic", "--tokens", "64", "--head-size", "64", "--preset", preset)
    assert code == 1
    for row in rows:
        assert kinds(row) == {"distortion"}, "backend and reference agree, and both are wrong"


def test_a_wrong_head_does_not_hide_behind_a_louder_one(tmp_path: Path, monkeypatch):
    store = ReferenceOps.store

    def wrong(self, key, value, *rest):
        store(self, torch.stack([key[:, 0], -key[:, 1]], 1), value, *rest)

    monkeypatch.setattr(ReferenceOps, "store", wrong)
    key, query, value = np.random.default_rng(0).standard_normal((3, 32, 2, 64)).astype(np.float32)
    key[:, 0] *= 200
    path = bad_npz(tmp_path, key=key, query=query, value=value)
    code, rows = run(tmp_path, "--input", path, "--preset", "4bit_nc", "--layout", "soa")
    assert code == 1
    assert kinds(rows[0]) == {"distortion"}
    assert rows[0]["key_nmse"] == pytest.approx(0.0095, rel=0.1), "over all heads nothing is seen"


def no_rotation_back(x, inverse=False):
    return x if inverse else rotate(x)


def no_rotation(x, inverse=False):
    return x


def wrong_constants(kind, head_size, bits, dtype, device):
    return constant(kind, head_size, bits, dtype, device) * 1.3


@pytest.mark.parametrize("preset", ["4bit_nc", "3bit_nc"])
@pytest.mark.parametrize(
    ("name", "wrong"),
    [("rotate", no_rotation_back), ("rotate", no_rotation), ("_constant", wrong_constants)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_reference_with_a_wrong_part_fails(tmp_path: Path, monkeypatch, name: str, wrong, preset: str):
    """Without any rotation Gaussian keys look alike to a distortion: real ones, with their outlier channels, do not."""
    monkeypatch.setattr(reference_module, name, wrong)
    code, rows = run(tmp_path, "--input", str(REAL), "--preset", preset)
    assert code == 1
    assert all("distortion" in kinds(row) for row in rows)


def test_a_codebook_that_fits_nothing_fails(tmp_path: Path, monkeypatch):
    """Wrong in the one place where both the reference and the ideal quantiser read it."""
    from turboquant_rocm import accuracy

    def wide(table):
        return lambda head_size, bits: table(head_size, bits) * np.float32(4)

    monkeypatch.setattr(accuracy, "centroids", wide(centroids))
    monkeypatch.setattr(reference_module, "centroids", wide(centroids))
    monkeypatch.setattr(reference_module, "midpoints", wide(midpoints))
    reference_module._constant.cache_clear()
    try:
        code, rows = run(tmp_path, "--synthetic", "--tokens", "64", "--preset", "3bit_nc", "--layout", "soa")
    finally:
        reference_module._constant.cache_clear()
    assert code == 1
    assert kinds(rows[0]) == {"distortion"}
    assert rows[0]["off_ideal"] < DISTORTION_SLACK, "only the theoretical distortion can tell"


def test_a_rotation_that_does_not_spread_fails(tmp_path: Path, monkeypatch):
    """Missing in the one place where both read it; Gaussian keys cannot show it, the probe's loud channels do."""
    from turboquant_rocm import accuracy

    monkeypatch.setattr(accuracy, "rotation", np.eye)
    monkeypatch.setattr(reference_module, "rotate", no_rotation)
    code, rows = run(tmp_path, "--synthetic", "--tokens", "64", "--preset", "3bit_nc", "--layout", "soa")
    assert code == 1
    assert kinds(rows[0]) == {"distortion"}
    assert rows[0]["off_ideal"] < DISTORTION_SLACK
    assert rows[0]["key_nmse"] == pytest.approx(rows[0]["key_nmse_theory"], rel=0.1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: np.full_like(x, -0.37),
        lambda x: x * np.float32(1e9),
        lambda x: x * np.float32(1e-40),
        lambda x: np.where(np.arange(64) == 3, np.float32(1e5), x),
    ],
    ids=["constant", "1e9", "1e-40", "massive channel"],
)
def test_input_that_quantises_badly_is_no_fault_of_the_backend(tmp_path: Path, spoil):
    """Theory says nothing about such keys. The cost shows in the table; the exit code is about the computation."""
    x = np.random.default_rng(0).standard_normal((40, 2, 64)).astype(np.float32)
    code, rows = run(tmp_path, "--input", bad_npz(tmp_path, key=spoil(x), query=x, value=spoil(x)))
    assert [fault for row in rows for fault in row["faults"]] == []
    assert code == 0
    assert max(row["key_nmse"] for row in rows) > 0.1, "and the cost is reported"


@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize("head_size", [1, 2, 20, 28, 64, 80, 96, 112, 128, 192, 256])
def test_the_probe_meets_the_theory_at_any_head_size(head_size: int, preset: str):
    """So that the limit neither fails a good quantiser nor has room for a bad one."""
    from turboquant_rocm.accuracy import FP8_NMSE, GAUSSIAN_MSE, probe_keys

    key = probe_keys(head_size)
    for name in ("aos", "soa"):
        if head_size % (get_preset(preset).value_group or 1):
            with pytest.raises(SpecError, match=f"value_head_size={head_size} .*value_group=32"):
                make_layout(name, preset, head_size, 1, 16)
            return
        layout = make_layout(name, preset, head_size, 1, 16)
        error = (ideal_keys(key, layout) - key).square().sum() / key.square().sum()
        theory = FP8_NMSE if layout.preset.fp8_keys else GAUSSIAN_MSE[layout.preset.code_bits]
        if layout.preset.sketch:
            theory *= math.pi / 2 - 1 / head_size
        ratio = float(error) / theory
        assert ratio < 1.25
        if head_size >= 64:
            assert ratio > 0.8


@pytest.mark.parametrize("layout", ["aos", "soa"])
@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize("kind", store_checks.FINITE)
def test_the_ideal_quantiser_and_the_reference_are_one_definition(kind: str, preset: str, layout: str):
    """Two ways of computing it meet on unpleasant vectors too, so that those fail nobody; ties err alike either way."""
    g = torch.Generator().manual_seed(0)
    bound = store_checks.bound_for(preset, layout, 64, 2)
    key, value = (store_checks.hostile(kind, (16, 2, 64), g, torch.bfloat16) for _ in range(2))
    cache = bound.allocate(1, "cpu")
    bound.store(key, value, cache, torch.arange(16))
    lens = torch.tensor([16], dtype=torch.int32)
    read = bound.dequantize(cache, torch.zeros(1, 1, dtype=torch.int32), lens, dtype=torch.float64)
    slack = DISTORTION_SLACK / 5
    if bound.layout.preset.sketch and kind in ("two_level", "one_large", "minus_zero"):  # exact ties
        slack = SKETCH_SLACK
    assert _off_ideal(read.key, ideal_keys(key.double(), bound.layout), key.double()) < slack
    assert (
        _off_ideal(read.value, ideal_values(value.double(), bound.layout), value.double())
        < DISTORTION_SLACK / 5
    )


# ---- input that is not finite ------------------------------------------------------------------------------


def test_nonfinite_vectors_are_counted_and_left_out_of_the_comparison(tmp_path: Path, capsys):
    g = np.random.default_rng(0)
    key, query, value = (g.standard_normal((40, 2, 64)).astype(np.float32) for _ in range(3))
    key[3, 1, 5], key[4, 0, 0] = np.nan, np.inf
    value[7, 0, 1] = -np.inf
    query[39, 1, 2] = np.nan
    path = bad_npz(tmp_path, key=key, query=query, value=value)
    code, rows = run(tmp_path, "--input", path, "--preset", "4bit_nc")
    assert code == 0, rows[0]["faults"]
    for row in rows:
        assert [row[f"nonfinite_{n}"] for n in ("keys", "values", "queries")] == [2, 1, 1]
        assert row["output_error"] < 0.3
        assert row["key_nmse"] == pytest.approx(0.0095, rel=0.1)
    assert "2/1/1" in capsys.readouterr().out


def test_json_has_null_where_a_number_is_none(tmp_path: Path, monkeypatch):
    decode = ReferenceOps.decode

    def broken(self, query, cache, table, lens, loc, most, scale, sinks, out, lse, workspace=None):
        decode(self, query, cache, table, lens, loc, most, scale, sinks, out, lse)
        out[0, 0, 0] = float("nan")

    monkeypatch.setattr(ReferenceOps, "decode", broken)
    code, rows = run(tmp_path, "--synthetic", "--tokens", "64", "--preset", "k8v4", "--layout", "aos")
    assert code == 1
    assert rows[0]["oracle_error"] is None
    assert "NaN" not in (tmp_path / "report.json").read_text()


@pytest.mark.parametrize("preset", preset_names())
def test_zeros_are_good_input(tmp_path: Path, preset: str):
    zeros = np.zeros((8, 2, 64), np.float32)
    code, rows = run(
        tmp_path, "--input", bad_npz(tmp_path, key=zeros, query=zeros, value=zeros), "--preset", preset
    )
    assert code == 0, rows[0]["faults"]
    assert rows[0]["key_nmse"] == rows[0]["oracle_error"] == 0


# ---- the command line --------------------------------------------------------------------------------------


def test_the_table_is_whole(capsys, monkeypatch: pytest.MonkeyPatch):
    """No cell is cut, whatever the terminal says its width is, and however wide the numbers are."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--input", str(REAL), "--preset", "3bit_nc", "--layout", "aos", "--repeats", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    header = next(line for line in lines if "tensors" in line and "decode ms" in line)
    rows = [line for line in lines if line.startswith("│")]
    assert len(rows) == 2
    assert {len(line) for line in rows} == {len(header)}
    assert not any("…" in line for line in lines)
    assert len(header) >= 160, "the terminal's width was taken, or columns are gone"


@pytest.mark.parametrize(("device", "arch"), [("cpu", "cpu"), ("cuda", "gfx942"), ("cuda:1", "gfx950")])
def test_the_target_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch, device: str, arch: str):
    from turboquant_rocm import target

    found = tuple(target.Device(i, a, a, (9, 4), 192.0) for i, a in enumerate(("gfx942", "gfx950")))
    monkeypatch.setattr(target, "devices", lambda: found)
    assert _target(torch.device(device)).arch == arch


def without_torch(*args: str) -> subprocess.CompletedProcess[str]:
    code = "import sys\nfor name in ('torch', 'triton', 'flydsl'): sys.modules[name] = None\n"
    code += "import runpy\nsys.argv[:] = ['verify', *sys.argv[1:]]\n"
    code += "runpy.run_module('turboquant_rocm.verify', run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, cwd=ROOT, check=False
    )


def test_without_torch_help_works_and_a_run_says_what_is_missing():
    done = without_torch("--help")
    assert done.returncode == 0, done.stderr
    assert "--synthetic" in done.stdout
    done = without_torch("--synthetic")
    assert done.returncode == 2
    assert "PyTorch" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_torch_is_not_called_missing(monkeypatch: pytest.MonkeyPatch):
    """An import error inside of torch is another fault, with a trace of its own."""
    monkeypatch.delitem(sys.modules, "turboquant_rocm.accuracy", raising=False)
    monkeypatch.delattr("turboquant_rocm.accuracy", raising=False)
    monkeypatch.setitem(sys.modules, "turboquant_rocm.ops", None)
    with pytest.raises(ImportError):
        main(["--synthetic"])


def test_json_on_standard_output(capsys):
    assert main(["--synthetic", "--tokens", "40", "--preset", "k8v4", "--json", "-", "--repeats", "1"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 2


def bad_npz(tmp_path: Path, **arrays: np.ndarray) -> str:
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    return str(path)


GOOD = np.zeros((8, 2, 64), np.float64)


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ({"other": GOOD}, "key"),
        ({"key": GOOD, "query": GOOD}, "value"),
        ({"key": GOOD, "query": GOOD, "value": GOOD.astype(np.int32)}, "int32"),
        ({"key": GOOD, "query": GOOD[:4], "value": GOOD}, "query"),
        ({"key": GOOD, "query": GOOD[..., :32], "value": GOOD}, "query"),
        ({"key": GOOD, "query": np.zeros((8, 3, 64), np.float32), "value": GOOD}, "num_heads"),
        ({"key": GOOD[0], "query": GOOD, "value": GOOD}, "tokens"),
        ({"key": GOOD[:0], "query": GOOD[:0], "value": GOOD[:0]}, "query of bad=(0, 2, 64)"),
        ({"key": GOOD[:, :0], "query": GOOD[:, :0], "value": GOOD[:, :0]}, "query of bad=(8, 0, 64)"),
        ({"key": GOOD[..., :0], "query": GOOD[..., :0], "value": GOOD}, "query of bad=(8, 2, 0)"),
        ({"key": GOOD, "query": GOOD, "value": GOOD[..., :0]}, "value of bad=(8, 2, 0)"),
        ({"key": GOOD, "query": GOOD, "value": GOOD + 1e39}, "value=1e+39"),
        ({"key_x": GOOD - np.float64(1e300), "query_x": GOOD, "value_x": GOOD}, "key_x=-1e+300"),
    ],
)
def test_bad_input_names_what_is_wrong(tmp_path: Path, capsys, arrays: dict, named: str):
    assert main(["--input", bad_npz(tmp_path, **arrays)]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--input", "no_such_file.npz"], "no_such_file"),
        (["--synthetic", "--preset", "5bit"], "preset"),
        (["--synthetic", "--backend", "fast"], "backend"),
        (["--synthetic", "--device", "warp"], "--device"),
        (
            ["--synthetic", "--device", "meta"],
            "--device='meta' (wants cpu, or a GPU that torch can use: cuda, cuda:1 ...)",
        ),
        (["--synthetic", "--device", "cuda:99"], "--device='cuda:99'"),
        (["--synthetic", "--head-size", "36"], "rotation=36"),
        (["--synthetic", "--num-heads", "3", "--num-kv-heads", "2"], "num_heads"),
    ],
)
def test_bad_arguments_name_themselves(capsys, args: list[str], named: str):
    assert main(args) == 2
    assert named in " ".join(capsys.readouterr().err.split())


def test_values_beyond_fp16_are_refused_and_fit_bf16(tmp_path: Path, capsys):
    path = bad_npz(tmp_path, key=GOOD, query=GOOD, value=GOOD + 1e5)
    assert main(["--input", path, "--dtype", "fp16"]) == 2
    error = capsys.readouterr().err
    assert "value=100000.0" in error
    assert "--dtype fp16" in error
    assert main(["--input", path, "--preset", "4bit_nc", "--repeats", "1"]) == 0


@pytest.mark.parametrize("where", ["no/such/folder/x.json", "."])
def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys, monkeypatch, where: str
):
    from turboquant_rocm import accuracy

    monkeypatch.setattr(accuracy, "measure", lambda *a: pytest.fail("the work was done for nothing"))
    assert main(["--synthetic", "--json", str(tmp_path / where)]) == 2
    assert "--json=" in capsys.readouterr().err


def test_a_report_that_fails_to_be_written_is_no_traceback(tmp_path: Path, capsys, monkeypatch):
    from turboquant_rocm import verify

    path = tmp_path / ("x" * 300 + ".json")  # longer than a file name can be
    small = ["--synthetic", "--tokens", "8", "--preset", "k8v4", "--repeats", "1", "--json", str(path)]
    assert main(small) == 2
    assert "--json=" in capsys.readouterr().err
    monkeypatch.setattr(verify, "_check_writable", lambda path: None)  # it was fine at the start
    assert main(small) == 2
    assert "--json=" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args",
    [
        ["--seed", str(2**70)],
        ["--seed", "-1"],
        ["--tokens", "0"],
        ["--tokens", "1e3"],
        ["--head-size", str(10**30)],
        ["--repeats", "0"],
    ],
    ids=" ".join,
)
def test_numbers_out_of_range_name_their_option(capsys, args: list[str]):
    with pytest.raises(SystemExit) as stop:
        main(["--synthetic", *args])
    assert stop.value.code == 2
    assert f"argument {args[0]}" in capsys.readouterr().err


def test_largest_seed(capsys):
    seed = str(2**63 - 1)
    assert main(["--synthetic", "--tokens", "8", "--preset", "k8v4", "--repeats", "1", "--seed", seed]) == 0


def test_too_little_memory_is_an_error_of_the_arguments(capsys, monkeypatch: pytest.MonkeyPatch):
    from turboquant_rocm import accuracy

    def fail(*_: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 1 PB")

    monkeypatch.setattr(accuracy, "synthetic", fail)
    assert main(["--synthetic"]) == 2
    assert "--tokens" in capsys.readouterr().err
    monkeypatch.setattr(accuracy, "synthetic", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["--synthetic"])


def test_garbage_file(tmp_path: Path, capsys):
    path = tmp_path / "garbage.npz"
    path.write_bytes(b"PK\x03\x04 not a zip")
    assert main(["--input", str(path)]) == 2
    assert "--input" in capsys.readouterr().err


def test_bit_patterns_and_floats_load_alike(tmp_path: Path):
    x = torch.randn(8, 2, 64).to(torch.bfloat16)
    bits = x.view(torch.int16).numpy().view(np.uint16)
    np.savez(tmp_path / "a.npz", **dict.fromkeys(("key_x", "query_x", "value_x"), bits))
    np.savez(tmp_path / "b.npz", **dict.fromkeys(("key", "query", "value"), x.float().numpy()))
    (a,), (b,) = load_npz(tmp_path / "a.npz"), load_npz(tmp_path / "b.npz")
    assert (a.name, b.name) == ("x", "b")
    assert torch.equal(a.key, b.key)
