"""vLLM's own backend selection, on a machine without a GPU: prints as JSON which class each layer would get.

    python -P selectors_033.py rocm|cuda      with vLLM's Python files first on PYTHONPATH

Extension modules are empty stand-ins and the device is made up; everything that selects is vLLM's own code.
"""

from __future__ import annotations

import json
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

DEVICES = {"rocm": ("gfx942:sramecc+:xnack-", (9, 4)), "cuda": ("", (9, 0))}


def stand_in(platform: str) -> None:
    """Empty modules for vLLM's compiled ones."""
    extensions = ["_C", "_C_stable_libtorch", "_moe_C", "_moe_C_stable_libtorch"]
    extensions += ["_rocm_C"] if platform == "rocm" else ["vllm_flash_attn._vllm_fa2_C"]
    for name in extensions:
        sys.modules[f"vllm.{name}"] = ModuleType(f"vllm.{name}")


def pretend(platform: str) -> Any:
    """vLLM's platform class for ``platform`` in charge, with a device that is not here."""
    arch, capability = DEVICES[platform]
    os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")  # vLLM: a device may come later
    stand_in(platform)
    import torch

    if platform == "rocm":
        torch.version.hip = "7.0"
        torch.cuda.get_device_properties = lambda *_: SimpleNamespace(
            gcnArchName=arch, name="MI300X", multi_processor_count=304
        )
    import vllm.platforms
    from vllm.platforms.interface import DeviceCapability

    if platform == "rocm":
        from vllm.platforms.rocm import RocmPlatform as Base
    else:
        from vllm.platforms.cuda import CudaPlatformBase as Base

    class Pretended(Base):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return platform

    vllm.platforms.current_platform = Pretended()
    return vllm.platforms.current_platform


def main(platform: str) -> None:
    here = pretend(platform)
    import torch
    import vllm
    from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
    from vllm.v1.attention.selector import AttentionSelectorConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    from turboquant_rocm.integrations.vllm import register

    before = AttentionBackendEnum.TURBOQUANT.get_path()
    register()
    register()  # every process does, and some do twice
    ours = AttentionBackendEnum.TURBOQUANT.get_class()
    presets = TurboQuantAttentionBackend.supported_kv_cache_dtypes
    found: dict[str, Any] = {
        "version": vllm.__version__,
        "presets": presets,
        "before": before,
        "layers": {},
        "refused": {},
        "layouts": {},
        "slots": {},
    }
    shapes = {
        "plain": {},
        "fp16": {"dtype": torch.float16},
        "window": {"has_sliding_window": True},
        "window and sinks": {"has_sliding_window": True, "has_sink": True},
        "64 wide": {"head_size": 64},
        "256 wide": {"head_size": 256},
        "block 32": {"block_size": 32},
    }
    refused = {
        "latent": {"use_mla": True},
        "encoder": {"attn_type": "encoder_only"},
        "both ways": {"use_non_causal": True},
        "block 8": {"block_size": 8},
        "kv connector": {"use_kv_connector": True},
    }

    def select(run: str, dtype: str, more: dict[str, Any]) -> str:
        asked = {
            "head_size": 128,
            "dtype": torch.bfloat16,
            "kv_cache_dtype": dtype,
            "block_size": None,
            **more,
        }
        config = VllmConfig(cache_config=CacheConfig(cache_dtype=run))
        with set_current_vllm_config(config):
            return here.get_attn_backend_cls(None, AttentionSelectorConfig(**asked), num_heads=32)

    for preset in presets:
        for name, more in shapes.items():
            found["layers"][f"{preset}, {name}"] = select(preset, preset, more)
        native = select(preset, "auto", {})
        found["layers"][f"auto in {preset}"] = native
        both = get_supported_kv_cache_layouts([ours, resolve_obj_by_qualname(native)])
        found["layouts"][preset] = [layout.name for layout in both]
        for name, more in refused.items():
            try:
                found["refused"][f"{preset}, {name}"] = f"not refused: {select(preset, preset, more)}"
            except ValueError as error:
                found["refused"][f"{preset}, {name}"] = str(error)
        for size in (64, 80, 96, 128, 192, 256):
            spec = FullAttentionSpec(
                block_size=16,
                num_kv_heads=2,
                head_size=size,
                dtype=torch.uint8,
                kv_quant_mode=get_kv_quant_mode(preset),
            )
            theirs = TurboQuantAttentionBackend.customize_spec(spec)
            mine = ours.customize_spec(spec)
            found["slots"][f"{preset}, {size}"] = [mine.state_content_bytes, theirs.state_content_bytes]
            assert ours.customize_spec(mine) is mine
    plain = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
    assert ours.customize_spec(plain) is plain
    found["layers"]["auto in auto"] = select("auto", "auto", {})
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
