"""The search for tile and split choices, and the file it writes. Pure: how a candidate is timed is passed in.

One parameter after the other: every value of the space is tried with the others as they are, and the best is kept if
it wins by more than ``min_gain``; passes go on until none changes anything. A candidate that does not compile, or whose
result is wrong, is out of the question and keeps its reason. What is found is one override of
``configs/tuned/<arch>/<backend>.yaml``, for the preset, head size and columns that were timed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from ..presets import parse_yaml
from ..spec import SpecError
from ..tuned import VERSION, parse_tuned

__all__ = [
    "MIN_GAIN",
    "Measured",
    "Search",
    "Trial",
    "header_of",
    "parse_space",
    "render",
    "search",
    "with_override",
]

MIN_GAIN: Final = 0.01

Measured = tuple[Sequence[float] | None, str]
"""Times of the cases in microseconds, or None and the reason why there are none."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate. score: geometric mean of its times over those of the start; None: not usable, see ``note``."""

    values: Mapping[str, Any]
    score: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Search:
    """Where the search ended. values: all choices; changed: those that differ from the start."""

    start: Mapping[str, Any]
    values: Mapping[str, Any]
    score: float
    trials: tuple[Trial, ...]

    @property
    def changed(self) -> dict[str, Any]:
        """Choices that differ from the start."""
        return {name: value for name, value in self.values.items() if value != self.start[name]}


def parse_space(
    data: object, kernel: str, names: Sequence[str], source: str = "bench.yaml"
) -> dict[str, list[Any]]:
    """Values to try by parameter, from the ``tune`` mapping of the profiles' file; ``names``: those there are."""
    section = data.get("tune") if isinstance(data, Mapping) else None
    space = section.get(kernel) if isinstance(section, Mapping) else None
    if not isinstance(space, Mapping) or not space:
        raise SpecError(f"{source} tune {kernel}", space, "a mapping of parameters to lists of values")
    for name, values in space.items():
        if name not in names:
            raise SpecError(f"{source} tune {kernel}", name, "one of " + ", ".join(names))
        if not isinstance(values, list) or not values:
            raise SpecError(f"{source} tune {kernel} {name}", values, "a list of values")
    return {name: list(values) for name, values in space.items()}


def _score(times: Sequence[float], start: Sequence[float]) -> float:
    return math.exp(sum(math.log(a / b) for a, b in zip(times, start, strict=True)) / len(start))


def search(
    start: Mapping[str, Any],
    space: Mapping[str, Sequence[Any]],
    measure: Callable[[Mapping[str, Any]], Measured],
    *,
    passes: int = 2,
    min_gain: float = MIN_GAIN,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> Search:
    """Improve ``start`` over ``space``. RuntimeError if the start itself cannot be timed."""
    base, note = measure(start)
    if base is None:
        raise RuntimeError(f"the present choices cannot be timed: {note}")
    best, score = dict(start), 1.0
    seen: dict[str, Trial] = {repr(sorted(start.items())): Trial(dict(start), 1.0)}
    for _ in range(passes):
        before = score
        for name, values in space.items():
            found = (score, best[name])
            for value in values:
                candidate = {**best, name: value}
                key = repr(sorted(candidate.items()))
                if key not in seen:
                    times, note = measure(candidate)
                    seen[key] = Trial(candidate, None if times is None else _score(times, base), note)
                    on_trial(seen[key])
                reached = seen[key].score
                if reached is not None and reached < found[0] - min_gain:
                    found = (reached, value)
            score, best[name] = found
        if score >= before:
            break
    return Search(dict(start), best, score, tuple(seen.values()))


# ---- the file -----------------------------------------------------------------------------------------------


class _Dumper(yaml.SafeDumper):
    """No aliases: our loader refuses them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def header_of(text: str) -> str:
    """The comment lines at the head of a file, which say what its names mean."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line)
    return "".join(line + "\n" for line in lines)


def with_override(
    data: Mapping[str, Any],
    kernel: str,
    when: Mapping[str, Sequence[Any]],
    use: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> dict[str, Any]:
    """``data`` with one override more, the last and so the strongest; one of the same ``when`` is replaced."""
    made: dict[str, Any] = copy.deepcopy(dict(data))
    when = {name: list(values) for name, values in when.items()}
    kept = [entry for entry in made[kernel].get("overrides", ()) if entry["when"] != when]
    made[kernel]["overrides"] = [*kept, {"when": when, "use": dict(use), "provenance": dict(provenance)}]
    made["version"] = VERSION
    parse_tuned(made, "the new file")
    return made


def render(data: Mapping[str, Any], header: str = "") -> str:
    """The file's text. What the loader would refuse is refused here."""
    text = header + yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, width=118, allow_unicode=True)
    parse_tuned(parse_yaml(text, "the new file"), "the new file")
    return text
