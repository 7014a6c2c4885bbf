"""The completions of one call while an engine samples them: single turns, or episodes with an environment."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_llm.machine.hang import WATCHDOG
from jaxrl_llm.rollout.in_flight import InFlightGroups
from jaxrl_llm.rollout.protocol import EpisodeEnvironments
from jaxrl_llm.structs import Rollouts

# States of a completion: the policy writes a turn, the environment has not answered yet, or the completion is over.
IN_TURN, AWAITS_ANSWER, ENDED = range(3)


@dataclass
class Episodes:
    """The N = B * G completions of one call in this process, on the host. Engines append what they sample."""

    lengths: np.ndarray  # [N] number of tokens so far
    tokens: np.ndarray  # [N, C]
    logprobs: np.ndarray  # [N, C] log-probabilities of sampled tokens, 0 on observations
    sampled: np.ndarray  # [N, C] bool, True on tokens that the policy sampled
    states: np.ndarray  # [N] IN_TURN, AWAITS_ANSWER or ENDED
    turn_start: np.ndarray  # [N] place of the first token of the current turn
    is_turn_start: np.ndarray  # [N, C] bool, True at the first token of each turn, even if it is not sampled yet
    truncated: np.ndarray  # [N] bool, True if a token limit ended the completion
    max_tokens: np.ndarray  # [N] most tokens of each completion
    earlier_lengths: np.ndarray  # [N] number of tokens that earlier calls have appended
    pending_answers: dict[Future[list[int] | None], int] = field(default_factory=dict)  # answer -> completion number
    reported_ended: int = 0  # ended completions that `count_newly_ended` has counted

    @classmethod
    def empty(cls, max_tokens: np.ndarray, length: int, pad_id: int) -> Episodes:
        """Returns completions without tokens, with room for `length` tokens each. max_tokens [N]: their limits."""
        count = len(max_tokens)
        return cls(
            lengths=np.zeros(count, np.int32),
            tokens=np.full((count, length), pad_id, np.int32),
            logprobs=np.zeros((count, length), np.float32),
            sampled=np.zeros((count, length), bool),
            states=np.full(count, IN_TURN, np.int32),
            turn_start=np.zeros(count, np.int32),
            is_turn_start=np.tile(np.arange(length) == 0, (count, 1)),
            truncated=np.zeros(count, bool),
            max_tokens=max_tokens,
            earlier_lengths=np.zeros(count, np.int32),
        )

    def restart(self, i: int, max_tokens: int) -> None:
        """Makes room for another completion of a single turn in place of completion i. max_tokens: its limit."""
        self.drop_tokens(i, 0)
        self.states[i], self.truncated[i], self.max_tokens[i] = IN_TURN, False, max_tokens

    @classmethod
    def from_in_flight(cls, in_flight: InFlightGroups) -> Episodes:
        """Returns the completions of an earlier call, which this call continues."""
        rollouts, has_ended = in_flight.rollouts, in_flight.has_ended.reshape(-1)
        assert rollouts.tree is None, "an engine continues a completion after its last token"
        # The arrays are copied, because this call writes into them.
        tokens, logprobs, sampled, truncated, is_turn_start = (
            x.reshape(len(has_ended), *x.shape[2:]).copy()
            for x in (
                rollouts.completions,
                rollouts.logprobs,
                rollouts.loss_mask,
                rollouts.truncated,
                in_flight.is_turn_start,
            )
        )
        lengths = rollouts.completion_mask.sum(axis=-1, dtype=np.int32).reshape(-1)
        return cls(
            lengths=lengths,
            tokens=tokens,
            logprobs=logprobs,
            sampled=sampled,
            states=np.where(has_ended, ENDED, IN_TURN),
            turn_start=is_turn_start.shape[1] - 1 - np.argmax(is_turn_start[:, ::-1], axis=1),
            is_turn_start=is_turn_start,
            truncated=truncated,
            max_tokens=np.full(len(has_ended), tokens.shape[1]),
            earlier_lengths=lengths.copy(),
        )

    def sampled_by_this_call(self, i: int, first_place: int) -> np.ndarray:
        """Returns True for the tokens of completion i from `first_place` on that this call has sampled."""
        places = np.arange(first_place, self.lengths[i])
        return self.sampled[i, first_place : self.lengths[i]] & (places >= self.earlier_lengths[i])

    def turn_limits(self, turn_tokens: np.ndarray | int) -> np.ndarray:
        """Returns the length [N] at which the current turn ends; 0 for completions outside of a turn.

        turn_tokens: most tokens of a turn of each completion [N], or of all.
        """
        return np.where(self.states == IN_TURN, np.minimum(self.turn_start + turn_tokens, self.max_tokens), 0)

    def count_newly_ended(self) -> int:
        """Returns the number of completions that have ended since the last call of this method."""
        already_reported, self.reported_ended = self.reported_ended, int(np.sum(self.states == ENDED))
        return self.reported_ended - already_reported

    def append(self, i: int, tokens: Sequence[int] | np.ndarray, logprobs: Sequence[float] | np.ndarray) -> None:
        """Appends sampled tokens and their log-probabilities to completion i."""
        WATCHDOG.report_progress()
        places = slice(self.lengths[i], self.lengths[i] + len(tokens))
        self.tokens[i, places], self.logprobs[i, places], self.sampled[i, places] = tokens, logprobs, True
        self.lengths[i] += len(tokens)

    def end_single_turns(self, numbers: np.ndarray, stop_ids: tuple[int, ...]) -> None:
        """Ends completions of a single turn that have a stop token or have reached their limit.

        numbers: numbers of the completions that have new tokens.
        """
        stopped = np.isin(self.tokens[numbers, self.lengths[numbers] - 1], stop_ids)
        self.truncated[numbers] = ~stopped
        self.states[numbers[stopped | (self.lengths[numbers] >= self.max_tokens[numbers])]] = ENDED

    def end_turns(self, numbers: np.ndarray, environments: EpisodeEnvironments, stop_ids: tuple[int, ...]) -> None:
        """Sends the turns that are over to their environments, and drops the tokens after the end of a turn.

        numbers: numbers of the completions that have new tokens.
        """
        turns = [self.tokens[i, self.turn_start[i] : self.lengths[i]].tolist() for i in numbers]
        limits = self.turn_limits(environments.turn_tokens)
        turn_ends = environments.find_turn_ends(numbers.tolist(), turns)
        for i, turn, turn_end in zip(numbers.tolist(), turns, turn_ends, strict=True):
            if turn_end:
                # The turn ends before the last sampled token. The later tokens leave the episode.
                self.drop_tokens(i, int(self.turn_start[i]) + turn_end)
            elif turn[-1] not in stop_ids:
                if self.lengths[i] >= limits[i]:
                    self.states[i], self.truncated[i] = ENDED, True
                continue
            self.states[i] = AWAITS_ANSWER
            self.pending_answers[environments.answer(i, turn[:turn_end] if turn_end else turn)] = i

    def append_answers(self, due_answers: Collection[Future[list[int] | None]] | None = None) -> list[int]:
        """Appends the observations of answered turns. Returns the numbers of the episodes that continue.

        due_answers: answers to append; None = all answers that are ready.
        """
        continuing = []
        for answer in [x for x in self.pending_answers if (x.done() if due_answers is None else x in due_answers)]:
            WATCHDOG.report_progress()
            i, observation = self.pending_answers.pop(answer), answer.result()
            if observation is None:
                self.states[i] = ENDED
                continue
            start, end = self.lengths[i], self.lengths[i] + len(observation)
            if end >= self.max_tokens[i]:
                # The observation leaves no room for a token of the policy.
                self.states[i], self.truncated[i] = ENDED, True
                continue
            self.tokens[i, start:end], self.states[i] = observation, IN_TURN
            self.lengths[i] = self.turn_start[i] = end
            self.is_turn_start[i, end] = True
            continuing.append(i)
        return continuing

    def rollouts(self, group_size: int, versions: np.ndarray) -> Rollouts:
        """Returns the completions as arrays [B, G, C]. versions [N, C]: version of the weights of each token.

        Prints a note if log-probabilities are not finite.
        """
        if broken := int(np.sum(self.sampled & ~np.isfinite(self.logprobs))):
            # This is no error, because updates skip such tokens, and a health rule stops the run or rolls it back.
            print(
                f"note: {broken:,} of {np.sum(self.sampled):,} sampled tokens have no finite log-probability, because "
                "weights or activations of the model are not finite",
                flush=True,
            )
        mask = np.arange(self.tokens.shape[1]) < self.lengths[:, None]

        def by_prompt(x: np.ndarray) -> Any:
            return x.reshape(-1, group_size, *x.shape[1:])

        return Rollouts(
            completions=by_prompt(self.tokens),
            completion_mask=by_prompt(mask),
            loss_mask=by_prompt(self.sampled),
            logprobs=by_prompt(self.logprobs),
            truncated=by_prompt(self.truncated),
            versions=by_prompt(versions),
        )

    def drop_tokens(self, i: int, new_length: int) -> None:
        """Removes the tokens of completion i from `new_length` on."""
        self.sampled[i, new_length:], self.logprobs[i, new_length:] = False, 0.0
        self.lengths[i] = new_length
