"""docs/serving.md: its capacity table is explain's, its variables are those that are read."""

from __future__ import annotations

import json
import re

from tests.repository import ROOT
from turboquant_rocm.dispatch import ENVIRONMENT_VARIABLES as DISPATCH
from turboquant_rocm.explain import run
from turboquant_rocm.integrations.vllm import ENVIRONMENT_VARIABLES as PLUGIN

TEXT = (ROOT / "docs/serving.md").read_text()
PRESETS = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_3bit_nc")


def test_capacity_is_what_explain_says():
    rows = re.findall(r"^\| ([\w.-]+) \| (\w+), (\w+) \| (\d+) \| ([\d,| ]+) \|$", TEXT, re.M)
    assert len(rows) >= 6
    for model, arch, memory, tp, cells in rows:
        told = [int(cell.replace(",", "")) for cell in cells.split(" | ")]
        assert len(told) == 1 + len(PRESETS)
        for preset, tokens in zip(PRESETS, told[1:], strict=True):
            status, out, _ = run(
                [
                    model,
                    "--target",
                    arch,
                    "--memory",
                    memory,
                    "--tp",
                    tp,
                    "--preset",
                    preset,
                    "--format",
                    "json",
                ]
            )
            found = json.loads(out)["bytes"]
            assert status == 0
            assert (found["native_tokens"], found["tokens"]) == (told[0], tokens), (model, arch, preset)


def test_every_variable_is_explained():
    stem = "TURBOQUANT_ROCM_"
    for name in (*PLUGIN, *DISPATCH):
        assert f"`{name}`" in TEXT or f"`_{name.removeprefix(stem)}`" in TEXT, name
    known = set(PLUGIN) | set(DISPATCH)
    assert set(re.findall(r"TURBOQUANT_ROCM_[A-Z_]*[A-Z]", TEXT)) <= known
