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
from jaxrl_llm.config.names import closest, is_call, offered, resolve, split_call
from jaxrl_llm.config.schema import Field, check_call, check_reach
from jaxrl_llm.data import columns, encoding
from jaxrl_llm.data import prompts as data
from jaxrl_llm.data.formats import Columns
from jaxrl_llm.data.image_format import read_format
from jaxrl_llm.data.rows import check_source, is_task
from jaxrl_llm.data.settings import DataSettings, EvalSet, set_name
from jaxrl_llm.errors import Parser, UserError, printable, run_main
from jaxrl_llm.machine import disk, extras, meshes
from jaxrl_llm.machine.compilation import enable_compilation_cache
from jaxrl_llm.models import hf
from jaxrl_llm.models.names import FAMILIES
from jaxrl_llm.recipe import fit
from jaxrl_llm.rollout import scores
from jaxrl_llm.rollout.evaluation import evaluate, whole_batches
from jaxrl_llm.rollout.grading import GradedCompletions, RewardFn
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.named_environments import EpisodeSettings, check_episodes, open_environments
from jaxrl_llm.rollout.samples import CompletionTask, SamplingPlan
from jaxrl_llm.rollout.settings import TIMEOUT
from jaxrl_llm.sandbox import program as sandbox
from jaxrl_llm.session.banner import print_banner
from jaxrl_llm.session.saved_run import SavedRun
from jaxrl_llm.tasks import ANSWERS, REWARDS, SOURCES, owns_loop

COUNTS = ("problems", "samples", "max_prompt_tokens", "max_completion_tokens", "batch")
PIXELS = ("min_pixels", "max_pixels")
LIMITS = (
    dict.fromkeys(COUNTS, Field(int, low=1))
    | dict.fromkeys(PIXELS, Field(int, low=0))
    | {"temperature": Field(float, low=0), "seed": Field(int, low=0, high=2**31 - 1), "timeout": TIMEOUT}
)


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text) if text.lstrip().startswith("{") else None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object such as '{{\"enable_thinking\": false}}'")
    return value


def main() -> None:
    """Samples and judges completions of a model or a checkpoint, and prints the scores."""
    args = parse()
    enable_compilation_cache()
    run = SavedRun(args.run) if args.run else None
    defaults = run_defaults(run, args) if run else model_defaults(args)
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    for name in args.function:
        check_call(name, REWARDS, "--function")
    extract = answer_extractor(args)
    step = run.find(args.step) if run else 0
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        graded, dataset = sample(args, run, step)
    metrics = scores.measure_all(graded, dataset.rows, extract, args.by)
    title = f"{f'step {step} of {args.run}' if run else args.model} on {args.task or args.source}"
    if args.page:
        from jaxrl_llm.tools.report import samples  # it imports plotly

        page = samples.render(title, metrics, graded, dataset)
        with disk.writing_output("--page", args.page):
            args.page.write_text(page, encoding="utf-8")
    if run and args.step == "best" and run.evaluation and args.source == run.evaluation.source:
        warning = f"--step best: step {step} was chosen by these same problems, so its accuracy on them is too high"
        print(printable(f"{warning}: name other problems with --task"), file=sys.stderr)
    if args.json:
        print(json.dumps({"title": title} | metrics, indent=2))
        return
    print_banner(title, scores.result_lines(metrics))
    if args.by:
        for value, part_metrics in metrics["by"]["values"].items():
            print_banner(f"{args.by} = {value}", scores.result_lines(part_metrics))


def sample(args: argparse.Namespace, run: SavedRun | None, step: int) -> tuple[GradedCompletions, data.Dataset]:
    """Samples and judges completions. step: step of the run's checkpoint, 0 without a run.

    Returns the graded completions and the problems. Raises: UserError, naming the flag that does not fit.
    """
    environment = episode_settings(args, run)
    mesh = meshes.make_mesh(**(run.mesh if run else dict(data=1, fsdp=-1, tensor=1)))
    with ExitStack() as resources:
        folder = resources.enter_context(run.model_folder(step)) if run else hf.find_checkpoint(args.model, "--model")
        model = hf.load_model(folder, mesh, family=args.family, dtype=args.dtype)
        if args.family and model.cfg.family != args.family:
            raise UserError(
                f"--family {args.family} has no effect, because this package reads model_type {model.cfg.family!r} "
                "itself: remove the flag"
            )
        tokenizer = encoding.on_day(hf.load_tokenizer(folder), args.today)
        stop_ids = hf.stop_ids(folder, tokenizer)
        environments = open_environments(environment, tokenizer, resources, args.chat_template_args)
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
            prepare_rows=environments.prepare_rows if environments else list,
            columns=Columns(
                *(args.prompt_column, args.answer_column, args.format_prompt, args.image_column, args.image_folder),
                images=read_format(folder, min_pixels=args.min_pixels, max_pixels=args.max_pixels),
            ),
        )
        for function in args.function:
            check_reach(function, REWARDS, "--function")
        dataset = data.check_turn_end(dataset, tokenizer, args.chat_template_args | tools, stop_ids)
        dataset = columns.check(dataset, args.function, "", episodes=environments is not None, convert=args.convert)
        for note in dataset.notes:
            print(printable(f"{args.source}: {note}"))
        data.check_template_args_used("--chat-template-args", args.chat_template_args, dataset)
        if environments:
            environments.check(dataset.rows)
        if args.by:  # checked before the completions are sampled, which takes long
            scores.rows_by_value(dataset.rows, args.by)
        fit.check_vocabulary(model.cfg, tokenizer, dataset)
        free_positions = model.cfg.max_positions - dataset.width
        length = args.max_completion_tokens or min(512, free_positions)
        if not 0 < length <= free_positions:
            raise UserError(
                f"--max-completion-tokens {length}: the model has {model.cfg.max_positions} positions, and the longest "
                f"prompt has {dataset.width} tokens: use at most {free_positions}"
            )
        batch = whole_batches(args.batch, len(dataset.rows), mesh)
        engine = Sampler(
            model,
            mesh,
            max_completion_tokens=length,
            stop_ids=stop_ids,
            pad_id=tokenizer.pad_token_id,
            max_sequences=batch * args.samples,
            observation_tokens=environments.observation_tokens if environments else 0,
        )
        resources.enter_context(closing(engine))
        frozen = partial(hf.load_params, learns=False)
        engine.update_weights(run.policy(step, folder, model, mesh) if run else frozen(folder, model, mesh))
        weights = [1.0] + [0.0] * (len(args.function) - 1)  # the first function judges
        score = resources.enter_context(closing(RewardFn(args.function, weights, args.timeout, field="--timeout")))
        graded = evaluate(
            engine,
            dataset,
            CompletionTask(tokenizer, score, environments),
            SamplingPlan(args.samples, Sampling(args.temperature)),
            batch=batch,
            seed=args.seed,
        )
    return graded, dataset


def answer_extractor(args: argparse.Namespace) -> Callable[[str], Any] | None:
    """Returns the function that extracts the answer from a completion for majority votes; None without such a function.

    The function is --answer, or the function `answer` in the module of the first reward function.
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
    add("--run", type=Path, metavar="WORKDIR", help="a run, which provides the checkpoint and all flags not set here")
    add("--step", default="last", help="the run's checkpoint: a number, best or last (default)")
    add("--task", help="a task (arithmetic, countdown, digits_in_pictures), or a file of rows")
    add("--set", default="", metavar="NAME", help="one of the run's eval.extra_sets (default: the problems of eval)")
    add(
        "--function",
        nargs="+",
        metavar="NAME",
        help="the reward function that judges (default: TASK.accuracy), and further ones, whose means are printed too",
    )
    add(
        "--answer",
        metavar="NAME",
        help="function text -> answer or None, for majority votes, e.g. math.last_box (default: the function `answer` "
        "in the module of the judge, if it has one)",
    )
    add("--by", default="", metavar="COLUMN", help="print also a table for each value of this column of the rows")
    add("--json", action="store_true", help="print all numbers as JSON")
    add("--page", type=Path, metavar="FILE", help="also write an HTML page with tables, completions and scores")
    _add_row_flags(parser)
    add(
        "--chat-template-args",
        type=_json_object,
        metavar="JSON",
        help="arguments of the chat template, e.g. '{\"enable_thinking\": false}'",
    )
    add(
        "--env",
        type=_json_object,
        metavar="JSON",
        help="name and arguments of the environment; with --run, only those that differ from the run",
    )
    add(
        "--turns",
        type=_json_object,
        metavar="JSON",
        help="limits of episodes; with --run, only those that differ from the run",
    )
    add("--problems", type=int, help="number of problems (default: 1000)")
    add("--samples", type=int, default=1, help="completions per problem; more than 1 give pass@k and maj@k")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    add("--max-prompt-tokens", type=int, help="limit; a longer prompt is an error (default: 512)")
    add("--max-completion-tokens", type=int, help="limit (default: 512, or as many as the model's positions allow)")
    add("--batch", type=int, help="problems at a time (default: 128; with --run, as many as a rollout of the run)")
    add(
        "--family",
        metavar="NAME",
        help="your function that reads the model's config.json (with --run, the run's model.family)",
    )
    add("--dtype", choices=("float32", "bfloat16"), help="dtype of activations (default: float32)")
    add("--seed", type=int, default=0)
    add(
        "--timeout",
        type=float,
        default=600.0,
        help="time limit in seconds for judging a batch; 0 = no limit (default: %(default)s)",
    )
    add(
        "--unconfined",
        action="store_true",
        help="run programs of the model without a sandbox, with all your permissions",
    )
    return check_arguments(parser.parse_args())


def _add_row_flags(parser: Parser) -> None:
    """Adds the flags that say how rows become prompts."""
    add = parser.add_argument
    add("--convert", help="function row -> row for files, e.g. gsm8k.convert")
    add(
        "--prompt-column",
        help="column of the prompt (default: found by the names of the columns; with --run, the run's)",
    )
    add("--answer-column", help="column of the answer (default: as for --prompt-column)")
    add(
        "--format-prompt",
        help="jinja template, or a file with one, around a text prompt (default: as for --prompt-column)",
    )
    add("--image-column", help="column of the images (default: images, or image; with --run, the run's)")
    add("--image-folder", help="folder to which paths of images are relative (with --run, the run's)")
    add("--min-pixels", type=int, help="minimum pixels of an image (default: 0 = the model's; with --run, the run's)")
    add("--max-pixels", type=int, help="maximum pixels of an image (default: as for --min-pixels)")


def check_arguments(args: argparse.Namespace) -> argparse.Namespace:
    """Checks the command line, and adds `source`, the rows of --task. Raises: UserError, if the flags do not fit."""
    sandbox.allow_unconfined(args.unconfined)
    for name, field in LIMITS.items():
        value = getattr(args, name)
        if value is not None and (problem := field.problem(value)):
            raise UserError(f"--{name.replace('_', '-')} {problem}")
    if bool(args.model) == bool(args.run):
        raise UserError("exactly one is required: --model, a folder or hub id, or --run, the work directory of a run")
    if args.samples > 1 and args.temperature <= 0:
        raise UserError(
            f"--samples {args.samples} needs --temperature above 0, because all greedy samples of a problem are equal"
        )
    if args.set and (args.model or args.task):
        raise UserError(f"--set {args.set} names an evaluation set of a run: use it with --run and without --task")
    if args.family:
        resolve(args.family, FAMILIES, "--family")
    if args.answer and args.samples < 4:
        raise UserError(
            f"--answer {args.answer} has no effect with --samples {args.samples}: majority votes need at least 4"
        )
    disk.check_output("--page", args.page)
    if args.page:
        extras.require("plotly", "report", "--page")
    if args.model and not args.task:
        raise UserError("--task is missing: name a task (arithmetic, countdown, digits_in_pictures) or a file of rows")
    if args.task:
        # A call such as "reasoning_gym.rows(task='gcd', size=50)" makes the rows itself.
        args.source = f"{args.task}.held_out" if is_task(args.task) and not is_call(args.task) else args.task
        check_task(args.task)
        if args.source == args.task and args.model and not args.function:
            raise UserError(
                f"--task {args.task} names rows alone, so --function must name a reward function that judges the "
                "completions, e.g. math.accuracy"
            )
        check_source("--task", args.source)
    return args


def check_task(task: str) -> None:
    """Raises: UserError, with a similar name, if --task is neither a file, nor a task, nor a module of the user."""
    if not is_task(task) or is_call(task) or f"{task}.held_out" in offered(SOURCES) or _is_module(task):
        return
    judged_tasks = {name.removesuffix(".accuracy") for name in offered(REWARDS) if name.endswith(".accuracy")}
    known_tasks = [name for name in sorted(judged_tasks) if f"{name}.held_out" in offered(SOURCES)]
    module = task.rpartition(".")[0]
    suggestions = [module] if module in known_tasks else closest(task, known_tasks)
    remedy = f"use one of {', '.join(known_tasks)}, or a file of rows"
    hint = f"did you mean {suggestions[0]}?" if suggestions else remedy
    raise UserError(f"--task {task!r} is neither a task nor a file: {hint}")


def _is_module(name: str) -> bool:
    with suppress(ModuleNotFoundError):  # raised if the package of the module does not exist
        return find_spec(name) is not None
    return False


def episode_settings(args: argparse.Namespace, run: SavedRun | None) -> EpisodeSettings:
    """Returns the settings of episodes: the run's sections, of which the command line overrides env and turns.

    Raises: UserError, if a setting does not exist or has a wrong value.
    """
    sections = {name: ((run and run.get(name)) or {}) | (getattr(args, name) or {}) for name in ("env", "turns")}
    sections["environments"] = (not args.env and run and run.get("environments")) or {}
    values = {name: section for name, section in sections.items() if section}
    records.check_fields(records.table(EpisodeSettings, values), values, flatten(values))
    episodes = records.read(EpisodeSettings, values)
    check_episodes(episodes)
    if episodes.env and owns_loop(episodes.env.function):
        raise UserError(
            f"config.env.name = {episodes.env.name!r}: jaxrl evaluate runs no agents: use the evaluation of a run "
            "(config.eval), or jaxrl serve --model WORKDIR/hf"
        )
    return episodes


def model_defaults(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the default values of the flags if the command line names a model."""
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
    """Returns an evaluation set of a run by name, or None if the run evaluates nothing.

    name: "" = the set of eval.source, which decides which checkpoint is best. Raises: UserError, if the name is
    unknown.
    """
    sets = {set_name(section): eval_set for section, eval_set in run.evaluation.sets.items()} if run.evaluation else {}
    if name and name not in sets:
        known_sets = ", ".join(filter(None, sets)) or "none"
        raise UserError(f"--set {name}: the run has no such set in config.eval.extra_sets; its sets are: {known_sets}")
    return sets.get(name)


def run_defaults(run: SavedRun, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the default values of the flags if the command line names a run: the run's evaluation settings.

    Raises: UserError, if the run evaluated nothing and the command line names no problems.
    """
    problems, data = chosen_set(run, args.set), run.section(DataSettings, "data")
    if not problems and not (args.task and (args.function or is_task(args.task))):
        raise UserError("--task is missing, and the run has no section eval: name a task, or a file and --function")
    own_task = args.task and is_task(args.task) and not is_call(args.task)
    if problems and not (problems.functions or own_task or args.function):
        raise UserError(
            "the run was evaluated on preference pairs only, so its config names no function that judges "
            "completions: name a --task, or a --function that judges the completions"
        )
    sequences = run.config["prompts_per_step"] * (run.get("group_size") or 1)  # a run of sft has no group_size
    set_defaults = {}
    if problems:
        set_defaults = {
            "source": problems.source,
            "function": [f"{args.task}.accuracy" if own_task else problems.function],
            "convert": "" if args.task else problems.convert,
            "problems": problems.problems,
        }
    return {
        **model_defaults(args),
        **set_defaults,
        **vars(Columns() if own_task else data.columns),
        **{name: getattr(data, name) for name in PIXELS},
        "max_prompt_tokens": data.max_prompt_tokens,
        "chat_template_args": data.chat_template_args,
        "today": data.today,
        "max_completion_tokens": run.config["rollout"]["max_completion_tokens"],
        # The default batch has as many sequences as a rollout of the run.
        "batch": max(sequences // args.samples, 1),
        "family": run.family,
        "dtype": run.config["model"]["dtype"],
    }


if __name__ == "__main__":
    run_main(main)
