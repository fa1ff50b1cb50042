"""Tables for people: rich in a terminal, Markdown in a file. Pure functions of :mod:`.records` and :mod:`.goals`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from .goals import Outcome
from .records import Comparison, Machine, Row, Run, Time

__all__ = [
    "COLUMNS",
    "ROW_STYLE",
    "cells",
    "comparison_table",
    "goal_table",
    "headline",
    "machine_line",
    "markdown",
    "row_table",
]

COLUMNS = (
    "operation", "shape", "cache", "backend", "us", "of ceiling", "bf16 paged / this", "bf16 SDPA / this", "CPU us",
    "launches", "error", "note",
)  # fmt: skip
_TEXT = ("operation", "shape", "cache", "backend", "note")
ROW_STYLE = {"wrong": "bold red", "failed": "red", "refused": "dim"}
_VERDICT = {"pass": "green", "short": "red", "not measured": "yellow"}
GIVEN_WIDTH = 180  # columns; narrower terminals scroll instead of breaking numbers


def _ratio(base: float | None, graph: Time | None) -> str:
    return "" if base is None or graph is None else f"{base / graph.us:.2f}"


def cells(row: Row) -> tuple[str, ...]:
    """A row as texts, in the order of :data:`COLUMNS`."""
    plain = row.backend.startswith("bf16")
    paged = (
        row.graph.us if plain and row.backend == "bf16_paged" and row.graph else row.bf16.get("bf16_paged")
    )
    return (
        row.case.operation,
        row.case.title(),
        row.case.dtype if plain else f"{row.case.preset.removeprefix('turboquant_')} {row.layout}".strip(),
        row.backend,
        str(row.graph) if row.graph else row.status,
        "" if row.percent is None else f"{row.percent:.1f} %",
        _ratio(paged, row.graph),
        _ratio(row.bf16.get("bf16_sdpa"), row.graph),
        "" if row.cpu is None else str(row.cpu),
        "" if row.launches is None else str(row.launches),
        "" if row.error is None else f"{row.error:.0e}",
        row.note,
    )


def machine_line(machine: Machine, *more: str) -> str:
    """Device, versions and ``more``, commit and date."""
    parts = (machine.device, *(f"{k} {v}" for k, v in machine.versions.items()), *more)
    return f"{', '.join(parts)}; commit {machine.commit[:12]}{machine.commit[40:]}, {machine.date}"


def headline(run: Run) -> str:
    """Device, versions and ceilings in a line; a smoke run says that it measures nothing."""
    machine = run.machine
    text = machine_line(
        machine, *(f"{name} ceiling {value / 1e12:.3g} TB/s" for name, value in run.ceilings.items())
    )
    return f"SMOKE RUN on a CPU, wall clock, small shapes: no measurement. {text}" if machine.smoke else text


def row_table(rows: Sequence[Row], title: str = "") -> Table:
    """Measured rows; columns that are empty everywhere are left out."""
    texts = [cells(row) for row in rows]
    shown = [
        i
        for i, name in enumerate(COLUMNS)
        if name in ("operation", "shape", "us") or any(t[i] for t in texts)
    ]
    table = Table(title=title or None, title_justify="left")
    for i in shown:
        left = COLUMNS[i] in _TEXT
        table.add_column(COLUMNS[i], justify="left" if left else "right", no_wrap=COLUMNS[i] != "note")
    for row, text in zip(rows, texts, strict=True):
        table.add_row(*(Text(text[i]) for i in shown), style=ROW_STYLE.get(row.status))
    return table


def goal_table(outcomes: Iterable[Outcome], details: bool = False, smoke: bool = False) -> Table:
    """Every goal with its target, the measured value of its worst case, and the verdict; all cases with details."""
    title = "SMOKE RUN: the verdicts mean nothing" if smoke else "What should hold, and what was measured"
    table = Table(title=title, title_justify="left")
    for name, justify in (
        ("profile", "left"),
        ("requirement", "left"),
        ("target", "right"),
        ("measured", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name in ("verdict", "case", "note"):
        table.add_column(name)
    for outcome in outcomes:
        shown = outcome.cases if details else (outcome.worst,)
        for i, judged in enumerate(shown):
            row = judged.row
            preset = judged.job.case.preset.removeprefix("turboquant_")
            where = f"{preset} {judged.job.case.title()}" + (f", {row.backend}" if row else "")
            how = (
                f"{row.graph} us"
                if row is not None and row.graph and judged.value is not None
                else judged.why
            )
            if row is not None and row.percent is not None and judged.value is not None:
                how += f", {row.percent:.1f} %"
            table.add_row(
                outcome.profile if i == 0 else "",
                Text(f"{outcome.goal.says} ({outcome.goal.metric})" if i == 0 else ""),
                outcome.target if i == 0 else "",
                outcome.text(judged),
                Text(judged.verdict, style=_VERDICT[judged.verdict]),
                Text(where),
                Text(how),
            )
    return table


def comparison_table(comparison: Comparison, everything: bool = False) -> Table:
    """What changed beyond the noise; with ``everything`` also what did not."""
    table = Table(title="Old against new", title_justify="left")
    for name in ("verdict", "row", "what"):
        table.add_column(name)
    for name in ("old us", "new us", "change", "noise us"):
        table.add_column(name, justify="right")
    for v in comparison.verdicts:
        if v.kind == "same" and not everything:
            continue
        change = "" if v.old is None or v.new is None else f"{100 * (v.new.us / v.old.us - 1):+.1f} %"
        style = "red" if v.regression else "green" if v.kind in ("faster", "repaired") else None
        table.add_row(
            v.kind, Text(v.title), Text(v.what), str(v.old or ""), str(v.new or ""), change,
            f"{v.allowed:.2f}" if v.old else "", style=style,
        )  # fmt: skip
    return table


def markdown(run: Run, outcomes: Sequence[Outcome] = ()) -> str:
    """The run as Markdown: what was run, goals if there are any, and every row."""
    lines = [f"Made by `{run.machine.command}`.", "", headline(run) + ".", ""]
    if outcomes:
        lines += [
            "| profile | requirement | target | measured | verdict | worst case |",
            "|---|---|---|---|---|---|",
        ]
        for o in outcomes:
            worst = o.worst
            where = f"{worst.job.case.preset.removeprefix('turboquant_')} {worst.job.case.title()}"
            says = f"{o.goal.says} ({o.goal.metric})"
            lines.append(
                f"| {o.profile} | {says} | {o.target} | {o.text(worst)} | {worst.verdict} | {where} |"
            )
        lines.append("")
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(c.replace("|", "/") for c in cells(row)) + " |" for row in run.rows]
    return "\n".join(lines) + "\n"
