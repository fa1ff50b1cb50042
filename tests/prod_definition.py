"""TurboQuant_prod with grouped values in NumPy and fp64, and the golden vectors made from it.

    python -m tests.prod_definition

writes tests/golden/turboquant_prod_*.npz anew. Written from the formulas of docs/algorithms.md with dense matrices and
explicit distances; it shares the tables (codebook, rotation, sketch) with the package and no code that packs or
quantises. Inputs are those of the published golden vectors (inputs_D{D}_bf16.npz).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turboquant_rocm.codebook import centroids, rotation
from turboquant_rocm.seeded import cache_sketch

GOLDEN = Path(__file__).parent / "golden"
PRESETS = {"turboquant_prod_k3v2": (2, 2), "turboquant_prod_k3v4": (2, 4), "turboquant_prod_k4v4": (3, 4)}
"""Bits of a key's code and of a value."""
GROUP = 32
HEAD_SIZES = (64, 128)


@dataclass(frozen=True)
class Prod:
    """Of vectors [n, D]: fields as they are stored (numbers as fp16), what is read back, and how far ties are.

    sure_codes: no coordinate within 1e-5 sigma of a threshold. sure_signs [n, D]: with sure codes, the sketch is not
    within 1e-5 of the residual's length of 0. sure_values: no value within 2e-4 of a step of a rounding tie.
    """

    codes: np.ndarray
    signs: np.ndarray
    norm: np.ndarray
    residual: np.ndarray
    key: np.ndarray
    sure_codes: np.ndarray
    sure_signs: np.ndarray


def keys(x: np.ndarray, bits: int) -> Prod:
    """x [n, D] float64, finite, norms within fp16."""
    d = x.shape[1]
    turn, table, sketch = (
        rotation(d),
        centroids(d, bits).astype(np.float64),
        cache_sketch(d).astype(np.float64),
    )
    norm = np.linalg.norm(x, axis=1)
    y = x / (norm + 1e-8)[:, None] @ turn.T
    distance = np.abs(y[..., None] - table)
    codes = distance.argmin(-1)
    nearest = np.sort(distance, -1)
    sure_codes = ((nearest[..., 1] - nearest[..., 0]) / 2 > 1e-5 / math.sqrt(d)).all(-1)
    left = y - table[codes]
    length = np.linalg.norm(left, axis=1)
    sketched = left @ sketch.T
    signs = sketched >= 0
    sure_signs = (np.abs(sketched) > 1e-5 * length[:, None]) & sure_codes[:, None]
    stored, residual = np.float16(norm), np.float16(norm * length)
    back = stored.astype(float)[:, None] * table[codes]
    scale = math.sqrt(math.pi / 2) / d * residual.astype(float)
    back = back + scale[:, None] * (np.where(signs, 1.0, -1.0) @ sketch)
    return Prod(codes, signs, stored, residual, back @ turn, sure_codes, sure_signs)


def values(x: np.ndarray, bits: int) -> dict[str, np.ndarray]:
    """x [n, Dv] float64: codes [n, Dv], scale and zero fp16 [n, groups], what is read back, and which rows are sure."""
    grouped = x.reshape(len(x), -1, GROUP)
    levels = 2**bits - 1
    low = grouped.min(-1)
    scale = np.maximum(grouped.max(-1) - low, 1e-8 * levels) / levels
    steps = (grouped - low[..., None]) / scale[..., None]
    codes = np.clip(np.floor(steps + 0.5), 0, levels)
    half, zero = np.float16(scale), np.float16(low)
    back = codes * half.astype(float)[..., None] + zero.astype(float)[..., None]
    sure = (np.abs(steps + 0.5 - np.round(steps + 0.5)) > 2e-4) | (scale[..., None] < 1e-6)
    return {
        "value_codes": codes.reshape(x.shape).astype(np.uint8),
        "value_scale": half,
        "value_zero": zero,
        "value": back.reshape(x.shape),
        "sure_values": sure.reshape(len(x), -1).all(-1),
    }


def bf16(bits: np.ndarray) -> np.ndarray:
    """float64 of bf16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def vectors(head_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [n, D] of the golden inputs, head after head, without those that overflow fp16."""
    with np.load(GOLDEN / f"inputs_D{head_size}_bf16.npz") as data:
        key, value = (bf16(data[name]).reshape(-1, head_size) for name in ("key", "value"))
    fits = (np.linalg.norm(key, axis=1) < 6e4) & (np.abs(value).max(1) < 6e4)
    return key[fits], value[fits]


def golden(preset: str, head_size: int) -> dict[str, Any]:
    """The arrays of one golden file."""
    code_bits, value_bits = PRESETS[preset]
    key, value = vectors(head_size)
    k = keys(key, code_bits)
    found = {
        "key_codes": k.codes.astype(np.uint8),
        "key_signs": k.signs,
        "key_norm": k.norm,
        "key_residual": k.residual,
        "key": k.key.astype(np.float32),
        "sure_codes": k.sure_codes,
        "sure_signs": k.sure_signs,
    }
    v = values(value, value_bits)
    return found | v | {"value": v["value"].astype(np.float32)}


def main() -> None:
    for preset in PRESETS:
        for head_size in HEAD_SIZES:
            np.savez_compressed(GOLDEN / f"{preset}_D{head_size}.npz", **golden(preset, head_size))


if __name__ == "__main__":
    main()
