"""Accuracy on held-out problems: `jaxrl evaluate --model DIR --task NAME`, or `--run WORKDIR`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext, redirect_stdout, suppress
from datetime import date
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.config import records
from jaxrl_llm.config.load import flatten
from jaxrl_llm.config.names import closest, offered, resolve, split_call
from jaxrl_llm.config.schema import Field, check_call, check_reach
from jaxrl_llm.data import columns, encoding
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.formats import Columns
from jaxrl_llm.data.images import read_format
from jaxrl_llm.data.rows import check_source, is_task
from jaxrl_llm.data.settings import DataSettings, EvalSet, set_name
from jaxrl_llm.errors import Parser, UserError, printable, run_main
from jaxrl_llm.machine import extras, sharding
from jaxrl_llm.machine.compilation import keep_compilations
from jaxrl_llm.models import hf
from jaxrl_llm.models.names import FAMILIES
from jaxrl_llm.recipe import fit
from jaxrl_llm.rollout import scores
from jaxrl_llm.rollout.environments import EpisodeSettings, check_episodes, open_environments
from jaxrl_llm.rollout.evaluation import evaluate, whole_batches
from jaxrl_llm.rollout.grading import Graded, RewardFn
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.samples import CompletionTask, Drawing
from jaxrl_llm.rollout.settings import TIMEOUT
from jaxrl_llm.sandbox import program as sandbox
from jaxrl_llm.session.banner import print_banner
from jaxrl_llm.session.saved_run import SavedRun
from jaxrl_llm.tasks import ANSWERS, REWARDS, SOURCES

COUNTS = ("problems", "samples", "max_prompt_tokens", "max_completion_tokens", "batch")
PIXELS = ("min_pixels", "max_pixels")
LIMITS = (
    dict.fromkeys(COUNTS, Field(int, low=1))
    | dict.fromkeys(PIXELS, Field(int, low=0))
    | {"temperature": Field(float, low=0), "seed": Field(int, low=0, high=2**31 - 1), "timeout": TIMEOUT}
)


def _arguments(text: str) -> dict[str, Any]:
    value = json.loads(text) if text.lstrip().startswith("{") else None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object: give one like '{{\"enable_thinking\": false}}'")
    return value


def main() -> None:
    args = parse()
    keep_compilations()
    run = SavedRun(args.run) if args.run else None
    defaults = settings_of_run(run, args) if run else settings_of_model(args)
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    for name in args.function:
        check_call(name, REWARDS, "--function")
    extract = answer_of(args)
    step = run.find(args.step) if run else 0
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        graded, dataset = sample(args, run, step)
    measured = scores.measure_all(graded, dataset.rows, extract, args.by)
    title = f"{f'step {step} of {args.run}' if run else args.model} on {args.task or args.source}"
    if args.page:
        from jaxrl_llm.tools.report import samples  # it imports plotly

        page = samples.render(title, measured, graded, dataset)
        try:
            args.page.write_text(page, encoding="utf-8")
        except OSError as error:
            raise UserError(f"--page {args.page} cannot be written ({error.strerror}): give another file") from error
    if run and args.step == "best" and run.evaluation and args.source == run.evaluation.source:
        said = f"--step best: these problems chose step {step}, so that its accuracy on them is too high"
        print(printable(f"{said}: give others with --task"), file=sys.stderr)
    if args.json:
        print(json.dumps({"title": title} | measured, indent=2))
        return
    print_banner(title, scores.lines(measured))
    for value, part in measured["by"]["values"].items() if args.by else ():
        print_banner(f"{args.by} = {value}", scores.lines(part))


def sample(args: argparse.Namespace, run: SavedRun | None, step: int) -> tuple[Graded, data.Dataset]:
    """Loads model and problems, and returns the graded completions and the problems. Raises: UserError."""
    environment = environment_of(args, run)
    mesh = sharding.make_mesh(**(run.mesh if run else dict(data=1, fsdp=-1, tensor=1)))
    with ExitStack() as opened:
        folder = opened.enter_context(run.model_folder(step)) if run else hf.find_checkpoint(args.model, "--model")
        model = hf.load_model(folder, mesh, family=args.family, dtype=args.dtype)
        if args.family and model.cfg.family != args.family:
            raise UserError(
                f"--family {args.family} does nothing: this package reads model_type {model.cfg.family!r}: leave it out"
            )
        tokenizer = encoding.on_day(hf.load_tokenizer(folder), args.today)
        stops = hf.stop_ids(folder, tokenizer)
        environments = open_environments(environment, tokenizer, opened, args.chat_template_args)
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
            columns=Columns(
                *(args.prompt_column, args.answer_column, args.format_prompt, args.image_column, args.image_folder),
                images=read_format(folder, min_pixels=args.min_pixels, max_pixels=args.max_pixels),
            ),
        )
        for function in args.function:
            check_reach(function, REWARDS, "--function")
        dataset = data.check_turn_end(dataset, tokenizer, args.chat_template_args | tools, stops)
        dataset = columns.check(dataset, args.function, "", episodes=environments is not None, convert=args.convert)
        for note in dataset.notes:
            print(printable(f"{args.source}: {note}"))
        data.check_template_args_used("--chat-template-args", args.chat_template_args, dataset)
        if environments:
            environments.check(dataset.rows)
        if args.by:  # before the completions, which take long
            scores.split(dataset.rows, args.by)
        fit.check_vocabulary(model.cfg, tokenizer, dataset)
        room = model.cfg.max_positions - dataset.width
        length = args.max_completion_tokens or min(512, room)
        if not 0 < length <= room:
            raise UserError(
                f"--max-completion-tokens {length}: after prompts of {dataset.width} at most {room} fit the model"
            )
        batch = whole_batches(args.batch, len(dataset.rows), mesh)
        engine = Sampler(
            model,
            mesh,
            max_completion_tokens=length,
            stop_ids=stops,
            pad_id=tokenizer.pad_token_id,
            max_sequences=batch * args.samples,
            observation_tokens=environments.observation_tokens if environments else 0,
        )
        frozen = partial(hf.load_params, learns=False)
        engine.update_weights(run.policy(step, folder, model, mesh) if run else frozen(folder, model, mesh))
        weights = [1.0] + [0.0] * (len(args.function) - 1)  # the first function judges
        score = opened.enter_context(closing(RewardFn(args.function, weights, args.timeout, field="--timeout")))
        graded = evaluate(
            engine,
            dataset,
            CompletionTask(tokenizer, score, environments),
            Drawing(args.samples, Sampling(args.temperature)),
            batch=batch,
            seed=args.seed,
        )
    return graded, dataset


def answer_of(args: argparse.Namespace) -> Callable[[str], Any] | None:
    """Returns the function that finds the answer in a completion, for majority votes; None: there is none.

    It is --answer, or the function `answer` in the module of the first reward function.
    """
    if args.answer:
        return resolve(args.answer, ANSWERS, "--answer")
    judge = resolve(split_call(args.function[0])[0], REWARDS, "--function")
    return getattr(sys.modules[judge.__module__], "answer", None)


def parse() -> argparse.Namespace:
    """Parses and checks the command line. Raises: UserError."""
    parser = Parser("jaxrl_llm.evaluate", description=__doc__)
    add = parser.add_argument
    add("--model", help="a Hugging Face folder or hub id")
    add("--run", type=Path, metavar="WORKDIR", help="a run: its checkpoint, and all that is not given here")
    add("--step", default="last", help="the run's checkpoint: a number, best or last (default)")
    add("--task", help="a task (arithmetic, countdown, digits_in_pictures), or a file of rows")
    add("--set", default="", metavar="NAME", help="one of the run's eval.extra_sets (default: the problems of eval)")
    add(
        "--function",
        nargs="+",
        metavar="NAME",
        help="the reward function that judges (default: TASK.accuracy), and more of them, whose means are told too",
    )
    add(
        "--answer",
        metavar="NAME",
        help="function text -> answer or None, for majority votes, e.g. math.last_box (default: the function `answer` "
        "in the module of the judge, if it has one)",
    )
    add("--by", default="", metavar="COLUMN", help="also a table for each value of this column of the rows")
    add("--json", action="store_true", help="print all numbers as JSON")
    add("--page", type=Path, metavar="FILE", help="also write an HTML page with tables, completions and scores")
    add("--convert", help="function row -> row for files, e.g. gsm8k.convert")
    add("--prompt-column", help="column of the prompt (default: as the columns say; of a run, its own)")
    add("--answer-column", help="column that becomes the answer (default: likewise)")
    add("--format-prompt", help="jinja template around a prompt of text, or a file with one (default: likewise)")
    add("--image-column", help="column that holds the pictures (default: images, or image; of a run, its own)")
    add("--image-folder", help="folder that the paths of pictures are relative to (of a run, its own)")
    add("--min-pixels", type=int, help="least pixels of a picture (default: 0, the model's; of a run, its own)")
    add("--max-pixels", type=int, help="most pixels of a picture (default: likewise)")
    add(
        "--chat-template-args",
        type=_arguments,
        metavar="JSON",
        help="of the chat template, e.g. '{\"enable_thinking\": false}'",
    )
    add("--env", type=_arguments, metavar="JSON", help="environment and its arguments; of a run, those that change")
    add("--turns", type=_arguments, metavar="JSON", help="limits of episodes; of a run, those that change")
    add("--problems", type=int, help="how many problems (default: 1000)")
    add("--samples", type=int, default=1, help="completions of each; above 1: pass@k and maj@k")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    add("--max-prompt-tokens", type=int, help="longer ones are an error (default: 512)")
    add("--max-completion-tokens", type=int, help="default: 512, or what the model's positions leave")
    add("--batch", type=int, help="problems at once (default: 128, of a run what one of its rollouts samples)")
    add("--family", metavar="NAME", help="function of yours that reads config.json (of a run, its model.family)")
    add("--dtype", choices=("float32", "bfloat16"), help="of activations (default: float32)")
    add("--seed", type=int, default=0)
    add(
        "--timeout",
        type=float,
        default=600.0,
        help="seconds in which the function judges a batch; 0: no limit (default: %(default)s)",
    )
    add("--unconfined", action="store_true", help="run programs without a sandbox: they can do all that you can")
    return checked(parser.parse_args())


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """Returns the arguments with their source, if they name a task or a file. Raises: UserError, if they do not fit."""
    sandbox.allow_unconfined(args.unconfined)
    for name, field in LIMITS.items():
        value = getattr(args, name)
        if value is not None and (problem := field.problem(value)):
            raise UserError(f"--{name.replace('_', '-')} {problem}")
    if bool(args.model) == bool(args.run):
        raise UserError("give either --model, a folder or hub id, or --run, the workdir of a run")
    if args.samples > 1 and args.temperature <= 0:
        raise UserError("--samples above 1 needs --temperature above 0: greedy samples are all the same")
    if args.set and (args.model or args.task):
        raise UserError(f"--set {args.set} is a set of a run: give it with --run, and without --task")
    if args.family:
        resolve(args.family, FAMILIES, "--family")
    if args.answer and args.samples < 4:
        raise UserError(f"--answer {args.answer} does nothing: majority votes need --samples of 4 or more")
    if args.page and not args.page.parent.is_dir():
        raise UserError(f"--page {args.page}: there is no folder {args.page.parent}: make it, or give another file")
    if args.page:
        extras.require("plotly", "report", "--page")
    if args.model and not args.task:
        raise UserError("--task is missing: give a task (arithmetic, countdown, digits_in_pictures), or a file of rows")
    if args.task:
        args.source = f"{args.task}.held_out" if is_task(args.task) else args.task
        check_task(args.task)
        if args.source == args.task and args.model and not args.function:
            raise UserError("--task is a file: name the judge with --function, e.g. math.accuracy")
        check_source("--task", args.source)
    return args


def check_task(task: str) -> None:
    """Raises: UserError, with a near task, if --task names neither rows nor a module that may have a task."""
    if not is_task(task) or f"{task}.held_out" in offered(SOURCES) or _is_module(task):
        return
    judged = {name.removesuffix(".accuracy") for name in offered(REWARDS) if name.endswith(".accuracy")}
    known = [name for name in sorted(judged) if f"{name}.held_out" in offered(SOURCES)]
    module = task.rpartition(".")[0]
    near = [module] if module in known else closest(task, known)
    hint = f"did you mean {near[0]}?" if near else f"give one of {', '.join(known)}, or a file of rows"
    raise UserError(f"--task {task!r}: there is no such task or file; {hint}")


def _is_module(name: str) -> bool:
    with suppress(ModuleNotFoundError):  # of the package that it is in
        return find_spec(name) is not None
    return False


def environment_of(args: argparse.Namespace, run: SavedRun | None) -> EpisodeSettings:
    """Returns the sections `env` and `turns`: of the run, changed by the command line. Raises: UserError."""
    sections = {name: ((run and run.get(name)) or {}) | (getattr(args, name) or {}) for name in ("env", "turns")}
    values = {name: section for name, section in sections.items() if section}
    records.check_fields(records.table(EpisodeSettings, values), values, flatten(values))
    episodes = records.read(EpisodeSettings, values)
    check_episodes(episodes.env, episodes.turns)
    return episodes


def settings_of_model(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the defaults of the command line for a model's folder."""
    return {
        "function": [f"{args.task}.accuracy"],
        "convert": "",
        **vars(Columns()),
        **dict.fromkeys(PIXELS, 0),
        "problems": 1000,
        "max_prompt_tokens": 512,
        "batch": 128,
        "family": "",
        "dtype": "float32",
        "chat_template_args": {},
        "today": date.today().isoformat(),
    }


def chosen_set(run: SavedRun, name: str) -> EvalSet | None:
    """Returns an evaluation set of a run; "": the one that decides; None: there is none. Raises: UserError."""
    sets = {set_name(section): each for section, each in run.evaluation.sets.items()} if run.evaluation else {}
    if name and name not in sets:
        known = ", ".join(filter(None, sets)) or "none"
        raise UserError(f"--set {name}: the run has no such set in eval.extra_sets; there is {known}")
    return sets.get(name)


def settings_of_run(run: SavedRun, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the defaults of the command line for a run: the settings of its own evaluation.

    Raises: UserError, if the run evaluated nothing, and the command line names no problems.
    """
    problems, data = chosen_set(run, args.set), run.section(DataSettings, "data")
    if not problems and not (args.task and (args.function or is_task(args.task))):
        raise UserError("the run has no section eval: give --task, and --function if that is a file")
    own_task = args.task and is_task(args.task)
    if problems and not (problems.functions or own_task or args.function):
        raise UserError("the run compared pairs, and judged no completion: give --task, or --function for its problems")
    sequences = run.config["prompts_per_step"] * (run.get("group_size") or 1)  # 1: of a run of sft
    asked = {}
    if problems:
        asked = {
            "source": problems.source,
            "function": [f"{args.task}.accuracy" if own_task else problems.function],
            "convert": "" if args.task else problems.convert,
            "problems": problems.problems,
        }
    return {
        **settings_of_model(args),
        **asked,
        **vars(Columns() if own_task else data.columns),
        **{name: getattr(data, name) for name in PIXELS},
        "max_prompt_tokens": data.max_prompt_tokens,
        "chat_template_args": data.chat_template_args,
        "today": data.today,
        "max_completion_tokens": run.config["rollout"]["max_completion_tokens"],
        # The number of sequences at a time is that of a rollout of the run.
        "batch": max(sequences // args.samples, 1),
        "family": run.family,
        "dtype": run.config["model"]["dtype"],
    }


if __name__ == "__main__":
    run_main(main)
