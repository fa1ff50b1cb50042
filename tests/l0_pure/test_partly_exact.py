"""The transformers cache with exact first and recent tokens and keys less their mean, against the evaluation's pass.

The evaluation computes the same attention over whole tensors with masks, so it shares neither rings nor stores nor lse.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.cases import rel_l2  # noqa: E402
from tests.option_checks import OPTIONS as CHECKED  # noqa: E402
from tests.option_checks import check_options  # noqa: E402
from turboquant_rocm import SpecError  # noqa: E402
from turboquant_rocm.evaluation.attention import reading  # noqa: E402
from turboquant_rocm.evaluation.compare import key_means, key_scales  # noqa: E402
from turboquant_rocm.evaluation.schemes import mixture, preset_scheme  # noqa: E402
from turboquant_rocm.integrations import transformers as tq  # noqa: E402
from turboquant_rocm.options import CacheOptions, parse_cache  # noqa: E402

COUNT = 60
ALL = CacheOptions(5, 3, True, flush=4)
OPTIONS = [
    CacheOptions(5, flush=4),
    CacheOptions(0, 3),
    CacheOptions(key_mean=True),
    CacheOptions(1, 1, flush=1),
    ALL,
    CacheOptions(64, 2, True),
    CacheOptions(0, 0, False, True),
    CacheOptions(5, 3, True, True, flush=4),
]


@pytest.fixture(scope="module")
def model() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=89, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=64, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.25, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(autouse=True)
def few_decode_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tq, "MAX_DECODE_ROWS", 6)


@pytest.fixture(params=["drop-in", "direct"])
def mode(request: pytest.FixtureRequest, model: Any) -> Any:
    before = model.config._attn_implementation
    if request.param == "direct":
        model.set_attn_implementation(tq.ATTENTION)
    yield request.param
    model.set_attn_implementation(before)


def tokens(batch: int, count: int, seed: int = 1) -> Any:
    return torch.randint(1, 89, (batch, count), generator=torch.Generator().manual_seed(seed))


def scales(model: Any) -> Any:
    return key_scales(model, tokens(1, 50, 2)[0].tolist())


def opened(model: Any, options: CacheOptions, **more: Any) -> tq.TurboQuantCache:
    more = {"backend": "torch_reference", "protect": 0, "dtype": "fp32", "checks": "full", **more}
    if getattr(options, "key_scale", False):
        more["key_scales"] = scales(model)
    return tq.TurboQuantCache(model.config, "turboquant_3bit_nc", options=options, **more)


@torch.no_grad()
def forced(model: Any, ids: Any, cache: Any, chunks: tuple[int, ...]) -> Any:
    found, at = [], 0
    for count in chunks:
        found.append(model(input_ids=ids[:, at : at + count], cache=cache, use_cache=True).logits)
        at += count
    return torch.cat(found, 1)


def close(found: Any, want: Any) -> bool:
    """Equal but for the few tokens that a code on a rounding tie moves."""
    apart = (found - want).norm(dim=-1) / want.norm(dim=-1)
    return bool(apart.median() < 1e-4 and apart.max() < 3e-2)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_decoding_is_the_evaluation_s_pass(model: Any, options: CacheOptions, mode: str):
    """From a prompt of one token, whose own attention is exact in the cache: the options' first token is, in both."""
    if not options.first:
        options = replace(options, first=1)
    ids = tokens(1, COUNT)
    means = key_means(model, tokens(1, 50, 2)[0].tolist())
    scheme = preset_scheme(
        model.config,
        "3bit_nc",
        backend="torch_reference",
        options=options,
        key_means=means,
        key_scales=scales(model),
    )
    found = forced(model, ids, opened(model, options, key_means=means), (1,) * COUNT)
    with torch.no_grad(), reading(model, scheme):
        want = model(input_ids=ids, use_cache=False).logits
    assert close(found, want)
    plain = preset_scheme(model.config, "3bit_nc", backend="torch_reference")
    with torch.no_grad(), reading(model, plain):
        assert rel_l2(model(input_ids=ids, use_cache=False).logits, want) > 1e-2


@pytest.mark.parametrize(
    "layers",
    [
        {0: "3bit_nc+recent=5+first=1+key_mean", 1: "4bit_nc+rotated_values+first=1"},
        {0: "exact", 1: "3bit_nc+first=1"},
        {0: "4bit_nc+first=2"},
    ],
)
def test_a_mixture_decodes_as_it_was_evaluated(model: Any, layers: dict[int, str], mode: str):
    """Each layer with its own preset and options, as ``evaluate --recommend`` measures what it picks."""
    ids = tokens(1, COUNT)
    means = key_means(model, tokens(1, 50, 2)[0].tolist())
    schemes = []
    for name in sorted({*layers.values()} - {"exact"}):
        preset, options = parse_cache(name)
        schemes.append(
            preset_scheme(
                model.config, preset, name=name, backend="torch_reference", options=options, key_means=means
            )
        )
    cache = tq.mixed_cache(
        model.config, layers, "torch_reference", dtype="fp32", checks="full", key_means=means
    )
    found = forced(model, ids, cache, (1,) * COUNT)
    kept = [isinstance(layer, tq.PackedLayer) for layer in cache.layers]
    assert kept == [layers.get(i, "exact") != "exact" for i in range(2)]
    assert tq.cache_bytes(cache) == sum(
        layer.nbytes if packed else layer.keys.nbytes + layer.values.nbytes
        for layer, packed in zip(cache.layers, kept, strict=True)
    )

    def read(scheme: Any) -> Any:
        with torch.no_grad(), reading(model, scheme):
            return model(input_ids=ids, use_cache=False).logits

    assert close(found, read(mixture("mixed", schemes, layers, model.config)))
    assert all(not close(found, read(scheme)) for scheme in schemes)


@pytest.mark.parametrize("preset", ["3bit_nc", "4bit_nc+rotated_values"])
@pytest.mark.parametrize("options", CHECKED, ids=str)
def test_what_a_gpu_is_asked(model: Any, options: CacheOptions, preset: str, monkeypatch: pytest.MonkeyPatch):
    """The checks of tests/l2_device, over the reference."""
    monkeypatch.setattr(tq, "MAX_DECODE_ROWS", 128)
    half = copy.deepcopy(model).half()
    check_options(half, options, preset, backend="torch_reference", dtype="fp16", target="cpu")


def test_wrong_mixtures_are_named(model: Any):
    def opened(layers: Any, **more: Any) -> Any:
        return tq.mixed_cache(model.config, layers, "torch_reference", dtype="fp32", **more)

    with pytest.raises(SpecError, match="layers=2"):
        opened({2: "3bit_nc"})
    with pytest.raises(SpecError, match="preset='5bit'"):
        opened({0: "5bit"})
    for name, value in (("protect", 1), ("skip_layers", (0,)), ("options", CacheOptions(3))):
        with pytest.raises(SpecError, match=f"{name}=.*layers says what each layer gets"):
            opened({0: "3bit_nc"}, **{name: value})
    shared = transformers.Gemma3nTextConfig(
        num_hidden_layers=4, num_kv_shared_layers=2, head_dim=64, hidden_size=32, intermediate_size=32,
        num_attention_heads=4, num_key_value_heads=2, layer_types=["full_attention"] * 4, vocab_size=89,
        vocab_size_per_layer_input=89, activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    with pytest.raises(SpecError, match=r"layers\[1\]='4bit_nc' \(wants exact: skipped on request"):
        tq.mixed_cache(shared, {0: "4bit_nc", 1: "4bit_nc"}, "torch_reference", dtype="fp32")


CHUNKS = (2, 1, 3, 1, 6, 1, 9, 1, 1, 2, 20, 1, 1, 1)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_both_modes_agree_in_chunks(model: Any, options: CacheOptions):
    """Chunks that end inside the first tokens, span them, and are longer than the multi-query decode takes."""
    ids = tokens(2, sum(CHUNKS))
    drop_in = forced(model, ids, opened(model, options), CHUNKS)
    before = model.config._attn_implementation
    model.set_attn_implementation(tq.ATTENTION)
    try:
        direct = forced(model, ids, opened(model, options), CHUNKS)
    finally:
        model.set_attn_implementation(before)
    assert close(direct, drop_in)


def test_everything_exact_is_the_model_s_own(model: Any, mode: str):
    ids = tokens(2, sum(CHUNKS))
    for options in (CacheOptions(recent=100), CacheOptions(first=100)):
        found = forced(model, ids, opened(model, options), CHUNKS)
        want = forced(model, ids, transformers.DynamicCache(config=model.config), CHUNKS)
        assert rel_l2(found, want) < 1e-5


def test_accuracy_is_bought(model: Any):
    ids = tokens(1, COUNT)
    exact = forced(model, ids, transformers.DynamicCache(config=model.config), (8, *(1,) * (COUNT - 8)))
    errors = {
        str(o): rel_l2(forced(model, ids, opened(model, o), (8, *(1,) * (COUNT - 8))), exact)
        for o in (CacheOptions(), CacheOptions(16), CacheOptions(32))
    }
    assert errors["+recent=32"] < errors["+recent=16"] < errors[""]


def test_beams_crops_and_resets(model: Any, mode: str):
    ids = tokens(2, 11)
    more = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    drop = opened(model, ALL)
    found = model.generate(input_ids=ids, cache=drop, num_beams=3, **more)
    assert found.shape == (2, 19)
    cache = opened(model, ALL)
    once = forced(model, ids, cache, (11,))
    length = cache.get_seq_length()
    forced(model, tokens(2, 5, 3), cache, (1, 1, 3))
    cache.crop(-5)
    assert cache.get_seq_length() == length
    more_tokens = tokens(2, 3, 4)
    again = forced(model, more_tokens, cache, (1, 1, 1))
    fresh = opened(model, ALL)
    assert torch.equal(forced(model, ids, fresh, (11,)), once)
    # packed tokens stay packed after the crop, so the two differ by less than what quantising one token does
    assert rel_l2(again, forced(model, more_tokens, fresh, (1, 1, 1))) < 0.2
    cache.crop(-12)  # into the first tokens
    assert cache.get_seq_length() == 2
    fresh = opened(model, ALL)
    forced(model, ids[:, :2], fresh, (2,))
    mean_free = forced(model, tokens(2, 1, 5), cache, (1,))
    assert rel_l2(mean_free, forced(model, tokens(2, 1, 5), fresh, (1,))) < 1e-5  # all that is left is exact
    cache.reset()
    assert torch.equal(forced(model, ids, cache, (11,)), once)


def test_selecting_sequences(model: Any, mode: str):
    ids = tokens(3, 20)
    cache = opened(model, ALL, key_means=key_means(model, tokens(1, 50, 2)[0].tolist()))
    forced(model, ids, cache, (20,))
    cache.batch_select_indices(torch.tensor([2, 0]))
    want = opened(model, ALL, key_means=key_means(model, tokens(1, 50, 2)[0].tolist()))
    forced(model, ids[[2, 0]], want, (20,))
    step = tokens(2, 1, 5)
    assert rel_l2(forced(model, step, cache, (1,)), forced(model, step, want, (1,))) < 1e-5


def test_bytes(model: Any):
    cache = opened(model, CacheOptions(recent=8, first=4, key_mean=True), block_size=16)
    assert cache.nbytes == 0
    forced(model, tokens(2, 64), cache, (64,))
    exact = 2 * 2 * 2 * 64 * 4  # two sequences, K and V of two heads, fp32
    packed = 2 * 4 * 16 * 2 * 54  # 48 of 60 tokens in whole blocks: 3 pages, doubled to 4
    each = exact * (4 + 8 + 15) + packed + 2 * 64 * 4
    assert cache.nbytes == 2 * each


def test_what_is_refused(model: Any):
    with pytest.raises(SpecError, match="options='recent'"):
        opened(model, "recent")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"key_scales\[0\]=None .wants \[Hk, 1, D\]"):
        tq.TurboQuantCache(
            model.config,
            "3bit_nc",
            "torch_reference",
            options=CacheOptions(key_scale=True),
            dtype="fp32",
            protect=0,
        )
    with pytest.raises(SpecError, match=r"key_means\[1\]"):
        opened(model, ALL, key_means={1: torch.zeros(3)})
    capped = transformers.Gemma2Config(
        vocab_size=89, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=64, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    options = {"backend": "torch_reference", "protect": 0, "dtype": "fp32"}
    with pytest.raises(tq.UnsupportedError, match=r"\+key_mean with soft_cap=50.0"):
        tq.TurboQuantCache(capped, options=CacheOptions(key_mean=True), **options)
    cache = tq.TurboQuantCache(capped, options=CacheOptions(recent=8), **options)
    assert [type(layer).__name__ for layer in cache.layers] == ["PackedLayer", "PartlyExactLayer"]
    with pytest.raises(SpecError, match=r"options='\+recent=8' .wants none"):
        tq.TurboQuantCache(capped, options=CacheOptions(recent=8), skip_layers={1}, **options)
    from turboquant_rocm.integrations.capture import open_cache

    with pytest.raises(SpecError, match="options="):
        open_cache(model.config, "hybrid", options=CacheOptions(recent=8), **options)
