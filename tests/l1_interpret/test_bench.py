"""The harness's own kernels: what the backends are compared with must be right, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from turboquant_rocm.bench.baselines import PagedDecode, Tile
from turboquant_rocm.bench.cases import Case
from turboquant_rocm.bench.inputs import LIMIT
from turboquant_rocm.bench.kernels import copy_kernel, read_kernel

CASES = {
    "plain": {},
    "one head per group": {"num_heads": 2},
    "head size 96": {"head_size": 96},
    "ragged": {"batch": 3, "context": 200, "lengths": "log_uniform"},
    "window": {"window": 20},
    "window of one": {"window": 1},
    "queries": {"query_len": 5},
    "queries and window": {"query_len": 4, "window": 3},
    "fp16": {"dtype": "fp16"},
}


@pytest.mark.parametrize("name", CASES)
def test_paged_decode_is_attention(name: str):
    torch.manual_seed(1)
    shape = {"batch": 2, "context": 75, "num_heads": 8, "num_kv_heads": 2, "head_size": 64, **CASES[name]}
    case = Case("decode", "k8v4", **shape)
    decode, blocks = PagedDecode.of(case, torch.device("cpu"))
    cache = (blocks, case.block_size, case.num_kv_heads, case.head_size)
    key, value = (torch.randn(cache, dtype=decode.query.dtype) for _ in range(2))
    for tile in (Tile(1, 32, 1, 1), Tile(3, 16, 2, 2), Tile(7, 16, 1, 1)):
        error = decode.error(tile, key, value)
        assert error <= LIMIT[case.dtype], f"{tile}: {error:.1e}"


def test_a_wrong_block_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """The check that comes before the time: a kernel that reads the neighbour's blocks does not pass."""
    case = Case("decode", "k8v4", batch=2, context=75, num_heads=4, num_kv_heads=2, head_size=64)
    decode, blocks = PagedDecode.of(case, torch.device("cpu"))
    key, value = (torch.randn(blocks, 16, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    tile = Tile(2, 32, 1, 1)
    assert decode.error(tile, key, value) <= LIMIT["bf16"]
    right = PagedDecode.__call__

    def wrong(self: PagedDecode, *args: Any) -> None:
        right(replace(self, table=self.table.flip(0)), *args)

    monkeypatch.setattr(PagedDecode, "__call__", wrong)
    assert decode.error(tile, key, value) > 10 * LIMIT["bf16"]


def test_read_kernel_reads_everything():
    x = torch.zeros(4 * 2 * 64, dtype=torch.int32)
    for at in range(0, len(x), 37):
        x.zero_()
        x[at] = 5
        out = torch.full((4,), -1, dtype=torch.int32)
        read_kernel[(4,)](x, out, BLOCK=64, ITERATIONS=2)
        assert out.tolist() == [5 if at // 128 == i else 0 for i in range(4)]


def test_copy_kernel_copies_everything():
    x = torch.randint(0, 1 << 30, (4 * 2 * 64,), dtype=torch.int32)
    y = torch.zeros_like(x)
    copy_kernel[(4,)](x, y, BLOCK=64, ITERATIONS=2)
    assert torch.equal(x, y)
