"""Runs a representative set of decode cases, to be run under compute-sanitizer (memcheck, racecheck):

    compute-sanitizer --tool memcheck --error-exitcode 9 --kernel-name kernel_substring=decode_kernel \\
        python -m ci.sanitize_decode

Allocations are not cached, so that a read past the end of a cache is seen.
"""

from __future__ import annotations

import os

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

from tests.decode_checks import LAYOUTS, PRESETS, Case, Config, check
from turboquant_rocm.target import detect


def main() -> None:
    target = detect()
    count = 0
    for layout in LAYOUTS:
        for i, preset in enumerate(PRESETS):
            size = (64, 80, 128, 112)[i]
            config = Config(preset, layout, size, 3, 4, (16, 48)[i % 2], sinks=i % 2 == 0, most_queries=3)
            if i % 2:
                check(config, Case((0, 1, 65, 200), splits=3), "cuda", target)
            else:
                check(config, Case((3, 65, 200), (3, 0, 2), splits=1 + i), "cuda", target)
            count += 1
    print(f"{count} cases")


if __name__ == "__main__":
    main()
