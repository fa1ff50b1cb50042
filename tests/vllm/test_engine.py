"""The real vLLM engine, on the CPU, with a real small model: what it generates, predicts, shares and mixes.

Run in the environment of ci/vllm_env.sh: VENV/bin/python -m pytest tests/vllm --run-vllm
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from tests.repository import ROOT
from turboquant_rocm import make_layout, preset_names

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

MODEL = Path(os.environ.get("TURBOQUANT_TEST_MODEL", Path(sys.prefix) / "smollm2"))
PRESETS = tuple(n for n in preset_names() if n in (
    "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc",
))  # fmt: skip
LAYERS, PROTECTED, KV_HEADS, HEAD_SIZE = 30, 2, 3, 64
SCORED = 1024
"""Tokens of a window of text whose predictions are compared with the evaluation's."""
WINDOWS = int(os.environ.get("TURBOQUANT_TEST_WINDOWS", "1"))
"""Windows of the comparison in which engine and evaluation each round for themselves."""
SPREAD = 128
"""Tokens whose mean difference is one sample of it: neighbours are not independent."""
BLOCK = 32
OURS = "turboquant_rocm.integrations.vllm.backend.TurboQuantImpl"


def clean_environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TURBOQUANT_ROCM_", "VLLM_"))}
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TURBOQUANT_ROCM_VLLM": "required",
        "TURBOQUANT_ROCM_VLLM_CPU": "reference",
        "TURBOQUANT_ROCM_VLLM_CHECKS": "full",
        **more,
    }


def process(
    script: str, job: dict[str, Any], environ: dict[str, str], tmp_path: Path, *args: str
) -> subprocess.CompletedProcess[str]:
    """A script beside this file, away from the checkout: an old egg-info there would hide our entry points."""
    return subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name(script)), *args],
        input=json.dumps(job), capture_output=True, text=True, cwd=tmp_path, env=environ, check=False,
    )  # fmt: skip


def run_engine(tmp_path: Path, preset: str, batches: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Results of engine.py, and what it logged under "log"."""
    environ = clean_environment(**options.pop("environ", {}))
    more = {name: options.pop(name, None) for name in ("packed_rows", "kept")}
    asked = {
        "kv_cache_dtype": preset, "block_size": BLOCK, "max_model_len": SCORED + 16, "max_num_seqs": 4,
        "enable_prefix_caching": False, **options,
    }  # fmt: skip
    job = {"model": str(MODEL), "options": asked, "batches": batches, **more}
    done = process("engine.py", job, environ, tmp_path, str(tmp_path / "result.json"))
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-4000:]
    return {**json.loads((tmp_path / "result.json").read_text()), "log": log}


@cache
def text_ids() -> tuple[int, ...]:
    """Prose of this repository as tokens, at least SCORED of them for every window."""
    from transformers import AutoTokenizer

    names = ("design.md", "algorithms.md", "evaluation.md", "flydsl_decode.md")
    text = "\n".join((ROOT / "docs" / name).read_text() for name in names)
    ids = AutoTokenizer.from_pretrained(str(MODEL))(text)["input_ids"]
    assert len(ids) >= SCORED * WINDOWS
    return tuple(ids)


def evaluated(preset: str, windows: list[list[int]], kept: Path, tmp_path: Path) -> dict[str, Any]:
    """What reference.py says, with the layers native that the engine keeps native."""
    job = {"model": str(MODEL), "windows": windows, "protect": PROTECTED, "preset": preset, "kept": str(kept)}
    environ = {**clean_environment(), "PYTHONPATH": str(Path(sys.prefix) / "evaluation")}
    done = process("reference.py", job, environ, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def prompt(start: int, count: int) -> list[int]:
    return list(text_ids()[start : start + count])


# ---- every preset: classes, bytes, generation, perplexity ---------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_engine_serves_and_predicts_as_the_evaluation_says(preset: str, tmp_path: Path):
    """In fp32, in chunks of 64 tokens, the first one too, that read packed keys and values, their own included.

    That is what the evaluation computes, but not to the last bit: products are added up in another order, so a few
    coordinates in a million fall to the other side of a bucket's edge. Each of them moves what later layers store. With
    3-bit keys the predictions of single tokens then differ by 0.5 to 0.6 (standard deviation), as between evaluations
    with weights that differ by 1e-6, and 1,023 of them do not tell 1 % from noise. So the evaluation also reads the
    codes that the engine has stored, layer by layer, and says how many it would have stored otherwise.
    """
    windows = [list(text_ids()[i * SCORED : (i + 1) * SCORED]) for i in range(WINDOWS)]
    scored = {"max_tokens": 1, "score": True}
    batches = [
        {"prompts": [prompt(0, 40), prompt(500, 12)], "max_tokens": 8},
        {"prompts": windows[:1], **scored},
        *([{"prompts": windows[1:], **scored}] if WINDOWS > 1 else []),
    ]
    kept = tmp_path / "kept"
    found = run_engine(
        tmp_path, preset, batches, max_num_batched_tokens=64, packed_rows=64, dtype="float32",
        kept={"tokens": SCORED, "file": str(kept)},
    )  # fmt: skip

    layers = list(found["layers"].values())
    packed = [x for x in layers if x["impl"] == OURS]
    native = [x for x in layers if x["impl"] != OURS]
    assert [x["dtype"] for x in layers] == ["auto"] * PROTECTED + [preset] * 26 + ["auto"] * PROTECTED
    assert [x["impl"] == OURS for x in layers] == [x["dtype"] == preset for x in layers]
    assert {x["backend"] for x in packed} == {"torch_reference"}
    size = make_layout("soa", preset, HEAD_SIZE, KV_HEADS, BLOCK).bytes_per_token
    assert {x["bytes_per_token"] for x in packed} == {size}
    assert {x["bytes_per_token"] for x in native} == {KV_HEADS * HEAD_SIZE * 2 * 4}
    assert f"26 of {LAYERS} layers packed" in found["log"]
    assert found["log"].count("serves this model. The plan") == 1

    first, alone = found["batches"][:2]
    assert all(len(x["tokens"]) == 8 and all(map(math.isfinite, x["logprobs"])) for x in first["outputs"])
    assert first["routes"][:2] == [
        [["decode", 40, 0], ["decode", 12, 0]],
        [["decode", 1, 40], ["decode", 1, 12]],
    ]
    assert alone["routes"][:2] == [[["decode", 64, 0]], [["decode", 64, 64]]]
    assert {route for b in found["batches"] for step in b["routes"] for route, _, _ in step} == {"decode"}

    told = evaluated(preset, windows, kept, tmp_path)
    nll = [output["nll"] for batch in found["batches"][1:] for output in batch["outputs"]]
    assert [len(x) for x in nll] == [SCORED - 1] * WINDOWS
    same = math.expm1(fmean(nll[0]) - fmean(told["kept"]))
    changes = [a - b for x, y in zip(nll, told["free"], strict=True) for a, b in zip(x, y, strict=True)]
    blocks = [fmean(changes[i : i + SPREAD]) for i in range(0, len(changes) - SPREAD + 1, SPREAD)]
    error = stdev(blocks) / math.sqrt(len(blocks))
    free = math.expm1(fmean(changes))
    lost = fmean(
        abs(a - b)
        for x, y in zip(told["free"], told["exact"], strict=True)
        for a, b in zip(x, y, strict=True)
    )
    engine, own, exact = (math.exp(fmean(map(fmean, x))) for x in (nll, told["free"], told["exact"]))
    print(
        f"{preset}: perplexity {math.exp(fmean(nll[0])):.3f}, {same:+.4%} from the evaluation with the same codes, "
        f"{told['parted']:.4%} of the vectors would have been others; over {len(changes)} tokens {engine:.3f}, "
        f"{free:+.2%} from the evaluation's {own:.3f}, standard error {error:.2%}; unquantised {exact:.3f}, "
        f"{lost:.2f} per token from the evaluation's"
    )
    assert abs(same) <= 0.01
    assert max(abs(a - b) for a, b in zip(nll[0], told["kept"], strict=True)) <= 0.01
    assert told["parted"] <= 0.001
    assert abs(free) <= max(0.01, 3 * error)
    assert exact * 1.001 < engine  # the cache was quantised


# ---- prefix caching, chunks, mixed batches: 4-bit keys and values -------------------------------------------

PRESET = "turboquant_4bit_nc"
PROMPTS = [(0, 300), (150, 300), (420, 300), (600, 300)]
"""(first token, tokens) of prompts; longer than a chunk of 256."""
GREEDY = 8
SAME_ROUTE = 0.02
"""Mean |logprob difference| by the same routes in batches of other shapes: bf16 sums in other orders."""
OTHER_ROUTE = 0.4
"""... by routes that read other tokens packed instead of raw: what quantising those few tokens changes. The evaluation
finds 0.26 between everything packed and nothing, in fp32; few tokens and bf16 get the rest."""
OTHER_PERPLEXITY = 0.08
"""|log of the ratio of perplexities| of such routes: the evaluation finds 0.055 between all packed and nothing."""


def difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Mean |logprob difference| of the tokens that both generated, up to where they part."""
    same = 0
    while same < len(a["tokens"]) and a["tokens"][same] == b["tokens"][same]:
        same += 1
    assert same, f"other tokens from the start: {a['tokens']}, {b['tokens']}"
    return fmean(abs(x - y) for x, y in zip(a["logprobs"][:same], b["logprobs"][:same], strict=True))


def ask(*parts: tuple[int, int], **more: Any) -> dict[str, Any]:
    """A batch of prompts, each the named tokens of the text."""
    return {"prompts": [prompt(*p) for p in parts], "max_tokens": GREEDY, **more}


def test_prefix_caching_cold_and_warm_agree(tmp_path: Path):
    """Cold, a prompt of 300 tokens attends to itself raw; warm, its last 12 read 288 packed tokens and themselves.

    Cut at token 288 the cold prompt does so, too: then a hit changes nothing.
    """
    alone = [ask(p) for p in PROMPTS]

    def run(cold_steps: list[Any], **options: Any) -> list[float]:
        found = run_engine(tmp_path, PRESET, [*alone, *alone], enable_prefix_caching=True, **options)
        cold, warm = found["batches"][:4], found["batches"][4:]
        for a, b in zip(cold, warm, strict=True):
            assert a["routes"][: len(cold_steps)] == cold_steps and a["outputs"][0]["cached"] == 0
            assert b["routes"][0] == [["decode", 12, 288]] and b["outputs"][0]["cached"] == 288
        values = [difference(a["outputs"][0], b["outputs"][0]) for a, b in zip(cold, warm, strict=True)]
        print("cold and warm:", values)
        return values

    assert 0 < fmean(run([[["first", 300, 0]]])) <= OTHER_ROUTE
    assert max(run([[["first", 288, 0]], [["decode", 12, 288]]], max_num_batched_tokens=288)) <= SAME_ROUTE


def test_chunked_and_unchunked_prefill_agree(tmp_path: Path):
    """The logprobs of the prompt's own tokens behind the first chunk: whole, they come from raw keys and values."""
    batches = [{"prompts": [prompt(0, 600)], "max_tokens": 1, "score": True}]
    whole = run_engine(tmp_path, PRESET, batches, max_num_batched_tokens=SCORED)["batches"][0]
    assert whole["routes"][0] == [["first", 600, 0]]
    for size, routes in ((160, ["first", "chunks", "chunks", "decode"]), (32, ["first", *["decode"] * 18])):
        parts = run_engine(tmp_path, PRESET, batches, max_num_batched_tokens=size)["batches"][0]
        assert [step[0][0] for step in parts["routes"][: len(routes)]] == routes
        assert [step[0][1] for step in parts["routes"][:2]] == [size, size]
        pairs = zip(whole["outputs"][0]["nll"][size:], parts["outputs"][0]["nll"][size:], strict=True)
        values = [b - a for a, b in pairs]
        print(f"chunks of {size}: mean {fmean(values):.4f}, mean size {fmean(map(abs, values)):.4f}")
        assert 0 < fmean(map(abs, values)) <= OTHER_ROUTE
        assert abs(fmean(values)) <= OTHER_PERPLEXITY


def test_a_batch_of_a_first_chunk_and_a_shorter_prefix_hit(tmp_path: Path):
    """The longest query has no history, and the longest sequence is as long as it: the hit still keeps its own."""
    hit, fresh = (0, 136), (600, 200)
    seed = ask((0, 96))
    job = [
        seed,
        ask(hit, fresh),
        {**seed, "forget": True},
        ask(hit),
        ask(fresh, forget=True),
        ask((96, 40), forget=True),
    ]
    _, mixed, _, alone_hit, alone_fresh, without = run_engine(
        tmp_path, PRESET, job, enable_prefix_caching=True
    )["batches"]
    assert sorted(mixed["routes"][0]) == [["decode", 40, 96], ["first", 200, 0]]
    assert alone_hit["routes"][0] == [["decode", 40, 96]] and alone_fresh["routes"][0] == [["first", 200, 0]]
    values = [
        difference(mixed["outputs"][0], alone_hit["outputs"][0]),
        difference(mixed["outputs"][1], alone_fresh["outputs"][0]),
    ]
    print("mixed and alone:", values)
    assert max(values) <= SAME_ROUTE
    # A lost prefix would show: without it the same 40 tokens go on otherwise.
    lost = without["outputs"][0]
    assert lost["tokens"] != mixed["outputs"][0]["tokens"]


# ---- as it is served, and refused ---------------------------------------------------------------------------


def test_engine_in_processes_of_its_own(tmp_path: Path):
    """As `vllm serve` runs it: the plugin loads in the engine's and the worker's process; one plan is logged."""
    batches = [ask(PROMPTS[0])]
    inside = run_engine(tmp_path, PRESET, batches)
    outside = run_engine(tmp_path, PRESET, batches, environ={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    assert outside["log"].count("serves this model. The plan") == 1
    assert outside["log"].count(f"26 of {LAYERS} layers packed: 4 native, 26 torch_reference (soa)") == 1
    assert outside["batches"][0]["outputs"][0]["tokens"] == inside["batches"][0]["outputs"][0]["tokens"]


def test_speculative_tokens_are_verified_by_the_multi_query_decode(tmp_path: Path):
    """Drafts come from the prompt itself, which repeats; what is accepted must be what greedy decoding gives."""
    repeated = prompt(600, 24)
    batch = {"prompts": [repeated * 4], "max_tokens": 24}
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    plain = run_engine(tmp_path, PRESET, [batch])["batches"][0]
    drafted = run_engine(tmp_path, PRESET, [batch], speculative_config=drafts)["batches"][0]
    steps = [step for step in drafted["routes"] if step[0][0] == "decode"]
    assert [4] in [[row[1] for row in step] for step in steps], drafted["routes"]
    assert len(steps) < len(plain["routes"]) - 1, "no draft was ever accepted"
    assert difference(plain["outputs"][0], drafted["outputs"][0]) <= SAME_ROUTE
    assert drafted["outputs"][0]["tokens"][:8] == plain["outputs"][0]["tokens"][:8]


def test_tensor_parallel_ranks_serve_their_local_heads(tmp_path: Path):
    """Three ranks of 3/1 heads: one report, and the tokens of one rank."""
    batches = [ask(PROMPTS[0])]
    whole = run_engine(tmp_path, PRESET, batches)["batches"][0]["outputs"][0]
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    split = run_engine(tmp_path, PRESET, batches, tensor_parallel_size=3, environ=environ)
    assert split["log"].count("serves this model. The plan") == 1
    assert "one of 3 tensor-parallel ranks" in split["log"] and "full, 3/1 heads of 64" in split["log"]
    found = split["batches"][0]["outputs"][0]
    print("one rank and three:", difference(whole, found))
    assert difference(whole, found) <= OTHER_ROUTE


def test_the_interpreted_triton_kernels_serve_what_the_reference_does(tmp_path: Path):
    """One packed layer, since the interpreter takes seconds for each: multi-query decode, then single tokens."""
    batches = [{"prompts": [prompt(0, 6)], "max_tokens": 3}]
    options = {
        "dtype": "float16", "packed_rows": 6, "max_model_len": 64,
        "kv_cache_dtype_skip_layers": [str(i) for i in range(LAYERS) if i != LAYERS // 2],
    }  # fmt: skip
    environ = {"TURBOQUANT_ROCM_VLLM_CPU": "interpret", "TRITON_INTERPRET": "1"}
    plain = run_engine(tmp_path, PRESET, batches, **options)
    found = run_engine(tmp_path, PRESET, batches, environ=environ, **options)
    assert [x["backend"] for x in plain["layers"].values() if x["impl"] == OURS] == ["torch_reference"]
    assert [x["backend"] for x in found["layers"].values() if x["impl"] == OURS] == ["triton_soa"]
    (a,), (b,) = plain["batches"], found["batches"]
    assert a["routes"] == b["routes"] == [[["decode", 6, 0]], [["decode", 1, 6]], [["decode", 1, 7]]]
    values = difference(a["outputs"][0], b["outputs"][0])
    print("reference and interpreted kernels:", values)
    assert a["outputs"][0]["tokens"] == b["outputs"][0]["tokens"]
    assert values <= SAME_ROUTE


@pytest.mark.parametrize(
    ("environ", "options", "told"),
    [
        (
            {"TURBOQUANT_ROCM_VLLM_CPU": ""},
            {},
            ["cannot read a turboquant_4bit_nc cache", "TURBOQUANT_ROCM_VLLM_CPU"],
        ),
        (
            {"TURBOQUANT_ROCM_VLLM": "off"},
            {},
            ["TURBOQUANT_ROCM_VLLM='off'", "no turboquant backend for the CPU"],
        ),
        (
            {"TURBOQUANT_ROCM_REQUIRE": "triton_soa"},
            {},
            ["torch_reference: policy=not required (wants triton_soa)"],
        ),
        ({}, {"block_size": 8}, ["block_size not supported"]),
        (
            {"TURBOQUANT_ROCM_VLLM_CPU": "interpret", "TRITON_INTERPRET": "1"},
            {"dtype": "bfloat16"},
            ["dtype=bf16 (wants fp16: Triton's interpreter"],
        ),
    ],
    ids=["no platform", "left in charge", "required backend", "block size", "interpreted bf16"],
)
def test_what_is_not_served_is_refused_at_start(
    environ: dict[str, str], options: dict[str, Any], told: list[str], tmp_path: Path
):
    job = {
        "model": str(MODEL),
        "options": {"kv_cache_dtype": PRESET, "max_model_len": 64, **options},
        "batches": [],
    }
    done = process("engine.py", job, clean_environment(**environ), tmp_path, str(tmp_path / "result.json"))
    assert done.returncode != 0
    log = done.stdout + done.stderr
    for text in told:
        assert text in log, log[-3000:]
