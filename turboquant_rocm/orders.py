"""Which head sizes have a rotation: integers only, so that reports about eligibility need no numpy."""

from __future__ import annotations

from typing import Final

from .spec import SpecError

__all__ = ["SMALL_ORDERS", "rotation_factors"]

SMALL_ORDERS: Final = (1, 12, 20, 28)
"""Orders m of the small factor: head sizes m * 2**k have a rotation."""


def rotation_factors(head_size: int) -> tuple[int, int]:
    """(m, p) with head_size = m * p, m one of 1, 12, 20, 28 and p a power of two; SpecError if there is none."""
    if isinstance(head_size, int) and head_size >= 1:
        for m in SMALL_ORDERS:
            p, rest = divmod(head_size, m)
            if rest == 0 and p & (p - 1) == 0:
                return m, p
    raise SpecError(
        "head_size",
        head_size,
        "a power of two, or 12, 20 or 28 times a power of two (80, 96, 112, 160, 192, 224 ...): "
        "no exactly orthonormal Hadamard-type rotation is built in for others",
    )
