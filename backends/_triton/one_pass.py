"""What layers with a one-pass decode share: how a sequence is split, and warm-up.

Their decode kernel has a grid of (column tile and KV head, split, sequence) and tiles of 16 columns, (query token,
query head) pairs of one KV head; a second kernel joins the splits. Everything that a specialisation depends on is fixed
by the layer, by whether there are several query tokens per sequence, and by whether lse is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton

from ...dispatch import Decision
from ...layouts import Layout
from ...spec import SpecError
from .ops import TritonOps, _compute_units
from .prod_decode import COLUMNS
from .workspace import Workspace, default_workspace

__all__ = ["OnePassOps"]

_MAX_SPLITS = 64
_MIN_TOKENS = 256  # of a split
_PROGRAMS_PER_UNIT = 4


class OnePassOps:
    """One layer. ``splits``: fixed number of splits, for tests."""

    prepared_columns = 0
    """fp16 numbers that are prepared for each row of the query, in the workspace."""

    def __init__(self, decision: Decision, layout: Layout, *, splits: int | None = None) -> None:
        if splits is not None and not 1 <= splits <= _MAX_SPLITS:
            raise SpecError("splits", splits, f"1 to {_MAX_SPLITS}")
        self.decision, self.layer, self.layout = decision, decision.layer, layout
        self.fixed_splits = splits

    def _kernels(self, multi: bool, write_lse: bool) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Every kernel of a decode call with its constexprs and options."""
        raise NotImplementedError

    def _load(self, device: torch.device) -> None:
        """Put on ``device`` what the kernels read beside their arguments."""

    def _tiles(self, max_query_len: int) -> int:
        """Column tiles of a KV head."""
        return triton.cdiv(max_query_len, COLUMNS // self.layer.gqa_ratio)

    def _splits(self, batch: int, max_context: int, max_query_len: int, device: torch.device) -> int:
        if self.fixed_splits is not None:
            return self.fixed_splits
        programs = self._tiles(max_query_len) * self.layer.num_kv_heads * batch
        visible = min(max_context, (self.layer.window or max_context) + COLUMNS)
        wanted = _PROGRAMS_PER_UNIT * _compute_units(device) // max(1, programs)
        return max(1, min(wanted, visible // _MIN_TOKENS, _MAX_SPLITS))

    def _take(self, workspace: Workspace | None, rows: int, splits: int, device: torch.device) -> Any:
        """Views of scratch memory for a call over ``rows`` rows (query token, head)."""
        space = workspace or default_workspace(device)
        return space.take(rows, self.prepared_columns, splits, self.layer.value_size)[:4]

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

        Arguments and promise are those of :meth:`.ops.TritonOps.warmup`. Returns the number of kernels.
        """
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        dtype = dtype or {"bf16": torch.bfloat16, "fp16": torch.float16}[self.layer.dtype]
        self._load(device)
        space = workspace or default_workspace(device)
        step = COLUMNS // self.layer.gqa_ratio  # the longest query of as many tiles needs most
        lengths = [min(step * (i + 1), max_query_len) for i in range(self._tiles(max_query_len))]
        nbytes = 0
        for batch in range(1, max_batch + 1):
            for length in (1, *lengths):
                splits = self._splits(batch, max_context, length, device)
                rows = batch * length * self.layer.num_heads
                nbytes = max(nbytes, space.needed(rows, self.prepared_columns, splits, self.layer.value_size))
        space.reserve(nbytes)
        made = [
            compiled
            for multi in (False, True)
            for write in ((False, True) if lse is None else (lse,))
            for kernel, constants in self._kernels(multi, write)
            for compiled in TritonOps._compile(kernel, constants, {"query_ptr": dtype, "out_ptr": dtype})
        ]
        return len({id(kernel) for kernel in made})
