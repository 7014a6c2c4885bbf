"""Reward by a judge: a language model behind an OpenAI-compatible chat endpoint scores each completion."""

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
RETRIED_STATUSES = (408, 409, 425, 429, 500, 502, 503, 504, 529)  # HTTP statuses after which a request is retried
# {HTTP status that only the user can change: what is wrong}
FATAL_STATUSES = {401: "the key", 403: "the key", 404: "url or model", 405: "url"}
LONGEST_WAIT = 60.0  # longest wait between two tries in seconds
MAX_TIMEOUTS = 3  # consecutive time-outs after which the judge is not asked again for this batch


@dataclass
class Endpoint:
    """Endpoint of the judge, with the settings of requests and the state of one batch."""

    client: httpx.AsyncClient
    url: str
    request: dict[str, Any]  # fields of each request, without the messages
    retries: int
    backoff: float  # seconds before the second try; each later wait is twice as long
    semaphore: asyncio.Semaphore  # limits the number of concurrent requests
    timeouts: int = 0  # consecutive time-outs


class JudgeReply(NamedTuple):
    """Reply of the judge to one question."""

    text: str | None  # None if all tries failed
    tries: int
    given_up: bool = False  # whether the time of the batch ended, or the judge stopped answering


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
    """Raises: UserError, for an invalid url, template or rubric, or a missing key."""
    if not re.match(r"https?://[^/]", url):
        raise UserError(f"judge.score: url = {url!r} must be an address such as 'http://host:8000/v1'")
    fields = _template_fields(_read_template(template, criteria, rubric_column))
    if "completion" not in fields:
        raise UserError(f"judge.score: template = {template!r} must have the field {{completion}}, the answer to judge")
    if criteria and rubric_column:
        raise UserError("judge.score: criteria and rubric_column both set the rubric: remove one of the two")
    if (criteria or rubric_column) and "rubric" not in fields:
        raise UserError(f"judge.score: template = {template!r} must have the field {{rubric}}, because a rubric is set")
    if criteria:
        _config_rubric(criteria, most)
    _headers(api_key_env)


def _reach(*, url: str, api_key_env: str, timeout: float, **_: Any) -> None:
    """Raises: UserError, if no server answers at the url. The content of the answer does not matter."""
    try:
        httpx.get(f"{url.rstrip('/')}/models", headers=_headers(api_key_env), timeout=timeout)
    except httpx.TransportError as error:
        raise UserError(
            f"judge.score: no server answers at url = {url} ({type(error).__name__}: {error}): start the judge, or "
            "correct the url"
        ) from error


def _config_rubric(criteria: tuple[dict[str, Any], ...], most: float) -> Rubric:
    """Returns the rubric that the config sets. Raises: UserError, for an invalid criterion."""
    try:
        return rubric.read(criteria, most)
    except ValueError as error:
        raise UserError(f"judge.score: criteria: {error}") from None


def _columns(
    *, template: str, criteria: tuple[dict[str, Any], ...], rubric_column: str, most: float, **_: Any
) -> dict[str, Callable[[Any], Any] | None]:
    """Returns {column of a row that the question shows: its reader, or None}, for `asks`."""
    other_fields = {"prompt", "completion"} | ({"rubric"} if criteria or rubric_column else set())
    columns = _template_fields(_read_template(template, criteria, rubric_column)) - other_fields
    readers = {rubric_column: lambda value: rubric.read(value, most)} if rubric_column else {}
    return dict.fromkeys(columns) | readers


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
    """Returns the number in the last <score> tags of the judge's reply, divided by `most`; None if it has none.

    With a rubric, the score is the weighted mean of the scores of its criteria, which are a JSON object in the reply;
    None if a score is missing or out of its range.
    url: address of the API, such as "http://host:8000/v1"; template: text file with {prompt}, {completion}, {rubric}
    and columns of the data in braces, "" for a general template; criteria: the rubric, a tuple of dicts as for
    `rubric.read`; rubric_column: column of the row with such a list, a row without a list abstains; tag: name of the
    tags around the number; api_key_env: environment variable with the key, "" if the API needs no key;
    concurrency: number of concurrent requests; timeout: seconds of a request; retries: tries after a temporary error,
    with a wait of `backoff` seconds that doubles; max_tokens: token limit of a reply.
    A batch ends before config.reward.timeout, or after MAX_TIMEOUTS consecutive time-outs; completions without a reply
    then have no verdict.
    Logs the shares of completions without a reply (failed), without a reply because the batch ended (unanswered), and
    without scores in the reply (unparsed); the mean number of tries; and the mean score of each named criterion.
    Raises: UserError, if the endpoint refuses the key or does not know the model.
    """
    form = _read_template(template, criteria, rubric_column)
    shared_rubric = _config_rubric(criteria, most) if criteria else None
    rubrics = [shared_rubric] * len(completions)
    if rubric_column:
        rubrics = [None if is_empty(x) else rubric.read(x, most) for x in columns.pop(rubric_column)]
    # If rubrics are a column, a row without a rubric is not judged.
    judged = [i for i, row_rubric in enumerate(rubrics) if row_rubric or not rubric_column]
    verdicts: list[float | None] = [None] * len(completions)
    if not judged:
        return verdicts
    rows = {
        i: {key: values[i] for key, values in columns.items()}
        | {"prompt": _conversation(prompts[i]), "completion": text_of(completions[i])}
        | ({"rubric": rubric.described(row_rubric)} if (row_rubric := rubrics[i]) else {})
        for i in judged
    }
    # Equal questions are asked once, because completions of a group are often equal.
    questions = {i: form.format(**row) for i, row in rows.items()}
    request = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(timeout=timeout, limits=limits, headers=_headers(api_key_env)) as client:
        endpoint = Endpoint(
            client=client,
            url=f"{url.rstrip('/')}/chat/completions",
            request=request,
            retries=retries,
            backoff=backoff,
            semaphore=asyncio.Semaphore(concurrency),
        )
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
    """Returns the score of a reply, None if it has no score. Adds the scores of named criteria to `by_criterion`."""
    if not criteria:
        return _score(reply, tag, most)
    shares = rubric.scores(reply, criteria)
    for criterion, share in zip(criteria, shares or (), strict=False):
        if not criterion.name.isdecimal():
            by_criterion.setdefault(criterion.name, []).append(share)
    return None if shares is None else rubric.total(shares, criteria)


async def _ask_all(endpoint: Endpoint, questions: list[str]) -> dict[str, JudgeReply]:
    """Asks each distinct question once, until the time of the batch is over. Raises: UserError, as `_ask`."""
    tasks = {question: asyncio.ensure_future(_ask(endpoint, question)) for question in dict.fromkeys(questions)}
    remaining = deadline() - time.monotonic()
    seconds = None if remaining == math.inf else max(remaining, 0.0)
    try:
        finished, _ = await asyncio.wait(tasks.values(), timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for question in finished:
            question.result()
        return {text: question.result() if question in finished else GIVEN_UP for text, question in tasks.items()}
    finally:
        # Requests are cancelled after an error too, because no request may continue after the batch.
        for question in tasks.values():
            question.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def _ask(endpoint: Endpoint, question: str) -> JudgeReply:
    """Sends a question up to 1 + retries times, until a reply comes. Raises: UserError, for a permanent error."""
    message = endpoint.request | {"messages": [{"role": "user", "content": question}]}
    for attempt in range(1, endpoint.retries + 2):
        # The wait is random, so that requests are spread over time.
        wait = endpoint.backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)
        try:
            async with endpoint.semaphore:
                if endpoint.timeouts >= MAX_TIMEOUTS:
                    return JudgeReply(None, attempt - 1, given_up=True)
                response = await endpoint.client.post(endpoint.url, json=message)
            endpoint.timeouts = 0
            if response.status_code in FATAL_STATUSES:
                wrong_setting = FATAL_STATUSES[response.status_code]
                raise UserError(
                    f"judge.score: {endpoint.url} answers with status {response.status_code}: correct {wrong_setting}"
                )
            if response.is_success:
                return JudgeReply(str(response.json()["choices"][0]["message"]["content"]), attempt)
            if response.status_code not in RETRIED_STATUSES:
                # A question that is refused for good, for example because it is too long, has no reply.
                return JudgeReply(None, attempt)
            retry_after = response.headers.get("retry-after", "")
            wait = max(wait, float(retry_after) if retry_after.isdigit() else 0.0)
        except httpx.TimeoutException:
            endpoint.timeouts += 1
        # A failed connection, or a reply in another form than that of the API, is retried too.
        except (httpx.TransportError, ValueError, KeyError, IndexError, TypeError):
            pass
        if attempt <= endpoint.retries:
            await asyncio.sleep(min(wait, LONGEST_WAIT))
    return JudgeReply(None, endpoint.retries + 1)


def _score(reply: str | None, tag: str, max_score: float) -> float | None:
    """Returns the number in the last tags of a reply as a share of `max_score`; None if it has no such number."""
    return rubric.share(last_tagged(reply or "", tag), max_score)


def _read_template(template: str, criteria: tuple[dict[str, Any], ...] = (), rubric_column: str = "") -> str:
    """Returns the text of a template file, or a general template if `template` is "". Raises: UserError."""
    if not template:
        return rubric.QUESTION if criteria or rubric_column else TEMPLATE
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"judge.score: template = {template!r} cannot be read ({error}): name a readable text file"
        ) from None


def _template_fields(form: str) -> set[str]:
    """Returns the names in braces in a template. Raises: UserError, for a single brace."""
    try:
        return {name for _, name, _, _ in Formatter().parse(form) if name is not None}
    except ValueError as error:
        raise UserError(
            f"judge.score: the template has an invalid brace ({error}): write {{{{ and }}}} for braces that are text"
        ) from None


def _headers(api_key_env: str) -> dict[str, str]:
    """Returns the HTTP headers with the key. Raises: MissingHere, if the environment variable is not set."""
    if api_key_env and not os.environ.get(api_key_env):
        raise MissingHere(
            f"judge.score: api_key_env = {api_key_env!r}: this environment variable is not set; set it to the key of "
            "the API"
        )
    return {"Authorization": f"Bearer {os.environ[api_key_env]}"} if api_key_env else {}


def _conversation(prompt: Any) -> str:
    """Returns a prompt as text for the judge, with the role before each message."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
