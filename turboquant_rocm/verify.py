"""``python -m turboquant_rocm.verify``: store real or synthetic keys and values, decode, and compare.

The tokens go into a paged cache with a shuffled block table; the last tokens' queries are decoded from it. Four
things decide the exit code, none of them as an average: the stored fields of every token and head equal the
reference's; keys and values of every head are read back as by an ideal quantiser, itself near the theoretical
distortion on keys made for it; every row and head of the output agrees with fp64 attention over the dequantised cache;
non-finite vectors are counted. Attention over the unquantised tensors shows what quantisation costs. Exit codes: 0
within tolerance, 1 outside, 2 bad arguments or input, or no torch.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table

from . import __version__
from .backends import get_backend
from .dispatch import Policy, decide
from .layouts import LAYOUT_NAMES
from .presets import get_preset, preset_names, serving_names
from .spec import MAX_HEADS, SpecError, Target

if TYPE_CHECKING:
    import torch

    from .accuracy import Measurement

__all__ = ["main"]

BAD_INPUT: Final = 2
_TEXT_COLUMNS: Final = ("tensors", "preset", "layout")


def _table(rows: Sequence[Measurement], device: str) -> Table:
    bad = sum(r.nonfinite_keys + r.nonfinite_values + r.nonfinite_queries for r in rows)
    table = Table(
        title=f"turboquant_rocm {__version__} verify on {device}: {rows[0].tokens} tokens, "
        f"block size {rows[0].block_size}, backend {rows[0].backend}",
        caption="NMSE: measured / theory. off ideal: distance of a KV head's NMSE from an ideal quantiser's. output "
        "err, cosine, top-1: against attention over the unquantised tensors. oracle err: worst row and head of decode "
        f"against fp64 over the same cache (limit {max(r.tolerance for r in rows):.0e}, or twice plain attention's). "
        "slots: share of stored slots that equal the reference's.",
    )
    for name in _TEXT_COLUMNS:
        table.add_column(name, no_wrap=True)
    numbers = [
        "bytes/token",
        "smaller",
        "key NMSE",
        "value NMSE",
        "off ideal",
        "output err",
        "cosine",
        "top-1",
    ]
    numbers += ["oracle err", "slots", *(["non-finite k/v/q"] if bad else []), "store ms", "decode ms"]
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)

    def judged(text: str, ok: bool) -> str:
        return f"[{'green' if ok else 'bold red'}]{text}[/]"

    for r in rows:
        table.add_row(
            r.tensors.replace("[", "\\["),
            r.preset.removeprefix("turboquant_"),
            r.layout,
            f"{r.bytes_per_token:g}",
            f"{r.compression:.2f}x",
            judged(f"{r.key_nmse:.4f}/{r.key_nmse_theory:.4f}", r.distortion_ok),
            judged(f"{r.value_nmse:.4f}/{r.value_nmse_theory:.4f}", r.distortion_ok),
            judged(f"{r.off_ideal:.1%}", r.distortion_ok),
            f"{r.output_error:.1%}",
            f"{r.output_cosine:.4f}",
            f"{r.top1_agreement:.1%}",
            judged(f"{r.oracle_error:.1e}", r.decode_ok),
            judged(f"{r.store_exact:.2%}", r.store_ok),
            *([f"{r.nonfinite_keys}/{r.nonfinite_values}/{r.nonfinite_queries}"] if bad else []),
            f"{r.store_ms:.1f}",
            f"{r.decode_ms:.1f}",
        )
    return table


def fitting_console(*tables: Table) -> Console:
    """Standard output, wide enough for the tables: a narrower terminal scrolls or breaks lines, and loses nothing."""
    console = Console()
    needed = max(Console(width=10_000).measure(table).maximum for table in tables)
    return console if console.width >= needed else Console(width=needed)


def _print(rows: Sequence[Measurement], device: str) -> None:
    """The table, never cut."""
    table = _table(rows, device)
    console = fitting_console(table)
    console.print(table)
    for r in rows:
        for fault in r.faults:
            where = f"{r.tensors} {r.preset} {r.layout}"
            console.print(f"FAILED {where}: {fault}", style="bold red", markup=False, soft_wrap=True)


def _integer(low: int, high: int) -> Callable[[str], int]:
    def integer(text: str) -> int:  # argparse names the option and this function
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} (wants an integer from {low} to {high})")
        return value

    return integer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m turboquant_rocm.verify", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--input", type=Path, help=".npz with key<s>, query<s>, value<s>: [tokens, heads, head size]"
    )
    source.add_argument("--synthetic", action="store_true", help="Gaussian tensors of the shape below")
    shape = parser.add_argument_group("synthetic tensors")
    shape.add_argument("--tokens", type=_integer(1, 1 << 24), default=1024)
    shape.add_argument("--num-heads", type=_integer(1, MAX_HEADS), default=8)
    shape.add_argument("--num-kv-heads", type=_integer(1, MAX_HEADS), default=2)
    shape.add_argument("--head-size", type=_integer(1, 4096), default=128)
    shape.add_argument("--seed", type=_integer(0, 2**63 - 1), default=0)
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16"), default="bf16", help="of the tensors (default bf16)"
    )
    parser.add_argument(
        "--preset",
        action="append",
        metavar="NAME",
        help=f"of {', '.join(preset_names())}; default those for serving",
    )
    parser.add_argument("--layout", choices=(*LAYOUT_NAMES, "both"), default="both")
    parser.add_argument("--backend", default="torch_reference", help="default: torch_reference")
    parser.add_argument("--block-size", type=_integer(1, 1 << 20), default=16)
    parser.add_argument(
        "--queries",
        type=_integer(1, 1 << 16),
        default=32,
        help="decode the last N tokens' queries (default 32)",
    )
    parser.add_argument(
        "--repeats", type=_integer(1, 1 << 16), default=3, help="timed runs, the median is shown (default 3)"
    )
    parser.add_argument(
        "--device", default="cpu", help="cpu, cuda, cuda:1 ... (ROCm devices are called cuda)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows as JSON, - for standard output"
    )
    return parser


def _device(name: str) -> torch.device:
    """The device called ``name``; SpecError unless torch can compute on it here."""
    import torch

    wants = "cpu, or a GPU that torch can use: cuda, cuda:1 ..."
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise SpecError("--device", name, wants)
        torch.zeros(1, device=device).sum().item()
    except (RuntimeError, AssertionError) as error:
        raise SpecError("--device", name, f"{wants} ({error})") from None
    return device


def _target(device: torch.device) -> Target:
    if device.type == "cpu":
        return Target("cpu", "cpu")
    from .target import detect

    return detect(device.index or 0)  # "cuda" alone is the first one: nothing here selects another


def _check_writable(path: Path, option: str = "--json") -> None:
    """SpecError if ``path`` cannot become a file, before minutes are spent on what would go there."""
    try:
        bad = path.is_dir() or not path.parent.is_dir()
    except (OSError, ValueError):  # a name that no file can have
        bad = True
    if bad:
        standard_output = ", or - for standard output" if option == "--json" else ""
        raise SpecError(option, str(path), f"a file in a directory that exists{standard_output}")


def _run(args: argparse.Namespace, progress: Console) -> list[Measurement]:
    if args.json is not None and str(args.json) != "-":
        _check_writable(args.json)
    try:
        from . import accuracy
    except ImportError as error:
        if error.name != "torch":
            raise
        wants = (
            "PyTorch, which verify computes with: the image's own on a GPU machine, else turboquant-rocm[cpu]"
        )
        raise SpecError("import torch", "not installed", wants) from None
    device = _device(args.device)
    presets = [get_preset(name) for name in args.preset or serving_names()]
    own = get_backend(args.backend).layout
    layouts = LAYOUT_NAMES if args.layout == "both" else (args.layout,)
    if args.layout == "both" and own != "any":
        layouts = (own,)
    if args.synthetic:
        shape = (args.tokens, args.num_heads, args.num_kv_heads, args.head_size)
        sources = [accuracy.synthetic(*shape, args.dtype, args.seed)]
    else:
        sources = accuracy.load_npz(args.input, args.dtype)
    rows = []
    for tensors in sources:
        for preset in presets:
            for layout in layouts:
                policy = Policy(force=args.backend, layout=layout)
                decision = decide(tensors.layer(), _target(device), preset, args.block_size, policy)
                with progress.status(f"{tensors.name} {preset.name} {layout}"):
                    queries = min(args.queries, tensors.key.shape[0])
                    rows.append(accuracy.measure(tensors, decision, device, queries, args.repeats))
    return rows


def _finite(value: Any) -> Any:
    """``value`` with None for numbers that JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _report(rows: Sequence[Measurement], device: str) -> str:
    found = [
        {**{name: _finite(v) for name, v in asdict(r).items()}, "ok": r.ok, "faults": list(r.faults)}
        for r in rows
    ]
    return json.dumps({"version": __version__, "device": device, "rows": found}, indent=2, allow_nan=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code. Options that argparse refuses end in SystemExit(2)."""
    args = _parser().parse_args(argv)
    errors = Console(stderr=True)
    try:
        rows = _run(args, errors)
        report = _report(rows, args.device)
        if args.json is not None and str(args.json) != "-":
            try:
                args.json.write_text(report + "\n", encoding="utf-8")
            except OSError as error:
                raise SpecError("--json", str(args.json), f"a writable file ({error.strerror})") from None
    except SpecError as error:
        errors.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return BAD_INPUT
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        errors.print(
            f"error: out of memory: fewer --tokens, --num-heads or --queries ({error})",
            style="red",
            markup=False,
            soft_wrap=True,
        )
        return BAD_INPUT
    if args.json is not None and str(args.json) == "-":
        print(report)
    else:
        _print(rows, args.device)
    return 0 if all(r.ok for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
