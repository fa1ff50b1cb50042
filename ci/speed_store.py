"""Speed of store and dequantise: ``python -m ci.speed_store --help``.

Times are medians of CUDA-graph replays over several copies of the inputs and outputs, together larger than the
second-level cache. "Bytes" are those that must move: raw keys and values read and slots written by the store, the
reverse by dequantise. The ceiling is a device-to-device copy in the same process, bytes read plus bytes written.
Every kernel is checked against the reference before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton

from ci.speed_table import COLD_BYTES, DEVICE, graph_time_us
from tests import store_checks as checks

TOKENS = (1, 64, 1024, 8192)


def copy_ceiling() -> float:
    """Bytes per second, read plus written, of a 2 GiB device-to-device copy."""
    source = torch.randint(0, 1 << 30, (1 << 28,), dtype=torch.int32, device=DEVICE)
    target = torch.empty_like(source)
    time, _ = graph_time_us([lambda: target.copy_(source)], 5)
    return float(2 * source.numel() * 4 / time * 1e6)


def copies_for(size: int) -> int:
    return min(64, max(2, -(-COLD_BYTES // size)))


def store_row(
    preset: str, layout: str, tokens: int, heads: int, d: int, **options: Any
) -> tuple[float, float, int]:
    """(time, spread, bytes) of one store of ``tokens`` bf16 tokens."""
    bound = checks.bound_for(preset, layout, d, heads, checks="off")
    store = checks.store_of(bound.layout, **options)
    size = tokens * heads * (2 * d * 2 + bound.layout.slot_bytes)
    blocks = -(-tokens // 16)
    calls: list[Callable[[], Any]] = []
    g = torch.Generator(DEVICE).manual_seed(0)
    for i in range(copies_for(size)):
        key, value = (torch.randn(tokens, heads, d, device=DEVICE, generator=g).bfloat16() for _ in range(2))
        cache = bound.allocate(blocks, DEVICE)
        slots = torch.randperm(blocks * 16, device=DEVICE, generator=g)[:tokens]
        if i == 0:
            want = bound.allocate(blocks, "cpu")
            bound.store(key.cpu(), value.cpu(), want, slots.cpu())
            store(key, value, cache.data, slots)
            assert checks.differences(cache, want, bound.layout) == {}
        calls.append(partial(store, key, value, cache.data, slots))
    return (*graph_time_us(calls), size)


def dequantize_row(
    preset: str, layout: str, tokens: int, heads: int, d: int, **options: Any
) -> tuple[float, float, int]:
    """(time, spread, bytes) of one sequence dequantised to bf16."""
    bound = checks.bound_for(preset, layout, d, heads, checks="off")
    run = checks.dequantize_of(bound.layout, **options)
    size = tokens * heads * (2 * d * 2 + bound.layout.slot_bytes)
    blocks = -(-tokens // 16)
    starts = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
    calls: list[Callable[[], Any]] = []
    for i in range(copies_for(size)):
        cache = bound.allocate(blocks, DEVICE)
        key = torch.randn(tokens, heads, d, device=DEVICE).bfloat16()
        checks.store_of(bound.layout)(key, key, cache.data, torch.arange(tokens, device=DEVICE))
        table = torch.randperm(blocks, device=DEVICE).int()[None]
        k, v = torch.empty_like(key), torch.empty_like(key)
        if i == 0:
            run(cache.data, table, starts, rows, k, v)
            want = bound.dequantize(cache, table, rows[1:], dtype=torch.bfloat16)
            assert torch.equal(v, want.value)
            assert float((k.float() - want.key.float()).norm() / want.key.float().norm()) < 3e-3
        calls.append(partial(run, cache.data, table, starts, rows, k, v))
    return (*graph_time_us(calls), size)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--dequantize", default="32768", help="tokens of one sequence, ...")
    parser.add_argument("--presets", default=",".join(checks.PRESETS))
    parser.add_argument("--layouts", default="soa,aos")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-sizes", default="128")
    parser.add_argument("--rows", default="", help="rows per program to try, default: the kernel's own")
    parser.add_argument("--warps", default="", help="warps to try, default: the kernel's own")
    args = parser.parse_args()
    ceiling = copy_ceiling()
    name = torch.cuda.get_device_properties(0).name
    print(
        f"{name}, torch {torch.__version__}, Triton {triton.__version__}; copy ceiling {ceiling / 1e12:.2f} TB/s"
    )
    print(
        "| kernel | preset | layout | D | tokens | us | of ceiling | tile |\n|---|---|---|---|---|---|---|---|"
    )
    tiles = [
        {k: int(v) for k, v in (("rows_per_program", r), ("num_warps", w)) if v}
        for r in args.rows.split(",")
        for w in args.warps.split(",")
    ]
    for kernel, run, counts in (
        ("store", store_row, args.tokens),
        ("dequantise", dequantize_row, args.dequantize),
    ):
        for d in map(int, args.head_sizes.split(",")):
            for preset in args.presets.split(","):
                for layout in args.layouts.split(","):
                    for tokens in map(int, filter(None, counts.split(","))):
                        for tile in tiles:
                            torch.cuda.empty_cache()
                            time, spread, size = run(preset, layout, tokens, args.heads, d, **tile)
                            percent = 100 * size / time * 1e6 / ceiling
                            cells = (
                                kernel, preset, layout, d, tokens, f"{time:.1f} +- {spread:.1f}",
                                f"{percent:.0f} %", "x".join(map(str, tile.values())) or "default",
                            )  # fmt: skip
                            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
