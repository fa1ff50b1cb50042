"""What every backend owes, whatever it is: this file covers a new backend without being touched.

Store bytes equal the reference's, and decode stays within the backend's own tolerance of fp64 attention over the
bytes that it wrote itself. Shapes are small, so that interpreted and simulated kernels can run it too. A backend owes
what its declaration takes: the rest is not collected, so that a skip is about this machine alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from tests.cases import CPU, TORCH_DTYPES, gaussian, layer_spec, reference, rel_l2, shuffled_tables
from turboquant_rocm import LayerSpec, get_preset, preset_names
from turboquant_rocm.accuracy import MIN_EXACT, compare_stored
from turboquant_rocm.backends import backends
from turboquant_rocm.eligibility import Code, Request
from turboquant_rocm.layouts import LAYOUT_NAMES
from turboquant_rocm.spec import ROTATED_VALUES

BLOCK = 16
SEQ_LENS = [1, 16, 37, 0]
SHAPES = {"D64-G4": (64, 2, 4), "D128-G8": (128, 1, 8)}
"""Head size, KV heads, query heads per KV head."""
FEATURES = {
    "plain": {},
    "window": {"window": 20},
    "soft-cap": {"soft_cap": 30.0},
    "sinks": {"sinks": True},
}


PRESETS = (
    *preset_names(),
    *(name + ROTATED_VALUES for name in preset_names() if get_preset(name).value_group is None),
)


def layer_of(shape: str, dtype: str, feature: str) -> LayerSpec:
    head_size, num_kv_heads, gqa_ratio = SHAPES[shape]
    return layer_spec(head_size, num_kv_heads, gqa_ratio, dtype, **FEATURES[feature])


def declared() -> Iterator[tuple[str, str, str, str, str, str]]:
    """(backend, layout, shape, dtype, preset, feature) that nothing but the machine stands against."""
    for shape, dtype, preset, feature in product(SHAPES, ("bf16", "fp16"), PRESETS, FEATURES):
        request = Request(layer_of(shape, dtype, feature), CPU, get_preset(preset), BLOCK)
        for backend in backends():
            if {r.code for r in backend.refusals(request)} <= {Code.ARCH, Code.PACKAGE}:
                for layout in LAYOUT_NAMES if backend.layout == "any" else (backend.layout,):
                    yield backend.name, layout, shape, dtype, preset, feature


DECLARED = tuple(declared())


def test_every_backend_and_every_preset_is_covered():
    assert {name for name, *_ in DECLARED} == {backend.name for backend in backends()}
    served = {preset for name, *_, preset, _ in DECLARED if name != "torch_reference"}
    assert served == set(PRESETS)


@pytest.mark.parametrize(
    ("backend", "layout", "shape", "dtype", "preset", "feature"), DECLARED, indirect=["backend"]
)
def test_store_and_decode(backend, layout: str, shape: str, dtype: str, preset: str, feature: str):
    head_size, num_kv_heads, _ = SHAPES[shape]
    layer = layer_of(shape, dtype, feature)
    bound = backend.bind(layer, preset, BLOCK, layout)

    g = torch.Generator().manual_seed(7)
    table, slots, num_blocks = shuffled_tables(SEQ_LENS, BLOCK, g)
    slot_mapping = torch.cat([*slots, torch.tensor([-1])])  # the last token is padding
    torch_dtype = TORCH_DTYPES[dtype]
    key, value = (gaussian((len(slot_mapping), num_kv_heads, head_size), g, torch_dtype) for _ in range(2))
    query = gaussian((len(SEQ_LENS), layer.num_heads, head_size), g, torch_dtype)
    lens = torch.tensor(SEQ_LENS, dtype=torch.int32)
    sinks = torch.randn(layer.num_heads, generator=g) if layer.sinks else None

    oracle = reference(layer, preset, layout, BLOCK, torch.float64)
    expected = oracle.allocate(num_blocks, "cpu", fill=0xCD)
    oracle.store(key, value, expected, slot_mapping)

    def here(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(backend.device)

    cache = bound.allocate(num_blocks, backend.device, fill=0xCD)
    bound.store(here(key), here(value), cache, here(slot_mapping))
    stored = compare_stored(cache.data.cpu(), expected.data, bound.layout, slot_mapping[:-1])
    assert (stored.wrong, stored.stray) == (0, 0)
    assert stored.exact >= MIN_EXACT, "rounding ties are rare"

    out, lse = bound.decode(
        here(query),
        cache,
        here(table),
        here(lens),
        sinks=None if sinks is None else here(sinks),
        return_lse=True,
    )
    written = oracle.wrap(cache.data.cpu(), cache.tag)
    wanted = torch.empty(out.shape, dtype=torch.float64)
    wanted_lse = torch.empty(lse.shape, dtype=torch.float64)
    oracle.decode(query, written, table, lens, sinks=sinks, out=wanted, lse=wanted_lse)
    seen = lens > 0
    assert rel_l2(out.cpu()[seen], wanted[seen]) <= backend.declaration.tolerance(dtype)
    assert (lse.cpu()[seen].double() - wanted_lse[seen]).abs().max() < 1e-2
    assert not out[~here(seen)].any(), "a sequence without tokens gives zeros"
