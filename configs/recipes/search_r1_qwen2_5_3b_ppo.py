"""Search-R1 (arXiv 2503.09516): PPO on questions of NQ and HotpotQA with Qwen2.5-3B and a search server.

Nothing here is measured yet. The data, the corpus and the server that finds documents in it (docs/retriever.md):

pip install -e '.[parquet,retriever]'
hf download PeterJinGo/nq_hotpotqa_train --repo-type dataset --local-dir data/search_r1
hf download PeterJinGo/wiki-18-corpus --repo-type dataset --local-dir data/wiki && gzip -d data/wiki/wiki-18.jsonl.gz
jaxrl serve-retriever --corpus data/wiki/wiki-18.jsonl
jaxrl train --config configs/recipes/search_r1_qwen2_5_3b_ppo.py --workdir runs/search_r1

The settings are those of Search-R1's v0.2 script: 512 prompts in a rollout, 256 in an update, rates 1e-6 and 1e-5, a
warm-up of 286 of 1,005 steps (0.285; "0.95" is the same number of 305), KL penalty 0.001, 4 searches, 3 documents,
500 tokens of a turn and of what is found. What differs from the original, on purpose:

- Updates: the original counts its minibatch in sequences of all completions. With one completion per prompt both make
  2 updates per rollout. With several they differ (search_r1_qwen2_5_3b_grpo.py).
- Sampling: the original samples at top_p 0.95 and scores with the whole distribution. Here top_p is 1.
- Entropy: the original adds 0.001 times the entropy to the objective. Here there is no bonus.
- Masks: tokens that the search finds are left out of the loss, the KL penalty, the critic and the advantages. The
  original leaves them out only of the policy's loss and the KL penalty.
- Tokens: sampled tokens are never encoded again. The original encodes the text of each turn again.
- Search: BM25. The original's best results are with E5, for which `env.url` may name its own server.
"""

from ml_collections import ConfigDict

from jaxrl_llm.configs import search_grpo  # configs/search_grpo.py explains the fields of episodes
from jaxrl_llm.configs.ppo import with_critic


def get_config() -> ConfigDict:
    c = with_critic(with_search(search_grpo.get_config()))
    c.group_size = 1
    c.kl.placement, c.kl.estimator, c.kl.coef = "reward", "k1", 1e-3
    c.advantage.lam = 1.0
    c.critic.warmup_steps = 0
    c.critic.clip = 0.5
    c.critic.optim.learning_rate, c.critic.optim.warmup_steps = 1e-5, 15
    return c


def with_search(c: ConfigDict) -> ConfigDict:
    """Sets what the recipes of Search-R1 have in common."""
    c.num_steps = 1005
    c.prompts_per_step, c.prompts_per_update, c.microbatch = 512, 256, 32
    c.model.path, c.model.dtype, c.model.remat = "Qwen/Qwen2.5-3B", "bfloat16", "full"
    c.data.source, c.data.convert = "data/search_r1/train.parquet", "search_r1.convert"
    c.data.max_prompt_tokens = 512
    c.eval.source, c.eval.convert = "data/search_r1/test.parquet", "search_r1.convert"
    c.eval.problems, c.eval.every = 1000, 50
    c.rollout.max_completion_tokens = 4096
    c.optim.learning_rate, c.optim.warmup_steps, c.optim.decay = 1e-6, 286, "constant"
    c.optim.b2, c.optim.weight_decay = 0.999, 0.01
    c.env.corpus, c.env.url = "", "http://127.0.0.1:8000"
    c.env.topk, c.env.most_searches = 3, 4
    c.turns.most, c.turns.tokens, c.turns.observation_tokens = 5, 500, 500
    c.turns.workers = 64
    c.checkpoint.every = 50
    return c
