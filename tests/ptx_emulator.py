"""Executes the PTX of a kernel on the CPU, one block of 128 threads at a time, and finds what a GPU would hide.

Semantics are those of NVIDIA's "Parallel Thread Execution ISA", sections named below. What is modelled:

* Registers and predicates of all threads, integer, fp32, fp16 and byte instructions ("Instruction Set"), bit by bit but
  for the exceptions below. An instruction that is not known here is an error when the program is read.
* Global memory as a list of regions, each an array of bytes. An access that is not inside one of them, is misaligned,
  writes what is only read, or writes a byte that another block of the launch has written, is an error.
* Shared memory with the order of accesses ("Memory Consistency Model"): between two barriers no byte may be written by
  one warp and touched by another. Bytes that ``cp.async`` brings may not be touched before ``cp.async.wait_group``, and
  from there to the next barrier only by the thread that asked for them ("Asynchronous copy"). Reading bytes that nobody
  has written is an error too.
* ``wgmma`` ("Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions"): operands laid out as its register
  fragments and matrix descriptors say; what was stored to shared memory needs ``fence.proxy.async`` and a barrier
  before it is read; registers that were written need ``wgmma.fence``; until ``wgmma.wait_group`` its registers may not
  be touched and what it reads not be written.
* ``griddepcontrol`` ("Parallel Synchronization and Communication Instructions"): before ``griddepcontrol.wait`` nothing
  may be stored, no region be read that the kernel before this one writes, and no dependent kernel be launched. Every
  block must wait.

What is not: time, caches, registers of a real machine, and what ptxas makes of the PTX. Threads run in lockstep, so
inside a warp every instruction is over before the next one. All threads must take the same way; a branch that only some
take may skip a few instructions that no other thread takes part in. ``fma.rn.f32`` is rounded twice (to fp64, then to
fp32), fp32 sums of ``wgmma`` once per instruction, in no order of the hardware's; ``ex2.approx``, ``lg2.approx`` and
``div.full`` are exact to a rounding. NaN have no particular payload.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "THREADS", "AccessError", "Fault", "GlobalMemory", "Instruction", "Program", "RaceError", "Region",
    "UnknownInstruction", "run_block",
]  # fmt: skip

THREADS = 128
"""Of a block: one warpgroup."""
_WARP = 32
_WARPS = THREADS // _WARP
_THREAD = np.arange(THREADS)
_ALL = np.ones(THREADS, bool)
_STEPS = 1_000_000
_QUOTED = 120  # characters of an instruction in a message
_POISON = 0xCD
"""Every byte of a register or of shared memory before it is written."""

Values = NDArray[Any]
"""[THREADS], unsigned integers of a register's width, or bool."""


class Fault(Exception):
    """The program does what it must not."""


class AccessError(Fault):
    """It touches memory that it must not touch."""


class RaceError(Fault):
    """What it touches depends on who is faster."""


class UnknownInstruction(Fault):
    """This emulator does not know what an instruction does."""


# ---- programs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Address:
    """[base + offset]; base: a register or a symbol."""

    base: str
    offset: int


Operand = str | tuple[str, ...] | Address
"""A register, a symbol or a number; a vector of them; an address."""


@dataclass(frozen=True)
class Instruction:
    """guard: predicate that it depends on, and the value that the predicate must have."""

    name: str
    operands: tuple[Operand, ...]
    guard: tuple[str, bool] | None
    text: str
    registers: frozenset[str]

    @classmethod
    def of(cls, text: str) -> Instruction:
        """Reads one statement, without its semicolon."""
        text = " ".join(text.split())
        match = re.match(r"^(?:@(!?)(\S+) )?(\S+) ?(.*)$", text)
        assert match, text
        negated, predicate, name, rest = match.groups()
        operands = tuple(_operand(part) for part in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest))
        registers = {predicate} if predicate else set()
        for operand in operands:
            registers |= {operand.base if isinstance(operand, Address) else n for n in _names(operand)}
        guard = (predicate, not negated) if predicate else None
        return cls(name, operands, guard, text[:_QUOTED], frozenset(n for n in registers if n[0] in "%@"))


def _operand(text: str) -> Operand:
    if text[0] == "{":
        return tuple(part.strip() for part in text[1:-1].split(","))
    if text[0] == "[":
        match = re.match(r"^(\S+?)\s*(?:\+\s*(-?\d+))?$", text[1:-1].strip())
        assert match, text
        return Address(match[1], int(match[2] or 0))
    return text


def _names(operand: Operand) -> tuple[str, ...]:
    if isinstance(operand, Address):
        return (operand.base,)
    return operand if isinstance(operand, tuple) else (operand,)


@dataclass(frozen=True)
class Program:
    """One kernel. labels: number of the instruction that each stands before."""

    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]

    @cached_property
    def waits(self) -> bool:
        """Whether it may be launched while the kernel before it runs."""
        return bool(self.positions("griddepcontrol.wait"))

    @classmethod
    def of(cls, ptx: str) -> Program:
        """Reads the first function of a module."""
        ptx = re.sub(r"//[^\n]*", "", ptx)
        body = re.sub(r"^\s*\.loc\b[^\n]*$", "", ptx[ptx.index(".entry") :], flags=re.M)
        instructions: list[Instruction] = []
        labels: dict[str, int] = {}
        for statement in _statements(body[body.index("{") :]):
            if statement.endswith(":"):
                labels[statement[:-1]] = len(instructions)
                continue
            instruction = Instruction.of(statement)
            if instruction.name not in _EXECUTE and instruction.name not in _CONTROL:
                raise UnknownInstruction(instruction.text)
            instructions.append(instruction)
        return cls(tuple(instructions), labels)

    def replaced(self, position: int, *texts: str) -> Program:
        """The same with other instructions, or none, in place of one."""
        made = tuple(Instruction.of(text) for text in texts)
        moved = len(made) - 1
        return Program(
            self.instructions[:position] + made + self.instructions[position + 1 :],
            {name: at + moved * (at > position) for name, at in self.labels.items()},
        )

    def positions(self, name: str) -> list[int]:
        """Where an instruction stands."""
        return [i for i, instruction in enumerate(self.instructions) if instruction.name == name]


def _statements(body: str) -> Iterator[str]:
    """Instructions, and labels with their colon. Names declared in an inner block get its number."""
    scopes: list[dict[str, str]] = []
    opened = at = 0
    while True:
        match = re.compile(r"\s*(\{|\}|[$\w]+:(?!:)|[^;{}][^;]*;)").match(body, at)
        assert match, f"no statement: {body[at : at + _QUOTED]}"
        statement, at = match[1], match.end()
        if statement == "{":
            opened += 1
            scopes.append({})
        elif statement == "}":
            scopes.pop()
            if not scopes:
                return
        elif statement.endswith(":"):
            yield statement
        elif declared := re.match(r"\.reg\s+\.\w+\s+(.*);", statement, re.S):
            if len(scopes) > 1:
                names = [name.strip() for name in declared[1].split(",")]
                scopes[-1] |= {name: f"@{opened}.{name}" for name in names}
        elif not statement.startswith(".pragma"):
            yield _renamed(statement[:-1], {name: to for scope in scopes for name, to in scope.items()})


def _renamed(statement: str, names: Mapping[str, str]) -> str:
    """With other names for registers; a mnemonic has a dot behind it or is none of them."""
    return re.sub(r"(?<![\w%.$])[A-Za-z_]\w*(?![\w.])", lambda name: names.get(name[0], name[0]), statement)


# ---- memory ------------------------------------------------------------------------------------------------


@dataclass
class Region:
    """Bytes of global memory from ``base`` on. awaited: the kernel before this one writes them."""

    name: str
    base: int
    data: NDArray[np.uint8]
    writable: bool = False
    awaited: bool = False
    written: NDArray[np.bool_] | None = None
    """By blocks that have ended. None: no byte."""
    fresh: NDArray[np.bool_] | None = None
    """Likewise by this one."""


class GlobalMemory:
    """What a launch may touch. Nothing else is there."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = regions

    def load(self, address: Values, size: int, mask: Values, waited: bool) -> NDArray[np.uint8]:
        """[THREADS, size]; 0 where ``mask`` is not set."""
        out = np.zeros((THREADS, size), np.uint8)
        for region, threads, places in self._places("read", address, size, mask):
            if region.awaited and not waited:
                raise RaceError(f"read of {region.name} before griddepcontrol.wait")
            out[threads] = region.data[places]
        return out

    def store(self, address: Values, mask: Values, data: NDArray[np.uint8]) -> None:
        """data: [THREADS, size]."""
        for region, threads, places in self._places("write", address, data.shape[1], mask):
            if not region.writable:
                raise AccessError(f"write to {region.name}, which is only read")
            if region.written is None or region.fresh is None:
                region.written = np.zeros(region.data.size, bool)
                region.fresh = np.zeros(region.data.size, bool)
            if region.written[places].any():
                raise RaceError(f"two blocks write the same bytes of {region.name}")
            region.data[places] = data[threads]
            if (region.data[places] != data[threads]).any():
                raise RaceError(f"two threads write different values to the same bytes of {region.name}")
            region.fresh[places] = True

    def end_block(self) -> None:
        """What follows is of another block."""
        for region in self._regions:
            if region.written is not None and region.fresh is not None:
                region.written |= region.fresh
                region.fresh[:] = False

    def _places(
        self, what: str, address: Values, size: int, mask: Values
    ) -> Iterator[tuple[Region, Values, NDArray[np.int64]]]:
        """Of each region that is touched: by which threads, and numbers of the bytes [threads, size]."""
        if (address[mask] % size).any():
            raise AccessError(f"misaligned {what} of {size} bytes")
        left = mask.copy()
        for region in self._regions:
            inside = left & (address >= region.base) & (address + size <= region.base + region.data.size)
            if inside.any():
                left &= ~inside
                yield region, inside, (address[inside] - region.base)[:, None] + np.arange(size)
        if left.any():
            thread = int(np.nonzero(left)[0][0])
            last = max(self._regions, key=lambda r: (r.base <= address[thread]) * r.base)
            raise AccessError(
                f"{what} of {size} bytes outside every tensor, by thread {thread}:"
                f" at {int(address[thread]) - last.base} of {last.name}, which has {last.data.size} bytes"
            )


@dataclass(frozen=True)
class _Copy:
    """A ``cp.async`` of some threads that has not arrived: [n, size] places and bytes, [n] threads."""

    places: NDArray[np.int64]
    threads: NDArray[np.int64]
    data: NDArray[np.uint8]


class SharedMemory:
    """Bytes, and of each who may touch it."""

    def __init__(self, size: int) -> None:
        self._data = np.full(size, _POISON, np.uint8)
        self._known = np.zeros(size, bool)  # somebody has written it
        self._writer = np.full(size, -1, np.int8)  # warp, since the last barrier
        self._readers = np.zeros(size, np.uint8)  # one bit for each warp, since the last barrier
        self._copier = np.full(size, -1, np.int16)  # thread whose copy has arrived since the last barrier
        self._coming = np.zeros(size, bool)  # a copy is on its way
        self._unfenced = np.zeros(size, bool)  # written and not fenced for wgmma
        self._multiplied = np.zeros(size, bool)  # wgmma reads it
        self._copies: list[_Copy] = []
        self._groups: list[list[_Copy]] = []

    def barrier(self) -> None:
        """What came before is over for all threads; but for copies and ``wgmma`` on their way, and proxy fences."""
        self._writer[:] = -1
        self._readers[:] = 0
        self._copier[:] = -1

    def fence(self) -> None:
        """All threads execute ``fence.proxy.async``. It may stand before the barrier or behind it."""
        self._unfenced[:] = False

    def load(self, places: NDArray[np.int64], threads: NDArray[np.int64]) -> NDArray[np.uint8]:
        """places: [n, size], each row read by one thread [n]."""
        self._check(places)
        warps = (threads // _WARP)[:, None]
        writer, copier = self._writer[places], self._copier[places]
        if ((writer >= 0) & (writer != warps)).any():
            raise RaceError("read of what another warp wrote, with no barrier in between")
        if ((copier >= 0) & (copier != threads[:, None])).any():
            raise RaceError("read of what another thread copied, with no barrier in between")
        if self._coming[places].any():
            raise RaceError("read of bytes whose copy has not arrived")
        if not self._known[places].all():
            raise AccessError("read of shared memory that nobody has written")
        np.bitwise_or.at(self._readers, places, (1 << warps).astype(np.uint8))
        return self._data[places]

    def store(self, places: NDArray[np.int64], threads: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
        """As :meth:`load`; data: [n, size]."""
        self._check_free(places, threads)
        self._put(places, threads, data)
        if (self._data[places] != data).any():
            raise RaceError("two threads write different values to the same bytes")

    def copy(self, places: NDArray[np.int64], threads: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
        """``cp.async``: as :meth:`store`, but the bytes arrive with :meth:`wait`."""
        self._check_free(places, threads)
        self._coming[places] = True
        self._data[places] = _POISON
        self._copies.append(_Copy(places, threads, data))

    def commit(self) -> None:
        """The copies so far that are in no group are one."""
        self._groups.append(self._copies)
        self._copies = []

    def wait(self, most: int) -> None:
        """Until no more than ``most`` groups of copies are on their way."""
        while len(self._groups) > most:
            for copy in self._groups.pop(0):
                self._put(copy.places, copy.threads, copy.data)
                self._copier[copy.places] = copy.threads[:, None]
                self._coming[copy.places] = False

    def multiply(self, places: NDArray[np.int64]) -> NDArray[np.uint8]:
        """What a ``wgmma`` of all warps reads, until :meth:`multiplied`."""
        self._check(places)
        if self._coming[places].any():
            raise RaceError("wgmma reads bytes whose copy has not arrived")
        if not self._known[places].all():
            raise AccessError("wgmma reads shared memory that nobody has written")
        if self._unfenced[places].any():
            raise RaceError("wgmma reads what was written, with no proxy fence in between")
        if (self._writer[places] >= 0).any():
            raise RaceError("wgmma reads what was written, with no barrier in between")
        self._readers[places] = (1 << _WARPS) - 1
        self._multiplied[places] = True
        return self._data[places]

    def multiplied(self, still: Sequence[NDArray[np.int64]]) -> None:
        """All ``wgmma`` are over but those that read ``still``."""
        self._multiplied[:] = False
        for places in still:
            self._multiplied[places] = True

    def _put(self, places: NDArray[np.int64], threads: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
        self._data[places] = data
        self._known[places] = True
        self._unfenced[places] = True
        self._writer[places] = (threads // _WARP)[:, None]

    def _check(self, places: NDArray[np.int64]) -> None:
        if places.size and (places.min() < 0 or places.max() >= self._data.size):
            raise AccessError(f"shared memory has {self._data.size} bytes, touched is {places.max()}")

    def _check_free(self, places: NDArray[np.int64], threads: NDArray[np.int64]) -> None:
        self._check(places)
        warps = (threads // _WARP)[:, None]
        writer, copier = self._writer[places], self._copier[places]
        if ((writer >= 0) & (writer != warps)).any() or ((copier >= 0) & (copier != threads[:, None])).any():
            raise RaceError("write over what another warp wrote, with no barrier in between")
        if (self._readers[places] & ~(1 << warps).astype(np.uint8)).any():
            raise RaceError("write over what another warp reads, with no barrier in between")
        if self._coming[places].any():
            raise RaceError("write over bytes whose copy has not arrived")
        if self._multiplied[places].any():
            raise RaceError("write over what wgmma reads")


# ---- blocks ------------------------------------------------------------------------------------------------


@dataclass
class _Multiplication:
    """A ``wgmma`` that is not over: its registers, and what it reads of shared memory."""

    registers: set[str]
    places: NDArray[np.int64]


@dataclass
class _Block:
    """State of one block while it runs."""

    program: Program
    parameters: Sequence[Values]
    memory: GlobalMemory
    shared: SharedMemory
    special: Mapping[str, int]
    registers: dict[str, Values] = field(default_factory=dict)
    waited: bool = False
    unfenced: set[str] = field(default_factory=set)
    """Registers written since wgmma.fence."""
    multiplications: list[_Multiplication] = field(default_factory=list)
    multiplication_groups: list[list[_Multiplication]] = field(default_factory=list)
    busy: set[str] = field(default_factory=set)
    """Registers of multiplications that are not over."""

    # ---- registers

    def get(self, operand: Operand, bits: int) -> Values:
        """A register, a number, or a special register, ``bits`` wide."""
        assert isinstance(operand, str), f"no scalar: {operand}"
        found = self.registers.get(operand)
        if found is not None:
            if found.dtype != _UNSIGNED[bits]:
                raise Fault(f"{operand} has {found.dtype}, wanted are {bits} bits")
            return found
        if operand == "%tid.x":
            return _THREAD.astype(_UNSIGNED[bits])
        if operand in self.special:
            return np.full(THREADS, self.special[operand], _UNSIGNED[bits])
        if operand[0] in "%@_":
            raise Fault(f"{operand} was never written")
        number = int(operand[2:], 16) if operand.startswith("0f") else int(operand.rstrip("U"), 0)
        return np.full(THREADS, number & ((1 << bits) - 1), _UNSIGNED[bits])

    def predicate(self, operand: Operand) -> Values:
        assert isinstance(operand, str), f"no predicate: {operand}"
        found = self.registers.get(operand)
        if found is None and operand[0] not in "%@":
            return np.full(THREADS, bool(int(operand)))
        if found is None or found.dtype != bool:
            raise Fault(f"{operand} was never written, or is no predicate")
        return found

    def put(self, operand: Operand, values: Values, mask: Values) -> None:
        """Writes a register of the threads in ``mask``."""
        assert isinstance(operand, str) and operand[0] in "%@", f"no register: {operand}"
        if values.dtype != bool:
            values = _unsigned(values)
        if mask is not _ALL and not mask.all():
            before = self.registers.get(operand)
            if before is None:
                before = np.full(THREADS * values.itemsize, _POISON, np.uint8).view(values.dtype)
                before = np.zeros(THREADS, bool) if values.dtype == bool else before
            values = np.where(mask, values, before)
        self.registers[operand] = values
        self.unfenced.add(operand)

    def address(self, operand: Operand, bits: int) -> NDArray[np.int64]:
        assert isinstance(operand, Address), f"no address: {operand}"
        return self.get(operand.base, bits).astype(np.int64) + operand.offset

    # ---- control

    def run(self) -> None:
        at, steps = 0, 0
        instructions = self.program.instructions
        while at < len(instructions):
            instruction = instructions[at]
            at += 1
            steps += 1
            if steps > _STEPS:
                raise Fault("too many instructions")
            mask = self._mask(instruction, _ALL)
            if instruction.name in _CONTROL:
                if not mask.any():
                    continue
                if instruction.name == "ret":
                    if not mask.all():
                        raise Fault(f"only some threads: {instruction.text}")
                    break
                target = self.program.labels[str(instruction.operands[0])]
                if not mask.all():
                    self._skip(instruction, at, target, ~mask)
                at = target
                continue
            self.execute(instruction, mask)
        if not self.waited and self.program.waits:
            raise RaceError("the block ended without griddepcontrol.wait")

    def execute(self, instruction: Instruction, mask: Values) -> None:
        """Anything but a branch, for the threads in ``mask``."""
        if not mask.any():
            return
        kind = instruction.name.split(".")[0]
        if kind in _TOGETHER and not mask.all():
            raise Fault(f"only some threads: {instruction.text}")
        if self.busy and kind != "wgmma" and not self.busy.isdisjoint(instruction.registers):
            raise RaceError(f"register of a wgmma that is not over: {instruction.text}")
        try:
            _EXECUTE[instruction.name](self, instruction, mask)
        except Fault as fault:
            raise type(fault)(f"{fault}: {instruction.text}") from fault

    def _mask(self, instruction: Instruction, among: Values) -> Values:
        if instruction.guard is None:
            return among
        name, wanted = instruction.guard
        return among & (self.predicate(name) == wanted)

    def _skip(self, branch: Instruction, at: int, target: int, stay: Values) -> None:
        """A branch forward that the threads in ``stay`` do not take: they alone execute what it skips."""
        skipped = self.program.instructions[at:target]
        alone = all(i.name not in _CONTROL and i.name.split(".")[0] not in _TOGETHER for i in skipped)
        if target < at or not alone:
            raise Fault(f"threads part: {branch.text}")
        for instruction in skipped:
            self.execute(instruction, self._mask(instruction, stay))


def run_block(
    program: Program,
    parameters: Sequence[Values],
    memory: GlobalMemory,
    shared_bytes: int,
    block: tuple[int, int, int],
    grid: tuple[int, int, int],
) -> None:
    """Executes one block of a launch. parameters: [THREADS] each, uint32 or uint64. Raises what it finds."""
    special = {"global_smem": 0}
    for axis, number, count in zip("xyz", block, grid, strict=True):
        special |= {f"%ctaid.{axis}": number, f"%nctaid.{axis}": count}
    state = _Block(program, parameters, memory, SharedMemory(shared_bytes), special)
    try:
        with np.errstate(all="ignore"):
            state.run()
    except Fault as fault:
        raise type(fault)(f"block {block}: {fault}") from fault
    memory.end_block()


# ---- instructions ------------------------------------------------------------------------------------------

_CONTROL = ("bra", "bra.uni", "ret")
_TOGETHER = ("bar", "shfl", "redux", "ldmatrix", "stmatrix", "wgmma", "griddepcontrol", "fence")
"""What all threads must take part in. First parts of names."""

_UNSIGNED = {8: np.dtype(np.uint8), 16: np.dtype(np.uint16), 32: np.dtype(np.uint32), 64: np.dtype(np.uint64)}
_INTEGERS = {
    "s16": np.dtype(np.int16), "s32": np.dtype(np.int32), "s64": np.dtype(np.int64),
    "u16": np.dtype(np.uint16), "u32": np.dtype(np.uint32), "u64": np.dtype(np.uint64),
}  # fmt: skip
_WIDER = {
    "s16": np.dtype(np.int32), "s32": np.dtype(np.int64), "u16": np.dtype(np.uint32), "u32": np.dtype(np.uint64),
}  # fmt: skip

_Handler = Callable[[_Block, Instruction, Values], None]
_EXECUTE: dict[str, _Handler] = {}


def _executes(*names: str) -> Callable[[_Handler], _Handler]:
    """Says which instructions a function executes; no instruction has two."""

    def add(handler: _Handler) -> _Handler:
        assert not _EXECUTE.keys() & set(names)
        _EXECUTE.update(dict.fromkeys(names, handler))
        return handler

    return add


def _type(instruction: Instruction) -> str:
    return instruction.name.rsplit(".", 1)[1]


def _bits(instruction: Instruction) -> int:
    """The width that a name ends in."""
    return int(_type(instruction)[1:])


def _unsigned(values: Values) -> Values:
    return values.view(_UNSIGNED[8 * values.itemsize])


def _halves(values: Values) -> NDArray[np.float16]:
    """[THREADS, 2] of registers of 32 bits."""
    return np.ascontiguousarray(values).view(np.float16).reshape(THREADS, 2)


def _joined(parts: NDArray[Any], bits: int) -> Values:
    """Registers of [THREADS, .], the first in the lowest bits."""
    return np.ascontiguousarray(parts).view(_UNSIGNED[bits])[:, 0]


# "Data Movement and Conversion Instructions"


@_executes(*(f"mov.{t}{b}" for t in "bu" for b in (16, 32, 64)), "mov.pred")
def _mov(block: _Block, i: Instruction, mask: Values) -> None:
    to, source = i.operands
    if i.name == "mov.pred":
        block.put(to, block.predicate(source).copy(), mask)
        return
    bits = _bits(i)
    if isinstance(source, tuple):
        parts = [block.get(part, bits // len(source)) for part in source]
        block.put(to, _joined(np.stack(parts, 1), bits), mask)
    elif isinstance(to, tuple):
        whole = np.ascontiguousarray(block.get(source, bits))
        parts = whole.view(_UNSIGNED[bits // len(to)]).reshape(THREADS, len(to))
        for number, name in enumerate(to):
            if name != "_":
                block.put(name, parts[:, number].copy(), mask)
    else:
        block.put(to, block.get(source, bits).copy(), mask)


def _integer_conversion(to: str, source: str) -> _Handler:
    """Takes the low bits of a register, and extends them as the type of the source does."""
    narrow = np.dtype({"s": "i", "u": "u"}[source[0]] + str(int(source[1:]) // 8))
    width = 32 if source[1:] == "8" else int(source[1:])

    def convert(block: _Block, i: Instruction, mask: Values) -> None:
        register = block.get(i.operands[1], width)
        block.put(i.operands[0], register.astype(narrow).astype(_INTEGERS[to]), mask)

    return convert


for _to in _INTEGERS:
    for _source in ("s8", "u8", *_INTEGERS):
        _executes(f"cvt.{_to}.{_source}")(_integer_conversion(_to, _source))


@_executes("cvt.rn.f16x2.f32")
def _cvt_two_halves(block: _Block, i: Instruction, mask: Values) -> None:
    high, low = (block.get(o, 32).view(np.float32).astype(np.float16) for o in i.operands[1:])
    block.put(i.operands[0], _joined(np.stack([low, high], 1), 32), mask)


@_executes("cvt.rn.f16.f32")
def _cvt_half(block: _Block, i: Instruction, mask: Values) -> None:
    block.put(i.operands[0], block.get(i.operands[1], 32).view(np.float32).astype(np.float16), mask)


@_executes("cvt.rn.bf16.f32")
def _cvt_bfloat(block: _Block, i: Instruction, mask: Values) -> None:
    wide = block.get(i.operands[1], 32)
    bits = wide.astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    nan = np.isnan(wide.view(np.float32))
    block.put(i.operands[0], np.where(nan, 0x7FFF, rounded).astype(np.uint16), mask)


@_executes("cvt.f32.f16")
def _cvt_from_half(block: _Block, i: Instruction, mask: Values) -> None:
    block.put(i.operands[0], block.get(i.operands[1], 16).view(np.float16).astype(np.float32), mask)


@_executes("cvt.rn.f32.s32")
def _cvt_from_integer(block: _Block, i: Instruction, mask: Values) -> None:
    block.put(i.operands[0], block.get(i.operands[1], 32).view(np.int32).astype(np.float32), mask)


@_executes("prmt.b32")
def _prmt(block: _Block, i: Instruction, mask: Values) -> None:
    """Bytes of two words by number; bit 3 of a selector replicates the byte's sign."""
    low, high, selectors = (block.get(o, 32) for o in i.operands[1:])
    all_bytes = np.stack([low, high], 1).view(np.uint8)  # [THREADS, 8]
    selector = selectors[:, None] >> (4 * np.arange(4, dtype=np.uint32))
    chosen = np.take_along_axis(all_bytes, (selector & 7).astype(np.int64), 1)
    sign = np.where(chosen & 0x80, 0xFF, 0).astype(np.uint8)
    block.put(i.operands[0], _joined(np.where(selector & 8, sign, chosen), 32), mask)


@_executes("ld.param.b32", "ld.param.b64", "ld.param.u32", "ld.param.u64", "ld.param.f32")
def _ld_param(block: _Block, i: Instruction, mask: Values) -> None:
    source = i.operands[1]
    assert isinstance(source, Address) and not source.offset
    values = block.parameters[int(source.base.rsplit("_", 1)[1])]
    assert 8 * values.itemsize == _bits(i)
    block.put(i.operands[0], values.copy(), mask)


_ACCESSES = [f"{v}b{bits}" for v in ("", "v2.", "v4.") for bits in (16, 32, 64)]


@_executes(*(f"ld.{where}.{access}" for where in ("global", "shared") for access in _ACCESSES))
def _ld(block: _Block, i: Instruction, mask: Values) -> None:
    names, size = _names(i.operands[0]), _bits(i) // 8
    if ".global." in i.name:
        data = block.memory.load(block.address(i.operands[1], 64), len(names) * size, mask, block.waited)
    else:
        data = np.zeros((THREADS, len(names) * size), np.uint8)
        data[mask] = block.shared.load(_places(block, i.operands[1], len(names) * size, mask), _THREAD[mask])
    for number, name in enumerate(names):
        block.put(name, _joined(data[:, number * size : (number + 1) * size], 8 * size), mask)


@_executes(*(f"st.{where}.{access}" for where in ("global", "shared") for access in _ACCESSES))
def _st(block: _Block, i: Instruction, mask: Values) -> None:
    names, bits = _names(i.operands[1]), _bits(i)
    data = np.stack([block.get(name, bits) for name in names], 1).view(np.uint8)
    if ".global." in i.name:
        if not block.waited and block.program.waits:
            raise RaceError("store before griddepcontrol.wait")
        block.memory.store(block.address(i.operands[0], 64), mask, data)
    else:
        block.shared.store(_places(block, i.operands[0], data.shape[1], mask), _THREAD[mask], data[mask])


def _places(block: _Block, operand: Operand, size: int, mask: Values) -> NDArray[np.int64]:
    """[threads in mask, size] bytes of shared memory."""
    first = block.address(operand, 32)[mask]
    if (first % size).any():
        raise AccessError(f"misaligned access of {size} bytes")
    return first[:, None] + np.arange(size)


@_executes("cp.async.cg.shared.global", "cp.async.ca.shared.global")
def _cp_async(block: _Block, i: Instruction, mask: Values) -> None:
    to, source, *sizes = i.operands
    size, *of_source = (int(str(number), 0) for number in sizes)
    if of_source not in ([], [size]):
        raise UnknownInstruction("fewer bytes read than written")
    data = block.memory.load(block.address(source, 64), size, mask, block.waited)
    block.shared.copy(_places(block, to, size, mask), _THREAD[mask], data[mask])


@_executes("cp.async.commit_group")
def _cp_async_commit(block: _Block, i: Instruction, mask: Values) -> None:
    block.shared.commit()


@_executes("cp.async.wait_group")
def _cp_async_wait(block: _Block, i: Instruction, mask: Values) -> None:
    block.shared.wait(int(str(i.operands[0])))


@_executes("shfl.sync.bfly.b32", "shfl.sync.idx.b32")
def _shfl(block: _Block, i: Instruction, mask: Values) -> None:
    to, source, by, clamp, members = i.operands
    if (block.get(clamp, 32) != _WARP - 1).any() or (block.get(members, 32) != 0xFFFFFFFF).any():
        raise UnknownInstruction("of part of a warp")
    lane = block.get(by, 32).astype(np.int64) % _WARP
    if ".bfly." in i.name:
        lane = _THREAD % _WARP ^ lane
    block.put(to, block.get(source, 32)[_THREAD // _WARP * _WARP + lane], mask)


# "Floating Point Instructions"


def _fma(a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]) -> NDArray[np.float32]:
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _flushed(function: Callable[..., Any]) -> Callable[..., Any]:
    """.ftz: subnormal numbers count as 0 and become 0."""

    def flush(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)

    return lambda *operands: flush(function(*map(flush, operands)))


_FLOAT: dict[str, Callable[..., Any]] = {
    "add.f32": np.add,
    "sub.f32": np.subtract,
    "mul.f32": np.multiply,
    "div.full.f32": np.divide,
    "max.f32": np.fmax,
    "min.f32": np.fmin,
    "abs.f32": np.abs,
    "neg.f32": np.negative,
    "fma.rn.f32": _fma,
    "fma.rn.ftz.f32": _flushed(_fma),
    "ex2.approx.ftz.f32": _flushed(lambda x: np.exp2(x.astype(np.float64)).astype(np.float32)),
    "lg2.approx.ftz.f32": _flushed(lambda x: np.log2(x.astype(np.float64)).astype(np.float32)),
}


@_executes(*_FLOAT)
def _float(block: _Block, i: Instruction, mask: Values) -> None:
    operands = [block.get(o, 32).view(np.float32) for o in i.operands[1:]]
    block.put(i.operands[0], _FLOAT[i.name](*operands), mask)


# "Half Precision Floating Point Instructions"


@_executes("add.f16x2", "fma.rn.f16x2")
def _two_halves(block: _Block, i: Instruction, mask: Values) -> None:
    a, b, *c = (_halves(block.get(o, 32)).astype(np.float64) for o in i.operands[1:])
    result = a * b + c[0] if c else a + b
    block.put(i.operands[0], _joined(result.astype(np.float16), 32), mask)


# "Integer Arithmetic Instructions", "Logic and Shift Instructions", "Comparison and Selection Instructions"


def _truncated(x: Values, y: Values) -> Values:
    """x / y towards zero; all ones for y = 0. At most 32 bits: quotients of fp64 are exact enough."""
    return np.where(y == 0, -1, np.trunc(x / np.where(y == 0, 1, y).astype(np.float64))).astype(np.int64)


def _shift(left: bool) -> Callable[[Values, Values], Values]:
    """By any distance: past the width zeros, or signs."""

    def shift(x: Values, distance: Values) -> Values:
        bits = 8 * x.itemsize
        inside = np.minimum(distance, bits - 1).astype(x.dtype)
        if left:
            return np.where(distance < bits, x << inside, 0).astype(x.dtype)
        shifted = x >> inside
        return shifted if x.dtype.kind == "i" else np.where(distance < bits, shifted, 0).astype(x.dtype)

    return shift


_INTEGER: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul.lo": np.multiply, "max": np.maximum, "min": np.minimum,
    "min.relu": lambda x, y: np.maximum(np.minimum(x, y), 0),
    "mad.lo": lambda x, y, z: x * y + z,
    "div": _truncated,
    "rem": lambda x, y: x - _truncated(x, y) * y,
}  # fmt: skip


def _integer(operation: str, kind: str) -> _Handler:
    dtype, function = _INTEGERS[kind], _INTEGER[operation]

    def calculate(block: _Block, i: Instruction, mask: Values) -> None:
        operands = [block.get(o, 8 * dtype.itemsize).view(dtype) for o in i.operands[1:]]
        block.put(i.operands[0], function(*operands).astype(dtype), mask)

    return calculate


def _wide_product(operation: str, kind: str) -> _Handler:
    """mul.wide, mul.hi and mad.wide: of the whole product."""
    dtype, wider = _INTEGERS[kind], _WIDER[kind]
    bits = 8 * dtype.itemsize

    def calculate(block: _Block, i: Instruction, mask: Values) -> None:
        x, y = (block.get(o, bits).view(dtype).astype(wider) for o in i.operands[1:3])
        product = x * y
        if operation == "mul.hi":
            product = (product >> wider.type(bits)).astype(dtype)
        elif operation == "mad.wide":
            product = product + block.get(i.operands[3], 2 * bits).view(wider)
        block.put(i.operands[0], product, mask)

    return calculate


for _kind in _INTEGERS:
    for _operation in _INTEGER:
        if not (_operation in ("div", "rem") and _kind.endswith("64")):
            _executes(f"{_operation}.{_kind}")(_integer(_operation, _kind))
    for _operation in ("mul.wide", "mul.hi", "mad.wide"):
        if _kind in _WIDER:
            _executes(f"{_operation}.{_kind}")(_wide_product(_operation, _kind))

_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not}


@_executes(*(f"{name}.{kind}" for name in _LOGIC for kind in ("b16", "b32", "b64", "pred")))
def _logic(block: _Block, i: Instruction, mask: Values) -> None:
    name, kind = i.name.split(".")
    operands = [block.predicate(o) if kind == "pred" else block.get(o, int(kind[1:])) for o in i.operands[1:]]
    block.put(i.operands[0], _LOGIC[name](*operands), mask)


@_executes("lop3.b32")
def _lop3(block: _Block, i: Instruction, mask: Values) -> None:
    """Bit 4 a + 2 b + c of the table is the result for bits a, b and c."""
    a, b, c = (block.get(o, 32) for o in i.operands[1:4])
    table = int(str(i.operands[4]), 0)
    result = np.zeros(THREADS, np.uint32)
    for case in range(8):
        if table >> case & 1:
            result |= (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
    block.put(i.operands[0], result, mask)


@_executes(*(f"shl.b{bits}" for bits in (16, 32, 64)), *(f"shr.{kind}" for kind in _INTEGERS))
def _shifts(block: _Block, i: Instruction, mask: Values) -> None:
    dtype = _INTEGERS[_type(i).replace("b", "u")]
    x = block.get(i.operands[1], 8 * dtype.itemsize).view(dtype)
    distance = block.get(i.operands[2], 32).astype(np.int64)
    block.put(i.operands[0], _shift(i.name.startswith("shl"))(x, distance), mask)


@_executes("bfe.s32", "bfe.u32")
def _bfe(block: _Block, i: Instruction, mask: Values) -> None:
    """A field of bits, moved to the top and back down as the type says."""
    first, length = (int(str(o), 0) for o in i.operands[2:])
    if length == 0 or first + length > 32:
        raise UnknownInstruction("a field that is empty or sticks out")
    top = block.get(i.operands[1], 32) << np.uint32(32 - first - length)
    dtype = _INTEGERS[_type(i)]
    block.put(i.operands[0], top.view(dtype) >> dtype.type(32 - length), mask)


_COMPARE: dict[str, Callable[..., Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


@_executes(*(f"setp.{c}.{kind}" for c in _COMPARE for kind in (*_INTEGERS, "b16", "b32", "b64")))
def _setp(block: _Block, i: Instruction, mask: Values) -> None:
    dtype = _INTEGERS[_type(i).replace("b", "u")]
    x, y = (block.get(o, 8 * dtype.itemsize).view(dtype) for o in i.operands[1:])
    block.put(i.operands[0], _COMPARE[i.name.split(".")[1]](x, y), mask)


@_executes(
    *(f"setp.{c}{unordered}.f32" for c in _COMPARE for unordered in ("", "u")), "setp.nan.f32", "setp.num.f32"
)
def _setp_float(block: _Block, i: Instruction, mask: Values) -> None:
    """Where a number is NaN, comparisons that end in u are true and the others false."""
    x, y = (block.get(o, 32).view(np.float32) for o in i.operands[1:])
    unordered = np.isnan(x) | np.isnan(y)
    comparison = i.name.split(".")[1]
    if comparison in ("nan", "num"):
        result = unordered == (comparison == "nan")
    elif comparison in _COMPARE:
        result = _COMPARE[comparison](x, y) & ~unordered
    else:
        result = _COMPARE[comparison.removesuffix("u")](x, y) | unordered
    block.put(i.operands[0], result, mask)


@_executes(*(f"selp.{kind}" for kind in (*_INTEGERS, "b16", "b32", "b64", "f32")))
def _selp(block: _Block, i: Instruction, mask: Values) -> None:
    x, y = (block.get(o, _bits(i)) for o in i.operands[1:3])
    block.put(i.operands[0], np.where(block.predicate(i.operands[3]), x, y), mask)


# "Parallel Synchronization and Communication Instructions"


@_executes("bar.sync")
def _bar(block: _Block, i: Instruction, mask: Values) -> None:
    if i.operands != ("0",):
        raise UnknownInstruction("of some threads")
    block.shared.barrier()


@_executes("fence.proxy.async.shared::cta")
def _fence_proxy(block: _Block, i: Instruction, mask: Values) -> None:
    block.shared.fence()


@_executes("griddepcontrol.wait")
def _grid_wait(block: _Block, i: Instruction, mask: Values) -> None:
    block.waited = True


@_executes("griddepcontrol.launch_dependents")
def _grid_launch(block: _Block, i: Instruction, mask: Values) -> None:
    if not block.waited:
        raise RaceError("launch of dependents, which may rely on the kernel before this one")


@_executes(*(f"redux.sync.{how}.{kind}" for how in ("add", "min", "max") for kind in ("s32", "u32")))
def _redux(block: _Block, i: Instruction, mask: Values) -> None:
    to, source, members = i.operands
    if (block.get(members, 32) != 0xFFFFFFFF).any():
        raise UnknownInstruction("of part of a warp")
    dtype = _INTEGERS[_type(i)]
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[i.name.split(".")[2]]
    of_warps = function.reduce(block.get(source, 32).view(dtype).reshape(_WARPS, _WARP), 1, dtype=dtype)
    block.put(to, np.repeat(of_warps, _WARP), mask)


# "Warp Level Matrix Load/Store Instructions": matrices of 8 x 8 halfwords; lanes 8 m to 8 m + 7 say where the rows of
# matrix m are, and lane l holds the numbers 2 (l % 4) and 2 (l % 4) + 1 of row l / 4, or, with .trans, of that column.

_ROW = _THREAD[:_WARP, None] // 4 + np.zeros(2, np.int64)
_PAIR = 2 * (_THREAD[:_WARP, None] % 4) + np.arange(2)


def _matrix_threads(count: int) -> NDArray[np.int64]:
    """Those whose addresses of rows count, eight of a warp for each of ``count`` matrices."""
    lane = _THREAD % _WARP
    return _THREAD[lane < 8 * count]


_MATRICES = [f"m8n8.x{count}{trans}.shared.b16" for count in (1, 2, 4) for trans in ("", ".trans")]


@_executes(*(f"ldmatrix.sync.aligned.{shape}" for shape in _MATRICES))
def _ldmatrix(block: _Block, i: Instruction, mask: Values) -> None:
    names = _names(i.operands[0])
    threads = _matrix_threads(len(names))
    data = block.shared.load(_places(block, i.operands[1], 16, mask & np.isin(_THREAD, threads)), threads)
    matrices = data.view(np.uint16).reshape(_WARPS, len(names), 8, 8)
    rows, columns = (_PAIR, _ROW) if ".trans." in i.name else (_ROW, _PAIR)
    for number, name in enumerate(names):
        held = matrices[:, number][:, rows, columns]  # [warps, lanes, 2]
        block.put(name, _joined(held.reshape(THREADS, 2), 32), mask)


@_executes(*(f"stmatrix.sync.aligned.{shape}" for shape in _MATRICES))
def _stmatrix(block: _Block, i: Instruction, mask: Values) -> None:
    names = _names(i.operands[1])
    threads = _matrix_threads(len(names))
    matrices = np.zeros((_WARPS, len(names), 8, 8), np.uint16)
    rows, columns = (_PAIR, _ROW) if ".trans." in i.name else (_ROW, _PAIR)
    for number, name in enumerate(names):
        held = np.ascontiguousarray(block.get(name, 32)).view(np.uint16).reshape(_WARPS, _WARP, 2)
        matrices[:, number][:, rows, columns] = held
    data = matrices.view(np.uint8).reshape(len(threads), 16)
    block.shared.store(_places(block, i.operands[0], 16, mask & np.isin(_THREAD, threads)), threads, data)


# "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions"


@_executes("wgmma.fence.sync.aligned")
def _wgmma_fence(block: _Block, i: Instruction, mask: Values) -> None:
    block.unfenced.clear()


@_executes("wgmma.commit_group.sync.aligned")
def _wgmma_commit(block: _Block, i: Instruction, mask: Values) -> None:
    block.multiplication_groups.append(block.multiplications)
    block.multiplications = []


@_executes("wgmma.wait_group.sync.aligned")
def _wgmma_wait(block: _Block, i: Instruction, mask: Values) -> None:
    groups = block.multiplication_groups
    del groups[: max(0, len(groups) - int(str(i.operands[0])))]
    left = [one for group in (*groups, block.multiplications) for one in group]
    block.shared.multiplied([one.places for one in left])
    block.busy = set().union(*(one.registers for one in left))


_SHAPES = [f"m64n{n}k{k}" for n in (16, 32) for k in (16, 32)]


@_executes(
    *(f"wgmma.mma_async.sync.aligned.{shape}.s32.s8.s8" for shape in _SHAPES if shape.endswith("k32")),
    *(f"wgmma.mma_async.sync.aligned.{shape}.f32.f16.f16" for shape in _SHAPES if shape.endswith("k16")),
)
def _wgmma(block: _Block, i: Instruction, mask: Values) -> None:
    """D[64, N] = A[64, K] B[K, N] + D, D and A in registers, B in shared memory."""
    d, a, descriptor, scale, *modifiers = i.operands
    assert isinstance(d, tuple) and isinstance(a, tuple)
    bytes_ = i.name.endswith("s8")
    if modifiers != ([] if bytes_ else ["1", "1", "1"]):
        raise UnknownInstruction("operands negated, or B not transposed")
    registers = {*d, *a}
    if not registers.isdisjoint(block.unfenced):
        raise RaceError("registers were written, with no wgmma.fence in between")
    shape = re.search(r"m64n(\d+)k(\d+)", i.name)
    assert shape
    places = _right_operand(block.get(descriptor, 64), int(shape[1]), int(shape[2]), bytes_)
    right = block.shared.multiply(places)  # [K, N] or [K, N, 2]
    block.multiplications.append(_Multiplication(registers, places))
    left = _left_operand(block, a, int(shape[2]), bytes_)
    if bytes_:
        product = left.astype(np.int64) @ right.view(np.int8).astype(np.int64)
    else:
        product = left.astype(np.float64) @ right.view(np.float16)[..., 0].astype(np.float64)
    added = block.predicate(scale)
    kind = np.dtype(np.int32 if bytes_ else np.float32)
    lane = _THREAD % _WARP
    row, column = _THREAD // _WARP * 16 + lane // 4, lane % 4 * 2
    for number, name in enumerate(d):
        result = product[row + number // 2 % 2 * 8, column + number // 4 * 8 + number % 2]
        if added.any():
            result = result + np.where(added, block.get(name, 32).view(kind), kind.type(0))
        block.registers[name] = _unsigned(result.astype(kind))
    block.busy |= registers


def _left_operand(block: _Block, names: Sequence[str], k: int, bytes_: bool) -> NDArray[Any]:
    """[64, K] of the four registers of each thread: rows g and g + 8 of a warp's 16, words c and c + 4 of each."""
    each = 4 if bytes_ else 2
    dtype = np.dtype(np.int8 if bytes_ else np.float16)
    matrix = np.zeros((64, k), dtype)
    lane = _THREAD % _WARP
    for number, name in enumerate(names):
        row = _THREAD // _WARP * 16 + lane // 4 + number % 2 * 8
        column = (lane % 4 + number // 2 * 4) * each
        held = np.ascontiguousarray(block.get(name, 32)).view(dtype).reshape(THREADS, each)
        matrix[row[:, None], column[:, None] + np.arange(each)] = held
    return matrix


def _right_operand(descriptors: Values, n: int, k: int, bytes_: bool) -> NDArray[np.int64]:
    """Places of B's bytes ("Matrix Descriptor", "Swizzling modes"): [K, N] of int8, whose rows along K are swizzled
    over 128 bytes, or [K, N, 2] of fp16, whose rows along N are as long as the swizzle. Eight rows make a pattern."""
    descriptor = int(descriptors[0])
    if (descriptors != descriptors[0]).any():
        raise Fault("threads have different matrix descriptors")
    start = (descriptor & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    swizzle = {1: 128, 2: 64, 3: 32}.get(descriptor >> 62, 0)
    if swizzle != (128 if bytes_ else 2 * n) or descriptor >> 49 & 7:
        raise UnknownInstruction("another layout of the right operand")
    if bytes_:
        row, inside = np.arange(n)[None, :], np.arange(k)[:, None]
    else:
        row = np.arange(k)[:, None, None]
        inside = 2 * np.arange(n)[None, :, None] + np.arange(2)
    places = start + row // 8 * stride + row % 8 * swizzle + inside
    return places ^ (places >> 7 & (swizzle // 16 - 1)) << 4
