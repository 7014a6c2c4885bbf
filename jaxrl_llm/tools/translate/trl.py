"""The table of TRL's GRPO: GRPOConfig of version 1.16, and older keys.

It also knows the keys of ModelConfig and ScriptArguments, and the arguments of the trainer.
"""

from __future__ import annotations

from typing import Any

from jaxrl_llm.tools.translate import images, launchers, ours, trl_counts, trl_rules
from jaxrl_llm.tools.translate.family import ENGINE, LOGS, MEMORY, shuffle
from jaxrl_llm.tools.translate.outcome import Idle, Outcome, Rule, System, off, only_if, same_rule, to, unsupported

HUB = "nothing is pushed to the hub during a run"
LAUNCHER = "how processes are started: here all devices that a run finds"
SCORED = "the trainer also scores this distribution; TRL scores that of all tokens"
TRAINER = "an argument of the trainer that is no setting"
IDLE: dict[str, Rule] = {
    **same_rule(
        Idle(LOGS),
        """
            output_dir overwrite_output_dir run_name report_to log_level log_level_replica logging_dir
            logging_first_step logging_nan_inf_filter logging_strategy disable_tqdm include_for_metrics debug
            log_completions log_multimodal num_completions_to_print log_unique_prompts log_on_each_node
            wandb_log_unique_prompts exp_name project trackio_space_id wandb_entity wandb_project wandb_run_group
            include_num_input_tokens_seen include_tokens_per_second benchmarks callbacks num_sample_generations
            log_with do_train do_predict trainer.callbacks log_completions_hub_repo trackio_bucket_id
            trackio_static_space_id
    """,
    ),
    **same_rule(
        Idle(HUB),
        """
            push_to_hub hub_model_id hub_model_revision hub_strategy hub_token hub_private_repo hub_always_push
            hub_revision push_to_hub_revision overwrite_hub_revision
    """,
    ),
    **same_rule(
        Idle(MEMORY),
        """
            gradient_checkpointing_kwargs per_device_eval_batch_size eval_accumulation_steps deepspeed fsdp
            fsdp_config ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb ddp_backend tf32
            ds3_gather_for_generation pad_to_multiple_of torch_empty_cache_steps torch_compile torch_compile_backend
            torch_compile_mode use_liger_kernel use_liger_loss liger_kernel_config accelerator_config
            parallelism_config local_rank attn_implementation dataloader_num_workers dataloader_pin_memory
            dataloader_prefetch_factor dataloader_persistent_workers dataset_num_proc
            local_rollout_forward_batch_size auto_find_batch_size group_by_length length_column_name
            cast_lm_head_to_fp32 average_tokens_across_devices use_cpu bf16_full_eval config_file eval_on_start
            batch_eval_metrics fp16_full_eval activation_checkpointing activation_checkpointing_kwargs use_cache
            prediction_loss_only eval_do_concat_batches eval_use_gather_object dataloader_multiprocessing_context
            dataloader_in_order label_names train_sampling_strategy ddp_broadcast_buffers ddp_static_graph
            fp16_opt_level tp_size skip_memory_metrics
    """,
    ),
    **same_rule(
        Idle(ENGINE),
        """
            vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url vllm_server_host vllm_server_port
            vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_max_model_len
            vllm_tensor_parallel_size vllm_device vllm_dtype vllm_enable_prefix_caching cache_implementation
            use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged
    """,
    ),
    **same_rule(
        Idle("a checkpoint holds all that a run resumes from"),
        """
            save_only_model save_safetensors save_on_each_node enable_jit_checkpoint
            restore_callback_states_from_checkpoint ignore_data_skip
    """,
    ),
    **same_rule(
        Idle(TRAINER),
        """
            trainer.processing_class trainer.processing_class.padding_side trainer.processing_class.use_fast
            trainer.processing_class.trust_remote_code trainer.processing_class.truncation_side trainer.data_collator
            trainer.reward_processing_classes trainer.args
    """,
    ),
    "model_revision": off("download that revision, and give its folder", "main"),
    "trust_remote_code": Idle("no code of a model's folder is run"),
    "remove_unused_columns": Idle("reward functions get all columns"),
    "disable_dropout": Idle("models have no dropout here"),
    "dataset_train_split": Idle("the file names the split"),
    "dataset_test_split": Idle("the file names the split"),
    "dataset_config": trl_rules.configurations,
    "dataset_configs": trl_rules.configurations,
    "dataset_split": Idle("the file names the split"),
    "dataset_prompt_column": lambda value, keys: ours.column("data.prompt_column", value, "prompt"),
    "datasets": off("one source here: data.source"),
    "streaming": Idle("rows are read whole"),
    "test_split_size": off("name the problems in eval.source"),
    "trainer.quantization_config": off("only the base of adapters is quantized: set adapters.base_dtype"),
    "dataset_streaming": Idle("rows are read whole"),
    "ignore_bias_buffers": Idle("of torch"),
    "do_eval": Idle("eval_strategy decides"),
    "data_seed": Idle("config.seed decides"),
    "full_determinism": to("deterministic", bool),
    "metric_for_best_model": Idle("the best checkpoints are those with the best accuracy"),
    "greater_is_better": Idle("the best checkpoints are those with the best accuracy"),
    "load_best_model_at_end": off("the best checkpoints are kept: jaxrl export --step best"),
    "resume_from_checkpoint": off("the same --workdir resumes a run"),
    "config": unsupported("this file is not beside the script or above it: its keys have their defaults here"),
    "system_prompt": off("write it into data.convert"),
    "chat_template": off("the template is the model's: change its tokenizer_config.json"),
    "chat_template_path": off("the template is the model's: change its tokenizer_config.json"),
    "eos_token": off("stop tokens are the model's: generation_config.json"),
    "trainer.rollout_func": off("write an environment (docs/environments.md)"),
    "trainer.environment_factory": off("write an environment (docs/environments.md)"),
    "trainer.tools": off("write an environment (docs/environments.md)"),
    "trainer.eval_dataset": off("name the problems in eval.source"),
    "trainer.optimizers": off("AdamW is the one optimizer here"),
    **{f"trainer.{key}": Idle("an object of the script") for key in ("ref_model", "reward_model", "value_model")},
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
    # The three have one update, in different kernels.
    "optim": off("AdamW is the one optimizer here", "adamw_torch", "adamw_torch_fused", "adamw_hf"),
    "optim_args": off("AdamW is the one optimizer here"),
    "optim_target_modules": off("AdamW is the one optimizer here"),
    "neftune_noise_alpha": off("no noise on embeddings"),
    "label_smoothing_factor": off("no label smoothing", 0.0),
    "seed": to("seed", int),
    "bf16": only_if(
        lambda keys: not keys.explicit.get("torch_dtype") and not keys.explicit.get("dtype"),
        lambda value, keys: Outcome("mapped", {"model.dtype": "bfloat16" if value in (None, True) else "float32"}),
        "the model's dtype is set",
    ),
    "fp16": off("bfloat16 and float32"),
    "torch_dtype": trl_rules.dtype,
    "dtype": trl_rules.dtype,
    "gradient_checkpointing": trl_rules.remat,
    "save_strategy": trl_counts.saving,
    "save_steps": trl_counts.counts_updates("checkpoint.every", "save_strategy"),
    "save_total_limit": only_if(
        lambda keys: bool(keys.explicit.get("save_total_limit")), to("checkpoint.keep", int), "checkpoint.keep decides"
    ),
    "eval_strategy": trl_counts.evaluating,
    "eval_steps": only_if(
        lambda keys: keys["eval_strategy"] == "steps" and keys["eval_steps"],
        lambda value, keys: trl_counts.in_rollouts("eval.every", value, keys),
        "eval_strategy is no, or it is not set",
    ),
    "eval_delay": off("evaluations begin at step 0", 0),
    "logging_steps": Idle("every step is logged"),
    "model_name_or_path": trl_rules.model,
    "trainer.model": trl_rules.model,
    "dataset_name": trl_rules.dataset,
    "trainer.train_dataset": trl_rules.dataset,
    "trainer.train_dataset.steps": trl_rules.rows_changed,
    "model_init_kwargs": trl_rules.init_kwargs,
    "trainer.peft_config": trl_rules.adapter,
    **same_rule(trl_rules.part_of_adapter, "r lora_alpha target_modules use_rslora", "trainer.peft_config."),
    "trainer.peft_config.task_type": Idle("a policy is a causal language model"),
    "trainer.peft_config.inference_mode": Idle("an adapter learns"),
    "trainer.peft_config.lora_dropout": off("adapters have no dropout", 0.0),
    "trainer.peft_config.bias": off("biases do not learn with LoRA", "none"),
    "trainer.peft_config.modules_to_save": off("only adapters are trained with LoRA"),
    "trainer.peft_config.init_lora_weights": off("adapters begin as in PEFT: A random, B zero", True),
    "trainer.peft_config.exclude_modules": images.excludes,
    "trainer.peft_config.*": off("no counterpart in the adapters here"),
    "use_peft": trl_rules.adapter,
    # Arguments of many scripts for models of pictures, and of the processor that a script makes.
    "min_pixels": images.pixels("data.min_pixels"),
    "max_pixels": images.pixels("data.max_pixels"),
    **images.processor_rules("trainer.processing_class."),
    **same_rule(trl_rules.adapter, "lora_r lora_alpha lora_target_modules"),
    "use_rslora": trl_rules.adapter,
    "use_dora": off("adapters are plain LoRA"),
    "lora_dropout": off("adapters have no dropout", 0.0),
    "lora_modules_to_save": off("only adapters are trained with LoRA"),
    "lora_target_parameters": off("name modules in lora_target_modules"),
    "lora_task_type": Idle("a policy is a causal language model"),
    **same_rule(trl_rules.quantized, "load_in_8bit load_in_4bit"),
    **same_rule(
        Idle("of 4 bits; load_in_4bit says what there is here"),
        "bnb_4bit_quant_type bnb_4bit_quant_storage bnb_4bit_compute_dtype bnb_4bit_use_double_quant",
    ),
    "use_bnb_nested_quant": Idle("of 4 bits; load_in_4bit says what there is here"),
    "num_processes": trl_counts.part_of_batch(),
    "world_size": trl_counts.part_of_batch(),
    **dict.fromkeys(launchers.COUNTS, trl_counts.part_of_batch()),
    "accelerate.num_machines": Idle("num_processes counts those of all machines"),
    "accelerate.config_file": lambda value, keys: (
        Outcome("mapped", {}, "its num_processes is read")
        if value
        else Outcome("unsupported", reason="not beside the script or above it: --processes says what it may say")
    ),
    "deepspeed.hostfile": off("it may name more machines: --processes counts them all"),
    **{f"{name}.*": Idle(LAUNCHER) for name in launchers.LAUNCHERS},
    "dataloader_drop_last": Idle("the last, smaller batch of a pass is dropped"),
    # A key of two stars: a **mapping that the script gets from elsewhere. [*] is a star itself.
    "[*][*]*": unsupported("arguments that another object holds"),
}
GRPO_RULES: dict[str, Rule] = {
    "per_device_train_batch_size": trl_counts.micro,
    "gradient_accumulation_steps": trl_counts.part_of_batch("prompts_per_update"),
    "generation_batch_size": trl_counts.part_of_batch("prompts_per_step"),
    "steps_per_generation": trl_counts.part_of_batch("prompts_per_step"),
    "num_generations": lambda value, keys: Outcome("mapped", {"group_size": int(value)}),
    "num_generations_eval": off("one greedy completion for each problem", 1),
    "num_iterations": to("epochs", int),
    "num_train_epochs": trl_counts.epochs,
    "max_steps": trl_counts.counts_updates("num_steps", ""),
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
    "min_p": off("top_k and top_p are there", 0.0),
    "repetition_penalty": off("the sampled distribution is the one that is scored", 1.0),
    "generation_kwargs": off("top_k, top_p and temperature are there", {}),
    "chat_template_kwargs": lambda value, keys: (
        Outcome("mapped", {"data.chat_template_args": dict(value)}) if value else Outcome("no effect", reason="not set")
    ),
    "use_vllm": trl_rules.vllm,
    "vllm_structured_outputs_regex": off("completions are not constrained"),
    "vllm_guided_decoding_regex": off("completions are not constrained"),
    **same_rule(
        Idle("rollouts come from the sampler in JAX; config.importance has such weights"),
        "correction mode clip_max clip_min cap",
        "vllm_importance_sampling_",
    ),
    "beta": trl_rules.kl,
    # The KL of a token times its ratio, as in DeepSeek-V3.2: unbiased also for samples of an older policy.
    "use_bias_correction_kl": only_if(
        lambda keys: bool(keys["beta"]),
        trl_rules.was("use_bias_correction_kl", trl_rules.kl_estimator),
        "beta is 0: there is no KL penalty",
    ),
    "sync_ref_model": trl_rules.reference_sync,
    "ref_model_mixup_alpha": trl_rules.reference_sync,
    "ref_model_sync_steps": trl_rules.reference_sync,
    "loss_type": trl_rules.was("loss_type", trl_rules.loss),
    "importance_sampling_level": lambda value, keys: Outcome(
        "mapped", {name: x for name, x in trl_rules.loss(keys["loss_type"], keys).fields.items() if name == "loss.name"}
    ),
    "epsilon": trl_rules.loss_argument(("grpo", "dapo", "bnpo", "dr_grpo", "luspo"), "the loss has no such clip"),
    "epsilon_high": trl_rules.loss_argument(
        ("grpo", "dapo", "bnpo", "dr_grpo", "luspo", "cispo"), "the loss has no such clip"
    ),
    "delta": trl_rules.loss_argument(("grpo", "dapo", "bnpo", "dr_grpo"), "the loss has no such bound"),
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
    "trainer.reward_funcs": trl_rules.rewards,
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
    "max_tool_calling_iterations": off("write an environment (docs/environments.md)"),
    "router_aux_loss_coef": off("no such term", 0.0),
}
REFERENCE_DEFAULTS = {"sync_ref_model": False, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512}
BOTH: dict[str, Any] = {
    "lr_scheduler_type": "linear",
    "warmup_ratio": 0.0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "seed": 42,
    "bf16": None,
    "gradient_checkpointing": True,
    "save_strategy": "steps",
    "save_steps": 500,
    "eval_strategy": "no",
    "eval_steps": None,
    "logging_steps": 10,
    "use_peft": False,
    "lora_r": 16,
    "lora_alpha": 32,
    "load_in_8bit": False,
    "load_in_4bit": False,
    "lora_target_modules": None,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
}
# Defaults that another key of the file may replace.
OPEN_RULES: dict[str, Rule] = {
    "(model)": trl_rules.if_not_given(trl_rules.model, "model_name_or_path", "trainer.model"),
    "(data)": trl_rules.if_not_given(trl_rules.dataset, "dataset_name", "trainer.train_dataset"),
    "(rewards)": trl_rules.if_not_given(
        trl_rules.rewards, "reward_funcs", "trainer.reward_funcs", "reward_model_name_or_path"
    ),
    "(prompts)": trl_rules.if_not_given(trl_rules.prompt_limit, "max_prompt_length"),
    "(tower)": images.tower(trl_rules.adapted),
}
# No key of a file has parentheses. So these always count as defaults, and their rules see whether a key says the same.
OPEN_DEFAULTS: dict[str, Any] = {"(model)": "", "(data)": "", "(rewards)": None, "(prompts)": None, "(tower)": False}
GRPO_DEFAULTS = (
    BOTH
    | REFERENCE_DEFAULTS
    | OPEN_DEFAULTS
    | {
        "learning_rate": 1e-6,
        "num_generations": 8,
        "generation_batch_size": None,
        "steps_per_generation": None,
        "num_iterations": 1,
        "max_steps": -1,
        "max_completion_length": 512,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "use_vllm": False,
        "beta": 0.0,
        "use_bias_correction_kl": True,
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "epsilon": 0.2,
        "epsilon_high": None,
        "delta": None,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "scale_rewards": "group",
        "multi_objective_aggregation": "sum_then_normalize",
        "mask_truncated_completions": False,
        "top_entropy_quantile": 1.0,
        "entropy_coef": 0.0,
        "use_adaptive_entropy": False,
        "entropy_coef_max": 1.0,
        "entropy_coef_delta": 0.005,
        "entropy_target": 0.2,
    }
)
RENAMED = {"evaluation_strategy": "eval_strategy"}  # until transformers 4.46
ALL_RULES = GRPO_RULES | SHARED | IDLE | OPEN_RULES
GRPO = System("TRL's GRPO", "1.16.0", ALL_RULES, GRPO_DEFAULTS, lambda keys: "grpo", renamed=RENAMED)
