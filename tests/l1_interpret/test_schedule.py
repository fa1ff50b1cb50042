"""Schedules of ragged batches, interpreted, and decode over them."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl

from tests.decode_checks import LAYOUTS, PRESETS, Case, Config, check, decode, set_up
from tests.schedule_checks import check_schedule
from turboquant_rocm.backends._triton.reduce import sequence_of
from turboquant_rocm.backends._triton.schedule import piece_range, piece_taken, visible_tiles


@triton.jit
def tiles_kernel(seq_lens_ptr, tiles_ptr, window, T: tl.constexpr, WINDOW: tl.constexpr):
    i = tl.arange(0, 4)
    tl.store(tiles_ptr + i, visible_tiles(tl.load(seq_lens_ptr + i), window, T, WINDOW))


@triton.jit
def range_kernel(out_ptr, first, count, share, tiles, seen, skew, CLASSES: tl.constexpr):
    for number in range(count):
        low, high = piece_range(number, first + number, share, tiles, seen, skew, CLASSES)
        tl.store(out_ptr + 2 * number, low)
        tl.store(out_ptr + 2 * number + 1, high)


@triton.jit
def sequence_kernel(query_start_ptr, out_ptr, token, batch):
    sequence, start = sequence_of(query_start_ptr, token, batch)
    tl.store(out_ptr, sequence)
    tl.store(out_ptr + 1, start)


@triton.jit
def taken_kernel(out_ptr, programs, CLASSES: tl.constexpr):
    for program in range(programs):
        tl.store(out_ptr + program, piece_taken(program, programs, CLASSES))


def ranges(first, share, tiles, skew, classes, device, seen=None):
    count = -(-tiles // share)
    out = torch.zeros(count, 2, dtype=torch.int32, device=device)
    range_kernel[(1,)](out, first, count, share, tiles, tiles if seen is None else seen, skew, classes)
    return out.tolist()


def test_pieces_of_three_sizes(device):
    """Each takes over where the one before it ended, and none is larger than its class may be."""
    assert ranges(0, 64, 6 * 64, 28, 3, device) == [
        [0, 92],
        [92, 156],
        [156, 192],
        [192, 284],
        [284, 348],
        [348, 384],
    ]
    assert ranges(3, 10, 37, 0, 3, device) == [[0, 10], [10, 20], [20, 30], [30, 37]]
    rng = random.Random(0)
    for _ in range(60):
        first, share, classes = rng.randint(0, 7), rng.randint(1, 90), rng.choice((2, 3, 4))
        tiles, skew = rng.randint(1, 9 * share), rng.randint(0, 31)
        found = ranges(first, share, tiles, skew, classes, device)
        end = 0
        for number, (low, high) in enumerate(found):
            assert low == end or low >= high == end == tiles  # the last may be left nothing
            end = max(end, high)
            c = (first + number) % classes
            most = share * (64 + skew * (classes - 1 - 2 * c) / (classes - 1)) / 64
            if number + 1 < len(found):
                assert abs(high - low - most) <= 1 or high == tiles
        assert end == tiles


@pytest.mark.parametrize("classes", [1, 3])
def test_columns_that_see_other_tiles(classes, device):
    """Fewer at the end, or one more: the last piece takes what there is, and no tile is left out or taken twice."""
    for seen in range(24, 38):
        end = 0
        for low, high in ranges(3, 10, 36, 20 if classes > 1 else 0, classes, device, seen):
            assert low == end or low >= seen
            end = max(high, end) if low < high else end
        assert end == seen


def test_a_sequence_of_a_thousand_million_tokens(device):
    """Tile numbers stay inside int32."""
    tiles = (2**31 - 32) // 32
    found = ranges(1, tiles // 2, tiles, 31, 3, device)
    assert found[0][0] == 0 and found[-1][1] == tiles
    assert all(0 <= low <= high <= tiles for low, high in found)


def test_pieces_of_the_largest_class_are_taken_first(device):
    out = torch.zeros(9, dtype=torch.int32, device=device)
    taken_kernel[(1,)](out, 9, 3)
    assert out.tolist() == [0, 3, 6, 1, 4, 7, 2, 5, 8]
    taken_kernel[(1,)](out, 9, 1)
    assert out.tolist() == list(range(9))


def test_equal_lengths_are_cut_equally(device):
    """As many tiles to a piece as without a schedule."""
    assert check_schedule([8192] * 8, 8 * 3, device) == -(-256 // 3)
    assert check_schedule([4096] * 3, 3 * 5, device) == -(-128 // 5)


def test_one_long_sequence_gets_almost_all_pieces(device):
    share = check_schedule([100_000, *[32] * 15], 16 * 4, device)
    assert share <= -(-(100_000 // 32 + 1) // (64 - 16)) + 1


@pytest.mark.parametrize("lens", [[0, 0], [0, 1, 0], [-3, 5], [33] * 129, list(range(0, 1300, 10))])
def test_edges(lens, device):
    check_schedule(lens, 2 * len(lens), device)


def test_least_size_of_a_piece(device):
    assert check_schedule([320, 64, 640], 30, device, min_tiles=4) == 4


def test_most_pieces_of_a_sequence(device):
    assert check_schedule([32 * 1000, 5], 2000, device, most=256) == 4
    check_schedule([32 * 1000, 5, 32 * 900], 60, device, most=7)


@pytest.mark.parametrize("window", [1, 16, 17, 1000])
def test_window(window, device):
    check_schedule([0, 15, 16, 17, 1000, 1001, 5000], 21, device, window=window)


def test_random_lengths(device):
    rng = random.Random(0)
    for _ in range(40):
        batch = rng.randint(2, 300)
        lens = [int(2 ** rng.uniform(0, 15)) for _ in range(batch)]
        check_schedule(lens, batch * rng.randint(2, 6), device, min_tiles=rng.choice((1, 2, 9)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("arch", ["sm_90", "gfx950"])
def test_decode(arch, preset, layout, device):
    check(Config(preset, layout, arch=arch), Case((0, 137, 1, 50), splits=2, cut=True), device)


def test_decode_of_pieces_of_several_sizes(device):
    """Interpreted there is one compute unit, which 30 programs fill more than once: see DecodePlan.skew."""
    case = Case((700, 137, 1, 350, 0), splits=3, cut=True)
    check(Config(heads=2), case, device)
    check(
        Config("k8v4", group=16, window=True, heads=2),
        Case((700, 137, 1, 350), window=300, splits=4, cut=True),
        device,
        tuning={"alone": False},
    )


def test_decode_with_everything(device):
    config = Config(window=True, sinks=True, soft_cap=30.0, group=5, heads=3, block_size=48)
    check(config, Case((5, 200, 0, 33), window=40, splits=3, cut=True), device)
    case = Case((400, 3, 3), splits=4, cut=True)
    check(Config(group=1, sinks=True), case, device, tuning={"alone": False})


@pytest.mark.parametrize("arch", ["sm_90", "gfx950"])
@pytest.mark.parametrize("queries", [1, 2, 5])
def test_decode_of_several_query_tokens(queries, arch, device):
    """A batch of as many each is cut too: one column tile of a head, or more, and a sequence without a key."""
    config = Config(heads=1, most_queries=queries, arch=arch)
    check(config, Case((110, 9, 40, 0), (queries,) * 4, splits=3, cut=True), device)


def test_decode_of_several_query_tokens_with_everything(device):
    """Column tiles begin at different tokens of a window; the last sequences of the batch are padding."""
    config = Config(window=True, sinks=True, soft_cap=30.0, group=5, heads=2, block_size=48, most_queries=4)
    case = Case((40, 100, 33, 9), (4, 4, 4, 0), window=40, splits=3, cut=True, spare_rows=4)
    check(config, case, device)
    check(
        Config("k8v4", heads=1, window=True, most_queries=3),
        Case((80, 3, 150), (3,) * 3, window=17, splits=4, cut=True),
        device,
    )
    check(
        Config(group=1, sinks=True, most_queries=2), Case((120, 2, 3), (2,) * 3, splits=4, cut=True), device
    )


@pytest.mark.parametrize("batch", [1, 3, 128, 129, 300])
def test_sequence_of_a_token(batch, device):
    """Against a search in Python: sequences without a token, and tokens past the last."""
    rng = random.Random(batch)
    counts = [rng.choice((0, 0, 1, 4)) for _ in range(batch)]
    starts = [sum(counts[:b]) for b in range(batch + 1)]
    for token in {0, *(s + d for s in starts[:: max(1, batch // 20)] for d in (-1, 0, 1)), starts[-1] + 5}:
        if token < 0:
            continue
        out = torch.full((2,), -1, dtype=torch.int32, device=device)
        sequence_kernel[(1,)](torch.tensor(starts, dtype=torch.int32, device=device), out, token, batch)
        want = max(b for b in range(batch) if starts[b] <= token)
        assert out.tolist() == [want, starts[want]]


@pytest.mark.parametrize(("window", "last"), [(0, 0), (100, 4)])
def test_tiles_are_never_negative(window, last, device):
    lens = torch.tensor([-(2**31), -1, 33, 2**31 - 1], dtype=torch.int32, device=device)
    tiles = torch.full_like(lens, -1)
    tiles_kernel[(1,)](lens, tiles, window, 32, window > 0)
    assert tiles.tolist() == [0, 0, 2, last]


def test_a_length_that_is_none_harms_no_other_sequence(device):
    """With a schedule and without, the largest int32 is read as nothing."""
    for cut in (False, True):
        case = Case((50, 33, 80), splits=3, cut=cut)
        setup = set_up(Config(group=2, heads=1), case, device)
        setup.bound.checks = "shapes"
        want, _ = decode(setup, case)
        setup.lens[1] = 2**31 - 1
        out, lse = decode(setup, case)
        assert torch.equal(out[::2], want[::2])
        assert bool((out[1] == 0).all()) and bool((lse[1] == float("-inf")).all())
