"""Times this project's GRPO step: `python benchmarks/ours.py MODEL_DIR --steps 5 --microbatch 2`."""

from __future__ import annotations

import argparse
import json
import resource
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workloads import CLIP_NORM, KL_COEF, LEARNING_RATE, PAD, TEMPERATURE, Workload, read, reward
from jaxrl_llm import advantages, kl, losses, optim, sharding, update
from jaxrl_llm.compiling import Compilations, keep_compilations
from jaxrl_llm.models import hf
from jaxrl_llm.packing import pack
from jaxrl_llm.rollout.sampler import Sampler
from jaxrl_llm.sampling import Sampling
from jaxrl_llm.structs import Batch, Prompts, Rollouts


def ceiling() -> float:
    """GFLOP/s of float32 matrix products of 2,048 x 2,048: the best of 10."""
    x = jnp.ones((2048, 2048))
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(x, x))
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        jax.block_until_ready(product(x, x))
        seconds.append(time.perf_counter() - began)
    return 2 * 2048**3 / min(seconds) / 1e9


def rewarded(rollouts: Rollouts) -> np.ndarray:
    """Rewards [B, G]."""
    lengths = rollouts.completion_mask.sum(axis=-1)
    return np.array(
        [
            [reward(row[:n].tolist()) for row, n in zip(rows, ns, strict=True)]
            for rows, ns in zip(rollouts.completions, lengths, strict=True)
        ]
    )


def step_function(workload: Workload, folder: Path, remat: str, microbatch: int, compilations: Compilations):
    """`one_step(step) -> measurements`, of a trainer made from the model in `folder`."""
    mesh = sharding.make_mesh(1, 1, 1)
    model = hf.load_model(folder, mesh, dtype="float32", remat=remat)
    params = hf.load_params(folder, model, mesh)
    sampling = Sampling(TEMPERATURE)
    engine = Sampler(model, mesh, max_completion_tokens=workload.completion_tokens, stop_ids=(), pad_id=PAD)
    optimizer = optim.make_optimizer(
        1000, learning_rate=LEARNING_RATE, warmup_steps=0, warmup_ratio=0.0, decay="constant", end=0.0,
        clip_norm=CLIP_NORM, weight_decay=0.0, b1=0.9, b2=0.999, eps=1e-8,
        more={"kl/coef": optim.constant(KL_COEF)},
    )  # fmt: skip
    objective = update.policy_objective(model, losses.ppo_clip(), sampling, kl=kl.k3)
    ref_params = jax.tree.map(jnp.copy, params)
    state, placed = update.init_state(params, optimizer, mesh)
    score = update.make_score(model, sampling, mesh, microbatch)
    aggregate = partial(losses.aggregation_weights, mode="token_mean")
    make = update.make_update_step
    update_step = make(objective, optimizer, mesh, placed, microbatch=microbatch, aggregate=aggregate)
    engine.update_weights(state.params)

    def one_step(step: int) -> dict:
        nonlocal state
        compiled = compilations.seconds
        clock = [time.perf_counter()]
        ids = np.asarray(workload.prompt_ids(step), np.int32)
        prompts, asked = (
            Prompts(ids, np.ones_like(ids, bool), [], np.arange(len(ids))),
            np.asarray(workload.lengths(step)),
        )
        key = jax.random.fold_in(jax.random.key(0), step)
        rollouts = engine.generate(prompts, key, group_size=workload.group, sampling=sampling, max_tokens=asked)
        engine.release()
        clock.append(time.perf_counter())
        lengths = rollouts.completion_mask.sum(axis=-1)
        np.testing.assert_array_equal(lengths, asked)
        batch = Batch(
            prompts.tokens, prompts.mask, rollouts.completions, rollouts.completion_mask, rollouts.loss_mask,
            sampler_logprobs=rollouts.logprobs, slots=pack(lengths, workload.completion_tokens),
        )  # fmt: skip
        batch = sharding.shard_batch(batch, mesh)
        ref = score(ref_params, batch)
        rewards = rewarded(rollouts)  # a group of one is compared with the batch
        advantage = advantages.grpo(rewards) if workload.group > 1 else rewards - rewards.mean()
        spread = np.where(rollouts.loss_mask, advantage[..., None], 0.0).astype(np.float32)
        spread = sharding.shard_batch(spread, mesh)
        ref.block_until_ready()
        clock.append(time.perf_counter())
        batch = replace(batch, advantages=spread, ref_logprobs=ref)
        state, measured = update_step(state, batch, np.arange(workload.prompts))
        engine.update_weights(state.params)
        measured = sharding.to_host(measured)
        clock.append(time.perf_counter())
        assert np.isfinite(measured["loss/total"])
        assert measured["update_norm"] > 0
        assert measured["sampler/gap_max"] < 1e-4
        assert (measured["kl/ref"] > 1e-9) == (step > 0)
        seconds = dict(zip(("rollout", "score", "update"), np.diff(clock), strict=True))
        return seconds | {
            "total": clock[-1] - clock[0], "tokens": int(lengths.sum()), "compile": compilations.seconds - compiled,
            "gap": float(measured["sampler/gap_max"]),
        }  # fmt: skip

    return one_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--microbatch", type=int, default=1, help="prompts at a time")
    parser.add_argument("--remat", choices=("none", "dots", "full"), default="dots")
    args = parser.parse_args()
    keep_compilations()
    compilations = Compilations()
    one_step = step_function(read(args.model), Path(args.model), args.remat, args.microbatch, compilations)
    first, *steps = [one_step(step) for step in range(args.steps + 1)]
    report = {name: [step[name] for step in steps] for name in first}
    report |= {"name": "jaxrl_llm", "version": {"jax": jax.__version__}, "warmup": first["total"]}
    report |= {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    report |= {"ceiling_gflops": ceiling(), "compilations": str(compilations)}
    report |= {"checks": {"sampler_gap_max": max(report.pop("gap")), "lengths": "as asked"}}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
