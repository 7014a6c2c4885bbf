"""The table of Search-R1's keys: those of its copy of veRL, and of its search engine."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from jaxrl_llm.tools.translate import family, ours, verl
from jaxrl_llm.tools.translate.outcome import Idle, Keys, Outcome, Rule, System, off, only_if, to
from jaxrl_llm.tools.translate.verl import ACTOR, MODEL, ROLLOUT

# A prompt has n x n_agent episodes, and its veRL of early 2025 does not multiply the mini-batch by them.
NAMES = replace(verl.NAMES, group=(f"{ROLLOUT}n", f"{ROLLOUT}n_agent"), sequences=True)
# Its veRL has no switch for it: whenever the penalty is not in the loss, it is in the reward.
KL = replace(verl.KL, in_reward=lambda keys: not keys[f"{ACTOR}use_kl_loss"])


def grouped(value: Any, keys: Keys) -> Outcome:
    """Episodes of a prompt."""
    reason = "n x n_agent episodes of a prompt"
    return Outcome("mapped", {"group_size": NAMES.group_size(keys)}, reason)


def turns(value: Any, keys: Keys) -> Outcome:
    """Searches of an episode: after the last one, the policy has one more turn."""
    searches, response = int(keys["max_turns"]), int(keys["data.max_response_length"])
    fields = {
        "env.most_searches": searches,
        # After max_turns searches Search-R1 generates once more, without a search.
        "turns.most": searches + 1,
        "rollout.max_completion_tokens": (searches + 1) * response + searches * int(keys["data.max_obs_length"]),
    }
    reason = "turns that may search; one more answers. An episode has at most (max_turns + 1) x max_response_length + "
    return Outcome("changed", fields, reason + "max_turns x max_obs_length tokens, and is never cut at its beginning")


def turn_limit(name: str, reason: str = "") -> Rule:
    """A limit in tokens, which is also a part of the limit of an episode. reason: what differs."""
    # Both limits are factors of the one of an episode, so each key sets that too, from all of them.
    whole, kind = "rollout.max_completion_tokens", "changed" if reason else "mapped"
    return lambda value, keys: Outcome(kind, {name: int(value), whole: turns(value, keys).fields[whole]}, reason)


def masking(value: Any, keys: Keys) -> Outcome:
    """Whether what the search finds is left out."""
    if value:
        reason = "also left out of the KL penalty, the critic and the advantages; there, of the policy's loss"
        return Outcome("changed", {}, reason)
    return Outcome("unsupported", reason="what the search finds is never trained on here")


def rewards(value: Any, keys: Keys) -> Outcome:
    """Exact match, as Search-R1's reward."""
    return Outcome("mapped", ours.reward_fields((ours.SEARCH,)), "exact match of the answer, as there")


epochs_rule, steps_rule = family.steps(NAMES, "trainer.total_epochs", "trainer.total_training_steps")
SEARCH_RULES: dict[str, Rule] = (
    verl.optimizer("optim", ACTOR, NAMES)
    | verl.critic_rules(verl.optimizer("critic.optim", "critic.", NAMES), NAMES.estimator)
    | {
        "data.train_files": family.files("data", ours.SEARCH_R1_ROWS),
        "data.val_files": family.files("eval", ours.SEARCH_R1_ROWS),
        "data.train_batch_size": family.prompts(NAMES),
        "data.max_start_length": to("data.max_prompt_tokens", int),
        "data.max_response_length": turn_limit(
            "turns.tokens",
            "a turn that meets this limit ends the episode here, as truncated; there it is answered as an invalid "
            "action, and the episode goes on",
        ),
        "data.max_obs_length": turn_limit("turns.observation_tokens"),
        "data.max_prompt_length": Idle("the whole context of a turn, cut at its beginning; an episode is never cut"),
        "data.train_data_num": off("take fewer rows with data.convert"),
        "data.val_data_num": only_if(
            lambda keys: bool(keys.explicit.get("data.val_data_num")), to("eval.problems", int), "all of them"
        ),
        "data.shuffle_train_dataloader": family.shuffle,
        f"{ACTOR}ppo_mini_batch_size": family.update(NAMES),
        f"{ACTOR}ppo_micro_batch_size": family.micro(NAMES, per_gpu=False),
        f"{ACTOR}state_masking": masking,
        f"{ACTOR}use_kl_loss": KL.switch,
        f"{ACTOR}kl_loss_coef": KL.value("kl.coef", KL.in_loss, "use_kl_loss is False"),
        f"{ACTOR}kl_loss_type": KL.value("kl.estimator", KL.in_loss, "use_kl_loss is False"),
        f"{ACTOR}clip_ratio": lambda value, keys: Outcome(
            "mapped", {"loss.name": "ppo_clip", "loss.clip_low": value, "loss.clip_high": value, "loss.delta": 0.0}
        ),
        "algorithm.adv_estimator": family.advantage(NAMES, ""),
        "algorithm.kl_ctrl.kl_coef": KL.value("kl.coef", KL.in_reward, "the penalty is in the loss"),
        "algorithm.kl_penalty": KL.value("kl.estimator", KL.in_reward, "the penalty is in the loss"),
        "algorithm.no_think_rl": off("no such option"),
        "algorithm.state_masking.*": Idle("tokens of the environment are known, not found by markers"),
        f"{ROLLOUT}n": grouped,
        f"{ROLLOUT}n_agent": grouped,
        "trainer.total_epochs": epochs_rule,
        "trainer.total_training_steps": steps_rule,
        "max_turns": turns,
        "do_search": lambda value, keys: (
            Outcome("mapped", {}) if value else Outcome("unsupported", reason="without search, translate veRL's config")
        ),
        "retriever.url": lambda value, keys: Outcome("mapped", {"env.url": str(value), "env.corpus": ""}),
        "retriever.topk": to("env.topk", int),
        "reranker.do_rerank": off("no reranker: the server may rerank what it returns"),
        "reranker.*": Idle("of the reranker"),
        "reward": rewards,
    }
)
LEFT_OUT = (  # keys of later versions of veRL
    *(f"{ACTOR}{name}" for name in ("clip_ratio_", "tau_", "policy_loss", "loss_", "use_token_level_loss")),
    *(
        "algorithm.filter",
        "algorithm.rollout_",
        "algorithm.norm_",
        "algorithm.use_kl_in_reward",
        "custom_reward_function",
    ),
    "critic.loss_",
    "data.seed",
)
DEFAULTS = {key: value for key, value in verl.DEFAULTS.items() if not key.startswith(LEFT_OUT)} | {
    "algorithm.kl_ctrl.kl_coef": 0.001,
    f"{ACTOR}clip_ratio": 0.2,
    f"{ACTOR}entropy_coeff": 0.001,
    f"{ACTOR}optim.lr_warmup_steps": -1,
    f"{ROLLOUT}n_agent": 1,
    f"{ROLLOUT}top_p": 0.95,
    f"{MODEL}enable_gradient_checkpointing": False,
    "data.max_start_length": 256,
    "data.max_obs_length": 512,
    "max_turns": 10,
    "retriever.url": "http://127.0.0.1:8000/retrieve",
    "retriever.topk": 3,
    "reward": "exact match",  # it has no key
}
# Keys that its veRL does not have yet would be settings without an effect there: they are unknown.
RULES = SEARCH_RULES | {
    key: rule for key, rule in verl.RULES.items() if key not in SEARCH_RULES and not key.startswith(LEFT_OUT)
}
SEARCH_R1 = System("Search-R1", "commit 0789f5e", RULES, DEFAULTS, partial(verl.base, search=True))
