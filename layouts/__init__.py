"""Layouts of the paged cache: the only place where byte offsets are computed.

:func:`make_layout` gives the table of integers; :mod:`.packing` packs codes; :mod:`.views` reads the table as torch
views; :mod:`.convert` turns one layout into the other.
"""

from __future__ import annotations

if __name__ != "turboquant_rocm.layouts":
    raise ImportError(f"imported as {__name__!r}: import it as 'turboquant_rocm.layouts'")

from functools import lru_cache
from types import ModuleType

from ..presets import get_preset
from ..spec import Preset, SpecError, checked_int
from . import aos, soa
from .slot import FIELD_NAMES, Slot
from .table import LAYOUT_VERSION, CacheTag, Layout, Place, TagError

__all__ = [
    "FIELD_NAMES",
    "LAYOUT_NAMES",
    "LAYOUT_VERSION",
    "CacheTag",
    "Layout",
    "Place",
    "Slot",
    "TagError",
    "make_layout",
]

_MAX_BYTES = 1 << 40  # far beyond any page; larger numbers are mistakes

_LAYOUTS: dict[str, ModuleType] = {aos.NAME: aos, soa.NAME: soa}

LAYOUT_NAMES = tuple(_LAYOUTS)
"""Names of the layouts there are."""


@lru_cache(maxsize=4096, typed=True)
def make_layout(
    name: str,
    preset: str | Preset,
    head_size: int,
    num_kv_heads: int,
    block_size: int,
    *,
    value_head_size: int | None = None,
    slot_stride: int | None = None,
    block_stride: int | None = None,
) -> Layout:
    """The table of integers of layout ``name`` ("aos" or "soa").

    slot_stride: bytes a slot takes in the server's page (default: the slot itself, no padding); even, at least
    the slot. block_stride: bytes from one block to the next (default: no padding); at least
    block_size * num_kv_heads * slot_stride. Pads are never written. SpecError names a wrong argument.
    """
    if name not in _LAYOUTS:
        raise SpecError("layout", name, "one of " + ", ".join(LAYOUT_NAMES))
    value_head_size = head_size if value_head_size is None else value_head_size
    integers = {
        "num_kv_heads": num_kv_heads,
        "block_size": block_size,
        "head_size": head_size,
        "value_head_size": value_head_size,
        "slot_stride": 2 if slot_stride is None else slot_stride,
        "block_stride": 2 if block_stride is None else block_stride,
    }
    for argument, value in integers.items():
        checked_int(argument, value, 1, _MAX_BYTES)
    preset = get_preset(preset)
    slot = Slot.of(preset, head_size, value_head_size)
    module = _LAYOUTS[name]

    slot_stride = slot.nbytes if slot_stride is None else slot_stride
    if slot_stride < slot.nbytes or slot_stride % 2:
        raise SpecError("slot_stride", slot_stride, f"an even number of bytes >= {slot.nbytes}")
    content = module.content_bytes(slot, num_kv_heads, block_size, slot_stride)
    page = max(content, block_size * num_kv_heads * slot_stride)
    block_stride = page if block_stride is None else block_stride
    if block_stride < page or block_stride % 2:
        raise SpecError("block_stride", block_stride, f"an even number of bytes >= {page}")
    return Layout(
        name=name,
        preset=preset,
        head_size=head_size,
        value_head_size=value_head_size,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        slot_bytes=slot.nbytes,
        slot_stride=slot_stride,
        content_bytes=content,
        block_stride=block_stride,
        norm_meaning=module.norm_meaning(preset),
        places=tuple(module.places(slot, num_kv_heads, block_size, slot_stride).items()),
    )
