"""The store kernel on a device: the checks of the interpreter, every shape, large caches, many tokens."""

from __future__ import annotations

import pytest
import torch

from tests import store_checks as checks
from tests.cases import TORCH_DTYPES
from tests.golden_data import FILL, cases


def named(combination) -> str:
    preset, layout, head_size = combination
    return f"{getattr(preset, 'name', preset)}-{layout}-D{head_size}"


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_golden(case, device):
    checks.check_golden(case, device)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("combination", [*checks.combinations(), *checks.ROTATED], ids=named)
def test_reference(combination, dtype, device):
    checks.check_against_reference(*combination, dtype, device)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", checks.LAYOUTS)
@pytest.mark.parametrize("preset", checks.PRESETS)
def test_many_random_vectors(preset, layout, dtype, device):
    """65,536 vectors: every byte equals the reference's, run on the host."""
    g = torch.Generator().manual_seed(2)
    tokens, heads, d = 1 << 13, 8, 128
    bound = checks.bound_for(preset, layout, d, heads, dtype=dtype, checks="off")
    key, value = (
        (
            torch.randn(tokens, heads, d, generator=g) * torch.exp(torch.randn(tokens, heads, 1, generator=g))
        ).to(TORCH_DTYPES[dtype])
        for _ in range(2)
    )
    slots = torch.randperm(tokens, generator=g)
    got, want = bound.allocate(tokens // 16, device), bound.allocate(tokens // 16, "cpu")
    checks.store_of(bound.layout)(key.to(device), value.to(device), got.data, slots.to(device))
    bound.store(key, value, want, slots)
    assert checks.differences(got, want, bound.layout) == {}


@pytest.mark.parametrize("layout", checks.LAYOUTS)
@pytest.mark.parametrize("preset", checks.PRESETS)
@pytest.mark.parametrize("pad", [2, 26, 122])
def test_padded_strides(preset, layout, pad, device):
    slot = checks.bound_for(preset, layout, 64).layout.slot_bytes
    checks.check_against_reference(
        preset, layout, 64, "bf16", device, slot_stride=slot + pad, block_stride=(slot + pad) * 3 * 16 + 130
    )


@pytest.mark.parametrize("block_size", [528, 784, 1568, 2768])
def test_block_sizes_of_hybrids(block_size, device):
    checks.check_against_reference("4bit_nc", "soa", 64, "bf16", device, block_size=block_size)


@pytest.mark.parametrize("head_size", checks.HEAD_SIZES)
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


@pytest.mark.parametrize("layout", checks.LAYOUTS)
def test_cache_above_2_gib(layout, device):
    """Pitfall 14: first and last block of a cache whose offsets need 64 bits, store and dequantise."""
    bound = checks.bound_for("4bit_nc", layout, 128, 8, checks="off")
    blocks = (5 << 30) // bound.layout.block_stride // 2  # 2.5 GiB
    assert blocks * bound.layout.block_stride > 2 << 30
    cache = bound.allocate(blocks, device, fill=FILL)
    small = bound.allocate(2, device, fill=FILL)
    g = torch.Generator().manual_seed(1)
    key, value = (torch.randn(32, 8, 128, generator=g).bfloat16().to(device) for _ in range(2))
    position = torch.arange(16, device=device)
    store = checks.store_of(bound.layout)
    store(key, value, cache.data, torch.cat([position, (blocks - 1) * 16 + position]))
    store(key, value, small.data, torch.arange(32, device=device))
    assert torch.equal(cache.data[0], small.data[0])
    assert torch.equal(cache.data[-1], small.data[1])
    assert (cache.data[1:3] == FILL).all()
    assert (cache.data[-3:-1] == FILL).all()
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    rows = torch.tensor([0, 32], dtype=torch.int32, device=device)
    read = []
    for data, ids in ((cache.data, [0, blocks - 1]), (small.data, [0, 1])):
        table = torch.tensor([ids], dtype=torch.int32, device=device)
        k, v = (torch.empty(32, 8, 128, dtype=torch.bfloat16, device=device) for _ in range(2))
        checks.dequantize_of(bound.layout)(data, table, starts, rows, k, v)
        read.append((k, v))
    assert torch.equal(read[0][0], read[1][0])
    assert torch.equal(read[0][1], read[1][1])


@pytest.mark.parametrize("layout", checks.LAYOUTS)
@pytest.mark.parametrize("preset", checks.PRESETS)
def test_the_reference_stores_the_same_bytes_on_a_device(preset, layout, device):
    g = torch.Generator().manual_seed(5)
    tokens, heads, d = 1024, 8, 128
    bound = checks.bound_for(preset, layout, d, heads, checks="off")
    key, value = (torch.randn(tokens, heads, d, generator=g).bfloat16() for _ in range(2))
    slots = torch.randperm(tokens, generator=g)
    here, there = bound.allocate(tokens // 16, "cpu"), bound.allocate(tokens // 16, device)
    bound.store(key, value, here, slots)
    bound.store(key.to(device), value.to(device), there, slots.to(device))
    assert checks.differences(there, here, bound.layout) == {}


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("head_size", [64, 96, 128])
def test_device_functions(head_size, bits, target):
    """Vendor instructions against their portable twins, around every threshold and for random numbers."""
    from tests.store_twins import run

    if target.vendor != "nvidia":
        pytest.skip(f"{target.arch} runs the portable code")
    for got, want in zip(
        run(head_size, bits, "cuda", "cuda"), run(head_size, bits, "portable", "cuda"), strict=True
    ):
        assert torch.equal(got, want)
