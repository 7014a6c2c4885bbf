"""Supervised fine-tuning: `python -m jaxrl_llm.sft --config configs/sft.py [--workdir DIR] [--config.field=value]`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import checks, data, disk, encoding, losses, optim, rewards, sharding, update
from jaxrl_llm.checkpoint import Checkpoints, check_workdir, has_checkpoint, keep_schedule, open_workdir
from jaxrl_llm.compiling import Compilations, compute_deterministically, keep_compilations
from jaxrl_llm.config import parse_arguments
from jaxrl_llm.errors import UserError, run_main
from jaxrl_llm.evaluate import evaluate, evaluates, whole_batches
from jaxrl_llm.health import settings, skips
from jaxrl_llm.metrics import Log, Timer, banner
from jaxrl_llm.models import export, hf
from jaxrl_llm.rollout.sampler import Sampler
from jaxrl_llm.runs import model_folder
from jaxrl_llm.sampling import Sampling
from jaxrl_llm.stop import SECONDS, Stop
from jaxrl_llm.structs import Batch, Config, PyTree


def finetune(config: Config, workdir: Path, opened: ExitStack, stop: Stop) -> None:
    """Runs, or resumes, the run of `config` in `workdir`; an example is a prompt with one completion (G = 1).

    `opened` and `stop` are as in `train.train`. Raises: UserError, for what a person can put right.
    """
    compilations = Compilations()
    cache = keep_compilations()
    keep_schedule(workdir, config)
    totals = checks.check_sft(config)
    if config.deterministic:
        compute_deterministically()
    check_workdir(workdir, config)
    opened.enter_context(disk.locked(workdir))
    mesh = sharding.make_mesh(**config.mesh)
    checks.check_batch_fits_mesh(config, mesh, config.prompts_per_step)
    folder = opened.enter_context(model_folder(config))
    model = hf.load_model(folder, mesh, dtype=config.model.dtype, remat=config.model.remat)
    tokenizer = hf.load_tokenizer(folder)
    dataset = data.load(config, tokenizer)
    held_out = data.load_held_out(config, tokenizer) if config.eval.every else dataset
    checks.check_vocabulary(model.cfg, tokenizer, dataset, held_out)
    checks.check_positions(config, model.cfg, dataset, held_out)
    answers = tokenise_answers(dataset, tokenizer, config)

    def first_params() -> PyTree:
        if config.model.path:
            return hf.load_params(folder, model, mesh)
        init = jax.jit(model.init, out_shardings=sharding.shardings(model.shapes(), mesh))
        return init(jax.random.key(config.seed))

    params = None if has_checkpoint(workdir / "checkpoints") else first_params()

    examinee = Sampler(
        model, mesh, max_completion_tokens=config.rollout.max_completion_tokens,
        stop_ids=hf.stop_ids(folder, tokenizer), pad_id=tokenizer.pad_token_id,
    )  # fmt: skip
    optimizer = optim.make_optimizer(totals.scheduled_updates, **config.optim)
    shapes, placed = update.abstract_state(model.shapes(), optimizer, mesh)
    update_step = update.make_update_step(
        update.policy_objective(model, losses.cross_entropy(), Sampling()),
        optimizer, mesh, placed, microbatch=config.microbatch,
        aggregate=partial(losses.aggregation_weights, **config.aggregate),
    )  # fmt: skip

    kept = [i for i, answer in enumerate(answers) if answer]
    collate = partial(make_batch, dataset, answers, kept, config.rollout.max_completion_tokens, tokenizer.pad_token_id)
    batches = data.iterate(len(kept), config.prompts_per_step, config.seed, collate)
    began_with = {"model.path": hf.fingerprint(folder), "data.source": dataset.fingerprint()}
    if config.eval.every:
        began_with["eval.source"] = held_out.fingerprint()
    checkpoints = Checkpoints(workdir / "checkpoints", began_with, config.checkpoint)
    opened.enter_context(closing(checkpoints))
    checkpoints.check_room(shapes)
    start, state, _ = checkpoints.resume(shapes, batches)
    state = state or update.init_state(params or first_params(), optimizer, mesh)[0]
    del params
    open_workdir(workdir, config)
    table = checks.table(config, totals, mesh, model.cfg, dataset, held_out, start)
    banner(
        f"jaxrl_llm.sft: {workdir}",
        [*table, ("over-long completions dropped", len(answers) - len(kept)), ("compiled code", cache)],
        lines=settings.warnings(config, totals, model.cfg, mesh.devices.flat[0].platform),
    )
    log = Log(workdir, config.to_dict(), start=start)
    opened.enter_context(closing(log))
    rows = jnp.arange(config.prompts_per_step)
    learned = saved = start  # steps that are in the state, and those that are in a checkpoint too
    position = batches.get_state()  # after the last batch learned from
    unwritten: dict[str, Any] = {}  # the log record of step `learned`, if its evaluation is not done

    exam = (config.eval.function,) if config.eval.every else ()
    examine = rewards.Score(exam, (1.0,), config.reward.timeout, field="config.reward.timeout")
    opened.enter_context(closing(examine))

    def accuracy() -> float:
        examinee.update_weights(state.params)
        size, key = whole_batches(config.prompts_per_step, len(held_out.rows), mesh), jax.random.key(config.seed)
        return float(evaluate(examinee, held_out, examine, tokenizer, batch=size, key=key)[0].mean())

    def finish() -> None:
        """What a signal leaves to do."""
        if unwritten:
            log.step(learned, unwritten)
        if saved < learned:
            checkpoints.save(learned, state, position, None)
        checkpoints.wait()
        if learned and stop.seconds < SECONDS / 2:
            export.save(workdir / "hf", state.params, folder)
        log.end(learned, compilations, stop.used())

    stop.finish = finish
    if start and evaluates(config, start) and log.lacks_evaluation(start):  # a signal cut it off
        late = accuracy()
        with stop.later():
            log.add_evaluation(start, late)
    for step in range(start + 1, config.num_steps + 1):
        timer = Timer()
        batch = next(batches)
        on_device = sharding.shard_batch(batch, mesh)
        update_step.lower(state, on_device, rows).compile()  # here, where a signal need not wait for it
        with stop.later():
            state, measured = update_step(state, on_device, rows)
            measured = sharding.to_host(measured)
            timer.lap("update")
            tokens = batch.completion_mask.sum()
            record = measured | {"loss/sft": measured["loss/total"]} | sharding.to_host(skips.skipped(state))
            record |= {"time/step": timer.seconds["update"], "time/update": timer.seconds["update"]}
            record |= {"tokens_per_second": tokens / timer.seconds["update"]}
            learned, position, unwritten = step, batches.get_state(), record
        last = step == config.num_steps
        if evaluates(config, step):
            record |= {"eval/accuracy": accuracy()}
        with stop.later():
            log.step(step, record)
            unwritten = {}
            skips.check_skipped(step, record, most=config.health.max_skipped, latest=checkpoints.latest)
            checkpoints.check()
            if step % config.checkpoint.every == 0 or "eval/accuracy" in record or last:
                checkpoints.save(step, state, position, record.get("eval/accuracy"))
                saved = step
    with stop.later():
        checkpoints.wait()
        export.save(workdir / "hf", state.params, folder)
        log.end(learned, compilations)


def tokenise_answers(dataset: data.Dataset, tokenizer: Any, config: Config) -> list[list[int]]:
    """Token ids of each row's completion with the end token; empty where it is above the limit."""
    column, limit = config.data.completion_column, config.rollout.max_completion_tokens
    for number, row in zip(dataset.numbers, dataset.rows, strict=True):
        if not isinstance(row.get(column), str):
            raise UserError(f"{config.data.source} row {number}: {column!r} is {row.get(column)!r}: make it text")
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end token: name its eos_token in tokenizer_config.json")
    texts = [row[column] for row in dataset.rows]
    ids = encoding.encode(texts, tokenizer, config.data.source, numbers=dataset.numbers)
    ids = [[*tokens.tolist(), tokenizer.eos_token_id] for tokens in ids]
    if all(len(tokens) > limit for tokens in ids):
        raise UserError(f"all completions are longer than rollout.max_completion_tokens = {limit}: raise it")
    return [tokens if len(tokens) <= limit else [] for tokens in ids]


def make_batch(
    dataset: data.Dataset, answers: list[list[int]], kept: list[int], length: int, pad_id: int, indices: Sequence[int]
) -> Batch:
    """Examples kept[indices] as a Batch with G = 1, on the host."""
    rows = [kept[i] for i in indices]
    prompts = data.make_prompts(dataset, rows, pad_id)
    completions = np.full((len(rows), 1, length), pad_id, np.int32)
    mask = np.zeros(completions.shape, bool)
    for b, i in enumerate(rows):
        completions[b, 0, : len(answers[i])] = answers[i]
        mask[b, 0, : len(answers[i])] = True
    return Batch(prompts.tokens, prompts.mask, completions, mask, mask)


def main() -> None:
    config, workdir = parse_arguments("jaxrl_llm.sft", "Supervised fine-tuning.")
    with ExitStack() as opened, Stop(opened) as stop:
        finetune(config, workdir, opened, stop)


if __name__ == "__main__":
    run_main(main)
