"""The environments of a batch, one for each episode. They see text, and engines see token ids.

They run in threads, with limits of time, turns and tokens.
"""

from __future__ import annotations

import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np

from jaxrl_llm import tasks
from jaxrl_llm.config.records import Call, KeywordArguments
from jaxrl_llm.config.schema import AtLeastOne, MayChange, NotNegative
from jaxrl_llm.data import encoding, formats
from jaxrl_llm.errors import UserError, briefly, describe
from jaxrl_llm.rollout.time_limit import TimeLimit
from jaxrl_llm.rollout.tool_messages import ToolMessages
from jaxrl_llm.tasks.protocol import Environment, Reply, checked

__all__: tuple[str, ...] = ()  # no class here is an environment that a config may name

REPLACEMENT = "\ufffd"  # what a part of a character decodes to
FAILED = "\n\n[The environment failed: {}]\n\n"
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings:
    """What the policy talks to, and the limits of an episode. Both are there or none."""

    env: Annotated[Call, tasks.ENVIRONMENTS] | None = None
    turns: Annotated[KeywordArguments, EnvironmentPool] | None = None


def check_episodes(environment: Call | None, turns: KeywordArguments | None) -> None:
    """Raises: UserError, if one of the sections `env` and `turns` is missing."""
    if environment and not turns:
        raise UserError("config.turns is missing: an environment needs the limits of episodes (configs/search_grpo.py)")
    if turns and not environment:
        raise UserError("config.turns does nothing: there is no environment; add config.env, or take the section out")


def open_environments(
    episodes: EpisodeSettings, tokenizer: Any, opened: ExitStack, template_args: Mapping[str, Any]
) -> EnvironmentPool | None:
    """Opens the environments of a run; None: it has none. They close with `opened`.

    template_args: arguments of the chat template, beside the tools. Raises: UserError.
    """
    if not (episodes.env and episodes.turns):
        return None
    return opened.enter_context(closing(EnvironmentPool(tokenizer, episodes.env, template_args, **episodes.turns)))


class EnvironmentPool:
    """The limits of episodes, and the threads that run their environments."""

    def __init__(
        self,
        tokenizer: Any,
        make: Callable[[], Environment],
        template_args: Mapping[str, Any] = NOTHING,
        *,
        most: AtLeastOne,
        tokens: AtLeastOne,
        observation_tokens: AtLeastOne,
        workers: MayChange[AtLeastOne],
        timeout: MayChange[NotNegative],
    ):
        """make() returns an environment. template_args: arguments of the chat template. The others: fields of `turns`.

        Raises: UserError, if the environment cannot be made, or the chat template does not take results of its tools.
        """
        self.tokenizer, self._make = tokenizer, make
        self.max_turns, self.tokens, self.observation_tokens = most, tokens, observation_tokens
        self.limit, self.threads = TimeLimit(timeout), ThreadPoolExecutor(workers)
        # The first environment finds what is wrong with the arguments before a run begins.
        # JSON schemas of the environment's tools, which the chat template shows.
        self.schemas: list[dict[str, Any]] = getattr(self.make(), "schemas", [])
        self.messages = ToolMessages(tokenizer, self.schemas, template_args)
        if not self.schemas:
            return
        self.messages.check({})
        if (around := len(self.encoded(("",), {}, ()))) > observation_tokens:
            raise UserError(
                f"config.turns.observation_tokens = {observation_tokens} is less than the {around} tokens that the "
                "chat template writes around a result: raise it"
            )

    def make(self) -> Environment:
        """Returns a new environment. Raises: UserError, if its constructor fails."""
        try:
            return self._make()
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"config.env cannot be made: {describe(error)}: mend it, or what it needs") from error

    def check(self, rows: Sequence[dict[str, Any]]) -> None:
        """Checks that an environment begins with the first row, and that the chat template takes what rows give it.

        Raises: UserError.
        """
        reset(self.make(), rows[0])
        if self.schemas:
            # Each kind of arguments once: a large data set has few.
            for row_args in {repr(row_args): row_args for row_args in map(formats.template_args, rows)}.values():
                self.messages.check(row_args)

    def begin(self, rows: Sequence[dict[str, Any]], group_size: int) -> EnvironmentBatch:
        """Returns the environments of a batch, each with its data row. Raises: UserError, if one refuses its row."""
        return EnvironmentBatch(self, self.episodes(rows, group_size), group_size)

    def episodes(self, rows: Sequence[dict[str, Any]], group_size: int) -> list[Episode]:
        """Returns new episodes, `group_size` for each row. Raises: UserError, as `begin`."""
        episodes = [Episode(self.make(), row) for row in rows for _ in range(group_size)]
        for episode in episodes:
            reset(episode.environment, episode.row)
        return episodes

    def encoded(self, observation: str | tuple[str, ...], row: dict[str, Any], turn: Sequence[int]) -> list[int]:
        """Returns the token ids of what stands between a turn and the next one. Raises: what a chat template raises."""
        if not isinstance(observation, str):
            observation = self.messages.between(turn, observation, formats.template_args(row))
        # A tool may return JSON with half of a character, which no tokenizer takes.
        return encoding.encode_text(encoding.UNPAIRED_SURROGATE.sub(REPLACEMENT, observation), self.tokenizer)

    def shortened(self, results: tuple[str, ...], row: dict[str, Any], turn: Sequence[int]) -> list[int] | None:
        """Returns the token ids of results that are cut until they fit; None: even without a text they do not.

        What the chat template writes around them stays whole: the next turn begins as all others.
        """

        def cut(size: int) -> list[int]:
            return self.encoded(tuple(text[:size] for text in results), row, turn)

        def too_long(size: int) -> bool:
            return len(cut(size)) > self.observation_tokens

        # Bisection encodes only a few of the cuts.
        size = bisect_left(range(1, max(map(len, results)) + 1), True, key=too_long)
        return None if too_long(size) else cut(size)

    @cached_property
    def may_end(self) -> np.ndarray:
        """True for tokens of the tokenizer that contain the last character of a string that ends a turn."""
        last = {stop[-1] for stop in self.make().stops}
        # A token may have a part of a character only.
        last |= set() if all(map(str.isascii, last)) else {REPLACEMENT}
        texts = self.tokenizer.batch_decode([[token] for token in range(len(self.tokenizer))], skip_special_tokens=True)
        return np.array([not last.isdisjoint(text) for text in texts])

    def close(self) -> None:
        """Starts no step any more."""
        self.threads.shutdown(wait=False, cancel_futures=True)


@dataclass
class Episode:
    """The environment of an episode, with what it has measured."""

    environment: Environment
    row: dict[str, Any]
    counts: dict[str, np.float32] = field(default_factory=dict)  # sums over its turns
    cut: bool = False  # it met the limit of turns, of an observation or of the environment's time

    def count(self, measured: Mapping[str, float]) -> None:
        """Adds what a turn has measured."""
        # The sums are float32 as in a checkpoint, so that a resumed run has the same ones.
        sums = {name: self.counts.get(name, np.float32(0)) + np.float32(value) for name, value in measured.items()}
        self.counts.update(sums)


class EnvironmentBatch:
    """The environments of a batch's episodes, as engines see them (`rollout.protocol.Environments`)."""

    def __init__(self, pool: EnvironmentPool, episodes: list[Episode], group_size: int):
        self._pool, self._episodes, self._group = pool, episodes, group_size
        self.turn_tokens, self.stops = pool.tokens, episodes[0].environment.stops

    @property
    def truncated(self) -> np.ndarray:
        """True for episodes [B, G] that met the limit of turns, of an observation or of an environment's time."""
        return np.array([episode.cut for episode in self._episodes]).reshape(-1, self._group)

    def metrics(self) -> dict[str, np.ndarray]:
        """Returns the sums over the turns of each episode: {name: [B, G]}."""
        counts = [episode.counts for episode in self._episodes]
        each = {name: np.array([c.get(name, 0.0) for c in counts], np.float32) for name in sorted({*chain(*counts)})}
        return {name: values.reshape(-1, self._group) for name, values in each.items()}

    def joined(self, later: EnvironmentBatch) -> EnvironmentBatch:
        """Returns these environments and later ones."""
        return EnvironmentBatch(self._pool, self._episodes + later._episodes, self._group)

    def take(self, groups: Sequence[int]) -> EnvironmentBatch | None:
        """Returns the environments of these groups; None: there are no groups."""
        episodes = [self._episodes[i] for b in groups for i in range(b * self._group, (b + 1) * self._group)]
        return EnvironmentBatch(self._pool, episodes, self._group) if episodes else None

    def replay(
        self, turns: Sequence[list[list[int]]], metrics: Mapping[str, np.ndarray], truncated: np.ndarray
    ) -> None:
        """Lets fresh environments see the turns of their episodes again: no checkpoint has an environment.

        The episodes keep the observations of that process, and what it measured: metrics and truncated [B, G].
        """
        pairs = zip(self._episodes, turns, strict=True)
        done = [self._pool.threads.submit(self._replay, episode, past) for episode, past in pairs if past]
        for future in done:
            future.result()
        self.recall(metrics, truncated)

    def recall(self, metrics: Mapping[str, np.ndarray], truncated: np.ndarray) -> None:
        """Goes on from what a flight says of its episodes: metrics and truncated [B, G]."""
        for i, episode in enumerate(self._episodes):
            episode.counts = {name: values.flat[i] for name, values in metrics.items()}
            episode.cut = bool(truncated.flat[i])

    def _replay(self, episode: Episode, turns: list[list[int]]) -> None:
        if any(self._step(episode, self._text(turn)).done for turn in turns):
            warnings.warn(
                "an environment has ended an episode that had gone on before the run was resumed: its later answers "
                "may differ",
                stacklevel=2,
            )

    def may_end(self, vocabulary: int) -> np.ndarray:
        """Returns True for tokens [V] after which the text may end a turn; `vocabulary`: of the model."""
        known = self._pool.may_end
        return np.pad(known, (0, max(vocabulary - len(known), 0)))[:vocabulary]

    def ends(self, turns: Sequence[list[int]]) -> list[int]:
        """Returns for each turn the number of its tokens with which its text ends it; 0: the text does not end it."""
        return [self._end(turn) if self._stopped(self._text(turn)) else 0 for turn in turns]

    def _stopped(self, text: str) -> bool:
        return any(stop in text for stop in self.stops)

    def _end(self, turn: list[int]) -> int:
        return 1 + bisect_left(range(1, len(turn)), True, key=lambda n: self._stopped(self._text(turn[:n])))

    def _text(self, turn: list[int]) -> str:
        return self._pool.tokenizer.decode(turn, skip_special_tokens=True)

    def answer(self, episode: int, turn: list[int]) -> Future[list[int] | None]:
        """Starts to answer a turn. The result is the observation's token ids; None: the episode ends."""
        return self._pool.threads.submit(self._answer, self._episodes[episode], turn)

    def _answer(self, episode: Episode, turn: list[int]) -> list[int] | None:
        began = time.perf_counter()
        reply = self._step(episode, self._text(turn))
        # A turn without an error counts 0, so that the metric is always there.
        episode.count({"errors": 0.0} | reply.metrics | {"turns": 1.0, "seconds": time.perf_counter() - began})
        if reply.done:
            return None
        if episode.counts["turns"] >= self._pool.max_turns:
            episode.cut = True
            return None
        try:
            return self._observed(episode, reply.observation, turn)
        except Exception as error:
            # A template may raise anything, though it took the results of `check`.
            _warn(error)
            episode.count({"errors": 1.0})
            episode.cut = True
            return None

    def _observed(self, episode: Episode, observation: str | tuple[str, ...], turn: list[int]) -> list[int] | None:
        """Returns the token ids of an observation, cut to its limit; None: the episode ends."""
        ids = self._pool.encoded(observation, episode.row, turn)
        if len(ids) <= self._pool.observation_tokens:
            return ids
        episode.cut = True
        if isinstance(observation, str):
            return ids[: self._pool.observation_tokens]
        return self._pool.shortened(observation, episode.row, turn)

    def _step(self, episode: Episode, text: str) -> Reply:
        """Returns the reply of an environment. An error or a time-out is a reply too, and never ends the run."""

        def step() -> Reply:
            try:
                return checked(episode.environment.step(text))
            except (Exception, SystemExit) as error:
                _warn(error)
                reason = briefly(error)
                # An environment with tools answers by messages of the chat, and any other by text.
                observation = (f"error: {reason}",) if self._pool.schemas else FAILED.format(reason)
                return Reply(observation, metrics={"errors": 1.0})

        try:
            return self._pool.limit.call(step)
        except TimeoutError:
            # The environment may still run, so it must not be asked again.
            episode.cut = True
            return Reply(done=True, metrics={"errors": 1.0})


def reset(environment: Environment, row: dict[str, Any]) -> None:
    """Begins the episode of a row. Raises: UserError, if the environment does not take it."""
    try:
        environment.reset(row)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"config.env: {type(environment).__name__}.reset does not take a row ({formats.columns_text(row)}): "
            f"{describe(error)}: mend the data or the environment"
        ) from error


def _warn(error: BaseException) -> None:
    """Tells the user where an environment failed; the policy reads what. Python shows the same warning once."""
    warnings.warn(f"an environment failed: {describe(error)}; episode/errors counts it", stacklevel=2)
