"""A Triton driver whose device is the simulator: `kernel[grid](...)` in unchanged host code runs AMD machine code.

    with simulated("gfx942") as run:
        bound.decode(...)
    run.counters()

Triton specialises, compiles and caches exactly as it would on that GPU (alignment, 32-bit pointer ranges, integers
equal to one); only loading and launching are ours. Tensors live on the CPU and are changed in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver as active_driver

from ci.cdna_sim import simulate_triton

__all__ = ["SimulatedRun", "simulated"]

LDS_BYTES: Final = {"gfx942": 65536, "gfx950": 163840}
WAVE: Final = 64
FIRST_DEVICE: Final = 1000


@dataclass(slots=True)
class SimulatedRun:
    """What was launched since the last :meth:`reset`. check: detectors, as for the simulator."""

    arch: str
    check: Any = "all"
    launches: list[str] = field(default_factory=list)
    total: Counter[str] = field(default_factory=Counter)

    def reset(self) -> None:
        """Forget what was counted."""
        self.launches.clear()
        self.total.clear()

    def counters(self) -> dict[str, int]:
        """Executed wave-instructions by class, bytes, LDS bank conflicts, waves, and launches."""
        return {**dict(sorted(self.total.items())), "launches": len(self.launches)}

    def add(self, name: str, counters: Any) -> None:
        """Add one launch."""
        self.launches.append(name)
        for what, count in counters.as_dict().items():
            if isinstance(count, dict):
                self.total.update({f"{what}.{kind}": number for kind, number in count.items()})
            else:
                self.total[what] += count


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """What a pointer to ``tensor`` may reach.

    A cache (uint8) is its whole storage, since its views leave out parts of a block; anything else is the tensor's
    own extent, so that an access past its end is seen.
    """
    if tensor.dtype is torch.uint8:
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]
        return storage[tensor.storage_offset() :]
    if tensor.is_contiguous() or not tensor.numel():
        return tensor
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((extent,), (1,))


class _Utils:
    """The part of a driver that loads code objects."""

    def __init__(self, arch: str) -> None:
        self.arch = arch

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": LDS_BYTES[self.arch], "multiprocessor_count": 304, "warpSize": WAVE}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, bytes, int, int, int]:
        return object(), binary, 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        return None


class SimDriver(DriverBase):  # type: ignore[misc]
    """The driver of one simulated GPU."""

    def __init__(self, run: SimulatedRun) -> None:
        super().__init__()
        self.simulated = run
        self.utils = _Utils(run.arch)
        self.launcher_cls = self._launcher

    def _launcher(self, src: Any, metadata: Any) -> Any:
        names = list(src.signature)

        def launch(
            x: int, y: int, z: int, stream: int, function: bytes, packed: Any, described: Any,
            enter: Any, leave: Any, *args: Any,
        ) -> None:  # fmt: skip
            if not x * y * z:
                return
            given = {}
            for name, value in zip(names, args, strict=True):
                if src.signature[name] != "constexpr":
                    given[name] = _memory(value) if isinstance(value, torch.Tensor) else value
            run = active_driver.active.simulated  # kernels outlive the block that compiled them
            compiled = SimpleNamespace(asm={"hsaco": function}, metadata=metadata, src=src)
            run.add(metadata.name, simulate_triton(compiled, (x, y, z), given, check=run.check).counters)

        return launch

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", self.simulated.arch, WAVE)

    def get_current_device(self) -> int:
        """Triton's caches are keyed by this number: one for each architecture, none that a real GPU has."""
        return FIRST_DEVICE + list(LDS_BYTES).index(self.simulated.arch)

    def set_current_device(self, device: int) -> None:
        return None

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_benchmarker(self) -> Any:
        raise RuntimeError("the simulator has no clock: nothing can be tuned on it")


@contextmanager
def simulated(arch: str, check: Any = "all") -> Iterator[SimulatedRun]:
    """Triton's active device is a simulated ``arch`` ("gfx942", "gfx950") inside the block."""
    if arch not in LDS_BYTES:
        raise ValueError(f"arch={arch!r} (wants one of {', '.join(LDS_BYTES)})")
    run = SimulatedRun(arch, check)
    before = active_driver._active
    active_driver.set_active(SimDriver(run))
    try:
        yield run
    finally:
        active_driver._active = before
