"""The store kernel, interpreted: golden bytes, the reference's bytes for every shape and kind of data, pads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import store_checks as checks
from tests import store_twins as twins
from tests.golden_data import FILL, cases
from turboquant_rocm.backends._triton.device import GUESS_BASE
from turboquant_rocm.backends._triton.store import code_guess, granule
from turboquant_rocm.codebook import centroids, midpoints


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


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("head_size", [64, 96, 128, 192])
def test_nearest_code(head_size, bits, device):
    """Thresholds for numbers that are not scaled yet give the codes of the scaled and rounded ones."""
    y = twins.numbers(head_size, bits).numpy()
    code, square, rounded = (x.numpy() for x in twins.run(head_size, bits, "portable", device))
    expected = (y[:, None] * np.float32(head_size**-0.5) >= midpoints(head_size, bits)).sum(1)
    assert np.array_equal(code, expected)
    assert {*expected} == {*range(2**bits)}
    c = centroids(head_size, bits)
    assert np.array_equal(square, (c * c)[expected])
    assert np.array_equal(rounded, np.minimum(np.abs(y), 16).astype(np.int32))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("head_size", [64, 80, 96, 112, 128, 192, 256])
def test_guess_of_the_code(head_size, bits):
    """NVIDIA's route: the guess k and one comparison with threshold k find the code, for any error of the tanh
    instruction (its manual says 2^-11 at most, relative; twice that is tried)."""
    steepness, width, middle, *words = code_guess(head_size, bits)
    thresholds, _ = np.array(words, np.int32).view(np.float32).reshape(2, 16)
    y = np.concatenate([twins.numbers(head_size, bits).numpy(), np.linspace(-9, 9, 40001, dtype=np.float32)])
    expected = (y[:, None] * np.float32(head_size**-0.5) >= midpoints(head_size, bits)).sum(1)
    for error in (-(2.0**-10), 0.0, 2.0**-10):
        smooth = np.clip(np.tanh(steepness * y.astype(np.float64)) * (1 + error), -1, 1)
        guess = np.rint(width * smooth + (middle - GUESS_BASE)).astype(int)
        assert guess.min() == 0 and guess.max() == 2**bits - 2
        assert np.array_equal(guess + (y >= thresholds[guess]), expected)
