"""Supervised fine-tuning of a new model on the procedural task; this made the embedded model.

jaxrl sft --config configs/sft.py

Measured: loss 0.1154 and greedy accuracy 11.0 % at the end (quick answers are right to the nearest ten; at step 1 of
the main job 30 % of sampled ones think first, 40 % are right, seed 1), about ten minutes on two CPU cores.
"""

from ml_collections import ConfigDict

from jaxrl_llm.config.sections import Section


def get_config() -> ConfigDict:
    c = Section()  # configs/grpo.py explains the fields without a comment
    c.seed = 0  # random seed for the first parameters and the order of examples
    c.deterministic = False  # True: on a GPU, use only operations that repeat bit for bit
    c.num_steps = 1500  # optimizer steps
    c.schedule_steps = 0  # steps that warm-up and decay cover; 0: num_steps. A resumed run keeps its first value
    c.prompts_per_step = 256  # examples in one optimizer step
    c.microbatch = 0  # examples in memory at a time; 0: all. It never changes the gradient

    c.model = ConfigDict()
    c.model.path = ""  # a folder or hub id to start from; "": a new Qwen2 model of the sizes below
    c.model.family = ""  # function that reads config.json, for a family that this package lacks; "": none
    c.model.dtype = "float32"
    c.model.remat = "none"
    c.model.vision = "learns"  # the tower that reads images, if the model has one: learns | frozen
    # Sizes of a new model, with the names of a Hugging Face config.json. Only used with model.path = "".
    c.model.hidden_size = 128
    c.model.num_hidden_layers = 4
    c.model.num_attention_heads = 4
    c.model.num_key_value_heads = 2
    c.model.intermediate_size = 384
    # A tower that reads images, of Qwen2.5-VL's kind: its sizes, as in configs/pictures_sft.py. None: text alone
    c.model.vision_config = None
    c.model.vocabulary = 0  # most tokens, whose merges are learned from the data; 0: one token for each byte

    c.data = ConfigDict()
    c.data.source = "arithmetic.demonstrations"
    c.data.convert = ""
    c.data.completion_column = "completion"  # column with the text to learn; of a pair, with the better one
    # Of a pair, the column with the worse completion, for dpo and simpo (docs/preferences.md); "": no pairs.
    c.data.rejected_column = ""
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
    c.data.max_prompt_tokens = 16
    c.data.overlong = "drop"
    c.data.chat_template_args = ConfigDict()
    c.data.today = ""

    c.eval = ConfigDict()
    c.eval.every = 250
    c.eval.source = "arithmetic.held_out"
    c.eval.convert = ""
    c.eval.problems = 1000
    # "preference": nothing is sampled; the accuracy is the share of pairs of eval.source in which the chosen completion
    # has the larger reward
    c.eval.function = "arithmetic.accuracy"
    c.eval.extra_sets = ConfigDict()  # further sets, as in configs/grpo.py
    c.eval.patience = 0

    # timeout: seconds that eval.function may take for one batch; 0: no limit. unconfined: as in configs/grpo.py.
    c.reward = ConfigDict(dict(timeout=600.0, unconfined=False))

    # cross_entropy: of completions. Of pairs: dpo(beta=0.1, label_smoothing=0.0, nll_coef=0.0), and
    # simpo(beta=2.0, gamma=1.0, label_smoothing=0.0, nll_coef=0.0), which has no reference (configs/dpo.py)
    c.loss = ConfigDict(dict(name="cross_entropy"))

    c.aggregate = ConfigDict(dict(mode="token_mean", constant_length=0))

    # Limit of a completion in tokens. Longer examples are dropped and counted.
    c.rollout = ConfigDict(dict(max_completion_tokens=12))

    c.optim = ConfigDict()
    c.optim.learning_rate = 2e-3
    c.optim.warmup_steps = 100
    c.optim.warmup_ratio = 0.0
    c.optim.decay = "cosine"
    c.optim.end = 0.0
    c.optim.clip_norm = 1.0
    c.optim.weight_decay = 0.1
    c.optim.b1 = 0.9
    c.optim.b2 = 0.95
    c.optim.eps = 1e-8
    c.optim.momentum_dtype = "float32"
    c.optim.gradient_dtype = "float32"

    c.mesh = ConfigDict(dict(data=1, fsdp=-1, tensor=1))

    c.health = ConfigDict()
    c.health.max_skipped = 10  # skipped updates in a row that stop the run; 0: none do
    c.health.hang_minutes = 60.0
    c.health.stop = ("updates_skipped",)

    c.checkpoint = ConfigDict(dict(every=200, keep=1, keep_best=0))
    # Rows or code of your own functions that differ from those before a resume are refused, unless this is the value
    # that the error gives.
    c.checkpoint.accept = ""

    c.log = ConfigDict(dict(to=("tensorboard",), project="", name="", tags=(), profile=""))
    return c
