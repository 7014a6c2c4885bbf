"""Samples the same prompts again and again, with and without drafts: `python -m benchmarks.speed.drafts [--model DIR]`.

Each call has other random numbers, as the epochs of a run have. The columns are prompts x completions, drafts of a
pass, passes through the model for each token, and the median CPU seconds of a call, also in relation to no drafts. The
first calls are left out, because they compile and have no earlier completions.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import jax
import numpy as np

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.data import prompts as data
from jaxrl_llm.machine import meshes
from jaxrl_llm.models import hf
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.jax.stream import Stream
from jaxrl_llm.structs import Prompts
from jaxrl_llm.tasks import arithmetic

EMBEDDED = Path(hf.__file__).parents[1] / "assets" / "arithmetic"
SHAPES = ((1, 8), (8, 1))  # prompts, and completions of each
FIRST = 2  # calls that are left out


def measure(sampler: Sampler, prompts: Prompts, group_size: int, calls: int) -> tuple[float, float]:
    """Returns passes for each token, and the median CPU seconds of a call."""
    counts, seconds, run = np.zeros(2, int), [], Stream.run

    def counted(stream: Stream) -> None:
        run(stream)
        counts[:] += stream.passes, stream.computed_tokens

    for call in range(FIRST + calls):
        Stream.run = run if call < FIRST else counted
        began = time.process_time()
        try:
            sampler.sample(prompts, jax.random.key(call), group_size=group_size, sampling=Sampling())
        finally:
            Stream.run = run
        seconds.append(time.process_time() - began)
    return counts[0] / max(counts[1], 1), median(seconds[FIRST:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=EMBEDDED, help="folder of a model that adds numbers")
    parser.add_argument("--drafts", type=int, nargs="+", default=[2, 4], help="drafts of a pass")
    parser.add_argument("--tokens", type=int, default=24, help="most tokens of a completion")
    parser.add_argument("--calls", type=int, default=20)
    args = parser.parse_args()
    mesh = meshes.make_mesh(data=1, fsdp=1, tensor=1)
    model, tokenizer = hf.load_model(args.model, mesh), hf.load_tokenizer(args.model)
    params = hf.load_params(args.model, model, mesh)
    dataset = data.tokenize(arithmetic.held_out(), tokenizer, max_prompt_tokens=64, overlong="error")
    pad = tokenizer.pad_token_id
    print("prompts x completions  drafts  passes a token  CPU seconds  over none")
    for count, group_size in SHAPES:
        prompts, without = data.make_prompts(dataset, range(count), pad), 0.0
        for drafts in (0, *args.drafts):
            sampler = Sampler(
                model,
                mesh,
                max_completion_tokens=args.tokens,
                stop_ids=hf.stop_ids(args.model, tokenizer),
                pad_id=pad,
                drafts=drafts,
            )
            sampler.update_weights(params)
            passes, seconds = measure(sampler, prompts, group_size, args.calls)
            without = without or seconds
            print(
                f"{count:7} x {group_size:<11}  {drafts:6}  {passes:14.2f}  {seconds:11.4f}  {seconds / without:9.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
