"""The table of veRL's keys. It follows veRL 0.9.1, and knows those of 0.3 and 0.5 and of the recipe of DAPO."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxrl_llm.tools.translate import family, images, ours
from jaxrl_llm.tools.translate.family import ENGINE, LOADER, LOGS, MEMORY, MESH, PROFILE
from jaxrl_llm.tools.translate.outcome import (
    Idle,
    Keys,
    Outcome,
    Rule,
    System,
    changed,
    idle_for,
    off,
    only_if,
    same_rule,
    to,
    unsupported,
)

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
NAMES = family.Names(
    prompts="data.train_batch_size",
    update=f"{ACTOR}ppo_mini_batch_size",
    epochs=f"{ACTOR}ppo_epochs",
    group=(f"{ROLLOUT}n",),
    nodes="trainer.nnodes",
    gpus="trainer.n_gpus_per_node",
    estimator="algorithm.adv_estimator",
    response="data.max_response_length",
    kl_loss=f"{ACTOR}use_kl_loss",
)
KL = family.KlKeys(
    in_loss=lambda keys: bool(keys[f"{ACTOR}use_kl_loss"]),
    in_reward=lambda keys: bool(keys["algorithm.use_kl_in_reward"]),
    loss_coef=f"{ACTOR}kl_loss_coef",
    loss_kind=f"{ACTOR}kl_loss_type",
    reward_coef="algorithm.kl_ctrl.kl_coef",
    reward_kind="algorithm.kl_penalty",
    estimator="algorithm.adv_estimator",
)
FILTERED = "data.filter_overlong_prompts"
UNREAD_FREEZE = "nothing in veRL 0.9.1 reads it, so that its tower learns: for the same run set 'learns'"
MODE = f"{ACTOR}policy_loss.loss_mode"
LOSSES: family.Losses = {
    "vanilla": ("ppo_clip", {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high", "delta": "clip_ratio_c"}),
    "gspo": ("gspo", {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high"}),
    "cispo": ("cispo", {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high"}),
    "geo_mean": ("gmpo", {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high"}),
    "sapo": ("sapo", {"tau_positive": "tau_pos", "tau_negative": "tau_neg"}),
}


def old_clip(value: Any, keys: Keys) -> Outcome:
    """clip_ratio, which the keys of the two sides have replaced."""
    sides = [f"{ACTOR}clip_ratio_low", f"{ACTOR}clip_ratio_high"]
    # Its default changes nothing, and where both sides are given veRL does not read it.
    if value == 0.2 or all(side in keys for side in sides):
        return Outcome("no effect", reason="clip_ratio_low and clip_ratio_high are read")
    reason = "veRL reads clip_ratio_low and clip_ratio_high, 0.2 by default; before 0.4 it read this key"
    return Outcome("changed", {}, reason)


def grouped(value: Any, keys: Keys) -> Outcome:
    """Completions of a prompt."""
    return Outcome("mapped", {"group_size": int(value)})


def dynamic_sampling(value: Any, keys: Keys) -> Outcome:
    """Groups without signal, replaced by others."""
    if not value:
        return Outcome("mapped", {"rollout.resample_rounds": 0})
    batches = int(keys["algorithm.filter_groups.max_num_gen_batches"] or 0)
    reason = (
        f"at most {batches or 'any number of'} batches there; here, after the first, each round samples only as many "
        "prompts as groups are missing, and what still has no signal stays"
    )
    # 0 has no limit there, which a data set without a signal never leaves: ten rounds stand for it.
    return Outcome("changed", {"rollout.resample_rounds": max(batches - 1, 1) if batches else 10}, reason)


def filtering(keys: Keys) -> bool:
    return bool(keys["algorithm.filter_groups.enable"])


def overlong(section: str) -> dict[str, Rule]:
    """Returns the rules of DAPO's soft penalty for long completions, in a section of its recipe's versions."""
    enable, length, factor = (f"{section}.{name}" for name in ("enable", "len", "penalty_factor"))

    def tokens(value: Any, keys: Keys) -> Outcome:
        on = keys.explicit.get(enable, False) and length in keys
        return Outcome("mapped", {"reward.overlong_tokens": int(keys[length]) if on else 0})

    def scale(value: Any, keys: Keys) -> Outcome:
        reason = f"the penalty is 1 at the limit here, {value} there"
        return (
            Outcome("mapped", {})
            if value == 1 or not keys.explicit.get(enable)
            else Outcome("unsupported", reason=reason)
        )

    # Both keys make one field: whichever is in the file sets it.
    return {enable: tokens, length: tokens, factor: scale, f"{section}.*": Idle("it logs only")}


def template_arguments(value: Any, keys: Keys) -> Outcome:
    """One argument of the chat template: the field holds them all."""
    prefix = "data.apply_chat_template_kwargs."
    # Hydra sets them one by one; a field that each key sets would keep only the last.
    arguments = {name.removeprefix(prefix): x for name, x in keys.explicit.items() if name.startswith(prefix)}
    return Outcome("mapped", {"data.chat_template_args": arguments})


def rewards(value: Any, keys: Keys) -> Outcome:
    """The reward function in a file, or veRL's own by the column data_source."""
    if value:
        name = keys.explicit.get("custom_reward_function.name") or keys.explicit.get(
            "reward.custom_reward_function.name"
        )
        return ours.custom_reward(str(value), str(name or "compute_score"))
    return ours.by_data_source(keys["data.train_files"])


def reward_model(value: Any, keys: Keys) -> Outcome:
    """A learned reward."""
    if not value:
        return Outcome("no effect", reason="it is off")
    path = keys.explicit.get("reward_model.model.path") or keys.explicit.get("reward.reward_model.model_path")
    if not path:
        return Outcome("unsupported", reason="the file names no folder of the reward model: set reward_model.path")
    reason = "its score is added to the rewards of reward.functions; veRL takes it alone: set them to ()"
    return ours.reward_model(str(path), reason)


def reward_coef(value: Any, keys: Keys) -> Outcome:
    """The coefficient of a KL penalty in the reward."""
    if not KL.in_reward(keys) and not KL.in_loss(keys) and value and "algorithm.use_kl_in_reward" not in keys:
        reason = "veRL needs use_kl_in_reward for it since 0.4; until 0.3 this file had the penalty in the reward"
        return Outcome("changed", {}, reason)
    return KL.value("kl.coef", KL.in_reward, "use_kl_in_reward is False")(value, keys)


def correction(value: Any, keys: Keys) -> Outcome:
    """Importance weights between engine and trainer."""
    if not value:
        return Outcome("no effect", reason="not set")
    if value not in ("token", "sequence"):
        return Outcome("unsupported", reason=f"there is no level {value!r}: token and sequence")
    # veRL truncates the weights at it, and masks none.
    high = float(keys["algorithm.rollout_correction.rollout_is_threshold"])
    return Outcome("mapped", {"importance.level": value, "importance.action": "truncate", "importance.high": high})


def critic_path(value: Any, keys: Keys) -> Outcome:
    """The model that the critic begins with."""
    # veRL's own default for the critic is a model of its example; a file that says nothing of it means the policy's.
    same = value == keys[f"{MODEL}path"] or "critic.model.path" not in keys
    return Outcome("mapped", {"critic.path": "" if same else str(value)})


def lora(value: Any, keys: Keys) -> Outcome:
    """An adapter."""
    if not adapted(keys):
        return Outcome("no effect", reason="lora_rank is 0")
    rank, alpha, targets = (keys[f"{MODEL}{name}"] for name in ("lora_rank", "lora_alpha", "target_modules"))
    outcome = ours.lora(rank, alpha, targets)
    return images.beside_tower(outcome, targets, keys.explicit.get(f"{MODEL}exclude_modules"), keys)


def adapted(keys: Keys) -> bool:
    return bool(keys[f"{MODEL}lora_rank"])


def validation(value: Any, keys: Keys) -> Outcome:
    """Sampling of evaluations."""
    val = f"{ROLLOUT}val_kwargs."
    # do_sample is False by default there, and temperature 0 is greedy too.
    greedy = not keys.explicit.get(f"{val}do_sample", False) or keys.explicit.get(f"{val}temperature", 0) == 0
    if greedy and keys.explicit.get(f"{val}n", 1) == 1:
        return Outcome("no effect", reason="evaluations are greedy there and here")
    reason = "an evaluation is one greedy completion for each problem here (jaxrl evaluate samples several)"
    return Outcome("unsupported", reason=reason)


def critic_rules(rules: dict[str, Rule], estimator: str) -> dict[str, Rule]:
    """Makes rules of the critic apply only if there is one."""
    return {
        key: only_if(NAMES.critic, rule, f"there is no critic: {estimator} is not gae") for key, rule in rules.items()
    }


def optimizer(section: str, prefix: str, family_names: family.Names = NAMES) -> dict[str, Rule]:
    """Returns the rules of an optimizer. section: ours; prefix: of its keys."""
    rate, low, kind = f"{prefix}optim.lr", f"{prefix}optim.min_lr_ratio", f"{prefix}optim.lr_scheduler_type"
    names = (f"{prefix}optim.lr_warmup_steps", f"{prefix}optim.lr_warmup_steps_ratio")
    steps_rule, ratio_rule = family.warmup(family_names, section, *names)
    schedule = family.decay(section, rate, low)

    def old_schedule(value: Any, keys: Keys) -> Outcome:
        return schedule(value, keys) if value else Outcome("no effect", reason="not set")

    return {
        rate: to(f"{section}.learning_rate", float),
        names[0]: steps_rule,
        names[1]: ratio_rule,
        kind: only_if(
            lambda keys: not keys.explicit.get(f"{prefix}optim.warmup_style"), schedule, "warmup_style is set"
        ),
        f"{prefix}optim.warmup_style": old_schedule,
        low: only_if(
            lambda keys: "cosine" in (keys[kind], keys.explicit.get(f"{prefix}optim.warmup_style")),
            lambda value, keys: Outcome("mapped", {f"{section}.end": float(keys[rate]) * float(value or 0)}),
            "the rate is constant",
        ),
        f"{prefix}optim.weight_decay": family.decays(section),
        f"{prefix}optim.betas": family.betas(section),
        f"{prefix}grad_clip": to(f"{section}.clip_norm", float),
        f"{prefix}optim.clip_grad": only_if(
            lambda keys: f"{prefix}grad_clip" not in keys, to(f"{section}.clip_norm", float), "grad_clip is set"
        ),
        f"{prefix}optim.optimizer": off("AdamW is the one optimizer here", "AdamW", "adam"),
        f"{prefix}optim.optimizer_impl": Idle("another implementation of AdamW"),
        f"{prefix}optim.total_training_steps": Idle("veRL sets it"),
        f"{prefix}optim.num_cycles": off("a cosine has half a cycle", 0.5),
        f"{prefix}optim.zero_indexed_step": Idle("the first step of a warm-up has a rate above 0 here"),
        f"{prefix}optim.override_optimizer_config": off("AdamW has the fields of config.optim", {}),
    }


epochs_rule, steps_rule = family.steps(NAMES, "trainer.total_epochs", "trainer.total_training_steps")
MICRO = family.micro(NAMES, per_gpu=True)
DATA_RULES: dict[str, Rule] = {
    "data.train_files": family.files("data", ours.PARQUET),
    "data.val_files": family.files("eval", ours.PARQUET),
    "data.train_batch_size": family.prompts(NAMES),
    "data.max_prompt_length": to("data.max_prompt_tokens", int),
    "data.max_response_length": to("rollout.max_completion_tokens", int),
    "data.truncation": family.drops("{value} cuts a longer prompt; here it is dropped and counted", FILTERED),
    FILTERED: lambda value, keys: (
        Outcome("mapped", {"data.overlong": "drop"})
        if value
        else Outcome("no effect", reason="data.truncation says what becomes of a longer prompt")
    ),
    "data.prompt_key": lambda value, keys: ours.column("data.prompt_column", value, "prompt"),
    "data.seed": only_if(lambda keys: keys["data.seed"] is not None, to("seed", int), "not set: config.seed is 0"),
    "data.shuffle": family.shuffle,
    "data.gen_batch_size": Idle("rounds of dynamic sampling draw what is missing (rollout.resample_rounds)"),
    "data.val_batch_size": Idle("an evaluation batch is as large as a step's"),
    "data.val_max_samples": only_if(
        lambda keys: keys.explicit.get("data.val_max_samples", -1) > 0, to("eval.problems", int), "all of them"
    ),
    "data.train_max_samples": off("take fewer rows with data.convert", -1),
    "data.apply_chat_template_kwargs": to("data.chat_template_args", dict),
    "data.apply_chat_template_kwargs.*": template_arguments,
    "data.reward_fn_key": Idle("the config names the reward functions"),
    "data.tokenizer": off("the tokenizer is the model's"),
    "data.trust_remote_code": Idle("no code of a model's folder is run"),
    "data.custom_cls.*": off(
        "a class that loads data: write data.convert, or a function that returns rows", "RLHFDataset"
    ),
    "data.sampler.*": off("rows are shuffled by seed"),
    "data.datagen.*": off("data is not made during a run"),
    "data.image_key": images.named("data.image_column"),
    "data.image_patch_size": images.patch_size,
    "data.mm_processor_kwargs": images.with_pictures(lambda value, keys: images.processor(value or {})),
    **images.processor_rules("data.mm_processor_kwargs."),
    **same_rule(images.sound, "video_key audio_key", "data."),
    **same_rule(
        Idle("columns for veRL's own functions"),
        "return_raw_input_ids return_raw_chat return_full_prompt return_multi_modal_inputs",
        "data.",
    ),
    "data.function_tool_path": off("tools: write an environment (docs/environments.md)"),
    "data.tool_config_path": off("tools: write an environment (docs/environments.md)"),
    **same_rule(
        Idle(LOADER),
        "dataloader_num_workers filter_overlong_prompts_workers use_shm validation_shuffle cache_dir",
        "data.",
    ),
}
ALGORITHM_RULES: dict[str, Rule] = {
    "algorithm.adv_estimator": family.advantage(NAMES, "algorithm.norm_adv_by_std_in_grpo"),
    "algorithm.gamma": only_if(
        lambda keys: keys["algorithm.adv_estimator"] in ("gae", "reinforce_plus_plus"),
        to("advantage.gamma", float),
        "the estimator has no gamma",
    ),
    "algorithm.lam": only_if(NAMES.critic, to("advantage.lam", float), "the estimator has no lambda"),
    "algorithm.norm_adv_by_std_in_grpo": only_if(
        lambda keys: str(keys["algorithm.adv_estimator"]).startswith("grpo"),
        to("advantage.normalize", lambda value: "group" if value else "none"),
        "the estimator is not grpo",
    ),
    "algorithm.use_kl_in_reward": KL.in_reward_too,
    "algorithm.kl_penalty": KL.value("kl.estimator", KL.in_reward, "use_kl_in_reward is False"),
    "algorithm.kl_ctrl.kl_coef": reward_coef,
    **same_rule(
        KL.adaptive("algorithm.kl_ctrl.type", "algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon"),
        "type target_kl horizon",
        "algorithm.kl_ctrl.",
    ),
    "algorithm.filter_groups.enable": dynamic_sampling,
    "algorithm.filter_groups.max_num_gen_batches": only_if(filtering, dynamic_sampling, "filter_groups is off"),
    "algorithm.filter_groups.metric": only_if(
        filtering,
        lambda value, keys: Outcome("changed", {}, "groups are compared by their total reward"),
        "filter_groups is off",
    ),
    "algorithm.filter_groups.max_inflight_gen_batches": Idle("how many batches are sampled at once"),
    "algorithm.rollout_correction.rollout_is": correction,
    "algorithm.rollout_correction.rollout_is_threshold": only_if(
        lambda keys: bool(keys["algorithm.rollout_correction.rollout_is"]), to("importance.high", float), "it is off"
    ),
    **same_rule(
        off("no counterpart; see mask.off_policy and importance", "ppo_clip"),
        "rollout_rs rollout_rs_threshold bypass_mode loss_type rollout_is_batch_normalize",
        "algorithm.rollout_correction.",
    ),
    "algorithm.use_pf_ppo": off("samples are not drawn again by their reward"),
    "algorithm.pf_ppo.*": Idle("use_pf_ppo is False"),
}
ACTOR_RULES: dict[str, Rule] = optimizer("optim", ACTOR) | {
    f"{ACTOR}ppo_mini_batch_size": family.update(NAMES),
    f"{ACTOR}ppo_epochs": to("epochs", int),
    f"{ACTOR}ppo_micro_batch_size_per_gpu": MICRO,
    f"{ACTOR}ppo_micro_batch_size": family.micro(NAMES, per_gpu=False),
    MODE: family.loss(LOSSES, ACTOR),
    f"{ACTOR}clip_ratio": old_clip,
    **{
        f"{ACTOR}{key}": family.loss_argument(LOSSES, MODE, key)
        for key in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")
    },
    **same_rule(
        Idle("of a loss that is not selected"),
        "clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef dro_beta",
        f"{ACTOR}policy_loss.",
    ),
    f"{ACTOR}loss_agg_mode": family.aggregation(NAMES, f"{ACTOR}loss_scale_factor", MODE),
    f"{ACTOR}loss_scale_factor": only_if(
        lambda keys: (
            keys[f"{ACTOR}loss_agg_mode"] == "seq-mean-token-sum-norm"
            and keys[MODE] not in ("gspo", "geo_mean", "sapo")
        ),
        lambda value, keys: Outcome(
            "mapped", {"aggregate.constant_length": int(value or keys["data.max_response_length"])}
        ),
        "loss_agg_mode does not divide by a length",
    ),
    f"{ACTOR}use_token_level_loss": lambda value, keys: Outcome(
        "mapped", {"aggregate.mode": "token_mean" if value else "sequence_mean", "aggregate.constant_length": 0}
    ),
    f"{ACTOR}entropy_coeff": ours.entropy_bonus,
    f"{ACTOR}use_kl_loss": KL.switch,
    f"{ACTOR}kl_loss_coef": KL.value("kl.coef", KL.in_loss, "use_kl_loss is False"),
    f"{ACTOR}kl_loss_type": KL.value("kl.estimator", KL.in_loss, "use_kl_loss is False"),
    f"{ACTOR}shuffle": Idle("which prompts share an optimizer step is random by the seed"),
    f"{ACTOR}data_loader_seed": Idle("config.seed decides"),
    **same_rule(Idle("it logs only"), "calculate_entropy calculate_sum_pi_squared", ACTOR),
    f"{ACTOR}freeze_vision_tower": images.tower(adapted, UNREAD_FREEZE),
    f"{ROLLOUT}limit_images": images.limit,
    f"{ROLLOUT}engine_kwargs.*.limit_mm_per_prompt*": images.limit,
    f"{ROLLOUT}engine_kwargs.*.mm_processor_kwargs*": images.engine_pixels,
    f"{ACTOR}checkpoint.*": Idle("a checkpoint holds all that a run resumes from"),
    f"{ACTOR}qat.enable": off("no quantization-aware training"),
    f"{ACTOR}qat.*": Idle("qat.enable is False"),
    f"{ACTOR}*fsdp_config.*": Idle(MESH),
    f"{ACTOR}megatron.*": Idle(MESH),
    f"{ACTOR}strategy": Idle(MESH),
    f"{ACTOR}profile*": Idle(PROFILE),
}
BFLOAT16 = ("bfloat16", "bf16", "float16", "fp16")
ROLLOUT_RULES: dict[str, Rule] = {
    f"{ROLLOUT}n": grouped,
    f"{ROLLOUT}temperature": to("rollout.temperature", float),
    f"{ROLLOUT}top_k": family.top_k,
    f"{ROLLOUT}top_p": family.top_p,
    f"{ROLLOUT}do_sample": lambda value, keys: (
        Outcome("no effect", reason="rollouts are sampled")
        if value
        else Outcome("unsupported", reason="rollouts are sampled")
    ),
    f"{ROLLOUT}use_fire_sampling": off("the first token is sampled at rollout.temperature too"),
    f"{ROLLOUT}val_kwargs.*": validation,
    f"{ROLLOUT}multi_turn.enable": off("tools: write an environment (docs/environments.md)"),
    f"{ROLLOUT}multi_turn.*": Idle("of episodes with tools"),
    f"{ROLLOUT}agent.agent_loop_config_path": off("an agent loop: write an environment (docs/environments.md)"),
    f"{ROLLOUT}ignore_eos": off("a completion ends at a stop token"),
    f"{ROLLOUT}prompt_length": Idle("veRL sets it from data.max_prompt_length"),
    f"{ROLLOUT}response_length": Idle("veRL sets it from data.max_response_length"),
    f"{ROLLOUT}seed": Idle("config.seed decides"),
    **same_rule(
        Idle(MEMORY),
        """log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz
        log_prob_max_token_len_per_gpu""",
        ROLLOUT,
    ),
    f"{ROLLOUT}enable_rollout_routing_replay": off("experts are not chosen again as they were in sampling"),
    f"{ROLLOUT}quantization": off("the sampler has the trainer's weights"),
    f"{ROLLOUT}over_sample_rate": off("no more completions are sampled than are used", 0, 0.0),
    **same_rule(
        Idle(ENGINE),
        """name mode gpu_memory_utilization enforce_eager free_cache_engine load_format layered_summon
        tensor_model_parallel_size data_parallel_size expert_parallel_size pipeline_model_parallel_size
        max_num_batched_tokens max_model_len max_num_seqs disable_log_stats enable_chunked_prefill
        enable_prefix_caching cudagraph_capture_sizes full_determinism logprobs_mode multi_stage_wake_up
        calculate_log_probs scheduling_policy skip_tokenizer_init update_weights_bucket_megabytes
        router_config_path quantization_config_file n_gpus_per_node nnodes mtp qat
        moe_load_balance_metrics_interval swap_space""",
        ROLLOUT,
    ),
    **same_rule(
        Idle(ENGINE),
        "engine_kwargs.* agent.* checkpoint_engine.* disaggregation.* prometheus.* trace.* engine_kwargs",
        ROLLOUT,
    ),
    f"{MODEL}path": family.model,
    f"{MODEL}enable_gradient_checkpointing": family.checkpointing,
    f"{MODEL}lora_rank": lora,
    f"{MODEL}lora_alpha": lora,
    f"{MODEL}target_modules": lora,
    f"{MODEL}exclude_modules": only_if(adapted, images.excludes, "lora_rank is 0"),
    f"{MODEL}lora_adapter_path": off("no adapter is loaded"),
    f"{MODEL}lora.*": Idle("of Megatron's adapters; lora_rank decides"),
    f"{MODEL}override_config.*dropout*": off("models have no dropout here", 0, 0.0),
    f"{MODEL}override_config.*drop": off("models have no dropout here", 0, 0.0),
    f"{MODEL}override_config": off("the model is as its config.json says: change that", {}),
    f"{MODEL}override_config.*": unsupported("the model is as its config.json says: change that"),
    f"{MODEL}custom_chat_template": off("the template is the model's: change its tokenizer_config.json"),
    f"{MODEL}external_lib": off("no code of a model's folder is run"),
    f"{MODEL}trust_remote_code": Idle("no code of a model's folder is run"),
    f"{MODEL}*tokenizer_path": off("the tokenizer is the model's"),
    f"{MODEL}hf_config_path": off("the config is the model's"),
    f"{MODEL}mtp.enable*": off("no multi-token prediction"),
    **same_rule(
        Idle(MEMORY),
        """use_remove_padding enable_activation_offload use_shm use_liger use_fused_kernels
        fused_kernel_options.* tiled_mlp.*""",
        MODEL,
    ),
    f"{MODEL}mtp.*": Idle("mtp.enable is False"),
    "actor_rollout_ref.hybrid_engine": Idle(ENGINE),
    "actor_rollout_ref.nccl_timeout": Idle(MESH),
    "actor_rollout_ref.ref.model.path": off("the reference is the model that the run begins with"),
    "actor_rollout_ref.ref.*": Idle("of the reference, which is placed and batched like the policy"),
}
CRITIC_RULES: dict[str, Rule] = critic_rules(
    optimizer("critic.optim", "critic.")
    | {
        "critic.model.path": critic_path,
        "critic.cliprange_value": to("critic.clip", float),
        # One loop updates both here, with the same batches.
        "critic.ppo_mini_batch_size": family.shared_with_policy(NAMES.update, "mini-batch"),
        "critic.ppo_epochs": family.shared_with_policy(NAMES.epochs, "epochs"),
        "critic.loss_agg_mode": family.shared_with_policy(f"{ACTOR}loss_agg_mode", "aggregation"),
    },
    NAMES.estimator,
) | {
    "critic.enable": Idle("the estimator decides"),
    **same_rule(
        Idle(MEMORY),
        """strategy ppo_micro_batch_size ppo_micro_batch_size_per_gpu forward_micro_batch_size rollout_n
        use_dynamic_bsz forward_micro_batch_size_per_gpu ppo_max_token_len_per_gpu
        forward_max_token_len_per_gpu fsdp.* megatron.* ulysses_sequence_parallel_size profiler.* checkpoint.*
        model.*""",
        "critic.",
    ),
    **same_rule(Idle("the critic is batched like the policy"), "shuffle data_loader_seed loss_scale_factor", "critic."),
}
REWARD_RULES: dict[str, Rule] = {
    "custom_reward_function.path": rewards,
    "custom_reward_function.name": Idle("with custom_reward_function.path"),
    # The same buffer has moved with the versions of veRL and of DAPO's recipe.
    **overlong("reward_model.overlong_buffer"),
    **overlong("custom_reward_function.overlong_buffer"),
    **overlong("reward_model.reward_kwargs.overlong_buffer"),
    **overlong("reward_model.reward_kwargs.overlong_buffer_cfg"),
    **overlong("reward.reward_kwargs.overlong_buffer"),
    **overlong("reward.reward_kwargs.overlong_buffer_cfg"),
    **same_rule(
        Idle("rollout.max_completion_tokens is the limit"),
        "reward_model.reward_kwargs.max_resp_len reward.reward_kwargs.max_resp_len",
    ),
    "custom_reward_function.reward_kwargs.*": unsupported("give the function its arguments in its own module"),
    "reward.custom_reward_function.path": only_if(
        lambda keys: bool(keys.explicit.get("reward.custom_reward_function.path")), rewards, "not set"
    ),
    "reward.custom_reward_function.*": Idle("with its path"),
    "reward_model.enable": reward_model,
    "reward.reward_model.enable": reward_model,
    "reward_model.reward_manager": idle_for(
        ("naive", "batch", "dapo", "prime"),
        "the config names the reward functions",
        "this reward manager decides what is rewarded",
        "reward.functions",
        "eval.function",
    ),
    **same_rule(
        Idle("of a reward model, or how rewards are computed"),
        """strategy micro_batch_size micro_batch_size_per_gpu max_length use_dynamic_bsz
        forward_max_token_len_per_gpu ulysses_sequence_parallel_size enable_resource_pool n_gpus_per_node
        nnodes num_workers launch_reward_fn_async reward_loop_source reward_loop_module_path
        reward_loop_class_name model.* rollout.* sandbox_fusion.* profiler.*""",
        "reward_model.",
    ),
    **same_rule(
        Idle("of a reward model, or how rewards are computed"),
        "num_workers reward_manager.* reward_model.* sandbox_fusion.*",
        "reward.",
    ),
    "sandbox_fusion.*": off("no such service"),
}
TRAINER_RULES: dict[str, Rule] = {
    "trainer.total_epochs": epochs_rule,
    "trainer.total_training_steps": steps_rule,
    "trainer.save_freq": family.saves,
    "trainer.test_freq": family.evaluates("data.val_files"),
    "trainer.val_before_train": lambda value, keys: (
        Outcome("no effect", reason="a run begins with an evaluation")
        if value
        else Outcome("changed", {}, "a run begins with an evaluation in any case")
    ),
    "trainer.val_only": off("jaxrl evaluate"),
    "trainer.critic_warmup": only_if(NAMES.critic, to("critic.warmup_steps", int), "there is no critic"),
    "trainer.max_actor_ckpt_to_keep": only_if(
        lambda keys: bool(keys.explicit.get("trainer.max_actor_ckpt_to_keep")), family.keeps, "checkpoint.keep decides"
    ),
    "trainer.max_critic_ckpt_to_keep": Idle("a checkpoint holds policy and critic"),
    "trainer.nnodes": Idle("all devices that a run finds"),
    "trainer.n_gpus_per_node": Idle("all devices that a run finds"),
    "trainer.resume_mode": Idle("the same --workdir resumes a run"),
    "trainer.resume_from_path": off("the same --workdir resumes a run; of a run of veRL, give its model as model.path"),
    "trainer.v1.trainer_mode": off("sampling ahead of learning: rollout.max_lag", "sync"),
    "trainer.balance_batch": Idle(MEMORY),
    **same_rule(
        Idle(LOGS),
        """project_name experiment_name logger log_val_generations val_generations_to_log_to_wandb
        rollout_data_dir validation_data_dir default_hdfs_dir default_local_dir del_local_ckpt_after_load
        checkpoint_callback_class remove_previous_ckpt_in_save esi_redundant_time""",
        "trainer.",
    ),
    **same_rule(
        Idle("how veRL starts its processes"),
        """device ray_wait_register_center_timeout use_legacy_worker_impl use_v1 v1.* npu_profile.* profile_steps
        controller_nsight_options.* worker_nsight_options.*""",
        "trainer.",
    ),
    "distillation.enabled": off("configs/distillation.py has a teacher"),
    "distillation.*": Idle("distillation.enabled is False"),
    "global_profiler.*": Idle(PROFILE),
    "ray_init.*": Idle("there is no Ray"),
    "ray_kwargs.*": Idle("there is no Ray"),
    "transfer_queue.*": Idle("how veRL moves data"),
    "skip.*": Idle("stored rollouts for debugging"),
    "model_engine": Idle(MESH),
    "hydra.*": Idle(LOGS),
    "defaults": family.defaults,
    "--config-name": family.config_name,
    "--config-path": Idle("the folder of --config-name"),
    "--config-dir": Idle("the folder of --config-name"),
}
DTYPES: dict[str, Rule] = {
    f"{ROLLOUT}dtype": Idle(ENGINE),
    f"{ACTOR}fsdp_config.dtype": changed(
        "model.dtype",
        "of activations; parameters and the optimizer are float32 there and here",
        lambda value: "bfloat16" if value in BFLOAT16 else "float32",
    ),
}
DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10_000,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.filter_groups.enable": False,
    "algorithm.filter_groups.max_num_gen_batches": 0,
    "algorithm.rollout_correction.rollout_is": None,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.seed": None,
    f"{ACTOR}ppo_mini_batch_size": 256,
    f"{ACTOR}ppo_epochs": 1,
    f"{ACTOR}clip_ratio_low": 0.2,
    f"{ACTOR}clip_ratio_high": 0.2,
    # The bound of dual clip: on by default in veRL, off here.
    f"{ACTOR}clip_ratio_c": 3.0,
    f"{ACTOR}tau_pos": 1.0,
    f"{ACTOR}tau_neg": 1.05,
    MODE: "vanilla",
    f"{ACTOR}loss_agg_mode": "token-mean",
    f"{ACTOR}loss_scale_factor": None,
    f"{ACTOR}entropy_coeff": 0.0,
    f"{ACTOR}freeze_vision_tower": False,
    f"{ACTOR}use_kl_loss": False,
    f"{ACTOR}kl_loss_coef": 0.001,
    f"{ACTOR}kl_loss_type": "low_var_kl",
    f"{ACTOR}grad_clip": 1.0,
    f"{ACTOR}fsdp_config.dtype": "bfloat16",
    f"{ROLLOUT}n": 1,
    f"{ROLLOUT}temperature": 1.0,
    f"{ROLLOUT}top_k": -1,
    f"{ROLLOUT}top_p": 1.0,
    f"{MODEL}path": "~/models/deepseek-llm-7b-chat",
    f"{MODEL}enable_gradient_checkpointing": True,
    f"{MODEL}lora_rank": 0,
    f"{MODEL}lora_alpha": 16,
    f"{MODEL}target_modules": "all-linear",
    "critic.model.path": "~/models/deepseek-llm-7b-chat",
    "critic.cliprange_value": 0.5,
    "critic.grad_clip": 1.0,
    "custom_reward_function.path": None,
    "trainer.total_epochs": 30,
    "trainer.total_training_steps": None,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.critic_warmup": 0,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
}
ADAM_DEFAULTS = {
    "lr_warmup_steps": -1,
    "lr_warmup_steps_ratio": 0.0,
    "lr_scheduler_type": "constant",
    "min_lr_ratio": 0.0,
    "weight_decay": 0.01,
    "betas": [0.9, 0.999],
}
DEFAULTS |= {f"{prefix}optim.{key}": value for prefix in (ACTOR, "critic.") for key, value in ADAM_DEFAULTS.items()}
DEFAULTS |= {f"{ACTOR}optim.lr": 1e-6, "critic.optim.lr": 1e-5}


def base(keys: Keys, *, search: bool = False) -> str:
    return "search_" * search + ("ppo" if NAMES.critic(keys) else "grpo")


# Patterns of one key come before those of many.
MEMORY_KEYS: dict[str, Rule] = {
    **same_rule(
        Idle(MEMORY),
        """use_dynamic_bsz ppo_max_token_len_per_gpu use_torch_compile ulysses_sequence_parallel_size rollout_n
        use_remove_padding use_fused_kernels use_prefix_grouper entropy_checkpointing pad_to_length
        entropy_from_logits_with_chunking entropy_from_logits_chunk_size""",
        ACTOR,
    ),
    "*profiler*": Idle(PROFILE),
}
CLASSES: dict[str, Rule] = {"*_target_": Idle("a class of veRL")}
RULES = (
    CLASSES
    | DTYPES
    | DATA_RULES
    | ALGORITHM_RULES
    | ACTOR_RULES
    | ROLLOUT_RULES
    | CRITIC_RULES
    | REWARD_RULES
    | TRAINER_RULES
    | MEMORY_KEYS
)
VERL = System("veRL", "0.9.1", RULES, DEFAULTS, partial(base))
