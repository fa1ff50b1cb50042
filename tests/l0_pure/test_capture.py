"""The modes of compressed stores in tiny random transformers models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.l0_pure.test_transformers_cache import SHAPE, build, forced, generated, set_mode, tokens  # noqa: E402
from tests.mode_checks import ATTENTIONS, check_modes, defined  # noqa: E402
from turboquant_rocm import SpecError  # noqa: E402
from turboquant_rocm.integrations import capture  # noqa: E402
from turboquant_rocm.integrations import transformers as tq  # noqa: E402
from turboquant_rocm.integrations.capture import Mode, ShadowLayer, StoreCache, StoreLayer, open_cache  # noqa: E402

CHUNKS = (21, 1, 1, 4, 1, 7, 1, 1)


@pytest.fixture(autouse=True)
def few_decode_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tq, "MAX_DECODE_ROWS", 4)


def opened(model: Any, mode: str, dtype: str = "fp32", **options: Any) -> Any:
    defaults = {
        "backend": "torch_reference",
        "protect": 0,
        "block_size": 8,
        "ring_tokens": 6,
        "checks": "full",
    }
    options = {**defaults, "dtype": dtype, **options}
    return open_cache(model.config, mode, **options)


def hybrid_models() -> dict[str, Any]:
    """Attention beside something that keeps a state of fixed size."""
    return {
        "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 32}),
        "qwen3_next": (
            "Qwen3NextConfig",
            "Qwen3NextForCausalLM",
            {
                "layer_types": ["linear_attention", "full_attention"] * 2, "num_experts": 2, "num_experts_per_tok": 1,
                "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2,
                "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 64,
            },
        ),
        "granite": (
            "GraniteMoeHybridConfig",
            "GraniteMoeHybridForCausalLM",
            {
                "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 2, "num_experts_per_tok": 1,
                "shared_intermediate_size": 16, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
                "mamba_n_groups": 1, "mamba_chunk_size": 8, "position_embedding_type": "rope",
            },
        ),
    }  # fmt: skip


def build_hybrid(kind: str) -> Any:
    config_name, model_name, extra = hybrid_models()[kind]
    config = getattr(transformers, config_name)(**{**SHAPE, **extra})
    torch.manual_seed(0)
    return getattr(transformers, model_name)(config).eval()


# ---- capture_only -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager", tq.ATTENTION])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", "fp32"), ("llama", "bf16"), ("gemma2", "fp32"), ("gpt_oss", "bf16")]
)
def test_capture_only_is_off_bit_for_bit(kind: str, dtype: str, implementation: str):
    if implementation == "sdpa" and kind != "llama":
        implementation = "eager"  # sinks and soft caps
    model = build(kind, 64, dtype)
    model.set_attn_implementation(implementation)
    ids = tokens(2, sum(CHUNKS))
    cache = opened(model, "capture_only", dtype)
    plain = forced(model, ids, opened(model, "off"), CHUNKS)
    assert torch.equal(forced(model, ids, cache, CHUNKS), plain)
    assert cache.packed_layers and all(isinstance(cache.layers[i], ShadowLayer) for i in cache.packed_layers)
    for report in cache.report():
        assert (report.tokens, report.packed_tokens) == (37, 24)
        assert report.key_nmse is not None and 0.003 < report.key_nmse < 0.03
        assert report.value_nmse is not None and 0.001 < report.value_nmse < 0.05


def test_capture_only_generates_what_off_generates():
    model = build("llama")
    ids = tokens(2, 30)
    plain = generated(model, ids, opened(model, "off"), 12)
    shadowed = generated(model, ids, opened(model, "capture_only"), 12)
    assert torch.equal(plain.sequences, shadowed.sequences)
    assert all(torch.equal(a, b) for a, b in zip(plain.logits, shadowed.logits, strict=True))


def test_the_report_notices_a_store_that_is_off():
    """The errors are measured against the model's tensors, not predicted."""
    model = build("llama")
    cache = opened(model, "capture_only")
    forced(model, tokens(1, 37), cache, CHUNKS)
    good = cache.report()[0]
    store = cache.layers[cache.packed_layers[0]].store
    store.field("key_data")[:, 0].fill_(0)
    bad = cache.report()[0]
    assert bad.key_nmse > 10 * good.key_nmse and bad.value_nmse == good.value_nmse


def test_the_report_counts_bytes():
    model = build("llama", 128, "bf16")
    cache = opened(model, "capture_only", "bf16")
    forced(model, tokens(2, 37), cache, CHUNKS)
    for i, report in zip(cache.packed_layers, cache.report(), strict=True):
        layer = cache.layers[i]
        assert report.layer == i
        assert report.exact_nbytes == layer.keys.nbytes + layer.values.nbytes
        assert report.store_nbytes == layer.store.nbytes


def test_shadows_follow_what_happens_to_the_cache():
    model = build("llama")
    ids = tokens(2, 40)
    cache = opened(model, "capture_only")
    forced(model, ids, cache, (33,))
    cache.crop(-13)
    forced(model, ids[:, 20:], cache, (9,))
    cache.reorder_cache(torch.tensor([1, 1]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3, 2]))
    for i in cache.packed_layers:
        layer = cache.layers[i]
        read, own, packed = layer.store.read()[0], layer.keys.transpose(1, 2), layer.store.packed_tokens
        assert read.shape == own.shape == (3, 29, 2, 64) and packed == 20
        assert torch.equal(read[:, packed:], own[:, packed:])
        assert 0.003 < float((read - own).square().sum() / own.square().sum()) < 0.02
    cache.reset()
    assert [r.tokens for r in cache.report()] == [0] * len(cache.packed_layers)


# ---- hybrid and full ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["hybrid", "full"])
@pytest.mark.parametrize("attention", ["dropin", "direct"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_modes_equal_their_definition(kind: str, attention: str, mode: str):
    model = build(kind)
    if kind != "llama":
        model.set_attn_implementation("eager")
    ids = tokens(2, sum(CHUNKS))
    ring = 0 if mode == "full" else 6
    wanted = forced(model, ids, defined(opened(model, "capture_only", ring_tokens=ring), mode), CHUNKS)
    set_mode(model, attention)
    cache = opened(model, mode)
    got = forced(model, ids, cache, CHUNKS)
    # Sums in another order may move a number that lies on a threshold into the next code, from where on one sequence is
    # off; which, if any, depends on the CPU. What a mode did wrong would be wrong in both.
    errors = sorted(((got - wanted).norm(dim=(1, 2)) / wanted.norm(dim=(1, 2))).tolist())
    assert len(errors) == 2 and errors[0] < 2e-5 and errors[1] < 2e-2
    plain = forced(model, ids, opened(model, "off"), CHUNKS)
    assert float((got - plain).norm() / plain.norm()) > 1e-3, "the packed tokens are not exact"
    first = torch.equal(got[:, :21], plain[:, :21])
    assert first == (mode == "hybrid"), "exact prefill"
    assert all(isinstance(cache.layers[i], StoreLayer) for i in cache.packed_layers)
    report = cache.report()[0]
    assert (report.tokens, report.packed_tokens) == (37, 24 if mode == "hybrid" else 32)


@pytest.mark.parametrize("attention", ["dropin", "direct"])
@pytest.mark.parametrize("mode", ["hybrid", "full"])
def test_modes_generate(mode: str, attention: str):
    model = build("llama", 64, "bf16")
    set_mode(model, attention)
    cache = opened(model, mode, "bf16")
    out = generated(model, tokens(2, 30), cache, 10)
    assert out.sequences.shape == (2, 40)
    assert cache.get_seq_length() == 39
    assert sum(r.store_nbytes for r in cache.report()) == cache.nbytes


@pytest.mark.parametrize("attention", ["dropin", "direct"])
def test_crop_and_beams(attention: str):
    model = build("llama")
    set_mode(model, attention)
    ids = tokens(2, 40)
    cache, fresh = opened(model, "hybrid"), opened(model, "hybrid")
    forced(model, ids, cache, (33, 1))
    cache.crop(-10)
    forced(model, ids, fresh, (24,))
    assert cache.get_seq_length() == fresh.get_seq_length() == 24
    a, b = (cache.layers[0].store, fresh.layers[0].store)
    assert a.packed_tokens == 24 and b.packed_tokens == 16, "what was packed stays packed"
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    assert forced(model, ids[[1, 0, 1], 24:], cache, (3,)).shape[0] == 3
    beams = model.generate(
        input_ids=ids[:, :20], attention_mask=torch.ones(2, 20), cache=opened(model, "hybrid"), num_beams=3,
        do_sample=False, max_new_tokens=5,
    )  # fmt: skip
    assert beams.shape == (2, 25)


def test_a_cache_ends_at_the_models_length():
    model = build("llama", max_position_embeddings=32)
    cache = opened(model, "hybrid")
    forced(model, tokens(1, 32), cache, (32,))
    with pytest.raises(SpecError, match="max_tokens=32"):
        forced(model, tokens(1, 1), cache, (1,))


# ---- layers that keep no keys and values --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["capture_only", "hybrid", "full"])
@pytest.mark.parametrize("kind", sorted(hybrid_models()))
def test_linear_attention_and_mamba_layers_pass_through(kind: str, mode: str):
    model = build_hybrid(kind)
    native = transformers.cache_utils.DynamicCache(config=model.config)
    cache = opened(model, mode)
    assert cache.packed_layers == (1, 3)
    for i in (0, 2):
        assert type(cache.layers[i]) is type(native.layers[i])
    ids = tokens(2, 30)
    plain = forced(model, ids, native, (20, 1, 1))
    got = forced(model, ids, cache, (20, 1, 1))
    assert torch.equal(got, plain) == (mode == "capture_only")
    if mode == "hybrid":
        assert torch.equal(got[:, :20], plain[:, :20])
    assert float((got - plain).norm() / plain.norm()) < 0.5
    assert all(r.tokens == 22 for r in cache.report())


def test_sliding_layers_stay_native():
    model = build("gemma3")
    cache = opened(model, "hybrid")
    kinds = [type(layer).__name__ for layer in cache.layers]
    assert kinds == ["DynamicSlidingWindowLayer", "StoreLayer"] * 2


# ---- arguments ----------------------------------------------------------------------------------------------------


def test_off_is_transformers_own_cache():
    model = build("llama")
    cache = opened(model, "off")
    assert type(cache) is transformers.cache_utils.DynamicCache
    assert len(cache.layers) == len(opened(model, Mode.HYBRID).layers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "on"}, "mode='on'.*off, capture_only, hybrid, full"),
        ({"mode": "hybrid", "ring_tokens": -1}, "ring_tokens=-1"),
        ({"mode": "hybrid", "max_tokens": 0}, "max_tokens=0"),
        ({"mode": "hybrid", "preset": "none"}, "preset='none'"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str):
    with pytest.raises(SpecError, match=message):
        opened(build("llama"), **options)


def test_a_store_cache_is_not_off():
    with pytest.raises(SpecError, match="mode='off'"):
        StoreCache(build("llama").config, "off")
    assert capture.Mode("full") is Mode.FULL


# ---- as on a GPU and in the real model ----------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(("head_size", "dtype"), [(64, "fp32"), (128, "fp16")])
def test_the_four_modes(head_size: int, dtype: str, attention: str):
    model = build("llama", head_size, dtype)
    check_modes(model, attention, backend="torch_reference", dtype=dtype, target="cpu")


def test_a_mode_that_is_not_what_it_says_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """Prefill over packed tokens is not hybrid's, and keys that the model gets from a shadow are not off's."""
    arguments = {"backend": "torch_reference", "dtype": "fp32", "target": "cpu"}
    right = StoreLayer.update

    def packed_prefill(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.options = replace(self.options, exact_prefill=False)
        return right(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(StoreLayer, "update", packed_prefill)
        with pytest.raises(AssertionError):
            check_modes(build("llama"), "drop-in", **arguments)
    plain = ShadowLayer.update

    def touched(self: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, key * (1 + 1e-6), value, *args, **kwargs)

    monkeypatch.setattr(ShadowLayer, "update", touched)
    with pytest.raises(AssertionError):
        check_modes(build("llama"), "drop-in", **arguments)
