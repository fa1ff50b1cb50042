"""``bench ab`` over a tiny random model on the CPU: what it counts is held, and what it compares is compared."""

from __future__ import annotations

import csv
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.l0_pure.test_transformers_cache import LAYERS, build  # noqa: E402
from turboquant_rocm import SpecError, Target  # noqa: E402
from turboquant_rocm.bench import models  # noqa: E402
from turboquant_rocm.bench.ab import AbRow, AbRun, Arm, arms_of, verdict  # noqa: E402
from turboquant_rocm.bench.cli import main  # noqa: E402
from turboquant_rocm.bench.models import Setup, budget_tokens, bytes_for, measure, passes, peak_bytes  # noqa: E402
from turboquant_rocm.bench.records import Machine, Time  # noqa: E402
from turboquant_rocm.evaluation.schemes import model_layers  # noqa: E402
from turboquant_rocm.integrations.capture import ShadowLayer, open_cache  # noqa: E402
from turboquant_rocm.integrations.transformers import ATTENTION, TurboQuantCache, cache_bytes  # noqa: E402
from turboquant_rocm.options import CacheOptions  # noqa: E402

SLOT = 70  # bytes of a token and KV head of 4bit_nc at head size 64
ROW = 2 * 64 * 4  # the same in fp32
HEADS = 2
COMMON = {"backend": "torch_reference", "protect": 0, "block_size": 8, "dtype": "fp32"}


def setup(model: Any, **changes: Any) -> Setup:
    ids = torch.randint(1, 80, (2, 40), generator=torch.Generator().manual_seed(0))
    defaults = {"backend": "torch_reference", "protect": 0, "block_size": 8, "ring_tokens": 8, "repeats": 3}
    return Setup(model, ids, 4, Target("cpu", "cpu"), "fp32", 1 << 20, **{**defaults, **changes})


def feed(model: Any, cache: Any, *counts: int) -> Any:
    for count in counts:
        with torch.no_grad():
            model(input_ids=torch.ones(1, count, dtype=torch.long), cache=cache, use_cache=True)
    return cache


# ---- bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (8, 1), (9, 2), (37, 5)])
def test_bytes_are_those_of_the_layout(tokens: int, pages: int):
    model = build("llama")
    layers = model_layers(model.config)
    plain = open_cache(model.config, "off")
    cache = TurboQuantCache(model.config, "4bit_nc", **COMMON)
    assert bytes_for(plain, layers, tokens, 4) == tokens * LAYERS * HEADS * ROW
    assert bytes_for(cache, layers, tokens, 4) == pages * 8 * LAYERS * HEADS * SLOT
    for each in (plain, cache):
        assert cache_bytes(feed(model, each, tokens)) == bytes_for(each, layers, tokens, 4)
    mixed = TurboQuantCache(model.config, "4bit_nc", **{**COMMON, "protect": 1})
    assert bytes_for(mixed, layers, tokens, 4) == LAYERS // 2 * HEADS * (pages * 8 * SLOT + tokens * ROW)


@pytest.mark.parametrize("attention", ["sdpa", ATTENTION])
@pytest.mark.parametrize("mode", ["capture_only", "hybrid", "full"])
@pytest.mark.parametrize("tokens", [5, 37, 64])
def test_bytes_of_stores_are_what_they_hold(tokens: int, mode: str, attention: str):
    """A store that is opened for as many tokens as it is given."""
    model = build("llama")
    model.set_attn_implementation(attention)
    layers = model_layers(model.config)
    cache = open_cache(model.config, mode, "4bit_nc", ring_tokens=6, max_tokens=tokens, **COMMON)
    feed(model, cache, tokens - 1, 1)
    assert cache_bytes(cache) == cache.nbytes == bytes_for(cache, layers, tokens, 4)
    full = max(0, tokens - (0 if mode == "full" else 6)) // 8  # pages, which double
    packed = 8 * min(1 << (full - 1).bit_length() if full else 0, -(-tokens // 8))
    exact = 7 if mode == "full" else 13
    flat = mode != "capture_only" and attention != ATTENTION
    want = packed * (SLOT + flat * ROW) + exact * ROW + (mode == "capture_only") * tokens * ROW
    assert cache.nbytes == want * HEADS * LAYERS


@pytest.mark.parametrize(
    "options",
    [
        CacheOptions(first=3),
        CacheOptions(recent=9, first=2, key_mean=True),
        CacheOptions(recent=9, first=2, key_mean=True, key_scale=True),
    ],
    ids=str,
)
def test_bytes_of_partly_exact_layers(options: CacheOptions):
    model = build("llama")
    layers = model_layers(model.config)
    scales = {layer.index: torch.ones(HEADS, 1, 64) for layer in layers}
    cache = TurboQuantCache(model.config, "4bit_nc", options=options, key_scales=scales, **COMMON)
    assert bytes_for(cache, layers, 2, 4) == 2 * ROW * HEADS * LAYERS
    feed(model, cache, 2 + 64)  # pages of a store double
    assert cache_bytes(cache) == bytes_for(cache, layers, 66, 4)


@pytest.mark.parametrize("kind", ["gemma3", "mistral"])
def test_windows_stop_growing(kind: str):
    model = build(kind)
    layers = model_layers(model.config)
    plain = feed(model, open_cache(model.config, "off"), 30, 1)
    assert cache_bytes(plain) == bytes_for(plain, layers, 31, 4)
    grown = [bytes_for(plain, layers, n, 4) for n in (200, 201)]
    assert (grown[0] == grown[1]) == (kind == "mistral"), (
        "all layers of mistral have a window, half of gemma3's"
    )


@pytest.mark.parametrize("budget", [0, 1, 4 * HEADS * ROW, 1 << 20])
def test_the_budget_is_filled_and_not_exceeded(budget: int):
    model = build("llama")
    layers = model_layers(model.config)
    for cache in (open_cache(model.config, "off"), TurboQuantCache(model.config, "4bit_nc", **COMMON),
                  open_cache(model.config, "hybrid", "4bit_nc", **COMMON)):  # fmt: skip
        found = budget_tokens(cache, layers, budget, 4)
        assert found == 0 or bytes_for(cache, layers, found, 4) <= budget
        assert bytes_for(cache, layers, found + 1, 4) > budget
    assert budget_tokens(open_cache(build("mistral").config, "off"), layers, budget, 4) >= 0


def test_the_peak_is_what_is_held_at_once():
    def call() -> None:
        one = torch.empty(1 << 20, dtype=torch.uint8)
        two = torch.empty(1 << 20, dtype=torch.uint8)
        del one
        three = torch.empty(1 << 19, dtype=torch.uint8)
        del two, three

    assert peak_bytes(call, torch.device("cpu")) == 2 << 20


# ---- verdicts and arms --------------------------------------------------------------------------------------


def test_verdicts_know_noise():
    assert verdict(Time(100, 10), Time(110, 10)) == "within noise"
    assert verdict(Time(100, 0.1), Time(102, 0.1)) == "within noise", "clocks vary"
    assert verdict(Time(100, 1), Time(125, 1)) == "1.25x slower"
    assert verdict(Time(100, 1), Time(50, 1)) == "2.00x faster"
    assert verdict(Time(100, 1), None) == verdict(None, Time(1, 1)) == ""


def test_arms_are_every_mode_with_every_preset():
    found = arms_of(["cache", "off", "full"], ["4bit_nc", "turboquant_3bit_nc"])
    assert [a.title for a in found] == [
        "cache 4bit_nc", "cache 3bit_nc", "off", "full 4bit_nc", "full 3bit_nc"
    ]  # fmt: skip
    assert arms_of(["cache"], ["3bit_nc+recent=8"])[0].preset == "3bit_nc+recent=8"
    for modes, presets, says in (
        (["on"], ["4bit_nc"], "--mode"),
        (["cache"], ["5bit"], "preset"),
        (["full"], ["4bit_nc+recent=8"], "--preset"),
    ):
        with pytest.raises(SpecError, match=says):
            arms_of(modes, presets)


# ---- measuring ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_measure(direct: bool):
    arms = arms_of(["cache", "off", "capture_only", "hybrid", "full"], ["4bit_nc"])
    made, calls = setup(build("llama"), direct=direct), []
    plain = made.model.config._attn_implementation
    rows = measure(made, arms, lambda: calls.append(1))
    assert len(calls) == passes(made, arms) == 6 * (3 + 3)
    assert made.model.config._attn_implementation == plain
    assert [r.arm for r in rows] == ["transformers", *(a.title for a in arms)]
    assert {r.status for r in rows} == {"ok"}, [r.note for r in rows]
    base, cache, off, shadow, hybrid, full = rows
    for row in (base, off, shadow):
        assert (row.kl, row.top1, row.equal_tokens, row.tokens, row.first_difference) == (0, 1, 8, 8, None)
    for row in (cache, hybrid, full):
        assert row.kl > 1e-5 and row.backend == "torch_reference" and row.packed_layers == LAYERS
        assert (row.equal_tokens < 8) == (row.first_difference is not None)
    assert base.kv_bytes == off.kv_bytes == 2 * 43 * HEADS * ROW * LAYERS
    assert shadow.kv_bytes > base.kv_bytes > 4 * cache.kv_bytes
    assert (hybrid.kv_bytes < base.kv_bytes) == direct, (
        "the model's own attention has dequantised tokens kept"
    )
    assert cache.budget_tokens > 6 * base.budget_tokens
    for row in rows:
        assert row.prefill.us > row.decode.us / 10 > 0 and row.peak_bytes > row.kv_bytes / 2
    assert base.peak_bytes >= base.kv_bytes


def test_rounds_go_round_all_arms_and_back(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []

    def timed(self: Any, arm: Arm | None) -> tuple[float, float]:
        order.append("base" if arm is None else arm.mode)
        return 10.0 + len(order), 1.0

    monkeypatch.setattr(models._Bench, "timed", timed)
    rows = measure(setup(build("llama")), arms_of(["off", "full"], ["4bit_nc"]))
    assert order == [*("base", "off", "full"), *("full", "off", "base"), *("base", "off", "full")]
    assert [r.prefill.us for r in rows] == [16, 15, 14], "medians"
    assert rows[0].decode == Time(1.0, 0.0)


def test_a_capture_that_changes_outputs_is_wrong(monkeypatch: pytest.MonkeyPatch):
    plain = ShadowLayer.update

    def touched(self: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, key * (1 + 1e-6), value, *args, **kwargs)

    monkeypatch.setattr(ShadowLayer, "update", touched)
    rows = measure(setup(build("llama")), arms_of(["capture_only", "off"], ["4bit_nc"]))
    assert [r.status for r in rows] == ["ok", "wrong", "ok"]
    assert "bit for bit" in rows[1].note and rows[1].decode is None and rows[1].kl < 1e-6


def test_a_failure_is_a_row(monkeypatch: pytest.MonkeyPatch):
    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("no lanes left\nsecond line")

    monkeypatch.setattr("turboquant_rocm.integrations.transformers.PackedLayer.update", broken)
    texts: list[str] = []
    made = setup(build("llama"), on_failure=texts.append)
    rows = measure(made, arms_of(["cache"], ["4bit_nc"]))
    assert (rows[1].status, rows[1].note) == ("failed", "ZeroDivisionError: no lanes left")
    assert "in broken" in texts[0] and rows[0].decode is not None
    assert AbRun(Machine("", "", "", "", "", {}), {}, rows).status == 1


def test_nothing_but_the_baseline_is_no_comparison():
    assert AbRun(Machine("", "", "", "", "", {}), {}, (AbRow("transformers"),)).status == 1
    with pytest.raises(SpecError, match="--protect"):
        measure(setup(build("llama"), protect=2), arms_of(["cache"], ["4bit_nc"]))


# ---- the command line ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("model")
    build("llama", max_position_embeddings=256).save_pretrained(at)
    return at


def command(folder: Path, *more: str) -> list[str]:
    return ["ab", str(folder), "--device", "cpu", "--prompt", "40", "--new", "3", "--repeats", "3", "--protect", "0",
            "--ring-tokens", "8", *more]  # fmt: skip


def test_the_command_writes_everything(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    files = {name: tmp_path / f"run.{name}" for name in ("json", "csv", "markdown")}
    flags = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    wanted = ["--mode", "cache", "--mode", "capture_only", "--budget", "1MiB", "--commit", "c0ffee", *flags]
    assert main(command(folder, *wanted)) == 0
    out = capsys.readouterr().out
    assert (
        "say nothing about kernels" in out and "tokens in 1 MiB" in out and "torch_reference, 4 layers" in out
    )
    assert "…" not in out, "no number is cut"
    data = json.loads(files["json"].read_text())
    assert set(data) == {"schema", "machine", "conditions", "rows"}
    assert set(data["machine"]) == {f.name for f in fields(Machine)}, "as in the files of other commands"
    assert data["machine"]["commit"] == "c0ffee" and data["machine"]["smoke"]
    assert {"torch", "transformers", "turboquant_rocm"} <= set(data["machine"]["versions"])
    assert data["conditions"]["model"] == folder.name and data["conditions"]["budget"] == 1 << 20
    assert [r["arm"] for r in data["rows"]] == ["transformers", "cache 4bit_nc", "capture_only 4bit_nc"]
    assert data["rows"][2]["kl"] == 0 and data["rows"][1]["kl"] > 0
    assert data["rows"][0]["budget_tokens"] == (1 << 20) // (LAYERS * HEADS * ROW)
    assert set(data["rows"][1]["verdicts"]) == {"prefill", "decode"}
    lines = list(csv.DictReader(files["csv"].read_text().splitlines()))
    assert [line["arm"] for line in lines] == [r["arm"] for r in data["rows"]]
    assert {line["commit"] for line in lines} == {"c0ffee"}
    assert float(lines[1]["decode_us"]) == data["rows"][1]["decode"]["us"]
    assert files["markdown"].read_text().count("\n| ") == 1 + len(lines)
    assert main(["compare", str(files["json"]), str(files["json"])]) == 2, "another schema"


def test_text_is_read(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["<unk>", "fox", "dog", "ran"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>").save_pretrained(folder)
    text = tmp_path / "text"
    text.write_text("fox dog ran " * 30, encoding="utf-8")
    assert main(command(folder, "--text", str(text), "--batch", "2")) == 0
    capsys.readouterr()
    assert main(command(folder, "--text", str(text), "--batch", "3")) == 2
    assert "--text='90 tokens' (wants at least 120" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--preset", "5bit"], "preset='5bit'"),
        (["--repeats", "2"], "--repeats=2 (wants at least 3)"),
        (["--new", "1"], "--new=1 (wants at least 2)"),
        (["--budget", "many"], "--budget='many'"),
        (["--prompt", "255"], "--prompt=255 (wants with --new 3 at most the model's 256 positions)"),
        (["--text", "/nowhere"], "--text='/nowhere'"),
        (["--backend", "triton_xxl"], "triton_xxl"),
        (["--device", "tpu"], "--device='tpu'"),
        (["--json", "/nowhere/x.json"], "--json='/nowhere/x.json'"),
        (["--mode", "full", "--preset", "4bit_nc+first=2"], "no options"),
        (["--protect", "2"], "--protect=2 (wants fewer native layers"),
        (["--block-size", "7"], "block_size=7"),
    ],
)
def test_bad_arguments(folder: Path, flags: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert main(command(folder, *flags)) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(command(tmp_path)) == 2
    assert "MODEL_DIR" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["ab"])


def test_what_no_backend_serves_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(command(folder, "--backend", "triton_soa")) == 1
    out = capsys.readouterr().out
    assert "refused" in out and "arch=cpu" in out


def test_no_gpu_exits_with_three(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["ab", str(folder)]) == 3
    assert "torch sees no GPU" in " ".join(capsys.readouterr().err.split())
