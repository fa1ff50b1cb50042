"""Decode time against context, one line per backend and preset, as a PNG. Needs matplotlib, the extra ``bench``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ..spec import SpecError
from .cases import Case
from .records import Row, Run

__all__ = ["Panel", "panels", "write_png"]


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes: a shape in all but its context, and (context, us, spread) for each line."""

    title: str
    lines: dict[str, tuple[tuple[int, float, float], ...]]


def _label(row: Row) -> str:
    if row.backend.startswith("bf16"):
        return row.backend.replace("_", " ")
    return f"{row.backend} {row.case.preset.removeprefix('turboquant_')}"


def panels(rows: Iterable[Row]) -> tuple[Panel, ...]:
    """Timed decode rows by everything but context, preset and backend; shapes with one context only are left out."""
    found: dict[Case, dict[str, dict[int, tuple[float, float]]]] = {}
    for row in rows:
        if row.status == "ok" and row.graph is not None and row.case.operation == "decode":
            shape = replace(row.case.shape, context=4096)
            line = found.setdefault(shape, {}).setdefault(_label(row), {})
            line[row.case.context] = (row.graph.us, row.graph.spread)
    made = []
    for shape, lines in found.items():
        if len({context for line in lines.values() for context in line}) > 1:
            text = shape.title().replace(f" x {shape.context}", " sequences", 1)
            made.append(
                Panel(
                    text, {k: tuple((c, *t) for c, t in sorted(v.items())) for k, v in sorted(lines.items())}
                )
            )
    return tuple(made)


def write_png(run: Run, path: Path) -> None:
    """Write the plot. SpecError without matplotlib, or if no shape was measured at two contexts."""
    made = panels(run.rows)
    if not made:
        raise SpecError("plot", "no shape at two contexts", "decode rows of one shape at several contexts")
    try:
        import matplotlib
    except ImportError:
        raise SpecError(
            "plot", "no matplotlib", "it to be installed: pip install 'turboquant-rocm[bench]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(2, len(made))
    rows = -(-len(made) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(7 * columns, 5 * rows), squeeze=False)
    for axis in axes.flat[len(made) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, made, strict=False):
        for label, points in panel.lines.items():
            contexts, times, spreads = zip(*points, strict=True)
            style = "--" if label.startswith("bf16") else "-"
            axis.errorbar(
                contexts, times, yerr=spreads, marker="o", markersize=3, linestyle=style, label=label
            )
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="context, tokens",
            ylabel="time of a call, us",
            title=panel.title,
        )
        axis.set_xscale("log", base=2)
        axis.grid(True, which="both", alpha=0.3)
        axis.legend(fontsize="small")
    machine = run.machine
    kind = "smoke run on a CPU: no measurement" if machine.smoke else "median of graph replays, cold cache"
    figure.suptitle(
        f"{machine.device}, commit {machine.commit[:12]}, {machine.date[:10]}; {kind}", fontsize="medium"
    )
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=110)
    pyplot.close(figure)
