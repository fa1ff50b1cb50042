"""What tests of the repository itself share: its files, its modules, and which of them may need a framework."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PARTS = {
    "turboquant_rocm": ROOT / "turboquant_rocm",
    "turboquant_rocm.backends": ROOT / "backends",
    "turboquant_rocm.configs": ROOT / "configs",
    "turboquant_rocm.layouts": ROOT / "layouts",
}
"""Where each part of the package lies: setuptools' package-dir, and the symlinks."""

FRAMEWORKS = ("torch", "triton", "flydsl", "vllm", "transformers")

HEAVY = (
    "turboquant_rocm.backends._",  # the kernels; declarations beside them are pure
    "turboquant_rocm.accuracy",
    "turboquant_rocm.bench.baselines",
    "turboquant_rocm.bench.inputs",
    "turboquant_rocm.bench.kernels",
    "turboquant_rocm.bench.measure",
    "turboquant_rocm.bench.models",
    "turboquant_rocm.bench.timing",
    "turboquant_rocm.bench.tune",
    "turboquant_rocm.comparison",
    "turboquant_rocm.compressed_store",
    "turboquant_rocm.continuation",
    "turboquant_rocm.evaluation.attention",
    "turboquant_rocm.evaluation.compare",
    "turboquant_rocm.evaluation.schemes",
    "turboquant_rocm.integrations.",
    "turboquant_rocm.layouts.convert",
    "turboquant_rocm.layouts.views",
    "turboquant_rocm.ops",
    "turboquant_rocm.paper",
    "turboquant_rocm.quantizers",
)
"""Prefixes of modules that may import a framework when they are imported. Everything else must not."""


@cache
def files() -> tuple[Path, ...]:
    """Files of the checkout that git tracks or would: relative paths, symlinks not followed."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = (Path(p) for p in listed.stdout.split("\0") if p)
    return tuple(sorted(p for p in paths if (ROOT / p).exists() or (ROOT / p).is_symlink()))


@cache
def packages() -> tuple[str, ...]:
    """Every package that lies in the checkout: each folder with an __init__.py."""
    found = []
    for name, folder in PARTS.items():
        for init in folder.rglob("__init__.py"):
            inner = init.parent.relative_to(folder).parts
            if name == "turboquant_rocm" and inner and inner[0] in ("backends", "configs", "layouts"):
                continue  # through the symlink: listed under its own part
            found.append(".".join((name, *inner)))
    return tuple(sorted(found))


@cache
def modules() -> tuple[str, ...]:
    """Every module of the package, packages included."""
    found = set(packages())
    for package in packages():
        for path in folder(package).glob("*.py"):
            if path.stem not in ("__init__", "__main__"):
                found.add(f"{package}.{path.stem}")
    return tuple(sorted(found))


def folder(package: str) -> Path:
    """Where ``package`` lies in the checkout."""
    part = max((p for p in PARTS if package == p or package.startswith(p + ".")), key=len)
    return PARTS[part].joinpath(*package.removeprefix(part).split(".")[1:])


def pure_modules() -> tuple[str, ...]:
    """Modules that import without any framework."""
    return tuple(m for m in modules() if not m.startswith(HEAVY))
