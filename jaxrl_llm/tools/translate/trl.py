"""The tables of TRL: the keys of its five trainers in version 1.16 (PPO: trl.experimental 0.29), and older keys.

They also know the keys of ModelConfig and ScriptArguments, of alignment-handbook and open-r1, and the arguments of the
trainers with what a script does to their objects.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxrl_llm.tools.translate import images, launchers, ours, trl_counts, trl_rules
from jaxrl_llm.tools.translate.family import ENGINE, LOGS, MEMORY, shuffle
from jaxrl_llm.tools.translate.family import model as model_path
from jaxrl_llm.tools.translate.outcome import (
    Idle,
    Outcome,
    Rule,
    System,
    Version,
    off,
    only_if,
    same_rule,
    to,
    unsupported,
)
from jaxrl_llm.tools.translate.trl_rules import not_followed, of_loss, with_critic

SCORED = "the trainer also scores this distribution; TRL scores that of all tokens"
ENVIRONMENT = "write an environment (docs/environments.md)"
STOPS = "stop tokens are the model's: generation_config.json"
TEMPLATE = "the template is the model's: change its tokenizer_config.json"
NO_DROPOUT = "adapters have no dropout"
UNCONSTRAINED = "completions are not constrained"
# Keys that change no number of a run, by the reason.
IDLE: dict[str, Rule] = {
    key: Idle(reason)
    for reason, keys in {
        LOGS: """
            output_dir overwrite_output_dir run_name log_level log_level_replica logging_dir logging_first_step
            logging_nan_inf_filter logging_strategy disable_tqdm include_for_metrics debug log_completions
            log_multimodal num_completions_to_print log_unique_prompts log_on_each_node exp_name project
            trackio_space_id wandb_entity wandb_project wandb_run_group include_num_input_tokens_seen
            include_tokens_per_second benchmarks num_sample_generations log_with do_train do_predict
            log_completions_hub_repo trackio_bucket_id trackio_static_space_id""",
        "nothing is pushed to the hub during a run": """
            push_to_hub hub_model_id hub_model_revision hub_strategy hub_token hub_private_repo hub_always_push
            hub_revision push_to_hub_revision overwrite_hub_revision""",
        MEMORY: """
            gradient_checkpointing_kwargs per_device_eval_batch_size eval_accumulation_steps deepspeed fsdp
            fsdp_config ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb ddp_backend tf32
            ds3_gather_for_generation pad_to_multiple_of torch_empty_cache_steps torch_compile torch_compile_backend
            torch_compile_mode use_liger_kernel use_liger_loss liger_kernel_config accelerator_config
            parallelism_config local_rank attn_implementation use_flash_attention_2 dataloader_num_workers
            dataloader_pin_memory dataloader_prefetch_factor dataloader_persistent_workers dataset_num_proc
            preprocessing_num_workers local_rollout_forward_batch_size auto_find_batch_size group_by_length
            length_column_name cast_lm_head_to_fp32 average_tokens_across_devices use_cpu bf16_full_eval config_file
            eval_on_start batch_eval_metrics fp16_full_eval activation_checkpointing activation_checkpointing_kwargs
            use_cache prediction_loss_only eval_do_concat_batches eval_use_gather_object
            dataloader_multiprocessing_context dataloader_in_order label_names train_sampling_strategy
            ddp_broadcast_buffers ddp_static_graph fp16_opt_level tp_size skip_memory_metrics
            precompute_ref_log_probs precompute_ref_batch_size padding_free activation_offloading padding_value
            use_logits_to_keep use_num_logits_to_keep base_model_attribute_name pad_token trainer.model.device_map
            trainer.model.attn_implementation trainer.model.low_cpu_mem_usage trainer.model.use_cache
            trainer.model.cache_dir trainer.model.token trainer.model.max_seq_length trainer.model.fast_inference
            trainer.model.gpu_memory_utilization trainer.model.max_lora_rank trainer.model.unsloth
            trainer.peft_config.use_gradient_checkpointing trainer.peft_config.random_state
            trainer.peft_config.max_seq_length trainer.model.full_finetuning""",
        ENGINE: """
            vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url vllm_server_host vllm_server_port
            vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length
            vllm_tensor_parallel_size vllm_device vllm_dtype vllm_enable_prefix_caching cache_implementation
            use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged""",
        "a checkpoint holds all that a run resumes from": """
            save_only_model save_safetensors save_on_each_node enable_jit_checkpoint ignore_data_skip
            restore_callback_states_from_checkpoint""",
        "an argument of the trainer that is no setting": """
            trainer.processing_class.padding_side trainer.processing_class.use_fast trainer.data_collator
            trainer.args trainer.processing_class.trust_remote_code trainer.processing_class.truncation_side
            is_encoder_decoder trainer.reward_processing_classes generate_during_eval""",
        "rollouts come from the sampler in JAX; config.importance has such weights": """
            vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max
            vllm_importance_sampling_clip_min vllm_importance_sampling_cap""",
        "of 4 bits; load_in_4bit says what there is here": """
            bnb_4bit_quant_type bnb_4bit_quant_storage bnb_4bit_compute_dtype bnb_4bit_use_double_quant
            use_bnb_nested_quant trainer.model.prepare_model_for_kbit_training
            trainer.model.quantization_config.bnb_4bit_quant_type
            trainer.model.quantization_config.bnb_4bit_quant_storage
            trainer.model.quantization_config.bnb_4bit_compute_dtype
            trainer.model.quantization_config.bnb_4bit_use_double_quant""",
        "no code of a model's folder is run": "trust_remote_code trainer.model.trust_remote_code",
        "reward functions get all columns": "remove_unused_columns",
        "models have no dropout here": "disable_dropout",
        "the file names the split": "dataset_train_split dataset_test_split dataset_split dataset_splits",
        "rows are read whole": "streaming dataset_streaming",
        "of torch": "ignore_bias_buffers label_pad_token_id",
        "eval_strategy decides": "do_eval",
        "config.seed decides": "data_seed",
        "the best checkpoints are those with the best accuracy": "metric_for_best_model greater_is_better",
        "a policy is a causal language model": "lora_task_type trainer.peft_config.task_type",
        "an adapter learns": "trainer.peft_config.inference_mode",
        "num_processes counts those of all machines": "accelerate.num_machines",
        "the last, smaller batch of a pass is dropped": "dataloader_drop_last",
        "every step is logged": "logging_steps",
        "how a version counts": "(per_device_counts)",
        "how processes are started: here all devices that a run finds": " ".join(
            f"{name}.*" for name in launchers.LAUNCHERS
        ),
    }.items()
    for key in keys.split()
}
# Keys without a counterpart: what to do instead, and the values that need nothing, beside None and False.
OFF: dict[str, Rule] = {
    key: off(reason, *neutral)
    for reason, keys, *neutral in [
        ("download that revision, and give its folder", "model_revision", "main"),
        ("one source here: data.source", "datasets"),
        ("name the problems in eval.source", "test_split_size"),
        ("the best checkpoints are kept: jaxrl export --step best", "load_best_model_at_end"),
        ("the same --workdir resumes a run", "resume_from_checkpoint"),
        ("write it into data.convert", "system_prompt"),
        (TEMPLATE, "chat_template chat_template_path auto_insert_empty_system_msg"),
        (STOPS, "eos_token stop_token_id"),
        (STOPS, "stop_token", "eos"),
        (ENVIRONMENT, "trainer.rollout_func trainer.environment_factory trainer.tools max_tool_calling_iterations"),
        ("write them into the prompt", "tools"),
        ("AdamW is the one optimizer here", "optim_args optim_target_modules trainer.optimizers"),
        # These have one update, in different kernels and places.
        (
            "AdamW is the one optimizer here",
            "optim",
            "adamw_torch",
            "adamw_torch_fused",
            "adamw_hf",
            "paged_adamw_32bit",
        ),
        ("no noise on embeddings", "neftune_noise_alpha"),
        ("no label smoothing", "label_smoothing_factor", 0.0),
        ("bfloat16 and float32", "fp16"),
        ("evaluations begin at step 0", "eval_delay", 0),
        (NO_DROPOUT, "lora_dropout", 0.0),
        ("adapters are plain LoRA", "use_dora trainer.peft_config.loftq_config"),
        ("only adapters are trained with LoRA", "lora_modules_to_save"),
        ("biases do not learn with LoRA", "trainer.peft_config.bias", "none"),
        ("name modules in lora_target_modules", "lora_target_parameters"),
        ("adapters begin as in PEFT: A random, B zero", "trainer.peft_config.init_lora_weights", True),
        ("no counterpart in the adapters here", "trainer.peft_config.*"),
        ("it may name more machines: --processes counts them all", "deepspeed.hostfile"),
        ("one greedy completion for each problem", "num_generations_eval", 1),
        ("top_k and top_p are there", "min_p", 0.0),
        ("the sampled distribution is the one that is scored", "repetition_penalty", 1.0),
        ("top_k, top_p and temperature are there", "generation_kwargs", {}),
        (UNCONSTRAINED, "vllm_structured_outputs_regex"),
        ("no such term", "router_aux_loss_coef", 0.0),
    ]
    for key in keys.split()
}
SHARED: dict[str, Rule] = {
    "learning_rate": to("optim.learning_rate", float),
    "lr_scheduler_type": trl_rules.schedule("optim"),
    "lr_scheduler_kwargs": only_if(
        lambda keys: keys["lr_scheduler_type"] == "cosine_with_min_lr",
        lambda value, keys: trl_rules.schedule("optim")("cosine_with_min_lr", keys),
        "lr_scheduler_type has none here",
    ),
    "warmup_steps": trl_counts.warmup,
    "warmup_ratio": trl_counts.warmup_ratio,
    "weight_decay": trl_rules.weight_decay,
    "adam_beta1": to("optim.b1", float),
    "adam_beta2": to("optim.b2", float),
    "adam_epsilon": to("optim.eps", float),
    "max_grad_norm": to("optim.clip_norm", float),
    "seed": to("seed", int),
    "full_determinism": to("deterministic", bool),
    "bf16": only_if(
        lambda keys: not keys.explicit.get("dtype"),
        lambda value, keys: Outcome("mapped", {"model.dtype": "bfloat16" if value in (None, True) else "float32"}),
        "the model's dtype is set",
    ),
    "dtype": trl_rules.dtype,
    "gradient_checkpointing": trl_rules.remat,
    "save_strategy": trl_rules.saving,
    "save_steps": only_if(
        lambda keys: keys["save_strategy"] == "steps",
        trl_counts.counts_updates("checkpoint.every"),
        "save_strategy is not steps",
    ),
    "save_total_limit": only_if(
        lambda keys: bool(keys.explicit.get("save_total_limit")), to("checkpoint.keep", int), "checkpoint.keep decides"
    ),
    "eval_strategy": trl_rules.evaluating,
    "eval_steps": only_if(
        lambda keys: keys["eval_strategy"] not in ("no", None) and keys["eval_steps"],
        lambda value, keys: trl_counts.in_rollouts("eval.every", value, keys),
        "eval_strategy is no, or it is not set",
    ),
    "trainer.eval_dataset": trl_rules.held_out_rows,
    "trainer.eval_dataset.steps": only_if(
        lambda keys: keys["eval_strategy"] not in ("no", None), trl_rules.evaluating_rows, "eval_strategy is no"
    ),
    "report_to": trl_rules.trackers,
    "trainer.callbacks": trl_rules.callbacks,
    "callbacks": trl_rules.callbacks,
    "model_name_or_path": trl_rules.model,
    "model_init_kwargs": trl_rules.init_kwargs,
    "trainer.processing_class": trl_rules.tokenizer,
    "trainer.ref_model": trl_rules.reference,
    "trainer.quantization_config": off("only the base of adapters is quantized: set adapters.base_dtype"),
    "dataset_name": trl_rules.dataset,
    "dataset_mixer": trl_rules.mixer,
    **same_rule(trl_rules.configurations, "dataset_config dataset_configs"),
    "dataset_prompt_column": lambda value, keys: ours.column("data.prompt_column", value, "prompt"),
    "trainer.train_dataset.steps": trl_rules.rows_changed,
    **same_rule(trl_rules.adapter, "use_peft trainer.peft_config"),
    "lora_r": trl_rules.part_of_adapter("adapters.rank"),
    "lora_alpha": trl_rules.part_of_adapter("adapters.alpha"),
    "lora_target_modules": trl_rules.part_of_adapter("adapters.targets"),
    "use_rslora": trl_rules.part_of_adapter("adapters.rs"),
    "trainer.peft_config.exclude_modules": images.excludes,
    **same_rule(trl_rules.quantized, "load_in_8bit load_in_4bit"),
    # Arguments of many scripts for models of pictures, and of the processor that a script makes.
    "min_pixels": images.pixels("data.min_pixels"),
    "max_pixels": images.pixels("data.max_pixels"),
    "(tower)": images.tower(trl_rules.adapted),
    **same_rule(trl_counts.part_of_batch(), "num_processes world_size"),
    **dict.fromkeys(launchers.COUNTS, trl_counts.part_of_batch()),
    "accelerate.config_file": lambda value, keys: (
        Outcome("mapped", {}, "its num_processes is read")
        if value
        else Outcome("unsupported", reason="not beside the script or above it: --processes says what it may say")
    ),
    "config": not_followed(),
    "per_device_train_batch_size": trl_counts.micro,
    "gradient_accumulation_steps": trl_counts.part_of_batch("prompts_per_update"),
    "num_train_epochs": trl_counts.epochs,
    "max_steps": trl_counts.counts_updates("num_steps"),
    # What a script does with an object: the name of a call ends with (), that of an attribute with =.
    "trainer.args.*[)=]": not_followed(),
    "trainer.model.*[)=]": not_followed("model.path", "adapters"),
    "trainer.processing_class.*[)=]": not_followed("model.path"),
    "trainer.peft_config.*[)=]": not_followed("adapters"),
    "trainer.*.*[)=]": not_followed(),
    "trainer.*[)=]": trl_rules.overridden,
    "trainer.model.quantization_config": not_followed("adapters.base_dtype"),
    "trainer.model.*": not_followed("model.path", "adapters"),
    **images.processor_rules("trainer.processing_class."),
    # A key of two stars: a **mapping that the script gets from elsewhere. [*] is a star itself.
    "[*][*]*": not_followed(),
}
CLIPPED = ("grpo", "dapo", "bnpo", "dr_grpo", "luspo")
GRPO_RULES: dict[str, Rule] = {
    "generation_batch_size": trl_counts.part_of_batch("prompts_per_step"),
    "steps_per_generation": trl_counts.part_of_batch("prompts_per_step"),
    "num_generations": to("group_size", int),
    "num_iterations": to("epochs", int),
    "max_prompt_length": trl_rules.prompt_limit,
    "max_completion_length": trl_rules.was("max_completion_length", to("rollout.max_completion_tokens", int)),
    "shuffle_dataset": shuffle,
    # TRL's trainer divides logits by it too, as here.
    "temperature": to("rollout.temperature", float),
    "top_p": lambda value, keys: Outcome(
        "changed" if value < 1 else "mapped", {"rollout.top_p": float(value)}, SCORED * (value < 1)
    ),
    "top_k": lambda value, keys: Outcome(
        "changed" if value else "mapped", {"rollout.top_k": int(value or 0)}, SCORED * bool(value)
    ),
    "chat_template_kwargs": lambda value, keys: (
        Outcome("mapped", {"data.chat_template_args": dict(value)}) if value else Outcome("no effect", reason="not set")
    ),
    "use_vllm": trl_rules.vllm,
    "beta": trl_rules.kl,
    # The KL of a token times its ratio, as in DeepSeek-V3.2: unbiased also for samples of an older policy.
    "use_bias_correction_kl": only_if(
        lambda keys: bool(keys["beta"]),
        trl_rules.was("use_bias_correction_kl", trl_rules.kl_estimator),
        "beta is 0: there is no KL penalty",
    ),
    **same_rule(trl_rules.reference_sync, "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps"),
    "loss_type": trl_rules.was("loss_type", trl_rules.loss),
    "importance_sampling_level": of_loss(trl_rules.loss),
    "epsilon": trl_rules.loss_argument(CLIPPED, "the loss has no such clip"),
    "epsilon_high": trl_rules.loss_argument((*CLIPPED, "cispo"), "the loss has no such clip"),
    "delta": trl_rules.loss_argument(CLIPPED[:4], "the loss has no such bound"),
    **same_rule(
        trl_rules.loss_argument(("sapo",), "loss_type is not sapo"), "sapo_temperature_pos sapo_temperature_neg"
    ),
    **same_rule(
        trl_rules.loss_argument(("vespo",), "loss_type is not vespo"),
        "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg",
    ),
    "scale_rewards": trl_rules.scaling,
    "multi_objective_aggregation": trl_rules.objectives,
    "reward_weights": trl_rules.weights,
    "reward_funcs": trl_rules.rewards,
    "reward_model_name_or_path": trl_rules.alone_reward_model,
    "mask_truncated_completions": trl_rules.truncated,
    "top_entropy_quantile": lambda value, keys: Outcome(
        "changed" if value < 1 else "mapped",
        {"mask.top_entropy": float(value)},
        "the quantile of the whole rollout here, of a micro-batch there" * (value < 1),
    ),
    "off_policy_mask_threshold": lambda value, keys: Outcome("mapped", {"mask.off_policy": float(value or 0.0)}),
    "entropy_coef": trl_rules.entropy_bonus,
    "use_adaptive_entropy": trl_rules.adaptive_entropy,
    "entropy_coef_min": off("it is 0", 0.0),
    **same_rule(trl_rules.adaptive_entropy, "entropy_target entropy_coef_delta entropy_coef_max"),
}
# Keys of GRPOConfig that RLOOConfig does not have.
NOT_OF_RLOO = {
    *(key for key in GRPO_RULES if key.startswith(("sapo_", "vespo_", "entropy_"))),
    *("loss_type", "importance_sampling_level", "delta", "scale_rewards", "multi_objective_aggregation"),
    *("use_bias_correction_kl", "top_entropy_quantile", "off_policy_mask_threshold", "use_adaptive_entropy"),
}
RLOO_RULES: dict[str, Rule] = {key: rule for key, rule in GRPO_RULES.items() if key not in NOT_OF_RLOO} | {
    "beta": trl_rules.rloo_penalty,
    **same_rule(trl_rules.rloo_clip, "epsilon epsilon_high"),
    "mask_truncated_completions": trl_rules.truncated,
    "normalize_advantages": off("advantages of rloo are not divided by a deviation here (reinforce_pp_baseline does)"),
    "reward_clip_range": off("clip the reward in its function"),
    "(rloo)": lambda value, keys: Outcome(
        "mapped", {"advantage.name": "rloo", "aggregate.mode": "sequence_sum", "aggregate.constant_length": 0}
    ),
}
OPTIMIZER = """
    learning_rate lr_scheduler_type warmup_steps warmup_ratio weight_decay adam_beta1 adam_beta2 adam_epsilon
    max_grad_norm"""
ONE_ADAPTER = "one adapter, and its base is the reference"
PPO_RULES: dict[str, Rule] = {key: with_critic(SHARED[key]) for key in OPTIMIZER.split()} | {
    "num_mini_batches": trl_counts.part_of_batch("prompts_per_step"),
    "num_total_batches": off("TRL computes it from total_episodes"),
    **same_rule(
        off("TRL computes it from the other batch words"),
        "micro_batch_size local_batch_size batch_size local_mini_batch_size mini_batch_size",
    ),
    "num_ppo_epochs": to("epochs", int),
    "total_episodes": trl_counts.epochs,
    "num_train_epochs": only_if(lambda keys: not keys["total_episodes"], trl_counts.epochs, "total_episodes is set"),
    "max_steps": off("total_episodes decides", -1),
    "response_length": to("rollout.max_completion_tokens", int),
    "temperature": to("rollout.temperature", float),
    "missing_eos_penalty": off("mask.truncated leaves such completions out; reward.overlong_tokens punishes them"),
    "sft_model_path": model_path,
    "model_name_or_path": lambda value, keys: (
        trl_rules.model(value, keys)
        if "sft_model_path" not in keys
        else Outcome("no effect", reason="sft_model_path is the policy; this is the tokenizer's")
    ),
    "reward_model_path": trl_rules.first_reward,
    "trainer.value_model": to("critic.path", str),
    "max_prompt_length": trl_rules.prompt_limit,
    **same_rule(off(ONE_ADAPTER), "model_adapter_name ref_adapter_name"),
    "kl_coef": lambda value, keys: Outcome(
        "mapped", {"kl.placement": "reward", "kl.coef": float(value), "kl.estimator": str(keys["kl_estimator"])}
    ),
    "kl_estimator": to("kl.estimator", str),
    "cliprange": lambda value, keys: Outcome(
        "mapped",
        {"loss.name": "ppo_clip", "loss.clip_low": float(value), "loss.clip_high": float(value), "loss.delta": 0.0},
    ),
    "cliprange_value": to("critic.clip", float),
    "vf_coef": unsupported("the critic has its own AdamW, which a factor of its loss does not change"),
    "whiten_rewards": off("advantages are whitened, rewards are not"),
    "gamma": lambda value, keys: Outcome("mapped", {"advantage.gamma": float(value), "critic.gamma": float(value)}),
    "lam": lambda value, keys: Outcome("mapped", {"advantage.lam": float(value), "critic.lam": float(value)}),
    "eval_steps": only_if(
        lambda keys: keys["eval_strategy"] != "no", unsupported("TRL's PPO samples completions then"), "no evaluation"
    ),
    "eval_strategy": lambda value, keys: Outcome(
        "changed" if value not in ("no", None) else "mapped",
        ours.NO_EVALUATION,
        "TRL's PPO only logs samples: set eval.every and eval.source for an accuracy" * (value not in ("no", None)),
    ),
    "(critic)": lambda value, keys: Outcome("mapped", {"critic.warmup_steps": 0}),
}
PAIR_RULES: dict[str, Rule] = {
    "(rewards)": Idle("pairs have no reward function"),
    **same_rule(trl_rules.lengths, "max_length max_prompt_length max_completion_length"),
    "truncation_mode": Idle("a longer pair is dropped"),
    **same_rule(Idle(ONE_ADAPTER), "model_adapter_name ref_adapter_name"),
    "ref_model_init_kwargs": off("the reference is the model that the run begins with"),
    "force_use_ref_model": Idle("with adapters the base is the reference"),
}
DPO_RULES: dict[str, Rule] = PAIR_RULES | {
    "loss_type": trl_rules.dpo_loss,
    **same_rule(of_loss(trl_rules.dpo_loss), "beta label_smoothing loss_weights rpo_alpha"),
    "sync_ref_model": off("the reference of dpo never moves"),
    **same_rule(Idle("sync_ref_model decides"), "ref_model_mixup_alpha ref_model_sync_steps"),
    "ld_alpha": off("all tokens of a completion count alike", 1.0),
    "f_divergence_type": off("the divergence is the reverse one", "reverse_kl"),
    "f_alpha_divergence_coef": Idle("of another f_divergence_type"),
    "use_weighting": off("all pairs count alike"),
    "reference_free": off("simpo has no reference: configs/simpo.py"),
    "discopop_tau": Idle("of another loss_type"),
}
SIMPO_RULES: dict[str, Rule] = PAIR_RULES | {
    "loss_type": trl_rules.simpo_loss,
    **same_rule(
        of_loss(trl_rules.simpo_loss), "beta label_smoothing cpo_alpha simpo_gamma gamma_beta_ratio sft_weight"
    ),
    "alpha": off("of AlphaPO, which is not there", 0.0),
}
DEFAULTS: dict[str, Any] = dict(
    model_name_or_path="", dataset_name="", learning_rate=1e-6, lr_scheduler_type="linear", warmup_ratio=0.0,
    weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, max_grad_norm=1.0, seed=42, bf16=None,
    gradient_checkpointing=True, save_strategy="steps", save_steps=500, eval_strategy="no", eval_steps=None,
    logging_steps=10, use_peft=False, lora_r=16, lora_alpha=32, load_in_8bit=False, load_in_4bit=False,
    lora_target_modules=None, per_device_train_batch_size=8, gradient_accumulation_steps=1, num_train_epochs=3,
    max_steps=-1, max_prompt_length=None,
) | {"(tower)": False}  # fmt: skip
GRPO_DEFAULTS: dict[str, Any] = DEFAULTS | dict(
    reward_funcs=None, sync_ref_model=False, ref_model_mixup_alpha=0.6, ref_model_sync_steps=512, num_generations=8,
    generation_batch_size=None, steps_per_generation=None, num_iterations=1, max_completion_length=512,
    temperature=1.0, top_p=1.0, top_k=0, use_vllm=False, beta=0.0, use_bias_correction_kl=True, loss_type="dapo",
    importance_sampling_level="token", epsilon=0.2, epsilon_high=None, delta=None, sapo_temperature_pos=1.0,
    sapo_temperature_neg=1.05, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
    scale_rewards="group", multi_objective_aggregation="sum_then_normalize", mask_truncated_completions=False,
    top_entropy_quantile=1.0, entropy_coef=0.0, use_adaptive_entropy=False, entropy_coef_max=1.0,
    entropy_coef_delta=0.005, entropy_target=0.2,
)  # fmt: skip
RLOO_DEFAULTS = {key: value for key, value in GRPO_DEFAULTS.items() if key not in NOT_OF_RLOO}
RLOO_DEFAULTS |= {"num_generations": 2, "beta": 0.05, "(rloo)": None}
PPO_DEFAULTS: dict[str, Any] = DEFAULTS | dict(
    learning_rate=3e-6, num_mini_batches=1, num_ppo_epochs=4, total_episodes=None, response_length=53, temperature=0.7,
    kl_coef=0.05, kl_estimator="k1", cliprange=0.2, cliprange_value=0.2, gamma=1.0, lam=0.95,
    reward_model_path="EleutherAI/pythia-160m",
) | {"(critic)": None}  # fmt: skip
PAIR_DEFAULTS: dict[str, Any] = DEFAULTS | dict(max_length=1024, beta=0.1, label_smoothing=0.0)
DPO_DEFAULTS = PAIR_DEFAULTS | dict(loss_type=["sigmoid"])
SIMPO_DEFAULTS = PAIR_DEFAULTS | dict(loss_type="sigmoid", cpo_alpha=1.0, simpo_gamma=0.5)
# Old names of a key, and the names of arguments of a script that mean a key of a command line.
RENAMED = {
    "evaluation_strategy": "eval_strategy",  # until transformers 4.46
    "torch_dtype": "dtype",
    "vllm_max_model_len": "vllm_max_model_length",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "wandb_log_unique_prompts": "log_unique_prompts",
    "trainer.model": "model_name_or_path",
    "trainer.train_dataset": "dataset_name",
    "trainer.reward_funcs": "reward_funcs",
    "trainer.reward_model": "reward_model_path",
    "trainer.tokenizer": "trainer.processing_class",
    "trainer.model.torch_dtype": "dtype",
    "trainer.model.dtype": "dtype",
    "trainer.model.revision": "model_revision",
    **{
        f"trainer.model.{part}load_in_{x}bit": f"load_in_{x}bit"
        for part in ("", "quantization_config.")
        for x in (4, 8)
    },
    "trainer.peft_config.target_modules": "lora_target_modules",
    "trainer.peft_config.r": "lora_r",
    "trainer.peft_config.modules_to_save": "lora_modules_to_save",
    **{f"trainer.peft_config.{name}": name for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")},
}
HERE = {  # fields that a key decides whose value is not known
    **dict.fromkeys(("use_peft", "trainer.peft_config"), ("adapters",)),
    **dict.fromkeys(("trainer.model.*", "trainer.model.*[)=]"), ("model.path", "adapters")),
    **dict.fromkeys(("trainer.quantization_config", "trainer.model.quantization_config"), ("adapters.base_dtype",)),
    "trainer.train_dataset.steps": ("data.source", "data.convert"),
}
# Older versions, by keys that later ones do not have.
UNTIL_17 = dict(beta=0.04, temperature=0.9, max_completion_length=256, max_prompt_length=512, logging_steps=500)
UNTIL_17 |= dict(use_bias_correction_kl=False, gradient_checkpointing=False)
GRPO_OLDER = (
    Version("0.16 and 0.17", ("vllm_enable_prefix_caching",), UNTIL_17 | {"loss_type": "bnpo", "top_k": 50}),
    Version("0.15", ("vllm_dtype", "vllm_max_model_len"), UNTIL_17 | {"loss_type": "grpo"}),
    Version("0.14", ("vllm_device",), UNTIL_17 | {"loss_type": "grpo", "(per_device_counts)": "prompts"}),
    Version(
        "until 0.28",
        ("max_prompt_length", "use_liger_loss", "vllm_guided_decoding_regex", "wandb_log_unique_prompts"),
        dict(max_completion_length=256, max_prompt_length=512, use_bias_correction_kl=False),
    ),
)
FIRST_KEYS = {  # keys that a version has first
    "0.16 and 0.17": "epsilon num_iterations scale_rewards min_p top_p top_k repetition_penalty cache_implementation",
    "0.15": "reward_weights log_completions sync_ref_model ds3_gather_for_generation",
}
UNTIL_11 = dict(
    max_length=512, max_prompt_length=128, learning_rate=5e-5, logging_steps=500, gradient_checkpointing=False
)
OWN_SIMPO = UNTIL_11 | dict(beta=2.0, gamma_beta_ratio=0.25, sft_weight=0.0)
UNTIL_28 = ("max_prompt_length", "max_completion_length", "rpo_alpha", "label_pad_token_id", "generate_during_eval")
PAIRS_OLDER = (
    Version("until 0.11", ("evaluation_strategy", "max_target_length"), UNTIL_11),
    Version("until 0.28", (*UNTIL_28, "reference_free", "force_use_ref_model"), dict(max_prompt_length=512)),
)


def dated(system: System, values: dict[str, Any]) -> System:
    """Returns a trainer for the version of a file. `vllm_device` is of 0.14 to 0.17: other keys tell them apart."""
    later = [each for each in GRPO_OLDER if not values.keys().isdisjoint(FIRST_KEYS.get(each.name, "").split())]
    if system is GRPO and "vllm_device" in values and later:
        return replace(system, older=(replace(later[0], proofs=(*later[0].proofs, "vllm_device")),))
    return system


def of_trl(
    name: str, version: str, rules: dict[str, Rule], defaults: dict[str, Any], base: str, *older: Version
) -> System:
    """Returns a trainer of TRL. Its own rules win over those that all of them share."""
    rest = {key: rule for key, rule in (SHARED | IDLE | OFF).items() if key not in rules}
    # Exact names come before patterns, and patterns of few keys before those of many.
    ordered = sorted((rules | rest).items(), key=lambda row: row[0].endswith("*"))
    return System(name, version, dict(ordered), defaults, lambda keys: base, HERE, RENAMED, older=older)


GRPO = of_trl("TRL's GRPO", "1.16.0", GRPO_RULES, GRPO_DEFAULTS, "grpo", *GRPO_OLDER)
RLOO = of_trl("TRL's RLOO", "1.16.0", RLOO_RULES, RLOO_DEFAULTS, "grpo")
PPO = of_trl("TRL's PPO", "0.29.0", PPO_RULES, PPO_DEFAULTS, "ppo")
DPO = of_trl("TRL's DPO", "1.16.0", DPO_RULES, DPO_DEFAULTS, "dpo", *PAIRS_OLDER)
OWN = Version("of SimPO's own trainer", ("gamma_beta_ratio", "sft_weight"), OWN_SIMPO)
SIMPO = of_trl("TRL's SimPO", "1.16.0", SIMPO_RULES, SIMPO_DEFAULTS, "simpo", OWN, *PAIRS_OLDER)
PLAIN = {*IDLE, *OFF, "config"}  # keys that other programs have, too, or that decide nothing
OF_TRL = {"grpo": GRPO, "ppo": PPO, "rloo": RLOO, "dpo": DPO, "simpo": SIMPO}
