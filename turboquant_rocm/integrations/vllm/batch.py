"""How one batch is split: a leading run of decodes, and the rest, whose sequences each take their own route.

vLLM puts sequences with few query tokens first. Those of up to ``threshold`` tokens (one, or one more than the number
of speculative tokens) are decoded together from the packed cache, with lengths read on the device. What follows goes to
:func:`...continuation.attend_prefill`, where the history of each sequence decides, not that of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Split", "split"]


@dataclass(frozen=True, slots=True)
class Split:
    """decodes: sequences of the leading run; decode_rows: their query tokens; decode_len: most of any of them.

    query_lens: of the sequences behind them that have query tokens or stand before one that has.
    """

    decodes: int
    decode_rows: int
    decode_len: int
    query_lens: tuple[int, ...]

    @property
    def single(self) -> bool:
        """True if row i of the decodes is sequence i."""
        return self.decode_len == 1 and self.decode_rows == self.decodes


def split(starts: Sequence[int], threshold: int) -> Split:
    """The split of a batch with query rows [starts[i], starts[i + 1]) for sequence i.

    Sequences without query tokens (the padding of a captured batch) may stand anywhere.
    """
    lens = [b - a for a, b in pairwise(starts)]
    decodes = 0
    while decodes < len(lens) and lens[decodes] <= threshold:
        decodes += 1
    rest = lens[decodes:]
    while rest and not rest[-1]:
        rest.pop()
    longest = max(lens[:decodes], default=0)
    return Split(decodes, starts[decodes] - starts[0] if starts else 0, longest, tuple(rest))
