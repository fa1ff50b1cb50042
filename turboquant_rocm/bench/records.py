"""What comes out: rows, the run they belong to, JSON and CSV, and the comparison of two runs. No framework here."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from ..spec import SpecError
from .cases import Case

__all__ = [
    "MIN_CHANGE",
    "SCHEMA",
    "Comparison",
    "Machine",
    "Row",
    "Run",
    "Time",
    "Verdict",
    "compare",
    "noise",
    "percent_of",
]

SCHEMA: Final = "turboquant_rocm.bench/1"

STATUSES: Final = ("ok", "wrong", "failed", "refused")
"""``wrong``: the result was wrong, so it was not timed. ``failed``: the backend raised. ``refused``: not eligible."""

MIN_CHANGE: Final = 0.03
"""Share of a time below which a change is taken for noise, whatever the spreads: clocks and memory vary from one
process to the next, which the spread inside a run does not show."""

_SIGMAS: Final = 3.0
_IQR_PER_SIGMA: Final = 1.349  # of a normal distribution


@dataclass(frozen=True, slots=True)
class Time:
    """Median and interquartile range of a time, in microseconds."""

    us: float
    spread: float

    def __str__(self) -> str:
        return f"{self.us:.1f} ± {self.spread:.1f}"


@dataclass(frozen=True, slots=True)
class Row:
    """One case on one backend (or one bf16 baseline).

    nbytes: what has to move at least once (:meth:`Case.bytes_moved`). percent: of the measured ceiling. graph: time
    of a call, in a CUDA or HIP graph over ``copies`` rotated sets of inputs (``wall`` clock in a smoke run). cpu:
    time that an eager call keeps the CPU. launches: kernels, copies and fills of a call. bf16: times of the
    baselines, by name. error: relative L2 error against the fp64 oracle, which must be within ``tolerance``. note:
    reasons of a refusal, the text of a failure, or how it was run.
    """

    case: Case
    backend: str
    layout: str = ""
    status: str = "ok"
    nbytes: int = 0
    graph: Time | None = None
    percent: float | None = None
    cpu: Time | None = None
    launches: int | None = None
    bf16: Mapping[str, float] = field(default_factory=dict)
    error: float | None = None
    tolerance: float | None = None
    copies: int = 0
    note: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise SpecError("row status", self.status, "one of " + ", ".join(STATUSES))

    @property
    def key(self) -> tuple[Case, str, str]:
        """What identifies the row in another run."""
        return self.case, self.backend, self.layout

    @property
    def title(self) -> str:
        """The row for people."""
        preset = "" if self.backend.startswith("bf16") else self.case.preset.removeprefix("turboquant_")
        return " ".join(
            filter(None, (self.case.operation, preset, self.case.title(), self.backend, self.layout))
        )

    def metric(self, name: str) -> float | None:
        """The value of one of the metrics that goals are about; None where it was not measured."""
        if self.status != "ok":
            return None
        if name == "bf16_ratio":
            paged = self.bf16.get("bf16_paged")
            return None if paged is None or self.graph is None else paged / self.graph.us
        values = {
            "percent": self.percent,
            "us": None if self.graph is None else self.graph.us,
            "cpu_us": None if self.cpu is None else self.cpu.us,
            "launches": self.launches,
        }
        return values[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "case": self.case.to_dict(), "bf16": dict(self.bf16)}

    @classmethod
    def from_dict(cls, data: Any) -> Row:
        """The inverse of :meth:`to_dict`; SpecError names what is missing or wrong."""
        data = _exactly("row", data, cls)
        values = dict(data, case=Case.from_dict(data["case"]))
        for name in ("graph", "cpu"):
            if values[name] is not None:
                pair = _exactly(f"row {name}", values[name], Time)
                values[name] = Time(
                    _number(f"row {name} us", pair["us"]), _number(f"row {name} spread", pair["spread"])
                )
        if not isinstance(values["bf16"], Mapping):
            raise SpecError("row bf16", values["bf16"], "a mapping of baselines to microseconds")
        values["bf16"] = {str(k): _number(f"row bf16 {k}", v) for k, v in values["bf16"].items()}
        for name in ("percent", "error", "tolerance"):
            if values[name] is not None:
                values[name] = _number(f"row {name}", values[name])
        for name in ("backend", "layout", "status", "note"):
            if not isinstance(values[name], str):
                raise SpecError(f"row {name}", values[name], "a text")
        for name in ("nbytes", "copies", "launches"):
            value = values[name]
            if not (name == "launches" and value is None) and (
                isinstance(value, bool) or not isinstance(value, int)
            ):
                raise SpecError(f"row {name}", value, "an integer")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and with what a run was made. smoke: wall-clock times of a CPU, which say nothing about a GPU."""

    device: str
    arch: str
    commit: str
    date: str
    command: str
    versions: Mapping[str, str]
    smoke: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """All rows of one invocation. ceilings: bytes per second that plain kernels reach, ``read`` and ``copy``."""

    machine: Machine
    ceilings: Mapping[str, float]
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        """The run as JSON text; the schema is :data:`SCHEMA`. NaN and infinities, which JSON lacks, are refused."""
        data = {
            "schema": SCHEMA,
            "machine": {**asdict(self.machine), "versions": dict(self.machine.versions)},
            "ceilings": dict(self.ceilings),
            "rows": [row.to_dict() for row in self.rows],
        }
        return json.dumps(data, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "run") -> Run:
        """The inverse of :meth:`to_json`; SpecError names ``source`` and the field that is wrong."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise SpecError(source, text[:40], f"JSON ({error})") from None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            got = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise SpecError(f"{source} schema", got, SCHEMA)
        if set(data) != {"schema", "machine", "ceilings", "rows"}:
            raise SpecError(source, sorted(data), "exactly the fields schema, machine, ceilings and rows")
        try:
            machine = Machine(**_exactly("machine", data["machine"], Machine))
            if not isinstance(data["ceilings"], dict) or not isinstance(data["rows"], list):
                raise SpecError("rows", type(data["rows"]).__name__, "a list, beside a mapping of ceilings")
            ceilings = {str(k): _number(f"ceilings {k}", v) for k, v in data["ceilings"].items()}
            rows = tuple(Row.from_dict(row) for row in data["rows"])
        except SpecError as error:
            raise SpecError(f"{source}: {error.field}", error.got, error.wants) from None
        return cls(machine, ceilings, rows)

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read a JSON file."""
        try:
            return cls.from_json(path.read_text(encoding="utf-8"), path.name)
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError("run", str(path), f"a readable file ({error})") from None

    def to_csv(self) -> str:
        """One line per row; the machine is repeated, so that files can be joined."""
        out = io.StringIO()
        case_names = [f.name for f in fields(Case)]
        header = [
            *("backend", "layout", "status"), *case_names,
            *("us", "spread_us", "bytes", "ceiling", "ceiling_bytes_s", "percent"),
            *("cpu_us", "cpu_spread_us", "launches"),
            *("bf16_paged_us", "bf16_sdpa_us", "bf16_ratio", "error", "tolerance", "copies", "note"),
            *("device", "arch", "commit", "date", "smoke", "versions"),
        ]  # fmt: skip
        writer = csv.DictWriter(out, header, lineterminator="\n")
        writer.writeheader()
        for row in self.rows:
            machine = self.machine
            writer.writerow(
                {
                    **row.case.to_dict(),
                    **{
                        n: getattr(row, n)
                        for n in ("backend", "layout", "status", "percent", "launches", "note")
                    },
                    **{n: getattr(row, n) for n in ("error", "tolerance", "copies")},
                    **{n: getattr(machine, n) for n in ("device", "arch", "commit", "date", "smoke")},
                    "us": row.graph and row.graph.us,
                    "spread_us": row.graph and row.graph.spread,
                    "cpu_us": row.cpu and row.cpu.us,
                    "cpu_spread_us": row.cpu and row.cpu.spread,
                    "bytes": row.nbytes,
                    "ceiling": row.case.ceiling,
                    "ceiling_bytes_s": self.ceilings.get(row.case.ceiling),
                    "bf16_paged_us": row.bf16.get("bf16_paged"),
                    "bf16_sdpa_us": row.bf16.get("bf16_sdpa"),
                    "bf16_ratio": row.metric("bf16_ratio"),
                    "versions": "; ".join(f"{k} {v}" for k, v in machine.versions.items()),
                }
            )
        return out.getvalue()


def _exactly(where: str, data: Any, kind: Any) -> Mapping[str, Any]:
    names = {f.name for f in fields(kind)}
    if not isinstance(data, Mapping) or set(data) != names:
        got = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
        raise SpecError(where, got, f"exactly the fields {sorted(names)}")
    return data


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise SpecError(where, value, "a finite number >= 0")
    return float(value)


def percent_of(nbytes: int, us: float, ceiling: float) -> float:
    """Percent of ``ceiling`` (bytes per second) that moving ``nbytes`` in ``us`` microseconds is."""
    return 100.0 * nbytes / (us * 1e-6) / ceiling


# ---- comparison ---------------------------------------------------------------------------------------------


def noise(old: Time, new: Time, min_change: float = MIN_CHANGE) -> float:
    """Microseconds that two medians may differ by without a cause.

    Three standard deviations of the difference, estimated from the interquartile ranges, and no less than
    ``min_change`` of the old median.
    """
    return max(_SIGMAS * math.hypot(old.spread, new.spread) / _IQR_PER_SIGMA, min_change * old.us)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One difference. kind: slower, faster, same, launches, broken, repaired, missing or added."""

    kind: str
    title: str
    what: str = ""
    old: Time | None = None
    new: Time | None = None
    allowed: float = 0.0

    @property
    def regression(self) -> bool:
        """True for what must not happen."""
        return self.kind in ("slower", "launches", "broken")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every row of both runs, judged."""

    verdicts: tuple[Verdict, ...]

    @property
    def regressions(self) -> tuple[Verdict, ...]:
        """What got worse beyond the noise."""
        return tuple(v for v in self.verdicts if v.regression)


def _by_key(run: Run) -> dict[tuple[Case, str, str], Row]:
    return {row.key: row for row in run.rows}


def compare(old: Run, new: Run, min_change: float = MIN_CHANGE) -> Comparison:
    """Judge ``new`` by ``old``: times beyond the :func:`noise`, more kernels per call, results that became wrong.

    SpecError if the runs are of different devices or if one of them is a smoke run and the other is not.
    """
    for name in ("device", "smoke"):
        a, b = getattr(old.machine, name), getattr(new.machine, name)
        if a != b:
            raise SpecError(f"new {name}", b, f"{a}, as in the old run: other machines' times say nothing")
    before, after = _by_key(old), _by_key(new)
    found: list[Verdict] = []
    for key, row in after.items():
        was = before.get(key)
        if was is None:
            found.append(Verdict("added", row.title))
            continue
        if (was.status == "ok") != (row.status == "ok"):
            kind = "broken" if was.status == "ok" else "repaired"
            found.append(Verdict(kind, row.title, f"{was.status} -> {row.status} {row.note}".strip()))
            continue
        if was.launches is not None and row.launches is not None and row.launches > was.launches:
            found.append(Verdict("launches", row.title, f"{was.launches} -> {row.launches} launches"))
        for what, a, b in (("call", was.graph, row.graph), ("CPU", was.cpu, row.cpu)):
            if a is None or b is None:
                continue
            allowed, change = noise(a, b, min_change), b.us - a.us
            kind = "slower" if change > allowed else "faster" if change < -allowed else "same"
            found.append(Verdict(kind, row.title, what, a, b, allowed))
    found += [Verdict("missing", row.title) for key, row in before.items() if key not in after]
    return Comparison(tuple(found))


def joined(runs: Sequence[Run]) -> tuple[Row, ...]:
    """Rows of several runs; a later one replaces an earlier one of the same key."""
    rows: dict[tuple[Case, str, str], Row] = {}
    for run in runs:
        rows.update(_by_key(run))
    return tuple(rows.values())
