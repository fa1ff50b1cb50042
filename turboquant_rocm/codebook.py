"""Lloyd-Max codebooks of N(0, 1/D) and the Hadamard-type rotations, in numpy.

Sources: S. Lloyd, "Least squares quantization in PCM" (1982) and J. Max, "Quantizing for minimum distortion"
(1960) for the codebook; R. Paley, "On orthogonal matrices" (1933) for the Hadamard matrices of order 12, 20
and 28; TurboQuant (arXiv:2504.19874) for their use on rotated unit vectors, whose coordinates are close to
N(0, 1/D).

The published caches were written with a codebook whose integrals were taken by the trapezoidal rule, and the
bytes depend on it (its outermost centroid lies 0.0015 sigma inside the exact optimum, at no measurable cost in
distortion). :func:`lloyd_max` repeats that procedure, so that caches are portable; the constants below fix it.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from .orders import SMALL_ORDERS, rotation_factors
from .spec import SpecError

__all__ = [
    "SMALL_ORDERS",
    "centroids",
    "lloyd_max",
    "midpoints",
    "rotation",
    "rotation_factors",
    "small_hadamard",
]

F64 = npt.NDArray[np.float64]

# The published procedure, in units of sigma.
_START_RANGE: Final = 3.5  # initial centroids: midpoints of equal cells on +-3.5 sigma
_OUTER_EDGE: Final = 10.5  # the outermost cells end here
_STEPS: Final = 200  # trapezoidal steps per cell
_ITERATIONS: Final = 200


@cache
def lloyd_max(bits: int) -> F64:
    """Centroids [2**bits] of the unit normal, ascending and exactly antisymmetric. bits: 1 to 8."""
    if not 1 <= bits <= 8:
        raise SpecError("bits", bits, "1 to 8")
    n = 2**bits
    c = np.linspace(-_START_RANGE, _START_RANGE, 2 * n + 1)[1::2]
    t = np.linspace(0.0, 1.0, _STEPS + 1)
    for _ in range(_ITERATIONS):
        inner = (c[1:] + c[:-1]) / 2
        edges = np.concatenate([[-_OUTER_EDGE], inner, [_OUTER_EDGE]])
        x = edges[:-1, None] + (edges[1:] - edges[:-1])[:, None] * t  # [n, steps + 1]
        density = np.exp(-x * x / 2)
        density[:, [0, -1]] *= 0.5  # trapezoidal end weights; the step cancels in the quotient
        c = (x * density).sum(1) / density.sum(1)
        c = (c - c[::-1]) / 2
    c.setflags(write=False)
    return c


@cache
def centroids(head_size: int, bits: int) -> npt.NDArray[np.float32]:
    """Centroids [2**bits] float32 for N(0, 1/head_size)."""
    if head_size < 1:
        raise SpecError("head_size", head_size, "an integer >= 1")
    out: npt.NDArray[np.float32] = (lloyd_max(bits) / np.sqrt(head_size)).astype(np.float32)
    out.setflags(write=False)
    return out


@cache
def midpoints(head_size: int, bits: int) -> npt.NDArray[np.float32]:
    """Decision thresholds [2**bits - 1] float32: a coordinate equal to one goes to the upper bucket."""
    c = lloyd_max(bits) / np.sqrt(head_size)
    out: npt.NDArray[np.float32] = ((c[1:] + c[:-1]) / 2).astype(np.float32)
    out.setflags(write=False)
    return out


def _sylvester(order: int) -> F64:
    """Sylvester's matrix of +-1, H[i, j] = (-1)**popcount(i & j); order is a power of two."""
    h = np.ones((1, 1))
    while len(h) < order:
        h = np.block([[h, h], [h, -h]])
    return h


def _jacobsthal(q: int) -> F64:
    """Q[i, j] = the quadratic character of i - j modulo the prime q."""
    squares = {(x * x) % q for x in range(1, q)}
    chi = np.array([0.0] + [1.0 if x in squares else -1.0 for x in range(1, q)])
    i = np.arange(q)
    return np.asarray(chi[(i[:, None] - i[None, :]) % q])


@cache
def small_hadamard(order: int) -> F64:
    """A Hadamard matrix of +-1 of order 1, 12, 20 (Paley I over 11, 19) or 28 (Paley II over 13)."""
    if order == 1:
        h = np.ones((1, 1))
    elif order in (12, 20):  # Paley I, q = 3 (mod 4): I + skew-symmetric conference matrix
        q = order - 1
        s = np.zeros((order, order))
        s[0, 1:], s[1:, 0], s[1:, 1:] = 1.0, -1.0, _jacobsthal(q)
        h = np.eye(order) + s
    elif order == 28:  # Paley II, q = 1 (mod 4): symmetric conference matrix of order 14, doubled
        q = 13
        s = np.zeros((q + 1, q + 1))
        s[0, 1:], s[1:, 0], s[1:, 1:] = 1.0, 1.0, _jacobsthal(q)
        h = np.kron(s, [[1.0, 1.0], [1.0, -1.0]]) + np.kron(np.eye(q + 1), [[1.0, -1.0], [-1.0, -1.0]])
    else:
        raise SpecError("order", order, f"one of {SMALL_ORDERS}")
    h.setflags(write=False)
    return h


@cache
def rotation(head_size: int) -> F64:
    """The orthonormal rotation R [D, D] float64: y = R x, x = R^T y.

    R = kron(small_hadamard(m), sylvester(p)) / sqrt(D) with D = m * p, so coordinate i * p + j of y mixes the
    m runs of p contiguous coordinates. For powers of two it is Sylvester's matrix, which is symmetric; the others
    are not, and kernels must not take R for R^T.
    """
    m, p = rotation_factors(head_size)
    r = np.kron(small_hadamard(m), _sylvester(p)) / np.sqrt(head_size)
    r.setflags(write=False)
    return np.asarray(r)
