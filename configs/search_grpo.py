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

    # The model that configs/search_sft.py made. It can search, but mostly guesses.
    c.model.path = str(Path(jaxrl_llm.__file__).parent / "assets" / "encyclopedia")
    c.data.source, c.data.max_prompt_tokens = "encyclopedia.train", 32  # harder: encyclopedia.two_hops
    c.eval.source, c.eval.function = "encyclopedia.held_out", "search.exact_match"
    c.eval.problems = 640
    c.reward.functions = ("search.exact_match", "search.f1", "search.answered")
    c.reward.weights = (1.0, 0.0, 0.0)
    c.rollout.max_completion_tokens = 192  # limit of an episode in tokens: all turns, and what the searches find

    # Environment of the episodes: name is a class of jaxrl_llm.tasks, or my.module.Class; the other fields are its
    # arguments.
    c.env = ConfigDict()
    c.env.name = "search.Search"
    c.env.corpus = "encyclopedia.documents"  # documents to index in this process: a task function or a .jsonl file
    c.env.url = ""  # address of a search server (docs/retriever.md), instead of env.corpus; "": none
    c.env.topk = 2  # documents that a search returns
    c.env.most_searches = 4  # searches in an episode; after these the policy is told to answer
    c.env.timeout = 10.0  # seconds for a request to the search server
    c.env.retries = 2  # repetitions of a failed request to the search server

    c.turns = ConfigDict()
    c.turns.most = 6  # limit of turns of the policy in an episode
    c.turns.tokens = 40  # limit of a turn in tokens
    c.turns.observation_tokens = 80  # limit of an answer of the environment in tokens; the rest is cut off
    c.turns.workers = 16  # threads that run environments at the same time
    c.turns.timeout = 60.0  # seconds for a step of an environment; 0: no limit
    return c
