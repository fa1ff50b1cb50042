"""`python -m ci.cdna_sim KERNEL ...`: what a kernel executes, as tables; budgets checked or updated."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import budgets, workloads
from .counters import ARCH, CLASSES, model

KERNELS = ("store", "decode", "reduce", "prepare", "dequantize", "all")
WIDTH = 120  # of the tables where the output is no terminal


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m ci.cdna_sim", description=__doc__)
    p.add_argument("kernel", nargs="+", help=f"{', '.join(KERNELS)}; or a .hsaco file to list")
    p.add_argument("--arch", action="append", choices=workloads.ARCHS)
    p.add_argument("--layout", action="append", choices=workloads.LAYOUTS)
    p.add_argument("--preset", action="append", choices=workloads.PRESETS)
    p.add_argument("--head-size", action="append", type=int)
    p.add_argument("--mnemonics", action="store_true", help="also list the instructions by count")
    p.add_argument("--check", action="store_true", help="fail where a kernel exceeds its budget")
    p.add_argument("--update", action="store_true", help="write the measured counts as budgets")
    p.add_argument("--budgets", type=Path, default=budgets.FILE)
    return p


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit code is 1 if a budget is exceeded."""
    from rich.console import Console

    p = parser()
    a = p.parse_args(argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    files = [Path(k) for k in a.kernel if k.endswith(".hsaco")]
    names = [k for k in a.kernel if not k.endswith(".hsaco")]
    if unknown := sorted(set(names) - set(KERNELS)):
        p.error(f"kernel {', '.join(unknown)} (wants {', '.join(KERNELS)}, or a .hsaco file)")
    if a.update and "all" not in names:
        p.error("--update writes the budgets of whole workloads (wants the kernel all)")
    for f in files:
        list_code_object(console, f)
    if not names:
        return 0
    every = "all" in names
    parts = ["decode"] if every or {"decode", "reduce", "prepare"} & set(names) else []
    if every or "dequantize" in names:
        parts.append("dequantize")
    todo = workloads.selected(a.arch or workloads.ARCHS, a.layout or workloads.LAYOUTS, a.preset or workloads.PRESETS,
                              a.head_size or workloads.HEAD_SIZES)  # fmt: skip
    results = []
    for w in todo:
        m = workloads.measure(w, ["store", *parts])
        results.append(m)
        if not every:
            m.kernels = {k: c for k, c in m.kernels.items() if any(k.startswith(n) for n in names)}
        show(console, m, a.mnemonics)
        if a.update:  # at once: a run that is cut short keeps what it measured
            budgets.update([m], a.budgets)
    if not a.check:
        return 0
    data = budgets.load(a.budgets)
    bad: list[str] = []
    for m in results:
        b, good = budgets.check_measured(m, data)
        bad += b if every else [x for x in b if "did not run" not in x]
        for line in good:
            console.print(line, style="green")
    for line in bad:
        console.print(line, style="bold red")
    console.print(f"{len(bad)} regressions in {len(results)} workloads")
    return 1 if bad else 0


def show(console: Any, m: workloads.Measured, mnemonics: bool) -> None:
    """Tables of one workload."""
    from rich.table import Table

    w = m.workload
    t = Table(title=f"{w.arch} {w.key}: executed wave-instructions")
    t.add_column("kernel")
    for title in (*CLASSES, "total"):
        t.add_column(title, justify="right")
    for k, c in m.kernels.items():
        t.add_row(k, *(str(c.instructions[x]) for x in CLASSES), str(c.total))
    console.print(t)
    t = Table(
        title=f"{w.arch} ({ARCH[w.arch].name}): issue against bandwidth, {m.bytes_per_element:.3f} bytes per element"
    )
    for title in (
        "kernel",
        "waves",
        "loaded B",
        "stored B",
        "LDS conflict cycles",
        "lane-instr / element",
        "budget",
        "bound",
    ):
        t.add_column(title, justify="left" if title == "kernel" else "right")
    for k, c in m.kernels.items():
        r = model(w.arch, c, m.elements[k], m.bytes_per_element)
        t.add_row(k, str(c.waves), str(c.loaded()), str(c.stored()), str(c.bank_conflict_cycles),
                  f"{r['lane_instructions_per_element']:.2f}", f"{r['roofline_budget']:.2f}",
                  str(r["bound"]))  # fmt: skip
    console.print(t)
    t = Table(title="bytes by width")
    t.add_column("access")
    for k in m.kernels:
        t.add_column(k, justify="right")
    for width in sorted({b for c in m.kernels.values() for b in c.bytes}):
        t.add_row(width, *(str(c.bytes[width]) for c in m.kernels.values()))
    console.print(t)
    if mnemonics:
        for k, c in m.kernels.items():
            console.print(k, dict(c.mnemonics.most_common()))


def list_code_object(console: Any, path: Path) -> None:
    """Kernels, resources and instructions of a code object."""
    from .engine import Simulator

    sim = Simulator(path.read_bytes())
    for name, k in sim.code.kernels.items():
        console.print(f"{name}: {sim.code.arch}, {k.vgprs} vector registers (AGPRs from {k.agpr_base}), LDS "
                      f"{k.group_segment}, scratch {k.private_segment}, {len(k.args)} arguments")  # fmt: skip
        for ins in sim.instructions(name):
            console.print(ins.where, highlight=False, markup=False)
