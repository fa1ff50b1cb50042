"""The FlyDSL launcher between torch and the kernels: handles, streams, scratch memory, and graphs being captured.

Kernels are recorders here: what is tested is which of them are made, and with which addresses they are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="store and dequantise are in Triton")

from turboquant_rocm import LayerSpec, Policy, decide, get_target, make_layout
from turboquant_rocm.backends._flydsl.offline import Job
from turboquant_rocm.backends._flydsl.ops import FlydslOps
from turboquant_rocm.backends._flydsl.runtime import DeviceRuntime
from turboquant_rocm.backends._triton.workspace import Workspace
from turboquant_rocm.spec import SpecError

NC4 = "turboquant_4bit_nc"
LAYER = LayerSpec(0, 16, 2, 128)
ARCHES = ("gfx942", "gfx950")


class Recorder(DeviceRuntime):
    """The runtime of a GPU, but for the compiler and the launches."""

    ahead = False

    def __init__(self) -> None:
        super().__init__()
        self.built: list[Job] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def _build(self, jobs: Sequence[Job]) -> dict[Job, Any]:  # type: ignore[override]
        self.built += jobs
        return {job: lambda *args, kind=job[0]: self.calls.append((kind, args)) for job in jobs}

    def stream(self, device: torch.device) -> int:
        return 7

    def compute_units(self, device: torch.device) -> int:
        return 256


def make_ops(arch: str, runtime: Recorder, layer: LayerSpec = LAYER) -> FlydslOps:
    decision = decide(layer, get_target(arch), NC4, 16, Policy(force=f"flydsl_{arch}"))
    return FlydslOps(decision, make_layout("soa", NC4, 128, layer.num_kv_heads, 16), runtime=runtime)


@dataclass
class Call:
    """Arguments of a decode call that stay where they are."""

    batch: int
    width: int = 64
    dtype: torch.dtype = torch.bfloat16
    tensors: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        query = torch.zeros((self.batch, LAYER.num_heads, 128), dtype=self.dtype)
        self.tensors = {
            "query": query,
            "cache": torch.zeros((4, 16, 2, 134), dtype=torch.uint8),
            "table": torch.zeros((self.batch, self.width), dtype=torch.int32),
            "lens": torch.ones(self.batch, dtype=torch.int32),
            "out": torch.zeros_like(query),
            "lse": torch.zeros(query.shape[:2]),
        }

    def run(self, ops: FlydslOps, workspace: Workspace) -> None:
        t = self.tensors
        ops.decode(
            t["query"], t["cache"], t["table"], t["lens"], None, 1, 0.1, None, t["out"], t["lse"], workspace
        )


@pytest.mark.parametrize("arch", ARCHES)
def test_one_handle_per_specialisation(arch: str):
    """Calls of the same kind, other batches and lengths, and equal layers share the compiled kernels."""
    runtime, workspace = Recorder(), Workspace("cpu")
    ops = make_ops(arch, runtime)
    ops.compile()
    built = list(runtime.built)
    assert len(built) == len(set(built)) == 9
    assert {config.arch for _, config in built} == {arch}
    for batch in (1, 2, 33):
        for width in (1, 64, 1024):
            Call(batch, width).run(ops, workspace)
    make_ops(arch, runtime, replace(LAYER, index=1)).compile()
    assert runtime.built == built
    handle = runtime.handle(*built[0])
    assert runtime.handle(*built[0]) is handle


@pytest.mark.parametrize("arch", ARCHES)
def test_results_that_no_kernel_writes_are_refused_whatever_ran_before(arch: str):
    """A plan is found by everything that was checked when it was made."""
    runtime, workspace = Recorder(), Workspace("cpu")
    ops, call = make_ops(arch, runtime), Call(2)
    call.run(ops, workspace)
    good, calls = dict(call.tensors), list(runtime.calls)
    for name, wrong in (
        ("lse", good["lse"].double()),
        ("lse", torch.zeros(good["lse"].shape[::-1]).T),
        ("out", torch.zeros(2, 128, LAYER.num_heads, dtype=torch.bfloat16).transpose(1, 2)),
        ("query", torch.zeros(2, 128, LAYER.num_heads, dtype=torch.bfloat16).transpose(1, 2)),
    ):
        call.tensors = {**good, name: wrong}
        with pytest.raises(SpecError) as error:
            call.run(ops, workspace)
        assert error.value.field == name
    assert runtime.calls == calls


def test_the_stream_is_the_one_that_torch_is_on(monkeypatch: pytest.MonkeyPatch):
    asked = []

    class Stream:
        cuda_stream = 123

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: asked.append(device) or Stream())
    device = torch.device("cuda", 3)
    assert DeviceRuntime().stream(device) == 123
    assert asked == [device]


@pytest.mark.parametrize("arch", ARCHES)
def test_graphs_can_capture_what_warmup_covered_and_nothing_else(arch: str, monkeypatch: pytest.MonkeyPatch):
    """While capturing: the same addresses as before, no memory, no kernel made; what would grow raises. Later growth
    leaves the memory that the graph knows where it is."""
    runtime, workspace = Recorder(), Workspace("cpu")
    ops = make_ops(arch, runtime)
    ops.warmup(2, 4096, device="cpu", workspace=workspace)
    built, inside = list(runtime.built), Call(2)
    inside.run(ops, workspace)
    eager, held = list(runtime.calls), workspace._buffers[-1]
    assert [kind for kind, _ in eager] == ["prepare", "decode", "reduce"]

    capturing = True
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    workspace.device = torch.device("cuda")  # its bytes lie on the CPU; what is asked is whose they are
    with monkeypatch.context() as patch:
        for name in ("empty", "zeros", "tensor", "empty_like", "zeros_like"):
            patch.setattr(torch, name, None)  # a call would fail
        runtime.calls.clear()
        inside.run(ops, workspace)
    assert runtime.calls == eager
    assert runtime.built == built

    runtime.calls.clear()
    with pytest.raises(RuntimeError, match=r"workspace of \d+ bytes.*captured: call warmup"):
        Call(300).run(ops, workspace)
    with pytest.raises(RuntimeError, match="not compiled yet while a graph is being captured"):
        Call(2, dtype=torch.float16).run(ops, workspace)
    assert not runtime.calls
    assert runtime.built == built

    capturing, workspace.device = False, torch.device("cpu")
    Call(300).run(ops, workspace)
    assert workspace.nbytes > held.numel()
    assert workspace._buffers[0] is held, "a captured graph would write to freed memory"
