"""Turning caches into other layouts, and foreign caches into ours."""

from __future__ import annotations

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
    SpecError if the two layouts do not hold the same thing.
    """
    for name in ("preset", "head_size", "value_head_size", "num_kv_heads", "block_size"):
        if getattr(source, name) != getattr(target, name):
            raise SpecError(
                f"target {name}", getattr(target, name), f"{getattr(source, name)}, as in the source"
            )
    check_cache(cache, source)
    if out is None:
        out = allocate(target, cache.shape[0], cache.device)
    check_cache(out, target)
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
