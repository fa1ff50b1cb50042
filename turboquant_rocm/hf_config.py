"""A Hugging Face ``config.json``, as a mapping, to the layers of a model.

Configs say the same things in many ways. This module knows the ways, one function each, and refuses what it cannot
read with a SpecError that names the field. What the config leaves open is filled from ``configs/model_types.yaml``
where the architecture fixes it (with its source in a note), and otherwise reported as ``unknown: ...``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final

from .presets import load_yaml
from .spec import MAX_HEADS, AttentionKind, Dtype, LayerSpec, ModelSpec, SpecError, bounded_repr, is_number

__all__ = ["model_from_config", "model_type_facts"]

MAX_LAYERS: Final = 1024
"""Several times the deepest published model; a report of so many different layers takes seconds."""

Kind = AttentionKind


@cache
def _table() -> Mapping[str, Any]:
    data: Mapping[str, Any] = load_yaml("model_types.yaml")
    if data.get("version") != 1:
        raise SpecError("model_types.yaml version", data.get("version"), "1")
    return data


def model_type_facts() -> Mapping[str, Mapping[str, Any]]:
    """What ``configs/model_types.yaml`` says, by model_type."""
    types: Mapping[str, Mapping[str, Any]] = _table()["types"]
    return types


def _defaults(model_type: str) -> Mapping[str, Any]:
    """What transformers takes for fields that a config of this type leaves out."""
    found: Mapping[str, Any] = _table()["defaults"].get(model_type, {})
    return found


@cache
def known_model_types() -> frozenset[str]:
    """Types with facts, and those known to have none that their config leaves out."""
    return frozenset(model_type_facts()) | frozenset(_table()["plain"])


# ---- reading fields -------------------------------------------------------------------------------------

# In encoder-decoder configs num_hidden_layers and num_attention_heads are those of the encoder, so the decoder's
# own keys come first.
LAYERS: Final = (
    "num_decoder_layers",
    "decoder_layers",
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_transformer_layers",
    "layers",
    "num_blocks",
)
HEADS: Final = (
    "num_decoder_attention_heads",
    "decoder_attention_heads",
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "attention_heads",
    "num_query_heads",
)
KV_HEADS: Final = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "n_head_kv",
    "kv_n_heads",
    "multi_query_group_num",
    "num_query_groups",
    "num_attention_groups",
)
HIDDEN: Final = ("hidden_size", "n_embd", "n_embed", "d_model", "emb_dim", "embed_dim", "model_dim")
HEAD_DIM: Final = (
    "attention_head_dim",
    "head_dim",
    "kv_channels",
    "dim_head",
    "d_kv",
    "d_head",
    "attention_head_size",
)
WINDOW: Final = (
    "sliding_window",
    "sliding_window_size",
    "attention_window_size",
    "local_attention_window_len",
    "window_size",
)
SOFT_CAP: Final = (
    "attn_logit_softcapping",
    "attn_logit_softcap",
    "attn_logit_soft_cap",
    "attention_logit_cap",
)


@dataclass
class Fields:
    """A config with the path at which it lies, so that errors name the field as the file spells it."""

    data: Mapping[str, Any]
    path: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    per_layer: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def name(self, key: str) -> str:
        return f"{self.path}{key}"

    def get(self, *keys: str) -> tuple[str, Any]:
        """The first of ``keys`` that is there and not null, with its value; ("", None) if none is.

        Where none is there, not even as null, the default of the model type is noted and returned.
        """
        for key in keys:
            if self.data.get(key) is not None:
                return key, self.data[key]
        for key in keys:
            if self.defaults.get(key) is not None and not any(key in self.data for key in keys):
                note = f"{key} is not given: {self.defaults[key]} is the default of this model type"
                if note not in self.notes:
                    self.notes.append(note)
                return key, self.defaults[key]
        return "", None

    def integer(self, *keys: str, low: int = 1, high: int = 1 << 24) -> int | None:
        """The first of ``keys`` as an integer, None if none is there; SpecError if it is anything else."""
        key, value = self.get(*keys)
        if not key:
            return None
        return _integer(self.name(key), value, low, high)

    def need(self, *keys: str, low: int = 1, high: int = 1 << 24) -> int:
        """:meth:`integer`, and a SpecError that names the most common key if none is there."""
        value = self.integer(*keys, low=low, high=high)
        if value is None:
            first, *others = sorted(keys, key=lambda key: "decoder" in key)
            raise SpecError(self.name(first), None, f"an integer >= {low} (or {', '.join(others)})")
        return value

    def number(self, *keys: str) -> float | None:
        key, value = self.get(*keys)
        if not key or value is False:
            return None
        if not is_number(value):
            raise SpecError(self.name(key), value, "a number > 0, or null")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.data.get(key)
        if value is None:
            return bool(self.get(key)[1] or default)
        if not isinstance(value, bool):
            raise SpecError(self.name(key), value, "true or false")
        return value

    def listing(self, key: str) -> Sequence[Any] | None:
        value = self.get(key)[1]
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise SpecError(self.name(key), value, "a list")
        return value

    def nested(self, key: str) -> Fields:
        """The mapping under ``key``, empty if it is not there."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise SpecError(self.name(key), value, "a mapping")
        return Fields(value or {}, self.name(f"{key}."))

    def indices(self, key: str, count: int, base: int = 0) -> frozenset[int] | None:
        """A list of layer indices, numbered from ``base``."""
        value = self.listing(key)
        if value is None:
            return None
        return frozenset(_integer(self.name(key), v, base, count - 1 + base) - base for v in value)


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        wants = (
            f"an integer >= {low}"
            if isinstance(value, int) and value < low
            else f"an integer from {low} to {high}"
        )
        raise SpecError(name, value, wants)
    return value


# ---- which part of the config is the decoder ------------------------------------------------------------

NESTED: Final = (
    "text_config",
    "language_config",
    "llm_config",
    "thinker_config",
    "decoder_config",
    "decoder",
    "vlm_config",
    "global_config",
)


def decoder_fields(config: Mapping[str, Any]) -> tuple[Fields, str]:
    """The part of ``config`` that describes the decoder, and the model_type of the whole."""
    fields = Fields(config)
    outer = config.get("model_type")
    if outer is not None and not isinstance(outer, str):
        raise SpecError("model_type", outer, "a string")
    for _ in range(4):
        whole = fields.data.get("num_hidden_layers") is not None and any(fields.data.get(k) for k in HEADS)
        if fields.data.get("is_encoder_decoder") is True and isinstance(fields.data.get("decoder"), Mapping):
            fields = Fields(fields.data["decoder"], f"{fields.path}decoder.")
            continue
        if whole:
            break
        inner = next((key for key in NESTED if isinstance(fields.data.get(key), Mapping)), None)
        if inner is None:
            for key in NESTED:
                fields.nested(key)
            break
        fields = Fields(fields.data[inner], f"{fields.path}{inner}.")
    model_type = fields.data.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise SpecError(fields.name("model_type"), model_type, "a string")
    fields.defaults = _defaults(model_type or outer or "")
    return fields, outer or ""


# ---- kinds of layers ------------------------------------------------------------------------------------

# Every word that configs use for a layer -> (kind, keeps a recurrent state as well)
WORDS: Final[Mapping[str, tuple[Kind, bool]]] = {
    "full": (Kind.FULL, False),
    "full_attention": (Kind.FULL, False),
    "attention": (Kind.FULL, False),
    "global": (Kind.FULL, False),
    "global_attention": (Kind.FULL, False),
    "attn": (Kind.FULL, False),
    "sliding": (Kind.SLIDING, False),
    "sliding_attention": (Kind.SLIDING, False),
    "local": (Kind.SLIDING, False),
    "local_attention": (Kind.SLIDING, False),
    "sliding_window": (Kind.SLIDING, False),
    "chunked": (Kind.CHUNKED, False),
    "chunked_attention": (Kind.CHUNKED, False),
    "linear": (Kind.LINEAR, False),
    "linear_attention": (Kind.LINEAR, False),
    "lightning_attention": (Kind.LINEAR, False),
    "gated_deltanet": (Kind.LINEAR, False),
    "kda": (Kind.LINEAR, False),
    "mamba": (Kind.LINEAR, False),
    "mamba2": (Kind.LINEAR, False),
    "recurrent": (Kind.LINEAR, False),
    "rglru": (Kind.LINEAR, False),
    "conv": (Kind.LINEAR, False),
    "short_conv": (Kind.LINEAR, False),
    "hybrid": (Kind.FULL, True),
    "hybrid_sliding": (Kind.SLIDING, True),
    "indexed_attention": (Kind.SPARSE, False),
    "deepseek_sparse_attention": (Kind.SPARSE, False),
    "qwen_sparse_attention": (Kind.SPARSE, False),
    "minimax_m3_sparse": (Kind.SPARSE, False),
    "compressed_sparse_attention": (Kind.SPARSE, False),
    "heavily_compressed_attention": (Kind.SPARSE, False),
    "reference_sliding_attention": (Kind.SPARSE, False),
    "lsh": (Kind.SPARSE, False),
    "block_sparse": (Kind.SPARSE, False),
    "window_attention": (Kind.ENCODER, False),
    "cross": (Kind.CROSS, False),
    "cross_attention": (Kind.CROSS, False),
    "moe": (Kind.NONE, False),
    "mlp": (Kind.NONE, False),
    "none": (Kind.NONE, False),
    "no_op": (Kind.NONE, False),
}
PATTERN_LETTERS: Final = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _word(name: str, value: Any) -> tuple[Kind, bool]:
    if isinstance(value, str) and value in WORDS:
        return WORDS[value]
    raise SpecError(name, value, "a layer kind: " + ", ".join(WORDS))


@dataclass
class Depth:
    """What is known before the layers are: their number, the window, the facts of the architecture."""

    fields: Fields
    count: int
    facts: Mapping[str, Any]
    window: int | None
    notes: list[str]

    @property
    def local(self) -> str:
        """What "not full" means here: sliding where there is a window, else full."""
        return "sliding"


Words = list[str]


def _from_lists(d: Depth) -> Words | None:
    """Lists with one word per layer."""
    for key in ("layer_types", "layers_block_type", "attention_layers", "attn_layers"):
        found = d.fields.listing(key)
        if found is None:
            continue
        words = list(found[::2]) if key == "layer_types" and _alternates_with_mlp(d.fields) else list(found)
        if len(words) > d.count and d.fields.data.get("num_nextn_predict_layers"):
            words = words[: d.count]  # the rest belongs to the multi-token-prediction layers
        if len(words) != d.count:
            raise SpecError(
                d.fields.name(key), f"{len(words)} entries", f"one for each of the {d.count} layers"
            )
        return words
    return None


def _from_block_types(d: Depth) -> Words | None:
    """RecurrentGemma: a short list that repeats; its attention is always local."""
    found = d.fields.listing("block_types")
    if not found:
        return None
    cycle = ["sliding" if word == "attention" else word for word in found]
    return [cycle[i % len(cycle)] for i in range(d.count)]


def _from_attn_type_list(d: Depth) -> Words | None:
    """MiniMax-01: 1 is softmax attention, 0 is lightning attention."""
    found = d.fields.listing("attn_type_list")
    if found is None:
        return None
    name = d.fields.name("attn_type_list")
    if len(found) != d.count:
        raise SpecError(name, f"{len(found)} entries", f"one for each of the {d.count} layers")
    return ["full" if _integer(name, v, 0, 1) else "linear" for v in found]


def _from_hybrid_layer_pattern(d: Depth) -> Words | None:
    """MiMo-V2: 1 is a sliding layer, 0 a full one."""
    found = d.fields.listing("hybrid_layer_pattern")
    if found is None:
        return None
    name = d.fields.name("hybrid_layer_pattern")
    if len(found) != d.count:
        raise SpecError(name, f"{len(found)} entries", f"one for each of the {d.count} layers")
    return ["sliding" if _integer(name, v, 0, 1) else "full" for v in found]


def _from_attention_types(d: Depth) -> Words | None:
    """GPT-Neo: [[["global", "local"], 12]] is that pair, twelve times."""
    found = d.fields.listing("attention_types")
    if found is None:
        return None
    words: Words = []
    for item in found:
        if not (isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[0], list | tuple)):
            raise SpecError(d.fields.name("attention_types"), item, "pairs of a list of kinds and a count")
        times = _integer(d.fields.name("attention_types"), item[1], 1, MAX_LAYERS)
        if len(words) + len(item[0]) * times > d.count:
            raise SpecError(d.fields.name("attention_types"), "more entries", f"{d.count} layers in all")
        words += list(item[0]) * times
    if len(words) != d.count:
        raise SpecError(d.fields.name("attention_types"), f"{len(words)} entries", f"{d.count} layers in all")
    return words


def _from_override_pattern(d: Depth) -> Words | None:
    """Nemotron-H: one letter per layer, M for Mamba, * for attention, - for an MLP, E for experts."""
    key, value = d.fields.get("hybrid_override_pattern")
    if not key:
        return None
    if not isinstance(value, str) or set(value) - set(PATTERN_LETTERS):
        raise SpecError(d.fields.name(key), value, "a string of M, *, - and E")
    return [PATTERN_LETTERS[letter] for letter in value]


def _block_attentions(fields: Fields, count: int) -> list[Mapping[str, Any]] | None:
    """The attention entry of each of the block_configs."""
    found = fields.listing("block_configs")
    if found is None:
        return None
    name = fields.name("block_configs")
    if len(found) != count:
        raise SpecError(name, f"{len(found)} entries", f"one for each of the {count} layers")
    attentions = []
    for index, block in enumerate(found):
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping):
            raise SpecError(f"{name}[{index}]", block, "a block with an attention entry")
        attentions.append(attention)
    return attentions


def _from_block_configs(d: Depth) -> Words | None:
    """Searched architectures (DeciLM, Nemotron-NAS): one block each, some without attention."""
    found = _block_attentions(d.fields, d.count)
    if found is None:
        return None
    words = []
    for index, attention in enumerate(found):
        block = Fields(attention, d.fields.name(f"block_configs[{index}].attention."))
        words.append("none" if block.flag("no_op") or block.flag("replace_with_linear") else "full")
    return words


def _from_linear_attn_config(d: Depth) -> Words | None:
    """Kimi-Linear: two lists of layer numbers that start at 1."""
    nested = d.fields.nested("linear_attn_config")
    full = nested.indices("full_attn_layers", d.count, base=1)
    if full is None:
        return None
    return ["full" if i in full else "linear" for i in range(d.count)]


def _from_indices(d: Depth) -> Words | None:
    """Lists of the indices of one kind."""
    conventions = (
        ("attn_layer_indices", "full", "linear"),
        ("full_attn_idxs", "full", "linear"),
        ("hybrid_layer_ids", "hybrid", "linear"),
        ("cross_attention_layers", "cross", "full"),
    )
    for key, inside, outside in conventions:
        chosen = d.fields.indices(key, d.count)
        if chosen is not None:
            return [inside if i in chosen else outside for i in range(d.count)]
    local = d.fields.indices("local_layer_ids", d.count)
    if local is not None:
        cycle = d.facts.get("layers", {}).get("cycle", ())
        inside, outside = ("hybrid_sliding", "hybrid") if "hybrid_sliding" in cycle else ("sliding", "full")
        return [inside if i in local else outside for i in range(d.count)]
    return None


def _from_period(d: Depth) -> Words | None:
    """Jamba: attention where index % period == offset, Mamba elsewhere. Zamba starts three layers later."""
    period = d.fields.integer("attn_layer_period")
    if period is None:
        return None
    offset = d.fields.integer("attn_layer_offset", low=0)
    if offset is None or offset >= period:
        raise SpecError(d.fields.name("attn_layer_offset"), offset, f"an integer from 0 to {period - 1}")
    if d.fields.data.get("model_type") == "zamba":
        head = ["linear", "linear", "hybrid"]
        return (head + ["hybrid" if i % period == offset else "linear" for i in range(d.count - 3)])[
            : d.count
        ]
    return ["full" if i % period == offset else "linear" for i in range(d.count)]


def _every(key: str, other: str, phase: int) -> Callable[[Depth], Words | None]:
    """Full attention in every n-th layer, ``other`` elsewhere; phase 0: the first of each n, -1: the last."""

    def read(d: Depth) -> Words | None:
        value = d.fields.data.get(key)
        if isinstance(value, str):  # EXAONE 4 spells it out: LLLG
            if not value or set(value) - set("LG"):
                raise SpecError(d.fields.name(key), value, "an integer, or a string of L and G")
            return ["full" if value[i % len(value)] == "G" else "sliding" for i in range(d.count)]
        every = d.fields.integer(key, low=0)
        if not every:
            return None
        return ["full" if i % every == phase % every else other for i in range(d.count)]

    return read


def _from_modernbert(d: Depth) -> Words | None:
    if d.fields.data.get("model_type") not in ("modernbert-decoder", "modernbert"):
        return None
    return _every("global_attn_every_n_layers", "sliding", 0)(d)


def _from_chunks(d: Depth) -> Words | None:
    """Llama 4: chunked wherever positions are rotated, full in the others."""
    if d.fields.integer("attention_chunk_size") is None:
        return None
    if d.fields.listing("no_rope_layers"):
        return ["chunked" if rotated else "full" for rotated in _rotated_layers(d)]
    return _every("no_rope_layer_interval", "chunked", -1)(d)


def _rotated_layers(d: Depth) -> list[bool]:
    """Which layers rotate positions, where ``no_rope_layers`` (1: rotated) or ``no_rope_layer_interval`` says so."""
    given = d.fields.listing("no_rope_layers")
    if given:
        name = d.fields.name("no_rope_layers")
        if len(given) != d.count:
            raise SpecError(name, f"{len(given)} entries", f"one for each of the {d.count} layers")
        return [bool(_integer(name, rotated, 0, 1)) for rotated in given]
    every = d.fields.integer("no_rope_layer_interval") or 4
    return [(i + 1) % every != 0 for i in range(d.count)]


def _from_use_sliding_window(d: Depth) -> Words | None:
    """Qwen and others: without use_sliding_window no layer is sliding; with it, those that the type names are."""
    given = d.fields.data.get("use_sliding_window") is not None
    default = d.facts.get("use_sliding_window")
    if not given and default is None and d.fields.data.get("max_window_layers") is None:
        return None
    used = _uses_window(d.fields, d.facts)
    if "layers" in d.facts:  # the switch of a type with a pattern of its own
        words = _from_architecture(d) or []
        other = next((word for word in words if word != "sliding"), "full")
        return words if used else [other if word == "sliding" else word for word in words]
    if not used:
        if d.window is not None:
            why = "use_sliding_window is false" + ("" if given else ", the default of this model type")
            d.notes.append(f"sliding_window={d.window} is set and not used ({why})")
        return ["full"] * d.count
    if d.window is not None and not given and default is None:
        d.notes.append("unknown: use_sliding_window is not given; sliding_window taken as used")
    if d.window is None:
        return ["full"] * d.count
    which = d.facts.get("window_layers", "from")
    if which == "all":
        return ["sliding"] * d.count
    if which == "no_rope":
        return ["full" if rotated else "sliding" for rotated in _rotated_layers(d)]
    bound = d.fields.integer("max_window_layers", low=0)
    if which == "alternate":
        last = d.count if bound is None else bound
        return ["sliding" if i % 2 == 0 and i < last else "full" for i in range(d.count)]
    if bound is None:
        d.notes.append("unknown: max_window_layers is not given; every layer taken as sliding")
        bound = 0
    return ["sliding" if i >= bound else "full" for i in range(d.count)]


def _from_architecture(d: Depth) -> Words | None:
    layers = d.facts.get("layers")
    if layers is None:
        return None
    cycle = layers["cycle"]
    words = [cycle[i % len(cycle)] for i in range(d.count)]
    first, last = layers.get("first", ()), layers.get("last", ())
    words[: len(first)] = first[: d.count]
    if last:
        words[-len(last) :] = last
    if len(set(words)) > 1:
        d.notes.append(f"the layer pattern is not given: the one of this model type ({d.facts['source']})")
    return words


def _from_window(d: Depth) -> Words | None:
    if d.window is None:
        return None
    meaning = d.facts.get("window")
    if meaning == "ignored":
        d.notes.append(
            f"sliding_window={d.window} is set and not used by this model type ({d.facts['source']})"
        )
        return ["full"] * d.count
    if meaning != "all":
        d.notes.append(f"unknown: which layers use sliding_window={d.window}; every layer taken as sliding")
    return ["sliding"] * d.count


CONVENTIONS: Final[tuple[Callable[[Depth], Words | None], ...]] = (
    _from_lists,
    _from_override_pattern,
    _from_block_types,
    _from_attn_type_list,
    _from_hybrid_layer_pattern,
    _from_attention_types,
    _from_block_configs,
    _from_linear_attn_config,
    _from_indices,
    _from_period,
    _from_modernbert,
    _every("full_attention_interval", "linear", -1),
    _every("layer_group_size", "linear", -1),
    _every("global_attn_every_n_layers", "sliding", -1),
    _every("dense_attention_every_n_layers", "block_sparse", -1),
    _every("sliding_window_pattern", "sliding", -1),
    _every("_sliding_window_pattern", "sliding", -1),
    _from_chunks,
    _from_use_sliding_window,
    _from_architecture,
    _from_window,
)


# ---- the whole model ------------------------------------------------------------------------------------


def _alternates_with_mlp(fields: Fields) -> bool:
    """Dory lists attention and mlp as blocks of their own; each pair of them is one layer."""
    found = fields.data.get("layer_types")
    return fields.data.get("model_type") == "dory" and isinstance(found, list) and "mlp" in found


def _bounded(name: str, entries: int) -> int:
    if entries > MAX_LAYERS:
        raise SpecError(name, f"{entries} entries", f"at most {MAX_LAYERS} layers")
    return entries


def _count_layers(fields: Fields) -> int:
    if fields.data.get("model_type") == "longcat_flash" and fields.data.get("num_layers") is not None:
        return 2 * fields.need("num_layers", high=MAX_LAYERS // 2)  # two attention blocks per layer
    for key in ("layers_block_type", "layer_types"):
        found = fields.data.get(key)
        if isinstance(found, list) and found and all(fields.data.get(k) is None for k in LAYERS):
            return _bounded(fields.name(key), len(found))
    if _alternates_with_mlp(fields):
        return fields.need(*LAYERS, high=MAX_LAYERS) // 2
    pattern = fields.data.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        count = _bounded(fields.name("hybrid_override_pattern"), len(pattern))
        depth = fields.integer(*LAYERS)
        if depth is not None and depth != count:  # transformers goes by the pattern and warns, too
            fields.notes.append(
                f"num_hidden_layers={depth} is not the length of hybrid_override_pattern: {count} layers taken"
            )
        return count
    return fields.need(*LAYERS, high=MAX_LAYERS)


def _uses_window(fields: Fields, facts: Mapping[str, Any]) -> bool:
    """False where ``use_sliding_window``, or its default in this model type, switches the window off."""
    default = facts.get("use_sliding_window", True)
    return True if default == "always" else fields.flag("use_sliding_window", default)


def _window(fields: Fields, facts: Mapping[str, Any]) -> int | None:
    if fields.data.get("model_type") in ("modernbert-decoder", "modernbert"):
        whole = fields.integer("local_attention", low=0)  # both sides; a causal decoder sees half of it
        if whole:
            return whole // 2
    plus: Mapping[str, int] = facts.get("window_plus", {})
    keys = (*plus, *WINDOW)  # a key that counts otherwise wins over the common one
    given = any(fields.data.get(key) is not None for key in keys)
    if not given and (any(key in fields.data for key in keys) or not _uses_window(fields, facts)):
        return None  # null, or not used: then the default of the model type does not hold
    key, value = fields.get(*keys)
    if key == "window_size" and fields.data.get("model_type") != "gpt_neo":
        return None  # in other configs it is the window of a vision tower
    if not key or value in (0, -1, False):
        return None
    return _integer(fields.name(key), value, 1, 1 << 30) + plus.get(key, 0)


def _attn_config(fields: Fields) -> Fields:
    return fields.nested("attn_config")


def _kv_heads(fields: Fields, heads: int, facts: Mapping[str, Any], notes: list[str]) -> int:
    inner = _attn_config(fields)
    found = inner.integer("kv_n_heads", high=MAX_HEADS)
    if found is not None:
        return found
    if inner.data.get("attn_type") == "multiquery_attention":
        return 1
    data = fields.data
    if data.get("model_type") == "falcon":
        if fields.flag("new_decoder_architecture"):
            return fields.integer("num_kv_heads", "n_head_kv", high=MAX_HEADS) or heads
        return 1 if fields.flag("multi_query", True) else heads
    if fields.flag("multi_query"):
        return 1
    keys: tuple[str, ...] = KV_HEADS
    if data.get("multi_query_attention") is False:  # ChatGLM keeps the number although it is switched off
        keys = tuple(k for k in keys if k != "multi_query_group_num")
    value = next((data[k] for k in keys if data.get(k) is not None), None)
    if isinstance(value, list):
        return heads  # per layer, read there
    found = fields.integer(*keys, high=MAX_HEADS)
    if found is not None:
        return found
    if not facts.get("mha"):
        notes.append(f"{fields.name('num_key_value_heads')} is not given: taken as num_attention_heads")
    return heads


def _head_size(fields: Fields, heads: int, facts: Mapping[str, Any]) -> int:
    found = fields.integer(*HEAD_DIM, high=4096)
    if found is not None:
        return found
    key, _ = fields.get(*HIDDEN)
    hidden = fields.need(*HIDDEN)
    if hidden % heads:
        raise SpecError(
            fields.name(key), hidden, f"a multiple of num_attention_heads={heads}, or head_dim to be given"
        )
    return _integer(fields.name("head_dim"), hidden // heads * facts.get("attention_width", 1), 1, 4096)


def _scale(fields: Fields, model_type: str, head_size: int, facts: Mapping[str, Any]) -> float | None:
    """The softmax scale where it is not 1/sqrt(head_size)."""
    if "scale" in facts:
        return float(facts["scale"])
    if "attention_width" in facts:
        return float((head_size / facts["attention_width"]) ** -0.5)
    if model_type.startswith(("gemma", "vaultgemma", "t5gemma", "shieldgemma")):
        scalar = fields.number("query_pre_attn_scalar")
        if scalar is not None and scalar != head_size:
            return float(scalar**-0.5)
    if model_type.startswith(("granite", "hyperclovax")):
        return fields.number("attention_multiplier")
    return None


def _dtype(config: Mapping[str, Any], fields: Fields, notes: list[str]) -> Dtype:
    names = {"bfloat16": Dtype.BF16, "float16": Dtype.FP16, "half": Dtype.FP16, "float32": Dtype.BF16}
    for source in (fields.data, config):
        for key in ("dtype", "torch_dtype"):
            value = source.get(key)
            if value is None:
                continue
            name = value.removeprefix("torch.") if isinstance(value, str) else ""
            if name == "float32":
                notes.append("stored in float32: taken to be served in bf16")
            if name in names:
                return names[name]
            got = bounded_repr(value)
            notes.append(f"unknown: {key}={got} says nothing about the activations; taken as bf16")
    return Dtype.BF16


def _overrides(fields: Fields, count: int) -> dict[int, Mapping[str, Any]]:
    """per_layer_config: fields of single layers, keyed by index, as numbers or zero-padded strings."""
    found = fields.data.get("per_layer_config")
    if found is None:
        return {}
    if isinstance(found, list):
        found = dict(enumerate(found))
    if not isinstance(found, Mapping):
        raise SpecError(
            fields.name("per_layer_config"), type(found).__name__, "a mapping from layer to fields"
        )
    overrides = {}
    for key, value in found.items():
        text = str(key)
        if not re.fullmatch(r"\d{1,6}", text) or int(text) >= count:
            raise SpecError(fields.name("per_layer_config"), key, f"layer indices from 0 to {count - 1}")
        if not isinstance(value, Mapping):
            raise SpecError(fields.name(f"per_layer_config.{key}"), value, "a mapping of fields")
        overrides[int(text)] = value
    return overrides


def _shared(fields: Fields, kinds: Sequence[Kind], notes: list[str]) -> dict[int, int]:
    """Layers that read the cache of another layer: index -> index of the owner."""
    count = len(kinds)
    sources = fields.listing("kv_source_layers")
    if sources is not None:
        name = fields.name("kv_source_layers")
        if len(sources) != count:
            raise SpecError(name, f"{len(sources)} entries", f"one for each of the {count} layers")
        return {i: s for i, v in enumerate(sources) if (s := _integer(name, v, 0, i)) != i}
    last = fields.integer("num_kv_shared_layers", low=0)
    if last:
        owners = count - last
        if owners < 0:
            raise SpecError(fields.name("num_kv_shared_layers"), last, f"at most the {count} layers")
        if owners == 0:
            notes.append("every layer reads the cache of another model (num_kv_shared_layers)")
            return {}
        shared = {}
        for i in range(owners, count):
            same = [j for j in range(owners) if kinds[j] is kinds[i]]
            if same:
                shared[i] = same[-1]
            else:
                notes.append(f"unknown: which layer's cache layer {i} shares; taken as its own")
        return shared
    factor = fields.integer("cla_share_factor") if fields.flag("use_cla") else None
    if factor and factor > 1:
        return {i: i - i % factor for i in range(count) if i % factor}
    return {}


def _per_layer(fields: Fields, key: str, index: int, kind: Kind, count: int) -> Any:
    """Entry ``index`` of the list ``key``, null only in layers without attention; None if it is no list."""
    value = fields.data.get(key)
    if not isinstance(value, list):
        return None
    if len(value) < count:
        raise SpecError(fields.name(key), f"{len(value)} entries", f"one for each of the {count} layers")
    if value[index] is None and kind not in (Kind.LINEAR, Kind.NONE):
        raise SpecError(
            fields.name(f"{key}[{index}]"), None, f"an integer for layer {index}, which is {kind}"
        )
    return value[index]


@dataclass(frozen=True)
class _Base:
    """What holds for all layers unless one of them says otherwise."""

    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    window: int | None
    chunk: int | None
    soft_cap: float | None
    dtype: Dtype


def _block_config(fields: Fields, index: int) -> Mapping[str, Any]:
    blocks = fields.data.get("block_configs")  # validated by _block_attentions
    if blocks is None:
        return {}
    group = blocks[index]["attention"].get("n_heads_in_group")
    if group is None:
        return {}
    group = _integer(fields.name(f"block_configs[{index}].attention.n_heads_in_group"), group, 1, MAX_HEADS)
    heads = fields.need(*HEADS, high=MAX_HEADS)
    if heads % group:
        raise SpecError(
            fields.name(f"block_configs[{index}].attention.n_heads_in_group"), group, f"a divisor of {heads}"
        )
    return {"num_key_value_heads": heads // group}


def _variants(
    fields: Fields, base: _Base, kind: Kind, index: int, count: int, facts: Mapping[str, Any]
) -> _Base:
    """``base`` with what this kind of layer, and then this very layer, has of its own."""
    heads, kv, size, value = base.heads, base.kv_heads, base.head_size, base.value_size
    window = base.window
    if kind is Kind.SLIDING:
        heads = (
            fields.integer("swa_num_attention_heads", "num_sliding_attention_heads", high=MAX_HEADS) or heads
        )
        own = fields.integer("swa_num_key_value_heads", high=MAX_HEADS)
        kv = own if own is not None else kv * facts.get("kv_heads", {}).get("sliding", 1)
        own = fields.integer("swa_head_dim", high=4096)
        if own is not None:
            value = own if value == size else value
            size = own
        value = fields.integer("swa_v_head_dim", high=4096) or value
    elif kind is Kind.FULL and "per_layer_config" not in fields.data:
        own = fields.integer("global_head_dim", high=4096)
        if own is not None:
            value = own if value == size else value
            size = own
        own = fields.integer("num_global_key_value_heads", high=MAX_HEADS)
        if own is not None and fields.flag("attention_k_eq_v", True):
            kv = own
    for key in ("num_attention_heads_per_layer", "num_query_heads", "num_attention_heads"):
        own = _per_layer(fields, key, index, kind, count)
        if own is not None:
            heads = _integer(fields.name(f"{key}[{index}]"), own, 1, MAX_HEADS)
    for key in ("num_key_value_heads_per_layer", *KV_HEADS):
        own = _per_layer(fields, key, index, kind, count)
        if own is not None:
            kv = _integer(fields.name(f"{key}[{index}]"), own, 1, MAX_HEADS)
    changes = {**_block_config(fields, index), **fields.per_layer.get(index, {})}
    if changes:
        own_fields = Fields(changes, fields.name(f"per_layer_config[{index}]."))
        heads = own_fields.integer(*HEADS, high=MAX_HEADS) or heads
        kv = own_fields.integer(*KV_HEADS, high=MAX_HEADS) or kv
        own = own_fields.integer(*HEAD_DIM, high=4096)
        if own is not None:
            value = own if value == size else value
            size = own
        value = own_fields.integer("v_head_dim", high=4096) or value
        window = own_fields.integer("sliding_window") or window
    return _Base(heads, kv, size, value, window, base.chunk, base.soft_cap, base.dtype)


def _mla(fields: Fields, index: int) -> tuple[int, int] | None:
    """(latent rank, rotary size) where this layer is multi-head latent attention."""
    override = fields.per_layer.get(index)
    own = replace(fields, data={**fields.data, **override}) if override else fields
    rank = own.integer("kv_lora_rank", low=0)
    if not rank:
        return None
    return rank, own.integer("qk_rope_head_dim", low=0) or 0


def _sink_layers(fields: Fields, facts: Mapping[str, Any], outer: str) -> Callable[[Kind], bool]:
    """Which kinds of layers have learned sinks. Keys exist in few configs; the table knows the architectures."""
    per_kind = {
        kind: fields.flag(key) if fields.data.get(key) is not None else None
        for kind, key in (
            (Kind.SLIDING, "add_swa_attention_sink_bias"),
            (Kind.FULL, "add_full_attention_sink_bias"),
        )
    }
    table = facts.get("sinks")

    def has(kind: Kind) -> bool:
        given = per_kind.get(kind)
        if given is not None:
            return given
        if kind in (Kind.LINEAR, Kind.NONE):
            return False
        return table == "all" or table == str(kind)

    return has


def _position_bias(fields: Fields, facts: Mapping[str, Any]) -> str | None:
    model_type = fields.data.get("model_type")
    if model_type == "mpt":
        return "alibi" if _attn_config(fields).flag("alibi", True) else None
    if model_type == "falcon" or "alibi" in fields.data:
        return "alibi" if fields.flag("alibi") else None
    found: str | None = facts.get("position_bias")
    return found


def _encoder(fields: Fields, facts: Mapping[str, Any], outer: str, notes: list[str]) -> bool:
    """True if tokens see later ones, so that no decode cache exists."""
    if facts.get("attention") == "encoder" and not fields.flag("is_decoder"):
        return True
    if fields.data.get("is_causal") is False:
        return True
    if fields.data.get("use_bidirectional_attention") is True:
        if not fields.path:
            return True
        notes.append(
            "use_bidirectional_attention is set: taken to hold for the prompt only, since it is a part"
        )
    return False


def _layers(config: Mapping[str, Any], fields: Fields, outer: str, notes: list[str]) -> Iterator[LayerSpec]:
    model_type = fields.data.get("model_type") or outer
    facts = model_type_facts().get(model_type, {})
    count = _count_layers(fields)
    if facts.get("attention") == "none":
        for index in range(count):
            yield LayerSpec(index, 1, 1, 1, kind=Kind.LINEAR, notes=("no attention in this architecture",))
        return

    heads_value = next((fields.data[k] for k in HEADS if fields.data.get(k) is not None), None)
    if isinstance(heads_value, list):
        heads = _integer(fields.name("num_attention_heads[0]"), (heads_value or [None])[0], 1, MAX_HEADS)
    else:
        heads = fields.need(*HEADS, high=MAX_HEADS)
    fields.per_layer = _overrides(fields, count)
    _block_attentions(fields, count)  # also read where another list gives the kinds
    is_mla = any(_mla(fields, index) for index in (0, *fields.per_layer))
    head_size = 1 if is_mla else _head_size(fields, heads, facts)
    base = _Base(
        heads=heads,
        kv_heads=heads if is_mla else _kv_heads(fields, heads, facts, notes),
        head_size=head_size,
        value_size=head_size if is_mla else fields.integer("v_head_dim", high=4096) or head_size,
        window=_window(fields, facts),
        chunk=fields.integer("attention_chunk_size"),
        soft_cap=fields.number(*SOFT_CAP),
        dtype=_dtype(config, fields, notes),
    )
    depth = Depth(fields, count, facts, base.window, notes)
    words = next((found for read in CONVENTIONS if (found := read(depth)) is not None), None)
    if words is None:
        words = ["full"] * count
    pairs = [_word(fields.name("layer kinds"), word) for word in words]
    if (
        base.window is not None
        and not any(k is Kind.SLIDING for k, _ in pairs)
        and not _mentions_window(notes)
    ):
        notes.append(f"sliding_window={base.window} is set and no layer uses it")
    if _encoder(fields, facts, outer, notes):
        pairs = [(Kind.ENCODER, False)] * count
    kinds = [kind for kind, _ in pairs]
    shared = _shared(fields, kinds, notes)
    has_sinks = _sink_layers(fields, facts, outer)
    bias = _position_bias(fields, facts)
    if fields.flag("is_encoder_decoder") or (config.get("is_encoder_decoder") is True):
        notes.append(
            "each decoder layer also keeps the keys and values of the encoder's output, which stay native"
        )
    if fields.flag("add_cross_attention"):
        notes.append("each layer also has cross attention, whose keys and values stay native")
    if fields.data.get("cross_layer_interval"):
        notes.append("gated cross-attention layers between the decoder layers stay native")

    for index, (kind, state) in enumerate(pairs):
        own: list[str] = []
        mla = _mla(fields, index) if kind in (Kind.FULL, Kind.SLIDING, Kind.SPARSE) else None
        if facts.get("attention") in ("sparse", "differential") and kind in (Kind.FULL, Kind.SLIDING):
            own.append(f"{facts['attention']} attention ({facts['source']})")
            kind = Kind.SPARSE
        sinks = has_sinks(pairs[index][0])
        if sinks and facts.get("sinks") and "add_swa_attention_sink_bias" not in fields.data:
            own.append(f"learned sinks: from the table of model types ({facts['source']})")
        if mla is not None:
            rank, rope = mla
            own.append(f"latent attention: one vector of kv_lora_rank={rank} + rotary {rope} per token")
            if kind is Kind.SPARSE:
                own.append("an indexer selects the tokens")
            yield LayerSpec(
                index,
                base.heads,
                1,
                rank + rope,
                kind=Kind.MLA,
                value_head_size=rank,
                sinks=sinks,
                window=base.window if kind is Kind.SLIDING else None,
                dtype=base.dtype,
                kv_shared_with=shared.get(index),
                notes=tuple(own),
            )
            continue
        b = _variants(fields, base, kind, index, count, facts)
        if b.heads % b.kv_heads:
            raise SpecError(
                fields.name("num_attention_heads"),
                b.heads,
                f"a multiple of num_key_value_heads={b.kv_heads}{_whose(fields, KV_HEADS)}",
            )
        if kind is Kind.SLIDING and b.window is None:
            raise SpecError(
                fields.name("sliding_window"), None, f"a window for layer {index}, which is sliding"
            )
        if kind is Kind.CHUNKED and b.chunk is None:
            raise SpecError(
                fields.name("attention_chunk_size"), None, f"a chunk for layer {index}, which is chunked"
            )
        if kind is Kind.SPARSE and words[index] in WORDS and words[index] not in ("full", "sliding"):
            own.append(f"{words[index]}: it does not read all cached tokens")
        keeps = kind not in (Kind.LINEAR, Kind.NONE)
        yield LayerSpec(
            index,
            b.heads,
            b.kv_heads,
            b.head_size,
            kind=kind,
            value_head_size=b.value_size,
            window=b.window if kind is Kind.SLIDING else None,
            chunk=b.chunk if kind is Kind.CHUNKED else None,
            sinks=sinks and keeps,
            soft_cap=b.soft_cap if keeps else None,
            scale=_scale(fields, model_type, b.head_size, facts),
            dtype=b.dtype,
            position_bias=bias if keeps else None,
            recurrent_state=state,
            kv_shared_with=shared.get(index) if keeps else None,
            notes=tuple(own),
        )


def _whose(fields: Fields, keys: Sequence[str]) -> str:
    """Where a value that nobody wrote down comes from, for an error about it."""
    taken = any(
        note.startswith(f"{key} is not given: {fields.defaults.get(key)} ")
        for note in fields.notes
        for key in keys
    )
    return ", the default of this model type" if taken else ""


def _mentions_window(notes: Sequence[str]) -> bool:
    return any("sliding_window" in note for note in notes)


def model_from_config(config: Mapping[str, Any], *, name: str = "", source: str = "") -> ModelSpec:
    """The ModelSpec of a parsed ``config.json``, on all heads (tp 1).

    SpecError names the field that is missing or wrong. Notes that hold for the whole model are in ``warnings``;
    those that begin with ``unknown:`` are guesses that the config leaves open.
    """
    if not isinstance(config, Mapping):
        raise SpecError("config", type(config).__name__, "a mapping, as in config.json")
    fields, outer = decoder_fields(config)
    notes: list[str] = fields.notes
    layers = tuple(_layers(config, fields, outer, notes))
    model_type = fields.data.get("model_type") or outer
    if not model_type:
        notes.append("unknown: model_type is not given, so facts of the architecture (sinks) are not known")
    elif model_type not in known_model_types():
        notes.append(
            f"unknown: model_type {model_type[:80]} is not in the table; sinks, position bias and layer pattern taken "
            "as none"
        )
    open_question = model_type_facts().get(model_type, {}).get("unknown")
    if open_question:
        notes.append(f"unknown: {open_question}")
    position = fields.integer(
        "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", high=1 << 40
    )
    return ModelSpec(
        name=name or _text(config.get("_name_or_path")) or outer or "model",
        layers=layers,
        source=source,
        model_type=model_type,
        max_position=position,
        warnings=tuple(dict.fromkeys(notes)),
    )


def _text(value: Any) -> str:
    return value[:200] if isinstance(value, str) else ""


def parse_json(text: str, source: str) -> Any:
    """Parsed JSON; SpecError names ``source`` and the place of a mistake."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(source, _first_line(str(error)), "valid JSON") from None


def _first_line(text: str) -> str:
    return text.splitlines()[0][:200] if text else ""
