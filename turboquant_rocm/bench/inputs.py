"""What packed and unpacked measurements share: block tables, slots, and attention in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

__all__ = ["DTYPES", "LIMIT", "Rows", "Setting", "block_tables", "exact_rows", "relative", "slots_of"]

LIMIT: Final = {"bf16": 1e-2, "fp16": 2e-3}
"""Largest relative L2 error of a baseline, and of prefill, per dtype."""

DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CHUNK: Final = 8192  # tokens of exact attention at once


@dataclass(frozen=True)
class Setting:
    """What every measurement of a run shares. vendor: of the GPU. quick: search less, replay less."""

    device: torch.device
    vendor: str
    cold: int
    replays: int = 15
    quick: bool = False

    @property
    def smoke(self) -> bool:
        """True on the CPU."""
        return bool(self.device.type == "cpu")


def block_tables(lens: Sequence[int], block_size: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """(block_table [B, M] int32, blocks in use): blocks in random order, unused entries -1."""
    need = [-(-n // block_size) for n in lens]
    order = torch.randperm(sum(need), generator=torch.Generator().manual_seed(0)).int()
    table = torch.full((len(lens), max(need)), -1, dtype=torch.int32)
    used = 0
    for b, count in enumerate(need):
        table[b, :count] = order[used : used + count]
        used += count
    return table.to(device), used


def slots_of(table: torch.Tensor, lens: Sequence[int], block_size: int) -> torch.Tensor:
    """Slots [sum(lens)] int64 of all tokens, sequence after sequence."""
    found = []
    for b, length in enumerate(lens):
        at = torch.arange(length, device=table.device)
        found.append(table[b, at // block_size].long() * block_size + at % block_size)
    return torch.cat(found)


Rows = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
"""(start, stop) -> keys and values [stop - start, Hk, D] of these tokens of one sequence, in fp64."""


def exact_rows(
    query: torch.Tensor,  # [q, Hq, D]
    read: Rows,
    tokens: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,  # [Hq]
    last: torch.Tensor | None = None,  # [q] int64
) -> torch.Tensor:
    """fp64 attention [q, Hq, D] of one sequence, a chunk of tokens at a time, so that any length fits.

    last: position of the last token that each row sees; default: the rows are the last q of ``tokens``.
    """
    q, hq, _ = query.shape
    device = query.device
    if last is None:
        last = tokens - q + torch.arange(q, device=device)
    first = 0 if window is None else max(0, int(last.min()) - window + 1)
    top = torch.full((q, hq), -torch.inf, dtype=torch.float64, device=device)
    norm = torch.zeros_like(top)
    out = torch.zeros(query.shape, dtype=torch.float64, device=device)
    for start in range(first, tokens, _CHUNK):
        stop = min(start + _CHUNK, tokens)
        key, value = read(start, stop)
        hk = key.shape[1]
        grouped = query.double().view(q, hk, hq // hk, -1)
        score = torch.einsum("qhgd,shd->qhgs", grouped, key).reshape(q, hq, -1) * scale
        if soft_cap is not None:
            score = soft_cap * torch.tanh(score / soft_cap)
        token = torch.arange(start, stop, device=device)
        seen = token <= last[:, None]
        if window is not None:
            seen &= token > last[:, None] - window
        score = score.masked_fill(~seen[:, None], -torch.inf)
        new = torch.maximum(top, score.amax(-1))
        base = new.masked_fill(new == -torch.inf, 0.0)
        weight = torch.exp(score - base[..., None])
        shrink = torch.exp(top - base)
        part = torch.einsum("qhgs,shd->qhgd", weight.view(q, hk, hq // hk, -1), value).reshape(out.shape)
        out = out * shrink[..., None] + part
        norm = norm * shrink + weight.sum(-1)
        top = new
    if sinks is not None:
        norm = norm + torch.exp(sinks.double() - top)
    return out / norm[..., None]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want|| in fp64; NaN and infinities stay."""
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))
