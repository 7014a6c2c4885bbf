"""Runs for docs/stability.md: `python -m benchmarks.health.stability [--runs DIR] [--only WORD] [--rules]`.

It makes the runs that DIR does not have yet, one after the other, and writes the tables and the figure of
docs/stability.md. Each run is a config with a few changes. With `--rules`, it writes what the health rules say of the
runs with seed 0, and makes only these.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.health import studies
from benchmarks.health.ill_runs import chance, engine_of
from benchmarks.health.studies import CONFIGS, PAGE, ROOT, SEEDS, Study, at, largest, made, make_run, part, read, swing
from jaxrl_llm import sft
from jaxrl_llm.config.load import load
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.protocol import EngineChoice
from jaxrl_llm.structs import PyTree
from jaxrl_llm.tasks import arithmetic
from jaxrl_llm.tasks.arithmetic import accuracy

FIGURE = ROOT / "docs" / "stability_climb.png"
HERE = "benchmarks.health.stability"


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
    return studies.with_lies(accuracy(completions, answer), prompts, wrong=wrong)


class Rounded(Sampler):
    """Computes with weights in bfloat16, beside a trainer with weights in float32."""

    def update_weights(self, params: PyTree, version: int = 0) -> None:
        rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params)
        super().update_weights(rounded, version)


def rounded() -> EngineChoice:
    return engine_of(Rounded)._replace(in_trainer=False)  # so that the trainer corrects for it, unless a run says no


def small_model(folder: Path) -> Path:
    """Returns a model of two layers and width 64, made by `sft` from nothing. A long run with it takes minutes."""
    config = load(CONFIGS / "sft.py")
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    config.model.update(sizes | {"intermediate_size": 192})
    config.eval.every, config.mesh.fsdp = 500, 1

    def make(workdir: Path) -> None:
        for _ in sft.steps(config, workdir):
            pass

    return made(folder, "small model", make) / "hf"


def half_trained(folder: Path) -> Path:
    """Returns a model that configs/grpo.py trained for some steps, so that its accuracy is near its end."""
    few_steps = partial(make_run, CONFIGS / "grpo.py", {"num_steps": 12, "schedule_steps": 100})
    return made(folder, "half trained", few_steps) / "hf"


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
        CONFIGS / "ppo.py",
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
        CONFIGS / "grpo.py",
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
        CONFIGS / "grpo.py",
        EVALUATED
        | {"num_steps": 60, "optim.decay": "constant", "data.source": f"{HERE}.wrong_keys"}
        | {"eval.source": f"{HERE}.wrong_keys_held_out"},
        {f"rate {rate:g}": {"optim.learning_rate": rate} for rate in (1e-5, 5e-5, 1e-4, 1e-3)},
        (("accuracy at 0", at(0), ".1%"), *ACCURACY, ("swing of the reward", swing, ".3f")),
        starts_from=half_trained,
    ),
    "warm-up": Study(
        CONFIGS / "ppo.py",
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
        CONFIGS / "grpo.py",
        {"eval.every": 10},
        {"configs/grpo.py": {}},
        tuple((f"step {step}", at(step), ".1%") for step in range(0, 101, 10)),
    ),
    "climb": Study(
        CONFIGS / "grpo.py",
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "stability")
    parser.add_argument("--only", default="", choices=["", *STUDIES], help="make only the runs of this study")
    parser.add_argument("--rules", action="store_true", help="write what the health rules say of seed 0")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    if args.rules:
        seed_0 = {name: replace(study, seeds=SEEDS[:1]) for name, study in STUDIES.items()}
        workdirs = {name: studies.runs(args.runs, study, name) for name, study in seed_0.items()}
        studies.write(PAGE, "rules", studies.rules_table(workdirs))
        return
    for name in [name for name in STUDIES if args.only in ("", name)]:
        workdirs = studies.runs(args.runs, STUDIES[name], name)
        studies.write(PAGE, name, studies.table(STUDIES[name], workdirs))
        if name == "climb":
            draw(workdirs)


if __name__ == "__main__":
    main()
