"""Compiled kernels reach the leg's result file: as properties of the JUnit file, from which ci/leg.py takes them."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest


@pytest.fixture
def record_kernel(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """record_kernel(arch, kernel, registers=..., spills=..., scratch=..., lds=...): whole numbers that may not rise."""

    def record(arch: str, kernel: str, **numbers: int) -> None:
        record_property(f"kernel:{arch}/{kernel}", json.dumps(numbers))

    return record
