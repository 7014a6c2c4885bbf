"""Builds the tables that translate configs of TRL's five trainers: GRPO, RLOO, PPO, DPO and SimPO.

The keys are those of TRL 1.16 (PPO: trl.experimental 0.29), with older keys and keys of alignment-handbook. trl.tsv has
the keys that the trainers share, also of ModelConfig and ScriptArguments, with the arguments of a trainer and what a
script does to its objects. trl_grpo.tsv, trl_dpo.tsv and so on have the keys of one trainer. names.tsv has the
defaults of Unsloth and of SimPO's own trainer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_llm.tools.translate import family, trl_counts, trl_objectives, trl_parts  # noqa: F401 (tables name them)
from jaxrl_llm.tools.translate.outcome import Conditional, Keys, TrainerTable, Unread, Version
from jaxrl_llm.tools.translate.table import Row, read_names, read_rows, trainer_table

# Fields that keys of other classes than TRL's config decide: those of the trainer, of ModelConfig and ScriptArguments.
NOT_OF_CONFIG = re.compile(r"model\.path|adapters|reward(_model|\.f)|data\.(source|convert|prompt_column)|eval\.source")


def edition(name: str, kind: str, *only_keys: str) -> Version:
    """Returns an edition of a TRL trainer, with its defaults in names.tsv. kind: key of `TRL_TRAINERS`."""
    defaults = read_names(only_keys[0]) | read_names(f"{only_keys[0]}_{kind}")
    # A ? begins the description of a default that the edition does not decide.
    return Version(name, only_keys, {key: Unread(x[1:]) if str(x)[0] == "?" else x for key, x in defaults.items()})


def unpacked(table_rows: Mapping[str, Row], trainer: TrainerTable) -> Version:
    """Returns the defaults of a file with GRPOConfig(**mapping) whose mapping is not read: each may be another one."""
    newest = Keys({}, trainer.defaults, rows=0, processes=0)
    may_be_set: dict[str, Any] = {}
    for key, row in table_rows.items():
        rule = trainer.rules.get(key)
        while isinstance(rule, Conditional) and rule.applies(newest):
            rule = rule.rule
        is_of_config = row.field and not NOT_OF_CONFIG.match(row.field) and re.fullmatch(r"\w+", key)
        if rule and not isinstance(rule, Conditional) and is_of_config:
            may_be_set[key] = Unread(f"{row.default or None}, or what a mapping of the config says, which is not read")
    return Version("", ("[*][*]*",), may_be_set)


def trl_table(kind: str, name: str, version: str, base: str, tables: str) -> TrainerTable:
    """Returns the table of a TRL trainer. tables: its .tsv files besides trl.tsv; a row of a later file wins."""
    table_rows = {key: row for table in f"trl {tables}".split() for key, row in read_rows(table).items()}
    trainer = trainer_table(f"TRL's {name}", version, table_rows, vars(family) | globals(), lambda keys: base)
    editions = [edition("of SimPO's own trainer", kind, "gamma_beta_ratio", "sft_weight")] * (kind == "simpo")
    editions.append(edition("with Unsloth", kind, "unsloth"))
    return replace(trainer, patches=(*editions, unpacked(table_rows, trainer)))


GRPO = trl_table("grpo", "GRPO", "1.16.0", "grpo", "trl_grpo")
RLOO = trl_table("rloo", "RLOO", "1.16.0", "grpo", "trl_grpo trl_episodes trl_rloo")
PPO = trl_table("ppo", "PPO", "0.29.0", "ppo", "trl_episodes trl_ppo")
# Keys that set the optimizer, which in PPO is one for policy and critic.
OPTIMIZER_KEYS = [key for key, fields in PPO.decides.items() if any(name.startswith("optim.") for name in fields)]
PPO = replace(PPO, rules=PPO.rules | {key: trl_parts.with_critic(PPO.rules[key]) for key in OPTIMIZER_KEYS})
DPO = trl_table("dpo", "DPO", "1.16.0", "dpo", "trl_pairs trl_dpo")
SIMPO = trl_table("simpo", "SimPO", "1.16.0", "simpo", "trl_pairs trl_simpo")
# {kind of a trainer: its table}
TRL_TRAINERS = {"grpo": GRPO, "ppo": PPO, "rloo": RLOO, "dpo": DPO, "simpo": SIMPO}


def flags() -> set[str]:
    """Returns the TRL keys that change a run. A shell line with such a key must be translated or reported."""
    tables = ["trl", "trl_pairs", "trl_episodes", *(f"trl_{kind}" for kind in TRL_TRAINERS)]
    listed = [row for table in tables for row in read_rows(table).values()]
    return {row.key for row in listed if row.rule.split(" ")[0] not in ("idle", "off", "none", "absent")} - {"config"}
