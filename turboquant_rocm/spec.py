"""What is asked for, as frozen data: presets, layers, models and targets. No torch here.

Everything else in the package (dispatch, layouts, kernels, reports) is a function of these values, so they
are hashable, comparable and validated when they are made. An invalid value raises :class:`SpecError`, which
names the field, what it was and what is allowed.
"""

from __future__ import annotations

import reprlib
import sys
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import Any, Final

__all__ = [
    "AttentionKind",
    "Dtype",
    "LayerSpec",
    "ModelSpec",
    "NormMeaning",
    "Preset",
    "SpecError",
    "Target",
]


MAX_HEADS: Final = 65536
POSITION_BIASES: Final = ("alibi", "relative")

_REPR: Final = reprlib.Repr()
_REPR.maxlevel = 3
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 120


def bounded_repr(value: object, limit: int = 240) -> str:
    """``repr`` of a value from a file, which may be of any size: cut to ``limit`` characters, never an error."""
    try:
        text = _REPR.repr(value)
    except Exception:  # repr of an integer of too many digits, say
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


class SpecError(ValueError):
    """A field of a specification is wrong. ``field`` names it, ``got`` is its value, ``wants`` what is allowed."""

    def __init__(self, field: str, got: object, wants: str) -> None:
        self.field = field
        self.got = got
        self.wants = wants
        super().__init__(f"{field}={bounded_repr(got)} (wants {wants})")


def checked_int(field: str, value: object, low: int, high: int | None = None) -> int:
    """``value`` as an int in [low, high], or a SpecError. bool and integral floats are not integers here."""
    wants = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise SpecError(field, value, wants)
    if value < low or (high is not None and value > high):
        raise SpecError(field, value, wants)
    return value


def is_number(value: object) -> bool:
    """True for an integer or float that is finite and > 0, and fits a float. bool is not a number here."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def checked_member(field: str, kind: type[Enum], value: object) -> Any:
    """The member of ``kind`` that ``value`` is or is the value of, or a SpecError that lists them."""
    try:
        return kind(value)
    except ValueError:
        raise SpecError(field, value, "one of " + ", ".join(str(member) for member in kind)) from None


class AttentionKind(StrEnum):
    """What kind of token mixing a layer does.

    ``full``, ``sliding`` and ``chunked`` (a token sees the earlier tokens of its own chunk) keep one key and value
    per token and head. ``mla`` keeps a latent vector per token. ``sparse`` selects or compresses the tokens it
    reads (indexers, block-sparse or locality-sensitive attention). ``cross`` reads another sequence, ``encoder``
    looks both ways. ``linear`` keeps a state of fixed size (linear attention, state-space, convolution), ``none``
    mixes no tokens at all.
    """

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    LINEAR = "linear"
    MLA = "mla"
    CROSS = "cross"
    ENCODER = "encoder"
    SPARSE = "sparse"
    NONE = "none"


class Dtype(StrEnum):
    """Dtype of queries, raw keys and raw values."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class NormMeaning(StrEnum):
    """What the stored key norm is. Two layouts that agree on bytes can still differ in this.

    ``none``: no norm is stored (FP8 keys). ``raw``: ||k||. ``folded``: ||k|| / ||c||, c the centroid vector,
    so that the reader multiplies and never normalises.
    """

    NONE = "none"
    RAW = "raw"
    FOLDED = "folded"


WINDOWED: Final = (AttentionKind.SLIDING, AttentionKind.MLA)
"""Kinds of layers that may have a sliding window."""

FP8_KEY_BITS: Final = 8
ROTATED_VALUES: Final = "+rotated_values"
"""Ends the name of every preset with rotated values."""


@dataclass(frozen=True, slots=True)
class Preset:
    """How one token is stored. Read from ``configs/presets.yaml``, the only place where presets are defined.

    key_bits: 8 is FP8 E4M3FN without rotation; 2, 3 and 4 are Lloyd-Max codes of the rotated unit vector.
    value_bits: uniform codes between the vector's own minimum and maximum.
    rotated_values: values are Lloyd-Max codes of the rotated unit vector and a folded norm instead, as keys are; two
    bytes less per slot. The name then ends in ``ROTATED_VALUES``, so that caches' tags differ.
    sketch: TurboQuant_prod: one of the key bits is the sign of a Gaussian sketch of what the codes leave, whose norm is
    stored too; inner products are unbiased.
    value_group: each group of so many neighbouring values has a scale and a zero of its own; None: one for the vector.
    norm_correction: the centroid vector is renormalised (once, by the store kernel or by every reader: see
    :class:`NormMeaning`).
    """

    name: str
    key_bits: int
    value_bits: int
    norm_correction: bool
    description: str = field(default="", compare=False)
    rotated_values: bool = False
    sketch: bool = False
    value_group: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rotated_values, bool):
            raise SpecError("rotated_values", self.rotated_values, "true or false")
        if self.rotated_values != self.name.endswith(ROTATED_VALUES):
            raise SpecError("name", self.name, f"{ROTATED_VALUES} at the end exactly with rotated values")
        if self.key_bits not in (2, 3, 4, FP8_KEY_BITS):
            raise SpecError("key_bits", self.key_bits, "one of 8 (FP8), 4, 3, 2")
        if self.value_bits not in (2, 3, 4):
            raise SpecError("value_bits", self.value_bits, "one of 4, 3, 2")
        if self.norm_correction and self.fp8_keys:
            raise SpecError("norm_correction", True, "false with FP8 keys, which have no codebook")
        if not isinstance(self.sketch, bool):
            raise SpecError("sketch", self.sketch, "true or false")
        if self.sketch and (self.fp8_keys or self.norm_correction):
            raise SpecError("sketch", True, "false with FP8 keys or norm correction")
        if self.value_group is not None:
            checked_int("value_group", self.value_group, 8, 4096)
            if self.value_group & (self.value_group - 1) or self.rotated_values:
                raise SpecError(
                    "value_group", self.value_group, "a power of two, or none; none with rotated values"
                )

    @property
    def code_bits(self) -> int:
        """Bits of a key's code: of the FP8 number or the codebook index, without the sign of a sketch."""
        return self.key_bits - self.sketch

    @property
    def fp8_keys(self) -> bool:
        """True if keys are FP8 E4M3FN bytes instead of codebook indices."""
        return self.key_bits == FP8_KEY_BITS


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer needs, on tensor-parallel-local heads.

    index: position in the model. num_heads, num_kv_heads: query and KV heads on this rank.
    head_size: width of queries and keys; value_head_size: width of values (default: head_size).
    window: number of keys a token sees, itself included, of a ``sliding`` layer (or an ``mla`` layer that slides);
    None is unlimited, and the only value that other kinds take.
    sinks: a learned logit per query head joins the softmax denominator.
    soft_cap: s -> soft_cap * tanh(s / soft_cap) on the scaled scores. scale: softmax scale, default 1/sqrt(D).
    kv_shared_with: index of the layer whose cache this layer reads instead of its own.
    notes: facts worth printing about this layer, ``unknown: ...`` for what the model description did not say.
    chunk: tokens per chunk of a ``chunked`` layer. recurrent_state: the layer also keeps a state of fixed size.
    position_bias: a term added to the scores by position, ``alibi`` or ``relative``; None with rotary positions.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    kind: AttentionKind = AttentionKind.FULL
    value_head_size: int | None = None
    window: int | None = None
    sinks: bool = False
    soft_cap: float | None = None
    scale: float | None = None
    dtype: Dtype = Dtype.BF16
    kv_shared_with: int | None = None
    notes: tuple[str, ...] = ()
    chunk: int | None = None
    recurrent_state: bool = False
    position_bias: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", checked_member("kind", AttentionKind, self.kind))
        object.__setattr__(self, "dtype", checked_member("dtype", Dtype, self.dtype))
        checked_int("index", self.index, 0)
        checked_int("num_heads", self.num_heads, 1, MAX_HEADS)
        checked_int("num_kv_heads", self.num_kv_heads, 1, MAX_HEADS)
        checked_int("head_size", self.head_size, 1, 4096)
        if self.value_head_size is None:
            object.__setattr__(self, "value_head_size", self.head_size)
        checked_int("value_head_size", self.value_head_size, 1, 4096)
        if self.num_heads % self.num_kv_heads:
            raise SpecError("num_heads", self.num_heads, f"a multiple of num_kv_heads={self.num_kv_heads}")
        if self.window is not None:
            checked_int("window", self.window, 1, 1 << 40)
        if self.kind is AttentionKind.SLIDING and self.window is None:
            raise SpecError("window", None, "an integer >= 1 for a sliding layer")
        if self.window is not None and self.kind not in WINDOWED:
            raise SpecError("window", self.window, f"none for a {self.kind} layer: kind sliding has a window")
        if self.chunk is not None:
            checked_int("chunk", self.chunk, 1, 1 << 40)
        if self.kind is AttentionKind.CHUNKED and self.chunk is None:
            raise SpecError("chunk", None, "an integer >= 1 for a chunked layer")
        if self.soft_cap is not None and not is_number(self.soft_cap):
            raise SpecError("soft_cap", self.soft_cap, "a number > 0, or none")
        if self.scale is not None and not is_number(self.scale):
            raise SpecError("scale", self.scale, "a number > 0, or none for 1/sqrt(head_size)")
        for name, value in (("sinks", self.sinks), ("recurrent_state", self.recurrent_state)):
            if not isinstance(value, bool):
                raise SpecError(name, value, "true or false")
        if self.position_bias is not None and self.position_bias not in POSITION_BIASES:
            raise SpecError("position_bias", self.position_bias, "alibi, relative or none")
        if self.kv_shared_with is not None:
            checked_int("kv_shared_with", self.kv_shared_with, 0)  # ModelSpec knows which layers there are

    @property
    def keeps_cache(self) -> bool:
        """True if the layer reads keys and values that were kept per token."""
        return self.kind not in (AttentionKind.LINEAR, AttentionKind.NONE)

    @property
    def gqa_ratio(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def value_size(self) -> int:
        """Width of a value vector; ``value_head_size`` with its default filled in."""
        assert self.value_head_size is not None
        return self.value_head_size

    @property
    def softmax_scale(self) -> float:
        """The softmax scale, 1/sqrt(head_size) unless the model says otherwise."""
        return self.scale if self.scale is not None else float(self.head_size) ** -0.5

    def with_(self, **changes: Any) -> LayerSpec:
        """A copy with some fields changed; value_head_size follows head_size if it was equal to it."""
        if "head_size" in changes and "value_head_size" not in changes and self.value_size == self.head_size:
            changes["value_head_size"] = changes["head_size"]
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as far as its KV cache is concerned: a name, where it was read from, and its layers in order.

    layers hold tensor-parallel-local heads if ``tp`` > 1. hybrid: some layers keep no K/V cache (linear
    attention, state-space layers). warnings: what the description left open. weight_gib: size of the published
    16-bit (or native) weights on all ranks, if known.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    source: str = ""
    model_type: str = ""
    tp: int = 1
    max_position: int | None = None
    warnings: tuple[str, ...] = ()
    weight_gib: float | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise SpecError("layers", 0, "at least one layer")
        by_index = {layer.index: layer for layer in self.layers}
        for layer in self.layers:
            if layer.kv_shared_with is not None and layer.keeps_cache:
                self._check_owner(layer, by_index.get(layer.kv_shared_with))

    @staticmethod
    def _check_owner(layer: LayerSpec, owner: LayerSpec | None) -> None:
        """SpecError unless ``layer`` can read the cache of ``owner``, its own or one that it shares in turn."""
        where = f"layer {layer.index}: kv_shared_with"
        if owner is None or owner.index >= layer.index or not owner.keeps_cache:
            raise SpecError(where, layer.kv_shared_with, "the index of an earlier layer that keeps a cache")
        if (owner.num_kv_heads, owner.head_size, owner.value_size) != (
            layer.num_kv_heads,
            layer.head_size,
            layer.value_size,
        ):
            raise SpecError(
                where,
                layer.kv_shared_with,
                f"a layer with the same KV heads and head sizes ({layer.num_kv_heads} of {layer.head_size} and "
                f"{layer.value_size}, not {owner.num_kv_heads} of {owner.head_size} and {owner.value_size})",
            )

    @property
    def hybrid(self) -> bool:
        """True if some layers keep a state of fixed size, beside or instead of a per-token K/V cache."""
        return any(layer.kind is AttentionKind.LINEAR or layer.recurrent_state for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU (or the CPU) that kernels are chosen for. Facts come from ``configs/targets.yaml``.

    arch is what everything matches on: ``gfx942``, ``gfx950``, ``sm_90``, ``cpu``. Capability numbers are never
    compared: on ROCm torch calls the device "cuda", and gfx1100 reports (11, 0).

    lds_bytes: LDS (shared memory) that a workgroup can use, per compute unit. fp8_format: the E4M3 format that
    conversions and matrix instructions take natively, ``e4m3fn`` or ``e4m3fnuz``; None: FP8 is emulated. mfma:
    shapes of the matrix instructions, for people. local: this machine's own device, so that optional packages are
    probed here instead of taken to be installed.
    """

    vendor: str
    arch: str
    name: str = field(default="", compare=False)
    wave_size: int = field(default=32, compare=False)
    lds_bytes: int = field(default=0, compare=False)
    fp8_format: str | None = field(default=None, compare=False)
    compute_units: int | None = field(default=None, compare=False)
    clock_ghz: float | None = field(default=None, compare=False)
    memory_tb_s: float | None = field(default=None, compare=False)
    memory_gib: float | None = field(default=None, compare=False)
    mfma: tuple[str, ...] = field(default=(), compare=False)
    local: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return self.arch
