"""A process of its own: FlyDSL's host launchers over the HIP stub, and their launches run in the simulator.

    python -m tests.l1_simulate.flydsl_launch ARCH FOLDER

Prints one line of JSON: the error against the oracle, launches per call, and the host time of a call in microseconds.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

from ci.hip_stub import StubLaunch, load


def main(arch: str, folder: Path) -> dict[str, Any]:
    """Decode once for the result and often for the time."""
    stub = load(folder)
    from turboquant_rocm.backends._flydsl import offline

    os.environ.update(
        FLYDSL_GPU_ARCH=arch, FLYDSL_RUNTIME_ENABLE_CACHE="0", ROCM_PATH=offline.toolchain(folder / "rocm")
    )
    import torch

    from ci.cdna_sim import Simulator, load_code_object
    from tests.l1_simulate.flydsl_helpers import SimulatedRuntime, make_case, relative_error
    from turboquant_rocm.backends._flydsl.ops import FlydslOps
    from turboquant_rocm.backends._flydsl.runtime import DeviceRuntime
    from turboquant_rocm.backends._triton.workspace import Workspace
    from turboquant_rocm.dispatch import Decision
    from turboquant_rocm.spec import Target

    class StubRuntime(DeviceRuntime):
        ahead = False

        def stream(self, device: torch.device) -> int:
            return 77

        def compute_units(self, device: torch.device) -> int:
            return 1

    memory = SimulatedRuntime(arch)
    streams = set()

    def run(launch: StubLaunch) -> None:
        streams.add(launch.stream)
        code = launch.code_object()
        kernel = load_code_object(code).kernel(launch.name)
        values = [launch.argument(i, a.size) for i, a in enumerate(kernel.args)]
        arrays = memory.arrays()

        def packed(at: dict[int, int]) -> bytes:
            out = bytearray(kernel.kernarg_size)
            for spec, value in zip(kernel.args, values, strict=True):
                if spec.size == 8:  # every 8-byte argument is an address
                    value = struct.pack("<Q", memory.translate(struct.unpack("<Q", value)[0], arrays, at))
                out[spec.offset : spec.offset + spec.size] = value
            return bytes(out)

        Simulator(code).launch(launch.grid, launch.block, packed, arrays, name=launch.name)

    case = make_case([0, 1, 70], hk=2, gqa=2)
    want, _ = case.expected()
    decision = Decision(case.layer, Target("amd", arch), case.layout.preset, 16, "flydsl", "soa")
    out, lse = torch.zeros_like(case.query), torch.zeros(case.query.shape[:2])
    workspace = Workspace("cpu", 1 << 20)
    memory.memory = {
        "query": case.query, "cache": case.cache, "table": case.table, "lens": case.lens, "out": out, "lse": lse,
        "workspace": workspace._buffers[-1],
    }  # fmt: skip
    routes = {}
    for route, splits in (("reduced", 2), ("direct", 1)):
        ops = FlydslOps(decision, case.layout, splits=splits, runtime=StubRuntime())

        def decode(ops: FlydslOps = ops) -> None:
            ops.decode(
                case.query, case.cache, case.table, case.lens, None, 1, case.layer.softmax_scale, None, out, lse,
                workspace,
            )  # fmt: skip

        out.fill_(float("nan"))
        before = stub.launches
        stub.on_launch(run)
        decode()
        launches = stub.launches - before
        stub.on_launch(None)
        times = []
        for _ in range(1000):
            start = time.perf_counter()
            decode()
            times.append(time.perf_counter() - start)
        routes[route] = {
            "error": relative_error(out, want),
            "launches": launches,
            "microseconds": sorted(times)[len(times) // 4] * 1e6,
        }
    return {"routes": routes, "streams": sorted(streams)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
