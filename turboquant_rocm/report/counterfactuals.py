"""Which single change would give a layer a faster backend? Found by asking the dispatcher again, not by advice.

A change is a :class:`Question` with one field changed. Candidates come from the values that the failed requirements
name as passing; each is put to the dispatcher, and only what really flips the decision is reported. Changes are
ordered by how much they ask for: a policy, a package, the block size, the dtype, the preset, the tensor-parallel
size, padded heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from ..backends import get_backend
from ..dispatch import Decision, IneligibleError, Policy, resolve
from ..eligibility import Code, Package, Refusal
from ..modelspec import split
from ..pages import quantized_block_bytes
from ..planning import LayerPlan, Question
from ..presets import presets
from ..spec import LayerSpec, SpecError
from ..target import targets

__all__ = ["Change", "changes", "other_targets"]

BLOCK_SIZES: Final = (16, 32, 64, 128)
TP_SIZES: Final = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True, slots=True)
class Change:
    """One change to a question. kind: field of the question, or ``package`` or ``policy``.

    backend: what the layer then gets. how: what to do, as a command-line flag where there is one. bytes_ratio: the
    layer's cache after the change, per token, over before.
    """

    kind: str
    old: Any
    new: Any
    backend: str
    how: str
    question: Question
    bytes_ratio: float | None = None

    def __str__(self) -> str:
        if self.bytes_ratio is None or abs(self.bytes_ratio - 1) < 0.005:
            return self.how
        return f"{self.how} (cache {self.bytes_ratio - 1:+.0%})"


def _policies(
    question: Question, refused: tuple[Refusal, ...], name: str
) -> Iterator[tuple[str, Any, Any, Policy]]:
    """(field, old, new, policy) for every single restriction that could be lifted."""
    if not any(refusal.code is Code.POLICY for refusal in refused) and question.policy.force is None:
        return
    policy = question.policy
    if policy.force is not None and policy.force != name:
        yield "force", policy.force, None, replace(policy, force=None)
    if name in policy.deny:
        yield "deny", name, None, replace(policy, deny=policy.deny - {name})
    if policy.require is not None and name not in policy.require:
        yield "require", ", ".join(sorted(policy.require)), None, replace(policy, require=None)
    if policy.layout is not None:
        yield "layout", policy.layout, None, replace(policy, layout=None)
    if not policy.allow_fallback:
        yield "allow_fallback", False, True, replace(policy, allow_fallback=True)


_FLAGS: Final = {
    "force": "--force",
    "deny": "--deny",
    "require": "--require",
    "layout": "--layout",
    "allow_fallback": "--no-fallback",
}


def _candidates(question: Question, entry: LayerPlan, name: str) -> Iterator[Change]:
    """Changes worth asking about, smallest first."""
    backend = get_backend(name)
    refused = entry.reasons.get(name, ())
    request = question.request(entry.layer)
    failed = [r for r in backend.requires if r.check(request) is not None]

    def passing(*codes: Code) -> list[Any]:
        return [value for r in failed if r.code in codes for value in r.passing(request)]

    variables = dict(question.policy.variables)
    for field, old, new, policy in _policies(question, refused, name):
        how = f"unset {variables[field]}" if field in variables else f"without {_FLAGS[field]}"
        yield Change("policy", f"{field}={old}", new, name, how, replace(question, policy=policy))
    for requirement in failed:
        if isinstance(requirement, Package):
            environment = question.environment.with_(requirement.name)
            wants = requirement.explain()
            old = next((r.got for r in refused if r.code is Code.PACKAGE), "missing")
            yield Change(
                "package", old, wants, name, f"install {wants}", replace(question, environment=environment)
            )
    sizes = sorted({*passing(Code.BLOCK_SIZE), *BLOCK_SIZES}, key=lambda s: (abs(s - question.block_size), s))
    for size in sizes:
        if size != question.block_size:
            yield Change(
                "block_size",
                question.block_size,
                size,
                name,
                f"--block-size {size}",
                replace(question, block_size=size),
            )
    for dtype in passing(Code.DTYPE):
        yield Change(
            "dtype",
            str(entry.layer.dtype),
            str(dtype),
            name,
            f"--dtype {dtype}",
            replace(question, dtype=dtype),
        )
    bits = question.preset.key_bits + question.preset.value_bits
    for preset in sorted(presets().values(), key=lambda p: abs(p.key_bits + p.value_bits - bits)):
        if preset != question.preset:
            short = preset.name.removeprefix("turboquant_")
            yield Change(
                "preset",
                question.preset.name,
                preset.name,
                name,
                f"--preset {short}",
                replace(question, preset=preset),
            )
    for tp in sorted(TP_SIZES, key=lambda n: abs(n - question.tp)):
        if tp != question.tp:
            yield Change("tp", question.tp, tp, name, f"--tp {tp}", replace(question, tp=tp))
    width = max(entry.layer.head_size, entry.layer.value_size)
    for size in sorted(set(passing(Code.HEAD_SIZE, Code.VALUE_HEAD_SIZE, Code.ROTATION))):
        if size > width or (size == width and entry.layer.head_size != entry.layer.value_size):
            yield Change(
                "pad_heads", width, size, name, f"--pad-heads {size}", replace(question, pad_heads=size)
            )


def _after(change: Change, index: int) -> Decision | None:
    """What layer ``index`` gets after ``change``; None if that is no answer."""
    question = change.question
    try:
        decision = resolve(question.request(question.local_layer(index)), question.policy)
        if change.kind == "tp" and decision.backend == change.backend:
            split(question.model, question.tp)  # the other layers have to divide, too
    except SpecError:  # an IneligibleError among them
        return None
    return decision


def _per_token(layer: LayerSpec, layout: str, question: Question) -> float:
    return quantized_block_bytes(layer, layout, question.preset, question.block_size) / question.block_size


def _reckoning(question: Question, name: str) -> Question:
    """``question``, reckoning with backend ``name`` even if its kernels are not in this version."""
    if get_backend(name).ready:
        return question
    return replace(question, policy=replace(question.policy, planned=True))


def other_targets(question: Question, entry: LayerPlan, name: str) -> tuple[str, ...]:
    """Targets on which the layer of ``entry``, with nothing else changed, gets backend ``name``."""
    if entry.layer.kv_shared_with is not None:
        return ()
    if not any(refusal.code is Code.ARCH for refusal in entry.reasons.get(name, ())):
        return ()
    policy = _reckoning(question, name).policy
    found = []
    for arch, target in targets().items():
        try:
            decision = resolve(replace(question.request(entry.layer), target=target), policy)
        except IneligibleError:
            continue
        if decision.backend == name:
            found.append(arch)
    return tuple(found)


def changes(question: Question, entry: LayerPlan, name: str) -> Iterator[Change]:
    """Every single change after which the layer of ``entry`` gets backend ``name``, smallest first.

    A backend whose kernels are not in this version is reckoned with as if they were. Layers that share another's cache
    follow it, and get no suggestions of their own.
    """
    if entry.layer.kv_shared_with is not None:
        return
    if all(refusal.code is Code.KERNELS for refusal in entry.reasons.get(name, ())):
        return  # nothing about the question stands in the way
    question = _reckoning(question, name)
    for change in _candidates(question, entry, name):
        decision = _after(change, entry.layer.index)
        if decision is None or decision.backend != name:
            continue
        ratio = None
        if entry.decision is not None:
            before = _per_token(entry.layer, entry.decision.layout, question)
            after = _per_token(decision.layer, decision.layout, change.question)
            if change.kind in ("preset", "pad_heads"):
                ratio = after / before
        yield replace(change, bytes_ratio=ratio)
