"""Which layer gets which scheme for a budget of bytes: exact, over what each layer was measured to cost alone.

A scheme may keep tokens exact: the bytes of those are spread over the tokens of a sequence of a given length. Costs of
layers are taken to add up. They roughly do while they are small; the mixture is therefore measured as a whole
afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..options import OPTION_SETS, CacheOptions, parse_cache
from ..presets import preset_names
from ..spec import Preset, SpecError
from .report import EXACT, Row

__all__ = ["Cache", "Choice", "combinations", "recommend"]

Cache = tuple[Preset, CacheOptions] | None
"""What a name of --presets stands for; None for FP8."""

_STEPS: Final = 4096
"""The budget is divided into so many parts; sizes of layers are rounded up to them."""


@dataclass(frozen=True)
class Choice:
    """layers: the scheme of each, ``exact`` for none. by_scheme: the same, the other way round.

    bytes_per_token: of all layers. bytes_per_sequence: beside those, of exact tokens, key means and scales; in a
    sequence of ``context`` tokens both together keep ``budget`` bytes per token. kl: sum of what the layers cost alone,
    nats per token.
    """

    budget: int
    context: int
    bytes_per_token: float
    bytes_per_sequence: float
    kl: float
    layers: Mapping[int, str]
    by_scheme: Mapping[str, tuple[int, ...]]


def combinations(
    caches: Mapping[str, Cache], sets: Sequence[str] | None = None
) -> tuple[dict[str, Cache], dict[str, str]]:
    """Each preset of ``caches`` that is there without options with every one of ``sets``; why some are not, by name.

    sets: options as behind a preset's name, or ``none`` alone; default OPTION_SETS. SpecError names a wrong one.
    """
    written = [text.removeprefix("+") for text in (OPTION_SETS if sets is None else sets)]
    if written == ["none"]:
        return {}, {}
    for text in written:
        parse_cache(f"{preset_names()[0]}+{text}")
    found: dict[str, Cache] = {}
    left_out: dict[str, str] = {}
    for plain, parsed in caches.items():
        if parsed is None or parsed[1] or parsed[0].rotated_values:
            continue
        for text in written:
            name = f"{plain}+{text}"
            try:
                cache = parse_cache(name)
            except SpecError as error:  # some presets have no rotated values
                left_out[name] = str(error)
                continue
            name = f"{cache[0].name.removeprefix('turboquant_')}{cache[1]}"
            if name not in caches:
                found[name] = cache
    return found, left_out


def recommend(rows: Sequence[Row], budget: int, context: int) -> Choice:
    """The choice with the smallest sum of KL within ``budget`` bytes per token at ``context`` tokens.

    rows: exact first, with ``layers``. SpecError if even the smallest choice is larger.
    """
    measured = [r for r in rows if r.layers]
    if not measured:
        raise SpecError("rows", [r.name for r in rows], "rows with the costs of single layers")
    costs = [{c.layer: c for c in r.layers} for r in measured]
    named = {r.name: c for r, c in zip(measured, costs, strict=True)}
    numbers = sorted(set.intersection(*(set(c) for c in costs)))
    exact = {layer: costs[0][layer].exact_bytes for layer in numbers}
    fixed = rows[0].bytes_per_token - sum(exact.values())  # of layers that no scheme quantises
    options: list[list[tuple[float, float, str]]] = []  # of each layer: (bytes, KL, scheme)
    for layer in numbers:
        found = [(exact[layer], 0.0, EXACT)]
        found += [
            (c[layer].bytes_per_token + c[layer].bytes_per_sequence / context, max(0.0, c[layer].kl), r.name)
            for r, c in zip(measured, costs, strict=True)
        ]
        options.append(found)
    smallest = fixed + sum(min(size for size, _, _ in found) for found in options)
    if smallest > budget:
        raise SpecError("--recommend", budget, f"at least {math.ceil(smallest)} bytes, with the caches tried")
    unit = (budget - fixed) / _STEPS
    best = np.full(_STEPS + 1, np.inf)  # least KL of the layers so far within each number of units
    best[0] = 0.0
    taken = np.zeros((len(options), _STEPS + 1), dtype=np.int64)
    for i, found in enumerate(options):
        after = np.full(_STEPS + 1, np.inf)
        for j, (size, kl, _) in enumerate(found):
            units = int(np.ceil(size / unit - 1e-9))
            if units > _STEPS:
                continue
            moved = np.full(_STEPS + 1, np.inf)
            moved[units:] = best[: _STEPS + 1 - units] + kl
            better = moved < after
            after[better], taken[i][better] = moved[better], j
        best = after
    if not np.isfinite(best).any():  # only rounding up to units made it too large
        chosen = [min(found) for found in options]
    else:
        at = int(np.argmin(best))
        chosen = []
        for i in reversed(range(len(options))):
            pick = options[i][taken[i][at]]
            chosen.append(pick)
            at -= int(np.ceil(pick[0] / unit - 1e-9))
        chosen.reverse()
    layers = {layer: name for layer, (_, _, name) in zip(numbers, chosen, strict=True)}
    by_scheme = {
        name: tuple(layer for layer, n in layers.items() if n == name)
        for name in dict.fromkeys(layers.values())
    }
    picked = [named[name][layer] for layer, name in layers.items() if name != EXACT]
    beside = sum(cost.bytes_per_sequence for cost in picked)
    stored = fixed + sum(c.bytes_per_token for c in picked)
    stored += sum(exact[layer] for layer, name in layers.items() if name == EXACT)
    cost = sum(kl for _, kl, _ in chosen)
    return Choice(budget, context, stored, beside, cost, layers, by_scheme)
