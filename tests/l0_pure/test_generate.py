"""generate() over the cache on a CPU: random weights of the small model's architecture."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests import generate_checks as checks


@pytest.mark.parametrize(
    ("mode", "dtype"), [("drop-in", "fp32"), ("direct", "fp32"), ("direct", "fp16"), ("direct", "bf16")]
)
def test_sixty_four_greedy_tokens(mode: str, dtype: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(checks.MODEL_VARIABLE, raising=False)
    model = checks.small_model(dtype, layers=4)
    checks.check_generate(model, mode, backend="torch_reference", dtype=dtype, target="cpu")
