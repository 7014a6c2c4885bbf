"""The table of EasyR1's keys. It follows examples/config.yaml of commit 46c6c21, and knows older keys."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.tools.translate import family, images, ours
from jaxrl_llm.tools.translate.family import ENGINE, LOADER, LOGS, MEMORY, MESH
from jaxrl_llm.tools.translate.outcome import (
    Idle,
    Keys,
    Outcome,
    Rule,
    System,
    changed,
    off,
    only_if,
    same_rule,
    to,
    unsupported,
)

ACTOR, MODEL, ROLLOUT = "worker.actor.", "worker.actor.model.", "worker.rollout."
NAMES = family.Names(
    prompts="data.rollout_batch_size",
    update=f"{ACTOR}global_batch_size",
    epochs=f"{ACTOR}ppo_epochs",
    group=(f"{ROLLOUT}n",),
    nodes="trainer.nnodes",
    gpus="trainer.n_gpus_per_node",
    estimator="algorithm.adv_estimator",
    response="data.max_response_length",
    kl_loss="algorithm.use_kl_loss",
)
KL = family.KlKeys(
    in_loss=lambda keys: bool(keys["algorithm.use_kl_loss"]) and not keys["algorithm.disable_kl"],
    # EasyR1 has one coefficient and one estimator; use_kl_loss alone says in which place they are.
    in_reward=lambda keys: not keys["algorithm.use_kl_loss"] and not keys["algorithm.disable_kl"],
    loss_coef="algorithm.kl_coef",
    loss_kind="algorithm.kl_penalty",
    reward_coef="algorithm.kl_coef",
    reward_kind="algorithm.kl_penalty",
    estimator="algorithm.adv_estimator",
)
LOSSES: family.Losses = {
    "default": ("ppo_clip", {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high", "delta": "clip_ratio_dual"}),
    "gspo": ("gspo", {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high"}),
    "gspo_token": ("gspo", {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high"}),
    "cispo": ("cispo", {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high"}),
    "sapo": ("sapo", {"tau_positive": "tau_positive", "tau_negative": "tau_negative"}),
}

RESIZED = "EasyR1 first resizes to any size, and then to whole tokens, so that a side may differ by one token"


def loss(value: Any, keys: Keys) -> Outcome:
    """The policy loss, with all its arguments."""
    outcome = family.loss(LOSSES, ACTOR)(value, keys)
    if outcome.fields.get("loss.name") != "gspo":
        return outcome
    # Both names have the value of one ratio for a completion, and differ in the gradient only.
    level = "token" if value == "gspo_token" else "sequence"
    reason = "there also the bound clip_ratio_dual; gspo has none here"
    return Outcome("changed", outcome.fields | {"loss.level": level}, reason)


def data(section: str, split: str) -> Rule:
    """A file, or a data set of the hub as id@split."""

    def rule(value: Any, keys: Keys) -> Outcome:
        if not value:
            source = f"{section}.source"
            return Outcome("changed", {source: "my_data.rows"}, unknown={source: "a file with rows"})
        name, _, named_split = str(value).partition("@")
        return ours.dataset(section, name, named_split or split)

    return rule


def penalized(keys: Keys) -> bool:
    return not keys["algorithm.disable_kl"]


def filtering(keys: Keys) -> bool:
    return bool(keys["algorithm.online_filtering"])


def online_filtering(value: Any, keys: Keys) -> Outcome:
    """Groups without signal, replaced by others."""
    if not filtering(keys):
        return Outcome("mapped", {"rollout.resample_rounds": 0})
    batches = int(keys["trainer.max_try_make_batch"])
    reason = (
        f"groups whose mean {keys['algorithm.filter_key']} is outside {keys['algorithm.filter_low']} ... "
        f"{keys['algorithm.filter_high']} are left out there; here, groups with one total reward, and "
        "what still has no signal stays"
    )
    # Without a limit there, which a data set without a signal never leaves: ten rounds stand for it.
    return Outcome("changed", {"rollout.resample_rounds": max(batches - 1, 1) if batches > 0 else 10}, reason)


def rewards(value: Any, keys: Keys) -> Outcome:
    """The file and the name of a reward function; EasyR1's own math.py is like ours."""
    if not value:
        why = "EasyR1 needs worker.reward.reward_function, and the file has none"
        unknown = {"reward.functions": why, "eval.function": why}
        return Outcome("changed", ours.reward_fields((ours.ACCURACY,)), unknown=unknown)
    path, _, function = str(value).partition(":")
    return ours.easyr1_reward(path, function or "compute_score")


def around(value: Any, keys: Keys) -> Outcome:
    """A template around the question."""
    return ours.template(str(value)) if value else Outcome("no effect", reason="not in use")


def lora(value: Any, keys: Keys) -> Outcome:
    """An adapter."""
    if not adapted(keys):
        return Outcome("no effect", reason="it is off")
    rank, alpha, targets = (keys[f"{MODEL}lora.{name}"] for name in ("rank", "alpha", "target_modules"))
    excluded = keys.explicit.get(f"{MODEL}lora.exclude_modules")
    return images.beside_tower(ours.lora(rank, alpha, targets), targets, excluded, keys)


def adapted(keys: Keys) -> bool:
    return bool(keys[f"{MODEL}lora.rank"])


def optimizer(section: str, prefix: str) -> dict[str, Rule]:
    """Returns the rules of an optimizer. section: ours; prefix: of its keys."""
    rate, low, kind = (f"{prefix}optim.{name}" for name in ("lr", "min_lr_ratio", "lr_scheduler_type"))
    names = (f"{prefix}optim.lr_warmup_steps", f"{prefix}optim.lr_warmup_ratio")
    steps_rule, ratio_rule = family.warmup(NAMES, section, *names)

    def strategy(value: Any, keys: Keys) -> Outcome:
        if value == "adamw":
            return Outcome("mapped", {})
        reason = (
            f"{value} rounds parameters and moments to bfloat16; parameters are float32 here, the mean of gradients not"
        )
        # The nearest thing: of the three, the mean of gradients alone may be bfloat16 here.
        return Outcome("changed", {f"{section}.momentum_dtype": "bfloat16"}, reason)

    return {
        rate: to(f"{section}.learning_rate", float),
        names[0]: steps_rule,
        names[1]: ratio_rule,
        kind: family.decay(section, rate, low),
        low: family.lowest(kind),
        f"{prefix}optim.weight_decay": family.decays(section),
        f"{prefix}optim.betas": family.betas(section),
        f"{prefix}optim.strategy": strategy,
        f"{prefix}max_grad_norm": to(f"{section}.clip_norm", float),
    }


epochs_rule, steps_rule = family.steps(NAMES, "trainer.total_epochs", "trainer.max_steps")
RULES: dict[str, Rule] = {
    "config": unsupported("this file is not beside the script or above it: its keys have their defaults here"),
    "data.train_files": data("data", "train"),
    "data.val_files": data("eval", "test"),
    "data.prompt_key": lambda value, keys: ours.column("data.prompt_column", value, "prompt"),
    "data.answer_key": lambda value, keys: ours.column("data.answer_column", value, "answer"),
    "data.format_prompt": around,
    "data.format_prompt_path": around,
    "data.override_chat_template": off("the template is the model's: change its tokenizer_config.json"),
    "data.max_prompt_length": to("data.max_prompt_tokens", int),
    "data.max_response_length": to("rollout.max_completion_tokens", int),
    "data.rollout_batch_size": family.prompts(NAMES),
    "data.mini_rollout_batch_size": Idle("rounds of dynamic sampling draw what is missing (rollout.resample_rounds)"),
    "data.val_batch_size": Idle("an evaluation batch is as large as a step's"),
    "data.seed": to("seed", int),
    "data.shuffle": family.shuffle,
    "data.filter_overlong_prompts": lambda value, keys: (
        Outcome("mapped", {"data.overlong": "drop"})
        if value
        else Outcome("changed", {"data.overlong": "drop"}, "False cuts a longer prompt; here it is dropped and counted")
    ),
    "data.filter_overlong_prompts_workers": Idle(LOADER),
    "data.image_key": images.named("data.image_column"),
    "data.image_dir": images.named("data.image_folder"),
    "data.min_pixels": images.pixels("data.min_pixels", RESIZED),
    "data.max_pixels": images.pixels("data.max_pixels", RESIZED),
    **same_rule(images.sound, "video_key video_fps", "data."),
    # Its GRPO always divides by the deviation.
    "algorithm.adv_estimator": family.advantage(NAMES, ""),
    "algorithm.gamma": only_if(
        lambda keys: keys["algorithm.adv_estimator"] in ("gae", "reinforce_plus_plus"),
        to("advantage.gamma", float),
        "the estimator has no gamma",
    ),
    "algorithm.lam": only_if(NAMES.critic, to("advantage.lam", float), "the estimator has no lambda"),
    "algorithm.disable_kl": only_if(lambda keys: not penalized(keys), KL.switch, "there is a penalty"),
    "algorithm.use_kl_loss": KL.switch,
    "algorithm.kl_penalty": KL.value(
        "kl.estimator", lambda keys: not keys["algorithm.disable_kl"], "disable_kl is True"
    ),
    "algorithm.kl_coef": KL.value("kl.coef", penalized, "disable_kl is True"),
    **same_rule(
        KL.adaptive("algorithm.kl_type", "algorithm.kl_target", "algorithm.kl_horizon"),
        "kl_type kl_target kl_horizon",
        "algorithm.",
    ),
    "algorithm.online_filtering": online_filtering,
    **same_rule(
        only_if(
            filtering, lambda value, keys: Outcome("changed", {}, "see online_filtering"), "online_filtering is False"
        ),
        "filter_key filter_low filter_high",
        "algorithm.",
    ),
    "trainer.max_try_make_batch": only_if(filtering, online_filtering, "online_filtering is False"),
    f"{ACTOR}global_batch_size": family.update(NAMES),
    f"{ACTOR}micro_batch_size_per_device_for_update": family.micro(NAMES, per_gpu=True),
    f"{ACTOR}micro_batch_size_per_device_for_experience": Idle(MEMORY),
    f"{ACTOR}ppo_epochs": to("epochs", int),
    f"{ACTOR}loss_type": loss,
    **{
        f"{ACTOR}{key}": family.loss_argument(LOSSES, f"{ACTOR}loss_type", key)
        for key in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_dual", "tau_positive", "tau_negative")
    },
    f"{ACTOR}loss_avg_mode": family.aggregation(NAMES, "", f"{ACTOR}loss_type"),
    **optimizer("optim", ACTOR),
    f"{ACTOR}fsdp.torch_dtype": off("parameters are float32 here; model.dtype is of activations", "fp32", "float32"),
    f"{ACTOR}fsdp.mp_param_dtype": changed(
        "model.dtype",
        "of activations; parameters and the optimizer are float32 there and here",
        lambda value: "bfloat16" if value in ("bf16", "bfloat16", "fp16") else "float32",
    ),
    f"{ACTOR}fsdp.*": Idle(MESH),
    f"{ACTOR}offload.*": Idle(MEMORY),
    f"{MODEL}model_path": lambda value, keys: (
        family.model(value, keys)
        if value
        else Outcome("changed", {"model.path": "my_model"}, unknown={"model.path": "a folder or a hub id"})
    ),
    f"{MODEL}tokenizer_path": off("the tokenizer is the model's"),
    f"{MODEL}enable_gradient_checkpointing": family.checkpointing,
    f"{MODEL}trust_remote_code": Idle("no code of a model's folder is run"),
    **same_rule(images.tower(adapted), f"{MODEL}freeze_vision_tower {ACTOR}freeze_vision_tower"),
    f"{MODEL}override_config": off("the model is as its config.json says: change that", {}),
    f"{MODEL}override_config.*": unsupported("the model is as its config.json says: change that"),
    f"{MODEL}lora.exclude_modules": only_if(adapted, images.excludes, "it is off"),
    f"{MODEL}lora.*": lora,
    **same_rule(
        Idle(MEMORY),
        """strategy padding_free dynamic_batching ulysses_size ulysses_sequence_parallel_size use_torch_compile
        use_dynamic_batching""",
        ACTOR,
    ),
    f"{ROLLOUT}n": to("group_size", int),
    f"{ROLLOUT}temperature": to("rollout.temperature", float),
    f"{ROLLOUT}top_p": family.top_p,
    f"{ROLLOUT}top_k": family.top_k,
    f"{ROLLOUT}seed": Idle("config.seed decides"),
    f"{ROLLOUT}ignore_eos": off("a completion ends at a stop token"),
    f"{ROLLOUT}limit_images": images.limit,
    f"{ROLLOUT}val_override_config*": unsupported(
        "an evaluation is one greedy completion for each problem here (jaxrl evaluate samples several)"
    ),
    **same_rule(
        Idle(ENGINE),
        """name dtype gpu_memory_utilization enforce_eager enable_chunked_prefill tensor_parallel_size max_model_len
        max_num_batched_tokens disable_log_stats disable_tqdm prompt_length response_length trust_remote_code""",
        ROLLOUT,
    ),
    "worker.ref.*": Idle("of the reference, which is placed and batched like the policy"),
    "worker.reward.reward_function": rewards,
    "worker.reward.score_function": rewards,
    "worker.reward.reward_type": Idle("a function gets the whole batch"),
    "worker.reward.compute_score": off("name a function: reward.functions"),
    "worker.reward.reward_function_kwargs": off("give the function its arguments in its own module", {}),
    "worker.reward.reward_function_kwargs.*": unsupported(
        "give the function its arguments in its own module (reward.overlong_tokens is the penalty of DAPO)"
    ),
    **same_rule(Idle("how rewards are computed"), "num_cpus skip_special_tokens", "worker.reward."),
    **{
        key: only_if(NAMES.critic, rule, "there is no critic: adv_estimator is not gae")
        for key, rule in {
            **optimizer("critic.optim", "worker.critic."),
            "worker.critic.model.model_path": lambda value, keys: Outcome(
                "mapped", {"critic.path": "" if value in (None, keys[f"{MODEL}model_path"]) else value}
            ),
            "worker.critic.cliprange_value": to("critic.clip", float),
            "worker.critic.global_batch_size": family.shared_with_policy(NAMES.update, "mini-batch"),
            "worker.critic.ppo_epochs": family.shared_with_policy(NAMES.epochs, "epochs"),
            "worker.critic.loss_avg_mode": family.shared_with_policy(f"{ACTOR}loss_avg_mode", "aggregation"),
        }.items()
    },
    **same_rule(
        Idle(MEMORY),
        """strategy micro_batch_size_per_device_for_update micro_batch_size_per_device_for_experience padding_free
        dynamic_batching ulysses_size ulysses_sequence_parallel_size model.* fsdp.* offload.*""",
        "worker.critic.",
    ),
    "worker.hybrid_engine": Idle(ENGINE),
    "trainer.total_epochs": epochs_rule,
    "trainer.total_episodes": epochs_rule,
    "trainer.max_steps": steps_rule,
    "trainer.critic_warmup": only_if(NAMES.critic, to("critic.warmup_steps", int), "there is no critic"),
    "trainer.val_freq": family.evaluates("data.val_files"),
    "trainer.val_before_train": Idle("a run begins with an evaluation"),
    "trainer.val_only": off("jaxrl evaluate"),
    "trainer.save_freq": family.saves,
    "trainer.save_limit": family.keeps,
    "trainer.save_model_only": off("a checkpoint holds all that a run resumes from"),
    "trainer.load_checkpoint_path": off("the same --workdir resumes a run"),
    "trainer.find_last_checkpoint": Idle("the same --workdir resumes a run"),
    "trainer.nnodes": Idle("all devices that a run finds"),
    "trainer.n_gpus_per_node": Idle("all devices that a run finds"),
    **{
        f"trainer.{key}": Idle(LOGS)
        for key in (
            "project_name",
            "experiment_name",
            "logger",
            "val_generations_to_log",
            "val_generations_to_log_to_wandb",
            "save_checkpoint_path",
            "ray_timeline",
        )
    },
}
ADAM_DEFAULTS = {
    "lr": 1e-6,
    "lr_warmup_steps": None,
    "lr_warmup_ratio": 0.0,
    "lr_scheduler_type": "constant",
    "min_lr_ratio": None,
    "weight_decay": 0.01,
    "betas": [0.9, 0.999],
}
DEFAULTS: dict[str, Any] = {
    "data.train_files": "",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.rollout_batch_size": 512,
    "data.seed": 1,
    "data.min_pixels": 512 * 512,
    "data.max_pixels": 2048 * 2048,
    "algorithm.adv_estimator": "grpo",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.disable_kl": False,
    "algorithm.use_kl_loss": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_coef": 1e-3,
    "algorithm.kl_type": "fixed",
    "algorithm.kl_target": 0.0,
    "algorithm.kl_horizon": 10_000,
    "algorithm.online_filtering": False,
    "algorithm.filter_key": "overall",
    "algorithm.filter_low": 0.01,
    "algorithm.filter_high": 0.99,
    "trainer.max_try_make_batch": 20,
    f"{ACTOR}global_batch_size": 256,
    f"{ACTOR}ppo_epochs": 1,
    f"{ACTOR}micro_batch_size_per_device_for_update": 4,
    f"{ACTOR}loss_type": "default",
    f"{ACTOR}clip_ratio_low": 0.2,
    f"{ACTOR}clip_ratio_high": 0.3,
    f"{ACTOR}clip_ratio_dual": 3.0,
    f"{ACTOR}tau_positive": 1.0,
    f"{ACTOR}tau_negative": 1.05,
    f"{ACTOR}loss_avg_mode": "token",
    f"{ACTOR}max_grad_norm": 1.0,
    f"{ACTOR}fsdp.mp_param_dtype": "bf16",
    f"{MODEL}model_path": "",
    f"{MODEL}enable_gradient_checkpointing": True,
    f"{MODEL}freeze_vision_tower": False,
    f"{MODEL}lora.rank": 0,
    f"{MODEL}lora.alpha": 64,
    f"{MODEL}lora.target_modules": "all-linear",
    f"{ROLLOUT}n": 1,
    f"{ROLLOUT}temperature": 1.0,
    f"{ROLLOUT}top_p": 1.0,
    f"{ROLLOUT}top_k": -1,
    "worker.reward.reward_function": "",
    "worker.critic.model.model_path": None,
    "worker.critic.cliprange_value": 0.5,
    "worker.critic.max_grad_norm": 1.0,
    "trainer.total_epochs": 10,
    "trainer.max_steps": None,
    "trainer.critic_warmup": 0,
    "trainer.val_freq": -1,
    "trainer.save_freq": -1,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
}
DEFAULTS |= {
    f"{prefix}optim.{key}": value for prefix in (ACTOR, "worker.critic.") for key, value in ADAM_DEFAULTS.items()
}
EASYR1 = System("EasyR1", "commit 46c6c21", RULES, DEFAULTS, lambda keys: "ppo" if NAMES.critic(keys) else "grpo")
