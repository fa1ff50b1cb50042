"""The layout table as torch views: no byte is copied, and writes go to the cache."""

from __future__ import annotations

import torch

from ..spec import SpecError
from .table import Layout

__all__ = ["allocate", "check_cache", "checked_device", "field_view", "read_fp16", "write_fp16"]


def checked_device(device: torch.device | str) -> torch.device:
    """``device`` as a torch.device; SpecError if it names none."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SpecError("device", device, f"a torch device ({error})") from None


def allocate(layout: Layout, num_blocks: int, device: torch.device | str, fill: int = 0) -> torch.Tensor:
    """A cache tensor [nb, bs, Hk, slot_stride] uint8 with the strides of ``layout``, filled with ``fill``."""
    if not isinstance(num_blocks, int) or isinstance(num_blocks, bool) or num_blocks < 1:
        raise SpecError("num_blocks", num_blocks, "an integer >= 1")
    if not isinstance(fill, int) or isinstance(fill, bool) or not 0 <= fill <= 255:
        raise SpecError("fill", fill, "a byte, 0 to 255")
    size = (num_blocks * layout.block_stride,)
    flat = torch.full(size, fill, dtype=torch.uint8, device=checked_device(device))
    return flat.as_strided((num_blocks, *layout.shape), layout.strides)


def check_cache(cache: torch.Tensor, layout: Layout) -> None:
    """SpecError unless ``cache`` is a uint8 tensor of the shape and strides of ``layout``."""
    if not isinstance(cache, torch.Tensor):
        raise SpecError("cache", type(cache).__name__, "a uint8 tensor")
    want = f"uint8 [num_blocks, {', '.join(map(str, layout.shape))}] with byte strides {layout.strides}"
    if cache.dtype != torch.uint8 or cache.dim() != 4 or tuple(cache.shape[1:]) != layout.shape:
        raise SpecError("cache", f"{cache.dtype} {tuple(cache.shape)}", want)
    for size, stride, wanted in zip(cache.shape, cache.stride(), layout.strides, strict=True):
        if size > 1 and stride != wanted:  # the stride of a dimension of one element means nothing
            raise SpecError("cache", f"strides {tuple(cache.stride())}", want)


def field_view(cache: torch.Tensor, layout: Layout, field: str) -> torch.Tensor:
    """View of ``field`` of a whole cache: uint8 [nb, bs, Hk, nbytes]. ``cache`` must pass :func:`check_cache`."""
    place = layout.place(field)
    return cache.as_strided(
        (cache.shape[0], layout.block_size, layout.num_kv_heads, place.nbytes),
        (layout.block_stride, place.token_stride, place.head_stride, 1),
        cache.storage_offset() + place.base,
    )


def read_fp16(view: torch.Tensor) -> torch.Tensor:
    """fp16 [...] of the bytes uint8 [..., 2]; a copy, since fields may lie at odd addresses."""
    return view.contiguous().view(torch.float16).squeeze(-1)


def write_fp16(values: torch.Tensor) -> torch.Tensor:
    """Bytes uint8 [..., 2] of fp16 [...]."""
    return values.to(torch.float16).contiguous().unsqueeze(-1).view(torch.uint8)
