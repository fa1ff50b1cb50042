"""python -m turboquant_rocm.explain MODEL --target gfx950

Which backend does every layer of a model get on a GPU, why was every faster one refused, and what is the smallest
change that would get it? No GPU is needed, and nothing is imported that could need one, unless ``--env`` or
``--target local`` asks.

Exit status: 0 fine, 1 some layer is refused by every backend, 2 ``--expect`` is not met, 3 bad input,
4 a fault of this program (a traceback, please report it).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
import traceback
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from .backends import get_backend
from .dispatch import Policy
from .modelspec import bundled_models, load_model
from .options import parse_cache
from .planning import DEFAULT_BLOCK_SIZE, DEFAULT_PRESET, Plan, Question, answer_question
from .presets import preset_names
from .report.document import SCHEMA_VERSION, Document, matrix_document, plan_document, support_document
from .spec import AttentionKind, Dtype, ModelSpec, SpecError
from .target import get_target, target_names, targets

__all__ = ["main", "run"]

FINE: Final = 0
REFUSED: Final = 1
UNMET: Final = 2
BAD_INPUT: Final = 3
FAULT: Final = 4

FORMATS: Final = ("table", "json", "markdown", "html")


class _Parser(argparse.ArgumentParser):
    """argparse exits with 2 on bad input, which here means something else, and some fail on closed streams."""

    def error(self, message: str) -> NoReturn:
        _complain(f"{self.format_usage()}{self.prog}: error: {message}\n")
        raise SystemExit(BAD_INPUT)

    def print_help(self, file: Any = None) -> None:
        _write(self.format_help())


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m turboquant_rocm.explain",
        description="Which backend each layer of a model gets on a GPU, and why no faster one. Needs no GPU.",
        epilog="exit status: 0 fine, 1 some layer refused by every backend, 2 --expect not met, 3 bad input, "
        "4 a fault of this program",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help="config.json, its directory, a YAML description, a model id in the local Hugging Face cache, or one of: "
        + ", ".join(bundled_models())
        + ". Without it: what the backends support",
    )
    add(
        "--target",
        metavar="ARCH",
        help=f"local, or one of: {', '.join(target_names())}. Without it: all of them",
    )
    add(
        "--all-targets",
        action="store_true",
        help="a matrix of models (MODEL, or all bundled ones) and targets",
    )
    add(
        "--preset",
        default=DEFAULT_PRESET,
        metavar="P",
        help=f"one of: {', '.join(preset_names())}; behind it options of the cache, as in 3bit_nc+recent=128+key_mean",
    )
    add(
        "--block-size",
        default=str(DEFAULT_BLOCK_SIZE),
        metavar="N",
        help="tokens in a block of the paged cache",
    )
    add("--tp", default="1", metavar="N", help="tensor-parallel ranks")
    add("--dtype", metavar="D", help="of queries and raw keys: bf16, fp16 or fp32 (default: the model's)")
    add("--pad-heads", metavar="N", help="pad smaller heads with zeros to this size")
    add(
        "--protect",
        metavar="N",
        help="native layers at each end (default: 2 for dense models, 0 for hybrids)",
    )
    add(
        "--skip-layers",
        metavar="LIST",
        help="layers that stay native: indices, ranges and kinds, such as 0,4-7,sliding",
    )
    add("--policy", metavar="NAME", help="a policy in configs/policy: default, strict, interop")
    add("--force", metavar="BACKEND", help="only this backend; an error lists every reason against it")
    add("--deny", action="append", default=[], metavar="BACKEND", help="never this backend (may be repeated)")
    add(
        "--require",
        action="append",
        default=[],
        metavar="BACKEND",
        help="one of these or nothing (may be repeated)",
    )
    add("--no-fallback", action="store_true", help="the fastest backend built for the target, or nothing")
    add("--layout", choices=("soa", "aos"), help="only backends that read this layout")
    add("--expect", metavar="BACKEND", help="exit 2 unless every quantized layer gets this backend")
    add("--memory", metavar="SIZE", help="memory of one device, such as 192GiB: how many tokens fit")
    add("--weights", metavar="SIZE", help="weights on all ranks, such as 61GiB (bundled models know theirs)")
    add("--rows", default="256", metavar="N", help="query rows in one decode call, for the workspace")
    add("--format", choices=FORMATS, default="table")
    add("--width", metavar="N", help="columns of the table (default: the terminal's)")
    add("--output", metavar="FILE", help="write there instead of to standard output")
    add(
        "--env",
        action="store_true",
        help="packages, devices and variables of this machine that change a decision",
    )
    return parser


# ---- reading arguments ----------------------------------------------------------------------------------


def _integer(name: str, text: str, low: int = 1, high: int = 1 << 20) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,9}", text):
        raise SpecError(name, text, f"an integer from {low} to {high}")
    value = int(text)
    if not low <= value <= high:
        raise SpecError(name, value, f"an integer from {low} to {high}")
    return value


_UNITS: Final = {"": 1.0, "gib": 1.0, "g": 1.0, "gb": 1e9 / 2**30, "tib": 1024.0, "mib": 1 / 1024}


def _gib(name: str, text: str) -> float:
    """``192GiB``, ``61 GB`` or ``192`` (GiB)."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match.group(2).lower() not in _UNITS:
        raise SpecError(name, text, "a size such as 192GiB (MiB, GiB, GB, TiB)")
    value = float(match.group(1)) * _UNITS[match.group(2).lower()]
    if not 0 < value < 1e9:
        raise SpecError(name, text, "a size > 0")
    return value


def _skip(text: str, layers: int) -> frozenset[int | str]:
    """Indices, ranges and kinds, separated by commas."""
    kinds = {str(kind) for kind in AttentionKind}
    found: set[int | str] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        if part in kinds:
            found.add(part)
            continue
        match = re.fullmatch(r"(-?[0-9]{1,6})(?:-([0-9]{1,6}))?", part)
        if match is None:
            raise SpecError(
                "skip_layers", part, "indices, ranges such as 4-7, or kinds: " + ", ".join(sorted(kinds))
            )
        first = int(match.group(1))
        if first < 0:
            first += layers
        last = first if match.group(2) is None else int(match.group(2))
        if not 0 <= first <= last < layers:
            raise SpecError("skip_layers", part, f"layers from 0 to {layers - 1}")
        found.update(range(first, last + 1))
    return frozenset(found)


def _policy(options: argparse.Namespace) -> Policy:
    """The environment's policy, narrowed by the flags."""
    policy = Policy.from_environment()
    if options.policy is not None:
        policy = policy.narrowed_by(Policy.named(options.policy))
    flags = Policy(
        force=options.force,
        deny=frozenset(options.deny or ()),
        require=frozenset(options.require) if options.require else None,
        allow_fallback=not options.no_fallback,
        layout=options.layout,
    )
    return policy.narrowed_by(flags)


def _answer(options: argparse.Namespace, model: ModelSpec, arch: str, policy: Policy) -> Plan:
    """The plan that the options ask for. Not logged: nothing is being decided for a run."""
    return answer_question(
        Question(
            model=model,
            target=get_target(arch),
            preset=parse_cache(options.preset)[0],
            block_size=_integer("block_size", options.block_size),
            tp=_integer("tp", options.tp, high=1 << 16),
            policy=policy,
            protect=None
            if options.protect is None
            else _integer("protect", options.protect, low=0, high=10_000),
            skip=_skip(options.skip_layers or "", len(model.layers)),
            pad_heads=None
            if options.pad_heads is None
            else _integer("pad_heads", options.pad_heads, high=4096),
            dtype=None if options.dtype is None else Dtype(options.dtype),
            rows=_integer("rows", options.rows),
            memory_gib=None if options.memory is None else _gib("memory", options.memory),
            weights_gib=None if options.weights is None else _gib("weights", options.weights),
        )
    )


def _matrix(options: argparse.Namespace, names: Sequence[str], policy: Policy) -> Document:
    for name, value in (("--expect", options.expect), ("--memory", options.memory)):
        if value is not None:
            raise SpecError(name, value, "one MODEL and one --target")
    parse_cache(options.preset)
    rows = []
    for name in names:
        model = load_model(name)
        answers: dict[str, Plan | SpecError] = {}
        for arch in target_names():
            try:
                answers[arch] = _answer(options, model, arch, policy)
            except SpecError as error:
                if len(names) == 1:
                    raise
                answers[arch] = error
        rows.append((model, answers))
    return matrix_document(rows, tuple(targets().values()))


def _document(options: argparse.Namespace) -> Document:
    if options.dtype is not None and options.dtype not in ("bf16", "fp16", "fp32"):
        raise SpecError("dtype", options.dtype, "one of bf16, fp16, fp32")
    if options.expect is not None:
        get_backend(options.expect)
        if options.model is None:
            raise SpecError("--expect", options.expect, "a MODEL and a --target")
    policy = _policy(options)
    if options.env and options.model is None:
        from .report.environment import environment_document

        return environment_document(SCHEMA_VERSION)
    if options.model is None and not options.all_targets:
        if options.target is not None:
            raise SpecError("MODEL", None, "a model, with --target")
        return support_document(targets())
    if options.all_targets and options.target is not None:
        raise SpecError("--all-targets", "--target", "one of the two")
    if options.model is None:
        return _matrix(options, bundled_models(), policy)
    if options.all_targets or options.target is None:
        return _matrix(options, [options.model], policy)
    answer = _answer(options, load_model(options.model), options.target, policy)
    return plan_document(
        answer,
        expected=options.expect,
        every_change=options.format == "json",
        options=parse_cache(options.preset)[1],
    )


# ---- printing -------------------------------------------------------------------------------------------


def _printable(value: Any) -> Any:
    """``value`` with control, format (bidirectional overrides) and lone surrogate characters of its strings escaped.

    A model's name comes from a file that somebody else wrote; it must not steer the reader's terminal.
    """
    if isinstance(value, str):
        unsafe = ("Cc", "Cf", "Cs")
        return "".join(
            c.encode("unicode_escape").decode() if unicodedata.category(c) in unsafe and c != "\n" else c
            for c in value
        )
    if isinstance(value, Mapping):
        return {_printable(k): _printable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_printable(v) for v in value) if type(value) in (list, tuple) else value
    return value


def render(document: Document, form: str, width: int | None = None, color: bool = False) -> str:
    """``document`` in one of FORMATS. json and html are ASCII: valid whatever the encoding of the terminal."""
    document = _printable(document)
    if form == "json":
        return json.dumps(document, indent=1) + "\n"
    if form == "html":
        from .report.page import page

        return page(document).encode("ascii", "xmlcharrefreplace").decode("ascii")
    from .report.text import markdown, table

    return markdown(document) if form == "markdown" else table(document, width, color)


def run(arguments: Sequence[str]) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of the command; nothing is printed."""
    options = _parser().parse_args(arguments)
    document = _document(options)
    if options.env and options.model is not None:
        from .report.environment import environment_document

        document = {**document, "environment": environment_document(SCHEMA_VERSION)}
    width = None if options.width is None else _integer("width", options.width, low=40, high=1000)
    terminal = options.output is None and sys.stdout is not None and sys.stdout.isatty()
    if width is None and not terminal:
        width = 240 if "rows" in document else 160
    text = render(document, options.format, width, color=terminal)
    notes = ""
    expect = document.get("expect")
    if expect is not None and not expect["met"]:
        missed = expect["missed_layers"]
        notes = f"expected {expect['backend']} everywhere: {len(missed) or 'all'} layers get something else\n"
    if options.output is not None:
        try:
            with open(options.output, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise SpecError("--output", options.output, f"a writable file ({error.strerror})") from None
        text = ""
    return int(document["exit"]), text, notes


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    try:
        status, text, notes = run(sys.argv[1:] if arguments is None else arguments)
    except SpecError as error:
        _complain(_printable(f"error: {error}\n"))
        return BAD_INPUT
    except Exception:  # a fault of ours must not look like an answer: statuses 0 to 2 are answers
        _complain(traceback.format_exc())
        _complain("error: this is a fault of turboquant_rocm, not of the input; please report it\n")
        return FAULT
    try:
        _write(text)
    except OSError as error:
        _complain(f"error: standard output: {error.strerror}\n")
        return BAD_INPUT
    _complain(notes)
    return status


def _complain(text: str) -> None:
    """``text`` on standard error, if somebody listens."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()


def _write(text: str) -> None:
    """``text`` on standard output, or as much of it as the reader wants."""
    if sys.stdout is None:  # closed by whoever started us
        return
    if isinstance(sys.stdout, io.TextIOWrapper):  # a C locale can print ASCII only
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer must not fail a second time when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader has seen enough
            raise


if __name__ == "__main__":
    sys.exit(main())
