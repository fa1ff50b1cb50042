"""Decode with rotated values on a GPU against the bar of all decode kernels; graphs and warm-up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.decode_checks import ROTATED, Case, Config, check, compare, decode, set_up

pytestmark = pytest.mark.backend("triton_rotated")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("preset", ROTATED)
def test_presets(preset, head_size, dtype, device, target):
    config = Config(preset, head_size=head_size, heads=2, group=4, dtype=dtype)
    for splits in (1, 5, None):
        check(config, Case((0, 37, 1500, 1, 16), splits=splits), device, target)


@pytest.mark.parametrize("group", [1, 3, 5, 8, 12, 16])
@pytest.mark.parametrize("preset", ROTATED)
def test_several_queries(preset, group, device, target):
    config = Config(preset, head_size=128, heads=3, group=group, most_queries=9)
    case = Case((5, 700, 33, 0), (3, 9, 0, 2), spare_rows=2)
    check(config, case, device, target)
    check(replace(config, window=True, sinks=True), replace(case, window=50), device, target)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 400])
def test_windows_sinks_and_soft_caps(window, device, target):
    config = Config(ROTATED[1], window=True, sinks=True, soft_cap=20.0, block_size=48, padding=26)
    check(config, Case((0, 16, 17, 900), window=window), device, target)


@pytest.mark.parametrize(("key_scale", "value_scale"), [(1.0, 1e-4), (1e-3, 3000.0), (30.0, 1.0)])
def test_norms_of_every_size(key_scale, value_scale, device, target):
    case = Case((90, 2000), key_scale=key_scale, value_scale=value_scale)
    check(Config(ROTATED[1], head_size=128, dtype="fp16"), case, device, target)


def test_a_captured_graph_replays_other_lengths(device, target):
    """After warm-up a call allocates nothing but the results, and a graph of it follows the lengths in memory."""
    config, case = Config(ROTATED[3], head_size=128, heads=2, group=4), Case((300, 40, 0, 512))
    setup = set_up(config, case, device, target)
    setup.bound.checks = "off"
    setup.bound.warmup(4, setup.table.shape[1] * config.block_size, device=device)
    out = torch.empty_like(setup.query)
    lse = torch.empty(setup.query.shape[:2], device=device)

    def call() -> None:
        setup.bound.decode(setup.query, setup.cache, setup.table, setup.lens, out=out, lse=lse)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    shorter = replace(case, lens=(299, 17, 0, 100))
    setup.lens.copy_(torch.tensor(shorter.lens, dtype=torch.int32))
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    compare(setup, config, shorter, out, lse)
    again, again_lse = decode(setup, shorter)
    assert torch.equal(out, again) and torch.equal(lse, again_lse)
