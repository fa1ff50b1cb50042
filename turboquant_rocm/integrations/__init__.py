"""Bridges to the programs that serve models. Importing this loads none of them; each module asks for its own.

:mod:`.transformers`: a KV cache and an attention function for Hugging Face transformers.
"""

from __future__ import annotations

from typing import Final

from ..packages import installed_version, satisfies

__all__ = ["VERSIONS", "require"]

VERSIONS: Final = {"transformers": ">=5.24,<6"}
"""Versions that an integration is made for; those of the extra of the same name in pyproject.toml."""


def require(name: str) -> str:
    """The installed version of ``name``. ImportError says which versions are supported and how to get one."""
    wants, found = VERSIONS[name], installed_version(name)
    if found is None or not satisfies(found, wants):
        got = "is not installed" if found is None else f"{found} is installed"
        raise ImportError(
            f"turboquant_rocm.integrations.{name} needs {name}{wants}, and {got}: "
            f"pip install 'turboquant-rocm[{name}]'",
            name=name,
        )
    return found
