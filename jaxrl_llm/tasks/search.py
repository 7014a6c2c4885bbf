"""Search between thoughts, as in Search-R1 (arXiv 2503.09516): the environment, and rewards for the answers.

The policy writes `<search>`, reads `<information>`, and writes `<answer>` at the end. Answers are judged by exact match
and F1 after SQuAD's normalization (arXiv 1606.05250). Rows: `encyclopedia`, or files of Search-R1.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from jaxrl_llm.config.names import resolve
from jaxrl_llm.config.schema import AtLeastOne, Count, Positive
from jaxrl_llm.errors import UserError
from jaxrl_llm.retriever.documents import Document, RetrieverError, document, information, shown
from jaxrl_llm.tasks import PREFILL, SOURCES, each_judged, last_tagged, policy_texts, reads, text_of
from jaxrl_llm.tasks.protocol import Reply

INVALID = (
    "\nThat is no search and no answer. Write <search>what to look for</search> to search, or <answer>the "
    "answer</answer> to finish.\n"
)
SEARCHED_OUT = "\nNo search is left. Write <answer>the answer</answer>.\n"
PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")
UNTAGGED = r"(?:(?!</?(?:think|search|information|answer)>).)*"  # text without a tag of the protocol
THOUGHT = rf"\s*<think>{UNTAGGED}</think>\s*"
SEARCH_TURN = re.compile(rf"{THOUGHT}<search>{UNTAGGED}</search>\s*", re.DOTALL)
ANSWER_TURN = re.compile(rf"{THOUGHT}<answer>{UNTAGGED}</answer>\s*", re.DOTALL)


class Search:
    """Environment that answers a search with documents. An answer ends the episode; other turns get an error text."""

    stops = ("</search>", "</answer>")

    def __init__(
        self, *, corpus: str, url: str, topk: AtLeastOne, most_searches: Count, timeout: Positive, retries: Count
    ):
        """corpus: function that returns documents, or .jsonl file, for an index in this process; "" for a server.

        url: address of the server with the index, "" for an index in this process; topk: documents of a search;
        most_searches: searches of an episode; timeout: seconds of a request to the server; retries: tries after a
        failed request.
        Raises: UserError, unless exactly one of corpus and url is set, if the corpus cannot be read, or if the server
        does not answer with documents.
        """
        if bool(corpus) == bool(url):
            raise UserError(
                f"config.env.corpus = {corpus!r} and config.env.url = {url!r}: exactly one of the two must be set"
            )
        self._find_documents = _client(url, topk, timeout, retries) if url else _index(corpus, topk)
        self._searches_left = most_searches

    def reset(self, row: dict[str, Any]) -> None:
        """Ignores the row, because only the reward reads its answer."""

    def step(self, text: str) -> Reply:
        """Handles the first search or answer of the turn, whichever comes first."""
        (search_start, query), (answer_start, _) = _first_tagged(text, "search"), _first_tagged(text, "answer")
        if answer_start >= 0 and not 0 <= search_start < answer_start:
            return Reply(done=True, metrics={"valid": 1.0})
        if not query.strip():
            return Reply(INVALID, metrics={"invalid": 1.0})
        if not self._searches_left:
            return Reply(SEARCHED_OUT, metrics={"invalid": 1.0})
        # A search is counted before it runs, because a dead server would otherwise never end the episode.
        self._searches_left -= 1
        metrics = {"valid": 1.0, "searches": 1.0}
        try:
            documents = self._find_documents(query.strip())
            text, metrics = shown(documents), metrics if documents else metrics | {"empty": 1.0}
        except RetrieverError:
            text, metrics = "the search failed", metrics | {"errors": 1.0}
        return Reply(information(text), metrics=metrics)


@reads(answer=lambda value: _accepted(value))
def exact_match(
    completions: list[Any], answer: list[Any], turns: list[Any] | None = None, **columns: Any
) -> list[float | None]:
    """Returns 1 if the last answer of the policy is one of the row's answers, else 0. An empty answer is wrong."""
    return _compared(_equal, completions, answer, turns)


@reads(answer=lambda value: _accepted(value))
def f1(completions: list[Any], answer: list[Any], turns: list[Any] | None = None, **columns: Any) -> list[float | None]:
    """Returns the largest F1 of words between the last answer of the policy and one of the row's answers."""
    return _compared(_f1, completions, answer, turns)


def answered(completions: list[Any], turns: list[Any] | None = None, **columns: Any) -> list[float]:
    """Returns 1 if the policy gives an answer, else 0."""
    return [float(bool(text)) for text in _answers(completions, turns)]


@reads(answer=lambda value: _accepted(value))
def with_format(completions: list[Any], answer: list[Any], turns: list[Any], **columns: Any) -> list[float | None]:
    """Returns the reward of Search-R1 v0.3 (arXiv 2505.15117): exact match, with a part for the format of the episode.

    | answer | in the format | not in the format |
    |---|---|---|
    | right | 1 | 0.8 |
    | wrong | 0.2 | 0.1 |
    | none | 0.2 | 0 |

    In the format, each turn but the last thinks and then searches, and the last thinks and then answers. A <think>
    that the chat template writes into the prompt is a part of the first turn.
    """

    def reward(right: float | None, text: str, in_format: bool) -> float | None:
        if right is None:
            return None
        return (1.0 if in_format else 0.8) if right else 0.2 if in_format else 0.1 if text else 0.0

    right, texts = exact_match(completions, answer, turns), _answers(completions, turns)
    formats = map(_has_format, turns, columns.get(PREFILL) or [None] * len(turns))
    return [reward(*row) for row in zip(right, texts, formats, strict=True)]


def _has_format(turns: list[Any], prefill: str | None) -> bool:
    """Returns whether an episode has Search-R1's format. prefill: begin of the first turn in the prompt."""
    texts, observations = policy_texts(turns), [turn["content"] for turn in turns if turn["role"] != "assistant"]
    if not texts or not all("<information>" in text for text in observations):
        return False
    texts[0] = (prefill or "") + texts[0]
    return all(map(SEARCH_TURN.fullmatch, texts[:-1])) and bool(ANSWER_TURN.fullmatch(texts[-1]))


def _normalized(text: str) -> str:
    """Returns a text in lower case, without punctuation and articles, and with single spaces.

    A text that consists of articles, such as the vitamin "A", keeps them.
    """
    words = str(text).lower().translate(PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", words).split()) or " ".join(words.split())


def _compared(
    compare: Callable[[str, str], float], completions: list[Any], answer: list[Any], turns: list[Any] | None
) -> list[float | None]:
    """Returns the largest compare(answer of the policy, accepted answer) of each episode, after normalization."""

    def judge(text: str, row: Any) -> float:
        return max((compare(_normalized(text), _normalized(accepted)) for accepted in _accepted(row)), default=0.0)

    return each_judged(judge, _answers(completions, turns), answer)


def _accepted(answer: Any) -> list[Any]:
    """Returns the accepted answers of a row, which holds one or several texts or numbers. Raises: ValueError."""
    answer = answer.tolist() if hasattr(answer, "tolist") else answer
    if isinstance(answer, dict):
        raise ValueError(
            f"column 'answer' is {answer!r:.200}, but must be text, or a list of accepted answers (set data.convert)"
        )
    return list(answer) if isinstance(answer, (list, tuple, set, frozenset)) else [answer]


def _answers(completions: list[Any], turns: list[Any] | None) -> list[str]:
    """Returns the last answer of the policy in each episode, "" if it has none.

    Texts of the environment are no answers. Opening and closing tag must be in the same turn.
    """
    texts = [[text_of(c)] for c in completions] if turns is None else map(policy_texts, turns)
    tagged = [[last_tagged(text, "answer") for text in episode] for episode in texts]
    return [next((text.strip() for text in reversed(answers) if text is not None), "") for answers in tagged]


def _equal(text: str, accepted: str) -> float:
    return float(bool(text) and text == accepted)


def _f1(text: str, accepted: str) -> float:
    words, accepted_words = text.split(), accepted.split()
    common = sum((Counter(words) & Counter(accepted_words)).values())
    return 2 * common / (len(words) + len(accepted_words)) if common else 0.0


def _first_tagged(text: str, tag: str) -> tuple[int, str]:
    """Returns index and content of the first <tag> that </tag> closes; (-1, "") if the text has none."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    start = text.find(opening)
    end = text.find(closing, start + len(opening)) if start >= 0 else -1
    return (start, text[start + len(opening) : end]) if end >= 0 else (-1, "")


@cache
def _index(corpus: str, topk: int) -> Callable[[str], list[Document]]:
    """Returns a function that finds documents in an index, which all episodes of a process share."""
    # The import is local, because processes of rewards import this file too, but do not search.
    from jaxrl_llm.retriever.index import Index

    if corpus.endswith(".jsonl"):
        index = Index.open(Path(corpus))
    else:
        index = Index.of([document(row) for row in resolve(corpus, SOURCES, "config.env.corpus")()])
    return lambda query: [hit for hit, _ in index.search([query], topk)[0]]


@cache
def _client(url: str, topk: int, timeout: float, retries: int) -> Callable[[str], list[Document]]:
    """Returns a function that finds documents on a server. Raises: UserError, if the server does not answer."""
    from jaxrl_llm.retriever.client import RetrieverClient

    client = RetrieverClient(url, topk=topk, timeout=timeout, retries=retries)
    try:
        # The server is tried before a model is loaded, because a failed search in an episode is only an observation.
        client.search(["a question"])
    except RetrieverError as error:
        raise UserError(
            f"config.env.url = {url!r}: {error}; start a retriever (jaxrl serve-retriever), or correct the address"
        ) from error
    return lambda query: [hit for hit, _ in client.search([query])[0]]
