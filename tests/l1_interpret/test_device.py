"""The portable device functions against numpy: every code decodes to its own centroid (pitfall 6), every FP8 byte to
its own number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.device_twins import HEAD_SIZE, numbers, run, run_bytes, run_halves, words
from turboquant_rocm.backends._triton.tile import byte_table, centroid_table
from turboquant_rocm.codebook import centroids


@pytest.mark.parametrize("bits", [3, 4])
def test_centroids(bits, device):
    got = run(bits, "portable", device)[:, :8].contiguous().view(torch.float16).double()
    codes = (words(device).long()[:, None] >> (bits * torch.arange(8))) & (2**bits - 1)
    table = centroid_table(HEAD_SIZE, bits)
    values = table.values if bits == 3 else np.concatenate([-table.values[::-1], table.values])
    assert torch.equal(got, torch.from_numpy(values)[codes].double())
    exact = centroids(HEAD_SIZE, bits).astype(np.float64)
    error = np.abs(values.astype(np.float64) * table.factor / exact - 1)
    assert error.max() < 2.0**-11  # of the rounding that remains


@pytest.mark.parametrize(
    ("bits", "planes", "limit"), [(3, 1, 1e-3), (3, 2, 2e-5), (4, 1, 1e-3), (4, 2, 1e-4)]
)
def test_byte_planes(bits, planes, limit, device):
    """Planes of int8 numbers add up to the centroid of each code, and the codebook they make is antisymmetric."""
    found, bytes_, _ = run_bytes(bits, planes, "portable", device)
    codes = (words(device).long()[:, None] >> (bits * torch.arange(8))) & (2**bits - 1)
    table = byte_table(HEAD_SIZE, bits, planes)
    if bits == 4:
        assert torch.equal(bytes_.long(), codes)
    coarse = bytes_ if (bits, planes) == (4, 1) else found[:, 0]
    got = coarse.double() + table.offset
    if planes == 2 or bits == 4:
        got += found[:, -1].double() / table.base
    assert torch.allclose(got, torch.from_numpy(table.values)[codes], rtol=0, atol=1e-12)
    assert bits == 3 or int(found.min()) >= 0, "a look-up of the other half would give its sign"
    assert np.array_equal(table.values, -table.values[::-1])
    exact = centroids(HEAD_SIZE, bits).astype(np.float64)
    assert np.abs(table.values * table.factor - exact).max() < limit * np.abs(exact).max()


@pytest.mark.parametrize(("bits", "planes"), [(4, 3), (3, 3), (4, 0)])
def test_byte_planes_refused(bits, planes):
    with pytest.raises(ValueError, match="planes"):
        byte_table(HEAD_SIZE, bits, planes)


@pytest.mark.parametrize("bits", [3, 4])
def test_value_pairs(bits, device):
    _, _, values = run_bytes(bits, 2, "portable", device)
    shifts = bits * torch.arange(8)
    for i, word in enumerate((words(device).long(), words(device).long() ^ 0x5A5A5A5A)):
        codes = (word[:, None] >> shifts) & (2**bits - 1)
        for bare in range(2):
            assert torch.equal(values[:, bare, :, i].long(), codes)


def test_fp8(device):
    got = run(8, "portable", device)[:, :4].contiguous().view(torch.float16).double() * 256
    data = words(device).view(torch.uint8).view(torch.float8_e4m3fn).view(-1, 4).double()
    finite = data.isfinite()
    assert torch.equal(got[finite], data[finite])
    assert bool(got.isfinite().all())


def test_funnel(device):
    got = run(4, "portable", device)[:, 8:].contiguous().view(torch.int32)[:, 0].long() & 0xFFFFFFFF
    low = words(device).long() & 0xFFFFFFFF
    joined = low | ((low ^ 0x5A5A5A5A) << 32)
    shift = torch.arange(len(low)) & 31
    want = torch.tensor(
        [((int(j) & (2**64 - 1)) >> int(s)) & 0xFFFFFFFF for j, s in zip(joined, shift, strict=True)]
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize("top", [11, 14])
def test_numbers_as_pairs_of_fp16(top, device):
    pairs, (up, down) = run_halves("portable", device, top)
    x = numbers(device)
    want = x.T.to(torch.float16)
    assert torch.equal(pairs.isnan(), want.isnan())
    assert torch.equal(pairs[~want.isnan()], want[~want.isnan()])
    assert torch.equal(up.double() * down.double(), torch.ones(len(up)).double())
    size = x[0].abs()
    usual = size.isfinite() & (size >= 2.0**-100)
    scaled = size.double()[usual] * up.double()[usual]
    assert bool((scaled >= 2.0**top).all()) and bool((scaled < 2.0 ** (top + 1)).all())
    assert torch.equal(up[size < 2.0**-100], torch.full_like(up[size < 2.0**-100], 2.0 ** (top + 100)))
