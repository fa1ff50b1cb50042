"""GPUs that kernels are chosen for: the table of known ones, and this machine's own.

:func:`detect` is the only function of the package that asks torch which device there is.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from types import MappingProxyType
from typing import Any

from .presets import load_yaml
from .spec import SpecError, Target

__all__ = ["Device", "detect", "devices", "get_target", "target_names", "targets"]


@cache
def targets() -> MappingProxyType[str, Target]:
    """All targets of ``configs/targets.yaml`` by arch, in the order of the file."""
    data = load_yaml("targets.yaml")
    if data.get("version") != 1:
        raise SpecError("targets.yaml version", data.get("version"), "1")
    known = {f.name for f in fields(Target)} - {"arch", "local"}
    found = {}
    for arch, values in data["targets"].items():
        unknown = set(values) - known
        if unknown:
            raise SpecError(f"targets.yaml {arch}", sorted(unknown), f"only the fields {sorted(known)}")
        values = {**values, "mfma": tuple(values.get("mfma", ()))}
        found[arch] = Target(arch=arch, **values)
    return MappingProxyType(found)


def target_names() -> tuple[str, ...]:
    """Arch strings of all known targets."""
    return tuple(targets())


def _canonical(arch: str) -> str:
    """``gfx942:sramecc+:xnack-`` is gfx942; ``sm90``, ``sm_90a`` and ``SM_90`` are sm_90."""
    arch = arch.strip().lower().split(":")[0]
    if arch.startswith("sm"):
        arch = "sm_" + arch.removeprefix("sm").removeprefix("_").rstrip("af")
    return arch


def get_target(arch: str | Target) -> Target:
    """The target called ``arch``, or this machine's own for ``local``; SpecError lists the known ones."""
    if isinstance(arch, Target):
        return arch
    if arch == "local":
        return detect()
    table = targets()
    name = _canonical(arch) if isinstance(arch, str) else ""
    if name not in table:
        raise SpecError("target", arch, "local, or one of " + ", ".join(table))
    return table[name]


@dataclass(frozen=True, slots=True)
class Device:
    """One device as torch reports it. capability is for people: nothing in this package compares it."""

    index: int
    name: str
    arch: str
    capability: tuple[int, int]
    memory_gib: float


def devices() -> tuple[Device, ...]:
    """The GPUs that torch sees; empty without torch or a GPU. Imports torch, which starts no context."""
    try:
        import torch
    except ImportError:
        return ()
    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        properties: Any = torch.cuda.get_device_properties(index)
        gfx = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
        arch = _canonical(gfx) if gfx else f"sm_{properties.major}{properties.minor}"
        found.append(
            Device(
                index,
                properties.name,
                arch,
                (properties.major, properties.minor),
                round(properties.total_memory / 2**30, 1),
            )
        )
    return tuple(found)


def detect(index: int = 0) -> Target:
    """The target of GPU ``index`` of this machine, or ``cpu`` where there is none; ``local`` is set.

    A GPU that ``configs/targets.yaml`` does not know keeps its arch string, so that refusals name it.
    """
    found = devices()
    if not found:
        return replace(targets()["cpu"], local=True)
    if not 0 <= index < len(found):
        raise SpecError("device", index, f"0 to {len(found) - 1}")
    device = found[index]
    facts = targets().get(device.arch)
    if facts is None:
        vendor = "amd" if device.arch.startswith("gfx") else "nvidia"
        facts = Target(vendor=vendor, arch=device.arch)
    return replace(facts, name=device.name, memory_gib=device.memory_gib, local=True)
