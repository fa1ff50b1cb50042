"""Kernels in Triton's CPU interpreter, with its conversions repaired (tests/interpreter_repair.py).

Whether a kernel is interpreted is decided when its module is imported. Without a GPU nothing else could run it, so
this folder asks for the interpreter by itself; with a GPU run it on its own: TRITON_INTERPRET=1 pytest
tests/l1_interpret.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

triton = pytest.importorskip("triton", reason="the interpreter is a part of triton")

from tests import interpreter_repair  # noqa: E402
from turboquant_rocm.backends._triton.rotation import sylvester  # noqa: E402

INTERPRETED = not isinstance(sylvester, triton.runtime.JITFunction)
if INTERPRETED:
    interpreter_repair.install()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not INTERPRETED:
        pytest.skip("kernels are compiled in this process: TRITON_INTERPRET=1 pytest tests/l1_interpret")


@pytest.fixture(scope="session")
def device() -> str:
    """Interpreted kernels work on host memory."""
    return "cpu"
