"""GRPO: `python -m jaxrl_llm.train --config configs/grpo.py [--workdir DIR] [--config.field=value]`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import advantages, checks, data, kl, losses, optim, rewards, sharding, update
from jaxrl_llm.checkpoint import Checkpoints, StopSignal, check_workdir, open_workdir
from jaxrl_llm.compiling import Compilations, keep_compilations
from jaxrl_llm.config import arguments, parse_arguments, resolve
from jaxrl_llm.errors import run_main
from jaxrl_llm.evaluate import evaluate
from jaxrl_llm.metrics import Log, Timer, banner
from jaxrl_llm.models import hf
from jaxrl_llm.packing import pack
from jaxrl_llm.rollout.sampler import Sampler
from jaxrl_llm.sampling import Sampling
from jaxrl_llm.structs import Array, Batch, Config, Rollouts


def train(config: Config, workdir: Path) -> None:
    """Runs, or resumes, the run of `config` in `workdir`.

    Raises: UserError, for what a person can put right.
    """
    stop, compilations = StopSignal(), Compilations()
    cache = keep_compilations()
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
    engine = Sampler(
        model, mesh, max_completion_tokens=config.rollout.max_completion_tokens,
        stop_ids=hf.stop_ids(folder, tokenizer), pad_id=tokenizer.pad_token_id,
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
    banner(
        f"jaxrl_llm.train: {workdir}",
        [*checks.table(config, totals, mesh, model.cfg, dataset, start), ("compiled code", cache)],
    )
    log = Log(workdir, config.to_dict(), start=start)
    seed = jax.random.key(config.seed)

    def accuracy() -> float:
        judge, batch = config.eval.function, config.prompts_per_step
        return float(evaluate(engine, held_out, judge, tokenizer, batch=batch, key=seed)[0].mean())

    engine.update_weights(state.params)
    if start == 0 and config.eval.every:
        log.step(0, {"eval/accuracy": accuracy()})
    clerk = ThreadPoolExecutor(max_workers=1)  # waits for a step's numbers and writes them while the next one runs
    updated: Future[float] | None = None  # when the updates of the step before were done
    written: Future[None] | None = None
    step = start
    while step < config.num_steps and not stop.asked:
        step += 1
        timer = Timer()
        prompts = next(prompt_iterator)
        key = jax.random.fold_in(seed, step)
        sampled = engine.generate(prompts, key, group_size=config.group_size, sampling=sampling)
        engine.release()
        timer.lap("rollout", since=max(timer.began, updated.result() if updated else 0.0))

        lanes = pack(sampled.completion_mask.sum(axis=-1), config.rollout.max_completion_tokens)
        batch = Batch(
            prompts.tokens, prompts.mask, sampled.completions, sampled.completion_mask, sampled.loss_mask,
            sampler_logprobs=sampled.logprobs, slots=lanes,
        )  # fmt: skip
        batch = sharding.shard_batch(batch, mesh)
        old = ref = None
        if ref_params is not None:
            ref = score(ref_params, batch)  # while the host computes rewards
        if totals.updates_per_rollout > 1 or config.kl.placement == "reward":
            old = batch.sampler_logprobs if engine.exact else score(state.params, batch)
        scored = clerk.submit(ready, (ref, old))

        texts, ids = data.decode(tokenizer, sampled.completions, sampled.completion_mask)
        channels = score_rewards(prompts.rows, texts, ids)
        rewarded = channels["total"]
        if config.kl.placement == "reward":
            channels["kl"] = np.sum(sharding.to_host(kl_estimator(old, ref)) * sampled.loss_mask, axis=-1)
            rewarded = rewarded - float(kl_coef(state.step)) * channels["kl"]
        if totals.updates_per_rollout == 1:
            old = None  # they are those of the update itself
        advantage = sharding.shard_batch(estimate_advantages(rewarded), mesh)
        batch = replace(batch, advantages=advantage, old_logprobs=old, ref_logprobs=ref)
        timer.lap("reward")

        updates = []
        for rows in minibatches(config, step):
            state, measured = update_step(state, batch, rows)
            updates.append(measured)
        updated = clerk.submit(ready, updates)
        engine.update_weights(state.params)
        skipped = state.opt_state.total_notfinite  # these did not move the rate's schedule on
        rates = {"learning_rate": rate(state.step - skipped - 1), "kl/coef": kl_coef(state.step - 1)}
        rates |= {"updates/skipped": skipped + 0}  # a number of its own: the state is given to the next update

        last = step == config.num_steps
        score_now = config.eval.every and (step % config.eval.every == 0 or last)
        judged = {"eval/accuracy": accuracy()} if score_now else {}
        sample = (prompts.rows, texts, channels["total"])
        shown = config.log.completions_every and step % config.log.completions_every == 0
        if written:
            written.result()  # a line that could not be written ends the run here
        written = clerk.submit(
            write_step, log, step, timer, (scored, updated), (updates, rates), sampled, channels, judged,
            sample if shown else None,
        )  # fmt: skip
        if step % config.checkpoint.every == 0 or judged or last or stop.asked:
            written.result()  # what the log says of a step is there before its checkpoint
            checkpoints.save(step, state, prompt_iterator, judged.get("eval/accuracy"))
    clerk.shutdown()
    if written:
        written.result()
    checkpoints.close()
    if step >= config.num_steps:
        hf.save(workdir / "hf", state.params, folder)
    log.close(step, compilations)


def ready(arrays: Any) -> float:
    """When the arrays were there."""
    jax.block_until_ready(arrays)
    return time.perf_counter()


def write_step(
    log: Log,
    step: int,
    timer: Timer,
    done: tuple[Future[float], Future[float]],
    measured: tuple[list[dict[str, Any]], dict[str, Any]],
    sampled: Rollouts,
    channels: dict[str, np.ndarray],
    judged: dict[str, Any],
    sample: tuple | None,
) -> None:
    """Waits for the numbers of a step and writes its line; done: when it was scored, and updated."""
    scored, updated = (future.result() for future in done)
    timer.lap("score", since=timer.at["rollout"], at=scored)
    timer.lap("update", since=max(scored, timer.at["reward"]), at=updated)
    updates, rates = sharding.to_host(measured)
    log.step(step, summary(sampled, channels, updates, timer) | rates | judged)
    if sample:
        log.completions(step, *sample)


def minibatches(config: Config, step: int) -> Iterator[Array]:
    """Rows of each update of a step: the first epoch in order, later ones shuffled by (seed, step, epoch)."""
    for epoch in range(config.epochs):
        rows = np.arange(config.prompts_per_step)
        if epoch:
            np.random.default_rng((config.seed, step, epoch)).shuffle(rows)
        yield from jnp.asarray(rows.reshape(-1, config.prompts_per_update))


def summary(
    sampled: Rollouts, channels: dict[str, np.ndarray], updates: list[dict[str, Any]], timer: Timer
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
    record |= {f"time/{phase}": value for phase, value in timer.seconds.items()}
    return record | {"time/step": timer.whole, "tokens_per_second": lengths.sum() / timer.whole}


def main() -> None:
    config, workdir = parse_arguments("jaxrl_llm.train", "Group-relative policy optimisation.")
    train(config, workdir)


if __name__ == "__main__":
    run_main(main)
