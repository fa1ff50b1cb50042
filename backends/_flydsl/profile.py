"""What the kernels serve: the declaration that flydsl_gfx942 and flydsl_gfx950 share. No flydsl here.

Every value that it allows is executed by tests/l1_simulate/test_flydsl_profile.py.
"""

from __future__ import annotations

from ...eligibility import AtMost, Code, OneOf, Package, Without
from ...spec import AttentionKind, Dtype
from .. import Backend
from .config import COLUMNS, DIM

__all__ = ["declaration"]


def declaration(arch: str, priority: int) -> Backend:
    """The backend of one architecture, not yet registered."""
    arches = (arch,)
    return Backend(
        name=f"flydsl_{arch}",
        priority=priority,
        layout="soa",
        requires=(
            OneOf(Code.ARCH, arches),
            # A missing instruction or library ends the process inside FlyDSL, so it is imported elsewhere first.
            Package(Code.PACKAGE, name="flydsl", version=">=0.5,<0.6", arches=arches, isolated=True),
            Package(Code.PACKAGE, name="triton", version=">=3.6,<4", arches=arches),  # store and dequantise
            OneOf(Code.LAYER_KIND, (AttentionKind.FULL, AttentionKind.SLIDING)),
            OneOf(Code.KEY_BITS, (4, 3)),
            OneOf(Code.VALUE_BITS, (4,)),
            Without(Code.ROTATED_VALUES),
            Without(Code.SKETCH),
            Without(Code.VALUE_GROUP),
            OneOf(Code.HEAD_SIZE, (DIM,)),
            OneOf(Code.VALUE_HEAD_SIZE, (DIM,)),
            AtMost(Code.GQA_RATIO, limit=COLUMNS),
            OneOf(Code.BLOCK_SIZE, (16, 32, 64, 128)),
            OneOf(Code.DTYPE, (Dtype.BF16, Dtype.FP16)),
            Without(Code.POSITION_BIAS),
        ),
        ops="_flydsl.ops:FlydslOps",
        max_splits=128,
        description=f"FlyDSL, SoA cache: {arch} only",
    )
