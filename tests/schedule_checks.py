"""What a schedule must be, as a function of a device: run interpreted (l1) and compiled (l2) alike."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from turboquant_rocm.backends._triton.schedule import (
    ALONE_BATCHES,
    cut_batch,
    piece_alone,
    pieces_alone,
    schedule_size,
)

_MANY = 8  # of the programs and of the sequences


@triton.jit
def cut_kernel(
    seq_lens_ptr, schedule_ptr, batch, pieces, window, min_tiles,
    MOST: tl.constexpr, T: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    cut_batch(seq_lens_ptr, schedule_ptr, batch, pieces, window, min_tiles, MOST, T, WINDOW, False)


@triton.jit(do_not_specialize=("batch", "pieces", "window", "min_tiles"))
def alone_kernel(
    seq_lens_ptr, out_ptr, number_ptr, batch, pieces, window, min_tiles,
    MOST: tl.constexpr, T: tl.constexpr, WINDOW: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """What a program that takes a piece finds out on its own, or one of reduce for a sequence, from ``pieces`` on."""
    number = tl.load(number_ptr + tl.program_id(0))
    if number < pieces:
        sequence, part, seq_len, share = piece_alone(
            seq_lens_ptr, number, batch, pieces, window, min_tiles, MOST, T, WINDOW, AT_ONCE
        )
        tl.store(out_ptr + 4 * number, sequence)
        tl.store(out_ptr + 4 * number + 1, number - part)
        tl.store(out_ptr + 4 * number + 2, seq_len)
        tl.store(out_ptr + 4 * number + 3, share)
    else:
        first, count = pieces_alone(
            seq_lens_ptr, number - pieces, batch, pieces, window, min_tiles, MOST, T, WINDOW, AT_ONCE
        )
        at = 4 * pieces + 2 * (number - pieces)
        tl.store(out_ptr + at, first)
        tl.store(out_ptr + at + 1, count)


def _check_alone(
    lens: Sequence[int], pieces: int, device: str, window: int, min_tiles: int, most: int, tile: int,
    got: list[int],
) -> None:  # fmt: skip
    """Programs without a schedule come to what it says, whichever of their kernels it is."""
    batch, size = len(lens), len(got)
    draw = random.Random(size)
    some = {0, pieces - 1, *draw.choices(range(pieces), k=_MANY)}
    some |= {pieces, pieces + batch - 1, *(pieces + b for b in draw.choices(range(batch), k=_MANY))}
    numbers = torch.tensor(sorted(some), dtype=torch.int32, device=device)
    for most_batch in ALONE_BATCHES:
        if batch > most_batch:
            continue
        found = torch.full((size,), -77, dtype=torch.int32, device=device)
        alone_kernel[(len(numbers),)](
            torch.tensor(lens, dtype=torch.int32, device=device), found, numbers, batch, pieces, window, min_tiles,
            most, tile, window > 0, most_batch, num_warps=1,
        )  # fmt: skip
        alone = found.tolist()
        for number in some:
            if number >= pieces:
                here = slice(2 * pieces + 2 * number, 2 * pieces + 2 * number + 2)
                assert alone[here] == got[here], f"sequence {number - pieces}"
            elif got[4 * number] < 0:
                assert alone[4 * number] == -1
            else:
                here = slice(4 * number, 4 * number + 4)
                assert alone[here] == got[here], f"piece {number}"


def check_schedule(
    lens: Sequence[int], pieces: int, device: str, *, window: int = 0, min_tiles: int = 1, most: int = 256,
    tile: int = 32,
) -> int:  # fmt: skip
    """Cuts ``lens`` and compares what was written, and what each program finds out without, with what it must say;
    returns the tiles of a piece."""
    batch = len(lens)
    size = schedule_size(pieces, batch)
    written = torch.full((size + 64,), -77, dtype=torch.int32, device=device)
    cut_kernel[(1,)](
        torch.tensor(lens, dtype=torch.int32, device=device), written, batch, pieces, window, min_tiles, most,
        tile, window > 0, num_warps=8,
    )  # fmt: skip
    got = written.tolist()
    assert got[size:] == [-77] * 64, "written past its end"
    share = got[3]
    begins = [max(n - window, 0) // 16 * 16 if window else 0 for n in lens]
    tiles = [-(-(max(n, 0) - begin) // tile) for n, begin in zip(lens, begins, strict=True)]
    if not any(tiles):  # nothing says how many tiles a piece would have
        share = 1
    counts = [-(-n // share) for n in tiles]
    assert sum(counts) <= pieces, "a piece has no room"
    assert max(counts) <= most
    entries = got[: 4 * pieces]
    first, want = 0, []
    for b, count in enumerate(counts):
        assert got[4 * pieces + 2 * b :][:2] == [first, count], f"sequence {b}"
        want += [b, first, lens[b], share] * count
        first += count
    assert entries[: 4 * first] == want
    assert entries[4 * first :: 4] == [-1] * (pieces - first)
    least = max(-(-sum(tiles) // pieces), min_tiles, -(-max(tiles) // most))
    largest = max(-(-sum(tiles) // (pieces - batch)), least)
    assert least <= share <= largest
    for smaller in range(least, share):  # no value that was tried and is smaller would have fitted
        tried = {least + ((largest - least) * k + 14) // 15 for k in range(16)}
        assert smaller not in tried or sum(-(-n // smaller) for n in tiles) > pieces
    _check_alone(lens, pieces, device, window, min_tiles, most, tile, got[:size])
    return share
