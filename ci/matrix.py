"""The GitHub Actions matrix of ``configs/ci_matrix.yaml``.

    python -m ci.matrix                          the hosted legs, as JSON for `strategy.matrix`
    python -m ci.matrix --hardware mi300,nvidia  those hardware legs as well: a repository lists what it has
    python -m ci.matrix --legs sim-gfx942        only these
    python -m ci.matrix --list                   a table for people

A hardware leg without a runner would wait in the queue for ever, and a self-hosted runner must not run the code of
strangers' pull requests: so hardware legs are in the matrix only where --hardware names them, and never for the
events of NO_HARDWARE.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ci.legs import Leg, MatrixError, load_legs

__all__ = ["NO_HARDWARE", "entries", "main", "select"]

NO_HARDWARE: Final = ("pull_request", "pull_request_target")
"""Events whose code may come from anybody."""


def select(
    legs: Mapping[str, Leg], hardware: Iterable[str] = (), only: Iterable[str] = (), event: str = ""
) -> list[Leg]:
    """The legs to run. hardware: hardware legs that have a runner. only: of these, if any is named."""
    hardware, only = list(hardware), list(only)
    unknown = sorted({*hardware, *only} - set(legs))
    if unknown:
        raise MatrixError(f"no leg called {', '.join(unknown)} (there are {', '.join(legs)})")
    hosted = sorted(name for name in hardware if not legs[name].self_hosted)
    if hosted:
        raise MatrixError(f"--hardware: {', '.join(hosted)} needs no hardware")
    if event in NO_HARDWARE:
        hardware = []
    there = [leg for leg in legs.values() if not leg.self_hosted or leg.name in hardware]
    absent = sorted(set(only) - {leg.name for leg in there})
    if absent:
        raise MatrixError(f"{', '.join(absent)}: no runner here (wants --hardware, and not a pull request)")
    return [leg for leg in there if not only or leg.name in only]


def entries(legs: Iterable[Leg]) -> list[dict[str, Any]]:
    """One matrix entry for each leg: what the workflow reads as ``matrix.*``."""
    return [
        {"leg": leg.name, "title": leg.title, "runner": list(leg.runner), "timeout": leg.timeout_minutes,
         "self_hosted": leg.self_hosted}
        for leg in legs
    ]  # fmt: skip


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hardware", default="", metavar="LEGS", help="hardware legs with a runner, with commas"
    )
    parser.add_argument("--legs", default="", help="only these, separated by commas")
    parser.add_argument("--event", default="", help="GitHub event: pull requests get no hardware legs")
    parser.add_argument("--list", action="store_true", help="a table for people")
    args = parser.parse_args(argv)
    try:
        legs = load_legs()
        if args.list:
            for leg in legs.values():
                print(f"{leg.name:18}{'hardware' if leg.self_hosted else 'hosted':10}{leg.title}")
            return 0
        chosen = select(legs, _names(args.hardware), _names(args.legs), args.event)
    except MatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"include": entries(chosen)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
