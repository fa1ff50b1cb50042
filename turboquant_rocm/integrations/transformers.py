"""A TurboQuant KV cache for Hugging Face transformers, and attention over its packed bytes.

    from turboquant_rocm.integrations.transformers import TurboQuantCache

    cache = TurboQuantCache(model.config, preset="turboquant_4bit_nc")
    model.generate(**inputs, cache=cache)

Two modes, chosen by the model's attention implementation:

* drop-in (any implementation): ``update`` stores what it is given and returns dequantised keys and values, which the
  model's own attention reads.
* direct (``model.set_attn_implementation("turboquant")``): ``update`` returns a :class:`PackedChunk`, and
  :func:`packed_attention` decodes over the packed cache.

Both follow the routes of :mod:`..continuation`: a first chunk attends to its raw keys and values; a later chunk of up
to ``MAX_DECODE_ROWS`` tokens reads everything, itself included, from the packed cache; a longer one reads its history
packed and itself raw. Letters of the shapes: docs/design.md.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from . import require

require("transformers")

import torch  # noqa: E402
from transformers import AttentionInterface  # noqa: E402
from transformers.cache_utils import (  # noqa: E402
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask  # noqa: E402

from ..compressed_store import CompressedKVStore, store_bytes  # noqa: E402
from ..continuation import _attend, _merge, attend_prefill  # noqa: E402
from ..dispatch import IneligibleError, Policy  # noqa: E402
from ..eligibility import Code, Request  # noqa: E402
from ..modelspec import model_from_config  # noqa: E402
from ..ops import BoundLayer, Checks, PagedCache, bind  # noqa: E402
from ..options import EXACT, CacheOptions, exact_row_bytes, parse_cache  # noqa: E402
from ..planning import DEFAULT_BLOCK_SIZE, DEFAULT_PRESET, LayerPlan, Plan, Role, plan, ranges  # noqa: E402
from ..spec import Dtype, Preset, SpecError, Target, checked_int  # noqa: E402
from ..target import get_target  # noqa: E402

__all__ = [
    "ATTENTION",
    "MAX_DECODE_ROWS",
    "PackedChunk",
    "PackedLayer",
    "PartlyExactLayer",
    "TurboQuantCache",
    "UnsupportedError",
    "cache_bytes",
    "mixed_cache",
    "native_attention",
    "packed_attention",
]

log = logging.getLogger(__name__)

ATTENTION: Final = "turboquant"
"""Name of :func:`packed_attention` for ``set_attn_implementation`` and ``attn_implementation=``."""

MAX_DECODE_ROWS: Final = 128
"""Longest chunk after the first that reads itself from the packed cache, as in ``attend_prefill``."""

_MOST_TOKENS: Final = 1 << 30
_SPARE_PAGES: Final = 8  # the pool grows by at least an eighth, so that copying it costs little per token

_DTYPES: Final = {
    torch.bfloat16: Dtype.BF16,
    torch.float16: Dtype.FP16,
    torch.float32: Dtype.FP32,
}


class UnsupportedError(NotImplementedError):
    """Something that transformers can ask of a cache or of an attention function, and that this one does not do."""


_said: set[str] = set()


def _say_once(level: int, message: str) -> None:
    if message not in _said:
        _said.add(message)
        log.log(level, message)


class PackedLayer(CacheLayerMixin):
    """The packed cache of one layer: pages of ``block_size`` tokens that are added as sequences grow.

    Page j of sequence b is block j * B + b of the pool. With a window the pages are a ring that holds what the next
    chunk can see, so that the layer stops growing.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, bound: BoundLayer, direct: Callable[[], bool]) -> None:
        super().__init__()
        self.bound = bound
        self.window = bound.layer.window
        self.is_sliding = self.window is not None
        self.block_size = bound.layout.block_size
        self.ring: int | None = None
        if self.window is not None:
            self.ring = -(-(self.window - 1 + MAX_DECODE_ROWS) // self.block_size)
        self._direct = direct
        self._empty()

    def _empty(self) -> None:
        self.cache: PagedCache | None = None
        self.length = 0
        self._batch = 0
        self._low = 0  # first position that is still held
        self._table: torch.Tensor | None = None
        self._pending: PackedChunk | None = None
        self.is_initialized = False

    # ---- what transformers asks of a layer ------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Remember batch size and device, and check that the keys are what was planned for."""
        layer, shape = self.bound.layer, tuple(key_states.shape)
        if key_states.dim() != 4 or (shape[1], shape[3]) != (layer.num_kv_heads, layer.head_size):
            raise SpecError("key_states", shape, f"[B, {layer.num_kv_heads}, q, {layer.head_size}]")
        if value_states.shape[-1] != layer.value_size:
            raise SpecError(
                "value_states", tuple(value_states.shape), f"a last dimension of {layer.value_size}"
            )
        if _DTYPES.get(key_states.dtype) is not layer.dtype:
            raise SpecError(
                "key_states",
                key_states.dtype,
                f"{layer.dtype}, as planned; TurboQuantCache(dtype=...) plans others",
            )
        target = self.bound.decision.target
        if (key_states.device.type == "cpu") != (target.arch == "cpu"):
            raise SpecError("target", target.arch, f"a target for keys on {key_states.device}")
        self.device = key_states.device
        self._batch = shape[0]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Store [B, Hk, q, D] and [B, Hk, q, Dv]; return the keys and values that the q queries see.

        They are raw for a first chunk, dequantised in drop-in mode, and one :class:`PackedChunk` twice in direct mode.
        """
        self._settled()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self._batch:
            raise SpecError(
                "key_states", tuple(key_states.shape), f"batch size {self._batch}, as in this cache"
            )
        if self.length == 0:
            self._store(key_states, value_states)
            return key_states, value_states
        chunk = PackedChunk(self, key_states, value_states, self.length)
        if chunk.short:
            self._store(key_states, value_states)
        if self._direct():
            if not chunk.short:
                self._pending = chunk  # stored once it has attended: in a ring it would overwrite its history
            return chunk, chunk
        dense = chunk.dense()
        chunk.done()
        return dense

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(tokens, position of the first) that the next ``query_length`` queries are shown."""
        self._settled()
        start = self._start(self.length)
        return self.length - start + query_length, start

    def get_seq_length(self) -> int:
        """Tokens stored so far, those that left the window included."""
        return self.length if self._pending is None else self._pending.total

    def get_max_length(self) -> int:
        """The window, or -1 without one."""
        return -1 if self.window is None else self.window

    def reset(self) -> None:
        """Forget every token and free the pages."""
        self._empty()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens (a negative number, as in transformers)."""
        self._settled()
        if tokens_to_remove > 0:
            raise SpecError(
                "tokens_to_remove", tokens_to_remove, "a number <= 0: -n removes the last n tokens"
            )
        left = max(0, self.length + tokens_to_remove)
        if left and self._start(left) < self._low:
            raise UnsupportedError(
                f"crop({tokens_to_remove}) needs tokens from {self._start(left)}, and this layer with window "
                f"{self.window} holds those from {self._low}"
            )
        self.length = left
        if left == 0:
            self._low = 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Beam search: sequence i becomes a copy of sequence beam_idx[i]."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence ``repeats`` times, copies side by side."""
        if self.is_initialized:
            self._select(torch.arange(self._batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences."""
        self._select(indices)

    def offload(self) -> None:
        """Refused: the pages stay on their device."""
        raise UnsupportedError("TurboQuantCache does not offload: packed layers stay on their device")

    def prefetch(self) -> None:
        """Refused, as :meth:`offload`."""
        self.offload()

    # ---- pages ----------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of all allocated pages."""
        return 0 if self.cache is None else self.cache.nbytes

    def bytes_for(self, tokens: int, itemsize: int) -> int:
        """Bytes that one sequence of ``tokens`` tokens takes, without pages held in reserve.

        itemsize: bytes of an element of what stays exact (here nothing).
        """
        return self._pages_for(tokens) * self.bound.layout.block_stride

    def _pages_for(self, tokens: int) -> int:
        need = -(-tokens // self.block_size)
        return need if self.ring is None else min(need, self.ring)

    def _start(self, length: int) -> int:
        """First position that the token after ``length`` others sees."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def _settled(self) -> None:
        if self._pending is not None:
            raise UnsupportedError(
                "the previous chunk was handed out packed, and no attention was run over it: the model must call "
                f"the attention implementation {ATTENTION!r} after every cache update"
            )

    def _blocks(self, cache: PagedCache) -> torch.Tensor:
        """All bytes as [pages, B, bytes of a block]."""
        size = self.bound.layout.block_stride
        flat = cache.data.as_strided((cache.num_blocks, size), (size, 1))
        return flat.view(-1, self._batch, size)

    def _select(self, indices: torch.Tensor) -> None:
        self._settled()
        if not self.is_initialized:
            return
        if indices.dtype is torch.bool:
            indices = indices.nonzero()[:, 0]
        indices = indices.to(self.device)
        old, self._batch, self._table = self._batch, len(indices), None
        if self.cache is None:
            return
        size = self.bound.layout.block_stride
        before = self.cache.data.as_strided((self.cache.num_blocks, size), (size, 1)).view(-1, old, size)
        self.cache = self.bound.allocate(before.shape[0] * self._batch, self.device)
        torch.index_select(before, 1, indices, out=self._blocks(self.cache))

    def _reserve(self, tokens: int) -> None:
        """Pages for ``tokens`` tokens of every sequence."""
        need = self._pages_for(tokens)
        have = 0 if self.cache is None else self.cache.num_blocks // self._batch
        if need <= have:
            return
        need = max(need, have + have // _SPARE_PAGES)
        if self.ring is not None:
            need = min(need, self.ring)
        grown = self.bound.allocate(need * self._batch, self.device)
        if self.cache is not None:
            self._blocks(grown)[:have] = self._blocks(self.cache)
        self.cache = grown

    def _block_ids(self, pages: torch.Tensor) -> torch.Tensor:
        """[B, n] block of each of the n pages of every sequence."""
        if self.ring is not None:
            pages = pages % self.ring
        return pages * self._batch + torch.arange(self._batch, device=self.device)[:, None]

    def table(self, tokens: int) -> torch.Tensor:
        """Block table [B, M] int32 that spans ``tokens`` tokens."""
        pages = -(-tokens // self.block_size)
        if self._table is None or self._table.shape[1] < pages:
            room = pages + pages // _SPARE_PAGES
            self._table = self._block_ids(torch.arange(room, device=self.device)).int()
        return self._table[:, :pages]

    def lengths(self, tokens: int) -> torch.Tensor:
        """[B] int32, ``tokens`` for every sequence."""
        return torch.full((self._batch,), tokens, dtype=torch.int32, device=self.device)

    def _store(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Append [B, Hk, q, D] and [B, Hk, q, Dv]."""
        queries = key.shape[2]
        total = self.length + queries
        self._reserve(total)
        if self.cache is None:
            return  # nothing was ever given
        room = self.cache.num_blocks // self._batch * self.block_size
        dropped = 0 if self.ring is None else max(0, queries - room)
        position = torch.arange(self.length + dropped, total, device=self.device)
        slots = self._block_ids(position // self.block_size) * self.block_size + position % self.block_size
        self.bound.store(
            _rows(key[:, :, dropped:]), _rows(value[:, :, dropped:]), self.cache, slots.reshape(-1)
        )
        self.length = total
        if self.ring is not None:
            self._low = max(self._low, total - self.ring * self.block_size)

    def dequantized(self, start: int, stop: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B, Hk, n, D] and values [B, Hk, n, Dv] of positions [start, stop)."""
        assert self.cache is not None
        count = stop - start
        key, value, _ = self.bound.dequantize(
            self.cache,
            self.table(stop),
            self.lengths(stop),
            starts=self.lengths(start),
            dtype=dtype,
            total=self._batch * count,
        )
        return (
            key.view(self._batch, count, *key.shape[1:]).transpose(1, 2),
            value.view(self._batch, count, *value.shape[1:]).transpose(1, 2),
        )

    def attend(
        self, chunk: PackedChunk, query: torch.Tensor, scale: float | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Causal attention of the chunk's queries [B, Hq, q, D] over the packed cache: [B, q, Hq, Dv]."""
        bound, cache, (batch, _, queries, _) = self.bound, self.cache, query.shape
        assert cache is not None
        lengths, rows, out = self.lengths(chunk.total), _rows(query), None
        starts = torch.arange(0, (batch + 1) * queries, queries, dtype=torch.int32, device=query.device)
        if not chunk.short:
            out = attend_prefill(
                bound, rows, _rows(chunk.key), _rows(chunk.value), cache, self.table(chunk.total), lengths, starts,
                query_lens=[queries] * batch, total_lens=[chunk.total] * batch, scale=scale, sinks=sinks,
                max_decode_rows=MAX_DECODE_ROWS,
            )  # fmt: skip
        elif queries == 1:
            out = bound.decode(rows, cache, self.table(chunk.total), lengths, scale=scale, sinks=sinks)
        else:
            out = bound.decode(
                rows, cache, self.table(chunk.total), lengths, starts,
                max_query_len=queries, scale=scale, sinks=sinks,
            )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out.view(batch, queries, *out.shape[1:])


class PartlyExactLayer(PackedLayer):
    """A packed layer with :class:`..options.CacheOptions`: first and last tokens exact, keys packed less their mean.

    The first tokens are kept as they are, all others in a :class:`..compressed_store.CompressedKVStore`, of which the
    last ones are exact. key_mean: [Hk, 1, D], or None: that of the first keys that go to the store, over all sequences.
    key_scale: [Hk, 1, D], what those keys are then multiplied by, and queries of them divided by; with the option only.
    Windows are not supported: such layers keep few tokens anyway.
    """

    def __init__(
        self,
        bound: BoundLayer,
        direct: Callable[[], bool],
        options: CacheOptions,
        key_mean: torch.Tensor | None = None,
        key_scale: torch.Tensor | None = None,
    ) -> None:
        layer, d = bound.layer, bound.decision
        if why := options.refusals(Request(layer, d.target, d.preset, d.block_size)):
            raise UnsupportedError(f"layer {layer.index}: {options} with {', '.join(map(str, why))}")
        if options.key_scale and key_scale is None:
            raise SpecError(f"key_scales[{layer.index}]", None, "[Hk, 1, D], for the option key_scale")
        self.options = options
        self._given_mean = key_mean
        self._given_scale = key_scale if options.key_scale else None
        super().__init__(bound, direct)

    def _empty(self) -> None:
        super()._empty()
        self._first: tuple[torch.Tensor, torch.Tensor] | None = None  # [B, n, Hk, D] and [B, n, Hk, Dv]
        self._rest: CompressedKVStore | None = None
        self._mean: torch.Tensor | None = None  # [Hk, D]
        self._scale: torch.Tensor | None = None  # [Hk, D]

    def _store(self, key: torch.Tensor, value: torch.Tensor) -> None:
        parts = [x.transpose(1, 2) for x in (key, value)]
        room = max(0, self.options.first - self.length)
        self.length += key.shape[2]
        if room:
            head = [x[:, :room] for x in parts]
            if self._first is not None:
                head = [torch.cat(pair, 1) for pair in zip(self._first, head, strict=True)]
            self._first = (head[0].contiguous(), head[1].contiguous())
            parts = [x[:, room:] for x in parts]
        if not parts[0].shape[1]:
            return
        if self._rest is None:
            self._rest = CompressedKVStore(
                self.bound, max_tokens=_MOST_TOKENS, batch=self._batch, ring_tokens=self.options.recent,
                flush_tokens=self._flush, device=key.device, dtype=key.dtype,
            )  # fmt: skip
            if self.options.key_mean:
                given = self._given_mean
                mean = parts[0].float().mean((0, 1)) if given is None else given[:, 0]
                self._mean = mean.to(key)
            if self._given_scale is not None:
                self._scale = self._given_scale[:, 0].to(key)
        if self._mean is not None:
            parts[0] = parts[0] - self._mean
        if self._scale is not None:
            parts[0] = parts[0] * self._scale
        self._rest.append(*parts)

    def dequantized(self, start: int, stop: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """As in :class:`PackedLayer`; exact tokens as they are."""
        first, parts = self.options.first, []
        if self._first is not None and start < first:
            parts.append([x[:, start : min(stop, first)] for x in self._first])
        if self._rest is not None and stop > first:
            key, value = self._rest.read(max(0, start - first), stop - first, dtype)
            if self._scale is not None:
                key = (key.float() / self._scale.float()).to(dtype)
            parts.append([key if self._mean is None else key + self._mean, value])
        made = [torch.cat(x, 1).transpose(1, 2) for x in zip(*parts, strict=True)]
        return made[0], made[1]

    def attend(
        self, chunk: PackedChunk, query: torch.Tensor, scale: float | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """As in :class:`PackedLayer`: packed and exact tokens merged by lse."""
        layer = self.bound.layer
        scale = layer.softmax_scale if scale is None else scale
        rows = query.transpose(1, 2).contiguous()  # [B, q, Hq, D]
        if not chunk.short or self._rest is None or chunk.before < self.options.first:
            key, value = (x.transpose(1, 2) for x in chunk.dense())
            found = [
                self._over(rows[b], key[b], value[b], scale, chunk.before, sinks) for b in range(len(rows))
            ]
            return torch.stack(found).to(query.dtype)
        scaled = rows
        if self._scale is not None:
            per_head = self._scale.repeat_interleave(layer.gqa_ratio, 0).float()
            scaled = (rows.float() / per_head).to(rows.dtype)
        got = self._rest.attend(scaled, scale=scale, sinks=sinks, return_lse=True)
        assert isinstance(got, tuple)
        out, lse = got[0].float(), got[1]
        if self._mean is not None:
            groups = self._mean.repeat_interleave(layer.gqa_ratio, 0).float()
            lse = lse + scale * (rows.float() * groups).sum(-1)
        if self._first is not None:
            for b in range(len(rows)):
                part = _attend(
                    rows[b], self._first[0][b], self._first[1][b], scale, chunk.before, None, layer.soft_cap
                )
                _merge(out[b], lse[b], *part)
        return out.to(query.dtype)

    def _over(
        self,
        query: torch.Tensor,  # [q, Hq, D]
        key: torch.Tensor,  # [s, Hk, D]
        value: torch.Tensor,  # [s, Hk, Dv]
        scale: float,
        ahead: int,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention [q, Hq, Dv] fp32 over keys and values in full."""
        out, lse = _attend(query, key, value, scale, ahead, None, self.bound.layer.soft_cap)
        if sinks is None:
            return out.float()
        return out.float() * torch.exp(lse - torch.logaddexp(lse, sinks))[..., None]

    def crop(self, tokens_to_remove: int) -> None:
        """As in :class:`PackedLayer`. Packed tokens stay packed: fewer than ``recent`` may be exact then."""
        super().crop(tokens_to_remove)
        first = self.options.first
        if self._first is not None:
            self._first = (self._first[0][:, : self.length], self._first[1][:, : self.length])
        if self._rest is not None:
            self._rest.truncate(max(0, self.length - first))

    def _select(self, indices: torch.Tensor) -> None:
        super()._select(indices)
        if not self.is_initialized:
            return
        at = (indices.nonzero()[:, 0] if indices.dtype is torch.bool else indices).to(self.device)
        if self._first is not None:
            self._first = (self._first[0][at], self._first[1][at])
        if self._rest is not None:
            self._rest.select(at)

    @property
    def nbytes(self) -> int:
        """Bytes of pages, exact tokens, the keys' mean and scale."""
        kept = [*(self._first or ()), *(x for x in (self._mean, self._scale) if x is not None)]
        return (0 if self._rest is None else self._rest.nbytes) + sum(int(x.nbytes) for x in kept)

    def bytes_for(self, tokens: int, itemsize: int) -> int:
        """As in :class:`PackedLayer`, with the exact tokens, key mean and scale."""
        options, layer = self.options, self.bound.layer
        exact = min(tokens, options.first) * exact_row_bytes(layer, itemsize)
        if tokens <= options.first:
            return exact
        rest = store_bytes(
            self.bound, tokens - options.first, itemsize, ring_tokens=options.recent, flush_tokens=self._flush
        )
        vectors = (options.key_mean + options.key_scale) * layer.num_kv_heads
        return exact + rest + vectors * layer.head_size * itemsize

    @property
    def _flush(self) -> int:
        return self.options.flush if self.options.recent else 1


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[B, H, q, D] as [B * q, H, D]."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


@dataclass(eq=False)
class PackedChunk:
    """Stands for the keys and values of a chunk and its history on the way from the cache to the attention.

    After one attention call :meth:`done` must be called.
    key [B, Hk, q, D], value [B, Hk, q, Dv]: the raw chunk. before: tokens of history.
    """

    layer: PackedLayer
    key: torch.Tensor
    value: torch.Tensor
    before: int

    @property
    def queries(self) -> int:
        """Tokens of the chunk, q."""
        return int(self.key.shape[2])

    @property
    def total(self) -> int:
        """Tokens with the chunk."""
        return self.before + self.queries

    @property
    def short(self) -> bool:
        """True if the chunk reads itself from the packed cache, and has been stored there."""
        return self.queries <= MAX_DECODE_ROWS

    def done(self) -> None:
        """Attention is over: a long chunk is stored now, since in a ring it overwrites its own history."""
        if not self.short:
            self.layer._pending = None
            self.layer._store(self.key, self.value)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B, Hk, n, D] and values [B, Hk, n, Dv] of all n tokens that some query of the chunk sees."""
        start = self.layer._start(self.before)
        if self.short:
            return self.layer.dequantized(start, self.total, self.key.dtype)
        key, value = self.layer.dequantized(start, self.before, self.key.dtype)
        return torch.cat([key, self.key], 2), torch.cat([value, self.value], 2)

    def attend(self, query: torch.Tensor, scale: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
        """Causal attention of query [B, Hq, q, D] over the packed cache: [B, q, Hq, Dv]."""
        return self.layer.attend(self, query, scale, sinks)

    def is_causal(self, mask: torch.Tensor | None) -> bool:
        """True if ``mask`` (bool [B, 1, q, n], None: none needed) hides just the future and what left the window."""
        window = self.layer.window
        if mask is None:
            return window is None or self.total <= window
        key = (self.before, self.queries, window)
        if _verdict.mask is not None and _verdict.mask() is mask and _verdict.key == key:
            return _verdict.causal  # the layers of a forward pass share their masks
        start = self.layer._start(self.before)
        at = torch.arange(self.before, self.total, device=mask.device)[:, None]
        token = torch.arange(start, self.total, device=mask.device)
        seen = token <= at
        if window is not None:
            seen &= token > at - window
        causal = mask.dtype is torch.bool and mask.shape[-2:] == seen.shape and bool((mask == seen).all())
        _verdict.mask, _verdict.key, _verdict.causal = weakref.ref(mask), key, causal
        return causal


class _Verdict:
    """What was last found out about a mask."""

    mask: weakref.ref[torch.Tensor] | None = None
    key: tuple[int, int, int | None] = (0, 0, None)
    causal: bool = False


_verdict = _Verdict()


# ---- attention ---------------------------------------------------------------------------------------------


def packed_attention(
    module: Any,
    query: torch.Tensor,  # [B, Hq, q, D]
    key: torch.Tensor | PackedChunk,
    value: torch.Tensor | PackedChunk,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention for ``AttentionInterface``: over a :class:`PackedChunk` by its backend, over tensors by transformers.

    Masks that are not plain causal (left padding, packed sequences, image blocks) run over dequantised keys and
    values with that mask, which is logged once. Returns out [B, q, Hq, Dv] and None or the weights.
    """
    if not isinstance(key, PackedChunk):
        return native_attention(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if dropout:
        raise UnsupportedError(f"dropout={dropout}: attention over a packed cache is for inference")
    for name in ("output_attentions", "position_bias"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise UnsupportedError(f"{name}: attention over a packed cache has none")
    if not key.is_causal(attention_mask):
        _say_once(
            logging.WARNING,
            "a mask that is not plain causal (left padding, for one): attention over dequantised keys and values",
        )
        dense = key.dense()
        key.done()
        return native_attention(module, query, *dense, attention_mask, dropout, scaling, **kwargs)
    layer = key.layer.bound.layer
    if kwargs.get("softcap") != layer.soft_cap:
        raise SpecError(
            f"layer {layer.index}: softcap", kwargs.get("softcap"), f"{layer.soft_cap}, as planned"
        )
    sinks = kwargs.get("s_aux")
    if layer.sinks != (sinks is not None):
        raise SpecError(f"layer {layer.index}: s_aux", sinks is not None, f"{layer.sinks}, as planned")
    sinks = None if sinks is None else sinks.detach().float()
    out = key.attend(query, scaling, sinks)
    key.done()
    return out, None


def native_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' SDPA attention, or the model's eager one where there are sinks or a soft cap."""
    if kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
        found: tuple[torch.Tensor, torch.Tensor | None] = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return found
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise UnsupportedError(
            f"{type(module).__name__}: sinks or a soft cap, and no eager_attention_forward"
        )
    queries, tokens = query.shape[2], key.shape[2]
    if mask is None and queries > 1:
        mask = torch.ones(1, 1, queries, tokens, dtype=torch.bool, device=query.device).tril(tokens - queries)
    if mask is not None and mask.dtype is torch.bool:
        lowest = torch.finfo(query.dtype).min
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, lowest)
    done: tuple[torch.Tensor, torch.Tensor | None] = eager(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return done


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


# ---- the cache ---------------------------------------------------------------------------------------------


class TurboQuantCache(Cache):
    """A transformers cache whose layers are packed where the plan says so, and transformers' own elsewhere.

    config: of the model; its attention implementation chooses the mode (see the module). preset, block_size: as in
    :func:`turboquant_rocm.plan`. backend, layout: force one (``torch_reference`` is never chosen by itself). target:
    ``local`` or an arch. dtype: of keys and queries (default: what the config says). protect: native layers at each
    end (default: 2 for dense models). skip_layers: indices, or kinds such as ``sliding``, that stay native. checks: of
    every call, see :data:`..ops.Checks`. options: tokens that stay exact, and keys less their mean; layers with a
    window go without. key_means: [Hk, 1, D] by layer, as :func:`..evaluation.compare.key_means` measures them; others
    take the mean of the first chunk. key_scales: likewise, of :func:`..evaluation.compare.key_scales`, for key_scale.

    ``plan`` says what was decided; it is logged once. Layers that no backend serves stay native with a warning; if
    none is served, IneligibleError lists every reason. SpecError names a wrong argument.
    """

    def __init__(
        self,
        config: Any,
        preset: str | Preset = DEFAULT_PRESET,
        backend: str | None = None,
        *,
        layout: str | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        target: str | Target = "local",
        dtype: Dtype | str | None = None,
        protect: int | None = None,
        skip_layers: Collection[int | str] = (),
        checks: Checks = "shapes",
        options: CacheOptions | None = None,
        key_means: Mapping[int, torch.Tensor] | None = None,
        key_scales: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        if options is not None and not isinstance(options, CacheOptions):
            raise SpecError("options", options, "CacheOptions, or none")
        self.options = CacheOptions() if options is None else options
        self._key_means = key_means or {}
        self._key_scales = key_scales or {}
        if not hasattr(config, "get_text_config"):
            raise SpecError("config", type(config).__name__, "a transformers config, as model.config")
        text = config.get_text_config(decoder=True)
        layers: list[Any] = DynamicCache(config=config).layers
        model = model_from_config(config.to_dict(), name=str(config.model_type), source="transformers")
        if len(model.layers) != len(layers):
            raise SpecError("config", f"{len(model.layers)} layers", f"{len(layers)}, as transformers has")
        foreign = {
            i
            for i, layer in enumerate(layers)
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)
        }
        # Layers that share a cache hand its keys and values to one another inside the model.
        foreign |= {e.kv_shared_with for e in model.layers if e.kv_shared_with is not None}
        self.plan: Plan = plan(
            model,
            get_target(target),
            preset,
            block_size,
            policy=Policy.from_environment().narrowed_by(Policy(force=backend, layout=layout)),
            protect=protect,
            skip={*skip_layers, *foreign},
            dtype=dtype,
        )
        packed = [entry for entry in self.plan.layers if entry.role is Role.QUANTIZED]
        if not packed and self.plan.refused:
            first = self.plan.refused[0]
            raise IneligibleError(self.plan.question.request(first.layer), dict(first.refused), "no backend")

        def direct() -> bool:
            return bool(text._attn_implementation == ATTENTION)

        for entry in packed:
            layers[entry.layer.index] = self._packed(entry, layers[entry.layer.index], direct, checks)
        if self.options and packed and not any(isinstance(layer, PartlyExactLayer) for layer in layers):
            raise SpecError("options", str(self.options), "none: no packed layer here takes them")
        super().__init__(layers=layers)
        _say_once(logging.WARNING if self.plan.refused else logging.INFO, self._summary())

    def _packed(
        self, entry: LayerPlan, native: Any, direct: Callable[[], bool], checks: Checks
    ) -> PackedLayer:
        window = getattr(native, "sliding_window", None)
        if window != entry.layer.window:
            raise SpecError(
                f"layer {entry.layer.index}: window", entry.layer.window, f"{window}, as transformers has"
            )
        assert entry.decision is not None
        bound, index = bind(entry.decision, checks=checks), entry.layer.index
        refused = self.options.refusals(self.plan.question.request(entry.layer))
        if not self.options or any(refusal.code is Code.WINDOW for refusal in refused):
            return PackedLayer(bound, direct)
        mean, scale = self._key_means.get(index), self._key_scales.get(index)
        wants = (entry.layer.num_kv_heads, 1, entry.layer.head_size)
        for name, given in (("key_means", mean), ("key_scales", scale)):
            if given is not None and tuple(given.shape) != wants:
                raise SpecError(f"{name}[{index}]", tuple(given.shape), f"{wants} = [Hk, 1, D]")
        return PartlyExactLayer(bound, direct, self.options, mean, scale)

    def _summary(self) -> str:
        parts = []
        for group in self.plan.groups:
            first = group.first
            what = (
                f"{first.backend} ({first.decision.layout})" if first.decision else f"native ({first.reason})"
            )
            if first.role is Role.REFUSED:
                reasons = "; ".join(
                    f"{name}: {', '.join(map(str, why))}" for name, why in first.refused.items()
                )
                what = f"native (no backend: {reasons})"
            parts.append(f"layers {ranges(group.layers)}: {what}")
        question = self.plan.question
        return (
            f"{self.plan.model.name}, {question.preset.name}{self.options} on {question.target}: "
            + ", ".join(parts)
        )

    @property
    def packed_layers(self) -> tuple[int, ...]:
        """Indices of the layers that are packed."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer, PackedLayer))

    @property
    def nbytes(self) -> int:
        """Bytes that the cache occupies now; see :func:`cache_bytes`."""
        return cache_bytes(self)


def mixed_cache(config: Any, layers: Mapping[int, str], backend: str | None = None, **settings: Any) -> Cache:
    """A cache with a preset and options for each layer, as ``evaluate --recommend`` picks them.

    layers: by index, a preset with its options as in ``3bit_nc+recent=128``, or ``exact``; exact layers, and those that
    are not there, are transformers' own. backend, settings: of :class:`TurboQuantCache`, the same for all layers, but
    for ``protect``, ``skip_layers`` and ``options``. SpecError names a layer that cannot be packed.
    """
    for name in {"protect", "skip_layers", "options"} & set(settings):
        raise SpecError(name, settings[name], "none: layers says what each layer gets")
    mixed = DynamicCache(config=config).layers
    for layer in layers:
        checked_int("layers", layer, 0, len(mixed) - 1)
    for name in sorted({*layers.values()} - {EXACT}):
        preset, options = parse_cache(name)
        own = {layer for layer, of in layers.items() if of == name}
        others = set(range(len(mixed))) - own
        cache = TurboQuantCache(
            config, preset, backend, protect=0, skip_layers=others, options=options, **settings
        )
        if native := own - set(cache.packed_layers):
            why = ", ".join(sorted({str(e.reason) for e in cache.plan.layers if e.layer.index in native}))
            raise SpecError(f"layers[{min(native)}]", name, f"exact: {why}")
        for layer in own:
            mixed[layer] = cache.layers[layer]
    return Cache(layers=mixed)


def cache_bytes(cache: Cache) -> int:
    """Bytes that any cache of transformers occupies now: what our layers say, keys and values of all others."""
    total = 0
    for layer in cache.layers:
        own = getattr(layer, "nbytes", None)
        tensors = (getattr(layer, "keys", None), getattr(layer, "values", None))
        plain = sum(int(x.nbytes) for x in tensors if isinstance(x, torch.Tensor))
        total += plain if own is None else own
    return total
