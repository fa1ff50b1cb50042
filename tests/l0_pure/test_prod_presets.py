"""The presets of TurboQuant_prod: bytes, golden vectors, unbiasedness, and who serves them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests import prod_definition
from tests.cases import gaussian, layer_spec, reference
from tests.prod_definition import GOLDEN, HEAD_SIZES, PRESETS, golden, vectors
from turboquant_rocm import (
    IneligibleError,
    LayerSpec,
    Policy,
    Preset,
    SpecError,
    Target,
    decide,
    get_preset,
    make_layout,
)
from turboquant_rocm.layouts.packing import unpack
from turboquant_rocm.layouts.views import field_view, read_fp16
from turboquant_rocm.presets import preset_names, serving_names
from turboquant_rocm.target import get_target

BYTES = {
    "turboquant_prod_k3v2": (52, 100, 196),
    "turboquant_prod_k3v4": (68, 132, 260),
    "turboquant_prod_k4v4": (76, 148, 292),
}
"""Of a slot at D = 64, 128 and 256: codes, signs, two norms; codes, a scale and a zero for every 32 values."""


def stored(preset: str, head_size: int, layout: str, key: torch.Tensor, value: torch.Tensor):
    """(bound, fields [T, 1, bytes], what is read back) of key and value [T, D]."""
    bound = reference(layer_spec(head_size, 1, 1), preset, layout, 16)
    n = len(key)
    cache = bound.allocate(-(-n // 16), "cpu")
    bound.store(key[:, None], value[:, None], cache, torch.arange(n))
    fields = {
        name: field_view(cache.data, bound.layout, name).flatten(0, 1)[:n, 0]
        for name, _ in bound.layout.places
    }
    table = torch.arange(cache.num_blocks, dtype=torch.int32)[None]
    read = bound.dequantize(cache, table, torch.tensor([n], dtype=torch.int32), dtype=torch.float32)
    return fields, read.key[:, 0], read.value[:, 0]


@pytest.mark.parametrize("preset", PRESETS)
def test_bytes(preset: str):
    for layout in ("soa", "aos"):
        assert (
            tuple(make_layout(layout, preset, d, 1, 16).slot_bytes for d in (64, 128, 256)) == BYTES[preset]
        )


def test_the_presets_are_those_of_the_file():
    assert set(PRESETS) == set(preset_names()) - set(serving_names())
    for name, (code_bits, value_bits) in PRESETS.items():
        preset = get_preset(name)
        assert (preset.code_bits, preset.value_bits) == (code_bits, value_bits)
        assert (preset.key_bits, preset.sketch, preset.value_group) == (code_bits + 1, True, 32)
        assert not preset.norm_correction


@pytest.mark.parametrize("layout", ["soa", "aos"])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("preset", PRESETS)
def test_golden_vectors(preset: str, head_size: int, layout: str):
    """Every code and sign where no tie decides, norms within a rounding, and what is read back where all are sure."""
    want = dict(np.load(GOLDEN / f"{preset}_D{head_size}.npz"))
    key, value = (torch.from_numpy(x).to(torch.bfloat16) for x in vectors(head_size))
    fields, read_key, read_value = stored(preset, head_size, layout, key, value)
    code_bits, value_bits = PRESETS[preset]
    sure, signs = want["sure_codes"], want["sure_signs"]
    assert sure.mean() > 0.7 and signs.mean() > 0.7 and want["sure_values"].mean() > 0.5
    codes = unpack(fields["key_data"], code_bits, head_size).numpy()
    assert np.array_equal(codes[sure], want["key_codes"][sure])
    got_signs = unpack(fields["key_signs"], 1, head_size).numpy().astype(bool)
    assert np.array_equal(got_signs[signs], want["key_signs"][signs])
    v_codes = unpack(fields["value_data"], value_bits, head_size).numpy()
    assert np.array_equal(v_codes[want["sure_values"]], want["value_codes"][want["sure_values"]])
    for name, rows in (
        ("key_norm", sure),
        ("key_residual", sure),
        ("value_scale", slice(None)),
        ("value_zero", slice(None)),
    ):
        got = fields[name].contiguous().view(torch.float16).numpy().reshape(want[name].shape)
        assert np.allclose(got[rows].astype(float), want[name][rows].astype(float), rtol=2**-10, atol=1e-7), (
            name
        )
    whole = sure & signs.all(-1)
    assert whole.sum() > 50
    assert np.allclose(
        read_key.numpy()[whole],
        want["key"][whole],
        rtol=3e-3,
        atol=3e-3 * np.abs(want["key"]).max(1)[whole, None],
    )
    sure_values = want["sure_values"]
    scale = np.abs(want["value"]).max(1)[sure_values, None]
    assert (np.abs(read_value.numpy()[sure_values] - want["value"][sure_values]) <= 2e-3 * scale + 1e-6).all()


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("preset", PRESETS)
def test_golden_files_are_what_the_definition_gives(preset: str, head_size: int):
    with np.load(GOLDEN / f"{preset}_D{head_size}.npz") as data:
        made = golden(preset, head_size)
        assert set(data.files) == set(made)
        for name in data.files:
            assert np.allclose(data[name], made[name], rtol=1e-6, atol=1e-9), name


def test_the_definition_notices_mutants(monkeypatch: pytest.MonkeyPatch):
    """The golden test above is not satisfied by a quantiser with another sketch, or with one group."""
    key, value = (torch.from_numpy(x).to(torch.bfloat16) for x in vectors(64))
    want = golden("turboquant_prod_k3v2", 64)
    monkeypatch.setattr(prod_definition, "cache_sketch", lambda d: np.eye(d))
    other = golden("turboquant_prod_k3v2", 64)
    fields, *_ = stored("turboquant_prod_k3v2", 64, "soa", key, value)
    got = unpack(fields["key_signs"], 1, 64).numpy().astype(bool)
    both = want["sure_signs"] & other["sure_signs"]
    assert np.array_equal(got[both], want["key_signs"][both])
    assert (got[both] != other["key_signs"][both]).mean() > 0.2


@pytest.mark.parametrize("preset", PRESETS)
def test_scores_are_unbiased_and_those_of_serving_presets_are_not(preset: str):
    """Mean of <k, k'> / ||k||^2 over random keys: 1, where codes alone give 1 - D(b). Z = 5.7 standard errors."""
    g = torch.Generator().manual_seed(0)
    key = gaussian((4000, 128), g, torch.bfloat16)

    def slope(name: str) -> tuple[float, float]:
        read = stored(name, 128, "soa", key, key)[1].double()
        x = (read * key.double()).sum(-1) / key.double().square().sum(-1)
        return float(x.mean()), float(x.std() / math.sqrt(len(x)))

    mean, error = slope(preset)
    assert abs(mean - 1) < 5.7 * error < 0.02
    mean, error = slope("turboquant_3bit_nc")
    assert abs(mean - 1) > 5.7 * error


def test_groups_are_quantised_by_themselves():
    """A large value spoils its own group of 32 only."""
    g = torch.Generator().manual_seed(1)
    value = gaussian((1, 128), g, torch.bfloat16)
    loud = value.clone()
    loud[0, 40] = 1000.0
    for preset in PRESETS:
        quiet_read, loud_read = (stored(preset, 128, "soa", value, v)[2] for v in (value, loud))
        same = torch.ones(128, dtype=torch.bool)
        same[32:64] = False
        assert torch.equal(quiet_read[0, same], loud_read[0, same])
        assert not torch.equal(quiet_read[0, ~same], loud_read[0, ~same])


def test_zero_and_nonfinite_vectors():
    key = torch.zeros(2, 64, dtype=torch.bfloat16)
    key[1, 3] = math.inf
    fields, read_key, read_value = stored("turboquant_prod_k4v4", 64, "soa", key, key)
    assert not read_key.any() and not read_value.any()
    assert not read_fp16(fields["key_norm"]).any() and not read_fp16(fields["key_residual"]).any()


@pytest.mark.parametrize("preset", PRESETS)
def test_backends_that_do_not_serve_them_say_so(preset: str):
    layer = LayerSpec(0, 16, 2, 128)
    for arch in ("gfx942", "gfx950", "sm_90"):
        for backend in ("triton_soa", "triton_aos"):
            with pytest.raises(
                IneligibleError, match=r"sketch=yes \(wants none\), value_group=32 \(wants none\)"
            ):
                decide(layer, get_target(arch), preset, 16, Policy(force=backend))
    assert (
        decide(layer, Target("cpu", "cpu"), preset, 16, Policy(force="torch_reference")).backend
        == "torch_reference"
    )


def test_values_that_groups_do_not_fill_are_refused():
    layer = LayerSpec(0, 4, 2, 80)
    with pytest.raises(IneligibleError, match="value_group=32"):
        decide(layer, Target("cpu", "cpu"), "prod_k3v4", 16, Policy(force="torch_reference"))
    with pytest.raises(SpecError, match="value_head_size=80"):
        make_layout("soa", "prod_k3v4", 80, 2, 16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sketch": True, "norm_correction": True}, "sketch"),
        ({"sketch": True, "key_bits": 8}, "sketch"),
        ({"sketch": 1}, "sketch=1"),
        ({"value_group": 24}, "value_group=24"),
        ({"value_group": 4}, "value_group=4"),
        ({"value_group": 32, "rotated_values": True, "name": "x+rotated_values"}, "value_group=32"),
    ],
)
def test_presets_that_make_no_sense(fields: dict, message: str):
    with pytest.raises(SpecError, match=message):
        Preset(**{"name": "x", "key_bits": 4, "value_bits": 4, "norm_correction": False, **fields})


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90"])
def test_kernels_are_chosen_on_request_only(preset: str, arch: str):
    layer = LayerSpec(0, 16, 2, 128)
    with pytest.raises(IneligibleError):
        decide(layer, get_target(arch), preset, 16)
    decision = decide(layer, get_target(arch), preset, 16, Policy(force="triton_prod"))
    assert (decision.backend, decision.layout) == ("triton_prod", "soa")
    with pytest.raises(IneligibleError, match=r"sketch=no \(wants yes\)"):
        decide(layer, get_target(arch), "4bit_nc", 16, Policy(force="triton_prod"))
