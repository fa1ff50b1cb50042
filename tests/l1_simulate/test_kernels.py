"""Whole Triton kernels, compiled for both GPUs, executed and compared with NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from . import triton_kernels as tk
from .sim_helpers import ARCHS, ml_dtypes

from ci.cdna_sim import Result, compile_triton, simulate_triton  # isort: skip

RNG = np.random.default_rng(0)


def run(fn: Any, sig: dict[str, str], consts: dict[str, Any], arch: str, grid: int, args: list[Any], warps: int = 4,
        divisible: bool = True, **options: Any) -> Result:  # fmt: skip
    attrs = [n for n, t in sig.items() if t.startswith("*")] if divisible else []
    return simulate_triton(
        compile_triton(fn, sig, consts, attrs, arch=arch, num_warps=warps, **options), grid, args
    )


def close(got: np.ndarray, want: Any, tol: float = 1e-5) -> None:
    want = np.asarray(want, np.float64)
    assert np.nanmax(np.abs(got.astype(np.float64) - want) / (np.abs(want) + 1)) <= tol


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("n", [1, 1000, 4096, 5000])
def test_masked_add(arch: str, n: int) -> None:
    x, y = (RNG.standard_normal(n).astype(np.float32) for _ in range(2))
    o = np.zeros(n + 8, np.float32)
    r = run(tk.masked_add, {"x": "*fp32", "y": "*fp32", "o": "*fp32", "n": "i32"}, {"B": 1024}, arch,
            (n + 1023) // 1024, [x, y, o, n])  # fmt: skip
    assert (o[:n] == x + y).all()
    assert (o[n:] == 0).all()
    assert r.counters.stored() == 4 * n


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("warps", [1, 4, 8])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_reductions(arch: str, warps: int, dtype: str) -> None:
    m, n = 16, 64
    t = {"fp32": np.float32, "fp16": np.float16}[dtype]
    x = RNG.standard_normal((3, m, n)).astype(t)
    o, o2, o3 = np.zeros((3, m), t), np.zeros((3, n), t), np.zeros((3, m), np.int32)
    p = "*" + dtype
    run(
        tk.reductions,
        {"x": p, "o": p, "o2": p, "o3": "*i32"},
        {"N": n, "M": m},
        arch,
        3,
        [x, o, o2, o3],
        warps,
    )
    close(o, x.astype(np.float64).sum(2), 1e-5 if dtype == "fp32" else 2e-2)
    assert (o2 == x.max(1)).all()
    assert (o3 == x.argmax(2)).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_prefix_sum_sort_transpose(arch: str) -> None:
    x = RNG.standard_normal(512).astype(np.float32)
    o = np.zeros_like(x)
    run(tk.prefix_sum, {"x": "*fp32", "o": "*fp32"}, {"N": 512}, arch, 1, [x, o])
    close(o, np.cumsum(x.astype(np.float64)))
    run(tk.sort, {"x": "*fp32", "o": "*fp32"}, {"N": 512}, arch, 1, [x, o])
    assert (o == np.sort(x)).all()
    for dtype, p in ((np.float32, "*fp32"), (np.float16, "*fp16"), (np.uint8, "*u8")):
        a = (RNG.standard_normal((64, 32)) * 99).astype(dtype)
        b = np.zeros((32, 64), dtype)
        run(tk.transpose, {"x": p, "o": p}, {"N": 64, "M": 32}, arch, 1, [a, b])
        assert (b == a.T).all()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "u8"])
def test_gather(arch: str, dtype: str) -> None:
    t = {"fp32": np.float32, "fp16": np.float16, "u8": np.uint8}[dtype]
    x = (RNG.standard_normal(777) * 50).astype(t)
    ix = RNG.integers(0, 777, 3000).astype(np.int32)
    o = np.zeros(3000, t)
    run(tk.gather, {"x": "*" + dtype, "ix": "*i32", "o": "*" + dtype, "n": "i32"}, {"N": 512}, arch, 6,
        [x, ix, o, 3000], divisible=False)  # fmt: skip
    assert (o == x[ix]).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_atomics(arch: str) -> None:
    ix = RNG.integers(0, 37, 3000).astype(np.int32)
    h, c, s = np.zeros(37, np.int32), np.zeros(37, np.int32), np.zeros(37, np.float32)
    run(tk.atomics, {"ix": "*i32", "h": "*i32", "c": "*i32", "s": "*fp32", "n": "i32"}, {"N": 512}, arch, 6,
        [ix, h, c, s, 3000])  # fmt: skip
    count = np.bincount(ix, minlength=37)
    last = np.zeros(37, int)
    np.maximum.at(last, ix, np.arange(3000))
    assert (h == count).all()
    assert (s == 1.5 * count).all()
    assert (c == last).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_divergent_while_loops(arch: str) -> None:
    x = np.arange(1, 40, dtype=np.int32)
    o = np.zeros_like(x)
    run(tk.collatz, {"x": "*i32", "o": "*i32"}, {"N": 64}, arch, 39, [x, o], 2)

    def steps(v: int) -> int:
        n = 0
        while v > 1:
            v, n = (v // 2 if v % 2 == 0 else 3 * v + 1), n + 1
        return n

    assert [int(v) for v in o] == [steps(int(v)) for v in x]


@pytest.mark.parametrize("arch", ARCHS)
def test_float_math(arch: str) -> None:
    n = 512
    a, b = (RNG.standard_normal(n) * 10).astype(np.float32), (RNG.standard_normal(n) * 3).astype(np.float32)
    o = np.zeros((10, n), np.float32)
    run(tk.float_math, {"x": "*fp32", "y": "*fp32", "o": "*fp32"}, {"N": n}, arch, 1, [a, b, o])
    x, y = a.astype(np.float64), b.astype(np.float64)
    want = [np.exp(x), np.log(abs(x) + 1), np.sqrt(abs(x)), x / y, np.sin(x), 1 / np.sqrt(abs(x) + 1e-3), x / y,
            np.floor(x), np.sqrt(abs(x)), x * y + x]  # fmt: skip
    for k in range(10):
        close(o[k], want[k], 2e-6)
    assert (o[6] == a / b).all()  # correctly rounded: v_div_scale, v_div_fmas, v_div_fixup
    assert (o[8] == np.sqrt(abs(a))).all()
    assert (o[9] == (x * y + x).astype(np.float32)).mean() > 0.99


@pytest.mark.parametrize("arch", ARCHS)
def test_int_math(arch: str) -> None:
    n = 512
    a = RNG.integers(-(2**31), 2**31, n).astype(np.int32)
    b = RNG.integers(1, 2**15, n).astype(np.int32) * RNG.choice([-1, 1], n).astype(np.int32)
    o = np.zeros((10, n), np.int32)
    run(tk.int_math, {"x": "*i32", "y": "*i32", "o": "*i32"}, {"N": n}, arch, 1, [a, b, o])
    for i in range(n):
        p, q = int(a[i]), int(b[i])
        t = abs(p) // abs(q) * (1 if (p < 0) == (q < 0) else -1)
        want = [t, p - t * q, p * q, p >> (q & 31), (p & 0xFFFFFFFF) * (q & 0xFFFFFFFF) >> 32, p ^ q, min(p, q),
                p * q >> 7, (p & 0xFF) - (p & 0x80) * 2, t]  # fmt: skip
        assert [int(v) & 0xFFFFFFFF for v in o[:, i]] == [w & 0xFFFFFFFF for w in want]


TYPES: dict[str, Any] = {
    "fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "fp8e5": ml_dtypes.float8_e5m2, "fp8e4b8": ml_dtypes.float8_e4m3fnuz,
}  # fmt: skip
CASTS = [("fp32", "fp16"), ("fp32", "bf16"), ("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp8e4nv"),
         ("fp16", "fp8e4nv"), ("bf16", "fp8e4nv"), ("fp32", "fp8e5"), ("fp8e4nv", "fp32"), ("fp8e4nv", "fp16"),
         ("fp8e4nv", "bf16"), ("fp8e5", "fp16"), ("fp32", "fp8e4b8"), ("fp8e4b8", "fp32")]  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("src", "dst"), CASTS)
def test_casts(arch: str, src: str, dst: str) -> None:
    n = 1024
    x = np.clip(RNG.standard_normal(n) * np.exp2(RNG.integers(-12, 8, n)), -440, 440)
    if dst == "fp8e4b8":
        x = np.clip(x, -240, 240)  # Triton saturates this one, ml_dtypes makes NaN
    x = x.astype(np.float32).astype(TYPES[src])
    if "fp8" in src:
        x = np.resize(np.arange(256, dtype=np.uint8), n).view(TYPES[src])
        x = np.where(np.isnan(x.astype(np.float32)), TYPES[src](1.0), x)  # gfx942's software decode loses NaN
    o = np.zeros(n, TYPES[dst])
    run(tk.cast, {"x": "*" + src, "o": "*" + dst}, {"N": n}, arch, 1, [x.view(np.uint8), o.view(np.uint8)])
    want = x.astype(np.float32).astype(TYPES[dst])
    assert (o.view(np.uint8) == want.view(np.uint8)).all()


DOTS = ["fp16", "bf16", "fp32", "fp8e4nv", "fp8e5", "i8", "fp8e4b8"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DOTS)
@pytest.mark.parametrize(
    ("m", "n", "k", "warps"), [(16, 16, 32, 1), (32, 32, 64, 4), (64, 64, 128, 4), (16, 64, 128, 1)]
)
def test_dot(arch: str, dtype: str, m: int, n: int, k: int, warps: int) -> None:
    if dtype == "fp8e4b8" and arch == "gfx950":
        dtype = "fp8e4nv"
    if dtype == "i8":
        a, b = (
            RNG.integers(-128, 128, (m, k)).astype(np.int8),
            RNG.integers(-128, 128, (k, n)).astype(np.int8),
        )
        c: np.ndarray = np.zeros((m, n), np.int32)
    else:
        a, b = (RNG.standard_normal(s).astype(TYPES[dtype]) for s in ((m, k), (k, n)))
        c = np.zeros((m, n), np.float32)
    raw = lambda z: z.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[z.dtype.itemsize])  # noqa: E731
    run(tk.dot, {"a": "*" + dtype, "b": "*" + dtype, "c": "*i32" if dtype == "i8" else "*fp32"},
        {"M": m, "N": n, "K": k, "PRECISION": "ieee"}, arch, 1, [raw(a), raw(b), c], warps)  # fmt: skip
    want = a.astype(np.float64) @ b.astype(np.float64)
    if dtype == "i8":
        assert (c == want).all()
    else:
        close(c, want, 1e-5)  # fp32 sums of up to 128 terms, rounded after each matrix instruction


def test_arrays_may_be_views_and_share_memory() -> None:
    base = np.zeros(4096, np.float32)
    base[:1000] = RNG.standard_normal(1000)
    x, o = base[0:1000], base[2000:3000]
    run(tk.masked_add, {"x": "*fp32", "y": "*fp32", "o": "*fp32", "n": "i32"}, {"B": 256}, "gfx942", 4,
        [x, x, o, 1000])  # fmt: skip
    assert (o == 2 * x).all()
    assert (base[3000:] == 0).all()


def test_one_wave_batch_equals_many() -> None:
    """The result does not depend on how many waves run side by side."""
    k = compile_triton(tk.row_softmax, {"x": "*fp32", "o": "*fp32"}, {"N": 256}, ["x", "o"], num_warps=2)
    x = RNG.standard_normal((9, 256)).astype(np.float32)
    outs, counts = [], []
    for waves in (2, 4, 128):
        o = np.zeros_like(x)
        counts.append(simulate_triton(k, 9, [x, o], max_waves=waves).counters.total)
        outs.append(o)
    assert (outs[0] == outs[1]).all()
    assert (outs[0] == outs[2]).all()
    assert len(set(counts)) == 1
