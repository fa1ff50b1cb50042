"""What is measured: one :class:`Case` is one call of a known shape; a profile in ``configs/bench.yaml`` names many.

Letters of shapes: docs/design.md. Nothing here loads a framework.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

from ..backends import get_backend
from ..modelspec import load_model
from ..presets import get_preset, load_yaml, parse_yaml, serving_names
from ..spec import AttentionKind, Dtype, LayerSpec, SpecError, checked_int

__all__ = [
    "LENGTHS",
    "OPERATIONS",
    "Case",
    "Goal",
    "Job",
    "Profile",
    "parse_heads",
    "parse_profiles",
    "parse_shape",
    "read_profiles",
]

OPERATIONS: Final = ("decode", "store", "dequantize", "prefill")
LENGTHS: Final = ("full", "log_uniform", "mean")
METRICS: Final = ("percent", "us", "cpu_us", "launches", "bf16_ratio")
"""What a goal can be about: percent of the measured ceiling, time of a call in a graph, CPU time of an eager call,
kernels per call, time of the bf16 baseline over this one."""

SHORTEST: Final = 128  # shortest sequence of a log-uniform batch
_MOST: Final = 1 << 24
_SEED: Final = 0
_BF16_PRESET: Final = "turboquant_k8v4"  # stands in a baseline's case, where it means nothing


@dataclass(frozen=True, slots=True)
class Case:
    """One call to be timed.

    decode: ``batch`` sequences of up to ``context`` cached tokens, the last ``query_len`` of each being queries.
    store: ``context`` new tokens for each of ``batch`` sequences. dequantize: ``batch`` sequences of ``context``
    tokens to the layer's dtype. prefill: ``query_len`` new tokens after ``context`` cached ones, per sequence.

    lengths: ``full`` (all of ``context`` tokens), ``log_uniform`` (between 128 and ``context``, evenly spaced in the
    logarithm) or ``mean`` (all as long as the mean of the log-uniform ones). preset: its full name.
    """

    operation: str
    preset: str
    num_heads: int = 64
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    dtype: str = "bf16"
    batch: int = 1
    context: int = 4096
    lengths: str = "full"
    query_len: int = 1
    window: int | None = None
    sinks: bool = False
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise SpecError("operation", self.operation, "one of " + ", ".join(OPERATIONS))
        object.__setattr__(self, "preset", get_preset(self.preset).name)
        for name in ("block_size", "batch", "context", "query_len"):
            checked_int(name, getattr(self, name), 1, _MOST)
        if self.lengths not in LENGTHS:
            raise SpecError("lengths", self.lengths, "one of " + ", ".join(LENGTHS))
        if self.lengths != "full" and (self.operation != "decode" or self.context < SHORTEST):
            raise SpecError("lengths", self.lengths, f"full, or decode with a context of {SHORTEST} or more")
        if self.dtype not in (str(Dtype.BF16), str(Dtype.FP16)):
            raise SpecError("dtype", self.dtype, "bf16 or fp16")
        if self.operation == "decode" and self.query_len > min(self.lens()):
            raise SpecError("query_len", self.query_len, f"at most the shortest sequence, {min(self.lens())}")
        if self.operation in ("store", "dequantize") and self.query_len != 1:
            raise SpecError("query_len", self.query_len, f"1: {self.operation} has no queries")
        layer = self.layer()  # the rest is checked there
        object.__setattr__(self, "dtype", str(layer.dtype))

    def layer(self) -> LayerSpec:
        """The layer that the call belongs to."""
        return LayerSpec(
            0,
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            kind=AttentionKind.FULL if self.window is None else AttentionKind.SLIDING,
            window=self.window,
            sinks=self.sinks,
            soft_cap=self.soft_cap,
            dtype=Dtype(self.dtype),
        )

    def lens(self) -> tuple[int, ...]:
        """Cached tokens of each sequence, the same in every run; a log-uniform batch is in random order."""
        if self.lengths == "full":
            return (self.context,) * self.batch
        ratio = self.context / SHORTEST
        found = [round(SHORTEST * ratio ** ((i + 0.5) / self.batch)) for i in range(self.batch)]
        if self.lengths == "mean":
            return (round(sum(found) / self.batch),) * self.batch
        random.Random(_SEED).shuffle(found)
        return tuple(found)

    def tokens_read(self) -> int:
        """Cached tokens that at least one query sees, over all sequences."""
        if self.window is None or self.operation not in ("decode", "prefill"):
            return sum(self.lens())
        if self.operation == "prefill":  # the first query sees window - 1 tokens before it
            return sum(min(n, self.window - 1) for n in self.lens())
        return sum(min(n, self.window + self.query_len - 1) for n in self.lens())

    def raw_bytes(self) -> int:
        """Bytes of the keys and values of :meth:`tokens_read` in the 16-bit dtype."""
        return self.tokens_read() * self.num_kv_heads * self.raw_slot_bytes

    @property
    def raw_slot_bytes(self) -> int:
        """Bytes of a key and a value of one token and head in the 16-bit dtype."""
        return 4 * self.head_size

    def bytes_moved(self, slot_bytes: int) -> int:
        """Bytes that this operation has to read or write at least once; ``slot_bytes``: packed token and head.

        decode: the packed tokens that are seen. store: raw keys and values read, slots written; dequantize the
        reverse. prefill: packed history, raw chunk, queries and outputs.
        """
        packed = self.tokens_read() * self.num_kv_heads * slot_bytes
        if self.operation == "decode":
            return packed
        if self.operation in ("store", "dequantize"):
            return packed + self.raw_bytes()
        chunk = self.batch * self.query_len * self.head_size * 2
        return packed + 2 * chunk * (self.num_heads + self.num_kv_heads)

    @property
    def shape(self) -> Case:
        """The same for all presets: what the bf16 baselines of this case are filed under."""
        return replace(self, preset=_BF16_PRESET)

    @property
    def ceiling(self) -> str:
        """Which measured ceiling the bytes are compared with: ``read`` or ``copy``."""
        return "copy" if self.operation in ("store", "dequantize") else "read"

    def title(self) -> str:
        """The shape for people: what every case has, then only what is unusual."""
        parts = [f"{self.batch} x {self.context}", f"{self.num_heads}/{self.num_kv_heads}"]
        unusual: Iterable[tuple[bool, str]] = (
            (self.head_size != 128, f"D={self.head_size}"),
            (self.block_size != 16, f"block {self.block_size}"),
            (self.dtype != "bf16", self.dtype),
            (self.lengths != "full", self.lengths.replace("_", "-")),
            (self.query_len != 1, f"{self.query_len} queries"),
            (self.window is not None, f"window {self.window}"),
            (self.sinks, "sinks"),
            (self.soft_cap is not None, f"soft cap {self.soft_cap}"),
        )
        return ", ".join(parts + [text for there, text in unusual if there])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Case:
        """The inverse of :meth:`to_dict`; SpecError names missing and unknown fields."""
        names = {f.name for f in fields(cls)}
        if not isinstance(data, Mapping) or set(data) != names:
            raise SpecError("case", sorted(data, key=str), f"exactly the fields {sorted(names)}")
        return cls(**data)


@dataclass(frozen=True, slots=True)
class Job:
    """A case and the backend that runs it; None: the one that the dispatcher chooses here."""

    case: Case
    backend: str | None = None

    def __post_init__(self) -> None:
        if self.backend is not None:
            get_backend(self.backend)


@dataclass(frozen=True, slots=True)
class Goal:
    """What every case of a profile should reach.

    metric: one of :data:`METRICS`. against: fields of the case (or ``backend``) that make the case it is compared
    with; the value is then the quotient of the two metrics. at_least, at_most: exactly one of them. stretch: what
    would be better still, for people. says: the requirement in words.
    """

    metric: str
    at_least: float | None = None
    at_most: float | None = None
    stretch: float | None = None
    against: tuple[tuple[str, Any], ...] = ()
    says: str = ""

    @property
    def bound(self) -> float:
        """The number to be reached."""
        bound = self.at_most if self.at_least is None else self.at_least
        assert bound is not None
        return bound

    def met(self, value: float) -> bool:
        """True if ``value`` reaches the goal; NaN does not."""
        return value >= self.bound if self.at_most is None else value <= self.bound

    def reference(self, job: Job) -> Job | None:
        """The job that ``job`` is compared with, None if the goal is absolute."""
        if not self.against:
            return None
        changes = dict(self.against)
        backend = changes.pop("backend", job.backend)
        return Job(replace(job.case, **changes), backend)


@dataclass(frozen=True, slots=True)
class Profile:
    """A named set of jobs with its goals."""

    name: str
    jobs: tuple[Job, ...]
    goals: tuple[Goal, ...] = ()
    about: str = ""


# ---- text and YAML --------------------------------------------------------------------------------------


def parse_shape(text: object, where: str = "shape") -> tuple[int, int]:
    """``32x4096`` -> (batch, context)."""
    match = re.fullmatch(r"(\d{1,8})\s*x\s*(\d{1,8})", text) if isinstance(text, str) else None
    if match is None:
        raise SpecError(where, text, "BATCHxCONTEXT, such as 32x4096")
    batch, context = int(match.group(1)), int(match.group(2))
    return checked_int(where, batch, 1, _MOST), checked_int(where, context, 1, _MOST)


def parse_heads(text: object, where: str = "heads") -> tuple[int, int]:
    """``64/8`` -> (num_heads, num_kv_heads)."""
    match = re.fullmatch(r"(\d{1,5})\s*/\s*(\d{1,5})", text) if isinstance(text, str) else None
    if match is None:
        raise SpecError(where, text, "QUERY_HEADS/KV_HEADS, such as 64/8")
    return int(match.group(1)), int(match.group(2))


_SINGLE: Final = {  # profile key -> field of Case
    "head_size": "head_size",
    "block_size": "block_size",
    "dtype": "dtype",
    "lengths": "lengths",
    "query_len": "query_len",
    "window": "window",
    "sinks": "sinks",
    "soft_cap": "soft_cap",
}
_LISTS: Final = ("preset", "heads", "shape", *_SINGLE)
_OTHERS: Final = ("operation", "about", "backend", "model", "tp", "goals")
_BY_MODEL: Final = ("heads", "head_size", "window", "sinks", "soft_cap", "dtype")


def _listed(where: str, value: object) -> list[Any]:
    found = value if isinstance(value, list) else [value]
    if not found:
        raise SpecError(where, value, "a value or a list of at least one")
    return found


def _known(where: str, data: object, known: Iterable[str]) -> Mapping[str, Any]:
    known = sorted(known)
    if not isinstance(data, Mapping):
        raise SpecError(where, data, "a mapping with fields of " + ", ".join(known))
    unknown = [key for key in data if key not in known]
    if unknown:
        raise SpecError(where, unknown, "only the fields " + ", ".join(known))
    return data


def _geometries(where: str, data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Distinct layer geometries: those of ``model``, or the product of the lists."""
    if "model" in data:
        clash = sorted(set(_BY_MODEL) & set(data))
        if clash:
            raise SpecError(where, clash, "either model, or the fields that it decides")
        tp = checked_int(f"{where}: tp", data.get("tp", 1), 1, 1024)
        found: list[dict[str, Any]] = []
        for layer in load_model(data["model"]).layers:
            if (
                layer.kind not in (AttentionKind.FULL, AttentionKind.SLIDING)
                or layer.value_size != layer.head_size
            ):
                continue
            geometry = {
                "num_heads": max(1, layer.num_heads // tp),
                "num_kv_heads": max(1, layer.num_kv_heads // tp),
                "head_size": layer.head_size,
                "window": layer.window,
                "sinks": layer.sinks,
                "soft_cap": layer.soft_cap,
            }
            if geometry not in found:
                found.append(geometry)
        if not found:
            raise SpecError(f"{where}: model", data["model"], "a model with full or sliding attention layers")
        return found
    if "tp" in data:
        raise SpecError(f"{where}: tp", data["tp"], "nothing: it needs a model")
    keys = [key for key in _SINGLE if key in data]
    heads = [parse_heads(h, f"{where}: heads") for h in _listed(f"{where}: heads", data.get("heads", "64/8"))]
    found = []
    for hq, hk in heads:
        for values in product(*(_listed(f"{where}: {key}", data[key]) for key in keys)):
            found.append({"num_heads": hq, "num_kv_heads": hk, **dict(zip(keys, values, strict=True))})
    return found


def _goal(where: str, data: object) -> Goal:
    data = _known(where, data, (f.name for f in fields(Goal)))
    if data.get("metric") not in METRICS:
        raise SpecError(f"{where}: metric", data.get("metric"), "one of " + ", ".join(METRICS))
    bounds = [data.get(name) for name in ("at_least", "at_most") if name in data]
    if len(bounds) != 1:
        raise SpecError(where, sorted(data), "exactly one of at_least and at_most")
    for name in ("at_least", "at_most", "stretch"):
        value = data.get(name)
        if name in data and (
            isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12
        ):
            raise SpecError(f"{where}: {name}", value, "a number > 0")
    against = _known(
        f"{where}: against", data.get("against", {}), ("backend", *(f.name for f in fields(Case)))
    )
    if not isinstance(data.get("says", ""), str):
        raise SpecError(f"{where}: says", data["says"], "a text")
    return Goal(**{**data, "against": tuple(against.items())})


def _profile(name: str, data: object, source: str) -> Profile:
    where = f"{source} profile {name}"
    data = _known(where, data, (*_LISTS, *_OTHERS))
    try:
        presets = _listed("preset", data.get("preset", list(serving_names())))
        shapes = [parse_shape(s) for s in _listed("shape", data.get("shape", "1x4096"))]
        rest = {}
        if "model" in data:
            rest = {k: _listed(k, data[k]) for k in _SINGLE if k in data and k not in _BY_MODEL}
        jobs = []
        for geometry, (batch, context) in product(_geometries("profile", data), shapes):
            for values in product(*rest.values()):
                more = {**geometry, **dict(zip(rest, values, strict=True))}
                for preset in presets:
                    case = Case(data.get("operation", ""), preset, batch=batch, context=context, **more)
                    jobs.append(Job(case, data.get("backend")))
        goals = tuple(_goal(f"goal {i}", g) for i, g in enumerate(data.get("goals") or ()))
        for goal, job in product(goals, jobs):
            goal.reference(job)  # must be a case, too
    except SpecError as error:
        raise SpecError(f"{where}: {error.field}", error.got, error.wants) from None
    return Profile(name, tuple(dict.fromkeys(jobs)), goals, str(data.get("about", "")))


def parse_profiles(data: object, source: str = "bench.yaml") -> dict[str, Profile]:
    """Profiles by name from the parsed YAML; SpecError names the profile and the field that is wrong."""
    data = _known(source, data, ("version", "profiles", "tune"))
    if data.get("version") != 1:
        raise SpecError(f"{source} version", data.get("version"), "1")
    profiles = data.get("profiles")
    if not isinstance(profiles, Mapping) or not profiles:
        raise SpecError(f"{source} profiles", profiles, "a mapping of names to profiles")
    return {str(name): _profile(str(name), value, source) for name, value in profiles.items()}


def read_profiles(path: Path | None = None) -> tuple[Mapping[str, Any], str]:
    """(parsed file, its name) of ``path``, default ``configs/bench.yaml``; SpecError names what is wrong in it."""
    if path is None:
        data, source = load_yaml("bench.yaml"), "bench.yaml"
    else:
        source = path.name
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError("--profiles", str(path), f"a readable file ({error})") from None
        data = parse_yaml(text, source)
    parse_profiles(data, source)
    return data, source
