"""Reader of tests/golden: caches and outputs of a published implementation (see its README.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

GOLDEN = Path(__file__).parent / "golden"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRESETS = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
NUM_KV_HEADS = 2
FILL = 0xCD


def from_bits(bits: np.ndarray, dtype: str) -> torch.Tensor:
    """Tensor of ``dtype`` from uint16 bit patterns."""
    return torch.from_numpy(bits.view(np.int16).copy()).view(DTYPES[dtype])


@cache
def load(name: str) -> dict[str, np.ndarray]:
    """All arrays of one file."""
    with np.load(GOLDEN / f"{name}.npz") as data:
        return {k: data[k] for k in data.files}


@dataclass(frozen=True)
class GoldenCase:
    """One stored cache: preset, head size, dtype, layout and block size."""

    preset: str
    head_size: int
    dtype: str
    layout: str
    block_size: int

    def __str__(self) -> str:
        return f"{self.preset}-D{self.head_size}-{self.dtype}-{self.layout}-bs{self.block_size}"

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        return load(f"inputs_D{self.head_size}_{self.dtype}")

    @property
    def outputs(self) -> dict[str, np.ndarray]:
        return load(f"{self.preset}_D{self.head_size}_{self.dtype}")

    @property
    def cache(self) -> np.ndarray:
        return self.outputs[f"cache_{self.layout}_bs{self.block_size}"]

    def tensor(self, name: str) -> torch.Tensor:
        return from_bits(self.inputs[name], self.dtype)

    @property
    def slots(self) -> torch.Tensor:
        return torch.from_numpy(self.inputs[f"slot_mapping_bs{self.block_size}"].copy())

    @property
    def block_table(self) -> torch.Tensor:
        return torch.from_numpy(self.inputs[f"block_table_bs{self.block_size}"].copy())

    @property
    def seq_lens(self) -> torch.Tensor:
        return torch.from_numpy(self.inputs["seq_lens"].copy())


def cases() -> Iterator[GoldenCase]:
    """Every cache in the folder."""
    for preset in PRESETS:
        for path in sorted(GOLDEN.glob(f"{preset}_D*.npz")):
            head, dtype = path.stem.removeprefix(preset + "_D").split("_")
            for name in load(path.stem):
                if name.startswith("cache_"):
                    _, layout, block = name.split("_")
                    yield GoldenCase(preset, int(head), dtype, layout, int(block.removeprefix("bs")))
