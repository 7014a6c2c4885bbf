"""GRPO on sums of two numbers below 100, from the model inside the package.

python -m jaxrl_llm.train --config configs/grpo.py

Measured, greedy accuracy on 1,000 held-out problems: 11.0 % before, 100.0 %, 99.9 % and 99.8 % after (seeds 0, 1
and 2), in 100, 83 and 79 seconds on two CPU cores, the first with nothing compiled yet.
"""

from pathlib import Path

from ml_collections import ConfigDict

import jaxrl_llm


def get_config() -> ConfigDict:
    c = ConfigDict()
    c.seed = 0  # of the order of prompts and of sampling
    # On a GPU: only operations that repeat bit for bit, as all do on a CPU. What that costs in speed is not measured.
    c.deterministic = False
    c.num_steps = 100  # rollouts of prompts_per_step prompts each
    c.schedule_steps = 0  # steps that warm-up and decay are laid out for; 0: num_steps. A resumed run keeps its own

    # The batch. Sequences per optimizer step = prompts_per_update x group_size.
    c.prompts_per_step = 64  # B: prompts in a rollout
    c.group_size = 8  # G: completions of one prompt
    c.prompts_per_update = 64  # one optimizer step's share of B
    c.epochs = 1  # passes over a rollout; B / prompts_per_update x epochs optimizer steps
    c.microbatch = 0  # prompts at a time in memory (0: all); never changes the gradient

    c.model = ConfigDict()
    c.model.path = str(Path(jaxrl_llm.__file__).parent / "assets" / "arithmetic")  # a folder, or a hub id
    c.model.dtype = "float32"  # of activations; parameters and the optimizer are float32
    c.model.remat = "dots"  # recomputed in the backward pass: none | dots | full

    c.data = ConfigDict()
    c.data.source = "arithmetic.train"  # a task, a .jsonl, .json, .csv or .parquet file, or my.module.function
    c.data.convert = ""  # function row -> row with a column "prompt", or None to drop it; e.g. gsm8k.convert
    c.data.max_prompt_tokens = 16  # longer prompts are never cut
    c.data.overlong = "drop"  # but dropped and counted (drop), or refused (error)
    c.data.chat_template_args = ConfigDict()  # of the model's chat template, e.g. enable_thinking = False

    c.eval = ConfigDict()
    c.eval.every = 10  # steps between evaluations, one before the first and one at the end; 0: none
    c.eval.source = "arithmetic.held_out"
    c.eval.convert = ""  # as data.convert, for these rows
    c.eval.problems = 1000  # the first so many, answered greedily
    c.eval.function = "arithmetic.accuracy"  # the reward function that judges

    c.reward = ConfigDict()
    c.reward.functions = (
        "arithmetic.accuracy",
        "arithmetic.thought",
    )  # ours, or my.module.function with TRL's signature
    c.reward.weights = (1.0, 0.0)  # a weight of 0 logs a channel and rewards nothing

    # Seconds for one batch of one function, eval.function too; a run stops where it takes longer. 0: no limit, and the
    # function runs in the trainer's own process, for debuggers and functions that need JAX's devices (docs/rewards.md)
    c.reward.timeout = 600.0
    c.reward.overlong_tokens = 0  # the last so many tokens before the limit cost from 0 to 1 (DAPO); 0: none do

    # A function of jaxrl_llm.algorithms.advantages, or my.module.function, and its arguments.
    # normalize: group | batch | none
    c.advantage = ConfigDict(dict(name="grpo", normalize="group", epsilon=1e-4))

    # A function of jaxrl_llm.algorithms.losses, or my.module.function, and its arguments. With one update on a
    # rollout, as here, the ratio is 1 and nothing is clipped.
    c.loss = ConfigDict(dict(name="ppo_clip", clip_low=0.2, clip_high=0.2, delta=0.0))

    c.aggregate = ConfigDict()
    c.aggregate.mode = "token_mean"  # | sequence_mean | sequence_sum | constant
    c.aggregate.constant_length = 0  # tokens that mode "constant" divides each sequence by

    c.kl = ConfigDict()
    c.kl.placement = "loss"  # none | reward | loss
    c.kl.estimator = "k3"  # k1 (reward only) | k2 | k3
    c.kl.coef = 1e-3
    c.kl.decay = "constant"  # | linear | cosine, to kl.end at the last optimizer step
    c.kl.end = 0.0
    c.kl.weighted = False  # k3 in the loss times pi / pi_old
    c.kl.target = 0.0  # kl.coef moves towards this mean KL of a token; 0: it does not
    c.kl.horizon = 10_000  # in so many sequences, about
    c.kl.refresh_every = 0  # steps after which the reference moves to the policy; 0: never
    c.kl.mix = 1.0  # so far: 1 is all the way

    c.entropy = ConfigDict()
    c.entropy.coef = 0.0  # of a bonus for entropy
    c.entropy.target = 0.0  # it grows by `step` an update while entropy is below, else shrinks; 0: it stays
    c.entropy.step = 0.0
    c.entropy.most = 0.0  # and never exceeds this

    c.mask = ConfigDict()
    c.mask.truncated = False  # whether completions that the limit cut are left out
    c.mask.top_entropy = 1.0  # the share of tokens, those of highest entropy, that the policy loss counts
    c.mask.off_policy = 0.0  # completions of A < 0 whose mean log(pi_sampler / pi) is above are left out; 0: none

    # Weights for tokens that another engine or older weights drew: token | sequence | geometric, and
    # none | truncate | mask | auto, which is truncate where there are such tokens
    c.importance = ConfigDict(dict(level="token", action="auto", low=0.0, high=2.0))

    c.rollout = ConfigDict()
    c.rollout.max_completion_tokens = 12
    c.rollout.temperature = 1.0  # what is sampled is what is scored, for these three too
    c.rollout.top_k = 0  # 0: off
    c.rollout.top_p = 1.0  # 1: off
    c.rollout.max_lag = 0  # steps that sampling may be ahead of learning; 0: one after the other
    c.rollout.resample_rounds = 0  # of fresh prompts at most, for groups whose members all earn the same (DAPO)

    # A function of jaxrl_llm.rollout.engines, or my.module.function, and its arguments: jax | vllm, as in grpo_vllm.py
    c.engine = ConfigDict(dict(name="jax"))

    c.optim = ConfigDict()
    c.optim.learning_rate = 1e-4
    c.optim.warmup_steps = 5  # optimizer steps
    c.optim.warmup_ratio = 0.0  # or a share of all optimizer steps
    c.optim.decay = "linear"  # constant | linear | cosine, to optim.end
    c.optim.end = 0.0
    c.optim.clip_norm = 1.0  # of the whole gradient; 0: off
    c.optim.weight_decay = 0.0  # of matrices alone
    c.optim.b1 = 0.9
    c.optim.b2 = 0.95
    c.optim.eps = 1e-8

    c.adaptive_warmup = ConfigDict()  # adaptive warm-up: its rate stays where it is
    c.adaptive_warmup.kl_to_reward = 0.0  # while the KL penalty is above this share of the task reward; 0: not for that
    c.adaptive_warmup.update_size = 0.0  # while an update is above this share of the parameters' norm; 0: not for that

    c.mesh = ConfigDict(dict(data=1, fsdp=-1, tensor=1))  # -1: all devices left

    c.health = ConfigDict()
    c.health.max_skipped = 10  # updates skipped in a row (no finite gradient or trained token) end the run; 0: never

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 25  # steps; also at every evaluation, at SIGTERM or Ctrl-C, and at the end
    c.checkpoint.keep = 2  # the latest so many
    c.checkpoint.keep_best = 1  # and the best so many by evaluation, if there is any

    c.log = ConfigDict()
    c.log.completions_every = 25  # steps between samples shown and kept in completions.jsonl; 0: none
    c.log.tensorboard = True
    c.log.wandb_project = ""  # a project name switches W&B on
    return c
