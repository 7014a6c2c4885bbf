"""Application of the retriever's server: `POST /retrieve` and `GET /health`, with bounds on requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio
from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from jaxrl_llm.retriever.index import Found

# Seconds in which the body of a request must arrive, because a client that stops halfway occupies a place.
BODY_SECONDS = 10.0
SearchFn = Callable[[list[str], int], list[Found]]


@dataclass(frozen=True)
class Bounds:
    """Bounds on a request, beyond which it gets a status of 4xx."""

    topk: int  # documents of a query, if a request does not say
    most_topk: int  # most documents of a query
    queries: int  # most queries of a request
    characters: int  # most characters of a query
    waiting: int  # most requests that wait for a worker
    workers: int  # number of threads that search


DISCONNECTED = "the client has disconnected"  # reason of a status that no client reads


class Refused(Exception):
    """A request that is answered with this status and reason."""

    def __init__(self, status: int, reason: str):
        self.status, self.reason = status, reason


def application(search: SearchFn, bounds: Bounds) -> Starlette:
    """Returns the application. search: function (queries, topk) -> documents and scores of each query."""
    limiter, free_workers = anyio.CapacityLimiter(bounds.workers), anyio.Semaphore(bounds.workers)
    open_requests = 0

    async def retrieve(request: Request) -> JSONResponse:
        """Answers a request: the documents that are nearest to its queries."""
        nonlocal open_requests
        if open_requests >= bounds.waiting + bounds.workers:
            return _error(429, f"the server has {open_requests} open requests, which is its limit: try again later")
        # No lock is needed, because only the event loop's thread changes the number.
        open_requests += 1
        try:
            queries, topk, with_scores = read(await _body(request, bounds), bounds)
            async with free_workers:
                # Requests of disconnected clients are dropped, because a client that timed out has sent a new request.
                if await request.is_disconnected():
                    raise Refused(499, DISCONNECTED)
                # The search runs in a thread, so that the event loop can answer other requests.
                hits_by_query = await run_sync(search, queries, topk, limiter=limiter)
        except Refused as refused:
            return _error(refused.status, refused.reason)
        finally:
            open_requests -= 1
        return JSONResponse({"result": [[_plain(*hit, with_scores) for hit in hits] for hits in hits_by_query]})

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"]), Route("/health", health)])


async def _body(request: Request, bounds: Bounds) -> Any:
    """Returns the JSON value of a request's body. Raises: Refused, for a body that is too large, late or no JSON."""
    # A character takes up to 6 bytes, as \\uXXXX.
    max_bytes, body = 2 * bounds.queries * (6 * bounds.characters + 64), bytearray()
    try:
        with anyio.fail_after(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                # The size is checked for each chunk, so that a large request never fills the memory.
                if len(body) > max_bytes:
                    raise Refused(413, f"a request may have at most {max_bytes} bytes")
        return json.loads(bytes(body))
    except TimeoutError:
        raise Refused(408, f"a request must arrive within {BODY_SECONDS:g} seconds") from None
    except ClientDisconnect:
        raise Refused(499, DISCONNECTED) from None
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the request must be JSON: {error}") from None


def read(body: Any, bounds: Bounds) -> tuple[list[str], int, bool]:
    """Returns the queries of a request, the number of documents per query, and whether it asks for scores.

    Raises: Refused, for a request of another form, or beyond the bounds.
    """
    if not isinstance(body, dict):
        raise Refused(422, "the request must be an object with `queries`")
    queries = body.get("queries", body.get("query"))
    queries = [queries] if isinstance(queries, str) else queries
    if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
        raise Refused(422, "`queries` must be a list of texts")
    topk = body.get("topk")
    topk = bounds.topk if topk is None else topk
    # A bool is refused, because True is an int for isinstance.
    if not isinstance(topk, int) or isinstance(topk, bool) or not 1 <= topk <= bounds.most_topk:
        raise Refused(422, f"`topk` must be a whole number from 1 to {bounds.most_topk}")
    if len(queries) > bounds.queries:
        raise Refused(413, f"a request may have at most {bounds.queries} queries, but has {len(queries)}")
    longest = max(map(len, queries))
    if longest > bounds.characters:
        raise Refused(413, f"a query may have at most {bounds.characters} characters, but has {longest}")
    return queries, topk, bool(body.get("return_scores"))


def _plain(document: Any, score: float, with_score: bool) -> dict[str, Any]:
    """Returns a hit as JSON: document and score, or the document alone."""
    plain = {"id": document.id, "contents": document.contents}
    return {"document": plain, "score": score} if with_score else plain


def _error(status: int, reason: str) -> JSONResponse:
    return JSONResponse({"error": reason}, status_code=status)
