"""GRPO on questions that need a search: the policy searches a small encyclopedia, reads, and answers.

pip install -e '.[retriever]'
jaxrl train --config configs/search_grpo.py

Measured with `python -m benchmarks.health.algorithms search_grpo`, 3 seeds: 99.0 % of 640 held-out questions,
98.9 % at least.
"""

from pathlib import Path

from ml_collections import ConfigDict

import jaxrl_llm
from jaxrl_llm.configs import grpo  # configs/grpo.py explains every other field


def get_config() -> ConfigDict:
    c = grpo.get_config()
    c.num_steps = 50
    c.prompts_per_step = c.prompts_per_update = 32

    # Made by configs/search_sft.py. It can search, but mostly guesses.
    c.model.path = str(Path(jaxrl_llm.__file__).parent / "assets" / "encyclopedia")
    c.data.source, c.data.max_prompt_tokens = "encyclopedia.train", 32  # encyclopedia.two_hops: harder ones
    c.eval.source, c.eval.function = "encyclopedia.held_out", "search.exact_match"
    c.eval.problems = 640
    c.reward.functions = ("search.exact_match", "search.f1", "search.answered")
    c.reward.weights = (1.0, 0.0, 0.0)
    c.rollout.max_completion_tokens = 192  # of an episode: all turns and what the searches find

    # What the policy talks to: a class of jaxrl_llm.tasks, or my.module.Class, and its arguments.
    c.env = ConfigDict()
    c.env.name = "search.Search"
    c.env.corpus = "encyclopedia.documents"  # a task function, or a .jsonl file, that is indexed in this process
    c.env.url = ""  # or the address of a server (docs/retriever.md)
    c.env.topk = 2  # documents of a search
    c.env.most_searches = 4  # in an episode; after them the policy is told to answer
    c.env.timeout = 10.0  # seconds for a request to a server
    c.env.retries = 2  # of a request to a server

    c.turns = ConfigDict()
    c.turns.most = 6  # turns of the policy in an episode
    c.turns.tokens = 40  # of a turn
    c.turns.observation_tokens = 80  # of what the environment answers; the rest is cut off
    c.turns.workers = 16  # environments that work at once, in threads
    c.turns.timeout = 60.0  # seconds for a step of an environment; 0: no limit
    return c
