"""The five trainers of TRL 1.16 (PPO: trl.experimental 0.29), with older keys and those of alignment-handbook.

trl.tsv has the keys that they share, of ModelConfig and ScriptArguments too, with the arguments of a trainer and what a
script does to its objects. trl_grpo.tsv and the others have the keys of a trainer; there `was` is a sentence: a default
of the newest version that no key of the file proves may be another one. trl_versions.tsv has the older versions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl_llm.tools.translate import family, images
from jaxrl_llm.tools.translate import trl_counts as counts
from jaxrl_llm.tools.translate import trl_objectives as objectives
from jaxrl_llm.tools.translate import trl_parts as parts
from jaxrl_llm.tools.translate import trl_rows as rows
from jaxrl_llm.tools.translate.documents import parse_scalar
from jaxrl_llm.tools.translate.outcome import Conditional, Keys, Outcome, Rule, TrainerTable, Version
from jaxrl_llm.tools.translate.table import Row, read_rows, trainer_table

# Sentences that the tables name by these constants.
ADAMW = "AdamW is the one optimizer here"
STOPS = "stop tokens are the model's: generation_config.json"
ONE_ADAPTER = "one adapter, and its base is the reference"
NO_ARGUMENT = "the loss has no such argument"

CONDITIONS = {
    "by_steps": (lambda keys: not counts.counts_rollouts(keys), "total_episodes decides"),
    "by_epochs": (lambda keys: not (counts.counts_rollouts(keys) and keys["total_episodes"]), "total_episodes is set"),
    "saves": (lambda keys: keys["save_strategy"] == "steps", "save_strategy is not steps"),
    "evaluating": (rows.evaluates, "eval_strategy is no"),
    "evaluates": (lambda keys: rows.evaluates(keys) and keys["eval_steps"], "eval_strategy is no, or it is not set"),
    "no_dtype": (lambda keys: not keys.explicit.get("dtype"), "the model's dtype is set"),
    "images": (images.has_images, images.NONE),
    "adapted": (parts.adapted, "use_peft is False"),
    "no_sft_model": (lambda keys: "sft_model_path" not in keys, "of the tokenizer; sft_model_path is the policy"),
    "uses_vllm": (lambda keys: keys["use_vllm"], "rollouts come from the trainer's process, there and here"),
    "penalized": (lambda keys: bool(keys["beta"]), "beta is 0: there is no KL penalty"),
    "syncs": (lambda keys: keys["sync_ref_model"] and keys["beta"], "no sync_ref_model, or no reference"),
    "adaptive": (lambda keys: keys["use_adaptive_entropy"], "use_adaptive_entropy is False"),
    "clips": (lambda keys: keys["loss_type"] not in ("sapo", "vespo"), NO_ARGUMENT),
    "two_sided": (lambda keys: keys["loss_type"] not in ("cispo", "sapo", "vespo"), NO_ARGUMENT),
    "clipped": (lambda keys: objectives.loss_name(keys["loss_type"], keys) == "ppo_clip", NO_ARGUMENT),
    "sapo": (lambda keys: keys["loss_type"] == "sapo", NO_ARGUMENT),
    "vespo": (lambda keys: keys["loss_type"] == "vespo", NO_ARGUMENT),
    "cpo": (lambda keys: "gamma_beta_ratio" not in keys.defaults, "of CPOConfig"),
}
tower = images.tower(parts.adapted)
LINES = (Path(__file__).parent / "trl_versions.tsv").read_text(encoding="utf-8").splitlines()[1:]
VERSIONS = [line.split("\t") for line in LINES if not line.startswith("#")]
FIRST_KEYS = {version: first.split() for _, version, _, first, _ in VERSIONS}


def older(kind: str) -> tuple[Version, ...]:
    """Returns the older versions of a trainer that had other defaults."""
    return tuple(
        Version(name, tuple(proofs.split()), {key: parse_scalar(x) for key, x in re.findall(r"(\S+)=(\S+)", pairs)})
        for kinds, name, proofs, _, pairs in VERSIONS
        if kind in kinds.split()
    )


def dated(trainer: TrainerTable, values: Mapping[str, Any]) -> TrainerTable:
    """Returns a trainer for the version of a file. `vllm_device` is a key of 0.14 to 0.17, so other keys decide."""
    later_versions = [version for version in trainer.older if not values.keys().isdisjoint(FIRST_KEYS[version.name])]
    if "vllm_device" in values and later_versions:
        first = later_versions[0]
        return replace(trainer, older=(replace(first, proofs=(*first.proofs, "vllm_device")),))
    return trainer


def noted(row: Row, rule: Rule) -> Rule:
    """Returns a rule which says that the default was another one in earlier versions, for which the file may be."""
    if isinstance(rule, Conditional):
        return replace(rule, rule=noted(row, rule.rule))

    def with_note(value: Any, keys: Keys) -> Outcome:
        outcome = rule(value, keys)
        newest = row.key not in keys and value == parse_scalar(row.default)
        return replace(outcome, kind="changed", reason=f"{row.default}; {row.was}") if newest else outcome

    return with_note


def trl_table(kind: str, name: str, version: str, base: str, tables: str) -> TrainerTable:
    """Returns a trainer of TRL. tables: names of its tables; a row of a later table wins."""
    table_rows = {key: row for table in f"trl {tables}".split() for key, row in read_rows(table).items()}
    trainer = trainer_table(f"TRL's {name}", version, table_rows, vars(family) | globals(), lambda keys: base)
    notes = {key: noted(row, trainer.rules[key]) for key, row in table_rows.items() if row.was and key in trainer.rules}
    return replace(trainer, rules=trainer.rules | notes, older=older(kind))


GRPO = trl_table("grpo", "GRPO", "1.16.0", "grpo", "trl_grpo")
RLOO = trl_table("rloo", "RLOO", "1.16.0", "grpo", "trl_grpo trl_episodes trl_rloo")
PPO = trl_table("ppo", "PPO", "0.29.0", "ppo", "trl_episodes trl_ppo")
OPTIMIZER = [key for key, fields in PPO.decides.items() if any(name.startswith("optim.") for name in fields)]
PPO = replace(PPO, rules=PPO.rules | {key: parts.with_critic(PPO.rules[key]) for key in OPTIMIZER})
DPO = trl_table("dpo", "DPO", "1.16.0", "dpo", "trl_pairs trl_dpo")
SIMPO = trl_table("simpo", "SimPO", "1.16.0", "simpo", "trl_pairs trl_simpo")
OF_TRL = {"grpo": GRPO, "ppo": PPO, "rloo": RLOO, "dpo": DPO, "simpo": SIMPO}


def flags() -> set[str]:
    """Returns the keys that decide something. A line of a script with such a key must be read or named."""
    tables = ["trl", "trl_pairs", "trl_episodes", *(f"trl_{kind}" for kind in OF_TRL)]
    listed = [row for table in tables for row in read_rows(table).values()]
    return {row.key for row in listed if row.rule.split(" ")[0] not in ("idle", "off", "none", "absent")} - {"config"}
