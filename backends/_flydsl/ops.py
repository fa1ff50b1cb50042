"""FlyDSL operations of one layer: two or three launches per decode call, with addresses and integers only.

Store and dequantise are the Triton kernels over the same bytes. A call with a shape seen before does no more than look
up its plan and pass pointers: nothing is allocated, traced or compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from ...dispatch import Decision
from ...layouts import Layout
from ...spec import SpecError
from .._triton.dequantize import Dequantize
from .._triton.store import Store
from .._triton.workspace import Workspace, default_workspace
from .config import DIM, TILE, DecodeConfig, RowConfig
from .offline import Job
from .runtime import Runtime, device_runtime

__all__ = ["MAX_SPLITS", "FlydslOps"]

MAX_SPLITS: Final = 128
MIN_TOKENS: Final = 256  # of a split: below that the merge costs more than the parallelism gains
GROUPS_PER_CU: Final = 4  # workgroups of four waves that fill a compute unit: four waves per SIMD
LOG2E: Final = math.log2(math.e)

_DTYPES: Final = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_QUERY_WORDS: Final = (
    DIM + 4
)  # fp16-sized units of a prepared query: 2 x 128 bytes and 8 bytes of scale and centre


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about one shape of call. reduce: None where the only split writes the result itself."""

    prepare: Callable[..., Any]
    decode: Callable[..., Any]
    reduce: Callable[..., Any] | None
    splits: int
    groups: int


class FlydslOps:
    """LayerOps in FlyDSL for one layer. options, for tests: ``splits`` fixes their number, ``runtime`` runs kernels."""

    def __init__(
        self, decision: Decision, layout: Layout, *, splits: int | None = None, runtime: Runtime | None = None
    ) -> None:
        if splits is not None and not 1 <= splits <= MAX_SPLITS:
            raise SpecError("splits", splits, f"1 to {MAX_SPLITS}")
        self.layer = decision.layer
        self.layout = layout
        self.arch = decision.target.arch
        self.fixed_splits = splits
        self.runtime: Runtime = runtime or device_runtime
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._store = Store(layout, decision.target.vendor)
        self._dequantize = Dequantize(layout, decision.target.vendor)

    def store(
        self,
        key: torch.Tensor,  # [T, Hk, D]
        value: torch.Tensor,  # [T, Hk, Dv]
        cache: torch.Tensor,  # [nb, bs, Hk, slot_stride] uint8
        slot_mapping: torch.Tensor,  # [T] int32/int64
        nonfinite: torch.Tensor | None = None,  # [2] int32
    ) -> None:
        """Quantise and write the tokens whose slot is not negative."""
        self._store(key, value, cache, slot_mapping, nonfinite)

    def dequantize(
        self,
        cache: torch.Tensor,  # [nb, bs, Hk, slot_stride] uint8
        block_table: torch.Tensor,  # [B, M] int32
        seq_lens: torch.Tensor,  # [B] int32
        starts: torch.Tensor,  # [B] int32
        cu_lens: torch.Tensor,  # [B + 1] int32
        key_out: torch.Tensor,  # [sum, Hk, D]
        value_out: torch.Tensor,  # [sum, Hk, Dv]
    ) -> None:
        """Tokens [starts, seq_lens) of every sequence, one after the other, rotated back."""
        self._dequantize(cache, block_table, starts, cu_lens, key_out, value_out)

    def decode(
        self,
        query: torch.Tensor,  # [N, Hq, D] fp16/bf16
        cache: torch.Tensor,  # [nb, bs, Hk, slot_stride] uint8
        block_table: torch.Tensor,  # [B, M] int32
        seq_lens: torch.Tensor,  # [B] int32
        query_start_loc: torch.Tensor | None,  # [B + 1] int32
        max_query_len: int,
        scale: float,
        sinks: torch.Tensor | None,  # [Hq] fp32
        out: torch.Tensor,  # [N, Hq, Dv]
        lse: torch.Tensor | None,  # [N, Hq] fp32
        workspace: Workspace | None = None,
    ) -> None:
        """Attention of every query token to its own sequence; see BoundLayer.decode."""
        rows, batch = query.shape[0], block_table.shape[0]
        if not rows or not batch:
            return
        multi = query_start_loc is not None
        key = (
            rows, block_table.shape, max_query_len, multi, query.dtype, out.dtype, query.device,
            query.stride(-1), out.stride(-1), None if lse is None else (lse.dtype, lse.stride(-1)),
        )  # fmt: skip
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make_plan(query, block_table, max_query_len, multi, out, lse)
        heads = self.layer.num_heads
        queries, _, part, sums, _ = (workspace or default_workspace(query.device)).take(
            rows * heads, _QUERY_WORDS, plan.splits, DIM
        )
        stream = self.runtime.stream(query.device)
        q8 = queries.data_ptr()
        meta = q8 + rows * heads * 2 * DIM
        starts = 0 if query_start_loc is None else query_start_loc.data_ptr()
        factor = scale * LOG2E
        if self.layer.soft_cap is not None:
            factor *= 2.0 / self.layer.soft_cap  # tanh(x) is taken as a function of exp2(2 x log2 e)
        plan.prepare(query.data_ptr(), q8, meta, query.stride(0), query.stride(1), rows, factor, stream)
        sinks_at = 0 if sinks is None else sinks.data_ptr()
        lse_at, lse_stride = (0, 0) if lse is None else (lse.data_ptr(), lse.stride(0))
        out_at, row_stride, head_stride = out.data_ptr(), out.stride(0), out.stride(1)
        alone = plan.reduce is None
        plan.decode(
            q8, meta, cache.data_ptr(), block_table.data_ptr(), seq_lens.data_ptr(), starts,
            out_at if alone else part.data_ptr(), lse_at if alone else sums.data_ptr(), sinks_at,
            block_table.stride(0), plan.splits, batch, rows, plan.groups, row_stride, head_stride, lse_stride, stream,
        )  # fmt: skip
        if plan.reduce is not None:
            plan.reduce(
                part.data_ptr(), sums.data_ptr(), starts, sinks_at, out_at, lse_at, plan.splits, rows, batch,
                row_stride, head_stride, lse_stride, stream,
            )  # fmt: skip

    def _make_plan(
        self,
        query: torch.Tensor,
        block_table: torch.Tensor,
        max_query_len: int,
        multi: bool,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> Plan:
        """The plan of one shape of call. Its specialisations depend on neither batch nor lengths."""
        for name, tensor in (("query", query), ("out", out)):
            if tensor.dtype not in _DTYPES:
                raise SpecError(name, tensor.dtype, f"dtype {' or '.join(map(str, _DTYPES))} for FlyDSL")
            if tensor.stride(-1) != 1:
                raise SpecError(name, f"strides {tensor.stride()}", "a contiguous last dimension")
        if lse is not None and (lse.dtype != torch.float32 or lse.stride(-1) != 1):
            raise SpecError("lse", f"{lse.dtype}, strides {lse.stride()}", "float32 with contiguous heads")
        batch, blocks = block_table.shape
        groups, splits = self._shape(
            batch, blocks * self.layout.block_size, max_query_len, multi, query.device
        )
        jobs = self._jobs(multi, _DTYPES[query.dtype], _DTYPES[out.dtype], lse is not None, splits)
        self.runtime.compile(jobs)
        handles = [self.runtime.handle(*job) for job in jobs]
        return Plan(handles[0], handles[1], handles[2] if splits > 1 else None, splits, groups)

    def _config(self, multi: bool, direct: str | None = None) -> DecodeConfig:
        layer = self.layer
        return DecodeConfig.of(
            self.arch, self.layout, layer.gqa_ratio, multi=multi, window=layer.window, soft_cap=layer.soft_cap,
            direct=direct, sinks=direct is not None and layer.sinks,
        )  # fmt: skip

    def _jobs(self, multi: bool, query: str, out: str, lse: bool, splits: int) -> list[Job]:
        """The kernels of a kind of call, in the order in which it launches them."""
        heads = self.layer.num_heads
        prepare = ("prepare", RowConfig(self.arch, heads, query, key_bits=self.layout.preset.key_bits))
        if splits == 1:
            return [prepare, ("decode", self._config(multi, out))]
        reduce = RowConfig(self.arch, heads, out, multi=multi, sinks=self.layer.sinks, lse=lse)
        return [prepare, ("decode", self._config(multi)), ("reduce", reduce)]

    def _all_jobs(self, dtype: str, lse: bool | None = None) -> list[Job]:
        """The kernels of every call whose queries and outputs are of ``dtype``. lse: as in :meth:`warmup`."""
        jobs = (
            job
            for splits in ((1, MAX_SPLITS) if self.fixed_splits is None else (self.fixed_splits,))
            for multi in (False, True)
            for write in ((False, True) if lse is None else (lse,))
            for job in self._jobs(multi, dtype, dtype, write, splits)
        )
        return list(dict.fromkeys(jobs))

    def compile(self) -> None:
        """Compile what calls with the layer's own dtype need; CompileError with the text if one cannot be had."""
        self.runtime.compile(self._all_jobs(str(self.layer.dtype)))

    def _shape(
        self, batch: int, context: int, max_query_len: int, multi: bool, device: torch.device
    ) -> tuple[int, int]:
        """Groups of columns per sequence, and splits."""
        groups = -(-max_query_len // self._config(multi).tokens_per_group) if multi else 1
        units = self.runtime.compute_units(device)
        return groups, self.fixed_splits or self._splits(batch * groups, context, units)

    def warmup(
        self,
        max_batch: int,
        max_context: int,
        max_query_len: int = 1,
        *,
        device: torch.device | str = "cuda",
        dtype: torch.dtype | None = None,
        lse: bool | None = None,
        workspace: Workspace | None = None,
    ) -> int:
        """Compile every kernel that decode can need in the declared range, and reserve its scratch memory.

        max_batch: most sequences; max_context: most tokens that a block table spans; max_query_len: most query tokens
        of a sequence. dtype: of queries and outputs, default the layer's. lse: whether it will be asked for; None:
        both. Returns the number of kernels.
        """
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        name = str(self.layer.dtype) if dtype is None else _DTYPES[dtype]
        jobs = self._all_jobs(name, lse)
        self.runtime.compile(jobs)
        space = workspace or default_workspace(device)
        nbytes = 0
        for batch in range(1, max_batch + 1):
            for length in range(1, max_query_len + 1):
                _, splits = self._shape(batch, max_context, length, length > 1, device)
                rows = batch * length * self.layer.num_heads
                nbytes = max(nbytes, space.needed(rows, _QUERY_WORDS, splits, DIM))
        space.reserve(nbytes)
        return len(jobs)

    def _splits(self, sequences: int, context: int, compute_units: int) -> int:
        """Enough workgroups to fill the device, and none with fewer than MIN_TOKENS tokens."""
        if self.layer.window is not None:
            context = min(context, self.layer.window + TILE)
        wanted = GROUPS_PER_CU * compute_units // (sequences * self.layer.num_kv_heads)
        return max(1, min(wanted, -(-context // MIN_TOKENS), MAX_SPLITS))
