"""How many programs a decode is given, and which may start together with the kernel before it: arithmetic only."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.cases import layer_spec
from turboquant_rocm import Decision, get_preset, make_layout
from turboquant_rocm.backends._triton.ops import MAX_SPLITS, DecodePlan
from turboquant_rocm.backends._triton.tile import ValueTile
from turboquant_rocm.target import get_target

UNITS = 132


def _plan(
    arch: str = "sm_90",
    group: int = 8,
    preset: str = "4bit_nc",
    head_size: int = 128,
    dtype: str = "bf16",
    layout: str = "soa",
    cache_alignment: int = 16,
    window: int | None = None,
    **tuning: Any,
) -> DecodePlan:
    layer, target = layer_spec(head_size, 8, group, dtype, window=window), get_target(arch)
    decision = Decision(layer, target, get_preset(preset), 16, f"triton_{layout}", layout)
    kind = "hip" if target.vendor == "amd" else "cuda"
    made = make_layout(layout, preset, head_size, 8, 16)
    return DecodePlan(decision, made, cache_alignment=cache_alignment, kind=kind, tuning=tuning)


def _programs(plan: DecodePlan, batch: int, splits: int, length: int) -> int:
    return batch * plan.layer.num_kv_heads * plan.column_tiles(length) * splits


@given(
    st.sampled_from(["sm_90", "sm_80", "gfx942"]),
    st.sampled_from([1, 2, 8, 16]),
    st.integers(1, 300),
    st.integers(16, 1 << 18),
    st.integers(1, 16),
    st.booleans(),
)
def test_one_wave_and_room_for_prepare(arch, group, batch, context, length, alone):
    """Splits never make a second wave of programs, and a decode starts early only where both kernels find room."""
    plan = _plan(arch, group, alone=alone)
    splits = plan.splits(batch, context, length, UNITS)
    capacity = plan.tuned(plan.columns(length))["programs_per_cu"] * UNITS
    programs = _programs(plan, batch, splits, length)
    assert 1 <= splits <= MAX_SPLITS
    assert splits == 1 or programs <= capacity
    if plan.early(batch, splits, length, UNITS):
        assert splits > 1
        assert programs + 2 * (-(-batch * length * plan.layer.num_heads // 16)) <= capacity


def test_one_long_sequence_gives_up_a_split_to_start_early():
    plan = _plan(alone=False)
    full = plan.tuned(8)["programs_per_cu"] * UNITS // 8
    splits = plan.splits(1, 1 << 17, 1, UNITS)
    assert splits == full - 1
    assert plan.early(1, splits, 1, UNITS)
    assert not plan.early(1, full, 1, UNITS)


def test_without_prepare_a_long_sequence_takes_the_whole_device():
    plan = _plan()
    assert plan.splits(1, 1 << 17, 1, UNITS) == plan.capacity(1, UNITS) // 8 == 198


def test_short_splits_are_fewer():
    """Eight programs of a multiprocessor instead of twelve where twelve would have less than eight tiles each; and a
    few splits less where one warp joins them."""
    plan = _plan()
    few = plan.tuned(8)["few_programs_per_cu"] * UNITS // 8
    assert few == 132
    assert plan.splits(1, 198 * 256 - 1, 1, UNITS) == 128
    assert plan.splits(1, 198 * 256, 1, UNITS) == 198
    assert plan.splits(1, 4096, 1, UNITS) == 64  # none is shorter than min_tokens
    assert plan.splits(8, 4096, 1, UNITS) == few // 8 == 16
    assert plan.splits(300, 64, 1, UNITS) == 1
    assert plan.cut(8, 4096, few // 8, 1, UNITS) == 128
    assert [_plan(long_from=0).splits(1, context, 1, UNITS) for context in (16384, 32768)] == [198, 198]
    assert [_plan("gfx942").splits(1, context, 1, UNITS) for context in (16384, 32768)] == [198, 198]


def test_which_decodes_need_no_prepare():
    """Head sizes that are powers of two, any batch unless it is cut; not several query tokens in 16 columns, nor wide
    tiles."""
    plan = _plan(wide_from=0)
    assert [plan.alone_for(8, False, batch, 0) > 0 for batch in (1, 64, 65, 1000)] == [True] * 4
    assert [plan.alone_for(8, False, batch, 300) for batch in (2, 32, 33, 64, 65)] == [32, 32, 64, 64, 0]
    assert [plan.alone_for(columns, multi, 4, 99) for columns in (8, 16) for multi in (False, True)] == [
        32,
        32,
        32,
        0,
    ]
    assert not _plan().alone_for(16, False, 4, 0)
    for head_size in (64, 256):
        assert _plan(head_size=head_size).alone_for(8, False, 1, 0)
    for head_size in (80, 96, 112, 192):
        assert not _plan(head_size=head_size).alone_for(8, False, 1, 0)
    assert not _plan("gfx942").alone_for(16, False, 1, 0)
    assert not _plan("gfx942", alone=True).alone_for(16, False, 1, 0), (
        "its compiler would move what lanes own"
    )
    assert not _plan("sm_80").alone_for(8, False, 1, 0)


def test_a_batch_that_fills_the_device_waits_and_is_cut():
    plan = _plan()
    splits = plan.splits(8, 8192, 1, UNITS)
    assert _programs(plan, 8, splits, 1) > 0.9 * plan.tuned(8)["programs_per_cu"] * UNITS
    assert not plan.early(8, splits, 1, UNITS)
    assert plan.cut(8, 8192, splits, 1, UNITS) == 8 * splits
    assert plan.cut(8, 256, plan.splits(8, 256, 1, UNITS), 1, UNITS) == 0  # half of the device is left


def test_long_pieces_are_halved_and_differ_in_size():
    """Two waves of programs, the large ones first: a batch of long sequences. Short ones run in one wave."""
    plan = _plan()
    splits = plan.splits(64, 8192, 1, UNITS)
    assert splits == 3
    assert plan.cut(64, 8192, splits, 1, UNITS) == 64 * 6
    assert plan.skew(64 * 6, 1, UNITS) == 28
    assert plan.cut(64, 4096, splits, 1, UNITS) == 64 * 3
    assert plan.skew(64 * 3, 1, UNITS) == 0
    assert plan.cut(2, 1 << 20, MAX_SPLITS, 1, UNITS) == 2 * MAX_SPLITS
    assert plan.cut(128, 4096, 1, 1, UNITS) == 128 * 3
    assert plan.skew(128 * 3, 1, UNITS) == 28
    amd = _plan("gfx942")
    assert amd.cut(64, 65536, 3, 1, UNITS) == 64 * 3
    assert amd.skew(64 * 30, 1, UNITS) == 0


def test_batches_of_several_query_tokens_are_cut():
    """Two column tiles of 16 for four query tokens and eight heads, so half as many pieces fill the device."""
    plan = _plan(wide_from=0)
    assert plan.column_tiles(4) == 2 and plan.columns(4) == 16
    splits = plan.splits(8, 8192, 4, UNITS)
    assert splits == plan.tuned(16)["programs_per_cu"] * UNITS // (8 * 8 * 2)
    assert plan.cut(8, 8192, splits, 4, UNITS) == 8 * splits
    assert plan.skew(8 * splits, 4, UNITS) == 0
    assert plan.splits(64, 32768, 4, UNITS) == 1
    assert plan.cut(64, 32768, 1, 4, UNITS) == 64 * 3
    assert plan.skew(64 * 3, 4, UNITS) == 28
    assert plan.cut(64, 1024, 1, 4, UNITS) == 0


def test_decode_of_a_cut_batch_waits_where_a_second_wave_would_begin():
    """One program of prepare, which is still there, has the place of two."""
    plan = _plan()
    full = plan.capacity(1, UNITS) // 8
    assert plan.early_cut(full - 1, 1, UNITS)
    assert not plan.early_cut(full, 1, UNITS)
    assert plan.early_cut(full + 1, 1, UNITS)  # there are two waves anyway


def test_when_tiles_are_wide():
    """Where wide.py says it works, from 16 columns on, and nowhere else."""
    plan = _plan()
    assert [plan.columns(queries) for queries in (1, 2, 3, 4, 5, 16)] == [8, 16, 32, 32, 32, 32]
    assert [plan.column_tiles(queries) for queries in (4, 5, 8, 9)] == [1, 2, 2, 3]
    assert plan.is_wide(32) and plan.is_wide(16) and not plan.is_wide(8)
    assert _plan(wide_from=32).is_wide(32) and not _plan(wide_from=32).is_wide(16)
    assert plan.decode_kernel(32) is plan.decode_kernel(16) is not plan.decode_kernel(8)
    for plan in (
        _plan(wide_from=64),
        _plan(wide_from=64, columns=8),
        _plan(columns=8),
    ):  # no tile that no kernel has
        assert all(plan.is_wide(n) or n <= plan.tuned(0)["columns"] for n in map(plan.columns, range(1, 20)))
    assert all(_plan(group=group).is_wide(_plan(group=group).columns(1)) for group in (12, 16, 32))
    others = (
        _plan("sm_80"), _plan("gfx942"), _plan(preset="k3v4_nc"), _plan(preset="k8v4"), _plan(head_size=64),
        _plan(head_size=256), _plan(wide_from=0), _plan(int8_keys=False), _plan(dtype="fp16"), _plan(layout="aos"),
        _plan(cache_alignment=2), _plan("sm_80", wide_from=16),
    )  # fmt: skip
    assert [(p.wide_from, p.columns(4), p.decode_kernel(16).__name__) for p in others] == [
        (0, p.tuned(0)["columns"], "decode_kernel") for p in others
    ]


def test_little_work_is_not_for_wide_tiles():
    """Two query tokens of one sequence: up to 6,138 tokens of eight heads on 132 units, of which 372 are enough. One
    token of 16 heads, for which the other kernel needs no prepare: far more."""
    plan, many = _plan(), _plan(group=16)
    assert plan.little_context(1, 2, UNITS) == 372 * UNITS // 8 - 1
    assert plan.little(1, 4096, 2, UNITS) and not plan.little(1, 8192, 2, UNITS)
    assert plan.little(1, 2048, 4, UNITS) and not plan.little(1, 4096, 4, UNITS)
    assert plan.little(8, 256, 4, UNITS) and not plan.little(8, 512, 4, UNITS)
    assert many.little(8, 8192, 1, UNITS) and not many.little(16, 8192, 1, UNITS)
    assert not many.little(1, 8192, 2, UNITS)
    assert not plan.little(1, 4096, 1, UNITS), "8 columns are not wide anyway"
    assert not _plan(wide_work=0).little(1, 16, 4, UNITS)
    assert _plan(window=256).little(8, 1 << 17, 4, UNITS) and not _plan(window=4096).little(
        8, 1 << 17, 4, UNITS
    )


def test_partial_results_of_both_kernels_have_one_size():
    """Scratch memory is laid out once for a plan; reduce is told in which order the numbers are."""
    plan = _plan()
    in_order = list(range(128))
    for columns, paired, dims in ((8, True, plan.value.dims()), (16, False, in_order), (32, False, in_order)):
        constants = plan.reduce_constants(True, False, 8, columns=columns)
        bits, lanes, unit, units, vec, *_ = constants["VALUE"]
        assert constants["PAIRED"] is paired and constants["RW"] == 64
        assert ValueTile(bits, 128, lanes, unit, units, vec, 16).dims() == dims
