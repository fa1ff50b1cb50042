"""Store and dequantise, compiled for every GPU: no spills, no scratch, LDS under the limit, words where possible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases import layer_spec
from turboquant_rocm import Decision, SpecError, Target, bind, get_preset, make_layout
from turboquant_rocm.backends.triton_aos import ARCHES
from turboquant_rocm.target import get_target

triton = pytest.importorskip("triton", reason="nothing to compile with")

TUNED = ("gfx942", "gfx950", "sm_80", "sm_90")


def table(arch: str, *arguments: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.l1_compile.compile_store", arch, *arguments]
    run = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def check(rows: list[dict[str, Any]], record: Callable[..., None]) -> None:
    columns = list(rows[0])
    print("\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(str(row[c]) for c in columns) + " |")
    for row in rows:
        name = f"{row['kernel']}-{row['preset']}-{row['layout']}-D{row['head_size']}"
        knobs = "" if row["knobs"] == "off" else f"+{row['knobs']}"
        numbers = {what: row[what] for what in ("registers", "spills", "scratch", "lds")}
        record(row["arch"], name + knobs, **numbers)
        assert row["spills"] == row["scratch"] == 0, row
        assert row["lds"] <= get_target(row["arch"]).lds_bytes, row
        assert row["wide_loads"] > 0, row
        if row["kernel"] == "dequantise" or row["granule"] == 4:
            assert row["wide_stores"] > 0, row


@pytest.mark.parametrize("arch", TUNED)
def test_representative(arch, record_kernel):
    check(table(arch), record_kernel)


@pytest.mark.parametrize("arch", sorted({*ARCHES} - {*TUNED}))
def test_every_declared_architecture(arch, record_kernel):
    check(table(arch, "--few"), record_kernel)


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="interpreted kernels have one tile everywhere")
@pytest.mark.parametrize("layout", ["aos", "soa"])
def test_tiles_are_those_of_the_target(layout: str):
    """A decision for another vendor's GPU launches that vendor's tile, whatever this build of torch is for."""
    from turboquant_rocm.backends._triton.store import Store, tile_rows

    rows = {}
    for vendor, arch in (("amd", "gfx942"), ("amd", "gfx950"), ("nvidia", "sm_90")):
        layer, preset = layer_spec(128, 2, 4), get_preset("4bit_nc")
        bound = bind(Decision(layer, Target(vendor, arch), preset, 16, f"triton_{layout}", layout))
        rows[arch] = bound.ops._store.rows
        assert bound.ops._dequantize.rows == rows[arch] == tile_rows(bound.layout, vendor)
    assert rows["gfx942"] == rows["gfx950"] < rows["sm_90"]
    with pytest.raises(SpecError, match=r"target vendor='cpu' \(wants nvidia or amd"):
        Store(make_layout(layout, "4bit_nc", 128, 2, 16), "cpu")


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("arch", TUNED)
def test_all(arch, record_kernel):
    rows = table(arch, "--all")
    kernels = 2 * 2 if arch.startswith("gfx") else 3  # with knobs, or with tiles for few rows
    assert len(rows) == 4 * 2 * 7 * kernels
    check(rows, record_kernel)
