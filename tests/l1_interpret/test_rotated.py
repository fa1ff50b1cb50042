"""Decode with rotated values, interpreted: presets, head sizes and features against the bar of all decode kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.decode_checks import ROTATED, Case, Config, check
from turboquant_rocm import Preset

ROTATED_4BIT, ROTATED_3BIT = "4bit_nc+rotated_values", "3bit_nc+rotated_values"


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("preset", ROTATED)
def test_presets(preset, splits, device):
    check(Config(preset, head_size=64, heads=2, group=3), Case((0, 37, 150, 1), splits=splits), device)


def test_values_of_two_bits(device):
    two = Preset("k4v2+rotated_values", 4, 2, True, rotated_values=True)
    check(Config(two, head_size=128, heads=1), Case((45, 2)), device)


@pytest.mark.parametrize("head_size", [128, 256])
@pytest.mark.parametrize("preset", ROTATED)
def test_head_sizes(preset, head_size, device):
    check(Config(preset, head_size=head_size, heads=1, group=2, dtype="fp16"), Case((3, 41)), device)


@pytest.mark.parametrize("group", [1, 5, 7, 12, 16])
def test_groups(group, device):
    check(Config(ROTATED_3BIT, heads=3, group=group), Case((18, 5)), device)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 40])
def test_window_edges(window, device):
    """Blocks that left the window have poison in the table."""
    check(Config(ROTATED_4BIT, window=True), Case((0, 16, 17, 70), window=window, splits=2), device)


@pytest.mark.parametrize("splits", [1, 3])
def test_sinks(splits, device):
    check(Config(ROTATED_4BIT, sinks=True), Case((0, 1, 40), splits=splits), device)


def test_several_queries(device):
    config = Config(ROTATED_3BIT, head_size=64, heads=1, group=6, most_queries=8)
    check(config, Case((5, 70, 33, 0), (3, 5, 0, 2), splits=2, spare_rows=2), device)
    check(replace(config, window=True, sinks=True), Case((5, 70, 33), (3, 5, 7), window=16, splits=1), device)


def test_soft_cap(device):
    check(Config(ROTATED_4BIT, soft_cap=15.0), Case((40, 5), scale=0.9), device)


@pytest.mark.parametrize("padding", [2, 26])
def test_padded_slots_and_large_blocks(padding, device):
    check(Config(ROTATED_3BIT, block_size=48, padding=padding), Case((100, 49)), device)


@pytest.mark.parametrize(("key_scale", "value_scale"), [(1.0, 1e-4), (1e-3, 3000.0), (30.0, 1.0)])
def test_norms_of_every_size(key_scale, value_scale, device):
    """Weights times value norms leave the range of fp16 without a running scale."""
    case = Case((90, 20), key_scale=key_scale, value_scale=value_scale)
    check(Config(ROTATED_4BIT, dtype="fp16"), case, device)
