"""The project's kernels on a small fixed workload, through the project's own launchers, with counters.

One workload is (architecture, layout, preset, head size): two sequences are stored, decoded and (where the backend has
it) dequantised on the simulated GPU. It is small enough to run in seconds and large enough that the inner loop of every
kernel runs several times; instruction counts are exact and repeatable, so they can be held to a budget.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .counters import Counters
from .launcher import Launch, simulated_launches

PRESETS = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
HEAD_SIZES = (64, 128, 256)
LAYOUTS = ("soa", "aos")
ARCHS = ("gfx942", "gfx950")
SEQ_LENS = (160, 33)
NUM_KV_HEADS, GQA, BLOCK_SIZE, SPLITS = 2, 8, 16, 2


@dataclass(frozen=True)
class Workload:
    """What is run."""

    arch: str
    layout: str
    preset: str
    head_size: int

    @property
    def key(self) -> str:
        """Name in the budget file."""
        return f"{self.layout}/{self.preset}/{self.head_size}"


@dataclass
class Measured:
    """Counters of each kernel of a workload, and how many elements were dequantised by it."""

    workload: Workload
    kernels: dict[str, Counters]
    elements: dict[str, int]
    bytes_per_element: float
    seconds: dict[str, float] = field(default_factory=dict)


def measure(w: Workload, parts: Iterable[str] = ("store", "decode"), check: str = "all") -> Measured:
    """Run the workload and collect counters by kernel name."""
    import torch

    from turboquant_rocm import Decision, Dtype, LayerSpec, Target, bind, get_preset

    g = torch.Generator().manual_seed(7)
    hk, d = NUM_KV_HEADS, w.head_size
    layer = LayerSpec(0, hk * GQA, hk, d, dtype=Dtype.BF16)
    decision = Decision(
        layer, Target("amd", w.arch), get_preset(w.preset), BLOCK_SIZE, f"triton_{w.layout}", w.layout
    )
    tokens = sum(SEQ_LENS)
    blocks = [(n + BLOCK_SIZE - 1) // BLOCK_SIZE for n in SEQ_LENS]
    table = torch.full((len(SEQ_LENS), max(blocks)), -1, dtype=torch.int32)
    order = torch.randperm(sum(blocks) + 2, generator=g).int()
    slots, used = [], 0
    for i, (n, b) in enumerate(zip(SEQ_LENS, blocks, strict=True)):
        table[i, :b] = order[used : used + b]
        p = torch.arange(n)
        slots.append(order[used : used + b].long()[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE)
        used += b
    k, v = (torch.randn(tokens, hk, d, generator=g).bfloat16() for _ in range(2))
    q = torch.randn(len(SEQ_LENS), hk * GQA, d, generator=g).bfloat16()
    lens = torch.tensor(SEQ_LENS, dtype=torch.int32)
    parts = set(parts)
    log: list[Launch] = []
    with simulated_launches(w.arch, check=check) as launches:
        layer_ops = bind(decision, splits=SPLITS)
        cache = layer_ops.allocate(sum(blocks) + 2, "cpu")
        layer_ops.store(k, v, cache, torch.cat(slots))
        if "decode" in parts:
            layer_ops.decode(q, cache, table, lens)
        if "dequantize" in parts:
            layer_ops.dequantize(cache, table, lens)
        log = list(launches)
    kernels: dict[str, Counters] = {}
    seconds: dict[str, float] = {}
    for launch in log:
        name = launch.name.strip("_")
        if name in kernels:
            kernels[name] = add(kernels[name], launch.counters)
        else:
            kernels[name] = launch.counters
        seconds[name] = seconds.get(name, 0.0) + launch.result.seconds
    elements = dict.fromkeys(kernels, tokens * hk * 2 * d)
    return Measured(w, kernels, elements, layer_ops.layout.slot_bytes / (2 * d), seconds)


def add(a: Counters, b: Counters) -> Counters:
    """Sum of two counters."""
    return Counters(
        a.instructions + b.instructions, a.mnemonics + b.mnemonics, a.bytes + b.bytes,
        a.bank_conflict_cycles + b.bank_conflict_cycles, a.waves + b.waves, a.workgroups + b.workgroups,
    )  # fmt: skip


def selected(
    archs: Iterable[str], layouts: Iterable[str], presets: Iterable[str], sizes: Iterable[int]
) -> list[Workload]:
    """All combinations."""
    return [Workload(a, y, p, d) for a in archs for y in layouts for p in presets for d in sizes]


_ = Any
