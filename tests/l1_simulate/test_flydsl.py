"""FlyDSL's machine code, executed: the decode path of the backend against fp64 attention over the same bytes.

Bytes that nobody has stored are 0xFF (NaN as fp16), table entries past a sequence's end are -1 or 2**31 - 1, blocks are
shuffled, and all of the simulator's detectors are on.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("flydsl", reason="FlyDSL is not installed", exc_type=ImportError)
pytest.importorskip("triton", reason="Triton's linker stands in for ld.lld")
pytest.importorskip("tinygrad", reason="the simulator decodes with tinygrad's AMD tables")

from tests.l1_simulate.flydsl_helpers import LIMITS, Case, make_case, relative_error, run_ops, simulate_decode

ARCHES = ("gfx942", "gfx950")
TOLERANCE = {torch.bfloat16: 2.5e-3, torch.float16: 1.2e-3}
"""Relative L2 error of the output, its own rounding included. The kernel alone: PARTIAL."""
PARTIAL = 1e-3
LSE = 2e-2


def check(
    out: torch.Tensor,
    lse: torch.Tensor,
    want: tuple[torch.Tensor, torch.Tensor],
    tolerance: float,
    lse_by: float = LSE,
) -> None:
    """Output as a whole, each query head on its own at three times the tolerance, and lse."""
    expected, expected_lse = want
    assert torch.isfinite(out).all()
    assert relative_error(out, expected) <= tolerance
    norm = expected.norm(dim=-1)
    error = (out.double() - expected).norm(dim=-1)
    assert (error <= 3 * tolerance * norm).all(), (error / norm).max()
    seen = torch.isfinite(expected_lse)
    assert (torch.isfinite(lse) == seen).all()
    assert (lse[seen] - expected_lse[seen]).abs().max() <= lse_by


def check_sinks(
    out: torch.Tensor, lse: torch.Tensor, case: Case, sinks: torch.Tensor, tolerance: float
) -> None:
    """Output as a whole and lse; then the output of each head without its sink, in full.

    An error that all scores of a row share leaves a softmax as it is, and lse off by as much; next to a sink it shows
    in the output, times the sink's share. So heads are held to the tolerance after the sink's share, which lse tells,
    has been taken out. Where the sink takes all (a logit of 30), the output is below what fp16 resolves.
    """
    expected, expected_lse = case.expected(sinks=sinks)
    seen = torch.isfinite(expected_lse)
    assert (torch.isfinite(lse) == seen).all()
    assert (lse[seen] - expected_lse[seen]).abs().max() <= LSE
    if (sinks == 30.0).all():
        assert out.abs().max() <= expected.abs().max() + 1e-7
        return
    assert relative_error(out, expected) <= tolerance
    log_share = torch.where(seen, sinks - lse, 0.0).double()
    tokens = -torch.expm1(log_share)  # what the sink leaves
    alone = torch.where(seen[..., None], out.double() / tokens.clamp(min=1e-3)[..., None], 0.0)
    check(alone, torch.where(seen, lse + torch.log(tokens), lse), case.expected(), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("hk", [1, 2])
def test_lengths(arch: str, hk: int):
    """Lengths around tiles and blocks, and more waves than tiles."""
    case = make_case([0, 1, 15, 16, 17, 31, 32, 33, 97, 257], hk=hk)
    out, lse, _ = simulate_decode(case, arch, 3)
    check(out, lse, case.expected(), PARTIAL)


@pytest.mark.parametrize("arch", ARCHES)
def test_operations(arch: str):
    """Preparation, decode and reduction, with empty sequences, empty splits and padded table entries."""
    case = make_case([0, 1, 70], hk=2, gqa=2)
    out, lse, runtime = run_ops(case, arch, splits=2)
    check(out, lse, case.expected(), TOLERANCE[torch.bfloat16])
    assert [kind for kind, _ in runtime.launches] == ["prepare", "decode", "reduce"]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("gqa", [1, 4, 6, 12, 16])
def test_gqa(arch: str, gqa: int):
    case = make_case([130, 67], hk=2, gqa=gqa, dtype=torch.float16)
    out, lse, _ = simulate_decode(case, arch, 2)
    check(out, lse, case.expected(), PARTIAL)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_blocks(arch: str, block_size: int):
    case = make_case([263, 64, 128, 1], hk=2, block_size=block_size)
    out, lse, _ = simulate_decode(case, arch, 2)
    check(out, lse, case.expected(), PARTIAL)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("window", [1, 15, 16, 17, 33])
def test_window(arch: str, window: int):
    case = make_case([130, 65, 7, 16, 0], window=window, kind="sliding")
    out, lse, _ = simulate_decode(case, arch, 2)
    check(out, lse, case.expected(), PARTIAL)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_soft_cap(arch: str):
    case = make_case([130, 65], soft_cap=5.0, key_scale=4.0)
    out, lse, _ = simulate_decode(case, arch, 2)
    check(out, lse, case.expected(), 2 * PARTIAL)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("options", [{}, {"gqa": 4, "window": 40, "kind": "sliding"}, {"gqa": 16}])
def test_several_query_tokens(arch: str, options: dict[str, Any]):
    """Row j of q rows sees seq_len - q + j + 1 keys; rows of padding stay as they are."""
    case = make_case([4, 130, 33, 64], query_lens=[4, 2, 1, 3], **options)
    out, lse, _ = run_ops(case, arch, splits=2, padding=2)
    check(out, lse, case.expected(), TOLERANCE[torch.bfloat16])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("logit", [None, 30.0, float("-inf")])
def test_sinks(arch: str, logit: float | None):
    case = make_case([70, 0, 33], sinks=True, dtype=torch.float16)
    sinks = torch.linspace(-3, 3, 8) if logit is None else torch.full((8,), logit)
    out, lse, _ = run_ops(case, arch, splits=2, sinks=sinks)
    check_sinks(out, lse, case, sinks, TOLERANCE[torch.float16])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    ("key_scale", "value_scale"), [(6.0, 1.0), (1.0, 1e-4), (1.0, 1.5e4), (0.0, 1.0), (1.0, 0.0)]
)
def test_magnitudes(arch: str, key_scale: float, value_scale: float):
    """Peaked and flat softmax, tiny and huge value scales, all keys zero, all values zero."""
    case = make_case([130], key_scale=key_scale, value_scale=value_scale)
    out, lse, _ = simulate_decode(case, arch, 1)
    if value_scale == 0.0:
        assert (out == 0).all()
        return
    grown = max(1.0, key_scale / 1.5)  # errors of scores grow with the scores
    check(out, lse, case.expected(), PARTIAL * grown, LSE * grown)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_growing_scores(arch: str):
    """Tokens that beat all before them, again and again: the reference must follow, and nothing overflow."""
    case = make_case([160], gqa=1)
    oracle = case.oracle
    slots = (case.table[0, :10].long()[:, None] * 16 + torch.arange(16)).flatten()
    direction = case.query[0, 0].float()
    key = direction * (torch.arange(160.0) * 2.0)[:, None, None] / direction.norm()
    value = torch.randn((160, 1, 128), generator=torch.Generator().manual_seed(1))
    value[::7] = 0.25  # constant vectors: a scale of zero
    oracle.store(key, value, case.cache, slots)
    out, lse, _ = simulate_decode(case, arch, 1)
    check(out, lse, case.expected(), 5 * PARTIAL, 5 * LSE)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_padded_blocks(arch: str):
    """A server's larger page: the stride between blocks is not what a block holds."""
    case = make_case([70, 33], hk=2, block_stride=2 * 134 * 16 + 322)  # even is all that is promised
    out, lse, _ = simulate_decode(case, arch, 1)
    check(out, lse, case.expected(), PARTIAL)


BUDGETS = [  # 4 bits and GQA 8 in every run, the others with the slow tests
    pytest.param(arch, preset, gqa, marks=() if (preset, gqa) == ("4bit_nc", 8) else pytest.mark.slow)
    for arch in ARCHES
    for preset, limits in (("4bit_nc", LIMITS[arch]), ("k3v4_nc", LIMITS[arch]["k3v4"]))
    for gqa in limits["dynamic"]
]


@pytest.mark.parametrize(("arch", "preset", "gqa"), BUDGETS)
def test_instruction_budget(arch: str, preset: str, gqa: int, capsys: pytest.CaptureFixture[str]):
    """Executed lane instructions per element, block 16: the growth from 2,048 to 4,096 tokens."""
    limits = LIMITS[arch] if preset == "4bit_nc" else LIMITS[arch]["k3v4"]
    runs, conflicts = [], set()
    for tokens in (2048, 4096):
        case = make_case([tokens], gqa=gqa, preset=f"turboquant_{preset}")
        out, lse, result = simulate_decode(case, arch, 1, check="none")
        check(out, lse, case.expected(), PARTIAL)
        conflicts.add(result.counters.bank_conflict_cycles)  # only the merge at the end may have some
        runs.append(Counter(result.counters.instructions))
    assert len(conflicts) == 1
    growth = runs[1] - runs[0]
    per_element = growth.total() * 64 / (2048 * 256)
    whole = runs[1].total() * 64 / (4096 * 256)
    parts = ", ".join(f"{name} {count / 128:.1f}" for name, count in sorted(growth.items()))
    with capsys.disabled():
        print(
            f"\n{arch} {preset} GQA {gqa}: {per_element:.3f} per element, {whole:.3f} of the whole; "
            f"per 16 tokens: {parts}"
        )
    assert per_element <= limits["dynamic"][gqa] <= limits["goal"][gqa]
    assert whole <= limits["goal"][gqa], "start and merge included"


@pytest.mark.parametrize("arch", ARCHES)
def test_goals_are_the_ones_that_were_set(arch: str):
    """A budget raised above what bandwidth leaves room for is no budget; one far above what is measured neither."""
    goals = {"gfx950": {1: 3.2, 4: 3.2, 6: 3.2, 8: 2.6, 12: 3.2, 16: 3.2}, "gfx942": {8: 4.0}}[arch]
    assert LIMITS[arch]["goal"] == goals
    assert LIMITS[arch]["k3v4"]["goal"] == {8: {"gfx950": 2.27, "gfx942": 3.55}[arch]}
    for limits in (LIMITS[arch], LIMITS[arch]["k3v4"]):
        for gqa, limit in limits["dynamic"].items():
            assert limit <= min(limits["goal"][gqa], 1.1 * limits["static"])
    units, clock, bandwidth = {"gfx950": (256, 2.4e9, 8.0e12), "gfx942": (304, 2.1e9, 5.3e12)}[arch]
    for limits, token in ((LIMITS[arch], 134), (LIMITS[arch]["k3v4"], 118)):
        assert limits["simd_cycles"] == round(4 * 16 * token * units * clock / bandwidth)


class _CountingRuntime:
    """Counts specialisations; runs nothing."""

    def __init__(self) -> None:
        self.made: dict[Any, Any] = {}

    def compile(self, jobs: Any) -> None:
        for job in jobs:
            self.handle(*job)

    def handle(self, kind: str, config: Any) -> Any:
        return self.made.setdefault((kind, config), lambda *args: None)

    def stream(self, device: torch.device) -> int:
        return 0

    def compute_units(self, device: torch.device) -> int:
        return 256


def test_warmup_covers_every_shape():
    """After warmup, no batch, length, query length or lse in the range compiles or allocates; the count is bounded."""
    from turboquant_rocm.backends._flydsl.ops import FlydslOps
    from turboquant_rocm.backends._triton.workspace import Workspace
    from turboquant_rocm.dispatch import Decision
    from turboquant_rocm.presets import get_preset
    from turboquant_rocm.spec import Target

    case = make_case([40], hk=2)
    decision = Decision(
        case.layer, Target("amd", "gfx950"), get_preset("turboquant_4bit_nc"), 16, "flydsl", "soa"
    )
    runtime = _CountingRuntime()
    ops = FlydslOps(decision, case.layout, runtime=runtime)
    workspace = Workspace("cpu")
    count = ops.warmup(9, 4096, 4, device="cpu", workspace=workspace)
    # prepare; decode, single and multi, partial and direct; reduce, single and multi, with and without lse
    assert count == len(runtime.made) == 1 + 4 + 4
    nbytes = workspace.nbytes
    for batch in (1, 3, 9):
        for length in (1, 2, 4):
            for width in (1, 256):
                rows = batch * length
                query = torch.zeros((rows, 16, 128), dtype=torch.bfloat16)
                starts = None if length == 1 else torch.arange(0, rows + 1, length, dtype=torch.int32)
                table, lens = (
                    torch.zeros((batch, width), dtype=torch.int32),
                    torch.ones(batch, dtype=torch.int32),
                )
                for lse in (None, torch.zeros((rows, 16))):
                    ops.decode(
                        query,
                        case.cache,
                        table,
                        lens,
                        starts,
                        length,
                        0.1,
                        None,
                        query.clone(),
                        lse,
                        workspace,
                    )
    assert len(runtime.made) == count
    assert workspace.nbytes == nbytes
