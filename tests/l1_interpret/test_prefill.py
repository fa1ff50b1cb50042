"""attend_prefill against the definition: routes per sequence, windows, sinks, soft cap, memory, merged lse."""

from __future__ import annotations

import pytest
import torch

from tests import prefill_checks as checks
from turboquant_rocm import SpecError
from turboquant_rocm.continuation import prefill_rows


def test_routes_are_per_sequence():
    """Pitfall 11: q = s = 1000 beside q = 100, s = 500: the second keeps its history."""
    work = prefill_rows([1000, 100, 0, 300, 1], [1000, 500, 7, 900, 5000])
    assert [(w.sequence, w.route, w.start, w.history) for w in work] == [
        (0, "first", 0, 0),
        (1, "decode", 1000, 400),
        (3, "chunks", 1100, 600),
        (4, "decode", 1400, 4999),
    ]
    with pytest.raises(SpecError, match="total_lens"):
        prefill_rows([5], [4])


@pytest.mark.parametrize("feature", checks.FEATURES)
@pytest.mark.parametrize("layout", ["aos", "soa"])
def test_against_the_definition(layout, feature, device):
    checks.check(checks.reference_layer("4bit_nc", layout, feature), device)


@pytest.mark.parametrize("preset", ["k8v4", "3bit_nc"])
def test_presets(preset, device):
    checks.check(checks.reference_layer(preset, "soa", "plain", head_size=96), device)


def test_own_attention(device):
    checks.check_own_attention(checks.reference_layer("4bit_nc", "soa", "sinks"), device)


def test_memory_does_not_grow_with_the_history(device):
    """Pitfall 12: what dequantise is asked to write per call is bounded by chunk_tokens, whatever the history."""
    checks.check_chunks_are_bounded(checks.reference_layer("4bit_nc", "soa", "plain"), device)


def test_wrong_arguments_are_named(device):
    bound = checks.reference_layer("4bit_nc", "soa", "plain")
    case = checks.Case.make(bound, [4], [4], device)
    with pytest.raises(SpecError, match="key"):
        case.run(key=case.key[:, :1])
    with pytest.raises(SpecError, match="sinks"):
        case.run(sinks=torch.zeros(bound.layer.num_heads))
    with pytest.raises(SpecError, match="chunk_tokens"):
        case.run(chunk_tokens=0)
