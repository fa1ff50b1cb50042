"""The portable device functions against numpy: every code decodes to its own centroid (pitfall 6), every FP8 byte to
its own number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.device_twins import HEAD_SIZE, run, words
from turboquant_rocm.backends._triton.tile import centroid_table
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
