"""Triton kernels for presets with rotated values, over the SoA layout."""

from __future__ import annotations

from ..eligibility import AtMost, Code, MultipleOf, OneOf, Package, Without
from ..spec import AttentionKind, Dtype
from . import Backend, register

ARCHES = ("gfx942", "gfx950", "sm_80", "sm_86", "sm_89", "sm_90")
HEAD_SIZES = (64, 128, 256)

BACKEND = register(
    Backend(
        name="triton_rotated",
        priority=60,
        layout="soa",
        requires=(
            OneOf(Code.ARCH, ARCHES),
            Package(Code.PACKAGE, name="triton", version=">=3.6,<4", arches=ARCHES),
            OneOf(Code.LAYER_KIND, (AttentionKind.FULL, AttentionKind.SLIDING)),
            OneOf(Code.ROTATED_VALUES, (True,)),
            OneOf(Code.KEY_BITS, (8, 4, 3)),
            Without(Code.SKETCH),
            OneOf(Code.HEAD_SIZE, HEAD_SIZES),
            OneOf(Code.VALUE_HEAD_SIZE, HEAD_SIZES),
            AtMost(Code.GQA_RATIO, limit=16),
            MultipleOf(Code.BLOCK_SIZE, base=16),
            AtMost(Code.BLOCK_SIZE, limit=4096, low=16),
            OneOf(Code.DTYPE, (Dtype.BF16, Dtype.FP16)),
            Without(Code.POSITION_BIAS),
        ),
        ops="_triton.rotated:RotatedOps",
        max_splits=64,
        description="Triton, SoA cache, rotated values: both codebooks read in one pass, the output rotated back once",
    )
)
