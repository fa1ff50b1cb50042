"""The plan of a model as the server has built it: what each layer needs, who serves it, and the report at start-up.

Layers are read off vLLM's own attention modules, so their heads are those of this tensor-parallel rank, and windows,
sinks and caps are those that will be computed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any, Final

import torch

from ...dispatch import Policy
from ...eligibility import Request
from ...planning import Plan, Role, plan
from ...presets import get_preset
from ...report.document import plan_document
from ...report.text import sections, table_of
from ...spec import AttentionKind, Dtype, LayerSpec, ModelSpec, SpecError, Target
from ...target import detect, get_target
from . import PREFIX, Settings, logger

__all__ = ["ServedModel", "ServerCode", "Unsupported", "UnsupportedError", "layer_spec", "model_dtype"]

REPORT_WIDTH: Final = 150

_SERVERS_OWN: Final = frozenset({"padding", "hybrid_pages", "warmup"})
"""Codes of warnings about what the server, or this plugin for it, sees to."""

_DTYPES: Final = {torch.bfloat16: Dtype.BF16, torch.float16: Dtype.FP16, torch.float32: Dtype.FP32}


class ServerCode(StrEnum):
    """What a server can ask of a layer beside what a LayerSpec says. The value is the name of what was looked at."""

    ATTENTION_TYPE = "attn_type"
    KV_SHARING = "kv_sharing"
    CONTEXT_PARALLEL = "context_parallel"
    OPTION = "option"
    CHUNKED = "attention_chunk_size"
    CAUSAL = "causal"
    OUTPUT_QUANTIZATION = "output_quantization"
    BACKEND = "backend"
    DTYPE = "dtype"
    CACHE_DTYPE = "kv_cache_dtype"


@dataclass(frozen=True, slots=True)
class Unsupported:
    """One thing that is not served. got: what was asked for; wants: what would be served, for people."""

    code: ServerCode
    got: Any
    wants: str

    def __str__(self) -> str:
        return f"{self.code}={self.got} (wants {self.wants})"


class UnsupportedError(ValueError):
    """The server asks for what this backend does not do. ``reasons`` are all of them, each with a code."""

    def __init__(self, where: str, reasons: Iterable[Any]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(f"turboquant_rocm cannot serve {where}: " + "; ".join(map(str, self.reasons)))


def model_dtype(dtype: torch.dtype) -> Dtype:
    """Our name of the dtype of queries and raw keys; SpecError for one that no kernel takes."""
    if dtype not in _DTYPES:
        raise SpecError("dtype", dtype, "one of " + ", ".join(map(str, _DTYPES)))
    return _DTYPES[dtype]


def layer_spec(
    index: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    scale: float | None,
    dtype: Dtype,
    value_head_size: int | None = None,
    window: int | None = None,
    sinks: bool = False,
    soft_cap: float | None = None,
    alibi: bool = False,
) -> LayerSpec:
    """A server's attention layer as a LayerSpec. window: keys that a token sees, itself included; None or <= 0: all."""
    window = window if window is not None and window > 0 else None
    if scale is not None and math.isclose(scale, head_size**-0.5, rel_tol=1e-6):
        scale = None
    return LayerSpec(
        index,
        num_heads,
        num_kv_heads,
        head_size,
        kind=AttentionKind.FULL if window is None else AttentionKind.SLIDING,
        value_head_size=value_head_size,
        window=window,
        sinks=sinks,
        soft_cap=soft_cap or None,
        scale=scale,
        dtype=dtype,
        position_bias="alibi" if alibi else None,
    )


def _policy(settings: Settings) -> Policy:
    policy = Policy.from_environment()
    if settings.cpu == "reference":
        policy = policy.narrowed_by(Policy(force="torch_reference"))
    if settings.cpu == "interpret":
        policy = policy.narrowed_by(Policy(require=frozenset({"triton_soa", "triton_aos"})))
    return policy


@cache
def _target(cpu: str, device: int) -> Target:
    if cpu == "interpret":
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise SpecError(
                "TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET"), "1 with ..._CPU=interpret"
            )
        return get_target("gfx942")  # the kernels as they are for it, executed by Triton's interpreter
    if cpu:
        return replace(get_target("cpu"), local=True)
    return detect(device)


def interpreter_faults(dtype: Dtype, preset: str, settings: Settings) -> list[Unsupported]:
    """What Triton's interpreter would compute wrongly, without an error: bf16 and FP8, as seen in 3.6 and 3.9."""
    found: list[Unsupported] = []
    if settings.cpu == "interpret":
        if dtype is Dtype.BF16:
            wants = "fp16: Triton's interpreter computes wrongly in bf16"
            found.append(Unsupported(ServerCode.DTYPE, dtype, wants))
        if get_preset(preset).fp8_keys:
            wants = "keys on a codebook: Triton's interpreter converts to FP8 wrongly"
            found.append(Unsupported(ServerCode.CACHE_DTYPE, preset, wants))
    return found


def serving_target(settings: Settings) -> Target:
    """The GPU of this worker, or what stands for it on the CPU."""
    return _target(settings.cpu, 0 if settings.cpu else torch.cuda.current_device())


def request(spec: LayerSpec, preset: str, block_size: int, settings: Settings) -> tuple[Request, Policy]:
    """The question to the dispatcher about one layer."""
    return Request(spec, serving_target(settings), get_preset(preset), block_size), _policy(settings)


@dataclass(frozen=True)
class ServedModel:
    """The attention layers that the server has built in this process, in its own order.

    names: of layers. specs: what each needs. quantised: those with a turboquant cache dtype. preset: their dtype.
    tp, tp_rank: tensor-parallel ranks, and which of them this is.
    """

    model: str
    names: tuple[str, ...]
    specs: tuple[LayerSpec, ...]
    quantised: frozenset[str]
    preset: str
    tp: int
    tp_rank: int

    @classmethod
    def of(cls, vllm_config: Any) -> ServedModel:
        """From vLLM's configuration of this process, whose layers have been built."""
        logger()  # what the dispatcher says goes to the server's log, too
        dtype = model_dtype(vllm_config.model_config.dtype)
        names: list[str] = []
        specs: list[LayerSpec] = []
        quantised: set[str] = set()
        for name, layer in _attention_layers(vllm_config):
            index = len(specs)
            if not hasattr(layer, "num_kv_heads") or not hasattr(layer, "kv_cache_dtype"):
                spec = LayerSpec(index, 1, 1, 1, kind=AttentionKind.LINEAR)
            elif hasattr(layer, "kv_lora_rank"):
                spec = LayerSpec(
                    index, layer.num_heads, 1, layer.head_size, kind=AttentionKind.MLA, dtype=dtype
                )
            else:
                spec = layer_spec(
                    index,
                    num_heads=layer.num_heads,
                    num_kv_heads=layer.num_kv_heads,
                    head_size=layer.head_size,
                    value_head_size=getattr(layer, "head_size_v", None),
                    scale=getattr(layer.impl, "scale", None),
                    dtype=dtype,
                    window=layer.sliding_window,
                    sinks=bool(getattr(layer, "has_sink", False)),
                    soft_cap=getattr(layer.impl, "soft_cap", None),
                )
                if str(layer.kv_cache_dtype).startswith(PREFIX):
                    quantised.add(name)
            names.append(name)
            specs.append(spec)
        parallel = vllm_config.parallel_config
        tp = parallel.tensor_parallel_size
        preset = str(vllm_config.cache_config.cache_dtype)
        return cls(
            vllm_config.model_config.model,
            tuple(names),
            tuple(specs),
            frozenset(quantised),
            preset,
            tp,
            parallel.rank % tp,
        )

    def plan(self, block_size: int, settings: Settings) -> Plan:
        """The dispatcher's plan for blocks of ``block_size`` tokens: what the server keeps native stays native."""
        rank = f", one of {self.tp} tensor-parallel ranks" if self.tp > 1 else ""
        return plan(
            ModelSpec(f"{self.model}{rank}", self.specs, source="vLLM"),
            serving_target(settings),
            self.preset,
            block_size,
            policy=_policy(settings),
            protect=0,
            skip=frozenset(
                i
                for i, name in enumerate(self.names)
                if name not in self.quantised and self.specs[i].kind is not AttentionKind.LINEAR
            ),
        )


def _attention_layers(vllm_config: Any) -> Iterable[tuple[str, Any]]:
    """(name, module) of the layers that keep a cache or a state, in the order in which they were built."""
    context: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
    return [(name, layer) for name, layer in context.items() if hasattr(layer, "get_kv_cache_spec")]


def verify(vllm_config: Any, impl: type) -> None:
    """UnsupportedError unless every layer with a turboquant cache dtype runs ``impl``.

    A plugin that failed to load, or another that came later, would leave some layers with another reader of our bytes.
    """
    others = {
        f"{type(layer.impl).__module__}.{type(layer.impl).__qualname__}": name
        for name, layer in _attention_layers(vllm_config)
        if str(getattr(layer, "kv_cache_dtype", "")).startswith(PREFIX) and not isinstance(layer.impl, impl)
    }
    if others:
        reasons = [
            Unsupported(ServerCode.BACKEND, found, f"{impl.__module__}.{impl.__qualname__}")
            for found in sorted(others)
        ]
        raise UnsupportedError(f"layers such as {sorted(others.values())[0]}", reasons)


_reported: set[str] = set()


def report_text(answer: Plan) -> str:
    """The plan as ``explain`` prints it, but for pages and their padding, which the server chooses itself."""
    document = plan_document(answer, every_change=False)
    document["warnings"] = [w for w in document["warnings"] if w["code"] not in _SERVERS_OWN]
    kept = [s for s in sections(document) if not s[0].startswith(("Pages", "Block sizes", "Memory"))]
    return table_of(kept, REPORT_WIDTH)


def report(served: ServedModel, answer: Plan, *, in_charge: bool) -> None:
    """Log the plan, once, by the first of the ranks that hold the same layers. in_charge: it is what will run."""
    if served.tp_rank:
        return
    counts: dict[str, int] = {}
    for entry in answer.layers:
        what = f"{entry.backend} ({entry.decision.layout})" if entry.decision else str(entry.role)
        counts[what] = counts.get(what, 0) + 1
    summary = ", ".join(f"{n} {what}" for what, n in counts.items())
    packed = f"{len(served.quantised)} of {len(served.names)} layers"
    if in_charge:
        head = f"turboquant_rocm: {packed} packed: {summary}"
        note = "turboquant_rocm serves this model. The plan, as `explain` prints it:"
    else:
        head = f"vLLM's own turboquant backend serves {packed} (TURBOQUANT_ROCM_VLLM=off)"
        note = f"What turboquant_rocm would do ({summary}), as `explain` prints it:"
    text = f"{note}\n{report_text(answer)}"
    if text not in _reported:
        _reported.add(text)
        logger().info("%s", head)
        logger().info("%s", text)


def refused_layers(answer: Plan) -> list[str]:
    """What stands against the layers that no backend serves, one line for each group."""
    return [
        f"layer {entry.layer.index}: {name}: {', '.join(map(str, why))}"
        for entry in answer.layers
        if entry.role is Role.REFUSED
        for name, why in entry.refused.items()
    ]
