"""What the chips of a slice send each other in a compiled program: the collectives in its text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = "all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|ragged-all-to-all|reduce-scatter"
COLLECTIVE = re.compile(rf"%(\S+) = (.*?) ({KINDS})(-start)?\(")
BETWEEN_SLICES = "between slices"  # the kind of what goes over the network that joins them
SENT = re.compile(r"%\S+ = (\(.*\)) send\(.*_xla_megascale_transfer_type=")
CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%([\w.-]+)|branch_computations={([^}]*)}")
SIZES = {"pred": 1, "bf16": 2, "f16": 2}  # bytes of a number; the name ends in the bits of all others


@dataclass(frozen=True)
class Collective:
    """A collective of a program. On a ring, a chip sends its `bytes`, less the share that it has."""

    kind: str
    shape: str  # on a chip, and whole: what all-gather returns, and reduce-scatter takes
    bytes: int  # an all-reduce counts twice: it is a reduce-scatter and an all-gather
    loops: tuple[float, ...]  # trip counts of the loops around it, from the outermost

    @property
    def times(self) -> float:
        return math.prod(self.loops)


def collectives(text: str, turns: float = 1) -> list[Collective]:
    """Lists the collectives between chips in the text of a compiled program (`compiled.as_text()`).

    turns: of a loop that the program itself decides to end, such as that over micro-batches.
    """
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if begin := re.match(r"(ENTRY )?%([\w.-]+) \(.*{$", line):
            lines = computations[begin[2]] = []
            entry = begin[2] if begin[1] else entry
        elif line.startswith("  "):
            lines.append(line)

    begun: set[str] = set()

    def walk(name: str, loops: tuple[float, ...]) -> Iterator[Collective]:
        for line in computations[name]:
            if loop := re.search(r" while\(.*condition=%([\w.-]+), body=%([\w.-]+)", line):
                # A collective in the body of a loop runs once a trip, but stands in the text once.
                known = trip_count(line, computations[loop[1]], computations[loop[2]])
                yield from walk(loop[2], (*loops, known or turns))
            elif match := COLLECTIVE.search(line):
                # The TPU compiler has no reduce-scatter: it fuses an all-reduce and a slice into a computation.
                kind = "reduce-scatter" if name.startswith("all-reduce-scatter") else match[3]
                chain = re.search(r"channel_id=\d+.*chain_id=", line)
                # A later part of it, which runs beside other operations.
                if chain and chain[0] in begun:
                    continue
                begun.update([chain[0]] if chain else [])
                if collective := _collective(kind, match[2], bool(match[4]), line, loops):
                    yield collective
            elif match := SENT.search(line):
                if collective := _collective(BETWEEN_SLICES, match[1], True, line, loops):
                    yield collective
            else:
                for computation, branches in CALLED.findall(line):
                    for called in [computation] if computation else re.findall(r"[\w.-]+", branches):
                        yield from walk(called, loops)

    return list(walk(entry, ()))


def trip_count(line: str, condition: list[str], body: list[str]) -> int:
    """How often the loop in this line runs: as the compiler notes it, or from its condition, counter < bound.

    0, if the program computes it: a loop over micro-batches ends when no row is left.
    """
    if known := re.search(r'known_trip_count":{"n":"(\d+)"', line):
        return int(known[1])
    bounds = [int(n) for x in condition for n in re.findall(r" constant\((\d+)\)", x)]
    if not bounds:
        return 0
    counter = next((int(n) for x in condition for n in re.findall(r" get-tuple-element\(.*\), index=(\d+)", x)), 0)
    # The counter is the element of the loop's tuple that the condition reads, and its step is what the body adds to it.
    root = next(x for x in body if x.startswith("  ROOT "))
    returned = re.findall(r"%([\w.-]+)", root.partition(" tuple(")[2])[counter]
    added = re.search(rf"%{re.escape(returned)} = .* add\(%\S+, %([\w.-]+)\)", "\n".join(body))
    name = re.escape(added[1]) if added else "none"
    # An unrolled loop counts in larger steps.
    step = re.search(rf"%{name} = .* constant\((\d+)\)", "\n".join(body))
    return -(-max(bounds) // (int(step[1]) if step else 1))


def _collective(kind: str, type_: str, started: bool, line: str, loops: tuple[float, ...]) -> Collective | None:
    """The collective in a line, or None if it is in groups of one chip."""
    if (size := _group_size(line)) == 1:
        return None
    arrays = [(f"{dtype}[{shape}]", _bytes(dtype, shape)) for dtype, shape in re.findall(r"\b(\w+)\[([\d,]*)\]", type_)]
    shape, largest = max(arrays, key=lambda x: x[1])
    # What starts a collective returns its operands too.
    total = largest if started else sum(x for _, x in arrays)
    if kind == "reduce-scatter" and " reduce-scatter" in line:
        shape, total = f"{size} x {shape}", total * size
    return Collective(kind, shape, total * (2 if kind == "all-reduce" else 1), loops)


def _group_size(line: str) -> int:
    """Chips that a collective joins; 0 for all, and where it does not say so."""
    if groups := re.search(r"replica_groups=mesh\[([^\]]*)\] {([^}]*)}", line):
        axes = dict(re.findall(r"('\w+')=(\d+)", groups[1]))
        return math.prod(int(axes[axis]) for axis in re.findall(r"'\w+'", groups[2]))
    if groups := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(groups[1])
    groups = re.search(r"replica_groups={{([\d,]*)}", line)
    return len(groups[1].split(",")) if groups else 0


def _bytes(dtype: str, shape: str) -> int:
    bits = re.search(r"\d+$", dtype)
    return SIZES.get(dtype, int(bits[0]) // 8 if bits else 1) * math.prod(int(n) for n in shape.split(",") if n)
