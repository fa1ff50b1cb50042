"""Runs the functions of backends/_triton/device.py that the store uses over many numbers, for comparing targets."""

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl

from turboquant_rocm.backends._triton.device import nearest_code, whole
from turboquant_rocm.backends._triton.store import code_guess
from turboquant_rocm.codebook import midpoints

NUMBERS = 4096


@triton.jit
def code_twins_kernel(
    y_ptr,  # [N] fp32
    code_ptr,  # [N] int32, written
    square_ptr,  # [N] fp32, written
    whole_ptr,  # [N] int32, written: of |y| up to 16
    GUESS: tl.constexpr,
    SIZE: tl.constexpr,
    TARGET: tl.constexpr,
    N: tl.constexpr,
):
    i = tl.arange(0, N // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    y = tl.load(y_ptr + i)
    code, square = nearest_code(y, GUESS, SIZE, TARGET)
    tl.store(code_ptr + i, code)
    tl.store(square_ptr + i, square)
    tl.store(whole_ptr + i, whole(tl.minimum(tl.abs(y), 16.0), TARGET))


def numbers(head_size: int, bits: int) -> torch.Tensor:
    """NUMBERS fp32 before they are scaled by 1 / sqrt(head_size): what lies around the midpoints, ends, random ones."""
    middle = (midpoints(head_size, bits).astype(np.float64) * math.sqrt(head_size)).astype(np.float32)
    near = (middle.view(np.int32)[:, None] + np.arange(-6, 7)).astype(np.int32).view(np.float32)
    tiny = np.arange(0, 24, dtype=np.int32).view(np.float32)
    whole = np.arange(1, 17, dtype=np.float32)
    below = np.nextafter(whole, np.float32(0))
    ends = np.array([1e3, 1e30, 3e38], np.float32)
    some = np.concatenate([near.ravel()[np.isfinite(near.ravel())], tiny, whole, below, ends])
    some = np.concatenate([some, -some])
    rest = torch.randn(NUMBERS - len(some), generator=torch.Generator().manual_seed(bits))
    return torch.cat([torch.from_numpy(some), rest])


def run(
    head_size: int, bits: int, target: str, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes int32, squares fp32, min(|y|, 16) rounded down int32) of :func:`numbers`, each [NUMBERS]."""
    y = numbers(head_size, bits).to(device)
    code, rounded = (torch.empty(NUMBERS, dtype=torch.int32, device=device) for _ in range(2))
    square = torch.empty(NUMBERS, device=device)
    code_twins_kernel[(1,)](
        y, code, square, rounded, code_guess(head_size, bits), 1 << bits, target, NUMBERS, num_warps=4
    )
    return code, square, rounded
