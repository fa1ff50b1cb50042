"""FlyDSL kernels for gfx950: docs/flydsl_decode.md.

The profile is the published one. The kernels do more (GQA 1 to 16, blocks up to 128, sinks, window, soft cap: executed
in tests/l1_simulate/test_flydsl.py); it is widened when those have been through all legs.
"""

from __future__ import annotations

from ..eligibility import Code, OneOf, Package, Without
from ..spec import AttentionKind, Dtype
from . import Backend, register

ARCHES = ("gfx950",)

BACKEND = register(
    Backend(
        name="flydsl_gfx950",
        priority=300,
        layout="soa",
        requires=(
            OneOf(Code.ARCH, ARCHES),
            # A missing instruction or library ends the process inside FlyDSL, so it is imported elsewhere first.
            Package(Code.PACKAGE, name="flydsl", version=">=0.5,<0.6", arches=ARCHES, isolated=True),
            Package(Code.PACKAGE, name="triton", version=">=3.6,<4", arches=ARCHES),  # store and dequantise
            OneOf(Code.LAYER_KIND, (AttentionKind.FULL, AttentionKind.SLIDING)),
            OneOf(Code.KEY_BITS, (4,)),
            OneOf(Code.VALUE_BITS, (4,)),
            OneOf(Code.HEAD_SIZE, (128,)),
            OneOf(Code.VALUE_HEAD_SIZE, (128,)),
            OneOf(Code.GQA_RATIO, (6, 8, 16)),
            OneOf(Code.BLOCK_SIZE, (16, 32)),
            OneOf(Code.DTYPE, (Dtype.BF16, Dtype.FP16)),
            Without(Code.SINKS),
            Without(Code.WINDOW),
            Without(Code.SOFT_CAP),
            Without(Code.POSITION_BIAS),
        ),
        ops="_flydsl.ops:FlydslOps",
        max_splits=128,
        description="FlyDSL, SoA cache: gfx950 only",
    )
)
