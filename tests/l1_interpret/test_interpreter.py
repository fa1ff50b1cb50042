"""The repair of the interpreter: exact, and still needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests import interpreter_repair as repair
from turboquant_rocm.backends._triton.dequantize import fp8_e4m3fn_value
from turboquant_rocm.backends._triton.store import fp8_e4m3fn_bytes


def test_the_stock_interpreter_still_needs_it():
    """Fails when nothing is left to repair: then tests/interpreter_repair.py can go."""
    code = "from tests.interpreter_repair import stock_defects as d\nfor n, s in d().items(): print(n, s, sep=': ')"
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip(), "the interpreter converts correctly now: remove the repair"
    print(f"triton {triton.__version__}\n{run.stdout}")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp8e4nv", torch.float8_e4m3fn),
        ("fp8e5", torch.float8_e5m2),
        ("fp8e4b8", torch.float8_e4m3fnuz),
        ("fp8e5b16", torch.float8_e5m2fnuz),
    ],
)
def test_minifloats_equal_torch(name, dtype):
    ours = {d.name: d for d in (tl.float8e4nv, tl.float8e5, tl.float8e4b8, tl.float8e5b16)}[name]
    codes = torch.arange(256, dtype=torch.uint8)
    values = repair.decode(codes.numpy(), ours)
    assert np.array_equal(values, codes.view(dtype).double().numpy(), equal_nan=True)
    largest = float(np.nanmax(np.where(np.isinf(values), np.nan, values)))
    x = (torch.randn(20000) * torch.exp2(torch.randint(-20, 12, (20000,)))).clamp(-largest, largest)
    want = x.to(dtype).view(torch.uint8).numpy()
    assert np.array_equal(repair.encode(x.double().numpy(), ours), want)


def test_bf16_equals_torch():
    x = torch.randn(20000) * torch.exp2(torch.randint(-120, 120, (20000,)))
    x = torch.cat([x, torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38])])
    got = repair.encode(x.double().numpy(), tl.bfloat16).view(np.int16)
    want = x.bfloat16()
    assert torch.equal(torch.from_numpy(got).view(torch.bfloat16).isnan(), want.isnan())
    assert torch.equal(torch.from_numpy(got)[~want.isnan()], want.view(torch.int16)[~want.isnan()])


@triton.jit
def _convert(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


@triton.jit
def _dot(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + i, tl.dot(tl.load(a_ptr + i), tl.load(b_ptr + i)))


def test_kernels_use_it():
    x = torch.randn(1024) * 100
    out = torch.empty(1024, dtype=torch.bfloat16)
    _convert[(1,)](x, out, N=1024)
    assert torch.equal(out, x.bfloat16())
    fp8 = torch.empty(1024, dtype=torch.float8_e4m3fn)
    _convert[(1,)](x, fp8, N=1024)
    assert torch.equal(fp8.view(torch.uint8), x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    product = torch.empty(16, 16)
    _dot[(1,)](a, b, product, N=16)
    assert torch.allclose(product, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@triton.jit
def _fp8_roundtrip(x_ptr, code_ptr, back_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    code = fp8_e4m3fn_bytes(tl.load(x_ptr + i))
    tl.store(code_ptr + i, code.to(tl.uint8))
    tl.store(back_ptr + i, fp8_e4m3fn_value(tl.load(code_ptr + i).to(tl.int32)))


def test_integer_fp8_equals_torch():
    """The store's and dequantise's own conversion, for values of every size, ties and both ends."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[~every.isnan()]
    ties = (every[:-1] + every[1:]) / 2
    x = torch.cat(
        [every, ties, torch.tensor([464.0, 472.0, 480.0, 1e30, -1e30, 1e-30, -1e-9]), torch.randn(4096)]
    )
    x = torch.cat([x, torch.randn(8192 - len(x)) * torch.exp2(torch.randint(-12, 10, (8192 - len(x),)))])
    code, back = torch.empty(8192, dtype=torch.uint8), torch.empty(8192)
    _fp8_roundtrip[(1,)](x, code, back, N=8192)
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    bits = want.view(torch.uint8)
    assert torch.equal(code, torch.where(bits == 0x80, torch.zeros_like(bits), bits))
    assert torch.equal(back, want.float() + 0.0)


def test_folder_is_interpreted():
    assert os.environ.get("TRITON_INTERPRET") == "1"
