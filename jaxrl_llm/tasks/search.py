"""Search between thoughts, as in Search-R1 (arXiv 2503.09516): the environment, and rewards for what is answered.

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
# Text without a tag of the protocol.
INSIDE = r"(?:(?!</?(?:think|search|information|answer)>).)*"
THOUGHT = rf"\s*<think>{INSIDE}</think>\s*"
SEARCHES = re.compile(rf"{THOUGHT}<search>{INSIDE}</search>\s*", re.DOTALL)
ANSWERS = re.compile(rf"{THOUGHT}<answer>{INSIDE}</answer>\s*", re.DOTALL)


class Search:
    """Answers a search with documents. An answer ends the episode; all else is invalid, and is told so."""

    stops = ("</search>", "</answer>")

    def __init__(
        self, *, corpus: str, url: str, topk: AtLeastOne, most_searches: Count, timeout: Positive, retries: Count
    ):
        """corpus: function that returns documents, or .jsonl file, for an index here, "" if a server has the index.

        url: address of the server, "" if this process has the index. topk: documents of a search. timeout: seconds of a
        request to the server. retries: more tries of a request.
        Raises: UserError, unless exactly one of corpus and url is set, if the corpus cannot be read, or the server
        gives no documents.
        """
        if bool(corpus) == bool(url):
            raise UserError(f"config.env.corpus = {corpus!r} and url = {url!r}: give one of them")
        self._find = _client(url, topk, timeout, retries) if url else _index(corpus, topk)
        self._searches_left = most_searches

    def reset(self, row: dict[str, Any]) -> None:
        """Needs nothing of the row: only the reward looks at its answer."""

    def step(self, text: str) -> Reply:
        """Answers the turn's first search or answer, whichever comes first."""
        (asks, query), (answers, _) = _first_tagged(text, "search"), _first_tagged(text, "answer")
        if answers >= 0 and not 0 <= asks < answers:
            return Reply(done=True, metrics={"valid": 1.0})
        if not query.strip():
            return Reply(INVALID, metrics={"invalid": 1.0})
        if not self._searches_left:
            return Reply(SEARCHED_OUT, metrics={"invalid": 1.0})
        # A search counts before it runs, because a dead server would otherwise keep the episode going.
        self._searches_left -= 1
        metrics = {"valid": 1.0, "searches": 1.0}
        try:
            documents = self._find(query.strip())
            text, metrics = shown(documents), metrics if documents else metrics | {"empty": 1.0}
        except RetrieverError:
            text, metrics = "the search failed", metrics | {"errors": 1.0}
        return Reply(information(text), metrics=metrics)


@reads(answer=lambda value: _accepted(value))
def exact_match(
    completions: list[Any], answer: list[Any], turns: list[Any] | None = None, **columns: Any
) -> list[float | None]:
    """1 where the last answer of the policy is one of the row's answers. An empty answer is never right."""
    return _compared(_equal, completions, answer, turns)


@reads(answer=lambda value: _accepted(value))
def f1(completions: list[Any], answer: list[Any], turns: list[Any] | None = None, **columns: Any) -> list[float | None]:
    """The largest F1 of words, between the last answer of the policy and one of the row's answers."""
    return _compared(_f1, completions, answer, turns)


def answered(completions: list[Any], turns: list[Any] | None = None, **columns: Any) -> list[float]:
    """1 where the policy gives an answer."""
    return [float(bool(text)) for text in _answers(completions, turns)]


@reads(answer=lambda value: _accepted(value))
def with_format(completions: list[Any], answer: list[Any], turns: list[Any], **columns: Any) -> list[float | None]:
    """The reward of Search-R1 v0.3 (arXiv 2505.15117): exact match, and a part of it for episodes in its format.

    Right 1, or 0.8 without the format; wrong 0.2 in the format, or 0.1 with an answer at least; else 0.
    In the format, each turn but the last thinks and then searches, and the last thinks and then answers. A <think>
    that the chat template has written into the prompt is a part of the first turn.
    """

    def reward(right: float | None, text: str, form: bool) -> float | None:
        if right is None:
            return None
        return (1.0 if form else 0.8) if right else 0.2 if form else 0.1 if text else 0.0

    right, texts = exact_match(completions, answer, turns), _answers(completions, turns)
    forms = map(_has_format, turns, columns.get(PREFILL) or [None] * len(turns))
    return [reward(*row) for row in zip(right, texts, forms, strict=True)]


def _has_format(turns: list[Any], begun: str | None) -> bool:
    texts, observations = policy_texts(turns), [turn["content"] for turn in turns if turn["role"] != "assistant"]
    if not texts or not all("<information>" in text for text in observations):
        return False
    texts[0] = (begun or "") + texts[0]
    return all(map(SEARCHES.fullmatch, texts[:-1])) and bool(ANSWERS.fullmatch(texts[-1]))


def _normal(text: str) -> str:
    """Returns a text in lower case, without punctuation, articles and more than one space.

    A text of articles alone, such as the vitamin "A", keeps them.
    """
    words = str(text).lower().translate(PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", words).split()) or " ".join(words.split())


def _compared(
    compare: Callable[[str, str], float], completions: list[Any], answer: list[Any], turns: list[Any] | None
) -> list[float | None]:
    """Compares the normal forms of each answer of the policy and the accepted ones; returns the largest value."""

    def judge(text: str, row: Any) -> float:
        return max((compare(_normal(text), _normal(accepted)) for accepted in _accepted(row)), default=0.0)

    return each_judged(judge, _answers(completions, turns), answer)


def _accepted(answer: Any) -> list[Any]:
    """Returns the accepted answers of a row: text or a number, or several of them."""
    answer = answer.tolist() if hasattr(answer, "tolist") else answer
    if isinstance(answer, dict):
        raise ValueError(
            f"column 'answer' is {answer!r:.200}: make it text, or a list of accepted answers (data.convert)"
        )
    return list(answer) if isinstance(answer, (list, tuple, set, frozenset)) else [answer]


def _answers(completions: list[Any], turns: list[Any] | None) -> list[str]:
    """Returns the last answer of each episode, "" if there is none.

    What an environment said is no answer, and a tag that is open at the end of a turn is not closed by the next one.
    """
    texts = [[text_of(c)] for c in completions] if turns is None else map(policy_texts, turns)
    tagged = [[last_tagged(text, "answer") for text in episode] for episode in texts]
    return [next((text.strip() for text in reversed(each) if text is not None), "") for each in tagged]


def _equal(text: str, accepted: str) -> float:
    return float(bool(text) and text == accepted)


def _f1(text: str, accepted: str) -> float:
    words, accepted_words = text.split(), accepted.split()
    common = sum((Counter(words) & Counter(accepted_words)).values())
    return 2 * common / (len(words) + len(accepted_words)) if common else 0.0


def _first_tagged(text: str, tag: str) -> tuple[int, str]:
    """Returns place and content of the first <tag> that </tag> closes; (-1, ""): there is none."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    start = text.find(opening)
    end = text.find(closing, start + len(opening)) if start >= 0 else -1
    return (start, text[start + len(opening) : end]) if end >= 0 else (-1, "")


# One index for all episodes of a process.
@cache
def _index(corpus: str, topk: int) -> Callable[[str], list[Document]]:
    # The import is local, because a process of rewards imports this file too, and searches nothing.
    from jaxrl_llm.retriever.index import Index

    if corpus.endswith(".jsonl"):
        index = Index.open(Path(corpus))
    else:
        index = Index.of([document(row) for row in resolve(corpus, SOURCES, "config.env.corpus")()])
    return lambda query: [hit for hit, _ in index.search([query], topk)[0]]


@cache
def _client(url: str, topk: int, timeout: float, retries: int) -> Callable[[str], list[Document]]:
    from jaxrl_llm.retriever.client import RetrieverClient

    client = RetrieverClient(url, topk=topk, timeout=timeout, retries=retries)
    try:
        # Once, before a model is loaded: in an episode a search that fails is only an observation.
        client.search(["a question"])
    except RetrieverError as error:
        raise UserError(
            f"config.env.url = {url!r}: {error}: give the address of one that runs (jaxrl serve-retriever)"
        ) from error
    return lambda query: [hit for hit, _ in client.search([query])[0]]
