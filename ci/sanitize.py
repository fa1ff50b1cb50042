"""Runs every kernel on an NVIDIA GPU under compute-sanitizer:

    python -m ci.sanitize                 memcheck and racecheck, kernel by kernel
    python -m ci.sanitize --tool memcheck

The cases have every layout and preset, head sizes that are no powers of two, padded slots, several query tokens,
empty sequences, one split and several, batches cut by their lengths. Allocations are not cached, so that a read past
the end of a cache is seen.
Kernels are checked one at a time, each tool in a process of its own. The results are checked as well, on the CPU:
racecheck breaks a matrix product of torch, whatever kernel it was asked to watch.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from ci.processes import end

KERNELS = ("_store_kernel", "_dequantize_kernel", "prepare_kernel", "decode_kernel", "reduce_kernel")
WIDE_KERNEL = "wide_kernel"
"""Decode of 16 and 32 columns, where the GPU is one that it is for."""
TOOLS = ("memcheck", "racecheck")
STOP_SECONDS: Final = 10


def cases(only: int | None = None) -> int:
    """Store, decode and dequantise every case; returns how many there are. only: the number of one of them."""
    from tests.decode_checks import LAYOUTS, PRESETS, Case, Config, compare, decode, set_up
    from tests.store_checks import check_dequantize
    from turboquant_rocm.target import detect

    target = detect()
    some = []
    for layout in LAYOUTS:
        for i, preset in enumerate(PRESETS):
            size = (64, 80, 128, 112)[i]
            config = Config(
                preset,
                layout,
                size,
                3,
                4,
                (16, 48)[i % 2],
                sinks=i % 2 == 0,
                most_queries=3,
                padding=2 * (i % 2),
            )
            case = (  # 64 and 128: decode does what prepare does for the others
                Case((3, 65, 200), (2, 0, 2), splits=1 + (layout == "aos")),
                Case((0, 1, 65, 200), splits=3, cut=True),
                Case((200, 1, 65, 0), splits=3, cut=True),
                Case((3, 65, 200, 0), (3,) * 4, splits=3, cut=True),
            )[i]
            some.append((config, case))
    wide = Config("4bit_nc", "soa", 128, 3, 4, 48, sinks=True, window=True, most_queries=8)
    some.append((wide, Case((0, 65, 200, 8), (8, 0, 8, 7), window=100, splits=1)))
    some.append((replace(wide, window=False), Case((8, 65, 200, 330), (8,) * 4, splits=3, cut=True)))
    for number, (config, case) in enumerate(some):
        if only is not None and only != number:
            continue
        setup = set_up(config, case, "cuda", target, tuning={"wide_work": 0})  # short as they are
        setup.bound.checks = "shapes"  # unused entries of the block table hold poison
        out, lse = decode(setup, case)
        on_host = {
            name: getattr(setup, name).cpu()
            for name in ("table", "lens", "query", "starts", "sinks")
            if getattr(setup, name) is not None
        }
        cache = replace(setup.cache, data=setup.cache.data.cpu())
        compare(replace(setup, cache=cache, **on_host), config, case, out.cpu(), lse.cpu())
        check_dequantize(config.preset, config.layout, config.head_size, "cuda")
    return len(some)


def run(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str, str]:
    """(exit status, stdout, stderr). If this process is interrupted or told to end, whatever the command has started
    ends too: a sanitizer left behind disturbs what is measured on the machine afterwards."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )  # fmt: skip
    try:
        out, err = process.communicate()
    except BaseException:
        end(process, STOP_SECONDS)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return process.returncode, out, err


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", choices=TOOLS, action="append", help="default: all")
    parser.add_argument("--kernel", choices=(*KERNELS, WIDE_KERNEL), action="append", help="default: all")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program")
    parser.add_argument("--run", action="store_true", help="run the cases here, without a sanitizer")
    parser.add_argument("--case", type=int, help="only this case")
    args = parser.parse_args()
    if args.run:
        from turboquant_rocm.target import detect

        print(f"{cases(args.case)} cases on {detect().arch}")
        return 0
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    program = [sys.executable, "-m", "ci.sanitize", "--run"] + (
        [f"--case={args.case}"] if args.case is not None else []
    )
    status, out, err = run(program, environment)  # compiles, so that the sanitizer does not watch compilers
    if status:
        print(out[-3000:], err[-1500:])
        return status
    kernels = args.kernel or [*KERNELS, *([WIDE_KERNEL] if "sm_90" in out else [])]
    if WIDE_KERNEL not in kernels:
        print(f"{WIDE_KERNEL}: not watched, this GPU is not an sm_90 or other kernels were asked for")
    wrong = 0
    for tool in args.tool or TOOLS:
        for kernel in kernels:
            watch = [args.sanitizer, "--tool", tool, "--error-exitcode", "9"]
            watch += ["--kernel-name", f"kernel_substring={kernel}"]
            status, out, err = run(watch + program, environment)
            lines = [line for line in out.splitlines() if "SUMMARY" in line]
            print(f"{tool} {kernel}: exit {status}; {' '.join(lines)}", flush=True)
            if status or not lines:
                wrong += 1
                print(out[-3000:], err[-1500:])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
