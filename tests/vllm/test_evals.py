"""ci/evals.py against the real server: vLLM on the CPU, asked the built-in task; and what it says where it cannot run.

Run in the environment of ci/vllm_env.sh: VENV/bin/python -m pytest tests/vllm --run-vllm
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import ROOT
from tests.vllm.test_engine import MODEL, PRESET, clean_environment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

OPTIONS = ("--", "--block-size", "32", "--enforce-eager", "--max-num-seqs", "4")


def evals(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """ci/evals.py as a command; without processes of the server's own, which would come and go slowly."""
    return subprocess.run(
        [sys.executable, "-m", "ci.evals", *args], cwd=ROOT, env=clean_environment(**environ),
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_built_in_task_against_a_server_of_each_cache(tmp_path: Path):
    out = tmp_path / "evals" / "results.json"
    base = ["repeat", "--model", str(MODEL), "--presets", PRESET, "auto", "--limit", "8", "--json", str(out)]
    done = evals(*base, *OPTIONS)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    found = json.loads(out.read_text())
    assert [(r["spec"], r["preset"], r["questions"]) for r in found] == [
        ("repeat", PRESET, 8),
        ("repeat", "auto", 8),
    ]
    # This small model repeats a third of the lines with either cache. Of a cache that is read wrongly it would repeat
    # none: a line is one of 665,280.
    assert all(r["accuracy"] >= 0.125 for r in found), found


def test_a_server_that_this_package_does_not_serve_does_not_count():
    done = evals("repeat", "--model", str(MODEL), "--presets", PRESET, *OPTIONS, TURBOQUANT_ROCM_VLLM_CPU="")
    assert done.returncode == 2
    assert "cannot read a turboquant_4bit_nc cache" in done.stderr, done.stderr[-3000:]


def test_a_model_that_cannot_be_fetched_is_named():
    done = evals("gsm8k", "--presets", PRESET, *OPTIONS)
    assert done.returncode == 2
    assert (
        "vllm serve Qwen/Qwen3-4B=" in done.stderr and "the model fetched or in a local folder" in done.stderr
    )
