"""Tiers, opt-in marks, and the ``backend`` fixture: what a skip means, and when it is a failure.

A test that needs a backend takes the ``backend`` fixture, runs once for each registered backend, and asks it for a
bound layer. Where the backend cannot serve that layer here, the test is skipped and the skip text is the refusal, so
`pytest -rs` reads like an eligibility report. A CI leg that exists to test one backend passes --require-backend NAME:
then a skip of any of its tests is a failure, and so is a run in which none of them passed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from turboquant_rocm import Decision, IneligibleError, LayerSpec, Policy, Target, decide
from turboquant_rocm.backends import Backend, backends, get_backend
from turboquant_rocm.dispatch import ENVIRONMENT_VARIABLES
from turboquant_rocm.layouts import LAYOUT_NAMES

try:
    import hypothesis
except ImportError:  # a machine that brings its own packages may lack it; its tests say so themselves
    pass
else:
    # No deadlines: machines are shared. In CI the same examples every time, so that red means changed code.
    hypothesis.settings.register_profile("local", deadline=None)
    hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

OPT_IN = ("slow", "vllm", "model")
"""Marks whose tests run only with --run-MARK."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("turboquant_rocm")
    for mark in OPT_IN:
        group.addoption(f"--run-{mark}", action="store_true", help=f"also run the tests marked {mark}")
    group.addoption(
        "--require-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="a skipped test of this backend is a failure, and so is a run without a passing one (repeatable)",
    )


def pytest_configure(config: pytest.Config) -> None:
    for name in ENVIRONMENT_VARIABLES:  # the policy of somebody's shell is no part of a test
        os.environ.pop(name, None)
    for name in config.getoption("--require-backend"):
        try:
            get_backend(name)
        except ValueError as error:
            raise pytest.UsageError(f"--require-backend: {error}") from None


INTERPRETED = Path(__file__).parent / "l1_interpret"


def _wants_interpreted(config: pytest.Config) -> bool:
    named = (Path(config.invocation_params.dir, arg.partition("::")[0]).resolve() for arg in config.args)
    return os.environ.get("TRITON_INTERPRET") == "1" or any(p.is_relative_to(INTERPRETED) for p in named)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Interpreted kernels run in a process of their own: Triton decides once whether it compiles or interprets."""
    return True if collection_path == INTERPRETED and not _wants_interpreted(config) else None


def pytest_report_header(config: pytest.Config) -> str | None:
    if _wants_interpreted(config):
        return None
    return "tests/l1_interpret is left out: it runs on its own, make test-interpret"


# ---- tiers -------------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks each test with its tier, from its folder, and leaves out what nobody opted in to."""
    root = Path(__file__).parent
    kept, left_out = [], []
    for item in items:
        folder = item.path.relative_to(root).parts[0] if item.path.is_relative_to(root) else ""
        if folder[:2] in ("l0", "l1", "l2"):
            item.add_marker(folder[:2])
        if folder == "l2_device":
            item.add_marker("device")
        wanted = all(config.getoption(f"--run-{m}") for m in OPT_IN if item.get_closest_marker(m))
        (kept if wanted else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("device"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no GPU that torch can see")


# ---- the backend fixture -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def device() -> str:
    """Where tensors live: "cuda" (so torch calls ROCm devices too) if there is a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def target(device: str) -> Target:
    """The target that backends are chosen for; a folder's conftest.py may override it."""
    if device == "cpu":
        return Target("cpu", "cpu")
    from turboquant_rocm.target import detect

    return detect()


@dataclass(frozen=True)
class BackendUnderTest:
    """One registered backend on this machine."""

    declaration: Backend
    target: Target
    device: str

    @property
    def name(self) -> str:
        return self.declaration.name

    def decide(self, layer: LayerSpec, preset: str, block_size: int, layout: str | None = None) -> Decision:
        """The decision that forces this backend. Skips the test, with every refusal, if it is not eligible."""
        try:
            return decide(layer, self.target, preset, block_size, Policy(force=self.name, layout=layout))
        except IneligibleError as error:
            pytest.skip(f"{self.name}: {', '.join(map(str, error.refused[self.name]))}")

    def bind(
        self, layer: LayerSpec, preset: str, block_size: int, layout: str | None = None, **options: Any
    ) -> Any:
        """A BoundLayer of this backend; skips like :meth:`decide`."""
        from turboquant_rocm import bind

        bound = bind(self.decide(layer, preset, block_size, layout), **options)
        assert bound.backend == self.name, "another backend than the forced one was bound"
        return bound


def _layouts(backend: Backend) -> tuple[str, ...]:
    return LAYOUT_NAMES if backend.layout == "any" else (backend.layout,)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for mark in metafunc.definition.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        if "backend" in (name.strip() for name in names):
            return  # the test says itself which ones
    if {"backend", "layout"} <= set(metafunc.fixturenames):  # each backend with the layouts that it reads
        pairs = [(b.name, layout) for b in backends() for layout in _layouts(b)]
        metafunc.parametrize(("backend", "layout"), pairs, indirect=["backend"])
    elif "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", [b.name for b in backends()], indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest, target: Target, device: str) -> BackendUnderTest:
    """Each registered backend in turn."""
    return BackendUnderTest(get_backend(request.param), target, device)


# ---- no leg goes green by skipping -------------------------------------------------------------------------


def _backend_of(item: pytest.Item) -> str | None:
    """Name of the backend that a test exercises: its ``backend`` parameter, or its mark."""
    callspec = getattr(item, "callspec", None)
    if callspec is not None and "backend" in callspec.params:
        return str(callspec.params["backend"])
    mark = item.get_closest_marker("backend")
    return str(mark.args[0]) if mark else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    name = _backend_of(item)
    if name in item.config.getoption("--require-backend"):
        report.user_properties.append(("required backend", name))
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            report.outcome = "failed"
            report.longrepr = f"--require-backend {name}: {reason}"
    return report  # type: ignore[return-value]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run in which nothing was tested fails: everything skipped, or no test of a required backend."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is None or hasattr(session.config, "workerinput") or session.exitstatus != pytest.ExitCode.OK:
        return
    terminal.ensure_newline()
    ran = [r for key in ("passed", "xfailed") for r in terminal.stats.get(key, ())]
    if not ran and terminal.stats.get("skipped"):
        terminal.write_line("no test ran: every one was skipped", red=True)
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
    tested = {name for r in ran for key, name in r.user_properties if key == "required backend"}
    for name in session.config.getoption("--require-backend"):
        if name not in tested:
            terminal.write_line(f"--require-backend {name}: no test of it has passed", red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
