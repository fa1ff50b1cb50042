"""Queries that decode rotates itself, interpreted: they are what prepare writes, number for number."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.cases import TORCH_DTYPES, layer_spec
from tests.decode_checks import Case, Config, bound_layers, check_both_ways, check_queries_at
from turboquant_rocm import Decision, get_preset, make_layout
from turboquant_rocm.backends._triton.ops import DecodePlan
from turboquant_rocm.backends._triton.prepare import prepare_kernel
from turboquant_rocm.backends._triton.queries import read_alone, rotate_alone
from turboquant_rocm.target import get_target

WIDTHS = ({"key_width": 2, "token_runs": 2}, {"key_width": 4, "token_runs": 4})
"""Of operands, as one Triton and another wants them."""


@triton.jit
def alone_kernel(
    query_ptr, out_ptr, scale_ptr, token_stride, head_stride, tokens,
    HQ: tl.constexpr, N: tl.constexpr, KEY: tl.constexpr, PLANES: tl.constexpr, CODES: tl.constexpr,
    BASE: tl.constexpr, STRETCH: tl.constexpr, KWIDTH: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """The first N rows of [tokens, HQ, D], written as [N, parts, KP]."""
    row = tl.arange(0, N)
    live = row < tokens * HQ
    start = (row // HQ).to(tl.int64) * token_stride + (row % HQ) * head_stride
    read = read_alone(query_ptr, start, live, N, KEY, KWIDTH)
    made = rotate_alone(read, N, KEY, PLANES, CODES, BASE, STRETCH, KWIDTH, TARGET)
    n = tl.arange(0, N)
    tl.store(scale_ptr + n, made[0])
    SPAN: tl.constexpr = KEY[1] * KEY[2]
    UNITS: tl.constexpr = KEY[3]
    PARTS: tl.constexpr = 2 if PLANES > 0 else 1
    for u in tl.static_range(UNITS):
        at = out_ptr + n[None, :] * (PARTS * UNITS * SPAN) + u * SPAN + tl.arange(0, SPAN)[:, None]
        if PLANES > 0:
            tl.store(at, made[1 + u][0].to(tl.float32))
            tl.store(at + UNITS * SPAN, made[1 + u][1].to(tl.float32))
        else:
            tl.store(at, made[1 + u].to(tl.float32))


def _plan(preset, layout, head_size, dtype, tuning):
    places = make_layout(layout, preset, head_size, 2, 16)
    decision = Decision(
        layer_spec(head_size, 2, 2, dtype),
        get_target("sm_90"),
        get_preset(preset),
        16,
        f"triton_{layout}",
        layout,
    )
    return DecodePlan(decision, places, tuning=tuning)


def _both(plan, query, columns):
    """(numbers [N, parts, KP], scales [N]) of decode and of prepare."""
    tokens, heads, _ = query.shape
    parts, width = 2 if plan.planes else 1, plan.key.columns
    alone, scale = torch.full((columns, parts, width), 1e9), torch.full((columns,), 1e9)
    constants = plan.prepare_constants()
    assert plan.rotates
    alone_kernel[(1,)](
        query, alone, scale, query.stride(0), query.stride(1), tokens, heads, columns, plan.key.constants,
        plan.planes, constants["CODES"], constants["BASE"], constants["STRETCH"], constants["KWIDTH"], plan.kind,
    )  # fmt: skip
    rows = tokens * heads
    written = torch.full((rows, parts, width), 99, dtype=torch.int8 if plan.planes else torch.float16)
    wanted = torch.full((rows,), 99.0)
    none = torch.zeros(1, dtype=torch.int32)
    prepare_kernel[(triton.cdiv(rows, 16),)](
        query, torch.from_numpy(plan.matrix).half(), written.view(torch.float16), wanted, none, none, rows,
        query.stride(0), query.stride(1), 0, 0, 0, 0, **constants,
    )  # fmt: skip
    return (alone[:rows], scale[:rows]), (written.float(), wanted)


CASES = [
    (preset, layout, head_size, dtype)
    for preset in ("k8v4", "4bit_nc", "3bit_nc")
    for layout in ("soa", "aos")
    for head_size in (64, 128, 256)
    for dtype in ("bf16", "fp16")
]


@pytest.mark.parametrize("tuning", WIDTHS, ids=("narrow", "wide"))
@pytest.mark.parametrize(("preset", "layout", "head_size", "dtype"), CASES)
def test_as_prepare_writes_them(preset, layout, head_size, dtype, tuning):
    """Columns in the same order, and the same numbers, but for the order in which the products were added up."""
    plan = _plan(preset, layout, head_size, dtype, tuning)
    g = torch.Generator().manual_seed(head_size)
    query = torch.randn(3, 4, head_size, generator=g)
    query[0, 0] = 0
    query[0, 1] *= 1e-4
    query[0, 2] *= 3000
    query[0, 3] = 0
    query[0, 3, 5] = 1.0
    (alone, scale), (written, wanted) = _both(plan, query.to(TORCH_DTYPES[dtype]), 16)
    assert torch.allclose(scale, wanted, rtol=1e-6, atol=0)
    assert bool((alone != 1e9).all()), "not written"
    far = (alone - written).abs()
    if plan.planes:
        assert float(far.max()) <= 1 and float((far > 0).float().mean()) < 2e-3, "a number lies between two"
    else:
        assert float(far.max()) <= 2.0**-10 * float(written.abs().max())
    for row in range(1, 12):
        assert bool((alone[row] == written[row]).float().mean() > 0.99)
    assert not alone[0].any() and float(alone[1:].abs().amax((1, 2)).min()) > 100


@pytest.mark.parametrize("preset", ["k8v4", "4bit_nc"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_query_without_a_size(preset, number):
    """It spoils its own row and no other."""
    plan = _plan(preset, "soa", 64, "bf16", None)
    query = torch.ones(2, 4, 64, dtype=torch.bfloat16)
    query[0, 1, 7] = number
    (alone, scale), _ = _both(plan, query, 8)
    if plan.planes:
        assert scale.isnan().tolist() == [False, True, *[False] * 6]
    else:
        assert not alone[1].isfinite().all()
    others = [0, *range(2, 8)]
    assert bool(scale[others].isfinite().all() and alone[others].isfinite().all())
    assert bool((alone[others] == alone[0]).all())


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("shift", [0, 1, 4])
def test_queries_at_any_address(shift, cut, device):
    check_queries_at(shift, cut, device)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("preset", ["k8v4", "4bit_nc", "3bit_nc"])
def test_with_prepare_and_without(preset, cut, device):
    case = Case((50, 0, 33), (2, 2, 2) if cut else (2, 0, 1), splits=2, cut=cut)
    check_both_ways(Config(preset, group=2, most_queries=2, sinks=True), case, device)


def test_bound_layers_work_alone():
    """The interpreted cases of the other files are of this kind, unless their head sizes or targets are others."""
    bound, _ = bound_layers(Config(), Case((5,)), None)
    assert bound.ops.plan.alone_for(8, False, 1, 0)
