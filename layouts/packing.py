"""Packing of b-bit codes into bytes, for numpy arrays and torch tensors alike.

Codes form one little-endian bit stream: code i occupies bits b*i to b*i + b - 1. Hence 4-bit codes lie two to a
byte, low nibble first, and eight 3-bit codes lie in three bytes. Eight codes of b bits always fill b bytes.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import numpy as np

from ..spec import SpecError
from .slot import packed_bytes

__all__ = ["pack", "unpack"]

Array = TypeVar("Array")
_GROUP = 8  # codes handled together: they fill exactly ``bits`` bytes


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")  # a tensor cannot exist unless torch is loaded already
    return torch is not None and isinstance(x, torch.Tensor)


def _join(parts: list[Any], width: int) -> Any:
    """Interleave ``parts`` ([..., n] each) to [..., n * len(parts)] uint8 and cut to ``width``."""
    if _is_torch(parts[0]):
        torch = sys.modules["torch"]
        return torch.stack(parts, -1).flatten(-2)[..., :width].to(torch.uint8).contiguous()
    joined = np.stack(parts, -1)
    return joined.reshape(*joined.shape[:-2], -1)[..., :width].astype(np.uint8)


def _padded_int64(x: Any, multiple: int) -> Any:
    """``x`` as int64 with its last dimension zero-padded to a multiple of ``multiple``."""
    pad = -x.shape[-1] % multiple
    if _is_torch(x):
        torch = sys.modules["torch"]
        return torch.nn.functional.pad(x.to(torch.int64), (0, pad))
    return np.pad(x.astype(np.int64), [(0, 0)] * (x.ndim - 1) + [(0, pad)])


def _check_bits(bits: int) -> None:
    if not isinstance(bits, int) or not 1 <= bits <= 8:
        raise SpecError("bits", bits, "an integer from 1 to 8")


def pack(codes: Array, bits: int) -> Array:
    """Pack ``codes`` [..., n] (any integer dtype, 0 to 2**bits - 1) to uint8 [..., ceil(n * bits / 8)]."""
    _check_bits(bits)
    x: Any = codes
    count = x.shape[-1]
    x = _padded_int64(x, _GROUP)
    word = x[..., 0::_GROUP]
    for i in range(1, _GROUP):
        word = word | (x[..., i::_GROUP] << (bits * i))
    packed: Array = _join([(word >> (8 * j)) & 255 for j in range(bits)], packed_bytes(count, bits))
    return packed


def unpack(data: Array, bits: int, count: int) -> Array:
    """Unpack uint8 ``data`` [..., ceil(count * bits / 8)] to codes uint8 [..., count]."""
    _check_bits(bits)
    x: Any = data
    if x.shape[-1] != packed_bytes(count, bits):
        raise SpecError("data", tuple(x.shape), f"a last dimension of {packed_bytes(count, bits)} bytes")
    x = _padded_int64(x, bits)
    word = x[..., 0::bits]
    for j in range(1, bits):
        word = word | (x[..., j::bits] << (8 * j))
    codes: Array = _join([(word >> (bits * i)) & (2**bits - 1) for i in range(_GROUP)], count)
    return codes
