"""The decode for rotated values compiled for AMD and NVIDIA: no spills, no scratch, LDS under the limit."""

from __future__ import annotations

import re
from typing import Any

import pytest

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from triton.compiler import ASTSource  # noqa: E402

from tests.cases import layer_spec  # noqa: E402
from tests.compile_checks import gpu_target, read_amd, read_nvidia  # noqa: E402
from turboquant_rocm import Decision, get_preset, make_layout  # noqa: E402
from turboquant_rocm.backends._triton import rotated  # noqa: E402
from turboquant_rocm.target import get_target  # noqa: E402

KERNELS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "decode": (rotated.rotated_decode_kernel, {"MULTI": True}, rotated.DECODE_OPTIONS),
    "reduce": (rotated.rotated_reduce_kernel, {"MULTI": True, "WRITE_LSE": True}, rotated.REDUCE_OPTIONS),
}
POINTERS = {
    "query_ptr": "*bf16", "cache_ptr": "*u8", "table_ptr": "*i32", "seq_lens_ptr": "*i32", "query_start_ptr": "*i32",
    "part_ptr": "*fp32", "part_lse_ptr": "*fp32", "sinks_ptr": "*fp32", "out_ptr": "*bf16", "lse_ptr": "*fp32",
    "scale_log2": "fp32", "soft_cap": "fp32",
}  # fmt: skip
CASES = [("decode", preset, 128) for preset in ("k8v4", "4bit_nc", "3bit_nc")]
CASES += [("reduce", "4bit_nc", 128), ("decode", "4bit_nc", 64), ("decode", "4bit_nc", 256)]
REST = [
    (kernel, preset, size)
    for kernel in KERNELS
    for preset in ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")
    for size in (64, 128, 256)
]


def check(arch: str, kernel: str, preset: str, head_size: int, record) -> None:
    name = f"{preset}+rotated_values"
    layer = layer_spec(head_size, 8, 4, window=100, sinks=True)
    decision = Decision(layer, get_target(arch), get_preset(name), 16, "triton_rotated", "soa")
    layout = make_layout("soa", name, head_size, 8, 16)
    function, own, options = KERNELS[kernel]
    if kernel == "decode":
        options = rotated.decode_options(decision, make_layout("soa", name, head_size, 8, 16))
    values = rotated.kernel_constants(function, decision, layout, **own)
    names = function.arg_names
    kinds = {n: "constexpr" if n in values else POINTERS.get(n, "i32") for n in names}
    aligned = {
        (names.index(n),): [["tt.divisibility", 16]]
        for n, kind in kinds.items()
        if n in ("cache_ptr", "part_ptr", "part_lse_ptr")
    }
    places = {(names.index(n),): v for n, v in values.items()}
    compiled = triton.compile(
        ASTSource(function, kinds, places, aligned), target=gpu_target(arch), options=options
    )
    built = read_amd(compiled) if arch.startswith("gfx") else read_nvidia(compiled)
    record(arch, f"rotated-{kernel}-{preset}-D{head_size}", **built.numbers)
    assert built.spills == built.scratch == 0, built
    assert built.lds <= get_target(arch).lds_bytes, built
    if kernel == "decode":
        assert built.matrix, "centroids of keys and of values are operands of matrix instructions"
        assert any(re.search("dword|32|64|128", n) for n in built.loads), built.loads


@pytest.mark.parametrize(("kernel", "preset", "head_size"), CASES)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90"])
def test_compiles_clean(arch: str, kernel: str, preset: str, head_size: int, record_kernel):
    check(arch, kernel, preset, head_size, record_kernel)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "preset", "head_size"), REST)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_80", "sm_90"])
def test_compiles_clean_all(arch: str, kernel: str, preset: str, head_size: int, record_kernel):
    check(arch, kernel, preset, head_size, record_kernel)
