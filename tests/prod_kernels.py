"""The Triton kernels of TurboQuant_prod with the types of their arguments, for compiling them without a GPU."""

from __future__ import annotations

from typing import Any

from tests.cases import layer_spec
from turboquant_rocm import Decision, Layout, get_preset, make_layout
from turboquant_rocm.backends._triton import prod
from turboquant_rocm.target import get_target

PRESETS = ("turboquant_prod_k3v2", "turboquant_prod_k3v4", "turboquant_prod_k4v4")
KERNELS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "store": (prod.prod_store_kernel, {"COUNT": True}, dict(prod.EXACT_OPTIONS)),
    "dequantise": (prod.prod_dequantize_kernel, {}, dict(prod.EXACT_OPTIONS)),
    "prepare": (prod.prod_prepare_kernel, {}, dict(prod.EXACT_OPTIONS)),
    "decode": (prod.prod_decode_kernel, {"MULTI": True}, dict(prod.DECODE_OPTIONS)),
    "reduce": (prod.prod_reduce_kernel, {"MULTI": True, "WRITE_LSE": True}, dict(prod.REDUCE_OPTIONS)),
}
"""kernel, constexprs of its own, options: as prod.ProdOps launches them."""
_POINTERS = {
    "key_ptr": "*bf16", "value_ptr": "*bf16", "cache_ptr": "*u8", "slot_ptr": "*i64", "nonfinite_ptr": "*i32",
    "sketch_ptr": "*fp16", "table_ptr": "*i32", "start_ptr": "*i32", "cu_ptr": "*i32", "query_ptr": "*bf16",
    "prepared_ptr": "*fp16", "scale_ptr": "*fp32", "query_scale_ptr": "*fp32", "matrix_ptr": "*fp16",
    "seq_lens_ptr": "*i32", "query_start_ptr": "*i32", "part_ptr": "*fp32", "part_lse_ptr": "*fp32",
    "out_ptr": "*bf16", "lse_ptr": "*fp32",
}  # fmt: skip


def decision_for(
    preset: str, head_size: int, arch: str, heads: int = 8, group: int = 4
) -> tuple[Decision, Layout]:
    """A layer of ``heads`` KV heads and block size 16."""
    layer = layer_spec(head_size, heads, group)
    decision = Decision(layer, get_target(arch), get_preset(preset), 16, "triton_prod", "soa")
    return decision, make_layout("soa", preset, head_size, heads, 16)


def signature(
    name: str, decision: Decision, layout: Layout, **types: str
) -> tuple[dict[str, str], dict[str, Any]]:
    """(types of the arguments that are no constexprs, constexprs) of a kernel of :data:`KERNELS`."""
    kernel, own, _ = KERNELS[name]
    constants = prod.kernel_constants(kernel, decision, layout, **own)
    kinds = {
        n: types.get(n, _POINTERS.get(n, "fp32" if n == "scale_log2" else "i32"))
        for n in kernel.arg_names
        if n not in constants
    }
    return kinds, constants
