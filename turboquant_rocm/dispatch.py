"""Which backend serves a layer: decided once, before the cache exists, because store writes for decode.

:func:`decide` answers for one layer, ``plan`` (:mod:`.planning`) for a model. A policy can only narrow the choice.
The logger ``turboquant_rocm.dispatch`` gets one line per group of equal decisions: INFO if the layer got the fastest
backend built for its target, WARNING if it fell back, with every failed check; and again only when the answer to
the same question changes.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Final

from .backends import Backend, backends, get_backend
from .eligibility import Code, Refusal, Request
from .packages import Environment
from .presets import get_preset, load_yaml
from .spec import LayerSpec, Preset, SpecError, Target

__all__ = [
    "ENVIRONMENT_VARIABLES",
    "Decision",
    "IneligibleError",
    "Policy",
    "all_refusals",
    "decide",
    "fall_back",
    "log_decision",
    "resolve",
]

logger = logging.getLogger(__name__)

ENVIRONMENT_VARIABLES: Final = MappingProxyType(
    {
        "TURBOQUANT_ROCM_POLICY": "name of a policy in configs/policy",
        "TURBOQUANT_ROCM_FORCE": "only this backend",
        "TURBOQUANT_ROCM_DENY": "never these backends, separated by commas",
        "TURBOQUANT_ROCM_REQUIRE": "one of these backends or an error, separated by commas",
        "TURBOQUANT_ROCM_NO_FALLBACK": "1: the fastest backend built for the target, or an error",
    }
)
"""Every environment variable that changes a decision, with what it means."""


def checked_type(name: str, value: object, kind: type, how: str = "") -> None:
    """SpecError unless argument ``name`` is a ``kind``. how: where to get one."""
    if not isinstance(value, kind):
        raise SpecError(name, value, f"a {kind.__name__}{how}")


def check_question(target: object, policy: object, environment: object) -> None:
    """SpecError where the arguments that questions to the dispatcher share are of a wrong type."""
    checked_type("target", target, Target, ", as from get_target('gfx950')")
    checked_type("policy", policy, Policy, ", as from Policy.named('strict')")
    checked_type("environment", environment, Environment)


def _names(text: str) -> frozenset[str]:
    return frozenset(filter(None, (name.strip() for name in text.split(","))))


@dataclass(frozen=True, slots=True)
class Policy:
    """How a user narrows the choice. It can never make an ineligible backend eligible.

    force: only this backend. deny: never these. require: one of these, or an error (None: any). allow_fallback:
    False refuses anything but the first backend in priority order that is built for the target, and for rotated
    values where the preset has them. layout: only backends that read this layout. planned: reckon with backends whose
    kernels are not in this version, for reports about what is to come; what is decided so cannot be bound.
    variables: (field, environment variable) for what :meth:`from_environment` took from there.
    """

    force: str | None = None
    deny: frozenset[str] = frozenset()
    allow_fallback: bool = True
    layout: str | None = None
    require: frozenset[str] | None = None
    planned: bool = False
    variables: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in ("allow_fallback", "planned"):
            if not isinstance(getattr(self, name), bool):
                raise SpecError(f"policy {name}", getattr(self, name), "true or false")
        for name in ("deny", "require"):
            value = getattr(self, name)
            if value is None and name == "require":
                continue
            if not isinstance(value, (list, tuple, set, frozenset)) or not all(
                isinstance(v, str) for v in value
            ):
                raise SpecError(f"policy {name}", value, "a collection of backend names")
            if not value and name == "require":
                raise SpecError("policy require", "nothing", "at least one backend name")
            object.__setattr__(self, name, frozenset(value))
        if self.force is not None and not isinstance(self.force, str):
            raise SpecError("policy force", self.force, "a backend name")
        forced = () if self.force is None else (self.force,)
        for name in sorted({*forced, *self.deny, *(self.require or ())}):
            get_backend(name)
        if self.layout not in (None, "soa", "aos"):
            raise SpecError("policy layout", self.layout, "soa, aos or none")

    def narrowed_by(self, other: Policy) -> Policy:
        """Both policies at once: what either forbids is forbidden. SpecError where no backend could obey both."""
        values: dict[str, Any] = {
            "deny": self.deny | other.deny,
            "allow_fallback": self.allow_fallback and other.allow_fallback,
            "planned": self.planned or other.planned,
            "variables": tuple(dict.fromkeys((*self.variables, *other.variables))),
        }
        for name in ("force", "layout"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if None not in (mine, theirs) and mine != theirs:
                raise SpecError(f"policy {name}", theirs, f"{mine}, which another flag or variable asks for")
            values[name] = mine if theirs is None else theirs
        values["require"] = self.require
        if other.require is not None:
            values["require"] = other.require if self.require is None else self.require & other.require
            if not values["require"]:
                wants = (
                    f"one of {', '.join(sorted(self.require or ()))}, which another flag or variable asks for"
                )
                raise SpecError("policy require", ", ".join(sorted(other.require)), wants)
        return replace(self, **values)

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], source: str = "policy") -> Policy:
        """A policy from plain values (YAML, JSON); SpecError names unknown fields."""
        known = {f.name for f in fields(cls)} - {"planned", "variables"}
        unknown = set(data) - known - {"description"}
        if unknown:
            raise SpecError(source, sorted(unknown), f"only the fields {', '.join(sorted(known))}")
        values = {name: value for name, value in data.items() if name != "description"}
        return cls(**values)

    @classmethod
    def named(cls, name: str) -> Policy:
        """The policy ``configs/policy/<name>.yaml``; SpecError if there is none."""
        if not isinstance(name, str) or not name.replace("-", "").replace("_", "").isalnum():
            raise SpecError("policy", name, "a name of letters, digits and dashes")
        try:
            data = load_yaml("policy", f"{name}.yaml")
        except FileNotFoundError:
            raise SpecError("policy", name, "the name of a file in configs/policy") from None
        return cls.from_mapping(data or {}, f"policy {name}")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Policy:
        """The policy that the ``TURBOQUANT_ROCM_*`` variables ask for; without any, the default one."""
        environ = os.environ if environ is None else environ
        policy = cls()
        if name := environ.get("TURBOQUANT_ROCM_POLICY"):
            named = cls.named(name)
            changed = (f.name for f in fields(cls) if getattr(named, f.name) != getattr(policy, f.name))
            policy = replace(named, variables=tuple((c, "TURBOQUANT_ROCM_POLICY") for c in changed))
        changes: dict[str, Any] = {}
        if force := environ.get("TURBOQUANT_ROCM_FORCE"):
            changes["force"] = force
        if deny := environ.get("TURBOQUANT_ROCM_DENY"):
            changes["deny"] = _names(deny)
        if require := environ.get("TURBOQUANT_ROCM_REQUIRE"):
            changes["require"] = _names(require)
        switch = environ.get("TURBOQUANT_ROCM_NO_FALLBACK", "")
        if switch not in ("", "0", "1"):
            raise SpecError("TURBOQUANT_ROCM_NO_FALLBACK", switch, "0 or 1")
        if switch == "1":
            changes["allow_fallback"] = False
        names = {"allow_fallback": "NO_FALLBACK"}
        variables = tuple((n, f"TURBOQUANT_ROCM_{names.get(n, n.upper())}") for n in changes)
        return policy.narrowed_by(cls(**changes, variables=variables))


class IneligibleError(SpecError):
    """No backend may serve the layer. ``refused`` maps every backend that was asked to all of its reasons."""

    def __init__(self, request: Request, refused: Mapping[str, tuple[Refusal, ...]], what: str) -> None:
        self.request = request
        self.refused = dict(refused)
        reasons = "; ".join(f"{name}: {', '.join(map(str, why)) or 'ok'}" for name, why in refused.items())
        super().__init__(f"layer {request.layer.index}", what, f"an eligible backend: {reasons}")


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer for one layer. ``refused`` holds, for every faster backend, all of its reasons.

    policy, environment: what it was decided under, for :func:`fall_back`. policy None: made by hand, so it is an order.
    """

    layer: LayerSpec
    target: Target
    preset: Preset
    block_size: int
    backend: str
    layout: str
    refused: Mapping[str, tuple[Refusal, ...]] = field(
        default_factory=lambda: MappingProxyType({}), hash=False
    )
    policy: Policy | None = field(default=None, compare=False, repr=False)
    environment: Environment = field(default_factory=Environment, compare=False, repr=False)

    @property
    def planned(self) -> str | None:
        """The faster backend that would serve this layer if its kernels were in this version, if there is one."""
        for name, why in self.refused.items():
            if [refusal.code for refusal in why] == [Code.KERNELS]:
                return name
        return None

    @property
    def fell_back(self) -> bool:
        """True if a faster backend that is built for this target and for values coded like these, there and allowed
        by the policy, was refused."""
        excused = {*_BUILT_FOR, Code.KERNELS, Code.POLICY}
        return any(not {r.code for r in why} & excused for why in self.refused.values())


_BUILT_FOR: Final = (Code.ARCH, Code.ROTATED_VALUES)
"""What a kernel is made for. One for another GPU or other bytes is no faster one that a decision falls back from."""


def _policy_refusals(backend: Backend, policy: Policy, first: Backend | None) -> Iterable[Refusal]:
    """Why ``policy`` forbids ``backend``. first: the fastest backend that is built for target and values."""
    if policy.force not in (None, backend.name):
        yield Refusal(Code.POLICY, f"force {policy.force}", f"force {backend.name}, or no forced backend")
    if backend.name in policy.deny:
        yield Refusal(Code.POLICY, "denied", f"{backend.name} not denied by the policy")
    if policy.require is not None and backend.name not in policy.require:
        yield Refusal(Code.POLICY, "not required", " or ".join(sorted(policy.require)))
    if policy.layout not in (None, backend.layout) and backend.layout != "any":
        yield Refusal(Code.POLICY, f"layout {backend.layout}", f"layout {policy.layout}")
    slower = first is not None and backend.priority < first.priority
    if slower and not policy.allow_fallback and policy.force is None:
        assert first is not None
        yield Refusal(Code.POLICY, "fallback", f"{first.name}, or a policy that allows fallbacks")


def _built_for(backend: Backend, request: Request, policy: Policy) -> bool:
    if not (backend.ready or policy.planned):
        return False
    return backend.built_for(request, *_BUILT_FOR)


def all_refusals(
    request: Request, policy: Policy, failures: Mapping[str, Refusal] = MappingProxyType({})
) -> dict[str, tuple[Refusal, ...]]:
    """For every backend that can be asked, in order of priority, its complete list of reasons.

    With a forced backend the faster ones are asked too: their refusals begin with the policy. failures: what was
    found out about backends by trying them.
    """
    candidates = tuple(b for b in backends() if b.automatic)
    if policy.force is not None:
        forced = get_backend(policy.force)
        candidates = (*(b for b in candidates if b.priority > forced.priority), forced)
    first = next((b for b in candidates if _built_for(b, request, policy)), None)
    found = {}
    for backend in candidates:
        why = [*backend.refusals(request), *_policy_refusals(backend, policy, first)]
        if not (backend.ready or policy.planned):
            why.append(Refusal(Code.KERNELS, "planned", "kernels in this version"))
        if backend.name in failures:
            why.append(failures[backend.name])
        found[backend.name] = tuple(why)
    return found


def resolve(
    request: Request, policy: Policy, failures: Mapping[str, Refusal] = MappingProxyType({})
) -> Decision:
    """:func:`decide` for a ready-made request, without a log line. failures: as in :func:`all_refusals`."""
    refused: dict[str, tuple[Refusal, ...]] = {}
    for name, why in all_refusals(request, policy, failures).items():
        if not why:
            backend = get_backend(name)
            layout = (policy.layout or "soa") if backend.layout == "any" else backend.layout
            return Decision(
                request.layer,
                request.target,
                request.preset,
                request.block_size,
                name,
                layout,
                MappingProxyType(refused),
                policy,
                request.environment,
            )
        refused[name] = why
    if policy.force in refused:  # what was asked for comes first
        refused = {policy.force: refused.pop(policy.force), **refused}
    raise IneligibleError(request, refused, policy.force or "no backend")


def decide(
    layer: LayerSpec,
    target: Target,
    preset: str | Preset,
    block_size: int,
    policy: Policy | None = None,
    *,
    environment: Environment | None = None,
) -> Decision:
    """Choose the backend of one layer; IneligibleError lists every backend with every reason.

    SpecError names an argument that is wrong.

    policy: default :meth:`Policy.from_environment`. environment: the packages there are (default: probed if
    ``target.local``, else taken to be installed).
    """
    policy = Policy.from_environment() if policy is None else policy
    environment = Environment() if environment is None else environment
    checked_type("layer", layer, LayerSpec)
    check_question(target, policy, environment)
    request = Request(layer, target, get_preset(preset), block_size, environment)
    return _answer(request, policy, {})


def fall_back(decision: Decision, failures: Mapping[str, Refusal]) -> Decision:
    """The decision for the same question now that ``failures`` are known: by backend, what trying it has shown.

    Logged like any other answer, so once for all layers of a kind. IneligibleError if the policy allows nothing else,
    or if ``decision`` was made by hand.
    """
    request = Request(
        decision.layer, decision.target, decision.preset, decision.block_size, decision.environment
    )
    if decision.policy is None:
        refused = {name: (why,) for name, why in failures.items()}
        raise IneligibleError(request, refused, decision.backend)
    return _answer(request, decision.policy, failures)


def _answer(request: Request, policy: Policy, failures: Mapping[str, Refusal]) -> Decision:
    """:func:`resolve`, with its log line."""
    layer = request.layer
    question = (
        replace(layer, index=0, notes=(), kv_shared_with=None),
        request.target,
        request.target.local,
        request.preset,
        request.block_size,
        policy,
        frozenset(failures),
    )
    who = f"layer {layer.index}"
    try:
        decision = resolve(request, policy, failures)
    except IneligibleError as error:
        log_decision(question, who, error)
        raise
    log_decision(question, who, decision)
    return decision


# ---- logging --------------------------------------------------------------------------------------------

_REMEMBERED: Final = 4096
_answers: OrderedDict[Any, str] = OrderedDict()


def _reasons(refused: Mapping[str, tuple[Refusal, ...]]) -> str:
    return "; ".join(f"{name}: {', '.join(map(str, why))}" for name, why in refused.items())


def log_decision(question: Any, who: str, answer: Decision | IneligibleError) -> None:
    """Log ``answer`` for ``who``, unless the same (hashable) question got the same answer before."""
    if isinstance(answer, IneligibleError):
        request = answer.request
        chosen, refused, level = "no backend", answer.refused, logging.WARNING
        target, preset, block = request.target, request.preset, request.block_size
    else:
        chosen, refused = f"{answer.backend} ({answer.layout})", dict(answer.refused)
        level = logging.WARNING if answer.fell_back else logging.INFO
        target, preset, block = answer.target, answer.preset, answer.block_size
    text = f"{chosen} on {target}, {preset.name}, block {block}"
    if refused:
        text += f"; refused {_reasons(refused)}"
    previous = _answers.pop(question, None)
    _answers[question] = text
    while len(_answers) > _REMEMBERED:
        _answers.popitem(last=False)
    if text != previous:
        logger.log(level, "%s: %s", who, text)


def __getattr__(name: str) -> Any:
    if name == "plan":  # defined in planning, which imports this module
        from .planning import plan

        return plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
