"""ci/compare.py over results of the simulated GPU: identical store bytes, and a fault in a kernel named."""

from __future__ import annotations

from pathlib import Path

import pytest

from .sim_helpers import triton

pytest.importorskip("torch", reason="the launchers take torch tensors")

from ci.caselist import case_list
from ci.compare import compare, load, render
from ci.legs import load_legs
from ci.modes import make_mode
from tests.l0_pure.test_ci_compare import write
from turboquant_rocm.backends._triton import ops

from .test_mutants import SOURCE, mutated_module

LEGS = ("cpu-reference", "sim-gfx942")
GOLDEN = "store/golden/4bit_nc-D64-bf16-soa-bs16"
DECODE = "decode/plain/4bit_nc-D64-bf16-soa-bs16-G4"


def results(folder: Path) -> list[Path]:
    cases = [c for c in case_list() if c.id in (GOLDEN, DECODE)]
    assert len(cases) == 2
    return [write(folder, name, make_mode(load_legs()[name]), cases) for name in LEGS]


def test_the_simulated_gpu_agrees_with_the_reference(tmp_path: Path) -> None:
    c = compare([load(path) for path in results(tmp_path)])
    assert c.regressions == []
    assert "1 of 1 cases that ran on several legs have identical cache bytes" in render(c)
    assert 0 < c.worst["sim-gfx942"] < 1


def test_a_fault_in_a_kernel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (mutant,) = [m for m in SOURCE if m.name == "nibbles swapped"]
    monkeypatch.setattr(ops, "Store", mutated_module(mutant, tmp_path).Store)
    found = compare([load(path) for path in results(tmp_path)]).regressions
    assert {r.leg for r in found} == {"sim-gfx942"}
    (store,) = [r for r in found if r.kind == "store"]
    assert store.case == f"{GOLDEN} on triton_soa"
    assert "cache bytes differ from cpu-reference's (torch_reference) in key_data, value_data; " in store.what
    assert "the first in block" in store.what


_ = triton
