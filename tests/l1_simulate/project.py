"""The project's kernels on the simulated GPU: one small problem per (arch, layout, preset, head size)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ci.cdna_sim.launcher import Launch, Mutate, simulated_launches
from tests import decode_checks, store_checks
from tests.cases import gaussian, layer_spec, reference, rel_l2, shuffled_tables
from turboquant_rocm import BoundLayer, Decision, PagedCache, Target, bind, get_preset

PRESETS = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
LAYOUTS = ("soa", "aos")
FILL = 0xCD


@dataclass
class Problem:
    """Inputs, and what the reference makes of them."""

    bound: BoundLayer
    key: torch.Tensor
    value: torch.Tensor
    query: torch.Tensor
    slots: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor
    cache: PagedCache
    oracle: Any
    sinks: torch.Tensor | None
    keys: torch.Tensor
    values: torch.Tensor
    queries: int

    def empty_cache(self) -> PagedCache:
        return self.bound.allocate(self.cache.num_blocks, "cpu", fill=FILL)


@cache
def problem(arch: str, layout: str, preset: str, head_size: int, splits: int = 2, hostile: bool = False,
            growing: bool = False, lens: tuple[int, ...] = (37, 5, 64), cut: bool = False,
            queries: int = 1, **more: Any) -> Problem:  # fmt: skip
    """A batch of three sequences of ``queries`` query tokens each; hostile: keys and values of every unpleasant kind
    (store only); growing: the scale of the values grows from token to token, 64 times in all; cut: into pieces by the
    lengths."""
    g = torch.Generator().manual_seed(11)
    sinks = torch.randn(8, generator=g) if more.get("sinks") else None
    layer = layer_spec(head_size, 2, 4, "bf16", **more)
    decision = Decision(layer, Target("amd", arch), get_preset(preset), 16, f"triton_{layout}", layout)
    bound = bind(decision, splits=splits, cut=cut)
    exact = reference(layer, preset, layout, 16, torch.float64)
    plain = reference(layer, preset, layout, 16)
    table, slots, blocks = shuffled_tables(list(lens), 16, g)
    n = sum(lens)
    if hostile:
        key, value = (store_checks.mixed(n, 2, head_size, g, torch.bfloat16) for _ in range(2))
    else:
        key, value = (gaussian((n, 2, head_size), g, torch.bfloat16) for _ in range(2))
    if growing:
        value = (value * torch.logspace(-3, 3, n, base=2.0)[:, None, None]).to(value.dtype)
    if not hostile:  # a tiny spread must stay one
        value = value + 0.5  # so that a lost zero point shows
    query = gaussian((3 * queries, 8, head_size), g, torch.bfloat16)
    cache_ = plain.allocate(blocks, "cpu", fill=FILL)
    index = torch.cat(slots)
    index[7] = -1  # padding: this token is not written ...
    plain.store(key, value, cache_, index)
    index2 = torch.cat(slots)[7:8]
    plain.store(key[7:8] * 0.5, value[7:8], cache_, index2)  # ... but its slot holds something
    seq = torch.tensor(lens, dtype=torch.int32)
    deq = exact.dequantize(cache_, table, seq, dtype=torch.float64)
    return Problem(
        bound, key, value, query, index, table, seq, cache_, exact.ops, sinks, deq[0], deq[1], queries
    )


def store_differences(
    p: Problem, arch: str, mutate: Mutate | None = None, store: Any = None
) -> dict[str, int]:
    """Bytes that differ from the reference after a simulated store, by field."""
    got = p.empty_cache()
    want = p.empty_cache()
    layer = reference(p.bound.decision.layer, p.bound.layout.preset.name, p.bound.layout.name, 16)
    layer.store(p.key, p.value, want, p.slots)
    with simulated_launches(arch, mutate=mutate):
        if store is None:
            p.bound.store(p.key, p.value, got, p.slots)
        else:
            store(p.key, p.value, got.data, p.slots)
    return store_checks.differences(got, want, p.bound.layout)


def decode_fault(p: Problem, arch: str, mutate: Mutate | None = None) -> tuple[str, list[Launch]]:
    """(what the check of decode on real devices says of a simulated one, "" if nothing; launches)."""
    layer = p.bound.layer
    config = decode_checks.Config(
        p.bound.layout.preset.name, p.bound.layout.name, layer.head_size, layer.num_kv_heads, layer.gqa_ratio,
        soft_cap=layer.soft_cap, most_queries=p.queries,
    )  # fmt: skip
    counts = None if p.queries == 1 else (p.queries,) * len(p.lens)
    starts = None if counts is None else torch.arange(len(p.lens) + 1, dtype=torch.int32) * p.queries
    case = decode_checks.Case(tuple(p.lens.tolist()), counts)
    setup = decode_checks.Setup(p.bound, p.oracle, p.cache, p.table, p.lens, p.query, starts, p.sinks)
    with simulated_launches(arch, mutate=mutate) as log:
        out, lse = decode_checks.decode(setup, case)
    try:
        decode_checks.compare(setup, config, case, out, lse)
    except AssertionError as error:
        return str(error) or "rows that see no key", log
    return "", log


def dequantize_error(p: Problem, arch: str, mutate: Mutate | None = None) -> float:
    """Worst relative error of keys and values of a simulated dequantise."""
    with simulated_launches(arch, mutate=mutate):
        got = p.bound.dequantize(p.cache, p.table, p.lens, dtype=torch.float32)
    return max(rel_l2(got[0], p.keys), rel_l2(got[1], p.values))
