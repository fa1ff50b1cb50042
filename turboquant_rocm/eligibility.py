"""Eligibility as data: requirements that a backend declares, and refusals as values with codes.

A backend never decides in code whether it can run a layer: it lists :class:`Requirement` objects, each bound
to exactly one :class:`Code`. Checking a :class:`Request` against them gives the complete list of
:class:`Refusal` values, never only the first. Programs read ``refusal.code``; people read ``str(refusal)``.

Every requirement also names values that would pass it (:meth:`Requirement.passing`), from which reports search
for the change that would make a backend eligible, and values that would fail it (:meth:`Requirement.failing`),
from which tests break each requirement alone. A new kind of requirement brings both, and needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from .orders import SMALL_ORDERS, rotation_factors
from .packages import Environment
from .spec import (
    FP8_KEY_BITS,
    ROTATED_VALUES,
    WINDOWED,
    AttentionKind,
    Dtype,
    LayerSpec,
    Preset,
    SpecError,
    Target,
)

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
    "WholeGroups",
    "Without",
    "refusals",
]


class Code(StrEnum):
    """Why a backend cannot run a layer. The value is the name of what was looked at."""

    ARCH = "arch"
    PACKAGE = "package"
    LAYER_KIND = "kind"
    KEY_BITS = "key_bits"
    VALUE_BITS = "value_bits"
    ROTATED_VALUES = "rotated_values"
    SKETCH = "sketch"
    VALUE_GROUP = "value_group"
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
    POSITION_BIAS = "position_bias"
    POLICY = "policy"
    KERNELS = "kernels"
    COMPILE = "compile"


@dataclass(frozen=True, slots=True)
class Request:
    """One question to a backend: this layer, on this target, with this preset and block size.

    environment: the packages there are. By default they are probed where the target is this machine's own
    (``target.local``), and taken to be installed where it is another's.
    """

    layer: LayerSpec
    target: Target
    preset: Preset
    block_size: int
    environment: Environment = field(default_factory=Environment)

    def __post_init__(self) -> None:
        if isinstance(self.block_size, bool) or not isinstance(self.block_size, int) or self.block_size < 1:
            raise SpecError("block_size", self.block_size, "an integer >= 1")

    def get(self, code: Code) -> Any:
        """The value that ``code`` is about; KeyError for codes that no value of the request stands for."""
        return _GETTERS[code](self)

    def with_value(self, code: Code, value: Any) -> Request:
        """A copy in which ``request.get(code) == value`` and, as far as possible, nothing else differs."""
        changed = _SETTERS[code](self, value)
        assert changed.get(code) == value, (code, value, changed)
        return changed


_GETTERS: Final[dict[Code, Callable[[Request], Any]]] = {
    Code.ARCH: lambda r: r.target.arch,
    Code.LAYER_KIND: lambda r: r.layer.kind,
    Code.KEY_BITS: lambda r: r.preset.key_bits,
    Code.VALUE_BITS: lambda r: r.preset.value_bits,
    Code.ROTATED_VALUES: lambda r: r.preset.rotated_values,
    Code.SKETCH: lambda r: r.preset.sketch,
    Code.VALUE_GROUP: lambda r: r.preset.value_group,
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
    Code.POSITION_BIAS: lambda r: r.layer.position_bias,
}


def _set_layer(name: str) -> Callable[[Request, Any], Request]:
    return lambda request, value: replace(request, layer=replace(request.layer, **{name: value}))


def _set_kind(request: Request, value: Any) -> Request:
    window = request.layer.window if value in WINDOWED else None
    if value == AttentionKind.SLIDING and window is None:
        window = 128
    chunk = request.layer.chunk or 8192 if value == AttentionKind.CHUNKED else None
    return replace(request, layer=replace(request.layer, kind=value, window=window, chunk=chunk))


def _set_window(request: Request, value: Any) -> Request:
    kind = request.layer.kind
    if value is not None and kind not in WINDOWED:
        kind = AttentionKind.SLIDING
    if value is None and kind is AttentionKind.SLIDING:
        kind = AttentionKind.FULL
    return replace(request, layer=replace(request.layer, kind=kind, window=value))


def _set_gqa(request: Request, value: Any) -> Request:
    layer = request.layer
    return replace(request, layer=replace(layer, num_heads=layer.num_kv_heads * value))


def _set_preset(name: str) -> Callable[[Request, Any], Request]:
    def change(request: Request, value: Any) -> Request:
        fields: dict[str, Any] = {"name": "custom", name: value}
        if fields.get("rotated_values", request.preset.rotated_values):
            fields["name"] += ROTATED_VALUES
        if name == "key_bits" and value == FP8_KEY_BITS:
            fields |= {"norm_correction": False, "sketch": False}
        if name == "norm_correction" and value:
            fields["sketch"] = False
        if name in ("norm_correction", "sketch") and value and request.preset.fp8_keys:
            fields["key_bits"] = 4
        if name == "sketch" and value:
            fields["norm_correction"] = False
        if name == "rotated_values" and value:
            fields["value_group"] = None
        if name == "value_group" and value is not None:
            fields |= {"rotated_values": False, "name": "custom"}
        return replace(request, preset=replace(request.preset, **fields))

    return change


_SETTERS: Final[dict[Code, Callable[[Request, Any], Request]]] = {
    Code.ARCH: lambda r, v: replace(r, target=replace(r.target, arch=v)),
    Code.LAYER_KIND: _set_kind,
    Code.KEY_BITS: _set_preset("key_bits"),
    Code.VALUE_BITS: _set_preset("value_bits"),
    Code.ROTATED_VALUES: _set_preset("rotated_values"),
    Code.SKETCH: _set_preset("sketch"),
    Code.VALUE_GROUP: _set_preset("value_group"),
    Code.NORM_CORRECTION: _set_preset("norm_correction"),
    Code.HEAD_SIZE: _set_layer("head_size"),
    Code.ROTATION: _set_layer("head_size"),
    Code.VALUE_HEAD_SIZE: _set_layer("value_head_size"),
    Code.GQA_RATIO: _set_gqa,
    Code.BLOCK_SIZE: lambda r, v: replace(r, block_size=v),
    Code.DTYPE: _set_layer("dtype"),
    Code.SINKS: _set_layer("sinks"),
    Code.WINDOW: _set_window,
    Code.SOFT_CAP: _set_layer("soft_cap"),
    Code.POSITION_BIAS: _set_layer("position_bias"),
}

# Values to try where a requirement accepts or refuses by a list: whatever a request may hold.
_UNIVERSE: Final[dict[Code, tuple[Any, ...]]] = {
    Code.ARCH: ("gfx90a", "gfx942", "gfx950", "gfx1100", "sm_80", "sm_90", "cpu", "gfx000"),
    Code.LAYER_KIND: tuple(AttentionKind),
    Code.KEY_BITS: (2, 3, 4, FP8_KEY_BITS),
    Code.VALUE_BITS: (2, 3, 4),
    Code.ROTATED_VALUES: (True, False),
    Code.SKETCH: (True, False),
    Code.VALUE_GROUP: (None, 32, 64, 4096),
    Code.NORM_CORRECTION: (True, False),
    Code.DTYPE: tuple(Dtype),
    Code.SINKS: (True, False),
    Code.WINDOW: (None, 128),
    Code.SOFT_CAP: (None, 30.0),
    Code.POSITION_BIAS: (None, "alibi"),
    Code.GQA_RATIO: (1, 2, 3, 5, 7, 11, 37, 64, 129),
    Code.BLOCK_SIZE: (16, 17, 24, 32, 48, 1, 528, 1 << 16),
    Code.HEAD_SIZE: (128, 64, 256, 96, 72, 100, 4096),
    Code.VALUE_HEAD_SIZE: (128, 64, 256, 96, 72, 100, 4096),
    Code.ROTATION: (72, 100, 44),
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """One failed check. got: the value that failed; wants: what would pass, for people; hint: what to do."""

    code: Code
    got: Any
    wants: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.code}={show(self.got)} (wants {self.wants})"
        return f"{text}: {self.hint}" if self.hint else text


def show(value: Any) -> str:
    """A value as reports print it: ``yes``/``no`` for booleans, ``none`` for None."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


@dataclass(frozen=True, slots=True)
class Requirement:
    """Base of all requirements: one code, one check."""

    code: Code

    def check(self, request: Request) -> Refusal | None:
        """A Refusal if ``request`` fails this requirement, else None."""
        raise NotImplementedError

    def passing(self, request: Request) -> Iterable[Any]:
        """Values of ``code`` that would pass, nearest to the request's own first. May be incomplete."""
        return ()

    def failing(self, request: Request) -> Iterable[Request]:
        """Requests that differ from ``request`` in what this requirement looks at, and fail it."""
        for value in _UNIVERSE.get(self.code, ()):
            try:
                changed = request.with_value(self.code, value)
            except SpecError:
                continue
            if self.check(changed) is not None:
                yield changed

    def explain(self) -> str:
        """What the requirement wants, for the support matrix."""
        raise NotImplementedError


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(show(v) for v in values)


@dataclass(frozen=True, slots=True)
class OneOf(Requirement):
    """The value is one of a fixed list."""

    values: tuple[Any, ...]
    hint: str = ""

    def check(self, request: Request) -> Refusal | None:
        got = request.get(self.code)
        if got in self.values:
            return None
        return Refusal(self.code, got, self.explain(), self.hint)

    def passing(self, request: Request) -> Iterable[Any]:
        got = request.get(self.code)
        if isinstance(got, int) and not isinstance(got, bool):
            return sorted(self.values, key=lambda v: (abs(v - got), v))
        return self.values

    def explain(self) -> str:
        return _listed(self.values) if len(self.values) == 1 else f"one of {_listed(self.values)}"


@dataclass(frozen=True, slots=True)
class MultipleOf(Requirement):
    """The value is a positive multiple of ``base``."""

    base: int
    hint: str = ""

    def check(self, request: Request) -> Refusal | None:
        got = request.get(self.code)
        if isinstance(got, int) and got > 0 and got % self.base == 0:
            return None
        return Refusal(self.code, got, self.explain(), self.hint)

    def passing(self, request: Request) -> Iterable[Any]:
        below = request.get(self.code) // self.base * self.base
        return [v for v in (below + self.base, below) if v > 0]

    def explain(self) -> str:
        return f"a multiple of {self.base}"


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
        return Refusal(self.code, got, self.explain(), self.hint)

    def passing(self, request: Request) -> Iterable[Any]:
        return [self.limit] if request.get(self.code) > self.limit else [self.low]

    def failing(self, request: Request) -> Iterable[Request]:
        multiple = self.limit & -self.limit  # stays a multiple of what the limit is a multiple of
        for value in (self.limit + multiple, self.low - 1, self.limit + 1):
            try:
                yield request.with_value(self.code, value)
            except SpecError:
                continue

    def explain(self) -> str:
        return f"{self.low} to {self.limit}"


@dataclass(frozen=True, slots=True)
class Without(Requirement):
    """The feature is not asked for (the value is None or False)."""

    hint: str = ""

    def check(self, request: Request) -> Refusal | None:
        got = request.get(self.code)
        if got is None or got is False:
            return None
        return Refusal(self.code, got, self.explain(), self.hint)

    def explain(self) -> str:
        return "none"


@dataclass(frozen=True, slots=True)
class WholeGroups(Requirement):
    """Groups of values fill a value vector."""

    code: Code = Code.VALUE_GROUP

    def check(self, request: Request) -> Refusal | None:
        group = request.preset.value_group
        if group is None or request.layer.value_size % group == 0:
            return None
        return Refusal(self.code, group, self.explain())

    def passing(self, request: Request) -> Iterable[Any]:
        return [None]

    def explain(self) -> str:
        return "none, or a divisor of the value head size"


@dataclass(frozen=True, slots=True)
class HasRotation(Requirement):
    """What the preset rotates has an orthonormal rotation: keys of this head size, values of theirs."""

    code: Code = Code.ROTATION

    def check(self, request: Request) -> Refusal | None:
        layer, preset = request.layer, request.preset
        sizes = [] if preset.fp8_keys else [layer.head_size]
        sizes += [layer.value_size] if preset.rotated_values else []
        for size in sizes:
            try:
                rotation_factors(size)
            except SpecError as error:
                return Refusal(self.code, error.got, self.explain())
        return None

    def passing(self, request: Request) -> Iterable[Any]:
        sizes = {m << k for m in SMALL_ORDERS for k in range(13) if m << k <= 4096}
        return sorted(size for size in sizes if size >= request.layer.head_size)

    def failing(self, request: Request) -> Iterable[Request]:
        if request.preset.fp8_keys:
            request = request.with_value(Code.KEY_BITS, 4)
        return Requirement.failing(self, request)

    def explain(self) -> str:
        return "a head size with an exact rotation: a power of two, or 12, 20 or 28 times one"


@dataclass(frozen=True, slots=True)
class When(Requirement):
    """``then`` applies only to requests that pass ``condition``. Its code is that of ``then``."""

    code: Code = field(init=False)
    condition: Requirement
    then: Requirement

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", self.then.code)

    def check(self, request: Request) -> Refusal | None:
        if self.condition.check(request) is not None:
            return None
        return self.then.check(request)

    def passing(self, request: Request) -> Iterable[Any]:
        return self.then.passing(request)

    def failing(self, request: Request) -> Iterable[Request]:
        if self.condition.check(request) is None:
            yield from self.then.failing(request)
            return
        for value in self.condition.passing(request):
            try:
                yield from self.then.failing(request.with_value(self.condition.code, value))
            except SpecError:
                continue

    def explain(self) -> str:
        return f"{self.then.explain()} where {self.condition.code} is {self.condition.explain()}"


@dataclass(frozen=True, slots=True)
class Package(Requirement):
    """A Python package can be imported, and lies in a version range. Probed by :mod:`.packages`.

    version: comma-separated bounds, ``">=0.5,<0.6"``. arches: the probe is made only for these architectures,
    before any import; on others the ARCH requirement already refuses and the package is not touched.
    isolated: import it in a subprocess, because its failures can end the process.
    """

    name: str = ""
    version: str = ""
    arches: tuple[str, ...] = ()
    isolated: bool = False
    hint: str = ""

    def check(self, request: Request) -> Refusal | None:
        if self.arches and request.target.arch not in self.arches:
            return None
        problem = request.environment.problem(
            self.name, self.version, local=request.target.local, isolated=self.isolated
        )
        if problem is None:
            return None
        return Refusal(self.code, problem, self.explain(), self.hint)

    def passing(self, request: Request) -> Iterable[Any]:
        return [self.explain()]

    def failing(self, request: Request) -> Iterable[Request]:
        if self.check(request) is None:
            yield replace(request, environment=request.environment.without(self.name))

    def explain(self) -> str:
        return f"{self.name}{self.version}" if self.version else self.name


def refusals(requires: Iterable[Requirement], request: Request) -> tuple[Refusal, ...]:
    """Every refusal of ``request``, in the order of the requirements; empty if it is eligible."""
    found = (requirement.check(request) for requirement in requires)
    return tuple(refusal for refusal in found if refusal is not None)
