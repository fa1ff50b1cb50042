"""The four modes of compressed stores in a small random model on a GPU, over the dispatcher's backend."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("turboquant_rocm.integrations.transformers", exc_type=ImportError)

from tests.l0_pure.test_transformers_cache import build
from tests.mode_checks import ATTENTIONS, check_modes


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("head_size", [64, 128])
def test_modes(head_size: int, attention: str, device: str, target: Any):
    model = build("llama", head_size, "fp16").to(device)
    check_modes(model, attention, backend=None, dtype="fp16", target=target)
