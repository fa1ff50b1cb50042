"""The kernels of TurboQuant_prod in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.prod_checks import PRESETS, check_decode, check_dequantize, check_store, check_warmup

CASES = [("turboquant_prod_k3v2", 128), ("turboquant_prod_k4v4", 64)]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("preset", PRESETS)
def test_store(preset: str, head_size: int, dtype: str):
    check_store(preset, head_size, "cpu", dtype)


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("preset", PRESETS)
def test_dequantise(preset: str, head_size: int):
    check_dequantize(preset, head_size, "cpu")


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("group", [1, 3, 16])
@pytest.mark.parametrize(("preset", "head_size"), CASES)
def test_decode(preset: str, head_size: int, group: int, splits: int):
    check_decode(preset, head_size, "cpu", group, None, splits)


@pytest.mark.parametrize("group", [3, 8])
@pytest.mark.parametrize(("preset", "head_size"), CASES)
def test_decode_of_several_queries(preset: str, head_size: int, group: int):
    check_decode(preset, head_size, "cpu", group, (9, 1, 0, 3, 1), dtype="fp16")


@pytest.mark.parametrize(("preset", "head_size"), CASES)
def test_warmup_reserves_what_decode_takes(preset: str, head_size: int):
    check_warmup(preset, head_size, "cpu")
