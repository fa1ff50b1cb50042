"""Plans as documents of plain values: what ``--format json`` prints and every other format is made of.

The schema is ``docs/explain_schema.json``; SCHEMA_VERSION is raised whenever a field changes its name or meaning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from .. import __version__
from ..backends import Backend, backends, get_backend
from ..dispatch import Policy
from ..eligibility import Code, OneOf, Refusal, Request, show
from ..options import OPTIONS, CacheOptions, Option, exact_row_bytes
from ..planning import Group, LayerPlan, Plan, Question, Role, ranges
from ..presets import presets
from ..spec import LayerSpec, ModelSpec, SpecError, Target
from .counterfactuals import Change, changes, other_targets

__all__ = ["SCHEMA_VERSION", "matrix_document", "plan_document", "support_document", "unmet"]

SCHEMA_VERSION: Final = 1

Document = dict[str, Any]


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float | type(None)) and not hasattr(value, "value"):
        return value
    return str(value)


def _refusal(refusal: Refusal) -> Document:
    return {
        "code": str(refusal.code),
        "got": _plain(refusal.got),
        "wants": refusal.wants,
        "hint": refusal.hint,
        "text": str(refusal),
    }


def _change(change: Change) -> Document:
    return {
        "kind": change.kind,
        "from": _plain(change.old),
        "to": _plain(change.new),
        "how": change.how,
        "cache_bytes_ratio": None if change.bytes_ratio is None else round(change.bytes_ratio, 4),
        "text": str(change),
    }


def _refused(question: Question, entry: LayerPlan, every_change: bool) -> list[Document]:
    found = []
    for name, why in entry.reasons.items():
        options = []
        for change in changes(question, entry, name):
            options.append(_change(change))
            if not every_change:
                break
        codes = {refusal.code for refusal in why}
        found.append(
            {
                "backend": name,
                "planned": Code.KERNELS in codes,
                "reasons": [_refusal(refusal) for refusal in why],
                "change": options[0] if options else None,
                "other_changes": options[1:],
                "targets": list(other_targets(question, entry, name)),
            }
        )
    return found


def _layer(layer: LayerSpec) -> Document:
    return {
        "kind": str(layer.kind),
        "num_heads": layer.num_heads,
        "num_kv_heads": layer.num_kv_heads,
        "gqa_ratio": layer.gqa_ratio,
        "head_size": layer.head_size,
        "value_head_size": layer.value_size,
        "window": layer.window,
        "chunk": layer.chunk,
        "sinks": layer.sinks,
        "soft_cap": layer.soft_cap,
        "position_bias": layer.position_bias,
        "recurrent_state": layer.recurrent_state,
        "dtype": str(layer.dtype),
        "notes": list(layer.notes),
    }


def _prefill(entry: LayerPlan) -> Document | None:
    if entry.prefill is None:
        return None
    return {
        "route": entry.prefill.route,
        "refused": {name: [_refusal(r) for r in why] for name, why in entry.prefill.refused.items()},
    }


def _options(options: CacheOptions, request: Request) -> Document:
    """Whether a layer can have the options, and what its exact tokens take per sequence."""
    refused = options.refusals(request)
    tokens = 0 if refused else options.exact_tokens
    return {
        "refused": [_refusal(refusal) for refusal in refused],
        "exact_tokens": tokens,
        "exact_bytes": tokens * exact_row_bytes(request.layer, 2),
    }


def _on_request(question: Question, entry: LayerPlan) -> list[str]:
    """Backends made for the target that would serve a layer which no other does, and are chosen only when asked for."""
    if entry.backend is not None or not entry.reasons or question.policy.force is not None:
        return []
    request = question.request(entry.layer)
    return [
        b.name
        for b in backends()
        if b.ready
        and not b.automatic
        and any(isinstance(need, OneOf) and need.code is Code.ARCH for need in b.requires)
        and not b.refusals(request)
    ]


def _group(question: Question, group: Group, every_change: bool, options: CacheOptions) -> Document:
    entry = group.first
    decision = entry.decision
    on_request = _on_request(question, entry)
    return {
        **({"on_request": on_request} if on_request else {}),
        **({"options": _options(options, question.request(entry.layer))} if options and decision else {}),
        "layers": list(group.layers),
        "ranges": ranges(group.layers),
        "count": len(group.layers),
        "role": str(entry.role),
        "reason": entry.reason,
        "layer": _layer(entry.layer),
        "shares_cache": entry.layer.kv_shared_with is not None,
        "backend": entry.backend,
        "layout": decision.layout if decision else None,
        "planned": decision.planned if decision else None,
        "refused": _refused(question, entry, every_change),
        "prefill": _prefill(entry),
        "block_bytes": entry.block_bytes,
        "native_block_bytes": entry.native_bytes,
    }


def _target(target: Target) -> Document:
    return {"arch": target.arch, "vendor": target.vendor, "name": target.name, "local": target.local}


def _model(model: ModelSpec) -> Document:
    return {
        "name": model.name,
        "source": model.source,
        "model_type": model.model_type,
        "layers": len(model.layers),
        "hybrid": model.hybrid,
        "tp": model.tp,
        "max_position": model.max_position,
    }


def _policy(policy: Policy) -> Document:
    return {
        "force": policy.force,
        "deny": sorted(policy.deny),
        "require": None if policy.require is None else sorted(policy.require),
        "allow_fallback": policy.allow_fallback,
        "layout": policy.layout,
        "variables": sorted({variable for _, variable in policy.variables}),
    }


def unmet(plan: Plan, expected: str) -> list[LayerPlan]:
    """Layers that a backend should serve, and that do not get ``expected``. SpecError if it is no backend."""
    get_backend(expected)
    return [e for e in plan.layers if e.role in (Role.QUANTIZED, Role.REFUSED) and e.backend != expected]


def _expect(plan: Plan, expected: str | None) -> Document | None:
    if expected is None:
        return None
    missed = [entry.layer.index for entry in unmet(plan, expected)]
    served = any(entry.backend == expected for entry in plan.layers)
    return {"backend": expected, "met": served and not missed, "missed_layers": missed}


def plan_document(
    plan: Plan,
    *,
    expected: str | None = None,
    every_change: bool = True,
    options: CacheOptions = CacheOptions(),  # noqa: B008 - frozen
) -> Document:
    """The document of one plan. every_change: list all changes that help, not only the smallest. options: of the cache,
    told for every group of layers that a backend serves."""
    question, pages = plan.question, plan.pages
    expect = _expect(plan, expected)
    code = 1 if plan.refused else 2 if expect is not None and not expect["met"] else 0
    return {
        "schema": f"turboquant_rocm.explain.plan/{SCHEMA_VERSION}",
        "version": __version__,
        "model": _model(plan.model),
        "target": _target(question.target),
        "preset": question.preset.name,
        "block_size": question.block_size,
        "policy": _policy(question.policy),
        "backends": [b.name for b in backends() if b.automatic],
        **({"options": str(options)} if options else {}),
        "groups": [_group(question, group, every_change, options) for group in plan.groups],
        "pages": {
            "rule": pages.rule,
            "page_bytes": pages.page_bytes,
            "waste": round(pages.waste, 6),
            "groups": [
                {
                    "what": group.what,
                    "layers": list(group.layers),
                    "block_size": group.block_size,
                    "block_bytes": group.block_bytes,
                    "tokens_per_page": tokens,
                }
                for group, tokens in zip(pages.groups, pages.blocks, strict=True)
            ],
            "suggestions": [
                {
                    "block_sizes": {
                        group.what: size for group, size in zip(pages.groups, s.block_sizes, strict=True)
                    },
                    "waste": round(s.waste, 6),
                    "backends": sorted(set(s.backends)),
                }
                for s in pages.suggestions
            ],
        },
        "bytes": {
            "per_token": round(plan.bytes_per_token, 3),
            "content_per_token": round(plan.content_bytes_per_token, 3),
            "native_per_token": round(plan.native_bytes_per_token, 3),
            "compression": round(plan.compression, 4),
            "workspace": plan.workspace_bytes,
            "memory_gib": question.memory_gib,
            "weights_gib": question.weights_gib or plan.model.weight_gib,
            "tokens": plan.tokens,
            "native_tokens": plan.native_tokens,
        },
        "warnings": [{"code": code_, "text": text} for code_, text in plan.warnings],
        "expect": expect,
        "exit": code,
    }


def _summary(plan: Plan) -> Document:
    """What a model gets on a target, in one cell: backend -> layers."""
    served: dict[str, int] = {}
    planned: dict[str, int] = {}
    for entry in plan.layers:
        if entry.decision is not None:
            served[entry.decision.backend] = served.get(entry.decision.backend, 0) + 1
            if entry.decision.planned:
                planned[entry.decision.planned] = planned.get(entry.decision.planned, 0) + 1
    reasons: list[str] = []
    for group in plan.groups:
        for name, why in group.first.reasons.items():
            if any(refusal.code is Code.ARCH for refusal in why):
                continue
            text = f"{name}: {', '.join(str(r) for r in why)}"
            if text not in reasons and any(refusal.code is not Code.KERNELS for refusal in why):
                reasons.append(text)
    if plan.refused and not reasons:
        reasons = [
            f"{name}: {', '.join(str(r) for r in why)}" for name, why in plan.refused[0].reasons.items()
        ]
    return {
        "backends": served,
        "planned": planned,
        "native": sum(entry.role is Role.NATIVE for entry in plan.layers),
        "no_cache": sum(entry.role is Role.STATE for entry in plan.layers),
        "refused": len(plan.refused),
        "compression": round(plan.compression, 3),
        "reasons": reasons,
    }


def matrix_document(
    rows: Iterable[tuple[ModelSpec, Mapping[str, Plan | SpecError]]], targets: Sequence[Target]
) -> Document:
    """Models x targets. A cell is a summary, or the error that the question met."""
    found: list[Document] = []
    preset = block_size = None
    for model, plans in rows:
        cells = {}
        for arch, answer in plans.items():
            if isinstance(answer, SpecError):
                cells[arch] = {"error": str(answer)}
            else:
                preset, block_size = answer.question.preset.name, answer.question.block_size
                cells[arch] = _summary(answer)
        found.append({"model": _model(model), "cells": cells})
    return {
        "schema": f"turboquant_rocm.explain.matrix/{SCHEMA_VERSION}",
        "version": __version__,
        "preset": preset,
        "block_size": block_size,
        "targets": [_target(target) for target in targets],
        "rows": found,
        "exit": 0,
    }


_OF_PRESETS: Final = {
    Code.KEY_BITS, Code.VALUE_BITS, Code.ROTATED_VALUES, Code.SKETCH, Code.VALUE_GROUP, Code.NORM_CORRECTION
}  # fmt: skip


def _accepts(backend: Backend, code: Code, value: Any, among: Collection[Code] = ()) -> bool:
    """True if with that value of ``code`` some bundled preset passes all requirements of it and of ``among``."""
    looked_at = {code, *among}
    for preset in presets().values():
        request = Request(LayerSpec(0, 1, 1, 128), Target("", "cpu"), preset, 16)
        try:
            changed = request.with_value(code, value)
        except SpecError:  # no such preset
            continue
        if backend.built_for(changed, *looked_at):
            return True
    return False


def _option(option: Option) -> Document:
    """Who serves an option: those that declare its code, or all, where it works around the kernels."""
    code = option.code
    serving = [
        b.name for b in backends() if b.ready and (code is None or _accepts(b, code, True, _OF_PRESETS))
    ]
    return {
        "option": option.written,
        "what": option.what,
        "how": "merged by lse, around the kernels" if code is None else "in the kernels",
        "backends": serving,
        "layer": [{"code": str(r.code), "wants": r.explain()} for r in option.layer],
    }


def support_document(targets: Mapping[str, Target]) -> Document:
    """What the registered backends need, and where they run."""
    found = []
    for backend in backends():
        found.append(
            {
                "backend": backend.name,
                "priority": backend.priority,
                "layout": backend.layout,
                "automatic": backend.automatic,
                "ready": backend.ready,
                "description": backend.description,
                "targets": [arch for arch in targets if _accepts(backend, Code.ARCH, arch)],
                "requires": [{"code": str(r.code), "wants": r.explain()} for r in backend.requires],
            }
        )
    return {
        "schema": f"turboquant_rocm.explain.support/{SCHEMA_VERSION}",
        "version": __version__,
        "targets": [_target(target) for target in targets.values()],
        "facts": [
            {
                "arch": t.arch,
                "name": t.name,
                "wave_size": t.wave_size,
                "lds_bytes": t.lds_bytes,
                "fp8_format": t.fp8_format,
            }
            for t in targets.values()
        ],
        "backends": found,
        "options": [_option(option) for option in OPTIONS],
        "exit": 0,
    }


def value_text(value: Any) -> str:
    """A plain value of a document, for people."""
    return show(value)
