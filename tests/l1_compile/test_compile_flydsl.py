"""Resources and instruction counts of the FlyDSL kernels, from their machine code: nothing is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("flydsl", reason="FlyDSL is not installed", exc_type=ImportError)
pytest.importorskip("triton", reason="Triton's linker stands in for ld.lld")

from ci.flydsl_isa import steady_state
from tests.l1_simulate.flydsl_helpers import LIMITS, check_resources, compiled
from turboquant_rocm.backends._flydsl.config import TILE, DecodeConfig, RowConfig
from turboquant_rocm.layouts import make_layout

ARCHES = ("gfx942", "gfx950")

VARIANTS: dict[str, dict[str, Any]] = {
    "published": {},
    "gqa-1": {"gqa": 1},
    "gqa-6": {"gqa": 6},
    "gqa-16": {"gqa": 16},
    "block-32": {"block_size": 32},
    "block-128": {"block_size": 128},
    "many-heads": {"num_kv_heads": 16},
    "window": {"window": 1024},
    "soft-cap": {"soft_cap": 30.0},
    "direct": {"direct": "bf16"},
    "direct-multi-sinks": {"direct": "fp16", "multi": True, "sinks": True},
    "multi": {"multi": True},
    "3-bit-keys": {"preset": "turboquant_k3v4_nc"},
    "3-bit-keys-direct-multi-gqa-3-window-sinks": {
        "preset": "turboquant_k3v4_nc", "direct": "bf16", "multi": True, "gqa": 3, "window": 128, "sinks": True,
    },
    "multi-gqa-4-window": {"multi": True, "gqa": 4, "window": 128},
    "direct-window": {"direct": "bf16", "window": 128},
    "direct-multi-gqa-3-window-sinks-soft-cap": {
        "direct": "bf16", "multi": True, "gqa": 3, "window": 128, "sinks": True, "soft_cap": 20.0,
    },
    "multi-gqa-5-block-64-window-soft-cap": {
        "multi": True, "gqa": 5, "block_size": 64, "num_kv_heads": 4, "window": 128, "soft_cap": 20.0,
    },
    "multi-gqa-1-block-128-window-many-heads": {
        "multi": True, "gqa": 1, "block_size": 128, "num_kv_heads": 32, "window": 128,
    },
}  # fmt: skip
MFMA_CYCLES = 16
"""Of a SIMD, for each of the matrix instructions used, on both targets."""
SLOWER = 0.6
"""Lane instructions per element that a feature may cost on top: the cap's exp2, rcp and two more per score."""


def config(
    arch: str,
    *,
    gqa: int = 8,
    num_kv_heads: int = 8,
    block_size: int = 16,
    preset: str = "turboquant_4bit_nc",
    **options: Any,
) -> DecodeConfig:
    """A specialisation over an unpadded cache."""
    return DecodeConfig.of(arch, make_layout("soa", preset, 128, num_kv_heads, block_size), gqa, **options)


def check_and_record(code: Any, arch: str, name: str, record: Callable[..., None]) -> None:
    """The resources of a kernel, for the leg's result file and against the limits."""
    record(
        arch,
        f"flydsl-{name}",
        registers=code.resource("vgpr_count"),
        spills=code.resource("vgpr_spill_count") + code.resource("sgpr_spill_count"),
        scratch=code.resource("private_segment_fixed_size"),
        lds=code.resource("group_segment_fixed_size"),
    )
    check_resources(code, arch)


@pytest.mark.parametrize(
    "variant", [v if v == "published" else pytest.param(v, marks=pytest.mark.slow) for v in VARIANTS]
)
@pytest.mark.parametrize("arch", ARCHES)
def test_decode(arch: str, variant: str, record_kernel: Callable[..., None]):
    made = config(arch, **VARIANTS[variant])
    code = compiled("decode", made, arch)
    check_and_record(code, arch, f"decode-{variant}", record_kernel)
    counts = steady_state(code.assembly)
    # 3-bit keys have one table of residuals, 4-bit ones two
    mfma = (16 if made.key_bits == 4 else 12) + 8
    assert counts["mfma"] == (mfma if arch == "gfx950" else 2 * mfma), (
        "the steady-state loop is not the one that was counted"
    )
    assert counts["lds"] == 0, "nothing in LDS, so no bank conflicts"
    per_element = counts.total() * 64 / (TILE * 256)
    limits = LIMITS[arch] if made.key_bits == 4 else LIMITS[arch]["k3v4"]
    slack = SLOWER * ("soft-cap" in variant) + 0.15 * (variant not in ("published", "3-bit-keys"))
    assert per_element <= limits["static"] + slack, counts
    assert MFMA_CYCLES * counts["mfma"] * 16 / TILE <= limits["simd_cycles"]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("kind", ["prepare", "reduce"])
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.slow
def test_rows(arch: str, kind: str, dtype: str, record_kernel: Callable[..., None]):
    code = compiled(kind, RowConfig(arch, 64, dtype, multi=True, sinks=True, lse=True), arch)
    check_and_record(code, arch, f"{kind}-{dtype}", record_kernel)
