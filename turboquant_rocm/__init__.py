"""TurboQuant KV-cache quantisation for AMD and NVIDIA GPUs. Importing this loads neither torch nor triton."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> module that defines it. Loaded on first use, so that the import stays light.
_PUBLIC = {
    "AttentionKind": "spec",
    "Dtype": "spec",
    "LayerSpec": "spec",
    "ModelSpec": "spec",
    "Preset": "spec",
    "SpecError": "spec",
    "Target": "spec",
    "get_preset": "presets",
    "preset_names": "presets",
    "Code": "eligibility",
    "Refusal": "eligibility",
    "Decision": "dispatch",
    "IneligibleError": "dispatch",
    "Policy": "dispatch",
    "decide": "dispatch",
    "Plan": "planning",
    "plan": "planning",
    "load_model": "modelspec",
    "get_target": "target",
    "CacheTag": "layouts",
    "LAYOUT_VERSION": "layouts",
    "Layout": "layouts",
    "TagError": "layouts",
    "make_layout": "layouts",
    "BoundLayer": "ops",
    "PagedCache": "ops",
    "bind": "ops",
    "attend_prefill": "continuation",
}

# Literal, so that type checkers see what is public; the same names as in _PUBLIC.
__all__ = [
    "LAYOUT_VERSION",
    "AttentionKind",
    "BoundLayer",
    "CacheTag",
    "Code",
    "Decision",
    "Dtype",
    "IneligibleError",
    "LayerSpec",
    "Layout",
    "ModelSpec",
    "PagedCache",
    "Plan",
    "Policy",
    "Preset",
    "Refusal",
    "SpecError",
    "TagError",
    "Target",
    "__version__",
    "attend_prefill",
    "bind",
    "decide",
    "get_preset",
    "get_target",
    "load_model",
    "make_layout",
    "plan",
    "preset_names",
]

if TYPE_CHECKING:
    from .continuation import attend_prefill
    from .dispatch import Decision, IneligibleError, Policy, decide
    from .eligibility import Code, Refusal
    from .layouts import LAYOUT_VERSION, CacheTag, Layout, TagError, make_layout
    from .modelspec import load_model
    from .ops import BoundLayer, PagedCache, bind
    from .planning import Plan, plan
    from .presets import get_preset, preset_names
    from .spec import AttentionKind, Dtype, LayerSpec, ModelSpec, Preset, SpecError, Target
    from .target import get_target


def __getattr__(name: str) -> Any:
    try:
        module = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(importlib.import_module(f".{module}", __name__), name)


def __dir__() -> list[str]:
    return list(__all__)
