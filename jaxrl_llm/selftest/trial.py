"""A trial of a run at step 0: completions, scores and advantages that the checks of `health.self_test` look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import numpy as np

from jaxrl_llm.algorithms.credit import Credit
from jaxrl_llm.algorithms.losses import Metrics
from jaxrl_llm.config.records import Call
from jaxrl_llm.data import prompts as data
from jaxrl_llm.learner.forward import make_logprob_fn
from jaxrl_llm.learner.learning import Learning
from jaxrl_llm.learner.packing import Packing, pack, packed_shapes
from jaxrl_llm.learner.scorers import States
from jaxrl_llm.machine import distributed, keys, sharding
from jaxrl_llm.machine.compilation import ROUND_AS_WRITTEN
from jaxrl_llm.machine.shapes import ShapeCache
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.actor import Actor
from jaxrl_llm.rollout.environments import EnvironmentBatch, EnvironmentPool
from jaxrl_llm.rollout.grading import RewardFn
from jaxrl_llm.rollout.protocol import Engine
from jaxrl_llm.rollout.samples import to_batch
from jaxrl_llm.rollout.settings import RewardSettings
from jaxrl_llm.structs import Array, Batch, Prompts, PyTree, Rewards, Rollouts

PROMPTS, GROUP = 4, 4  # prompts at least, completions of each at most, if the trial has shapes of its own
TOKENS = 256  # of a completion at most: it costs little, and most that stop have stopped by then
AGAIN = 16  # tokens of the completions that are only compared with others
# Token ids of the turns of an episode, and of what the environment answered; None: the episode ended.
Dialog: TypeAlias = list[tuple[list[int], list[int] | None]]
KEY = 2**31 - 1  # folded into the run's key: no step has this number, so no step draws the same


class RecipeSummary(NamedTuple):
    """The fields of a recipe that the self-test needs."""

    dtype: str  # dtype of activations
    gradient_dtype: str
    in_trainer: bool  # True if the engine computes with the trainer's arithmetic
    own_samples: bool  # True if each step samples with the weights that it starts with
    credit: Credit
    loss: Call
    reward: RewardSettings
    env: Call | None  # None if every completion is one turn
    template_args: dict[str, Any]  # arguments of the chat template


class SelfTestParts(Protocol):
    """The parts of a run that its self-test reads; `build.Parts` has them all."""

    actor: Actor
    learning: Learning
    packing: Packing
    model: Decoder
    tokenizer: Any
    dataset: data.Dataset
    stop_ids: tuple[int, ...]
    environments: EnvironmentPool | None  # None if every completion is one turn
    shape_cache: ShapeCache
    # Starts reward processes, which the caller closes. The self-test needs its own, because an error in a reward
    # function makes them unusable.
    open_reward_fn: Callable[[], RewardFn]
    recipe_summary: RecipeSummary


class Recorder(EnvironmentBatch):
    """The environments of a batch. Keeps the token ids that go to and from each episode."""

    def __init__(self, pool: EnvironmentPool, rows: list[dict[str, Any]], group_size: int):
        super().__init__(pool, pool.start_episodes(rows, group_size), group_size)
        self._exchanges: list[list[tuple[list[int], Future[list[int] | None]]]] = [
            [] for _ in range(len(rows) * group_size)
        ]

    def answer(self, episode: int, turn: list[int]) -> Future[list[int] | None]:
        answer = super().answer(episode, turn)
        self._exchanges[episode].append((turn, answer))
        return answer

    def dialogs(self) -> list[Dialog]:
        """Returns the turns of each episode, and what the environment answered to each."""
        return [[(turn, answer.result()) for turn, answer in exchanges] for exchanges in self._exchanges]


@dataclass
class Trial:
    """Completions of the first prompts, scored and with advantages. Arrays on the host are those of all processes."""

    parts: SelfTestParts
    states: States  # the first ones
    full: bool  # also run what needs programs that the run has not
    prompts: Prompts  # of this process
    rollouts: Rollouts
    again: Rollouts  # the same prompts with another key, and only the first tokens
    rewards: Rewards  # made up
    batch: Batch  # on the devices, with advantages from these rewards
    scores: dict[str, Array]
    logprobs: Callable[[PyTree, Batch], Array] | None  # of the policy with these parameters; None: no program for it
    policy: Array | None  # log-probabilities [B, G, C] of the completions, by the trainer; on the devices
    gradients: dict[Any, tuple[PyTree, Metrics]] = field(default_factory=dict)  # those computed until now

    def episodes(self) -> tuple[Rollouts, list[Dialog]]:
        """Samples episodes of the prompts of this process, and returns them with what was said in each."""
        key = keys.derived(self.parts.learning.seed, KEY)
        assert self.parts.environments
        recorder = Recorder(self.parts.environments, self.prompts.rows, GROUP)
        rollouts = self.engine.sample(
            self.prompts, key, group_size=GROUP, sampling=self.parts.learning.sampling, environments=recorder
        )
        return replace(rollouts, episodes=recorder.metrics()), recorder.dialogs()

    @property
    def engine(self) -> Engine:
        return self.parts.actor.engine

    @property
    def params(self) -> PyTree:
        return self.parts.learning.policy(self.states)

    @property
    def exact(self) -> bool:
        """Whether sampler and trainer compute the same numbers, to the rounding of float32."""
        return self.parts.recipe_summary.in_trainer and self.parts.recipe_summary.dtype == "float32"

    def sample(self, key: int, tokens: int) -> Rollouts:
        """Samples completions of the prompts of this process, of at most so many tokens."""
        group = self.rollouts.completions.shape[1]
        return _sample(self.parts, self.prompts, group, key, tokens)

    def gradient(self, name: str, microbatch: int, *, packed: bool = False) -> tuple[PyTree, Metrics]:
        """Returns the gradient of a learner and its metrics, for `microbatch` prompts at a time (0: all).

        packed: with several completions in a row, and one row of a prompt at a time. Else each completion is a row.
        """
        if (name, microbatch, packed) not in self.gradients:
            index = None
            if packed:
                _, group, limit = self.rollouts.completions.shape
                lengths = self.rollouts.completion_mask.sum(axis=-1)
                index = pack(lengths, limit, packed_shapes(group, limit)[-1])[distributed.part(len(lengths))]
                index = sharding.shard_batch(index, self.parts.learning.mesh)
            learner, state = self.parts.learning.learners[name], self.states[name]
            placed = jax.tree.map(lambda x: x.sharding, state.params), None
            program = jax.jit(learner.gradient(microbatch), out_shardings=placed, compiler_options=ROUND_AS_WRITTEN)
            batch, coefs = replace(self.batch, packed_index=index), learner.coefficients(state)
            self.gradients[name, microbatch, packed] = program(state.params, batch, coefs, learner.base.params)
        return self.gradients[name, microbatch, packed]


def prepare(parts: SelfTestParts, states: States, *, full: bool) -> Trial:
    """Samples and scores the first prompts of the data. Data, keys, shapes and states of the run stay as they are.

    full: few prompts, in shapes of their own. Otherwise those of the run, whose programs its first step needs anyway.
    """
    learning, recipe, engine = parts.learning, parts.recipe_summary, parts.actor.engine
    params, mesh = learning.policy(states), learning.mesh
    parts.actor.wait_for_weights()  # a thread that samples ahead uses the same engine and the same shape cache
    group, count = learning.sizes.group_size, learning.sizes.prompts_per_step
    # Each device gets at least two prompts, so that the update has several micro-batches.
    if full:
        group, count = min(group, GROUP), max(2 * sharding.prompt_shards(mesh), PROMPTS)
    numbers = [number % len(parts.dataset.rows) for number in range(count)]
    prompts = data.make_prompts(parts.dataset, numbers[distributed.part(count)], parts.tokenizer.pad_token_id)
    with _shapes_stay(parts.shape_cache):
        sampled = _sample(parts, prompts, group, KEY, TOKENS)
        again = _sample(parts, prompts, group, KEY - 1, AGAIN)
        rollouts, again = sharding.gather((sampled, again), mesh)
        plain = trial_batch(parts, prompts, sampled, full=full)
    # The sampler's weights are not in memory while a step scores, unless the engine samples ahead.
    if recipe.own_samples:
        engine.release()
    scores, logprobs = learning.score(states, plain), _logprob_program(parts, states, full=full)
    policy = logprobs(params, plain) if logprobs else None
    rewards = _synthetic_rewards(recipe.credit, count, group)
    local_rewards = jax.tree.map(lambda x: x[distributed.part(count)], rewards)
    placed = sharding.shard_batch(local_rewards, mesh)
    batch, _ = learning.assign_credit(plain, scores, placed, learning.coefficients(states))
    if recipe.own_samples:
        engine.update_weights(params)
    return Trial(parts, states, full, prompts, rollouts, again, rewards, batch, scores, logprobs, policy)


@contextmanager
def _shapes_stay(shape_cache: ShapeCache) -> Iterator[None]:
    """Restores the shape policies after the block, so that the run uses the same shapes as without a self-test."""
    saved = shape_cache.policy_states()
    yield
    shape_cache.load_policies(saved)


def _sample(parts: SelfTestParts, prompts: Prompts, group: int, key: int, tokens: int) -> Rollouts:
    limits = np.full((len(prompts.tokens), group), min(tokens, parts.learning.sizes.max_completion_tokens))
    run_key, sampling = keys.derived(parts.learning.seed, key), parts.learning.sampling
    return parts.actor.engine.sample(prompts, run_key, group_size=group, sampling=sampling, max_tokens=limits)


def trial_batch(parts: SelfTestParts, prompts: Prompts, rollouts: Rollouts, *, full: bool) -> Batch:
    """Puts completions of this process on the devices, in packed rows."""
    _, group, limit = rollouts.completions.shape

    def packed(lengths: np.ndarray, width: int) -> np.ndarray:
        if full:
            return pack(lengths, limit, packed_shapes(group, limit)[0])
        # The shape that the first step takes, if a completion that was cut here goes on to the limit: then the step
        # finds its program compiled.
        lengths_at_most = np.where(distributed.gather(rollouts.truncated), limit, lengths)
        return pack(lengths, limit, parts.packing(lengths_at_most, width).shape[2:])

    return sharding.shard_batch(to_batch(prompts, rollouts, rollouts.loss_mask, packed), parts.learning.mesh)


def _logprob_program(parts: SelfTestParts, states: States, *, full: bool) -> Callable[[PyTree, Batch], Array] | None:
    """Returns a function of the policy's parameters and a batch, with a program that the run has if there is one."""
    learning = parts.learning
    # One program for policy and reference: two programs round in another order, and equal weights would differ.
    if reference := learning.reference:
        dtypes = lambda tree: [x.dtype for x in jax.tree.leaves(tree)]  # noqa: E731
        same = dtypes(reference.shapes) == dtypes(states["policy"].params)
        program = learning.scorers["reference"].program
        return lambda params, batch: program(params if same else reference.copy(params), batch)["ref_logprobs"]
    scorer = learning.scorers.get("policy")
    if scorer and "old_logprobs" in scorer.columns:
        return lambda params, batch: scorer.program(params, batch)["old_logprobs"]
    return make_logprob_fn(parts.model, learning.sampling, learning.mesh, microbatch=0) if full else None


def _synthetic_rewards(credit: Credit, count: int, group: int) -> Rewards:
    """Returns rewards of 0 and 1 in turn."""
    # Real rewards of step 0 may be the same everywhere: then all advantages and gradients would be 0.
    total = ((np.arange(count)[:, None] + np.arange(group)) % 2).astype(np.float32)
    channels = dict.fromkeys(credit.weights, total)
    if not credit.estimator.needs_greedy:
        return Rewards(total, channels)
    return Rewards(total, channels, np.zeros((count, 1), np.float32), np.ones((count, 1), int))
