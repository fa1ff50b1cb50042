"""Semantics of the reference: what kernels are compared with must itself be right.

Attention is compared with an independent softmax in numpy over the dequantised cache.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from tests.cases import TORCH_DTYPES, gaussian, layer_spec, reference, rel_l2, same_bytes, shuffled_tables
from turboquant_rocm import get_preset, preset_names
from turboquant_rocm.backends._torch.reference import rotate
from turboquant_rocm.codebook import centroids, rotation
from turboquant_rocm.layouts import LAYOUT_NAMES
from turboquant_rocm.layouts.packing import unpack
from turboquant_rocm.layouts.views import field_view, read_fp16

PRESETS = preset_names()
MSE_PRESETS = [p for p in PRESETS if not get_preset(p).fp8_keys and not get_preset(p).sketch]


def fill(bound, seq_lens, generator, dtype=torch.bfloat16, scale=1.0):
    """Random tokens of several sequences in shuffled blocks: (cache, block_table)."""
    layout = bound.layout
    table, slots, blocks = shuffled_tables(seq_lens, layout.block_size, generator)
    cache = bound.allocate(blocks, "cpu", fill=0xA5)
    total = sum(seq_lens)
    key = gaussian((total, layout.num_kv_heads, layout.head_size), generator, dtype, scale)
    value = gaussian((total, layout.num_kv_heads, layout.value_head_size), generator, dtype, scale)
    bound.store(key, value, cache, torch.cat(slots))
    return cache, table, key, value


def numpy_attention(query, key, value, length, window, scale, soft_cap, sink):
    """One query row [D] over keys [S, D]: (out [Dv], lse). Straight from the definition, in fp64."""
    first = max(0, length - window) if window else 0
    k, v = key[first:length], value[first:length]
    if len(k) == 0:
        return np.zeros(value.shape[-1]), -math.inf
    s = k @ query * scale
    if soft_cap:
        s = soft_cap * np.tanh(s / soft_cap)
    logits = s if sink is None else np.append(s, sink)
    top = logits.max()
    z = np.exp(logits - top).sum()
    return (np.exp(s - top) / z) @ v, top + math.log(z)


options = st.fixed_dictionaries(
    {
        "preset": st.sampled_from(PRESETS),
        "layout": st.sampled_from(LAYOUT_NAMES),
        "head_size": st.sampled_from((16, 64, 80, 96)),
        "num_kv_heads": st.integers(1, 3),
        "gqa_ratio": st.sampled_from((1, 2, 3, 5)),
        "block_size": st.sampled_from((1, 5, 16, 32)),
        "dtype": st.sampled_from(("bf16", "fp16")),
        "window": st.sampled_from((None, None, 1, 15, 16, 17)),
        "soft_cap": st.sampled_from((None, None, 5.0)),
        "sinks": st.booleans(),
        "scale": st.sampled_from((None, 0.3)),
        "lens": st.lists(st.tuples(st.sampled_from((0, 1, 2, 15, 16, 17, 33, 48)), st.integers(0, 5)), min_size=1,
                         max_size=4),
        "seed": st.integers(0, 2**31 - 1),
    }
)  # fmt: skip


@given(options)
@settings(max_examples=120, deadline=None)
def test_decode_against_the_definition(o: dict):
    generator = torch.Generator().manual_seed(o["seed"])
    keys = ("head_size", "num_kv_heads", "gqa_ratio", "dtype", "window", "soft_cap", "sinks")
    layer = layer_spec(**{k: o[k] for k in keys})
    assume(o["head_size"] % (get_preset(o["preset"]).value_group or 1) == 0)
    bound = reference(layer, o["preset"], o["layout"], o["block_size"], torch.float64)
    seq_lens, q_lens = [s for s, _ in o["lens"]], [q for _, q in o["lens"]]
    dtype = TORCH_DTYPES[o["dtype"]]
    cache, table, _, _ = fill(bound, seq_lens, generator, dtype)
    rows = sum(q_lens)
    query = gaussian((rows, layer.num_heads, layer.head_size), generator, dtype, 2.0)
    sinks = torch.randn(layer.num_heads, generator=generator) if layer.sinks else None
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    loc = torch.tensor(np.cumsum([0, *q_lens]), dtype=torch.int32)
    out, lse = bound.decode(
        query, cache, table, lens, loc, scale=o["scale"], sinks=sinks, return_lse=True,
        out=torch.full((rows, layer.num_heads, layer.head_size), math.nan, dtype=torch.float64),
        lse=torch.full((rows, layer.num_heads), math.nan, dtype=torch.float64),
    )  # fmt: skip
    read = bound.dequantize(cache, table, lens, dtype=torch.float64)
    scale = o["scale"] or layer.head_size**-0.5
    for b, (s, q) in enumerate(o["lens"]):
        sequence = slice(int(read.cu_lens[b]), int(read.cu_lens[b + 1]))
        for j in range(q):
            for h in range(layer.num_heads):
                row = int(loc[b]) + j
                want, want_lse = numpy_attention(
                    query[row, h].double().numpy(),
                    read.key[sequence, h // layer.gqa_ratio].numpy(),
                    read.value[sequence, h // layer.gqa_ratio].numpy(),
                    max(s - q + j + 1, 0), layer.window, scale, layer.soft_cap,
                    None if sinks is None else float(sinks[h]),
                )  # fmt: skip
                assert np.allclose(out[row, h].numpy(), want, rtol=1e-9, atol=1e-9), (b, j, h)
                assert np.isclose(float(lse[row, h]), want_lse, rtol=1e-9, atol=1e-9), (b, j, h)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("preset", PRESETS)
def test_fp32_math_stays_within_its_tolerance(preset: str, dtype: str):
    from turboquant_rocm.backends import get_backend

    generator = torch.Generator().manual_seed(1)
    layer = layer_spec(128, 2, 4, dtype)
    exact = reference(layer, preset, "soa", 16, torch.float64)
    plain = reference(layer, preset, "soa", 16)
    cache, table, _, _ = fill(exact, [200, 77], generator, TORCH_DTYPES[dtype])
    query = gaussian((2, 8, 128), generator, TORCH_DTYPES[dtype], 2.0)
    lens = torch.tensor([200, 77], dtype=torch.int32)
    want = exact.decode(query, cache, table, lens, out=torch.empty(query.shape, dtype=torch.float64))
    got = plain.decode(query, cache, table, lens)
    assert got.dtype == query.dtype
    assert 0 < rel_l2(got, want) <= get_backend("torch_reference").tolerance(dtype)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("head_size", [64, 96])
def test_seventeen_tokens_in_any_portions(preset: str, layout: str, head_size: int):
    """17, 16 + 1 and 17 x 1 give the same bytes, also for vectors whose rotated coordinates are ties."""
    generator = torch.Generator().manual_seed(2)
    bound = reference(layer_spec(head_size, 2, 1), preset, layout, 16)
    key = gaussian((17, 2, head_size), generator, torch.bfloat16)
    value = gaussian((17, 2, head_size), generator, torch.bfloat16)
    key[3], key[4, :, ::2], key[5] = 1.5, -0.7, 0.0
    slots = torch.randperm(32, generator=generator)[:17]
    caches = []
    for portions in ([17], [16, 1], [1] * 17):
        cache = bound.allocate(2, "cpu", fill=0xCD)
        for k, v, s in zip(key.split(portions), value.split(portions), slots.split(portions), strict=True):
            bound.store(k, v, cache, s)
        caches.append(cache)
    assert same_bytes(caches[0], caches[1])
    assert same_bytes(caches[0], caches[2])


@pytest.mark.parametrize(("bits", "nmse", "tolerance"), [(3, 0.0340, 0.001), (4, 0.0093, 0.0003)])
def test_key_distortion_on_gaussian_data(bits: int, nmse: float, tolerance: float):
    generator = torch.Generator().manual_seed(3)
    preset = {3: "turboquant_3bit_nc", 4: "turboquant_4bit_nc"}[bits]
    for layout in LAYOUT_NAMES:
        bound = reference(layer_spec(128, 4, 1), preset, layout, 16)
        cache, table, key, _ = fill(bound, [4096], generator)
        read = bound.dequantize(cache, table, torch.tensor([4096], dtype=torch.int32), dtype=torch.float64)
        measured = float((read.key - key.double()).square().sum() / key.double().square().sum())
        assert abs(measured - nmse) < tolerance, measured
        assert (
            bound.layout.bytes_per_token == 4 * bound.layout.slot_bytes < 4 * 2 * 128 * 2
        )  # it did compress


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("preset", MSE_PRESETS)
def test_every_code_occurs_and_decodes_to_its_own_centroid(preset: str, layout: str):
    generator = torch.Generator().manual_seed(11)
    bits, v_bits = get_preset(preset).key_bits, get_preset(preset).value_bits
    bound = reference(layer_spec(64, 1, 1), preset, layout, 16, torch.float64)
    cache, table, key, _ = fill(bound, [256], generator)
    token = torch.arange(256)
    block, offset = table[0, token // 16].long(), token % 16
    codes = unpack(field_view(cache.data, bound.layout, "key_data")[block, offset, 0], bits, 64)
    assert set(codes.flatten().tolist()) == set(range(2**bits))
    v_codes = unpack(field_view(cache.data, bound.layout, "value_data")[block, offset, 0], v_bits, 64)
    assert set(v_codes.flatten().tolist()) == set(range(2**v_bits))
    # Independently: the code is the nearest centroid, and what is read back is that centroid vector at length ||k||.
    c = centroids(64, bits).astype(np.float64)
    y = key[:, 0].double().numpy() @ rotation(64).T
    y /= np.linalg.norm(y, axis=-1, keepdims=True)
    nearest = np.abs(y[..., None] - c).argmin(-1)
    assert (nearest == codes.numpy()).mean() > 0.999
    unit = c[codes.numpy()]
    unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
    want = unit @ rotation(64) * key[:, 0].double().norm(dim=-1).numpy()[:, None]
    read = bound.dequantize(cache, table, torch.tensor([256], dtype=torch.int32), dtype=torch.float64)
    assert rel_l2(read.key[:, 0], torch.from_numpy(want)) < 1e-3


@pytest.mark.parametrize("head_size", [64, 80, 96, 112, 128, 192])
def test_butterflies_are_the_rotation(head_size: int):
    x = torch.randn(5, head_size, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    r = torch.from_numpy(rotation(head_size).copy())
    assert torch.allclose(rotate(x), x @ r.T, atol=1e-12)
    assert torch.allclose(rotate(x, inverse=True), x @ r, atol=1e-12)


def test_fp8_bytes_against_ml_dtypes():
    """All fp16 numbers: round to nearest even, saturate at 448, -0 becomes 0."""
    bits = np.arange(65536, dtype=np.uint16)
    x = bits.view(np.float16)
    x = x[np.isfinite(x)]
    x = np.resize(x, (len(x) + 63) // 64 * 64)
    bound = reference(layer_spec(64, 1, 1, "fp16"), "turboquant_k8v4", "soa", 16)
    key = torch.from_numpy(x.reshape(-1, 1, 64).copy())
    fields, bad = bound.ops.encode(key, key)
    want = np.clip(x.astype(np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    want[want == 0x80] = 0
    assert np.array_equal(fields["key_data"].numpy().ravel(), want)
    assert bad.tolist() == [0, 0]


# ---- hostile data (facts of other projects' failures) ---------------------------------------------------------

HOSTILE = {
    "1e5": lambda x: x.index_fill_(-1, torch.tensor([7]), 1e5),
    "-1e5": lambda x: x.index_fill_(-1, torch.tensor([7]), -1e5),
    "131072": lambda x: x.index_fill_(-1, torch.tensor([0]), 131072.0).index_fill_(
        -1, torch.tensor([1]), -131072.0
    ),
    "norm above 65504": lambda x: x.fill_(5e4),
    "1e9": lambda x: x.mul_(1e9),
    "3e38": lambda x: x.sign_().mul_(3e38),
    "zero": lambda x: x.zero_(),
    "constant": lambda x: x.fill_(-0.37),
    "tiny range": lambda x: x.mul_(1e-9).add_(1.0),
    "1e-30": lambda x: x.mul_(1e-30),
    "nan": lambda x: x.index_fill_(-1, torch.tensor([5]), math.nan),
    "inf": lambda x: x.index_fill_(-1, torch.tensor([5]), math.inf),
    "-inf": lambda x: x.index_fill_(-1, torch.tensor([5]), -math.inf),
}
NON_FINITE = ("nan", "inf", "-inf")


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_vectors_stay_where_they_are(kind: str, preset: str, layout: str):
    generator = torch.Generator().manual_seed(5)
    bound = reference(layer_spec(64, 2, 2), preset, layout, 16)
    key, value = (gaussian((20, 2, 64), generator, torch.bfloat16) for _ in range(2))
    clean = bound.allocate(2, "cpu")
    bound.store(key, value, clean, torch.arange(20))
    HOSTILE[kind](key[9, 1])
    HOSTILE[kind](value[9, 1])
    cache = bound.allocate(2, "cpu")
    counter = torch.zeros(2, dtype=torch.int32)
    bound.store(key, value, cache, torch.arange(20), nonfinite=counter)
    assert counter.tolist() == ([1, 1] if kind in NON_FINITE else [0, 0])

    # No other token and no other head changes by a byte; no fp16 field is inf or NaN.
    for name, _ in bound.layout.places:
        got, want = (field_view(c.data, bound.layout, name).flatten(0, 1) for c in (cache, clean))
        others = torch.ones((32, 2), dtype=torch.bool)
        others[9, 1] = False
        assert torch.equal(got[others], want[others]), name
        if name in ("key_norm", "key_residual", "value_scale", "value_zero"):
            assert torch.isfinite(read_fp16(got)).all(), name

    # What is read back is finite, and as close as its clamped scale allows.
    lens = torch.tensor([20], dtype=torch.int32)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    read = bound.dequantize(cache, table, lens, dtype=torch.float64)
    assert torch.isfinite(read.key).all()
    assert torch.isfinite(read.value).all()
    k, v = key[9, 1].double(), value[9, 1].double()
    if kind in NON_FINITE:
        assert not read.key[9, 1].any()
        assert not read.value[9, 1].any()
    else:
        v = v.clamp(-65504, 65504)
        step = max(float(v.max() - v.min()), 1e-7) / (2 ** get_preset(preset).value_bits - 1)
        rounding = 2e-3 * float(v.abs().max()) + 1e-7 + 1e-3 * float(v.max() - v.min())
        assert (read.value[9, 1] - v).abs().max() <= 0.5 * step + rounding
        if get_preset(preset).fp8_keys:
            assert (read.key[9, 1] - k.clamp(-448, 448)).abs().max() <= 2**-9 + 2**-4 * 448
        elif float(k.norm()) > 1e-6:
            # Direction is kept; length is clamped to 65504 (folded norms: to 65504 / ||c||, within a few percent).
            # An estimate from a sketch is unbiased, and as an approximation worse and longer.
            sketch = get_preset(preset).sketch
            cosine = float(read.key[9, 1] @ k / read.key[9, 1].norm() / k.norm())
            assert cosine > (
                (0.8 if sketch else 0.97)
                if kind not in ("constant", "tiny range", "norm above 65504", "zero", "3e38")
                else 0.2
            )
            longest = 1.5 if sketch else 1.1
            assert float(read.key[9, 1].norm()) <= longest * min(float(k.norm()), 65504.0) + 1e-6

    # And attention over it is finite for every query head.
    query = gaussian((1, 4, 64), generator, torch.bfloat16)
    out, lse = bound.decode(query, cache, table, lens, return_lse=True)
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()
    clean_out = bound.decode(query, clean, table, lens)
    assert torch.equal(out[:, :2], clean_out[:, :2]), "the other KV head's queries must not notice"


@pytest.mark.parametrize("preset", ["turboquant_4bit_nc", "turboquant_3bit_nc"])
def test_the_smallest_value_scale(preset: str):
    """1e-8, which fp16 rounds to 0: for a constant vector; ten codes in a range of 1e-7; all codes in one of 6e-7."""
    bound = reference(layer_spec(64, 1, 1, "fp32"), preset, "soa", 16)
    levels = 2**bound.layout.preset.value_bits - 1
    value = torch.stack([torch.full((64,), 0.5), torch.linspace(0, 6e-7, 64), torch.linspace(0, 1e-7, 64)])[
        :, None
    ]
    fields, _ = bound.ops.encode(value, value)
    assert read_fp16(fields["value_scale"])[0] == 0
    codes = unpack(fields["value_data"], bound.layout.preset.value_bits, 64)[:, 0]
    assert not codes[0].any()
    assert set(codes[1].tolist()) == set(range(levels + 1))
    assert codes[2].max() == min(10, levels)


def test_nonfinite_vectors_are_added_to_the_count():
    generator = torch.Generator().manual_seed(13)
    bound = reference(layer_spec(64, 2, 1), "turboquant_4bit_nc", "soa", 16)
    key, value = (gaussian((3, 2, 64), generator, torch.bfloat16) for _ in range(2))
    key[0, :, 3], value[2, 1, 5] = math.nan, math.inf
    count = torch.tensor([10, 20], dtype=torch.int32)
    for _ in range(2):
        bound.store(key, value, bound.allocate(1, "cpu"), torch.arange(3), nonfinite=count)
    assert count.tolist() == [14, 22]


@pytest.mark.parametrize("preset", ["turboquant_4bit_nc", "turboquant_3bit_nc"])
def test_values_are_coded_in_fp32_whatever_the_math(preset: str):
    """Rounding decides their bytes, so the oracle must not compute their scales in fp64."""
    generator = torch.Generator().manual_seed(14)
    value = gaussian((4096, 2, 64), generator, torch.bfloat16)
    stored = []
    for dtype in (torch.float32, torch.float64):
        bound = reference(layer_spec(64, 2, 1), preset, "soa", 16, dtype)
        stored.append(bound.ops.encode(value, value)[0])
    for name in ("value_data", "value_scale", "value_zero"):
        assert torch.equal(stored[0][name], stored[1][name]), name


@pytest.mark.parametrize("exponent", [40, 55, 57, 60, 63, 100, 120])
def test_direction_does_not_depend_on_the_scale_of_a_key(exponent: int):
    """bf16 reaches 3e38, whose square is not an fp32 number: codes stay those of the same key at scale 1."""
    generator = torch.Generator().manual_seed(12)
    bound = reference(layer_spec(256, 1, 1), "turboquant_4bit_nc", "aos", 16)
    key = gaussian((16, 1, 256), generator, torch.bfloat16)
    plain, _ = bound.ops.encode(key, key)
    large, _ = bound.ops.encode(key * 2.0**exponent, key)
    assert torch.equal(large["key_data"], plain["key_data"])
    assert (read_fp16(large["key_norm"]) == 65504.0).all()


def test_sinks_at_their_limits():
    generator = torch.Generator().manual_seed(6)
    with_sinks = reference(layer_spec(64, 1, 4, sinks=True), "turboquant_4bit_nc", "soa", 16)
    without = reference(layer_spec(64, 1, 4), "turboquant_4bit_nc", "soa", 16)
    cache, table, _, _ = fill(without, [40], generator)
    query = gaussian((1, 4, 64), generator, torch.bfloat16)
    lens = torch.tensor([40], dtype=torch.int32)
    plain, plain_lse = without.decode(query, cache, table, lens, return_lse=True)
    got, lse = with_sinks.decode(
        query, cache, table, lens, sinks=torch.full((4,), -math.inf), return_lse=True
    )
    assert torch.equal(got, plain)
    assert torch.equal(lse, plain_lse)
    got, lse = with_sinks.decode(query, cache, table, lens, sinks=torch.full((4,), 30.0), return_lse=True)
    assert got.abs().max() < 1e-8
    assert torch.allclose(lse, torch.full((1, 4), 30.0))


@pytest.mark.parametrize("window", [1, 15, 16, 17])
def test_the_key_at_the_window_edge_counts_and_the_one_before_does_not(window: int):
    generator = torch.Generator().manual_seed(7)
    bound = reference(layer_spec(64, 1, 1, window=window), "turboquant_k8v4", "soa", 16)
    length = 40
    cache, table, _, value = fill(bound, [length], generator)
    lens = torch.tensor([length], dtype=torch.int32)
    query = gaussian((1, 1, 64), generator, torch.bfloat16)
    before = bound.decode(query, cache, table, lens)
    for token, must_change in ((length - window, True), (length - window - 1, False)):
        slot = table[0, token // 16].long() * 16 + token % 16
        changed = bound.wrap(cache.data.clone())
        bound.store(value[token, None] + 5, value[token, None] + 50, changed, slot[None])
        assert torch.equal(bound.decode(query, changed, table, lens), before) != must_change


def test_padded_rows_are_never_read():
    generator = torch.Generator().manual_seed(8)
    bound = reference(layer_spec(64, 2, 2), "turboquant_4bit_nc", "soa", 16, checks="off")
    cache, table, _, _ = fill(bound, [20], generator)
    query = gaussian((3, 4, 64), generator, torch.bfloat16)
    wild = torch.cat([table, torch.full((1, 2), -1), torch.full((1, 2), 2**31 - 1)]).int()
    out, lse = bound.decode(query, cache, wild, torch.tensor([20, 0, 0], dtype=torch.int32), return_lse=True)
    assert (out[1:] == 0).all()
    assert (lse[1:] == -math.inf).all()
    assert torch.equal(out[:1], bound.decode(query[:1], cache, table, torch.tensor([20], dtype=torch.int32)))


def test_partial_results_merge_by_lse():
    """The documented rule: sum(out_i * exp(lse_i)) / sum(exp(lse_i)), sinks given to one part."""
    generator = torch.Generator().manual_seed(9)
    layer = layer_spec(64, 1, 2, sinks=True)
    sinks = torch.randn(2, generator=generator)
    bound = reference(layer, "turboquant_4bit_nc", "soa", 16, torch.float64)
    plain = reference(layer_spec(64, 1, 2), "turboquant_4bit_nc", "soa", 16, torch.float64)
    cache, table, _, _ = fill(bound, [48], generator)
    query = gaussian((1, 2, 64), generator, torch.bfloat16)

    def run(b, blocks, length, **more):
        out, lse = torch.empty((1, 2, 64), dtype=torch.float64), torch.empty((1, 2), dtype=torch.float64)
        b.decode(query, cache, blocks, torch.tensor([length], dtype=torch.int32), out=out, lse=lse, **more)
        return out, lse

    whole, whole_lse = run(bound, table, 48, sinks=sinks)
    a, b = run(bound, table[:, :1], 16, sinks=sinks), run(plain, table[:, 1:].contiguous(), 32)
    total = torch.logaddexp(a[1], b[1])
    merged = sum(o * (lse - total).exp()[..., None] for o, lse in (a, b))
    assert torch.allclose(merged, whole, atol=1e-12)
    assert torch.allclose(total, whole_lse, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("preset", PRESETS)
def test_nothing_read_back_in_fp16_is_infinite(preset: str, layout: str):
    """The stored scale is never rounded so far up that the largest code leaves fp16."""
    bound = reference(layer_spec(64, 1, 2, "fp16"), preset, layout, 16)
    key = torch.zeros((4, 1, 64), dtype=torch.float16)
    value = torch.zeros((4, 1, 64), dtype=torch.float16)
    value[0, 0, 0], value[0, 0, 1] = 65504.0, -65504.0
    value[1, 0, :32], value[1, 0, 32:] = 65504.0, -65472.0
    value[2], value[3, 0, 5] = 65504.0, 65504.0
    cache = bound.allocate(1, "cpu")
    bound.store(key, value, cache, torch.arange(4))
    lens, table = torch.tensor([4], dtype=torch.int32), torch.zeros((1, 1), dtype=torch.int32)
    read = bound.dequantize(cache, table, lens, dtype=torch.float16)
    assert torch.isfinite(read.value).all()
    assert (
        float((read.value.double() - value.double()).abs().max())
        < 65504 / (2 ** get_preset(preset).value_bits - 1) * 1.05
    )
    assert torch.isfinite(bound.decode(key[:1].expand(1, 2, 64).contiguous(), cache, table, lens)).all()


class NoDivisionByNumbers(TorchFunctionMode):
    """On a GPU torch divides by a number with its reciprocal: other roundings, so other bytes, than on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.__truediv__, torch.Tensor.div, torch.div, torch.true_divide):
            assert isinstance(args[1], torch.Tensor), f"a tensor is divided by {args[1]}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("preset", ["k8v4", "4bit_nc", "k3v4_nc", "3bit_nc"])
@pytest.mark.parametrize("layout", ["soa", "aos"])
def test_store_divides_the_same_way_on_every_device(preset: str, layout: str):
    bound = reference(layer_spec(96, 2, 2), preset, layout, 16, checks="off")
    cache = bound.allocate(1, "cpu")
    g = torch.Generator().manual_seed(3)
    key, value = (gaussian((16, 2, 96), g, torch.bfloat16) for _ in range(2))
    with NoDivisionByNumbers():
        bound.store(key, value, cache, torch.arange(16))
    assert cache.data.any()
