"""Turns the answer of a vLLM server into completions, or says why it holds none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.errors import UserError

# vLLM raises a log-probability that is below -9999, or that is computed from NaN, to -9999. No sampled token has one.
LEAST_LOGPROB = -9998.0
ROUNDING = 1e-3  # log-probabilities above 0 by less are rounded


class Unavailable(Exception):
    """No answer, or an error that a restart, a push or a retry may fix."""


class Completion(NamedTuple):
    """What a server sampled for a member of a group, as arrays: JSON takes thirty times their memory."""

    index: int  # among the members of the request
    tokens: np.ndarray  # [tokens] int32
    logprobs: np.ndarray  # [tokens] float32
    truncated: bool


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Reads an answer. Raises: Unavailable, if it is not what vLLM answers at this path, but a proxy's page or so."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise Unavailable(f"answered at {path} what vLLM does not ({type(error).__name__}: {error})") from None


def read_choices(server: str, choices: Any, parameters: dict[str, Any], vocab_size: int) -> list[Completion]:
    """Returns the completions of an answer, by member. parameters: sampling parameters of the request.

    Raises: Unavailable, if the answer is broken; UserError, if the server samples otherwise than it was asked.
    """
    answered = sorted(
        (_completion(server, choice, parameters, vocab_size) for choice in choices), key=lambda x: x.index
    )
    if (members := [completion.index for completion in answered]) != list(range(parameters["n"])):
        raise Unavailable(f"completions of members {members} came, not of all {parameters['n']}")
    return answered


def _completion(server: str, choice: dict[str, Any], parameters: dict[str, Any], vocab_size: int) -> Completion:
    reason, limit, stops = choice["finish_reason"], parameters["max_tokens"], parameters["stop_token_ids"]
    if reason not in ("stop", "length"):
        raise Unavailable(f"a completion ended with {reason!r}")
    tokens = np.array(choice["token_ids"], np.int32)
    logprobs = np.array([token["logprob"] for token in choice["logprobs"]["content"]], np.float32)
    if tokens.shape != logprobs.shape or not 1 <= len(tokens) <= limit:
        raise Unavailable(
            f"a completion of at most {limit} tokens has {tokens.size} and {logprobs.size} log-probabilities"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise UserError(f"vLLM at {server} sampled a token that the run's model lacks: serve the run's model")
    # Finite weights may overflow activations. Their NaN stay in the cache, and meet tokens of later weights there.
    if not ((logprobs > LEAST_LOGPROB) & (logprobs <= ROUNDING)).all():
        raise UserError(
            f"vLLM at {server} sampled tokens whose log-probability is no number from {LEAST_LOGPROB:g} to 0: the "
            "weights have diverged, or those before have left NaN in its cache; start it again, and resume"
        )
    stopped = tokens[-1] in stops or bool(parameters.get("stop"))
    if np.isin(tokens[:-1], stops).any() or not (stopped if reason == "stop" else len(tokens) == limit):
        raise UserError(
            f"vLLM at {server} ended a completion of {len(tokens)} tokens with token {tokens[-1]}, the run's stop "
            f"tokens are {stops} and its limit is {limit}: start it with jaxrl serve-vllm and vLLM 0.32"
        )
    return Completion(choice["index"], tokens, logprobs, reason == "length")
