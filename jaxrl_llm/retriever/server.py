"""The application of the retriever's server: `POST /retrieve` and `GET /health`, with bounds on all that comes in."""

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

# Seconds for a body to arrive, because a client that stops in the middle of one occupies a place.
BODY_SECONDS = 10.0
SearchFn = Callable[[list[str], int], list[Found]]


@dataclass(frozen=True)
class Bounds:
    """What a request may ask for. More gets a 4xx."""

    topk: int  # if a request says nothing
    most_topk: int
    queries: int  # in a request
    characters: int  # of a query
    waiting: int  # requests that wait for one of the workers
    workers: int


LEFT = "the client has left"  # nobody reads this answer


class Refused(Exception):
    """A request that is answered with this status and reason."""

    def __init__(self, status: int, reason: str):
        self.status, self.reason = status, reason


def application(search: SearchFn, bounds: Bounds) -> Starlette:
    """Returns the application. search(queries, topk) -> documents and scores of each query."""
    limiter, free_workers, inside = anyio.CapacityLimiter(bounds.workers), anyio.Semaphore(bounds.workers), 0

    async def retrieve(request: Request) -> JSONResponse:
        nonlocal inside
        if inside >= bounds.waiting + bounds.workers:
            return _error(429, f"{inside} requests are here already: ask again later")
        # No lock is needed, because only the event loop's thread changes the number.
        inside += 1
        try:
            queries, topk, scores = read(await _body(request, bounds), bounds)
            async with free_workers:
                # A client that has timed out asks again: without this look, overload feeds itself.
                if await request.is_disconnected():
                    raise Refused(499, LEFT)
                # The search runs in a thread, so that the event loop can answer other requests.
                hits_by_query = await run_sync(search, queries, topk, limiter=limiter)
        except Refused as refused:
            return _error(refused.status, refused.reason)
        finally:
            inside -= 1
        return JSONResponse({"result": [[_plain(*hit, scores) for hit in hits] for hits in hits_by_query]})

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"]), Route("/health", health)])


async def _body(request: Request, bounds: Bounds) -> Any:
    # A character may be \\uXXXX.
    max_bytes, body = 2 * bounds.queries * (6 * bounds.characters + 64), bytearray()
    try:
        with anyio.fail_after(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                # While it comes in: a request is refused before all of it is in memory.
                if len(body) > max_bytes:
                    raise Refused(413, f"the request has more than {max_bytes} bytes")
        return json.loads(bytes(body))
    except TimeoutError:
        raise Refused(408, f"the request has not arrived within {BODY_SECONDS:g} seconds") from None
    except ClientDisconnect:
        raise Refused(499, LEFT) from None
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the request is no JSON that can be read: {error}") from None


def read(body: Any, bounds: Bounds) -> tuple[list[str], int, bool]:
    """Returns the queries of a request, the number of documents, and whether it wants scores. Raises: Refused."""
    if not isinstance(body, dict):
        raise Refused(422, "give an object with `queries`")
    queries = body.get("queries", body.get("query"))
    queries = [queries] if isinstance(queries, str) else queries
    if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
        raise Refused(422, "`queries` is no list of texts")
    topk = body.get("topk")
    topk = bounds.topk if topk is None else topk
    # True is an int.
    if not isinstance(topk, int) or isinstance(topk, bool) or not 1 <= topk <= bounds.most_topk:
        raise Refused(422, f"`topk` is no number from 1 to {bounds.most_topk}")
    if len(queries) > bounds.queries:
        raise Refused(413, f"{len(queries)} queries, more than {bounds.queries}")
    longest = max(map(len, queries))
    if longest > bounds.characters:
        raise Refused(413, f"a query has {longest} characters, more than {bounds.characters}")
    return queries, topk, bool(body.get("return_scores"))


def _plain(document: Any, score: float, scores: bool) -> dict[str, Any]:
    plain = {"id": document.id, "contents": document.contents}
    return {"document": plain, "score": score} if scores else plain


def _error(status: int, reason: str) -> JSONResponse:
    return JSONResponse({"error": reason}, status_code=status)
