"""The parts of the vLLM plugin that need no vLLM. What it does in the real engine: tests/vllm."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
import tomllib
from types import SimpleNamespace
from typing import Any

import pytest

from tests.repository import FRAMEWORKS, ROOT
from turboquant_rocm import LayerSpec, SpecError, preset_names
from turboquant_rocm.integrations import vllm as plugin
from turboquant_rocm.integrations.vllm import ENVIRONMENT_VARIABLES, Settings, version_problem
from turboquant_rocm.integrations.vllm.batch import split
from turboquant_rocm.integrations.vllm.blocks import block_stride
from turboquant_rocm.spec import Dtype

torch = pytest.importorskip("torch")
serving = importlib.import_module("turboquant_rocm.integrations.vllm.serving")

ON, CPU, CHECKS = ENVIRONMENT_VARIABLES


# ---- entry points and versions ------------------------------------------------------------------------------


def test_entry_points_name_functions_that_load_nothing():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(points) == {"vllm.general_plugins", "vllm.platform_plugins"}
    for target in (t for group in points.values() for t in group.values()):
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_the_plugin_module_loads_no_framework():
    """vLLM imports it in every process, before it has chosen a platform."""
    code = f"import sys\nfor name in {FRAMEWORKS!r}: sys.modules[name] = None\n"
    code += "import turboquant_rocm.integrations.vllm"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "version", ["0.32.0", "0.32.1.post1", "0.33.0+rocm700", "0.33.1rc1", "0.33.0.dev3+gabc"]
)
def test_supported_versions(version: str):
    assert version_problem(version) is None


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0", "dev", ""])
def test_another_version_is_told_what_would_do(version: str):
    told = version_problem(version)
    assert told is not None
    assert f"vLLM {version}" in told and ">=0.32,<0.34" in told and f"{ON}=required" in told


# ---- settings -----------------------------------------------------------------------------------------------


def test_settings_without_variables_are_the_defaults():
    assert Settings.from_environment({}) == Settings("on", "", "off")
    assert Settings.from_environment({ON: "off", CHECKS: "full"}) == Settings("off", "", "full")
    assert Settings.from_environment({CPU: " reference "}).cpu == "reference"


@pytest.mark.parametrize("name", [ON, CPU, CHECKS])
def test_a_wrong_setting_is_named(name: str):
    with pytest.raises(SpecError, match=f"{name}='yes'"):
        Settings.from_environment({name: "yes"})


def test_the_cpu_has_no_backend_to_leave_in_charge():
    with pytest.raises(SpecError, match="no turboquant backend for the CPU"):
        Settings.from_environment({ON: "off", CPU: "reference"})


def test_cpu_platform_only_when_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(CPU, raising=False)
    assert plugin.cpu_platform() is None
    monkeypatch.setenv(CPU, "reference")
    assert plugin.cpu_platform() == plugin.CPU_PLATFORM


# ---- splitting a batch --------------------------------------------------------------------------------------


def starts(*lens: int) -> list[int]:
    return [0, *itertools.accumulate(lens)]


@pytest.mark.parametrize(
    ("lens", "threshold", "decodes", "rows", "longest", "rest"),
    [
        ((1, 1, 1), 1, 3, 3, 1, ()),
        ((1, 1, 40, 200), 1, 2, 2, 1, (40, 200)),
        (
            (40, 200, 1),
            1,
            0,
            0,
            0,
            (40, 200, 1),
        ),  # a decode behind a prefill: its own history decides its route
        ((1, 3, 2, 9), 3, 3, 6, 3, (9,)),
        ((3, 3, 0, 0), 3, 4, 6, 3, ()),  # a captured batch, padded
        ((1, 7, 0), 1, 1, 1, 1, (7,)),
        ((7, 0, 8, 0), 1, 0, 0, 0, (7, 0, 8)),
        ((), 1, 0, 0, 0, ()),
    ],
)
def test_split(lens, threshold, decodes, rows, longest, rest):
    found = split(starts(*lens), threshold)
    assert (found.decodes, found.decode_rows, found.decode_len, found.query_lens) == (
        decodes,
        rows,
        longest,
        rest,
    )


def test_single_means_that_row_i_is_sequence_i():
    assert split(starts(1, 1, 5), 1).single
    assert not split(starts(1, 0, 1), 1).single
    assert not split(starts(2, 2), 2).single
    assert not split(starts(5), 1).single


# ---- pages --------------------------------------------------------------------------------------------------

BLOCKS, HEADS, TOKENS, SLOT, LAYERS = 6, 3, 32, 70, 4
SIZES = {"L": LAYERS, "B": BLOCKS, "N": TOKENS, "H": HEADS, "C": SLOT}


def pool(order: str, pad: int = 0) -> Any:
    """Layer 1 of a pool in vLLM's physical order, logical [blocks, heads, tokens, slot]; pad: bytes behind a page."""
    strides, step = {}, 1
    for letter in reversed(order):
        strides[letter] = step
        step *= SIZES[letter]
        if letter == order[2]:
            step += pad
    flat = torch.zeros(step, dtype=torch.uint8)
    return flat.as_strided([SIZES[x] for x in "BHNC"], [strides[x] for x in "BHNC"], strides["L"])


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "BLNHC", "BLHNC"])
@pytest.mark.parametrize("pad", [0, 26])
def test_block_stride_of_every_order_whose_blocks_lie_together(order: str, pad: int):
    found = pool(order, pad)
    page = HEADS * TOKENS * SLOT + pad
    assert block_stride(found.shape, found.stride()) == page * (LAYERS if order.startswith("BL") else 1)


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_blocks_in_pieces_are_refused(order: str):
    found = pool(order)
    with pytest.raises(SpecError, match="LBNHC"):
        block_stride(found.shape, found.stride())


def test_dimensions_of_one_element_have_no_stride():
    assert block_stride((1, 1, 32, 70), (1, 1, 70, 1)) == 32 * 70
    assert block_stride((1, 3, 1, 70), (5, 70, 3, 1)) == 3 * 70
    with pytest.raises(SpecError, match="kv_cache"):
        block_stride((2, 3, 32, 70), (70, 70, 210, 1))  # blocks that overlap
    with pytest.raises(SpecError, match="kv_cache"):
        block_stride((2, 3, 32), (96, 32, 1))


# ---- layers, plan, verification -----------------------------------------------------------------------------


def test_layer_spec_reads_what_servers_say():
    spec = serving.layer_spec(
        3, num_heads=8, num_kv_heads=2, head_size=64, scale=64**-0.5, dtype=serving.model_dtype(torch.float16),
        window=128, sinks=True, soft_cap=0.0,
    )  # fmt: skip
    assert spec == LayerSpec(3, 8, 2, 64, kind="sliding", window=128, sinks=True, dtype="fp16")
    for nothing in (None, 0, -1):
        other = serving.layer_spec(
            0,
            num_heads=8,
            num_kv_heads=2,
            head_size=64,
            scale=0.3,
            dtype=spec.dtype,
            window=nothing,
            alibi=True,
        )
        assert (other.kind, other.window, other.scale, other.position_bias) == ("full", None, 0.3, "alibi")


def server(dtypes: list[str], impl: Any = None, rank: int = 0, **layer: Any) -> SimpleNamespace:
    """What serving reads of a VllmConfig, with one attention layer for each cache dtype."""
    shape = {
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_size": 64,
        "head_size_v": 64,
        "sliding_window": None,
        **layer,
    }
    impl = SimpleNamespace(scale=0.125) if impl is None else impl
    layers = {
        f"model.layers.{i}.attn": SimpleNamespace(
            **shape, impl=impl, kv_cache_dtype=dtype, get_kv_cache_spec=lambda _: None
        )
        for i, dtype in enumerate(dtypes)
    }
    layers["rotary"] = SimpleNamespace()
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16, model="m"),
        cache_config=SimpleNamespace(cache_dtype=next(d for d in dtypes if d != "auto")),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, rank=rank),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )


DTYPES = ["auto", "turboquant_4bit_nc", "turboquant_4bit_nc", "auto"]


def test_the_plan_keeps_native_what_the_server_does():
    served = serving.ServedModel.of(server(DTYPES))
    assert served.quantised == {"model.layers.1.attn", "model.layers.2.attn"}
    answer = served.plan(32, Settings(cpu="reference"))
    assert [e.backend for e in answer.layers] == [None, "torch_reference", "torch_reference", None]
    assert answer.layers[1].layer.num_heads == 9  # local heads: not divided a second time
    text = serving.report_text(answer)
    assert (
        "one of 2 tensor-parallel ranks" in text
        and "torch_reference" in text
        and "Why not a faster one" in text
    )
    assert "Pages" not in text and "padding" not in text


def test_a_layer_that_no_backend_serves_is_told_with_every_reason():
    served = serving.ServedModel.of(server(DTYPES, head_size=72, head_size_v=72))
    told = serving.refused_layers(served.plan(32, Settings(cpu="reference")))
    assert any("torch_reference" in line and "72" in line for line in told)
    assert any("triton_soa" in line and "arch=cpu" in line for line in told)


def test_the_report_is_logged_once_and_by_one_rank(caplog: pytest.LogCaptureFixture):
    first, other = (serving.ServedModel.of(server(DTYPES, rank=rank)) for rank in (2, 3))
    answer = first.plan(64, Settings(cpu="reference"))
    with caplog.at_level("INFO", logger="vllm.turboquant_rocm"):
        serving.report(other, answer, in_charge=True)
        assert not caplog.text
        serving.report(first, answer, in_charge=True)
        serving.report(first, answer, in_charge=True)
    assert caplog.text.count("turboquant_rocm: 2 of 4 layers packed: 2 native, 2 torch_reference (soa)") == 1
    assert caplog.text.count("serves this model. The plan") == 1


def test_the_report_of_a_backend_left_in_charge_is_not_taken_for_ours(caplog: pytest.LogCaptureFixture):
    served = serving.ServedModel.of(server(DTYPES))
    with caplog.at_level("INFO", logger="vllm.turboquant_rocm"):
        serving.report(served, served.plan(32, Settings(cpu="reference")), in_charge=False)
    assert "vLLM's own turboquant backend serves 2 of 4 layers" in caplog.text
    assert "would do (2 native, 2 torch_reference (soa))" in caplog.text
    assert "layers packed" not in caplog.text and "serves this model" not in caplog.text


def test_a_layer_that_runs_another_class_is_found():
    class Ours(SimpleNamespace):
        pass

    serving.verify(server(DTYPES, impl=Ours(scale=1.0)), Ours)
    with pytest.raises(
        serving.UnsupportedError, match=r"backend=types.SimpleNamespace \(wants .*Ours"
    ) as caught:
        serving.verify(server(DTYPES), Ours)
    assert [r.code for r in caught.value.reasons] == [serving.ServerCode.BACKEND]


def test_interpreted_kernels_want_the_interpreter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SpecError, match="TRITON_INTERPRET"):
        serving.serving_target(Settings(cpu="interpret"))


def test_what_the_interpreter_computes_wrongly_is_refused():
    """tests/interpreter_repair.py lists its faults; a server has no such repair."""
    interpret = Settings(cpu="interpret")

    def codes(dtype: str, preset: str, settings: Settings) -> list[str]:
        return [x.code for x in serving.interpreter_faults(Dtype(dtype), preset, settings)]

    assert codes("bf16", "turboquant_k8v4", interpret) == ["dtype", "kv_cache_dtype"]
    assert codes("bf16", "turboquant_4bit_nc", interpret) == ["dtype"]
    assert codes("fp16", "turboquant_3bit_nc", interpret) == []
    assert codes("bf16", "turboquant_k8v4", Settings(cpu="reference")) == []
    assert codes("bf16", "turboquant_k8v4", Settings()) == []


def test_the_cache_dtypes_of_the_server_are_presets():
    wanted = {"turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"}
    assert wanted <= {n for n in preset_names() if n.startswith(plugin.PREFIX)}
