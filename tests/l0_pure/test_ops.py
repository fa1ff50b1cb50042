"""bind and its checks: every wrong argument is refused by name before a byte is written."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.cases import gaussian, layer_spec, reference, shuffled_tables
from turboquant_rocm import Decision, Policy, SpecError, TagError, bind, decide, get_preset, make_layout
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
    "slots strides": ("slot_mapping", torch.arange(116)[::2]),
    "slots dtype": ("slot_mapping", torch.zeros(58, dtype=torch.float32)),
    "slots too large": ("slot_mapping", torch.arange(58) + 16 * 9 - 57),
    "slots twice": ("slot_mapping", torch.zeros(58, dtype=torch.int64)),
    "counter": ("nonfinite", torch.zeros(2, dtype=torch.float32)),
    "counter expanded": ("nonfinite", torch.zeros(1, dtype=torch.int32).expand(2)),
    "counter type": ("nonfinite", [0, 0]),
    "key device": ("key", torch.zeros(58, 2, 64, dtype=BF16, device="meta")),
    "value device": ("value", torch.zeros(58, 2, 64, dtype=BF16, device="meta")),
    "slots device": ("slot_mapping", torch.zeros(58, dtype=torch.int64, device="meta")),
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
    "lens strides": ("seq_lens", torch.tensor([5, 0, 20, 0, 33, 0], dtype=INT)[::2]),
    "table strides": ("block_table", torch.zeros(3, 6, dtype=INT)[:, ::2]),
    "loc strides": ("query_start_loc", torch.tensor([0, 9, 1, 9, 2, 9, 3, 9], dtype=INT)[::2]),
    "out strides": ("out", torch.zeros(3, 64, 6, dtype=BF16).transpose(1, 2)),
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
    "scale text": ("scale", "0.1"),
    "scale bool": ("scale", True),
    "scale tensor": ("scale", torch.tensor(0.1)),
    "scale huge": ("scale", 10**400),
    "max query": ("max_query_len", 0),
    "max query float": ("max_query_len", 1.0),
    "max query bool": ("max_query_len", True),
    "max query huge": ("max_query_len", 1 << 40),
    "sinks unwanted": ("sinks", torch.zeros(6)),
    "sinks unwanted list": ("sinks", [0.0] * 6),
    "query device": ("query", torch.zeros(3, 6, 64, dtype=BF16, device="meta")),
    "lens device": ("seq_lens", torch.zeros(3, dtype=INT, device="meta")),
    "table device": ("block_table", torch.zeros(3, 3, dtype=INT, device="meta")),
    "loc device": ("query_start_loc", torch.zeros(4, dtype=INT, device="meta")),
    "out shape": ("out", torch.zeros(3, 6, 32, dtype=BF16)),
    "out device": ("out", torch.zeros(3, 6, 64, dtype=BF16, device="meta")),
    "out expanded": ("out", torch.zeros(6, 64, dtype=BF16).expand(3, 6, 64)),
    "out expanded dims": ("out", torch.zeros(3, 6, 1, dtype=BF16).expand(3, 6, 64)),
    "out tracked": ("out", torch.zeros(3, 6, 64, dtype=BF16, requires_grad=True)),
    "out type": ("out", [[0.0]]),
    "lse dtype": ("lse", torch.zeros(3, 6, dtype=BF16)),
    "lse expanded": ("lse", torch.zeros(3, 1).expand(3, 6)),
    "lse tracked": ("lse", torch.zeros(3, 6, requires_grad=True)),
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


@pytest.mark.parametrize("grad", [True, False])
def test_nothing_is_recorded_for_gradients(bound, grad: bool):
    """Whoever calls; and the caller's mode is left as it was, after errors too."""
    with torch.set_grad_enabled(grad):
        a = call(bound)
        for name in ("key", "value", "query"):
            a[name].requires_grad_()
        store(bound, a)
        out, lse = decode(bound, {**a, "return_lse": True})
        key, value, _ = bound.dequantize(a["cache"], a["block_table"], a["seq_lens"])
        assert not any(x.requires_grad for x in (out, lse, key, value))
        with pytest.raises(SpecError, match="seq_lens"):
            decode(bound, {**a, "seq_lens": a["seq_lens"].long()})
        assert torch.is_grad_enabled() is grad


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
    strided = torch.zeros(12)[::2]
    for wrong in ([0.0] * 6, torch.zeros(6, dtype=BF16), torch.zeros(6, device="meta"), strided):
        with pytest.raises(SpecError) as error:
            decode(bound, {**good, "sinks": wrong})
        assert error.value.field == "sinks"
    decode(bound, {**good, "sinks": torch.zeros(6)})


def test_results_may_have_any_strides_but_no_shared_elements(bound):
    """A stride of 0 matters only where there are several elements to share it."""
    one = {"block_table": torch.zeros(1, 1, dtype=INT), "seq_lens": torch.tensor([5], dtype=INT)}
    good = call(bound)
    store(bound, good)
    good = {**good, **one, "query": good["query"][:1]}
    want = decode(bound, good)
    out = torch.zeros(6, 64, dtype=BF16).as_strided((1, 6, 64), (0, 64, 1))
    decode(bound, {**good, "out": out})
    assert torch.equal(out, want)


@pytest.fixture
def dirty_memory():
    """New tensors hold NaN instead of what was there before."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_rows_of_no_sequence_are_zero_in_new_results_and_untouched_in_given_ones(bound, dirty_memory):
    assert torch.empty(1).isnan(), "memory that nobody writes would go unnoticed"
    good = call(bound)
    store(bound, good)
    query = gaussian((8, 6, 64), torch.Generator().manual_seed(1), BF16)
    more = {"query": query, "query_start_loc": torch.tensor([0, 1, 3, 4], dtype=INT)}
    out, lse = decode(bound, {**good, **more, "return_lse": True})
    assert out[:4].any(-1).all()
    assert lse[:4].isfinite().all()
    assert (out[4:] == 0).all()
    assert (lse[4:] == -math.inf).all()
    given = {"out": torch.full((8, 6, 64), 7.0, dtype=BF16), "lse": torch.full((8, 6), 7.0)}
    decode(bound, {**good, **more, **given})
    assert torch.equal(given["out"][:4], out[:4])
    assert (given["out"][4:] == 7).all()
    assert (given["lse"][4:] == 7).all()

    from turboquant_rocm import attend_prefill

    raw = gaussian((8, 2, 64), torch.Generator().manual_seed(2), BF16)
    names = ("cache", "block_table", "seq_lens")
    got, sums = attend_prefill(
        bound, query, raw, raw, *(good[n] for n in names), more["query_start_loc"], return_lse=True
    )
    assert torch.equal(got, out)
    assert torch.equal(sums, lse)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("starts", torch.tensor([-1, 0, 0], dtype=INT)),
        ("starts", torch.zeros(2, dtype=INT)),
        ("starts", torch.zeros(3, dtype=INT, device="meta")),
        ("dtype", torch.int8),
        ("dtype", "bf16"),
        ("total", 57),
        ("total", -1),
        ("total", 58.0),
        ("total", True),
        ("total", torch.tensor(58)),
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


LAYER, FOUR_BIT = layer_spec(64, 2, 3), get_preset("4bit_nc")


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (Decision(LAYER, CPU, FOUR_BIT, 16, "triton_aos", "soa"), r"decision layout='soa' \(wants aos"),
        (Decision(LAYER, CPU, FOUR_BIT, 16, "torch_reference", "columns"), "layout='columns'"),
        (Decision(LAYER, CPU, FOUR_BIT, 16, "fastest", "soa"), "backend='fastest'"),
        (Decision(LAYER.with_(head_size=36), CPU, FOUR_BIT, 16, "torch_reference", "soa"), "rotation=36"),
        (Decision(LAYER.with_(kind="mla"), CPU, FOUR_BIT, 16, "torch_reference", "soa"), "kind=mla"),
        (Decision(LAYER, CPU, FOUR_BIT, 16, "flydsl_gfx950", "soa"), "head_size=64"),
        (Decision(LAYER, CPU, FOUR_BIT, 7, "triton_soa", "soa"), "block_size=7"),
        (Decision(LAYER, CPU, FOUR_BIT, 16.0, "torch_reference", "soa"), r"block_size=16\.0"),
        ("torch_reference", "decision='str'"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bind_refuses_decisions_that_no_kernel_could_serve(decision: object, message: str):
    """decide() makes none of these; a Decision made or changed by hand can say anything."""
    with pytest.raises(SpecError, match=message):
        bind(decision)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("fill", 256),
        ("fill", -1),
        ("fill", 1.0),
        ("fill", True),
        ("num_blocks", 0),
        ("num_blocks", 2.0),
        ("num_blocks", True),
        ("device", "warp"),
        ("device", 1.5),
    ],
)
def test_allocate_refuses_by_name(bound, argument: str, value: object):
    with pytest.raises(SpecError) as error:
        bound.allocate(**{"num_blocks": 1, "device": "cpu", argument: value})
    assert error.value.field == argument


@pytest.mark.parametrize(("first", "second"), [(16, 16.0), (1, True)])
def test_equal_numbers_of_another_type_miss_the_cache_of_layouts(first: object, second: object):
    """16 == 16.0 and 1 == True, also as keys of a cache: what was refused fresh must be refused when warm."""
    make_layout("soa", FOUR_BIT, 64, 2, first)
    with pytest.raises(SpecError, match="block_size"):
        make_layout("soa", FOUR_BIT, 64, 2, second)


# ---- warm-up -----------------------------------------------------------------------------------------------


def test_warmup_of_the_reference_has_nothing_to_do(bound):
    assert bound.warmup(4, 1024, 5, device="cpu") == 0


def test_warmup_reaches_the_backend(bound, monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(
        bound.ops, "warmup", lambda *args, **more: seen.append((args, more)) or 11, raising=False
    )
    assert bound.warmup(4, 1024, 5, device="cpu", dtype=BF16, lse=False, workspace="mine") == 11
    wanted = {"device": torch.device("cpu"), "dtype": BF16, "lse": False, "workspace": "mine"}
    assert seen == [((4, 1024, 5), wanted)]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("max_batch", 0),
        ("max_batch", 2.0),
        ("max_context", 0),
        ("max_context", "long"),
        ("max_query_len", True),
        ("max_query_len", 0),
        ("device", "warp"),
        ("dtype", torch.int8),
        ("lse", 1),
    ],
)
def test_warmup_refuses_by_name(bound, argument: str, value: object):
    with pytest.raises(SpecError) as error:
        bound.warmup(**{"max_batch": 4, "max_context": 1024, "device": "cpu", argument: value})
    assert error.value.field == argument


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
    with pytest.raises(SpecError, match="cache='NoneType'"):
        bound.wrap(None)
    with pytest.raises(SpecError, match="tag='dict'"):
        bound.wrap(good, bound.tag.to_dict())


def test_a_foreign_tag_is_reported_before_the_shape_it_explains(bound):
    """The shape of another preset's cache is wrong because its preset is: that is the error to read."""
    other = reference(layer_spec(64, 2, 3), "turboquant_3bit_nc", "soa", 16)
    cache = other.allocate(2, "cpu")
    with pytest.raises(TagError, match="preset=turboquant_3bit_nc"):
        bound.wrap(cache.data, cache.tag)
    with pytest.raises(SpecError, match="cache="):
        bound.wrap(cache.data)


@pytest.mark.parametrize("slot_stride", [70, 72, 96, 128, 192])
def test_reported_bytes_are_allocated_bytes_are_touched_bytes(slot_stride: int):
    """Pitfall 15."""
    bound = reference(layer_spec(64, 2, 3), "turboquant_4bit_nc", "soa", 16, slot_stride=slot_stride)
    cache = bound.allocate(7, "cpu")
    assert cache.nbytes == cache.data.untyped_storage().nbytes() == 7 * bound.layout.block_stride
    assert bound.layout.bytes_per_token * 16 * 7 == cache.nbytes
    assert bound.layout.bytes_per_token == 2 * slot_stride
    g = torch.Generator().manual_seed(0)
    key, value = (gaussian((7 * 16, 2, 64), g, BF16) for _ in range(2))
    written = []
    for fill in (0x00, 0xFF):
        cache = bound.allocate(7, "cpu", fill=fill)
        bound.store(key, value, cache, torch.arange(7 * 16))
        written.append(cache.data)
    touched = int((written[0] == written[1]).sum())
    assert touched == 7 * 16 * 2 * 70  # all of every slot but its pad


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
