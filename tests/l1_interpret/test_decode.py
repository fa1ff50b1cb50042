"""Decode, interpreted: every preset, layout, head size and feature on small shapes, for the register layouts of all
targets (the permutations differ, the results must not)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.decode_checks import (
    HEAD_SIZES,
    LAYOUTS,
    PRESETS,
    Case,
    Config,
    check,
    check_a_value_that_few_see,
    check_lazy,
    compare,
    decode,
    set_up,
)

ARCHES = ("sm_90", "gfx942", "gfx950")


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset, layout, arch, device):
    check(Config(preset, layout, 64, 2, 3, arch=arch), Case((0, 37, 50), splits=2), device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("head_size", [d for d in HEAD_SIZES if d != 64])
def test_head_sizes(head_size, preset, layout, device):
    arch = ARCHES[(head_size // 16) % 3]
    check(Config(preset, layout, head_size, 1, 2, dtype="fp16", arch=arch), Case((3, 21)), device)


@pytest.mark.parametrize("group", [1, 5, 7, 12, 32])
def test_groups(group, device):
    """Pitfall 16: odd GQA ratios and KV-head counts, each query head on its own."""
    check(Config(heads=3, group=group), Case((18, 5)), device)


@pytest.mark.parametrize("window", [1, 15, 16, 17])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_window_edges(layout, window, device):
    """Pitfall 18; blocks that left the window have poison in the table."""
    check(Config(layout=layout, window=True), Case((0, 16, 17, 70), window=window, splits=2), device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("splits", [1, 3])
def test_sinks(layout, splits, device):
    """Pitfall 17: the sink is a logit of the denominator and of the lse."""
    check(Config(layout=layout, sinks=True), Case((0, 1, 40), splits=splits), device)


def test_sinks_at_the_ends(device):
    """Pitfall 17: -inf is no sink at all; +30 leaves nearly nothing, and no NaN."""
    config = Config(sinks=True)
    case = Case((0, 33))
    setup = set_up(config, case, device)
    setup.sinks.fill_(float("-inf"))
    out, lse = decode(setup, case)
    plain = set_up(replace(config, sinks=False), case, device)
    want, want_lse = decode(plain, case)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    setup.sinks.fill_(30.0)
    out, lse = decode(setup, case)
    assert bool(out.isfinite().all())
    assert float(out.abs().max()) < 1e-4
    assert torch.allclose(lse[1], torch.tensor(30.0), atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_queries(layout, device):
    """Pitfall 20: row j sees seq_len - q_len + j + 1 keys; rows past the last sequence stay as they are."""
    config = Config(layout=layout, head_size=64, heads=1, group=6, most_queries=8)
    check(config, Case((5, 70, 33, 0), (3, 5, 0, 2), splits=2, spare_rows=2), device)
    check(replace(config, window=True, sinks=True), Case((5, 70, 33), (3, 5, 7), window=16, splits=1), device)


def test_soft_cap(device):
    check(Config(soft_cap=15.0), Case((40, 5), scale=0.9), device)


@pytest.mark.parametrize("padding", [2, 26, 58])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padded_slots(layout, padding, device):
    """Pitfall 13."""
    check(Config(layout=layout, padding=padding, heads=3), Case((40, 5)), device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_block_stride(layout, device):
    """Blocks at addresses that are only even."""
    config, case = Config(layout=layout, heads=3), Case((40, 5))
    plain = set_up(config, case, device)
    stride = plain.bound.layout.block_stride + 130
    out, _ = decode(plain, case)
    setup = set_up(config, case, device, block_stride=stride)
    got, _ = decode(setup, case)
    assert torch.equal(got, out)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_at_an_even_address(layout, device):
    config, case = Config(layout=layout, preset="k3v4_nc"), Case((40, 5))
    setup = set_up(config, case, device)
    want, _ = decode(setup, case)
    old = setup.cache.data
    flat = torch.zeros(old.shape[0] * old.stride(0) + 64, dtype=torch.uint8, device=device)
    first = -flat.data_ptr() % 16 + 2
    moved = flat[first : first + old.shape[0] * old.stride(0)].as_strided(old.shape, old.stride())
    moved.copy_(old)
    assert moved.data_ptr() % 4 == 2
    object.__setattr__(setup.cache, "data", moved)
    got, _ = decode(setup, case)
    assert torch.allclose(got.float(), want.float(), atol=2e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preset", PRESETS)
def test_prefetch(preset, layout, device):
    """Loading a tile ahead changes no bit."""
    config, case = Config(preset, layout, heads=3), Case((0, 70, 33), splits=2)
    alone = {"alone": layout == "soa"}  # one of each; interpreted, queries are what takes time
    want, _ = decode(set_up(config, case, device, tuning=alone), case)
    got, _ = decode(set_up(config, case, device, tuning={"prefetch": True, **alone}), case)
    assert torch.equal(got, want)


@pytest.mark.parametrize(("preset", "layout"), [("4bit_nc", "soa"), ("3bit_nc", "soa"), ("k3v4_nc", "aos")])
def test_lazy(preset, layout, device):
    check_lazy(preset, layout, 64, device)


@pytest.mark.parametrize("preset", ["k8v4", "4bit_nc", "3bit_nc"])
def test_a_value_that_few_see(preset, device):
    check_a_value_that_few_see(Config(preset, group=4, heads=1, most_queries=2, arch="sm_90"), device)


@pytest.mark.parametrize("block_size", [48, 528])
def test_block_sizes(block_size, device):
    """Pitfall 13."""
    check(Config(block_size=block_size), Case((50, 530), splits=2), device)


@pytest.mark.parametrize("value_scale", [1e-5, 3e4])
def test_sizes_of_values(value_scale, device):
    check(Config(dtype="fp16", preset="k8v4"), Case((40, 5), value_scale=value_scale), device)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("below", [0.0, 0.125, 0.5, 8.0])
def test_queries_just_below_a_power_of_two(below, sign, device):
    """Scaled by a power of two they would round to 2^14, which two int8 numbers of base 128 cannot hold."""
    config, case = Config("3bit_nc", head_size=64, dtype="fp16", group=8), Case((1,))
    setup = set_up(config, case, device)
    rotation = torch.from_numpy(setup.bound.ops.plan.matrix).double()  # of 1 and -1
    query = sign * 256.0 * rotation[5]
    query[0] -= sign * below * rotation[5, 0]
    setup.query.copy_(query.half().expand_as(setup.query))
    assert float((rotation @ setup.query[0, 0].double())[5]) == sign * (16384.0 - below)
    out, lse = decode(setup, replace(case, scale=1e-3))
    compare(setup, config, replace(case, scale=1e-3), out, lse)


def test_strides(device):
    """Leading strides of query, out and lse are honoured."""
    config, case = Config(), Case((40, 5, 17))
    setup = set_up(config, case, device)
    want, want_lse = decode(setup, case)
    n, hq, d = setup.query.shape
    wide = torch.zeros(n, hq + 3, d + 8, dtype=setup.query.dtype, device=device)
    wide[:, 1 : hq + 1, :d] = setup.query
    out = torch.zeros(n, hq + 2, d + 4, dtype=setup.query.dtype, device=device)
    lse = torch.zeros(hq + 1, n, device=device)
    setup.bound.decode(
        wide[:, 1 : hq + 1, :d], setup.cache, setup.table, setup.lens,
        out=out[:, 2:, :d], lse=lse[1:].T,
    )  # fmt: skip
    assert torch.equal(out[:, 2:, :d], want)
    assert torch.equal(lse[1:].T, want_lse)
    assert not out[:, :2].any()
    assert not out[..., d:].any()


def test_warmup_reserves_what_decode_takes(device):
    """Through the bound layer; after it, no call in the range makes the workspace grow."""
    from turboquant_rocm.backends._triton.workspace import Workspace

    config, case = Config(most_queries=4), Case((40, 5, 17), (4, 1, 2), splits=2)
    setup = set_up(config, case, device)
    space = Workspace(device)
    kernels = setup.bound.warmup(3, 48, 4, device=device, workspace=space)
    reserved = space.nbytes
    assert kernels == 3, "prepare, decode and reduce; interpreted ones have no specialisations"
    assert reserved > 0
    setup.bound.decode(
        setup.query, setup.cache, setup.table, setup.lens, setup.starts, max_query_len=4, workspace=space
    )
    assert space.nbytes == reserved
