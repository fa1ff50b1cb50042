"""The FlyDSL and the Triton SoA backend over the same cache bytes and queries, both executed in the simulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("flydsl", reason="FlyDSL is not installed", exc_type=ImportError)
pytest.importorskip("triton", reason="the other backend is in Triton")
pytest.importorskip("tinygrad", reason="the simulator decodes with tinygrad's AMD tables")

from ci.cdna_sim.launcher import Launch, simulated_launches
from tests.l1_simulate.flydsl_helpers import Case, make_case, relative_error, run_ops
from tests.l1_simulate.test_flydsl import ARCHES, LSE, TOLERANCE
from turboquant_rocm import Decision, Target, bind
from turboquant_rocm.backends import get_backend

BETWEEN = 2 * TOLERANCE[torch.bfloat16]
"""Relative L2 between the two: each may be off by its own tolerance."""


def triton_decode(
    case: Case, arch: str, sinks: torch.Tensor | None, *, splits: int = 2, checks: Any = "all"
) -> tuple[torch.Tensor, torch.Tensor, list[Launch]]:
    """Output, lse and launches of triton_soa."""
    decision = Decision(
        case.layer,
        Target("amd", arch),
        case.layout.preset,
        case.layout.block_size,
        "triton_soa",
        "soa",
    )
    bound = bind(decision, checks="shapes", splits=splits)
    with simulated_launches(arch, check=checks) as log:
        out, lse = bound.decode(
            case.query, bound.wrap(case.cache), case.table, case.lens, case.starts,
            max_query_len=case.max_query_len, sinks=sinks, return_lse=True,
        )  # fmt: skip
    assert "decode" in " ".join(launch.name for launch in log), "nothing was simulated"
    return out, lse, log


CASES: dict[str, dict[str, Any]] = {
    "published": {"lens": [0, 1, 70], "hk": 1},
    "gqa-6-block-32": {"lens": [97, 33], "hk": 2, "gqa": 6, "block_size": 32},
    "k3v4": {"lens": [97, 33], "hk": 2, "preset": "turboquant_k3v4_nc"},
    "window": {"lens": [130, 16], "window": 33, "kind": "sliding"},
    "soft-cap": {"lens": [70], "soft_cap": 20.0},
    "several-tokens": {"lens": [4, 70, 33], "query_lens": [4, 2, 1]},
    "sinks": {"lens": [70, 33], "sinks": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("arch", ARCHES)
def test_backends_agree(arch: str, name: str):
    case = make_case(**CASES[name])
    sinks = torch.linspace(-1, 1, case.layer.num_heads) if case.layer.sinks else None
    theirs, their_lse, _ = triton_decode(case, arch, sinks)
    ours, our_lse, _ = run_ops(case, arch, splits=2, sinks=sinks)
    expected, _ = case.expected(sinks=sinks)
    between = relative_error(ours, theirs.double())
    errors = relative_error(ours, expected), relative_error(theirs, expected)
    print(
        f"{arch} {name}: rel-L2 {between:.2e} between them; to fp64: FlyDSL {errors[0]:.2e}, Triton {errors[1]:.2e}"
    )
    assert between <= BETWEEN
    assert errors[0] <= TOLERANCE[torch.bfloat16]
    seen = torch.isfinite(their_lse)
    assert (torch.isfinite(our_lse) == seen).all()
    assert (our_lse[seen] - their_lse[seen]).abs().max() <= LSE


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_priorities_are_in_the_order_of_the_counts(arch: str, capsys: pytest.CaptureFixture[str]):
    """Executed lane instructions of decode per dequantised element, GQA 8, block 16: growth from 256 to 768 tokens."""
    counts: dict[str, list[int]] = {f"flydsl_{arch}": [], "triton_soa": []}
    for tokens in (256, 768):
        case = make_case([tokens])
        _, _, runtime = run_ops(case, arch, splits=1, check="none")
        _, _, log = triton_decode(case, arch, None, splits=1, checks="none")
        ran = {
            f"flydsl_{arch}": [(kind, result.counters) for kind, result in runtime.launches],
            "triton_soa": [(launch.name, launch.counters) for launch in log],
        }
        for backend, launches in ran.items():
            ((_, counters),) = [launch for launch in launches if "decode" in launch[0]]
            counts[backend].append(sum(counters.instructions.values()))
    per_element = {name: (after - before) * 64 / (512 * 256) for name, (before, after) in counts.items()}
    with capsys.disabled():
        print(f"\n{arch}: " + ", ".join(f"{name} {count:.2f}" for name, count in per_element.items()))
    by_count = sorted(per_element, key=lambda name: per_element[name])
    assert by_count == sorted(per_element, key=lambda name: -get_backend(name).priority)
