"""Lloyd-Max codebooks of N(0, 1/D) and of the exact marginal, and the Hadamard-type rotations, in numpy.

Sources: S. Lloyd, "Least squares quantization in PCM" (1982) and J. Max, "Quantizing for minimum distortion"
(1960) for the codebook; R. Paley, "On orthogonal matrices" (1933) for the Hadamard matrices of order 12, 20
and 28; TurboQuant (arXiv:2504.19874) for their use on rotated unit vectors, whose coordinates are close to
N(0, 1/D).

The published caches were written with a codebook whose integrals were taken by the trapezoidal rule, and the
bytes depend on it (its outermost centroid lies 0.0015 sigma inside the exact optimum, at no measurable cost in
distortion). :func:`lloyd_max` repeats that procedure, so that caches are portable; the constants below fix it.
:func:`solve_codebook` is the optimum itself, for the paper's quantisers: of N(0, 1), or of the density that a
coordinate of a uniformly random unit vector in dimension d has (the paper's lemma 1, a scaled Beta):

    f(x) = Gamma(d/2) / (sqrt(pi) Gamma((d-1)/2)) * (1 - x^2)^((d-3)/2),  -1 <= x <= 1
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from .orders import SMALL_ORDERS, rotation_factors
from .spec import SpecError, checked_int

__all__ = [
    "MAX_BITS",
    "MAX_DIMENSION",
    "SMALL_ORDERS",
    "cell_probabilities",
    "centroids",
    "distortion",
    "lloyd_max",
    "midpoints",
    "rotation",
    "rotation_factors",
    "small_hadamard",
    "solve_codebook",
    "stationarity_error",
]

F64 = npt.NDArray[np.float64]

MAX_BITS: Final = 6
"""Of :func:`solve_codebook`."""
MAX_DIMENSION: Final = 2**16

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


_REACH: Final = 12.0  # sigma; the mass beyond is below 1e-30
_PANELS: Final = (
    4  # per cell, of _NODES Gauss-Legendre nodes each: full precision, as the integrands are analytic
)
_NODES: Final = 32


@cache
def _gauss_legendre() -> tuple[F64, F64]:
    """Nodes and weights [_PANELS * _NODES] of [-1, 1] in equal panels."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    centres = (2 * np.arange(_PANELS)[:, None] + 1) / _PANELS - 1
    return (centres + nodes / _PANELS).ravel(), np.tile(weights / _PANELS, _PANELS)


def _sigma(dimension: int | None) -> float:
    """Standard deviation of a coordinate: 1 / sqrt(d), or 1 for N(0, 1) (None)."""
    return 1.0 if dimension is None else dimension**-0.5


def _cells(thresholds: F64, dimension: int | None) -> tuple[F64, F64, F64]:
    """Probability and first moment of each cell [n + 1], and the density at each threshold [n].

    The Beta marginal is integrated over theta with x = sin(theta): its density is cos(theta)^(d - 2) there, which is
    smooth up to the ends also where the one over x is not (d < 5).
    """
    if dimension is None:
        inner, end = thresholds, _REACH
    else:
        power = dimension - 2
        inner, end = np.arcsin(thresholds), min(np.pi / 2, _REACH / np.sqrt(max(power, 1)))
    edges = np.concatenate([[-end], inner, [end]])
    nodes, weights = _gauss_legendre()
    half = (edges[1:] - edges[:-1]) / 2
    t = (edges[1:] + edges[:-1])[:, None] / 2 + half[:, None] * nodes  # [n + 1, nodes]
    if dimension is None:
        x, density, at_edge = t, np.exp(-t * t / 2), np.exp(-inner * inner / 2)
    else:
        # Over x the density is smaller by dx/dtheta.
        x = np.sin(t)
        density = np.exp(power / 2 * np.log1p(-x * x))  # cos(t) ** power, also precise for large powers
        at_edge = np.exp((power - 1) / 2 * np.log1p(-thresholds * thresholds))
    mass, moment = half * (density @ weights), half * ((x * density) @ weights)
    total = mass.sum()
    return mass / total, moment / total, at_edge / total


def cell_probabilities(codebook: F64, dimension: int | None) -> F64:
    """How often each centroid [n] is the nearest one of a coordinate; dimension as in :func:`solve_codebook`."""
    return _cells((codebook[1:] + codebook[:-1]) / 2, dimension)[0]


def _gap(codebook: F64, dimension: int | None) -> tuple[F64, F64]:
    """c - E[x | cell of c] for each centroid [n], and its Jacobian [n, n] over the centroids."""
    edges = (codebook[1:] + codebook[:-1]) / 2
    mass, moment, density = _cells(edges, dimension)
    mean = moment / mass
    # A threshold moves half as far as either neighbour, and a mean by f(e) |e - mean| / mass of its cell.
    above = density * (edges - mean[:-1]) / mass[:-1] / 2  # of the upper threshold of cell i on mean i
    below = density * (mean[1:] - edges) / mass[1:] / 2  # of the lower threshold of cell i + 1 on mean i + 1
    jacobian = np.eye(len(codebook))
    i = np.arange(len(edges))
    jacobian[i, i] -= above
    jacobian[i, i + 1] -= above
    jacobian[i + 1, i] -= below
    jacobian[i + 1, i + 1] -= below
    return codebook - mean, jacobian


def _checked_dimension(dimension: int | None) -> int | None:
    return None if dimension is None else checked_int("dimension", dimension, 2, MAX_DIMENSION)


def stationarity_error(codebook: F64, dimension: int | None) -> float:
    """Largest distance of a centroid from the mean of its cell, in sigma; the cells end at midpoints. 0 at the optimum.

    codebook: [n] ascending, inside (-1, 1) unless dimension is None, which is N(0, 1).
    """
    return float(np.abs(_gap(codebook, dimension)[0]).max() / _sigma(dimension))


@lru_cache(maxsize=None, typed=True)  # 64.0 is an error, also after 64
def solve_codebook(dimension: int | None, bits: int) -> F64:
    """Optimal (Lloyd-Max) centroids [2**bits] float64, ascending and exactly antisymmetric.

    dimension: of the unit vectors (2 to 2**16), whose coordinates have the Beta marginal above; None is N(0, 1).
    bits: 0 (the mean alone) to 6. Lloyd's iteration brings the centroids near, Newton's on "each is the mean of its
    cell" to rounding error: :func:`stationarity_error` is below 1e-12.
    """
    dimension = _checked_dimension(dimension)
    bits = checked_int("bits", bits, 0, MAX_BITS)
    if bits == 0:
        zero = np.zeros(1)
        zero.setflags(write=False)
        return zero
    unit = lloyd_max(bits)
    # In low dimensions the Gaussian codebook would reach past the ends of the sphere.
    c: F64 = unit * (1.0 if dimension is None else min(_sigma(dimension), 0.95 / float(unit[-1])))
    for _ in range(50):
        c = c - _gap(c, dimension)[0]
    c = (c - c[::-1]) / 2
    best = c
    for _ in range(20):
        gap, jacobian = _gap(c, dimension)
        c = c - np.linalg.solve(jacobian, gap)
        c = (c - c[::-1]) / 2
        if not (np.diff(c) > 0).all() or stationarity_error(c, dimension) >= stationarity_error(
            best, dimension
        ):
            break
        best = c
    c = best
    if not stationarity_error(c, dimension) < 1e-12:
        raise ArithmeticError(f"no codebook found for dimension={dimension} bits={bits}")
    c.setflags(write=False)
    return c


def distortion(codebook: F64, dimension: int | None) -> float:
    """E ||x - Q(x)||^2 of a random unit vector x whose coordinates go to the nearest centroid; relative to E ||x||^2.

    codebook: [n] ascending, for unit vectors in ``dimension``, or for N(0, 1) with None. Exact up to rounding, also for
    codebooks that are not optimal.
    """
    mass, moment, _ = _cells((codebook[1:] + codebook[:-1]) / 2, dimension)
    scale = 1.0 if dimension is None else float(dimension)  # 1 / E[x^2]
    return float(1.0 + scale * (codebook * (codebook * mass - 2 * moment)).sum())


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
