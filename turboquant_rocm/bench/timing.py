"""How times are taken. Medians over repetitions, with the interquartile range as their spread.

On a GPU: replays of a CUDA or HIP graph, which leaves out what launching costs; the graph holds one call for every one
of several sets of inputs, together larger than the last-level cache, so that each call reads cold memory. On the CPU:
a wall clock, for smoke runs.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch

from ..spec import Target
from .records import Time

__all__ = [
    "cold_bytes",
    "copies_for",
    "copy_ceiling",
    "cpu_time",
    "graph_time",
    "launches",
    "read_ceiling",
    "summary",
]
__all__ += ["stream_time", "wall_time"]

Call = Callable[[], Any]

INFINITY_CACHE: Final = 256 << 20
"""Last-level cache of an MI300X or MI355X; torch reports the second level only."""

_MOST_COPIES: Final = 128
_SHAPES: Final = ((4096, 8, 8), (8192, 4, 8), (2048, 16, 4), (4096, 4, 4))  # block, iterations, warps
_CALLS: Final = 8  # fewest calls in a graph: a replay's own cost is spread over them


def summary(times: Sequence[float]) -> Time:
    """Median and interquartile range of at least two times in microseconds."""
    quarters = statistics.quantiles(times, n=4, method="inclusive")
    return Time(statistics.median(times), quarters[2] - quarters[0])


def cold_bytes(target: Target, device: torch.device) -> int:
    """How much memory the sets of inputs must take together for none to be cached when its turn comes."""
    if device.type == "cpu":
        return 0
    cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
    if target.vendor == "amd":
        cache = max(cache, INFINITY_CACHE)
    return max(256 << 20, 3 * cache)


def copies_for(nbytes: int, cold: int) -> int:
    """Sets of inputs of ``nbytes`` each that exceed ``cold`` bytes together; 128 at most, 2 at least if cold > 0."""
    return 1 if cold <= 0 else min(_MOST_COPIES, max(1, -(-cold // max(nbytes, 1))))


def graph_time(calls: Sequence[Call], replays: int) -> Time:
    """One call in a graph. All ``calls`` are equal but for the memory they use."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    repeat = max(1, _CALLS // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            for call in calls:
                call()
    graph.replay()
    return _events(graph.replay, repeat * len(calls), replays)


def stream_time(calls: Sequence[Call], replays: int) -> Time:
    """One eager call, for work too large for its launches to matter and not made for graphs."""
    calls[0]()

    def run() -> None:
        for call in calls:
            call()

    run()
    return _events(run, len(calls), replays)


def _events(run: Call, count: int, replays: int) -> Time:
    times = []
    for _ in range(max(2, replays)):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / count)
    return summary(times)


def wall_time(calls: Sequence[Call], replays: int) -> Time:
    """One call on the CPU by the wall clock."""
    calls[0]()
    times = []
    for _ in range(max(2, replays)):
        for call in calls:
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
    return summary(times)


def cpu_time(call: Call, rounds: int, calls: int = 20) -> Time:
    """CPU time of this thread that an eager call takes, once a tenth of a second of calls has woken it up: the device
    is idle at the start, and the queue never fills. Time in which another process has the CPU does not count."""
    until = time.perf_counter() + 0.1
    while time.perf_counter() < until:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    times = []
    for _ in range(max(2, rounds)):
        torch.cuda.synchronize()
        start = time.thread_time()
        for _ in range(calls):
            call()
        times.append((time.thread_time() - start) * 1e6 / calls)
    torch.cuda.synchronize()
    return summary(times)


def launches(call: Call) -> int | None:
    """Kernels, copies and fills that an eager call puts on the device; None where the profiler sees none."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that events end with the profiler
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
    count = sum(1 for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return count or None


# ---- ceilings -----------------------------------------------------------------------------------------------


def _random_words(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 1 << 30, (nbytes // 4,), dtype=torch.int32, device=device)


def read_ceiling(device: torch.device, replays: int) -> float:
    """Bytes per second of a kernel that only reads, the best of a few shapes; of a sum on the CPU."""
    if device.type == "cpu":
        x = torch.rand(4 << 20)
        return float(x.nbytes / wall_time([x.sum], replays).us * 1e6)
    from .kernels import read_kernel

    x = _random_words(2 << 30, device)
    best = 0.0
    for block, iterations, warps in _SHAPES:
        programs = x.numel() // (block * iterations)
        out = torch.empty(programs, dtype=torch.int32, device=device)
        call = partial(read_kernel[(programs,)], x, out, block, iterations, num_warps=warps)
        best = max(best, x.nbytes / graph_time([call], replays).us * 1e6)
    return best


def copy_ceiling(device: torch.device, replays: int) -> float:
    """Bytes per second, read plus written, of a large copy on the device: the best of torch's and of a kernel.

    A copy captured in a graph may be given to a copy engine, which can be slower than kernels, so torch's is timed
    eagerly, by events.
    """
    if device.type == "cpu":
        source = torch.rand(4 << 20)
        target = torch.empty_like(source)
        return float(2 * source.nbytes / wall_time([partial(target.copy_, source)], replays).us * 1e6)
    from .kernels import copy_kernel

    source = _random_words(1 << 30, device)
    target = torch.empty_like(source)
    times = [stream_time([partial(target.copy_, source)], replays).us]
    for block, iterations, warps in _SHAPES:
        programs = source.numel() // (block * iterations)
        target.zero_()
        call = partial(copy_kernel[(programs,)], source, target, block, iterations, num_warps=warps)
        times.append(graph_time([call], replays).us)
        if not torch.equal(source, target):
            raise RuntimeError("the copy kernel of the harness is wrong")
    return float(2 * source.nbytes / min(times) * 1e6)
