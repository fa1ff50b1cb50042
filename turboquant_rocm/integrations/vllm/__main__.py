"""``python -m turboquant_rocm.integrations.vllm``: is the plugin in force here? Run it where the server will run.

Exit status: 0 it is (or was switched off on purpose), 1 it is not, with every reason.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec

from ...spec import SpecError
from . import BACKEND, ENVIRONMENT_VARIABLES, WATCHED, Settings, cpu_platform, register, version_problem

CPU = tuple(ENVIRONMENT_VARIABLES)[1]

GROUPS = {"vllm.general_plugins": register, "vllm.platform_plugins": cpu_platform}


def problems() -> Iterator[str]:
    """What keeps vLLM from running our backend in this environment, in the order in which it happens."""
    try:
        settings = Settings.from_environment()
    except SpecError as error:
        yield str(error)
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    for group, function in GROUPS.items():
        ours = [
            p for p in entry_points(group=group) if p.value == f"{function.__module__}:{function.__name__}"
        ]
        if not ours:
            yield (
                f"no entry point of turboquant_rocm in {group}: reinstall the package, and look for an old "
                f"turboquant_rocm.egg-info in a folder of sys.path, which would hide it ({sys.path[0] or os.getcwd()} "
                "comes first)"
            )
        elif (
            allowed is not None
            and ours[0].name not in allowed.split(",")
            and (function is register or settings.cpu)
        ):
            yield f"VLLM_PLUGINS={allowed} leaves out {ours[0].name}"
    if find_spec("vllm") is None:
        yield "vLLM is not installed"
        return
    import vllm

    if problem := version_problem(vllm.__version__):
        yield problem
        return
    if settings.cpu and os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        yield "VLLM_TARGET_DEVICE=cpu makes vLLM ignore platform plugins: unset it"
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and not settings.cpu:
        yield f"this is vLLM's CPU platform, which serves turboquant dtypes with {CPU}=reference only"
    register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    path = AttentionBackendEnum.TURBOQUANT.get_path()
    if path not in (BACKEND, WATCHED):
        yield f"vLLM's TURBOQUANT is {path}, not {BACKEND}"
        return
    try:
        AttentionBackendEnum.TURBOQUANT.get_class()
    except Exception as error:  # whatever it is, vLLM would only log it and go on
        yield f"{path} does not import: {type(error).__name__}: {error}"


def main() -> int:
    """Print the verdict; returns the exit status."""
    for name, meaning in ENVIRONMENT_VARIABLES.items():
        print(f"{name}={os.environ.get(name, '')}  ({meaning})")
    found = list(problems())
    for text in found:
        print(f"problem: {text}")
    if not found:
        off = Settings.from_environment().backend == "off"
        print(
            "vLLM's own backend serves, and our plan is logged"
            if off
            else "turboquant dtypes run on turboquant_rocm"
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
