"""Scratch memory of the decode kernels: one buffer per device, shared by all layers, grown only before warm-up ends.

Layers run one after the other on a stream, so they can share a buffer. Once a shape has been reserved, taking its
views allocates nothing. A buffer that has been outgrown is kept alive, because captured graphs may still use it.
"""

from __future__ import annotations

import torch

__all__ = ["Workspace", "default_workspace"]

_ALIGN = 256


class Workspace:
    """A buffer on ``device``. Give each stream that decodes at the same time its own."""

    def __init__(self, device: torch.device | str, nbytes: int = 0) -> None:
        self.device = torch.device(device)
        self._buffers: list[torch.Tensor] = []
        self._views: dict[tuple[int, ...], tuple[torch.Tensor, ...]] = {}
        if nbytes:
            self.reserve(nbytes)

    @property
    def nbytes(self) -> int:
        """Size of the buffer in use."""
        return self._buffers[-1].numel() if self._buffers else 0

    def reserve(self, nbytes: int) -> None:
        """Make the buffer at least ``nbytes`` large. RuntimeError while a graph is captured."""
        if nbytes <= self.nbytes:
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"decode needs a workspace of {nbytes} bytes and has {self.nbytes} while a graph is being captured: "
                "call warmup() with the largest batch, context and query length first, and give it queries that are "
                "aligned to 16 bytes"
            )
        self._buffers.append(torch.empty(nbytes, dtype=torch.uint8, device=self.device))
        self._views.clear()

    @staticmethod
    def needed(rows: int, columns: int, splits: int, width: int, numbers: int = 0, sums: int = 1) -> int:
        """Bytes that :meth:`take` needs."""
        sizes = (
            rows * columns * 2,
            rows * 4,
            rows * splits * width * 4,
            rows * splits * sums * 4,
            numbers * 4,
        )
        return sum(-(-size // _ALIGN) * _ALIGN for size in sizes)

    def take(
        self, rows: int, columns: int, splits: int, width: int, numbers: int = 0, sums: int = 1
    ) -> tuple[torch.Tensor, ...]:
        """Views for one call: queries [rows, columns] fp16, their scales [rows] fp32, partial results
        [rows, splits, width] and what goes with each, [rows, splits, sums] fp32 (splits = 0: none), ``numbers`` int32.
        Partial results are fp32, or where two numbers go with them int32. Contents are undefined."""
        key = (rows, columns, splits, width, numbers, sums)
        views = self._views.get(key)
        if views is None:
            self.reserve(self.needed(*key))
            at = 0
            made = []
            for shape, dtype in (
                ((rows, columns), torch.float16),
                ((rows,), torch.float32),
                ((rows, splits, width), torch.float32 if sums == 1 else torch.int32),
                ((rows, splits, sums), torch.float32),
                ((numbers,), torch.int32),
            ):
                count = 1
                for n in shape:
                    count *= n
                size = count * dtype.itemsize
                made.append(self._buffers[-1][at : at + size].view(dtype).view(shape))
                at += -(-size // _ALIGN) * _ALIGN
            views = self._views[key] = tuple(made)
        return views


_DEFAULT: dict[torch.device, Workspace] = {}


def default_workspace(device: torch.device) -> Workspace:
    """The buffer that calls without a workspace of their own share."""
    found = _DEFAULT.get(device)
    if found is None:
        found = _DEFAULT[device] = Workspace(device)
    return found
