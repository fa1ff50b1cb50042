"""Decode kernels compiled for AMD and NVIDIA without a GPU: no spills, no scratch, LDS under the limit whatever the
global knobs say (pitfall 22), packed codes read in words or wider, matrix instructions there. Prints a table.

By default a few kernels of every kind; --run-slow compiles the whole product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from tests.compile_checks import ARCHES, Built, Spec, build, problems, specs  # noqa: E402
from turboquant_rocm.backends import triton_aos, triton_soa  # noqa: E402

DECLARED = {"soa": triton_soa, "aos": triton_aos}
DEFAULT = list(specs(full=False))
REST = [s for s in dict.fromkeys(specs(full=True)) if s not in DEFAULT]
ROWS: list[tuple[str, Spec, Built]] = []


@pytest.fixture(scope="module", autouse=True)
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return
    shown = Table(title="decode kernels")
    for name in ("arch", "kernel", "registers", "spills", "scratch", "LDS", "matrix", "loads"):
        shown.add_column(name)
    for arch, spec, b in ROWS:
        numbers = (b.registers, b.spills, b.scratch, b.lds, b.matrix)
        shown.add_row(arch, str(spec), *map(str, numbers), " ".join(b.loads))
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        Console(width=200).print(shown)


def _check(arch: str, spec: Spec, record: Callable[..., None], knobs: str = "") -> None:
    built = build(arch, spec)
    ROWS.append((arch, spec, built))
    record(arch, f"{spec}{knobs}", **built.numbers)
    assert not problems(arch, spec, built)


@pytest.mark.parametrize("spec", DEFAULT, ids=str)
@pytest.mark.parametrize("arch", ARCHES)
def test_compiles_clean(arch, spec, record_kernel):
    _check(arch, spec, record_kernel)


@pytest.mark.slow
@pytest.mark.parametrize("spec", REST, ids=str)
@pytest.mark.parametrize("arch", ARCHES)
def test_compiles_clean_all(arch, spec, record_kernel):
    _check(arch, spec, record_kernel)


@pytest.mark.parametrize("async_copy", [False, True])
@pytest.mark.parametrize("pingpong", [False, True])
@pytest.mark.parametrize("spec", [Spec(), Spec(preset="k8v4", head_size=256)], ids=str)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_knobs(arch, spec, pingpong, async_copy, monkeypatch, record_kernel):
    """Pitfall 22: global knobs of the compiler may double buffers."""
    monkeypatch.setattr(triton.knobs.amd, "use_block_pingpong", pingpong)
    monkeypatch.setattr(triton.knobs.amd, "use_async_copy", async_copy)
    knobs = "".join(f"+{name}" for name, on in (("pingpong", pingpong), ("async_copy", async_copy)) if on)
    _check(arch, spec, record_kernel, knobs)


WAVE32 = ("gfx1100", "gfx1201")
"""Tiles are chosen for waves of 64 lanes; at 32 a lane holds twice as much, and decode spills. Slow, and right."""


@pytest.mark.parametrize("kernel", ["decode", "prepare", "reduce"])
@pytest.mark.parametrize(
    ("layout", "arch"),
    [(name, arch) for name, backend in DECLARED.items() for arch in backend.ARCHES if arch not in ARCHES],
)
def test_every_declared_architecture(layout, arch, kernel, record_kernel):
    """What a declaration names compiles, also where nothing is tuned."""
    spec = Spec(kernel, layout=layout, queries=4 if kernel == "reduce" else 1)
    built = build(arch, spec)
    ROWS.append((arch, spec, built))
    record_kernel(arch, str(spec), **built.numbers)
    found = problems(arch, spec, built)
    if arch in WAVE32 and kernel == "decode":
        assert [p for p in found if not p.startswith("spills")] == []
        assert built.scratch <= 512
    else:
        assert found == []
