"""Runs for docs/stability.md: `python -m benchmarks.stability [--runs DIR] [--only WORD] [--rules]`.

It makes the runs that DIR does not have yet, one after the other, and writes the tables and the figure of
docs/stability.md. Each run is a config with a few changes. With `--rules`, it writes what the health rules say of the
runs with seed 0, and makes only these.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.ill_runs import chance, engine_of
from benchmarks.judging import Judged, judged, rate
from jaxrl_llm import sft
from jaxrl_llm.config.load import load
from jaxrl_llm.health.finding import LogRecord
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.protocol import EngineChoice
from jaxrl_llm.structs import Config, PyTree
from jaxrl_llm.tasks import arithmetic
from jaxrl_llm.tasks.arithmetic import accuracy
from jaxrl_llm.train import steps

ROOT = Path(__file__).parent.parent
DOC, FIGURE = ROOT / "docs" / "stability.md", ROOT / "docs" / "stability_climb.png"
HERE = "benchmarks.stability"
SEEDS = (0, 1, 2)
CHEAP = {
    "checkpoint.every": 100_000, "checkpoint.keep_best": 0, "log.to": (), "log.completions_every": 0,
    "reward.timeout": 0.0, "health.self_test": False, "mesh.fsdp": 1, "eval": None,
}  # fmt: skip


def folder_of(name: str) -> str:
    """Returns the folder of a run."""
    return "".join(letter for letter in name.replace(" ", "-") if letter not in ",%")


def made(folder: Path, name: str, make: Callable[[Path], None]) -> Path:
    """Returns the workdir of a run, which it makes if it is not there whole."""
    workdir = folder / folder_of(name)
    if not workdir.exists():
        begun = workdir.with_name(workdir.name + ".partial")
        shutil.rmtree(begun, ignore_errors=True)
        with redirect_stdout(sys.stderr):
            make(begun)
        begun.rename(workdir)
    return workdir


# What the runs need beside the package.


def wrong_keys() -> list[dict[str, Any]]:
    """Problems to learn from, of which 23 % have an answer that nobody can find."""
    return [row | {"answer": "?"} if chance(row["prompt"][0]["content"]) < -0.54 else row for row in arithmetic.train()]


def wrong_keys_held_out() -> list[dict[str, Any]]:
    """1,000 held-out problems, of which 230 have an answer that nobody can find: 77 % is the most."""
    return [row | {"answer": "?"} if i < 230 else row for i, row in enumerate(arithmetic.held_out())]


def noisy_accuracy(
    prompts: list[Any], completions: list[Any], answer: list[str], *, wrong: float = 0.1, **columns: Any
) -> list[float]:
    """Accuracy, with the opposite verdict for a share of the completions. What is written does not decide which."""
    right, least = accuracy(completions, answer), 1 - 2 * wrong
    lies = [chance(f"{prompt}{i}") > least for i, prompt in enumerate(prompts)]
    return [float(bool(x) is not lie) for x, lie in zip(right, lies, strict=True)]


class Rounded(Sampler):
    """Computes with weights in bfloat16, beside a trainer with weights in float32."""

    def update_weights(self, params: PyTree, version: int = 0) -> None:
        rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params)
        super().update_weights(rounded, version)


def rounded() -> EngineChoice:
    return engine_of(Rounded)._replace(in_trainer=False)  # so that the trainer corrects for it, unless a run says no


def small_model(folder: Path) -> Path:
    """Returns a model of two layers and width 64, made by `sft` from nothing. A long run with it takes minutes."""
    config = load(ROOT / "configs" / "sft.py")
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    config.model.update(sizes | {"intermediate_size": 192})
    config.eval.every, config.mesh.fsdp = 500, 1

    def make(workdir: Path) -> None:
        for _ in sft.steps(config, workdir):
            pass

    return made(folder, "small model", make) / "hf"


def half_trained(folder: Path) -> Path:
    """Returns a model that configs/grpo.py trained for some steps, so that its accuracy is near its end."""
    return made(folder, "half trained", partial(run, "grpo", {"num_steps": 12, "schedule_steps": 100})) / "hf"


# Columns of the tables: from the records of a run to a number.


def at(step: int, name: str = "eval/accuracy") -> Callable[[list[LogRecord]], float]:
    return lambda records: next(record[name] for record in records if record["step"] == step)


def swing(records: list[LogRecord]) -> float:
    """The mean change of the reward from a step to the next, in the second half."""
    rewards = [record["reward/mean"] for record in records if "reward/mean" in record]
    later = rewards[len(rewards) // 2 :]
    return mean(abs(a - b) for a, b in pairwise(later))


def part(name: str, number: int, of: int = 4) -> Callable[[list[LogRecord]], float]:
    """The median of a metric in a part of the run; NaN if it has none."""

    def value(records: list[LogRecord]) -> float:
        values = [record[name] for record in records if record.get(name) is not None]
        return median(values[len(values) * number // of : len(values) * (number + 1) // of]) if values else math.nan

    return value


def largest(name: str) -> Callable[[list[LogRecord]], float]:
    return lambda records: max(record[name] for record in records if record.get(name) is not None)


Column = tuple[str, Callable[[list[LogRecord]], float], str]


@dataclass(frozen=True)
class Study:
    """Runs that differ in one thing each."""

    config: str
    common: dict[str, Any]
    conditions: dict[str, dict[str, Any]]
    columns: tuple[Column, ...]
    starts_from: Callable[[Path], Path] | None = None  # makes the model that the runs start from; None: the config's
    seeds: tuple[int, ...] = field(default=SEEDS)


EVALUATED = {"eval.every": 20}
ACCURACY = tuple((f"accuracy at {step}", at(step), ".1%") for step in (20, 40, 60))
BATCHES = (*ACCURACY, ("swing of the reward", swing, ".3f"))
FAST = {"optim.learning_rate": 1e-3}
NO_KL = {"kl": None}


def climbing() -> Iterator[tuple[str, dict[str, Any]]]:
    """10,000 updates with each combination of KL penalty, epochs and correction."""
    for beta in (0.0, 0.001):
        for epochs in (1, 4):
            for action in ("none", "truncate"):
                name = f"beta {beta:g}, epochs {epochs}, correction {'on' if action == 'truncate' else 'off'}"
                changes = {"epochs": epochs, "num_steps": 10_000 // epochs, "importance.action": action}
                yield name, changes | ({"kl.coef": beta} if beta else NO_KL)


STUDIES: dict[str, Study] = {
    "ppo batch": Study(
        "ppo",
        EVALUATED | {"num_steps": 60},
        {
            "256 sequences in an update": {},
            "the same, microbatch 64": {"microbatch": 64},
            "64 in an update": {"prompts_per_update": 64},
            "64 in a rollout and an update": {"prompts_per_step": 64, "prompts_per_update": 64},
            "256 in an update, rate 1e-3": FAST,
            "64 in an update, rate 1e-3": FAST | {"prompts_per_update": 64},
            "64 in a rollout and an update, rate 1e-3": FAST | {"prompts_per_step": 64, "prompts_per_update": 64},
        },
        BATCHES,
    ),
    "grpo batch": Study(
        "grpo",
        EVALUATED | {"num_steps": 60, "prompts_per_step": 60, "group_size": 5},
        {
            "2 updates of 150 sequences": {"prompts_per_update": 30},
            "10 updates of 30 sequences": {"prompts_per_update": 6},
            "2 updates, rate 1e-3": FAST | {"prompts_per_update": 30},
            "10 updates, rate 1e-3": FAST | {"prompts_per_update": 6},
        },
        BATCHES,
    ),
    "ceiling": Study(
        "grpo",
        EVALUATED
        | {"num_steps": 60, "optim.decay": "constant", "data.source": f"{HERE}.wrong_keys"}
        | {"eval.source": f"{HERE}.wrong_keys_held_out"},
        {f"rate {rate:g}": {"optim.learning_rate": rate} for rate in (1e-5, 5e-5, 1e-4, 1e-3)},
        (("accuracy at 0", at(0), ".1%"), *ACCURACY, ("swing of the reward", swing, ".3f")),
        starts_from=half_trained,
    ),
    "warm-up": Study(
        "ppo",
        {"num_steps": 305, "eval.every": 61, "prompts_per_step": 64, "prompts_per_update": 64}
        | {"optim.decay": "constant", "optim.warmup_steps": 0},
        {
            "0.95 of 305 steps": {"optim.warmup_ratio": 0.95},
            "0.285 of 1,005 steps": {"optim.warmup_ratio": 0.285, "schedule_steps": 1005},
            "5 steps": {"optim.warmup_steps": 5},
            "0.285 of 1,005 steps, no KL penalty": {"optim.warmup_ratio": 0.285, "schedule_steps": 1005} | NO_KL,
        },
        (
            *((f"accuracy at {step}", at(step), ".1%") for step in (61, 122, 183, 244, 305)),
            ("KL to the reference, end", part("kl/ref", 9, 10), ".3f"),
        ),
    ),
    "curve": Study(
        "grpo",
        {"eval.every": 10},
        {"configs/grpo.py": {}},
        tuple((f"step {step}", at(step), ".1%") for step in range(0, 101, 10)),
    ),
    "climb": Study(
        "grpo",
        {"prompts_per_step": 4, "group_size": 8, "prompts_per_update": 4, "optim.decay": "constant"}
        | {
            "engine": {"name": f"{HERE}.rounded"},
            "reward.functions": (f"{HERE}.noisy_accuracy", "arithmetic.accuracy"),
        },
        dict(climbing()),
        (
            *((f"norm, quarter {i + 1}", part("grad_norm", i), ".2f") for i in range(4)),
            ("largest norm", largest("grad_norm"), ".0f"),
            ("clip, last quarter", part("clip/fraction", 3), ".1e"),
            ("accuracy of samples, quarter 1", part("reward/arithmetic.accuracy", 0), ".3f"),
            ("quarter 4", part("reward/arithmetic.accuracy", 3), ".3f"),
        ),
        starts_from=small_model,
    ),
}


def run(config: str, changes: dict[str, Any], workdir: Path) -> None:
    """Makes a run."""
    made_of: Config = load(ROOT / "configs" / f"{config}.py")
    changes = CHEAP | changes
    if "engine" in changes:
        made_of.engine = type(made_of)(changes.pop("engine"))
    made_of.update_from_flattened_dict(changes)
    for _ in steps(made_of, workdir):
        pass


def runs(folder: Path, study: Study, name: str) -> dict[str, list[Path]]:
    """Returns the workdirs of a study: {condition: one for each seed}. Makes those that are not there."""
    start = {"model.path": str(study.starts_from(folder))} if study.starts_from else {}
    found = {condition: [] for condition in study.conditions}
    for seed in study.seeds:
        for condition, changes in study.conditions.items():
            make = partial(run, study.config, study.common | start | changes | {"seed": seed})
            found[condition].append(made(folder, f"{name} {condition} {seed}", make))
    return found


def table(study: Study, workdirs: dict[str, list[Path]]) -> list[str]:
    """Returns a row for each condition: the mean over the seeds, with the least and the most."""
    rows = ["| | " + " | ".join(title for title, _, _ in study.columns) + " |", "|---" * (len(study.columns) + 1) + "|"]
    for condition, folders in workdirs.items():
        records, cells = [read(one) for one in folders], []
        for _, value, form in study.columns:
            values = [value(one) for one in records]
            known = not any(map(math.isnan, values))  # a run without a reference has no KL
            cells.append(f"{mean(values):{form}} ({min(values):{form}} to {max(values):{form}})" if known else "")
        rows.append(f"| {condition} | " + " | ".join(cells) + " |")
    return rows


def first_seeds(workdirs: dict[str, list[Path]]) -> dict[str, Judged]:
    return {condition: judged(folders[0]) for condition, folders in workdirs.items()}


def rules_table(runs: dict[str, dict[str, Judged]]) -> list[str]:
    """Returns what the rules say of each run: {study: {condition: run}}. A run is ill if its accuracy fell."""
    rows = ["| runs | | accuracy of samples | healthy | found |", "|---|---|---|---|---|"]
    for study, conditions in runs.items():
        for condition, run in conditions.items():
            said = ", ".join(f"`{rule}` (step {step:,})" for rule, (step, _) in run.alarms.items())
            fell = "yes" if run.healthy else "no"
            rows.append(f"| {study} | {condition} | {run.tenths[0]:.2f} to {run.tenths[-1]:.2f} | {fell} | {said} |")
    every = [run for conditions in runs.values() for run in conditions.values()]
    for words, kind in (("Healthy", True), ("Ruined", False)):
        of = [run for run in every if run.healthy is kind]
        rows += ["", f"{words} runs that were called ill: {rate(sum(bool(run.alarms) for run in of), len(of))}."]
    return rows


def read(workdir: Path) -> list[LogRecord]:
    """Returns the records of a run."""
    return [json.loads(line) for line in (workdir / "metrics.jsonl").open()]


def draw(workdirs: dict[str, list[Path]]) -> None:
    """Draws the long runs: medians of 50 parts of a run, the mean of the seeds, and the least and most of them."""
    import matplotlib.pyplot as plt
    import numpy as np

    figure, panels = plt.subplots(2, 2, figsize=(11, 6.5), sharex=True, sharey="row", layout="constrained")
    metrics = {"grad_norm": "norm of the gradient", "reward/arithmetic.accuracy": "accuracy of samples"}
    updates = np.linspace(100, 9_900, 50)
    for column, beta in zip(panels.T, ("beta 0,", "beta 0.001,"), strict=True):
        for panel, (metric, title) in zip(column, metrics.items(), strict=True):
            for condition in [condition for condition in workdirs if condition.startswith(beta)]:
                values = [[record[metric] for record in read(one) if metric in record] for one in workdirs[condition]]
                parts = np.array([[median(x) for x in np.array_split(one, 50)] for one in values])
                style = "--" if condition.endswith("off") else "-"
                (line,) = panel.plot(updates, parts.mean(axis=0), style, label=condition.removeprefix(beta))
                panel.fill_between(updates, parts.min(axis=0), parts.max(axis=0), color=line.get_color(), alpha=0.2)
            panel.set(title=beta.rstrip(","), ylabel=title, ylim=(0, None))
        column[0].legend(fontsize="small")
        column[1].set_xlabel("updates")
    figure.savefig(FIGURE, dpi=110)


def write(name: str, lines: list[str]) -> None:
    """Prints a table, and puts it into the page."""
    print("\n".join(lines), flush=True)
    begin, end = f"<!-- {name}: written by benchmarks.stability -->", f"<!-- end of {name} -->"
    before, rest = DOC.read_text().split(begin)
    DOC.write_text("\n".join([before + begin, "", *lines, "", end + rest.split(end)[1]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "stability")
    parser.add_argument("--only", default="", choices=["", *STUDIES], help="make only the runs of this study")
    parser.add_argument("--rules", action="store_true", help="write what the health rules say of seed 0")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    if args.rules:
        made_of = {name: runs(args.runs, replace(study, seeds=SEEDS[:1]), name) for name, study in STUDIES.items()}
        write("rules", rules_table({name: first_seeds(workdirs) for name, workdirs in made_of.items()}))
        return
    for name in [name for name in STUDIES if args.only in ("", name)]:
        workdirs = runs(args.runs, STUDIES[name], name)
        write(name, table(STUDIES[name], workdirs))
        if name == "climb":
            draw(workdirs)


if __name__ == "__main__":
    main()
