"""Random signs, matrices and rotations from a seed, the same for every version of NumPy and torch. NumPy only.

NumPy promises the raw 64-bit words of Philox (a counter-based generator: Salmon et al., 2011) and torch promises
nothing, so everything is built here from those words: signs and uniforms exactly, normal variates (Box-Muller) and what
LAPACK makes of them up to rounding. Each purpose draws from a stream of its own, so that, say, a sketch and a rotation
of one seed are independent.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from .codebook import rotation
from .spec import checked_int

__all__ = [
    "MAX_SEED",
    "Stream",
    "cache_sketch",
    "gaussian",
    "random_orthogonal",
    "random_signs",
    "raw_words",
    "signed_hadamard",
]

F64 = npt.NDArray[np.float64]

MAX_SEED: Final = 2**64 - 1


class Stream(IntEnum):
    """What the words of a seed are for; the second half of Philox' key."""

    SIGNS = 1
    ORTHOGONAL = 2
    SKETCH = 3


def raw_words(seed: int, stream: Stream, count: int) -> npt.NDArray[np.uint64]:
    """The first ``count`` words [count] uint64 of a stream. seed: 0 to 2**64 - 1."""
    seed = checked_int("seed", seed, 0, MAX_SEED)
    key = np.array([seed, int(stream)], dtype=np.uint64)
    words: npt.NDArray[np.uint64] = np.random.Philox(key=key).random_raw(count)
    return words


def gaussian(seed: int, stream: Stream, rows: int, columns: int) -> F64:
    """Independent N(0, 1) [rows, columns] float64, by Box and Muller's transform of pairs of uniforms."""
    pairs = (rows * columns + 1) // 2
    uniform = ((raw_words(seed, stream, 2 * pairs) >> np.uint64(11)) + 1.0) * 2.0**-53  # in (0, 1]
    radius, angle = np.sqrt(-2.0 * np.log(uniform[::2])), 2.0 * np.pi * uniform[1::2]
    flat = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).ravel()
    return flat[: rows * columns].reshape(rows, columns)


@lru_cache(maxsize=64, typed=True)
def cache_sketch(dimension: int) -> npt.NDArray[np.float32]:
    """The sketch S [dimension, dimension] of caches: N(0, 1) of seed 0, each entry rounded to fp16, as float32."""
    dimension = checked_int("dimension", dimension, 1, 4096)
    s = gaussian(0, Stream.SKETCH, dimension, dimension).astype(np.float16).astype(np.float32)
    s.setflags(write=False)
    return s


def random_signs(seed: int, dimension: int) -> F64:
    """Independent fair signs [dimension], -1.0 or 1.0: the top bit of a word each."""
    dimension = checked_int("dimension", dimension, 1)
    top = (raw_words(seed, Stream.SIGNS, dimension) >> np.uint64(63)).astype(np.float64)
    return 1.0 - 2.0 * top


@lru_cache(maxsize=64, typed=True)
def random_orthogonal(seed: int, dimension: int) -> F64:
    """A uniformly (Haar) distributed orthogonal matrix [dimension, dimension] float64.

    Q of the QR factorisation of a Gaussian matrix, each column times the sign of R's diagonal: without that, Q depends
    on the convention of the QR routine and is not uniform (Mezzadri, 2007).
    """
    dimension = checked_int("dimension", dimension, 1)
    q, r = np.linalg.qr(gaussian(seed, Stream.ORTHOGONAL, dimension, dimension))
    q = np.asarray(q * np.where(np.diag(r) < 0, -1.0, 1.0))
    q.setflags(write=False)
    return q


@lru_cache(maxsize=64, typed=True)
def signed_hadamard(seed: int, dimension: int) -> F64:
    """``codebook.rotation(dimension)`` after random signs: R diag(s), orthonormal [dimension, dimension] float64.

    SpecError where ``rotation`` has no matrix of this order.
    """
    r = rotation(dimension) * random_signs(seed, dimension)
    r.setflags(write=False)
    return np.asarray(r)
