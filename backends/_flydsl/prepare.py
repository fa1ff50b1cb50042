"""Query preparation: rotate, quantise to 15-bit fixed point, permute into the decode kernel's operand order.

Tile: one wave per query row and head, two neighbouring dims per lane. Movement: 256 or 512 bytes in, 264 out; the
rotation is seven butterfly stages, one in the lane and six across lanes. Budget: none, it runs once per row.
"""

import math
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import gpu

from . import emit as e
from .config import DIM, RowConfig
from .emit import F32, I32
from .tables import QUERY_LIMIT, key_tables

DTYPES = {"bf16": fx.BFloat16, "fp16": fx.Float16, "fp32": fx.Float32}


def _rotated(a: Any, b: Any, lane: Any) -> tuple[Any, Any]:
    """Sylvester's matrix over dims (2 lane, 2 lane + 1), times 1 / sqrt(128)."""
    a, b = a + b, a - b
    for stage in range(6):
        upper = (lane & I32(1 << stage)) != I32(0)
        out = []
        for x in (a, b):
            other = e.xor_lanes(x, 1 << stage)
            out.append(e.select(upper, other - x, other + x))
        a, b = out
    unit = F32(1.0 / math.sqrt(DIM))
    return a * unit, b * unit


def make_prepare(cfg: RowConfig) -> Any:
    """The launcher. Arguments: addresses of the query, of h and l [N, Hq, 2, 128] int8 and of scale and centre
    [N, Hq, 2] fp32; the row and head strides of the query in elements and N; the softmax factor; the stream.
    """
    dtype = DTYPES[cfg.dtype]
    size = dtype.width // 8
    heads = cfg.num_heads
    tables = key_tables(cfg.key_bits)
    beta = tables.beta / math.sqrt(DIM)

    @flyc.kernel(known_block_size=[64, 1, 1])
    def prepare(
        query_at: fx.Pointer,
        q8_at: fx.Int64,
        meta_at: fx.Int64,
        row_stride: fx.Int32,
        head_stride: fx.Int32,
        rows: fx.Int32,
        factor: fx.Float32,
    ):
        lane = I32(gpu.thread_idx.x)
        head, row = I32(gpu.block_idx.x), I32(gpu.block_idx.y)
        start = fx.Int64(row) * fx.Int64(row_stride) + fx.Int64(head) * fx.Int64(head_stride)
        source = e.descriptor(e.address(query_at) + start * fx.Int64(size), I32(DIM * size))
        words = e.load(source, lane * I32(2 * size), size // 2)
        pair = words.bitcast(dtype)
        a, b = _rotated(pair[0].to(F32), pair[1].to(F32), lane)

        largest = fx.arith.maxnumf(fx.math.absf(a), fx.math.absf(b))
        for stage in fx.range_constexpr(6):
            largest = fx.arith.maxnumf(largest, e.xor_lanes(largest, 1 << stage))
        present = largest > F32(0.0)
        largest = e.select(present, largest, F32(1.0))
        unit = F32(float(QUERY_LIMIT)) / largest
        fixed = [fx.math.roundeven(x * unit).to(I32) for x in (a, b)]
        total = fixed[0] + fixed[1]
        for stage in fx.range_constexpr(6):
            total = total + e.xor_lanes(total, 1 << stage)

        out = e.descriptor(q8_at, rows * I32(heads * 2 * DIM))
        place = (row * I32(heads) + head) * I32(2 * DIM)
        if fx.const_expr(cfg.key_bits == 4):  # of each 8 dims the even ones, then the odd ones
            place = place + (lane >> I32(2)) * I32(8) + (lane & I32(3))
        else:  # of each 32 dims those that are equal modulo 8 side by side
            place = (
                place + (lane >> I32(4)) * I32(32) + (lane & I32(3)) * I32(8) + ((lane >> I32(2)) & I32(3))
            )
        for parity in fx.range_constexpr(2):
            high = (fixed[parity] + I32(64)) >> I32(7)
            low = fixed[parity] - (high << I32(7))
            e.store_bits(out, place + I32(4 * parity), high, 8)
            e.store_bits(out, place + I32(4 * parity + DIM), low, 8)
        scale = largest * F32(beta / QUERY_LIMIT) * factor
        centre = total.to(F32) * F32(-tables.centre) * scale
        meta = e.descriptor(meta_at, rows * I32(heads * 8))
        at = e.select(lane == I32(0), (row * I32(heads) + head) * I32(8), I32(-1))
        e.store(meta, at, e.vec([scale, centre], F32))

    @flyc.jit
    def launch_prepare(
        query_at: fx.Pointer,
        q8_at: fx.Int64,
        meta_at: fx.Int64,
        row_stride: fx.Int32,
        head_stride: fx.Int32,
        rows: fx.Int32,
        factor: fx.Float32,
        stream: fx.Stream = fx.Stream(None),
    ):
        prepare(query_at, q8_at, meta_at, row_stride, head_stride, rows, factor).launch(
            grid=(heads, rows, 1), block=(64, 1, 1), stream=stream
        )

    return launch_prepare
