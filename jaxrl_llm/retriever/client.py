"""The client of a retriever: the API of Search-R1's server, which veRL, SkyRL, slime and torchtitan use too."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import httpx

from jaxrl_llm.retriever.documents import Document, RetrieverError, document

# Seconds before the first retry; each retry doubles it.
PAUSE = 0.2


class RetrieverClient:
    """Asks a server for documents. Threads may share it."""

    def __init__(self, url: str, *, topk: int, timeout: float, retries: int):
        """url: the server's, with or without /retrieve; timeout: seconds of a request; retries: further tries."""
        self._url = url if url.rstrip("/").endswith("/retrieve") else url.rstrip("/") + "/retrieve"
        self._topk, self._retries = topk, retries
        self._client = httpx.Client(timeout=timeout, trust_env=False)  # no proxy

    def search(self, queries: Sequence[str]) -> list[list[tuple[Document, float | None]]]:
        """Returns the documents of each query, the best first, with their scores if the server gives them.

        Raises: RetrieverError, after the last retry, or if the server refuses the request.
        """
        body = {"queries": list(queries), "topk": self._topk, "return_scores": True}
        problem, text = "", None
        for retry in range(self._retries + 1):
            if retry:
                time.sleep(PAUSE * 2 ** (retry - 1))
            try:
                answer = self._client.post(self._url, json=body)
                # The same request would be refused again. 408 and 429 say: later.
                if 400 <= answer.status_code < 500 and answer.status_code not in (408, 429):
                    raise RetrieverError(f"{self._url} refuses the request: {answer.status_code} {answer.text[:200]}")
                answer.raise_for_status()
                text = answer.text
                return _documents(answer.json(), len(queries))
            except httpx.HTTPError as error:
                problem, text = f"{type(error).__name__} {error}", None
            # No JSON, or JSON of another form.
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                problem = str(error)
        tries = f"in {self._retries + 1} {'tries' if self._retries else 'try'}"
        if text is not None:
            form = '{"result": [[{"contents": "..."}]]}, a list for each query'
            raise RetrieverError(f"{self._url} answers {tries}, but not as {form}: {' '.join(text.split())[:200]}")
        raise RetrieverError(f"{self._url} gave no answer {tries}: {' '.join(problem.split())[:300]}")

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()


def _documents(answer: Any, count: int) -> list[list[tuple[Document, float | None]]]:
    """Reads an answer, with scores or without. Raises: ValueError, KeyError, TypeError, AttributeError."""
    result = answer["result"]
    if len(result) != count:
        raise ValueError(f"{len(result)} results for {count} queries")
    return [[_document(hit) for hit in hits] for hits in result]


def _document(hit: dict[str, Any]) -> tuple[Document, float | None]:
    # A hit without a score is the document itself.
    score = hit.get("score")
    return document({"id": ""} | hit.get("document", hit)), None if score is None else float(score)
