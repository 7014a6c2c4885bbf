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
    c.seed = 0  # random seed of the order of prompts and of sampling
    # True: on a GPU, use only operations that repeat bit for bit; their cost in speed is not measured. A CPU always
    # repeats bit for bit.
    c.deterministic = False
    c.num_steps = 100  # training steps; each step samples one rollout of prompts_per_step prompts and learns from it
    c.schedule_steps = 0  # steps that warm-up and decay cover; 0: num_steps. A resumed run keeps its first value

    # Batch sizes. One optimizer step (an update) learns from prompts_per_update x group_size sequences.
    c.prompts_per_step = 64  # B: prompts in a rollout
    c.group_size = 8  # G: completions per prompt
    c.prompts_per_update = 64  # prompts of the rollout in one update
    c.epochs = 1  # passes over a rollout, so that it has B / prompts_per_update x epochs updates
    c.microbatch = 0  # prompts in memory at once during an update; 0: all. It saves memory and changes no gradient

    c.model = ConfigDict()
    c.model.path = str(Path(jaxrl_llm.__file__).parent / "assets" / "arithmetic")  # model folder or hub id
    # Function that reads config.json for a model family that this package lacks, e.g. my.module.function
    # (docs/models.md). "": model_type in config.json names a family of this package.
    c.model.family = ""
    c.model.dtype = "float32"  # dtype of activations; parameters and optimizer state are always float32
    c.model.remat = "dots"  # activations that the backward pass recomputes to save memory: none | dots | full
    # Parts in which the completions of a prompt are scored and learned from, one after the other. More parts need less
    # memory and one more forward pass. The number of parts changes no gradient.
    c.model.row_parts = 1
    c.model.vision = "learns"  # whether the vision tower of a vision-language model is trained: learns | frozen

    c.data = ConfigDict()
    # Source of prompts: a task of the package, a .jsonl, .json, .csv or .parquet file, a data set of the hub
    # (owner/name@split), or my.module.function.
    c.data.source = "arithmetic.train"
    # Function from a row to a row with a column "prompt", e.g. gsm8k.convert; it drops a row by returning None.
    # "": use rows as they are.
    c.data.convert = ""
    # The next two fields name columns of rows without a convert function. "": detect the columns, including those of
    # TRL, veRL and EasyR1 (docs/data.md).
    c.data.prompt_column = ""  # column with the prompt
    c.data.answer_column = ""  # column that reward functions get as "answer"
    # Jinja template of the user's message, or a file with one; {{ content }} is the prompt's text. "": no template.
    c.data.format_prompt = ""
    # The next four fields are for images in rows, which only a vision-language model reads (docs/data.md). Leave them
    # unchanged in a run of text.
    c.data.image_column = ""  # column with the images; "": images, or image
    c.data.image_folder = ""  # folder that must contain the image files, and that their paths start from; "": any file
    # Smallest number of pixels of an image; a smaller image is enlarged. 0: the model's own limit.
    c.data.min_pixels = 0
    # Largest number of pixels of an image; a larger image is reduced. 0: the model's own limit. The tokens of an image
    # count as prompt tokens.
    c.data.max_pixels = 0
    c.data.max_prompt_tokens = 16  # limit of a prompt in tokens; a longer prompt is never cut (see data.overlong)
    c.data.overlong = "drop"  # prompts above the limit: drop (leave them out and count them) | error (stop the run)
    c.data.chat_template_args = ConfigDict()  # arguments of the model's chat template, e.g. enable_thinking = False
    # Date for a chat template that asks for today's date, e.g. 2026-11-25. "": the day on which the run was started,
    # also after a resume.
    c.data.today = ""
    # Several sources instead of data.source, which must then be "". Each has a name and the fields of this example:
    # c.data.mixture.math = ConfigDict(dict(source="math.parquet", convert="", weight=2.0)). Prompts are drawn in
    # proportion to the weights.
    c.data.mixture = ConfigDict()
    # Column of numbers, such as a difficulty, that sorts the prompts of an epoch, smallest first. In a mixture each
    # source is sorted. "": prompts are shuffled.
    c.data.order_column = ""
    # Curriculum that skips prompts without signal. dict(skip=0.9): probability to skip a prompt whose completions all
    # had the same reward at its last visit. None: no curriculum.
    c.data.curriculum = None

    c.eval = ConfigDict()  # greedy evaluation during the run; None: no evaluation
    c.eval.every = 10  # steps between evaluations; a run also evaluates before its first step and at its end
    c.eval.source = "arithmetic.held_out"  # source of the evaluation problems, as for data.source
    c.eval.convert = ""  # convert function of the evaluation problems, as for data.convert; "": none
    c.eval.problems = 1000  # number of problems: the first of the source, with one greedy completion each
    c.eval.function = "arithmetic.accuracy"  # reward function whose mean is eval/accuracy, as in reward.functions
    # Further evaluation sets, each with a name: c.eval.extra_sets.code = ConfigDict(dict(source="code.jsonl",
    # convert="", function="code.accuracy", problems=500)) is logged as eval/code/accuracy. Only the set of eval.source
    # decides which checkpoint is best, and when eval.patience ends the run.
    c.eval.extra_sets = ConfigDict()
    c.eval.patience = 0  # evaluations in a row without a new best accuracy that end the run early; 0: never

    c.reward = ConfigDict()
    # Reward functions: names of this package, or my.module.function with TRL's signature. A name may have arguments, as
    # in "gsm8k.accuracy(method='flexible')" (docs/rewards.md).
    c.reward.functions = ("arithmetic.accuracy", "arithmetic.thought")
    c.reward.weights = (1.0, 0.0)  # weight of each function in the reward; 0: the function is only logged

    # Seconds that a reward function, or eval.function, may take for one batch; a slower one stops the run.
    # 0: no limit, and the functions run in the trainer's process, as debuggers and functions on JAX's devices need
    # (docs/rewards.md).
    c.reward.timeout = 600.0
    # Whether untrusted code of the policy (code.accuracy, python.Python, tools.run_python) runs without bubblewrap.
    # True is for machines that grant no namespaces: such code can do all that the trainer's user can (docs/rewards.md).
    c.reward.unconfined = False
    # Tokens before the limit of a completion over which its overlong penalty grows from 0 to 1 (DAPO). 0: no penalty.
    c.reward.overlong_tokens = 0
    # A reward model adds weight x its score to the reward (docs/rewards.md). Without this section there is none:
    # c.reward_model = ConfigDict(dict(path="a folder or a hub id", weight=1.0))

    # Advantage estimator: name is a function of jaxrl_llm.algorithms.advantages, or my.module.function; the other
    # fields are its arguments. normalize: standard deviation that divides the advantages: group | batch | none.
    # epsilon: number that is added to this deviation.
    c.advantage = ConfigDict(dict(name="grpo", normalize="group", epsilon=1e-4))

    # Loss: name is a function of jaxrl_llm.algorithms.losses, or my.module.function; the other fields are its
    # arguments. The importance ratio is clipped to 1 - clip_low ... 1 + clip_high. delta: upper bound of the ratio for
    # A < 0; 0: no bound. With one update per rollout, as here, the ratio is 1 and nothing is clipped.
    c.loss = ConfigDict(dict(name="ppo_clip", clip_low=0.2, clip_high=0.2, delta=0.0))

    c.aggregate = ConfigDict()
    c.aggregate.mode = "token_mean"  # reduction of token losses: token_mean | sequence_mean | sequence_sum | constant
    c.aggregate.constant_length = 0  # tokens by which mode "constant" divides each sequence; 0: for the other modes

    c.kl = ConfigDict()  # KL penalty to the reference model; None: no penalty and no reference model
    c.kl.placement = "loss"  # where the penalty acts: reward (subtracted from it) | loss (added to it)
    c.kl.estimator = "k3"  # k1 (only in the reward) | k2 | k3 | k3_weighted (only in the loss: k3 times pi / pi_old)
    c.kl.coef = 1e-3  # coefficient of the penalty, at the start
    c.kl.decay = "constant"  # schedule of the coefficient: constant | linear | cosine
    c.kl.end = 0.0  # coefficient at the last update, with a linear or cosine decay
    # Adaptive coefficient, instead of kl.decay. dict(target=0.01, horizon=10_000): mean KL per token to hold, and
    # about the number of sequences in which the coefficient adapts. None: not adaptive.
    c.kl.adaptive = None
    # Reference model that moves towards the policy. dict(every=100, mix=1.0): steps between two moves, and the size of
    # a move: (1 - mix) reference + mix policy. None: the reference never moves.
    c.kl.refresh = None

    # Entropy bonus. dict(coef=1e-3): its coefficient, at the start. With adaptive=dict(target=0.3, step=1e-4,
    # most=5e-3) in it, the coefficient grows by `step` after an update with entropy at or below the target, else
    # shrinks by `step`, within 0 and `most`. None: no bonus.
    c.entropy = None

    c.mask = ConfigDict()
    c.mask.truncated = False  # True: leave out completions that the token limit cut
    c.mask.top_entropy = 1.0  # share of tokens in the policy loss: those with the highest entropy; 1: all tokens
    # Bound of mean log(pi_sampler / pi); a completion with A < 0 above it is left out. 0: none is left out.
    c.mask.off_policy = 0.0

    # Importance weights pi_old / pi_sampler, for tokens that another engine or older weights sampled.
    # level: what gets one weight: token | sequence | geometric (geometric mean of a sequence). action: none | truncate
    # (to high) | mask (to 0 outside low ... high) | auto (truncate if there are such tokens, else none).
    c.importance = ConfigDict(dict(level="token", action="auto", low=0.0, high=2.0))

    c.rollout = ConfigDict()
    c.rollout.max_completion_tokens = 12  # C: limit of a completion in tokens
    c.rollout.temperature = 1.0  # sampling temperature; log-probabilities in training use it too, as top_k and top_p
    c.rollout.top_k = 0  # number of most likely tokens to sample from; 0: all
    c.rollout.top_p = 1.0  # total probability of the most likely tokens to sample from; 1: all
    c.rollout.max_lag = 0  # steps that sampling may run ahead of learning; 0: sampling and learning take turns
    # Most rounds of fresh prompts that replace groups whose completions all have the same reward (DAPO). 0: none.
    c.rollout.resample_rounds = 0
    # Partial rollouts: groups that are open beyond the prompts_per_step groups of a step. A step takes the groups that
    # are complete first, and the next step continues the others with its weights. So no step waits for the longest
    # completion. At most prompts_per_step; 0: none. In-JAX engine only.
    c.rollout.partial = 0
    # Partial rollouts: most steps from the one that begins a group to the one that learns from it; a step waits for a
    # group that is so old. 0: no bound.
    c.rollout.max_age = 4

    # Rollout engine: name is jax, vllm (configs/grpo_vllm.py explains its fields) or my.module.function; the other
    # fields are its arguments.
    # devices: number of devices, over all hosts, that only sample; mesh covers the other devices. With rollout.max_lag
    # = 1 they sample the next batch while the others learn (docs/performance.md). 0: sampling and learning share all.
    # max_sequences: completions that hold pages of the key-value cache at once; the others wait. 0: no limit but pages.
    # pages: pages of 64 tokens (128 on a TPU) on each device. If none is free, the youngest completion is recomputed
    # later. 0: as many as completions of the largest length need, and as fit into the memory of an accelerator.
    # weights: dtype of the sampler's weights. int8: half the memory of bfloat16, with one scale per output of a kernel;
    # importance weights correct for the rounding. "": the model's dtype.
    # cache: dtype of keys and values. int8: about half the memory of bfloat16, with one scale per token and head.
    # "": the model's dtype.
    # drafts: most tokens that a pass through the model verifies in advance, guessed from other completions of the
    # prompt. They change no token. Only decode programs for few completions have drafts. 0: none.
    c.engine = ConfigDict(dict(name="jax", devices=0, max_sequences=0, pages=0, weights="", cache="", drafts=0))

    c.optim = ConfigDict()  # AdamW optimizer of the policy
    c.optim.learning_rate = 1e-4  # learning rate after the warm-up
    c.optim.warmup_steps = 5  # updates of the linear warm-up; 0: warmup_ratio decides
    c.optim.warmup_ratio = 0.0  # warm-up as a share of all updates; 0: warmup_steps decides
    c.optim.decay = "linear"  # schedule after the warm-up: constant | linear | cosine
    c.optim.end = 0.0  # learning rate at the end of a linear or cosine decay
    c.optim.clip_norm = 1.0  # largest norm of the whole gradient; 0: no clipping
    c.optim.weight_decay = 0.0  # weight decay of matrices; 0: none
    c.optim.b1 = 0.9  # decay rate of the mean of gradients
    c.optim.b2 = 0.95  # decay rate of the mean of squared gradients
    c.optim.eps = 1e-8  # number that is added to the denominator of an update
    c.optim.momentum_dtype = "float32"  # dtype of the mean of gradients: float32 | bfloat16 (saves 2 bytes a parameter)
    c.optim.gradient_dtype = "float32"  # dtype of the sum over microbatches: float32 | bfloat16 (saves 2 as well)

    # True: keep arrays in the host's memory while no program uses them. reference: parameters of the reference and of
    # teachers. optimizer: the two means of AdamW.
    c.host_memory = ConfigDict(dict(reference=False, optimizer=False))

    # Number of devices on each axis of the mesh; -1: all that are left. Devices of engine.devices are not in the mesh.
    c.mesh = ConfigDict(dict(data=1, fsdp=-1, tensor=1))

    c.health = ConfigDict()
    # Skipped updates in a row that stop the run; 0: never. An update is skipped if its gradient is not finite or no
    # token is trained.
    c.health.max_skipped = 10
    # Further reasons to skip an update: gradient_spike (its norm is ten times the usual one) | sampler_mismatch (other
    # weights than those that learn have sampled).
    c.health.skip = ()
    # Health rules (docs/health.md) whose finding ends the run. Findings of all other rules are only reported.
    c.health.stop = ("updates_skipped",)
    # Rollback to a checkpoint. dict(rules=("reward_collapse",), most=3, learning_rate=0.5, warmup_steps=5): at a
    # finding of these rules the run restores a checkpoint before it and continues with other samples of the same
    # prompts, at most `most` times. learning_rate: factor of the rate at each rollback. warmup_steps: updates of a new
    # warm-up. None: no rollback.
    c.health.rollback = None
    # Minutes without progress, or ten median steps if they are longer, after which the command ends with exit code 75,
    # which means "start it again": a host, a disk or a collective hangs. 0: it waits for ever (docs/pods.md).
    c.health.hang_minutes = 60.0
    # True: a new run tests itself at step 0 (docs/health.md). The test changes no number of the run.
    c.health.self_test = True

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 25  # steps between checkpoints; more are saved at best evaluations, at a signal and at the end
    c.checkpoint.keep = 2  # number of latest checkpoints to keep
    c.checkpoint.keep_best = 1  # number of best checkpoints by evaluation to keep as well; 0: none
    # Token that lets a run resume with changed rows or changed functions of yours; the error that refuses them prints
    # it. "": such changes are refused.
    c.checkpoint.accept = ""

    c.log = ConfigDict()
    # Steps between samples on the console, in completions.jsonl and in the loggers; the first and the last step are
    # always included. 0: no samples.
    c.log.completions_every = 25
    # Steps from one file of samples to the next: 25 keeps those of steps 1, 26, 51 and so on in WORKDIR/samples, for
    # `jaxrl replay` of steps with a judge, tools, a clock or vLLM (docs/replay.md). 0: no files.
    c.log.keep_samples = 0
    # Loggers besides metrics.jsonl, any of: tensorboard | wandb | trackio | mlflow, or my.module.function.
    c.log.to = ("tensorboard",)
    c.log.project = ""  # project of W&B and trackio, experiment of MLflow; "": no such logger is used
    c.log.name = ""  # name of the run in the loggers; "": the name of its work directory
    c.log.tags = ()  # texts that mark the run in the loggers
    c.log.profile = ""  # steps to trace into WORKDIR/profile, as "3:5"; "": none
    return c
