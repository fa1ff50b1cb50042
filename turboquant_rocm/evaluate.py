"""``python -m turboquant_rocm.evaluate MODEL_DIR --text FILE``: what quantising the cache does to a real model.

Every preset is compared with the unquantised cache on the same tokens: perplexity, KL divergence and top-1 agreement
on windows of a text; exact copying of a passage over a long distance; numbers hidden in a long text at several
depths; each layer quantised alone. Nothing is fetched: MODEL_DIR is a transformers folder, ``python -m
turboquant_rocm.evaluation.smollm2`` makes a small one. docs/evaluation.md has numbers and how to read them. Exit
codes: 0 done, 1 limits of --check broken, 2 bad arguments or input, or a package missing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from . import __version__
from .evaluation.recommend import Cache, Choice, combinations, recommend
from .evaluation.report import (
    EXACT,
    FP8,
    LayerCost,
    NeedleCell,
    Report,
    Row,
    broken_limits,
    check_plot,
    choice_table,
    layer_table,
    needle_table,
    read_limits,
    table,
    write_png,
)
from .evaluation.tasks import copies, needles, windows
from .options import OPTION_SETS, CacheOptions, parse_cache
from .presets import preset_names
from .spec import SpecError
from .verify import BAD_INPUT, _check_writable, _device, _integer, _target, fitting_console

if TYPE_CHECKING:
    from .evaluation.compare import Comparison
    from .evaluation.schemes import Scheme

__all__ = ["Evaluation", "load_model", "load_tokenizer", "main", "read_text"]

TESTS: Final = ("text", "copying", "needle", "layers")
_MEAN_SKIP: Final = 4  # first tokens have keys unlike all others, and are left out of means
MOST_COLUMNS: Final = 8
"""Caches whose costs by layer are printed side by side; those of more are in the JSON only."""
LAYER_TOKENS: Final = 512
"""Tokens of the text on which layers are quantised one by one."""


class Evaluation:
    """A model with its tokenizer, and the tests of it. model: a transformers causal LM, in eval mode."""

    def __init__(self, model: Any, ids: Sequence[int], done: Callable[[], None] = lambda: None) -> None:
        self.model = model
        self.ids = ids
        self.done = done

    def compare(self, passages: Sequence[Any], schemes: Sequence[Scheme]) -> list[Comparison]:
        """Every passage with every scheme; ``done`` is called after each pass, exact ones included."""
        from .evaluation.compare import compare

        return compare(self.model, passages, schemes, self.done)

    def rows(
        self,
        schemes: Sequence[Scheme],
        tests: Sequence[str],
        context: int = 2048,
        count: int = 4,
        hidden: Sequence[Any] = (),
        layer_tokens: int = LAYER_TOKENS,
    ) -> tuple[Row, ...]:
        """The rows of a report: the unquantised cache, then ``schemes``. hidden: needles. tests: of ``TESTS``."""
        from .evaluation.compare import summarize
        from .evaluation.schemes import exact_bytes, model_layers

        parts: dict[str | None, dict[str, Any]] = {name: {} for name in (None, *(s.name for s in schemes))}
        for test, make in (("text", windows), ("copying", copies)):
            if test in tests:
                found = self.compare(make(self.ids, context, count), schemes)
                for name, part in parts.items():
                    part[test] = summarize(found, name)
                    if test == "text":
                        part["seconds"] = sum(c.seconds[name or ""] for c in found) / len(found)
        if "needle" in tests:
            found = self.compare([n.passage for n in hidden], schemes)
            for name, part in parts.items():
                part["needles"] = _cells(hidden, found, name)
        if "layers" in tests:
            for scheme in schemes:
                parts[scheme.name]["layers"] = self._layers(scheme, layer_tokens)
        total = sum(exact_bytes(layer) for layer in model_layers(self.model.config))
        size: dict[str | None, float] = {None: float(total)}
        size.update({s.name: s.bytes_per_token for s in schemes})
        for scheme in schemes:
            parts[scheme.name]["bytes_per_sequence"] = scheme.bytes_per_sequence
        return tuple(Row(name or EXACT, size[name], **part) for name, part in parts.items())

    def _layers(self, scheme: Scheme, tokens: int) -> tuple[LayerCost, ...]:
        from .evaluation.compare import summarize
        from .evaluation.schemes import exact_bytes, model_layers, only_layer

        alone = {layer: only_layer(scheme, layer) for layer in scheme.layers}
        found = self.compare(windows(self.ids, tokens, 1), list(alone.values()))
        full = {layer.index: float(exact_bytes(layer)) for layer in model_layers(self.model.config)}
        costs = []
        for layer, one in alone.items():
            summary = summarize(found, one.name)
            size = (scheme.by_layer[layer], full[layer], scheme.beside.get(layer, 0.0))
            costs.append(LayerCost(layer, summary.kl, summary.kl_se, *size))
        return tuple(costs)


def _cells(hidden: Sequence[Any], found: Sequence[Comparison], name: str | None) -> tuple[NeedleCell, ...]:
    cells: dict[tuple[int, float], list[Any]] = {}
    for needle, c in zip(hidden, found, strict=True):
        scores = c.exact if name is None else c.schemes[name]
        cells.setdefault((needle.length, needle.depth), []).append(scores)
    return tuple(
        NeedleCell(
            length, depth, sum(bool(s.hit.all()) for s in scores), len(scores),
            sum(float(s.nll.mean()) for s in scores) / len(scores),
        )
        for (length, depth), scores in cells.items()
    )  # fmt: skip


# ---- command line --------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m turboquant_rocm.evaluate", description=__doc__)
    parser.add_argument(
        "model", type=Path, metavar="MODEL_DIR", help="config, tokenizer and weights of transformers"
    )
    parser.add_argument(
        "--text", type=Path, required=True, metavar="FILE", help="UTF-8 text, some 10,000 words"
    )
    presets = f"of {', '.join((FP8, *preset_names()))}, all but {FP8} also with +rotated_values, +recent=N, +first=N, "
    presets += "+key_mean, +key_scale behind them (docs/evaluation.md); default: all, without"
    parser.add_argument("--presets", nargs="+", default=[FP8, *preset_names()], metavar="NAME", help=presets)
    parser.add_argument(
        "--tests", nargs="+", choices=TESTS, default=["text", "copying"], help="default: text and copying"
    )
    parser.add_argument("--context", type=_integer(2, 1 << 20), default=2048, help="tokens of a window")
    parser.add_argument(
        "--windows", type=_integer(1, 1 << 16), default=4, help="of text, and of copying (default 4)"
    )
    where = parser.add_argument_group("where and how")
    where.add_argument(
        "--backend", help="default: torch_reference on a CPU, the dispatcher's choice on a GPU"
    )
    where.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ... (ROCm devices are called cuda)")
    where.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="default: fp32 on a CPU, bf16 on a GPU"
    )
    where.add_argument("--block-size", type=_integer(1, 1 << 20), default=16)
    where.add_argument(
        "--protect", type=_integer(0, 10_000), default=0, help="exact layers at each end (default 0)"
    )
    where.add_argument(
        "--skip-layers", type=_layers, default=(), metavar="N,N", help="more layers that stay exact"
    )
    hidden = parser.add_argument_group("needles")
    hidden.add_argument(
        "--needle-lengths", nargs="+", type=_integer(64, 1 << 24), default=[512, 1024], metavar="TOKENS"
    )
    hidden.add_argument(
        "--needle-depths", nargs="+", type=float, default=[0.0, 0.25, 0.5, 0.75, 1.0], metavar="DEPTH"
    )
    hidden.add_argument(
        "--needles", type=_integer(1, 1000), default=2, help="per length and depth (default 2)"
    )
    layers = parser.add_argument_group("layers")
    layers.add_argument(
        "--layer-tokens", type=_integer(2, 1 << 20), metavar="TOKENS",
        help=f"read per layer (default {LAYER_TOKENS}; --context where --recommend tries caches with exact tokens)",
    )  # fmt: skip
    layers.add_argument(
        "--recommend", type=_integer(1, 1 << 40), metavar="BYTES",
        help="per token of a sequence of --context tokens, all layers: preset and options for every layer, and what "
        "they cost together (runs the test layers)",
    )  # fmt: skip
    sets = " ".join(text.removeprefix("+") for text in OPTION_SETS)
    layers.add_argument(
        "--option-sets", nargs="+", metavar="SET",
        help=f"what --recommend tries behind each preset that is given without options, or none (default: {sets})",
    )  # fmt: skip
    out = parser.add_argument_group("results")
    out.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything as JSON, - for standard output"
    )
    out.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG (needs matplotlib)")
    out.add_argument("--check", metavar="NAME", help="compare with the limits of configs/accuracy/NAME.yaml")
    return parser


def _layers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = (-1,)
    if min(found) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} (wants layer numbers separated by commas, as 0,1,28)")
    return found


def _caches(names: Sequence[str]) -> dict[str, Cache]:
    """Preset and options by the names that results get; None for FP8."""
    found: dict[str, Cache] = {}
    for name in names:
        parsed = None if name == FP8 else parse_cache(name)
        short = FP8 if parsed is None else f"{parsed[0].name.removeprefix('turboquant_')}{parsed[1]}"
        if short in found:
            raise SpecError("--presets", name, "each name once")
        found[short] = parsed
    return found


def _layer_tokens(args: argparse.Namespace, caches: Sequence[Cache]) -> int:
    """Tokens on which layers are quantised one by one."""
    given: int | None = args.layer_tokens
    if not args.recommend or not any(cache and cache[1].exact_tokens for cache in caches):
        return LAYER_TOKENS if given is None else given
    if given not in (None, args.context):
        wants = f"{args.context}, as --context: of fewer tokens, options would keep a larger part exact"
        raise SpecError("--layer-tokens", given, wants)
    context: int = args.context
    return context


def read_text(path: Path) -> str:
    """The text of --text; SpecError if there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SpecError("--text", str(path), f"a file of UTF-8 text ({error})") from None


def load_model(folder: Path, device: Any, dtype: str) -> Any:
    """A causal LM of a transformers folder, in eval mode on ``device``. SpecError names what is missing."""
    if not (folder / "config.json").is_file():
        raise SpecError("MODEL_DIR", str(folder), "a folder with config.json, tokenizer and weights")
    try:
        import torch

        from . import integrations

        integrations.require("transformers")
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise SpecError("import", str(error), "torch, and turboquant-rocm[transformers]") from None
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    logging.disable_progress_bar()
    with _loadable(folder):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, local_files_only=True)
    return model.to(device).eval()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a transformers folder. SpecError names what is missing; after :func:`load_model`."""
    from transformers import AutoTokenizer

    with _loadable(folder):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@contextmanager
def _loadable(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        detail = " ".join(str(error).split())[:300]
        raise SpecError("MODEL_DIR", str(folder), f"a folder that transformers can load ({detail})") from None


def _key_statistics(
    args: argparse.Namespace, model: Any, ids: Sequence[int], asked: Sequence[CacheOptions]
) -> dict[str, dict[int, Any]]:
    """Key means and scales for the options that want them, each with the other if one option has both.

    From the text behind the windows, so that no text is scored that they were taken from.
    """
    from .evaluation.compare import key_means, key_scales

    if not any(options.key_mean or options.key_scale for options in asked):
        return {}
    first = args.context * args.windows
    if len(ids) < first + args.context:
        wanted = f"at least {first + args.context}, the last for key means and scales"
        raise SpecError("--text", f"{len(ids)} tokens", wanted)
    text = ids[first : first + args.context]
    means = key_means(model, text, _MEAN_SKIP)
    found = {"key_means": means}
    if any(options.key_scale for options in asked):
        found["key_scales"] = key_scales(model, text, _MEAN_SKIP, means)
    return found


def _schemes(
    args: argparse.Namespace,
    caches: Mapping[str, Cache],
    config: Any,
    device: Any,
    dtype: str,
    statistics: Mapping[str, Mapping[int, Any]],
) -> list[Scheme]:
    from .evaluation.schemes import fp8_scheme, preset_scheme

    backend = args.backend or ("torch_reference" if device.type == "cpu" else None)
    made = []
    for name, parsed in caches.items():
        if parsed is None:
            made.append(fp8_scheme(config, args.protect, args.skip_layers))
            continue
        made.append(
            preset_scheme(
                config, parsed[0], name=name, backend=backend, target=_target(device), dtype=dtype,
                block_size=args.block_size, protect=args.protect, skip_layers=args.skip_layers,
                options=parsed[1], **statistics,
            )
        )  # fmt: skip
    return made


def _passes(
    args: argparse.Namespace, schemes: Sequence[Scheme], tried: Sequence[Scheme], hidden: Sequence[Any]
) -> int:
    each = 1 + len(schemes)
    total: int = each * args.windows * len({"text", "copying"} & set(args.tests)) + each * len(hidden)
    if "layers" in args.tests:
        total += sum(1 + len(s.layers) for s in (*schemes, *tried))
    return total + (2 * args.windows if args.recommend else 0)


def _hidden(args: argparse.Namespace, ids: Sequence[int], tokenizer: Any) -> tuple[Any, ...]:
    if "needle" not in args.tests:
        return ()

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    def ends_sentence(token: int) -> bool:
        return str(tokenizer.decode([token])).rstrip().endswith((".", "!", "?"))

    return needles(ids, encode, ends_sentence, args.needle_lengths, args.needle_depths, args.needles)


def _run(args: argparse.Namespace, errors: Console) -> Report:
    caches = _caches(args.presets)
    more, left_out = combinations(caches, args.option_sets) if args.recommend else ({}, {})
    if args.option_sets and not args.recommend:
        raise SpecError(
            "--option-sets", args.option_sets, "--recommend beside it, or options written in --presets"
        )
    if args.recommend and "layers" not in args.tests:
        args.tests = [*args.tests, "layers"]
    layer_tokens = _layer_tokens(args, [*caches.values(), *more.values()])
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None and str(path) != "-":
            _check_writable(path, option)
    if args.plot is not None:
        check_plot(args.tests)
    if args.check:
        read_limits(args.check)
    text = read_text(args.text)
    device = _device(args.device)
    dtype = args.dtype or ("fp32" if device.type == "cpu" else "bf16")
    model, tokenizer = load_model(args.model, device, dtype), load_tokenizer(args.model)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 1 << 40
    lengths = [("--context", args.context)]
    if "needle" in args.tests:
        lengths += [("--needle-lengths", n) for n in args.needle_lengths]
    if "layers" in args.tests:
        lengths.append(("--layer-tokens", layer_tokens))
    for name, length in lengths:
        if length > most:
            raise SpecError(name, length, f"at most the model's {most} positions")
    statistics = _key_statistics(args, model, ids, [c[1] for c in (*caches.values(), *more.values()) if c])

    def made(of: Mapping[str, Cache]) -> list[Scheme]:
        return _schemes(args, of, model.config, device, dtype, statistics)

    schemes = made(caches)
    tried = []
    for name, cache in more.items():
        try:
            (scheme,) = made({name: cache})
        except SpecError as error:
            left_out[name] = str(error)
            continue
        if scheme.kernels:
            tried.append(scheme)
        else:
            left_out[name] = "no backend with kernels declares it for every layer"
    if args.recommend:
        _check_budget([*schemes, *tried], model.config, args.recommend, args.context)
    hidden = _hidden(args, ids, tokenizer)
    columns = (
        TextColumn("evaluating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=errors) as bar:
        task = bar.add_task("", total=_passes(args, schemes, tried, hidden))
        evaluation = Evaluation(model, ids, lambda: bar.advance(task))
        rows = evaluation.rows(schemes, args.tests, args.context, args.windows, hidden, layer_tokens)
        chosen = None
        if args.recommend:
            if tried:
                rows += evaluation.rows(tried, ["layers"], layer_tokens=layer_tokens)[1:]
            choice = recommend(rows, args.recommend, args.context)
            rows = (*rows, _verified(evaluation, [*schemes, *tried], choice, args))
            kernels = {s.name: s.kernels for s in (*schemes, *tried) if s.name in choice.by_scheme}
            chosen = {**asdict(choice), "kernels": kernels, "left_out": left_out}
    import torch
    import transformers

    conditions = {
        "model": args.model.resolve().name, "text": args.text.name, "text_tokens": len(ids), "context": args.context,
        "windows": args.windows, "layer_tokens": layer_tokens, "device": str(device), "dtype": dtype,
        "protect": args.protect, "skip_layers": list(args.skip_layers), "backend": args.backend or "default",
        "block_size": args.block_size, "version": __version__, "torch": torch.__version__,
        "transformers": transformers.__version__,
    }  # fmt: skip
    return Report(conditions, rows, chosen)


def _check_budget(schemes: Sequence[Scheme], config: Any, budget: int, context: int) -> None:
    """SpecError if no mixture of ``schemes`` keeps the budget: said before all is measured, which takes long."""
    from .evaluation.schemes import exact_bytes, model_layers

    full = {layer.index: float(exact_bytes(layer)) for layer in model_layers(config)}
    rows = [Row(EXACT, sum(full.values()))]
    for s in schemes:
        free = [
            LayerCost(layer, 0.0, None, s.by_layer[layer], full[layer], s.beside.get(layer, 0.0))
            for layer in s.layers
        ]
        rows.append(Row(s.name, s.bytes_per_token, layers=tuple(free)))
    recommend(rows, budget, context)


def _verified(
    evaluation: Evaluation, schemes: Sequence[Scheme], choice: Choice, args: argparse.Namespace
) -> Row:
    """The recommended mixture, measured on the text as a scheme of its own."""
    from .evaluation.schemes import mixture

    mixed = mixture("recommended", schemes, choice.layers, evaluation.model.config)
    return evaluation.rows([mixed], ["text"], args.context, args.windows)[1]


def _print(report: Report) -> None:
    found: list[Table] = [table(report)]
    if any(r.needles for r in report.rows):
        found.append(needle_table(report))
    if 0 < sum(bool(r.layers) for r in report.rows) <= MOST_COLUMNS:
        found.append(layer_table(report))
    if report.recommendation is not None:
        found.append(choice_table(report))
    console = fitting_console(*found)
    for each in found:
        console.print(each)
    if report.recommendation is not None:
        for name, layers in report.recommendation["by_scheme"].items():
            kernels = report.recommendation["kernels"].get(name)
            where = f" ({', '.join(kernels)})" if kernels else ""
            console.print(
                f"{name}: layers {', '.join(map(str, layers))}{where}", markup=False, soft_wrap=True
            )
        for name, why in report.recommendation["left_out"].items():
            console.print(f"left out {name}: {why}", markup=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code. Options that argparse refuses end in SystemExit(2)."""
    args = _parser().parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    errors = Console(stderr=True)
    try:
        report = _run(args, errors)
        text = json.dumps(report.to_dict(), indent=2)
        if args.json is not None and str(args.json) != "-":
            args.json.write_text(text + "\n", encoding="utf-8")
        if args.plot is not None:
            write_png(report, args.plot)
    except SpecError as error:
        errors.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return BAD_INPUT
    if args.json is not None and str(args.json) == "-":
        print(text)
    else:
        _print(report)
    broken = broken_limits(report, read_limits(args.check)) if args.check else []
    for line in broken:
        errors.print(f"BROKEN {line}", style="bold red", markup=False, soft_wrap=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
