"""The five trainers of TRL 1.16 (PPO: trl.experimental 0.29), with older keys and those of alignment-handbook.

trl.tsv has the keys that they share, of ModelConfig and ScriptArguments too, with the arguments of a trainer and what a
script does to its objects. trl_grpo.tsv and the others have the keys of a trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_llm.tools.translate import family, images
from jaxrl_llm.tools.translate import trl_counts as counts  # noqa: F401 (functions of the tables)
from jaxrl_llm.tools.translate import trl_rules as rules
from jaxrl_llm.tools.translate.outcome import Keys, System, Version
from jaxrl_llm.tools.translate.table import read_rows, system

# Sentences of the tables.
ADAMW = "AdamW is the one optimizer here"
STOPS = "stop tokens are the model's: generation_config.json"
ONE_ADAPTER = "one adapter, and its base is the reference"
PROCESSOR = images.PROCESSOR


def evaluating(keys: Keys) -> bool:
    return keys["eval_strategy"] not in ("no", None, False)


CONDITIONS = {
    "lowest": (lambda keys: keys["lr_scheduler_type"] == "cosine_with_min_lr", "lr_scheduler_type has none here"),
    "saves": (lambda keys: keys["save_strategy"] == "steps", "save_strategy is not steps"),
    "evaluating": (evaluating, "eval_strategy is no"),
    "evaluates": (lambda keys: evaluating(keys) and keys["eval_steps"], "eval_strategy is no, or it is not set"),
    "no_dtype": (lambda keys: not keys.explicit.get("dtype"), "the model's dtype is set"),
    "pictures": (images.shown, images.NONE),
    "penalized": (lambda keys: bool(keys["beta"]), "beta is 0: there is no KL penalty"),
    "by_epochs": (lambda keys: not keys["total_episodes"], "total_episodes is set"),
    "no_sft_model": (
        lambda keys: "sft_model_path" not in keys,
        "sft_model_path is the policy; this is the tokenizer's",
    ),
}
tower = images.tower(rules.adapted)
# Older versions, by keys that later ones do not have.
UNTIL_17 = dict(beta=0.04, temperature=0.9, max_completion_length=256, max_prompt_length=512, logging_steps=500)
UNTIL_17 |= dict(use_bias_correction_kl=False, gradient_checkpointing=False)
UNTIL_28 = ("max_prompt_length", "use_liger_loss", "vllm_guided_decoding_regex", "wandb_log_unique_prompts")
GRPO_OLDER = (
    Version("0.16 and 0.17", ("vllm_enable_prefix_caching",), UNTIL_17 | {"loss_type": "bnpo", "top_k": 50}),
    Version(
        "0.15",
        ("vllm_dtype", "vllm_max_model_len"),
        UNTIL_17 | dict(loss_type="grpo", ref_model_mixup_alpha=0.9, ref_model_sync_steps=64),
    ),
    Version(
        "0.14",
        ("vllm_device",),
        UNTIL_17
        | {"loss_type": "grpo", "(per_device_counts)": "prompts"}
        | dict(per_device_train_batch_size=1, gradient_accumulation_steps=8),
    ),
    Version(
        "until 0.28", UNTIL_28, dict(max_completion_length=256, max_prompt_length=512, use_bias_correction_kl=False)
    ),
)
FIRST_KEYS = {  # keys that a version has first
    "0.16 and 0.17": "epsilon num_iterations scale_rewards min_p top_p top_k repetition_penalty cache_implementation",
    "0.15": "reward_weights log_completions sync_ref_model ds3_gather_for_generation",
}
UNTIL_11 = dict(max_length=512, max_prompt_length=128, learning_rate=5e-5, logging_steps=500)
UNTIL_11 |= dict(gradient_checkpointing=False)
OF_PAIRS = ("max_prompt_length", "max_completion_length", "rpo_alpha", "label_pad_token_id", "generate_during_eval")
PAIRS_OLDER = (
    Version(
        "until 0.11",
        ("evaluation_strategy", "max_target_length", "trainer.beta", "trainer.max_length", "trainer.max_prompt_length"),
        UNTIL_11,
    ),
    Version("until 0.28", (*OF_PAIRS, "reference_free", "force_use_ref_model"), dict(max_prompt_length=512)),
)
OWN = Version(
    "of SimPO's own trainer",
    ("gamma_beta_ratio", "sft_weight"),
    UNTIL_11 | dict(beta=2.0, gamma_beta_ratio=0.25, sft_weight=0.0),
)


def dated(trainer: System, values: Mapping[str, Any]) -> System:
    """Returns a trainer for the version of a file. `vllm_device` is of 0.14 to 0.17: other keys tell them apart."""
    later = [each for each in GRPO_OLDER if not values.keys().isdisjoint(FIRST_KEYS.get(each.name, "").split())]
    if trainer is GRPO and "vllm_device" in values and later:
        return replace(trainer, older=(replace(later[0], proofs=(*later[0].proofs, "vllm_device")),))
    return trainer


def trl_system(name: str, version: str, base: str, tables: str, *older: Version) -> System:
    """Returns a trainer of TRL. Its own tables win over those that stand before them."""
    rows = {key: row for table in f"trl {tables}".split() for key, row in read_rows(table).items()}
    return replace(system(name, version, rows, vars(family) | globals(), lambda keys: base), older=older)


GRPO = trl_system("TRL's GRPO", "1.16.0", "grpo", "trl_grpo", *GRPO_OLDER)
GRPO = replace(GRPO, rules=GRPO.rules | {key: rules.was(key, GRPO.rules[key]) for key in rules.OLDER})
RLOO = trl_system("TRL's RLOO", "1.16.0", "grpo", "trl_grpo trl_rloo")
PPO = trl_system("TRL's PPO", "0.29.0", "ppo", "trl_ppo")
OPTIMIZER = [key for key, fields in PPO.decides.items() if any(name.startswith("optim.") for name in fields)]
PPO = replace(PPO, rules=PPO.rules | {key: rules.with_critic(PPO.rules[key]) for key in OPTIMIZER})
DPO = trl_system("TRL's DPO", "1.16.0", "dpo", "trl_pairs trl_dpo", *PAIRS_OLDER)
SIMPO = trl_system("TRL's SimPO", "1.16.0", "simpo", "trl_pairs trl_simpo", OWN, *PAIRS_OLDER)
OF_TRL = {"grpo": GRPO, "ppo": PPO, "rloo": RLOO, "dpo": DPO, "simpo": SIMPO}


def flags() -> set[str]:
    """Returns the keys that decide something, so that a script cannot lose one without a word."""
    rows = [
        row for table in ("trl", *(f"trl_{kind}" for kind in (*OF_TRL, "pairs"))) for row in read_rows(table).values()
    ]
    return {row.key for row in rows if row.rule.split(" ")[0] not in ("idle", "off", "none", "absent")} - {"config"}
