"""Wheel, sdist and editable install, built from a clean copy and tried in environments that see nothing else.

An environment here holds what the wheel declares (numpy, pyyaml, rich and what those declare), as links to the
distributions of the running interpreter, so the test needs no network and an undeclared import fails.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.repository import PARTS, ROOT, files, modules, pure_modules

requirements = pytest.importorskip("packaging.requirements")
pytest.importorskip("build")
pytest.importorskip("setuptools")


def run(*command: str | Path, cwd: Path) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=cwd, env=clean, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git has, symlinks as symlinks: no build folder or cache of the working tree gets in."""
    copy = tmp_path_factory.mktemp("checkout")
    for path in files():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, copy / path, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def dists(checkout: Path) -> dict[str, Path]:
    """The sdist of the copy, and the wheel built from that sdist."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", checkout / "dist", ".", cwd=checkout)
    wheel, sdist = sorted((checkout / "dist").iterdir(), key=lambda p: p.suffix != ".whl")
    return {"wheel": wheel, "sdist": sdist}


def declared(dist: str, seen: dict[str, importlib.metadata.Distribution]) -> None:
    """Adds ``dist`` and, recursively, what it requires on this platform without extras."""
    found = importlib.metadata.distribution(dist)
    if found.metadata["Name"] in seen:
        return
    seen[found.metadata["Name"]] = found
    for text in found.requires or ():
        need = requirements.Requirement(text)
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            declared(need.name, seen)


def link_distributions(names: list[str], into: Path) -> None:
    """Links to every top-level file and folder of the distributions ``names`` and of what they require."""
    seen: dict[str, importlib.metadata.Distribution] = {}
    for name in names:
        declared(name, seen)
    for found in seen.values():
        for top in {Path(f).parts[0] for f in found.files or () if not str(f).startswith("..")} - {
            "__pycache__"
        }:
            link = into / top
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))))


class Environment:
    """A virtual environment without pip; packages are put in by the interpreter that runs the tests."""

    def __init__(self, at: Path) -> None:
        venv.create(at, symlinks=True)
        self.python = at / "bin" / "python"
        self.home = at
        self.site = Path(
            run(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=at).strip()
        )

    def pip_install(self, *args: str | Path, cwd: Path) -> None:
        command = (sys.executable, "-m", "pip", "--python", self.python, "install", "--no-deps", "--no-index")
        run(*command, "--disable-pip-version-check", *args, cwd=cwd)

    def imports(self, names: tuple[str, ...]) -> None:
        code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
        code += "import turboquant_rocm; print(turboquant_rocm.__file__)"
        self.location = Path(run(self.python, "-c", code, *names, cwd=self.home).splitlines()[-1])


def runtime_requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        meta = Parser().parsestr(archive.read(name).decode())
    needs = [requirements.Requirement(text) for text in meta.get_all("Requires-Dist", [])]
    return [n.name for n in needs if n.marker is None or n.marker.evaluate({"extra": ""})]


def test_wheel_holds_every_file_once(dists: dict[str, Path]):
    with zipfile.ZipFile(dists["wheel"]) as archive:
        names = archive.namelist()
    assert len(names) == len(set(names))
    held = {n for n in names if ".dist-info/" not in n}
    wanted = set()
    for path in files():
        for part, at in PARTS.items():
            inside = (ROOT / path).is_relative_to(at) and not (ROOT / path).is_symlink()
            if inside and (path.suffix in (".py", ".yaml", ".json") or path.name == "py.typed"):
                wanted.add("/".join((*part.split("."), *(ROOT / path).relative_to(at).parts)))
    assert held == wanted
    assert any(n.endswith("/licenses/LICENSE") for n in names)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_sdist_builds_the_same_wheel(checkout: Path, dists: dict[str, Path], tmp_path: Path):
    """The wheel of `dists` was built from the sdist; here is one that was built from the checkout itself."""
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, ".", cwd=checkout)
    (direct,) = tmp_path.glob("*.whl")
    assert direct.name == dists["wheel"].name
    ours, theirs = contents(direct), contents(dists["wheel"])
    assert sorted(ours) == sorted(theirs)
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_sdist_ships_no_tests(checkout: Path, dists: dict[str, Path]):
    """They need the whole checkout; a part of them would only fail."""
    assert (checkout / "tests" / "test_backend_contract.py").exists()
    with tarfile.open(dists["sdist"]) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    assert "pyproject.toml" in names
    assert not [n for n in names if n.split("/")[0] in ("tests", "ci", "docs", "examples")]


USER = """
from turboquant_rocm import (
    BoundLayer, Decision, LayerSpec, Policy, Target, __version__, bind, decide, make_layout, preset_names
)

layer: LayerSpec = LayerSpec(index=0, num_heads=32, num_kv_heads=8, head_size=128)
policy = Policy(force="torch_reference", layout="soa")
decision: Decision = decide(layer, Target("cpu", "cpu"), preset_names()[0], 16, policy)
bound: BoundLayer = bind(decision)
nbytes: int = make_layout("soa", "turboquant_4bit_nc", 128, 8, 16).block_stride
version: str = __version__
"""


def test_a_strictly_typed_user_sees_the_public_names(dists: dict[str, Path], tmp_path: Path):
    """Against the installed wheel: its py.typed counts, and every public name is exported explicitly."""
    pytest.importorskip("mypy")
    env = Environment(tmp_path / "env")
    env.pip_install(dists["wheel"], cwd=tmp_path)
    public = run(env.python, "-c", "import turboquant_rocm as t; print(*t.__all__)", cwd=env.home).split()
    imports = "".join(f"from turboquant_rocm import {name} as _{i}\n" for i, name in enumerate(public))
    (tmp_path / "user.py").write_text(USER + imports)
    mypy = (sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--ignore-missing-imports")
    mypy += ("--python-executable", env.python, "--cache-dir", tmp_path / "cache")
    assert "Success" in run(*mypy, "user.py", cwd=tmp_path)
    (tmp_path / "user.py").write_text(USER.replace("version: str", "version: int"))
    with pytest.raises(AssertionError, match="Incompatible types"):
        run(*mypy, "user.py", cwd=tmp_path)


def test_wheel_imports_with_what_it_declares(dists: dict[str, Path], tmp_path: Path):
    env = Environment(tmp_path / "env")
    needs = runtime_requirements(dists["wheel"])
    assert not {"torch", "triton", "flydsl"} & set(needs)
    link_distributions(needs, env.site)
    env.pip_install(dists["wheel"], cwd=tmp_path)
    env.imports(pure_modules())
    assert env.location.is_relative_to(env.home)
    out = run(env.python, "-c", "import turboquant_rocm as t; print(len(t.preset_names()))", cwd=env.home)
    assert int(out) >= 4, "the data files of configs/ are not found"
    missing = subprocess.run([env.python, "-c", "import torch"], capture_output=True, check=False)
    assert missing.returncode, "this environment is not clean: it has torch"


def test_wheel_imports_every_module_with_the_frameworks(dists: dict[str, Path], tmp_path: Path):
    pytest.importorskip("torch")
    env = Environment(tmp_path / "env")
    env.pip_install(dists["wheel"], cwd=tmp_path)
    rest = [p for p in sys.path if p and Path(p).name in ("site-packages", "dist-packages")]
    (env.site / "rest.pth").write_text("\n".join(rest) + "\n")
    optional = (
        []
        if importlib.util.find_spec("triton")
        else ["turboquant_rocm.backends._triton", "turboquant_rocm.bench.kernels"]
    )
    optional += [] if importlib.util.find_spec("flydsl") else ["turboquant_rocm.backends._flydsl"]
    optional += [] if importlib.util.find_spec("vllm") else ["turboquant_rocm.integrations.vllm"]
    optional += (
        [] if importlib.util.find_spec("transformers") else ["turboquant_rocm.integrations.transformers"]
    )
    env.imports(tuple(m for m in modules() if not m.startswith(tuple(optional) or "-")))
    assert env.location.is_relative_to(env.home)


def test_editable_install(checkout: Path, dists: dict[str, Path], tmp_path: Path):
    """Imports from outside the checkout lead into it, for each part of the tree."""
    env = Environment(tmp_path / "env")
    link_distributions([*runtime_requirements(dists["wheel"]), "setuptools", "wheel"], env.site)
    env.pip_install("--no-build-isolation", "-e", checkout, cwd=tmp_path)
    env.imports(pure_modules())
    assert env.location.is_relative_to(checkout)
    code = "import turboquant_rocm.{0} as m; print(m.__file__)"
    for part in ("backends", "layouts", "configs"):
        lies = Path(run(env.python, "-c", code.format(part), cwd=env.home).strip())
        assert lies.resolve() == (checkout / part / "__init__.py").resolve()
