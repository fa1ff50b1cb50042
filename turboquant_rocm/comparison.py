"""Quantisers side by side at their bytes, over real queries, keys and values. Needs torch.

The table of docs/algorithms.md: ``python -m turboquant_rocm.validate_paper --compare``. FP8 and INT4 per token and head
are reference quantisers, written down here; everything else goes through the reference's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from .accuracy import Tensors, _causal_attention, _e4m3_magnitudes, _fp16, _nearest, _nmse
from .dispatch import Decision
from .ops import bind
from .paper import _rank_correlation, _scores
from .presets import get_preset
from .spec import Preset, SpecError, Target

__all__ = ["Comparison", "compare"]

_QUERIES: Final = 32  # last tokens, whose attention is compared
Read = Callable[[Tensors], tuple[torch.Tensor, torch.Tensor, int]]
"""Tensors -> keys and values [T, Hk, *] float64 as they read back, and bytes of a token and KV head."""


@dataclass(frozen=True)
class Comparison:
    """One quantiser on one layer's tensors.

    bytes: of a token and KV head. key_nmse: squared error over energy of the keys. rank_correlation: of scores. kl: of
    attention weights, nats, mean over queries. scores_alone, output: relative error of attention outputs with exact
    values, and with quantised ones.
    """

    quantizer: str
    tensors: str
    bytes: int
    key_nmse: float
    rank_correlation: float
    kl: float
    scores_alone: float
    output: float


def _cached(preset: Preset) -> Read:
    def read(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor, int]:
        decision = Decision(tensors.layer(), Target("cpu", "cpu"), preset, 16, "torch_reference", "soa")
        bound = bind(decision)
        n = len(tensors.key)
        cache = bound.allocate(-(-n // 16), "cpu")
        bound.store(tensors.key, tensors.value, cache, torch.arange(n))
        table = torch.arange(cache.num_blocks, dtype=torch.int32)[None]
        length = torch.tensor([n], dtype=torch.int32)
        key, value, _ = bound.dequantize(cache, table, length, dtype=torch.float64)
        return key, value, bound.layout.slot_bytes

    return read


def _fp8(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor, int]:
    """E4M3FN without a scale."""
    key, value = (
        x.double().sign() * _nearest(x.double().abs(), _e4m3_magnitudes())
        for x in (tensors.key, tensors.value)
    )
    return key, value, key.shape[2] + value.shape[2]


def _int4(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor, int]:
    """16 levels between each vector's own minimum and maximum, which are kept as an fp16 step and zero."""
    read = []
    for x in (tensors.key.double(), tensors.value.double()):
        low = x.amin(-1, keepdim=True)
        step = ((x.amax(-1, keepdim=True) - low) / 15).clamp(min=1e-12)
        read.append(((x - low) / step).round().clamp(0, 15) * _fp16(step) + _fp16(low))
    return read[0], read[1], (read[0].shape[2] + read[1].shape[2]) // 2 + 8


def quantizers() -> dict[str, Read]:
    """By name, from many bytes to few."""

    def named(name: str) -> Read:
        return _cached(get_preset(name))

    def grouped(key_bits: int, value_bits: int) -> Read:
        return _cached(Preset("grouped", key_bits, value_bits, True, value_group=32))

    return {
        "FP8 keys and values": _fp8,
        "k8v4": named("k8v4"),
        "prod_k4v4": named("prod_k4v4"),
        "4bit_nc, values in groups of 32": grouped(4, 4),
        "INT4 per token and head": _int4,
        "4bit_nc": named("4bit_nc"),
        "4-bit codes, no norm correction": _cached(Preset("plain", 4, 4, False)),
        "prod_k3v4": named("prod_k3v4"),
        "k3v4_nc, values in groups of 32": grouped(3, 4),
        "k3v4_nc": named("k3v4_nc"),
        "3bit_nc": named("3bit_nc"),
        "prod_k3v2": named("prod_k3v2"),
        "3-bit codes nc, 2-bit values in groups of 32": grouped(3, 2),
    }


def compare(tensors: Tensors) -> list[Comparison]:
    """Every quantiser on one layer's tensors. SpecError where groups of 32 do not fill a value vector."""
    if tensors.value.shape[2] % 32:
        raise SpecError(f"value of {tensors.name}", tuple(tensors.value.shape), "a head size that 32 divides")
    scale = tensors.key.shape[2] ** -0.5
    query = tensors.query[-_QUERIES:]
    key, value = tensors.key.double(), tensors.value.double()
    exact, _ = _causal_attention(query, key, value, scale)
    scores = _scores(tensors)
    weights = (scores.exact * scale).log_softmax(-1)
    rows = []
    for name, read in quantizers().items():
        k, v, size = read(tensors)
        got = scores.query @ k.permute(1, 2, 0)
        other = (got * scale).log_softmax(-1)
        alone, output = (_causal_attention(query, k, x, scale)[0] for x in (value, v))
        rows.append(
            Comparison(
                name, tensors.name, size, _nmse(k, key), float(_rank_correlation(scores.exact, got).mean()),
                float((weights.exp() * (weights - other)).sum(-1).mean()), math.sqrt(_nmse(alone, exact)),
                math.sqrt(_nmse(output, exact)),
            )
        )  # fmt: skip
    return rows
