"""How a kernel is launched again and again: what it is given, and who is told of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from turboquant_rocm.backends._triton.ops import Kernel  # noqa: E402

GRID = (3, 2, 1)
CONSTANTS = {"T": 32, "num_warps": 1}


class Compiled:
    """What a first call leaves: launched directly, or by way of Triton's runner."""

    function = 77
    packed_metadata = (1, 1, 0)

    def __init__(self) -> None:
        self.ran: list[tuple[Any, ...]] = []
        self.told: list[tuple[Any, ...]] = []

    def run(self, *args: Any) -> None:
        self.ran.append(args)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        assert grid == GRID
        return lambda *args: self.told.append(args)


class Jitted:
    """A kernel before it is compiled."""

    def __init__(self, names: list[str], compiled: Compiled | None) -> None:
        self.arg_names = names
        self.compiled = compiled
        self.called: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        assert grid == GRID

        def first(*args: Any, **constants: Any) -> Compiled | None:
            self.called.append((args, constants))
            return self.compiled

        return first


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device 5, whose current stream is 50."""
    active = SimpleNamespace(get_current_device=lambda: 5, get_current_stream=lambda device: 10 * device)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))


@pytest.mark.parametrize(
    "names", [["a_ptr", "b_ptr", "rows", "scale", "T"], ["a_ptr", "rows", "b_ptr", "scale", "T"],
              ["rows", "a_ptr", "scale", "b_ptr", "T"]],
)  # fmt: skip
def test_later_launches_get_addresses(names: list[str]):
    a, b = torch.zeros(4), torch.zeros(8)[3:]
    given = {"a_ptr": a, "b_ptr": b, "rows": 9, "scale": 0.5}
    args = [given[name] for name in names[:-1]]
    jitted = Jitted(names, Compiled())
    kernel = Kernel(jitted, GRID, CONSTANTS)
    kernel(*args)
    assert len(jitted.called) == 1 and jitted.called[0] == (tuple(args), CONSTANTS)
    assert jitted.compiled is not None and not jitted.compiled.ran and not jitted.compiled.told
    kernel(*args)
    kernel(*args)
    given |= {"a_ptr": a.data_ptr(), "b_ptr": b.data_ptr()}
    values = [given[name] for name in names[:-1]]
    launch = (*GRID, 50, 77, (1, 1, 0), None, None, None, *values, 32)
    assert jitted.compiled.ran == [launch, launch]
    assert len(jitted.called) == 1 and not jitted.compiled.told


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_who_listens_is_told(which: str, monkeypatch: pytest.MonkeyPatch):
    a = torch.zeros(4)
    jitted = Jitted(["a_ptr", "rows", "T"], Compiled())
    kernel = Kernel(jitted, GRID, CONSTANTS)
    kernel(a, 7)
    hooks = getattr(triton.knobs.runtime, which)

    def listener(metadata: Any) -> None:
        raise AssertionError("the runner calls it")

    hooks.add(listener)
    try:
        kernel(a, 7)
    finally:
        hooks.remove(listener)
    assert jitted.compiled is not None
    assert jitted.compiled.told == [(a.data_ptr(), 7, 32)] and not jitted.compiled.ran
    monkeypatch.setattr(triton.knobs.runtime, which, listener)  # as older programs set it
    kernel(a, 7)
    assert len(jitted.compiled.told) == 2 and not jitted.compiled.ran
    monkeypatch.setattr(triton.knobs.runtime, which, None)
    kernel(a, 7)
    assert len(jitted.compiled.told) == 2 and len(jitted.compiled.ran) == 1


def test_interpreted_kernels_are_called_as_they_are():
    jitted = Jitted(["a_ptr", "rows", "T"], None)
    kernel = Kernel(jitted, GRID, CONSTANTS)
    a = torch.zeros(4)
    kernel(a, 7)
    kernel(a, 7)
    assert jitted.called == [((a, 7), CONSTANTS)] * 2
