"""The kernels of TurboQuant_prod as gfx942 and gfx950 machine code, executed and compared with the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from .sim_helpers import ARCHS

from ci.cdna_sim import compile_triton, simulate_triton  # isort: skip
from ci.cdna_sim.launcher import simulated_launches
from tests.cases import gaussian, reference, rel_l2
from tests.prod_checks import PRESETS, check_decode, check_dequantize, check_store
from tests.prod_kernels import KERNELS, decision_for, signature
from turboquant_rocm.layouts.views import field_view
from turboquant_rocm.seeded import cache_sketch

HEADS, GROUP = 2, 4


def simulate(
    name: str, preset: str, d: int, arch: str, grid: tuple[int, ...], args: dict[str, Any], **types: str
) -> None:
    decision, layout = decision_for(preset, d, arch, HEADS, GROUP)
    kinds, constants = signature(name, decision, layout, **types)
    kernel, _, options = KERNELS[name]
    aligned = [n for n, kind in kinds.items() if kind.startswith("*")]
    compiled = compile_triton(kernel, kinds, constants, aligned, arch=arch, **options)
    simulate_triton(compiled, grid, args, budget=400_000_000)


def bits(x: torch.Tensor) -> np.ndarray:
    """A bf16 tensor as uint16 patterns."""
    return x.contiguous().view(torch.int16).numpy().view(np.uint16).copy()


@pytest.mark.parametrize(("preset", "d"), [("turboquant_prod_k3v2", 64), ("turboquant_prod_k4v4", 64)])
@pytest.mark.parametrize("arch", ARCHS)
def test_store_then_decode(arch: str, preset: str, d: int):
    """Bytes as the reference's; then decode over them against fp64 attention."""
    decision, layout = decision_for(preset, d, arch, HEADS, GROUP)
    bound = reference(decision.layer, preset, "soa", 16)
    oracle = reference(decision.layer, preset, "soa", 16, torch.float64)
    g = torch.Generator().manual_seed(0)
    tokens, blocks = 20, 2
    key, value = (gaussian((tokens, HEADS, d), g, torch.bfloat16) for _ in range(2))
    want = bound.allocate(blocks, "cpu", fill=0xCD)
    slots = torch.arange(tokens)
    bound.store(key, value, want, slots)
    cache = np.full(blocks * layout.block_stride, 0xCD, np.uint8)
    sketch, counts = cache_sketch(d).astype(np.float16), np.zeros(2, np.int32)
    simulate(
        "store", preset, d, arch, (-(-tokens * HEADS // 16), 2),
        {
            "key_ptr": bits(key), "value_ptr": bits(value), "cache_ptr": cache, "slot_ptr": slots.numpy(),
            "nonfinite_ptr": counts, "sketch_ptr": sketch, "rows": tokens * HEADS, "key_token_stride": HEADS * d,
            "key_head_stride": d, "value_token_stride": HEADS * d, "value_head_stride": d, "slot_stride": 1,
        },
    )  # fmt: skip
    got = torch.from_numpy(cache).as_strided(want.data.shape, want.data.stride())
    for name, _ in layout.places:
        a, b = field_view(got, layout, name), field_view(want.data, layout, name)
        assert int((a != b).sum()) <= (1 if name == "key_signs" else 0), name
    assert not counts.any()

    query = gaussian((1, HEADS * GROUP, d), g, torch.bfloat16, 2.0)
    rows = HEADS * GROUP
    prepared, norms = np.zeros((rows, 2 * d), np.float16), np.zeros(rows, np.float32)
    simulate(
        "prepare", preset, d, arch, (1,),
        {
            "query_ptr": bits(query), "matrix_ptr": sketch, "prepared_ptr": prepared, "scale_ptr": norms, "rows": rows,
            "token_stride": rows * d, "head_stride": d,
        },
    )  # fmt: skip
    part, part_lse = np.zeros((rows, 1, d), np.float32), np.zeros((rows, 1), np.float32)
    table, lens, loc = (
        np.arange(blocks, dtype=np.int32),
        np.array([tokens], np.int32),
        np.array([0, 1], np.int32),
    )
    simulate(
        "decode", preset, d, arch, (HEADS, 1, 1),
        {
            "prepared_ptr": prepared, "query_scale_ptr": norms, "cache_ptr": cache, "table_ptr": table,
            "seq_lens_ptr": lens, "query_start_ptr": loc, "part_ptr": part, "part_lse_ptr": part_lse,
            "table_stride": blocks, "splits": 1, "scale_log2": d**-0.5 * 1.4426950408889634,
        },
    )  # fmt: skip
    exact = torch.empty(1, rows, d, dtype=torch.float64)
    read = oracle.wrap(got)
    wanted, lse = oracle.decode(
        query, read, torch.from_numpy(table)[None], torch.from_numpy(lens), out=exact, return_lse=True
    )
    assert rel_l2(torch.from_numpy(part[:, 0]), wanted[0]) < 4e-3
    assert np.allclose(part_lse[:, 0] * np.log(2), lse[0].numpy(), atol=1e-2)


# What the interpreter and devices are asked, of the machine code: through the launchers, with every detector.


@pytest.mark.parametrize("head_size", [pytest.param(64, marks=pytest.mark.slow), 128])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("arch", ARCHS)
class TestMachineCode:
    def test_store(self, arch: str, preset: str, head_size: int):
        with simulated_launches(arch) as log:
            check_store(preset, head_size, "cpu", arch=arch)
        assert [launch.name for launch in log] == ["prod_store_kernel"]

    def test_dequantise(self, arch: str, preset: str, head_size: int):
        with simulated_launches(arch) as log:
            check_dequantize(preset, head_size, "cpu", arch=arch)
        assert [launch.name for launch in log] == ["prod_dequantize_kernel"]

    def test_decode_in_two_splits(self, arch: str, preset: str, head_size: int):
        with simulated_launches(arch) as log:
            check_decode(preset, head_size, "cpu", splits=2, arch=arch)
        assert len({launch.name for launch in log}) == len(log) == 3  # prepare, decode, reduce
