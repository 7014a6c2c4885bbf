"""Accuracy on held-out problems: `python -m jaxrl_llm.evaluate --model DIR --task NAME`, or `--run WORKDIR`."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack, closing
from functools import partial
from math import comb
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl_llm import compatibility, distributed, envs, rewards, sharding
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.banner import print_banner
from jaxrl_llm.compilation import keep_compilations
from jaxrl_llm.config.fields import TRAIN, TURNS
from jaxrl_llm.config.names import resolve
from jaxrl_llm.config.schema import Field, check_call, check_fields
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.formats import Columns
from jaxrl_llm.data.rows import check_source, is_task
from jaxrl_llm.envs.batch import open_environments
from jaxrl_llm.errors import Parser, UserError, run_main
from jaxrl_llm.models import hf
from jaxrl_llm.rewards.reward_fn import RewardFn
from jaxrl_llm.rollout.protocol import Engine
from jaxrl_llm.rollout.sampler import Sampler
from jaxrl_llm.rollout.samples import Task
from jaxrl_llm.saved_run import SavedRun
from jaxrl_llm.structs import Config

LIMITS = {
    "problems": Field(int, low=1),
    "samples": Field(int, low=1),
    "temperature": Field(float, low=0),
    "max_prompt_tokens": Field(int, low=1),
    "max_completion_tokens": Field(int, low=1),
    "batch": Field(int, low=1),
    "seed": Field(int, low=0, high=2**31 - 1),
    "timeout": TRAIN["reward.timeout"],
}


def whole_batches(sequences: int, problems: int, mesh: Mesh) -> int:
    """Returns the problems per batch: min(sequences, problems), rounded up to the same number on each device."""
    devices = sharding.prompt_shards(mesh)
    return -(-min(sequences, problems) // devices) * devices


def evaluate(
    engine: Engine,
    dataset: data.Dataset,
    task: Task,
    *,
    batch: int,
    key: jax.Array,
    samples: int = 1,
    temperature: float = 0.0,
) -> tuple[np.ndarray, list[list[str]]]:
    """Returns scores [N, G] and texts of G = samples completions for each of the N problems of a data set.

    A completion for which the function returns None has the score 0.
    """
    scores, texts = [], []
    for i, prompts in enumerate(data.batches(dataset, batch, task.tokenizer.pad_token_id)):
        rollouts = task.sample(engine, prompts, jax.random.fold_in(key, i), samples, Sampling(temperature))
        graded = task.grade(prompts, rollouts)
        scores.append(distributed.gather(np.nan_to_num(graded.channels["total"])))
        texts += [group for part in distributed.exchange(graded.texts) for group in part]
    count = len(dataset.rows)  # without the rows that fill the last batch
    return np.concatenate(scores)[:count], texts[:count]


def pass_at(k: int, scores: np.ndarray) -> float:
    """Unbiased pass@k (arXiv 2107.03374) from scores [N, G], G >= k: the mean of 1 - C(G-c, k) / C(G, k).

    c is the number of solutions of a problem: completions with a score of 1 or more.
    """
    size = scores.shape[1]
    return float(np.mean([1 - comb(size - int(c), k) / comb(size, k) for c in (scores >= 1).sum(axis=1)]))


def _arguments(text: str) -> dict[str, Any]:
    value = json.loads(text) if text.lstrip().startswith("{") else None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object: give one like '{{\"enable_thinking\": false}}'")
    return value


def main() -> None:
    args = parse()
    keep_compilations()
    run = SavedRun(args.run) if args.run else None
    defaults = of_run(run.config, args) if run else of_model(args)
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    check_call(args.function, rewards, "--function")
    environment = environment_of(args, run)
    mesh = sharding.make_mesh(**(run.config.mesh if run else dict(data=1, fsdp=-1, tensor=1)))
    with ExitStack() as opened:
        step = run.find(args.step) if run else 0
        folder = opened.enter_context(run.model_folder(step)) if run else hf.find(args.model)
        model, tokenizer = hf.load_model(folder, mesh, dtype=args.dtype), hf.load_tokenizer(folder)
        stops = hf.stop_ids(folder, tokenizer)
        environments = open_environments(environment, tokenizer, opened)
        tools = {"tools": environments.schemas} if environments and environments.schemas else {}
        dataset = data.read(
            args.source,
            tokenizer,
            convert=args.convert,
            field="--convert",
            problems=args.problems,
            max_prompt_tokens=args.max_prompt_tokens,
            overlong="error",
            template_args=args.chat_template_args | tools,
            columns=Columns(args.prompt_column, args.answer_column, args.format_prompt),
        )
        data.check_template_args_used("--chat-template-args", args.chat_template_args, dataset)
        compatibility.check_vocabulary(model.cfg, tokenizer, dataset)
        room = model.cfg.max_positions - dataset.width
        length = args.max_completion_tokens or min(512, room)
        if not 0 < length <= room:
            raise UserError(
                f"--max-completion-tokens {length}: after prompts of {dataset.width} at most {room} fit the model"
            )
        engine = Sampler(model, mesh, max_completion_tokens=length, stop_ids=stops, pad_id=tokenizer.pad_token_id)
        frozen = partial(hf.load_params, learns=False)
        engine.update_weights(run.policy(step, folder, model, mesh) if run else frozen(folder, model, mesh))
        score = opened.enter_context(closing(RewardFn((args.function,), (1.0,), args.timeout, field="--timeout")))
        batch = whole_batches(args.batch, len(dataset.rows), mesh)
        scores, _ = evaluate(
            engine,
            dataset,
            Task(tokenizer, score, environments),
            batch=batch,
            key=jax.random.key(args.seed),
            samples=args.samples,
            temperature=args.temperature,
        )
    powers = [2**i for i in range(1, args.samples.bit_length()) if 2**i <= args.samples]
    lines: list[tuple[str, Any]] = [("problems", len(dataset.rows)), ("accuracy", f"{scores.mean():.1%}")]
    what = f"step {step} of {args.run}" if run else args.model
    print_banner(
        f"{what} on {args.task or args.source}", lines + [(f"pass@{k}", f"{pass_at(k, scores):.1%}") for k in powers]
    )


def parse() -> argparse.Namespace:
    """Parses and checks the command line. Raises: UserError."""
    parser = Parser(prog="python -m jaxrl_llm.evaluate", description=__doc__)
    add = parser.add_argument
    add("--model", help="a Hugging Face folder or hub id")
    add("--run", type=Path, metavar="WORKDIR", help="a run: its checkpoint, and all that is not given here")
    add("--step", default="last", help="the run's checkpoint: a number, best or last (default)")
    add("--task", help="a task (arithmetic, countdown), or a file of rows")
    add("--function", help="the reward function that judges (default: TASK.accuracy)")
    add("--convert", help="function row -> row for files, e.g. gsm8k.convert")
    add("--prompt-column", help="column of the prompt (default: as the columns say; of a run, its own)")
    add("--answer-column", help="column that becomes the answer (default: likewise)")
    add("--format-prompt", help="jinja template around a prompt of text, or a file with one (default: likewise)")
    add(
        "--chat-template-args",
        type=_arguments,
        metavar="JSON",
        help="of the chat template, e.g. '{\"enable_thinking\": false}'",
    )
    add("--env", type=_arguments, metavar="JSON", help="environment and its arguments; of a run, those that change")
    add("--turns", type=_arguments, metavar="JSON", help="limits of episodes; of a run, those that change")
    add("--problems", type=int, help="how many problems (default: 1000)")
    add("--samples", type=int, default=1, help="completions of each; above 1 prints pass@k")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    add("--max-prompt-tokens", type=int, help="longer ones are an error (default: 512)")
    add("--max-completion-tokens", type=int, help="default: 512, or what the model's positions leave")
    add("--batch", type=int, help="problems at a time (default: 128, of a run what one of its rollouts samples)")
    add("--dtype", choices=("float32", "bfloat16"), help="of activations (default: float32)")
    add("--seed", type=int, default=0)
    add(
        "--timeout",
        type=float,
        default=600.0,
        help="seconds in which the function judges a batch; 0: no limit (default: %(default)s)",
    )
    args = parser.parse_args()
    for name, field in LIMITS.items():
        value = getattr(args, name)
        if value is not None and (problem := field.problem(value)):
            raise UserError(f"--{name.replace('_', '-')} {problem}")
    if bool(args.model) == bool(args.run):
        raise UserError("give either --model, a folder or hub id, or --run, the workdir of a run")
    if args.samples > 1 and args.temperature <= 0:
        raise UserError("--samples above 1 needs --temperature above 0: greedy samples are all the same")
    if args.model and not args.task:
        raise UserError("--task is missing: give a task (arithmetic, countdown), or a file of rows")
    if args.task:
        args.source = f"{args.task}.held_out" if is_task(args.task) else args.task
        if args.source == args.task and args.model and not args.function:
            raise UserError("--task is a file: name the judge with --function, e.g. math.accuracy")
        check_source("--task", args.source)
    return args


def environment_of(args: argparse.Namespace, run: SavedRun | None) -> Config:
    """Returns the sections `env` and `turns`: of the run, changed by the command line. Raises: UserError."""
    before = run.config.to_dict() if run else {}
    sections = {name: before.get(name, {}) | (getattr(args, name) or {}) for name in ("env", "turns")}
    config = ConfigDict({name: section for name, section in sections.items() if section})
    if config:
        check_fields(config, TURNS, {"env": envs})
    return config


def of_model(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the defaults of the command line for a model's folder."""
    return {
        "function": f"{args.task}.accuracy",
        "convert": "",
        **vars(Columns()),
        "problems": 1000,
        "max_prompt_tokens": 512,
        "batch": 128,
        "dtype": "float32",
        "chat_template_args": {},
    }


def of_run(config: Config, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the defaults of the command line for a run: the settings of its own evaluation."""
    group = config.group_size if "group_size" in config else 1
    own_task = args.task and is_task(args.task)
    return {
        "source": config.eval.source,
        "function": f"{args.task}.accuracy" if own_task else config.eval.function,
        "convert": "" if args.task else config.eval.convert,
        **vars(Columns() if own_task else data.columns_of(config)),
        "problems": config.eval.problems,
        "max_prompt_tokens": config.data.max_prompt_tokens,
        "chat_template_args": config.data.chat_template_args.to_dict(),
        "max_completion_tokens": config.rollout.max_completion_tokens,
        # As many sequences at a time as in a rollout of the run.
        "batch": max(config.prompts_per_step * group // args.samples, 1),
        "dtype": config.model.dtype,
    }


if __name__ == "__main__":
    run_main(main)
