"""What a cache with options must do over any backend, on any device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from tests.cases import TORCH_DTYPES, rel_l2
from tests.generate_checks import beside_native, forced, prompt_of
from turboquant_rocm.backends import get_backend
from turboquant_rocm.evaluation.compare import key_scales
from turboquant_rocm.integrations import transformers as tq
from turboquant_rocm.options import CacheOptions

OPTIONS = (
    CacheOptions(recent=20),
    CacheOptions(first=4),
    CacheOptions(key_mean=True),
    CacheOptions(recent=20, first=4, key_mean=True),
    CacheOptions(recent=20, first=4, key_mean=True, key_scale=True),
)
PROMPT, CHUNK = 50, 7
READ_BACK = {"3bit_nc": (0.1, 0.3), "4bit_nc": (0.05, 0.2)}
"""Relative errors between which keys and values of those bits are read back."""


@contextmanager
def packed_attention(model: Any) -> Iterator[None]:
    """The model attends over packed tokens; afterwards as before."""
    plain = model.config._attn_implementation
    model.set_attn_implementation(tq.ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(plain)


def attend(model: Any, ids: torch.Tensor, count: int, cache: Any) -> dict[int, float]:
    """Prefill, single tokens up to ``count`` and the rest as a chunk; errors beside native attention by queries."""
    with beside_native() as errors:
        forced(model, ids[:, : count + 1], PROMPT, cache)
        model(input_ids=ids[:, count:], cache=cache, use_cache=True)
    return errors


@torch.no_grad()
def check_mixture(
    model: Any,
    layers: Mapping[int, str],
    chosen: Mapping[int, str],
    *,
    dtype: str,
    target: Any,
    count: int = 80,
) -> None:
    """Each layer of a mixed cache gets the backend of ``chosen`` from the dispatcher; attention over it is that over
    its tokens read back."""
    ids = prompt_of(model, count + CHUNK)
    cache = tq.mixed_cache(model.config, layers, dtype=dtype, target=target, checks="full")
    assert {i: layer.bound.backend for i, layer in enumerate(cache.layers)} == chosen
    with packed_attention(model):
        errors = attend(model, ids, count, cache)
    print(f"{layers}: {errors}")
    assert set(errors) == {1, CHUNK}
    assert max(errors.values()) < 2 * min(get_backend(name).tolerance(dtype) for name in chosen.values())


@torch.no_grad()
def check_options(
    model: Any, options: CacheOptions, preset: str, *, backend: str, dtype: str, target: Any,
    count: int = 80,
) -> None:  # fmt: skip
    """Prefill, single tokens and a chunk: attention over the cache is that over its tokens read back, and those are the
    model's own where they are exact, and quantised where not.

    backend: of the cache, which must serve every layer. count: tokens before the chunk, of which the first 50 are the
    prompt.
    """
    ids = prompt_of(model, count + CHUNK)
    scales = key_scales(model, ids[0].tolist()) if options.key_scale else None
    cache = tq.TurboQuantCache(
        model.config, preset, backend, dtype=dtype, target=target, protect=0, checks="full", options=options,
        key_scales=scales,
    )  # fmt: skip
    assert {layer.bound.backend for layer in cache.layers} == {backend}
    exact = transformers.DynamicCache(config=model.config)
    with packed_attention(model):
        errors = attend(model, ids, count, cache)
        unpacked = attend(model, ids, count, exact)
    assert not unpacked, "an exact cache was attended over as packed"
    print(f"{backend} {preset}{options}: {errors}")
    assert set(errors) == {1, CHUNK}
    roundings = 2 + options.key_scale  # its own, that of transformers, and of queries that are scaled back
    assert max(errors.values()) < roundings * get_backend(backend).tolerance(dtype)
    total, end = count + CHUNK, options.packed_end(count + CHUNK)
    assert options.first < end < total or not options.recent
    got = cache.layers[0].dequantized(0, total, TORCH_DTYPES[dtype])
    low, high = READ_BACK[preset.partition("+")[0]]
    for mine, own in zip(got, (exact.layers[0].keys, exact.layers[0].values), strict=True):
        assert torch.equal(mine[:, :, : options.first], own[:, :, : options.first])
        if end < total:  # with a mean and a scale they are stored less it and times it
            assert rel_l2(mine[:, :, end:], own[:, :, end:]) < (2e-3 if options.key_mean else 1e-9)
        assert low < rel_l2(mine[:, :, options.first : end], own[:, :, options.first : end]) < high
