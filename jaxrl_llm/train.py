"""GRPO: `python -m jaxrl_llm.train --config configs/grpo.py [--workdir DIR] [--config.field=value]`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import advantages, checks, data, kl, losses, optim, rewards, sharding, update
from jaxrl_llm.checkpoint import Checkpoints, StopSignal, check_workdir, open_workdir
from jaxrl_llm.config import arguments, parse_arguments, resolve
from jaxrl_llm.errors import run_main
from jaxrl_llm.evaluate import evaluate
from jaxrl_llm.metrics import Log, Timer, banner
from jaxrl_llm.models import hf
from jaxrl_llm.rollout.sampler import Sampler
from jaxrl_llm.sampling import Sampling
from jaxrl_llm.structs import Array, Batch, Config, Rollouts


def train(config: Config, workdir: Path) -> None:
    """Runs, or resumes, the run of `config` in `workdir`.

    Raises: UserError, for what a person can put right.
    """
    stop = StopSignal()
    # What can be wrong is found first: config, workdir, mesh, model, data. Nothing is written until then.
    totals = checks.check_train(config)
    check_workdir(workdir, config)
    mesh = sharding.make_mesh(**config.mesh)
    checks.check_batch_fits_mesh(config, mesh, config.prompts_per_update)
    folder = hf.find(config.model.path)
    model = hf.load_model(folder, mesh, dtype=config.model.dtype, remat=config.model.remat)
    tokenizer = hf.load_tokenizer(folder)
    dataset = data.load(config, tokenizer)
    held_out = data.load_held_out(config, tokenizer) if config.eval.every else dataset
    checks.check_vocabulary(model.cfg, tokenizer, dataset, held_out)
    checks.check_positions(config, model.cfg, dataset, held_out)
    params = hf.load_params(folder, model, mesh)

    # The functions of a step.
    functions = {name: resolve(name, rewards) for name in config.reward.functions}
    score_rewards = rewards.make_score(functions, config.reward.weights)
    estimate_advantages = partial(resolve(config.advantage.name, advantages), **arguments(config.advantage))
    loss_fn = resolve(config.loss.name, losses)(**arguments(config.loss))
    kl_estimator = resolve(config.kl.estimator, kl)
    kl_coef = optim.schedule(config.kl.coef, decay=config.kl.decay, end=config.kl.end, total_steps=totals.updates)
    sampling = Sampling(config.rollout.temperature, config.rollout.top_k, config.rollout.top_p)
    engine, examinee = (
        Sampler(
            model, mesh, group_size=group, sampling=how, max_completion_tokens=config.rollout.max_completion_tokens,
            stop_ids=hf.stop_ids(folder, tokenizer), pad_id=tokenizer.pad_token_id,
        )
        for group, how in ((config.group_size, sampling), (1, Sampling(temperature=0)))
    )  # fmt: skip
    optimizer, rate = optim.make_optimizer(totals.updates, **config.optim)
    kl_term = kl_estimator if config.kl.placement == "loss" else None
    objective = update.policy_objective(model, loss_fn, sampling, kl_term, kl_coef)
    ref_params = None if config.kl.placement == "none" else jax.tree.map(jnp.copy, params)
    state, placed = update.init_state(params, optimizer, mesh)
    score = update.make_score(model, sampling, mesh, config.microbatch)
    update_step = update.make_update_step(
        objective, optimizer, mesh, placed, microbatch=config.microbatch,
        aggregate=partial(losses.aggregation_weights, **config.aggregate),
    )  # fmt: skip

    # The run so far.
    collate = partial(data.make_prompts, dataset, pad_id=tokenizer.pad_token_id)
    prompt_iterator = data.iterate(len(dataset.rows), config.prompts_per_step, config.seed, collate)
    began_with = {"model.path": hf.fingerprint(folder), "data.source": dataset.fingerprint()}
    checkpoints = Checkpoints(workdir / "checkpoints", began_with, config.checkpoint)
    start, state = checkpoints.resume(state, prompt_iterator)
    open_workdir(workdir, config)
    banner(f"jaxrl_llm.train: {workdir}", checks.table(config, totals, mesh, model.cfg, dataset, start))
    log = Log(workdir, config.to_dict(), start=start)
    seed = jax.random.key(config.seed)

    def accuracy() -> float:
        examinee.update_weights(state.params)
        scores, _ = evaluate(
            examinee, held_out, config.eval.function, tokenizer, batch=config.prompts_per_step, key=seed
        )
        return float(scores.mean())

    if start == 0 and config.eval.every:
        log.step(0, {"eval/accuracy": accuracy()})
    engine.update_weights(state.params)
    step = start
    while step < config.num_steps and not stop.asked:
        step += 1
        timer = Timer()
        prompts = next(prompt_iterator)
        with timer("rollout"):
            rollouts = engine.generate(prompts, jax.random.fold_in(seed, step))
            sampled = sharding.to_host(rollouts)
        with timer("reward"):
            texts, ids = data.decode(tokenizer, sampled.completions, sampled.completion_mask)
            channels = score_rewards(prompts.rows, texts, ids)
        with timer("score"):
            tokens, mask = sharding.shard_batch((prompts.tokens, prompts.mask), mesh)
            batch = Batch(
                tokens, mask, rollouts.completions, rollouts.completion_mask, rollouts.loss_mask,
                sampler_logprobs=rollouts.logprobs,
            )  # fmt: skip
            old = ref = None
            if totals.updates_per_rollout > 1 or config.kl.placement == "reward":
                old = rollouts.logprobs if engine.exact else score(state.params, batch)
            if ref_params is not None:
                ref = jax.block_until_ready(score(ref_params, batch))
            rewarded = channels["total"]
            if config.kl.placement == "reward":
                channels["kl"] = np.sum(sharding.to_host(kl_estimator(old, ref)) * sampled.loss_mask, axis=-1)
                rewarded = rewarded - float(kl_coef(state.step)) * channels["kl"]
            if totals.updates_per_rollout == 1:
                old = None  # they are those of the update itself
            advantage = sharding.shard_batch(estimate_advantages(rewarded), mesh)
            batch = replace(batch, advantages=advantage, old_logprobs=old, ref_logprobs=ref)
        with timer("update"):
            updates = []
            for rows in minibatches(config, step):
                state, measured = update_step(state, batch, rows)
                updates.append(measured)
            engine.update_weights(state.params)
            updates = sharding.to_host(updates)

        record = summary(sampled, channels, updates, timer.seconds)
        skipped = state.opt_state.total_notfinite  # these did not move the rate's schedule on
        record |= {"learning_rate": rate(state.step - skipped - 1), "kl/coef": kl_coef(state.step - 1)}
        record |= {"updates/skipped": skipped}
        last = step == config.num_steps
        if config.eval.every and (step % config.eval.every == 0 or last):
            record |= {"eval/accuracy": accuracy()}
        log.step(step, record)
        if config.log.completions_every and step % config.log.completions_every == 0:
            log.completions(step, prompts.rows, texts, channels["total"])
        if step % config.checkpoint.every == 0 or "eval/accuracy" in record or last or stop.asked:
            checkpoints.save(step, state, prompt_iterator, record.get("eval/accuracy"))
    checkpoints.close()
    if step >= config.num_steps:
        hf.save(workdir / "hf", state.params, folder)
    log.close(step)


def minibatches(config: Config, step: int) -> Iterator[Array]:
    """Rows of each update of a step: the first epoch in order, later ones shuffled by (seed, step, epoch)."""
    for epoch in range(config.epochs):
        rows = np.arange(config.prompts_per_step)
        if epoch:
            np.random.default_rng((config.seed, step, epoch)).shuffle(rows)
        yield from jnp.asarray(rows.reshape(-1, config.prompts_per_update))


def summary(
    sampled: Rollouts, channels: dict[str, np.ndarray], updates: list[dict[str, Any]], seconds: dict[str, float]
) -> dict[str, Any]:
    """A step's record for the log. The sampler gap is the first update's; what else updates report is averaged."""
    total = channels["total"]
    record: dict[str, Any] = {"reward/mean": total.mean(), "reward/std": total.std()}
    for name, channel in channels.items():
        if name != "total" and not np.isnan(channel).all():  # else it had nothing to say on this batch
            record[f"reward/{name}"] = np.nanmean(channel)
    record |= {"groups/no_signal": np.mean(np.ptp(total, axis=1) == 0)}
    lengths = sampled.completion_mask.sum(axis=-1)
    record |= {"completion/length": lengths.mean(), "completion/length_max": lengths.max()}
    record |= {"completion/truncated": sampled.truncated.mean()}
    record |= {name: np.mean([u[name] for u in updates]) for name in updates[0]}
    record |= {name: value for name, value in updates[0].items() if name.startswith("sampler/")}
    record |= {f"time/{phase}": value for phase, value in seconds.items()}
    whole = sum(seconds.values())
    return record | {"time/step": whole, "tokens_per_second": lengths.sum() / whole}


def main() -> None:
    config, workdir = parse_arguments("jaxrl_llm.train", "Group-relative policy optimisation.")
    train(config, workdir)


if __name__ == "__main__":
    run_main(main)
