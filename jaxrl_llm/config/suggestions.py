"""The field that a wrong name in a config means."""

from __future__ import annotations

from collections.abc import Iterable

from jaxrl_llm.config.names import closest

# Words of TRL, veRL, OpenRLHF and of papers -> the field, or the flag. A field may have its word after any section.
ALIASES = {
    "lr": "optim.learning_rate",
    "actor_learning_rate": "optim.learning_rate",
    # A shape of the curve after the warmup, which has fields of its own here.
    "lr_scheduler_type": "optim.decay",
    "lr_warmup_steps": "optim.warmup_steps",
    "lr_warmup_steps_ratio": "optim.warmup_ratio",
    "warmup": "optim.warmup_steps",
    "max_grad_norm": "optim.clip_norm",
    "grad_clip": "optim.clip_norm",
    "adam_beta1": "optim.b1",
    "adam_beta2": "optim.b2",
    "adam_epsilon": "optim.eps",
    # veRL, EasyR1 and OpenRLHF count the prompts of a rollout; TRL's words for it count completions.
    "batch_size": "prompts_per_step",
    "train_batch_size": "prompts_per_step",
    "rollout_batch_size": "prompts_per_step",
    "mini_batch_size": "prompts_per_update",
    "ppo_mini_batch_size": "prompts_per_update",
    # There completions on one device, here prompts on all devices.
    "micro_batch_size": "microbatch",
    "micro_batch_size_per_gpu": "microbatch",
    "per_device_train_batch_size": "microbatch",
    "num_generations": "group_size",
    # veRL's rollout.n.
    "n": "group_size",
    "n_samples_per_prompt": "group_size",
    # TRL's word for the updates on one rollout; not the number of steps.
    "num_iterations": "epochs",
    "ppo_epochs": "epochs",
    "max_steps": "num_steps",
    "steps": "num_steps",
    "total_steps": "num_steps",
    "total_training_steps": "num_steps",
    "model_name_or_path": "model.path",
    "pretrain": "model.path",
    "torch_dtype": "model.dtype",
    "bf16": "model.dtype",
    "gradient_checkpointing": "model.remat",
    "dataset_name": "data.source",
    "train_files": "data.source",
    "val_files": "eval.source",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_completion_length": "rollout.max_completion_tokens",
    "max_response_length": "rollout.max_completion_tokens",
    "max_new_tokens": "rollout.max_completion_tokens",
    "max_tokens": "rollout.max_completion_tokens",
    "response_length": "rollout.max_completion_tokens",
    "reward_funcs": "reward.functions",
    "reward_fn": "reward.functions",
    "reward_weights": "reward.weights",
    # TRL's beta is the weight of the KL penalty. It is no beta of Adam: these are b1 and b2.
    "beta": "kl.coef",
    "kl_coef": "kl.coef",
    "init_kl_coef": "kl.coef",
    "kl_loss_coef": "kl.coef",
    "kl_loss_type": "kl.estimator",
    "entropy_coeff": "entropy.coef",
    # One number for both sides there, unless a second key is given; here each side has a field.
    "epsilon": "loss.clip_low",
    "clip_ratio": "loss.clip_low",
    "cliprange": "loss.clip_low",
    "clip_ratio_low": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "clip_ratio_high": "loss.clip_high",
    "loss_type": "loss.name",
    "loss_agg_mode": "aggregate.mode",
    "adv_estimator": "advantage.name",
    "scale_rewards": "advantage.normalize",
    "use_vllm": "engine.name",
    "save_steps": "checkpoint.every",
    "save_freq": "checkpoint.every",
    "eval_steps": "eval.every",
    "test_freq": "eval.every",
    "report_to": "log.to",
    "logger": "log.to",
    "output_dir": "--workdir",
    "default_local_dir": "--workdir",
    "save_path": "--workdir",
}


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the known field that a wrong name means: the word of another trainer, or a slip; "": none is near."""
    fields = list(known)
    section, _, last = name.rpartition(".")
    if target := ALIASES.get(last):
        for field in (f"{section}.{target.rpartition('.')[2]}", target):
            # First in the section that was named: critic.lr means critic.optim.learning_rate, if there is one.
            # Its section may be there, as None.
            if field in fields or field.rpartition(".")[0] in fields or field.startswith("--"):
                return field
    return next(iter(closest(name, fields)), "")
