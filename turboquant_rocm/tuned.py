"""Tile and split choices of kernels, as data: ``configs/tuned/<arch>/<backend>.yaml``. No framework here.

A file holds one mapping of choices per kernel (``decode``), with ``overrides``: each entry whose ``when`` holds
replaces the values in its ``use``, later entries over earlier ones. ``provenance`` says where the numbers are from, for
the file and, where it differs, for an override.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from .presets import load_yaml
from .spec import SpecError

__all__ = ["choices", "load_tuned", "parse_tuned"]

VERSION: Final = 1
_LIKE: Final = {"nvidia": "sm_80", "amd": "gfx942"}
"""Whose choices serve an architecture without a file of its own."""


def _mapping(where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not value or not all(isinstance(k, str) for k in value):
        raise SpecError(where, value, "a mapping of names to values")
    return value


def _sources(where: str, value: object) -> None:
    if not (isinstance(value, str) and value.strip()) and not (isinstance(value, Mapping) and value):
        raise SpecError(f"{where} provenance", value, "where the numbers are from: a text or a mapping")


def _section(where: str, value: object) -> None:
    values = _mapping(where, value)
    overrides = values.get("overrides", ())
    if not isinstance(overrides, list | tuple):
        raise SpecError(f"{where} overrides", overrides, "a list of {when, use}")
    for i, entry in enumerate(overrides):
        here = f"{where} overrides[{i}]"
        entry = _mapping(here, entry)
        if not {"when", "use"} <= set(entry) <= {"when", "use", "provenance"}:
            raise SpecError(here, sorted(entry), "the fields when and use, and perhaps provenance")
        for name, wanted in _mapping(f"{here} when", entry["when"]).items():
            if not isinstance(wanted, list) or not wanted:
                raise SpecError(f"{here} when {name}", wanted, "a list of values")
        unknown = sorted(set(_mapping(f"{here} use", entry["use"])) - set(values))
        if unknown:
            raise SpecError(f"{here} use", unknown, "only names that the kernel's own mapping has")
        if "provenance" in entry:
            _sources(here, entry["provenance"])


def parse_tuned(data: object, where: str) -> Mapping[str, Mapping[str, Any]]:
    """Choices by kernel from a parsed file; SpecError names ``where`` and the field that is wrong."""
    data = _mapping(where, data)
    if data.get("version") != VERSION:
        raise SpecError(f"{where} version", data.get("version"), str(VERSION))
    _sources(where, data.get("provenance"))
    sections = {name: value for name, value in data.items() if name not in ("version", "provenance")}
    if "decode" not in sections:
        raise SpecError(where, sorted(data), "a mapping decode")
    for name, value in sections.items():
        _section(f"{where} {name}", value)
    return sections


@cache
def load_tuned(arch: str, vendor: str, backend: str) -> Mapping[str, Mapping[str, Any]]:
    """Choices of ``backend`` for ``arch``, or for the architecture of its vendor that stands for the others."""
    for name in (arch, _LIKE[vendor]):
        try:
            data = load_yaml("tuned", name, f"{backend}.yaml")
        except FileNotFoundError:
            continue
        return parse_tuned(data, f"tuned/{name}/{backend}.yaml")
    raise SpecError("backend", backend, f"one that has a file in configs/tuned/{arch}")


def choices(section: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
    """The values of one kernel where ``facts`` hold: preset (no prefix), head_size, columns, compiler, multi, wide,
    soft_cap."""
    values = {name: value for name, value in section.items() if name != "overrides"}
    for entry in section.get("overrides", ()):
        if all(facts[name] in wanted for name, wanted in entry["when"].items()):
            values.update(entry["use"])
    return values
