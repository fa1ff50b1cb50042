"""Presets by name, read from ``configs/presets.yaml`` (the only place where they are defined)."""

from __future__ import annotations

from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

import yaml

from .spec import Preset, SpecError

__all__ = ["get_preset", "load_yaml", "preset_names", "presets"]


def load_yaml(*parts: str) -> Any:
    """The parsed YAML file ``configs/<parts>`` of the installed package."""
    text = resources.files("turboquant_rocm.configs").joinpath(*parts).read_text(encoding="utf-8")
    return yaml.safe_load(text)


@cache
def presets() -> MappingProxyType[str, Preset]:
    """All presets by name, in the order of the file."""
    data = load_yaml("presets.yaml")
    if data.get("version") != 1:
        raise SpecError("presets.yaml version", data.get("version"), "1")
    known = {"key_bits", "value_bits", "norm_correction", "description"}
    found: dict[str, Preset] = {}
    for name, fields in data["presets"].items():
        unknown = set(fields) - known
        if unknown:
            raise SpecError(f"presets.yaml {name}", sorted(unknown), f"only the fields {sorted(known)}")
        found[name] = Preset(name=name, **fields)
    return MappingProxyType(found)


def preset_names() -> tuple[str, ...]:
    """Names of all presets, in the order of the file."""
    return tuple(presets())


def get_preset(name: str | Preset) -> Preset:
    """The preset called ``name``; the prefix ``turboquant_`` may be left out. SpecError names the choices."""
    if isinstance(name, Preset):
        return name
    table = presets()
    if isinstance(name, str):
        for candidate in (name, f"turboquant_{name}"):
            if candidate in table:
                return table[candidate]
    raise SpecError("preset", name, "one of " + ", ".join(table))
