"""Suggests the field of a config that a wrong name means."""

from __future__ import annotations

from collections.abc import Iterable

from jaxrl_llm.config.names import closest

# {field or flag: its names in TRL, veRL, OpenRLHF and papers, with spaces between them}
FOREIGN_NAMES = {
    "optim.learning_rate": "lr actor_learning_rate",
    # TRL's scheduler type is the curve after the warm-up; the warm-up has fields of its own here.
    "optim.decay": "lr_scheduler_type",
    "optim.warmup_steps": "lr_warmup_steps warmup",
    "optim.warmup_ratio": "lr_warmup_steps_ratio",
    "optim.clip_norm": "max_grad_norm grad_clip",
    "optim.b1": "adam_beta1",
    "optim.b2": "adam_beta2",
    "optim.eps": "adam_epsilon",
    # veRL, EasyR1 and OpenRLHF count the prompts of a rollout; TRL's words for it count completions.
    "prompts_per_step": "batch_size train_batch_size rollout_batch_size",
    "prompts_per_update": "mini_batch_size ppo_mini_batch_size",
    # veRL and TRL count the completions of one device; we count the prompts of all devices.
    "microbatch": "micro_batch_size micro_batch_size_per_gpu per_device_train_batch_size",
    # The name n is that of veRL's rollout.n.
    "group_size": "num_generations n n_samples_per_prompt",
    # TRL's num_iterations counts the updates on one rollout, not the steps.
    "epochs": "num_iterations ppo_epochs",
    "num_steps": "max_steps steps total_steps total_training_steps",
    "model.path": "model_name_or_path pretrain",
    "model.dtype": "torch_dtype bf16",
    "model.remat": "gradient_checkpointing",
    "data.source": "dataset_name train_files",
    "eval.source": "val_files",
    "data.max_prompt_tokens": "max_prompt_length",
    "rollout.max_completion_tokens": "max_completion_length max_response_length max_new_tokens max_tokens "
    "response_length",
    "reward.functions": "reward_funcs reward_fn",
    "reward.weights": "reward_weights",
    # TRL's beta is the weight of the KL penalty, while the betas of Adam are b1 and b2 here.
    "kl.coef": "beta kl_coef init_kl_coef kl_loss_coef",
    "kl.estimator": "kl_loss_type",
    "entropy.coef": "entropy_coeff",
    # Other trainers have one number for both sides unless a second key is set; here each side has a field.
    "loss.clip_low": "epsilon clip_ratio cliprange clip_ratio_low",
    "loss.clip_high": "epsilon_high clip_ratio_high",
    "loss.name": "loss_type",
    "aggregate.mode": "loss_agg_mode",
    "advantage.name": "adv_estimator",
    "advantage.normalize": "scale_rewards",
    "engine.name": "use_vllm",
    "checkpoint.every": "save_steps save_freq",
    "eval.every": "eval_steps test_freq",
    "log.to": "report_to logger",
    "--workdir": "output_dir default_local_dir save_path",
}
ALIASES = {name: field for field, names in FOREIGN_NAMES.items() for name in names.split()}


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the field in `known` that a wrong name means: another trainer's name or a slip; "" if none is near."""
    fields = list(known)
    section, _, last = name.rpartition(".")
    if target := ALIASES.get(last):
        # A field of the named section comes first: critic.optim.lr means critic.optim.learning_rate.
        for field in (f"{section}.{target.rpartition('.')[2]}", target):
            # A field also counts if only its section is known, because the section may be None.
            if field in fields or field.rpartition(".")[0] in fields or field.startswith("--"):
                return field
    return next(iter(closest(name, fields)), "")
