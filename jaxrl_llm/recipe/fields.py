"""The table of all config fields, with their types and ranges."""

from __future__ import annotations

from jaxrl_llm.algorithms import losses
from jaxrl_llm.algorithms.importance import make_importance_weights
from jaxrl_llm.config.schema import Field, fields_of
from jaxrl_llm.health.rules import RULES
from jaxrl_llm.learner import optim, scorers
from jaxrl_llm.machine.sharding import make_mesh
from jaxrl_llm.models.peft import make_lora
from jaxrl_llm.rollout.environments import EnvironmentPool


def optim_fields(section: str) -> dict[str, Field]:
    """Returns the fields of an optimizer section."""
    return fields_of(section, optim.make_optimizer, leave_out=("adaptive", "more", "skips", "lowers"))


# If a section holds the arguments of one function, `fields_of` reads the allowed values from its annotations.
SHARED = {
    "seed": Field(int, low=0, high=2**31 - 1),
    "deterministic": Field(bool, may_change=True),
    "num_steps": Field(int, low=1, may_change=True),
    "schedule_steps": Field(int, low=0),
    "prompts_per_step": Field(int, low=1),
    "microbatch": Field(int, low=0, may_change=True),
    "model.path": Field(str, may_change=True),  # a moved folder is fine: a fingerprint checks its files
    "model.dtype": Field(str, choices=("float32", "bfloat16")),
    "model.remat": Field(str, choices=("none", "dots", "full"), may_change=True),
    # What names and reads rows may change, because a fingerprint checks the rows.
    "data.source": Field(str, may_change=True),
    "data.convert": Field(str, may_change=True),
    "data.prompt_column": Field(str, may_change=True),
    "data.answer_column": Field(str, may_change=True),
    "data.format_prompt": Field(str, may_change=True),
    "data.accept": Field(str, may_change=True),
    "data.chat_template_args": Field(dict),
    "data.today": Field(str, may_change=True),
    "data.max_prompt_tokens": Field(int, low=1),
    "data.overlong": Field(str, choices=("drop", "error")),
    "rollout.max_completion_tokens": Field(int, low=1),
    "eval.every": Field(int, low=0, may_change=True),
    "eval.source": Field(str, may_change=True),
    "eval.convert": Field(str, may_change=True),
    "eval.function": Field(str),
    "eval.problems": Field(int, low=1, may_change=True),
    "eval.patience": Field(int, low=0, may_change=True),
    "reward.timeout": Field(float, low=0, high=1e6, may_change=True),
    "reward.unconfined": Field(bool, may_change=True),
    **fields_of("aggregate", losses.aggregation_weights),
    **optim_fields("optim"),
    **fields_of("mesh", make_mesh),
    **{name: field for rule in RULES for name, field in fields_of("health", rule).items()},
    "health.hang_minutes": Field(float, low=0, high=1e5, may_change=True),
    "health.stop": Field(tuple, of=str, may_change=True),
    "checkpoint.every": Field(int, low=1, may_change=True),
    "checkpoint.keep": Field(int, low=1, may_change=True),
    "checkpoint.keep_best": Field(int, low=0, may_change=True),
    "log.to": Field(tuple, of=str, may_change=True),
    "log.project": Field(str, may_change=True),
}
TRAIN = SHARED | {
    "log.completions_every": Field(int, low=0, may_change=True),
    "health.self_test": Field(bool, may_change=True),
    "data.curriculum.skip": Field(float, low=0, high=0.95),  # below 1: a prompt may become a lesson again
    "group_size": Field(int, low=1),
    "model.row_parts": Field(int, low=1, may_change=True),
    "prompts_per_update": Field(int, low=1),
    "epochs": Field(int, low=1),
    "health.skip": Field(tuple, of=str),
    "health.rollback.rules": Field(tuple, of=str),
    "health.rollback.most": Field(int, low=1, may_change=True),
    "health.rollback.learning_rate": Field(float, low=0, high=1, above=True),
    "health.rollback.warmup_steps": Field(int, low=0),
    "host_memory.reference": Field(bool, may_change=True),
    "host_memory.optimizer": Field(bool, may_change=True),
    "reward.functions": Field(tuple),
    "reward.weights": Field(tuple),
    "reward.overlong_tokens": Field(int, low=0),
    "kl.placement": Field(str, choices=("none", "reward", "loss")),
    "kl.estimator": Field(str, choices=("k1", "k2", "k3")),
    **fields_of("kl", optim.kl_coefficient),
    "kl.weighted": Field(bool),
    "kl.refresh_every": Field(int, low=0),
    "kl.mix": Field(float, low=0, high=1, above=True),
    "adaptive_warmup.kl_to_reward": Field(float, low=0),
    "adaptive_warmup.update_size": Field(float, low=0),
    **fields_of("entropy", optim.entropy_coefficient),
    "mask.truncated": Field(bool),
    "mask.top_entropy": Field(float, low=0, high=1, above=True),
    "mask.off_policy": Field(float, low=0),
    **fields_of("importance", make_importance_weights, leave_out=("off_policy", "dtype")),
    "rollout.max_lag": Field(int, low=0),
    "rollout.resample_rounds": Field(int, low=0),
    "rollout.temperature": Field(float, low=0, above=True),
    "rollout.top_k": Field(int, low=0),
    "rollout.top_p": Field(float, low=0, high=1, above=True),
}
CRITIC = {  # only if the advantage estimator requires values
    "critic.path": Field(str),
    "critic.gamma": Field(float, low=0, high=1),
    "critic.lam": Field(float, low=0, high=1),
    "critic.clip": Field(float, low=0),
    "critic.warmup_steps": Field(int, low=0),
    **optim_fields("critic.optim"),
}
SOURCE = {  # of each source of a mixture
    "source": Field(str, may_change=True),
    "convert": Field(str, may_change=True),
    "weight": Field(float, low=0, above=True),
}
ROUTER = {"router.balance_coef": Field(float, low=0)}  # only for a model with experts
TURNS = fields_of("turns", EnvironmentPool.__init__)  # only if there is an environment
FROZEN = {  # only if the advantage estimator requires a column of another model, or for a reward model
    section: {f"{section}.path": Field(str, may_change=True)}  # as model.path
    for section in scorers.FROZEN
}
FROZEN["reward_model"]["reward_model.weight"] = Field(float)
LORA = fields_of("lora", make_lora)  # only if the policy learns adapters
SFT = SHARED | {
    "data.completion_column": Field(str),
    "model.hidden_size": Field(int, low=1),
    "model.num_hidden_layers": Field(int, low=1),
    "model.num_attention_heads": Field(int, low=1),
    "model.num_key_value_heads": Field(int, low=1),
    "model.intermediate_size": Field(int, low=1),
    "model.vocabulary": Field(int, low=0),
}
