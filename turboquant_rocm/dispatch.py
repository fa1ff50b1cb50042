"""Which backend serves a layer: decided once, before the cache exists, because store writes for decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from .backends import Backend, backends, get_backend
from .eligibility import Code, Refusal, Request
from .presets import get_preset
from .spec import LayerSpec, Preset, SpecError, Target

__all__ = ["Decision", "IneligibleError", "Policy", "decide"]


@dataclass(frozen=True, slots=True)
class Policy:
    """How a user narrows the choice. It can never make an ineligible backend eligible.

    force: only this backend. deny: never these. allow_fallback: False refuses anything but the first backend
    in priority order that is built for the target. layout: only backends that read this layout.
    """

    force: str | None = None
    deny: frozenset[str] = frozenset()
    allow_fallback: bool = True
    layout: str | None = None


class IneligibleError(SpecError):
    """No backend may serve the layer. ``refused`` maps every backend that was asked to all of its reasons."""

    def __init__(self, request: Request, refused: Mapping[str, tuple[Refusal, ...]], what: str) -> None:
        self.request = request
        self.refused = dict(refused)
        reasons = "; ".join(f"{name}: {', '.join(map(str, why)) or 'ok'}" for name, why in refused.items())
        super().__init__(f"layer {request.layer.index}", what, f"an eligible backend: {reasons}")


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer for one layer. ``refused`` holds, for every faster backend, all of its reasons."""

    layer: LayerSpec
    target: Target
    preset: Preset
    block_size: int
    backend: str
    layout: str
    refused: Mapping[str, tuple[Refusal, ...]] = field(default_factory=lambda: MappingProxyType({}), hash=False)


def decide(
    layer: LayerSpec, target: Target, preset: str | Preset, block_size: int, policy: Policy | None = None
) -> Decision:
    """Choose the backend of one layer; IneligibleError lists every backend with every reason."""
    policy = policy or Policy()
    request = Request(layer, target, get_preset(preset), block_size)
    candidates: tuple[Backend, ...]
    if policy.force is not None:
        candidates = (get_backend(policy.force),)
    else:
        candidates = tuple(b for b in backends() if b.automatic)
    refused: dict[str, tuple[Refusal, ...]] = {}
    for backend in candidates:
        why = backend.refusals(request)
        if backend.name in policy.deny:
            why = (*why, Refusal(Code.POLICY, "denied", "not denied by policy"))
        if policy.layout not in (None, backend.layout) and backend.layout != "any":
            why = (*why, Refusal(Code.POLICY, f"layout {backend.layout}", f"layout {policy.layout}"))
        if not why:
            layout = policy.layout or "soa" if backend.layout == "any" else backend.layout
            return Decision(
                layer, target, request.preset, block_size, backend.name, layout, MappingProxyType(refused)
            )
        refused[backend.name] = why
    raise IneligibleError(request, refused, policy.force or "no backend")
