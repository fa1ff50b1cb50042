"""The Triton kernels of TurboQuant_prod as LayerOps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton

from ...dispatch import Decision
from ...layouts import Layout
from .one_pass import OnePassOps
from .ops import LOG2E
from .prod_decode import COLUMNS, prod_decode_kernel, prod_reduce_kernel
from .prod_store import (
    ROWS,
    prod_constexprs,
    prod_dequantize_kernel,
    prod_prepare_kernel,
    prod_store_kernel,
    sketch_tensor,
)
from .workspace import Workspace

__all__ = ["ProdOps", "kernel_constants"]

_TOKENS = 32  # of a tile
EXACT_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""Of store, dequantise and prepare, whose arithmetic is the reference's step by step."""
DECODE_OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
REDUCE_OPTIONS = {"num_warps": 1}


def kernel_constants(kernel: Any, decision: Decision, layout: Layout, **more: Any) -> dict[str, Any]:
    """The constexprs of a kernel of this family by its parameters' names, without those in ``more`` that it lacks."""
    known = {
        **prod_constexprs(layout),
        "HQ": decision.layer.num_heads,
        "G": decision.layer.gqa_ratio,
        "N": COLUMNS,
        "T": _TOKENS,
        "R": ROWS,
        "PRECISION": "tf32x3" if decision.target.vendor == "nvidia" else "ieee",
        **more,
    }
    return {name: known[name] for name in kernel.arg_names if name in known}


class ProdOps(OnePassOps):
    """LayerOps for one layer. ``splits``: fixed number of splits, for tests."""

    def __init__(self, decision: Decision, layout: Layout, *, splits: int | None = None) -> None:
        super().__init__(decision, layout, splits=splits)
        self.prepared_columns = 2 * layout.head_size
        self._sketches: dict[torch.device, torch.Tensor] = {}

    def _constants(self, kernel: Any, **more: Any) -> dict[str, Any]:
        return kernel_constants(kernel, self.decision, self.layout, **more)

    def _sketch(self, device: torch.device) -> torch.Tensor:
        found = self._sketches.get(device)
        if found is None:
            found = self._sketches[device] = sketch_tensor(self.layout.head_size, device)
        return found

    def store(
        self,
        key: torch.Tensor,  # [T, Hk, D]
        value: torch.Tensor,  # [T, Hk, Dv]
        cache: torch.Tensor,  # [nb, bs, Hk, slot_stride] uint8
        slot_mapping: torch.Tensor,  # [T] int32/int64
        nonfinite: torch.Tensor | None = None,  # [2] int32
    ) -> None:
        """Quantise and write the tokens whose slot is not negative; one launch."""
        rows = key.shape[0] * self.layout.num_kv_heads
        if not rows:
            return
        prod_store_kernel[(triton.cdiv(rows, ROWS), 2)](
            key, value, cache, slot_mapping, slot_mapping if nonfinite is None else nonfinite,
            self._sketch(cache.device), rows, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            slot_mapping.stride(0), **self._constants(prod_store_kernel, COUNT=nonfinite is not None),
            **EXACT_OPTIONS,
        )  # fmt: skip

    def dequantize(
        self,
        cache: torch.Tensor,  # [nb, bs, Hk, slot_stride] uint8
        block_table: torch.Tensor,  # [B, M] int32
        seq_lens: torch.Tensor,  # [B] int32
        starts: torch.Tensor,  # [B] int32
        cu_lens: torch.Tensor,  # [B + 1] int32
        key_out: torch.Tensor,  # [sum, Hk, D] fp16/bf16/fp32, contiguous
        value_out: torch.Tensor,  # [sum, Hk, Dv]
    ) -> None:
        """Tokens [starts, seq_lens) of every sequence, one after the other, rotated back; one launch."""
        rows, batch = key_out.shape[0] * self.layout.num_kv_heads, len(starts)
        if not rows or not batch:
            return
        prod_dequantize_kernel[(triton.cdiv(rows, ROWS), 2)](
            cache, block_table, starts, cu_lens, self._sketch(cache.device), key_out, value_out, rows, batch,
            batch.bit_length(), block_table.stride(0), **self._constants(prod_dequantize_kernel),
            **EXACT_OPTIONS,
        )  # fmt: skip

    def _kernels(self, multi: bool, write_lse: bool) -> Iterator[tuple[Any, dict[str, Any]]]:
        each = (
            (prod_prepare_kernel, EXACT_OPTIONS),
            (prod_decode_kernel, DECODE_OPTIONS),
            (prod_reduce_kernel, REDUCE_OPTIONS),
        )
        for kernel, options in each:
            yield kernel, self._constants(kernel, MULTI=multi, WRITE_LSE=write_lse) | options

    def _load(self, device: torch.device) -> None:
        self._sketch(device)

    def decode(
        self,
        query: torch.Tensor,  # [N, Hq, D] fp16/bf16
        cache: torch.Tensor,  # [nb, bs, Hk, slot_stride] uint8
        block_table: torch.Tensor,  # [B, M] int32
        seq_lens: torch.Tensor,  # [B] int32
        query_start_loc: torch.Tensor | None,  # [B + 1] int32
        max_query_len: int,
        scale: float,
        sinks: torch.Tensor | None,  # none: the declaration refuses layers with sinks
        out: torch.Tensor,  # [N, Hq, Dv]
        lse: torch.Tensor | None,  # [N, Hq] fp32
        workspace: Workspace | None = None,
    ) -> None:
        """Attention of every query token to its own sequence; see BoundLayer.decode. Three launches."""
        layer, batch = self.layer, len(seq_lens)
        rows = query.shape[0] * layer.num_heads
        if not rows or not batch:
            return
        multi = query_start_loc is not None
        longest = max_query_len if multi else 1
        splits = self._splits(batch, block_table.shape[1] * self.layout.block_size, longest, query.device)
        prepared, norms, part, part_lse = self._take(workspace, rows, splits, query.device)
        starts = query_start_loc if multi else seq_lens
        (prepare, prepare_constants), (decode, decode_constants), (reduce, reduce_constants) = self._kernels(
            multi, lse is not None
        )
        prepare[(triton.cdiv(rows, ROWS),)](
            query, self._sketch(query.device), prepared, norms, rows, query.stride(0), query.stride(1),
            **prepare_constants,
        )  # fmt: skip
        decode[(self._tiles(longest) * layer.num_kv_heads, splits, batch)](
            prepared, norms, cache, block_table, seq_lens, starts, part, part_lse, block_table.stride(0), splits,
            scale * LOG2E, **decode_constants,
        )  # fmt: skip
        strides = (0, 0) if lse is None else lse.stride()
        reduce[(rows,)](
            part, part_lse, starts, out, norms if lse is None else lse, batch, splits, out.stride(0), out.stride(1),
            *strides, **reduce_constants,
        )  # fmt: skip
