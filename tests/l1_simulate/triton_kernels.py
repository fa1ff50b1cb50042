"""Triton kernels that the simulator's tests compile: small ones, each for a part of the instruction set."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def masked_add(x, y, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    tl.store(o + i, tl.load(x + i, m) + tl.load(y + i, m), m)


@triton.jit
def row_softmax(x, o, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    v = tl.load(x + i)
    e = tl.exp(v - tl.max(v, 0))
    tl.store(o + i, e / tl.sum(e, 0))


@triton.jit
def dot_softmax(a, b, c, K, BM: tl.constexpr, BK: tl.constexpr):
    r = tl.arange(0, BM)
    kk = tl.arange(0, BK)
    acc = tl.zeros((BM, BM), tl.float32)
    for i in range(0, K, BK):
        x = tl.load(a + r[:, None] * K + (i + kk)[None, :])
        y = tl.load(b + (i + kk)[:, None] * BM + r[None, :])
        acc += tl.dot(x, y)
    e = tl.exp(acc - tl.max(acc, 1)[:, None])
    tl.store(c + r[:, None] * BM + r[None, :], e / tl.sum(e, 1)[:, None])


@triton.jit
def reductions(x, o, o2, o3, N: tl.constexpr, M: tl.constexpr):
    p = tl.program_id(0)
    v = tl.load(x + p * N * M + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(o + p * M + tl.arange(0, M), tl.sum(v, 1))
    tl.store(o2 + p * N + tl.arange(0, N), tl.max(v, 0))
    tl.store(o3 + p * M + tl.arange(0, M), tl.argmax(v, 1))


@triton.jit
def prefix_sum(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.cumsum(tl.load(x + i), 0))


@triton.jit
def gather(x, ix, o, n, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    m = i < n
    tl.store(o + i, tl.load(x + tl.load(ix + i, m, other=0), m, other=0), m)


@triton.jit
def atomics(ix, h, c, s, n, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    m = i < n
    j = tl.load(ix + i, m, other=0)
    tl.atomic_add(h + j, 1, m)
    tl.atomic_max(c + j, i, m)
    tl.atomic_add(s + j, 1.5, m)


@triton.jit
def collatz(x, o, N: tl.constexpr):
    v = tl.load(x + tl.program_id(0))
    c = 0
    while v > 1:
        v = tl.where(v % 2 == 0, v // 2, 3 * v + 1)
        c += 1
    tl.store(o + tl.program_id(0), c)


@triton.jit
def float_math(x, y, o, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(o + i, tl.exp(a))
    tl.store(o + N + i, tl.log(tl.abs(a) + 1))
    tl.store(o + 2 * N + i, tl.sqrt(tl.abs(a)))
    tl.store(o + 3 * N + i, a / b)
    tl.store(o + 4 * N + i, tl.sin(a))
    tl.store(o + 5 * N + i, tl.rsqrt(tl.abs(a) + 1e-3))
    tl.store(o + 6 * N + i, tl.div_rn(a, b))
    tl.store(o + 7 * N + i, tl.floor(a))
    tl.store(o + 8 * N + i, tl.sqrt_rn(tl.abs(a)))
    tl.store(o + 9 * N + i, tl.fma(a, b, a))


@triton.jit
def int_math(x, y, o, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(o + i, a // b)
    tl.store(o + N + i, a % b)
    tl.store(o + 2 * N + i, a * b)
    tl.store(o + 3 * N + i, a >> (b & 31))
    tl.store(o + 4 * N + i, tl.umulhi(a, b))
    tl.store(o + 5 * N + i, a ^ b)
    tl.store(o + 6 * N + i, tl.minimum(a, b))
    tl.store(o + 7 * N + i, (a.to(tl.int64) * b.to(tl.int64) >> 7).to(tl.int32))
    tl.store(o + 8 * N + i, a.to(tl.int8).to(tl.int32))
    tl.store(o + 9 * N + i, (a.to(tl.int64) // b.to(tl.int64)).to(tl.int32))


@triton.jit
def cast(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + i).to(o.dtype.element_ty))


@triton.jit
def dot(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    r = tl.arange(0, M)
    q = tl.arange(0, N)
    kk = tl.arange(0, K)
    x = tl.load(a + r[:, None] * K + kk[None, :])
    y = tl.load(b + kk[:, None] * N + q[None, :])
    z = tl.dot(x, y, out_dtype=c.dtype.element_ty, input_precision=PRECISION)
    tl.store(c + r[:, None] * N + q[None, :], z)


@triton.jit
def sort(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.sort(tl.load(x + i)))


@triton.jit
def transpose(x, o, N: tl.constexpr, M: tl.constexpr):
    i = tl.arange(0, N)
    j = tl.arange(0, M)
    tl.store(o + j[:, None] * N + i[None, :], tl.trans(tl.load(x + i[:, None] * M + j[None, :])))
