"""CompressedKVStore: the exact and the packed part, their memory, and attention over both."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.cases import CPU, gaussian, layer_spec, reference, rel_l2
from turboquant_rocm import BoundLayer, Decision, SpecError, bind, get_preset, preset_names
from turboquant_rocm import compressed_store as module
from turboquant_rocm.accuracy import load_npz
from turboquant_rocm.compressed_store import CompressedKVStore, packed_pages
from turboquant_rocm.layouts.views import field_view
from turboquant_rocm.validate_paper import BUNDLED

BLOCK = 16


def bound_layer(
    preset: str = "4bit_nc", layout: str = "soa", d: int = 64, heads: int = 2, gqa: int = 3, **more: Any
) -> BoundLayer:
    return reference(layer_spec(d, heads, gqa, **more), preset, layout, BLOCK)


def tokens(count: int, bound: BoundLayer, seed: int = 0, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    layer = bound.layer
    shape = (batch, count, layer.num_kv_heads)
    return gaussian((*shape, layer.head_size), g, torch.bfloat16), gaussian(
        (*shape, layer.value_size), g, torch.bfloat16
    )


def one_shot(
    bound: BoundLayer, key: torch.Tensor, value: torch.Tensor
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """(cache, key, value) [n, Hk, *] of all tokens of one sequence quantised in one call."""
    n = key.shape[0]
    cache = bound.allocate(-(-n // BLOCK), "cpu")
    bound.store(key, value, cache, torch.arange(n))
    table = torch.arange(cache.num_blocks, dtype=torch.int32)[None]
    read = bound.dequantize(cache, table, torch.tensor([n], dtype=torch.int32), dtype=torch.bfloat16)
    return cache, read.key, read.value


def expected_attention(
    query: torch.Tensor,  # [q, Hq, D]
    key: torch.Tensor,  # [n, Hk, D]
    value: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last q tokens, written down once more in fp64: (out [q, Hq, Dv], lse [q, Hq])."""
    q, n, groups = len(query), len(key), query.shape[1] // key.shape[1]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    score = torch.einsum("qhd,nhd->hqn", query.double(), k) * scale
    if soft_cap is not None:
        score = soft_cap * torch.tanh(score / soft_cap)
    score = score.masked_fill(torch.ones(q, n, dtype=torch.bool).triu(n - q + 1), -math.inf)
    if sinks is not None:
        score = torch.cat([score, sinks.double()[:, None, None].expand(-1, q, 1)], -1)
    lse = score.logsumexp(-1)
    weight = score.sub(lse[..., None]).exp()[..., :n]
    return torch.einsum("hqn,nhd->qhd", weight, v), lse.T


# ---- the two parts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ring", "flush"), [(128, 16), (0, 1), (0, 16), (5, 3), (40, 32)])
def test_how_many_tokens_are_exact(ring: int, flush: int):
    bound = bound_layer(d=8, heads=1)
    store = CompressedKVStore(bound, max_tokens=400, ring_tokens=ring, flush_tokens=flush)
    for n in (1, 1, 7, 130, 1, 60, 1, 1, 100):
        store.append(*tokens(n, bound))
        assert store.packed_tokens % flush == 0
        assert store.packed_tokens + store.exact_tokens == store.length
        assert min(ring, store.length) <= store.exact_tokens < ring + flush


def test_nothing_is_quantised_between_two_flushes(monkeypatch: pytest.MonkeyPatch):
    bound = bound_layer()
    store = CompressedKVStore(bound, max_tokens=400, ring_tokens=32)
    store.append(*tokens(32, bound))
    calls: list[int] = []
    plain = bound.ops.store
    monkeypatch.setattr(bound.ops, "store", lambda key, *rest: (calls.append(len(key)), plain(key, *rest)))
    for _ in range(15):
        store.append(*tokens(1, bound))
    assert calls == []
    store.append(*tokens(1, bound))
    assert calls == [16]


@pytest.mark.parametrize("layout", ["soa", "aos"])
@pytest.mark.parametrize("preset", preset_names())
def test_equals_the_one_shot_quantisation_of_real_keys_block_by_block(preset: str, layout: str):
    for tensors in load_npz(BUNDLED):
        layer = tensors.layer()
        bound = bind(Decision(layer, CPU, get_preset(preset), BLOCK, "torch_reference", layout))
        store = CompressedKVStore(bound, max_tokens=512, ring_tokens=128)
        done = 0
        for n in (1, 30, 97, 1, 200, 16, 3, 164):
            store.append(tensors.key[None, done : done + n], tensors.value[None, done : done + n])
            done += n
        assert (done, store.packed_tokens, store.exact_tokens) == (512, 384, 128)
        whole, key, value = one_shot(bound, tensors.key, tensors.value)
        for name, _ in bound.layout.places:
            wanted = field_view(whole.data, bound.layout, name)
            got = store.field(name)[0]
            for block in range(384 // BLOCK):
                assert torch.equal(got[block], wanted[block]), (name, block)
        got_key, got_value = store.read()
        assert torch.equal(got_key[0, :384], key[:384]) and torch.equal(got_value[0, :384], value[:384])
        assert torch.equal(got_key[0, 384:], tensors.key[384:]) and torch.equal(
            got_value[0, 384:], tensors.value[384:]
        )


def test_views_of_fields_copy_nothing():
    bound = bound_layer()
    store = CompressedKVStore(bound, max_tokens=64, batch=3, ring_tokens=0)
    store.append(*tokens(32, bound, batch=3))
    found = store.packed()
    assert found is not None
    cache, table, lengths = found
    low, high = cache.data.data_ptr(), cache.data.data_ptr() + cache.nbytes
    for name, place in bound.layout.places:
        view = store.field(name)
        assert view.shape == (3, 2, BLOCK, 2, place.nbytes)
        assert low <= view.data_ptr() < high
        for b in range(3):
            for j in range(2):
                assert torch.equal(view[b, j], field_view(cache.data, bound.layout, name)[table[b, j]])
    assert lengths.tolist() == [32] * 3


# ---- the flat views -----------------------------------------------------------------------------------------------


def test_flat_views_are_lazy_and_only_added_to(monkeypatch: pytest.MonkeyPatch):
    bound = bound_layer()
    store = CompressedKVStore(bound, max_tokens=256, ring_tokens=0)
    ranges: list[tuple[int, int]] = []
    plain = store._dequantize
    monkeypatch.setattr(store, "_dequantize", lambda a, b, t: (ranges.append((a, b)), plain(a, b, t))[1])
    store.append(*tokens(64, bound))
    assert ranges == [] and store.flat_nbytes == 0
    first = store.dequantized()[0]
    store.append(*tokens(48, bound, 1))
    second = store.dequantized()[0]
    store.append(*tokens(16, bound, 2))
    third = store.dequantized()[0]
    assert ranges == [(0, 64), (64, 112), (112, 128)]
    assert second.data_ptr() == third.data_ptr(), "no copy while there is room"
    assert torch.equal(third[:, :64], first) and torch.equal(third[:, :112], second)
    assert torch.equal(third, store.read(0, 128)[0])
    store.truncate(70)
    assert torch.equal(store.dequantized()[0], third[:, :70])
    ranges.clear()
    store.append(*tokens(58, bound, 3))
    again = store.dequantized()[0]
    assert ranges == [(70, 118)]
    assert torch.equal(again, store.read(0, store.packed_tokens)[0])
    store.release_flat()
    assert store.flat_nbytes == 0


# ---- memory -------------------------------------------------------------------------------------------------------


def formula(store: CompressedKVStore, peak: int, flat: int = 0) -> int:
    """The module's formula, written down once more."""
    layout, layer = store.bound.layout, store.bound.layer
    pages = 0
    while peak and pages < -(-peak // layout.block_size):
        pages = max(1, 2 * pages)
    pages = min(pages, -(-store.max_tokens // layout.block_size))
    ring = max(1, store.ring_tokens + store.flush_tokens - 1)
    row = layer.num_kv_heads * (layer.head_size + layer.value_size) * store.dtype.itemsize
    return store.batch * (pages * layout.block_stride + ring * row) + flat


def test_memory_is_the_formula_and_bounded():
    bound = bound_layer()
    store = CompressedKVStore(bound, max_tokens=1000, batch=2, ring_tokens=64)
    assert store.nbytes == formula(store, 0)
    for _ in range(100):
        store.append(*tokens(10, bound, batch=2))
        assert store.nbytes == formula(store, store.packed_tokens)
    plain = 2 * 1000 * 2 * 128 * 2
    assert store.nbytes < plain / 2.5
    with pytest.raises(SpecError, match="max_tokens"):
        store.append(*tokens(1, bound, batch=2))
    assert store.length == 1000
    peak = store.packed_tokens
    store.truncate(3)
    assert store.nbytes == formula(store, peak), "truncate keeps the pages"
    store.reset()
    assert (store.length, store.nbytes) == (0, formula(store, 0))


def test_pages():
    layout = bound_layer().layout
    assert [packed_pages(layout, n, 1000) for n in (0, 1, 16, 17, 33, 65, 900, 1000)] == [
        0,
        1,
        1,
        2,
        4,
        8,
        63,
        63,
    ]


# ---- random operations --------------------------------------------------------------------------------------------

POOL = 64  # different tokens


class StoreMachine(RuleBasedStateMachine):
    """Against lists of token numbers and how many are packed. All tokens of the pool were quantised in one shot."""

    operations = 0

    @initialize(
        ring=st.sampled_from([0, 1, 7, 40]),
        flush=st.sampled_from([1, 3, 16, 20]),
        batch=st.sampled_from([1, 2]),
        layout=st.sampled_from(["soa", "aos"]),
    )
    def start(self, ring: int, flush: int, batch: int, layout: str):
        self.bound = bound_layer("3bit_nc", layout, d=8, heads=2, gqa=1)
        self.store = CompressedKVStore(
            self.bound, max_tokens=300, batch=batch, ring_tokens=ring, flush_tokens=flush
        )
        self.raw = [x[0] for x in tokens(POOL, self.bound, seed=5)]
        self.packed_as = one_shot(self.bound, *self.raw)[1:]
        self.sequences: list[list[int]] = [[] for _ in range(batch)]
        self.packed = self.peak = self.flat = 0

    @rule(n=st.integers(0, 50), seed=st.integers(0, 1000))
    def append(self, n: int, seed: int):
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(POOL, (len(self.sequences), n), generator=g)
        key, value = (x[ids] for x in self.raw)
        length = len(self.sequences[0])
        if length + n > 300:
            with pytest.raises(SpecError, match="max_tokens"):
                self.store.append(key, value)
            return
        self.store.append(key, value)
        for sequence, new in zip(self.sequences, ids.tolist(), strict=True):
            sequence.extend(new)
        while length + n - self.packed >= self.store.ring_tokens + self.store.flush_tokens:
            self.packed += self.store.flush_tokens
        self.peak = max(self.peak, self.packed)

    @rule(data=st.data())
    def truncate(self, data: st.DataObject):
        left = data.draw(st.integers(0, len(self.sequences[0])))
        self.store.truncate(left)
        self.sequences = [s[:left] for s in self.sequences]
        self.packed = min(self.packed, left)

    @rule()
    def reset(self):
        self.store.reset()
        self.sequences = [[] for _ in self.sequences]
        self.packed = self.peak = self.flat = 0

    @rule(data=st.data())
    def read(self, data: st.DataObject):
        stop = data.draw(st.integers(0, len(self.sequences[0])))
        start = data.draw(st.integers(0, stop))
        self.compare(self.store.read(start, stop), start, stop)

    @rule()
    def flat_view(self):
        self.compare(self.store.dequantized(), 0, self.packed)
        self.flat = self.store.flat_nbytes

    @rule()
    def release(self):
        self.store.release_flat()
        self.flat = 0

    @precondition(lambda self: len(self.sequences) == 2)
    @rule(order=st.sampled_from([[0, 0], [1, 0], [1, 1]]))
    def select(self, order: list[int]):
        self.store.select(torch.tensor(order))
        self.sequences = [list(self.sequences[i]) for i in order]

    def compare(self, got: tuple[torch.Tensor, torch.Tensor], start: int, stop: int) -> None:
        for x, raw, packed in zip(got, self.raw, self.packed_as, strict=True):
            assert x.shape[:2] == (len(self.sequences), stop - start)
            for b, sequence in enumerate(self.sequences):
                middle = min(max(start, self.packed), stop)
                assert torch.equal(x[b, : middle - start], packed[sequence[start:middle]])
                assert torch.equal(x[b, middle - start :], raw[sequence[middle:stop]])

    @invariant()
    def sizes(self):
        if not hasattr(self, "store"):
            return
        StoreMachine.operations += 1
        assert self.store.length == len(self.sequences[0])
        assert self.store.packed_tokens == self.packed
        assert self.store.nbytes == formula(self.store, self.peak, self.store.flat_nbytes)
        assert self.store.flat_nbytes == self.flat


def test_ten_thousand_random_operations():
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=150, stateful_step_count=100, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
    assert StoreMachine.operations >= 10_000


# ---- attention ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["soa", "aos"])
@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize("queries", [1, 3])
def test_attention_with_a_ring_of_128_equals_the_oracle(preset: str, layout: str, queries: int):
    """Over real keys: the oracle attends in fp64 to the packed tokens as they read back, and to the exact ones."""
    tensors = load_npz(BUNDLED)[1]
    bound = bind(Decision(tensors.layer(), CPU, get_preset(preset), BLOCK, "torch_reference", layout))
    store = CompressedKVStore(bound, max_tokens=512)
    store.append(tensors.key[None, :300], tensors.value[None, :300])
    plain = expected_attention(
        tensors.query[300 - queries : 300], tensors.key[:300], tensors.value[:300], 0.125
    )[0]
    out, lse = store.attend(tensors.query[None, 300 - queries : 300], return_lse=True)
    key, value = (x[0] for x in store.read(dtype=torch.float64))
    wanted, wanted_lse = expected_attention(tensors.query[300 - queries : 300], key, value, 0.125)
    assert rel_l2(out[0], wanted) < 4e-3
    assert torch.allclose(lse[0].double(), wanted_lse, atol=2e-2 if queries > 1 else 1e-4)
    assert rel_l2(out[0], plain) > 2 * rel_l2(out[0], wanted), "what is packed is not exact"
    assert store.packed_tokens == 160


@pytest.mark.parametrize("length", [1, 20, 31, 32, 47, 48, 100])
@pytest.mark.parametrize("queries", [1, 5, 40])
def test_attention_at_every_split(length: int, queries: int, monkeypatch: pytest.MonkeyPatch):
    """Empty parts, queries older than the exact tokens, chunks of the packed part; soft cap, sinks, two sequences."""
    monkeypatch.setattr(module, "_CHUNK", 24)
    queries = min(queries, length)
    bound = bound_layer(d=32, soft_cap=20.0, sinks=True)
    store = CompressedKVStore(bound, max_tokens=128, batch=2, ring_tokens=16)
    store.append(*tokens(length, bound, batch=2))
    g = torch.Generator().manual_seed(9)
    query = gaussian((2, queries, 6, 32), g, torch.bfloat16)
    sinks = torch.randn(6, generator=g)
    out, lse = store.attend(query, sinks=sinks, return_lse=True)
    key, value = store.read(dtype=torch.bfloat16 if queries > 1 else torch.float64)
    for b in range(2):
        wanted, wanted_lse = expected_attention(query[b], key[b], value[b], 32**-0.5, sinks, 20.0)
        assert rel_l2(out[b], wanted) < 4e-3
        assert torch.allclose(lse[b].double(), wanted_lse, atol=1e-4)


def test_decode_runs_over_packed_bytes(monkeypatch: pytest.MonkeyPatch):
    bound = bound_layer()
    store = CompressedKVStore(bound, max_tokens=256, ring_tokens=32)
    store.append(*tokens(100, bound))
    monkeypatch.setattr(bound.ops, "dequantize", lambda *a: pytest.fail("dequantised"))
    out = store.attend(gaussian((1, 1, 6, 64), torch.Generator().manual_seed(0), torch.bfloat16))
    assert isinstance(out, torch.Tensor) and bool(out.abs().sum() > 0)


def test_truncated_tokens_are_not_seen():
    bound = bound_layer()
    a, b = (CompressedKVStore(bound, max_tokens=256, ring_tokens=32) for _ in range(2))
    key, value = tokens(100, bound)
    a.append(key, value)
    a.truncate(40)
    b.append(key[:, :100], value[:, :100])
    b.truncate(60)
    b.truncate(40)
    a.append(key[:, 50:55], value[:, 50:55])
    b.append(key[:, 50:55], value[:, 50:55])
    query = gaussian((1, 1, 6, 64), torch.Generator().manual_seed(0), torch.bfloat16)
    assert torch.equal(a.attend(query), b.attend(query))
    wanted, _ = expected_attention(query[0], *(x[0] for x in a.read(dtype=torch.float64)), 0.125)
    assert rel_l2(a.attend(query)[0], wanted) < 4e-3


# ---- arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"batch": 0}, "batch=0"),
        ({"ring_tokens": -1}, "ring_tokens=-1"),
        ({"flush_tokens": 0}, "flush_tokens=0"),
        ({"device": "nothing"}, "device"),
        ({"dtype": torch.int8}, "dtype"),
        ({"bound": None}, "bound"),
        ({"bound": bound_layer(window=64)}, "window=64"),
    ],
)
def test_bad_construction(change: dict[str, Any], message: str):
    arguments: dict[str, Any] = {"bound": bound_layer(), "max_tokens": 64} | change
    with pytest.raises(SpecError, match=message):
        CompressedKVStore(arguments.pop("bound"), **arguments)


def test_bad_calls_write_nothing():
    bound = bound_layer()
    store = CompressedKVStore(bound, max_tokens=64, ring_tokens=8)
    key, value = tokens(20, bound)
    with pytest.raises(SpecError, match="key"):
        store.append(key.float(), value)
    with pytest.raises(SpecError, match="value"):
        store.append(key, value[:, :3])
    with pytest.raises(SpecError, match="key"):
        store.append(key[0], value)
    with pytest.raises(SpecError, match="field"):
        store.field("key_data")
    assert store.length == 0 and store.packed() is None
    store.append(key, value)
    query = torch.zeros(1, 1, 6, 64, dtype=torch.bfloat16)
    with pytest.raises(SpecError, match="query"):
        store.attend(query[:, :, :5])
    with pytest.raises(SpecError, match="query tokens"):
        store.attend(query.expand(1, 21, 6, 64))
    with pytest.raises(SpecError, match="sinks"):
        store.attend(query, sinks=torch.zeros(6))
    for count in (1, 3):  # of one query and of several: other routes
        some = query.expand(1, count, 6, 64)
        for wrong in (some.to("meta"), some.double()):
            with pytest.raises(SpecError, match="query"):
                store.attend(wrong)
        for scale in (float("nan"), float("inf"), 0.0, -1.0):
            with pytest.raises(SpecError, match="scale"):
                store.attend(some, scale=scale)
    for call in (
        lambda: store.truncate(21),
        lambda: store.read(3, 21),
        lambda: store.read(5, 3),
        lambda: store.select(torch.tensor([1])),
    ):
        with pytest.raises(SpecError):
            call()
    assert store.length == 20
    sunk = CompressedKVStore(bound_layer(sinks=True), max_tokens=64, ring_tokens=8)
    sunk.append(key, value)
    for sinks in (torch.zeros(3), torch.zeros(1), torch.zeros(6, dtype=torch.bfloat16)):
        with pytest.raises(SpecError, match="sinks"):
            sunk.attend(query.expand(1, 3, 6, 64), sinks=sinks)
