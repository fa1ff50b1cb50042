"""Where a run was made: device, versions, commit. Imports torch only where it is asked for the device."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..spec import Target
from .records import Machine

__all__ = ["commit", "machine", "versions"]

_PACKAGE = Path(__file__).resolve().parent.parent


def _git(*args: str) -> str:
    done = subprocess.run(
        ["git", *args], cwd=_PACKAGE, capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()


def commit() -> str:
    """Commit of the checkout that runs, with ``-dirty`` if files differ from it; ``unknown`` outside of one."""
    try:
        top = Path(_git("rev-parse", "--show-toplevel"))
        if _PACKAGE.parent != top:  # installed inside somebody else's repository
            return "unknown"
        return _git("rev-parse", "HEAD") + ("-dirty" if _git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def versions() -> dict[str, str]:
    """Versions of what a time depends on, as far as it is installed."""
    found = {"turboquant_rocm": __version__, "python": platform.python_version()}
    import torch

    found["torch"] = torch.__version__
    if torch.version.hip:
        found["hip"] = torch.version.hip
    elif torch.version.cuda:
        found["cuda"] = torch.version.cuda
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        pass
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["flydsl"] = importlib.metadata.version("flydsl")
    return found


def machine(target: Target, device: Any, argv: Sequence[str], known_commit: str | None = None) -> Machine:
    """This machine. known_commit: where the files that run carry no history of their own."""
    smoke = device.type == "cpu"
    name = f"CPU, {platform.machine()}" if smoke else target.name
    return Machine(
        device=name,
        arch=target.arch,
        commit=known_commit or commit(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=shlex.join(["python", "-m", "turboquant_rocm.bench", *argv]),
        versions=versions(),
        smoke=smoke,
    )
