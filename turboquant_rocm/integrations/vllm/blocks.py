"""vLLM's page pool as our cache: the same bytes, seen as [num_blocks, block_size, num_kv_heads, slot].

vLLM hands every layer a logical [num_blocks, num_kv_heads, block_size, slot] over one of several physical orders. The
meaning of a block's bytes is ours, so all that is needed is that they lie together; what lies between two blocks
(padding, other layers) is the block stride.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...spec import SpecError

__all__ = ["BLOCK_LAYOUTS", "block_stride"]

BLOCK_LAYOUTS: Final = ("LBNHC", "LBHNC", "BLNHC", "BLHNC")
"""vLLM's physical orders in which the bytes of a block of one layer lie together, best first. The letters are its own:
layers, blocks, tokens (N), heads, content."""


def block_stride(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Bytes from one block to the next of a uint8 pool of logical [num_blocks, num_kv_heads, block_size, slot].

    SpecError if the bytes of a block do not lie together, or if the shape is another.
    """
    wants = (
        "uint8 [num_blocks, num_kv_heads, block_size, slot] whose blocks are contiguous, as in the KV cache layouts "
        + ", ".join(BLOCK_LAYOUTS)
    )
    if len(shape) != 4:
        raise SpecError("kv_cache", tuple(shape), wants)
    blocks, heads, tokens, slot = shape
    content = heads * tokens * slot
    by_token = {1: slot, 2: heads * slot}
    by_head = {1: tokens * slot, 2: slot}
    dense = any(
        (slot == 1 or strides[3] == 1) and all(shape[d] == 1 or strides[d] == s for d, s in order.items())
        for order in (by_token, by_head)
    )
    stride = strides[0] if blocks > 1 else content
    if not dense or stride < content:
        raise SpecError("kv_cache", f"{tuple(shape)} with strides {tuple(strides)}", wants)
    return stride
