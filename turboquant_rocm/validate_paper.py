"""``python -m turboquant_rocm.validate_paper``: are the claims of the TurboQuant paper true of this package?

Measures distortion, bias and variance of both quantisers at 1 to 4 bits, their decay, how they rank the scores of real
keys, and what norm correction does to logits; prints each beside what theory predicts and the paper's bounds. Under two
minutes on a CPU. Exit codes: 0 every row holds, 1 a bound or a prediction is broken, 2 bad arguments or input, or no
torch. What each row means: docs/algorithms.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table

from . import __version__
from .spec import SpecError
from .verify import BAD_INPUT, _check_writable, _integer, fitting_console

if TYPE_CHECKING:
    from .comparison import Comparison
    from .paper import Row

__all__ = ["main", "write_png"]

BUNDLED: Final = Path(__file__).resolve().parents[1] / "examples" / "kv" / "smollm2_135m.npz"
"""Real queries and keys of a checkout; installations have none."""
CHECK_NAMES: Final = (
    "constants", "distortion", "bias", "variance", "product-error", "decay", "real-keys", "norm-correction",
    "stored-rankings",
)  # fmt: skip


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.4g}"


def _table(rows: Sequence[Row]) -> Table:
    table = Table(
        title=f"turboquant_rocm {__version__} validate_paper",
        caption="tolerance: from the size of the sample. ~: a prediction that is not exact, so only the bounds decide.",
    )
    for name in ("check", "of"):
        table.add_column(name, no_wrap=True)
    for name in ("d", "bits", "measured", "tolerance", "predicted", "lower", "upper", "samples", ""):
        table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for r in rows:
        if previous not in (None, r.check):
            table.add_section()
        previous = r.check
        style = "green" if r.ok else "bold red"
        table.add_row(
            r.check,
            r.subject.replace("[", "\\["),
            "" if r.dimension is None else str(r.dimension),
            str(r.bits),
            f"[{style}]{r.measured:.4g}[/]",
            f"{r.tolerance:.1g}",
            _number(r.predicted) + ("" if r.exact else " ~"),
            _number(r.low),
            _number(r.high),
            str(r.samples or ""),
            f"[{style}]{'ok' if r.ok else 'BROKEN'}[/]",
        )
    return table


def _print(rows: Sequence[Row], seconds: float) -> None:
    table = _table(rows)
    console = fitting_console(table)
    console.print(table)
    for r in rows:
        for fault in r.faults:
            console.print(f"BROKEN {r.check} of {r.subject}, d={r.dimension}, {r.bits} bits: {fault}",
                          style="bold red", markup=False, soft_wrap=True)  # fmt: skip
    broken = sum(not r.ok for r in rows)
    console.print(f"{len(rows)} rows in {seconds:.0f} s, {broken} broken", markup=False)


def _report(rows: Sequence[Row], seed: int, seconds: float) -> str:
    found: list[dict[str, Any]] = [{**asdict(r), "ok": r.ok, "faults": list(r.faults)} for r in rows]
    data = {"version": __version__, "seed": seed, "seconds": round(seconds, 1), "rows": found}
    return json.dumps(data, indent=2, allow_nan=False)


def _pyplot() -> Any:
    """matplotlib.pyplot, drawing to files; SpecError without it."""
    try:
        import matplotlib
    except ImportError:
        wants = "it to be installed: pip install 'turboquant-rocm[bench]'"
        raise SpecError("--plot", "no matplotlib", wants) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def write_png(rows: Sequence[Row], path: Path) -> None:
    """Each check over the bits: points with tolerances, predictions as lines, the space between bounds shaded.

    SpecError without matplotlib or a place to write.
    """
    pyplot = _pyplot()
    panels: dict[str, dict[str, list[Row]]] = {}
    for r in rows:
        label = r.subject if r.dimension is None else f"{r.subject}, d={r.dimension}"
        panels.setdefault(r.check, {}).setdefault(label, []).append(r)
    columns = 3
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(6 * columns, 4.5 * lines), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, series) in zip(axes.flat, panels.items(), strict=False):
        for label, found in series.items():
            found = sorted(found, key=lambda r: r.bits)
            x = [r.bits for r in found]
            drawn = axis.errorbar(
                x,
                [r.measured for r in found],
                yerr=[r.tolerance for r in found],
                fmt="o",
                markersize=4,
                label=label,
            )
            colour = drawn[0].get_color()
            if all(r.predicted is not None for r in found):
                axis.plot(x, [r.predicted for r in found], color=colour, linewidth=1)
            if all(r.low is not None and r.high is not None for r in found):
                axis.fill_between(
                    x, [r.low for r in found], [r.high for r in found], color=colour, alpha=0.08
                )
        if "error" in title or title in ("distortion", "variance", "constants"):
            axis.set_yscale("log")
        axis.set(title=title, xlabel="bits")
        axis.set_xticks(sorted({r.bits for found in series.values() for r in found}))
        axis.grid(True, alpha=0.3)
        axis.legend(fontsize="x-small")
    figure.suptitle("points: measured, lines: predicted, shaded: between the bounds", fontsize="medium")
    figure.tight_layout()
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise SpecError("--plot", str(path), f"a writable file ({error.strerror})") from None
    finally:
        pyplot.close(figure)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m turboquant_rocm.validate_paper", description=__doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--input",
        type=Path,
        metavar="FILE",
        help=".npz of real queries and keys as for verify (default: examples/kv of the checkout)",
    )
    source.add_argument("--no-real-keys", action="store_true", help="leave out the checks about real keys")
    parser.add_argument(
        "--check",
        action="append",
        choices=CHECK_NAMES,
        metavar="NAME",
        help=f"of {', '.join(CHECK_NAMES)}; default all",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="instead: quantisers side by side on the real tensors, at their bytes",
    )
    parser.add_argument("--seed", type=_integer(0, 2**31), default=0, help="of everything random (default 0)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows as JSON, - for standard output"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG (matplotlib)")
    return parser


def _print_comparison(rows: Sequence[Comparison]) -> None:
    """A Markdown table for each layer."""
    for name in dict.fromkeys(row.tensors for row in rows):
        head = "quantiser | bytes | key NMSE | rank | KL | output, exact values | output"
        print(f"\n{name}\n\n| {head} |\n|---|---|---|---|---|---|---|")
        for r in rows:
            if r.tensors == name:
                numbers = f"{r.bytes} | {r.key_nmse:.4f} | {r.rank_correlation:.4f} | {r.kl:.4f}"
                print(f"| {r.quantizer} | {numbers} | {r.scores_alone:.1%} | {r.output:.1%} |")


def _compare(args: argparse.Namespace) -> int:
    from . import accuracy, comparison

    path = _real_keys(args)
    _print_comparison([row for tensors in accuracy.load_npz(path) for row in comparison.compare(tensors)])
    return 0


def _real_keys(args: argparse.Namespace) -> Path:
    """The file of real tensors; SpecError if none is given and none is bundled."""
    if args.input is None and not BUNDLED.is_file():
        wants = "--input FILE.npz, since only a checkout has examples/kv, or --no-real-keys"
        raise SpecError("--input", None, wants)
    path: Path = args.input or BUNDLED
    return path


def _run(args: argparse.Namespace, progress: Console) -> list[Row]:
    if args.json is not None and str(args.json) != "-":
        _check_writable(args.json)
    if args.plot is not None:
        _check_writable(args.plot, "--plot")
        _pyplot()  # or SpecError, before anything is measured
    try:
        from . import accuracy, paper
    except ImportError as error:
        if error.name != "torch":
            raise
        raise SpecError("import torch", "not installed", "PyTorch: turboquant-rocm[cpu]") from None
    names = list(args.check or paper.CHECKS)
    tensors: tuple[accuracy.Tensors, ...] = ()
    about_keys = [name for name in names if name in paper.ABOUT_REAL_KEYS]
    if args.no_real_keys:
        names = [name for name in names if name not in about_keys]
    elif about_keys:
        tensors = tuple(accuracy.load_npz(_real_keys(args)))
    if not names:
        raise SpecError("--check", args.check, "a check that is not about real keys, with --no-real-keys")
    settings = paper.Settings(args.seed, tensors)
    rows: list[Row] = []
    for name in names:
        with progress.status(name):
            rows += paper.run_checks(settings, [name])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code. Options that argparse refuses end in SystemExit(2)."""
    args = _parser().parse_args(argv)
    errors = Console(stderr=True)
    start = time.monotonic()
    try:
        if args.compare:
            return _compare(args)
        rows = _run(args, errors)
        seconds = time.monotonic() - start
        report = _report(rows, args.seed, seconds)
        if args.json is not None and str(args.json) != "-":
            try:
                args.json.write_text(report + "\n", encoding="utf-8")
            except OSError as error:
                raise SpecError("--json", str(args.json), f"a writable file ({error.strerror})") from None
        if args.plot is not None:
            write_png(rows, args.plot)
    except SpecError as error:
        errors.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return BAD_INPUT
    if args.json is not None and str(args.json) == "-":
        print(report)
    else:
        _print(rows, seconds)
    return 0 if all(r.ok for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
