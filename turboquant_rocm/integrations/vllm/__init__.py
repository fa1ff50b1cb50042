"""vLLM on our dispatcher: ``vllm serve MODEL --kv-cache-dtype turboquant_4bit_nc`` once this package is installed.

:func:`register` and :func:`cpu_platform` are the entry points that vLLM calls in each of its processes. Importing this
module loads no framework. docs/serving.md has the deployment; ``python -m turboquant_rocm.integrations.vllm`` says
whether the plugin is in force.

:mod:`.backend`: the attention classes. :mod:`.serving`: the plan of a served model. :mod:`.batch`, :mod:`.blocks`: how
a batch is split, how a page pool is read. :mod:`.cpu`: the CPU platform. :mod:`.guard`: vLLM's CPU attention, with a
check. :mod:`.watched`: vLLM's own turboquant backend, with our report.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from ...packages import satisfies
from ...spec import SpecError

__all__ = [
    "BACKEND",
    "ENVIRONMENT_VARIABLES",
    "SUPPORTED",
    "WATCHED",
    "Settings",
    "cpu_platform",
    "register",
    "version_problem",
]

SUPPORTED: Final = ">=0.32,<0.34"
"""Versions of vLLM that the classes are made for."""

_PACKAGE: Final = "turboquant_rocm.integrations.vllm"
BACKEND: Final = f"{_PACKAGE}.backend.TurboQuantBackend"
WATCHED: Final = f"{_PACKAGE}.watched.WatchedBackend"
GUARDED_CPU: Final = f"{_PACKAGE}.guard.GuardedCpuBackend"
CPU_PLATFORM: Final = f"{_PACKAGE}.cpu.TurboQuantCpuPlatform"

PREFIX: Final = "turboquant_"
"""What the names of our cache dtypes begin with."""

ENVIRONMENT_VARIABLES: Final = MappingProxyType(
    {
        "TURBOQUANT_ROCM_VLLM": "on (default), off: vLLM's own turboquant backend serves and our plan is only logged, "
        "required: an unsupported version of vLLM is an error",
        "TURBOQUANT_ROCM_VLLM_CPU": "reference or interpret: serve turboquant dtypes on the CPU, in plain torch or "
        "with the Triton kernels interpreted; for tests",
        "TURBOQUANT_ROCM_VLLM_CHECKS": "off (default), shapes or full: what every call checks before it runs",
    }
)
"""Every environment variable that the plugin reads, with what it means; the dispatcher's own come on top."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for. backend: on, off or required. cpu: "", reference or interpret."""

    backend: str = "on"
    cpu: str = ""
    checks: Literal["off", "shapes", "full"] = "off"

    def __post_init__(self) -> None:
        allowed = {
            "backend": ("on", "off", "required"),
            "cpu": ("", "reference", "interpret"),
            "checks": ("off", "shapes", "full"),
        }
        names = dict(zip(allowed, ENVIRONMENT_VARIABLES, strict=True))
        for field, values in allowed.items():
            if getattr(self, field) not in values:
                raise SpecError(
                    names[field], getattr(self, field), "one of " + ", ".join(filter(None, values))
                )
        if self.cpu and self.backend == "off":
            wants = f"on with {names['cpu']}={self.cpu}: vLLM has no turboquant backend for the CPU"
            raise SpecError(names["backend"], self.backend, wants)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """The settings of the ``TURBOQUANT_ROCM_VLLM*`` variables; SpecError names one with a wrong value."""
        environ = os.environ if environ is None else environ
        backend, cpu, checks = (environ.get(name, "").strip() for name in ENVIRONMENT_VARIABLES)
        asked: Any = checks or "off"  # checked in __post_init__
        return cls(backend or "on", cpu, asked)


def version_problem(version: str) -> str | None:
    """What to tell the user of vLLM ``version``, None for a supported one."""
    try:
        if satisfies(version, SUPPORTED):
            return None
    except SpecError:  # a build without a version number
        pass
    return (
        f"turboquant_rocm serves vLLM {SUPPORTED}, and this is vLLM {version}: its own turboquant backend is left in "
        "charge. Install a supported vLLM or a turboquant_rocm for this one; TURBOQUANT_ROCM_VLLM=required makes this "
        "an error"
    )


def logger() -> logging.Logger:
    """A logger that vLLM's configuration prints; the package's own is led to the same handlers."""
    server, ours = logging.getLogger("vllm"), logging.getLogger("turboquant_rocm")
    if server.handlers and not ours.handlers:
        ours.handlers = list(server.handlers)
        ours.setLevel(server.level)
        ours.propagate = server.propagate
    return logging.getLogger("vllm.turboquant_rocm")


def register() -> None:
    """Entry point ``vllm.general_plugins``: put our backend in the place of vLLM's TURBOQUANT. May be called again."""
    settings = Settings.from_environment()
    import vllm
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if problem := version_problem(vllm.__version__):
        if settings.backend == "required":
            raise RuntimeError(problem)
        logger().warning(problem)
        return
    register_backend(AttentionBackendEnum.TURBOQUANT, WATCHED if settings.backend == "off" else BACKEND)
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # vLLM's CPU attention takes a packed cache for a plain one, without an error.
        register_backend(AttentionBackendEnum.CPU_ATTN, GUARDED_CPU)


def cpu_platform() -> str | None:
    """Entry point ``vllm.platform_plugins``: the platform's class path, None unless the environment asks for it."""
    return CPU_PLATFORM if Settings.from_environment().cpu else None
