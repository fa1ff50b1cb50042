"""The store kernel, interpreted: golden bytes, the reference's bytes for every shape and kind of data, pads."""

from __future__ import annotations

import pytest
import torch

from tests import store_checks as checks
from tests.golden_data import FILL, cases
from turboquant_rocm.backends._triton.store import granule


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_golden(case, device):
    checks.check_golden(case, device)


DEFAULT = [c for c in checks.combinations() if c[2] in (64, 80, 96, 256)]
REST = [c for c in checks.combinations() if c not in DEFAULT]


def named(combination) -> str:
    preset, layout, head_size = combination
    return f"{getattr(preset, 'name', preset)}-{layout}-D{head_size}"


@pytest.mark.parametrize("combination", DEFAULT, ids=named)
def test_reference(combination, device):
    checks.check_against_reference(*combination, "bf16", device)


@pytest.mark.parametrize("combination", checks.ROTATED, ids=named)
def test_rotated_values(combination, device):
    for dtype in ("bf16", "fp16"):
        checks.check_against_reference(*combination, dtype, device)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("combination", [*DEFAULT, *REST], ids=named)
def test_reference_all(combination, dtype, device):
    checks.check_against_reference(*combination, dtype, device)


@pytest.mark.parametrize("layout", checks.LAYOUTS)
@pytest.mark.parametrize("preset", checks.PRESETS)
def test_fp16_and_other_value_size(preset, layout, device):
    checks.check_against_reference(preset, layout, 128, "fp16", device, value_head_size=96)


@pytest.mark.parametrize("layout", checks.LAYOUTS)
@pytest.mark.parametrize("preset", checks.PRESETS)
@pytest.mark.parametrize("pad", [2, 26, 122])
def test_padded_strides(preset, layout, pad, device):
    """Pitfall 13: a server's padded slots and blocks; no pad byte changes."""
    slot = checks.bound_for(preset, layout, 64).layout.slot_bytes
    checks.check_against_reference(
        preset, layout, 64, "bf16", device, slot_stride=slot + pad, block_stride=(slot + pad) * 3 * 16 + 130
    )


@pytest.mark.parametrize("block_size", [528, 784])
def test_block_sizes_of_hybrids(block_size, device):
    checks.check_against_reference("4bit_nc", "soa", 64, "bf16", device, block_size=block_size)


@pytest.mark.parametrize("head_size", [64, 96])
@pytest.mark.parametrize("layout", checks.LAYOUTS)
@pytest.mark.parametrize("preset", checks.PRESETS)
def test_pieces(preset, layout, head_size, device):
    checks.check_same_bytes_in_pieces(preset, layout, head_size, device)


@pytest.mark.parametrize("layout", checks.LAYOUTS)
def test_strided_inputs(layout, device):
    checks.check_strided_inputs("4bit_nc", layout, device)


@pytest.mark.parametrize("layout", checks.LAYOUTS)
@pytest.mark.parametrize("preset", checks.PRESETS)
@pytest.mark.parametrize("kind", ["inf", "minus_inf", "nan"])
def test_neighbours(kind, preset, layout, device):
    checks.check_neighbours(kind, preset, layout, device)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", checks.LAYOUTS)
@pytest.mark.parametrize("preset", checks.PRESETS)
def test_fields_are_finite(preset, layout, dtype, device):
    checks.check_fields_are_finite(preset, layout, dtype, device)


@pytest.mark.parametrize("layout", checks.LAYOUTS)
@pytest.mark.parametrize(
    "preset", [*checks.PRESETS, *checks.OTHER_WIDTHS], ids=lambda p: getattr(p, "name", p)
)
def test_codes(preset, layout, device):
    checks.check_codes(preset, layout, device)


def test_nothing_to_store(device):
    bound = checks.bound_for("4bit_nc", "soa", 64)
    cache = bound.allocate(1, device, fill=FILL)
    store = checks.store_of(bound.layout)
    empty = torch.empty(0, 2, 64, dtype=torch.bfloat16)
    store(empty, empty, cache.data, torch.empty(0, dtype=torch.int64))
    some = torch.randn(5, 2, 64).bfloat16()
    store(some, some, cache.data, torch.full((5,), -1))
    assert (cache.data == FILL).all()


def test_fp32_inputs(device):
    """Layers may hand over fp32; the bytes are those of the reference."""
    checks.check_against_reference("4bit_nc", "soa", 128, "fp32", device)


def test_granules_are_words_where_the_layout_allows():
    for preset in checks.PRESETS:
        layout = checks.bound_for(preset, "soa", 128).layout
        assert granule(layout, "key_data") == granule(layout, "value_data") == 4
    assert granule(checks.bound_for("4bit_nc", "aos", 128).layout, "key_data") == 2
