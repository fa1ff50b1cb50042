"""Prefill over a packed cache: :func:`attend_prefill` gives every query token of a chunk its whole past.

A sequence's current chunk is at hand raw; what came before it (its history) is in the packed cache. Each sequence
takes the route that its own lengths name, never the batch's largest ones:

* ``first``: no history. Attention over the raw chunk.
* ``decode``: history and at most ``max_decode_rows`` query tokens. The multi-query decode kernel, over the cache
  alone; the chunk has been stored before.
* ``chunks``: history and more query tokens. The history is dequantised ``chunk_tokens`` tokens at a time into one
  buffer, attended to, and merged by lse with the raw chunk. Extra memory depends on the chunk's length and on
  ``chunk_tokens``, not on the history.

The lse here is that of decode: natural logarithm, the sink included. Partial results carry none, and the sink joins
once at the end: lse' = logaddexp(lse, sink), out' = out * exp(lse - lse').
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache as memo
from typing import Any, Final, Literal

import torch

from .ops import BoundLayer, PagedCache, new_results
from .spec import SpecError

__all__ = ["Attention", "PrefillRows", "attend_prefill", "prefill_rows"]

log = logging.getLogger(__name__)

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
"""(query [q, Hq, D], key [q, Hk, D], value [q, Hk, Dv], scale) -> (out [q, Hq, Dv], lse [q, Hq] fp32): causal
attention of one sequence over its own chunk, with the layer's window and soft cap, without its sinks."""

_SCORE_BYTES: Final = 64 << 20  # largest block of scores that the plain route makes at once


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """What is done for one sequence: query rows [start, start + queries), ``history`` tokens before them."""

    sequence: int
    route: Literal["first", "decode", "chunks"]
    start: int
    queries: int
    history: int


def prefill_rows(
    query_lens: Sequence[int], total_lens: Sequence[int], max_decode_rows: int = 128
) -> tuple[PrefillRows, ...]:
    """The route of every sequence that has query tokens. total_lens: lengths with the current chunk."""
    found, start = [], 0
    for i, (queries, total) in enumerate(zip(query_lens, total_lens, strict=True)):
        if queries < 0 or total < queries:
            raise SpecError(f"total_lens[{i}]", total, f"at least its query length, {queries}")
        if queries:
            route: Literal["first", "decode", "chunks"] = "chunks"
            if total == queries:
                route = "first"
            elif queries <= max_decode_rows:
                route = "decode"
            found.append(PrefillRows(i, route, start, queries, total - queries))
        start += queries
    return tuple(found)


@memo
def _say_once(message: str) -> None:
    log.warning(message)


_no_flash: set[torch.device] = set()


def _flash(
    query: torch.Tensor,  # [q, Hq, D]
    key: torch.Tensor,  # [s, Hk, D]
    value: torch.Tensor,  # [s, Hk, D]
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(out, lse) by torch's flash attention, or None where it cannot do this."""
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return None
    if query.device in _no_flash or query.shape[-1] != value.shape[-1] or query.shape[-1] > 256:
        return None
    q, hq, d = query.shape
    s, hk, _ = key.shape
    groups = hq // hk
    shape = (hk, groups, s, d)  # the query heads of a group read the same keys: no copy is made for them
    wide = query.view(q, hk, groups, d).permute(1, 2, 0, 3)
    k, v = (x.permute(1, 0, 2)[:, None].expand(shape) for x in (key, value))
    try:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            wide, k, v, 0.0, causal, scale=scale
        )
    except RuntimeError as error:
        _no_flash.add(query.device)
        _say_once(f"prefill without flash attention on {query.device}: {str(error).splitlines()[0]}")
        return None
    return out.permute(2, 0, 1, 3).reshape(q, hq, d), lse[..., :q].permute(2, 0, 1).reshape(q, hq)


def _attend(
    query: torch.Tensor,  # [q, Hq, D]
    key: torch.Tensor,  # [s, Hk, D]
    value: torch.Tensor,  # [s, Hk, Dv]
    scale: float,
    ahead: int,
    window: int | None,
    soft_cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [q, Hq, Dv], lse [q, Hq] fp32): row j sees those of its last ``window`` tokens that are keys here.

    ahead: position of row 0 less position of key 0, so row j sees key t if j + ahead - window < t <= j + ahead.
    """
    q, hq, _ = query.shape
    s, hk, dv = value.shape
    causal = ahead < s - 1
    windowed = window is not None and q - 1 + ahead >= window
    if not windowed and soft_cap is None and (not causal or (ahead == 0 and q == s)):
        done = _flash(query, key, value, scale, causal)
        if done is not None:
            return done
    k, v = key.float(), value.float()
    out = torch.empty((q, hq, dv), dtype=torch.float32, device=query.device)
    lse = torch.empty((q, hq), dtype=torch.float32, device=query.device)
    step = max(1, _SCORE_BYTES // (4 * hq * s))
    for a in range(0, q, step):
        b = min(a + step, q)
        low = 0 if window is None else min(max(0, a + ahead - window + 1), s)
        high = min(s, b + ahead)
        if high <= low:
            out[a:b], lse[a:b] = 0.0, float("-inf")
            continue
        wide = query[a:b].float().view(b - a, hk, hq // hk, -1)
        score = torch.einsum("qhgd,shd->qhgs", wide, k[low:high]) * scale
        if soft_cap is not None:
            score = soft_cap * torch.tanh(score / soft_cap)
        if (causal and high > a + ahead + 1) or window is not None:
            at = torch.arange(a, b, device=query.device)[:, None] + ahead
            token = torch.arange(low, high, device=query.device)
            hidden = token > at
            if window is not None:
                hidden |= token <= at - window
            score.masked_fill_(hidden[:, None, None], float("-inf"))
        part = torch.logsumexp(score, -1)  # [b - a, Hk, G]
        weight = torch.exp(score - part.masked_fill(part == float("-inf"), float("inf"))[..., None])
        out[a:b] = torch.einsum("qhgs,shd->qhgd", weight, v[low:high]).reshape(b - a, hq, dv)
        lse[a:b] = part.reshape(b - a, hq)
    return out, lse


def _merge(
    out: torch.Tensor,  # [q, Hq, Dv] fp32, updated
    lse: torch.Tensor,  # [q, Hq] fp32, updated
    other: torch.Tensor,  # [q, Hq, Dv]
    other_lse: torch.Tensor,  # [q, Hq]
) -> None:
    joint = torch.logaddexp(lse, other_lse)
    safe = joint.masked_fill(joint == float("-inf"), 0.0)
    out.mul_(torch.exp(lse - safe)[..., None])
    out.add_(other * torch.exp(other_lse - safe)[..., None])
    lse.copy_(joint)


def _check(
    bound: BoundLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    total: int,
    sinks: torch.Tensor | None,
    chunk_tokens: int,
) -> None:
    layer = bound.layer
    wants = (
        ("query", query, (layer.num_heads, layer.head_size)),
        ("key", key, (layer.num_kv_heads, layer.head_size)),
        ("value", value, (layer.num_kv_heads, layer.value_size)),
    )
    for name, tensor, shape in wants:
        if tensor.dim() != 3 or tuple(tensor.shape[1:]) != shape or tensor.shape[0] < total:
            raise SpecError(name, tuple(tensor.shape), f"[{total} or more, {shape[0]}, {shape[1]}]")
        if tensor.dtype != query.dtype:
            raise SpecError(name, tensor.dtype, f"the dtype of query, {query.dtype}")
    if layer.sinks != (sinks is not None):
        raise SpecError("sinks", sinks is not None, f"{layer.sinks}: as this layer was bound")
    if chunk_tokens < 1:
        raise SpecError("chunk_tokens", chunk_tokens, "an integer >= 1")


def attend_prefill(
    bound: BoundLayer,
    query: torch.Tensor,  # [N, Hq, D] fp16/bf16
    key: torch.Tensor,  # [N, Hk, D] raw keys of the current chunks
    value: torch.Tensor,  # [N, Hk, Dv]
    cache: PagedCache,
    block_table: torch.Tensor,  # [B, M] int32
    seq_lens: torch.Tensor,  # [B] int32, lengths with the current chunks
    query_start_loc: torch.Tensor,  # [B + 1] int32
    *,
    query_lens: Sequence[int] | None = None,
    total_lens: Sequence[int] | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,  # [Hq] fp32
    attention: Attention | None = None,
    chunk_tokens: int = 2048,
    max_decode_rows: int = 128,
    out: torch.Tensor | None = None,  # [N, Hq, Dv]
    lse: torch.Tensor | None = None,  # [N, Hq] fp32
    return_lse: bool = False,
    workspace: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the query tokens of every sequence over its history in ``cache`` and its raw current chunk.

    The current chunks have been stored in ``cache`` before. Row j of a sequence's q rows sees its first
    seq_len - q + j + 1 tokens; the layer's window, soft cap and sinks apply on every route.

    query_lens, total_lens: host copies of query_start_loc.diff() and seq_lens. Pass them where the host knows them:
    reading them from the tensors synchronises. attention: what to run over a raw chunk instead of PyTorch, see
    :data:`Attention`. chunk_tokens: tokens of history dequantised at once. max_decode_rows: longest chunk that goes
    through the multi-query decode. Rows past query_start_loc[-1] are padding, as in :meth:`.ops.BoundLayer.decode`.

    Returns out in the dtype of ``query``, with ``return_lse`` also lse [N, Hq], sinks included.
    """
    if query_lens is None:
        query_lens = query_start_loc.diff().tolist()
    if total_lens is None:
        total_lens = seq_lens.tolist()
    if bound.checks != "off":
        _check(bound, query, key, value, sum(query_lens), sinks, chunk_tokens)
        cache.tag.require(bound.tag)
    layer = bound.layer
    scale = layer.softmax_scale if scale is None else scale
    out, lse = new_results(query, layer.value_size, out, lse, return_lse, padded=True)

    work = prefill_rows(query_lens, total_lens, max_decode_rows)
    _decode_rows(
        [w for w in work if w.route == "decode"],
        bound, query, cache, block_table, seq_lens, scale, sinks, out, lse, workspace,
    )  # fmt: skip
    buffers: tuple[torch.Tensor, torch.Tensor] | None = None
    for w in work:
        if w.route == "decode":
            continue
        rows = slice(w.start, w.start + w.queries)
        if attention is not None:
            part, part_lse = attention(query[rows], key[rows], value[rows], scale)
        else:
            part, part_lse = _attend(
                query[rows], key[rows], value[rows], scale, 0, layer.window, layer.soft_cap
            )
        if w.history or sinks is not None:
            part, part_lse = part.float(), part_lse.float()
        if w.history:
            if buffers is None:
                most = min(chunk_tokens, max(x.history for x in work if x.route == "chunks"))
                shape = (most, layer.num_kv_heads)
                buffers = (
                    query.new_empty((*shape, layer.head_size)),
                    query.new_empty((*shape, layer.value_size)),
                )
            part, part_lse = part.clone(), part_lse.clone()  # they may be views of the caller's memory
            _add_history(w, bound, query[rows], cache, block_table, scale, buffers, part, part_lse)
        if sinks is not None:
            joint = torch.logaddexp(part_lse, sinks.float())
            part = part * torch.exp(part_lse - joint)[..., None]
            part_lse = joint
        out[rows] = part.to(out.dtype)
        if lse is not None:
            lse[rows] = part_lse
    if return_lse:
        assert lse is not None
        return out, lse
    return out


def _decode_rows(
    work: list[PrefillRows],
    bound: BoundLayer,
    query: torch.Tensor,
    cache: PagedCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: Any,
) -> None:
    """One multi-query decode for all sequences of that route."""
    if not work:
        return
    together = torch.cat([query[w.start : w.start + w.queries] for w in work])
    starts = [0]
    for w in work:
        starts.append(starts[-1] + w.queries)
    part = out.new_empty((len(together), *out.shape[1:]))
    part_lse = None if lse is None else torch.empty(part.shape[:2], dtype=torch.float32, device=out.device)
    bound.ops.decode(
        together,
        cache.data,
        torch.cat([block_table[w.sequence : w.sequence + 1] for w in work]),
        torch.cat([seq_lens[w.sequence : w.sequence + 1] for w in work]),
        torch.tensor(starts, dtype=torch.int32, device=query.device),
        max(w.queries for w in work),
        scale,
        sinks,
        part,
        part_lse,
        workspace,
    )
    for w, a, b in zip(work, starts, starts[1:], strict=False):
        rows = slice(w.start, w.start + w.queries)
        out[rows] = part[a:b]
        if lse is not None and part_lse is not None:
            lse[rows] = part_lse[a:b]


def _add_history(
    w: PrefillRows,
    bound: BoundLayer,
    query: torch.Tensor,  # [q, Hq, D]
    cache: PagedCache,
    block_table: torch.Tensor,
    scale: float,
    buffers: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,  # [q, Hq, Dv] fp32, updated
    lse: torch.Tensor,  # [q, Hq] fp32, updated
) -> None:
    """Merge the history of one sequence into its result, a buffer at a time; tokens outside the window are skipped."""
    layer, size = bound.layer, len(buffers[0])
    first = 0 if layer.window is None else max(0, w.history - layer.window + 1)
    table = block_table[w.sequence : w.sequence + 1]
    for low in range(first, w.history, size):
        n = min(size, w.history - low)
        key, value = buffers[0][:n], buffers[1][:n]
        start, stop = (torch.full((1,), x, dtype=torch.int32, device=query.device) for x in (low, low + n))
        rows = torch.arange(0, 2 * n, n, dtype=torch.int32, device=query.device)
        bound.ops.dequantize(cache.data, table, stop, start, rows, key, value)
        part, part_lse = _attend(query, key, value, scale, w.history - low, layer.window, layer.soft_cap)
        _merge(out, lse, part, part_lse)
