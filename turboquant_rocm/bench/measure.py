"""Measuring a case on a backend: bind, fill, check against fp64, and only then take times."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from ..backends import get_backend
from ..backends._torch.reference import ReferenceOps
from ..continuation import attend_prefill
from ..dispatch import Decision, IneligibleError, Policy, decide
from ..ops import BoundLayer, PagedCache, bind
from ..spec import SpecError, Target
from .baselines import BaselineError, paged, sdpa
from .cases import Case, Job
from .inputs import DTYPES, LIMIT, Setting, block_tables, exact_rows, relative, slots_of
from .records import Row, Time, percent_of
from .timing import Call, copies_for, cpu_time, graph_time, launches, stream_time, wall_time

__all__ = ["Harness", "Prepared", "prepare", "smaller"]

STORE_DIFFERENCES: Final = 1e-3
"""Share of cache bytes that may differ from the reference's: coordinates on a decision threshold, where the order of
fp32 additions decides."""

_ROUNDING: Final = {"bf16": 3e-3, "fp16": 4e-4}  # of dequantised tokens
_STORED_AT_ONCE: Final = 16384  # tokens
_CHECKED_ROWS: Final = 2048  # tokens at each end of a sequence, of dequantize
_CHECKED_STORES: Final = 512  # tokens at each end of a call, of store


@dataclass(frozen=True)
class Prepared:
    """A case ready to run. calls: equal but for their memory. check: relative error after one call, and the limit."""

    calls: Sequence[Call]
    check: Callable[[], tuple[float, float]]
    nbytes: int
    graphs: bool = True
    note: str = ""


def smaller(case: Case) -> Case:
    """A case of the same kind that a CPU runs in milliseconds: few heads, two sequences, some 200 tokens."""
    heads = min(case.num_kv_heads, 2)
    limit = 192 if case.lengths != "full" else 96
    return replace(
        case,
        num_heads=heads * min(case.num_heads // case.num_kv_heads, 4),
        num_kv_heads=heads,
        batch=min(case.batch, 2),
        context=min(case.context, limit),
        query_len=min(case.query_len, 4 if case.operation == "decode" else 32),
        window=None if case.window is None else min(case.window, 24),
    )


def _oracle(decision: Decision, bound: BoundLayer) -> ReferenceOps:
    return ReferenceOps(decision, bound.layout, math_dtype=torch.float64)


def _fill(bound: BoundLayer, cache: PagedCache, slots: torch.Tensor, case: Case) -> None:
    """Store random tokens, different ones in every slot."""
    shape = (case.num_kv_heads, case.head_size)
    for first in range(0, len(slots), _STORED_AT_ONCE):
        here = slots[first : first + _STORED_AT_ONCE]
        key, value = (
            torch.randn(len(here), *shape, device=slots.device, dtype=DTYPES[case.dtype]) for _ in range(2)
        )
        bound.store(key, value, cache, here)


def _flat(data: torch.Tensor) -> torch.Tensor:
    """Every byte of the memory that a cache tensor spans."""
    return data.as_strided((data.shape[0] * data.stride(0),), (1,))


def _copies(bound: BoundLayer, cache: PagedCache, count: int) -> list[PagedCache]:
    """``cache`` and count - 1 others of the same bytes."""
    found = [cache]
    for _ in range(count - 1):
        other = bound.allocate(cache.num_blocks, cache.data.device)
        _flat(other.data).copy_(_flat(cache.data))
        found.append(other)
    return found


def _checked_sequences(lens: tuple[int, ...]) -> list[int]:
    """First, last, longest and shortest."""
    return sorted({0, len(lens) - 1, lens.index(max(lens)), lens.index(min(lens))})


# ---- one function per operation -----------------------------------------------------------------------------


def _decode(case: Case, bound: BoundLayer, setting: Setting) -> Prepared:
    device, lens, q = setting.device, case.lens(), case.query_len
    nbytes = case.bytes_moved(bound.layout.slot_bytes)
    table, blocks = block_tables(lens, case.block_size, device)
    cache = bound.allocate(blocks, device)
    _fill(bound, cache, slots_of(table, lens, case.block_size), case)
    caches = _copies(bound, cache, copies_for(nbytes, setting.cold))
    query = torch.randn(
        case.batch * q, case.num_heads, case.head_size, device=device, dtype=DTYPES[case.dtype]
    )
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    starts = None
    if q > 1:
        starts = torch.arange(0, q * case.batch + 1, q, dtype=torch.int32, device=device)
    sinks = torch.randn(case.num_heads, device=device) if case.sinks else None
    out = torch.full_like(query, float("nan"))

    def call(cache: PagedCache) -> None:
        bound.decode(query, cache, table, seq_lens, starts, max_query_len=q, sinks=sinks, out=out)

    def check() -> tuple[float, float]:
        out.fill_(float("nan"))
        call(caches[-1])
        worst = 0.0 if bool(out.isfinite().all()) else float("inf")
        oracle = _oracle(bound.decision, bound)
        for b in _checked_sequences(lens):
            rows = slice(b * q, b * q + q)

            def read(start: int, stop: int, b: int = b) -> tuple[torch.Tensor, torch.Tensor]:
                return oracle.read(caches[-1].data, table[b], start, stop)

            want = exact_rows(
                query[rows], read, lens[b], bound.layer.softmax_scale, case.window, case.soft_cap, sinks
            )
            worst = max(worst, relative(out[rows], want))
        return worst, get_backend(bound.backend).tolerance(case.dtype)

    return Prepared([partial(call, c) for c in caches], check, nbytes)


def _store(case: Case, bound: BoundLayer, setting: Setting) -> Prepared:
    device, lens = setting.device, case.lens()
    nbytes = case.bytes_moved(bound.layout.slot_bytes)
    table, blocks = block_tables(lens, case.block_size, device)
    slots = slots_of(table, lens, case.block_size)
    shape, dtype = (len(slots), case.num_kv_heads, case.head_size), DTYPES[case.dtype]
    sets = []
    for _ in range(copies_for(nbytes, setting.cold)):
        key, value = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        sets.append((key, value, bound.allocate(blocks, device, fill=0xFF)))

    def check() -> tuple[float, float]:
        """Bytes against the reference's on the CPU: whatever it changes in what was stored is a difference."""
        key, value, cache = sets[0]
        bound.store(key, value, cache, slots)
        want = bound.allocate(blocks, "cpu")
        _flat(want.data).copy_(_flat(cache.data))
        some = torch.cat(
            [torch.arange(len(slots))[:_CHECKED_STORES], torch.arange(len(slots))[-_CHECKED_STORES:]]
        )
        some = some.unique().to(device)
        reference = ReferenceOps(bound.decision, bound.layout)
        reference.store(key[some].cpu(), value[some].cpu(), want.data, slots[some].cpu())
        differ = int((_flat(cache.data).cpu() != _flat(want.data)).sum())
        return differ / (len(some) * case.num_kv_heads * bound.layout.slot_bytes), STORE_DIFFERENCES

    return Prepared([partial(bound.store, *s, slots) for s in sets], check, nbytes)


def _dequantize(case: Case, bound: BoundLayer, setting: Setting) -> Prepared:
    device, lens = setting.device, case.lens()
    nbytes = case.bytes_moved(bound.layout.slot_bytes)
    table, blocks = block_tables(lens, case.block_size, device)
    cache = bound.allocate(blocks, device)
    _fill(bound, cache, slots_of(table, lens, case.block_size), case)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    starts = torch.zeros_like(seq_lens)
    rows = torch.zeros(len(lens) + 1, dtype=torch.int32, device=device)
    rows[1:] = seq_lens.cumsum(0)
    shape = (sum(lens), case.num_kv_heads, case.head_size)
    sets = []
    for copy in _copies(bound, cache, copies_for(nbytes, setting.cold)):
        sets.append((copy, *(torch.empty(shape, device=device, dtype=DTYPES[case.dtype]) for _ in range(2))))

    def call(cache: PagedCache, key: torch.Tensor, value: torch.Tensor) -> None:
        bound.ops.dequantize(cache.data, table, seq_lens, starts, rows, key, value)

    def check() -> tuple[float, float]:
        copy, key, value = sets[-1]
        for tensor in (key, value):
            tensor.fill_(float("nan"))
        call(copy, key, value)
        worst = 0.0 if bool(key.isfinite().all() & value.isfinite().all()) else float("inf")
        oracle = _oracle(bound.decision, bound)
        for b in _checked_sequences(lens):
            for first in {0, max(0, lens[b] - _CHECKED_ROWS)}:
                last = min(lens[b], first + _CHECKED_ROWS)
                here = slice(sum(lens[:b]) + first, sum(lens[:b]) + last)
                for got, want in zip(
                    (key, value), oracle.read(copy.data, table[b], first, last), strict=True
                ):
                    worst = max(worst, relative(got[here], want))
        return worst, _ROUNDING[case.dtype]

    calls = [partial(call, *s) for s in sets]
    return Prepared(calls, check, nbytes, note="into buffers at hand")


def _prefill(case: Case, bound: BoundLayer, setting: Setting) -> Prepared:
    device, history, q = setting.device, case.lens(), case.query_len
    nbytes = case.bytes_moved(bound.layout.slot_bytes)
    total = tuple(n + q for n in history)
    table, blocks = block_tables(total, case.block_size, device)
    cache = bound.allocate(blocks, device)
    _fill(bound, cache, slots_of(table, total, case.block_size), case)
    dtype = DTYPES[case.dtype]
    query = torch.randn(case.batch * q, case.num_heads, case.head_size, device=device, dtype=dtype)
    key, value = (
        torch.randn(case.batch * q, case.num_kv_heads, case.head_size, device=device, dtype=dtype)
        for _ in range(2)
    )
    seq_lens = torch.tensor(total, dtype=torch.int32, device=device)
    starts = torch.arange(0, q * case.batch + 1, q, dtype=torch.int32, device=device)
    slots = torch.cat(
        [slots_of(table, total, case.block_size).split(total)[b][-q:] for b in range(case.batch)]
    )
    bound.store(key, value, cache, slots)
    sinks = torch.randn(case.num_heads, device=device) if case.sinks else None
    out = torch.full_like(query, float("nan"))
    caches = _copies(bound, cache, copies_for(nbytes, setting.cold))

    def call(cache: PagedCache) -> None:
        attend_prefill(
            bound, query, key, value, cache, table, seq_lens, starts,
            query_lens=[q] * case.batch, total_lens=total, sinks=sinks, out=out,
        )  # fmt: skip

    def check() -> tuple[float, float]:
        out.fill_(float("nan"))
        call(caches[-1])
        worst = 0.0 if bool(out.isfinite().all()) else float("inf")
        oracle = _oracle(bound.decision, bound)
        picked = torch.tensor(sorted({0, q // 2, q - 1}), device=device)
        for b in _checked_sequences(history):

            def read(start: int, stop: int, b: int = b) -> tuple[torch.Tensor, torch.Tensor]:
                """History from the cache, the chunk as it is; short chunks go through decode, which reads the cache."""
                k, v = oracle.read(caches[-1].data, table[b], start, stop)
                own = slice(max(start, history[b]), stop)
                if q > 128 and own.start < own.stop:
                    raw = slice(b * q + own.start - history[b], b * q + own.stop - history[b])
                    k[own.start - start :], v[own.start - start :] = key[raw].double(), value[raw].double()
                return k, v

            want = exact_rows(
                query[b * q + picked], read, total[b], bound.layer.softmax_scale, case.window, case.soft_cap,
                sinks, last=history[b] + picked,
            )  # fmt: skip
            worst = max(worst, relative(out[b * q + picked], want))
        return worst, LIMIT[case.dtype]

    calls = [partial(call, c) for c in caches]
    return Prepared(calls, check, nbytes, graphs=False, note="eager, by events")


_OPERATIONS: Final = {"decode": _decode, "store": _store, "dequantize": _dequantize, "prefill": _prefill}


_PAGED: Final = ("bf16_paged", paged)
_SDPA: Final = ("bf16_sdpa", sdpa)
_BASELINES: Final = {
    "decode": (_PAGED, _SDPA),
    "store": (_PAGED,),
    "dequantize": (_PAGED,),
    "prefill": (_SDPA,),
}


def prepare(case: Case, bound: BoundLayer, setting: Setting) -> Prepared:
    """Inputs, calls and check of a case for a layer bound to its backend."""
    torch.manual_seed(0)
    return _OPERATIONS[case.operation](case, bound, setting)


class Harness:
    """Measures jobs in one setting.

    ceilings: bytes per second, from :mod:`.timing`. on_failure: gets the traceback of a case that failed.
    """

    def __init__(
        self,
        setting: Setting,
        target: Target,
        ceilings: dict[str, float],
        *,
        on_failure: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.setting = setting
        self.target = target
        self.ceilings = ceilings
        self.on_failure = on_failure
        self._baselines: dict[Case, tuple[Row, ...]] = {}
        self._smoked: dict[Job, Row] = {}

    # ---- backends ---------------------------------------------------------------------------------------

    def decide(self, job: Job) -> Decision:
        """The decision for a job; IneligibleError with every reason if there is none."""
        force = job.backend
        if force is None and self.setting.smoke:
            force = "torch_reference"
        case = job.case
        return decide(case.layer(), self.target, case.preset, case.block_size, Policy(force=force))

    def measure(self, job: Job, *, eager: bool = True, baselines: bool = True, **options: Any) -> Row:
        """One row; what cannot be measured is a row that says why. eager: CPU time too. Launches: :meth:`launches`.

        options: for :func:`~turboquant_rocm.ops.bind`.
        """
        if not self.setting.smoke:
            return self._row(job, eager, baselines, options)
        job = Job(smaller(job.case), job.backend)  # many cases become one
        if job not in self._smoked:
            self._smoked[job] = self._row(job, False, baselines, options)
        return self._smoked[job]

    def _row(self, job: Job, eager: bool, baselines: bool, options: dict[str, Any]) -> Row:
        case = job.case
        try:
            decision = self.decide(job)
        except IneligibleError as error:
            refused = error.refused if job.backend is None else {job.backend: error.refused[job.backend]}
            text = "; ".join(
                f"{name}: {', '.join(map(str, why))}" if job.backend is None else ", ".join(map(str, why))
                for name, why in refused.items()
            )
            return Row(case, job.backend or "none", status="refused", note=text)
        row = Row(case, decision.backend, decision.layout)
        try:
            row = self._measure(row, decision, eager, options)
            if baselines and row.status == "ok":
                found = {b.backend: b.graph.us for b in self.baselines(case) if b.graph is not None}
                row = replace(row, bf16=found)
        except SpecError as error:
            row = replace(row, status="failed", note=str(error))
        except Exception as error:  # whatever a kernel, its compiler or the driver raises
            first = (str(error).strip().splitlines() or [""])[0]
            self.on_failure(traceback.format_exc())
            row = replace(row, status="failed", note=f"{type(error).__name__}: {first}")
        self._free()
        return row

    def _free(self) -> None:
        if not self.setting.smoke:
            torch.cuda.empty_cache()

    def _time(self, prepared: Prepared) -> Time:
        if self.setting.smoke:
            return wall_time(prepared.calls, self.setting.replays)
        if prepared.graphs:
            return graph_time(prepared.calls, self.setting.replays)
        return stream_time(prepared.calls, self.setting.replays)

    def _measure(self, row: Row, decision: Decision, eager: bool, options: dict[str, Any]) -> Row:
        case = row.case
        bound = bind(decision, checks="off", **options)
        if bound.backend != row.backend:
            raise SpecError("backend", bound.backend, row.backend)
        prepared = prepare(case, bound, self.setting)
        error, tolerance = prepared.check()
        finite = error if error < float("inf") else None  # JSON has no infinities
        row = replace(
            row,
            nbytes=prepared.nbytes,
            copies=len(prepared.calls),
            error=finite,
            tolerance=tolerance,
            note=prepared.note,
        )
        if not error <= tolerance:
            return replace(row, status="wrong", note=f"error {error:.1e} > {tolerance:.1e}: not timed")
        graph = self._time(prepared)
        row = replace(
            row, graph=graph, percent=percent_of(prepared.nbytes, graph.us, self.ceilings[case.ceiling])
        )
        if eager:
            row = replace(row, cpu=cpu_time(prepared.calls[0], self.setting.replays))
        return row

    def launches(self, job: Job) -> int | None:
        """Kernels, copies and fills of an eager call of a job that has been measured; None where none are seen.

        Last of all: once the profiler has been used it stays in the driver, and every later launch is slower (a decode
        of one short sequence 12 us instead of 10 on an H200).
        """
        if self.setting.smoke:
            return None
        torch.cuda.empty_cache()
        try:
            return launches(prepare(job.case, bind(self.decide(job), checks="off"), self.setting).calls[0])
        except Exception:  # as when it was measured, but its time stands
            self.on_failure(traceback.format_exc())
            return None

    # ---- baselines --------------------------------------------------------------------------------------

    def baselines(self, case: Case) -> tuple[Row, ...]:
        """bf16 on the same shape, as rows; measured once per shape."""
        case = case.shape
        if case not in self._baselines:
            rows = []
            for name, run in _BASELINES[case.operation]:
                row = Row(case, name)
                try:
                    graph, how = run(case, self.setting)
                    nbytes = case.bytes_moved(case.raw_slot_bytes)
                    percent = percent_of(nbytes, graph.us, self.ceilings[case.ceiling])
                    copies = copies_for(nbytes, self.setting.cold)
                    row = replace(row, nbytes=nbytes, graph=graph, percent=percent, copies=copies, note=how)
                except BaselineError as error:
                    row = replace(row, status=error.status, note=str(error))
                except torch.OutOfMemoryError:
                    row = replace(row, status="failed", note="does not fit the memory of this device")
                rows.append(row)
                self._free()
            self._baselines[case] = tuple(rows)
        return self._baselines[case]

    def baseline_rows(self) -> Iterable[Row]:
        """Every baseline measured so far."""
        for rows in self._baselines.values():
            yield from rows
