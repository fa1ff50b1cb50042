"""What the operands of an NVIDIA kernel's asynchronous products are, read from its machine code.

A product of a warpgroup (IGMMA, HGMMA) finds an operand in shared memory by a descriptor of 64 bits in uniform
registers: where it begins, in units of 16 bytes, and how it is laid out ("Matrix Descriptor Format" of NVIDIA's PTX
manual). ptxas works these out with instructions that the PTX does not have, and once took a register that nothing had
set (docs/performance.md). So they are worked out here, along the way from the beginning through every loop once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.compile_checks import run_on_cubin

__all__ = ["DISASSEMBLER", "Operand", "disassembled", "operands"]

DISASSEMBLER = "nvdisasm"
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_UNIFORM = re.compile(r"^UR(\d+)$")
_NUMBER = re.compile(r"^-?(0x[0-9a-f]+|\d+)$")
_PREDICATE = re.compile(r"^!?UPT?\d*$")


@dataclass(frozen=True)
class _Sum:
    """A number that is not known, and one that is added to it. of: what it is, "" if nothing says so."""

    of: str
    plus: int = 0


Value = int | _Sum


@dataclass(frozen=True)
class Operand:
    """place: where it begins in shared memory, bytes, None if that does not follow; behind: units of 16 bytes from
    there, a part of the operand; layout: upper half of the descriptor, None if it is no number."""

    product: str
    place: int | None
    behind: int
    layout: int | None


def disassembled(compiled: Any) -> list[str]:
    """The instructions of a kernel."""
    ran = run_on_cubin(DISASSEMBLER, "-c", compiled)
    ran.check_returncode()
    return [found[1] for found in map(_INSTRUCTION.match, ran.stdout.splitlines()) if found]


def _added(values: Iterable[Value]) -> Value:
    known, unknown = 0, []
    for value in values:
        if isinstance(value, int):
            known += value
        else:
            known += value.plus
            unknown.append(value.of)
    if not unknown:
        return known
    return _Sum(unknown[0] if len(unknown) == 1 else "", known)


def operands(instructions: Iterable[str]) -> Iterator[Operand]:
    """Of every product, in the order of the instructions."""
    held: dict[int, Value] = {}

    def register(number: int) -> Value:
        return held.get(number, _Sum(""))

    def value(text: str) -> Value:
        text = text.strip()
        if text == "URZ":
            return 0
        if found := _UNIFORM.match(text):
            return register(int(found[1]))
        return int(text, 0) if _NUMBER.match(text) else _Sum("")

    for line in instructions:
        name, _, rest = line.partition(" ")
        if name.startswith("@"):  # not on the way, or maybe
            continue
        parts = [part.strip() for part in rest.split(",")]
        if name.startswith(("IGMMA", "HGMMA")):
            found = re.search(r"gdesc\[UR(\d+)\]", rest)
            assert found, line
            first = int(found[1])
            yield _operand(name, register(first + 2), register(first + 3))
            continue
        to = _UNIFORM.match(parts[0])
        if not to:
            continue
        number = int(to[1])
        sources = [part for part in parts[1:] if not _PREDICATE.match(part)]
        if name == "UMOV":
            held[number] = value(sources[0])
        elif name in ("UIADD3", "UIADD3.X"):
            held[number] = _added(map(value, sources))
        elif name == "UIADD3.64":
            pair = _UNIFORM.match(sources[0])
            assert pair, line
            low, high = (register(int(pair[1]) + i) for i in range(2))
            held[number], held[number + 1] = _added([low, *map(value, sources[1:])]), high
        elif name == "USHF.R.U32.HI" and sources[1] == "0x4":
            held[number] = _wrapped("/16", value(sources[2]))
        elif name == "USGXT.U32" and sources[1] in ("0xe", "0xf"):  # bits that a descriptor has for it
            held[number] = _wrapped(" cut", value(sources[0]))
        elif name.startswith("ULEA") and parts[-1] == "0x18":  # the window of shared memory: 2^24 bytes
            held[number] = _Sum("shared")
        else:
            held[number] = _Sum("")
            if name.endswith((".64", ".WIDE", ".WIDE.U32")):
                held[number + 1] = _Sum("")


def _wrapped(by: str, value: Value) -> Value:
    if isinstance(value, int) or not value.of:
        return _Sum("")
    return _Sum(f"{value.of}+{value.plus}{by}")


def _operand(product: str, low: Value, high: Value) -> Operand:
    place, behind = None, 0
    if isinstance(low, _Sum) and (found := re.fullmatch(r"shared\+(\d+)/16\+0 cut", low.of)):
        place, behind = int(found[1]), low.plus
    return Operand(product.split(".")[0], place, behind, high % 2**32 if isinstance(high, int) else None)
