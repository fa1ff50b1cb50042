"""SoA: per block a data region, then a meta region. The store kernel applies the norm correction.

data region [block_size, num_kv_heads, key_data + value_data], then, from the next even byte, the meta region
[num_kv_heads, F, block_size] of fp16 with F = 3 (key norm, value scale, value zero) or 2 (FP8 keys: scale, zero).
With a sketch its signs lie between the codes, and the residual's norm after the key's; with groups of values each
token has their scales side by side, and their zeros.
A padded slot stride makes the block larger; both regions stay dense at its front, the pad is at its end.
"""

from __future__ import annotations

from ..spec import NormMeaning, Preset
from .slot import Slot
from .table import Place

__all__ = ["NAME", "content_bytes", "norm_meaning", "places"]

NAME = "soa"


def norm_meaning(preset: Preset) -> NormMeaning:
    """SoA stores ||k|| / ||c|| with norm correction, c the centroid vector, and ||k|| without."""
    if preset.fp8_keys:
        return NormMeaning.NONE
    return NormMeaning.FOLDED if preset.norm_correction else NormMeaning.RAW


_DATA = ("key_data", "key_signs", "value_data")


def _data(slot: Slot) -> list[tuple[str, int]]:
    return [(name, size) for name, size in slot.parts if name in _DATA]


def _meta(slot: Slot) -> list[tuple[str, int]]:
    return [(name, size) for name, size in slot.parts if name not in _DATA]


def _bytes(parts: list[tuple[str, int]]) -> int:
    return sum(size for _, size in parts)


def _meta_base(slot: Slot, num_kv_heads: int, block_size: int) -> int:
    data = block_size * num_kv_heads * _bytes(_data(slot))
    return data + data % 2


def places(slot: Slot, num_kv_heads: int, block_size: int, slot_stride: int) -> dict[str, Place]:
    """Where each field of a block lies."""
    row = _bytes(_data(slot))
    found: dict[str, Place] = {}
    base = 0
    for name, size in _data(slot):
        found[name] = Place(base, token_stride=num_kv_heads * row, head_stride=row, nbytes=size)
        base += size
    meta, base = _meta(slot), _meta_base(slot, num_kv_heads, block_size)
    for name, size in meta:
        found[name] = Place(base, token_stride=size, head_stride=_bytes(meta) * block_size, nbytes=size)
        base += block_size * size
    return found


def content_bytes(slot: Slot, num_kv_heads: int, block_size: int, slot_stride: int) -> int:
    """Bytes from the start of a block to the end of its meta region."""
    return _meta_base(slot, num_kv_heads, block_size) + num_kv_heads * _bytes(_meta(slot)) * block_size
