"""The harness on a device: small shapes, every column. What it measures is not judged here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from turboquant_rocm.bench.baselines import PagedDecode, Tile
from turboquant_rocm.bench.cases import Case, Job
from turboquant_rocm.bench.inputs import LIMIT, Setting
from turboquant_rocm.bench.measure import Harness
from turboquant_rocm.bench.timing import copy_ceiling, graph_time, launches, read_ceiling
from turboquant_rocm.target import detect

CEILINGS = {"read": 1e12, "copy": 1e12}


@pytest.fixture(scope="module")
def harness(device: str) -> Harness:
    target = detect()
    return Harness(
        Setting(torch.device(device, 0), target.vendor, 64 << 20, replays=3, quick=True), target, CEILINGS
    )


@pytest.mark.parametrize("operation", ["decode", "store", "dequantize", "prefill"])
def test_every_column_is_filled(operation: str, harness: Harness):
    case = Case(operation, "4bit_nc", batch=2, context=512, query_len=200 if operation == "prefill" else 1)
    row = harness.measure(Job(case))
    assert row.status == "ok", row.note
    assert row.graph is not None and row.cpu is not None
    assert row.percent is not None and row.percent > 0
    assert row.launches is None, "counted last of all, by a call of its own"
    assert (harness.launches(Job(case)) or 1) >= 1
    assert set(row.bf16) == {
        "decode": {"bf16_paged", "bf16_sdpa"}, "store": {"bf16_paged"}, "dequantize": {"bf16_paged"},
        "prefill": {"bf16_sdpa"},
    }[operation]  # fmt: skip


def test_store_is_one_launch(harness: Harness):
    job = Job(Case("store", "4bit_nc", context=64))
    row = harness.measure(job, baselines=False)
    assert row.status == "ok", row.note
    assert harness.launches(job) in (None, 1)


def _soon(holds: Callable[[], bool]) -> bool:
    """Whether it holds in one of five tries: the other tests of a leg share the device."""
    return any(holds() for _ in range(5))


def test_ceilings(device: str):
    """Reading is at least as fast as half of a copy's reads and writes, and no ceiling is absurd."""
    at = torch.device(device, 0)

    def holds() -> bool:
        read, copy = read_ceiling(at, 3), copy_ceiling(at, 3)
        return 1e10 < copy < 1e14 and copy / 2 < read < 1e14

    assert _soon(holds)


def test_launches_are_counted(device: str):
    x = torch.zeros(1 << 10, device=device)
    assert launches(lambda: x.add_(1)) in (None, 1)
    assert launches(lambda: (x.add_(1), x.mul_(2))) in (None, 2)


def test_a_graph_times_every_call(device: str):
    """Twice the work in a call takes about twice the time: calls are neither lost nor repeated."""
    x = torch.zeros(1 << 26, device=device)

    def holds() -> bool:
        one = graph_time([lambda: x.add_(1)], 5)
        two = graph_time([lambda: (x.add_(1), x.add_(1))], 5)
        return 1.7 < two.us / one.us < 2.3

    assert _soon(holds)


@pytest.mark.parametrize(
    "more", [{}, {"window": 33}, {"query_len": 4}, {"lengths": "log_uniform"}, {"head_size": 96}], ids=str
)
def test_paged_baseline(more: dict[str, object], device: str):
    case = Case(**{"operation": "decode", "preset": "k8v4", "batch": 3, "context": 700, **more})
    decode, blocks = PagedDecode.of(case, torch.device(device, 0))
    shape = (blocks, case.block_size, case.num_kv_heads, case.head_size)
    key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    for tile in (Tile(1, 32, 2, 1), Tile(5, 64, 4, 1)):
        assert decode.error(tile, key, value) <= LIMIT["bf16"]
