"""Times rollouts of the in-JAX engine alone: `python -m benchmarks.rollouts WORKLOAD [--max-sequences N]`.

Random weights and the lengths of a workload (`benchmarks.workloads`). Each repetition samples one batch; the first two
compile, and are not counted. To compare two states of the code, run it in both checkouts, alternately.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from benchmarks.workloads import PAD, TEMPERATURE, WORKLOADS, Workload
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.machine import sharding
from jaxrl_llm.models import hf
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.structs import Prompts


def prompts_of(workload: Workload, step: int) -> Prompts:
    """The prompts of a step, without rows."""
    tokens = np.array(workload.prompt_ids(step), np.int32)
    return Prompts(tokens, np.ones_like(tokens, bool), [{}] * len(tokens), np.arange(len(tokens), dtype=np.int32))


def timed(workload: Workload, repetitions: int, **engine_settings: Any) -> list[float]:
    """Returns the seconds of each rollout, once everything is compiled. engine_settings: arguments of `Sampler`."""
    mesh = sharding.make_mesh(data=1, fsdp=1, tensor=1)
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(workload.model_config()))
        model = hf.load_model(Path(folder), mesh)
    length = workload.completion_tokens
    # The lengths are given: no token stops.
    engine = Sampler(model, mesh, stop_ids=(), pad_id=PAD, max_completion_tokens=length, **engine_settings)
    engine.update_weights(jax.jit(model.init)(jax.random.key(0)))
    seconds = []
    for step in range(repetitions + 2):
        began = time.perf_counter()
        engine.sample(
            prompts_of(workload, 0),
            jax.random.key(step),
            group_size=workload.group,
            sampling=Sampling(temperature=TEMPERATURE),
            max_tokens=np.array(workload.lengths(0)),
        )
        seconds.append(time.perf_counter() - began)
    return seconds[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--max-sequences", type=int, default=0, help="completions that hold pages at once; 0: all")
    parser.add_argument(
        "--cache", choices=("", "int8"), default="", help="dtype of keys and values; default: the model's"
    )
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    seconds = timed(workload, args.repetitions, max_sequences=args.max_sequences, cache_dtype=args.cache)
    tokens = sum(n for group in workload.lengths(0) for n in group)
    middle = statistics.median(seconds)
    each = " ".join(f"{x:.2f}" for x in seconds)
    print(f"{args.workload}: {middle:.2f} s for {tokens:,} tokens ({tokens / middle:,.0f} a second); each {each}")


if __name__ == "__main__":
    main()
