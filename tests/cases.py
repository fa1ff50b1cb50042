"""What several tiers share: building decisions, filling caches, and the oracle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from turboquant_rocm import BoundLayer, Decision, LayerSpec, PagedCache, Target, bind, get_preset

CPU = Target("cpu", "cpu")


def layer_spec(
    head_size: int, num_kv_heads: int, gqa_ratio: int, dtype: str = "bf16", **more: Any
) -> LayerSpec:
    """A layer; ``window`` makes it a sliding one."""
    kind = "sliding" if more.get("window") else "full"
    return LayerSpec(0, num_kv_heads * gqa_ratio, num_kv_heads, head_size, kind=kind, dtype=dtype, **more)


def reference(
    layer: LayerSpec,
    preset: str,
    layout: str,
    block_size: int,
    math_dtype: torch.dtype = torch.float32,
    **options: Any,
) -> BoundLayer:
    """The torch reference for ``layer``; fp64 math makes it the oracle."""
    decision = Decision(layer, CPU, get_preset(preset), block_size, "torch_reference", layout)
    return bind(decision, math_dtype=math_dtype, **options)


def shuffled_tables(
    seq_lens: list[int], block_size: int, generator: torch.Generator, spare_blocks: int = 3
) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """(block_table [B, M] int32, slots of each sequence, num_blocks): blocks in random order, unused entries -1."""
    need = [(s + block_size - 1) // block_size for s in seq_lens]
    num_blocks = max(1, sum(need)) + spare_blocks
    order = torch.randperm(num_blocks, generator=generator)
    table = torch.full((len(seq_lens), max([*need, 1])), -1, dtype=torch.int32)
    slots, used = [], 0
    for i, (length, count) in enumerate(zip(seq_lens, need, strict=True)):
        blocks = order[used : used + count]
        used += count
        table[i, :count] = blocks.int()
        position = torch.arange(length)
        slots.append(
            blocks[position // block_size] * block_size + position % block_size if count else position
        )
    return table, slots, num_blocks


def rel_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want|| in fp64; nan if either is not finite."""
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def same_bytes(got: PagedCache, want: PagedCache) -> bool:
    """True if two caches are equal byte for byte, pads included."""
    return torch.equal(got.data.cpu(), want.data.cpu())


def gaussian(
    shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype, scale: float = 1.0
) -> torch.Tensor:
    """Normal random numbers rounded to ``dtype``."""
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
