"""Compiled kernels on a device: one handle per specialisation, kept for the life of the process."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from .offline import compile_ahead

__all__ = ["DeviceRuntime", "Runtime", "device_runtime"]


class Runtime(Protocol):
    """What the operations need of a machine. Tests put the simulator in its place."""

    def handle(self, kind: str, config: Any) -> Any:
        """A function of the kernel's arguments (addresses and numbers) and the stream, which launches it."""
        ...

    def stream(self, device: torch.device) -> int:
        """The stream that torch is on."""
        ...

    def compute_units(self, device: torch.device) -> int:
        """Compute units to fill."""
        ...


class DeviceRuntime:
    """The GPU of this process.

    ahead: compile each specialisation in a process of its own first, into FlyDSL's disk cache, because the compiler
    ends its process on some failures; here that becomes a CompileError with the text. It costs some seconds for each
    specialisation and process, before the first call of a shape.
    """

    ahead = True

    def __init__(self) -> None:
        self._handles: dict[tuple[str, Any], Any] = {}

    def handle(self, kind: str, config: Any) -> Any:
        """The launcher of a specialisation, compiled when it is first asked for."""
        found = self._handles.get((kind, config))
        if found is None:
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{kind} is not compiled yet while a graph is being captured: decode once before"
                )
            if self.ahead:
                compile_ahead(kind, config)
            from .compile import build

            found = self._handles[kind, config] = build(kind, config)
        return found

    def stream(self, device: torch.device) -> int:
        """torch's current stream as a number."""
        return int(torch.cuda.current_stream(device).cuda_stream)

    def compute_units(self, device: torch.device) -> int:
        """Compute units of ``device``."""
        return int(torch.cuda.get_device_properties(device).multi_processor_count)


device_runtime = DeviceRuntime()
"""Shared by all layers."""
