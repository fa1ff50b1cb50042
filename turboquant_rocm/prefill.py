"""Which attention runs the first chunk of a prompt, on the raw keys and values: the server's, not ours.

The routes and their limits are those of the attention implementations that servers ship, declared like backends.
Sources: the FlashAttention project page (head sizes up to 256, windows, soft caps); vLLM's documentation of its
attention backends (AITER flash attention on CDNA3/4: head sizes 64, 128, 256; Triton unified attention: sinks);
PyTorch's documentation of scaled_dot_product_attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from .eligibility import AtMost, Code, MultipleOf, OneOf, Refusal, Request, Requirement, Without, refusals
from .spec import AttentionKind, Dtype

__all__ = ["ROUTES", "PrefillChoice", "PrefillRoute", "prefill_route"]

_CAUSAL = OneOf(Code.LAYER_KIND, (AttentionKind.FULL, AttentionKind.SLIDING, AttentionKind.CHUNKED))
_HALF = OneOf(Code.DTYPE, (Dtype.BF16, Dtype.FP16))
_NO_BIAS = Without(Code.POSITION_BIAS)


@dataclass(frozen=True, slots=True)
class PrefillRoute:
    """An attention implementation for raw keys and values, with what it needs."""

    name: str
    requires: tuple[Requirement, ...]


ROUTES: Final = (
    PrefillRoute(
        "aiter_flash",
        (
            OneOf(Code.ARCH, ("gfx942", "gfx950")),
            OneOf(Code.HEAD_SIZE, (64, 128, 256)),
            Without(Code.SINKS),
            _CAUSAL,
            _HALF,
            _NO_BIAS,
        ),
    ),
    PrefillRoute(
        "flash_attention_3",
        (
            OneOf(Code.ARCH, ("sm_90",)),
            MultipleOf(Code.HEAD_SIZE, 8),
            AtMost(Code.HEAD_SIZE, 256),
            _CAUSAL,
            _HALF,
            _NO_BIAS,
        ),
    ),
    PrefillRoute(
        "flash_attention_2",
        (
            OneOf(
                Code.ARCH,
                ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950"),
            ),
            MultipleOf(Code.HEAD_SIZE, 8),
            AtMost(Code.HEAD_SIZE, 256),
            Without(Code.SINKS),
            _CAUSAL,
            _HALF,
        ),
    ),
    PrefillRoute(
        "triton_unified",
        (
            OneOf(
                Code.ARCH,
                (
                    "gfx90a",
                    "gfx942",
                    "gfx950",
                    "gfx1100",
                    "gfx1201",
                    "sm_80",
                    "sm_86",
                    "sm_89",
                    "sm_90",
                    "sm_100",
                    "sm_120",
                ),
            ),
            AtMost(Code.HEAD_SIZE, 512, low=32),
            _CAUSAL,
            _HALF,
            _NO_BIAS,
        ),
    ),
    PrefillRoute("torch_sdpa", (_CAUSAL, Without(Code.SINKS), Without(Code.SOFT_CAP))),
)
"""Routes, fastest first."""


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """route: name of the chosen one, None if none serves. refused: every reason of each one before it."""

    route: str | None
    refused: Mapping[str, tuple[Refusal, ...]] = field(
        default_factory=lambda: MappingProxyType({}), hash=False
    )


def prefill_route(request: Request) -> PrefillChoice:
    """The first route that serves the layer of ``request``."""
    refused: dict[str, tuple[Refusal, ...]] = {}
    for route in ROUTES:
        why = refusals(route.requires, request)
        if not why:
            return PrefillChoice(route.name, MappingProxyType(refused))
        refused[route.name] = why
    return PrefillChoice(None, MappingProxyType(refused))
