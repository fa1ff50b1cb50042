"""Keys as int8 numbers, interpreted: what becomes of queries, and how far scores are from exact ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton

from tests.cases import layer_spec
from tests.decode_checks import HEAD_SIZES, Case, Config, check, decode, set_up
from turboquant_rocm import Decision, get_preset, make_layout
from turboquant_rocm.backends._triton.ops import DecodePlan
from turboquant_rocm.backends._triton.prepare import prepare_kernel
from turboquant_rocm.backends._triton.tile import byte_table
from turboquant_rocm.codebook import cell_probabilities, lloyd_max, rotation
from turboquant_rocm.target import get_target

WIDTHS = ({"key_width": 2, "token_runs": 2}, {"key_width": 4, "token_runs": 4})
"""Of operands, as one Triton and another wants them."""


def _plan(preset, head_size, dtype, tuning):
    layout = make_layout("soa", preset, head_size, 2, 16)
    decision = Decision(
        layer_spec(head_size, 2, 2, dtype), get_target("sm_90"), get_preset(preset), 16, "triton_soa", "soa"
    )
    return DecodePlan(decision, layout, tuning=tuning)


def _prepared(plan, query):
    """(upper, lower) [rows, columns] fp64, both in the order of the rows of the plan's matrix, and scales [rows]."""
    rows, columns = len(query), plan.key.columns
    matrix = torch.from_numpy(plan.matrix).half()
    found = torch.full((rows, 2, columns), 99, dtype=torch.int8)
    scale = torch.full((rows,), 99.0)
    none = torch.zeros(1, dtype=torch.int32)
    prepare_kernel[(triton.cdiv(rows, 16),)](
        query.view(rows // 4, 4, -1), matrix, found.view(torch.float16), scale, none, none, rows, 4 * query.shape[1],
        query.shape[1], 0, 0, 0, 0, **plan.prepare_constants(),
    )  # fmt: skip
    upper, lower = found[:, 0].double(), found[:, 1].double()
    if plan.planes == 1 and plan.layout.preset.key_bits == 4:
        width = plan.constants["KWIDTH"]
        put_back = torch.empty_like(lower)
        for column in range(columns):
            unit, place = divmod(column, 32)
            outer, lane, inner = place // (4 * width), place // width % 4, place % width
            position = outer * width + inner
            code = position % 4 * 2 + position // 4
            outer, inner = divmod(code, width)
            put_back[:, unit * 32 + outer * 4 * width + lane * width + inner] = lower[:, column]
        lower = put_back
    return upper, lower, scale.double()


PLANS = [("4bit_nc", "bf16", 1), ("4bit_nc", "fp16", 2), ("3bit_nc", "bf16", 1), ("3bit_nc", "fp16", 2)]


@pytest.mark.parametrize("tuning", WIDTHS, ids=("narrow", "wide"))
@pytest.mark.parametrize("head_size", [64, 80, 128])
@pytest.mark.parametrize(("preset", "dtype", "planes"), PLANS)
def test_prepared_queries(preset, dtype, planes, head_size, tuning):
    """base * upper + lower is the query, upper uses all of its range, and nothing wraps around."""
    plan = _plan(preset, head_size, dtype, tuning)
    assert plan.planes == planes
    table = byte_table(head_size, plan.layout.preset.key_bits, planes)
    g = torch.Generator().manual_seed(head_size)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    query = torch.randn(40, head_size, generator=g)
    query[0] = 0
    query[1] = 1e-5 * query[2]
    query[3] = 300 * query[4]
    query[5:8] = 0
    query[5, 3] = 1.0  # rotated, all as large: 127 * base or minus that
    query[6:8] = torch.from_numpy(plan.matrix[9]) * torch.tensor([[2.0], [-0.5]])  # rotated, one number
    query[8] = query[6] + 1e-3 * query[2]
    query = query.to(kind)
    upper, lower, scale = _prepared(plan, query)
    exact = query.double() @ torch.from_numpy(plan.matrix).double().T
    largest = exact.abs().amax(1)
    top = 127 * table.base
    assert torch.allclose(scale[1:], largest[1:] / top, rtol=1e-6, atol=0)
    wanted = exact[1:] * (top / largest[1:, None])
    assert (
        float((table.base * upper[1:] + lower[1:] / table.stretch - wanted).abs().max())
        < 0.51 / table.stretch
    )
    assert float((wanted - table.base * upper[1:]).abs().max()) < table.base / 2 + 0.01
    assert bool((upper[1:].abs().amax(1) == 127).all())
    assert float(lower.abs().max()) <= table.base / 2
    assert not upper[0].any() and not lower[0].any() and 0 < float(scale[0]) < 1e-30


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_query_without_a_size(number):
    plan = _plan("4bit_nc", 64, "bf16", None)
    query = torch.ones(4, 64, dtype=torch.bfloat16)
    query[1, 7] = number
    _, _, scale = _prepared(plan, query)
    assert scale.isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    ("bits", "planes", "limit"), [(3, 1, 7.1e-4), (3, 2, 1e-5), (4, 1, 5e-4), (4, 2, 5e-5)]
)
def test_error_of_the_tables(bits, planes, limit):
    """Of a key's length, as byte_table says; and lower reads the best straight line."""
    table = byte_table(128, bits, planes)
    c = lloyd_max(bits)
    weight = cell_probabilities(c, None) / (cell_probabilities(c, None) * c**2).sum()
    values = table.values * table.factor * 128**0.5
    assert (weight * (values - c) ** 2).sum() ** 0.5 < limit
    if bits == 4:
        stored = np.array(table.words, np.int32).view(np.uint8)
        assert len(stored) == 16 * planes and stored.max() < 128
    if (bits, planes) == (4, 1):
        assert table.lower_offset == -7.5
        line = np.arange(16) + table.lower_offset
        stretch = (weight * table.values * line).sum() / (weight * line**2).sum()
        assert table.stretch == pytest.approx(stretch, rel=1e-12)
        assert 32 <= table.base < 128


def _bf16(x):
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().double().numpy()


def _score_errors(query, head_size, keys, g):
    """Errors [heads] of scores with ``keys`` random keys each, against the usual size of a score: of 4-bit keys as
    codes and one plane, and of keys rounded to bf16. query: [heads, D], numbers of bf16."""
    table = byte_table(head_size, 4, 1)
    fine = np.array(table.words, np.int32).view(np.int8).astype(np.float64)
    h, c = rotation(head_size), lloyd_max(4)
    q = query @ h.T
    scale = np.abs(q).max(1, keepdims=True) / (127 * table.base)
    upper = np.round(q / scale / table.base)
    lower = np.round((q / scale - table.base * upper) * table.stretch)
    offset = table.base * table.offset * upper.sum(1) + table.lower_offset * lower.sum(1)
    factor = table.factor * head_size**0.5
    ours, plain = [], []
    for i in range(len(query)):
        codes = np.searchsorted((c[1:] + c[:-1]) / 2, g.standard_normal((keys, head_size)), side="right")
        key = c[codes]
        exact = key @ q[i]
        coarse = codes.astype(np.float64)
        got = table.base * (coarse @ upper[i]) + coarse @ lower[i] + fine[codes] @ upper[i] + offset[i]
        got *= scale[i] * factor
        size = np.linalg.norm(q[i]) * np.linalg.norm(key) / head_size**0.5
        ours.append(np.linalg.norm(got - exact) / size)
        plain.append(np.linalg.norm(_bf16(key @ h) @ query[i] - exact) / size)
    return np.array(ours), np.array(plain)


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_scores_of_random_heads(head_size):
    """Codes and one plane stay at half the error of bf16 keys, and no head of 2,000 comes out worse."""
    g = np.random.default_rng(head_size)
    ours, plain = _score_errors(_bf16(g.standard_normal((2000, head_size))), head_size, 128, g)
    assert (ours**2).mean() < 0.5**2 * (plain**2).mean()
    assert (ours / plain).max() < 1


@pytest.mark.parametrize(("head_size", "limit"), [(64, 1.2), (128, 1.6), (256, 2.3)])
@pytest.mark.parametrize("rest", [0.0, 1e-3, 4e-3, 0.03, 0.1])
def test_scores_of_peaky_queries(rest, head_size, limit):
    """The worst there is: one number of the rotated query that dwarfs all others. Steps of upper follow the largest, so
    the others are all lower, and lower reads no plane."""
    g = np.random.default_rng(head_size)
    q = rest * g.standard_normal((100, head_size))
    q[np.arange(100), g.integers(0, head_size, 100)] = 1
    ours, plain = _score_errors(_bf16(q @ rotation(head_size)), head_size, 128, g)
    assert (ours**2).mean() < limit**2 * (plain**2).mean()


@pytest.mark.parametrize("tuning", WIDTHS, ids=("narrow", "wide"))
@pytest.mark.parametrize("head_size", [64, 112, 128])
def test_scores_of_the_kernel(head_size, tuning, device):
    """Of one token each, whose score is the lse: the kernel does what the numbers above say."""
    config, case = Config(head_size=head_size, heads=2, group=8, arch="sm_90"), Case((1,) * 6)
    setup = set_up(config, case, device, tuning=tuning)
    assert setup.bound.ops.plan.planes == 1
    _, lse = decode(setup, case)
    ours, plain = 0.0, 0.0
    for b, length in enumerate(case.lens):
        key, _ = setup.oracle.read(setup.cache.data, setup.table[b], 0, length)
        key = key[0].repeat_interleave(config.group, 0)  # [Hq, D]
        query = setup.query[b].double()
        scale = setup.bound.layer.softmax_scale
        exact = (query * key).sum(-1)
        ours += float(((lse[b].double() / scale - exact) ** 2).sum())
        plain += float((((query * key.bfloat16().double()).sum(-1) - exact) ** 2).sum())
    assert 0 < ours < 0.65**2 * plain


@pytest.mark.parametrize("tuning", WIDTHS, ids=("narrow", "wide"))
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_head_sizes(head_size, tuning, device):
    check(Config(head_size=head_size, heads=1, group=2, arch="sm_90"), Case((3, 21)), device, tuning=tuning)


def test_sixteen_columns(device):
    config = Config(head_size=64, heads=1, group=8, most_queries=4, arch="sm_90")
    check(config, Case((33, 18), (4, 3)), device)
