"""Codebooks and rotations, against the published numbers and against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden_data import load
from turboquant_rocm import SpecError
from turboquant_rocm.codebook import (
    centroids,
    lloyd_max,
    midpoints,
    rotation,
    rotation_factors,
    small_hadamard,
)

ROTATABLE = (
    1,
    2,
    4,
    12,
    16,
    20,
    24,
    28,
    32,
    40,
    48,
    56,
    64,
    80,
    96,
    112,
    128,
    160,
    192,
    224,
    256,
    320,
    384,
    512,
)


def test_published_codebooks():
    golden = load("centroids")
    for name, want in golden.items():
        kind, head_size, bits = name.split("_")
        function = {"centroids": centroids, "midpoints": midpoints}[kind]
        got = function(int(head_size[1:]), int(bits[1:]))
        assert got.dtype == np.float32
        assert got.shape == want.shape
        assert np.abs(got - want).max() < 1e-6, name
    assert len(golden) == 6 * 2 * 2


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("head_size", [32, 80, 128])
def test_antisymmetric_with_an_exact_zero(bits: int, head_size: int):
    c, m = centroids(head_size, bits), midpoints(head_size, bits)
    assert np.array_equal(c, -c[::-1])
    assert np.array_equal(m, -m[::-1])
    assert m[len(m) // 2] == 0.0
    assert (np.diff(c) > 0).all()
    assert ((c[:-1] < m) & (m < c[1:])).all()


@pytest.mark.parametrize(("bits", "distortion"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.00950)])
def test_distortion_is_the_gaussian_optimum(bits: int, distortion: float):
    """The published codebook costs at most 0.1 % over the optimum (Max 1960, table 1), by numerical integration."""
    x = np.linspace(-9, 9, 400_001)
    density = np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
    c = lloyd_max(bits)
    nearest = c[np.searchsorted((c[1:] + c[:-1]) / 2, x)]
    mse = np.trapezoid((x - nearest) ** 2 * density, x)
    assert distortion * 0.999 < mse < distortion * 1.002


@pytest.mark.parametrize("head_size", ROTATABLE)
def test_rotations_are_orthonormal_with_flat_entries(head_size: int):
    r = rotation(head_size)
    assert np.abs(r @ r.T - np.eye(head_size)).max() < 1e-6
    assert np.allclose(np.abs(r), head_size**-0.5, rtol=1e-12), (
        "a Hadamard-type matrix has entries of one size"
    )


@pytest.mark.parametrize("head_size", [2, 64, 128, 256])
def test_powers_of_two_are_sylvester(head_size: int):
    i = np.arange(head_size)
    sign = np.array([[(-1.0) ** bin(int(a) & int(b)).count("1") for b in i] for a in i])
    assert np.allclose(rotation(head_size), sign / np.sqrt(head_size))


@pytest.mark.parametrize("order", [12, 20, 28])
def test_small_factors_are_exact(order: int):
    h = small_hadamard(order)
    assert set(np.unique(h)) == {-1.0, 1.0}
    assert np.array_equal(h @ h.T, order * np.eye(order))


def test_cutting_a_larger_matrix_would_be_noticed():
    cut = rotation(128)[:96, :96]
    assert np.abs(cut @ cut.T - np.eye(96)).max() > 0.1


@pytest.mark.parametrize("head_size", [3, 6, 36, 44, 72, 100, 144, 576, 0, -4])
def test_head_sizes_without_a_rotation_are_refused(head_size: int):
    with pytest.raises(SpecError) as error:
        rotation(head_size)
    assert error.value.field == "head_size"
    assert f"head_size={head_size}" in str(error.value)
    assert "80, 96, 112" in str(error.value)


@given(st.sampled_from((1, 12, 20, 28)), st.integers(0, 6))
def test_factors_are_found(m: int, k: int):
    assert rotation_factors(m * 2**k) == (m, 2**k)


@pytest.mark.parametrize("bits", [0, 9])
def test_bits_are_checked(bits: int):
    with pytest.raises(SpecError, match=f"bits={bits}"):
        lloyd_max(bits)
