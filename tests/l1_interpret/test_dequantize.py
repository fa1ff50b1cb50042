"""The dequantise kernel, interpreted, against the reference."""

from __future__ import annotations

import pytest
import torch

from tests import store_checks as checks
from tests.l1_interpret.test_store import DEFAULT, REST, named


@pytest.mark.parametrize("combination", DEFAULT, ids=named)
def test_reference(combination, device):
    checks.check_dequantize(*combination, device)


@pytest.mark.parametrize("combination", checks.ROTATED, ids=named)
def test_rotated_values(combination, device):
    for dtype in (torch.float32, torch.bfloat16):
        checks.check_dequantize(*combination, device, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("combination", REST, ids=named)
def test_reference_all(combination, device):
    checks.check_dequantize(*combination, device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", checks.LAYOUTS)
@pytest.mark.parametrize("preset", checks.PRESETS)
def test_output_dtypes(preset, layout, dtype, device):
    checks.check_dequantize(preset, layout, 128, device, dtype)


@pytest.mark.parametrize("layout", checks.LAYOUTS)
@pytest.mark.parametrize("preset", checks.PRESETS)
def test_padded_strides_and_value_size(preset, layout, device):
    checks.check_dequantize(
        preset, layout, 64, device, slot_stride=256, block_stride=256 * 48 + 66, value_head_size=96
    )
