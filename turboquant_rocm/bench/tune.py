"""``bench tune`` on a device: groups cases by what a tuned file can tell apart, searches, confirms, and writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console

from ..ops import bind
from ..presets import get_preset, parse_yaml
from ..spec import SpecError
from ..tuned import choices, load_tuned
from .cases import Job
from .measure import Harness
from .records import Machine
from .search import MIN_GAIN, Measured, Trial, header_of, parse_space, render, search, with_override

__all__ = ["tune"]

_KERNEL = "decode"
_FIXED_IF_WIDE = ("tokens", "num_warps", "prefetch", "alone", "lazy")
"""What is no choice for tiles of four warps."""


def _path(arch: str, backend: str) -> Path:
    return Path(str(resources.files("turboquant_rocm.configs").joinpath("tuned", arch, f"{backend}.yaml")))


def _groups(harness: Harness, jobs: Sequence[Job]) -> dict[tuple[str, str, int, int, bool], list[Job]]:
    """Jobs by (backend, preset, head size, columns of a tile, whether it is wide.py's)."""
    found: dict[tuple[str, str, int, int, bool], list[Job]] = {}
    for job in jobs:
        decision = harness.decide(job)
        ops, case = bind(decision, checks="off").ops, job.case
        if not hasattr(ops, "plan_for"):
            raise SpecError("--backend", decision.backend, "a backend with tile choices, such as triton_soa")
        plan = ops.plan_for(case.batch, case.context, case.query_len, harness.setting.device)
        columns = int(plan.columns(job.case.query_len))
        wide = bool(plan.is_wide(columns))
        key = (decision.backend, job.case.preset, job.case.head_size, columns, wide)
        found.setdefault(key, []).append(job)
    return found


def tune(
    harness: Harness,
    jobs: Sequence[Job],
    data: Mapping[str, Any],
    source: str,
    machine: Machine,
    passes: int,
    console: Console,
) -> dict[Path, str]:
    """Texts of the tuned files, by where the loader looks for them. A group that gains nothing changes nothing."""
    from ..backends._triton.ops import COMPILER  # not before there is something to measure

    target, written = harness.target, {}
    documents: dict[Path, tuple[dict[str, Any], str]] = {}
    for (backend, preset, head_size, columns, wide), group in _groups(harness, jobs).items():
        name = get_preset(preset).name.removeprefix("turboquant_")
        facts = {"preset": name, "head_size": head_size, "columns": columns, "wide": wide}
        path = _path(target.arch, backend)
        if path not in documents:
            like = (
                path if path.exists() else _path({"nvidia": "sm_80", "amd": "gfx942"}[target.vendor], backend)
            )
            text = like.read_text(encoding="utf-8")
            documents[path] = (parse_yaml(text, path.name), header_of(text))
        document, header = documents[path]
        tuned = load_tuned(target.arch, target.vendor, backend)[_KERNEL]
        start = choices(tuned, **facts, compiler=COMPILER, multi=False, soft_cap=False)
        space = parse_space(data, _KERNEL, sorted(start), source)
        if wide:
            space = {name: values for name, values in space.items() if name not in _FIXED_IF_WIDE}

        def measure(values: Mapping[str, Any], group: list[Job] = group) -> Measured:
            times = []
            for job in group:
                row = harness.measure(job, eager=False, baselines=False, tuning=dict(values))
                if row.status != "ok" or row.graph is None:
                    return None, row.note
                times.append(row.graph.us)
            return times, ""

        where = f"{name} D={head_size} columns {columns}{' by four warps' if wide else ''}"

        def show(trial: Trial, start: Mapping[str, Any] = start, where: str = where) -> None:
            changed = {k: v for k, v in trial.values.items() if v != start[k]}
            score = trial.note if trial.score is None else f"{trial.score:.3f}"
            console.print(f"{where} {changed}: {score}", markup=False, highlight=False)

        with console.status(f"{backend} {where}"):
            found = search(start, space, measure, passes=passes, on_trial=show)
            if not found.changed:
                console.print(f"{where}: nothing is faster", markup=False)
                continue
            before, after = measure(start)[0], measure(found.values)[0]
        if before is None or after is None or sum(after) > sum(before) * (1 - MIN_GAIN):
            console.print(f"{where}: the gain did not repeat", markup=False)
            continue
        provenance = {
            "device": machine.device,
            "arch": machine.arch,
            "versions": dict(machine.versions),
            "commit": machine.commit,
            "date": machine.date,
            "command": machine.command,
            "times_us": [
                {"case": job.case.title(), "before": round(a, 2), "after": round(b, 2)}
                for job, a, b in zip(group, before, after, strict=True)
            ],
        }
        when = {key: [value] for key, value in facts.items()}
        document = with_override(document, _KERNEL, when, found.changed, provenance)
        documents[path] = (document, header)
        written[path] = render(document, header)
    return written
