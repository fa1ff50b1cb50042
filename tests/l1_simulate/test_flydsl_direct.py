"""One split: the decode kernel writes output and lse itself, and nothing is reduced. Executed in the simulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("flydsl", reason="FlyDSL is not installed", exc_type=ImportError)
pytest.importorskip("triton", reason="Triton's linker stands in for ld.lld")
pytest.importorskip("tinygrad", reason="the simulator decodes with tinygrad's AMD tables")

from tests.l1_simulate.flydsl_helpers import make_case, run_ops
from tests.l1_simulate.test_flydsl import ARCHES, TOLERANCE, check, check_sinks


def kinds(runtime: Any) -> list[str]:
    """What was launched."""
    return [kind for kind, _ in runtime.launches]


@pytest.mark.parametrize("arch", [pytest.param("gfx942", marks=pytest.mark.slow), "gfx950"])
def test_one_split(arch: str):
    """No reduction; empty sequences give zeros and -inf; gaps of strided results stay as they are."""
    case = make_case([0, 1, 70], hk=2, gqa=2)
    out, lse, runtime = run_ops(case, arch, splits=1, spread=True)
    assert kinds(runtime) == ["prepare", "decode"]
    check(out, lse, case.expected(), TOLERANCE[torch.bfloat16])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_without_lse(arch: str):
    case = make_case([33, 130], hk=2, gqa=6, dtype=torch.float16)
    out, lse, runtime = run_ops(case, arch, splits=1, want_lse=False)
    assert kinds(runtime) == ["prepare", "decode"]
    assert (lse == -77.0).all()
    expected, expected_lse = case.expected()
    check(out, expected_lse, (expected, expected_lse), TOLERANCE[torch.float16])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("options", [{}, {"gqa": 4, "window": 40, "kind": "sliding"}, {"gqa": 16}])
def test_several_query_tokens(arch: str, options: dict[str, Any]):
    """Rows of padding stay as they are, and so do the gaps."""
    case = make_case([4, 130, 33, 64], query_lens=[4, 2, 1, 3], **options)
    out, lse, runtime = run_ops(case, arch, splits=1, padding=2, spread=True)
    assert kinds(runtime) == ["prepare", "decode"]
    check(out, lse, case.expected(), TOLERANCE[torch.bfloat16])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("logit", [None, 30.0, float("-inf")])
@pytest.mark.parametrize("query_lens", [None, [2, 1, 3]])
def test_sinks(arch: str, logit: float | None, query_lens: list[int] | None):
    case = make_case([70, 1, 33], hk=2, gqa=4, sinks=True, dtype=torch.float16, query_lens=query_lens)
    sinks = torch.linspace(-3, 3, 8) if logit is None else torch.full((8,), logit)
    out, lse, runtime = run_ops(case, arch, splits=1, sinks=sinks)
    assert kinds(runtime) == ["prepare", "decode"]
    check_sinks(out, lse, case, sinks, TOLERANCE[torch.float16])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_same_as_reduced(arch: str):
    """The same inputs through two splits and the reduction: equal but for the rounding of the merge."""
    case = make_case([129], gqa=8, dtype=torch.float16)
    alone, alone_lse, _ = run_ops(case, arch, splits=1)
    merged, merged_lse, runtime = run_ops(case, arch, splits=2)
    assert kinds(runtime) == ["prepare", "decode", "reduce"]
    assert (alone - merged).norm() <= 1e-3 * merged.norm()
    assert (alone_lse - merged_lse).abs().max() <= 1e-3
