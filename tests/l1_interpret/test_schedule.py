"""Schedules of ragged batches, interpreted, and decode over them."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl

from tests.decode_checks import LAYOUTS, PRESETS, Case, Config, check, decode, set_up
from tests.schedule_checks import check_schedule
from turboquant_rocm.backends._triton.schedule import visible_tiles


@triton.jit
def tiles_kernel(seq_lens_ptr, tiles_ptr, window, T: tl.constexpr, WINDOW: tl.constexpr):
    i = tl.arange(0, 4)
    tl.store(tiles_ptr + i, visible_tiles(tl.load(seq_lens_ptr + i), window, T, WINDOW))


def test_equal_lengths_are_cut_equally(device):
    """As many tiles to a piece as without a schedule."""
    assert check_schedule([8192] * 8, 8 * 3, device) == -(-256 // 3)
    assert check_schedule([4096] * 3, 3 * 5, device) == -(-128 // 5)


def test_one_long_sequence_gets_almost_all_pieces(device):
    share = check_schedule([100_000, *[32] * 15], 16 * 4, device)
    assert share <= -(-(100_000 // 32 + 1) // (64 - 16)) + 1


@pytest.mark.parametrize("lens", [[0, 0], [0, 1, 0], [-3, 5], [33] * 129, list(range(0, 1300, 10))])
def test_edges(lens, device):
    check_schedule(lens, 2 * len(lens), device)


def test_least_size_of_a_piece(device):
    assert check_schedule([320, 64, 640], 30, device, min_tiles=4) == 4


def test_most_pieces_of_a_sequence(device):
    assert check_schedule([32 * 1000, 5], 2000, device, most=256) == 4
    check_schedule([32 * 1000, 5, 32 * 900], 60, device, most=7)


@pytest.mark.parametrize("window", [1, 16, 17, 1000])
def test_window(window, device):
    check_schedule([0, 15, 16, 17, 1000, 1001, 5000], 21, device, window=window)


def test_random_lengths(device):
    rng = random.Random(0)
    for _ in range(40):
        batch = rng.randint(2, 300)
        lens = [int(2 ** rng.uniform(0, 15)) for _ in range(batch)]
        check_schedule(lens, batch * rng.randint(2, 6), device, min_tiles=rng.choice((1, 2, 9)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("arch", ["sm_90", "gfx950"])
def test_decode(arch, preset, layout, device):
    check(Config(preset, layout, arch=arch), Case((0, 137, 1, 50), splits=2, cut=True), device)


def test_decode_with_everything(device):
    config = Config(window=True, sinks=True, soft_cap=30.0, group=5, heads=3, block_size=48)
    check(config, Case((5, 200, 0, 33), window=40, splits=3, cut=True), device)
    check(Config(group=1, sinks=True), Case((400, 3, 3), splits=4, cut=True), device)


@pytest.mark.parametrize(("window", "last"), [(0, 0), (100, 4)])
def test_tiles_are_never_negative(window, last, device):
    lens = torch.tensor([-(2**31), -1, 33, 2**31 - 1], dtype=torch.int32, device=device)
    tiles = torch.full_like(lens, -1)
    tiles_kernel[(1,)](lens, tiles, window, 32, window > 0)
    assert tiles.tolist() == [0, 0, 2, last]


def test_a_length_that_is_none_harms_no_other_sequence(device):
    """With a schedule and without, the largest int32 is read as nothing."""
    for cut in (False, True):
        case = Case((50, 33, 80), splits=3, cut=cut)
        setup = set_up(Config(group=2, heads=1), case, device)
        setup.bound.checks = "shapes"
        want, _ = decode(setup, case)
        setup.lens[1] = 2**31 - 1
        out, lse = decode(setup, case)
        assert torch.equal(out[::2], want[::2])
        assert bool((out[1] == 0).all()) and bool((lse[1] == float("-inf")).all())
