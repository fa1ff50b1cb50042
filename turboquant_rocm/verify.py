"""``python -m turboquant_rocm.verify``: store real or synthetic keys and values, decode, and compare.

The tokens go into a paged cache with a shuffled block table; the last tokens' queries are decoded from it. The
result is compared with exact fp64 attention over the unquantised tensors (what quantisation costs) and with fp64
attention over the dequantised cache (whether the backend computes what it should). The second decides the exit code:
0 within the backend's tolerance, 1 outside it, 2 bad arguments or input.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from . import __version__
from .backends import get_backend
from .dispatch import Decision, Policy, decide
from .layouts import LAYOUT_NAMES
from .layouts.views import field_view, read_fp16
from .ops import BoundLayer, PagedCache, bind
from .presets import get_preset, preset_names
from .spec import Dtype, LayerSpec, Preset, SpecError, Target

__all__ = ["Measurement", "Tensors", "load_npz", "main", "measure", "synthetic"]

GAUSSIAN_MSE: Final = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009501}
"""Distortion per coordinate of the Lloyd-Max quantiser of the unit normal (Max 1960, table 1)."""

FP8_NMSE: Final = 2.0**-6 / 12 / (1.5 / math.log(2))
"""E4M3 rounding error over energy for a logarithmically uniform mantissa: ulp**2 / 12 over E[m**2] on [1, 2)."""

MIN_STORE_AGREEMENT: Final = 0.999
"""Share of cache bytes that must equal the reference's. The rest is for coordinates on a decision threshold, where
the order of fp32 additions decides."""

TABLE_WIDTH: Final = 160  # columns; narrower terminals scroll instead of breaking numbers

_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Tensors:
    """One attention layer's tensors, all of one dtype: query [T, Hq, D], key [T, Hk, D], value [T, Hk, Dv]."""

    name: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def __post_init__(self) -> None:
        for field in ("query", "key", "value"):
            tensor = getattr(self, field)
            if tensor.dim() != 3 or tensor.shape[0] != self.key.shape[0]:
                raise SpecError(f"{field} of {self.name}", tuple(tensor.shape), "[tokens, heads, head size]")
        if self.query.shape[2] != self.key.shape[2]:
            raise SpecError(
                f"query of {self.name}", tuple(self.query.shape), f"head size {self.key.shape[2]}"
            )
        if self.value.shape[1] != self.key.shape[1]:
            raise SpecError(f"value of {self.name}", tuple(self.value.shape), f"{self.key.shape[1]} heads")

    def layer(self) -> LayerSpec:
        """The LayerSpec these tensors belong to."""
        _, hq, d = self.query.shape
        dtype = Dtype.BF16 if self.key.dtype is torch.bfloat16 else Dtype.FP16
        return LayerSpec(0, hq, self.key.shape[1], d, value_head_size=self.value.shape[2], dtype=dtype)


@dataclass(frozen=True)
class Measurement:
    """One row of the table. Errors are relative L2 norms unless said; times are medians in milliseconds."""

    tensors: str
    preset: str
    layout: str
    backend: str
    block_size: int
    tokens: int
    bytes_per_token: float
    compression: float
    key_nmse: float
    key_nmse_theory: float
    value_nmse: float
    value_nmse_theory: float
    output_error: float
    output_cosine: float
    top1_agreement: float
    oracle_error: float
    tolerance: float
    store_agreement: float
    store_ms: float
    decode_ms: float

    @property
    def ok(self) -> bool:
        """True if decode agrees with the oracle and store with the reference; NaN does not."""
        return self.oracle_error <= self.tolerance and self.store_agreement >= MIN_STORE_AGREEMENT


def _array(name: str, array: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    if array.dtype == np.uint16:  # bit patterns
        return torch.from_numpy(array.view(np.int16).copy()).view(_DTYPES[dtype])
    if array.dtype in (np.float16, np.float32, np.float64):
        return torch.from_numpy(array.copy()).to(_DTYPES[dtype])
    raise SpecError(name, array.dtype, "uint16 bit patterns, float16, float32 or float64")


def load_npz(path: Path, dtype: str = "bf16") -> list[Tensors]:
    """Every triple ``query<suffix>``, ``key<suffix>``, ``value<suffix>`` of an .npz file, by suffix.

    uint16 arrays are bit patterns of ``dtype``; floating arrays are rounded to it.
    """
    try:
        with np.load(path, allow_pickle=False) as data:
            arrays = {name: data[name] for name in data.files}
    except (OSError, ValueError, EOFError) as error:
        raise SpecError("--input", str(path), f"an .npz file ({error})") from None
    except Exception as error:  # zipfile.BadZipFile and relatives: the file is not what it says
        raise SpecError("--input", str(path), f"an .npz file ({type(error).__name__}: {error})") from None
    suffixes = [name.removeprefix("key") for name in arrays if name.startswith("key")]
    if not suffixes:
        raise SpecError("--input", sorted(arrays), "arrays key, query and value (any common suffix)")
    found = []
    for suffix in suffixes:
        missing = [n for n in ("query", "value") if n + suffix not in arrays]
        if missing:
            raise SpecError("--input", sorted(arrays), f"{' and '.join(missing)}{suffix} beside key{suffix}")
        parts = {n: _array(n + suffix, arrays[n + suffix], dtype) for n in ("query", "key", "value")}
        found.append(Tensors(suffix.lstrip("_") or path.stem, **parts))
    return found


def synthetic(
    tokens: int, num_heads: int, num_kv_heads: int, head_size: int, dtype: str, seed: int
) -> Tensors:
    """Gaussian tensors: the case that the theoretical distortions are about."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"query": num_heads, "key": num_kv_heads, "value": num_kv_heads}
    parts = {
        n: torch.randn((tokens, h, head_size), generator=g).to(_DTYPES[dtype]) for n, h in shapes.items()
    }
    return Tensors("synthetic", **parts)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _median_ms(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def _nmse(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).square().sum() / want.square().sum())


def _causal_attention(
    query: torch.Tensor,  # [q, Hq, D]
    key: torch.Tensor,  # [T, Hk, D]
    value: torch.Tensor,  # [T, Hk, Dv]
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 attention of the last q tokens: (output [q, Hq, Dv], position of the largest weight [q, Hq])."""
    q, hq, _ = query.shape
    tokens, hk, _ = key.shape
    grouped = query.double().view(q, hk, hq // hk, -1)
    score = torch.einsum("qhgd,thd->qhgt", grouped, key.double()) * scale
    last = tokens - q + torch.arange(q, device=key.device)
    score = score.masked_fill(torch.arange(tokens, device=key.device) > last[:, None, None, None], -math.inf)
    out = torch.einsum("qhgt,thd->qhgd", score.softmax(-1), value.double())
    return out.reshape(q, hq, -1), score.argmax(-1).reshape(q, hq)


def _value_nmse_theory(
    bound: BoundLayer, cache: PagedCache, slots: torch.Tensor, value: torch.Tensor
) -> float:
    """Uniform rounding: D * step**2 / 12 per vector, with the steps that were stored, over the energy."""
    block, offset = slots // bound.layout.block_size, slots % bound.layout.block_size
    step = read_fp16(field_view(cache.data, bound.layout, "value_scale")[block, offset]).double()
    return float(step.square().sum() * value.shape[-1] / 12 / value.double().square().sum())


def measure(
    tensors: Tensors, decision: Decision, device: torch.device, queries: int, repeats: int
) -> Measurement:
    """Run one backend over ``tensors`` and compare; ``queries`` last tokens are decoded."""
    bound = bind(decision)
    preset, layout, layer = bound.decision.preset, bound.layout, bound.layer
    query, key, value = (t.to(device) for t in (tensors.query, tensors.key, tensors.value))
    tokens = key.shape[0]
    query = query[-queries:].contiguous()

    blocks = math.ceil(tokens / layout.block_size)
    order = torch.randperm(blocks + 2, generator=torch.Generator().manual_seed(0))[:blocks].to(device)
    position = torch.arange(tokens, device=device)
    slots = order[position // layout.block_size] * layout.block_size + position % layout.block_size
    table = order.int()[None]
    lens = torch.tensor([tokens], dtype=torch.int32, device=device)
    loc = torch.tensor([0, len(query)], dtype=torch.int32, device=device)

    cache = bound.allocate(blocks + 2, device)
    store_ms = _median_ms(lambda: bound.store(key, value, cache, slots), device, repeats)

    def run() -> torch.Tensor:
        out = bound.decode(query, cache, table, lens, loc, max_query_len=len(query))
        assert isinstance(out, torch.Tensor)
        return out

    decode_ms = _median_ms(run, device, repeats)
    out = run().double()

    # The oracle reads the very bytes that the backend wrote, with the reference's code in fp64.
    reference = Decision(
        layer, Target("cpu", "cpu"), preset, decision.block_size, "torch_reference", decision.layout
    )
    oracle = bind(reference, math_dtype=torch.float64)
    read = oracle.dequantize(oracle.wrap(cache.data), table, lens, dtype=torch.float64)
    expected = bind(reference).allocate(blocks + 2, device)
    bind(reference).store(key, value, expected, slots)
    scale = layer.softmax_scale
    exact, exact_top = _causal_attention(query, key, value, scale)
    wanted, wanted_top = _causal_attention(query, read.key, read.value, scale)

    bits_free = 2 * (layer.head_size + layer.value_size) * layer.num_kv_heads
    return Measurement(
        tensors=tensors.name,
        preset=preset.name,
        layout=layout.name,
        backend=bound.backend,
        block_size=layout.block_size,
        tokens=tokens,
        bytes_per_token=layout.bytes_per_token,
        compression=bits_free / layout.bytes_per_token,
        key_nmse=_nmse(read.key, key.double()),
        key_nmse_theory=FP8_NMSE if preset.fp8_keys else GAUSSIAN_MSE[preset.key_bits],
        value_nmse=_nmse(read.value, value.double()),
        value_nmse_theory=_value_nmse_theory(bound, cache, slots, value),
        output_error=math.sqrt(_nmse(out, exact)),
        output_cosine=float(torch.cosine_similarity(out, exact, dim=-1).mean()),
        top1_agreement=float((exact_top == wanted_top).double().mean()),
        oracle_error=math.sqrt(_nmse(out, wanted)),
        tolerance=get_backend(bound.backend).tolerance(layer.dtype),
        store_agreement=float((expected.data == cache.data).double().mean()),
        store_ms=store_ms,
        decode_ms=decode_ms,
    )


def _table(rows: Sequence[Measurement], device: str) -> Table:
    table = Table(
        title=f"turboquant_rocm {__version__} verify on {device}: {rows[0].tokens} tokens, "
        f"block size {rows[0].block_size}, backend {rows[0].backend}",
        caption="NMSE: measured / theory. output err, cosine, top-1: against attention over the unquantised tensors. "
        f"oracle err: decode against fp64 over the same cache (limit {max(r.tolerance for r in rows):.0e}). "
        "bytes: share of cache bytes equal to the reference's.",
    )
    for name in ("tensors", "preset", "layout"):
        table.add_column(name, no_wrap=True)
    for name in ("bytes/token", "smaller", "key NMSE", "value NMSE", "output err", "cosine", "top-1"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("oracle err", "bytes", "store ms", "decode ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in rows:
        colour = "green" if r.ok else "bold red"
        table.add_row(
            r.tensors,
            r.preset.removeprefix("turboquant_"),
            r.layout,
            f"{r.bytes_per_token:g}",
            f"{r.compression:.2f}x",
            f"{r.key_nmse:.4f}/{r.key_nmse_theory:.4f}",
            f"{r.value_nmse:.4f}/{r.value_nmse_theory:.4f}",
            f"{r.output_error:.1%}",
            f"{r.output_cosine:.4f}",
            f"{r.top1_agreement:.1%}",
            f"[{colour}]{r.oracle_error:.1e}[/]",
            f"[{colour}]{r.store_agreement:.2%}[/]",
            f"{r.store_ms:.1f}",
            f"{r.decode_ms:.1f}",
        )
    return table


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} (wants an integer >= 1)")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m turboquant_rocm.verify", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--input", type=Path, help=".npz with key<s>, query<s>, value<s>: [tokens, heads, head size]"
    )
    source.add_argument("--synthetic", action="store_true", help="Gaussian tensors of the shape below")
    shape = parser.add_argument_group("synthetic tensors")
    shape.add_argument("--tokens", type=_positive, default=1024)
    shape.add_argument("--num-heads", type=_positive, default=8)
    shape.add_argument("--num-kv-heads", type=_positive, default=2)
    shape.add_argument("--head-size", type=_positive, default=128)
    shape.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dtype", choices=sorted(_DTYPES), default="bf16", help="of the tensors (default bf16)"
    )
    parser.add_argument(
        "--preset", action="append", metavar="NAME", help=f"of {', '.join(preset_names())}; default all"
    )
    parser.add_argument("--layout", choices=(*LAYOUT_NAMES, "both"), default="both")
    parser.add_argument("--backend", default="torch_reference", help="default: torch_reference")
    parser.add_argument("--block-size", type=_positive, default=16)
    parser.add_argument(
        "--queries", type=_positive, default=32, help="decode the last N tokens' queries (default 32)"
    )
    parser.add_argument(
        "--repeats", type=_positive, default=3, help="timed runs, the median is shown (default 3)"
    )
    parser.add_argument(
        "--device", default="cpu", help="cpu, cuda, cuda:1 ... (ROCm devices are called cuda)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows as JSON, - for standard output"
    )
    return parser


def _target(device: torch.device) -> Target:
    if device.type == "cpu":
        return Target("cpu", "cpu")
    from .target import detect

    return detect(device)


def _run(args: argparse.Namespace, progress: Console) -> list[Measurement]:
    try:
        device = torch.device(args.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SpecError("--device", args.device, f"a device that torch can use ({error})") from None
    presets: list[Preset] = [get_preset(name) for name in args.preset or preset_names()]
    if args.synthetic:
        sources = [
            synthetic(args.tokens, args.num_heads, args.num_kv_heads, args.head_size, args.dtype, args.seed)
        ]
    else:
        sources = load_npz(args.input, args.dtype)
    layouts = LAYOUT_NAMES if args.layout == "both" else (args.layout,)
    own = get_backend(args.backend).layout
    if args.layout == "both" and own != "any":
        layouts = (own,)
    rows = []
    for tensors in sources:
        for preset in presets:
            for layout in layouts:
                policy = Policy(force=args.backend, layout=layout)
                decision = decide(tensors.layer(), _target(device), preset, args.block_size, policy)
                with progress.status(f"{tensors.name} {preset.name} {layout}"):
                    queries = min(args.queries, tensors.key.shape[0])
                    rows.append(measure(tensors, decision, device, queries, args.repeats))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    args = _parser().parse_args(argv)
    errors = Console(stderr=True)
    try:
        rows = _run(args, errors)
    except SpecError as error:
        errors.print(f"error: {error}", style="red", markup=False)
        return 2
    report = json.dumps(
        {"version": __version__, "device": args.device, "rows": [{**asdict(r), "ok": r.ok} for r in rows]},
        indent=2,
    )
    if args.json is not None and str(args.json) == "-":
        print(report)
    else:
        if args.json is not None:
            args.json.write_text(report + "\n", encoding="utf-8")
        console = Console()
        console = console if console.width >= TABLE_WIDTH else Console(width=TABLE_WIDTH)
        console.print(_table(rows, args.device))
    return 0 if all(r.ok for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
