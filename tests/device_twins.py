"""Runs the functions of backends/_triton/device.py over many words, for comparing targets with each other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from turboquant_rocm.backends._triton.device import (
    centroid_pairs3,
    centroid_pairs4,
    fp8_pairs,
    fp8_unpack,
    fp16_pair,
    fp16_range,
    funnel,
    halves,
    nibbles,
    pair_order,
    quarters,
    spread3,
    table_bytes,
    value_pairs,
    value_steps,
    value_words,
)
from turboquant_rocm.backends._triton.tile import byte_table, centroid_table

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
    tl.store(
        funnel_ptr + i, funnel(word, word ^ 0x5A5A5A5A, i & 31, "cuda" if TARGET == "unpack" else TARGET)
    )
    if BITS == 8:
        if TARGET == "unpack":
            a, b = fp8_unpack(word)
            c, d = fp8_unpack(word ^ 0x01010101)
        else:
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


@triton.jit
def _store_bytes(
    out_ptr,
    at,  # [n]
    first,  # [n] int32: four int8 numbers
    second,
    ADD: tl.constexpr,
    STEP: tl.constexpr,  # 1: the second four lie behind the first, 2: between them
):
    a = quarters(first)
    b = quarters(second)
    for k in tl.static_range(4):
        x = a[k]
        y = b[k]
        x_ptr = out_ptr + at + STEP * k
        y_ptr = x_ptr + (4 if STEP == 1 else 1)
        if ADD:
            x += tl.load(x_ptr)
            y += tl.load(y_ptr)
        tl.store(x_ptr, x)
        tl.store(y_ptr, y)


@triton.jit
def byte_twins_kernel(
    words_ptr,  # [n] int32
    bytes_ptr,  # [n, PLANES, 8] int8: planes of the centroids of eight codes
    codes_ptr,  # [n, 8] int8: the codes as bytes, where BITS = 4
    values_ptr,  # [n, 2, 8, 2] fp16: the codes of the word and of another as numbers, and so again by bare numbers
    BITS: tl.constexpr,
    PLANES: tl.constexpr,
    TABLE: tl.constexpr,
    STEPS: tl.constexpr,
    TARGET: tl.constexpr,
    N: tl.constexpr,
):
    i = tl.arange(0, N)
    word = tl.load(words_ptr + i)
    for p in tl.static_range(PLANES):
        at = (i * PLANES + p) * 8
        if BITS == 4:
            a, b = table_bytes(word, TABLE[4 * p], TABLE[4 * p + 1], TARGET)
            _store_bytes(bytes_ptr, at, a, b, False, 1)
            tl.debug_barrier()
            a, b = table_bytes(word ^ -0x77777778, TABLE[4 * p + 2], TABLE[4 * p + 3], TARGET)
            _store_bytes(bytes_ptr, at, a, b, True, 1)
        else:
            a, b = table_bytes(spread3(word), TABLE[2 * p], TABLE[2 * p + 1], TARGET)
            _store_bytes(bytes_ptr, at, a, b, False, 1)
    if BITS == 4:
        a, b = nibbles(word, TARGET)
        _store_bytes(codes_ptr, i * 8, a, b, False, 2)
    low, high = value_words(word, word ^ 0x5A5A5A5A, BITS, TARGET)
    for bare in tl.static_range(2):
        pairs = value_pairs(low, high, BITS, bare == 1, TARGET)
        at = values_ptr + (2 * i + bare) * 16
        for k in tl.static_range(8):
            for half in tl.static_range(2):
                number = halves(pairs[k])[half].to(tl.float32)
                if bare == 1:
                    number = number * 16777216
                else:
                    number = number - 1024
                tl.store(at + 2 * k + half, (number / STEPS[k]).to(tl.float16))


def run_bytes(
    bits: int, planes: int, target: str, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(planes [n, planes, 8] int8 of the centroids in every word, 4-bit codes [n, 8] int8 as bytes, codes [n, 2, 8, 2]
    fp16 of it and of another, found in both ways)."""
    table = byte_table(HEAD_SIZE, bits, planes).words
    found = torch.empty(WORDS, planes, 8, dtype=torch.int8, device=device)
    codes = torch.zeros(WORDS, 8, dtype=torch.int8, device=device)
    values = torch.empty(WORDS, 2, 8, 2, dtype=torch.float16, device=device)
    byte_twins_kernel[(1,)](
        words(device), found, codes, values, bits, planes, table, value_steps(bits), target, WORDS
    )
    return found, codes, values


@triton.jit
def half_twins_kernel(
    numbers_ptr,  # [2, n] fp32
    pairs_ptr,  # [n] int32
    ranges_ptr,  # [2, n] fp32
    TOP: tl.constexpr,
    TARGET: tl.constexpr,
    N: tl.constexpr,
):
    i = tl.arange(0, N)
    a = tl.load(numbers_ptr + i)
    tl.store(pairs_ptr + i, fp16_pair(a, tl.load(numbers_ptr + N + i), TARGET))
    up, down = fp16_range(a.to(tl.int32, bitcast=True) & 0x7FFFFFFF, TOP)
    tl.store(ranges_ptr + i, up)
    tl.store(ranges_ptr + N + i, down)


def numbers(device: str) -> torch.Tensor:
    """[2, n] fp32: exponents around those of fp16, (near) ties between fp16 numbers, zeros, infinities and NaN."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, WORDS, generator=g) * torch.exp2(
        torch.randint(-40, 20, (2, WORDS), generator=g).float()
    )
    ties = (1 + (2 * torch.arange(64) + 1) * 2.0**-12) * torch.exp2(torch.arange(64) % 20 - 10.0)
    x[:, :64], x[1, 64:128] = ties, -ties * (1 + 2.0**-20)
    edges = [
        0.0, -0.0, 65504.0, 65519.0, 65520.0, -1e9, 1e38, 2.0**-24, 2.0**-25, 3e-45, 1e-38, float("inf"), float("nan")
    ]  # fmt: skip
    x[0, 128 : 128 + len(edges)] = torch.tensor(edges)
    return x.to(device)


def run_halves(target: str, device: str, top: int = 14) -> tuple[torch.Tensor, torch.Tensor]:
    """(the numbers as fp16 [n, 2], what fp16_range returns [2, n])."""
    pairs = torch.empty(WORDS, dtype=torch.int32, device=device)
    ranges = torch.empty(2, WORDS, device=device)
    half_twins_kernel[(1,)](numbers(device), pairs, ranges, top, target, WORDS)
    return pairs.view(torch.float16).view(WORDS, 2), ranges


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
    table = (0,) * 5 if bits == 8 else (*centroid_table(HEAD_SIZE, bits).planes, 0x7F7F7F7F)
    order = tuple(range(8)) if bits == 8 else pair_order(target, 8)
    twins_kernel[(1,)](words(device), out, shifted, bits, table, order, target, WORDS)
    return torch.cat([out.view(torch.int16), shifted[:, None].view(torch.int16)], 1)
