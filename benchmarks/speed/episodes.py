"""Times episodes of four turns: `python -m benchmarks.speed.episodes [--vllm]`.

64 episodes (8 prompts x 8) of a random Qwen2 model of 8 layers and width 512, with observations of 90 tokens: with the
cache that is kept from turn to turn, with a prefill of everything before each turn, and over a vLLM server on this CPU.
Each way runs twice, and the second time counts: the first compiles.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from jaxrl_llm.algorithms.sampling import Sampling
from jaxrl_llm.machine import meshes
from jaxrl_llm.models import hf, hf_export, new_model
from jaxrl_llm.rollout import engines
from jaxrl_llm.rollout.environments import EnvironmentPool
from jaxrl_llm.rollout.episodes import IN_TURN, Episodes
from jaxrl_llm.rollout.jax.engine import Sampler
from jaxrl_llm.rollout.protocol import Engine, EngineInputs, EpisodeEnvironments
from jaxrl_llm.structs import Prompts, Rollouts
from jaxrl_llm.tasks.protocol import Reply

ROOT = Path(__file__).parents[2]
B, G, P, C, TURNS, TURN_TOKENS, OBSERVATION = 8, 8, 64, 440, 4, 40, 90
SIZES = dict(hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2, intermediate_size=1408)


class Reader:
    """Answers each of four turns with 90 digits."""

    stops = (">",)

    def reset(self, row: dict[str, Any]) -> None:
        self.turns = 0

    def step(self, text: str) -> Reply:
        self.turns += 1
        return Reply(done=self.turns == TURNS) if self.turns == TURNS else Reply("7294105836" * (OBSERVATION // 10))


class Anew:
    """Runs episodes with a prefill of all tokens before each turn, all turns of the batch together."""

    def __init__(self, sampler: Sampler, pad_id: int, stop_ids: tuple[int, ...]):
        self._sampler, self._pad, self._stops = sampler, pad_id, stop_ids

    def sample(
        self,
        prompts: Prompts,
        key: jax.Array,
        *,
        group_size: int,
        sampling: Sampling,
        environments: EpisodeEnvironments,
    ) -> Rollouts:
        count = len(prompts.tokens) * group_size
        episodes = Episodes.empty(np.full(count, C), C, self._pad)
        for turn in range(TURNS):
            width = P + turn * (TURN_TOKENS + OBSERVATION)
            tokens, mask = np.full((count, width), self._pad, np.int32), np.zeros((count, width), bool)
            for i in range(count):
                before = np.concatenate([prompts.tokens[i // group_size], episodes.tokens[i, : episodes.lengths[i]]])
                tokens[i, width - len(before) :], mask[i, width - len(before) :] = before, True
            given = replace(prompts, tokens=tokens, mask=mask)
            limits = np.full((count, 1), TURN_TOKENS)
            made = self._sampler.sample(
                given, jax.random.fold_in(key, turn), group_size=1, sampling=sampling, max_tokens=limits
            )
            for i in np.flatnonzero(episodes.states == IN_TURN).tolist():
                real = made.completion_mask[i, 0]
                episodes.append(i, made.completions[i, 0][real], made.logprobs[i, 0][real])
            episodes.end_turns(np.flatnonzero(episodes.states == IN_TURN), environments, self._stops)
            while episodes.pending_answers:
                episodes.append_answers()
        return episodes.rollouts(group_size, np.zeros(episodes.tokens.shape, np.int32))


def timed(engine: Engine | Anew, pool: EnvironmentPool, prompts: Prompts) -> tuple[float, int]:
    """Returns the seconds of the second run, and its sampled tokens."""
    for seed in (0, 1):
        environments = pool.start_batch(prompts.rows, G)
        began = time.perf_counter()
        rollouts = engine.sample(
            prompts, jax.random.key(seed), group_size=G, sampling=Sampling(), environments=environments
        )
        seconds = time.perf_counter() - began
    return seconds, int(rollouts.loss_mask.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--vllm", action="store_true", help="also over a vLLM server; it needs launch/vllm_cpu.sh --install"
    )
    with_vllm = parser.parse_args().vllm
    mesh = meshes.make_mesh(data=1, fsdp=1, tensor=1)
    with TemporaryDirectory() as made:
        folder = Path(made)
        new_model.write_folder(folder / "new", SIZES, [{"prompt": "0123456789+<>,", "text": "0"}], "text")
        model, tokenizer = hf.load_model(folder / "new", mesh), hf.load_tokenizer(folder / "new")
        params = jax.jit(model.init)(jax.random.key(0))
        hf_export.save(folder / "model", params, folder / "new")
        stops, pad = hf.stop_ids(folder / "model", tokenizer), tokenizer.pad_token_id
        tokens = np.random.default_rng(0).integers(4, model.cfg.vocab_size, (B, P)).astype(np.int32)
        prompts = Prompts(tokens, np.ones_like(tokens, bool), [{}] * B, np.arange(B, dtype=np.int32))
        limits = dict(most=TURNS, tokens=TURN_TOKENS, observation_tokens=OBSERVATION, workers=8, timeout=0.0)
        given = EngineInputs(model, mesh, folder / "model", folder, P, C, stops, pad)
        sampler = partial(Sampler, model, mesh, stop_ids=stops, pad_id=pad)
        ways: dict[str, Callable[[], Any]] = {
            "cache kept": lambda: sampler(max_completion_tokens=C, observation_tokens=OBSERVATION),
            "each turn anew": lambda: sampler(max_completion_tokens=TURN_TOKENS),
        }
        if with_vllm:
            python = str(ROOT / ".vllm" / "bin" / "python")
            ways["vLLM on this CPU"] = lambda: engines.vllm(python=python).start(given)
        first = 0.0
        with closing(EnvironmentPool(tokenizer, Reader, **limits)) as pool:
            for name, make in ways.items():
                with closing(make()) as engine:
                    engine.update_weights(params, 1)
                    runs = Anew(engine, pad, stops) if name == "each turn anew" else engine
                    seconds, sampled = timed(runs, pool, prompts)
                first = first or seconds
                print(f"{name:<16} {seconds:6.2f} s, {sampled:,} tokens, {seconds / first:.2f} x", flush=True)


if __name__ == "__main__":
    main()
