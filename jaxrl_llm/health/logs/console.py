"""Reads what a trainer prints: lines of TRL, veRL, SkyRL and prime-rl, and the blocks of EasyR1."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

COLOR = re.compile(r"\x1b\[[\d;]*m")
RAY = re.compile(r"^\(\w+ pid=\d+(?:, ip=[\d.:]+)?\) ?")  # before each line of a worker
WRAPPED = re.compile(r"(?:np\.\w+|tensor)\(([^(),]*)[^()]*\)")  # a number of NumPy or torch
TRL = re.compile(r"\{'.*\}")
VERL = re.compile(r"\bstep:(\d+) - (.*)")
PRIME = re.compile(r"\bStep (\d+) \| (.*)")
PRIME_NAMES = {
    "Reward": "reward/all/mean",
    "Entropy": "entropy/mean",
    "Mismatch KL": "mismatch_kl/mean",
    "Grad. Norm": "optim/grad_norm",
    "LR": "optim/lr",
}
BLOCK = re.compile(r"Step (\d+)")
FIELD = re.compile(r"( *)([^\s:][^:]*):(?: (\S+))?")


def rows(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields the numbers of each step that is printed, under the trainer's names. Other lines are passed over.

    Prints how many dicts are not TRL's.
    """
    block = dict[str, Any]()
    sections = list[tuple[int, str]]()  # of EasyR1: indentation and name, the outermost first
    lines, foreign = [*lines], 0
    trl_has_epochs = any("'epoch':" in line for line in lines)
    for line in lines:
        text = WRAPPED.sub(r"\1", RAY.sub("", COLOR.sub("", line)))
        if begins := BLOCK.fullmatch(text.strip()):
            yield block
            block, sections = dict[str, Any](step=int(begins[1])), []
        elif row := _row(text):
            # TRL writes the epoch into each record. A reward function may print a dict of its own.
            if trl_has_epochs and TRL.search(text) and "epoch" not in row:
                foreign += 1
            else:
                yield row
        elif block and (field := FIELD.fullmatch(text.rstrip())):
            indent, name, value = len(field[1]), field[2], field[3]
            sections = [section for section in sections if section[0] < indent]
            if value is None:
                sections.append((indent, name))
            elif (number := _number(value)) is not None:
                block["/".join([*(section for _, section in sections), name])] = number
    yield block
    if foreign:
        print(f"passed over {foreign:,} printed dicts without an epoch, which are not the trainer's", file=sys.stderr)


def _row(text: str) -> dict[str, Any] | None:
    """Returns the numbers of a line of TRL, veRL, SkyRL or prime-rl; None, if it is none of these."""
    if printed := TRL.search(text):
        try:
            values = ast.literal_eval(re.sub(r"(?<=: )-?(?:nan|inf)\b", r"'\g<0>'", printed[0]))
        except (ValueError, SyntaxError):
            return None
        # Newer versions print numbers as texts.
        return _numbers((name, str(value)) for name, value in values.items()) if isinstance(values, dict) else None
    if printed := VERL.search(text):
        fields = (field.rpartition(":") for field in printed[2].split(" - "))
        return {"step": int(printed[1])} | _numbers((name, value) for name, _, value in fields)
    if printed := PRIME.search(text):
        fields = (field.partition(":") for field in printed[2].split("|"))
        named = ((PRIME_NAMES.get(name.strip()), value.split()) for name, _, value in fields)
        return {"step": int(printed[1])} | _numbers((name, value[0]) for name, value in named if name and value)
    return None


def _numbers(fields: Iterable[tuple[str, str]]) -> dict[str, Any]:
    return {name.strip(): x for name, value in fields if (x := _number(value.strip())) is not None}


def _number(text: str) -> float | None:
    """Returns the number of a text; None, if it has none. YAML writes .nan and -.inf."""
    try:
        return float(re.sub(r"^(-?)\.(?=nan|inf)", r"\1", text))
    except ValueError:
        return None
