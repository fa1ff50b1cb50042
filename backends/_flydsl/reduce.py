"""Reduction of the splits: merge partial outputs by their log2 sums, add the sink, write output and lse.

Tile: one wave per query row and head, two neighbouring dims per lane. Movement: 516 bytes in per split, the output
row once. No other pass touches the output. Budget: none, its traffic is 1 to 3 % of the decode kernel's.
"""

import math
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import gpu

from . import emit as e
from .config import DIM, RowConfig
from .emit import F32, I32
from .prepare import DTYPES

LOG2E = math.log2(math.e)
NEG_INF = float("-inf")
LOWEST = -(2.0**126)  # stands for -inf where differences are taken


def _wave(x: Any, join: Any) -> Any:
    for stage in range(6):
        x = join(x, e.xor_lanes(x, 1 << stage))
    return x


def make_reduce(cfg: RowConfig) -> Any:
    """The launcher. Arguments: addresses of the partial outputs [N, Hq, S, 128] fp32, their log2 sums [N, Hq, S] fp32,
    query_start_loc [B + 1] (read if ``multi``), sinks [Hq] fp32, the output and lse; S, N, B, and in elements the row
    and head strides of the output and the row stride of lse; the stream.
    """
    dtype = DTYPES[cfg.dtype]
    size = dtype.width // 8
    heads = cfg.num_heads

    @flyc.kernel(known_block_size=[64, 1, 1])
    def reduce(
        part_at: fx.Pointer,
        sums_at: fx.Int64,
        starts_at: fx.Int64,
        sinks_at: fx.Int64,
        out_at: fx.Int64,
        lse_at: fx.Int64,
        splits: fx.Int32,
        rows: fx.Int32,
        batch: fx.Int32,
        row_stride: fx.Int32,
        head_stride: fx.Int32,
        lse_stride: fx.Int32,
    ):
        lane = I32(gpu.thread_idx.x)
        head, row = I32(gpu.block_idx.x), I32(gpu.block_idx.y)
        last = rows
        if fx.const_expr(cfg.multi):
            starts = e.descriptor(starts_at, (batch + I32(1)) * I32(4))
            last = e.scalar_load(starts, batch * I32(4))
        if row < last:
            which = fx.Int64(row * I32(heads) + head) * fx.Int64(splits)
            sums = e.descriptor(sums_at + which * fx.Int64(4), splits * I32(4))
            parts = e.descriptor(e.address(part_at) + which * fx.Int64(4 * DIM), splits * I32(4 * DIM))

            top = F32(LOWEST)
            for first in range(I32(0), splits, I32(64)):
                s = I32(first) + lane
                value = e.load(sums, s * I32(4), 1).bitcast(F32)[0]
                top = fx.arith.maxnumf(top, e.select(s < splits, value, F32(LOWEST)))
            top = _wave(top, fx.arith.maxnumf)
            if fx.const_expr(cfg.sinks):
                sinks = e.descriptor(sinks_at, I32(4 * heads))
                sink = e.vec([e.scalar_load(sinks, head * I32(4))], I32).bitcast(F32)[0] * F32(LOG2E)
            seen = top > F32(LOWEST)
            if fx.const_expr(cfg.sinks):
                top = fx.arith.maxnumf(top, sink)

            total, a, b = F32(0.0), F32(0.0), F32(0.0)
            for s in range(I32(0), splits, I32(1), unroll=4):
                at = I32(s)
                weight = e.exp2(e.vec([e.scalar_load(sums, at * I32(4))], I32).bitcast(F32)[0] - top)
                x = e.load(parts, lane * I32(8) + at * I32(4 * DIM), 2).bitcast(F32)
                used = weight > F32(0.0)  # an empty split left its part as it was
                total = total + weight
                a = e.fma(weight, e.select(used, x[0], F32(0.0)), a)
                b = e.fma(weight, e.select(used, x[1], F32(0.0)), b)
            if fx.const_expr(cfg.sinks):
                total = total + e.exp2(sink - top)
            factor = e.select(seen, F32(1.0) / total, F32(0.0))
            result = e.vec([(a * factor).to(dtype), (b * factor).to(dtype)], dtype)
            start = fx.Int64(row) * fx.Int64(row_stride) + fx.Int64(head) * fx.Int64(head_stride)
            target = e.descriptor(out_at + start * fx.Int64(size), I32(DIM * size))
            e.store(target, lane * I32(2 * size), result)
            if fx.const_expr(cfg.lse):
                lse = e.select(seen, (top + e.log2(total)) * F32(1.0 / LOG2E), F32(NEG_INF))
                where = lse_at + (fx.Int64(row) * fx.Int64(lse_stride) + fx.Int64(head)) * fx.Int64(4)
                e.store(e.descriptor(where, I32(4)), lane * I32(4), e.vec([lse], F32))

    @flyc.jit
    def launch_reduce(
        part_at: fx.Pointer,
        sums_at: fx.Int64,
        starts_at: fx.Int64,
        sinks_at: fx.Int64,
        out_at: fx.Int64,
        lse_at: fx.Int64,
        splits: fx.Int32,
        rows: fx.Int32,
        batch: fx.Int32,
        row_stride: fx.Int32,
        head_stride: fx.Int32,
        lse_stride: fx.Int32,
        stream: fx.Stream = fx.Stream(None),
    ):
        reduce(
            part_at, sums_at, starts_at, sinks_at, out_at, lse_at, splits, rows, batch, row_stride, head_stride,
            lse_stride,
        ).launch(grid=(heads, rows, 1), block=(64, 1, 1), stream=stream)  # fmt: skip

    return launch_reduce
