"""Compiles decode kernels for GPUs that are not there, and reads what came out: registers, spills, LDS, loads."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tests.cases import layer_spec
from turboquant_rocm import Decision, get_preset, make_layout
from turboquant_rocm.backends._triton.ops import ARGUMENTS, JOINED, PARTIAL, DecodePlan
from turboquant_rocm.backends._triton.prepare import prepare_kernel
from turboquant_rocm.backends._triton.reduce import reduce_kernel
from turboquant_rocm.target import get_target

ARCHES = ("gfx942", "gfx950", "sm_80", "sm_90")
"""Those that tiles are chosen for (configs/tuned): no kernel may spill there."""
_TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.uint8: "*u8", torch.int32: "*i32",
}  # fmt: skip
_ALIGNED = ("query_scale_ptr", "part_ptr", "part_lse_ptr", "matrix_ptr")
"""Pointers to memory of our own; and queries as decode reads them, which it asks for aligned or has prepared."""
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg", "launch_pdl")


@dataclass(frozen=True)
class Spec:
    """One specialisation of a kernel."""

    kernel: str = "decode"
    preset: str = "4bit_nc"
    layout: str = "soa"
    head_size: int = 128
    group: int = 8
    queries: int = 1
    block_size: int = 16
    direct: bool = False
    padding: int = 0
    splits: int = 8
    cut: bool = False
    batch: int = 1  # of sequences: what decode does itself
    prepared: bool = False  # queries are not aligned, so prepare reads them
    rows: int = 16  # of a program of prepare
    narrow: bool = False  # 16 columns at a time where 32 would do
    features: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        more = "".join(f"-{n}" for n, _ in self.features)
        more += f"-pad{self.padding}" if self.padding else ""
        more += f"-s{self.splits}" if self.splits != 8 else ""
        more += "-cut" if self.cut else ""
        more += f"-b{self.batch}" if self.batch > 1 else ""
        more += "-prepared" if self.prepared else ""
        more += f"-r{self.rows}" if self.rows != 16 else ""
        more += "-narrow" if self.narrow else ""
        return (
            f"{self.kernel}-{self.preset}-{self.layout}-D{self.head_size}-g{self.group}-q{self.queries}"
            f"-bs{self.block_size}{'-direct' if self.direct else ''}{more}"
        )


@dataclass(frozen=True)
class Built:
    """registers: of a lane. spills: registers, or bytes of stack on NVIDIA. scratch, lds: bytes."""

    registers: int
    spills: int
    scratch: int
    lds: int
    loads: tuple[str, ...]
    matrix: int

    @property
    def numbers(self) -> dict[str, int]:
        """What may not rise, for the result file."""
        return {"registers": self.registers, "spills": self.spills, "scratch": self.scratch, "lds": self.lds}


def gpu_target(arch: str) -> GPUTarget:
    """Triton's name of an architecture of configs/targets.yaml."""
    target = get_target(arch)
    if target.vendor == "amd":
        return GPUTarget("hip", arch, target.wave_size)
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), target.wave_size)


def specs(full: bool) -> Iterator[Spec]:
    """What is compiled: a few of every kind, or with ``full`` the product of presets, layouts, sizes and columns."""
    yield Spec("prepare")
    yield Spec("reduce", queries=4, features=(("sinks", True),))
    yield Spec("prepare", cut=True, features=(("window", 1024),))
    yield Spec("prepare", cut=True, rows=64)
    yield Spec("reduce", cut=True)
    yield Spec("reduce", queries=4, cut=True)
    yield Spec(cut=True)
    yield Spec(queries=4, cut=True, features=(("window", 1024),))
    yield Spec(preset="k8v4", layout="aos", cut=True, features=(("window", 1024),))
    yield Spec("reduce", cut=True, batch=64)
    for batch in (64, 65):
        yield Spec(cut=True, batch=batch)
    yield Spec(prepared=True)
    for layout in ("soa", "aos"):
        for preset in ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc"):
            yield Spec(preset=preset, layout=layout)
    yield Spec(head_size=64, direct=True, group=1)
    yield Spec(head_size=256)
    yield Spec(
        queries=4, block_size=528, direct=True,
        features=(("window", 1024), ("sinks", True), ("soft_cap", 30.0)),
    )  # fmt: skip
    yield Spec(layout="aos", padding=26, preset="4bit_nc")
    for narrow in (False, True):
        yield Spec(queries=4, narrow=narrow)
    if not full:
        return
    for features in (), (("window", 1024),), (("sinks", True), ("soft_cap", 30.0)):
        for direct, cut in ((False, False), (True, False), (False, True)):
            for group, queries, block_size in ((8, 4, 16), (5, 7, 48), (32, 1, 528)):
                yield Spec(
                    "decode",
                    "4bit_nc",
                    "soa",
                    128,
                    group,
                    queries,
                    block_size,
                    direct,
                    cut=cut,
                    features=features,
                )
    for head_size in (64, 80, 96, 112, 128, 192, 256):
        yield Spec("prepare", head_size=head_size)
        for rows in (16, 32 if head_size > 128 else 64):
            yield Spec("prepare", head_size=head_size, cut=True, rows=rows)
        for queries in (1, 4):
            yield Spec("reduce", head_size=head_size, queries=queries, cut=True)
        for splits in (8, 32, 64, 256):
            yield Spec("reduce", head_size=head_size, splits=splits)
        for layout in ("soa", "aos"):
            for preset in ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc"):
                for group, queries in ((8, 1), (16, 1), (8, 4)):
                    for direct in (False, True):
                        yield Spec("decode", preset, layout, head_size, group, queries, direct=direct)
                    yield Spec("decode", preset, layout, head_size, group, queries, cut=True)
                if head_size in (64, 128, 256):  # elsewhere these are the same kernels
                    yield Spec("decode", preset, layout, head_size, cut=True, batch=64)
                    for cut in (False, True):
                        yield Spec("decode", preset, layout, head_size, cut=cut, prepared=True)


def build(arch: str, spec: Spec) -> Built:
    """What compiling ``spec`` for ``arch`` makes."""
    made = compiled(arch, spec)
    return read_amd(made) if get_target(arch).vendor == "amd" else read_nvidia(made)


def compiled(arch: str, spec: Spec) -> Any:
    """``spec`` compiled for ``arch`` with the tile choices of configs/tuned."""
    features = dict(spec.features)
    layer = layer_spec(spec.head_size, 8, spec.group, "bf16", **features)
    target = get_target(arch)
    backend = f"triton_{spec.layout}"
    decision = Decision(layer, target, get_preset(spec.preset), spec.block_size, backend, spec.layout)
    layout = make_layout(spec.layout, spec.preset, spec.head_size, 8, spec.block_size)
    if spec.padding:
        layout = make_layout(
            spec.layout,
            spec.preset,
            spec.head_size,
            8,
            spec.block_size,
            slot_stride=layout.slot_bytes + spec.padding,
        )
    tuning = {"wide_from": 0} if spec.narrow else {}
    plan = DecodePlan(decision, layout, kind="hip" if target.vendor == "amd" else "cuda", tuning=tuning)
    multi, columns = spec.queries > 1, plan.columns(spec.queries)
    alone = 0 if spec.prepared else plan.alone_for(columns, multi, spec.batch, spec.cut)
    types: dict[str, torch.dtype] = {}
    if spec.kernel == "prepare":
        constants = plan.prepare_constants(spec.rows, spec.cut, cut=spec.cut, columns=plan.columns(1))
        kernel, types = prepare_kernel, {"query_ptr": torch.bfloat16}
    elif spec.kernel == "reduce":
        kernel, constants, types = (
            reduce_kernel,
            plan.reduce_constants(multi, True, spec.splits, spec.cut, alone, columns),
            {**JOINED, "out_ptr": torch.bfloat16},
        )
    else:
        kernel = plan.decode_kernel(columns)
        constants = plan.decode_constants(columns, multi, spec.direct, spec.direct, cut=spec.cut, alone=alone)
        types = {"out_ptr": torch.bfloat16} if spec.direct else dict(PARTIAL)
        if alone:
            types["query_ptr"] = torch.bfloat16
    return compile_for(arch, kernel, constants, types)


def compile_for(
    arch: str, kernel: Any, constants: Mapping[str, Any], types: Mapping[str, torch.dtype]
) -> Any:
    constants = dict(constants)
    options = {name: constants.pop(name) for name in _OPTIONS if name in constants}
    signature, divisible = {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        stand_in = types.get(name, ARGUMENTS[name])
        if isinstance(stand_in, torch.dtype):
            signature[name] = _TYPES[stand_in]
            if name in _ALIGNED or (name == "query_ptr" and kernel is not prepare_kernel):
                divisible[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(stand_in, float) else "i32"
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, values, divisible)
    return triton.compile(source, target=gpu_target(arch), options=options)


def read_amd(compiled: Any) -> Built:
    text = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        assert found, f"no {name} in the code object's metadata"
        return int(found[1])

    loads = re.findall(r"^\s+((?:global|buffer|flat)_load_[a-z0-9_]+)", text, re.M)
    return Built(
        number("vgpr_count"),
        number("vgpr_spill_count") + number("sgpr_spill_count"),
        number("private_segment_fixed_size"),
        compiled.metadata.shared,
        tuple(sorted(set(loads))),
        len(re.findall(r"^\s+v_(?:mfma|wmma)", text, re.M)),
    )


def nvidia_tool(name: str) -> Path:
    """A program of NVIDIA's that Triton brings along."""
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def run_on_cubin(name: str, option: str, compiled: Any) -> subprocess.CompletedProcess[str]:
    """What such a program says about a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run(
            [nvidia_tool(name), option, file.name], capture_output=True, text=True, check=False
        )


def nvidia_usage(compiled: Any) -> tuple[int, int]:
    """(registers of a thread, bytes of its stack), from the cubin."""
    text = run_on_cubin("cuobjdump", "-res-usage", compiled)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text.stdout + text.stderr)
    assert usage, text.stdout + text.stderr
    return int(usage[1]), int(usage[2])


def read_nvidia(compiled: Any) -> Built:
    registers, stack = nvidia_usage(compiled)
    ptx = compiled.asm["ptx"]
    loads = re.findall(r"ld\.global(?:\.[a-z0-9:_]+)*?((?:\.v\d)?\.[bsu]\d+)", ptx)
    return Built(
        registers, stack, stack, compiled.metadata.shared, tuple(sorted(set(loads))),
        len(re.findall(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", ptx)),
    )  # fmt: skip


def problems(arch: str, spec: Spec, built: Built) -> list[str]:
    """What is wrong with a kernel; empty if nothing is."""
    found = []
    if built.spills or built.scratch:
        found.append(f"spills {built.spills}, scratch {built.scratch} bytes")
    limit = get_target(arch).lds_bytes
    if built.lds > limit:
        found.append(f"LDS {built.lds} > {limit}")
    if spec.kernel != "reduce" and not built.matrix:
        found.append("no matrix instruction")
    if spec.kernel == "decode":
        narrow = [n for n in built.loads if "byte" in n or n.endswith(("b8", "u8", "s8", "i8"))]
        if narrow:
            found.append(f"byte loads: {narrow}")
        if not any(re.search("dword|32|64|128", n) for n in built.loads):
            found.append(f"no load of words: {built.loads}")
    return found
