"""Compare result files of ci/run.sh: different legs with each other, and each with a stored baseline.

    python -m ci.compare results/*.json [--baseline ci/baselines] [--report report.md] [--expect all-hosted]

Between legs: store bytes are identical, whatever the vendor; outputs agree within the larger of the two backends'
tolerances; the same cases ran. Between a leg and its baseline: the same, and timings (only on the same device)
and counters do not rise beyond their noise. A leg that failed, or is partial, is a regression by itself.

The report is markdown. It names every regression: leg, case, backend, and what differs where. A leg is blamed for
different bytes if it stands against the reference leg, or against the majority where that did not run.
Exit codes: 0 no regression, 1 regressions, 2 the input cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from ci.leg import SCHEMA
from ci.legs import MatrixError, load_legs

__all__ = ["CompareError", "Regression", "Result", "compare", "load", "main", "noise", "render"]

REFERENCE_LEG: Final = "cpu-reference"
LSE_LIMIT: Final = 1e-2
TIME_FLOOR: Final = 0.05  # a ratio within 5 % is never a regression
SHORT_SECONDS: Final = 2e-4  # calls below this are the host's launch overhead,
SHORT_FLOOR: Final = 0.5  # of which only a jump is one
TIME_SIGMAS: Final = 4.0  # beyond so many standard errors of the ratio it may be one
COUNTER_FLOOR: Final = 0.02  # counters are exact, but a compiler's patch release may move them a little
Key = tuple[str, str]  # case id, backend


class CompareError(ValueError):
    """A file cannot be read or compared; the message names it."""


@dataclass(frozen=True, slots=True, order=True)
class Regression:
    """One thing that is wrong. kind: leg, coverage, inputs, store, output, time, counter or resource."""

    kind: str
    leg: str
    case: str
    what: str

    def __str__(self) -> str:
        return f"{self.leg}: {self.case + ': ' if self.case else ''}{self.what}"


@dataclass(slots=True)
class Result:
    """A result file, with lazy access to the arrays beside it."""

    path: Path
    data: dict[str, Any]
    label: str
    cases: dict[Key, dict[str, Any]] = field(default_factory=dict)

    @property
    def leg(self) -> str:
        return str(self.data["leg"])

    def array(self, name: str, suffix: str = ".npz") -> np.ndarray[Any, Any] | None:
        """An array of the .npz file beside the result; None if there is none (a baseline without it)."""
        path = self.path.with_suffix(suffix)
        if not path.exists():
            return None
        with np.load(path, allow_pickle=False) as data:
            return np.asarray(data[name]) if name in data.files else None

    def output(self, record: Mapping[str, Any], name: str) -> np.ndarray[Any, np.dtype[np.float64]] | None:
        """An output in fp64; bf16 is stored as bit patterns."""
        array = self.array(f"{record['id']}@{record['backend']}:{name}")
        if array is None:
            return None
        kind = record["arrays"][name]
        if kind == "bfloat16":
            return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if kind == "float16":
            return array.view(np.float16).astype(np.float64)
        return array.astype(np.float64)


def load(path: Path, label: str = "") -> Result:
    """A result file, checked; CompareError says what is wrong with it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CompareError(f"{path}: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        got = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise CompareError(f"{path}: schema {got!r} (wants {SCHEMA})")
    try:
        cases = {(r["id"], r["backend"]): r for r in data["cases"]}
        result = Result(path, data, label or str(data["leg"]), cases)
    except (KeyError, TypeError) as error:
        raise CompareError(f"{path}: not a result file ({type(error).__name__}: {error})") from None
    return result


# ---- timings ---------------------------------------------------------------------------------------------


def noise(seconds: Sequence[float]) -> tuple[float, float]:
    """(median, its relative standard error) of repeated calls, from the median absolute deviation."""
    median = float(statistics.median(seconds))
    if median <= 0 or len(seconds) < 2:
        return median, float("inf")
    spread = statistics.median(abs(s - median) for s in seconds) * 1.4826  # sigma of a normal distribution
    return median, 1.2533 * spread / len(seconds) ** 0.5 / median  # standard error of a median


def ratio_bound(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """(ratio of the medians a / b, by how much it may exceed 1 and still be noise)."""
    (ma, ea), (mb, eb) = noise(a), noise(b)
    if mb <= 0:
        return float("inf"), float("inf")
    floor = SHORT_FLOOR if mb < SHORT_SECONDS else TIME_FLOOR
    return ma / mb, max(floor, TIME_SIGMAS * (ea**2 + eb**2) ** 0.5)


# ---- what is compared ------------------------------------------------------------------------------------


def _leg_problems(result: Result) -> Iterator[Regression]:
    """What the leg itself says."""
    data = result.data
    problems = list(data.get("problems", []))
    if data.get("partial"):
        problems.append("the result is partial (made with --only, --no-tests or --no-cases)")
    if data.get("status") != "passed" and not problems:
        problems.append(f"status {data.get('status')!r} without a reason")
    if not (data.get("tests") or {}).get("passed") and not data.get("partial"):
        problems.append("no test has passed")
    for problem in problems:
        yield Regression("leg", result.label, "", str(problem))


def _coverage(results: Sequence[Result]) -> Iterator[Regression]:
    """A case that ran on another leg, in the same list, must have run here, for a backend that reads its layout."""
    legs = load_legs()
    everywhere = {r["id"] for x in results for r in x.data["cases"] if r["kind"] != "time"}
    in_default = {r["id"] for x in results if not x.data.get("long") for r in x.data["cases"]}
    for x in results:
        if x.leg in legs and not legs[x.leg].runs_cases:
            continue
        wanted = everywhere if x.data.get("long") else everywhere & in_default
        missing = sorted(wanted - {case for case, _ in x.cases})
        for case in missing[:20]:
            yield Regression("coverage", x.label, case, "did not run here, but on another leg")
        if len(missing) > 20:
            yield Regression("coverage", x.label, "", f"{len(missing) - 20} more cases did not run here")


def _groups(results: Sequence[Result], *kinds: str) -> dict[str, list[tuple[Result, dict[str, Any]]]]:
    """Records with status ok or failed that have been measured, by case, of every leg and backend."""
    found: dict[str, list[tuple[Result, dict[str, Any]]]] = defaultdict(list)
    for x in results:
        for (case, _), record in x.cases.items():
            if record["kind"] in kinds and "inputs" in record:
                found[case].append((x, record))
    return found


def _arbiter(
    group: Sequence[tuple[Result, dict[str, Any]]], value: str, trusted: Result | None = None
) -> tuple[Result, dict[str, Any]]:
    """The record that the others are measured against.

    That of ``trusted`` (a baseline), else the reference leg's unless it failed itself, else one of the majority. The
    reference comes before the majority because the kernel legs share their source: a fault in it is everywhere.
    """
    for x, record in group:
        if x is trusted or (trusted is None and x.leg == REFERENCE_LEG and record["status"] == "ok"):
            return x, record
    common = Counter(str(record.get(value)) for _, record in group).most_common(1)[0][0]
    return next((x, record) for x, record in group if str(record.get(value)) == common)


def _inputs(results: Sequence[Result], trusted: Result | None = None) -> Iterator[Regression]:
    for case, group in sorted(_groups(results, "store", "decode", "dequantize").items()):
        _, right = _arbiter(group, "inputs", trusted)
        for x, record in group:
            if record["inputs"] != right["inputs"]:
                yield Regression("inputs", x.label, case, "its inputs differ: results cannot be compared")


def _name(record: Mapping[str, Any]) -> str:
    return f"{record['id']} on {record['backend']}"


def _locate(x: Result, record: Mapping[str, Any], y: Result, right: Mapping[str, Any]) -> str:
    """Where two caches differ: count and first place, if the caches are there."""
    a = x.array(f"{record['id']}@{record['backend']}", ".bytes.npz")
    b = y.array(f"{right['id']}@{right['backend']}", ".bytes.npz")
    if a is None or b is None or a.shape != b.shape:
        return ""
    (where,) = np.nonzero(a != b)
    if not len(where):
        return ""
    first, stride = int(where[0]), int(record["layout"]["block_stride"])
    return (
        f"; {len(where)} of {len(a)} bytes, the first in block {first // stride} at byte {first % stride}: "
        f"0x{a[first]:02x} instead of 0x{b[first]:02x}"
    )


def _stores(results: Sequence[Result], trusted: Result | None = None) -> Iterator[Regression]:
    for _, group in sorted(_groups(results, "store").items()):
        y, right = _arbiter(group, "digest", trusted)
        for x, record in group:
            if record["inputs"] != right["inputs"]:
                continue
            if record.get("digest") != right.get("digest"):
                fields = [
                    n for n, d in right.get("fields", {}).items() if record.get("fields", {}).get(n) != d
                ] or ["pads or untouched bytes"]
                yield Regression(
                    "store", x.label, _name(record),
                    f"cache bytes differ from {y.label}'s ({right['backend']}) in "
                    f"{', '.join(fields)}{_locate(x, record, y, right)}",
                )  # fmt: skip
            elif record.get("nonfinite") != right.get("nonfinite"):
                yield Regression(
                    "store", x.label, _name(record),
                    f"counted {record.get('nonfinite')} non-finite vectors, {y.label} {right.get('nonfinite')}",
                )  # fmt: skip


def _gap(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], name: str) -> float:
    """Absolute error of an lse, else the relative L2 error; inf where not comparable."""
    if a.shape != b.shape:
        return float("inf")
    if name == "lse":
        if not np.array_equal(np.isneginf(a), np.isneginf(b)):
            return float("inf")
        seen = ~np.isneginf(b)
        gap = float(np.abs(a[seen] - b[seen]).max(initial=0.0))
    else:
        gap = float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))
    return gap if np.isfinite(gap) else float("inf")


def _outputs(
    results: Sequence[Result], worst: dict[str, float], trusted: Result | None = None
) -> Iterator[Regression]:
    """Outputs against the arbiter's. worst: largest share of the tolerance used, per leg, filled in.

    A baseline may have been stored without outputs (ci/baseline.py); then legs are only held against each other.
    """
    if trusted is not None and not trusted.path.with_suffix(".npz").exists():
        return
    for _, group in sorted(_groups(results, "decode", "dequantize").items()):
        y, right = _arbiter(group, "inputs", trusted)
        for x, record in group:
            if record is right or record["inputs"] != right["inputs"]:
                continue
            for name in record.get("arrays", {}):
                a, b = x.output(record, name), y.output(right, name)
                if a is None or b is None:
                    yield Regression("output", x.label, _name(record), f"no stored {name} to compare")
                    continue
                limit = LSE_LIMIT if name == "lse" else max(record["tolerance"], right["tolerance"])
                gap = _gap(a, b, name)
                worst[x.label] = max(worst.get(x.label, 0.0), gap / limit)
                if gap > limit:
                    yield Regression(
                        "output", x.label, _name(record),
                        f"{name} differs from {y.label}'s ({right['backend']}) by {gap:.2e} (limit {limit:.0e})",
                    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Timing:
    """One row of the timing table. bound: what is still noise, above 1. best: ratio of the fastest calls. judged:
    False where times are not comparable."""

    leg: str
    case: str
    new_s: float
    old_s: float
    ratio: float
    bound: float
    best: float
    judged: bool

    @property
    def slower(self) -> bool:
        """A regression: slower than noise explains, on the same device, in the median and in the best call."""
        return self.judged and min(self.ratio, self.best) > 1 + self.bound


def _same_device(a: Result, b: Result) -> bool:
    """Times are comparable: a real device, the same one."""
    names = [x.data.get("device", {}).get("name") for x in (a, b)]
    modes = {r.get("route", {}).get("mode") for x in (a, b) for r in x.cases.values() if "route" in r}
    return bool(names[0]) and names[0] == names[1] and modes == {"device"}


def _timings(new: Result, old: Result) -> Iterator[Timing]:
    judged = _same_device(new, old)
    for key, record in sorted(new.cases.items()):
        before = old.cases.get(key, {})
        if record.get("seconds") and before.get("seconds"):
            ratio, bound = ratio_bound(record["seconds"], before["seconds"])
            new_s, old_s = (noise(r["seconds"])[0] for r in (record, before))
            best = min(record["seconds"]) / max(min(before["seconds"]), 1e-12)
            yield Timing(new.label, _name(record), new_s, old_s, ratio, bound, best, judged)


def _counters(new: Result, old: Result) -> Iterator[Regression]:
    for key, record in sorted(new.cases.items()):
        before = old.cases.get(key, {}).get("counters", {})
        for name, count in record.get("counters", {}).items():
            was = before.get(name)
            if was is not None and count > was * (1 + COUNTER_FLOOR):
                yield Regression(
                    "counter", new.label, _name(record),
                    f"{name} rose from {was} to {count} ({count / was - 1 if was else float('inf'):+.1%})",
                )  # fmt: skip


def _compiled(new: Result, old: Result) -> Iterator[Regression]:
    """Registers, spills, scratch and LDS of the kernels that both compiled, and kernels that are compiled no more."""
    if not new.data.get("tests"):  # a partial result, which is a regression by itself
        return
    now = new.data.get("compiled", {})
    for kernel, before in sorted(old.data.get("compiled", {}).items()):
        if kernel not in now:
            if new.data.get("long") or not old.data.get("long"):
                yield Regression("coverage", new.label, kernel, "was not compiled, but was in the baseline")
            continue
        for name, count in now[kernel].items():
            was = before.get(name)
            if was is not None and count > was * (1 + COUNTER_FLOOR):
                yield Regression("resource", new.label, kernel, f"{name} rose from {was} to {count}")


def _lost(new: Result, old: Result) -> Iterator[Regression]:
    """Cases that ran in the baseline and do not now, on the same list."""
    if old.data.get("long") and not new.data.get("long"):
        return
    for key, before in sorted(old.cases.items()):
        now = new.cases.get(key)
        if before["status"] == "ok" and (now is None or now["status"] == "refused"):
            how = "did not run" if now is None else f"is refused: {now.get('why', '')}"
            yield Regression(
                "coverage", new.label, f"{key[0]} on {key[1]}", f"{how}, but ran in the baseline"
            )


@dataclass(slots=True)
class Comparison:
    """Everything the report shows."""

    results: list[Result]
    baselines: dict[str, Result]
    regressions: list[Regression]
    timings: list[Timing]
    cross: list[Timing]
    worst: dict[str, float]


def compare(results: Sequence[Result], baselines: Mapping[str, Result] | None = None) -> Comparison:
    """Compare ``results`` with each other, and each with the baseline of its leg, if there is one."""
    if len({x.label for x in results}) != len(results):
        raise CompareError("two results of the same leg (compare them as result and --baseline)")
    baselines = dict(baselines or {})
    worst: dict[str, float] = {}
    found = [r for x in results for r in _leg_problems(x)]
    for check in (_coverage, _inputs, _stores):
        found += check(results)
    found += _outputs(results, worst)
    timings: list[Timing] = []
    for x in results:
        if (old := baselines.get(x.leg)) is None:
            continue
        found += _lost(x, old)
        found += [*_inputs([x, old], old), *_stores([x, old], old), *_outputs([x, old], {}, old)]
        found += [*_counters(x, old), *_compiled(x, old)]
        timings += _timings(x, old)
    for t in timings:
        if t.slower:
            found.append(
                Regression(
                    "time", t.leg, t.case,
                    f"{t.ratio:.2f}x of the baseline's time ({t.new_s * 1e6:.1f} us, was {t.old_s * 1e6:.1f} us; "
                    f"up to {1 + t.bound:.2f}x is noise)",
                )
            )  # fmt: skip
    devices = [
        x for x in results if any(r.get("route", {}).get("mode") == "device" for r in x.cases.values())
    ]
    cross = [t for x in devices[1:] for t in _timings(x, devices[0]) if t.case.startswith("time/")]
    return Comparison(list(results), baselines, sorted(set(found)), timings, cross, worst)


# ---- report ----------------------------------------------------------------------------------------------


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(map(_cell, row))} |" for row in rows),
    ]


def _versions(data: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{n} {v}" for n, v in data.get("versions", {}).items() if n in ("torch", "triton", "flydsl")
    )


_TITLES: Final = {
    "leg": "A leg failed",
    "coverage": "Cases that did not run",
    "inputs": "Inputs that differ",
    "store": "Cache bytes that differ",
    "output": "Outputs out of tolerance",
    "time": "Slower than the baseline",
    "counter": "More instructions than the baseline",
    "resource": "More registers, spills or LDS than the baseline",
}


def _legs_table(c: Comparison) -> list[str]:
    bad = Counter(r.leg for r in c.regressions)
    rows = []
    for x in c.results:
        tests, status = x.data.get("tests") or {}, Counter(r["status"] for r in x.data["cases"])
        skips = tests.get("skipped", [])
        source = x.data.get("source", {})
        rows.append(
            (
                x.label,
                x.data.get("status"),
                bad[x.label] or "none",
                x.data.get("device", {}).get("name", "-"),
                f"{tests.get('passed', 0)} / {len(tests.get('failed', []))} / {len(skips)}",
                f"{status['ok']} / {status['failed']} / {status['refused']}",
                _versions(x.data),
                f"{source.get('commit', '')[:10] or '-'}{' + changes' if source.get('dirty') else ''}",
                f"{x.data.get('seconds', 0):.0f} s",
            )
        )
    head = (
        "leg",
        "status",
        "regressions",
        "device",
        "tests passed/failed/skipped",
        "cases ok/failed/refused",
    )
    return _table((*head, "versions", "commit", "time"), rows)


def _agreement(c: Comparison) -> list[str]:
    """How many store cases agree, and how far outputs are apart."""
    groups = _groups(c.results, "store")
    several = {case: group for case, group in groups.items() if len({x.label for x, _ in group}) > 1}
    same = sum(len({r.get("digest") for _, r in group}) == 1 for group in several.values())
    lines = [f"Store: {same} of {len(several)} cases that ran on several legs have identical cache bytes."]
    by_leg = []
    for x in c.results:
        shared = [case for case, group in several.items() if any(y is x for y, _ in group)]
        equal = sum(
            r.get("digest") == _arbiter(several[case], "digest")[1].get("digest")
            for case in shared for y, r in several[case] if y is x
        )  # fmt: skip
        count = sum(y is x for case in shared for y, _ in several[case])
        if count:
            used = f"{c.worst[x.label]:.0%}" if x.label in c.worst else "-"
            by_leg.append((x.label, f"{equal} of {count}", used))
    if by_leg:
        lines += ["", *_table(("leg", "store results equal", "largest part of the tolerance used"), by_leg)]
    return lines


def _timing_rows(timings: Sequence[Timing], limit: int) -> list[tuple[object, ...]]:
    shown = sorted(timings, key=lambda t: (not t.slower, -abs(np.log(max(t.ratio, 1e-9)))))[:limit]
    return [
        (
            t.leg,
            t.case,
            f"{t.new_s * 1e6:.1f}",
            f"{t.old_s * 1e6:.1f}",
            f"{t.ratio:.2f}",
            f"1 ± {t.bound:.2f}" if np.isfinite(t.bound) else "-",
            "slower" if t.slower else ("faster" if t.judged and t.ratio < 1 - t.bound else "-"),
        )
        for t in shown
    ]


def render(c: Comparison) -> str:
    """The report as markdown."""
    named = ", ".join(x.label for x in c.results)
    verdict = f"{len(c.regressions)} regressions" if c.regressions else "no regression"
    lines = [f"# Comparison of {named}: {verdict}", "", *_legs_table(c), "", *_agreement(c), ""]
    for kind, title in _TITLES.items():
        group = [r for r in c.regressions if r.kind == kind]
        if group:
            lines += [f"## {title}", "", *(f"- {_cell(r)}" for r in group), ""]
    without = [x.label for x in c.results if x.leg not in c.baselines]
    no_outputs = [
        x.label
        for x in c.baselines.values()
        if x.leg in {r.leg for r in c.results}
        and not x.path.with_suffix(".npz").exists()
        and any("arrays" in record for record in x.data["cases"])
    ]
    head = ("leg", "case", "us", "us before", "ratio", "noise", "verdict")
    if judged := [t for t in c.timings if t.judged]:
        lines += ["## Timings against the baseline", "", *_table(head, _timing_rows(judged, 40)), ""]
    for leg in dict.fromkeys(t.leg for t in c.timings if not t.judged):
        ratios = [t.ratio for t in c.timings if t.leg == leg and t.ratio > 0]
        mean = float(np.exp(np.mean(np.log(ratios)))) if ratios else 1.0
        remark = "no verdict, since that is not one and the same device."
        text = f"{leg}: {mean:.2f}x of the baseline's time in the mean of {len(ratios)} cases; {remark}"
        lines += [text, ""]
    if c.cross:
        lines += ["## Timings between devices (no verdict)", "", *_table(head, _timing_rows(c.cross, 40)), ""]
    if without:
        lines += [f"No baseline: {', '.join(without)}.", ""]
    if no_outputs:
        lines += [
            f"Stored without outputs, which were compared between legs only: {', '.join(no_outputs)}.",
            "",
        ]
    return "\n".join(lines)


# ---- command line ----------------------------------------------------------------------------------------


def _baselines(paths: Sequence[Path]) -> dict[str, Result]:
    found: dict[str, Result] = {}
    for path in paths:
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            result = load(file)
            result.label = f"{result.leg} (baseline)"
            found[result.leg] = result
    return found


def _expected(text: str) -> list[str]:
    legs = load_legs()
    names = [n.strip() for n in text.split(",") if n.strip()]
    if "all-hosted" in names:
        names.remove("all-hosted")
        names += [leg.name for leg in legs.values() if not leg.self_hosted]
    unknown = sorted(set(names) - set(legs))
    if unknown:
        raise MatrixError(f"--expect: no leg called {', '.join(unknown)}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE", help="result files of ci/run.sh")
    parser.add_argument(
        "--baseline", action="append", default=[], type=Path, metavar="PATH",
        help="a stored result file, or a folder of them; matched by leg (repeatable)",
    )  # fmt: skip
    parser.add_argument("--report", type=Path, help="write the markdown here (default: standard output)")
    parser.add_argument(
        "--expect", default="", metavar="LEGS",
        help="legs that must be among the results, with commas; all-hosted: all that need no hardware",
    )  # fmt: skip
    args = parser.parse_args(argv)
    try:
        expected = _expected(args.expect)
        results = [load(path) for path in args.results]
        comparison = compare(results, _baselines(args.baseline))
    except (CompareError, MatrixError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name in sorted(set(expected) - {x.leg for x in results}):
        comparison.regressions.insert(
            0, Regression("leg", name, "", "no result file: the leg did not finish")
        )
    report = render(comparison)
    if args.report is None:
        print(report)
    else:
        args.report.write_text(report, encoding="utf-8")
        print(report.splitlines()[0].lstrip("# "))
        for regression in comparison.regressions[:20]:
            print(f"  {regression}")
    return 1 if comparison.regressions else 0


if __name__ == "__main__":
    sys.exit(main())
