"""The checkout itself: symlinks, packages, top level, pins, and nothing that only exists on one machine."""

from __future__ import annotations

import re
import subprocess
import tomllib
from functools import cache
from typing import Any

import pytest
import yaml

from tests.repository import PARTS, ROOT, files, folder, packages

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")

TOP_LEVEL = {
    "backends", "layouts", "configs", "turboquant_rocm", "tests", "ci", "docs", "examples", "constraints",
    "pyproject.toml", "Makefile", "README.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in",
    ".ci", ".github", ".gitignore", ".pre-commit-config.yaml",
}  # fmt: skip
"""The root listing is the architecture: a new name here is a decision, made in this line."""

# Absolute paths of home, build and mount folders.
MACHINE_PATH = re.compile(r"""(?<![\w.:/<>{}$-])/(?:home|Users|root|work|mnt|scratch|private)/[\w.-]+""")


@cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_symlinks_are_committed_as_symlinks():
    listed = subprocess.run(
        ["git", "ls-files", "-s", "turboquant_rocm"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    links = {line.split("\t")[1] for line in listed.splitlines() if line.startswith("120000")}
    assert links == {f"turboquant_rocm/{name}" for name in ("backends", "configs", "layouts")}
    for link in links:
        assert (ROOT / link).resolve() == ROOT / link.split("/")[1], f"{link} leads elsewhere"


def test_every_package_is_listed():
    assert sorted(project()["tool"]["setuptools"]["packages"]) == list(packages())


def test_package_dirs_are_the_parts():
    mapped = project()["tool"]["setuptools"]["package-dir"]
    assert {name: ROOT / path for name, path in mapped.items()} == PARTS


def test_every_python_file_is_in_a_package():
    """A folder without __init__.py would be missing from the wheel."""
    known = {folder(name) for name in packages()}
    for path in files():
        if path.suffix == ".py" and path.parts[0] in ("turboquant_rocm", "backends", "layouts", "configs"):
            assert ROOT / path.parent in known, f"{path}: its folder has no __init__.py"


def test_top_level():
    assert {path.parts[0] for path in files()} <= TOP_LEVEL


def test_no_machine_paths():
    found = []
    for path in files():
        if path.suffix in (".npz", ".png") or (ROOT / path).is_symlink():
            continue
        for number, line in enumerate((ROOT / path).read_text(errors="replace").splitlines(), 1):
            if MACHINE_PATH.search(line) and path.name != "test_repo.py":
                found.append(f"{path}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def test_frameworks_are_never_hard_dependencies():
    names = {re.split(r"[^\w-]", d)[0].lower() for d in project()["project"]["dependencies"]}
    assert names == {"numpy", "pyyaml", "rich"}


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "constraints" / name).read_text().splitlines()
    found = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {re.sub(r"[-_.]+", "-", key).lower(): version for key, version in found.items()}


def test_hooks_use_the_pinned_tools():
    """One pin per tool: the git hooks and `make lint` give the same verdict."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    every = {**pins("torch.txt"), **pins("tools.txt")}
    for repo in hooks["repos"]:
        assert repo["repo"] == "local"
        for hook in repo["hooks"]:
            for requirement in hook.get("additional_dependencies", ()):
                name, version = requirement.split("==")
                key = re.sub(r"[-_.]+", "-", name).lower()
                assert every.get(key, version) == version, f"hook {hook['id']}: {requirement}"


def test_pins_lie_in_the_declared_ranges():
    version = pytest.importorskip("packaging.specifiers")
    requirement = pytest.importorskip("packaging.requirements")
    meta = project()["project"]
    every = {**pins("torch.txt"), **pins("kernels.txt"), **pins("tools.txt")}
    declared = [
        *meta["dependencies"],
        *(d for extra in meta["optional-dependencies"].values() for d in extra),
    ]
    for text in declared:
        parsed = requirement.Requirement(text)
        key = re.sub(r"[-_.]+", "-", parsed.name).lower()
        if key in every:
            assert every[key] in version.SpecifierSet(str(parsed.specifier)), f"{text} and pin {every[key]}"


def test_license_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
