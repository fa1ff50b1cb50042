"""From a decision to something that runs: ``bind(decision)`` gives a :class:`BoundLayer` for one layer.

    decision = decide(layer, target, "turboquant_4bit_nc", block_size=16)
    bound = bind(decision)
    cache = bound.allocate(num_blocks=1024, device="cuda")
    bound.store(key, value, cache, slot_mapping)
    out = bound.decode(query, cache, block_table, seq_lens)

Everything that can be decided is decided here, once: the layout and its integers, the kernels, the scale, which
checks are made. Letters of the shapes: docs/design.md.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, ParamSpec, TypeVar, get_args

import torch

from .backends import CompileError, LayerOps, get_backend
from .dispatch import Decision, fall_back
from .eligibility import Code, Refusal, Request, refusals
from .layouts import CacheTag, Layout, make_layout
from .layouts.views import allocate, check_cache, checked_device
from .spec import SpecError, checked_int, is_number

__all__ = ["BoundLayer", "Checks", "Dequantized", "PagedCache", "bind"]

logger = logging.getLogger(__name__)

Checks = Literal["full", "shapes", "off"]
"""``full``: shapes, dtypes, tags and the values of index tensors, which reads them on the host. ``shapes``: all
that needs no host synchronisation. ``off``: nothing, for a caller that has checked."""

_P = ParamSpec("_P")
_R = TypeVar("_R")
_RAW_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
_INDEX_DTYPES: Final = (torch.int32, torch.int64)
_MAX_QUERY_LEN: Final = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class PagedCache:
    """Cache bytes together with the tag that says what they mean.

    data: [nb, bs, Hk, slot_stride] uint8 with the byte strides of the layout.
    """

    data: torch.Tensor
    tag: CacheTag

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache."""
        return int(self.data.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes the cache occupies, padding included."""
        return self.num_blocks * self.tag.block_stride


class Dequantized(NamedTuple):
    """key [sum, Hk, D], value [sum, Hk, Dv] and cu_lens [B + 1] int32: rows of sequence i are cu_lens[i:i+2]."""

    key: torch.Tensor
    value: torch.Tensor
    cu_lens: torch.Tensor


def _without_grad(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``torch.no_grad`` as a decorator, which costs nothing where gradients are off already, as when serving, and half
    of torch's own (some 2 us of a call) where they are not."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return call


def _expect(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    letters: str,
) -> None:
    """SpecError naming ``name`` unless it is a tensor of ``shape`` (None: anything), dtype and device."""
    if not isinstance(tensor, torch.Tensor):
        raise SpecError(name, type(tensor).__name__, f"a tensor {letters}")
    if tensor.dim() != len(shape) or any(
        w is not None and g != w for g, w in zip(tensor.shape, shape, strict=False)
    ):
        wants = ", ".join("any" if s is None else str(s) for s in shape)
        raise SpecError(name, tuple(tensor.shape), f"shape [{wants}] = {letters}")
    if tensor.dtype not in dtypes:
        raise SpecError(name, tensor.dtype, "dtype " + " or ".join(map(str, dtypes)))
    if tensor.device != device:
        raise SpecError(name, tensor.device, f"the device of the cache, {device}")


def _dense(name: str, tensor: torch.Tensor) -> None:
    """SpecError unless the elements of the last dimension lie side by side, as kernels take them."""
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise SpecError(name, f"strides {tensor.stride()}", "a contiguous last dimension")


def _writable(name: str, tensor: torch.Tensor) -> None:
    """SpecError unless results can be written into ``tensor`` in place."""
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise SpecError(name, f"strides {tensor.stride()}", "memory of its own for every element")
    if tensor.requires_grad:
        raise SpecError(name, "requires_grad", "a tensor that autograd does not track")


def new_results(
    query: torch.Tensor,  # [N, Hq, D]
    value_size: int,
    out: torch.Tensor | None,  # [N, Hq, Dv]
    lse: torch.Tensor | None,  # [N, Hq]
    return_lse: bool,
    *,
    padded: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``out`` and ``lse``, made where they are missing and wanted.

    padded: there may be rows that no sequence owns, so that no kernel writes them: new ones start as 0 and -inf.
    """
    if out is None:
        shape = (*query.shape[:2], value_size)
        out = query.new_zeros(shape) if padded else query.new_empty(shape)
    if lse is None and return_lse:
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        if padded:
            lse.fill_(-math.inf)
    return out, lse


class BoundLayer:
    """One layer with its backend, layout and checks fixed. Made by :func:`bind`."""

    def __init__(self, decision: Decision, layout: Layout, ops: LayerOps, checks: Checks) -> None:
        self.decision = decision
        self.layout = layout
        self.ops = ops
        self.checks: Checks = checks
        self.tag = layout.tag
        self.layer = decision.layer

    @property
    def backend(self) -> str:
        """Name of the backend that runs; for asserting the route in tests and logs."""
        return self.decision.backend

    # ---- caches -----------------------------------------------------------------------------------------

    def allocate(self, num_blocks: int, device: torch.device | str, fill: int = 0) -> PagedCache:
        """A cache of ``num_blocks`` blocks on ``device``, every byte ``fill``."""
        return PagedCache(allocate(self.layout, num_blocks, device, fill), self.tag)

    def wrap(self, data: torch.Tensor, tag: CacheTag | None = None) -> PagedCache:
        """A cache over memory that somebody else owns (a serving engine's page pool).

        data: uint8 of the layout's shape and strides. tag: what the bytes mean, default: this layer's own tag,
        which is right for memory that only this layer writes. SpecError or TagError if they do not fit.
        """
        tag = self.tag if tag is None else tag
        if not isinstance(tag, CacheTag):
            raise SpecError("tag", type(tag).__name__, "a CacheTag")
        tag.require(self.tag)
        check_cache(data, self.layout)
        return PagedCache(data, tag)

    # ---- warm-up ----------------------------------------------------------------------------------------

    def warmup(
        self,
        max_batch: int,
        max_context: int,
        max_query_len: int = 1,
        *,
        device: torch.device | str = "cuda",
        dtype: torch.dtype | None = None,
        lse: bool | None = None,
        workspace: Any = None,
    ) -> int:
        """Compile every kernel that :meth:`decode` can need in the declared range, and reserve its scratch memory.

        max_batch: most sequences B. max_context: most tokens that a block table spans, M * bs. max_query_len: most
        query tokens of a sequence. device: where decode will run. dtype: of queries and outputs, default the
        layer's. lse: whether it will be asked for; None: both. workspace: the one that decode will be given, if any.

        Returns the number of kernels. Inside the range decode then compiles nothing, and allocates nothing but the
        results it is not given, if cache and queries are aligned to 16 bytes (address and strides). A backend with
        nothing to compile (torch_reference) returns 0. SpecError names a wrong argument.
        """
        checked_int("max_batch", max_batch, 1, _MAX_QUERY_LEN)
        checked_int("max_context", max_context, 1, 1 << 40)
        checked_int("max_query_len", max_query_len, 1, _MAX_QUERY_LEN)
        where = checked_device(device)
        if dtype is not None and dtype not in _RAW_DTYPES:
            raise SpecError("dtype", dtype, "dtype " + " or ".join(map(str, _RAW_DTYPES)))
        if lse is not None and not isinstance(lse, bool):
            raise SpecError("lse", lse, "true, false, or none for both")
        compile_all = getattr(self.ops, "warmup", None)
        if compile_all is None:
            return 0
        made: int = compile_all(
            max_batch, max_context, max_query_len, device=where, dtype=dtype, lse=lse, workspace=workspace
        )
        return made

    # ---- store ------------------------------------------------------------------------------------------

    @_without_grad
    def store(
        self,
        key: torch.Tensor,  # [T, Hk, D] fp16/bf16
        value: torch.Tensor,  # [T, Hk, Dv] same dtype
        cache: PagedCache,
        slot_mapping: torch.Tensor,  # [T] int32/int64
        *,
        nonfinite: torch.Tensor | None = None,  # [2] int32
    ) -> None:
        """Quantise ``key`` and ``value`` and write them at ``slot_mapping`` (block * bs + offset; < 0: padding).

        A vector with a NaN or an infinity is stored as the zero vector; the numbers of such key and value vectors
        are added to ``nonfinite``. Nothing is written if an argument is wrong (SpecError, TagError).
        """
        if self.checks != "off":
            self._check_store(key, value, cache, slot_mapping, nonfinite)
        self.ops.store(key, value, cache.data, slot_mapping, nonfinite)

    def _check_store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: PagedCache,
        slot_mapping: torch.Tensor,
        nonfinite: torch.Tensor | None,
    ) -> None:
        device = self._check_cache(cache)
        layer, hk = self.layer, self.layout.num_kv_heads
        _expect("key", key, (None, hk, layer.head_size), _RAW_DTYPES, device, "[T, Hk, D]")
        tokens = key.shape[0]
        _expect("value", value, (tokens, hk, layer.value_size), (key.dtype,), device, "[T, Hk, Dv]")
        _expect("slot_mapping", slot_mapping, (tokens,), _INDEX_DTYPES, device, "[T]")
        for name, tensor in (("slot_mapping", slot_mapping), ("key", key), ("value", value)):
            _dense(name, tensor)
        if nonfinite is not None:
            _expect("nonfinite", nonfinite, (2,), (torch.int32,), device, "[2]")
            _writable("nonfinite", nonfinite)
        if self.checks == "full" and tokens:
            slots = slot_mapping[slot_mapping >= 0]
            limit = cache.num_blocks * self.layout.block_size
            if slots.numel() and int(slots.max()) >= limit:
                raise SpecError("slot_mapping", int(slots.max()), f"slots below {limit} = nb * bs")
            if slots.unique().numel() != slots.numel():
                raise SpecError("slot_mapping", "a slot given twice", "each slot at most once per call")

    # ---- decode -----------------------------------------------------------------------------------------

    @_without_grad
    def decode(
        self,
        query: torch.Tensor,  # [N, Hq, D] fp16/bf16
        cache: PagedCache,
        block_table: torch.Tensor,  # [B, M] int32
        seq_lens: torch.Tensor,  # [B] int32
        query_start_loc: torch.Tensor | None = None,  # [B + 1] int32
        *,
        max_query_len: int | None = None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,  # [Hq] fp32
        out: torch.Tensor | None = None,  # [N, Hq, Dv]
        lse: torch.Tensor | None = None,  # [N, Hq] fp32
        return_lse: bool = False,
        workspace: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of each query token over its sequence's cached keys and values.

        Without ``query_start_loc`` there is one query token per sequence (N == B). With it, sequence i owns the
        query rows query_start_loc[i:i+2], and row j of its q rows attends to its first seq_len - q + j + 1 tokens
        (the tokens themselves have been stored before). Rows past query_start_loc[-1] are padding: they stay as they
        are in a given ``out`` and ``lse``, and are 0 and -inf in new ones. Window and soft cap are the layer's own.
        ``sinks`` are needed exactly if the layer has sinks.

        max_query_len: most query rows of any sequence; pass it where the host knows it, since reading it from
        query_start_loc synchronises. scale: softmax scale, default the layer's. out, lse: written in place.

        Returns out in the dtype of ``query``, and with ``return_lse`` also lse: the natural logarithm of the softmax
        denominator, sinks included, so that partial results merge as
        sum(out_i * exp(lse_i)) / sum(exp(lse_i)). A row that sees no key (seq_len 0) gives zeros and lse = -inf.
        """
        if self.checks != "off":
            self._check_decode(
                query, cache, block_table, seq_lens, query_start_loc, max_query_len, scale, sinks, out, lse
            )
        if query_start_loc is None:
            max_query_len = 1
        elif max_query_len is None:
            max_query_len = max(1, int(query_start_loc.diff().max())) if len(seq_lens) else 1
        out, lse = new_results(
            query, self.layer.value_size, out, lse, return_lse, padded=query_start_loc is not None
        )
        self.ops.decode(
            query,
            cache.data,
            block_table,
            seq_lens,
            query_start_loc,
            max_query_len,
            self.layer.softmax_scale if scale is None else scale,
            sinks,
            out,
            lse,
            workspace,
        )
        if return_lse:
            assert lse is not None
            return out, lse
        return out

    def _check_decode(
        self,
        query: torch.Tensor,
        cache: PagedCache,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor | None,
        max_query_len: int | None,
        scale: float | None,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> None:
        device = self._check_cache(cache)
        layer = self.layer
        _expect("query", query, (None, layer.num_heads, layer.head_size), _RAW_DTYPES, device, "[N, Hq, D]")
        _dense("query", query)
        rows = query.shape[0]
        batch = self._check_sequences(block_table, seq_lens, cache)
        if query_start_loc is None:
            if rows != batch:
                raise SpecError("query", tuple(query.shape), f"N == B == {batch} without query_start_loc")
        else:
            _expect("query_start_loc", query_start_loc, (batch + 1,), (torch.int32,), device, "[B + 1]")
            _dense("query_start_loc", query_start_loc)
        if max_query_len is not None:
            checked_int("max_query_len", max_query_len, 1, _MAX_QUERY_LEN)
        if scale is not None and not is_number(scale):
            raise SpecError("scale", scale, "a finite number > 0")
        if layer.sinks and sinks is None:
            raise SpecError("sinks", None, "a tensor [Hq]: this layer was bound with sinks")
        if sinks is not None:
            if not layer.sinks:
                got = tuple(sinks.shape) if isinstance(sinks, torch.Tensor) else sinks
                raise SpecError("sinks", got, "none: this layer was bound without sinks")
            _expect("sinks", sinks, (layer.num_heads,), (torch.float32,), device, "[Hq]")
            _dense("sinks", sinks)
        if out is not None:
            shape = (rows, layer.num_heads, layer.value_size)
            _expect("out", out, shape, (*_RAW_DTYPES, torch.float64), device, "[N, Hq, Dv]")
            _dense("out", out)
            _writable("out", out)
        if lse is not None:
            _expect("lse", lse, (rows, layer.num_heads), (torch.float32, torch.float64), device, "[N, Hq]")
            _writable("lse", lse)
        if self.checks == "full" and query_start_loc is not None:
            loc = query_start_loc.tolist()
            longest = max((b - a for a, b in pairwise(loc)), default=0)
            if loc[0] != 0 or any(b < a for a, b in pairwise(loc)) or loc[-1] > rows:
                raise SpecError("query_start_loc", loc, f"ascending from 0 to at most N = {rows}")
            if max_query_len is not None and longest > max_query_len:
                raise SpecError("max_query_len", max_query_len, f"at least {longest}, from query_start_loc")

    # ---- dequantise -------------------------------------------------------------------------------------

    @_without_grad
    def dequantize(
        self,
        cache: PagedCache,
        block_table: torch.Tensor,  # [B, M] int32
        seq_lens: torch.Tensor,  # [B] int32
        *,
        starts: torch.Tensor | None = None,  # [B] int32
        dtype: torch.dtype | None = None,
        total: int | None = None,
    ) -> Dequantized:
        """Keys (rotated back) and values of tokens [starts, seq_lens) of every sequence, one after the other.

        starts: first token of each sequence (default 0). dtype: of the result (default: the layer's). total: number
        of rows, sum(max(seq_lens - starts, 0)); pass it where the host knows it, since reading it synchronises.
        """
        if self.checks != "off":
            device = self._check_cache(cache)
            batch = self._check_sequences(block_table, seq_lens, cache)
            if starts is not None:
                _expect("starts", starts, (batch,), (torch.int32,), device, "[B]")
                _dense("starts", starts)
                if self.checks == "full" and batch and int(starts.min()) < 0:
                    raise SpecError("starts", int(starts.min()), "token positions >= 0")
            if dtype is not None and dtype not in (*_RAW_DTYPES, torch.float64):
                raise SpecError("dtype", dtype, "a floating dtype")
        starts = torch.zeros_like(seq_lens) if starts is None else starts
        cu_lens = torch.zeros(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device)
        torch.cumsum((seq_lens - starts).clamp(min=0), 0, out=cu_lens[1:])
        if total is None:
            total = int(cu_lens[-1])
        elif self.checks != "off":
            checked_int("total", total, 0, 1 << 40)
            if self.checks == "full" and total != int(cu_lens[-1]):
                raise SpecError("total", total, f"{int(cu_lens[-1])}, the sum of seq_lens - starts")
        dtype = (
            dtype or {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.layer.dtype]
        )
        hk, layer = self.layout.num_kv_heads, self.layer
        key = torch.empty((total, hk, layer.head_size), dtype=dtype, device=cache.data.device)
        value = torch.empty((total, hk, layer.value_size), dtype=dtype, device=cache.data.device)
        self.ops.dequantize(cache.data, block_table, seq_lens, starts, cu_lens, key, value)
        return Dequantized(key, value, cu_lens)

    # ---- shared checks ----------------------------------------------------------------------------------

    def _check_cache(self, cache: PagedCache) -> torch.device:
        if not isinstance(cache, PagedCache):
            raise SpecError("cache", type(cache).__name__, "a PagedCache, from allocate() or wrap()")
        cache.tag.require(self.tag)
        check_cache(cache.data, self.layout)
        return cache.data.device

    def _check_sequences(self, block_table: torch.Tensor, seq_lens: torch.Tensor, cache: PagedCache) -> int:
        device = cache.data.device
        _expect("seq_lens", seq_lens, (None,), (torch.int32,), device, "[B]")
        _dense("seq_lens", seq_lens)
        batch = int(seq_lens.shape[0])
        _expect("block_table", block_table, (batch, None), (torch.int32,), device, "[B, M]")
        _dense("block_table", block_table)
        if self.checks == "full" and batch:
            size, width = self.layout.block_size, block_table.shape[1]
            if int(seq_lens.min()) < 0 or int(seq_lens.max()) > size * width:
                got = f"{int(seq_lens.min())} to {int(seq_lens.max())}"
                raise SpecError("seq_lens", got, f"0 to {size * width} = M * bs")
            used = torch.arange(width, device=device) * size < seq_lens[:, None]  # entries that will be read
            wrong = used & ((block_table < 0) | (block_table >= cache.num_blocks))
            if bool(wrong.any()):
                raise SpecError(
                    "block_table", int(block_table[wrong][0]), f"block ids 0 to {cache.num_blocks - 1}"
                )
        return batch


def bind(
    decision: Decision,
    *,
    checks: Checks = "full",
    slot_stride: int | None = None,
    block_stride: int | None = None,
    **options: Any,
) -> BoundLayer:
    """Turn a decision into a layer that runs: imports its kernels, fixes its layout.

    checks: see :data:`Checks`. slot_stride, block_stride: bytes, where the server pads (default: no padding).
    options: the backend's own (torch_reference: ``math_dtype``).

    On this machine's own target, a backend whose compiler is not trusted compiles here, before there is a cache. If it
    fails, the next backend that the decision's policy allows is bound, with the compiler's text among the refusals of
    ``BoundLayer.decision`` and in the log. IneligibleError if the policy allows none, or if the decision was made by
    hand.
    """
    if checks not in get_args(Checks):
        raise SpecError("checks", checks, "one of " + ", ".join(get_args(Checks)))
    if not isinstance(decision, Decision):
        raise SpecError("decision", type(decision).__name__, "a Decision, from decide()")
    failures: dict[str, Refusal] = {}
    while True:
        bound = _bound(decision, checks, slot_stride, block_stride, options)
        compile_all = getattr(bound.ops, "compile", None)
        if compile_all is None or not decision.target.local:
            return bound
        try:
            compile_all()
        except CompileError as error:
            logger.info("%s does not compile: %s", decision.backend, error)
            failures[decision.backend] = Refusal(Code.COMPILE, error.reason, "kernels that compile")
            decision = fall_back(decision, failures)
        else:
            return bound


def _bound(
    decision: Decision,
    checks: Checks,
    slot_stride: int | None,
    block_stride: int | None,
    options: Mapping[str, Any],
) -> BoundLayer:
    """The layer as decided, with nothing compiled."""
    layer = decision.layer
    backend = get_backend(decision.backend)
    if backend.layout not in ("any", decision.layout):
        raise SpecError("decision layout", decision.layout, f"{backend.layout}, which {backend.name} reads")
    # What a kernel can compute must hold wherever it runs; where it runs was checked by decide().
    request = Request(layer, decision.target, decision.preset, decision.block_size)
    wrong = [r for r in backend.requires if r.code not in (Code.ARCH, Code.PACKAGE)]
    if why := refusals(wrong, request):
        raise SpecError("decision", backend.name, "an eligible backend: " + ", ".join(map(str, why)))
    layout = make_layout(
        decision.layout,
        decision.preset,
        layer.head_size,
        layer.num_kv_heads,
        decision.block_size,
        value_head_size=layer.value_size,
        slot_stride=slot_stride,
        block_stride=block_stride,
    )
    ops = backend.load_ops()(decision, layout, **options)
    return BoundLayer(decision, layout, ops, checks)
