"""FlyDSL kernels for gfx942, the same family without the instructions that only gfx950 has: docs/flydsl_decode.md."""

from __future__ import annotations

from . import register
from ._flydsl.profile import declaration

BACKEND = register(declaration("gfx942", 290))
