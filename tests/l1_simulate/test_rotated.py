"""The kernels for rotated values as gfx942 and gfx950 machine code: what the interpreter and devices are asked."""

from __future__ import annotations

import pytest

from .sim_helpers import ARCHS

from ci.cdna_sim.launcher import simulated_launches  # isort: skip
from tests import store_checks
from tests.decode_checks import ROTATED, Case, Config, check

PRESETS = (ROTATED[0], ROTATED[3])  # FP8 keys with 4-bit values; 3-bit codes of both


@pytest.mark.parametrize("head_size", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("arch", ARCHS)
class TestMachineCode:
    def test_store(self, arch: str, preset: str, head_size: int):
        with simulated_launches(arch) as log:
            store_checks.check_against_reference(preset, "soa", head_size, "bf16", "cpu", vendor="amd")
        assert [launch.name for launch in log] == ["_store_kernel"]

    def test_dequantise(self, arch: str, preset: str, head_size: int):
        with simulated_launches(arch) as log:
            store_checks.check_dequantize(preset, "soa", head_size, "cpu", vendor="amd")
        assert [launch.name for launch in log] == ["_dequantize_kernel"]

    def test_decode_in_two_splits(self, arch: str, preset: str, head_size: int):
        config = Config(preset, head_size=head_size, arch=arch)
        with simulated_launches(arch) as log:
            check(config, Case((40, 0, 17, 1), splits=2), "cpu")
        assert [launch.name for launch in log] == ["rotated_decode_kernel", "rotated_reduce_kernel"]
