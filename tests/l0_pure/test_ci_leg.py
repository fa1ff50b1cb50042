"""ci/leg.py: what makes a leg fail. No leg goes green by skipping, by testing nothing, or by dying."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

import ci.leg
from ci.leg import environment, judge_cases, judge_tests, main, read_junit
from ci.legs import Leg, MaySkip

KNOWN = ("torch_reference", "triton_soa", "triton_aos")


def leg(**more: Any) -> Leg:
    fields: dict[str, Any] = {
        "name": "one", "title": "x", "mode": "reference", "target": "cpu", "tests": ("tests",),
        "runner": ("ubuntu-latest",), "timeout_minutes": 5, "backends": {"torch_reference": "all"},
        "may_skip": (MaySkip(": no GPU", "there is none"),),
    }  # fmt: skip
    return Leg(**{**fields, **more})


def report(passed: int = 3, failed: Any = (), skipped: Any = ()) -> dict[str, Any]:
    return {
        "passed": passed,
        "xfailed": 0,
        "failed": [{"test": t, "why": w} for t, w in failed],
        "skipped": [{"test": t, "why": w} for t, w in skipped],
        "seconds": 1.0,
    }


# ---- tests -----------------------------------------------------------------------------------------------


def test_passing_tests_are_no_problem():
    assert judge_tests(leg(), report(), 0, KNOWN) == []


def test_zero_tests_is_a_failure():
    for code in (0, 5):
        (problem,) = judge_tests(leg(), report(passed=0), code, KNOWN)
        assert "no test has passed" in problem


@pytest.mark.parametrize(
    ("why", "allowed"),
    [
        ("triton_soa: arch=cpu (wants one of gfx942)", True),  # a backend that this leg is not about
        ("torch_reference: head_size=63 (wants a rotation)", False),  # the one that it is about
        ("no GPU that torch can see", True),  # listed
        ("could not import 'hypothesis'", False),
        ("triton_soap: x", False),  # no such backend
        ("", False),
    ],
)
def test_a_skip_is_a_failure_unless_it_is_listed(why: str, allowed: bool):
    found = report(skipped=[("tests.x::test_y", why)])
    problems = judge_tests(leg(), found, 0, KNOWN)
    assert found["skipped"][0]["allowed"] is allowed
    if allowed:
        assert problems == []
    else:
        (problem,) = problems
        assert problem == f"test skipped: tests.x::test_y: {why}"


def test_a_failure_is_named():
    (problem,) = judge_tests(leg(), report(failed=[("tests.x::test_y", "assert 1 == 2")]), 1, KNOWN)
    assert problem == "test failed: tests.x::test_y: assert 1 == 2"


@pytest.mark.parametrize("code", [1, 2, 3, 4, -11])
def test_an_exit_code_without_a_reason_is_a_failure(code: int):
    (problem,) = judge_tests(leg(), report(), code, KNOWN)
    assert str(code) in problem


def test_junit(tmp_path: Path):
    """What pytest really writes, for every outcome."""
    (tmp_path / "test_all.py").write_text(
        "import pytest\n"
        "def test_pass(): pass\n"
        "def test_fail(): assert 1 == 2\n"
        "def test_skip(): pytest.skip('triton_soa: arch=cpu')\n"
        "@pytest.mark.xfail\n"
        "def test_expected(): assert False\n"
        "@pytest.fixture\n"
        "def bad(): raise RuntimeError('in a fixture')\n"
        "def test_error(bad): pass\n"
    )
    import sys

    junit = tmp_path / "junit.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={junit}",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    found = read_junit(junit)
    assert (found["passed"], found["xfailed"]) == (1, 1)
    assert [f["test"].rpartition("::")[2] for f in found["failed"]] == ["test_fail", "test_error"]
    assert "1 == 2" in found["failed"][0]["why"]
    assert "in a fixture" in found["failed"][1]["why"]
    assert [s["why"] for s in found["skipped"]] == ["triton_soa: arch=cpu"]


# ---- cases -----------------------------------------------------------------------------------------------


def record(status: str = "ok", backend: str = "torch_reference", case: str = "store/x", why: str = "") -> Any:
    return {"id": case, "kind": "store", "backend": backend, "status": status, "why": why}


def test_passing_cases_are_no_problem():
    assert judge_cases(leg(), [record()]) == []


def test_zero_cases_is_a_failure():
    (problem,) = judge_cases(leg(), [])
    assert problem == "torch_reference: 0 cases ran (wants at least 1)"


def test_a_refused_case_is_a_failure():
    problems = judge_cases(leg(), [record(), record("refused", case="store/y", why="head_size=63")])
    assert problems == ["case refused: store/y on torch_reference: head_size=63"]


def test_a_backend_with_a_narrow_profile_must_run_its_share():
    narrow = leg(backends={"torch_reference": 2})
    refused = record("refused", case="store/y", why="head_size=63")
    assert judge_cases(narrow, [record(), record(), refused]) == []
    assert judge_cases(narrow, [record(), refused]) == ["torch_reference: 1 cases ran (wants at least 2)"]


def test_a_failed_case_is_named():
    problems = judge_cases(leg(), [record(), record("failed", case="store/y", why="bytes differ")])
    assert problems == ["case failed: store/y on torch_reference: bytes differ"]


# ---- the whole leg ---------------------------------------------------------------------------------------


def test_the_callers_environment_does_not_leak():
    base = {"TURBOQUANT_ROCM_FORCE": "x", "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": "/c", "HOME": "/h"}
    seen = environment(leg(environment={"A": "b"}), base)
    assert seen["HOME"] == "/h"
    assert seen["TRITON_CACHE_DIR"] == "/c"
    assert seen["A"] == "b"
    assert "TURBOQUANT_ROCM_FORCE" not in seen
    assert "TRITON_INTERPRET" not in seen


def run(tmp_path: Path, *args: str) -> tuple[int, dict[str, Any]]:
    code = main([*args, "--out", str(tmp_path), "--jobs", "1", "--repeats", "2"])
    return code, json.loads((tmp_path / f"{args[0]}.json").read_text())


def test_a_real_leg_writes_its_result(tmp_path: Path):
    code, result = run(tmp_path, "cpu-reference", "--no-tests", "--only", "4bit_nc-D64-bf16-soa-bs16")
    assert code == 0, result["problems"]
    assert result["partial"] is True
    assert result["versions"]["torch"]
    assert result["device"]["target"] == "cpu"
    by_kind = {r["kind"]: r for r in result["cases"]}
    assert set(by_kind) == {"store", "decode"}
    store, decode = by_kind["store"], by_kind["decode"]
    assert store["route"]["backend"] == "torch_reference"
    assert set(store["fields"]) == {"key_data", "key_norm", "value_data", "value_scale", "value_zero"}
    assert len(store["digest"]) == 32
    assert len(store["seconds"]) == 2
    assert decode["errors"]["out"] <= decode["tolerance"]
    assert (tmp_path / "cpu-reference.npz").exists()
    assert (tmp_path / "cpu-reference.bytes.npz").exists()


def test_a_leg_without_a_case_fails(tmp_path: Path):
    code, result = run(tmp_path, "cpu-reference", "--no-tests", "--only", "no such case")
    assert code == 1
    assert result["status"] == "failed"
    assert result["problems"] == ["torch_reference: 0 cases ran (wants at least 1)"]


def test_the_callers_signal_handler_is_put_back(tmp_path: Path):
    def handler(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, handler)
    try:
        run(tmp_path, "cpu-reference", "--no-tests", "--only", "no such case")
        assert signal.getsignal(signal.SIGTERM) is handler
        with pytest.raises(SystemExit):  # also when the leg cannot run here
            main(["mi300", "--no-tests", "--jobs", "1", "--out", str(tmp_path)])
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_leg_that_compiles_records_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tests = tmp_path / "tests"
    tests.mkdir()
    source = tests / "test_kernels.py"
    compiles = leg(name="compiles", mode="compile", backends={}, tests=(str(tests),))
    monkeypatch.setattr(ci.leg, "load_legs", lambda: {"compiles": compiles})
    source.write_text("def test_nothing(): pass\n")
    code, result = run(tmp_path, "compiles")
    assert code == 1
    assert result["problems"] == ["no compiled kernel was recorded: a leg that compiles nothing fails"]
    source.write_text(
        "def test_two(record_property):\n"
        "    record_property('kernel:gfx950/decode', '{\"registers\": 128, \"spills\": 0}')\n"
        "    record_property('kernel:gfx942/decode', '{\"registers\": 256, \"spills\": 3}')\n"
        "    record_property('another', 'thing')\n"
    )
    code, result = run(tmp_path, "compiles")
    assert (code, result["problems"]) == (0, [])
    assert result["compiled"] == {
        "gfx942/decode": {"registers": 256, "spills": 3},
        "gfx950/decode": {"registers": 128, "spills": 0},
    }


def test_a_leg_without_a_test_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "none").mkdir()
    empty = leg(name="empty", tests=(str(tmp_path / "none"),))
    monkeypatch.setattr(ci.leg, "load_legs", lambda: {"empty": empty})
    code, result = run(tmp_path, "empty", "--no-cases")
    assert code == 1
    assert "no test has passed: a leg that tests nothing fails" in result["problems"]


def test_a_shard_that_dies_fails_the_leg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ci.leg, "environment", lambda _: {"PATH": "/nowhere"})  # ci is not importable there
    monkeypatch.setattr(ci.leg, "ROOT", tmp_path)
    code, result = run(tmp_path, "cpu-reference", "--no-tests")
    assert code == 1
    assert any("shard 0 of the cases died" in p for p in result["problems"])


RUNNER = """
import sys
from pathlib import Path
option = {name: sys.argv[sys.argv.index(name) + 1] for name in ("--out", "--shard", "--repeats")}
with open("log.txt", "a") as log:
    log.write(f"{Path(option['--out']).name} {option['--shard']} {option['--repeats']}\\n")
"""


def test_a_device_compiles_on_all_cores_and_measures_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "ci").mkdir()
    (tmp_path / "ci" / "runner.py").write_text(RUNNER)
    device = leg(name="device", mode="device", target="local", vendor="nvidia")
    monkeypatch.setattr(ci.leg, "load_legs", lambda: {"device": device})
    monkeypatch.setattr(ci.leg, "ROOT", tmp_path)
    main(["device", "--no-tests", "--jobs", "3", "--repeats", "7", "--out", str(tmp_path / "out")])
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert sorted(lines[:-1]) == ["ahead0 0/3 0", "ahead1 1/3 0", "ahead2 2/3 0"]
    assert lines[-1] == "shard0 0/1 7"


def test_the_wrong_machine_is_said_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["mi300", "--no-tests", "--jobs", "1", "--out", str(tmp_path)])
    assert caught.value.code == 3
    assert "the leg mi300 wants an AMD GPU, gfx942" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_unknown_leg_is_an_error(capsys: pytest.CaptureFixture[str]):
    assert main(["mi400"]) == 2
    assert "mi300" in capsys.readouterr().err
