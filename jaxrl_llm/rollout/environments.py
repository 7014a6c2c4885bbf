"""The environments of episodes: one for each episode, in threads, with limits of time, turns and tokens.

Environments see text. Engines see token ids.
"""

from __future__ import annotations

import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from jaxrl_llm.config.schema import AtLeastOne, MayChange, NotNegative
from jaxrl_llm.data import encoding, formats
from jaxrl_llm.errors import UserError, describe, summarize_error
from jaxrl_llm.rollout.episode import Episode, prepare_row, warn_of
from jaxrl_llm.rollout.time_limit import TimeLimit
from jaxrl_llm.rollout.tool_messages import ToolMessages
from jaxrl_llm.tasks.protocol import Environment, Reply, checked

__all__: tuple[str, ...] = ()  # no class here is an environment that a config may name

REPLACEMENT = "\ufffd"  # decoded text of a token that holds only a part of a character
FAILURE_OBSERVATION = "\n\n[The environment failed: {}]\n\n"
NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


class EnvironmentPool:
    """Makes environments for episodes, runs them in threads, and holds the limits of episodes."""

    def __init__(
        self,
        tokenizer: Any,
        make_environment: Callable[[], Environment],
        template_args: Mapping[str, Any] = NO_ARGUMENTS,
        *,
        most: AtLeastOne,
        tokens: AtLeastOne,
        observation_tokens: AtLeastOne,
        workers: MayChange[AtLeastOne],
        timeout: MayChange[NotNegative],
    ):
        """make_environment(): returns a new environment. template_args: arguments of the chat template. The keyword
        arguments are the fields of config.turns.

        Raises: UserError, if the environment cannot be made, or the chat template does not accept results of its tools.
        """
        self.tokenizer, self._make_environment = tokenizer, make_environment
        self.max_turns, self.tokens, self.observation_tokens = most, tokens, observation_tokens
        self.time_limit, self.threads = TimeLimit(timeout), ThreadPoolExecutor(workers)
        # Make one environment now, so that wrong arguments raise an error before the run starts. `schemas` are JSON
        # schemas of its tools, for the chat template.
        environment = self.make()
        self.schemas: list[dict[str, Any]] = getattr(environment, "schemas", [])
        self.has_tools = bool(self.schemas) or hasattr(environment, "prepare_row")  # which may add tools to rows
        self.messages = ToolMessages(tokenizer, self.schemas, template_args)
        if not self.schemas:
            return
        self.messages.check({})
        if (template_tokens := len(self.encode_observation(("",), {}, ()))) > observation_tokens:
            raise UserError(
                f"config.turns.observation_tokens = {observation_tokens}: the chat template alone writes "
                f"{template_tokens} tokens around the result of a tool; raise config.turns.observation_tokens above it"
            )

    def prepare_rows(self, rows: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Returns the rows of a source with what the environment adds to them before they are tokenized.

        Raises: UserError, if the environment does not accept a row, or adds another text at each call.
        """
        if not (rows and hasattr(self.make(), "prepare_row")):
            return rows
        prepared = list(self.threads.map(lambda row: prepare_row(self.make(), row), rows))
        if prepare_row(self.make(), rows[0])["prompt"] != prepared[0]["prompt"]:
            raise UserError(
                "config.env: reset returned two texts for one row, but all completions of a prompt must start in one "
                "state: let the row decide, for example by a column with a seed"
            )
        return prepared

    def make(self) -> Environment:
        """Returns a new environment. Raises: UserError, if its constructor fails."""
        try:
            return self._make_environment()
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"config.env: the environment cannot be made ({describe(error)}): fix its arguments, or what it needs"
            ) from error

    def check(self, rows: Sequence[dict[str, Any]]) -> None:
        """Checks that the environment accepts the first row, and the chat template the arguments of all rows.

        Raises: UserError.
        """
        self.start_batch(rows[:1], 1).finish()
        if self.has_tools:
            # Check equal arguments only once, because a large data set has few different ones.
            for row_args in {repr(row_args): row_args for row_args in map(formats.template_args, rows)}.values():
                self.messages.check(row_args)

    def start_batch(self, rows: Sequence[dict[str, Any]], group_size: int) -> EnvironmentBatch:
        """Returns new environments for a batch of rows. Raises: UserError, if an environment refuses its row."""
        return EnvironmentBatch.start(self.pools_of(rows), rows, group_size)

    def pools_of(self, rows: Sequence[dict[str, Any]]) -> list[EnvironmentPool]:
        """Returns the pool of each row: this one."""
        return [self] * len(rows)

    def encode_observation(
        self, observation: str | tuple[str, ...], row: dict[str, Any], turn: Sequence[int]
    ) -> list[int]:
        """Returns the token ids from the end of a turn to the start of the next turn.

        observation: text, or results of tools, which the chat template renders. Raises: any error of the template.
        """
        if not isinstance(observation, str):
            observation = self.messages.render_results(turn, observation, formats.template_args(row))
        # A tool may return JSON with half of a character, which no tokenizer accepts.
        return encoding.encode_text(encoding.UNPAIRED_SURROGATE.sub(REPLACEMENT, observation), self.tokenizer)

    def encode_reply(self, episode: Episode, observation: str | tuple[str, ...], turn: list[int]) -> list[int] | None:
        """Returns the token ids of an observation, cut to the limit. None if nothing fits, which ends the episode."""
        ids = self.encode_observation(observation, episode.row, turn)
        if len(ids) <= self.observation_tokens:
            return ids
        episode.reached_limit = True
        if isinstance(observation, str):
            return ids[: self.observation_tokens]
        return self._shorten_results(observation, episode.row, turn)

    def _shorten_results(self, results: tuple[str, ...], row: dict[str, Any], turn: Sequence[int]) -> list[int] | None:
        """Returns the token ids of tool results cut to `observation_tokens`. None if even empty results do not fit.

        Only the results are cut. The chat template's text around them stays whole, so the next turn starts as usual.
        """

        def encode_cut(size: int) -> list[int]:
            return self.encode_observation(tuple(text[:size] for text in results), row, turn)

        def too_long(size: int) -> bool:
            return len(encode_cut(size)) > self.observation_tokens

        # Bisection finds the longest cut that fits with few encodings: the number of sizes from 1 on that fit.
        longest_fit = bisect_left(range(1, max(map(len, results)) + 1), True, key=too_long)
        return None if too_long(longest_fit) else encode_cut(longest_fit)

    @cached_property
    def possible_turn_ends(self) -> np.ndarray:
        """True for tokens of the tokenizer that contain the last character of a string that ends a turn."""
        stop_ends = {stop[-1] for stop in self.make().stops}
        # A token may hold only a part of the last character.
        stop_ends |= set() if all(map(str.isascii, stop_ends)) else {REPLACEMENT}
        texts = self.tokenizer.batch_decode([[token] for token in range(len(self.tokenizer))], skip_special_tokens=True)
        return np.array([not stop_ends.isdisjoint(text) for text in texts])

    def close(self) -> None:
        """Cancels the steps that have not started."""
        self.threads.shutdown(wait=False, cancel_futures=True)


class EnvironmentBatch:
    """The environments of a batch's episodes, as engines use them (`rollout.protocol.EpisodeEnvironments`)."""

    def __init__(self, pools: list[EnvironmentPool], episodes: list[Episode], group_size: int):
        """pools: the pool of each episode, which has the limits of this episode."""
        self._pools, self._episodes, self._group_size = pools, episodes, group_size
        self.turn_tokens = np.array([pool.tokens for pool in pools])

    @classmethod
    def start(cls, pools: Sequence[EnvironmentPool], rows: Sequence[dict[str, Any]], group_size: int) -> Self:
        """Starts `group_size` episodes for each row. pools: the pool of each row.

        Raises: UserError, if an environment refuses its row.
        """
        pools = [pool for pool in pools for _ in range(group_size)]
        rows = [row for row in rows for _ in range(group_size)]
        episodes = [Episode(pool.make(), row) for pool, row in zip(pools, rows, strict=True)]
        # The threads reset them, because a reset may wait for a server.
        starts = [
            pool.threads.submit(episode.start, pool.time_limit) for pool, episode in zip(pools, episodes, strict=True)
        ]
        for start in starts:
            if error := start.result():
                raise error
        return cls(pools, episodes, group_size)

    @property
    def truncated(self) -> np.ndarray:
        """True for episodes [B, G] that a limit of turns, observation tokens or time has cut."""
        return np.array([episode.reached_limit for episode in self._episodes]).reshape(-1, self._group_size)

    def metrics(self) -> dict[str, np.ndarray]:
        """Returns {name: [B, G]}, the sums of each metric over the turns of an episode."""
        sums = [episode.metric_sums for episode in self._episodes]
        values_by_name = {
            name: np.array([c.get(name, 0.0) for c in sums], np.float32) for name in sorted({*chain(*sums)})
        }
        return {name: values.reshape(-1, self._group_size) for name, values in values_by_name.items()}

    def turn_arrays(self, sampled: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the fields `turn_numbers` and `turn_rewards` of `Rollouts`. sampled: their loss mask [B, G, C]."""
        rewards = np.full(sampled.shape, np.nan, np.float32)
        for row, episode in zip(rewards.reshape(len(self._episodes), -1), self._episodes, strict=True):
            for last_token, reward in episode.turn_rewards.items():
                row[last_token] = reward
        ends = ~np.isnan(rewards)
        numbers = np.where(sampled, np.cumsum(ends, axis=-1) - ends, -1)
        return {"turn_numbers": numbers.astype(np.int32), "turn_rewards": rewards}

    def concatenate(self, later_batch: EnvironmentBatch) -> EnvironmentBatch:
        """Returns the environments of this batch followed by the environments of `later_batch`."""
        pools, episodes = self._pools + later_batch._pools, self._episodes + later_batch._episodes
        return EnvironmentBatch(pools, episodes, self._group_size)

    def take(self, groups: Sequence[int]) -> EnvironmentBatch | None:
        """Returns the environments of the groups with these indices, None if `groups` is empty."""
        numbers = [i for b in groups for i in range(b * self._group_size, (b + 1) * self._group_size)]
        if not numbers:
            return None
        pools, episodes = [self._pools[i] for i in numbers], [self._episodes[i] for i in numbers]
        return EnvironmentBatch(pools, episodes, self._group_size)

    def finish(self, has_ended: np.ndarray | None = None) -> None:
        """Adds the last metrics of episodes, for example a reward, and lets their environments free what they hold.

        has_ended: [B, G] True for the episodes to finish, None for all. An episode is finished once.
        """
        flags = np.ones(len(self._episodes), bool) if has_ended is None else has_ended.ravel()
        jobs = [
            pool.threads.submit(episode.finish, pool.time_limit)
            for pool, episode, flag in zip(self._pools, self._episodes, flags, strict=True)
            if flag and not episode.is_finished
        ]
        for job in jobs:
            job.result()

    def replay(
        self,
        turns: Sequence[list[list[int]]],
        metrics: Mapping[str, np.ndarray],
        truncated: np.ndarray,
        has_ended: np.ndarray,
    ) -> None:
        """Gives new environments the earlier turns of their episodes, because a checkpoint holds no environment.

        The episodes keep the observations and measurements of the earlier process. metrics: {name: [B, G]}; truncated
        and has_ended: [B, G].
        """
        self.finish(has_ended)  # the earlier process has measured these episodes
        jobs = [
            self._pools[i].threads.submit(self._replay, i, answered) for i, answered in enumerate(turns) if answered
        ]
        for job in jobs:
            job.result()
        self.restore_measurements(metrics, truncated)

    def restore_measurements(self, metrics: Mapping[str, np.ndarray], truncated: np.ndarray) -> None:
        """Sets the metrics {name: [B, G]} and cuts [B, G] of the episodes, which later turns add to."""
        for i, episode in enumerate(self._episodes):
            episode.metric_sums = {name: values.flat[i] for name, values in metrics.items()}
            episode.reached_limit = bool(truncated.flat[i])

    def restore_turns(self, is_turn_start: np.ndarray, turn_rewards: np.ndarray | None) -> None:
        """Sets the lengths and the rewards of the earlier turns, after `replay`.

        is_turn_start: [B, G, C] True at the first token of each turn. turn_rewards: field of `Rollouts`; None if the
        earlier process kept no rewards of turns.
        """
        starts = is_turn_start.reshape(len(self._episodes), -1)
        rewards = np.full(starts.shape, np.nan) if turn_rewards is None else turn_rewards.reshape(starts.shape)
        for episode, starts_here, rewards_here in zip(self._episodes, starts, rewards, strict=True):
            episode.length = int(np.flatnonzero(starts_here)[-1])
            episode.turn_rewards = {int(i): rewards_here[i] for i in np.flatnonzero(~np.isnan(rewards_here))}

    def _replay(self, episode: int, turns: list[list[int]]) -> None:
        if any(self._step(episode, turn).done for turn in turns):
            warnings.warn(
                "an environment has ended an episode at a turn after which the episode continued before the run was "
                "resumed: its later answers may differ from those of a run without the stop",
                stacklevel=2,
            )

    def possible_turn_ends(self, vocabulary_size: int) -> np.ndarray:
        """Returns True for tokens [V] after which the text may end a turn. vocabulary_size: V of the model."""
        tokenizer_mask = np.logical_or.reduce([pool.possible_turn_ends for pool in set(self._pools)])
        return np.pad(tokenizer_mask, (0, max(vocabulary_size - len(tokenizer_mask), 0)))[:vocabulary_size]

    def stops(self, episode: int) -> tuple[str, ...]:
        """Returns the strings that end a turn of an episode."""
        return self._episodes[episode].environment.stops

    def find_turn_ends(self, episodes: Sequence[int], turns: Sequence[list[int]]) -> list[int]:
        """Returns, for each turn, the number of tokens at which its text ends the turn; 0 if it has no stop string."""
        return [self._find_turn_end(self.stops(i), turn) for i, turn in zip(episodes, turns, strict=True)]

    def _find_turn_end(self, stops: tuple[str, ...], turn: list[int]) -> int:
        def has_stop(tokens: list[int]) -> bool:
            text = self._text(tokens)
            return any(stop in text for stop in stops)

        if not has_stop(turn):
            return 0
        return 1 + bisect_left(range(1, len(turn)), True, key=lambda n: has_stop(turn[:n]))

    def _text(self, turn: list[int]) -> str:
        return self._pools[0].tokenizer.decode(turn, skip_special_tokens=True)  # all pools have one tokenizer

    def answer(self, episode: int, turn: list[int]) -> Future[list[int] | None]:
        """Starts a step of the environment. The future gives the observation's token ids, None if the episode ends."""
        return self._pools[episode].threads.submit(self._answer, episode, turn)

    def _answer(self, number: int, turn: list[int]) -> list[int] | None:
        start, pool, episode = time.perf_counter(), self._pools[number], self._episodes[number]
        reply = self._step(number, turn)
        episode.end_turn(len(turn), reply)
        episode.add_metrics({"seconds": time.perf_counter() - start})
        if reply.done:
            return None
        if episode.metric_sums["turns"] >= pool.max_turns:
            episode.reached_limit = True
            return None
        try:
            observation = pool.encode_reply(episode, reply.observation, turn)
            episode.length += len(observation or ())
            return observation
        except Exception as error:
            # A chat template may raise any error, even if it has accepted the results of `check`.
            warn_of(error)
            episode.add_metrics({"errors": 1.0})
            episode.reached_limit = True
            return None

    def _step(self, number: int, turn: list[int]) -> Reply:
        """Returns the reply of an environment. An error or a time-out becomes a reply, and never ends the run."""
        pool, episode, text = self._pools[number], self._episodes[number], self._text(turn)
        if pool.has_tools:
            text = pool.messages.read_turn(turn, formats.template_args(episode.row))

        def step() -> Reply:
            try:
                return checked(episode.environment.step(text))
            except (Exception, SystemExit) as error:
                warn_of(error)
                reason = summarize_error(error)
                # An environment with tools answers by chat messages, and any other environment by text.
                observation = (f"error: {reason}",) if pool.has_tools else FAILURE_OBSERVATION.format(reason)
                return Reply(observation, metrics={"errors": 1.0})

        try:
            if episode.is_late:
                raise TimeoutError
            return pool.time_limit.call(step)
        except TimeoutError:
            # The environment may still run the step, so it must not get another one.
            episode.reached_limit = episode.is_late = True
            return Reply(done=True, metrics={"errors": 1.0})
