"""What a rollback saves: `python -m benchmarks.health.rescue [--seeds 0 1 2]`.

Each run of configs/grpo.py meets a fault once, at step 30: without the rules that act, and with them. It prints the
accuracy at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.health import ill_runs
from jaxrl_llm.build import Parts, build
from jaxrl_llm.config.load import load
from jaxrl_llm.errors import UserError
from jaxrl_llm.session.session import Session
from jaxrl_llm.train import train

ROOT = Path(__file__).parents[2]
STEPS, AT = 60, 30
COMMON = {
    "num_steps": STEPS, "eval.every": STEPS, "checkpoint.every": 10, "checkpoint.keep": 3, "checkpoint.keep_best": 0,
    "log.to": (), "health.self_test": False,
}  # fmt: skip
RULES = ("reward_collapse", "entropy_explosion", "no_signal", "sampler_mismatch")


def fast(session: Session, parts: Parts) -> None:
    """The rate x 100 for three steps."""
    ill_runs.fast(lambda step: 100.0 if AT <= step < AT + 3 and not session.run_state.attempt else 1.0)(session, parts)


def not_a_number(session: Session, parts: Parts) -> None:
    """One batch of rewards that are NaN."""

    def change(step: int, batch: Any, scores: Any, rewards: Any) -> Any:
        bad = step == AT and not session.run_state.attempt
        return scores, replace(rewards, total=rewards.total * (jnp.nan if bad else 1.0))

    ill_runs.credit(change)(session, parts)


def wrong_push(session: Session, parts: Parts) -> None:
    """Three pushes of weights that are noise: the policy learns from what they sample."""
    engine = parts.actor.engine
    push = engine.update_weights

    def wrong(params: Any, version: int = 0) -> None:
        bad = AT <= version < AT + 3 and not session.run_state.attempt
        push(jax.tree.map(lambda x: -x, params) if bad else params, version)

    engine.update_weights = wrong


FAULTS: dict[str, Callable[[Session, Parts], None]] = {
    "rate x 100": fast,
    "NaN rewards": not_a_number,
    "wrong push": wrong_push,
}


def accuracy(seed: int, fault: str, acts: bool) -> tuple[float, int]:
    """Returns the accuracy at the end of a run, and how often it went back."""
    config = load(ROOT / "configs" / "grpo.py")
    config.update_from_flattened_dict(COMMON | {"seed": seed} | ({"health.rollback.rules": RULES} if acts else {}))
    with (
        TemporaryDirectory() as workdir,
        redirect_stdout(sys.stderr),
        build(config, Path(workdir) / "run") as (session, parts),
    ):
        if fault:
            FAULTS[fault](session, parts)
        try:
            for _ in train(session, parts):
                pass
        except UserError as error:
            print(error)
        lines = map(json.loads, (Path(workdir) / "run" / "metrics.jsonl").read_text().splitlines())
        return next((line["eval/accuracy"] for line in lines if line["step"] == STEPS), 0.0), session.run_state.attempt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    print("| fault | seed | undisturbed | disturbed | with rollback | times back |\n|---|---|---|---|---|---|")
    for seed in seeds:
        plain, _ = accuracy(seed, "", False)
        for fault in FAULTS:
            ill, (saved, back) = accuracy(seed, fault, False)[0], accuracy(seed, fault, True)
            print(f"| {fault} | {seed} | {plain:.1%} | {ill:.1%} | {saved:.1%} | {back} |", flush=True)


if __name__ == "__main__":
    main()
