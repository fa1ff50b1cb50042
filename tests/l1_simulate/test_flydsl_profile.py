"""The declared profile of the FlyDSL backends, executed: every GQA ratio and block size, features mixed at random.

Cases are drawn from the declarations, so that a wider one is tested without a change here; the backend's own launches
run in the simulator with all of its detectors, against fp64 attention over the same bytes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("flydsl", reason="FlyDSL is not installed", exc_type=ImportError)
pytest.importorskip("triton", reason="Triton's linker stands in for ld.lld")
pytest.importorskip("tinygrad", reason="the simulator decodes with tinygrad's AMD tables")

from tests.l1_simulate.flydsl_helpers import check_resources, make_case, relative_error, run_ops
from tests.l1_simulate.test_flydsl import ARCHES, TOLERANCE, check, check_sinks
from turboquant_rocm import Code
from turboquant_rocm.backends import get_backend
from turboquant_rocm.eligibility import AtMost, OneOf, Request
from turboquant_rocm.target import get_target

LENGTHS = (0, 1, 2, 7, 13, 16, 17, 31, 32, 33, 61, 64, 65, 97, 101, 127, 128, 129, 151)
PRESETS = {4: "turboquant_4bit_nc", 3: "turboquant_k3v4_nc"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def allowed(arch: str, code: Code) -> tuple[Any, ...]:
    """What the declaration allows."""
    (found,) = (r for r in get_backend(f"flydsl_{arch}").requires if r.code is code)
    if isinstance(found, AtMost):
        return tuple(range(found.low, found.limit + 1))
    assert isinstance(found, OneOf)
    return found.values


@dataclass(frozen=True)
class Drawn:
    """A call. options: of the case. splits 1: written directly. lse: asked for."""

    options: dict[str, Any]
    splits: int
    padding: int
    lse: bool


def drawn(arch: str, gqa: int) -> Drawn:
    """The call of a GQA ratio: everything else is random, block sizes, dtypes and key bits in turn."""
    rng = random.Random(f"{gqa}")
    block = allowed(arch, Code.BLOCK_SIZE)[gqa % 4]
    dtype = allowed(arch, Code.DTYPE)[gqa // 4 % 2]
    preset = PRESETS[allowed(arch, Code.KEY_BITS)[gqa // 3 % 2]]
    lens = [rng.choice(LENGTHS) for _ in range(rng.randint(1, 4))]
    options: dict[str, Any] = {
        "lens": lens, "hk": rng.randint(1, 3), "gqa": gqa, "block_size": block, "dtype": DTYPES[dtype], "seed": gqa,
        "preset": preset,
    }  # fmt: skip
    if rng.random() < 0.5:
        options["query_lens"] = [rng.randint(0, min(4, n)) for n in lens]
        options["query_lens"][0] = min(lens[0], 4) or 1
    if rng.random() < 0.4:
        options |= {"kind": "sliding", "window": rng.choice([1, block - 1, block, block + 1, 33, 47])}
    if rng.random() < 0.4:
        options["sinks"] = True
    if rng.random() < 0.3:
        options["soft_cap"] = 20.0
    return Drawn(options, rng.randint(1, 3), rng.randint(0, 2), rng.random() < 0.7)


EVERY = [(arch, gqa) for arch in ARCHES for gqa in allowed(arch, Code.GQA_RATIO)]
QUICK = {4, 12}
"""3-bit keys, sinks and a soft cap; several query tokens with a window, sinks, three splits and padding."""


@pytest.mark.parametrize(
    ("arch", "gqa"),
    [pytest.param(*x, marks=() if x[1] in QUICK else pytest.mark.slow) for x in EVERY],
)
def test_profile(arch: str, gqa: int):
    call = drawn(arch, gqa)
    case = make_case(**call.options)
    request = Request(case.layer, get_target(arch), case.layout.preset, call.options["block_size"])
    assert not get_backend(f"flydsl_{arch}").refusals(request)
    g = torch.Generator().manual_seed(gqa)
    sinks = torch.randn((case.layer.num_heads,), generator=g) if case.layer.sinks else None
    padding = call.padding if case.starts is not None else 0
    out, lse, runtime = run_ops(
        case, arch, splits=call.splits, sinks=sinks, padding=padding, spread=True, want_lse=call.lse
    )
    assert [kind for kind, _ in runtime.launches] == ["prepare", "decode", "reduce"][: 2 + (call.splits > 1)]
    for kernel in runtime.kernels:
        check_resources(kernel, arch)
    tolerance = TOLERANCE[case.query.dtype]
    if not call.lse:
        assert (lse == -77.0).all()
        assert relative_error(out, case.expected(sinks=sinks)[0]) <= tolerance
    elif sinks is not None:
        check_sinks(out, lse, case, sinks, tolerance)
    else:
        check(out, lse, case.expected(), tolerance)


def test_the_draw_reaches_every_part_of_the_profile():
    """Else a feature would be declared and never executed."""
    for arch in ARCHES:
        calls = [drawn(arch, gqa) for gqa in allowed(arch, Code.GQA_RATIO)]
        for code, name in ((Code.BLOCK_SIZE, "block_size"), (Code.DTYPE, "dtype")):
            values = allowed(arch, code)
            want = {DTYPES[v] for v in values} if name == "dtype" else set(values)
            assert {c.options[name] for c in calls} == want
        assert {c.options["preset"] for c in calls} == {
            PRESETS[bits] for bits in allowed(arch, Code.KEY_BITS)
        }
        for feature in ("query_lens", "window", "sinks", "soft_cap"):
            with_it = [c for c in calls if feature in c.options]
            assert len(with_it) >= 3, feature
            assert {c.splits == 1 for c in with_it} == {False, True}, feature
        assert {n for c in calls for n in c.options["lens"]} >= {0, 1}
        assert {q for c in calls for q in c.options.get("query_lens", [])} >= {0, 1, 2, 3, 4}
        assert {c.lse for c in calls} == {False, True}
