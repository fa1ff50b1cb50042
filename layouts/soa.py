"""SoA: per block a data region, then a meta region. The store kernel applies the norm correction.

data region [block_size, num_kv_heads, key_data + value_data], then, from the next even byte, the meta region
[num_kv_heads, F, block_size] of fp16 with F = 3 (key norm, value scale, value zero) or 2 (FP8 keys: scale, zero).
A padded slot stride makes the block larger; both regions stay dense at its front, the pad is at its end.
"""

from __future__ import annotations

from ..spec import NormMeaning, Preset
from .slot import FP16_BYTES, Slot
from .table import Place

__all__ = ["NAME", "content_bytes", "norm_meaning", "places"]

NAME = "soa"


def norm_meaning(preset: Preset) -> NormMeaning:
    """SoA stores ||k|| / ||c|| with norm correction, c the centroid vector, and ||k|| without."""
    if preset.fp8_keys:
        return NormMeaning.NONE
    return NormMeaning.FOLDED if preset.norm_correction else NormMeaning.RAW


def _meta(slot: Slot) -> list[str]:
    return [name for name, _ in slot.parts if name not in ("key_data", "value_data")]


def _meta_base(slot: Slot, num_kv_heads: int, block_size: int) -> int:
    data = block_size * num_kv_heads * (slot.key_data + slot.value_data)
    return data + data % 2


def places(slot: Slot, num_kv_heads: int, block_size: int, slot_stride: int) -> dict[str, Place]:
    """Where each field of a block lies."""
    row = slot.key_data + slot.value_data
    found = {
        "key_data": Place(0, token_stride=num_kv_heads * row, head_stride=row, nbytes=slot.key_data),
        "value_data": Place(
            slot.key_data, token_stride=num_kv_heads * row, head_stride=row, nbytes=slot.value_data
        ),
    }
    meta = _meta(slot)
    for position, name in enumerate(meta):
        found[name] = Place(
            _meta_base(slot, num_kv_heads, block_size) + position * block_size * FP16_BYTES,
            token_stride=FP16_BYTES,
            head_stride=len(meta) * block_size * FP16_BYTES,
            nbytes=FP16_BYTES,
        )
    return found


def content_bytes(slot: Slot, num_kv_heads: int, block_size: int, slot_stride: int) -> int:
    """Bytes from the start of a block to the end of its meta region."""
    return (
        _meta_base(slot, num_kv_heads, block_size) + num_kv_heads * len(_meta(slot)) * block_size * FP16_BYTES
    )
