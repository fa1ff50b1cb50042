"""Options of a cache on a GPU: exact tokens and keys less their mean around the kernels, rotated values in them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("turboquant_rocm.integrations.transformers", exc_type=ImportError)

from tests.l0_pure.test_transformers_cache import build
from tests.option_checks import OPTIONS, check_mixture, check_options
from turboquant_rocm.options import CacheOptions


def check(options: CacheOptions, preset: str, backend: str, device: str, target: Any) -> None:
    model = build("llama", 64, "fp16").to(device)
    check_options(model, options, preset, backend=backend, dtype="fp16", target=target)


@pytest.mark.backend("triton_soa")
@pytest.mark.parametrize("preset", ["3bit_nc", "4bit_nc"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options: CacheOptions, preset: str, device: str, target: Any):
    check(options, preset, "triton_soa", device, target)


@pytest.mark.backend("triton_rotated")
@pytest.mark.parametrize("preset", ["3bit_nc+rotated_values", "4bit_nc+rotated_values"])
@pytest.mark.parametrize("options", [CacheOptions(), OPTIONS[3]], ids=str)
def test_options_with_rotated_values(options: CacheOptions, preset: str, device: str, target: Any):
    check(options, preset, "triton_rotated", device, target)


@pytest.mark.backend("triton_rotated")
def test_layers_with_and_without_rotated_values(device: str, target: Any):
    layers = {0: "4bit_nc+rotated_values", 1: "3bit_nc"}
    chosen = {0: "triton_rotated", 1: "triton_soa"}
    model = build("llama", 64, "fp16", num_hidden_layers=2).to(device)
    check_mixture(model, layers, chosen, dtype="fp16", target=target)
