"""Plans and their reports: pages, budgets, changes that help, four formats, exit codes, hostile input."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import layer_spec
from tests.update_reports import GOLDEN, SUPPORT, report, support_matrix
from turboquant_rocm import Decision, LayerSpec, Policy, SpecError, load_model, make_layout, preset_names
from turboquant_rocm import backends as backends_module
from turboquant_rocm.backends import backends, get_backend
from turboquant_rocm.eligibility import Code, Request
from turboquant_rocm.explain import FORMATS, main, run
from turboquant_rocm.modelspec import bundled_models
from turboquant_rocm.options import parse_cache
from turboquant_rocm.packages import Environment
from turboquant_rocm.pages import PageGroup, unify
from turboquant_rocm.planning import LayerPlan, Question, Role, answer_question, plan, ranges
from turboquant_rocm.presets import get_preset
from turboquant_rocm.report.counterfactuals import changes, other_targets
from turboquant_rocm.spec import ModelSpec
from turboquant_rocm.target import get_target, targets

AUTOMATIC = [b for b in backends() if b.automatic]
NC4 = "turboquant_4bit_nc"
ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "explain_schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def ask(name: str, arch: str, **options: object):
    return plan(load_model(name), get_target(arch), **{"policy": Policy(), **options})


def explain(text: str) -> tuple[int, str, str]:
    return run(shlex.split(text))


def document(text: str) -> dict:
    status, out, _ = explain(text + " --format json")
    found = json.loads(out)
    assert found["exit"] == status
    VALIDATOR.validate(found)
    return found


# ---- what the issue promises ----------------------------------------------------------------------------


def inner(doc: dict) -> dict:
    (group,) = [g for g in doc["groups"] if g["role"] == "quantized"]
    return group


def test_qwen3_32b_gets_flydsl_on_its_inner_layers():
    group = inner(document("qwen3-32b --target gfx950 --preset 4bit_nc --block-size 16"))
    assert (group["ranges"], group["backend"], group["planned"]) == ("2-61", "flydsl_gfx950", None)


@pytest.fixture
def without_flydsl_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a version that declares FlyDSL and has none of its kernels."""
    for name in ("flydsl_gfx942", "flydsl_gfx950"):
        monkeypatch.setitem(backends_module._REGISTRY, name, replace(get_backend(name), ready=False))


@pytest.mark.usefixtures("without_flydsl_kernels")
def test_a_planned_backend_is_shown_where_it_would_be_and_is_not_what_runs():
    group = inner(document("qwen3-32b --target gfx950"))
    assert (group["backend"], group["planned"]) == ("triton_soa", "flydsl_gfx950")
    for form in ("table", "markdown"):
        text = explain(f"qwen3-32b --target gfx950 --format {form}")[1]
        assert "flydsl_gfx950 (planned; until then triton_soa)" in text
        assert "a version with its kernels" in text
    assert "<strong>planned</strong>" in explain("qwen3-32b --target gfx950 --format html")[1]
    # Elsewhere another GPU is not enough.
    (refused, *_) = inner(document("qwen3-32b --target sm_90"))["refused"]
    assert (refused["planned"], refused["targets"]) == (True, ["gfx950"])
    text = explain("qwen3-32b --target sm_90 --width 240")[1]
    assert "another GPU: gfx950, and a version with its kernels" in text


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_every_llama_layer_gets_flydsl(arch: str):
    """Four query heads per KV head, which the published kernel does not serve."""
    group = inner(document(f"llama-3.1-8b --target {arch}"))
    assert (group["ranges"], group["backend"], group["planned"]) == ("2-29", f"flydsl_{arch}", None)
    assert [r["backend"] for r in group["refused"]] == ([] if arch == "gfx950" else ["flydsl_gfx950"])


def test_gpt_oss_says_head_size_and_nothing_else():
    doc = document("gpt-oss-120b --target gfx950")
    sliding = next(g for g in doc["groups"] if g["role"] == "quantized" and g["layer"]["kind"] == "sliding")
    codes = {r["code"] for r in sliding["refused"][0]["reasons"]}
    assert codes == {"head_size", "value_head_size"}  # sinks and window are served


# command, layers -> (what runs, how many refused backends are faster, words of the last one's row)
BARS = [
    ("qwen3-32b --target gfx950 --preset 4bit_nc --block-size 16", "2-61", "flydsl_gfx950", 0, ()),
    ("gemma-3-27b --target gfx950 --preset 4bit_nc --block-size 128", "5-59 step 6", "flydsl_gfx950", 0, ()),
    (
        "llama-3.1-8b --target gfx942 --preset 4bit_nc --block-size 16",
        "2-29",
        "flydsl_gfx942",
        1,
        ("arch=gfx942 (wants gfx950)",),
    ),
    (
        "gpt-oss-120b --target gfx950 --preset 3bit_nc --block-size 48",
        "2-32 step 2",
        "triton_soa",
        2,
        (
            "value_bits=3 (wants 4)",
            "head_size=64 (wants 128)",
            "block_size=48 (wants one of 16, 32, 64, 128)",
        ),
    ),
]


@pytest.mark.parametrize(("command", "layers", "runs", "refused", "reasons"), BARS)
@pytest.mark.parametrize("form", FORMATS)
def test_the_flydsl_profile_in_every_rendered_report(
    command: str, layers: str, runs: str, refused: int, reasons: tuple[str, ...], form: str
):
    status, text, _ = explain(f"{command} --format {form} --width 400")
    assert status == 0
    if form == "json":
        (group,) = [g for g in json.loads(text)["groups"] if g["ranges"] == layers]
        rows = [f"{group['ranges']} {group['backend']} {json.dumps(group['refused'])}"]
    elif form == "html":
        rows = [row for row in text.split("<tr>") if f"<strong>{layers}</strong>" in row]
    else:
        rows = [row for row in text.splitlines() if row.strip(" |").startswith(f"{layers} ")]
    if form in ("table", "markdown"):
        assert runs in rows[0]
        assert len(rows) == 1 + refused
    elif form == "html":
        chosen = rows[0].split("<strong>chosen</strong>")[0].rsplit("data-label=", 1)[1]
        assert chosen.startswith(f'"{runs}"')
    else:
        assert f" {runs} " in rows[0]
    for reason in reasons:
        assert reason in rows[-1]
    if not reasons:
        assert "wants" not in rows[0]


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_the_flydsl_profile(arch: str):
    """What reports promise; tests/l1_simulate/test_flydsl_profile.py executes it."""
    wants = {str(r.code): r.explain() for r in get_backend(f"flydsl_{arch}").requires if r.code != "package"}
    assert wants == {
        "arch": arch,
        "kind": "one of full, sliding",
        "key_bits": "one of 4, 3",
        "value_bits": "4",
        "rotated_values": "none",
        "sketch": "none",
        "value_group": "none",
        "head_size": "128",
        "value_head_size": "128",
        "gqa_ratio": "1 to 16",
        "block_size": "one of 16, 32, 64, 128",
        "dtype": "one of bf16, fp16",
        "position_bias": "none",
    }


@pytest.mark.parametrize("arch", ["gfx942", "sm_90"])
def test_a_backend_on_request_is_named_where_no_other_serves(arch: str):
    command = f"llama-3.1-8b --target {arch} --preset prod_k3v4"
    (group,) = [g for g in document(command)["groups"] if g["role"] == "refused"]
    assert (group["backend"], group["on_request"]) == (None, ["triton_prod"])
    assert "on request: --force triton_prod" in explain(f"{command} --width 200")[1]
    forced = inner(document(f"{command} --force triton_prod"))
    assert forced["backend"] == "triton_prod" and "on_request" not in forced
    assert "on_request" not in inner(document(f"llama-3.1-8b --target {arch} --preset 4bit_nc"))
    elsewhere = document("llama-3.1-8b --target gfx90a --preset prod_k3v4")["groups"]
    assert not any("on_request" in group for group in elsewhere)


def test_options_behind_the_name_of_a_preset():
    """What a cache makes of them, layer by layer; without them the document is as before."""
    preset = "3bit_nc+rotated_values+recent=128+first=4+key_mean"
    doc = document(f"llama-3.1-8b --target gfx942 --preset {preset}")
    group = inner(doc)
    assert (doc["preset"], doc["options"]) == (
        "turboquant_3bit_nc+rotated_values", "+recent=128+first=4+key_mean",
    )  # fmt: skip
    assert group["backend"] == "triton_rotated"
    options = parse_cache(preset)[1]
    assert group["options"] == {
        "refused": [], "exact_tokens": options.exact_tokens, "exact_bytes": options.exact_tokens * 8 * 256 * 2,
    }  # fmt: skip
    assert options.exact_tokens >= 132
    assert (
        f"up to {options.exact_tokens} exact tokens"
        in explain(f"llama-3.1-8b --target gfx942 --preset {preset} --width 200")[1]
    )
    assert (
        "with the options" in explain("llama-3.1-8b --target sm_90 --preset 4bit_nc+key_mean --width 200")[1]
    )

    doc = document("gemma-2-9b --target sm_90 --preset 4bit_nc+recent=64+key_mean")
    codes = {
        group["layer"]["window"]: [refusal["code"] for refusal in group["options"]["refused"]]
        for group in doc["groups"]
        if group["backend"]
    }
    assert codes == {4096: ["window", "soft_cap"], None: ["soft_cap"]}
    text = explain("gemma-2-9b --target sm_90 --preset 4bit_nc+recent=64+key_mean --width 220")[1]
    assert "without the options: window=4096" in text and "cannot have the options: soft_cap=50.0" in text

    plain = document("llama-3.1-8b --target gfx942 --preset 3bit_nc")
    assert "options" not in plain and "options" not in inner(plain)
    with pytest.raises(SpecError, match=r"recnt=128.*recent=N"):
        explain("llama-3.1-8b --target gfx942 --preset 3bit_nc+recnt=128")


def test_deepseek_is_refused_with_the_reason():
    status, text, _ = explain("deepseek-v3 --target gfx942")
    assert status == 1
    assert text.count("kind=mla (wants one of full, sliding)") == len(AUTOMATIC)


@pytest.mark.parametrize("name", bundled_models())
def test_golden_reports(name: str):
    stored = (GOLDEN / f"{name}.md").read_text(encoding="utf-8")
    assert report(name) == stored, "read the difference, then run: python -m tests.update_reports"


def test_golden_reports_are_of_bundled_models():
    assert {path.stem for path in GOLDEN.glob("*.md")} == set(bundled_models())


def test_support_matrix_is_not_stale():
    assert SUPPORT.read_text(encoding="utf-8") == support_matrix(), "run: python -m tests.update_reports"


# ---- changes that help ----------------------------------------------------------------------------------

QUESTIONS = st.builds(
    lambda name, arch, preset, block, tp, policy, missing: Question(
        load_model(name),
        get_target(arch),
        get_preset(preset),
        block,
        tp=tp,
        policy=policy,
        environment=Environment().without("triton") if missing else Environment(),
        protect=0,
    ),
    st.sampled_from(bundled_models()),
    st.sampled_from(["gfx942", "gfx950", "sm_90", "gfx1100"]),
    st.sampled_from(preset_names()),
    st.sampled_from([16, 24, 32, 64, 528]),
    st.sampled_from([1, 2]),
    st.sampled_from(
        [Policy(), Policy(deny={"triton_soa"}), Policy(layout="aos"), Policy(force="triton_aos")]
    ),
    st.booleans(),
)


def refused_backends(question: Question) -> Iterator[tuple[LayerPlan, str]]:
    """(first layer of a group, backend that was refused for it) of the answer, if there is one."""
    try:
        groups = answer_question(question).groups
    except SpecError:
        return  # a tp that does not divide
    for group in groups:
        yield from ((group.first, name) for name in group.first.reasons)


@given(QUESTIONS)
@settings(max_examples=60)
def test_every_change_flips_the_decision_when_it_is_made(question: Question):
    for entry, name in refused_backends(question):
        for change in changes(question, entry, name):
            assert entry.backend != name
            after = answer_question(change.question).layers[entry.layer.index]
            assert after.backend == name == change.backend
            assert after.layer.index == entry.layer.index


@given(QUESTIONS)
@settings(max_examples=60)
def test_another_gpu_is_named_only_if_it_gets_the_backend_with_nothing_else_changed(question: Question):
    for entry, name in refused_backends(question):
        named = other_targets(question, entry, name)
        if not any(r.code == "arch" for r in entry.reasons[name]):
            assert named == ()
            continue
        for arch, target in targets().items():
            after = answer_question(replace(question, target=target)).layers[entry.layer.index]
            assert (after.backend == name) == (arch in named)


def test_another_gpu_is_no_advice_where_more_stands_against_it():
    for command, advice in (
        ("qwen3-next-80b-a3b --target gfx942", "no single change"),
        ("qwen3-32b --target gfx942", "another GPU: gfx950"),
        ("qwen3-32b --target gfx1100", "another GPU: sm_80, sm_86, sm_89, sm_90, sm_100, sm_120"),
    ):
        for form in ("table", "markdown", "html"):
            assert advice in explain(f"{command} --format {form} --width 400")[1], (command, form)
    for form in ("table", "markdown", "html"):
        assert "another GPU" not in explain(f"qwen3-next-80b-a3b --target gfx942 --format {form}")[1]


# (question, backend, the change that must come first)
HELP = [
    ("qwen3-32b --target gfx950 --block-size 48", "flydsl_gfx950", "--block-size 32"),
    ("qwen3-32b --target gfx950 --preset k8v4", "flydsl_gfx950", "--preset"),
    ("llama-3.1-8b --target sm_90 --deny triton_soa", "triton_soa", "without --deny"),
    ("llama-3.1-8b --target gfx942 --block-size 24 --force triton_soa", "triton_soa", "--block-size 16"),
    ("qwen3-32b --target gfx950 --dtype fp32 --force triton_soa", "triton_soa", "--dtype bf16"),
    ("llama-3.1-8b --target sm_90 --force triton_aos", "triton_soa", "without --force"),
    ("llama-3.1-8b --target gfx942 --deny flydsl_gfx942", "flydsl_gfx942", "without --deny"),
]


@pytest.mark.parametrize(("command", "name", "how"), HELP)
def test_the_smallest_change(command: str, name: str, how: str):
    doc = document(command)
    group = next(g for g in doc["groups"] if g["role"] in ("quantized", "refused"))
    refused = [r for r in group["refused"] if r["backend"] == name]
    assert refused[0]["change"]["how"].startswith(how)


def test_flags_that_are_suggested_work_on_the_command_line():
    for command in (
        "qwen3-32b --target gfx950 --block-size 48",
        "smollm2-135m --target gfx942 --dtype fp32 --protect 0",
    ):
        doc = document(command)
        for group in doc["groups"]:
            for refused in group["refused"]:
                for change in filter(None, [refused["change"], *refused["other_changes"]]):
                    if not change["how"].startswith("--"):
                        continue
                    again = document(f"{command} {change['how']}")
                    served = next(g for g in again["groups"] if group["layers"][0] in g["layers"])
                    assert refused["backend"] in (served["backend"], served["planned"])


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_a_change_of_preset_says_what_it_does_to_the_cache():
    doc = document("qwen3-32b --target gfx950 --preset k8v4")
    change = inner(doc)["refused"][0]["change"]
    assert change["to"] == NC4
    assert change["cache_bytes_ratio"] == pytest.approx(134 / 196, abs=1e-4)
    assert change["text"].endswith("(cache -32%)")


def test_padding_heads_is_found():
    doc = document(f"{_odd_model()} --target gfx942 --protect 0")
    (group,) = doc["groups"]
    change = next(r for r in group["refused"] if r["backend"] == "triton_soa")["change"]
    assert (change["kind"], change["from"], change["to"]) == ("pad_heads", 72, 80)
    padded = document(f"{_odd_model()} --target gfx942 --protect 0 --pad-heads 80")
    assert padded["groups"][0]["backend"] == "triton_soa"


_FOLDER = tempfile.TemporaryDirectory(prefix="turboquant-")  # removed when the process ends


def _odd_model() -> str:
    path = Path(_FOLDER.name) / "odd.yaml"
    path.write_text("layers: [{count: 6, num_heads: 16, num_kv_heads: 4, head_size: 72}]")
    return str(path)


def test_environment_variables_are_named_as_the_change(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TURBOQUANT_ROCM_DENY", "triton_soa")
    doc = document("llama-3.1-8b --target sm_90")
    assert doc["policy"]["variables"] == ["TURBOQUANT_ROCM_DENY"]
    refused = next(r for r in inner(doc)["refused"] if r["backend"] == "triton_soa")
    assert refused["change"]["how"] == "unset TURBOQUANT_ROCM_DENY"


def test_a_missing_package_is_named_as_the_change():
    question = Question(
        load_model("qwen3-32b"),
        get_target("gfx950"),
        get_preset(NC4),
        policy=Policy(planned=True),
        environment=Environment({"flydsl": "flydsl 0.4.2"}),
    )
    entry = answer_question(question).layers[5]
    assert entry.backend == "triton_soa"
    first = next(iter(changes(question, entry, "flydsl_gfx950")))
    assert (first.kind, first.old, first.how) == ("package", "flydsl 0.4.2", "install flydsl>=0.5,<0.6")


# ---- what a plan adds to the decisions ------------------------------------------------------------------


def roles(answer) -> dict[Role, list[int]]:
    found: dict[Role, list[int]] = {}
    for entry in answer.layers:
        found.setdefault(entry.role, []).append(entry.layer.index)
    return found


def test_boundary_protection():
    assert roles(ask("llama-3.1-8b", "gfx942"))[Role.NATIVE] == [0, 1, 30, 31]
    assert Role.NATIVE not in roles(ask("llama-3.1-8b", "gfx942", protect=0))
    assert roles(ask("llama-3.1-8b", "gfx942", protect=1))[Role.NATIVE] == [0, 31]
    hybrid = roles(ask("jamba-1.5-mini", "gfx942"))
    assert Role.NATIVE not in hybrid
    assert hybrid[Role.QUANTIZED] == [4, 12, 20, 28]
    # Asked for, it counts the layers that have a cache.
    assert roles(ask("jamba-1.5-mini", "gfx942", protect=1))[Role.NATIVE] == [4, 28]


def test_boundary_protection_can_cover_everything_and_then_warns():
    tiny = ModelSpec("tiny", tuple(LayerSpec(i, 8, 1, 128) for i in range(4)))
    answer = plan(tiny, get_target("gfx942"), policy=Policy())
    assert set(roles(answer)) == {Role.NATIVE}
    assert "all_protected" in dict(answer.warnings)
    assert answer.compression == 1


def test_skipped_layers():
    answer = ask("gpt-oss-120b", "gfx942", skip=["sliding", 3])
    native = roles(answer)[Role.NATIVE]
    assert 3 in native
    assert set(range(0, 36, 2)) <= set(native)
    doc = document("gpt-oss-120b --target gfx942 --skip-layers full,4-6,-1")
    assert {"skipped on request", "boundary protection"} == {
        g["reason"] for g in doc["groups"] if g["role"] == "native"
    }


def test_layers_that_share_a_cache_follow_its_owner():
    layers = [LayerSpec(i, 8, 1, 128) for i in range(4)]
    layers += [LayerSpec(4, 8, 1, 128, kv_shared_with=0), LayerSpec(5, 8, 1, 128, kv_shared_with=2)]
    answer = plan(ModelSpec("shared", tuple(layers)), get_target("gfx942"), policy=Policy(), protect=1)
    assert [entry.role for entry in answer.layers][4:] == [Role.NATIVE, Role.QUANTIZED]
    assert "layer 0" in answer.layers[4].reason
    assert answer.layers[5].block_bytes == 0
    assert answer.layers[5].decision.layout == answer.layers[2].decision.layout
    per_token = make_layout("soa", NC4, 128, 1, 16).bytes_per_token
    assert answer.content_bytes_per_token == pytest.approx(2 * per_token + 2 * 512)


def test_prefill_is_reported_apart():
    answer = ask("gpt-oss-120b", "gfx950", protect=0)
    entry = answer.layers[0]
    assert entry.backend == "triton_soa"
    assert entry.prefill.route == "triton_unified"
    assert [str(r) for r in entry.prefill.refused["aiter_flash"]] == ["sinks=yes (wants none)"]
    wide = ModelSpec("wide", tuple(LayerSpec(i, 8, 1, 512) for i in range(6)))
    entry = plan(wide, get_target("sm_90"), policy=Policy()).layers[0]
    assert "head_size=512 (wants 1 to 256)" in [str(r) for r in entry.prefill.refused["flash_attention_3"]]


@pytest.mark.parametrize("name", bundled_models())
@pytest.mark.parametrize("arch", ["gfx950", "gfx1100"])
def test_bytes_are_those_of_the_layouts(name: str, arch: str):
    answer = ask(name, arch)
    total = 0.0
    for entry in answer.layers:
        layer = entry.layer
        if entry.decision is not None:
            layout = make_layout(
                entry.decision.layout,
                NC4,
                layer.head_size,
                layer.num_kv_heads,
                16,
                value_head_size=layer.value_size,
            )
            assert entry.block_bytes == layout.block_stride
        total += entry.block_bytes / 16
    assert answer.content_bytes_per_token == pytest.approx(total)
    assert answer.bytes_per_token >= total - 1e-6
    assert answer.pages.waste == pytest.approx(1 - total / answer.bytes_per_token if total else 0, abs=1e-9)


def test_compression_over_the_whole_model():
    # 60 layers at 134 bytes and 4 at 512, of 8 heads; pages of 16 native tokens hold 48 quantized ones.
    answer = ask("qwen3-32b", "gfx942")
    assert answer.native_bytes_per_token == 64 * 8 * 512
    assert answer.content_bytes_per_token == 8 * (60 * 134 + 4 * 512)
    assert answer.pages.rule == "padded"
    assert answer.pages.blocks == (16, 48)
    assert answer.bytes_per_token == pytest.approx(4 * 65536 / 16 + 60 * 65536 / 48)
    assert answer.compression == pytest.approx(262144 / 98304)
    alone = ask("qwen3-32b", "gfx942", protect=0)
    assert alone.pages.rule == "equal"
    assert alone.compression == pytest.approx(512 / 134)


def test_page_suggestions_hold():
    answer = ask("qwen3-32b", "gfx942")
    native, soa = answer.pages.groups
    assert answer.pages.suggestions
    previous = answer.pages.waste
    for suggestion in answer.pages.suggestions:
        sizes = suggestion.block_sizes
        page = max(sizes[0] * native.block_bytes / 16, sizes[1] * soa.block_bytes / 16)
        total = 4 * page / sizes[0] + 60 * page / sizes[1]
        assert suggestion.waste == pytest.approx(1 - answer.content_bytes_per_token / total)
        assert suggestion.waste < previous
        previous = suggestion.waste
        assert set(suggestion.backends) == {"triton_soa"}


def test_the_servers_page_rule():
    def pages(*sizes: int):
        groups = [PageGroup(str(i), (i,), 16, size) for i, size in enumerate(sizes)]
        return unify(groups, lambda _: [])

    assert pages().rule == "none"
    assert pages(100, 100).rule == "equal"
    divisible = pages(100, 400)
    assert (divisible.rule, divisible.blocks, divisible.waste) == ("divisible", (64, 16), 0)
    padded = pages(300, 400)
    assert (padded.rule, padded.page_bytes, padded.blocks) == ("padded", 400, (16, 16))
    assert padded.waste == pytest.approx(1 / 8)
    (best,) = [s for s in padded.suggestions if s.waste == 0]
    assert best.block_sizes == (64, 48)


def test_memory_budget():
    small = ask("qwen3-32b", "gfx942", memory_gib=192, weights_gib=61)
    free = (192 - 61) * 2**30
    assert small.tokens == int((free - small.workspace_bytes) / small.bytes_per_token)
    assert small.native_tokens == int(free / 262144)
    assert small.tokens > 2.5 * small.native_tokens
    halved = ask("qwen3-32b", "gfx942", memory_gib=192, weights_gib=61, tp=2)
    assert halved.native_tokens == int((192 - 30.5) * 2**30 / 131072)
    doc = document("qwen3-32b --target gfx942 --memory 192GiB --weights 61GiB")
    assert doc["bytes"]["tokens"] == small.tokens
    with pytest.raises(SpecError, match="memory"):
        ask("qwen3-32b", "gfx942", memory_gib=60)


@pytest.mark.parametrize("name", sorted({*bundled_models()} - {"deepseek-v3"}))
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_80", "sm_90"])
@pytest.mark.parametrize("rows", [1, 4, 64])
def test_the_workspace_is_what_decode_takes_at_most(name: str, arch: str, rows: int):
    """Every batch and query length of up to that many rows, asked of the launchers themselves."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from turboquant_rocm.backends._flydsl.config import COLUMNS, DIM
    from turboquant_rocm.backends._flydsl.ops import _QUERY_WORDS, FlydslOps
    from turboquant_rocm.backends._triton.ops import DecodePlan
    from turboquant_rocm.backends._triton.schedule import schedule_size
    from turboquant_rocm.backends._triton.workspace import Workspace

    context = 1 << 17
    answer = ask(name, arch, rows=rows)
    units = get_target(arch).compute_units
    most = 0
    for decision in {d.backend + str(d.layer.kind): d for d in answer.decisions}.values():
        layer = decision.layer
        layout = make_layout(
            decision.layout, decision.preset, layer.head_size, layer.num_kv_heads, decision.block_size
        )
        backend = get_backend(decision.backend)
        fly = decision.backend.startswith("flydsl_")
        launcher: Any = FlydslOps(decision, layout) if fly else DecodePlan(decision, layout)
        for length in range(1, rows + 1):
            for batch in range(1, rows // length + 1):
                heads = batch * length * layer.num_heads
                if fly:
                    assert backend.max_columns == COLUMNS
                    groups = -(-length // (COLUMNS // layer.gqa_ratio)) if length > 1 else 1
                    splits = launcher._splits(batch * groups, context, units)
                    needed = Workspace.needed(heads, _QUERY_WORDS, splits, DIM)
                else:
                    columns = launcher.columns(length)
                    at_once = launcher.tuned(columns)["programs_per_cu"]
                    assert columns <= backend.max_columns or columns * at_once <= backend.max_columns * 16
                    splits = launcher.splits(batch, context, length, units)
                    needed = Workspace.needed(*launcher.scratch(heads, splits))
                    pieces = launcher.cut(batch, context, splits, length, units)
                    if pieces:
                        cut = launcher.scratch(heads, pieces // batch, schedule_size(pieces, batch))
                        needed = max(needed, Workspace.needed(*cut))
                most = max(most, needed)
    assert 0 < most <= answer.workspace_bytes


@pytest.mark.parametrize("arch", ["gfx950", "sm_90"])
@pytest.mark.parametrize("rows", [130, 600, 1024])
def test_the_workspace_of_large_batches_that_are_cut(arch: str, rows: int):
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from turboquant_rocm.backends._triton.ops import DecodePlan
    from turboquant_rocm.backends._triton.schedule import schedule_size
    from turboquant_rocm.backends._triton.workspace import Workspace

    layer, target = layer_spec(128, 8, 4, "bf16"), get_target(arch)
    units = target.compute_units
    decision = Decision(layer, target, get_preset("4bit_nc"), 16, "triton_soa", "soa")
    plan = DecodePlan(decision, make_layout("soa", "4bit_nc", 128, 8, 16))
    most = 0
    for batch in range(2, rows + 1):
        pieces = plan.cut(batch, 8192, plan.splits(batch, 8192, 1, units), 1, units)
        numbers = schedule_size(pieces, batch) if pieces else 0
        asked = plan.scratch(batch * layer.num_heads, pieces // batch, numbers)
        most = max(most, Workspace.needed(*asked))
    assert plan.cut(rows, 8192, 1, 1, units) == 3 * rows
    assert 0 < most <= get_backend("triton_soa").workspace_bytes(layer, rows, units)


def test_the_reference_needs_no_workspace():
    assert get_backend("torch_reference").workspace_bytes(LayerSpec(0, 64, 8, 128), 256, 304) == 0


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("qwen3-32b --target sm_80 --preset k8v4", "emulated_fp8"),
        ("qwen3-32b --target gfx1100 --preset k8v4", "emulated_fp8"),
        ("qwen3-32b --target gfx942 --preset k8v4", "fp8_format"),
        ("jamba-1.5-mini --target gfx942", "few_full_layers"),
        ("gemma-3-27b --target gfx942", "few_full_layers"),
        ("qwen3-next-80b-a3b --target gfx942", "hybrid_pages"),
        ("smollm2-135m --target gfx942 --preset 3bit_nc", "small_heads"),
        ("qwen3-4b --target gfx942 --protect 0", "unprotected_ends"),
        ("qwen3-4b --target gfx942", "warmup"),
        ("qwen3-4b --target gfx942", "assumed"),
        ("qwen2.5-7b --target gfx942", "model"),
    ],
)
def test_warnings(command: str, code: str):
    assert code in [w["code"] for w in document(command)["warnings"]]


def test_warnings_are_not_raised_for_nothing():
    quiet = {w["code"] for w in document("qwen3-4b --target sm_90 --preset k8v4")["warnings"]}
    assert quiet == {"padding", "warmup", "assumed"}


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1], "0-1"),
        ([0, 2], "0, 2"),
        ([0, 2, 4], "0-4 step 2"),
        ([0, 1, 2, 5, 9, 13, 14], "0-2, 5-13 step 4, 14"),
    ],
)
def test_ranges(indices: list[int], text: str):
    assert ranges(indices) == text


# ---- formats --------------------------------------------------------------------------------------------

KINDS = {
    "plan": "gemma-3-27b --target gfx950",
    "refused": "deepseek-v3 --target gfx942",
    "hybrid": "jamba-1.5-mini --target sm_90 --memory 192GiB",
    "policy": "qwen3-32b --target gfx942 --force triton_aos --expect triton_aos",
    "one-model": "qwen3-32b --all-targets",
    "matrix": "--all-targets",
    "support": "",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMATS)
def test_every_document_in_every_format(kind: str, form: str):
    _, out, _ = explain(f"{KINDS[kind]} --format {form}")
    if form == "json":
        VALIDATOR.validate(json.loads(out))
    elif form == "html":
        assert out.startswith("<!doctype html>")
        assert "http" not in out
        assert "<script" not in out
    asked = {"plan": ("flydsl_gfx950", "triton_soa"), "hybrid": ("triton_soa",), "policy": ("triton_aos",)}
    for name in asked.get(
        kind, ("triton_soa", "triton_aos") if "targets" in KINDS[kind] else [b.name for b in AUTOMATIC]
    ):
        assert name in out


def test_formats_say_the_same():
    doc = document("gpt-oss-120b --target gfx950")
    texts = [
        explain(f"gpt-oss-120b --target gfx950 --format {form} --width 400")[1]
        for form in ("table", "markdown", "html")
    ]
    for group in doc["groups"]:
        for refused in group["refused"]:
            for reason in refused["reasons"]:
                assert all(reason["text"] in text for text in texts)


@pytest.mark.parametrize("name", bundled_models())
def test_bundled_models_against_the_schema(name: str):
    for arch in ("gfx950", "gfx1100", "cpu"):
        document(f"{name} --target {arch}")


def test_markup_in_names_stays_text(tmp_path: Path):
    path = tmp_path / "x.yaml"
    path.write_text(
        "name: '<b>|`x`[red]'\nlayers: [{count: 6, num_heads: 8, num_kv_heads: 1, head_size: 128}]\n"
    )
    for form in FORMATS:
        _, out, _ = explain(f"{path} --target gfx942 --format {form}")
        assert ("&lt;b&gt;" if form == "html" else "`x`[red]") in out
        if form in ("html", "markdown"):
            assert "<b>" not in out


def test_output_file(tmp_path: Path):
    file = tmp_path / "report.html"
    status, out, _ = explain(f"qwen3-32b --target gfx942 --format html --output {file}")
    assert (status, out) == (0, "")
    assert file.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_tensor_parallel_size_must_divide_every_layer():
    """At tp 4 the first layer would have 16 query heads on one KV head, which FlyDSL takes."""
    first = LayerSpec(0, 64, 2, 128)

    def sizes(other: LayerSpec) -> list[int]:
        question = Question(
            ModelSpec("some", (first, other)), get_target("gfx950"), get_preset("4bit_nc"), protect=0
        )
        entry = answer_question(question).layers[0]
        return [change.new for change in changes(question, entry, "flydsl_gfx950") if change.kind == "tp"]

    assert sizes(replace(first, index=1)) == [4, 8, 16, 32, 64]
    assert sizes(LayerSpec(1, 63, 7, 128)) == []


def test_layers_are_counted_from_the_end():
    doc = document("llama-3.1-8b --target gfx942 --protect 0 --skip-layers -1")
    assert [g["layers"] for g in doc["groups"] if g["role"] == "native"] == [[31]]


# ---- exit codes and hostile input -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("qwen3-32b --target gfx942", 0),
        ("qwen3-32b --target gfx942 --expect flydsl_gfx942", 0),
        ("jamba-1.5-mini --target sm_90 --expect triton_soa", 0),
        ("qwen3-32b --target gfx942 --expect triton_aos", 2),
        ("qwen3-32b --target gfx1100 --expect triton_soa", 2),
        ("qwen3-32b --target gfx942 --protect 40 --expect triton_soa", 2),
        ("deepseek-v3 --target gfx942", 1),
        ("llama-4-scout --target gfx942", 1),
        ("qwen3-32b --target cpu", 1),
        ("qwen3-32b --target cpu --force torch_reference", 0),
        ("qwen3-32b --target gfx942 --force flydsl_gfx950", 1),
        ("--all-targets", 0),
        ("deepseek-v3 --all-targets", 0),
        ("", 0),
    ],
)
def test_exit_status(command: str, status: int, capsys: pytest.CaptureFixture):
    assert main(shlex.split(command)) == status
    captured = capsys.readouterr()
    assert captured.out
    assert bool(captured.err) == (status == 2)


def test_refused_layers_come_before_an_expectation_in_the_exit_status():
    status, _, notes = explain("deepseek-v3 --target gfx942 --expect triton_soa")
    assert status == 1
    assert notes.startswith("expected triton_soa everywhere: 57 layers")


@pytest.mark.usefixtures("without_flydsl_kernels")
def test_a_planned_backend_does_not_meet_an_expectation():
    status, _, notes = explain("qwen3-32b --target gfx950 --expect flydsl_gfx950")
    assert status == 2
    assert "60 layers" in notes


def config(**changes: object) -> str:
    base = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8}
    return json.dumps({k: v for k, v in {**base, **changes}.items() if v is not None})


HOSTILE = {
    "missing fields": (config(num_attention_heads=None), "", "num_attention_heads"),
    "strings for numbers": (config(num_hidden_layers="6"), "", "num_hidden_layers"),
    "heads not divisible": (config(num_key_value_heads=3), "", "num_attention_heads"),
    "hidden not divisible": (config(num_attention_heads=7), "", "hidden_size"),
    "no layers": (config(num_hidden_layers=0), "", "num_hidden_layers"),
    "auto heads": (config(num_key_value_heads="auto"), "", "num_key_value_heads"),
    "50 MB": (" " * (50 << 20), "", "model"),
    "no JSON": ("{", "", "model.json"),
    "no mapping": ("[]", "", "model"),
    "unknown preset": (config(), "--preset 5bit", "preset"),
    "auto preset": (config(), "--preset auto", "preset"),
    "block size 17": (config(), "--block-size 17", "block_size"),
    "block size auto": (config(), "--block-size auto", "block_size"),
    "block size 0": (config(), "--block-size 0", "block_size"),
    "block size huge": (config(), "--block-size 99999999999999999999", "block_size"),
    "tp auto": (config(), "--tp auto", "tp"),
    "tp 3": (config(), "--tp 3", "tp"),
    "tp 0": (config(), "--tp 0", "tp"),
    "unknown target": (config(), "--target mi300", "target"),
    "auto target": (config(), "--target auto", "target"),
    "unknown backend": (config(), "--force magic", "backend"),
    "unknown denied": (config(), "--deny magic", "backend"),
    "unknown expected": (config(), "--expect magic", "backend"),
    "unknown policy": (config(), "--policy magic", "policy"),
    "memory without unit": (config(), "--memory lots", "memory"),
    "memory negative": (config(), "--memory=-3GiB", "memory"),
    "memory below weights": (config(), "--memory 1GiB --weights 2GiB", "memory"),
    "weights": (config(), "--memory 9GiB --weights none", "weights"),
    "skip beyond": (config(), "--skip-layers 6", "skip_layers"),
    "skip words": (config(), "--skip-layers first", "skip_layers"),
    "protect": (config(), "--protect some", "protect"),
    "pad": (config(), "--pad-heads 9999", "pad_heads"),
    "dtype": (config(), "--dtype int8", "dtype"),
    "format": (config(), "--format pdf", "format"),
    "width": (config(), "--width 3", "width"),
    "rows": (config(), "--rows 0", "rows"),
    "no backend forced": (config(), "--force ''", "backend"),
    "no policy": (config(), "--policy ''", "policy"),
    "digits of another script": (config(), "--block-size \u0661\u0666", "block_size"),
    "sizes of another script": (config(), "--memory \u0663GiB", "memory"),
    "layers of another script": (config(), "--skip-layers \u0663", "skip_layers"),
    "more layers than there are": (config(num_hidden_layers=1025), "", "num_hidden_layers"),
    "unknown flag": (config(), "--magic", "--magic"),
    "two targets": (config(), "--all-targets", "--all-targets"),
    "output": (config(), "--output /no/such/folder/x", "--output"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_input_exits_3_and_names_the_field(name: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    content, flags, field = HOSTILE[name]
    file = tmp_path / "model.json"
    file.write_text(content)
    target = "" if "--target" in flags else "--target gfx942"
    try:
        status = main([str(file), *shlex.split(f"{target} {flags}")])
    except SystemExit as ended:
        status = ended.code
    captured = capsys.readouterr()
    assert status == 3
    assert field in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    "command",
    [
        "no-such-model --target gfx942",
        "--target gfx942",
        "--expect triton_soa",
        "--all-targets --memory 9GiB",
    ],
)
def test_hostile_commands(command: str, capsys: pytest.CaptureFixture):
    assert main(shlex.split(command)) == 3
    assert capsys.readouterr().err.startswith("error: ")


@given(
    st.lists(
        st.sampled_from(
            [
                "--target",
                "--preset",
                "--block-size",
                "--tp",
                "--force",
                "--memory",
                "--skip-layers",
                "--format",
            ]
        )
        | st.text(max_size=6),
        max_size=6,
    )
)
@settings(max_examples=150)
def test_no_command_line_gives_a_traceback(words: list[str]):
    words = [w for w in words if w != "--output"]
    try:
        status, _, _ = run(["qwen3-4b", *words])
    except SpecError:
        return
    except SystemExit as ended:
        status = ended.code  # of argparse: --help, or bad input
    assert status in (0, 1, 2, 3)


# ---- as a process ---------------------------------------------------------------------------------------


def spawn(arguments: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT, **options
    )


def test_the_command_as_users_run_it():
    done = spawn(["-m", "turboquant_rocm.explain", "qwen3-32b", "--target", "gfx950"])
    assert done.returncode == 0
    assert "2-61" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("arguments", [["qwen3-32b", "--target", "gfx950"], ["--all-targets"], []])
def test_explain_imports_no_framework(arguments: list[str]):
    code = (
        "import sys\nfrom turboquant_rocm.explain import run\n"
        f"run({arguments!r})\n"
        "print(sorted({'torch', 'triton', 'flydsl', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert spawn(["-c", code]).stdout.strip() == "[]"


def test_an_80_layer_model_takes_less_than_half_a_second():
    """A fresh process, imports and all. CPU time always; wall time too where nobody else uses the machine."""
    import resource

    cpu = wall = float("inf")
    for _ in range(3):
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = spawn(
            ["-m", "turboquant_rocm.explain", "configs/models/llama-3.1-70b.yaml", "--target", "gfx950"]
        )
        wall = min(wall, time.monotonic() - started)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0
        assert "80 layers on gfx950" in done.stdout
        cpu = min(cpu, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert cpu < 0.5
    assert wall < 0.5 or os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1)


def test_a_closed_pipe_is_no_error():
    shell = f"{shlex.quote(sys.executable)} -m turboquant_rocm.explain --all-targets | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", shell], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert "Traceback" not in done.stderr


def test_env(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("TRITON_HIP_USE_ASYNC_COPY", "1")
    doc = document("--env")
    assert [p["import"] for p in doc["packages"]] == ["triton", "torch", "flydsl"]
    values = {v["name"]: v["value"] for v in doc["variables"]}
    assert values["TRITON_HIP_USE_ASYNC_COPY"] == "1"
    assert "TURBOQUANT_ROCM_FORCE" in values
    _, text, _ = explain("--env")
    assert "owned by" in text
    both = document("qwen3-4b --target gfx942 --env")
    assert both["environment"]["python"]
    for form in ("table", "markdown", "html"):
        assert "TRITON_HIP_USE_ASYNC_COPY" in explain(f"qwen3-4b --target gfx942 --env --format {form}")[1]


def test_env_names_every_owner_of_triton(monkeypatch: pytest.MonkeyPatch):
    import importlib.metadata

    found = {"triton": "3.9.0", "pytorch-triton-rocm": "3.6.0"}

    def version(name: str) -> str:
        if name in found:
            return found[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    doc = document("--env")
    triton = doc["packages"][0]
    assert triton["owners"] == found
    assert triton["conflict"]
    assert "uninstall all but one" in explain("--env")[1]


def test_local_target_probes(monkeypatch: pytest.MonkeyPatch):
    from turboquant_rocm import packages, target

    here = replace(get_target("gfx950"), local=True)
    monkeypatch.setattr(target, "detect", lambda: here)
    monkeypatch.setattr(packages, "probe", lambda name, *_: "not installed" if name == "flydsl" else None)
    group = inner(document("qwen3-32b --target local"))
    codes = [r["code"] for r in group["refused"][0]["reasons"]]
    assert "package" in codes
    assert group["refused"][0]["change"]["how"] == "install flydsl>=0.5,<0.6"


def test_options_are_listed_with_those_that_serve_them():
    """From the declarations: what is around the kernels works with all, rotated values with those that say so."""
    _, text, _ = explain("--format json")
    listed = {option["option"]: option for option in json.loads(text)["options"]}
    assert list(listed) == ["recent=N", "first=N", "key_mean", "key_scale", "rotated_values"]
    ready = [b.name for b in backends() if b.ready]
    for name in ("recent=N", "first=N", "key_mean", "key_scale"):
        assert listed[name]["backends"] == ready
        assert {"code": "window", "wants": "none"} in listed[name]["layer"]
    assert listed["rotated_values"]["backends"] == ["triton_rotated", "torch_reference"]
    for name in ready:
        served = name in listed["rotated_values"]["backends"]
        request = Request(
            LayerSpec(0, 16, 2, 128), get_target("gfx942"), get_preset("4bit_nc+rotated_values"), 16
        )
        codes = {r.code for r in get_backend(name).refusals(request)}
        assert served == (not codes & {Code.ROTATED_VALUES, Code.SKETCH}), name
