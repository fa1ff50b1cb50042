"""The real small model: its accuracy limits, and generate(). `ci/model.sh FOLDER` gets it and runs this."""

from __future__ import annotations

import json
import os
from math import log1p
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import generate_checks as checks
from tests.mode_checks import ATTENTIONS, check_modes
from turboquant_rocm.evaluate import main
from turboquant_rocm.evaluation.report import read_limits
from turboquant_rocm.presets import get_preset, preset_names
from turboquant_rocm.target import detect

OPTIONS = "+rotated_values+recent=128+first=4+key_mean"
pytestmark = [pytest.mark.model, pytest.mark.timeout(5400)]


def named(variable: str) -> Path:
    """The path that an environment variable names. Without it these tests, which were asked for, fail."""
    path = Path(os.environ.get(variable, ""))
    if not os.environ.get(variable) or not path.exists():
        pytest.fail(f"{variable} names nothing that exists: ci/model.sh FOLDER sets it")
    return path


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    """Exit code of one evaluation against the limits, and its rows by name: the presets on record, and the options'."""
    out = tmp_path_factory.mktemp("evaluation") / "rows.json"
    limits = read_limits("smollm2-135m")
    tests = {
        quantity.partition(".")[0] for quantities in limits["schemes"].values() for quantity in quantities
    }
    model, text = named(checks.MODEL_VARIABLE), named("TURBOQUANT_TEXT")
    code = main(
        [
            str(model), "--text", str(text), "--json", str(out), "--check", "smollm2-135m",
            "--windows", str(limits["conditions"]["windows"]), "--tests", *sorted(tests),
            "--presets", *limits["schemes"], *(f"{name}{OPTIONS}" for name in ("3bit_nc", "4bit_nc")),
        ]
    )  # fmt: skip
    print(out.read_text())
    return code, {row["name"]: row for row in json.loads(out.read_text())["rows"]}


def test_accuracy_is_that_on_record(evaluated):
    code, rows = evaluated
    assert code == 0
    assert {"exact", *read_limits("smollm2-135m")["schemes"]} < set(rows)


def test_prod_presets_are_as_bad_as_on_record():
    """On one short window: they are for comparison."""
    limits = read_limits("smollm2-135m-prod")
    model, text = named(checks.MODEL_VARIABLE), named("TURBOQUANT_TEXT")
    sizes = [f"--{name}={limits['conditions'][name]}" for name in ("context", "windows")]
    presets = list(limits["schemes"])
    assert {p.removeprefix("turboquant_") for p in preset_names() if get_preset(p).sketch} < set(presets)
    assert main(
        [str(model), "--text", str(text), *sizes, "--tests", "text", "--presets", *presets, "--check",
         "smollm2-135m-prod"]
    ) == 0  # fmt: skip


def test_options_keep_what_they_promise(evaluated):
    """With all four, on text at context 2,048: KL and perplexity; copying far back, against the plain preset."""
    _, rows = evaluated
    three, four = (rows[f"{name}{OPTIONS}"] for name in ("3bit_nc", "4bit_nc"))
    assert three["text"]["kl"] <= 0.01
    assert three["text"]["ppl_change"] <= 0.015
    assert four["text"]["kl"] <= 0.003
    lost = {name: log1p(rows[name]["copying"]["ppl_change"]) for name in ("3bit_nc", f"3bit_nc{OPTIONS}")}
    assert lost["3bit_nc"] >= 3 * lost[f"3bit_nc{OPTIONS}"]
    for name in ("3bit_nc", "4bit_nc"):
        assert rows[f"{name}{OPTIONS}"]["bytes_per_token"] < rows[name]["bytes_per_token"]


@pytest.mark.parametrize("mode", ["drop-in", "direct"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sixty_four_greedy_tokens(device: str, mode: str):
    """On a CPU by the reference in fp32, token for token; on a GPU by the dispatcher's backend, but for near ties."""
    named(checks.MODEL_VARIABLE)
    if device == "cpu":
        model = checks.small_model("fp32")
        checks.check_generate(model, mode, backend="torch_reference", dtype="fp32", target="cpu")
        return
    if not torch.cuda.is_available():
        pytest.skip("no GPU that torch can see: nothing was generated on one")
    model = checks.small_model("fp16", device)
    checks.check_generate(model, mode, backend=None, dtype="fp16", target=detect())


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
