"""What attend_prefill must do, as functions of a bound layer and a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.cases import CPU, TORCH_DTYPES, gaussian, layer_spec, rel_l2, shuffled_tables
from turboquant_rocm import BoundLayer, Decision, PagedCache, bind, get_preset
from turboquant_rocm.continuation import attend_prefill

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window 1": {"window": 1},
    "window 7": {"window": 7},
    "window 40": {"window": 40},
    "soft cap": {"soft_cap": 5.0},
    "sinks": {"sinks": True},
    "sinks and window": {"sinks": True, "window": 20},
}
QUERY_LENS, TOTAL_LENS = [20, 5, 1, 0, 24, 30], [20, 37, 33, 9, 75, 31]
"""First chunk; short continuation; decode; nothing; long continuation over several chunks; over one token."""


def reference_layer(
    preset: str, layout: str, feature: str, head_size: int = 64, heads: int = 2
) -> BoundLayer:
    layer = layer_spec(head_size, heads, 3, "fp16", **FEATURES[feature])
    return bind(Decision(layer, CPU, get_preset(preset), 16, "torch_reference", layout))


@dataclass
class Case:
    """Stored sequences whose last tokens are the current chunk."""

    bound: BoundLayer
    cache: PagedCache
    table: torch.Tensor
    query_lens: list[int]
    total_lens: list[int]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor | None
    raw_key: list[torch.Tensor]
    raw_value: list[torch.Tensor]
    padding: int = 3

    @classmethod
    def make(cls, bound: BoundLayer, query_lens: list[int], total_lens: list[int], device: str) -> Case:
        layer, g = bound.layer, torch.Generator().manual_seed(11)
        dtype = TORCH_DTYPES[layer.dtype]
        table, slots, blocks = shuffled_tables(total_lens, bound.layout.block_size, g)
        raw_key = [
            gaussian((n, layer.num_kv_heads, layer.head_size), g, dtype).to(device) for n in total_lens
        ]
        raw_value = [
            gaussian((n, layer.num_kv_heads, layer.value_size), g, dtype).to(device) for n in total_lens
        ]
        cache = bound.allocate(blocks, device)
        bound.store(torch.cat(raw_key), torch.cat(raw_value), cache, torch.cat(slots).to(device))
        ends = [
            (k[len(k) - q :], v[len(v) - q :]) for k, v, q in zip(raw_key, raw_value, query_lens, strict=True)
        ]
        pad = cls.padding
        rows = sum(query_lens) + pad
        query = gaussian((rows, layer.num_heads, layer.head_size), g, dtype).to(device)
        key = torch.cat([*(k for k, _ in ends), raw_key[0].new_zeros(pad, *raw_key[0].shape[1:])])
        value = torch.cat([*(v for _, v in ends), raw_value[0].new_zeros(pad, *raw_value[0].shape[1:])])
        sinks = torch.randn(layer.num_heads, generator=g).to(device) if layer.sinks else None
        return cls(
            bound,
            cache,
            table.to(device),
            query_lens,
            total_lens,
            query,
            key,
            value,
            sinks,
            raw_key,
            raw_value,
        )

    def run(self, **changes: Any) -> Any:
        device = self.query.device
        starts = torch.tensor([0, *self.query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        arguments: dict[str, Any] = {
            "query": self.query,
            "key": self.key,
            "value": self.value,
            "cache": self.cache,
            "block_table": self.table,
            "seq_lens": torch.tensor(self.total_lens, dtype=torch.int32, device=device),
            "query_start_loc": starts.to(device),
            "sinks": self.sinks,
            **changes,
        }
        return attend_prefill(self.bound, **arguments)

    def expected(self, max_decode_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """fp64: history (and on the decode route all) as the cache holds it, the current chunk raw."""
        layer = self.bound.layer
        outs, lses = [], []
        at = 0
        for i, (q, total) in enumerate(zip(self.query_lens, self.total_lens, strict=True)):
            lens = torch.tensor([total], dtype=torch.int32, device=self.query.device)
            read = self.bound.dequantize(self.cache, self.table[i : i + 1], lens, dtype=torch.float32)
            k, v = read.key.double().cpu(), read.value.double().cpu()
            if total == q or q > max_decode_rows:
                k[total - q :], v[total - q :] = self.raw_key[i][total - q :], self.raw_value[i][total - q :]
            k, v = (x.repeat_interleave(layer.gqa_ratio, 1) for x in (k, v))
            score = (
                torch.einsum("qhd,shd->hqs", self.query[at : at + q].double().cpu(), k) * layer.softmax_scale
            )
            if layer.soft_cap is not None:
                score = layer.soft_cap * torch.tanh(score / layer.soft_cap)
            row, token = torch.arange(total - q, total)[:, None], torch.arange(total)
            hidden = token > row
            if layer.window is not None:
                hidden |= token <= row - layer.window
            score = score.masked_fill(hidden, float("-inf"))
            if self.sinks is not None:
                sink = self.sinks.double().cpu()[:, None, None].expand(-1, q, 1)
                score = torch.cat([score, sink], -1)
            weight = score.softmax(-1)[..., :total]
            outs.append(torch.einsum("hqs,shd->qhd", weight, v))
            lses.append(score.logsumexp(-1).T)
            at += q
        return torch.cat(outs), torch.cat(lses)


def check(bound: BoundLayer, device: str, limit: float = 2e-3) -> None:
    """Every route and feature, with buffers much smaller than the history, and padding rows left alone."""
    case = Case.make(bound, QUERY_LENS, TOTAL_LENS, device)
    n = sum(QUERY_LENS)
    for rows, chunk in ((8, 16), (8, 11), (128, 2048), (0, 64)):
        out = torch.full((n + case.padding, bound.layer.num_heads, bound.layer.value_size), 9.0).to(
            case.query
        )
        lse = torch.full(out.shape[:2], 9.0, device=device)
        case.run(max_decode_rows=rows, chunk_tokens=chunk, out=out, lse=lse)
        want, want_lse = case.expected(rows)
        assert (out[n:] == 9).all()
        assert (lse[n:] == 9).all()
        error = rel_l2(out[:n], want)
        assert error < limit, f"max_decode_rows={rows} chunk_tokens={chunk}: {error:.1e}"
        assert (lse[:n].double().cpu() - want_lse).abs().max() < 10 * limit
        for head in range(bound.layer.num_heads):  # a wrong head mapping hides in an average
            assert rel_l2(out[:n, head], want[:, head]) < 2 * limit


def check_own_attention(bound: BoundLayer, device: str, limit: float = 2e-3) -> None:
    """The caller's attention runs once per sequence that is not decoded, on the raw chunk, and changes nothing."""
    case = Case.make(bound, QUERY_LENS, TOTAL_LENS, device)
    called = []
    groups = bound.layer.gqa_ratio

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        called.append(len(q))
        score = torch.einsum("qhd,shd->hqs", q.float(), k.float().repeat_interleave(groups, 1)) * scale
        score = score.masked_fill(torch.ones(len(q), len(q), device=q.device).triu(1).bool(), float("-inf"))
        out = torch.einsum("hqs,shd->qhd", score.softmax(-1), v.float().repeat_interleave(groups, 1))
        return out.to(q.dtype), score.logsumexp(-1).T

    got = case.run(attention=attention, max_decode_rows=8, chunk_tokens=16)
    assert called == [20, 24, 30]
    n = sum(QUERY_LENS)
    assert rel_l2(got[:n], case.expected(8)[0]) < limit


def check_chunks_are_bounded(bound: BoundLayer, device: str) -> None:
    """No call of dequantise writes more than chunk_tokens rows, and the same two buffers serve all."""
    largest, buffers = {}, {}
    for history in (40, 400):
        case = Case.make(bound, [20], [history + 20], device)
        rows, seen = [], set()
        dequantize = bound.ops.dequantize

        def spy(cache, table, lens, starts, cu, key, value, rows=rows, seen=seen, inner=dequantize):
            rows.append(len(key))
            seen.add(key.data_ptr())
            inner(cache, table, lens, starts, cu, key, value)

        bound.ops.dequantize = spy  # type: ignore[method-assign]
        try:
            case.run(max_decode_rows=8, chunk_tokens=32)
        finally:
            del bound.ops.dequantize
        assert sum(rows) == history
        largest[history], buffers[history] = max(rows), len(seen)
    assert largest == {40: 32, 400: 32}
    assert buffers == {40: 1, 400: 1}
