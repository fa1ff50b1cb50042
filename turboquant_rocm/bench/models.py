"""``bench ab`` on a device: opens caches in a transformers model, times them in turn, and compares what they say."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch

from ..dispatch import IneligibleError
from ..evaluate import load_model, load_tokenizer, read_text
from ..evaluation.schemes import model_layers
from ..integrations.capture import ShadowLayer, StoreCache, open_cache
from ..integrations.transformers import ATTENTION, PackedLayer, TurboQuantCache, cache_bytes
from ..options import exact_row_bytes, parse_cache
from ..spec import LayerSpec, SpecError, Target
from .ab import BASELINE, BIT_IDENTICAL, AbRow, Arm
from .timing import summary

__all__ = [
    "Setup",
    "budget_tokens",
    "bytes_for",
    "conditions",
    "measure",
    "passes",
    "peak_bytes",
    "read_setup",
]

_MOST_TOKENS: Final = 1 << 40
_UNTIMED: Final = 3  # passes of an arm before the timed ones: greedy tokens, logits, memory


@dataclass(frozen=True)
class Setup:
    """What all arms share. model: a causal LM in eval mode. ids [B, n] int64: the prompts. new: tokens after them.

    direct: attention over packed bytes; else the model's own over dequantised ones. budget: bytes. backend, block_size,
    protect, ring_tokens: of the caches (None: their defaults).
    """

    model: Any
    ids: torch.Tensor
    new: int
    target: Target
    dtype: str
    budget: int
    direct: bool = True
    backend: str | None = None
    block_size: int = 16
    protect: int | None = None
    ring_tokens: int = 128
    repeats: int = 5
    on_failure: Callable[[str], None] = field(default=lambda text: None)

    def open(self, arm: Arm | None) -> Any:
        """A new cache; None: transformers' own."""
        if arm is None or arm.mode == "off":
            return open_cache(self.model.config, "off")
        preset, options = parse_cache(arm.preset)
        same: dict[str, Any] = {
            "target": self.target, "dtype": self.dtype, "block_size": self.block_size, "protect": self.protect,
        }  # fmt: skip
        if arm.mode == "cache":
            return TurboQuantCache(self.model.config, preset, self.backend, options=options, **same)
        return StoreCache(
            self.model.config, arm.mode, preset, self.backend, ring_tokens=self.ring_tokens, **same
        )


def read_setup(
    args: Any, device: torch.device, target: Target, budget: int, on_failure: Callable[[str], None]
) -> Setup:
    """The model and the prompts of ``bench ab``'s arguments. SpecError names what is wrong with them."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    cpu = device.type == "cpu"
    dtype = args.dtype or ("fp32" if cpu else "bf16")
    model = load_model(args.model, device, dtype)
    config = model.config.get_text_config(decoder=True)
    most = getattr(config, "max_position_embeddings", None) or _MOST_TOKENS
    if args.prompt + args.new > most:
        raise SpecError(
            "--prompt", args.prompt, f"with --new {args.new} at most the model's {most} positions"
        )
    need = args.batch * args.prompt
    if args.text is None:
        g = torch.Generator().manual_seed(0)
        ids = torch.randint(0, config.vocab_size, (need,), generator=g)
    else:
        text = read_text(args.text)
        ids = torch.tensor(load_tokenizer(args.model)(text, add_special_tokens=False).input_ids[:need])
        if len(ids) < need:
            raise SpecError("--text", f"{len(ids)} tokens", f"at least {need} = --batch times --prompt")
    return Setup(
        model, ids.view(args.batch, args.prompt).to(device), args.new, target, dtype, budget,
        args.attention == "direct", args.backend or ("torch_reference" if cpu else None), args.block_size,
        args.protect, args.ring_tokens, args.repeats, on_failure,
    )  # fmt: skip


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _steps(model: Any, ids: torch.Tensor, cache: Any, tokens: torch.Tensor | None, new: int) -> Iterator[Any]:
    """Logits [B, V] for each of ``new`` tokens: after the prompt, then after each of ``tokens`` (None: greedy ones)."""
    logits = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    yield logits
    for i in range(new - 1):
        fed = logits.argmax(-1) if tokens is None else tokens[:, i]
        logits = model(input_ids=fed[:, None], cache=cache, use_cache=True).logits[:, -1]
        yield logits


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int | None:
    """Most bytes that torch holds on ``device`` at once in ``call()``, beyond what it held before.

    On a GPU from its caching allocator, on a CPU from the profiler, which sees every allocation of torch's and none of
    anybody else's. None where this version of torch does not say.
    """
    if device.type == "cuda":
        _synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        _synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - int(before)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    try:
        events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
        held = most = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            held += event.nbytes()
            most = max(most, held)
    except AttributeError:
        return None
    return most if events else None


# ---- bytes --------------------------------------------------------------------------------------------------


def _plain_bytes(layer: LayerSpec, tokens: int, itemsize: int) -> int:
    """Of transformers' own layer, which keeps one token less than its window."""
    kept = tokens if layer.window is None else min(tokens, max(1, layer.window - 1))
    return kept * exact_row_bytes(layer, itemsize)


def bytes_for(cache: Any, layers: Sequence[LayerSpec], tokens: int, itemsize: int) -> int:
    """Bytes that one sequence of ``tokens`` tokens takes in ``cache``, from its layouts' integers, without reserves.

    layers: those of the model that keep keys and values. itemsize: of an element that stays exact.
    """
    total = 0
    for spec in layers:
        own = getattr(cache.layers[spec.index], "bytes_for", None)
        total += _plain_bytes(spec, tokens, itemsize) if own is None else own(tokens, itemsize)
    return total


def budget_tokens(cache: Any, layers: Sequence[LayerSpec], budget: int, itemsize: int) -> int:
    """The longest sequence whose keys and values fit ``budget`` bytes; at most 2^40 tokens."""
    low, high = 0, 1
    while high < _MOST_TOKENS and bytes_for(cache, layers, high, itemsize) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bytes_for(cache, layers, middle, itemsize) <= budget else (low, middle)
    return low


# ---- measuring ----------------------------------------------------------------------------------------------


class _Baseline:
    """What the baseline says: greedy tokens [B, new], and logits of every step, on the host."""

    def __init__(self, setup: Setup) -> None:
        greedy = _steps(setup.model, setup.ids, setup.open(None), None, setup.new)
        self.tokens = torch.stack([step.argmax(-1) for step in greedy], 1)
        self.logits = [
            step.cpu() for step in _steps(setup.model, setup.ids, setup.open(None), self.tokens, setup.new)
        ]


class _Bench:
    def __init__(self, setup: Setup, done: Callable[[], None]) -> None:
        self.setup, self.done = setup, done
        self.model, self.device = setup.model, setup.ids.device
        self.layers = model_layers(setup.model.config)
        self.itemsize = int(setup.model.dtype.itemsize)
        self.baseline = _Baseline(setup)

    def attention(self, arm: Arm | None) -> Any:
        """The attention implementation of an arm, as a context."""
        own = self.model.config.get_text_config(decoder=True)._attn_implementation
        direct = self.setup.direct and arm is not None and arm.mode not in BIT_IDENTICAL
        return _attention(self.model, ATTENTION if direct else own)

    def steps(self, arm: Arm | None, cache: Any, tokens: torch.Tensor | None) -> Iterator[Any]:
        found: Iterator[Any] = _steps(self.model, self.setup.ids, cache, tokens, self.setup.new)
        return found

    def untimed(self, arm: Arm | None, row: AbRow) -> AbRow:
        """Everything but the times; also warms up."""
        setup, tokens = self.setup, self.baseline.tokens
        greedy = torch.stack([step.argmax(-1) for step in self.steps(arm, setup.open(arm), None)], 1)
        self.done()
        same = greedy == tokens
        differ = (~same).any(0).nonzero()
        cache = setup.open(arm)
        equal, hits, kl = True, 0.0, 0.0
        for want, got in zip(self.baseline.logits, self.steps(arm, cache, tokens), strict=True):
            got = got.cpu()
            equal = equal and torch.equal(want, got)
            p, q = (torch.log_softmax(x.double(), -1) for x in (want, got))
            hits += float((p.argmax(-1) == q.argmax(-1)).double().mean())
            kl += float((p.exp() * (p - q)).sum(-1).mean())
        self.done()
        held = cache_bytes(cache)
        del cache
        fresh = setup.open(arm)
        peak = peak_bytes(lambda: [None for _ in self.steps(arm, fresh, tokens)], self.device)
        self.done()
        row = replace(
            row,
            kv_bytes=held,
            peak_bytes=peak,
            budget_tokens=budget_tokens(setup.open(arm), self.layers, setup.budget, self.itemsize),
            tokens=same.numel(),
            equal_tokens=int(same.sum()),
            first_difference=int(differ[0]) if len(differ) else None,
            top1=hits / setup.new,
            kl=kl / setup.new,
        )
        if kl != kl:
            return replace(row, status="wrong", note="logits that are not finite", kl=None)
        if not equal and (arm is None or arm.mode in BIT_IDENTICAL):
            return replace(row, status="wrong", note="logits are not the baseline's, bit for bit: not timed")
        return row

    def timed(self, arm: Arm | None) -> tuple[float, float]:
        """Microseconds of the prompt, and of each further token."""
        steps = self.steps(arm, self.setup.open(arm), self.baseline.tokens)
        _synchronize(self.device)
        start = time.perf_counter()
        next(steps)
        _synchronize(self.device)
        first = time.perf_counter()
        for _ in steps:
            pass
        _synchronize(self.device)
        end = time.perf_counter()
        self.done()
        return (first - start) * 1e6, (end - first) * 1e6 / (self.setup.new - 1)


def passes(setup: Setup, arms: Sequence[Arm]) -> int:
    """How often ``done`` of :func:`measure` is called if nothing is refused or fails."""
    return (1 + len(arms)) * (_UNTIMED + setup.repeats)


def measure(setup: Setup, arms: Sequence[Arm], done: Callable[[], None] = lambda: None) -> tuple[AbRow, ...]:
    """The baseline's row and one for each arm. Timed passes go round all arms, every second round backwards.

    SpecError for arguments that no cache takes; a cache that no backend may serve is a row with its reasons.
    """
    rows: dict[Arm | None, AbRow] = {None: AbRow(BASELINE)}
    for arm in arms:
        try:
            rows[arm] = _described(arm, setup.open(arm))
        except IneligibleError as error:
            rows[arm] = AbRow(arm.title, "refused", str(error))
    bench = _Bench(setup, done)
    times: dict[Arm | None, list[tuple[float, float]]] = {}

    def guarded(arm: Arm | None, call: Callable[[], None]) -> None:
        try:
            with bench.attention(arm):
                call()
        except (SpecError, KeyboardInterrupt):
            raise
        except Exception as error:
            if arm is None:
                raise
            import traceback

            setup.on_failure(traceback.format_exc())
            first = (str(error).splitlines() or [""])[0]
            rows[arm] = replace(rows[arm], status="failed", note=f"{type(error).__name__}: {first}")

    def untimed(arm: Arm | None) -> None:
        rows[arm] = bench.untimed(arm, rows[arm])

    def timed(arm: Arm | None) -> None:
        times.setdefault(arm, []).append(bench.timed(arm))

    order: list[Arm | None] = list(rows)
    for each in order:
        if rows[each].status == "ok":
            guarded(each, partial(untimed, each))
    for turn in range(setup.repeats):
        for each in order if turn % 2 == 0 else order[::-1]:
            if rows[each].status == "ok":
                guarded(each, partial(timed, each))
    for each, found in times.items():
        if rows[each].status == "ok":
            prefill, decode = (summary(column) for column in zip(*found, strict=True))
            rows[each] = replace(rows[each], prefill=prefill, decode=decode)
    return tuple(rows.values())


def _described(arm: Arm, cache: Any) -> AbRow:
    """What serves an arm; SpecError if nothing of the model is packed."""
    if arm.mode == "off":
        return AbRow(arm.title)
    packed = [layer for layer in cache.layers if isinstance(layer, PackedLayer | ShadowLayer)]
    if not packed:
        raise SpecError("--protect", cache.plan.question.protect, "fewer native layers: nothing is packed")
    backends = dict.fromkeys(layer.bound.backend for layer in packed)
    return AbRow(arm.title, backend=", ".join(backends), packed_layers=len(packed))


def conditions(setup: Setup, **more: Any) -> Mapping[str, Any]:
    """What a run was made under, for its files."""
    return {
        **more,
        "dtype": setup.dtype,
        "attention": "direct" if setup.direct else "drop-in",
        "batch": int(setup.ids.shape[0]),
        "prompt": int(setup.ids.shape[1]),
        "new": setup.new,
        "repeats": setup.repeats,
        "budget": setup.budget,
        "block_size": setup.block_size,
        "protect": setup.protect,
        "ring_tokens": setup.ring_tokens,
    }
