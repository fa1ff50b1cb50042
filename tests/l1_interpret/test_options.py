"""Options of a cache over interpreted kernels, by the checks that a GPU gets (tests/l2_device)."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.l0_pure.test_transformers_cache import build
from tests.option_checks import OPTIONS, check_mixture, check_options
from turboquant_rocm.integrations import transformers as tq
from turboquant_rocm.options import CacheOptions
from turboquant_rocm.target import get_target


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check that a GPU's keys lie on it: interpreted kernels work on host memory."""

    def initialize(layer: tq.PackedLayer, key: Any, value: Any) -> None:
        layer.device, layer._batch, layer.is_initialized = key.device, key.shape[0], True

    monkeypatch.setattr(tq.PackedLayer, "lazy_initialization", initialize)


@pytest.mark.parametrize(
    ("preset", "chosen", "options"),
    [
        ("4bit_nc", "triton_soa", OPTIONS[0]),
        ("3bit_nc", "triton_soa", OPTIONS[4]),
        ("4bit_nc+rotated_values", "triton_rotated", OPTIONS[3]),
    ],
)
def test_options(preset: str, chosen: str, options: CacheOptions):
    model = build("llama", 64, "fp16", num_hidden_layers=1)
    check_options(model, options, preset, backend=chosen, dtype="fp16", target=get_target("sm_90"), count=54)


def test_layers_with_and_without_rotated_values():
    layers = {0: "4bit_nc+rotated_values", 1: "3bit_nc"}
    chosen = {0: "triton_rotated", 1: "triton_soa"}
    model = build("llama", 64, "fp16", num_hidden_layers=2)
    check_mixture(model, layers, chosen, dtype="fp16", target=get_target("sm_90"), count=54)
