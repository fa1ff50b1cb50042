"""FlyDSL kernels for gfx950: docs/flydsl_decode.md."""

from __future__ import annotations

from . import register
from ._flydsl.profile import declaration

BACKEND = register(declaration("gfx950", 300))
