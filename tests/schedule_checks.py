"""What a schedule must be, as a function of a device: run interpreted (l1) and compiled (l2) alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from turboquant_rocm.backends._triton.schedule import cut_batch, schedule_size


@triton.jit
def cut_kernel(
    seq_lens_ptr, schedule_ptr, batch, pieces, window, min_tiles,
    MOST: tl.constexpr, T: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    cut_batch(seq_lens_ptr, schedule_ptr, batch, pieces, window, min_tiles, MOST, T, WINDOW, False)


def check_schedule(
    lens: Sequence[int], pieces: int, device: str, *, window: int = 0, min_tiles: int = 1, most: int = 256,
    tile: int = 32,
) -> int:  # fmt: skip
    """Cuts ``lens`` and compares what was written with what it must say; returns the tiles of a piece."""
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
    return share
