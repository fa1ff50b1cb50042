"""Presets with rotated values: their bytes, what they read back as, and who serves them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from turboquant_rocm import IneligibleError, LayerSpec, Policy, Preset, SpecError, Target, decide, get_preset
from turboquant_rocm.backends import backends
from turboquant_rocm.dispatch import all_refusals
from turboquant_rocm.eligibility import Code, Request
from turboquant_rocm.layouts import TagError, make_layout
from turboquant_rocm.presets import preset_names
from turboquant_rocm.target import get_target

NAMES = [name for name in preset_names() if get_preset(name).value_group is None]


@pytest.mark.parametrize("name", NAMES)
def test_the_suffix_makes_a_preset_that_differs_in_its_values_only(name: str):
    plain, rotated = get_preset(name), get_preset(f"{name}+rotated_values")
    assert get_preset(name.removeprefix("turboquant_") + "+rotated_values") == rotated
    assert rotated.name == f"{name}+rotated_values"
    assert replace(rotated, name=name, rotated_values=False) == plain
    assert not plain.rotated_values


def test_the_name_and_the_field_agree():
    with pytest.raises(SpecError, match="rotated_values at the end"):
        Preset("a", 4, 4, True, rotated_values=True)
    with pytest.raises(SpecError, match="rotated_values at the end"):
        Preset("a+rotated_values", 4, 4, True)
    with pytest.raises(SpecError, match="rotated_values='yes'"):
        Preset("a+rotated_values", 4, 4, True, rotated_values="yes")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"5bit\+rotated_values"):
        get_preset("5bit+rotated_values")


@pytest.mark.parametrize("layout", ["aos", "soa"])
@pytest.mark.parametrize("head_size", [64, 96, 128])
@pytest.mark.parametrize("name", NAMES)
def test_a_slot_is_two_bytes_smaller_and_the_tag_differs(name: str, head_size: int, layout: str):
    plain, rotated = (make_layout(layout, p, head_size, 2, 16) for p in (name, f"{name}+rotated_values"))
    assert rotated.slot_bytes == plain.slot_bytes - 2
    assert rotated.bytes_per_token == plain.bytes_per_token - 4
    assert rotated.has("value_scale") and not rotated.has("value_zero")
    with pytest.raises(TagError, match="preset="):
        rotated.tag.require(plain.tag)


def test_values_without_a_rotation_are_refused():
    with pytest.raises(SpecError, match="72"):
        make_layout("soa", "4bit_nc+rotated_values", 128, 2, 16, value_head_size=72)
    make_layout("soa", "4bit_nc", 128, 2, 16, value_head_size=72)
    layer = LayerSpec(0, 4, 2, 128, value_head_size=72)
    with pytest.raises(IneligibleError, match="rotation=72"):
        decide(layer, Target("cpu", "cpu"), "k8v4+rotated_values", 16, Policy(force="torch_reference"))


def test_only_backends_that_declare_them_serve_them():
    layer = LayerSpec(0, 16, 2, 128)
    serving = set()
    for backend in backends():
        for arch in ("gfx942", "gfx950", "sm_90", "cpu"):
            plain, rotated = (
                Request(layer, get_target(arch), get_preset(name), 16)
                for name in ("4bit_nc", "4bit_nc+rotated_values")
            )
            before = {r.code for r in backend.refusals(plain)}
            if Code.SKETCH in before:  # it serves presets with a sketch, which have no rotated values
                continue
            after = {r.code for r in backend.refusals(rotated)}
            assert after - before <= {Code.ROTATED_VALUES}
            assert (Code.ROTATED_VALUES in before) == (backend.name == "triton_rotated")
            if not after:
                serving.add(backend.name)
    assert serving == {"torch_reference", "triton_rotated"}


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90"])
def test_the_dispatcher_finds_the_kernels(arch: str):
    layer = LayerSpec(0, 16, 2, 128)
    rotated = "3bit_nc+rotated_values"
    found = decide(layer, get_target(arch), rotated, 16, Policy())
    assert found.backend == "triton_rotated"
    assert all(Code.ROTATED_VALUES in {r.code for r in why} for why in found.refused.values())
    assert {"triton_soa", "triton_aos"} <= set(found.refused)
    assert (
        decide(layer, get_target(arch), rotated, 16, Policy(force="triton_rotated")).backend == found.backend
    )
    with pytest.raises(IneligibleError, match="rotated_values"):  # another GPU has no kernels for them
        decide(layer, get_target("gfx1100"), rotated, 16, Policy())


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90"])
def test_kernels_for_other_values_are_no_faster_ones(arch: str):
    """Nothing falls back to them or from them, and a policy without fallbacks takes them."""
    layer, strict = LayerSpec(0, 16, 2, 128), Policy(allow_fallback=False)
    found = decide(layer, get_target(arch), "3bit_nc+rotated_values", 16, strict)
    assert found.backend == "triton_rotated" and not found.fell_back
    plain = decide(layer, get_target(arch), "4bit_nc", 16, strict)
    assert plain.backend == {"sm_90": "triton_soa"}.get(arch, f"flydsl_{arch}") and not plain.fell_back
    assert "triton_rotated" not in plain.refused
    request = Request(layer, get_target(arch), get_preset("4bit_nc"), 16)
    assert Code.ROTATED_VALUES in {r.code for r in all_refusals(request, Policy())["triton_rotated"]}


@pytest.mark.parametrize("preset", ["k8v4", "4bit_nc", "3bit_nc"])
def test_they_read_back_as_their_definition_says(preset: str):
    """verify's ideal quantiser is written down without the reference's code; the tensors are a real model's."""
    pytest.importorskip("torch")
    from turboquant_rocm.verify import main

    tensors = str(Path(__file__).parents[2] / "examples" / "kv" / "smollm2_135m.npz")
    assert main(["--input", tensors, "--preset", f"{preset}+rotated_values", "--repeats", "1"]) == 0


def test_special_values():
    """Zero, huge, tiny and non-finite vectors: no field becomes infinite, and non-finite ones are zero and counted."""
    torch = pytest.importorskip("torch")
    from turboquant_rocm import bind

    layer = LayerSpec(0, 2, 1, 64, dtype="fp32")  # type: ignore[arg-type]
    decision = decide(
        layer,
        Target("cpu", "cpu"),
        "3bit_nc+rotated_values",
        16,
        Policy(force="torch_reference", layout="soa"),
    )
    bound = bind(decision)
    value = torch.zeros(5, 1, 64)
    value[1], value[4] = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(0))
    value[1] *= 1e30
    value[2, 0, 3], value[3, 0, 5] = 1e-6, float("nan")
    counted = torch.zeros(2, dtype=torch.int32)
    cache = bound.allocate(1, "cpu")
    bound.store(torch.zeros_like(value), value, cache, torch.arange(5), nonfinite=counted)
    read = bound.dequantize(
        cache, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([5], dtype=torch.int32), dtype=torch.float32
    ).value[:, 0]
    assert counted.tolist() == [0, 1]
    assert read.isfinite().all()
    assert (read[0] == 0).all() and (read[3] == 0).all()
    assert read[1].norm() == pytest.approx(65504, rel=0.05)  # the folded norm is clamped
    assert (read[4] - value[4, 0]).norm() < 0.25 * value[4].norm()
