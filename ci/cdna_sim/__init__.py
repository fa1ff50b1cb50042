"""Functional simulator of gfx942 and gfx950 machine code. See README.md."""

from __future__ import annotations

from .counters import Counters, model, roofline
from .engine import Result, Simulator
from .errors import SimError
from .loader import CodeObject, load_code_object
from .triton_api import compile_triton, simulate_triton

__all__ = [
    "CodeObject", "Counters", "Result", "SimError", "Simulator", "compile_triton", "load_code_object", "model",
    "roofline", "simulate_triton",
]  # fmt: skip
