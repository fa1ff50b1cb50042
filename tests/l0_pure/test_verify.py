"""The verify command: real input, synthetic input, bad input, and that it fails when a backend is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from turboquant_rocm import preset_names
from turboquant_rocm.backends._torch.reference import ReferenceOps
from turboquant_rocm.verify import load_npz, main

REAL = next(Path(__file__).parents[2].glob("examples/**/smollm2_135m.npz"))


def run(tmp_path: Path, *args: str) -> tuple[int, list[dict]]:
    report = tmp_path / "report.json"
    code = main([*args, "--json", str(report), "--repeats", "1"])
    return code, json.loads(report.read_text())["rows"] if report.exists() else []


def test_real_input_through_all_presets_and_layouts(tmp_path: Path, capsys):
    code, rows = run(tmp_path, "--input", str(REAL))
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
        assert 0.01 < r["output_error"] < 0.4, "quantisation must show, and not destroy"
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


@pytest.mark.parametrize("fault", ["decode", "nan", "store"])
def test_a_wrong_backend_fails(tmp_path: Path, monkeypatch, fault: str):
    decode, store = ReferenceOps.decode, ReferenceOps.store

    def wrong_decode(self, query, cache, table, lens, loc, most, scale, sinks, out, lse, workspace=None):
        decode(self, query, cache, table, lens, loc, most, scale * 1.05, sinks, out, lse)
        if fault == "nan":
            out[0, 0, 0] = float("nan")

    calls = []

    def wrong_store(self, key, value, cache, slots, nonfinite=None):
        calls.append(0)
        store(self, key * 1.5 if len(calls) <= 2 else key, value, cache, slots, nonfinite)

    if fault == "store":
        monkeypatch.setattr(ReferenceOps, "store", wrong_store)
    else:
        monkeypatch.setattr(ReferenceOps, "decode", wrong_decode)
    code, rows = run(tmp_path, "--synthetic", "--tokens", "64", "--preset", "4bit_nc", "--layout", "aos")
    assert code == 1
    assert not rows[0]["ok"]


def test_json_on_standard_output(capsys):
    assert main(["--synthetic", "--tokens", "40", "--preset", "k8v4", "--json", "-", "--repeats", "1"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 2


def bad_npz(tmp_path: Path, **arrays: np.ndarray) -> str:
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    return str(path)


GOOD = np.zeros((8, 2, 64), np.float32)


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
        (["--synthetic", "--head-size", "36"], "rotation=36"),
        (["--synthetic", "--num-heads", "3", "--num-kv-heads", "2"], "num_heads"),
    ],
)
def test_bad_arguments_name_themselves(capsys, args: list[str], named: str):
    assert main(args) == 2
    assert named in " ".join(capsys.readouterr().err.split())


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
