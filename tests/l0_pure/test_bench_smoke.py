"""The harness run on the CPU: it checks before it times, and says what it could not do. Its times mean nothing here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.cases import layer_spec, reference, rel_l2  # noqa: E402
from turboquant_rocm.backends._torch.reference import ReferenceOps  # noqa: E402
from turboquant_rocm.bench import baselines, measure  # noqa: E402
from turboquant_rocm.bench.cases import OPERATIONS, Case, Job  # noqa: E402
from turboquant_rocm.bench.cli import main  # noqa: E402
from turboquant_rocm.bench.inputs import Setting, block_tables, exact_rows, relative, slots_of  # noqa: E402
from turboquant_rocm.bench.records import Run, percent_of  # noqa: E402
from turboquant_rocm.bench.timing import cold_bytes, copies_for, summary  # noqa: E402
from turboquant_rocm.target import get_target  # noqa: E402

CPU = torch.device("cpu")
CEILINGS = {"read": 1e9, "copy": 2e9}
SMALL = Case("decode", "4bit_nc", num_heads=4, num_kv_heads=2, head_size=64, batch=2, context=40)


def harness(failures: list[str] | None = None) -> measure.Harness:
    keep = failures.append if failures is not None else lambda text: None
    return measure.Harness(Setting(CPU, "cpu", 0, replays=2), get_target("cpu"), CEILINGS, on_failure=keep)


# ---- pieces -------------------------------------------------------------------------------------------------


def test_tables_are_permuted_and_slots_follow_them():
    lens = (40, 7, 100)
    table, blocks = block_tables(lens, 16, CPU)
    used = [b for row in table.tolist() for b in row if b >= 0]
    assert sorted(used) == list(range(blocks)) and used != sorted(used)
    assert [sum(b >= 0 for b in row) for row in table.tolist()] == [3, 1, 7]
    slots = slots_of(table, lens, 16)
    assert len(slots) == 147 and len(set(slots.tolist())) == 147
    assert slots[40 + 7 + 35] == table[2, 2] * 16 + 3


@pytest.mark.parametrize(
    "more",
    [{}, {"window": 9}, {"sinks": True}, {"soft_cap": 2.0}, {"window": 5, "sinks": True, "soft_cap": 3.0}],
    ids=str,
)
@pytest.mark.parametrize("queries", [1, 6])
def test_exact_attention_in_chunks_is_the_oracle(
    more: dict[str, Any], queries: int, monkeypatch: pytest.MonkeyPatch
):
    """Chunks of 7 tokens against the fp64 reference in one piece."""
    monkeypatch.setattr("turboquant_rocm.bench.inputs._CHUNK", 7)
    torch.manual_seed(0)
    bound = reference(layer_spec(64, 2, 3, **more), "4bit_nc", "soa", 16, torch.float64, checks="off")
    table, blocks = block_tables((40,), 16, CPU)
    cache = bound.allocate(blocks, "cpu")
    key, value = (torch.randn(40, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    bound.store(key, value, cache, slots_of(table, (40,), 16))
    query = torch.randn(queries, 6, 64, dtype=torch.bfloat16)
    sinks = torch.randn(6) if more.get("sinks") else None
    want = torch.empty(queries, 6, 64, dtype=torch.float64)
    starts = torch.tensor([0, queries], dtype=torch.int32)
    bound.decode(
        query,
        cache,
        table,
        torch.tensor([40], dtype=torch.int32),
        starts,
        max_query_len=queries,
        sinks=sinks,
        out=want,
    )
    got = exact_rows(
        query, lambda a, b: bound.ops.read(cache.data, table[0], a, b), 40, 64**-0.5, more.get("window"),
        more.get("soft_cap"), sinks,
    )  # fmt: skip
    assert rel_l2(got, want) < 1e-12


def test_relative_error_sees_what_is_not_finite():
    one = torch.ones(4)
    assert relative(one, one) == 0
    assert relative(1.01 * one, one) == pytest.approx(0.01)
    assert not relative(torch.tensor([1.0, float("nan")]), torch.ones(2)) <= 1e9


def test_summary_is_median_and_interquartile_range():
    time = summary([10.0, 30.0, 20.0, 40.0, 1000.0])
    assert (time.us, time.spread) == (30.0, 20.0)


def test_copies_exceed_the_cache():
    assert copies_for(1 << 20, 256 << 20) == 128, "at most"
    assert copies_for(100 << 20, 256 << 20) == 3
    assert copies_for(1 << 30, 256 << 20) == 1
    assert copies_for(1, 0) == 1
    assert cold_bytes(get_target("cpu"), CPU) == 0


# ---- rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("preset", ["k8v4", "3bit_nc"])
def test_every_operation_is_checked_and_timed(operation: str, preset: str):
    queries = {"decode": 3, "prefill": 20}.get(operation, 1)
    case = Case(
        operation, preset, num_heads=4, num_kv_heads=2, head_size=64, batch=2, context=40, query_len=queries
    )
    row = harness().measure(Job(case))
    assert (row.status, row.backend, row.layout) == ("ok", "torch_reference", "soa"), row.note
    assert row.case == case, "small enough to be run as it is"
    assert row.graph is not None and row.graph.us > 0
    assert row.percent == pytest.approx(percent_of(row.nbytes, row.graph.us, CEILINGS[case.ceiling]))
    assert row.error is not None and row.tolerance is not None and row.error <= row.tolerance
    assert set(row.bf16) == {"decode": {"bf16_sdpa"}, "prefill": {"bf16_sdpa"}}.get(operation, {"bf16_paged"})


@pytest.mark.parametrize(
    "changes", [{"window": 9}, {"sinks": True}, {"soft_cap": 2.0}, {"query_len": 4, "window": 3}], ids=str
)
def test_decode_variants(changes: dict[str, Any]):
    case = Case(**{**SMALL.to_dict(), **changes})
    row = harness().measure(Job(case))
    assert row.status == "ok", row.note
    assert row.metric("bf16_ratio") is None


def spoil(monkeypatch: pytest.MonkeyPatch, method: str, at: int) -> None:
    """The reference's fp32 ``method`` scales argument ``at`` by 1.05 after it has written it; the fp64 oracle stays."""
    right = getattr(ReferenceOps, method)

    def wrong(self: ReferenceOps, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        if self.math is torch.float32:
            args[at].mul_(1.05)

    monkeypatch.setattr(ReferenceOps, method, wrong)


@pytest.mark.parametrize(
    ("operation", "method", "at"), [("decode", "decode", 8), ("dequantize", "dequantize", 5)]
)
def test_a_wrong_result_is_not_timed(operation: str, method: str, at: int, monkeypatch: pytest.MonkeyPatch):
    spoil(monkeypatch, method, at)
    timed: list[Any] = []
    monkeypatch.setattr(measure, "wall_time", lambda *args: timed.append(args))
    row = harness().measure(Job(Case(**{**SMALL.to_dict(), "operation": operation})))
    assert row.status == "wrong" and row.graph is None and not timed
    assert row.error == pytest.approx(0.05, rel=0.1)
    assert "not timed" in row.note


def test_a_wrong_store_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    """The bound layer's store leaves out a token; the reference it is held against does not."""
    from turboquant_rocm.ops import BoundLayer

    right = BoundLayer.store
    monkeypatch.setattr(
        BoundLayer,
        "store",
        lambda self, key, value, cache, slots: right(self, key[1:], value[1:], cache, slots[1:]),
    )
    row = harness().measure(Job(Case(**{**SMALL.to_dict(), "operation": "store"})))
    assert row.status == "wrong" and row.error is not None and row.error > 1e-3


def test_unwritten_rows_are_wrong(monkeypatch: pytest.MonkeyPatch):
    """Sequences that are not compared must at least be written: outputs are poisoned first."""
    right = ReferenceOps.decode

    def lazy(self: ReferenceOps, query: Any, cache: Any, table: Any, lens: Any, *rest: Any) -> None:
        out = rest[4].clone()
        right(self, query, cache, table, lens, *rest)
        if self.math is torch.float32:
            rest[4][1] = out[1]

    monkeypatch.setattr(ReferenceOps, "decode", lazy)
    monkeypatch.setattr(measure, "_checked_sequences", lambda lens: [0])
    row = harness().measure(Job(SMALL))
    assert row.status == "wrong" and row.error is None, "an infinite error is no number of JSON"


def test_a_wrong_baseline_is_a_row_and_no_ratio(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(baselines, "relative", lambda got, want: 1.0)
    h = harness()
    row = h.measure(Job(SMALL))
    assert row.status == "ok" and row.bf16 == {}
    assert {b.backend: b.status for b in h.baseline_rows()} == {"bf16_paged": "refused", "bf16_sdpa": "wrong"}


def test_failures_say_what_was_raised(monkeypatch: pytest.MonkeyPatch):
    def broken(*args: Any) -> None:
        raise ZeroDivisionError("no lanes left\nsecond line")

    monkeypatch.setattr(ReferenceOps, "decode", broken)
    failures: list[str] = []
    row = harness(failures).measure(Job(SMALL))
    assert (row.status, row.note) == ("failed", "ZeroDivisionError: no lanes left")
    assert "in broken" in failures[0]


def test_refusals_have_every_reason():
    row = harness().measure(Job(Case(**{**SMALL.to_dict(), "block_size": 8}), "triton_soa"))
    assert row.status == "refused" and row.backend == "triton_soa"
    assert "arch=cpu" in row.note and "block_size=8" in row.note
    assert harness().measure(Job(SMALL)).backend == "torch_reference", "a smoke run needs no name"


def test_options_reach_the_backend():
    row = harness().measure(Job(SMALL), math_dtype=torch.float64)
    assert row.status == "ok" and row.error is not None and row.error < 3e-3
    row = harness().measure(Job(SMALL), tuning={"tokens": 16})
    assert row.status == "failed" and "tuning" in row.note


# ---- the command line ---------------------------------------------------------------------------------------


def test_smoke_run_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    files = {name: tmp_path / f"run.{name}" for name in ("json", "csv", "markdown")}
    flags = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    assert (
        main(["decode", "--device", "cpu", "--quick", "--profile", "smoke", "--preset", "4bit_nc", *flags])
        == 0
    )
    out = capsys.readouterr().out
    assert "SMOKE RUN" in out and "torch_reference" in out and "bf16_sdpa" in out
    run = Run.load(files["json"])
    assert run.machine.smoke and run.machine.versions["torch"] == torch.__version__
    assert run.machine.command.startswith("python -m turboquant_rocm.bench decode --device cpu")
    assert set(run.ceilings) == {"read", "copy"} and min(run.ceilings.values()) > 0
    assert [(r.case.batch, r.case.context) for r in run.rows if r.backend == "torch_reference"] == [
        (1, 64),
        (2, 96),
    ]
    assert len(files["csv"].read_text().splitlines()) == 1 + len(run.rows)
    assert "SMOKE RUN" in files["markdown"].read_text()


def test_smoke_table_and_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    saved = tmp_path / "run.json"
    command = [
        "table",
        "--device",
        "cpu",
        "--quick",
        "--profile",
        "sinks",
        "--profile",
        "store-64",
        "--json",
        str(saved),
    ]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "the verdicts mean nothing" in out and "sinks over the plain kernel" in out
    assert "not measured" in out, "launches are not counted on a CPU"
    assert main(["compare", str(saved), str(saved)]) == 0


def test_launch_and_ceiling(capsys: pytest.CaptureFixture[str]):
    assert main(["launch", "--device", "cpu", "--quick", "--preset", "k8v4", "--no-baselines"]) == 0
    assert main(["ceiling", "--device", "cpu", "--quick"]) == 0
    assert "read ceiling" in " ".join(capsys.readouterr().out.split())


def test_wrong_results_exit_with_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    spoil(monkeypatch, "decode", 8)
    saved = tmp_path / "run.json"
    command = [
        "decode",
        "--device",
        "cpu",
        "--quick",
        "--profile",
        "smoke",
        "--preset",
        "k8v4",
        "--json",
        str(saved),
    ]
    assert main(command) == 1
    assert {
        r["status"] for r in json.loads(saved.read_text())["rows"] if r["backend"] == "torch_reference"
    } == {"wrong"}
    assert "not timed" in capsys.readouterr().out


def test_only_refusals_exit_with_one(capsys: pytest.CaptureFixture[str]):
    assert (
        main(["decode", "--device", "cpu", "--quick", "--profile", "smoke", "--backend", "triton_soa"]) == 1
    )
    captured = capsys.readouterr()
    assert "refused triton_soa, 4 of 4 cases: arch=cpu" in captured.out
    assert "nothing was measured" in captured.err


def test_no_gpu_exits_with_three(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in (["decode"], ["table"], ["ceiling"], ["all"], ["tune"]):
        assert main(command) == 3
        assert "torch sees no GPU" in " ".join(capsys.readouterr().err.split())
