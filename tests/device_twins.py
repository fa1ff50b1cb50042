"""Runs the functions of backends/_triton/device.py over many words, for comparing targets with each other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from turboquant_rocm.backends._triton.device import (
    centroid_pairs3,
    centroid_pairs4,
    fp8_pairs,
    funnel,
    halves,
    pair_order,
)
from turboquant_rocm.backends._triton.tile import centroid_table

WORDS = 1024
HEAD_SIZE = 128


@triton.jit
def _store_pair(
    out_ptr,
    i,  # [n]
    pair,  # [n] int32
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):
    low, high = halves(pair)
    tl.store(out_ptr + i * 8 + FIRST, low)
    tl.store(out_ptr + i * 8 + SECOND, high)


@triton.jit
def twins_kernel(
    words_ptr,  # [n] int32
    out_ptr,  # [n, 8] fp16: codes in memory order (FP8: two words)
    funnel_ptr,  # [n] int32
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    ORDER: tl.constexpr,
    TARGET: tl.constexpr,
    N: tl.constexpr,
):
    i = tl.arange(0, N)
    word = tl.load(words_ptr + i)
    tl.store(funnel_ptr + i, funnel(word, word ^ 0x5A5A5A5A, i & 31, TARGET))
    if BITS == 8:
        a, b = fp8_pairs(word, TARGET)
        c, d = fp8_pairs(word ^ 0x01010101, TARGET)
    elif BITS == 4:
        a, b, c, d = centroid_pairs4(word, TABLE, TARGET)
    else:
        a, b, c, d = centroid_pairs3(word, TABLE, TARGET)
    _store_pair(out_ptr, i, a, ORDER[0], ORDER[1])
    _store_pair(out_ptr, i, b, ORDER[2], ORDER[3])
    _store_pair(out_ptr, i, c, ORDER[4], ORDER[5])
    _store_pair(out_ptr, i, d, ORDER[6], ORDER[7])


def words(device: str) -> torch.Tensor:
    """Every code in every position, every byte in every position, then random words."""
    every = [(c << (4 * p)) for c in range(16) for p in range(8)] + [
        (b << (8 * p)) for b in range(256) for p in (0, 3)
    ]
    g = torch.Generator().manual_seed(0)
    rest = torch.randint(0, 1 << 32, (WORDS - len(every),), generator=g).tolist()
    return torch.tensor(every + rest, dtype=torch.int64).to(torch.int32).to(device)


def run(bits: int, target: str, device: str) -> torch.Tensor:
    """Bits of what the functions return: int16 [n, 10]."""
    out = torch.empty(WORDS, 8, dtype=torch.float16, device=device)
    shifted = torch.empty(WORDS, dtype=torch.int32, device=device)
    table = (0, 0, 0, 0) if bits == 8 else centroid_table(HEAD_SIZE, bits).planes
    order = tuple(range(8)) if bits == 8 else pair_order(target, 8)
    twins_kernel[(1,)](words(device), out, shifted, bits, table, order, target, WORDS)
    return torch.cat([out.view(torch.int16), shifted[:, None].view(torch.int16)], 1)
