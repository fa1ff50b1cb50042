"""The kernels of TurboQuant_prod on a GPU; tests/test_backend_contract.py runs there over the dispatcher, too."""

from __future__ import annotations

import pytest
import torch

from tests.prod_checks import PRESETS, check_decode, check_dequantize, check_store, check_warmup, made


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


@pytest.mark.backend("triton_prod")
@pytest.mark.parametrize("preset", PRESETS)
def test_warmup(preset: str):
    check_warmup(preset, 128, "cuda")


@pytest.mark.backend("triton_prod")
@pytest.mark.parametrize("queries", [1, 3])
def test_graph(queries: int):
    """Captured after warm-up: nothing is allocated and nothing synchronises; replays follow lengths and tables."""
    d, batch, blocks = 128, 4, 32
    bound, _, ops = made("turboquant_prod_k3v4", d, "cuda", group=4)
    g = torch.Generator().manual_seed(0)
    cache = bound.allocate(batch * blocks, "cpu")
    key, value = (torch.randn(batch * blocks * 16, 2, d, generator=g).bfloat16() for _ in range(2))
    bound.store(key, value, cache, torch.randperm(batch * blocks * 16, generator=g))
    data = cache.data.cuda()
    order = torch.randperm(batch * blocks, generator=g).view(batch, blocks).int().cuda()
    table, lens = order.clone(), torch.full((batch,), blocks * 16, dtype=torch.int32, device="cuda")
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * queries
    query = torch.randn(batch * queries, 8, d, generator=g).bfloat16().cuda()
    out, lse = torch.zeros_like(query), torch.zeros(batch * queries, 8, device="cuda")
    ops.warmup(batch, blocks * 16, queries)

    def call(out: torch.Tensor, lse: torch.Tensor) -> None:
        loc = None if queries == 1 else starts
        ops.decode(query, data, table, lens, loc, queries, d**-0.5, None, out, lse)

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            held = torch.cuda.memory_stats()["allocation.all.allocated"]
            torch.cuda.set_sync_debug_mode("error")
            call(out, lse)
            torch.cuda.set_sync_debug_mode("default")
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == held
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for lengths in ([512, 512, 512, 512], [3, 500, 17, 256], [0, 1, 16, 512]):
        lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        table.copy_(order[torch.randperm(batch, generator=g).cuda()])
        out.fill_(float("nan"))
        graph.replay()
        want, want_lse = torch.full_like(out, float("nan")), torch.zeros_like(lse)
        call(want, want_lse)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
        assert bool(out.isfinite().all())
