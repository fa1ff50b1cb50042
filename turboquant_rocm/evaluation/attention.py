"""A transformers attention that reads its keys and values as a scheme would give them back.

Every query of a forward pass without a cache, the first token's included, reads all of its keys and values from the
scheme. So one pass over a text is what decoding it token by token would give, without a first chunk that servers
attend to raw: the harder case.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ..integrations.transformers import native_attention
from .schemes import Scheme

__all__ = ["ATTENTION", "reading"]

ATTENTION: Final = "turboquant_evaluation"
"""Name of the attention, for ``model.set_attn_implementation``."""


class _Active:
    scheme: Scheme | None = None


def _attention(
    module: Any,
    query: torch.Tensor,  # [B, Hq, S, D]
    key: torch.Tensor,  # [B, Hk, S, D]
    value: torch.Tensor,  # [B, Hk, S, Dv]
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    scheme = _Active.scheme
    read_back = None if scheme is None else scheme.layers.get(module.layer_idx)
    if read_back is not None:
        key, value = read_back(key, value)
    return native_attention(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


@contextmanager
def reading(model: Any, scheme: Scheme | None) -> Iterator[None]:
    """In this block ``model``, called without a cache, reads keys and values of ``scheme`` (None: its own)."""
    config = model.config.get_text_config(decoder=True)
    before, outer = config._attn_implementation, _Active.scheme
    model.set_attn_implementation(ATTENTION)
    _Active.scheme = scheme
    try:
        yield
    finally:
        _Active.scheme = outer
        model.set_attn_implementation(before)
