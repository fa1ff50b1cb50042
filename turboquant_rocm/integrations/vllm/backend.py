"""vLLM's attention classes over our dispatcher: backend, metadata builder, implementation.

A layer's life: ``TurboQuantImpl.__init__`` refuses what no route serves, before weights are loaded; the builder, made
when block sizes are known and before there is a cache, makes the plan, hands every layer its decision and compiles;
``build`` notices where the server put the cache; ``do_kv_cache_update`` and ``forward`` run what was decided.

Letters of the shapes: docs/design.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from typing import Any, ClassVar, Final, get_args

import torch
from vllm.config import get_current_vllm_config
from vllm.config.cache import CacheDType
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from ...continuation import attend_prefill
from ...dispatch import Decision, IneligibleError, resolve
from ...layouts import Slot
from ...ops import BoundLayer, PagedCache, bind
from ...presets import get_preset, preset_names
from ...spec import LayerSpec, SpecError
from . import PREFIX, Settings
from .batch import Split, split
from .blocks import BLOCK_LAYOUTS, block_stride
from .serving import (
    ServedModel,
    ServerCode,
    Unsupported,
    UnsupportedError,
    interpreter_faults,
    layer_spec,
    model_dtype,
    refused_layers,
    report,
    request,
    verify,
)

__all__ = ["BatchMetadata", "TurboQuantBackend", "TurboQuantBuilder", "TurboQuantImpl"]

MAX_DECODE_ROWS: Final = 128
"""Longest chunk with a history that reads itself from the packed cache, as in ``attend_prefill``."""

TABLE_STEP: Final = 128
"""vLLM makes the rows of block tables span a multiple of so many tokens, and of a block."""

BLOCK_STEP: Final = 16
"""Blocks are multiples of this many tokens: what every kernel takes."""


class TurboQuantBackend(AttentionBackend):
    """What vLLM's selectors ask before a layer is built. One class for all GPUs: the dispatcher knows the rest."""

    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        name for name in get_args(CacheDType) if name.startswith(PREFIX) and name in preset_names()
    ]

    @staticmethod
    def get_name() -> str:
        return "TURBOQUANT"

    @staticmethod
    def get_impl_cls() -> type[TurboQuantImpl]:
        return TurboQuantImpl

    @staticmethod
    def get_builder_cls() -> type[TurboQuantBuilder]:
        return TurboQuantBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Blocks are taken as they are, never split."""
        return [MultipleOf(BLOCK_STEP)]

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return tuple(KVCacheLayout[name] for name in BLOCK_LAYOUTS)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """``spec`` with the bytes of a slot, which no layout changes."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_turboquant:
            return spec
        preset = get_preset(spec.kv_quant_mode.name.lower())
        return replace(spec, state_content_bytes=Slot.of(preset, spec.head_size, spec.head_size_v).nbytes)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """No: connectors may cut blocks by head, and an SoA block has no such cut."""
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: the split of a batch is made from the host's query lengths."""
        return False


@dataclass
class BatchMetadata(AttentionMetadata):
    """One batch, for all layers of a group.

    The decodes are sequences [0, decodes) and query rows [0, decode_rows). rest_*: the sequences behind them;
    rest_starts [R + 1] counts from their own first row, rest_totals are lengths with the current chunks, on the host.
    """

    num_actual_tokens: int
    seq_lens: torch.Tensor  # [B] int32
    block_table: torch.Tensor  # [B, M] int32
    query_start_loc: torch.Tensor  # [B + 1] int32
    slot_mapping: torch.Tensor  # [N] int64
    split: Split
    rest_starts: torch.Tensor | None = None
    rest_totals: tuple[int, ...] = ()


class TurboQuantBuilder(AttentionMetadataBuilder[BatchMetadata]):
    """Makes the plan when it is made, and the metadata of every batch."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        if chunk := getattr(kv_cache_spec, "attention_chunk_size", None):
            raise UnsupportedError(
                f"layers such as {layer_names[0]}",
                [Unsupported(ServerCode.CHUNKED, chunk, "attention that is not cut into chunks")],
            )
        blocks = kv_cache_spec.max_num_blocks_per_req(vllm_config, vllm_config.model_config.max_model_len)
        self.max_context = blocks * kv_cache_spec.block_size + lcm(TABLE_STEP, kv_cache_spec.block_size)
        scheduler = vllm_config.scheduler_config
        sizes = vllm_config.compilation_config.cudagraph_capture_sizes or ()
        self.max_batch = max(scheduler.max_num_seqs, *sizes, 1)
        verify(vllm_config, TurboQuantImpl)
        settings = Settings.from_environment()
        served = ServedModel.of(vllm_config)
        answer = served.plan(kv_cache_spec.block_size, settings)
        report(served, answer, in_charge=True)
        decided = {n: e.decision for n, e in zip(served.names, answer.layers, strict=True)}
        context = vllm_config.compilation_config.static_forward_context
        self._impls: list[tuple[Any, TurboQuantImpl]] = []
        for name in layer_names:
            decision = decided[name]
            if decision is None:
                raise UnsupportedError(f"{name} of {served.model}", refused_layers(answer))
            impl: TurboQuantImpl = context[name].impl
            impl.decide(decision, settings)
            self._impls.append((context[name], impl))
        for _, impl in self._impls:
            impl.use_stride(getattr(kv_cache_spec, "page_size_padded", None))
            self._warm_up(impl)

    @property
    def threshold(self) -> int:
        """Most query tokens of a sequence that is decoded."""
        return int(self.reorder_batch_threshold or 1)

    def _warm_up(self, impl: TurboQuantImpl) -> None:
        """Compile all that this layer can need and reserve its scratch memory, before a graph is captured."""
        if self.device.type == "cpu" or impl.warm:
            return
        assert impl.bound is not None
        context = {"device": self.device, "dtype": impl.dtype, "lse": False}
        impl.bound.warmup(self.max_batch, self.max_context, self.threshold, **context)
        impl.bound.warmup(1, self.max_context, MAX_DECODE_ROWS, **context)
        self._warm_store(impl.bound, impl.dtype)
        impl.warm = True

    def _warm_store(self, bound: BoundLayer, dtype: torch.dtype) -> None:
        """Store padding and read a token of a block that is thrown away: these kernels compile when called."""
        block, layer = bound.allocate(1, self.device), bound.layer
        one = torch.ones(1, dtype=torch.int32, device=self.device)
        for tokens in (2, BLOCK_STEP):
            key = torch.zeros((tokens, layer.num_kv_heads, layer.head_size), dtype=dtype, device=self.device)
            value = torch.zeros(
                (tokens, layer.num_kv_heads, layer.value_size), dtype=dtype, device=self.device
            )
            bound.store(key, value, block, torch.full((tokens,), -1, dtype=torch.int64, device=self.device))
        bound.dequantize(block, torch.zeros_like(one)[None], one, dtype=dtype, total=1)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> BatchMetadata:
        """The metadata of one batch; nothing is read from the device unless the server has no host lengths."""
        cam = common_attn_metadata
        if cam.causal is not True:
            raise UnsupportedError(
                "this batch", [Unsupported(ServerCode.CAUSAL, cam.causal, "causal attention")]
            )
        first, first_impl = self._impls[0]
        if not first_impl.knows(first.kv_cache):  # the server has made its pool, padded it, or moved it
            for layer, impl in self._impls:
                if impl.find_cache(layer.kv_cache):
                    self._warm_up(impl)
        parts = split(cam.query_start_loc_cpu.tolist(), self.threshold)
        made = BatchMetadata(
            num_actual_tokens=cam.num_actual_tokens,
            seq_lens=cam.seq_lens,
            block_table=cam.block_table_tensor,
            query_start_loc=cam.query_start_loc,
            slot_mapping=cam.slot_mapping,
            split=parts,
        )
        if parts.query_lens:
            lens = cam.seq_lens_cpu_upper_bound  # exact for sequences that are not decoded
            lens = cam.seq_lens if lens is None else lens
            stop = parts.decodes + len(parts.query_lens)
            made.rest_totals = tuple(lens[parts.decodes : stop].tolist())
            made.rest_starts = cam.query_start_loc[parts.decodes : stop + 1] - parts.decode_rows
        return made


class TurboQuantImpl(AttentionImpl[BatchMetadata]):
    """One layer. Attributes that other programs read: ``decision`` and ``bound`` (None before there is a plan)."""

    supports_quant_query_input: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.soft_cap = logits_soft_cap or None
        self._sinks_given = sinks  # its values come with the weights
        self.sinks: torch.Tensor | None = None
        self.decision: Decision | None = None
        self.bound: BoundLayer | None = None
        self.warm = False
        self._cache: PagedCache | None = None
        self._seen: Any = None
        config = get_current_vllm_config()
        self.dtype: torch.dtype = config.model_config.dtype
        spec = layer_spec(
            0,
            num_heads=num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=head_size,
            scale=self.scale,
            dtype=model_dtype(self.dtype),
            window=sliding_window,
            sinks=sinks is not None,
            soft_cap=self.soft_cap,
            alibi=alibi_slopes is not None,
        )
        asked = {
            ServerCode.ATTENTION_TYPE: None if attn_type == AttentionType.DECODER else attn_type,
            ServerCode.KV_SHARING: kv_sharing_target_layer_name,
            ServerCode.CONTEXT_PARALLEL: max(self.dcp_world_size, self.pcp_world_size) - 1 or None,
        }
        wants = {
            ServerCode.ATTENTION_TYPE: AttentionType.DECODER.value,
            ServerCode.KV_SHARING: "a cache of its own for every layer",
            ServerCode.CONTEXT_PARALLEL: "no ranks that share a sequence",
        }
        problems: list[Any] = [
            Unsupported(code, got, wants[code]) for code, got in asked.items() if got is not None
        ]
        problems += [
            Unsupported(ServerCode.OPTION, f"{name}={value}", "none of this name")
            for name, value in options.items()
            if value is not None and value is not False
        ]
        settings = Settings.from_environment()
        problems += interpreter_faults(spec.dtype, kv_cache_dtype, settings)
        # Block sizes are not final yet. One that every backend takes leaves what the layer itself lacks.
        question, policy = request(spec, kv_cache_dtype, BLOCK_STEP, settings)
        try:
            resolve(question, policy)
        except IneligibleError as error:
            problems += [f"{name}: {', '.join(map(str, why))}" for name, why in error.refused.items()]
        if problems:
            raise UnsupportedError(_described(spec), problems)

    # ---- start-up ---------------------------------------------------------------------------------------------

    def decide(self, decision: Decision, settings: Settings) -> None:
        """Take the decision of the plan. Layers that were decided before keep their kernels if it is the same."""
        self._settings = settings
        if decision != self.decision:
            self.decision, self.bound, self.warm = decision, None, False
            self._cache, self._seen = None, None

    def use_stride(self, stride: int | None) -> bool:
        """Bind for blocks that begin ``stride`` bytes apart (None: no padding). True if that changed anything."""
        assert self.decision is not None
        if self.bound is not None and stride in (None, self.bound.layout.block_stride):
            return False
        self.bound = bind(self.decision, checks=self._settings.checks, block_stride=stride)
        self.decision = self.bound.decision  # a backend that does not compile is replaced, and says so
        self.warm = False
        return True

    def knows(self, kv_cache: torch.Tensor) -> bool:
        """True if this is the pool that was bound to this layer last."""
        return bool(self._seen == (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride()))

    def find_cache(self, kv_cache: torch.Tensor) -> bool:
        """Look at the pool that the server bound to this layer. True if it needs kernels for another stride."""
        if self.knows(kv_cache) or not kv_cache.numel():
            return False
        if kv_cache.dtype != torch.uint8:
            raise SpecError("kv_cache", kv_cache.dtype, "uint8")
        changed = self.use_stride(block_stride(kv_cache.shape, kv_cache.stride()))
        assert self.bound is not None
        layout = self.bound.layout
        wanted = (layout.num_kv_heads, layout.block_size, layout.slot_bytes)
        if tuple(kv_cache.shape[1:]) != wanted:
            raise SpecError("kv_cache", tuple(kv_cache.shape), f"[num_blocks, {', '.join(map(str, wanted))}]")
        view = kv_cache.as_strided((kv_cache.shape[0], *layout.shape), layout.strides)
        self._cache = self.bound.wrap(view)
        self._seen = (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride())
        return changed

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Sinks have their values now."""
        if self._sinks_given is not None:
            self.sinks = self._sinks_given.detach().float().contiguous()

    # ---- every step -------------------------------------------------------------------------------------------

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,  # [>= N, Hk, D]
        value: torch.Tensor,  # [>= N, Hk, Dv]
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,  # [N] int64
    ) -> None:
        """Store the tokens of a batch; slots below 0 are padding."""
        n = slot_mapping.shape[0]
        if not n or not kv_cache.numel():
            return
        self.find_cache(kv_cache)
        assert self.bound is not None and self._cache is not None
        self.bound.store(key[:n], value[:n], self._cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,  # [>= N, Hq, D]
        key: torch.Tensor,  # [>= N, Hk, D]
        value: torch.Tensor,  # [>= N, Hk, Dv]
        kv_cache: torch.Tensor,
        attn_metadata: BatchMetadata | None,
        output: torch.Tensor,  # [>= N, Hq, Dv]
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one batch, written to ``output``. Without metadata, when memory is profiled, zeros."""
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError(
                "this output",
                [Unsupported(ServerCode.OUTPUT_QUANTIZATION, True, "an output in the model's dtype")],
            )
        if attn_metadata is None or not kv_cache.numel():
            return output.zero_()
        self.find_cache(kv_cache)
        bound, cache, meta = self.bound, self._cache, attn_metadata
        assert bound is not None and cache is not None
        if self._sinks_given is not None and self.sinks is None:
            self.process_weights_after_loading(self.dtype)
        parts, n = meta.split, meta.num_actual_tokens
        d, rows = parts.decodes, parts.decode_rows
        if rows:
            bound.decode(
                query[:rows],
                cache,
                meta.block_table[:d],
                meta.seq_lens[:d],
                None if parts.single else meta.query_start_loc[: d + 1],
                max_query_len=parts.decode_len,
                sinks=self.sinks,
                out=output[:rows],
            )
        if parts.query_lens:
            stop = d + len(parts.query_lens)
            assert meta.rest_starts is not None
            attend_prefill(
                bound,
                query[rows:n],
                key[rows:n],
                value[rows:n],
                cache,
                meta.block_table[d:stop],
                meta.seq_lens[d:stop],
                meta.rest_starts,
                query_lens=parts.query_lens,
                total_lens=meta.rest_totals,
                sinks=self.sinks,
                max_decode_rows=MAX_DECODE_ROWS,
                out=output[rows:n],
            )
        return output


def _described(spec: LayerSpec) -> str:
    window = "" if spec.window is None else f", window {spec.window}"
    return f"a layer of {spec.num_heads}/{spec.num_kv_heads} heads of {spec.head_size}{window}"
