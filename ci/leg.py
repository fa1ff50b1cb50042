"""Run one leg of the matrix and write its result file: `ci/run.sh LEG` ends here.

    ci/run.sh LEG [--long] [--jobs N] [--out DIR] [--only TEXT] [--no-tests] [--no-cases]

First the leg's own tests (pytest), then the cases that every leg shares (ci/caselist.py), in processes of their own.
The leg fails if a test or a case fails, if one is skipped that may not be, if nothing ran, if a backend it exists to
test did not run, or if a process died. DIR/LEG.json says which, with versions, device, routes, digests, timings and
counters; LEG.npz beside it holds the outputs, LEG.bytes.npz the caches. --only, --no-tests and --no-cases are for
trying things: such a result says that it is partial, and ci/compare.py does not take it for a pass.

Exit codes: 0 passed, 1 failed, 2 bad arguments, 3 this machine cannot run the leg.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ci.legs import ROOT, Leg, MatrixError, load_legs

__all__ = ["SCHEMA", "TestReport", "environment", "judge_cases", "judge_tests", "main", "read_junit"]

SCHEMA: Final = 1
DISTRIBUTIONS: Final = (
    "torch", "triton", "pytorch-triton-rocm", "pytorch-triton", "triton-rocm", "flydsl", "numpy", "hypothesis",
    "pytest", "ml_dtypes",
)  # fmt: skip
CASE_SECONDS: Final = 3600.0

TestReport = dict[str, Any]


def environment(leg: Leg, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the leg's processes see: nothing of the caller's that changes a decision or how Triton compiles."""
    kept = {
        name: value
        for name, value in (os.environ if base is None else base).items()
        if not name.startswith(("TURBOQUANT_ROCM_", "TRITON_"))
        or name in ("TRITON_CACHE_DIR", "TRITON_PTXAS_PATH")
    }
    kept.update({"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TURBOQUANT_CI_LEG": leg.name})
    kept.update({"TURBOQUANT_CI_TARGET": leg.target, **leg.environment})
    return kept


# ---- tests -----------------------------------------------------------------------------------------------


def _node_id(case: ET.Element) -> str:
    return f"{case.get('classname', '')}::{case.get('name', '')}"


def _no_tests() -> TestReport:
    return {"passed": 0, "xfailed": 0, "failed": [], "skipped": [], "seconds": 0.0, "compiled": {}}


def read_junit(path: Path) -> TestReport:
    """What a JUnit file of pytest says: counts, failures with their first line, skips with their reasons.

    compiled: what tests recorded as properties "kernel:NAME" (tests/l1_compile/conftest.py): registers, spills, LDS.
    """
    report = _no_tests()
    for case in ET.parse(path).getroot().iter("testcase"):
        report["seconds"] += float(case.get("time", 0))
        for entry in case.iter("property"):
            kind, _, name = (entry.get("name") or "").partition(":")
            if kind == "kernel":
                report["compiled"][name] = json.loads(entry.get("value") or "{}")
        bad = [e for tag in ("failure", "error") for e in case.iter(tag)]
        skipped = case.find("skipped")
        if bad:
            text = (bad[0].get("message") or bad[0].text or "").strip()
            report["failed"].append(
                {"test": _node_id(case), "why": text.splitlines()[0][:300] if text else ""}
            )
        elif skipped is not None and skipped.get("type") == "pytest.xfail":
            report["xfailed"] += 1
        elif skipped is not None:
            report["skipped"].append({"test": _node_id(case), "why": (skipped.get("message") or "")[:300]})
        else:
            report["passed"] += 1
    report["seconds"] = round(report["seconds"], 2)
    return report


def judge_tests(leg: Leg, report: TestReport, exit_code: int, known_backends: Iterable[str]) -> list[str]:
    """Everything that makes the leg's tests a failure, as sentences. Marks each skip as allowed or not.

    Exit code 5 (no test collected) needs no line of its own: then none has passed.
    """
    problems = [f"test failed: {f['test']}: {f['why']}" for f in report["failed"]]
    others = set(known_backends) - set(leg.backends)
    for skip in report["skipped"]:
        why = skip["why"]
        skip["allowed"] = any(re.match(rf"{re.escape(name)}:", why) for name in others) or any(
            re.search(allowed.pattern, f"{skip['test']}: {why}") for allowed in leg.may_skip
        )
        if not skip["allowed"]:
            problems.append(f"test skipped: {skip['test']}: {why}")
    if not report["passed"]:
        problems.append("no test has passed: a leg that tests nothing fails")
    if exit_code not in (0, 1, 5) or (exit_code == 1 and not report["failed"]):
        problems.append(f"pytest ended with exit code {exit_code}")
    return problems


def _pytest(leg: Leg, python: str, jobs: int, long: bool, folder: Path) -> tuple[TestReport, int]:
    junit = folder / "junit.xml"
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-rfE",
        "-p",
        "no:cacheprovider",
        f"--junitxml={junit}",
        *leg.tests,
    ]
    if leg.require_in_tests:
        command += [f"--require-backend={name}" for name in leg.backends]
    if leg.deselect:
        command += ["-k", f"not {leg.deselect}"]
    if long:
        command.append("--run-slow")
    if jobs > 1 and importlib.util.find_spec("xdist"):
        command += ["-n", str(jobs), "--dist", "worksteal"]
    if not importlib.util.find_spec("pytest_timeout"):
        # Its option and its mark are unknown then, which our strict settings make an error.
        command += ["-o", "addopts=--import-mode=importlib"]
    print("+ " + " ".join(command[1:]), flush=True)
    code = subprocess.run(command, cwd=ROOT, env=environment(leg), check=False).returncode
    if not junit.exists():
        return _no_tests(), code
    return read_junit(junit), code


# ---- cases -----------------------------------------------------------------------------------------------


def judge_cases(leg: Leg, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Everything that makes the leg's cases a failure, as sentences."""
    problems = []
    for r in records:
        name = f"{r['id']} on {r['backend']}"
        if r["status"] == "failed":
            problems.append(f"case failed: {name}: {r.get('why', '')}")
        elif r["status"] == "refused" and leg.backends.get(r["backend"]) == "all":
            problems.append(f"case refused: {name}: {r.get('why', '')}")
    ran = Counter(r["backend"] for r in records if r["status"] == "ok")
    for backend, how in leg.backends.items():
        least = 1 if how == "all" else int(how)
        if ran[backend] < least:
            problems.append(f"{backend}: {ran[backend]} cases ran (wants at least {least})")
    return problems


def _cases(
    leg: Leg, python: str, jobs: int, args: argparse.Namespace, folder: Path
) -> tuple[dict[str, Any], list[str]]:
    """All shards; (device facts and records, problems)."""
    command = [python, "-m", "ci.runner", leg.name, "--only", args.only]
    command += ["--long"] if args.long else []
    if leg.mode == "device":
        if jobs > 1:
            _compile_ahead(leg, command, jobs, folder)
        jobs = 1
    command += ["--repeats", str(args.repeats)]
    print(f"+ {' '.join(command[1:])} ({jobs} processes)", flush=True)
    outs = [folder / f"shard{i}" for i in range(jobs)]
    running = [
        subprocess.Popen(
            [*command, "--out", str(out), "--shard", f"{i}/{jobs}"], cwd=ROOT, env=environment(leg),
            stdout=subprocess.PIPE if not args.verbose else None, text=True,
        )
        for i, out in enumerate(outs)
    ]  # fmt: skip
    problems: list[str] = []
    try:
        _wait(running, problems)
    finally:
        for process in running:
            process.kill()
    found: dict[str, Any] = {"device": {}, "cases": []}
    for out in outs:
        if out.with_suffix(".json").exists():
            shard = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
            found["device"] = shard["device"]
            found["cases"] += shard["cases"]
    found["cases"].sort(key=lambda r: (r["id"], r["backend"]))
    return found, problems


def _compile_ahead(leg: Leg, command: Sequence[str], jobs: int, folder: Path) -> None:
    """Run the cases once on ``jobs`` processes, so that Triton's cache holds their kernels, and forget the results.

    What counts runs afterwards in one process: times would suffer from company. Faults show there too.
    """
    print(f"+ the same {jobs} times side by side first, to compile", flush=True)
    running = [
        subprocess.Popen(
            [*command, "--repeats", "0", "--out", str(folder / f"ahead{i}"), "--shard", f"{i}/{jobs}"], cwd=ROOT,
            env=environment(leg), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for i in range(jobs)
    ]  # fmt: skip
    try:
        for process in running:
            process.wait(timeout=CASE_SECONDS)
    except subprocess.TimeoutExpired:
        print("compiling ahead did not end in time", flush=True)
    finally:
        for process in running:
            process.kill()


def _wait(running: Sequence[subprocess.Popen[str]], problems: list[str]) -> None:
    """Wait for the shards; print what they say about cases that are not ok, and note which shard died."""
    for i, process in enumerate(running):
        try:
            output, _ = process.communicate(timeout=CASE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        for line in (output or "").splitlines():
            if not line.startswith(("ok", "refused")):  # a refusal that matters is a problem of the leg
                print(line)
        if process.returncode == 3:
            raise SystemExit(3)
        if process.returncode:
            last = (output or "").strip().splitlines()[-1:] or [""]
            problems.append(
                f"shard {i} of the cases died with {process.returncode}; its last line: {last[0]}"
            )


def _merge_npz(folder: Path, suffix: str, target: Path) -> None:
    import numpy as np

    arrays: dict[str, Any] = {}
    for part in sorted(folder.glob(f"shard*{suffix}")):
        if part.name.count(".") == suffix.count("."):
            with np.load(part, allow_pickle=False) as data:
                arrays.update({name: data[name] for name in data.files})
    target.unlink(missing_ok=True)
    if arrays:
        np.savez_compressed(target, **arrays)


# ---- facts -----------------------------------------------------------------------------------------------


def _git(*args: str) -> str:
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _source() -> dict[str, Any]:
    """The commit, and whether the tree differs from it; empty where there is no git (a copied tree)."""
    commit = _git("rev-parse", "HEAD")
    return (
        {"commit": commit, "dirty": bool(_git("status", "--porcelain", "--untracked-files=no"))}
        if commit
        else {}
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _machine() -> dict[str, Any]:
    return {"system": platform.system(), "machine": platform.machine(), "cores": os.cpu_count() or 0}


# ---- command line ----------------------------------------------------------------------------------------


def _known_backends() -> list[str]:
    from turboquant_rocm.backends import backends

    return [b.name for b in backends()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ci/run.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("leg", help="name of a leg in configs/ci_matrix.yaml")
    parser.add_argument("--long", action="store_true", help="the long list of cases, and the slow tests")
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(8, os.cpu_count() or 1),
        help="processes (a device's timed cases: always one)",
    )
    parser.add_argument("--repeats", type=int, default=-1, help="timed calls (default 9 on a device, else 2)")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="folder of the result files")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this (partial)")
    parser.add_argument("--no-tests", action="store_true", help="no pytest (partial)")
    parser.add_argument("--no-cases", action="store_true", help="no cases (partial)")
    parser.add_argument("--verbose", action="store_true", help="a line for each case")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        legs = load_legs()
        if args.leg not in legs:
            raise MatrixError(f"no leg called {args.leg} (there are {', '.join(legs)})")
    except MatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    leg = legs[args.leg]
    if args.repeats < 0:
        args.repeats = {"device": 9, "reference": 2}.get(leg.mode, 0)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the shards are ended too
    try:
        return _run(leg, args)
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _run(leg: Leg, args: argparse.Namespace) -> int:
    """Run the leg and write its result file; returns the exit code."""
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.time()
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "leg": leg.name,
        "status": "failed",
        "partial": bool(args.only or args.no_tests or args.no_cases),
        "long": args.long,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(start)),
        "source": _source(),
        "versions": _versions(),
        "machine": _machine(),
        "device": {},
        "backends": dict(leg.backends),
        "problems": [],
        "tests": None,
        "cases": [],
        "compiled": {},
    }
    problems: list[str] = result["problems"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if leg.runs_cases and not args.no_cases:  # first: it finds out whether this is the right machine
            found, died = _cases(leg, sys.executable, args.jobs, args, folder)
            result.update(found)
            problems += died + judge_cases(leg, found["cases"])
            _merge_npz(folder, ".npz", args.out / f"{leg.name}.npz")
            _merge_npz(folder, ".bytes.npz", args.out / f"{leg.name}.bytes.npz")
            result["cases_seconds"] = round(time.time() - start, 1)
            result["cases_cpu_seconds"] = round(sum(r.get("cpu_s", 0.0) for r in found["cases"]), 1)
        if not args.no_tests:
            began = time.time()
            report, code = _pytest(leg, sys.executable, args.jobs, args.long, folder)
            problems += judge_tests(leg, report, code, _known_backends())
            result["compiled"] = dict(sorted(report.pop("compiled").items()))
            if leg.mode == "compile" and not result["compiled"]:
                problems.append("no compiled kernel was recorded: a leg that compiles nothing fails")
            result["tests"] = report
            result["tests_seconds"] = round(time.time() - began, 1)
    result["status"] = "failed" if problems else "passed"
    result["seconds"] = round(time.time() - start, 1)
    path = args.out / f"{leg.name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    _summary(result, path)
    return 1 if problems else 0


def _summary(result: Mapping[str, Any], path: Path) -> None:
    tests, cases = result["tests"] or {}, Counter(r["status"] for r in result["cases"])
    for problem in result["problems"][:40]:
        print(f"  {problem}")
    if len(result["problems"]) > 40:
        print(f"  ... and {len(result['problems']) - 40} more in the result file")
    skipped = tests.get("skipped", [])
    print(
        f"leg {result['leg']}: {result['status']}{' (partial)' if result['partial'] else ''} in "
        f"{result['seconds']:.0f} s; tests: {tests.get('passed', 0)} passed, {len(tests.get('failed', []))} failed, "
        f"{len(skipped)} skipped ({sum(s['allowed'] for s in skipped)} of them allowed); "
        f"cases: {cases['ok']} ok, {cases['failed']} failed, {cases['refused']} refused; {path}"
    )


if __name__ == "__main__":
    sys.exit(main())
