"""Turning caches into other layouts, and foreign caches into ours."""

from __future__ import annotations

import numpy as np
import torch

from ..codebook import centroids
from ..spec import NormMeaning, SpecError
from .packing import unpack
from .table import Layout
from .views import allocate, check_cache, field_view, read_fp16, write_fp16

__all__ = ["canonicalize", "convert"]

_NEGATIVE_ZERO = 0x80


def _centroid_norm(data: torch.Tensor, layout: Layout) -> torch.Tensor:
    """||c|| [...] float64 of packed key codes [..., nbytes]."""
    bits, d = layout.preset.key_bits, layout.head_size
    table = torch.tensor(centroids(d, bits), dtype=torch.float64, device=data.device)
    c = table[unpack(data, bits, d).long()]
    norm: torch.Tensor = (c.square().sum(-1) + 1e-16).sqrt()
    return norm


def _overlap(a: torch.Tensor, a_bytes: int, b: torch.Tensor, b_bytes: int) -> bool:
    """True if a block of ``a`` and one of ``b`` share a byte. *_bytes: what a block spans, its pad not included."""
    if a.device != b.device:
        return False
    first_a, first_b = (x.data_ptr() + np.arange(x.shape[0], dtype=np.int64) * x.stride(0) for x in (a, b))
    below = np.searchsorted(
        first_a, first_b + b_bytes
    )  # blocks of a that start before the end of each of b's
    return bool((below > np.searchsorted(first_a + a_bytes, first_b, side="right")).any())


def convert(
    cache: torch.Tensor,  # [nb, bs, Hk, slot_stride] uint8, bytes of ``source``
    source: Layout,
    target: Layout,
    out: torch.Tensor | None = None,  # [nb, bs, Hk, slot_stride] uint8, bytes of ``target``
) -> torch.Tensor:
    """The same tokens in another layout (AoS <-> SoA, other padding); whole blocks at a time.

    Codes, scales and zeros are copied bit for bit. Where the norm means something else, it is folded or unfolded in
    fp64 and rounded once to fp16: a round trip returns it within 1 ulp while the folded norm ||k|| / ||c|| fits fp16.
    Above 65504 it saturates, as in a direct SoA store, and comes back as 65504 ||c||: ||c|| is near 1 for most vectors,
    but 0.36 at D = 64 and 4 bits for one that is one-hot when rotated, which saturates from ||k|| = 2.4e4. No norm
    becomes infinite in either direction. Pads of ``out`` are not touched.
    SpecError if the two layouts do not hold the same thing, or if ``out`` has other blocks or shares bytes with
    ``cache``; nothing is written then.
    """
    for name, layout in (("source", source), ("target", target)):
        if not isinstance(layout, Layout):
            raise SpecError(name, layout, "a Layout, from make_layout()")
    for name in ("preset", "head_size", "value_head_size", "num_kv_heads", "block_size"):
        if getattr(source, name) != getattr(target, name):
            raise SpecError(
                f"target {name}", getattr(target, name), f"{getattr(source, name)}, as in the source"
            )
    check_cache(cache, source)
    if out is None:
        out = allocate(target, cache.shape[0], cache.device)
    check_cache(out, target)
    if out.shape[0] != cache.shape[0]:
        raise SpecError("out", f"{out.shape[0]} blocks", f"{cache.shape[0]} blocks, as the cache has")
    if _overlap(cache, source.content_bytes, out, target.content_bytes):
        raise SpecError("out", "memory of the cache", "memory of its own: no conversion is in place")
    for name, _ in source.places:
        data = field_view(cache, source, name)
        if name == "key_norm" and source.norm_meaning is not target.norm_meaning:
            length = _centroid_norm(field_view(cache, source, "key_data"), source)
            norm = read_fp16(data).double()
            norm = norm / length if target.norm_meaning is NormMeaning.FOLDED else norm * length
            data = write_fp16(norm.clamp(max=65504.0))
        field_view(out, target, name).copy_(data)
    return out


def canonicalize(cache: torch.Tensor, layout: Layout) -> int:
    """Make a cache written elsewhere canonical, in place; returns how many bytes changed.

    FP8 keys: -0 (0x80) becomes 0 (0x00), the same value, because 0x80 is NaN in the FNUZ format that gfx942 converts
    natively. Key norms of infinity (0x7C00) become 65504.
    """
    check_cache(cache, layout)
    if layout.preset.fp8_keys:
        keys = field_view(cache, layout, "key_data")
        wrong = keys == _NEGATIVE_ZERO
        keys.masked_fill_(wrong, 0)
        return int(wrong.sum())
    view = field_view(cache, layout, "key_norm")
    norm = read_fp16(view)
    wrong = torch.isinf(norm)
    view.copy_(write_fp16(torch.where(wrong, torch.full_like(norm, 65504.0), norm)))
    return int(wrong.sum()) * 2
