"""Optimal codebooks against closed forms, their table and their cache on disk.

The product integrates by Gauss-Legendre and solves by Newton. Here the probabilities are closed forms (math.erf, and
the reduction formula of the integral of cos^n, a finite sum of positive terms), and the solver is Lloyd's iteration
alone, from another start.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from importlib import resources
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.repository import ROOT
from turboquant_rocm import SpecError, codebook_cache
from turboquant_rocm.codebook import distortion, lloyd_max, solve_codebook, stationarity_error
from turboquant_rocm.codebook_cache import COMMITTED, optimal_codebook, table_text

DIMENSIONS = (None, 2, 3, 4, 5, 17, 64, 80, 128, 256, 576)


def cosine_power(n: int, theta: float) -> float:
    """The integral of cos^n from 0 to theta: J_n = sin cos^(n-1) / n + (n-1) / n J_(n-2)."""
    total = theta if n % 2 == 0 else math.sin(theta)
    for k in range(2 + n % 2, n + 1, 2):
        total = math.sin(theta) * math.cos(theta) ** (k - 1) / k + (k - 1) / k * total
    return total


def cell(low: float, high: float, d: int | None) -> tuple[float, float]:
    """(probability, first moment) of [low, high]: closed forms."""
    if d is None:
        density = [math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in (low, high)]
        tails = [math.erf(x / math.sqrt(2)) / 2 for x in (low, high)]
        return tails[1] - tails[0], density[0] - density[1]
    total = 2 * cosine_power(d - 2, math.pi / 2)
    a, b = (math.asin(x) for x in (low, high))
    mass = cosine_power(d - 2, b) - cosine_power(d - 2, a)
    moment = (math.cos(a) ** (d - 1) - math.cos(b) ** (d - 1)) / (d - 1)
    return mass / total, moment / total


def cells(c: list[float], d: int | None) -> list[tuple[float, float]]:
    end = 40.0 if d is None else 1.0
    edges = [-end, *((a + b) / 2 for a, b in pairwise(c)), end]
    return [cell(low, high, d) for low, high in pairwise(edges)]


def lloyd(d: int | None, bits: int) -> np.ndarray:
    """Lloyd's iteration alone, to the end, from equal cells on 2 sigma."""
    sigma = 1.0 if d is None else d**-0.5
    c = [sigma * (2 * (i + 0.5) / 2**bits - 1) * (2.0 if d is None or d > 4 else 1.0) for i in range(2**bits)]
    for _ in range(5000):
        new = [moment / mass for mass, moment in cells(c, d)]
        moved = max(abs(a - b) for a, b in zip(new, c, strict=True))
        c = new
        if moved < 1e-15 * sigma:
            break
    return np.array(c)


def test_the_closed_forms_are_right():
    """Against facts known otherwise: all mass is 1, Archimedes' uniform marginal at d = 3, the arcsine law at d = 2."""
    for d in DIMENSIONS:
        assert cell(-40.0 if d is None else -1.0, 40.0 if d is None else 1.0, d)[0] == pytest.approx(
            1, abs=1e-14
        )
    assert cell(-0.2, 0.5, 3)[0] == pytest.approx(0.35, abs=1e-15)
    assert cell(0.0, 0.5, 2)[0] == pytest.approx(1 / 6, abs=1e-15)


@pytest.mark.parametrize("bits", range(1, 5))
@pytest.mark.parametrize("d", [None, 2, 5, 24])
def test_equal_to_another_solver(d: int | None, bits: int):
    sigma = 1.0 if d is None else d**-0.5
    assert np.abs(solve_codebook(d, bits) - lloyd(d, bits)).max() < 1e-11 * sigma


@pytest.mark.parametrize("bits", range(7))
@pytest.mark.parametrize("d", DIMENSIONS)
def test_stationary(d: int | None, bits: int):
    """Each centroid is the mean of its cell, with thresholds at the midpoints, by the closed forms."""
    c = solve_codebook(d, bits)
    sigma = 1.0 if d is None else d**-0.5
    means = np.array([moment / mass for mass, moment in cells(c.tolist(), d)])
    assert np.abs(c - means).max() < 1e-10 * sigma  # the closed forms cancel in small cells
    assert np.array_equal(c, -c[::-1])
    assert (np.diff(c) > 0).all()
    assert not c.flags.writeable
    assert stationarity_error(c, d) < 1e-12
    assert stationarity_error(c * 1.001, d) > 1e-6 or bits == 0


@pytest.mark.parametrize("bits", range(1, 5))
@pytest.mark.parametrize("d", [None, 3, 64])
def test_distortion_is_a_minimum(d: int | None, bits: int):
    c = solve_codebook(d, bits)
    best = distortion(c, d)
    closed = 1 - (1 if d is None else d) * sum(
        p * x * x for x, (p, _) in zip(c, cells(c.tolist(), d), strict=True)
    )
    assert best == pytest.approx(closed, abs=1e-12)
    rng = np.random.default_rng(bits)
    for _ in range(20):
        other = c + rng.normal(size=len(c)) * 0.02 * (c[-1] - c[-2])
        assert distortion(other, d) > best


def test_known_values():
    """Max (1960), table 1, for the Gaussian; equal cells for the uniform marginal of the sphere in three dimensions."""
    assert solve_codebook(None, 1) == pytest.approx(
        [-math.sqrt(2 / math.pi), math.sqrt(2 / math.pi)], abs=1e-14
    )
    assert solve_codebook(None, 2)[2:] == pytest.approx([0.4528, 1.510], abs=5e-4)
    assert solve_codebook(None, 3)[4:] == pytest.approx([0.2451, 0.7560, 1.344, 2.152], abs=5e-4)
    for bits, want in zip(range(1, 5), (0.3634, 0.1175, 0.03454, 0.009497), strict=True):
        assert distortion(solve_codebook(None, bits), None) == pytest.approx(want, rel=5e-4)
        assert distortion(solve_codebook(3, bits), 3) == pytest.approx(4.0**-bits, rel=1e-12)
        assert solve_codebook(3, bits) == pytest.approx((2 * np.arange(2**bits) + 1) / 2**bits - 1, abs=1e-14)


@pytest.mark.parametrize("bits", range(1, 5))
def test_beta_becomes_gaussian(bits: int):
    """The difference in sigma falls as 1 / d, and so does that of the distortions."""
    limit = solve_codebook(None, bits)
    gaps, losses = [], []
    for d in (64, 256, 1024, 4096):
        c = solve_codebook(d, bits)
        gaps.append(np.abs(c * math.sqrt(d) - limit).max())
        losses.append(distortion(limit, None) - distortion(c, d))
    for series in (gaps, losses):
        assert all(3.6 < a / b < 4.4 for a, b in pairwise(series)), series


@pytest.mark.parametrize("bits", range(1, 5))
def test_published_procedure_is_near_the_optimum(bits: int):
    """What the caches' codebook costs, and that it is another one."""
    best, published = solve_codebook(None, bits), lloyd_max(bits)
    assert 1e-13 < np.abs(best - published).max() < 2e-2
    assert 0 < distortion(published, None) / distortion(best, None) - 1 < 1e-3


@pytest.mark.parametrize(
    ("d", "bits", "field"),
    [(1, 2, "dimension"), (2**16 + 1, 2, "dimension"), (64.0, 2, "dimension"), (True, 2, "dimension"),
     (64, 7, "bits"), (64, -1, "bits"), (None, 2.0, "bits")],
)  # fmt: skip
@pytest.mark.parametrize("function", [solve_codebook, optimal_codebook])
def test_arguments_are_checked(function, d, bits, field):
    function(64, 2), function(None, 2)  # what is remembered for 64 does not let 64.0 in
    with pytest.raises(SpecError) as error:
        function(d, bits)
    assert error.value.field == field


# ---- the table and the cache ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An empty cache folder, and a process that remembers nothing."""
    monkeypatch.setenv("TURBOQUANT_ROCM_CACHE", str(tmp_path / "cache"))
    optimal_codebook.cache_clear()
    yield tmp_path / "cache"
    optimal_codebook.cache_clear()


def test_table_is_what_is_computed(folder: Path):
    """To regenerate it: python -m turboquant_rocm.codebook_cache > configs/codebooks.json"""
    table = json.loads(resources.files("turboquant_rocm.configs").joinpath("codebooks.json").read_text())
    fresh = json.loads(table_text())
    assert {name: len(v) for name, v in table["codebooks"].items()} == {
        f"{'gaussian' if d is None else f'd{d}'}_b{bits}": 2**bits
        for d in (None, 64, 128, 256, 576)
        for bits in range(1, 5)
    }
    for name, values in table["codebooks"].items():
        assert values == pytest.approx(fresh["codebooks"][name], rel=1e-13), (
            name
        )  # other machines' exp and log
    for d in COMMITTED:
        assert (
            optimal_codebook(d, 3).tolist() == table["codebooks"]["gaussian_b3" if d is None else f"d{d}_b3"]
        )
    assert not folder.exists(), "committed ones need no file"


def test_file_is_written_once_and_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    first = optimal_codebook(96, 3)
    assert [p.name for p in folder.iterdir()] == ["codebook_d96_b3.json"]
    assert np.array_equal(first, solve_codebook(96, 3))

    def fail(*_: object):
        raise AssertionError("computed again")

    optimal_codebook.cache_clear()
    monkeypatch.setattr(codebook_cache, "solve_codebook", fail)
    again = optimal_codebook(96, 3)
    assert np.array_equal(first, again)
    assert not again.flags.writeable


def damaged(text: str) -> dict[str, bytes]:
    data = json.loads(text)

    def other(**changes: object) -> bytes:
        return json.dumps({**data, **changes}).encode()

    c = data["centroids"]
    return {
        "empty": b"",
        "cut short": text.encode()[: len(text) // 2],
        "not UTF-8": b"\xff\xfe\x00",
        "a list": b"[]",
        "deep": b"[" * 100_000,
        "another version": other(version=2),
        "another dimension": other(dimension=97),
        "another number of bits": other(bits=2),
        "one too few": other(centroids=c[1:]),
        "texts": other(centroids=[str(x) for x in c]),
        "NaN": other(centroids=[math.nan] * len(c)),
        "infinite": other(centroids=[-math.inf, *c[1:-1], math.inf]),
        "descending": other(centroids=c[::-1]),
        "outside the sphere": other(centroids=[x * 10 for x in c]),
        "plausible": other(centroids=[x * 1.0001 for x in c]),
        "one sign off": other(centroids=[abs(x) for x in c]),
    }


@pytest.mark.parametrize("kind", damaged('{"centroids": [-0.5, 0.5]}'))
def test_damaged_file_is_replaced(folder: Path, caplog: pytest.LogCaptureFixture, kind: str):
    want = optimal_codebook(96, 3)
    path = folder / "codebook_d96_b3.json"
    good = path.read_text()
    path.write_bytes(damaged(good)[kind])
    optimal_codebook.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert np.array_equal(optimal_codebook(96, 3), want)
    assert str(path) in caplog.text
    assert path.read_text() == good


def test_without_a_writable_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file where the folder should be, which also stops root."""
    blocked = tmp_path / "file"
    blocked.write_text("mine")
    monkeypatch.setenv("TURBOQUANT_ROCM_CACHE", str(blocked))
    assert np.array_equal(optimal_codebook(96, 3), solve_codebook(96, 3))
    assert blocked.read_text() == "mine"


def test_failed_write_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert np.array_equal(optimal_codebook(96, 3), solve_codebook(96, 3))
    assert list(folder.iterdir()) == []


def test_without_a_home(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("TURBOQUANT_ROCM_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert np.array_equal(optimal_codebook(96, 3), solve_codebook(96, 3))


def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("TURBOQUANT_ROCM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert codebook_cache.cache_folder() == tmp_path / "turboquant_rocm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert codebook_cache.cache_folder() == tmp_path / ".cache" / "turboquant_rocm"


WRITER = """
import sys
from pathlib import Path
import numpy as np
from turboquant_rocm import codebook_cache
path, wrong, want = Path(sys.argv[1]), 0, codebook_cache.solve_codebook(96, 3)
for _ in range(150):
    codebook_cache._write(path, 96, 3, want)
    try:
        wrong += not np.array_equal(codebook_cache._parse(path.read_text(), 96, 3), want)
    except ValueError:
        wrong += 1
print(wrong)
"""


def test_concurrent_writers(tmp_path: Path):
    """Each process writes the file again and again and reads it in between: it is whole every time."""
    path = tmp_path / "codebook_d96_b3.json"
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=120)[0] for process in writers] == ["0\n"] * 3
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "temporary files are left"


def test_the_command_prints_the_table():
    done = subprocess.run(
        [sys.executable, "-m", "turboquant_rocm.codebook_cache"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == table_text()
