"""A judge: a language model behind an OpenAI-compatible chat endpoint gives each completion a score."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

import httpx

from jaxrl_llm.config.schema import AtLeastOne, Count, NotNegative, Positive, checked_by
from jaxrl_llm.errors import MissingHere, UserError
from jaxrl_llm.tasks import asks, deadline, is_empty, last_tagged, rubric, text_of, unlogged
from jaxrl_llm.tasks.rubric import Rubric

TEMPLATE = """You judge the answer of an assistant. How helpful, correct and clear is it?

The conversation:
{prompt}

The answer:
{completion}

Think about it in a few sentences. Then give a score from 0 (useless) to 10 (perfect), like this: <score>5</score>"""
AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)  # statuses that another try may change
WRONG = {401: "the key", 403: "the key", 404: "url and model", 405: "url"}  # statuses that only the user can change
LONGEST_WAIT = 60.0  # seconds between two tries
# Time-outs in a row after which the rest of a batch is not asked.
SILENT = 3


@dataclass
class Endpoint:
    """Where and how to ask."""

    client: httpx.AsyncClient
    url: str
    request: dict[str, Any]  # the fields of each request, without the messages
    retries: int
    backoff: float  # seconds before the second try; each later wait is twice as long
    at_once: asyncio.Semaphore
    silent: int = 0  # time-outs since the last answer


class JudgeReply(NamedTuple):
    """What came back; None: nothing after all tries."""

    text: str | None
    tries: int
    given_up: bool = False  # because the time of the batch was over, or the endpoint silent


GIVEN_UP = JudgeReply(None, 0, given_up=True)


def _check(
    *,
    url: str,
    template: str,
    api_key_env: str,
    criteria: tuple[dict[str, Any], ...],
    rubric_column: str,
    most: float,
    **_: Any,
) -> None:
    """Raises: UserError, if the url is none, the template or the rubric cannot be used, or the key is not there."""
    if not re.match(r"https?://[^/]", url):
        raise UserError(f"judge.score: url = {url!r} is no address: give one like 'http://host:8000/v1'")
    shown, by_rubric = _fields(_read(template, criteria, rubric_column)), bool(criteria or rubric_column)
    if "completion" not in shown:
        raise UserError(f"judge.score: template {template!r} does not show the answer: write {{completion}} into it")
    if criteria and rubric_column:
        raise UserError("judge.score: both criteria and rubric_column give a rubric: leave one of them out")
    if by_rubric and "rubric" not in shown:
        raise UserError(f"judge.score: template {template!r} does not show the rubric: write {{rubric}} into it")
    if criteria:
        _own_rubric(criteria, most)
    _headers(api_key_env)


def _reach(*, url: str, api_key_env: str, timeout: float, **_: Any) -> None:
    """Raises: UserError, if nothing answers at the url, whatever the answer is."""
    try:
        httpx.get(f"{url.rstrip('/')}/models", headers=_headers(api_key_env), timeout=timeout)
    except httpx.TransportError as error:
        raise UserError(
            f"judge.score: nothing answers at {url} ({type(error).__name__}: {error}): start the judge, or mend the url"
        ) from error


def _own_rubric(criteria: tuple[dict[str, Any], ...], most: float) -> Rubric:
    """Returns the rubric that the config gives. Raises: UserError."""
    try:
        return rubric.read(criteria, most)
    except ValueError as error:
        raise UserError(f"judge.score: criteria: {error}") from None


def _columns(
    *, template: str, criteria: tuple[dict[str, Any], ...], rubric_column: str, most: float, **_: Any
) -> dict[str, Callable[[Any], Any] | None]:
    """Returns the columns of a row that the question shows, with what reads a rubric."""
    by_rubric = {"rubric"} if criteria or rubric_column else set()
    shown = _fields(_read(template, criteria, rubric_column)) - {"prompt", "completion"} - by_rubric
    readers = {rubric_column: lambda value: rubric.read(value, most)} if rubric_column else {}
    return dict.fromkeys(shown) | readers


@asks(_columns)
@checked_by(_check, reach=_reach)
async def score(
    prompts: list[Any],
    completions: list[Any],
    log_metric: Callable[[str, float], None] = unlogged,
    *,
    url: str,
    model: str,
    template: str = "",
    criteria: tuple[dict, ...] = (),
    rubric_column: str = "",
    tag: str = "score",
    most: Positive = 10.0,
    api_key_env: str = "",
    concurrency: AtLeastOne = 32,
    timeout: Positive = 60.0,
    retries: Count = 3,
    backoff: NotNegative = 1.0,
    temperature: NotNegative = 0.0,
    max_tokens: AtLeastOne = 512,
    **columns: Any,
) -> list[float | None]:
    """The number in the last <score> tags of the judge's reply, divided by `most`; None if there is no such number.

    With a rubric, the weighted mean of its criteria's scores, which are a JSON object of the reply; None if a score is
    missing or out of its range. criteria: the rubric, a tuple of dicts as for `rubric.read`. rubric_column: column of
    the row that holds such a list; a row without a list abstains.
    url: address of the API, as "http://host:8000/v1". template: text file with {prompt}, {completion}, {rubric} and
    columns of the data in braces, "" for a general template. tag: name of the tags around the number. api_key_env:
    environment variable with the key, "" if the API needs no key.
    concurrency: requests at a time. timeout: seconds of a request. retries: more tries after an error that may pass,
    with a wait of `backoff` seconds that doubles. max_tokens: limit of a reply's tokens.
    A batch ends before config.reward.timeout, and after SILENT time-outs in a row: then the rest has no verdict.
    Logs the shares of completions without a reply (failed), of those that the end of the batch left so (unanswered),
    and of those without scores in the reply (unparsed), the mean tries, and the mean of each criterion with a name.
    Raises: UserError, if the endpoint refuses the key or does not know the model.
    """
    form, shared = _read(template, criteria, rubric_column), _own_rubric(criteria, most) if criteria else None
    rubrics = [shared] * len(completions)
    if rubric_column:
        rubrics = [None if is_empty(x) else rubric.read(x, most) for x in columns.pop(rubric_column)]
    # A row without a rubric is not judged, where rubrics are a column.
    judged = [i for i, each in enumerate(rubrics) if each or not rubric_column]
    verdicts: list[float | None] = [None] * len(completions)
    if not judged:
        return verdicts
    rows = {
        i: {key: values[i] for key, values in columns.items()}
        | {"prompt": _conversation(prompts[i]), "completion": text_of(completions[i])}
        | ({"rubric": rubric.described(each)} if (each := rubrics[i]) else {})
        for i in judged
    }
    # Equal questions are asked once: completions of a group are often equal.
    questions = {i: form.format(**row) for i, row in rows.items()}
    request = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(timeout=timeout, limits=limits, headers=_headers(api_key_env)) as client:
        at_once = asyncio.Semaphore(concurrency)
        endpoint = Endpoint(client, f"{url.rstrip('/')}/chat/completions", request, retries, backoff, at_once)
        replies = await _ask_all(endpoint, [*questions.values()])
    by_criterion: dict[str, list[float]] = {}
    for i, question in questions.items():
        verdicts[i] = _verdict(replies[question].text, rubrics[i], tag, most, by_criterion)
    _log(log_metric, [replies[question] for question in questions.values()], [verdicts[i] for i in judged])
    log_metric("tries", sum(reply.tries for reply in replies.values()) / len(replies))
    for name, shares in by_criterion.items():
        log_metric(f"rubric/{name}", sum(shares) / len(shares))
    return verdicts


def _log(log_metric: Callable[[str, float], None], replies: list[JudgeReply], verdicts: list[float | None]) -> None:
    """Logs the shares of completions without a verdict, by the reason."""
    failed = sum(reply.text is None for reply in replies)
    log_metric("failed", failed / len(replies))
    log_metric("unanswered", sum(reply.given_up for reply in replies) / len(replies))
    log_metric("unparsed", (verdicts.count(None) - failed) / len(replies))


def _verdict(
    reply: str | None, criteria: Rubric | None, tag: str, most: float, by_criterion: dict[str, list[float]]
) -> float | None:
    """Returns the score of a reply; None: it has none. Adds the shares of criteria with names to `by_criterion`."""
    if not criteria:
        return _score(reply, tag, most)
    shares = rubric.scores(reply, criteria)
    for criterion, share in zip(criteria, shares or (), strict=False):
        if not criterion.name.isdecimal():
            by_criterion.setdefault(criterion.name, []).append(share)
    return None if shares is None else rubric.total(shares, criteria)


async def _ask_all(endpoint: Endpoint, questions: list[str]) -> dict[str, JudgeReply]:
    """Asks each different question once, until the time of the batch is over. Raises: UserError, as `_ask` does."""
    tasks = {question: asyncio.ensure_future(_ask(endpoint, question)) for question in dict.fromkeys(questions)}
    remaining = deadline() - time.monotonic()
    seconds = None if remaining == math.inf else max(remaining, 0.0)
    try:
        finished, _ = await asyncio.wait(tasks.values(), timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for question in finished:
            question.result()
        return {text: question.result() if question in finished else GIVEN_UP for text, question in tasks.items()}
    finally:
        # Requests are cancelled after an error too, because none may continue when the batch is over.
        for question in tasks.values():
            question.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def _ask(endpoint: Endpoint, question: str) -> JudgeReply:
    """Asks until there is a reply, at most 1 + retries times. Raises: UserError, for an error that does not pass."""
    message = endpoint.request | {"messages": [{"role": "user", "content": question}]}
    for tried in range(1, endpoint.retries + 2):
        # The wait is random, so that the requests do not come all at the same time.
        wait = endpoint.backoff * 2 ** (tried - 1) * random.uniform(0.5, 1.0)
        try:
            async with endpoint.at_once:
                if endpoint.silent >= SILENT:
                    return JudgeReply(None, tried - 1, given_up=True)
                response = await endpoint.client.post(endpoint.url, json=message)
            endpoint.silent = 0
            if response.status_code in WRONG:
                what = WRONG[response.status_code]
                raise UserError(f"judge.score: {endpoint.url} answers {response.status_code}: put {what} right")
            if response.is_success:
                return JudgeReply(str(response.json()["choices"][0]["message"]["content"]), tried)
            if response.status_code not in AGAIN:
                # A refusal that a retry cannot change has no reply, such as a question that is too long.
                return JudgeReply(None, tried)
            retry_after = response.headers.get("retry-after", "")
            wait = max(wait, float(retry_after) if retry_after.isdigit() else 0.0)
        except httpx.TimeoutException:
            endpoint.silent += 1
        except (httpx.TransportError, ValueError, KeyError, IndexError, TypeError):
            # No connection, or no reply of this API.
            pass
        if tried <= endpoint.retries:
            await asyncio.sleep(min(wait, LONGEST_WAIT))
    return JudgeReply(None, endpoint.retries + 1)


def _score(reply: str | None, tag: str, max_score: float) -> float | None:
    return rubric.share(last_tagged(reply or "", tag), max_score)


def _read(template: str, criteria: tuple[dict[str, Any], ...] = (), rubric_column: str = "") -> str:
    if not template:
        return rubric.QUESTION if criteria or rubric_column else TEMPLATE
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"judge.score: template {template!r} cannot be read ({error}): give a text file") from None


def _fields(form: str) -> set[str]:
    try:
        return {name for _, name, _, _ in Formatter().parse(form) if name is not None}
    except ValueError as error:
        raise UserError(
            f"judge.score: the template has a wrong brace ({error}): double each one that is text"
        ) from None


def _headers(api_key_env: str) -> dict[str, str]:
    if api_key_env and not os.environ.get(api_key_env):
        raise MissingHere(f"judge.score: environment variable {api_key_env} is not set: put the key of the API there")
    return {"Authorization": f"Bearer {os.environ[api_key_env]}"} if api_key_env else {}


def _conversation(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
