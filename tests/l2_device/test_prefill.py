"""attend_prefill on a device, with the Triton backends where they serve it: routes, features, memory."""

from __future__ import annotations

import pytest
import torch

from tests import prefill_checks as checks
from tests.cases import layer_spec
from turboquant_rocm import Decision, bind, get_preset


def layer(target, layout: str, preset: str, feature: str, head_size: int = 128):
    spec = layer_spec(head_size, 2, 4, "bf16", **checks.FEATURES[feature])
    return bind(Decision(spec, target, get_preset(preset), 16, f"triton_{layout}", layout))


@pytest.mark.parametrize("feature", checks.FEATURES)
@pytest.mark.parametrize("layout", ["aos", "soa"])
def test_against_the_definition(layout, feature, target, device):
    checks.check(layer(target, layout, "4bit_nc", feature), device, limit=1e-2)


@pytest.mark.parametrize("preset", ["k8v4", "k3v4_nc", "3bit_nc"])
def test_presets(preset, target, device):
    checks.check(layer(target, "soa", preset, "plain", head_size=64), device, limit=1e-2)


def test_own_attention(target, device):
    checks.check_own_attention(layer(target, "soa", "4bit_nc", "plain"), device, limit=1e-2)


def test_peak_memory_does_not_grow_with_the_history(target, device):
    """Pitfall 12, measured: 2k and 64k tokens of history cost the same extra memory: bytes asked for,
    since what the allocator gives depends on the holes that it has."""
    bound = layer(target, "soa", "4bit_nc", "plain")
    peaks = {}
    for history in (2048, 4096, 65536):
        case = checks.Case.make(bound, [512], [history + 512], device)
        starts = torch.tensor([0, 512], dtype=torch.int32, device=device)
        case.run(query_lens=[512], total_lens=[history + 512], query_start_loc=starts, chunk_tokens=1024)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        case.run(query_lens=[512], total_lens=[history + 512], query_start_loc=starts, chunk_tokens=1024)
        torch.cuda.synchronize()
        peaks[history] = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert max(peaks.values()) <= 1.02 * min(peaks.values()) + 4096, peaks
