"""vLLM's real layers, builders and metadata over our backend, for the other supported version: without an engine.

Run in the environment of ci/vllm_env.sh: VENV/bin/python -m pytest tests/vllm --run-vllm
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.test_selectors import SOURCES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def measured(where: str, folder: Path, **asked: str) -> dict[str, Any]:
    """What classes.py prints."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TURBOQUANT_ROCM_", "VLLM_"))}
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name("classes.py")), where],
        capture_output=True, text=True, cwd=folder, check=False,
        env={**kept, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1", **asked},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Errors of the torch reference on the CPU."""
    asked = {"TURBOQUANT_ROCM_VLLM_CPU": "reference", "TURBOQUANT_ROCM_VLLM_CHECKS": "full"}
    return measured("cpu", tmp_path_factory.mktemp("classes"), **asked)


@pytest.mark.parametrize("feature", ["plain", "window", "soft cap", "sinks"])
def test_every_route_is_exact_attention_over_what_it_may_read(found: dict[str, Any], feature: str):
    """Three presets in three physical layouts; every head of every sequence, in batches of all kinds of sequences."""
    errors = {name: error for name, error in found["errors"].items() if name.split(", ")[1] == feature}
    assert len(errors) == 3 * 4
    assert max(errors.values()) < 6e-3, errors  # bf16 results; half an ulp is 2e-3 to 4e-3
    assert min(errors.values()) > 0


def test_the_reference_ran(found: dict[str, Any]):
    assert set(found["backends"].values()) == {"torch_reference"}


def test_vllms_own_backend_left_in_charge_has_our_plan_logged(tmp_path: Path):
    found = measured("left", tmp_path, TURBOQUANT_ROCM_VLLM="off")
    impl, builder = found["classes"]
    assert impl == "vllm.v1.attention.backends.turboquant_attn.TurboQuantAttentionImpl"
    assert builder == "turboquant_rocm.integrations.vllm.watched.WatchedBuilder"
    log = "\n".join(found["log"])
    assert log.count("vLLM's own turboquant backend serves 1 of 1 layers") == 1
    assert "would do (1 triton_soa (soa))" in log and "sm_90" in log
