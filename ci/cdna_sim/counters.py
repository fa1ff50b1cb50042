"""What a run counted, and the issue-versus-bandwidth model.

Model. A compute unit issues at most one vector ALU wave-instruction per cycle (four SIMDs, each one wave64 instruction
every four cycles); matrix instructions are counted the same way with their pass count left out. Everything else
(scalar, LDS, memory, branches, waits) issues beside it from other waves. So with N VALU+MFMA wave-instructions for E
dequantised elements, one element costs 64 * N / E lane-instructions; reading b bytes per element from HBM at full
bandwidth leaves
    budget = 64 * CUs * clock * b / bandwidth
lane-instructions per element. cost > budget: issue-bound, by that factor. This leaves out latency, occupancy, bank
conflicts and co-issue: it is a floor, good for comparing kernels and for noticing regressions, not a prediction.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

CLASSES = ("valu", "mfma", "salu", "smem", "vmem", "lds", "branch", "waitcnt", "other")


@dataclass(frozen=True)
class ArchModel:
    """Datasheet numbers of one GPU."""

    name: str
    cus: int
    clock_hz: float
    bandwidth: float
    lds_banks: int


ARCH = {
    "gfx942": ArchModel("MI300X", 304, 2.1e9, 5.3e12, 32),
    "gfx950": ArchModel("MI355X", 256, 2.4e9, 8.0e12, 64),
}


def classify(name: str, fmt: str) -> str:
    """Class of an instruction for counting."""
    if name.startswith(("v_mfma", "v_smfmac")):
        return "mfma"
    if name == "s_waitcnt":
        return "waitcnt"
    if name.startswith(("s_branch", "s_cbranch", "s_endpgm", "s_setpc", "s_swappc", "s_call")):
        return "branch"
    if fmt == "SMEM":
        return "smem"
    if fmt == "SOPP":
        return "other"
    if fmt.startswith("SOP"):
        return "salu"
    if fmt == "DS":
        return "lds"
    if fmt in ("MUBUF", "MTBUF", "GLOBAL", "FLAT", "SCRATCH"):
        return "vmem"
    return "valu"


@dataclass
class Counters:
    """Totals over all waves."""

    instructions: Counter[str] = field(default_factory=Counter)
    mnemonics: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    bank_conflict_cycles: int = 0
    waves: int = 0
    workgroups: int = 0

    @property
    def total(self) -> int:
        """All executed wave-instructions."""
        return sum(self.instructions.values())

    @property
    def issue(self) -> int:
        """Wave-instructions of the vector pipeline."""
        return self.instructions["valu"] + self.instructions["mfma"]

    def loaded(self) -> int:
        """Bytes that loads of global memory delivered to lanes (scalar loads included)."""
        return sum(n for k, n in self.bytes.items() if k.startswith(("load", "smem")))

    def stored(self) -> int:
        """Bytes that active lanes stored to global memory."""
        return sum(n for k, n in self.bytes.items() if k.startswith("store"))

    def per_element(self, elements: int) -> float:
        """Lane-instructions per dequantised element."""
        return 64 * self.issue / elements

    def as_dict(self) -> dict[str, object]:
        """Plain values, for result files."""
        return {
            "instructions": dict(self.instructions),
            "total": self.total,
            "bytes": dict(self.bytes),
            "bank_conflict_cycles": self.bank_conflict_cycles,
            "waves": self.waves,
            "workgroups": self.workgroups,
        }


def roofline(arch: str, bytes_per_element: float) -> float:
    """Lane-instructions per element that the bandwidth roofline leaves."""
    a = ARCH[arch]
    return 64 * a.cus * a.clock_hz * bytes_per_element / a.bandwidth


def model(arch: str, counters: Counters, elements: int, bytes_per_element: float) -> dict[str, float | str]:
    """Cost, budget and what binds, for one run."""
    cost = counters.per_element(elements)
    budget = roofline(arch, bytes_per_element)
    return {
        "lane_instructions_per_element": cost,
        "roofline_budget": budget,
        "ratio": cost / budget,
        "bound": "issue" if cost > budget else "bandwidth",
    }
