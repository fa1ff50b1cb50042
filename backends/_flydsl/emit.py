"""The vocabulary of the kernels: what FlyDSL's expression types do not spell, as small functions.

Called while a kernel is traced, they run as plain Python: loops in here unroll.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm
from flydsl._mlir.dialects import rocdl as ops
from flydsl.expr import rocdl
from flydsl.expr.typing import T

I32, F32, F16 = fx.Int32, fx.Float32, fx.Float16


def vec(items: Sequence[Any], dtype: Any) -> fx.Vector:
    """A register vector of scalars."""
    return fx.Vector.from_elements(list(items), dtype)


def i32(word: int) -> fx.Int32:
    """A 32-bit pattern given as an unsigned number."""
    return I32(word - (1 << 32) if word >= 1 << 31 else word)


def shr(x: fx.Int32, n: int) -> fx.Int32:
    """Logical shift right."""
    return I32(fx.arith.shrui(x, I32(n)))


def perm(high: fx.Int32, low: fx.Int32, selector: fx.Int32) -> fx.Int32:
    """v_perm_b32: four bytes chosen from {high, low} by the bytes of ``selector``."""
    return I32(rocdl.perm_b32(high, low, selector))


def exp2(x: fx.Float32) -> fx.Float32:
    """v_exp_f32, one instruction; results below the normal range flush to zero."""
    return F32(ops.exp2(T.f32, x.ir_value()))


def log2(x: fx.Float32) -> fx.Float32:
    """v_log_f32."""
    return F32(ops.log(T.f32, x.ir_value()))


def rcp(x: fx.Float32) -> fx.Float32:
    """v_rcp_f32, 1 ulp."""
    return F32(rocdl.rcp(T.f32, x))


def fma(a: Any, b: Any, c: Any) -> fx.Float32:
    """a * b + c, rounded once; with fp16 operands widened in the call it becomes v_fma_mix_f32."""
    return F32(fx.math.fma(F32(a), F32(b), F32(c)))


def hidden_zero() -> fx.Float32:
    """0.0 in a scalar register, of which the compiler knows nothing."""
    return F32(llvm.inline_asm(T.f32, [], "s_mov_b32 $0, 0", "=s", has_side_effects=False))


def hidden(x: fx.Int32) -> fx.Int32:
    """``x``, of which the compiler knows nothing: sums with constants stay where they fit into an instruction."""
    return I32(llvm.inline_asm(T.i32, [I32(x).ir_value()], "", "=v,0", has_side_effects=False))


def pinned(x: fx.Float32) -> fx.Float32:
    """``x``, computed here and not later."""
    return F32(llvm.inline_asm(T.f32, [x.ir_value()], "", "=v,0", has_side_effects=True))


def uniform(x: fx.Int32) -> fx.Int32:
    """The first lane's value, as a scalar register."""
    return I32(rocdl.readfirstlane(T.i32, x))


def any_lane(condition: Any) -> Any:
    """True in every lane if ``condition`` holds in one of them: a uniform branch condition."""
    return fx.Int64(rocdl.ballot(T.i64, condition)) != fx.Int64(0)


def select(condition: Any, a: Any, b: Any) -> Any:
    """Lane-wise choice between two scalars of one type."""
    return condition.select(a, b)


def xor_lanes(x: Any, distance: int) -> Any:
    """The value of lane ^ distance."""
    return fx.gpu.shuffle_xor(x, distance, 64)


def fence() -> None:
    """Keep the scheduler from moving anything across."""
    rocdl.sched_barrier(0)


def mfma_i8(arch: str, a: Sequence[fx.Int32], b: Sequence[fx.Int32], c: fx.Vector) -> fx.Vector:
    """c + A B over 64 values of k: int8 operands, four words each; two instructions on gfx942."""
    none = rocdl._blgp_attr(0)
    if arch == "gfx950":
        return fx.Vector(
            ops.mfma_i32_16x16x64_i8_(T.i32x4, vec(a, I32), vec(b, I32), c, 0, 0, none), (4,), I32
        )
    for k in (0, 2):
        words = [vec(x[k : k + 2], I32).bitcast(fx.Int64)[0].ir_value() for x in (a, b)]
        c = fx.Vector(ops.mfma_i32_16x16x32_i8_(T.i32x4, *words, c, 0, 0, none), (4,), I32)
    return c


def mfma_f16(arch: str, a: Sequence[fx.Int32], b: Sequence[fx.Int32], c: fx.Vector) -> fx.Vector:
    """c + A B over 32 values of k: fp16 operands, four words each; two instructions on gfx942."""
    none = rocdl._blgp_attr(0)
    if arch == "gfx950":
        x, y = (vec(words, I32).bitcast(F16) for words in (a, b))
        return fx.Vector(ops.mfma_f32_16x16x32_f16_(T.f32x4, x, y, c, 0, 0, none), (4,), F32)
    for k in (0, 2):
        x, y = (vec(words[k : k + 2], I32).bitcast(F16) for words in (a, b))
        c = fx.Vector(ops.mfma_f32_16x16x16f16_(T.f32x4, x, y, c, 0, 0, none), (4,), F32)
    return c


# ---- memory -------------------------------------------------------------------------------------------------

RSRC_WORD3 = (7 << 12) | (4 << 15)  # raw buffer of dwords


def address(pointer: fx.Pointer) -> fx.Int64:
    """A pointer argument as a number."""
    return fx.Int64(llvm.ptrtoint(T.i64, pointer.llvm_ptr))


def descriptor(address: fx.Int64, nbytes: Any) -> fx.Vector:
    """A bounded buffer descriptor [4 words] over ``nbytes`` bytes at a 48-bit ``address``."""
    low, high = fx.Vector.from_elements([address], fx.Int64).bitcast(I32)
    return vec([low, high, I32(nbytes), I32(RSRC_WORD3)], I32)


_LOADS = {1: "i32", 2: "v2i32", 3: "v3i32", 4: "v4i32"}


def load(rsrc: fx.Vector, offset: fx.Int32, words: int, soffset: Any = 0) -> fx.Vector:
    """``words`` 32-bit words per lane at byte ``offset`` + uniform ``soffset``; zeros out of bounds."""
    result = T.i32 if words == 1 else T.vec(words, T.i32)
    value = llvm.call_intrinsic(
        result,
        f"llvm.amdgcn.raw.buffer.load.{_LOADS[words]}",
        [rsrc, offset.ir_value(), I32(soffset).ir_value(), I32(0).ir_value()],
        [],
        [],
    )
    return vec([I32(value)], I32) if words == 1 else fx.Vector(value, (words,), I32)


def store(rsrc: fx.Vector, offset: fx.Int32, value: fx.Vector, soffset: Any = 0) -> None:
    """Store 1, 2 or 4 words per lane at byte ``offset``; dropped out of bounds."""
    words = value.bitcast(I32)
    n = words.numel
    data = words[0].ir_value() if n == 1 else words
    llvm.call_intrinsic(
        None,
        f"llvm.amdgcn.raw.buffer.store.{_LOADS[n]}",
        [data, rsrc, offset.ir_value(), I32(soffset).ir_value(), I32(0).ir_value()],
        [],
        [],
    )


def store_bits(rsrc: fx.Vector, offset: fx.Int32, value: fx.Int32, bits: int) -> None:
    """Store the low 8 or 16 bits per lane at byte ``offset``."""
    ty = ir.IntegerType.get_signless(bits)
    data = llvm.trunc(ty, value.ir_value(), llvm.IntegerOverflowFlags.none)
    llvm.call_intrinsic(
        None,
        f"llvm.amdgcn.raw.buffer.store.i{bits}",
        [data, rsrc, offset.ir_value(), I32(0).ir_value(), I32(0).ir_value()],
        [],
        [],
    )


def scalar_load(rsrc: fx.Vector, offset: fx.Int32) -> fx.Int32:
    """One word at a uniform byte ``offset``, by scalar memory; zero out of bounds."""
    return I32(
        llvm.call_intrinsic(
            T.i32,
            "llvm.amdgcn.s.buffer.load.i32",
            [rsrc, offset.ir_value(), I32(0).ir_value()],
            [],
            [],
        )
    )
