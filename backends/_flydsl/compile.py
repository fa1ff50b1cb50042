"""Kernels by name, the arguments that they take, and the hints that they are compiled with."""

from __future__ import annotations

from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx

from .decode import make_decode
from .prepare import make_prepare
from .reduce import make_reduce

__all__ = ["HINTS", "build"]

HINTS: dict[str, dict[str, Any]] = {
    # Two scalar operations with a fused conversion cost less than the packed one that needs conversions of its own.
    # Four waves per SIMD are what the memory latency asks for.
    "decode": {"llvm_options": {"vectorize-slp": False}, "waves_per_eu": 4},
    "prepare": {},
    "reduce": {},
}

_MAKERS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "decode": (make_decode, (0,) * 8 + (1,) * 8),
    "prepare": (make_prepare, (0,) * 2 + (1,) * 3 + (1.0,)),
    "reduce": (make_reduce, (0,) * 5 + (1,) * 6),
}
"""The maker of each kernel, and stand-ins for the arguments after the first."""


def build(kind: str, config: Any, *, artifact: bool = False) -> Any:
    """The compiled launcher of a kernel; with ``artifact``, the text of the compiled module instead.

    Nothing is launched: the first argument is a null pointer, which FlyDSL takes for a placeholder.
    """
    make, others = _MAKERS[kind]
    launch = make(config)
    null = flyc.from_c_void_p(fx.Uint8, 0)
    done = flyc.compile[HINTS[kind]](launch, null, *others, fx.Stream(None))
    return launch._last_compiled[1]._ir_text if artifact else done
