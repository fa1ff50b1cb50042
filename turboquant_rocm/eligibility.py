"""Eligibility as data: requirements that a backend declares, and refusals as values with codes.

A backend never decides in code whether it can run a layer: it lists :class:`Requirement` objects, each bound
to exactly one :class:`Code`. Checking a :class:`Request` against them gives the complete list of
:class:`Refusal` values, never only the first. Programs read ``refusal.code``; people read ``str(refusal)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .codebook import rotation_factors
from .spec import LayerSpec, Preset, SpecError, Target

__all__ = [
    "AtMost",
    "Code",
    "HasRotation",
    "MultipleOf",
    "OneOf",
    "Package",
    "Refusal",
    "Request",
    "Requirement",
    "When",
    "Without",
    "refusals",
]


class Code(str, Enum):
    """Why a backend cannot run a layer. The value is the name of what was looked at."""

    ARCH = "arch"
    PACKAGE = "package"
    LAYER_KIND = "kind"
    KEY_BITS = "key_bits"
    VALUE_BITS = "value_bits"
    NORM_CORRECTION = "norm_correction"
    HEAD_SIZE = "head_size"
    VALUE_HEAD_SIZE = "value_head_size"
    ROTATION = "rotation"
    GQA_RATIO = "gqa_ratio"
    BLOCK_SIZE = "block_size"
    DTYPE = "dtype"
    SINKS = "sinks"
    WINDOW = "window"
    SOFT_CAP = "soft_cap"
    POLICY = "policy"
    COMPILE = "compile"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Request:
    """One question to a backend: this layer, on this target, with this preset and block size."""

    layer: LayerSpec
    target: Target
    preset: Preset
    block_size: int

    def get(self, code: Code) -> Any:
        """The value that ``code`` is about."""
        return _GETTERS[code](self)


_GETTERS: dict[Code, Callable[[Request], Any]] = {
    Code.ARCH: lambda r: r.target.arch,
    Code.LAYER_KIND: lambda r: r.layer.kind,
    Code.KEY_BITS: lambda r: r.preset.key_bits,
    Code.VALUE_BITS: lambda r: r.preset.value_bits,
    Code.NORM_CORRECTION: lambda r: r.preset.norm_correction,
    Code.HEAD_SIZE: lambda r: r.layer.head_size,
    Code.ROTATION: lambda r: r.layer.head_size,
    Code.VALUE_HEAD_SIZE: lambda r: r.layer.value_size,
    Code.GQA_RATIO: lambda r: r.layer.gqa_ratio,
    Code.BLOCK_SIZE: lambda r: r.block_size,
    Code.DTYPE: lambda r: r.layer.dtype,
    Code.SINKS: lambda r: r.layer.sinks,
    Code.WINDOW: lambda r: r.layer.window,
    Code.SOFT_CAP: lambda r: r.layer.soft_cap,
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """One failed check. got: the value that failed; wants: what would pass, for people; hint: what to do."""

    code: Code
    got: Any
    wants: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.code}={_show(self.got)} (wants {self.wants})"
        return f"{text}: {self.hint}" if self.hint else text


def _show(value: Any) -> str:
    return str(value)


@dataclass(frozen=True, slots=True)
class Requirement:
    """Base of all requirements: one code, one check."""

    code: Code

    def check(self, request: Request) -> Refusal | None:
        """A Refusal if ``request`` fails this requirement, else None."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class OneOf(Requirement):
    """The value is one of a fixed list."""

    values: tuple[Any, ...]
    hint: str = ""

    def check(self, request: Request) -> Refusal | None:
        got = request.get(self.code)
        if got in self.values:
            return None
        listed = ", ".join(_show(v) for v in self.values)
        return Refusal(self.code, got, listed if len(self.values) == 1 else f"one of {listed}", self.hint)


@dataclass(frozen=True, slots=True)
class MultipleOf(Requirement):
    """The value is a positive multiple of ``base``."""

    base: int
    hint: str = ""

    def check(self, request: Request) -> Refusal | None:
        got = request.get(self.code)
        if isinstance(got, int) and got > 0 and got % self.base == 0:
            return None
        return Refusal(self.code, got, f"a multiple of {self.base}", self.hint)


@dataclass(frozen=True, slots=True)
class AtMost(Requirement):
    """The value is at most ``limit`` (and at least ``low``)."""

    limit: int
    low: int = 1
    hint: str = ""

    def check(self, request: Request) -> Refusal | None:
        got = request.get(self.code)
        if self.low <= got <= self.limit:
            return None
        return Refusal(self.code, got, f"{self.low} to {self.limit}", self.hint)


@dataclass(frozen=True, slots=True)
class Without(Requirement):
    """The feature is not asked for (the value is None or False)."""

    hint: str = ""

    def check(self, request: Request) -> Refusal | None:
        got = request.get(self.code)
        if got is None or got is False:
            return None
        return Refusal(self.code, got, "none", self.hint)


@dataclass(frozen=True, slots=True)
class HasRotation(Requirement):
    """The head size has an orthonormal rotation; asked only of presets that rotate keys."""

    code: Code = Code.ROTATION

    def check(self, request: Request) -> Refusal | None:
        if request.preset.fp8_keys:
            return None
        try:
            rotation_factors(request.layer.head_size)
        except SpecError as error:
            return Refusal(self.code, error.got, error.wants)
        return None


@dataclass(frozen=True, slots=True)
class When(Requirement):
    """``then`` applies only to requests that pass ``condition``. Its code is that of ``then``."""

    condition: Requirement
    then: Requirement

    def check(self, request: Request) -> Refusal | None:
        if self.condition.check(request) is not None:
            return None
        return self.then.check(request)


@dataclass(frozen=True, slots=True)
class Package(Requirement):
    """A Python package can be imported (and lies in a version range). Probed outside this module.

    ``arches``: the probe is made only for these architectures, before any import; on others the ARCH
    requirement already refuses and the package is not touched.
    """

    name: str = ""
    version: str = ""
    arches: tuple[str, ...] = ()
    hint: str = ""

    def check(self, request: Request) -> Refusal | None:
        from .packages import probe

        if self.arches and request.target.arch not in self.arches:
            return None
        problem = probe(self.name, self.version)
        if problem is None:
            return None
        wants = f"{self.name}{self.version}" if self.version else self.name
        return Refusal(self.code, problem, wants, self.hint)


def refusals(requires: Iterable[Requirement], request: Request) -> tuple[Refusal, ...]:
    """Every refusal of ``request``, in the order of the requirements; empty if it is eligible."""
    found = (requirement.check(request) for requirement in requires)
    return tuple(refusal for refusal in found if refusal is not None)
