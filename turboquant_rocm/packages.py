"""Optional packages: are they there, in which version, and can they be imported without harm?

Nothing here imports a package in this process unless it is known to fail politely: a probe reads the
distribution's metadata first, and imports in a subprocess where a failed import can abort (FlyDSL does when an
instruction or a library is missing). What went wrong is kept as the text of the refusal.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Final

from .spec import SpecError

__all__ = ["OWNERS", "Environment", "installed_version", "owners", "probe", "satisfies"]

PROBE_SECONDS: Final = 60.0
_IMPORTED: Final = "imported"
"""What the subprocess prints after the import; a package that exits with status 0 does not get there."""

OWNERS: Final = MappingProxyType(
    {
        "triton": ("triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton", "triton-windows"),
        "torch": ("torch",),
        "flydsl": ("flydsl",),
    }
)
"""Distributions that are known to install an import name. Reading them all would cost 100 ms and more."""


def _numbers(version: str) -> tuple[int, ...]:
    """The release numbers of ``version``: 3.9.0+rocm7.0 is (3, 9, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    if found is None:
        raise SpecError("version", version, "numbers separated by dots")
    return tuple(int(part) for part in found.group().split("."))


def satisfies(version: str, wants: str) -> bool:
    """True if ``version`` meets every bound of ``wants`` (``">=0.5,<0.6"``; >=, <=, <, >, ==, !=).

    Only release numbers are compared; local and pre-release parts are ignored, since vendors put their own there.
    """
    got = _numbers(version)
    for bound in filter(None, (part.strip() for part in wants.split(","))):
        match = re.match(r"(>=|<=|==|!=|<|>)\s*(.+)", bound)
        if match is None:
            raise SpecError("version range", wants, "bounds like >=0.5,<0.6")
        operator, limit = match.group(1), _numbers(match.group(2))
        width = max(len(got), len(limit))
        a, b = (n + (0,) * (width - len(n)) for n in (got, limit))
        passes = {">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, "<": a < b, ">": a > b}
        if not passes[operator]:
            return False
    return True


def _serves(version: str, wants: str) -> bool:
    """:func:`satisfies`, False for what has no numbers: a package's own mistake is a reason against it, no error."""
    return re.match(r"\d", version) is not None and satisfies(version, wants)


def owners(import_name: str) -> dict[str, str]:
    """Installed distributions that own ``import import_name``, with their versions. More than one is trouble."""
    import importlib.metadata  # slow to import, and rarely asked for

    found = {}
    for name in OWNERS.get(import_name, (import_name,)):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def installed_version(import_name: str) -> str | None:
    """Version of the first distribution that owns ``import_name``, or None. Imports nothing."""
    return next(iter(owners(import_name).values()), None)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _import_isolated(name: str) -> str | None:
    """What happened when a subprocess imported ``name``: None if it went well."""
    try:
        run = subprocess.run(
            [sys.executable, "-c", f"import {name}; print(); print({_IMPORTED!r})"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"import does not return within {PROBE_SECONDS:.0f} s"
    except OSError as error:
        return f"import could not be tried: {error}"
    if run.returncode == 0 and _IMPORTED in run.stdout.splitlines():
        return None
    detail = _last_line(run.stderr) or _last_line(run.stdout)
    if run.returncode < 0:
        return f"import aborts the process (signal {-run.returncode}): {detail}".rstrip(": ")
    return f"import fails: {detail or f'exit status {run.returncode}'}"


def _import_here(name: str) -> str | None:
    try:
        importlib.import_module(name)
    except BaseException as error:  # whatever a broken package raises is a reason, never ours to pass on
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"import fails: {type(error).__name__}: {_last_line(str(error))}"
    return None


@cache
def probe(name: str, version: str = "", isolated: bool = False) -> str | None:
    """None if ``name`` can be imported in a version that meets ``version``, else what is wrong with it.

    isolated: import in a subprocess. The answer is kept for the life of the process; ``probe.cache_clear()``
    forgets it.
    """
    import importlib.util

    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError) as error:
        return f"import fails: {type(error).__name__}: {error}"
    if spec is None:
        return "not installed"
    found = installed_version(name)
    if version and found is not None and not _serves(found, version):
        return f"{name} {found}"
    problem = _import_isolated(name) if isolated else _import_here(name)
    if problem is not None:
        return f"{name} {found}: {problem}" if found else problem
    if version and found is None:
        reported = getattr(sys.modules.get(name), "__version__", None)
        if not isinstance(reported, str):
            return f"{name} of unknown version"
        if not _serves(reported, version):
            return f"{name} {reported}"
    return None


@dataclass(frozen=True, slots=True)
class Environment:
    """Which packages there are, where that is not to be probed.

    overrides: import name -> None (installed, in a version that serves), or the problem with it. What is not named
    is probed on this machine's own target, and taken to be installed on any other.
    """

    overrides: Mapping[str, str | None] = field(default_factory=lambda: MappingProxyType({}), hash=False)

    def problem(self, name: str, version: str, *, local: bool, isolated: bool) -> str | None:
        """None if ``name`` serves, else what is wrong with it."""
        if name in self.overrides:
            return self.overrides[name]
        return probe(name, version, isolated) if local else None

    def with_(self, name: str) -> Environment:
        """A copy in which ``name`` is installed in a version that serves."""
        return Environment(MappingProxyType({**self.overrides, name: None}))

    def without(self, name: str) -> Environment:
        """A copy in which ``name`` is not installed."""
        return Environment(MappingProxyType({**self.overrides, name: "not installed"}))
