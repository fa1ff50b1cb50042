"""vLLM's CPU engine with our backend: for end-to-end tests, and for laptops. Slow by design."""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability

from . import BACKEND, PREFIX

__all__ = ["TurboQuantCpuPlatform"]


class TurboQuantCpuPlatform(CpuPlatform):
    """The CPU platform, where layers with a turboquant cache dtype get our backend and all others vLLM's own."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Class path of the backend; ValueError lists what our backend does not serve."""
        if not str(attn_selector_config.kv_cache_dtype).startswith(PREFIX):
            return str(super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads))
        from .backend import TurboQuantBackend

        reasons = TurboQuantBackend.validate_configuration(
            device_capability=DeviceCapability(0, 0), **attn_selector_config._asdict()
        )
        if reasons:
            raise ValueError(f"turboquant_rocm cannot serve {attn_selector_config}: {'; '.join(reasons)}")
        return BACKEND
