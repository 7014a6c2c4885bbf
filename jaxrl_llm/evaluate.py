"""Accuracy on held-out problems: `python -m jaxrl_llm.evaluate --model DIR --task NAME`."""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from math import comb
from typing import Any

import jax
import numpy as np

from jaxrl_llm import checks, data, rewards, sharding, tasks
from jaxrl_llm.compiling import keep_compilations
from jaxrl_llm.config import Field, resolve
from jaxrl_llm.errors import Parser, UserError, run_main
from jaxrl_llm.fields import TRAIN
from jaxrl_llm.metrics import banner
from jaxrl_llm.models import hf
from jaxrl_llm.rollout import Engine
from jaxrl_llm.rollout.sampler import Sampler
from jaxrl_llm.rows import FILES
from jaxrl_llm.sampling import Sampling

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


def evaluate(
    engine: Engine,
    dataset: data.Dataset,
    score: rewards.Score,
    tokenizer: Any,
    *,
    batch: int,
    key: jax.Array,
    samples: int = 1,
    temperature: float = 0.0,
) -> tuple[np.ndarray, list[list[str]]]:
    """Scores [N, G] and texts of G = samples completions for each of the N problems of a data set."""
    scores, texts = [], []
    for i, prompts in enumerate(data.batches(dataset, batch, tokenizer.pad_token_id)):
        rollouts = engine.generate(
            prompts, jax.random.fold_in(key, i), group_size=samples, sampling=Sampling(temperature)
        )
        said, ids = data.decode(tokenizer, rollouts.completions, rollouts.completion_mask)
        scores.append(score(prompts.rows, said, ids)["total"])
        texts += said
    count = len(dataset.rows)  # the last batch was filled up
    return np.concatenate(scores)[:count], texts[:count]


def pass_at(k: int, scores: np.ndarray) -> float:
    """Unbiased pass@k (arXiv 2107.03374) from scores [N, G], G >= k, where 1 is a solution: 1 - C(G-c, k) / C(G, k)."""
    size = scores.shape[1]
    return float(np.mean([1 - comb(size - int(c), k) / comb(size, k) for c in (scores >= 1).sum(axis=1)]))


def _arguments(text: str) -> dict[str, Any]:
    value = json.loads(text) if text.lstrip().startswith("{") else None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object: give one like '{{\"enable_thinking\": false}}'")
    return value


def main() -> None:
    parser = Parser(prog="python -m jaxrl_llm.evaluate", description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face folder or hub id; a run's is WORKDIR/hf")
    parser.add_argument("--task", required=True, help="a task (arithmetic, countdown), or a file of rows")
    parser.add_argument("--function", help="the reward function that judges (default: TASK.accuracy)")
    parser.add_argument("--convert", default="", help="function row -> row for files, e.g. gsm8k.convert")
    parser.add_argument("--chat-template-args", type=_arguments, default={}, metavar="JSON",
                        help="of the chat template, e.g. '{\"enable_thinking\": false}'")  # fmt: skip
    parser.add_argument("--problems", type=int, default=1000, help="how many problems (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=1, help="completions of each; above 1 prints pass@k")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--max-prompt-tokens", type=int, default=512, help="longer ones are an error")
    parser.add_argument("--max-completion-tokens", type=int, help="default: 512, or what the model's positions leave")
    parser.add_argument("--batch", type=int, default=128, help="problems at a time (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="as in the run's config")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds in which the function judges a batch; "
                        "0: no limit (default: %(default)s)")  # fmt: skip
    args = parser.parse_args()
    for name, field in LIMITS.items():
        value = getattr(args, name)
        if value is not None and (problem := field.problem(value)):
            raise UserError(f"--{name.replace('_', '-')} {problem}")
    is_file = args.task.endswith(FILES)
    if is_file and not args.function:
        raise UserError("--task is a file: name the judge with --function, e.g. maths.accuracy")
    if args.samples > 1 and args.temperature <= 0:
        raise UserError("--samples above 1 needs --temperature above 0: greedy samples are all the same")
    if not is_file:
        resolve(f"{args.task}.held_out", tasks, "--task")
    function = args.function or f"{args.task}.accuracy"
    resolve(function, rewards, "--function")

    keep_compilations()
    folder = hf.find(args.model)
    mesh = sharding.make_mesh(data=-1, fsdp=1, tensor=1)
    model, tokenizer = hf.load_model(folder, mesh, dtype=args.dtype), hf.load_tokenizer(folder)
    dataset = data.read(
        args.task if is_file else f"{args.task}.held_out", tokenizer, convert=args.convert, field="--convert",
        problems=args.problems, max_prompt_tokens=args.max_prompt_tokens, overlong="error",
        template_args=args.chat_template_args,
    )  # fmt: skip
    data.check_template_args_used("--chat-template-args", args.chat_template_args, dataset)
    checks.check_vocabulary(model.cfg, tokenizer, dataset)
    room = model.cfg.max_positions - dataset.width
    length = args.max_completion_tokens or min(512, room)
    if not 0 < length <= room:
        raise UserError(
            f"--max-completion-tokens {length}: after prompts of {dataset.width} at most {room} fit the model"
        )
    engine = Sampler(
        model, mesh, max_completion_tokens=length,
        stop_ids=hf.stop_ids(folder, tokenizer), pad_id=tokenizer.pad_token_id,
    )  # fmt: skip
    engine.update_weights(hf.load_params(folder, model, mesh))
    batch = -(-args.batch // mesh.devices.size) * mesh.devices.size
    with closing(rewards.Score((function,), (1.0,), args.timeout, field="--timeout")) as score:
        scores, _ = evaluate(
            engine, dataset, score, tokenizer, batch=batch, key=jax.random.key(args.seed), samples=args.samples,
            temperature=args.temperature,
        )  # fmt: skip
    powers = [2**i for i in range(1, args.samples.bit_length()) if 2**i <= args.samples]
    lines: list[tuple[str, Any]] = [("problems", len(dataset.rows)), ("accuracy", f"{scores.mean():.1%}")]
    banner(f"{args.model} on {args.task}", lines + [(f"pass@{k}", f"{pass_at(k, scores):.1%}") for k in powers])


if __name__ == "__main__":
    run_main(main)
