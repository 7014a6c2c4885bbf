"""A search server: `jaxrl serve-retriever --corpus FILE.jsonl [--port 8000]`.

It answers `POST /retrieve` as Search-R1's server does, with BM25, or with vectors of an encoder (--dense MODEL).
docs/retriever.md has the formats.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl_llm.errors import Parser, UserError, run_main
from jaxrl_llm.retriever.index import Index
from jaxrl_llm.rollout.vllm.address import LOOPBACK

if TYPE_CHECKING:  # it imports torch
    from jaxrl_llm.retriever.dense import DenseIndex

# Seconds for the searches that run when the server is told to end.
ENDING_SECONDS = 5


def main() -> None:
    parser = Parser("jaxrl_llm.tools.serve_retriever", description=__doc__)
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="JSON lines with id and contents, or id, title and text")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine alone)")
    add("--public", action="store_true", help="allow an address that others can reach")
    add("--port", type=int, default=8000)
    add("--topk", type=int, default=3, help="documents of a query, if a request does not say (default: %(default)s)")
    add("--most-topk", type=int, default=100, help="the most that a request may ask for (default: %(default)s)")
    add("--most-queries", type=int, default=512, help="in a request (default: %(default)s)")
    add("--most-characters", type=int, default=4096, help="of a query (default: %(default)s)")
    add("--most-waiting", type=int, default=256, help="requests that wait for a worker (default: %(default)s)")
    add("--workers", type=int, default=2, help="threads that search (default: %(default)s)")
    add("--dense", default="", metavar="MODEL", help="an encoder of transformers, such as intfloat/e5-base-v2")
    add("--pooling", choices=("mean", "cls"), default="mean", help="of the encoder (default: %(default)s)")
    add("--query-prefix", default="query: ", help="what the encoder expects before a query (default: %(default)r)")
    add("--passage-prefix", default="passage: ", help="what it expects before a document (default: %(default)r)")
    add("--most-tokens", type=int, default=256, help="of a text for the encoder (default: %(default)s)")
    args = parser.parse_args()
    if args.host not in LOOPBACK and not args.public:
        raise UserError(
            f"--host {args.host}: whoever reaches the server reads the corpus and uses the machine, and nothing is "
            "encrypted; keep 127.0.0.1, or say --public on a network that is yours alone"
        )
    # type, and not isinstance: a flag is a bool, and so an int.
    numbers = {name: value for name, value in vars(args).items() if type(value) is int}
    for name, value in numbers.items():
        if value < 1 or (name == "port" and value > 65535):
            raise UserError(f"--{name.replace('_', '-')} {value}: give a number of 1 or more")
    # Only now: these packages are an extra, and the arguments are checked without them.
    try:
        import uvicorn

        from jaxrl_llm.retriever.server import Bounds, application
    except ImportError as error:
        raise UserError(f"the server needs {error.name}: pip install 'jaxrl_llm[retriever]'") from error
    began = time.perf_counter()
    index = open_index(args)
    bounds = Bounds(
        topk=args.topk,
        most_topk=args.most_topk,
        queries=args.most_queries,
        characters=args.most_characters,
        waiting=args.most_waiting,
        workers=args.workers,
    )
    seconds = time.perf_counter() - began
    print(f"{len(index):,} documents after {seconds:.1f} s; listening on http://{args.host}:{args.port}", flush=True)
    uvicorn.run(
        application(index.search, bounds),
        host=args.host,
        port=args.port,
        log_level="warning",
        timeout_graceful_shutdown=ENDING_SECONDS,
    )


def open_index(args: argparse.Namespace) -> Index | DenseIndex:
    """Opens the index that the command line names. Raises: UserError."""
    if not args.dense:
        return Index.open(args.corpus)
    try:
        from jaxrl_llm.retriever.dense import DenseIndex, Encoding
    except ImportError as error:
        raise UserError(f"--dense needs {error.name}: pip install 'jaxrl_llm[dense]'") from error
    encoding = Encoding(args.dense, args.pooling, args.query_prefix, args.passage_prefix, args.most_tokens)
    return DenseIndex.open(args.corpus, encoding)


if __name__ == "__main__":
    run_main(main)
