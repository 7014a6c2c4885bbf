"""Reads the console output of a trainer: lines of TRL, veRL, SkyRL and prime-rl, and blocks of EasyR1."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

COLOR = re.compile(r"\x1b\[[\d;]*m")
RAY = re.compile(r"^\(\w+ pid=\d+(?:, ip=[\d.:]+)?\) ?")  # prefix of a Ray worker's lines
WRAPPED = re.compile(r"(?:np\.\w+|tensor)\(([^(),]*)[^()]*\)")  # number printed by NumPy or torch, as np.float64(0.5)
TRL = re.compile(r"\{'.*\}")  # a dict, as TRL prints its metrics
VERL = re.compile(r"\bstep:(\d+) - (.*)")  # a line of veRL or SkyRL
PRIME = re.compile(r"\bStep (\d+) \| (.*)")  # a line of prime-rl
PRIME_NAMES = {
    "Reward": "reward/all/mean",
    "Entropy": "entropy/mean",
    "Mismatch KL": "mismatch_kl/mean",
    "Grad. Norm": "optim/grad_norm",
    "LR": "optim/lr",
}
# EasyR1 prints a block of indented lines for each step.
BLOCK = re.compile(r"Step (\d+)")
FIELD = re.compile(r"( *)([^\s:][^:]*):(?: (\S+))?")


def rows(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields the metrics of each printed step, under the trainer's names. Other lines are skipped.

    Also prints a line with the number of skipped dicts, which look like TRL's records but are not.
    """
    block = dict[str, Any]()  # metrics of EasyR1's current block; {} before the first block
    sections = list[tuple[int, str]]()  # EasyR1's open sections: (indentation, name), outermost first
    lines, skipped_dicts = [*lines], 0
    trl_has_epochs = any("'epoch':" in line for line in lines)
    for line in lines:
        text = WRAPPED.sub(r"\1", RAY.sub("", COLOR.sub("", line)))
        if block_start := BLOCK.fullmatch(text.strip()):
            yield block
            block, sections = dict[str, Any](step=int(block_start[1])), []
        elif row := _row(text):
            # A dict without an epoch is not from TRL, but printed by a reward function.
            if trl_has_epochs and TRL.search(text) and "epoch" not in row:
                skipped_dicts += 1
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
    if skipped_dicts:
        print(
            f"skipped {skipped_dicts:,} printed dicts without an epoch, which are not from the trainer", file=sys.stderr
        )


def _row(text: str) -> dict[str, Any] | None:
    """Returns the metrics in a line of TRL, veRL, SkyRL or prime-rl; None for any other line."""
    if printed := TRL.search(text):
        try:
            values = ast.literal_eval(re.sub(r"(?<=: )-?(?:nan|inf)\b", r"'\g<0>'", printed[0]))
        except (ValueError, SyntaxError):
            return None
        # Newer versions of TRL print numbers as strings.
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
    """Returns the number that a text denotes, also in YAML's forms .nan and -.inf; None if it denotes none."""
    try:
        return float(re.sub(r"^(-?)\.(?=nan|inf)", r"\1", text))
    except ValueError:
        return None
