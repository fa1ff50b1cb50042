"""Kernels by name, and the hints that they are compiled with."""

from __future__ import annotations

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from .config import DecodeConfig
from .decode import make_decode

__all__ = ["HINTS", "build"]

HINTS: dict[str, dict[str, Any]] = {
    # Two scalar operations with a fused conversion cost less than the packed one that needs conversions of its own.
    # Four waves per SIMD are what the memory latency asks for.
    "decode": {"llvm_options": {"vectorize-slp": False}, "waves_per_eu": 4},
}

_MAKERS = {"decode": (make_decode, 8, 5)}


def build(kind: str, config: DecodeConfig, *, artifact: bool = False) -> Any:
    """The compiled launcher of a kernel; with ``artifact``, the text of the compiled module instead.

    Nothing is launched: the first argument is a null pointer, which FlyDSL takes for a placeholder.
    """
    make, addresses, integers = _MAKERS[kind]
    launch = make(config)
    null = flyc.from_c_void_p(fx.Uint8, 0)
    done = flyc.compile[HINTS[kind]](launch, null, *[0] * (addresses - 1), *[1] * integers, fx.Stream(None))
    return str(launch._last_compiled[1]._ir_text) if artifact else done
