"""Healthy runs and runs with a fault, whose logs `python -m benchmarks.health.alarms` judges.

A run is a config with a few changes, and its log is kept. The healthy ones differ in what noise depends on: sequences
of a step, wrong verdicts, learning rate, length, engine, rounding of the sampler and algorithm.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from benchmarks.health import ill_runs, stability, studies
from benchmarks.health.ill_runs import FAULTS, TURNS, Fault, credit, engine, fast
from benchmarks.health.studies import CONFIGS, ROOT, folder_of
from jaxrl_llm.health.history import RECENT_STEPS

LOG = ("config.json", "metrics.jsonl", "health.jsonl")  # what is kept of a run


class Healthy(NamedTuple):
    """A run that learns: its config and the changes of it."""

    config: str
    changes: dict[str, Any]

    def make(self, workdir: Path) -> None:
        """Makes the run."""
        studies.make_run(CONFIGS / f"{self.config}.py", self.changes, workdir)


SIZES = {16: (4, 4), 32: (4, 8), 64: (8, 8), 512: (64, 8)}  # sequences of a step: B and G
# The largest is near what a size survives: with 16 sequences 2e-4 ruins the policy, with 32 it is 4e-4. The middle
# one is that of the runs whose sampler rounds, so that a rate compiles once.
RATES = {16: (1e-5, 3e-5, 7e-5), 32: (1e-5, 5e-5, 1e-4), 64: (1e-5, 1e-4, 2e-4)}
STEPS = {16: 250, 32: 200, 64: 150, 512: 100}
WRONG = (0.0, 0.1, 0.2)  # shares of verdicts
ROUNDED = {"engine": {"name": f"{stability.HERE}.rounded"}}  # float32 in the trainer, bfloat16 weights in the sampler
BFLOAT16 = {"model.dtype": "bfloat16"}
EVALUATED = {"eval.every": 20, "eval.problems": 200}
VLLM = {"engine.python": str(ROOT / ".vllm" / "bin" / "python"), "engine.max_gap": 0.5}


def judges(wrong: float) -> dict[str, Any]:
    """Returns the reward functions: noisy verdicts are learned from, the right ones are only logged."""
    if not wrong:
        return {}
    return {"reward.functions": (f"{stability.HERE}.noisy_accuracy(wrong={wrong})", "arithmetic.accuracy")}


def grid(sequences: int, wrong: float, rate: float, **others: Any) -> tuple[str, Healthy]:
    """Returns a run of configs/grpo.py with its name."""
    prompts, group = SIZES[sequences]
    changes = {
        "num_steps": STEPS[sequences], "prompts_per_step": prompts, "prompts_per_update": prompts, "group_size": group,
        "optim.learning_rate": rate, "optim.decay": "constant",
    }  # fmt: skip
    changes |= judges(wrong) | others
    return f"{sequences} sequences, {wrong:.0%} wrong, rate {rate:g}, {changes['num_steps']} steps", Healthy(
        "grpo", changes
    )


def others() -> dict[str, Healthy]:
    """Returns healthy runs of other algorithms and engines."""
    few = {"num_steps": 100, "prompts_per_step": 16, "prompts_per_update": 16}
    single = {"num_steps": 200, "prompts_per_step": 64, "prompts_per_update": 64}  # one completion of a prompt
    slow = {"optim.learning_rate": 1e-5}
    return {
        "ppo": Healthy("ppo", single),
        "ppo, 10% wrong": Healthy("ppo", single | judges(0.1)),
        "remax": Healthy("remax", single),
        "lag 1, 10% wrong": Healthy("grpo", few | judges(0.1) | {"rollout.max_lag": 1}),
        "bfloat16, 10% wrong": Healthy("grpo", few | judges(0.1) | BFLOAT16),
        "bfloat16, rate 1e-5": Healthy("grpo", few | BFLOAT16 | slow),
        "rloo, 10% wrong": Healthy("rloo", few | judges(0.1)),
        "dapo": Healthy("dapo", few | {"prompts_per_update": 4}),
        "gspo, 10% wrong": Healthy("gspo", few | judges(0.1)),
        "search_grpo": Healthy("search_grpo", {"num_steps": 40}),
        "vLLM, 10% wrong": Healthy("grpo_vllm", few | judges(0.1) | VLLM),
        "vLLM, bfloat16": Healthy("grpo_vllm", few | VLLM | BFLOAT16),
        "vLLM, bfloat16, rate 1e-5, 10% wrong": Healthy("grpo_vllm", few | judges(0.1) | VLLM | BFLOAT16 | slow),
    }


def healthy() -> dict[str, Healthy]:
    """Returns the healthy runs by name, each with a seed of its own."""
    runs = dict(others())
    for size, rates in RATES.items():
        for wrong, rate in product(WRONG, rates):
            changes = ROUNDED if rate == rates[1] else {}
            runs |= [grid(size, wrong, rate, **changes)]
            if wrong:
                name, run = grid(size, wrong, rate, **changes, **(EVALUATED if wrong == 0.2 else {}))
                runs[f"{name}, again"] = run
    runs |= [grid(512, wrong, rate) for wrong, rate in ((0.0, 1e-4), (0.1, 1e-4), (0.1, 4e-4), (0.2, 4e-4))]
    runs |= [grid(16, 0.1, 3e-5, num_steps=3000), grid(32, 0.2, 5e-5, num_steps=1000)]
    return {name: run._replace(changes=run.changes | {"seed": 100 + at}) for at, (name, run) in enumerate(runs.items())}


HEALTHY = healthy()


def unseen(name: str, changes: dict[str, Any], **fields: Any) -> Fault:
    """Returns a fault of `benchmarks.health.ill_runs` in a strength, at a place and with a seed of its own."""
    fault = FAULTS[name]
    return replace(fault, changes=fault.changes | {"seed": 3} | changes, **fields)


# No bound was calibrated on these.
UNSEEN = {
    "sampler_mismatch": unseen("sampler_mismatch", engine("noisy", noise=0.15)),
    "stale_weights": unseen("stale_weights", engine("deaf", hears=6), begins=7),
    "engine_drift": unseen("engine_drift", engine("noisy", noise=0.002, growth=1.4)),
    "stale_samples": unseen("stale_samples", {"rollout.max_lag": 7, "optim.learning_rate": 1.2e-3}),
    "updates_skipped": unseen("updates_skipped", {"optim.learning_rate": 1e28}),
    "phantom_clipping": unseen("phantom_clipping", engine("noisy", noise=0.35)),
    "no_signal": unseen("no_signal", {"group_size": 4}),
    "no_verdict": unseen("no_verdict", {"group_size": 4}),
    "entropy_collapse": unseen("entropy_collapse", {"optim.learning_rate": 8.5e-4}),
    "entropy_explosion": unseen("entropy_explosion", {"entropy.coef": 15.0}),
    "reward_collapse": unseen(
        "reward_collapse", {}, begins=24, inject=fast(lambda step: 70.0 if 24 <= step < 28 else 1.0)
    ),
    "held_out_falls": unseen("held_out_falls", {"optim.learning_rate": 8e-4}),
    "gradient_climb": unseen("gradient_climb", {"epochs": 3}),
    "gradient_spike": unseen(
        "gradient_spike", {}, begins=25, inject=credit(partial(ill_runs.one_large_reward, at=25, times=60.0))
    ),
    "good_fades": unseen("good_fades", {"rollout.max_lag": 7}),
    "repeats": unseen("repeats", {"optim.learning_rate": 8e-4}),
    "kl_alone": unseen("kl_alone", {"kl.coef": 0.2}),
    "kl_pays": unseen("kl_pays", {"kl.coef": 0.45}),
    "truncated": unseen("truncated", {"optim.learning_rate": 3.5e-3}),
    "never_stops": unseen("never_stops", {"group_size": 4}),
    "length_collapse": unseen("length_collapse", {"optim.learning_rate": 8e-4}),
    "channels_diverge": unseen("channels_diverge", {"optim.learning_rate": 4e-4}),
    "critic_lags": unseen("critic_lags", {"prompts_per_step": 96, "prompts_per_update": 96}),
    "tools_unused": unseen("tools_unused", {"turns": TURNS | {"most": 2}}),
    "tool_down": unseen("tool_down", {"turns": TURNS | {"most": 2}}),
    "tool_errors": unseen("tool_errors", {"env": {"name": f"{ill_runs.HERE}.Failing", "share": 0.4}}),
}


# The runs by the name of their folder.


def fail(fault: Fault, second: bool, workdir: Path) -> None:
    """Runs a fault until some steps after the last one in which its rule may find it."""
    for record in ill_runs.run_fault(fault, workdir, second=second):
        if record["step"] >= fault.begins + fault.within + RECENT_STEPS:
            break


def makers() -> dict[str, Callable[[Path], None]]:
    """Returns what makes each run, the healthy ones in an order of chance, so that any part of them has all kinds."""
    names = Random(0).sample(sorted(HEALTHY), len(HEALTHY))
    made = {folder_of(f"healthy {name}"): HEALTHY[name].make for name in names}
    made |= {folder_of(f"unseen {name}"): partial(fail, fault, False) for name, fault in UNSEEN.items()}
    for form, second in (("first", False), ("second", True)):
        made |= {folder_of(f"{form} {name}"): partial(fail, fault, second) for name, fault in FAULTS.items()}
    return made


def make(name: str, folder: Path) -> None:
    """Makes a run, and keeps its log."""

    def logged(workdir: Path) -> None:
        makers()[name](workdir)
        for path in workdir.iterdir():
            if path.name not in LOG:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    studies.made(folder, name, logged)
