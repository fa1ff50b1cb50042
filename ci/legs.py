"""The legs of ``configs/ci_matrix.yaml`` as checked, frozen values. Needs only PyYAML.

A leg is one way of running the same cases and its own tests: a mode (how kernels are executed), a target (for which
architecture they are chosen), the backends that it exists to test, and the runner that it needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from turboquant_rocm.presets import parse_yaml
from turboquant_rocm.spec import SpecError

__all__ = ["MATRIX", "MODES", "ROOT", "Leg", "MatrixError", "MaySkip", "load_legs"]

ROOT: Final = Path(__file__).resolve().parent.parent
MATRIX: Final = ROOT / "configs" / "ci_matrix.yaml"
MODES: Final = ("reference", "interpret", "compile", "simulate", "device")
VENDORS: Final = ("nvidia", "amd")
_LEG_NAME: Final = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class MatrixError(ValueError):
    """The matrix file is wrong; the message names the leg and the field."""


@dataclass(frozen=True, slots=True)
class MaySkip:
    """A skip that is no failure. pattern: regular expression searched in "test: reason". why: for the reader."""

    pattern: str
    why: str


@dataclass(frozen=True, slots=True)
class Leg:
    """One leg.

    title: for people. mode: one of MODES. target: arch that kernels are chosen for ("local": of the GPU that is
    there). backends: what the leg exists to test; "all" means that every case whose bytes the backend reads must
    run on it, a number that at least so many cases must (for backends with a narrow profile, whose refusals are
    then recorded). tests: paths given to pytest. deselect: tests with this in their name are another leg's.
    require_in_tests: pytest is told to require the backends too (for tests with the `backend` fixture). may_skip: the
    only skips that are no failures. vendor, arches: what the device must be. environment: set before anything is
    imported. runner: GitHub runner labels; "self-hosted" among them makes it a hardware leg.
    """

    name: str
    title: str
    mode: str
    target: str
    tests: tuple[str, ...]
    runner: tuple[str, ...]
    timeout_minutes: int
    backends: Mapping[str, str | int] = field(default_factory=dict)
    deselect: str = ""
    require_in_tests: bool = False
    may_skip: tuple[MaySkip, ...] = ()
    vendor: str = ""
    arches: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def self_hosted(self) -> bool:
        """True if the leg needs a machine that its owner provides."""
        return "self-hosted" in self.runner

    @property
    def runs_cases(self) -> bool:
        """True if the leg executes kernels (the compile leg only makes them)."""
        return self.mode != "compile"


def _check(leg: Leg) -> None:
    wrong: list[str] = []
    if not _LEG_NAME.fullmatch(leg.name):
        wrong.append("its name (wants lower-case words joined by dashes)")
    if leg.mode not in MODES:
        wrong.append(f"mode={leg.mode!r} (wants one of {', '.join(MODES)})")
    if not leg.tests:
        wrong.append("tests (wants at least one path: a leg without tests proves nothing)")
    if leg.runs_cases and not leg.backends:
        wrong.append("backends (wants at least one: the leg executes kernels)")
    for name, how in leg.backends.items():
        if how != "all" and (isinstance(how, bool) or not isinstance(how, int) or how < 1):
            wrong.append(f"backends {name}={how!r} (wants all, or a number of cases >= 1)")
    if not leg.runner:
        wrong.append("runner (wants at least one label)")
    if (leg.mode == "device") != bool(leg.vendor) or leg.vendor not in ("", *VENDORS):
        wrong.append(f"vendor={leg.vendor!r} (wants {' or '.join(VENDORS)} with mode device, else none)")
    if (leg.mode == "device") != (leg.target == "local"):
        wrong.append(f"target={leg.target!r} (wants local with mode device, else an arch)")
    if isinstance(leg.timeout_minutes, bool) or not 1 <= leg.timeout_minutes <= 360:
        wrong.append(f"timeout_minutes={leg.timeout_minutes!r} (wants 1 to 360)")
    for skip in leg.may_skip:
        try:
            re.compile(skip.pattern)
        except re.error as error:
            wrong.append(f"may_skip {skip.pattern!r} ({error})")
    if wrong:
        raise MatrixError(f"leg {leg.name}: " + "; ".join(wrong))


def _leg(name: str, data: Any) -> Leg:
    if not isinstance(data, dict):
        raise MatrixError(f"leg {name}: {type(data).__name__} (wants a mapping)")
    known = {f.name for f in fields(Leg)} - {"name"}
    unknown = sorted(set(data) - known)
    missing = sorted({"title", "mode", "target", "tests", "runner", "timeout_minutes"} - set(data))
    if unknown or missing:
        raise MatrixError(f"leg {name}: unknown fields {unknown}, missing fields {missing}")
    values = dict(data)
    for key in ("tests", "runner", "arches"):
        values[key] = tuple(values.get(key, ()))
    try:
        values["may_skip"] = tuple(MaySkip(**skip) for skip in values.get("may_skip", ()))
    except TypeError as error:
        raise MatrixError(f"leg {name}: may_skip ({error})") from None
    values["backends"] = MappingProxyType(dict(values.get("backends") or {}))
    values["environment"] = MappingProxyType(
        {k: str(v) for k, v in (values.get("environment") or {}).items()}
    )
    leg = Leg(name=name, **values)
    _check(leg)
    return leg


def load_legs(path: Path = MATRIX) -> Mapping[str, Leg]:
    """All legs by name, in the order of the file; MatrixError names what is wrong with it."""
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"), path.name)
    except (OSError, SpecError) as error:
        raise MatrixError(f"{path.name}: {error}") from None
    if not isinstance(data, dict) or data.get("version") != 1 or not isinstance(data.get("legs"), dict):
        raise MatrixError(f"{path.name}: wants version: 1 and a mapping legs")
    return MappingProxyType({str(name): _leg(str(name), leg) for name, leg in data["legs"].items()})
