"""What store and dequantise must do, as functions of a device: run interpreted (l1) and compiled (l2) alike."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from tests.cases import CPU, TORCH_DTYPES, gaussian, layer_spec, reference, rel_l2
from tests.golden_data import FILL, NUM_KV_HEADS, GoldenCase
from turboquant_rocm import BoundLayer, Decision, PagedCache, bind, get_preset
from turboquant_rocm.backends._triton.dequantize import Dequantize
from turboquant_rocm.backends._triton.store import Store
from turboquant_rocm.layouts import Layout
from turboquant_rocm.layouts.convert import canonicalize
from turboquant_rocm.layouts.views import allocate, field_view
from turboquant_rocm.spec import Preset
from turboquant_rocm.target import detect

PRESETS = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")
HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
LAYOUTS = ("aos", "soa")
OTHER_WIDTHS = (
    Preset("k2v2_nc", 2, 2, True),
    Preset("k3v2", 3, 2, False),
    Preset("k4v3", 4, 3, False),
    Preset("k8v2", 8, 2, False),
)
"""Bit widths that no bundled preset has: a width must never be hard-coded behind a parameter."""
ROTATED = (
    ("k8v4+rotated_values", "soa", 64),
    ("3bit_nc+rotated_values", "soa", 128),
    ("4bit_nc+rotated_values", "aos", 96),
    ("3bit_nc+rotated_values", "aos", 256),
    (Preset("k4v2+rotated_values", 4, 2, False, rotated_values=True), "soa", 128),
)
"""Presets with rotated values, layouts and head sizes: every width of value codes, and rotations of both kinds."""


def store_of(layout: Layout, vendor: str | None = None, **options: Any) -> Store:
    """The store kernel for ``vendor``'s GPUs, default this machine's."""
    return Store(layout, vendor or detect().vendor, **options)


def dequantize_of(layout: Layout, vendor: str | None = None, **options: Any) -> Dequantize:
    """The dequantise kernel for ``vendor``'s GPUs, default this machine's."""
    return Dequantize(layout, vendor or detect().vendor, **options)


def bound_for(preset: str | Preset, layout: str, head_size: int, heads: int = 2, **more: Any) -> BoundLayer:
    """The reference, for its layout and as the oracle."""
    options = {k: more.pop(k) for k in ("slot_stride", "block_stride", "math_dtype", "checks") if k in more}
    block_size = more.pop("block_size", 16)
    layer = layer_spec(head_size, heads, 2, **more)
    if isinstance(preset, str):
        preset = get_preset(preset)
    return bind(Decision(layer, CPU, preset, block_size, "torch_reference", layout), **options)


def same_zero(cache: PagedCache, layout: Layout) -> torch.Tensor:
    """The cache on the host, pads and all, with value zero points of -0 as 0: torch may order the two either way."""
    data = cache.data
    data = flat(data).cpu().clone().as_strided(data.shape, data.stride())
    if not layout.has("value_zero"):
        return data
    zero = field_view(data, layout, "value_zero")
    zero[..., 1].masked_fill_((zero[..., 0] == 0) & (zero[..., 1] == 0x80), 0)
    return data


def differences(got: PagedCache, want: PagedCache, layout: Layout) -> dict[str, int]:
    """Bytes that differ, by field, and "pads" for all others; empty if the caches are equal."""
    a, b = same_zero(got, layout), same_zero(want, layout)
    found = {}
    for name, _ in layout.places:
        found[name] = int((field_view(a, layout, name) != field_view(b, layout, name)).sum())
    found["pads"] = int((flat(a) != flat(b)).sum()) - sum(found.values())
    return {name: n for name, n in found.items() if n}


def flat(data: torch.Tensor) -> torch.Tensor:
    """Every byte of the memory that a cache tensor spans, pads between blocks included."""
    return data.as_strided((data.shape[0] * data.stride(0),), (1,))


HOSTILE = (
    "gaussian", "tiny", "zero", "large", "huge", "inf", "nan", "negative", "one_large", "minus_zero", "fp8_edge",
    "subnormal", "minus_inf", "two_level",
)  # fmt: skip
FINITE = tuple(kind for kind in HOSTILE if kind not in ("inf", "nan", "minus_inf"))


def hostile(kind: str, shape: tuple[int, ...], g: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Vectors [..., D] of one unpleasant kind."""
    x = torch.randn(shape, generator=g)
    match kind:
        case "tiny":
            x = x * 1e-30
        case "zero":
            x = x * 0
        case "large":
            x = x * 1e4
        case "huge":
            x = x * (1e35 if dtype == torch.bfloat16 else 3e4)
        case "inf":
            x[..., 0] = float("inf")
        case "minus_inf":
            x[..., -1] = float("-inf")
        case "nan":
            x[..., x.shape[-1] // 2] = float("nan")
        case "negative":
            x = -x.abs()
        case "one_large":
            x[..., 3] = -1e5
        case "minus_zero":
            x = torch.full(shape, -0.0)
        case "fp8_edge":
            x = torch.randint(430, 520, shape, generator=g) * torch.sign(x)
        case "subnormal":
            x = x * 2.0**-8
        case "two_level":
            x = torch.where(x > 0, 3.0, 3.0 + 2.0**-7)
    if dtype == torch.float16 and kind not in ("inf", "nan", "minus_inf"):
        x = x.clamp(-65504, 65504)
    return x.to(dtype)


def mixed(tokens: int, heads: int, width: int, g: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, heads, width] in which every kind of :data:`HOSTILE` takes its turn."""
    parts = [hostile(HOSTILE[t % len(HOSTILE)], (1, heads, width), g, dtype) for t in range(tokens)]
    return torch.cat(parts)


def combinations() -> Iterator[tuple[str | Preset, str, int]]:
    yield from product((*PRESETS, *OTHER_WIDTHS), LAYOUTS, HEAD_SIZES)


# ---- store -------------------------------------------------------------------------------------------------


def check_golden(case: GoldenCase, device: str, vendor: str | None = None) -> None:
    """Bytes of a published implementation where any correct one must agree; 0xCD where nothing is stored."""
    bound = reference(
        layer_spec(case.head_size, NUM_KV_HEADS, 16, case.dtype), case.preset, case.layout, case.block_size
    )
    layout = bound.layout
    cache = bound.allocate(case.cache.shape[0], device, fill=FILL)
    key, value = case.tensor("key").to(device), case.tensor("value").to(device)
    counted = torch.zeros(2, dtype=torch.int32, device=device)
    store_of(layout, vendor)(key, value, cache.data, case.slots.to(device), counted)
    assert not counted.any()

    want = allocate(layout, case.cache.shape[0], "cpu")
    want.copy_(torch.from_numpy(case.cache.copy()))
    canonicalize(want, layout)
    got = cache.data.cpu()
    kept = case.slots >= 0
    slots = case.slots[kept].long()
    block, offset = slots // case.block_size, slots % case.block_size
    preset = bound.decision.preset
    for name, _ in layout.places:
        a, b = field_view(got, layout, name), field_view(want, layout, name)
        if name.startswith("key") and preset.fp8_keys:
            robust = torch.ones(len(slots), NUM_KV_HEADS, dtype=torch.bool)
        else:
            bits = preset.key_bits if name.startswith("key") else preset.value_bits
            robust = torch.from_numpy(case.inputs[f"robust_{name[0]}{bits}"].copy())[kept]
        assert torch.equal(a[block, offset][robust], b[block, offset][robust]), name
        untouched = torch.ones(a.shape[:2], dtype=torch.bool)
        untouched[block, offset] = False
        assert (a[untouched] == FILL).all(), f"{name}: a slot that was not stored has changed"


def check_against_reference(
    preset: str | Preset, layout: str, head_size: int, dtype: str, device: str, tokens: int = 29, heads: int = 3,
    vendor: str | None = None, **more: Any,
) -> None:  # fmt: skip
    """Every byte and both counts equal the reference's, whatever the data; padding tokens and pads untouched.
    Interpreted, a few bytes of codes may differ."""
    g = torch.Generator().manual_seed(head_size)
    bound = bound_for(preset, layout, head_size, heads, dtype=dtype, **more)
    torch_dtype = TORCH_DTYPES[dtype]
    key = mixed(tokens, heads, head_size, g, torch_dtype)
    value = mixed(tokens, heads, bound.layer.value_size, g, torch_dtype)
    blocks = -(-tokens // bound.layout.block_size) + 1
    slots = torch.randperm(blocks * bound.layout.block_size, generator=g)[:tokens]
    slots[::7] = -1
    want, got = bound.allocate(blocks, "cpu", fill=FILL), bound.allocate(blocks, device, fill=FILL)
    flat(want.data).fill_(FILL)
    flat(got.data).fill_(FILL)
    count, counted = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32, device=device)
    bound.store(key, value, want, slots, nonfinite=count)
    store_of(bound.layout, vendor)(key.to(device), value.to(device), got.data, slots.to(device), counted)
    assert differences(got, want, bound.layout) == {}
    assert torch.equal(counted.cpu(), count)


def check_same_bytes_in_pieces(preset: str, layout: str, head_size: int, device: str) -> None:
    """17 tokens stored as 17, as 16 + 1 and as 17 x 1 (pitfall 10), by any tile, with any index dtype."""
    g = torch.Generator().manual_seed(3)
    bound = bound_for(preset, layout, head_size, 2)
    key, value = (gaussian((17, 2, head_size), g, torch.bfloat16).to(device) for _ in range(2))
    slots = torch.randperm(32, generator=g)[:17].to(device)
    caches = []
    for pieces, rows, index in (
        ([17], 8, torch.int64),
        ([16, 1], 8, torch.int32),
        ([1] * 17, 4, torch.int64),
        ([17], 16, torch.int32),
    ):
        cache = bound.allocate(2, device, fill=FILL)
        store = store_of(bound.layout, rows_per_program=rows)
        at = 0
        for n in pieces:
            piece = slice(at, at + n)
            store(key[piece], value[piece], cache.data, slots[piece].to(index))
            at += n
        caches.append(cache.data)
    assert all(torch.equal(caches[0], c) for c in caches[1:])
    assert (caches[0] != FILL).any()


def check_strided_inputs(preset: str, layout: str, device: str) -> None:
    """K and V as views of one fused projection, and slots as every other entry of a tensor."""
    g = torch.Generator().manual_seed(4)
    bound = bound_for(preset, layout, 64, 2)
    fused = gaussian((9, 2, 5, 64), g, torch.bfloat16).to(device)
    key, value = fused[:, :, 1], fused[:, :, 3]
    slots = torch.arange(18, device=device)[::2]
    assert not key.is_contiguous()
    assert slots.stride(0) == 2
    got, want = bound.allocate(2, device, fill=FILL), bound.allocate(2, device, fill=FILL)
    store = store_of(bound.layout)
    store(key, value, got.data, slots)
    store(key.contiguous(), value.contiguous(), want.data, slots.contiguous())
    assert torch.equal(got.data, want.data)


def check_neighbours(kind: str, preset: str, layout: str, device: str) -> None:
    """A vector with a NaN or an infinity is stored as the zero vector and counted, and no other byte changes."""
    g = torch.Generator().manual_seed(5)
    bound = bound_for(preset, layout, 64, 2)
    key, value = (gaussian((6, 2, 64), g, torch.bfloat16) for _ in range(2))
    zeroed = []
    caches = []
    for poison in (True, False):
        k, v = key.clone(), value.clone()
        k[2, 1] = hostile(kind, (64,), g, torch.bfloat16) if poison else 0
        v[3, 0] = hostile(kind, (64,), g, torch.bfloat16) if poison else 0
        cache = bound.allocate(1, device, fill=FILL)
        counted = torch.zeros(2, dtype=torch.int32, device=device)
        store_of(bound.layout)(
            k.to(device), v.to(device), cache.data, torch.arange(6, device=device), counted
        )
        zeroed.append(counted.tolist())
        caches.append(cache.data)
    assert zeroed == [[1, 1], [0, 0]]
    assert torch.equal(*caches)


def check_fields_are_finite(preset: str, layout: str, dtype: str, device: str) -> None:
    """No stored field is ever inf or NaN, and what is read back is within a clamped step of the clamped input."""
    g = torch.Generator().manual_seed(6)
    bound = bound_for(preset, layout, 64, 2, dtype=dtype)
    torch_dtype = TORCH_DTYPES[dtype]
    key = torch.cat([hostile(kind, (1, 2, 64), g, torch_dtype) for kind in FINITE])
    value = torch.cat([hostile(kind, (1, 2, 64), g, torch_dtype) for kind in FINITE])
    n = len(FINITE)
    cache = bound.allocate(1, device)
    store_of(bound.layout)(key.to(device), value.to(device), cache.data, torch.arange(n, device=device))
    data = cache.data.cpu()
    for name, place in bound.layout.places:
        if place.nbytes == 2 and name != "key_data":
            field = field_view(data, bound.layout, name).contiguous().view(torch.float16)
            assert torch.isfinite(field).all(), name
    if bound.decision.preset.fp8_keys:
        assert not ((field_view(data, bound.layout, "key_data") & 0x7F) == 0x7F).any()
    table = torch.zeros(1, 1, dtype=torch.int32)
    read = bound.dequantize(
        bound.wrap(data), table, torch.tensor([n], dtype=torch.int32), dtype=torch.float32
    )
    clamped = value.float().clamp(-65504, 65504)
    levels = 2**bound.decision.preset.value_bits - 1
    step = (clamped.amax(-1) - clamped.amin(-1)).clamp(min=1e-8 * levels) / levels
    slack = 2e-3 * clamped.abs().amax(-1) + 1e-7
    assert ((read.value - clamped).abs().amax(-1) <= 0.51 * step + slack).all()


def check_codes(preset: str | Preset, layout: str, device: str) -> None:
    """Every key and value code occurs, and every key code decodes to its own centroid (pitfall 6)."""
    from turboquant_rocm.codebook import centroids, rotation
    from turboquant_rocm.layouts.packing import unpack

    g = torch.Generator().manual_seed(8)
    d, n = 128, 64
    bound = bound_for(preset, layout, d, 1)
    layout_, bits = bound.layout, bound.decision.preset.key_bits
    key, value = (gaussian((n, 1, d), g, torch.bfloat16) for _ in range(2))
    cache = bound.allocate(n // 16, device)
    store_of(layout_)(key.to(device), value.to(device), cache.data, torch.arange(n, device=device))
    data = cache.data.cpu()

    def codes(field: str, width: int) -> torch.Tensor:
        return unpack(field_view(data, layout_, field).reshape(n, -1).contiguous(), width, d).long()

    vbits = bound.decision.preset.value_bits
    assert codes("value_data", vbits).unique().tolist() == list(range(2**vbits))
    if bound.decision.preset.fp8_keys:
        return
    found = codes("key_data", bits)
    assert found.unique().tolist() == list(range(2**bits))
    k = torch.empty(n, 1, d, device=device)
    v = torch.empty(n, 1, d, device=device)
    table = torch.arange(n // 16, dtype=torch.int32, device=device)[None]
    cu = torch.tensor([0, n], dtype=torch.int32, device=device)
    dequantize_of(layout_)(cache.data, table, cu[:1], cu, k, v)
    rotated = k[:, 0].cpu().double() @ torch.from_numpy(rotation(d).copy()).T
    c = torch.from_numpy(centroids(d, bits).copy()).double()[found]
    size = (rotated * c).sum(-1, keepdim=True) / (c * c).sum(-1, keepdim=True)
    assert ((rotated / size - c).abs().max() < 1e-5).all()


# ---- dequantise --------------------------------------------------------------------------------------------


def check_dequantize(
    preset: str | Preset,
    layout: str,
    head_size: int,
    device: str,
    dtype: torch.dtype = torch.float32,
    vendor: str | None = None,
    **more: Any,
) -> None:
    """Ranges of a ragged batch: what is rotated back within fp32 rounding of the reference, other values equal, the
    rest untouched."""
    g = torch.Generator().manual_seed(head_size)
    bound = bound_for(preset, layout, head_size, 3, **more)
    lens, begin = [5, 0, 33, 16, 1], [2, 0, 17, 16, 0]
    from tests.cases import shuffled_tables

    table, slots, blocks = shuffled_tables(lens, bound.layout.block_size, g)
    dv = bound.layer.value_size
    key, value = (
        gaussian((sum(lens), 3, head_size), g, torch.bfloat16),
        gaussian((sum(lens), 3, dv), g, torch.bfloat16),
    )
    cache = bound.allocate(blocks, "cpu", fill=FILL)
    bound.store(key * 3, value, cache, torch.cat(slots))
    seq_lens, starts = torch.tensor(lens, dtype=torch.int32), torch.tensor(begin, dtype=torch.int32)
    want = bound.dequantize(cache, table, seq_lens, starts=starts, dtype=torch.float32)

    total = len(want.key)
    k = torch.full((total + 2, 3, head_size), 7.0, dtype=dtype, device=device)
    v = torch.full((total + 2, 3, dv), 7.0, dtype=dtype, device=device)
    here = bound.allocate(blocks, device)
    flat(here.data).copy_(flat(cache.data))
    dequantize = dequantize_of(bound.layout, vendor)
    dequantize(here.data, table.to(device), starts.to(device), want.cu_lens.to(device), k, v)
    k, v = k.cpu(), v.cpu()
    assert (k[total:] == 7).all()
    assert (v[total:] == 7).all()
    limit = {torch.float32: 5e-7, torch.float16: 4e-4, torch.bfloat16: 3e-3}[dtype]
    assert rel_l2(k[:total], want.key) <= limit
    if bound.decision.preset.rotated_values:
        assert rel_l2(v[:total], want.value) <= limit
    else:
        assert torch.equal(v[:total], want.value.to(dtype))
