"""The reference against the golden vectors: cache bytes exactly, outputs within the documented tolerances."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.cases import layer_spec, reference
from tests.golden_data import FILL, NUM_KV_HEADS, GoldenCase, cases
from turboquant_rocm.layouts import make_layout
from turboquant_rocm.layouts.convert import canonicalize
from turboquant_rocm.layouts.views import allocate, field_view

CASES = list(cases())


def test_every_file_is_read():
    # 4 presets x {D64, D128} x {bf16: 2 layouts x 2 block sizes, fp16: D128 only, 1 block size} + D96 of k8v4
    assert len(CASES) == 4 * (4 + 4 + 2) + 4 + 2
    assert {c.head_size for c in CASES} == {64, 96, 128}


def stored(case: GoldenCase, math_dtype: torch.dtype = torch.float32):
    layer = layer_spec(case.head_size, NUM_KV_HEADS, 16, case.dtype)
    bound = reference(layer, case.preset, case.layout, case.block_size, math_dtype)
    cache = bound.allocate(case.cache.shape[0], "cpu", fill=FILL)
    bound.store(case.tensor("key"), case.tensor("value"), cache, case.slots)
    return bound, cache


@pytest.mark.parametrize("math_dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cache_bytes(case: GoldenCase, math_dtype: torch.dtype):
    bound, cache = stored(case, math_dtype)
    layout = bound.layout
    golden = allocate(layout, case.cache.shape[0], "cpu")
    golden.copy_(torch.from_numpy(case.cache.copy()))
    canonicalize(golden, layout)  # -0 keys and infinite norms, which this project writes otherwise

    kept = case.slots >= 0
    slots = case.slots[kept].long()
    block, offset = slots // case.block_size, slots % case.block_size
    preset = bound.decision.preset
    compared = 0
    for name, _ in layout.places:
        got, want = field_view(cache.data, layout, name), field_view(golden, layout, name)
        if name.startswith("key") and preset.fp8_keys:
            robust = torch.ones(int(kept.sum()), NUM_KV_HEADS, dtype=torch.bool)
        else:
            bits = preset.key_bits if name.startswith("key") else preset.value_bits
            mask = case.inputs[f"robust_{name[0]}{bits}"]
            robust = torch.from_numpy(mask.copy())[kept]
        assert torch.equal(got[block, offset][robust], want[block, offset][robust]), name
        compared += int(robust.sum())
        untouched = torch.ones(got.shape[:2], dtype=torch.bool)
        untouched[block, offset] = False
        assert (got[untouched] == FILL).all(), f"{name}: a slot that was not stored has changed"
    assert compared > 0.8 * len(layout.places) * len(slots) * NUM_KV_HEADS


def test_masks_leave_only_ties():
    """Where a mask says "not robust" the decoded value is as good as the published one, if not the same byte."""
    case = GoldenCase("turboquant_4bit_nc", 128, "bf16", "aos", 16)
    bound, cache = stored(case)
    golden = bound.wrap(torch.from_numpy(case.cache.copy()))
    ours = bound.dequantize(cache, case.block_table, case.seq_lens, dtype=torch.float32)
    theirs = bound.dequantize(golden, case.block_table, case.seq_lens, dtype=torch.float32)
    assert torch.allclose(ours.value, theirs.value, rtol=2e-3, atol=1e-3)
    assert (ours.key - theirs.key).norm() < 0.05 * theirs.key.norm()


def outputs() -> list[tuple[GoldenCase, str]]:
    found = []
    for case in CASES:
        names = ["out_aos"] if case.layout == "aos" else ["out_soa_v1", "out_soa_uni", "out_soa_uni_sinks"]
        found += [(case, name) for name in names if name in case.outputs]
    return found


@pytest.mark.parametrize("groups", [1, 4, 6, 8, 16])
@pytest.mark.parametrize(("case", "name"), outputs(), ids=lambda x: str(x))
def test_outputs(case: GoldenCase, name: str, groups: int):
    stored_heads = case.outputs["query_heads"]
    per_kv = len(stored_heads) // NUM_KV_HEADS
    if groups > per_kv:
        assert per_kv == 8, "files hold 8 or 16 heads of each KV head"
        groups = per_kv
    position = np.concatenate([np.arange(groups) + per_kv * h for h in range(NUM_KV_HEADS)])
    heads = torch.from_numpy(stored_heads[position].copy()).long()
    want = torch.from_numpy(case.outputs[name][:, position].copy())
    with_sinks = name.endswith("sinks")
    layer = layer_spec(case.head_size, NUM_KV_HEADS, groups, case.dtype, sinks=with_sinks)
    bound = reference(layer, case.preset, case.layout, case.block_size)
    data = allocate(bound.layout, case.cache.shape[0], "cpu")
    data.copy_(torch.from_numpy(case.cache.copy()))
    got = bound.decode(
        case.tensor("query")[:, heads],
        bound.wrap(data),
        case.block_table,
        case.seq_lens,
        sinks=torch.from_numpy(case.inputs["sinks"].copy())[heads] if with_sinks else None,
        out=torch.empty(want.shape, dtype=torch.float32),
    )
    error = (got - want).abs().max()
    if "uni" in name:
        limit = {"bf16": 2e-2, "fp16": 1e-3}[case.dtype] * want.abs().max()
    else:
        limit = 1e-4
    assert error <= limit, f"{error:.2e} > {limit:.2e}"
    if with_sinks:
        plain = torch.from_numpy(case.outputs["out_soa_uni"][:, position].copy())
        assert (got - want).norm() < 0.6 * (got - plain).norm(), "sinks must make a difference"


def test_layout_tag_of_golden_shapes():
    for case in CASES:
        layout = make_layout(case.layout, case.preset, case.head_size, NUM_KV_HEADS, case.block_size)
        assert case.cache.shape[1:] == layout.shape
