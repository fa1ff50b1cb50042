"""What a specialisation of the kernels is: plain integers, hashable, no flydsl here."""

from __future__ import annotations

from dataclasses import dataclass

from ...layouts import Layout

__all__ = ["COLUMNS", "DIM", "TILE", "DecodeConfig", "RowConfig"]

DIM = 128  # head size of keys and values
TILE = 32  # tokens per step of a wave
COLUMNS = 16  # (query token, head of the group) pairs that one wave serves


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """One specialisation of the decode kernel.

    arch: gfx942 or gfx950. gqa: query heads per KV head. num_kv_heads, block_size, block_stride, the places and
    key_bits (3 or 4) come from the layout. multi: more than one query token per sequence may come. window, soft_cap:
    the layer's own. waves: waves per workgroup. direct: dtype of the output where the only split writes it and lse
    itself, bf16, fp16 or fp32; None: partial results. sinks: a logit per head joins the denominator (``direct`` only:
    else the reduction's).
    """

    arch: str
    gqa: int
    num_kv_heads: int
    block_size: int
    block_stride: int
    content_bytes: int
    key_base: int
    value_base: int
    token_stride: int
    head_stride: int
    norm_base: int
    scale_base: int
    zero_base: int
    meta_head_stride: int
    key_bits: int = 4
    multi: bool = False
    window: int | None = None
    soft_cap: float | None = None
    waves: int = 4
    direct: str | None = None
    sinks: bool = False

    @classmethod
    def of(
        cls,
        arch: str,
        layout: Layout,
        gqa: int,
        *,
        multi: bool = False,
        window: int | None = None,
        soft_cap: float | None = None,
        waves: int = 4,
        direct: str | None = None,
        sinks: bool = False,
    ) -> DecodeConfig:
        """The specialisation for caches of ``layout``."""
        n = layout.integers()
        assert n["KEY_DATA_TOKEN_STRIDE"] == n["VALUE_DATA_TOKEN_STRIDE"]
        assert n["KEY_DATA_HEAD_STRIDE"] == n["VALUE_DATA_HEAD_STRIDE"]
        assert n["KEY_NORM_TOKEN_STRIDE"] == 2, "the meta region is fp16, token after token"
        return cls(
            arch=arch,
            gqa=gqa,
            num_kv_heads=layout.num_kv_heads,
            block_size=layout.block_size,
            block_stride=layout.block_stride,
            content_bytes=layout.content_bytes,
            key_base=n["KEY_DATA_BASE"],
            value_base=n["VALUE_DATA_BASE"],
            token_stride=n["KEY_DATA_TOKEN_STRIDE"],
            head_stride=n["KEY_DATA_HEAD_STRIDE"],
            norm_base=n["KEY_NORM_BASE"],
            scale_base=n["VALUE_SCALE_BASE"],
            zero_base=n["VALUE_ZERO_BASE"],
            meta_head_stride=n["KEY_NORM_HEAD_STRIDE"],
            key_bits=layout.preset.key_bits,
            multi=multi,
            window=window,
            soft_cap=soft_cap,
            waves=waves,
            direct=direct,
            sinks=sinks,
        )

    @property
    def tokens_per_group(self) -> int:
        """Query tokens whose heads share the columns of one wave."""
        return max(1, COLUMNS // self.gqa) if self.multi else 1


@dataclass(frozen=True, slots=True)
class RowConfig:
    """One specialisation of the kernels that work row by row: query preparation and the reduction.

    dtype: of the query and the output, bf16, fp16 or fp32. multi: rows past query_start_loc[B] are padding. sinks: a
    logit per head joins the denominator. lse: it is written. key_bits: of the keys that a prepared query meets.
    """

    arch: str
    num_heads: int
    dtype: str
    multi: bool = False
    sinks: bool = False
    lse: bool = False
    key_bits: int = 4
