"""The claims of the TurboQuant paper (arXiv:2504.19874) as checks that measure, predict and judge. Needs torch.

Every check runs the package's quantisers and compares with numbers that come from elsewhere: integrals over codebooks
that are solved here and not read from the table, published constants, the theorems' bounds, or a quantiser written down
a second time as its definition (:func:`_ideal`). Letters: d dimension, b bits, u a unit vector, r = u - u' what is
left of it, D(b) = E ||r||^2, q a query, k a key.

Tolerances are ``Z`` standard errors of what was measured. Where one seed serves many vectors, the seeds are the sample
and not the vectors. A row whose tolerance is above ``RESOLUTION`` of what it measures fails too: it proves nothing.

    distortion                 4^-b <= D(b) <= sqrt(3) pi / 2 * 4^-b           (theorems 3 and 1)
    error of products, prod    4^-b / d <= ... <= sqrt(3) pi^2 / d * 4^-b      (theorems 3 and 2)

For one key and Haar-random rotations the residual of its direction is symmetric around it, so with c = <q, u> and
A = E <u, r>^2 the squared error of a score is, for any q and k and exactly,

    ||k||^2 (c^2 A + (||q||^2 - c^2) (D - A) / (d - 1))

which is what the scores of real keys are compared with. What their ranking should be follows from adding Gaussian
noise of that variance to the exact scores, independent for every key. Keys that resemble one another have errors that
do, too, so that this prediction is not exact: rankings are judged by bounds, the ranking under noise as large and as
small as the theorems allow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from .accuracy import Tensors
from .codebook import distortion, lloyd_max, solve_codebook
from .codebook_cache import optimal_codebook
from .dispatch import Decision
from .ops import bind
from .quantizers import TurboQuantMSE, TurboQuantProd
from .spec import LayerSpec, Preset, SpecError, Target

__all__ = ["ABOUT_REAL_KEYS", "CHECKS", "LIMIT_CONSTANTS", "Row", "Settings", "run_checks"]

F64 = npt.NDArray[np.float64]

Z: Final = 5.0
"""Standard errors that a mean may be off by; the seeds are fixed, so that a run passes or fails for good."""
RESOLUTION: Final = 0.25
"""Largest tolerance, as a part of what is measured, with which a row still says something."""
BITS: Final = (1, 2, 3, 4)
DIMENSIONS: Final = (64, 128)
LIMIT_CONSTANTS: Final = {1: 0.3634, 2: 0.1175, 3: 0.0345, 4: 0.0095}
"""D(b) in the limit of large d, to four decimals: Lloyd-Max of the unit normal (Max, 1960)."""
TOP: Final = 16  # keys of largest score, of recall
_SPHERE: Final = 6000  # vectors of a distortion
_SEEDS: Final = 320  # sketches of a product
_PER_SEED: Final = 48  # vectors of each
_ROTATIONS: Final = 96  # of the real keys
_IDEAL: Final = 60_000  # vectors of the definition's own sample


@dataclass(frozen=True)
class Settings:
    """seed: of everything random. tensors: real queries and keys, for the checks of ``ABOUT_REAL_KEYS``."""

    seed: int = 0
    tensors: tuple[Tensors, ...] = ()


@dataclass(frozen=True)
class Row:
    """One measured number. tolerance: what sampling (or the rounding of a constant) allows, in the same unit.

    predicted: what theory says; with ``exact`` the row fails where it is missed, else it is shown only. low, high: a
    bound. samples: independent ones, 0 for an integral.
    """

    check: str
    subject: str
    dimension: int | None
    bits: int
    measured: float
    tolerance: float
    samples: int
    predicted: float | None = None
    exact: bool = True
    low: float | None = None
    high: float | None = None

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong, in words; empty if nothing is."""
        found = []
        if not all(math.isfinite(x) for x in (self.measured, self.tolerance)):
            return ("not a finite number",)
        if self.predicted is not None and self.exact and abs(self.measured - self.predicted) > self.tolerance:
            found.append("differs from the prediction by more than the tolerance")
        if self.low is not None and self.measured < self.low - self.tolerance:
            found.append("below the bound")
        if self.high is not None and self.measured > self.high + self.tolerance:
            found.append("above the bound")
        if self.tolerance > RESOLUTION * abs(self.measured):
            found.append(f"the tolerance is above {RESOLUTION:.0%} of it: too few samples")
        return tuple(found)

    @property
    def ok(self) -> bool:
        return not self.faults


# ---- theory ---------------------------------------------------------------------------------------------------


def _distortion_bounds(bits: int) -> tuple[float, float]:
    return 4.0**-bits, math.sqrt(3) * math.pi / 2 * 4.0**-bits


def _product_bounds(bits: int, d: int) -> tuple[float, float]:
    """Of the squared error of <y, x'> for unit x and y."""
    return 4.0**-bits / d, math.sqrt(3) * math.pi**2 / d * 4.0**-bits


@lru_cache(maxsize=64)
def _optimum(d: int, bits: int) -> float:
    """D(bits) of the optimal codebook in dimension d, solved anew."""
    return distortion(solve_codebook(d, bits), d)


def _unit(seed: int, stream: int, count: int, d: int) -> F64:
    """Uniformly random unit vectors [count, d]."""
    x = np.random.default_rng([seed, stream]).normal(size=(count, d))
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))


@dataclass(frozen=True)
class _Ideal:
    """Means and standard errors: <u, r>^2; cosine of u and its centroid vector; <u, u'>."""

    along: tuple[float, float]
    cosine: tuple[float, float]
    product: tuple[float, float]


def _mean(x: F64 | torch.Tensor) -> tuple[float, float]:
    """The mean of a sample and its standard error."""
    x = np.asarray(x, dtype=np.float64)
    return float(x.mean()), float(x.std(ddof=1) / math.sqrt(len(x)))


@lru_cache(maxsize=64)
def _ideal(d: int, bits: int, published: bool = False) -> _Ideal:
    """The definition once more: the nearest centroid of each coordinate of random unit vectors, by distances."""
    table = lloyd_max(bits) / math.sqrt(d) if published else solve_codebook(d, bits)
    u = _unit(12345, bits, _IDEAL // max(1, d // 64), d)
    nearest = np.zeros(u.shape, dtype=np.uint8)
    best = np.full(u.shape, np.inf)
    for i, c in enumerate(table):
        closer = np.abs(u - c) < best
        nearest[closer], best[closer] = i, np.abs(u - c)[closer]
    c = table[nearest]
    product = (u * c).sum(1)
    length = np.linalg.norm(c, axis=1)
    return _Ideal(
        _mean((1 - product) ** 2), _mean(product / np.where(length > 0, length, 1.0)), _mean(product)
    )


def _score_variance(
    c2: torch.Tensor, query2: torch.Tensor, d: int, rest: float, along: float, sketched: bool
) -> torch.Tensor:
    """Mean squared error of <q, u'> for a unit key with c2 = <q, u>^2 and query2 = ||q||^2.

    rest: D of the codes. sketched: the residual is estimated by its sketch instead of dropped.
    """
    of_residual = c2 * along + (query2 - c2) * (rest - along) / (d - 1)  # E <q, r>^2
    return (math.pi / 2 * rest * query2 - of_residual) / d if sketched else of_residual


# ---- random vectors -------------------------------------------------------------------------------------------


def _constants(settings: Settings) -> list[Row]:
    """D(b) in the limit of large d, of the codebooks in use, against published constants."""
    rows = []
    for bits in BITS:
        low, high = _distortion_bounds(bits)
        measured = distortion(optimal_codebook(None, bits), None)
        rows.append(
            Row("constants", "N(0, 1)", None, bits, measured, 5e-5, 0, LIMIT_CONSTANTS[bits], True, low, high)
        )  # fmt: skip
    return rows


def _distortion(settings: Settings) -> list[Row]:
    """TurboQuant_mse on random directions."""
    rows = []
    for d in DIMENSIONS:
        for bits in BITS:
            x = torch.from_numpy(_unit(settings.seed, 100 + bits, _SPHERE, d))
            q = TurboQuantMSE(d, bits, seed=settings.seed)
            mean, error = _mean((x - q.dequantize(q.quantize(x))).square().sum(-1))
            low, high = _distortion_bounds(bits)
            rows.append(
                Row("distortion", "mse", d, bits, mean, Z * error, _SPHERE, _optimum(d, bits), True, low, high)
            )  # fmt: skip
    return rows


@dataclass(frozen=True)
class _Products:
    """Means over each seed [_SEEDS]: <y, x'> / <y, x> of correlated y, its squared error, and that of independent y."""

    ratio: F64
    square: F64
    independent: F64


_OVERLAP: Final = 0.8  # <y, x>


def _products(settings: Settings, prod: bool, d: int, bits: int) -> _Products:
    found: list[list[float]] = [[], [], []]
    x, w, free = (
        torch.from_numpy(_unit(settings.seed, 200 + i, _SEEDS * _PER_SEED, d).reshape(_SEEDS, _PER_SEED, d))
        for i in range(3)
    )
    w = w - (w * x).sum(-1, keepdim=True) * x
    y = _OVERLAP * x + math.sqrt(1 - _OVERLAP**2) * w / w.norm(dim=-1, keepdim=True)
    for s in range(_SEEDS):
        kind = TurboQuantProd if prod else TurboQuantMSE
        q = kind(d, bits, seed=settings.seed * _SEEDS + s)
        codes = q.quantize(x[s])
        got = q.inner_product(y[s], codes)  # type: ignore[arg-type]
        found[0].append(float(got.mean()) / _OVERLAP)
        found[1].append(float((got - _OVERLAP).square().mean()))
        error = q.inner_product(free[s], codes) - (free[s] * x[s]).sum(-1)  # type: ignore[arg-type]
        found[2].append(float(error.square().mean()))
    return _Products(*(np.array(part) for part in found))


@lru_cache(maxsize=2)
def _all_products(settings: Settings) -> dict[tuple[str, int, int], _Products]:
    """By ("mse" or "prod", d, b); d = 128 for prod alone, where it shows the rate in d."""
    return {
        (name, d, bits): _products(settings, name == "prod", d, bits)
        for name, d in (("mse", 64), ("prod", 64), ("prod", 128))
        for bits in BITS
    }


def _bias(settings: Settings) -> list[Row]:
    """E <y, x'> / <y, x>: 1 for TurboQuant_prod, 1 - D(b) for TurboQuant_mse."""
    rows = []
    for (name, d, bits), found in _all_products(settings).items():
        mean, error = _mean(found.ratio)
        predicted = 1.0 if name == "prod" else 1 - _optimum(d, bits)
        rows.append(Row("bias", name, d, bits, mean, Z * error, _SEEDS, predicted))
    return rows


def _variance(settings: Settings) -> list[Row]:
    """E (<y, x'> - <y, x>)^2 of TurboQuant_prod where <y, x> = 0.8."""
    rows = []
    for (name, d, bits), found in _all_products(settings).items():
        if name == "prod":
            mean, error = _mean(found.square)
            predicted = _prod_variance(d, bits, _OVERLAP**2)
            low, high = _product_bounds(bits, d)
            rows.append(Row("variance", name, d, bits, mean, Z * error, _SEEDS, predicted, True, low, high))
    return rows


def _prod_variance(d: int, bits: int, c2: float) -> float:
    rest, along = _optimum(d, bits - 1), _ideal(d, bits - 1).along[0]
    one = torch.ones((), dtype=torch.float64)
    return float(_score_variance(c2 * one, one, d, rest, along, True))


def _products_of_random_queries(settings: Settings) -> list[Row]:
    """E (<y, x'> - <y, x>)^2 of independent unit y: D(b) / d for mse, (pi/2 - 1/d) D(b - 1) / d for prod."""
    rows = []
    for (name, d, bits), found in _all_products(settings).items():
        mean, error = _mean(found.independent)
        low, high = _product_bounds(bits, d)
        if name == "prod":
            predicted = (math.pi / 2 - 1 / d) * _optimum(d, bits - 1) / d
        else:
            predicted, high = _optimum(d, bits) / d, _distortion_bounds(bits)[1] / d
        rows.append(Row("product error", name, d, bits, mean, Z * error, _SEEDS, predicted, True, low, high))
    return rows


def _slope(first: Row, last: Row, check: str, low: float | None, high: float | None) -> Row:
    """How often the measured number falls by 4 per bit, from the first row to the last."""
    steps = last.bits - first.bits
    assert first.predicted is not None and last.predicted is not None

    def rate(a: float, b: float) -> float:
        return math.log(a / b, 4) / steps

    spread = math.hypot(*(r.tolerance / r.measured for r in (first, last))) / math.log(4) / steps
    return Row(
        check, first.subject, first.dimension, last.bits, rate(first.measured, last.measured), spread,
        min(first.samples, last.samples), rate(first.predicted, last.predicted), True, low, high,
    )  # fmt: skip


def _decay(settings: Settings) -> list[Row]:
    """The exponents: distortion and variance fall as 4^-b, so far as the bounds let them differ, and as 1 / d."""
    rows = []
    width = math.log(math.sqrt(3) * math.pi / 2, 4) / (BITS[-1] - BITS[0])  # of both bounds at either end
    distortions = _distortion(settings)
    for d in DIMENSIONS:
        mine = [r for r in distortions if r.dimension == d]
        rows.append(_slope(mine[0], mine[-1], "decay in b", 1 - width, 1 + width))
    variances = _variance(settings)
    width = math.log(math.sqrt(3) * math.pi**2, 4) / (BITS[-1] - BITS[0])
    for d in DIMENSIONS:
        mine = [r for r in variances if r.dimension == d]
        rows.append(_slope(mine[0], mine[-1], "decay in b", 1 - width, 1 + width))
    for bits in BITS:
        near, far = (next(r for r in variances if (r.dimension, r.bits) == (d, bits)) for d in DIMENSIONS)
        assert near.predicted is not None and far.predicted is not None
        doublings = math.log2(DIMENSIONS[1] / DIMENSIONS[0])
        spread = math.hypot(*(r.tolerance / r.measured for r in (near, far))) / math.log(2) / doublings
        rows.append(
            Row("decay in d", "prod", None, bits, math.log2(near.measured / far.measured) / doublings, spread,
                _SEEDS, math.log2(near.predicted / far.predicted) / doublings)
        )  # fmt: skip
    return rows


# ---- real keys ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scores:
    """Of one layer: queries [Hk, n, D], keys [Hk, T, D], exact scores [Hk, n, T], all float64."""

    name: str
    query: torch.Tensor
    key: torch.Tensor
    exact: torch.Tensor

    @property
    def c2(self) -> torch.Tensor:
        """<q, u>^2 [Hk, n, T]."""
        return (self.exact / self.length).square()

    @property
    def length(self) -> torch.Tensor:
        """||k|| [Hk, 1, T]."""
        return self.key.norm(dim=-1)[:, None]

    @property
    def query2(self) -> torch.Tensor:
        """||q||^2 [Hk, n, 1]."""
        return self.query.square().sum(-1, keepdim=True)


def _scores(tensors: Tensors, tokens: int = 12) -> _Scores:
    """The last ``tokens`` tokens' queries against all keys of their KV head. Tokens with a zero or non-finite vector
    have no direction and are left out."""
    kept = (tensors.key.double().norm(dim=-1) > 0).all(-1) & torch.isfinite(tensors.key).all(-1).all(-1)
    kept &= torch.isfinite(tensors.query).all(-1).all(-1)
    count, hk, d = tensors.key[kept].shape
    if count < 4 * TOP:
        raise SpecError(
            f"keys of {tensors.name}", count, f"at least {4 * TOP} tokens of finite keys that are not 0"
        )
    query = tensors.query[kept][-tokens:].double()
    n, hq, _ = query.shape
    query = query.reshape(n, hk, hq // hk, d).permute(1, 0, 2, 3).reshape(hk, -1, d)
    key = tensors.key[kept].double().transpose(0, 1).contiguous()
    return _Scores(tensors.name, query, key, query @ key.transpose(1, 2))


def _ranks(x: torch.Tensor) -> torch.Tensor:
    """Ranks over the last dimension, less their mean, of unit length."""
    r = x.argsort(-1).argsort(-1).double()
    r = r - r.mean(-1, keepdim=True)
    return r / r.norm(dim=-1, keepdim=True)


def _recall(exact: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Share of the TOP largest scores [..., T] of each query that are among the TOP largest of ``other``."""
    marks = [torch.zeros_like(x).scatter_(-1, x.topk(TOP, -1).indices, 1.0) for x in (exact, other)]
    return (marks[0] * marks[1]).sum(-1) / TOP


def _rank_correlation(exact: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Spearman's of each query; scores of real keys have no ties that matter."""
    return (_ranks(exact) * _ranks(other)).sum(-1)


_ORDERINGS: Final[dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    f"recall@{TOP}": _recall,
    "rank correlation": _rank_correlation,
}


def _under_noise(scores: _Scores, variance: torch.Tensor, shrink: float, draws: int = 4) -> dict[str, float]:
    """What the orderings are where independent Gaussian noise of ``variance`` [Hk, n, T] is added to exact scores."""
    g = torch.Generator().manual_seed(77)
    found: dict[str, list[float]] = {name: [] for name in _ORDERINGS}
    for _ in range(draws):
        noise = torch.randn(scores.exact.shape, generator=g, dtype=torch.float64) * variance.sqrt()
        for name, order in _ORDERINGS.items():
            found[name].append(float(order(scores.exact, scores.exact * shrink + noise).mean()))
    return {name: float(np.mean(values)) for name, values in found.items()}


def _ordering_rows(
    scores: _Scores, subject: str, bits: int, samples: dict[str, list[float]], prod: bool
) -> list[Row]:
    """Recall and rank correlation against those under the predicted noise, and the bounds' noise."""
    d = scores.key.shape[-1]
    size = scores.length.square()
    if prod:
        rest, along = _optimum(d, bits - 1), _ideal(d, bits - 1).along[0]
        low, high = (x * scores.query2 * size for x in _product_bounds(bits, d))
        shrink = (1.0, 1.0, 1.0)
        variance = _score_variance(scores.c2, scores.query2, d, rest, along, True) * size
    else:
        rest, along = _optimum(d, bits), _ideal(d, bits).along[0]
        low, high = (x * scores.query2 * size / d for x in _distortion_bounds(bits))
        shrink = (1 - rest, 1 - _distortion_bounds(bits)[1], 1.0)
        spread = _score_variance(scores.c2, scores.query2, d, rest, along, False)
        variance = (spread - rest**2 * scores.c2) * size  # without the bias, which shrink is
    expected = _under_noise(scores, variance, shrink[0])
    worst, best = _under_noise(scores, high, shrink[1]), _under_noise(scores, low, shrink[2])
    rows = []
    for name, values in samples.items():
        mean, error = _mean(np.array(values))
        rows.append(
            Row(name, f"{scores.name} {subject}", d, bits, mean, Z * error, len(values), expected[name], False,
                worst[name], best[name])
        )  # fmt: skip
    return rows


def _real_keys(settings: Settings) -> list[Row]:
    """Both quantisers over real keys and queries: distortion, squared error of scores, and their ranking."""
    rows = []
    for tensors in settings.tensors:
        scores = _scores(tensors)
        d = scores.key.shape[-1]
        energy = float((scores.query2 * scores.length.square()).mean())
        for bits in BITS:
            for prod in (False, True):
                name = "prod" if prod else "mse"
                kind = TurboQuantProd if prod else TurboQuantMSE
                loss, square = [], []
                order: dict[str, list[float]] = {n: [] for n in _ORDERINGS}
                for s in range(_ROTATIONS):
                    q = kind(d, bits, seed=settings.seed * _ROTATIONS + s)
                    read = q.dequantize(q.quantize(scores.key))  # type: ignore[arg-type]
                    got = scores.query @ read.transpose(1, 2)
                    square.append(float((got - scores.exact).square().mean()) / energy)
                    loss.append(
                        float(((read - scores.key) / scores.length.transpose(1, 2)).square().sum(-1).mean())
                    )
                    if s < _ROTATIONS // 4:  # sorting takes most of the time
                        for n, f in _ORDERINGS.items():
                            order[n].append(float(f(scores.exact, got).mean()))
                rest, along = _optimum(d, bits - prod), _ideal(d, bits - prod).along[0]
                variance = _score_variance(scores.c2, scores.query2, d, rest, along, prod)
                predicted = float((variance * scores.length.square()).mean()) / energy
                mean, error = _mean(np.array(square))
                subject = f"{scores.name} {name}"
                bounds = _product_bounds(bits, d) if prod else (None, None)
                rows.append(
                    Row(
                        "score error", subject, d, bits, mean, Z * error, _ROTATIONS, predicted, True, *bounds
                    )
                )
                if not prod:
                    mean, error = _mean(np.array(loss))
                    rows.append(
                        Row("distortion", subject, d, bits, mean, Z * error, _ROTATIONS, rest, True,
                            *_distortion_bounds(bits))
                    )  # fmt: skip
                rows += _ordering_rows(scores, name, bits, order, prod)
    return sorted(rows, key=lambda row: row.check)


def _stored(key: torch.Tensor, bits: int, correct: bool) -> torch.Tensor:
    """Keys [T, Hk, D] float64 as the reference's cache gives them back, with or without norm correction."""
    tokens, heads, d = key.shape
    preset = Preset(f"k{bits}v4{'_nc' if correct else ''}", bits, 4, correct)
    layer = LayerSpec(0, heads, heads, d, dtype="fp32")  # type: ignore[arg-type]
    bound = bind(
        Decision(layer, Target("cpu", "cpu"), preset, 16, "torch_reference", "soa"), math_dtype=torch.float64
    )
    blocks = -(-tokens // 16)
    cache = bound.allocate(blocks, "cpu")
    table, length = torch.arange(blocks, dtype=torch.int32)[None], torch.tensor([tokens], dtype=torch.int32)
    bound.store(key.float(), key.float(), cache, torch.arange(tokens))
    return bound.dequantize(cache, table, length, dtype=torch.float64).key


def _norm_correction(settings: Settings) -> list[Row]:
    """How far logits shrink in a cache: mean <k, k'> / ||k||^2, the slope of scores over isotropic queries.

    1 - D(b) without norm correction and about sqrt(1 - D(b)) with it, which is half as far.
    """
    rows = []
    d, tokens = 128, 4000
    key = torch.from_numpy(_unit(settings.seed, 300, tokens, d))[:, None] * 10.0
    for bits in (3, 4):
        for correct in (False, True):
            slope = ((_stored(key, bits, correct) * key).sum(-1) / key.square().sum(-1))[:, 0]
            mean, error = _mean(slope)
            ideal = _ideal(d, bits, published=True)
            predicted, own = ideal.cosine if correct else ideal.product
            bound = _distortion_bounds(bits)[1]
            rows.append(
                # 1 - slope is what the tolerance has to resolve
                Row("logit shrinkage", "stored, norm correction" if correct else "stored, none", d, bits, 1 - mean,
                    Z * math.hypot(error, own), tokens, 1 - predicted, True, 0.0,
                    1 - math.sqrt(max(0.0, 1 - bound)) if correct else bound)
            )  # fmt: skip
    return rows


def _stored_rankings(settings: Settings) -> list[Row]:
    """Recall and rank correlation over real keys as caches hold them: Hadamard rotation, norm correction.

    One fixed rotation, so the sample is the queries, and the bounds are those of random rotations.
    """
    rows = []
    for tensors in settings.tensors:
        scores = _scores(tensors)
        for bits in (3, 4):
            read = _stored(scores.key.transpose(0, 1), bits, True).transpose(0, 1)
            got = scores.query @ read.transpose(1, 2)
            order = {name: f(scores.exact, got).flatten().tolist() for name, f in _ORDERINGS.items()}
            rows += _ordering_rows(scores, "stored", bits, order, False)
    return sorted(rows, key=lambda row: row.check)


CHECKS: Final[dict[str, Callable[[Settings], list[Row]]]] = {
    "constants": _constants,
    "distortion": _distortion,
    "bias": _bias,
    "variance": _variance,
    "product-error": _products_of_random_queries,
    "decay": _decay,
    "real-keys": _real_keys,
    "norm-correction": _norm_correction,
    "stored-rankings": _stored_rankings,
}
"""By name, in the order in which they run."""
ABOUT_REAL_KEYS: Final = ("real-keys", "stored-rankings")
"""Checks that need ``Settings.tensors``."""


def run_checks(settings: Settings, names: Sequence[str] = tuple(CHECKS)) -> list[Row]:
    """The rows of these checks. KeyError for a name that is none; SpecError without the tensors that one needs."""
    rows = []
    for name in names:
        if name in ABOUT_REAL_KEYS and not settings.tensors:
            raise SpecError("tensors", settings.tensors, f"real queries and keys, for the check {name}")
        rows += CHECKS[name](settings)
    return rows
