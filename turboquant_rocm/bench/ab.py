"""``bench ab``: transformers' own cache against packed ones on a model. What is compared, and what comes out.

No framework here; :mod:`.models` measures. The baseline is measured in the same rounds as every other arm, in turn, and
a difference is one only if it exceeds the noise of both (:func:`.records.noise`).
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from ..options import parse_cache
from ..spec import SpecError
from .display import ROW_STYLE, machine_line
from .records import Machine, Time, noise

__all__ = ["BASELINE", "MODES", "SCHEMA", "AbRow", "AbRun", "Arm", "ab_table", "arms_of", "verdict"]

SCHEMA: Final = "turboquant_rocm.bench.ab/1"
BASELINE: Final = "transformers"
"""Name of the row that all others are compared with: transformers' own cache and the model's own attention."""
MODES: Final = ("cache", "off", "capture_only", "hybrid", "full")
"""``cache``: a TurboQuantCache. The others are those of :mod:`..integrations.capture`; ``off`` is the baseline again, a
control of the harness."""
BIT_IDENTICAL: Final = frozenset({"off", "capture_only"})
"""Modes whose logits must be the baseline's, bit for bit."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One cache: a mode, and the preset with its options as written (empty for ``off``)."""

    mode: str
    preset: str = ""

    @property
    def title(self) -> str:
        """Name in tables and files."""
        return f"{self.mode} {self.preset}".strip()


def arms_of(modes: Sequence[str], presets: Sequence[str]) -> tuple[Arm, ...]:
    """Every mode with every preset, each once. SpecError for options (``+recent=N`` ...) with a mode that has none."""
    found: dict[Arm, None] = {}
    for mode in modes:
        if mode not in MODES:
            raise SpecError("--mode", mode, "one of " + ", ".join(MODES))
        for name in presets:
            preset, options = parse_cache(name)
            if options and mode not in ("cache", "off"):
                raise SpecError("--preset", name, f"no options: {mode} has a ring of exact tokens of its own")
            short = f"{preset.name.removeprefix('turboquant_')}{options}"
            found[Arm(mode) if mode == "off" else Arm(mode, short)] = None
    return tuple(found)


@dataclass(frozen=True, slots=True)
class AbRow:
    """One arm. status: ``ok``, ``refused`` (no backend may serve it), ``wrong`` or ``failed``; note says why.

    backend, packed_layers: what serves, and how many layers. prefill: of the prompt; decode: of a token, both with the
    host's time. kv_bytes: held by the cache at the end, reserves included. peak_bytes: most that torch held at once
    beyond what it held before the cache was made. budget_tokens: tokens of one sequence that fit the budget, without
    reserves. equal_tokens of ``tokens``: greedy tokens that are the baseline's, in their place; first_difference: place
    of the first that is not, from 0. top1, kl: share of equal likeliest tokens, and KL(baseline || arm) in nats per
    token, on the baseline's own tokens.
    """

    arm: str
    status: str = "ok"
    note: str = ""
    backend: str = ""
    packed_layers: int = 0
    prefill: Time | None = None
    decode: Time | None = None
    kv_bytes: int | None = None
    peak_bytes: int | None = None
    budget_tokens: int | None = None
    tokens: int = 0
    equal_tokens: int | None = None
    first_difference: int | None = None
    top1: float | None = None
    kl: float | None = None


def verdict(base: Time | None, other: Time | None) -> str:
    """``1.23x slower``, ``1.23x faster``, or ``within noise`` where the difference is no larger than the noise."""
    if base is None or other is None:
        return ""
    change = other.us - base.us
    if abs(change) <= noise(base, other):
        return "within noise"
    return f"{other.us / base.us:.2f}x slower" if change > 0 else f"{base.us / other.us:.2f}x faster"


@dataclass(frozen=True, slots=True)
class AbRun:
    """All arms of one invocation, the baseline first. conditions: model, text, lengths, repeats, budget ..."""

    machine: Machine
    conditions: Mapping[str, Any]
    rows: tuple[AbRow, ...]

    def verdicts(self, row: AbRow) -> dict[str, str]:
        """Of prefill and decode of ``row`` against the baseline; empty for the baseline itself."""
        base = self.rows[0]
        if row is base:
            return {"prefill": "", "decode": ""}
        return {name: verdict(getattr(base, name), getattr(row, name)) for name in ("prefill", "decode")}

    @property
    def status(self) -> int:
        """0 if every arm was measured; 1 if one is wrong or failed, or if there is nothing but the baseline."""
        others = self.rows[1:]
        bad = any(row.status in ("wrong", "failed") for row in self.rows)
        return int(bad or not any(row.status == "ok" for row in others))

    def to_json(self) -> str:
        """The run as JSON text, with the keys of other runs (``schema``, ``machine``, ``rows``) and ``conditions``."""
        data = {
            "schema": SCHEMA,
            "machine": {**asdict(self.machine), "versions": dict(self.machine.versions)},
            "conditions": dict(self.conditions),
            "rows": [{**asdict(row), "verdicts": self.verdicts(row)} for row in self.rows],
        }
        return json.dumps(data, indent=1, allow_nan=False) + "\n"

    def to_csv(self) -> str:
        """One line per arm; machine and conditions are repeated, so that files can be joined."""
        out = io.StringIO()
        writer: csv.DictWriter[str] | None = None
        for row in self.rows:
            line = asdict(row)
            for name in ("prefill", "decode"):
                time = line.pop(name) or {"us": None, "spread": None}
                line |= {f"{name}_us": time["us"], f"{name}_spread_us": time["spread"]}
                line[f"{name}_verdict"] = self.verdicts(row)[name]
            line |= dict(self.conditions)
            machine = self.machine
            line |= {n: getattr(machine, n) for n in ("device", "arch", "commit", "date", "smoke")}
            line["versions"] = "; ".join(f"{k} {v}" for k, v in machine.versions.items())
            if writer is None:
                writer = csv.DictWriter(out, list(line), lineterminator="\n")
                writer.writeheader()
            writer.writerow(line)
        return out.getvalue()

    def headline(self) -> str:
        """Machine and conditions in a line."""
        c = self.conditions
        text = (
            f"{c['model']}, {c['dtype']}, {c['attention']} attention, {c['batch']} x {c['prompt']} tokens "
            f"({c['text']}), {c['new']} new ones, {c['repeats']} interleaved repeats. {machine_line(self.machine)}"
        )
        if self.machine.smoke:
            text = f"Times are a CPU's and say nothing about kernels on a GPU. {text}"
        return text

    def to_markdown(self) -> str:
        """The run as Markdown: what was run, and the table."""
        lines = [f"Made by `{self.machine.command}`.", "", self.headline() + ".", ""]
        names = _columns(self)
        lines += ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
        lines += [
            "| " + " | ".join(text.replace("|", "/") for text in _cells(self, row)) + " |"
            for row in self.rows
        ]
        return "\n".join(lines) + "\n"


def _columns(run: AbRun) -> tuple[str, ...]:
    return (
        "cache", "backend", "prefill ms", "", "decode ms/token", "", "KV bytes", "peak MiB",
        f"tokens in {_size(run.conditions['budget'])}", "equal tokens", "top-1", "KL", "note",
    )  # fmt: skip


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} bytes"


def _milliseconds(time: Time | None) -> str:
    return "" if time is None else f"{time.us / 1e3:.2f} ± {time.spread / 1e3:.2f}"


def _cells(run: AbRun, row: AbRow) -> tuple[str, ...]:
    verdicts = run.verdicts(row)
    equal = "" if row.equal_tokens is None else f"{row.equal_tokens}/{row.tokens}"
    if row.first_difference is not None:
        equal += f", first {row.first_difference}"
    return (
        row.arm,
        row.backend + (f", {row.packed_layers} layers" if row.packed_layers else ""),
        _milliseconds(row.prefill) or row.status,
        verdicts["prefill"],
        _milliseconds(row.decode),
        verdicts["decode"],
        "" if row.kv_bytes is None else f"{row.kv_bytes:,}",
        "n/a" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.1f}",
        "" if row.budget_tokens is None else f"{row.budget_tokens:,}",
        equal,
        "" if row.top1 is None else f"{row.top1:.1%}",
        "" if row.kl is None else f"{row.kl:.4f}",
        row.note,
    )


def ab_table(run: AbRun) -> Table:
    """A line per arm."""
    table = Table(
        title="Transformers' own cache against packed ones",
        title_justify="left",
        caption="± interquartile range of the repeats. KV bytes: held at the end. peak: memory beyond the weights. "
        "equal tokens: greedy ones, in their place. top-1, KL: on the baseline's tokens.",
    )
    for name in _columns(run):
        left = name in ("cache", "backend", "note", "")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "note")
    for row in run.rows:
        table.add_row(*(Text(text) for text in _cells(run, row)), style=ROW_STYLE.get(row.status))
    return table
