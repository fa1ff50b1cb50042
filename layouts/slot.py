"""The parts of a slot: what one token of one KV head keeps, whatever the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..orders import rotation_factors
from ..spec import Preset, SpecError

__all__ = ["FIELD_NAMES", "FP16_BYTES", "SKETCH_FIELDS", "Slot", "packed_bytes"]

FIELD_NAMES: Final = ("key_data", "key_norm", "value_data", "value_scale", "value_zero")
"""The parts of a slot. FP8 presets have no ``key_norm``. With rotated values there is no ``value_zero``,
and ``value_scale`` is ||v|| / ||c||, c the centroid vector."""

SKETCH_FIELDS: Final = ("key_signs", "key_residual")
"""Of presets with a sketch, besides: a bit per dim, 1 for +, and ||k|| times the norm of the residual, fp16."""

_ORDER: Final = (
    "key_data",
    "key_signs",
    "key_norm",
    "key_residual",
    "value_data",
    "value_scale",
    "value_zero",
)

FP16_BYTES: Final = 2


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of ``count`` codes of ``bits`` bits, as one little-endian bit stream."""
    return (count * bits + 7) // 8


@dataclass(frozen=True, slots=True)
class Slot:
    """Sizes in bytes of the parts of one slot."""

    key_data: int
    key_norm: int
    value_data: int
    value_scale: int = FP16_BYTES
    value_zero: int = FP16_BYTES
    key_signs: int = 0
    key_residual: int = 0

    @classmethod
    def of(cls, preset: Preset, head_size: int, value_head_size: int) -> Slot:
        """The slot of ``preset``; SpecError if keys or values must be rotated and their width has no rotation."""
        if head_size < 1:
            raise SpecError("head_size", head_size, "an integer >= 1")
        if value_head_size < 1:
            raise SpecError("value_head_size", value_head_size, "an integer >= 1")
        if preset.rotated_values:
            rotation_factors(value_head_size)
        group = value_head_size if preset.value_group is None else preset.value_group
        if value_head_size % group:
            raise SpecError("value_head_size", value_head_size, f"a multiple of value_group={group}")
        per_group = FP16_BYTES * (value_head_size // group)
        value = {
            "value_data": packed_bytes(value_head_size, preset.value_bits),
            "value_scale": per_group,
            "value_zero": 0 if preset.rotated_values else per_group,
        }
        if preset.fp8_keys:
            return cls(head_size, 0, **value)
        rotation_factors(head_size)
        if preset.sketch:
            value |= {"key_signs": packed_bytes(head_size, 1), "key_residual": FP16_BYTES}
        return cls(packed_bytes(head_size, preset.code_bits), FP16_BYTES, **value)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes) of every part that is there, in AoS order."""
        return tuple((name, size) for name in _ORDER if (size := getattr(self, name)))

    @property
    def used(self) -> int:
        """Bytes that hold something."""
        return sum(size for _, size in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the slot: ``used`` rounded up to an even size."""
        return self.used + self.used % 2
