"""``python -m turboquant_rocm.bench``: the command line. Loads torch only when something is measured.

Exit status: 0 fine, 1 a result was wrong or failed, a comparison found a regression, or nothing could be measured,
2 bad arguments or input, 3 no GPU that torch can see.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..backends import backends, get_backend
from ..dispatch import IneligibleError
from ..eligibility import Code, Request
from ..explain import _gib
from ..packages import installed_version
from ..presets import get_preset, preset_names
from ..spec import SpecError, Target
from ..target import get_target
from ..verify import _check_writable, fitting_console
from .ab import MODES, AbRun, ab_table, arms_of
from .cases import LENGTHS, OPERATIONS, Case, Job, Profile, parse_profiles, read_profiles
from .display import GIVEN_WIDTH, comparison_table, goal_table, headline, markdown, row_table
from .goals import jobs_of, judge
from .records import MIN_CHANGE, Row, Run, compare

if TYPE_CHECKING:
    from .measure import Harness

__all__ = ["main"]

FINE: Final = 0
WORSE: Final = 1
BAD_INPUT: Final = 2
NO_DEVICE: Final = 3

_LAUNCH: Final = ("launch-decode", "launch-store")
_SMOKE: Final = "cpu"


class _NoDevice(Exception):
    """There is no GPU, and nobody asked for a smoke run."""


# ---- arguments ----------------------------------------------------------------------------------------------


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= 1 << 24:
        raise argparse.ArgumentTypeError(f"{text} (wants an integer from 1 to {1 << 24})")
    return value


def _count(text: str) -> int:
    return 0 if text == "0" else _positive(text)


def _change(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value < 10:
        raise argparse.ArgumentTypeError(f"{text} (wants a percentage from 0 to 1000, such as 3%)")
    return value


def _ab_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL_DIR", help="config and weights of transformers, a causal LM")
    add("--text", type=Path, metavar="FILE", help="UTF-8 text that the prompts are cut from (default: random tokens, "
        "which say little about agreement)")  # fmt: skip
    add("--mode", action="append", choices=MODES, help="cache: a TurboQuantCache (default); capture_only, hybrid and "
        "full: compressed stores; off: the baseline again, as a control (repeatable)")  # fmt: skip
    add(
        "--preset",
        action="append",
        metavar="P",
        help=f"of {', '.join(preset_names())}, with options behind it as +recent=N (repeatable; default: 4bit_nc)",
    )
    add("--attention", choices=("direct", "drop-in"), default="direct", help="over packed bytes (default), or the "
        "model's own over dequantised tokens")  # fmt: skip
    add("--prompt", type=_positive, default=512, metavar="TOKENS", help="of each sequence (default: 512)")
    add("--new", type=_positive, default=32, metavar="TOKENS", help="decoded after the prompt (default: 32)")
    add("--batch", type=_positive, default=1, metavar="N", help="sequences (default: 1)")
    add("--repeats", type=_positive, default=5, help="timed passes of each cache, in turn (default: 5)")
    add("--budget", default="1GiB", metavar="SIZE", help="memory whose tokens are counted (default: 1GiB)")
    add(
        "--backend",
        metavar="NAME",
        help="default: torch_reference on a CPU, the dispatcher's choice on a GPU",
    )
    add("--block-size", type=_positive, default=16, metavar="N", help="default: 16")
    add(
        "--protect",
        type=_count,
        metavar="N",
        help="layers at each end that stay native (default: the cache's)",
    )
    add(
        "--ring-tokens", type=_count, default=128, metavar="N", help="exact tokens of hybrid and capture_only"
    )
    group = parser.add_argument_group("where and how")
    group.add_argument("--device", default="cuda", help="cuda (ROCm devices, too), cuda:1 ..., or cpu, "
                       "whose times say nothing about kernels (default: cuda)")  # fmt: skip
    group.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="default: fp32 on a CPU, bf16 on a GPU"
    )
    group.add_argument("--commit", help="what to note as the commit, where the files carry no history")
    group.add_argument("--traceback", action="store_true", help="show where a failed cache failed")
    group = parser.add_argument_group("output")
    for name, what in (("json", "the run"), ("csv", "one line per cache"), ("markdown", "the table")):
        group.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write {what}")


def _device_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where and how")
    group.add_argument(
        "--device",
        default="cuda",
        help="cuda (what torch calls ROCm devices, too), cuda:1 ..., or cpu: a smoke run of the harness itself, with "
        "the torch reference, small shapes and a wall clock, whose numbers mean nothing (default: cuda)",
    )
    group.add_argument("--replays", type=_positive, default=15, help="timed repetitions (default: 15)")
    group.add_argument("--quick", action="store_true", help="5 repetitions, fewer tiles of the baseline, and in "
                       "`table` only what its goals ask for")  # fmt: skip
    group.add_argument("--no-baselines", action="store_true", help="do not time bf16 beside every case")
    group.add_argument("--commit", help="what to note as the commit, where the files carry no history")
    group.add_argument("--traceback", action="store_true", help="show where a failed case failed")


def _output_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json", type=Path, metavar="FILE", help="write the run, for compare, plot and table --run"
    )
    group.add_argument("--csv", type=Path, metavar="FILE", help="write one line per row")
    group.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown")
    group.add_argument(
        "--plot", type=Path, metavar="FILE", help="write time against context as a PNG (matplotlib)"
    )


def _profile_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile", action="append", default=[], metavar="NAME", help="only this one (repeatable)"
    )
    parser.add_argument("--profiles", type=Path, metavar="FILE", help="YAML in place of configs/bench.yaml")


_FLAGS: Final = (
    "preset",
    "heads",
    "head_size",
    "block_size",
    "shape",
    "lengths",
    "query_len",
    "window",
    "soft_cap",
    "dtype",
)


def _shape_flags(parser: argparse.ArgumentParser) -> None:
    _profile_flags(parser)
    group = parser.add_argument_group("shapes (each may be repeated; they replace those of the profile)")
    add = group.add_argument
    add(
        "--preset",
        action="append",
        metavar="P",
        help=f"of {', '.join(preset_names())}; default: those for serving",
    )
    add(
        "--shape",
        action="append",
        metavar="BxC",
        help="batch x context, such as 32x4096; of store, batch x tokens",
    )
    add("--heads", action="append", metavar="Q/K", help="query heads / KV heads, such as 64/8")
    add("--head-size", action="append", type=_positive, metavar="D")
    add("--block-size", action="append", type=_positive, metavar="N")
    add("--lengths", action="append", choices=LENGTHS, help="of the sequences: all of the context, log-uniform from "
        "128 to it, or all of the mean of those")  # fmt: skip
    add("--query-len", action="append", type=_positive, metavar="N", help="query tokens of each sequence")
    add("--window", action="append", type=_positive, metavar="W", help="sliding window, in tokens")
    add("--sinks", action="store_true", help="a sink per query head")
    add("--soft-cap", action="append", type=float, metavar="X")
    add("--dtype", action="append", choices=("bf16", "fp16"))
    add(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        help="only this one; default: all that are eligible",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m turboquant_rocm.bench",
        description="How fast is every backend here, beside bf16 and the memory's own speed?",
        epilog="exit status: 0 fine, 1 wrong results, regressions or nothing measured, 2 bad input, 3 no GPU",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")

    for operation in OPERATIONS:
        sub = command(operation, f"time {operation} on every eligible backend, and bf16 beside it")
        _shape_flags(sub)
        _device_flags(sub)
        _output_flags(sub)
    sub = command("launch", "CPU time of an eager call and kernels per call, for decode and store")
    _shape_flags(sub)
    _device_flags(sub)
    _output_flags(sub)
    sub = command("ceiling", "what a plain read and a plain copy of memory reach")
    _device_flags(sub)
    sub = command("all", "ceilings, decode, store, dequantize, prefill and launch at their default shapes")
    sub.add_argument(
        "--backend", action="append", default=[], metavar="NAME", help="only this one (repeatable)"
    )
    sub.add_argument("--profiles", type=Path, metavar="FILE", help="YAML in place of configs/bench.yaml")
    _device_flags(sub)
    _output_flags(sub)
    sub = command("table", "every requirement with its target, the measured value and the verdict")
    _profile_flags(sub)
    sub.add_argument("--details", action="store_true", help="every case, not only the worst")
    sub.add_argument("--run", type=Path, metavar="FILE", help="judge a saved run instead of measuring")
    sub.add_argument("--strict", action="store_true", help="exit 1 if a requirement is short or not measured")
    _device_flags(sub)
    _output_flags(sub)
    sub = command("compare", "name what became slower, wrong or larger in launches, beyond the noise")
    sub.add_argument("old", type=Path, metavar="OLD")
    sub.add_argument("new", type=Path, metavar="NEW")
    sub.add_argument(
        "--min-change",
        type=_change,
        default=MIN_CHANGE,
        metavar="PERCENT",
        help=f"smaller changes are noise whatever the spreads (default: {100 * MIN_CHANGE:g}%%)",
    )
    sub.add_argument("--everything", action="store_true", help="show what did not change, too")
    sub = command("tune", "search tile and split choices for the given shapes and write them as an override")
    _shape_flags(sub)
    sub.add_argument("--passes", type=_positive, default=2, help="over all parameters (default: 2)")
    sub.add_argument(
        "--output", type=Path, metavar="FILE", help="default: configs/tuned/<arch>/<backend>.yaml here"
    )
    sub.add_argument("--dry-run", action="store_true", help="print the file instead of writing it")
    _device_flags(sub)
    sub = command("ab", "transformers' own cache against packed ones on a model: times, memory, agreement")
    _ab_flags(sub)
    sub = command("plot", "time against context of saved runs, as a PNG")
    sub.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="JSON files; of one device")
    sub.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    return parser


# ---- profiles ------------------------------------------------------------------------------------------------


def _selected(args: argparse.Namespace, operation: str, defaults: Sequence[str]) -> tuple[Profile, ...]:
    """Profiles of ``--profile``, or ``defaults``, with the flags in place of their fields."""
    data, source = read_profiles(args.profiles)
    flags = {name: values for name in _FLAGS if (values := getattr(args, name, None))}
    if getattr(args, "sinks", False):
        flags["sinks"] = True
    chosen = {}
    for name in args.profile or defaults:
        if name not in data["profiles"]:
            raise SpecError("--profile", name, "one of " + ", ".join(data["profiles"]))
        profile = {**data["profiles"][name], **flags}
        if {"heads", "head_size", "window", "sinks", "soft_cap", "dtype"} & set(flags):
            for key in ("model", "tp"):  # the flags say what the model would have said
                profile.pop(key, None)
        if operation and profile.get("operation") != operation:
            raise SpecError("--profile", name, f"one for {operation}, not {profile.get('operation')}")
        profile.pop("goals", None)
        chosen[name] = profile
    return tuple(
        parse_profiles({"version": 1, "profiles": chosen}, source if not flags else "flags").values()
    )


def _jobs(profiles: Iterable[Profile], names: Sequence[str], smoke: bool) -> tuple[Job, ...]:
    """Every case of the profiles on the backends called ``names``, or on all that may be chosen for its values."""
    for name in names:
        get_backend(name)
    chosen = names or (["torch_reference"] if smoke else [b.name for b in backends() if b.automatic])
    jobs: dict[Job, None] = {}
    for profile in profiles:
        for job in profile.jobs:
            case = job.case
            asked = Request(case.layer(), get_target("cpu"), get_preset(case.preset), case.block_size)
            fitting = [n for n in chosen if names or get_backend(n).built_for(asked, Code.ROTATED_VALUES)]
            for name in [job.backend] if job.backend and not names else fitting:
                jobs[Job(case, name)] = None
    return tuple(jobs)


# ---- measuring -----------------------------------------------------------------------------------------------


def _device(name: str) -> tuple[Any, Target]:
    """The device called ``name``, made the current one, and its target."""
    try:
        import torch
    except ImportError as error:
        raise _NoDevice(
            f"torch cannot be imported ({error}); the extras cpu, nvidia and rocm say what to install"
        ) from None
    logging.getLogger("turboquant_rocm.dispatch").setLevel(logging.ERROR)  # refusals are printed as rows
    from ..target import detect

    if re.fullmatch(r"cpu|cuda(:\d{1,3})?", name) is None:
        raise SpecError("--device", name, "cuda, cuda:INDEX or cpu")
    if name == _SMOKE:
        return torch.device(name), replace(get_target("cpu"), local=True)
    if not torch.cuda.is_available():
        raise _NoDevice(
            "torch sees no GPU; --device cpu makes a smoke run of the harness, which measures nothing"
        )
    device = torch.device("cuda", torch.device(name).index or 0)
    torch.cuda.set_device(device)
    return device, detect(device.index)


def _harness(args: argparse.Namespace, console: Console) -> Harness:
    """Set up the device and measure its ceilings."""
    device, target = _device(args.device)
    import torch

    from .inputs import Setting
    from .measure import Harness
    from .timing import cold_bytes, copy_ceiling, read_ceiling

    smoke = device.type == _SMOKE
    replays = min(args.replays, 5) if args.quick else args.replays
    setting = Setting(device, target.vendor, cold_bytes(target, device), replays, args.quick)
    with console.status("ceilings"):
        ceilings = {"read": read_ceiling(device, 5), "copy": copy_ceiling(device, 5)}
    if not smoke:
        torch.cuda.empty_cache()

    def failed(text: str) -> None:
        if args.traceback:
            console.print(text, markup=False, highlight=False)

    return Harness(setting, target, ceilings, on_failure=failed)


def _run_of(args: argparse.Namespace, harness: Harness, rows: Iterable[Row], argv: Sequence[str]) -> Run:
    from .machine import machine

    return Run(
        machine(harness.target, harness.setting.device, argv, args.commit), harness.ceilings, tuple(rows)
    )


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _measure_all(
    harness: Harness,
    jobs: Sequence[Job],
    console: Console,
    wants: Mapping[Job, frozenset[str]],
    baselines: bool,
) -> dict[Job, Row]:
    """Every job, each case of a backend once: jobs that leave the backend open may mean one that others name. wants:
    what to measure of a job beside its time: ``eager``, ``baselines``."""
    same: dict[Job, list[Job]] = {}
    for job in jobs:
        same.setdefault(_decided(harness, job), []).append(job)
    rows: dict[Job, Row] = {}
    with _progress(console) as progress:
        task = progress.add_task("", total=len(same))
        for decided, those in same.items():
            case = decided.case
            where = f"{case.operation} {case.preset.removeprefix('turboquant_')} {case.title()}"
            progress.update(task, description=where)
            want = frozenset().union(*(wants.get(job, frozenset({"eager", "baselines"})) for job in those))
            rows[decided] = harness.measure(
                decided, eager="eager" in want, baselines=baselines and "baselines" in want
            )
            progress.advance(task)
        for job, row in rows.items():
            if row.cpu is not None:
                rows[job] = replace(row, launches=harness.launches(job))
    return {job: rows[decided] for decided, those in same.items() for job in those}


def _decided(harness: Harness, job: Job) -> Job:
    """The job with the backend that it will run on; unchanged where none takes it."""
    try:
        return Job(job.case, harness.decide(job).backend)
    except IneligibleError:
        return job


def _write(args: argparse.Namespace, run: Run | AbRun, text: str) -> None:
    """The files that were asked for. text: Markdown."""
    if args.json:
        args.json.write_text(run.to_json(), encoding="utf-8")
    if args.csv:
        args.csv.write_text(run.to_csv(), encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")


def _write_run(args: argparse.Namespace, run: Run, outcomes: Sequence[Any] = ()) -> None:
    _write(args, run, markdown(run, outcomes))
    if args.plot:
        from .plot import write_png

        write_png(run, args.plot)


def _by_shape(rows: Iterable[Row], baselines: Iterable[Row]) -> list[Row]:
    """Rows grouped by shape, the baselines of a shape first."""
    groups: dict[Case, list[Row]] = {}
    plain: dict[Case, list[Row]] = {}
    for row in baselines:
        plain.setdefault(row.case, []).append(row)
    for row in {row.key: row for row in rows}.values():
        groups.setdefault(row.case.shape, []).append(row)
    return [row for shape, own in groups.items() for row in (*plain.get(shape, ()), *own)]


def _status(rows: Iterable[Row]) -> int:
    """1 if a backend's result was wrong or failed, or if nothing was measured at all."""
    own = [row for row in rows if not row.backend.startswith("bf16")]
    if any(row.status in ("wrong", "failed") for row in own):
        return WORSE
    return FINE if any(row.status == "ok" for row in own) else WORSE


# ---- commands ------------------------------------------------------------------------------------------------


class _Session:
    """One invocation: arguments, and where to print. Tables go to standard output, all else to standard error."""

    def __init__(self, args: argparse.Namespace, argv: Sequence[str]) -> None:
        self.args = args
        self.argv = argv
        self.out = Console()
        if self.out.width < GIVEN_WIDTH:
            self.out = Console(width=GIVEN_WIDTH)
        self.err = Console(stderr=True)

    def run(self) -> int:
        """The exit status of the command."""
        command = self.args.command
        if command in OPERATIONS:
            return self._operations([(command, (command,))])
        if command == "launch":
            return self._operations([("", _LAUNCH)], launch=True)
        if command == "all":
            self.args.profile = []
            return self._operations([*((o, (o,)) for o in OPERATIONS), ("", _LAUNCH)])
        found: int = getattr(self, f"_{command}")()
        return found

    def _operations(self, wanted: Sequence[tuple[str, Sequence[str]]], launch: bool = False) -> int:
        args = self.args
        profiles = [p for operation, names in wanted for p in _selected(args, operation, names)]
        smoke = args.device.startswith(_SMOKE)
        jobs = _jobs(profiles, args.backend, smoke)
        harness = _harness(args, self.err)
        want = {job: frozenset({"eager"}) for job in jobs} if launch else {}
        measured = _measure_all(harness, jobs, self.err, want, not args.no_baselines)
        ready: list[Row] = []
        refused: dict[tuple[str, str], list[Job]] = {}
        for job, row in measured.items():
            if row.status == "refused":
                refused.setdefault((row.backend, row.note), []).append(job)
            else:
                ready.append(row)
        run = _run_of(args, harness, _by_shape(ready, harness.baseline_rows()), self.argv)
        self.out.print(headline(run), markup=False, highlight=False)
        if ready:
            self.out.print(row_table(run.rows))
        for (name, why), those in refused.items():
            self.out.print(
                f"refused {name}, {len(those)} of {len(jobs)} cases: {why}", markup=False, highlight=False
            )
        if not ready:
            self.err.print("nothing was measured: every backend was refused", style="red")
        _write_run(args, run)
        return _status(measured.values())

    def _ceiling(self) -> int:
        harness = _harness(self.args, self.err)
        run = _run_of(self.args, harness, (), self.argv)
        self.out.print(headline(run), markup=False, highlight=False)
        return FINE

    def _table(self) -> int:
        args = self.args
        data, source = read_profiles(args.profiles)
        profiles = parse_profiles(data, source)
        for name in args.profile:
            if name not in profiles:
                raise SpecError("--profile", name, "one of " + ", ".join(profiles))
        chosen = [p for p in profiles.values() if p.goals and (not args.profile or p.name in args.profile)]
        if not chosen:
            raise SpecError("--profile", args.profile, "profiles with goals")
        jobs = jobs_of(chosen)
        if args.run:
            run = Run.load(args.run)
            measured = {job: row for job in jobs if (row := _found(run, job)) is not None}
        else:
            harness = _harness(args, self.err)
            wants = _wants(chosen) if args.quick else {}
            measured = _measure_all(harness, jobs, self.err, wants, not args.no_baselines)
            run = _run_of(args, harness, _by_shape(measured.values(), harness.baseline_rows()), self.argv)
        outcomes = judge(chosen, measured)
        self.out.print(headline(run), markup=False, highlight=False)
        self.out.print(goal_table(outcomes, args.details, run.machine.smoke))
        counts = [f"{sum(o.verdict == v for o in outcomes)} {v}" for v in ("pass", "short", "not measured")]
        self.out.print(", ".join(counts))
        _write_run(args, run, outcomes)
        if any(row.status in ("wrong", "failed") for row in measured.values()):
            return WORSE
        return WORSE if args.strict and any(o.verdict != "pass" for o in outcomes) else FINE

    def _compare(self) -> int:
        args = self.args
        old, new = Run.load(args.old), Run.load(args.new)
        found = compare(old, new, args.min_change)
        for name, run in (("old", old), ("new", new)):
            self.out.print(f"{name}: {headline(run)}", markup=False, highlight=False)
        self.out.print(comparison_table(found, args.everything))
        same = sum(v.kind == "same" for v in found.verdicts)
        self.out.print(f"{len(found.regressions)} regressions, {same} times within the noise")
        return WORSE if found.regressions else FINE

    def _ab(self) -> int:
        args = self.args
        arms = arms_of(args.mode or ["cache"], args.preset or ["4bit_nc"])
        for name, least in (("repeats", 3), ("new", 2)):
            if getattr(args, name) < least:
                raise SpecError(f"--{name}", getattr(args, name), f"at least {least}")
        for name in ("json", "csv", "markdown"):
            if getattr(args, name) is not None:
                _check_writable(getattr(args, name), f"--{name}")
        budget = int(_gib("--budget", args.budget) * (1 << 30))
        if args.backend is not None:
            get_backend(args.backend)
        device, target = _device(args.device)
        from .machine import machine
        from .models import conditions, measure, passes, read_setup

        def failed(text: str) -> None:
            if args.traceback:
                self.err.print(text, markup=False, highlight=False)

        setup = read_setup(args, device, target, budget, failed)
        with _progress(self.err) as progress:
            task = progress.add_task("ab", total=passes(setup, arms))
            rows = measure(setup, arms, lambda: progress.advance(task))
        where = machine(target, device, self.argv, args.commit)
        versions = {**where.versions, "transformers": installed_version("transformers") or "?"}
        more = {
            "model": args.model.resolve().name,
            "text": args.text.name if args.text else "random tokens, which say little about agreement",
        }
        run = AbRun(replace(where, versions=versions), conditions(setup, **more), rows)
        table = ab_table(run)
        out = fitting_console(table)
        out.print(run.headline(), markup=False, highlight=False)
        out.print(table)
        _write(args, run, run.to_markdown())
        return run.status

    def _plot(self) -> int:
        from .plot import write_png

        runs = [Run.load(path) for path in self.args.runs]
        for run in runs[1:]:
            if run.machine.device != runs[0].machine.device:
                raise SpecError("plot", run.machine.device, f"runs of one device, {runs[0].machine.device}")
        rows = {row.key: row for run in runs for row in run.rows}
        write_png(replace(runs[-1], rows=tuple(rows.values())), self.args.output)
        return FINE

    def _tune(self) -> int:
        from .tune import tune

        args = self.args
        data, source = read_profiles(args.profiles)
        profiles = _selected(args, "decode", ("decode",))
        if args.device.startswith(_SMOKE):
            raise SpecError("--device", args.device, "a GPU: tile choices cannot be searched on a CPU")
        jobs = _jobs(profiles, args.backend or ["triton_soa"], smoke=False)
        harness = _harness(args, self.err)
        run = _run_of(args, harness, (), self.argv)
        self.out.print(headline(run), markup=False, highlight=False)
        files = tune(harness, jobs, data, source, run.machine, args.passes, self.err)
        for path, text in files.items():
            where = args.output or path
            if args.dry_run:
                self.out.print(f"# {where}\n{text}", markup=False, highlight=False)
            else:
                where.parent.mkdir(parents=True, exist_ok=True)
                where.write_text(text, encoding="utf-8")
                self.out.print(f"wrote {where}", markup=False, highlight=False)
        return FINE


def _wants(profiles: Iterable[Profile]) -> dict[Job, frozenset[str]]:
    """What the goals ask of every job beside its time."""
    needs = {"cpu_us": "eager", "launches": "eager", "bf16_ratio": "baselines"}
    found: dict[Job, frozenset[str]] = {}
    for profile in profiles:
        for goal in profile.goals:
            for job in profile.jobs:
                for each in filter(None, (job, goal.reference(job))):
                    more = {needs[goal.metric]} if goal.metric in needs else set()
                    found[each] = found.get(each, frozenset()) | more
    return found


def _found(run: Run, job: Job) -> Row | None:
    """The row of ``job`` in a saved run; without a backend, that of the fastest kind there is."""
    order = {backend.name: i for i, backend in enumerate(backends())}
    rows = [
        r for r in run.rows if r.case == job.case and r.backend in order and job.backend in (None, r.backend)
    ]
    row = min(rows, key=lambda row: (row.status != "ok", order[row.backend]), default=None)
    if row is None or row.status != "ok" or row.bf16:
        return row
    # one that was measured without baselines: those of its shape stand in rows of their own
    plain = [r for r in run.rows if r.backend.startswith("bf16") and r.case == row.case.shape]
    return replace(row, bf16={r.backend: r.graph.us for r in plain if r.graph})


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(argv)
    session = _Session(args, argv)
    try:
        return session.run()
    except SpecError as error:
        session.err.print(textwrap.shorten(f"error: {error}", 2000), style="red", markup=False)
        return BAD_INPUT
    except _NoDevice as error:
        session.err.print(f"no GPU: {error}", style="red", markup=False)
        return NO_DEVICE
