"""Triton kernels for TurboQuant_prod: the presets with a sketch, over the SoA layout."""

from __future__ import annotations

from ..eligibility import AtMost, Code, MultipleOf, OneOf, Package, Without
from ..spec import AttentionKind, Dtype
from . import Backend, register

ARCHES = ("gfx942", "gfx950", "sm_80", "sm_86", "sm_89", "sm_90")
HEAD_SIZES = (64, 128)

BACKEND = register(
    Backend(
        name="triton_prod",
        priority=50,
        layout="soa",
        automatic=False,  # like its presets, for comparison with the paper and not for serving
        requires=(
            OneOf(Code.ARCH, ARCHES),
            Package(Code.PACKAGE, name="triton", version=">=3.6,<4", arches=ARCHES),
            OneOf(Code.LAYER_KIND, (AttentionKind.FULL,)),
            OneOf(Code.SKETCH, (True,)),
            OneOf(Code.KEY_BITS, (4, 3)),
            OneOf(Code.VALUE_BITS, (4, 2)),
            OneOf(Code.VALUE_GROUP, (32,)),
            OneOf(Code.HEAD_SIZE, HEAD_SIZES),
            OneOf(Code.VALUE_HEAD_SIZE, HEAD_SIZES),
            AtMost(Code.GQA_RATIO, limit=16),
            MultipleOf(Code.BLOCK_SIZE, base=16),
            AtMost(Code.BLOCK_SIZE, limit=4096, low=16),
            OneOf(Code.DTYPE, (Dtype.BF16, Dtype.FP16)),
            Without(Code.SINKS),
            Without(Code.SOFT_CAP),
            Without(Code.POSITION_BIAS),
        ),
        ops="_triton.prod:ProdOps",
        max_splits=64,
        description="Triton, SoA cache, for comparison with the paper: codes and signs scored in one pass",
    )
)
