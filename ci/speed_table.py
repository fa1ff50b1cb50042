"""First speed table of the decode kernels: ``python -m ci.speed_table --help``. Writes docs/performance.md.

How it measures. Every case is checked against fp64 attention over the dequantised cache before it is timed. Times are
medians of CUDA-graph replays; a graph holds one call for each of several copies of the cache, together larger than
the second-level cache, so that every call reads cold memory; block tables are random permutations. The baseline, a
bf16 paged decode in plain Triton tuned over tiles and splits, and the ceiling, a kernel that only reads, run in the
same process. "Bytes" are those of the packed cache that must be read once.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from turboquant_rocm import Decision, LayerSpec, Policy, bind, decide
from turboquant_rocm.backends._torch.reference import ReferenceOps
from turboquant_rocm.target import detect

DEVICE = "cuda"
COLD_BYTES = 256 << 20
SHAPES = ((1, 4096), (1, 32768), (1, 131072), (8, 8192), (32, 4096), (64, 8192), (128, 4096), (32, 32768))
PRESETS = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")


# ---- timing --------------------------------------------------------------------------------------------------


def graph_time_us(calls: list[Callable[[], Any]], replays: int = 15) -> tuple[float, float]:
    """Median time of one call in microseconds, and the spread (interquartile range), over graph replays."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    repeat = max(1, 8 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (repeat * len(calls)))
    quarters = statistics.quantiles(times, n=4)
    return statistics.median(times), quarters[2] - quarters[0]


@triton.jit
def _read_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, ITERATIONS: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * (BLOCK * ITERATIONS)
    total = tl.zeros((BLOCK,), tl.int32)
    for i in range(ITERATIONS):
        total ^= tl.load(x_ptr + base + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.max(total, axis=0))


def read_ceiling() -> float:
    """Bytes per second of a kernel that only reads 2 GiB."""
    x = torch.randint(0, 1 << 30, (1 << 29,), dtype=torch.int32, device=DEVICE)
    best = 0.0
    for block, iterations, warps in ((4096, 8, 8), (8192, 4, 8), (2048, 16, 4), (4096, 4, 4)):
        programs = x.numel() // (block * iterations)
        out = torch.empty(programs, dtype=torch.int32, device=DEVICE)
        time, _ = graph_time_us(
            [lambda: _read_kernel[(programs,)](x, out, x.numel(), block, iterations, num_warps=warps)],  # noqa: B023
            5,
        )
        best = max(best, x.numel() * 4 / time * 1e6)
    return best


# ---- baseline: bf16 paged decode -------------------------------------------------------------------------------


@triton.jit
def _bf16_kernel(
    q_ptr,  # [B, Hq, D]
    k_ptr,  # [nb, bs, Hk, D]
    v_ptr,
    table_ptr,  # [B, M]
    lens_ptr,
    part_ptr,  # [B, Hq, S, D] fp32
    lse_ptr,  # [B, Hq, S]
    scale_log2,
    splits,
    table_stride,
    HK: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    BS: tl.constexpr,
    T: tl.constexpr,
):
    head, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens_ptr + b)
    per = tl.cdiv(tl.cdiv(length, splits), T) * T
    low, high = split * per, tl.minimum(split * per + per, length)
    g, d, t = tl.arange(0, GP), tl.arange(0, D), tl.arange(0, T)
    row = (b * HK + head) * G + g
    q = tl.load(q_ptr + row[:, None] * D + d[None, :], (g < G)[:, None], 0.0)
    m = tl.full((GP,), float("-inf"), tl.float32)
    norm = tl.zeros((GP,), tl.float32)
    acc = tl.zeros((GP, D), tl.float32)
    for start in range(low, high, T):
        token = start + t
        page = tl.load(table_ptr + b * table_stride + token // BS, token < high, 0)
        at = (page.to(tl.int64) * BS + token % BS) * (HK * D) + head * D
        k = tl.load(k_ptr + at[None, :] + d[:, None])
        s = tl.dot(q, k) * scale_log2
        s = tl.where((token < high)[None, :], s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        alpha = tl.exp2(m - new)
        m = new
        norm = norm * alpha + tl.sum(p, 1)
        v = tl.load(v_ptr + at[:, None] + d[None, :])
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    out = row * splits + split
    tl.store(part_ptr + out[:, None] * D + d[None, :], acc / norm[:, None], (g < G)[:, None] & (high > low))
    tl.store(lse_ptr + out, tl.where(high > low, m + tl.log2(norm), float("-inf")), g < G)


@triton.jit
def _bf16_reduce(part_ptr, lse_ptr, out_ptr, splits, D: tl.constexpr, S: tl.constexpr):
    row, s, d = tl.program_id(0), tl.arange(0, S), tl.arange(0, D)
    lse = tl.load(lse_ptr + row * splits + s, s < splits, float("-inf"))
    w = tl.exp2(lse - tl.max(lse, 0))
    x = tl.load(part_ptr + (row * splits + s)[:, None] * D + d[None, :], (lse > float("-inf"))[:, None], 0.0)
    tl.store(out_ptr + row * D + d, tl.sum(x * w[:, None], 0) / tl.sum(w, 0))


def bf16_paged(batch: int, context: int, hq: int, hk: int, d: int, bs: int, sms: int) -> tuple[float, str]:
    """Best time of the bf16 baseline over its tiles and splits, and which won."""
    blocks = batch * context // bs
    copies = min(8, max(1, -(-COLD_BYTES // (blocks * bs * hk * d * 4))))
    k = [torch.randn(blocks, bs, hk, d, device=DEVICE, dtype=torch.bfloat16) for _ in range(copies)]
    v = [torch.randn(blocks, bs, hk, d, device=DEVICE, dtype=torch.bfloat16) for _ in range(copies)]
    table = torch.randperm(blocks, device=DEVICE).int().view(batch, -1)
    lens = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
    q = torch.randn(batch, hq, d, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    best = (float("inf"), "")
    g = hq // hk
    for waves in (2, 4, 8):
        splits = max(1, min(64, -(-waves * sms // (batch * hk)), context // 64))
        part = torch.empty(batch, hq, splits, d, device=DEVICE)
        lse = torch.empty(batch, hq, splits, device=DEVICE)
        for tile, warps, stages in ((32, 2, 3), (64, 4, 3), (64, 4, 2), (128, 4, 2), (32, 1, 3)):

            def call(i: int) -> None:
                _bf16_kernel[(hk, splits, batch)](  # noqa: B023
                    q, k[i], v[i], table, lens, part, lse, d**-0.5 * 1.4426950408889634, splits,  # noqa: B023
                    table.stride(0), hk, g, max(16, triton.next_power_of_2(g)), d, bs, tile,  # noqa: B023
                    num_warps=warps, num_stages=stages,  # noqa: B023
                )  # fmt: skip
                _bf16_reduce[(batch * hq,)](
                    part, lse, out, splits, d, triton.next_power_of_2(splits),  # noqa: B023
                )  # fmt: skip

            time, _ = graph_time_us([lambda i=i: call(i) for i in range(copies)], 7)
            best = min(best, (time, f"tile {tile}, {warps} warps, {stages} stages, {splits} splits"))
    check = torch.nn.functional.scaled_dot_product_attention(
        q[0, :, None].float(),
        k[copies - 1][table[0].long()]
        .reshape(context, hk, d)
        .float()
        .repeat_interleave(g, 1)
        .transpose(0, 1),
        v[copies - 1][table[0].long()]
        .reshape(context, hk, d)
        .float()
        .repeat_interleave(g, 1)
        .transpose(0, 1),
    )[:, 0]
    error = float((out[0].float() - check).norm() / check.norm())
    assert error < 1e-2, f"the bf16 baseline is wrong: {error}"
    return best


# ---- the packed cache ------------------------------------------------------------------------------------------


def packed(
    preset: str, layout: str, batch: int, context: int, hq: int, hk: int, d: int, bs: int, **options: Any
) -> tuple[float, float, int, int]:
    """(time, spread, bytes read, splits) of decode; checked first."""
    layer = LayerSpec(0, hq, hk, d)
    decision: Decision = decide(layer, detect(), preset, bs, Policy(force=f"triton_{layout}"))
    bound = bind(decision, checks="off", **options)
    assert bound.backend == f"triton_{layout}"
    blocks = batch * context // bs
    read = blocks * bs * hk * bound.layout.slot_bytes
    copies = min(16, max(1, -(-COLD_BYTES // read)))
    caches = [bound.allocate(blocks, DEVICE) for _ in range(copies)]
    chunk = min(16384, blocks * bs)
    key = torch.randn(chunk, hk, d, device=DEVICE, dtype=torch.bfloat16)
    value = torch.randn(chunk, hk, d, device=DEVICE, dtype=torch.bfloat16)
    for cache in caches:
        for first in range(0, blocks * bs, chunk):
            slots = torch.arange(first, min(first + chunk, blocks * bs), device=DEVICE)
            bound.store(key[: len(slots)], value[: len(slots)], cache, slots)
    table = torch.randperm(blocks, device=DEVICE).int().view(batch, -1)
    lens = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
    query = torch.randn(batch, hq, d, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty_like(query)
    bound.decode(query, caches[0], table, lens, out=out)
    error = 0.0
    oracle = ReferenceOps(decision, bound.layout, math_dtype=torch.float64)
    for b in {0, batch - 1}:
        want = torch.empty(1, hq, d, dtype=torch.float64, device=DEVICE)
        oracle.decode(
            query[b : b + 1],
            caches[0].data,
            table[b : b + 1],
            lens[b : b + 1],
            None,
            1,
            d**-0.5,
            None,
            want,
            None,
        )
        error = max(error, float((out[b : b + 1].double() - want).norm() / want.norm()))
    assert error < 5e-3, f"{preset} {layout}: wrong by {error}"
    calls = [lambda c=c: bound.decode(query, c, table, lens, out=out) for c in caches]
    time, spread = graph_time_us(calls)
    splits = next(iter(bound.ops._launches.values())).splits
    return time, spread, read, splits


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes", default=",".join(f"{b}x{c}" for b, c in SHAPES), help="batch x context, ..."
    )
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--layouts", default="soa,aos")
    parser.add_argument("--heads", default="64/8")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument(
        "--tuning", default="{}", help="JSON: values that replace those of configs/tuned, or a list"
    )
    parser.add_argument("--no-baseline", action="store_true")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    args = parser.parse_args()
    hq, hk = map(int, args.heads.split("/"))
    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")]
    tunings = json.loads(args.tuning)
    tunings = tunings if isinstance(tunings, list) else [tunings]
    properties = torch.cuda.get_device_properties(0)
    ceiling = read_ceiling()
    head = (
        f"{properties.name}, torch {torch.__version__}, Triton {triton.__version__}; "
        f"read ceiling {ceiling / 1e12:.2f} TB/s"
    )
    print(head, flush=True)
    lines = []
    for batch, context in shapes:
        base = None
        if not args.no_baseline:
            base, how = bf16_paged(
                batch, context, hq, hk, args.head_size, args.block_size, properties.multi_processor_count
            )
            percent = 100 * batch * context * hk * args.head_size * 4 / base * 1e6 / ceiling
            row = (f"{batch} x {context}", "bf16 paged", "", f"{base:.1f}", f"{percent:.0f} %", "1.00", how)
            lines.append(row)
            print(" | ".join(row), flush=True)
        for layout in args.layouts.split(","):
            for preset in args.presets.split(","):
                for tuning in tunings:
                    torch.cuda.empty_cache()
                    time, spread, read, splits = packed(
                        preset, layout, batch, context, hq, hk, args.head_size, args.block_size, tuning=tuning
                    )
                    percent = 100 * read / time * 1e6 / ceiling
                    row = (
                        f"{batch} x {context}", preset, layout, f"{time:.1f} +- {spread:.1f}", f"{percent:.0f} %",
                        f"{base / time:.2f}" if base else "", f"{splits} splits {tuning or ''}",
                    )  # fmt: skip
                    lines.append(row)
                    print(" | ".join(row), flush=True)
    if args.markdown:
        table = [
            "| shape | cache | layout | us | of ceiling | bf16 / this | how |",
            "|---|---|---|---|---|---|---|",
        ]
        table += ["| " + " | ".join(row) + " |" for row in lines]
        text = f"# Decode speed\n\n{head}. {args.heads} heads, D = {args.head_size}, block {args.block_size}.\n\n"
        notes = __doc__.split("How it measures. ")[1]
        args.markdown.write_text(text + notes.strip() + "\n\n" + "\n".join(table) + "\n")


if __name__ == "__main__":
    main()
