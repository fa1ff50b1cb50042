"""Pages of the cache: what a block costs in each group of layers, and whether one page size can serve them all.

A serving engine keeps one pool of pages. Groups of layers with different bytes per block share it if the largest page
is a multiple of every other: then the smaller groups get larger blocks. Otherwise each page is padded to the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .layouts import make_layout
from .spec import AttentionKind, LayerSpec, Preset

__all__ = ["PageGroup", "Pages", "Suggestion", "native_block_bytes", "quantized_block_bytes", "unify"]

STEP: Final = 16
LARGEST: Final = 1024
"""Block sizes that are suggested: multiples of STEP up to LARGEST."""

_ELEMENT: Final = 2  # bytes of an fp16 or bf16 element


def native_block_bytes(layer: LayerSpec, block_size: int) -> int:
    """Bytes of a block of raw 16-bit keys and values; of latent vectors for MLA."""
    width = layer.head_size if layer.kind is AttentionKind.MLA else layer.head_size + layer.value_size
    return block_size * layer.num_kv_heads * width * _ELEMENT


def quantized_block_bytes(layer: LayerSpec, layout: str, preset: Preset, block_size: int) -> int:
    """Bytes of a block as the layout has it, meta region included."""
    return make_layout(
        layout, preset, layer.head_size, layer.num_kv_heads, block_size, value_head_size=layer.value_size
    ).block_stride


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers whose blocks have the same bytes. what: native or the layout; layers: their indices."""

    what: str
    layers: tuple[int, ...]
    block_size: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Block sizes, one for each group in order, with the padding that is left."""

    block_sizes: tuple[int, ...]
    waste: float
    backends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pages:
    """rule: ``none`` (no cache), ``equal``, ``divisible`` or ``padded``. page_bytes: the page of the pool, per layer.

    blocks: tokens per page of each group. waste: share of all bytes that is padding. suggestions: block sizes with
    less padding, if the pages must be padded.
    """

    groups: tuple[PageGroup, ...]
    rule: str
    page_bytes: int
    blocks: tuple[int, ...]
    waste: float
    suggestions: tuple[Suggestion, ...] = ()

    @property
    def bytes_per_token(self) -> float:
        """Bytes a token takes over all layers, padding included."""
        pairs = zip(self.groups, self.blocks, strict=True)
        return sum(len(group.layers) * self.page_bytes / tokens for group, tokens in pairs)


def _padded(groups: Sequence[PageGroup], page: int) -> tuple[tuple[int, ...], float]:
    """Tokens per page of each group if each takes as many blocks as fit, and the share that is padding."""
    blocks = tuple(page // group.block_bytes * group.block_size for group in groups)
    content = sum(len(g.layers) * g.block_bytes / g.block_size for g in groups)
    total = sum(len(g.layers) * page / b for g, b in zip(groups, blocks, strict=True))
    return blocks, 1 - content / total if total else 0.0


def unify(
    groups: Sequence[PageGroup], backends_for: Callable[[Mapping[str, int]], Sequence[str] | None]
) -> Pages:
    """One page size for ``groups``. backends_for: block size of each kind of group -> backends, None if refused."""
    groups = tuple(groups)
    if not groups:
        return Pages((), "none", 0, (), 0.0)
    page = max(group.block_bytes for group in groups)
    if all(page % group.block_bytes == 0 for group in groups):
        rule = "equal" if all(group.block_bytes == page for group in groups) else "divisible"
        return Pages(groups, rule, page, tuple(page // g.block_bytes * g.block_size for g in groups), 0.0)
    blocks, waste = _padded(groups, page)
    return Pages(groups, "padded", page, blocks, waste, _suggest(groups, waste, backends_for))


def _suggest(
    groups: tuple[PageGroup, ...],
    waste: float,
    backends_for: Callable[[Mapping[str, int]], Sequence[str] | None],
) -> tuple[Suggestion, ...]:
    """Block sizes, smallest first, each of which leaves clearly less padding than the one before."""
    largest = max(groups, key=lambda g: g.block_bytes / g.block_size)
    per_token = [group.block_bytes / group.block_size for group in groups]
    content = sum(len(g.layers) * c for g, c in zip(groups, per_token, strict=True))
    found: list[Suggestion] = []
    for size in range(STEP, LARGEST + 1, STEP):
        page = size * largest.block_bytes / largest.block_size
        blocks = tuple(max(STEP, int(page / c + 1e-9) // STEP * STEP) for c in per_token)
        real = max(b * c for b, c in zip(blocks, per_token, strict=True))
        left = 1 - content / sum(len(g.layers) * real / b for g, b in zip(groups, blocks, strict=True))
        if left > waste / 2 and left > 1e-9:
            continue
        names = backends_for(dict(zip((g.what for g in groups), blocks, strict=True)))
        if names is None:
            continue
        found.append(Suggestion(blocks, max(left, 0.0), tuple(names)))
        waste = left
        if left <= 1e-9 or len(found) == 3:
            break
    return tuple(found)
