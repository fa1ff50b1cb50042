"""The real small model: its accuracy limits, and generate(). `ci/model.sh FOLDER` gets it and runs this."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests import generate_checks as checks
from tests.mode_checks import ATTENTIONS, check_modes
from turboquant_rocm.evaluate import main
from turboquant_rocm.evaluation.report import read_limits
from turboquant_rocm.target import detect

pytestmark = [pytest.mark.model, pytest.mark.timeout(5400)]


def named(variable: str) -> Path:
    """The path that an environment variable names. Without it these tests, which were asked for, fail."""
    path = Path(os.environ.get(variable, ""))
    if not os.environ.get(variable) or not path.exists():
        pytest.fail(f"{variable} names nothing that exists: ci/model.sh FOLDER sets it")
    return path


def test_accuracy_is_that_on_record(tmp_path: Path):
    out = tmp_path / "rows.json"
    limits = read_limits("smollm2-135m")
    presets = list(limits["schemes"])
    tests = {
        quantity.partition(".")[0] for quantities in limits["schemes"].values() for quantity in quantities
    }
    model, text = named(checks.MODEL_VARIABLE), named("TURBOQUANT_TEXT")
    arguments = [str(model), "--text", str(text), "--json", str(out), "--check", "smollm2-135m"]
    arguments += [
        "--windows",
        str(limits["conditions"]["windows"]),
        "--tests",
        *sorted(tests),
        "--presets",
        *presets,
    ]
    code = main(arguments)
    print(out.read_text())
    assert code == 0
    assert [r["name"] for r in json.loads(out.read_text())["rows"]] == ["exact", *presets]


@pytest.mark.parametrize("mode", ["drop-in", "direct"])
def test_sixty_four_greedy_tokens(mode: str):
    named(checks.MODEL_VARIABLE)
    model = checks.small_model("fp32")
    checks.check_generate(model, mode, backend="torch_reference", dtype="fp32", target="cpu", margin=0.0)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_modes(device: str, attention: str):
    """off, capture_only, hybrid and full: on a CPU by the reference in fp32, on a GPU by the dispatcher's backend."""
    named(checks.MODEL_VARIABLE)
    if device == "cpu":
        check_modes(
            checks.small_model("fp32"), attention, backend="torch_reference", dtype="fp32", target="cpu"
        )
        return
    if not torch.cuda.is_available():
        pytest.skip("no GPU that torch can see: the modes were not run on one")
    check_modes(checks.small_model("fp16", device), attention, backend=None, dtype="fp16", target=detect())
