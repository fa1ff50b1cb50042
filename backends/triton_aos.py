"""Triton kernels over the AoS layout: everything Triton supports, interoperable with existing AoS caches."""

from __future__ import annotations

from ..eligibility import AtMost, Code, MultipleOf, OneOf, Package, Without
from ..spec import AttentionKind, Dtype
from . import Backend, register

ARCHES = (
    "gfx90a",
    "gfx942",
    "gfx950",
    "gfx1100",
    "gfx1201",
    "sm_80",
    "sm_86",
    "sm_89",
    "sm_90",
    "sm_100",
    "sm_120",
)
HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)

BACKEND = register(
    Backend(
        name="triton_aos",
        priority=100,
        layout="aos",
        requires=(
            OneOf(Code.ARCH, ARCHES),
            Package(Code.PACKAGE, name="triton", version=">=3.6,<4", arches=ARCHES),
            OneOf(Code.LAYER_KIND, (AttentionKind.FULL, AttentionKind.SLIDING)),
            OneOf(Code.KEY_BITS, (8, 4, 3)),
            OneOf(Code.VALUE_BITS, (4, 3)),
            Without(Code.ROTATED_VALUES),
            Without(Code.SKETCH),
            Without(Code.VALUE_GROUP),
            OneOf(Code.HEAD_SIZE, HEAD_SIZES),
            OneOf(Code.VALUE_HEAD_SIZE, HEAD_SIZES),
            AtMost(Code.GQA_RATIO, limit=128),
            MultipleOf(Code.BLOCK_SIZE, base=16),
            AtMost(Code.BLOCK_SIZE, limit=1 << 16, low=16),
            OneOf(Code.DTYPE, (Dtype.BF16, Dtype.FP16)),
            Without(Code.POSITION_BIAS),
        ),
        ops="_triton.ops:AosOps",
        max_splits=256,
        min_splits=3,
        description="Triton, AoS cache: every architecture that Triton supports",
    )
)
