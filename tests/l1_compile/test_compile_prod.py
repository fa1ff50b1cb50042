"""The kernels of TurboQuant_prod compiled for AMD and NVIDIA: no spills, no scratch, LDS under the limit."""

from __future__ import annotations

import re

import pytest

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from triton.compiler import ASTSource  # noqa: E402

from tests.compile_checks import gpu_target, read_amd, read_nvidia  # noqa: E402
from tests.prod_kernels import KERNELS, PRESETS, decision_for, signature  # noqa: E402
from turboquant_rocm.target import get_target  # noqa: E402

CASES = [(kernel, "turboquant_prod_k3v2", 128) for kernel in KERNELS]
CASES += [(kernel, "turboquant_prod_k4v4", 64) for kernel in ("store", "decode")]
CASES += [("decode", "turboquant_prod_k4v4", 128)]
REST = [(kernel, preset, d) for kernel in KERNELS for preset in PRESETS for d in (64, 128)]


def check(arch: str, kernel: str, preset: str, head_size: int, record) -> None:
    decision, layout = decision_for(preset, head_size, arch)
    types, constants = signature(kernel, decision, layout)
    function, _, options = KERNELS[kernel]
    names = function.arg_names
    kinds = {n: "constexpr" if n in constants else types[n] for n in names}
    values = {(names.index(n),): v for n, v in constants.items()}
    aligned = {
        (names.index(n),): [["tt.divisibility", 16]] for n, kind in types.items() if kind.startswith("*")
    }
    compiled = triton.compile(
        ASTSource(function, kinds, values, aligned), target=gpu_target(arch), options=options
    )
    amd = arch.startswith("gfx")
    built = read_amd(compiled) if amd else read_nvidia(compiled)
    record(arch, f"prod-{kernel}-{preset}-D{head_size}", **built.numbers)
    assert built.spills == built.scratch == 0, built
    assert built.lds <= get_target(arch).lds_bytes, built
    if kernel in ("decode", "dequantise"):
        assert built.matrix, "codes and signs are operands of matrix instructions"
    if kernel == "decode":
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
