"""Faults planted in the project's kernels: every one must be noticed by the simulated runs.

Source mutants change a line of a kernel's Triton source (each line must exist, so that the list cannot go stale
unnoticed); assembly mutants change the compiled text. "Killed" means a detector fired, store bytes differ from the
reference, or a decode fails the check of real devices.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from .sim_helpers import triton

pytest.importorskip("torch", reason="the launchers take torch tensors")

from ci.cdna_sim.asmkit import assemble, edit
from ci.cdna_sim.errors import SimError
from turboquant_rocm.backends._triton import ops

from .project import (
    Problem,
    decode_fault,
    dequantize_error,
    problem,
    store_differences,
)  # fmt: skip

SOURCES = Path(ops.__file__).parent


@dataclass(frozen=True)
class Source:
    """One changed place of a module's source. where: kernel to run; options of the problem."""

    name: str
    module: str
    old: str
    new: str
    preset: str = "turboquant_4bit_nc"
    layout: str = "soa"
    arch: str = "gfx942"
    head_size: int = 64
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    nth: int = 0

    def __str__(self) -> str:
        return f"{self.module}: {self.name}"


def _s(name: str, module: str, old: str, new: str, **more: Any) -> Source:
    return Source(name, module, old, new, **more)


LONG = {"lens": (150, 5, 200), "splits": 1}
"""Several tiles in one split: what rescales the running sums runs more than once."""

CUT = {"lens": (200, 5, 64), "cut": True}

SOURCE = [
    _s("mask off by one", "decode", "& (position < end), 0.0", "& (position <= end), 0.0"),
    _s("accumulator not rescaled", "decode", "kept *= shrink[None, :]", "kept *= 1.0", options=LONG),
    _s("weight not rescaled", "decode", "weight * alpha[None, :] +", "weight +", options=LONG),
    _s("zero points not rescaled", "decode", "offset * alpha[None, :] +", "offset +", options=LONG),
    _s("value scale not rescaled", "decode", "shrink = alpha * power_of_2(scale_top - new_scale_top)",
       "shrink = alpha * 1.0", arch="gfx950", options={**LONG, "growing": True}, nth=1),
    _s("key norm left out", "decode", "scores = scores * norm[:, None]", "scores = scores * 1.0"),
    _s("zero point left out", "decode", "total_offset = tl.sum(offset, axis=0)",
       "total_offset = tl.sum(offset * 0.0, axis=0)"),
    _s("wrong KV head", "decode", "head = tl.program_id(0) % HK", "head = tl.program_id(0) * 0"),
    _s("wrong query head", "decode", "q_head = head * G + column % G", "q_head = column % G"),
    _s("last tile dropped", "schedule", "high = tl.minimum(low + each, tiles)",
       "high = tl.minimum(low + each, tiles - 1)"),
    _s("splits overlap", "decode", "token = start + tile_low * T", "token = start + tl.maximum(tile_low - 1, 0) * T"),
    _s("norm correction left out", "decode", "norm = norm * tl.rsqrt(total + _CENTROID_EPS)", "norm = norm * 1.0",
       layout="aos"),
    _s("lse without the sum", "decode", "lse = largest + tl.log2(total_weight)", "lse = largest"),
    _s("token stride", "decode", "offset = FIELD[0] + head * FIELD[2] + within * FIELD[1]",
       "offset = FIELD[0] + head * FIELD[2] + within * FIELD[2]"),
    _s("words of a run not aligned", "decode", "offset += lane * RUN - behind", "offset += lane * RUN", layout="aos"),
    _s("second token of a pair", "decode", "row + i,", "row,", layout="aos"),
    _s("window edge", "decode", "(position >= begin) & (position < end), 0.0",
       "(position > begin) & (position < end), 0.0", options={"window": 17}),
    _s("sink left out", "decode", "tl.exp2(sink - joint))", "0.0 * tl.exp2(sink - joint))",
       options={"sinks": True, "splits": 1}),
    _s("soft cap sign", "decode", "(1.0 - 2.0 / (1.0 + grown))", "(1.0 - 1.0 / (1.0 + grown))",
       options={"soft_cap": 20.0}),
    _s("query scale left out", "decode", "column_scale = queries_read[0] * scale_log2",
       "column_scale = 256.0 * scale_log2 + 0.0 * queries_read[0]"),
    _s("splits weighted equally", "reduce", "weight = tl.exp2(lse - reference)", "weight = tl.where(inside, 1.0, 0.0)"),
    _s("earlier chunks of splits not rescaled", "reduce", "acc_low = acc_low * before +", "acc_low = acc_low +",
       options={"lens": (700, 5, 5), "splits": 5, "cut": True}),
    _s("not normalised", "reduce", "tl.where(seen, 1.0 / total, 0.0)", "tl.where(seen, 1.0, 0.0)"),
    _s("scale of a part left out", "reduce", "weight * scale, 0.0)", "weight / 16384, 0.0)", options={"splits": 2}),
    _s("halves of a pair swapped", "reduce", "acc_high if i else acc_low", "acc_low if i else acc_high",
       options={"splits": 2}),
    _s("scale of a part too large", "decode", "fp16_range(bound.to(tl.int32, bitcast=True), _PART_TOP)",
       "fp16_range(bound.to(tl.int32, bitcast=True), 17)", options={"splits": 2}),
    _s("bound of a part without its middle", "decode", "back + tl.abs(shift)  #", "back  #", options={"splits": 2}),
    _s("bound of a part without its sums", "decode", "tl.max(most, axis=0) * back + tl.abs", "tl.abs",
       options={"splits": 2}),
    _s("pieces of another head", "reduce", "first_piece.to(tl.int64) * HQ + head", "first_piece.to(tl.int64) * HQ",
       options=CUT),
    _s("next head for next piece", "reduce", "step = HQ", "step = 1", options=CUT),
    _s("piece of another sequence", "decode", "if sequence < 0:",
       "sequence = tl.maximum(sequence - 1, -1)\n        if sequence < 0:", options=CUT),
    _s("pieces write over each other", "decode", "part.to(tl.int64) * HQ + q_head",
       "row // HQ * HQ + q_head", options=CUT),
    _s("lengths of the batch but one", "prepare", "seq_lens_ptr, schedule_ptr, batch, pieces, window,",
       "seq_lens_ptr, schedule_ptr, batch - 1, pieces, window,", options=CUT),
    _s("partial results of another query", "decode", "(part.to(tl.int64) * most_queries + query) * HQ + q_head",
       "(part.to(tl.int64) * most_queries) * HQ + q_head", options={**CUT, "queries": 3}),
    _s("query of another sequence", "reduce", "first_piece, splits = pieces_of(schedule_ptr, sequence, pieces)",
       "first_piece, splits = pieces_of(schedule_ptr, sequence * 0, pieces)", options={**CUT, "queries": 3}),
    _s("tiles of the last query for all", "schedule", "seen = tiles if MULTI else of_sequence", "seen = of_sequence",
       options={"lens": (200, 5, 64), "cut": True, "queries": 3, "window": 24}),
    _s("order of dims", "reduce", "lane = r % VALUE[1]", "lane = (r + 1) % VALUE[1]"),
    _s("query scale doubled", "prepare", "tl.store(scale_ptr + row, up, inside)",
       "tl.store(scale_ptr + row, up * 2.0, inside)"),
    _s("codes not rounded", "store", "_divide(x - low, scale) + 0.5", "_divide(x - low, scale) + 0.0"),
    _s("zero point lost", "store", "_store_half(zero_at, low + 0.0,", "_store_half(zero_at, low * 0.0,"),
    _s("nibbles swapped", "store", "shifts = BITS * tl.arange(0, 8)", "shifts = BITS * (tl.arange(0, 8) ^ 1)"),
    _s("padding written", "store", "kept = slot >= 0", "kept = slot >= -1"),
    _s("rows off by one", "store", "inside = row < rows", "inside = row <= rows"),
    _s("token within the block", "store", "token = slot - block * BLOCK_SIZE", "token = slot - block * BLOCK_SIZE + 1"),
    _s("infinity escapes", "store", "bad = largest >= _INF_BITS", "bad = largest > _INF_BITS",
       options={"hostile": True}),
    _s("floor of a step too high", "store", "tl.maximum(high - low, _MIN_STEP * LEVELS)",
       "tl.maximum(high - low, 0.01 * LEVELS)",
       options={"hostile": True}),
    _s("norm not clamped", "store", "tl.minimum(norm, _FP16_MAX)", "norm + 0.0", options={"hostile": True}),
    _s("values not clamped", "store", "return tl.minimum(tl.maximum(x, -_FP16_MAX), _FP16_MAX)", "return x + 0.0",
       options={"hostile": True}),
    _s("fp8 rounds half up", "store", "m + 0x7FFFF + ((m >> 20) & 1)", "m + 0x80000", preset="turboquant_k8v4"),
    _s("rotation not scaled", "store", "_bucketize(y * ROT_SCALE,", "_bucketize(y * (ROT_SCALE * 1.01),"),
    _s("three-bit stream", "store", "g1 << 24", "g1 << 23", preset="turboquant_3bit_nc", head_size=64, layout="soa"),
    _s("wrong shift of codes", "dequantize", "shifts = BITS * tl.arange(0, 8)",
       "shifts = BITS * (7 - tl.arange(0, 8))"),
]  # fmt: skip


def mutated_source(m: Source) -> str:
    """The module's text with the change."""
    text = (SOURCES / f"{m.module}.py").read_text()
    at = [x.start() for x in re.finditer(re.escape(m.old), text)]
    assert len(at) > m.nth, f"{m.module}.py no longer has {m.old!r}: update this mutant"
    i = at[m.nth]
    return text[:i] + m.new + text[i + len(m.old) :]


def _imported(text: str, name: str, folder: Path) -> Any:
    """A module with this text, importable beside the originals."""
    path = folder / f"{name}.py"
    path.write_text(text)
    full = f"{ops.__package__}.{name}"
    spec = importlib.util.spec_from_file_location(full, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module
    spec.loader.exec_module(module)
    return module


def mutated_module(m: Source, folder: Path) -> Any:
    """The module with the change; of schedule.py, which has no kernel, the decode module that uses it."""
    name = f"{m.module}_mutant_{abs(hash(m.name))}"
    module = _imported(mutated_source(m), name, folder)
    if m.module == "schedule":
        text = (SOURCES / "decode.py").read_text()
        assert "from .schedule import" in text
        module = _imported(
            text.replace("from .schedule import", f"from .{name} import"), f"decode_{name}", folder
        )
    return module


def killed_by(p: Problem, arch: str, kernel: str, mutate: Any = None, store: Any = None) -> str:
    """What noticed the fault, or ""."""
    try:
        if kernel == "store":
            found = store_differences(p, arch, mutate, store)
            return f"bytes differ: {found}" if found else ""
        if kernel == "dequantize":
            e = dequantize_error(p, arch, mutate)
            return f"error {e:.2g}" if not e < 1e-5 else ""
        return decode_fault(p, arch, mutate)[0]
    except SimError as err:
        return err.kind


@pytest.mark.slow
@pytest.mark.parametrize("m", SOURCE, ids=str)
def test_source_mutant_is_killed(m: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = mutated_module(m, tmp_path)
    p = problem(m.arch, m.layout, m.preset, m.head_size, **m.options)
    if m.module == "store":
        by = killed_by(p, m.arch, "store", store=module.Store(p.bound.layout, "amd"))
    elif m.module == "dequantize":
        monkeypatch.setattr(p.bound.ops, "_dequantize", module.Dequantize(p.bound.layout, "amd"))
        by = killed_by(p, m.arch, "dequantize")
    else:
        kernel = "decode_kernel" if m.module == "schedule" else f"{m.module}_kernel"
        monkeypatch.setattr(ops, kernel, getattr(module, kernel))
        by = killed_by(p, m.arch, "decode")
    assert by, f"{m} survived"


@dataclass(frozen=True)
class Text:
    """One change of a kernel's assembly."""

    name: str
    kernel: str
    pattern: str
    replacement: str
    arch: str = "gfx942"
    count: int = 1
    nth: int = 0
    preset: str = "turboquant_4bit_nc"

    def __str__(self) -> str:
        return f"{self.arch} {self.kernel}: {self.name}"


def _both(name: str, kernel: str, pattern: str, replacement: str, **more: Any) -> list[Text]:
    return [Text(name, kernel, pattern, replacement, arch, **more) for arch in ("gfx942", "gfx950")]


TEXT = [
    *_both("no waits at all", "decode_kernel", r"^\ts_waitcnt .*$", "\ts_nop 0", count=10**6),
    *_both("no vmcnt waits", "decode_kernel", r"^\ts_waitcnt vmcnt\(\d+\)$", "\ts_nop 0", count=10**6),
    *_both("one vmcnt wait dropped", "store_kernel", r"^\ts_waitcnt vmcnt\(\d+\)$", "\ts_nop 0"),
    *_both("waits one load too few", "decode_kernel", r"^\ts_waitcnt vmcnt\(0\)$", "\ts_waitcnt vmcnt(1)", count=10**6),
    *_both("lgkmcnt waits dropped", "prepare_kernel", r"^\ts_waitcnt lgkmcnt\(\d+\)$", "\ts_nop 0", count=10**6),
    *_both("barriers dropped", "prepare_kernel", r"^\ts_barrier$", "\ts_nop 0", count=10**6),
    *_both("matrix operands swapped", "decode_kernel",
           r"(v_mfma_f32_16x16x\d+_f16 \S+) (v\[\d+:\d+\]), (v\[\d+:\d+\]),", r"\1 \3, \2,", count=10**6),
    *_both("EXEC mask left out", "store_kernel", r"s_and_saveexec_b64 (s\[\d+:\d+\]), (s\[\d+:\d+\]|vcc)",
           r"s_mov_b64 \1, exec", count=10**6),
    *_both("shuffle by half the distance", "store_kernel", r"row_shr:8|row_ror:8|row_half_mirror", "row_ror:4",
           count=10**6),
]  # fmt: skip


def text_mutation(m: Text) -> Callable[[str, Any], bytes | None]:
    def mutate(name: str, compiled: Any) -> bytes | None:
        if name.strip("_") != m.kernel:
            return None
        return assemble(edit(compiled.asm["amdgcn"], m.pattern, m.replacement, m.count, m.nth), m.arch)

    return mutate


@pytest.mark.slow
@pytest.mark.parametrize("m", TEXT, ids=str)
def test_assembly_mutant_is_killed(m: Text) -> None:
    p = problem(m.arch, "soa", m.preset, 64)
    kernel = "store" if m.kernel == "store_kernel" else "decode"
    assert killed_by(p, m.arch, kernel, text_mutation(m)), f"{m} survived"


@pytest.mark.parametrize("m", SOURCE, ids=str)
def test_source_mutant_is_up_to_date(m: Source) -> None:
    """In the default list, so that whoever changes a mutated line learns it at once."""
    assert mutated_source(m) != (SOURCES / f"{m.module}.py").read_text()


def test_there_are_enough_mutants() -> None:
    assert len(SOURCE) + len(TEXT) >= 30


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_a_few_mutants_always_run(arch: str) -> None:
    """The default run keeps one mutant of each kind: waits, barriers, masks."""
    p = problem(arch, "soa", "turboquant_4bit_nc", 64)
    for m in TEXT:
        if m.arch == arch and m.name in ("no waits at all", "barriers dropped"):
            assert killed_by(p, arch, "decode", text_mutation(m)), f"{m} survived"


_ = triton
