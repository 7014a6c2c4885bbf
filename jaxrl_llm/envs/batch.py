"""The environments of a batch, one for each episode. They see text, and engines see token ids.

They run in threads, with limits of time, turns and tokens.
"""

from __future__ import annotations

import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import cached_property, partial
from threading import Thread
from typing import Any

import numpy as np

from jaxrl_llm import envs
from jaxrl_llm.config.names import arguments, resolve
from jaxrl_llm.config.schema import AtLeastOne, MayChange, NotNegative
from jaxrl_llm.data import encoding
from jaxrl_llm.envs.protocol import Environment, Reply
from jaxrl_llm.errors import UserError, briefly, describe
from jaxrl_llm.structs import Config

__all__: tuple[str, ...] = ()  # no class here is an environment that a config may name

REPLACEMENT = "\ufffd"  # what a part of a character decodes to
FAILED = "\n\n[The environment failed: {}]\n\n"


def open_environments(config: Config, tokenizer: Any, opened: ExitStack) -> EnvironmentPool | None:
    """Opens the environments that a config names; None: it names none. They close with `opened`. Raises: UserError."""
    if "env" not in config:
        return None
    make = partial(resolve(config.env.name, envs, "config.env.name"), **arguments(config.env))
    return opened.enter_context(closing(EnvironmentPool(tokenizer, make, **config.turns)))


class EnvironmentPool:
    """The limits of episodes, and the threads that run their environments."""

    def __init__(
        self,
        tokenizer: Any,
        make: Callable[[], Environment],
        *,
        most: AtLeastOne,
        tokens: AtLeastOne,
        observation_tokens: AtLeastOne,
        workers: MayChange[AtLeastOne],
        timeout: MayChange[NotNegative],
    ):
        """make() -> an environment. The other arguments are the section `turns` of a config, which explains them."""
        self.tokenizer, self.make = tokenizer, make
        self.most, self.tokens, self.observation_tokens, self.timeout = most, tokens, observation_tokens, timeout
        self.threads = ThreadPoolExecutor(workers)
        # The first environment finds what is wrong with the arguments before a run begins.
        self.schemas: list[dict[str, Any]] = getattr(make(), "schemas", [])  # of tools, for the chat template
        if self.schemas:
            self.rendered(("result",))

    def begin(self, rows: Sequence[dict[str, Any]], group_size: int) -> EnvironmentBatch:
        """Returns the environments of a batch, each with its data row."""
        return EnvironmentBatch(self, [row for row in rows for _ in range(group_size)], group_size)

    def rendered(self, observation: str | tuple[str, ...]) -> str:
        """Returns the text of an observation: what the chat template writes between two turns of the policy.

        Raises: UserError, if the template does not know results of tools.
        """
        if isinstance(observation, str):
            return observation
        template = partial(self.tokenizer.apply_chat_template, tokenize=False, tools=self.schemas)
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        results = [{"role": "tool", "content": text} for text in observation]
        try:
            before, end = template(said), self.tokenizer.eos_token
            whole = template(said + results, add_generation_prompt=True)
            turn = before[: before.rindex(end) + len(end)]
        except Exception as error:  # a template may raise anything
            raise UserError(f"the chat template does not take results of tools: {describe(error)}") from error
        if not whole.startswith(turn) or not all(text in whole[len(turn) :] for text in observation):
            raise UserError("the chat template does not show results of tools: use another model, or another env")
        return whole[len(turn) :]

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


class EnvironmentBatch:
    """The environments of a batch's episodes, as engines see them (`rollout.protocol.Environments`)."""

    def __init__(self, pool: EnvironmentPool, rows: Sequence[dict[str, Any]], group_size: int):
        self._pool, self._group = pool, group_size
        self.turn_tokens = pool.tokens
        self._environments = [pool.make() for _ in rows]
        self.stops = self._environments[0].stops
        for environment, row in zip(self._environments, rows, strict=True):
            environment.reset(row)
        self._counts: list[dict[str, float]] = [{} for _ in rows]
        self._cut = np.zeros(len(rows), bool)

    @property
    def truncated(self) -> np.ndarray:
        """True for episodes [B, G] that met the limit of turns, of an observation or of an environment's time."""
        return self._cut.reshape(-1, self._group)

    def metrics(self) -> dict[str, np.ndarray]:
        """Returns the sums over the turns of each episode: {name: [B, G]}."""
        names = sorted({name for counts in self._counts for name in counts})
        each = {name: np.array([counts.get(name, 0.0) for counts in self._counts], np.float32) for name in names}
        return {name: values.reshape(-1, self._group) for name, values in each.items()}

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

    def answer(self, episode: int, turn: list[int]) -> Future[list[int]]:
        """Starts to answer a turn. The result is the observation's token ids; []: the episode ends."""
        return self._pool.threads.submit(self._answer, episode, turn)

    def _answer(self, episode: int, turn: list[int]) -> list[int]:
        counts, began = self._counts[episode], time.perf_counter()
        reply = self._step(episode, self._text(turn))
        measured = {"errors": 0.0} | reply.metrics | {"turns": 1.0, "seconds": time.perf_counter() - began}
        counts.update({name: counts.get(name, 0.0) + value for name, value in measured.items()})
        if reply.done:
            return []
        if counts["turns"] >= self._pool.most:
            self._cut[episode] = True
            return []
        ids = encoding.encode_text(self._pool.rendered(reply.observation), self._pool.tokenizer)
        if len(ids) > self._pool.observation_tokens:
            self._cut[episode], ids = True, ids[: self._pool.observation_tokens]
        return ids

    def _step(self, episode: int, text: str) -> Reply:
        """Returns the reply of an environment. An error or a time-out is a reply too, and never ends the run."""
        environment, replies = self._environments[episode], list[Reply]()

        def step() -> None:
            try:
                replies.append(environment.step(text))
            except Exception as error:
                # The policy reads what failed, and the user where. Python shows the same warning once.
                warnings.warn(f"an environment failed: {describe(error)}; episode/errors counts it", stacklevel=2)
                replies.append(Reply(FAILED.format(briefly(error)), metrics={"errors": 1.0}))

        if not self._pool.timeout:
            step()
            return replies[0]
        # A thread of its own: one that never returns must not keep a worker.
        thread = Thread(target=step, daemon=True)
        thread.start()
        thread.join(self._pool.timeout)
        if replies:
            return replies[0]
        self._cut[episode] = True  # the environment may still run, so it must not be asked again
        return Reply(done=True, metrics={"errors": 1.0})
