"""The transformers cache on tiny random models: both modes against each other, an oracle without pages, and native.

The oracle keeps the quantised-and-read-back keys and values in transformers' own tensors, so it shares the quantiser
with what is tested, but neither pages, rings, block tables, masks nor attention.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.repository import ROOT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.cases import TORCH_DTYPES, rel_l2, same_bytes  # noqa: E402
from tests.generate_checks import beside_native, oracle  # noqa: E402
from turboquant_rocm import IneligibleError, SpecError, integrations  # noqa: E402
from turboquant_rocm.integrations import transformers as tq  # noqa: E402

WINDOW = 8
VOCABULARY = 89
LAYERS = 4

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "layer_types": ALTERNATING},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"sliding_window": WINDOW, "layer_types": ALTERNATING},
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
}
CASES = [
    ("llama", 64, "fp32"),
    ("llama", 128, "bf16"),
    ("qwen3", 128, "fp32"),
    ("mistral", 64, "bf16"),
    ("mistral", 128, "fp32"),
    ("gemma2", 64, "fp32"),
    ("gemma2", 128, "bf16"),
    ("gemma3", 64, "bf16"),
    ("gemma3", 128, "fp32"),
    ("gpt_oss", 64, "fp32"),
    ("gpt_oss", 64, "bf16"),
]
MODES = ["dropin", "direct"]
ROUNDING = {"fp32": 2e-5, "bf16": 4e-2}
"""Relative error of logits that LAYERS layers of that dtype may gather from another order of the same sums."""


@pytest.fixture(autouse=True)
def few_decode_rows(monkeypatch: pytest.MonkeyPatch):
    """Rings of two pages and chunks beyond the multi-query decode, without long prompts."""
    monkeypatch.setattr(tq, "MAX_DECODE_ROWS", 4)


def build(kind: str, head_size: int = 64, dtype: str = "fp32", **more: Any) -> Any:
    config_name, model_name, extra = MODELS[kind]
    config = getattr(transformers, config_name)(**{**SHAPE, "head_dim": head_size, **extra, **more})
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.normal_()
    return model.to(TORCH_DTYPES[dtype])


def set_mode(model: Any, mode: str) -> None:
    if mode == "direct":
        model.set_attn_implementation(tq.ATTENTION)


def packed(model: Any, dtype: str = "fp32", **options: Any) -> tq.TurboQuantCache:
    options = {"backend": "torch_reference", "protect": 0, "block_size": 8, "checks": "full", **options}
    return tq.TurboQuantCache(model.config, dtype=dtype, **options)


def tokens(batch: int, count: int) -> Any:
    return torch.randint(1, VOCABULARY, (batch, count), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def forced(model: Any, ids: Any, cache: Any, chunks: Sequence[int]) -> Any:
    """Logits [B, sum(chunks), V] of ids fed in chunks."""
    found, at = [], 0
    for count in chunks:
        found.append(model(input_ids=ids[:, at : at + count], cache=cache, use_cache=True).logits.float())
        at += count
    return torch.cat(found, 1)


def generated(model: Any, ids: Any, cache: Any = None, new: int = 6, **more: Any) -> Any:
    more = {"attention_mask": torch.ones_like(ids), **more}
    return model.generate(
        input_ids=ids, cache=cache, max_new_tokens=new, do_sample=False,
        return_dict_in_generate=True, output_logits=True, **more,
    )  # fmt: skip


# ---- agreement ----------------------------------------------------------------------------------------------

# First chunk, single tokens, short and long chunks; together they go round the ring of a windowed layer.
CHUNKS = (9, 1, 1, 3, 1, 6, 1, 1, 21, 1, 2, 1)


@pytest.mark.parametrize(("kind", "head_size", "dtype"), CASES)
def test_modes_oracle_and_native_agree(kind: str, head_size: int, dtype: str):
    model = build(kind, head_size, dtype)
    ids = tokens(2, sum(CHUNKS))
    cache = packed(model, dtype)
    assert cache.packed_layers == tuple(range(LAYERS))
    dropin = forced(model, ids, cache, CHUNKS)
    simple = oracle(cache)
    assert rel_l2(dropin, forced(model, ids, simple, CHUNKS)) < ROUNDING[dtype]
    native = transformers.DynamicCache(config=model.config)
    exact = forced(model, ids, native, CHUNKS)
    model.set_attn_implementation(tq.ATTENTION)
    direct = forced(model, ids, packed(model, dtype), CHUNKS)
    if (
        dtype == "fp32"
    ):  # in bf16 one code that rounds the other way moves all that follows: see the next test
        assert rel_l2(direct, dropin) < 1e-3
    # The first chunk is exact; after it, errors are those of keys and values, and there are some.
    assert rel_l2(dropin[:, : CHUNKS[0]], exact[:, : CHUNKS[0]]) < ROUNDING[dtype]
    bound = 0.0
    for layer, plain in zip(simple.layers, native.layers, strict=True):
        kept = plain.keys.shape[2]
        bound += rel_l2(layer.keys[:, :, -kept:], plain.keys) + rel_l2(
            layer.values[:, :, -kept:], plain.values
        )
    for found in (dropin, direct):
        assert 1e-3 < rel_l2(found[:, CHUNKS[0] :], exact[:, CHUNKS[0] :]) < bound


@pytest.mark.parametrize(("kind", "head_size", "dtype"), CASES)
def test_packed_attention_is_that_over_dequantised(kind: str, head_size: int, dtype: str):
    """Layer by layer on the same inputs, with the masks that transformers builds."""
    model = build(kind, head_size, dtype)
    with beside_native() as worst:
        model.set_attn_implementation(tq.ATTENTION)
        forced(model, tokens(2, sum(CHUNKS)), packed(model, dtype), CHUNKS)
    assert set(worst) == set(CHUNKS[1:])
    assert max(worst.values()) < {"fp32": 2e-6, "bf16": 1e-2}[dtype]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("preset", ["turboquant_k8v4", "turboquant_3bit_nc"])
def test_other_presets_and_the_other_layout(kind: str, preset: str):
    model, options = build(kind), {"preset": preset, "layout": "aos"}
    ids = tokens(1, 20)
    chunks = (9, 1, 5, 1, 4)
    dropin = forced(model, ids, packed(model, **options), chunks)
    model.set_attn_implementation(tq.ATTENTION)
    direct = forced(model, ids, packed(model, **options), chunks)
    assert rel_l2(direct, dropin) < ROUNDING["fp32"]
    plain = forced(model, ids, packed(model), chunks)
    assert rel_l2(direct, plain) > 1e-3  # another preset is another result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", MODELS)
def test_generate(kind: str, mode: str):
    model = build(kind)
    cache, ids = packed(model), tokens(2, 13)
    want = generated(model, ids, oracle(cache))
    set_mode(model, mode)
    found = generated(model, ids, cache)
    assert torch.equal(found.sequences, want.sequences)
    assert found.sequences.shape == (2, 19)
    assert cache.get_seq_length() == 18


def test_generate_takes_it_as_past_key_values():
    model = build("llama")
    ids = tokens(1, 5)
    want = generated(model, ids, packed(model)).sequences
    found = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=packed(model),
        max_new_tokens=6, do_sample=False,
    )  # fmt: skip
    assert torch.equal(found, want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_speculated_tokens_change_nothing(kind: str, mode: str):
    """Prompt lookup verifies several tokens at once and crops those that were wrong."""
    model = build(kind)
    ids = tokens(1, 5).repeat(1, 3)
    set_mode(model, mode)
    want = generated(model, ids, packed(model), new=12).sequences
    cache = packed(model)
    cropped: list[int] = []
    crop = cache.crop
    cache.crop = lambda count: (cropped.append(count), crop(count))  # type: ignore[method-assign,return-value,func-returns-value]
    found = generated(model, ids, cache, new=12, prompt_lookup_num_tokens=3).sequences
    assert torch.equal(found, want)
    assert min(cropped) < 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_all_layers_native_is_bitwise_equal(kind: str, mode: str):
    model = build(kind)
    ids = tokens(2, 13)
    want = generated(model, ids).logits
    set_mode(model, mode)
    cache = packed(model, protect=LAYERS // 2)
    found = generated(model, ids, cache).logits
    assert cache.packed_layers == ()
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "llama"])
def test_native_and_packed_layers_together(kind: str, mode: str):
    """Windowed layers of both kinds share one mask."""
    model = build(kind)
    ids = tokens(2, sum(CHUNKS))
    exact = forced(model, ids, transformers.DynamicCache(config=model.config), CHUNKS)
    whole = forced(model, ids, packed(model), CHUNKS)
    set_mode(model, mode)
    cache = packed(model, protect=1)
    found = forced(model, ids, cache, CHUNKS)
    assert cache.packed_layers == (1, 2)
    assert 1e-3 < rel_l2(found, exact) < rel_l2(whole, exact)


def test_skipped_windows_stay_native():
    model = build("gemma2")
    cache = packed(model, skip_layers={"sliding"})
    assert cache.packed_layers == (1, 3)
    assert cache.plan.layers[0].reason == "skipped on request"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_left_padding(kind: str, mode: str, caplog: pytest.LogCaptureFixture):
    model = build(kind)
    tq._said.clear()
    ids = tokens(2, 13)
    ids[1, :9] = 0  # more than leaves the window with the first new token
    mask = (ids != 0).long()
    alone = generated(model, ids[1:, 9:], packed(model)).logits
    full = generated(model, ids[:1], packed(model)).logits
    set_mode(model, mode)
    with caplog.at_level(logging.WARNING):
        both = generated(model, ids, packed(model), attention_mask=mask).logits
    for a, b, c in zip(both, full, alone, strict=True):
        assert rel_l2(a[0], b[0]) < 5e-5
        assert rel_l2(a[1], c[0]) < 5e-5
    assert ("left padding" in caplog.text) == (mode == "direct")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_beam_search(kind: str, mode: str):
    model = build(kind)
    cache, ids = packed(model), tokens(2, 9)
    want = generated(model, ids, oracle(cache), num_beams=3, new=10).sequences
    set_mode(model, mode)
    assert torch.equal(generated(model, ids, cache, num_beams=3, new=10).sequences, want)


# ---- one layer ----------------------------------------------------------------------------------------------


def layer_of(kind: str) -> tq.PackedLayer:
    layer = packed(build(kind)).layers[0]
    assert isinstance(layer, tq.PackedLayer)
    return layer


def keys_and_values(batch: int, count: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randn(batch, 2, count, 64, generator=generator) for _ in range(2))  # type: ignore[return-value]


def feed(layer: tq.PackedLayer, key: Any, value: Any, chunks: Sequence[int]) -> None:
    at = 0
    for count in chunks:
        layer.update(key[:, :, at : at + count], value[:, :, at : at + count])
        at += count


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_bytes_do_not_depend_on_the_chunks(kind: str):
    key, value = keys_and_values(2, 17)
    layers = []
    for chunks in ((17,), (16, 1), (1,) * 17):
        layer = layer_of(kind)
        feed(layer, key, value, chunks)
        assert layer.get_seq_length() == 17
        layers.append(layer)
    assert layers[0].cache is not None and layers[0].cache.data.any()
    assert all(same_bytes(layer.cache, layers[0].cache) for layer in layers[1:])  # type: ignore[arg-type]


def test_memory_is_that_of_the_pages():
    model = build("llama", 128, "bf16")
    ids, count = tokens(2, 256), 256
    cache, native = packed(model, "bf16"), transformers.DynamicCache(config=model.config)
    for each in (cache, native):
        forced(model, ids, each, (count,))
    assert cache.nbytes == LAYERS * 2 * count * 2 * 134  # layers, sequences, tokens, heads, bytes of a slot
    plain = sum(layer.keys.nbytes + layer.values.nbytes for layer in native.layers)
    assert plain == LAYERS * 2 * count * 2 * 512
    mixed = packed(model, "bf16", protect=1)
    forced(model, ids, mixed, (count,))
    assert mixed.nbytes == (cache.nbytes + plain) // 2
    allocated = sum(layer.cache.data.untyped_storage().nbytes() for layer in cache.layers)
    assert allocated == cache.nbytes


def test_windowed_pages_stop_growing():
    layer = layer_of("mistral")
    key, value = keys_and_values(1, 60)
    feed(layer, key, value, (20,))
    size = layer.nbytes
    assert size == 2 * layer.bound.layout.block_stride
    feed(layer, key[:, :, 20:], value[:, :, 20:], (1,) * 40)
    assert layer.nbytes == size
    assert layer.get_seq_length() == 60
    assert layer.get_mask_sizes(1) == (WINDOW, 60 - WINDOW + 1)


def test_pages_grow_by_few():
    layer = layer_of("llama")
    key, value = keys_and_values(1, 200)
    for count in range(200):
        layer.update(key[:, :, count : count + 1], value[:, :, count : count + 1])
        pages = layer.nbytes // layer.bound.layout.block_stride
        need = count // 8 + 1
        assert need <= pages <= need + need // 8
    read, _ = layer.dequantized(0, 200, torch.float32)
    assert rel_l2(read, key) < 0.12  # sqrt(.0095) and room


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_crop_and_reset(kind: str, mode: str):
    model = build(kind)
    ids = tokens(2, 30)
    set_mode(model, mode)
    cache = packed(model)
    want = forced(model, ids, cache, (20, 1, 1, 1, 1))
    cache.crop(-3)
    assert cache.get_seq_length() == 21
    assert torch.equal(forced(model, ids[:, 21:], cache, (1, 1, 1)), want[:, 21:24])
    cache.crop(0)
    assert cache.get_seq_length() == 24
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)
    assert torch.equal(forced(model, ids, cache, (20, 1, 1, 1, 1)), want)


def test_crop_beyond_the_ring_is_refused():
    layer = layer_of("mistral")
    feed(layer, *keys_and_values(1, 30), (20, 5, 1, 1, 1, 1, 1))
    with pytest.raises(tq.UnsupportedError, match="window 8 holds those from 14"):
        layer.crop(-10)
    layer.crop(-9)
    assert layer.get_seq_length() == 21
    feed(layer, *keys_and_values(1, 1), (1,))
    with pytest.raises(tq.UnsupportedError):
        layer.crop(-2)  # what would be needed was overwritten before
    layer.crop(-30)
    assert layer.get_seq_length() == 0
    with pytest.raises(SpecError, match="tokens_to_remove=3"):
        layer.crop(3)


def test_sequences_are_selected_and_repeated():
    layer = layer_of("llama")
    feed(layer, *keys_and_values(3, 19), (17, 1, 1))
    before = layer.dequantized(0, 19, torch.float32)
    for order in (torch.tensor([2, 0, 2]), torch.tensor([1, 1])):
        layer.batch_select_indices(order)
        before = tuple(x[order] for x in before)
        assert all(
            torch.equal(a, b) for a, b in zip(layer.dequantized(0, 19, torch.float32), before, strict=True)
        )
    layer.batch_repeat_interleave(2)
    after = layer.dequantized(0, 19, torch.float32)
    assert torch.equal(after[0], before[0].repeat_interleave(2, 0))
    layer.batch_select_indices(torch.tensor([True, False, False, True]))
    assert torch.equal(layer.dequantized(0, 19, torch.float32)[1], after[1][[0, 3]])


# ---- refusals -----------------------------------------------------------------------------------------------


def test_offloading_is_refused():
    layer = layer_of("llama")
    for call in (layer.offload, layer.prefetch):
        with pytest.raises(tq.UnsupportedError, match="does not offload"):
            call()


def test_nothing_falls_back_to_the_reference():
    with pytest.raises(IneligibleError) as caught:
        tq.TurboQuantCache(build("llama").config, dtype="bf16", protect=0, target="cpu")
    assert "triton_soa" in caught.value.refused
    assert "torch_reference" not in caught.value.refused


@pytest.mark.parametrize("mode", MODES)
def test_layers_that_no_backend_serves_stay_native(mode: str, caplog: pytest.LogCaptureFixture):
    """Chunked attention is nobody's: those layers keep transformers' cache, and the others are packed."""
    tq._said.clear()
    config = transformers.Llama4TextConfig(
        **{**SHAPE, "head_dim": 64, "intermediate_size_mlp": 32, "num_local_experts": 1, "attention_chunk_size": 8,
           "layer_types": ["chunked_attention", "full_attention"] * 2, "no_rope_layers": [1, 0, 1, 0]},
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(config).eval()
    ids = tokens(2, 24)
    chunks = (9, 1, 5, 1, 1, 7)
    exact = forced(model, ids, transformers.DynamicCache(config=config), chunks)
    set_mode(model, mode)
    with caplog.at_level(logging.WARNING):
        cache = packed(model)
    assert cache.packed_layers == (1, 3)
    assert re.search(r"layers 0, 2: native \(no backend: .*kind=chunked", caplog.text)
    found = forced(model, ids, cache, chunks)
    assert 1e-4 < rel_l2(found, exact) < 0.1


def test_the_plan_is_said_once(caplog: pytest.LogCaptureFixture):
    tq._said.clear()
    model = build("llama")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            packed(model, protect=1)
    mine = [r.message for r in caplog.records if r.name == tq.__name__]
    head = "llama, turboquant_4bit_nc on cpu: "
    assert mine == [head + "layers 0, 3: native (boundary protection), layers 1-2: torch_reference (soa)"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": "bf16"}, "key_states=torch.float32 .*dtype="),
        ({"target": "gfx942"}, "target='gfx942'"),
    ],
)
def test_what_was_not_planned_is_refused(options: dict[str, Any], named: str):
    model = build("llama")
    options = {"dtype": "fp32", **options}
    with pytest.raises(SpecError, match=named):
        forced(model, tokens(1, 3), packed(model, **options), (3,))


def test_arguments_are_named():
    with pytest.raises(SpecError, match="config='str'"):
        tq.TurboQuantCache("llama")
    with pytest.raises(SpecError, match="preset"):
        packed(build("llama"), preset="five bits")
    layer = layer_of("llama")
    feed(layer, *keys_and_values(2, 4), (4,))
    with pytest.raises(SpecError, match="batch size 2"):
        layer.update(*keys_and_values(3, 1))
    with pytest.raises(SpecError, match="key_states"):
        layer_of("llama").update(*(x[..., :32] for x in keys_and_values(1, 1)))


def chunk_of(kind: str, count: int = 1) -> tq.PackedChunk:
    model = build(kind)
    model.set_attn_implementation(tq.ATTENTION)
    layer = packed(model).layers[1]
    key, value = keys_and_values(1, 5 + count)
    layer.update(key[:, :, :5], value[:, :, :5])
    chunk, same = layer.update(key[:, :, 5:], value[:, :, 5:])
    assert chunk is same
    return chunk


def test_attention_refuses_what_it_would_get_wrong():
    chunk, query = chunk_of("gemma2"), torch.zeros(1, 4, 1, 64)
    for more, error, named in (
        ({"dropout": 0.1, "softcap": 2.0}, tq.UnsupportedError, "dropout=0.1"),
        ({"output_attentions": True, "softcap": 2.0}, tq.UnsupportedError, "output_attentions"),
        ({"softcap": 3.0}, SpecError, "softcap=3.0"),
        ({"softcap": 2.0, "s_aux": torch.zeros(4)}, SpecError, "s_aux"),
    ):
        with pytest.raises(error, match=named):
            tq.packed_attention(None, query, chunk, chunk, None, **more)  # type: ignore[arg-type]
    chunk = chunk_of("gpt_oss")
    with pytest.raises(SpecError, match="s_aux"):
        tq.packed_attention(None, query, chunk, chunk, None)


def test_a_chunk_that_nobody_attended_to_is_noticed():
    layer = chunk_of("llama", 6).layer
    assert layer.get_seq_length() == 11
    with pytest.raises(tq.UnsupportedError, match="'turboquant' after every cache update"):
        layer.update(*keys_and_values(1, 1))
    layer.reset()
    feed(layer, *keys_and_values(1, 3), (3,))
    assert layer.get_seq_length() == 3


# ---- versions, imports, documentation -----------------------------------------------------------------------


@pytest.mark.parametrize(("found", "said"), [(None, "is not installed"), ("4.57.1", "4.57.1 is installed")])
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, found: str | None, said: str):
    monkeypatch.setattr(integrations, "installed_version", lambda name: found)
    with pytest.raises(
        ImportError, match=re.escape(said) + r".*pip install 'turboquant-rocm\[transformers\]'"
    ):
        integrations.require("transformers")


def test_versions_are_those_of_the_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, wants in integrations.VERSIONS.items():
        assert extras[name] == [f"{name}{wants}"]
        assert integrations.require(name)


def test_without_transformers_the_message_says_so():
    code = (
        "import importlib.metadata as m, sys\n"
        "real = m.version\n"
        "def version(name):\n"
        "    if name == 'transformers': raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
        "import turboquant_rocm.integrations.transformers\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert "needs transformers>=5.24,<6, and is not installed" in done.stderr


def test_documented_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    from tests.l0_pure.test_docs import blocks  # needs a git checkout

    monkeypatch.undo()
    code = "\n".join(blocks(Path("docs/transformers.md"), "python"))
    exec(compile(code, "docs/transformers.md", "exec"), {})
    printed = capsys.readouterr().out
    promised = re.findall(r"print\(.*\)  # (.*)", code)
    assert promised
    for text in promised:
        assert text in printed
