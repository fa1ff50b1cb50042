"""What quantisation costs on given tensors, and whether a backend computes what it should.

:func:`measure` stores tokens in a paged cache with a shuffled block table, decodes the last tokens' queries, and
compares with what was computed in other ways:

- stored fields with the reference's, for every token and head;
- what the cache reads back as with an ideal quantiser, written down here a second time as its definition: a dense
  rotation matrix, the nearest centroid, the nearest FP8 number, in fp64. So a wrong reference fails too;
- outputs with fp64 attention over the dequantised cache, for every row and head.

``python -m turboquant_rocm.verify`` is the command line. Letters of the shapes: docs/design.md.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from .backends import get_backend
from .codebook import centroids, rotation
from .dispatch import Decision
from .layouts import Layout
from .layouts.packing import unpack
from .layouts.views import field_view
from .ops import PagedCache, bind
from .seeded import cache_sketch
from .spec import Dtype, LayerSpec, NormMeaning, SpecError, Target

__all__ = [
    "Measurement",
    "StoreComparison",
    "Tensors",
    "compare_stored",
    "ideal_keys",
    "ideal_values",
    "load_npz",
    "measure",
    "probe_keys",
    "synthetic",
]

GAUSSIAN_MSE: Final = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009501}
"""Distortion per coordinate of the Lloyd-Max quantiser of the unit normal (Max 1960, table 1)."""

FP8_NMSE: Final = 2.0**-6 / 12 / (1.5 / math.log(2))
"""E4M3 rounding error over energy for a logarithmically uniform mantissa: ulp**2 / 12 over E[m**2] on [1, 2)."""

MIN_EXACT: Final = 0.99
"""Share of (token, head) slots whose bytes must all equal the reference's. The rest is for coordinates on a decision
threshold, where the order of fp32 additions decides; their codes may be one step off."""

SKETCH_SLACK: Final = 0.9
"""The same with a sketch: a tie changes what the signs are of, and so the whole estimate and not one coordinate."""

DISTORTION_SLACK: Final = 0.05
"""Part by which the NMSE of a KV head may differ from an ideal quantiser's, for the same reason."""

MAX_OVER_THEORY: Final = 1.5
"""Largest NMSE of an ideal quantiser's keys over the theoretical one, on the keys of :func:`probe_keys`: more, and the
codebook and the rotation, which the reference and the ideal quantiser share, do not fit each other."""

_CODES: Final = ("key_data", "key_signs", "value_data")

FP16_MAX: Final = 65504.0
FILL: Final = 0xCD  # of both caches before the store: a byte that nobody should write shows

DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


# ---- tensors --------------------------------------------------------------------------------------------


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
            if tensor.dim() != 3 or tensor.shape[0] != self.key.shape[0] or not tensor.numel():
                wants = "[tokens, heads, head size], none of them 0, with as many tokens as key"
                raise SpecError(f"{field} of {self.name}", tuple(tensor.shape), wants)
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


def _array(name: str, array: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    if array.dtype == np.uint16:  # bit patterns
        return torch.from_numpy(array.view(np.int16).copy()).view(DTYPES[dtype])
    if array.dtype not in (np.float16, np.float32, np.float64):
        raise SpecError(name, array.dtype, "uint16 bit patterns, float16, float32 or float64")
    exact = torch.from_numpy(array.copy())
    rounded = exact.to(DTYPES[dtype])
    lost = torch.isinf(rounded) & torch.isfinite(exact)
    if bool(lost.any()):
        limit = torch.finfo(DTYPES[dtype]).max
        raise SpecError(
            name, float(exact[lost][0]), f"values within +-{limit:g}, the range of --dtype {dtype}"
        )
    return rounded


def load_npz(path: Path, dtype: str = "bf16") -> list[Tensors]:
    """Every triple ``query<suffix>``, ``key<suffix>``, ``value<suffix>`` of an .npz file, by suffix.

    uint16 arrays are bit patterns of ``dtype``; floating arrays are rounded to it. SpecError for values beyond its
    range, empty arrays, and files that hold something else.
    """
    try:
        with np.load(path, allow_pickle=False) as data:
            arrays = {name: data[name] for name in data.files}
    except (
        Exception
    ) as error:  # OSError, ValueError, zipfile.BadZipFile ...: the file is not what it should be
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
    parts = {n: torch.randn((tokens, h, head_size), generator=g).to(DTYPES[dtype]) for n, h in shapes.items()}
    return Tensors("synthetic", **parts)


# ---- the ideal quantiser --------------------------------------------------------------------------------


def _e4m3_magnitudes() -> torch.Tensor:
    """The 127 magnitudes of E4M3FN [127] float64, ascending from 0 to 448: four exponent and three mantissa bits."""
    found = [m * 2.0**-9 for m in range(8)]
    found += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return torch.tensor(found[:-1], dtype=torch.float64)  # the last one is NaN


def _nearest(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The entry of the ascending ``table`` that is nearest to each element of ``x``, fp64."""
    return table[torch.bucketize(x, (table[1:] + table[:-1]) / 2)]


def _fp16(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-FP16_MAX, FP16_MAX).half().double()


def ideal_keys(
    key: torch.Tensor,  # [T, Hk, D] float64, finite
    layout: Layout,
) -> torch.Tensor:
    """What keys [T, Hk, D] float64 must read back as, from the definition: dense rotation, nearest code, fp16 norm."""
    if layout.preset.fp8_keys:
        return key.sign() * _nearest(key.abs(), _e4m3_magnitudes().to(key.device))
    if layout.preset.sketch:
        return _ideal_sketched(key, layout.preset.code_bits)
    folded = layout.norm_meaning is NormMeaning.FOLDED
    return _ideal_codes(key, layout.preset.key_bits, folded, layout.preset.norm_correction)


def _ideal_sketched(x: torch.Tensor, bits: int) -> torch.Tensor:
    """TurboQuant_prod by its definition: the codes' vector and the estimate of what they leave, by dense matrices."""
    d = x.shape[-1]
    turn, table, sketch = (
        torch.tensor(np.array(m), dtype=torch.float64, device=x.device)
        for m in (rotation(d), centroids(d, bits), cache_sketch(d))
    )
    norm = x.norm(dim=-1, keepdim=True)
    y = x / (norm + 1e-8) @ turn.T
    c = _nearest(y, table)
    signs = torch.where((y - c) @ sketch.T >= 0, 1.0, -1.0).double()
    left = _fp16(norm.clamp(max=FP16_MAX) * (y - c).norm(dim=-1, keepdim=True)) * math.sqrt(math.pi / 2) / d
    return (_fp16(norm) * c + left * (signs @ sketch)) @ turn


def _ideal_codes(x: torch.Tensor, bits: int, folded: bool, norm_correction: bool) -> torch.Tensor:
    d = x.shape[-1]
    turn = torch.tensor(rotation(d), device=x.device)
    norm = x.norm(dim=-1, keepdim=True)
    table = torch.tensor(centroids(d, bits), dtype=torch.float64, device=x.device)
    c = _nearest(x / (norm + 1e-8) @ turn.T, table)
    length = c.norm(dim=-1, keepdim=True)
    if folded:
        size = _fp16(norm / length)
    else:
        size = _fp16(norm) / (length if norm_correction else 1.0)
    return size * c @ turn


def probe_keys(head_size: int) -> torch.Tensor:
    """Keys [512, 1, D] float64 that come near the theoretical distortion if they are rotated, and only then.

    Gaussian, and in half of them a channel with about half of the energy. What a user's keys come near is up to them:
    constant or saturated vectors are far off, however right the quantiser is.
    """
    g = torch.Generator().manual_seed(0)
    key = torch.randn((512, 1, head_size), generator=g, dtype=torch.float64)
    token = torch.arange(0, 512, 2)
    spread = (
        torch.rand(256, generator=g, dtype=torch.float64) - 0.5
    )  # one octave: FP8 errors are periodic in it
    key[token, 0, token // 2 % head_size] = math.sqrt(head_size) * 2**spread
    return key


def ideal_values(
    value: torch.Tensor,  # [T, Hk, Dv] float64, finite
    layout: Layout,
) -> torch.Tensor:
    """What values [T, Hk, Dv] float64 must read back as: uniform codes, fp16 scale and zero point; or as keys."""
    if layout.preset.rotated_values:
        return _ideal_codes(value, layout.preset.value_bits, folded=True, norm_correction=True)
    v = _groups(value.clamp(-FP16_MAX, FP16_MAX), layout)
    zero, step = v.amin(-1, keepdim=True), _value_step(v, layout)
    codes = ((v - zero) / step + 0.5).floor().clamp(0, 2**layout.preset.value_bits - 1)
    return (codes * _fp16(step) + _fp16(zero)).flatten(-2)


def _groups(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """[T, Hk, groups, values of a group]."""
    return value.unflatten(-1, (-1, layout.preset.value_group or value.shape[-1]))


def _value_step(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Distance of neighbouring codes [..., 1] of each group of values [..., n]."""
    levels = 2**layout.preset.value_bits - 1
    return (value.amax(-1, keepdim=True) - value.amin(-1, keepdim=True)).clamp(min=1e-8 * levels) / levels


# ---- comparisons ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoreComparison:
    """wrong: (token, head) slots that differ by more than rounding ties. exact: share that is equal byte for byte.
    stray: bytes outside of the stored tokens that differ, pads included."""

    wrong: int
    exact: float
    stray: int


def _magnitude_order(bits: torch.Tensor, sign: int) -> torch.Tensor:
    """Sign-and-magnitude bit patterns as integers in the order of the numbers; -0 and 0 are equal."""
    bits = bits.int() & (2 * sign - 1)
    return torch.where(bits >= sign, sign - bits, bits)


def _steps(got: torch.Tensor, want: torch.Tensor, name: str, layout: Layout) -> torch.Tensor:
    """Distance [T, Hk, codes] of two fields' bytes [T, Hk, nbytes], in steps of what they encode."""
    preset = layout.preset
    if name == "key_data" and preset.fp8_keys:
        a, b = (_magnitude_order(x, 0x80) for x in (got, want))
    elif name in _CODES:
        bits, width = {
            "key_data": (preset.code_bits, layout.head_size),
            "key_signs": (1, layout.head_size),
            "value_data": (preset.value_bits, layout.value_head_size),
        }[name]
        a, b = (unpack(x.contiguous(), bits, width).int() for x in (got, want))
    else:
        a, b = (_magnitude_order(x.contiguous().view(torch.int16), 0x8000) for x in (got, want))
    return (a - b).abs()


def compare_stored(
    got: torch.Tensor,  # [nb, bs, Hk, slot_stride] uint8
    want: torch.Tensor,  # the reference's, filled alike before the store
    layout: Layout,
    slots: torch.Tensor,  # [T] of the stored tokens, no negative ones
) -> StoreComparison:
    """Compares the stored fields of every token and head, and all other bytes.

    A rounding tie may put one code in 32 (at least one) of a vector one step off, an fp16 number one step, and
    a folded norm with the codes that it depends on. Everything else is wrong.
    """
    block, offset = slots // layout.block_size, slots % layout.block_size
    shape = (len(slots), layout.num_kv_heads)
    wrong = torch.zeros(shape, dtype=torch.bool, device=got.device)
    exact = torch.ones_like(wrong)
    tied: dict[str, torch.Tensor] = {}
    for name, _ in layout.places:  # data before norms: a norm's allowance depends on its vector's ties
        a, b = (field_view(x, layout, name)[block, offset] for x in (got, want))
        steps = _steps(a, b, name, layout)
        off = (steps > 0).sum(-1)
        exact &= off == 0
        tied[name] = off > 0
        if name in _CODES:
            wrong |= (steps.amax(-1) > 1) | (off > max(1, steps.shape[-1] // 32))
        else:
            of = {"key_norm": "key_data", "key_residual": "key_data"}
            if layout.preset.rotated_values:
                of["value_scale"] = "value_data"
            allowed = torch.where(tied[of[name]], 32, 1) if name in of else 1
            wrong |= steps.amax(-1) > allowed
    rest = []
    for cache in (got, want):
        flat = cache.as_strided((cache.shape[0], layout.block_stride), (layout.block_stride, 1)).clone()
        copy = flat.as_strided(cache.shape, layout.strides)
        for name, _ in layout.places:
            field_view(copy, layout, name)[block, offset] = 0
        rest.append(flat)
    stray = int((rest[0] != rest[1]).sum())
    return StoreComparison(int(wrong.sum()), float(exact.double().mean()), stray)


def _ratio(error: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """error / size, and 0 where both are 0."""
    return torch.where(error == 0, 0.0, error / size)


def _nmse(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(_ratio((got - want).square().sum(), want.square().sum()))


def _off_ideal(
    got: torch.Tensor,  # [T, Hk, *] float64
    ideal: torch.Tensor,
    want: torch.Tensor,
) -> float:
    """Largest relative distance, over KV heads, of the NMSE of ``got`` from that of ``ideal``."""
    energy = want.square().sum((0, 2))
    mine, best = (_ratio((x - want).square().sum((0, 2)), energy) for x in (got, ideal))
    return float(((mine - best).abs() / (best + 2e-5)).max())


def _causal_attention(
    query: torch.Tensor,  # [q, Hq, D]
    key: torch.Tensor,  # [T, Hk, D]
    value: torch.Tensor,  # [T, Hk, Dv]
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last q tokens: (output [q, Hq, Dv], position of the largest weight [q, Hq]).

    In fp64, or as one writes it in torch in another ``dtype``: products and weights in it, softmax in fp32.
    """
    q, hq, _ = query.shape
    tokens, hk, _ = key.shape
    grouped = query.to(dtype).view(q, hk, hq // hk, -1)
    score = torch.einsum("qhgd,thd->qhgt", grouped, key.to(dtype))
    score = score.to(dtype if dtype is torch.float64 else torch.float32) * scale
    last = tokens - q + torch.arange(q, device=key.device)
    score = score.masked_fill(torch.arange(tokens, device=key.device) > last[:, None, None, None], -math.inf)
    out = torch.einsum("qhgt,thd->qhgd", score.softmax(-1).to(dtype), value.to(dtype))
    return out.reshape(q, hq, -1).double(), score.argmax(-1).reshape(q, hq)


def _row_errors(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Relative L2 error [q, Hq] of outputs [q, Hq, Dv]; below the normal numbers of ``dtype`` relative to those."""
    floor = torch.finfo(dtype).tiny * math.sqrt(want.shape[-1])
    return _ratio((got - want).norm(dim=-1), want.norm(dim=-1).clamp(min=floor))


# ---- the measurement ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """One row of the table. NMSE is squared error over energy; other errors are relative L2 norms unless said; times
    are medians in milliseconds.

    nonfinite_*: vectors with a NaN or an infinity. Keys and values are stored as zero vectors, and all are zero in
    what they are compared with; a query is replaced before it is decoded. nonfinite_counted: store counted the same.
    *_nmse_ideal: of an ideal quantiser on the same vectors; off_ideal: largest relative distance from it of one KV
    head, and what it may be. probe_over_theory: the ideal quantiser's NMSE over the theoretical one on
    :func:`probe_keys`. oracle_error:
    the worst of one row and head; oracle_ratio: the worst part of what is allowed, the backend's tolerance or twice
    the error of plain attention in the dtype of the query. store_*: see StoreComparison.
    """

    tensors: str
    preset: str
    layout: str
    backend: str
    block_size: int
    tokens: int
    nonfinite_keys: int
    nonfinite_values: int
    nonfinite_queries: int
    nonfinite_counted: bool
    bytes_per_token: float
    compression: float
    key_nmse: float
    key_nmse_theory: float
    key_nmse_ideal: float
    value_nmse: float
    value_nmse_theory: float
    value_nmse_ideal: float
    off_ideal: float
    off_ideal_limit: float
    probe_over_theory: float
    output_error: float
    output_cosine: float
    top1_agreement: float
    oracle_error: float
    oracle_ratio: float
    tolerance: float
    store_wrong: int
    store_exact: float
    store_stray: int
    store_ms: float
    decode_ms: float

    @property
    def store_ok(self) -> bool:
        """True if the cache holds what the reference's holds, and nothing else was written or counted."""
        return (
            self.nonfinite_counted
            and not self.store_wrong
            and not self.store_stray
            and self.store_exact >= MIN_EXACT
        )

    @property
    def distortion_ok(self) -> bool:
        """True if keys and values read back as by an ideal quantiser, and that one is what theory says; NaN is not."""
        return self.off_ideal <= self.off_ideal_limit and self.probe_over_theory <= MAX_OVER_THEORY

    @property
    def decode_ok(self) -> bool:
        """True if every row and head of the output agrees with the oracle; NaN does not."""
        return self.oracle_ratio <= 1

    @property
    def faults(self) -> tuple[str, ...]:
        """What is out of tolerance, one sentence each."""
        found = []
        if not self.store_ok:
            found.append(
                f"store: {self.store_wrong} (token, head) slots differ from the reference's, {self.store_stray} other "
                f"bytes, {self.store_exact:.2%} of the slots are equal (wants 0, 0, {MIN_EXACT:.0%})"
                + ("" if self.nonfinite_counted else "; non-finite vectors are counted wrongly")
            )
        if not self.distortion_ok:
            found.append(
                f"distortion: the NMSE of a KV head is {self.off_ideal:.1%} off an ideal quantiser's (wants at most "
                f"{self.off_ideal_limit:.0%}), whose own is {self.probe_over_theory:.2f} times the theoretical one on "
                f"keys made for it (wants at most {MAX_OVER_THEORY:g})"
            )
        if not self.decode_ok:
            found.append(
                f"decode: a row and head is {self.oracle_error:.2g} off fp64 attention over the same cache, "
                f"{self.oracle_ratio:.3g} of what is allowed"
            )
        return tuple(found)

    @property
    def ok(self) -> bool:
        """True if nothing is out of tolerance."""
        return self.store_ok and self.distortion_ok and self.decode_ok


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


def _without_nonfinite(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """``x`` [..., D] with every vector that holds a NaN or an infinity replaced by zeros, and how many there were."""
    bad = ~torch.isfinite(x).all(-1)
    return x.masked_fill(bad[..., None], 0.0), int(bad.sum())


def measure(
    tensors: Tensors, decision: Decision, device: torch.device, queries: int, repeats: int
) -> Measurement:
    """Run one backend over ``tensors`` and compare; the queries of the ``queries`` last tokens are decoded."""
    bound = bind(decision)
    preset, layout, layer = bound.decision.preset, bound.layout, bound.layer
    query, key, value = (t.to(device) for t in (tensors.query, tensors.key, tensors.value))
    tokens = key.shape[0]
    query, bad_queries = _without_nonfinite(query[-queries:].contiguous())

    blocks = math.ceil(tokens / layout.block_size)
    order = torch.randperm(blocks + 2, generator=torch.Generator().manual_seed(0))[:blocks].to(device)
    position = torch.arange(tokens, device=device)
    slots = order[position // layout.block_size] * layout.block_size + position % layout.block_size
    table = order.int()[None]
    lens = torch.tensor([tokens], dtype=torch.int32, device=device)
    loc = torch.tensor([0, len(query)], dtype=torch.int32, device=device)

    cache = bound.allocate(blocks + 2, device, fill=FILL)
    counted = torch.zeros(2, dtype=torch.int32, device=device)
    bound.store(key, value, cache, slots, nonfinite=counted)
    scratch = bound.allocate(blocks + 2, device)
    store_ms = _median_ms(lambda: bound.store(key, value, scratch, slots), device, repeats)

    def run() -> torch.Tensor:
        out = bound.decode(query, cache, table, lens, loc, max_query_len=len(query))
        assert isinstance(out, torch.Tensor)
        return out

    out = run().double()
    decode_ms = _median_ms(run, device, repeats)

    # The oracle reads the very bytes that the backend wrote, with the reference's code in fp64.
    reference = Decision(
        layer, Target("cpu", "cpu"), preset, decision.block_size, "torch_reference", decision.layout
    )
    oracle = bind(reference, math_dtype=torch.float64)
    read = oracle.dequantize(oracle.wrap(cache.data), table, lens, dtype=torch.float64)
    expected: PagedCache = bind(reference).allocate(blocks + 2, device, fill=FILL)
    bind(reference).store(key, value, expected, slots)
    stored = compare_stored(cache.data, expected.data, layout, slots)

    (key, bad_keys), (value, bad_values) = (_without_nonfinite(t) for t in (key, value))
    exact_key, exact_value = key.double(), value.double()
    key_ideal, value_ideal = ideal_keys(exact_key, layout), ideal_values(exact_value, layout)
    scale = layer.softmax_scale
    exact, exact_top = _causal_attention(query, exact_key, exact_value, scale)
    wanted, wanted_top = _causal_attention(query, read.key, read.value, scale)
    plain, _ = _causal_attention(query, read.key, read.value, scale, query.dtype)
    tolerance = get_backend(bound.backend).tolerance(layer.dtype)
    errors = _row_errors(out, wanted, query.dtype)
    allowed = (2 * _row_errors(plain, wanted, query.dtype)).nan_to_num(tolerance).clamp(min=tolerance)

    grouped = _groups(exact_value.clamp(-FP16_MAX, FP16_MAX), layout)
    steps = _value_step(grouped, layout)
    uniform = grouped.shape[-1] * steps.square().sum() / 12  # rounding: step**2 / 12 per coordinate
    value_theory = float(_ratio(uniform, exact_value.square().sum()))
    if preset.rotated_values:
        value_theory = GAUSSIAN_MSE[preset.value_bits]
    key_theory = FP8_NMSE if preset.fp8_keys else GAUSSIAN_MSE[preset.code_bits]
    if preset.sketch:  # of the estimate of the residual
        key_theory *= math.pi / 2 - 1 / layer.head_size
    probe = probe_keys(layer.head_size)
    bits_free = 2 * (layer.head_size + layer.value_size) * layer.num_kv_heads
    return Measurement(
        tensors=tensors.name,
        preset=preset.name,
        layout=layout.name,
        backend=bound.backend,
        block_size=layout.block_size,
        tokens=tokens,
        nonfinite_keys=bad_keys,
        nonfinite_values=bad_values,
        nonfinite_queries=bad_queries,
        nonfinite_counted=counted.tolist() == [bad_keys, bad_values],
        bytes_per_token=layout.bytes_per_token,
        compression=bits_free / layout.bytes_per_token,
        key_nmse=_nmse(read.key, exact_key),
        key_nmse_theory=key_theory,
        key_nmse_ideal=_nmse(key_ideal, exact_key),
        value_nmse=_nmse(read.value, exact_value),
        value_nmse_theory=value_theory,
        value_nmse_ideal=_nmse(value_ideal, exact_value),
        off_ideal=max(
            _off_ideal(read.key, key_ideal, exact_key), _off_ideal(read.value, value_ideal, exact_value)
        ),
        off_ideal_limit=SKETCH_SLACK if preset.sketch else DISTORTION_SLACK,
        probe_over_theory=_nmse(ideal_keys(probe, layout), probe) / key_theory,
        output_error=math.sqrt(_nmse(out, exact)),
        output_cosine=float(torch.cosine_similarity(out, exact, dim=-1).mean()),
        top1_agreement=float((exact_top == wanted_top).double().mean()),
        oracle_error=float(errors.max()),
        oracle_ratio=float((errors / allowed).max()),
        tolerance=tolerance,
        store_wrong=stored.wrong,
        store_exact=stored.exact,
        store_stray=stored.stray,
        store_ms=store_ms,
        decode_ms=decode_ms,
    )
