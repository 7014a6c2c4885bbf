"""The trial of a run at step 0: completions, scores and advantages on which the checks of the self-test work."""

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
from jaxrl_llm.machine import distributed, keys, sharding, transfers
from jaxrl_llm.machine.compilation import ROUND_AS_WRITTEN
from jaxrl_llm.machine.shapes import ShapeCache
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.actor import Actor
from jaxrl_llm.rollout.environments import EnvironmentBatch, EnvironmentPool
from jaxrl_llm.rollout.episode import Episode
from jaxrl_llm.rollout.grading import RewardFn
from jaxrl_llm.rollout.named_environments import Environments
from jaxrl_llm.rollout.protocol import Engine
from jaxrl_llm.rollout.samples import to_batch
from jaxrl_llm.rollout.settings import RewardSettings
from jaxrl_llm.structs import Array, Batch, Prompts, PyTree, Rewards, Rollouts

MIN_PROMPTS, MAX_GROUP = 4, 4  # fewest prompts, and most completions per prompt, of a full trial
MAX_TOKENS = 256  # tokens per completion: few enough to be cheap, and enough for most completions to stop
COMPARED_TOKENS = 16  # tokens of the completions that are only compared with other completions
# The (turn, observation) pairs of an episode as token ids. The observation is None if the episode ended.
Dialog: TypeAlias = list[tuple[list[int], list[int] | None]]
TRIAL_KEY = 2**31 - 1  # folded into the run's key; no step has this number, so no step draws the same samples


class RecipeSummary(NamedTuple):
    """The fields of a recipe that the self-test needs."""

    dtype: str  # dtype of activations
    gradient_dtype: str  # dtype of the gradients' sum over micro-batches
    in_trainer: bool  # True if the engine computes with the trainer's arithmetic
    own_samples: bool  # True if each step samples with the weights that it starts with
    credit: Credit
    loss: Call
    reward: RewardSettings
    environments: dict[str, Call]  # {section: environment}; {} if every completion is one turn
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
    environments: Environments | None  # None if every completion is one turn
    shape_cache: ShapeCache
    # Starts reward processes, which the caller closes. The self-test needs its own, because an error in a reward
    # function makes them unusable.
    open_reward_fn: Callable[[], RewardFn]
    recipe_summary: RecipeSummary


class Recorder(EnvironmentBatch):
    """The environments of a batch, which also record the token ids of all turns and observations."""

    def __init__(self, pools: list[EnvironmentPool], episodes: list[Episode], group_size: int):
        super().__init__(pools, episodes, group_size)
        self._exchanges: list[list[tuple[list[int], Future[list[int] | None]]]] = [[] for _ in episodes]

    def answer(self, episode: int, turn: list[int]) -> Future[list[int] | None]:
        answer = super().answer(episode, turn)
        self._exchanges[episode].append((turn, answer))
        return answer

    def dialogs(self) -> list[Dialog]:
        """Returns the turns and observations of each episode."""
        return [[(turn, answer.result()) for turn, answer in exchanges] for exchanges in self._exchanges]


@dataclass
class Trial:
    """Completions of the first prompts with scores and advantages. Host arrays have the rows of all processes."""

    parts: SelfTestParts
    states: States  # states of the models at step 0
    full: bool  # True to run also the checks that compile programs which the run does not need
    prompts: Prompts  # prompts of this process
    rollouts: Rollouts
    other_key_rollouts: Rollouts  # the first tokens of completions of the same prompts with another key
    rewards: Rewards  # rewards that alternate between 0 and 1, whatever the completions say
    batch: Batch  # arrays on the devices, with advantages from the synthetic rewards
    scores: dict[str, Array]  # columns [B, G, C] of the run's scorers, such as "ref_logprobs", by name
    logprobs: Callable[[PyTree, Batch], Array] | None  # (policy's parameters, batch) -> [B, G, C]; None = no program
    policy: Array | None  # [B, G, C] `logprobs` of the completions, on the devices; None if `logprobs` is None
    gradients: dict[Any, tuple[PyTree, Metrics]] = field(default_factory=dict)  # gradients computed so far

    def episodes(self) -> tuple[Rollouts, list[Dialog]]:
        """Samples episodes of this process's prompts. Returns the rollouts, and the turns and observations of each."""
        key = keys.derived(self.parts.learning.seed, TRIAL_KEY)
        assert self.parts.environments
        rows = self.prompts.rows
        recorder = Recorder.start(self.parts.environments.pools_of(rows), rows, MAX_GROUP)
        rollouts = self.engine.sample(
            self.prompts, key, group_size=MAX_GROUP, sampling=self.parts.learning.sampling, environments=recorder
        )
        recorder.finish()
        return replace(rollouts, episodes=recorder.metrics()), recorder.dialogs()

    @property
    def engine(self) -> Engine:
        return self.parts.actor.engine

    @property
    def params(self) -> PyTree:
        return self.parts.learning.policy(self.states)

    @property
    def exact(self) -> bool:
        """Whether sampler and trainer compute equal numbers up to the rounding of float32."""
        return self.parts.recipe_summary.in_trainer and self.parts.recipe_summary.dtype == "float32"

    def sample(self, key: int, tokens: int) -> Rollouts:
        """Samples completions of this process's prompts. key: number folded into the run's key. tokens: limit."""
        group = self.rollouts.completions.shape[1]
        return _sample(self.parts, self.prompts, group, key, tokens)

    def gradient(self, name: str, microbatch: int, *, packed: bool = False) -> tuple[PyTree, Metrics]:
        """Returns the gradient of a learner, and its metrics.

        name: "policy" or "critic". microbatch: prompts in memory at a time, 0 = all. packed: True to pack several
        completions into a row, with one row of a prompt at a time; False if each completion is a row.
        """
        if (name, microbatch, packed) not in self.gradients:
            index = None
            if packed:
                _, group, limit = self.rollouts.completions.shape
                lengths = self.rollouts.completion_mask.sum(axis=-1)
                index = pack(lengths, limit, packed_shapes(group, limit)[-1])[distributed.part(len(lengths))]
                index = transfers.shard_batch(index, self.parts.learning.mesh)
            learner, state = self.parts.learning.learners[name], self.states[name]
            out_shardings = jax.tree.map(lambda x: x.sharding, state.params), None
            program = jax.jit(
                learner.gradient(microbatch), out_shardings=out_shardings, compiler_options=ROUND_AS_WRITTEN
            )
            batch, coefs = replace(self.batch, packed_index=index), learner.coefficients(state)
            self.gradients[name, microbatch, packed] = program(state.params, batch, coefs, learner.base.params)
        return self.gradients[name, microbatch, packed]


def make_trial(parts: SelfTestParts, states: States, *, full: bool) -> Trial:
    """Samples and scores the first prompts of the data, without changing the run's data, keys, shapes or states.

    full: True to use few prompts, in shapes of their own; False to use the run's shapes, whose programs the first step
    needs anyway.
    """
    learning, recipe, engine = parts.learning, parts.recipe_summary, parts.actor.engine
    params, mesh = learning.policy(states), learning.mesh
    parts.actor.wait_for_weights()  # because a thread that samples ahead uses the same engine and the same shape cache
    group_size, count = learning.sizes.group_size, learning.sizes.prompts_per_step
    # Each device gets at least two prompts, so that the update has several micro-batches.
    if full:
        group_size, count = min(group_size, MAX_GROUP), max(2 * sharding.prompt_shards(mesh), MIN_PROMPTS)
    numbers = [number % len(parts.dataset.rows) for number in range(count)]
    prompts = data.make_prompts(parts.dataset, numbers[distributed.part(count)], parts.tokenizer.pad_token_id)
    with _preserve_shapes(parts.shape_cache):
        sampled = _sample(parts, prompts, group_size, TRIAL_KEY, MAX_TOKENS)
        other_key_rollouts = _sample(parts, prompts, group_size, TRIAL_KEY - 1, COMPARED_TOKENS)
        rollouts, other_key_rollouts = transfers.gather((sampled, other_key_rollouts), mesh)
        sampled_batch = trial_batch(parts, prompts, sampled, full=full)
    # A step releases the sampler's weights before it scores, unless the engine samples ahead. So does the trial.
    if recipe.own_samples:
        engine.release()
    scores, logprobs = learning.score(states, sampled_batch), _logprob_program(parts, states, full=full)
    policy = logprobs(params, sampled_batch) if logprobs else None
    rewards = _synthetic_rewards(recipe.credit, count, group_size, sampled.completions.shape[2])
    local_rewards = jax.tree.map(lambda x: x[distributed.part(count)], rewards)
    placed_rewards = transfers.shard_batch(local_rewards, mesh)
    batch, _ = learning.assign_credit(sampled_batch, scores, placed_rewards, learning.coefficients(states))
    if recipe.own_samples:
        engine.update_weights(params)
    return Trial(
        parts=parts,
        states=states,
        full=full,
        prompts=prompts,
        rollouts=rollouts,
        other_key_rollouts=other_key_rollouts,
        rewards=rewards,
        batch=batch,
        scores=scores,
        logprobs=logprobs,
        policy=policy,
    )


@contextmanager
def _preserve_shapes(shape_cache: ShapeCache) -> Iterator[None]:
    """Restores the state of the shape cache after the block, so that a self-test does not change the run's shapes."""
    saved = shape_cache.policy_states()
    yield
    shape_cache.load_policies(saved)


def _sample(parts: SelfTestParts, prompts: Prompts, group: int, key: int, tokens: int) -> Rollouts:
    """Samples `group` completions per prompt of at most `tokens` tokens. key: number folded into the run's key."""
    limits = np.full((len(prompts.tokens), group), min(tokens, parts.learning.sizes.max_completion_tokens))
    run_key, sampling = keys.derived(parts.learning.seed, key), parts.learning.sampling
    return parts.actor.engine.sample(prompts, run_key, group_size=group, sampling=sampling, max_tokens=limits)


def trial_batch(parts: SelfTestParts, prompts: Prompts, rollouts: Rollouts, *, full: bool) -> Batch:
    """Packs completions of this process into rows, and puts the batch on the devices.

    full: True to use the largest row shape for completions of this length; False to use the row shape of the run's
    first step, whose programs are compiled anyway.
    """
    _, group, limit = rollouts.completions.shape

    def packed(lengths: np.ndarray, width: int) -> np.ndarray:
        if full:
            return pack(lengths, limit, packed_shapes(group, limit)[0])
        # The trial samples few tokens. A completion that it cut counts as long as the run's limit, because the first
        # step, which samples the same prompts, may need rows for such a completion.
        lengths_at_most = np.where(distributed.gather(rollouts.truncated), limit, lengths)
        return pack(lengths, limit, parts.packing(lengths_at_most, width).shape[2:])

    return transfers.shard_batch(to_batch(prompts, rollouts, rollouts.loss_mask, packed), parts.learning.mesh)


def _logprob_program(parts: SelfTestParts, states: States, *, full: bool) -> Callable[[PyTree, Batch], Array] | None:
    """Returns a function (policy's parameters, batch) -> log-probabilities [B, G, C] by the policy.

    The function calls a program that the run compiles anyway. If the run has no program that scores the policy, the
    result is None, or with full = True a function that calls a new program.
    """
    learning = parts.learning
    # The policy is scored by the reference's program, because two programs round in another order, so that equal
    # weights would give different numbers.
    if reference := learning.reference:
        reference_dtypes = [x.dtype for x in jax.tree.leaves(reference.shapes)]
        has_same_dtypes = reference_dtypes == [x.dtype for x in jax.tree.leaves(states["policy"].params)]
        program = learning.scorers["reference"].program
        return lambda params, batch: program(params if has_same_dtypes else reference.copy(params), batch)[
            "ref_logprobs"
        ]
    scorer = learning.scorers.get("policy")
    if scorer and "old_logprobs" in scorer.columns:
        return lambda params, batch: scorer.program(params, batch)["old_logprobs"]
    return make_logprob_fn(parts.model, learning.sampling, learning.mesh, microbatch=0) if full else None


def _synthetic_rewards(credit: Credit, count: int, group: int, length: int) -> Rewards:
    """Returns rewards [B, G] that alternate between 0 and 1. length: C."""
    # Real rewards are not used, because at step 0 they may be equal everywhere, so that all gradients would be 0.
    total = ((np.arange(count)[:, None] + np.arange(group)) % 2).astype(np.float32)
    channels = dict.fromkeys(credit.weights, total)
    rewards = Rewards(total, channels)
    if credit.estimator.needs_turns:
        # Each completion is one turn without a reward of its own.
        zeros = np.zeros((count, group, length), np.float32)
        rewards = replace(rewards, turn_numbers=zeros.astype(np.int32), turn_rewards=zeros)
    if credit.estimator.needs_greedy:
        rewards = replace(rewards, greedy=np.zeros((count, 1), np.float32), greedy_lengths=np.ones((count, 1), int))
    return rewards
