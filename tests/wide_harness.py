"""The kernel of backends/_triton/wide.py executed without a GPU: compiled for sm_90, and its PTX emulated.

Everything up to the launch is what runs on a GPU: bound.decode, the plan, splits, workspace, grid, constants and
arguments. ``emulated`` then takes the place of ops.Kernel's launch. The wide kernel runs in tests/ptx_emulator.py, on
the very bytes of the tensors it is given; of an argument that its constants say is not used there is no byte. prepare
and reduce are stood in for by NumPy, from what their docstrings say, because in one process Triton either compiles or
interprets; their own tests are in tests/l1_interpret.

What is not here: the just-in-time path of the launch (the kernel is compiled ahead of time, with the alignments of
tests/compile_checks.py), streams, graphs, several launches in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from tests.compile_checks import compile_for
from tests.ptx_emulator import THREADS, GlobalMemory, Program, Region, run_block
from turboquant_rocm.backends._triton import ops
from turboquant_rocm.backends._triton.prepare import prepare_kernel
from turboquant_rocm.backends._triton.reduce import reduce_kernel
from turboquant_rocm.backends._triton.wide import TOKENS, wide_kernel

__all__ = ["Emulation", "emulated"]

COMPUTE_UNITS = 132
_LOG2E = 1.4426950408889634
_ALIGNED = ("query_ptr", "query_scale_ptr", "tables_ptr", "cache_ptr", "schedule_ptr")
"""At multiples of 16 bytes; the others only of 4."""
_WRITTEN_BEFORE = ("query_ptr", "query_scale_ptr", "schedule_ptr")
"""By prepare, which the kernel may overlap with."""
_GAP = 1 << 20  # bytes, at least, between two tensors
_NOWHERE = 1 << 20  # no tensor is near

Arguments = Mapping[str, Any]
Constants = Mapping[str, Any]


@dataclass
class Emulation:
    """What was emulated. change: made to the program before it runs."""

    change: Callable[[Program], Program] = lambda program: program
    blocks: int = 0
    """Of the wide kernel."""
    constants: list[Constants] = field(default_factory=list)
    """Of each of its launches."""

    def launch(self, kernel: ops.Kernel, *values: Any) -> None:
        """Instead of ops.Kernel.__call__."""
        constants = kernel._constants
        names = [name for name in kernel._kernel.arg_names if name not in constants]
        arguments = dict(zip(names, values, strict=True))
        if kernel._kernel is prepare_kernel:
            _prepare(arguments, constants)
        elif kernel._kernel is reduce_kernel:
            _reduce(arguments, constants)
        else:
            assert kernel._kernel is wide_kernel, f"{kernel._kernel.__name__} is not emulated"
            self._run_wide(kernel.grid, arguments, constants)

    def _run_wide(self, grid: tuple[int, int, int], arguments: Arguments, constants: Constants) -> None:
        self.constants.append(constants)
        if not constants["DIRECT"]:  # what is not written must not be read
            arguments["out_ptr"].fill_(0x7E007E00)
            arguments["lse_ptr"].fill_(float("nan"))
        program, shared_bytes = _compiled(tuple(constants.items()), arguments["out_ptr"].dtype)
        program = self.change(program)
        memory, parameters = _memory(arguments, constants)
        for z, y, x in np.ndindex(grid[::-1]):
            run_block(program, parameters, memory, shared_bytes, (x, y, z), grid)
            self.blocks += 1


@contextmanager
def emulated(
    change: Callable[[Program], Program] = lambda program: program, compute_units: int = COMPUTE_UNITS
) -> Iterator[Emulation]:
    """Decode on CPU tensors launches nothing here, but is emulated."""
    emulation = Emulation(change)

    def call(kernel: ops.Kernel, *values: Any) -> None:
        emulation.launch(kernel, *values)

    with (
        mock.patch.object(ops.Kernel, "__call__", call),
        mock.patch.object(ops, "_compute_units", return_value=compute_units),
    ):
        yield emulation


@cache
def _compiled(constants: tuple[tuple[str, Any], ...], out: torch.dtype) -> tuple[Program, int]:
    """The program, and bytes of its shared memory."""
    compiled = compile_for("sm_90", wide_kernel, dict(constants), {"out_ptr": out})
    return Program.of(compiled.asm["ptx"]), compiled.metadata.shared


# ---- arguments ---------------------------------------------------------------------------------------------


def _unused(constants: Constants) -> set[str]:
    """Pointers that the kernel says it does not read or write."""
    used = {
        "query_start_ptr": constants["MULTI"],
        "seq_lens_ptr": not constants["CUT"],
        "schedule_ptr": constants["CUT"],
        "sinks_ptr": constants["SINKS"] and constants["DIRECT"],
        "lse_ptr": constants["WRITE_LSE"] or not constants["DIRECT"],
    }
    return {name for name, there in used.items() if not there}


def _memory(arguments: Arguments, constants: Constants) -> tuple[GlobalMemory, list[Any]]:
    """What the kernel may touch, and its parameters, the two for scratch memory that it has none of included."""
    regions: list[Region] = []
    parameters: list[Any] = []
    base = 1 << 30
    unused = _unused(constants)
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            scalar = np.float32(value) if name in ("scale_log2", "soft_cap") else np.int32(value)
            parameters.append(np.full(THREADS, scalar).view(np.uint32))
            continue
        if name in unused:
            parameters.append(np.full(THREADS, _NOWHERE, np.uint64))
            continue
        partial = name == "out_ptr" and not constants["DIRECT"]  # in the workspace
        start = base if name in _ALIGNED or partial else base + 4
        data = _bytes(value)
        regions.append(
            Region(
                name,
                start,
                data,
                writable=name in ("out_ptr", "lse_ptr"),
                awaited=constants["PDL"] and name in _WRITTEN_BEFORE,
            )
        )
        parameters.append(np.full(THREADS, start, np.uint64))
        base += (data.size // _GAP + 2) * _GAP
    return GlobalMemory(regions), [*parameters, *[np.zeros(THREADS, np.uint64)] * 2]


def _bytes(tensor: torch.Tensor) -> NDArray[Any]:
    """From its first to its last, gaps between rows included; writing them writes the tensor."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = (last + 1) * tensor.element_size() if tensor.numel() else 0
    flat = torch.tensor([], dtype=torch.uint8)
    return flat.set_(
        tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size(), (size,)
    ).numpy()


# ---- stand-ins ---------------------------------------------------------------------------------------------


def _prepare(a: Arguments, c: Constants) -> None:
    """backends/_triton/prepare.py: rotated queries as two int8 each, their scales, and with CUT the schedule."""
    query = a["query_ptr"]
    assert query.is_contiguous() and c["CODES"] and c["BASE"] > 0
    n, columns, base = a["rows"], c["KP"], np.float32(c["BASE"])
    rotated = query.double().numpy().reshape(-1, c["D"])[:n] @ a["matrix_ptr"].double().numpy().T
    y = rotated.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        largest = np.abs(y).max(1)  # NaN if one is
        size = np.fmax(largest, np.float32(2.0**-100))
        scale = np.where(np.isfinite(largest), size / (127 * base), np.float32(np.nan))
        y *= (127 * base / size)[:, None]
        magic = np.float32(1.5 * 2**23)  # a sum with it ends in the nearest whole number
        rounded = y / base + magic
        upper = rounded.view(np.int32).astype(np.int8)
        rest = (y - (rounded - magic) * base) * np.float32(c["STRETCH"])
        lower = (rest + magic).view(np.int32).astype(np.int8)
    if c["KWIDTH"] == 8:
        lower = lower.reshape(n, columns // 8, 4, 2).transpose(0, 1, 3, 2)
    else:
        lower = lower.reshape(n, columns // 32, 2, 4, 2, 2).transpose(0, 1, 5, 3, 2, 4)
    prepared = _bytes(a["prepared_ptr"]).view(np.int8)[: n * 2 * columns].reshape(n, 2, columns)
    prepared[:, 0], prepared[:, 1] = upper, lower.reshape(n, columns)
    a["scale_ptr"].numpy()[:n] = scale
    if c["CUT"]:
        assert c["T"] == TOKENS
        _cut(a, c)


def _cut(a: Arguments, c: Constants) -> None:
    """backends/_triton/schedule.py: how many tiles a piece has, and which pieces each sequence has."""
    lens = [max(n, 0) for n in a["seq_lens_ptr"].tolist()]
    batch, pieces, tile = a["batch"], a["pieces"], c["T"]
    first = [max(n - a["window"], 0) // 16 * 16 if c["WINDOW"] else 0 for n in lens]
    tiles = [-(-(n - begin) // tile) for n, begin in zip(lens, first, strict=True)]
    least = max(-(-sum(tiles) // pieces), a["min_tiles"], -(-max(tiles) // c["MOST"]))
    most = max(-(-sum(tiles) // (pieces - batch)), least)
    tried = [least + ((most - least) * k + 14) // 15 for k in range(16)]
    share = min(each for each in tried if sum(-(-n // each) for n in tiles) <= pieces or each == most)
    schedule = a["schedule_ptr"].numpy()
    schedule[:] = -77
    entries, pairs = schedule[: 4 * pieces].reshape(pieces, 4), schedule[4 * pieces :].reshape(batch, 2)
    used = 0
    for sequence, count in enumerate(-(-n // share) for n in tiles):
        pairs[sequence] = used, count
        entries[used : used + count] = sequence, used, a["seq_lens_ptr"][sequence], share
        used += count
    entries[used:, :2] = -1


def _reduce(a: Arguments, c: Constants) -> None:
    """backends/_triton/reduce.py, in fp64, for partial results in the order of the dims."""
    assert not c["PAIRED"] and not c["ALONE"] and c["DV"] == 2 * c["RW"]
    parts = _bytes(a["part_ptr"]).view(np.float16).reshape(-1, c["DV"]).astype(np.float64)
    lse_and_scale = _bytes(a["part_lse_ptr"]).view(np.float32).reshape(-1, 2).astype(np.float64)
    out, starts = a["out_ptr"], a["query_start_ptr"].tolist()
    for token, head in np.ndindex(out.shape[0], c["HQ"]):
        if c["MULTI"] and token >= starts[a["batch"]]:
            continue  # padding
        rows = _rows_of(token, head, starts, a, c)
        lse, scale = lse_and_scale[rows].T
        total, lse_of_all, result = 0.0, -np.inf, np.zeros(c["DV"])
        if (lse > -np.inf).any():
            rows, lse, scale = (x[lse > -np.inf] for x in (rows, lse, scale))
            sink = float(a["sinks_ptr"][head]) * _LOG2E if c["SINKS"] else -np.inf
            top = max(lse.max(), sink)
            weight = np.exp2(lse - top)
            total = weight.sum() + np.exp2(sink - top)
            result = (weight * scale) @ parts[rows] / total
            lse_of_all = (top + np.log2(total)) / _LOG2E
        out[token, head] = torch.from_numpy(result).to(out.dtype)
        if c["WRITE_LSE"]:
            a["lse_ptr"][token, head] = lse_of_all


def _rows_of(token: int, head: int, starts: list[int], a: Arguments, c: Constants) -> NDArray[Any]:
    """Which partial results are of a query row."""
    if not c["CUT"]:
        return (token * c["HQ"] + head) * a["splits"] + np.arange(a["splits"])
    sequence, query, queries = token, 0, 1
    if c["MULTI"]:
        sequence = max(b for b in range(a["batch"]) if b == 0 or starts[b] <= token)
        query, queries = token - starts[sequence], a["most_queries"]
    first, count = a["schedule_ptr"][4 * a["pieces"] :][2 * sequence : 2 * sequence + 2].tolist()
    return ((first + np.arange(count)) * queries + query) * c["HQ"] + head
