"""Run ordinary Triton launches, `kernel[grid](...)` on CPU tensors, on the simulated GPU.

    with simulated_launches("gfx950") as log:
        launcher(query, cache, ...)      # any code that launches @triton.jit functions
    log[0].counters

Inside the block every launch is specialised and compiled as the HIP backend would on that GPU, and executed by the
simulator instead of a driver: launchers, argument checks, constants and grids are under test together with the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .counters import Counters
from .engine import Result
from .triton_api import simulate_triton


@dataclass
class Launch:
    """One launch that was simulated."""

    name: str
    grid: tuple[int, ...]
    compiled: Any
    result: Result

    @property
    def counters(self) -> Counters:
        return self.result.counters


Mutate = Callable[[str, Any], bytes | None]
_COMPILED: dict[Any, Any] = {}


@contextmanager
def simulated_launches(
    arch: str, *, check: str | Iterable[str] = "all", undefined: Callable[[str, str], bool] | None = None,
    mutate: Mutate | None = None, budget: int = 50_000_000, **options: Any,
) -> Iterator[list[Launch]]:  # fmt: skip
    """Route Triton launches to the simulator; yields the list of launches.

    undefined(kernel, argument): whether the argument's contents count as never written. mutate(kernel name, compiled)
    may return another code object to run. options: compile options that override those of the launch.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime import jit

    target = GPUTarget("hip", arch, 64)
    log: list[Launch] = []
    original = jit.JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kwargs.update(options)
        kwargs["debug"] = kwargs.get("debug", self.debug) or False
        backend = make_backend(target)
        binder = jit.create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, opts = binder(*args, **kwargs)
        opts, signature, constexprs, attrs = self._pack_args(backend, kwargs, bound, specialization, opts)
        src = ASTSource(self, signature, constexprs, attrs)
        key = (id(self), arch, str(signature), str(constexprs), str(attrs), str(opts))
        compiled = _COMPILED.get(key)
        if compiled is None:
            compiled = _COMPILED[key] = triton.compile(src, target=target, options=opts.__dict__)
        if warmup:
            return compiled
        where = grid(bound) if callable(grid) else grid
        where = (where,) if isinstance(where, int) else tuple(where)
        values = {n: bound[n] for n, t in signature.items() if t != "constexpr"}
        never = [n for n in values if undefined is not None and undefined(self.__name__, n)]
        hsaco = mutate(self.__name__, compiled) if mutate is not None else None
        result = simulate_triton(
            compiled, where, values, check=check, undefined=never, budget=budget, hsaco=hsaco
        )
        log.append(Launch(self.__name__, where, compiled, result))
        return None  # as in the interpreter: there is nothing that a driver could launch

    jit.JITFunction.run = run
    try:
        yield log
    finally:
        jit.JITFunction.run = original
