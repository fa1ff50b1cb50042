"""The harness itself: what --require-backend does, and that a run which tests nothing fails. No GPU is visible here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.repository import ROOT

CONTRACT = "tests/test_backend_contract.py"


def run(*args: str) -> subprocess.CompletedProcess[str]:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
    env = {**{k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}, **hidden}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)


def select(name: str) -> tuple[str, str, str]:
    return (CONTRACT, "-k", f"{name} and soa and D128-G8 and bf16 and 4bit_nc and plain")


def test_a_skip_says_why():
    done = run(*select("flydsl_gfx950"), "-rs")
    assert "flydsl_gfx950: arch=cpu (wants gfx950)" in done.stdout


def test_all_skipped_is_a_failure():
    done = run(*select("triton_soa"))
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "no test ran: every one was skipped" in done.stdout


def test_nothing_collected_is_a_failure():
    assert run(CONTRACT, "-k", "no_such_test").returncode == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_required_backend_may_not_skip(processes: str):
    done = run(*select("triton_soa"), "--require-backend", "triton_soa", "-n", processes)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "--require-backend triton_soa: " in done.stdout
    assert "arch=cpu" in done.stdout


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_required_backend_that_runs_passes(processes: str):
    done = run(*select("torch_reference"), "--require-backend", "torch_reference", "-n", processes)
    assert done.returncode == pytest.ExitCode.OK, done.stdout


def test_a_required_backend_must_be_tested():
    done = run(
        "tests/l0_pure/test_codebook.py", "--require-backend", "torch_reference", "-k", "antisymmetric"
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "no test of it has passed" in done.stdout


def test_an_unknown_backend_is_a_usage_error():
    done = run(CONTRACT, "--require-backend", "no_such_backend")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "torch_reference" in done.stderr, "the names there are"
