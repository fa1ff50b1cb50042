"""The machine code of wide.py, as far as the emulator of PTX cannot see it: where its products find their operands."""

from __future__ import annotations

from itertools import pairwise

import pytest

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from tests.compile_checks import Spec, compiled, nvidia_tool  # noqa: E402
from tests.uniform_registers import DISASSEMBLER, Operand, disassembled, operands  # noqa: E402

TOOL = nvidia_tool(DISASSEMBLER)
pytestmark = pytest.mark.skipif(not TOOL.exists(), reason=f"no {TOOL}")

CAP = (("sinks", True), ("soft_cap", 30.0))
SPECS = [
    Spec(queries=4, cut=True),
    Spec(queries=4),
    Spec(queries=4, direct=True, features=CAP),
    Spec(queries=4, group=5, block_size=48, features=(("window", 1024),)),
    Spec(queries=2, cut=True),
    Spec(queries=2, features=CAP),
    Spec(group=16, cut=True, features=(("window", 1024),)),
    Spec(group=12, block_size=48, direct=True),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_operands_of_products(spec):
    """Twelve products of keys and queries in a tile, four each with one matrix of queries; eight of values and P;
    before them four each with both parts of the queries. Each matrix has a place of its own and one layout."""
    found = list(operands(disassembled(compiled("sm_90", spec))))
    assert [one for one in found if one.place is None or one.layout is None] == []
    of_keys = [one for one in found if one.product == "IGMMA"]
    of_values = [one for one in found if one.product == "HGMMA"]
    assert len(of_keys) == 8 + 12 and len(of_values) == 8
    matrices = [*(of_keys[i : i + 4] for i in range(0, 20, 4)), of_values[:4], of_values[4:]]
    for parts in matrices:
        assert len({(one.place, one.layout) for one in parts}) == 1
        steps = {b.behind - a.behind for a, b in pairwise(parts)}
        assert parts[0].behind == 0 and len(steps) == 1 and min(steps) > 0
    places = [parts[0].place for parts in matrices]
    assert len(set(places[:-1])) == 6 and places[-1] == places[-2]
    assert all(place % 1024 == 0 for place in places)
    assert len({parts[0].layout for parts in matrices[:5]}) == 1


def test_a_register_that_nothing_has_set():
    good = [
        "ULEA UR37, UR4, UR37, 0x18",
        "UIADD3 UR4, UR37, 0xa000, URZ",
        "USHF.R.U32.HI UR4, URZ, 0x4, UR4",
        "USGXT.U32 UR46, UR4, 0xe",
        "UMOV UR47, 0x80000020",
        "UIADD3 UR6, UP1, UR46, 0x40, URZ",
        "UMOV UR5, URZ",
        "UIADD3.X UR7, UR5, -0x7fffffe0, URZ, UP1, !UPT",
        "HGMMA.64x32x16.F32 R72, R24, gdesc[UR44].tnspB, R72",
        "HGMMA.64x32x16.F32 R72, R28, gdesc[UR4].tnspB, R72",
    ]
    layout = 0x80000020
    assert list(operands(good)) == [
        Operand("HGMMA", 0xA000, 0, layout),
        Operand("HGMMA", 0xA000, 0x40, layout),
    ]
    bad = [line.replace("UP1, UR46", "UP1, UR5") for line in good]  # as ptxas of CUDA 12.8 has had it
    assert list(operands(bad))[1].place is None
    assert list(operands(line for line in good if "UMOV UR5" not in line))[1].layout is None
