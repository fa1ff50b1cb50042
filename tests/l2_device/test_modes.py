"""The four modes of compressed stores on a GPU, over the dispatcher's backend: random models, and the small model.

The small model is that of the folder in TURBOQUANT_MODEL, or random weights of its architecture.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("turboquant_rocm.integrations.transformers", exc_type=ImportError)

from tests import generate_checks as checks
from tests.l0_pure.test_transformers_cache import build
from tests.mode_checks import ATTENTIONS, check_modes


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("head_size", [64, 128])
def test_modes(head_size: int, attention: str, device: str, target: Any):
    model = build("llama", head_size, "fp16").to(device)
    check_modes(model, attention, backend=None, dtype="fp16", target=target)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_modes_of_the_small_model(attention: str, device: str, target: Any):
    print(checks.which_model())
    check_modes(checks.small_model("fp16", device), attention, backend=None, dtype="fp16", target=target)
