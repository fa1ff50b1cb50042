"""The paper's quantisers against its theorems.

Every bound on a measured mean is that mean's standard error times Z, so a right product fails by chance once in about
10^8 comparisons, if at all: all seeds are fixed. Beside each "it holds" stands a "and this would not": a mutant, or the
biased quantiser.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch

from turboquant_rocm import SpecError
from turboquant_rocm.codebook import centroids, rotation
from turboquant_rocm.quantizers import (
    TurboQuantMSE,
    TurboQuantOutlier,
    TurboQuantProd,
    outlier_channels,
    split_bits,
)
from turboquant_rocm.seeded import (
    MAX_SEED,
    Stream,
    gaussian,
    random_orthogonal,
    random_signs,
    raw_words,
    signed_hadamard,
)

Z = 5.7
ROTATIONS = ("hadamard", "signed_hadamard", "orthogonal")
KINDS = (TurboQuantMSE, TurboQuantProd)

# Of seed 0: test_seeds_reproduce_what_was_written_down.
WORDS = ["0xd037f8c3f9a1d176", "0xc057419b4c210765"]
SIGNS = "---+-+------+-++"
SKETCH = [-1.2164112517932295, 0.0924909714060298, -0.8908853727631851, -0.6188715931985168]
ORTHOGONAL = [
    -0.44005255400011656,
    -0.13809688776474335,
    -0.8872896930020466,
    -0.7404981058011672,
    -0.5031309426826154,
    0.4455578636049263,
    -0.5079530539556366,
    0.853105212799098,
    0.11914357251714251,
]


def normal(seed: int, *shape: int) -> torch.Tensor:
    """N(0, 1) float64, from numpy: independent of the product's generator."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def sphere(seed: int, count: int, dimension: int) -> torch.Tensor:
    x = normal(seed, count, dimension)
    return x / x.norm(dim=-1, keepdim=True)


def mean_and_error(x: torch.Tensor) -> tuple[float, float]:
    """The mean of a sample and its standard error."""
    return float(x.mean()), float(x.std() / math.sqrt(x.numel()))


def correlated(dimension: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit vectors x, y with <x, y> = 0.8."""
    a, b = sphere(1, 2, dimension)
    b = b - (a @ b) * a
    return a, 0.8 * a + 0.6 * b / b.norm()


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    """Codebooks go to a folder of the tests, not to the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURBOQUANT_ROCM_CACHE", str(tmp_path_factory.mktemp("codebooks")))
        yield


# ---- seeds and rotations --------------------------------------------------------------------------------------


def test_words_are_philox():
    """Known answers of Philox4x64-10: Random123's kat_vectors for counter 0 and key 0 start 16554d9eca36314c.

    NumPy counts before it draws, so its first block is that of counter 1: stepped back by one block, it is counter 0.
    """
    generator = np.random.Philox(key=0)
    generator.advance(2**256 - 1)
    assert [hex(int(w)) for w in generator.random_raw(2)] == ["0x16554d9eca36314c", "0xdb20fe9d672d0fdc"]
    assert np.array_equal(
        raw_words(7, Stream.SKETCH, 5), np.random.Philox(key=np.array([7, 3], dtype=np.uint64)).random_raw(5)
    )


def test_seeds_reproduce_what_was_written_down():
    """Literals, so that another version of anything cannot change them unnoticed."""
    assert [hex(int(w)) for w in raw_words(0, Stream.SIGNS, 2)] == WORDS
    assert "".join("-+"[int(s > 0)] for s in random_signs(0, 16)) == SIGNS
    assert gaussian(0, Stream.SKETCH, 2, 2).ravel() == pytest.approx(SKETCH, rel=1e-12)
    assert random_orthogonal(0, 3).ravel() == pytest.approx(ORTHOGONAL, rel=1e-11)


def test_seeds_and_streams_differ():
    drawn = [gaussian(seed, stream, 20, 20) for seed in (0, 1, 2**63, MAX_SEED) for stream in Stream]
    flat = np.array([g.ravel() for g in drawn])
    correlation = np.corrcoef(flat) - np.eye(len(flat))
    assert np.abs(correlation).max() < Z / math.sqrt(flat.shape[1])


def test_gaussian_moments():
    g = gaussian(3, Stream.SKETCH, 501, 301).ravel()  # odd
    n = len(g)
    assert n == 501 * 301
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((g**power).mean() - mean) < Z * math.sqrt(variance / n)
    assert abs((g[::2] * np.append(g[1::2], 0)).mean()) < Z / math.sqrt(n / 2), "the pairs are independent"


def test_orthogonal_is_uniform():
    """Entries of a Haar matrix have mean 0 and mean square 1 / d; without the sign correction, the diagonal has not."""
    d, count = 4, 3000
    q = np.array([random_orthogonal.__wrapped__(seed, d) for seed in range(count)])
    assert np.abs(q @ q.transpose(0, 2, 1) - np.eye(d)).max() < 1e-14
    assert np.abs(q.mean(0)).max() < Z * math.sqrt(1 / d / count)
    assert np.abs((q**2).mean(0) - 1 / d).max() < Z * math.sqrt(2 / d**2 / count)  # variance is below 2 / d^2
    plain = np.array([np.linalg.qr(gaussian(s, Stream.ORTHOGONAL, d, d))[0] for s in range(count)])
    assert np.abs(plain.mean(0)).max() > Z * math.sqrt(1 / d / count)


@pytest.mark.parametrize("d", [64, 80, 576])
@pytest.mark.parametrize("kind", ROTATIONS)
def test_rotations(kind: str, d: int):
    if d == 576 and kind != "orthogonal":
        with pytest.raises(SpecError, match="head_size=576"):
            TurboQuantMSE(d, 2, rotation=kind)
        return
    q = TurboQuantMSE(d, 2, rotation=kind, seed=5)
    x = normal(0, 3, d)
    matrix = {"hadamard": lambda: rotation(d), "signed_hadamard": lambda: signed_hadamard(5, d),
              "orthogonal": lambda: random_orthogonal(5, d)}[kind]()  # fmt: skip
    assert torch.allclose(q.rotate(x), x @ torch.from_numpy(matrix.copy()).T, atol=1e-13, rtol=0)
    assert torch.allclose(q.rotate_back(q.rotate(x)), x, atol=1e-13, rtol=0)
    other = TurboQuantMSE(d, 2, rotation=kind, seed=6)
    assert torch.equal(q.rotate(x), other.rotate(x)) == (kind == "hadamard")
    assert torch.equal(q.rotate(x), TurboQuantMSE(d, 2, rotation=kind, seed=5).rotate(x))


# ---- TurboQuantMSE --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "paper"), [(1, 0.36), (2, 0.117), (3, 0.03), (4, 0.009)])
@pytest.mark.parametrize("d", [64, 576])
def test_distortion_is_the_predicted_one(d: int, bits: int, paper: float):
    """Measured on random directions = by integration, between the bounds of theorems 3 and 1, near the paper's values.

    The paper rounds downwards at 3 and 4 bits: 0.0345 and 0.0095 are the values for large d.
    """
    q = TurboQuantMSE(d, bits)
    x = sphere(bits, 6000 if d == 64 else 900, d)
    mean, error = mean_and_error((x - q.dequantize(q.quantize(x))).square().sum(-1))
    assert abs(mean - q.distortion) < Z * error
    assert error < 0.005 * mean, "the sample is large enough to tell"
    assert 4.0**-bits < mean - Z * error, "below what any quantiser can do: a bit is smuggled in somewhere"
    assert mean + Z * error < math.sqrt(3) * math.pi / 2 * 4.0**-bits
    assert mean == pytest.approx(paper, rel=0.16)


@pytest.mark.parametrize(("d", "change"), [(16, "gaussian"), (16, "scaled"), (64, "scaled")])
def test_wrong_codebooks_are_told_apart(d: int, change: str):
    """The same statistics reject centroids that are 5 % too large, and at d = 16 the Gaussian codebook."""
    x = sphere(0, 10_000, d)
    right = TurboQuantMSE(d, 3)
    wrong = TurboQuantMSE(d, 3, codebook="gaussian" if change == "gaussian" else "beta")
    if change == "scaled":
        wrong.centroids = right.centroids * 1.05
    losses = [(x - q.dequantize(q.quantize(x))).square().sum(-1) for q in (right, wrong)]
    for q, loss in zip((right, wrong), losses, strict=True):
        mean, error = mean_and_error(loss)
        assert abs(mean - q.distortion) < Z * error
    assert right.distortion < wrong.distortion
    mean, error = mean_and_error(losses[1] - losses[0])
    assert mean > Z * error


@pytest.mark.parametrize("shape", ["one-hot", "constant", "ramp"])
def test_distortion_does_not_depend_on_the_vector(shape: str):
    """Over random orthogonal rotations, the expected distortion is the same for every vector: theorem 1."""
    d = 32
    x = {"one-hot": torch.eye(d)[3], "constant": torch.ones(d), "ramp": torch.arange(d) - 3.0}[shape].double()
    x = x / x.norm()
    losses = []
    for seed in range(400):
        q = TurboQuantMSE(d, 2, seed=seed)
        losses.append((x - q.dequantize(q.quantize(x))).square().sum())
    mean, error = mean_and_error(torch.stack(losses))
    assert abs(mean - q.distortion) < Z * error
    fixed = TurboQuantMSE(d, 2, rotation="hadamard")
    if shape == "one-hot":  # without random rotation there is no such theorem
        loss = float((x - fixed.dequantize(fixed.quantize(x))).square().sum())
        assert abs(loss - fixed.distortion) > Z * error


def test_bits_are_the_bits():
    x = normal(2, 500, 64)
    for bits in range(1, 5):
        indices = TurboQuantMSE(64, bits).quantize(x).indices
        assert indices.dtype == torch.uint8
        assert sorted(set(indices.flatten().tolist())) == list(range(2**bits))


@pytest.mark.parametrize("bits", range(1, 5))
def test_ties_go_up(bits: int):
    """As in caches: a coordinate of exactly 0 lies on the middle threshold."""
    q = TurboQuantMSE(64, bits, rotation="hadamard")
    pair = torch.zeros(64)
    pair[0], pair[1] = 1.0, -1.0  # its rotation is 0 in every second coordinate
    assert (q.quantize(torch.zeros(64)).indices == 2 ** (bits - 1)).all()
    assert (q.quantize(pair).indices[::2] == 2 ** (bits - 1)).all()


def test_published_codes_are_those_of_caches():
    """With the plain rotation and the published codebook, the codes are those the reference backend stores."""
    from turboquant_rocm import LayerSpec, Policy, Target, bind, decide
    from turboquant_rocm.layouts.packing import unpack

    key = normal(9, 7, 2, 64).float()
    layer = LayerSpec(index=0, num_heads=2, num_kv_heads=2, head_size=64)
    policy = Policy(force="torch_reference", layout="soa")
    for preset, bits in (("turboquant_4bit_nc", 4), ("turboquant_3bit_nc", 3)):
        bound = bind(decide(layer, Target("cpu", "cpu"), preset, block_size=16, policy=policy))
        fields, _ = bound.ops.encode(key, key)
        stored = unpack(fields["key_data"], bits, 64)
        q = TurboQuantMSE(64, bits, rotation="hadamard", codebook="published")
        assert np.allclose(q.centroids, centroids(64, bits), rtol=1e-6)
        codes = q.quantize(key)
        differ = codes.indices.long() != stored.long()
        assert differ.sum() <= 1, (
            "fp32 against fp64: only a coordinate within rounding of a threshold may differ"
        )
        assert torch.allclose(q.inner_product(key, codes), (key * q.dequantize(codes)).sum(-1), rtol=1e-12)


# ---- TurboQuantProd -------------------------------------------------------------------------------------------


@cache
def errors_over_sketches(
    q_bits: int, d: int, seeds: int
) -> tuple[torch.Tensor, torch.Tensor, TurboQuantProd]:
    """<y, x'> - <y, x> over sketches, the rotation fixed; and the residual r."""
    x, y = correlated(d)
    found = []
    for seed in range(seeds):
        q = TurboQuantProd(d, q_bits, sketch_seed=seed)
        found.append(q.inner_product(y, q.quantize(x)) - x @ y)
    residual = x - q.mse.dequantize(q.quantize(x).mse)
    return torch.stack(found), residual, q


@pytest.mark.parametrize("bits", range(1, 5))
def test_prod_is_unbiased_with_the_variance_of_the_formula(bits: int):
    """Over sketches alone, for one rotation and one pair of vectors; and theorem 2's bound with the mean of ||r||^2."""
    d, seeds = 64, 1000
    error, residual, q = errors_over_sketches(bits, d, seeds)
    mean, se = mean_and_error(error)
    assert abs(mean) < Z * se, f"biased by {mean / se:.1f} standard errors"
    _, y = correlated(d)
    variance = (math.pi / 2 * residual.square().sum() - (y @ residual) ** 2) / d
    squares, squares_se = mean_and_error(error.square())
    assert abs(squares - float(variance)) < Z * squares_se
    assert squares_se < 0.05 * squares
    # Theorem 2 is about the mean over rotations, in which E ||r||^2 = D_mse(b - 1).
    expected = math.pi / 2 * q.mse.distortion / d
    assert expected <= math.sqrt(3) * math.pi**2 / d * 4.0**-bits
    assert expected * d == pytest.approx(
        {1: 1.57, 2: 0.56, 3: 0.18, 4: 0.047}[bits], rel=0.16
    )  # the paper's values


@pytest.mark.parametrize("bits", [1, 2])
def test_the_test_of_bias_can_fail(bits: int):
    """MSE alone is biased, over rotations, by -D_mse <x, y>; and so is a sketch with a wrong constant."""
    d, seeds = 64, 400
    x, y = correlated(d)
    plain, prod = [], []
    for seed in range(seeds):
        mse, both = TurboQuantMSE(d, bits, seed=seed), TurboQuantProd(d, bits, seed=seed)
        plain.append(mse.inner_product(y, mse.quantize(x)) - x @ y)
        prod.append(both.inner_product(y, both.quantize(x)) - x @ y)
    mean, se = mean_and_error(torch.stack(plain))
    assert mean < -10 * se
    assert abs(mean + mse.distortion * float(x @ y)) < Z * se, "E <y, x'> = (1 - D) <y, x>"
    mean, se = mean_and_error(torch.stack(prod))
    assert abs(mean) < Z * se
    # Theorem 2, measured: over rotations and sketches.
    squares, squares_se = mean_and_error(torch.stack(prod).square())
    assert 4.0**-bits / d < squares - Z * squares_se, "theorem 3"
    assert squares - Z * squares_se < math.pi / 2 * both.mse.distortion / d
    assert squares + Z * squares_se < math.sqrt(3) * math.pi**2 / d * 4.0**-bits


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_a_wrong_constant_is_noticed(factor: float):
    error, residual, _ = errors_over_sketches(1, 64, 1000)
    x, y = correlated(64)
    # At one bit all of <y, x'> is the sketch, so a wrong constant scales it.
    wrong = factor * (error + x @ y) - x @ y
    mean, se = mean_and_error(wrong)
    assert torch.allclose(residual, x)
    assert abs(mean) > Z * se


@pytest.mark.parametrize("kind", ROTATIONS)
@pytest.mark.parametrize("bits", range(1, 5))
def test_inner_product_is_that_of_what_is_read_back(bits: int, kind: str):
    x, y = normal(3, 5, 2, 64), normal(4, 64)
    for quantizer in (TurboQuantMSE, TurboQuantProd):
        q = quantizer(64, bits, rotation=kind, seed=3)
        codes = q.quantize(x)
        assert torch.allclose(q.inner_product(y, codes), q.dequantize(codes) @ y, rtol=1e-10, atol=1e-10)
        assert q.effective_bits == bits
        assert q.dequantize(codes).dtype == torch.float64


def test_prod_keeps_one_bit_less_in_codes():
    q = TurboQuantProd(64, 3)
    codes = q.quantize(normal(5, 100, 64))
    assert int(codes.mse.indices.max()) == 3
    assert codes.signs.dtype == torch.bool
    assert codes.signs.shape == codes.mse.indices.shape
    assert TurboQuantProd(64, 1).quantize(normal(5, 9, 64)).mse.indices.max() == 0
    assert math.isclose(q.scale, math.sqrt(math.pi / 2) / 64)


# ---- outliers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("effective", [1.5, 2.25, 2.5, 3.5, 4.5])
def test_effective_bits(kind: type, effective: float):
    """Counted from the codes: log2 of how many values each channel takes."""
    bits, count = split_bits(128, effective)
    q = TurboQuantOutlier(kind, 128, bits, range(count))
    assert q.effective_bits == effective
    codes = q.quantize(normal(6, 2000, 128))
    total = 0.0
    for part in (codes.outliers, codes.others):
        mse = part.mse if kind is TurboQuantProd else part
        channels = mse.indices.shape[-1]
        total += channels * (math.log2(len(mse.indices.unique())) + (kind is TurboQuantProd))
    assert total / 128 == effective


def spiky(count: int, d: int, outliers: list[int]) -> torch.Tensor:
    scale = torch.ones(d, dtype=torch.float64)
    scale[outliers] = 8.0
    return normal(7, count, d) * scale


@pytest.mark.parametrize("bits", [2, 3])
def test_outlier_channels_pay(bits: int):
    """2.5 bits on vectors with large channels: a third of the error of 2; next to no gain on the wrong ones."""
    d = 128
    large = list(range(0, d, 2))
    x = spiky(500, d, large)
    assert outlier_channels(x, 64) == tuple(large)

    def loss(q) -> float:
        return float((x - q.dequantize(q.quantize(x))).square().sum() / x.square().sum())

    right = loss(TurboQuantOutlier(TurboQuantMSE, d, bits, large))
    wrong = loss(TurboQuantOutlier(TurboQuantMSE, d, bits, range(1, d, 2)))
    plain = loss(TurboQuantMSE(d, bits))
    assert right < 0.4 * plain
    assert wrong > 0.9 * plain
    energy = 64 / 65  # of the large channels
    parts = (TurboQuantMSE(64, bits + 1).distortion, TurboQuantMSE(64, bits).distortion)
    assert right == pytest.approx(energy * parts[0] + (1 - energy) * parts[1], rel=0.02)


def test_outlier_products_are_unbiased():
    d, seeds = 32, 400
    x, y = correlated(d)
    error = []
    for seed in range(seeds):
        q = TurboQuantOutlier(TurboQuantProd, d, 1, range(16), seed=seed)
        codes = q.quantize(x)
        error.append(q.inner_product(y, codes) - x @ y)
    assert torch.allclose(q.inner_product(y, codes), q.dequantize(codes) @ y, atol=1e-12)
    mean, se = mean_and_error(torch.stack(error))
    assert abs(mean) < Z * se
    assert not np.array_equal(q.outlier_quantizer.sketch, q.other_quantizer.sketch)


def test_outlier_channels_of_hard_samples():
    x = torch.ones(4, 8)
    assert outlier_channels(x, 3) == (0, 1, 2), "of equal ones the first"
    x[0, 7] = 1e30
    x[1, 6] = math.inf
    assert outlier_channels(x, 1) == (7,)
    assert outlier_channels(torch.zeros(2, 8), 2) == (0, 1)
    with pytest.raises(SpecError, match="at least one finite"):
        outlier_channels(torch.full((2, 8), math.nan), 1)


# ---- hard vectors and wrong arguments -------------------------------------------------------------------------


HARD = {
    "mse-1": lambda: TurboQuantMSE(64, 1),
    "mse-4": lambda: TurboQuantMSE(64, 4),
    "mse-published": lambda: TurboQuantMSE(64, 3, rotation="hadamard", codebook="published"),
    "prod-1": lambda: TurboQuantProd(64, 1),
    "prod-4": lambda: TurboQuantProd(64, 4),
    "outlier-mse": lambda: TurboQuantOutlier(TurboQuantMSE, 64, 2, range(0, 64, 2)),
    "outlier-prod": lambda: TurboQuantOutlier(TurboQuantProd, 64, 2, range(0, 64, 2)),
}


@pytest.fixture(params=HARD)
def q(request: pytest.FixtureRequest):
    return HARD[request.param]()


class TestHardVectors:
    def test_zero(self, q):
        codes = q.quantize(torch.zeros(2, 64))
        assert (q.dequantize(codes) == 0).all()
        assert codes.nonfinite == 0

    def test_nonfinite_is_zero_and_counted(self, q):
        x = normal(8, 6, 64)
        want = q.dequantize(q.quantize(x))
        x[1, 3], x[2, 0], x[4, 63] = math.nan, math.inf, -math.inf
        x[4, 0] = math.nan  # one vector, counted once
        codes = q.quantize(x)
        assert codes.nonfinite == 3
        got = q.dequantize(codes)
        assert (got[[1, 2, 4]] == 0).all()
        assert torch.equal(got[[0, 3, 5]], want[[0, 3, 5]]), "the others are as they were"
        assert (q.inner_product(normal(9, 64), codes)[[1, 2, 4]] == 0).all()

    @pytest.mark.parametrize("power", [-1000, -600, 600, 900])
    def test_scale_does_not_matter(self, q, power: int):
        """Codes of 2^p x are those of x, where squares of its entries overflow or vanish."""
        x = normal(10, 4, 64)
        plain, scaled = q.dequantize(q.quantize(x)), q.dequantize(q.quantize(x * 2.0**power))
        assert torch.equal(scaled * 2.0**-power, plain)

    def test_the_largest_and_the_smallest(self, q):
        top = torch.full((1, 64), torch.finfo(torch.float64).max, dtype=torch.float64)
        assert q.dequantize(q.quantize(top)).isfinite().all()
        one_hot = torch.eye(64, dtype=torch.float64) * torch.finfo(torch.float64).max
        assert q.dequantize(q.quantize(one_hot)).isfinite().all(), "also where a coordinate of u' is above 1"
        tiny = torch.full((1, 64), 5e-324, dtype=torch.float64)
        assert q.dequantize(q.quantize(tiny)).isfinite().all()
        assert (q.dequantize(q.quantize(-tiny)) == -q.dequantize(q.quantize(tiny))).any()

    def test_dtypes_and_shapes(self, q):
        x = normal(11, 2, 3, 64)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            low = x.to(dtype)
            assert torch.equal(q.dequantize(q.quantize(low)), q.dequantize(q.quantize(low.double())))
        assert q.dequantize(q.quantize(x)).shape == x.shape
        assert q.dequantize(q.quantize(x[:0])).shape == (0, 3, 64)
        assert q.inner_product(x, q.quantize(x)).shape == (2, 3)
        assert torch.allclose(
            q.dequantize(q.quantize(x))[1, 2], q.dequantize(q.quantize(x[1, 2])), rtol=1e-12
        )

    @pytest.mark.parametrize(
        ("x", "message"),
        [(torch.zeros(2, 63), "x shape"), (torch.zeros(2, 64, dtype=torch.int32), "int32"),
         (torch.tensor(1.0), "x shape"), ([0.0] * 64, "list")],
    )  # fmt: skip
    def test_wrong_input(self, q, x, message: str):
        with pytest.raises(SpecError, match=message):
            q.quantize(x)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: TurboQuantMSE(1, 2), "dimension"),
        (lambda: TurboQuantMSE(64, 6), "bits"),
        (lambda: TurboQuantMSE(64, 2.0), "bits"),
        (lambda: TurboQuantProd(64, 0), "bits"),
        (lambda: TurboQuantMSE(64, 2, rotation="dct"), "rotation"),
        (lambda: TurboQuantMSE(64, 2, codebook="uniform"), "codebook"),
        (lambda: TurboQuantMSE(64, 2, seed=-1), "seed"),
        (lambda: TurboQuantMSE(64, 2, seed=2**64), "seed"),
        (lambda: TurboQuantProd(64, 2, sketch_seed="a"), "sketch_seed"),
        (lambda: TurboQuantOutlier(dict, 64, 2, [1, 2]), "kind"),
        (lambda: TurboQuantOutlier(TurboQuantMSE, 64, 5, [1, 2]), "bits"),
        (lambda: TurboQuantOutlier(TurboQuantMSE, 64, 2, [1, 1]), "outliers"),
        (lambda: TurboQuantOutlier(TurboQuantMSE, 64, 2, [1, 64]), "outliers"),
        (lambda: TurboQuantOutlier(TurboQuantMSE, 64, 2, range(63)), "outliers"),
        (lambda: TurboQuantOutlier(TurboQuantMSE, 64, 2, [1, 2], seed=2**63), "seed"),
        (lambda: split_bits(128, 2.0), "effective_bits"),
        (lambda: split_bits(128, 2.501), "effective_bits"),
        (lambda: split_bits(128, math.nan), "effective_bits"),
        (lambda: split_bits(128, "2.5"), "effective_bits"),
        (lambda: outlier_channels(torch.zeros(8), 2), "samples"),
        (lambda: outlier_channels(torch.zeros(2, 8), 9), "count"),
    ],
)
def test_wrong_arguments_are_named(make, field: str):
    with pytest.raises(SpecError) as error:
        make()
    assert error.value.field == field
