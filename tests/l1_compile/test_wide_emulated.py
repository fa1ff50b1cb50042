"""backends/_triton/wide.py executed without a GPU: its PTX for sm_90 in an emulator, from bound.decode on, against the
bar of tests/decode_checks.py. Every case also fails where a program touches a byte outside its tensors, where the order
of two accesses to shared memory is left open, or where it overlaps with the kernel before it too early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

import torch  # noqa: E402

from turboquant_rocm.backends._triton import ops  # noqa: E402

if ops.wide is None:
    pytest.skip("this Triton's Gluon is missing or another one", allow_module_level=True)
try:
    assert triton.knobs.nvidia.ptxas.path
except RuntimeError as error:
    pytest.skip(f"nothing assembles PTX here: {error}", allow_module_level=True)

from tests.decode_checks import (  # noqa: E402
    Case,
    Config,
    Setup,
    check_a_value_that_few_see,
    compare,
    decode,
    set_up,
    store_again,
)
from tests.ptx_emulator import AccessError, Program, RaceError, UnknownInstruction  # noqa: E402
from tests.wide_harness import COMPUTE_UNITS, Emulation, emulated  # noqa: E402
from turboquant_rocm.target import get_target  # noqa: E402

SM_90 = get_target("sm_90")
Change = Callable[[Program], Program]


def _config(group: int, block_size: int, most_queries: int, heads: int = 1, **more) -> Config:
    return Config("4bit_nc", "soa", 128, heads, group, block_size, most_queries=most_queries, **more)


def _set_up(config: Config, case: Case) -> Setup:
    setup = set_up(config, case, "cpu", SM_90, tuning={"wide_from": 16, "wide_work": 0})
    setup.bound.checks = "shapes"
    return setup


def _run(
    setup: Setup, case: Case, compute_units: int = COMPUTE_UNITS
) -> tuple[torch.Tensor, torch.Tensor, Emulation]:
    with emulated(compute_units=compute_units) as emulation:
        out, lse = decode(setup, case)
    assert emulation.blocks, "wide.py did not run"
    return out, lse, emulation


# ---- right numbers -----------------------------------------------------------------------------------------

CASES = {
    "one split": (_config(8, 16, 4, heads=2), Case((300, 70, 3, 0), (4, 3, 4, 2), splits=1)),
    "16 columns": (
        _config(16, 16, 1, window=True, sinks=True), Case((200, 9, 1, 0), window=33, splits=1),
    ),
    "32 heads": (_config(32, 16, 1, sinks=True), Case((200, 9, 1, 0), splits=2)),
    "splits": (_config(8, 48, 8, window=True), Case((500, 40, 0, 130), (8, 3, 4, 1), splits=3, window=100)),
    "soft cap": (_config(5, 528, 7, soft_cap=30.0), Case((600, 7, 2, 0), (7, 7, 4, 1), splits=2)),
    "one head": (
        _config(1, 48, 40, heads=2, window=True, soft_cap=30.0),
        Case((200, 9, 0), (40, 12, 3), splits=1, window=20),
    ),
    "padding": (
        _config(5, 16, 16, padding=16, window=True, sinks=True),
        Case((200, 9, 0), (16, 12, 3), splits=2, window=77, spare_rows=3),
    ),
    "fewer keys than queries": (
        _config(8, 48, 8, sinks=True), Case((3, 1, 0, 5), (8, 8, 8, 6), splits=1, spare_rows=3),
    ),
    "window of one": (_config(8, 48, 4, window=True), Case((150, 49, 48), (4, 4, 2), splits=1, window=1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    config, case = CASES[name]
    setup = _set_up(config, case)
    out, lse, emulation = _run(setup, case)
    compare(setup, config, case, out, lse)
    (constants,) = emulation.constants
    assert constants["DIRECT"] == (case.splits == 1) and not constants["CUT"]
    assert constants["N"] == (16 if name == "16 columns" else 32)


@pytest.mark.parametrize("compute_units", [1, COMPUTE_UNITS], ids=["skewed", "equal"])
@pytest.mark.parametrize("window", [None, 200])
def test_a_batch_that_is_cut(window, compute_units):
    """Pieces of one size, or of several where not all run at once."""
    config = _config(8, 48, 4, window=window is not None)
    case = Case((900, 40, 0, 130), (4, 4, 4, 4), splits=4, cut=True, window=window)
    setup = _set_up(config, case)
    out, lse, emulation = _run(setup, case, compute_units)
    compare(setup, config, case, out, lse)
    (constants,) = emulation.constants
    assert constants["CUT"] and constants["CLASSES"] > 1
    (launch,) = setup.bound.ops._launches.values()
    assert bool(launch.skew) == (compute_units == 1)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("window", [None, 10])
def test_keys_of_length_zero_at_the_edge(window, splits):
    """One query token sees such a key, another does not: its norm of 0 meets a mask of minus infinity."""
    config = _config(8, 16, 4, window=window is not None)
    case = Case((70, 90), (4, 4), window=window, splits=splits)
    setup = _set_up(config, case)
    nothing = torch.zeros(4, 1, 128)
    for sequence, length in enumerate(case.lens):
        tokens = length - torch.tensor([1, 2, 12, 13])
        store_again(setup, sequence, tokens, nothing, nothing + 1.5)
    out, lse, _ = _run(setup, case)
    compare(setup, config, case, out, lse)


@pytest.mark.parametrize("place", [0, 199], ids=["first", "last"])
@pytest.mark.parametrize("splits", [1, 2])
def test_a_value_far_above_the_others(splits, place):
    """1e4 beside 1e-4: the largest scale so far decides how small a weight can be."""
    config, case = _config(8, 16, 4), Case((200,), (4,), splits=splits)
    setup = _set_up(config, case)
    g = torch.Generator().manual_seed(5)
    size = torch.full((200, 1, 1), 1e-4)
    size[place] = 1e4
    key, value = torch.randn(200, 1, 128, generator=g), torch.randn(200, 1, 128, generator=g)
    store_again(setup, 0, torch.arange(200), key, value * size)
    out, lse, _ = _run(setup, case)
    compare(setup, config, case, out, lse)


def test_a_value_that_few_see():
    with emulated() as emulation:
        check_a_value_that_few_see(_config(8, 16, 4), "cpu", SM_90, tuning={"wide_from": 16, "wide_work": 0})
    assert emulation.blocks


@pytest.mark.parametrize("splits", [1, 2])
def test_bad_queries_stay_with_their_own_head(splits):
    """NaN and infinity in one head of one token; all others as they would be, bit by bit."""
    config, case = _config(8, 16, 4), Case((90,), (4,), splits=splits)
    setup = _set_up(config, case)
    good, good_lse, _ = _run(setup, case)
    setup.query[1, 3] = float("nan")
    setup.query[2, 5, 7] = float("inf")
    out, lse, _ = _run(setup, case)
    others = torch.ones(4, 8, dtype=torch.bool)
    others[1, 3] = others[2, 5] = False
    assert torch.equal(out[others], good[others]) and torch.equal(lse[others], good_lse[others])


# ---- what must be found ------------------------------------------------------------------------------------

MISTAKES_CONFIG = _config(8, 16, 4)
MISTAKES_CASE = Case((300,), (4,), splits=1)
ONE_LESS = {
    "bar.sync": "barrier in between",
    "fence.proxy.async.shared::cta": "no proxy fence in between",
    "wgmma.fence.sync.aligned": "no wgmma.fence in between",
    "wgmma.wait_group.sync.aligned": "register of a wgmma that is not over",
    "cp.async.commit_group": "copy has not arrived",
}
"""Instructions none of which may be missing, and what is found then."""
SPARE = {"bar.sync": 2, "wgmma.wait_group.sync.aligned": 1}
if ops.COMPILER == "3.6":
    SPARE["wgmma.fence.sync.aligned"] = 2
"""Of these so many that the compiler need not have put in: barriers in front of the first copies and between what a
warp writes and reads alone, a wait for the first of two sums, a second fence."""


def _program() -> Program:
    """That of the case below."""
    seen: list[Program] = []

    def look(program: Program) -> Program:
        seen.append(program)
        return program

    with emulated(look):
        decode(_set_up(MISTAKES_CONFIG, MISTAKES_CASE), MISTAKES_CASE)
    return seen[0]


def _race(change: Change, case: Case = MISTAKES_CASE) -> str:
    """What is found in the changed program; nothing: empty."""
    try:
        with emulated(change):
            decode(_set_up(MISTAKES_CONFIG, case), case)
    except RaceError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ONE_LESS)
def test_without_one_of_them(name):
    """Each in turn."""
    positions = _program().positions(name)
    assert len(positions) >= 2
    found = [_race(lambda program, at=position: program.replaced(at)) for position in positions]
    assert [message for message in found if message and ONE_LESS[name] not in message] == []
    assert found.count("") == SPARE.get(name, 0)


def test_waits_of_a_copy_too_few():
    program = _program()
    positions = program.positions("cp.async.wait_group")
    assert len(positions) >= 2
    for position in positions:
        (groups,) = program.instructions[position].operands
        wait = f"cp.async.wait_group {int(groups) + 1}"
        assert "copy has not arrived" in _race(
            lambda changed, at=position, text=wait: changed.replaced(at, text)
        )


def test_without_waiting_for_the_kernel_before():
    """Programs with work would read its results; those without would let the kernel behind them run before it."""
    case = Case((70, 70), (8, 1), splits=1)  # two column tiles, of which one sequence needs one
    positions = _program().positions("griddepcontrol.wait")
    found = [_race(lambda program, at=position: program.replaced(at), case) for position in positions]
    assert all("griddepcontrol.wait" in message for message in found)
    assert {"ended without" in message for message in found} == {True, False}


def test_a_cache_that_is_too_short():
    setup = _set_up(MISTAKES_CONFIG, MISTAKES_CASE)
    last = int(setup.table[0, : -(-300 // 16)].max())
    for blocks in (last + 1, last):
        cut = replace(setup, cache=replace(setup.cache, data=setup.cache.data[:blocks]))
        if blocks > last:
            compare(cut, MISTAKES_CONFIG, MISTAKES_CASE, *_run(cut, MISTAKES_CASE)[:2])
            continue
        with pytest.raises(AccessError, match=r"outside every tensor.* of cache_ptr"):
            _run(cut, MISTAKES_CASE)


def test_a_block_table_with_a_wrong_entry():
    setup = _set_up(MISTAKES_CONFIG, MISTAKES_CASE)
    setup.table[0, 3] = -1
    with pytest.raises(AccessError, match="outside every tensor"):
        _run(setup, MISTAKES_CASE)


def test_an_instruction_that_is_not_known():
    text = ".visible .entry f(\n)\n{\n\t.reg .b32 %r<3>;\n\tmov.b32 %r1, 1;\n\tbrev.b32 %r2, %r1;\n\tret;\n}"
    with pytest.raises(UnknownInstruction, match=r"brev\.b32 %r2, %r1"):
        Program.of(text)
    assert len(Program.of(text.replace("brev", "not")).instructions) == 3
