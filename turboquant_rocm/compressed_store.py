"""A compressed key/value store for use without a paged server: :class:`CompressedKVStore`.

    store = CompressedKVStore(bind(decision), max_tokens=32768, device="cuda")
    store.append(key, value)                # [B, n, Hk, D], [B, n, Hk, Dv]
    out = store.attend(query)               # [B, q, Hq, D] -> [B, q, Hq, Dv]

The most recent tokens are exact, in a ring buffer; older ones are packed, in the pages and by the store kernel of any
backend. Tokens move from one to the other ``flush_tokens`` at a time, so that decoding quantises nothing between two
flushes: with e exact tokens

    e < ring_tokens + flush_tokens, and after at least ring_tokens tokens  e >= ring_tokens

Attention is that of the packed part (decode over the packed bytes, or bounded chunks of dequantised ones for several
queries) and that of the exact part, merged by lse. What a token reads back as depends on that token alone, so the
packed part equals a one-shot quantisation of the same tokens, block by block.

Memory. Pages double as they are needed up to ``max_tokens``; with P the pages of a sequence for the most tokens that
were packed since the last reset, rounded up to a power of two and cut at those of ``max_tokens``:

    nbytes = B * (P * block_stride + (ring_tokens + flush_tokens - 1) * Hk * (D + Dv) * itemsize) + flat_nbytes

``flat_nbytes`` is 0 until :meth:`CompressedKVStore.dequantized` is used, which keeps what it has dequantised and adds
to it. Letters of the shapes: docs/design.md; all sequences of a batch have the same length.
"""

from __future__ import annotations

from typing import Final

import torch

from .continuation import _attend, _merge
from .layouts import Layout
from .layouts.views import checked_device, field_view
from .ops import BoundLayer, PagedCache, _expect
from .options import exact_row_bytes
from .spec import SpecError, checked_int, is_number

__all__ = ["CompressedKVStore", "packed_pages", "store_bytes"]

_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_CHUNK: Final = 2048  # packed tokens dequantised at once, of each sequence
_MAX_TOKENS: Final = 1 << 40


def packed_pages(layout: Layout, packed_tokens: int, max_tokens: int) -> int:
    """Pages of a sequence that has had up to ``packed_tokens`` packed tokens: P of the module's formula."""
    need = -(-packed_tokens // layout.block_size)
    if not need:
        return 0
    return min(1 << (need - 1).bit_length(), -(-max_tokens // layout.block_size))


def store_bytes(
    bound: BoundLayer,
    tokens: int,
    itemsize: int,
    *,
    ring_tokens: int,
    flush_tokens: int | None = None,
    flat: bool = False,
) -> int:
    """Bytes of a store of one sequence that is opened for ``tokens`` tokens and full: the module's formula.

    itemsize: bytes of an element of exact tokens. flat: with what :meth:`CompressedKVStore.dequantized` keeps.
    """
    layout = bound.layout
    flush = layout.block_size if flush_tokens is None else flush_tokens
    packed = max(0, tokens - ring_tokens) // flush * flush
    pages, row = packed_pages(layout, packed, tokens), exact_row_bytes(bound.layer, itemsize)
    rows = _ring_capacity(ring_tokens, flush) + (pages * layout.block_size if flat else 0)
    return pages * layout.block_stride + rows * row


def _ring_capacity(ring_tokens: int, flush_tokens: int) -> int:
    """Exact tokens that a store has room for."""
    return max(1, ring_tokens + flush_tokens - 1)


class CompressedKVStore:
    """Keys and values of one layer for ``batch`` sequences of equal length: the last ones exact, the others packed.

    bound: the layer; its backend stores, decodes and dequantises. Layers with a window are refused: they keep few
    tokens anyway. max_tokens: most tokens of a sequence. ring_tokens: how many of the last tokens are exact at least,
    0 or more. flush_tokens: tokens that are packed at once (default: a block). device, dtype: of keys, values and
    queries (default: the layer's dtype). SpecError names a wrong argument.
    """

    def __init__(
        self,
        bound: BoundLayer,
        *,
        max_tokens: int,
        batch: int = 1,
        ring_tokens: int = 128,
        flush_tokens: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(bound, BoundLayer):
            raise SpecError("bound", type(bound).__name__, "a BoundLayer, from bind()")
        if bound.layer.window is not None:
            raise SpecError(
                "window", bound.layer.window, "none: a layer with a window keeps few tokens anyway"
            )
        self.bound = bound
        self.batch = checked_int("batch", batch, 1, 1 << 20)
        self.max_tokens = checked_int("max_tokens", max_tokens, 1, _MAX_TOKENS)
        self.ring_tokens = checked_int("ring_tokens", ring_tokens, 0, 1 << 24)
        flush = bound.layout.block_size if flush_tokens is None else flush_tokens
        self.flush_tokens = checked_int("flush_tokens", flush, 1, 1 << 24)
        self.device = checked_device(device)
        self.dtype = _DTYPES[bound.layer.dtype] if dtype is None else dtype
        if self.dtype not in _DTYPES.values():
            raise SpecError("dtype", dtype, "one of " + ", ".join(map(str, _DTYPES.values())))
        self._capacity = _ring_capacity(self.ring_tokens, self.flush_tokens)
        self._ring = tuple(
            torch.empty(
                (batch, self._capacity, bound.layout.num_kv_heads, width),
                dtype=self.dtype,
                device=self.device,
            )
            for width in (bound.layer.head_size, bound.layer.value_size)
        )
        self.reset()

    def reset(self) -> None:
        """Forget every token, and free the pages and what was dequantised."""
        self._cache: PagedCache | None = None
        self._length = self._packed = 0
        self._flat: tuple[torch.Tensor, torch.Tensor] | None = None
        self._flat_tokens = 0
        self._table: torch.Tensor | None = None

    # ---- sizes ------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens of each sequence."""
        return self._length

    @property
    def packed_tokens(self) -> int:
        """Tokens of each sequence that are packed: the first ones."""
        return self._packed

    @property
    def exact_tokens(self) -> int:
        """Tokens of each sequence that are exact: the last ones."""
        return self._length - self._packed

    @property
    def flat_nbytes(self) -> int:
        """Bytes that :meth:`dequantized` keeps."""
        return 0 if self._flat is None else sum(int(x.nbytes) for x in self._flat)

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is held: see the module's formula."""
        pages = 0 if self._cache is None else self._cache.nbytes
        return pages + sum(int(x.nbytes) for x in self._ring) + self.flat_nbytes

    # ---- writing ----------------------------------------------------------------------------------------------

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Add n tokens to every sequence: key [B, n, Hk, D], value [B, n, Hk, Dv] of the store's dtype and device.

        SpecError, with nothing written, for a wrong argument or more than ``max_tokens`` tokens.
        """
        for name, tensor, like in zip(("key", "value"), (key, value), self._ring, strict=True):
            wants = (self.batch, key.shape[1] if key.dim() == 4 else "n", *like.shape[2:])
            if tensor.dim() != 4 or tuple(tensor.shape) != wants:
                raise SpecError(name, tuple(tensor.shape), f"[{', '.join(map(str, wants))}]")
            if tensor.dtype != self.dtype or tensor.device != like.device:
                raise SpecError(name, f"{tensor.dtype} on {tensor.device}", f"{self.dtype} on {like.device}")
        before, total = self._length, self._length + key.shape[1]
        if total > self.max_tokens:
            raise SpecError(
                "key", f"{key.shape[1]} tokens after {before}", f"at most max_tokens={self.max_tokens}"
            )
        spare = max(0, total - self._packed - self.ring_tokens)
        packed = self._packed + spare // self.flush_tokens * self.flush_tokens
        if packed > self._packed:
            old = self._exact(self._packed, min(packed, before))
            new = (x[:, : max(0, packed - before)] for x in (key, value))
            self._pack(*(torch.cat(parts, 1) for parts in zip(old, new, strict=True)))
        first = max(before, packed)
        at = torch.arange(first, total, device=self.device) % self._capacity
        for ring, x in zip(self._ring, (key, value), strict=True):
            ring[:, at] = x[:, first - before :]
        self._length, self._packed = total, packed

    def _pack(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Quantise [B, n, Hk, *] as the tokens after those that are packed."""
        n, size = key.shape[1], self.bound.layout.block_size
        self._reserve(self._packed + n)
        assert self._cache is not None
        position = torch.arange(self._packed, self._packed + n, device=self.device)
        sequence = torch.arange(self.batch, device=self.device)[:, None]
        slots = ((position // size) * self.batch + sequence) * size + position % size
        self.bound.store(key.flatten(0, 1), value.flatten(0, 1), self._cache, slots.flatten())

    def _reserve(self, tokens: int) -> None:
        """Pages for ``tokens`` packed tokens; what is in the old ones is copied, not quantised again."""
        pages = packed_pages(self.bound.layout, tokens, self.max_tokens)
        old = self._cache
        have = 0 if old is None else old.num_blocks // self.batch
        if pages > have:
            self._cache = self._new_pages(pages)
            if old is not None:
                self._blocks(self._cache)[:have] = self._blocks(old)

    def _new_pages(self, pages: int) -> PagedCache:
        """Empty pages and their table: page j of sequence b is block j * B + b, so that pages can be added."""
        page = torch.arange(pages, dtype=torch.int32, device=self.device)
        sequence = torch.arange(self.batch, dtype=torch.int32, device=self.device)
        self._table = page * self.batch + sequence[:, None]
        return self.bound.allocate(pages * self.batch, self.device)

    def _blocks(self, cache: PagedCache) -> torch.Tensor:
        """All bytes as [pages, B, bytes of a block]."""
        size = self.bound.layout.block_stride
        return cache.data.as_strided((cache.num_blocks, size), (size, 1)).view(-1, self.batch, size)

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens. Packed tokens stay packed, so fewer than ring_tokens may be exact then."""
        self._length = checked_int("length", length, 0, self._length)
        self._packed = min(self._packed, length)
        self._flat_tokens = min(self._flat_tokens, self._packed)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def select(self, indices: torch.Tensor) -> None:
        """Sequence i becomes a copy of sequence indices[i]; the batch has as many as there are indices (int, [B'])."""
        if indices.dim() != 1 or not len(indices) or indices.dtype not in (torch.int32, torch.int64):
            raise SpecError(
                "indices", f"{indices.dtype} {tuple(indices.shape)}", "integers [B'], at least one"
            )
        at = indices.to(self.device)
        if int(at.min()) < 0 or int(at.max()) >= self.batch:
            raise SpecError("indices", indices.tolist(), f"sequences 0 to {self.batch - 1}")
        self._ring = tuple(x[at] for x in self._ring)
        self._flat = None if self._flat is None else (self._flat[0][at], self._flat[1][at])
        pages = None if self._cache is None else self._blocks(self._cache)[:, at]
        self.batch = len(at)
        if pages is not None:
            self._cache = self._new_pages(pages.shape[0])
            self._blocks(self._cache).copy_(pages)

    # ---- reading ----------------------------------------------------------------------------------------------

    def packed(self) -> tuple[PagedCache, torch.Tensor, torch.Tensor] | None:
        """(cache, block_table [B, M] int32, seq_lens [B] int32) of the packed tokens, not copied; None without any."""
        if self._cache is None or not self._packed:
            return None
        assert self._table is not None
        pages = -(-self._packed // self.bound.layout.block_size)
        return self._cache, self._table[:, :pages], self._lengths(self._packed)

    def field(self, name: str) -> torch.Tensor:
        """View of a packed field, uint8 [B, pages, bs, Hk, bytes], no copy; tokens at ``packed_tokens`` and later mean
        nothing. KeyError if the preset has no such field, SpecError if no token is packed."""
        if self._cache is None:
            raise SpecError("field", name, "packed tokens: there are none")
        view = field_view(self._cache.data, self.bound.layout, name)
        return view.unflatten(0, (-1, self.batch)).transpose(0, 1)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The exact tokens in order: key [B, e, Hk, D] and value [B, e, Hk, Dv], views where they lie in one piece."""
        return self._exact(self._packed, self._length)

    def _exact(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        low = start % self._capacity
        count = stop - start
        high = min(low + count, self._capacity)
        rest = count - (high - low)
        key, value = (
            x[:, low:high] if not rest else torch.cat([x[:, low:high], x[:, :rest]], 1) for x in self._ring
        )
        return key, value

    def _lengths(self, tokens: int) -> torch.Tensor:
        return torch.full((self.batch,), tokens, dtype=torch.int32, device=self.device)

    def _dequantize(self, start: int, stop: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed tokens [start, stop) as [B, n, Hk, *]."""
        count = stop - start
        shape = (self.batch, count, self.bound.layout.num_kv_heads)
        if not count:
            sizes = (self.bound.layer.head_size, self.bound.layer.value_size)
            key, value = (torch.empty((*shape, size), dtype=dtype, device=self.device) for size in sizes)
            return key, value
        assert self._cache is not None and self._table is not None
        pages = -(-stop // self.bound.layout.block_size)
        found = self.bound.dequantize(
            self._cache, self._table[:, :pages], self._lengths(stop), starts=self._lengths(start), dtype=dtype,
            total=self.batch * count,
        )  # fmt: skip
        return found.key.view(*shape, -1), found.value.view(*shape, -1)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def read(
        self, start: int = 0, stop: int | None = None, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [start, stop), default all: key [B, n, Hk, D] and value [B, n, Hk, Dv], packed ones dequantised."""
        stop = checked_int("stop", self._length if stop is None else stop, 0, self._length)
        start = checked_int("start", start, 0, stop)
        dtype = self.dtype if dtype is None else dtype
        middle = min(max(start, self._packed), stop)
        packed, exact = self._dequantize(start, middle, dtype), self._exact(middle, stop)
        key, value = (torch.cat([a, b.to(dtype)], 1) for a, b in zip(packed, exact, strict=True))
        return key, value

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def dequantized(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The packed tokens flat: key [B, n, Hk, D] and value [B, n, Hk, Dv] of the store's dtype.

        Views of buffers that are kept and only added to: a call dequantises what was packed since the last one. They
        cost the memory of a plain cache; :meth:`attend` does without. Read-only; valid until the next call of a method
        that changes the store.
        """
        if self._flat is None or self._flat[0].shape[1] < self._packed:
            room = (
                packed_pages(self.bound.layout, self._packed, self.max_tokens) * self.bound.layout.block_size
            )
            grown = tuple(x.new_empty((self.batch, room, *x.shape[2:])) for x in self._ring)
            if self._flat is not None:
                for new, old in zip(grown, self._flat, strict=True):
                    new[:, : self._flat_tokens] = old[:, : self._flat_tokens]
            self._flat = (grown[0], grown[1])
        if self._flat_tokens < self._packed:
            fresh = self._dequantize(self._flat_tokens, self._packed, self.dtype)
            for flat, part in zip(self._flat, fresh, strict=True):
                flat[:, self._flat_tokens : self._packed] = part
            self._flat_tokens = self._packed
        return self._flat[0][:, : self._packed], self._flat[1][:, : self._packed]

    def release_flat(self) -> None:
        """Free what :meth:`dequantized` keeps."""
        self._flat, self._flat_tokens = None, 0

    # ---- attention --------------------------------------------------------------------------------------------

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def attend(
        self,
        query: torch.Tensor,
        *,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Causal attention of the last q tokens, which have been appended: query [B, q, Hq, D] -> out [B, q, Hq, Dv].

        Row j sees the first length - q + j + 1 tokens. scale: softmax scale, default the layer's. sinks: [Hq] fp32,
        exactly if the layer has some. With ``return_lse`` also lse [B, q, Hq] fp32, sinks included.
        """
        layer, device = self.bound.layer, self._ring[0].device
        shape = (self.batch, None, layer.num_heads, layer.head_size)
        _expect("query", query, shape, tuple(_DTYPES.values()), device, "[B, q, Hq, D]")
        queries = checked_int("query tokens", query.shape[1], 1, max(1, self._length))
        if layer.sinks != (sinks is not None):
            raise SpecError("sinks", sinks is not None, f"{layer.sinks}: as this layer was bound")
        if sinks is not None:
            _expect("sinks", sinks, (layer.num_heads,), (torch.float32,), device, "[Hq]")
        if scale is not None and not is_number(scale):
            raise SpecError("scale", scale, "a finite number > 0")
        scale = layer.softmax_scale if scale is None else scale
        out = torch.zeros((*query.shape[:3], layer.value_size), dtype=torch.float32, device=self.device)
        lse = torch.full(query.shape[:3], -torch.inf, dtype=torch.float32, device=self.device)
        sinks_left = sinks
        if queries == 1 and self._packed:
            out, lse = self._decode(query, scale, sinks)
            sinks_left = None
        elif self._packed:
            self._chunks(query, scale, out, lse)
        if self.exact_tokens:
            key, value = self.exact()
            ahead = self._length - queries - self._packed
            for b in range(self.batch):
                part, part_lse = _attend(query[b], key[b], value[b], scale, ahead, None, layer.soft_cap)
                _merge(out[b], lse[b], part, part_lse)
        if sinks_left is not None:
            joint = torch.logaddexp(lse, sinks_left.float())
            out = out * torch.exp(lse - joint)[..., None]
            lse = joint
        result = out.to(query.dtype)
        return (result, lse) if return_lse else result

    def _decode(
        self, query: torch.Tensor, scale: float, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out fp32, lse) [B, 1, Hq, *] of one query token per sequence over the packed bytes."""
        found = self.packed()
        assert found is not None
        cache, table, lengths = found
        shape = (self.batch, self.bound.layer.num_heads, self.bound.layer.value_size)
        out = torch.empty(shape, dtype=torch.float32, device=self.device)
        got = self.bound.decode(
            query[:, 0], cache, table, lengths, scale=scale, sinks=sinks, out=out, return_lse=True
        )
        assert isinstance(got, tuple)
        return got[0][:, None], got[1][:, None]

    def _chunks(self, query: torch.Tensor, scale: float, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Add the packed part for several query tokens, ``_CHUNK`` dequantised tokens at a time."""
        first = self._length - query.shape[1]
        for low in range(0, self._packed, _CHUNK):
            key, value = self._dequantize(low, min(low + _CHUNK, self._packed), query.dtype)
            for b in range(self.batch):
                part, part_lse = _attend(
                    query[b], key[b], value[b], scale, first - low, None, self.bound.layer.soft_cap
                )
                _merge(out[b], lse[b], part, part_lse)
