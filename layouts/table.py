"""A layout is a table of integers: field(token t, head h) = base + t * token_stride + h * head_stride.

torch reads it as strided views (:mod:`.views`), Triton as constexprs, FlyDSL as Python ints. Nothing else in the
package computes a byte offset.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

from ..spec import NormMeaning, Preset, SpecError

__all__ = ["LAYOUT_VERSION", "CacheTag", "Layout", "Place", "TagError"]

LAYOUT_VERSION: Final = 1
"""Raised whenever the bytes or their meaning change; part of every cache tag."""

FP8_FORMAT: Final = "e4m3fn"
"""FP8 keys are OCP E4M3FN bytes on every GPU, so that caches are portable."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one field lies inside a block: ``nbytes`` contiguous bytes per token and head. All in bytes."""

    base: int
    token_stride: int
    head_stride: int
    nbytes: int

    def offset(self, token: int, head: int) -> int:
        """Byte offset from the start of the block of token ``token`` (0 to block_size - 1) of head ``head``."""
        return self.base + token * self.token_stride + head * self.head_stride


class TagError(SpecError):
    """A cache is not what the reader was bound for. ``differences`` maps each field to (cache, reader)."""

    def __init__(self, differences: dict[str, tuple[Any, Any]]) -> None:
        self.differences = differences
        got = ", ".join(f"{name}={a}" for name, (a, _) in differences.items())
        wants = ", ".join(f"{name}={b}" for name, (_, b) in differences.items())
        super().__init__("cache tag", got, wants)
        each = ", ".join(f"{name}={a} (wants {b})" for name, (a, b) in differences.items())
        self.args = (
            f"cache tag: {each}; layouts.convert turns one layout into another",
        )  # whole, however long


@dataclass(frozen=True, slots=True)
class CacheTag:
    """What the bytes of a cache mean. Travels with the cache; checked when a reader meets it."""

    layout: str
    version: int
    preset: str
    key_bits: int
    value_bits: int
    head_size: int
    value_head_size: int
    num_kv_heads: int
    block_size: int
    slot_stride: int
    block_stride: int
    fp8_format: str | None
    norm_meaning: str
    norm_correction: bool

    def require(self, expected: CacheTag) -> None:
        """TagError, naming every field that differs, unless this tag equals ``expected``."""
        if self == expected:
            return
        raise TagError(
            {
                f.name: (getattr(self, f.name), getattr(expected, f.name))
                for f in fields(self)
                if getattr(self, f.name) != getattr(expected, f.name)
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON beside a saved cache."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CacheTag:
        """The inverse of :meth:`to_dict`; SpecError names missing and unknown fields."""
        names = {f.name for f in fields(cls)}
        if set(data) != names:
            raise SpecError("cache tag", sorted(data), f"exactly the fields {sorted(names)}")
        return cls(**data)


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything there is to know about the bytes of one layer's cache.

    slot_bytes: bytes of a token and head without padding. slot_stride: what a slot costs in the server's page
    (>= slot_bytes). content_bytes: bytes of a block that the layout spans. block_stride: bytes from a block to
    the next. places: (field name, Place) pairs.
    """

    name: str
    preset: Preset
    head_size: int
    value_head_size: int
    num_kv_heads: int
    block_size: int
    slot_bytes: int
    slot_stride: int
    content_bytes: int
    block_stride: int
    norm_meaning: NormMeaning
    places: tuple[tuple[str, Place], ...]
    version: int = LAYOUT_VERSION

    def place(self, field: str) -> Place:
        """The Place of ``field``; KeyError if this preset has no such field."""
        for name, place in self.places:
            if name == field:
                return place
        raise KeyError(field)

    def has(self, field: str) -> bool:
        """True if this preset stores ``field``."""
        return any(name == field for name, _ in self.places)

    @property
    def tag(self) -> CacheTag:
        """The tag of caches of this layout."""
        return CacheTag(
            layout=self.name,
            version=self.version,
            preset=self.preset.name,
            key_bits=self.preset.key_bits,
            value_bits=self.preset.value_bits,
            head_size=self.head_size,
            value_head_size=self.value_head_size,
            num_kv_heads=self.num_kv_heads,
            block_size=self.block_size,
            slot_stride=self.slot_stride,
            block_stride=self.block_stride,
            fp8_format=FP8_FORMAT if self.preset.fp8_keys else None,
            norm_meaning=str(self.norm_meaning),
            norm_correction=self.preset.norm_correction,
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of one block as the cache tensor shows it: (block_size, num_kv_heads, slot_stride)."""
        return (self.block_size, self.num_kv_heads, self.slot_stride)

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Strides in bytes of the cache tensor [num_blocks, block_size, num_kv_heads, slot_stride]."""
        return (self.block_stride, self.num_kv_heads * self.slot_stride, self.slot_stride, 1)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of cache per token over all KV heads, padding included."""
        return self.block_stride / self.block_size

    def integers(self) -> dict[str, int]:
        """The table flattened to upper-case names, as kernels take it: KEY_DATA_BASE, KEY_DATA_TOKEN_STRIDE ...

        Fields that the preset does not store are there with zeros, so that one kernel signature serves all; those of a
        sketch only where there is one.
        """
        from .slot import FIELD_NAMES, SKETCH_FIELDS

        table = {"BLOCK_STRIDE": self.block_stride, "BLOCK_SIZE": self.block_size}
        zero = Place(0, 0, 0, 0)
        known = dict(self.places)
        for name in (*FIELD_NAMES, *(name for name in SKETCH_FIELDS if name in known)):
            place = known.get(name, zero)
            for f in fields(place):
                table[f"{name}_{f.name}".upper()] = getattr(place, f.name)
        return table
