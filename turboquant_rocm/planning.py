"""A plan: the decision of every layer of a model, and what follows from all of them together.

    plan(load_model("qwen3-32b"), get_target("gfx950"), "turboquant_4bit_nc", block_size=16)

Beside the decisions a plan says which layers stay native and why, which attention runs the prompt, what a block of
each group of layers costs and whether one page size serves them, what the whole model's cache costs per token, how
many tokens fit a memory budget, and what to be careful about.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from .backends import get_backend
from .dispatch import (
    Decision,
    IneligibleError,
    Policy,
    check_question,
    checked_type,
    log_decision,
    resolve,
)
from .eligibility import Code, Refusal, Request
from .modelspec import pad_heads as pad_model_heads
from .modelspec import split
from .packages import Environment
from .pages import PageGroup, Pages, native_block_bytes, quantized_block_bytes, unify
from .prefill import PrefillChoice, prefill_route
from .presets import get_preset
from .spec import (
    AttentionKind,
    Dtype,
    LayerSpec,
    ModelSpec,
    Preset,
    SpecError,
    Target,
    checked_int,
    is_number,
)

__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "DEFAULT_PRESET",
    "Group",
    "LayerPlan",
    "Plan",
    "Question",
    "Role",
    "answer_question",
    "plan",
    "ranges",
]

DEFAULT_PRESET: Final = "turboquant_4bit_nc"
DEFAULT_BLOCK_SIZE: Final = 16
PROTECTED: Final = 2
"""First and last layers with a cache that stay native in dense models, unless asked otherwise."""
BLOCK_STEP: Final = 8
GIB: Final = 1 << 30
_OWN_PREFILL: Final = frozenset({AttentionKind.FULL, AttentionKind.SLIDING, AttentionKind.CHUNKED})
_NO_CACHE: Final = frozenset({AttentionKind.LINEAR, AttentionKind.NONE, AttentionKind.ENCODER})


class Role(StrEnum):
    """What becomes of a layer."""

    QUANTIZED = "quantized"
    NATIVE = "native"
    STATE = "no cache"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Question:
    """Everything that a plan depends on. Counterfactuals are questions with one field changed.

    model: on all heads. tp: tensor-parallel ranks. protect: native layers at each end (None: 2 for dense models, 0
    for hybrids). skip: layers that stay native, by index or kind. pad_heads: pad smaller heads to this size. dtype:
    of queries and raw keys (None: the model's). rows: query rows of one decode call that the workspace must serve.
    memory_gib: device memory of one rank for weights, workspace and cache. weights_gib: of all ranks together.
    """

    model: ModelSpec
    target: Target
    preset: Preset
    block_size: int = DEFAULT_BLOCK_SIZE
    tp: int = 1
    policy: Policy = field(default_factory=Policy)
    environment: Environment = field(default_factory=Environment)
    protect: int | None = None
    skip: frozenset[int | str] = frozenset()
    pad_heads: int | None = None
    dtype: Dtype | None = None
    rows: int = 256
    memory_gib: float | None = None
    weights_gib: float | None = None

    def __post_init__(self) -> None:
        checked_type("model", self.model, ModelSpec, ", as from load_model('qwen3-32b')")
        checked_type("preset", self.preset, Preset)
        check_question(self.target, self.policy, self.environment)
        for name, low, high in (("block_size", 1, 1 << 20), ("rows", 1, 1 << 20), ("tp", 1, 1 << 16)):
            checked_int(name, getattr(self, name), low, high)
        if self.block_size % BLOCK_STEP:
            raise SpecError(
                "block_size", self.block_size, f"a multiple of {BLOCK_STEP}, as serving engines have it"
            )
        if self.protect is not None:
            checked_int("protect", self.protect, 0, 10_000)
        kinds = {str(kind) for kind in AttentionKind}
        for entry in self.skip:
            if isinstance(entry, int) and not isinstance(entry, bool):
                if not 0 <= entry < len(self.model.layers):
                    raise SpecError("skip_layers", entry, f"a layer from 0 to {len(self.model.layers) - 1}")
            elif entry not in kinds:
                raise SpecError("skip_layers", entry, "layer indices, or kinds: " + ", ".join(sorted(kinds)))
        for name in ("memory_gib", "weights_gib"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value < 1e9):
                raise SpecError(name, value, "a number of GiB > 0")

    @property
    def local_model(self) -> ModelSpec:
        """The model as one rank sees it, heads padded and dtype set."""
        return self._localized(self.model)

    def local_layer(self, index: int) -> LayerSpec:
        """Layer ``index`` as one rank sees it, whatever the others are. For layers with a cache of their own."""
        return self._localized(replace(self.model, layers=(self.model.layers[index],))).layers[0]

    def _localized(self, model: ModelSpec) -> ModelSpec:
        if self.dtype is not None:
            model = replace(model, layers=tuple(replace(layer, dtype=self.dtype) for layer in model.layers))
        if self.pad_heads is not None:
            model = pad_model_heads(model, self.pad_heads)
        return split(model, self.tp)

    def request(self, layer: LayerSpec) -> Request:
        """The request to backends for one local layer."""
        return Request(layer, self.target, self.preset, self.block_size, self.environment)


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer of a plan.

    reason: why it is native or has no cache. decision: for quantized layers. refused: every backend with every
    reason, for refused ones. block_bytes: of its own cache; 0 for layers that share another's or keep none.
    """

    layer: LayerSpec
    role: Role
    reason: str = ""
    decision: Decision | None = None
    refused: Mapping[str, tuple[Refusal, ...]] = field(
        default_factory=lambda: MappingProxyType({}), hash=False
    )
    prefill: PrefillChoice | None = None
    block_bytes: int = 0
    native_bytes: int = 0

    @property
    def backend(self) -> str | None:
        """Name of the backend that runs, None if the layer is not quantized."""
        return self.decision.backend if self.decision else None

    @property
    def reasons(self) -> Mapping[str, tuple[Refusal, ...]]:
        """What was refused: faster backends if one was chosen, else all of them."""
        return self.decision.refused if self.decision else self.refused


@dataclass(frozen=True, slots=True)
class Group:
    """Layers for which a plan says the same; ``first`` stands for all of them."""

    layers: tuple[int, ...]
    first: LayerPlan


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to a :class:`Question`. All bytes are those of one tensor-parallel rank.

    bytes_per_token: over all layers, meta regions and padding included. native_bytes_per_token: the same model
    without quantization. content_bytes_per_token: without padding. workspace_bytes: scratch memory of decode, an upper
    bound. tokens, native_tokens: that fit the memory budget (None: no budget given), as if every layer kept
    every token.
    """

    question: Question
    model: ModelSpec
    layers: tuple[LayerPlan, ...]
    pages: Pages
    bytes_per_token: float
    content_bytes_per_token: float
    native_bytes_per_token: float
    workspace_bytes: int
    tokens: int | None
    native_tokens: int | None
    warnings: tuple[tuple[str, str], ...]

    @property
    def compression(self) -> float:
        """How many times smaller the whole model's cache is, native layers, meta regions and padding included."""
        return self.native_bytes_per_token / self.bytes_per_token if self.bytes_per_token else 1.0

    @property
    def refused(self) -> tuple[LayerPlan, ...]:
        """Layers that no backend serves."""
        return tuple(entry for entry in self.layers if entry.role is Role.REFUSED)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Decisions of the quantized layers, in order."""
        return tuple(entry.decision for entry in self.layers if entry.decision is not None)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Equal layers together, in the order of their first."""
        found: dict[Any, list[LayerPlan]] = {}
        for entry in self.layers:
            found.setdefault(_group_key(entry), []).append(entry)
        return tuple(Group(tuple(e.layer.index for e in entries), entries[0]) for entries in found.values())


def _anonymous(layer: LayerSpec) -> LayerSpec:
    shared = None if layer.kv_shared_with is None else 0
    return replace(layer, index=0, kv_shared_with=shared)


def _group_key(entry: LayerPlan) -> Any:
    reasons = tuple((name, tuple(why)) for name, why in entry.reasons.items())
    prefill = entry.prefill.route if entry.prefill else None
    if entry.role is Role.STATE:
        return (entry.role, entry.reason)
    decision = entry.decision
    chosen = (decision.backend, decision.layout) if decision else None
    return (_anonymous(entry.layer), entry.role, entry.reason, chosen, reasons, prefill)


def ranges(indices: Iterable[int]) -> str:
    """``0-3, 8, 10-20 step 2`` for sorted indices."""
    values = list(indices)
    parts = []
    start = 0
    while start < len(values):
        end, step = start, 1
        if start + 1 < len(values):
            step = values[start + 1] - values[start]
            while end + 1 < len(values) and values[end + 1] - values[end] == step:
                end += 1
        count = end - start + 1
        if step == 1 and count >= 2:
            parts.append(f"{values[start]}-{values[end]}")
        elif count >= 3:
            parts.append(f"{values[start]}-{values[end]} step {step}")
        else:
            parts.append(str(values[start]))
            end = start
        start = end + 1
    return ", ".join(parts)


def _protected(model: ModelSpec, protect: int | None) -> frozenset[int]:
    """Layers at both ends of those that own a cache."""
    count = (0 if model.hybrid else PROTECTED) if protect is None else protect
    owners = [e.index for e in model.layers if e.kind not in _NO_CACHE and e.kv_shared_with is None]
    if not count:
        return frozenset()
    return frozenset(owners[:count] + owners[-count:])


def _with_owner(
    refused: Mapping[str, tuple[Refusal, ...]], policy: Policy
) -> Mapping[str, tuple[Refusal, ...]]:
    """``refused`` for a layer that reads another's cache: a wrong layout is that cache's doing, not the user's."""

    def told(refusal: Refusal) -> Refusal:
        if policy.layout is not None or refusal.code is not Code.POLICY or "layout" not in refusal.wants:
            return refusal
        return replace(refusal, wants=f"{refusal.wants}, as the cache that it reads has it")

    return MappingProxyType({name: tuple(map(told, why)) for name, why in refused.items()})


def _layer_plan(question: Question, layer: LayerSpec, reason: str, owner: LayerPlan | None) -> LayerPlan:
    request = question.request(layer)
    if layer.kind in (AttentionKind.LINEAR, AttentionKind.NONE):
        what = "keeps a state of fixed size" if layer.kind is AttentionKind.LINEAR else "mixes no tokens"
        return LayerPlan(layer, Role.STATE, f"{layer.kind}: {what}")
    shares = layer.kv_shared_with is not None
    has_cache = layer.kind not in _NO_CACHE and not shares
    native = native_block_bytes(layer, question.block_size) if has_cache else 0
    prefill = prefill_route(request) if layer.kind in _OWN_PREFILL else None
    if owner is not None and owner.role is not Role.QUANTIZED:
        reason = reason or f"reads the cache of layer {owner.layer.index}, which is native"
    if reason:
        return LayerPlan(layer, Role.NATIVE, reason, prefill=prefill, block_bytes=native, native_bytes=native)
    policy = question.policy
    if owner is not None and owner.decision is not None:
        policy = replace(policy, layout=owner.decision.layout)
    try:
        decision = resolve(request, policy)
        if shares:
            decision = replace(decision, refused=_with_owner(decision.refused, question.policy))
    except IneligibleError as error:
        return LayerPlan(
            layer,
            Role.REFUSED,
            refused=_with_owner(error.refused, question.policy)
            if shares
            else MappingProxyType(error.refused),
            prefill=prefill,
            block_bytes=native,
            native_bytes=native,
        )
    size = (
        quantized_block_bytes(layer, decision.layout, question.preset, question.block_size)
        if has_cache
        else 0
    )
    return LayerPlan(
        layer, Role.QUANTIZED, decision=decision, prefill=prefill, block_bytes=size, native_bytes=native
    )


def _layer_plans(question: Question, model: ModelSpec) -> tuple[LayerPlan, ...]:
    protected = _protected(model, question.protect)
    # Equal layers get equal answers: each distinct layer is decided once.
    memo: dict[Any, LayerPlan] = {}
    found: list[LayerPlan] = []
    for layer in model.layers:
        owner = found[layer.kv_shared_with] if layer.kv_shared_with is not None else None
        if layer.index in question.skip or str(layer.kind) in question.skip:
            reason = "skipped on request"
        elif owner is not None:
            reason = ""
        elif layer.index in protected:
            reason = "boundary protection"
        else:
            reason = ""
        key = (_anonymous(layer), reason, owner and (owner.role, owner.backend, owner.layer.index))
        entry = memo.get(key)
        if entry is None:
            entry = memo[key] = _layer_plan(question, layer, reason, owner)
        else:
            decision = replace(entry.decision, layer=layer) if entry.decision else None
            entry = replace(entry, layer=layer, decision=decision)
        found.append(entry)
    return tuple(found)


def _pages(question: Question, layers: Sequence[LayerPlan]) -> Pages:
    found: dict[tuple[str, int], list[LayerPlan]] = {}
    for entry in layers:
        if entry.block_bytes:
            what = entry.decision.layout if entry.decision else "native"
            found.setdefault((what, entry.block_bytes), []).append(entry)
    groups = []
    firsts: dict[str, LayerPlan] = {}
    kinds = [what for what, _ in found]
    for (what, size), entries in found.items():
        name = what if kinds.count(what) == 1 else f"{what}, {size} B"
        firsts[name] = entries[0]
        groups.append(PageGroup(name, tuple(e.layer.index for e in entries), question.block_size, size))

    def backends_for(sizes: Mapping[str, int]) -> list[str] | None:
        names = []
        for name, size in sizes.items():
            decision = firsts[name].decision
            if decision is None:
                continue
            try:
                policy = replace(question.policy, layout=decision.layout)
                request = Request(
                    decision.layer, question.target, question.preset, size, question.environment
                )
                names.append(resolve(request, policy).backend)
            except IneligibleError:
                return None
        return names

    return unify(groups, backends_for)


def _warnings(
    question: Question, model: ModelSpec, layers: Sequence[LayerPlan], pages: Pages
) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = [
        ("unknown" if note.startswith("unknown:") else "model", note) for note in model.warnings
    ]
    target, preset = question.target, question.preset
    quantized = [entry for entry in layers if entry.role is Role.QUANTIZED]
    with_cache = [entry for entry in layers if entry.block_bytes]
    planned = sorted({name for e in quantized if e.decision and (name := e.decision.planned)})
    if planned:
        found.append(
            ("planned", f"{', '.join(planned)} would serve some layers; its kernels are not in this version")
        )
    if preset.fp8_keys and quantized:
        if target.fp8_format is None:
            found.append(
                (
                    "emulated_fp8",
                    f"{target.arch} has no FP8 conversions: FP8 keys are emulated, and slower than 4-bit keys",
                )
            )
        elif target.fp8_format != "e4m3fn":
            found.append(
                (
                    "fp8_format",
                    f"{target.arch} is natively {target.fp8_format}; caches hold e4m3fn, twice the value per byte",
                )
            )
    full = [e for e in with_cache if e.layer.kind in (AttentionKind.FULL, AttentionKind.MLA)]
    others = len(layers) - len(full)
    if (
        full
        and others >= 3 * len(full)
        and any(e.role is Role.QUANTIZED for e in full)
        and preset.key_bits < 8
    ):
        found.append(
            (
                "few_full_layers",
                (
                    f"{len(full)} of {len(layers)} layers carry all long-range recall: quantizing them costs more than"
                    " in a dense model; measure long-range copying, or keep some native (--skip-layers)"
                ),
            )
        )
    if preset.key_bits <= 3 and any(e.layer.head_size <= 64 for e in quantized):
        found.append(
            ("small_heads", "3-bit keys at head size 64 or less lose much accuracy: prefer 4-bit or FP8 keys")
        )
    owners = [e for e in layers if e.layer.kind not in _NO_CACHE and e.layer.kv_shared_with is None]
    if quantized and not model.hybrid and owners:
        ends = {owners[0].role, owners[-1].role}
        if Role.QUANTIZED in ends:
            found.append(
                (
                    "unprotected_ends",
                    (
                        "the first and last layers are quantized: keeping two at each end native was worth 30 points"
                        " of GSM8K on a 4B model"
                    ),
                )
            )
    if owners and not quantized and all(e.reason == "boundary protection" for e in owners):
        found.append(("all_protected", "boundary protection covers every layer: nothing is quantized"))
    if pages.rule == "padded":
        found.append(
            (
                "padding",
                f"no page size serves all groups of layers: padding takes {pages.waste:.1%} of the cache"
                + ("; see the block sizes suggested" if pages.suggestions else ""),
            )
        )
    if model.hybrid and with_cache:
        found.append(
            (
                "hybrid_pages",
                (
                    "unknown: the size of the recurrent states. Servers enlarge the attention block until its page"
                    " matches them (528, 784, 1568 ...): pass that block size with --block-size"
                ),
            )
        )
    if quantized and target.arch != "cpu":
        found.append(("warmup", "the first decode of each shape compiles: call warmup() before serving"))
    assumed = {
        r.explain()
        for e in quantized
        if e.decision
        for r in get_backend(e.decision.backend).requires
        if r.code == "package"
    }
    if assumed and not target.local:
        found.append(("assumed", f"taken to be installed on {target.arch}: {', '.join(sorted(assumed))}"))
    return found


def plan(
    model: ModelSpec,
    target: Target,
    preset: str | Preset = DEFAULT_PRESET,
    block_size: int = DEFAULT_BLOCK_SIZE,
    *,
    tp: int = 1,
    policy: Policy | None = None,
    environment: Environment | None = None,
    protect: int | None = None,
    skip: Collection[int | str] = (),
    pad_heads: int | None = None,
    dtype: Dtype | str | None = None,
    rows: int = 256,
    memory_gib: float | None = None,
    weights_gib: float | None = None,
) -> Plan:
    """Decide every layer of ``model`` (on all heads) for ``target``. Parameters: see :class:`Question`.

    policy: default :meth:`Policy.from_environment`. Layers that no backend serves are in ``Plan.refused``, with every
    reason; only an impossible question (a tp that does not divide the heads, an unknown preset, an argument of the
    wrong type) raises SpecError, which names the argument.
    Each group of equal decisions is logged once (see :mod:`.dispatch`).
    """
    question = Question(
        model=model,
        target=target,
        preset=get_preset(preset),
        block_size=block_size,
        tp=tp,
        policy=Policy.from_environment() if policy is None else policy,
        environment=Environment() if environment is None else environment,
        protect=protect,
        skip=_skipped(skip),
        pad_heads=pad_heads,
        dtype=_dtype(dtype),
        rows=rows,
        memory_gib=memory_gib,
        weights_gib=weights_gib,
    )
    answer = answer_question(question)
    _log(answer)
    return answer


def _skipped(value: Collection[int | str]) -> frozenset[int | str]:
    wants = "a collection of layer indices and kinds, such as {0, 'sliding'}"
    if isinstance(value, str | bytes) or not isinstance(value, Collection):
        raise SpecError("skip", value, wants)
    try:
        return frozenset(value)
    except TypeError:  # an entry that has no hash
        raise SpecError("skip", value, wants) from None


def _dtype(value: Dtype | str | None) -> Dtype | None:
    try:
        return None if value is None else Dtype(value)
    except ValueError:
        raise SpecError("dtype", value, "one of " + ", ".join(map(str, Dtype))) from None


def answer_question(question: Question) -> Plan:
    """:func:`plan` for a ready-made question, without a log line."""
    model = question.local_model
    layers = _layer_plans(question, model)
    pages = _pages(question, layers)
    size = question.block_size
    content = sum(entry.block_bytes for entry in layers) / size
    native = sum(entry.native_bytes for entry in layers) / size
    workspace = max(
        (
            get_backend(entry.decision.backend).workspace_bytes(
                entry.layer, question.rows, question.target.compute_units
            )
            for entry in layers
            if entry.decision is not None
        ),
        default=0,
    )
    tokens = native_tokens = None
    if question.memory_gib is not None:
        weights = (question.weights_gib or model.weight_gib or 0.0) / question.tp
        free = (question.memory_gib - weights) * GIB
        if free <= 0:
            raise SpecError(
                "memory", f"{question.memory_gib:g} GiB", f"more than the weights, {weights:g} GiB per rank"
            )
        if pages.bytes_per_token:
            tokens = max(0, int((free - workspace) / pages.bytes_per_token))
            native_tokens = int(free / native)
    return Plan(
        question=question,
        model=model,
        layers=layers,
        pages=pages,
        bytes_per_token=pages.bytes_per_token,
        content_bytes_per_token=content,
        native_bytes_per_token=native,
        workspace_bytes=workspace,
        tokens=tokens,
        native_tokens=native_tokens,
        warnings=tuple(_warnings(question, model, layers, pages)),
    )


def _log(answer: Plan) -> None:
    question = answer.question
    for group in answer.groups:
        entry = group.first
        if entry.role not in (Role.QUANTIZED, Role.REFUSED):
            continue
        key = (
            answer.model.name,
            replace(_anonymous(entry.layer), notes=()),
            question.target,
            question.target.local,
            question.preset,
            question.block_size,
            question.policy,
        )
        who = f"{answer.model.name}, layers {ranges(group.layers)}"
        if entry.decision is not None:
            log_decision(key, who, entry.decision)
        else:
            request = question.request(entry.layer)
            log_decision(key, who, IneligibleError(request, entry.refused, "no backend"))
