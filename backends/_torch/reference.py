"""TurboQuant in plain torch: the reference of the package, and with fp64 math the oracle of its tests.

It follows design.md sections 4 and 5 sentence by sentence, and shares no code with any kernel. Every
per-vector result is built from elementwise operations in a fixed order (butterflies, a pairwise sum), never
from a library matrix product or reduction, so the bytes of a token do not depend on how many tokens are stored
in one call, nor on the device.

Non-finite input. A key or value vector that holds a NaN or an infinity is stored as the zero vector
(codes of 0, norm 0; or scale 0, zero point 0), and counted. It cannot be represented, clamping it would invent
a direction, and the token stays harmless: score 0, value 0.
"""

from __future__ import annotations

import math
from functools import cache as memo
from typing import Any, Final

import numpy as np
import torch

from ...codebook import centroids, midpoints, rotation_factors, small_hadamard
from ...dispatch import Decision
from ...layouts import Layout
from ...layouts.packing import pack, unpack
from ...layouts.slot import FP16_BYTES
from ...layouts.views import field_view, read_fp16, write_fp16
from ...seeded import cache_sketch
from ...spec import NormMeaning

__all__ = ["ReferenceOps", "rotate"]

FP16_MAX: Final = 65504.0
FP8_MAX: Final = 448.0
KEY_EPS: Final = 1e-8  # added to the norm before dividing by it
CENTROID_EPS: Final = 1e-16  # added to the squared norm of a centroid vector
MIN_STEP: Final = 1e-8  # smallest value scale
BIG: Final = 2.0**56  # a key beyond this is scaled down by SHRINK before it is squared: D * BIG**2 fits fp32
SHRINK: Final = 2.0**-80


_SKETCH_ELEMENTS: Final = 1 << 23  # products held at once


@memo
def _constant(kind: str, head_size: int, bits: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if kind == "sketch":
        table = cache_sketch(head_size)
    else:
        table = {"centroids": centroids, "midpoints": midpoints}[kind](head_size, bits)
    return torch.from_numpy(np.array(table)).to(device=device, dtype=dtype)


def _tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, pairwise in a fixed order: [..., n] -> [...]."""
    n = x.shape[-1]
    size = 1 << (n - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, size - n))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def _root(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded square root; torch's own is off by a unit in the last place on some CPUs in fp32."""
    return x.double().sqrt().to(x.dtype)


def _sketch(x: torch.Tensor) -> torch.Tensor:
    """S x over the last dimension [..., D], each row's products added pairwise in a fixed order."""
    d = x.shape[-1]
    s = _constant("sketch", d, 1, x.dtype, x.device)
    flat = x.reshape(-1, d)
    parts = [_tree_sum(part[:, None] * s) for part in flat.split(max(1, _SKETCH_ELEMENTS // (d * d)))]
    return torch.cat(parts).view(x.shape) if parts else torch.empty_like(x)


def rotate(x: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """y = R x (or x = R^T y) over the last dimension [..., D], by butterflies; R as in codebook.rotation."""
    d = x.shape[-1]
    m, p = rotation_factors(d)
    shape = x.shape
    y = x.reshape(*shape[:-1], m, p)
    step = 1
    while step < p:  # Sylvester part, on runs of p contiguous coordinates; it is its own transpose
        pairs = y.reshape(*shape[:-1], m, p // (2 * step), 2, step)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack([a + b, a - b], -2).reshape(*shape[:-1], m, p)
        step *= 2
    if m > 1:  # Paley part, across the m runs
        signs = small_hadamard(m).T if inverse else small_hadamard(m)
        rows = []
        for i in range(m):
            total = y[..., 0, :] if signs[i, 0] > 0 else -y[..., 0, :]
            for j in range(1, m):
                total = total + y[..., j, :] if signs[i, j] > 0 else total - y[..., j, :]
            rows.append(total)
        y = torch.stack(rows, -2)
    return y.reshape(shape) * (1.0 / math.sqrt(d))


class ReferenceOps:
    """LayerOps in plain torch. ``math_dtype``: torch.float32, or torch.float64 for the oracle.

    Unlike the kernels it reads lengths on the host.
    """

    def __init__(
        self, decision: Decision, layout: Layout, *, math_dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        if options:
            raise TypeError(f"torch_reference has no options {sorted(options)}")
        if math_dtype not in (torch.float32, torch.float64):
            raise TypeError(f"math_dtype={math_dtype} (wants torch.float32 or torch.float64)")
        self.layer = decision.layer
        self.layout = layout
        self.preset = layout.preset
        self.math = math_dtype

    # ---- store ------------------------------------------------------------------------------------------

    def store(
        self,
        key: torch.Tensor,  # [T, Hk, D]
        value: torch.Tensor,  # [T, Hk, Dv]
        cache: torch.Tensor,  # [nb, bs, Hk, slot_stride] uint8
        slot_mapping: torch.Tensor,  # [T] int
        nonfinite: torch.Tensor | None = None,  # [2] int32
    ) -> None:
        """Quantise and write the tokens whose slot is not negative."""
        kept = slot_mapping >= 0
        slots = slot_mapping[kept].long()
        block, offset = slots // self.layout.block_size, slots % self.layout.block_size
        fields, bad = self.encode(key[kept], value[kept])
        for name, data in fields.items():
            field_view(cache, self.layout, name)[block, offset] = data
        if nonfinite is not None:
            nonfinite += bad.to(nonfinite)

    def encode(
        self,
        key: torch.Tensor,  # [T, Hk, D]
        value: torch.Tensor,  # [T, Hk, Dv]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The bytes of every field, uint8 [T, Hk, nbytes], and how many key and value vectors were non-finite."""
        bad_key = ~torch.isfinite(key).all(-1)  # [T, Hk]
        bad_value = ~torch.isfinite(value).all(-1)
        key = key.masked_fill(bad_key[..., None], 0.0)
        value = value.masked_fill(bad_value[..., None], 0.0)
        fields = self._encode_fp8(key) if self.preset.fp8_keys else self._encode_codebook(key)
        fields.update(self._encode_value(value, bad_value))
        return fields, torch.stack([bad_key.sum(), bad_value.sum()])

    def _encode_fp8(self, key: torch.Tensor) -> dict[str, torch.Tensor]:
        clamped = key.to(torch.float32).clamp(-FP8_MAX, FP8_MAX)
        data = clamped.to(torch.float8_e4m3fn).view(torch.uint8)  # round to nearest even
        return {"key_data": torch.where(data == 0x80, torch.zeros_like(data), data)}  # -0 is written as 0

    def _encode_codebook(self, key: torch.Tensor) -> dict[str, torch.Tensor]:
        folded, bits = self.layout.norm_meaning is NormMeaning.FOLDED, self.preset.code_bits
        codes, norm, y = self._codebook(key, bits, folded)
        fields = {"key_data": pack(codes, bits), "key_norm": write_fp16(norm)}
        if self.preset.sketch:
            residual = y - _constant("centroids", key.shape[-1], bits, self.math, key.device)[codes.long()]
            length = _root(_tree_sum(residual * residual))
            fields["key_signs"] = pack(_sketch(residual) >= 0, 1)
            fields["key_residual"] = write_fp16((norm * length).clamp(max=FP16_MAX))
        return fields

    def _codebook(
        self, x: torch.Tensor, bits: int, folded: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes of the rotated unit vectors of x [T, Hk, D], norms [T, Hk], over ||c|| if folded, and the vectors."""
        d = x.shape[-1]
        k = x.to(self.math)
        shrink = torch.where(k.abs().amax(-1) > BIG, SHRINK, 1.0).to(self.math)  # exact, keeps squares finite
        scaled = k * shrink[..., None]
        norm = _root(_tree_sum(scaled * scaled))  # [T, Hk], of the scaled vector
        y = rotate(scaled / (norm + KEY_EPS * shrink)[..., None])
        codes = torch.bucketize(y, _constant("midpoints", d, bits, self.math, x.device), right=True)
        norm = norm / shrink
        if folded:
            norm = norm / self._centroid_norm(codes, d, bits)
        return codes, norm.clamp(max=FP16_MAX), y

    def _centroid_norm(self, codes: torch.Tensor, d: int, bits: int) -> torch.Tensor:
        c = _constant("centroids", d, bits, self.math, codes.device)[codes.long()]
        return _root(_tree_sum(c * c) + CENTROID_EPS)

    def _encode_value(self, value: torch.Tensor, bad: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.preset.rotated_values:
            codes, norm, _ = self._codebook(value, self.preset.value_bits, folded=True)
            return {"value_data": pack(codes, self.preset.value_bits), "value_scale": write_fp16(norm)}
        levels = 2**self.preset.value_bits - 1
        group = self.preset.value_group or value.shape[-1]
        v = value.to(torch.float32).clamp(-FP16_MAX, FP16_MAX)  # always fp32: it decides the bytes
        v = v.unflatten(-1, (-1, group))  # [T, Hk, groups, group]
        low, high = v.amin(-1), v.amax(-1)
        # A tensor: by a number, torch multiplies with the reciprocal on a GPU, which rounds otherwise.
        scale = (high - low).clamp(min=MIN_STEP * levels) / torch.full_like(low, levels)
        codes = ((v - low[..., None]) / scale[..., None] + 0.5).floor().clamp(0, levels)
        return {
            "value_data": pack(codes.to(torch.int64).flatten(-2), self.preset.value_bits),
            "value_scale": write_fp16(self._stored_scale(scale, low, levels)).flatten(-2),
            "value_zero": write_fp16(low).flatten(-2),
        }

    @staticmethod
    def _stored_scale(scale: torch.Tensor, low: torch.Tensor, levels: int) -> torch.Tensor:
        """fp16 scale, one ulp less where its rounding would carry the largest code past 65504, inf to fp16 readers."""
        half = scale.clamp(max=FP16_MAX).half()
        top = low.half().float() + levels * half.float()
        return torch.where(top > FP16_MAX, (half.view(torch.int16) - 1).view(torch.float16), half)

    # ---- read -------------------------------------------------------------------------------------------

    def _decode_key(self, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        """Keys [..., D] in ``math`` dtype, in the rotated domain if the preset rotates."""
        d, bits = self.layout.head_size, self.preset.code_bits
        if self.preset.fp8_keys:
            return fields["key_data"].contiguous().view(torch.float8_e4m3fn).to(self.math)
        codes = unpack(fields["key_data"], bits, d)
        c = _constant("centroids", d, bits, self.math, codes.device)[codes.long()]
        norm = read_fp16(fields["key_norm"]).to(self.math)
        if self.preset.norm_correction and self.layout.norm_meaning is NormMeaning.RAW:
            norm = norm / self._centroid_norm(codes, d, bits)
        key = c * norm[..., None]
        if self.preset.sketch:
            signs = 2.0 * unpack(fields["key_signs"], 1, d).to(self.math) - 1.0
            scale = math.sqrt(math.pi / 2) / d * read_fp16(fields["key_residual"]).to(self.math)
            key = key + scale[..., None] * (signs @ _constant("sketch", d, 1, self.math, signs.device))
        return key

    def _decode_value(self, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        d, bits = self.layout.value_head_size, self.preset.value_bits
        codes = unpack(fields["value_data"], bits, d)
        scale, zero = (
            read_fp16(fields[name].unflatten(-1, (-1, FP16_BYTES))).to(self.math) if name in fields else None
            for name in ("value_scale", "value_zero")
        )  # [..., groups]
        assert scale is not None
        if zero is None:  # rotated values
            c = _constant("centroids", d, bits, self.math, codes.device)[codes.long()]
            return rotate(c * scale, inverse=True)
        grouped = codes.to(self.math).unflatten(-1, (scale.shape[-1], -1))
        return (grouped * scale[..., None] + zero[..., None]).flatten(-2)

    def read(
        self, cache: torch.Tensor, blocks: torch.Tensor, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [stop - start, Hk, D] of tokens [start, stop) of one sequence, rotated back.

        blocks: [M] block ids of the sequence; only those that hold the range are read.
        """
        token = torch.arange(start, stop, device=cache.device)
        block, offset = blocks[token // self.layout.block_size].long(), token % self.layout.block_size
        fields = {name: field_view(cache, self.layout, name)[block, offset] for name, _ in self.layout.places}
        key = self._decode_key(fields)
        return (key if self.preset.fp8_keys else rotate(key, inverse=True)), self._decode_value(fields)

    def dequantize(
        self,
        cache: torch.Tensor,  # [nb, bs, Hk, slot_stride] uint8
        block_table: torch.Tensor,  # [B, M] int32
        seq_lens: torch.Tensor,  # [B] int32
        starts: torch.Tensor,  # [B] int32
        cu_lens: torch.Tensor,  # [B + 1] int32
        key_out: torch.Tensor,  # [sum, Hk, D]
        value_out: torch.Tensor,  # [sum, Hk, Dv]
    ) -> None:
        """Tokens [starts, seq_lens) of every sequence, one after the other."""
        rows = cu_lens.tolist()
        for b, (start, stop) in enumerate(zip(starts.tolist(), seq_lens.tolist(), strict=True)):
            if stop > start:
                key, value = self.read(cache, block_table[b], start, stop)
                key_out[rows[b] : rows[b + 1]] = key.to(key_out.dtype)
                value_out[rows[b] : rows[b + 1]] = value.to(value_out.dtype)

    def decode(
        self,
        query: torch.Tensor,  # [N, Hq, D]
        cache: torch.Tensor,  # [nb, bs, Hk, slot_stride] uint8
        block_table: torch.Tensor,  # [B, M] int32
        seq_lens: torch.Tensor,  # [B] int32
        query_start_loc: torch.Tensor | None,  # [B + 1] int32
        max_query_len: int,
        scale: float,
        sinks: torch.Tensor | None,  # [Hq] fp32
        out: torch.Tensor,  # [N, Hq, Dv]
        lse: torch.Tensor | None,  # [N, Hq]
        workspace: Any = None,
    ) -> None:
        """Attention of every query token to its own sequence; see BoundLayer.decode."""
        starts = list(range(len(seq_lens) + 1)) if query_start_loc is None else query_start_loc.tolist()
        for b, seq_len in enumerate(seq_lens.tolist()):
            rows = slice(starts[b], starts[b + 1])
            if rows.start == rows.stop:
                continue
            o, s = self._attend(query[rows], cache, block_table[b], seq_len, scale, sinks)
            out[rows] = o.to(out.dtype)
            if lse is not None:
                lse[rows] = s.to(lse.dtype)

    def _attend(
        self,
        query: torch.Tensor,  # [q, Hq, D]
        cache: torch.Tensor,
        blocks: torch.Tensor,  # [M]
        seq_len: int,
        scale: float,
        sinks: torch.Tensor | None,  # [Hq]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, hq, _ = query.shape
        groups = self.layer.gqa_ratio
        # Row j sees keys [low, high): high = seq_len - q + j + 1, low = high - window.
        high = seq_len - q + 1 + torch.arange(q, device=query.device)  # [q]
        low = torch.zeros_like(high) if self.layer.window is None else (high - self.layer.window).clamp(min=0)
        first = min(int(low.min()), max(seq_len, 0))
        key, value = self.read(cache, blocks, first, max(seq_len, first))  # [S, Hk, *]
        key = key.repeat_interleave(groups, 1)  # [S, Hq, D]
        value = value.repeat_interleave(groups, 1)
        score = torch.einsum("qhd,shd->qhs", query.to(self.math), key) * scale
        if self.layer.soft_cap is not None:
            score = self.layer.soft_cap * torch.tanh(score / self.layer.soft_cap)
        token = torch.arange(first, first + len(key), device=query.device)
        visible = (token >= low[:, None]) & (token < high[:, None])  # [q, S]
        score = score.masked_fill(~visible[:, None], -math.inf)
        if sinks is not None:  # one more logit in the denominator, with no value
            sink = sinks.to(self.math).expand(q, hq)[..., None]
            score = torch.cat([score, sink], -1)
        lse = torch.logsumexp(score, -1)  # [q, Hq]
        lse = lse.masked_fill(~visible.any(-1)[:, None], -math.inf)
        weight = torch.exp(score - lse.masked_fill(lse == -math.inf, math.inf)[..., None])[..., : len(key)]
        weight = weight.masked_fill(~visible[:, None], 0.0)
        return torch.einsum("qhs,shd->qhd", weight, value), lse
