"""What a cache with options must do over any backend, on any device."""

from __future__ import annotations

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
    plain, exact = model.config._attn_implementation, transformers.DynamicCache(config=model.config)
    model.set_attn_implementation(tq.ATTENTION)
    try:
        with beside_native() as errors:
            forced(model, ids[:, : count + 1], PROMPT, cache)
            model(input_ids=ids[:, count:], cache=cache, use_cache=True)
        forced(model, ids[:, : count + 1], PROMPT, exact)
        model(input_ids=ids[:, count:], cache=exact, use_cache=True)
    finally:
        model.set_attn_implementation(plain)
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
