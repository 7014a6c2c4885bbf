"""Finds the collectives in the text of a compiled program, and the bytes that chips send in them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

KINDS = "all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|ragged-all-to-all|reduce-scatter"
# Instructions of XLA's text: a collective, a transfer to another TPU slice, and a call of other computations.
COLLECTIVE = re.compile(rf"%(\S+) = (.*?) ({KINDS})(-start)?\(")
BETWEEN_SLICES = "between slices"  # kind of transfers over the network between TPU slices
SENT = re.compile(r"%\S+ = (\(.*\)) send\(.*_xla_megascale_transfer_type=")
CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%([\w.-]+)|branch_computations={([^}]*)}")
SIZES = {"pred": 1, "bf16": 2, "f16": 2}  # bytes of a number; the names of other types end with their bits


@dataclass(frozen=True)
class Collective:
    """A collective of a program. On a ring, a chip sends `bytes` minus its own share."""

    kind: str
    shape: str  # shape of the whole array on a chip: the result of an all-gather, the operand of a reduce-scatter
    bytes: int  # bytes of the array, twice for an all-reduce, which is a reduce-scatter and an all-gather
    loops: tuple[float, ...]  # trip counts of the loops around the collective, from the outermost
    to_hosts: float = 0.0  # bytes that a GPU sends to other hosts; 0 if its group is on one host

    @property
    def times(self) -> float:
        return math.prod(self.loops)


def collectives(text: str, turns: float = 1, hosts: Sequence[int] = ()) -> list[Collective]:
    """Lists the collectives between chips in the text of a compiled program (`compiled.as_text()`).

    turns: turns of each loop that the program itself decides to end, such as the loop over micro-batches.
    hosts: number of each chip's host, in the order of the mesh.
    """
    # The text consists of computations, named blocks of instructions, which call each other. ENTRY marks
    # the computation that the program begins with.
    computations: dict[str, list[str]] = {}  # {name: lines of its instructions}
    entry, lines = "", []
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%([\w.-]+) \(.*{$", line):
            lines = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif line.startswith("  "):
            lines.append(line)

    counted_chains: set[str] = set()  # text of channel and chain of each split collective that is counted already

    def walk(name: str, loops: tuple[float, ...]) -> Iterator[Collective]:
        """Yields the collectives of a computation, with those of its loops. loops: trips of the loops around it."""
        for line in computations[name]:
            if loop := re.search(r" while\(.*condition=%([\w.-]+), body=%([\w.-]+)", line):
                # A collective in the body of a loop runs once per trip, although the text has it once.
                condition, body = loop[1], loop[2]
                trips = trip_count(line, computations[condition], computations[body]) or turns
                yield from walk(body, (*loops, trips))
            elif match := COLLECTIVE.search(line):
                # The TPU compiler writes a reduce-scatter as a computation that fuses an all-reduce and a slice.
                kind = "reduce-scatter" if name.startswith("all-reduce-scatter") else match[3]
                chain = re.search(r"channel_id=\d+.*chain_id=", line)
                # The compiler may split a collective into a chain, of which only the first part is counted.
                if chain and chain[0] in counted_chains:
                    continue
                if chain:
                    counted_chains.add(chain[0])
                if collective := _collective(
                    kind=kind, type_=match[2], started=bool(match[4]), line=line, loops=loops, hosts=hosts
                ):
                    yield collective
            elif match := SENT.search(line):
                if collective := _collective(
                    kind=BETWEEN_SLICES, type_=match[1], started=True, line=line, loops=loops, hosts=hosts
                ):
                    yield collective
            else:
                for computation, branches in CALLED.findall(line):
                    for called in [computation] if computation else re.findall(r"[\w.-]+", branches):
                        yield from walk(called, loops)

    return list(walk(entry, ()))


def trip_count(line: str, condition: list[str], body: list[str]) -> int:
    """Returns how often a loop runs, from the compiler's note or from the loop's condition, counter < bound.

    line: instruction of the loop. condition, body: lines of its two computations. Returns 0 if the program itself
    computes the bound, as that of the loop over micro-batches, which ends when no row is left.
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


def _collective(
    kind: str, type_: str, started: bool, line: str, loops: tuple[float, ...], hosts: Sequence[int]
) -> Collective | None:
    """Returns the collective of an instruction; None if its groups have one chip, so that nothing is sent.

    type_: text of the type that the instruction returns. started: whether the instruction only starts the collective.
    loops: trip counts of the loops around it. hosts: number of each chip's host.
    """
    group = _group(line, len(hosts))
    if len(group) == 1:
        return None
    parts = _parts(type_)
    arrays = [array for part in parts for array in part]
    sizes = [sum(_bytes(*array) for array in part) for part in parts]
    # The start of a collective returns operands and results, but that of an all-reduce only results.
    total = max(sizes) if started and kind != "all-reduce" else sum(sizes)
    dtype, axes = max(arrays, key=lambda array: _bytes(*array))
    shape = f"{dtype}[{axes}]"
    if kind == "reduce-scatter" and " reduce-scatter(" in line:
        shape, total = f"{len(group)} x {shape}", total * len(group)
    total *= 2 if kind == "all-reduce" else 1
    return Collective(kind, shape, total, loops, _to_hosts(kind, total, line, group, hosts))


def _to_hosts(kind: str, size: int, line: str, group: list[int], hosts: Sequence[int]) -> float:
    """Returns the bytes of a collective that a GPU sends to other hosts."""
    if kind == "collective-permute":
        pairs = re.findall(r"{(\d+),(\d+)}", line.partition("source_target_pairs=")[2])
        return float(size * any(hosts[int(a)] != hosts[int(b)] for a, b in pairs)) if hosts else 0.0
    chip_hosts = [hosts[chip] for chip in group] if hosts else [0]
    host_count = len(set(chip_hosts))
    # Each host receives its missing part once, over the network cards of all its GPUs in the group. In an all-to-all,
    # each GPU receives another part.
    chips_that_share = 1 if "all-to-all" in kind else len(chip_hosts) / host_count
    return size * (host_count - 1) / host_count / chips_that_share


def _parts(type_: str) -> list[list[tuple[str, str]]]:
    """Returns (dtype, axes) of the arrays of a type. A tuple has a part for each element, which may be a tuple."""
    parts, depth = [[]], 0
    # A comma at depth 1 separates the elements of the outer tuple. Those in brackets belong to axes and layouts.
    for dtype, axes, _, sign in re.findall(r"\b(\w+)\[([\d,]*)\]({[^}]*})?|([(),])", type_):
        depth += {"(": 1, ")": -1}.get(sign, 0)
        if dtype:
            parts[-1].append((dtype, axes))
        elif sign == "," and depth == 1:
            parts.append([])
    return parts


# Pattern of the short form in which XLA lists chips, such as [2,4]T(1,0): the chips in the order of an array of this
# shape, after a transposition.
IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


def _group(line: str, count: int) -> list[int]:
    """Returns the first group of chips that a collective joins: all `count` of them, if it names none."""
    if mesh := re.search(rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({IOTA}\))? {{([^}}]*)}}", line):
        axes = dict(re.findall(r"('\w+')=(\d+)", mesh[1]))
        shape, joined = [int(n) for n in axes.values()], re.findall(r"'\w+'", mesh[4])
        chips = _ordered(mesh[2] or str(math.prod(shape)), mesh[3]).reshape(shape)
        return chips[tuple(slice(None) if axis in joined else 0 for axis in axes)].ravel().tolist()
    if iota := re.search(rf"replica_groups=\[\d+,(\d+)\]<={IOTA}", line):
        return _ordered(iota[2], iota[3])[: int(iota[1])].tolist()
    named = re.search(r"replica_groups={{([\d,]*)}", line)
    return [int(n) for n in named[1].split(",")] if named else list(range(count))


def _ordered(shape: str, order: str | None) -> np.ndarray:
    """Returns the numbers of all chips in the order of the pattern IOTA. shape, order: its two groups."""
    axes = [int(n) for n in shape.split(",")]
    chips = np.arange(math.prod(axes)).reshape(axes)
    return chips.transpose([int(n) for n in order.split(",")] if order else range(len(axes))).ravel()


def _bytes(dtype: str, shape: str) -> int:
    """Returns the bytes of an array. dtype: XLA's name, such as "bf16". shape: sizes of the axes, such as "4,8"."""
    bits = re.search(r"\d+$", dtype)
    return SIZES.get(dtype, int(bits[0]) // 8 if bits else 1) * math.prod(int(n) for n in shape.split(",") if n)
