"""Does a model look at its images? `python -m benchmarks.health.rolled_pictures FOLDER [--problems 1000]`.

Prints the greedy accuracy on the held-out problems of `digits_in_pictures`, with their own images, and with those of
the next problem: what remains then is a guess. FOLDER: of a model, such as WORKDIR/hf.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from jaxrl_llm.tasks import digits_in_pictures

ROOT = Path(__file__).parents[2]
TASKS = {"their own images": "digits_in_pictures", "those of the next problem": "benchmarks.health.rolled_pictures"}


def held_out() -> list[dict[str, Any]]:
    """The held-out problems, each with the images of the next one."""
    rows = digits_in_pictures.held_out()
    return [rolled(row, other["images"]) for row, other in zip(rows, [*rows[1:], rows[0]], strict=True)]


def rolled(row: dict[str, Any], images: list[bytes]) -> dict[str, Any]:
    """Returns a problem with other images, and its own question and answer."""
    question = row["prompt"][0]["content"].rpartition(">")[2]
    content = "<image>" * len(images) + question
    return row | {"prompt": [{"role": "user", "content": content}], "images": images}


def accuracy_of(folder: Path, task: str, problems: int) -> float:
    """Returns the greedy accuracy that `jaxrl evaluate` measures."""
    command = [sys.executable, "-m", "jaxrl_llm.evaluate", "--model", str(folder.absolute()), "--task", task, "--json"]
    command += ["--function", "digits_in_pictures.accuracy", "--problems", str(problems)]
    command += ["--max-completion-tokens", "16"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of a model")
    parser.add_argument("--problems", type=int, default=digits_in_pictures.HELD_OUT, help="default: %(default)s")
    args = parser.parse_args()
    for name, task in TASKS.items():
        print(f"{accuracy_of(args.folder, task, args.problems):.1%} with {name}")


if __name__ == "__main__":
    main()
