"""Compiled kernels on a device: one handle per specialisation, kept for the life of the process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .. import CompileError
from .offline import Job, compile_ahead

__all__ = ["DeviceRuntime", "Runtime", "device_runtime"]


class Runtime(Protocol):
    """What the operations need of a machine. Tests put the simulator in its place."""

    def compile(self, jobs: Sequence[Job]) -> None:
        """Compile kernels, so that ``handle`` only looks them up; CompileError if one cannot be had."""
        ...

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

    ahead: compile in a process of its own first, into FlyDSL's disk cache, because the compiler ends its process on
    some failures; here that becomes a CompileError with the text. What failed once is not tried again.
    """

    ahead = True

    def __init__(self) -> None:
        self._handles: dict[Job, Any] = {}
        self._failed: dict[tuple[Job, ...], str] = {}

    def compile(self, jobs: Sequence[Job]) -> None:
        """Compile those of ``jobs`` that are not there yet; CompileError with the compiler's text."""
        missing = tuple(job for job in dict.fromkeys(jobs) if job not in self._handles)
        if not missing:
            return
        if missing in self._failed:
            raise CompileError(self._failed[missing])
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            names = ", ".join(dict(missing))
            raise RuntimeError(
                f"{names} is not compiled yet while a graph is being captured: decode once before"
            )
        try:
            if self.ahead:
                compile_ahead(missing)
            self._handles.update(self._build(missing))
        except CompileError as error:
            self._failed[missing] = str(error)
            raise

    @staticmethod
    def _build(jobs: Sequence[Job]) -> dict[Job, Any]:
        """The launchers; CompileError with the text of whatever FlyDSL raises."""
        try:
            from .compile import build

            return {job: build(*job) for job in jobs}
        except Exception as error:
            what = f"{', '.join(dict(jobs))} for {jobs[0][1].arch}"
            raise CompileError(f"{what}: not loaded\n{type(error).__name__}: {error}") from error

    def handle(self, kind: str, config: Any) -> Any:
        """The launcher of a specialisation, compiled when it is first asked for."""
        self.compile([(kind, config)])
        return self._handles[kind, config]

    def stream(self, device: torch.device) -> int:
        """torch's current stream as a number."""
        return int(torch.cuda.current_stream(device).cuda_stream)

    def compute_units(self, device: torch.device) -> int:
        """Compute units of ``device``."""
        return int(torch.cuda.get_device_properties(device).multi_processor_count)


device_runtime = DeviceRuntime()
"""Shared by all layers."""
