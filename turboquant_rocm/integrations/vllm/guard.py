"""vLLM's CPU attention, which takes a packed cache for a plain one and gives garbage: with a check in front."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from . import PREFIX

__all__ = ["GuardedCpuBackend", "GuardedCpuImpl"]


class GuardedCpuImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention; a packed cache is refused."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if str(self.kv_cache_dtype).startswith(PREFIX):
            raise ValueError(
                f"vLLM's CPU attention cannot read a {self.kv_cache_dtype} cache, and would not notice: set "
                "TURBOQUANT_ROCM_VLLM_CPU=reference (and leave VLLM_TARGET_DEVICE unset), or choose another "
                "--kv-cache-dtype"
            )


class GuardedCpuBackend(CPUAttentionBackend):
    """vLLM's CPU backend with :class:`GuardedCpuImpl`."""

    @staticmethod
    def get_impl_cls() -> type[GuardedCpuImpl]:
        return GuardedCpuImpl
