"""How many tokens a clip counts before the policy has moved: `python -m benchmarks.health.rounding [--dtype bfloat16]`.

The embedded model writes completions of 10, 100 and 1,000 tokens. A batch is scored, and updated at a rate of 1e-12.
What differs then is rounding alone: by token, in the ratio of a sequence, and between sampler and trainer.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm
from jaxrl_llm.algorithms import losses
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.learner import forward, optim, update
from jaxrl_llm.machine import meshes, transfers
from jaxrl_llm.models import hf
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.structs import Batch, Prompts

GROUP, OF_AN_UPDATE = 8, 16
LOSSES = {"gspo": (losses.gspo, "sequence_mean"), "ppo_clip": (losses.ppo_clip, "token_mean")}


def measure(dtype: str, length: int, *, prompts: int, scored: int) -> tuple[dict[str, float], float, float]:
    """Clipped shares by loss, and the largest and the mean gap between sampler and trainer.

    prompts: in the batch; scored: so many of them at a time.
    """
    mesh = meshes.make_mesh(data=1, fsdp=1, tensor=1)
    folder = Path(jaxrl_llm.__file__).parent / "assets" / "arithmetic"
    model = hf.load_model(folder, mesh, dtype=dtype, remat="dots")
    params = hf.load_params(folder, model, mesh)
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, model.cfg.vocab_size, (prompts, 8)).astype(np.int32)
    given = Prompts(tokens, np.ones(tokens.shape, bool), [{}] * prompts, np.arange(prompts))
    engine = Sampler(model, mesh, max_completion_tokens=length, stop_ids=(-1,), pad_id=0)  # no token ends one early
    engine.update_weights(params)
    drawn = engine.sample(given, jax.random.key(0), group_size=GROUP, sampling=Sampling())
    mask = drawn.loss_mask
    advantages = np.broadcast_to(rng.normal(size=(prompts, GROUP, 1)), mask.shape).astype(np.float32)
    batch = Batch(tokens, given.mask, drawn.completions, mask, mask, advantages, sampler_logprobs=drawn.logprobs)
    batch = transfers.shard_batch(batch, mesh)
    old = forward.make_logprob_fn(model, Sampling(), mesh, microbatch=scored)(params, batch)
    gaps = np.abs(np.asarray(old) - drawn.logprobs)
    batch = replace(batch, old_logprobs=old)
    clipped = {}
    for name, (loss_fn, mode) in LOSSES.items():
        adamw = optim.make_optimizer(
            1, learning_rate=1e-12, warmup_steps=0, warmup_ratio=0.0, decay="constant", end=0.0, clip_norm=1.0,
            weight_decay=0.0, b1=0.9, b2=0.95, eps=1e-8,
        )  # fmt: skip
        aggregate = partial(losses.aggregation_weights, mode=mode)
        objective = update.policy_objective(model, loss_fn, Sampling())
        first = partial(jax.tree.map, jnp.copy, params)
        learner = update.make_learner(objective, adamw, params, first, mesh, microbatch=0, aggregate=aggregate)
        state = learner.init()
        shares = []
        for rows in np.arange(prompts).reshape(-1, min(OF_AN_UPDATE, prompts)):
            state, metrics = learner.update_step(state, batch, jnp.asarray(rows))
            shares.append(float(metrics["clip/fraction"]))
        clipped[name] = float(np.mean(shares))
    return clipped, float(gaps.max()), float(gaps.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--lengths", type=int, nargs="+", default=(10, 100, 1000))
    parser.add_argument("--prompts", type=int, default=32, help=f"in the batch: a multiple of {OF_AN_UPDATE}, or fewer")
    parser.add_argument("--scored", type=int, default=OF_AN_UPDATE, help="prompts at a time; train takes an update's")
    args = parser.parse_args()
    print(f"{args.dtype}: tokens  clipped by gspo  by ppo_clip  gap of sampler and trainer: largest     mean")
    for length in args.lengths:
        clipped, largest, mean = measure(args.dtype, length, prompts=args.prompts, scored=args.scored)
        gaps = f"{largest:>35.1e}  {mean:.1e}"
        print(f"{length:>16,}  {clipped['gspo']:>15.2%}  {clipped['ppo_clip']:>11.2%}{gaps}", flush=True)


if __name__ == "__main__":
    main()
