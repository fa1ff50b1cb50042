"""AoS: a slot after the other, [block_size, num_kv_heads, slot]. The reader applies the norm correction."""

from __future__ import annotations

from ..spec import NormMeaning, Preset
from .slot import Slot
from .table import Place

__all__ = ["NAME", "content_bytes", "norm_meaning", "places"]

NAME = "aos"


def norm_meaning(preset: Preset) -> NormMeaning:
    """AoS stores ||k||; with norm correction the reader renormalises the centroid vector."""
    return NormMeaning.NONE if preset.fp8_keys else NormMeaning.RAW


def places(slot: Slot, num_kv_heads: int, block_size: int, slot_stride: int) -> dict[str, Place]:
    """Where each field of a block lies: key data | key norm | value data | scale | zero in every slot."""
    found: dict[str, Place] = {}
    base = 0
    for name, nbytes in slot.parts:
        found[name] = Place(
            base, token_stride=num_kv_heads * slot_stride, head_stride=slot_stride, nbytes=nbytes
        )
        base += nbytes
    return found


def content_bytes(slot: Slot, num_kv_heads: int, block_size: int, slot_stride: int) -> int:
    """Bytes from the start of a block to the end of its last slot."""
    return block_size * num_kv_heads * slot_stride
