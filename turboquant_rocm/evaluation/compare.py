"""One forward pass per scheme over the same tokens, compared token by token with the unquantised cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from ..spec import SpecError
from .attention import Watch, reading
from .report import Summary
from .schemes import Scheme
from .tasks import Passage

__all__ = ["BLOCK", "Comparison", "Scores", "compare", "key_means", "key_scales", "summarize"]

BLOCK: Final = 128
"""Standard errors are those of means over blocks of so many tokens: neighbours are not independent."""
_ROWS: Final = 256  # rows of logits at a time


@dataclass(frozen=True, eq=False)
class Scores:
    """Of n predicted tokens, all [n] float64 (top1 bool): nll, minus the natural logarithm of the token's probability.

    kl: KL(unquantised || quantised) of the whole distribution. top1: the likeliest token is that of the unquantised
    cache. hit: the likeliest token is the right one.
    """

    nll: np.ndarray
    kl: np.ndarray
    top1: np.ndarray
    hit: np.ndarray


@dataclass(frozen=True, eq=False)
class Comparison:
    """Of one passage: the unquantised cache's scores, and those of every scheme by its name; seconds of each pass."""

    passage: Passage
    exact: Scores
    schemes: dict[str, Scores]
    seconds: dict[str, float]


def _log_probabilities(model: Any, passage: Passage, scheme: Scheme | None) -> torch.Tensor:
    """[n, vocabulary] fp32: what the model says about tokens start, start + 1 ... of the passage."""
    ids = torch.tensor([passage.ids[:-1]], device=model.device)
    count = len(passage.ids) - passage.start
    with torch.inference_mode(), reading(model, scheme):
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=count).logits[0, -count:]
        for a in range(0, count, _ROWS):
            rows = logits[a : a + _ROWS]
            rows.copy_(torch.log_softmax(rows.float(), -1))
        return logits.float()


def _watched(model: Any, ids: Sequence[int], watch: Watch) -> None:
    with torch.inference_mode(), reading(model, None, watch):
        model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False, logits_to_keep=1)


def key_means(model: Any, ids: Sequence[int], skip: int = 0) -> dict[int, torch.Tensor]:
    """Mean keys [Hk, 1, D] of every layer over a text, its first ``skip`` tokens left out: for the option key_mean."""
    found: dict[int, torch.Tensor] = {}

    def watch(layer: int, query: torch.Tensor, key: torch.Tensor) -> None:
        found[layer] = key[0, :, skip:].float().mean(1, keepdim=True).to(key.dtype)

    _watched(model, ids, watch)
    return found


def key_scales(
    model: Any, ids: Sequence[int], skip: int = 0, means: Mapping[int, torch.Tensor] | None = None
) -> dict[int, torch.Tensor]:
    """Scales [Hk, 1, D] of every layer over a text, its first ``skip`` tokens left out: for the option key_scale.

    The fourth root of mean q^2 / mean k^2 of each channel, q of all query heads of the KV head, k less ``means``: then
    scaled keys and queries have the same energy. Channels without any have scale 1.
    """
    found: dict[int, torch.Tensor] = {}

    def watch(layer: int, query: torch.Tensor, key: torch.Tensor) -> None:
        k = key[0, :, skip:].float()
        if means is not None:
            k = k - means[layer].float()
        q = query[0, :, skip:].float().square().mean(1).view(k.shape[0], -1, k.shape[2]).mean(1)
        k = k.square().mean(1)
        scale = torch.where((q > 0) & (k > 0), (q / k).pow(0.25), 1.0)
        found[layer] = scale[:, None].to(key.dtype)

    _watched(model, ids, watch)
    return found


def _scores(passage: Passage, exact: torch.Tensor, found: torch.Tensor) -> Scores:
    right = torch.tensor(passage.ids[passage.start :], device=found.device)
    parts = []
    for a in range(0, len(found), _ROWS):
        p, q, token = (x[a : a + _ROWS] for x in (exact, found, right))
        top = q.argmax(-1)
        nll = -q.gather(1, token[:, None])[:, 0].double()
        kl = torch.zeros_like(nll) if p is q else (p.exp() * (p - q)).sum(-1).double()
        parts.append(torch.stack([nll, kl, top == p.argmax(-1), top == token]))
    nll, kl, top1, hit = torch.cat(parts, 1).cpu().numpy()
    return Scores(nll, kl, top1.astype(bool), hit.astype(bool))


def compare(
    model: Any,
    passages: Iterable[Passage],
    schemes: Sequence[Scheme],
    done: Callable[[], None] = lambda: None,
) -> list[Comparison]:
    """Score every passage with every scheme. model: a transformers causal LM. done: called after every pass."""
    names = [s.name for s in schemes]
    if len(set(names)) != len(names):
        raise SpecError("schemes", names, "names that differ")
    made = []
    for passage in passages:
        seconds: dict[str, float] = {}

        def run(scheme: Scheme | None) -> torch.Tensor:
            start = time.perf_counter()
            found = _log_probabilities(model, passage, scheme)  # noqa: B023 - called in this round only
            seconds[scheme.name if scheme else ""] = time.perf_counter() - start  # noqa: B023
            done()
            return found

        exact = run(None)
        scores = {scheme.name: _scores(passage, exact, run(scheme)) for scheme in schemes}
        made.append(Comparison(passage, _scores(passage, exact, exact), scores, seconds))
    return made


def _mean(parts: Sequence[np.ndarray]) -> tuple[float, float | None]:
    """(mean, standard error) of the tokens of all parts, from means of blocks that do not cross parts."""
    every = np.concatenate(parts).astype(np.float64)
    blocks = [b.mean() for x in parts for b in np.array_split(x.astype(np.float64), max(1, len(x) // BLOCK))]
    if len(blocks) < 2:
        return float(every.mean()), None
    return float(every.mean()), float(np.std(blocks, ddof=1) / len(blocks) ** 0.5)


def summarize(comparisons: Sequence[Comparison], name: str | None = None) -> Summary:
    """All passages together, of the scheme ``name`` or of the unquantised cache."""
    found = [c.exact if name is None else c.schemes[name] for c in comparisons]
    nll, _ = _mean([s.nll for s in found])
    change, change_se = _mean([s.nll - c.exact.nll for s, c in zip(found, comparisons, strict=True)])
    kl, kl_se = _mean([s.kl for s in found])
    top1, top1_se = _mean([s.top1 for s in found])
    hits, _ = _mean([s.hit for s in found])
    ratio = float(np.exp(change))
    return Summary(
        sum(len(s.nll) for s in found), float(np.exp(nll)),
        ratio - 1, None if change_se is None else ratio * change_se, kl, kl_se, top1, top1_se, hits,
    )  # fmt: skip
