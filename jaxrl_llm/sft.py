"""Supervised fine-tuning: `python -m jaxrl_llm.sft --config configs/sft.py [--workdir DIR] [--config.field=value]`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import checks, data, encoding, losses, optim, rewards, sharding, update
from jaxrl_llm.checkpoint import Checkpoints, StopSignal, check_workdir, open_workdir
from jaxrl_llm.compiling import Compilations, compute_deterministically, keep_compilations
from jaxrl_llm.config import parse_arguments
from jaxrl_llm.errors import UserError, run_main
from jaxrl_llm.evaluate import evaluate
from jaxrl_llm.health import settings, skips
from jaxrl_llm.metrics import Log, Timer, banner
from jaxrl_llm.models import export, fresh, hf
from jaxrl_llm.rollout.sampler import Sampler
from jaxrl_llm.rows import load_rows
from jaxrl_llm.sampling import Sampling
from jaxrl_llm.structs import Batch, Config


def finetune(config: Config, workdir: Path) -> None:
    """Runs, or resumes, the run of `config` in `workdir`; an example is a prompt with one completion (G = 1).

    Raises: UserError, for what a person can put right.
    """
    stop, compilations = StopSignal(), Compilations()
    cache = keep_compilations()
    totals = checks.check_sft(config)
    if config.deterministic:
        compute_deterministically()
    check_workdir(workdir, config)
    mesh = sharding.make_mesh(**config.mesh)
    checks.check_batch_fits_mesh(config, mesh, config.prompts_per_step)
    if config.model.path:
        folder = hf.find(config.model.path)
    else:
        made = TemporaryDirectory()  # the run's own copy is WORKDIR/hf; gone at the end
        folder = Path(made.name)
        rows = load_rows(config.data.source, config.data.convert).rows
        fresh.write_folder(folder, config.model, rows, config.data.completion_column)
    model = hf.load_model(folder, mesh, dtype=config.model.dtype, remat=config.model.remat)
    tokenizer = hf.load_tokenizer(folder)
    dataset = data.load(config, tokenizer)
    held_out = data.load_held_out(config, tokenizer) if config.eval.every else dataset
    checks.check_vocabulary(model.cfg, tokenizer, dataset, held_out)
    checks.check_positions(config, model.cfg, dataset, held_out)
    answers = tokenise_answers(dataset, tokenizer, config)
    if config.model.path:
        params = hf.load_params(folder, model, mesh)
    else:
        init = jax.jit(model.init, out_shardings=sharding.shardings(model.shapes(), mesh))
        params = init(jax.random.key(config.seed))

    examinee = Sampler(
        model, mesh, max_completion_tokens=config.rollout.max_completion_tokens,
        stop_ids=hf.stop_ids(folder, tokenizer), pad_id=tokenizer.pad_token_id,
    )  # fmt: skip
    optimizer = optim.make_optimizer(totals.updates, **config.optim)
    state, placed = update.init_state(params, optimizer, mesh)
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
    start, state, _ = checkpoints.resume(state, batches)
    open_workdir(workdir, config)
    table = checks.table(config, totals, mesh, model.cfg, dataset, held_out, start)
    banner(
        f"jaxrl_llm.sft: {workdir}",
        [*table, ("over-long completions dropped", len(answers) - len(kept)), ("compiled code", cache)],
        lines=settings.warnings(config, totals, model.cfg, mesh.devices.flat[0].platform),
    )
    log = Log(workdir, config.to_dict(), start=start)
    rows = jnp.arange(config.prompts_per_step)
    seed = jax.random.key(config.seed)
    step = start
    while step < config.num_steps and not stop.asked:
        step += 1
        timer = Timer()
        batch = next(batches)
        state, measured = update_step(state, sharding.shard_batch(batch, mesh), rows)
        measured = sharding.to_host(measured)
        timer.lap("update")
        tokens = batch.completion_mask.sum()
        record = measured | {"loss/sft": measured["loss/total"]} | sharding.to_host(skips.skipped(state))
        record |= {"time/step": timer.seconds["update"], "time/update": timer.seconds["update"]}
        record |= {"tokens_per_second": tokens / timer.seconds["update"]}
        last = step == config.num_steps
        if config.eval.every and (step % config.eval.every == 0 or last):
            examinee.update_weights(state.params)
            size, limit = config.prompts_per_step, config.reward.timeout
            examine = rewards.Score((config.eval.function,), (1.0,), limit, field="config.reward.timeout")
            with closing(examine):
                scores, _ = evaluate(examinee, held_out, examine, tokenizer, batch=size, key=seed)
            record |= {"eval/accuracy": float(scores.mean())}
        log.step(step, record)
        skips.check_skipped(step, record, most=config.health.max_skipped, latest=checkpoints.latest)
        if step % config.checkpoint.every == 0 or "eval/accuracy" in record or last or stop.asked:
            checkpoints.save(step, state, batches, record.get("eval/accuracy"))
    checkpoints.close()
    if step >= config.num_steps:
        export.save(workdir / "hf", state.params, folder)
    log.close(step, compilations)


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
    finetune(config, workdir)


if __name__ == "__main__":
    run_main(main)
