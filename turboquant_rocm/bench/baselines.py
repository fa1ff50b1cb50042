"""bf16 in the same run: what the same attention costs over an unpacked cache.

``bf16_paged``: the paged decode of :mod:`.kernels`, the best of its tiles and splits; for store and dequantize, the
scatter into and the gather from a paged 16-bit cache in torch. ``bf16_sdpa``: PyTorch's
scaled_dot_product_attention over contiguous keys and values, the best of its backends and of two ways to say GQA.
Each is checked against fp64 attention before it is timed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from .cases import Case
from .inputs import DTYPES, LIMIT, Setting, block_tables, exact_rows, relative, slots_of
from .records import Time
from .timing import copies_for, graph_time, stream_time, wall_time

__all__ = ["BaselineError", "PagedDecode", "Tile", "paged", "sdpa", "torch_paged"]

LOG2E: Final = 1.4426950408889634
_MOST_SPLITS: Final = 64
_TILES: Final = {  # (tokens, warps, stages); stages need shared memory, of which AMD has less
    "nvidia": ((32, 2, 3), (64, 4, 3), (64, 4, 2), (128, 4, 2), (32, 1, 3)),
    "amd": ((32, 2, 1), (64, 4, 1), (32, 2, 2), (64, 4, 2), (128, 4, 1), (32, 1, 1)),
}
_WAVES: Final = (2, 4, 8)


class BaselineError(RuntimeError):
    """A baseline has no such case or does not run here (status ``refused``), or its result is wrong (``wrong``)."""

    def __init__(self, text: str, status: str = "refused") -> None:
        self.status = status
        super().__init__(text)


def _rotated(shape: tuple[int, ...], case: Case, setting: Setting) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sets of random keys and values, enough of them to be cold."""
    dtype = DTYPES[case.dtype]
    size = 2 * torch.Size(shape).numel() * dtype.itemsize
    first = tuple(torch.randn(shape, device=setting.device, dtype=dtype) for _ in range(2))
    more = copies_for(size, setting.cold) - 1
    return [(first[0], first[1])] + [(first[0].clone(), first[1].clone()) for _ in range(more)]


def _timer(setting: Setting) -> Callable[[Sequence[Callable[[], Any]], int], Time]:
    return wall_time if setting.smoke else graph_time


# ---- paged --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """How the paged kernel is launched: parts of a sequence, tokens of a tile, warps and stages of a program."""

    splits: int
    tokens: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"tile {self.tokens}, {self.warps} warps, {self.stages} stages, {self.splits} splits"


@dataclass(frozen=True)
class PagedDecode:
    """bf16 paged decode of one case, all but its cache. out [B * q, Hq, D] is written by every call."""

    case: Case
    query: torch.Tensor  # [B * q, Hq, D]
    table: torch.Tensor  # [B, M] int32
    lens: torch.Tensor  # [B] int32
    out: torch.Tensor

    @classmethod
    def of(cls, case: Case, device: torch.device) -> tuple[PagedDecode, int]:
        """Random queries and a block table in random order; and how many blocks the cache must have."""
        table, blocks = block_tables(case.lens(), case.block_size, device)
        lens = torch.tensor(case.lens(), dtype=torch.int32, device=device)
        shape = (case.batch * case.query_len, case.num_heads, case.head_size)
        query = torch.randn(shape, device=device, dtype=DTYPES[case.dtype])
        return cls(case, query, table, lens, torch.full_like(query, float("nan"))), blocks

    def scratch(self, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for partial results and their lse."""
        rows = self.query.shape[0] * self.case.num_heads
        device = self.query.device
        shape = (rows, tile.splits)
        return torch.empty(*shape, self.case.head_size, device=device), torch.empty(shape, device=device)

    def __call__(
        self, tile: Tile, scratch: tuple[torch.Tensor, torch.Tensor], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Two launches over key and value [nb, bs, Hk, D]."""
        import triton

        from .kernels import merge_kernel, paged_kernel

        case = self.case
        d, hk, q = case.head_size, case.num_kv_heads, case.query_len
        g = case.num_heads // hk
        wide = triton.next_power_of_2(d)
        paged_kernel[(hk, tile.splits, case.batch)](
            self.query, key, value, self.table, self.lens, *scratch, d**-0.5 * LOG2E, tile.splits,
            self.table.stride(0), case.window or 0,
            HK=hk, G=g, Q=q, ROWS=max(16, triton.next_power_of_2(g * q)), D=d, DP=wide, BS=case.block_size,
            T=tile.tokens, WINDOW=case.window is not None, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        merge_kernel[(case.batch * q * case.num_heads,)](
            *scratch, self.out, tile.splits, D=d, DP=wide, S=triton.next_power_of_2(tile.splits)
        )

    def error(self, tile: Tile, key: torch.Tensor, value: torch.Tensor) -> float:
        """Largest relative error of the first and the last sequence against fp64 attention."""
        self.out.fill_(float("nan"))
        self(tile, self.scratch(tile), key, value)
        q, worst = self.case.query_len, 0.0
        for b in {0, self.case.batch - 1}:
            rows = slice(b * q, b * q + q)
            want = _exact(self.case, self.query[rows], (key, value), self.table[b], int(self.lens[b]))
            worst = max(worst, relative(self.out[rows], want))
        return worst if bool(self.out.isfinite().all()) else float("inf")


def _tiles(case: Case, setting: Setting, units: int) -> Iterator[Tile]:
    """Tiles to try, without repetition: enough splits for a few programs per compute unit, none under 64 tokens."""
    programs = case.batch * case.num_kv_heads
    longest = max(1, max(case.lens()) // 64)
    splits = {max(1, min(_MOST_SPLITS, -(-waves * units // programs), longest)) for waves in _WAVES}
    for count in sorted(splits):
        for tile in _TILES[setting.vendor][: 2 if setting.quick else None]:
            yield Tile(count, *tile)


def paged(case: Case, setting: Setting) -> tuple[Time, str]:
    """Time of bf16 paged decode, and the tile that won. BaselineError where it is wrong or nothing runs."""
    if case.operation != "decode":
        return torch_paged(case, setting)
    if setting.smoke:
        raise BaselineError("needs a GPU: it is a Triton kernel")
    if case.sinks or case.soft_cap is not None:
        raise BaselineError("the baseline has no sinks and no soft cap")
    decode, blocks = PagedDecode.of(case, setting.device)
    caches = _rotated((blocks, case.block_size, case.num_kv_heads, case.head_size), case, setting)
    units = torch.cuda.get_device_properties(setting.device).multi_processor_count
    best: tuple[Time, Tile] | None = None
    problem = "no tile fits"
    for tile in _tiles(case, setting, units):
        try:
            error = decode.error(tile, *caches[0])
        except Exception as raised:  # too much shared memory for this tile, in words of the compiler's choice
            problem = f"{type(raised).__name__}: {(str(raised).splitlines() or [''])[0]}"
            continue
        if not error <= LIMIT[case.dtype]:
            raise BaselineError(f"wrong by {error:.1e}: {tile}", "wrong")
        scratch = decode.scratch(tile)
        calls = [partial(decode, tile, scratch, *cache) for cache in caches]
        time = graph_time(calls, max(5, setting.replays // 2))
        if best is None or time.us < best[0].us:
            best = time, tile
    if best is None:
        raise BaselineError(problem)
    return best[0], str(best[1])


def _exact(
    case: Case,
    query: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    blocks: torch.Tensor,
    tokens: int,
) -> torch.Tensor:
    def read(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.arange(start, stop, device=query.device)
        block, offset = blocks[at // case.block_size].long(), at % case.block_size
        key, value = (c[block, offset].double() for c in cache)
        return key, value

    return exact_rows(query, read, tokens, case.head_size**-0.5, case.window)


def torch_paged(case: Case, setting: Setting) -> tuple[Time, str]:
    """Scatter of new tokens into a paged bf16 cache (store), or gather of a sequence from it (dequantize)."""
    device = setting.device
    table, blocks = block_tables(case.lens(), case.block_size, device)
    slots = slots_of(table, case.lens(), case.block_size)
    caches = _rotated((blocks * case.block_size, case.num_kv_heads, case.head_size), case, setting)
    key, value = (torch.randn_like(caches[0][0][: len(slots)]) for _ in range(2))
    if case.operation == "store":

        def call(k: torch.Tensor, v: torch.Tensor) -> None:
            k.index_copy_(0, slots, key)
            v.index_copy_(0, slots, value)

    else:

        def call(k: torch.Tensor, v: torch.Tensor) -> None:
            torch.index_select(k, 0, slots, out=key)
            torch.index_select(v, 0, slots, out=value)

    call(*caches[0])
    if not torch.equal(caches[0][0][slots], key) or not torch.equal(caches[0][1][slots], value):
        raise BaselineError("the copied rows differ", "wrong")
    calls = [partial(call, *c) for c in caches]
    return _timer(setting)(calls, setting.replays), "torch, two kernels"


# ---- contiguous ---------------------------------------------------------------------------------------------


def _sdpa_backends(setting: Setting) -> list[Any]:
    from torch.nn.attention import SDPBackend

    if setting.smoke:
        return [None]
    return [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def sdpa(case: Case, setting: Setting) -> tuple[Time, str]:
    """Time of SDPA over contiguous keys and values, and how it was called. BaselineError where there is none."""
    from contextlib import nullcontext

    from torch.nn.attention import sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention as attention

    if case.window is not None or case.sinks or case.soft_cap is not None or case.lengths == "log_uniform":
        raise BaselineError("SDPA has no windows, sinks, soft caps and ragged batches")
    prefill = case.operation == "prefill"
    q, hk, d, device = case.query_len, case.num_kv_heads, case.head_size, setting.device
    g = case.num_heads // hk
    tokens = case.lens()[0] + (q if prefill else 0)
    caches = _rotated((case.batch, hk, tokens, d), case, setting)
    query = torch.randn(case.batch, case.num_heads, q, d, device=device, dtype=DTYPES[case.dtype])
    mask = causal_lower_right(q, tokens) if q > 1 else None

    def repeated(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(query, k, v, attn_mask=mask, enable_gqa=g > 1)

    def rows(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:  # the heads of a group as rows of one head
        wide = attention(query.view(case.batch, hk, g, d), k, v)
        return wide.view(case.batch, case.num_heads, 1, d)

    def expanded(
        k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:  # one KV head per group, read by all its heads
        wide = query.view(case.batch * hk, g, q, d)
        k, v = (x.view(case.batch * hk, 1, tokens, d).expand(-1, g, -1, -1) for x in (k, v))
        return attention(wide, k, v, attn_mask=mask).view(query.shape)

    ways = {"enable_gqa": repeated} | ({"group as rows": rows} if q == 1 else {"group expanded": expanded})
    best: tuple[Time, str] | None = None
    problems = ""
    for backend in _sdpa_backends(setting):
        for name, way in ways.items():
            with warnings.catch_warnings(), nullcontext() if backend is None else sdpa_kernel(backend):
                warnings.simplefilter("ignore")  # why torch does not take a backend: the error says it, too
                try:
                    out = way(*caches[0])
                    checked = _check_sdpa(case, query, caches[0], out, tokens)
                    calls = [partial(way, *c) for c in caches]
                    timer = stream_time if prefill and not setting.smoke else _timer(setting)
                    time = timer(calls, setting.replays) if checked else None
                except RuntimeError as error:  # not for this shape, dtype or GPU
                    problems = str(error).splitlines()[0] if str(error) else type(error).__name__
                    continue
            if time is None:
                raise BaselineError(f"{backend}, {name}", "wrong")
            if best is None or time.us < best[0].us:
                best = time, name if backend is None else f"{str(backend).split('.')[-1].lower()}, {name}"
    if best is None:
        raise BaselineError(problems)
    return best


def _check_sdpa(
    case: Case, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, tokens: int
) -> bool:
    """The first and the last query row of the first and the last sequence against fp64."""
    q = case.query_len
    for b in {0, case.batch - 1}:
        picked = torch.tensor(sorted({0, q - 1}), device=query.device)

        def read(start: int, stop: int, b: int = b) -> tuple[torch.Tensor, torch.Tensor]:
            key, value = (c[b, :, start:stop].transpose(0, 1).double() for c in cache)
            return key, value

        want = exact_rows(
            query[b].transpose(0, 1)[picked], read, tokens, case.head_size**-0.5, last=tokens - q + picked
        )
        if not relative(out[b].transpose(0, 1)[picked], want) <= LIMIT[case.dtype]:
            return False
    return True
