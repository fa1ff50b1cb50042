"""The Triton kernels for rotated values as LayerOps: store and dequantise as for other presets, a decode of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...dispatch import Decision
from ...layouts import Layout
from .dequantize import Dequantize
from .device import FP8_SCALE
from .one_pass import OnePassOps
from .ops import LOG2E, target_kind
from .rotated_decode import COLUMNS, rotated_decode_kernel, rotated_reduce_kernel
from .store import Store, field_constants
from .tile import centroid_table
from .workspace import Workspace

__all__ = ["RotatedOps", "decode_options", "kernel_constants"]

_TOKENS = 32  # of a tile
DECODE_OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
REDUCE_OPTIONS = {"num_warps": 1}


def decode_options(decision: Decision, layout: Layout) -> dict[str, Any]:
    """Options of the decode kernel. NVIDIA's compiler aims at 168 registers and, at 256 dims, would rather spill than
    take more, if it is not told."""
    wide = layout.head_size == 256 and target_kind(decision.target.vendor) == "cuda"
    return DECODE_OPTIONS | ({"maxnreg": 255} if wide else {})


def _table(head_size: int, bits: int) -> tuple[tuple[float, ...], float]:
    """(non-negative centroids as fp16 numbers, what they must be multiplied by: the rotation's factor included)."""
    found = centroid_table(head_size, bits)
    return tuple(float(c) for c in found.values[-(1 << (bits - 1)) :]), found.factor * head_size**-0.5


def kernel_constants(kernel: Any, decision: Decision, layout: Layout, **more: Any) -> dict[str, Any]:
    """The constexprs of a kernel by its parameters' names, without those in ``more`` that it lacks."""
    layer, preset = decision.layer, layout.preset
    d, dv = layout.head_size, layout.value_head_size
    value_table, value_factor = _table(dv, preset.value_bits)
    known = {
        **field_constants(layout),
        "HQ": layer.num_heads,
        "HK": layer.num_kv_heads,
        "G": layer.gqa_ratio,
        "D": d,
        "LOG_D": d.bit_length() - 1,
        "DV": dv,
        "LOG_DV": dv.bit_length() - 1,
        "KEY_BITS": preset.key_bits,
        "VALUE_BITS": preset.value_bits,
        "KEY_TABLE": (0.0,) if preset.fp8_keys else _table(d, preset.key_bits)[0],
        "VALUE_TABLE": value_table,
        "VALUE_FACTOR": value_factor,
        "BLOCK_SIZE": layout.block_size,
        "BLOCK_STRIDE": layout.block_stride,
        "WINDOW": layer.window is not None,
        "SOFT_CAP": layer.soft_cap is not None,
        "SINKS": layer.sinks,
        "N": COLUMNS,
        "T": _TOKENS,
        **more,
    }
    return {name: known[name] for name in kernel.arg_names if name in known}


class RotatedOps(OnePassOps):
    """LayerOps for one layer. ``splits``: fixed number of splits, for tests."""

    def __init__(self, decision: Decision, layout: Layout, *, splits: int | None = None) -> None:
        super().__init__(decision, layout, splits=splits)
        self._store = Store(layout, decision.target.vendor)
        self._dequantize = Dequantize(layout, decision.target.vendor)
        preset = layout.preset
        self._factor = FP8_SCALE if preset.fp8_keys else _table(layout.head_size, preset.key_bits)[1]

    def store(
        self,
        key: torch.Tensor,  # [T, Hk, D]
        value: torch.Tensor,  # [T, Hk, Dv]
        cache: torch.Tensor,  # [nb, bs, Hk, slot_stride] uint8
        slot_mapping: torch.Tensor,  # [T] int32/int64
        nonfinite: torch.Tensor | None = None,  # [2] int32
    ) -> None:
        """Quantise and write the tokens whose slot is not negative; one launch."""
        self._store(key, value, cache, slot_mapping, nonfinite)

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
        self._dequantize(cache, block_table, starts, cu_lens, key_out, value_out)

    def _kernels(self, multi: bool, write_lse: bool) -> Iterator[tuple[Any, dict[str, Any]]]:
        own = {"MULTI": multi, "WRITE_LSE": write_lse}
        options = decode_options(self.decision, self.layout)
        each = ((rotated_decode_kernel, options), (rotated_reduce_kernel, REDUCE_OPTIONS))
        for kernel, options in each:
            yield kernel, kernel_constants(kernel, self.decision, self.layout, **own) | options

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
        """Attention of every query token to its own sequence; see BoundLayer.decode. Two launches."""
        layer, batch = self.layer, len(seq_lens)
        rows = query.shape[0] * layer.num_heads
        if not rows or not batch:
            return
        multi = query_start_loc is not None
        longest = max_query_len if multi else 1
        splits = self._splits(batch, block_table.shape[1] * self.layout.block_size, longest, query.device)
        _, unused, part, part_lse = self._take(workspace, rows, splits, query.device)
        starts = query_start_loc if multi else seq_lens
        cap = LOG2E * (1.0 if layer.soft_cap is None else layer.soft_cap)
        (decode, decode_constants), (reduce, reduce_constants) = self._kernels(multi, lse is not None)
        decode[(self._tiles(longest) * layer.num_kv_heads, splits, batch)](
            query, cache, block_table, seq_lens, starts, part, part_lse, query.stride(0), query.stride(1),
            block_table.stride(0), splits, layer.window or 0, scale * LOG2E * self._factor, cap,
            **decode_constants,
        )  # fmt: skip
        strides = (0, 0) if lse is None else lse.stride()
        reduce[(rows,)](
            part, part_lse, starts, unused if sinks is None else sinks, out, unused if lse is None else lse,
            batch, splits, out.stride(0), out.stride(1), *strides, **reduce_constants,
        )  # fmt: skip
