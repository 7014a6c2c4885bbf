"""GRPO, PPO and their kin: `python -m jaxrl_llm.train --config FILE [--workdir DIR] [--config.field=value]`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import checks, data, disk, kl, losses, optim, rewards, sharding, signals, update
from jaxrl_llm.checkpoint import Checkpoints, check_workdir, has_checkpoint, keep_schedule, open_workdir
from jaxrl_llm.clerk import Clerk
from jaxrl_llm.collect import Collector, Sampled, minibatches, to_batch
from jaxrl_llm.compiling import Compilations, compute_deterministically, keep_compilations
from jaxrl_llm.config import arguments, parse_arguments, resolve
from jaxrl_llm.correction import high_entropy, make_correction
from jaxrl_llm.critic import explained_variance, make_critic
from jaxrl_llm.errors import run_main
from jaxrl_llm.evaluate import evaluate, evaluates, whole_batches
from jaxrl_llm.health import settings, skips
from jaxrl_llm.metrics import Log, Timer, banner
from jaxrl_llm.models import export, hf
from jaxrl_llm.rollout import vllm
from jaxrl_llm.rollout.ahead import Ahead
from jaxrl_llm.rollout.canary import Canary
from jaxrl_llm.rollout.sampler import Sampler
from jaxrl_llm.sampling import Sampling
from jaxrl_llm.stop import SECONDS, Stop
from jaxrl_llm.structs import Config, Rollouts
from jaxrl_llm.teacher import make_teacher


def train(config: Config, workdir: Path, opened: ExitStack, stop: Stop) -> None:
    """Runs, or resumes, the run of `config` in `workdir`; a signal ends it wherever no `stop.later()` is open.

    What it opens is put on `opened`, to be closed in reverse order: the lock last, the checkpoints before it.
    Raises: UserError, for what a person can put right.
    """
    compilations = Compilations()
    cache = keep_compilations()
    # What can be wrong is found first: config, workdir, mesh, model, data. Nothing is written until then.
    keep_schedule(workdir, config)
    totals = checks.check_train(config)
    if config.deterministic:
        compute_deterministically()
    check_workdir(workdir, config)
    opened.enter_context(disk.locked(workdir))
    mesh = sharding.make_mesh(**config.mesh)
    checks.check_batch_fits_mesh(config, mesh, config.prompts_per_update)
    checks.check_one_at_a_time(config, mesh)
    folder = hf.find(config.model.path)
    critic_folder = hf.find(config.critic.path, "critic.path") if "critic" in config and config.critic.path else folder
    teacher_folder = hf.find(config.teacher.path, "teacher.path") if "teacher" in config else None
    model = hf.load_model(folder, mesh, dtype=config.model.dtype, remat=config.model.remat)
    tokenizer = hf.load_tokenizer(folder)
    dataset = data.load(config, tokenizer)
    held_out = data.load_held_out(config, tokenizer) if config.eval.every else dataset
    checks.check_vocabulary(model.cfg, tokenizer, dataset, held_out)
    checks.check_positions(config, model.cfg, dataset, held_out)
    checks.check_sampling(config, model.cfg)
    stops: dict[str, Any] = dict(stop_ids=hf.stop_ids(folder, tokenizer), pad_id=tokenizer.pad_token_id)
    load = partial(hf.load_params, folder, model, mesh)
    params = None if has_checkpoint(workdir / "checkpoints") else load()  # nothing is held twice when a run resumes

    # The functions of a step.
    sampling = Sampling(config.rollout.temperature, config.rollout.top_k, config.rollout.top_p)
    lag = config.rollout.max_lag
    begin_score = partial(rewards.Score, timeout=config.reward.timeout, field="config.reward.timeout")
    judge = opened.enter_context(closing(begin_score(config.reward.functions, config.reward.weights)))
    exam = (config.eval.function,) if config.eval.every else ()
    examine = opened.enter_context(closing(begin_score(exam, (1.0,))))
    asked, estimate_advantages = signals.make_estimate(config)
    estimate_kl = resolve(config.kl.estimator, kl)
    objective = update.policy_objective(
        model, resolve(config.loss.name, losses)(**arguments(config.loss)), sampling,
        kl=estimate_kl if config.kl.placement == "loss" else None, kl_weighted=config.kl.weighted,
        correct=make_correction(off_policy=lag > 0 or config.rollout.engine != "jax", **config.correction),
        off_policy=config.mask.off_policy,
    )  # fmt: skip
    hold = {"kl/to_reward": config.hold.kl_to_reward, "update_size": config.hold.update_size}
    more = optim.objective_coefficients(config, totals.scheduled_updates, totals.sequences_per_update)
    optimizer = optim.make_optimizer(totals.scheduled_updates, hold=hold, more=more, **config.optim)
    shapes, placed = update.abstract_state(model.shapes(), optimizer, mesh)
    make_update_step = partial(
        update.make_update_step, mesh=mesh, microbatch=config.microbatch,
        aggregate=partial(losses.aggregation_weights, **config.aggregate),
    )  # fmt: skip
    update_step = make_update_step(objective, optimizer, state_shardings=placed)
    # As many prompts at a time as in the update: products of other shapes may round otherwise, which shows in a ratio.
    at_once = config.microbatch or config.prompts_per_update
    score = update.make_score(model, sampling, mesh, at_once)
    score_entropy = update.make_score(model, sampling, mesh, at_once, entropy=True)
    teacher = make_teacher(config, teacher_folder, model.cfg, tokenizer, sampling, mesh) if teacher_folder else None
    critic = make_critic(config, critic_folder, model.cfg, mesh, make_update_step) if "critic" in config else None

    # The run so far.
    collate = partial(data.make_prompts, dataset, pad_id=tokenizer.pad_token_id)
    prompt_iterator = data.iterate(len(dataset.rows), config.prompts_per_step, config.seed, collate)
    began_with = {"model.path": hf.fingerprint(folder), "data.source": dataset.fingerprint()}
    if config.eval.every:
        began_with["eval.source"] = held_out.fingerprint()
    if teacher_folder:
        began_with["teacher.path"] = hf.fingerprint(teacher_folder)
    checkpoints = opened.enter_context(closing(Checkpoints(workdir / "checkpoints", began_with, config.checkpoint)))
    moving_ref = bool(config.kl.refresh_every)
    kept = shapes, critic.shapes if critic else None, shapes.params if moving_ref else None
    checkpoints.check_room(kept)
    start, kept, waiting = checkpoints.resume(kept, prompt_iterator)
    if kept:
        state, value_state, ref_params = kept
        if config.kl.placement != "none" and not moving_ref:
            ref_params = load()
    else:
        state, _ = update.init_state(params or load(), optimizer, mesh)
        value_state = critic.start() if critic else None
        ref_params = None if config.kl.placement == "none" else jax.tree.map(jnp.copy, state.params)
    del params
    open_workdir(workdir, config)
    banner(
        f"jaxrl_llm.train: {workdir}",
        [*checks.table(config, totals, mesh, model.cfg, dataset, held_out, start), ("compiled code", cache)],
        lines=settings.warnings(config, totals, model.cfg, mesh.devices.flat[0].platform),
    )
    log = Log(workdir, config.to_dict(), start=start)
    opened.enter_context(closing(log))
    seed = jax.random.key(config.seed)
    canary = None
    if config.rollout.engine == "vllm":
        width = max(dataset.width, held_out.width)
        engine = opened.enter_context(closing(vllm.start(config, workdir, folder, model.cfg, width, **stops)))
        canary = Canary(engine, model, mesh, collate, rows=len(dataset.rows), bound=config.rollout.canary_gap)
    else:
        engine = Sampler(model, mesh, max_completion_tokens=config.rollout.max_completion_tokens, **stops)
    collector = Collector(
        config, engine, sampling, prompt_iterator, collate, tokenizer, judge, greedy="greedy_rewards" in asked
    )

    def sample_for(step: int) -> tuple[Sampled, dict[str, Any], dict[str, Any]]:
        """A batch, metrics, and where the data iterator is after it."""
        made = collector.collect(jax.random.fold_in(seed, step))
        if not lag:
            engine.release()
        return *made, prompt_iterator.get_state()

    def push(params: Any, step: int) -> Rollouts | None:
        engine.update_weights(params, step)
        return canary.ask() if canary else None

    def arrived() -> dict[str, Any]:
        answer = pushed.result()
        return canary.check(answer, state.params) if canary and answer else {}

    def accuracy() -> float:
        pushed.result()  # and then here, not in the thread of the pushes, where a reward could not set an alarm
        batch = whole_batches(totals.sequences_per_step, len(held_out.rows), mesh)
        return float(evaluate(engine, held_out, examine, tokenizer, batch=batch, key=seed)[0].mean())

    def save(accuracy: float | None = None, *, seconds: float | None = None) -> None:
        """The state after step `learned`, and what is sampled ahead of it, which may take so many seconds."""
        nonlocal saved
        clerk.finish()  # what the log says of a step is there before its checkpoint
        batches = ahead.waiting(seconds)
        kept = (state, value_state, ref_params if moving_ref else None)
        waiting = [(collector.keep(of_batch), metrics) for of_batch, metrics, _ in batches]
        checkpoints.save(learned, kept, batches[-1][-1] if batches else position, accuracy, waiting)
        saved = learned

    def finish() -> None:
        """What a signal leaves to do: the line of the last step if its evaluation was cut off, and its checkpoint."""
        if unwritten:
            unwritten({}, None)
        if saved < learned:
            save(seconds=max(SECONDS / 2 - stop.seconds, 0))
        checkpoints.wait()
        if learned and stop.seconds < SECONDS / 2:  # it is less than a checkpoint, and never half-written
            export.save(workdir / "hf", state.params, folder)
        log.end(learned, compilations, stop.used())

    ahead = opened.enter_context(closing(Ahead(sample_for, lag=lag, last=config.num_steps)))
    check = partial(skips.check_skipped, most=config.health.max_skipped, latest=checkpoints.latest)
    clerk = opened.enter_context(closing(Clerk(log, check)))
    learned = saved = start  # steps that are in the state, and those that are in a checkpoint too
    position = prompt_iterator.get_state()  # after the last batch learned from
    unwritten: Callable[[dict, tuple | None], None] | None = None  # writes the log line of step `learned`
    stop.finish = finish
    pushed = ahead.do(push, state.params, start)
    if evaluates(config, start) and log.lacks_evaluation(start):  # the first one, or one that a signal cut off
        late = accuracy()
        with stop.later():
            log.add_evaluation(start, late)
    ahead.begin(start, [(collector.again(arrays), metrics, position) for arrays, metrics in waiting])
    updated: Future[float] | None = None  # when the updates of the step before were done
    for step in range(start + 1, config.num_steps + 1):
        timer = Timer()
        sampled, measured, sampled_to = ahead.next()
        timer.lap("rollout", since=max(timer.began, updated.result() if updated else 0.0))

        # What the device scores, while the host computes rewards.
        batch = sharding.shard_batch(to_batch(sampled, config.rollout.max_completion_tokens), mesh)
        ref = old = None
        if ref_params is not None:
            ref = score(ref_params, batch)
        several = totals.updates_per_rollout > 1  # else the update's own log-probabilities are the old ones
        if several or config.kl.placement == "reward" or "logprobs" in asked:
            old = batch.sampler_logprobs if engine.exact and not lag else score(state.params, batch)
        of_teacher = teacher(batch) if teacher else None
        if config.mask.top_entropy < 1:
            entropy = score_entropy(state.params, batch)
            batch = replace(batch, chosen=high_entropy(entropy, batch.loss_mask, share=config.mask.top_entropy))
        values = critic.score(value_state.params, batch) if critic and value_state else None
        scored = clerk.watch((ref, old, of_teacher, values))

        # Rewards, advantages.
        texts, channels = sampled.judged()
        with_overlong = partial(signals.with_overlong, tokens=config.reward.overlong_tokens)
        channels = with_overlong(channels, sampled.rollouts)
        penalty = np.zeros(sampled.rollouts.loss_mask.shape, np.float32)
        if config.kl.placement == "reward":
            coef = optimizer.coefficients["kl/coef"].value(state.kept["kl/coef"])
            penalty = sharding.to_host(coef * estimate_kl(old, ref)) * sampled.rollouts.loss_mask
        known = signals.of_rewards(channels, penalty, sampled.rollouts.loss_mask, config.reward.functions)
        if sampled.greedy:
            known["greedy_rewards"] = with_overlong(sampled.greedy.judged()[1], sampled.greedy.rollouts)["total"][:, 0]
        wanted = {"loss_mask", *asked} | ({"token_rewards"} if critic else set())
        known = sharding.shard_batch({name: x for name, x in known.items() if name in wanted}, mesh)
        known |= {"values": values, "logprobs": old, "teacher_logprobs": of_teacher}
        if critic:
            batch = replace(
                batch, values=values, returns=critic.targets(known["token_rewards"], values, batch.loss_mask)
            )
        batch = replace(
            batch, advantages=estimate_advantages(known), rewards=sharding.shard_batch(channels["total"], mesh),
            old_logprobs=old if several else None, ref_logprobs=ref,
        )  # fmt: skip
        timer.lap("reward")

        measured = measured | arrived()  # and from here on the engine needs the old parameters no more
        several_rows = list(minibatches(config, step))
        policy_learns = not critic or step > config.critic.warmup_steps
        if critic:  # compiled here, where a signal need not wait for it
            critic.update_step.lower(value_state, batch, several_rows[0]).compile()
        if policy_learns:
            update_step.lower(state, batch, several_rows[0]).compile()
        updates = []
        with stop.later():
            for rows in several_rows:
                of_policy, of_critic = {}, {}
                if critic:
                    value_state, of_critic = critic.update_step(value_state, batch, rows)
                if policy_learns:
                    state, of_policy = update_step(state, batch, rows)
                updates.append(of_policy | {f"critic/{name}": x for name, x in of_critic.items()})
            updated = clerk.watch(updates)
            if moving_ref and step % config.kl.refresh_every == 0:
                ref_params = kl.mixed(ref_params, state.params, config.kl.mix)
            measured |= skips.skipped(state)
            if critic and value_state:
                measured |= {f"critic/{name}": count for name, count in skips.skipped(value_state).items()}
                explained = explained_variance(batch.values, batch.returns, batch.loss_mask)
                measured |= {"critic/explained_variance": explained}
            ahead.used()
            learned, position = step, sampled_to
            timed, on_device = (scored, updated), (updates, measured)
            unwritten = partial(clerk.write, step, timer, timed, on_device, sampled, (channels, penalty))
            pushed = ahead.do(push, state.params, step)  # last: it may run programs of its own

        last = step == config.num_steps
        judged = {"eval/accuracy": accuracy()} if evaluates(config, step) else {}
        shown = config.log.completions_every and step % config.log.completions_every == 0
        sample = (sampled.prompts.rows, texts, channels["total"]) if shown else None
        with stop.later():
            unwritten(judged, sample)
            unwritten = None
            checkpoints.check()
            if step % config.checkpoint.every == 0 or judged or last:
                save(judged.get("eval/accuracy"))
            ahead.learned(step)
    arrived()
    with stop.later():
        clerk.finish()
        checkpoints.wait()
        export.save(workdir / "hf", state.params, folder)
        log.end(learned, compilations)


def main() -> None:
    config, workdir = parse_arguments("jaxrl_llm.train", "Reinforcement learning: GRPO, PPO and their kin.")
    with ExitStack() as opened, Stop(opened) as stop:
        train(config, workdir, opened, stop)


if __name__ == "__main__":
    run_main(main)
