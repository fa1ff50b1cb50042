"""Reference in plain torch: any device, any shape, both layouts. Explicit only, so nothing falls back to it."""

from __future__ import annotations

from ..eligibility import AtMost, Code, HasRotation, OneOf, WholeGroups, Without
from ..spec import AttentionKind
from . import Backend, register

BACKEND = register(
    Backend(
        name="torch_reference",
        priority=0,
        layout="any",
        automatic=False,
        requires=(
            OneOf(Code.LAYER_KIND, (AttentionKind.FULL, AttentionKind.SLIDING)),
            HasRotation(),
            WholeGroups(),
            AtMost(Code.BLOCK_SIZE, limit=1 << 20),
            Without(Code.POSITION_BIAS),
        ),
        ops="_torch.reference:ReferenceOps",
        # Math in fp32 and one rounding to the query's dtype: half an ulp of that dtype, with room for order.
        rel_tol=(("bf16", 4e-3), ("fp16", 5e-4), ("fp32", 1e-5)),
        description="plain torch, fp32 or fp64 math; shares no kernel code",
    )
)
