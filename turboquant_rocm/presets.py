"""Presets by name, read from ``configs/presets.yaml`` (the only place where they are defined)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Final

import yaml

from .spec import ROTATED_VALUES, Preset, SpecError

__all__ = ["get_preset", "load_yaml", "parse_yaml", "preset_names", "presets", "serving_names"]


_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE: Final = "tag:yaml.org,2002:merge"


class _Loader(_Base):  # type: ignore[misc]
    """A safe loader that refuses a key given twice, of which YAML libraries silently keep the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key for key, _ in node.value if key.tag != _MERGE]
        found = super().construct_mapping(node, deep)
        seen = set()
        for key in keys:
            value = self.construct_object(key, deep=True)
            if value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{str(value)[:80]} is given twice", key.start_mark
                )
            seen.add(value)
        return found


def parse_yaml(text: str, source: str) -> Any:
    """Parsed YAML; SpecError names ``source`` and the place of a mistake.

    Keys given twice are refused, and so are aliases: a few lines of them stand for gigabytes.
    """
    try:
        if "*" in text:
            for event in yaml.parse(text, Loader=_Loader):
                if isinstance(event, yaml.AliasEvent):
                    mark: Any = event.start_mark
                    raise SpecError(
                        source, f"*{event.anchor} in line {mark.line + 1}", "YAML without aliases"
                    )
        return yaml.load(text, Loader=_Loader)  # a safe loader
    except SpecError:
        raise
    # the constructors of explicit tags (!!int, !!bool, !!timestamp) raise what their conversion raises
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
        LookupError,
        AttributeError,
        TypeError,
        OverflowError,
    ) as error:
        detail = " ".join(str(error).split())[:200]
        raise SpecError(source, detail, "valid YAML") from None


def load_yaml(*parts: str) -> Any:
    """The parsed YAML file ``configs/<parts>`` of the installed package."""
    text = resources.files("turboquant_rocm.configs").joinpath(*parts).read_text(encoding="utf-8")
    return parse_yaml(text, "/".join(("configs", *parts)))


@cache
def presets() -> MappingProxyType[str, Preset]:
    """All presets by name, in the order of the file."""
    data = load_yaml("presets.yaml")
    if data.get("version") != 1:
        raise SpecError("presets.yaml version", data.get("version"), "1")
    known = {"key_bits", "value_bits", "norm_correction", "description", "sketch", "value_group"}
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


def serving_names() -> tuple[str, ...]:
    """Names of the presets for serving: those without a sketch, which is for comparison with the paper."""
    return tuple(name for name, preset in presets().items() if not preset.sketch)


def get_preset(name: str | Preset) -> Preset:
    """The preset called ``name``; the prefix ``turboquant_`` may be left out. SpecError names the choices.

    With ``+rotated_values`` behind the name, the same preset with rotated values (see :class:`.spec.Preset`).
    """
    if isinstance(name, Preset):
        return name
    table = presets()
    if isinstance(name, str):
        plain = name.removesuffix(ROTATED_VALUES)
        for candidate in (plain, f"turboquant_{plain}"):
            if candidate in table:
                found = table[candidate]
                if plain == name:
                    return found
                return replace(found, name=candidate + ROTATED_VALUES, rotated_values=True)
    raise SpecError("preset", name, f"one of {', '.join(table)}, each also with {ROTATED_VALUES}")
