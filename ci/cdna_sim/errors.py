"""What a simulated kernel can be accused of.

Every finding is an exception that names the instruction, its address, and where it can, the workgroup, wave
and lane. `kind` is the stable part: tests and mutant lists match on it, people read the text.
"""

from __future__ import annotations


class SimError(Exception):
    """A fault found in simulated code, or something that the simulator does not model."""

    kind = "error"

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(f"[{self.kind}] {message}" + (f" at {where}" if where else ""))
        self.where = where


class DecodeError(SimError):
    """Bytes that are no instruction of the target, or an unreadable code object."""

    kind = "decode"


class UnsupportedError(SimError):
    """A real instruction, modifier or operand form that the simulator does not implement."""

    kind = "unsupported"


class OutOfBoundsError(SimError):
    """An active lane touched memory outside every registered buffer (or outside LDS or scratch)."""

    kind = "oob"


class PendingError(SimError):
    """A register (or LDS range) was used while the load that fills it was not yet waited for."""

    kind = "pending"


class UninitError(SimError):
    """Undefined bits reached a use that matters: an address, a stored value, a branch, EXEC."""

    kind = "uninit"


class RaceError(SimError):
    """Two waves of a workgroup touched the same LDS byte without a barrier between, one writing."""

    kind = "race"


class BudgetError(SimError):
    """The instruction budget ran out: an endless loop, as far as the simulator can tell."""

    kind = "budget"


class DeadlockError(SimError):
    """Waves wait at a barrier that the others can no longer reach."""

    kind = "deadlock"
