"""Options that buy accuracy for few bytes, beside the preset: what a cache keeps exact, and what it stores keys as.

They change no byte of a slot, so every backend serves them: attention over the packed tokens, which returns its lse, is
merged with attention over the exact ones. Off by default. Written behind a preset's name, as in
``3bit_nc+recent=128+first=4+key_mean+key_scale``; ``+rotated_values``, which changes the slot, is part of the preset's
own name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from .eligibility import Code, Refusal, Request, Requirement, Without, refusals
from .presets import get_preset
from .spec import ROTATED_VALUES, LayerSpec, Preset, SpecError, checked_int

__all__ = ["EXACT", "OPTIONS", "OPTION_SETS", "CacheOptions", "Option", "exact_row_bytes", "parse_cache"]

_MOST: Final = 1 << 24
_KEY_MEAN: Final = "key_mean"
_KEY_SCALE: Final = "key_scale"


@dataclass(frozen=True, slots=True)
class Option:
    """An option as reports list it, and what it needs. written: behind a preset's name. what: it does.

    code: what a backend's declaration must accept, for options that change the slot and so need kernels; None for those
    that work around the kernels, with the lse that every backend's decode returns. layer: what a layer must be.
    """

    written: str
    what: str
    code: Code | None = None
    layer: tuple[Requirement, ...] = ()


OPTIONS: Final = (
    Option("recent=N", "the last N tokens are exact", layer=(Without(Code.WINDOW),)),
    Option("first=N", "the first N tokens are exact", layer=(Without(Code.WINDOW),)),
    Option(
        _KEY_MEAN,
        "keys are packed less their mean",
        layer=(Without(Code.WINDOW), Without(Code.SINKS), Without(Code.SOFT_CAP)),
    ),
    Option(
        _KEY_SCALE,
        "channels of keys are packed scaled, those of queries scaled back",
        layer=(Without(Code.WINDOW),),
    ),
    Option(ROTATED_VALUES[1:], "values are rotated and coded as keys are", Code.ROTATED_VALUES),
)
"""Every option there is. Who serves one follows from it and from the backends' declarations: nothing else says so."""

EXACT: Final = "exact"
"""What a layer that is not quantised is called where others have a preset and options."""

OPTION_SETS: Final = (
    "+rotated_values",
    "+first=4+key_mean",
    "+rotated_values+first=4+key_mean",
    "+recent=128+first=4+key_mean",
    "+rotated_values+recent=128+first=4+key_mean",
)
"""What ``evaluate --recommend`` tries behind each preset: in the same slot or another, for no bytes or for some."""


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """recent: at least so many of the last tokens are exact. first: so many of the first tokens are.

    key_mean: keys are packed less a constant per layer and KV head, their mean over other text or over the first
    chunk. It moves all scores of a query alike, which the lse of the packed tokens is corrected for.
    key_scale: keys are packed times a constant per layer, KV head and channel, and queries of them divided by it: the
    fourth root of the ratio of the queries' energy to the keys', measured on other text. No score changes.
    flush: tokens that move from the exact last ones to the packed ones at once.
    """

    recent: int = 0
    first: int = 0
    key_mean: bool = False
    key_scale: bool = False
    flush: int = field(default=16, kw_only=True)

    def __post_init__(self) -> None:
        checked_int("recent", self.recent, 0, _MOST)
        checked_int("first", self.first, 0, _MOST)
        checked_int("flush", self.flush, 1, _MOST)
        for name in (_KEY_MEAN, _KEY_SCALE):
            if not isinstance(getattr(self, name), bool):
                raise SpecError(name, getattr(self, name), "true or false")

    def __bool__(self) -> bool:
        return bool(self.recent or self.first or self.key_mean or self.key_scale)

    def __str__(self) -> str:
        parts = [f"{name}={getattr(self, name)}" for name in ("recent", "first") if getattr(self, name)]
        parts += [name for name in (_KEY_MEAN, _KEY_SCALE) if getattr(self, name)]
        return "".join(f"+{part}" for part in parts)

    def refusals(self, request: Request) -> tuple[Refusal, ...]:
        """Why the request's layer cannot have these options; empty if it can."""
        asked = {
            "recent=N": self.recent, "first=N": self.first, _KEY_MEAN: self.key_mean, _KEY_SCALE: self.key_scale
        }  # fmt: skip
        needs = dict.fromkeys(r for option in OPTIONS if asked.get(option.written) for r in option.layer)
        return refusals(needs, request)

    def packed_end(self, length: int) -> int:
        """End of the packed tokens [first, end) of a sequence of ``length`` tokens; the others are exact."""
        step = self.flush if self.recent else 1
        return min(length, self.first + max(0, length - self.first - self.recent) // step * step)

    @property
    def exact_tokens(self) -> int:
        """Most tokens of a sequence that are exact at once."""
        return self.first + (self.recent + self.flush - 1 if self.recent else 0)


def exact_row_bytes(layer: LayerSpec, itemsize: int) -> int:
    """Bytes of a token of one layer as plain keys and values of ``itemsize`` bytes an element."""
    return layer.num_kv_heads * (layer.head_size + layer.value_size) * itemsize


def parse_cache(text: str) -> tuple[Preset, CacheOptions]:
    """Preset and options of ``NAME[+rotated_values][+recent=N][+first=N][+key_mean][+key_scale]``, or SpecError."""
    name, *parts = str(text).split("+")
    values: dict[str, int | bool] = {}
    for part in parts:
        option, _, number = part.partition("=")
        if part == ROTATED_VALUES[1:] and not name.endswith(ROTATED_VALUES):
            name += ROTATED_VALUES
        elif part in (_KEY_MEAN, _KEY_SCALE) and part not in values:
            values[part] = True
        elif option in ("recent", "first") and number.isdecimal() and option not in values:
            values[option] = int(number)
        else:
            wants = f"{ROTATED_VALUES[1:]}, recent=N, first=N, {_KEY_MEAN} or {_KEY_SCALE}, each once"
            raise SpecError("cache option", part, wants)
    return get_preset(name), CacheOptions(**values)  # type: ignore[arg-type]
