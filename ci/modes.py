"""How a leg executes kernels: one small class per mode, all giving bound layers with the same interface.

``reference`` runs plain torch; ``interpret`` the Triton kernels in Triton's CPU interpreter, with its faulty
conversions repaired; ``simulate`` the machine code that Triton makes for an AMD GPU, in ci/cdna_sim; ``device`` the
GPU of this machine. The cases do not know which one runs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ci.legs import Leg
from turboquant_rocm import BoundLayer, LayerSpec, Policy, Target, bind, decide
from turboquant_rocm.backends import get_backend
from turboquant_rocm.target import detect, devices, get_target

__all__ = [
    "DeviceMode",
    "InterpretMode",
    "Mode",
    "ReferenceMode",
    "SimulateMode",
    "WrongMachineError",
    "make_mode",
]


class WrongMachineError(RuntimeError):
    """This machine cannot run the leg; the message says what is there and what is wanted."""


class Mode:
    """One way to execute. target: what backends are chosen for. device: where tensors live."""

    device = "cpu"

    def __init__(self, leg: Leg) -> None:
        self.leg = leg
        self.kernels: list[str] = []  # names of those that the last running() launched, in modes that see it
        self.target = self._find_target()

    def _find_target(self) -> Target:
        return get_target(self.leg.target)

    def bind(
        self, layer: LayerSpec, preset: str, block_size: int, layout: str, backend: str, splits: int = 0
    ) -> BoundLayer:
        """A bound layer of ``backend``; IneligibleError with every reason if it cannot serve the layer."""
        decision = decide(layer, self.target, preset, block_size, Policy(force=backend, layout=layout))
        fixed: dict[str, Any] = {"splits": splits} if splits and get_backend(backend).max_splits else {}
        return bind(decision, **fixed)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around each call of a kernel."""
        yield

    def synchronize(self) -> None:
        """Wait for the device."""

    def counters(self) -> Mapping[str, int]:
        """What the last :meth:`running` executed, for modes that count."""
        return {}

    def facts(self) -> dict[str, Any]:
        """The device, for the result file."""
        return {"target": self.target.arch, "vendor": self.target.vendor, "name": self.leg.title}


class ReferenceMode(Mode):
    """Plain torch on the CPU."""


class InterpretMode(Mode):
    """Triton's interpreter. TRITON_INTERPRET=1 must be set before Triton is imported (the leg's environment)."""

    def __init__(self, leg: Leg) -> None:
        import os

        if os.environ.get("TRITON_INTERPRET") != "1":
            raise WrongMachineError("TRITON_INTERPRET=1 is not set")
        from tests.interpreter_repair import install

        install()  # the stock interpreter converts bf16 and FP8 wrongly
        super().__init__(leg)


class SimulateMode(Mode):
    """AMD machine code in the simulator, through the same host code that launches it on a GPU."""

    def __init__(self, leg: Leg) -> None:
        super().__init__(leg)
        self._counted: Mapping[str, int] = {}
        self._others: list[tuple[str, Any]] = []  # launches that do not go through Triton

    def bind(
        self, layer: LayerSpec, preset: str, block_size: int, layout: str, backend: str, splits: int = 0
    ) -> BoundLayer:
        """As in every mode; FlyDSL's launches are routed to the simulator as well."""
        bound = super().bind(layer, preset, block_size, layout, backend, splits)
        if get_backend(backend).ops.startswith("_flydsl."):
            self._route_flydsl(bound)
        return bound

    def _route_flydsl(self, bound: BoundLayer) -> None:
        """Give the operations a runtime that simulates, and before each decode the memory that kernels may touch."""
        from tests.l1_simulate.flydsl_helpers import SimulatedRuntime
        from turboquant_rocm.backends._triton.workspace import Workspace

        ops: Any = bound.ops
        ops.runtime = runtime = SimulatedRuntime(self.leg.target)
        workspace = Workspace("cpu", 1 << 22)
        decode = ops.decode

        def simulated(query: Any, cache: Any, table: Any, lens: Any, starts: Any, most: int, scale: float,
                      sinks: Any, out: Any, lse: Any, _: Any) -> None:  # fmt: skip
            memory = {"query": query, "cache": cache, "table": table, "lens": lens, "starts": starts, "sinks": sinks,
                      "out": out, "lse": lse, "workspace": workspace._buffers[-1]}  # fmt: skip
            runtime.memory = {name: tensor for name, tensor in memory.items() if tensor is not None}
            runtime.launches.clear()
            decode(query, cache, table, lens, starts, most, scale, sinks, out, lse, workspace)
            self._others += [(f"flydsl_{kind}", result.counters) for kind, result in runtime.launches]

        ops.decode = simulated

    @contextmanager
    def running(self) -> Iterator[None]:
        from ci.cdna_sim.launcher import simulated_launches

        self._others.clear()
        with simulated_launches(self.leg.target) as launches:
            yield
        found = [*((launch.name, launch.counters) for launch in launches), *self._others]
        total: Counter[str] = Counter(launches=len(found))
        for _, counters in found:
            for name, count in counters.as_dict().items():
                if isinstance(count, dict):
                    total.update({f"{name}.{kind}": number for kind, number in count.items()})
                else:
                    total[name] += count
        self._counted = dict(sorted(total.items()))
        self.kernels = [name for name, _ in found]

    def counters(self) -> Mapping[str, int]:
        return self._counted


class DeviceMode(Mode):
    """The first GPU that torch sees."""

    device = "cuda"

    def _find_target(self) -> Target:
        target = detect()
        wants = {"nvidia": "an NVIDIA GPU", "amd": "an AMD GPU"}[self.leg.vendor]
        if self.leg.arches:
            wants += f", {' or '.join(self.leg.arches)}"
        if target.vendor != self.leg.vendor or (self.leg.arches and target.arch not in self.leg.arches):
            raise WrongMachineError(f"this machine has {target.arch} (the leg {self.leg.name} wants {wants})")
        return target

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def facts(self) -> dict[str, Any]:
        found = devices()[0]
        return {
            **super().facts(),
            "name": found.name,
            "memory_gib": found.memory_gib,
            "driver": str(torch.version.hip or torch.version.cuda),
        }


def make_mode(leg: Leg) -> Mode:
    """The mode of ``leg``; WrongMachineError if it cannot run here."""
    found = {
        "reference": ReferenceMode,
        "interpret": InterpretMode,
        "simulate": SimulateMode,
        "device": DeviceMode,
    }
    return found[leg.mode](leg)
