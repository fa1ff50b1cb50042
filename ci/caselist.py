"""The cases that every leg runs, as data: the same names and the same input bits on every machine.

Inputs are made of integers alone (raw output of a counter-based generator, summed), so that they do not depend on
a maths library, a CPU or a version of torch; each result still carries a digest of its inputs. Decode and
dequantise cases read bytes written by the torch reference, whatever the leg: a store that is wrong shows in the
store cases and nowhere else.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from tests.cases import layer_spec
from tests.golden_data import NUM_KV_HEADS, GoldenCase
from tests.golden_data import cases as golden_cases
from turboquant_rocm import LayerSpec
from turboquant_rocm.layouts import LAYOUT_NAMES
from turboquant_rocm.presets import serving_names

__all__ = ["FILL", "Case", "Paged", "case_list", "normal", "paged_inputs", "store_inputs"]

FILL: Final = 0xCD
"""Every byte of a cache before its store: a byte that nobody writes must keep it."""
TORCH_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}

PLAIN_LENS: Final = (1, 33, 0, 70)
"""A single token, a block edge crossed by one, an empty sequence, several tiles."""


@dataclass(frozen=True, slots=True)
class Case:
    """One case. kind: store, decode, dequantize or time. golden: a file of tests/golden instead of made inputs.

    seq_lens, query_lens: per sequence (query_lens empty: one query token each). layer: more fields of LayerSpec.
    splits: fixed number of partial results, for backends that split (0: their own choice). long: only in the long
    list. device: only where there is a device (times mean something there).
    """

    kind: str
    preset: str
    layout: str
    head_size: int
    dtype: str
    block_size: int = 16
    num_kv_heads: int = 2
    gqa_ratio: int = 8
    seq_lens: tuple[int, ...] = PLAIN_LENS
    query_lens: tuple[int, ...] = ()
    layer: tuple[tuple[str, Any], ...] = ()
    splits: int = 0
    label: str = "made"
    golden: bool = False
    long: bool = False
    device: bool = False

    @property
    def id(self) -> str:
        """Unique name: the same case has the same name on every leg."""
        preset = self.preset.removeprefix("turboquant_")
        shape = f"D{self.head_size}-{self.dtype}-{self.layout}-bs{self.block_size}"
        if self.kind in ("decode", "time"):
            shape += f"-G{self.gqa_ratio}"
        return f"{self.kind}/{self.label}/{preset}-{shape}"

    @property
    def spec(self) -> LayerSpec:
        """The layer."""
        return layer_spec(self.head_size, self.num_kv_heads, self.gqa_ratio, self.dtype, **dict(self.layer))

    @property
    def golden_case(self) -> GoldenCase:
        """The file of tests/golden that a golden case reads."""
        return GoldenCase(self.preset, self.head_size, self.dtype, self.layout, self.block_size)


# ---- inputs ------------------------------------------------------------------------------------------------


def normal(shape: tuple[int, ...], seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Nearly normal numbers (the sum of twelve 16-bit integers), exact in fp32 and equal on every machine."""
    count = int(np.prod(shape))
    raw = np.random.Philox(key=seed).random_raw(3 * count).astype("<u8").view("<u2")
    total = raw.reshape(count, 12).astype(np.int64).sum(1) - 12 * 32768 + 6
    made: np.ndarray[Any, np.dtype[np.float32]] = total.astype(np.float32) / np.float32(65536)
    return made.reshape(shape)


def _seed(case: Case, what: str) -> int:
    """The layout is left out: both layouts of a case store the same vectors."""
    name = f"{case.label}/D{case.head_size}-{case.dtype}-G{case.gqa_ratio}/{what}"
    return zlib.crc32(name.encode())


def _tensor(case: Case, heads: int, rows: int, what: str) -> torch.Tensor:
    made = normal((rows, heads, case.head_size), _seed(case, what))
    return torch.from_numpy(made).to(TORCH_DTYPES[case.dtype])


def _hostile(x: torch.Tensor, offset: int) -> None:
    """Overwrite a few rows of [T, Hk, D] by what has broken caches elsewhere (facts are in docs/design.md)."""
    big = 6e4 if x.dtype is torch.float16 else 1e30
    rows: list[Any] = [0.0, 1e-6, 300.0, big, float("nan"), float("inf")]
    for i, value in enumerate(rows):
        x[offset + i, 0] = value if i in (0, 4) else x[offset + i, 0] * value
    x[offset + 6, 1] = 0.0
    x[offset + 6, 1, 3] = -1e4  # one outlier
    x[offset + 7, 1] = 1.0  # constant: a value range of nothing
    x[offset + 8, 0, 5] = float("nan")  # only one element


@dataclass(frozen=True, slots=True)
class Stored:
    """Inputs of a store."""

    key: torch.Tensor  # [T, Hk, D]
    value: torch.Tensor  # [T, Hk, D]
    slots: torch.Tensor  # [T] int32, some -1
    num_blocks: int


def store_inputs(case: Case) -> Stored:
    """Keys, values and slots: of the golden file, or made, with hostile rows and padding."""
    if case.golden:
        golden = case.golden_case
        return Stored(golden.tensor("key"), golden.tensor("value"), golden.slots, golden.cache.shape[0])
    tokens = sum(case.seq_lens)
    key, value = (_tensor(case, case.num_kv_heads, tokens, what) for what in ("key", "value"))
    if case.label == "hostile":
        _hostile(key, 2)
        _hostile(value, 5)
    num_blocks = -(-tokens // case.block_size) + 2
    order = np.argsort(np.random.Philox(key=_seed(case, "slots")).random_raw(num_blocks * case.block_size))
    slots = torch.from_numpy(order[:tokens].astype(np.int32))
    slots[::7] = -1
    return Stored(key, value, slots, num_blocks)


@dataclass(frozen=True, slots=True)
class Paged:
    """Inputs of a decode or a dequantise, before the store of ``key`` and ``value``."""

    key: torch.Tensor  # [T, Hk, D]
    value: torch.Tensor  # [T, Hk, D]
    slots: torch.Tensor  # [T] int64
    num_blocks: int
    query: torch.Tensor  # [N, Hq, D]
    table: torch.Tensor  # [B, M] int32, -1 in unused entries
    seq_lens: torch.Tensor  # [B] int32
    starts: torch.Tensor  # [B] int32, for dequantise
    query_start_loc: torch.Tensor | None  # [B + 1] int32
    sinks: torch.Tensor | None  # [Hq] fp32
    max_query_len: int = field(default=1)


def paged_inputs(case: Case) -> Paged:
    """Sequences spread over shuffled blocks, with spare blocks between them."""
    bs, spec = case.block_size, case.spec
    need = [-(-length // bs) for length in case.seq_lens]
    num_blocks = sum(need) + 3
    order = np.argsort(np.random.Philox(key=_seed(case, f"blocks{bs}")).random_raw(num_blocks)).astype(
        np.int64
    )
    table = torch.full((len(need), max([*need, 1]) + 1), -1, dtype=torch.int32)
    slots, used = [], 0
    for i, (length, count) in enumerate(zip(case.seq_lens, need, strict=True)):
        blocks = order[used : used + count]
        used += count
        table[i, :count] = torch.from_numpy(blocks.astype(np.int32))
        position = np.arange(length)
        slots.append(blocks[position // bs] * bs + position % bs)
    tokens = sum(case.seq_lens)
    key, value = (_tensor(case, case.num_kv_heads, tokens, what) for what in ("key", "value"))
    rows = sum(case.query_lens) if case.query_lens else len(need)
    loc = None
    if case.query_lens:
        loc = torch.tensor([0, *np.cumsum(case.query_lens).tolist()], dtype=torch.int32)
    sinks = None
    if spec.sinks:
        sinks = torch.from_numpy(normal((spec.num_heads,), _seed(case, "sinks")))
    lens = torch.tensor(case.seq_lens, dtype=torch.int32)
    return Paged(
        key,
        value,
        torch.from_numpy(np.concatenate(slots)),
        num_blocks,
        _tensor(case, spec.num_heads, rows, "query"),
        table,
        lens,
        lens // 3,
        loc,
        sinks,
        max([1, *case.query_lens]),
    )


# ---- the list ----------------------------------------------------------------------------------------------


def _stores() -> Iterator[Case]:
    for g in golden_cases():
        yield Case(
            "store", g.preset, g.layout, g.head_size, g.dtype, g.block_size, NUM_KV_HEADS,
            label="golden", golden=True,
        )  # fmt: skip
    for preset in serving_names():
        for layout in LAYOUT_NAMES:
            for head_size in (64, 128, 256):
                for dtype in ("bf16", "fp16"):
                    yield Case("store", preset, layout, head_size, dtype, seq_lens=(21,), label="hostile")
            for head_size in (80, 96, 112, 192):
                yield Case(
                    "store", preset, layout, head_size, "bf16", seq_lens=(21,), label="hostile", long=True
                )


_FEATURES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("window", {"layer": (("window", 40),)}),
    ("sinks", {"layer": (("sinks", True),)}),
    ("soft-cap", {"layer": (("soft_cap", 20.0),)}),
    ("gqa1", {"gqa_ratio": 1}),
    ("gqa6", {"gqa_ratio": 6}),
    ("gqa16", {"gqa_ratio": 16, "num_kv_heads": 1}),
    ("queries", {"query_lens": (1, 4, 0, 5)}),
    ("splits", {"splits": 3}),
    ("splits-sinks", {"splits": 3, "layer": (("sinks", True), ("window", 50)), "query_lens": (1, 2, 0, 3)}),
)


def _decodes() -> Iterator[Case]:
    for layout in LAYOUT_NAMES:
        for preset in serving_names():
            for head_size in (64, 128, 256):
                yield Case("decode", preset, layout, head_size, "bf16", gqa_ratio=4, label="plain")
                yield Case("decode", preset, layout, head_size, "fp16", label="plain", long=head_size != 128)
            yield Case("decode", preset, layout, 128, "bf16", 32, label="plain", long=True)
            yield Case("decode", preset, layout, 96, "bf16", label="plain", long=True)
        for label, more in _FEATURES:
            for preset in serving_names():
                yield Case(
                    "decode", preset, layout, 128, "bf16", label=label,
                    long=preset != "turboquant_4bit_nc", **more,
                )  # fmt: skip


def _dequantizes() -> Iterator[Case]:
    for layout in LAYOUT_NAMES:
        for preset in serving_names():
            for head_size in (64, 128, 256):
                yield Case(
                    "dequantize", preset, layout, head_size, "bf16", seq_lens=(1, 33, 0, 50), label="plain",
                    long=head_size == 64,
                )  # fmt: skip


def _times() -> Iterator[Case]:
    """Served shapes: 64 query and 8 KV heads, 32 sequences. Only for devices."""
    for layout in LAYOUT_NAMES:
        for preset in serving_names():
            for length in (1024, 4096):
                yield Case(
                    "time", preset, layout, 128, "bf16", num_kv_heads=8, gqa_ratio=8,
                    seq_lens=(length,) * 32, label=f"decode-32x{length}", device=True, long=length != 4096,
                )  # fmt: skip


_ROTATED: Final = "turboquant_3bit_nc+rotated_values"
_ROTATED_FP8: Final = "turboquant_k8v4+rotated_values"


def _rotated_values() -> Iterator[Case]:
    """Presets with rotated values: 3-bit codes of both, and FP8 keys beside 4-bit ones."""
    for preset in (_ROTATED, _ROTATED_FP8):
        for head_size in (64, 128):
            long = preset == _ROTATED_FP8 and head_size == 64
            yield Case("store", preset, "soa", head_size, "bf16", seq_lens=(21,), label="hostile", long=long)
            yield Case("decode", preset, "soa", head_size, "bf16", gqa_ratio=4, label="plain", long=long)
            yield Case(
                "dequantize",
                preset,
                "soa",
                head_size,
                "bf16",
                seq_lens=(1, 33, 0, 50),
                label="plain",
                long=long,
            )
    for label, more in _FEATURES:
        yield Case(
            "decode", _ROTATED, "soa", 128, "bf16", label=label,
            long=label not in ("window", "sinks", "queries"), **more,
        )  # fmt: skip


def case_list(long: bool = False, device: bool = False) -> list[Case]:
    """All cases of a leg, in a fixed order. long: also those that are left out by default."""
    found = [*_stores(), *_decodes(), *_dequantizes(), *_rotated_values(), *_times()]
    return [c for c in found if (long or not c.long) and (device or not c.device)]
