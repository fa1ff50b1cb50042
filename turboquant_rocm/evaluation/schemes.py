"""Schemes: how a cache keeps keys and values, as one function per layer that gives them back as they would be read.

A scheme is all that the comparison needs to know of a cache, so that anything can be compared: a preset through the
store and dequantise of a backend, plain FP8, or a store of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from ..backends import Backend, backends, get_backend
from ..dispatch import Decision
from ..eligibility import Code, Request
from ..integrations.transformers import PackedLayer, PartlyExactLayer, TurboQuantCache, UnsupportedError
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
_OF_THE_MACHINE: Final = {Code.ARCH, Code.PACKAGE, Code.DTYPE}  # what an evaluation need not have
_EXACT_BYTES: Final = 2  # of an element that is kept: 16 bits, whatever dtype the evaluation computes in


@dataclass(frozen=True, eq=False)
class Scheme:
    """name: in results. layers: what each layer reads back; layers that are not there stay exact.

    bytes_per_token: of all layers and KV heads; layers that stay exact count 16 bits an element. by_layer: the same of
    each layer. options: of each layer that has any, which of its tokens stay exact. beside: bytes of each sequence that
    those take in each layer, at most, and its key means and scales. kernels: names of the backends with kernels, for
    whichever GPU, that declare every layer that is read back.
    """

    name: str
    layers: Mapping[int, ReadBack]
    bytes_per_token: float
    by_layer: Mapping[int, float] = field(default_factory=dict)
    options: Mapping[int, CacheOptions] = field(default_factory=dict)
    beside: Mapping[int, float] = field(default_factory=dict)
    kernels: tuple[str, ...] = ()

    @property
    def bytes_per_sequence(self) -> float:
        """Of all layers, beside those per token."""
        return sum(self.beside.values(), 0.0)


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
        bound.store(rows[0], rows[1], cache, slots)
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

    protect, skip_layers: layers that stay exact; none by default, unlike in a cache for serving. options: of the layers
    that take them, as in the cache: those with a window go without. key_means: of :func:`.compare.key_means`, needed
    with the option ``key_mean``. key_scales: of :func:`.compare.key_scales`, with ``key_scale``.
    """
    if options.key_mean and key_means is None:
        raise SpecError("key_means", None, "means of all layers, for the option key_mean")
    if options.key_scale and key_scales is None:
        raise SpecError("key_scales", None, "scales of all layers, for the option key_scale")
    try:
        cache = TurboQuantCache(
            config, preset, backend, target=target, dtype=dtype, block_size=block_size, protect=protect,
            skip_layers=skip_layers, options=options, key_means=key_means, key_scales=key_scales,
        )  # fmt: skip
    except UnsupportedError as error:
        raise SpecError("options", str(options), f"others ({error})") from None
    layers: dict[int, ReadBack] = {}
    size: dict[int, float] = {}
    partly: dict[int, CacheOptions] = {}
    beside: dict[int, float] = {}
    kernels = [backend.name for backend in backends() if backend.ready and _is_for_gpus(backend)]
    for entry in cache.plan.layers:
        spec, layer = entry.layer, cache.layers[entry.layer.index]
        if isinstance(layer, PackedLayer):
            own = options if isinstance(layer, PartlyExactLayer) else NONE
            if own.exact_tokens and (spec.soft_cap is not None or spec.sinks):
                raise SpecError(
                    "options", str(options), f"no exact tokens: layer {spec.index} has a soft cap or sinks"
                )
            mean = key_means[spec.index] if own.key_mean and key_means else None
            scale = key_scales[spec.index] if own.key_scale and key_scales else None
            layers[spec.index] = _stored(layer.bound, mean, scale)
            size[spec.index] = layer.bound.layout.bytes_per_token
            if own:
                partly[spec.index] = own
                vectors = own.key_mean + own.key_scale
                beside[spec.index] = (
                    exact_bytes(spec) * own.exact_tokens
                    + spec.num_kv_heads * spec.head_size * _EXACT_BYTES * vectors
                )
            kernels = [name for name in kernels if _declares(name, layer.bound.decision)]
        elif spec.keeps_cache and spec.kv_shared_with is None:
            size[spec.index] = exact_bytes(spec)
    if not layers:
        raise SpecError("preset", cache.plan.question.preset.name, "at least one layer that is quantised")
    short = cache.plan.question.preset.name.removeprefix("turboquant_")
    name = name or f"{short}{options}"
    return Scheme(name, layers, sum(size.values()), size, partly, beside, tuple(kernels))


def _is_for_gpus(backend: Backend) -> bool:
    return any(requirement.code is Code.ARCH for requirement in backend.requires)


def _declares(name: str, decision: Decision) -> bool:
    """True if a backend would serve the decision's layer on a GPU of its own, in a dtype that it takes."""
    asked = Request(decision.layer, decision.target, decision.preset, decision.block_size)
    return all(refusal.code in _OF_THE_MACHINE for refusal in get_backend(name).refusals(asked))


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
    options = {layer: scheme.options[layer]} if layer in scheme.options else {}
    return Scheme(name, {layer: scheme.layers[layer]}, scheme.bytes_per_token, options=options)


def mixture(name: str, schemes: Collection[Scheme], layers: Mapping[int, str], config: Any) -> Scheme:
    """Every layer as the scheme that ``layers`` names for it keeps it; layers of any other name stay exact."""
    known = {scheme.name: scheme for scheme in schemes}
    size = {layer.index: float(exact_bytes(layer)) for layer in model_layers(config)}
    found: dict[int, ReadBack] = {}
    options: dict[int, CacheOptions] = {}
    beside: dict[int, float] = {}
    for layer, scheme in layers.items():
        if scheme not in known:
            continue
        of = known[scheme]
        found[layer], size[layer] = of.layers[layer], of.by_layer[layer]
        if layer in of.options:
            options[layer], beside[layer] = of.options[layer], of.beside[layer]
    return Scheme(name, found, sum(size.values()), size, options, beside)
