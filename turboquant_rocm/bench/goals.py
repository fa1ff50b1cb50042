"""Do the measured rows reach the goals of the profiles? Pure arithmetic over :mod:`.records`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from .cases import Goal, Job, Profile
from .records import Row

__all__ = ["Judged", "Measured", "Outcome", "jobs_of", "judge"]

Measured = Mapping[Job, Row]
"""The row that every job gave."""

UNITS: Final = {"percent": " %", "us": " us", "cpu_us": " us", "launches": "", "bf16_ratio": "x"}


@dataclass(frozen=True, slots=True)
class Judged:
    """One case against one goal. value: None where it was not measured, ``why`` then says the reason."""

    job: Job
    goal: Goal
    row: Row | None
    value: float | None
    why: str = ""

    @property
    def verdict(self) -> str:
        """pass, short, or not measured."""
        if self.value is None:
            return "not measured"
        return "pass" if self.goal.met(self.value) else "short"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A goal of a profile over all its cases."""

    profile: str
    goal: Goal
    cases: tuple[Judged, ...]

    @property
    def worst(self) -> Judged:
        """The case that decides: one that was not measured, else the one farthest from the goal."""
        lost = [c for c in self.cases if c.value is None]
        if lost:
            return lost[0]
        return max(self.cases, key=lambda c: self._miss(c.value))

    def _miss(self, value: float | None) -> float:
        if value is None or math.isnan(value):
            return math.inf
        return -value if self.goal.at_most is None else value

    @property
    def verdict(self) -> str:
        """The verdict of the worst case."""
        return self.worst.verdict

    @property
    def target(self) -> str:
        """The requirement for people, such as ``>= 65 %, stretch 75 %`` or ``<= 1.05 of 64/8``."""
        goal = self.goal
        unit = " of it" if goal.against else UNITS[goal.metric]
        sign = "<=" if goal.at_least is None else ">="
        stretch = "" if goal.stretch is None else f", stretch {goal.stretch:g}{unit}"
        return f"{sign} {goal.bound:g}{unit}{stretch}"

    def text(self, judged: Judged) -> str:
        """The measured value for people."""
        if judged.value is None:
            return "-"
        return f"{judged.value:.3g}{' of it' if self.goal.against else UNITS[self.goal.metric]}"


def jobs_of(profiles: Iterable[Profile]) -> tuple[Job, ...]:
    """Every job that the profiles and their goals need, each once."""
    found: dict[Job, None] = {}
    for profile in profiles:
        for job in profile.jobs:
            found[job] = None
            for goal in profile.goals:
                reference = goal.reference(job)
                if reference is not None:
                    found[reference] = None
    return tuple(found)


def _value(goal: Goal, job: Job, measured: Measured) -> tuple[float | None, str]:
    row = measured.get(job)
    if row is None:
        return None, "not run"
    value = row.metric(goal.metric)
    if value is None:
        return None, row.note or f"no {goal.metric}"
    return value, ""


def judge(profiles: Iterable[Profile], measured: Measured) -> tuple[Outcome, ...]:
    """Every goal of every profile over what was measured."""
    outcomes = []
    for profile in profiles:
        for goal in profile.goals:
            cases = []
            for job in profile.jobs:
                value, why = _value(goal, job, measured)
                reference = goal.reference(job)
                if reference is not None and value is not None:
                    base, why = _value(goal, reference, measured)
                    value = value / base if base else None
                    why = f"{reference.case.title()}: {why}" if why else ""
                cases.append(Judged(job, goal, measured.get(job), value, why))
            outcomes.append(Outcome(profile.name, goal, tuple(cases)))
    return tuple(outcomes)
