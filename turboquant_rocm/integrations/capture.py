"""Compressed stores in a transformers model: what would it cost (capture_only), and attention over it (hybrid, full).

    from turboquant_rocm.integrations.capture import open_cache

    cache = open_cache(model.config, "capture_only", preset="turboquant_3bit_nc", backend="torch_reference")
    model.generate(**inputs, cache=cache)
    print(cache.report())

* ``off``: transformers' own cache.
* ``capture_only``: transformers' own cache, whose tensors the model gets; beside it every layer that the plan packs has
  a :class:`~turboquant_rocm.compressed_store.CompressedKVStore` of the same tokens. Outputs are those of ``off``, bit
  for bit; :meth:`StoreCache.report` says what the compressed tokens read back as, and the bytes of both.
* ``hybrid``: the store instead of the cache. Prefill is exact: a first chunk, and the own tokens of a later one of more
  than ``MAX_DECODE_ROWS``, are attended to raw. Decode reads the packed tokens and the exact last ``ring_tokens``.
* ``full``: as hybrid without the ring and without the exact prefill: every token attends to packed tokens, but for
  those of the last block, until it is full.

With ``model.set_attn_implementation("turboquant")`` hybrid and full attend over packed bytes; with any other the store
hands the model dequantised keys and values, which it keeps. Layers with a sliding window, linear attention, Mamba,
convolutions and whatever else the plan does not pack have transformers' own layers and are passed through untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from . import require

require("transformers")

import torch  # noqa: E402
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer  # noqa: E402

from ..compressed_store import CompressedKVStore, store_bytes  # noqa: E402
from ..ops import BoundLayer, Checks, bind  # noqa: E402
from ..options import exact_row_bytes  # noqa: E402
from ..planning import DEFAULT_PRESET, LayerPlan  # noqa: E402
from ..spec import AttentionKind, Preset, SpecError, checked_int, checked_member  # noqa: E402
from . import transformers as packed  # noqa: E402

__all__ = ["LayerReport", "Mode", "StoreCache", "open_cache"]

DEFAULT_RING: Final = 128
DEFAULT_MAX_TOKENS: Final = 1 << 20  # where the config does not say how long a text can be


class Mode(StrEnum):
    """What the compressed stores are for; see the module."""

    OFF = "off"
    CAPTURE_ONLY = "capture_only"
    HYBRID = "hybrid"
    FULL = "full"


@dataclass(frozen=True)
class LayerReport:
    """One layer: tokens of a sequence, how many of them are packed, and bytes of the store and of plain tensors.

    key_nmse, value_nmse: squared error over energy of what the packed tokens read back as; None where the exact ones
    are not at hand (hybrid, full) or none is packed.
    """

    layer: int
    tokens: int
    packed_tokens: int
    store_nbytes: int
    exact_nbytes: int
    key_nmse: float | None
    value_nmse: float | None


@dataclass(frozen=True)
class _Options:
    """How to make the store of a layer."""

    max_tokens: int
    ring_tokens: int
    flush_tokens: int | None
    exact_prefill: bool

    def store(self, bound: BoundLayer, key: torch.Tensor) -> CompressedKVStore:
        """An empty store for the batch, device and dtype of key [B, Hk, n, D]."""
        return CompressedKVStore(
            bound, max_tokens=self.max_tokens, batch=key.shape[0], ring_tokens=self.ring_tokens,
            flush_tokens=self.flush_tokens, device=key.device, dtype=key.dtype,
        )  # fmt: skip

    def nbytes(self, bound: BoundLayer, tokens: int, itemsize: int, flat: bool = False) -> int:
        """Bytes of a store of one sequence of ``tokens`` tokens; see :func:`..compressed_store.store_bytes`."""
        return store_bytes(
            bound, tokens, itemsize, ring_tokens=self.ring_tokens, flush_tokens=self.flush_tokens, flat=flat
        )


def _token_major(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[B, H, n, D] as [B, n, H, D], or back."""
    return tuple(x.transpose(1, 2) for x in tensors)


def _exact_nbytes(store: CompressedKVStore) -> int:
    """Bytes of the tokens of ``store`` as plain tensors of its dtype."""
    return store.batch * store.length * exact_row_bytes(store.bound.layer, int(store.dtype.itemsize))


def _nmse(got: torch.Tensor, want: torch.Tensor) -> float:
    energy = float(want.double().square().sum())
    return float((got.double() - want.double()).square().sum()) / energy if energy else 0.0


class ShadowLayer(DynamicLayer):
    """transformers' own layer, and a store that is given the same tokens. The model sees the first alone."""

    def __init__(self, bound: BoundLayer, options: _Options) -> None:
        super().__init__()
        self.bound, self.options = bound, options
        self.store: CompressedKVStore | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """As transformers does, and into the store."""
        if self.store is None:
            self.store = self.options.store(self.bound, key_states)
        self.store.append(*_token_major(key_states.detach(), value_states.detach()))
        seen: tuple[Any, Any] = super().update(key_states, value_states, *args, **kwargs)
        return seen

    def reset(self) -> None:
        """Forget every token."""
        super().reset()
        self.store = None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens."""
        super().crop(tokens_to_remove)
        if self.store is not None:
            self.store.truncate(self.get_seq_length())

    def _select(self, indices: torch.Tensor) -> None:
        if self.store is not None:
            self.store.select(indices)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Beam search: sequence i becomes a copy of sequence beam_idx[i]."""
        super().reorder_cache(beam_idx)
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence ``repeats`` times."""
        super().batch_repeat_interleave(repeats)
        if self.store is not None:
            self._select(torch.arange(self.store.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences."""
        super().batch_select_indices(indices)
        self._select(indices)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the model has, and of the store beside them."""
        if self.store is None:
            return 0
        return int(self.keys.nbytes + self.values.nbytes) + self.store.nbytes

    def bytes_for(self, tokens: int, itemsize: int) -> int:
        """Bytes that one sequence of ``tokens`` tokens takes: plain ones, and in the store."""
        plain = tokens * exact_row_bytes(self.bound.layer, itemsize)
        return plain + self.options.nbytes(self.bound, tokens, itemsize)

    def report(self) -> LayerReport:
        """What the packed tokens read back as, against the tensors that the model has."""
        index, store = self.bound.layer.index, self.store
        if store is None:
            return LayerReport(index, 0, 0, 0, 0, None, None)
        n, errors = store.packed_tokens, (None, None)
        if n:
            read = store.read(0, n, torch.float32)
            exact = _token_major(self.keys[:, :, :n], self.values[:, :, :n])
            errors = tuple(_nmse(a, b) for a, b in zip(read, exact, strict=True))  # type: ignore[assignment]
        return LayerReport(index, store.length, n, store.nbytes, _exact_nbytes(store), *errors)


class StoreLayer(packed.PackedLayer):
    """A store in the place of transformers' layer."""

    def __init__(self, bound: BoundLayer, direct: Callable[[], bool], options: _Options) -> None:
        self.options = options
        super().__init__(bound, direct)

    def _empty(self) -> None:
        super()._empty()
        self.store: CompressedKVStore | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Append [B, Hk, q, D] and [B, Hk, q, Dv]; return the keys and values that the q queries see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        store = self.store
        if store is None:
            store = self.store = self.options.store(self.bound, key_states)
        if key_states.shape[0] != store.batch:
            raise SpecError(
                "key_states", tuple(key_states.shape), f"batch size {store.batch}, as in this cache"
            )
        before, raw = store.length, self.options.exact_prefill
        raw = raw and (before == 0 or key_states.shape[2] > packed.MAX_DECODE_ROWS)
        history = store.read() if raw and before else None
        store.append(*_token_major(key_states, value_states))
        self.length = store.length
        if raw:
            if history is None:
                return key_states, value_states
            key, value = _token_major(*history)
            return torch.cat([key, key_states], 2), torch.cat([value, value_states], 2)
        chunk = StoreChunk(self, key_states, value_states, before)
        return (chunk, chunk) if self._direct() else chunk.dense()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens (a negative number, as in transformers)."""
        removed = -checked_int("tokens_to_remove", tokens_to_remove, -(1 << 62), 0)
        self.length = max(0, self.length - removed)
        if self.store is not None:
            self.store.truncate(self.length)

    def _select(self, indices: torch.Tensor) -> None:
        if self.store is not None:
            if indices.dtype is torch.bool:
                indices = indices.nonzero()[:, 0]
            self.store.select(indices)
            self._batch = self.store.batch

    @property
    def nbytes(self) -> int:
        """Bytes of the store."""
        return 0 if self.store is None else self.store.nbytes

    def bytes_for(self, tokens: int, itemsize: int) -> int:
        """As in :class:`.transformers.PackedLayer`; with the dequantised tokens that are kept for other attentions."""
        return self.options.nbytes(self.bound, tokens, itemsize, flat=not self._direct())

    def report(self) -> LayerReport:
        """Sizes; there are no exact tensors to compare with."""
        store = self.store
        if store is None:
            return LayerReport(self.bound.layer.index, 0, 0, 0, 0, None, None)
        sizes = (store.length, store.packed_tokens, store.nbytes, _exact_nbytes(store))
        return LayerReport(self.bound.layer.index, *sizes, None, None)


class StoreChunk(packed.PackedChunk):
    """A chunk that has been appended to its layer's store, on the way to the attention."""

    layer: StoreLayer

    @property
    def short(self) -> bool:
        """The chunk is in the store, whatever its length."""
        return True

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B, Hk, n, D] and values [B, Hk, n, Dv] of all tokens; the packed ones are dequantised once and kept."""
        store = self.layer.store
        assert store is not None
        key, value = (torch.cat(parts, 1) for parts in zip(store.dequantized(), store.exact(), strict=True))
        return key.transpose(1, 2), value.transpose(1, 2)

    def attend(self, query: torch.Tensor, scale: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
        """Causal attention of query [B, Hq, q, D] over the store: [B, q, Hq, Dv]."""
        store = self.layer.store
        assert store is not None
        out = store.attend(query.transpose(1, 2), scale=scale, sinks=sinks)
        assert isinstance(out, torch.Tensor)
        return out


class StoreCache(packed.TurboQuantCache):
    """A transformers cache whose packed layers have a compressed store; see the module for the modes.

    mode: capture_only, hybrid or full. ring_tokens: how many of the last tokens stay exact (0 with full).
    flush_tokens: tokens packed at once, default a block. max_tokens: most tokens of a sequence, default what the
    config says. The rest is as for :class:`.transformers.TurboQuantCache`.
    """

    def __init__(
        self,
        config: Any,
        mode: Mode | str,
        preset: str | Preset = DEFAULT_PRESET,
        backend: str | None = None,
        *,
        ring_tokens: int = DEFAULT_RING,
        flush_tokens: int | None = None,
        max_tokens: int | None = None,
        skip_layers: Collection[int | str] = (),
        **options: Any,
    ) -> None:
        self.mode: Mode = checked_member("mode", Mode, mode)
        if self.mode is Mode.OFF:
            raise SpecError(
                "mode",
                "off",
                "capture_only, hybrid or full: off is transformers' own cache, from open_cache()",
            )
        if max_tokens is None:
            text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
            max_tokens = getattr(text, "max_position_embeddings", None) or DEFAULT_MAX_TOKENS
        self._store_options = _Options(
            checked_int("max_tokens", max_tokens, 1),
            0 if self.mode is Mode.FULL else checked_int("ring_tokens", ring_tokens, 0),
            flush_tokens,
            self.mode is Mode.HYBRID,
        )
        skip = {*skip_layers, str(AttentionKind.SLIDING)}
        super().__init__(config, preset, backend, skip_layers=skip, **options)

    def _packed(self, entry: LayerPlan, native: Any, direct: Callable[[], bool], checks: Checks) -> Any:
        assert entry.decision is not None
        bound = bind(entry.decision, checks=checks)
        if self.mode is Mode.CAPTURE_ONLY:
            return ShadowLayer(bound, self._store_options)
        return StoreLayer(bound, direct, self._store_options)

    @property
    def packed_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have a store."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer, ShadowLayer | StoreLayer))

    def report(self) -> tuple[LayerReport, ...]:
        """Of every layer that has a store."""
        return tuple(self.layers[i].report() for i in self.packed_layers)


def open_cache(config: Any, mode: Mode | str, preset: str | Preset = DEFAULT_PRESET, **options: Any) -> Cache:
    """The cache of a mode: transformers' own for ``off``, a :class:`StoreCache` for the others.

    options: of StoreCache; ``off`` takes none of them into account. SpecError names a wrong argument.
    """
    if checked_member("mode", Mode, mode) is Mode.OFF:
        return DynamicCache(config=config)
    return StoreCache(config, mode, preset, **options)
