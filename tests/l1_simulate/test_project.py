"""Every Triton kernel of the project on both simulated GPUs: store bytes equal to the reference and to the golden
vectors, decode held to the bar of real devices (tests/decode_checks.py), dequantise equal to the reference.

Decode, reduce and dequantise of every preset, layout and head size are in the default list. So is store: at head size
64 here, at 128 and 256 in the cases that every leg runs (ci/caselist.py); here these, hostile data and the other golden
caches are marked slow.
"""

from __future__ import annotations

from typing import Any

import pytest

from .sim_helpers import ARCHS, triton

pytest.importorskip("torch", reason="the launchers take torch tensors")

from ci.cdna_sim.launcher import simulated_launches
from tests import golden_data, store_checks

from .project import (
    LAYOUTS,
    PRESETS,
    decode_fault,
    dequantize_error,
    problem,
    store_differences,
)  # fmt: skip

SIZES = (64, 128, 256)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "head_size", [64, pytest.param(128, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.slow)]
)
def test_store(arch: str, layout: str, preset: str, head_size: int) -> None:
    assert store_differences(problem(arch, layout, preset, head_size), arch) == {}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("head_size", SIZES)
def test_decode_and_reduce(arch: str, layout: str, preset: str, head_size: int) -> None:
    fault, log = decode_fault(problem(arch, layout, preset, head_size), arch)
    assert not fault
    assert [x.name for x in log] == ["prepare_kernel", "decode_kernel", "reduce_kernel"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("layout", "preset", "options"), [
    ("soa", "turboquant_4bit_nc", {}), ("aos", "turboquant_k8v4", {"window": 40}), ("soa", "turboquant_3bit_nc", {}),
    ("soa", "turboquant_4bit_nc", {"queries": 5}), ("aos", "turboquant_k8v4", {"queries": 2, "window": 24}),
])  # fmt: skip
def test_decode_of_a_ragged_batch(arch: str, layout: str, preset: str, options: dict[str, Any]) -> None:
    """Pieces of equal size by a schedule that prepare writes; the longest sequence has most of them."""
    fault, log = decode_fault(
        problem(arch, layout, preset, 64, 2, lens=(200, 5, 64), cut=True, **options), arch
    )
    assert not fault
    assert [x.name for x in log] == ["prepare_kernel", "decode_kernel", "reduce_kernel"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("head_size", SIZES)
def test_dequantize(arch: str, layout: str, preset: str, head_size: int) -> None:
    assert dequantize_error(problem(arch, layout, preset, head_size), arch) < 1e-5


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("options", [{"window": 16}, {"window": 17}, {"sinks": True}, {"soft_cap": 20.0}],
                         ids=["window16", "window17", "sinks", "soft_cap"])  # fmt: skip
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.slow
def test_decode_options(arch: str, options: dict[str, Any], splits: int) -> None:
    fault, log = decode_fault(problem(arch, "soa", "turboquant_4bit_nc", 64, splits, **options), arch)
    assert not fault
    assert len(log) == (2 if splits == 1 else 3)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.slow
def test_hostile_data(arch: str, layout: str, preset: str) -> None:
    assert store_differences(problem(arch, layout, preset, 128, 2, True), arch) == {}


GOLDEN = list(golden_data.cases())
DEFAULT = [c for c in GOLDEN if c.head_size == 64 and c.block_size == 16]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "case", [c if c in DEFAULT else pytest.param(c, marks=pytest.mark.slow) for c in GOLDEN], ids=str
)
def test_store_equals_golden(arch: str, case: golden_data.GoldenCase) -> None:
    with simulated_launches(arch) as log:
        store_checks.check_golden(case, "cpu", vendor="amd")
    assert log, "nothing was launched on the simulated GPU"


_ = triton
