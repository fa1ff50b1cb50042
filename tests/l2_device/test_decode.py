"""Decode on a GPU: random cases against the bar of tests/decode_checks.py, graphs, large caches, allocation."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.decode_checks import (  # noqa: E402
    LAYOUTS,
    PRESETS,
    Case,
    Config,
    check,
    check_a_value_that_few_see,
    check_both_ways,
    check_lazy,
    check_queries_at,
    compare,
    decode,
    set_up,
)
from tests.schedule_checks import check_schedule  # noqa: E402

EXAMPLES = 66


def configs() -> list[Config]:
    """32 layers that between them have every preset, layout, head size, dtype, feature and many GQA ratios, KV-head
    counts and block sizes (pitfalls 13, 16, 18, 19, 20, 22)."""
    rng = random.Random(4)
    sizes = (64, 128, 256, 96, 80, 112, 192)
    groups = (8, 1, 3, 5, 6, 7, 12, 16, 32, 2, 4, 10)
    heads = (2, 1, 6, 10, 8, 3)
    blocks = (16, 32, 48, 128, 528, 784, 1568, 2768, 64)
    queries = (1, 1, 4, 5, 16, 40)
    found = []
    for i in range(32):
        group = groups[i % len(groups)]
        found.append(
            Config(
                PRESETS[i % 4], LAYOUTS[(i // 4) % 2], sizes[i % 7], heads[(i // 2) % 6] if group < 12 else 2, group,
                blocks[i % 9], ("bf16", "fp16")[rng.randrange(2)], window=i % 3 == 1, sinks=i % 4 == 2 or i % 9 == 0,
                soft_cap=30.0 if i % 8 == 5 else None, padding=(0, 0, 2, 26)[rng.randrange(4)],
                most_queries=queries[rng.randrange(6)],
            )
        )  # fmt: skip
    return found


@st.composite
def cases(draw: st.DrawFn, config: Config) -> Case:
    batch = draw(st.integers(1, 6))
    limit = draw(st.sampled_from((40, 200, 700)))
    lens = [draw(st.integers(0, limit)) for _ in range(batch)]
    queries = None
    spare_rows = 0
    if config.most_queries > 1:
        if draw(st.booleans()):  # the same number each, and padding: what may be cut by its lengths
            each = draw(st.integers(1, config.most_queries))
            padding = draw(st.integers(0, batch - 1))
            queries = (each,) * (batch - padding) + (0,) * padding
            spare_rows = each * padding
        else:
            queries = tuple(draw(st.integers(0, config.most_queries)) for _ in range(batch))
            spare_rows = draw(st.integers(0, 2))
        if not sum(queries):
            queries = (1, *queries[1:])
        lens = [max(n, q) if draw(st.integers(0, 9)) else n for n, q in zip(lens, queries, strict=True)]
    bs = config.block_size
    window = None
    if config.window:
        window = draw(st.one_of(st.sampled_from((1, bs - 1, bs, bs + 1)), st.integers(1, 400)))
    return Case(
        tuple(lens), queries, window,
        splits=draw(st.sampled_from((None, 1, 2, 7))),
        cut=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
        scale=draw(st.sampled_from((None, None, 0.02, 0.3))),
        key_scale=draw(st.sampled_from((1.0, 1.0, 0.05, 3.0))),
        value_scale=draw(st.sampled_from((1.0, 1.0, 1e-4, 100.0))),
        spare_rows=spare_rows,
    )  # fmt: skip


def test_schedules():
    """Any batch is cut as a schedule says it is."""
    rng = random.Random(1)
    for _ in range(60):
        batch = rng.randint(2, 400)
        lens = [int(2 ** rng.uniform(0, 15)) for _ in range(batch)]
        check_schedule(
            lens,
            batch * rng.randint(2, 6),
            "cuda",
            window=rng.choice((0, 0, 100)),
            min_tiles=rng.choice((1, 5)),
        )


@pytest.mark.parametrize("config", configs(), ids=str)
def test_random_cases(config, target):
    ran = 0

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=cases(config))
    def inner(case: Case) -> None:
        nonlocal ran
        check(config, case, "cuda", target)
        ran += 1

    inner()
    assert ran >= EXAMPLES - 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preset", PRESETS)
def test_long_context(preset, layout, target):
    """Biases of the matrix units show here: outputs shrink as the square root of the length."""
    check(Config(preset, layout, 128, 2, 8, dtype="fp16"), Case((20000, 4097), scale=0.02), "cuda", target)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("preset", "cut"), [("k8v4", True), ("4bit_nc", True), ("4bit_nc", False)])
def test_more_programs_than_run_at_once(preset, cut, layout, target):
    """Pieces come in several sizes and a program of prepare takes more rows (DecodePlan.skew and .together)."""
    rng = random.Random(3)
    lens = tuple(rng.randint(0, 700) for _ in range(120))
    config = Config(preset, layout, 128, 8, 8)
    check(config, Case(lens, splits=3 if cut else None, cut=cut), "cuda", target)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("shift", [0, 1, 4])
def test_queries_at_any_address(shift, cut, target):
    check_queries_at(shift, cut, "cuda", target)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preset", PRESETS)
def test_with_prepare_and_without(preset, layout, head_size, dtype, cut, target):
    """Sixteen columns without query_start_loc, and eight with it."""
    lens = (700, 0, 33, 1, 129)
    config = Config(preset, layout, head_size, 2, 16, dtype=dtype)
    check_both_ways(config, Case(lens, splits=3, cut=cut), "cuda", target)
    config = Config(preset, layout, head_size, 2, 4, dtype=dtype, sinks=True, most_queries=2)
    check_both_ways(config, Case(lens, (2,) * 5, splits=3, cut=cut), "cuda", target)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("count", [2, 4])
def test_a_value_that_few_see(preset, count, target):
    for size in (64, 128):
        config = Config(preset, "soa", size, 1, 8, most_queries=count)
        check_a_value_that_few_see(config, "cuda", target, tuning={"wide_work": 0})


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preset", PRESETS)
def test_lazy(preset, layout, head_size, target):
    if target.vendor != "nvidia":
        pytest.skip(f"{target.arch}: for NVIDIA's accumulators")
    check_lazy(preset, layout, head_size, "cuda", target)


@pytest.mark.parametrize("queries", [100, 128])
def test_up_to_128_queries(queries, target):
    check(Config(head_size=128, most_queries=128), Case((500, 130), (queries, 3)), "cuda", target)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("most_queries", "cut"), [(1, False), (5, False), (1, True), (5, True)])
def test_graph(layout, most_queries, cut, target):
    """Pitfalls 20, 21, 28: captured once, replayed with other lengths and padded rows, bitwise equal to eager; after
    warm-up nothing is compiled or allocated and nothing synchronises."""
    config = Config("4bit_nc", layout, 128, 2, 8, most_queries=most_queries, sinks=True)
    batch, context = 6, 1024
    queries = None if most_queries == 1 else (most_queries,) * batch
    case = Case((context - 16,) * batch, queries, splits=4 if cut else None, cut=cut)
    setup = set_up(config, case, "cuda", target, tuning={"wide_work": 0})
    setup.bound.checks = "off"
    setup.bound.warmup(batch, setup.table.shape[1] * 16, most_queries)
    pages = setup.table.clone()
    out = torch.full_like(setup.query, float("nan"))
    lse = torch.full(setup.query.shape[:2], float("nan"), device="cuda")

    def call(table, lens, starts, out, lse):
        setup.bound.decode(
            setup.query, setup.cache, table, lens, starts, max_query_len=most_queries, sinks=setup.sinks,
            out=out, lse=lse,
        )  # fmt: skip

    compiled: list[object] = []
    import triton

    triton.knobs.runtime.jit_post_compile_hook = lambda *a, **k: compiled.append(k)
    try:
        call(setup.table, setup.lens, setup.starts, out, lse)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = torch.cuda.memory_stats()[
                "allocation.all.allocated"
            ]  # torch's own for graphs are made by now
            torch.cuda.set_sync_debug_mode("error")
            call(setup.table, setup.lens, setup.starts, out, lse)
            torch.cuda.set_sync_debug_mode("default")
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == held
        rng = random.Random(1)
        for step in range(20):
            lens = [rng.choice((0, 1, 15, 16, 17, 500, 1000, 1008)) for _ in range(batch)]
            table = pages.clone()
            if step % 2:  # padded rows
                lens[-2:] = [0, 0]
                table[-2], table[-1] = -1, 2**31 - 1
            counts = [most_queries] * batch
            if queries is not None:
                counts = [min(rng.randint(0, most_queries), n) for n in lens]
            starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()]).int().cuda()
            setup.table.copy_(table)
            setup.lens.copy_(torch.tensor(lens, dtype=torch.int32))
            if setup.starts is not None:
                setup.starts.copy_(starts)
            out.fill_(float("nan"))
            lse.fill_(float("nan"))
            graph.replay()
            want, want_lse = torch.full_like(out, float("nan")), torch.full_like(lse, float("nan"))
            call(table, setup.lens.clone(), None if queries is None else starts, want, want_lse)
            assert torch.equal(out.view(torch.int16), want.view(torch.int16))
            assert torch.equal(lse.view(torch.int32), want_lse.view(torch.int32))
            rows = sum(counts)
            assert bool(out[:rows].isfinite().all())
            if queries is None:
                compare(replace_setup(setup, lens), config, Case(tuple(lens)), out, lse)
        assert not compiled, "a kernel was compiled after warm-up"
    finally:
        torch.cuda.set_sync_debug_mode("default")
        triton.knobs.runtime.jit_post_compile_hook = None


def replace_setup(setup, lens):
    """The same tensors with other lengths."""
    return replace(setup, lens=torch.tensor(lens, dtype=torch.int32, device="cuda"))


@pytest.mark.parametrize(("preset", "size", "group"), [("k3v4_nc", 64, 4), ("4bit_nc", 128, 8)])
def test_hundred_mixed_steps_compile_nothing(preset, size, group, target):
    """Pitfall 28."""
    import triton

    config = Config(preset, "soa", size, 2, group, most_queries=4)
    # some of the shapes shall be enough work for wide tiles, where the target has such
    setup = set_up(config, Case((900,) * 8), "cuda", target, tuning={"wide_work": 20})
    setup.bound.checks = "off"
    kernels = setup.bound.warmup(8, setup.table.shape[1] * 16, 4)
    assert kernels <= (48 if group == 8 else 24), f"{kernels} specialisations"
    compiled: list[object] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda *a, **k: compiled.append(k)
    rng = random.Random(0)
    try:
        for _ in range(100):
            batch, width, count = rng.randint(1, 8), rng.randint(1, setup.table.shape[1]), rng.randint(1, 4)
            lens = torch.tensor([rng.randint(0, min(900, width * 16)) for _ in range(batch)]).int()
            starts = None if rng.random() < 0.4 else torch.arange(batch + 1, dtype=torch.int32) * count
            rows = batch if starts is None else batch * count
            query = torch.randn(rows, 2 * group, size, device="cuda", dtype=torch.bfloat16)
            setup.bound.decode(
                query, setup.cache, setup.table[:batch, :width].contiguous(), lens.cuda(),
                None if starts is None else starts.cuda(), max_query_len=count, return_lse=rng.random() < 0.5,
            )  # fmt: skip
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert not compiled


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_beyond_two_gib(layout, target):
    """Pitfall 14: 64-bit offsets; the first and the last block of a cache above 4 GiB."""
    config, case = Config("4bit_nc", layout, 128, 8, 2), Case((40, 16))
    setup = set_up(config, case, "cuda", target)
    old = setup.cache.data
    want, _ = decode(setup, case)
    blocks = (1 << 32) // old.stride(0) + 8
    big = torch.empty(blocks * old.stride(0), dtype=torch.uint8, device="cuda").as_strided(
        (blocks, *old.shape[1:]), old.stride()
    )
    order = torch.tensor([blocks - 1, 0, blocks // 2 + 1, *range(1, len(old) - 2)], device="cuda")
    big[order] = old
    object.__setattr__(setup.cache, "data", big)
    used = setup.table >= 0
    used &= setup.table < len(old)
    setup.table[used] = order[setup.table[used].long()].int()
    got, _ = decode(setup, case)
    assert torch.equal(got, want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_window_time_does_not_grow(layout, target):
    """Blocks outside a window are skipped: grids are sized by the window, not by the context."""
    config = Config("4bit_nc", layout, 128, 8, 8, window=True)
    setup = set_up(config, Case((4096,), window=1024), "cuda", target)
    plan = setup.bound.ops.plan
    assert plan.splits(32, 1 << 20, 1, 132) == plan.splits(32, 1 << 11, 1, 132)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_device_functions(bits, target):
    """Vendor instructions against their portable twins, for every code in every position and random words."""
    from tests.device_twins import run

    kind = {"nvidia": "cuda", "amd": "hip"}[target.vendor]
    assert torch.equal(run(bits, kind, "cuda"), run(bits, "portable", "cuda"))


def test_fp8_unpacked_by_an_instruction(target):
    """All bytes but the two NaN ones: what integer code finds, times 256."""
    from tests.device_twins import run

    if target.vendor != "nvidia" or target.fp8_format is None:
        pytest.skip(f"{target.arch} has no instruction that unpacks E4M3FN to fp16")
    numbers = [
        run(8, kind, "cuda")[:, :8].contiguous().view(torch.float16) for kind in ("unpack", "portable")
    ]
    found, expected = numbers[0].double(), numbers[1].double() * 256
    nan = expected.abs() == 480
    assert nan.any() and torch.equal(found.isnan(), nan)
    assert torch.equal(found[~nan], expected[~nan])


@pytest.mark.parametrize(("bits", "planes"), [(3, 1), (3, 2), (4, 1), (4, 2)])
def test_byte_functions(bits, planes, target):
    """The same for planes of int8 centroids, and for value codes as numbers."""
    from tests.device_twins import run_bytes

    kind = {"nvidia": "cuda", "amd": "hip"}[target.vendor]
    for got, want in zip(
        run_bytes(bits, planes, kind, "cuda"), run_bytes(bits, planes, "portable", "cuda"), strict=True
    ):
        assert torch.equal(got, want)


def test_numbers_as_pairs_of_fp16(target):
    from tests.device_twins import run_halves

    kind = {"nvidia": "cuda", "amd": "hip"}[target.vendor]
    for got, want in zip(run_halves(kind, "cuda"), run_halves("portable", "cuda"), strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got[~got.isnan()], want[~want.isnan()])
