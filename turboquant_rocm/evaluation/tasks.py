"""What a model is given to read, as tokens with a place from where predictions are scored. No torch here."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ..spec import SpecError, checked_int

__all__ = ["COPY_LEAD", "COPY_TOKENS", "Needle", "Passage", "copies", "needles", "windows"]

COPY_TOKENS: Final = 256
"""Tokens of the passage that the copying test repeats."""
COPY_LEAD: Final = 32
"""Tokens of the repetition that are not scored: until then nothing says that it is one."""

_CITIES: Final = ("Lisbon", "Oslo", "Nairobi", "Quito", "Hanoi", "Dublin", "Lima", "Riga")
_DIGITS: Final = 5


@dataclass(frozen=True)
class Passage:
    """ids: tokens of one forward pass. start: the first one whose prediction is scored, >= 1."""

    ids: tuple[int, ...]
    start: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.start < len(self.ids):
            raise SpecError("start", self.start, f"1 to {len(self.ids) - 1}, a token of the passage")


def _enough(ids: Sequence[int], wanted: int, what: str) -> None:
    if len(ids) < wanted:
        raise SpecError("text", f"{len(ids)} tokens", f"at least {wanted} for {what}")


def windows(ids: Sequence[int], context: int, count: int) -> tuple[Passage, ...]:
    """The first ``count`` windows of ``context`` tokens, side by side; every token but a window's first is scored."""
    checked_int("context", context, 2)
    checked_int("windows", count, 1)
    _enough(ids, context * count, f"{count} windows of {context}")
    return tuple(Passage(tuple(ids[i * context : (i + 1) * context])) for i in range(count))


def copies(ids: Sequence[int], context: int, count: int) -> tuple[Passage, ...]:
    """Exact copying over a distance: a passage, other text, and the passage again, ``context`` tokens in all.

    Scored is the repetition but for its first ``COPY_LEAD`` tokens. Each of the ``count`` windows has its own text.
    """
    checked_int("context", context, 2 * COPY_TOKENS)
    checked_int("windows", count, 1)
    step = context - COPY_TOKENS
    _enough(ids, step * count, f"{count} copying windows of {context}")
    made = []
    for i in range(count):
        text = tuple(ids[i * step : (i + 1) * step])
        made.append(Passage(text + text[:COPY_TOKENS], step + COPY_LEAD))
    return tuple(made)


@dataclass(frozen=True)
class Needle:
    """A number hidden in ``length`` tokens of text at ``depth`` (0: the start, 1: the end), and asked for."""

    passage: Passage
    length: int
    depth: float


def needles(
    ids: Sequence[int],
    encode: Callable[[str], Sequence[int]],
    ends_sentence: Callable[[int], bool],
    lengths: Sequence[int],
    depths: Sequence[float],
    count: int,
    seed: int = 0,
) -> tuple[Needle, ...]:
    """``count`` needles for every length and depth; a hit is every digit of the number being the likeliest token.

    encode: a text's tokens, none added. ends_sentence: of a token. Needles go behind the end of a sentence.
    """
    checked_int("needles", count, 1)
    made = []
    for length in lengths:
        for depth in depths:
            if not 0.0 <= depth <= 1.0:
                raise SpecError("needle depth", depth, "a number from 0 to 1")
            for i in range(count):
                chance = random.Random(f"{seed} {length} {depth} {i}")
                city = chance.choice(_CITIES)
                number = "".join(chance.choice("0123456789") for _ in range(_DIGITS))
                fact = list(encode(f" The secret code of {city} is {number}."))
                question = list(encode(f"\n\nThe secret code of {city} is"))
                answer = list(encode(f" {number}"))
                room = length - len(fact) - len(question) - len(answer)
                if room < 1:
                    raise SpecError("needle length", length, f"at least {length - room + 1} tokens")
                _enough(ids, room, f"a haystack of {length}")
                first = chance.randrange(len(ids) - room + 1)
                hay = list(ids[first : first + room])
                at = round(depth * room)
                while at and not ends_sentence(hay[at - 1]):
                    at -= 1
                whole = hay[:at] + fact + hay[at:] + question + answer
                made.append(Needle(Passage(tuple(whole), len(whole) - len(answer)), length, depth))
    return tuple(made)
