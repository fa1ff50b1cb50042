"""What the four modes of compressed stores must do in a model, on any device: random models and the real one alike."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.cases import rel_l2
from tests.generate_checks import beside_native, forced, prompt_of
from turboquant_rocm.backends import get_backend
from turboquant_rocm.integrations import transformers as tq
from turboquant_rocm.integrations.capture import ShadowLayer, StoreCache, StoreLayer, open_cache

ATTENTIONS = ("drop-in", "direct")
PROMPT, NEW, RING = 90, 10, 16
PACKED = {"hybrid": 80, "full": 96}
"""Tokens that are packed at the end, of 99; in both modes a block becomes full while tokens are decoded."""
DRIFT = {"fp32": 1e-6, "fp16": 2.0}
"""Of logits, as a share of what quantising changes, where both sides do the same sums in the same order. Otherwise 2:
a code that rounds the other way moves the keys of the next layer, and with them its codes, so that after 30 layers two
orders of the same sums are two samples of the same noise. What one attention may be off by is bounded beside it."""


class DefinedLayer(transformers.cache_utils.DynamicLayer):
    """What a mode promises, written down once more: a plain cache, and what a store of the same tokens reads back."""

    def __init__(self, shadow: ShadowLayer, exact_prefill: bool) -> None:
        super().__init__()
        self.shadow, self.exact_prefill = shadow, exact_prefill

    def update(self, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.get_seq_length()
        raw = self.exact_prefill and (before == 0 or key.shape[2] > tq.MAX_DECODE_ROWS)
        history = self.shadow.store.read() if before else None
        super().update(key, value)
        self.shadow.update(key, value)
        if raw and history is None:
            return key, value
        if raw:
            return tuple(
                torch.cat([h.transpose(1, 2), x], 2) for h, x in zip(history, (key, value), strict=True)
            )
        return tuple(x.transpose(1, 2) for x in self.shadow.store.read())


def defined(shadowed: StoreCache, mode: str) -> StoreCache:
    """A cache of capture_only with the ring of ``mode``, made to give the model what ``mode`` promises."""
    for i in shadowed.packed_layers:
        shadowed.layers[i] = DefinedLayer(shadowed.layers[i], mode == "hybrid")
    return shadowed


def check_modes(
    model: Any, attention: str, *, backend: str | None, dtype: str, target: Any, preset: str = "turboquant_4bit_nc"
) -> None:  # fmt: skip
    """Greedy decoding in every mode: capture_only is off bit for bit, hybrid and full are what they are defined as.

    backend: None for the dispatcher's. dtype: of the model, fp32 or fp16.
    """
    text = prompt_of(model, PROMPT)
    options = {
        "preset": preset, "backend": backend, "dtype": dtype, "target": target, "protect": 0, "block_size": 16,
        "checks": "full",
    }  # fmt: skip
    settings = transformers.GenerationConfig(
        max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip

    def opened(mode: str, ring: int = RING) -> Any:
        cache = open_cache(model.config, mode, ring_tokens=ring, **options)
        if mode != "off":
            assert len(cache.packed_layers) == model.config.num_hidden_layers
        return cache

    def generated(cache: Any) -> Any:
        return model.generate(
            text, attention_mask=torch.ones_like(text), cache=cache, generation_config=settings
        )

    plain, direct = model.config._attn_implementation, attention == "direct"
    if direct:
        model.set_attn_implementation(tq.ATTENTION)
    try:
        off, shadowed = opened("off"), opened("capture_only")
        want, got = generated(off), generated(shadowed)
        assert torch.equal(got.sequences, want.sequences)
        assert all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))
        for native, layer in zip(off.layers, shadowed.layers, strict=True):
            assert torch.equal(layer.keys, native.keys) and torch.equal(layer.values, native.values)
        for report in shadowed.report():
            assert (report.tokens, report.packed_tokens) == (PROMPT + NEW - 1, PACKED["hybrid"])
            assert report.key_nmse is not None and report.value_nmse is not None
            assert 0.002 < report.key_nmse < 0.03 and 0.0005 < report.value_nmse < 0.05
        ids = want.sequences
        exact = forced(model, ids, PROMPT, opened("off"))
        assert torch.equal(forced(model, ids, PROMPT, opened("capture_only")), exact)
        for mode, ring in (("hybrid", RING), ("full", 0)):
            cache = opened(mode)
            with beside_native() as errors:
                packed = forced(model, ids, PROMPT, cache)
            assert set(errors) == (({1} if mode == "hybrid" else {1, PROMPT}) if direct else set())
            (backend_used,) = {layer.bound.backend for layer in cache.layers}
            tolerance = 2 * get_backend(backend_used).tolerance(
                dtype
            )  # its rounding, and that of transformers
            assert max(errors.values(), default=0.0) < tolerance, (mode, errors)
            model.set_attn_implementation(plain)
            definition = forced(model, ids, PROMPT, defined(opened("capture_only", ring), mode))
            if direct:
                model.set_attn_implementation(tq.ATTENTION)
            error, effect = rel_l2(packed[1:], definition[1:]), rel_l2(definition[1:], exact[1:])
            print(f"{mode} {attention}: {error:.1e} from its definition, {effect:.1e} from off; {errors}")
            assert effect > 2e-3, "packed tokens are not exact"
            assert error < (2.0 if direct else DRIFT[dtype]) * effect, mode
            for layer in cache.layers:
                count = layer.store.packed_tokens
                kept, again = layer.store.dequantized(), layer.store.read(0, count)
                assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
            assert torch.equal(packed[0], exact[0]) == (mode == "hybrid"), "exact prefill in hybrid alone"
            assert all(isinstance(layer, StoreLayer) for layer in cache.layers)
            assert {(r.tokens, r.packed_tokens) for r in cache.report()} == {(PROMPT + NEW - 1, PACKED[mode])}
    finally:
        model.set_attn_implementation(plain)
