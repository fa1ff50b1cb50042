"""Layouts: the table of design.md, every byte owned by one field, packing, tags, strides and conversion."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import gaussian, layer_spec, reference, same_bytes
from turboquant_rocm import Preset, SpecError, TagError, get_preset, make_layout, preset_names
from turboquant_rocm.codebook import centroids, rotation
from turboquant_rocm.layouts import LAYOUT_NAMES, LAYOUT_VERSION, CacheTag, Layout
from turboquant_rocm.layouts.convert import canonicalize, convert
from turboquant_rocm.layouts.packing import pack, unpack
from turboquant_rocm.layouts.views import allocate, check_cache, field_view, read_fp16

HEAD_SIZES = (16, 64, 80, 96, 112, 128, 192, 256)


@pytest.mark.parametrize(
    ("preset", "sizes"),
    [
        ("turboquant_k8v4", {128: 196, 64: 100, 256: 388}),
        ("turboquant_4bit_nc", {128: 134, 64: 70, 256: 262}),
        ("turboquant_k3v4_nc", {128: 118, 64: 62, 256: 230}),
        ("turboquant_3bit_nc", {128: 102, 64: 54, 256: 198}),
    ],
)
@pytest.mark.parametrize("name", LAYOUT_NAMES)
def test_slot_table_of_the_design(name: str, preset: str, sizes: dict[int, int]):
    for head_size, want in sizes.items():
        layout = make_layout(name, preset, head_size, 8, 16)
        assert layout.slot_bytes == want
        assert layout.block_stride == layout.content_bytes == 16 * 8 * want


geometries = st.builds(
    dict,
    name=st.sampled_from(LAYOUT_NAMES),
    preset=st.sampled_from(preset_names()),
    head_size=st.sampled_from(HEAD_SIZES),
    value_head_size=st.sampled_from((None, 24, 64, 100, 128)),
    num_kv_heads=st.integers(1, 11),
    block_size=st.one_of(st.integers(1, 40), st.sampled_from((64, 528))),
    slot_pad=st.sampled_from((0, 0, 2, 26, 58)),
    block_pad=st.sampled_from((0, 0, 2, 46, 4096)),
).filter(lambda g: (g["value_head_size"] or g["head_size"]) % (get_preset(g["preset"]).value_group or 1) == 0)


def build(g: dict) -> Layout:
    g = dict(g)
    slot_pad, block_pad = g.pop("slot_pad"), g.pop("block_pad")
    plain = make_layout(**g)
    padded = make_layout(**g, slot_stride=plain.slot_bytes + slot_pad)
    return make_layout(**g, slot_stride=padded.slot_stride, block_stride=padded.block_stride + block_pad)


@given(geometries)
@settings(max_examples=150, deadline=None)
def test_every_byte_has_one_owner(g: dict):
    layout = build(g)
    owners = np.zeros(layout.block_stride, np.int64)
    for _, place in layout.places:
        token = np.arange(layout.block_size)[:, None, None] * place.token_stride
        head = np.arange(layout.num_kv_heads)[None, :, None] * place.head_stride
        byte = np.arange(place.nbytes)
        np.add.at(owners, (place.base + token + head + byte).ravel(), 1)
    assert owners.max() == 1, "two fields share a byte"
    pieces = layout.block_size * layout.num_kv_heads
    used = sum(place.nbytes for _, place in layout.places)
    assert owners.sum() == pieces * used, "a field reaches outside its block, or a byte is counted twice"
    # What no field owns is padding: rounding to even sizes, and what the server asked for.
    assert layout.block_stride - owners.sum() <= (
        pieces * (layout.slot_stride - used) + (layout.block_stride - pieces * layout.slot_stride) + 1
    )
    for name, place in layout.places:
        if layout.name == "soa" and name in ("key_norm", "value_scale", "value_zero"):
            strides = (place.base, place.token_stride, place.head_stride)
            assert not any(x % 2 for x in strides), "kernels load these as aligned fp16"
    if layout.slot_stride == used and layout.block_stride == pieces * layout.slot_stride:
        assert owners.min() == 1, "a byte that nobody owns"


@given(geometries, st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_store_writes_fields_and_never_pads(g: dict, seed: int):
    layout = build(g)
    generator = torch.Generator().manual_seed(seed)
    layer = layer_spec(layout.head_size, layout.num_kv_heads, 1, value_head_size=layout.value_head_size)
    bound = reference(
        layer,
        layout.preset.name,
        layout.name,
        layout.block_size,
        slot_stride=layout.slot_stride,
        block_stride=layout.block_stride,
    )
    assert bound.layout == layout
    caches = [bound.allocate(2, "cpu", fill=f) for f in (0x00, 0xFF)]
    tokens = 2 * layout.block_size
    key = gaussian((tokens, layout.num_kv_heads, layout.head_size), generator, torch.bfloat16)
    value = gaussian((tokens, layout.num_kv_heads, layout.value_head_size), generator, torch.bfloat16)
    for cache in caches:
        bound.store(key, value, cache, torch.randperm(tokens, generator=generator.manual_seed(seed)))
    flat = [c.data.as_strided((2, layout.block_stride), (layout.block_stride, 1)) for c in caches]
    owned = torch.zeros(layout.block_stride, dtype=torch.bool)
    for _, place in layout.places:
        for t in range(layout.block_size):
            for h in range(layout.num_kv_heads):
                start = place.offset(t, h)
                owned[start : start + place.nbytes] = True
    assert (flat[0][:, ~owned] == 0x00).all()
    assert (flat[1][:, ~owned] == 0xFF).all(), "a pad was written"
    assert torch.equal(flat[0][:, owned], flat[1][:, owned]), "a byte of a stored slot was left as it was"


@given(
    st.integers(1, 8),
    st.integers(1, 70),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=100, deadline=None)
def test_packing_is_one_little_endian_bit_stream(bits: int, count: int, seed: int):
    codes = np.random.default_rng(seed).integers(0, 2**bits, (3, count), dtype=np.uint8)
    packed = pack(codes, bits)
    for row, data in zip(codes, packed, strict=True):  # independent definition: one big integer
        number = sum(int(c) << (bits * i) for i, c in enumerate(row))
        assert number.to_bytes((count * bits + 7) // 8, "little") == data.tobytes()
    assert np.array_equal(unpack(packed, bits, count), codes)
    assert np.array_equal(pack(torch.from_numpy(codes), bits).numpy(), packed)
    assert np.array_equal(unpack(torch.from_numpy(packed), bits, count).numpy(), codes)


def test_packing_refuses():
    with pytest.raises(SpecError, match="bits=9"):
        pack(np.zeros(8, np.uint8), 9)
    with pytest.raises(SpecError, match=r"bits=4\.0"):
        pack(np.zeros(8, np.uint8), 4.0)
    with pytest.raises(SpecError, match="data"):
        unpack(np.zeros(5, np.uint8), 3, 8)


@pytest.mark.parametrize("bits", [3, 4])
def test_nibble_and_three_bit_order(bits: int):
    packed = pack(np.arange(8, dtype=np.uint8), bits)
    assert packed.tolist() == ([0x10, 0x32, 0x54, 0x76] if bits == 4 else [0x88, 0xC6, 0xFA])


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("name", "aoz"),
        ("preset", "turboquant_5bit"),
        ("num_kv_heads", 0),
        ("block_size", 0),
        ("block_size", 16.0),
        ("head_size", 0),
        ("head_size", 36),
        ("slot_stride", 132),
        ("slot_stride", 135),
        ("block_stride", 8 * 16 * 134 - 2),
        ("block_stride", 8 * 16 * 134 + 1),
    ],
)
def test_wrong_geometry_is_refused_by_name(argument: str, value: object):
    good = {
        "name": "soa",
        "preset": "turboquant_4bit_nc",
        "head_size": 128,
        "num_kv_heads": 8,
        "block_size": 16,
    }
    with pytest.raises(SpecError) as error:
        make_layout(**{**good, argument: value})
    assert error.value.field == ("layout" if argument == "name" else argument)
    assert str(value) in str(error.value)


TAG = make_layout("soa", "turboquant_4bit_nc", 128, 8, 16).tag


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(CacheTag)])
def test_tag_names_each_difference(field: str):
    """Pitfall 9."""
    other = dataclasses.replace(TAG, **{field: "other"})
    with pytest.raises(TagError) as error:
        other.require(TAG)
    assert list(error.value.differences) == [field]
    assert f"{field}=other" in str(error.value)


@pytest.mark.parametrize(
    ("layout", "preset", "meaning"),
    [
        ("aos", "turboquant_k8v4", ("e4m3fn", "none", False)),
        ("soa", "turboquant_k8v4", ("e4m3fn", "none", False)),
        ("aos", "turboquant_3bit_nc", (None, "raw", True)),
        ("soa", "turboquant_3bit_nc", (None, "folded", True)),
        ("soa", Preset("plain", 3, 3, False), (None, "raw", False)),
    ],
    ids=str,
)
def test_tag_says_what_the_bytes_mean(layout: str, preset: str | Preset, meaning: tuple):
    made = make_layout(layout, preset, 64, 2, 16, slot_stride=128)
    tag = made.tag
    assert (tag.fp8_format, tag.norm_meaning, tag.norm_correction) == meaning
    assert (tag.layout, tag.version) == (layout, LAYOUT_VERSION)
    assert (tag.preset, tag.key_bits, tag.value_bits) == (
        made.preset.name,
        made.preset.key_bits,
        made.preset.value_bits,
    )
    assert (tag.head_size, tag.value_head_size, tag.num_kv_heads, tag.block_size) == (64, 64, 2, 16)
    assert (tag.slot_stride, tag.block_stride) == (128, 16 * 2 * 128)
    assert dataclasses.replace(made, version=LAYOUT_VERSION + 1).tag.version == LAYOUT_VERSION + 1


def test_strides_of_single_elements_mean_nothing():
    """torch gives a dimension of one element any stride: a cache of one block, sliced out of a pool, is a good one."""
    layout = make_layout("soa", "turboquant_4bit_nc", 64, 2, 16)
    pool = allocate(layout, 6, "cpu")
    check_cache(pool[::3][1:], layout)
    with pytest.raises(SpecError, match="strides"):
        check_cache(pool[::3], layout)


def test_many_differences_are_all_read():
    other = make_layout("aos", "turboquant_3bit_nc", 64, 4, 32).tag
    with pytest.raises(TagError) as error:
        other.require(TAG)
    assert len(error.value.differences) == 11
    for name, (got, wants) in error.value.differences.items():
        assert f"{name}={got} (wants {wants})" in str(error.value)


def test_tag_survives_json():
    assert CacheTag.from_dict(TAG.to_dict()) == TAG
    with pytest.raises(SpecError, match="exactly the fields"):
        CacheTag.from_dict({"layout": "soa"})


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "aos"},
        {"preset": "turboquant_k3v4_nc"},
        {"block_size": 32},
    ],
    ids=lambda c: next(iter(c)),
)
def test_a_foreign_cache_raises_the_tag_error(change: dict):
    base = {"preset": "turboquant_4bit_nc", "layout": "soa", "block_size": 16}
    layer = layer_spec(64, 2, 2)
    writer, reader = (reference(layer, **{**base, **c}) for c in (change, {}))
    cache = writer.allocate(4, "cpu")
    table = torch.zeros((1, 1), dtype=torch.int32)
    lens = torch.ones(1, dtype=torch.int32)
    query = torch.zeros((1, 4, 64), dtype=torch.bfloat16)
    key = torch.zeros((1, 2, 64), dtype=torch.bfloat16)
    for use in (
        lambda: reader.decode(query, cache, table, lens),
        lambda: reader.dequantize(cache, table, lens),
        lambda: reader.store(key, key, cache, torch.zeros(1, dtype=torch.int64)),
    ):
        with pytest.raises(TagError, match=next(iter(change))):
            use()
    assert not cache.data.any(), "nothing may be written"


def test_a_cache_of_another_version_is_refused():
    bound = reference(layer_spec(64, 2, 2), "turboquant_4bit_nc", "soa", 16)
    cache = bound.allocate(2, "cpu")
    old = dataclasses.replace(cache, tag=dataclasses.replace(cache.tag, version=0))
    with pytest.raises(TagError, match="version=0"):
        bound.dequantize(old, torch.zeros((1, 1), dtype=torch.int32), torch.ones(1, dtype=torch.int32))


@given(geometries, st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_conversion_round_trip_and_direct_store(g: dict, seed: int):
    generator = torch.Generator().manual_seed(seed)
    aos, soa = (build({**g, "name": n}) for n in ("aos", "soa"))
    layer = layer_spec(aos.head_size, aos.num_kv_heads, 1, value_head_size=aos.value_head_size)
    tokens = 2 * aos.block_size
    key = gaussian((tokens, aos.num_kv_heads, aos.head_size), generator, torch.bfloat16, 3.0)
    value = gaussian((tokens, aos.num_kv_heads, aos.value_head_size), generator, torch.bfloat16)
    stored = {}
    for layout in (aos, soa):
        strides = {"slot_stride": layout.slot_stride, "block_stride": layout.block_stride}
        bound = reference(layer, layout.preset.name, layout.name, layout.block_size, **strides)
        stored[layout.name] = bound.allocate(2, "cpu")
        bound.store(key, value, stored[layout.name], torch.arange(tokens))
    forward = convert(stored["aos"].data, aos, soa)
    back = convert(forward, soa, aos)
    for layout, got, want in (
        (soa, forward, stored["soa"].data),
        (aos, back, stored["aos"].data),
        (aos, convert(stored["soa"].data, soa, aos), stored["aos"].data),
    ):
        for name, _ in layout.places:
            a, b = field_view(got, layout, name), field_view(want, layout, name)
            if name == "key_norm":  # within one fp16 ulp: bit patterns of positive numbers are ordered
                ulp = (read_fp16(a).view(torch.int16).int() - read_fp16(b).view(torch.int16).int()).abs()
                assert ulp.max() <= 1
            else:
                assert torch.equal(a, b), name


def fp16_ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """Largest distance in fp16 steps of two tensors of positive numbers, whose bit patterns are ordered."""
    return int((a.view(torch.int16).int() - b.view(torch.int16).int()).abs().max())


@pytest.mark.parametrize("preset", ["turboquant_4bit_nc", "turboquant_k3v4_nc"])
@pytest.mark.parametrize("head_size", [64, 96, 128])
def test_conversion_at_the_ends_of_fp16(preset: str, head_size: int):
    """The identity while ||k|| / ||c|| fits fp16; beyond, saturation as in a direct store; never infinity."""
    g = torch.Generator().manual_seed(0)
    direction = torch.randn((16, 1, head_size), generator=g)
    direction[8:, 0] = torch.from_numpy(rotation(head_size)[:8].copy()).float()  # one-hot when rotated
    norms = torch.tensor([0.0, 1e-7, 1e-3, 1.0, 2.0e4, 6.0e4, 65500.0, 1e6]).repeat(2)[:, None, None]
    key = direction / direction.norm(dim=-1, keepdim=True) * norms
    layer = layer_spec(head_size, 1, 1, "fp32")
    caches, layouts = {}, {}
    for name in LAYOUT_NAMES:
        bound = reference(layer, preset, name, 16)
        caches[name], layouts[name] = bound.allocate(1, "cpu"), bound.layout
        bound.store(key, key.clamp(-1, 1), caches[name], torch.arange(16))

    def norm_of(data: torch.Tensor, name: str) -> torch.Tensor:
        return read_fp16(field_view(data, layouts[name], "key_norm"))[0, :, 0]

    forward = convert(caches["aos"].data, layouts["aos"], layouts["soa"])
    back = convert(forward, layouts["soa"], layouts["aos"])
    raw, folded, again = norm_of(caches["aos"].data, "aos"), norm_of(forward, "soa"), norm_of(back, "aos")
    assert torch.isfinite(folded).all()
    assert torch.isfinite(again).all()
    codes = field_view(caches["aos"].data, layouts["aos"], "key_data")[0, :, 0]
    c = torch.from_numpy(centroids(head_size, layouts["aos"].preset.key_bits).copy()).double()
    length = c[unpack(codes, layouts["aos"].preset.key_bits, head_size).long()].norm(dim=-1)
    fits = raw.double() / length <= 65504
    assert 10 <= fits.sum() <= 14, "both cases occur"
    assert fp16_ulps(again[fits], raw[fits]) <= 1
    assert (folded[~fits] == 65504).all()
    assert fp16_ulps(again[~fits], (65504 * length[~fits]).clamp(max=65504).half()) == 0
    assert (again[~fits] < raw[~fits]).any(), "the loss that the documentation speaks of"
    # As a direct store, where AoS did not lose the norm first: to its own clamp, or to fp16's subnormal numbers.
    stored = (norms.squeeze() == 0) | ((norms.squeeze() >= 2**-14) & (norms.squeeze() <= 65504))
    assert fp16_ulps(folded[stored], norm_of(caches["soa"].data, "soa")[stored]) <= 1

    top = caches["soa"].data.clone()  # the largest folded norm there is: ||c|| > 1 must not carry it over
    field_view(top, layouts["soa"], "key_norm")[:] = torch.tensor([0xFF, 0x7B], dtype=torch.uint8)
    unfolded = norm_of(convert(top, layouts["soa"], layouts["aos"]), "aos")
    assert torch.isfinite(unfolded).all()


def test_conversion_refuses_other_contents():
    a = make_layout("aos", "turboquant_4bit_nc", 64, 2, 16)
    with pytest.raises(SpecError, match="target block_size=32"):
        convert(allocate(a, 1, "cpu"), a, make_layout("soa", "turboquant_4bit_nc", 64, 2, 32))


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("preset", {"preset": "turboquant_k3v4_nc"}),
        ("head_size", {"head_size": 128, "value_head_size": 64}),
        ("value_head_size", {"value_head_size": 128}),
        ("num_kv_heads", {"num_kv_heads": 3}),
        ("block_size", {"block_size": 8}),
    ],
)
def test_conversion_names_what_the_layouts_disagree_on(field: str, other: dict):
    same = {"preset": "turboquant_4bit_nc", "head_size": 64, "num_kv_heads": 2, "block_size": 16}
    a, b = make_layout("aos", **same), make_layout("soa", **{**same, **other})
    with pytest.raises(SpecError) as error:
        convert(allocate(a, 1, "cpu"), a, b)
    assert error.value.field == f"target {field}"


def test_conversion_refuses_tensors_that_it_would_misread_or_overwrite():
    """Too few or too many blocks (copying would repeat one block into all), no cache at all, memory that it reads."""
    a, b = (make_layout(name, "turboquant_4bit_nc", 64, 2, 16) for name in LAYOUT_NAMES)
    cache = allocate(a, 3, "cpu", fill=0xCD)
    pool = torch.full((7, *a.shape), 0xCD, dtype=torch.uint8)
    for out, got in (
        (allocate(b, 1, "cpu"), "1 blocks"),
        (allocate(b, 4, "cpu"), "4 blocks"),
        (allocate(b, 3, "cpu").to(torch.int8), "int8"),
        (cache, "memory of the cache"),
    ):
        with pytest.raises(SpecError) as error:
            convert(cache, a, b, out)
        assert error.value.field in ("out", "cache")
        assert got in str(error.value)
    for wrong in (cache.to(torch.int8), cache[..., :-2], None):
        with pytest.raises(SpecError, match="cache="):
            convert(wrong, a, b)
    for shift in (0, 1, 2):
        with pytest.raises(SpecError, match="memory of its own"):
            convert(pool[2:5], a, b, pool[2 + shift : 5 + shift])
        with pytest.raises(SpecError, match="memory of its own"):
            convert(pool[2:5], a, b, pool[2 - shift : 5 - shift])
    assert (cache == 0xCD).all()
    assert (pool == 0xCD).all(), "nothing may be written"
    convert(pool[1:4], a, b, pool[4:7])  # neighbours share no byte
    for wrong in ("soa", None):
        with pytest.raises(SpecError, match="source="):
            convert(cache, wrong, b)
        with pytest.raises(SpecError, match="target="):
            convert(cache, a, wrong)


def test_conversion_between_interleaved_caches_of_one_pool():
    """A page pool may hold two layers' blocks by turns: their spans overlap, and no block does."""
    page = make_layout("aos", "turboquant_4bit_nc", 64, 2, 16).block_stride
    a, b = (
        make_layout(name, "turboquant_4bit_nc", 64, 2, 16, block_stride=2 * page) for name in LAYOUT_NAMES
    )
    generator = torch.Generator().manual_seed(6)
    pool = torch.randint(0, 256, (8 * page,), generator=generator, dtype=torch.uint8)
    first, second = (pool[i * page :].as_strided((4, *a.shape), a.strides) for i in (0, 1))
    field_view(first, a, "key_norm")[..., 1] &= 0x3B  # finite norms
    want = convert(first, a, b)
    convert(first, a, b, second)
    assert torch.equal(second, want)


def test_canonicalize_foreign_bytes():
    fp8 = make_layout("soa", "turboquant_k8v4", 64, 2, 16)
    cache = allocate(fp8, 2, "cpu", fill=0x80)
    assert canonicalize(cache, fp8) == 2 * 16 * 2 * 64
    assert (field_view(cache, fp8, "key_data") == 0).all()
    assert (field_view(cache, fp8, "value_data") == 0x80).all()
    mse = make_layout("aos", "turboquant_4bit_nc", 64, 2, 16)
    cache = allocate(mse, 1, "cpu")
    field_view(cache, mse, "key_norm")[0, 3, 1] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)
    assert canonicalize(cache, mse) == 2
    assert read_fp16(field_view(cache, mse, "key_norm"))[0, 3, 1] == 65504.0


def test_caches_of_equal_input_are_equal():
    """The comparison the other tests rest on can fail."""
    bound = reference(layer_spec(64, 2, 1), "turboquant_4bit_nc", "soa", 16)
    a, b = bound.allocate(1, "cpu"), bound.allocate(1, "cpu")
    assert same_bytes(a, b)
    b.data[0, 0, 0, 0] = 1
    assert not same_bytes(a, b)
