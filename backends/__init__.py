"""Backends: one declaration file each, discovered by listing this folder.

A declaration says what a backend needs (:mod:`turboquant_rocm.eligibility`), which layout it reads, its priority
and where its operations live; it imports no kernel. To add a backend, add one file that calls
:func:`register`, and the kernels it names.
"""

from __future__ import annotations

if __name__ != "turboquant_rocm.backends":
    raise ImportError(
        f"imported as {__name__!r}: import it as 'turboquant_rocm.backends'. The folder at the repository root is "
        "mapped into the package, and importing it by its bare name would register every backend twice."
    )

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from ..eligibility import Code, Refusal, Request, Requirement, refusals
from ..spec import LayerSpec, SpecError

if TYPE_CHECKING:
    import torch

    from ..dispatch import Decision
    from ..layouts import Layout

__all__ = ["Backend", "CompileError", "LayerOps", "backends", "get_backend", "register"]


class CompileError(RuntimeError):
    """Kernels could not be compiled, or the compiler ended its process. The text is the end of what it printed."""

    @property
    def reason(self) -> str:
        """One line: the first line, which says what failed, and the last that names an error."""
        lines = [line.strip() for line in str(self).splitlines() if line.strip()]
        told = [line for line in lines[1:] if "error" in line.lower()] or lines[1:]
        return ": ".join([*lines[:1], *told[-1:]])[:_REASON]


_REASON = 400  # characters of a line of a log


class LayerOps(Protocol):
    """What a backend provides for one layer. Built once at bind time; arguments are already checked.

    The letters of the shapes are fixed in docs/design.md. ``cache`` is the raw uint8 tensor
    [nb, bs, Hk, slot_stride] with the strides of ``layout``. Nothing here may synchronise with the host.

    A class whose kernels compile also has ``warmup``, with the signature of BoundLayer.warmup, which calls it. One
    whose compiler is not trusted has ``compile()``, which bind calls on the machine's own target: everything that
    calls with the layer's own dtype need, or CompileError.
    """

    def __init__(self, decision: Decision, layout: Layout, **options: Any) -> None: ...

    def store(
        self,
        key: torch.Tensor,  # [T, Hk, D] fp16/bf16
        value: torch.Tensor,  # [T, Hk, Dv] same dtype
        cache: torch.Tensor,  # [nb, bs, Hk, slot_stride] uint8
        slot_mapping: torch.Tensor,  # [T] int32/int64, block * bs + offset; < 0 is padding
        nonfinite: torch.Tensor | None,  # [2] int32: key and value vectors with NaN/inf are added here
    ) -> None: ...

    def decode(
        self,
        query: torch.Tensor,  # [N, Hq, D] fp16/bf16
        cache: torch.Tensor,  # [nb, bs, Hk, slot_stride] uint8
        block_table: torch.Tensor,  # [B, M] int32
        seq_lens: torch.Tensor,  # [B] int32
        query_start_loc: torch.Tensor | None,  # [B + 1] int32; None: N == B, one token each
        max_query_len: int,
        scale: float,
        sinks: torch.Tensor | None,  # [Hq] fp32
        out: torch.Tensor,  # [N, Hq, Dv] written, dtype of query
        lse: torch.Tensor | None,  # [N, Hq] fp32, written
        workspace: Any,
    ) -> None: ...

    def dequantize(
        self,
        cache: torch.Tensor,  # [nb, bs, Hk, slot_stride] uint8
        block_table: torch.Tensor,  # [B, M] int32
        seq_lens: torch.Tensor,  # [B] int32
        starts: torch.Tensor,  # [B] int32, first token of each sequence to read
        cu_lens: torch.Tensor,  # [B + 1] int32, offsets of each sequence's rows in the outputs
        key_out: torch.Tensor,  # [sum, Hk, D] fp16/bf16/fp32, written
        value_out: torch.Tensor,  # [sum, Hk, Dv] written
    ) -> None: ...


def _padded(width: int) -> int:
    """Elements of a row of ``width`` in the workspace, at most."""
    return max(128, 1 << (width - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Backend:
    """Declaration of one backend.

    name: unique. priority: higher is preferred. layout: name of the layout it reads, "soa" or "aos" ("any":
    whatever is asked for). requires: the whole of its eligibility. ops: "module:class" of its
    :class:`LayerOps`, module relative to ``turboquant_rocm.backends``. automatic: False for backends that only
    an explicit request may choose. ready: False while the kernels are not in this version; such a backend is
    never chosen, and reports show where it would be (docs/adr/0003-planned-backends.md). max_splits: most partial
    results per query row and head that decode keeps in its workspace (0: it needs none). min_splits: those that it
    keeps of every row even where programs fill the device without (0: none), because it cuts batches by their lengths
    and says in the workspace how. max_columns: most (query token, head) pairs of a KV head that one program serves;
    where fewer than 16 programs share a compute unit, each may serve as many times more.
    rel_tol: largest relative L2 error of decode against the
    fp64 oracle over the dequantised cache that is accepted, per query dtype.
    """

    name: str
    priority: int
    layout: str
    requires: tuple[Requirement, ...]
    ops: str
    automatic: bool = True
    ready: bool = True
    max_splits: int = 0
    min_splits: int = 0
    max_columns: int = 16
    rel_tol: tuple[tuple[str, float], ...] = (("bf16", 1e-2), ("fp16", 2e-3))
    description: str = ""

    def refusals(self, request: Request) -> tuple[Refusal, ...]:
        """Every reason why this backend cannot serve ``request``; empty if it can."""
        return refusals(self.requires, request)

    def built_for(self, request: Request, *codes: Code) -> bool:
        """True if no requirement with one of ``codes`` stands in the way, whatever the others say."""
        return all(r.check(request) is None for r in self.requires if r.code in codes)

    def workspace_bytes(self, layer: LayerSpec, rows: int, compute_units: int | None) -> int:
        """Upper bound of the scratch bytes that decode takes for up to ``rows`` query rows of one call.

        Kept per row and query head: the prepared query with its scale, and for each split a partial result (an fp32
        output row and its softmax term, or twice as many with half the bytes). Rows are padded to powers of two of at
        least 128. Kernels split sequences until at most 16 programs per compute unit are busy, and never into more than
        ``max_splits`` parts; a program serves up to ``max_columns`` (query token, head) pairs of one KV head.
        """
        if not self.max_splits:
            return 0
        programs = 16 * (compute_units or 256)
        tokens = max(1, self.max_columns // layer.gqa_ratio)  # that one program serves
        worst = 0
        for tiles in {-(-rows // tokens), *(min(1 << k, rows) for k in range(rows.bit_length() + 1))}:
            splits = min(self.max_splits, -(-programs // (tiles * layer.num_kv_heads)))
            splits = max(self.min_splits, splits)
            worst = max(worst, min(tiles * tokens, rows) * splits)
        query = 2 * (_padded(layer.head_size) + 4) + 4
        partial = 4 * (_padded(layer.value_size) + 1)
        aligned = 5 * 256  # that many arrays, each at a multiple of 256
        # of batches that are cut, int32: four for each piece, two for each sequence
        schedule = 16 * worst + 8 * rows if self.min_splits else 0
        return layer.num_heads * (rows * query + worst * partial) + schedule + aligned

    def tolerance(self, dtype: str) -> float:
        """``rel_tol`` of a query dtype."""
        return dict(self.rel_tol)[str(dtype)]

    def load_ops(self) -> type[LayerOps]:
        """Import the kernels: the only place where a backend touches torch, triton or flydsl."""
        if not self.ready:
            raise SpecError("backend", self.name, "one whose kernels are in this version")
        module, _, attribute = self.ops.partition(":")
        loaded: type[LayerOps] = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
        return loaded


_REGISTRY: dict[str, Backend] = {}


def register(backend: Backend) -> Backend:
    """Add a declaration to the registry; a name can be taken once."""
    other = _REGISTRY.get(backend.name)
    if other is not None and other != backend:
        raise SpecError("backend name", backend.name, "a name that is not taken")
    _REGISTRY[backend.name] = backend
    return backend


@cache
def _discover() -> None:
    for info in pkgutil.iter_modules(__path__):
        if not info.name.startswith("_"):
            importlib.import_module(f"{__name__}.{info.name}")


def backends() -> tuple[Backend, ...]:
    """All registered backends, highest priority first."""
    _discover()
    return tuple(sorted(_REGISTRY.values(), key=lambda b: (-b.priority, b.name)))


def get_backend(name: str) -> Backend:
    """The backend called ``name``; SpecError lists the names there are."""
    _discover()
    try:
        return _REGISTRY[name]
    except (KeyError, TypeError):  # not known, or not even a name
        raise SpecError("backend", name, "one of " + ", ".join(b.name for b in backends())) from None
