"""The quantisers of the TurboQuant paper (arXiv:2504.19874) in torch: a reference, in fp64, that packs nothing.

Letters: x a vector of dimension d, u = x / ||x|| its direction, b bits per coordinate, R a rotation, c the centroids.

**TurboQuantMSE** (the paper's algorithm 1): the codes are the nearest centroids of y = R u, and what is read back is
``||x|| R^T c[codes]``. For a uniformly random R a coordinate of y has the Beta marginal of ``codebook``, and with its
Lloyd-Max centroids the distortion does not depend on u:

    D_mse(b) = E ||u - u'||^2 = d E (y_1 - c(y_1))^2 <= sqrt(3) pi / 2 * 4^-b        (theorem 1)

in the limit of large d 0.363, 0.117, 0.0345, 0.0095 at 1 to 4 bits. No quantiser of b bits per coordinate gets below
4^-b for every u (theorem 3). Products are biased towards 0: E <y, x'> = (1 - D_mse) <y, x> over R, at one bit about
2/pi of it.

**TurboQuantProd** (algorithm 2): TurboQuantMSE at b - 1 bits, and of what is left, r = u - u', the norm and one sign
per coordinate of S r, where S is a d x d matrix of independent N(0, 1): the sketch QJL (arXiv:2406.03482). What is read
back is

    x' = ||x|| (u' + sqrt(pi/2) / d * ||r|| S^T sign(S r))

Since E[<s, y> sign(<s, r>)] = sqrt(2/pi) <y, r> / ||r|| for a row s of S, E <y, x'> = <y, x> for every y and x, exactly
and for any R and codebook. The rows are independent, so over S

    Var <y, x'> = ||x||^2 (pi/2 ||r||^2 ||y||^2 - <y, r>^2) / d

and with the mean of ||r||^2, D_mse(b - 1), it is at most sqrt(3) pi^2 / d * ||x||^2 ||y||^2 4^-b (theorem 2).

**TurboQuantOutlier**: a fixed set of k channels, those of large magnitude, gets b + 1 bits, the other d - k get b, each
part with a quantiser and a norm of its own: (b d + k) / d effective bits, 2.5 or 3.5 with half of the channels at 3 or
4 bits and the other half at 2 or 3.

The theorems hold for ``RotationKind.ORTHOGONAL`` over its seeds. The Hadamard kinds are what kernels can afford: their
distortion is the same over uniformly random directions, and another one for vectors with structure (a one-hot vector
becomes one of equal magnitudes). ``CodebookKind.PUBLISHED`` with ``HADAMARD`` gives the codes that stored caches have.

Norms are fp64 here and not counted in the bits. Zero vectors come back as zero. A vector with a NaN or an infinity is
quantised as the zero vector, and counted. Any finite vector works, also where its squared norm overflows or underflows;
a norm above the largest fp64 is clamped to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any, Final

import numpy as np
import torch

from .backends._torch.reference import rotate as hadamard
from .codebook import F64, distortion, lloyd_max
from .codebook_cache import optimal_codebook
from .orders import rotation_factors
from .seeded import MAX_SEED, Stream, gaussian, random_orthogonal, random_signs
from .spec import SpecError, bounded_repr, checked_int, checked_member

__all__ = [
    "CodebookKind",
    "MseCodes",
    "OutlierCodes",
    "ProdCodes",
    "RotationKind",
    "TurboQuantMSE",
    "TurboQuantOutlier",
    "TurboQuantProd",
    "outlier_channels",
    "split_bits",
]

MAX_BITS: Final = 4
"""Bits per coordinate of the quantisers; outlier channels have one more."""
_LARGEST: Final = torch.finfo(torch.float64).max


class RotationKind(StrEnum):
    """``hadamard``: the package's fixed one; ``signed_hadamard``: after random signs; ``orthogonal``: uniformly random.

    The last two depend on a seed. The first two need a dimension that ``codebook.rotation`` has.
    """

    HADAMARD = "hadamard"
    SIGNED_HADAMARD = "signed_hadamard"
    ORTHOGONAL = "orthogonal"


class CodebookKind(StrEnum):
    """``beta``: optimal for the exact marginal in dimension d; ``gaussian``: N(0, 1/d); ``published``: of caches."""

    BETA = "beta"
    GAUSSIAN = "gaussian"
    PUBLISHED = "published"


@dataclass(frozen=True)
class MseCodes:
    """indices [..., d] uint8 below 2**bits; norm [...] float64, ||x||; nonfinite: how many vectors were."""

    indices: torch.Tensor
    norm: torch.Tensor
    nonfinite: int


@dataclass(frozen=True)
class ProdCodes:
    """mse: codes of bits - 1; signs [..., d] bool, S r >= 0; residual_norm [...] float64, ||r|| of the direction."""

    mse: MseCodes
    signs: torch.Tensor
    residual_norm: torch.Tensor

    @property
    def norm(self) -> torch.Tensor:
        return self.mse.norm

    @property
    def nonfinite(self) -> int:
        return self.mse.nonfinite


@dataclass(frozen=True)
class OutlierCodes:
    """Codes of the outlier channels [..., k] and of the others [..., d - k]; nonfinite counts whole vectors."""

    outliers: MseCodes | ProdCodes
    others: MseCodes | ProdCodes
    nonfinite: int


def _vectors(name: str, x: object, dimension: int) -> torch.Tensor:
    """x as float64, checked: a floating tensor [..., dimension]."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise SpecError(name, got, "a tensor of floating-point numbers")
    if x.dim() == 0 or x.shape[-1] != dimension:
        raise SpecError(f"{name} shape", tuple(x.shape), f"[..., {dimension}]")
    return x.to(torch.float64)


def _without_nonfinite(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    bad = ~torch.isfinite(x).all(-1)
    return x.masked_fill(bad[..., None], 0.0), int(bad.sum())


def _polar(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Directions [..., d], zero for zero vectors, and norms [...]. Divided by the largest entry, no square is lost."""
    peak = x.abs().amax(-1, keepdim=True)
    scaled = x / torch.where(peak > 0, peak, 1.0)
    length = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    unit = scaled / torch.where(length > 0, length, 1.0)
    return unit, (length * peak)[..., 0].clamp(max=_LARGEST)


def _scaled(norm: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """norm [...] times x [..., d]; never infinite."""
    return (norm[..., None] * x).clamp(-_LARGEST, _LARGEST)


def _tensor(array: F64, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.array(array)).to(like.device)


class TurboQuantMSE:
    """Algorithm 1: rotate, then the nearest Lloyd-Max centroid of each coordinate.

    dimension: d, 2 to 2**16. bits: 1 to 4, and as parts of the other quantisers 0, which keeps the norm alone, and 5.
    seed: of the rotation, 0 to 2**64 - 1.
    """

    def __init__(
        self,
        dimension: int,
        bits: int,
        *,
        rotation: RotationKind | str = RotationKind.ORTHOGONAL,
        seed: int = 0,
        codebook: CodebookKind | str = CodebookKind.BETA,
    ) -> None:
        self.dimension = checked_int("dimension", dimension, 2)
        self.bits = checked_int("bits", bits, 0, MAX_BITS + 1)
        self.seed = checked_int("seed", seed, 0, MAX_SEED)
        self.rotation = checked_member("rotation", RotationKind, rotation)
        self.codebook = checked_member("codebook", CodebookKind, codebook)
        if self.rotation is not RotationKind.ORTHOGONAL:
            rotation_factors(self.dimension)  # or SpecError
        self.centroids = self._centroids()
        self.centroids.setflags(write=False)

    def _centroids(self) -> F64:
        """[2**bits] float64, of coordinates of unit vectors."""
        if self.codebook is CodebookKind.BETA:
            return optimal_codebook(self.dimension, self.bits).copy()
        if self.codebook is CodebookKind.PUBLISHED and self.bits > 0:
            unit = lloyd_max(self.bits)
        else:
            unit = optimal_codebook(None, self.bits)
        return np.asarray(unit / math.sqrt(self.dimension))

    @property
    def effective_bits(self) -> float:
        """Bits of codes per coordinate; norms are not counted."""
        return float(self.bits)

    @property
    def distortion(self) -> float:
        """E ||u - u'||^2 over random directions u (or rotations), by integration and not by a sample."""
        return distortion(self.centroids, self.dimension)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """R x over the last dimension, [..., d] float64."""
        x = _vectors("x", x, self.dimension)
        if self.rotation is RotationKind.ORTHOGONAL:
            return x @ _tensor(random_orthogonal(self.seed, self.dimension), x).T
        if self.rotation is RotationKind.SIGNED_HADAMARD:
            x = x * _tensor(random_signs(self.seed, self.dimension), x)
        return hadamard(x)

    def rotate_back(self, y: torch.Tensor) -> torch.Tensor:
        """R^T y over the last dimension, [..., d] float64."""
        y = _vectors("y", y, self.dimension)
        if self.rotation is RotationKind.ORTHOGONAL:
            return y @ _tensor(random_orthogonal(self.seed, self.dimension), y)
        x = hadamard(y, inverse=True)
        if self.rotation is RotationKind.SIGNED_HADAMARD:
            x = x * _tensor(random_signs(self.seed, self.dimension), x)
        return x

    def quantize(self, x: torch.Tensor) -> MseCodes:
        """x: [..., d] of any floating dtype. A coordinate halfway between two centroids gets the upper one."""
        finite, nonfinite = _without_nonfinite(_vectors("x", x, self.dimension))
        unit, norm = _polar(finite)
        return MseCodes(self._indices(unit), norm, nonfinite)

    def _indices(self, unit: torch.Tensor) -> torch.Tensor:
        thresholds = _tensor((self.centroids[1:] + self.centroids[:-1]) / 2, unit)
        return torch.bucketize(self.rotate(unit), thresholds, right=True).to(torch.uint8)

    def _direction(self, indices: torch.Tensor) -> torch.Tensor:
        """u' = R^T c[indices], [..., d] float64."""
        return self.rotate_back(_tensor(self.centroids, indices)[indices.long()])

    def dequantize(self, codes: MseCodes) -> torch.Tensor:
        """x' [..., d] float64."""
        return _scaled(codes.norm, self._direction(codes.indices))

    def inner_product(self, query: torch.Tensor, codes: MseCodes) -> torch.Tensor:
        """<query, x'> [...] float64 in the rotated space; query [..., d] broadcasts against the codes."""
        c = _tensor(self.centroids, codes.indices)[codes.indices.long()]
        return codes.norm * (self.rotate(query) * c).sum(-1)


class TurboQuantProd:
    """Algorithm 2: TurboQuantMSE at bits - 1 and the signs of a Gaussian sketch of the residual; unbiased products.

    bits: 1 to 4 in all, and 5 as part of TurboQuantOutlier. seed: of the rotation and, from another stream, of the
    sketch; sketch_seed: of the sketch alone. The rest is as for TurboQuantMSE.
    """

    def __init__(
        self,
        dimension: int,
        bits: int,
        *,
        rotation: RotationKind | str = RotationKind.ORTHOGONAL,
        seed: int = 0,
        sketch_seed: int | None = None,
        codebook: CodebookKind | str = CodebookKind.BETA,
    ) -> None:
        self.bits = checked_int("bits", bits, 1, MAX_BITS + 1)
        self.mse = TurboQuantMSE(dimension, bits - 1, rotation=rotation, seed=seed, codebook=codebook)
        self.dimension = self.mse.dimension
        self.sketch_seed = checked_int(
            "sketch_seed", seed if sketch_seed is None else sketch_seed, 0, MAX_SEED
        )
        self.sketch = gaussian(self.sketch_seed, Stream.SKETCH, self.dimension, self.dimension)
        self.sketch.setflags(write=False)
        self.scale = math.sqrt(math.pi / 2) / self.dimension

    @property
    def effective_bits(self) -> float:
        """Bits of codes and signs per coordinate; the two norms are not counted."""
        return float(self.bits)

    def quantize(self, x: torch.Tensor) -> ProdCodes:
        """x: [..., d] of any floating dtype. The sign of a zero is +."""
        finite, nonfinite = _without_nonfinite(_vectors("x", x, self.dimension))
        unit, norm = _polar(finite)
        indices = self.mse._indices(unit)
        residual = unit - self.mse._direction(indices)
        signs = residual @ _tensor(self.sketch, unit).T >= 0
        residual_norm = torch.linalg.vector_norm(residual, dim=-1)
        return ProdCodes(MseCodes(indices, norm, nonfinite), signs, residual_norm)

    def dequantize(self, codes: ProdCodes) -> torch.Tensor:
        """x' [..., d] float64, unbiased for products; as an approximation of x worse than TurboQuantMSE."""
        signs = torch.where(codes.signs, 1.0, -1.0).to(torch.float64)
        sketched = signs @ _tensor(self.sketch, signs)  # S^T sign(S r)
        residual = self.scale * codes.residual_norm[..., None] * sketched
        return _scaled(codes.norm, self.mse._direction(codes.mse.indices) + residual)

    def inner_product(self, query: torch.Tensor, codes: ProdCodes) -> torch.Tensor:
        """<query, x'> [...] float64, the query rotated once and sketched once; it broadcasts against the codes."""
        query = _vectors("query", query, self.dimension)
        sketched = query @ _tensor(self.sketch, query).T  # S y
        correction = (torch.where(codes.signs, 1.0, -1.0) * sketched).sum(-1)
        return self.mse.inner_product(query, codes.mse) + codes.norm * (
            self.scale * codes.residual_norm * correction
        )


class TurboQuantOutlier:
    """One more bit for the outlier channels: two quantisers, each for its channels and with its own norm.

    kind: TurboQuantMSE or TurboQuantProd, which takes rotation and codebook. bits: 1 to 4, of the other channels.
    outliers: which channels of d, 2 to d - 2; :func:`outlier_channels` finds them, :func:`split_bits` says how many.
    The outliers' part has the seed seed + 2**63, so seed is below that.
    """

    def __init__(
        self,
        kind: type[TurboQuantMSE] | type[TurboQuantProd],
        dimension: int,
        bits: int,
        outliers: Sequence[int],
        *,
        rotation: RotationKind | str = RotationKind.ORTHOGONAL,
        seed: int = 0,
        codebook: CodebookKind | str = CodebookKind.BETA,
    ) -> None:
        if kind not in (TurboQuantMSE, TurboQuantProd):
            raise SpecError("kind", kind, "TurboQuantMSE or TurboQuantProd")
        self.dimension = checked_int("dimension", dimension, 4)
        self.bits = checked_int("bits", bits, 1, MAX_BITS)
        seed = checked_int("seed", seed, 0, 2**63 - 1)
        chosen = [checked_int("outliers", channel, 0, self.dimension - 1) for channel in outliers]
        if len(set(chosen)) != len(chosen) or not 2 <= len(chosen) <= self.dimension - 2:
            wants = f"2 to {self.dimension - 2} different channels: neither part has less than 2"
            raise SpecError("outliers", bounded_repr(chosen), wants)
        self.outliers = tuple(sorted(chosen))
        self.others = tuple(sorted(set(range(self.dimension)) - set(chosen)))
        options: dict[str, Any] = {"rotation": rotation, "codebook": codebook}
        self.outlier_quantizer = kind(len(self.outliers), bits + 1, seed=seed + 2**63, **options)
        self.other_quantizer = kind(len(self.others), bits, seed=seed, **options)

    @property
    def effective_bits(self) -> float:
        """Bits of codes per coordinate, averaged over the channels; norms are not counted."""
        parts = (self.outlier_quantizer, self.other_quantizer)
        return sum(part.bits * part.dimension for part in parts) / self.dimension

    def quantize(self, x: torch.Tensor) -> OutlierCodes:
        """x: [..., d] of any floating dtype."""
        finite, nonfinite = _without_nonfinite(_vectors("x", x, self.dimension))
        return OutlierCodes(
            self.outlier_quantizer.quantize(finite[..., self.outliers]),
            self.other_quantizer.quantize(finite[..., self.others]),
            nonfinite,
        )

    def dequantize(self, codes: OutlierCodes) -> torch.Tensor:
        """x' [..., d] float64."""
        outliers = self.outlier_quantizer.dequantize(codes.outliers)  # type: ignore[arg-type]
        others = self.other_quantizer.dequantize(codes.others)  # type: ignore[arg-type]
        out = others.new_empty((*others.shape[:-1], self.dimension))
        out[..., self.outliers], out[..., self.others] = outliers, others
        return out

    def inner_product(self, query: torch.Tensor, codes: OutlierCodes) -> torch.Tensor:
        """<query, x'> [...] float64; query [..., d] broadcasts against the codes."""
        query = _vectors("query", query, self.dimension)
        outliers = self.outlier_quantizer.inner_product(query[..., self.outliers], codes.outliers)  # type: ignore[arg-type]
        return outliers + self.other_quantizer.inner_product(query[..., self.others], codes.others)  # type: ignore[arg-type]


def outlier_channels(samples: torch.Tensor, count: int) -> tuple[int, ...]:
    """The ``count`` channels of largest mean square over samples [..., d], ascending; of equal ones the first.

    Vectors that are not finite do not count. SpecError if no finite one is left.
    """
    if not isinstance(samples, torch.Tensor) or samples.dim() < 2:
        got = tuple(samples.shape) if isinstance(samples, torch.Tensor) else type(samples).__name__
        raise SpecError("samples", got, "a tensor [..., d] of at least two dimensions")
    dimension = samples.shape[-1]
    count = checked_int("count", count, 1, dimension)
    x = _vectors("samples", samples, dimension).reshape(-1, dimension)
    x = x[torch.isfinite(x).all(-1)]
    if not len(x):
        raise SpecError("samples", tuple(samples.shape), "at least one finite vector")
    peak = x.abs().max()
    energy = (x / torch.where(peak > 0, peak, 1.0)).square().mean(0)
    order = torch.sort(energy, descending=True, stable=True).indices
    return tuple(sorted(order[:count].tolist()))


def split_bits(dimension: int, effective_bits: float) -> tuple[int, int]:
    """(bits, number of outlier channels) whose effective bits are exactly this: (2, 64) for 2.5 at d = 128.

    effective_bits: between 1 and 5 and no integer; SpecError if dimension times its fraction is none.
    """
    dimension = checked_int("dimension", dimension, 4)
    wants = f"a number between 1 and {MAX_BITS + 1} of which {dimension} times the fraction is an integer of at least 2"
    if isinstance(effective_bits, bool) or not isinstance(effective_bits, int | float):
        raise SpecError("effective_bits", effective_bits, wants)
    if not 1 < effective_bits < MAX_BITS + 1:  # NaN too
        raise SpecError("effective_bits", effective_bits, wants)
    bits = int(effective_bits)
    count = (Fraction(effective_bits) - bits) * dimension
    if count.denominator != 1 or not 2 <= count <= dimension - 2:
        raise SpecError("effective_bits", effective_bits, wants)
    return bits, int(count)
