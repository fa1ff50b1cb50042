"""The budget file: exact instruction counts of each kernel, which may fall but not rise.

configs/sim_budgets.yaml holds, for each architecture and workload, the counts of every kernel. A measured count above
its budget by more than the file's tolerance is a regression, and so is a kernel without a budget. A count well below is
reported so that the budget can be tightened.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turboquant_rocm.presets import parse_yaml

from .workloads import Measured

FILE = Path(__file__).resolve().parents[2] / "configs" / "sim_budgets.yaml"
QUANTITIES = ("issue", "total", "lds", "vmem", "bank_conflict_cycles")


def quantities(counters: Any) -> dict[str, int]:
    """The numbers that are held to a budget."""
    return {
        "issue": counters.issue,
        "total": counters.total,
        "lds": counters.instructions["lds"],
        "vmem": counters.instructions["vmem"],
        "bank_conflict_cycles": counters.bank_conflict_cycles,
    }


def load(path: Path = FILE) -> dict[str, Any]:
    """The budget file, checked."""
    data = parse_yaml(path.read_text(encoding="utf-8"), path.name)
    if data.get("version") != 1 or not isinstance(data.get("budgets"), dict):
        raise ValueError(f"{path}: not a version 1 budget file")
    return data


def check(measured: Mapping[str, Mapping[str, int]], budget: Mapping[str, Mapping[str, int]], tolerance: float,
          name: str = "") -> tuple[list[str], list[str]]:  # fmt: skip
    """(regressions, improvements) of the kernels of one workload, as sentences."""
    bad, good = [], []
    for kernel, got in measured.items():
        if kernel not in budget:
            bad.append(f"{name} {kernel}: no budget")
            continue
        for what in QUANTITIES:
            limit, have = budget[kernel].get(what), got[what]
            if limit is None:
                bad.append(f"{name} {kernel}: no budget for {what}")
            elif have > limit * (1 + tolerance):
                bad.append(
                    f"{name} {kernel}: {what} {have} exceeds {limit} by {100 * (have / max(limit, 1) - 1):.1f} %"
                )
            elif have < limit * (1 - 2 * tolerance):
                good.append(f"{name} {kernel}: {what} {have} is below {limit}: tighten the budget")
    for kernel in budget:
        if kernel not in measured:
            bad.append(f"{name} {kernel}: has a budget but did not run")
    return bad, good


def check_measured(m: Measured, data: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Compare one workload with the file."""
    w = m.workload
    budget = data["budgets"].get(w.arch, {}).get(w.key, {})
    return check(
        {k: quantities(c) for k, c in m.kernels.items()}, budget, data["tolerance"], f"{w.arch} {w.key}"
    )


def update(results: list[Measured], path: Path = FILE, tolerance: float = 0.03) -> None:
    """Write the measured counts as the new budgets of their workloads; other workloads keep theirs."""
    import yaml

    data: dict[str, Any] = {"version": 1, "tolerance": tolerance, "budgets": {}}
    if path.exists():
        data = load(path)
    for m in results:
        data["budgets"].setdefault(m.workload.arch, {})[m.workload.key] = {
            k: quantities(c) for k, c in sorted(m.kernels.items())
        }
    head = (
        "# Wave-instruction budgets of the Triton kernels on the simulated GPUs; workload: ci/cdna_sim/workloads.py.\n"
        "# issue: VALU + MFMA. Written by `python -m ci.cdna_sim all --update`; raise one only with a reason.\n"
    )
    path.write_text(head + yaml.safe_dump(data, sort_keys=True, default_flow_style=None, width=110))
