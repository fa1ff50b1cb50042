"""Whose torch is used: the decisions of ci/bootstrap.py for machines that are not this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ci.bootstrap import Machine, Plan, decide
from tests.repository import ROOT

ROCM = {"torch": {"version": "2.11.0+rocm7.1", "hip": "7.1.0", "cuda": None}}
CPU = {"torch": {"version": "2.13.0+cpu", "hip": None, "cuda": None}}
TRITON = {"triton": {"version": "3.6.0"}}


def packages(plan: Plan) -> list[str]:
    return [step.args[-1] for step in plan.steps]


def test_bare_linux_installs_the_pinned_stack():
    plan = decide(Machine("Linux", "x86_64", {}), "auto", ["test"])
    assert not plan.system_site
    assert packages(plan) == ["torch", "triton", "flydsl", ".[test]"]
    assert "constraints/torch.txt" in plan.steps[0].args


def test_triton_yields_to_the_one_that_torch_brings():
    """GPU builds of torch ask for an exact triton; ours must neither replace it nor constrain it."""
    plan = decide(Machine("Linux", "x86_64", {}), "auto", [])
    torch, triton, *_ = plan.steps
    assert "constraints/kernels.txt" not in torch.args
    assert triton.unless_importable == "triton"
    assert "triton==" not in (ROOT / "constraints" / "torch.txt").read_text()


@pytest.mark.parametrize(
    "base", [{**ROCM, **TRITON}, ROCM, {**CPU, **TRITON}], ids=["rocm", "rocm-alone", "cpu"]
)
def test_torch_of_the_machine_is_reused(base):
    plan = decide(Machine("Linux", "x86_64", base), "auto", ["test"])
    assert plan.system_site
    assert packages(plan) == ["flydsl", ".[test]"]
    assert not any("constraints/torch.txt" in step.args for step in plan.steps)
    assert base["torch"]["version"] in " ".join(plan.notes)


def test_cpu_torch_without_triton_gets_one():
    assert packages(decide(Machine("Linux", "x86_64", CPU), "auto", [])) == ["triton", "flydsl", "."]


def test_install_is_obeyed_and_reuse_needs_a_torch():
    assert packages(decide(Machine("Linux", "x86_64", ROCM), "install", []))[0] == "torch"
    with pytest.raises(SystemExit, match="cannot import torch"):
        decide(Machine("Linux", "x86_64", {}), "reuse", [])


def test_a_torch_that_does_not_import_is_not_reused():
    plan = decide(Machine("Linux", "x86_64", {"torch": {"error": "OSError: libamdhip64.so"}}), "auto", [])
    assert packages(plan)[0] == "torch"
    assert "libamdhip64" in " ".join(plan.notes)


@pytest.mark.parametrize(
    ("system", "machine", "wanted", "said"),
    [
        ("Darwin", "arm64", ["torch", "."], ["no triton for Darwin arm64", "no flydsl for Darwin arm64"]),
        ("Linux", "aarch64", ["torch", "triton", "."], ["no flydsl for Linux aarch64"]),
    ],
)
def test_platforms_without_wheels_go_on_and_say_so(system, machine, wanted, said):
    plan = decide(Machine(system, machine, {}), "auto", [])
    assert packages(plan) == wanted
    for text in said:
        assert any(text in note for note in plan.notes)


def test_torch_index_is_for_torch_alone():
    plan = decide(Machine("Linux", "x86_64", {}), "auto", [], index="https://example.org/cpu")
    assert [("https://example.org/cpu" in step.args) for step in plan.steps] == [True, False, False, False]


def test_dry_run_changes_nothing(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "ci" / "bootstrap.py"), "--venv", str(tmp_path / "v"), "--dry-run"],
        capture_output=True,
        text=True,
        env={**os.environ, "CI": "true"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "would run: pip install" in done.stdout
    assert not (tmp_path / "v").exists()


@pytest.mark.parametrize("what", ["bootstrap", "clean"])
def test_an_environment_made_elsewhere_is_left_alone(tmp_path: Path, what: str):
    """VENV=/somewhere/shared must never be emptied."""
    keep = tmp_path / "venv" / "bin" / "python"
    keep.parent.mkdir(parents=True)
    keep.write_text("somebody's")
    venv = str(tmp_path / "venv")
    command = {
        "bootstrap": [sys.executable, str(ROOT / "ci" / "bootstrap.py"), "--venv", venv],
        "clean": ["make", "-C", str(ROOT), "clean", f"VENV={venv}"],
    }[what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "not made here" in done.stdout + done.stderr
    assert keep.read_text() == "somebody's"
