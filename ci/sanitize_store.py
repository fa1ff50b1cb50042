"""A representative set of store and dequantise launches, to be run under compute-sanitizer (memcheck, racecheck):

    compute-sanitizer --tool memcheck --error-exitcode 9 --kernel-regex kernel_substring=_kernel \\
        python -m ci.sanitize_store

Allocations are not cached, so that an access past the end of a tensor is seen.
"""

from __future__ import annotations

import os

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

from tests import store_checks as checks


def main() -> None:
    count = 0
    for layout in checks.LAYOUTS:
        for preset, head_size in zip(checks.PRESETS, (64, 96, 128, 80), strict=True):
            checks.check_against_reference(preset, layout, head_size, "bf16", "cuda")
            checks.check_dequantize(preset, layout, head_size, "cuda")
            count += 2
        checks.check_against_reference(
            "4bit_nc", layout, 256, "fp16", "cuda", slot_stride=268, block_stride=268 * 48 + 2
        )
        checks.check_dequantize("4bit_nc", layout, 256, "cuda")
        count += 2
    print(f"{count} cases")


if __name__ == "__main__":
    main()
