"""generate() over the cache on a GPU, with the dispatcher's backend, against the reference's decode.

The model is that of the folder in TURBOQUANT_MODEL, or random weights of its architecture: no network is needed.
"""

from __future__ import annotations

import pytest

pytest.importorskip("turboquant_rocm.integrations.transformers", exc_type=ImportError)

from tests import generate_checks as checks


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("chosen", [None, "triton_aos"])
@pytest.mark.parametrize("mode", ["drop-in", "direct"])
def test_sixty_four_greedy_tokens(mode: str, chosen: str | None, dtype: str, device, target):
    print(checks.which_model())
    model = checks.small_model(dtype, device)
    checks.check_generate(model, mode, backend=chosen, dtype=dtype, target=target)
