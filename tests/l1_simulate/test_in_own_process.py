"""This folder in a process that compiles its kernels; see conftest.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(1800)
def test_simulator_tests(request: pytest.FixtureRequest) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", str(Path(__file__).parent), "-q", "-p", "no:cacheprovider"]
    if request.config.getoption("--run-slow"):
        command.append("--run-slow")
    done = subprocess.run(
        command, env=env, cwd=request.config.rootpath, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout[-2000:]
    assert int(passed[1]) > 100, "hardly any test ran"
