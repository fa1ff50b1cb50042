"""Compiles store and dequantise for a GPU that need not be here, and prints what came out as JSON lines.

    python -m tests.l1_compile.compile_store gfx942 [--few | --all]

A process of its own, since kernels that were imported under the interpreter cannot be compiled.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import triton
from triton.compiler import ASTSource

from tests.compile_checks import gpu_target, nvidia_usage
from turboquant_rocm.backends._triton import dequantize, store
from turboquant_rocm.layouts import Layout, make_layout

PRESETS = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")
HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
SOME = (
    *((preset, "soa", 128) for preset in PRESETS),
    ("4bit_nc", "aos", 128),
    ("3bit_nc", "aos", 64),
    ("4bit_nc", "soa", 96),
    ("4bit_nc", "soa", 256),
)
FEW = (("4bit_nc", "soa", 128), ("k8v4", "aos", 128))
KNOBS = ("use_block_pingpong", "use_async_copy")
HEADS = 8


def specialisations(options: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    if "--all" in options:
        yield from product(PRESETS, ("soa", "aos"), HEAD_SIZES)
    else:
        yield from FEW if "--few" in options else SOME


def compile_kernel(kernel: Any, constants: dict[str, Any], pointers: dict[str, str], arch: str) -> Any:
    """The compiled kernel, with pointers and contiguous strides aligned to 16 as in a server."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if n in pointers or (n.endswith("stride") and n not in constants)
    }
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(
        source, target=gpu_target(arch), options={"num_warps": 1, "enable_fp_fusion": False}
    )


def jobs(layout: Layout, arch: str) -> Iterator[tuple[str, Any]]:
    vendor = "amd" if arch.startswith("gfx") else "nvidia"
    rows = store.tile_rows(layout, vendor)
    raw = {"key_ptr": "*bf16", "value_ptr": "*bf16", "cache_ptr": "*u8"}
    constants = {
        **store.store_constexprs(layout),
        "TARGET": store.store_target(vendor),
        "COUNT": True,
        "slot_stride": 1,
    }
    pointers = {**raw, "slot_ptr": "*i64", "nonfinite_ptr": "*i32"}
    for tile in sorted({rows, store.tile_rows(layout, vendor, few=True)}, reverse=True):
        name = "store" if tile == rows else "store-few"
        yield name, compile_kernel(store._store_kernel, {**constants, "R": tile}, pointers, arch)
    constants = {**dequantize.dequantize_constexprs(layout), "R": rows}
    pointers = {**raw, "table_ptr": "*i32", "start_ptr": "*i32", "cu_ptr": "*i32"}
    yield "dequantise", compile_kernel(dequantize._dequantize_kernel, constants, pointers, arch)


def resources(compiled: Any, arch: str) -> dict[str, Any]:
    """Registers, spills, scratch and shared memory, and how wide the accesses to global memory are."""
    if arch.startswith("gfx"):
        text = compiled.asm["amdgcn"]

        def number(name: str) -> int:
            return int(re.search(rf"\.{name}:\s*(\d+)", text)[1])  # type: ignore[index]

        found = {
            "registers": number("vgpr_count"),
            "scalar_registers": number("sgpr_count"),
            "spills": number("vgpr_spill_count") + number("sgpr_spill_count"),
            "scratch": number("private_segment_fixed_size"),
        }
        wide = {
            kind: len(re.findall(rf"(?:global|buffer)_{kind}_(?:dword|b(?:32|64|96|128))", text))
            for kind in ("load", "store")
        }
    else:
        text = compiled.asm["sass"]
        registers, stack = nvidia_usage(compiled)
        found = {
            "registers": registers,
            "spills": len(re.findall(r"\b(?:STL|LDL)\b", text)),
            "scratch": stack,
        }
        wide = {
            "load": len(re.findall(r"\bLDG\.E(?!\.(?:U|S)?(?:8|16))", text)),
            "store": len(re.findall(r"\bSTG\.E(?!\.(?:U|S)?(?:8|16))", text)),
        }
    return {
        **found,
        "lds": compiled.metadata.shared,
        "wide_loads": wide["load"],
        "wide_stores": wide["store"],
    }


def main(arch: str, options: Sequence[str]) -> None:
    amd = arch.startswith("gfx")
    for knobs in ({}, dict.fromkeys(KNOBS, True)) if amd else ({},):
        for name, on in knobs.items():
            setattr(triton.knobs.amd, name, on)
        for preset, layout_name, head_size in specialisations(options):
            layout = make_layout(layout_name, preset, head_size, HEADS, 16)
            for kernel, compiled in jobs(layout, arch):
                row = {
                    "kernel": kernel,
                    "preset": preset,
                    "layout": layout_name,
                    "head_size": head_size,
                    "arch": arch,
                    "knobs": "+".join(knobs) or "off",
                    "granule": store.granule(layout, "key_data"),
                    **resources(compiled, arch),
                }
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
