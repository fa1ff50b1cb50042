"""What on this machine decides: packages and who owns them, devices, environment variables. Imports them all."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any, Final

from ..backends import backends
from ..dispatch import ENVIRONMENT_VARIABLES
from ..eligibility import Package
from ..packages import OWNERS, owners, probe
from ..target import devices, targets

__all__ = ["environment_document", "environment_rows"]

# Variables of other packages that change what is compiled or seen, with what they do.
FOREIGN: Final = {
    "TRITON_INTERPRET": "1: kernels run in Triton's interpreter on the CPU",
    "TRITON_CACHE_DIR": "where compiled kernels are kept",
    "TRITON_HIP_USE_BLOCK_PINGPONG": "AMD scheduling that can double LDS use",
    "TRITON_HIP_USE_ASYNC_COPY": "AMD async copies that can double LDS use",
    "AMDGCN_USE_BUFFER_OPS": "AMD buffer instructions on or off",
    "TRITON_DISABLE_LINE_INFO": "changes the key of the kernel cache",
    "FLYDSL_GPU_ARCH": "the architecture that FlyDSL compiles for",
    "ARCH": "the architecture of FlyDSL's code generator alone",
    "FLYDSL_RUNTIME_ENABLE_CACHE": "FlyDSL's disk cache on or off",
    "ROCM_PATH": "where ROCm and its linker are",
    "HIP_VISIBLE_DEVICES": "which AMD GPUs are seen",
    "ROCR_VISIBLE_DEVICES": "which AMD GPUs are seen",
    "CUDA_VISIBLE_DEVICES": "which GPUs are seen",
    "HSA_OVERRIDE_GFX_VERSION": "makes an AMD GPU report another architecture",
    "HF_HOME": "where the Hugging Face cache is",
    "HF_HUB_CACHE": "where the Hugging Face cache is",
}


def _packages() -> list[dict[str, Any]]:
    isolated = {r.name for b in backends() for r in b.requires if isinstance(r, Package) and r.isolated}
    wants = {r.name: r.version for b in backends() for r in b.requires if isinstance(r, Package)}
    found = []
    for name in dict.fromkeys([*OWNERS, *wants]):
        owned = owners(name)
        problem = probe(name, wants.get(name, ""), name in isolated)
        found.append(
            {
                "import": name,
                "owners": owned,
                "wants": wants.get(name, ""),
                "problem": problem,
                "conflict": len(owned) > 1,
            }
        )
    return found


def environment_document(version: int) -> dict[str, Any]:
    """Python, packages, devices and the variables that are set. Imports torch and triton; flydsl in a subprocess."""
    packages = _packages()
    seen = [
        {
            "index": d.index,
            "name": d.name,
            "arch": d.arch,
            "known": d.arch in targets(),
            "capability": list(d.capability),
            "memory_gib": d.memory_gib,
        }
        for d in devices()
    ]
    described = {**ENVIRONMENT_VARIABLES, **FOREIGN}
    variables = [
        {"name": name, "value": os.environ.get(name), "meaning": meaning}
        for name, meaning in described.items()
    ]
    from .. import __version__

    return {
        "schema": f"turboquant_rocm.explain.env/{version}",
        "version": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": packages,
        "devices": seen,
        "variables": variables,
        "exit": 0,
    }


def environment_rows(document: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, header, rows) of the tables that show ``document``."""
    packages = []
    for p in document["packages"]:
        owned = ", ".join(f"{name} {version}" for name, version in p["owners"].items()) or "nobody"
        state = p["problem"] or "ok"
        if p["conflict"]:
            state += "; more than one distribution owns it: uninstall all but one"
        packages.append([p["import"], owned, p["wants"] or "any", state])
    devices_ = [
        [
            str(d["index"]),
            d["name"],
            d["arch"] + ("" if d["known"] else " (unknown)"),
            ".".join(map(str, d["capability"])),
            f"{d['memory_gib']:g} GiB",
        ]
        for d in document["devices"]
    ]
    variables = [[v["name"], v["value"] or "not set", v["meaning"]] for v in document["variables"]]
    return [
        ("Packages", ["import", "owned by", "wanted", "state"], packages),
        (
            "Devices",
            ["", "name", "arch", "capability", "memory"],
            devices_ or [["", "none seen by torch", "cpu", "", ""]],
        ),
        ("Environment variables that change a decision or a kernel", ["name", "value", "meaning"], variables),
    ]
