"""Launching a kernel again and again: what need not be found out anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from triton.runtime.jit import MockTensor

__all__ = ["RANGES", "Grid", "Kernel", "addressed", "specialised", "stand_ins"]

Grid = tuple[int, int, int]

RANGES = torch.version.hip is not None
"""Whether specialisations depend on how large the memory of a tensor is: on AMD it is addressed with 32 bits where they
are enough. A kernel that was compiled for less must not be given more."""
_MOST_ADDRESSED = 2**31 - 1


def addressed(*tensors: torch.Tensor) -> tuple[bool, ...]:
    """Which tensors lie in memory that 32 bits address; nothing where no specialisation depends on it."""
    if not RANGES:
        return ()
    return tuple([tensor.untyped_storage().size() <= _MOST_ADDRESSED for tensor in tensors])


class _Large(MockTensor):  # type: ignore[misc]
    """Triton's stand-in for a tensor that is compiled for, in memory that 32 bits do not address."""

    @staticmethod
    def ptr_range() -> int:
        return _MOST_ADDRESSED + 1


def stand_ins(dtype: torch.dtype) -> tuple[Any, ...]:
    """For compiling ahead of time: tensors of all sizes that compilers tell apart."""
    return (dtype, _Large(dtype)) if RANGES else (dtype,)


def specialised(numbers: tuple[int, ...], *tensors: torch.Tensor) -> tuple[Any, ...]:
    """What Triton's specialisation of a kernel depends on: of integers that may be specialised whether they are 1 or a
    multiple of 16, and their width; of tensors the dtype, and whether they are aligned to 16 bytes (and their size:
    :func:`addressed`). And their devices, because what is compiled is loaded on one, and no launch of an address asks
    whose it is."""
    return (
        tuple([(n == 1, not n & 15, n >> 31) for n in numbers]),
        tuple([(tensor.dtype, tensor.device, not tensor.data_ptr() & 15) for tensor in tensors]),
        addressed(*tensors),
    )


class Kernel:
    """A kernel with its constants, and with its grid where that is always the same.

    The first call goes through Triton's just-in-time path, which looks at every argument to find or compile a
    specialisation (some 60 us); later ones launch what it found. That is right because nothing that a specialisation
    depends on may change from call to call: integers are never specialised, and dtypes and the alignment of pointers
    are part of the key under which the owner keeps a Kernel; or all of it is (:func:`specialised`).

    Later ones pass addresses, not tensors: the launcher would ask each tensor for its address, and the driver whether
    that is one. And they leave out Triton's launch hooks where nobody listens: it would describe every launch to them.
    """

    def __init__(self, kernel: Any, grid: Grid, constants: Mapping[str, Any]) -> None:
        self.grid = grid
        self._kernel = kernel
        self._constants = constants
        self._tail = tuple(constants[name] for name in kernel.arg_names if name in constants)
        assert kernel.arg_names[len(kernel.arg_names) - len(self._tail) :] == [
            name for name in kernel.arg_names if name in constants
        ], "constants follow the arguments"
        self._compiled: Any = None
        self._run: Any = None
        self._found: tuple[Any, ...] = ()
        # Most pointers are the first arguments: a comprehension is faster than assignments one by one.
        pointers = [i for i, name in enumerate(kernel.arg_names) if name.endswith("_ptr")]
        self._first = next((n for n, i in enumerate(pointers) if n != i), len(pointers))
        self._others = tuple(pointers[self._first :])

    def __call__(self, *args: Any) -> None:
        self.on(self.grid, *args)

    def on(self, grid: Grid, *args: Any) -> None:
        """Launch on this grid."""
        if self._compiled is None:
            self._compiled = self._kernel[grid](*args, **self._constants)
            if self._compiled is not None:  # None: interpreted
                self._run = self._compiled.run
                self._found = (self._compiled.function, self._compiled.packed_metadata)
            return
        first = self._first
        values = [tensor.data_ptr() for tensor in args[:first]]
        values += args[first:]
        for i in self._others:
            values[i] = values[i].data_ptr()
        if _launches_are_watched():
            self._compiled[grid](*values, *self._tail)
            return
        driver = triton.runtime.driver.active
        stream = driver.get_current_stream(driver.get_current_device())
        self._run(*grid, stream, *self._found, None, None, None, *values, *self._tail)


def _launches_are_watched() -> bool:
    """Whether somebody, such as a profiler, has asked Triton to be told of launches."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
