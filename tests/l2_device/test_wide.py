"""Decode of 16 and 32 columns by four warps (backends/_triton/wide.py) on a GPU that it is for: random cases against
the bar of tests/decode_checks.py, and beside the kernel that is its fallback."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402

from tests.decode_checks import ROUNDING, Case, Config, check, compare, decode, set_up  # noqa: E402
from tests.l2_device.test_decode import cases  # noqa: E402

EXAMPLES = 40
ANY_WORK = {"wide_work": 0}
"""Wide tiles for short cases, too."""


@pytest.fixture(autouse=True)
def _sm_90(target):
    if target.arch != "sm_90":
        pytest.skip(f"{target.arch}: wide.py is for sm_90")


def _config(group: int, block_size: int, most_queries: int, heads: int = 2, **more) -> Config:
    return Config("4bit_nc", "soa", 128, heads, group, block_size, most_queries=most_queries, **more)


CONFIGS = [
    _config(8, 16, 4),
    _config(8, 32, 8, window=True),
    _config(4, 48, 9, heads=3, sinks=True),
    _config(5, 528, 7, soft_cap=30.0),
    _config(16, 16, 2, heads=1, window=True, sinks=True),
    _config(12, 784, 3, heads=6),
    _config(32, 16, 1, sinks=True),
    _config(16, 16, 1, heads=1),
    _config(12, 48, 1, heads=3, window=True, soft_cap=30.0),
    _config(8, 16, 2, sinks=True),
    _config(1, 64, 40, heads=8, window=True, soft_cap=30.0),
    _config(7, 16, 16, padding=16, window=True, sinks=True),
]


def _is_wide(config: Config, setup) -> bool:
    plan = setup.bound.ops.plan
    return plan.is_wide(plan.columns(config.most_queries))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_random_cases(config, target):
    ran = wide = 0

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=cases(config))
    def inner(case: Case) -> None:
        nonlocal ran, wide
        setup = set_up(config, case, "cuda", target, tuning={"wide_from": 16, **ANY_WORK})
        setup.bound.checks = "shapes"
        out, lse = decode(setup, case)
        compare(setup, config, case, out, lse)
        ran += 1
        kernels = {launch.decode._kernel.__name__ for launch in setup.bound.ops._launches.values()}
        wide += kernels == {"wide_kernel"}

    inner()
    assert ran >= EXAMPLES - 2
    assert wide >= ran // 3, "cases of few columns take the other kernel, but not most"


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_beside_the_other_kernel(config, target):
    """The same numbers but for rounding, and both right, over many tiles and pieces of all kinds."""
    rng = random.Random(2)
    lens = tuple(rng.choice((0, 40, 64, 65, 700, 3000, 4097)) for _ in range(7))
    queries = tuple(min(n, config.most_queries) for n in lens)
    for splits, cut, spread in ((1, False, 1.0), (5, False, 3.0), (4, True, 1.0)):
        if cut and len(set(queries)) > 1:
            lens, queries = (4097, 3000, 64, 700, 65), (config.most_queries,) * 5
        case = Case(
            lens, queries if config.most_queries > 1 else None, window=333 if config.window else None,
            splits=splits, cut=cut, key_scale=spread,
        )  # fmt: skip
        found = []
        for wide in (True, False):
            setup = set_up(config, case, "cuda", target, tuning={"wide_from": 16 * wide, **ANY_WORK})
            setup.bound.checks = "shapes"
            assert _is_wide(config, setup) == wide
            out, lse = decode(setup, case)
            compare(setup, config, case, out, lse)
            found.append((out.double(), lse.double()))
        (a, lse_a), (b, lse_b) = found
        assert float((a - b).norm()) <= 2 * ROUNDING[config.dtype] * float(a.norm())
        seen = lse_a > float("-inf")
        assert torch.equal(seen, lse_b > float("-inf"))
        assert float((lse_a - lse_b)[seen].abs().max()) < 1e-3


@pytest.mark.parametrize("block_size", [48, 64, 528])
def test_sequences_without_a_key(block_size, target):
    """Nothing lies before the cache: what the first tiles of an empty sequence read is masked, or its first block."""
    config = _config(8, block_size, 4)
    for _ in range(20):
        check(config, Case((0, 0, 3, 0), (4, 4, 2, 1), splits=1), "cuda", target)


def test_long_context(target):
    """Biases of the matrix units show here: outputs shrink as the square root of the length."""
    check(_config(8, 16, 4), Case((20000, 4097), (4, 4), scale=0.02), "cuda", target)


def test_scores_that_grow_and_scales_that_grow(target):
    """The reference moves again and again: later keys are longer and nearer to the query, later values larger."""
    config, case = _config(8, 16, 4), Case((2000, 1500), (4, 4), splits=1, scale=1.0)
    setup = set_up(config, case, "cuda", target, tuning=ANY_WORK)
    setup.bound.checks = "shapes"
    g = torch.Generator().manual_seed(5)
    for b, length in enumerate(case.lens):
        position = torch.arange(length)
        slots = setup.table[b].cpu()[position // 16].long() * 16 + position % 16
        growth = (position / length * 8).exp2()[:, None, None]
        near = setup.query.cpu().float().mean(1)[4 * b]
        key = (torch.randn(length, 2, 128, generator=g) * 0.1 + near * 0.05) * growth
        value = torch.randn(length, 2, 128, generator=g) * growth**2
        setup.bound.store(key.bfloat16().cuda(), value.bfloat16().cuda(), setup.cache, slots.cuda())
    out, lse = decode(setup, case)
    compare(setup, config, case, out, lse)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("window", [None, 10])
def test_keys_of_length_zero_at_the_edge(window, splits, target):
    """One query token sees such a key, another does not: its norm of 0 meets a mask of minus infinity."""
    config = _config(8, 16, 4, window=window is not None)
    case = Case((70, 90), (4, 4), window=window, splits=splits)
    setup = set_up(config, case, "cuda", target, tuning=ANY_WORK)
    setup.bound.checks = "shapes"
    nothing = torch.zeros(1, 2, 128, dtype=torch.bfloat16, device="cuda")
    for b, length in enumerate(case.lens):
        for token in (length - 1, length - 2, length - 12, length - 13):
            slot = setup.table[b, token // 16].long() * 16 + token % 16
            setup.bound.store(nothing, nothing + 1.5, setup.cache, slot[None])
    out, lse = decode(setup, case)
    compare(setup, config, case, out, lse)


def test_bad_queries_stay_with_their_own_head(target):
    """NaN and infinity in one head of one token; all others as they would be."""
    config, case = _config(8, 16, 4), Case((700, 90), (4, 4), splits=3)
    setup = set_up(config, case, "cuda", target, tuning=ANY_WORK)
    setup.bound.checks = "shapes"
    want, want_lse = decode(setup, case)
    query = setup.query.clone()
    query[1, 3] = float("nan")
    query[6, 9, 5] = float("inf")
    got, lse = decode(replace(setup, query=query), case)
    same = torch.ones(query.shape[:2], dtype=torch.bool, device="cuda")
    same[1, 3] = same[6, 9] = False
    assert torch.equal(got[same], want[same]) and torch.equal(lse[same], want_lse[same])


def test_cache_at_an_odd_address_takes_the_other_kernel(target):
    config, case = _config(8, 16, 4), Case((700, 90), (4, 4), splits=3)
    setup = set_up(config, case, "cuda", target, tuning=ANY_WORK)
    setup.bound.checks = "shapes"
    want, _ = decode(setup, case)
    data = setup.cache.data
    memory = torch.empty(data.shape[0] * data.stride(0) + 16, dtype=torch.uint8, device="cuda")
    moved = memory.as_strided(data.shape, data.stride(), 2)
    moved.copy_(data)
    object.__setattr__(setup.cache, "data", moved)
    got, lse = decode(setup, case)
    compare(setup, config, case, got, lse)
    names = [launch.decode._kernel.__name__ for launch in setup.bound.ops._launches.values()]
    assert names == ["wide_kernel", "decode_kernel"]
    assert float((got - want).double().norm()) <= 2 * ROUNDING["bf16"] * float(want.double().norm())


def test_the_same_result_every_time(target):
    """No race: results are bitwise those of the first run."""
    config = _config(8, 16, 4, heads=8)
    case = Case(tuple(range(300, 3000, 100)), (4,) * 27, splits=3, cut=True)
    setup = set_up(config, case, "cuda", target, tuning=ANY_WORK)
    setup.bound.checks = "shapes"
    want, want_lse = decode(setup, case)
    for _ in range(30):
        out, lse = decode(setup, case)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
