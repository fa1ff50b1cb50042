"""Store result files of ci/run.sh as baselines: `python -m ci.baseline results/*.json`.

Only a leg that passed, in full and on a clean commit, is stored. What changes from run to run and is never compared is
left out: the skips' reasons and the cost of each case. Outputs (LEG.npz) go along for hardware legs only: those of the
others are compared between legs, and anybody can make them again. Exit codes: 0 stored, 1 refused, 2 not a result file.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ci.compare import CompareError, load
from ci.legs import ROOT, MatrixError, load_legs

__all__ = ["FOLDER", "main", "refusals", "trimmed"]

FOLDER: Final = ROOT / "ci" / "baselines"
_COST: Final = ("wall_s", "cpu_s")


def refusals(data: Mapping[str, Any]) -> list[str]:
    """Why a result may not become a baseline; empty if it may."""
    found = []
    if data.get("status") != "passed":
        found.append(f"status={data.get('status')!r} (wants passed)")
    if data.get("partial"):
        found.append("partial (wants a run without --only, --no-tests and --no-cases)")
    source = data.get("source") or {}
    if not source.get("commit"):
        found.append("no commit in it (made outside git: give --commit)")
    elif source.get("dirty"):
        found.append("made with uncommitted changes (wants a clean commit)")
    return found


def trimmed(data: Mapping[str, Any]) -> dict[str, Any]:
    """The result without what is never compared."""
    tests = {name: n for name, n in (data.get("tests") or {}).items() if name in ("passed", "xfailed")}
    cases = [{name: x for name, x in record.items() if name not in _COST} for record in data["cases"]]
    return {**data, "tests": tests, "cases": cases}


def _text(data: Mapping[str, Any]) -> str:
    """JSON with a case or a kernel to a line, so that a changed one is a changed line."""
    parts = []
    for name, value in data.items():
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(json.dumps(x) for x in value) + "\n]"
        elif name == "compiled" and value:
            text = "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(x)}" for k, x in value.items()) + "\n}"
        else:
            text = json.dumps(value)
        parts.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code. Nothing is stored if one file is refused."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.baseline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE", help="result files of ci/run.sh")
    parser.add_argument("--into", type=Path, default=FOLDER, help="folder (default: ci/baselines)")
    parser.add_argument(
        "--commit", default="", help="40 hex digits: what was run, for results made outside git"
    )
    args = parser.parse_args(argv)
    if args.commit and not re.fullmatch(r"[0-9a-f]{40}", args.commit):
        parser.error(f"--commit {args.commit} (wants 40 hex digits)")
    try:
        legs = load_legs()
        results = [load(path) for path in args.results]
    except (CompareError, MatrixError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    refused = False
    for result in results:
        if args.commit and not result.data.get("source"):
            result.data["source"] = {"commit": args.commit, "dirty": False}
        reasons = refusals(result.data)
        if result.leg not in legs:
            reasons.append(f"no leg called {result.leg}")
        for reason in reasons:
            print(f"error: {result.path}: {reason}", file=sys.stderr)
        refused |= bool(reasons)
    if refused:
        return 1
    args.into.mkdir(parents=True, exist_ok=True)
    for result in results:
        path = args.into / f"{result.leg}.json"
        path.write_text(_text(trimmed(result.data)), encoding="utf-8")
        outputs = path.with_suffix(".npz")
        outputs.unlink(missing_ok=True)
        if legs[result.leg].self_hosted and result.path.with_suffix(".npz").exists():
            shutil.copyfile(result.path.with_suffix(".npz"), outputs)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
