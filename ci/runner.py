"""Run the cases of a leg, or every n-th of them: `python -m ci.runner LEG --out DIR`. ci/run.sh calls it.

It runs in a process of its own, so that a crash of a kernel costs one shard and not the report. One JSON file with
a record for each (case, backend), and two .npz files: outputs of decode and dequantise (compared within a
tolerance), and cache bytes (so that a difference can be located; the records hold their digests).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ci.caselist import FILL, TORCH_DTYPES, Case, Paged, case_list, paged_inputs, store_inputs
from ci.legs import Leg, load_legs
from ci.modes import Mode, WrongMachineError, make_mode
from tests.cases import reference
from tests.golden_data import NUM_KV_HEADS
from turboquant_rocm import BoundLayer, IneligibleError, PagedCache
from turboquant_rocm.backends import get_backend
from turboquant_rocm.eligibility import Code, Request
from turboquant_rocm.layouts import Layout
from turboquant_rocm.layouts.convert import canonicalize
from turboquant_rocm.layouts.views import allocate, field_view
from turboquant_rocm.presets import get_preset
from turboquant_rocm.target import get_target

__all__ = ["Record", "Runner", "backends_of", "digest", "run_cases"]

Record = dict[str, Any]
LSE_LIMIT = 1e-2  # absolute error of the log of the softmax denominator
TIMED_CALLS = 20  # in one measurement of a time case
HEAD_SLACK = 3.0  # a single query head may have this much more error than all of them together


def digest(*tensors: torch.Tensor | None) -> str:
    """SHA-256 of the bytes, dtypes and shapes of ``tensors``, shortened."""
    found = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:32]


def _rel(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||; inf if not finite, so that it can be compared and written as JSON."""
    value = float((got - want).norm() / want.norm().clamp(min=1e-30))
    return value if np.isfinite(value) else 1e30


def golden_mismatches(case: Case, cache: torch.Tensor, layout: Layout) -> dict[str, int]:
    """Bytes per field that differ from the golden file, where its masks say that every implementation must agree.

    Slots that nobody stored count too: they must keep FILL.
    """
    golden_case = case.golden_case
    golden = allocate(layout, golden_case.cache.shape[0], "cpu")
    golden.copy_(torch.from_numpy(golden_case.cache.copy()))
    canonicalize(golden, layout)
    kept = golden_case.slots >= 0
    slots = golden_case.slots[kept].long()
    block, offset = slots // case.block_size, slots % case.block_size
    found = {}
    for name, _ in layout.places:
        got, want = field_view(cache, layout, name), field_view(golden, layout, name)
        if name.startswith("key") and layout.preset.fp8_keys:
            robust = torch.ones(int(kept.sum()), NUM_KV_HEADS, dtype=torch.bool)
        else:
            bits = layout.preset.key_bits if name.startswith("key") else layout.preset.value_bits
            robust = torch.from_numpy(golden_case.inputs[f"robust_{name[0]}{bits}"].copy())[kept]
        wrong = int((got[block, offset][robust] != want[block, offset][robust]).sum())
        untouched = torch.ones(got.shape[:2], dtype=torch.bool)
        untouched[block, offset] = False
        wrong += int((got[untouched] != FILL).sum())
        if wrong:
            found[name] = wrong
    return found


@dataclass(slots=True)
class Runner:
    """Runs cases in one mode. repeats: timed calls of each. arrays, caches: what goes into the .npz files."""

    mode: Mode
    repeats: int
    arrays: dict[str, np.ndarray[Any, Any]]
    caches: dict[str, np.ndarray[Any, Any]]

    def run(self, case: Case, backend: str) -> Record:
        """The record of one case on one backend: status ok, failed or refused, and what was measured."""
        record: Record = {"id": case.id, "kind": case.kind, "backend": backend, "status": "ok"}
        start, cpu = time.perf_counter(), time.process_time()
        try:
            bound = self.mode.bind(case.spec, case.preset, case.block_size, case.layout, backend, case.splits)
        except IneligibleError as error:
            record.update(status="refused", why=", ".join(map(str, error.refused[backend])))
            return record
        record["route"] = {
            "backend": bound.backend,
            "ops": get_backend(bound.backend).ops,
            "layout": bound.layout.name,
            "mode": self.mode.leg.mode,
            "target": self.mode.target.arch,
        }
        if bound.backend != backend:
            record.update(status="failed", why=f"{bound.backend} ran instead of {backend}")
            return record
        try:
            {
                "store": self._store,
                "decode": self._decode,
                "dequantize": self._dequantize,
                "time": self._time,
            }[case.kind](case, bound, record)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            record.update(
                status="failed", why=" ".join(f"{type(error).__name__} at {where}: {error}".split())[:600]
            )
        record["wall_s"] = round(time.perf_counter() - start, 4)
        record["cpu_s"] = round(time.process_time() - cpu, 4)
        return record

    def _here(self, tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else tensor.to(self.mode.device)

    def _timed(self, record: Record, bound: BoundLayer, call: Callable[[], object]) -> None:
        """Call once for the result and the counters, then ``repeats`` times, without argument checks, for the clock."""
        with self.mode.running():
            call()
            self.mode.synchronize()
        if counters := dict(self.mode.counters()):
            record["counters"] = counters
        if self.mode.kernels:
            record["route"]["kernels"] = list(self.mode.kernels)
        bound.checks = "off"
        seconds = []
        for _ in range(self.repeats):
            self.mode.synchronize()
            start = time.perf_counter()
            with self.mode.running():
                call()
                self.mode.synchronize()
            seconds.append(round(time.perf_counter() - start, 7))
        if seconds:
            record["seconds"] = seconds

    # ---- kinds ----------------------------------------------------------------------------------------------

    def _store(self, case: Case, bound: BoundLayer, record: Record) -> None:
        made = store_inputs(case)
        record["inputs"] = digest(made.key, made.value, made.slots)
        key, value, slots = self._here(made.key), self._here(made.value), self._here(made.slots)
        cache = bound.allocate(made.num_blocks, self.mode.device, fill=FILL)
        counted = torch.zeros(2, dtype=torch.int32, device=self.mode.device)
        with self.mode.running():  # not the timed call: it counts, and the others must not count again
            bound.store(key, value, cache, slots, nonfinite=counted)
            self.mode.synchronize()
        data = cache.data.cpu()
        flat = data.as_strided((made.num_blocks * bound.layout.block_stride,), (1,))
        record["digest"] = digest(flat)
        record["fields"] = {n: digest(field_view(data, bound.layout, n)) for n, _ in bound.layout.places}
        record["nonfinite"] = counted.tolist()
        record["layout"] = {"block_stride": bound.layout.block_stride, "blocks": made.num_blocks}
        self.caches[f"{case.id}@{bound.backend}"] = flat.numpy().copy()
        self._timed(record, bound, lambda: bound.store(key, value, cache, slots))
        if case.golden and (wrong := golden_mismatches(case, data, bound.layout)):
            named = ", ".join(f"{count} of {name}" for name, count in wrong.items())
            record.update(status="failed", why=f"bytes differ from the golden vectors: {named}")

    def _filled(
        self, case: Case, bound: BoundLayer, made: Paged
    ) -> tuple[BoundLayer, PagedCache, PagedCache]:
        """(oracle, cache on the CPU, the same on the device), written by the torch reference in fp32."""
        writer = reference(case.spec, case.preset, case.layout, case.block_size)
        cache = writer.allocate(made.num_blocks, "cpu", fill=FILL)
        writer.store(made.key, made.value, cache, made.slots)
        there = bound.allocate(made.num_blocks, self.mode.device)
        there.data.copy_(cache.data)
        oracle = reference(case.spec, case.preset, case.layout, case.block_size, torch.float64)
        return oracle, cache, there

    def _judge(self, record: Record, case: Case, got: torch.Tensor, want: torch.Tensor, what: str) -> None:
        """Relative L2 error over all [N, H, D] and of the worst head, against the backend's tolerance."""
        limit = get_backend(record["backend"]).tolerance(case.dtype)
        error = _rel(got, want)
        worst = max((_rel(got[:, h], want[:, h]) for h in range(got.shape[1])), default=0.0)
        record.setdefault("errors", {})[what] = error
        record["tolerance"] = limit
        if error > limit:
            record.update(status="failed", why=f"{what}: relative error {error:.2e} (limit {limit:.0e})")
        elif worst > HEAD_SLACK * limit:
            record.update(
                status="failed", why=f"{what}: one head has {worst:.2e} (limit {HEAD_SLACK * limit:.0e})"
            )

    def _keep(self, record: Record, name: str, tensor: torch.Tensor) -> None:
        """Keep an output bit for bit: bf16 as uint16 patterns."""
        tensor = tensor.detach().cpu().contiguous()
        array = (
            tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype.itemsize == 2 else tensor.numpy()
        )
        self.arrays[f"{record['id']}@{record['backend']}:{name}"] = array.copy()
        record.setdefault("arrays", {})[name] = str(tensor.dtype).removeprefix("torch.")

    def _decode(self, case: Case, bound: BoundLayer, record: Record) -> None:
        made = paged_inputs(case)
        oracle, cache, there = self._filled(case, bound, made)
        record["inputs"] = digest(
            cache.data, made.query, made.table, made.seq_lens, made.query_start_loc, made.sinks
        )
        query, table, lens, loc, sinks = map(
            self._here, (made.query, made.table, made.seq_lens, made.query_start_loc, made.sinks)
        )
        out = torch.full_like(query, float("nan"))
        lse = torch.full(query.shape[:2], float("nan"), dtype=torch.float32, device=self.mode.device)

        def call() -> None:
            bound.decode(
                query, there, table, lens, loc,
                max_query_len=made.max_query_len, sinks=sinks, out=out, lse=lse,
            )  # fmt: skip

        self._timed(record, bound, call)
        got, got_lse = out.cpu(), lse.cpu()
        want = torch.empty(got.shape, dtype=torch.float64)
        want_lse = torch.empty(got_lse.shape, dtype=torch.float64)
        oracle.decode(
            made.query, cache, made.table, made.seq_lens, made.query_start_loc,
            sinks=made.sinks, out=want, lse=want_lse,
        )  # fmt: skip
        self._keep(record, "out", got)
        self._keep(record, "lse", got_lse)
        self._judge(record, case, got.double(), want, "out")
        if not torch.equal(torch.isneginf(got_lse), torch.isneginf(want_lse)):
            record.update(status="failed", why="lse: -inf where there are keys, or not where there are none")
            return
        seen = ~torch.isneginf(want_lse)
        gap = (got_lse.double() - want_lse)[seen].abs().nan_to_num(nan=1e30)
        worst = float(gap.max()) if gap.numel() else 0.0
        record["errors"]["lse"] = worst
        if worst > LSE_LIMIT:
            record.update(status="failed", why=f"lse: absolute error {worst:.2e} (limit {LSE_LIMIT:.0e})")

    def _dequantize(self, case: Case, bound: BoundLayer, record: Record) -> None:
        made = paged_inputs(case)
        oracle, cache, there = self._filled(case, bound, made)
        record["inputs"] = digest(cache.data, made.table, made.seq_lens, made.starts)
        table, lens, starts = map(self._here, (made.table, made.seq_lens, made.starts))
        total = int((made.seq_lens - made.starts).sum())
        found: list[Any] = []

        def call() -> None:
            found[:] = bound.dequantize(there, table, lens, starts=starts, total=total)

        self._timed(record, bound, call)
        wanted = oracle.dequantize(
            cache, made.table, made.seq_lens, starts=made.starts, total=total, dtype=torch.float64
        )
        for name, got, want in (("key", found[0], wanted.key), ("value", found[1], wanted.value)):
            self._keep(record, name, got)
            self._judge(record, case, got.cpu().double(), want, name)

    def _time(self, case: Case, bound: BoundLayer, record: Record) -> None:
        """Decode of a served shape; its speed only, since the decode cases check what it computes."""
        lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=self.mode.device)
        each = -(-max(case.seq_lens) // case.block_size)
        num_blocks = each * len(case.seq_lens)
        g = torch.Generator(device=self.mode.device).manual_seed(0)
        order = torch.randperm(num_blocks, generator=g, device=self.mode.device)
        cache = bound.allocate(num_blocks, self.mode.device)
        dtype = TORCH_DTYPES[case.dtype]
        chunk = 4096 * case.block_size
        tokens = num_blocks * case.block_size
        for first in range(0, tokens, chunk):
            count = min(chunk, tokens - first)
            shape = (count, case.num_kv_heads, case.head_size)
            key, value = (
                torch.randn(shape, generator=g, device=self.mode.device).to(dtype) for _ in range(2)
            )
            bound.store(key, value, cache, torch.arange(first, first + count, device=self.mode.device))
        shape = (len(case.seq_lens), case.spec.num_heads, case.head_size)
        query = torch.randn(shape, generator=g, device=self.mode.device).to(dtype)
        table, out = order.int().view(len(case.seq_lens), each), torch.empty_like(query)
        bound.checks = "off"  # they read index tensors on the host

        def call() -> None:
            for _ in range(TIMED_CALLS):
                bound.decode(query, cache, table, lens, max_query_len=1, out=out)

        call()
        self.mode.synchronize()
        record["timed"] = "eager"
        if self.mode.device == "cuda":
            try:  # a graph, so that the host's launches are not what is timed
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    call()
                call, record["timed"] = graph.replay, "graph"
            except RuntimeError as error:
                record["timed"] = f"eager, no graph: {' '.join(str(error).split())[:200]}"
        self._timed(record, bound, call)
        record["seconds"] = [s / TIMED_CALLS for s in record.get("seconds", [])]
        read = sum(case.seq_lens) * bound.layout.bytes_per_token
        if record["seconds"]:
            record["gb_per_s"] = round(read / statistics.median(record["seconds"]) / 1e9, 1)


def backends_of(leg: Leg, case: Case) -> Iterator[str]:
    """The leg's backends that read the bytes of ``case``: its layout, with values rotated or not."""
    asked = Request(case.spec, get_target("cpu"), get_preset(case.preset), case.block_size)
    for name in leg.backends:
        backend = get_backend(name)
        if backend.layout in ("any", case.layout) and backend.built_for(asked, Code.ROTATED_VALUES):
            yield name


def run_cases(
    mode: Mode,
    cases: Sequence[Case],
    repeats: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[Record], Runner]:
    """Every case on every backend of the leg that reads its bytes."""
    runner = Runner(mode, repeats, {}, {})
    records = []
    for case in cases:
        for backend in backends_of(mode.leg, case):
            record = runner.run(case, backend)
            records.append(record)
            progress(
                f"{record['status']:8}{record.get('wall_s', 0):7.2f} s  {case.id} {backend}"
                + (f": {record['why']}" if "why" in record else "")
            )
    return records, runner


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code. The records are written whatever their status."""
    parser = argparse.ArgumentParser(prog="python -m ci.runner", description=__doc__)
    parser.add_argument("leg")
    parser.add_argument("--out", type=Path, required=True, help="path of the files, without suffix")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th case, from the i-th")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    leg = load_legs()[args.leg]
    torch.set_num_threads(1)
    logging.getLogger("turboquant_rocm.dispatch").setLevel(logging.ERROR)  # refusals are in the records
    try:
        mode = make_mode(leg)
    except WrongMachineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    index, count = map(int, args.shard.split("/"))
    cases = [c for c in case_list(args.long, leg.mode == "device") if args.only in c.id][index::count]
    records, runner = run_cases(mode, cases, args.repeats, lambda line: print(line, flush=True))
    np.savez_compressed(args.out.with_suffix(".npz"), allow_pickle=False, **runner.arrays)
    np.savez_compressed(args.out.with_suffix(".bytes.npz"), allow_pickle=False, **runner.caches)
    found = {"device": mode.facts(), "cases": records}
    args.out.with_suffix(".json").write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
