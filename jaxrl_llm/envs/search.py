"""Search between thoughts, as in Search-R1 (arXiv 2503.09516).

The policy writes `<search>`, reads `<information>`, and writes `<answer>` at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from jaxrl_llm.config.names import resolve
from jaxrl_llm.config.schema import AtLeastOne, Count, Positive
from jaxrl_llm.data import tasks
from jaxrl_llm.envs.protocol import Reply
from jaxrl_llm.errors import UserError
from jaxrl_llm.retriever.client import RetrieverClient, RetrieverError
from jaxrl_llm.retriever.documents import Document, document, information, shown
from jaxrl_llm.retriever.index import Index

__all__ = ("Search",)

INVALID = (
    "\nThat is no search and no answer. Write <search>what to look for</search> to search, or <answer>the "
    "answer</answer> to finish.\n"
)
SEARCHED_OUT = "\nNo search is left. Write <answer>the answer</answer>.\n"
FAILED = "the search failed"


class Search:
    """Answers a search with documents. An answer ends the episode; all else is invalid, and is told so."""

    stops = ("</search>", "</answer>")

    def __init__(
        self, *, corpus: str, url: str, topk: AtLeastOne, most_searches: Count, timeout: Positive, retries: Count
    ):
        """corpus: a task function that returns documents, or a .jsonl file, for an index in this process; url: of a

        server instead. topk: documents of a search. timeout, retries: of a request to the server.
        Raises: UserError, if not one of corpus and url is given, the corpus cannot be read, or the server gives no
        documents.
        """
        if bool(corpus) == bool(url):
            raise UserError(f"config.env.corpus = {corpus!r} and url = {url!r}: give one of them")
        self._find = _client(url, topk, timeout, retries) if url else _index(corpus, topk)
        self._searches_left = most_searches

    def reset(self, row: dict[str, Any]) -> None:
        """Needs nothing of the row: only the reward looks at its answer."""

    def step(self, text: str) -> Reply:
        """Answers the turn's first search or answer, whichever comes first."""
        (asks, query), (answers, _) = first_tagged(text, "search"), first_tagged(text, "answer")
        if answers >= 0 and not 0 <= asks < answers:
            return Reply(done=True, metrics={"valid": 1.0})
        if not query.strip():
            return Reply(INVALID, metrics={"invalid": 1.0})
        if not self._searches_left:
            return Reply(SEARCHED_OUT, metrics={"invalid": 1.0})
        # Before the search: one that fails counts too, or a dead server would keep the episode going.
        self._searches_left -= 1
        metrics = {"valid": 1.0, "searches": 1.0}
        try:
            text = shown(self._find(query.strip()))
        except RetrieverError:
            text, metrics = FAILED, metrics | {"errors": 1.0}
        return Reply(information(text), metrics=metrics)


def first_tagged(text: str, tag: str) -> tuple[int, str]:
    """Returns place and content of the first <tag> that </tag> closes; (-1, ""): there is none."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    start = text.find(opening)
    end = text.find(closing, start + len(opening)) if start >= 0 else -1
    return (start, text[start + len(opening) : end]) if end >= 0 else (-1, "")


# One index for all episodes of a process.
@cache
def _index(corpus: str, topk: int) -> Callable[[str], list[Document]]:
    if corpus.endswith(".jsonl"):
        index = Index.open(Path(corpus))
    else:
        index = Index.of([document(row) for row in resolve(corpus, tasks, "config.env.corpus")()])
    return lambda query: [hit for hit, _ in index.search([query], topk)[0]]


@cache
def _client(url: str, topk: int, timeout: float, retries: int) -> Callable[[str], list[Document]]:
    client = RetrieverClient(url, topk=topk, timeout=timeout, retries=retries)
    try:
        # Once, before a model is loaded: in an episode a search that fails is only an observation.
        client.search(["a question"])
    except RetrieverError as error:
        raise UserError(
            f"config.env.url = {url!r}: {error}: start the retriever (jaxrl serve-retriever), or mend the address"
        ) from error
    return lambda query: [hit for hit, _ in client.search([query])[0]]
