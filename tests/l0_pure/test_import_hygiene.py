"""Importing the package must stay cheap and must not need a GPU stack: each check in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.repository import FRAMEWORKS, ROOT, pure_modules


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)


def loaded_by(code: str) -> str:
    done = run(f"{code}\nimport sys; print('loaded:', *sorted(set(sys.modules) & set({FRAMEWORKS!r})))")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_package_loads_no_framework():
    assert loaded_by("import turboquant_rocm") == "loaded:"


def test_pure_modules_load_no_framework():
    assert len(pure_modules()) > 10
    assert loaded_by("\n".join(f"import {name}" for name in pure_modules())) == "loaded:"


def test_registry_loads_no_framework():
    code = "from turboquant_rocm.backends import backends; assert len(backends()) >= 1"
    assert loaded_by(code) == "loaded:"


def test_a_decision_loads_no_framework():
    code = (
        "from turboquant_rocm import IneligibleError, LayerSpec, Target, decide\n"
        "try: decide(LayerSpec(0, 8, 2, 128), Target('cpu', 'cpu'), 'turboquant_4bit_nc', 16)\n"
        "except IneligibleError: pass\n"
    )
    assert loaded_by(code) == "loaded:"


def test_pure_modules_import_where_no_framework_exists():
    block = f"import sys\nfor name in {FRAMEWORKS!r}: sys.modules[name] = None\n"
    done = run(block + "\n".join(f"import {name}" for name in pure_modules()))
    assert done.returncode == 0, done.stderr


def test_every_public_name_resolves():
    pytest.importorskip("torch")
    done = run("import turboquant_rocm as t\nfor name in t.__all__: getattr(t, name)")
    assert done.returncode == 0, done.stderr


def test_public_names_are_those_that_load():
    import turboquant_rocm

    assert sorted(turboquant_rocm.__all__) == sorted([*turboquant_rocm._PUBLIC, "__version__"])


@pytest.mark.parametrize("name", ["backends", "layouts"])
def test_bare_name_is_refused(name: str):
    """`import backends` at the repository root would register everything a second time."""
    done = run(f"import {name}")
    assert done.returncode != 0
    assert f"import it as 'turboquant_rocm.{name}'" in done.stderr
