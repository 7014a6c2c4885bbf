"""What a generous limit costs: the same tokens are sampled under a near limit and under a far one.

    python -m benchmarks.speed.limits

Each line has the CPU seconds under both limits and their ratio. 1.0 means that the limit costs nothing. Further lines
have the ratios of sampling, scoring and a gradient with top-k or top-p to those without them, with a large vocabulary.
The last line compares two runs: one has 400 short prompts, and in the other run one of the 400 is long. It has the
median CPU seconds of a step and the largest memory of each run.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import train
from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.config.load import load
from jaxrl_llm.learner.forward import completion_logprobs
from jaxrl_llm.machine.meshes import make_mesh
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.rope import default_rope
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.structs import Batch, Prompts, PyTree

CONFIG = DecoderConfig(
    family="qwen2",
    vocab_size=8192, width=256, layers=6, heads=8, kv_heads=2, head_dim=32, mlp_width=704, max_positions=8192,
    rope=default_rope(1e4, 32), norm_eps=1e-6, tied_head=True, qkv_bias=True, qk_norm=False,
)  # fmt: skip
WIDE_CONFIG = replace(CONFIG, vocab_size=151_936, layers=4)
TRUNCATIONS = Sampling(top_k=50), Sampling(top_p=0.95), Sampling(top_k=20, top_p=0.95)
TRUNCATED = 24  # tokens of a completion under these
GROUPS, GROUP_SIZE, PROMPT = 8, 8, 16
PROMPTS, LONG = 400, 256
TURN, OBSERVATION = 8, 100  # tokens of an episode's turn, and of each of its two observations


class TwoObservations:
    """Environments that answer the first two turns of each episode with OBSERVATION tokens, and end the third."""

    turn_tokens = OBSERVATION

    def __init__(self) -> None:
        self.answers = np.zeros(GROUPS * GROUP_SIZE, int)

    def possible_turn_ends(self, vocabulary_size: int) -> np.ndarray:
        """Returns False for all tokens, so that a round does not stop for the host to check them."""
        return np.zeros(vocabulary_size, bool)

    def stops(self, episode: int) -> tuple[str, ...]:
        """Returns no strings."""
        return ()

    def find_turn_ends(self, episodes: Sequence[int], turns: Sequence[list[int]]) -> list[int]:
        """Returns TURN for turns that have so many tokens, and 0 for shorter ones."""
        return [TURN * (len(turn) >= TURN) for turn in turns]

    def answer(self, episode: int, turn: list[int]) -> Future[list[int] | None]:
        """Returns an observation, or None after the third turn."""
        answered: Future[list[int] | None] = Future()
        self.answers[episode] += 1
        answered.set_result(None if self.answers[episode] > 2 else [1 + episode] * OBSERVATION)
        return answered


def sampling_call(limit: int, tokens: int = 0, *, episodes: bool = False) -> Callable[[], object]:
    """Returns a function that samples. limit: rollout.max_completion_tokens. tokens: of each completion, 0 = limit."""
    model, mesh = Decoder(CONFIG), make_mesh(data=1, fsdp=1, tensor=1)
    sampler = Sampler(
        model,
        mesh,
        max_completion_tokens=limit,
        stop_ids=(),
        pad_id=0,
        observation_tokens=OBSERVATION if episodes else 0,
    )
    sampler.update_weights(jax.jit(model.init)(jax.random.key(0)))
    prompt_tokens = np.random.default_rng(0).integers(1, CONFIG.vocab_size, (GROUPS, PROMPT)).astype(np.int32)
    prompts = Prompts(prompt_tokens, np.ones_like(prompt_tokens, bool), [], np.arange(GROUPS))
    call = partial(sampler.sample, prompts, jax.random.key(0), group_size=GROUP_SIZE, sampling=Sampling())
    if episodes:
        return lambda: call(environments=TwoObservations())
    return partial(call, max_tokens=np.full((GROUPS, GROUP_SIZE), tokens or limit))


def truncation_calls(sampling: Sampling) -> list[Callable[[], object]]:
    """Returns functions that sample, score and differentiate completions of a model with a large vocabulary."""
    model, mesh = Decoder(WIDE_CONFIG), make_mesh(data=1, fsdp=1, tensor=1)
    params = jax.jit(model.init)(jax.random.key(0))
    sampler = Sampler(model, mesh, max_completion_tokens=TRUNCATED, stop_ids=(), pad_id=0)
    sampler.update_weights(params)
    random = np.random.default_rng(0)
    prompt_tokens = random.integers(1, WIDE_CONFIG.vocab_size, (GROUPS, PROMPT)).astype(np.int32)
    prompts = Prompts(prompt_tokens, np.ones_like(prompt_tokens, bool), [], np.arange(GROUPS))
    completions = random.integers(1, WIDE_CONFIG.vocab_size, (GROUPS, GROUP_SIZE, TRUNCATED)).astype(np.int32)
    mask = np.ones(completions.shape, bool)
    batch = Batch(prompt_tokens, np.ones_like(prompt_tokens, bool), completions, mask, mask)

    def score(params: PyTree, batch: Batch) -> jax.Array:
        return jnp.sum(completion_logprobs(model, params, batch, sampling)[0])

    scored, differentiated = jax.jit(score), jax.jit(jax.grad(score))
    return [
        partial(sampler.sample, prompts, jax.random.key(0), group_size=GROUP_SIZE, sampling=sampling),
        lambda: jax.block_until_ready(scored(params, batch)),
        lambda: jax.block_until_ready(differentiated(params, batch)),
    ]


def cpu_seconds(calls: list[Callable[[], object]], times: int) -> list[float]:
    """Returns the least CPU seconds of each function. They alternate, so other work on the machine hits all of them."""
    for call in calls * 2:  # an engine compiles its smaller programs in the second call
        call()
    least = [float("inf")] * len(calls)
    for _ in range(times):
        for i, call in enumerate(calls):
            began = time.process_time()
            call()
            least[i] = min(least[i], time.process_time() - began)
    return least


def short_rows() -> list[dict[str, str]]:
    """Returns problems of the embedded task, whose prompts have about 8 tokens."""
    return [{"prompt": f"{i % 89 + 10}+{i % 83 + 10}", "answer": str(i % 89 + i % 83 + 20)} for i in range(PROMPTS)]


def rows_with_a_long_one() -> list[dict[str, str]]:
    """Returns `short_rows`, of which one has LONG tokens."""
    *rows, last = short_rows()
    return [*rows, last | {"prompt": "0" * (LONG - len(last["prompt"])) + last["prompt"]}]


def print_run(source: str, steps: int) -> None:
    """Prints the median CPU seconds of a step of GRPO on the rows of `source`, and the largest memory in MB."""
    config = load("configs/grpo.py")
    config.data.update(source=f"benchmarks.speed.limits.{source}", max_prompt_tokens=LONG)
    config.update(num_steps=steps, prompts_per_step=16, prompts_per_update=16, eval=None)
    seconds = []
    with tempfile.TemporaryDirectory() as workdir:
        began = time.process_time()
        for _ in train.steps(config, workdir):
            seconds.append(time.process_time() - began)
            began = time.process_time()
    print(float(np.median(seconds)), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def measured_run(source: str, steps: int) -> tuple[float, float]:
    """Returns what `print_run` prints in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.speed.limits", "--run", source, "--steps", f"{steps}"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds, memory = map(float, printed.splitlines()[-1].split())
    return seconds, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="calls of each function, of which the fastest counts")
    parser.add_argument("--far", type=int, default=4096, help="the generous limit on a completion's tokens")
    parser.add_argument("--run", help="print the seconds and the memory of one of the two runs only")
    parser.add_argument("--steps", type=int, default=40, help="steps of these runs")
    args = parser.parse_args()
    if args.run:
        return print_run(args.run, args.steps)
    cases = {
        f"completions of 48 tokens, limit 64 and {args.far}": (sampling_call(64, 48), sampling_call(args.far, 48)),
        f"two observations of {OBSERVATION} tokens, limit 256 and {args.far}": (
            sampling_call(256, episodes=True),
            sampling_call(args.far, episodes=True),
        ),
    }
    print(f"{GROUPS * GROUP_SIZE} sequences, {CONFIG.layers} layers of width {CONFIG.width}; CPU seconds")
    for name, calls in cases.items():
        near, far = cpu_seconds(list(calls), args.times)
        print(f"{name}: {near:.2f} and {far:.2f}, {far / near:.2f} times", flush=True)
    print(f"vocabulary of {WIDE_CONFIG.vocab_size}; seconds without a limit, and times with it")
    plain = truncation_calls(Sampling())
    for sampling in TRUNCATIONS:
        calls = [call for pair in zip(plain, truncation_calls(sampling), strict=True) for call in pair]
        seconds = cpu_seconds(calls, args.times)
        ratios = [
            f"{name} {least:.2f}, {limited / least:.2f} times"
            for name, least, limited in zip(
                ("sampling", "scoring", "gradient"), seconds[::2], seconds[1::2], strict=True
            )
        ]
        print(f"top_k {sampling.top_k}, top_p {sampling.top_p}: {'; '.join(ratios)}", flush=True)
    sources = "short_rows", "rows_with_a_long_one"
    (short, memory), (long, long_memory) = (measured_run(source, args.steps) for source in sources)
    print(
        f"a step on {PROMPTS} prompts of 8 tokens, and with one of {LONG}: {short:.2f} and {long:.2f}, "
        f"{long / short:.2f} times; {memory:.0f} and {long_memory:.0f} MB, {long_memory / memory:.2f} times"
    )


if __name__ == "__main__":
    main()
