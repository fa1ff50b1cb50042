"""Repair of Triton's CPU interpreter, so that interpreted kernels compute what compiled ones do.

The stock interpreter (seen in 3.6 and 3.9) converts some floats wrongly: fp32 to fp8e4nv rounds half up, loses a carry
and overflows to garbage, fp8 NaN reads as a number, fp32 to bf16 truncates, and arithmetic and ``tl.dot`` on bf16 work
on the bit patterns. :func:`install` replaces those parts by exact ones; :func:`stock_defects` says which of the faults
the interpreter that is loaded still has. Without the repair an interpreted test proves nothing about bf16 or FP8.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

__all__ = ["decode", "encode", "install", "stock_defects"]

Array = np.ndarray[Any, Any]

# Minifloats: (exponent bits, mantissa bits, bias, kind). "fn": only the all-ones pattern is NaN, no infinity.
# "fnuz": only 0x80 is NaN, no negative zero. "ieee": infinity and NaN in the top exponent. "b15": no NaN at all.
_MINIFLOATS = {
    "fp8e4nv": (4, 3, 7, "fn"),
    "fp8e4b8": (4, 3, 8, "fnuz"),
    "fp8e5b16": (5, 2, 16, "fnuz"),
    "fp8e5": (5, 2, 15, "ieee"),
    "fp8e4b15": (4, 3, 15, "b15"),
}


@cache
def _values(name: str) -> Array:
    """The 256 values of a minifloat, float64."""
    exponent_bits, mantissa_bits, bias, kind = _MINIFLOATS[name]
    code = np.arange(256)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    normal = np.ldexp(1.0 + mantissa / (1 << mantissa_bits), exponent - bias)
    value = np.where(exponent == 0, np.ldexp(mantissa / (1 << mantissa_bits), 1 - bias), normal)
    if kind == "ieee":
        top = exponent == (1 << exponent_bits) - 1
        value = np.where(top, np.where(mantissa == 0, np.inf, np.nan), value)
    elif kind == "fn":
        value = np.where((code & 0x7F) == 0x7F, np.nan, value)
    value = np.where(code >= 128, -value, value)
    if kind == "fnuz":
        value[0x80] = np.nan
    return value


def decode(bits: Array, dtype: Any) -> Array:
    """float64 of bit patterns (or floats) of a Triton dtype, exactly."""
    name = dtype.name
    if name == "bf16":
        return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if name in _MINIFLOATS:
        return _values(name)[bits.view(np.uint8)]
    return bits.view({"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}[name]).astype(np.float64)


def _encode_bf16(value: Array, toward_zero: bool) -> Array:
    with np.errstate(over="ignore"):
        bits = value.astype(np.float32).view(np.uint32)
    odd = np.uint32(0) if toward_zero else np.uint32(0x7FFF) + ((bits >> 16) & 1)
    rounded = ((bits + odd) >> 16).astype(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FC0), rounded)


def _encode_minifloat(value: Array, name: str, toward_zero: bool) -> Array:
    """Nearest with ties to even (or toward zero), finite overflow saturates, as the GPUs' conversions do."""
    table = _values(name)[:128]
    codes = np.flatnonzero(np.isfinite(table))  # ascending values are ascending codes
    levels = table[codes]
    size = np.abs(value)
    low = np.clip(np.searchsorted(levels, size, side="right") - 1, 0, len(levels) - 1)
    high = np.minimum(low + 1, len(levels) - 1)
    below, above = size - levels[low], levels[high] - size
    up = (above < below) | ((above == below) & (low % 2 == 1))
    code = codes[np.where(up & (high > low) & (not toward_zero), high, low)].astype(np.uint8)
    kind = _MINIFLOATS[name][3]
    if kind == "ieee":
        code = np.where(np.isinf(value), np.uint8(0x7C), code)
    negative = np.signbit(value) & ~((code == 0) & (kind == "fnuz"))
    code = code | (negative.astype(np.uint8) << 7)
    nan = np.uint8(0x80) if kind == "fnuz" else np.uint8(0x7F)
    return np.where(np.isnan(value), nan, code).astype(np.uint8)


def encode(value: Array, dtype: Any, toward_zero: bool = False) -> Array:
    """Bit patterns (or floats) of a Triton dtype of float64 values, rounded once."""
    name = dtype.name
    if name == "bf16":
        return _encode_bf16(value, toward_zero)
    if name in _MINIFLOATS:
        return _encode_minifloat(value, name, toward_zero)
    with np.errstate(over="ignore"):
        return value.astype({"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}[name])


def _convert_float(data: Array, source: Any, target: Any, rounding: Any) -> Array:
    """Replaces ``interpreter._convert_float``; returns unsigned bit patterns, as that does."""
    toward_zero = rounding is not None and rounding == interpreter._ir.ROUNDING_MODE.RTZ
    result = encode(decode(np.ascontiguousarray(data), source), target, toward_zero)
    return result.view(getattr(np, f"uint{target.primitive_bitwidth}")).reshape(data.shape)


def _is_bf16(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _widen(handle: Any) -> Any:
    """A bf16 handle as fp32; others unchanged."""
    if not _is_bf16(handle):
        return handle
    data = (
        decode(np.ascontiguousarray(handle.data), tl.bfloat16).astype(np.float32).reshape(handle.data.shape)
    )
    return interpreter.TensorHandle(data, tl.float32)


def _through_fp32(method: Callable[..., Any]) -> Callable[..., Any]:
    """Arithmetic on bf16 handles: in fp32, and back to bf16 if the result is a float."""

    def wrapped(self: Any, *args: Any) -> Any:
        handles = [a for a in args if isinstance(a, interpreter.TensorHandle)]
        if not any(_is_bf16(h) for h in handles):
            return method(self, *args)
        wide = [_widen(a) if isinstance(a, interpreter.TensorHandle) else a for a in args]
        result = method(self, *wide)
        if result.data.dtype == np.bool_:
            return result
        return interpreter.TensorHandle(encode(result.data.astype(np.float64), tl.bfloat16), tl.bfloat16)

    return wrapped


def _dot(method: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return method(self, _widen(a), _widen(b), d, *rest)

    return wrapped


_installed = False


def install() -> None:
    """Patch the interpreter of this process. Harmless where kernels are compiled, and when called again."""
    global _installed
    if _installed:
        return
    _installed = True
    interpreter._convert_float = _convert_float
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _dot(builder.create_dot)
    for name in ("binary_op", "ternary_op", "unary_op", "create_fma"):
        if hasattr(builder, name):
            setattr(builder, name, _through_fp32(getattr(builder, name)))


def stock_defects() -> dict[str, str]:
    """What the interpreter gets wrong without the repair: name -> what it gave. Call in a process of its own."""
    assert not _installed, "the repair is in place: ask in a process without it"
    builder, handle = interpreter.interpreter_builder, interpreter.TensorHandle
    found: dict[str, str] = {}

    def check(name: str, got: Array, want: Array) -> None:
        wrong = got.reshape(-1) != want.reshape(-1)
        if wrong.any():
            found[name] = (
                f"{wrong.mean():.1%} wrong, e.g. {got.reshape(-1)[wrong][0]} for {want.reshape(-1)[wrong][0]}"
            )

    rng = np.random.default_rng(0)
    normal = rng.standard_normal(4096).astype(np.float32)
    rtne = interpreter._ir.ROUNDING_MODE.RTNE
    for name, data in {"normal": normal, "small": normal * 0.01, "large": normal * 400}.items():
        got = builder.create_fp_to_fp(handle(data, tl.float32), tl.float8e4nv, rtne).data
        check(f"fp32 to fp8e4nv, {name}", got.view(np.uint8), encode(data.astype(np.float64), tl.float8e4nv))
    got = builder.create_fp_to_fp(handle(np.array([0x7F], np.uint8), tl.float8e4nv), tl.float32, None).data
    check("fp8e4nv NaN", np.isnan(got), np.array([True]))
    got = builder.create_fp_trunc(handle(normal, tl.float32), tl.bfloat16).data
    check("fp32 to bf16", got.view(np.uint16), encode(normal.astype(np.float64), tl.bfloat16))
    a = encode(rng.standard_normal((16, 16)), tl.bfloat16)
    wide = decode(a, tl.bfloat16).astype(np.float32)
    zero = handle(np.zeros((16, 16), np.float32), tl.float32)
    got = builder.create_dot(handle(a, tl.bfloat16), handle(a, tl.bfloat16), zero, None, 0).data
    check("bf16 dot", np.isclose(got, wide @ wide, rtol=1e-3, atol=1e-3), np.ones((16, 16), bool))
    got = builder.create_fadd(handle(a, tl.bfloat16), handle(a, tl.bfloat16)).data
    check("bf16 arithmetic", got.view(np.uint16), encode(2.0 * wide.astype(np.float64), tl.bfloat16))
    return found
