"""Results of an evaluation: as JSON, as a table, as a plot, against limits. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from ..options import EXACT  # also the name of the row of the unquantised cache
from ..presets import load_yaml
from ..spec import SpecError

__all__ = [
    "EXACT",
    "FP8",
    "LayerCost",
    "NeedleCell",
    "Report",
    "Row",
    "Summary",
    "broken_limits",
    "check_plot",
    "choice_table",
    "layer_table",
    "needle_table",
    "read_limits",
    "table",
    "write_png",
]

SCHEMA: Final = 1
FP8: Final = "fp8"
"""Name of the baseline with keys and values in FP8 E4M3FN, without scales."""


@dataclass(frozen=True)
class Summary:
    """Means over all scored tokens, with standard errors (``_se``; None with fewer than two blocks of tokens).

    ppl: perplexity. ppl_change: its ratio to the unquantised cache's on the same tokens, less 1; the error is that of
    the paired difference. kl: KL(unquantised || quantised), nats per token. top1: share of tokens whose likeliest
    successor is that of the unquantised cache. hits: share of tokens predicted right.
    """

    tokens: int
    ppl: float
    ppl_change: float
    ppl_change_se: float | None
    kl: float
    kl_se: float | None
    top1: float
    top1_se: float | None
    hits: float

    @property
    def log_gap(self) -> float:
        """Log-perplexity lost: nats per token."""
        return math.log1p(self.ppl_change)


@dataclass(frozen=True)
class NeedleCell:
    """found of ``of`` needles at one length and depth; nll: mean over their digits, nats."""

    length: int
    depth: float
    found: int
    of: int
    nll: float


@dataclass(frozen=True)
class LayerCost:
    """What quantising one layer alone costs: KL in nats per token; bytes per token of that layer so and in 16 bits.

    bytes_per_sequence: beside those per token, of that layer, as in :class:`Row`.
    """

    layer: int
    kl: float
    kl_se: float | None
    bytes_per_token: float
    exact_bytes: float
    bytes_per_sequence: float = 0.0


@dataclass(frozen=True)
class Row:
    """One scheme. seconds: of a pass over one window of the text, quantising included.

    bytes_per_sequence: beside those per token: tokens that are exact, at most, and key means.
    """

    name: str
    bytes_per_token: float
    bytes_per_sequence: float = 0.0
    text: Summary | None = None
    copying: Summary | None = None
    needles: tuple[NeedleCell, ...] = ()
    layers: tuple[LayerCost, ...] = ()
    seconds: float | None = None


@dataclass(frozen=True)
class Report:
    """conditions: model, text, context, windows, device, dtype, backend, versions. rows: exact first."""

    conditions: Mapping[str, Any]
    rows: tuple[Row, ...]
    recommendation: Mapping[str, Any] | None = field(default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "schema": SCHEMA,
            "conditions": dict(self.conditions),
            "rows": [asdict(r) for r in self.rows],
            "recommendation": None if self.recommendation is None else dict(self.recommendation),
        }


def _percent(value: float, error: float | None, signed: bool = False) -> str:
    text = f"{100 * value:{'+' if signed else ''}.2f}"
    return f"{text} %" if error is None else f"{text} ±{100 * error:.2f} %"


def table(report: Report) -> Table:
    """One line per scheme."""
    rows = report.rows
    what = report.conditions
    found = Table(
        title=f"{what['model']}: {what['windows']} windows of {what['context']} tokens of {what['text']}",
        caption="± one standard error. KL, top-1 and perplexity against the unquantised cache on the same tokens. "
        "copying: a passage repeated far away. bytes: per token, all layers; KiB: beside them, per sequence; smaller: "
        "for one window.",
    )
    found.add_column("cache", no_wrap=True)
    names = ["bytes", *(["+ KiB"] if any(r.bytes_per_sequence for r in rows) else []), "smaller"]
    text, copying = any(r.text for r in rows), any(r.copying for r in rows)
    names += ["PPL", "change", "KL", "top-1"] if text else []
    names += ["copying PPL", "change", "log gap"] if copying else []
    names += ["needles"] if any(r.needles for r in rows) else []
    names += ["s/window"] if any(r.seconds for r in rows) else []
    for name in names:
        found.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        whole = row.bytes_per_token + row.bytes_per_sequence / what["context"]
        cells = [row.name, f"{row.bytes_per_token:g}", f"{rows[0].bytes_per_token / whole:.2f}x"]
        if "+ KiB" in names:
            cells.insert(2, f"{row.bytes_per_sequence / 1024:.1f}" if row.bytes_per_sequence else "")
        first = row.name == EXACT
        if text:
            s = row.text
            cells += [""] * 4 if s is None else [
                f"{s.ppl:.3f}",
                "" if first else _percent(s.ppl_change, s.ppl_change_se, True),
                "" if first else f"{s.kl:.4f}" + ("" if s.kl_se is None else f" ±{s.kl_se:.4f}"),
                "" if first else _percent(s.top1, s.top1_se),
            ]  # fmt: skip
        if copying:
            s = row.copying
            cells += [""] * 3 if s is None else [
                f"{s.ppl:.3f}",
                "" if first else _percent(s.ppl_change, s.ppl_change_se, True),
                "" if first else f"{s.log_gap:.4f}",
            ]  # fmt: skip
        if "needles" in names:
            of = sum(c.of for c in row.needles)
            cells.append(f"{sum(c.found for c in row.needles)}/{of}" if of else "")
        if "s/window" in names:
            cells.append("" if row.seconds is None else f"{row.seconds:.1f}")
        found.add_row(*(c.replace("[", "\\[") for c in cells))
    return found


def needle_table(report: Report) -> Table:
    """Needles found by length and depth, a line per scheme and length."""
    found = Table(title="needles found, by depth (0: at the start)")
    depths = sorted({c.depth for r in report.rows for c in r.needles})
    found.add_column("cache", no_wrap=True)
    found.add_column("tokens", justify="right")
    for depth in depths:
        found.add_column(f"{depth:g}", justify="right")
    for row in report.rows:
        for length in sorted({c.length for c in row.needles}):
            cells = {c.depth: f"{c.found}/{c.of}" for c in row.needles if c.length == length}
            found.add_row(row.name.replace("[", "\\["), str(length), *(cells.get(d, "") for d in depths))
    return found


def layer_table(report: Report) -> Table:
    """KL of each layer quantised alone, a line per layer."""
    rows = [r for r in report.rows if r.layers]
    found = Table(title="KL with one layer quantised, nats per token")
    found.add_column("layer", justify="right")
    for row in rows:
        found.add_column(row.name.replace("[", "\\["), justify="right", no_wrap=True)
    costs = [{c.layer: c for c in row.layers} for row in rows]
    for layer in sorted({i for c in costs for i in c}):
        cells = [
            ""
            if layer not in c
            else f"{c[layer].kl:.5f}" + ("" if c[layer].kl_se is None else f" ±{c[layer].kl_se:.5f}")
            for c in costs
        ]
        found.add_row(str(layer), *cells)
    return found


def choice_table(report: Report) -> Table:
    """What was recommended for each layer, and what it costs alone, a line per layer."""
    assert report.recommendation is not None
    context = report.recommendation["context"]
    costs = {(r.name, c.layer): c for r in report.rows for c in r.layers}
    exact = {c.layer: c.exact_bytes for c in costs.values()}
    found = Table(title=f"recommended, with bytes per token of a sequence of {context} tokens")
    found.add_column("layer", justify="right")
    found.add_column("cache", no_wrap=True)
    found.add_column("KL alone", justify="right", no_wrap=True)
    found.add_column("bytes", justify="right")
    for layer, name in report.recommendation["layers"].items():
        cost = costs.get((name, layer))
        if cost is None:
            found.add_row(str(layer), name, "", f"{exact[layer]:.1f}")
            continue
        error = "" if cost.kl_se is None else f" ±{cost.kl_se:.5f}"
        whole = cost.bytes_per_token + cost.bytes_per_sequence / context
        found.add_row(str(layer), name.replace("[", "\\["), f"{cost.kl:.5f}{error}", f"{whole:.1f}")
    return found


# ---- limits --------------------------------------------------------------------------------------------------

_LIMITS: Final = {
    "text.kl": ("text", "kl", 1),
    "text.ppl_change": ("text", "ppl_change", 1),
    "text.top1": ("text", "top1", -1),
    "copying.log_gap": ("copying", "log_gap", 1),
}
"""Quantities that limits may name: where they are in a row, and 1 if smaller is better."""


def _limits_folder() -> Traversable:
    return resources.files("turboquant_rocm.configs").joinpath("accuracy")


def read_limits(name: str) -> Mapping[str, Any]:
    """``configs/accuracy/NAME.yaml``, checked: conditions and, per scheme, [measured, tolerance] of each quantity."""
    known = sorted(
        p.name.removesuffix(".yaml") for p in _limits_folder().iterdir() if p.name.endswith(".yaml")
    )
    if name not in known:
        raise SpecError("--check", name, f"one of {', '.join(known)}")
    data = load_yaml("accuracy", f"{name}.yaml")
    source = f"configs/accuracy/{name}.yaml"
    if (
        not isinstance(data, dict)
        or set(data) != {"version", "conditions", "schemes"}
        or data["version"] != 1
    ):
        raise SpecError(source, type(data).__name__, "version: 1, conditions and schemes")
    for scheme, quantities in data["schemes"].items():
        for quantity, values in quantities.items():
            pair = isinstance(values, list) and len(values) == 2
            if quantity not in _LIMITS or not pair or not all(isinstance(v, int | float) for v in values):
                raise SpecError(
                    f"{source} {scheme} {quantity}", values, f"[measured, tolerance] of {', '.join(_LIMITS)}"
                )
            if values[1] <= 0:
                raise SpecError(f"{source} {scheme} {quantity}", values, "a tolerance > 0")
    found: Mapping[str, Any] = data
    return found


def broken_limits(report: Report, limits: Mapping[str, Any]) -> list[str]:
    """Every limit that a row breaks, and every one that nothing was measured for, as sentences.

    A row is broken where it is worse than measured by more than the tolerance, and where it is better by more: then the
    numbers on record are no longer those of this code.
    """
    found = [
        f"{name}: {report.conditions.get(name)} (the limits are for {wanted})"
        for name, wanted in limits["conditions"].items()
        if report.conditions.get(name) != wanted
    ]
    rows = {r.name: r for r in report.rows}
    for scheme, quantities in limits["schemes"].items():
        for quantity, (wanted, tolerance) in quantities.items():
            test, attribute, _ = _LIMITS[quantity]
            summary = getattr(rows.get(scheme), test, None)
            if summary is None:
                found.append(f"{scheme} {quantity}: not measured")
                continue
            value = getattr(summary, attribute)
            if not abs(value - wanted) <= tolerance:
                found.append(f"{scheme} {quantity}: {value:.4f} (wants {wanted} ± {tolerance})")
    return found


# ---- plot ----------------------------------------------------------------------------------------------------


_PANELS: Final = (
    ("text", "kl", "KL against the unquantised cache, nats per token"),
    ("copying", "log_gap", "log-perplexity lost in copying, nats per token"),
)


def check_plot(tests: Sequence[str]) -> None:
    """SpecError unless a run of these tests can be plotted here."""
    if not {test for test, _, _ in _PANELS} & set(tests):
        raise SpecError("--plot", ", ".join(tests), "one of the tests text and copying")
    if find_spec("matplotlib") is None:
        raise SpecError("--plot", "no matplotlib", "it installed: pip install 'turboquant-rocm[bench]'")


def write_png(report: Report, path: Path) -> None:
    """KL on text and log-perplexity gap of copying against bytes per token; :func:`check_plot` says if it can."""
    shown = [p for p in _PANELS if any(getattr(r, p[0]) for r in report.rows if r.name != EXACT)]
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(shown), figsize=(7 * len(shown), 5), squeeze=False)
    for axis, (test, attribute, label) in zip(axes.flat, shown, strict=True):
        for row in report.rows:
            summary = getattr(row, test)
            if row.name == EXACT or summary is None:
                continue
            value = getattr(summary, attribute)
            axis.errorbar(
                row.bytes_per_token, value, yerr=getattr(summary, f"{attribute}_se", None), marker="o"
            )
            axis.annotate(row.name, (row.bytes_per_token, value), xytext=(4, 4), textcoords="offset points")
        axis.set(xlabel="bytes per token, all layers", ylabel=label, yscale="symlog")
        axis.set_yscale("symlog", linthresh=1e-3)
        axis.grid(True, which="both", alpha=0.3)
    figure.suptitle(
        f"{report.conditions['model']}, context {report.conditions['context']}", fontsize="medium"
    )
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=110)
    pyplot.close(figure)
