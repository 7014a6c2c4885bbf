"""Reads completions from the answers of vLLM servers, and checks them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.errors import UserError

# vLLM replaces log-probabilities below -9999 and NaN by -9999. A sampled token never has such a log-probability.
LEAST_LOGPROB = -9998.0
ROUNDING = 1e-3  # log-probabilities may exceed 0 by this much through rounding


class Unavailable(Exception):
    """A request got no usable answer, but a restart, a push or a retry may fix that."""


class Completion(NamedTuple):
    """A sampled completion as arrays, because the JSON of an answer takes thirty times their memory."""

    index: int  # index among the request's members
    tokens: np.ndarray  # [tokens] int32
    logprobs: np.ndarray  # [tokens] float32
    truncated: bool


@contextmanager
def reading_answer(path: str) -> Iterator[None]:
    """Wraps code that reads an answer. Raises: Unavailable, if it is no answer of vLLM, for example a proxy's page."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise Unavailable(f"its answer at {path} is not one of vLLM ({type(error).__name__}: {error})") from None


def read_choices(server: str, choices: Any, parameters: dict[str, Any], vocab_size: int) -> list[Completion]:
    """Returns the completions of an answer, by member. parameters: sampling parameters of the request.

    Raises: Unavailable, if the answer is broken; UserError, if the server has not sampled as requested.
    """
    answered = sorted(
        (_completion(server, choice, parameters, vocab_size) for choice in choices), key=lambda x: x.index
    )
    if (members := [completion.index for completion in answered]) != list(range(parameters["n"])):
        raise Unavailable(f"its answer has completions {members} instead of all {parameters['n']}")
    return answered


def _completion(server: str, choice: dict[str, Any], parameters: dict[str, Any], vocab_size: int) -> Completion:
    """Returns a completion of vLLM's answer. Raises: Unavailable or UserError, if it cannot be right."""
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
    # Even finite weights may overflow activations. Their NaN stays in the cache and spoils tokens of later weights.
    if not ((logprobs > LEAST_LOGPROB) & (logprobs <= ROUNDING)).all():
        raise UserError(
            f"vLLM at {server} sampled tokens whose log-probability is not between {LEAST_LOGPROB:g} and 0: the "
            "weights have diverged, or earlier weights have left NaN in its cache; restart the server, and resume the "
            "run"
        )
    stopped = tokens[-1] in stops or bool(parameters.get("stop"))
    if np.isin(tokens[:-1], stops).any() or not (stopped if reason == "stop" else len(tokens) == limit):
        raise UserError(
            f"vLLM at {server} ended a completion of {len(tokens)} tokens with token {tokens[-1]}, but the run's stop "
            f"tokens are {stops} and its limit is {limit}: start it with jaxrl serve-vllm and vLLM 0.32"
        )
    return Completion(choice["index"], tokens, logprobs, reason == "length")
