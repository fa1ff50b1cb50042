"""vLLM's own turboquant backend, left in charge (TURBOQUANT_ROCM_VLLM=off), with our plan logged beside it."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend, TurboQuantMetadataBuilder

from . import Settings
from .serving import ServedModel, report

__all__ = ["WatchedBackend", "WatchedBuilder"]


class WatchedBuilder(TurboQuantMetadataBuilder):
    """vLLM's builder; when it is made, the plan is."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any, **more: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **more)
        served = ServedModel.of(vllm_config)
        answer = served.plan(kv_cache_spec.block_size, Settings.from_environment())
        report(served, answer, in_charge=False)


class WatchedBackend(TurboQuantAttentionBackend):
    """vLLM's backend with :class:`WatchedBuilder`."""

    @staticmethod
    def get_builder_cls() -> type[WatchedBuilder]:
        return WatchedBuilder
