"""Client of a retriever with the API of Search-R1's server, which veRL, SkyRL, slime and torchtitan use too."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import httpx

from jaxrl_llm.retriever.documents import Document, RetrieverError, document

FIRST_WAIT = 0.2  # seconds before the first retry; each later wait is twice as long


class RetrieverClient:
    """Gets documents from a server. Threads may share a client."""

    def __init__(self, url: str, *, topk: int, timeout: float, retries: int):
        """url: address of the server, with or without /retrieve; topk: documents of a query; timeout: seconds of a
        request; retries: tries after a failed request.
        """
        self._url = url if url.rstrip("/").endswith("/retrieve") else url.rstrip("/") + "/retrieve"
        self._topk, self._retries = topk, retries
        self._client = httpx.Client(timeout=timeout, trust_env=False)  # ignores the variables of a proxy

    def search(self, queries: Sequence[str]) -> list[list[tuple[Document, float | None]]]:
        """Returns the documents of each query, the best first, with their scores, None if the server sends no scores.

        Raises: RetrieverError, after the last retry, or if the server refuses the request.
        """
        body = {"queries": list(queries), "topk": self._topk, "return_scores": True}
        problem, text = "", None
        for retry in range(self._retries + 1):
            if retry:
                time.sleep(FIRST_WAIT * 2 ** (retry - 1))
            try:
                answer = self._client.post(self._url, json=body)
                # Other client errors are permanent, but 408 and 429 ask for a later try.
                if 400 <= answer.status_code < 500 and answer.status_code not in (408, 429):
                    raise RetrieverError(
                        f"{self._url} refuses the request with status {answer.status_code}: {answer.text[:200]}"
                    )
                answer.raise_for_status()
                text = answer.text
                return _documents(answer.json(), len(queries))
            except httpx.HTTPError as error:
                problem, text = f"{type(error).__name__} {error}", None
            # These errors mean that the answer is no JSON, or JSON of another form.
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                problem = str(error)
        tries = f"in {self._retries + 1} {'tries' if self._retries else 'try'}"
        if text is not None:
            form = '{"result": [[{"contents": "..."}]]} with one list per query'
            raise RetrieverError(
                f"{self._url} must answer in the form {form}, but answered {tries}: {' '.join(text.split())[:200]}"
            )
        raise RetrieverError(f"{self._url} gave no answer {tries}: {' '.join(problem.split())[:300]}")

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()


def _documents(answer: Any, count: int) -> list[list[tuple[Document, float | None]]]:
    """Returns the documents of `count` queries. Raises: ValueError, KeyError, TypeError, AttributeError."""
    result = answer["result"]
    if len(result) != count:
        raise ValueError(f"{len(result)} results for {count} queries")
    return [[_document(hit) for hit in hits] for hits in result]


def _document(hit: dict[str, Any]) -> tuple[Document, float | None]:
    """Returns document and score of a hit. A hit without scores is the document itself."""
    score = hit.get("score")
    return document({"id": ""} | hit.get("document", hit)), None if score is None else float(score)
