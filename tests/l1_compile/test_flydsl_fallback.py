"""A FlyDSL that is missing, of another version, broken, or ends its process: the layer gets the next backend, once.

The broken ones are packages called ``flydsl`` that stand before the real one where the compiling process imports from.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the next backend is in Triton")

from turboquant_rocm import Code, Decision, IneligibleError, LayerSpec, Policy, Target, bind, decide
from turboquant_rocm import dispatch as dispatch_module
from turboquant_rocm.backends import CompileError
from turboquant_rocm.backends._flydsl import offline, runtime
from turboquant_rocm.backends._flydsl import ops as flydsl_ops
from turboquant_rocm.backends._flydsl.config import RowConfig
from turboquant_rocm.backends._flydsl.offline import Job
from turboquant_rocm.packages import Environment, probe
from turboquant_rocm.target import get_target

NC4 = "turboquant_4bit_nc"
LAYER = LayerSpec(0, 64, 8, 128)
INSTALLED = Environment().with_("flydsl").with_("triton")
ARCHES = ("gfx942", "gfx950")

RAISES = "raise RuntimeError('libbroken.so: undefined symbol')"
ABORTS = """
import os, sys
print("LLVM ERROR: Cannot select: intrinsic", file=sys.stderr, flush=True)
print("Stack dump: 0. Program arguments", file=sys.stderr, flush=True)
os.abort()
"""
HANGS = "import time; time.sleep(60)"


@dataclass
class Broken:
    """A package ``flydsl`` that notes each import of it in a file and then does what ``body`` says."""

    folder: Path

    def install(self, body: str) -> None:
        package = self.folder / "flydsl"
        package.mkdir()
        note = f"open({str(self.folder / 'imports')!r}, 'a').write('x')\n"
        (package / "__init__.py").write_text(note + body)

    @property
    def imports(self) -> int:
        """How often a process has imported it."""
        path = self.folder / "imports"
        return len(path.read_text()) if path.exists() else 0


@pytest.fixture(params=ARCHES)
def arch(request: pytest.FixtureRequest) -> str:
    """Every test runs for both targets."""
    return str(request.param)


@pytest.fixture
def name(arch: str) -> str:
    """The backend's."""
    return f"flydsl_{arch}"


@pytest.fixture
def here(arch: str) -> Target:
    """A machine with that GPU."""
    return replace(get_target(arch), local=True)


@pytest.fixture
def prepare(arch: str) -> Job:
    """The smallest kernel."""
    return ("prepare", RowConfig(arch, 8, "bf16"))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arch: str) -> None:
    """No handles, failures, answers or caches of other tests."""
    monkeypatch.setattr(flydsl_ops, "device_runtime", runtime.DeviceRuntime())
    monkeypatch.setattr(dispatch_module, "_answers", type(dispatch_module._answers)())
    monkeypatch.setenv("FLYDSL_RUNTIME_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FLYDSL_GPU_ARCH", arch)
    monkeypatch.delenv("FLYDSL_RUNTIME_ENABLE_CACHE", raising=False)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Broken:
    folder = tmp_path / "path"
    folder.mkdir()
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    return Broken(folder)


def chosen(here: Target, **policy: Any) -> Decision:
    """The decision for the layer, which without its kernels having been tried is FlyDSL's."""
    decision = decide(LAYER, here, NC4, 16, Policy(**policy), environment=INSTALLED)
    assert decision.backend == f"flydsl_{here.arch}"
    return decision


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        pytest.param(RAISES, ["exit status 1", "RuntimeError: libbroken.so: undefined symbol"], id="raises"),
        pytest.param(ABORTS, ["ended by signal 6", "LLVM ERROR: Cannot select"], id="aborts"),
    ],
)
def test_broken_compiler(
    here: Target, name: str, broken: Broken, caplog: pytest.LogCaptureFixture, body: str, texts: list[str]
):
    """The refusal has the compiler's text; one process is started and one line logged for all layers of a kind."""
    broken.install(body)
    decisions = [replace(chosen(here), layer=replace(LAYER, index=i)) for i in range(3)]
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger=dispatch_module.__name__):
        bounds = [bind(decision) for decision in decisions]
    for i, bound in enumerate(bounds):
        assert bound.backend == "triton_soa"
        assert bound.decision.layer.index == i
        assert bound.layout.name == "soa"
        (why,) = bound.decision.refused[name]
        assert why.code is Code.COMPILE
        assert all(text in str(why) for text in texts)
        assert "\n" not in str(why)
        assert bound.decision.fell_back
    assert broken.imports == 1
    (record,) = caplog.records
    assert record.name == dispatch_module.__name__
    assert all(text in record.getMessage() for text in texts)


def test_no_end(here: Target, name: str, broken: Broken, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offline, "TIMEOUT", 0.5)
    broken.install(HANGS)
    bound = bind(chosen(here))
    assert bound.backend == "triton_soa"
    assert "no end within" in str(bound.decision.refused[name])


def test_not_loaded(here: Target, name: str, monkeypatch: pytest.MonkeyPatch):
    """What compiles elsewhere can still fail to load here; that is an answer too."""
    monkeypatch.setattr(runtime, "compile_ahead", lambda jobs: None)
    monkeypatch.setitem(sys.modules, "flydsl", None)
    monkeypatch.delitem(sys.modules, f"{flydsl_ops.__package__}.compile", raising=False)
    for module in [n for n in sys.modules if n.startswith("flydsl.")]:
        monkeypatch.delitem(sys.modules, module)
    bound = bind(chosen(here))
    assert bound.backend == "triton_soa"
    assert "not loaded" in str(bound.decision.refused[name])


@pytest.mark.parametrize(
    "policy",
    [lambda _: {"allow_fallback": False}, lambda n: {"force": n}, lambda n: {"require": frozenset({n})}],
    ids=["no-fallback", "force", "require"],
)
def test_policy_that_allows_nothing_else(
    here: Target, name: str, broken: Broken, policy: Callable[[str], dict[str, Any]]
):
    broken.install(RAISES)
    with pytest.raises(IneligibleError, match="libbroken") as caught:
        bind(chosen(here, **policy(name)))
    assert Code.COMPILE in {why.code for why in caught.value.refused[name]}
    assert isinstance(caught.value.__context__, CompileError)


def test_made_by_hand(here: Target, broken: Broken):
    """Nobody's policy allows another backend than the one that was ordered."""
    broken.install(RAISES)
    with pytest.raises(IneligibleError, match="libbroken"):
        bind(replace(chosen(here), policy=None))


def test_other_targets_compile_nothing(arch: str, name: str, broken: Broken):
    """Binding for a GPU that is not here, as tests and the simulator do, starts no compiler."""
    broken.install(RAISES)
    decision = decide(LAYER, get_target(arch), NC4, 16, Policy(), environment=INSTALLED)
    assert bind(decision).backend == name
    assert broken.imports == 0


def test_a_failed_call_raises_what_was_told(prepare: Job, broken: Broken):
    """Kernels that bind did not try (queries of another dtype): CompileError, and one process only."""
    broken.install(RAISES)
    device = runtime.DeviceRuntime()
    for _ in range(2):
        with pytest.raises(CompileError, match="libbroken"):
            device.handle(*prepare)
    assert broken.imports == 1


def test_missing_package(here: Target, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "flydsl", None)  # for find_spec: there is none
    probe.cache_clear()
    try:
        decision = decide(LAYER, here, NC4, 16, Policy())
    finally:
        probe.cache_clear()
    assert "not installed" in str(decision.refused[name])
    assert bind(decision).backend == "triton_soa"


@pytest.mark.parametrize(
    ("body", "texts"),
    [(RAISES, ["import fails", "libbroken"]), (ABORTS, ["aborts the process (signal 6)"])],
    ids=["raises", "aborts"],
)
def test_import_that_fails(here: Target, name: str, broken: Broken, monkeypatch: pytest.MonkeyPatch, body: str,
                           texts: list[str]):  # fmt: skip
    """Found by the dispatcher's probe, in a process of its own, before anything is bound."""
    pytest.importorskip("flydsl", reason="FlyDSL is not installed", exc_type=ImportError)
    broken.install(body)
    monkeypatch.syspath_prepend(str(broken.folder))
    probe.cache_clear()
    try:
        decision = decide(LAYER, here, NC4, 16, Policy())
    finally:
        probe.cache_clear()
    assert all(text in str(decision.refused[name]) for text in texts), decision.refused[name]
    bound = bind(decision)
    assert bound.backend == "triton_soa"
    assert bound.layout.name == "soa"


def test_wrong_version(here: Target, name: str, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("flydsl", reason="FlyDSL is not installed", exc_type=ImportError)
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda of: "0.4.9" if of == "flydsl" else version(of))
    probe.cache_clear()
    try:
        decision = decide(LAYER, here, NC4, 16, Policy())
    finally:
        probe.cache_clear()
    assert "flydsl 0.4.9 (wants flydsl>=0.5,<0.6)" in str(decision.refused[name][0])
    assert bind(decision).backend == "triton_soa"


def test_the_disk_cache_answers_for_other_processes(
    prepare: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A kernel that an earlier process has compiled starts no process; a lost cache or another version does."""
    pytest.importorskip("flydsl", reason="FlyDSL is not installed", exc_type=ImportError)
    monkeypatch.setenv("ROCM_PATH", offline.toolchain(tmp_path / "rocm"))
    started = []
    run = subprocess.run

    def counted(*args: Any, **more: Any) -> Any:
        started.append(args)
        return run(*args, **more)

    monkeypatch.setattr(subprocess, "run", counted)
    offline.compile_ahead([prepare])
    assert len(started) == 1
    assert list((tmp_path / "cache").glob("**/*.pkl")), "FlyDSL has kept nothing"
    offline.compile_ahead([prepare])
    assert len(started) == 1

    monkeypatch.setattr(subprocess, "run", lambda *args, **more: started.append(args) or run(["true"]))
    with monkeypatch.context() as patch:
        patch.setattr(offline, "installed_version", lambda name: "0.5.99")
        offline.compile_ahead([prepare])
        assert len(started) == 2
    shutil.rmtree(tmp_path / "cache")
    offline.compile_ahead([prepare])
    assert len(started) == 3
    monkeypatch.setenv("FLYDSL_RUNTIME_ENABLE_CACHE", "0")
    offline.compile_ahead([prepare])
    offline.compile_ahead([prepare])
    assert len(started) == 5
