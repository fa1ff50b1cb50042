"""decide, policies, logging, probes of packages, and the promise that what is planned is what runs."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turboquant_rocm import (
    Code,
    Decision,
    IneligibleError,
    LayerSpec,
    Policy,
    SpecError,
    decide,
    preset_names,
)
from turboquant_rocm import dispatch as dispatch_module
from turboquant_rocm.backends import backends, get_backend
from turboquant_rocm.dispatch import ENVIRONMENT_VARIABLES, all_refusals, resolve
from turboquant_rocm.eligibility import Request
from turboquant_rocm.modelspec import load_model
from turboquant_rocm.packages import Environment, probe, satisfies
from turboquant_rocm.planning import Question, Role, answer_question, plan
from turboquant_rocm.presets import get_preset
from turboquant_rocm.spec import AttentionKind, Dtype, ModelSpec
from turboquant_rocm.target import get_target, target_names

NC4 = "turboquant_4bit_nc"
GQA8 = LayerSpec(0, 64, 8, 128)
PLANNED = Policy(planned=True)


def layers() -> st.SearchStrategy[LayerSpec]:
    """Any layer, weighted towards those that something serves."""

    @st.composite
    def build(draw: st.DrawFn) -> LayerSpec:
        kind = draw(
            st.sampled_from([AttentionKind.FULL] * 4 + [AttentionKind.SLIDING] * 2 + list(AttentionKind))
        )
        return LayerSpec(
            index=0,
            num_kv_heads=(kv := draw(st.sampled_from([1, 2, 3, 8]))),
            num_heads=kv * draw(st.sampled_from([1, 3, 4, 6, 8, 16, 33])),
            head_size=draw(st.sampled_from([64, 72, 80, 96, 128, 192, 256, 576])),
            kind=kind,
            window=draw(st.sampled_from([1, 128, 4096])) if kind is AttentionKind.SLIDING else None,
            chunk=8192 if kind is AttentionKind.CHUNKED else None,
            sinks=draw(st.booleans()),
            soft_cap=draw(st.sampled_from([None, None, 30.0])),
            position_bias=draw(st.sampled_from([None, None, None, "alibi"])),
            dtype=draw(st.sampled_from([*Dtype, Dtype.BF16])),
        )

    return build()


TARGETS = st.sampled_from([get_target(name) for name in target_names()])
PRESETS = st.sampled_from([get_preset(name) for name in preset_names()])
BLOCKS = st.sampled_from([8, 16, 24, 32, 64, 528, 784, 1568])
NAMES = st.sampled_from([b.name for b in backends()])
POLICIES = st.one_of(
    st.just(Policy()),
    st.builds(
        Policy,
        force=st.none() | NAMES,
        deny=st.frozensets(NAMES, max_size=2),
        allow_fallback=st.booleans(),
        layout=st.sampled_from([None, None, "soa", "aos"]),
        require=st.none() | st.frozensets(NAMES, min_size=1),
    ),
)


@given(layers(), TARGETS, PRESETS, BLOCKS, POLICIES)
@settings(max_examples=300)
def test_the_decision_is_the_first_eligible_backend_and_names_all_reasons_before_it(
    layer, target, preset, block, policy
):
    request = Request(layer, target, preset, block)
    everything = all_refusals(request, policy)
    eligible = [name for name, why in everything.items() if not why]
    if not eligible:
        with pytest.raises(IneligibleError) as caught:
            resolve(request, policy)
        assert caught.value.refused == everything
        for name, why in everything.items():
            assert name in str(caught.value)
            assert all(str(refusal) in str(caught.value) for refusal in why)
        return
    decision = resolve(request, policy)
    assert decision.backend == eligible[0]
    order = list(everything)
    assert list(decision.refused) == order[: order.index(decision.backend)]
    assert all(decision.refused.values())
    backend = get_backend(decision.backend)
    assert backend.ready
    assert backend.automatic or policy.force == backend.name
    # A policy only narrows: what it chose is eligible without it.
    assert not backend.refusals(request)


@given(layers(), TARGETS, PRESETS, BLOCKS)
@settings(max_examples=100)
def test_what_is_planned_is_what_bind_runs(layer, target, preset, block):
    pytest.importorskip("torch")
    from turboquant_rocm import bind

    model = ModelSpec("random", tuple(replace(layer, index=i) for i in range(6)))
    answer = answer_question(Question(model, target, preset, block))
    for entry in answer.layers:
        if entry.role is not Role.QUANTIZED:
            continue
        alone = decide(entry.layer, target, preset, block, Policy())
        assert alone == entry.decision
        if not _kernels_import(alone):
            continue
        bound = bind(alone)
        assert bound.backend == entry.backend
        assert bound.layout.name == entry.decision.layout
        assert bound.layout.block_stride == entry.block_bytes
        assert isinstance(bound.ops, get_backend(entry.backend).load_ops())


def _kernels_import(decision: Decision) -> bool:
    try:
        get_backend(decision.backend).load_ops()
    except ImportError:  # no triton on this machine
        return False
    return True


def test_priority():
    order = [b.name for b in backends() if b.automatic]
    assert order == ["flydsl_gfx950", "flydsl_gfx942", "triton_soa", "triton_aos", "triton_rotated"]


def test_reference_is_never_chosen_by_itself():
    with pytest.raises(IneligibleError) as caught:
        decide(GQA8, get_target("cpu"), NC4, 16, Policy())
    assert "torch_reference" not in caught.value.refused
    assert (
        decide(GQA8, get_target("cpu"), NC4, 16, Policy(force="torch_reference")).backend == "torch_reference"
    )


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("gqa", range(1, 17))
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_flydsl_profile(arch: str, gqa: int, block: int):
    """Chosen with each feature and with all of them; nothing but the architecture stands against the other one."""
    features = {"kind": "sliding", "window": 77, "sinks": True, "soft_cap": 30.0, "dtype": "fp16"}
    for more in ({}, {"sinks": True}, {"kind": "sliding", "window": 1}, {"soft_cap": 50.0}, features):
        layer = LayerSpec(0, 4 * gqa, 4, 128, **more)
        decision = decide(layer, get_target(arch), NC4, block, Policy())
        assert decision.backend == f"flydsl_{arch}"
        refused = {name: [r.code for r in why] for name, why in decision.refused.items()}
        assert refused == ({} if arch == "gfx950" else {"flydsl_gfx950": [Code.ARCH]})


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"num_heads": 8 * 17}, Code.GQA_RATIO),
        ({"head_size": 64, "value_head_size": 128}, Code.HEAD_SIZE),
        ({"value_head_size": 64}, Code.VALUE_HEAD_SIZE),
        ({"kind": "chunked", "chunk": 8192}, Code.LAYER_KIND),
        ({"position_bias": "alibi"}, Code.POSITION_BIAS),
        ({"dtype": "fp32"}, Code.DTYPE),
        ({"preset": "turboquant_k8v4"}, Code.KEY_BITS),
        ({"preset": "turboquant_3bit_nc"}, Code.VALUE_BITS),
        ({"block_size": 48}, Code.BLOCK_SIZE),
        ({"block_size": 256}, Code.BLOCK_SIZE),
        ({"arch": "gfx90a"}, Code.ARCH),
    ],
)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_flydsl_refuses_what_is_outside_its_profile(arch: str, change: dict, code: Code):
    layer = {k: v for k, v in change.items() if k not in ("preset", "block_size", "arch")}
    request = Request(
        replace(GQA8, **layer),
        get_target(change.get("arch", arch)),
        get_preset(change.get("preset", NC4)),
        change.get("block_size", 16),
    )
    assert [r.code for r in get_backend(f"flydsl_{arch}").refusals(request)] == [code]


def test_a_planned_backend_is_never_run(monkeypatch: pytest.MonkeyPatch):
    from turboquant_rocm.backends import _REGISTRY, Backend

    ghost = Backend("ghost", 999, "soa", (), "_nowhere:Nothing", ready=False)
    monkeypatch.setitem(_REGISTRY, "ghost", ghost)
    decision = decide(GQA8, get_target("gfx942"), NC4, 16, Policy())
    assert decision.backend == "flydsl_gfx942"
    assert [r.code for r in decision.refused["ghost"]] == [Code.KERNELS]
    assert decision.planned == "ghost"
    assert decide(GQA8, get_target("gfx942"), NC4, 16, PLANNED).backend == "ghost"
    with pytest.raises(IneligibleError, match="kernels=planned"):
        decide(GQA8, get_target("gfx942"), NC4, 16, Policy(force="ghost"))
    with pytest.raises(SpecError, match="ghost"):
        ghost.load_ops()


# ---- policies -------------------------------------------------------------------------------------------


def test_reasons_of_the_forced_backend_come_first():
    with pytest.raises(IneligibleError) as error:
        decide(GQA8, get_target("cpu"), NC4, 16, Policy(force="triton_aos"))
    assert next(iter(error.value.refused)) == "triton_aos"
    assert len(error.value.refused) > 1


def test_forced_and_ineligible_lists_every_reason():
    bad = replace(GQA8, num_heads=8 * 17, head_size=64, value_head_size=128)
    with pytest.raises(IneligibleError) as caught:
        decide(bad, get_target("gfx942"), NC4, 48, Policy(force="flydsl_gfx950"))
    text = str(caught.value)
    for part in ("arch=gfx942", "gqa_ratio=17", "block_size=48", "head_size=64", "flydsl_gfx950"):
        assert part in text
    assert list(caught.value.refused) == ["flydsl_gfx950"]


def test_nothing_eligible_lists_every_backend():
    with pytest.raises(IneligibleError) as caught:
        decide(replace(GQA8, position_bias="alibi"), get_target("gfx942"), NC4, 16, Policy())
    assert set(caught.value.refused) == {b.name for b in backends() if b.automatic}
    assert str(caught.value).count("position_bias=alibi") == len(caught.value.refused) == 5


def test_deny_narrows():
    decision = decide(GQA8, get_target("sm_90"), NC4, 16, Policy(deny={"triton_soa"}))
    assert decision.backend == "triton_aos"
    assert [str(r) for r in decision.refused["triton_soa"]] == [
        "policy=denied (wants triton_soa not denied by the policy)"
    ]


def test_no_fallback():
    strict = Policy(allow_fallback=False)
    assert decide(GQA8, get_target("gfx942"), NC4, 16, strict).backend == "flydsl_gfx942"
    with pytest.raises(IneligibleError) as caught:
        decide(replace(GQA8, num_heads=8 * 17), get_target("gfx942"), NC4, 16, strict)
    assert [r.code for r in caught.value.refused["flydsl_gfx942"]] == [Code.GQA_RATIO]
    for slower in ("triton_soa", "triton_aos"):
        assert [r.code for r in caught.value.refused[slower]] == [Code.POLICY]
    # A forced backend is asked for, so it is no fallback.
    forced = Policy(allow_fallback=False, force="triton_aos")
    assert decide(GQA8, get_target("gfx942"), NC4, 16, forced).backend == "triton_aos"
    # Where nothing faster is built for the target, its best one is no fallback.
    assert decide(GQA8, get_target("sm_90"), NC4, 16, strict).backend == "triton_soa"
    assert decide(GQA8, get_target("gfx1100"), NC4, 16, strict).backend == "triton_aos"


def test_require_and_layout():
    assert decide(GQA8, get_target("gfx942"), NC4, 16, Policy(layout="aos")).backend == "triton_aos"
    assert decide(GQA8, get_target("gfx942"), NC4, 16, Policy(require={"triton_aos"})).backend == "triton_aos"
    with pytest.raises(IneligibleError):
        decide(GQA8, get_target("gfx942"), NC4, 16, Policy(require={"flydsl_gfx950"}))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Policy(force="no_such"), "backend"),
        (lambda: Policy(deny={"no_such"}), "backend"),
        (lambda: Policy(deny="triton_soa"), "policy deny"),
        (lambda: Policy(layout="row"), "policy layout"),
        (lambda: Policy.named("no_such"), "policy"),
        (lambda: Policy.named("../targets"), "policy"),
        (lambda: Policy.from_mapping({"forse": "x"}), "policy"),
        (lambda: Policy.from_environment({"TURBOQUANT_ROCM_FORCE": "no_such"}), "backend"),
    ],
)
def test_wrong_policies_name_their_field(make, field: str):
    with pytest.raises(SpecError) as caught:
        make()
    assert caught.value.field == field


def test_named_policies():
    assert Policy.named("default") == Policy()
    assert not Policy.named("strict").allow_fallback
    assert Policy.named("interop").layout == "aos"


def test_every_environment_variable_changes_a_policy():
    values = {
        "TURBOQUANT_ROCM_POLICY": "strict",
        "TURBOQUANT_ROCM_FORCE": "triton_aos",
        "TURBOQUANT_ROCM_DENY": "triton_soa, triton_aos",
        "TURBOQUANT_ROCM_REQUIRE": "triton_aos",
        "TURBOQUANT_ROCM_NO_FALLBACK": "1",
    }
    assert set(values) == set(ENVIRONMENT_VARIABLES)
    for name, value in values.items():
        policy = Policy.from_environment({name: value})
        assert policy != Policy()
        assert {variable for _, variable in policy.variables} == {name}
    assert Policy.from_environment({"TURBOQUANT_ROCM_NO_FALLBACK": "0"}) == Policy()


def test_decide_obeys_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TURBOQUANT_ROCM_DENY", "triton_soa")
    assert decide(GQA8, get_target("sm_90"), NC4, 16).backend == "triton_aos"
    assert decide(GQA8, get_target("sm_90"), NC4, 16, Policy()).backend == "triton_soa"


# ---- logging --------------------------------------------------------------------------------------------


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    dispatch_module._answers.clear()
    caplog.set_level(logging.INFO, logger="turboquant_rocm.dispatch")
    return caplog


def test_one_line_per_group_of_equal_decisions(log: pytest.LogCaptureFixture):
    plan(load_model("gpt-oss-120b"), get_target("gfx950"), policy=Policy())
    assert len(log.records) == 2  # sliding and full layers; boundary layers stay native
    text = log.records[0].getMessage()
    for part in (
        "2-32 step 2",
        "triton_soa",
        "gfx950",
        "block 16",
        "head_size=64 (wants 128)",
    ):
        assert part in text


def test_layers_that_share_a_cache_have_a_line_of_their_own(log: pytest.LogCaptureFixture):
    owners = [LayerSpec(i, 8, 1, 128) for i in range(4)]
    readers = [LayerSpec(4 + i, 8, 1, 128, kv_shared_with=owner) for i, owner in enumerate((0, 2, 2, 3))]
    model = ModelSpec("sharing", (*owners, *readers))
    for _ in range(2):  # and once only
        plan(model, get_target("gfx1100"), policy=Policy(), protect=1)
    lines = [record.getMessage() for record in log.records]
    # Layers 4 and 7 read caches that stay native, so nothing was decided for them.
    assert [line.split(" on gfx1100")[0] for line in lines] == [
        "sharing, layers 1-2: triton_aos (aos)",
        "sharing, layers 5-6: triton_aos (aos)",
    ]
    assert "layout aos" not in lines[0]
    assert "triton_soa: arch=gfx1100" in lines[1]
    assert "policy=layout soa (wants layout aos, as the cache that it reads has it)" in lines[1]
    assert all(record.levelno == logging.INFO for record in log.records)


def test_layers_that_share_a_refused_cache_have_no_line(log: pytest.LogCaptureFixture):
    layers = (*(LayerSpec(i, 8, 1, 100) for i in range(3)), LayerSpec(3, 8, 1, 100, kv_shared_with=1))
    answer = plan(ModelSpec("sharing", layers), get_target("gfx942"), policy=Policy(), protect=0)
    assert [str(entry.role) for entry in answer.layers] == ["refused"] * 3 + ["native"]
    (record,) = log.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("sharing, layers 0-2: no backend on gfx942")


def test_layers_decided_one_by_one_log_once_for_all(log: pytest.LogCaptureFixture):
    for index in range(80):
        decide(replace(GQA8, index=index), get_target("gfx942"), NC4, 16, Policy())
    assert len(log.records) == 1


def test_logged_again_only_when_the_answer_changes(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    local = replace(get_target("gfx942"), local=True)
    state = {"problem": None}
    monkeypatch.setattr("turboquant_rocm.packages.probe", lambda *_: state["problem"])
    for _ in range(3):
        decide(GQA8, local, NC4, 16, Policy())
    assert len(log.records) == 1
    state["problem"] = "import fails: OSError: libamdhip64.so"
    for _ in range(3):
        with pytest.raises(IneligibleError):
            decide(GQA8, local, NC4, 16, Policy())
    assert len(log.records) == 2
    assert "libamdhip64.so" in log.records[1].getMessage()
    state["problem"] = None
    decide(GQA8, local, NC4, 16, Policy())
    assert len(log.records) == 3


def test_questions_that_alternate_are_logged_once_each(log: pytest.LogCaptureFixture):
    for _ in range(3):
        for block in (16, 32):
            decide(GQA8, get_target("gfx942"), NC4, block, Policy())
    assert len(log.records) == 2


def test_the_oldest_answers_are_forgotten_first(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("turboquant_rocm.dispatch._REMEMBERED", 2)
    for block in (16, 32, 48, 48, 32):
        decide(GQA8, get_target("gfx942"), NC4, block, Policy())
    assert len(log.records) == 3
    decide(GQA8, get_target("gfx942"), NC4, 16, Policy())
    assert len(log.records) == 4


def test_the_workspace_is_that_of_the_neediest_layer():
    small, large = replace(GQA8, num_heads=8, num_kv_heads=1), replace(GQA8, index=1)

    def workspace(*layers: LayerSpec) -> int:
        numbered = tuple(replace(layer, index=i) for i, layer in enumerate(layers))
        return plan(ModelSpec("some", numbered), get_target("gfx942"), protect=0).workspace_bytes

    assert workspace(small) < workspace(large)
    assert workspace(small, large) == workspace(large, small) == workspace(large)


@pytest.mark.parametrize("code", ["head_size", "block_size", "gqa_ratio", "key_bits"])
def test_a_fallback_names_the_gate_that_failed_and_its_value(log: pytest.LogCaptureFixture, code: str):
    layer, block, preset = GQA8, 16, NC4
    if code == "block_size":
        block = 48
    elif code == "key_bits":
        preset = "turboquant_k8v4"
    else:
        layer = replace(GQA8, **{"head_size": {"head_size": 64}, "gqa_ratio": {"num_heads": 8 * 17}}[code])
    decision = decide(layer, get_target("gfx950"), preset, block, Policy())
    assert decision.backend == "triton_soa"
    (record,) = log.records
    request = Request(layer, get_target("gfx950"), get_preset(preset), block)
    refusal = next(r for r in decision.refused["flydsl_gfx950"] if r.code == code)
    assert str(refusal) in record.getMessage()
    assert refusal.got == request.get(refusal.code)


def test_fallbacks_are_warnings_and_the_best_backend_is_not(log: pytest.LogCaptureFixture):
    decide(GQA8, get_target("gfx942"), NC4, 16, Policy())
    decide(replace(GQA8, num_heads=512), get_target("gfx942"), NC4, 16, Policy())
    assert [record.levelno for record in log.records] == [logging.INFO, logging.WARNING]


# ---- packages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "wants", "answer"),
    [
        ("0.5.0", ">=0.5,<0.6", True),
        ("0.6", ">=0.5,<0.6", False),
        ("0.5", ">=0.5.0", True),
        ("3.10.0", ">=3.6,<4", True),
        ("3.6.0+rocm7.0.git1", ">=3.6", True),
        ("3.5.9rc1", ">=3.6", False),
        ("1.0", "", True),
        ("1.0", "==1.0.0", True),
        ("1.0", "!=1.0", False),
        ("2.0", ">1,<=2", True),
    ],
)
def test_version_ranges(version: str, wants: str, answer: bool):
    assert satisfies(version, wants) is answer


@pytest.mark.parametrize(("version", "wants"), [("unknown", ">=1"), ("1.0", "~=1"), ("1.0", ">=x")])
def test_versions_that_cannot_be_read(version: str, wants: str):
    with pytest.raises(SpecError):
        satisfies(version, wants)


BROKEN = {
    "broken_import": "raise ImportError('libmissing.so: cannot open shared object file')",
    "broken_exit": "import sys; sys.exit(3)",
    "broken_quiet_exit": "import sys; print('done'); sys.exit(0)",
    "broken_abort": "import os; os.abort()",
    "broken_error": "raise RuntimeError('no GPU agent')",
}


@pytest.fixture
def packages(tmp_path, monkeypatch: pytest.MonkeyPatch):
    for name, source in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(source)
    (tmp_path / "fine.py").write_text("__version__ = '2.1'")
    (tmp_path / "vague.py").write_text("__version__ = 'unknown'")
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    probe.cache_clear()
    yield
    probe.cache_clear()


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_package_is_a_reason_and_does_no_harm(packages, name: str):
    problem = probe(name, "", isolated=True)
    assert problem is not None
    expected = {
        "broken_import": "libmissing.so",
        "broken_exit": "exit status 3",
        "broken_quiet_exit": "import fails: done",
        "broken_abort": "signal 6",
        "broken_error": "no GPU agent",
    }
    assert expected[name] in problem
    assert name not in sys.modules
    if name != "broken_abort":
        probe.cache_clear()
        assert probe(name) is not None


def test_probe_of_working_and_missing_packages(packages, monkeypatch: pytest.MonkeyPatch):
    assert probe("fine", ">=2,<3") is None
    assert probe("fine", ">=3") == "fine 2.1"
    assert probe("vague", ">=3") == "vague unknown"
    monkeypatch.setattr("turboquant_rocm.packages.installed_version", lambda name: "main")
    assert probe("vague", ">=2") == "vague main"
    assert probe("no_such_package_here") == "not installed"
    monkeypatch.setattr("turboquant_rocm.packages.PROBE_SECONDS", 0.5)
    assert "does not return" in (probe("slow", "", isolated=True) or "")


def test_a_broken_flydsl_falls_back_with_its_error(packages, monkeypatch: pytest.MonkeyPatch):
    here = replace(get_target("gfx950"), local=True)
    environment = Environment({"flydsl": "import aborts the process (signal 6): LLVM ERROR", "triton": None})
    decision = decide(GQA8, here, NC4, 16, PLANNED, environment=environment)
    assert decision.backend == "triton_soa"
    assert "LLVM ERROR" in str(decision.refused["flydsl_gfx950"][0])
    assert decision.refused["flydsl_gfx950"][0].wants == "flydsl>=0.5,<0.6"


def test_deciding_imports_no_kernel_package():
    code = (
        "import sys\n"
        "from turboquant_rocm import LayerSpec, Policy, decide, get_target\n"
        "decide(LayerSpec(0, 64, 8, 128), get_target('gfx950'), 'turboquant_4bit_nc', 16, Policy())\n"
        "print([n for n in ('torch', 'triton', 'flydsl') if n in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# ---- flags, variables and named policies together can only narrow --------------------------------------------------


def test_policies_narrow_each_other():
    a = Policy(deny=frozenset({"triton_aos"}), require=frozenset({"triton_soa", "triton_aos"}))
    b = Policy(deny=frozenset({"flydsl_gfx950"}), require=frozenset({"triton_soa"}), allow_fallback=False)
    for both in (a.narrowed_by(b), b.narrowed_by(a)):
        assert both.deny == {"triton_aos", "flydsl_gfx950"}
        assert both.require == {"triton_soa"}
        assert not both.allow_fallback
    assert a.narrowed_by(Policy()) == a
    with pytest.raises(SpecError, match="policy force"):
        Policy(force="triton_aos").narrowed_by(Policy(force="triton_soa"))
    with pytest.raises(SpecError, match="policy require"):
        a.narrowed_by(Policy(require=frozenset({"flydsl_gfx950"})))


def test_a_flag_cannot_undo_a_variable(monkeypatch):
    from turboquant_rocm.explain import run

    ask = ["qwen3-32b", "--target", "sm_90", "--expect", "triton_soa", "--width", "200"]
    assert run(ask)[0] == 0
    monkeypatch.setenv("TURBOQUANT_ROCM_DENY", "triton_soa")
    assert run([*ask, "--policy", "default"])[0] == 2
    monkeypatch.delenv("TURBOQUANT_ROCM_DENY")
    monkeypatch.setenv("TURBOQUANT_ROCM_REQUIRE", "triton_aos")
    with pytest.raises(SpecError, match="require"):
        run([*ask, "--require", "triton_soa"])


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("NO_FALLBACK", "false", "NO_FALLBACK"),
        ("REQUIRE", ",", "policy require"),
        ("FORCE", "fast", "backend"),
    ],
)
def test_variables_are_checked(variable: str, value: str, named: str):
    with pytest.raises(SpecError, match=named):
        Policy.from_environment({f"TURBOQUANT_ROCM_{variable}": value})


@pytest.mark.parametrize(
    "data",
    [{"deny": 5}, {"deny": None}, {"force": ["a"]}, {"allow_fallback": "no"}, {"require": []}, {"deny": [1]}],
)
def test_policy_values_are_checked(data: dict):
    with pytest.raises(SpecError, match="policy"):
        Policy.from_mapping(data)


def test_a_forced_backend_still_explains_the_faster_ones():
    layer = LayerSpec(0, 8 * 17, 8, 128)
    decision = resolve(
        Request(layer, get_target("gfx950"), get_preset("4bit_nc"), 16), Policy(force="triton_aos")
    )
    assert decision.backend == "triton_aos"
    assert set(decision.refused) == {"flydsl_gfx950", "flydsl_gfx942", "triton_soa"}
    assert [r.code for r in decision.refused["triton_soa"]] == [Code.POLICY]
    assert {Code.GQA_RATIO, Code.POLICY} <= {r.code for r in decision.refused["flydsl_gfx950"]}
    assert not decision.fell_back


def test_only_slower_backends_are_fallbacks():
    layer = LayerSpec(0, 32, 8, 128)
    request = Request(layer, get_target("gfx942"), get_preset("4bit_nc"), 16)
    found = all_refusals(request, Policy(allow_fallback=False))
    assert Code.POLICY not in {r.code for r in found["flydsl_gfx950"]}
    assert not found["flydsl_gfx942"]
    for slower in ("triton_soa", "triton_aos"):
        assert [r.code for r in found[slower]] == [Code.POLICY]


# ---- arguments of the wrong kind are named --------------------------------------------------------------

WRONG = [5, True, 1.5, float("nan"), "", "x", b"x", [], [1], [[]], {}, {"a": 1}]
# Arguments of plan, with the values of WRONG that are right for them.
ARGUMENTS: dict[str, list[object]] = {
    "preset": [],
    "block_size": [],
    "tp": [],
    "policy": [],
    "environment": [],
    "protect": [5],
    "skip": [[], [1], {}],
    "pad_heads": [5],
    "dtype": [],
    "rows": [5],
    "memory_gib": [],
    "weights_gib": [5, 1.5],
}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        (name, value)
        for name, right in ARGUMENTS.items()
        for value in WRONG
        if not any(type(value) is type(other) and value == other for other in right)
    ],
)
def test_plan_names_the_argument_that_is_wrong(argument: str, value: object):
    with pytest.raises(SpecError) as caught:
        plan(load_model("qwen3-32b"), get_target("gfx950"), **{argument: value})
    # 5 GiB are less than the weights, and skip is skip_layers on the command line.
    assert caught.value.field in (argument, {"memory_gib": "memory", "skip": "skip_layers"}.get(argument))


@pytest.mark.parametrize("value", [*WRONG, None], ids=repr)
def test_models_and_targets_that_are_none_are_named(value: object):
    with pytest.raises(SpecError, match=r"^model="):
        plan(value, get_target("gfx950"))
    with pytest.raises(SpecError, match=r"^target="):
        plan(load_model("qwen3-32b"), value)
    with pytest.raises(SpecError, match=r"^layer="):
        decide(value, get_target("gfx950"), "4bit_nc", 16)
    for target in (value, "gfx950"):
        with pytest.raises(SpecError, match=r"^target=.*get_target"):
            decide(GQA8, target, "4bit_nc", 16)
    with pytest.raises(SpecError, match=r"^preset="):
        decide(GQA8, get_target("gfx950"), value, 16)
    with pytest.raises(SpecError, match=r"^target="):
        get_target(value)
    with pytest.raises(SpecError, match=r"^backend="):
        get_backend(value)
    if not isinstance(value, dict):
        with pytest.raises(SpecError, match=r"^model="):
            load_model(value)
    if value is not None:  # which stands for the default
        with pytest.raises(SpecError, match=r"^policy="):
            decide(GQA8, get_target("gfx950"), "4bit_nc", 16, value)
        with pytest.raises(SpecError, match=r"^environment="):
            decide(GQA8, get_target("gfx950"), "4bit_nc", 16, environment=value)
