"""Optimal codebooks: from the committed table, else from a JSON file on disk, else computed and written there.

The table is ``configs/codebooks.json``; ``python -m turboquant_rocm.codebook_cache`` computes it afresh and prints it.
The folder is ``$TURBOQUANT_ROCM_CACHE``, else ``turboquant_rocm`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. A file counts
only if its numbers are the optimum of what it claims (:func:`codebook.stationarity_error`), so one that is damaged, cut
short or edited is replaced, with a warning. Files appear whole or not at all, whoever writes at the same time. A folder
that cannot be written costs the time to compute, and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from contextlib import suppress
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Final

import numpy as np

from .codebook import F64, MAX_BITS, MAX_DIMENSION, solve_codebook, stationarity_error
from .spec import SpecError, bounded_repr, checked_int

__all__ = ["COMMITTED", "cache_folder", "optimal_codebook", "table_text"]

VERSION: Final = 1
COMMITTED: Final = (None, 64, 128, 256, 576)
"""Dimensions of the committed table, at 1 to 4 bits. None is N(0, 1)."""

_TOLERANCE: Final = 1e-12  # of stationarity_error, in sigma
_log = logging.getLogger(__name__)


def _name(dimension: int | None) -> str:
    return "gaussian" if dimension is None else f"d{dimension}"


def _row(dimension: int | None, bits: int) -> str:
    return f"{_name(dimension)}_b{bits}"


def table_text() -> str:
    """The text of ``configs/codebooks.json``, computed: every committed codebook, with shortest exact decimals."""
    rows = {
        _row(d, bits): [float(c) for c in solve_codebook(d, bits)] for d in COMMITTED for bits in range(1, 5)
    }
    lines = ",\n".join(f'    "{name}": {json.dumps(values)}' for name, values in rows.items())
    return f'{{\n  "version": {VERSION},\n  "codebooks": {{\n{lines}\n  }}\n}}\n'


def cache_folder() -> Path:
    """Where files are, or would be; it need not exist. RuntimeError if there is neither a variable nor a home."""
    if own := os.environ.get("TURBOQUANT_ROCM_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "turboquant_rocm"


@cache
def _committed() -> dict[str, F64]:
    text = resources.files("turboquant_rocm.configs").joinpath("codebooks.json").read_text(encoding="utf-8")
    data = json.loads(text)
    if data["version"] != VERSION:
        raise SpecError("codebooks.json version", data["version"], str(VERSION))
    return {name: np.array(values) for name, values in data["codebooks"].items()}


def _parse(text: str, dimension: int | None, bits: int) -> F64:
    """The codebook in a file's text; ValueError, which says why, if it is not the one asked for or not optimal."""
    data = json.loads(text)
    head = {"version": VERSION, "dimension": dimension, "bits": bits}
    if not isinstance(data, dict) or {name: data.get(name) for name in head} != head:
        raise ValueError(f"not the codebook of {head}")
    values = data.get("centroids")
    if not isinstance(values, list) or len(values) != 2**bits or not all(type(v) is float for v in values):
        raise ValueError(f"centroids={bounded_repr(values)} (wants {2**bits} numbers)")
    codebook = np.array(values)
    limit = np.inf if dimension is None else 1.0
    if not ((np.abs(codebook) < limit).all() and (np.diff(codebook) > 0).all()):
        raise ValueError("centroids are not ascending or not inside the sphere")
    if (
        not np.array_equal(codebook, -codebook[::-1])
        or not stationarity_error(codebook, dimension) < _TOLERANCE
    ):
        raise ValueError("centroids are not the optimum")
    return codebook


def _read(path: Path, dimension: int | None, bits: int) -> F64 | None:
    try:
        return _parse(path.read_text(encoding="utf-8"), dimension, bits)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            _log.warning("%s cannot be read, and the codebook is computed: %s", path, error)
    except (ValueError, RecursionError) as error:  # bad JSON and bad UTF-8 are ValueErrors
        _log.warning("%s is damaged and is computed again: %s", path, error)
    return None


def _write(path: Path, dimension: int | None, bits: int, codebook: F64) -> None:
    data = {"version": VERSION, "dimension": dimension, "bits": bits, "centroids": codebook.tolist()}
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=path.stem, suffix=".tmp", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(data) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        _log.info("the codebook is not kept on disk: %s", error)
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)


@lru_cache(maxsize=None, typed=True)  # 64.0 is an error, also after 64
def optimal_codebook(dimension: int | None, bits: int) -> F64:
    """Optimal centroids [2**bits] float64, read-only; as ``codebook.solve_codebook``, kept across processes.

    dimension: 2 to 2**16, of unit vectors; None is N(0, 1). bits: 0 to 6.
    """
    if dimension is not None:
        dimension = checked_int("dimension", dimension, 2, MAX_DIMENSION)
    bits = checked_int("bits", bits, 0, MAX_BITS)
    codebook = _committed().get(_row(dimension, bits))
    if codebook is None:
        try:
            path = cache_folder() / f"codebook_{_row(dimension, bits)}.json"
        except RuntimeError:  # no home
            return solve_codebook(dimension, bits)
        codebook = _read(path, dimension, bits)
        if codebook is None:
            codebook = solve_codebook(dimension, bits)
            _write(path, dimension, bits, codebook)
    codebook.setflags(write=False)
    return codebook


if __name__ == "__main__":
    print(table_text(), end="")
