"""GRPO with LoRA (arXiv 2106.09685) on the task of configs/grpo.py: only adapters learn (docs/lora.md).

jaxrl train --config configs/lora.py

Measured with `python -m benchmarks.health.algorithms lora`, 3 seeds: 99.9 % of 1,000 held-out problems, 99.9 % at
least, after 40 steps. 155,648 parameters learn, of 0.8 million.
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs import grpo  # configs/grpo.py explains every other field


def get_config() -> ConfigDict:
    c = grpo.get_config()
    c.num_steps = 40
    c.adapters = ConfigDict(dict(name="lora"))
    c.adapters.rank = 16  # r: columns of A and rows of B
    c.adapters.alpha = 32.0  # the adapters' product is multiplied by alpha / r ...
    c.adapters.rs = False  # ... or, if True, by alpha / sqrt(r): then larger ranks need no other learning rate (rsLoRA)
    # A regular expression. A kernel gets adapters if this is found in its name in the checkpoint, such as
    # self_attn.q_proj or mlp.up_proj. A reference without adapters is the base
    c.adapters.targets = "_proj"
    # Of the kernels of the layers, which do not learn. "": model.dtype. "int8" takes half the memory of bfloat16; each
    # number is rounded to 1/127 of the largest one of its output
    c.adapters.base_dtype = ""
    c.adapters.path = ""  # a folder of PEFT with adapters to start from, of the same settings; "": new ones
    c.optim.learning_rate = 1e-3
    return c
