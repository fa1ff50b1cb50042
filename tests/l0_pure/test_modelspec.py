"""Every way in which configs say what a layer is, and what is refused or admitted as unknown."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turboquant_rocm import AttentionKind, SpecError, load_model
from turboquant_rocm.hf_config import HEADS, HIDDEN, LAYERS, model_from_config, model_type_facts
from turboquant_rocm.modelspec import bundled_models, pad_heads, split
from turboquant_rocm.presets import load_yaml, parse_yaml
from turboquant_rocm.spec import AttentionKind as K
from turboquant_rocm.spec import ModelSpec

BASE = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}

F, S, C, L, X, M, N, E, P = (
    str(kind)
    for kind in (K.FULL, K.SLIDING, K.CHUNKED, K.LINEAR, K.CROSS, K.MLA, K.NONE, K.ENCODER, K.SPARSE)
)


def kinds(model: ModelSpec) -> list[str]:
    return [str(layer.kind) for layer in model.layers]


def read(**changes: object) -> ModelSpec:
    return model_from_config({**BASE, **changes})


CONVENTIONS = {
    "layer_types": (
        {"layer_types": ["full_attention", "sliding_attention"] * 3, "sliding_window": 64},
        [F, S] * 3,
    ),
    "layer_types-linear": ({"layer_types": ["linear_attention", "conv", "mamba"] * 2}, [L] * 6),
    "layer_types-chunked": (
        {"layer_types": ["chunked_attention", "full_attention"] * 3, "attention_chunk_size": 64},
        [C, F] * 3,
    ),
    "layer_types-sparse": (
        {"layer_types": ["indexed_attention", "compressed_sparse_attention"] * 3},
        [P] * 6,
    ),
    "layer_types-longer": (
        {"layer_types": ["full_attention"] * 7, "num_nextn_predict_layers": 1},
        [F] * 6,
    ),
    "layer_types-longer-mixed": (
        {
            "layer_types": ["full_attention"] * 6 + ["sliding_attention"],
            "num_nextn_predict_layers": 1,
            "sliding_window": 64,
        },
        [F] * 6,
    ),
    "layers_block_type": ({"layers_block_type": ["mamba", "attention", "moe"] * 2}, [L, F, N] * 2),
    "block_types": (
        {"block_types": ["recurrent", "recurrent", "attention"], "attention_window_size": 64},
        [L, L, S] * 2,
    ),
    "attn_type_list": ({"attn_type_list": [0, 0, 1] * 2}, [L, L, F] * 2),
    "hybrid_layer_pattern": ({"hybrid_layer_pattern": [0, 1, 1] * 2, "sliding_window": 64}, [F, S, S] * 2),
    "attention_types": (
        {"model_type": "gpt_neo", "attention_types": [[["global", "local"], 3]], "window_size": 64},
        [F, S] * 3,
    ),
    "hybrid_override_pattern": ({"hybrid_override_pattern": "M-*EM*"}, [L, N, F, N, L, F]),
    "attn_layer_period": ({"attn_layer_period": 3, "attn_layer_offset": 1}, [L, F, L] * 2),
    "attn_layer_period-zamba": (
        {"model_type": "zamba", "attn_layer_period": 2, "attn_layer_offset": 1},
        [L, L, F, L, F, L],
    ),
    "attn_layer_indices": ({"attn_layer_indices": [1, 4]}, [L, F, L, L, F, L]),
    "full_attn_idxs": ({"full_attn_idxs": [0, 5]}, [F, L, L, L, L, F]),
    "hybrid_layer_ids": ({"hybrid_layer_ids": [2, 3]}, [L, L, F, F, L, L]),
    "local_layer_ids": ({"local_layer_ids": [0, 1, 3], "sliding_window": 64}, [S, S, F, S, F, F]),
    "cross_attention_layers": ({"cross_attention_layers": [1, 3]}, [F, X, F, X, F, F]),
    "full_attention_interval": ({"full_attention_interval": 3}, [L, L, F] * 2),
    "layer_group_size": ({"layer_group_size": 2}, [L, F] * 3),
    "global_attn_every_n_layers": ({"global_attn_every_n_layers": 3, "sliding_window": 64}, [S, S, F] * 2),
    "global_attn_every_n_layers-modernbert": (
        {"model_type": "modernbert-decoder", "global_attn_every_n_layers": 3, "local_attention": 128},
        [F, S, S] * 2,
    ),
    "sliding_window_pattern": ({"sliding_window_pattern": 2, "sliding_window": 64}, [S, F] * 3),
    "sliding_window_pattern-letters": (
        {"sliding_window_pattern": "LLG", "sliding_window": 64},
        [S, S, F] * 2,
    ),
    "max_window_layers": (
        {"use_sliding_window": True, "max_window_layers": 4, "sliding_window": 64},
        [F, F, F, F, S, S],
    ),
    "use_sliding_window-alternating": (
        {"model_type": "qwen2_moe", "use_sliding_window": True, "max_window_layers": 4, "sliding_window": 64},
        [S, F, S, F, F, F],
    ),
    "use_sliding_window-no-rope": (
        {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 64},
        [F, F, F, S, F, F],
    ),
    "use_sliding_window-no-rope-listed": (
        {
            "model_type": "smollm3",
            "use_sliding_window": True,
            "sliding_window": 64,
            "no_rope_layers": [0, 1, 1] * 2,
        },
        [S, F, F] * 2,
    ),
    "use_sliding_window-of-a-pattern": (
        {"model_type": "dots3_note_text", "use_sliding_window": True, "sliding_window": 64},
        [P, P, S, S, S, P],
    ),
    "use_sliding_window-of-a-pattern-false": (
        {"model_type": "dots3_note_text", "use_sliding_window": False, "sliding_window": 64},
        [P] * 6,
    ),
    "sliding_window-default": (
        {"model_type": "mistral"},
        [S] * 6,
    ),
    "use_sliding_window-false": (
        {"use_sliding_window": False, "max_window_layers": 0, "sliding_window": 64},
        [F] * 6,
    ),
    "attention_chunk_size": ({"attention_chunk_size": 64, "no_rope_layers": [1, 1, 0] * 2}, [C, C, F] * 2),
    "no_rope_layer_interval": ({"attention_chunk_size": 64, "no_rope_layer_interval": 2}, [C, F] * 3),
    "linear_attn_config": (
        {"linear_attn_config": {"full_attn_layers": [1, 6], "kda_layers": [2, 3, 4, 5]}},
        [F, L, L, L, L, F],
    ),
    "block_configs": (
        {
            "num_key_value_heads": None,
            "block_configs": [{"attention": {"n_heads_in_group": 4}}, {"attention": {"no_op": True}}] * 3,
        },
        [F, N] * 3,
    ),
    "sliding_window-everywhere": ({"model_type": "mistral", "sliding_window": 64}, [S] * 6),
    "sliding_window-off": ({"model_type": "mistral", "sliding_window": None}, [F] * 6),
    "sliding_window-zero": ({"sliding_window": 0}, [F] * 6),
    "sliding_window-minus-one": ({"sliding_window": -1}, [F] * 6),
    "kv_lora_rank": ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, [M] * 6),
    "kv_lora_rank-hybrid": (
        {"kv_lora_rank": 512, "layer_types": ["linear_attention", "full_attention"] * 3},
        [L, M] * 3,
    ),
    "encoder": ({"model_type": "bert"}, [E] * 6),
    "encoder-as-decoder": ({"model_type": "bert", "is_decoder": True}, [F] * 6),
    "is_causal": ({"is_causal": False}, [E] * 6),
    "no-attention": ({"model_type": "mamba"}, [L] * 6),
    "mamba-without-heads": ({"model_type": "mamba", "num_attention_heads": None}, [L] * 6),
    "architecture-pattern": ({"model_type": "gpt_oss", "sliding_window": 128}, [S, F] * 3),
    "plain": ({}, [F] * 6),
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_layer_kinds(name: str):
    changes, expected = CONVENTIONS[name]
    model = read(**changes)
    assert kinds(model) == expected
    for layer in model.layers:
        assert (layer.window is not None) == (layer.kind is AttentionKind.SLIDING)
        assert (layer.chunk is not None) == (layer.kind is AttentionKind.CHUNKED)


def test_every_convention_of_the_module_is_tested():
    tested = {key for changes, _ in CONVENTIONS.values() for key in changes}
    named = (
        "layer_types layers_block_type block_types attn_type_list attn_layer_period attn_layer_indices full_attn_idxs"
        " hybrid_layer_ids local_layer_ids attention_types hybrid_override_pattern full_attention_interval"
        " global_attn_every_n_layers sliding_window_pattern max_window_layers attention_chunk_size"
    )
    assert set(named.split()) <= tested


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_aliases(layers: str, heads: str, hidden: str):
    model = model_from_config({"model_type": "gpt2", layers: 3, heads: 4, hidden: 256})
    assert len(model.layers) == 3
    assert (model.layers[0].num_heads, model.layers[0].num_kv_heads, model.layers[0].head_size) == (4, 4, 64)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda c: {"text_config": c},
        lambda c: {"model_type": "llava", "text_config": c, "vision_config": {"num_hidden_layers": 99}},
        lambda c: {"thinker_config": {"text_config": c}},
        lambda c: {"llm_config": c, "hidden_size": 7},
        lambda c: {"decoder": c, "encoder": {"num_hidden_layers": 9}, "is_encoder_decoder": True},
        lambda c: {"language_config": c},
    ],
)
def test_nesting(wrap):
    model = model_from_config(wrap(BASE))
    assert len(model.layers) == 6
    assert model.model_type == "llama"
    with pytest.raises(SpecError) as caught:
        model_from_config(wrap({**BASE, "num_attention_heads": "8"}))
    assert caught.value.field.endswith(".num_attention_heads")


def test_heads_and_head_sizes():
    assert read(head_dim=80).layers[0].head_size == 80
    assert read(v_head_dim=64).layers[0].value_size == 64
    assert read(num_key_value_heads=None, model_type="gpt2").layers[0].num_kv_heads == 8
    assert read(multi_query=True).layers[0].num_kv_heads == 1
    falcon = {"model_type": "falcon", "num_kv_heads": 4, "num_key_value_heads": None}
    assert read(**falcon).layers[0].num_kv_heads == 1
    assert read(**falcon, new_decoder_architecture=True).layers[0].num_kv_heads == 4
    assert read(**falcon, multi_query=False).layers[0].num_kv_heads == 8
    assert read(num_key_value_heads=None, attn_config={"kv_n_heads": 4}).layers[0].num_kv_heads == 4
    chatglm = {"num_key_value_heads": None, "multi_query_group_num": 2, "kv_channels": 96}
    assert (read(**chatglm).layers[0].num_kv_heads, read(**chatglm).layers[0].head_size) == (2, 96)
    assert read(num_key_value_heads=[1, 2, 4, 8, 1, 2]).layers[2].num_kv_heads == 4
    assert read(num_attention_heads_per_layer=[8, 16] * 3).layers[1].num_heads == 16


def test_a_missing_number_of_kv_heads_is_said_to_be_taken():
    assert any("num_key_value_heads is not given" in w for w in read(num_key_value_heads=None).warnings)
    assert not read(num_key_value_heads=None, model_type="gpt2").warnings


def test_per_layer_config_with_zero_padded_keys():
    model = read(
        head_dim=128,
        per_layer_config={"02": {"head_dim": 256, "num_key_value_heads": 1}, 4: {"head_dim": 64}},
    )
    assert [layer.head_size for layer in model.layers] == [128, 128, 256, 128, 64, 128]
    assert [layer.value_size for layer in model.layers] == [128, 128, 256, 128, 64, 128]
    assert [layer.num_kv_heads for layer in model.layers] == [2, 2, 1, 2, 2, 2]


def test_two_geometries_in_one_model():
    sliding = read(
        layer_types=["sliding_attention", "full_attention"] * 3,
        sliding_window=128,
        head_dim=256,
        global_head_dim=512,
        swa_num_key_value_heads=4,
        swa_head_dim=128,
        swa_v_head_dim=64,
    )
    local, full = sliding.layers[:2]
    assert (local.num_kv_heads, local.head_size, local.value_size, local.window) == (4, 128, 64, 128)
    assert (full.num_kv_heads, full.head_size, full.window) == (2, 512, None)


def test_kv_sharing():
    model = read(
        layer_types=["sliding_attention", "full_attention"] * 3, sliding_window=64, num_kv_shared_layers=2
    )
    assert [layer.kv_shared_with for layer in model.layers] == [None, None, None, None, 2, 3]
    assert [x.kv_shared_with for x in read(kv_source_layers=[0, 0, 2, 2, 4, 4]).layers] == [
        None,
        0,
        None,
        2,
        None,
        4,
    ]
    assert [x.kv_shared_with for x in read(use_cla=True, cla_share_factor=3).layers] == [
        None,
        0,
        0,
        None,
        3,
        3,
    ]
    assert any("another model" in w for w in read(num_kv_shared_layers=6).warnings)


def test_mla_is_one_latent_vector_per_token():
    layer = read(kv_lora_rank=512, qk_rope_head_dim=64).layers[0]
    assert (layer.num_heads, layer.num_kv_heads, layer.head_size, layer.value_size) == (8, 1, 576, 512)


def test_sinks_come_from_the_table_and_say_so():
    model = read(
        model_type="gpt_oss", layer_types=["sliding_attention", "full_attention"] * 3, sliding_window=128
    )
    assert all(layer.sinks for layer in model.layers)
    assert "transformers" in model.layers[0].notes[0]
    mimo = read(model_type="mimo_v2_flash", sliding_window=128, head_dim=192, v_head_dim=128)
    assert [layer.sinks for layer in mimo.layers] == [False, True, True, True, True, False]
    assert [layer.num_kv_heads for layer in mimo.layers] == [2, 4, 4, 4, 4, 2]
    assert not any(layer.sinks for layer in read().layers)
    for name in ("gpt_oss", "mimo_v2_flash", "deepseek_v4", "granite_swa"):
        assert model_type_facts()[name]["sinks"]
    assert all(facts["source"] for facts in model_type_facts().values())


def test_explicit_sink_flags_win():
    model = read(
        model_type="mimo_v2_flash",
        sliding_window=128,
        hybrid_layer_pattern=[0, 1] * 3,
        add_swa_attention_sink_bias=False,
        add_full_attention_sink_bias=True,
    )
    assert [layer.sinks for layer in model.layers] == [True, False] * 3


def test_soft_caps_scales_and_position_biases():
    gemma = read(
        model_type="gemma2",
        attn_logit_softcapping=50.0,
        query_pre_attn_scalar=144,
        sliding_window=64,
        head_dim=128,
    )
    assert gemma.layers[0].soft_cap == 50.0
    assert gemma.layers[0].scale == pytest.approx(1 / 12)
    assert read(final_logit_softcapping=30.0).layers[0].soft_cap is None  # of the output, not of attention
    assert read(model_type="granite", attention_multiplier=0.5).layers[0].scale == 0.5
    # Architectures that scale in their own way, without a field.
    assert read(model_type="gemma4_text", sliding_window=64).layers[0].softmax_scale == 1.0
    assert read(model_type="gpt_neo", window_size=64).layers[0].softmax_scale == 1.0
    zamba = read(model_type="zamba2", attention_head_dim=160, hybrid_layer_ids=[1]).layers[1]
    assert zamba.softmax_scale == pytest.approx(80**-0.5)
    assert read(model_type="bloom").layers[0].position_bias == "alibi"
    assert read(model_type="falcon", alibi=True).layers[0].position_bias == "alibi"
    assert read(model_type="t5").layers[0].position_bias == "relative"


def test_what_is_not_known_is_said():
    model = read(sliding_window=4096)
    assert kinds(model) == [S] * 6
    assert any(w.startswith("unknown: which layers use sliding_window") for w in model.warnings)
    assert any("model_type is not given" in w for w in read(model_type=None).warnings)
    unused = read(use_sliding_window=False, sliding_window=4096)
    assert any("not used" in w for w in unused.warnings)
    listed = read(layer_types=["full_attention"] * 6, sliding_window=4096)
    assert any("no layer uses it" in w for w in listed.warnings)


def test_dtypes():
    assert str(read(torch_dtype="float16").layers[0].dtype) == "fp16"
    assert str(read(dtype="bfloat16").layers[0].dtype) == "bf16"
    model = read(torch_dtype="float32")
    assert str(model.layers[0].dtype) == "bf16"
    assert any("float32" in w for w in model.warnings)


WRONG = {
    "no layers field": ({"num_hidden_layers": None}, "num_hidden_layers"),
    "zero layers": ({"num_hidden_layers": 0}, "num_hidden_layers"),
    "negative layers": ({"num_hidden_layers": -3}, "num_hidden_layers"),
    "absurd layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "string for a number": ({"num_attention_heads": "8"}, "num_attention_heads"),
    "auto": ({"num_key_value_heads": "auto"}, "num_key_value_heads"),
    "bool for a number": ({"num_attention_heads": True}, "num_attention_heads"),
    "float for a number": ({"num_attention_heads": 8.0}, "num_attention_heads"),
    "list for a number": ({"hidden_size": [1]}, "hidden_size"),
    "no heads": ({"num_attention_heads": None}, "num_attention_heads"),
    "no hidden size": ({"hidden_size": None}, "hidden_size"),
    "heads not divisible by kv": ({"num_key_value_heads": 3}, "num_attention_heads"),
    "hidden not divisible": (
        {"hidden_size": 1000, "num_attention_heads": 7, "num_key_value_heads": 7},
        "hidden_size",
    ),
    "huge head": ({"head_dim": 10**6}, "head_dim"),
    "layer_types too short": ({"layer_types": ["full_attention"]}, "layer_types"),
    "layer_types no list": ({"layer_types": "full_attention"}, "layer_types"),
    "layer kind unknown": ({"layer_types": ["telepathy"] * 6}, "layer kinds"),
    "layer kind no string": ({"layer_types": [None] * 6}, "layer kinds"),
    "sliding without a window": ({"layer_types": ["sliding_attention"] * 6}, "sliding_window"),
    "chunked without a chunk": ({"layer_types": ["chunked_attention"] * 6}, "attention_chunk_size"),
    "window a string": ({"sliding_window": "big"}, "sliding_window"),
    "index out of range": ({"full_attn_idxs": [6]}, "full_attn_idxs"),
    "index a string": ({"attn_layer_indices": ["1"]}, "attn_layer_indices"),
    "offset beyond period": ({"attn_layer_period": 2, "attn_layer_offset": 2}, "attn_layer_offset"),
    "pattern letters": ({"hybrid_override_pattern": "MMXX"}, "hybrid_override_pattern"),
    "window pattern letters": (
        {"sliding_window_pattern": "ABC", "sliding_window": 4},
        "sliding_window_pattern",
    ),
    "per layer key": ({"per_layer_config": {"x": {}}}, "per_layer_config"),
    "per layer index": ({"per_layer_config": {"6": {}}}, "per_layer_config"),
    "per layer value": ({"per_layer_config": {"1": 5}}, "per_layer_config.1"),
    "soft cap": ({"attn_logit_softcapping": -1}, "attn_logit_softcapping"),
    "soft cap text": ({"attn_logit_softcapping": "x"}, "attn_logit_softcapping"),
    "shared layers": ({"num_kv_shared_layers": 7}, "num_kv_shared_layers"),
    "source layers": ({"kv_source_layers": [5, 0, 0, 0, 0, 0]}, "kv_source_layers"),
    "model_type": ({"model_type": 5}, "model_type"),
    "flag": ({"use_sliding_window": "no", "sliding_window": 4}, "use_sliding_window"),
    "attention_types": ({"attention_types": [["global", 6]]}, "attention_types"),
    "max position": ({"max_position_embeddings": "long"}, "max_position_embeddings"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_fields_are_named(name: str):
    changes, field = WRONG[name]
    with pytest.raises(SpecError) as caught:
        read(**changes)
    assert caught.value.field == field
    assert field in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=7) | st.dictionaries(st.text(max_size=8), children, max_size=4)
    ),
    max_leaves=8,
)
KEYS = sorted(
    {key for changes, _ in [*CONVENTIONS.values(), *WRONG.values()] for key in changes}
    | {*BASE, "head_dim", "dtype", "text_config"}
)


@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4), st.booleans())
@settings(max_examples=400)
def test_no_config_gives_a_traceback(changes: dict, based: bool):
    try:
        model = model_from_config({**BASE, **changes} if based else changes)
    except SpecError:
        return
    assert model.layers


# ---- configs as they are published, with what matters of them ---------------------------------------------


def test_published_configs():
    """Shapes of configs on the hub that are unlike the ones transformers writes today."""
    mimo = model_from_config(
        {
            "model_type": "mimo_v2_flash",
            "num_hidden_layers": 6,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "swa_num_attention_heads": 64,
            "swa_num_key_value_heads": 8,
            "head_dim": 192,
            "v_head_dim": 128,
            "swa_head_dim": 192,
            "swa_v_head_dim": 128,
            "hidden_size": 4096,
            "sliding_window": 128,
            "sliding_window_size": 128,
            "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0],
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
        }
    )
    assert [(x.num_kv_heads, x.window, x.sinks) for x in mimo.layers[:2]] == [
        (4, None, False),
        (8, 129, True),
    ]
    gemma = model_from_config(
        {
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
        }
    )
    assert (gemma.layers[0].num_heads, gemma.layers[0].num_kv_heads, gemma.layers[0].head_size) == (8, 4, 256)
    assert any("default of this model type" in w for w in gemma.warnings)
    assert kinds(gemma)[:6] == [S, S, S, S, S, F]
    openelm = model_from_config(
        {
            "model_type": "openelm",
            "model_dim": 1280,
            "num_transformer_layers": 3,
            "head_dim": 64,
            "num_query_heads": [12, 12, 16],
            "num_kv_heads": [3, 3, 4],
        }
    )
    assert [(x.num_heads, x.num_kv_heads) for x in openelm.layers] == [(12, 3), (12, 3), (16, 4)]
    llama4 = model_from_config(
        {
            "model_type": "llama4",
            "text_config": {
                **BASE,
                "model_type": "llama4_text",
                "no_rope_layers": [],
                "attention_chunk_size": 8192,
            },
        }
    )
    assert kinds(llama4) == [C, C, C, F, C, C]
    deepseek = read(
        model_type="deepseek_v32",
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_n_heads=64,
        num_key_value_heads=8,
    )
    assert kinds(deepseek) == [M] * 6


# ---- files ----------------------------------------------------------------------------------------------


def test_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "my-model"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(BASE))
    assert load_model(file).name == "config"
    assert load_model(folder).name == "my-model"
    assert load_model(str(folder)) == load_model(folder)
    assert load_model(BASE).layers == load_model(file).layers
    file.write_text("\ufeff" + json.dumps(BASE), encoding="utf-8")
    assert len(load_model(file).layers) == 6
    as_yaml = tmp_path / "m.yaml"
    as_yaml.write_text("model_type: llama\nhidden_size: 512\nnum_hidden_layers: 2\nnum_attention_heads: 8\n")
    assert load_model(as_yaml).layers[0].head_size == 64


def test_model_ids_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--someone--Some-Model"
    for commit, layers in (("aaa", 3), ("bbb", 4)):
        (repo / "snapshots" / commit).mkdir(parents=True)
        (repo / "snapshots" / commit / "config.json").write_text(
            json.dumps({**BASE, "num_hidden_layers": layers})
        )
    past = time.time() - 100
    os.utime(repo / "snapshots" / "bbb" / "config.json", (past, past))
    assert len(load_model("someone/Some-Model").layers) == 3  # the newest snapshot
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("bbb")
    model = load_model("someone/Some-Model")
    assert len(model.layers) == 4
    assert "local cache" in model.source
    # A bundled model answers to its id as well.
    assert load_model("Qwen/Qwen3-32B") == load_model("qwen3-32b")
    with pytest.raises(SpecError, match="nobody/nothing"):
        load_model("nobody/nothing")


def test_layers_spelled_out(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "name: mine\nlayers:\n"
        "  - {count: 3, num_heads: 32, num_kv_heads: 8, head_size: 128}\n"
        "  - {num_heads: 32, num_kv_heads: 8, head_size: 128, kind: sliding, window: 1024, sinks: true}\n"
    )
    model = load_model(file)
    assert model.name == "mine"
    assert kinds(model) == [F, F, F, S]
    assert [layer.index for layer in model.layers] == [0, 1, 2, 3]
    assert model.layers[3].sinks


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("layers: []", "layers"),
        ("layers: {}", "layers"),
        ("layers: [5]", "layers[0]"),
        ("layers: [{num_heads: 8, num_kv_heads: 2}]", "layers[0].head_size"),
        ("layers: [{num_heads: 8, num_kv_heads: 3, head_size: 64}]", "layers[0].num_heads"),
        ("layers: [{num_heads: '8', num_kv_heads: 2, head_size: 64}]", "layers[0].num_heads"),
        ("layers: [{count: 0, num_heads: 8, num_kv_heads: 2, head_size: 64}]", "layers[0].count"),
        ("layers: [{count: 999999999, num_heads: 8, num_kv_heads: 2, head_size: 64}]", "layers[0].count"),
        ("layers: [{heads: 8, num_heads: 8, num_kv_heads: 2, head_size: 64}]", "layers[0].heads"),
        ("layers: [{num_heads: 8, num_kv_heads: 2, head_size: 64, kind: odd}]", "layers[0].kind"),
        ("a: [", "mine.yaml"),
        ("- 1", "model"),
        ("!!python/object/apply:os.system ['true']", "mine.yaml"),
        ("&a [*a]", "mine.yaml"),
    ],
)
def test_wrong_yaml_names_its_place(tmp_path: Path, text: str, field: str):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_model(file)
    assert caught.value.field == field


def test_files_that_are_none(tmp_path: Path):
    cases = {
        "empty.json": b"",
        "broken.json": b"{",
        "list.json": b"[1]",
        "deep.json": b"[" * 100_000,
        "binary.json": b"\xff\xfe\x00\x01",
        "huge.json": b"{" + b" " * (50 << 20) + b"}",
        "nan.json": b'{"num_hidden_layers": NaN, "num_attention_heads": 1, "hidden_size": 8}',
    }
    for name, content in cases.items():
        file = tmp_path / name
        file.write_bytes(content)
        started = time.perf_counter()
        with pytest.raises(SpecError):
            load_model(file)
        assert time.perf_counter() - started < 2
    (tmp_path / "folder").mkdir()
    for source in (tmp_path / "folder", tmp_path / "missing.json", "", "no such model", "a\0b", "x" * 5000):
        with pytest.raises(SpecError) as caught:
            load_model(source)
        assert caught.value.field == "model"


# ---- bundled models -------------------------------------------------------------------------------------

GEOMETRY = {
    "llama-3.1-8b": {(F, 32, 8, 128, None): 32},
    "llama-3.1-70b": {(F, 64, 8, 128, None): 80},
    "qwen3-4b": {(F, 32, 8, 128, None): 36},
    "qwen3-32b": {(F, 64, 8, 128, None): 64},
    "qwen3-30b-a3b": {(F, 32, 4, 128, None): 48},
    "qwen2.5-7b": {(F, 28, 4, 128, None): 28},
    "qwen2.5-72b": {(F, 64, 8, 128, None): 80},
    "minimax-m2.5": {(F, 48, 8, 128, None): 62},
    "gpt-oss-120b": {(S, 64, 8, 64, 128): 18, (F, 64, 8, 64, None): 18},
    "gemma-3-27b": {(S, 32, 16, 128, 1024): 52, (F, 32, 16, 128, None): 10},
    "qwen3-next-80b-a3b": {(L, 16, 2, 256, None): 36, (F, 16, 2, 256, None): 12},
    "jamba-1.5-mini": {(L, 32, 8, 128, None): 28, (F, 32, 8, 128, None): 4},
    "deepseek-v3": {(M, 128, 1, 576, None): 61},
    "phi-3-mini": {(S, 32, 32, 96, 2047): 32},
    "mistral-7b": {(F, 32, 8, 128, None): 32},
}


@pytest.mark.parametrize("name", bundled_models())
def test_bundled_models(name: str):
    model = load_model(name)
    found = Counter((str(x.kind), x.num_heads, x.num_kv_heads, x.head_size, x.window) for x in model.layers)
    assert found == GEOMETRY.get(name, found)
    data = load_yaml("models", f"{name}.yaml")
    assert data["source"].startswith("config.json of ")
    assert model.source == data["source"]
    assert model.weight_gib
    assert not any(w.startswith("unknown") for w in model.warnings)


def test_the_models_that_were_asked_for_are_there():
    assert set(GEOMETRY) <= set(bundled_models())
    assert len(bundled_models()) >= 14


# ---- tensor parallelism and padding ---------------------------------------------------------------------


def test_split_divides_then_replicates():
    model = load_model("qwen3-32b")
    for tp, heads, kv in ((1, 64, 8), (2, 32, 4), (8, 8, 1), (16, 4, 1), (64, 1, 1)):
        layer = split(model, tp).layers[0]
        assert (layer.num_heads, layer.num_kv_heads) == (heads, kv)
    assert split(model, 16).layers[0].notes == ("each KV head is held by 2 ranks",)
    assert split(model, 8).tp == 8


@pytest.mark.parametrize(
    ("name", "tp"), [("qwen3-32b", 3), ("qwen2.5-7b", 8), ("qwen3-32b", 128), ("smollm2-135m", 2)]
)
def test_impossible_splits(name: str, tp: int):
    with pytest.raises(SpecError) as caught:
        split(load_model(name), tp)
    assert caught.value.field == "tp"


@pytest.mark.parametrize("tp", [0, -1, True, "2", 1.0])
def test_tp_that_is_none(tp: object):
    with pytest.raises(SpecError, match="tp"):
        split(load_model("qwen3-32b"), tp)


def test_split_keeps_latent_caches_and_states_whole():
    layer = split(load_model("deepseek-v3"), 8).layers[0]
    assert (layer.num_heads, layer.num_kv_heads, layer.head_size) == (16, 1, 576)
    hybrid = split(load_model("qwen3-next-80b-a3b"), 2)
    assert hybrid.layers[3].num_kv_heads == 1
    with pytest.raises(SpecError, match="tp"):
        split(split(load_model("qwen3-32b"), 2), 2)


def test_padding_keeps_the_scale():
    model = pad_heads(load_model("phi-3-mini"), 128)
    layer = model.layers[0]
    assert (layer.head_size, layer.value_size) == (128, 128)
    assert layer.softmax_scale == pytest.approx(96**-0.5)
    assert pad_heads(load_model("qwen3-32b"), 64) == load_model("qwen3-32b")
    with pytest.raises(SpecError, match="pad_heads"):
        pad_heads(model, 0)


# ---- what a hostile or careless description does not get away with -----------------------------------------

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)


@pytest.mark.parametrize("tail", ["layers: *a9\n", "num_hidden_layers: *a9\n", "name: *a9\n"])
def test_yaml_aliases_are_refused(tmp_path: Path, tail: str):
    file = tmp_path / "bomb.yaml"
    file.write_text(BOMB + tail)
    with pytest.raises(SpecError, match=r"a0 in line 2.*without aliases") as caught:
        load_model(file)
    assert caught.value.field == "bomb.yaml"


@pytest.mark.parametrize("text", ["!!int ''", "!!bool x", "!!timestamp x", "!!float 1:" + "1:" * 400 + "1"])
def test_tags_that_do_not_convert(tmp_path: Path, text: str):
    file = tmp_path / "tag.yaml"
    file.write_text(text)
    with pytest.raises(SpecError):
        load_model(file)


def test_errors_stay_short():
    for value in (
        "x" * 10**6,
        list(range(10**5)),
        dict.fromkeys(range(999), "y" * 999),
        10**5000,
        [[["z" * 999] * 9] * 9],
    ):
        assert len(str(SpecError("field", value, "less"))) < 300


SMALL = "num_heads: 8, num_kv_heads: 8, head_size: 128"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (f"name: 2020-01-01\nlayers: [{{{SMALL}}}]", "name"),
        (f"source: [1]\nlayers: [{{{SMALL}}}]", "source"),
        ("name: 5\nconfig: {model_type: llama}", "name"),
        *(
            (f"layers: [{{{SMALL}, {key}: {value}}}]", f"layers[0].{key}")
            for key, value in (
                ("kv_shared_with", "-1"),
                ("kv_shared_with", "x"),
                ("kv_shared_with", "true"),
                ("sinks", "'no'"),
                ("sinks", "1"),
                ("recurrent_state", "'no'"),
                ("position_bias", "[1]"),
                ("position_bias", "rotary"),
                ("soft_cap", ".inf"),
                ("soft_cap", "true"),
                ("soft_cap", "9" * 400),
                ("scale", ".nan"),
                ("scale", "x"),
                ("window", "9" * 400),
                ("dtype", "[bf16]"),
            )
        ),
        ("layers: [{num_heads: 65537, num_kv_heads: 1, head_size: 128}]", "layers[0].num_heads"),
        (f"layers: [{{count: 2, {SMALL}, kv_shared_with: 99}}]", "layer 0: kv_shared_with"),
        (f"layers: [{{count: 2, {SMALL}}}, {{{SMALL}, kv_shared_with: 2}}]", "layer 2: kv_shared_with"),
        (
            f"layers: [{{{SMALL}}}, {{num_heads: 8, num_kv_heads: 2, head_size: 128, kv_shared_with: 0}}]",
            "layer 1: kv_shared_with",
        ),
        (
            f"layers: [{{{SMALL}}}, {{num_heads: 8, num_kv_heads: 8, head_size: 64, kv_shared_with: 0}}]",
            "layer 1: kv_shared_with",
        ),
        (f"layers: [{{{SMALL}, kind: linear}}, {{{SMALL}, kv_shared_with: 0}}]", "layer 1: kv_shared_with"),
    ],
)
def test_layers_that_cannot_be(tmp_path: Path, text: str, field: str):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_model(file)
    assert caught.value.field == field


def test_sharing_may_chain(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"layers: [{{{SMALL}}}, {{{SMALL}, kv_shared_with: 0}}, {{{SMALL}, kv_shared_with: 1}}]")
    assert [layer.kv_shared_with for layer in split(load_model(file), 2).layers] == [None, 0, 1]


FULL6 = ["full_attention"] * 6


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layer_types": FULL6, "block_configs": [{}]}, "block_configs"),
        ({"layer_types": FULL6, "block_configs": [1] * 6}, "block_configs[0]"),
        ({"layer_types": FULL6, "block_configs": [{"attention": [1]}] * 6}, "block_configs[0]"),
        ({"layer_types": FULL6, "block_configs": "x"}, "block_configs"),
        *(
            ({"block_configs": [{"attention": {key: value}}] * 6}, f"block_configs[0].attention.{key}")
            for key in ("no_op", "replace_with_linear")
            for value in ("false", 1, [0], {"x": 1})
        ),
        ({"linear_attn_config": "x"}, "linear_attn_config"),
        ({"linear_attn_config": [1]}, "linear_attn_config"),
        ({"attn_config": "x"}, "attn_config"),
        ({"num_hidden_layers": None, "text_config": "x"}, "text_config"),
        ({"num_attention_heads": None, "decoder": [1]}, "decoder"),
        (
            {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [1]},
            "no_rope_layers",
        ),
        (
            {
                "model_type": "smollm3",
                "use_sliding_window": True,
                "sliding_window": 9,
                "no_rope_layers": [2] * 6,
            },
            "no_rope_layers",
        ),
        ({"attn_logit_softcapping": 10**400}, "attn_logit_softcapping"),
        ({"model_type": "granite", "attention_multiplier": 10**400}, "attention_multiplier"),
        ({"hybrid_override_pattern": "M" * 100_000}, "hybrid_override_pattern"),
        ({"num_hidden_layers": None, "layer_types": ["full_attention"] * 60_000}, "layer_types"),
        ({"num_hidden_layers": 5, "layer_types": FULL6}, "layer_types"),
        ({"attention_types": [[["global"] * 4096, 4096]]}, "attention_types"),
        ({"model_type": "longcat_flash", "num_layers": 4096}, "num_layers"),
        ({"add_full_attention_sink_bias": "no"}, "add_full_attention_sink_bias"),
    ],
)
def test_values_that_used_to_pass_or_crash(changes: dict[str, object], field: str):
    with pytest.raises(SpecError) as caught:
        read(**changes)
    assert caught.value.field == field


@pytest.mark.parametrize("weight", [10**400, float("nan"), float("inf"), True])
def test_weights_are_numbers(weight: object):
    with pytest.raises(SpecError, match="weight_gib"):
        load_model({"config": BASE, "weight_gib": weight})


def test_a_pattern_of_another_length_is_said():
    model = read(hybrid_override_pattern="M-M*", num_hidden_layers=8)
    assert len(model.layers) == 4
    assert any("num_hidden_layers=8 is not the length" in w for w in model.warnings)


def test_paths_that_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "pipe.json", "/dev/null", "~no-such-user-here/x", "a/" + "b" * 4000):
        with pytest.raises(SpecError, match="model="):
            load_model(path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(BASE))
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    for content in (b"\xff\xfe", b"../../elsewhere", b"a\0b", b"x" * 9999):
        (refs / "main").write_bytes(content)
        assert len(load_model("some/model").layers) == 6
    with pytest.raises(SpecError, match="model="):
        load_model("a/" + "b" * 250)


# ---- what the keys of the encoder do not decide -------------------------------------------------------------

ENCODERS = {"is_encoder_decoder": True, "d_model": 1024}


@pytest.mark.parametrize(
    ("config", "layers", "heads"),
    [
        (
            {
                "model_type": "whisper",
                "num_hidden_layers": 32,
                "encoder_layers": 32,
                "decoder_layers": 4,
                "encoder_attention_heads": 16,
                "decoder_attention_heads": 8,
            },
            4,
            8,
        ),
        (
            {
                "model_type": "bart",
                "num_hidden_layers": 12,
                "decoder_layers": 6,
                "num_attention_heads": 16,
                "decoder_attention_heads": 4,
            },
            6,
            4,
        ),
        (
            {
                "model_type": "t5",
                "num_hidden_layers": 24,
                "num_layers": 24,
                "num_decoder_layers": 3,
                "num_heads": 8,
                "d_kv": 64,
            },
            3,
            8,
        ),
        (
            {
                "model_type": "t5gemma",
                "num_hidden_layers": 9,
                "num_attention_heads": 4,
                "decoder": {**BASE, "num_hidden_layers": 2},
            },
            2,
            8,
        ),
    ],
)
def test_the_decoder_of_an_encoder_decoder(config: dict[str, object], layers: int, heads: int):
    model = model_from_config({**ENCODERS, **config})
    assert (len(model.layers), model.layers[0].num_heads) == (layers, heads)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_5_vl_text"])
@pytest.mark.parametrize("more", [{}, {"max_window_layers": 2}, {"max_window_layers": 28}])
def test_qwen_windows_are_off_unless_asked_for(model_type: str, more: dict[str, object]):
    model = read(model_type=model_type, sliding_window=131072, **more)
    assert kinds(model) == [F] * 6
    assert any("default of this model type" in w for w in model.warnings)
    assert not any(w.startswith("unknown") for w in model.warnings)
    used = read(model_type=model_type, sliding_window=64, use_sliding_window=True, **more)
    bound = more.get("max_window_layers", 28)
    if model_type == "qwen2_5_vl_text":  # where nothing is said, the default of the type holds: 80
        bound = more.get("max_window_layers", 80)
    expected = [S if i >= bound else F for i in range(6)]
    if model_type == "qwen2_moe":  # every other layer, before max_window_layers
        expected = [S if i % 2 == 0 and i < bound else F for i in range(6)]
    if model_type == "qwen3_moe":  # it has no max_window_layers
        expected = [S] * 6
    assert kinds(used) == expected


def test_other_types_with_max_window_layers_are_unknown():
    model = read(sliding_window=64, max_window_layers=2)
    assert kinds(model) == [F] * 2 + [S] * 4
    assert any(w.startswith("unknown: use_sliding_window") for w in model.warnings)
    dots = read(model_type="dots1", sliding_window=64, max_window_layers=2)
    assert kinds(dots) == [F] * 2 + [S] * 4
    assert not any(w.startswith("unknown") for w in dots.warnings)


def test_types_that_are_not_known_say_so():
    assert any(
        w.startswith("unknown: model_type brandnew is not in the table")
        for w in read(model_type="brandnew").warnings
    )
    assert len(read(model_type="x" * 10**5).warnings[0]) < 250
    for known in (
        "llama",
        "qwen2",
        "gemma",
        "phi",
        "gptj",
        "cohere",
        "granite",
        "glm4",
        "deepseek_v3",
        "jamba",
    ):
        assert not any("not in the table" in w for w in read(model_type=known).warnings)
    assert any("ALiBi" in w for w in read(model_type="baichuan").warnings)
    small = read(model_type="phi3small")
    assert kinds(small) == [P, F] * 3
    assert any(w.startswith("unknown: the block-sparse pattern") for w in small.warnings)
    assert kinds(read(model_type="phi3small", dense_attention_every_n_layers=3)) == [P, P, F] * 2


def test_the_list_of_plain_types():
    data = load_yaml("model_types.yaml")
    assert len(set(data["plain"])) == len(data["plain"])
    assert not set(data["plain"]) & set(data["types"])


# ---- YAML: one loader for all files ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        (f"layers: [{{{SMALL}}}]\nname: a\nname: b\n", "name", 3),
        (f"layers:\n- {{{SMALL},\n   num_heads: 4}}\n", "num_heads", 3),
        ("config:\n  model_type: llama\n  hidden_size: 64\n  model_type: gemma\n", "model_type", 4),
        ("1: a\n0x1: b\n", "1", 2),
        ("name: a\n'name': a\n", "name", 2),
    ],
)
def test_keys_given_twice_are_refused(tmp_path: Path, text: str, key: str, line: int):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(SpecError, match=f"{key} is given twice.*line {line}") as caught:
        load_model(file)
    assert caught.value.field == "mine.yaml"


def test_merged_keys_are_not_given_twice():
    assert parse_yaml("<<: {a: 1, b: 2}\na: 3\n", "x") == {"a": 3, "b": 2}


def test_a_duplicate_in_our_own_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "presets.yaml").write_text("version: 1\nversion: 1\npresets: {}\n")
    monkeypatch.setattr(resources, "files", lambda package: tmp_path)
    with pytest.raises(SpecError, match=r"configs/presets.yaml=.*version is given twice"):
        load_yaml("presets.yaml")


def test_deep_yaml_is_refused_in_bounded_time(tmp_path: Path):
    file = tmp_path / "deep.yaml"
    for text in ("[" * 10**6, "{a: " * 10**6, "- " * 10**6, "? " * 10**5, "[" * 900 + "]" * 900):
        file.write_text(text)
        started = time.monotonic()
        with pytest.raises(SpecError):
            load_model(file)
        assert time.monotonic() - started < 10


@pytest.mark.parametrize("folder", ["configs", "turboquant_rocm", "ci", "backends"])
def test_no_module_reads_yaml_on_its_own(folder: str):
    root = Path(__file__).parents[2]
    for path in (root / folder).rglob("*.py"):
        if path.name != "presets.py":
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"yaml\.(\w+_)?load", text), f"{path}: use presets.parse_yaml"


def test_every_file_of_configs_can_be_read():
    root = Path(__file__).parents[2] / "configs"
    files = sorted(root.rglob("*.yaml"))
    assert len(files) > 30
    for path in files:
        assert isinstance(parse_yaml(path.read_text(encoding="utf-8"), path.name), dict), path


def test_global_kv_heads_hold_where_keys_are_values():
    given = {
        "model_type": "gemma4_text",
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": 64,
        "num_global_key_value_heads": 1,
    }
    assert {layer.num_kv_heads for layer in read(**given, attention_k_eq_v=True).layers[1::2]} == {1}
    kept = {layer.num_kv_heads for layer in read(**given, attention_k_eq_v=False).layers}
    assert kept == {BASE["num_key_value_heads"]}


def test_an_error_about_a_default_says_that_it_is_one():
    given = {"model_type": "mixtral", "num_hidden_layers": 2, "num_attention_heads": 12, "hidden_size": 768}
    with pytest.raises(SpecError, match=r"num_attention_heads=12 .*=8, the default of this model type"):
        model_from_config(given)
    with pytest.raises(SpecError, match=r"num_attention_heads=12 .*=8\)"):
        model_from_config({**given, "num_key_value_heads": 8})
