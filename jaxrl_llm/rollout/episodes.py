"""The completions of a call on the host: single turns, or episodes of several turns with an environment."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.rollout.in_flight import InFlightGroups
from jaxrl_llm.rollout.protocol import Environments
from jaxrl_llm.structs import Rollouts

TURN, WAITS, ENDED = range(3)


@dataclass
class Episodes:
    """The completions of a batch on the host, N = B * G of this process: episodes, or of one turn."""

    length: np.ndarray  # [N] tokens until now
    tokens: np.ndarray  # [N, C]
    logprobs: np.ndarray  # [N, C], 0 on observations
    sampled: np.ndarray  # [N, C] bool, True on tokens of the policy
    state: np.ndarray  # [N] TURN, WAITS or ENDED
    begin: np.ndarray  # [N] place of the first token of the turn
    begins: np.ndarray  # [N, C] bool, True at the first token of each turn, also before it has been sampled
    truncated: np.ndarray  # [N] bool
    max_tokens: np.ndarray  # [N] largest length
    earlier: np.ndarray  # [N] tokens that earlier calls have left
    answers: dict[Future[list[int] | None], int] = field(default_factory=dict)  # those that are not there yet
    counted: int = 0  # of those that have ended, by `newly_ended`

    @classmethod
    def empty(cls, max_tokens: np.ndarray, length: int, pad_id: int) -> Episodes:
        """Returns completions without tokens, with room for `length` each. max_tokens [N]: their limits."""
        count = len(max_tokens)
        return cls(
            length=np.zeros(count, np.int32),
            tokens=np.full((count, length), pad_id, np.int32),
            logprobs=np.zeros((count, length), np.float32),
            sampled=np.zeros((count, length), bool),
            state=np.zeros(count, np.int32),
            begin=np.zeros(count, np.int32),
            begins=np.tile(np.arange(length) == 0, (count, 1)),
            truncated=np.zeros(count, bool),
            max_tokens=max_tokens,
            earlier=np.zeros(count, np.int32),
        )

    @classmethod
    def going_on(cls, in_flight: InFlightGroups) -> Episodes:
        """Returns the completions of an earlier call."""
        rollouts, ended = in_flight.rollouts, in_flight.ended.reshape(-1)
        # Copies: the call writes into these arrays.
        tokens, logprobs, sampled, truncated, begins = (
            x.reshape(len(ended), *x.shape[2:]).copy()
            for x in (rollouts.completions, rollouts.logprobs, rollouts.loss_mask, rollouts.truncated, in_flight.begins)
        )
        length = rollouts.completion_mask.sum(axis=-1, dtype=np.int32).reshape(-1)
        return cls(
            length=length,
            tokens=tokens,
            logprobs=logprobs,
            sampled=sampled,
            state=np.where(ended, ENDED, TURN),
            begin=begins.shape[1] - 1 - np.argmax(begins[:, ::-1], axis=1),
            begins=begins,
            truncated=truncated,
            max_tokens=np.full(len(ended), tokens.shape[1]),
            earlier=length.copy(),
        )

    def drawn(self, i: int, first: int) -> np.ndarray:
        """Returns True for the tokens of a completion from `first` on that this call has sampled."""
        return self.sampled[i, first : self.length[i]] & (np.arange(first, self.length[i]) >= self.earlier[i])

    def limits(self, turn_tokens: int) -> np.ndarray:
        """Returns the length at which each turn ends; 0: the completion is not in a turn."""
        return np.where(self.state == TURN, np.minimum(self.begin + turn_tokens, self.max_tokens), 0)

    def newly_ended(self) -> int:
        """Returns how many completions have ended since the last call."""
        before, self.counted = self.counted, int(np.sum(self.state == ENDED))
        return self.counted - before

    def append(self, i: int, tokens: Sequence[int] | np.ndarray, logprobs: Sequence[float] | np.ndarray) -> None:
        """Appends what was sampled in one completion."""
        WATCHDOG.moved()
        at = slice(self.length[i], self.length[i] + len(tokens))
        self.tokens[i, at], self.logprobs[i, at], self.sampled[i, at] = tokens, logprobs, True
        self.length[i] += len(tokens)

    def end(self, turns: np.ndarray, stop_ids: tuple[int, ...]) -> None:
        """Ends those of `turns` that have a stop token, or have met their limit: completions of one turn."""
        stopped = np.isin(self.tokens[turns, self.length[turns] - 1], stop_ids)
        self.truncated[turns] = ~stopped
        self.state[turns[stopped | (self.length[turns] >= self.max_tokens[turns])]] = ENDED

    def end_turns(self, turns: np.ndarray, environments: Environments, stop_ids: tuple[int, ...]) -> None:
        """Asks the environments of those `turns` that have ended. Drops the tokens after the end of a turn."""
        texts = [self.tokens[i, self.begin[i] : self.length[i]].tolist() for i in turns]
        limits = self.limits(environments.turn_tokens)
        for i, turn, end in zip(turns.tolist(), texts, environments.ends(texts), strict=True):
            if end:
                # The turn ends in the middle of what was sampled: the tokens behind it were never said.
                self._cut(i, int(self.begin[i]) + end)
            elif turn[-1] not in stop_ids:
                if self.length[i] >= limits[i]:
                    self.state[i], self.truncated[i] = ENDED, True
                continue
            self.state[i] = WAITS
            self.answers[environments.answer(i, turn[:end] if end else turn)] = i

    def rollouts(self, group_size: int, versions: np.ndarray) -> Rollouts:
        """Returns the episodes as completions [B, G, C]. Tells of log-probabilities that are not finite."""
        if lost := int(np.sum(self.sampled & ~np.isfinite(self.logprobs))):
            # No error: updates on them are skipped, and a health rule stops the run or sends it back.
            print(
                f"note: {lost:,} of {np.sum(self.sampled):,} sampled tokens have no finite log-probability, because "
                "weights or activations of the model are not finite",
                flush=True,
            )
        mask = np.arange(self.tokens.shape[1]) < self.length[:, None]

        def by_prompt(x: np.ndarray) -> Any:
            return x.reshape(-1, group_size, *x.shape[1:])

        return Rollouts(*map(by_prompt, (self.tokens, mask, self.sampled, self.logprobs, self.truncated, versions)))

    def _cut(self, i: int, length: int) -> None:
        self.sampled[i, length:], self.logprobs[i, length:] = False, 0.0
        self.length[i] = length

    def take_answers(self, due: Collection[Future[list[int] | None]] | None = None) -> list[int]:
        """Appends the observations of the answers in `due`, or of all answers that are ready. Returns the episodes that
        continue."""
        going_on = []
        for answer in [answer for answer in self.answers if (answer.done() if due is None else answer in due)]:
            WATCHDOG.moved()
            i, observation = self.answers.pop(answer), answer.result()
            if observation is None:
                self.state[i] = ENDED
                continue
            start, end = self.length[i], self.length[i] + len(observation)
            if end >= self.max_tokens[i]:
                # The policy needs room for a token.
                self.state[i], self.truncated[i] = ENDED, True
                continue
            self.tokens[i, start:end], self.state[i] = observation, TURN
            self.length[i] = self.begin[i] = end
            self.begins[i, end] = True
            going_on.append(i)
        return going_on
