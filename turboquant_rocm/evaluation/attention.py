"""A transformers attention that reads its keys and values as a scheme would give them back.

Every query of a forward pass without a cache, the first token's included, reads all of its keys and values from the
scheme. So one pass over a text is what decoding it token by token would give, without a first chunk that servers
attend to raw: the harder case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ..integrations.transformers import UnsupportedError, native_attention
from ..options import CacheOptions
from .schemes import Scheme

__all__ = ["ATTENTION", "Watch", "reading"]

ATTENTION: Final = "turboquant_evaluation"
"""Name of the attention, for ``model.set_attn_implementation``."""
_ROWS: Final = 256  # queries whose scores are held at once


Watch = Callable[[int, torch.Tensor, torch.Tensor], None]
"""(layer, query [B, Hq, S, D], key [B, Hk, S, D]): called by every attention of a pass that is watched."""


class _Active:
    scheme: Scheme | None = None
    watch: Watch | None = None


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
    if _Active.watch is not None:
        _Active.watch(module.layer_idx, query, key)
    read_back = None if scheme is None else scheme.layers.get(module.layer_idx)
    if scheme is None or read_back is None:
        return native_attention(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    packed = read_back(key, value)
    options = scheme.options.get(module.layer_idx)
    if options is None or not options.exact_tokens:
        return native_attention(module, query, *packed, attention_mask, dropout, scaling, **kwargs)
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"{name}: exact tokens beside packed ones are evaluated without")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = _partly_exact(query * scale, (key, value), packed, attention_mask, options)
    return out.transpose(1, 2), None


def _partly_exact(
    query: torch.Tensor,  # [B, Hq, S, D], scaled
    exact: tuple[torch.Tensor, torch.Tensor],  # [B, Hk, S, D], [B, Hk, S, Dv]
    packed: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,  # bool [B, 1, S, S]; None: causal
    options: CacheOptions,
) -> torch.Tensor:
    """Attention [B, Hq, S, Dv] of tokens that each see the cache as it was when they were its last."""
    batch, heads, count, width = query.shape
    groups = heads // exact[0].shape[1]
    query = query.view(batch, -1, groups, count, width)
    parts = []
    for low in range(0, count, _ROWS):
        high = min(low + _ROWS, count)
        at = torch.arange(low, high, device=query.device)[:, None]
        token = torch.arange(high, device=query.device)
        ends = torch.tensor([[options.packed_end(n + 1)] for n in range(low, high)], device=query.device)
        is_exact = (token < options.first) | (token >= ends)
        hidden = token > at if mask is None else ~mask[:, :, None, low:high, :high]
        # What is exact for any of these rows lies in two runs of tokens.
        near = max(options.first, options.packed_end(low + 1))
        runs = [slice(a, min(b, high)) for a, b in ((0, options.first), (near, high)) if a < min(b, high)]
        rows = query[..., low:high, :]
        score = torch.einsum("bhgqd,bhsd->bhgqs", rows, packed[0][:, :, :high]).float()
        for run in runs:
            other = torch.einsum("bhgqd,bhsd->bhgqs", rows, exact[0][:, :, run]).float()
            score[..., run] = torch.where(is_exact[:, run], other, score[..., run])
        weight = torch.softmax(score.masked_fill_(hidden, -torch.inf), -1).to(query.dtype)
        out = torch.einsum("bhgqs,bhsd->bhgqd", weight * ~is_exact, packed[1][:, :, :high])
        for run in runs:
            out += torch.einsum("bhgqs,bhsd->bhgqd", weight[..., run] * is_exact[:, run], exact[1][:, :, run])
        parts.append(out)
    return torch.cat(parts, 3).flatten(1, 2)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


@contextmanager
def reading(model: Any, scheme: Scheme | None, watch: Watch | None = None) -> Iterator[None]:
    """In this block ``model``, called without a cache, reads keys and values of ``scheme`` (None: its own)."""
    config = model.config.get_text_config(decoder=True)
    before, outer = config._attn_implementation, (_Active.scheme, _Active.watch)
    model.set_attn_implementation(ATTENTION)
    _Active.scheme, _Active.watch = scheme, watch
    try:
        yield
    finally:
        _Active.scheme, _Active.watch = outer
        model.set_attn_implementation(before)
