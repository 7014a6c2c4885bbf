"""GRPO on sums of two numbers below 100, from the model inside the package.

jaxrl train --config configs/grpo.py

Measured, greedy accuracy on 1,000 held-out problems: 11.0 % before, 100.0 %, 99.9 % and 99.8 % after (seeds 0, 1
and 2), in 100, 83 and 79 seconds on two CPU cores, the first with nothing compiled yet.
"""

from pathlib import Path

from ml_collections import ConfigDict

import jaxrl_llm
from jaxrl_llm.config.sections import Section


def get_config() -> ConfigDict:
    c = Section()
    c.seed = 0  # random seed for the order of prompts and for sampling
    # True: on a GPU, use only operations that repeat bit for bit. On a CPU all of them do. The cost in speed is not
    # measured.
    c.deterministic = False
    c.num_steps = 100  # number of steps; each step is one rollout of prompts_per_step prompts
    c.schedule_steps = 0  # steps that warm-up and decay cover; 0: num_steps. A resumed run keeps its first value

    # Batch sizes. One optimizer step has prompts_per_update x group_size sequences.
    c.prompts_per_step = 64  # B: prompts in a rollout
    c.group_size = 8  # G: completions per prompt
    c.prompts_per_update = 64  # prompts of the rollout in one optimizer step
    c.epochs = 1  # passes over a rollout: B / prompts_per_update x epochs optimizer steps
    c.microbatch = 0  # prompts in memory at a time; 0: all. It never changes the gradient

    c.model = ConfigDict()
    c.model.path = str(Path(jaxrl_llm.__file__).parent / "assets" / "arithmetic")  # a folder or a hub id
    # Function that reads config.json, for a model family that this package lacks, e.g. my.module.function
    # (docs/models.md). "": the model_type in config.json names a family of this package.
    c.model.family = ""
    c.model.dtype = "float32"  # dtype of activations; parameters and optimizer state are float32
    c.model.remat = "dots"  # activations that the backward pass recomputes: none | dots | full
    # Parts in which the completions of a prompt are scored and learned from, one after the other. More parts need less
    # memory, and a forward pass more. It never changes the gradient
    c.model.row_parts = 1
    c.model.vision = "learns"  # the tower that reads images, if the model has one: learns | frozen

    c.data = ConfigDict()
    # A task, a .jsonl, .json, .csv or .parquet file, a data set of the hub (owner/name@split), or my.module.function.
    c.data.source = "arithmetic.train"
    # Name of a function row -> row with a column "prompt", or None to drop the row; e.g. gsm8k.convert. "": none.
    c.data.convert = ""
    # Columns of rows that no convert function makes. "": as their own columns say, also those of TRL, veRL and EasyR1
    # (docs/data.md).
    c.data.prompt_column = ""  # name of the column that holds the prompt
    c.data.answer_column = ""  # name of the column that becomes "answer", for the reward functions
    # Template (jinja) of the user's message, around a prompt of text: {{ content }}; or a file with one. "": none.
    c.data.format_prompt = ""
    # Images of rows (docs/data.md), for a model that reads them. Leave all four as they are in a run of text.
    c.data.image_column = ""  # name of the column that holds them; "": images, or image
    c.data.image_folder = ""  # folder that their paths are relative to, and must be in; "": paths of any file
    # Least and most pixels of an image, which is resized; its tokens count as those of the prompt. 0: the model's.
    c.data.min_pixels = 0
    c.data.max_pixels = 0
    c.data.max_prompt_tokens = 16  # limit of a prompt in tokens; a longer prompt is never cut
    c.data.overlong = "drop"  # for longer prompts: drop (drop and count them) | error (stop the run)
    c.data.chat_template_args = ConfigDict()  # arguments of the model's chat template, e.g. enable_thinking = False
    # Date for a chat template that asks for today's, e.g. 2026-11-25. "": that on which the run begins, also when it is
    # resumed.
    c.data.today = ""
    # Several sources instead of data.source, which is "" then, each with a name and fields as those of `data`:
    # c.data.mixture.math = ConfigDict(dict(source="math.parquet", convert="", weight=2.0)). Prompts are drawn in
    # proportion to the weights.
    c.data.mixture = ConfigDict()
    # Column of numbers, such as a difficulty. Each epoch, in a mixture of each source, draws the smallest number first.
    # "": shuffled.
    c.data.order_column = ""
    # Passes over prompts that taught nothing. dict(skip=0.9): the probability of passing over a prompt whose
    # completions all had the same reward at its last visit.
    c.data.curriculum = None

    c.eval = ConfigDict()  # None: no evaluation
    c.eval.every = 10  # steps between evaluations; also before the first step and at the end
    c.eval.source = "arithmetic.held_out"  # source of the evaluation problems, like data.source
    c.eval.convert = ""  # like data.convert, for the evaluation problems; "": none
    c.eval.problems = 1000  # the first problems of the source; each gets one greedy completion
    c.eval.function = "arithmetic.accuracy"  # reward function that judges the completions, as in reward.functions
    # Further sets, each with a name: c.eval.extra_sets.code = ConfigDict(dict(source="code.jsonl", convert="",
    # function="code.accuracy", problems=500)). They are only measured, as eval/code/accuracy. The set of eval.source
    # alone decides which checkpoint is best, and when eval.patience ends the run.
    c.eval.extra_sets = ConfigDict()
    c.eval.patience = 0  # evaluations that are not better than the best one, after which the run ends; 0: it does not

    c.reward = ConfigDict()
    # Names of reward functions: ours, or my.module.function with TRL's signature. Each may have arguments, as in
    # "gsm8k.accuracy(method='flexible')" (docs/rewards.md).
    c.reward.functions = ("arithmetic.accuracy", "arithmetic.thought")
    c.reward.weights = (1.0, 0.0)  # weight of each function in the reward; 0: the function is only logged

    # Seconds that a function may take for one batch (eval.function too). If it takes longer, the run stops.
    # 0: no limit, and the function runs in the trainer's process. Use 0 for debuggers and for functions that need JAX's
    # devices (docs/rewards.md).
    c.reward.timeout = 600.0
    # Programs of the policy (code.accuracy, python.Python, tools.run_python) run in bubblewrap. True: without it, where
    # the machine grants it no namespaces; then a program can do all that the trainer's user can (docs/rewards.md).
    c.reward.unconfined = False
    # Tokens before the limit of a completion. Over them, its penalty grows from 0 to 1 (DAPO). 0: no penalty.
    c.reward.overlong_tokens = 0
    # A reward model (docs/rewards.md) adds weight x its score. Not in the config: there is none.
    # c.reward_model = ConfigDict(dict(path="a folder or a hub id", weight=1.0))

    # The advantage estimator: a function of jaxrl_llm.algorithms.advantages, or my.module.function, and its arguments.
    # normalize: deviation that the advantage is divided by: group | batch | none. epsilon is added to the deviation.
    c.advantage = ConfigDict(dict(name="grpo", normalize="group", epsilon=1e-4))

    # The loss: a function of jaxrl_llm.algorithms.losses, or my.module.function, and its arguments.
    # The ratio is clipped to 1 - clip_low ... 1 + clip_high. delta: upper bound of the ratio for A < 0; 0: no bound.
    # With one update per rollout, as here, the ratio is 1 and nothing is clipped.
    c.loss = ConfigDict(dict(name="ppo_clip", clip_low=0.2, clip_high=0.2, delta=0.0))

    c.aggregate = ConfigDict()
    c.aggregate.mode = "token_mean"  # reduction of token losses: token_mean | sequence_mean | sequence_sum | constant
    c.aggregate.constant_length = 0  # tokens that mode "constant" divides each sequence by; 0: for the other modes

    c.kl = ConfigDict()  # the KL penalty to the reference. None: no penalty, and no reference
    c.kl.placement = "loss"  # place of the penalty: reward | loss
    c.kl.estimator = "k3"  # k1 (only in the reward) | k2 | k3 | k3_weighted (only in the loss: k3 times pi / pi_old)
    c.kl.coef = 1e-3  # coefficient of the penalty, at the start
    c.kl.decay = "constant"  # schedule of the coefficient: constant | linear | cosine
    c.kl.end = 0.0  # coefficient at the last optimizer step, with a linear or cosine decay
    # kl.coef adapts to a KL. dict(target=0.01, horizon=10_000): the mean KL per token, and about the number of
    # sequences in which it adapts.
    c.kl.adaptive = None
    # The reference moves towards the policy. dict(every=100, mix=1.0): steps between two moves, and how far a move
    # goes: (1 - mix) reference + mix policy.
    c.kl.refresh = None

    # A bonus for the entropy of the policy. dict(coef=1e-3): its coefficient, at the start. With
    # adaptive=dict(target=0.3, step=1e-4, most=5e-3) in it, the coefficient goes up by `step` after an update whose
    # entropy is at or below the target, else down, and stays between 0 and `most`.
    c.entropy = None

    c.mask = ConfigDict()
    c.mask.truncated = False  # True: do not train on completions that the token limit cut
    c.mask.top_entropy = 1.0  # share of tokens in the policy loss, those with the highest entropy; 1: all tokens
    # Leave out completions with A < 0 if their mean log(pi_sampler / pi) is above this value. 0: leave out none.
    c.mask.off_policy = 0.0

    # Importance weights for tokens that another engine or older weights sampled.
    # level: token | sequence | geometric. action: none | truncate (to high) | mask (to 0 outside low ... high) | auto
    # (truncate if there are such tokens, else none).
    c.importance = ConfigDict(dict(level="token", action="auto", low=0.0, high=2.0))

    c.rollout = ConfigDict()
    c.rollout.max_completion_tokens = 12  # limit of a completion in tokens
    c.rollout.temperature = 1.0  # of sampling; the trainer's log-probabilities also use temperature, top_k and top_p
    c.rollout.top_k = 0  # sample from this number of most likely tokens; 0: from all
    c.rollout.top_p = 1.0  # sample from the most likely tokens with this total probability; 1: from all
    c.rollout.max_lag = 0  # steps that sampling may be ahead of learning; 0: sampling and learning take turns
    # Rounds of fresh prompts, at most, that replace groups whose completions all have the same reward (DAPO). 0: none.
    c.rollout.resample_rounds = 0
    # Partial rollouts. True: a step takes the prompts_per_step groups that are complete first. The others go on in the
    # next step, with its weights, so that no step waits for the longest completion. For the in-JAX engine.
    c.rollout.partial = False

    # The rollout engine: a function of jaxrl_llm.rollout.engines, or my.module.function, and its arguments: jax | vllm.
    # configs/grpo_vllm.py has the arguments of vllm.
    # devices: on all hosts together, that only the sampler uses; mesh is over the others. With rollout.max_lag = 1 it
    # then samples the next batch while these learn (docs/performance.md). 0: sampler and trainer share all devices.
    # max_sequences: completions that hold pages of the KV cache at once; the others wait until one has ended. 0: all,
    # as long as there are pages.
    # pages: of 64 tokens (128 on a TPU), on each device. If they run out, the youngest completion waits and is computed
    # again. 0: as many as completions of the largest length need, and as fit into the memory of an accelerator.
    # weights: of the sampler's copy. int8: the kernels of the layers, with a scale for each output, for half of the
    # memory of bfloat16; importance weights then correct for the rounding. "": as in the model.
    # cache: of keys and values. int8: with a scale for each token and head, for half of the memory of bfloat16. "": as
    # in the model.
    c.engine = ConfigDict(dict(name="jax", devices=0, max_sequences=0, pages=0, weights="", cache=""))

    c.optim = ConfigDict()  # AdamW
    c.optim.learning_rate = 1e-4  # after the warm-up
    c.optim.warmup_steps = 5  # optimizer steps of the warm-up; 0: none, or as warmup_ratio says
    c.optim.warmup_ratio = 0.0  # the warm-up as a share of all optimizer steps; 0: as warmup_steps says
    c.optim.decay = "linear"  # schedule after the warm-up: constant | linear | cosine
    c.optim.end = 0.0  # learning rate at the end of a linear or cosine decay
    c.optim.clip_norm = 1.0  # largest norm of the whole gradient; 0: no clipping
    c.optim.weight_decay = 0.0  # only for matrices; 0: none
    c.optim.b1 = 0.9  # decay rate of the mean of gradients
    c.optim.b2 = 0.95  # decay rate of the mean of squared gradients
    c.optim.eps = 1e-8  # added to the denominator of an update
    c.optim.momentum_dtype = "float32"  # of the mean of gradients: float32 | bfloat16 (2 bytes less for each parameter)
    c.optim.gradient_dtype = "float32"  # of the sum over micro-batches: float32 | bfloat16 (2 bytes less as well)

    # True: in the host's memory while no program uses it. reference: also a teacher. optimizer: the moments of AdamW.
    c.host_memory = ConfigDict(dict(reference=False, optimizer=False))

    # Devices on each axis; -1: all that are left, beside those of engine.devices.
    c.mesh = ConfigDict(dict(data=1, fsdp=-1, tensor=1))

    c.health = ConfigDict()
    # After this number of skipped updates in a row, the run stops. 0: it never stops for this.
    # An update is skipped if its gradient is not finite or no token is trained.
    c.health.max_skipped = 10
    # Further reasons to skip an update: gradient_spike (its norm is ten times the usual one) | sampler_mismatch (the
    # weights that sampled are not those that learn).
    c.health.skip = ()
    # Rules (docs/health.md) whose finding ends the run. The findings of all other rules are only told.
    c.health.stop = ("updates_skipped",)
    # dict(rules=("reward_collapse",), most=3, learning_rate=0.5, warmup_steps=5): at a finding of these rules the run
    # goes back to a checkpoint before it, and goes on with other samples of the same prompts, at most `most` times.
    # learning_rate: factor of the rate at each rollback; warmup_steps: a new warm-up.
    c.health.rollback = None
    # Minutes, at least, in which nothing moves until the command ends with exit code 75, which means "start it again":
    # a host, a disk or a collective hangs. Ten median steps may be longer. 0: it waits for ever (docs/pods.md).
    c.health.hang_minutes = 60.0
    # True: at the start of a new run, check what must hold at step 0 (docs/health.md). It changes no number of the run.
    c.health.self_test = True

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 25  # steps; also at the best evaluations, at SIGTERM or Ctrl-C, and at the end
    c.checkpoint.keep = 2  # number of latest checkpoints to keep
    c.checkpoint.keep_best = 1  # also keep this number of best checkpoints by evaluation; 0: none
    # Rows or code of your own functions that differ from those before a resume are refused, unless this is the value
    # that the error gives.
    c.checkpoint.accept = ""

    c.log = ConfigDict()
    # Steps between samples on the console, in completions.jsonl and in the loggers, beside those of the first and the
    # last step; 0: no samples.
    c.log.completions_every = 25
    # Where numbers go besides metrics.jsonl, any of: tensorboard | wandb | trackio | mlflow, or my.module.function.
    c.log.to = ("tensorboard",)
    c.log.project = ""  # project of W&B and trackio, experiment of MLflow; "": for TensorBoard alone
    c.log.name = ""  # of the run there; "": the name of its workdir
    c.log.tags = ()  # of the run there, any texts
    c.log.profile = ""  # steps to trace, as "3:5", into WORKDIR/profile; "": none
    return c
