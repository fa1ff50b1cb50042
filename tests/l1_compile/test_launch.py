"""How a kernel is launched again and again: what it is given, and who is told of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from tests.cases import layer_spec  # noqa: E402
from turboquant_rocm import Decision, bind, get_preset, make_layout  # noqa: E402
from turboquant_rocm.backends._triton import launch, store  # noqa: E402
from turboquant_rocm.backends._triton.launch import Kernel  # noqa: E402
from turboquant_rocm.target import get_target  # noqa: E402

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
        return lambda *args: self.told.append(args)


class Jitted:
    """A kernel before it is compiled."""

    def __init__(self, names: list[str], compiled: Compiled | None) -> None:
        self.arg_names = names
        self.compiled = compiled
        self.called: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.grids: list[tuple[int, int, int]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def first(*args: Any, **constants: Any) -> Compiled | None:
            self.grids.append(grid)
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
    assert jitted.called == [(tuple(args), CONSTANTS)] and jitted.grids == [GRID]
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


def test_a_store_is_compiled_again_where_what_was_compiled_may_not_serve(monkeypatch: pytest.MonkeyPatch):
    """Dtypes, alignment, strides, the tile and whether non-finite numbers are counted; not the number of tokens."""
    compiled = Compiled()
    jitted = Jitted(store._store_kernel.arg_names, compiled)
    monkeypatch.setattr(store, "_store_kernel", jitted)
    layout = make_layout("soa", "4bit_nc", 64, 2, 16)
    of_layer = store.Store(layout, "nvidia")
    cache = torch.zeros((4, 16, 2, layout.slot_stride), dtype=torch.uint8)
    memory = torch.zeros(1 << 20, dtype=torch.bfloat16)
    assert not memory.data_ptr() & 15

    def tensor(
        tokens: int, shift: int = 0, apart: int = 128, dtype: torch.dtype = torch.bfloat16
    ) -> torch.Tensor:
        return memory.view(dtype)[shift:].as_strided((tokens, 2, 64), (apart, 64, 1))

    def call(
        tokens: int = 3, *, slots: torch.dtype = torch.int64, count: bool = False, **of_keys: Any
    ) -> None:
        slot_mapping = torch.zeros(tokens, dtype=slots)
        counts = torch.zeros(2, dtype=torch.int32) if count else None
        value = tensor(tokens, dtype=of_keys.get("dtype", torch.bfloat16))
        of_layer(tensor(tokens, **of_keys), value, cache, slot_mapping, counts)

    call()
    ran = []
    for tokens in (5, 3, 900, 64):  # the same for all these tokens
        call(tokens)
        ran.append(tokens)
    assert len(jitted.called) == 1 and len(compiled.ran) == len(ran)
    assert [args[:3] for args in compiled.ran] == [(-(-2 * n // of_layer.few_rows), 2, 1) for n in ran]
    others: list[dict[str, Any]] = [
        {"slots": torch.int32}, {"count": True}, {"shift": 1}, {"apart": 132}, {"apart": 1},
        {"tokens": 1, "apart": 1 << 31}, {"dtype": torch.float16}, {"tokens": 4000},
    ]  # fmt: skip
    for n, other in enumerate(others):
        call(**other)
        assert len(jitted.called) == 2 + n, other
        call(**other)
        assert len(jitted.called) == 2 + n, other
    call(shift=8)  # aligned as well
    assert len(jitted.called) == 1 + len(others)
    assert {constants["COUNT"] for _, constants in jitted.called} == {False, True}
    assert len({constants["R"] for _, constants in jitted.called}) == 2


@pytest.mark.parametrize("ranges", [False, True])
def test_a_store_into_more_memory_than_32_bits_address(ranges: bool, monkeypatch: pytest.MonkeyPatch):
    """Compiled again where the compiler makes a difference."""
    jitted = Jitted(store._store_kernel.arg_names, Compiled())
    monkeypatch.setattr(store, "_store_kernel", jitted)
    monkeypatch.setattr(launch, "RANGES", ranges)
    layout = make_layout("soa", "4bit_nc", 64, 2, 16)
    of_layer = store.Store(layout, "amd")
    key = torch.zeros(3, 2, 64, dtype=torch.bfloat16)
    slots = torch.zeros(3, dtype=torch.int64)
    for bytes_, compiled in ((1 << 20, 1), ((1 << 31) - 1, 1), (1 << 31, 1 + ranges), (1 << 20, 1 + ranges)):
        vast = torch.empty(bytes_, dtype=torch.uint8)  # never touched
        of_layer(key, key, vast[: 64 * layout.slot_stride].view(2, 16, 2, -1), slots)
        assert len(jitted.called) == compiled


@pytest.mark.parametrize(("arch", "target"), [("sm_90", ("cuda", 90, 32)), ("gfx942", ("hip", "gfx942", 64))])
def test_later_launches_are_what_the_first_is(
    arch: str, target: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
):
    """What Triton's own path hands to its launcher, but for addresses and hooks: only compiling is left out."""
    ran: list[tuple[str, tuple[Any, ...]]] = []

    class Made:
        packed_metadata = ("warps", "shared")

        def __init__(self, name: str) -> None:
            self.function = f"handle of {name}"

        def launch_metadata(self, *args: Any) -> str:
            return "metadata"

        def run(self, *args: Any) -> None:
            ran.append((self.function, args))

    def compiles(self: Any, *args: Any, **more: Any) -> Made:
        return Made(self.__name__)

    active = triton.runtime.driver.active
    monkeypatch.setattr(active, "get_current_target", lambda: GPUTarget(*target), raising=False)
    monkeypatch.setattr(triton.runtime.jit, "driver", triton.runtime.driver)
    monkeypatch.setattr(JITFunction, "_do_compile", compiles)
    decision = Decision(
        layer_spec(64, 2, 4, "bf16"), get_target(arch), get_preset("4bit_nc"), 16, "triton_soa", "soa"
    )
    bound = bind(decision, checks="off")
    cache = bound.allocate(4, "cpu")
    key, value = torch.zeros(2, 5, 2, 64, dtype=torch.bfloat16)
    query, out = torch.zeros(2, 2, 8, 64, dtype=torch.bfloat16)
    lens, table = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 40, dtype=torch.int32)
    slots = torch.zeros(5, dtype=torch.int64)
    per_round = []
    for _ in range(3):
        bound.store(key, value, cache, slots)
        bound.decode(query, cache, table, lens, out=out)
        per_round.append(ran.copy())
        ran.clear()
    first, *later = per_round
    assert len(first) >= 3 and first[0][0] == "handle of _store_kernel"
    for again in later:
        assert [name for name, _ in again] == [name for name, _ in first]
        for (_, wanted), (_, given) in zip(first, again, strict=True):
            hooks = slice(6, 9)
            assert wanted[6] == "metadata" and given[hooks] == (None, None, None)
            addresses = tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in wanted)
            assert (*given[:6], *given[9:]) == (*addresses[:6], *addresses[9:])
            assert not any(isinstance(x, torch.Tensor) for x in given)
