"""Against the classes of a vLLM wheel for GPUs, without one: who is selected, what is refused, how large slots are.

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

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SOURCES = Path(os.environ.get("TURBOQUANT_TEST_VLLM_SOURCES", Path(sys.prefix) / "vllm-0.33"))
"""Python files of the wheel of vLLM 0.33 for GPUs; ci/vllm_env.sh puts them there."""
OURS = "turboquant_rocm.integrations.vllm.backend.TurboQuantBackend"


@pytest.fixture(scope="module", params=["rocm", "cuda"])
def selected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What selectors_033.py found on a made-up MI300X or H100."""
    assert (SOURCES / "vllm" / "__init__.py").exists(), f"no vLLM in {SOURCES}"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TURBOQUANT_ROCM_", "VLLM_"))}
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name("selectors_033.py")), request.param],
        capture_output=True, text=True, cwd=tmp_path_factory.mktemp(request.param), check=False,
        env={**kept, "PYTHONPATH": str(SOURCES), "TURBOQUANT_ROCM_VLLM": "required"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_it_is_the_other_version(selected: dict[str, Any]):
    assert selected["version"].startswith("0.33.")
    assert selected["before"].startswith("vllm.")


def test_every_turboquant_layer_gets_our_backend(selected: dict[str, Any]):
    ours = {name: path for name, path in selected["layers"].items() if name.startswith("turboquant_")}
    assert len(ours) == 7 * len(selected["presets"]) >= 28
    assert set(ours.values()) == {OURS}


def test_native_layers_keep_the_servers_own(selected: dict[str, Any]):
    native = {name: path for name, path in selected["layers"].items() if name.startswith("auto in ")}
    assert len(native) == len(selected["presets"]) + 1
    assert all(path.startswith("vllm.v1.attention.backends.") for path in native.values()), native
    assert not any("turboquant" in path for path in native.values()), native


def test_both_kinds_of_layers_share_a_physical_layout(selected: dict[str, Any]):
    for preset, layouts in selected["layouts"].items():
        assert layouts and set(layouts) <= {"LBNHC", "LBHNC", "BLNHC", "BLHNC"}, preset


def test_what_we_do_not_serve_is_refused_with_our_reason(selected: dict[str, Any]):
    reasons = {
        "latent": "",
        "encoder": "attention type encoder_only not supported",
        "both ways": "non-causal attention not supported",
        "block 8": "block_size not supported",
        "kv connector": "KV connector not supported",
    }
    assert len(selected["refused"]) == len(reasons) * len(selected["presets"])
    for name, text in selected["refused"].items():
        assert not text.startswith("not refused"), (name, text)
        what = name.split(", ")[1]
        if what != "latent":  # such layers ask other backends only
            assert reasons[what] in text.split("TURBOQUANT: [")[1].split("]")[0], (name, text)


def test_slots_are_as_large_as_the_servers_own(selected: dict[str, Any]):
    """The server sizes the pages of hybrid models by its own class, whatever is registered."""
    assert len(selected["slots"]) == 6 * len(selected["presets"])
    assert {name: pair for name, pair in selected["slots"].items() if pair[0] != pair[1]} == {}
