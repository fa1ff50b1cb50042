"""validate_paper: everything holds, and each check fails when what it is about is broken on purpose."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from turboquant_rocm import SpecError, paper, validate_paper
from turboquant_rocm.accuracy import Tensors, load_npz
from turboquant_rocm.backends._torch import reference
from turboquant_rocm.codebook import lloyd_max
from turboquant_rocm.paper import Row, Settings
from turboquant_rocm.quantizers import TurboQuantMSE, TurboQuantProd

RESOLUTION_FAULT = "too few samples"


@pytest.fixture(autouse=True)
def own_codebooks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TURBOQUANT_ROCM_CACHE", str(tmp_path_factory.getbasetemp() / "paper_codebooks"))
    paper._all_products.cache_clear()
    yield
    paper._all_products.cache_clear()


@pytest.fixture(scope="module")
def real() -> tuple[Tensors, ...]:
    return tuple(load_npz(validate_paper.BUNDLED))


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bit widths and fewer seeds; what is left still resolves a few per cent."""
    monkeypatch.setattr(paper, "BITS", (1, 3))
    monkeypatch.setattr(paper, "_SEEDS", 200)
    monkeypatch.setattr(paper, "_ROTATIONS", 64)


def broken(rows: list[Row], check: str) -> list[Row]:
    """Rows of ``check`` with a fault other than too few samples."""
    return [r for r in rows if r.check == check and any(RESOLUTION_FAULT not in fault for fault in r.faults)]


# ---- the judgement of a row ---------------------------------------------------------------------------------------


def row(measured: float, tolerance: float = 0.01, **more: Any) -> Row:
    return Row("check", "subject", 64, 2, measured, tolerance, 100, **more)


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (row(1.0, predicted=1.02), "prediction"),
        (row(1.0, predicted=0.98), "prediction"),
        (row(1.0, low=1.02), "below the bound"),
        (row(1.0, high=0.98), "above the bound"),
        (row(1.0, 0.3, predicted=1.0), RESOLUTION_FAULT),
        (row(math.nan, predicted=1.0), "finite"),
        (row(1.0, math.inf, predicted=1.0), "finite"),
    ],
)
def test_a_row_that_fails(bad: Row, fault: str):
    assert not bad.ok
    assert fault in " ".join(bad.faults)


def test_a_row_that_holds():
    assert row(1.0, predicted=1.005, low=0.5, high=1.5).ok
    assert row(1.0, predicted=1.5, exact=False, low=0.5, high=1.5).ok
    assert row(1.0, low=1.005, high=2.0).ok, "within the tolerance"


# ---- everything holds ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_everything_holds(real: tuple[Tensors, ...]):
    """As the command runs it."""
    rows = paper.run_checks(Settings(0, real))
    assert not [(r, r.faults) for r in rows if not r.ok]
    assert {r.bits for r in rows if r.check in ("recall@16", "variance", "bias")} == {1, 2, 3, 4}


def test_checks_on_random_vectors_hold(monkeypatch: pytest.MonkeyPatch):
    """At two bit widths of the sketches."""
    small(monkeypatch)
    rows = paper.run_checks(Settings(), [name for name in paper.CHECKS if name not in paper.ABOUT_REAL_KEYS])
    assert not [(r, r.faults) for r in rows if not r.ok]
    subjects = {(r.check, r.bits) for r in rows}
    for check in ("constants", "distortion", "bias", "variance", "product error", "decay in d"):
        assert {(check, bits) for bits in (1, 3)} <= subjects, check
    assert {("logit shrinkage", 3), ("logit shrinkage", 4)} <= subjects


def test_checks_on_real_keys_hold(real: tuple[Tensors, ...], monkeypatch: pytest.MonkeyPatch):
    """At two bit widths; the command runs all four."""
    small(monkeypatch)
    rows = paper.run_checks(Settings(0, real), paper.ABOUT_REAL_KEYS)
    assert not [(r, r.faults) for r in rows if not r.ok]
    for check in ("score error", "recall@16", "rank correlation"):
        found = {(r.subject, r.bits) for r in rows if r.check == check}
        assert {
            (f"{layer} {kind}", bits)
            for layer in ("l0", "l14")
            for kind in ("mse", "prod")
            for bits in (1, 3)
        } <= found


def test_without_keys_there_is_an_error_and_no_empty_success():
    with pytest.raises(SpecError, match="tensors"):
        paper.run_checks(Settings(), ["real-keys"])


def test_tokens_without_a_direction_are_left_out(real: tuple[Tensors, ...]):
    whole = real[0]
    key = whole.key.clone()
    key[3, 1] = 0.0
    key[5, 0, 7] = math.nan
    scores = paper._scores(Tensors("x", whole.query, key, whole.value))
    assert scores.key.shape[1] == len(key) - 2
    assert bool(torch.isfinite(scores.exact).all())
    with pytest.raises(SpecError, match="keys of x"):
        paper._scores(Tensors("x", whole.query, torch.zeros_like(key), whole.value))


# ---- mutants ------------------------------------------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]


def _scaled_codebook(factor: float) -> Patch:
    plain = TurboQuantMSE._centroids
    return lambda m: m.setattr(TurboQuantMSE, "_centroids", lambda self: plain(self) * factor)


def _other_bits(change: Callable[[int], int]) -> Patch:
    plain = TurboQuantMSE.__init__

    def init(self: TurboQuantMSE, dimension: int, bits: int, **more: Any) -> None:
        plain(self, dimension, change(bits), **more)

    return lambda m: m.setattr(TurboQuantMSE, "__init__", init)


def _sketch(change: Callable[[Any], Any]) -> Patch:
    plain = TurboQuantProd.__init__

    def init(self: TurboQuantProd, *args: Any, **more: Any) -> None:
        plain(self, *args, **more)
        self.sketch = change(self.sketch.copy())

    return lambda m: m.setattr(TurboQuantProd, "__init__", init)


def _half_of_the_rows(sketch: Any) -> Any:
    """Unbiased still, with twice the variance."""
    sketch[len(sketch) // 2 :] = sketch[: len(sketch) // 2]
    return sketch


def _half_of_the_rows_at_128(sketch: Any) -> Any:
    return _half_of_the_rows(sketch) if len(sketch) == 128 else sketch


def _scale(factor: float) -> Patch:
    plain = TurboQuantProd.__init__

    def init(self: TurboQuantProd, *args: Any, **more: Any) -> None:
        plain(self, *args, **more)
        self.scale *= factor

    return lambda m: m.setattr(TurboQuantProd, "__init__", init)


def _signs_after_the_norm(m: pytest.MonkeyPatch) -> None:
    """Signs of the sketch of u in place of those of the residual."""
    plain = TurboQuantProd.quantize

    def quantize(self: TurboQuantProd, x: torch.Tensor) -> Any:
        codes = plain(self, x)
        object.__setattr__(codes, "signs", x @ torch.from_numpy(self.sketch.copy()).T >= 0)
        return codes

    m.setattr(TurboQuantProd, "quantize", quantize)


def _norm_correction_of_mse(m: pytest.MonkeyPatch) -> None:
    plain = TurboQuantMSE.inner_product

    def inner_product(self: TurboQuantMSE, query: torch.Tensor, codes: Any) -> torch.Tensor:
        c = torch.from_numpy(self.centroids.copy())[codes.indices.long()]
        return plain(self, query, codes) / c.norm(dim=-1)

    m.setattr(TurboQuantMSE, "inner_product", inner_product)


def _not_rotated_back(m: pytest.MonkeyPatch) -> None:
    m.setattr(TurboQuantMSE, "rotate_back", lambda self, y: y)


def _stored_codes_lose_a_bit(m: pytest.MonkeyPatch) -> None:
    plain = reference.pack
    m.setattr(reference, "pack", lambda codes, bits: plain(codes & ~1, bits))


def _unfolded(m: pytest.MonkeyPatch) -> None:
    m.setattr(
        reference.ReferenceOps, "_centroid_norm", lambda self, codes, d, bits: torch.ones(codes.shape[:-1])
    )


def _wrong_table(m: pytest.MonkeyPatch) -> None:
    m.setattr(paper, "optimal_codebook", lambda d, bits: lloyd_max(bits) * 1.05)


MUTANTS: dict[str, tuple[str, str, Patch]] = {
    "codebook of N(0, 1) 5 % too wide": ("constants", "constants", _wrong_table),
    "codebook 5 % too wide": ("distortion", "distortion", _scaled_codebook(1.05)),
    "a bit lost": ("distortion", "distortion", _other_bits(lambda bits: bits - 1)),
    "a bit smuggled in": ("distortion", "distortion", _other_bits(lambda bits: bits + 1)),
    "mse with norm correction": ("bias", "bias", _norm_correction_of_mse),
    "QJL constant 2 % too large": ("bias", "bias", _scale(1.02)),
    "QJL constant inverted": ("bias", "bias", _scale(2 / math.pi)),
    "signs of another vector": ("bias", "bias", _signs_after_the_norm),
    "half a sketch, variance": ("variance", "variance", _sketch(_half_of_the_rows)),
    "half a sketch, random queries": ("product-error", "product error", _sketch(_half_of_the_rows)),
    "codebook 30 % too wide, products": ("product-error", "product error", _scaled_codebook(1.3)),
    "bits above 2 do nothing": ("decay", "decay in b", _other_bits(lambda bits: min(bits, 2))),
    "sketch of 64 rows at any d": ("decay", "decay in d", _sketch(_half_of_the_rows_at_128)),
    "codebook 15 % too wide, real keys": ("real-keys", "distortion", _scaled_codebook(1.15)),
    "codebook 30 % too wide, real scores": ("real-keys", "score error", _scaled_codebook(1.3)),
    "half a sketch, real scores": ("real-keys", "score error", _sketch(_half_of_the_rows)),
    "a bit lost, recall": ("real-keys", "recall@16", _other_bits(lambda bits: max(bits - 1, 0))),
    "a bit lost, ranks": ("real-keys", "rank correlation", _other_bits(lambda bits: max(bits - 1, 0))),
    "not rotated back, recall": ("real-keys", "recall@16", _not_rotated_back),
    "no norm correction in the store": ("norm-correction", "logit shrinkage", _unfolded),
    "stored codes lose a bit, recall": ("stored-rankings", "recall@16", _stored_codes_lose_a_bit),
    "stored codes lose a bit, ranks": ("stored-rankings", "rank correlation", _stored_codes_lose_a_bit),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(name: str, real: tuple[Tensors, ...], monkeypatch: pytest.MonkeyPatch):
    check, rows_of, patch = MUTANTS[name]
    small(monkeypatch)
    if check == "real-keys":
        monkeypatch.setattr(paper, "BITS", (3,))
        monkeypatch.setattr(paper, "_ROTATIONS", 32)
    settings = Settings(0, real[:1])
    patch(monkeypatch)
    rows = paper.run_checks(settings, [check])
    assert broken(rows, rows_of), f"{name}: no row of {rows_of} is broken"


def test_every_check_has_a_mutant():
    assert {check for check, _, _ in MUTANTS.values()} == set(paper.CHECKS)


# ---- the command line ---------------------------------------------------------------------------------------------


def test_names_of_the_command_are_those_of_the_checks():
    assert tuple(paper.CHECKS) == validate_paper.CHECK_NAMES


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Any):
    out = tmp_path / "rows.json"
    assert validate_paper.main(["--check", "constants", "--check", "distortion", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "measured" in printed and "0.3634" in printed
    data = json.loads(out.read_text())
    assert {r["check"] for r in data["rows"]} == {"constants", "distortion"}
    assert all(r["ok"] for r in data["rows"])


def test_command_fails_when_a_bound_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    _other_bits(lambda bits: bits - 1)(monkeypatch)
    assert validate_paper.main(["--check", "distortion", "--no-real-keys"]) == 1
    assert "above the bound" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "nothing.npz"], "nothing.npz"),
        (["--no-real-keys", "--check", "real-keys"], "--check"),
        (["--json", "/nothing/here.json"], "--json"),
        (["--plot", "/nothing/here.png"], "--plot"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert validate_paper.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_an_installation_without_the_bundled_keys_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
):
    monkeypatch.setattr(validate_paper, "BUNDLED", tmp_path / "none.npz")
    assert validate_paper.main(["--check", "stored-rankings"]) == 2
    assert "--no-real-keys" in capsys.readouterr().err


def test_plot(tmp_path: Any):
    pytest.importorskip("matplotlib")
    rows = paper.run_checks(Settings(), ["constants"])
    validate_paper.write_png(rows, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_no_matplotlib_is_an_error_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(paper, "run_checks", lambda *a: pytest.fail("measured"))
    assert validate_paper.main(["--plot", str(tmp_path / "a.png")]) == 2
    assert "matplotlib" in capsys.readouterr().err


def test_help_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from turboquant_rocm.validate_paper import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "--no-real-keys" in done.stdout, done.stderr


# ---- the comparison -----------------------------------------------------------------------------------------------


def test_comparison(real: tuple[Tensors, ...], capsys: pytest.CaptureFixture[str]):
    """At equal bytes codes with norm correction beat codes with a sketch, which is what docs/algorithms.md says."""
    from turboquant_rocm.comparison import compare

    for tensors in real:
        rows = {r.quantizer: r for r in compare(tensors)}
        for sketch, plain in (
            ("prod_k4v4", "4bit_nc, values in groups of 32"),
            ("prod_k3v4", "k3v4_nc, values in groups of 32"),
            ("prod_k3v2", "3-bit codes nc, 2-bit values in groups of 32"),
        ):
            a, b = rows[sketch], rows[plain]
            assert a.bytes == b.bytes + 2, "the norm of the residual"
            assert a.key_nmse > 4 * b.key_nmse and a.kl > 2 * b.kl
            assert a.rank_correlation < b.rank_correlation and a.output > b.output
        assert rows["FP8 keys and values"].key_nmse < 0.001 < rows["4bit_nc"].key_nmse
        assert rows["4bit_nc"].bytes == 70 and rows["INT4 per token and head"].bytes == 72
    assert validate_paper.main(["--compare"]) == 0
    out = capsys.readouterr().out
    assert out.count("| prod_k3v2 | 52 |") == 2
