"""The launchers that FlyDSL makes, called as on a GPU: a stub answers for HIP, the simulator runs what is launched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flydsl", reason="FlyDSL is not installed", exc_type=ImportError)
pytest.importorskip("triton", reason="Triton's linker stands in for ld.lld")
pytest.importorskip("tinygrad", reason="the simulator decodes with tinygrad's AMD tables")

from ci.hip_stub import compiler

MICROSECONDS = 15.0
"""Host time of a decode call, all of its launches included: the fastest quarter of a thousand calls."""


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="no C compiler to build the HIP stub with")
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_launch(arch: str, tmp_path: Path):
    run = subprocess.run(
        [sys.executable, "-m", "tests.l1_simulate.flydsl_launch", arch, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.strip().splitlines()[-1])
    print(found)
    assert found["streams"] == [77], "launched on the stream that the runtime names"
    for route, launches in (("reduced", 3), ("direct", 2)):
        got = found["routes"][route]
        assert got["error"] <= 2.5e-3
        assert got["launches"] == launches
        assert got["microseconds"] <= MICROSECONDS, route
