"""Schemes: how a cache keeps keys and values, as one function per layer that gives them back as they would be read.

A scheme is all that the comparison needs to know of a cache, so that anything can be compared: a preset through the
store and dequantise of a backend, plain FP8, or a store of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from ..integrations.transformers import PackedLayer, TurboQuantCache
from ..modelspec import model_from_config
from ..ops import BoundLayer
from ..options import CacheOptions
from ..spec import LayerSpec, Preset, SpecError, Target
from .report import FP8

__all__ = [
    "ReadBack",
    "Scheme",
    "exact_bytes",
    "fp8_scheme",
    "mixture",
    "model_layers",
    "only_layer",
    "preset_scheme",
]

ReadBack = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(key [B, Hk, S, D], value [B, Hk, S, Dv]) -> the same shapes and dtypes, as read from the cache."""

NONE: Final = CacheOptions()
_FP8_MAX: Final = 448.0
_EXACT_BYTES: Final = 2  # of an element that is kept: 16 bits, whatever dtype the evaluation computes in


@dataclass(frozen=True, eq=False)
class Scheme:
    """name: in results. layers: what each layer reads back; layers that are not there stay exact.

    bytes_per_token: of all layers and KV heads; layers that stay exact count 16 bits an element. by_layer: the same of
    each layer. options: which tokens stay exact. bytes_per_sequence: what those take, at most, and key means.
    """

    name: str
    layers: Mapping[int, ReadBack]
    bytes_per_token: float
    by_layer: Mapping[int, float] = field(default_factory=dict)
    options: CacheOptions = NONE
    bytes_per_sequence: float = 0.0


def exact_bytes(layer: LayerSpec) -> int:
    """Bytes per token of a layer that is kept in 16 bits."""
    return layer.num_kv_heads * (layer.head_size + layer.value_size) * _EXACT_BYTES


def _stored(bound: BoundLayer, mean: torch.Tensor | None, scale: torch.Tensor | None) -> ReadBack:
    """Through the store and dequantise of a bound layer, over pages of its own. mean, scale: [Hk, 1, D], of keys."""

    def read_back(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if mean is not None:
            key = key - mean
        if scale is not None:
            key = key * scale
        batch, _, count, _ = key.shape
        pages = -(-count // bound.layout.block_size)
        cache = bound.allocate(batch * pages, key.device)
        table = torch.arange(batch * pages, dtype=torch.int32, device=key.device).view(batch, pages)
        token = torch.arange(count, device=key.device)
        slots = (table[:, :1].long() * bound.layout.block_size + token).reshape(-1)
        rows = [x.transpose(1, 2).reshape(batch * count, *x.shape[1:2], x.shape[3]) for x in (key, value)]
        bound.store(*rows, cache, slots)
        lengths = torch.full((batch,), count, dtype=torch.int32, device=key.device)
        read = bound.dequantize(cache, table, lengths, dtype=key.dtype, total=batch * count)
        back, value = (x.view(batch, count, *x.shape[1:]).transpose(1, 2) for x in (read.key, read.value))
        if scale is not None:
            back = back / scale
        return back if mean is None else back + mean, value

    return read_back


def preset_scheme(
    config: Any,
    preset: str | Preset,
    *,
    name: str | None = None,
    backend: str | None = None,
    target: str | Target = "local",
    dtype: str = "fp32",
    block_size: int = 16,
    protect: int = 0,
    skip_layers: Collection[int | str] = (),
    options: CacheOptions = NONE,
    key_means: Mapping[int, torch.Tensor] | None = None,
    key_scales: Mapping[int, torch.Tensor] | None = None,
) -> Scheme:
    """``preset`` through the backend that a TurboQuantCache for ``config`` would bind: same arguments, same errors.

    protect, skip_layers: layers that stay exact; none by default, unlike in a cache for serving. key_means: of
    :func:`.compare.key_means`, needed with the option ``key_mean``. key_scales: of :func:`.compare.key_scales`, with
    ``key_scale``.
    """
    if options.key_mean and key_means is None:
        raise SpecError("key_means", None, "means of all layers, for the option key_mean")
    if options.key_scale and key_scales is None:
        raise SpecError("key_scales", None, "scales of all layers, for the option key_scale")
    cache = TurboQuantCache(
        config, preset, backend, target=target, dtype=dtype, block_size=block_size, protect=protect,
        skip_layers=skip_layers,
    )  # fmt: skip
    layers: dict[int, ReadBack] = {}
    size: dict[int, float] = {}
    beside = 0.0
    for entry in cache.plan.layers:
        layer = cache.layers[entry.layer.index]
        if isinstance(layer, PackedLayer):
            mean = key_means[entry.layer.index] if options.key_mean and key_means else None
            scale = key_scales[entry.layer.index] if options.key_scale and key_scales else None
            layers[entry.layer.index] = _stored(layer.bound, mean, scale)
            size[entry.layer.index] = layer.bound.layout.bytes_per_token
            beside += exact_bytes(entry.layer) * options.exact_tokens
            vectors = options.key_mean + options.key_scale
            beside += entry.layer.num_kv_heads * entry.layer.head_size * _EXACT_BYTES * vectors
        elif entry.layer.keeps_cache and entry.layer.kv_shared_with is None:
            size[entry.layer.index] = exact_bytes(entry.layer)
    if not layers:
        raise SpecError("preset", cache.plan.question.preset.name, "at least one layer that is quantised")
    short = cache.plan.question.preset.name.removeprefix("turboquant_")
    return Scheme(name or f"{short}{options}", layers, sum(size.values()), size, options, beside)


def fp8_scheme(config: Any, protect: int = 0, skip_layers: Collection[int] = ()) -> Scheme:
    """Keys and values in FP8 E4M3FN without scales, saturating: what servers offer as an fp8 cache."""

    def read_back(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (x.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype) for x in (key, value))
        return key, value

    layers = model_layers(config)
    last = max(layer.index for layer in layers)
    exact = {i for i in range(last + 1) if i < protect or i > last - protect} | set(skip_layers)
    size = {
        layer.index: exact_bytes(layer) / (1 if layer.index in exact else _EXACT_BYTES) for layer in layers
    }
    return Scheme(FP8, {i: read_back for i in size if i not in exact}, sum(size.values()), size)


def model_layers(config: Any) -> tuple[LayerSpec, ...]:
    """The layers of a transformers config that keep keys and values of their own."""
    model = model_from_config(config.to_dict(), name=str(config.model_type), source="transformers")
    return tuple(e for e in model.layers if e.keeps_cache and e.kv_shared_with is None)


def only_layer(scheme: Scheme, layer: int) -> Scheme:
    """``scheme`` with one quantised layer, all others exact: what that layer costs."""
    name = f"{scheme.name} in layer {layer}"
    return Scheme(name, {layer: scheme.layers[layer]}, scheme.bytes_per_token, options=scheme.options)


def mixture(name: str, schemes: Collection[Scheme], layers: Mapping[int, str], config: Any) -> Scheme:
    """Every layer as the scheme that ``layers`` names for it keeps it; layers of any other name stay exact."""
    known = {scheme.name: scheme for scheme in schemes}
    size = {layer.index: float(exact_bytes(layer)) for layer in model_layers(config)}
    found: dict[int, ReadBack] = {}
    for layer, scheme in layers.items():
        if scheme in known:
            found[layer] = known[scheme].layers[layer]
            size[layer] = known[scheme].by_layer[layer]
    return Scheme(name, found, sum(size.values()), size)
