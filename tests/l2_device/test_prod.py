"""The kernels of TurboQuant_prod on a GPU; tests/test_backend_contract.py runs there over the dispatcher, too."""

from __future__ import annotations

import pytest

from tests.prod_checks import PRESETS, check_decode, check_dequantize, check_store


@pytest.mark.backend("triton_prod")
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("preset", PRESETS)
def test_store_and_dequantise(preset: str, head_size: int):
    for dtype in ("bf16", "fp16"):
        check_store(preset, head_size, "cuda", dtype)
    check_dequantize(preset, head_size, "cuda")


@pytest.mark.backend("triton_prod")
@pytest.mark.parametrize("group", [1, 3, 8, 16])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("preset", PRESETS)
def test_decode(preset: str, head_size: int, group: int):
    for splits in (1, 4):
        check_decode(preset, head_size, "cuda", group, None, splits)
    check_decode(preset, head_size, "cuda", group, (9, 1, 0, 3, 1))
