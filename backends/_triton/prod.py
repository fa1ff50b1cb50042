"""The Triton kernels of TurboQuant_prod as LayerOps."""

from __future__ import annotations

from typing import Any

import torch
import triton

from ...dispatch import Decision
from ...layouts import Layout
from ...spec import SpecError
from .prod_decode import COLUMNS, prod_decode_kernel, prod_reduce_kernel
from .prod_store import (
    ROWS,
    prod_constexprs,
    prod_dequantize_kernel,
    prod_prepare_kernel,
    prod_store_kernel,
    sketch_tensor,
)
from .workspace import Workspace, default_workspace

__all__ = ["ProdOps", "kernel_constants"]

LOG2E = 1.4426950408889634
_MAX_SPLITS = 64
_TOKENS = 32  # of a tile
_MIN_TOKENS = 256  # of a split
_PROGRAMS_PER_UNIT = 4
_OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}


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


class ProdOps:
    """LayerOps for one layer. ``splits``: fixed number of splits, for tests."""

    def __init__(self, decision: Decision, layout: Layout, *, splits: int | None = None) -> None:
        if splits is not None and not 1 <= splits <= _MAX_SPLITS:
            raise SpecError("splits", splits, f"1 to {_MAX_SPLITS}")
        self.decision, self.layer, self.layout = decision, decision.layer, layout
        self.fixed_splits = splits
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
            num_warps=4, enable_fp_fusion=False,
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
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip

    def _splits(self, programs: int, max_context: int, device: torch.device) -> int:
        if self.fixed_splits is not None:
            return self.fixed_splits
        units = 1
        if device.type == "cuda":
            units = torch.cuda.get_device_properties(device).multi_processor_count
        wanted = _PROGRAMS_PER_UNIT * units // max(1, programs)
        return max(1, min(wanted, max_context // _MIN_TOKENS, _MAX_SPLITS))

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
        tiles = triton.cdiv(max_query_len, COLUMNS // layer.gqa_ratio)
        context = block_table.shape[1] * self.layout.block_size
        splits = self._splits(tiles * layer.num_kv_heads * batch, context, query.device)
        prepared, norms, part, part_lse = (workspace or default_workspace(query.device)).take(
            rows, 2 * layer.head_size, splits, layer.value_size
        )
        multi = query_start_loc is not None
        starts = query_start_loc if multi else seq_lens
        prod_prepare_kernel[(triton.cdiv(rows, ROWS),)](
            query, self._sketch(query.device), prepared, norms, rows, query.stride(0), query.stride(1),
            **self._constants(prod_prepare_kernel), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        prod_decode_kernel[(tiles * layer.num_kv_heads, splits, batch)](
            prepared, norms, cache, block_table, seq_lens, starts, part, part_lse, block_table.stride(0), splits,
            scale * LOG2E, **self._constants(prod_decode_kernel, MULTI=multi), **_OPTIONS,
        )  # fmt: skip
        strides = (0, 0) if lse is None else lse.stride()
        prod_reduce_kernel[(rows,)](
            part, part_lse, starts, out, norms if lse is None else lse, batch, splits, out.stride(0), out.stride(1),
            *strides, **self._constants(prod_reduce_kernel, MULTI=multi, WRITE_LSE=lse is not None), num_warps=1,
        )  # fmt: skip
