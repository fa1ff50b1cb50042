"""The arithmetic of the harness: bytes, percentages, noise, verdicts, profiles, goals, records, and the tuned file."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.repository import ROOT
from turboquant_rocm.bench import plot
from turboquant_rocm.bench.cases import (
    Case,
    Goal,
    Job,
    parse_heads,
    parse_profiles,
    parse_shape,
    read_profiles,
)
from turboquant_rocm.bench.cli import _jobs, main
from turboquant_rocm.bench.display import cells, markdown
from turboquant_rocm.bench.goals import jobs_of, judge
from turboquant_rocm.bench.records import (
    MIN_CHANGE,
    SCHEMA,
    Machine,
    Row,
    Run,
    Time,
    compare,
    noise,
    percent_of,
)
from turboquant_rocm.bench.search import header_of, parse_space, render, search, with_override
from turboquant_rocm.dispatch import IneligibleError
from turboquant_rocm.layouts import make_layout
from turboquant_rocm.presets import load_yaml, parse_yaml
from turboquant_rocm.spec import SpecError
from turboquant_rocm.target import targets
from turboquant_rocm.tuned import choices, load_tuned, parse_tuned

MACHINE = Machine(
    "Card X", "sm_90", "c0ffee" + "0" * 34, "2026-01-02T03:04:05+00:00", "bench", {"torch": "2.11"}
)
CEILINGS = {"read": 4e12, "copy": 3e12}


def row(us: float = 100.0, spread: float = 0.5, **changes: Any) -> Row:
    case = changes.pop("case", Case("decode", "4bit_nc", batch=8, context=8192))
    return replace(
        Row(case, "triton_soa", "soa", graph=Time(us, spread), nbytes=1 << 20, percent=50.0), **changes
    )


def run(*rows: Row, **machine: Any) -> Run:
    return Run(replace(MACHINE, **machine), CEILINGS, rows)


# ---- cases: what a call has to move -------------------------------------------------------------------------


def slot(preset: str = "4bit_nc", head_size: int = 128) -> int:
    return make_layout("soa", preset, head_size, 8, 16).slot_bytes


def test_bytes_of_decode_are_the_packed_tokens():
    case = Case("decode", "4bit_nc", batch=32, context=4096)
    assert slot() == 134
    assert case.bytes_moved(slot()) == 32 * 4096 * 8 * 134
    assert case.bytes_moved(case.raw_slot_bytes) == case.raw_bytes() == 32 * 4096 * 8 * 2 * 128 * 2
    assert Case("decode", "k8v4", num_heads=16, num_kv_heads=1).bytes_moved(196) == 4096 * 196


@pytest.mark.parametrize(("query_len", "tokens"), [(1, 1024), (4, 1027)])
def test_bytes_of_a_window_do_not_depend_on_the_context(query_len: int, tokens: int):
    for context in (4096, 32768):
        case = Case("decode", "4bit_nc", batch=2, context=context, window=1024, query_len=query_len)
        assert case.tokens_read() == 2 * tokens
    assert Case("decode", "4bit_nc", batch=2, context=100, window=1024).tokens_read() == 200


def test_bytes_of_store_and_dequantize_are_raw_and_packed():
    case = Case("store", "4bit_nc", batch=64, context=1)
    assert case.bytes_moved(134) == 64 * 8 * (512 + 134)
    assert replace(case, operation="dequantize").bytes_moved(134) == 64 * 8 * (512 + 134)
    assert (case.ceiling, Case("decode", "4bit_nc").ceiling) == ("copy", "read")
    assert Case("store", "4bit_nc", context=8192, window=16).tokens_read() == 8192, (
        "a store writes every token"
    )


def test_bytes_of_prefill():
    case = Case("prefill", "4bit_nc", context=1000, query_len=200)
    assert case.bytes_moved(134) == 1000 * 8 * 134 + 2 * 200 * 128 * 2 * (64 + 8)
    assert replace(case, window=101).tokens_read() == 100


def test_lengths():
    ragged = Case("decode", "4bit_nc", batch=64, context=32768, lengths="log_uniform")
    lens = ragged.lens()
    assert lens == ragged.lens()
    assert len(lens) == 64 and list(lens) != sorted(lens)
    assert 128 <= min(lens) < 160 and 26000 < max(lens) <= 32768
    in_octaves = [sum(128 * 2**i <= n < 256 * 2**i for n in lens) for i in range(8)]
    assert in_octaves == [8] * 8, "as many sequences in every octave"
    mean = replace(ragged, lengths="mean").lens()
    assert set(mean) == {round(sum(lens) / 64)}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"operation": "encode"}, "operation"),
        ({"preset": "5bit"}, "preset"),
        ({"batch": 0}, "batch"),
        ({"context": True}, "context"),
        ({"block_size": 1.0}, "block_size"),
        ({"lengths": "random"}, "lengths"),
        ({"lengths": "log_uniform", "context": 64}, "lengths"),
        ({"lengths": "mean", "operation": "store"}, "lengths"),
        ({"dtype": "fp32"}, "dtype"),
        ({"query_len": 5000}, "query_len"),
        ({"query_len": 2, "operation": "store"}, "query_len"),
        ({"num_heads": 63}, "num_heads"),
        ({"window": 0}, "window"),
        ({"sinks": 1}, "sinks"),
        ({"soft_cap": -1.0}, "soft_cap"),
    ],
)
def test_wrong_cases_are_refused_by_field(changes: dict[str, Any], field: str):
    with pytest.raises(SpecError) as error:
        Case(**{"operation": "decode", "preset": "4bit_nc", **changes})
    assert error.value.field == field


def test_case_goes_through_json():
    case = Case("decode", "k3v4_nc", window=7, soft_cap=2.5, sinks=True, query_len=3)
    assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case
    with pytest.raises(SpecError, match="exactly the fields"):
        Case.from_dict({**case.to_dict(), "heads": 3})


def test_titles_tell_cases_apart():
    base = Case("decode", "4bit_nc", context=8192)
    others = [
        replace(base, **c)
        for c in (
            {"head_size": 64}, {"block_size": 32}, {"dtype": "fp16"}, {"lengths": "mean"}, {"query_len": 2},
            {"window": 5}, {"sinks": True}, {"soft_cap": 1.0}, {"batch": 2}, {"num_heads": 32},
        )
    ]  # fmt: skip
    assert len({c.title() for c in (base, *others)}) == len(others) + 1


# ---- profiles -----------------------------------------------------------------------------------------------


def profiles(**profile: Any) -> dict[str, Any]:
    return {"version": 1, "profiles": {"one": {"operation": "decode", **profile}}}


def test_a_profile_is_the_product_of_its_lists():
    made = parse_profiles(
        profiles(preset=["k8v4", "4bit_nc"], heads=["64/8", "16/1"], shape=["1x64", "2x64"], window=[None, 8])
    )
    cases = {job.case for job in made["one"].jobs}
    assert len(cases) == 16
    assert Case("decode", "k8v4", 16, 1, batch=2, context=64, window=8) in cases


def test_backends_that_nobody_names_are_those_for_the_values():
    """Others would only print a refusal behind each case."""
    made = parse_profiles(profiles(preset=["4bit_nc", "4bit_nc+rotated_values"], shape="1x64")).values()

    def backends_of(*names: str) -> dict[str, set[str | None]]:
        found: dict[str, set[str | None]] = {}
        for job in _jobs(made, names, smoke=False):
            found.setdefault(job.case.preset, set()).add(job.backend)
        return found

    plain, rotated = "turboquant_4bit_nc", "turboquant_4bit_nc+rotated_values"
    assert backends_of() == {
        plain: {"flydsl_gfx950", "flydsl_gfx942", "triton_soa", "triton_aos"},
        rotated: {"triton_rotated"},
    }
    assert backends_of("triton_soa") == {plain: {"triton_soa"}, rotated: {"triton_soa"}}
    named = parse_profiles(profiles(preset="4bit_nc", shape="1x64", backend="triton_rotated")).values()
    assert [job.backend for job in _jobs(named, (), smoke=False)] == ["triton_rotated"]


def test_a_profile_may_name_a_model():
    made = parse_profiles(profiles(preset="4bit_nc", model="gpt-oss-120b", tp=2, shape="1x64"))["one"]
    layers = {
        (j.case.num_heads, j.case.num_kv_heads, j.case.head_size, j.case.window, j.case.sinks)
        for j in made.jobs
    }
    assert layers == {(32, 4, 64, None, True), (32, 4, 64, 128, True)}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "bench.yaml"),
        ({"version": 2, "profiles": {}}, "version"),
        ({"version": 1}, "profiles"),
        ({"version": 1, "profiles": {}}, "profiles"),
        ({"version": 1, "profiles": {"a": 3}}, "profile a"),
        (profiles(operation="fly"), "profile one: operation"),
        (profiles(shapes=["1x1"]), "shapes"),
        (profiles(shape=[]), "shape"),
        (profiles(shape="1*64"), "BATCHxCONTEXT"),
        (profiles(shape="0x64"), "shape"),
        (profiles(heads="64-8"), "QUERY_HEADS/KV_HEADS"),
        (profiles(heads="63/8"), "num_heads"),
        (profiles(preset="9bit"), "preset"),
        (profiles(window="long"), "window"),
        (profiles(backend="triton_xxl"), "backend"),
        (profiles(model="llama-3.1-8b", heads="1/1"), "either model"),
        (profiles(model="no-such-model"), "model"),
        (profiles(tp=2), "tp"),
        (profiles(goals=[{"metric": "speed", "at_least": 1}]), "goal 0: metric"),
        (profiles(goals=[{"metric": "us"}]), "at_least and at_most"),
        (profiles(goals=[{"metric": "us", "at_least": 1, "at_most": 2}]), "at_least and at_most"),
        (profiles(goals=[{"metric": "us", "at_most": "fast"}]), "at_most"),
        (profiles(goals=[{"metric": "us", "at_most": 0}]), "at_most"),
        (profiles(goals=[{"metric": "us", "at_most": 1, "than": 3}]), "than"),
        (profiles(goals=[{"metric": "us", "at_most": 1, "against": {"head": 3}}]), "against"),
        (profiles(goals=[{"metric": "us", "at_most": 1, "against": {"num_heads": 63}}]), "num_heads"),
        (profiles(goals=[{"metric": "us", "at_most": 1, "says": 4}]), "says"),
    ],
)  # fmt: skip
def test_wrong_profiles_are_refused_by_name(data: Any, says: str):
    with pytest.raises(SpecError) as error:
        parse_profiles(data)
    assert says in str(error.value)


def test_unreadable_profiles_are_refused(tmp_path: Path):
    with pytest.raises(SpecError, match="profiles"):
        read_profiles(tmp_path / "nothing.yaml")
    (tmp_path / "twice.yaml").write_text("version: 1\nversion: 1\nprofiles: {}\n")
    with pytest.raises(SpecError, match="given twice"):
        read_profiles(tmp_path / "twice.yaml")


def test_shapes_and_heads():
    assert parse_shape("32x4096") == (32, 4096)
    assert parse_heads("64/8") == (64, 8)
    for wrong in ("", "x", "1x", 3, "1x2x3", "-1x2"):
        with pytest.raises(SpecError):
            parse_shape(wrong)


def test_bundled_profiles_hold_every_requirement():
    """The requirements, by metric and bound; what they apply to is in the profiles."""
    found = parse_profiles(load_yaml("bench.yaml"))
    goals = {(p.name, g.metric, g.at_least, g.at_most) for p in found.values() for g in p.goals}
    assert goals == {
        ("k8v4-large", "percent", 80, None), ("4bit-large", "percent", 65, None),
        ("k3v4-large", "percent", 50, None), ("3bit-large", "percent", 45, None),
        ("4bit-medium", "percent", 50, None), ("4bit-one-long", "percent", 55, None),
        ("one-short", "us", None, 10), ("one-short", "cpu_us", None, 45),
        ("heads-same", "us", None, 1.05), ("heads-narrow", "percent", 0.6, None),
        ("sinks", "us", None, 1.1), ("window", "us", None, 1.1), ("window", "us", None, 1.05),
        ("four-queries", "us", None, 1.5), ("head-sizes", "percent", 0.7, None),
        ("ragged", "percent", 0.75, None),
        ("store-64", "us", None, 3), ("store-64", "launches", None, 1),
        ("store-1024", "us", None, 6), ("store-1024", "launches", None, 1),
        ("store-8192", "us", None, 22), ("store-8192", "launches", None, 1),
        ("dequantize-32k", "us", None, 80), ("bf16-ratio", "bf16_ratio", 2.5, None),
        ("aos-half", "us", None, 2),
    }  # fmt: skip
    large = {(j.case.batch, j.case.context) for j in found["4bit-large"].jobs}
    assert large == {(32, 32768), (64, 8192), (128, 4096)}
    assert all(j.case.raw_bytes() >= 100e6 for j in found["bf16-ratio"].jobs)
    assert {j.case.batch * j.case.context for j in found["store-64"].jobs} == {1, 64}
    for name in ("decode", "store", "dequantize", "prefill", "launch-decode", "launch-store"):
        assert found[name].jobs and not found[name].goals


# ---- goals --------------------------------------------------------------------------------------------------


def judged(goal: dict[str, Any], *rows: Row, **profile: Any) -> Any:
    data = profiles(preset="4bit_nc", goals=[{"says": "it", **goal}], **{"shape": "8x8192", **profile})
    found = parse_profiles(data).values()
    jobs = jobs_of(found)
    by_case = {r.case: r for r in rows}
    (outcome,) = judge(found, {job: by_case[job.case] for job in jobs if job.case in by_case})
    return outcome


def test_absolute_goals():
    at_least = {"metric": "percent", "at_least": 65, "stretch": 75}
    assert judged(at_least, row(percent=65.0)).verdict == "pass"
    assert judged(at_least, row(percent=64.9)).verdict == "short"
    assert judged(at_least, row()).target == ">= 65 %, stretch 75 %"
    assert judged({"metric": "us", "at_most": 10}, row(10.0)).verdict == "pass"
    assert judged({"metric": "us", "at_most": 10}, row(10.1)).verdict == "short"
    assert judged({"metric": "cpu_us", "at_most": 45}, row(cpu=Time(50.0, 1.0))).verdict == "short"
    assert judged({"metric": "launches", "at_most": 1}, row(launches=2)).verdict == "short"
    paged = row(100.0, bf16={"bf16_paged": 250.0, "bf16_sdpa": 1.0})
    assert judged({"metric": "bf16_ratio", "at_least": 2.5}, paged).worst.value == 2.5


def test_the_worst_case_decides():
    cases = [Case("decode", "4bit_nc", batch=b, context=64) for b in (1, 2, 4)]
    rows = [row(case=c, percent=p) for c, p in zip(cases, (70.0, 61.0, 66.0), strict=True)]
    outcome = judged({"metric": "percent", "at_least": 65}, *rows, shape=["1x64", "2x64", "4x64"])
    assert (outcome.verdict, outcome.worst.value) == ("short", 61.0)
    rows = [row(us, case=c) for c, us in zip(cases, (3.0, 9.0, 4.0), strict=True)]
    assert judged({"metric": "us", "at_most": 10}, *rows, shape=["1x64", "2x64", "4x64"]).worst.value == 9.0


def test_what_was_not_measured_never_passes():
    goal = {"metric": "us", "at_most": 10}
    assert judged(goal).verdict == "not measured"
    wrong = row(status="wrong", graph=None, note="error 1e+00 > 1e-02: not timed")
    outcome = judged(goal, wrong)
    assert outcome.verdict == "not measured" and "not timed" in outcome.worst.why
    some = judged(
        goal, row(case=Case("decode", "4bit_nc", batch=1, context=64), us=1.0), shape=["1x64", "2x64"]
    )
    assert some.verdict == "not measured", "one case of two"
    assert judged({"metric": "us", "at_most": 10}, row(float("nan"))).verdict == "short"


def test_relative_goals():
    goal = {"metric": "us", "at_most": 1.1, "against": {"sinks": False}}
    plain = row(100.0)
    with_sinks = row(109.0, case=replace(plain.case, sinks=True))
    outcome = judged(goal, plain, with_sinks, sinks=True)
    assert outcome.verdict == "pass" and outcome.worst.value == pytest.approx(1.09)
    assert judged(goal, plain, replace(with_sinks, graph=Time(111.0, 0.1)), sinks=True).verdict == "short"
    assert judged(goal, with_sinks, sinks=True).verdict == "not measured", (
        "the case it is compared with is missing"
    )
    share = {"metric": "percent", "at_least": 0.6, "against": {"num_heads": 64, "num_kv_heads": 8}}
    narrow = row(case=replace(plain.case, num_heads=16, num_kv_heads=1), percent=25.0)
    assert judged(share, plain, narrow, heads="16/1").worst.value == pytest.approx(0.5)


def test_a_goal_may_compare_backends():
    goal = Goal("us", at_most=2, against=(("backend", "triton_soa"),))
    job = Job(Case("decode", "4bit_nc"), "triton_aos")
    assert goal.reference(job) == Job(job.case, "triton_soa")


# ---- records ------------------------------------------------------------------------------------------------


def test_percent_of_ceiling():
    assert percent_of(4_000_000, 1.0, 4e12) == pytest.approx(100)
    assert percent_of(1 << 30, 1000.0, 4e12) == pytest.approx(100 * 2**30 / 1e-3 / 4e12)


def test_json_round_trip():
    rows = (
        row(
            cpu=Time(40.0, 2.0),
            launches=3,
            bf16={"bf16_paged": 260.0},
            error=1e-3,
            tolerance=5e-3,
            copies=4,
            note="so",
        ),
        row(
            case=Case("store", "k8v4", batch=64, context=1),
            status="refused",
            graph=None,
            percent=None,
            note="arch",
        ),
    )
    made = run(*rows)
    assert Run.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("schema",), "turboquant_rocm.bench/99", "schema"),
        (("machine",), {}, "machine"),
        (("machine", "device"), None, "machine"),
        (("rows",), {}, "rows"),
        (("ceilings", "read"), "fast", "ceilings read"),
        (("ceilings", "read"), -1.0, "ceilings read"),
        (("rows", 0, "graph", "us"), None, "graph us"),
        (("rows", 0, "graph"), 3, "graph"),
        (("rows", 0, "status"), "great", "status"),
        (("rows", 0, "nbytes"), 1.5, "nbytes"),
        (("rows", 0, "percent"), True, "percent"),
        (("rows", 0, "bf16"), [1], "bf16"),
        (("rows", 0, "case", "batch"), 0, "batch"),
        (("rows", 0, "case", "preset"), "2bit", "preset"),
        (("rows", 0, "extra"), 1, "row"),
    ],
)
def test_wrong_json_is_refused_by_field(path: tuple[Any, ...], value: Any, says: str):
    data = json.loads(run(row()).to_json())
    at = data
    for key in path[:-1]:
        at = at[key]
    if value is None and path[-1] == "device":
        del at["device"]
    else:
        at[path[-1]] = value
    with pytest.raises(SpecError) as error:
        Run.from_json(json.dumps(data), "old.json")
    assert says in str(error.value) and "old.json" in str(error.value)


def test_no_json_is_refused():
    for text in ("", "[]", "{", "null"):
        with pytest.raises(SpecError):
            Run.from_json(text)
    with pytest.raises(ValueError, match="JSON"):
        run(row(float("nan"))).to_json()


def test_csv_has_the_machine_in_every_line():
    text = run(
        row(bf16={"bf16_paged": 260.0}), row(status="failed", graph=None, percent=None, note="a, b")
    ).to_csv()
    lines = list(csv.DictReader(io.StringIO(text)))
    assert [line["status"] for line in lines] == ["ok", "failed"]
    assert {line["commit"] for line in lines} == {MACHINE.commit}
    assert {line["device"] for line in lines} == {"Card X"}
    assert float(lines[0]["us"]) == 100.0 and float(lines[0]["bf16_ratio"]) == 2.6
    assert float(lines[0]["ceiling_bytes_s"]) == 4e12
    assert lines[1]["us"] == "" and lines[1]["note"] == "a, b"


def test_cells_show_percent_and_ratio_beside_the_time():
    text = cells(row(bf16={"bf16_paged": 260.0, "bf16_sdpa": 150.0}))
    assert text[4:8] == ("100.0 ± 0.5", "50.0 %", "2.60", "1.50")
    assert cells(row(status="wrong", graph=None, percent=None))[4] == "wrong"
    assert "| decode | 8 x 8192, 64/8 | 4bit_nc soa | triton_soa | 100.0 ± 0.5 | 50.0 % |" in markdown(
        run(row())
    )


# ---- comparison: seeded regressions -------------------------------------------------------------------------


def kinds(old: Row, new: Row, **options: Any) -> list[str]:
    return [v.kind for v in compare(run(old), run(new), **options).verdicts]


def test_noise_is_three_sigmas_or_the_least_change():
    assert noise(Time(100, 0), Time(110, 0)) == pytest.approx(100 * MIN_CHANGE)
    wide = noise(Time(100, 3.0), Time(110, 4.0))
    assert wide == pytest.approx(3 * 5.0 / 1.349)
    assert noise(Time(100, 0.1), Time(100, 0.1), 0.0) == pytest.approx(3 * 2**0.5 * 0.1 / 1.349)


def test_compare_by_spread():
    assert kinds(row(100), row(102.9)) == ["same"]
    assert kinds(row(100), row(103.1)) == ["slower"]
    assert kinds(row(100), row(96.9)) == ["faster"]
    assert kinds(row(100, 6.0), row(110, 6.0)) == ["same"], "wide spreads hide it"
    assert kinds(row(100, 0.1), row(101, 0.1), min_change=0.0) == ["slower"], "narrow ones do not"


def test_compare_names_regressions_only():
    found = compare(
        run(row(100), row(50, case=Case("store", "4bit_nc"))),
        run(row(120), row(40, case=Case("store", "4bit_nc"))),
    )
    assert [v.kind for v in found.verdicts] == ["slower", "faster"]
    (worse,) = found.regressions
    assert (
        "decode 4bit_nc 8 x 8192" in worse.title
        and worse.old == Time(100, 0.5)
        and worse.new == Time(120, 0.5)
    )


def test_launches_are_counted_when_all_times_are_taken():
    """The profiler that counts them slows down every launch after it."""
    from rich.console import Console

    from turboquant_rocm.bench.cli import _measure_all

    done: list[tuple[str, int]] = []
    jobs = [Job(Case("decode", "4bit_nc", batch=n, context=64)) for n in (1, 2, 3)]

    class Recorder:
        def decide(self, job: Job) -> Any:
            return SimpleNamespace(backend="triton_soa")

        def measure(self, job: Job, *, eager: bool, baselines: bool) -> Row:
            done.append(("time", job.case.batch))
            return row(case=job.case, cpu=Time(40.0, 1.0) if eager else None)

        def launches(self, job: Job) -> int:
            done.append(("launches", job.case.batch))
            return 10 + job.case.batch

    wants = {jobs[1]: frozenset[str]()}
    rows = _measure_all(Recorder(), jobs, Console(quiet=True), wants, False)  # type: ignore[arg-type]
    assert done == [("time", 1), ("time", 2), ("time", 3), ("launches", 1), ("launches", 3)]
    assert [rows[job].launches for job in jobs] == [11, None, 13]


def test_jobs_that_mean_the_same_are_measured_once():
    """A goal names a backend, another leaves it to the dispatcher: one time, with what both want of it."""
    from rich.console import Console

    from turboquant_rocm.bench.cli import _measure_all

    case = Case("decode", "4bit_nc", batch=2, context=64)
    jobs = [Job(case), Job(case, "triton_soa"), Job(case, "triton_aos"), Job(replace(case, batch=3))]
    done: list[tuple[Job, bool, bool]] = []

    class Recorder:
        def decide(self, job: Job) -> Any:
            if job.case.batch == 3:
                raise IneligibleError(SimpleNamespace(layer=job.case.layer()), {}, "a card")  # type: ignore[arg-type]
            return SimpleNamespace(backend=job.backend or "triton_soa")

        def measure(self, job: Job, *, eager: bool, baselines: bool) -> Row:
            done.append((job, eager, baselines))
            return row(us=100.0 + len(done), case=job.case, backend=job.backend or "none")

    wants = {jobs[0]: frozenset({"baselines"}), jobs[1]: frozenset({"eager"}), jobs[2]: frozenset[str]()}
    rows = _measure_all(Recorder(), jobs, Console(quiet=True), wants, True)  # type: ignore[arg-type]
    assert done == [(jobs[1], True, True), (jobs[2], False, False), (jobs[3], True, True)]
    assert rows[jobs[0]] is rows[jobs[1]] is not rows[jobs[2]]
    assert set(rows) == set(jobs)


def test_the_ratio_of_a_saved_run_is_to_the_baseline_of_its_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    cases = [job.case for job in parse_profiles(*read_profiles(None))["bf16-ratio"].jobs]
    saved = tmp_path / "run.json"
    baselines = [
        row(us=250.0, case=replace(c, preset="turboquant_k8v4"), backend="bf16_paged") for c in cases
    ]
    saved.write_text(run(*(row(case=c) for c in cases), *baselines).to_json())
    assert main(["table", "--run", str(saved), "--profile", "bf16-ratio", "--strict"]) == 0
    assert "2.5x" in capsys.readouterr().out
    saved.write_text(run(*(row(case=c) for c in cases), *baselines[1:]).to_json())
    assert main(["table", "--run", str(saved), "--profile", "bf16-ratio", "--strict"]) == 1


def test_compare_results_launches_and_cpu():
    wrong = row(status="wrong", graph=None)
    assert [v.regression for v in compare(run(row()), run(wrong)).verdicts] == [True]
    assert kinds(row(), wrong) == ["broken"]
    assert kinds(wrong, row()) == ["repaired"]
    assert kinds(wrong, wrong) == []
    assert kinds(row(launches=3), row(launches=4)) == ["launches", "same"]
    assert kinds(row(launches=3), row(launches=2)) == ["same"]
    assert kinds(row(cpu=Time(40, 1)), row(cpu=Time(80, 1))) == ["same", "slower"]


def test_compare_needs_the_same_rows_and_machine():
    other = row(case=Case("decode", "k8v4"))
    assert sorted(v.kind for v in compare(run(row()), run(other)).verdicts) == ["added", "missing"]
    assert not compare(run(row()), run(other)).regressions
    assert kinds(row(), row(200, layout="aos")) == ["added", "missing"]
    with pytest.raises(SpecError, match="Card X"):
        compare(run(row()), run(row(), device="Card Y"))
    with pytest.raises(SpecError, match="smoke"):
        compare(run(row()), run(row(), smoke=True))


def test_compare_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    old, same, slow = tmp_path / "old.json", tmp_path / "same.json", tmp_path / "slow.json"
    old.write_text(run(row(100)).to_json())
    same.write_text(run(row(101)).to_json())
    slow.write_text(run(row(150)).to_json())
    assert main(["compare", str(old), str(same)]) == 0
    assert "0 regressions, 1 times within the noise" in capsys.readouterr().out
    assert main(["compare", str(old), str(slow)]) == 1
    out = capsys.readouterr().out
    assert "slower" in out and "+50.0 %" in out and "1 regressions" in out
    assert main(["compare", str(old), str(slow), "--min-change", "60%"]) == 0
    slow.write_text("{}")
    assert main(["compare", str(old), str(slow)]) == 2
    assert main(["compare", str(old), str(tmp_path / "none.json")]) == 2


# ---- saved runs: table and plot ------------------------------------------------------------------------------


def test_table_judges_a_saved_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    case = Case("decode", "4bit_nc", batch=8, context=8192)
    rows = [
        row(case=replace(case, batch=b, context=c), percent=p)
        for b, c, p in ((8, 8192, 51.0), (32, 4096, 60.0))
    ]
    saved = tmp_path / "run.json"
    saved.write_text(run(*rows, row(case=case, backend="triton_aos", layout="aos", percent=1.0)).to_json())
    command = ["table", "--run", str(saved), "--profile", "4bit-medium"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "pass" in out and "51 %" in out and "1 pass, 0 short, 0 not measured" in out
    assert main([*command, "--strict"]) == 0
    assert main(["table", "--run", str(saved), "--profile", "4bit-large", "--strict"]) == 1
    assert "not measured" in capsys.readouterr().out
    assert main(["table", "--run", str(saved), "--profile", "no-such"]) == 2
    assert main(["table", "--run", str(saved), "--profile", "smoke"]) == 2, "it has no goals"


def sweep() -> Run:
    base = Case("decode", "4bit_nc", batch=8)
    rows = [row(c / 100, case=replace(base, context=c)) for c in (8192, 1024)]
    rows += [
        row(c / 40, case=replace(base, preset="k8v4", context=c), backend="bf16_paged", layout="")
        for c in (1024, 8192)
    ]
    rows += [
        row(9, case=replace(base, batch=1)),
        row(9, case=Case("store", "4bit_nc")),
        row(9, case=replace(base, context=99), status="wrong"),
    ]
    return run(*rows)


def test_plot_panels_are_shapes_with_several_contexts():
    (panel,) = plot.panels(sweep().rows)
    assert panel.title == "8 sequences, 64/8"
    assert panel.lines == {
        "bf16 paged": ((1024, 25.6, 0.5), (8192, 204.8, 0.5)),
        "triton_soa 4bit_nc": ((1024, 10.24, 0.5), (8192, 81.92, 0.5)),
    }


def test_plot_is_a_png(tmp_path: Path):
    pytest.importorskip("matplotlib")
    saved = tmp_path / "run.json"
    saved.write_text(sweep().to_json())
    assert main(["plot", str(saved), "-o", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_plot_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    saved, other = tmp_path / "run.json", tmp_path / "other.json"
    saved.write_text(run(row()).to_json())
    assert main(["plot", str(saved), "-o", str(tmp_path / "a.png")]) == 2
    assert "several contexts" in " ".join(capsys.readouterr().err.split())
    saved.write_text(sweep().to_json())
    other.write_text(run(row(), device="Card Y").to_json())
    assert main(["plot", str(saved), str(other), "-o", str(tmp_path / "a.png")]) == 2
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(saved), "-o", str(tmp_path / "a.png")]) == 2
    assert "turboquant-rocm[bench]" in "".join(capsys.readouterr().err.split())


# ---- tuned files and the search ------------------------------------------------------------------------------


def test_every_bundled_tuned_file_loads():
    for arch, target in targets().items():
        if target.vendor in ("amd", "nvidia"):
            for backend in ("triton_soa", "triton_aos"):
                section = load_tuned(arch, target.vendor, backend)["decode"]
                for compiler in ("3.6", "3.9"):
                    assert choices(
                        section,
                        preset="k8v4",
                        head_size=64,
                        columns=8,
                        compiler=compiler,
                        multi=True,
                        wide=False,
                        soft_cap=False,
                    )
    with pytest.raises(SpecError, match="sm_90"):
        load_tuned("sm_90", "nvidia", "torch_reference")


def tuned_data() -> dict[str, Any]:
    return {
        "version": 1,
        "provenance": "by hand",
        "decode": {
            "tokens": 32, "num_warps": 1, "limit": None,
            "overrides": [
                {"when": {"preset": ["k8v4"]}, "use": {"tokens": 64}},
                {"when": {"preset": ["k8v4"], "columns": [16]}, "use": {"limit": 168}},
            ],
        },
    }  # fmt: skip


def test_later_overrides_win():
    section = parse_tuned(tuned_data(), "t")["decode"]
    assert choices(section, preset="4bit_nc", columns=8) == {"tokens": 32, "num_warps": 1, "limit": None}
    assert choices(section, preset="k8v4", columns=8) == {"tokens": 64, "num_warps": 1, "limit": None}
    assert choices(section, preset="k8v4", columns=16) == {"tokens": 64, "num_warps": 1, "limit": 168}


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("version",), 2, "version"),
        (("provenance",), "", "provenance"),
        (("provenance",), None, "provenance"),
        (("decode",), None, "decode"),
        (("decode", "overrides"), {}, "overrides"),
        (("decode", "overrides", 0), {"when": {"preset": ["k8v4"]}}, "overrides[0]"),
        (("decode", "overrides", 0, "when"), {"preset": "k8v4"}, "when preset"),
        (("decode", "overrides", 1, "use"), {"tokns": 3}, "tokns"),
        (("decode", "overrides", 1, "because"), "x", "overrides[1]"),
        (("decode", "overrides", 1, "provenance"), {}, "overrides[1] provenance"),
    ],
)
def test_wrong_tuned_files_are_refused_by_field(path: tuple[Any, ...], value: Any, says: str):
    data = tuned_data()
    at: Any = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(SpecError) as error:
        parse_tuned(data, "tuned/x/y.yaml")
    assert says in str(error.value) and "tuned/x/y.yaml" in str(error.value)


def fake(values: Any) -> tuple[list[float] | None, str]:
    """Times with an optimum at tokens 64, 2 warps; more than 4 warps do not compile with 64 tokens."""
    if values["num_warps"] > 4 and values["tokens"] == 64:
        return None, "out of shared memory"
    time = 10.0 + abs(values["tokens"] - 64) / 16 + abs(values["num_warps"] - 2)
    return [time, 10 * time], ""


def test_search_finds_the_optimum_and_keeps_reasons():
    start = {"tokens": 16, "num_warps": 1, "other": 5}
    found = search(start, {"tokens": [16, 32, 64, 128], "num_warps": [1, 2, 4, 8]}, fake)
    assert found.changed == {"tokens": 64, "num_warps": 2}
    assert found.values == {"tokens": 64, "num_warps": 2, "other": 5}
    assert found.score == pytest.approx(10 / 14)
    assert [t.note for t in found.trials if t.score is None] == ["out of shared memory"]
    tried = [tuple(sorted(t.values.items())) for t in found.trials]
    assert len(tried) == len(set(tried)), "nothing is timed twice"


def test_search_does_not_follow_noise():
    start = {"tokens": 16}
    found = search(start, {"tokens": [16, 32]}, lambda v: ([100.0 if v["tokens"] == 16 else 99.5], ""))
    assert found.changed == {} and found.score == 1.0
    with pytest.raises(RuntimeError, match="no memory"):
        search(start, {"tokens": [16]}, lambda v: (None, "no memory"))


def test_search_space_is_checked():
    names = list(load_tuned("sm_90", "nvidia", "triton_soa")["decode"])
    assert set(parse_space(load_yaml("bench.yaml"), "decode", names)) <= set(names)
    for wrong in (
        {},
        {"tune": {"decode": {"tokns": [1]}}},
        {"tune": {"decode": {"tokens": 16}}},
        {"tune": {"decode": {}}},
    ):
        with pytest.raises(SpecError, match="tune decode"):
            parse_space(wrong, "decode", names)


def test_what_tune_writes_is_what_the_loader_reads():
    text = (ROOT / "configs/tuned/sm_90/triton_soa.yaml").read_text()
    before = parse_yaml(text, "old")
    when = {"preset": ["4bit_nc"], "head_size": [128], "columns": [8]}
    versions = {"torch": "2.11", "triton": "3.6"}
    source = {
        "device": "Card X",
        "versions": versions,
        "again": versions,
        "commit": "c0ffee",
        "command": "bench tune",
    }
    made = render(with_override(before, "decode", when, {"tokens": 64}, source), header_of(text))
    assert made.startswith(header_of(text)) and "# tokens:" in header_of(text)
    section = parse_tuned(parse_yaml(made, "new"), "new")["decode"]
    facts = {
        "preset": "4bit_nc",
        "head_size": 128,
        "columns": 8,
        "compiler": "3.6",
        "multi": False,
        "wide": False,
        "soft_cap": False,
    }
    old = choices(parse_tuned(before, "old")["decode"], **facts)
    assert choices(section, **facts) == {**old, "tokens": 64}
    other = {**facts, "columns": 16}
    assert choices(section, **other) == choices(parse_tuned(before, "old")["decode"], **other)
    assert section["overrides"][-1]["provenance"] == source

    again = with_override(parse_yaml(made, "new"), "decode", when, {"tokens": 16}, source)
    assert len(again["decode"]["overrides"]) == len(section["overrides"]), "replaced, not repeated"
    with pytest.raises(SpecError, match="tokns"):
        with_override(before, "decode", when, {"tokns": 64}, source)
    with pytest.raises(SpecError, match="provenance"):
        with_override(before, "decode", when, {"tokens": 64}, {})


# ---- the command line ---------------------------------------------------------------------------------------


def test_help_needs_no_framework():
    code = (
        "import sys\nfor name in ('torch', 'triton', 'flydsl'): sys.modules[name] = None\n"
        "from turboquant_rocm.bench.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    for command in ([], ["decode"], ["tune"], ["compare"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *command, "--help"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        assert done.returncode == 0 and "usage" in done.stdout, done.stderr
    done = subprocess.run(
        [sys.executable, "-c", code, "ceiling"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 3 and "torch cannot be imported" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["decode", "--device", "tpu"],
        ["decode", "--device", "cuda:x"],
        ["decode", "--device", "cpu", "--shape", "3"],
        ["decode", "--device", "cpu", "--preset", "5bit"],
        ["decode", "--device", "cpu", "--heads", "7/2"],
        ["decode", "--device", "cpu", "--backend", "nobody"],
        ["decode", "--device", "cpu", "--profile", "store"],
        ["decode", "--device", "cpu", "--profile", "nothing"],
        ["decode", "--device", "cpu", "--profiles", "no-such-file.yaml"],
        ["tune", "--device", "cpu"],
    ],
)
def test_wrong_arguments_exit_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    assert "error: " in capsys.readouterr().err


def test_wrong_flags_exit_with_two():
    for arguments in (
        [],
        ["fly"],
        ["decode", "--replays", "0"],
        ["compare", "a"],
        ["compare", "a", "b", "--min-change", "x"],
    ):
        with pytest.raises(SystemExit) as error:
            main(arguments)
        assert error.value.code == 2


def test_schema_name_is_in_the_file():
    assert json.loads(run(row()).to_json())["schema"] == SCHEMA
    assert yaml.safe_load((ROOT / "configs/bench.yaml").read_text())["version"] == 1


def test_the_published_table_is_that_of_its_run(tmp_path: Path):
    """docs/performance.md ends with what bench makes of the stored run."""
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    published = text.partition("<!-- generated: do not edit -->\n")[2]
    run = ROOT / "docs" / "measurements" / "h200-2026-12-01.json"
    main(
        ["table", "--run", str(run), "--markdown", str(tmp_path / "table.md")]
    )  # its wrong rows are an exit code
    assert published
    assert published == (tmp_path / "table.md").read_text(encoding="utf-8")
