"""Every decoder of the installed transformers package, against what the package itself makes of its configs.

Three oracles that share nothing with our reader: the configuration objects (layer_types, head shapes), the cache that
transformers builds for a config, and the projections of models built without memory (on the meta device).
"""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from turboquant_rocm import AttentionKind, ModelSpec, SpecError
from turboquant_rocm.hf_config import (
    HEADS,
    HIDDEN,
    LAYERS,
    WORDS,
    known_model_types,
    model_from_config,
    model_type_facts,
)
from turboquant_rocm.modelspec import bundled_models, load_model
from turboquant_rocm.planning import Question, Role, answer_question
from turboquant_rocm.presets import get_preset, load_yaml
from turboquant_rocm.target import get_target

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from transformers.models.auto import modeling_auto  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

transformers.logging.set_verbosity_error()
warnings.filterwarnings("ignore")

CAUSAL = dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MULTIMODAL = dict(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
SEQ2SEQ = dict(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
MODEL_TYPES = sorted({*CAUSAL, *MULTIMODAL, *SEQ2SEQ})

# Types whose default configuration transformers itself refuses or cannot divide: they must be refused by name.
INDIVISIBLE = {"glm4_moe", "glm4v_moe", "qwen3_omni_moe_thinker"}
KEEPS_KV = (AttentionKind.FULL, AttentionKind.SLIDING, AttentionKind.CHUNKED)


@cache
def default_config(model_type: str) -> Any:
    try:
        return CONFIG_MAPPING[model_type]()
    except Exception as error:
        pytest.skip(f"transformers cannot build its own default: {type(error).__name__}")


@cache
def spec(model_type: str) -> ModelSpec:
    """What we read from the config.json that transformers would save."""
    return model_from_config(json.loads(default_config(model_type).to_json_string(use_diff=True)))


def text_config(model_type: str) -> Any:
    config = default_config(model_type)
    found = config.get_text_config(decoder=True)
    return found if found is not None else config


def read_or_skip(model_type: str) -> ModelSpec:
    if model_type in INDIVISIBLE:
        with pytest.raises(SpecError):
            spec(model_type)
        pytest.skip("its default head size is no integer")
    return spec(model_type)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_plan_or_a_typed_refusal(model_type: str):
    model = read_or_skip(model_type)
    for arch in ("gfx950", "sm_90"):
        plan = answer_question(Question(model, get_target(arch), get_preset("turboquant_4bit_nc")))
        for entry in plan.layers:
            if entry.role is Role.REFUSED:
                assert all(entry.refused.values())
    # The whole dictionary, class attributes included, says the same.
    whole = json.loads(default_config(model_type).to_json_string(use_diff=False))
    assert model_from_config(whole).layers == model.layers


def listed_types(config: Any) -> list[str] | None:
    types = getattr(config, "layer_types", None)
    return list(types) if isinstance(types, list | tuple) else None


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_kinds_agree_with_the_config(model_type: str):
    model = read_or_skip(model_type)
    types = listed_types(text_config(model_type))
    if types is None:
        pytest.skip("the configuration lists no kinds")
    assert len(model.layers) == len(types)
    for layer, word in zip(model.layers, types, strict=True):
        expected = WORDS[word][0]
        if layer.kind in (AttentionKind.MLA, AttentionKind.SPARSE):
            assert expected in (*KEEPS_KV, AttentionKind.SPARSE)
        elif layer.kind is not AttentionKind.ENCODER:
            assert layer.kind is expected, (layer.index, word)
        assert layer.recurrent_state == WORDS[word][1]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_head_shapes_agree_with_the_config(model_type: str):
    from transformers.configuration_utils import get_head_shapes

    model = read_or_skip(model_type)
    try:
        kv_heads, head_dims = get_head_shapes(text_config(model_type))
    except Exception as error:
        pytest.skip(f"transformers cannot say: {type(error).__name__}")
    exceptions = {
        # Their sliding layers have KV heads of their own, which the summary leaves out (see the models below).
        "mimo_v2_flash",
        "inkling_mm_model",
        "inkling_text",
        "falcon",  # num_kv_heads is ignored with multi_query
    }
    for layer in model.layers:
        if layer.kind not in KEEPS_KV or model_type in exceptions:
            continue
        heads = kv_heads[layer.index] if isinstance(kv_heads, list) else kv_heads
        size = head_dims[layer.index] if isinstance(head_dims, list) else head_dims
        assert (layer.num_kv_heads, layer.head_size) == (heads, size), layer


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_windows_agree_with_the_cache_that_transformers_builds(model_type: str):
    model = read_or_skip(model_type)
    if model_type == "gpt_neo":
        pytest.skip("its windows are masks over a cache of full length")
    try:
        built = transformers.DynamicCache(config=default_config(model_type)).layers
    except Exception as error:
        pytest.skip(f"transformers builds no cache: {type(error).__name__}")
    owners = [layer for layer in model.layers if layer.kind in KEEPS_KV and layer.kv_shared_with is None]
    sliding = {layer.index: layer.window for layer in owners if layer.kind is AttentionKind.SLIDING}
    if len(built) != len(model.layers):
        pytest.skip("layers of another number")
    for layer in owners:
        window = getattr(built[layer.index], "sliding_window", None)
        if getattr(built[layer.index], "is_sliding", False):
            assert window == sliding.get(layer.index, layer.chunk), layer
        elif type(built[layer.index]).__name__ != "DummyLayer":
            assert layer.index not in sliding, layer


# ---- the models themselves ------------------------------------------------------------------------------

OTHER_TOWERS = (
    "vision",
    "visual",
    "audio",
    "encoder.",
    "qformer",
    "perceiver",
    "indexer",
    "mtp",
    "patcher",
    "depth",
    "aligner",
)


def projections(model: Any) -> dict[int, list[tuple[int, int | None, bool]]]:
    """layer -> (width of keys, width of values, has sinks) of its attention modules."""
    found: dict[int, list[tuple[int, int | None, bool]]] = {}
    for name, module in model.named_modules():
        if any(part in name for part in OTHER_TOWERS):
            continue
        key = getattr(module, "k_proj", None)
        index = re.search(r"\.(\d+)\.", name)
        if key is None or not hasattr(key, "out_features") or index is None:
            continue
        width = getattr(getattr(module, "v_proj", None), "out_features", None)
        sinks = getattr(module, "sinks", None) is not None
        found.setdefault(int(index.group(1)), []).append((key.out_features, width, sinks))
    return found


@pytest.mark.parametrize("model_type", sorted({*CAUSAL, *MULTIMODAL}))
def test_projections_and_sinks_agree_with_the_model(model_type: str):
    model = read_or_skip(model_type)
    auto = (
        transformers.AutoModelForCausalLM
        if model_type in CAUSAL
        else transformers.AutoModelForImageTextToText
    )
    try:
        with torch.device("meta"):
            found = projections(auto.from_config(default_config(model_type)))
    except Exception as error:
        pytest.skip(f"transformers cannot build it: {type(error).__name__}")
    if not found:
        pytest.skip("its attention has no k_proj")
    if model_type == "hrm_text":
        pytest.skip("its layers run several times, and each time has its own cache")
    for layer in model.layers:
        if layer.kind not in (*KEEPS_KV, AttentionKind.SPARSE):
            continue
        widths = found.get(layer.index)
        if widths is None:
            assert layer.kv_shared_with is not None, layer
            continue
        key, value = layer.num_kv_heads * layer.head_size, layer.num_kv_heads * layer.value_size
        assert any(k == key and v in (None, value) for k, v, _ in widths), (layer, widths)
        assert any(sinks for *_, sinks in widths) == layer.sinks, layer


# ---- patterns that a config leaves out ------------------------------------------------------------------


@pytest.mark.parametrize("count", [5, 13, 24])
@pytest.mark.parametrize("model_type", sorted(CAUSAL))
def test_patterns_that_a_config_leaves_out(model_type: str, count: int):
    """Without its list of kinds, and at other depths, the architecture's own pattern is found."""
    if model_type in ("dory", "nemotron_h"):
        pytest.skip("its depth is the length of the list")
    try:
        config = CONFIG_MAPPING[model_type](num_hidden_layers=count)
    except Exception as error:
        pytest.skip(f"transformers refuses {count} layers: {type(error).__name__}")
    types = listed_types(config)
    if types is None:
        pytest.skip("the configuration lists no kinds")
    data = json.loads(config.to_json_string(use_diff=True))
    for key in ("layer_types", "layers_block_type", "hybrid_layer_ids"):
        data.pop(key, None)
    if data.get("num_kv_shared_layers", 0) > count:
        with pytest.raises(SpecError, match="num_kv_shared_layers"):
            model_from_config(data)
        return
    model = model_from_config(data)
    for layer, word in zip(model.layers, types, strict=True):
        if layer.kind not in (AttentionKind.MLA, AttentionKind.SPARSE):
            assert layer.kind is WORDS[word][0], (layer.index, word)
    # A type outside the tables says just that, once; the layer pattern itself must not be a guess.
    outside = (
        f"unknown: model_type {model.model_type} is not in the table; sinks, position bias and layer pattern taken "
        "as none"
    )
    excused = [] if model.model_type in known_model_types() else [outside]
    assert [w for w in model.warnings if w.startswith("unknown")] == excused


# ---- the bundled models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", bundled_models())
def test_bundled_models_are_what_transformers_makes_of_their_configs(name: str):
    from transformers.configuration_utils import get_head_shapes

    given = dict(load_yaml("models", f"{name}.yaml")["config"])
    config = CONFIG_MAPPING[given.pop("model_type")](**given)
    text = config.get_text_config(decoder=True)
    model = load_model(name)
    assert len(model.layers) == text.num_hidden_layers
    types = listed_types(text)
    if types is None:  # such a type has one kind only
        words = {"sliding" if getattr(text, "sliding_window", None) else "full"}
        words = {"mla"} if getattr(text, "kv_lora_rank", None) else words
        assert {str(layer.kind) for layer in model.layers} == words
    else:
        assert [layer.kind for layer in model.layers] == [WORDS[word][0] for word in types]
    kv_heads, size = get_head_shapes(text)
    for layer in model.layers:
        if layer.kind in KEEPS_KV:
            assert (layer.num_heads, layer.num_kv_heads) == (text.num_attention_heads, kv_heads)
            assert layer.head_size == size
            assert layer.window == (text.sliding_window if layer.kind is AttentionKind.SLIDING else None)
            assert layer.chunk == (text.attention_chunk_size if layer.kind is AttentionKind.CHUNKED else None)
            assert layer.soft_cap == getattr(text, "attn_logit_softcapping", None)
        elif layer.kind is AttentionKind.MLA:
            assert layer.head_size == text.kv_lora_rank + text.qk_rope_head_dim
            assert layer.value_size == text.kv_lora_rank


# ---- windows that a switch turns on --------------------------------------------------------------------

SWITCHED = sorted(
    name
    for name, facts in model_type_facts().items()
    if "use_sliding_window" in facts and "layers" not in facts and name in CONFIG_MAPPING
)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"use_sliding_window": True},
    {"use_sliding_window": True, "sliding_window": 64},
    {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
    {"use_sliding_window": True, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
    {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0},
    {"sliding_window": 64, "max_window_layers": 3},
    {"use_sliding_window": True, "sliding_window": 64, "no_rope_layer_interval": 2},
]


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()) or "none"
)
@pytest.mark.parametrize("model_type", SWITCHED)
def test_windows_that_a_switch_turns_on(model_type: str, settings: dict[str, Any]):
    """A config as published, which lists no layers, against those that transformers makes of it."""
    given = {
        "hidden_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        **settings,
    }
    config = CONFIG_MAPPING[model_type](**given)
    text = config.get_text_config(decoder=True)
    types = listed_types(text)
    if types is None:  # qwen3_moe: the window holds for all layers
        types = ["full_attention" if text.sliding_window is None else "sliding_attention"] * 6
    model = model_from_config({"model_type": model_type, **given})
    assert [str(layer.kind) for layer in model.layers] == [str(WORDS[word][0]) for word in types]
    assert {layer.window for layer in model.layers if layer.kind is AttentionKind.SLIDING} <= {
        text.sliding_window
    }
    assert not any(w.startswith("unknown") for w in model.warnings)


def test_every_switch_is_covered():
    assert {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "dots1", "qwen2_vl_text"} <= set(SWITCHED)


# hrm_text multiplies num_hidden_layers by its cycles each time that it is read.
SHAPE = {"model_type", "is_encoder_decoder", *LAYERS, *HEADS, *HIDDEN}


@pytest.mark.parametrize("model_type", [name for name in MODEL_TYPES if name != "hrm_text"])
def test_fields_left_out_have_the_values_that_transformers_gives_them(model_type: str):
    """save_pretrained leaves out of a nested text_config whatever equals a default of its class."""
    try:
        kind = type(text_config(model_type))
        shape = {k: v for k, v in json.loads(kind().to_json_string(use_diff=False)).items() if k in SHAPE}
        whole = json.loads(
            kind(**{k: v for k, v in shape.items() if k != "model_type"}).to_json_string(use_diff=False)
        )
        expected = model_from_config(whole)
    except Exception as error:
        pytest.skip(f"transformers cannot build it from its shape: {type(error).__name__}")
    try:
        model = model_from_config(shape)
    except SpecError:
        return  # refused by name
    if any(note.startswith("unknown:") for note in model.warnings):
        return  # said to be a guess

    def compared(spec: ModelSpec) -> list[Any]:
        return [
            replace(layer, notes=(), scale=layer.softmax_scale, kv_shared_with=None) for layer in spec.layers
        ]

    assert compared(model) == compared(expected)


def test_null_is_not_left_out():
    """As in transformers: a field that is there and null does not take the default of its class."""
    config = {"model_type": "mixtral", "num_hidden_layers": 4, "num_attention_heads": 32, "hidden_size": 4096}
    assert model_from_config(config).layers[0].num_kv_heads == 8
    assert model_from_config({**config, "num_key_value_heads": None}).layers[0].num_kv_heads == 32


def test_names_of_published_configs_that_transformers_renames():
    bloom = {"model_type": "bloom", "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112}
    assert model_from_config(bloom).layers[0].head_size == 128
