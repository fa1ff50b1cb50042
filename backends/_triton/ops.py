"""The Triton kernels as LayerOps: everything about a layer is fixed when it is bound, everything about a shape the
first time that shape is met, and a call only fills in pointers.

``SoaOps`` and ``AosOps`` differ in their layout alone; both names exist because declarations name them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

from ...dispatch import Decision
from ...layouts import Layout
from ...spec import SpecError
from ...tuned import choices, load_tuned
from .decode import decode_kernel
from .dequantize import Dequantize
from .device import FP8_SCALE
from .launch import Kernel, addressed, stand_ins
from .prepare import prepare_kernel
from .reduce import reduce_kernel
from .schedule import ALONE_BATCHES, schedule_size
from .store import Store
from .tile import (
    GROUP,
    MAX_ALIGNMENT,
    KeyTile,
    ValueTile,
    alignment,
    byte_table,
    centroid_table,
    corrects_norm,
    query_matrix,
)
from .workspace import Workspace, default_workspace

try:
    from . import wide
except (ImportError, AttributeError, TypeError):
    wide = None  # this Triton's Gluon is missing or another one: decode.py serves all columns

__all__ = ["AosOps", "DecodePlan", "SoaOps", "TritonOps", "tuned"]

LOG2E = 1.4426950408889634

# Habits of compilers that decide whether a tile is loaded the way the matrix instruction holds it; a wrong guess costs
# time and changes no result. 3.6 deals lanes over the dimensions of a tile in ascending order and gives NVIDIA operands
# that come out of tl.join twice the usual width; 3.9 does neither.
_OLD = tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 7)
ASCENDING = _OLD
OPERAND_WIDTH = 4 if _OLD else 2
COMPILER = "3.6" if _OLD else "3.9"
"""The generation of Triton, as configs/tuned names it."""

ARGUMENTS: Mapping[str, Any] = {
    "query_ptr": torch.float16, "query_scale_ptr": torch.float32, "matrix_ptr": torch.float16,
    "prepared_ptr": torch.float16,
    "scale_ptr": torch.float32, "cache_ptr": torch.uint8, "table_ptr": torch.int32, "seq_lens_ptr": torch.int32,
    "query_start_ptr": torch.int32, "schedule_ptr": torch.int32, "sinks_ptr": torch.float32, "tables_ptr": torch.int32,
    "lse_ptr": torch.float32, "out_ptr": torch.float32,
    "part_ptr": torch.float32, "part_lse_ptr": torch.float32,
    "rows": 1, "batch": 1, "pieces": 1, "token_stride": 1, "head_stride": 1, "table_stride": 1, "out_token_stride": 1,
    "out_head_stride": 1, "lse_token_stride": 1, "lse_head_stride": 1, "window": 1, "splits": 1, "min_tiles": 1,
    "most_queries": 1, "skew": 1, "query_token_stride": 1, "query_head_stride": 1,
    "scale_log2": 1.0, "soft_cap": 1.0,
}  # fmt: skip
"""Stand-ins for the arguments of the kernels, for compiling them ahead of time."""
PARTIAL: Mapping[str, torch.dtype] = {"out_ptr": torch.int32}
JOINED: Mapping[str, torch.dtype] = {"part_ptr": torch.int32}
"""Of decode where it writes partial results, and of reduce."""

_ROWS_PER_PREPARE = 16
"""Rows of a program of prepare."""
_MANY_PREPARE = 3
"""Programs of it per compute unit from which on each shall have more rows, because each reads the whole matrix."""
_PREPARE_NUMBERS = 8192
"""Of those the most numbers that a program can hold in its registers."""
_PREPARE_ROOM = 2
"""Programs of decode that have as many registers as one of prepare."""
MAX_SPLITS = 256
"""Of a sequence."""
_NEARLY_ALL = 0.98
_FASTER_JOINED = 0.96  # so few of the splits wanted will do where those are joined faster
_MAX_GRID = 65535  # second dimension of a grid on NVIDIA
_JOINS = ((8, 1, 1), (16, 1, 1), (32, 2, 1), (64, 4, 1), (128, 8, 1), (MAX_SPLITS, 8, 2))
"""How the splits of a row are joined: (up to that many splits, a power of two, parts of a row, warps of a part).
A row waits for as many reads in turn as it has chunks of splits, so all are read at once. What a lane reads is bounded
by its registers, so many splits take parts of few numbers; one warp has a part as long as that goes, as sums of
several need barriers."""


def _joined(most: int) -> list[int]:
    """A number of splits for each way of joining that up to ``most`` splits need: shorter contexts have fewer."""
    return [fewer + 1 for fewer, *_ in ((1,), *_JOINS) if fewer < most]


def target_kind(vendor: str) -> str:
    """Which device functions to use: "cuda", "hip", or "portable" under the interpreter."""
    if triton.knobs.runtime.interpret:
        return "portable"
    return {"nvidia": "cuda", "amd": "hip"}[vendor]


def tuned(arch: str, vendor: str, backend: str, **facts: Any) -> dict[str, Any]:
    """Tile and split choices for one kernel: those of ``arch``, or of the architecture it is most like."""
    return choices(load_tuned(arch, vendor, backend)["decode"], **facts)


@dataclass(frozen=True, slots=True)
class Launch:
    """One shape of call: what to launch and where its scratch memory is."""

    prepare: Kernel | None
    """None where decode works alone."""
    decode: Kernel
    reduce: Kernel | None
    rows: int
    batch: int
    splits: int
    pieces: int
    """With a schedule: room for that many pieces. Else 0."""
    scratch: tuple[int, ...]
    """What to ask a :class:`Workspace` for."""
    min_tiles: int
    most_queries: int
    skew: int
    matrix: torch.Tensor
    tables: torch.Tensor
    plan: DecodePlan


class DecodePlan:
    """Every constant of the decode kernels for one layer on one target: no tensor, no device.

    cache_alignment: bytes that cache pointers are aligned to (16, or 2 for the variant that takes any cache).
    """

    def __init__(
        self,
        decision: Decision,
        layout: Layout,
        *,
        cache_alignment: int = 16,
        kind: str | None = None,
        tuning: Mapping[str, Any] | None = None,
    ) -> None:
        layer, preset, target = decision.layer, layout.preset, decision.target
        if layout.block_size % GROUP:
            raise SpecError("block_size", layout.block_size, f"a multiple of {GROUP}")
        self.layer = layer
        self.layout = layout
        self.kind = kind or target_kind(target.vendor)
        self.decision = decision
        self.tuning = dict(tuning or {})
        self._choices: dict[tuple[int, bool], Mapping[str, Any]] = {}
        self.wide_from = 0
        self.key = KeyTile.of(
            preset.key_bits, layout.head_size, 4, alignment(layout, "key_data", cache_alignment)
        )
        base = self.tuned(columns=0)
        self.value = ValueTile.of(
            preset.value_bits,
            layout.value_head_size,
            base["value_lanes"],
            alignment(layout, "value_data", cache_alignment),
        )
        # Programmatic dependent launch (sm_90 and later): prepare is launched while the kernel before it ends, reduce
        # while decode ends, and a decode that leaves room for prepare together with it. Each waits before it reads what
        # the one before it writes; all else was written before prepare had waited, and it launches decode after that. A
        # decode that fills the device must not start early: programs that come while others hold registers leave holes
        # between theirs that fit none, and what would be one wave of programs becomes two. It is launched when prepare
        # is about to end, or, if the batch is cut, when only the program that cuts it is left (early_cut). Without
        # prepare every program of decode waits before anything else, for the kernel before it, and what reduce reads
        # before its own wait (lengths, query_start_loc) had been written then.
        self.pdl = self.kind == "cuda" and int(target.arch.removeprefix("sm_")) >= 90
        # Halves of a word of a partial result: a lane of NVIDIA holds a row of every unit, one of AMD rows in a row.
        self.paired = target.vendor == "nvidia" and self.value.units > 1
        self.part_words = self.value.part_words(self.paired)
        # Whether decode could do without prepare: its programs can rotate queries themselves, see queries.py.
        size = layout.head_size
        self.rotates = self.kind != "hip" and size in (64, 128, 256)
        self.planes = 0
        if base["int8_keys"] and not preset.fp8_keys and not corrects_norm(layout):
            # one plane is better than a bf16 codebook, but not than an fp16 one
            self.planes = 1 if layer.dtype == "bf16" else 2
        self.wide_from = base["wide_from"] if wide is not None and self._fits_wide(cache_alignment) else 0
        width = base["key_width"] * (2 if self.planes else 1)
        unpack = preset.fp8_keys and self.kind == "cuda" and target.fp8_format == "e4m3fn"
        self.matrix, factor = query_matrix(
            layout, self.key, self.kind, width, self.planes, 1.0 if unpack else FP8_SCALE
        )
        table: tuple[int, ...] = (0,)
        square_factor = 1.0
        self.base, self.stretch, offsets = 0, 1.0, (0.0, 0.0)
        if self.planes:
            bytes_ = byte_table(layout.head_size, preset.key_bits, self.planes)
            table, self.base, self.stretch = bytes_.words, bytes_.base, bytes_.stretch
            offsets = (bytes_.base * bytes_.offset, bytes_.lower_offset)
        elif not preset.fp8_keys:
            pairs = centroid_table(layout.head_size, preset.key_bits)
            table, square_factor = (*pairs.planes, 0x7F7F7F7F), pairs.square_factor
        self.factor = factor if layer.soft_cap is not None else factor * LOG2E
        group = layer.gqa_ratio
        self.constants: dict[str, Any] = {
            "HQ": layer.num_heads,
            "HK": layer.num_kv_heads,
            "G": group,
            "KEY": self.key.constants,
            "VALUE": self.value.constants,
            "KEY_DATA": self._field("key_data", 4 if self.key.vec else 1),
            "VALUE_DATA": self._field("value_data", 4 if self.value.vec else 1),
            "KEY_NORM": (0, 0, 0, 0) if preset.fp8_keys else self._field("key_norm", 2),
            "VALUE_SCALE": self._field("value_scale", 2),
            "VALUE_ZERO": self._field("value_zero", 2),
            "BLOCK_SIZE": layout.block_size,
            "DV": layout.value_head_size,
            "TABLE": table,
            "TABLE_WORDS": len(table),
            "SQUARE_FACTOR": square_factor,
            "NORM_CORRECTION": corrects_norm(layout),
            "PLANES": self.planes,
            "BASE": self.base,
            "BYTE_OFFSETS": offsets,
            "FP8_UNPACK": unpack,
            "BARE_VALUES": base["bare_values"],
            "KWIDTH": width,
            "RUNS": base["token_runs"],
            "LANE_FIRST": base["lane_first"],
            "ASCENDING": ASCENDING,
            "CACHE_ALIGN": cache_alignment,
            "WINDOW": layer.window is not None,
            "SOFT_CAP": layer.soft_cap is not None,
            "SINKS": layer.sinks,
            "PAIRED": self.paired,
            "PDL": self.pdl,
            "TARGET": self.kind,
        }

    def _fits_wide(self, cache_alignment: int) -> bool:
        """Whether wide.py can serve this layer: what it takes for granted, see there."""
        layout, target = self.layout, self.decision.target
        if self.kind != "cuda" or target.arch != "sm_90" or self.planes != 1:
            return False
        if (self.key.bits, self.key.dim, self.value.bits, self.value.dim) != (4, wide.HEAD_SIZE) * 2:
            return False
        rows = all(
            alignment(layout, name, cache_alignment) == MAX_ALIGNMENT for name in ("key_data", "value_data")
        )
        fields = [self._field(name, 2) for name in ("key_norm", "value_scale", "value_zero")]
        pairs = all(token == 2 and not base % 4 and not head % 4 for base, token, head, _ in fields)
        return rows and pairs

    def is_wide(self, columns: int) -> bool:
        """Whether wide.py has the tiles of ``columns`` columns."""
        return 0 < self.wide_from <= columns and columns in wide.COLUMNS

    def little(self, batch: int, max_context: int, max_query_len: int, compute_units: int) -> bool:
        """Whether a shape has so little work that a wide tile's longer way to its first token and from its last counts
        for more than what it saves: such shapes are for a plan without wide tiles."""
        if not self.is_wide(self.columns(max_query_len)):
            return False
        return self.visible(max_context, max_query_len) <= self.little_context(
            batch, max_query_len, compute_units
        )

    def little_context(self, batch: int, max_query_len: int, compute_units: int) -> int:
        """The most tokens of each sequence that are so little work."""
        heads = max(batch, 1) * self.layer.num_kv_heads
        choice = self.tuned(self.columns(max_query_len), max_query_len > 1)
        return -(-int(choice["wide_work"]) * compute_units // heads) - 1

    def tuned(self, columns: int, multi: bool = False) -> Mapping[str, Any]:
        """Tile and split choices for a kernel of ``columns`` columns. multi: for several query tokens of a sequence,
        on which only ``alone`` and ``wide_work`` may depend."""
        target = self.decision.target
        if (columns, multi) in self._choices:
            return self._choices[columns, multi]
        values = tuned(
            target.arch,
            target.vendor,
            self.decision.backend,
            preset=self.layout.preset.name.removeprefix("turboquant_"),
            head_size=self.layout.head_size,
            columns=columns,
            compiler=COMPILER,
            multi=multi,
            wide=self.is_wide(columns),
            soft_cap=self.layer.soft_cap is not None,
        )
        if target.vendor == "nvidia":
            values |= {"key_width": OPERAND_WIDTH, "token_runs": OPERAND_WIDTH}
        if self.kind == "portable":  # interpreted: nothing to hide, and every operation costs Python time
            values["prefetch"] = False
        choice = values | self.tuning
        if self.is_wide(columns):  # no choices there
            choice |= {"tokens": wide.TOKENS, "num_warps": wide.WARPS, "alone": False}
        self._choices[columns, multi] = choice
        return choice

    def _field(self, name: str, size: int) -> tuple[int, int, int, int]:
        """(base, token stride, head stride, block stride) of a field, bytes; all of them multiples of ``size``."""
        place = self.layout.place(name)
        numbers = (place.base, place.token_stride, place.head_stride, self.layout.block_stride)
        assert all(n % size == 0 for n in numbers)
        return numbers

    def columns(self, max_query_len: int) -> int:
        """Columns of a tile: a power of two, at least the narrow side of the target's matrix instruction."""
        least = 8 if self.decision.target.vendor == "nvidia" else 16
        wanted = triton.next_power_of_2(self.layer.gqa_ratio * max_query_len)
        of_wide = [n for n in wide.COLUMNS if n >= self.wide_from] if self.wide_from else []
        if of_wide and wanted >= min(of_wide):
            return int(min(wanted, max(of_wide)))
        return max(least, min(self.tuned(0)["columns"], wanted))

    def column_tiles(self, max_query_len: int) -> int:
        """Column tiles of a KV head."""
        return -(-max_query_len * self.layer.gqa_ratio // self.columns(max_query_len))

    def prepare_constants(
        self, rows: int = _ROWS_PER_PREPARE, early: bool = False, cut: bool = False, columns: int = 0
    ) -> dict[str, Any]:
        """Constexprs and options of the prepare kernel. rows: of a program. early: decode is launched while it runs,
        where the target can. cut: it writes a schedule for tiles of ``columns`` columns."""
        d = self.layout.head_size
        return {
            "HQ": self.layer.num_heads,
            "D": d,
            "KP": self.key.columns,
            "KP2": triton.next_power_of_2(self.key.columns),
            "R": rows,
            # padded sizes carry masks, in scalar registers that run out: fewer dims at once
            "CHUNK": min(128 if self.kind == "cuda" else 64, d) if d & (d - 1) == 0 else 32,
            "PDL": self.pdl,
            "EARLY": self.pdl and early,
            "BASE": self.base,
            "CODES": self.planes == 1 and self.layout.preset.key_bits == 4,
            "STRETCH": self.stretch,
            "KWIDTH": self.constants["KWIDTH"],
            "CUT": cut,
            "MOST": MAX_SPLITS if cut else 0,
            "T": self.tuned(columns)["tokens"] if cut else 0,
            "WINDOW": cut and self.layer.window is not None,
            **({"launch_pdl": True} if self.pdl else {}),
            "num_warps": 8 if self.kind == "cuda" else 4,
            "num_stages": 1,
            "enable_fp_fusion": True,
            # for head size 64 Triton 3.9 aims at fewer registers than it needs and spills, unless given a limit
            **({"maxnreg": 168} if self.pdl and not _OLD and d == 64 else {}),
        }

    @staticmethod
    def _alone(batch: int, cut: bool) -> dict[str, Any]:
        """Constexprs that decode and reduce have in common. batch: of sequences that decode cuts without a schedule the
        most, or any number where it cuts none; 0: prepare ran."""
        cut = cut and batch > 0
        return {"ALONE": batch > 0, "MOST": MAX_SPLITS if cut else 0, "AT_ONCE": batch if cut else 0}

    def decode_kernel(self, columns: int) -> Any:
        """The kernel for tiles of ``columns`` columns."""
        return wide.wide_kernel if self.is_wide(columns) else decode_kernel

    def decode_constants(
        self,
        columns: int,
        multi: bool,
        direct: bool,
        write_lse: bool,
        cut: bool = False,
        alone: int = 0,
    ) -> dict[str, Any]:
        """Constexprs and options of the decode kernel. cut: its programs are the pieces of a batch. alone: see
        :meth:`alone_for`."""
        choice = self.tuned(columns)
        constants = {
            **self.constants,
            "N": columns,
            "T": choice["tokens"],
            "LAZY": choice["lazy"],
            "PREFETCH": choice["prefetch"] and self.layout.block_stride % 4 == 0,
            "MULTI": multi,
            "DIRECT": direct,
            "WRITE_LSE": write_lse and direct,
            "CUT": cut,
            "CLASSES": choice["classes"] if cut else 1,
            **self._alone(alone, cut),
            "STRETCH": self.stretch if alone else 1.0,
        }
        if self.is_wide(columns):
            constants = {name: constants[name] for name in constants if name in wide.wide_kernel.arg_names}
        return {
            **constants,
            **({"launch_pdl": True} if self.pdl else {}),
            "num_warps": choice["num_warps"],
            "num_stages": choice["num_stages"],
            "enable_fp_fusion": True,
            **(
                {"maxnreg": choice["max_registers"]}
                if self.kind == "cuda" and choice["max_registers"]
                else {}
            ),
        }

    def reduce_constants(
        self,
        multi: bool,
        write_lse: bool,
        splits: int,
        cut: bool = False,
        alone: int = 0,
        columns: int = 0,
    ) -> dict[str, Any]:
        """Constexprs and options of the reduce kernel. alone: see :meth:`alone_for`. columns: of decode's tiles."""
        alone = alone if cut else 0
        value, paired = self.constants["VALUE"], self.paired
        if self.is_wide(columns):  # partial results in the order of the dims
            dims = ValueTile(self.value.bits, wide.HEAD_SIZE, 1, wide.HEAD_SIZE, 1, 0, MAX_ALIGNMENT)
            assert dims.part_words(False) == self.part_words
            value, paired = dims.constants, False
        chunk, parts, warps = next(join for join in _JOINS if splits <= join[0])
        return {
            "HQ": self.layer.num_heads,
            "DV": self.layout.value_head_size,
            "VALUE": value,
            "RW": self.part_words,
            "RW2": triton.next_power_of_2(self.part_words),
            "PAIRED": paired,
            "CHUNK": chunk,
            "PARTS": parts,
            "MULTI": multi,
            "SINKS": self.layer.sinks,
            "WRITE_LSE": write_lse,
            "PDL": self.pdl,
            "CUT": cut,
            **self._alone(alone, cut),
            "T": self.tuned(columns)["tokens"] if alone else 0,
            "WINDOW": alone > 0 and self.layer.window is not None,
            **({"launch_pdl": True} if self.pdl else {}),
            "num_warps": warps,
            "num_stages": 1,
            "enable_fp_fusion": True,
        }

    def scratch(self, rows: int, splits: int, numbers: int = 0) -> tuple[int, ...]:
        """What to ask a :class:`Workspace` for. numbers: of the schedule."""
        return rows, self.key.columns, splits, self.part_words, numbers, 2

    def together(self, rows: int, compute_units: int) -> int:
        """How many of ``rows`` query rows a program of prepare takes."""
        if rows <= _MANY_PREPARE * _ROWS_PER_PREPARE * compute_units:
            return _ROWS_PER_PREPARE
        return min(64, _PREPARE_NUMBERS // triton.next_power_of_2(self.key.columns))

    def visible(self, max_context: int, max_query_len: int) -> int:
        """The widest range of tokens that one column tile can see."""
        if self.layer.window is None:
            return max_context
        queries = min(max_query_len, -(-self.columns(max_query_len) // self.layer.gqa_ratio) + 1)
        return min(max_context, self.layer.window + queries - 1 + GROUP)

    def capacity(self, max_query_len: int, compute_units: int) -> int:
        """Programs of decode that run at once, as the number of splits aims at."""
        return int(self.tuned(self.columns(max_query_len))["programs_per_cu"]) * compute_units

    def _wanted(self, batch: int, max_context: int, max_query_len: int, compute_units: int) -> int:
        """Splits that fill the device once, 0 if it is full without. Where they would be short, fewer: what a program
        does before its first tile and after its last counts."""
        choice = self.tuned(self.columns(max_query_len))
        programs = self.programs(batch, max_query_len)
        wanted = (
            self.capacity(max_query_len, compute_units) // programs
        )  # whole waves: never a few programs more
        if self.visible(max_context, max_query_len) < wanted * choice["long_from"]:
            return int(choice["few_programs_per_cu"]) * compute_units // programs
        return wanted

    def splits(self, batch: int, max_context: int, max_query_len: int, compute_units: int) -> int:
        """Number of splits for a shape: enough programs to fill the device, no split shorter than min_tokens."""
        columns = self.columns(max_query_len)
        choice = self.tuned(columns)
        wanted = self._wanted(batch, max_context, max_query_len, compute_units)
        if self.pdl and not self.alone_for(columns, max_query_len > 1, 1, 0):
            # one split less where that lets decode start early
            room = self.capacity(max_query_len, compute_units) - self.room(batch, max_query_len)
            fewer = min(wanted, room // self.programs(batch, max_query_len))
            if fewer >= _NEARLY_ALL * wanted:
                wanted = fewer
        wanted = next((most for most, *_ in _JOINS if _FASTER_JOINED * wanted <= most < wanted), wanted)
        visible = self.visible(max_context, max_query_len)
        longest = -(-visible // max(choice["min_tokens"], choice["tokens"]))
        return max(1, min(wanted, longest, MAX_SPLITS))

    def room(self, batch: int, max_query_len: int) -> int:
        """How many decode programs find no place while prepare runs: a program of it has the registers of two."""
        return _PREPARE_ROOM * -(-batch * max_query_len * self.layer.num_heads // _ROWS_PER_PREPARE)

    def alone_for(self, columns: int, multi: bool, batch: int, pieces: int) -> int:
        """Whether decode of a batch needs no prepare, if queries are aligned to 16 bytes: 0, it does, or as many
        sequences as such a kernel can cut at most."""
        if not self.rotates or not self.tuned(columns, multi)["alone"]:
            return 0
        if pieces and batch > max(ALONE_BATCHES):
            return 0
        return next(most for most in ALONE_BATCHES if batch <= most or not pieces)

    def early(self, batch: int, splits: int, max_query_len: int, compute_units: int) -> bool:
        """Whether decode, of several splits, leaves so much of the device free that it may start while prepare runs."""
        programs = self.programs(batch * splits, max_query_len)
        room = self.room(batch, max_query_len)
        return splits > 1 and programs + room <= self.capacity(max_query_len, compute_units)

    def programs(self, pieces: int, max_query_len: int) -> int:
        """Of decode, for so many splits or pieces."""
        return pieces * self.layer.num_kv_heads * self.column_tiles(max_query_len)

    def early_cut(self, pieces: int, max_query_len: int, compute_units: int) -> bool:
        """Whether decode of a batch that is cut may be launched while the program that cuts it still runs. Where all
        programs of decode fit at once, but not beside that one, two of them would run after the others."""
        programs = self.programs(pieces, max_query_len)
        capacity = self.capacity(max_query_len, compute_units)
        return programs + _PREPARE_ROOM <= capacity or programs > capacity

    def cut(self, batch: int, max_context: int, splits: int, max_query_len: int, compute_units: int) -> int:
        """Room for pieces if a batch of ``max_query_len`` query tokens each is to be cut by its lengths, else 0.

        As many as without cutting, twice as many where pieces of half the size are still ``double_from`` tokens
        long, and ``cut_pieces`` to a sequence where sequences would not be split. Not where so many splits leave half
        of the device free: working out pieces, or waiting for the program that does, costs more than it brings. That
        rule and :meth:`splits` only go one way with the context, so what warm-up asks for the longest holds for all.
        """
        choice = self.tuned(self.columns(max_query_len))
        visible = self.visible(max_context, max_query_len)
        half = self.capacity(max_query_len, compute_units) // 2
        if batch < 2 or (splits > 1 and self.programs(batch * splits, max_query_len) <= half):
            return 0
        if splits == 1 and visible < choice["cut_from"]:
            return 0
        each = choice["cut_pieces"]
        if splits > 1:
            each, least = splits, choice["double_from"]
            whole = 2 * splits <= MAX_SPLITS and 2 * splits % choice["classes"] == 0
            if least and whole and visible >= 2 * splits * least:
                each = 2 * splits
        pieces = batch * each
        return pieces if pieces + choice["classes"] <= _MAX_GRID else 0

    def skew(self, pieces: int, max_query_len: int, compute_units: int) -> int:
        """By how much pieces differ in size (schedule.py): where not all of them run at once."""
        if self.programs(pieces, max_query_len) <= self.capacity(max_query_len, compute_units):
            return 0
        return int(self.tuned(self.columns(max_query_len))["skew"])


class TritonOps:
    """LayerOps in Triton for one layer.

    options, for tests and tuning: ``splits`` fixes the number of splits, and with ``cut`` the room for pieces, which is
    that many times the batch; ``tuning`` replaces values of the layer's file in configs/tuned.
    """

    def __init__(
        self,
        decision: Decision,
        layout: Layout,
        *,
        splits: int | None = None,
        cut: bool = False,
        tuning: Mapping[str, Any] | None = None,
    ) -> None:
        if splits is not None and not 1 <= splits <= MAX_SPLITS:
            raise SpecError("splits", splits, f"1 to {MAX_SPLITS}")
        if cut and (splits is None or splits < 2):
            raise SpecError("cut", cut, "given with two splits or more")
        self.layer = decision.layer
        self.layout = layout
        self.decision = decision
        self.fixed_splits = splits
        self._fixed_cut = cut
        self._tuning = tuning
        self.plan = DecodePlan(decision, layout, tuning=tuning)
        self._plans = {True: self.plan}
        self._narrow = self.plan
        if self.plan.wide_from:
            self._narrow = DecodePlan(decision, layout, tuning={**(tuning or {}), "wide_from": 0})
        self._launches: dict[tuple[Any, ...], Launch] = {}
        self._matrix: dict[tuple[torch.device, bool], torch.Tensor] = {}
        self._tables: dict[tuple[torch.device, bool], torch.Tensor] = {}
        self._window = self.layer.window or 0
        self._soft_cap = self.layer.soft_cap or 0.0
        self._store = Store(layout, decision.target.vendor)
        self._dequantize = Dequantize(layout, decision.target.vendor)

    # ---- store ------------------------------------------------------------------------------------------

    def store(
        self,
        key: torch.Tensor,  # [T, Hk, D]
        value: torch.Tensor,  # [T, Hk, Dv]
        cache: torch.Tensor,  # [nb, bs, Hk, slot_stride] uint8
        slot_mapping: torch.Tensor,  # [T] int32/int64
        nonfinite: torch.Tensor | None = None,  # [2] int32
    ) -> None:
        """Quantise and write the tokens whose slot is not negative; one launch."""
        self._store(key, value, cache, slot_mapping, nonfinite)

    # ---- dequantise -------------------------------------------------------------------------------------

    def dequantize(
        self,
        cache: torch.Tensor,  # [nb, bs, Hk, slot_stride] uint8
        block_table: torch.Tensor,  # [B, M] int32
        seq_lens: torch.Tensor,  # [B] int32
        starts: torch.Tensor,  # [B] int32
        cu_lens: torch.Tensor,  # [B + 1] int32
        key_out: torch.Tensor,  # [sum, Hk, D] fp16/bf16/fp32, contiguous
        value_out: torch.Tensor,  # [sum, Hk, Dv]
    ) -> None:
        """Tokens [starts, seq_lens) of every sequence, one after the other, rotated back; one launch."""
        self._dequantize(cache, block_table, starts, cu_lens, key_out, value_out)

    # ---- decode -----------------------------------------------------------------------------------------

    def decode(
        self,
        query: torch.Tensor,  # [N, Hq, D] fp16/bf16
        cache: torch.Tensor,  # [nb, bs, Hk, slot_stride] uint8
        block_table: torch.Tensor,  # [B, M] int32
        seq_lens: torch.Tensor,  # [B] int32
        query_start_loc: torch.Tensor | None,  # [B + 1] int32
        max_query_len: int,
        scale: float,
        sinks: torch.Tensor | None,  # [Hq] fp32
        out: torch.Tensor,  # [N, Hq, Dv]
        lse: torch.Tensor | None,  # [N, Hq] fp32
        workspace: Workspace | None = None,
    ) -> None:
        """Attention of every query token to its own sequence; see BoundLayer.decode. One to three launches."""
        aligned = not cache.data_ptr() & 15
        query_token, query_head, _ = query.stride()
        even = not (query.data_ptr() >> 1 | query_token | query_head) & 7
        key = (
            query.shape[0], block_table.shape, max_query_len, query_start_loc is None, lse is None,
            aligned, even, query.device, query.dtype, out.dtype, addressed(query, cache, block_table, out),
        )  # fmt: skip
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = self._make_launch(*key[:8])
        if not launch.batch:
            return
        direct = launch.reduce is None
        queries, query_scales, part, part_lse, schedule = (workspace or default_workspace(query.device)).take(
            *launch.scratch
        )
        starts = seq_lens if query_start_loc is None else query_start_loc
        some_sinks = query_scales if sinks is None else sinks
        some_lse = query_scales if lse is None else lse
        lse_token, lse_head = (0, 0) if lse is None else lse.stride()
        out_token, out_head, _ = out.stride()
        if launch.prepare is not None:
            launch.prepare(
                query, launch.matrix, queries, query_scales, seq_lens, schedule, launch.rows, query_token, query_head,
                launch.batch, launch.pieces, self._window, launch.min_tiles,
            )  # fmt: skip
        launch.decode(
            query if launch.prepare is None else queries,
            query_scales, cache, block_table, seq_lens, starts, schedule, some_sinks, launch.tables,
            out if direct else part,
            some_lse if direct else part_lse,
            block_table.stride(0), out_token, out_head, lse_token, lse_head,
            scale * launch.plan.factor, self._soft_cap, self._window, launch.splits, launch.min_tiles, launch.pieces,
            launch.most_queries, launch.skew, launch.batch, query_token, query_head,
        )  # fmt: skip
        if launch.reduce is not None:
            launch.reduce(
                part, part_lse, starts, schedule, some_sinks, out, some_lse, launch.splits, launch.batch, launch.pieces,
                launch.most_queries, out_token, out_head, lse_token, lse_head, seq_lens, self._window,
                launch.min_tiles,
            )  # fmt: skip

    def warmup(
        self,
        max_batch: int,
        max_context: int,
        max_query_len: int = 1,
        *,
        device: torch.device | str = "cuda",
        dtype: torch.dtype | None = None,
        lse: bool | None = None,
        workspace: Workspace | None = None,
    ) -> int:
        """Compile and load every kernel that decode can need in the declared range, and reserve its scratch memory.

        max_batch: most sequences; max_context: most tokens that a block table spans (its width times the block
        size); max_query_len: most query tokens of a sequence. dtype: of queries and outputs, default the layer's.
        lse: whether it will be asked for; None: both. Returns the number of kernels. After it, decode inside the
        range compiles nothing, allocates nothing and does not synchronise, if caches and queries are aligned to 16
        bytes.
        """
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        dtype = dtype or {"bf16": torch.bfloat16, "fp16": torch.float16}[self.layer.dtype]
        units = _compute_units(device)
        self._load_matrix(device, True)
        space = workspace or default_workspace(device)
        modes: set[tuple[bool, int, bool, bool]] = set()  # narrow, columns, multi, direct
        most_splits = 1
        most_pieces = 0  # of a sequence, on average
        cuts: set[tuple[bool, int, bool, int]] = set()
        nbytes = 0
        # the number of splits does not follow from that of column tiles alone, so every length is asked
        for batch, length in itertools.product(range(1, max_batch + 1), range(1, max_query_len + 1)):
            forms = {length > 1, True}  # one query token each comes with query_start_loc or without
            rows = batch * length * self.layer.num_heads
            for narrow, context in self._contexts(batch, max_context, length, units):
                plan = self._narrow if narrow else self.plan
                columns = plan.columns(length)
                splits, *_ = self._split(plan, batch, context, length, False, device)
                nbytes = max(nbytes, space.needed(*plan.scratch(rows, splits)))
                average, pieces, *_ = self._split(plan, batch, context, length, True, device)
                if pieces:
                    alone = {multi: plan.alone_for(columns, multi, batch, pieces) for multi in forms}
                    cuts |= {(narrow, columns, multi, most) for multi, most in alone.items()}
                    most_pieces = max(most_pieces, average)
                    numbers = 0 if all(alone.values()) else schedule_size(pieces, batch)
                    nbytes = max(nbytes, space.needed(*plan.scratch(rows, average, numbers)))
                most_splits = max(most_splits, splits)
                modes |= {(narrow, columns, multi, s == 1) for multi in forms for s in {1, splits}}
        space.reserve(nbytes)
        some_lse = (False, True) if lse is None else (lse,)
        most_rows = max_batch * max_query_len * self.layer.num_heads
        prepared = sorted({_ROWS_PER_PREPARE, self.plan.together(most_rows, units)})
        compiled = []
        plans = {True: self._narrow, False: self.plan}
        if not all(plans[narrow].alone_for(columns, multi, 1, 0) for narrow, columns, multi, _ in modes):
            for size in prepared:
                for early in (False, True) if self.plan.pdl and size == min(prepared) else (False,):
                    constants = self.plan.prepare_constants(size, early)
                    compiled.extend(self._compile(prepare_kernel, constants, {"query_ptr": dtype}))
        for narrow, columns, multi, direct in sorted(modes):
            plan = plans[narrow]
            most = plan.alone_for(columns, multi, 1, 0)
            queries = {"query_ptr": dtype} if most else {}
            for write in some_lse:
                if direct:
                    constants = plan.decode_constants(columns, multi, True, write, alone=most)
                    compiled.extend(
                        self._compile(plan.decode_kernel(columns), constants, queries | {"out_ptr": dtype})
                    )
                else:
                    constants = plan.decode_constants(columns, multi, False, False, alone=most)
                    compiled.extend(self._compile(plan.decode_kernel(columns), constants, queries | PARTIAL))
                    for splits in _joined(most_splits):
                        constants = plan.reduce_constants(multi, write, splits, columns=columns)
                        compiled.extend(self._compile(reduce_kernel, constants, JOINED | {"out_ptr": dtype}))
        for narrow, columns, multi, most in sorted(cuts):
            plan = plans[narrow]
            if not most:
                for size, early in itertools.product(prepared, (False, True) if plan.pdl else (False,)):
                    constants = plan.prepare_constants(size, early, cut=True, columns=columns)
                    compiled.extend(self._compile(prepare_kernel, constants, {"query_ptr": dtype}))
            constants = plan.decode_constants(columns, multi, False, False, cut=True, alone=most)
            queries = {"query_ptr": dtype} if most else {}
            compiled.extend(self._compile(plan.decode_kernel(columns), constants, queries | PARTIAL))
            for write, splits in itertools.product(some_lse, _joined(most_pieces)):
                constants = plan.reduce_constants(multi, write, splits, True, most, columns)
                compiled.extend(self._compile(reduce_kernel, constants, JOINED | {"out_ptr": dtype}))
        return len({id(kernel) for kernel in compiled})

    def plan_for(self, batch: int, max_context: int, max_query_len: int, device: torch.device) -> DecodePlan:
        """The plan of a shape, with an aligned cache."""
        little = self.plan.little(batch, max_context, max_query_len, _compute_units(device))
        return self._narrow if little else self.plan

    def _contexts(
        self, batch: int, max_context: int, max_query_len: int, units: int
    ) -> list[tuple[bool, int]]:
        """Which plans serve shapes of up to ``max_context`` tokens, the narrow one or not, and the most tokens of
        each."""
        if not self.plan.is_wide(self.plan.columns(max_query_len)):
            return [(False, max_context)]
        if self.plan.little(batch, max_context, max_query_len, units):
            return [(True, max_context)]
        most = self.plan.little_context(batch, max_query_len, units)
        most = most // self.layout.block_size * self.layout.block_size
        return [(False, max_context), *([(True, most)] if most >= 0 else [])]

    @staticmethod
    def _compile(
        kernel: Any, constants: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]
    ) -> Iterator[Any]:
        """Compile a specialisation, for caches of any size, and load it, without running it."""
        if triton.knobs.runtime.interpret:
            yield kernel
            return
        for memory in stand_ins(torch.uint8) if "cache_ptr" in kernel.arg_names else (None,):
            given = {**ARGUMENTS, **dtypes, "cache_ptr": memory}
            values = [given[name] for name in kernel.arg_names if name not in constants]
            made = kernel.warmup(*values, grid=(1, 1, 1), **constants)
            made._init_handles()
            yield made

    def _load_matrix(self, device: torch.device, aligned: bool) -> None:
        if (device, aligned) not in self._matrix:
            plan = self._plans[aligned]
            matrix = torch.from_numpy(plan.matrix)
            self._matrix[device, aligned] = matrix.to(device=device, dtype=torch.float16)
            words = torch.tensor(plan.constants["TABLE"], dtype=torch.int32)
            self._tables[device, aligned] = words.repeat_interleave(4).to(device)

    def _make_launch(
        self,
        tokens: int,
        table_shape: tuple[int, int],
        max_query_len: int,
        single: bool,
        no_lse: bool,
        aligned: bool,
        even_queries: bool,
        device: torch.device,
    ) -> Launch:
        """Everything about one shape of call; the values are kept. aligned: the cache, to 16 bytes; even_queries:
        so are queries."""
        plan = self._plans.get(aligned)
        if plan is None:
            plan = self._plans[aligned] = DecodePlan(
                self.decision, self.layout, cache_alignment=2, tuning=self._tuning
            )
        self._load_matrix(device, aligned)
        batch, blocks = table_shape
        if single:
            max_query_len = 1
        context = blocks * self.layout.block_size
        if plan is self.plan:
            plan = self.plan_for(batch, context, max_query_len, device)
        columns = plan.columns(max_query_len)
        # even: there is room for as many query tokens of each sequence as any may have
        even = tokens == batch * max_query_len
        splits, pieces, early = self._split(plan, max(batch, 1), context, max_query_len, even, device)
        cut = bool(pieces)
        alone = plan.alone_for(columns, not single, batch, pieces) if even_queries else 0
        direct = splits == 1
        choice = plan.tuned(columns)
        rows = tokens * self.layer.num_heads
        min_tiles = 1 if self.fixed_splits else -(-choice["min_tokens"] // choice["tokens"])
        together = _ROWS_PER_PREPARE if early and not cut else plan.together(rows, _compute_units(device))
        reduce = None
        classes = choice["classes"]
        heads = plan.programs(1, max_query_len)
        if not direct:
            constants = plan.reduce_constants(not single, not no_lse, splits, cut, alone, columns)
            reduce = Kernel(reduce_kernel, (rows, constants["PARTS"], 1), constants)
        return Launch(
            prepare=None
            if alone
            else Kernel(
                prepare_kernel,
                (-(-rows // together) + cut, 1, 1),
                plan.prepare_constants(together, early, cut, columns),
            ),
            decode=Kernel(
                plan.decode_kernel(columns),
                (heads, -(-pieces // classes) * classes, 1) if cut else (heads, splits, batch),
                plan.decode_constants(columns, not single, direct, not no_lse, cut, alone),
            ),
            reduce=reduce,
            rows=rows,
            batch=batch if tokens else 0,
            splits=splits,
            pieces=pieces,
            scratch=plan.scratch(
                rows, 0 if direct else splits, schedule_size(pieces, batch) if cut and not alone else 0
            ),
            min_tiles=min_tiles,
            most_queries=max_query_len,
            skew=plan.skew(pieces, max_query_len, _compute_units(device)),
            matrix=self._matrix[device, aligned],
            tables=self._tables[device, aligned],
            plan=plan,
        )

    def _split(
        self,
        plan: DecodePlan,
        batch: int,
        max_context: int,
        max_query_len: int,
        even: bool,
        device: torch.device,
    ) -> tuple[int, int, bool]:
        """(splits, room for pieces if the batch is cut by its lengths, whether decode starts early)."""
        units = _compute_units(device)
        if self.fixed_splits:
            splits = self.fixed_splits
            pieces = batch * splits if self._fixed_cut and even and batch > 1 else 0
        else:
            splits = plan.splits(batch, max_context, max_query_len, units)
            pieces = plan.cut(batch, max_context, splits, max_query_len, units) if even else 0
            if pieces:
                splits = pieces // batch
        if pieces:
            return splits, pieces, plan.early_cut(pieces, max_query_len, units)
        return splits, 0, plan.early(batch, splits, max_query_len, units)


@cache
def _compute_units(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


class SoaOps(TritonOps):
    """LayerOps over the SoA layout."""


class AosOps(TritonOps):
    """LayerOps over the AoS layout."""
