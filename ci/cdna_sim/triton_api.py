"""Triton: compile without a GPU, and run the result in the simulator."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .engine import Result, Simulator
from .errors import SimError
from .loader import Kernel

Array = npt.NDArray[Any]

_SCALARS = {
    "i1": "<b", "u1": "<B", "i8": "<b", "u8": "<B", "i16": "<h", "u16": "<H", "i32": "<i", "u32": "<I", "i64": "<q",
    "u64": "<Q", "fp32": "<f", "f32": "<f", "fp64": "<d", "fp16": "<e",
}  # fmt: skip


def compile_triton(
    fn: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any] | None = None,
    attrs: Mapping[Any, Any] | Iterable[str] | None = None, *, arch: str = "gfx942", num_warps: int = 4,
    num_stages: int = 1, **options: Any,
) -> Any:  # fmt: skip
    """Compile a @triton.jit function for gfx942 or gfx950.

    attrs: Triton's own form {(index,): [["tt.divisibility", 16]]}, or the names of the arguments that are divisible by
    16. Constants may be left out of the signature.
    """
    import warnings

    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    constexprs = dict(constexprs or {})
    sig = dict(signature)
    for name in fn.arg_names:
        if name in constexprs:
            sig[name] = "constexpr"
        elif name not in sig:
            raise SimError(f"argument {name!r} is in neither the signature nor the constants")
    sig = {name: sig[name] for name in fn.arg_names}
    if attrs is not None and not isinstance(attrs, Mapping):
        attrs = {(fn.arg_names.index(a),): [["tt.divisibility", 16]] for a in attrs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return triton_compile(
            ASTSource(fn, sig, constexprs, dict(attrs or {})),
            target=GPUTarget("hip", arch, 64),
            options={"num_warps": num_warps, "num_stages": num_stages, **options},
        )


def _runtime_args(compiled: Any) -> list[tuple[str, str]]:
    """Names and types of the arguments that reach the kernel, in order."""
    src = compiled.src
    consts = {k[0] for k in src.constants if isinstance(k, tuple) and len(k) == 1}
    out = []
    for i, (name, typ) in enumerate(src.signature.items()):
        if typ != "constexpr" and i not in consts:
            out.append((name, typ))
    return out


def pack_kernarg(kernel: Kernel, values: Sequence[tuple[str, Any]], grid: Sequence[int], block: int,
                 dynamic_lds: int = 0) -> bytes:  # fmt: skip
    """Kernel argument segment: explicit arguments in order, then the hidden ones that the metadata names."""
    out = bytearray(kernel.kernarg_size)
    explicit = [a for a in kernel.args if not a.kind.startswith("hidden_")]
    if len(values) > len(explicit):
        raise SimError(f"{len(values)} arguments for a kernel with {len(explicit)}")
    for i, a in enumerate(explicit):
        # Triton appends pointers for global and profile scratch; they are null when the kernel needs none.
        typ, v = values[i] if i < len(values) else ("*", 0)
        if typ.startswith("*"):
            raw = struct.pack("<Q", int(v))
        elif typ == "bf16":
            raw = struct.pack("<I", struct.unpack("<I", struct.pack("<f", float(v)))[0] >> 16)[:2]
        elif typ in _SCALARS:
            f = _SCALARS[typ]
            raw = struct.pack(f, float(v) if f[1] in "fde" else int(v))
        else:
            raise SimError(f"argument type {typ!r}")
        if len(raw) != a.size:
            raise SimError(f"argument {i} ({typ}) has {len(raw)} bytes, the kernel wants {a.size}")
        out[a.offset : a.offset + a.size] = raw
    g = (list(grid) + [1, 1])[:3]
    hidden = {
        "hidden_block_count_x": g[0], "hidden_block_count_y": g[1], "hidden_block_count_z": g[2],
        "hidden_group_size_x": block, "hidden_group_size_y": 1, "hidden_group_size_z": 1, "hidden_grid_dims": 3,
        "hidden_dynamic_lds_size": dynamic_lds,
    }  # fmt: skip
    for a in kernel.args:
        if a.kind in hidden:
            out[a.offset : a.offset + a.size] = int(hidden[a.kind]).to_bytes(a.size, "little")
    return bytes(out)


def as_numpy(x: Any) -> Array:
    """A NumPy array that shares the memory of an array or a CPU tensor (bf16 and fp8 tensors as integers)."""
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "untyped_storage"):
        import torch

        size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
        return x.detach().view(size).numpy()
    raise SimError(f"an argument of type {type(x).__name__} is neither an array nor a CPU tensor")


def simulate_triton(
    compiled: Any, grid: Sequence[int] | int, args: Mapping[str, Any] | Sequence[Any], *,
    check: str | Iterable[str] = "all",
    undefined: Iterable[str] = (), budget: int = 50_000_000, max_waves: int = 128, hsaco: bytes | None = None,
) -> Result:  # fmt: skip
    """Run a compiled Triton kernel; arrays are registered as buffers and changed in place.

    args: by name, or in the order of the signature without the constants. undefined: names of arrays whose contents
    count as never written (`Result.unwritten` then counts the bytes that stayed so). hsaco: other code for the same
    kernel (mutants).
    """
    grid = (grid,) if isinstance(grid, int) else tuple(grid)
    wanted = _runtime_args(compiled)
    if isinstance(args, Mapping):
        extra = set(args) - {n for n, _ in wanted} - set(compiled.src.signature)
        missing = [n for n, _ in wanted if n not in args]
        if extra or missing:
            raise SimError(f"arguments: missing {missing}, unknown {sorted(extra)}")
        given = [args[n] for n, _ in wanted]
    else:
        given = list(args)
        if len(given) != len(wanted):
            raise SimError(f"{len(given)} arguments for {[n for n, _ in wanted]}")
    sim = Simulator(hsaco if hsaco is not None else compiled.asm["hsaco"], check, budget, max_waves)
    meta = compiled.metadata
    kernel = sim.code.kernel(meta.name)
    arrays: list[tuple[str, Array]] = []
    slots: list[tuple[str, Any, int]] = []
    for (name, typ), v in zip(wanted, given, strict=True):
        if typ.startswith("*"):
            if v is None:
                slots.append((typ, 0, -1))
                continue
            slots.append((typ, None, len(arrays)))
            arrays.append((name, as_numpy(v)))
        else:
            slots.append((typ, v, -1))
    lds = int(meta.shared)
    block = meta.num_warps * 64
    blocks = grid[0] * (grid[1] if len(grid) > 1 else 1) * (grid[2] if len(grid) > 2 else 1)
    for kind in ("global", "profile"):
        size = getattr(meta, f"{kind}_scratch_size", 0) or 0
        if size:
            slots.append(("*", None, len(arrays)))
            arrays.append((f"{kind} scratch", np.zeros(size * blocks, np.uint8)))
        else:
            slots.append(("*", 0, -1))

    def kernarg(vas: dict[int, int]) -> bytes:
        values = [(t, vas[i] if i >= 0 else v) for t, v, i in slots]
        n = len([a for a in kernel.args if not a.kind.startswith("hidden_")])
        return pack_kernarg(kernel, values[:n], grid, block, lds)

    return sim.launch(grid, (block,), kernarg, arrays, name=meta.name, dynamic_lds=lds, undefined=undefined)
