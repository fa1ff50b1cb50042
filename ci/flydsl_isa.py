"""Count the instructions of a kernel's steady state from its final assembly text.

    python -m ci.flydsl_isa kernel.s --tokens 32 --elements 256

The steady state is the cheapest turn of the hottest loop: of all cycles in the control flow, those with the most
matrix instructions, and of these the one with the fewest instructions. Blocks that only edge tiles or a changed
softmax reference enter are therefore left out, as they are when the kernel runs. Every instruction counts once, waits
and nops too.
"""

from __future__ import annotations

import argparse
import heapq
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["CLASSES", "Block", "classify", "parse", "steady_state"]

CLASSES = ("valu", "trans", "mfma", "vmem", "lds", "smem", "salu", "branch", "wait")

_TRANS = ("v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_")
_LABEL = re.compile(r"^([.\w$]+):")
_INSTRUCTION = re.compile(r"^\s+([a-z][a-z0-9_]+)\b\s*(.*)$")


def classify(name: str) -> str:
    """The class of an instruction: the pipe that issues it."""
    if name in ("s_waitcnt", "s_nop") or name.startswith("s_sleep"):
        return "wait"
    if name.startswith(("s_cbranch", "s_branch", "s_endpgm", "s_setpc", "s_swappc")):
        return "branch"
    if name.startswith(("s_load", "s_buffer_load", "s_store", "s_dcache", "s_memtime", "s_memrealtime")):
        return "smem"
    if name.startswith("s_"):
        return "salu"
    if name.startswith(("v_mfma", "v_smfmac")):
        return "mfma"
    if name.startswith(("buffer_", "global_", "flat_", "scratch_")):
        return "vmem"
    if name.startswith("ds_"):
        return "lds"
    return "trans" if name.startswith(_TRANS) else "valu"


@dataclass
class Block:
    """A basic block: its instructions, and the names of the blocks that may follow."""

    name: str
    instructions: list[str] = field(default_factory=list)
    successors: list[str] = field(default_factory=list)


def parse(text: str) -> dict[str, Block]:
    """Basic blocks of the first kernel in an assembly listing, in order."""
    blocks: dict[str, Block] = {}
    current: Block | None = None  # None: nothing falls through to the next line

    def start(name: str) -> Block:
        block = Block(name)
        if current is not None:
            current.successors.append(name)
        blocks[name] = block
        return block

    for line in text.splitlines():
        line = line.split(";")[0].rstrip()
        label = _LABEL.match(line)
        if label:
            if label.group(1).startswith(".Lfunc_end"):
                break
            current = start(label.group(1))
            continue
        match = _INSTRUCTION.match(line)
        if match is None or current is None:
            continue
        name, operands = match.groups()
        current.instructions.append(name)
        if name.startswith(("s_cbranch", "s_branch")):
            current.successors.append(operands.strip())
        if name.startswith("s_cbranch"):
            current = start(f"{current.name}+")
        elif name in ("s_branch", "s_endpgm", "s_setpc_b64"):
            current = None
    return blocks


def _cheapest_cycle(blocks: dict[str, Block], head: str) -> list[str] | None:
    """Names of the blocks of the cheapest way from ``head`` back to it."""
    queue = [(len(blocks[head].instructions), [head])]
    done: set[str] = set()
    while queue:
        cost, path = heapq.heappop(queue)
        for following in blocks[path[-1]].successors:
            if following == head:
                return path
            if following in blocks and following not in done:
                done.add(following)
                heapq.heappush(queue, (cost + len(blocks[following].instructions), [*path, following]))
    return None


def steady_state(text: str) -> Counter[str]:
    """Instructions per class of one turn of the hottest loop; empty if no loop holds a matrix instruction."""
    blocks = parse(text)
    best: Counter[str] = Counter()
    for head in blocks:
        cycle = _cheapest_cycle(blocks, head)
        if cycle is None:
            continue
        counts = Counter(classify(i) for name in cycle for i in blocks[name].instructions)
        if (counts["mfma"], -counts.total()) > (best["mfma"], -best.total()):
            best = counts
    return best


def main(argv: list[str] | None = None) -> int:
    """Print the counts of each file given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of one turn of the loop")
    parser.add_argument("--elements", type=int, default=256, help="elements dequantised per token")
    args = parser.parse_args(argv)
    for path in args.files:
        counts = steady_state(path.read_text())
        total = counts.total()
        parts = ", ".join(f"{name} {counts[name]}" for name in CLASSES if counts[name])
        print(f"{path}: {total} per {args.tokens} tokens ({parts})")
        print(f"  {total * 16 / args.tokens:.1f} per 16 tokens, {total * 64 / (args.tokens * args.elements):.2f} lane "
              "instructions per element")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
