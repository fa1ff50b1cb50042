"""bind and its checks: every wrong argument is refused by name before a byte is written."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.cases import gaussian, layer_spec, reference, shuffled_tables
from turboquant_rocm import Policy, SpecError, TagError, bind, decide
from turboquant_rocm.backends import get_backend
from turboquant_rocm.dispatch import IneligibleError
from turboquant_rocm.spec import LayerSpec, Target

CPU = Target("cpu", "cpu")
BF16 = torch.bfloat16


def call(bound, **changes: Any) -> dict[str, Any]:
    """Good arguments of store and decode (3 sequences, one query token each), with some replaced."""
    g = torch.Generator().manual_seed(0)
    table, slots, blocks = shuffled_tables([5, 20, 33], 16, g)
    good = {
        "cache": bound.allocate(blocks, "cpu", fill=0xCD),
        "key": gaussian((58, 2, 64), g, BF16),
        "value": gaussian((58, 2, 64), g, BF16),
        "slot_mapping": torch.cat(slots),
        "nonfinite": None,
        "query": gaussian((3, 6, 64), g, BF16),
        "block_table": table,
        "seq_lens": torch.tensor([5, 20, 33], dtype=torch.int32),
    }
    return {**good, **changes}


STORE = ("key", "value", "cache", "slot_mapping", "nonfinite")


def store(bound, a):
    bound.store(*(a[n] for n in STORE[:4]), nonfinite=a["nonfinite"])


def decode(bound, a):
    names = ("query", "cache", "block_table", "seq_lens")
    more = {k: v for k, v in a.items() if k not in (*names, *STORE)}
    return bound.decode(*(a[n] for n in names), **more)


@pytest.fixture
def bound():
    return reference(layer_spec(64, 2, 3), "turboquant_4bit_nc", "soa", 16)


STORE_FAULTS = {
    "key head size": ("key", torch.zeros(58, 2, 32, dtype=BF16)),
    "key heads": ("key", torch.zeros(58, 3, 64, dtype=BF16)),
    "key rank": ("key", torch.zeros(58, 128, dtype=BF16)),
    "key dtype": ("key", torch.zeros(58, 2, 64, dtype=torch.int32)),
    "key type": ("key", [[1.0]]),
    "key strides": ("key", torch.zeros(58, 64, 2, dtype=BF16).transpose(1, 2)),
    "value dtype": ("value", torch.zeros(58, 2, 64, dtype=torch.float16)),
    "value tokens": ("value", torch.zeros(57, 2, 64, dtype=BF16)),
    "slots short": ("slot_mapping", torch.zeros(57, dtype=torch.int64)),
    "slots dtype": ("slot_mapping", torch.zeros(58, dtype=torch.float32)),
    "slots too large": ("slot_mapping", torch.arange(58) + 16 * 9 - 57),
    "slots twice": ("slot_mapping", torch.zeros(58, dtype=torch.int64)),
    "counter": ("nonfinite", torch.zeros(2, dtype=torch.float32)),
    "cache type": ("cache", torch.zeros(9, 16, 2, 70, dtype=torch.uint8)),
}


@pytest.mark.parametrize("name", STORE_FAULTS)
def test_store_refuses_and_writes_nothing(bound, name: str):
    argument, value = STORE_FAULTS[name]
    good = call(bound)
    with pytest.raises(SpecError) as error:
        store(bound, {**good, argument: value})
    assert error.value.field == argument
    assert error.value.wants
    assert (good["cache"].data == 0xCD).all(), "a byte was written"
    store(bound, good)  # and the good call is good
    assert not (good["cache"].data == 0xCD).all()


INT = torch.int32
DECODE_FAULTS = {
    "query heads": ("query", torch.zeros(3, 5, 64, dtype=BF16)),
    "query head size": ("query", torch.zeros(3, 6, 128, dtype=BF16)),
    "query rows": ("query", torch.zeros(4, 6, 64, dtype=BF16)),
    "query dtype": ("query", torch.zeros(3, 6, 64, dtype=torch.float64)),
    "query strides": ("query", torch.zeros(3, 64, 6, dtype=BF16).transpose(1, 2)),
    "lens dtype": ("seq_lens", torch.tensor([5, 20, 33])),
    "lens negative": ("seq_lens", torch.tensor([5, -1, 33], dtype=INT)),
    "lens too long": ("seq_lens", torch.tensor([5, 20, 49], dtype=INT)),
    "table rows": ("block_table", torch.zeros(2, 3, dtype=INT)),
    "table dtype": ("block_table", torch.zeros(3, 3, dtype=torch.int64)),
    "table entry": ("block_table", torch.full((3, 3), 9, dtype=INT)),
    "table negative": ("block_table", torch.full((3, 3), -1, dtype=INT)),
    "loc length": ("query_start_loc", torch.tensor([0, 3], dtype=INT)),
    "loc order": ("query_start_loc", torch.tensor([0, 2, 1, 3], dtype=INT)),
    "loc beyond": ("query_start_loc", torch.tensor([0, 1, 2, 4], dtype=INT)),
    "loc start": ("query_start_loc", torch.tensor([1, 1, 2, 3], dtype=INT)),
    "scale nan": ("scale", math.nan),
    "scale zero": ("scale", 0.0),
    "max query": ("max_query_len", 0),
    "sinks unwanted": ("sinks", torch.zeros(6)),
    "out shape": ("out", torch.zeros(3, 6, 32, dtype=BF16)),
    "lse dtype": ("lse", torch.zeros(3, 6, dtype=BF16)),
}


@pytest.mark.parametrize("name", DECODE_FAULTS)
def test_decode_refuses_by_name(bound, name: str):
    argument, value = DECODE_FAULTS[name]
    good = call(bound)
    store(bound, good)
    decode(bound, good)
    out = torch.full((3, 6, 64), 7.0, dtype=BF16)
    with pytest.raises(SpecError) as error:
        decode(bound, {"out": out, **good, argument: value})
    assert error.value.field == argument
    assert (out == 7).all()


def test_max_query_len_must_cover_the_queries(bound):
    good = call(bound)
    loc = torch.tensor([0, 0, 1, 3], dtype=INT)
    decode(bound, {**good, "query_start_loc": loc, "max_query_len": 2})
    with pytest.raises(SpecError, match=r"max_query_len=1 \(wants at least 2"):
        decode(bound, {**good, "query_start_loc": loc, "max_query_len": 1})


def test_sinks_are_needed_where_the_layer_has_them():
    bound = reference(layer_spec(64, 2, 3, sinks=True), "turboquant_4bit_nc", "soa", 16)
    good = call(bound)
    with pytest.raises(SpecError, match="sinks=None"):
        decode(bound, good)
    with pytest.raises(SpecError, match=r"sinks=\(5,\)"):
        decode(bound, {**good, "sinks": torch.zeros(5)})
    decode(bound, {**good, "sinks": torch.zeros(6)})


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("starts", torch.tensor([-1, 0, 0], dtype=INT)),
        ("starts", torch.zeros(2, dtype=INT)),
        ("dtype", torch.int8),
    ],
)
def test_dequantize_refuses_by_name(bound, argument: str, value: object):
    good = call(bound)
    with pytest.raises(SpecError) as error:
        bound.dequantize(good["cache"], good["block_table"], good["seq_lens"], **{argument: value})
    assert error.value.field == argument


def test_dequantize_ranges(bound):
    good = call(bound)
    store(bound, good)
    whole = bound.dequantize(good["cache"], good["block_table"], good["seq_lens"])
    assert whole.key.dtype is BF16
    assert whole.cu_lens.tolist() == [0, 5, 25, 58]
    starts = torch.tensor([5, 7, 40], dtype=INT)  # nothing, a part, a start beyond the end
    part = bound.dequantize(good["cache"], good["block_table"], good["seq_lens"], starts=starts)
    assert part.cu_lens.tolist() == [0, 0, 13, 13]
    assert torch.equal(part.key, whole.key[12:25])
    assert torch.equal(part.value, whole.value[12:25])


def test_negative_slots_write_nothing(bound):
    good = call(bound)
    store(bound, {**good, "slot_mapping": torch.full((58,), -1)})
    assert (good["cache"].data == 0xCD).all()
    some = torch.where(torch.arange(58) % 2 == 0, good["slot_mapping"], -7)
    store(bound, {**good, "slot_mapping": some.int()})
    assert (good["cache"].data != 0xCD).any()


def test_empty_calls_are_fine(bound):
    good = call(bound)
    nothing = {"key": good["key"][:0], "value": good["value"][:0], "slot_mapping": good["slot_mapping"][:0]}
    store(bound, {**good, **nothing})
    assert (good["cache"].data == 0xCD).all()
    empty = {n: good[n][:0] for n in ("query", "block_table", "seq_lens")}
    assert decode(bound, {**good, **empty}).shape == (0, 6, 64)


@pytest.mark.parametrize("checks", ["full", "shapes", "off"])
def test_checks_can_be_switched_off(checks: str):
    bound = reference(layer_spec(64, 2, 3), "turboquant_4bit_nc", "soa", 16, checks=checks)
    good = call(bound)
    twice = {**good, "slot_mapping": torch.zeros(58, dtype=torch.int64)}
    if checks == "full":
        with pytest.raises(SpecError):
            store(bound, twice)
    else:
        store(bound, twice)  # values are not looked at
    other = {**good, "query": torch.zeros(3, 6, 64, dtype=torch.float64)}
    if checks == "off":
        decode(bound, other)
    else:
        with pytest.raises(SpecError, match="query"):
            decode(bound, other)


def test_bind_refuses_unknown_checks():
    decision = decide(layer_spec(64, 2, 3), CPU, "4bit_nc", 16, Policy(force="torch_reference"))
    with pytest.raises(SpecError, match="checks='some'"):
        bind(decision, checks="some")
    with pytest.raises(TypeError, match="no options"):
        bind(decision, speed="high")


def test_wrapped_memory_is_checked(bound):
    layout = bound.layout
    good = torch.zeros((3, *layout.shape), dtype=torch.uint8)
    assert bound.wrap(good).num_blocks == 3
    assert bound.wrap(good).nbytes == good.numel()
    for wrong in (
        good.to(torch.int8),
        good[..., :-2],
        good[..., :-2].contiguous(),
        good.flatten(2),
        good[:, ::2],
    ):
        with pytest.raises(SpecError, match="cache"):
            bound.wrap(wrong)
    padded = reference(
        layer_spec(64, 2, 3), "turboquant_4bit_nc", "soa", 16, block_stride=layout.block_stride + 64
    )
    with pytest.raises(SpecError, match="strides"):
        padded.wrap(good)
    with pytest.raises(TagError, match="block_stride"):
        bound.wrap(good, padded.tag)


@pytest.mark.parametrize("slot_stride", [70, 72, 96, 128, 192])
def test_reported_bytes_are_allocated_bytes_are_touched_bytes(slot_stride: int):
    bound = reference(layer_spec(64, 2, 3), "turboquant_4bit_nc", "soa", 16, slot_stride=slot_stride)
    cache = bound.allocate(7, "cpu")
    assert cache.nbytes == cache.data.untyped_storage().nbytes() == 7 * bound.layout.block_stride
    assert bound.layout.bytes_per_token * 16 * 7 == cache.nbytes
    assert bound.layout.bytes_per_token == 2 * slot_stride


def test_the_reference_is_never_an_automatic_fallback():
    assert not get_backend("torch_reference").automatic
    with pytest.raises(IneligibleError):
        decide(LayerSpec(0, 6, 2, 64), Target("none", "no-such-arch"), "4bit_nc", 16)


def test_quantised_output_differs_from_unquantised(bound):
    good = call(bound)
    store(bound, good)
    assert bound.backend == "torch_reference"
    out = decode(bound, good)[0].double()
    key, value = good["key"][:5].double(), good["value"][:5].double()
    grouped = good["query"][0].double().view(2, 3, 64)
    weight = (torch.einsum("hgd,thd->hgt", grouped, key) / 8).softmax(-1)
    exact = torch.einsum("hgt,thd->hgd", weight, value).view(6, 64)
    assert 1e-3 < (out - exact).norm() / exact.norm() < 0.3
