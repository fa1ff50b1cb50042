"""ci/compare.py: what a difference between legs is called, and on whom it is blamed.

The results are real: cases of the reference leg, run as several legs, one of them with a fault seeded into its
operations.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ci import baseline
from ci.caselist import Case, case_list, normal, store_inputs
from ci.compare import CompareError, compare, load, main, noise, render
from ci.leg import SCHEMA
from ci.legs import load_legs
from ci.modes import ReferenceMode
from ci.runner import backends_of, run_cases
from turboquant_rocm import get_preset
from turboquant_rocm.layouts.views import field_view
from turboquant_rocm.presets import serving_names

LEG = load_legs()["cpu-reference"]
CASES = [
    c
    for c in case_list()
    if c.preset == "turboquant_4bit_nc" and c.head_size == 64 and c.layout == "soa" and c.block_size == 16
]
Fault = Callable[[Any], None]


class FaultyMode(ReferenceMode):
    """The reference, with ``fault`` done to the operations of every layer that is bound."""

    def __init__(self, fault: Fault | None = None) -> None:
        super().__init__(LEG)
        self.fault = fault

    def bind(self, *args: Any, **more: Any) -> Any:
        bound = super().bind(*args, **more)
        if self.fault is not None:
            self.fault(bound)
        return bound


def swapped_nibble(bound: Any) -> None:
    """Store: the first byte of the key codes of one token and head has its nibbles swapped."""
    store = bound.ops.store

    def wrong(key: Any, value: Any, cache: Any, slots: Any, nonfinite: Any = None) -> None:
        store(key, value, cache, slots, nonfinite)
        view = field_view(cache, bound.layout, "key_data")
        slot = int(slots[slots >= 0][0])
        byte = view[slot // bound.layout.block_size, slot % bound.layout.block_size, 1, 0]
        # the codes of one vector are hardly all equal, but a byte may be
        view[slot // bound.layout.block_size, slot % bound.layout.block_size, 1, 0] = ~byte

    bound.ops.store = wrong


def wrong_pad(bound: Any) -> None:
    """Store: a byte of a block that nobody stores to is written."""
    store = bound.ops.store

    def wrong(key: Any, value: Any, cache: Any, slots: Any, nonfinite: Any = None) -> None:
        store(key, value, cache, slots, nonfinite)
        used = set((slots[slots >= 0] // bound.layout.block_size).tolist())
        free = next((b for b in range(cache.shape[0]) if b not in used), None)
        if free is not None:
            field_view(cache, bound.layout, "value_zero")[free, 3, 1, 0] = 0

    bound.ops.store = wrong


def missing_rescale(bound: Any) -> None:
    """Decode: one query head is 3 % too large."""
    decode = bound.ops.decode

    def wrong(*args: Any) -> None:
        decode(*args)
        args[8][:, 1] *= 1.03

    bound.ops.decode = wrong


def wrong_lse(bound: Any) -> None:
    """Decode: the logarithm is off by 0.05."""
    decode = bound.ops.decode

    def wrong(*args: Any) -> None:
        decode(*args)
        args[9].add_(0.05)

    bound.ops.decode = wrong


def not_counted(bound: Any) -> None:
    """Store: vectors with NaN are not counted."""
    store = bound.ops.store
    bound.ops.store = lambda k, v, c, s, n=None: store(k, v, c, s, None)


def write(folder: Path, leg: str, mode: Any, cases: list[Case] = CASES, **more: Any) -> Path:
    """A result file as ci/leg.py would write it."""
    folder.mkdir(exist_ok=True)
    records, runner = run_cases(mode, cases, repeats=2)
    problems = [f"case failed: {r['id']}" for r in records if r["status"] == "failed"]
    data = {
        "schema": SCHEMA, "leg": leg, "status": "failed" if problems else "passed", "partial": False, "long": False,
        "problems": problems, "tests": {"passed": 3, "failed": [], "skipped": []}, "device": {"name": leg},
        "versions": {"torch": "2"}, "cases": records, "seconds": 1.0, **more,
    }  # fmt: skip
    path = folder / f"{leg}.json"
    path.write_text(json.dumps(data))
    np.savez(path.with_suffix(".npz"), **runner.arrays)
    np.savez(path.with_suffix(".bytes.npz"), **runner.caches)
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three legs that agree."""
    folder = tmp_path_factory.mktemp("good")
    return [write(folder, name, FaultyMode()) for name in ("cpu-reference", "sim-gfx942", "nvidia")]


def edit(path: Path, folder: Path, change: Callable[[dict[str, Any]], None], name: str = "") -> Path:
    """A copy of a result file, changed, with the arrays beside it."""
    data = json.loads(path.read_text())
    change(data)
    folder.mkdir(exist_ok=True)
    new = folder / (name or path.name)
    new.write_text(json.dumps(data))
    for suffix in (".npz", ".bytes.npz"):
        new.with_suffix(suffix).write_bytes(path.with_suffix(suffix).read_bytes())
    return new


# ---- agreement -------------------------------------------------------------------------------------------


def test_legs_that_agree(good: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    report = tmp_path / "report.md"
    assert main([*map(str, good), "--report", str(report)]) == 0
    text = report.read_text()
    stores = sum(c.kind == "store" for c in CASES)
    assert stores >= 2
    assert f"{stores} of {stores} cases that ran on several legs have identical cache bytes" in text
    assert "no regression" in text.splitlines()[0]
    assert all(name in text for name in ("cpu-reference", "sim-gfx942", "nvidia"))
    assert "no regression" in capsys.readouterr().out


def test_the_report_goes_to_standard_output(good: list[Path], capsys: pytest.CaptureFixture[str]):
    assert main([str(good[0])]) == 0
    assert capsys.readouterr().out.startswith("# Comparison of cpu-reference: no regression")


# ---- seeded faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "kind", "case", "says"),
    [
        (
            swapped_nibble,
            "store",
            "store/golden/4bit_nc-D64-bf16-soa-bs16",
            "cache bytes differ from cpu-reference's",
        ),
        (wrong_pad, "store", "store/golden/4bit_nc-D64-bf16-soa-bs16", "in value_zero; 1 of"),
        (
            not_counted,
            "store",
            "store/hostile/4bit_nc-D64-bf16-soa-bs16",
            "counted [0, 0] non-finite vectors",
        ),
        (
            missing_rescale,
            "output",
            "decode/plain/4bit_nc-D64-bf16-soa-bs16-G4",
            "out differs from cpu-reference's",
        ),
        (
            wrong_lse,
            "output",
            "decode/plain/4bit_nc-D64-bf16-soa-bs16-G4",
            "lse differs from cpu-reference's",
        ),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_fault_in_one_leg_is_reported_and_named(
    good: list[Path], tmp_path: Path, fault: Fault, kind: str, case: str, says: str
):
    bad = write(tmp_path, "sim-gfx950", FaultyMode(fault))
    # The leg itself must not have noticed, so that it is the comparison that finds the fault.
    bad = edit(bad, tmp_path / "quiet", lambda d: d.update(status="passed", problems=[]))
    report = tmp_path / "report.md"
    assert main([*map(str, good), str(bad), "--report", str(report)]) == 1
    found = compare([load(p) for p in (*good, bad)]).regressions
    assert {r.leg for r in found} == {"sim-gfx950"}, "only the faulty leg is blamed"
    assert {r.kind for r in found} == {kind}
    named = [r for r in found if r.case.startswith(case)]
    assert named
    assert says in named[0].what
    text = report.read_text()
    assert all(str(r) in text for r in found), "the report names every regression"


@pytest.mark.parametrize("fault", [swapped_nibble, wrong_pad, missing_rescale, wrong_lse])
def test_the_leg_itself_sees_the_fault_too(fault: Fault):
    """Golden vectors and the fp64 oracle, without any other leg."""
    records, _ = run_cases(FaultyMode(fault), CASES, repeats=0)
    assert any(r["status"] == "failed" for r in records)


def test_the_first_wrong_byte_is_located(good: list[Path], tmp_path: Path):
    bad = write(tmp_path, "sim-gfx950", FaultyMode(swapped_nibble))
    found = [
        r for r in compare([load(good[0]), load(bad)]).regressions if r.kind == "store" and "golden" in r.case
    ]
    assert "in key_data; 1 of" in found[0].what
    assert "the first in block" in found[0].what


def test_without_stored_caches_the_fields_are_named(good: list[Path], tmp_path: Path):
    bad = write(tmp_path, "sim-gfx950", FaultyMode(swapped_nibble))
    bad.with_suffix(".bytes.npz").unlink()
    found = [r for r in compare([load(good[0]), load(bad)]).regressions if r.kind == "store"]
    assert found[0].what.endswith("in key_data")


def test_other_inputs_are_said_and_not_compared(good: list[Path], tmp_path: Path):
    other = edit(good[1], tmp_path, lambda d: d["cases"][0].update(inputs="0", digest="0"))
    (regression,) = compare([load(good[0]), load(other)]).regressions
    assert (regression.kind, regression.leg) == ("inputs", "sim-gfx942")


# ---- legs and coverage -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"status": "failed", "problems": ["test skipped: x: no GPU"]}, "test skipped: x: no GPU"),
        ({"status": "failed", "problems": []}, "without a reason"),
        ({"partial": True}, "partial"),
        ({"tests": {"passed": 0, "failed": [], "skipped": []}}, "no test has passed"),
        ({"tests": None}, "no test has passed"),
    ],
)
def test_a_leg_that_failed_is_a_regression(
    good: list[Path], tmp_path: Path, change: dict[str, Any], says: str
):
    bad = edit(good[2], tmp_path, lambda d: d.update(change))
    assert main([str(good[0]), str(bad)]) == 1
    (regression,) = compare([load(good[0]), load(bad)]).regressions
    assert (regression.kind, regression.leg) == ("leg", "nvidia")
    assert says in regression.what


def test_a_case_that_did_not_run_is_named(good: list[Path], tmp_path: Path):
    gone = json.loads(good[1].read_text())["cases"][0]["id"]
    bad = edit(good[1], tmp_path, lambda d: d["cases"].pop(0))
    (regression,) = compare([load(good[0]), load(bad)]).regressions
    assert (regression.kind, regression.leg, regression.case) == ("coverage", "sim-gfx942", gone)


def test_a_leg_without_a_result_file(good: list[Path], tmp_path: Path):
    report = tmp_path / "report.md"
    assert main([*map(str, good), "--expect", "cpu-reference,mi300", "--report", str(report)]) == 1
    assert "mi300: no result file" in report.read_text()
    assert main([*map(str, good), "--expect", "nvidia"]) == 0


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": 99}', '{"schema": 1}', '{"schema": 1, "leg": "x", "cases": [1]}']
)
def test_a_file_that_is_no_result(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert main([str(path)]) == 2
    assert "x.json" in capsys.readouterr().err


def test_two_results_of_a_leg_need_a_baseline(good: list[Path]):
    with pytest.raises(CompareError, match="baseline"):
        compare([load(good[0]), load(good[0])])


# ---- baseline --------------------------------------------------------------------------------------------


def test_against_a_baseline(good: list[Path], tmp_path: Path):
    stored = edit(good[2], tmp_path / "baselines", lambda _: None)
    assert main([str(good[2]), "--baseline", str(stored.parent)]) == 0
    bad = write(tmp_path, "nvidia", FaultyMode(swapped_nibble))
    found = compare([load(bad)], {"nvidia": load(stored, "nvidia (baseline)")}).regressions
    store = [r for r in found if r.kind == "store"]
    assert store
    assert {r.leg for r in store} == {"nvidia"}
    assert "differ from nvidia (baseline)'s" in store[0].what


CLEAN = {"commit": "0" * 40, "dirty": False}


def test_storing_a_baseline(good: list[Path], tmp_path: Path):
    """Stored without outputs, a baseline still finds other bytes and more instructions; the report says so."""
    made = edit(good[1], tmp_path / "made", lambda d: d.update(source=CLEAN))
    folder = tmp_path / "baselines"
    assert baseline.main([str(made), "--into", str(folder)]) == 0
    assert [p.name for p in folder.iterdir()] == ["sim-gfx942.json"]
    stored = load(folder / "sim-gfx942.json")
    assert [set(r) & {"wall_s", "cpu_s"} for r in stored.data["cases"]] == [set()] * len(CASES)
    report = tmp_path / "report.md"
    assert main([str(made), "--baseline", str(folder), "--report", str(report)]) == 0
    assert "Stored without outputs" in report.read_text()
    bad = write(tmp_path / "bad", "sim-gfx942", FaultyMode(swapped_nibble))
    found = compare([load(bad)], {"sim-gfx942": stored}).regressions
    assert "store" in {r.kind for r in found}


def test_a_hardware_baseline_keeps_its_outputs(good: list[Path], tmp_path: Path):
    made = edit(good[2], tmp_path / "made", lambda _: None)  # made outside git
    folder = tmp_path / "baselines"
    assert baseline.main([str(made), "--into", str(folder)]) == 1
    assert baseline.main([str(made), "--into", str(folder), "--commit", "a" * 40]) == 0
    assert sorted(p.name for p in folder.iterdir()) == ["nvidia.json", "nvidia.npz"]
    assert json.loads((folder / "nvidia.json").read_text())["source"]["commit"] == "a" * 40
    bad = write(tmp_path / "bad", "nvidia", FaultyMode(missing_rescale))
    found = compare([load(bad)], {"nvidia": load(folder / "nvidia.json")}).regressions
    assert "output" in {r.kind for r in found}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"status": "failed"}, "status='failed' (wants passed)"),
        ({"partial": True}, "partial (wants a run without"),
        ({"source": {}}, "no commit in it"),
        ({"source": {**CLEAN, "dirty": True}}, "uncommitted changes"),
        ({"leg": "mi400"}, "no leg called mi400"),
    ],
)
def test_what_may_not_become_a_baseline(
    good: list[Path], tmp_path: Path, change: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
):
    made = edit(good[1], tmp_path / "made", lambda d: d.update({"source": CLEAN, **change}))
    assert baseline.main([str(good[0]), str(made), "--into", str(tmp_path / "none")]) == 1
    assert says in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def on_device(seconds: list[float], name: str = "H", **more: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        data["device"] = {"name": name}
        for record in data["cases"]:
            record["route"]["mode"] = "device"
            record["seconds"] = seconds
            record.update(more)

    return change


STEADY = [0.0100, 0.0101, 0.0100, 0.0099, 0.0100]


@pytest.mark.parametrize(
    ("now", "slower"),
    [
        ([t * 1.03 for t in STEADY], False),  # within the floor
        ([t * 1.3 for t in STEADY], True),
        ([t * 0.5 for t in STEADY], False),
        ([0.010, 0.020, 0.013, 0.018, 0.012], False),  # noisy: the best call is as fast as ever
        ([0.013, 0.0131, 0.0130, 0.0129, 0.100], True),  # one outlier hides nothing
    ],
)
def test_timings(good: list[Path], tmp_path: Path, now: list[float], slower: bool):
    old = edit(good[2], tmp_path / "old", on_device(STEADY))
    new = edit(good[2], tmp_path / "new", on_device(now))
    c = compare([load(new)], {"nvidia": load(old)})
    assert bool(c.regressions) is slower
    assert {r.kind for r in c.regressions} <= {"time"}
    if slower:
        assert len(c.regressions) == len(c.timings) == len(CASES)
        assert "of the baseline's time" in c.regressions[0].what
    assert "Timings against the baseline" in render(c)


def test_timings_of_other_devices_get_no_verdict(good: list[Path], tmp_path: Path):
    old = edit(good[2], tmp_path / "old", on_device(STEADY, "one"))
    new = edit(good[2], tmp_path / "new", on_device([t * 9 for t in STEADY], "another"))
    c = compare([load(new)], {"nvidia": load(old)})
    assert c.regressions == []
    assert "9.00x" in render(c)


def test_noise():
    median, error = noise([1.0, 1.0, 1.0, 5.0])
    assert (median, error) == (1.0, 0.0)
    assert noise([1.0])[1] == float("inf")
    assert noise([1.0, 2.0, 3.0])[1] > 0.2


@pytest.mark.parametrize(("count", "worse"), [(1000, False), (1015, False), (1100, True), (500, False)])
def test_counters(good: list[Path], tmp_path: Path, count: int, worse: bool):
    def counting(number: int) -> Callable[[dict[str, Any]], None]:
        return lambda d: d["cases"][0].update(counters={"valu": number, "launches": 1})

    old = edit(good[1], tmp_path / "old", counting(1000))
    new = edit(good[1], tmp_path / "new", counting(count))
    c = compare([load(new)], {"sim-gfx942": load(old)})
    assert bool(c.regressions) is worse
    if worse:
        assert c.regressions[0].what == "valu rose from 1000 to 1100 (+10.0%)"


def compiling(**kernels: dict[str, int]) -> Callable[[dict[str, Any]], None]:
    return lambda d: d.update(leg="compile-all", cases=[], compiled=kernels)


SOUND = {"registers": 128, "spills": 0, "lds": 2048}


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (SOUND, ""),
        ({**SOUND, "registers": 120, "lds": 0}, ""),
        ({**SOUND, "registers": 130}, ""),  # within the floor
        ({**SOUND, "registers": 136}, "registers rose from 128 to 136"),
        ({**SOUND, "spills": 1}, "spills rose from 0 to 1"),
        ({**SOUND, "lds": 4096}, "lds rose from 2048 to 4096"),
        (None, "was not compiled, but was in the baseline"),
    ],
)
def test_compiled_kernels(good: list[Path], tmp_path: Path, now: dict[str, int] | None, says: str):
    kernels = {"decode": now} if now else {}
    old = edit(good[1], tmp_path / "old", compiling(decode=SOUND), "compile-all.json")
    new = edit(good[1], tmp_path / "new", compiling(another=SOUND, **kernels), "compile-all.json")
    found = compare([load(new)], {"compile-all": load(old)}).regressions
    assert [(r.leg, r.case, r.what) for r in found] == ([("compile-all", "decode", says)] if says else [])
    report = tmp_path / "report.md"
    assert main([str(new), "--baseline", str(old), "--report", str(report)]) == bool(says)
    assert says in report.read_text()


def test_a_case_that_the_baseline_had(good: list[Path], tmp_path: Path):
    def refuse(data: dict[str, Any]) -> None:
        data["cases"][0] = {
            **{k: data["cases"][0][k] for k in ("id", "kind", "backend")}, "status": "refused", "why": "head_size=64",
        }  # fmt: skip

    new = edit(good[1], tmp_path, refuse)
    (regression,) = compare([load(new)], {"sim-gfx942": load(good[1])}).regressions
    assert regression.kind == "coverage"
    assert "is refused: head_size=64, but ran in the baseline" in regression.what


# ---- the case list ---------------------------------------------------------------------------------------


def test_case_names_are_unique_and_the_long_list_contains_the_default_one():
    default, long, device = case_list(), case_list(long=True), case_list(long=True, device=True)
    for cases in (default, long, device):
        assert len({c.id for c in cases}) == len(cases)
    assert {c.id for c in default} < {c.id for c in long} < {c.id for c in device}
    stores = {(c.preset, c.layout, c.head_size, c.dtype) for c in default if c.kind == "store"}
    assert set(serving_names()) < {c.preset for c in default}
    for preset in serving_names():
        for layout in ("soa", "aos"):
            for head_size in (64, 128, 256):
                assert {(preset, layout, head_size, dtype) for dtype in ("bf16", "fp16")} <= stores
                assert any(
                    (c.kind, c.preset, c.layout, c.head_size) == ("decode", preset, layout, head_size)
                    for c in default
                )


def test_cases_with_rotated_values():
    """On every leg that runs cases, by the backends that read such bytes and by no others."""
    rotated = [c for c in case_list() if get_preset(c.preset).rotated_values]
    plain = [c for c in case_list() if c not in rotated]
    for kind in ("store", "decode", "dequantize"):
        assert {c.head_size for c in rotated if c.kind == kind} == {64, 128}
    assert {"window", "sinks", "queries"} <= {c.label for c in rotated if c.kind == "decode"}
    for leg in load_legs().values():
        if not leg.runs_cases:
            continue
        serving = {"triton_rotated", "torch_reference"} & set(leg.backends)
        assert serving, leg.name
        for case in rotated:
            assert set(backends_of(leg, case)) == serving
        for case in plain:
            assert "triton_rotated" not in backends_of(leg, case)
        assert {name for case in plain for name in backends_of(leg, case)} == set(leg.backends) - {
            "triton_rotated"
        }


def test_inputs_are_normal_enough_and_always_the_same():
    made = normal((400, 64), 5)
    assert abs(float(made.mean())) < 0.02
    assert abs(float(made.std()) - 1) < 0.02
    # Fixed bits: a change of these numbers makes every stored baseline useless.
    assert normal((4,), 1).view(np.uint32).tolist() == FIXED


FIXED = [3199761920, 1025724416, 3211101184, 3187728384]


def test_layouts_share_their_inputs():
    case = next(c for c in CASES if c.kind == "store" and not c.golden)
    a, b = store_inputs(case), store_inputs(replace(case, layout="aos"))
    assert torch.equal(a.key.view(torch.int16), b.key.view(torch.int16))
    assert torch.equal(a.slots, b.slots)
